"""Ledger of a run's releases, and the ε of all of them together.

The union of a client's events is accounted for once. Clients compose in parallel: the ε of a run is
the largest over its clients.

Clients of one name are one person. Ledgers of several runs on the same clients are joined by
`Ledger.union`.

The relation of neighbours that holds for every release is "blank": one unit keeps its place, and
contributes zeros to each release. The numbers of samples that means are divided by, sampling rates
and who takes part are public, and stay. This is the "zero-out" relation of Kairouz et al. (2021),
and `REPLACE_SPECIAL` of dp-accounting. Under "replace" one unit is exchanged for any other one.

Of many clients only histories that no other one dominates are priced. Each client trains by the
samples of its own id, and batches of several runs are independent, because keys and configurations
are. After a kill the same bits are the same release and other bits another one (`Recall`); under a
trusted server the bits are those of the noised sum, since a digest of rows without noise would
distinguish them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from securecluster.core import summaries
from securecluster.core.client_names import Client, ClientNames
from securecluster.errors import UsageError
from securecluster.messaging.receipts import FOLLOWS, Receipt, Receipts
from securecluster.privacy.dp import accounting
from securecluster.privacy.dp.renyi import SkellamRelease, Step

Mechanism = Literal["exact", "gaussian", "skellam", "dp-sgd", "free", "public"]
COSTLESS = ("free", "public")  # mechanisms that add nothing to ε
NOISY = ("gaussian", "skellam", "dp-sgd")  # mechanisms whose price is for the ledger's unit
Relation = Literal["blank", "replace"]
# whose ε it is, as `dp_unit`; "" where that is not said
Unit = Literal["", "client", "example"]
DELTA = 1e-5
# In place of a digest: two choices may be equal although their noise is not.
CHOICE = "choice"
# In place of a digest: the release was asked for, and its reply never seen.
UNSEEN = "unseen"


@dataclass(frozen=True)
class Event:
    """One field of the replies to one call.

    Args:
        method: client method that was called.
        verb: verb through which the replies left, "gather" for instance.
        fields: names of the fields; empty for a local training.
        round: number of the round.
        ids: clients that replied.
        mechanism: "exact": nothing random was added. "gaussian": noise of `noise_multiplier` times
            the sensitivity. "skellam": a sum with integer noise, of which clients added shares.
            "dp-sgd": a local training. "free": made from earlier releases, or taken as public.
            "public": declared to be of nobody's data by a method that is not private.
        noise_multiplier: z; None for "exact", "free" and "public". That of "skellam" is the planned
            one: its cost follows from `sensitivities` and `variance`.
        replace: sensitivity under replacing over that under blanking, for "gaussian" and
            "skellam"; it is 2 for "dp-sgd".
        batch: expected samples in a step of "dp-sgd"; None: all samples of a client, with q = 1.
        epochs: epochs of "dp-sgd", of ceil(n / batch) steps each.
        kept: True if nothing left the client yet. The event counts once anything of that client
            is released.
        seen: True if its values can be read as they lie on the wire, possibly under a mask; sealed
            values cannot.
        reader: "server", or "lps" for a local parameter server.
        step: number of the call.
        digests: for each of `ids`, 16 hex digits that stand for the bits of its reply; empty where
            a repetition has no cost of its own. `CHOICE` stands for a reply by which a repetition
            cannot be recognised, and `UNSEEN` for one that may have left its client and that its
            reader never saw.
        again: True for a training of "dp-sgd" that repeats an earlier one, with other bits. Its
            batches may be those of the earlier one, so both are accounted for as if their batches
            were known.
        sensitivities: Δ2 and Δ1 of "skellam", in steps of its grid; empty for all others.
        variance: μ of "skellam", in squared steps: that of the survivors' shares, up to the number
            of shares that was planned.
        once: for each of `ids`, name and digest of a release that the client repeats to the bit,
            and pays for once; empty for others.
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
    sensitivities: tuple[float, ...] = ()
    variance: float = 0.0
    once: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for digests in (self.digests, self.once):
            if digests and len(digests) != len(self.ids):
                raise ValueError(f"{len(digests)} digests of {len(self.ids)} replies")

    @property
    def clients(self) -> int:
        """Return the number of clients that replied."""
        return len(self.ids)

    def select(self, positions: Sequence[int]) -> Event:
        """Return the event of some of its clients.

        Args:
            positions: positions in `ids`.
        """
        ids = tuple(self.ids[k] for k in positions)
        digests: tuple[str, ...] = ()
        if self.digests:
            digests = tuple(self.digests[k] for k in positions)
        once: tuple[str, ...] = ()
        if self.once:
            once = tuple(self.once[k] for k in positions)
        return replace(self, ids=ids, digests=digests, once=once)

    def releases(self) -> list[Release]:
        """Return the release of each client, in the order of `ids`."""
        # `again` is not part of a call's identity: a repeated training is the same call.
        call = replace(self, ids=(), digests=(), once=(), again=False)
        digests = self.digests
        if not digests:
            digests = ("",) * len(self.ids)
        releases = []
        for client, digest in zip(self.ids, digests, strict=True):
            releases.append(Release(call, client, digest))
        return releases


