"""Checks of whole runs: bytes, replay, resuming, masks, nodes, lost clients, newcomers, sums.

Each raises `ConformanceError` with a sentence that says what to do. `make(mask=…, rounds=…)`
returns a protocol with these hyper-parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from securecluster.core.lazy_torch import torch
from securecluster.errors import ReplayError
from securecluster.messaging import wire
from securecluster.messaging.messages import AUTHORITY_CALL, RELAY, Call, reply_header
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import build_client
from securecluster.protections.registry import service_methods
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages.restarts import lagging_clients_of
from securecluster.protocols.conformance import simulation
from securecluster.protocols.conformance.report import ConformanceError, NotApplicableError
from securecluster.runtime.endpoint import release_of
from securecluster.runtime.settings import Settings

Make = Callable[..., Any]
# Largest difference of two numbers of a model in double precision, over frames or through masks.
NODE_TOLERANCE = 1e-9
MASK_TOLERANCE = 1e-6  # of the norm of what a round moves
SUM_TOLERANCE = 1e-5
LOST_ROUNDS = (2, 3, 5)
LOST_CLIENT = 2
# A few clients fall into few groups, so that one replay of random groups often finds the same.
REPLAYS = 4


@dataclass
class Example:
    """One run of a protocol, with dropouts and a full transcript, that several checks read."""

    make: Callable[[], Any]  # the protocol anew, with the same hyper-parameters
    federation: fl.Federation
    settings: Settings
    fitted: Any


def example(make: Make, federation: fl.Federation, **params: Any) -> Example:
    """Fit a protocol once for `check_frames`, `check_replay`, `check_repeats`, `check_resume`.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        params: hyper-parameters.
    """
    anew = partial(make, **{"rounds": 4, **params})
    settings = replace(simulation.FULL, dropout=0.2)
    return Example(anew, federation, settings, anew().fit(federation, settings))


def require(holds: bool, sentence: str) -> None:
    """Raise `ConformanceError` with a sentence unless something holds.

    Args:
        holds: what must hold.
        sentence: what to do where it does not.
    """
    if not holds:
        raise ConformanceError(sentence)


def check_frames(fitted: Any) -> None:
    """Check that the recorded numbers of bytes are the lengths of the encoded frames.

    Args:
        fitted: a run with a full transcript.
    """
    byte_totals = {"up": 0, "down": 0}
    for position, entry in enumerate(fitted.transcript_.entries):
        call, answer = fitted.transcript_.content(position)
        up, down = _frame_lengths(fitted, call, answer)
        recorded = (tuple(entry.up), tuple(entry.down))
        if entry.verb == RELAY:  # to the server above, so that queries go up
            recorded = (tuple(entry.down), tuple(entry.up))
        require(
            (tuple(up), tuple(down)) == recorded,
            f"the bytes of {call.method} in the transcript are not those of its frames: let the "
            "transport count what it encodes",
        )
        if entry.verb not in (RELAY, AUTHORITY_CALL):  # which are counted between servers
            byte_totals["up"] += sum(up)
            byte_totals["down"] += sum(down)
    require(
        byte_totals == {k: fitted.bytes_[k] for k in byte_totals},
        f"bytes_ says {fitted.bytes_}, and the frames have {byte_totals}: count every call",
    )
    require(
        byte_totals["up"] > 0,
        "no client sent anything: let run_server call clients by net.gather, net.sum or net.pairs",
    )


def _frame_lengths(fitted: Any, call: Call, answer: Any) -> tuple[list[int], list[int]]:
    """Return the lengths of a call's replies and queries, by recipient, once they are encoded."""
    query, reply = call_types(fitted, call.method)
    up = [0] * len(call.to)  # a client that does not reply sends nothing
    for row, client in enumerate(answer.ids):
        k = call.to.index(client)
        header = reply_header(call.header(k))
        receipts = answer.receipts_at(row)
        frame = wire.encode(header, answer.reply, row, receipts)
        decoded, _, written = wire.decode_reply(frame, reply)
        require(
            decoded == header and written == receipts,
            f"a reply of {call.method} is not what its frame says once it is decoded",
        )
        up[k] = len(frame)
    down = [len(wire.encode(call.header(k), call.query, k)) for k in range(len(call.to))]
    frame = wire.encode(call.header(0), call.query, 0)
    require(
        wire.decode(frame, query)[0] == call.header(0),
        f"a query of {call.method} is not what its frame says once it is decoded",
    )
    return up, down


