"""Models that clients can train and average, from a name or a user's own module.

A module is checked before it trains, on three random samples: no buffers that change, no random
draws of its own, no mixing of samples, one sample alone, a gradient. Otherwise a client's model
would not be a function of one averaged vector. Dropout layers become `SeededDropout`, drawn from
(client, call, step). Modules that vmap refuses train one client after the other. Batch norm in
evaluation mode keeps the statistics that came with the module, which are public: nothing of
clients' samples is in them.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from securecluster.core.devices import global_generator
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.models.architectures import Shape, network
from securecluster.models.dropout import with_seeded_dropout
from securecluster.models.flat_model import FlatModel, reason
from securecluster.models.foreign import ForeignModel
from securecluster.models.objectives import (
    CLASSIFICATION,
    Classification,
    MultiLabel,
    Objective,
    Regression,
    Trajectory,
)

# tolerance between outputs that differ by rounding only
RTOL = 1e-3
ATOL = 1e-4


def build(
    model: str | nn.Module,
    shape: Shape,
    classes: int,
    randomness: Randomness,
    objective: Objective = CLASSIFICATION,
) -> FlatModel:
    """Return a model with its initial weights.

    Args:
        model: a network's name, whose weights are drawn from (seed, "model"); or a user's own
            module with the weights that it has.
        shape: shape of a sample.
        classes: number of labels, tokens or coordinates.
        randomness: source of the initial weights.
        objective: the learning objective.

    Raises:
        UsageError: an unknown name, samples the network does not take, or a module that clients
            cannot train and average.
    """
    if not isinstance(model, str):
        return prepare_module(model, shape, classes, objective=objective)
    return _named(model, tuple(shape), classes, randomness.integer("model"), objective)


# A run needs its model several times, for the configuration, the clients and the results. A model
# is a function of parameters that are passed to it, so all of these can share one.
@lru_cache(maxsize=2)
def _named(model: str, shape: Shape, classes: int, seed: int, objective: Objective) -> FlatModel:
    """Return a model by its network's name, as `build` does.

    Args:
        model: name of the network.
        shape: shape of a sample.
        classes: number of labels, tokens or coordinates.
        seed: of the initial weights.
        objective: the learning objective.
    """
    module = named_module(model, shape, classes, objective, seed)
    return prepare_module(module, shape, classes, f"the model {model!r}", objective)


def named_module(
    model: str, shape: Shape, classes: int, objective: Objective, seed: int = 0
) -> nn.Module:
    """Return the module of a network's name, with the initial weights of a seed.

    Args:
        model: name of the network.
        shape: shape of a sample.
        classes: number of labels, tokens or coordinates.
        objective: the learning objective.
        seed: of the initial weights.

    Raises:
        UsageError: an unknown name, or samples that the network does not take.
    """
    make = network(model, objective, classes)
    default_dtype = torch.get_default_dtype()
    with global_generator(seed):
        # Another type draws other numbers.
        torch.set_default_dtype(torch.float32)
        try:
            return make(shape, classes)
        finally:
            torch.set_default_dtype(default_dtype)


def prepare_module(
    module: nn.Module,
    shape: Shape,
    classes: int,
    name: str = "",
    objective: Objective = CLASSIFICATION,
) -> FlatModel:
    """Check a user's own module on three random samples, and return it as a model.

    Args:
        module: the module, which stays as it is.
        shape: shape of a sample.
        classes: number of labels, tokens or coordinates.
        name: the module's name in messages; its class if empty.
        objective: the learning objective.

    Returns:
        A copy with the module's weights, whose dropout is drawn per client.

    Raises:
        UsageError: it does not take these samples or give the outputs of the objective; or keeps
            state, draws random numbers of its own, or mixes samples of a batch, so that a client's
            model would not be the function of one averaged vector.
    """
    name = name or type(module).__name__
    if not isinstance(module, nn.Module):
        made = f": make one, {module.__name__}(…)" if isinstance(module, type) else ""
        raise UsageError(f"model is a name or an nn.Module, not {name}{made}")
    _check_parameters(name, module)
    for layer in module.modules():
        _check_layer(name, layer)
    try:
        prepared = _training(with_seeded_dropout(module).float().cpu())
        # What the checks leave in a module (a hook may keep activations) stays out of training.
        checked = copy.deepcopy(prepared)
    except UsageError:
        raise
    except Exception as error:  # copying a user's object may raise anything too
        raise UsageError(f"{name} cannot be copied: {reason(error)}") from error
    flat = FlatModel(checked, objective=objective)
    if not all(torch.isfinite(p).all() for p in flat.module.parameters()):
        raise UsageError(f"{name} has weights that are not finite: start from other ones")
    x, y, outputs = objective.example(shape, classes)
    if isinstance(module, ForeignModel):
        if module.functions.outputs is not None:
            with torch.no_grad(), global_generator():
                _check_outputs(name, flat, x, outputs)
        return FlatModel(prepared, together=False, objective=objective)
    with torch.no_grad(), global_generator():
        _check_outputs(name, flat, x, outputs)
        _check_gradients(name, flat, x, y)
        together = _supports_vmap(flat, x, y)
    return FlatModel(prepared, together, objective)


def _training(module: nn.Module) -> nn.Module:
    """Return a module in training mode, but for statistics that are frozen."""
    frozen = [layer for layer in module.modules() if _is_frozen(layer)]
    module.train()
    for layer in frozen:
        layer.eval()
    return module


def output_doubts(
    module: nn.Module, shape: Shape, classes: int, objective: Objective = CLASSIFICATION
) -> list[str]:
    """Return doubts about the outputs of a user's own module as sentences.

    Args:
        module: the module.
        shape: shape of a sample.
        classes: number of labels, tokens or coordinates.
        objective: the learning objective.

    Raises:
        UsageError: as `prepare_module`.
    """
    # positions and numbers may be any
    if objective.kind in (Trajectory.kind, Regression.kind):
        return []
    flat = prepare_module(module, shape, classes, objective=objective)
    if isinstance(module, ForeignModel) and module.functions.outputs is None:
        return []
    x, _, _ = objective.example(shape, classes)
    with torch.no_grad(), global_generator():
        outputs = flat.call(flat.views(flat.initial()), x)
    name = type(module).__name__
    doubts = []
    sums = outputs.sum(-1)
    if isinstance(objective, MultiLabel):
        if (outputs >= 0).all() and (outputs <= 1).all():
            doubts.append(
                f"{name} gives probabilities, as with a sigmoid at its end, and the loss has one "
                "of its own, so it learns slowly: leave the module's out"
            )
    elif (outputs >= 0).all() and torch.allclose(sums, torch.ones_like(sums)):
        doubts.append(
            f"{name} gives probabilities, as with a softmax at its end, and the loss has a softmax "
            "of its own, so it learns slowly: leave the module's out"
        )
    if objective.kind == Classification.kind and outputs.shape[-1] > classes:
        doubts.append(
            f"{name} has {outputs.shape[-1]} outputs, and the data have {classes} classes: make "
            f"its last layer as wide, or pass classes={outputs.shape[-1]} with the data"
        )
    return doubts


def describe(model: str | nn.Module) -> Any:
    """Return the description of a model in a configuration, for JSON.

    Args:
        model: a network's name, or a module.

    Returns:
        The name; or a module's text, its parameters' shapes, and the SHA-256 of its weights.
    """
    if isinstance(model, str):
        return model
    digest = hashlib.sha256()
    # Buffers that are not persistent are in no state_dict.
    state = [*model.state_dict().items(), *model.named_buffers()]
    for name, value in state:
        digest.update(name.encode() + _octets(value))
    shapes = {name: list(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    return {"module": repr(model), "parameters": shapes, "weights": digest.hexdigest()}


def _check_parameters(name: str, module: nn.Module) -> None:
    """Raise UsageError if a module has no trainable parameters, or some that are not averaged."""
    uninitialized = nn.parameter.UninitializedParameter
    if any(isinstance(p, uninitialized) for p in module.parameters()):
        raise UsageError(
            f"{name} has lazy layers without weights yet: pass one sample through it first"
        )
    trainable = [p for p in module.parameters() if p.requires_grad]
    if not trainable:
        raise UsageError(
            f"{name} has no parameter that trains: set requires_grad on those that should"
        )
    if any(p.is_complex() for p in trainable):
        raise UsageError(
            f"{name} has complex parameters, which are not averaged: keep real and imaginary parts "
            "apart"
        )


def _check_layer(name: str, layer: nn.Module) -> None:
    """Raise UsageError if a layer keeps statistics, draws numbers, or cannot be called as one."""
    if _keeps_statistics(layer):
        raise UsageError(
            f"{name} has {type(layer).__name__}, whose statistics clients cannot average: use "
            "nn.GroupNorm instead, or freeze the statistics that it has (layer.eval())"
        )
    if isinstance(layer, nn.RReLU):
        raise UsageError(
            f"{name} has RReLU, which draws its slopes anew in every call: use nn.LeakyReLU instead"
        )
    if isinstance(layer, torch.jit.ScriptModule | nn.DataParallel):
        raise UsageError(
            f"{name} is scripted or parallel, so its parameters cannot be replaced: give the "
            "module it was made from"
        )


def _keeps_statistics(layer: nn.Module) -> bool:
    if not isinstance(layer, nn.modules.batchnorm._NormBase) or _is_frozen(layer):
        return False
    # Instance norm without running statistics is the only one that treats samples one by one.
    return bool(layer.track_running_stats) or "Batch" in type(layer).__name__


def _is_frozen(layer: nn.Module) -> bool:
    """Return whether a layer normalises by statistics that stay as they are."""
    batch_norm = isinstance(layer, nn.modules.batchnorm._NormBase)
    return batch_norm and bool(layer.track_running_stats) and not layer.training


def _check_outputs(name: str, flat: FlatModel, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check that a module is a function of its parameters and of each sample alone.

    Args:
        name: the module's name in messages.
        flat: the module.
        x: samples, (n, …).
        shape: smallest shape of a sample's outputs; their last axis may be longer.

    Raises:
        UsageError: outputs of another shape, state, random numbers, or samples that are mixed.
    """
    parameters_before = flat.initial()
    buffers_before = copy.deepcopy(dict(flat.module.named_buffers()))
    views = flat.views(parameters_before)
    outputs = flat.call(views, x)
    _check_shape(name, flat, outputs, (len(x), *shape))
    first_output = flat.call(views, x[:1])
    _check_shape(name, flat, first_output, (1, *shape))
    if not torch.equal(parameters_before, flat.initial()):
        raise UsageError(
            f"{name} changes its parameters in a forward pass (max_norm of nn.Embedding does): "
            "leave that out"
        )
    for buffer, value in flat.module.named_buffers():
        if not torch.equal(value, buffers_before[buffer]):
            raise UsageError(
                f"{name} changes its buffer {buffer!r} in a forward pass, which clients cannot "
                "average: make it stateless"
            )
    if not torch.allclose(outputs, flat.call(views, x), equal_nan=True):
        raise UsageError(
            f"{name} gives two outputs for one input: keep no state between calls, and use "
            "nn.Dropout layers for dropout (a dropout argument of nn.LSTM or "
            "nn.MultiheadAttention, or F.dropout, cannot be drawn per client)"
        )
    if not _close(outputs[:1], first_output):
        raise UsageError(
            f"{name}'s output for a sample depends on the others of its mini-batch: use "
            "nn.GroupNorm for batch statistics"
        )


