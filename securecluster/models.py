"""The networks, and the flat-vector view of any `nn.Module`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import nn

from securecluster.errors import UsageError, unknown
from securecluster.randomness import Randomness


def mlp(shape: tuple[int, ...], classes: int, hidden: int = 64) -> nn.Module:
    """Input-`hidden`-`classes` with ReLU."""
    width = int(torch.Size(shape).numel())
    return nn.Sequential(nn.Flatten(), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, classes))


def linear(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression."""
    return nn.Sequential(nn.Flatten(), nn.Linear(int(torch.Size(shape).numel()), classes))


MODELS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {
    "mlp": mlp,
    "mlp-200": partial(mlp, hidden=200),  # as in Vardhan et al. 2024
    "linear": linear,
}


@dataclass(frozen=True)
class FlatModel:
    """A module as a function of one flat parameter vector, in the order of `module.named_parameters()`."""

    module: nn.Module
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @property
    def dimension(self) -> int:
        """d, the number of parameters."""
        return sum(s.numel() for s in self.shapes)

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Parameters by name as views into flat rows (…, d) -> (…, *shape)."""
        parts = torch.split(flat, [s.numel() for s in self.shapes], dim=-1)
        return {n: p.view(*flat.shape[:-1], *s) for n, p, s in zip(self.names, parts, self.shapes, strict=True)}

    def stacked(self, flat: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Outputs (b, n, …) of b models, rows of flat (b, d), each on its own samples x (b, n, …).

        Any module goes through `torch.func`; stacks of Flatten, Linear and ReLU take the same steps as batched matrix products.
        """
        views = self.views(flat)
        if self._dense:
            return self._stacked_dense(views, x)
        outputs: torch.Tensor = torch.func.vmap(self.call)(views, x)
        return outputs

    def call(self, views: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """The module's output on x (n, …) with these parameters."""
        named = {name: views[first] for name, first in self._places.items()}
        # torch's own tie_weights leaves a module that is used twice with a stranger's tensor
        outputs: torch.Tensor = torch.func.functional_call(self.module, named, (x,), tie_weights=False)
        return outputs

    @cached_property
    def _places(self) -> dict[str, str]:
        """Every place that holds a parameter -> the parameter's first name (another one where weights are tied)."""
        first = {id(p): name for name, p in self.module.named_parameters()}
        modules = self.module.named_modules()
        return {f"{m}.{n}".lstrip("."): first[id(p)] for m, module in modules for n, p in module._parameters.items() if p is not None}

    @property
    def _dense(self) -> bool:
        if not isinstance(self.module, nn.Sequential) or not len(self.module) or type(self.module[0]) is not nn.Flatten:
            return False
        first, *rest = self.module
        return (first.start_dim, first.end_dim) == (1, -1) and all(
            type(layer) is nn.ReLU or (type(layer) is nn.Linear and layer.bias is not None and rest.count(layer) == 1) for layer in rest
        )

    def _stacked_dense(self, views: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        for name, layer in self.module._modules.items():
            if isinstance(layer, nn.Flatten):
                x = x.flatten(2)
            elif isinstance(layer, nn.ReLU):
                x = x.relu()
            else:
                x = torch.baddbmm(views[f"{name}.bias"][:, None], x, views[f"{name}.weight"].mT)
        return x

    def initial(self) -> torch.Tensor:
        """The module's own parameters as one vector (d,)."""
        return torch.cat([p.detach().flatten() for p in self.module.parameters()])


def build(name: str, shape: tuple[int, ...], classes: int, randomness: Randomness) -> FlatModel:
    """The named network with its initial weights drawn from (seed, "model").

    Raises:
        UsageError: an unknown name, or a network with buffers (batch norm statistics), which has no meaning as one averaged vector.
    """
    if name not in MODELS:
        raise unknown("model", name, MODELS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.integer("model"))
        module = MODELS[name](shape, classes)
    if list(module.buffers()) or any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules()):
        raise UsageError(f"model {name!r} keeps running statistics, which clients cannot average: use group norm instead of batch norm")
    named = dict(module.named_parameters())
    return FlatModel(module, tuple(named), tuple(p.shape for p in named.values()))
