"""How clients, network and run are put together: for a run, for its replay, and for newcomers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.protocols.saving import SCHEMA, Kept, Learned

from securecluster import files
from securecluster.backend import torch
from securecluster.cohort import Cohort
from securecluster.data import Federation
from securecluster.devices import choose_device, cpu_threads, reproducible
from securecluster.displacements import Posted, Trainee, TraineeState
from securecluster.endpoint import Endpoint, config_hash
from securecluster.errors import RunFolderError, UsageError
from securecluster.messages import Answer, Call
from securecluster.metrics import agreement, share_at
from securecluster.network import NetworkState
from securecluster.objectives import objective
from securecluster.privacy.draws import Draws
from securecluster.privacy.keys import KeyRing, Secrets
from securecluster.privacy.ledger import Event, Ledger
from securecluster.privacy.stages import Pipeline
from securecluster.randomness import Randomness
from securecluster.run import Appended, Line, Run
from securecluster.run import Kept as Part
from securecluster.settings import Settings
from securecluster.state import pack, plain, structured, unpack
from securecluster.transcript import Recording, Transcript
from securecluster.transport import InProcess, Recorded, random_dropouts

if TYPE_CHECKING:
    from securecluster.protocols.base import Protocol


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
    protocol: Protocol,
    federation: Federation,
    settings: Settings,
    clients: Sequence[int] | None = None,
    simulated: bool = True,
    joins: Mapping[str, Any] | None = None,
) -> Endpoint[Trainee]:
    """The endpoint of some clients of a federation.

    Args:
        joins: the configuration of a run that these clients join as newcomers, numbered after its own.
    """
    config = protocol.config(federation, settings.dtype) if joins is None else joins
    if joins is not None:
        federation = replace(federation, seed=config["seed"], classes=config["classes"])
    randomness, flat = Randomness(federation.seed), protocol.flat_model(federation) if joins is None else protocol._flat
    pipeline = protocol.pipeline(config)
    dtype = {"float32": torch.float32, "float64": torch.float64}[settings.dtype]
    first = 0 if joins is None else int(config["clients"])
    keys = KeyRing(config_hash(config), randomness if simulated else None, pipeline.unlock)
    draws = Draws(keys.noise)
    pipeline.arm(draws)
    pipeline.guard = protocol.guard(config, draws)
    cohort = Cohort(federation, flat, randomness, choose_device(settings.device), dtype, clients, first, protocol.aside, draws)
    return Endpoint(protocol.make_client(cohort, pipeline, config), cohort.ids, config_hash(config), pipeline, keys)


def carry_out(
    protocol: Protocol, federation: Federation, settings: Settings, folder: Path | None, report: Callable[[Line], None]
) -> tuple[Kept, Transcript]:
    """Run a protocol on a federation in this process, or go on with the run in the folder."""
    endpoint = protocol.build_client(federation, settings)
    client, keys = endpoint.client, endpoint.keys
    if folder:
        files.make_folder(folder / "transcript")
    written = folder and folder / "transcript"
    transcript = Transcript(settings.transcript, written, protocol.message_types, federation.names)
    lost = random_dropouts(settings.dropout, Randomness(federation.seed))
    config = protocol.config(federation, settings.dtype)
    net = protocol.build_network(Recorded(InProcess(endpoint.answer, lost), transcript), config, device=client.cohort.device)
    net.state.ledger.samples = _samples(client)

    def restore_clients(state: TraineeState) -> None:
        client.restore(state)
        keys.restore(state.secrets)

    def check_origin(origin: Origin) -> None:
        if origin.config != config_hash(config):
            raise RunFolderError(f"{folder} holds a run of another configuration: resume with the same one, or give another folder")

    def observe(state: Any) -> Line:
        scores, sent = protocol.evaluate(client, state), transcript.totals()
        reached = share_at(scores, settings.target) if federation.objective.higher else None
        seen = {**protocol.observe(federation, client, state, scores), "at_target": reached}
        return {**seen, "up": sent["up"], "down": sent["down"]}

    parts = {
        "origin": Part(Origin, lambda: Origin(config_hash(config)), check_origin),
        "clients": Part(TraineeState, lambda: client.state(keys.secrets), restore_clients),
        "network": Part(
            NetworkState,
            lambda: _without_events(net.state),
            lambda state: setattr(net, "state", state),
        ),
        "transcript": Part(Recording, transcript.snapshot, transcript.rewind),
    }
    events = Appended(
        lambda: net.state.ledger.events,
        lambda found: setattr(net.state.ledger, "events", found),
        plain,
        lambda event: structured(event, Event),
    )
    run = Run(
        folder,
        parts,
        observe,
        report,
        lambda number: setattr(net, "round", int(number)),
        {"ledger": events},
    )
    if not run.resumed:
        transcript.rewind(Recording())  # what a run left that was killed before its first checkpoint
    state = protocol.final_state(net, run)
    labels, models = [int(c) for c in state.labels], protocol.final(client, state)
    scores = client.cohort.scores(models)
    learned = Learned(
        SCHEMA, protocol.name, protocol.shown_params(), config, settings, list(federation.names), labels, run.history, transcript.totals(),
        scores.tolist(), None if federation.truth is None else dict(agreement(labels, federation.truth)), net.state, run.seconds,
        client.cohort.device.type,
    )  # fmt: skip
    assert models.index is not None
    return Kept(learned, pack(state), TraineeState(models.table, list(models.index), keys.secrets)), transcript


def join(protocol: Protocol, newcomers: Federation) -> Joined:
    """Place clients that a finished run never saw; every call starts from the end of the run, and changes nothing in it."""
    learned, config = protocol.kept_.learned, protocol.kept_.learned.config
    own = objective(config["objective"])
    if newcomers.objective != own:
        raise UsageError(
            f"newcomers' data are for {newcomers.objective.as_json()}, the run's for {own.as_json()}: give the same kind of data"
        )
    if newcomers.feature_names is None and "feature_names" in config:
        raise UsageError("the run's features have names and the newcomers' have none: give them as tables with these columns")
    if newcomers.feature_names is not None and "feature_names" in config:
        newcomers = newcomers.with_features(config["feature_names"])
    if list(newcomers.shape) != config["shape"] or newcomers.classes > config["classes"]:
        raise UsageError(
            f"newcomers hold samples of shape {newcomers.shape} in {newcomers.classes} classes, the run's {tuple(config['shape'])} in"
            f" {config['classes']}: give them the same kind of data"
        )
    settings = learned.settings
    guests = build_client(protocol, newcomers, settings, joins=config)
    hosts = _hosts(config, protocol.kept_.clients.secrets)

    def answer(call: Call) -> Answer:
        return (hosts if call.to[0] < config["clients"] else guests).answer(call)

    names = (*learned.names, *newcomers.names)  # newcomers are numbered after the run's clients
    transcript = Transcript(settings.transcript, None, protocol.message_types, names)
    device = guests.client.cohort.device
    net = protocol.build_network(Recorded(InProcess(answer), transcript), config, device=device)
    net.state = replace(unpack(pack(learned.network), NetworkState), ledger=Ledger(samples=_samples(guests.client)))
    net.round = 1 + max((line["round"] for line in learned.history), default=0)
    with torch.inference_mode(False), cpu_threads(settings.threads), reproducible(device):
        labels = protocol.place(net, unpack(protocol.kept_.server, protocol.state_class()), guests.ids)
    return Joined(tuple(map(int, labels)), net.state.ledger, transcript, transcript.totals())


def _without_events(state: NetworkState) -> NetworkState:
    """Return the network's state without the ledger's events, which are appended to a file of their own."""
    return replace(state, ledger=replace(state.ledger, events=[]))


def _samples(client: Trainee) -> dict[int, int]:
    """How many samples each client trains on: what DP-SGD costs depends on it, and it is taken as public there."""
    return dict(zip(client.cohort.ids, client.cohort.sizes, strict=True))


def _hosts(config: Mapping[str, Any], secrets: Secrets) -> Endpoint[Any]:
    """The run's own clients, as far as newcomers need them: one of them seals the mask seed."""
    keys = KeyRing(config_hash(config), None, lambda seed: None)
    keys.restore(secrets)
    return Endpoint(None, range(config["clients"]), config_hash(config), Pipeline(), keys)


def opened(protocol: Protocol, posted: Posted) -> torch.Tensor:
    """The model (d,) behind a displacement that the server holds, as the owner of a fitted protocol reads it.

    Raises:
        UsageError: the server holds none.
    """
    if not len(posted.displacement):
        raise UsageError("this model was not kept: run with tree=True, and with members that reply")
    kept, flat = protocol.kept_, protocol._flat
    pipeline = protocol.as_run().pipeline(kept.learned.config)
    for seed in list(kept.clients.secrets.seed.values())[:1]:
        pipeline.unlock(seed)
    return flat.initial().to(posted.displacement.dtype) + pipeline.inverse(posted.displacement, posted.step)
