"""How clients, network and run are put together: for a run, for its replay, and for newcomers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.clustering.metrics import agreement, share_at
from securecluster.core import atomic_files
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, plain, structured, unpack
from securecluster.data import Federation
from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging.bounds import Limits
from securecluster.messaging.messages import Call, Response
from securecluster.messaging.transcript import Recording, Transcript
from securecluster.models.objectives import objective
from securecluster.privacy.dp.ledger import Event, Ledger, Recall
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.identities import Identity, Roster, check_roster
from securecluster.privacy.masking.key_agreement import KeyRing, Secrets
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import ClientState, TrainingClient
from securecluster.protocols.common.messages import ModelDelta
from securecluster.protocols.common.newcomers import (
    NewcomerRecord,
    check_sizes,
    number_of,
    samples_batches,
    training_sizes,
)
from securecluster.protocols.common.serialization import SCHEMA, SHARED, FittedState, FittedSummary
from securecluster.runtime.endpoint import Endpoint, config_hash
from securecluster.runtime.run import Appended, CheckpointPart, Line, Run
from securecluster.runtime.server_channel import ChannelState
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import InProcess, Recorded, random_dropouts
from securecluster.training.chance_level import ENOUGH_ROUNDS, Chance, at_chance
from securecluster.training.local_trainer import LocalTrainer

if TYPE_CHECKING:
    from securecluster.protocols.common.base import ClusteringProtocol


@dataclass
class Origin:
    """A checkpoint's word on where it comes from."""

    config: str  # its hash


@dataclass(frozen=True)
class Joined:
    """What placing newcomers released and cost."""

    labels: tuple[int, ...]
    ledger: Ledger
    transcript: Transcript
    bytes: dict[str, Any]


def build_client(
    protocol: ClusteringProtocol,
    federation: Federation,
    settings: Settings,
    clients: Sequence[int] | None = None,
    simulated: bool = True,
    joins: Mapping[str, Any] | None = None,
    numbers: Sequence[int] | None = None,
    identity: Identity | None = None,
    roster: Roster | None = None,
) -> Endpoint[TrainingClient]:
    """The endpoint of some clients of a federation.

    Args:
        joins: the configuration of a run that these clients join as newcomers.
        numbers: of the federation's clients; None counts from 0, and of newcomers after the run's
            clients.
        identity: what these clients sign with, where they are not simulated.
        roster: whose signatures they accept, where they are not simulated.
    """
    config = protocol.config(federation, settings.dtype) if joins is None else joins
    if joins is not None:
        federation = replace(federation, seed=config["seed"], classes=config["classes"])
    if joins is not None and numbers is None:
        first = int(config["clients"])
        numbers = range(first, first + len(federation))
    randomness, flat = (
        Randomness(federation.seed),
        protocol.flat_model(federation) if joins is None else protocol._flat,
    )
    pipeline = protocol.pipeline(config)
    dtype = {"float32": torch.float32, "float64": torch.float64}[settings.dtype]
    keys = _keys(config, pipeline, simulated, identity, roster)
    draws = NoiseStreams(keys.noise, config_hash(config))
    pipeline.arm(draws)
    pipeline.guard = protocol.guard(config, draws)
    pipeline.private = protocol.keeps_local_models(config)
    cohort = LocalTrainer(
        federation,
        flat,
        randomness,
        choose_device(settings.device),
        dtype,
        clients,
        numbers,
        protocol.aside,
        draws,
    )
    client, limits = (
        protocol.make_client(cohort, pipeline, config),
        protocol.limits(config, pipeline),
    )
    if roster is not None and identity is not None:
        check_roster(roster, identity, cohort.ids, int(config["clients"]))
    return Endpoint(client, cohort.ids, config_hash(config), pipeline, keys, limits=limits)


def _keys(
    config: Mapping[str, Any],
    pipeline: Pipeline,
    simulated: bool,
    identity: Identity | None,
    roster: Roster | None,
) -> KeyRing:
    """Return the keys of an endpoint: derived from the run's seed, or a deployed node's own."""
    run = config_hash(config)
    for name, given, kind in (("identity", identity, Identity), ("roster", roster, Roster)):
        if given is not None and not isinstance(given, kind):
            raise UsageError(f"{name} is {type(given).__name__}: make it with {kind.__name__}")
    if not simulated:
        if roster is not None and identity is None:
            raise UsageError(
                "a roster needs an identity: give the one whose public key is on the other "
                "clients' rosters"
            )
        return KeyRing(run, None, pipeline.unlock, lambda client: identity, roster)
    if identity is not None or roster is not None:
        raise UsageError(
            "simulated clients derive identities and roster from the seed: give your own with "
            "simulated=False"
        )
    randomness = Randomness(config["seed"])
    return KeyRing(
        run,
        randomness,
        pipeline.unlock,
        partial(Identity.derived, randomness),
        Roster.derived(randomness),
    )


