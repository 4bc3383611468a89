"""Literal worlds: the calls of a run, answered by the same clients with other data.

In each world clients release public numbers (`public_numbers`) in place of all that has noise. What
still differs between worlds is told by something else, whatever the ledger says it follows from:
a field of a reply, a refusal, or what a client did beside its numbers, such as the noise it drew
and the plan that it trained by.

Beside its public number, each draw notes the row that it would have protected. Between neighbours,
worlds that differ in one unit of privacy, a row may move no further than its noise is scaled to.

A client answers by its own data and the query alone, so that one world differs for all clients:
each of them is a pair of worlds. A world answers all calls before the next one begins, so that
what a client keeps outside its state is of this world, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import SecureClusterWarning
from securecluster.messaging.messages import AUTHORITY_CALL, RELAY, Call
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.privacy.dp.ledger import Event
from securecluster.protections.registry import service_methods
from securecluster.protocols import authoring as fl
from securecluster.protocols.conformance import neighbours, public_numbers
from securecluster.protocols.conformance.module_variables import author_modules, clear_caches
from securecluster.protocols.conformance.report import ConformanceError, NotApplicableError
from securecluster.protocols.conformance.runs import require
from securecluster.protocols.conformance.simulation import FULL
from securecluster.runtime.endpoint import Endpoint
from securecluster.training.foreign_trainer import trainer_of

if TYPE_CHECKING:
    from securecluster.messaging.transcript import Transcript

Make = Callable[..., Any]
Build = Callable[[fl.Federation], Endpoint[Any]]
Answers = Sequence[public_numbers.Answer]  # of one world to each call
NARROW = 0.01  # clip norm that every row exceeds before it is clipped
ROUNDING = 1 + 1e-4  # of a norm in single precision
ABSENT = repr(None)  # digest of a field that is left out
OTHERS = 3  # worlds that a pass compares with the run's own
PRICED = ("gaussian", "free", "public")  # mechanisms of fields that have a finite price
ADVICE = "clip the row to this norm before the noise, or scale the noise to what it can move by"


def check_worlds(
    make: Make, federation: fl.Federation, newcomers: fl.Federation, rounds: int = 3, **params: Any
) -> None:
    """Check the price of every release against what other worlds release.

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
    compared = compare(fitted, fitted.transcript_, federation, fitted.ledger_.events)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)  # what newcomers pay is not at issue
        fitted.join(newcomers)
    first = len(federation)
    compared += compare(
        fitted, fitted.joined_.transcript, newcomers, fitted.ledger_.events[before:], first
    )
    if not compared:
        raise NotApplicableError("no client releases anything with noise")


def compare(
    fitted: Any,
    transcript: Transcript,
    federation: fl.Federation,
    events: Sequence[Event],
    first: int = 0,
) -> int:
    """Raise `ConformanceError` where a price is lower than what other worlds show.

    Args:
        fitted: the run.
        transcript: a full one, of the run or of newcomers.
        federation: the clients that were called.
        events: of the ledger.
        first: number of the first client.

    Returns:
        How many fields were compared.
    """
    numbers = range(first, first + len(federation))
    calls = _calls(transcript, numbers)
    priced: dict[int, list[Event]] = {}
    for event in events:
        if event.mechanism in PRICED:
            priced.setdefault(event.step, []).append(event)

    unit = fitted.dp_unit
    modules = author_modules(fitted.result_.method)

    def answers(data: fl.Federation, number: int) -> Answers:
        clear_caches(modules)  # what functions remember is of another world
        endpoint, samples = _endpoint(fitted, data, numbers)
        world = public_numbers.World(endpoint, public_numbers.PublicNumbers(number), unit)
        collected = [world.answer(call) for call in calls]
        require(
            public_numbers.samples_of(endpoint.client.cohort) == samples,
            "clients change their samples in memory, so that whatever was computed of all of them "
            "is in each one before any clip: work on a copy (clone)",
        )
        return collected

    for number in range(public_numbers.PASSES):
        _compare_once(calls, partial(answers, number=number), federation, priced, unit, number)
    return sum(len(event.fields) for priced_events in priced.values() for event in priced_events)


