"""Forward and backward passes by hand for the common stack of layers, all clients at once.

`torch.func` runs any module, but at a cost: a stored gradient, a grouped convolution. A stack of
Conv2d, MaxPool2d, ReLU, then Flatten, then Linear and ReLU needs neither. Its dense layers are
batched matrix products, whose gradient goes straight into the weights as one more product; its
convolutions are those of one client, in channels-last layout. Tensors are (b, n, …): b clients, n
samples each. A test holds it equal to autograd.

A ReLU between a convolution and a pool waits for the pool, after which fewer numbers are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch
from torch import nn

from securecluster.models.optimizers import Optimizer, Sgd
from securecluster.models.per_example_gradients import Each, Outer

aten: Any = torch.ops.aten
Params = Mapping[str, torch.Tensor]
Parts = dict[str, Outer | Each]
Gradients = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_NO_WEIGHTS = Sgd({}, 0.0)  # for layers that have none
NOT_TRANSPOSED = False
NO_OUTPUT_PADDING = [0, 0]
# axes of many clients' images, (clients, samples, channels, height, width), and of their kernels
IMAGES = 5


class Layer(Protocol):
    """A layer with forward and backward pass."""

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the output, and what `backward` needs.

        Args:
            params: parameters (b, …) by name.
            x: input, (b, n, …); it may be overwritten.
        """
        ...

    def backward(
        self,
        params: Params,
        grad_output: torch.Tensor,
        saved: Any,
        optimizer: Optimizer,
        needed: bool,
    ) -> torch.Tensor:
        """Step the weights, and return the gradient at the input from before the step.

        Args:
            params: parameters (b, …) by name.
            grad_output: gradient at the output, (b, n, …).
            saved: the second result of `forward`.
            optimizer: optimizer of the parameters.
            needed: False if the gradient at the input is not used; then any tensor is returned.
        """
        ...