class Release(NamedTuple):
    """An event of one client.

    Args:
        call: the event without clients and digests.
        client: id of the client.
        digest: digest of the client's reply; "" where the event has none.
    """

    call: Event
    client: int
    digest: str


@dataclass(frozen=True)
class Price:
    """Privacy loss of the client that released most.

    Args:
        epsilon: infinite after an exact release; 0 when nothing was released.
        rdp: bound of ε by Rényi divergences.
        client: id of that client; None when nobody released anything.
        accountant: origin of `epsilon`: "nothing released", "exact release", "exact Gaussian",
            "rare batches", "known batches", "PRV" or "RDP".
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


@dataclass(frozen=True)
class Expense:
    """Properties of an event that its privacy cost depends on.

    Args:
        mechanism: as in `Event`, and so are those that follow.
        noise_multiplier: z; 0 for "exact".
        replace: sensitivity under replacing over that under blanking.
        batch: expected samples in a step.
        epochs: epochs of "dp-sgd".
        samples: n_i of the client for "dp-sgd", else None.
        again: whether a training repeats an earlier one.
        sensitivities: Δ2 and Δ1 of "skellam".
        variance: μ of "skellam".
        unit: of its ledger.
    """

    mechanism: Mechanism
    noise_multiplier: float
    replace: float
    batch: int | None
    epochs: int
    samples: int | None
    again: bool
    sensitivities: tuple[float, ...]
    variance: float
    unit: Unit = ""


# Expenses of one person, each with the number of times that it arose.
History = frozenset[tuple[Expense, int]]


@dataclass(repr=False)
class Ledger:
    """Events of a run, whose union an accountant prices once.

    Args:
        events: events in the order in which they were recorded.
        samples: n_i by client id. The cost of "dp-sgd" depends on it, and it is taken as public.
        names: name by client id. Several ids of one name are one person, whose releases compose.
        unit: what the noise is for, a whole "client" or one "example"; "" where that is not said,
            as by folders of earlier versions.
    """

    events: list[Event] = field(default_factory=list)
    samples: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    unit: Unit = ""

    def __repr__(self) -> str:
        """Return a summary in one line, without the events."""
        return summaries.line("Ledger", self._summary())

    def _repr_html_(self) -> str:
        """Return a summary for notebooks, without the events."""
        return summaries.table("Ledger", self._summary())

    def _summary(self) -> dict[str, str]:
        """Return what was released and what it cost, in words."""
        price = self.price()
        epsilon = f"ε = {price.epsilon:.4g} at δ = {DELTA:g}"
        if math.isinf(price.epsilon):
            epsilon = "ε is infinite: something was released without noise"
        return {
            "releases": f"{len(self.events)} events",
            "clients": f"{len(self._releasing_clients())} clients",
            "privacy": epsilon,
        }

    @classmethod
    def union(cls, *ledgers: Ledger) -> Ledger:
        """Return the ledger of several runs together.

        Clients are the same where their names are. Each training counts with the number of samples
        that it had in its own run. A ledger with which another one begins is an earlier state of
        the same run, or the same ledger, and is counted once. Batches of different runs are taken
        to be drawn independently of each other: they are drawn by clients' secret keys and the
        run's configuration.

        Args:
            ledgers: ledgers of one unit of privacy (`dp_unit`).

        Raises:
            UsageError: no ledger, one that does not name all its clients, or ledgers with noise for
                different units.
        """
        if not ledgers:
            raise UsageError("there is no ledger to add up: give those of one or more runs")
        for ledger in ledgers:
            if not isinstance(ledger, Ledger):
                raise UsageError(
                    f"ledgers are added up, not {type(ledger).__name__}: give one.ledger_, "
                    "other.ledger_, one by one"
                )
        union = cls(unit=_common_unit(ledger._unit_of_noise() for ledger in ledgers))
        for ledger in _distinct(ledgers):
            union._append(ledger)
        return union

    def _unit_of_noise(self) -> Unit:
        """Return the unit, "" where no release has noise: other prices are those of any unit."""
        if any(event.mechanism in NOISY for event in self.events):
            return self.unit
        return ""

    def _append(self, other: Ledger) -> None:
        """Add another run's events, under new ids of its clients."""
        _require_names(other)
        # Ids of the two runs may be equal for different clients.
        offset = 1 + max(self.names, default=-1)
        new_ids = {}
        for position, client in enumerate(sorted(other.names)):
            new_ids[client] = offset + position
        for client, name in other.names.items():
            self.names[new_ids[client]] = name
        for client, samples in other.samples.items():
            if client in new_ids:
                self.samples[new_ids[client]] = samples
        for event in other.events:
            ids = tuple(new_ids[client] for client in event.ids)
            self.events.append(replace(event, ids=ids))

    def of(self, clients: Client | Iterable[Client]) -> Ledger:
        """Return the ledger of some persons.

        Args:
            clients: each by its name, or by `at` its position among the ledger's persons, of whom
                the run's clients are the first; a single one may be given as it is. A number is a
                name; only where nobody is called by a number, it is a position.

        Raises:
            UsageError: no such client, or a number that could be a name.
        """
        # A string is an iterable of letters.
        if isinstance(clients, str) or not isinstance(clients, Iterable):
            clients = [clients]
        persons = list(dict.fromkeys(self.names[client] for client in sorted(self.names)))
        selected = {persons[k] for k in ClientNames(persons).positions(clients)}
        ids = {client for client, name in self.names.items() if name in selected}
        events = []
        for event in self.events:
            positions = [k for k, client in enumerate(event.ids) if client in ids]
            if positions:
                events.append(event.select(positions))
        return Ledger(
            events,
            {client: n for client, n in self.samples.items() if client in ids},
            {client: self.names[client] for client in sorted(ids)},
            self.unit,
        )

    def add(self, event: Event) -> None:
        """Record a release.

        Args:
            event: the event to append.
        """
        self.events.append(event)

    def price(self, delta: float = DELTA, relation: Relation = "blank") -> Price:
        """Return ε at δ of the client that released most.

        Events of one client compose in series, clients in parallel.

        Args:
            delta: δ, in (0, 1).
            relation: neighbouring relation of ε.
        """
        # Clients of one history have one cost, so each history is accounted for once.
        return _price(self._distinct_histories(), delta, relation)

    def costliest(self, delta: float = DELTA) -> History:
        """Return the expenses of the client that released most; none where nobody released any.

        Args:
            delta: δ, in (0, 1).
        """
        costliest = self.price(delta).client
        for history, client in self._distinct_histories().items():
            if client == costliest:
                return history
        return frozenset()

    @property
    def epsilon(self) -> float:
        """Return ε at δ = 1e-5: 0 without any release, infinite after an exact one."""
        return self.price(DELTA).epsilon

    def reported(self, delta: float = DELTA) -> float | None:
        """Return ε for result files, where null stands for infinite.

        Args:
            delta: δ, in (0, 1).
        """
        epsilon = self.price(delta).epsilon
        if math.isinf(epsilon):
            return None
        return epsilon

    def exact(self) -> list[tuple[str, str]]:
        """Return the sorted (method, field) pairs released without noise, for which ε is infinite.

        The field is "" for an event without fields.
        """
        releasing = self._releasing_clients()
        pairs: set[tuple[str, str]] = set()
        for event in self.events:
            if event.mechanism != "exact" or releasing.isdisjoint(event.ids):
                continue
            for name in event.fields or ("",):
                pairs.add((event.method, name))
        return sorted(pairs)

    def unseen(self) -> dict[int, list[int]]:
        """Return the rounds of releases that were asked for and never seen, by client."""
        rounds: dict[int, set[int]] = {}
        for event in self.events:
            if UNSEEN in event.digests:
                for client in event.ids:
                    rounds.setdefault(client, set()).add(event.round)
        return {client: sorted(rounds[client]) for client in sorted(rounds)}

    def declared_public(self) -> list[tuple[str, str]]:
        """Return the sorted (method, field) pairs that are in no ε, since they are declared public.

        Nothing checks that they are of nobody's data.
        """
        pairs: set[tuple[str, str]] = set()
        for event in self.events:
            if event.mechanism == "public":
                pairs.update((event.method, name) for name in event.fields)
        return sorted(pairs)

    def summary(self) -> list[Row]:
        """Return the kinds of releases, in the order of their first release."""
        releasing = self._releasing_clients()
        persons = self._persons()
        counts: dict[Row, Counter[int]] = {}
        for event in self.events:
            clients = [persons.get(i, i) for i in event.ids if i in releasing]
            for name in event.fields or ("",):
                row = Row(
                    method=event.method,
                    field=name,
                    mechanism=event.mechanism,
                    noise_multiplier=event.noise_multiplier,
                    count=0,
                    reader=event.reader,
                )
                counts.setdefault(row, Counter()).update(clients)
        rows = []
        for row, by_client in counts.items():
            if by_client:
                rows.append(replace(row, count=max(by_client.values())))
        return rows

    def _releasing_clients(self) -> set[int]:
        """Return the ids of clients with at least one release.

        Other clients cost nothing: what they computed never left them.
        """
        return _clients(event for event in self.events if not event.kept)

    def _persons(self) -> dict[int, int]:
        """Return the lowest id of the same name, by id.

        An id without a name is not in it, and a person of its own.
        """
        lowest: dict[str, int] = {}
        persons: dict[int, int] = {}
        for client, name in sorted(self.names.items()):
            persons[client] = lowest.setdefault(name, client)
        return persons

    def _distinct_histories(self) -> dict[History, int]:
        """Return the distinct histories of persons with a release, and the lowest id of each."""
        releasing = self._releasing_clients()
        persons = self._persons()
        costs: dict[int, Counter[Expense]] = {}
        for event in self.events:
            # Post-processing of earlier releases costs nothing.
            if event.mechanism in COSTLESS:
                continue
            for client in event.ids:
                if client in releasing:
                    person = persons.get(client, client)
                    # Under the client's own id: each id has its own number of samples.
                    counts = costs.setdefault(person, Counter())
                    counts[self._expense(event, client)] += 1
        lowest: dict[History, int] = {}
        for person, counts in sorted(costs.items()):
            lowest.setdefault(frozenset(counts.items()), person)
        return lowest

    def _expense(self, event: Event, client: int) -> Expense:
        samples = None
        if event.mechanism == "dp-sgd":
            samples = self._sample_count(client)
        expense = expense_of(event, samples)
        return replace(expense, unit=self.unit) if event.mechanism in NOISY else expense

    def _sample_count(self, client: int) -> int:
        if client not in self.samples:
            raise UsageError(
                f"dp-sgd of client {client} has no price without its number of samples: add it to "
                "the ledger's samples"
            )
        return self.samples[client]


