"""How clients, network and run are put together: for a run, for its replay, and for newcomers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from securecluster.runtime.server_channel import ChannelState, ServerChannel
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


@dataclass(frozen=True)
class KeySource:
    """Where the keys of an endpoint come from.

    Args:
        simulated: they are derived from the run's seed; otherwise they are a deployed node's own.
        identity: what these clients sign with, where they are not simulated.
        roster: whose signatures they accept, where they are not simulated.
    """

    simulated: bool = True
    identity: Identity | None = None
    roster: Roster | None = None


SIMULATED = KeySource()


def build_client(
    protocol: ClusteringProtocol,
    federation: Federation,
    settings: Settings,
    clients: Sequence[int] | None = None,
    key_source: KeySource = SIMULATED,
    joins: Mapping[str, Any] | None = None,
    numbers: Sequence[int] | None = None,
) -> Endpoint[TrainingClient]:
    """The endpoint of some clients of a federation.

    Args:
        clients: their numbers in the federation; None: all.
        joins: the configuration of a run that these clients join as newcomers; None: the run is
            their own.
        numbers: of the federation's clients; None counts from 0, and of newcomers after the run's
            clients.
    """
    if joins is None:
        config: Mapping[str, Any] = protocol.config(federation, settings.dtype)
        flat = protocol.flat_model(federation)
    else:
        config = joins
        federation = replace(federation, seed=config["seed"], classes=config["classes"])
        flat = protocol._flat
        if numbers is None:
            first = int(config["clients"])
            numbers = range(first, first + len(federation))
    pipeline = protocol.pipeline(config)
    keys = _keys(config, pipeline, key_source)
    draws = NoiseStreams(keys.noise, config_hash(config))
    pipeline.arm(draws)
    pipeline.guard = protocol.guard(config, draws)
    pipeline.private = protocol.keeps_local_models(config)
    dtype = {"float32": torch.float32, "float64": torch.float64}[settings.dtype]
    cohort = LocalTrainer(
        federation,
        flat,
        Randomness(federation.seed),
        choose_device(settings.device),
        dtype,
        clients,
        numbers,
        protocol.validation_share,
        draws,
    )
    client = protocol.make_client(cohort, pipeline, config)
    limits = protocol.limits(config, pipeline)
    if key_source.roster is not None and key_source.identity is not None:
        check_roster(key_source.roster, key_source.identity, cohort.ids, int(config["clients"]))
    return Endpoint(client, cohort.ids, config_hash(config), pipeline, keys, limits=limits)


def _keys(config: Mapping[str, Any], pipeline: Pipeline, source: KeySource) -> KeyRing:
    """Return the keys of an endpoint: derived from the run's seed, or a deployed node's own."""
    run = config_hash(config)
    identity, roster = source.identity, source.roster
    for name, given, kind in (("identity", identity, Identity), ("roster", roster, Roster)):
        if given is not None and not isinstance(given, kind):
            raise UsageError(f"{name} is {type(given).__name__}: make it with {kind.__name__}")
    if not source.simulated:
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


@dataclass
class _Simulation:
    """A run of all clients in this process, and what a checkpoint of it holds."""

    protocol: ClusteringProtocol
    federation: Federation
    settings: Settings
    folder: Path | None
    config: dict[str, Any]
    endpoint: Endpoint[TrainingClient]
    transcript: Transcript
    net: ServerChannel
    recall: Recall = field(default_factory=Recall)

    @classmethod
    def prepare(
        cls,
        protocol: ClusteringProtocol,
        federation: Federation,
        settings: Settings,
        folder: Path | None,
    ) -> _Simulation:
        """Build the clients, the transcript, and the network between clients and server."""
        endpoint = protocol.build_client(federation, settings)
        client = endpoint.client
        frames = None
        if folder:
            frames = folder / "transcript"
            atomic_files.make_folder(folder)
            atomic_files.make_private_folder(frames)
        transcript = Transcript(
            settings.transcript, frames, protocol.message_types, federation.names
        )
        dropouts = random_dropouts(settings.dropout, Randomness(federation.seed))
        config = protocol.config(federation, settings.dtype)
        transport = Recorded(InProcess(endpoint.answer, dropouts), transcript)
        net = protocol.build_network(transport, config, device=client.cohort.device)
        # else no price depends on them, and what is learned is for others to see
        if protocol.per_example:
            net.state.ledger.samples = _samples(client)
        net.state.ledger.names = dict(enumerate(federation.names))
        return cls(protocol, federation, settings, folder, config, endpoint, transcript, net)

    def start(self, report: Callable[[Line], None]) -> Run:
        """Return the run, at its last checkpoint where the folder has one."""
        logs = {"ledger": self._ledger_log()}
        run = Run(self.folder, self._parts(), self._observe, report, self._begin_round, logs)

        def record(events: list[Event]) -> None:
            self.net.add(self.recall.new(events))
            run.append("ledger")

        self.net.record = record
        if not run.resumed:
            # what a run left that was killed before its first checkpoint
            self.transcript.rewind(Recording())
        return run

    def fitted(self, run: Run, state: Any) -> tuple[FittedState, Chance | None]:
        """Return what was learned, and the clients whose models have learned nothing."""
        protocol, client, keys = self.protocol, self.endpoint.client, self.endpoint.keys
        labels = [int(c) for c in state.labels]
        models = protocol.final_models(client, state)
        scores = client.cohort.scores(models)
        truth = self.federation.truth
        learned = FittedSummary(
            schema=SCHEMA,
            protocol=protocol.name,
            params=protocol.shown_params(),
            config=self.config,
            settings=self.settings,
            names=list(self.federation.names),
            labels=labels,
            local=sorted(client.cohort.ids[k] for k in client.unshared),
            history=run.history,
            bytes=self.transcript.totals(),
            scores=scores.tolist(),
            agreement=None if truth is None else dict(agreement(labels, truth)),
            network=self.net.state,
            seconds=run.seconds,
            device=client.cohort.device.type,
        )
        assert models.index is not None
        shared = protocol.shared_models(client)
        extra = {} if shared is None else {SHARED: shared}
        clients = ClientState(models.table, list(models.index), keys.secrets, extra=extra)
        kept = FittedState(learned, pack(state), clients)
        if protocol.rounds < ENOUGH_ROUNDS:
            return kept, None
        return kept, at_chance(client.cohort, models, scores)

    def _begin_round(self, number: int) -> None:
        self.net.round = int(number)

    def _observe(self, state: Any) -> Line:
        protocol, client = self.protocol, self.endpoint.client
        scores = protocol.evaluate(client, state)
        line = dict(protocol.observe(self.federation, client, state, scores))
        line["at_target"] = None
        if self.federation.objective.higher:
            line["at_target"] = share_at(scores, self.settings.target)
        totals = self.transcript.totals()
        return {**line, "up": totals["up"], "down": totals["down"]}

    def _parts(self) -> dict[str, CheckpointPart]:
        """Return the parts of a checkpoint, in the order in which they are restored."""
        client, keys = self.endpoint.client, self.endpoint.keys
        return {
            "origin": CheckpointPart(
                Origin, lambda: Origin(config_hash(self.config)), self._check_origin
            ),
            "clients": CheckpointPart(
                ClientState, lambda: client.state(keys.secrets), self._restore_clients
            ),
            "network": CheckpointPart(
                ChannelState, lambda: _without_events(self.net.state), self._restore_network
            ),
            "transcript": CheckpointPart(
                Recording, self.transcript.snapshot, self.transcript.rewind
            ),
        }

    def _check_origin(self, origin: Origin) -> None:
        if origin.config != config_hash(self.config):
            raise RunFolderError(
                f"{self.folder} holds a run of another configuration: resume with the same one, or "
                "give another folder"
            )

    def _restore_clients(self, state: ClientState) -> None:
        self.endpoint.client.restore(state)
        self.endpoint.keys.restore(state.secrets)

    def _restore_network(self, state: ChannelState) -> None:
        self.net.state = state

    def _ledger_log(self) -> Appended:
        """Return the ledger's events, as lines that are appended to a file of their own."""
        return Appended(
            read=lambda: self.net.state.ledger.events,
            restore=self._restore_events,
            encode=plain,
            decode=lambda event: structured(event, Event),
            recall=self._recall_events,
        )

    def _restore_events(self, events: list[Event]) -> None:
        self.net.state.ledger.events = events

    def _recall_events(self, later: list[Event]) -> None:
        self.net.state.ledger.events += later
        self.recall.learn(later)


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
    simulation = _Simulation.prepare(protocol, federation, settings, folder)
    run = simulation.start(report)
    state = protocol.final_state(simulation.net, run)
    kept, chance = simulation.fitted(run, state)
    return kept, simulation.transcript, chance


