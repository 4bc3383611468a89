"""The releases of newcomers.

The module has the newcomers' numbers, the file beside a fitted protocol that records what they have
released, and the price of it.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import plain, structured
from securecluster.data import Federation
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.privacy.dp import accounting
from securecluster.privacy.dp.ledger import Event, Ledger

if TYPE_CHECKING:
    from securecluster.protocols.common.base import ClusteringProtocol


from securecluster.errors import FrameError, UpdateError

NAME = "newcomers.jsonl"


@dataclass(frozen=True)
class NewcomerEntry:
    """One event of newcomers, with their names and numbers of samples in the order of its `ids`.

    A number is None where no price depends on it, since what is recorded is for others to see.
    """

    event: Event
    names: tuple[str, ...]
    samples: tuple[int | None, ...]


class NewcomerRecord:
    """The file in which the folder of a fitted protocol keeps what newcomers released.

    Nothing in it is ever removed. Each line ends with a digest of itself and of the line before it,
    so that damage is noticed. The manifest of the folder, which was written before, does not list
    the file.

    Args:
        folder: of a finished run, or what `save` wrote.
        clients: how many the run had; newcomers are numbered after them.
    """

    def __init__(self, folder: Path, clients: int) -> None:
        self.path = folder / NAME
        self._clients = clients
        self._taken = 0  # lines that the ledger has
        self._last = ""  # the digest of the last of them

    def check_writable(self) -> None:
        """Raise RunFolderError where nothing can be appended."""
        there = self.path.exists()
        odd = self.path.is_symlink() or (there and not self.path.is_file())
        if odd or not os.access(self.path if there else self.path.parent, os.W_OK):
            raise RunFolderError(
                f"cannot write {self.path}, where what newcomers release is recorded: make the "
                "folder writable, and remove what is no file there"
            )

    def update(self, ledger: Ledger) -> None:
        """Add to a ledger what was recorded since the last time, by this process or another one.

        Raises:
            RunFolderError: the file differs from what was written.
        """
        entries, digests, _ = self._read()
        self._take(entries, digests, ledger)

    def _take(
        self, entries: Sequence[NewcomerEntry], digests: Sequence[str], ledger: Ledger
    ) -> None:
        """Add the entries of the file to a ledger that it has not taken yet.

        A file that another process has begun anew, after a save, is taken from its start.
        """
        begun = ["", *digests]
        same = self._taken < len(begun) and begun[self._taken] == self._last
        for entry in entries[self._taken if same else 0 :]:
            people = zip(entry.names, entry.samples, strict=True)
            numbers = [number_of(ledger, self._clients, name, n) for name, n in people]
            ledger.add(replace(entry.event, ids=tuple(numbers)))
        self._taken, self._last = len(entries), begun[-1]

    def lacking(self, ledger: Ledger) -> bool:
        """Return whether newcomers released something according to the file that a ledger lacks.

        Raises:
            RunFolderError: the file differs from what was written.
        """
        recorded = Ledger()
        NewcomerRecord(self.path.parent, 0).update(recorded)
        return bool(newcomers_of(recorded, 0) - newcomers_of(ledger, self._clients))

    def append(self, events: Sequence[Event], ledger: Ledger) -> None:
        """Record the events of one call in one write, which is on the disk afterwards.

        What another process recorded since the last update is added to the ledger first.

        Args:
            ledger: has the names and numbers of samples of the newcomers, and not the events yet.
        """
        entries, digests, whole = self._read()
        self._take(entries, digests, ledger)
        last = self._last
        lines = []
        for event in events:
            content = {
                "event": plain(event),
                "names": [ledger.names[i] for i in event.ids],
                "samples": [ledger.samples.get(i) for i in event.ids],
            }
            last = _digest(last, content)
            lines.append(json.dumps({**content, "sha256": last}))
        if self.path.is_file() and self.path.stat().st_size > whole:
            kept = atomic_files.read(self.path)[:whole]  # without a line that a kill cut short
            atomic_files.write_atomic(self.path, kept, durable=True)
        atomic_files.append_line(self.path, "\n".join(lines), durable=True)
        self._taken, self._last = len(entries) + len(lines), last

    def _read(self) -> tuple[list[NewcomerEntry], list[str], int]:
        """Return the entries, their lines' digests, and the length of all whole lines in bytes."""
        data = atomic_files.read(self.path) if self.path.is_file() else b""
        whole = data.rfind(b"\n") + 1
        entries: list[NewcomerEntry] = []
        digests: list[str] = []
        last = ""
        for content in manifest.read_lines(self.path, data[:whole], json.loads):
            entry, found = self._entry(content)
            last = _digest(last, content)
            if found != last:
                raise manifest.damaged(self.path)
            entries.append(entry)
            digests.append(last)
        return entries, digests, whole

    def _entry(self, content: Any) -> tuple[NewcomerEntry, str]:
        try:
            found = str(content.pop("sha256"))
            return structured(content, NewcomerEntry), found
        except (ValueError, KeyError, TypeError, AttributeError):
            raise manifest.damaged(self.path) from None


class NewcomerReleases(NamedTuple):
    """One release of a newcomer, by its name: numbers differ from process to process."""

    call: Event
    name: str | None
    samples: int | None
    digest: str


