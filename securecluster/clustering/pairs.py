"""The bound on comparisons of all pairs, whose time and memory grow with the square of the rows.

Whoever has the memory and the patience sets SECURECLUSTER_MOST_PAIRED to a larger number of rows.
It is a matter of the machine and not of a run: results are the same.
"""

from __future__ import annotations

import os

from securecluster.errors import UsageError

VARIABLE = "SECURECLUSTER_MOST_PAIRED"
MOST_PAIRED = 20_000  # rows: 3 GiB a matrix


def check_pairs(rows: int, instead: str = "") -> None:
    """Check that there are not too many rows to compare all pairs of them.

    Args:
        rows: m.
        instead: what else the user can do, to begin the advice with.

    Raises:
        UsageError: more rows than the bound allows, or a bound that is no number.
    """
    limit = os.environ.get(VARIABLE, str(MOST_PAIRED))
    if not limit.isdecimal():
        raise UsageError(f"{VARIABLE} is {limit!r}: give a number of clients, or unset it")
    if rows <= int(limit):
        return
    gib = 8 * rows**2 / 2**30  # float64
    advice = f"set {VARIABLE}={rows} to compare them all the same"
    if instead:
        advice = f"{instead}, or {advice}"
    raise UsageError(
        f"comparing all pairs of {rows:,} clients takes {gib:,.0f} GiB a matrix, and time that "
        f"grows with its size: {advice}"
    )
