"""A client's own budget of ε over all runs, which refuses releases before they leave.

The ledger of a run is the server's. A client that answers a server which asks for more than its
protocol does, or that takes part in many runs, spends more than any of these ledgers says. So its
owner may give it a file of its own, to which every release is written before it leaves.

The events are those that the server writes, so the two agree; only for noise in shares does the
client count the fewest survivors that it accepts. Runs are numbered apart and not joined by
`Ledger.union`, which takes equal ledgers for one.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import plain, structured
from securecluster.errors import BudgetError, RunFolderError, UsageError
from securecluster.messaging.receipts import Receipts
from securecluster.privacy.dp.ledger import DELTA, Event, Ledger, PaidOnce, Recall, Unit

FORMAT = 1
UNITS = ("client", "example")
OWNER = "owner"  # the one person of the ledgers: a budget is of one client
SECONDS_FOR_LOCK = 30.0


class Budget:
    """Budget of one client over all of its runs, in a file that only its owner can read.

    The file is append-only, and each line has a digest of all lines before it. A line is on the
    disk before what it accounts for leaves, so a client that is killed has spent what it reserved.
    A request that is repeated has the same bits and costs nothing more. The digests guard against
    damage: whoever can write to the file can also remove its last lines.

    Args:
        path: of the file, which is made with the first release; keep it as long as the data.
        epsilon: ε that all runs together may cost.
        delta: δ of that ε.
        unit: what runs protect: "client" or "example" (`dp_unit`). Costs of the two do not add up,
            so each has a file of its own.

    Raises:
        UsageError: a number or a unit out of range, or a file of another unit.
        RunFolderError: a file that cannot be read, or that was changed.
    """

    def __init__(
        self,
        path: Path | str,
        epsilon: float,
        delta: float = DELTA,
        unit: str = "client",
        durable: bool = True,
    ) -> None:
        numeric = isinstance(epsilon, Real) and isinstance(delta, Real)
        if not numeric or not epsilon > 0 or not 0 < delta < 1:
            raise UsageError(
                f"a budget of epsilon = {epsilon!r} and delta = {delta!r} allows nothing that can "
                "be checked: give an epsilon above 0, and a delta between 0 and 1"
            )
        if unit not in UNITS:
            raise UsageError(f"a budget is for the unit client or example, not {unit!r}")
        self.path = Path(path)
        self.epsilon = float(epsilon)
        self.delta = float(delta)
        self.unit: Unit = "client" if unit == "client" else "example"
        self._log = manifest.Log(self.path, mode=atomic_files.OWNER, durable=durable)
        self._ledger = Ledger(unit=self.unit)
        # by run: its number, under which the ledger has the client, and what may be repeated
        self._numbers: dict[str, int] = {}
        self._recalls: dict[int, Recall] = {}
        with self._locked():
            self._read()

    def __repr__(self) -> str:
        return f"Budget({self.path}, epsilon={self.epsilon:g}, delta={self.delta:g}, {self.unit})"

    @property
    def spent(self) -> float:
        """Return ε at δ of everything that was reserved so far."""
        return self._ledger.price(self.delta).epsilon

    @property
    def runs(self) -> list[str]:
        """Return the names of the runs in which something was reserved, as in `reserve`."""
        with self._locked():
            self._read()
            released = {number for event in self._ledger.events for number in event.ids}
            return [name for name, number in self._numbers.items() if number in released]

    def due(self, run: str, receipts: Receipts, method: str, step: int) -> Receipts:
        """Return receipts, where what the client has paid for in the run costs nothing more.

        Args:
            run: name of the run.
            receipts: of a reply.
            method: that was called.
            step: number of the call.
        """
        if not any(receipt.once for receipt in receipts):
            return receipts
        with self._locked():
            self._read()
            number = self._numbers.get(run, -1)
            of_run = [event for event in self._ledger.events if event.ids == (number,)]
        return PaidOnce(of_run).due(number, receipts, method, step)

    def events(self, run: str) -> list[Event]:
        """Return what the client has released in a run.

        Args:
            run: its name, as in `reserve`.
        """
        with self._locked():
            self._read()
            number = self._numbers.get(run, -1)
            return [event for event in self._ledger.events if event.ids == (number,)]

    def reserve(
        self,
        run: str,
        events: Sequence[Event],
        samples: int | None = None,
        admit: Callable[[Sequence[Event]], None] | None = None,
    ) -> None:
        """Write releases to the file, or refuse.

        Args:
            run: name of the run, which differs where noise may: a hash of the configuration and of
                the client's key of noise.
            events: what a reply releases, of one client.
            samples: that the client trains on; None where the price does not depend on it.
            admit: called with those events that are new, before they are written; it may raise.

        Raises:
            BudgetError: all releases with these would cost more than the budget; nothing was
                written.
            RunFolderError: the file cannot be written, or was changed.
        """
        with self._locked():
            self._read()  # another process may have written since
            number = self._number(run)
            numbered = [replace(event, ids=(number,) * len(event.ids)) for event in events]
            new = self._recalls[number].new(numbered)
            if not new:
                return
            ledger = self._with(new, number, samples)
            # pricing takes time, which a ledger without a limit need not spend
            limited = not math.isinf(self.epsilon)
            if limited and (cost := ledger.price(self.delta).epsilon) > self.epsilon:
                raise BudgetError(
                    f"{events[0].method} would bring this client's releases over all runs to "
                    f"epsilon = {cost:.4g} at delta = {self.delta:g}, and its budget is "
                    f"{self.epsilon:g}: the request is refused"
                )
            if admit is not None:
                admit(new)
            if not self._log.mark.size:
                self._log.append([self._header(self.unit).decode()])
            for event in new:
                self._append({"run": run, "samples": samples, "event": plain(event)})
            self._ledger = ledger
            self._recalls[number].learn(new)

    def _number(self, run: str) -> int:
        """Return the number of a run, which is a new one for a run that is not known."""
        number = self._numbers.setdefault(run, len(self._numbers))
        self._recalls.setdefault(number, Recall())
        return number

    def _with(self, events: Sequence[Event], number: int, samples: int | None) -> Ledger:
        """Return the ledger with further events of a run."""
        previous = self._ledger
        ledger = Ledger(
            [*previous.events, *events], dict(previous.samples), dict(previous.names), previous.unit
        )
        ledger.names[number] = OWNER
        if samples is not None:
            ledger.samples[number] = samples
        return ledger

    def _append(self, content: dict[str, Any]) -> None:
        """Append a line, with the digest of all lines before it."""
        self._log.append([_sealed(content, self._log.mark)])

    def _header(self, unit: str) -> bytes:
        """Return the first line of a file, without its end."""
        return _sealed({"budget": FORMAT, "unit": unit}, manifest.EMPTY).encode()

    def _read(self) -> None:
        """Read the file anew if it has other content than this object knows."""
        data = atomic_files.read(self.path) if self.path.exists() else b""
        read_mark = self._log.mark
        if manifest.Mark.of(data[: read_mark.size]) != read_mark:
            raise self._changed()
        if len(data) == read_mark.size:
            return
        self._ledger = Ledger(unit=self.unit)
        self._numbers = {}
        self._recalls = {}
        before = hashlib.sha256()
        # A kill may leave a last line without its end: what it accounts for has not left.
        *lines, torn = data.split(b"\n")
        if not lines and not any(self._header(unit).startswith(torn) for unit in UNITS):
            raise self._changed()  # it is somebody else's file, and would be emptied
        for line in lines:
            self._take(line, before.hexdigest())
            before.update(line + b"\n")
        end_mark = manifest.Mark(len(data) - len(torn), before.hexdigest())
        self._log.restore(end_mark, str)

    def _take(self, line: bytes, before: str) -> None:
        """Read one line.

        Args:
            line: without its end.
            before: digest of the lines before it.
        """
        seal, _, text = line.partition(b" ")
        if seal.decode("ascii", "replace") != manifest.digest(before.encode() + text):
            raise self._changed()
        try:
            content = json.loads(text)
            if "budget" in content:
                self._check_header(content)
                return
            event = structured(content["event"], Event)
            number = self._number(str(content["run"]))
            if event.ids != (number,):
                raise ValueError("ids")
            self._ledger.add(event)
            self._ledger.names[number] = OWNER
            if content["samples"] is not None:
                self._ledger.samples[number] = content["samples"]
            self._recalls[number].learn([event])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._changed() from error

    def _changed(self) -> RunFolderError:
        return RunFolderError(
            f"{self.path} differs from what was written there, and without it nobody knows what "
            "this client has released: restore it from a copy"
        )

    def _check_header(self, content: dict[str, Any]) -> None:
        """Raise an error for a file of another unit, or of a later version."""
        if content["budget"] != FORMAT:
            raise RunFolderError(f"{self.path} is of another version: use the one that wrote it")
        if content["unit"] != self.unit:
            raise UsageError(
                f"{self.path} is a budget for the unit {content['unit']}, whose costs are no part "
                f"of those for the unit {self.unit}: give another file"
            )

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the file, which other processes wait for."""
        lock = self.path.with_name(f"{self.path.name}.lock")
        atomic_files.check_lock(lock)
        held = FileLock(lock, timeout=SECONDS_FOR_LOCK)
        try:
            held.acquire()
        except Timeout:
            raise RunFolderError(
                f"another process has {lock} for more than {SECONDS_FOR_LOCK:.0f} s: stop it"
            ) from None
        except OSError as error:
            raise RunFolderError(
                f"cannot lock {self.path} ({error.strerror}): check its permissions"
            ) from None
        try:
            yield
        finally:
            held.release()


def _sealed(content: Mapping[str, Any], before: manifest.Mark) -> str:
    """Return a line, with the digest of all lines before it.

    Args:
        content: of the line.
        before: mark of the lines before it.
    """
    text = json.dumps(content, allow_nan=False)
    return f"{manifest.digest(before.sha256.encode() + text.encode())} {text}"