def newcomers_of(ledger: Ledger, clients: int) -> Counter[NewcomerReleases]:
    """Return how often each release of newcomers is in a ledger.

    Args:
        clients: of the run; newcomers are numbered after them.
    """
    found: Counter[NewcomerReleases] = Counter()
    for event in ledger.events:
        for call, i, digest in event.releases():
            if i >= clients:
                found[
                    NewcomerReleases(call, ledger.names.get(i), ledger.samples.get(i), digest)
                ] += 1
    return found


def _digest(before: str, content: Mapping[str, Any]) -> str:
    return manifest.digest((before + json.dumps(content, sort_keys=True)).encode())


def number_of(ledger: Ledger, clients: int, name: str, samples: int | None) -> int:
    """Return a newcomer's number, which its keys follow from.

    It is the next free one where the newcomer was not seen before. The same newcomer has the same
    keys whenever it is asked. One that is called like a client of the run is the same person to the
    ledger, and has a number of its own.

    Args:
        ledger: keeps the numbers.
        clients: of the run.
        samples: that it trains on, where its price depends on them. With others it gets another
            number.
    """
    for i, known in ledger.names.items():
        if i >= clients and known == name and ledger.samples.get(i) == samples:
            return i
    found = max(clients, 1 + max(ledger.names, default=-1))
    ledger.names[found] = name
    if samples is not None:
        ledger.samples[found] = samples
    return found


def training_sizes(protocol: ClusteringProtocol, newcomers: Federation) -> list[int]:
    """Return how many samples each newcomer trains on, without those kept aside."""
    sizes = [len(shard.y) for shard in newcomers.shards]
    return [n - math.floor(protocol.validation_share * n) for n in sizes]


def samples_batches(protocol: ClusteringProtocol, method: str) -> bool:
    """Return whether clients train with DP-SGD on sampled batches to answer a call."""
    config = protocol.kept_.learned.config
    if not (protocol.per_example and config["noise"]):
        return False
    release = getattr(getattr(protocol.client, method, None), "__release__", None)
    plans = protocol.trainings(protocol.training(config), config)
    plan = None if release is None else plans.get(release.trains)
    return plan is not None and plan.batch_size is not None


def check_sizes(protocol: ClusteringProtocol, names: Sequence[str], sizes: Sequence[int]) -> None:
    """Refuse newcomers whose local training would cost more than that of the run's clients.

    Args:
        protocol: as it was fitted, with DP-SGD.
        names: of the newcomers.
        sizes: how many samples each trains on.

    Raises:
        UsageError: too few samples for the run's noise.
    """
    config = protocol.kept_.learned.config
    least = min(config["sizes"])
    for name, n in zip(names, sizes, strict=True):
        if n < least:
            raise UsageError(
                f"newcomer {name!r} has {n} training samples, fewer than any client of the run "
                f"({least}), so its batches would be a larger share of them and cost more ε: give "
                f"it at least {least}, or leave it out"
            )
    if protocol.target_epsilon is None:
        return
    for name, n in zip(names, sizes, strict=True):
        if n not in config["sizes"] and _bound(protocol, n) > protocol.target_epsilon:
            raise UsageError(
                f"newcomer {name!r} has {n} training samples, which no client of the run had, and "
                "in the run's batches they may cost more than target_epsilon = "
                f"{protocol.target_epsilon:g}: give it as many as a client of the run, or leave it "
                "out"
            )


def _bound(protocol: ClusteringProtocol, samples: int) -> float:
    """Return ε of all that a client with so many samples releases in a whole run.

    The noise is that of the run.
    """
    config = protocol.kept_.learned.config
    history = protocol.history(config["noise"], samples, protocol.training(config))
    return accounting.epsilon(history, config["delta"]).epsilon


def warn_if_dear(protocol: ClusteringProtocol, ledger: Ledger, names: Sequence[str]) -> None:
    """Warn where newcomers have released more than `target_epsilon` allows.

    Args:
        protocol: as it was fitted.
        ledger: of the run and all its newcomers.
        names: of the newcomers that were just asked.
    """
    target = protocol.target_epsilon
    if target is None:
        return
    asked = set(names) & set(ledger.names.values())  # the others released nothing
    price = ledger.of(asked).price(protocol.delta)
    if price.epsilon <= target or price.client is None:
        return
    name = ledger.names[price.client]
    warnings.warn(
        f"newcomer {name!r} has now released ε = {price.epsilon:.4g}, more than target_epsilon = "
        f"{target:g}: what clients of one name release adds up over calls of predict and the run, "
        "so ask each newcomer once, or again with the same data only",
        SecureClusterWarning,
        stacklevel=3,
    )


def check_newcomers(to: Sequence[int], ids: Sequence[int]) -> None:
    """Raise UpdateError for newcomers `to` that did not reply.

    Nothing is known of them, so they are placed nowhere.
    """
    silent = [i for i in to if i not in ids]
    if silent:
        raise UpdateError(
            f"newcomer(s) {', '.join(map(str, silent[:5]))} do not reply: ask them again later"
        )


def check_offered(
    ids: Sequence[int], choices: Sequence[int], offered: Sequence[int]
) -> dict[int, int]:
    """Return what each client chose, by its number.

    Raises:
        FrameError: a client chose what it was not offered.
    """
    found = dict(zip(ids, choices, strict=True))
    wrong = [i for i, choice in found.items() if choice not in offered]
    if wrong:
        raise FrameError(
            f"client {wrong[0]} chose {found[wrong[0]]}, which it was not offered: its reply is "
            "refused"
        )
    return found