def join(protocol: ClusteringProtocol, newcomers: Federation) -> Joined:
    """Place clients that a finished run never saw.

    Every call starts from the end of the run, and adds to its ledger.

    Raises:
        UsageError: data of another kind, or too few samples for the run's noise.
        RunFolderError: what newcomers release cannot be recorded in the protocol's folder.
    """
    learned = protocol.kept_.learned
    config, settings = learned.config, learned.settings
    newcomers = _check_kind_of_data(newcomers, config)
    sizes = training_sizes(protocol, newcomers)
    ledger = protocol.ledger_
    record = _opened_record(protocol)
    ledger.names = dict(enumerate(learned.names)) | ledger.names
    first = config["clients"]
    # a number is taken once something left
    planned = replace(ledger, names=dict(ledger.names), samples=dict(ledger.samples))
    priced = sizes if protocol.per_example else [None] * len(sizes)
    numbers = [
        number_of(planned, first, name, size)
        for name, size in zip(newcomers.names, priced, strict=True)
    ]
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
    guest_names = dict(zip(numbers, newcomers.names, strict=True))
    guest_samples = _samples(guests.client) if protocol.per_example else {}
    guest_ledger = Ledger(samples=guest_samples, names=guest_names)
    net.state = replace(unpack(pack(learned.network), ChannelState), ledger=guest_ledger)
    net.round = 1 + max((line["round"] for line in learned.history), default=0)
    net.record = _recorder(net, ledger, planned, record, first)
    state: Any = unpack(protocol.kept_.server, protocol.state_class())
    with torch.inference_mode(False), cpu_threads(settings.threads), reproducible(device):
        labels = protocol.assign_newcomers(net, state, guests.ids)
    return Joined(tuple(map(int, labels)), net.state.ledger, transcript, transcript.totals())


