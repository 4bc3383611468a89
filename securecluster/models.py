"""The flat-vector view of any `nn.Module`, alone and for many parameter vectors at once."""

from __future__ import annotations

import copy
import hashlib
import textwrap
import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from securecluster.dropout import SeededDropout, seeded, with_seeded_dropout
from securecluster.errors import UsageError, unknown
from securecluster.networks import NETWORKS, Shape
from securecluster.randomness import Part, Randomness
from securecluster.stacks import Stack, compile_stack

Params = dict[str, torch.Tensor]


@dataclass(frozen=True)
class FlatModel:
    """A module as a function of one flat parameter vector, in the order of `module.named_parameters()`.

    Frozen parameters (`requires_grad` False) are no part of the vector: they stay as they are and are never sent.

    Args:
        together: whether `torch.vmap` takes it; if not, clients train one after the other.
    """

    module: nn.Module
    together: bool = True

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
        """The same computation with gradients by hand, where the module is a common stack of layers."""
        frozen = any(not p.requires_grad for p in self.module.parameters())
        return None if frozen else compile_stack(self.module)

    @cached_property
    def convolves(self) -> bool:
        """Whether it has convolutions: for many clients at once these become grouped ones, which CPUs are slow at."""
        return any(isinstance(part, nn.modules.conv._ConvNd) for part in self.module.modules())

    @cached_property
    def dropouts(self) -> list[SeededDropout]:
        """The layers that want a key in training."""
        return [part for part in self.module.modules() if isinstance(part, SeededDropout)]

    def views(self, flat: torch.Tensor) -> Params:
        """Parameters by name as views into flat rows (…, d) -> (…, *shape)."""
        parts = torch.split(flat, [s.numel() for s in self.shapes.values()], dim=-1)
        return {n: p.view(*flat.shape[:-1], *s) for (n, s), p in zip(self.shapes.items(), parts, strict=True)}

    def call(self, views: Params, x: torch.Tensor, key: torch.Tensor | None = None) -> torch.Tensor:
        """The module's output on x (n, …) with these parameters; dropout is drawn from `key`, or off without one."""
        named = {place: views[first] for place, first in self._places.items()}
        try:
            with seeded(self.dropouts, key):
                # torch's own tie_weights leaves a module that is used twice with a stranger's tensor
                outputs: torch.Tensor = torch.func.functional_call(self.module, named, (x,), tie_weights=False)
        except Exception as error:  # a user's own forward pass may raise anything
            name = type(self.module).__name__
            raise UsageError(f"{name} does not take samples of shape {tuple(x.shape[1:])}: {_reason(error)}") from error
        return outputs

    def stacked(self, views: Params, x: torch.Tensor, keys: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs (b, n, …) of b models, views (b, *shape), each on its own samples x (b, n, …), with its own key (b,)."""
        if len(x) == 1:
            return self.call({n: v[0] for n, v in views.items()}, x[0], None if keys is None else keys[0])[None]
        arguments = (views, x) if keys is None else (views, x, keys)
        outputs: torch.Tensor = torch.func.vmap(self.call)(*arguments)
        return outputs

    def gradients(self, views: Params, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, keys: torch.Tensor | None) -> Params:
        """Of b models' weighted cross-entropy losses, by name: one backward of their sum, for no parameter is shared.

        Args:
            views: (b, *shape). x: (b, n, …). y: labels (b, n). weight: of each loss, (b, n).
        """
        with torch.enable_grad():  # whatever mode the caller is in
            leaves = {name: p.detach().requires_grad_() for name, p in views.items()}
            logits = self.stacked(leaves, x, keys)
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view(y.shape)
            found = torch.autograd.grad((losses * weight).sum(), list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, found, strict=True))

    @cached_property
    def _places(self) -> dict[str, str]:
        """Every place that holds a parameter -> the parameter's first name (another one where weights are tied)."""
        first = {id(p): name for name, p in self.module.named_parameters() if p.requires_grad}
        places = ((f"{m}.{n}".lstrip("."), p) for m, module in self.module.named_modules() for n, p in module._parameters.items())
        return {place: first[id(p)] for place, p in places if p is not None and p.requires_grad}

    def initial(self) -> torch.Tensor:
        """The module's own parameters as one vector (d,)."""
        return torch.cat([p.detach().flatten() for p in self.module.parameters() if p.requires_grad])

    def redrawn(self, randomness: Randomness, *path: Part) -> torch.Tensor:
        """Initial weights drawn anew from (seed, *path) by the layers' own `reset_parameters`, (d,).

        A tied weight is drawn by the layer that has it under its first name.

        Raises:
            UsageError: a parameter that no `reset_parameters` draws.
        """
        module = copy.deepcopy(self.module).float().cpu()
        own = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.integer(*path))
            for p in own.values():
                p.fill_(torch.nan)
            for name, part in reversed(list(module.named_modules())):  # a whole may draw over what its parts drew
                tied = [(p, p.clone()) for n, p in part.named_parameters(recurse=False) if f"{name}.{n}".lstrip(".") not in own]
                _reset(name, part)
                for p, value in tied:
                    p.copy_(value)
        undrawn = [name for name, p in own.items() if not bool(p.isfinite().all())]
        if undrawn:
            raise UsageError(
                f"the parameter {undrawn[0]!r} of {type(module).__name__} cannot be drawn anew: give its layer a method reset_parameters"
            )
        return FlatModel(module).initial().to(self.initial())

    def state_dict(self, flat: torch.Tensor) -> dict[str, Any]:
        """The module's own `state_dict` with these parameters (d,): what is frozen and constant is in it, tied weights under each name."""
        views, names = self.views(flat), {id(p): name for name, p in self.module.named_parameters()}
        state = {place: views.get(names.get(id(value), ""), value) for place, value in self.module.state_dict(keep_vars=True).items()}
        return {place: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value for place, value in state.items()}

    def to(self, device: torch.device, dtype: torch.dtype) -> FlatModel:
        """A copy of its own, whose frozen parameters and constants lie where the data do."""
        return replace(self, module=copy.deepcopy(self.module).to(device, dtype))

    def copy(self) -> FlatModel:
        """One that another thread may call at the same time."""
        return replace(self, module=copy.deepcopy(self.module))


