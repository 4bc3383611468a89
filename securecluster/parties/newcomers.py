"""Releases of newcomers: their numbers, the file that records the releases, and their cost.

Newcomers join the run's own network, under its configuration and numbered after its clients, one of
which hands them the mask seed. A newcomer keeps its number, hence its keys, as long as its name is
the same and, where its cost depends on it, its number of samples; so a repeated request gets the
same bits. Each `join` starts from the end of the run, and adds to its ledger alone.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import plain, structured
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.parties.method import Method
from securecluster.privacy.dp import accounting
from securecluster.privacy.dp.ledger import Event, Ledger

if TYPE_CHECKING:
    from securecluster.data.federation import Federation

NAME = "newcomers.jsonl"
KEPT = "newcomers.json"  # what newcomers keep of their own data, and their clusters


@dataclass(frozen=True)
class NewcomerEntry:
    """One event of newcomers, with their names and numbers of samples."""

    event: Event
    names: tuple[str, ...]  # in the order of the event's ids
    # None where no price depends on the number: the record has no more than its prices need
    samples: tuple[int | None, ...]


class NewcomerRecord:
    """File in the folder of a fitted protocol that records the releases of newcomers.

    Entries are only ever appended. Each line ends with a digest of itself and of the previous line,
    so that damage is detected. The folder's manifest was written earlier and does not list the
    file.

    Args:
        folder: of a finished run, or one that `save` wrote.
        clients: number of clients in the run; newcomers have the numbers after them.
    """

    def __init__(self, folder: Path, clients: int) -> None:
        self.path = folder / NAME
        self._clients = clients
        self._entries_read = 0  # number of entries that the ledger contains
        self._last_digest = ""  # of the last of them

    def check_writable(self) -> None:
        """Raise RunFolderError where no line can be appended."""
        exists = self.path.exists()
        not_a_file = self.path.is_symlink() or (exists and not self.path.is_file())
        target = self.path if exists else self.path.parent
        if not_a_file or not os.access(target, os.W_OK):
            raise RunFolderError(
                f"cannot write {self.path}, where what newcomers release is recorded: make the "
                "folder writable, and remove what is no file there"
            )

    def update(self, ledger: Ledger) -> None:
        """Add entries to a ledger that this or another process has written since the last update.

        Args:
            ledger: of the run and all its newcomers; changed in place.

        Raises:
            RunFolderError: the file differs from what was written.
        """
        entries, digests, _ = self._read()
        self._add_new(entries, digests, ledger)

    def _add_new(
        self, entries: Sequence[NewcomerEntry], digests: Sequence[str], ledger: Ledger
    ) -> None:
        """Add the entries of the file to a ledger that does not contain them yet.

        Args:
            entries: all entries of the file.
            digests: of their lines.
            ledger: changed in place.
        """
        chain = ["", *digests]
        # A save by another process starts a new file, which is then read from its start.
        new_file = self._entries_read >= len(chain)
        if not new_file:
            new_file = chain[self._entries_read] != self._last_digest
        first_new = 0 if new_file else self._entries_read
        for entry in entries[first_new:]:
            numbers = []
            for name, samples in zip(entry.names, entry.samples, strict=True):
                numbers.append(number_of(ledger, self._clients, name, samples))
            ledger.add(replace(entry.event, ids=tuple(numbers)))
        self._entries_read = len(entries)
        self._last_digest = chain[-1]

    def lacking(self, ledger: Ledger) -> bool:
        """Return whether the file contains releases of newcomers that a ledger lacks.

        Args:
            ledger: of the run and some newcomers.

        Raises:
            RunFolderError: the file differs from what was written.
        """
        recorded = Ledger()
        NewcomerRecord(self.path.parent, 0).update(recorded)
        missing = newcomers_of(recorded, 0) - newcomers_of(ledger, self._clients)
        return bool(missing)

    def append(self, events: Sequence[Event], ledger: Ledger) -> None:
        """Record the events of one call in one write, and wait until it is on the disk.

        Entries that another process has written since the last update are added to the ledger
        first.

        Args:
            events: the newcomers' releases in the call.
            ledger: has the names and numbers of samples of the newcomers, and not the events yet.
        """
        entries, digests, complete = self._read()
        # The chain of digests continues from the last line, whichever process wrote it.
        self._add_new(entries, digests, ledger)
        digest = self._last_digest
        lines = []
        for event in events:
            content = {
                "event": plain(event),
                "names": [ledger.names[i] for i in event.ids],
                "samples": [ledger.samples.get(i) for i in event.ids],
            }
            digest = _digest(digest, content)
            lines.append(json.dumps({**content, "sha256": digest}))
        if self.path.is_file() and self.path.stat().st_size > complete:
            # The last line is incomplete where a process was killed while it wrote.
            complete_lines = atomic_files.read(self.path)[:complete]
            atomic_files.write_atomic(self.path, complete_lines, durable=True)
        atomic_files.append_line(self.path, "\n".join(lines), durable=True)
        self._entries_read = len(entries) + len(lines)
        self._last_digest = digest

    def _read(self) -> tuple[list[NewcomerEntry], list[str], int]:
        """Read the complete lines of the file.

        Returns:
            The entries, their lines' digests, and the length of the lines in bytes.

        Raises:
            RunFolderError: the file differs from what was written.
        """
        data = b""
        if self.path.is_file():
            data = atomic_files.read(self.path)
        complete = data.rfind(b"\n") + 1
        entries: list[NewcomerEntry] = []
        digests: list[str] = []
        digest = ""
        for content in manifest.read_lines(self.path, data[:complete], json.loads):
            entry, recorded_digest = self._entry(content)
            digest = _digest(digest, content)
            if recorded_digest != digest:
                raise manifest.damaged(self.path)
            entries.append(entry)
            digests.append(digest)
        return entries, digests, complete

    def _entry(self, content: Any) -> tuple[NewcomerEntry, str]:
        """Return the entry of a line and its digest, which is removed from the content."""
        try:
            digest = str(content.pop("sha256"))
            return structured(content, NewcomerEntry), digest
        except (ValueError, KeyError, TypeError, AttributeError):
            raise manifest.damaged(self.path) from None


class NewcomerReleases(NamedTuple):
    """One release of a newcomer, by its name, since numbers differ between processes."""

    call: Event
    name: str | None
    samples: int | None
    digest: str


def newcomers_of(ledger: Ledger, clients: int) -> Counter[NewcomerReleases]:
    """Return how often a ledger contains each release of newcomers.

    Args:
        ledger: of the run and all its newcomers.
        clients: number of clients in the run; newcomers have the numbers after them.
    """
    counts: Counter[NewcomerReleases] = Counter()
    for event in ledger.events:
        for call, i, digest in event.releases():
            if i < clients:
                continue
            name = ledger.names.get(i)
            samples = ledger.samples.get(i)
            release = NewcomerReleases(call, name, samples, digest)
            counts[release] += 1
    return counts


def _digest(previous: str, content: Mapping[str, Any]) -> str:
    """Return the digest of a line, which depends on that of the previous line."""
    return manifest.digest((previous + json.dumps(content, sort_keys=True)).encode())


def number_of(ledger: Ledger, clients: int, name: str, samples: int | None) -> int:
    """Return a newcomer's number, from which its keys are derived.

    The same newcomer has the same number, hence the same keys, in every call. A new one gets the
    next free number. A newcomer with the name of a client of the run is the same person in the
    ledger, but has a number of its own.

    Args:
        ledger: stores the numbers.
        clients: number of clients in the run.
        name: of the newcomer.
        samples: number of samples that it trains on, where its price depends on it. With another
            one it gets another number.
    """
    for i, recorded_name in ledger.names.items():
        if i < clients or recorded_name != name:
            continue
        if ledger.samples.get(i) == samples:
            return i
    number = max(clients, 1 + max(ledger.names, default=-1))
    ledger.names[number] = name
    if samples is not None:
        ledger.samples[number] = samples
    return number


def samples_batches(protocol: Method, config: Mapping[str, Any], method: str) -> bool:
    """Return whether clients train with DP-SGD on sampled batches to answer a call.

    Args:
        protocol: with the hyper-parameters of the run.
        config: of the run.
        method: name of the client method.
    """
    if not (protocol.privacy.per_example and config["noise"]):
        return False
    release = getattr(getattr(protocol.client, method, None), "__release__", None)
    plans = protocol.trainings(protocol.training.usual(protocol, config), config)
    if release is None:
        return False
    plan = plans.get(release.trains)
    return plan is not None and plan.batch_size is not None


def check_sizes(
    protocol: Method, config: Mapping[str, Any], newcomers: Federation, sizes: Sequence[int]
) -> None:
    """Refuse newcomers whose local training would cost more than that of the run's clients.

    Args:
        protocol: with DP-SGD.
        config: of the run.
        newcomers: the clients and their data.
        sizes: the number of samples that each trains on.

    Raises:
        UsageError: too few samples for the run's noise.
    """
    minimum = min(config["sizes"])
    for name, n in zip(newcomers.names, sizes, strict=True):
        if n < minimum:
            raise UsageError(
                f"newcomer {name!r} has {n} training samples, fewer than any client of the run "
                f"({minimum}), so its batches would be a larger share of them and cost more ε: "
                f"give it at least {minimum}, or leave it out"
            )
    target = protocol.privacy.target_epsilon
    if target is None:
        return
    from securecluster.parties.dry_run import run_releases

    releases = run_releases(protocol, newcomers.facts, int(config["clients"]))
    for name, n in zip(newcomers.names, sizes, strict=True):
        # The run's noise was chosen for its clients' numbers of samples. For
        # any other number the cost is computed anew.
        if n in config["sizes"]:
            continue
        steps = releases.plan(config["noise"], n).steps
        if accounting.epsilon(steps, config["delta"]).epsilon > target:
            raise UsageError(
                f"newcomer {name!r} has {n} training samples, which no client of the run had, and "
                "in the run's batches they may cost more than target_epsilon = "
                f"{target:g}: give it as many as a client of the run, or leave it out"
            )


def warn_of_cost(protocol: Method, ledger: Ledger, names: Sequence[str]) -> None:
    """Warn where newcomers have released more than `target_epsilon` allows.

    Args:
        protocol: as it was fitted.
        ledger: of the run and all its newcomers.
        names: of the newcomers in this call.
    """
    target = protocol.privacy.target_epsilon
    if target is None:
        return
    # Names that are not in the ledger released nothing.
    released = set(names) & set(ledger.names.values())
    price = ledger.of(released).price(protocol.privacy.delta)
    if price.epsilon <= target or price.client is None:
        return
    name = ledger.names[price.client]
    warnings.warn(
        f"newcomer {name!r} has now released ε = {price.epsilon:.4g}, more than target_epsilon = "
        f"{target:g}: what clients of one name release adds up over calls of join and the run, "
        "so ask each newcomer once, or again with the same data only",
        SecureClusterWarning,
        stacklevel=3,
    )