def carry_out(
    protocol: ClusteringProtocol,
    federation: Federation,
    settings: Settings,
    folder: Path | None,
    report: Callable[[Line], None],
) -> tuple[FittedState, Transcript, Chance | None]:
    """Run a protocol on a federation in this process, or go on with the run in the folder.

    Returns:
        What was learned, the transcript, and the clients whose models have learned nothing, where
        there were rounds enough.
    """
    endpoint = protocol.build_client(federation, settings)
    client, keys = endpoint.client, endpoint.keys
    if folder:
        atomic_files.make_folder(folder)
        atomic_files.make_private_folder(folder / "transcript")
    written = folder and folder / "transcript"
    transcript = Transcript(settings.transcript, written, protocol.message_types, federation.names)
    lost = random_dropouts(settings.dropout, Randomness(federation.seed))
    config = protocol.config(federation, settings.dtype)
    net = protocol.build_network(
        Recorded(InProcess(endpoint.answer, lost), transcript), config, device=client.cohort.device
    )
    # else no price depends on them, and what is learned is for others to see
    if protocol.per_example:
        net.state.ledger.samples = _samples(client)
    net.state.ledger.names = dict(enumerate(federation.names))
    recall = Recall()

    def restore_clients(state: ClientState) -> None:
        client.restore(state)
        keys.restore(state.secrets)

    def check_origin(origin: Origin) -> None:
        if origin.config != config_hash(config):
            raise RunFolderError(
                f"{folder} holds a run of another configuration: resume with the same one, or give "
                "another folder"
            )

    def observe(state: Any) -> Line:
        scores, sent = protocol.evaluate(client, state), transcript.totals()
        reached = share_at(scores, settings.target) if federation.objective.higher else None
        seen = {**protocol.observe(federation, client, state, scores), "at_target": reached}
        return {**seen, "up": sent["up"], "down": sent["down"]}

    parts = {
        "origin": CheckpointPart(Origin, lambda: Origin(config_hash(config)), check_origin),
        "clients": CheckpointPart(ClientState, lambda: client.state(keys.secrets), restore_clients),
        "network": CheckpointPart(
            ChannelState,
            lambda: _without_events(net.state),
            lambda state: setattr(net, "state", state),
        ),
        "transcript": CheckpointPart(Recording, transcript.snapshot, transcript.rewind),
    }

    def recall_events(later: list[Event]) -> None:
        net.state.ledger.events += later
        recall.learn(later)

    def record(found: list[Event]) -> None:
        net.add(recall.new(found))
        run.append("ledger")

    events = Appended(
        lambda: net.state.ledger.events,
        lambda found: setattr(net.state.ledger, "events", found),
        plain,
        lambda event: structured(event, Event),
        recall_events,
    )
    run = Run(
        folder,
        parts,
        observe,
        report,
        lambda number: setattr(net, "round", int(number)),
        {"ledger": events},
    )
    net.record = record
    if not run.resumed:
        # what a run left that was killed before its first checkpoint
        transcript.rewind(Recording())
    state = protocol.final_state(net, run)
    labels, models = [int(c) for c in state.labels], protocol.final(client, state)
    local = sorted(client.cohort.ids[k] for k in client.unshared)
    scores = client.cohort.scores(models)
    agreed = None if federation.truth is None else dict(agreement(labels, federation.truth))
    learned = FittedSummary(
        schema=SCHEMA,
        protocol=protocol.name,
        params=protocol.shown_params(),
        config=config,
        settings=settings,
        names=list(federation.names),
        labels=labels,
        local=local,
        history=run.history,
        bytes=transcript.totals(),
        scores=scores.tolist(),
        agreement=agreed,
        network=net.state,
        seconds=run.seconds,
        device=client.cohort.device.type,
    )
    assert models.index is not None
    shared = protocol.shared_models(client)
    extra = {} if shared is None else {SHARED: shared}
    kept = FittedState(
        learned,
        pack(state),
        ClientState(models.table, list(models.index), keys.secrets, extra=extra),
    )
    judged = at_chance(client.cohort, models, scores) if protocol.rounds >= ENOUGH_ROUNDS else None
    return kept, transcript, judged