def _reset(name: str, part: nn.Module) -> None:
    reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)  # nn.MultiheadAttention's own
    try:
        if callable(reset):
            reset()
    except Exception as error:  # a user's own code
        raise UsageError(f"reset_parameters of {name or 'the model'} ({type(part).__name__}) fails: {_reason(error)}") from error


def build(model: str | nn.Module, shape: Shape, classes: int, randomness: Randomness) -> FlatModel:
    """The named network with its initial weights drawn from (seed, "model"), or a user's own module with the weights it has.

    Args:
        shape: of one sample.

    Raises:
        UsageError: an unknown name, samples the network does not take, or a module that clients cannot train and average.
    """
    if not isinstance(model, str):
        return adopt(model, shape, classes)
    if model not in NETWORKS:
        raise unknown("model", model, NETWORKS)
    own_type = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(randomness.integer("model"))
        torch.set_default_dtype(torch.float32)  # another type draws other numbers
        try:
            module = NETWORKS[model](shape, classes)
        finally:
            torch.set_default_dtype(own_type)
    return adopt(module, shape, classes, f"the model {model!r}")


def adopt(module: nn.Module, shape: Shape, classes: int, name: str = "") -> FlatModel:
    """A user's own module, checked on three random samples: a copy with its weights, dropout drawn per client.

    Raises:
        UsageError: it does not take these samples or give an output a class; or keeps state, draws random numbers of its own, or mixes
            samples of a batch, so that a client's model would not be the function of one averaged vector.
    """
    name = name or type(module).__name__
    if not isinstance(module, nn.Module):
        raise UsageError(f"model is a name or an nn.Module, not {name}")
    _check_parts(name, module)
    try:
        own = with_seeded_dropout(module).float().cpu().train()
        flat = FlatModel(copy.deepcopy(own))  # what the checks leave in a module (a hook may keep activations) stays out of training
    except UsageError:
        raise
    except Exception as error:  # copying a user's object may raise anything too
        raise UsageError(f"{name} cannot be copied: {_reason(error)}") from error
    if not all(torch.isfinite(p).all() for p in flat.module.parameters()):
        raise UsageError(f"{name} has weights that are not finite: start from other ones")
    x = torch.rand(3, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _check_outputs(name, flat, x, classes)
        _check_gradients(name, flat, x)
        return FlatModel(own, _batches(flat, x))


def _check_parts(name: str, module: nn.Module) -> None:
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise UsageError(f"{name} has lazy layers without weights yet: pass one sample through it first")
    if not any(p.requires_grad for p in module.parameters()):
        raise UsageError(f"{name} has no parameter that trains: set requires_grad on those that should")
    if any(p.is_complex() for p in module.parameters() if p.requires_grad):
        raise UsageError(f"{name} has complex parameters, which are not averaged: keep real and imaginary parts apart")
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and (part.track_running_stats or "Batch" in type(part).__name__):
            raise UsageError(f"{name} has {type(part).__name__}, whose statistics clients cannot average: use nn.GroupNorm instead")
        if isinstance(part, nn.RReLU):
            raise UsageError(f"{name} has RReLU, which draws its slopes anew in every call: use nn.LeakyReLU instead")
        if isinstance(part, torch.jit.ScriptModule | nn.DataParallel):
            raise UsageError(f"{name} is scripted or parallel, so its parameters cannot be replaced: give the module it was made from")


def _check_outputs(name: str, flat: FlatModel, x: torch.Tensor, classes: int) -> None:
    start, buffers = flat.initial(), copy.deepcopy(dict(flat.module.named_buffers()))
    views = flat.views(start)
    outputs = []
    for n in (len(x), 1):
        outputs.append(own := flat.call(views, x[:n]))
        if not isinstance(own, torch.Tensor) or own.ndim != 2 or len(own) != n or own.shape[1] < classes:
            found = tuple(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__
            raise UsageError(f"{name} gives {found} for {n} sample{'s' * (n > 1)}: it must give one row of {classes} logits for each")
    out, one = outputs
    if not torch.equal(start, flat.initial()):
        raise UsageError(f"{name} changes its parameters in a forward pass (max_norm of nn.Embedding does): leave that out")
    for buffer, value in flat.module.named_buffers():
        if not torch.equal(value, buffers[buffer]):
            raise UsageError(f"{name} changes its buffer {buffer!r} in a forward pass, which clients cannot average: make it stateless")
    if not torch.allclose(out, flat.call(views, x), equal_nan=True):
        raise UsageError(
            f"{name} gives two outputs for one input: keep no state between calls, and use nn.Dropout layers for dropout"
            " (a dropout argument of nn.LSTM or nn.MultiheadAttention, or F.dropout, cannot be drawn per client)"
        )
    if not torch.allclose(out[:1], one, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise UsageError(f"{name}'s output for a sample depends on the others of its mini-batch: use nn.GroupNorm for batch statistics")


def _check_gradients(name: str, flat: FlatModel, x: torch.Tensor) -> None:
    y, weight = torch.zeros(1, len(x), dtype=torch.int64), torch.ones(1, len(x))
    try:
        flat.gradients(flat.views(flat.initial()[None]), x[None], y, weight, torch.tensor([1]))
    except UsageError:
        raise
    except Exception as error:  # whatever breaks the way back
        raise UsageError(
            f"{name} has no gradient: keep no_grad, detach, in-place changes and sparse=True out of it ({_reason(error)})"
        ) from error


def _reason(error: Exception) -> str:
    return textwrap.shorten((str(error).splitlines() or [""])[0], 200, placeholder=" …") or type(error).__name__


def _batches(flat: FlatModel, x: torch.Tensor) -> bool:
    """Whether torch.vmap takes it, and gives what the single models give."""
    rows = torch.stack([flat.initial(), 0.9 * flat.initial()])
    views, keys = flat.views(rows), torch.tensor([1, 2])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # vmap warns where it falls back to a loop
            found = flat.stacked(views, torch.stack([x, x]), keys)
            flat.gradients(views, torch.stack([x, x]), torch.zeros(2, len(x), dtype=torch.int64), torch.ones(2, len(x)), keys)
        single = [flat.call({n: v[k] for n, v in views.items()}, x, keys[k]) for k in range(2)]
        return torch.allclose(found, torch.stack(single), rtol=1e-3, atol=1e-4, equal_nan=True)
    except Exception:  # whatever vmap cannot do: then the clients train one after the other
        return False


def describe(model: str | nn.Module) -> Any:
    """What a configuration says of a model: its name, or a module's text, parameters and SHA-256 of its weights, for JSON."""
    if isinstance(model, str):
        return model
    state = hashlib.sha256()
    for name, value in [*model.state_dict().items(), *model.named_buffers()]:  # the latter for those that are not persistent
        known = isinstance(value, torch.Tensor)  # get_extra_state may give anything
        data = value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes() if known else repr(value).encode()
        state.update(name.encode() + data)
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return {"module": repr(model), "parameters": shapes, "weights": state.hexdigest()}
