"""What a run released, event by event, and the ε of all of it together: for each client the union of its events, priced once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, overload

from securecluster.privacy import accounting
from securecluster.privacy.accounting import Step

Mechanism = Literal["exact", "gaussian", "dp-sgd", "free"]
Relation = Literal["add/remove", "replace"]
DELTA = 1e-5


@dataclass(frozen=True)
class Event:
    """One field of the replies to one call.

    Args:
        ids: the clients that replied.
        mechanism: "exact": nothing random was added. "gaussian": noise of `noise_multiplier` times the sensitivity. "dp-sgd": a local
            training. "free": made from what was released before, or taken as public.
        replace: the sensitivity under replacing over that under adding or removing, of "gaussian"; it is 2 for "dp-sgd".
        batch: expected samples in a step of dp-sgd; None: all of a client's, with q = 1.
        epochs: of dp-sgd; ceil(n / batch) steps each.
        kept: nothing left the client yet; it counts once anything of that client's does.
        seen: its values can be read as they lie on the wire, under a mask perhaps; what is sealed cannot.
        reader: who reads it, "server" or "lps", a local parameter server.
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

    @property
    def clients(self) -> int:
        """How many replied."""
        return len(self.ids)


@dataclass(frozen=True)
class Price:
    """What the client that released most has spent.

    Args:
        epsilon: infinite after an exact release; 0 when nothing was released.
        rdp: the bound by Rényi divergences, beside it.
        client: whose; None when nobody released anything.
        accountant: how `epsilon` was found: "nothing released", "exact release", "exact Gaussian", "PRV" or "RDP".
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


History = frozenset[tuple[_Cost, int]]  # how often each cost arose at a client


@dataclass
class Ledger:
    """All events of a run; an accountant prices their union once.

    Args:
        samples: n_i of every client by its id; what dp-sgd's price depends on, and taken as public.
    """

    events: list[Event] = field(default_factory=list)
    samples: dict[int, int] = field(default_factory=dict)

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
        """ε at δ of the client that released most: its events compose in series, clients in parallel.

        Returns:
            None where no claim is made: replacing, with batches that were sampled.
        """
        groups = self._groups()
        exact = min((i for (history, _), i in groups.items() if any(cost.mechanism == "exact" for cost, _ in history)), default=None)
        if exact is not None:
            return Price(math.inf, math.inf, exact, "exact release")
        owners: dict[tuple[Step, ...], int] = {}
        for (history, n), client in groups.items():
            steps = accounting.merged(step for cost, times in history for step in _steps(cost, times, n, relation))
            owners[steps] = min(client, owners.get(steps, client))
        if relation == "replace" and any(q < 1 for steps in owners for _, q, _ in steps):
            return None
        return _largest(owners, delta)

    @property
    def epsilon(self) -> float:
        """ε at δ = 1e-5: 0 when nothing was released, infinite when anything went out without noise."""
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
        for event in self.events:
            for name in event.fields or ("",):
                kind = (event.method, name, event.mechanism, event.noise_multiplier, event.reader)
                counts.setdefault(kind, Counter()).update(i for i in event.ids if i in out)
        return [Row(*kind[:4], max(at.values()), kind[4]) for kind, at in counts.items() if at]

    def _out(self) -> set[int]:
        """The clients of which anything left."""
        return {i for event in self.events if not event.kept for i in event.ids}

    def _groups(self) -> dict[tuple[History, int | None], int]:
        """The distinct histories of clients of which anything left, with n where it matters, and the first client of each."""
        out, found = self._out(), dict[int, Counter[_Cost]]()
        for event in self.events:
            cost = _Cost(event.mechanism, event.noise_multiplier or 0.0, event.replace, event.batch, event.epochs)
            for i in event.ids if event.mechanism != "free" else ():
                if i in out:
                    found.setdefault(i, Counter())[cost] += 1
        groups: dict[tuple[History, int | None], int] = {}
        for i, counts in sorted(found.items()):
            sized = any(cost.mechanism == "dp-sgd" for cost in counts)
            groups.setdefault((frozenset(counts.items()), _size(self.samples, i) if sized else None), i)
        return groups


def _size(samples: Mapping[int, int], client: int) -> int:
    if client not in samples:
        raise ValueError(f"dp-sgd of client {client} has no price without its number of samples")
    return samples[client]


def _steps(cost: _Cost, times: int, n: int | None, relation: Relation) -> Iterable[Step]:
    """What an event adds to its client's history, `times` times."""
    if cost.mechanism == "gaussian":
        return [(cost.noise_multiplier / (cost.replace if relation == "replace" else 1.0), 1.0, times)]
    q, steps = accounting.sampling(n or 0, cost.batch, cost.epochs)
    return [(cost.noise_multiplier / (2.0 if relation == "replace" else 1.0), q, steps * times)]


def _largest(owners: Mapping[tuple[Step, ...], int], delta: float) -> Price:
    """The dearest history's price."""
    dearest = accounting.dearest([steps for steps in owners if steps], delta)
    if dearest is None:
        return Price(0.0, 0.0, None, "nothing released")
    steps, cost = dearest
    return Price(cost.epsilon, cost.rdp, owners[steps], cost.accountant)
