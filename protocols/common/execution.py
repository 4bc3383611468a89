"""Assembly of clients, network and run: for a run, for its replay, and for newcomers.

The server's half runs on a new object with the run's hyper-parameters
(`ClusteringProtocol.as_server`), in runs, replays and for newcomers: attributes that the protocol
was given while it met the federation do not exist there. Reports and observers keep the first
object. What lies outside all objects shows in a new process only.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import agreement, share_at
from securecluster.core import atomic_files
from securecluster.core.client_names import named_in_errors
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, plain, structured, unpack
from securecluster.data import Federation
from securecluster.errors import RunFolderError, SecureClusterWarning, UsageError
from securecluster.messaging.bounds import Limits
from securecluster.messaging.messages import Call, Response
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.refusals import reraise
from securecluster.messaging.transcript import Recording, Transcript
from securecluster.models.objectives import objective
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.dp.ledger import Event, Ledger, Recall
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.target import Target
from securecluster.privacy.masking.identities import Identity, Roster, check_roster
from securecluster.privacy.masking.key_agreement import KeyRing, Secrets
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import ClientState, TrainingClient
from securecluster.protocols.common.deployment import Deployment
from securecluster.protocols.common.dry_run import run_releases
from securecluster.protocols.common.experiment import experiment_of
from securecluster.protocols.common.hooks import without_clients
from securecluster.protocols.common.labels import checked_labels
from securecluster.protocols.common.messages import ModelDelta
from securecluster.protocols.common.newcomers import (
    NewcomerRecord,
    check_sizes,
    number_of,
    samples_batches,
    training_sizes,
)
from securecluster.protocols.common.serialization import SCHEMA, SHARED, FittedState, FittedSummary
from securecluster.runtime import run_secret
from securecluster.runtime.authority import Authority
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.endpoint import Endpoint, config_hash
from securecluster.runtime.release_accounting import ReleaseAccounting
from securecluster.runtime.release_budget import ReleaseBudget
from securecluster.runtime.release_guard import ReleaseGuard
from securecluster.runtime.release_target import ReleaseTarget
from securecluster.runtime.run import Appended, CheckpointPart, Line, Run, checkpoints
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import (
    InProcess,
    Recorded,
    Replay,
    Transport,
    WithAuthority,
    random_dropouts,
)
from securecluster.training.chance_level import ENOUGH_ROUNDS, Chance, at_chance
from securecluster.training.local_trainer import LocalTrainer

if TYPE_CHECKING:
    from securecluster.protocols.common.base import ClusteringProtocol


@dataclass
class Origin:
    """Configuration hash stored in a checkpoint, and the digest of the program that began it."""

    config: str
    program: str = ""


@dataclass(frozen=True)
class Joined:
    """Clusters of newcomers, and what their assignment released and cost."""

    labels: tuple[int, ...]
    ledger: Ledger
    transcript: Transcript
    bytes: dict[str, Any]


@dataclass(frozen=True)
class KeySource:
    """Source of the keys of an endpoint.

    Args:
        simulated: keys are derived from `secrets`; otherwise they are a deployed node's own.
        identity: signs the clients' messages, if they are not simulated.
        roster: identities whose signatures the clients accept, if they are not simulated.
        secrets: secret random streams of a simulated run; None derives them from its seed.
    """

    simulated: bool = True
    identity: Identity | None = None
    roster: Roster | None = None
    secrets: Randomness | None = None


SIMULATED = KeySource()


def build_client(  # noqa: PLR0913 (what the clients of one run are made of)
    protocol: ClusteringProtocol,
    federation: Federation,
    settings: Settings,
    clients: Sequence[int] | None = None,
    key_source: KeySource = SIMULATED,
    joins: Mapping[str, Any] | None = None,
    numbers: Sequence[int] | None = None,
    budget: Budget | None = None,
    trainer: type[LocalTrainer] = LocalTrainer,
    streams: type[NoiseStreams] = NoiseStreams,
    deployment_class: type[Deployment] = Deployment,
) -> Endpoint[TrainingClient]:
    """Return the endpoint of some clients of a federation.

    Args:
        protocol: the method.
        federation: the clients and their data.
        settings: device and precision.
        clients: their positions in the federation; None is all.
        key_source: of the clients' keys.
        joins: the configuration of a run that these clients join as newcomers; None where the run
            is their own.
        numbers: of the federation's clients; None counts from 0, and for newcomers from the number
            after the run's clients.
        budget: of the one client, over all runs; None for none.
        trainer: class of the clients' local training.
        streams: class of their streams of noise.
        deployment_class: makes their half of the run.

    Raises:
        UsageError: an identity, a roster or a budget that does not fit the clients.
    """
    if joins is None:
        config: Mapping[str, Any] = protocol.config(federation, settings.dtype)
        flat = protocol.flat_model(federation)
    else:
        config = joins
        # Newcomers draw from the run's streams, under numbers of their own.
        federation = replace(federation, seed=config["seed"], classes=config["classes"])
        flat = Deployment(protocol, config).initial_model()
        if numbers is None:
            first = int(config["clients"])
            numbers = range(first, first + len(federation))
    deployment = deployment_class(protocol, config)
    pipeline = deployment.pipeline()
    keys = _keys(config, pipeline, key_source)
    run = config_hash(config)
    whole_clients = config["dp_unit"] == "client"
    noise_streams = streams(keys.noise, run, bounds_rows=whole_clients)
    # Armed before any client exists: nothing can pass it without noise.
    pipeline.arm(noise_streams)
    pipeline.private = protocol.adds_noise(config)
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    cohort = trainer(
        federation,
        flat,
        Randomness(federation.seed),
        choose_device(settings.device),
        dtypes[settings.dtype],
        clients,
        numbers,
        protocol.validation_share,
        noise_streams,
    )
    with cohort.access.during("make_client", may_read=True, may_train=True) as reads:
        client = deployment.client(cohort, pipeline)
    limits = deployment.limits(pipeline)
    # Checked here, where the clients' numbers are known.
    if key_source.roster is not None and key_source.identity is not None:
        check_roster(key_source.roster, key_source.identity, cohort.ids, int(config["clients"]))
    halves = deployment.client_halves(keys, noise_streams)
    endpoint = Endpoint(client, cohort.ids, run, pipeline, keys, limits=limits, halves=halves)
    endpoint.noise = deployment.client_noise(noise_streams)
    endpoint.guard = _release_guard(protocol, config, client)
    if reads.data:  # what clients keep may follow from data before the first call
        client.guard_informed[range(len(cohort.ids))] = True
    if key_source.simulated:
        # Client and server are one user here, who reads the sentence as it is.
        endpoint.on_refusal = reraise
    # Newcomers' releases come on top of a run that is over: `predict` warns of them.
    if joins is None and protocol.privacy.holds_target:
        endpoint.reservations.append(_release_target(protocol, config, endpoint, federation))
    if budget is not None:
        endpoint.reservations.append(_release_budget(protocol, config, endpoint, budget))
    return endpoint


def _release_guard(
    protocol: ClusteringProtocol, config: Mapping[str, Any], client: TrainingClient
) -> ReleaseGuard:
    """Return the guard of the calls of an endpoint.

    Args:
        protocol: the method.
        config: what clients and server agreed on.
        client: of the endpoint.
    """
    cohort = client.cohort
    samples: dict[int, frozenset[float]] = {}
    # where single examples are protected, the relation of neighbours keeps their numbers
    if protocol.adds_noise(config) and config["dp_unit"] == "example":
        numbers = zip(cohort.ids, cohort.sizes, cohort.validation_sizes, strict=True)
        for number, training, validation in numbers:
            samples[number] = frozenset((float(training), float(validation)))
    private = protocol.privacy.per_example and config["noise"] > 0
    return ReleaseGuard(client, cohort.access, samples, private)


def _release_target(
    protocol: ClusteringProtocol,
    config: Mapping[str, Any],
    endpoint: Endpoint[TrainingClient],
    federation: Federation,
) -> ReleaseTarget:
    """Return the target ε of the clients of an endpoint.

    Args:
        protocol: the method, with a target.
        config: what clients and server agreed on.
        endpoint: of the clients.
        federation: of all clients.
    """
    samples = _samples(endpoint.client) if protocol.privacy.per_example else {}
    costs = _costs(protocol, config, endpoint)
    return ReleaseTarget(
        _target(protocol, config, samples, federation),
        costs,
        least_survivors=endpoint.least_survivors,
    )


def _target(
    protocol: ClusteringProtocol,
    config: Mapping[str, Any],
    samples: Mapping[int, int],
    federation: Federation,
) -> Target:
    """Return the target ε of some clients, which have released nothing yet.

    Args:
        protocol: the method, with a target.
        config: what clients and server agreed on.
        samples: that each client trains on; empty where no price depends on it.
        federation: of all clients.
    """
    privacy = protocol.privacy
    assert privacy.target_epsilon is not None
    releases = run_releases(protocol, federation, len(federation))
    plan = partial(releases.plan, float(config["noise"]))
    return Target(float(privacy.target_epsilon), float(privacy.delta), plan, samples)


def _costs(
    protocol: ClusteringProtocol, config: Mapping[str, Any], endpoint: Endpoint[TrainingClient]
) -> ReleaseAccounting:
    """Return the accounting of a run's noise, as the server has it.

    Args:
        protocol: the method.
        config: what clients and server agreed on.
        endpoint: of some clients.
    """
    # nothing is drawn: a server's noise only has a price here
    draws = NoiseStreams(endpoint.keys.noise, config_hash(config))
    deployment = Deployment(protocol, config)
    return deployment.costs(deployment.pipeline(), draws)


def _release_budget(
    protocol: ClusteringProtocol,
    config: Mapping[str, Any],
    endpoint: Endpoint[TrainingClient],
    budget: Budget,
) -> ReleaseBudget:
    """Return the budget of the one client of an endpoint.

    Args:
        protocol: the method.
        config: what clients and server agreed on.
        endpoint: of the client.
        budget: over all runs.

    Raises:
        UsageError: no budget, several clients, or another unit of privacy.
    """
    if not isinstance(budget, Budget):
        raise UsageError(f"budget is {type(budget).__name__}: make it with Budget(path, epsilon)")
    if len(endpoint.ids) != 1:
        raise UsageError(
            f"a budget is of one client, and this endpoint has {len(endpoint.ids)}: build one for "
            "each, with a budget of its own"
        )
    unit = str(config["dp_unit"])
    if unit != budget.unit:
        raise UsageError(
            f"{budget.path} is a budget for the unit {budget.unit}, and this run protects the unit "
            f"{unit}: give another file, for {unit}"
        )
    run = config_hash(config)
    costs = _costs(protocol, config, endpoint)
    samples = endpoint.client.cohort.sizes[0] if protocol.privacy.per_example else None
    key = partial(endpoint.keys.noise, endpoint.ids[0])
    return ReleaseBudget(budget, run, key, costs, samples, endpoint.least_survivors)


def _keys(config: Mapping[str, Any], pipeline: Pipeline, source: KeySource) -> KeyRing:
    """Return the keys of an endpoint, derived from a run's secret or a deployed node's own.

    Raises:
        UsageError: an identity or a roster of another type, a roster without an identity, or either
            of them for simulated clients.
    """
    run = config_hash(config)
    identity = source.identity
    roster = source.roster
    expected = (("identity", identity, Identity), ("roster", roster, Roster))
    for name, value, expected_class in expected:
        if value is not None and not isinstance(value, expected_class):
            raise UsageError(
                f"{name} is {type(value).__name__}: make it with {expected_class.__name__}"
            )
    # A deployed node draws its keys from the operating system.
    if not source.simulated:
        if roster is not None and identity is None:
            raise UsageError(
                "a roster needs an identity: give the one whose public key is on the other "
                "clients' rosters"
            )
        return KeyRing(run, None, pipeline.unlock, lambda client: identity, roster)
    if identity is not None or roster is not None:
        raise UsageError(
            "simulated clients derive identities and roster: give your own with simulated=False"
        )
    secrets = source.secrets or Randomness(config["seed"])
    return KeyRing(
        run, secrets, pipeline.unlock, partial(Identity.derived, secrets), Roster.derived(secrets)
    )


def _secret_of(
    protocol: ClusteringProtocol, settings: Settings, folder: Path | None
) -> bytes | None:
    """Return the secret of a run, which is drawn as it starts and kept in its folder.

    Args:
        protocol: the method, which has the secret of a run that it repeats.
        settings: of the run.
        folder: the run folder; None stores everything in memory.

    Returns:
        None where keys, masks and noise follow from the seed.

    Raises:
        RunFolderError: the folder of a run that has begun is without its secret.
    """
    if settings.keys_from_seed:
        return None
    if folder is None:
        return experiment_of(protocol).secret or run_secret.drawn()
    secret = run_secret.read(folder)
    if secret is not None:
        return secret
    # a secret of its own would undo what was released under the lost one
    if checkpoints(folder) or (folder / "ledger.jsonl").is_file():
        raise run_secret.missing(folder)
    secret = run_secret.drawn()
    run_secret.write(folder, secret)
    return secret


@dataclass
class _Simulation:
    """Run of all clients in this process, and the parts of its checkpoints."""

    protocol: ClusteringProtocol
    server: ClusteringProtocol
    federation: Federation
    settings: Settings
    folder: Path | None
    config: dict[str, Any]
    endpoint: Endpoint[TrainingClient]
    transcript: Transcript
    net: ServerChannel
    secret: bytes | None = field(repr=False)
    authority: Authority | None = None
    program: str = ""
    recall: Recall = field(default_factory=Recall)

    @classmethod
    def prepare(
        cls,
        protocol: ClusteringProtocol,
        federation: Federation,
        settings: Settings,
        folder: Path | None,
    ) -> _Simulation:
        """Build the clients, the transcript, and the network between clients and server.

        Args:
            folder: the run folder; None stores everything in memory.
        """
        if folder:
            atomic_files.make_folder(folder)
        secret = _secret_of(protocol, settings, folder)
        public = Randomness(federation.seed)
        secrets = public if secret is None else run_secret.randomness(secret)
        endpoint = protocol.build_client(federation, settings, secrets=secrets)
        client = endpoint.client
        # Frames hold what clients sent, so their folder is for the owner's eyes.
        frames = None
        if folder:
            frames = folder / "transcript"
            atomic_files.make_private_folder(frames)
        transcript = Transcript(
            settings.transcript, frames, protocol.message_types, federation.names
        )
        dropouts = random_dropouts(settings.dropout, public)
        config = protocol.config(federation, settings.dtype)
        # Clients of one process share a batch, and messages skip encoding; the bytes are counted.
        inner: Transport = InProcess(endpoint.answer, dropouts)
        # Neither has met the clients' data.
        server = protocol.as_server()
        authority = Deployment(server, config).authority(secrets=secrets)
        if authority is not None:
            authority.observe = experiment_of(protocol).observe_authority
            inner = WithAuthority(
                inner, authority.answer_frame, lambda name: protocol.message_types(name)[1]
            )
        transport = Recorded(inner, transcript)
        device = client.cohort.device
        net = server.build_network(transport, config, device=device, secrets=secrets)
        # The price of DP-SGD depends on numbers of samples. In other runs the ledger, which may be
        # published, does not contain them.
        if protocol.privacy.per_example:
            net.state.ledger.samples = _samples(client)
        net.state.ledger.names = dict(enumerate(federation.names))
        return cls(
            protocol,
            server,
            federation,
            settings,
            folder,
            config,
            endpoint,
            transcript,
            net,
            secret,
            authority,
            protocol.program(),
        )

    def start(self, report: Callable[[Line], None]) -> Run:
        """Return the run, at its last checkpoint if the folder has one.

        Args:
            report: called with the history line of each round.
        """
        # The ledger is written before a release leaves, and not only with checkpoints.
        logs = {"ledger": self._ledger_log()}
        run = Run(self.folder, self._parts(), self._observe, report, self._begin_round, logs)

        target = self._restored_target()

        def record(events: list[Event]) -> None:
            new = self.recall.new(events)
            self.net.add(new)
            run.append("ledger")
            # After the ledger: what is refused here has left its client all the same, in a
            # repetition with other bits for instance. Nobody uses it.
            if target is not None:
                target.admit(new)

        self.net.record = record
        if not run.resumed:
            # A run that was killed before its first checkpoint may have left frames.
            self.transcript.rewind(Recording())
        return run

    def _restored_target(self) -> Target | None:
        """Return the target of the ledger, which a resumed run has in part; None without one."""
        if not self.protocol.privacy.holds_target:
            return None
        ledger = self.net.state.ledger
        target = _target(self.protocol, self.config, ledger.samples, self.federation)
        target.learn(ledger.events)
        for reservation in self.endpoint.reservations:
            if isinstance(reservation, ReleaseTarget):
                reservation.learn(ledger.events)
        return target

    def fitted(self, run: Run, state: Any) -> tuple[FittedState, Chance | None]:
        """Return the result of the run, and a comparison of the models with chance.

        Args:
            run: the finished run.
            state: the server's final state.

        Returns:
            The result; and the comparison, or None in a run too short for it.
        """
        protocol = self.protocol
        client = self.endpoint.client
        # Scored where the data is: the server holds no test data.
        models = protocol.final_models(client, state)
        scores = client.cohort.scores(models)
        learned = self._summary(run, state, scores)
        assert models.index is not None
        extra = {}
        shared = protocol.shared_models(client)
        if shared is not None:
            extra[SHARED] = shared
        clients = ClientState(
            models.table, list(models.index), self.endpoint.keys.secrets, extra=extra
        )
        result = FittedState(learned, pack(state), clients, self.secret)
        if protocol.rounds < ENOUGH_ROUNDS:
            return result, None
        return result, at_chance(client.cohort, models, scores)

    def _summary(self, run: Run, state: Any, scores: NDArray[np.float64]) -> FittedSummary:
        """Return the part of the result that may be published.

        Args:
            run: the finished run.
            state: the server's final state.
            scores: (m,) of the clients' models on their test data.
        """
        protocol = self.protocol
        client = self.endpoint.client
        labels = protocol.known_labels(client, state)
        truth = self.federation.truth
        agreement_scores = None
        # Files of one's own data have no true clusters to be compared with.
        if truth is not None:
            agreement_scores = dict(agreement(labels, truth))
        return FittedSummary(
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
            agreement=agreement_scores,
            network=self.net.state,
            seconds=run.seconds,
            device=client.cohort.device.type,
            program=self.program,
        )

    def _begin_round(self, number: int) -> None:
        self.net.round = int(number)

    def _observe(self, state: Any) -> Line:
        """Return the observer's numbers after a round."""
        protocol = self.protocol
        client = self.endpoint.client
        scores = protocol.evaluate(client, state)
        line = dict(protocol.observe(self.federation, client, state, scores))
        line["at_target"] = None
        if self.federation.objective.higher:
            line["at_target"] = share_at(scores, self.settings.target)
        totals = self.transcript.totals()
        return {**line, "up": totals["up"], "down": totals["down"]}

    def _parts(self) -> dict[str, CheckpointPart]:
        """Return the parts of a checkpoint, in the order in which they are restored."""
        parts = {
            "origin": CheckpointPart(
                Origin, lambda: Origin(config_hash(self.config), self.program), self._check_origin
            ),
            "clients": CheckpointPart(
                ClientState,
                lambda: self.endpoint.client.state(self.endpoint.keys.secrets),
                self._restore_clients,
            ),
            "network": CheckpointPart(
                ChannelState, lambda: _without_events(self.net.state), self._restore_network
            ),
            "transcript": CheckpointPart(
                Recording, self.transcript.snapshot, self.transcript.rewind
            ),
        }
        authority = self.authority
        if authority is not None:
            parts["authority"] = CheckpointPart(
                type(authority.state), lambda: authority.state, authority.restore
            )
        return parts

    def _check_origin(self, origin: Origin) -> None:
        if origin.config != config_hash(self.config):
            raise RunFolderError(
                f"{self.folder} holds a run of another configuration: resume with the same one, or "
                "give another folder"
            )
        # A run that two programs made is none of the second alone.
        self.program = origin.program

    def _restore_clients(self, state: ClientState) -> None:
        self.endpoint.client.restore(state)
        self.endpoint.keys.restore(state.secrets)

    def _restore_network(self, state: ChannelState) -> None:
        self.net.state = state

    def _ledger_log(self) -> Appended:
        """Return the log of the ledger's events, which are appended to a file as lines."""
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
    """Run a protocol on a federation in this process, or resume the run in the folder.

    Args:
        protocol: the method.
        federation: the clients and their data.
        settings: device, precision, dropouts and transcript.
        folder: the run folder; None stores everything in memory.
        report: called with the history line of each round.

    Returns:
        The result, the transcript, and a comparison of the models with chance, which is None in a
        run too short for it.
    """
    device = choose_device(settings.device)
    with torch.inference_mode(False), cpu_threads(settings.threads), reproducible(device):
        simulation = _Simulation.prepare(protocol, federation, settings, folder)
        run = simulation.start(report)
        with named_in_errors(federation.names):
            with without_clients(simulation.server):
                state = simulation.server.final_state(simulation.net, run)
            result, chance = simulation.fitted(run, state)
    return result, simulation.transcript, chance


