"""Learning objectives: the training loss, the score of a sample, and the metric of a model.

What differs between labels, numbers, text and trajectories is one class: a sample's training loss,
the score that is averaged over a client's samples, and the metric made of the mean (exp of nats,
metres).
Every sample counts the same. Windows of text have equally many tokens, so the mean over samples is
the mean over tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError, unknown

# bound of the metric of a model that has diverged: files of numbers (JSON) have no infinity
MOST = 1e300
EXAMPLES = 3  # samples on which a user's network is checked
# bound of released losses, relative to the loss of a uniform guess
GUESSES = 1.5
SQUARED, ABSOLUTE, HUBER = LOSSES = ("squared", "absolute", "huber")

# samples, targets, and the shape of one output
Example = tuple["torch.Tensor", "torch.Tensor", tuple[int, ...]]


class Objective(ABC):
    """Base class of objectives.

    Outputs and targets have a leading axis of n samples, and every sample counts the same.

    Attributes:
        kind: name of the objective.
        metric: name of the metric on held-out samples.
        higher: True if a larger metric is better.
        sequential: True if samples are sequences in an order, with scales of their own.
        one_label: True if each sample has one class.
    """

    kind: ClassVar[str]
    metric: ClassVar[str]
    higher: ClassVar[bool] = False
    sequential: ClassVar[bool] = False
    one_label: ClassVar[bool] = False

    @property
    def unit(self) -> str:
        """Return the metric's unit, or "" without one."""
        return ""

    @abstractmethod
    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the training loss of each sample.

        Args:
            outputs: outputs of the network, (n, …).
            y: targets, (n, …).

        Returns:
            (n,).
        """

    @abstractmethod
    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the score of each sample, which is averaged over a client's samples.

        Args:
            outputs: outputs of the network, (n, …).
            y: targets, (n, …).

        Returns:
            (n,).
        """

    def constant_score(self, y: NDArray[Any]) -> float:
        """Return the largest score of an answer that ignores x, where larger ones are better.

        Args:
            y: targets, (n, …).
        """
        raise NotImplementedError

    def judged(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the metric of clients.

        Args:
            means: mean score of each client, (m,); NaN for a client without samples.

        Returns:
            (m,), finite wherever there is a score.
        """
        return np.minimum(means, MOST)

    @abstractmethod
    def example(self, shape: Sequence[int], classes: int) -> Example:
        """Return samples to check a network on.

        Args:
            shape: shape of a sample.
            classes: number of labels, tokens or coordinates.

        Returns:
            Three samples (3, *shape), their targets, and the shape of a sample's outputs.
        """

    def predicted(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return predictions that can be averaged over models: probabilities, or positions.

        Args:
            outputs: outputs of the network, (n, …).
        """
        return outputs.softmax(-1)

    def wanted(self, shape: Sequence[int]) -> str:
        """Describe the outputs that a network must give for a sample, for messages.

        Args:
            shape: shape of a sample's outputs.
        """
        return f"one row of {shape[-1]} logits"

    @abstractmethod
    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Check a client's samples.

        Args:
            name: the client's name, for the message.
            x: samples, (n, …).
            y: targets, (n, …).
            classes: number of labels, tokens or coordinates.

        Raises:
            UsageError: the samples do not suit the objective.
        """

    @abstractmethod
    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the mean loss of a prediction that ignores x, which needs no learning.

        Args:
            y: targets, (n, …).
            classes: outputs of the network.
        """

    def loss_bound(self, classes: int) -> float:
        """Return the bound B to which losses are clipped before noise in units of B.

        Not in the paper: half more than the loss of a uniform guess.

        Args:
            classes: outputs of the network.
        """
        return GUESSES * math.log(max(classes, 2))

    def as_json(self) -> dict[str, Any]:
        """Return a description from which `objective` makes the same objective."""
        return {"kind": self.kind}


@dataclass(frozen=True)
class Classification(Objective):
    """One label a sample: cross-entropy, evaluated by accuracy.

    Targets are (n,) int64, outputs (n, classes) logits, losses in nats.
    """

    kind: ClassVar[str] = "classification"
    metric: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True
    one_label: ClassVar[bool] = True

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each sample (n,), nats.

        Args:
            outputs: logits, (n, classes).
            y: labels, (n,).
        """
        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return True for each sample (n,) whose largest logit is the label's.

        Args:
            outputs: logits, (n, classes).
            y: labels, (n,).
        """
        return outputs.argmax(-1) == y

    def constant_score(self, y: NDArray[Any]) -> float:
        """Return the share of the most frequent label.

        Args:
            y: labels, (n,).
        """
        return float(np.bincount(y).max()) / len(y)

    def example(self, shape: Sequence[int], classes: int) -> Example:
        """Return uniform numbers of class 0.

        Args:
            shape: shape of a sample.
            classes: number of labels.
        """
        labels = torch.zeros(EXAMPLES, dtype=torch.int64)
        return _uniform(shape), labels, (classes,)

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Raise UsageError unless labels lie in 0 … classes − 1.

        Args:
            name: the client's name, for the message.
            x: samples, (n, …).
            y: labels, (n,).
            classes: number of labels.
        """
        _check_range(name, "label", y, classes)

    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the entropy of the labels, nats: no prediction that ignores x has less loss.

        Args:
            y: labels, (n,).
            classes: number of labels.
        """
        counts = np.bincount(y)
        # An absent label adds nothing to the entropy, but its logarithm is infinite.
        shares = counts[counts > 0] / len(y)
        entropy = -(shares * np.log(shares)).sum()
        return float(entropy)


@dataclass(frozen=True)
class Language(Objective):
    """The next token at every position: cross-entropy, evaluated by perplexity.

    x and targets are (n, L) int64, outputs (n, L, classes) logits. A sample's loss is the mean over
    its L tokens, in nats; the perplexity is exp of the mean over all of a client's tokens.

    Args:
        padding: the token that fills up short sequences, which is no data: targets of it count in
            no loss, clip or score, and samples count the same, however short. None has none.
    """

    kind: ClassVar[str] = "language"
    metric: ClassVar[str] = "perplexity"
    sequential: ClassVar[bool] = True
    padding: int | None = None

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each sample's tokens (n,), nats.

        Args:
            outputs: logits, (n, L, classes).
            y: next tokens, (n, L).
        """
        token_losses = torch.nn.functional.cross_entropy(
            outputs.flatten(0, 1), y.flatten(), reduction="none"
        )
        of_samples = token_losses.view(y.shape)
        if self.padding is None:
            # Windows have equally many tokens, so the mean over samples is the mean over tokens.
            return of_samples.mean(1)
        is_data = y != self.padding
        tokens = is_data.sum(1).clamp(min=1)
        return (of_samples * is_data).sum(1) / tokens

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the losses (n,), nats.

        Args:
            outputs: logits, (n, L, classes).
            y: next tokens, (n, L).
        """
        return self.losses(outputs, y)

    def judged(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the perplexities exp(means) (m,).

        Args:
            means: mean loss of each client, (m,), nats.
        """
        # Bounded first, since exp would overflow with a warning.
        bounded = np.minimum(means, np.log(MOST))
        return super().judged(np.exp(bounded))

    def example(self, shape: Sequence[int], classes: int) -> Example:
        """Return random tokens, which are their own targets.

        Args:
            shape: (L,).
            classes: number of tokens.
        """
        generator = torch.Generator().manual_seed(0)
        x = torch.randint(classes, (EXAMPLES, *shape), generator=generator)
        return x, x, (*shape, classes)

    def wanted(self, shape: Sequence[int]) -> str:
        """Describe the logits of the next token, for messages.

        Args:
            shape: (L, classes).
        """
        printed = " × ".join(map(str, shape))
        return f"{printed} logits, {shape[-1]} at every place,"

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Raise UsageError unless x and y are whole numbers in 0 … classes − 1 of one shape.

        A sample of which all is padding is refused, too.

        Args:
            name: the client's name, for the message.
            x: tokens, (n, L).
            y: next tokens, (n, L).
            classes: number of tokens.
        """
        if x.dtype.kind not in "iu" or x.ndim != 2 or x.shape != y.shape:
            raise UsageError(
                f"client {name!r}: text is x and y of token numbers, both (n, L), not {x.dtype} "
                f"{x.shape} and {y.shape}"
            )
        for tokens in (x, y):
            _check_range(name, "token", tokens, classes)
        if self.padding is not None and (y == self.padding).all(1).any():
            raise UsageError(
                f"client {name!r} has a sample whose targets are all padding ({self.padding}): "
                "leave it out"
            )

    def as_json(self) -> dict[str, Any]:
        """Return a description with the padding, where there is any."""
        described = super().as_json()
        if self.padding is not None:
            described["padding"] = self.padding
        return described

    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the loss of a guess among all tokens, nats.

        Args:
            y: next tokens, (n, L), which are not read.
            classes: number of tokens.
        """
        # The tokens' frequencies predict better, but networks take many rounds to learn more than
        # these, so a run that has not is no mistake.
        return math.log(classes)


@dataclass(frozen=True)
class Trajectory(Objective):
    """The next position: squared error, evaluated by the mean distance in metres.

    x is (n, T, k), targets (n, k), outputs (n, k), all in units of the area.

    Args:
        metres: metres in one unit of each of the k coordinates; () for 1 each, without a unit.
    """

    metres: tuple[float, ...] = ()

    kind: ClassVar[str] = "trajectory"
    metric: ClassVar[str] = "position_error"
    sequential: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not _are_lengths(self.metres):
            raise UsageError(
                f"metres = {self.metres!r} are positive numbers, one for each coordinate, as "
                "(10_000, 6_200); () is no unit"
            )
        as_floats = tuple(float(length) for length in self.metres)
        # A frozen dataclass has no other way to set a field.
        object.__setattr__(self, "metres", as_floats)

    @property
    def unit(self) -> str:
        """Return "m", or "" where positions have no known unit."""
        if self.metres:
            return "m"
        return ""

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error of each sample's coordinates (n,), squared units.

        Args:
            outputs: predicted positions, (n, k or more).
            y: true positions, (n, k).
        """
        return _error(outputs, y).square().mean(1)

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the Euclidean distances from the true positions (n,), metres.

        Args:
            outputs: predicted positions, (n, k or more).
            y: true positions, (n, k).
        """
        error = _error(outputs, y)
        # Metres count in the score only; the loss stays in units of the area.
        if self.metres:
            error = error * error.new_tensor(self.metres)
        distance: torch.Tensor = torch.linalg.vector_norm(error, dim=1)
        return distance

    def example(self, shape: Sequence[int], classes: int) -> Example:
        """Return uniform positions, with targets at the origin.

        Args:
            shape: (T, k).
            classes: k.
        """
        return _uniform(shape), torch.zeros(EXAMPLES, classes), (classes,)

    def predicted(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the predicted positions, (n, k or more).

        Args:
            outputs: outputs of the network.
        """
        return outputs

    def wanted(self, shape: Sequence[int]) -> str:
        """Describe the predicted position, for messages.

        Args:
            shape: (k,).
        """
        return f"a position of {shape[-1]} coordinates"

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Raise UsageError unless positions are finite and of `classes` coordinates.

        Args:
            name: the client's name, for the message.
            x: past positions, (n, T, k).
            y: next positions, (n, k).
            classes: k.
        """
        if x.ndim != 3 or y.ndim != 2 or y.shape[1] != classes or x.shape[2] != classes:
            raise UsageError(
                f"client {name!r}: trajectories are x (n, T, {classes}) and y (n, {classes}), not "
                f"{x.shape} and {y.shape}: the past T positions, and the next one"
            )
        if not np.isfinite(y).all():
            raise UsageError(
                f"client {name!r}: a position is NaN or infinite: clean the data first"
            )
        if self.metres and len(self.metres) != classes:
            raise UsageError(
                f"metres are {len(self.metres)} numbers, and positions have {classes} coordinates: "
                "give one for each"
            )

    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the loss of the mean position, which is the mean variance of the coordinates.

        Args:
            y: next positions, (n, k).
            classes: k.
        """
        variances = y.astype(np.float64).var(axis=0)
        return float(variances.mean())

    def loss_bound(self, classes: int) -> float:
        """Return the largest loss that the middle of a unit area can have.

        Args:
            classes: k.
        """
        return 0.25

    def as_json(self) -> dict[str, Any]:
        """Return a description with the units."""
        return {"kind": self.kind, "metres": list(self.metres)}


@dataclass(frozen=True)
class Regression(Objective):
    """One number or several a sample, evaluated by the mean absolute error in their own units.

    Targets are (n, k) float32, outputs (n, k). Targets train on a scale: public bounds become −1
    and 1, as those of features do, or each client standardises by its own mean and deviation. A
    sample's loss is the mean over its k numbers, in units of the scale; the score is in the
    targets' own, the mean over them.

    Args:
        loss: "squared", "absolute" or "huber" error, as torch's `mse_loss`, `l1_loss` and
            `huber_loss`.
        delta: of huber: errors beyond it count linearly, in units of the scale.
        bounds: public bounds (low, high) of each number, which become −1 and 1; numbers to train
            on are cut off there. One pair is for all of them; () is none.
        standardised: each client brings its own number to mean 0 and deviation 1, by its training
            samples. No bounds then.
    """

    loss: str = "squared"
    delta: float = 1.0
    bounds: tuple[tuple[float, float], ...] = ()
    standardised: bool = False

    kind: ClassVar[str] = "regression"
    metric: ClassVar[str] = "mean_absolute_error"

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise unknown("loss", self.loss, LOSSES)
        if not _are_lengths((self.delta,)):
            raise UsageError(f"delta = {self.delta!r} is a positive number: leave it out for 1")
        bounds = _pairs(self.bounds)
        if bounds and self.standardised:
            raise UsageError("targets have public bounds, or are standardised: give one of them")
        # JSON has whole numbers and lists
        object.__setattr__(self, "delta", float(self.delta))
        object.__setattr__(self, "bounds", bounds)

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean error of each sample's numbers (n,), in units of the scale.

        Args:
            outputs: predicted numbers, (n, k or more).
            y: true numbers, (n, k).
        """
        functional = torch.nn.functional
        predicted = outputs[:, : y.shape[1]]
        if self.loss == SQUARED:
            errors = functional.mse_loss(predicted, y, reduction="none")
        elif self.loss == ABSOLUTE:
            errors = functional.l1_loss(predicted, y, reduction="none")
        else:
            errors = functional.huber_loss(predicted, y, reduction="none", delta=self.delta)
        return errors.mean(1)

    def output_gradients(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each sample's loss at the outputs.

        Args:
            outputs: predicted numbers, (…, k or more).
            y: true numbers, (…, k).
        """
        targets = y.shape[-1]
        error = outputs[..., :targets] - y
        slope = {SQUARED: 2 * error, ABSOLUTE: error.sign()}.get(self.loss)
        if slope is None:
            slope = error.clamp(-self.delta, self.delta)
        return _padded(slope / targets, outputs)

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean absolute error of each sample's numbers (n,), in their own units.

        Of standardised targets it is in deviations, of which each client knows its own.

        Args:
            outputs: predicted numbers, (n, k or more).
            y: true numbers, (n, k).
        """
        error = _error(outputs, y).abs()
        return (error * error.new_tensor(self.units)).mean(1)

    @property
    def units(self) -> tuple[float, ...]:
        """Return what one unit of the scale is in each target's own numbers, by its bounds."""
        return tuple((high - low) / 2 for low, high in self.bounds) or (1.0,)

    def example(self, shape: Sequence[int], classes: int) -> Example:
        """Return uniform samples, with targets at the middle.

        Args:
            shape: of a sample.
            classes: k.
        """
        return _uniform(shape), torch.zeros(EXAMPLES, classes), (classes,)

    def predicted(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the predicted numbers, (n, k or more)."""
        return outputs

    def wanted(self, shape: Sequence[int]) -> str:
        """Describe the predicted numbers, for messages.

        Args:
            shape: (k,).
        """
        return f"{shape[-1]} number{'s' * (shape[-1] > 1)}"

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Raise UsageError unless targets are finite, and `classes` a sample.

        Args:
            name: the client's name, for the message.
            x: samples, (n, …).
            y: targets, (n, k).
            classes: k.
        """
        _check_columns(name, y, classes)
        if len(self.bounds) not in (0, classes):
            raise UsageError(
                f"bounds of targets are {len(self.bounds)} pairs, and samples have {classes} "
                "targets: give one for each"
            )
        if self.standardised and classes > 1:
            raise UsageError(
                f"{classes} targets in units of their own cannot be standardised by each client: "
                "give their public bounds (Regression(bounds=[(low, high), ...]), --bounds)"
            )

    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the loss of the best constant: the mean's, the median's, or between the two.

        Args:
            y: targets, (n, k).
            classes: k.
        """
        means = [_least_loss(self, column) for column in y.astype(np.float64).T]
        return float(np.mean(means))

    def loss_bound(self, classes: int) -> float:
        """Return the largest loss that the middle of the scale can have.

        With bounds no target is farther than 1 from it; else it is half more than the loss at
        one deviation.

        Args:
            classes: k.
        """
        tail = self.delta * (1 - self.delta / 2) if self.delta < 1 else 0.5
        largest = tail if self.loss == HUBER else 1.0
        return largest if self.bounds else GUESSES * largest

    def as_json(self) -> dict[str, Any]:
        """Return a description with the loss and the scale."""
        described = {**super().as_json(), "loss": self.loss}
        if self.loss == HUBER:
            described["delta"] = self.delta
        if self.bounds:
            described["bounds"] = [list(pair) for pair in self.bounds]
        if self.standardised:
            described["standardised"] = True
        return described


@dataclass(frozen=True)
class MultiLabel(Objective):
    """Several labels a sample, each 0 or 1: cross-entropy of a sigmoid for each output.

    Targets are (n, k) float32, outputs (n, k) logits. A sample's loss is the mean over its labels,
    in nats (torch's `binary_cross_entropy_with_logits`); the score is the share of labels that are
    right, one minus the Hamming loss.
    """

    kind: ClassVar[str] = "multilabel"
    metric: ClassVar[str] = "label_accuracy"
    higher: ClassVar[bool] = True

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of each sample's labels (n,), nats.

        Args:
            outputs: logits, (n, k or more).
            y: labels, (n, k).
        """
        entropy = torch.nn.functional.binary_cross_entropy_with_logits
        return entropy(outputs[:, : y.shape[1]], y, reduction="none").mean(1)

    def output_gradients(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the gradient of each sample's loss at the outputs.

        Args:
            outputs: logits, (…, k or more).
            y: labels, (…, k).
        """
        labels = y.shape[-1]
        return _padded((outputs[..., :labels].sigmoid() - y) / labels, outputs)

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the share of each sample's labels that are right (n,).

        Args:
            outputs: logits, (n, k or more).
            y: labels, (n, k).
        """
        right = (outputs[:, : y.shape[1]] > 0) == (y > 0.5)
        return right.to(outputs.dtype).mean(1)

    def constant_score(self, y: NDArray[Any]) -> float:
        """Return the score of the answer that gives each label its most frequent value."""
        ones = y.astype(np.float64).mean(axis=0)
        return float(np.maximum(ones, 1 - ones).mean())

    def example(self, shape: Sequence[int], classes: int) -> Example:
        """Return uniform samples without labels.

        Args:
            shape: of a sample.
            classes: k.
        """
        return _uniform(shape), torch.zeros(EXAMPLES, classes), (classes,)

    def predicted(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the probability of each label, (n, k or more)."""
        return outputs.sigmoid()

    def wanted(self, shape: Sequence[int]) -> str:
        """Describe the logits, for messages.

        Args:
            shape: (k,).
        """
        return f"{shape[-1]} logit{'s' * (shape[-1] > 1)}, one a label,"

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Raise UsageError unless labels lie in 0 … 1, and are `classes` a sample.

        Args:
            name: the client's name, for the message.
            x: samples, (n, …).
            y: labels, (n, k).
            classes: k.
        """
        _check_columns(name, y, classes)
        if y.size and not (y.min() >= 0 and y.max() <= 1):
            raise UsageError(
                f"client {name!r}: each of several labels is 0 or 1, and some are not: for numbers "
                "take the task regression"
            )

    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the mean entropy of the labels, nats.

        Args:
            y: labels, (n, k).
            classes: k.
        """
        ones = y.astype(np.float64).mean(axis=0)
        shares = np.stack([ones, 1 - ones])
        # an absent label adds nothing, but its logarithm is infinite
        entropy = -shares * np.log(np.where(shares > 0, shares, 1.0))
        return float(entropy.sum(axis=0).mean())

    def loss_bound(self, classes: int) -> float:
        """Return half more than the loss of a uniform guess of each label."""
        return super().loss_bound(2)


@dataclass(frozen=True)
class Binary(MultiLabel):
    """One of two classes a sample, with one output: cross-entropy of its sigmoid.

    Targets are (n, 1) float32, 1 for the second class; outputs (n, 1).
    """

    kind: ClassVar[str] = "binary"
    metric: ClassVar[str] = "accuracy"
    one_label: ClassVar[bool] = True

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Raise UsageError unless targets are of two classes, 0 and 1.

        Args:
            name: the client's name, for the message.
            x: samples, (n, …).
            y: targets, (n, 1).
            classes: 1.
        """
        if classes != 1 or (y.size and y.max() > 1):
            raise UsageError(
                f"client {name!r}: the task binary has two classes, and there are more: take the "
                "task classification"
            )
        super().check(name, x, y, classes)


CLASSIFICATION = Classification()

OBJECTIVES: dict[str, type[Objective]] = {
    "classification": Classification,
    "language": Language,
    "trajectory": Trajectory,
    "regression": Regression,
    "multilabel": MultiLabel,
    "binary": Binary,
}
AUTO_TASK = "auto"
TASKS = (AUTO_TASK, "classification", "binary", "multilabel", "regression")
METRICS = tuple(dict.fromkeys(objective.metric for objective in OBJECTIVES.values()))


def task_of(task: Any) -> Objective | None:
    """Return the objective of a task that a user names; None where the labels choose it.

    Args:
        task: one of `TASKS`, of which regression may have a loss and a delta behind colons, as in
            "regression:huber:0.5"; an objective; or None for auto.

    Raises:
        UsageError: no task.
    """
    if task is None or isinstance(task, Objective):
        return task
    if not isinstance(task, str):
        raise UsageError(
            f"objective = {task!r} is none: pass Classification(), Regression(), MultiLabel(), "
            "Binary(), Language() or Trajectory(metres)"
        )
    name, *options = task.split(":")
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    if name == AUTO_TASK:
        return None
    if not options:
        return OBJECTIVES[name]()
    if name != Regression.kind:
        raise UsageError(f"task = {task!r}: only a regression has a loss, as regression:huber")
    return _regression(task, *options)


def _regression(task: str, loss: str, *delta: str) -> Regression:
    """Return the regression that a task names.

    Args:
        task: as the user named it.
        loss: of it.
        delta: of huber, or nothing.
    """
    try:
        numbers = [float(text) for text in delta]
    except ValueError:
        numbers = [0.0]  # which is none
    if len(numbers) > 1 or (numbers and loss != HUBER):
        raise UsageError(f"task = {task!r}: only regression:huber has one more number, its delta")
    return Regression(loss, numbers[0]) if numbers else Regression(loss)


def task_name(task: Objective | None) -> str | None:
    """Return the task that names an objective (`task_of`), without the bounds of its targets.

    Args:
        task: an objective, or None.
    """
    if task is None:
        return None
    if not isinstance(task, Regression) or task.loss == SQUARED:
        return task.kind
    delta = f":{task.delta!r}" if task.loss == HUBER else ""
    return f"{task.kind}:{task.loss}{delta}"


def objective(values: Mapping[str, Any]) -> Objective:
    """Return the objective that `as_json` has described.

    Args:
        values: the description.
    """
    options = {name: value for name, value in values.items() if name != "kind"}
    # JSON has lists where the fields are tuples.
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in options.items()}
    return OBJECTIVES[values["kind"]](**options)


def _uniform(shape: Sequence[int]) -> torch.Tensor:
    """Return the same uniform numbers (3, *shape), float32, in every call."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(EXAMPLES, *shape, generator=generator, dtype=torch.float32)


def _error(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the error (n, k) of the outputs' first k columns; a network may have more."""
    coordinates = y.shape[1]
    return outputs[:, :coordinates] - y


def _padded(gradient: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    """Return a gradient (…, k) with zeros for further outputs, which no target is for."""
    further = outputs.shape[-1] - gradient.shape[-1]
    return torch.nn.functional.pad(gradient, (0, further)) if further else gradient


def _pairs(bounds: Any) -> tuple[tuple[float, float], ...]:
    """Return bounds of targets as pairs of floats.

    Raises:
        UsageError: no pairs of a low and a high number.
    """
    try:
        pairs = tuple((float(low), float(high)) for low, high in bounds)
    except (TypeError, ValueError):
        pairs = ((0.0, 0.0),)
    if not all(low < high and np.isfinite([low, high]).all() for low, high in pairs):
        raise UsageError(
            f"bounds of targets = {bounds!r} are pairs of a low and a high number, one for each "
            "target: give [(0, 500)]"
        )
    return pairs


def _check_columns(name: str, y: NDArray[Any], targets: int) -> None:
    """Raise UsageError unless targets are finite (n, targets)."""
    if y.ndim != 2 or y.shape[1] != targets:
        raise UsageError(
            f"client {name!r}: y {y.shape} has other targets than the {targets} of the first "
            "client: give as many for each sample"
        )
    if not np.isfinite(y).all():
        raise UsageError(f"client {name!r}: a target is empty, NaN or infinite: fill or drop it")


def _least_loss(regression: Regression, y: NDArray[np.float64]) -> float:
    """Return the least mean loss of one number for all targets (n,)."""
    if regression.loss == SQUARED:
        return float(y.var())
    if regression.loss == ABSOLUTE:
        return float(np.abs(y - np.median(y)).mean())
    from scipy.optimize import minimize_scalar
    from scipy.special import huber

    def loss(number: float) -> float:
        return float(huber(regression.delta, y - number).mean())

    found = minimize_scalar(loss, bounds=(float(y.min()), float(y.max())), method="bounded")
    return min(float(found.fun), loss(float(y.mean())))


def _are_lengths(values: object) -> bool:
    """Return True for a tuple or list of positive finite numbers."""
    if not isinstance(values, tuple | list):
        return False
    return all(isinstance(value, Real) and 0 < float(value) < np.inf for value in values)


def _check_range(name: str, what: str, values: NDArray[Any], classes: int) -> None:
    """Check labels or tokens.

    Args:
        name: the client's name, for the message.
        what: "label" or "token", for the message.
        values: whole numbers of any shape.
        classes: number of labels or tokens.

    Raises:
        UsageError: a value lies outside 0 … classes − 1.
    """
    if not values.size:
        return
    low = int(values.min())
    high = int(values.max())
    if low < 0:
        raise UsageError(
            f"client {name!r}: a {what} lies outside 0 … {classes - 1}, {low}: {what}s start at 0"
        )
    if high >= classes:
        raise UsageError(
            f"client {name!r}: a {what} lies outside 0 … {classes - 1}, {high}: give "
            f"classes={high + 1} or more, or mend it"
        )


__all__ = [
    "CLASSIFICATION",
    "OBJECTIVES",
    "Binary",
    "Classification",
    "Language",
    "MultiLabel",
    "Objective",
    "Regression",
    "Trajectory",
    "objective",
    "task_name",
    "task_of",
]
