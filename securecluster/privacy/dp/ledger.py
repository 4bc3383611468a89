"""What a run released, event by event, and the ε of all of it together: for each client the union
of its events, priced once.

Clients of one name are one person. Ledgers of several runs on the same clients are joined by
`Ledger.union`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, overload

from securecluster.errors import UsageError
from securecluster.privacy.dp import accounting
from securecluster.privacy.dp.accounting import Step

Mechanism = Literal["exact", "gaussian", "dp-sgd", "free"]
Relation = Literal["add/remove", "replace"]
DELTA = 1e-5
CHOICE = "choice"  # in place of a digest: two choices may be equal though their noise is not


@dataclass(frozen=True)
class Event:
    """One field of the replies to one call.

    Args:
        ids: the clients that replied.
        mechanism: "exact": nothing random was added. "gaussian": noise of `noise_multiplier` times
            the sensitivity. "dp-sgd": a local training. "free": made from what was released before,
            or taken as public.
        replace: the sensitivity under replacing over that under adding or removing, of "gaussian";
            it is 2 for "dp-sgd".
        batch: expected samples in a step of dp-sgd; None: all of a client's, with q = 1.
        epochs: of dp-sgd; ceil(n / batch) steps each.
        kept: nothing left the client yet; it counts once anything of that client's does.
        seen: its values can be read as they lie on the wire, under a mask perhaps; what is sealed
            cannot.
        reader: who reads it, "server" or "lps", a local parameter server.
        step: the number of the call.
        digests: for each of `ids`, 16 hex digits that stand for the bits of its reply; empty where
            a repetition has no price of its own. `CHOICE` stands for a reply by which a repetition
            cannot be told.
        again: a training of "dp-sgd" that repeats an earlier one, of other bits. Its batches may be
            those of that one, so both are priced as if their batches were known.
    """

    method: str
    verb: str
    fields: tuple[str, ...]
    round: int
    ids: tuple[int, ...]
    mechanism: Mechanism = "exact"
    noise_multiplier: float | None = None
    replace: float = 2.0
    batch: int | None = None
    epochs: int = 1
    kept: bool = False
    seen: bool = True
    reader: str = "server"
    step: int = 0
    digests: tuple[str, ...] = ()
    again: bool = False

    def __post_init__(self) -> None:
        if self.digests and len(self.digests) != len(self.ids):
            raise ValueError(f"{len(self.digests)} digests of {len(self.ids)} replies")

    @property
    def clients(self) -> int:
        """How many replied."""
        return len(self.ids)

    def select(self, positions: Sequence[int]) -> Event:
        """Return the event of the clients at some positions of `ids`."""
        ids = tuple(self.ids[k] for k in positions)
        digests = tuple(self.digests[k] for k in positions) if self.digests else ()
        return replace(self, ids=ids, digests=digests)

    def releases(self) -> list[Release]:
        """Return what each client released, in the order of `ids`."""
        call = replace(self, ids=(), digests=(), again=False)
        digests = self.digests or ("",) * len(self.ids)
        return [
            Release(call, client, digest) for client, digest in zip(self.ids, digests, strict=True)
        ]


class Release(NamedTuple):
    """One client's part of an event: the event without clients, the client, and the digest of its
    reply.
    """

    call: Event
    client: int
    digest: str


@dataclass(frozen=True)
class Price:
    """What the client that released most has spent.

    Args:
        epsilon: infinite after an exact release; 0 when nothing was released.
        rdp: the bound by Rényi divergences, beside it.
        client: whose; None when nobody released anything.
        accountant: how `epsilon` was found: "nothing released", "exact release", "exact Gaussian",
            "PRV" or "RDP".
    """

    epsilon: float
    rdp: float
    client: int | None
    accountant: str


@dataclass(frozen=True)
class Row:
    """Releases of one kind, `count` of them at the client with the most."""

    method: str
    field: str
    mechanism: str
    noise_multiplier: float | None
    count: int
    reader: str


class _Cost(NamedTuple):
    """What of an event its price depends on."""

    mechanism: Mechanism
    noise_multiplier: float
    replace: float
    batch: int | None
    epochs: int
    samples: int | None  # of the client, for "dp-sgd"
    again: bool


History = frozenset[tuple[_Cost, int]]  # how often each cost arose at a client


@dataclass
class Ledger:
    """All events of a run; an accountant prices their union once.

    Args:
        samples: n_i of every client by its id; what dp-sgd's price depends on, and taken as public.
        names: of clients by their ids. Several ids of one name are one person, whose releases
            compose.
    """

    events: list[Event] = field(default_factory=list)
    samples: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def union(cls, *ledgers: Ledger) -> Ledger:
        """Return what several runs released together.

        Clients are the same where their names are. Each training is priced by the number of samples
        that it had in its own run. A ledger that another one begins with is an earlier state of the
        same run, or the same ledger, and is counted once. Batches of different runs are taken to be
        drawn independently of each other: they are drawn by clients' secret keys and the run's
        configuration.

        Args:
            ledgers: of one unit of privacy (`dp_unit`), which a ledger does not know.

        Raises:
            UsageError: no ledger, or one that does not know the names of its clients.
        """
        if not ledgers:
            raise UsageError("there is no ledger to add up: give those of one or more runs")
        for given in ledgers:
            if not isinstance(given, Ledger):
                raise UsageError(
                    f"ledgers are added up, not {type(given).__name__}: give one.ledger_, "
                    "other.ledger_, one by one"
                )
        found = cls()
        for ledger in _distinct(ledgers):
            found._take(ledger)
        return found

    def _take(self, other: Ledger) -> None:
        """Add another run's events, under new numbers of its clients."""
        released = {i for event in other.events for i in event.ids}
        nameless = released - set(other.names)
        if nameless:
            raise UsageError(
                f"a ledger does not name its client {min(nameless)}, so nobody knows what that "
                "client released elsewhere: give ledgers of fitted protocols, or set their names"
            )
        first = 1 + max(self.names, default=-1)
        number = {i: first + k for k, i in enumerate(sorted(other.names))}
        self.names |= {number[i]: name for i, name in other.names.items()}
        self.samples |= {number[i]: n for i, n in other.samples.items() if i in number}
        self.events += [
            replace(event, ids=tuple(number[i] for i in event.ids)) for event in other.events
        ]

    def of(self, names: Iterable[str]) -> Ledger:
        """Return the ledger of some persons alone.

        Raises:
            UsageError: a name that the ledger does not know.
        """
        wanted = {names} if isinstance(names, str) else set(names)
        strangers = sorted(map(str, wanted - set(self.names.values())))
        if strangers:
            raise UsageError(
                f"the ledger knows no client {strangers[0]!r}: give names as the federation has "
                "them"
            )
        ids = {i for i, name in self.names.items() if name in wanted}
        parts = [
            event.select([k for k, i in enumerate(event.ids) if i in ids]) for event in self.events
        ]
        kept = [event for event in parts if event.ids]
        return Ledger(
            kept,
            {i: n for i, n in self.samples.items() if i in ids},
            {i: self.names[i] for i in sorted(ids)},
        )

    def add(self, event: Event) -> None:
        """Record a release."""
        self.events.append(event)

    @overload
    def price(self, delta: float) -> Price: ...
    @overload
    def price(self, delta: float, relation: Literal["add/remove"]) -> Price: ...
    @overload
    def price(self, delta: float, relation: Literal["replace"]) -> Price | None: ...
    def price(self, delta: float = DELTA, relation: Relation = "add/remove") -> Price | None:
        """ε at δ of the client that released most: its events compose in series, clients in
        parallel.

        Returns:
            None where no claim is made: replacing, with batches that were sampled.
        """
        groups = self._groups()
        without_noise = [client for history, client in groups.items() if _has_exact(history)]
        if without_noise:  # one release without noise makes ε infinite
            return Price(math.inf, math.inf, min(without_noise), "exact release")
        owners: dict[tuple[Step, ...], int] = {}
        for history, client in groups.items():
            steps = _merged_steps(history, relation)
            owners[steps] = min(client, owners.get(steps, client))
        if relation == "replace" and any(map(_sampled, owners)):
            return None
        return _largest(owners, delta)

    @property
    def epsilon(self) -> float:
        """ε at δ = 1e-5: 0 when nothing was released, infinite when anything went out without
        noise.
        """
        return self.price(DELTA).epsilon

    def reported(self, delta: float = DELTA) -> float | None:
        """ε as result files write it: null where it is infinite."""
        found = self.price(delta).epsilon
        return None if math.isinf(found) else found

    def exact(self) -> list[tuple[str, str]]:
        """The (method, field) that went out without noise, so that ε is infinite."""
        out = self._out()
        told = [e for e in self.events if e.mechanism == "exact" and not out.isdisjoint(e.ids)]
        return sorted({(e.method, name) for e in told for name in e.fields or ("",)})

    def summary(self) -> list[Row]:
        """What was released, in the order in which it first was."""
        out, counts = self._out(), dict[tuple[str, str, str, float | None, str], Counter[int]]()
        person = self._persons()
        for event in self.events:
            for name in event.fields or ("",):
                kind = (event.method, name, event.mechanism, event.noise_multiplier, event.reader)
                counts.setdefault(kind, Counter()).update(
                    person.get(i, i) for i in event.ids if i in out
                )
        return [Row(*kind[:4], max(at.values()), kind[4]) for kind, at in counts.items() if at]

    def _out(self) -> set[int]:
        """The clients of which anything left."""
        return {i for event in self.events if not event.kept for i in event.ids}

    def _persons(self) -> dict[int, int]:
        """Return the lowest id of the same name, by id; an id without a name is a person of its
        own.
        """
        first: dict[str, int] = {}
        return {i: first.setdefault(name, i) for i, name in sorted(self.names.items())}

    def _groups(self) -> dict[History, int]:
        """The distinct histories of persons of whom anything left, and the lowest id of each."""
        out, person = self._out(), self._persons()
        found: dict[int, Counter[_Cost]] = {}
        for event in self.events:
            if event.mechanism == "free":
                continue
            for i in event.ids:
                if i in out:
                    found.setdefault(person.get(i, i), Counter())[self._cost(event, i)] += 1
        groups: dict[History, int] = {}
        for i, counts in sorted(found.items()):
            groups.setdefault(frozenset(counts.items()), i)
        return groups

    def _cost(self, event: Event, client: int) -> _Cost:
        samples = _size(self.samples, client) if event.mechanism == "dp-sgd" else None
        multiplier = event.noise_multiplier or 0.0
        return _Cost(
            event.mechanism,
            multiplier,
            event.replace,
            event.batch,
            event.epochs,
            samples,
            event.again,
        )


