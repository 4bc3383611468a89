"""The flat-vector view of any `nn.Module`, alone and for many parameter vectors at once."""

from __future__ import annotations

import copy
import textwrap
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from securecluster.core.randomness import Part, Randomness
from securecluster.errors import UsageError
from securecluster.models.dropout import SeededDropout, seeded
from securecluster.models.fused_layers import Stack, compile_stack
from securecluster.models.objectives import CLASSIFICATION, Classification, Objective

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FlatModel:
    """A module as a function of one flat parameter vector, in the order of
    `module.named_parameters()`.

    Frozen parameters (`requires_grad` False) are no part of the vector: they stay as they are and
    are never sent.

    Args:
        together: whether `torch.vmap` takes it; if not, clients train one after the other.
        objective: what it learns.
    """

    module: nn.Module
    together: bool = True
    objective: Objective = CLASSIFICATION

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Name -> shape of the parameters that train."""
        return {name: p.shape for name, p in self.module.named_parameters() if p.requires_grad}

    @cached_property
    def dimension(self) -> int:
        """d, the number of parameters."""
        return sum(s.numel() for s in self.shapes.values())

    @cached_property
    def stack(self) -> Stack | None:
        """The same computation with gradients by hand, where the module is a common stack of
        layers.
        """
        plain = isinstance(self.objective, Classification) and all(
            p.requires_grad for p in self.module.parameters()
        )
        return compile_stack(self.module) if plain else None

    @cached_property
    def convolves(self) -> bool:
        """Whether it has convolutions: for many clients at once these become grouped ones, which
        CPUs are slow at.
        """
        return any(isinstance(part, nn.modules.conv._ConvNd) for part in self.module.modules())

    @cached_property
    def dropouts(self) -> list[SeededDropout]:
        """The layers that want a key in training."""
        return [part for part in self.module.modules() if isinstance(part, SeededDropout)]

    def views(self, flat: torch.Tensor) -> Params:
        """Parameters by name as views into flat rows (…, d) -> (…, *shape)."""
        parts = torch.split(flat, [s.numel() for s in self.shapes.values()], dim=-1)
        return {
            n: p.view((*flat.shape[:-1], *s))
            for (n, s), p in zip(self.shapes.items(), parts, strict=True)
        }

    def call(self, views: Params, x: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
        """The module's output on x (n, …) with these parameters; dropout is drawn from `key`, or
        off without one.
        """
        named = {place: views[first] for place, first in self._places.items()}
        try:
            with seeded(self.dropouts, key):
                # torch's own tie_weights leaves a module that is used twice with a stranger's
                # tensor
                outputs: torch.Tensor = torch.func.functional_call(
                    self.module, named, (x,), tie_weights=False
                )
        except Exception as error:  # a user's own forward pass may raise anything
            name = type(self.module).__name__
            raise UsageError(
                f"{name} does not take samples of shape {tuple(x.shape[1:])}: {reason(error)}"
            ) from error
        return outputs

    def stacked(
        self, views: Params, x: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Outputs (b, n, …) of b models, views (b, *shape), each on its own samples x (b, n, …),
        with its own key (b,).
        """
        if len(x) == 1:
            return self.call(
                {n: v[0] for n, v in views.items()}, x[0], None if keys is None else keys[0]
            )[None]
        arguments = (views, x) if keys is None else (views, x, keys)
        outputs: torch.Tensor = torch.func.vmap(self.call)(*arguments)
        return outputs

    def gradients(
        self,
        views: Params,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        keys: torch.Tensor | None,
    ) -> Params:
        """Of b models' weighted losses, by name: one backward of their sum, for no parameter is
        shared.

        Args:
            views: (b, *shape). x: (b, n, …). y: targets (b, n, …). weight: of each loss, (b, n).
        """
        with torch.enable_grad():  # whatever mode the caller is in
            leaves = {name: p.detach().requires_grad_() for name, p in views.items()}
            outputs = self.stacked(leaves, x, keys)
            losses = self.objective.losses(outputs.flatten(0, 1), y.flatten(0, 1)).view(
                weight.shape
            )
            found = torch.autograd.grad(
                (losses * weight).sum(), list(leaves.values()), materialize_grads=True
            )
        return dict(zip(leaves, found, strict=True))

    @cached_property
    def _places(self) -> dict[str, str]:
        """Every place that holds a parameter -> the parameter's first name (another one where
        weights are tied).
        """
        first = {id(p): name for name, p in self.module.named_parameters() if p.requires_grad}
        places = (
            (f"{m}.{n}".lstrip("."), p)
            for m, module in self.module.named_modules()
            for n, p in module._parameters.items()
        )
        return {place: first[id(p)] for place, p in places if p is not None and p.requires_grad}

    def initial(self) -> torch.Tensor:
        """The module's own parameters as one vector (d,)."""
        return torch.cat(
            [p.detach().flatten() for p in self.module.parameters() if p.requires_grad]
        )

    def redrawn(self, randomness: Randomness, *path: Part) -> torch.Tensor:
        """Initial weights drawn anew from (seed, *path) by the layers' own `reset_parameters`,
        (d,).

        A tied weight is drawn by the layer that has it under its first name.

        Raises:
            UsageError: a parameter that no `reset_parameters` draws.
        """
        module = copy.deepcopy(self.module).float().cpu()
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(randomness.integer(*path))
            for p in own.values():
                p.fill_(torch.nan)
            # a whole may draw over what its parts drew
            for name, part in reversed(list(module.named_modules())):
                tied = [
                    (p, p.clone())
                    for n, p in part.named_parameters(recurse=False)
                    if f"{name}.{n}".lstrip(".") not in own
                ]
                _reset(name, part)
                for p, value in tied:
                    p.copy_(value)
        undrawn = [name for name, p in own.items() if not bool(p.isfinite().all())]
        if undrawn:
            raise UsageError(
                f"the parameter {undrawn[0]!r} of {type(module).__name__} cannot be drawn anew: "
                "give its layer a method reset_parameters"
            )
        return FlatModel(module).initial().to(self.initial())

    def state_dict(self, flat: torch.Tensor) -> dict[str, Any]:
        """The module's own `state_dict` with these parameters (d,): what is frozen and constant is
        in it, tied weights under each name.
        """
        views, names = self.views(flat), {id(p): name for name, p in self.module.named_parameters()}
        state = {
            place: views.get(names.get(id(value), ""), value)
            for place, value in self.module.state_dict(keep_vars=True).items()
        }
        return {
            place: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
            for place, value in state.items()
        }

    def to(self, device: torch.device, dtype: torch.dtype) -> FlatModel:
        """A copy of its own, whose frozen parameters and constants lie where the data do."""
        return replace(self, module=copy.deepcopy(self.module).to(device, dtype))

    def copy(self) -> FlatModel:
        """One that another thread may call at the same time."""
        return replace(self, module=copy.deepcopy(self.module))


def _reset(name: str, part: nn.Module) -> None:
    # nn.MultiheadAttention's own
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
    try:
        if callable(reset):
            reset()
    except Exception as error:  # a user's own code
        raise UsageError(
            f"reset_parameters of {name or 'the model'} ({type(part).__name__}) fails: "
            f"{reason(error)}"
        ) from error


def reason(error: Exception) -> str:
    """What a user's own code raised, in one line."""
    return (
        textwrap.shorten((str(error).splitlines() or [""])[0], 200, placeholder=" …")
        or type(error).__name__
    )
