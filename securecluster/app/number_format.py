"""Numbers for reading."""

from __future__ import annotations

from securecluster.models.objectives import OBJECTIVES

METRICS = tuple(kind.metric for kind in OBJECTIVES.values())


def shown(value: float | None, metric: str, unit: str = "") -> str:
    """A metric's value: accuracy with three decimals, others with four digits."""
    if value is None or metric == "accuracy":
        return number(value)
    return f"{value:.4g}{' ' * bool(unit)}{unit}"


def number(value: float | None) -> str:
    """Three decimals, or a dash where there is none."""
    return "–" if value is None else f"{value:.3f}"


def printable(text: str) -> str:
    """Return a text from the data with everything that a terminal would act on spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