def join(
    protocol: ClusteringProtocol,
    kept: FittedState,
    ledger: Ledger,
    record: NewcomerRecord | None,
    newcomers: Federation,
) -> Joined:
    """Assign clients that were not in a finished run to its clusters.

    Every call starts from the end of the run, and adds to its ledger.

    Args:
        protocol: with the hyper-parameters of the run.
        kept: the state at the end of the run.
        ledger: of the run and all its newcomers, which is added to.
        record: the file beside the run; None where there is none.
        newcomers: the clients and their data.

    Raises:
        UsageError: data of another kind, or too few samples for the run's noise.
        RunFolderError: releases of newcomers cannot be recorded in the protocol's folder.
    """
    learned = kept.learned
    config = learned.config
    settings = learned.settings
    newcomers = _check_kind_of_data(newcomers, config)
    sizes = training_sizes(protocol, newcomers)
    record = _opened_record(protocol, config, ledger, record)
    ledger.names = dict(enumerate(learned.names)) | ledger.names
    first = int(config["clients"])
    # Numbers are planned on a copy: the run's ledger takes them only after a release.
    planned = replace(ledger, names=dict(ledger.names), samples=dict(ledger.samples))
    numbers = _newcomer_numbers(protocol, planned, first, newcomers.names, sizes)
    secrets = kept.secrets()
    keys = KeySource(secrets=secrets)
    guests = build_client(
        protocol, newcomers, settings, key_source=keys, joins=config, numbers=numbers
    )
    hosts = _hosts(config, kept.clients.secrets, guests.limits, secrets)

    def answer(call: Call) -> Response:
        if call.to[0] < first:  # the key agreement, by which newcomers get the mask seed
            return hosts.answer(call)
        # Checked at the call, since not every method asks newcomers to train.
        if samples_batches(protocol, config, call.method):
            check_sizes(protocol, config, newcomers, sizes)
        return guests.answer(call)

    numbered = range(1 + max(planned.names))
    names = [planned.names[i] for i in numbered]
    transcript = Transcript(settings.transcript, None, protocol.message_types, names)
    device = guests.client.cohort.device
    transport = Recorded(InProcess(answer), transcript)
    server = protocol.as_server()
    net = server.build_network(transport, config, device=device, secrets=secrets)
    guest_names = dict(zip(numbers, newcomers.names, strict=True))
    guest_samples = _samples(guests.client) if protocol.privacy.per_example else {}
    guest_ledger = Ledger(samples=guest_samples, names=guest_names)
    # A copy by value, so that the state of the run does not change.
    end_of_run = unpack(pack(learned.network), ChannelState)
    net.state = replace(end_of_run, ledger=guest_ledger)
    rounds = [line["round"] for line in learned.history]
    net.round = 1 + max(rounds, default=0)
    net.record = _recorder(net, ledger, planned, record, first)
    state: Any = unpack(kept.server, protocol.state_class())
    with (
        named_in_errors(names),
        without_clients(server),
        torch.inference_mode(False),
        cpu_threads(settings.threads),
        reproducible(device),
    ):
        labels = server.assign_newcomers(net, state, guests.ids)
    labels = protocol.newcomer_labels(guests.client, state, labels)
    name = f"{type(protocol).__name__}.assign_newcomers"
    clusters = tuple(checked_labels(name, labels, len(guests.ids)))
    return Joined(clusters, net.state.ledger, transcript, transcript.totals())


