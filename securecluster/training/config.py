"""Hyper-parameters of local training, SGD_n(θ, D_i)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Protocol

from securecluster.errors import UsageError
from securecluster.models.optimizers import OPTIMIZERS

BALANCED = "balanced"


class Secret(Protocol):
    """Source of secret randomness for noise and Poisson batches."""

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        """Return 32 bytes that follow from a client's key and the arguments.

        Args:
            client: number of the client.
            purpose: what the bytes are for, so that draws of two purposes are independent.
            step: number of the call.
            about: further values that the bytes depend on.
        """
        ...


@dataclass(frozen=True)
class Schedule:
    """Learning rates of rounds, by the formulas of `torch.optim.lr_scheduler`.

    Args:
        kind: "cosine" (CosineAnnealingLR) or "linear" (LinearLR) to 0 after the last round,
            "exponential" (ExponentialLR) or "step" (StepLR).
        rounds: T, of the run.
        gamma: γ, the factor of a round, or of a step.
        step: rounds between two steps.
    """

    kind: str
    rounds: int
    gamma: float
    step: int

    def factor(self, number: int) -> float:
        """Return the rate of a round over that of the first one.

        Args:
            number: of the round, from 1; what comes before counts as the first round, and what
                comes after as the last one.
        """
        t = min(max(number, 1), self.rounds) - 1
        if self.kind == "cosine":
            return (1 + math.cos(math.pi * t / self.rounds)) / 2
        if self.kind == "linear":
            return 1 - t / self.rounds
        return float(self.gamma ** (t // self.step if self.kind == "step" else t))


@dataclass(frozen=True)
class LocalTraining:
    """Hyper-parameters of one local training.

    With `clip` it is DP-SGD (Abadi et al. 2016, Algorithm 1): each example is in a mini-batch with
    probability `rate`, independently; each example's gradient is clipped to the L2 norm `clip`; and
    their sum gets Gaussian noise of standard deviation `noise`·`clip` in each coordinate before it
    is divided by the expected number of examples.

    Args:
        lr: learning rate.
        epochs: passes over the client's own data; not used if `steps` is given.
        batch_size: examples of a mini-batch; with DP-SGD their expected number.
        optimizer: "sgd" or "adam".
        momentum: momentum of SGD, in [0, 1).
        steps: number of mini-batches; None for `epochs` passes.
        dropout: True to train with the model's dropout layers.
        clip: L2 norm to which DP-SGD clips the gradient of each example; 0 for plain training.
        noise: noise multiplier of DP-SGD.
        keep_momentum: True to keep each client's momentum buffer between its trainings; otherwise
            each training starts from zero.
        label_power: power of a label's count at the client that its share of an epoch follows, in
            [0, 1]; 1 takes each sample once.
        class_weight: weight of each class's losses, or "balanced" for n/(k n_c), with k the number
            of the client's own classes and n_c its samples of class c; None for 1.
        weight_decay: λ, of the term λ/2 ‖θ‖², as `torch.optim` has it.
        proximal: μ, of the term μ/2 ‖θ − θ_start‖², with θ_start the model that the training begins
            at (Li et al. 2020, "Federated optimization in heterogeneous networks", FedProx, eq. 2).
        ditto: λ, of the term λ/2 ‖v − w‖² where a client trains its own model v alone after the
            run, near the run's model w (Li et al. 2021, "Ditto", eq. for h_k).
        schedule: learning rates of rounds, as factors of `lr`; None for 1.
        keep_local: True to keep what a training makes of each client's local layers.
        keep_best: True to note, as a training begins, which of a client's models so far has the
            least loss on its validation samples.
        parts: in which a mini-batch goes through the network one after the other, their gradients
            added up. DP-SGD has parts of its own.
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
    label_power: float = 1.0
    class_weight: tuple[float, ...] | str | None = None
    weight_decay: float = 0.0
    proximal: float = 0.0
    ditto: float = 0.0
    schedule: Schedule | None = None
    keep_local: bool = False
    keep_best: bool = False
    parts: int = 1

    def at(self, number: int) -> LocalTraining:
        """Return these hyper-parameters with the learning rate of a round.

        Args:
            number: of the round, from 1.
        """
        if self.schedule is None:
            return self
        return replace(self, lr=self.lr * self.schedule.factor(number), schedule=None)

    @property
    def has_terms(self) -> bool:
        """Return whether terms that depend on no sample are added to the loss."""
        return self.weight_decay > 0 or self.proximal > 0

    @property
    def private(self) -> bool:
        """True for DP-SGD."""
        return self.clip > 0

    def rate(self, size: int) -> float:
        """Return q = min(1, B/n), the probability that an example is in a mini-batch of DP-SGD.

        Args:
            size: number n of the client's examples.
        """
        return min(1.0, self.batch_size / size)

    def number(self, size: int) -> int:
        """Return a client's number of steps: `steps`, or epochs·⌈n/B⌉.

        Args:
            size: number n of the client's examples.
        """
        if self.steps is not None:
            return self.steps
        batches_per_epoch = -(-size // self.batch_size)
        return self.epochs * batches_per_epoch

    def variance(self, size: int) -> float:
        """Return the variance that DP-SGD's noise adds to each coordinate of a client's update.

        Of SGD with momentum μ, to first order in the learning rate (not in the paper):
        lr² (zC/(q n))² Σ_m ((1 − μ^m)/(1 − μ))² over m = 1 … the number of steps. It is exact for
        one step; curvature, terms without samples and batches are left out.

        Args:
            size: number n of the client's examples.

        Returns:
            The variance; 0 for Adam, which has no such form.
        """
        if self.optimizer != "sgd":
            return 0.0
        mu = float(self.momentum)
        steps = self.number(size)
        # closed form of Σ_m (1 − μ^m)² over m = 1 … steps, from two geometric series
        power = mu**steps
        power_of_square = mu ** (2 * steps)
        linear = 2 * mu * (1 - power) / (1 - mu)
        quadratic = mu**2 * (1 - power_of_square) / (1 - mu**2)
        series = steps - linear + quadratic
        weights = series / (1 - mu) ** 2
        expected_batch = min(self.batch_size, size)  # q n
        deviation = self.lr * self.noise * self.clip / expected_batch  # of one step
        return float(deviation**2 * weights)


def check_training(plan: LocalTraining) -> None:
    """Raise UsageError for hyper-parameters that cannot train.

    Args:
        plan: the hyper-parameters.
    """
    if plan.optimizer not in OPTIMIZERS:
        raise UsageError(
            f"unknown optimizer {plan.optimizer!r}: choose one of {', '.join(OPTIMIZERS)}"
        )
    valid = {
        "epochs": _is_count(plan.epochs),
        "batch_size": _is_count(plan.batch_size),
        "lr": _is_finite(plan.lr) and plan.lr > 0,
        "momentum": _is_finite(plan.momentum) and plan.momentum < 1,
        "steps": plan.steps is None or _is_count(plan.steps),
    }
    for name in valid:
        if not valid[name]:
            raise UsageError(
                f"{name} = {getattr(plan, name)!r} cannot train: --lr is a positive number, "
                "--epochs, steps and --batch-size are whole numbers from 1, --momentum is in [0, 1)"
            )
    if plan.optimizer == "adam" and plan.momentum:
        raise UsageError("Adam has its own momentum: leave momentum at 0, or use the optimizer sgd")
    _check_private(plan)
    _check_keep_momentum(plan)
    _check_label_power(plan)
    _check_class_weight(plan)
    if plan.keep_local and plan.private:
        raise UsageError(
            "local_layers would carry a training whose reply was lost, and is not counted, into "
            "later updates: with dp_unit example and a clip leave them out, or take dp_unit client"
        )


def _check_class_weight(plan: LocalTraining) -> None:
    """Raise UsageError for weights by the client's own counts, which DP-SGD cannot have."""
    if plan.class_weight == BALANCED and plan.private:
        raise UsageError(
            "class_weight balanced weights each example by all labels of its client, which the "
            "price of DP-SGD does not cover: give the weights, or those of public counts "
            "(class_weight={'no': 1, 'yes': 4}), or take dp_unit client"
        )


def _check_label_power(plan: LocalTraining) -> None:
    """Raise UsageError for a power out of range, or one that DP-SGD cannot have."""
    if not 0 <= plan.label_power <= 1:
        raise UsageError(f"label_power = {plan.label_power!r}: give a number from 0 to 1")
    if plan.label_power < 1 and plan.private:
        raise UsageError(
            "batches that are sampled by labels depend on a client's label counts, which the price "
            "of DP-SGD does not cover: leave batches out where examples are protected"
        )


def _check_keep_momentum(plan: LocalTraining) -> None:
    """Raise UsageError if momentum is to be kept between trainings and cannot be."""
    if not plan.keep_momentum:
        return
    if plan.optimizer != "sgd" or not plan.momentum:
        raise UsageError(
            "keep_momentum keeps the momentum of sgd: give a momentum too, or leave it out"
        )
    # A training happens whether its reply arrives or not; the ledger counts replies only.
    if plan.private:
        raise UsageError(
            "keep_momentum would carry a training whose reply was lost, and is not counted, into "
            "later updates: with dp_unit example and a clip leave it out, or take dp_unit client"
        )


def _check_private(plan: LocalTraining) -> None:
    """Raise UsageError for a clip or noise that is no finite number from 0, or noise alone."""
    for name in ("clip", "noise"):
        value = getattr(plan, name)
        # bool is a subclass of int, but True is no norm
        if isinstance(value, bool) or not _is_finite(value):
            raise UsageError(
                f"{name} = {value!r} is no bound or noise of a gradient: give a finite number from "
                "0"
            )
    if plan.noise and not plan.clip:
        raise UsageError(
            f"noise = {plan.noise!r} protects nothing without a bound: give a clip too, the "
            "largest norm of an example's gradient"
        )


def _is_finite(value: object) -> bool:
    """Return True for a finite number from 0."""
    return isinstance(value, Real) and 0 <= float(value) < math.inf


def _is_count(value: object) -> bool:
    """Return True for an integer from 1."""
    return isinstance(value, Integral) and int(value) >= 1


# one step over all samples: θ − ∇r(θ)
FULL_GRADIENT = LocalTraining(lr=1.0, epochs=1, batch_size=1 << 62, dropout=False)
