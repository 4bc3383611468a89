"""Number formatting."""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.models.objectives import OBJECTIVES

METRICS = tuple(kind.metric for kind in OBJECTIVES.values())
MOST_LABELS = 20  # clusters that a sentence names one by one


def shown(value: float | None, metric: str, unit: str = "") -> str:
    """Return a metric's value: accuracy with three decimals, others with four digits."""
    if value is None or metric == "accuracy":
        return number(value)
    if unit:
        return f"{value:.4g} {unit}"
    return f"{value:.4g}"


def number(value: float | None) -> str:
    """Return three decimals, or a dash where there is no value."""
    return "–" if value is None else f"{value:.3f}"


def times(count: int) -> str:
    """Return how often something happened: "once", "2 times"."""
    return "once" if count == 1 else f"{count} times"


def enumerated(word: str, labels: Sequence[int]) -> str:
    """Return numbered things with the word for them: "cluster 3", "clusters 1, 2"."""
    if len(labels) != 1:
        word += "s"
    names = ", ".join(str(label) for label in labels[:MOST_LABELS])
    if len(labels) > MOST_LABELS:
        names += f" … ({len(labels)})"
    return f"{word} {names}"


def printable(text: str) -> str:
    """Return a text from the data with everything that a terminal would act on spelled out."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