def expense_of(event: Event, samples: int | None) -> Expense:
    """Return what the cost of an event depends on.

    Args:
        event: a release.
        samples: n_i of the client, on which the cost of "dp-sgd" depends.
    """
    return Expense(
        mechanism=event.mechanism,
        noise_multiplier=event.noise_multiplier or 0.0,
        replace=event.replace,
        batch=event.batch,
        epochs=event.epochs,
        samples=samples if event.mechanism == "dp-sgd" else None,
        again=event.again,
        sensitivities=event.sensitivities,
        variance=event.variance,
    )


def joint_price(
    histories: Iterable[History], delta: float = DELTA, relation: Relation = "blank"
) -> Price:
    """Return ε at δ of one person with several histories, those of several runs for instance.

    Args:
        histories: its expenses in each run.
        delta: δ, in (0, 1).
        relation: neighbouring relation of ε.

    Raises:
        UsageError: histories with noise for different units.
    """
    histories = list(histories)
    _common_unit(expense.unit for history in histories for expense, _ in history)
    together: Counter[Expense] = Counter()
    for history in histories:
        together.update(dict(history))
    return _price({frozenset(together.items()): 0}, delta, relation)


def _common_unit(units: Iterable[Unit]) -> Unit:
    """Return the one unit of what is added up; "" where none is said.

    Raises:
        UsageError: there are two.
    """
    named_units = sorted({unit for unit in units if unit})
    if len(named_units) > 1:
        raise UsageError(
            "noise for one client and noise for one example have prices that do not add up: join "
            "ledgers of one dp_unit"
        )
    return named_units[0] if named_units else ""