def _newcomer_numbers(
    protocol: ClusteringProtocol,
    planned: Ledger,
    first: int,
    names: Sequence[str],
    sizes: Sequence[int],
) -> list[int]:
    """Return the newcomers' numbers, and add them to a ledger.

    Args:
        planned: the ledger, which is changed.
        first: the smallest number of a newcomer.
        names: of the newcomers.
        sizes: numbers of samples that they train on.
    """
    numbers = []
    for name, size in zip(names, sizes, strict=True):
        # Only the price of DP-SGD depends on the number of samples.
        samples = size if protocol.privacy.per_example else None
        numbers.append(number_of(planned, first, name, samples))
    return numbers


def _check_kind_of_data(newcomers: Federation, config: Mapping[str, Any]) -> Federation:
    """Return newcomers with their features in the run's order.

    Args:
        newcomers: the clients and their data.
        config: of the run.

    Raises:
        UsageError: their data are of another kind than the run's.
    """
    task = objective(config["objective"])
    if newcomers.objective != task:
        raise UsageError(
            f"newcomers' data are for {newcomers.objective.as_json()}, the run's for "
            f"{task.as_json()}: give the same kind of data"
        )
    if "feature_names" in config:
        if newcomers.feature_names is None:
            raise UsageError(
                "the run's features have names and the newcomers' have none: give them as tables "
                "with these columns"
            )
        newcomers = newcomers.with_features(config["feature_names"])
    same_shape = list(newcomers.shape) == config["shape"]
    if not same_shape or newcomers.classes > config["classes"]:
        shape = tuple(config["shape"])
        raise UsageError(
            f"newcomers hold samples of shape {newcomers.shape} in {newcomers.classes} classes, "
            f"the run's {shape} in {config['classes']}: give them the same kind of data"
        )
    return newcomers