class Recall:
    """Tells new releases from repeated ones.

    A server that was killed asks again what it asked after its last checkpoint. A reply of the same
    bits is the release that was recorded then; one of other bits is another release.

    Local training of which nothing left has no bits to compare. It is one training as long as what
    follows from it has the bits that it had; once that differs, so may the training, which then
    counts again.

    Args:
        events: what was recorded already and may come again.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._known: set[Release] = set()
        self._answered: set[tuple[Event, int]] = set()
        # by client: trainings that were repeated, of which nothing left
        self._repeated: dict[int, list[Event]] = {}
        # by client: what left it then and has not come again
        self._left: dict[int, set[Release]] = {}
        self.learn(events)

    def learn(self, events: Iterable[Event]) -> None:
        """Take in what was recorded."""
        for event in events:
            for release in event.releases():
                if release.digest != CHOICE:
                    self._known.add(release)
                self._answered.add((release.call, release.client))
                if not event.kept:
                    self._left.setdefault(release.client, set()).add(release)

    def new(self, events: Sequence[Event]) -> list[Event]:
        """Return what is to be recorded of the events of one call."""
        if not self._answered:
            return list(events)
        found: list[Event] = []
        again: list[Event] = []
        for event in events:
            unknown, repeated = list[int](), list[int]()
            for k, release in enumerate(event.releases()):
                answered = (release.call, release.client) in self._answered
                if release not in self._known:
                    (repeated if answered else unknown).append(k)
                    again += self._trained_again(release.client, answered)
                elif event.kept:
                    self._repeated.setdefault(release.client, []).append(event.select([k]))
                else:
                    self._left[release.client].discard(release)
            if unknown:
                found.append(event if len(unknown) == len(event.ids) else event.select(unknown))
            if repeated:
                found.append(replace(event.select(repeated), again=event.mechanism == "dp-sgd"))
        return again + found

    def _trained_again(self, client: int, answered: bool) -> list[Event]:
        """Return the repeated trainings of a client that count again, now that something new of it
        leaves.

        One counts if something had left after it, before the server was killed, that has not come
        again.
        """
        trained = self._repeated.pop(client, [])
        left = [release.call.step for release in self._left.get(client, ())]
        return [
            replace(event, again=True)
            for event in trained
            if answered or any(step > event.step for step in left)
        ]


def _distinct(ledgers: Sequence[Ledger]) -> list[Ledger]:
    """Return ledgers without those that a later or longer one begins with."""
    found: list[Ledger] = []
    for ledger in sorted(ledgers, key=lambda ledger: len(ledger.events), reverse=True):
        if not any(_begins(longer, ledger) for longer in found):
            found.append(ledger)
    return found


def _begins(whole: Ledger, part: Ledger) -> bool:
    """Return whether a ledger begins with all events of another one, of the same clients.

    Equal events are the same releases only where digests of the replies say so.
    """
    if whole is part:
        return True
    if whole.events[: len(part.events)] != part.events or any(
        _anonymous(event) for event in part.events
    ):
        return False
    ids = {i for event in part.events for i in event.ids}
    return all(
        whole.names.get(i) == part.names.get(i) and whole.samples.get(i) == part.samples.get(i)
        for i in ids
    )


def _anonymous(event: Event) -> bool:
    """Return whether a release with a finite price has no digests.

    Two such releases may differ.
    """
    if event.mechanism not in ("gaussian", "dp-sgd") or event.kept:
        return False
    return not event.digests or CHOICE in event.digests


def _merged_steps(history: History, relation: Relation) -> tuple[Step, ...]:
    """Return what an accountant composes of a client's history."""
    steps: list[Step] = []
    for cost, times in history:
        steps += _steps(cost, times, relation)
    return accounting.merged(steps)


