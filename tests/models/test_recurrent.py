"""The batched LSTM against nn.LSTM, forward and backward, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from securecluster.errors import UsageError
from securecluster.models import recurrent
from securecluster.models.flat_model import FlatModel
from securecluster.models.objectives import Trajectory
from securecluster.models.recurrent import LSTM, lstm

NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
SIZES = [
    (5, 3, 4, 2, 4), (3, 1, 1, 2, 3), (2, 1, 6, 1, 1), (4, 2, 1, 3, 2), (3, 1, 5, 2, 3),
    (1, 3, 5, 2, 3), (3, 4, 7, 5, 6),
]  # b, n, T, in, H  # fmt: skip
Rows = tuple[torch.Tensor, ...]


def draw(
    b: int, n: int, steps: int, inputs: int, cells: int, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, Rows]:
    generator = torch.Generator().manual_seed(b + 10 * n + 100 * steps)
    shapes = ((4 * cells, inputs), (4 * cells, cells), (4 * cells,), (4 * cells,))
    weights = tuple(
        torch.randn(b, *s, generator=generator, dtype=dtype).requires_grad_() for s in shapes
    )
    return torch.randn(
        b, n, steps, inputs, generator=generator, dtype=dtype
    ).requires_grad_(), weights


def theirs(x: torch.Tensor, weights: Rows) -> torch.Tensor:
    """nn.LSTM's outputs, one client after the other."""
    module = nn.LSTM(x.shape[-1], weights[1].shape[-1], batch_first=True).to(x.dtype)
    own = [dict(zip(NAMES, (w[k] for w in weights), strict=True)) for k in range(len(x))]
    return torch.stack(
        [torch.func.functional_call(module, own[k], (x[k],))[0] for k in range(len(x))]
    )


def by_vmap(x: torch.Tensor, weights: Rows) -> torch.Tensor:
    module = LSTM(x.shape[-1], weights[1].shape[-1])

    def call(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(
            module, dict(zip(NAMES, weights, strict=True)), (x,)
        )
        return out

    return torch.func.vmap(call)(x, *weights)


def gradients(out: torch.Tensor, x: torch.Tensor, weights: Rows) -> Rows:
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(7), dtype=out.dtype)
    return torch.autograd.grad((out * weight).sum(), (x, *weights))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("wide", [1, 1000])
def test_outputs_and_gradients_are_those_of_nn_lstm(
    size: tuple[int, ...], wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent, "WIDE", wide)
    x, weights = draw(*size)
    expected, out = theirs(x, weights), by_vmap(x, weights)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
    for found, right in zip(
        gradients(out, x, weights), gradients(expected, x, weights), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("wide", [1, 1000])
def test_both_ways_of_float32(wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "WIDE", wide)
    x, weights = draw(3, 4, 6, 5, 8, torch.float32)
    expected, out = theirs(x, weights), by_vmap(x, weights)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for found, right in zip(
        gradients(out, x, weights), gradients(expected, x, weights), strict=True
    ):
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-4)


def test_many_clients_are_as_many_single_ones() -> None:
    x, weights = draw(4, 3, 5, 2, 3)
    module = LSTM(2, 3).double()
    for k, own in enumerate(by_vmap(x, weights)):
        alone = torch.func.functional_call(
            module, dict(zip(NAMES, (w[k] for w in weights), strict=True)), (x[k],)
        )
        torch.testing.assert_close(own, alone, rtol=1e-10, atol=1e-10)


def test_gradcheck() -> None:
    x, weights = draw(2, 2, 3, 2, 2)
    assert torch.autograd.gradcheck(lstm, (x, *weights))


def test_what_is_shared_by_the_clients_need_not_be_repeated() -> None:
    x, weights = draw(3, 2, 4, 2, 3)
    one = [w[0].detach() for w in weights]
    out = torch.func.vmap(lambda x: lstm(x[None], *(w[None] for w in one))[0])(x)
    first = tuple(w[:1].expand(3, *w.shape[1:]) for w in weights)
    torch.testing.assert_close(out, theirs(x, first), rtol=1e-10, atol=1e-10)


def test_two_axes_of_models() -> None:
    x, weights = draw(6, 2, 4, 2, 3)
    both = (t.unflatten(0, (2, 3)) for t in (x, *weights))
    out = torch.func.vmap(torch.func.vmap(lambda *every: lstm(*(t[None] for t in every))[0]))(*both)
    torch.testing.assert_close(out.flatten(0, 1), theirs(x, weights), rtol=1e-10, atol=1e-10)


def test_without_gradients_and_on_inputs_in_another_order_of_memory() -> None:
    x, weights = draw(3, 2, 4, 2, 3)
    with torch.no_grad():
        out = by_vmap(x.transpose(1, 2).contiguous().transpose(1, 2), weights)
        torch.testing.assert_close(out, theirs(x, weights), rtol=1e-10, atol=1e-10)
    assert not out.requires_grad


def test_it_loads_what_nn_lstm_saves_and_is_drawn_alike() -> None:
    torch.manual_seed(0)
    mine, reference = LSTM(3, 50), nn.LSTM(3, 50, batch_first=True)
    mine.load_state_dict(reference.state_dict(), strict=True)
    x = torch.randn(2, 4, 3)
    torch.testing.assert_close(mine(x), reference(x)[0])
    mine.reset_parameters()
    for parameter in mine.parameters():
        assert 0.9 / math.sqrt(50) < parameter.abs().max() <= 1 / math.sqrt(50)
        assert abs(parameter.mean()) < 0.02


@pytest.mark.parametrize("shape", [(2, 3), (2, 4, 2), (2, 0, 3), (1, 2, 4, 3)], ids=str)
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"takes \(n, T, 3\)"):
        LSTM(3, 4)(torch.zeros(shape))


class Next(nn.Module):
    """A model of one's own around it."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core, self.out = core, nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.core(x)
        out: torch.Tensor = self.out((h[0] if isinstance(h, tuple) else h)[:, -1])
        return out


def test_a_model_with_it_has_the_gradients_of_one_with_nn_lstm() -> None:
    torch.manual_seed(1)
    mine, reference = Next(LSTM(2, 3)).double(), Next(nn.LSTM(2, 3, batch_first=True)).double()
    reference.load_state_dict(mine.state_dict())
    flat = FlatModel(mine, objective=Trajectory())
    rows = flat.initial() * torch.tensor([[1.0], [0.5], [-2.0]], dtype=torch.float64)
    shapes = ((3, 5, 4, 2), (3, 5, 2), (3, 5))
    x, y, weight = (torch.rand(shape, dtype=torch.float64) for shape in shapes)
    found = flat.gradients(flat.views(rows), x, y, weight, None)
    for k, row in enumerate(rows):
        nn.utils.vector_to_parameters(row, reference.parameters())
        reference.zero_grad()
        ((reference(x[k]) - y[k]).square().mean(1) * weight[k]).sum().backward()  # type: ignore[no-untyped-call]
        for name, parameter in reference.named_parameters():
            assert parameter.grad is not None
            torch.testing.assert_close(found[name][k], parameter.grad, rtol=1e-10, atol=1e-10)