def _recorder(
    net: ServerChannel, ledger: Ledger, planned: Ledger, record: NewcomerRecord | None, first: int
) -> Callable[[list[Event]], None]:
    """Return a function that adds newcomers' releases to the run's ledger, and to its file.

    Args:
        net: the channel to the newcomers.
        ledger: of the run and all its newcomers.
        planned: the ledger with the newcomers' names and numbers of samples.
        record: the file beside the run; None where there is none.
        first: the smallest number of a newcomer.
    """
    # A repeated release of the same bits costs nothing more.
    of_newcomers = [event for event in ledger.events if min(event.ids) >= first]
    recall = Recall(of_newcomers)

    def record_events(events: list[Event]) -> None:
        net.add(events)
        ledger.names.update(planned.names)
        ledger.samples.update(planned.samples)
        new = recall.new(events)
        if new and record is not None:
            record.append(new, ledger)
        ledger.events.extend(new)

    return record_events


def _opened_record(
    protocol: ClusteringProtocol,
    config: Mapping[str, Any],
    ledger: Ledger,
    record: NewcomerRecord | None,
) -> NewcomerRecord | None:
    """Return the file that records newcomers' releases, after a check that it can be written.

    Args:
        protocol: with the hyper-parameters of the run.
        config: of the run.
        ledger: of the run and all its newcomers.
        record: the file; None where the protocol has no folder.

    Returns:
        None where the protocol has no folder, or where a run without noise cannot write to it.

    Raises:
        RunFolderError: the file of a run with noise cannot be written.
    """
    if record is None:
        return None
    record.update(ledger)
    try:
        record.check_writable()
    except RunFolderError:
        # Updates, training or Gram matrices have noise, so ε has to be complete.
        if protocol.adds_noise(config):
            raise
        # Without noise every release of newcomers has an infinite ε, recorded or not.
        return None
    return record