def _check_kind_of_data(newcomers: Federation, config: Mapping[str, Any]) -> Federation:
    """Return newcomers with their features in the run's order.

    Raises:
        UsageError: their data are of another kind than the run's.
    """
    kind = objective(config["objective"])
    if newcomers.objective != kind:
        raise UsageError(
            f"newcomers' data are for {newcomers.objective.as_json()}, the run's for "
            f"{kind.as_json()}: give the same kind of data"
        )
    if "feature_names" in config:
        if newcomers.feature_names is None:
            raise UsageError(
                "the run's features have names and the newcomers' have none: give them as tables "
                "with these columns"
            )
        newcomers = newcomers.with_features(config["feature_names"])
    if list(newcomers.shape) != config["shape"] or newcomers.classes > config["classes"]:
        raise UsageError(
            f"newcomers hold samples of shape {newcomers.shape} in {newcomers.classes} classes, "
            f"the run's {tuple(config['shape'])} in"
            f" {config['classes']}: give them the same kind of data"
        )
    return newcomers


def _recorder(
    net: ServerChannel,
    ledger: Ledger,
    planned: Ledger,
    record: NewcomerRecord | None,
    first: int,
) -> Callable[[list[Event]], None]:
    """Return what adds newcomers' releases to the run's ledger, and to its file.

    Args:
        planned: the ledger with the newcomers' names and numbers of samples.
        first: the least number of a newcomer.
    """
    recall = Recall(event for event in ledger.events if min(event.ids) >= first)

    def record_events(events: list[Event]) -> None:
        net.add(events)
        ledger.names.update(planned.names)
        ledger.samples.update(planned.samples)
        new = recall.new(events)
        if new and record is not None:
            record.append(new, ledger)
        ledger.events.extend(new)

    return record_events


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
