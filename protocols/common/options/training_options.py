"""Options of the clients' local training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from securecluster.core.validation import IN_PYTHON, AtLeast, OneOf
from securecluster.errors import UsageError
from securecluster.protocols.common.options.option_group import OptionGroup
from securecluster.training.local_trainer import LocalTraining

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.method import Method

# powers of a label's count that its share of an epoch follows, by name (Kang et al. 2020)
BATCHES = {"shuffled": 1.0, "square-root": 0.5, "balanced": 0.0}


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
    """samples per mini-batch"""
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
            from securecluster.results.start_models import StartModels

            value = StartModels.of(value)
        super().__setattr__(name, value)

    def check(self, method: Method, clients: int) -> None:
        """Check that the method can start from the models of an earlier run.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: it cannot.
        """
        if self.start is not None:
            self.start.check(method)

    def agreed(self, method: Method, facts: Facts, config: dict[str, Any]) -> dict[str, Any]:
        """Return the configuration, without the options that have no effect.

        Args:
            method: whose options they are.
            facts: of the clients and their data.
            config: the configuration, with defaults resolved.

        Raises:
            UsageError: batches are to be sampled by labels, and samples have none.
        """
        by_labels = self.batches != "shuffled"
        if by_labels:
            check_labels(facts, "batches")
        unused = set()
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

    def tuning(self, method: Method) -> int:
        """Return the number of rounds in which clients tune their models alone after the run.

        Args:
            method: whose options they are.
        """
        return self.tune_rounds

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
            self.batch_size,
            self.optimizer,
            self.momentum,
            keep_momentum=bool(self.keep_momentum),
            label_power=BATCHES[self.batches],
        )
        private: LocalTraining = method.privacy.training(plan, config)
        return private

    def validation_share(self, method: Method) -> float:
        """Return the share of each client's training samples that is held out for validation.

        Args:
            method: whose options they are.
        """
        return 0.0


def has_labels(facts: Facts) -> bool:
    """Return whether each sample has one label.

    Args:
        facts: of the clients and their data.
    """
    return facts.objective.kind == "classification"


def check_labels(facts: Facts, option: str) -> None:
    """Check that batches can be sampled by labels.

    Args:
        facts: of the clients and their data.
        option: name of the option that asks for it.

    Raises:
        UsageError: samples have no labels.
    """
    if not has_labels(facts):
        flag = option.replace("_", "-")
        task = facts.objective.kind
        raise UsageError(
            f"batches by labels need a label for each sample, which {task} data do not have: "
            f"leave --{flag} out"
        )
