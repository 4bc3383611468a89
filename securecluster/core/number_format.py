"""Number formatting."""

from __future__ import annotations

from collections.abc import Sequence

NONE = "–"  # in place of a number
MOST_LABELS = 20  # clusters that a sentence names one by one


def shown(value: float | None, metric: str, unit: str = "") -> str:
    """Return a metric's value as text.

    Args:
        value: None where there is none.
        metric: its name; accuracy has three decimals, any other metric four significant digits.
        unit: of the metric; empty where it has none.
    """
    if value is None or metric == "accuracy":
        return number(value)
    if unit:
        return f"{value:.4g} {unit}"
    return f"{value:.4g}"


def number(value: float | None) -> str:
    """Return a number with three decimals, or a dash for None.

    Args:
        value: a score in [0, 1], or None.
    """
    return fixed(value, 3)


def fixed(value: float | None, digits: int) -> str:
    """Return a number with some decimals, or a dash for None.

    Args:
        value: None where there is none.
        digits: decimals.
    """
    if value is None:
        return NONE
    return f"{value:.{digits}f}"


def times(count: int) -> str:
    """Return how often something happened: "once", "2 times".

    Args:
        count: of its occurrences.
    """
    if count == 1:
        return "once"
    return f"{count} times"


def enumerated(word: str, labels: Sequence[int]) -> str:
    """Return labels after the word for them: "cluster 3", "clusters 1, 2".

    Args:
        word: in the singular.
        labels: in their order; of more than `MOST_LABELS` only the first and their number appear.
    """
    if len(labels) != 1:
        word += "s"
    names = ", ".join(str(label) for label in labels[:MOST_LABELS])
    if len(labels) > MOST_LABELS:
        names += f" … ({len(labels)})"
    return f"{word} {names}"


def printable(text: str) -> str:
    """Return a text in which characters that are not printable are escape sequences.

    Args:
        text: from the data, whose control characters a terminal would act on.
    """
    escaped = []
    for character in text:
        if character.isprintable():
            escaped.append(character)
        else:
            escaped.append(repr(character)[1:-1])  # without the quotes
    return "".join(escaped)
