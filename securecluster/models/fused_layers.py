"""Forward and backward by hand for the common stack of layers, all clients of a chunk at once.

`torch.func` runs any module, but pays for it: a stored gradient, a grouped convolution. A stack of
Conv2d, MaxPool2d, ReLU, then Flatten, then Linear and ReLU needs neither. Its dense layers are
batched matrix products, whose gradient goes straight into the weights as one more product; its
convolutions are those of one client, the layout channels last. Tensors are (b, n, …): b clients, n
samples each. A test holds it equal to autograd.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from securecluster.models.optimizers import Optimizer, Sgd
from securecluster.models.per_example_gradients import Each, Outer

aten: Any = torch.ops.aten
Params = Mapping[str, torch.Tensor]
Parts = dict[str, Outer | Each]
_NO_WEIGHTS = Sgd({}, 0.0)  # for layers that have none


class Layer(Protocol):
    """One layer: what it computes, and what its output's gradient d does to its weights and its
    input.
    """

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The output, and what `backward` needs."""
        ...

    def backward(
        self, params: Params, d: torch.Tensor, kept: Any, optimizer: Optimizer, needed: bool
    ) -> torch.Tensor:
        """Step the weights; the gradient at the input where it is `needed`, before the step."""
        ...


@dataclass(frozen=True)
class Dense:
    """x Wᵀ + b."""

    weight: str
    bias: str | None

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """W times xᵀ: the faster order for one client's wide layer, and no slower for many."""
        weight = params[self.weight]
        if self.bias is None:
            return torch.bmm(weight, x.mT).mT.contiguous(), x
        return torch.baddbmm(params[self.bias][..., None], weight, x.mT).mT.contiguous(), x

    def backward(
        self, params: Params, d: torch.Tensor, kept: Any, optimizer: Optimizer, needed: bool
    ) -> torch.Tensor:
        """dW = dᵀx."""
        inner = torch.bmm(d, params[self.weight]) if needed else d
        optimizer.product(self.weight, d.mT, kept)
        if self.bias is not None:
            optimizer.value(self.bias, d.sum(1))
        return inner

    def examples(
        self, params: Params, d: torch.Tensor, kept: Any, needed: bool
    ) -> tuple[torch.Tensor, Parts]:
        """Return the gradient at the input, and those of each example at the weights.

        The gradient at the input is made only where it is `needed`.
        """
        inner = torch.bmm(d, params[self.weight]) if needed else d
        return inner, {self.weight: Outer(d, kept)} | (
            {} if self.bias is None else {self.bias: Each(d)}
        )


@dataclass(frozen=True)
class Conv:
    """A convolution of one client (b = 1)."""

    weight: str
    bias: str | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Channels last: pooling is faster so, and the convolution no slower."""
        flat = _channels_last(x.flatten(0, 1))
        bias = None if self.bias is None else params[self.bias][0]
        out = torch.conv2d(
            flat, self._kernel(params), bias, self.stride, self.padding, self.dilation, self.groups
        )
        return out[None], flat

    def backward(
        self, params: Params, d: torch.Tensor, kept: Any, optimizer: Optimizer, needed: bool
    ) -> torch.Tensor:
        """By aten's own backward."""
        kernel, no = self._kernel(params), [0, 0]
        mask = [needed, True, self.bias is not None]
        inner, weight, bias = aten.convolution_backward(
            d[0],
            kept,
            kernel,
            [len(kernel)],
            self.stride,
            self.padding,
            self.dilation,
            False,
            no,
            self.groups,
            mask,
        )
        optimizer.value(self.weight, weight[None])
        if self.bias is not None:
            optimizer.value(self.bias, bias[None])
        return inner[None] if needed else d

    def examples(
        self, params: Params, d: torch.Tensor, kept: Any, needed: bool
    ) -> tuple[torch.Tensor, Parts]:
        """The gradient at the input where it is `needed`, and those of each example at the weights,
        by the windows of its input.
        """
        inner, kernel = d, self._kernel(params)
        if needed:
            rest = (
                self.stride,
                self.padding,
                self.dilation,
                False,
                [0, 0],
                self.groups,
                [True, False, False],
            )
            inner = aten.convolution_backward(d[0], kept, kernel, None, *rest)[0][None]
        windows = torch.nn.functional.unfold(
            kept, kernel.shape[2:], self.dilation, self.padding, self.stride
        )
        n, _, places = windows.shape
        own = d[0].reshape(n, self.groups, -1, places) @ windows.view(n, self.groups, -1, places).mT
        found: Parts = {self.weight: Each(own.flatten(1)[None])}
        return inner, found | ({} if self.bias is None else {self.bias: Each(d.sum((3, 4)))})

    def _kernel(self, params: Params) -> torch.Tensor:
        return params[self.weight][0].contiguous(memory_format=torch.channels_last)