def _sampled(steps: tuple[Step, ...]) -> bool:
    """Return whether some step sees a random part of the samples only."""
    return any(rate < 1 for _, rate, _ in steps)


def _has_exact(history: History) -> bool:
    return any(cost.mechanism == "exact" for cost, _ in history)


def _size(samples: Mapping[int, int], client: int) -> int:
    if client not in samples:
        raise ValueError(f"dp-sgd of client {client} has no price without its number of samples")
    return samples[client]


def _steps(cost: _Cost, times: int, relation: Relation) -> Iterable[Step]:
    """What an event adds to its client's history, `times` times."""
    if cost.mechanism == "gaussian":
        return [
            (cost.noise_multiplier / (cost.replace if relation == "replace" else 1.0), 1.0, times)
        ]
    q, steps = accounting.sampling(cost.samples or 0, cost.batch, cost.epochs)
    # two trainings in the same batches cost no more than two in batches that are known
    if cost.again and q < 1:
        q, steps = 1.0, 2 * steps
    return [(cost.noise_multiplier / (2.0 if relation == "replace" else 1.0), q, steps * times)]


def _largest(owners: Mapping[tuple[Step, ...], int], delta: float) -> Price:
    """The dearest history's price."""
    dearest = accounting.dearest([steps for steps in owners if steps], delta)
    if dearest is None:
        return Price(0.0, 0.0, None, "nothing released")
    steps, cost = dearest
    return Price(cost.epsilon, cost.rdp, owners[steps], cost.accountant)
