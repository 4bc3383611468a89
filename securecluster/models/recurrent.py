"""An LSTM that `torch.vmap` takes, forward and backward by hand, all clients of a chunk at once.

nn.LSTM refuses vmap, so its clients train one after the other, each paying for every step's small
products and calls. Here a step is one batched product and a few elementwise operations for all
clients. Tensors are (b, n, T, …): b clients, n samples each, T steps. Gates are kept (T, 4, b, n,
H), so that what a step works on is one piece of memory, whatever H is. A test holds it equal to
nn.LSTM.
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
# (ours)
WIDE = 96


class LSTM(nn.Module):
    """One layer, parameters named, shaped and drawn as nn.LSTM's: x (n, T, in) -> (n, T, H), from a
    state of zeros.

    Gates are i, f, g, o, in nn.LSTM's order: c_t = f c_{t−1} + i g, h_t = o tanh c_t.
    """

    def __init__(self, inputs: int, cells: int) -> None:
        super().__init__()
        self.inputs, self.cells = inputs, cells
        self.weight_ih_l0 = nn.Parameter(torch.empty(4 * cells, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(4 * cells, cells))
        self.bias_ih_l0 = nn.Parameter(torch.empty(4 * cells))
        self.bias_hh_l0 = nn.Parameter(torch.empty(4 * cells))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in ±1/√H, as nn.LSTM's."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(self.cells), 1 / math.sqrt(self.cells))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All steps' h.

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
            return _own(x, *weights)
        # cuDNN wants weights in one piece, as rows of models are not
        return lstm(x[None], *(w[None] for w in weights))[0]

    def extra_repr(self) -> str:
        """As nn.LSTM's."""
        return f"{self.inputs}, {self.cells}"


def lstm(
    x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, b_ih: torch.Tensor, b_hh: torch.Tensor
) -> torch.Tensor:
    """The outputs (b, n, T, H) of b layers, each on its own x (b, n, T, in).

    Args:
        w_ih: (b, 4H, in). w_hh: (b, 4H, H). b_ih: (b, 4H). b_hh: (b, 4H).
    """
    every = (x, w_ih, w_hh, b_ih, b_hh)
    out: torch.Tensor
    if _vmapped(*every):
        out = _Vmap.apply(*every)  # type: ignore[no-untyped-call]
        return out
    fused = x.dtype == torch.float32 and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if x.device.type == "cpu" and (len(x) == 1 or (fused and w_hh.shape[-1] >= WIDE)):
        out = torch.stack([_own(*one) for one in zip(*(t.unbind(0) for t in every), strict=True)])
    else:
        out = _Recurrence.apply(x, w_ih, w_hh, b_ih + b_hh)  # type: ignore[no-untyped-call]
    return out


def _vmapped(*tensors: torch.Tensor) -> bool:
    return any(torch._C._functorch.is_batchedtensor(t) for t in tensors)


