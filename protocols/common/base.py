"""Base class of all protocols: hyper-parameters, `fit` and `predict`, the client and the server.

The estimator follows scikit-learn's conventions. A protocol has two sides: `build_client` makes the
endpoint of some clients, and `build_network` makes the server's channel to all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from securecluster.core import manifest
from securecluster.core.client_names import Client, ClientNames, at
from securecluster.core.devices import choose_device, cpu_threads, reproducible
from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import group, is_group
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.core.validation import check_number, check_whole
from securecluster.data import Federation
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Rows
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.transcript import INDEX, Transcript
from securecluster.models.objectives import Objective, objective
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.key_agreement import Secrets
from securecluster.privacy.masking.masks import MaskInfo, build, describe
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.config import check_kind, known, numbers
from securecluster.protocols.common.declaration import hyper_parameters
from securecluster.protocols.common.deployment import Deployment
from securecluster.protocols.common.execution import (
    Joined,
    KeySource,
    build_client,
    carry_out,
    join,
    opened,
)
from securecluster.protocols.common.hooks import ProtocolHooks, without_clients
from securecluster.protocols.common.newcomers import NewcomerRecord, warn_if_dear
from securecluster.protocols.common.pair_options import PairOptions
from securecluster.protocols.common.privacy_options import PrivacyOptions
from securecluster.protocols.common.program import program_digest
from securecluster.protocols.common.serialization import (
    SHARED,
    FittedState,
    FittedSummary,
    load,
    read_kept,
    save,
)
from securecluster.protocols.common.sum_options import SumOptions
from securecluster.runtime.endpoint import Endpoint, hidden_message_types, message_types
from securecluster.runtime.run import Line, Run
from securecluster.runtime.server_channel import ChannelState, ServerChannel
from securecluster.runtime.settings import Settings, check_settings
from securecluster.runtime.transport import Replay, Transport
from securecluster.training.chance_level import Chance
from securecluster.training.local_trainer import LocalTrainer, LocalTraining, check_training

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel


FEW_ROUNDS = 30  # below this number a warning about poor models suggests more rounds


@hyper_parameters
class ClusteringProtocol(ProtocolHooks):
    """Base class of all clustering protocols.

    The constructor stores hyper-parameters only, `fit` returns self, and attributes of the fitted
    protocol end in an underscore.

    Attributes after `fit`:
        labels_: each client's cluster, (m,) ints from 0.
        models_: a `state_dict` per cluster, for `load_state_dict` of the module; `model_of` gives a
            client's own. Under noise it is None for a cluster all of whose clients trained alone:
            their models have no noise and stay with the clients.
        unshared_labels_: the clusters whose entry in `models_` is None.
        history_: a dict per round.
        ledger_: the releases of the run and its newcomers.
        transcript_: the recorded frames.
        bytes_: totals by direction and message.
        accuracy_: each client's accuracy on its test data, (m,); for text it is called
            perplexity_, for trajectories position_error_, in metres.
        scores_: the same scores for every kind of data; metric_ is the name of the metric.
        agreement_: scores against the true clusters, where they are known.
        warning_: a sentence if many clients' models learned nothing in a run of ten rounds or more,
            else None. It compares their training loss and accuracy with those of a model that
            ignores its input. The observer computes it outside the protocol, so ε does not cover
            it.
        start_: the initial weights of a module of your own; weights loaded into the module later
            have no effect here.
        joined_: after `predict`, what newcomers released in that call, and its cost.
    """

    @property
    def before_pipeline(self) -> Callable[[Call, Any], Any] | None:
        """Return what clients do to each reply before it is protected; None for nothing.

        For research only: `securecluster.attacks.experiments` sets it, and a run in a folder
        refuses it.
        """
        return vars(self).get("_before_pipeline")

    @property
    def observe_authority(self) -> Callable[[VerbOutcome], None] | None:
        """Return what is called with each R that a key authority decrypts; None for nothing.

        For research only: `securecluster.attacks.experiments` sets it.
        """
        return vars(self).get("_observe_authority")

    @property
    def repeated_secret(self) -> bytes | None:
        """Return the secret of the run that this protocol repeats; None draws a new one.

        For research only: `securecluster.attacks.experiments` sets it.
        """
        return vars(self).get("_repeated_secret")

    def __new__(cls, *arguments: Any, **values: Any) -> Self:
        """Return a new protocol, after a check that its hyper-parameters are declared.

        Raises:
            UsageError: the class has annotated fields, and lacks `@protocol`.
        """
        if "__dataclass_fields__" not in vars(cls):
            declared = vars(cls).get("__annotations__", {})
            names = [name for name in declared if name in values or is_group(vars(cls).get(name))]
            if names:
                raise UsageError(
                    f"{cls.__name__} declares {names[0]} and lacks @protocol: decorate the class"
                )
        return super().__new__(cls)

    rounds: int = 40
    """communication rounds in all"""
    model: Any = "auto"
    """network that clients train: mlp, mlp-32, mlp-200, linear, cnn-briggs, cnn-ali, cnn-cifar,
    resnet9, lstm-words, lstm-chars, lstm-chars-256, lstm-trajectory; auto is what suits the data,
    mlp for images and tables; in Python also any nn.Module
    """
    lr: float | None = None
    """learning rate of the clients' optimizer; None is the network's default: with sgd 0.2 for
    images and tables, and 0.03 for networks without convolutions on data sets of bright images
    (femnist, cifar10, cifar100, negatives of mnist and fashion_mnist); with adam 0.001; others for
    text and trajectories
    """
    epochs: int = 3
    """passes over its own data that a client makes in a round"""
    batch_size: int = 20
    """samples per mini-batch"""
    optimizer: str = "sgd"
    """sgd or adam"""
    momentum: float = 0.0
    """momentum of sgd, in [0, 1); its buffers are reset each round unless keep_momentum is set"""
    keep_momentum: bool = False
    """momentum buffers persist between rounds, one per client; takes memory for two more models per
    client
    """
    participation: float = 1.0
    """share of clients that take part in a round, in (0, 1]"""
    mask: str = "none"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    privacy: PrivacyOptions = group(PrivacyOptions)
    pairs: PairOptions = group(PairOptions)
    sums: SumOptions = group(SumOptions)

    if TYPE_CHECKING:

        def __init__(self, **options: Any) -> None: ...

    def check(self, clients: int) -> None:
        """Check the hyper-parameters.

        Args:
            clients: number of clients in the federation.

        Raises:
            UsageError: hyper-parameters or a federation that this method cannot work with.
        """
        for options in self.option_groups:
            options.check(self, clients)
        # Values that depend on the data are not resolved yet: valid ones stand in for them.
        privacy = self.privacy
        config = {
            "lr": 1.0 if self.lr is None else self.lr,
            "clip": privacy.clip or 1.0,
            "noise": privacy.noise,
        }
        check_training(self.training(config))
        if self.keep_momentum and not self.one_model:
            raise UsageError(
                f"clients of {self.name} start anew from other models, whose momentum is not "
                "theirs: leave keep_momentum out"
            )
        build(self.mask)
        check_whole(self, rounds=1)
        check_number(self, "participation", 0, 1, low_in=False, high_in=True)
        self._check_choices()
        if clients < 2:
            raise UsageError(
                "clustering needs at least two clients: one alone has nobody to be compared with"
            )

    def _check_choices(self) -> None:
        """Raise UsageError for a hyper-parameter that has to be True or False and is not."""
        for field in dataclasses.fields(self):
            # NumPy's booleans are choices too, and text such as "no" would count as True.
            if not isinstance(field.default, bool):
                continue
            value = getattr(self, field.name)
            if not isinstance(value, bool | np.bool_):
                raise UsageError(f"{field.name} = {value!r} is a choice: give True or False")

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the hyper-parameters by name.

        This is scikit-learn's convention, so that `sklearn.base.clone` works.

        Args:
            deep: has no effect; scikit-learn passes it.
        """
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def set_params(self, **params: Any) -> Self:
        """Set hyper-parameters by name.

        Raises:
            UsageError: an unknown name.
        """
        for name, value in params.items():
            # Else a misspelt name would be set, and have no effect.
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
        force: bool = False,
        report: Callable[[Line], None] = lambda line: None,
    ) -> Self:
        """Run the protocol on a federation, in this process.

        Args:
            federation: the clients and their data.
            settings: device, precision, threads, dropouts and transcript of the run.
            folder: a run folder to write to; None stores everything in memory. The folder may be
                new or empty. A stopped run of the same configuration, settings and data resumes,
                and a finished one is loaded. The command line writes the same folders, with
                configuration, result and pictures.
            force: replace the run in the folder, as `--force` does on the command line.
            report: called with the history line of each round.

        Raises:
            SecureClusterError: the message says what is wrong and what to do; a run in a folder can
                still be resumed.
        """
        settings = settings or Settings()
        check_kind(federation)
        self.check(len(federation))
        check_settings(settings, federation)
        if force and folder is None:
            raise UsageError("force replaces the run in a folder: give folder, or leave force out")
        # A run in memory leaves no file, not even of keys.
        if folder is None:
            self._run(federation, settings, None, report)
        elif self.before_pipeline is not None:
            raise UsageError(
                "a run whose clients are changed for an experiment is kept in no folder, which "
                "would not say so: leave out folder"
            )
        else:
            # The only import from a higher room, hence by name: `app` writes the results and
            # pictures of a run folder.
            recorder = importlib.import_module("securecluster.app.execution")
            recorder.fit(self, federation, settings, Path(folder), report, force)
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
        """Run in a folder, or resume there from the last checkpoint.

        The caller has locked and checked the folder.

        Args:
            folder: the run folder.
            federation: the clients and their data.
            settings: as in `fit`.
            report: called with the history line of each round.
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
            fitted, transcript, chance = carry_out(self, federation, settings, folder, report)
        self.transcript_ = transcript
        self._restore_fitted(fitted)
        self.warning_: str | None = None
        if chance is not None:
            self.warning_ = self._chance_warning(chance, federation)
        return self._belongs_to(folder)

    def _chance_warning(self, chance: Chance, federation: Federation) -> str | None:
        """Return a sentence on models that learned nothing, with advice.

        Args:
            chance: training loss of the clients' models, and that of a model without input.
            federation: the clients and their data.

        Returns:
            None if there is no reason for a warning.
        """
        from securecluster.models.architectures import rate

        # A few poor clients are usual; the warning is for runs that learned nothing.
        if not chance.notable:
            return None
        rounds = len(self.history_)
        poor = len(chance.clients)
        lr = float(self.kept_.learned.config["lr"])
        default = rate(
            self.model, federation.objective, federation.classes, self.optimizer, federation.bright
        )
        # Advise the network's default learning rate, or a lower one where that was used already.
        suggested = default
        # Advice that was followed already helps nobody.
        if default / 2 <= lr <= 1.5 * default:
            suggested = float(f"{lr / 3:.1g}")
        direction = "a higher" if suggested > lr else "a lower"
        advice = [f"{direction} learning rate (--lr {suggested:g} in place of {lr:g})"]
        if self.privacy.noisy:
            advice.append("less noise")
        if rounds < FEW_ROUNDS:
            advice.append("more rounds")
        if self.epochs > 1 and suggested < lr:
            advice.append("fewer epochs")
        return (
            f"after {rounds} rounds the models of {poor} of {chance.tested} clients do no better "
            f"than chance (training loss {chance.loss:.3g}, chance {chance.chance:.3g}): "
            f"try {', or '.join(advice)}"
        )

    def restore_from(self, folder: Path) -> Self:
        """Restore the result of a finished run from its folder.

        Args:
            folder: of a run with this protocol's hyper-parameters.
        """
        self._restore_fitted(read_kept(folder))
        self._open_transcript(folder)
        return self._belongs_to(folder)

    def _belongs_to(self, folder: Path | None) -> Self:
        """Record releases of newcomers in a folder, and add those recorded there to the ledger.

        Args:
            folder: of the run; None records nothing outside this process.
        """
        self.newcomers_record: NewcomerRecord | None = None
        if folder is not None:
            clients = self.kept_.learned.config["clients"]
            self.newcomers_record = NewcomerRecord(folder, clients)
            self.newcomers_record.update(self.ledger_)
        return self

    def _open_transcript(self, folder: Path) -> None:
        """Open the transcript of a run folder; a folder that `save` wrote has none."""
        transcript = self.recorded_transcript(folder, self.kept_.learned)
        if transcript is not None:
            self.transcript_ = transcript

    def recorded_transcript(self, folder: Path, summary: FittedSummary) -> Transcript | None:
        """Return the transcript of a run folder, after a check of its index.

        Args:
            folder: of a finished run.
            summary: its result.

        Returns:
            None for a folder that `save` wrote.

        Raises:
            RunFolderError: the index differs from what the run wrote.
        """
        marks = manifest.read(folder)
        if "config.json" not in marks:
            return None
        index = f"transcript/{INDEX}"
        # A run without a full transcript has no index.
        if index in marks:
            manifest.checked(folder, index, marks)
        return Transcript.read(
            summary.settings.transcript, folder / "transcript", self.message_types, summary.names
        )

    def _restore_fitted(self, fitted: FittedState) -> Self:
        """Set the attributes that end in an underscore.

        Args:
            fitted: the result of a run.
        """
        learned = fitted.learned
        config = learned.config
        self.kept_ = fitted
        self.warning_ = None
        # Later calls use these hyper-parameters, whatever `set_params` changes.
        self._made = copy.deepcopy(self.get_params())
        vars(self).pop("joined_", None)  # newcomers of an earlier run
        self.labels_ = np.asarray(learned.labels)
        self._client_names = ClientNames(learned.names)
        self.client_models_ = Rows(fitted.clients.table, tuple(fitted.clients.index))
        task = objective(config["objective"])
        self._flat = self._network(config["shape"], config["classes"], config["seed"], task)
        self.start_ = self._module_tensors()
        clusters = max(learned.labels) + 1
        self.models_ = [self._cluster_model(c) for c in range(clusters)]
        self.unshared_labels_ = [c for c, model in enumerate(self.models_) if model is None]
        self.history_ = learned.history
        self.ledger_ = learned.network.ledger
        self.bytes_ = learned.bytes
        self.dropped_ = dict(sorted(learned.network.lost.items()))
        self.scores_: NDArray[np.float64] = np.asarray(learned.scores, dtype=np.float64)
        self.metric_ = self._flat.objective.metric
        setattr(self, f"{self.metric_}_", self.scores_)
        self.seconds_ = learned.seconds
        self.device_ = learned.device
        self.server_state_ = fitted.server
        self.agreement_ = learned.agreement
        self.state_: Any = unpack(fitted.server, self.state_class())
        return self

    def _module_tensors(self) -> dict[str, torch.Tensor]:
        """Return a copy of the weights of a module of the user's own, by name."""
        tensors: dict[str, torch.Tensor] = {}
        if isinstance(self.model, str):
            return tensors
        for name, value in self.model.state_dict().items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value.detach().cpu().clone()
        return tensors

    def _cluster_model(self, label: int) -> dict[str, Any] | None:
        """Return the `state_dict` of the model that a cluster's members share.

        Returns:
            None in a run with noise where all members trained alone.
        """
        learned = self._fitted().learned
        shared = self.kept_.clients.extra.get(SHARED)
        if shared is not None:
            theta = shared[label]
            state: dict[str, Any] = self._flat.state_dict(theta)
            return state
        members = [i for i, cluster in enumerate(learned.labels) if cluster == label]
        # Noise is to cover the results, and models that were trained alone have none.
        if self.with_fitted_params().adds_noise(learned.config):
            members = [i for i in members if i not in learned.local]
        if not members:
            return None
        return self.model_of(at(members[0]))

    def model_of(self, client: Client) -> dict[str, Any]:
        """Return the `state_dict` of a client's model.

        It is for that client: a model that it trained alone has no noise, and no ε covers it.

        Args:
            client: its name, or `at` its position. A number is a name; only where no client is
                called by a number, it is a position.

        Raises:
            UsageError: not fitted, no such client, or a number that could be a name.
        """
        theta = self.client_models_.row(self._position_of(client))
        state: dict[str, Any] = self._flat.state_dict(theta)
        return state

    def _position_of(self, client: Client) -> int:
        """Return the position of a client in the run.

        Args:
            client: as for `model_of`.

        Raises:
            UsageError: not fitted, no such client, or a number that could be a name.
        """
        self._fitted()
        return self._client_names.position(client)

    def predict(self, newcomers: Federation) -> NDArray[np.int64]:
        """Return the clusters of clients that were not in the run, (n,).

        Newcomers join the finished run over its own network, with its masks.

        Every call starts from the end of the run. Releases of newcomers are added to `ledger_`, and
        to the folder of the run if there is one; `joined_` contains the frames, bytes and releases
        of this call. Clients with one name are one person. A newcomer that is evaluated again with
        the same data sends the same bits, which cost nothing more; with other data it releases
        more. So does a newcomer with the name of a client of the run.

        Args:
            newcomers: n clients and their data, of the same kind as the run's.

        Raises:
            UsageError: not fitted, or no client, or samples of another shape, or classes that the
                run did not have, or, with dp_unit example, fewer training samples than the clients
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
        """Write the fitted protocol as safetensors.

        `clients.safetensors` contains models and keys, and must stay private. A module of your own
        is saved by its weights, not its code. The transcript is not saved: give `fit` a folder for
        that.

        Args:
            folder: created if it does not exist.

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
        """Write the fitted protocol into a folder, which may be that of its run."""
        fitted = self.with_fitted_params()
        record = getattr(self, "newcomers_record", None)
        if record is not None and record.path.parent.resolve() == folder.resolve():
            # The ledger that is saved replaces the file of newcomers' releases.
            record.update(self.ledger_)
        save(fitted, folder)

    @classmethod
    def load(cls, folder: Path | str, model: Any = None, **objects: Any) -> Self:
        """Return a fitted protocol from a folder.

        Args:
            folder: one that `save` wrote, or that of a finished run, which also gives
                `transcript_`.
            model: the module, where the run trained one of your own.
            objects: other hyper-parameters that were objects of your own, by name (OneShot's
                features).

        Raises:
            RunFolderError: the folder holds no fitted protocol, or a damaged one.
            UsageError: another protocol's folder, or another module.
        """
        protocol = load(cls, Path(folder), model, objects)
        protocol._open_transcript(Path(folder))
        return protocol._belongs_to(Path(folder))

    def _fitted(self) -> FittedState:
        if not hasattr(self, "kept_"):
            raise UsageError(f"this {type(self).__name__} is not fitted yet: call fit, or load")
        return self.kept_

    def with_fitted_params(self) -> Self:
        """Return the same protocol with the hyper-parameters it was fitted with.

        Changes by `set_params`, or to the weights of its module, have no effect on them.
        """
        self._fitted()
        protocol = copy.copy(self)
        return protocol.set_params(**self._made)

    def as_server(self) -> Self:
        """Return a new object with the same hyper-parameters, on which the server's half runs.

        Security rule: it has none of the attributes that this object may have been given while it
        saw clients' data.
        """
        return type(self)(**self.get_params())

    def config(self, federation: Federation, dtype: str) -> dict[str, Any]:
        """Return what client and server must agree on; its hash is in every frame.

        Args:
            federation: the clients and their data.
            dtype: of the models, float32 or float64.

        Raises:
            UsageError: a mask that does not work with the model's dimension.
        """
        dimension = self.flat_model(federation).dimension
        config = numbers(
            {
                "schema": 2,
                "wire": wire.VERSION,
                "protocol": self.name,
                "dtype": dtype,
                "dimension": dimension,
                **self.shown_params(),
                **self.resolve_defaults(federation),
                **known(federation),
                **self.shared_facts(federation),
            }
        )
        for options in self.option_groups:
            config = options.agreed(self, federation, config)
        # A mask that cannot work on this model is refused before anything is written.
        self.sums.check_noise(self, config, self.pipeline(config))
        return config

    def shown_params(self) -> dict[str, Any]:
        """Return the hyper-parameters as JSON values.

        A module of your own is represented by its text and the hash of its weights.
        """
        from securecluster.models.validation import describe as describe_model

        return numbers({**self.get_params(), "model": describe_model(self.model)})

    def resolve_defaults(self, federation: Federation) -> dict[str, Any]:
        """Return the data-dependent defaults: model, learning rate, loss bound and noise.

        Args:
            federation: the clients and their data.
        """
        from securecluster.models.architectures import chosen, rate

        task = federation.objective
        classes = federation.classes
        resolved: dict[str, Any] = {}
        if isinstance(self.model, str):
            resolved["model"] = chosen(self.model, task, classes)
        lr = self.lr
        if lr is None:
            lr = rate(self.model, task, classes, self.optimizer, federation.bright)
        resolved["lr"] = float(lr)
        for options in self.option_groups:
            resolved |= options.resolved(self, federation, resolved)
        return resolved

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages between a client's update and the wire.

        Args:
            config: what clients and server agreed on.
        """
        mask = build(self.mask, config["dimension"])
        pipeline = Pipeline([*self.privacy.stages(config), *mask])
        for options in self.option_groups:
            pipeline = options.pipeline(self, config, pipeline)
        return pipeline

    def training(self, config: Mapping[str, Any]) -> LocalTraining:
        """Return the hyper-parameters of a client's training in a round.

        Args:
            config: what clients and server agreed on, with the resolved learning rate and noise.
        """
        plan = LocalTraining(
            config["lr"],
            self.epochs,
            self.batch_size,
            self.optimizer,
            self.momentum,
            keep_momentum=bool(self.keep_momentum),
        )
        return self.privacy.training(plan, config)

    def message_types(self, method: str) -> tuple[type, type]:
        """Return the (query class, reply class) of a call.

        Args:
            method: name of a client method, or of a method of the global parameter server, which
                local parameter servers call.
        """
        if hasattr(self.gps, method):
            return message_types(self.gps, method)
        ranges = self.pairs.fields if self.pairs.hide_rows else {}
        return hidden_message_types(
            self.client, method, self.sums.hide_replies, ranges, self.encrypted_verbs
        )

    def flat_model(self, federation: Federation) -> FlatModel:
        """Return the network with its initial weights θ_0, as a flat vector."""
        return self._network(
            federation.shape, federation.classes, federation.seed, federation.objective
        )

    def _network(self, shape: Sequence[int], classes: int, seed: int, task: Objective) -> FlatModel:
        from securecluster.models.validation import build as build_model

        return build_model(self.model, tuple(shape), classes, Randomness(seed), task)

    def build_client(  # noqa: PLR0913 (what the clients of one run are made of)
        self,
        federation: Federation,
        settings: Settings,
        clients: Sequence[int] | None = None,
        simulated: bool = True,
        identity: Identity | None = None,
        roster: Roster | None = None,
        secrets: Randomness | None = None,
        budget: Budget | None = None,
    ) -> Endpoint[TrainingClient]:
        """Return the endpoint of some clients, with their data, models, keys and release policy.

        Args:
            federation: the clients and their data.
            settings: device and precision.
            clients: numbers of the endpoint's clients; None is all.
            simulated: derive keys from `secrets`; a deployed node passes False and takes them from
                the operating system.
            identity: signs a deployed node's messages of the key agreement.
            roster: identities whose signatures a deployed node accepts, including its own. It comes
                from the party that enrols clients, and not from the server. Without a roster the
                node verifies nothing, and a server that poses as a client reads the mask seed.
            secrets: secret random streams of a simulated run, which server and authority share;
                None derives them from the federation's seed, which protects nothing.
            budget: of the endpoint's one client, over all runs: a request that would exceed it is
                refused before anything leaves.

        Raises:
            UsageError: a roster without an identity, or one that lacks clients of the run or has
                another key for these; or a budget for several clients, or of another unit.
        """
        key_source = KeySource(simulated, identity, roster, secrets)
        endpoint = build_client(self, federation, settings, clients, key_source, budget=budget)
        endpoint.before_pipeline = self.before_pipeline
        return endpoint

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> TrainingClient:
        """Return the client object of this method.

        Args:
            cohort: the clients' data and local training.
            pipeline: stages between an update and the wire.
            config: what clients and server agreed on.
        """
        return self.client(cohort, self.training(config), pipeline, self.weighted)

    def build_network(
        self,
        transport: Transport,
        config: Mapping[str, Any],
        key: bytes | None = None,
        device: torch.device | None = None,
        roster: Roster | None = None,
        secrets: Randomness | None = None,
    ) -> ServerChannel:
        """Return the server's channel: client ids and verbs, from the configuration alone.

        Args:
            transport: carries calls to clients.
            config: what clients and server agreed on.
            key: 32 secret bytes, by which a trusted server draws its noise, and from which its key
                for envelopes of ciphertexts follows. None derives both from `secrets`: for
                simulations only.
            device: where the server computes with rows of models; None is main memory.
            roster: identities of the clients whose ciphertexts a server with a key accepts; None
                verifies no signature.
            secrets: secret random streams of a simulated run; None derives them from the seed,
                which protects nothing.
        """
        return Deployment(self, config).network(transport, key, device, roster, secrets)

    def program(self) -> str:
        """Return the digest of this protocol's source, which every run records.

        It is in no configuration: noise and keys do not follow from it.

        Returns:
            "" where a class of the protocol has no source file.
        """
        return program_digest(type(self), self.client, self.gps, self.state_class())

    def replay(
        self, transcript: Transcript, config: dict[str, Any], threads: int = 0, device: str = "auto"
    ) -> bytes:
        """Run the server alone against a recorded transcript, and return its final state, packed.

        The state must equal the recorded one. What the server draws in secret follows from the
        secret of the run that this protocol was fitted in, or was loaded from; a protocol that is
        not fitted derives it from the seed, as runs with `keys_from_seed` do.

        Args:
            transcript: the recorded frames.
            config: what clients and server agreed on.
            threads: those of the run's settings, since sums round differently with another number.
            device: that of the run's settings, since sums round differently on another device.

        Raises:
            ReplayError: a request differs from the recorded one by a bit, so the server used
                information that it received from no verb.
            UsageError: the server asks for an attribute that a new object does not have.
        """
        return pack(self.replayed(transcript, config, threads, device)[0])

    def replayed(
        self,
        transcript: Transcript,
        config: dict[str, Any],
        threads: int = 0,
        device: str = "auto",
        observe: Callable[[VerbOutcome], None] | None = None,
        secrets: Randomness | None = None,
    ) -> tuple[Any, ChannelState]:
        """Run the server as `replay` does, and return its final state and that of its channel.

        The channel's state contains the ledger.

        Args:
            transcript: the recorded frames.
            config: what clients and server agreed on.
            threads: as for `replay`.
            device: as for `replay`.
            observe: called with what each verb gives its reader; None for nobody.
            secrets: secret random streams of the run; None takes them as `replay` does.
        """
        transport = Replay(transcript)
        server_device = choose_device(device)
        if secrets is None and hasattr(self, "kept_"):
            secrets = self.kept_.secrets()
        server = self.as_server()
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

    def verb_outcomes(self) -> list[VerbOutcome]:
        """Return what verbs gave their readers in the run, in order: replies, sums and R.

        They are those that frames do not contain: unmasked secure sums, sums with the noise of a
        trusted server, and who was summed with whom. A replay of `transcript_` computes them again,
        bit for bit.

        Raises:
            UsageError: not fitted, or the transcript has no contents.
            ReplayError: the transcript is not this run's.
        """
        learned = self._fitted().learned
        settings = learned.settings
        outcomes: list[VerbOutcome] = []
        self.with_fitted_params().replayed(
            self.transcript_, learned.config, settings.threads, settings.device, outcomes.append
        )
        return outcomes

    def secrets_of(self, client: Client) -> Secrets:
        """Return the keys and seeds of one client, as it would give them to an adversary.

        They are in `clients.safetensors`, and must stay private. Seeds that all clients share, such
        as a mask's, are among them.

        Args:
            client: as for `model_of`.

        Raises:
            UsageError: not fitted, no such client, or a number that could be a name.
        """
        position = self._position_of(client)
        return self._fitted().clients.secrets.of(position)

    def mask_info(self) -> MaskInfo:
        """Return the description of this run's mask for the result."""
        d = self._flat.dimension
        itemsize = self.client_models_.table.element_size()
        config = self.kept_.learned.config
        pipeline = self.with_fitted_params().pipeline(config)
        # Some masks make rows wider than the model.
        padding = pipeline.width(d) - d
        return replace(describe(self.mask, d, itemsize), padding_bytes=padding * itemsize)


__all__ = ["ClusteringProtocol", "FittedState", "Joined", "opened"]