def check_replay(run: Example) -> None:
    """Check that the server alone, against a transcript, ends in the same state bit for bit.

    It replays `REPLAYS` times, for chance alone may find the same few groups once.

    Args:
        run: with a full transcript.
    """
    made = run.make()
    config = made.config(run.federation, "float32")
    advice = "draw from net.randomness alone, and keep nothing between two calls outside the state"
    for _ in range(REPLAYS):
        try:
            state = made.replay(run.fitted.transcript_, config)
        except ReplayError as error:
            raise ConformanceError(f"{error}: {advice}") from error
        require(
            state == run.fitted.server_state_,
            f"a replay against the same messages ends in another state: {advice}",
        )


def check_masked_round(
    make: Make,
    federation: fl.Federation,
    mask: str,
    rounds: int = 1,
    settings: Settings | None = None,
) -> None:
    """Check that one round under a mask gives the models that it gives without one.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        mask: name of a mask.
        rounds: number of rounds, of which the first moves models most.
        settings: precision; None is single precision.
    """
    settings = settings or simulation.SEEDED
    made = make(rounds=rounds, mask=mask)
    masked = made.fit(federation, settings).client_models_.values
    plain = made.set_params(mask="none").fit(federation, settings).client_models_.values
    start = build_client(made, federation, settings).client.cohort.start
    distance = float(torch.linalg.norm(masked - plain))
    training_distance = float(torch.linalg.norm(plain - start))
    require(
        distance <= MASK_TOLERANCE * training_distance,
        f"under the mask {mask} models are {distance:.2g} away from those without a mask: compute "
        "with distances and inner products of masked rows alone, and not with the order or the "
        "values of their coordinates, and let clients keep no view of a reply's tensor where "
        "fresh=True",
    )


def check_nodes(make: Make, federation: fl.Federation, rounds: int = 3, **params: Any) -> None:
    """Check that nodes with one client each, behind real frames, end with the models of all clients
    in one batch.

    A node is made anew for every call, as a process that is started for it: it has its state alone.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        rounds: number of rounds.
        params: other hyper-parameters.
    """
    made = make(rounds=rounds, **params)
    state, nodes = simulation.serve_nodes(made, federation)
    together = made.fit(federation, simulation.DOUBLE).client_models_.values
    of_nodes = torch.cat([made.observer.kept_models(node.client, state).values for node in nodes])
    distance = float((of_nodes - together).abs().max())
    require(
        of_nodes.shape == together.shape and distance <= NODE_TOLERANCE,
        f"nodes with one client each end {distance:.2g} away from the same clients in one batch: "
        "let a client method use the rows of context.positions alone, and context.ids for names; "
        "and keep what it needs in a later call in a ClientTensor, or in memory() and recall()",
    )


def check_repeats(run: Example) -> None:
    """Check that the same seed gives the same run.

    Args:
        run: that is repeated.
    """
    again = run.make().fit(run.federation, run.settings)
    same = torch.equal(again.client_models_.values, run.fitted.client_models_.values)
    require(
        same and again.history_ == run.fitted.history_,
        "two runs with one seed end with other models: draw from self.cohort.drawn, the run's "
        "noise streams or net.randomness, and from no generator of your own",
    )


