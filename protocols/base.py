"""What every protocol shares: the estimator conventions, and how clients, network and run are put together."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

import numpy as np

from securecluster import files
from securecluster.backend import torch
from securecluster.cohort import Cohort, LocalTraining, check_training
from securecluster.data import Federation
from securecluster.devices import choose_device, cpu_threads
from securecluster.displacements import Trainee, TraineeState
from securecluster.endpoint import Endpoint, config_hash, message_types
from securecluster.errors import RunFolderError, UsageError
from securecluster.messages import Rows
from securecluster.metrics import Agreement, agreement, mean
from securecluster.network import Network, NetworkState
from securecluster.privacy.keys import KeyRing
from securecluster.privacy.masks import MaskInfo, build, describe
from securecluster.privacy.stages import Pipeline
from securecluster.randomness import Randomness
from securecluster.run import Kept, Line, Run
from securecluster.settings import Settings, check_settings
from securecluster.state import pack
from securecluster.transcript import Transcript
from securecluster.transport import InProcess, Recorded, Replay, Transport, random_dropouts

if TYPE_CHECKING:
    from securecluster.models import FlatModel


@dataclass
class Fit:
    """The learned things of a fitted protocol, before they become attributes."""

    labels: list[int]
    models: Rows
    run: Run
    network: Network
    transcript: Transcript
    client: Any
    result: bytes
    device: str


@dataclass
class Protocol(ABC):
    """Base of the methods: the constructor only stores, `fit` returns self, and what was learned ends in an underscore.

    Attributes after `fit`:
        labels_: each client's cluster, (m,) ints from 0.
        models_: a `state_dict` per cluster, for `load_state_dict` of the module.
        history_: a dict per round. ledger_: the releases. transcript_: the frames. bytes_: totals by direction and message.
    """

    rounds: int = 40
    """communication rounds in all"""
    model: Any = "mlp"
    """network that clients train: mlp, mlp-32, mlp-200, linear, cnn-briggs, cnn-ali, cnn-cifar, resnet9; in Python also any nn.Module"""
    lr: float = 0.2
    """learning rate of the clients' optimizer"""
    epochs: int = 3
    """passes over its own data a client makes in a round"""
    batch_size: int = 20
    """samples per mini-batch"""
    optimizer: str = "sgd"
    """sgd or adam"""
    momentum: float = 0.0
    """of sgd, in [0, 1); starts anew each round"""
    participation: float = 1.0
    """share of clients asked in a round, in (0, 1]"""
    mask: str = "none"
    """map of updates that the server does not know, a fresh one each round: none, permutation, signed-permutation, rotation or haar"""

    name: ClassVar[str]
    client: ClassVar[type[Trainee]] = Trainee

    @abstractmethod
    def serve(self, net: Network, run: Run) -> Any:
        """The paper's loop: all that the server does. Returns its final state, which has `labels`."""

    def state_class(self) -> type:
        """The class of what `serve` returns."""
        return get_type_hints(type(self).serve)["return"]  # type: ignore[no-any-return]

    @property
    def weighted(self) -> bool:
        """Whether clients tell how many samples they hold."""
        return False

    def sees(self) -> list[str]:
        """What the server sees beyond the values of single replies."""
        return []

    def check(self, clients: int) -> None:
        """Raise UsageError for hyper-parameters or a federation this method cannot work with."""
        check_training(self._training())
        build(self.mask)
        whole, share = isinstance(self.rounds, Integral), isinstance(self.participation, Real)
        if not (whole and self.rounds >= 1 and share and 0 < self.participation <= 1):
            raise UsageError("rounds is a whole number, at least 1, and participation lies in (0, 1]")
        if clients < 2:
            raise UsageError("clustering needs at least two clients: one alone has nobody to be compared with")

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The hyper-parameters by name (scikit-learn's convention; `sklearn.base.clone` works)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def set_params(self, **params: Any) -> Self:
        """Change hyper-parameters by name."""
        for name, value in params.items():
            if name not in self.get_params():
                raise UsageError(f"{type(self).__name__} has no hyper-parameter {name!r}: it has {', '.join(self.get_params())}")
            setattr(self, name, value)
        return self

    def fit(
        self,
        federation: Federation,
        settings: Settings | None = None,
        *,
        folder: Path | None = None,
        report: Callable[[Line], None] = lambda line: None,
    ) -> Self:
        """Run the protocol on a federation, in this process.

        Args:
            folder: a run folder; with a checkpoint of the same configuration in it, the run goes on from there.
            report: called with the history line of each round.

        Raises:
            SecureClusterError: one sentence on what is wrong and what to do; a folder stays resumable.
        """
        settings = settings or Settings()
        self.check(len(federation))
        check_settings(settings, federation)
        with torch.inference_mode(False), cpu_threads(settings.threads):
            found = self._run(federation, settings, folder, report)
        self.labels_ = np.asarray(found.labels)
        self.client_models_, self._flat = found.models, found.client.cohort.model
        self.models_ = [self._state_dict(found.labels.index(c)) for c in range(max(found.labels) + 1)]
        self.history_, self.ledger_, self.transcript_ = found.run.history, found.network.state.ledger, found.transcript
        self.bytes_, self.dropped_ = found.transcript.totals(), dict(sorted(found.network.state.lost.items()))
        self.accuracy_ = found.client.cohort.accuracy(found.models)
        self.seconds_, self.device_, self.server_state_ = found.run.seconds, found.device, found.result
        self.agreement_: Agreement | None = None if federation.truth is None else agreement(found.labels, federation.truth)
        return self

    def config(self, federation: Federation, dtype: str) -> dict[str, Any]:
        """What client and server must agree on; its hash is in every frame."""
        from securecluster.models import describe as describe_model

        dimension = self._model(federation).dimension
        self.pipeline(dimension)  # a mask that cannot work on this model is refused before anything is written
        shape = {"shape": list(federation.shape), "classes": federation.classes, "clients": len(federation), "seed": federation.seed}
        params = {**self.get_params(), "model": describe_model(self.model)}
        found = {"schema": 1, "protocol": self.name, "dtype": dtype, "dimension": dimension, **params, **shape}
        return {name: value.item() if isinstance(value, np.generic) else value for name, value in found.items()}  # as JSON has them

    def pipeline(self, dimension: int | None = None) -> Pipeline:
        """The stages between a client's update of `dimension` numbers and the wire."""
        return Pipeline(build(self.mask, dimension))

    def _model(self, federation: Federation) -> FlatModel:
        """The network with its initial weights θ_0."""
        from securecluster.models import build as build_model

        return build_model(self.model, federation.shape, federation.classes, Randomness(federation.seed))

    def build_client(
        self, federation: Federation, settings: Settings, clients: Sequence[int] | None = None, simulated: bool = True
    ) -> Endpoint[Trainee]:
        """The endpoint of some clients (all by default): their data, models, keys and release policy.

        Args:
            simulated: derive keys from the federation's seed; a deployed node says False and takes them from the operating system.
        """
        randomness, flat = Randomness(federation.seed), self._model(federation)
        pipeline = self.pipeline(flat.dimension)
        dtype = {"float32": torch.float32, "float64": torch.float64}[settings.dtype]
        cohort = Cohort(federation, flat, randomness, choose_device(settings.device), dtype, clients)
        fingerprint_of_config = config_hash(self.config(federation, settings.dtype))

        def unlock(seed: bytes) -> None:
            for stage in pipeline.stages:
                if hasattr(stage, "unlock"):
                    stage.unlock(seed)

        keys = KeyRing(fingerprint_of_config, randomness if simulated else None, unlock)
        return Endpoint(self.client(cohort, self._training(), pipeline, self.weighted), cohort.ids, fingerprint_of_config, pipeline, keys)

    def build_network(self, transport: Transport, config: dict[str, Any]) -> Network:
        """The server's side: ids and verbs, from the configuration alone."""
        return Network(
            config["clients"], transport, config_hash(config), self.pipeline(config.get("dimension")), Randomness(config["seed"])
        )

    def replay(self, transcript: Transcript, config: dict[str, Any]) -> bytes:
        """Run the server alone against a recorded transcript; its final state, packed, must equal the recorded one.

        Raises:
            ReplayError: a request differs from the recorded one by a bit, so the server used something no verb gave it.
        """
        transport = Replay(transcript)
        net = self.build_network(transport, config)
        state = self.serve(net, Run(begin=lambda number: setattr(net, "round", number)))
        transport.finish()
        return pack(state)

    def served(self, client: Any, state: Any) -> Rows:
        """The model each client would use after this round (for the observer: it looks outside the network)."""
        everyone = range(len(client.cohort.ids))
        return client.advanced(everyone, state.outbox.letter(everyone))  # type: ignore[no-any-return]

    def observe(self, federation: Federation, client: Any, state: Any) -> Line:
        """The researcher's numbers after a round."""
        accuracy = client.cohort.accuracy(self.served(client, state))
        line: Line = {"clusters": len(set(state.labels)), "accuracy": mean(accuracy)}
        if federation.truth is not None:
            line["ari"] = agreement(state.labels, federation.truth)["ari"]
        return line

    def _run(self, federation: Federation, settings: Settings, folder: Path | None, report: Callable[[Line], None]) -> Fit:
        endpoint = self.build_client(federation, settings)
        client, keys = endpoint.client, endpoint.keys
        if folder:
            files.make_folder(folder / "transcript")
        transcript = Transcript(settings.transcript, folder and folder / "transcript", lambda m: message_types(self.client, m))
        lost = random_dropouts(settings.dropout, Randomness(federation.seed))
        config = self.config(federation, settings.dtype)
        net = self.build_network(Recorded(InProcess(endpoint.answer, lost), transcript), config)

        def restore_clients(state: TraineeState) -> None:
            client.restore(state)
            keys.restore(state.secrets)

        def check_origin(origin: Origin) -> None:
            if origin.config != config_hash(config):
                raise RunFolderError(f"{folder} holds a run of another configuration: resume with the same one, or give another folder")

        def observe(state: Any) -> Line:
            return {**self.observe(federation, client, state), "up": transcript.totals()["up"], "down": transcript.totals()["down"]}

        kept = {
            "origin": Kept(Origin, lambda: Origin(config_hash(config)), check_origin),
            "clients": Kept(TraineeState, lambda: client.state(keys.secrets), restore_clients),
            "network": Kept(NetworkState, lambda: net.state, lambda state: setattr(net, "state", state)),
            "transcript": Kept(Recording, lambda: Recording(*transcript.snapshot()), lambda r: transcript.rewind(r.count, r.totals)),
        }
        run = Run(folder, kept, observe, report, lambda number: setattr(net, "round", number))
        if not run.resumed:
            transcript.rewind(0, {})  # what a run left that was killed before its first checkpoint
        state = self.serve(net, run)
        return Fit(list(state.labels), client.models, run, net, transcript, client, pack(state), client.cohort.device.type)

    def _state_dict(self, client: int) -> dict[str, Any]:
        state: dict[str, Any] = self._flat.state_dict(self.client_models_.row(client))
        return state

    def _training(self) -> LocalTraining:
        return LocalTraining(self.lr, self.epochs, self.batch_size, self.optimizer, self.momentum)

    def mask_info(self) -> MaskInfo:
        """What the result says of this run's mask."""
        return describe(self.mask, self._flat.dimension, self.client_models_.table.element_size())


@dataclass
class Origin:
    """A checkpoint's word on where it comes from."""

    config: str  # its hash


@dataclass
class Recording:
    """A checkpoint's word on the transcript."""

    count: int
    totals: dict[str, dict[str, int]]
