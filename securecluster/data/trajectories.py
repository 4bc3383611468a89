"""Trajectories: simulated daily traces of people in Monaco."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from securecluster.data.dataset import Source
from securecluster.data.locations import FOLDER, folder, numbers, texts, the_file
from securecluster.data.pools import ArrayPool, Labels, lasting
from securecluster.errors import UsageError
from securecluster.models.objectives import Trajectory

PAST = 10
"""positions that a prediction is made from, ten seconds apart"""
STEP = 10
"""seconds between two samples of a leg"""
AREA = (10_000.0, 6_200.0)
"""metres, from the origin of the network's coordinates: the declared area, which is public"""


def mobility() -> Source:
    """Return positions of 400 simulated persons over one day, one each ten seconds.

    They are those of the MoST scenario (Codeca and Haerri 2017). A sample is a window within one
    leg: x (n, 10, 2) past positions and y (n, 2) the next one, float32, in units of the declared
    area of 10,000 by 6,200 metres; a few lie a hair outside [0, 1]. Owners are persons, their
    windows ascend in time, and ten are left out before the held-out ones, so that no position lies
    on both sides; persons with too few windows for that are left out here. Groups are pairs of home
    and work area: a reference to compare clusters with, since nobody knows the true ones.

    Raises:
        UsageError: the folder or a file is missing, or a file has another layout.
    """
    where = folder()
    if where is None:
        raise UsageError(
            f"mobility is no set of the hub: set {FOLDER} to a folder that holds "
            "most_mobility/traces.parquet"
        )
    return _mobility(where)


@cache
def _mobility(where: Path) -> Source:
    traces = the_file(where, "most_mobility/traces.parquet")
    users = the_file(where, "most_mobility/users.parquet")
    owners = np.array(texts(traces, "user_id"), object)
    times = numbers(traces, "t")
    legs = numbers(traces, "leg")
    positions = np.stack([numbers(traces, "x"), numbers(traces, "y")], axis=1) / np.array(AREA)
    # all that follows is ordered by owner, and by time within an owner
    order = np.lexsort((times, owners))
    owners, times, legs = owners[order], times[order], legs[order]
    with np.errstate(over="ignore"):  # what becomes infinite is refused by the client's name later
        single = positions[order].astype(np.float32)
    x, y, next_row = windows(single, _runs(owners, legs, times))
    keep = lasting(owners[next_row], PAST)
    if not len(keep):
        raise UsageError(
            f"no user of {traces} has a held-out window of {PAST + 1} positions: download or write "
            "the file again"
        )
    names = owners[next_row][keep]
    pool = ArrayPool(x[keep], y[keep], names, _groups(users, names), gap=PAST)
    return Source("mobility", 2, (PAST, 2), pool, objective=Trajectory(metres=AREA))


def windows(
    positions: NDArray[np.float32], runs: Labels
) -> tuple[NDArray[np.float32], NDArray[np.float32], Labels]:
    """Return all windows of successive positions (n, k) that lie in one run (n,), in order.

    Returns:
        past positions (w, 10, k), the next one (w, k), and its row (w,).
    """
    if len(positions) <= PAST:
        no_windows = np.empty((0, PAST, positions.shape[1]), np.float32)
        return no_windows, positions[:0], np.empty(0, np.int64)
    starts = np.flatnonzero(runs[:-PAST] == runs[PAST:])
    next_row = starts + PAST
    past = sliding_window_view(positions, PAST, axis=0)[starts]  # (w, k, 10)
    return np.ascontiguousarray(past.transpose(0, 2, 1)), positions[next_row], next_row


def _runs(owners: NDArray[Any], legs: NDArray[Any], times: NDArray[Any]) -> Labels:
    """Return a number (n,) for each stretch of one leg without a missing sample."""
    new = (owners[1:] != owners[:-1]) | (legs[1:] != legs[:-1]) | (np.diff(times) != STEP)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(new)])[: len(owners)]


def _groups(path: Path, owners: NDArray[Any]) -> NDArray[Any]:
    """Return the group of each row's owner, from the file of users."""
    group = dict(zip(texts(path, "user_id"), texts(path, "slice"), strict=True))
    names, number = np.unique(owners, return_inverse=True)
    for name in names:
        if name not in group:
            raise UsageError(
                f"{path} has no row for user {name!r} of the traces: download or write both files "
                "again"
            )
    return np.array([group[name] for name in names], object)[number]


__all__ = ["AREA", "PAST", "STEP", "mobility", "windows"]
