"""Optimizers of many clients at once: every tensor has a leading client axis, and a step may
concern only the first rows.

`params` maps a name to a tensor (b, …). A gradient arrives as values, or as a matrix product that
need never be stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError, UsageError


class Optimizer(Protocol):
    """One step is `begin`, then `value` or `product` once for each parameter."""

    def begin(self) -> None:
        """A new step."""
        ...

    def value(self, name: str, gradient: torch.Tensor) -> None:
        """The gradient (k, …) of the first k rows of a parameter."""
        ...

    def product(self, name: str, left: torch.Tensor, right: torch.Tensor) -> None:
        """The gradient left @ right, (k, o, n) @ (k, n, i), of the first k rows of a parameter (b,
        o, i).
        """
        ...


class Sgd:
    """SGD with momentum, as `torch.optim.SGD`: v ← μv + g, θ ← θ − lr·v.

    Args:
        velocity: v by name, shaped as the parameters and changed in place; None starts from zero.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        lr: float,
        momentum: float = 0.0,
        velocity: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._params, self._lr, self._momentum = params, lr, momentum
        if velocity is None and momentum:
            velocity = {name: torch.zeros_like(p) for name, p in params.items()}
        self._velocity = velocity or {}

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
        """The number of the step, for the bias correction; whoever takes part in it has taken part
        in all before.
        """
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


def build(
    name: str,
    params: Mapping[str, torch.Tensor],
    lr: float,
    momentum: float = 0.0,
    velocity: Mapping[str, torch.Tensor] | None = None,
) -> Optimizer:
    """The named optimizer over `params`.

    Args:
        velocity: momentum buffers of sgd to go on from, changed in place.

    Raises:
        UsageError: an unknown name.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"unknown optimizer {name!r}: choose one of {', '.join(OPTIMIZERS)}")
    return Sgd(params, lr, momentum, velocity) if name == "sgd" else Adam(params, lr)


class Momenta:
    """Momentum buffers of clients, which live on between their trainings.

    A training that is asked for again, after its reply was lost, starts from the buffer that it
    started from before. So each client has two, and the number of the call that lies between them.

    Args:
        clients: how many.
        like: a model (d,), whose type and device buffers have.
    """

    def __init__(self, clients: int, like: torch.Tensor) -> None:
        self._before = like.new_zeros(clients, len(like))
        self._after = like.new_zeros(clients, len(like))
        self._calls = [-1] * clients

    def begin(self, who: Sequence[int], call: int) -> None:
        """Note that clients at positions `who` train in a call, for the first time or again.

        Raises:
            PolicyError: a client has trained in a later call, and its earlier buffer is gone.
        """
        if any(self._calls[k] > call for k in who):
            raise PolicyError(
                "a client has trained for a later request than this one, and keeps its momentum "
                "since then: the request comes too late, or from a server that started over "
                "without its checkpoint"
            )
        for k in who:
            if self._calls[k] < call:
                self._before[k] = self._after[k]
                self._calls[k] = call

    def start(self, who: Sequence[int]) -> torch.Tensor:
        """Return the buffers (b, d) that the training which has begun starts from, as a copy."""
        return self._before[list(who)]

    def end(self, who: Sequence[int], buffers: torch.Tensor) -> None:
        """Keep the buffers (b, d) at the end of a training; one that is not finite starts anew."""
        finite = buffers.isfinite().all(1, keepdim=True)
        self._after[list(who)] = torch.where(finite, buffers, 0.0)

    def memory(self) -> dict[str, torch.Tensor]:
        """Return everything that a later training depends on, by name."""
        return {
            "momentum": self._after,
            "momentum_before": self._before,
            "momentum_calls": torch.tensor(self._calls, dtype=torch.int64),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned."""
        self._after = memory["momentum"].to(self._after, copy=True)
        self._before = memory["momentum_before"].to(self._before, copy=True)
        self._calls = memory["momentum_calls"].tolist()
