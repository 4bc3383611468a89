"""An LSTM that `torch.vmap` supports, with forward and backward pass by hand.

nn.LSTM refuses vmap, so its clients train one after the other, each paying for every step's small
products and calls. Here a step is one batched product and a few elementwise operations for all
clients. Tensors are (b, n, T, …): b clients, n samples each, T steps. Gates are stored (T, 4, b, n,
H), so that what a step works on is one piece of memory, whatever H is. A test holds it equal to
nn.LSTM.

On a CPU, wide layers use torch's fused kernel, one client after the other.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from securecluster.errors import UsageError

aten: Any = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]

# cells from which on float32 goes to torch's fused kernel on a CPU, one client after the other
# (not in the paper)
WIDE = 96
GATES = 4  # i, f, g, o


class LSTM(nn.Module):
    """One LSTM layer: x (n, T, in) -> (n, T, H), from a state of zeros.

    Parameters have the names, shapes and distributions of nn.LSTM's. Gates are i, f, g, o, in
    nn.LSTM's order: c_t = f c_{t−1} + i g, h_t = o tanh c_t.

    Args:
        inputs: numbers of an input.
        cells: H.
    """

    def __init__(self, inputs: int, cells: int) -> None:
        super().__init__()
        self.inputs = inputs
        self.cells = cells
        rows = GATES * cells
        # nn.LSTM's order, which is that of the draws and of flat vectors.
        self.weight_ih_l0 = nn.Parameter(torch.empty(rows, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(rows, cells))
        self.bias_ih_l0 = nn.Parameter(torch.empty(rows))
        self.bias_hh_l0 = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all parameters uniformly in ±1/√H, as nn.LSTM does."""
        bound = 1 / math.sqrt(self.cells)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the outputs h of all steps, (n, T, H).

        Args:
            x: (n, T, in).

        Raises:
            UsageError: x is not (n, T, in), or T = 0.
        """
        if x.ndim != 3 or x.shape[2] != self.inputs or not x.shape[1]:
            raise UsageError(
                f"an LSTM of {self.inputs} inputs takes (n, T, {self.inputs}) with T ≥ 1, not "
                f"{tuple(x.shape)}"
            )
        weights = (self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0)
        if x.device.type == "cpu" and not _vmapped(x, *weights):
            return _fused(x, *weights)
        # cuDNN requires weights in one piece, which rows of models are not.
        batched = [weight[None] for weight in weights]
        return lstm(x[None], *batched)[0]

    def extra_repr(self) -> str:
        """Return the sizes, as nn.LSTM does."""
        return f"{self.inputs}, {self.cells}"


def lstm(
    x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor
) -> torch.Tensor:
    """Return the outputs (b, n, T, H) of b layers, each on its own input.

    Args:
        x: (b, n, T, in).
        w_ih: (b, 4H, in).
        w_hh: (b, 4H, H).
        b_ih: (b, 4H).
        b_hh: (b, 4H).
    """
    arguments = (x, w_ih, w_hh, b_ih, b_hh)
    out: torch.Tensor
    if _vmapped(*arguments):
        out = _Vmap.apply(*arguments)  # type: ignore[no-untyped-call]
        return out
    if _prefers_fused(x, cells=w_hh.shape[-1]):
        clients = zip(*(tensor.unbind(0) for tensor in arguments), strict=True)
        return torch.stack([_fused(*client) for client in clients])
    out = _Recurrence.apply(x, w_ih, w_hh, b_ih + b_hh)  # type: ignore[no-untyped-call]
    return out


def _vmapped(*tensors: torch.Tensor) -> bool:
    return any(torch._C._functorch.is_batchedtensor(tensor) for tensor in tensors)


def _prefers_fused(x: torch.Tensor, cells: int) -> bool:
    """Return True if torch's kernel for one client is faster than the batched recurrence."""
    if x.device.type != "cpu":
        return False
    if len(x) == 1:
        return True
    fast = x.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return fast and cells >= WIDE


