"""How many runs a party keeps in which nothing has left it yet.

A server may propose as many runs as it likes, and each makes a folder. Runs in which something was
released are never forgotten. Of the others a party keeps a bounded number, first of those that it
agreed to and was asked nothing in, and again of those that it was asked something in. A flood of
runs displaces its own: who came before it keeps its place for a while, and who comes after it finds
one.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path, PurePath

from securecluster.core import atomic_files
from securecluster.core.atomic_files import Own

MOST_IDLE = 64
SECONDS_FOR_FIRST = 3600.0  # how long the first half of them keep their place


def forget_surplus(
    party: Path, own_files: Own, runs: Iterable[str], files: tuple[str, ...]
) -> None:
    """Remove runs beyond those that a party keeps.

    Args:
        party: its folder.
        own_files: what is the party's there.
        runs: names of the folders of runs in which nothing was released.
        files: names of what a run has there; the last one says since when it waits.
    """
    since: list[tuple[int, str]] = []
    for run in runs:
        with suppress(FileNotFoundError):
            since.append(((party / run / files[-1]).stat().st_mtime_ns, run))
    waiting = sorted(since)
    while len(waiting) > MOST_IDLE:
        oldest, _ = waiting[0]
        is_recent = time.time() - oldest / 1e9 < SECONDS_FOR_FIRST
        retained_count = MOST_IDLE // 2 if is_recent else 0
        _, run = waiting.pop(retained_count)
        _forget(party, own_files, run, files)


def _forget(party: Path, own_files: Own, run: str, files: tuple[str, ...]) -> None:
    """Remove a run's files, and its folder unless somebody has put others there."""
    atomic_files.remove_half_written(party / run, own_files)
    for name in files:
        with suppress(FileNotFoundError):
            atomic_files.remove_below(party, PurePath(run, name), own_files)
    with suppress(OSError):
        atomic_files.remove_below(party, PurePath(run), own_files)