def _price(clients: Mapping[History, int], delta: float, relation: Relation) -> Price:
    """Return the price of the client that released most.

    Args:
        clients: history -> lowest id of the clients that have it.
        delta: δ, in (0, 1).
        relation: neighbouring relation of ε.
    """
    # An exact release makes ε infinite, whatever noise other releases have.
    exact_client = _client_with_exact_release(clients)
    if exact_client is not None:
        return Price(math.inf, math.inf, exact_client, "exact release")
    # Different histories may compose to the same steps, which are accounted for once.
    for history in clients:
        for expense, _ in history:
            _check_expense(expense)
    owners: dict[tuple[Step, ...], int] = {}
    # those with Skellam noise have an accountant of their own
    summed: dict[History, int] = {}
    for history, client in clients.items():
        steps = merged_steps(history, relation)
        if _skellam_releases(history, relation):
            summed[history] = client
        else:
            lowest = owners.get(steps, client)
            owners[steps] = min(client, lowest)
    price = _largest_price(owners, delta, relation)
    for history, client in summed.items():
        steps = merged_steps(history, relation)
        releases = _skellam_releases(history, relation)
        cost = accounting.skellam_epsilon(steps, releases, delta, relation == "replace")
        if cost.epsilon > price.epsilon:
            price = Price(cost.epsilon, cost.rdp, client, cost.accountant)
    return price


