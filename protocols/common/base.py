"""Base class of all protocols: hyper-parameters, `fit` and `join`, the client and the server.

The estimator follows scikit-learn's conventions. The two sides of a run are built from it in
`securecluster.runs`: `build_client` (`endpoints`) makes the endpoint of some clients, and
`build_network` (`deployment`) makes the server's channel to all of them.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

import numpy as np

from securecluster.core.option_groups import group, is_group, option_groups
from securecluster.core.progress import bar
from securecluster.core.serialization import pack
from securecluster.core.validation import AtLeast, Number, check_ranges
from securecluster.errors import SecureClusterWarning, UsageError, unknown
from securecluster.messaging import wire
from securecluster.parties import derived
from securecluster.parties.config import check_kind, known, numbers
from securecluster.parties.experiment import experiment_of
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.declaration import hyper_parameters
from securecluster.protocols.common.hooks import ProtocolHooks, is_hook
from securecluster.protocols.common.options.pair_options import PairOptions
from securecluster.protocols.common.options.privacy_options import PrivacyOptions
from securecluster.protocols.common.options.sum_options import SumOptions
from securecluster.protocols.common.options.training_options import TrainingOptions
from securecluster.results.fitted import FittedRun
from securecluster.training.foreign_trainer import check_foreign
from securecluster.training.local_trainer import check_training

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.data.federation import Federation
    from securecluster.messaging.transcript import Transcript
    from securecluster.runs.callbacks import Callback
    from securecluster.runtime.run import Line
    from securecluster.runtime.settings import Settings
    from securecluster.training.local_trainer import LocalTrainer

    _Result = FittedRun
else:
    _Result = object


class NotFittedError(UsageError, AttributeError):
    """A member of a result is asked for, and there is none yet."""

    def __init__(self, message: str, name: str = "", obj: Any = None) -> None:
        AttributeError.__init__(self, message, name=name, obj=obj)


def _is_of_result(fitted_class: type[FittedRun], name: str) -> bool:
    """Return whether a public name is a member of results of a class."""
    if name.startswith("_"):
        return False
    return hasattr(fitted_class, name) or name.endswith("_")


def _no_hyperparameter(method: type[ClusteringProtocol], name: str) -> UsageError:
    """Return the error for a name that is no hyper-parameter of a method."""
    choices = [option.name for option in dataclasses.fields(method)]
    return unknown(f"hyper-parameter of {method.__name__}", name, choices)


@hyper_parameters
class ClusteringProtocol(ProtocolHooks, _Result):
    """Base class of all clustering protocols.

    The constructor stores hyper-parameters only, `fit` returns self, and attributes of the fitted
    protocol end in an underscore.

    `fit` sets `result_`, a `FittedRun`, and the protocol shows its members as its own.
    """

    fitted_class: ClassVar[type[FittedRun]] = FittedRun
    """Class of the results of `fit`."""

    def __new__(cls, *arguments: Any, **values: Any) -> Self:
        """Return a new protocol, after a check that its hyper-parameters are declared.

        Raises:
            UsageError: the class has annotated fields, and lacks `@protocol`; or an unknown name.
        """
        if "__dataclass_fields__" not in vars(cls):
            declared = vars(cls).get("__annotations__", {})
            names = [name for name in declared if name in values or is_group(vars(cls).get(name))]
            if names:
                raise UsageError(
                    f"{cls.__name__} declares {names[0]} and lacks @protocol: decorate the class"
                )
        elif not values.keys() <= cls.__dataclass_fields__.keys():
            raise _no_hyperparameter(cls, min(values.keys() - cls.__dataclass_fields__.keys()))
        made = super().__new__(cls)
        # sorted: sets of equal members may be pickled differently
        vars(made)[derived.GIVEN] = tuple(sorted(values))
        return made

    rounds: Annotated[int, AtLeast(1)] = 40
    """communication rounds in all"""
    model: Any = "auto"
    """network that clients train: mlp, mlp-32, mlp-200, linear, cnn-briggs, cnn-ali, cnn-cifar,
    resnet9, lstm-words, lstm-chars, lstm-chars-256, lstm-trajectory; auto is what suits the data,
    mlp for images and tables; in Python also any nn.Module, or a ForeignModel
    """
    training: TrainingOptions = group(TrainingOptions)
    participation: Annotated[float, Number(0, 1, low_in=False, high_in=True)] = 1.0
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
        from securecluster.privacy.masking.masks import build

        for options in option_groups(self):
            check_ranges(options)
            options.check(self, clients)
        check_ranges(self)
        # Values that depend on the data are not resolved yet: valid ones stand in for them.
        privacy = self.privacy
        config = {
            "lr": 1.0 if self.training.lr is None else self.training.lr,
            "clip": privacy.clip or 1.0,
            "noise": privacy.noise,
        }
        usual = self.training.usual(self, config)
        check_training(usual)
        check_foreign(self.model, usual)
        if self.training.keep_momentum and not self.client.one_model:
            raise UsageError(
                f"clients of {self.name} start anew from other models, whose momentum is not "
                "theirs: leave keep_momentum out"
            )
        if self.training.local_layers and not self.client.one_model:
            raise UsageError(
                f"clients of {self.name} start anew from other models, whose local layers are not "
                "theirs: leave local_layers out"
            )
        build(self.mask)
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
                raise _no_hyperparameter(type(self), name)
            setattr(self, name, value)
        vars(self)[derived.GIVEN] = tuple(sorted({*vars(self)[derived.GIVEN], *params}))
        return self

    def __sklearn_clone__(self) -> Self:
        """Return a protocol with the same hyper-parameters, of which as many are given."""
        given = {name: copy.deepcopy(getattr(self, name)) for name in derived.given_options(self)}
        return type(self)(**given)

    def fit(  # noqa: PLR0913 (scikit-learn's arguments beside those of a run)
        self,
        federation: Federation,
        settings: Settings | Any | None = None,
        *,
        groups: Any = None,
        folder: Path | str | None = None,
        force: bool = False,
        report: Callable[[Line], None] = lambda line: None,
        callbacks: Sequence[Callback] = (),
        progress: bool | None = None,
    ) -> Self:
        """Run the protocol on a federation, in this process.

        Args:
            federation: the clients and their data; with groups the samples X (n, …).
            settings: device, precision, threads, dropouts and transcript of the run; with groups
                the labels y (n,).
            groups: name of the client of each sample (n,), as scikit-learn passes it:
                `fit(X, y, groups=groups)` is `fit(Federation.from_groups(X, y, groups, seed=0))`.
            folder: a run folder to write to; None stores everything in memory. The folder may be
                new or empty. A stopped run of the same configuration, settings and data resumes,
                and a finished one is loaded; with more `rounds` than it has, either goes on. The
                command line writes the same folders, with configuration, result and pictures.
            force: replace the run in the folder, as `--force` does on the command line.
            report: called with the history line of each round.
            callbacks: objects whose `on_round(line, stop)` gets the history line of each round,
                those of a resumed run the earlier ones first, and may call `stop(reason)`: the run
                ends after this round, and says so. They are no part of the configuration.
            progress: show a bar with the time left. None shows it in notebooks and at the prompt
                of a terminal only; scripts and pipes print nothing.

        Raises:
            SecureClusterError: the message says what is wrong and what to do; a run in a folder can
                still be resumed.
        """
        from securecluster.data.federation import Federation
        from securecluster.parties.run_check import checked_run
        from securecluster.runs.callbacks import Watcher
        from securecluster.runs.carry_out import carry_out, fit_in
        from securecluster.runtime.settings import Settings

        if groups is not None:
            federation = Federation.from_groups(federation, settings, groups, seed=0)
            settings = None
        check_kind(federation)
        settings = settings or Settings()
        checked = checked_run(self, federation, settings)
        method = checked.method
        for doubt in checked.doubts:
            warnings.warn(doubt, SecureClusterWarning, stacklevel=2)
        if force and folder is None:
            raise UsageError("force replaces the run in a folder: give folder, or leave force out")
        if folder is not None and experiment_of(self).before_pipeline is not None:
            raise UsageError(
                "a run whose clients are changed for an experiment is kept in no folder, which "
                "would not say so: leave out folder"
            )
        with bar(type(self).__name__, method.total_rounds, progress) as advance:

            def told(line: Line) -> None:
                advance(line["round"])
                report(line)

            watcher = Watcher(told, callbacks)
            # A run in memory leaves no file, not even of keys.
            if folder is None:
                self.result_ = carry_out(method, federation, settings, None, watcher)
            else:
                self.result_ = fit_in(Path(folder), method, federation, settings, watcher, force)
        if self.result_.warning_ is not None:
            warnings.warn(self.result_.warning_, SecureClusterWarning, stacklevel=2)
        return self

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
        from securecluster.results.saving import saved_protocol

        protocol = saved_protocol(cls, Path(folder), model, objects)
        protocol.result_ = cls.fitted_class.of_folder(protocol, Path(folder))
        return protocol

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
        from securecluster.parties.server_half import replayed

        more: dict[str, Any] = {}
        if "result_" in vars(self):
            kept = self.result_.kept_
            more = {"secrets": kept.secrets(), "stopped": kept.learned.stopped}
        method = derived.as_agreed(self, config)
        return pack(replayed(method, transcript, config, threads, device, **more)[0])

    # Type checkers see the members of a result by `_Result`.
    if not TYPE_CHECKING:

        def _repr_html_(self) -> str | None:
            """Return a summary of the result for notebooks; before `fit` they show the `repr`."""
            result = vars(self).get("result_")
            return None if result is None else result._repr_html_()

        def __getattr__(self, name: str) -> Any:
            """Return a member of the result, or an option by its flat name."""
            if name.startswith("__") or not _is_of_result(self.fitted_class, name):
                return super().__getattr__(name)
            if "result_" not in vars(self):
                label = type(self).__name__
                raise NotFittedError(
                    f"this {label} is not fitted yet: call fit, or load", name=name, obj=self
                )
            return getattr(vars(self)["result_"], name)

    def __dir__(self) -> list[str]:
        """Return the names of options, and of what a user does with a method and its result."""
        attributes = {*super().__dir__(), *dir(vars(self).get("result_"))}
        shown = {name for name in attributes if not is_hook(name)}
        return sorted((shown - self._option_groups.keys()) | self.get_params().keys())

    def config(self, data: Federation | Facts, dtype: str) -> dict[str, Any]:
        """Return what client and server must agree on; its hash is in every frame.

        It follows from facts alone, which each client may tell of its own data (`data.facts`).

        Args:
            data: the clients and their data, or facts of them.
            dtype: of the models, float32 or float64.

        Raises:
            UsageError: a mask that does not work with the model's dimension, facts that lack
                numbers of samples where they are needed, or statistics over clients' rows that the
                noise does not cover.
        """
        from securecluster.data.facts import check_private_statistics

        facts = data.facts
        settled: ClusteringProtocol = self.privacy.settled(self, facts)
        if settled is not self:
            complete: dict[str, Any] = settled.config(facts, dtype)
            return complete
        dimension = derived.initial_model(self, facts).dimension
        chosen = vars(self).get(derived.CHOSEN)
        config = numbers(
            {
                "schema": 2,
                "wire": wire.VERSION,
                "protocol": self.name,
                "dtype": dtype,
                "dimension": dimension,
                **derived.params_as_json(self),
                **vars(self).get(derived.BEGUN, {}),
                **derived.resolved_defaults(self, facts),
                **known(facts),
                **self.shared_facts(facts),
                **({derived.CHOSEN: chosen} if chosen else {}),
            }
        )
        for options in option_groups(self):
            config = options.agreed(self, facts, config)
        if derived.adds_noise(self, config):
            check_private_statistics(facts, config["dp_unit"])
        # A mask that cannot work on this model is refused before anything is written.
        self.sums.check_noise(self, config, self.pipeline(config))
        return config

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages between a client's update and the wire.

        Args:
            config: what clients and server agreed on.
        """
        from securecluster.privacy.masking.masks import build

        mask = build(self.mask, config["dimension"])
        pipeline = Pipeline([*self.privacy.stages(config), *mask])
        for options in option_groups(self):
            pipeline = options.pipeline(self, config, pipeline)
        return pipeline

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> TrainingClient:
        """Return the client object of this method.

        Args:
            cohort: the clients' data and local training.
            pipeline: stages between an update and the wire.
            config: what clients and server agreed on.
        """
        return self.client(cohort, self.training.usual(self, config), pipeline, self.weighted)
