"""What local training is told: SGD_n(θ, D_i) as hyper-parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from securecluster.errors import UsageError
from securecluster.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class LocalTraining:
    """What SGD_n(θ, D_i) means: `steps` mini-batches where given, else `epochs` passes over the client's own data, dropout on or off."""

    lr: float
    epochs: int
    batch_size: int
    optimizer: str = "sgd"
    momentum: float = 0.0
    steps: int | None = None
    dropout: bool = True


def check_training(plan: LocalTraining) -> None:
    """Raise UsageError for hyper-parameters that cannot train."""
    if plan.optimizer not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {plan.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}")
    checks = {name: _whole(getattr(plan, name)) for name in ("epochs", "batch_size")}
    checks["lr"] = isinstance(plan.lr, Real) and 0 < float(plan.lr) < math.inf
    checks["momentum"] = isinstance(plan.momentum, Real) and 0 <= float(plan.momentum) < 1
    checks["steps"] = plan.steps is None or _whole(plan.steps)
    for name, good in checks.items():
        if not good:
            raise UsageError(
                f"{name} = {getattr(plan, name)!r} cannot train: lr is a positive number, epochs, steps and batch_size are whole numbers"
                " from 1, momentum is in [0, 1)"
            )
    if plan.optimizer == "adam" and plan.momentum:
        raise UsageError("Adam has its own momentum: leave momentum at 0, or use the optimizer sgd")


def _whole(value: object) -> bool:
    return isinstance(value, Integral) and int(value) >= 1