def check_resume(run: Example, folder: Path, stops: Sequence[int] = (1, 3)) -> None:
    """Check that a run that is stopped after its first and its third round ends as if it never had
    been.

    Args:
        run: that is done again in a folder.
        folder: empty.
        stops: rounds after which the run is stopped.
    """
    federation, settings, uninterrupted = run.federation, run.settings, run.fitted
    for stop in stops:
        try:
            run.make().fit(
                federation, settings, folder=folder, report=simulation.interrupt_after(stop)
            )
        except KeyboardInterrupt:
            continue
        raise ConformanceError(
            f"the run has no round {stop}: give run.rounds all rounds of the method"
        )
    resumed = run.make().fit(federation, settings, folder=folder)
    _same_run(resumed, uninterrupted, "a run that was stopped and resumed")
    require(
        resumed.transcript_.entries == uninterrupted.transcript_.entries,
        "a run that was stopped and resumed makes other calls: keep what decides them in the "
        "state of run.rounds, and wrap phases before it in run.once",
    )
    # as after a kill just before the end
    again = run.make().fit(federation, settings, folder=folder)
    _same_run(again, uninterrupted, "a finished run that is loaded from its folder")


def _same_run(other: Any, reference: Any, what: str) -> None:
    """Raise `ConformanceError` unless two runs ended alike."""
    advice = (
        "keep the server's part in the state that run.rounds and run.once are given, and the "
        "clients' part in memory() and recall()"
    )
    comparisons = {
        "models": torch.equal(other.client_models_.values, reference.client_models_.values),
        "history": other.history_ == reference.history_,
        "bytes": other.bytes_ == reference.bytes_,
        "state of the server": other.server_state_ == reference.server_state_,
    }
    differing = [name for name, same in comparisons.items() if not same]
    require(not differing, f"{what} has other {', '.join(differing)}: {advice}")


def check_saved(run: Example, newcomers: fl.Federation, folder: Path) -> None:
    """Check that a fitted protocol places newcomers as before after it was saved and loaded.

    Args:
        run: a finished one.
        newcomers: clients that were not in the run.
        folder: empty.
    """
    fitted = run.make().fit(run.federation, run.settings)  # its ledger gets newcomers' releases
    before = fitted.join(newcomers).tolist()
    fitted.save(folder)
    objects = _own_objects(fitted)
    loaded = type(fitted).load(folder, **objects)
    require(
        torch.equal(loaded.client_models_.values, fitted.client_models_.values),
        "a fitted protocol has other models once it is saved and loaded: return them from "
        "final_models, and keep nothing that fit needs on self",
    )
    after = loaded.join(newcomers).tolist()
    require(
        after == before,
        f"newcomers get the clusters {before} before save and {after} after load: let "
        "assign_newcomers read the state that run_server returned, and nothing kept on self",
    )


def _own_objects(fitted: Any) -> dict[str, Any]:
    """Return the hyper-parameters that a folder does not hold, as `load` takes them."""
    plain = (str, int, float, bool, tuple, list, dict, type(None))
    params = fitted.get_params()
    return {name: value for name, value in params.items() if not isinstance(value, plain)}


def trains(made: Any, call: Call) -> bool:
    """Return whether a client's reply to a call is the result of local training.

    Args:
        made: the protocol.
        call: to its clients.
    """
    target = getattr(made.client, call.method, None)
    if target is None or call.method in service_methods():
        return False
    return bool(release_of(target).trains) or call.method in ("train", "contribute")


