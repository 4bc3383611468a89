"""The promise of `target_epsilon`: a release by which a run would cost more is not made.

A run's noise is found for planned numbers of releases. As long as every client's releases are
within the plan, which sums and counts show, no accountant is asked. Only a client that goes beyond
its plan is priced, before anything more leaves.

Clients count before a reply leaves: Σ count/z² of releases without sampling, the steps of each (z,
q), and the sums with Skellam noise. A simulation also counts the events of its ledger, where a
repetition with other bits is another release. Newcomers are only warned of.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from securecluster.errors import TargetError
from securecluster.privacy.dp import accounting
from securecluster.privacy.dp.ledger import (
    COSTLESS,
    Event,
    Expense,
    History,
    expense_of,
    joint_price,
    merged_steps,
    skellam_sums,
)
from securecluster.privacy.dp.renyi import SkellamRelease, Step
from securecluster.privacy.dp.skellam_mechanism import least_release

# Sums of the same terms in another order round differently.
ROUNDING = 1e-12


@dataclass(frozen=True)
class Plan:
    """Releases of one client in a whole run, for which its noise was found.

    Args:
        steps: steps (z, q, count) of all releases but those in `sums`.
        sums: (noise multiplier, count) of sums with Skellam noise.
    """

    steps: tuple[Step, ...]
    sums: tuple[tuple[float, int], ...] = ()

    def covers(self, history: History) -> bool:
        """Return True if the plan costs at least as much as what a client released.

        False says nothing: the plan and the releases may not compare.

        Args:
            history: expenses without exact ones.
        """
        unused = self._unused_sums(history)
        if unused is None:
            return False
        planned = _Steps.of(accounting.merged(self.steps))
        spent = _Steps.of(merged_steps(history, "blank"))
        # Gaussian noise of a sum's multiplier costs no more than the sum.
        of_sums = sum(count / multiplier**2 for multiplier, count in unused.items())
        if spent.precision > (planned.precision + of_sums) * (1 + ROUNDING):
            return False
        return all(count <= planned.sampled[step] for step, count in spent.sampled.items())

    def _unused_sums(self, history: History) -> Counter[float] | None:
        """Return how many planned sums of each multiplier a history lacks.

        Args:
            history: expenses of one client.

        Returns:
            None if the history has other sums than were planned.
        """
        unused: Counter[float] = Counter()
        for multiplier, count in self.sums:
            unused[multiplier] += count
        for multiplier, release, count in skellam_sums(history):
            unused[multiplier] -= count
            if unused[multiplier] < 0:
                return None
            if not _costs_no_more(release, least_release(multiplier)):
                return None
        return unused


@dataclass(frozen=True)
class _Steps:
    """Merged steps: Σ count/z² of those without sampling, and the count of others by (z, q)."""

    precision: float
    sampled: Counter[tuple[float, float]]

    @classmethod
    def of(cls, steps: Sequence[Step]) -> _Steps:
        """Return the sums of merged steps."""
        precision = 0.0
        sampled: Counter[tuple[float, float]] = Counter()
        for z, q, count in steps:
            if q < 1:
                sampled[z, q] += count
            else:
                precision += math.inf if z == 0 else count / z**2
        return cls(precision, sampled)


def _costs_no_more(release: SkellamRelease, planned: SkellamRelease) -> bool:
    """Return True if no term of a sum's Rényi divergence is above that of the planned one."""
    pairs = []
    for one in (release, planned):
        squared = one.norm**2 / one.variance
        sizes = one.magnitudes / one.variance
        pairs.append((squared, sizes, squared / one.variance, sizes / one.variance))
    return all(a <= b * (1 + ROUNDING) for a, b in zip(*pairs, strict=True))


@dataclass(frozen=True)
class _Spent:
    """Releases of one client so far.

    Args:
        history: its expenses.
        names: how often it released each field, as "method.field", for the sentence.
        left: whether anything but local training is among it.
    """

    history: History = frozenset()
    names: tuple[tuple[str, int], ...] = ()
    left: bool = False


@dataclass(frozen=True)
class _Part:
    """Part of an event that concerns one client."""

    expense: Expense | None  # None for what costs nothing
    name: str
    left: bool
    training: bool


