"""Optimizers of many clients at once.

Every tensor has a leading client axis, and a step may concern only the first rows. `params` maps a
name to a tensor (b, …). A gradient arrives as values, or as a matrix product that need never be
stored.

Momentum that lives on is a client's state (`Momenta`). A client that is asked for an earlier call
than its last one refuses, since that training has happened whether its reply arrived or not. DP-SGD
refuses the option: a training that nobody counts would reach later updates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, UsageError

# decays of Adam's moments and the constant in its denominator, the defaults of torch.optim.Adam
BETA_1 = 0.9
BETA_2 = 0.999
EPSILON = 1e-8


class Optimizer(Protocol):
    """Optimizer of b clients: one step is `begin`, then `value` or `product` per parameter."""

    def begin(self) -> None:
        """Begin a new step."""
        ...

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """Step the first k rows of a parameter.

        Args:
            name: the parameter, (b, …).
            gradient: its gradient, (k, …).
        """
        ...

    def product(self, name: str, lhs: torch.Tensor, rhs: torch.Tensor) -> None:
        """Step the first k rows of a parameter whose gradient is lhs @ rhs.

        Args:
            name: the parameter, (b, o, i).
            lhs: (k, o, n).
            rhs: (k, n, i).
        """
        ...


class Sgd:
    """SGD with momentum, as `torch.optim.SGD`: v ← μv + g, θ ← θ − lr·v.

    Args:
        params: θ by name, changed in place.
        lr: learning rate.
        momentum: μ.
        velocity: v by name, shaped as the parameters and changed in place; None starts from zero.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        lr: float,
        momentum: float = 0.0,
        velocity: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._params = params
        self._lr = lr
        self._momentum = momentum
        if velocity is None and momentum:
            velocity = _zeros(params)
        self._velocity = velocity or {}

    def begin(self) -> None:
        """Do nothing: SGD has no state of a step."""

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """Step θ by −lr·v.

        Args:
            name: the parameter, (b, …).
            gradient: its gradient, (k, …).
        """
        k = len(gradient)
        if self._momentum:
            velocity = self._velocity[name][:k]
            gradient = velocity.mul_(self._momentum).add_(gradient)
        self._params[name][:k].sub_(gradient, alpha=self._lr)

    def product(self, name: str, lhs: torch.Tensor, rhs: torch.Tensor) -> None:
        """Step θ with the product accumulated in place, so that no gradient is stored.

        Args:
            name: the parameter, (b, o, i).
            lhs: (k, o, n).
            rhs: (k, n, i).
        """
        k = len(lhs)
        weights = self._params[name][:k]
        if not self._momentum:
            weights.baddbmm_(lhs, rhs, alpha=-self._lr)
            return
        velocity = self._velocity[name][:k]
        velocity.baddbmm_(lhs, rhs, beta=self._momentum)
        weights.sub_(velocity, alpha=self._lr)


class Adam:
    """Adam, as `torch.optim.Adam` with its default betas and epsilon.

    Args:
        params: θ by name, changed in place.
        lr: learning rate.
    """

    def __init__(self, params: Mapping[str, torch.Tensor], lr: float) -> None:
        self._params = params
        self._lr = lr
        self._t = 0
        self._mean = _zeros(params)
        self._square = _zeros(params)

    def begin(self) -> None:
        """Count the step, for the bias correction."""
        # One count serves all rows: a client in this step was in all steps before it.
        self._t += 1

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """Step θ by −lr·m̂/(√v̂ + ε).

        Args:
            name: the parameter, (b, …).
            gradient: its gradient, (k, …).
        """
        k = len(gradient)
        mean = self._mean[name][:k]
        # Written out, since 1 − 0.9 is not 0.1 in float64.
        mean.mul_(BETA_1).add_(gradient, alpha=0.1)
        square = self._square[name][:k]
        square.mul_(BETA_2).addcmul_(gradient, gradient, value=0.001)
        corrected = square / (1 - BETA_2**self._t)
        scale = corrected.sqrt_().add_(EPSILON)
        step = -self._lr / (1 - BETA_1**self._t)
        self._params[name][:k].addcdiv_(mean, scale, value=step)

    def product(self, name: str, lhs: torch.Tensor, rhs: torch.Tensor) -> None:
        """Step θ by the product's values, whose squares Adam needs.

        Args:
            name: the parameter, (b, o, i).
            lhs: (k, o, n).
            rhs: (k, n, i).
        """
        self.value(name, torch.bmm(lhs, rhs))