def _check_shape(name: str, flat: FlatModel, outputs: Any, shape: tuple[int, ...]) -> None:
    """Raise UsageError unless outputs are a tensor of a shape, whose last axis may be longer."""
    samples, *sample_shape = shape
    actual = type(outputs).__name__
    if isinstance(outputs, torch.Tensor):
        leading_axes_agree = outputs.shape[:-1] == shape[:-1]
        if leading_axes_agree and outputs.shape[-1] >= shape[-1]:
            return
        actual = str(tuple(outputs.shape))
    raise UsageError(
        f"{name} gives {actual} for {samples} sample{'s' * (samples > 1)}: it must give "
        f"{flat.objective.wanted(sample_shape)} for each"
    )


def _check_gradients(name: str, flat: FlatModel, x: torch.Tensor, y: torch.Tensor) -> None:
    """Raise UsageError if the backward pass of samples x (n, …) with targets y fails."""
    views = flat.views(flat.initial()[None])
    weight = torch.ones(1, len(x))
    key = torch.tensor([1])
    try:
        flat.gradients(views, x[None], y[None], weight, key)
    except UsageError:
        raise
    except Exception as error:  # whatever breaks the backward pass
        raise UsageError(
            f"{name} has no gradient: keep no_grad, detach, in-place changes and sparse=True out "
            f"of it ({reason(error)})"
        ) from error


