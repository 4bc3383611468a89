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

PAST = 10  # positions from which the next one is predicted
STEP = 10  # seconds between two positions of a leg
# metres from the origin of the network's coordinates: the declared area, which is public
AREA = (10_000.0, 6_200.0)


def mobility() -> Source:
    """Return positions of 400 simulated persons over one day, one every ten seconds.

    The positions are those of the MoST scenario (Codeca and Haerri 2017). A sample is a window
    within one leg: x (n, 10, 2) past positions and y (n, 2) the next one, float32, in units of the
    declared area of 10,000 by 6,200 metres; a few lie slightly outside [0, 1]. Owners are persons,
    whose windows ascend in time. Ten windows are left out before the held-out ones, so that no
    position occurs on both sides; persons with too few windows are left out. Groups are pairs of
    home and work area: a reference for clusters, since the true ones are unknown.

    Raises:
        UsageError: the folder or a file is missing, or a file has another layout.
    """
    data_folder = folder()
    if data_folder is None:
        raise UsageError(
            f"mobility is no set of the hub: set {FOLDER} to a folder that holds "
            "most_mobility/traces.parquet"
        )
    return _mobility(data_folder)


@cache
def _mobility(data_folder: Path) -> Source:
    """Return the data set in a folder."""
    traces = the_file(data_folder, "most_mobility/traces.parquet")
    users = the_file(data_folder, "most_mobility/users.parquet")
    owners = np.array(texts(traces, "user_id"), object)
    times = numbers(traces, "t")
    legs = numbers(traces, "leg")
    coordinates = [numbers(traces, "x"), numbers(traces, "y")]
    positions = np.stack(coordinates, axis=1) / np.array(AREA)
    # all arrays below are sorted by owner, and by time within an owner
    order = np.lexsort((times, owners))
    owners = owners[order]
    runs = _runs(owners, legs[order], times[order])
    # values beyond the range become infinite, which is refused later with the client's name
    with np.errstate(over="ignore"):
        single = positions[order].astype(np.float32)
    x, y, next_row = windows(single, runs)
    # PAST windows before the held-out ones share positions with them and cannot be trained on
    keep = lasting(owners[next_row], PAST)
    if not len(keep):
        raise UsageError(
            f"no user of {traces} has a held-out window of {PAST + 1} positions: download or write "
            "the file again"
        )
    names = owners[next_row][keep]
    groups = _groups(users, names)
    pool = ArrayPool(x[keep], y[keep], names, groups, gap=PAST)
    return Source("mobility", 2, (PAST, 2), pool, objective=Trajectory(metres=AREA))


def windows(
    positions: NDArray[np.float32], runs: Labels
) -> tuple[NDArray[np.float32], NDArray[np.float32], Labels]:
    """Return all windows of successive positions within one run, in order.

    Args:
        positions: in the order of time (n, k).
        runs: number of each position's run (n,), ascending.

    Returns:
        Past positions (w, 10, k), the next position (w, k), and its row (w,).
    """
    if len(positions) <= PAST:
        no_windows = np.empty((0, PAST, positions.shape[1]), np.float32)
        return no_windows, positions[:0], np.empty(0, np.int64)
    # runs ascend, so a window lies in one run if its two ends do
    in_one_run = runs[:-PAST] == runs[PAST:]
    starts = np.flatnonzero(in_one_run)
    next_row = starts + PAST
    all_windows = sliding_window_view(positions, PAST, axis=0)  # (n - 9, k, 10)
    past = all_windows[starts].transpose(0, 2, 1)
    return np.ascontiguousarray(past), positions[next_row], next_row


def _runs(owners: NDArray[Any], legs: NDArray[Any], times: NDArray[Any]) -> Labels:
    """Return the number of each position's run, a part of one leg without a missing position.

    Args:
        owners: of the positions (n,).
        legs: of the positions (n,).
        times: of the positions (n,) in seconds, ascending within an owner.
    """
    new_owner = owners[1:] != owners[:-1]
    new_leg = legs[1:] != legs[:-1]
    missing = np.diff(times) != STEP
    run_numbers = np.cumsum(new_owner | new_leg | missing)
    first = np.zeros(min(1, len(owners)), np.int64)  # none if there is no position
    return np.concatenate([first, run_numbers])


def _groups(path: Path, owners: NDArray[Any]) -> NDArray[Any]:
    """Return the group of each row's owner (n,).

    Args:
        path: of the file of users, with their groups.
        owners: of the rows (n,).

    Raises:
        UsageError: the file lacks an owner.
    """
    users = texts(path, "user_id")
    group_of_user = dict(zip(users, texts(path, "slice"), strict=True))
    names, positions = np.unique(owners, return_inverse=True)
    for name in names:
        if name not in group_of_user:
            raise UsageError(
                f"{path} has no row for user {name!r} of the traces: download or write both files "
                "again"
            )
    groups = np.array([group_of_user[name] for name in names], object)
    return groups[positions]


__all__ = ["AREA", "PAST", "STEP", "mobility", "windows"]