def _own(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """One client's outputs, by torch's own kernel."""
    zero = x.new_zeros(1, len(x), weights[1].shape[1])
    out: torch.Tensor = torch.lstm(
        x, (zero, zero), weights, True, 1, 0.0, torch.is_grad_enabled(), False, True
    )[0]
    return out


class _Vmap(torch.autograd.Function):
    """Only its rule for vmap is ever used: the axis of clients becomes part of b, and `lstm` goes
    on with ordinary tensors.
    """

    @staticmethod
    def forward(*every: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], *every: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        size = info.batch_size
        rows = (
            t.expand(size, *t.shape) if d is None else t.movedim(d, 0)
            for t, d in zip(every, in_dims, strict=True)
        )
        out = lstm(*(t.flatten(0, 1) for t in rows))
        return out.view(size, -1, *out.shape[1:]), 0


class _Recurrence(torch.autograd.Function):
    """All clients' steps together, and back through time."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, w_ih: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor
    ) -> torch.Tensor:
        b, n, steps, _ = x.shape
        before = x.transpose(1, 2).reshape(b, steps * n, -1)  # (b, T n, in)
        out, gates, cells = _forward(torch.bmm(before, w_ih.mT).view(b, steps, n, -1), w_hh, bias)
        ctx.save_for_backward(before, w_ih, w_hh, out, gates, cells)
        return out.transpose(1, 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        before, w_ih, w_hh, out, gates, cells = ctx.saved_tensors
        steps, b, n, _ = cells.shape
        d = _backward(d_out.transpose(1, 2), w_hh, gates, cells).view(b, steps * n, -1)
        d_x = (
            torch.bmm(d, w_ih).view(b, steps, n, -1).transpose(1, 2)
            if ctx.needs_input_grad[0]
            else None
        )
        d_hh = torch.bmm(d[:, n:].mT, out.flatten(1, 2)[:, :-n])  # h_0 = 0
        return d_x, torch.bmm(d.mT, before), d_hh, d.sum(1)


def _forward(projected: torch.Tensor, w_hh: torch.Tensor, bias: torch.Tensor) -> Tensors:
    """h (b, T, n, H), the gates (T, 4, b, n, H) and c (T, b, n, H) from the inputs' products (b, T,
    n, 4H).
    """
    b, steps, n, width = projected.shape
    weight, bias = w_hh.mT.contiguous(), bias[:, None]  # the faster order for few samples
    gates, out = (
        projected.new_empty(steps, 4, b, n, width // 4),
        projected.new_empty(b, steps, n, width // 4),
    )
    cells = torch.empty_like(gates[:, 0])
    product, tanh = bias.repeat(1, n, 1), torch.empty_like(cells[0])
    view = _gates_first(product[:, None])[0]
    last_h = last_c = None
    for p, gate, c, h in zip(
        _gates_first(projected), gates.unbind(0), cells.unbind(0), out.unbind(1), strict=True
    ):
        if last_h is not None:
            torch.baddbmm(bias, last_h, weight, out=product)
        torch.add(p, view, out=gate)
        (i, f), g, o = gate[:2].sigmoid_().unbind(0), gate[2].tanh_(), gate[3].sigmoid_()
        torch.mul(i, g, out=c)
        if last_c is not None:
            c.addcmul_(f, last_c)
        torch.mul(o, torch.tanh(c, out=tanh), out=h)
        last_h, last_c = h, c
    return out, gates, cells


def _backward(
    d_out: torch.Tensor, w_hh: torch.Tensor, gates: torch.Tensor, cells: torch.Tensor
) -> torch.Tensor:
    """Return the gradient at the gates' inputs, (b, T, n, 4H).

    It is made from the gradient at the outputs, (b, T, n, H).
    """
    steps, _, b, n, width = gates.shape
    found, d = gates.new_empty(b, steps, n, 4 * width), torch.empty_like(gates[0])
    (d_i, d_f, d_g, d_o), d_if = d.unbind(0), d[:2]
    d_h, d_c, tanh, own = (torch.zeros_like(cells[0]) for _ in range(4))
    c = (torch.zeros_like(d_h), *cells.unbind(0))
    gate, d_y, flat, view = gates.unbind(0), d_out.unbind(1), found.unbind(1), _gates_first(found)
    for t in reversed(range(steps)):
        i, f, g, o = gate[t].unbind(0)
        d_h += d_y[t]
        torch.mul(d_h, torch.tanh(c[t + 1], out=tanh), out=d_o)
        d_c += _tanh(torch.mul(d_h, o, out=own), tanh)
        torch.mul(d_c, g, out=d_i), torch.mul(d_c, c[t], out=d_f), torch.mul(d_c, i, out=d_g)
        _sigmoid(d_if, gate[t][:2]), _tanh(d_g, g), _sigmoid(d_o, o)
        view[t].copy_(d)
        if t:
            d_c *= f
            torch.bmm(flat[t], w_hh, out=d_h)
    return found


def _sigmoid(d: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """d σ′, in place."""
    found: torch.Tensor = aten.sigmoid_backward.grad_input(d, value, grad_input=d)
    return found


def _tanh(d: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """d tanh′, in place."""
    found: torch.Tensor = aten.tanh_backward.grad_input(d, value, grad_input=d)
    return found


def _gates_first(rows: torch.Tensor) -> Tensors:
    """(b, T, n, 4H) as T views (4, b, n, H)."""
    b, steps, n, width = rows.shape
    return rows.view(b, steps, n, 4, width // 4).permute(1, 3, 0, 2, 4).unbind(0)
