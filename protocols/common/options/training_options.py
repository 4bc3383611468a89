"""Options of the clients' local training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any

from securecluster.core.validation import IN_PYTHON, AtLeast, Number, OneOf
from securecluster.data.feature_columns import listed
from securecluster.errors import UsageError
from securecluster.protocols.common.options.option_group import OptionGroup
from securecluster.training.config import BALANCED, Schedule
from securecluster.training.local_trainer import LocalTraining

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.method import Method

# powers of a label's count that its share of an epoch follows, by name (Kang et al. 2020)
BATCHES = {"shuffled": 1.0, "square-root": 0.5, "balanced": 0.0}
SCHEDULES = ("constant", "cosine", "linear", "exponential", "step")
MOST_STRENGTH = 1e9
# options that configurations have where they are not at their defaults
LATER = (
    "accumulate", "class_weight", "keep_best", "local_layers", "lr_schedule", "lr_gamma", "lr_step",
    "weight_decay", "proximal", "ditto",
)  # fmt: skip


@dataclass(kw_only=True)
class TrainingOptions(OptionGroup):
    """Options of a client's training in a round."""

    lr: float | None = None
    """learning rate of the clients' optimizer; None is the network's default: with sgd 0.2 for
    images and tables, and 0.03 for networks without convolutions on data sets of bright images
    (femnist, cifar10, cifar100, negatives of mnist and fashion_mnist); with adam 0.001; others for
    text and trajectories
    """
    epochs: int = 3
    """passes over its own data that a client makes in a round"""
    batch_size: int = 20
    """samples per mini-batch; a target ε chooses larger ones for dp_unit example"""
    optimizer: str = "sgd"
    """sgd or adam"""
    momentum: float = 0.0
    """momentum of sgd, in [0, 1); its buffers are reset each round unless keep_momentum is set"""
    keep_momentum: Annotated[bool, IN_PYTHON] = False
    """momentum buffers persist between rounds, one per client; takes memory for two more models per
    client
    """
    batches: Annotated[str, OneOf(*BATCHES), IN_PYTHON] = "shuffled"
    """samples of an epoch: shuffled, each once; balanced, as many of each label that a client
    holds; or square-root, between the two, so that clients' shares of labels have less effect on
    their updates (not in the papers); tuning shuffles; not with DP-SGD
    """
    lr_schedule: Annotated[str, OneOf(*SCHEDULES), IN_PYTHON] = "constant"
    """learning rate by rounds, with torch's formulas: constant; cosine or linear, to 0 after the
    last round; exponential, times lr_gamma each round; or step, times lr_gamma every lr_step rounds
    """
    lr_gamma: Annotated[float, Number(0, 1, low_in=False, high_in=True), IN_PYTHON] = 0.9
    """factor of lr_schedule exponential and step"""
    lr_step: Annotated[int, AtLeast(1), IN_PYTHON] = 10
    """rounds between two steps of lr_schedule step"""
    weight_decay: Annotated[float, Number(0, MOST_STRENGTH), IN_PYTHON] = 0.0
    """λ of the term λ/2·‖θ‖² of clients' losses; with DP-SGD outside of the clip"""
    proximal: Annotated[float, Number(0, MOST_STRENGTH), IN_PYTHON] = 0.0
    """μ of FedProx's term μ/2·‖θ − θ_start‖², where θ_start is what a client's training begins at;
    with DP-SGD outside of the clip
    """
    ditto: Annotated[float, Number(0, MOST_STRENGTH), IN_PYTHON] = 0.0
    """λ of Ditto's term λ/2·‖v − w‖², by which a client's own model v stays near the run's model w
    in the rounds of tuning
    """
    local_layers: Annotated[tuple[str, ...] | None, IN_PYTHON] = None
    """layers or parameters, by their names in the network, that each client trains and keeps to
    itself, in no message: the last layer (a personal head), or norm, all that normalise; with
    dp_unit client, which they are within
    """
    keep_best: Annotated[float, Number(0, 1), IN_PYTHON] = 0.0
    """share of its training samples that each client keeps out of training; it ends with that of
    the models it had in its rounds and at the end that has the least loss on them. The choice is
    the client's, in no message, so it costs no ε; clusters' models are the last ones
    """
    accumulate: Annotated[int, AtLeast(1), IN_PYTHON] = 1
    """mini-batches whose gradients make one step: one of batch_size times as many samples, of which
    batch_size are in memory at once
    """
    class_weight: tuple[str, ...] | None = None
    """factors of each class's losses in training: balanced, n/(k n_c) by the client's own counts
    (not with DP-SGD), or CLASS=NUMBER for each class, in Python also a mapping, which are public;
    gradients that are only compared, released losses and scores are without them
    """
    tune_rounds: Annotated[int, AtLeast(0)] = 0
    """rounds after the last one in which every client trains its final model alone, without noise;
    what comes of it stays at the client, so it costs no ε
    """

    start: Annotated[Any, IN_PYTHON] = None
    """fitted protocol, or folder of a finished run, from whose models clients start: from one
    model, or a method of k models from k; a pair (run, 0) is the model of a cluster. Both runs are
    priced together
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an option, and of an earlier run its shared models."""
        if name == "start" and value is not None:
            from securecluster.results.earlier_run import models_of

            value = models_of(value)
        super().__setattr__(name, value)

    def __post_init__(self) -> None:
        # as the command line has them, which a configuration can keep
        if isinstance(self.class_weight, Mapping):
            self.class_weight = tuple(f"{name}={w}" for name, w in self.class_weight.items())

    def check(self, method: Method, clients: int) -> None:
        """Raise UsageError for a term of tuning without tuning, or models to start from that the
        method does not have.
        """
        if self.start is not None:
            self.start.check(method)
        if self.ditto and not self.tuning(method):
            raise UsageError(
                "ditto is a term of the rounds in which clients tune their own models: give "
                "tune_rounds, too"
            )

    def agreed(self, method: Method, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration, without the options that have no effect.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            config: the configuration, with defaults resolved.

        Raises:
            UsageError: batches or weights are to follow from labels, and samples have none; or
                weights that are not of the classes.
        """
        by_labels = self.batches != "shuffled"
        if by_labels:
            check_labels(facts, "batches")
        # a run has the configuration that it had before there were these options
        defaults = {option.name: option.default for option in fields(TrainingOptions)}
        unused = {name for name in LATER if getattr(self, name) == defaults[name]}
        if self.class_weight is not None:
            check_labels(facts, "class_weight")
            config["class_weight"] = weights_of_classes(self.class_weight, facts)
        if not self.tune_rounds:
            unused.add("tune_rounds")
        if not by_labels:
            unused.add("batches")
        if self.start is None:
            unused.add("start")
        return {name: value for name, value in config.items() if name not in unused}

    def resolved(self, method: Method, facts: Facts, known: Mapping[str, Any]) -> dict[str, Any]:
        """Return the learning rate, whose default depends on the network and the data.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            known: what is resolved already.
        """
        from securecluster.models.architectures import rate

        lr = self.lr
        if lr is None:
            task, classes = facts.objective, facts.classes
            lr = rate(self.network(method), task, classes, self.optimizer, facts.bright)
        return {"lr": float(lr)}

    def unlike_longer(self, method: Any) -> str | None:
        """Return that learning rates follow from the number of all rounds, or None.

        Args:
            method: whose options they are.
        """
        if self.lr_schedule not in ("cosine", "linear"):
            return None
        return f"lr_schedule {self.lr_schedule} ended with round {method.rounds}"

    def tuning(self, method: Method) -> int:
        """Return the number of rounds in which clients tune their models alone after the run.

        Args:
            method: whose options they are.
        """
        return self.tune_rounds

    def personal(self, method: Method) -> bool:
        """Return whether clients end with other models than their clusters', without messages.

        Args:
            method: whose options they are.
        """
        return bool(self.keep_best or self.tuning(method))

    def network(self, method: Method) -> Any:
        """Return the network that clients train: its name, or a module of the user's own.

        Options of a method whose default depends on others return it in place of "auto".

        Args:
            method: whose options they are.
        """
        return method.model

    def usual(self, method: Method, config: Mapping[str, Any]) -> LocalTraining:
        """Return the hyper-parameters of a client's training in a round.

        Args:
            method: whose options they are.
            config: what clients and server agreed on, with the resolved learning rate and noise.
        """
        plan = LocalTraining(
            config["lr"],
            self.epochs,
            self.batch_size * self.accumulate,
            self.optimizer,
            self.momentum,
            keep_momentum=bool(self.keep_momentum),
            label_power=BATCHES[self.batches],
            class_weight=self._class_weight(config),
            weight_decay=float(self.weight_decay),
            proximal=float(self.proximal),
            ditto=float(self.ditto),
            schedule=self._schedule(method),
            keep_local=bool(self.local_layers),
            keep_best=bool(self.keep_best),
            parts=int(self.accumulate),
        )
        private: LocalTraining = method.privacy.training(plan, config)
        return private

    def _class_weight(self, config: Mapping[str, Any]) -> tuple[float, ...] | str | None:
        """Return the weights of the classes as local training takes them.

        Args:
            config: what clients and server agreed on, or, for checks, without the classes.
        """
        if is_balanced(self.class_weight):
            return BALANCED
        agreed = config.get("class_weight")
        return None if agreed is None else tuple(agreed)

    def _schedule(self, method: Method) -> Schedule | None:
        """Return the learning rates of the run's rounds, or None where they are one."""
        if self.lr_schedule == "constant":
            return None
        rounds = int(method.total_rounds)
        return Schedule(self.lr_schedule, rounds, float(self.lr_gamma), int(self.lr_step))

    def validation_share(self, method: Method) -> float:
        """Return the share of each client's training samples that is held out for validation.

        Args:
            method: whose options they are.
        """
        return float(self.keep_best)


def is_balanced(given: Any) -> bool:
    """Return whether weights of classes are those by the clients' own counts.

    Args:
        given: by the user.
    """
    return given == BALANCED or (isinstance(given, list | tuple) and list(given) == [BALANCED])


def weights_of_classes(given: Any, facts: Facts) -> list[float] | str:
    """Return the weight of each class, in the order of the class numbers, or "balanced".

    Args:
        given: "balanced", or texts "class=weight".
        facts: of the clients and their data.

    Raises:
        UsageError: no weight, or a negative one, for a class, or weights of what is none.
    """
    if is_balanced(given):
        return BALANCED
    names = [str(name) for name in facts.class_names or range(facts.classes)]
    try:
        pairs = [text.rpartition("=") for text in given]
        weights = {name: float(weight) for name, _, weight in pairs}
        fit = weights.keys() == set(names) and len(pairs) == len(names)
    except (AttributeError, TypeError, ValueError):
        fit = False
    if not fit or not all(0 <= weight < math.inf for weight in weights.values()):
        raise UsageError(
            f"class_weight = {given!r} is not a number from 0 for each class: give balanced, or "
            f"CLASS=NUMBER for each of {listed(names)}"
        )
    return [weights[name] for name in names]


def has_labels(facts: Facts) -> bool:
    """Return whether each sample has one label.

    Args:
        facts: of the clients and their data.
    """
    return facts.objective.kind == "classification"


def check_labels(facts: Facts, option: str) -> None:
    """Check that batches or weights can follow from labels.

    Args:
        facts: of the clients and their data.
        option: name of the option that asks for it.

    Raises:
        UsageError: samples have no labels.
    """
    facts.check_classes(f"{option} is by the classes of samples", f"leave {option} out")