def _without_events(state: ChannelState) -> ChannelState:
    """Return the channel's state without the ledger's events, which have a file of their own."""
    return replace(state, ledger=replace(state.ledger, events=[]))


def _samples(client: TrainingClient) -> dict[int, int]:
    """Return the number of samples that each client trains on, by client number.

    The cost of DP-SGD depends on it, so it is public in such a run.
    """
    return dict(zip(client.cohort.ids, client.cohort.sizes, strict=True))


def _hosts(
    config: Mapping[str, Any], kept: Secrets, limits: Limits, secrets: Randomness
) -> Endpoint[Any]:
    """Return the endpoint of the run's own clients, without data or models.

    Newcomers need them for the key agreement only: one of them seals the mask seed.

    Args:
        config: of the run.
        kept: keys and seeds of the run's clients.
        limits: of frames.
        secrets: secret random streams of the run.
    """
    run = config_hash(config)
    keys = KeyRing(
        run, None, lambda seed: None, partial(Identity.derived, secrets), Roster.derived(secrets)
    )
    keys.restore(kept)
    return Endpoint(None, range(config["clients"]), run, Pipeline(), keys, limits=limits)


def opened(protocol: ClusteringProtocol, kept: FittedState, posted: ModelDelta) -> torch.Tensor:
    """Return the model θ, (d,), of a displacement that the server stores.

    It needs the clients' keys, which only the owner of a fitted protocol has.

    Args:
        protocol: with the hyper-parameters of the run.
        kept: the state at the end of the run.
        posted: the displacement, masked where updates are.

    Raises:
        UsageError: the server stores no such model.
    """
    if not len(posted.displacement):
        raise UsageError("this model was not kept: run with tree=True, and with members that reply")
    deployment = Deployment(protocol, kept.learned.config)
    pipeline = deployment.pipeline()
    # All clients share one mask seed.
    for seed in list(kept.clients.secrets.seed.values())[:1]:
        pipeline.unlock(seed)
    start = deployment.initial_model().initial().to(posted.displacement.dtype)
    return start + pipeline.inverse(posted.displacement, posted.step)


