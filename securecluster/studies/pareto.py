"""Which lines of a sweep no other line beats in score, bytes and ε together (Pareto)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

Row = dict[str, Any]


class Costs(NamedTuple):
    """Costs of a line of a summary; less is better in each."""

    score: float
    sent: float
    epsilon: float

    def dominates(self, other: Costs) -> bool:
        """Return whether no cost is above the other's, and one is below it.

        Args:
            other: of another line.
        """
        pairs = list(zip(self, other, strict=True))
        return all(cost <= other_cost for cost, other_cost in pairs) and self != other


def efficient(rows: Sequence[Row], score: str, higher: bool = True) -> list[bool | None]:
    """Return for each line whether no other line dominates it.

    A line is dominated by another one with at least its score, at most its bytes up and down and at
    most its ε, one of them strictly. Of a sweep over ε this is the target, whatever a run spends of
    it: by the tolerance of the search for its noise, ε of equal targets differ, and what releases
    nothing trains with the target's noise all the same.

    Args:
        rows: of a summary.
        score: column with the means that are compared.
        higher: True if a larger score is better.

    Returns:
        None for a line without runs or without this score.
    """
    costs = [_costs(row, score, higher) for row in rows]
    priced = [cost for cost in costs if cost is not None]
    marks: list[bool | None] = []
    for cost in costs:
        if cost is None:
            marks.append(None)
        else:
            marks.append(not any(other.dominates(cost) for other in priced))
    return marks


def _costs(row: Row, score: str, higher: bool) -> Costs | None:
    """Return what a line costs, None where it has no such score.

    Args:
        row: of a summary.
        score: column.
        higher: True if a larger score is better.
    """
    if row[score] is None or row["up"] is None:
        return None
    value = float(row[score])
    if higher:
        value = -value
    epsilon = row["target_epsilon"]
    if epsilon is None:
        epsilon = row["epsilon"]
    return Costs(value, float(row["up"]) + float(row["down"]), float(epsilon))
