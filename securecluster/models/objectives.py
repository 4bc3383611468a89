"""Learning objectives: the training loss, the score of a sample, and the metric of a model.

What differs between labels, text and trajectories is one class: a sample's training loss, the score
that is averaged over a client's samples, and the metric made of the mean (exp of nats, metres).
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
from securecluster.errors import UsageError

# bound of the metric of a model that has diverged: files of numbers (JSON) have no infinity
MOST = 1e300
EXAMPLES = 3  # samples on which a user's network is checked
# bound of released losses, relative to the loss of a uniform guess
GUESSES = 1.5

# samples, targets, and the shape of one output
Example = tuple["torch.Tensor", "torch.Tensor", tuple[int, ...]]


class Objective(ABC):
    """Base class of objectives.

    Outputs and targets have a leading axis of n samples, and every sample counts the same.

    Attributes:
        kind: name of the objective.
        metric: name of the metric on held-out samples.
        higher: True if a larger metric is better.
    """

    kind: ClassVar[str]
    metric: ClassVar[str]
    higher: ClassVar[bool] = False

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


CLASSIFICATION = Classification()

OBJECTIVES: dict[str, type[Objective]] = {
    "classification": Classification,
    "language": Language,
    "trajectory": Trajectory,
}
METRICS = tuple(objective.metric for objective in OBJECTIVES.values())


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
    "Classification",
    "Language",
    "Objective",
    "Trajectory",
    "objective",
]