@dataclass(frozen=True)
class Dense:
    """A dense layer, x Wᵀ + b.

    Attributes:
        weight: name of W, (b, o, i).
        bias: name of b, (b, o); None without bias.
    """

    weight: str
    bias: str | None

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the output (b, n, o), and the input."""
        weight = params[self.weight]
        if weight.device.type != "cpu":
            # no copy of the output
            if self.bias is None:
                return torch.bmm(x, weight.mT), x
            return torch.baddbmm(params[self.bias][:, None], x, weight.mT), x
        # W xᵀ is the faster order for one client's wide layer, and no slower for many.
        if self.bias is None:
            transposed = torch.bmm(weight, x.mT)
        else:
            bias = params[self.bias][..., None]
            transposed = torch.baddbmm(bias, weight, x.mT)
        return transposed.mT.contiguous(), x

    def backward(
        self,
        params: Params,
        grad_output: torch.Tensor,
        saved: Any,
        optimizer: Optimizer,
        needed: bool,
    ) -> torch.Tensor:
        """Step W by grad_outputᵀ x and b by its sum over samples."""
        # Before the step, which changes W in place.
        grad_input = self._grad_input(params, grad_output, needed)
        # As a product, so that SGD adds it to W and stores no gradient.
        optimizer.product(self.weight, grad_output.mT, saved)
        if self.bias is not None:
            optimizer.value(self.bias, grad_output.sum(1))
        return grad_input

    def examples(
        self, params: Params, grad_output: torch.Tensor, saved: Any, needed: bool
    ) -> tuple[torch.Tensor, Parts]:
        """Return the gradient at the input, and those of each example at the weights.

        Args:
            params: parameters (b, …) by name.
            grad_output: gradient at the output, (b, n, o).
            saved: the second result of `forward`.
            needed: False if the gradient at the input is not used; then any tensor is returned.
        """
        # An outer product: its norm follows from those of its two factors.
        gradients: Parts = {self.weight: Outer(grad_output, saved)}
        if self.bias is not None:
            gradients[self.bias] = Each(grad_output)
        return self._grad_input(params, grad_output, needed), gradients

    def _grad_input(self, params: Params, grad_output: torch.Tensor, needed: bool) -> torch.Tensor:
        if not needed:
            return grad_output
        return torch.bmm(grad_output, params[self.weight])


@dataclass(frozen=True)
class Conv:
    """A convolution of one client (b = 1).

    Attributes:
        weight: name of the kernel.
        bias: name of the bias; None without.
        stride: as in nn.Conv2d.
        padding: as in nn.Conv2d, in numbers.
        dilation: as in nn.Conv2d.
        groups: as in nn.Conv2d.
    """

    weight: str
    bias: str | None
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the output (1, n, …), and the input (n, …) in channels-last layout."""
        # In this layout pooling is faster, and the convolution no slower.
        flat = _channels_last(x.flatten(0, 1))
        bias = None
        if self.bias is not None:
            bias = params[self.bias][0]
        out = torch.conv2d(
            flat, self._kernel(params), bias, self.stride, self.padding, self.dilation, self.groups
        )
        return out[None], flat

    def backward(
        self,
        params: Params,
        grad_output: torch.Tensor,
        saved: Any,
        optimizer: Optimizer,
        needed: bool,
    ) -> torch.Tensor:
        """Step kernel and bias by the gradients of aten's own backward pass."""
        # Aten computes what the mask asks for, and returns None for the rest.
        kernel = self._kernel(params)
        grad_input, grad_kernel, _ = self._aten_backward(
            grad_output, saved, kernel, bias_sizes=None, mask=[needed, True, False]
        )
        optimizer.value(self.weight, grad_kernel[None])
        if self.bias is not None:
            # a sum of its own takes less time than aten's with the kernel's gradient
            optimizer.value(self.bias, grad_output.sum((1, 3, 4)))
        if not needed:
            return grad_output
        result: torch.Tensor = grad_input[None]
        return result

    def examples(
        self, params: Params, grad_output: torch.Tensor, saved: Any, needed: bool
    ) -> tuple[torch.Tensor, Parts]:
        """Return the gradient at the input, and those of each example at the weights.

        Args:
            params: parameters (1, …) by name.
            grad_output: gradient at the output, (1, n, channels, height, width).
            saved: the second result of `forward`.
            needed: False if the gradient at the input is not used; then any tensor is returned.
        """
        kernel = self._kernel(params)
        grad_input = grad_output
        if needed:
            flat_grad_input, _, _ = self._aten_backward(
                grad_output, saved, kernel, bias_sizes=None, mask=[True, False, False]
            )
            grad_input = flat_grad_input[None]
        gradients: Parts = {self.weight: self._kernel_gradients(grad_output, saved, kernel)}
        # The bias is added at every pixel.
        if self.bias is not None:
            gradients[self.bias] = Each(grad_output.sum((3, 4)))
        return grad_input, gradients

    def _kernel(self, params: Params) -> torch.Tensor:
        return params[self.weight][0].contiguous(memory_format=torch.channels_last)

    def _kernel_gradients(
        self, grad_output: torch.Tensor, x: torch.Tensor, kernel: torch.Tensor
    ) -> Each:
        """Return each example's gradient at the kernel, a product with the windows of its input."""
        windows = torch.nn.functional.unfold(
            x, kernel.shape[2:], self.dilation, self.padding, self.stride
        )
        n, _, positions = windows.shape
        # Groups are independent convolutions: each is a product of its own.
        grad_channels = grad_output[0].reshape(n, self.groups, -1, positions)
        grouped_windows = windows.view(n, self.groups, -1, positions)
        gradients = grad_channels @ grouped_windows.mT
        return Each(gradients.flatten(1)[None])

    def _aten_backward(
        self,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        kernel: torch.Tensor,
        bias_sizes: list[int] | None,
        mask: list[bool],
    ) -> Any:
        """Return the gradients at input, kernel and bias, where the mask asks for them."""
        return aten.convolution_backward(
            grad_output[0],
            x,
            kernel,
            bias_sizes,
            self.stride,
            self.padding,
            self.dilation,
            NOT_TRANSPOSED,
            NO_OUTPUT_PADDING,
            self.groups,
            mask,
        )


@dataclass(frozen=True)
class Pooling:
    """Max-pooling of one client (b = 1), with the fields of nn.MaxPool2d."""

    size: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil: bool

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the largest value of each window, and the input and their positions."""
        flat = _channels_last(x.flatten(0, 1))
        out, positions = aten.max_pool2d_with_indices(
            flat, self.size, self.stride, self.padding, self.dilation, self.ceil
        )
        return out[None], (flat, positions)

    def backward(
        self,
        params: Params,
        grad_output: torch.Tensor,
        saved: Any,
        optimizer: Optimizer,
        needed: bool,
    ) -> torch.Tensor:
        """Return the gradient at the input, which is that at each window's largest value."""
        x, positions = saved
        flat = grad_output[0].contiguous(memory_format=torch.channels_last)
        grad_input: torch.Tensor = aten.max_pool2d_with_indices_backward(
            flat, x, self.size, self.stride, self.padding, self.dilation, self.ceil, positions
        )
        return grad_input[None]