class PaidOnce:
    """Releases that clients repeat to the bit, and pay for once in a run.

    Args:
        events: of the run so far.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        # (client, name and digest of the release) -> (method, step) of the call that paid for it
        self._paid: dict[tuple[int, str], tuple[str, int]] = {}
        self.learn(events)

    def learn(self, events: Iterable[Event]) -> None:
        """Add releases that were recorded.

        Args:
            events: of the run.
        """
        for event in events:
            for client, once in zip(event.ids, event.once, strict=False):
                self._paid.setdefault((client, once), (event.method, event.step))

    def due(self, client: int, receipts: Receipts, method: str, step: int) -> Receipts:
        """Return a client's receipts, where what it has paid for costs nothing more.

        A call that is repeated has the receipts that it had.

        Args:
            client: its number.
            receipts: of its reply.
            method: that was called.
            step: number of the call.
        """
        if not any(receipt.once for receipt in receipts):
            return receipts
        due = []
        for receipt in receipts:
            call = (method, step)
            if receipt.once and self._paid.get((client, receipt.once), call) != call:
                receipt = Receipt(FOLLOWS, receipt.fields)
            due.append(receipt)
        return tuple(due)


class Recall:
    """Recogniser of repeated releases.

    A server that was killed asks again for everything after its last checkpoint. A reply of the
    same bits is the release that was recorded then; one of other bits is another release.

    Local training without a release has no bits to compare. It is one training as long as what
    follows from it has the same bits; once that differs, so may the training, which then counts
    again.

    Args:
        events: recorded events that may be repeated.
    """

    def __init__(self, events: Iterable[Event] = ()) -> None:
        self._known: set[Release] = set()
        self._answered: set[tuple[Event, int]] = set()
        # by client: repeated trainings that nothing was released of yet
        self._repeated: dict[int, list[Event]] = {}
        # by client: recorded releases that have not been repeated yet
        self._pending: dict[int, set[Release]] = {}
        self.learn(events)

    def learn(self, events: Iterable[Event]) -> None:
        """Add recorded events.

        Args:
            events: events that may be repeated from now on.
        """
        for event in events:
            for release in event.releases():
                # Equal choices may come of different noise, so each one is a release.
                if release.digest != CHOICE:
                    self._known.add(release)
                self._answered.add((release.call, release.client))
                if not event.kept:
                    pending = self._pending.setdefault(release.client, set())
                    pending.add(release)

    def new(self, events: Sequence[Event]) -> list[Event]:
        """Return the events to record for one call.

        Args:
            events: events of the call.

        Returns:
            Earlier trainings that count again, then the parts of `events` that are not repetitions.
        """
        if not self._answered:
            return list(events)
        retrained: list[Event] = []
        recorded: list[Event] = []
        for event in events:
            # positions of clients: first release of the call, and another one with other bits
            first: list[int] = []
            differing: list[int] = []
            for position, release in enumerate(event.releases()):
                if self._repeats(event, position, release):
                    continue
                answered = (release.call, release.client) in self._answered
                if answered:
                    differing.append(position)
                else:
                    first.append(position)
                retrained += self._trained_again(release.client, answered)
            if first:
                recorded.append(event.select(first))
            if differing:
                again = event.mechanism == "dp-sgd"
                recorded.append(replace(event.select(differing), again=again))
        return retrained + recorded

    def _repeats(self, event: Event, position: int, release: Release) -> bool:
        """Return whether a release was counted before.

        One that was not seen then may arrive now, and one that arrived may not be seen again.
        """
        if release in self._known:
            self._note_repetition(event, position, release)
            return True
        if release.digest == UNSEEN:
            return (release.call, release.client) in self._answered
        unseen = release._replace(digest=UNSEEN)
        if unseen not in self._known:
            return False
        self._known.remove(unseen)
        self._known.add(release)
        return True

    def _note_repetition(self, event: Event, position: int, release: Release) -> None:
        if event.kept:
            trainings = self._repeated.setdefault(release.client, [])
            trainings.append(event.select([position]))
        else:
            self._pending[release.client].discard(release)

    def _trained_again(self, client: int, answered: bool) -> list[Event]:
        """Return the repeated trainings that count again with a new release of their client.

        A training counts if a release that followed it before the server was killed has not been
        repeated.

        Args:
            client: id of the client.
            answered: True if the client answered the same call before, with other bits.
        """
        # Popped, so that a training counts again once only.
        trainings = self._repeated.pop(client, [])
        pending = self._pending.get(client, ())
        last = max((release.call.step for release in pending), default=-math.inf)
        return [
            replace(training, again=True)
            for training in trainings
            if answered or last > training.step
        ]


def _clients(events: Iterable[Event]) -> set[int]:
    """Return the ids of all clients in some events."""
    clients: set[int] = set()
    for event in events:
        clients.update(event.ids)
    return clients


def _require_names(ledger: Ledger) -> None:
    """Raise UsageError for a ledger with a client that has no name.

    Runs are joined by names, so releases of a nameless client could not be composed with those of
    the same person in another run, and ε would be too small.
    """
    nameless = _clients(ledger.events) - set(ledger.names)
    if nameless:
        raise UsageError(
            f"a ledger does not name its client {min(nameless)}, so its releases cannot be joined "
            "with those of other runs: give ledgers of fitted protocols, or set their names"
        )


def _distinct(ledgers: Sequence[Ledger]) -> list[Ledger]:
    """Return ledgers without those that a longer one begins with."""
    distinct: list[Ledger] = []
    for ledger in sorted(ledgers, key=lambda ledger: len(ledger.events), reverse=True):
        if not any(_begins_with(longer, ledger) for longer in distinct):
            distinct.append(ledger)
    return distinct


def _begins_with(longer: Ledger, shorter: Ledger) -> bool:
    """Return True if a ledger begins with all events of another one, of the same clients.

    Equal events are the same releases only where digests of the replies say so.

    Args:
        longer: ledger with at least as many events.
        shorter: ledger that may be an earlier state of it.
    """
    if longer is shorter:
        return True
    beginning = longer.events[: len(shorter.events)]
    if beginning != shorter.events:
        return False
    if any(map(_is_anonymous, shorter.events)):
        return False
    # Two runs may use the same ids for different clients.
    clients = _clients(shorter.events)
    if any(longer.names.get(i) != shorter.names.get(i) for i in clients):
        return False
    return all(longer.samples.get(i) == shorter.samples.get(i) for i in clients)


def _is_anonymous(event: Event) -> bool:
    """Return True for a release with a finite cost and no digests.

    Two such releases may differ, although their events are equal.
    """
    if event.mechanism not in ("gaussian", "skellam", "dp-sgd") or event.kept:
        return False
    return not event.digests or not {CHOICE, UNSEEN}.isdisjoint(event.digests)


def _client_with_exact_release(clients: Mapping[History, int]) -> int | None:
    """Return the lowest client with an exact release; None if every release has noise.

    Any exact release makes ε infinite: it may be one value with a sample and another one without,
    and noise on other releases does not take that back.

    Args:
        clients: history -> lowest id of the clients that have it.
    """
    exposed = [client for history, client in clients.items() if _has_exact_release(history)]
    return min(exposed, default=None)


def _check_expense(cost: Expense) -> None:
    """Raise UsageError for a release that no mechanism makes; the accountant checks its noise."""
    if cost.mechanism not in NOISY:
        raise UsageError(
            f"a release by {cost.mechanism!r} has no price: give one of {', '.join(NOISY)}"
        )
    if not 1 <= cost.replace < math.inf:
        raise UsageError(
            f"replacing a unit cannot change a release {cost.replace} times as much as blanking "
            "it: give a ratio of 1 or more"
        )
    if cost.mechanism == "skellam" and len(cost.sensitivities) != 2:
        raise UsageError(
            f"a release by 'skellam' has two sensitivities, not {len(cost.sensitivities)}: give Δ2 "
            "and Δ1"
        )
    for count, name in ((cost.samples, "samples"), (cost.epochs, "epochs")):
        if count is not None and not (0 <= count < math.inf and count == int(count)):
            raise UsageError(f"a training has no {count} {name}: give a whole number from 0")
    if cost.batch is not None and not cost.batch >= 1:
        raise UsageError(f"a training has no batches of {cost.batch}: give a number from 1")


def _has_exact_release(history: History) -> bool:
    return any(cost.mechanism == "exact" for cost, _ in history)


def merged_steps(history: History, relation: Relation) -> tuple[Step, ...]:
    """Return the steps (z, q, count) of a history, merged where they are alike.

    Those of `_skellam_releases` are not among them.

    Args:
        history: expenses of one client.
        relation: neighbouring relation of ε.
    """
    steps = []
    for cost, times in history:
        if cost.mechanism != "skellam":
            steps.append(_step(cost, times, relation))
    # The order of a set differs from process to process, and the rounding of a sum follows its
    # order.
    return accounting.merged(sorted(steps))


def _skellam_releases(history: History, relation: Relation) -> list[tuple[SkellamRelease, int]]:
    """Return the sums with Skellam noise of a history, and how often each of a kind was made."""
    releases = []
    for cost, times in history:
        if cost.mechanism == "skellam":
            norm, magnitudes = cost.sensitivities
            release = SkellamRelease(norm, magnitudes, cost.variance)
            if relation == "replace":
                release = release.scaled(cost.replace)
            releases.append((release, times))
    return releases


def skellam_sums(history: History) -> Iterator[tuple[float, SkellamRelease, int]]:
    """Yield the noise multiplier of each kind of sums with Skellam noise, the sum, and the count.

    Args:
        history: expenses of one client.
    """
    for cost, times in history:
        if cost.mechanism == "skellam":
            norm, magnitudes = cost.sensitivities
            yield cost.noise_multiplier, SkellamRelease(norm, magnitudes, cost.variance), times


def _step(cost: Expense, times: int, relation: Relation) -> Step:
    """Return the step (z, q, count) of an event that arose `times` times.

    Under "replace", the same noise hides a larger change, so z shrinks by the ratio of the two
    sensitivities. The accountant takes sampled steps as they are, and prices them for the relation.
    """
    if cost.mechanism == "gaussian":
        ratio = cost.replace if relation == "replace" else 1.0
        return cost.noise_multiplier / ratio, 1.0, times
    samples = cost.samples or 0
    q, steps = accounting.sampling(samples, cost.batch, cost.epochs)
    # Two trainings in the same batches cost no more than two in batches that are known.
    if cost.again and q < 1:
        q = 1.0
        steps = 2 * steps
    ratio = 2.0 if relation == "replace" and q == 1 else 1.0
    return cost.noise_multiplier / ratio, q, steps * times


def _largest_price(
    owners: Mapping[tuple[Step, ...], int], delta: float, relation: Relation
) -> Price:
    """Return the largest privacy loss over histories.

    Args:
        owners: merged steps -> lowest id of the clients that have them.
        delta: δ, in (0, 1).
        relation: neighbouring relation of ε.
    """
    histories = [steps for steps in owners if steps]
    largest = accounting.costliest(histories, delta, relation == "replace")
    if largest is None:
        return Price(0.0, 0.0, None, "nothing released")
    steps, cost = largest
    return Price(cost.epsilon, cost.rdp, owners[steps], cost.accountant)