def replayed(
    protocol: ClusteringProtocol,
    transcript: Transcript,
    config: dict[str, Any],
    threads: int = 0,
    device: str = "auto",
    observe: Callable[[VerbOutcome], None] | None = None,
    secrets: Randomness | None = None,
) -> tuple[Any, ChannelState]:
    """Run the server alone against a recorded transcript.

    Args:
        protocol: with the hyper-parameters of the run.
        transcript: the recorded frames.
        config: what clients and server agreed on.
        threads: those of the run's settings, since sums round differently with another number.
        device: that of the run's settings, since sums round differently on another device.
        observe: called with what each verb gives its reader; None for nobody.
        secrets: secret random streams of the run; None derives them from the seed, as runs with
            `keys_from_seed` do.

    Returns:
        The server's final state, and that of its channel, which contains the ledger.

    Raises:
        ReplayError: a request differs from the recorded one by a bit, so the server used
            information that it received from no verb.
        UsageError: the server asks for an attribute that a new object does not have.
    """
    transport = Replay(transcript)
    server_device = choose_device(device)
    server = protocol.as_server()
    net = server.build_network(transport, config, device=server_device, secrets=secrets)
    net.observe = observe
    run = Run(begin=lambda number: setattr(net, "round", number))
    with (
        without_clients(server),
        warnings.catch_warnings(),
        torch.inference_mode(False),
        cpu_threads(threads),
        reproducible(server_device),
    ):
        warnings.simplefilter("ignore", SecureClusterWarning)  # the run itself has warned
        state = server.final_state(net, run)
    transport.finish()
    return state, net.state
