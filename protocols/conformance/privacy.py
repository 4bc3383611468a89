"""Checks of what clients release: free replies, events, ε at a target, newcomers' price."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import pack, unpack
from securecluster.messaging.messages import RELAY
from securecluster.parties.client_state import ClientState
from securecluster.parties.endpoints import build_client
from securecluster.protocols import authoring as fl
from securecluster.protocols.conformance.neighbours import other_clients
from securecluster.protocols.conformance.report import ConformanceError, NotApplicableError
from securecluster.protocols.conformance.runs import require
from securecluster.protocols.conformance.simulation import FULL, SEEDED
from securecluster.runtime.endpoint import KEY_METHODS, message_types, release_of

if TYPE_CHECKING:
    from securecluster.messaging.transcript import Transcript
    from securecluster.privacy.dp.ledger import Ledger
    from securecluster.runtime.endpoint import Endpoint

Make = Callable[..., Any]
SPREAD = {"rounds": 4, "participation": 0.6}
TARGET = 8.0  # ε that runs with noise are asked for
CLIP = 1.0
OTHERS = 3  # kinds of other data that free replies are compared with
ABOVE = 1 + 1e-6  # a search for noise ends a little below its target


def private(unit: str, placement: str = "local") -> dict[str, Any]:
    """Return hyper-parameters by which no release is exact.

    Args:
        unit: unit of privacy.
        placement: party that adds the noise.
    """
    return {
        "clip": CLIP,
        "noise": 0.0,
        "target_epsilon": TARGET,
        "dp_unit": unit,
        "placement": placement,
    }


def is_same(one: Any, other: Any) -> bool:
    """Return whether two replies hold the same numbers.

    Args:
        one: a message.
        other: of the same class.
    """
    pairs = [(getattr(one, f.name), getattr(other, f.name)) for f in fields(one)]
    return all(is_equal(a, b) for a, b in pairs)


def is_equal(one: Any, other: Any) -> bool:
    """Return whether two fields of replies hold the same numbers.

    Args:
        one: rows, a shared value or a scalar.
        other: of the same kind.
    """
    if isinstance(one, fl.Rows) and isinstance(other, fl.Rows):
        return torch.equal(one.values, other.values)
    if isinstance(one, fl.Shared) and isinstance(other, fl.Shared):
        return torch.equal(one.value, other.value)
    return bool(one == other)


def transplant(source: Endpoint[Any], target: Endpoint[Any]) -> None:
    """Let the clients of an endpoint remember what those of another one do.

    Args:
        source: whose clients' state is copied.
        target: that gets the copy; it has data of its own.
    """
    state = unpack(pack(source.client.state(source.keys.secrets)), ClientState)
    target.client.restore(state)
    target.keys.restore(state.secrets)


def check_free_replies(make: Make, federation: fl.Federation, **params: Any) -> int:
    """Check that what is declared to tell nothing new tells nothing new.

    A reply with private=False is the same from clients with other data who are asked the same from
    the beginning. So is a derived one that is masked, such as a posted model. Any derived reply is
    the same from clients who remember the same and hold other data.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        params: hyper-parameters.

    Returns:
        How many replies were compared.
    """
    made, compared = make(**{**SPREAD, **params}), 0
    fitted = made.fit(federation, FULL)
    others = other_clients(federation, "example")[:OTHERS]
    own_endpoint = build_client(made, federation, SEEDED)
    independent = [build_client(made, data, SEEDED) for data in others]
    swapped = [build_client(made, data, SEEDED) for data in others]
    for position in range(len(fitted.transcript_.entries)):
        call, answer = fitted.transcript_.content(position)
        if answer.reply is None or call.verb == RELAY:
            continue
        call = call.select([call.to.index(i) for i in answer.ids])
        if call.method not in KEY_METHODS and fields(answer.reply):
            release = release_of(getattr(made.client, call.method))
            for other in swapped if release.derived else ():
                transplant(own_endpoint, other)
                require(
                    is_same(other.answer(call).reply, answer.reply),
                    f"{call.method} depends on data: it is not derived; leave derived=True out",
                )
            again = [other.answer(call).reply for other in independent]
            if not release.private or (release.derived and release.through):
                require(
                    all(is_same(reply, answer.reply) for reply in again),
                    f"{call.method} depends on data: it is private, and not free; leave "
                    "private=False, or derived=True, out",
                )
                compared += len(call.to)
        else:
            for other in independent:
                other.answer(call)
        own_endpoint.answer(call)
    return compared


def events_owed(fitted: Any) -> Counter[Any]:
    """Return (method, field, round, client) of everything private that the transcript of a run
    shows to have left clients.

    Args:
        fitted: a run with a full transcript.
    """
    return owed_by(fitted, fitted.transcript_)


def owed_by(fitted: Any, transcript: Transcript) -> Counter[Any]:
    """Return (method, field, round, client) of everything private in a transcript.

    Args:
        fitted: the protocol.
        transcript: a full one, of a run or of newcomers.
    """
    owed: Counter[Any] = Counter()
    for position, entry in enumerate(transcript.entries):
        call, answer = transcript.content(position)
        target = getattr(fitted.client, call.method, None)
        if target is None or answer.reply is None or not release_of(target).private:
            continue  # a key agreement, a server, or nothing of anyone's data
        # Masked replies of secure sums have further fields, which are of no one's data.
        _, declared = message_types(fitted.client, call.method)
        names = [
            one.name
            for one in fields(declared)
            if isinstance(getattr(answer.reply, one.name, None), fl.Rows | fl.Shared)
        ]
        owed.update((call.method, name, entry.round, i) for name in names for i in answer.ids)
    return owed


def events_written(fitted: Any) -> Counter[Any]:
    """Return (method, field, round, client) of everything that the ledger has an event for.

    Args:
        fitted: a finished run.
    """
    return written_in(fitted.ledger_)


def written_in(ledger: Ledger) -> Counter[Any]:
    """Return (method, field, round, client) of everything that a ledger has an event for.

    Args:
        ledger: of a run or of newcomers.
    """
    return Counter(
        (e.method, f, e.round, i) for e in ledger.events for f in e.fields for i in e.ids
    )


def check_events(owed: Counter[Any], written: Counter[Any]) -> None:
    """Check that every private field that left a client has its event, and no other has one.

    Args:
        owed: what left clients, as `owed_by` returns it.
        written: what the ledger has events for.
    """
    for difference, sentence in (
        (owed - written, "left {0} without an event in the ledger"),
        (written - owed, "has an event in the ledger and never left {0}"),
    ):
        for method, field, number, client in sorted(difference):
            defect = sentence.format(f"client {client} in round {number}")
            raise ConformanceError(
                f"{method}.{field} {defect}: call clients by the verbs of the server's "
                "channel alone"
            )


def check_priced(make: Make, federation: fl.Federation, **params: Any) -> None:
    """Check that every private field writes an event, and that with noise none of them is exact.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        params: hyper-parameters with noise.
    """
    fitted = make(**{"rounds": 3, **params}).fit(federation, FULL)
    check_events(events_owed(fitted), events_written(fitted))
    require_noise(fitted.ledger_)
    epsilon = fitted.ledger_.price(1e-5).epsilon
    require(
        0 < epsilon < math.inf,
        f"ε is {epsilon} with noise on everything: return what clients release by client methods "
        "with @answers",
    )


def require_noise(ledger: Ledger) -> None:
    """Raise `ConformanceError` where a release of a run with noise is exact.

    Args:
        ledger: of the run.
    """
    for method, field in ledger.exact():
        raise ConformanceError(
            f"{method}.{field} leaves without noise, so ε is infinite: name it in through=, send "
            "what context.release returned, or refuse this dp_unit in check"
        )


def check_target(make: Make, federation: fl.Federation, rounds: int = 3, **params: Any) -> None:
    """Check that a run costs a finite ε, and not more than the target that it was given.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        rounds: number of rounds.
        params: hyper-parameters with a `target_epsilon`.

    Raises:
        NotApplicableError: no client releases anything.
    """
    fitted = make(rounds=rounds, **params).fit(federation, FULL)
    owed = events_owed(fitted)
    check_events(owed, events_written(fitted))
    require_noise(fitted.ledger_)
    target = float(params["target_epsilon"])
    epsilon = fitted.ledger_.price(fitted.delta).epsilon
    require(
        epsilon <= target * ABOVE,
        f"the run costs ε = {epsilon:.2f} and was asked for {target:g} at most: let dry_runs "
        "return hyper-parameters with which it releases as much as it may",
    )
    if not owed:
        raise NotApplicableError("no client releases anything of its data")


def check_newcomers_price(
    make: Make, federation: fl.Federation, newcomers: fl.Federation, rounds: int = 3, **params: Any
) -> None:
    """Check that the ledger grows by what newcomers release, and that this has noise.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        newcomers: clients that join afterwards.
        rounds: number of rounds.
        params: hyper-parameters with noise.

    Raises:
        NotApplicableError: newcomers release nothing.
    """
    fitted = make(rounds=rounds, **params).fit(federation, FULL)
    before = len(fitted.ledger_.events)
    fitted.join(newcomers)
    owed = owed_by(fitted, fitted.joined_.transcript)
    if not owed:
        raise NotApplicableError("newcomers release nothing of their data")
    added = replace(fitted.ledger_, events=fitted.ledger_.events[before:])
    check_events(owed, written_in(added))
    require_noise(added)
    epsilon = added.price(fitted.delta).epsilon
    require(
        math.isfinite(epsilon),
        f"newcomers pay ε = {epsilon} in a run with noise: add noise to what they send",
    )
