"""From a name, or a user's own module, to a model that clients can train and average."""

from __future__ import annotations

import copy
import hashlib
import warnings
from typing import Any

import torch
from torch import nn

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.models.architectures import Shape, network
from securecluster.models.dropout import with_seeded_dropout
from securecluster.models.flat_model import FlatModel, reason
from securecluster.models.objectives import CLASSIFICATION, Objective


def build(
    model: str | nn.Module,
    shape: Shape,
    classes: int,
    randomness: Randomness,
    objective: Objective = CLASSIFICATION,
) -> FlatModel:
    """The named network with its initial weights drawn from (seed, "model"), or a user's own module
    with the weights it has.

    Args:
        shape: of one sample.

    Raises:
        UsageError: an unknown name, samples the network does not take, or a module that clients
            cannot train and average.
    """
    if not isinstance(model, str):
        return prepare_module(model, shape, classes, objective=objective)
    make = network(model, objective, classes)
    own_type = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        # no device's generator is touched
        torch.default_generator.manual_seed(randomness.integer("model"))
        torch.set_default_dtype(torch.float32)  # another type draws other numbers
        try:
            module = make(shape, classes)
        finally:
            torch.set_default_dtype(own_type)
    return prepare_module(module, shape, classes, f"the model {model!r}", objective)


def prepare_module(
    module: nn.Module,
    shape: Shape,
    classes: int,
    name: str = "",
    objective: Objective = CLASSIFICATION,
) -> FlatModel:
    """A user's own module, checked on three random samples: a copy with its weights, dropout drawn
    per client.

    Raises:
        UsageError: it does not take these samples or give the outputs of the objective; or keeps
            state, draws random numbers of its own, or mixes samples of a batch, so that a client's
            model would not be the function of one averaged vector.
    """
    name = name or type(module).__name__
    if not isinstance(module, nn.Module):
        raise UsageError(f"model is a name or an nn.Module, not {name}")
    _check_parts(name, module)
    try:
        own = with_seeded_dropout(module).float().cpu().train()
        flat = FlatModel(
            copy.deepcopy(own), objective=objective
        )  # what the checks leave in a module (a hook may keep activations) stays out of training
    except UsageError:
        raise
    except Exception as error:  # copying a user's object may raise anything too
        raise UsageError(f"{name} cannot be copied: {reason(error)}") from error
    if not all(torch.isfinite(p).all() for p in flat.module.parameters()):
        raise UsageError(f"{name} has weights that are not finite: start from other ones")
    x, y, outputs = objective.example(shape, classes)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _check_outputs(name, flat, x, outputs)
        _check_gradients(name, flat, x, y)
        return FlatModel(own, _batches(flat, x, y), objective)


def _check_parts(name: str, module: nn.Module) -> None:
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise UsageError(
            f"{name} has lazy layers without weights yet: pass one sample through it first"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise UsageError(
            f"{name} has no parameter that trains: set requires_grad on those that should"
        )
    if any(p.is_complex() for p in module.parameters() if p.requires_grad):
        raise UsageError(
            f"{name} has complex parameters, which are not averaged: keep real and imaginary parts "
            "apart"
        )
    for part in module.modules():
        if isinstance(part, nn.modules.batchnorm._NormBase) and (
            part.track_running_stats or "Batch" in type(part).__name__
        ):
            raise UsageError(
                f"{name} has {type(part).__name__}, whose statistics clients cannot average: use "
                "nn.GroupNorm instead"
            )
        if isinstance(part, nn.RReLU):
            raise UsageError(
                f"{name} has RReLU, which draws its slopes anew in every call: use nn.LeakyReLU "
                "instead"
            )
        if isinstance(part, torch.jit.ScriptModule | nn.DataParallel):
            raise UsageError(
                f"{name} is scripted or parallel, so its parameters cannot be replaced: give the "
                "module it was made from"
            )


def _check_outputs(name: str, flat: FlatModel, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    start, buffers = flat.initial(), copy.deepcopy(dict(flat.module.named_buffers()))
    views = flat.views(start)
    outputs = []
    for n in (len(x), 1):
        outputs.append(own := flat.call(views, x[:n]))
        if (
            not isinstance(own, torch.Tensor)
            or own.shape[:-1] != (n, *shape[:-1])
            or own.shape[-1] < shape[-1]
        ):
            found = tuple(own.shape) if isinstance(own, torch.Tensor) else type(own).__name__
            raise UsageError(
                f"{name} gives {found} for {n} sample{'s' * (n > 1)}: it must give "
                f"{flat.objective.wanted(shape)} for each"
            )
    out, one = outputs
    if not torch.equal(start, flat.initial()):
        raise UsageError(
            f"{name} changes its parameters in a forward pass (max_norm of nn.Embedding does): "
            "leave that out"
        )
    for buffer, value in flat.module.named_buffers():
        if not torch.equal(value, buffers[buffer]):
            raise UsageError(
                f"{name} changes its buffer {buffer!r} in a forward pass, which clients cannot "
                "average: make it stateless"
            )
    if not torch.allclose(out, flat.call(views, x), equal_nan=True):
        raise UsageError(
            f"{name} gives two outputs for one input: keep no state between calls, and use "
            "nn.Dropout layers for dropout (a dropout argument of nn.LSTM or "
            "nn.MultiheadAttention, or F.dropout, cannot be drawn per client)"
        )
    if not torch.allclose(out[:1], one, rtol=1e-3, atol=1e-4, equal_nan=True):
        raise UsageError(
            f"{name}'s output for a sample depends on the others of its mini-batch: use "
            "nn.GroupNorm for batch statistics"
        )


def _check_gradients(name: str, flat: FlatModel, x: torch.Tensor, y: torch.Tensor) -> None:
    try:
        flat.gradients(
            flat.views(flat.initial()[None]),
            x[None],
            y[None],
            torch.ones(1, len(x)),
            torch.tensor([1]),
        )
    except UsageError:
        raise
    except Exception as error:  # whatever breaks the way back
        raise UsageError(
            f"{name} has no gradient: keep no_grad, detach, in-place changes and sparse=True out "
            f"of it ({reason(error)})"
        ) from error


def _batches(flat: FlatModel, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether torch.vmap takes it, and gives what the single models give."""
    rows = torch.stack([flat.initial(), 0.9 * flat.initial()])
    views, keys = flat.views(rows), torch.tensor([1, 2])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # vmap warns where it falls back to a loop
            found = flat.stacked(views, torch.stack([x, x]), keys)
            flat.gradients(
                views, torch.stack([x, x]), torch.stack([y, y]), torch.ones(2, len(x)), keys
            )
        single = [flat.call({n: v[k] for n, v in views.items()}, x, keys[k]) for k in range(2)]
        return torch.allclose(found, torch.stack(single), rtol=1e-3, atol=1e-4, equal_nan=True)
    except Exception:  # whatever vmap cannot do: then the clients train one after the other
        return False


def describe(model: str | nn.Module) -> Any:
    """What a configuration says of a model: its name, or a module's text, parameters and SHA-256 of
    its weights, for JSON.
    """
    if isinstance(model, str):
        return model
    state = hashlib.sha256()
    # the latter for those that are not persistent
    for name, value in [
        *model.state_dict().items(),
        *model.named_buffers(),
    ]:
        known = isinstance(value, torch.Tensor)  # get_extra_state may give anything
        data = (
            value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
            if known
            else repr(value).encode()
        )
        state.update(name.encode() + data)
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return {"module": repr(model), "parameters": shapes, "weights": state.hexdigest()}


__all__ = ["FlatModel", "build", "describe", "prepare_module"]
