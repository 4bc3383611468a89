"""What local training is told: SGD_n(θ, D_i) as hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Protocol

from securecluster.errors import UsageError
from securecluster.models.optimizers import OPTIMIZERS


class Secret(Protocol):
    """A source of what nobody else may foresee.

    Noise is drawn from it, and which examples are in a batch.
    """

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        """32 bytes, which follow from a client's key, what they are for, the number of the call,
        and `about`.
        """
        ...


@dataclass(frozen=True)
class LocalTraining:
    """What SGD_n(θ, D_i) means: `steps` mini-batches where given, else `epochs` passes over the
    client's own data, dropout on or off.

    With `clip` it is DP-SGD (Abadi et al. 2016, Algorithm 1): each example is in a mini-batch with
    probability `rate`, on its own, each example's gradient is clipped to the L2 norm `clip`, and
    their sum gets Gaussian noise of standard deviation `noise`·`clip` in each coordinate before it
    is divided by the number of examples expected.

    With `keep_momentum` each client's momentum buffer lives on between its trainings; else it
    starts from zero in each.
    """

    lr: float
    epochs: int
    batch_size: int
    optimizer: str = "sgd"
    momentum: float = 0.0
    steps: int | None = None
    dropout: bool = True
    clip: float = 0.0
    noise: float = 0.0
    keep_momentum: bool = False

    @property
    def private(self) -> bool:
        """Whether it is DP-SGD."""
        return self.clip > 0

    def rate(self, size: int) -> float:
        """q = min(1, B/n): how likely each of n examples is to be in a mini-batch of DP-SGD."""
        return min(1.0, self.batch_size / size)

    def number(self, size: int) -> int:
        """Steps of a client with n examples: `steps`, or epochs·⌈n/B⌉."""
        return self.steps if self.steps is not None else self.epochs * -(-size // self.batch_size)

    def variance(self, size: int) -> float:
        """What the noise of DP-SGD adds to the variance of each number of an update of a client
        with n examples (ours).

        Of SGD, with momentum μ, to first order in the learning rate: lr² (zC/(q n))² Σ_m ((1 −
        μ^m)/(1 − μ))² over m = 1 … the number of steps, which is exact for one step; curvature and
        batches are left out. 0 for Adam, which has no such form.
        """
        if self.optimizer != "sgd":
            return 0.0
        mu, steps = float(self.momentum), self.number(size)
        weights = (
            steps
            - 2 * mu * (1 - mu**steps) / (1 - mu)
            + mu**2 * (1 - mu ** (2 * steps)) / (1 - mu**2)
        ) / (1 - mu) ** 2
        return float((self.lr * self.noise * self.clip / min(self.batch_size, size)) ** 2 * weights)


def check_training(plan: LocalTraining) -> None:
    """Raise UsageError for hyper-parameters that cannot train."""
    if plan.optimizer not in OPTIMIZERS:
        raise UsageError(
            f"unknown optimizer {plan.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}"
        )
    checks = {name: _whole(getattr(plan, name)) for name in ("epochs", "batch_size")}
    checks["lr"] = isinstance(plan.lr, Real) and 0 < float(plan.lr) < math.inf
    checks["momentum"] = isinstance(plan.momentum, Real) and 0 <= float(plan.momentum) < 1
    checks["steps"] = plan.steps is None or _whole(plan.steps)
    for name, good in checks.items():
        if not good:
            raise UsageError(
                f"{name} = {getattr(plan, name)!r} cannot train: lr is a positive number, epochs, "
                "steps and batch_size are whole numbers from 1, momentum is in [0, 1)"
            )
    if plan.optimizer == "adam" and plan.momentum:
        raise UsageError("Adam has its own momentum: leave momentum at 0, or use the optimizer sgd")
    _check_private(plan)
    _check_kept(plan)


def _check_kept(plan: LocalTraining) -> None:
    """Raise UsageError where no momentum can live on between trainings."""
    if not plan.keep_momentum:
        return
    if plan.optimizer != "sgd" or not plan.momentum:
        raise UsageError(
            "keep_momentum keeps the momentum of sgd: give a momentum too, or leave it out"
        )
    if plan.private:
        raise UsageError(
            "keep_momentum would carry a training whose reply was lost, and is not counted, into "
            "later updates: with dp_unit example and a clip leave it out, or take dp_unit client"
        )


def _check_private(plan: LocalTraining) -> None:
    for name in ("clip", "noise"):
        value = getattr(plan, name)
        if (
            not isinstance(value, Real)
            or isinstance(value, bool)
            or not 0 <= float(value) < math.inf
        ):
            raise UsageError(
                f"{name} = {value!r} is no bound or noise of a gradient: give a finite number from "
                "0"
            )
    if plan.noise and not plan.clip:
        raise UsageError(
            f"noise = {plan.noise!r} protects nothing without a bound: give a clip too, the "
            "largest norm of an example's gradient"
        )


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1


# one step over all samples: θ − ∇r(θ)
FULL_GRADIENT = LocalTraining(lr=1.0, epochs=1, batch_size=1 << 62, dropout=False)