@dataclass(frozen=True)
class Pooling:
    """Max-pooling of one client (b = 1)."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil: bool

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The largest of each window, and where it was."""
        flat = _channels_last(x.flatten(0, 1))
        out, where = aten.max_pool2d_with_indices(
            flat, self.size, self.stride, self.padding, self.dilation, self.ceil
        )
        return out[None], (flat, where)

    def backward(
        self, params: Params, d: torch.Tensor, kept: Any, optimizer: Optimizer, needed: bool
    ) -> torch.Tensor:
        """To where the largest was."""
        x, where = kept
        flat = d[0].contiguous(memory_format=torch.channels_last)
        inner: torch.Tensor = aten.max_pool2d_with_indices_backward(
            flat, x, self.size, self.stride, self.padding, self.dilation, self.ceil, where
        )
        return inner[None]


@dataclass(frozen=True)
class Relu:
    """max(x, 0), in place: no layer here needs its own output for its backward pass, except this
    one.
    """

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """In place."""
        return x.relu_(), x

    def backward(
        self, params: Params, d: torch.Tensor, kept: Any, optimizer: Optimizer, needed: bool
    ) -> torch.Tensor:
        """Where the output was positive."""
        inner: torch.Tensor = aten.threshold_backward(d, kept, 0)
        return inner


@dataclass(frozen=True)
class Flatten:
    """(b, n, …) to (b, n, features)."""

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """In the order of the axes."""
        return x.flatten(2), x.shape

    def backward(
        self, params: Params, d: torch.Tensor, kept: Any, optimizer: Optimizer, needed: bool
    ) -> torch.Tensor:
        """Back to the axes."""
        return d.reshape(kept)


@dataclass(frozen=True)
class Stack:
    """Layers in order, and the mean cross-entropy loss."""

    layers: tuple[Layer, ...]

    @property
    def convolves(self) -> bool:
        """Whether it takes one client at a time."""
        return any(isinstance(layer, Conv | Pooling) for layer in self.layers)

    @cached_property
    def _first(self) -> int:
        """The first layer with weights: no gradient is needed below it."""
        return next(
            number for number, layer in enumerate(self.layers) if isinstance(layer, Dense | Conv)
        )

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Outputs (b, n, classes) on x (b, n, …), which may be overwritten, and what `step` needs
        of each layer.
        """
        kept = []
        for layer in self.layers:
            x, own = layer.forward(params, x)
            kept.append(own)
        return x, kept

    def step(
        self,
        params: Params,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        optimizer: Optimizer,
    ) -> None:
        """One step of each client on its own mini-batch: x (b, n, …), labels y (b, n), the losses'
        weights (b, n).
        """
        out, kept = self.forward(params, x)
        d = _cross_entropy(out, y).mul_(weight[..., None])
        optimizer.begin()
        for number in reversed(range(self._first, len(self.layers))):
            d = self.layers[number].backward(
                params, d, kept[number], optimizer, needed=number > self._first
            )

    def examples(self, params: Params, x: torch.Tensor, y: torch.Tensor) -> Parts:
        """The gradient of each example's loss, (b, n) of them, by the weights' names: one backward
        pass.
        """
        out, kept = self.forward(params, x)
        d, found = _cross_entropy(out, y), Parts()
        for number in reversed(range(self._first, len(self.layers))):
            layer, needed = self.layers[number], number > self._first
            if isinstance(layer, Dense | Conv):
                d, own = layer.examples(params, d, kept[number], needed)
                found |= own
            else:
                d = layer.backward(params, d, kept[number], _NO_WEIGHTS, needed)
        return found


def _cross_entropy(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of each sample's cross-entropy at the outputs: softmax − one-hot."""
    d = out.softmax(-1)
    return d.scatter_add_(2, y[..., None], torch.full_like(d[..., :1], -1.0))


