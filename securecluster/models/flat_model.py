"""Any `nn.Module` as a function of a flat parameter vector, or of many of them at once."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from securecluster.core.devices import global_generator
from securecluster.core.randomness import Part, Randomness
from securecluster.errors import UsageError, text_of
from securecluster.models.dropout import SeededDropout, seeded
from securecluster.models.fused_layers import (
    Gradients,
    Stack,
    compile_stack,
    cross_entropy_gradient,
)
from securecluster.models.objectives import (
    CLASSIFICATION,
    Classification,
    MultiLabel,
    Objective,
    Regression,
)

Params = dict[str, torch.Tensor]
NORMALIZATION = "norm"  # all layers that normalise, among names of local ones


@dataclass(frozen=True)
class FlatModel:
    """A module as a function of one flat parameter vector.

    The vector is in the order of `module.named_parameters()`. Frozen parameters (`requires_grad`
    False) are not part of it: they stay as they are and are never sent. Local ones are trained and
    stay with each client: a whole vector has them, too, at their places in that order.

    Args:
        module: the module.
        together: True if `torch.vmap` supports the module; otherwise clients train one after the
            other.
        objective: its learning objective.
        local: names of the parameters that stay with each client.
        starts: vectors (d,) that a run's first models begin with, where they are not drawn.
    """

    module: nn.Module
    together: bool = True
    objective: Objective = CLASSIFICATION
    local: tuple[str, ...] = ()
    starts: tuple[torch.Tensor, ...] = ()

    @cached_property
    def whole_shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of all trainable parameters by name, local ones included."""
        trainable = _trainable(self.module)
        return {name: parameter.shape for name, parameter in trainable.items()}

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """Return the shapes of the trainable parameters that are averaged, by name."""
        shapes = self.whole_shapes
        return {name: shape for name, shape in shapes.items() if name not in self.local}

    @cached_property
    def dimension(self) -> int:
        """Return d, the number of trainable parameters that are averaged."""
        return sum(shape.numel() for shape in self.shapes.values())

    @cached_property
    def whole_dimension(self) -> int:
        """Return the number of all trainable parameters."""
        return sum(shape.numel() for shape in self.whole_shapes.values())

    @cached_property
    def is_local(self) -> torch.Tensor:
        """Return which numbers of a whole vector stay with a client, (whole dimension,) bool."""
        parts = []
        for name, shape in self.whole_shapes.items():
            parts.append(torch.full((shape.numel(),), name in self.local))
        return torch.cat(parts)

    def parts(self, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what of whole vectors is averaged, (…, d), and what stays with a client.

        Args:
            whole: (…, whole dimension).
        """
        mask = self.is_local.to(whole.device)
        return whole[..., ~mask], whole[..., mask]

    def joined(self, shared: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return whole vectors of the two `parts`.

        Args:
            shared: (…, d).
            local: what stays with a client.
        """
        mask = self.is_local.to(shared.device)
        whole = shared.new_empty((*shared.shape[:-1], self.whole_dimension))
        whole[..., ~mask] = shared
        whole[..., mask] = local
        return whole

    @property
    def has_gradients(self) -> bool:
        """Return whether torch differentiates the outputs."""
        return bool(getattr(self.module, "has_gradients", True))

    @cached_property
    def stack(self) -> Stack | None:
        """Return the module as fused layers, or None if it is not a common stack of layers."""
        gradients: Gradients
        if isinstance(self.objective, Classification):
            gradients = cross_entropy_gradient
        elif isinstance(self.objective, Regression | MultiLabel):
            gradients = self.objective.output_gradients
        else:
            return None
        # Fused layers step all of their parameters.
        if not all(p.requires_grad for p in self.module.parameters()):
            return None
        return compile_stack(self.module, gradients)

    @cached_property
    def has_fixed_tensors(self) -> bool:
        """Return True if outputs depend on tensors that are not trained: buffers or frozen ones."""
        frozen = any(not parameter.requires_grad for parameter in self.module.parameters())
        return frozen or any(True for _ in self.module.buffers())

    @cached_property
    def convolves(self) -> bool:
        """Return True if the module has convolutions.

        For many clients at once these become grouped ones, which are slow on CPUs.
        """
        convolution = nn.modules.conv._ConvNd
        return any(isinstance(layer, convolution) for layer in self.module.modules())

    @cached_property
    def dropouts(self) -> list[SeededDropout]:
        """Return the layers that need a key in training."""
        return [layer for layer in self.module.modules() if isinstance(layer, SeededDropout)]

    def views(self, flat: torch.Tensor) -> Params:
        """Return parameters as views into flat vectors.

        Args:
            flat: (…, d), or whole vectors.

        Returns:
            Tensors (…, *shape) by name, which share the memory of `flat`.
        """
        shapes = self.shapes if flat.shape[-1] == self.dimension else self.whole_shapes
        sizes = [shape.numel() for shape in shapes.values()]
        pieces = torch.split(flat, sizes, dim=-1)
        leading_axes = flat.shape[:-1]
        views = {}
        for name, piece in zip(shapes, pieces, strict=True):
            views[name] = piece.view((*leading_axes, *shapes[name]))
        return views

    def call(self, views: Params, x: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
        """Return the module's outputs with given parameters.

        Args:
            views: parameters by name, as of `views`; local ones that are not among them are those
                that the module has.
            x: samples, (n, …).
            key: scalar int64 key of the dropout masks; None for no dropout.

        Returns:
            (n, …).

        Raises:
            UsageError: the forward pass fails.
        """
        names = self._first_names.items()
        named = {name: views[first] for name, first in names if first in views}
        try:
            with seeded(self.dropouts, key):
                # torch's own tie_weights leaves a module that is used twice with another
                # parameter's tensor.
                outputs: torch.Tensor = torch.func.functional_call(
                    self.module, named, (x,), tie_weights=False
                )
        except UsageError:  # of a model by the user's functions
            raise
        except Exception as error:  # a user's own forward pass may raise anything
            name = type(self.module).__name__
            raise UsageError(
                f"{name} does not take samples of shape {tuple(x.shape[1:])}: {reason(error)}"
            ) from error
        return outputs

    def stacked(
        self, views: Params, x: torch.Tensor, keys: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the outputs of b models, each on its own samples.

        Args:
            views: parameters (b, *shape) by name.
            x: samples, (b, n, …).
            keys: keys of the dropout masks, (b,) int64; None for no dropout.

        Returns:
            (b, n, …).
        """
        # A single model needs no vmap, which costs time and batches its products.
        if len(x) == 1:
            single = {name: view[0] for name, view in views.items()}
            key = None
            if keys is not None:
                key = keys[0]
            return self.call(single, x[0], key)[None]
        # vmap takes no None.
        arguments: tuple[Any, ...] = (views, x)
        if keys is not None:
            arguments = (views, x, keys)
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
        """Return the gradients of b models' weighted losses.

        Args:
            views: parameters (b, *shape) by name.
            x: samples, (b, n, …).
            y: targets, (b, n, …).
            weight: weight of each loss, (b, n).
            keys: keys of the dropout masks, (b,) int64; None for no dropout.

        Returns:
            Gradients (b, *shape) by name.
        """
        with torch.enable_grad():  # whatever mode the caller is in
            leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
            outputs = self.stacked(leaves, x, keys)
            # The objective knows one axis of samples.
            flat_outputs = outputs.flatten(0, 1)
            flat_targets = y.flatten(0, 1)
            losses = self.objective.losses(flat_outputs, flat_targets)
            weighted = losses.view(weight.shape) * weight
            # One backward pass of the sum gives each model its own gradient, since models share no
            # parameter.
            gradients = torch.autograd.grad(
                weighted.sum(), list(leaves.values()), materialize_grads=True
            )
        return dict(zip(leaves, gradients, strict=True))

    @cached_property
    def _first_names(self) -> dict[str, str]:
        """Return, for every name of a trainable parameter, the name it has in `shapes`.

        The two differ for a parameter with several names (tied weights), which is listed once.
        """
        trainable = _trainable(self.module)
        first = {id(parameter): name for name, parameter in trainable.items()}
        names = {}
        for prefix, module in self.module.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    names[_joined(prefix, name)] = first[id(parameter)]
        return names

    def initial(self) -> torch.Tensor:
        """Return the module's own parameters as one vector (d,)."""
        return self._flattened(self.shapes)

    def whole_initial(self) -> torch.Tensor:
        """Return the module's own parameters, local ones included, as one whole vector."""
        return self._flattened(self.whole_shapes)

    def _flattened(self, names: Iterable[str]) -> torch.Tensor:
        trainable = _trainable(self.module)
        return torch.cat([trainable[name].detach().flatten() for name in names])

    def beginning(self, starts: Sequence[torch.Tensor]) -> FlatModel:
        """Return the model with other initial weights.

        Args:
            starts: (d,) of each of a run's first models, of which the first is θ_0.
        """
        module = copy.deepcopy(self.module)
        views = self.views(starts[0])
        trainable = _trainable(module)
        with torch.no_grad():
            for name, view in views.items():
                trainable[name].copy_(view)
        return replace(self, module=module, starts=tuple(starts))

    def redrawn(self, randomness: Randomness, *path: Part) -> torch.Tensor:
        """Draw initial weights anew by the layers' own `reset_parameters`.

        The first models of a run that starts from an earlier one are its models.
        A tied weight is drawn by the layer that has it under its first name.

        Args:
            randomness: source of the seed.
            path: the seed's path below it.

        Returns:
            (d,), of the type and device of `initial`.

        Raises:
            UsageError: a parameter that no `reset_parameters` draws.
        """
        if path[:2] == ("start", 0) and int(path[-1]) < len(self.starts):
            return self.starts[int(path[-1])].to(self.initial())
        module = copy.deepcopy(self.module).float().cpu()
        trainable = _trainable(module)
        with torch.no_grad(), global_generator(randomness.integer(*path)):
            # What is still NaN at the end was drawn by no layer.
            for parameter in trainable.values():
                parameter.fill_(torch.nan)
            # Inner layers first: an outer module may draw again what its layers drew.
            for name, layer in reversed(list(module.named_modules())):
                _reset_first_named(name, layer, trainable)
        for name, parameter in trainable.items():
            if not bool(parameter.isfinite().all()):
                raise UsageError(
                    f"the parameter {name!r} of {type(module).__name__} cannot be drawn anew: "
                    "give its layer a method reset_parameters"
                )
        return FlatModel(module, local=self.local).initial().to(self.initial())

    def state_dict(self, flat: torch.Tensor) -> dict[str, Any]:
        """Return the module's `state_dict` with given parameters.

        It has frozen parameters and constants, too, and tied weights under each name.

        Args:
            flat: parameters, (d,), beside which local ones are the module's own; or a whole vector.
        """
        views = self.views(flat)
        names = {id(p): name for name, p in self.module.named_parameters()}
        state: dict[str, Any] = {}
        for key, stored in self.module.state_dict(keep_vars=True).items():
            name = names.get(id(stored), "")
            value = views.get(name, stored)
            # get_extra_state may return anything.
            if isinstance(value, torch.Tensor):
                value = value.detach().cpu().clone()
            state[key] = value
        return state

    def to(self, device: torch.device, dtype: torch.dtype) -> FlatModel:
        """Return a copy whose frozen parameters and constants are where the data are.

        Args:
            device: device of the data.
            dtype: type of the data.
        """
        # Of its own, since nn.Module.to changes the module in place.
        module = copy.deepcopy(self.module)
        return replace(self, module=module.to(device, dtype))

    def with_local(self, names: Sequence[str]) -> FlatModel:
        """Return a copy some of whose layers stay with each client.

        Args:
            names: of parameters or layers; "norm" is all layers that normalise.

        Raises:
            UsageError: a name of nothing that trains, or all that trains.
        """
        if not names:
            return self
        local: dict[str, None] = {}
        for name in names:
            found = [p for p in self.whole_shapes if p == name or p.startswith(f"{name}.")]
            if name == NORMALIZATION:
                layers = dict(self.module.named_modules())
                found = [p for p in self.whole_shapes if _normalizes(layers[p.rpartition(".")[0]])]
            if not found:
                raise UsageError(
                    f"local_layers names {name!r}, which is nothing that trains: the parameters "
                    f"are {', '.join(self.whole_shapes)}"
                )
            local |= dict.fromkeys(found)
        if len(local) == len(self.whole_shapes):
            raise UsageError(
                "local_layers are all that trains, so that nothing is shared: leave some out, or "
                "take the protocol local"
            )
        return replace(self, local=tuple(name for name in self.whole_shapes if name in local))

    def copy(self) -> FlatModel:
        """Return a copy that another thread may call at the same time.

        Both have the same frozen parameters and constants, which no call changes.
        """
        shared = {id(buffer): buffer for buffer in self.module.buffers()}
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                shared[id(parameter)] = parameter
        # A forward pass sets the dropout layers' keys, so threads must not share them.
        return replace(self, module=copy.deepcopy(self.module, shared))


def _normalizes(layer: nn.Module) -> bool:
    """Return whether a layer normalises its inputs."""
    kinds = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
    return isinstance(layer, kinds)


def _trainable(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by their first names."""
    named = module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def _joined(prefix: str, name: str) -> str:
    """Return a parameter's qualified name; the root module has the prefix ""."""
    return f"{prefix}.{name}".lstrip(".")


def _reset_first_named(name: str, layer: nn.Module, trainable: Mapping[str, torch.Tensor]) -> None:
    """Reset a layer, but not the tied weights whose first name is in another layer.

    Args:
        name: the layer's name.
        layer: the layer.
        trainable: the trainable parameters by their first names.
    """
    tied = []
    for parameter_name, parameter in layer.named_parameters(recurse=False):
        if _joined(name, parameter_name) not in trainable:
            tied.append((parameter, parameter.clone()))
    _reset(name, layer)
    for parameter, value in tied:
        parameter.copy_(value)


def _reset(name: str, layer: nn.Module) -> None:
    """Call a layer's `reset_parameters`, if it has one; raise UsageError if it fails."""
    reset = getattr(layer, "reset_parameters", None)
    # nn.MultiheadAttention has a private one.
    reset = reset or getattr(layer, "_reset_parameters", None)
    try:
        if callable(reset):
            reset()
    except UsageError:
        raise
    except Exception as error:  # a user's own code
        raise UsageError(
            f"reset_parameters of {name or 'the model'} ({type(layer).__name__}) fails: "
            f"{reason(error)}"
        ) from error


def reason(error: BaseException) -> str:
    """Return what a user's own code raised, in one line.

    Args:
        error: the exception.
    """
    lines = text_of(error).splitlines() or [""]
    shortened = textwrap.shorten(lines[0], 200, placeholder=" …")
    return shortened or type(error).__name__