def _fused(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """Return one client's outputs (n, T, H) by torch's own kernel.

    Args:
        x: (n, T, in).
        weights: the layer's four parameters.
    """
    cells = weights[1].shape[1]
    zero = x.new_zeros(1, len(x), cells)
    has_biases = True
    layers = 1
    dropout = 0.0
    bidirectional = False
    batch_first = True
    out: torch.Tensor
    out, _, _ = torch.lstm(
        x,
        (zero, zero),
        weights,
        has_biases,
        layers,
        dropout,
        torch.is_grad_enabled(),
        bidirectional,
        batch_first,
    )
    return out


class _Vmap(torch.autograd.Function):
    """Rule of `lstm` for vmap: its axis becomes part of the axis of clients.

    Only `vmap` is ever called: it continues with `lstm` of ordinary tensors.
    """

    @staticmethod
    def forward(*arguments: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *arguments: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        size = info.batch_size
        merged = []
        for tensor, dim in zip(arguments, in_dims, strict=True):
            batched = _batch_first(tensor, dim, size)
            merged.append(batched.flatten(0, 1))
        out = lstm(*merged)
        return out.view(size, -1, *out.shape[1:]), 0


def _batch_first(tensor: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """Return a tensor with vmap's axis, of a given size, in front."""
    # None marks a tensor that all entries share.
    if dim is None:
        return tensor.expand(size, *tensor.shape)
    return tensor.movedim(dim, 0)


class _Recurrence(torch.autograd.Function):
    """Recurrent steps of all clients together, and their gradients back through time."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        """Return the outputs (b, n, T, H) on x (b, n, T, in); bias is (b, 4H)."""
        b, n, steps, _ = x.shape
        # One product for the inputs of all steps.
        inputs = x.transpose(1, 2).reshape(b, steps * n, -1)  # (b, T n, in)
        projected = torch.bmm(inputs, w_ih.mT).view(b, steps, n, -1)
        out, gates, cells = _forward(projected, w_hh, bias)
        ctx.save_for_backward(inputs, w_ih, w_hh, out, gates, cells)
        return out.transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients at x, w_ih, w_hh and bias; grad_out is (b, n, T, H)."""
        inputs, w_ih, w_hh, out, gates, cells = ctx.saved_tensors
        steps, b, n, _ = cells.shape
        grad_projected = _backward(grad_out.transpose(1, 2), w_hh, gates, cells)
        grad_rows = grad_projected.view(b, steps * n, -1)  # (b, T n, 4H)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_inputs = torch.bmm(grad_rows, w_ih)
            grad_x = grad_inputs.view(b, steps, n, -1).transpose(1, 2)
        # The step before the first has h = 0, so it does not count.
        h_before = out.flatten(1, 2)[:, :-n]
        grad_hh = torch.bmm(grad_rows[:, n:].mT, h_before)
        grad_ih = torch.bmm(grad_rows.mT, inputs)
        return grad_x, grad_ih, grad_hh, grad_rows.sum(1)


def _forward(projected: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """Compute all steps.

    Args:
        projected: products of the inputs with w_ih, (b, T, n, 4H).
        w_hh: (b, 4H, H).
        bias: sum of both biases, (b, 4H).

    Returns:
        h (b, T, n, H), the gates (T, 4, b, n, H) and c (T, b, n, H).
    """
    b, steps, n, width = projected.shape
    hidden = width // GATES
    weight = w_hh.mT.contiguous()  # the faster order for few samples
    bias = bias[:, None]
    gates = projected.new_empty(steps, GATES, b, n, hidden)
    out = projected.new_empty(b, steps, n, hidden)
    cells = torch.empty_like(gates[:, 0])
    # Buffers that every step overwrites; `recurrent_gates` is a view of `recurrent`.
    recurrent = bias.repeat(1, n, 1)  # (b, n, 4H)
    recurrent_gates = _gates_first(recurrent[:, None])[0]
    tanh_c = torch.empty_like(cells[0])
    # Views of all steps at once: slicing in each step would cost as much as a small product.
    inputs = _gates_first(projected)
    gates_of_step = gates.unbind(0)
    c_of_step = cells.unbind(0)
    h_of_step = out.unbind(1)
    for t in range(steps):
        if t > 0:
            torch.baddbmm(bias, h_of_step[t - 1], weight, out=recurrent)
        step_gates = gates_of_step[t]
        torch.add(inputs[t], recurrent_gates, out=step_gates)
        # i and f are neighbours, so one call serves both.
        i, f = step_gates[:2].sigmoid_().unbind(0)
        g = step_gates[2].tanh_()
        o = step_gates[3].sigmoid_()
        c = c_of_step[t]
        torch.mul(i, g, out=c)
        if t > 0:
            c.addcmul_(f, c_of_step[t - 1])
        torch.tanh(c, out=tanh_c)
        torch.mul(o, tanh_c, out=h_of_step[t])
    return out, gates, cells


def _backward(
    grad_out: torch.Tensor, w_hh: torch.Tensor, gates: torch.Tensor, cells: torch.Tensor
) -> torch.Tensor:
    """Return the gradient at the gates' inputs, (b, T, n, 4H).

    Args:
        grad_out: gradient at the outputs, (b, T, n, H).
        w_hh: (b, 4H, H).
        gates: values of the gates, (T, 4, b, n, H).
        cells: c of each step, (T, b, n, H).
    """
    steps, _, b, n, hidden = gates.shape
    result = gates.new_empty(b, steps, n, GATES * hidden)
    # Buffers of one step's gradients; the named ones are views of `grad_gates`.
    grad_gates = torch.empty_like(gates[0])
    grad_i, grad_f, grad_g, grad_o = grad_gates.unbind(0)
    grad_if = grad_gates[:2]
    # Gradients at h_t and c_t from later steps.
    grad_h = torch.zeros_like(cells[0])
    grad_c = torch.zeros_like(cells[0])
    tanh_c = torch.empty_like(cells[0])
    through_h = torch.empty_like(cells[0])
    gates_of_step = gates.unbind(0)
    grad_out_of_step = grad_out.unbind(1)
    result_of_step = result.unbind(1)
    result_gates = _gates_first(result)
    c_of_step = (torch.zeros_like(grad_c), *cells.unbind(0))  # from the state before the first
    for t in reversed(range(steps)):
        step_gates = gates_of_step[t]
        i, f, g, o = step_gates.unbind(0)
        # h = o tanh c
        grad_h += grad_out_of_step[t]
        torch.tanh(c_of_step[t + 1], out=tanh_c)
        torch.mul(grad_h, tanh_c, out=grad_o)
        torch.mul(grad_h, o, out=through_h)
        grad_c += _tanh_backward(through_h, tanh_c)
        # c = f c_before + i g
        torch.mul(grad_c, g, out=grad_i)
        torch.mul(grad_c, c_of_step[t], out=grad_f)
        torch.mul(grad_c, i, out=grad_g)
        _sigmoid_backward(grad_if, step_gates[:2])
        _tanh_backward(grad_g, g)
        _sigmoid_backward(grad_o, o)
        result_gates[t].copy_(grad_gates)
        if t > 0:
            grad_c *= f
            torch.bmm(result_of_step[t], w_hh, out=grad_h)
    return result


def _sigmoid_backward(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Multiply a gradient by σ′ at the value of σ, in place."""
    result: torch.Tensor = aten.sigmoid_backward.grad_input(gradient, value, grad_input=gradient)
    return result


def _tanh_backward(gradient: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Multiply a gradient by tanh′ at the value of tanh, in place."""
    result: torch.Tensor = aten.tanh_backward.grad_input(gradient, value, grad_input=gradient)
    return result


def _gates_first(rows: torch.Tensor) -> Tensors:
    """Return rows (b, T, n, 4H) as T views (4, b, n, H)."""
    b, steps, n, width = rows.shape
    split = rows.view(b, steps, n, GATES, width // GATES)
    return split.permute(1, 3, 0, 2, 4).unbind(0)