def check_everyone_catches_up(
    make: Make, federation: fl.Federation, rounds: int = 5, **params: Any
) -> None:
    """Check that a client that misses rounds, the last one too, ends with its cluster's model.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        rounds: number of rounds.
        params: other hyper-parameters.

    Raises:
        NotApplicableError: clients of one cluster have models of their own, or the lost client is
            alone in its cluster.
    """
    made = make(rounds=rounds, **params)

    def lost(call: Call) -> set[int]:
        absent = call.round in LOST_ROUNDS and trains(made, call)
        return {LOST_CLIENT} if absent else set()

    served = simulation.serve(made, federation, lost, simulation.SEEDED)
    lagging = _lagging(served.state)
    require(
        not lagging,
        f"clients {lagging} lack averages at the end of the run: call flush(net, run, state), or "
        "deliver_models(net, running), after the last round",
    )
    others = _cluster_of_lost(made, served)
    models = made.observer.final_models(served.endpoint.client, served.state).values
    if all(torch.equal(models[LOST_CLIENT], models[i]) for i in others):
        return
    complete = simulation.serve(made, federation, settings=simulation.SEEDED)
    models = made.observer.final_models(complete.endpoint.client, complete.state).values
    others = _cluster_of_lost(made, complete)
    if not all(torch.equal(models[LOST_CLIENT], models[i]) for i in others):
        raise NotApplicableError("clients of one cluster end with models of their own")
    raise ConformanceError(
        f"client {LOST_CLIENT}, which missed the rounds {LOST_ROUNDS}, ends with another model "
        "than its cluster: send every client the averages that it lacks, and deliver the last "
        "ones after the loop"
    )


def _cluster_of_lost(made: Any, served: Any) -> list[int]:
    """Return the other clients in the cluster of the client that missed rounds.

    Raises:
        NotApplicableError: there are none.
    """
    labels = made.observer.known_labels(served.endpoint.client, served.state)
    clients = served.net.clients
    others = [i for i in clients if labels[i] == labels[LOST_CLIENT] and i != LOST_CLIENT]
    if not others:
        raise NotApplicableError(f"client {LOST_CLIENT} is alone in its cluster")
    return others


def _lagging(state: Any) -> list[int]:
    """Return the clients that lack averages in a final state."""
    outbox = getattr(state, "outbox", None)
    if outbox is not None:
        return sorted(outbox.lagging_clients())
    running = getattr(state, "running", None)  # of a `ModelSetState`
    if isinstance(running, fl.Restart):
        return sorted(lagging_clients_of(running))
    return []


def check_newcomers(
    make: Make, run: fl.Federation, newcomers: fl.Federation, masks: Sequence[str], **params: Any
) -> None:
    """Check that newcomers, and the run's own clients, are clustered alike under every mask.

    Args:
        make: makes the protocol from hyper-parameters.
        run: the clients of the run.
        newcomers: clients that join afterwards.
        masks: names of masks, the first of which the others are compared with.
        params: other hyper-parameters.
    """
    clusters_by_mask = {}
    for mask in masks:
        fitted = make(**{"rounds": 4, **params}, mask=mask).fit(run, simulation.DOUBLE)
        clusters_by_mask[mask] = (fitted.labels_.tolist(), fitted.join(newcomers).tolist())
    first = clusters_by_mask[masks[0]]
    for mask, one in clusters_by_mask.items():
        require(
            one == first,
            f"under the mask {mask} clients and newcomers get the clusters {one}, and "
            f"{first} under {masks[0]}: compare newcomers under the mask of the call that brought "
            "the rows they are compared with (step=), and by distances alone",
        )


def check_secure_sums(
    make: Make, federation: fl.Federation, rounds: int = 3, **params: Any
) -> None:
    """Check that secure sums lead to the models of plain ones.

    Args:
        make: makes the protocol from hyper-parameters.
        federation: the clients and their data.
        rounds: number of rounds.
        params: other hyper-parameters.
    """
    secure = make(rounds=rounds, **params, aggregation="secagg").fit(federation, simulation.DOUBLE)
    plain = make(rounds=rounds, **params, aggregation="plain").fit(federation, simulation.DOUBLE)
    one, other = secure.client_models_.values, plain.client_models_.values
    distance = float((one - other).abs().max())
    require(
        distance <= SUM_TOLERANCE,
        f"models with secure sums are {distance:.2g} away from those with plain ones: let the "
        "server use sums and counts alone, or refuse aggregation secagg in check",
    )
