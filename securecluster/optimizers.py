"""Optimizers of many clients at once: every tensor has a leading client axis, and a step may concern only the first rows.

`params` maps a name to a tensor (b, …). A gradient arrives as values, or as a matrix product that need never be stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from securecluster.backend import torch
from securecluster.errors import UsageError


class Optimizer(Protocol):
    """One step is `begin`, then `value` or `product` once for each parameter."""

    def begin(self) -> None:
        """A new step."""
        ...

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """The gradient (k, …) of the first k rows of a parameter."""
        ...

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """The gradient left @ right, (k, o, n) @ (k, n, i), of the first k rows of a parameter (b, o, i)."""
        ...


class Sgd:
    """SGD with momentum, as `torch.optim.SGD`: v ← μv + g, θ ← θ − lr·v."""

    def __init__(self, params: Mapping[str, torch.Tensor], lr: float, momentum: float = 0.0) -> None:
        self._params, self._lr, self._momentum = params, lr, momentum
        self._velocity = {name: torch.zeros_like(p) for name, p in params.items()} if momentum else {}

    def begin(self) -> None:
        """Nothing changes from step to step."""

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """θ ← θ − lr·v."""
        k = len(gradient)
        if self._momentum:
            gradient = self._velocity[name][:k].mul_(self._momentum).add_(gradient)
        self._params[name][:k].sub_(gradient, alpha=self._lr)

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """The same, with the product accumulated where it is needed."""
        k = len(left)
        if self._momentum:
            velocity = self._velocity[name][:k].baddbmm_(left, right, beta=self._momentum)
            self._params[name][:k].sub_(velocity, alpha=self._lr)
        else:
            self._params[name][:k].baddbmm_(left, right, alpha=-self._lr)


class Adam:
    """Adam, as `torch.optim.Adam` with its default betas and epsilon."""

    def __init__(self, params: Mapping[str, torch.Tensor], lr: float) -> None:
        self._params, self._lr, self._t = params, lr, 0
        self._mean = {name: torch.zeros_like(p) for name, p in params.items()}
        self._square = {name: torch.zeros_like(p) for name, p in params.items()}

    def begin(self) -> None:
        """The number of the step, for the bias correction; whoever takes part in it has taken part in all before."""
        self._t += 1

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """θ ← θ − lr·m̂/(√v̂ + 1e-8)."""
        k = len(gradient)
        mean = self._mean[name][:k].mul_(0.9).add_(gradient, alpha=0.1)
        square = self._square[name][:k].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        scale = (square / (1 - 0.999**self._t)).sqrt_().add_(1e-8)
        self._params[name][:k].addcdiv_(mean, scale, value=-self._lr / (1 - 0.9**self._t))

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """Adam needs the values."""
        self.value(name, torch.bmm(left, right))


OPTIMIZERS = ("sgd", "adam")


def build(name: str, params: Mapping[str, torch.Tensor], lr: float, momentum: float = 0.0) -> Optimizer:
    """The named optimizer over `params`.

    Raises:
        UsageError: an unknown name.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    return Sgd(params, lr, momentum) if name == "sgd" else Adam(params, lr)