def _compare_once(
    calls: Sequence[Call],
    answers: Callable[[fl.Federation], Answers],
    federation: fl.Federation,
    priced: Mapping[int, Sequence[Event]],
    unit: str,
    number: int,
) -> None:
    """Raise `ConformanceError` where a price is lower than what the worlds of one pass show.

    Single examples are changed in the first pass alone: of the clients' data, and of data that are
    all alike, where one other example moves a statistic the furthest.
    """
    others = neighbours.other_clients(federation, unit)
    # each pass begins elsewhere, so that all of them meet the run's own world
    turn = [others[(number * OTHERS + k) % len(others)] for k in range(OTHERS)]
    own_answers = answers(federation)
    other_answers = [answers(clients) for clients in turn]
    for world in other_answers:
        _judge_calls(calls, own_answers, world, priced)
    if unit == "client":
        _judge_rows(calls, [own_answers, *other_answers], priced, unit)
    elif number == 0:
        zeros = answers(neighbours.blank(federation))
        for data in (federation, neighbours.alike(federation)):
            base = own_answers if data is federation else answers(data)
            changed = neighbours.changed_examples(data).values()
            changed_answers = [answers(clients) for clients in changed]
            for world in changed_answers:
                _judge_calls(calls, base, world, priced)
            _judge_blanks(calls, base, changed_answers[0], zeros, priced)
            _judge_rows(calls, [base, *changed_answers], priced, unit)


def _calls(transcript: Transcript, numbers: Sequence[int]) -> list[Call]:
    """Return the calls of a transcript that clients answered, to those who did."""
    calls = []
    for position in range(len(transcript.entries)):
        call, answer = transcript.content(position)
        reached = set(call.to) <= set(numbers)
        if answer.reply is not None and call.verb not in (RELAY, AUTHORITY_CALL) and reached:
            calls.append(call.select([call.to.index(i) for i in answer.ids]))
    return calls


def _endpoint(
    fitted: Any, data: fl.Federation, numbers: Sequence[int]
) -> tuple[Endpoint[Any], list[str]]:
    """Return the endpoint of clients of a run, or of newcomers, with some data, and the digests of
    these before a client had them.

    The configuration is that of the run, which does not follow from these data; and they have no
    target, as newcomers have none.
    """
    learned = fitted.kept_.learned
    samples: list[str] = []

    def trainer(federation: fl.Federation, model: Any, *options: Any) -> Any:
        cohort = trainer_of(model)(federation, model, *options)
        samples.extend(public_numbers.samples_of(cohort))
        return cohort

    endpoint = build_client(
        fitted.result_.method,
        data,
        learned.settings,
        key_source=KeySource(secrets=fitted.kept_.secrets()),
        joins=learned.config,
        numbers=numbers,
        trainer=trainer,  # type: ignore[arg-type]
    )
    return endpoint, samples


def _compared(
    calls: Sequence[Call], priced: Mapping[int, Sequence[Event]]
) -> Iterator[tuple[int, Call, Sequence[Event]]]:
    """Yield the position of each call whose replies have a price, the call and its events."""
    for position, call in enumerate(calls):
        if call.method not in service_methods() and call.step in priced:
            yield position, call, priced[call.step]


def _judge_calls(
    calls: Sequence[Call],
    own_answers: Answers,
    other: Answers,
    priced: Mapping[int, Sequence[Event]],
) -> None:
    """Raise `ConformanceError` where something but released numbers depends on data."""
    for call, one, another in zip(calls, own_answers, other, strict=True):
        require(
            (one.fields is None) == (another.fields is None),
            f"{call.method} refuses some data and answers others, and who does not reply tells of "
            "them: reply in any case, with what context.release returned",
        )
        # a field that is absent in the run has no price there
        there = {name for name, value in (another.fields or {}).items() if value != ABSENT}
        added = sorted(name for name in there if (one.fields or {}).get(name) == ABSENT)
        require(
            not added,
            f"{call.method} leaves {', '.join(added)} out with some data and not with others, "
            "which tells of them: send the field in any case",
        )
    for position, call, events in _compared(calls, priced):
        one, another = own_answers[position], other[position]
        if one.fields is None or another.fields is None:
            continue
        for client in call.to:
            _judge_deeds(call.method, one.deeds.get(client, []), another.deeds.get(client, []))
        for event in events:
            for name in event.fields:
                require(
                    one.fields.get(name) == another.fields.get(name),
                    f"{call.method}.{name} still depends on data where public numbers are in place "
                    "of all that is released or trained with noise: send what context.release "
                    "returned, and use nothing else for it, nor what a client kept of its data",
                )
        _judge_used(call.method, one, another)


def _judge_deeds(
    method: str, own_deeds: Sequence[public_numbers.Deed], other: Sequence[public_numbers.Deed]
) -> None:
    """Raise `ConformanceError` where what a client does beside its numbers depends on data."""
    for one, another in zip(own_deeds, other, strict=False):
        if one == another:
            continue
        require(one.kind == another.kind, _told_by_order(method))
        raise ConformanceError(_told_by(method, one, another))
    require(len(own_deeds) == len(other), _told_by_order(method))


def _told_by_order(method: str) -> str:
    """Return the sentence on releases or trainings that only some data lead to."""
    return (
        f"{method} makes other releases or trainings with other data: let neither their number nor "
        "their order depend on data"
    )


