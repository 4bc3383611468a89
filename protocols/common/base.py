"""What every protocol shares: hyper-parameters, the estimator conventions, and its two sides."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from securecluster.core import manifest
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.core.validation import check_number, check_whole
from securecluster.data import Federation
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.messaging import wire
from securecluster.messaging.bounds import Limits
from securecluster.messaging.messages import Rows
from securecluster.messaging.transcript import INDEX, Transcript
from securecluster.models.objectives import Objective, objective
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.masks import MaskInfo, build, describe
from securecluster.privacy.pipeline import Pipeline
from securecluster.privacy.row_layout import layout
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.config import check_kind, known, numbers
from securecluster.protocols.common.dp_options import DPOptions, ReleaseCounts
from securecluster.protocols.common.execution import (
    Joined,
    KeySource,
    build_client,
    carry_out,
    join,
    opened,
)
from securecluster.protocols.common.hooks import ProtocolHooks
from securecluster.protocols.common.newcomers import NewcomerRecord, warn_if_dear
from securecluster.protocols.common.serialization import SHARED, FittedState, load, read_kept, save
from securecluster.runtime.endpoint import Endpoint, config_hash, message_types
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ChannelState, ServerChannel
from securecluster.runtime.settings import Settings, check_settings
from securecluster.runtime.transport import Replay, Transport
from securecluster.training.chance_level import Chance
from securecluster.training.local_trainer import LocalTrainer, check_training

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel


FEW_ROUNDS = 30  # more of them may help


@dataclass
class ClusteringProtocol(DPOptions, ProtocolHooks):
    """Base of the methods.

    The constructor only stores, `fit` returns self, and what was learned ends in an underscore.

    Attributes after `fit`:
        labels_: each client's cluster, (m,) ints from 0.
        models_: a `state_dict` per cluster, for `load_state_dict` of the module; `model_of` gives a
            client's own. Under noise it is None for a cluster all of whose clients trained alone:
            their models have no noise and stay with the clients.
        unshared_labels_: the clusters whose entry in `models_` is None.
        history_: a dict per round. ledger_: the releases of the run and its newcomers. transcript_:
            the frames.
        bytes_: totals by direction and message.
        accuracy_ (of text perplexity_, of trajectories position_error_ in metres): each client's on
            its test data, (m,); scores_ is whichever it is, and metric_ its name.
        agreement_: scores against the true clusters, where they are known.
        warning_: a sentence where a run of ten rounds or more has taught many clients' models
            nothing, else None; it compares their training loss and accuracy with those of an answer
            that ignores its input, as the observer, outside the protocol and outside ε.
        start_: the weights that a module of your own began with; what you load into it later
            changes nothing here.
        joined_: after `predict`, what placing the newcomers released and cost in that call.
    """

    rounds: int = 40
    """communication rounds in all"""
    model: Any = "auto"
    """network that clients train: mlp, mlp-32, mlp-200, linear, cnn-briggs, cnn-ali, cnn-cifar,
    resnet9, lstm-words, lstm-chars, lstm-chars-256, lstm-trajectory; auto is what suits the data,
    mlp for images and tables; in Python also any nn.Module
    """
    lr: float | None = None
    """learning rate of the clients' optimizer; None is the network's own: with sgd 0.2 for images
    and tables, and 0.03 for networks without convolutions on known sets of bright images (femnist,
    cifar10, cifar100, negatives of mnist and fashion_mnist); with adam 0.001; others for text and
    trajectories
    """
    epochs: int = 3
    """passes over its own data a client makes in a round"""
    batch_size: int = 20
    """samples per mini-batch"""
    optimizer: str = "sgd"
    """sgd or adam"""
    momentum: float = 0.0
    """of sgd, in [0, 1); starts anew each round unless keep_momentum says otherwise"""
    keep_momentum: bool = dataclasses.field(default=False, kw_only=True)
    """momentum buffers live on between rounds, one a client; takes memory for two more models a
    client
    """
    participation: float = 1.0
    """share of clients asked in a round, in (0, 1]"""
    mask: str = "none"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """

    def check(self, clients: int) -> None:
        """Raise UsageError for hyper-parameters or a federation this method cannot work with."""
        self.check_private()
        check_training(
            self.training(
                {
                    "lr": 1.0 if self.lr is None else self.lr,
                    "clip": self.clip or 1.0,
                    "noise": self.noise,
                }
            )
        )
        if self.keep_momentum and not self.one_model:
            whose = (
                f"clients of {self.name} start anew from other models, whose momentum is not theirs"
            )
            raise UsageError(f"{whose}: leave keep_momentum out")
        build(self.mask)
        check_whole(self, rounds=1)
        check_number(self, "participation", 0, 1, low_in=False, high_in=True)
        for field in dataclasses.fields(self):
            if isinstance(field.default, bool) and not isinstance(
                getattr(self, field.name), bool | np.bool_
            ):
                raise UsageError(
                    f"{field.name} = {getattr(self, field.name)!r} is a choice: give True or False"
                )
        if clients < 2:
            raise UsageError(
                "clustering needs at least two clients: one alone has nobody to be compared with"
            )

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The hyper-parameters by name (scikit-learn's convention; `sklearn.base.clone` works)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def set_params(self, **params: Any) -> Self:
        """Change hyper-parameters by name."""
        for name, value in params.items():
            if name not in self.get_params():
                raise UsageError(
                    f"{type(self).__name__} has no hyper-parameter {name!r}: it has "
                    f"{', '.join(self.get_params())}"
                )
            setattr(self, name, value)
        return self

    def fit(
        self,
        federation: Federation,
        settings: Settings | None = None,
        *,
        folder: Path | str | None = None,
        report: Callable[[Line], None] = lambda line: None,
    ) -> Self:
        """Run the protocol on a federation, in this process.

        Args:
            federation: the clients and their data.
            settings: where and how the run is carried out.
            folder: a run folder to write to; None keeps everything in memory. A new or empty folder
                is taken. A run of the same configuration, settings and data that was stopped there
                goes on, and one that has ended is loaded. It is a run folder like those of the
                command line, with configuration, result and pictures.
            report: called with the history line of each round.

        Raises:
            SecureClusterError: one sentence on what is wrong and what to do; a folder stays
                resumable.
        """
        settings = settings or Settings()
        check_kind(federation)
        self.check(len(federation))
        check_settings(settings, federation)
        if folder is None:
            self._run(federation, settings, None, report)
        else:
            # The one call upwards, hence by name: what a run folder holds (results, pictures) is
            # the app's to write.
            recorder = importlib.import_module("securecluster.app.execution")
            recorder.fit(self, federation, settings, Path(folder), report)
        if self.warning_ is not None:
            warnings.warn(self.warning_, SecureClusterWarning, stacklevel=2)
        return self

    def run_in(
        self,
        folder: Path,
        federation: Federation,
        settings: Settings,
        report: Callable[[Line], None],
    ) -> Self:
        """Run, or go on from the last checkpoint, in a folder.

        The caller has locked and checked the folder.
        """
        return self._run(federation, settings, folder, report)

    def _run(
        self,
        federation: Federation,
        settings: Settings,
        folder: Path | None,
        report: Callable[[Line], None],
    ) -> Self:
        device = choose_device(settings.device)
        with torch.inference_mode(False), cpu_threads(settings.threads), reproducible(device):
            kept, transcript, judged = carry_out(self, federation, settings, folder, report)
        self.transcript_ = transcript
        self._restore_fitted(kept)
        self.warning_: str | None = None if judged is None else self._doubt(judged, federation)
        return self._belongs_to(folder)

    def _doubt(self, found: Chance, federation: Federation) -> str | None:
        """Return a sentence on models that have learned nothing, and on what to try.

        Return None where there is no need for one.
        """
        from securecluster.models.architectures import rate

        if not found.notable:
            return None
        config, rounds = self.kept_.learned.config, len(self.history_)
        usual = rate(
            self.model, federation.objective, federation.classes, self.optimizer, federation.bright
        )
        lr = float(config["lr"])
        is_usual = usual / 2 <= lr <= 1.5 * usual
        other = float(f"{lr / 3:.1g}") if is_usual else usual
        advice = [
            f"{'a higher' if other > lr else 'a lower'} learning rate (--lr {other:g} in place of "
            f"{lr:g})"
        ]
        advice += ["less noise"] * self.noisy + ["more rounds"] * (rounds < FEW_ROUNDS)
        advice += ["fewer epochs"] * (self.epochs > 1 and other < lr)
        return (
            f"after {rounds} rounds the models of {len(found.clients)} of {found.tested} clients "
            f"do no better than chance (training loss {found.loss:.3g}, chance "
            f"{found.chance:.3g}): try {', or '.join(advice)}"
        )

    def restore_from(self, folder: Path) -> Self:
        """Take over what a finished run in a folder learned.

        The run's hyper-parameters are this protocol's.
        """
        self._restore_fitted(read_kept(folder))
        self._open_transcript(folder)
        return self._belongs_to(folder)

    def _belongs_to(self, folder: Path | None) -> Self:
        """Record what newcomers release in a folder.

        Add to the ledger what is recorded there.
        """
        clients = self.kept_.learned.config["clients"]
        self.newcomers_record = None if folder is None else NewcomerRecord(folder, clients)
        if self.newcomers_record is not None:
            self.newcomers_record.update(self.ledger_)
        return self

    def _open_transcript(self, folder: Path) -> None:
        """Open the transcript of a run folder, after a check of its index.

        A folder that `save` wrote has none.
        """
        marks = manifest.read(folder)
        if "config.json" not in marks:
            return
        learned, index = self.kept_.learned, f"transcript/{INDEX}"
        if index in marks:
            manifest.checked(folder, index, marks)
        mode, home = learned.settings.transcript, folder / "transcript"
        self.transcript_ = Transcript.open(mode, home, self.message_types, learned.names)

    def _restore_fitted(self, kept: FittedState) -> Self:
        """Take over what was learned: it becomes the attributes that end in an underscore."""
        learned, config = kept.learned, kept.learned.config
        self.kept_ = kept
        self.warning_ = None
        self._made = copy.deepcopy(self.get_params())
        vars(self).pop("joined_", None)  # of a run before this one
        self.labels_ = np.asarray(learned.labels)
        self.client_models_ = Rows(kept.clients.table, tuple(kept.clients.index))
        self._flat = self._network(
            config["shape"], config["classes"], config["seed"], objective(config["objective"])
        )
        given = {} if isinstance(self.model, str) else self.model.state_dict()
        self.start_ = {
            name: value.detach().cpu().clone()
            for name, value in given.items()
            if isinstance(value, torch.Tensor)
        }
        self.models_ = [self._cluster_model(c) for c in range(max(learned.labels) + 1)]
        self.unshared_labels_ = [c for c, model in enumerate(self.models_) if model is None]
        self.history_, self.ledger_, self.bytes_ = (
            learned.history,
            learned.network.ledger,
            learned.bytes,
        )
        self.dropped_ = dict(sorted(learned.network.lost.items()))
        self.scores_: NDArray[np.float64] = np.asarray(learned.scores, dtype=np.float64)
        self.metric_ = self._flat.objective.metric
        setattr(self, f"{self.metric_}_", self.scores_)
        self.seconds_, self.device_, self.server_state_ = (
            learned.seconds,
            learned.device,
            kept.server,
        )
        self.agreement_ = learned.agreement
        self.state_: Any = unpack(kept.server, self.state_class())
        return self

    def _cluster_model(self, label: int) -> dict[str, Any] | None:
        """Return the model that a cluster's members share.

        Return None where noise is asked for and all they have was trained alone.
        """
        learned, shared = self._fitted().learned, self.kept_.clients.extra.get(SHARED)
        if shared is not None:
            state: dict[str, Any] = self._flat.state_dict(shared[label])
            return state
        members = [i for i, own in enumerate(learned.labels) if own == label]
        if self.keeps_local_models(learned.config):
            members = [i for i in members if i not in learned.local]
        return self.model_of(members[0]) if members else None

    def model_of(self, client: int | str) -> dict[str, Any]:
        """Return the `state_dict` of the model that a client holds, by its number or name.

        It is for that client: a model that it trained alone has no noise, and no ε covers it.
        """
        names = self._fitted().learned.names
        if client not in names and not (isinstance(client, Integral) and 0 <= client < len(names)):
            raise UsageError(
                f"no client {client!r}: clients are {', '.join(names[:3])} …, or numbers from 0 to "
                f"{len(names) - 1}"
            )
        state: dict[str, Any] = self._flat.state_dict(
            self.client_models_.row(names.index(client) if isinstance(client, str) else client)
        )
        return state

    def predict(self, newcomers: Federation) -> NDArray[np.int64]:
        """Return the clusters of clients that were not in the run, (n,).

        They join the finished run over its own network, masked where it was.

        Every call starts from the end of the run. What newcomers release is added to `ledger_`, and
        to the folder of the run, where it has one; `joined_` holds the frames, bytes and releases
        of this call. Clients of one name are one person: asked again, a newcomer of the same data
        sends the same bits, which cost nothing more, and with other data it releases more. So does
        one that is called like a client of the run.

        Raises:
            UsageError: not fitted, or no client, or samples of another shape, or classes that the
                run did not know, or, with dp_unit example, fewer training samples than the clients
                of the run where newcomers train.
            RunFolderError: the folder of a run with a finite ε cannot be written to.
        """
        check_kind(newcomers)
        if not len(newcomers):
            raise UsageError("there are no newcomers in this federation: give at least one client")
        fitted = self.with_fitted_params()
        self.joined_: Joined = join(fitted, newcomers)
        warn_if_dear(fitted, self.ledger_, newcomers.names)
        return np.asarray(self.joined_.labels, dtype=np.int64)

    def save(self, folder: Path | str) -> None:
        """Write what was learned as safetensors.

        `clients.safetensors` holds models and keys and is for the owner's eyes only.

        A module of your own is saved by its weights, not its code. The transcript is not saved:
        give `fit` a folder for that.

        Raises:
            UsageError: a run folder, or one with releases of newcomers that `ledger_` lacks.
        """
        target = Path(folder)
        if (target / ".securecluster").is_file():
            raise UsageError(
                f"{target} is a run folder, whose files belong together: save to another folder"
            )
        self.write(target)

    def write(self, folder: Path) -> None:
        """Write what was learned into a folder, which may be that of its run."""
        fitted, record = self.with_fitted_params(), getattr(self, "newcomers_record", None)
        if record is not None and record.path.parent.resolve() == folder.resolve():
            record.update(self.ledger_)  # the ledger that is saved replaces the file
        save(fitted, folder)

    @classmethod
    def load(cls, folder: Path | str, model: Any = None, **own: Any) -> Self:
        """Return a fitted protocol from the folder that `save` wrote, or from a finished run's.

        That of a finished run has its `transcript_`, too.

        Args:
            model: the module, where the run trained one of your own.
            own: other hyper-parameters that were objects of your own (OneShot's features), by name.

        Raises:
            RunFolderError: nothing to load there, or it does not parse. UsageError: another
                protocol's folder, or another module.
        """
        found = load(cls, Path(folder), model, own)
        found._open_transcript(Path(folder))
        return found._belongs_to(Path(folder))

    def _fitted(self) -> FittedState:
        if not hasattr(self, "kept_"):
            raise UsageError(f"this {type(self).__name__} is not fitted yet: call fit, or load")
        return self.kept_

    def with_fitted_params(self) -> Self:
        """Return the same protocol with the hyper-parameters it was fitted with.

        They are restored whatever `set_params`, or training its module, has changed since.
        """
        self._fitted()
        found = copy.copy(self)
        vars(found).update(self._made)
        return found

    def config(self, federation: Federation, dtype: str) -> dict[str, Any]:
        """What client and server must agree on; its hash is in every frame."""
        dimension = self.flat_model(federation).dimension
        own = {
            **self.shown_params(),
            **self.resolve_defaults(federation),
            **known(federation),
            **self.shared_facts(federation),
        }
        found = {
            "schema": 2,
            "wire": wire.VERSION,
            "protocol": self.name,
            "dtype": dtype,
            "dimension": dimension,
            **own,
        }
        found = numbers(found)
        # a mask that cannot work on this model is refused before anything is written
        self.pipeline(found)
        return found

    def shown_params(self) -> dict[str, Any]:
        """Return the hyper-parameters as JSON has them.

        A module of your own is shown by its text and the hash of its weights.
        """
        from securecluster.models.validation import describe as describe_model

        return numbers({**self.get_params(), "model": describe_model(self.model)})

    def resolve_defaults(self, federation: Federation) -> dict[str, Any]:
        """Return what stands for the defaults that depend on the data.

        These are the network's name and its learning rate.
        """
        from securecluster.models.architectures import chosen, rate

        given, kind, classes = self.model, federation.objective, federation.classes
        name = {"model": chosen(given, kind, classes)} if isinstance(given, str) else {}
        lr = float(
            rate(given, kind, classes, self.optimizer, federation.bright)
            if self.lr is None
            else self.lr
        )
        return {**name, "lr": lr, **self.resolve_noise(federation, lr, self.validation_share)}

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages between a client's update and the wire.

        They are as the configuration that both sides share has them.
        """
        return Pipeline([*self.stages(config), *build(self.mask, config["dimension"])])

    def limits(self, config: Mapping[str, Any], pipeline: Pipeline) -> Limits:
        """Return the limits that the configuration sets to frames.

        Both sides hold each other to them.
        """
        itemsize = 8 if config["dtype"] == "float64" else 4
        return Limits(self.frame_sizes(config), layout(pipeline, itemsize))

    def message_types(self, method: str) -> tuple[type, type]:
        """Return the (query class, reply class) of a call.

        For a local parameter server, they are those of what it sends and is answered.
        """
        return message_types(self.gps if hasattr(self.gps, method) else self.client, method)

    def flat_model(self, federation: Federation) -> FlatModel:
        """The network with its initial weights θ_0."""
        return self._network(
            federation.shape, federation.classes, federation.seed, federation.objective
        )

    def _network(self, shape: Sequence[int], classes: int, seed: int, kind: Objective) -> FlatModel:
        from securecluster.models.validation import build as build_model

        return build_model(self.model, tuple(shape), classes, Randomness(seed), kind)

    def build_client(
        self,
        federation: Federation,
        settings: Settings,
        clients: Sequence[int] | None = None,
        simulated: bool = True,
        identity: Identity | None = None,
        roster: Roster | None = None,
    ) -> Endpoint[TrainingClient]:
        """Return the endpoint of some clients, by default of all.

        It has their data, models, keys and release policy.

        Args:
            simulated: derive keys from the federation's seed; a deployed node says False and takes
                them from the operating system.
            identity: what a deployed node signs its part of the key agreement with.
            roster: the identities that a deployed node accepts signatures of, its own among them;
                it comes from whoever enrols clients, and not from the server. Without one it
                verifies nothing, and a server that names itself a peer reads the mask seed.

        Raises:
            UsageError: a roster without an identity, or one that lacks clients of the run or has
                another key for these.
        """
        key_source = KeySource(simulated, identity, roster)
        return build_client(self, federation, settings, clients, key_source)

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> TrainingClient:
        """The client's side of this method, over a cohort."""
        return self.client(cohort, self.training(config), pipeline, self.weighted)

    def build_network(
        self,
        transport: Transport,
        config: Mapping[str, Any],
        key: bytes | None = None,
        device: torch.device | None = None,
    ) -> ServerChannel:
        """The server's side: ids and verbs, from the configuration alone.

        Args:
            key: what a trusted server draws its noise by, 32 secret bytes; None, for simulations:
                from the seed, which clients know.
            device: where the server computes with rows of models; None is main memory.
        """
        pipeline, draws = self.pipeline(config), Randomness(config["seed"])
        run = config_hash(config)
        secret = (
            NoiseStreams.derived(draws, run) if key is None else NoiseStreams(lambda _: key, run)
        )
        return ServerChannel(
            config["clients"],
            transport,
            run,
            pipeline,
            draws,
            agreed=config,
            costs=self.costs(pipeline, config, secret),
            device=device,
            limits=self.limits(config, pipeline),
        )

    def replay(
        self, transcript: Transcript, config: dict[str, Any], threads: int = 0, device: str = "auto"
    ) -> bytes:
        """Run the server alone against a recorded transcript, and return its final state, packed.

        The state must equal the recorded one.

        Args:
            threads: those of the run's settings, since sums round differently with another number.
            device: that of the run's settings, since sums round differently on another device.

        Raises:
            ReplayError: a request differs from the recorded one by a bit, so the server used
                something no verb gave it.
        """
        return pack(self.replayed(transcript, config, threads, device)[0])

    def replayed(
        self,
        transcript: Transcript,
        config: dict[str, Any],
        threads: int = 0,
        device: str = "auto",
    ) -> tuple[Any, ChannelState]:
        """Run the server as `replay` does, and return its final state and its network's.

        The state of the network has the ledger.
        """
        transport, place = Replay(transcript), choose_device(device)
        net = self.build_network(transport, config, device=place)
        with (
            warnings.catch_warnings(),
            torch.inference_mode(False),
            cpu_threads(threads),
            reproducible(place),
        ):
            warnings.simplefilter("ignore", SecureClusterWarning)  # the run itself has warned
            state = self.final_state(net, Run(begin=lambda number: setattr(net, "round", number)))
        transport.finish()
        return state, net.state

    def mask_info(self) -> MaskInfo:
        """What the result says of this run's mask."""
        d, itemsize = self._flat.dimension, self.client_models_.table.element_size()
        wide = self.with_fitted_params().pipeline(self.kept_.learned.config).width(d)
        return replace(describe(self.mask, d, itemsize), padding_bytes=(wide - d) * itemsize)


__all__ = ["ClusteringProtocol", "FittedState", "Joined", "ReleaseCounts", "opened"]
