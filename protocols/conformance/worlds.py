"""Literal neighbouring worlds: the same calls to clients whose data differ in one unit.

The calls of a run with noise are answered again, without its noise, by two sets of clients: its
own, and the same with one unit of each client's data replaced. A row that is released may move no
further than its noise is scaled to.

Two further sets, with the run's data and with other data, answer the calls with zeros in place of
all that is released or trained with noise: under noise without end. What still differs between them
is told by something else, whatever the ledger says it follows from.

A client answers by its own data and the query alone, so that one pass compares as many pairs of
worlds as there are clients: in the pair of client i, the data of client i alone differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.errors import PolicyError, SecureClusterWarning, UpdateError
from securecluster.messaging.messages import AUTHORITY_CALL, RELAY, Call, Rows
from securecluster.messaging.transcript import Transcript
from securecluster.privacy.dp.ledger import Event
from securecluster.protections.registry import service_methods
from securecluster.protocols.conformance.privacy import is_equal, other_data
from securecluster.protocols.conformance.report import NotApplicableError
from securecluster.protocols.conformance.runs import require
from securecluster.protocols.conformance.simulation import FULL
from securecluster.runs.endpoints import KeySource, build_client
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import Endpoint, release_of

Make = Callable[..., Any]
NARROW = 0.01  # clip norm that every row exceeds before it is clipped
ROUNDING = 1 + 1e-4  # of a norm in single precision
TRAINING = "dp-sgd"  # purposes of draws that belong to local training


@dataclass(frozen=True)
class Draw:
    """One draw of a client's noise: the row before it, and what the noise is scaled to.

    Args:
        purpose: name of the draw.
        row: the row (d,) in double precision; None for a random choice, which has no row.
        multiplier: z.
        sensitivity: the largest L2 norm of what the unit of privacy contributes.
    """

    purpose: str
    row: torch.Tensor | None = None
    multiplier: float = 0.0
    sensitivity: float = 0.0


@dataclass
class World:
    """Clients whose noise is left out and noted."""

    endpoint: Endpoint[Any]
    draws: dict[int, list[Draw]] = field(default_factory=dict)  # by client, of the last call

    @classmethod
    def of(cls, endpoint: Endpoint[Any]) -> World:
        """Return a world whose streams of noise note what they are asked for, and add nothing.

        Args:
            endpoint: of the clients, whose streams are replaced.
        """
        world = cls(endpoint)
        # what is released here leaves nobody, and has no receipts
        endpoint.guard = None
        endpoint.reservations.clear()
        streams = endpoint.client.cohort.secret
        drawn = streams.seed

        def noised(
            client: int,
            purpose: str,
            step: int,
            row: torch.Tensor,
            multiplier: float,
            sensitivity: float,
        ) -> torch.Tensor:
            exact = row.detach().double().flatten().cpu()
            world.note(client, Draw(purpose, exact, multiplier, sensitivity))
            return row.clone()

        def seed(client: int, purpose: str, *rest: Any, **more: Any) -> bytes:
            if not purpose.startswith(TRAINING):
                world.note(client, Draw(purpose))
            found: bytes = drawn(client, purpose, *rest, **more)
            return found

        # one object is behind every draw of an endpoint's clients
        vars(streams).update(noised=noised, seed=seed)
        return world

    def note(self, client: int, draw: Draw) -> None:
        """Add a draw of a client.

        Args:
            client: its number.
            draw: its noise.
        """
        self.draws.setdefault(client, []).append(draw)

    def answer(self, call: Call) -> Any:
        """Return the reply to a call, and note the draws of this call alone.

        Args:
            call: to clients of the endpoint.
        """
        self.draws = {}
        return self.endpoint.answer(call).reply


class SilentContext(CallContext):
    """Context in which zeros are released."""

    def release(self, rows: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        """Return zeros of the rows' shape."""
        return torch.zeros_like(rows)

    def release_losses(self, means: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Return zeros of the losses' shape."""
        return torch.zeros(means.shape, dtype=torch.float64)

    def release_choice(self, counts: Any, *args: Any, **options: Any) -> torch.Tensor:
        """Return the first option for each client."""
        return torch.zeros(len(counts), dtype=torch.int64)


def silenced(endpoint: Endpoint[Any]) -> Endpoint[Any]:
    """Return an endpoint after all noise was replaced by zeros in place of what it is added to.

    Args:
        endpoint: of clients.
    """
    endpoint.guard = None
    endpoint.reservations.clear()
    cohort = endpoint.client.cohort
    context_of, trained = endpoint.context, cohort.train

    def silent_context(*args: Any, **options: Any) -> CallContext:
        known = context_of(*args, **options)
        return SilentContext(**{one.name: getattr(known, one.name) for one in fields(known)})

    def silent_noise(*args: Any, **options: Any) -> torch.Tensor:
        rows: torch.Tensor = options["row"] if "row" in options else args[3]
        return torch.zeros_like(rows)

    def silent_training(
        start: Rows, clients: Sequence[int], plan: Any, *rest: Any, **options: Any
    ) -> torch.Tensor:
        updates: torch.Tensor = trained(start, clients, plan, *rest, **options)
        return torch.zeros_like(updates) if plan.noise else updates

    # one object is behind every draw of an endpoint's clients
    vars(cohort.secret).update(noised=silent_noise)
    vars(cohort).update(train=silent_training)
    vars(endpoint).update(context=silent_context)
    return endpoint


@dataclass
class Comparison:
    """What a call brought from neighbouring worlds.

    Args:
        method: that was called.
        trained: whether DP-SGD is behind the reply.
        told: fields in which replies under noise without end differ from those of clients with
            other data.
        own: by client, its draws in the run's world.
        other: by client, its draws in the neighbouring world.
    """

    method: str
    trained: bool
    told: frozenset[str]
    own: Mapping[int, Sequence[Draw]]
    other: Mapping[int, Sequence[Draw]]


def neighbour(federation: Federation, unit: str) -> Federation:
    """Return clients each of whom differs in one unit of privacy.

    All data of a client become random ones; an example becomes a blank one, whose features are
    zeros.

    Args:
        federation: clients with equally many samples.
        unit: "client" or "example".
    """
    if unit == "client":
        return other_data(federation, seed=2)
    shards = []
    for shard in federation.shards:
        x = np.array(shard.x)
        x[0] = 0
        shards.append(replace(shard, x=x))
    return replace(federation, shards=tuple(shards))


def check_worlds(
    make: Make, federation: Federation, newcomers: Federation, rounds: int = 3, **params: Any
) -> None:
    """Check the price of every release against what neighbouring worlds release.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        newcomers: clients that join afterwards.
        rounds: number of rounds.
        params: hyper-parameters with noise, a unit of privacy, and no mask.

    Raises:
        NotApplicableError: no client releases anything that has a finite price.
    """
    made = make(rounds=rounds, **{**params, "clip": NARROW})
    fitted = made.fit(federation, FULL)
    before = len(fitted.ledger_.events)
    found = compare(
        fitted,
        fitted.transcript_,
        lambda known: build_client(
            made, known, FULL, key_source=KeySource(secrets=fitted.kept_.secrets())
        ),
        federation,
    )
    judged = judge(found, fitted.ledger_.events, made.dp_unit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)  # what newcomers pay is not at issue
        fitted.join(newcomers)
    found = compare(
        fitted, fitted.joined_.transcript, lambda known: guests(fitted, known), newcomers
    )
    judged += judge(found, fitted.ledger_.events[before:], made.dp_unit)
    if not judged:
        raise NotApplicableError("no client releases anything with noise")


def guests(fitted: Any, newcomers: Federation) -> Endpoint[Any]:
    """Return the endpoint of newcomers to a finished run, as `join` builds it.

    Args:
        fitted: the run.
        newcomers: the clients and their data.
    """
    learned = fitted.kept_.learned
    return build_client(
        fitted.result_.method,
        newcomers,
        learned.settings,
        key_source=KeySource(secrets=fitted.kept_.secrets()),
        joins=learned.config,
    )


def compare(
    fitted: Any,
    transcript: Transcript,
    build: Callable[[Federation], Endpoint[Any]],
    federation: Federation,
) -> dict[int, Comparison]:
    """Return what neighbouring worlds answer to the calls of a transcript, by the call's step.

    Args:
        fitted: the run.
        transcript: a full one.
        build: returns the endpoint of some clients.
        federation: the clients that were called.
    """
    unit = fitted.dp_unit
    own, other = (World.of(build(known)) for known in (federation, neighbour(federation, unit)))
    silent = [silenced(build(known)) for known in (federation, other_data(federation))]
    found = {}
    for position in range(len(transcript.entries)):
        call, told = transcript.content(position)
        reached = set(call.to) <= set(own.endpoint.ids)
        if told.reply is None or call.verb in (RELAY, AUTHORITY_CALL) or not reached:
            continue
        call = call.select([call.to.index(i) for i in told.ids])
        if call.method in service_methods():
            for world in (own, other):
                world.answer(call)
            for endpoint in silent:
                endpoint.answer(call)
            continue
        own.answer(call)
        other.answer(call)
        heard = [_answer_or_refusal(_replies_of(endpoint), call) for endpoint in silent]
        release = release_of(getattr(fitted.client, call.method))
        if not release.private:
            continue
        found[call.step] = Comparison(
            call.method,
            bool(release.trains) and unit == "example",
            _differing(*heard),
            own.draws,
            other.draws,
        )
    return found


def _answer_or_refusal(answer: Callable[[Call], Any], call: Call) -> Any:
    """Return the reply to a call; None where clients notice that it is not about their state."""
    try:
        return answer(call)
    except (PolicyError, UpdateError):
        return None


def _replies_of(endpoint: Endpoint[Any]) -> Callable[[Call], Any]:
    """Return the function from calls to an endpoint's replies."""
    return lambda call: endpoint.answer(call).reply


def _names(reply: Any) -> list[str]:
    return [one.name for one in fields(reply)]


def _differing(one: Any, other: Any) -> frozenset[str]:
    """Return the fields in which two replies differ, or all of one that only one set refused."""
    if one is None and other is None:
        return frozenset()
    if one is None or other is None:
        return frozenset(_names(one or other))
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in _names(one)}
    return frozenset(name for name, (a, b) in pairs.items() if not is_equal(a, b))


