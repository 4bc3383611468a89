"""What clients learn: the loss they train on, and the number a model is judged by."""

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

MOST = 1e300
"""what the metric of a model that has diverged is at most: files of numbers (JSON) have no infinity
"""


class Objective(ABC):
    """A kind of learning. Outputs and targets have a leading axis of samples, and every sample
    counts the same.
    """

    kind: ClassVar[str]
    metric: ClassVar[str]
    """the name of what a model is judged by on held-out samples"""
    higher: ClassVar[bool] = False
    """whether more of the metric is better"""

    @property
    def unit(self) -> str:
        """Of the metric."""
        return ""

    @abstractmethod
    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The training loss of each sample, (n,)."""

    @abstractmethod
    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """What is averaged over a client's samples, (n,)."""

    def judged(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """The metric, from the mean score of each client (m,), finite wherever there is a score."""
        return np.minimum(means, MOST)

    @abstractmethod
    def example(
        self, shape: Sequence[int], classes: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Three samples a network can be tried on, their targets, and the shape of one sample's
        outputs.
        """

    def predicted(self, outputs: torch.Tensor) -> torch.Tensor:
        """What outputs say, as numbers that can be averaged over models: probabilities, or
        positions.
        """
        return outputs.softmax(-1)

    def wanted(self, shape: Sequence[int]) -> str:
        """In words, the outputs of one sample."""
        return f"one row of {shape[-1]} logits"

    @abstractmethod
    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Raise UsageError where client `name`'s samples cannot be learned."""

    @abstractmethod
    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the mean loss that needs no learning, on samples with targets y (n, …): of an
        answer that ignores x.

        Args:
            classes: outputs of the network.
        """

    def loss_bound(self, classes: int) -> float:
        """B up to which a sample's loss counts where losses are released with noise in units of it
        (ours): half more than a guess has.
        """
        return 1.5 * math.log(max(classes, 2))

    def as_json(self) -> dict[str, Any]:
        """Enough for `objective` to make it again."""
        return {"kind": self.kind}


@dataclass(frozen=True)
class Classification(Objective):
    """One label a sample: y (n,) int64, outputs (n, classes) logits; cross-entropy in nats, judged
    by accuracy.
    """

    kind: ClassVar[str] = "classification"
    metric: ClassVar[str] = "accuracy"
    higher: ClassVar[bool] = True

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Cross-entropy, nats."""
        return torch.nn.functional.cross_entropy(outputs, y, reduction="none")

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """1 where the largest logit is the label's."""
        return outputs.argmax(-1) == y

    def example(
        self, shape: Sequence[int], classes: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Uniform numbers, all of class 0."""
        return _uniform(shape), torch.zeros(3, dtype=torch.int64), (classes,)

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Labels lie in 0 … classes − 1."""
        _check_range(name, "label", y, classes)

    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return the entropy of the labels, nats: the least loss of an answer that ignores x."""
        counts = np.bincount(y)
        shares = counts[counts > 0] / len(y)
        return float(-(shares * np.log(shares)).sum())


@dataclass(frozen=True)
class Language(Objective):
    """The next token at every place: x and y (n, L) int64, outputs (n, L, classes); cross-entropy,
    judged by perplexity.

    A sample's loss is the mean over its L tokens, in nats; the perplexity is exp of the mean over
    all of a client's tokens.
    """

    kind: ClassVar[str] = "language"
    metric: ClassVar[str] = "perplexity"

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of a sample's tokens, nats."""
        each = torch.nn.functional.cross_entropy(
            outputs.flatten(0, 1), y.flatten(), reduction="none"
        )
        return each.view(y.shape).mean(1)

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """As the losses."""
        return self.losses(outputs, y)

    def judged(self, means: NDArray[np.float64]) -> NDArray[np.float64]:
        """exp(nats)."""
        return super().judged(np.exp(np.minimum(means, np.log(MOST))))

    def example(
        self, shape: Sequence[int], classes: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Random tokens."""
        draw = torch.Generator().manual_seed(0)
        x = torch.randint(classes, (3, *shape), generator=draw)
        return x, x, (*shape, classes)

    def wanted(self, shape: Sequence[int]) -> str:
        """Logits of the next token."""
        return f"{' × '.join(map(str, shape))} logits, {shape[-1]} at every place,"

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Tokens are whole numbers in 0 … classes − 1, and every place has a next one."""
        if x.dtype.kind not in "iu" or x.ndim != 2 or x.shape != y.shape:
            raise UsageError(
                f"client {name!r}: text is x and y of token numbers, both (n, L), not {x.dtype} "
                f"{x.shape} and {y.shape}"
            )
        for tokens in (x, y):
            _check_range(name, "token", tokens, classes)

    def chance_loss(self, y: NDArray[Any], classes: int) -> float:
        """Return that of a guess among all tokens, nats.

        Their frequencies are a better answer, but networks take many rounds to learn more, so that
        a run which has not is no mistake.
        """
        return math.log(classes)


@dataclass(frozen=True)
class Trajectory(Objective):
    """The next position: x (n, T, k), y (n, k) in units of the area, outputs (n, k); squared error,
    judged by the mean distance in metres.

    Args:
        metres: how many metres one unit of each of the k coordinates is; 1 where they are not
            given.
    """

    metres: tuple[float, ...] = ()

    kind: ClassVar[str] = "trajectory"
    metric: ClassVar[str] = "position_error"

    def __post_init__(self) -> None:
        if not isinstance(self.metres, tuple | list) or not all(
            isinstance(v, Real) and 0 < float(v) < np.inf for v in self.metres
        ):
            raise UsageError(
                f"metres = {self.metres!r} are positive numbers, one for each coordinate, as "
                "(10_000, 6_200); () is no unit"
            )
        object.__setattr__(self, "metres", tuple(float(v) for v in self.metres))

    @property
    def unit(self) -> str:
        """m, or nothing where positions have no known unit."""
        return "m" if self.metres else ""

    def losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean squared error of the coordinates, in squared units of the area."""
        return (outputs[:, : y.shape[1]] - y).square().mean(1)

    def scores(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Euclidean distance from the true position, metres."""
        away = outputs[:, : y.shape[1]] - y
        scaled = away * away.new_tensor(self.metres) if self.metres else away
        found: torch.Tensor = torch.linalg.vector_norm(scaled, dim=1)
        return found

    def example(
        self, shape: Sequence[int], classes: int
    ) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
        """Uniform positions."""
        return _uniform(shape), torch.zeros(3, classes), (classes,)

    def predicted(self, outputs: torch.Tensor) -> torch.Tensor:
        """The positions."""
        return outputs

    def wanted(self, shape: Sequence[int]) -> str:
        """Coordinates."""
        return f"a position of {shape[-1]} coordinates"

    def check(self, name: str, x: NDArray[Any], y: NDArray[Any], classes: int) -> None:
        """Positions are finite, and have as many coordinates as everyone's."""
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
        """Return the mean variance of the coordinates: the answer is the mean position."""
        return float(y.astype(np.float64).var(axis=0).mean())

    def loss_bound(self, classes: int) -> float:
        """That of the middle of a unit area, at most."""
        return 0.25

    def as_json(self) -> dict[str, Any]:
        """With its units."""
        return {"kind": self.kind, "metres": list(self.metres)}


CLASSIFICATION = Classification()

OBJECTIVES: dict[str, type[Objective]] = {
    kind.kind: kind for kind in (Classification, Language, Trajectory)
}


def objective(values: Mapping[str, Any]) -> Objective:
    """The objective that `as_json` wrote."""
    own = {name: tuple(value) for name, value in values.items() if name != "kind"}
    return OBJECTIVES[values["kind"]](**own)


def _uniform(shape: Sequence[int]) -> torch.Tensor:
    return torch.rand(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)


def _check_range(name: str, what: str, values: NDArray[Any], classes: int) -> None:
    """Raise UsageError where a label or token is no number from 0 to classes - 1."""
    if not values.size:
        return
    low, high = int(values.min()), int(values.max())
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