@dataclass(frozen=True)
class Relu:
    """max(x, 0), in place.

    No layer but this one needs its own output for its backward pass, so overwriting is safe.
    """

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the output, twice."""
        return x.relu_(), x

    def backward(
        self,
        params: Params,
        grad_output: torch.Tensor,
        saved: Any,
        optimizer: Optimizer,
        needed: bool,
    ) -> torch.Tensor:
        """Return the gradient where the output was positive, else 0."""
        grad_input: torch.Tensor = aten.threshold_backward(grad_output, saved, 0)
        return grad_input


@dataclass(frozen=True)
class Flatten:
    """Reshape (b, n, …) to (b, n, features)."""

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the flattened input, and its shape."""
        return x.flatten(2), x.shape

    def backward(
        self,
        params: Params,
        grad_output: torch.Tensor,
        saved: Any,
        optimizer: Optimizer,
        needed: bool,
    ) -> torch.Tensor:
        """Return the gradient in the input's shape, and images in the layout of convolutions."""
        grad_input = grad_output.reshape(saved)
        if grad_input.dim() != IMAGES:
            return grad_input
        joined: Any = _channels_last(grad_input.flatten(0, 1))
        images: torch.Tensor = joined.unflatten(0, saved[:2])
        return images


@dataclass(frozen=True)
class Stack:
    """Layers in order, with a loss.

    Args:
        layers: in order.
        output_gradients: gradient of each sample's loss at the outputs (b, n, …), by these and the
            targets, as a tensor of its own.
    """

    layers: tuple[Layer, ...]
    output_gradients: Gradients

    @property
    def convolves(self) -> bool:
        """Return True if the stack takes one client at a time."""
        return any(isinstance(layer, Conv | Pooling) for layer in self.layers)

    @property
    def first_dense(self) -> Dense | None:
        """Return the first dense layer, or None."""
        for layer in self.layers:
            if isinstance(layer, Dense):
                return layer
        return None

    @cached_property
    def first_with_weights(self) -> int:
        """Return the position of the first layer with weights."""
        has_weights = [isinstance(layer, Dense | Conv) for layer in self.layers]
        return has_weights.index(True)

    def forward(self, params: Params, x: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Return the outputs, and what the backward pass needs of each layer.

        Args:
            params: parameters (b, …) by name.
            x: samples, (b, n, …), which may be overwritten.

        Returns:
            Outputs (b, n, classes), and one entry a layer.
        """
        saved = []
        for layer in self.layers:
            x, saved_by_layer = layer.forward(params, x)
            saved.append(saved_by_layer)
        return x, saved

    def step(
        self,
        params: Params,
        x: torch.Tensor,
        y: torch.Tensor,
        weight: torch.Tensor,
        optimizer: Optimizer,
    ) -> None:
        """Make one optimizer step of each client on its own mini-batch.

        Args:
            params: parameters (b, …) by name.
            x: samples, (b, n, …), which may be overwritten.
            y: targets, (b, n, …).
            weight: weight of each loss, (b, n).
            optimizer: optimizer of the parameters.
        """
        out, saved = self.forward(params, x)
        gradient = self.output_gradients(out, y).mul_(weight[..., None])
        optimizer.begin()
        for number, layer in self._backwards():
            # No gradient is needed below the first layer with weights.
            needed = number > self.first_with_weights
            gradient = layer.backward(params, gradient, saved[number], optimizer, needed)

    def examples(self, params: Params, x: torch.Tensor, y: torch.Tensor) -> Parts:
        """Return the gradient of each example's loss, in one backward pass.

        Args:
            params: parameters (b, …) by name.
            x: samples, (b, n, …), which may be overwritten.
            y: targets, (b, n, …).

        Returns:
            Gradients of (b, n) examples by the parameters' names.
        """
        out, saved = self.forward(params, x)
        gradient = self.output_gradients(out, y)
        example_gradients: Parts = {}
        for number, layer in self._backwards():
            needed = number > self.first_with_weights
            if isinstance(layer, Dense | Conv):
                gradient, layer_gradients = layer.examples(params, gradient, saved[number], needed)
                example_gradients |= layer_gradients
            else:
                gradient = layer.backward(params, gradient, saved[number], _NO_WEIGHTS, needed)
        return example_gradients

    def _backwards(self) -> Iterator[tuple[int, Layer]]:
        """Yield layers and their positions from the last one to the first one with weights."""
        for number in reversed(range(self.first_with_weights, len(self.layers))):
            yield number, self.layers[number]


def compile_stack(module: nn.Module, gradients: Gradients) -> Stack | None:
    """Return the stack that computes what a module does.

    Args:
        module: any module.
        gradients: of the loss, as of `Stack`.

    Returns:
        The stack, or None if the module is not of this form.
    """
    all_names = list(module.named_parameters(remove_duplicate=False))
    if len(all_names) > len(list(module.parameters())):
        return None  # a layer used twice, or tied weights
    layers: list[Layer] = []
    flattened = False
    for name, child in _leaves(module):
        layer = _layer(name, child, flattened)
        if layer is None:
            return None
        flattened = flattened or isinstance(layer, Flatten)
        follows_relu = bool(layers) and isinstance(layers[-1], Relu)
        if isinstance(layer, Pooling) and follows_relu:
            # Both orders have the same values and gradients; this one has the smaller ReLU.
            layers.insert(-1, layer)
        else:
            layers.append(layer)
    has_weights = any(isinstance(layer, Dense | Conv) for layer in layers)
    # Without these a stack has no logits, or nothing to train.
    if not flattened or not has_weights:
        return None
    return Stack(tuple(layers), gradients)


def cross_entropy_gradient(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the gradient of each sample's cross-entropy at the outputs: softmax − one-hot.

    Args:
        out: logits, (b, n, classes).
        y: labels, (b, n).
    """
    gradient = out.softmax(-1)
    if out.device.type != "cpu":
        # A GPU scatters in a fixed order only after a sort.
        is_label = y[..., None] == _labels(out.shape[-1], out.device)
        return gradient.add_(is_label, alpha=-1)
    # Added in place: a one-hot matrix would be as large as the outputs.
    minus_one = torch.full_like(gradient[..., :1], -1.0)
    return gradient.scatter_add_(2, y[..., None], minus_one)


@cache
def _labels(classes: int, device: torch.device) -> torch.Tensor:
    """Return the labels in order, (classes,)."""
    return torch.arange(classes, device=device)


def kernels(params: Params) -> dict[str, torch.Tensor]:
    """Return copies of one client's kernels in the layout of convolutions, by name.

    Args:
        params: parameters (1, …) by name.
    """
    copies = {}
    for name, value in params.items():
        if value.dim() == IMAGES:
            copies[name] = value[0].clone(memory_format=torch.channels_last)[None]
    return copies


def _leaves(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers of nested Sequentials in order, with their qualified names."""
    # A subclass or a hook may compute anything, so such a module is a leaf.
    if type(module) is not nn.Sequential or _altered(module):
        yield prefix, module
        return
    for name, child in module._modules.items():
        assert child is not None
        yield from _leaves(child, f"{prefix}.{name}".lstrip("."))


def _layer(name: str, module: nn.Module, flattened: bool) -> Layer | None:
    """Return the fused layer for a module.

    Args:
        name: the module's qualified name.
        module: the module.
        flattened: True if it comes after the Flatten.

    Returns:
        The layer, or None if there is none for it on this side of the Flatten. Exact types are
        compared, since a subclass may compute anything.
    """
    if _altered(module):
        return None
    if type(module) is nn.ReLU:
        return Relu()
    if flattened:
        return _dense_layer(name, module)
    if type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
        return Flatten()
    if type(module) is nn.Conv2d:
        return _conv_layer(name, module)
    if type(module) is nn.MaxPool2d and not module.return_indices:
        return Pooling(
            _two(module.kernel_size),
            _two(module.stride),
            _two(module.padding),
            _two(module.dilation),
            module.ceil_mode,
        )
    return None


def _dense_layer(name: str, module: nn.Module) -> Dense | None:
    if type(module) is not nn.Linear:
        return None
    return Dense(f"{name}.weight", _bias_name(name, module))


def _conv_layer(name: str, module: nn.Conv2d) -> Conv | None:
    padding = _padding(module)
    if padding is None or module.padding_mode != "zeros":
        return None
    return Conv(
        f"{name}.weight",
        _bias_name(name, module),
        module.stride,
        padding,
        module.dilation,
        module.groups,
    )


def _bias_name(name: str, module: nn.Module) -> str | None:
    if module.bias is None:
        return None
    return f"{name}.bias"


def _altered(module: nn.Module) -> bool:
    """Return True if a module does more than its class says."""
    hooks = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in vars(module)


def _padding(module: nn.Conv2d) -> tuple[int, ...] | None:
    """Return the padding in numbers.

    None where the two sides of an axis differ ("same" with an even kernel).
    """
    if not isinstance(module.padding, str):
        return module.padding
    padding = []
    for size, dilation in zip(module.kernel_size, module.dilation, strict=True):
        both_sides = dilation * (size - 1)
        if module.padding == "valid":
            both_sides = 0
        if both_sides % 2:
            return None
        padding.append(both_sides // 2)
    return tuple(padding)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    """Return x (n, channels, height, width) in channels-last layout, by its strides as well."""
    _, channels, height, width = x.shape
    x = x.contiguous(memory_format=torch.channels_last)
    if channels != 1:
        return x
    # With one channel strides are ambiguous, and torch would take them for the other layout.
    return x.as_strided(x.shape, (height * width, 1, width, 1))


def _two(value: int | tuple[int, ...]) -> tuple[int, int]:
    """Return a size for both axes, from one number or two."""
    if isinstance(value, int):
        return value, value
    return value[0], value[-1]