def _told_by(method: str, one: public_numbers.Deed, another: public_numbers.Deed) -> str:
    """Return the sentence on something that a client did otherwise with other data."""
    what, _, aspect = one.kind.partition(" ")
    if what == "training":
        return (
            f"{method} trains with noise, and the {aspect} of this training depends on data: let "
            "it follow from public or released numbers alone"
        )
    return (
        f"{method} asks for other noise with other data, {one.value} and {another.value} (name, "
        "shape, z, sensitivity): let these follow from public numbers alone"
    )


def _judge_used(method: str, one: public_numbers.Answer, another: public_numbers.Answer) -> None:
    """Raise `ConformanceError` where data are at hand in the place of released numbers alone."""
    releases = any(
        deed.kind == public_numbers.NOISE for deeds in one.deeds.values() for deed in deeds
    )
    for (client, user, name), values in one.used.items():
        others = another.used.get((client, user, name), [])
        equal = all(a == b for a, b in zip(values, others, strict=False))
        require(
            equal or user != public_numbers.FUNCTION,
            f"{method} gives context.postprocess a function that uses {name}, which depends on "
            "data: let it use the released numbers alone, or release this as well",
        )
        # beside a training, what a client kept may be released with noise of its own
        require(
            equal or releases,
            f"{method} trains with noise and reads {name}, which clients keep of their data: no "
            "noise covers how that steers or scales the training; release it in a call of its own",
        )


def _judge_rows(
    calls: Sequence[Call],
    worlds: Sequence[Answers],
    priced: Mapping[int, Sequence[Event]],
    unit: str,
) -> None:
    """Raise `ConformanceError` where noise is less than its price says, or than rows move by.

    Args:
        calls: of a run.
        worlds: that differ in one unit of privacy for each client.
        priced: events by step.
        unit: of privacy.
    """
    for position, call, events in _compared(calls, priced):
        noised = [event for event in events if event.mechanism == "gaussian"]
        if not noised:
            continue
        lowest = min(event.noise_multiplier or 0.0 for event in noised)
        reach = max(event.replace for event in noised)
        for client in call.to:
            rows = [world[position].draws.get(client, []) for world in worlds]
            for draw in (one for drawn in rows for one in drawn):
                _judge_level(call.method, draw, lowest, unit)
            for one, other in combinations(rows, 2):
                for a, b in zip(one, other, strict=False):
                    _judge_distance(call.method, a, b, reach, f"replacing one {unit}")


def _judge_level(method: str, draw: public_numbers.Draw, lowest: float, unit: str) -> None:
    """Raise `ConformanceError` where a draw has less noise than is priced, or a longer row."""
    require(
        draw.multiplier * ROUNDING >= lowest,
        f"{method} drew noise of multiplier {draw.multiplier:.3g}, which the ledger prices "
        f"as {lowest:.3g}: state the noise that is drawn",
    )
    norm = float(draw.row.norm())
    require(
        unit != "client" or norm <= draw.sensitivity * ROUNDING,
        f"{method} scales noise to a sensitivity of {draw.sensitivity:.3g}, and a client's row "
        f"has norm {norm:.3g}: {ADVICE}",
    )


def _judge_distance(
    method: str, one: public_numbers.Draw, other: public_numbers.Draw, reach: float, what: str
) -> None:
    """Raise `ConformanceError` where a row moves by more than its noise is scaled to."""
    if one.row.shape != other.row.shape:
        return
    distance = float((one.row - other.row).norm())
    allowed = reach * one.sensitivity
    require(
        distance <= allowed * ROUNDING,
        f"{method} scales noise to a sensitivity of {one.sensitivity:.3g}, and {what} moves its "
        f"row by {distance:.3g}, where {allowed:.3g} is priced: {ADVICE}",
    )


def _judge_blanks(
    calls: Sequence[Call],
    own_answers: Answers,
    blanked: Answers,
    zeros: Answers,
    priced: Mapping[int, Sequence[Event]],
) -> None:
    """Raise `ConformanceError` where a blanked example moves a row by more than the sensitivity.

    Only where blank examples contribute nothing, and clients who have no others release zeros:
    elsewhere one of them is another example in the place of the first.
    """
    worlds = (own_answers, blanked, zeros)
    for position, call, events in _compared(calls, priced):
        if all(event.mechanism != "gaussian" for event in events):
            continue
        for client in call.to:
            rows = [world[position].draws.get(client, []) for world in worlds]
            for one, other, nothing in zip(*rows, strict=False):
                if not torch.any(nothing.row):
                    _judge_distance(call.method, one, other, 1.0, "blanking one example")