def join(protocol: ClusteringProtocol, newcomers: Federation) -> Joined:
    """Place clients that a finished run never saw.

    Every call starts from the end of the run, and adds to its ledger.

    Raises:
        UsageError: data of another kind, or too few samples for the run's noise.
        RunFolderError: what newcomers release cannot be recorded in the protocol's folder.
    """
    learned, config = protocol.kept_.learned, protocol.kept_.learned.config
    kind = objective(config["objective"])
    if newcomers.objective != kind:
        raise UsageError(
            f"newcomers' data are for {newcomers.objective.as_json()}, the run's for "
            f"{kind.as_json()}: give the same kind of data"
        )
    if newcomers.feature_names is None and "feature_names" in config:
        raise UsageError(
            "the run's features have names and the newcomers' have none: give them as tables with "
            "these columns"
        )
    if newcomers.feature_names is not None and "feature_names" in config:
        newcomers = newcomers.with_features(config["feature_names"])
    if list(newcomers.shape) != config["shape"] or newcomers.classes > config["classes"]:
        raise UsageError(
            f"newcomers hold samples of shape {newcomers.shape} in {newcomers.classes} classes, "
            f"the run's {tuple(config['shape'])} in"
            f" {config['classes']}: give them the same kind of data"
        )
    sizes = training_sizes(protocol, newcomers)
    ledger, record = protocol.ledger_, _opened_record(protocol)
    first = config["clients"]
    ledger.names = dict(enumerate(learned.names)) | ledger.names
    priced = sizes if protocol.per_example else [None] * len(sizes)
    # a number is taken once something left
    planned = replace(ledger, names=dict(ledger.names), samples=dict(ledger.samples))
    numbers = [
        number_of(planned, first, name, n) for name, n in zip(newcomers.names, priced, strict=True)
    ]
    settings = learned.settings
    guests = build_client(protocol, newcomers, settings, joins=config, numbers=numbers)
    hosts = _hosts(config, protocol.kept_.clients.secrets, guests.limits)

    def answer(call: Call) -> Response:
        if call.to[0] < first:
            return hosts.answer(call)
        if samples_batches(protocol, call.method):
            check_sizes(protocol, newcomers.names, sizes)
        return guests.answer(call)

    names = [planned.names[i] for i in range(1 + max(planned.names))]
    transcript = Transcript(settings.transcript, None, protocol.message_types, names)
    device = guests.client.cohort.device
    net = protocol.build_network(Recorded(InProcess(answer), transcript), config, device=device)
    called = dict(zip(numbers, newcomers.names, strict=True))
    own = Ledger(samples=_samples(guests.client) if protocol.per_example else {}, names=called)
    net.state = replace(unpack(pack(learned.network), ChannelState), ledger=own)
    net.round = 1 + max((line["round"] for line in learned.history), default=0)
    recall = Recall(event for event in ledger.events if min(event.ids) >= first)

    def add(events: list[Event]) -> None:
        net.add(events)
        ledger.names.update(planned.names)
        ledger.samples.update(planned.samples)
        new = recall.new(events)
        if new and record is not None:
            record.append(new, ledger)
        ledger.events.extend(new)

    net.record = add
    with torch.inference_mode(False), cpu_threads(settings.threads), reproducible(device):
        labels = protocol.place(
            net, unpack(protocol.kept_.server, protocol.state_class()), guests.ids
        )
    return Joined(tuple(map(int, labels)), net.state.ledger, transcript, transcript.totals())


def _opened_record(protocol: ClusteringProtocol) -> NewcomerRecord | None:
    """Return the file for what newcomers release, after a check that it can be written.

    There is one where the protocol has a folder. A run without noise goes on without the file:
    whatever its newcomers release has an infinite ε.
    """
    record = protocol.newcomers_record
    if record is None:
        return None
    record.update(protocol.ledger_)
    try:
        record.check_writable()
    except RunFolderError:
        # updates, training or Gram matrices have noise
        if protocol.keeps_local_models(protocol.kept_.learned.config):
            raise
        return None
    return record


def _without_events(state: ChannelState) -> ChannelState:
    """Return the network's state without the ledger's events.

    The events are appended to a file of their own.
    """
    return replace(state, ledger=replace(state.ledger, events=[]))


def _samples(client: TrainingClient) -> dict[int, int]:
    """Return how many samples each client trains on.

    The cost of DP-SGD depends on this number, which is taken as public there.
    """
    return dict(zip(client.cohort.ids, client.cohort.sizes, strict=True))


def _hosts(config: Mapping[str, Any], secrets: Secrets, limits: Limits) -> Endpoint[Any]:
    """The run's own clients, as far as newcomers need them: one of them seals the mask seed."""
    draws = Randomness(config["seed"])
    keys = KeyRing(
        config_hash(config),
        None,
        lambda seed: None,
        partial(Identity.derived, draws),
        Roster.derived(draws),
    )
    keys.restore(secrets)
    return Endpoint(
        None, range(config["clients"]), config_hash(config), Pipeline(), keys, limits=limits
    )


def opened(protocol: ClusteringProtocol, posted: ModelDelta) -> torch.Tensor:
    """Return the model (d,) behind a displacement that the server holds.

    The owner of a fitted protocol reads it like this.

    Raises:
        UsageError: the server holds none.
    """
    if not len(posted.displacement):
        raise UsageError("this model was not kept: run with tree=True, and with members that reply")
    kept, flat = protocol.kept_, protocol._flat
    pipeline = protocol.with_fitted_params().pipeline(kept.learned.config)
    for seed in list(kept.clients.secrets.seed.values())[:1]:
        pipeline.unlock(seed)
    return flat.initial().to(posted.displacement.dtype) + pipeline.inverse(
        posted.displacement, posted.step
    )