def compile_stack(module: nn.Module) -> Stack | None:
    """The stack that computes what `module` does, or None where it is not of this form."""
    layers: list[Layer] = []
    if len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters())):
        return None  # a layer used twice, or tied weights
    for name, part in _parts(module):
        layer = _layer(name, part, flat=any(isinstance(own, Flatten) for own in layers))
        if layer is None:
            return None
        if isinstance(layer, Pooling) and layers and isinstance(layers[-1], Relu):
            # both orders have the same values and gradients; this one has the smaller ReLU
            layers.insert(-1, layer)
        else:
            layers.append(layer)
    whole = any(isinstance(own, Flatten) for own in layers) and any(
        isinstance(own, Dense | Conv) for own in layers
    )
    return Stack(tuple(layers)) if whole else None


def _parts(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    if type(module) is not nn.Sequential or _altered(module):
        yield prefix, module
        return
    for name, part in module._modules.items():
        assert part is not None
        yield from _parts(part, f"{prefix}.{name}".lstrip("."))


def _layer(name: str, part: nn.Module, flat: bool) -> Layer | None:
    """The layer of one part, where it comes on its side of the Flatten."""
    if _altered(part):
        return None
    bias = f"{name}.bias" if getattr(part, "bias", None) is not None else None
    if type(part) is nn.ReLU:
        return Relu()
    if type(part) is nn.Flatten and not flat and (part.start_dim, part.end_dim) == (1, -1):
        return Flatten()
    if type(part) is nn.Linear and flat:
        return Dense(f"{name}.weight", bias)
    if type(part) is nn.Conv2d and not flat and part.padding_mode == "zeros":
        padding = _padding(part)
        return (
            None
            if padding is None
            else Conv(f"{name}.weight", bias, part.stride, padding, part.dilation, part.groups)
        )
    if type(part) is nn.MaxPool2d and not flat and not part.return_indices:
        return Pooling(
            _two(part.kernel_size),
            _two(part.stride),
            _two(part.padding),
            _two(part.dilation),
            part.ceil_mode,
        )
    return None


def _altered(part: nn.Module) -> bool:
    """Whether it does more than its class says."""
    hooks = (
        part._forward_hooks,
        part._forward_pre_hooks,
        part._backward_hooks,
        part._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(part)


def _padding(part: nn.Conv2d) -> tuple[int, ...] | None:
    """In numbers; None where the two sides of an axis differ ("same" with an even kernel)."""
    if not isinstance(part.padding, str):
        return part.padding
    whole = [
        0 if part.padding == "valid" else d * (k - 1)
        for k, d in zip(part.kernel_size, part.dilation, strict=True)
    ]
    return None if any(w % 2 for w in whole) else tuple(w // 2 for w in whole)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """x (n, channels, height, width) in that layout, also by its strides where one channel makes
    them ambiguous.
    """
    _, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    return x.as_strided(x.shape, (height * width, 1, width, 1)) if channels == 1 else x


def _two(value: int | tuple[int, ...]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[-1])