@dataclass
class Target:
    """Clients' releases in a run, which are to cost at most a target ε.

    Clients of one history are one state here, so that a call costs a look-up for each client.

    Args:
        epsilon: the target.
        delta: δ of ε.
        plan: planned releases of a client with so many samples; None where no price depends on
            the number.
        samples: that each client trains on; empty where no price depends on it.
    """

    epsilon: float
    delta: float
    plan: Callable[[int | None], Plan]
    samples: Mapping[int, int] = field(default_factory=dict)
    _states: list[_Spent] = field(default_factory=lambda: [_Spent()])
    _numbers: dict[_Spent, int] = field(default_factory=lambda: {_Spent(): 0})
    _of: dict[int, int] = field(default_factory=dict)  # number of each client's state
    _parts: dict[_Part, int] = field(default_factory=dict)
    # (number of a state, numbers of parts, samples) -> number of the state with these parts
    _next: dict[tuple[int, tuple[int, ...], int | None], int] = field(default_factory=dict)
    _plans: dict[int | None, Plan] = field(default_factory=dict)

    def learn(self, events: Iterable[Event]) -> None:
        """Count releases that were made already, whatever they cost.

        Args:
            events: in the order in which they were made.
        """
        for event in events:
            self._of.update(self._after([event], check=False))

    def admit(self, events: Sequence[Event]) -> None:
        """Count the releases of one call, or refuse them.

        Args:
            events: what the replies release.

        Raises:
            TargetError: with them, a client's releases would cost more than the target; none of
                them is counted.
        """
        self._of.update(self._after(events, check=True))

    def _after(self, events: Sequence[Event], check: bool) -> dict[int, int]:
        """Return the number of the state of each client of some events after them."""
        added: dict[int, list[int]] = {}
        for event in events:
            # by number of samples, so that clients share them
            part_numbers: dict[int | None, int] = {}
            for client in event.ids:
                samples = self.samples.get(client)
                if samples not in part_numbers:
                    event_part = _part(event, samples)
                    part_numbers[samples] = self._parts.setdefault(event_part, len(self._parts))
                added.setdefault(client, []).append(part_numbers[samples])
        after = {}
        for client, numbers in added.items():
            samples = self.samples.get(client)
            key = (self._of.get(client, 0), tuple(numbers), samples)
            state = self._next.get(key) if check else None
            if state is None:
                state = self._state_after(client, key, check)
            # only what was checked need not be checked when it comes again
            if check:
                self._next[key] = state
            after[client] = state
        return after

    def _state_after(
        self, client: int, key: tuple[int, tuple[int, ...], int | None], check: bool
    ) -> int:
        """Return the number of a client's state after some parts of a call."""
        state, numbers, samples = key
        known_parts = list(self._parts)
        call_parts = [known_parts[number] for number in numbers]
        spent = _with(self._states[state], call_parts)
        if check:
            self._check(spent, client, samples, call_parts)
        return self._number(spent)

    def _number(self, spent: _Spent) -> int:
        """Return the number of a state."""
        if spent not in self._numbers:
            self._numbers[spent] = len(self._states)
            self._states.append(spent)
        return self._numbers[spent]

    def _check(
        self, spent: _Spent, client: int, samples: int | None, added: Sequence[_Part]
    ) -> None:
        """Raise TargetError if a client's releases cost more than the target.

        Args:
            spent: with those of the call.
            client: its number.
            samples: that it trains on.
            added: what the call releases.
        """
        # What was computed and kept costs nothing, until something leaves.
        if not spent.left:
            return
        exact = []
        for release in added:
            if release.expense and release.expense.mechanism == "exact":
                exact.append(release.name)
        if exact:
            raise TargetError(
                f"{exact[0]} would leave client {client} without noise, so that epsilon were "
                f"infinite, and target_epsilon is {self.epsilon:g}: give it noise, or leave "
                "target_epsilon out"
            )
        if samples not in self._plans:
            self._plans[samples] = self.plan(samples)
        if self._plans[samples].covers(spent.history):
            return
        cost = joint_price([spent.history], self.delta).epsilon
        if cost <= self.epsilon:
            return
        # a training leaves with the fields that follow from it
        fields = [release for release in added if not release.training] or added
        released = [release for release in fields if release.expense] or fields
        counts = ", ".join(f"{name} {count}" for name, count in spent.names)
        raise TargetError(
            f"{released[0].name} would bring the releases of client {client} to epsilon = "
            f"{cost:.4g} at delta = {self.delta:g}, and target_epsilon is {self.epsilon:g}: with "
            f"this one, {counts}, which is more than in a run without data; leave target_epsilon "
            "out, or, in a protocol of your own, let dry_runs return hyper-parameters of a run "
            "that releases as much"
        )


def _part(event: Event, samples: int | None) -> _Part:
    """Return the part of an event that concerns a client with so many samples."""
    expense = None
    if event.mechanism not in COSTLESS:
        expense = expense_of(event, samples)
    name = f"{event.method} (training)"
    if event.fields:
        name = f"{event.method}.{event.fields[0]}"
    return _Part(expense, name, not event.kept, training=not event.fields)


def _with(spent: _Spent, call_parts: Sequence[_Part]) -> _Spent:
    """Return what a client released, with the parts of a call."""
    history = Counter(dict(spent.history))
    names = Counter(dict(spent.names))
    for release in call_parts:
        if release.expense is not None:
            history[release.expense] += 1
            names[release.name] += 1
    has_left = spent.left or any(release.left for release in call_parts)
    return _Spent(frozenset(history.items()), tuple(names.items()), has_left)