class _WithTerm:
    """An optimizer of the loss plus a term that depends on no sample.

    Args:
        optimizer: makes the steps.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def begin(self) -> None:
        """Begin a new step."""
        self._optimizer.begin()

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """Step θ by the gradient plus that of the term.

        Args:
            name: the parameter, (b, …).
            gradient: its gradient, (k, …).
        """
        raise NotImplementedError

    def product(self, name: str, lhs: torch.Tensor, rhs: torch.Tensor) -> None:
        """Step θ by the product's values plus the gradient of the term.

        Args:
            name: the parameter, (b, o, i).
            lhs: (k, o, n).
            rhs: (k, n, i).
        """
        self.value(name, torch.bmm(lhs, rhs))


class MeanRegularized(_WithTerm):
    """An optimizer of the loss plus λ/2 ‖θ − θ̄‖², whose gradient is λ(θ − θ̄).

    With θ̄ = 0 it is weight decay, as `torch.optim` has it.

    Args:
        optimizer: makes the steps.
        params: θ by name, which the optimizer changes in place.
        means: θ̄ by name, shaped as the parameters; None for 0.
        strength: λ.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Mapping[str, torch.Tensor],
        means: Mapping[str, torch.Tensor] | None,
        strength: float,
    ) -> None:
        super().__init__(optimizer)
        self._params = params
        self._means = means
        self._strength = strength

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """Step θ by the gradient plus λ(θ − θ̄).

        Args:
            name: the parameter, (b, …).
            gradient: its gradient, (k, …).
        """
        k = len(gradient)
        offset = self._params[name][:k]
        if self._means is not None:
            offset = offset - self._means[name][:k]
        regularized = gradient.add(offset, alpha=self._strength)
        self._optimizer.value(name, regularized)


class Corrected(_WithTerm):
    """An optimizer of the loss plus ⟨g, θ⟩, whose gradient is g.

    Args:
        optimizer: makes the steps.
        correction: g by name, shaped as the parameters.
    """

    def __init__(self, optimizer: Optimizer, correction: Mapping[str, torch.Tensor]) -> None:
        super().__init__(optimizer)
        self._correction = correction

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """Step θ by the gradient plus g.

        Args:
            name: the parameter, (b, …).
            gradient: its gradient, (k, …).
        """
        self._optimizer.value(name, gradient + self._correction[name][: len(gradient)])


OPTIMIZERS = ("sgd", "adam")


def build(
    name: str,
    params: Mapping[str, torch.Tensor],
    lr: float,
    momentum: float = 0.0,
    velocity: Mapping[str, torch.Tensor] | None = None,
) -> Optimizer:
    """Return the named optimizer.

    Args:
        name: one of `OPTIMIZERS`.
        params: parameters (b, …) by name, changed in place.
        lr: learning rate.
        momentum: momentum of sgd.
        velocity: momentum buffers of sgd to continue from, changed in place.

    Raises:
        UsageError: an unknown name.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    if name == "adam":
        return Adam(params, lr)
    return Sgd(params, lr, momentum, velocity)


class LastingRows:
    """Rows of clients, which persist between their trainings.

    A training that is requested again, after its reply was lost, starts from the row that it
    started from before. So each client has two rows, and the number of the call between them.

    Args:
        clients: number of clients.
        first: that each client begins with, (n,).
        name: under which checkpoints have the rows.
        what: they are, in words.
    """

    def __init__(self, clients: int, first: torch.Tensor, name: str, what: str) -> None:
        self._first = first
        self._before = first.repeat(clients, 1)
        self._after = first.repeat(clients, 1)
        self._calls = [-1] * clients
        self._name = name
        self._what = what

    def begin(self, positions: Sequence[int], call: int) -> None:
        """Record that clients train in a call, for the first time or again.

        Args:
            positions: the b clients' positions.
            call: number of the call.

        Raises:
            PolicyError: a client has trained in a later call, and its earlier buffer is lost.
        """
        if any(self._calls[position] > call for position in positions):
            raise PolicyError(
                "a client has trained for a later request than this one, and keeps its "
                f"{self._what} since then: the request comes too late, or from a server that "
                "started over without its checkpoint"
            )
        for position in positions:
            # In a repeated call the row before it is still the start.
            if self._calls[position] < call:
                self._before[position] = self._after[position]
                self._calls[position] = call

    def start(self, positions: Sequence[int]) -> torch.Tensor:
        """Return a copy of the rows (b, n) that the current training starts from.

        Args:
            positions: the b clients' positions.
        """
        return self._before[list(positions)]

    def latest(self, positions: Sequence[int]) -> torch.Tensor:
        """Return a copy of the rows (b, n) after the last training.

        Args:
            positions: the b clients' positions.
        """
        return self._after[list(positions)]

    def end(self, positions: Sequence[int], buffers: torch.Tensor) -> None:
        """Store the rows at the end of a training.

        Args:
            positions: the b clients' positions.
            buffers: (b, n).
        """
        # A row that has diverged would never recover: it starts anew.
        finite = buffers.isfinite().all(1, keepdim=True)
        self._after[list(positions)] = torch.where(finite, buffers, self._first)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return everything that a later training depends on, by name."""
        return {
            self._name: self._after,
            f"{self._name}_before": self._before,
            f"{self._name}_calls": torch.tensor(self._calls, dtype=torch.int64),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `memory` returned.

        Args:
            memory: tensors by name.
        """
        # Copies, since training changes the rows in place.
        self._after = memory[self._name].to(self._after, copy=True)
        self._before = memory[f"{self._name}_before"].to(self._before, copy=True)
        self._calls = memory[f"{self._name}_calls"].tolist()


class Momenta(LastingRows):
    """Momentum buffers of clients, which persist between their trainings.

    Args:
        clients: number of clients.
        prototype: a model (d,) of the buffers' type and device.
    """

    def __init__(self, clients: int, prototype: torch.Tensor) -> None:
        super().__init__(clients, torch.zeros_like(prototype), "momentum", "momentum")


def _zeros(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(value) for name, value in params.items()}