def _supports_vmap(flat: FlatModel, x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if torch.vmap runs two models at once, with the outputs of the single ones.

    Args:
        flat: the module.
        x: samples, (n, …).
        y: targets, (n, …).
    """
    # Two different models, so that one in place of the other is noticed.
    initial = flat.initial()
    rows = torch.stack([initial, 0.9 * initial])
    views = flat.views(rows)
    keys = torch.tensor([1, 2])
    both_x = torch.stack([x, x])
    both_y = torch.stack([y, y])
    weight = torch.ones(2, len(x))
    try:
        with warnings.catch_warnings():
            # vmap warns where it falls back to a loop.
            warnings.simplefilter("error")
            together = flat.stacked(views, both_x, keys)
            flat.gradients(views, both_x, both_y, weight, keys)
        singles = []
        for row, key in zip(rows, keys, strict=True):
            singles.append(flat.call(flat.views(row), x, key))
        return _close(together, torch.stack(singles))
    except Exception:  # whatever vmap cannot do: then the clients train one after the other
        return False


def _close(outputs: torch.Tensor, others: torch.Tensor) -> bool:
    return torch.allclose(outputs, others, rtol=RTOL, atol=ATOL, equal_nan=True)


def _octets(value: Any) -> bytes:
    """Return the bytes of an entry of a state_dict."""
    # get_extra_state may return anything.
    if not isinstance(value, torch.Tensor):
        return repr(value).encode()
    flat = value.detach().cpu().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


__all__ = ["FlatModel", "build", "describe", "named_module", "output_doubts", "prepare_module"]
