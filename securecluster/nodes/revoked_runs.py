"""Runs that the owner of a party has taken it out of, for good.

A line of `revoked.jsonl` comes first, and is on the disk before anything is removed. Then keys and
state of the run go; the ledger of what was released keeps every line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path, PurePath

from securecluster.core import atomic_files, manifest
from securecluster.core.atomic_files import Own
from securecluster.errors import UsageError

NAME = "revoked.jsonl"
SHOWN = 8  # runs, of those that a sentence lists


class RevokedRuns:
    """Fingerprints of the runs that a party's owner has revoked.

    Args:
        folder: of the party.
        durable: what is written outlives a power cut.
    """

    def __init__(self, folder: Path, durable: bool = True) -> None:
        self._folder = folder
        self._durable = durable

    def read(self) -> dict[str, str]:
        """Return by run when it was revoked.

        Raises:
            RunFolderError: the file cannot be read, or was changed.
        """
        path = self._folder / NAME
        if not path.exists():
            return {}

        def revoked(line: str) -> tuple[str, str]:
            content = json.loads(line)
            return str(content["run"]), str(content["at"])

        return dict(manifest.read_lines(path, atomic_files.read(path), revoked))

    def add(self, run: str) -> None:
        """Write down that a run is revoked, so that it is on the disk when this returns.

        Args:
            run: its fingerprint.
        """
        now = datetime.now(UTC).isoformat(timespec="seconds")
        line = json.dumps({"run": run, "at": now})
        atomic_files.append_line(
            self._folder / NAME, line, atomic_files.OWNER, durable=self._durable
        )

    def erase(self, folder: str, own_files: Own) -> None:
        """Remove what a party keeps of a run, but for its ledger and for files of somebody else.

        Args:
            folder: name of the run's folder.
            own_files: what is the party's.

        Raises:
            OSError: a file cannot be removed.
        """
        run_path = self._folder / folder
        if not run_path.is_dir() or run_path.is_symlink():
            return
        for path in sorted(run_path.iterdir()):
            name = PurePath(folder, path.name)
            if own_files.has(name):
                atomic_files.remove_below(self._folder, name, own_files)
        with suppress(OSError):  # somebody has put a file there
            atomic_files.remove_below(self._folder, PurePath(folder), own_files)


def named(text: str, agreed: Iterable[str], revoked: Iterable[str]) -> str:
    """Return the one run whose fingerprint begins with a text.

    Args:
        text: as its owner gives it, with or without the `run-` of its folder.
        agreed: fingerprints of runs that the party takes part in.
        revoked: of those that were revoked.

    Raises:
        UsageError: none or several begin so.
    """
    start = text.strip().lower().removeprefix("run-")
    living = sorted(set(agreed) - set(revoked))
    every = [run for run in (*living, *sorted(revoked)) if start and run.startswith(start)]
    if len(every) == 1:
        return every[0]
    if every:
        raise UsageError(f"several runs begin with {start!r}: {_listed(every)}; give more of it")
    have = f"of {_listed(living)}" if living else "it takes part in no run"
    raise UsageError(
        f"this node has agreed to no run that begins with {text.strip()!r}: give the fingerprint, "
        f"{have}"
    )


def _listed(runs: list[str]) -> str:
    """Return runs as a sentence lists them."""
    more = f" and {len(runs) - SHOWN} more" if len(runs) > SHOWN else ""
    return ", ".join(runs[:SHOWN]) + more