def judge(found: dict[int, Comparison], events: Sequence[Event], unit: str) -> int:
    """Raise `ConformanceError` where a price is lower than what neighbouring worlds show.

    Args:
        found: comparisons by the call's step.
        events: of the ledger.
        unit: of privacy.

    Returns:
        How many fields were compared.
    """
    priced: dict[int, list[Event]] = {}
    for event in events:
        if event.step in found and event.mechanism in ("gaussian", "free"):
            priced.setdefault(event.step, []).append(event)
    for step, known in priced.items():
        _judge_told(found[step], known)
        noised = [event for event in known if event.mechanism == "gaussian"]
        for client in found[step].own:
            _judge_noise(found[step], client, noised, unit)
    return sum(len(event.fields) for known in priced.values() for event in known)


def _judge_told(one: Comparison, events: Sequence[Event]) -> None:
    """Raise `ConformanceError` where a field depends on data beside what was released of them."""
    for event in events:
        for name in event.fields:
            require(
                name not in one.told,
                f"{one.method}.{name} still depends on data where zeros are in place of all that "
                "is released or trained with noise: send what context.release returned, and use "
                "nothing else for it, nor what a client kept of its data",
            )


def _judge_noise(one: Comparison, client: int, noised: Sequence[Event], unit: str) -> None:
    """Raise `ConformanceError` where a client's noise is less than its price says."""
    if not noised or one.trained:
        return
    lowest = min(event.noise_multiplier or 0.0 for event in noised)
    reach = max(event.replace for event in noised)
    other = {draw.purpose: draw for draw in one.other.get(client, ())}
    for draw in one.own.get(client, ()):
        if draw.row is None:
            continue
        require(
            draw.multiplier * ROUNDING >= lowest,
            f"{one.method} drew noise of multiplier {draw.multiplier:.3g}, which the ledger prices "
            f"as {lowest:.3g}: state the noise that is drawn",
        )
        _judge_row(one.method, draw, other.get(draw.purpose), reach, unit)


def _judge_row(method: str, draw: Draw, other: Draw | None, reach: float, unit: str) -> None:
    """Raise `ConformanceError` where a row moves by more than its noise is scaled to."""
    assert draw.row is not None
    advice = "clip the row to this norm before the noise, or scale the noise to what it can move by"
    if unit == "client":
        norm = float(draw.row.norm())
        require(
            norm <= draw.sensitivity * ROUNDING,
            f"{method} scales noise to a sensitivity of {draw.sensitivity:.3g}, and a client's row "
            f"has norm {norm:.3g}: {advice}",
        )
    if other is None or other.row is None or other.row.shape != draw.row.shape:
        return
    distance = float((draw.row - other.row).norm())
    require(
        distance <= reach * draw.sensitivity * ROUNDING,
        f"{method} scales noise to a sensitivity of {draw.sensitivity:.3g}, and replacing one "
        f"{unit} moves its row by {distance:.3g}: {advice}",
    )
