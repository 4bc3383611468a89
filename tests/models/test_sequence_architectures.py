"""The networks for sequences: their sizes, what they take, and many clients at once against plain
modules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.models.objectives import Language, Objective, Trajectory
from securecluster.models.recurrent import LSTM
from securecluster.models.sequence_architectures import (
    lstm_chars,
    lstm_chars_256,
    lstm_trajectory,
    lstm_words,
)
from securecluster.models.validation import prepare_module

Make = Callable[[tuple[int, ...], int], nn.Module]
TEXT, TRACK = Language(), Trajectory((10_000.0, 6200.0))


def count(inputs: int, cells: int) -> int:
    """nn.LSTM's parameters."""
    return 4 * cells * (inputs + cells + 2)


COUNTS: dict[Make, tuple[tuple[int, ...], int, Objective, int]] = {
    lstm_words: ((20,), 2000, TEXT, 2000 * 64 + 2 * count(64, 64) + 65 * 2000),
    lstm_chars: ((80,), 73, TEXT, 73 * 8 + count(8, 96) + count(96, 96) + 97 * 73),
    lstm_chars_256: (
        (80,),
        90,
        TEXT,
        820_522 + 2 * 1024,
    ),  # Reddi et al. 2021 print 820,522, with one bias a layer
    lstm_trajectory: ((10, 2), 2, TRACK, count(2, 4) + 5 * 20 + 2 * 21 * 20 + 21 * 2),
}


@pytest.mark.parametrize("make", COUNTS)
def test_sizes(make: Make) -> None:
    shape, classes, objective, size = COUNTS[make]
    flat = prepare_module(make(shape, classes), shape, classes, objective=objective)
    assert flat.dimension == size
    assert flat.together
    assert list(flat.shapes)[-2:] == ["out.weight", "out.bias"]
    assert not torch.equal(flat.redrawn(Randomness(0), "other"), flat.initial())


def test_the_last_layers_of_a_trajectory_have_names() -> None:
    shapes = prepare_module(lstm_trajectory((10, 2), 2), (10, 2), 2, objective=TRACK).shapes
    assert shapes["hidden3.weight"] == (20, 20) and shapes["out.weight"] == (2, 20)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(lstm_words, (20, 2)), (lstm_chars, ()), (lstm_chars_256, (0,)), (lstm_words, (1, 28, 28))],
)
def test_tokens_are_one_row(make: Make, shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"takes tokens of shape \(L,\)"):
        make(shape, 10)


@pytest.mark.parametrize("shape", [(20,), (0, 2), (1, 28, 28)])
def test_positions_are_steps_of_coordinates(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match=r"takes positions of shape \(T, k\)"):
        lstm_trajectory(shape, 2)


class Plain(nn.Module):
    """nn.LSTM's outputs alone."""

    def __init__(self, own: LSTM) -> None:
        super().__init__()
        self.own = nn.LSTM(own.inputs, own.cells, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.own(x)[0]
        return out


def plainly(module: nn.Module) -> nn.Module:
    """The same layers with nn.LSTM, dropout off, in float64."""
    found = copy.deepcopy(module).double().eval()
    for name, part in list(found.named_children()):
        if isinstance(part, LSTM):
            setattr(found, name, Plain(part))
    return found.double()


def mean_loss(objective: Objective, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    if isinstance(objective, Language):
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())
    return nn.functional.mse_loss(out, y)


@pytest.mark.parametrize("make", [lstm_words, lstm_chars, lstm_trajectory])
def test_gradients_of_many_clients_are_those_of_plain_modules(make: Make) -> None:
    _, _, objective, _ = COUNTS[make]
    shape, classes = ((4, 2), 2) if objective is TRACK else ((5,), 11)
    flat = prepare_module(make(shape, classes), shape, classes, objective=objective).to(
        torch.device("cpu"), torch.float64
    )
    rows = flat.initial() * torch.tensor([[1.0], [0.7]], dtype=torch.float64)
    if objective is TRACK:
        x = torch.rand(2, 3, *shape, dtype=torch.float64)
        y = torch.rand(2, 3, classes, dtype=torch.float64)
    else:
        x, y = torch.randint(classes, (2, 3, *shape)), torch.randint(classes, (2, 3, *shape))
    found = flat.gradients(
        flat.views(rows), x, y, torch.full((2, 3), 1 / 3, dtype=torch.float64), None
    )
    plain = plainly(flat.module)
    for k, row in enumerate(rows):
        nn.utils.vector_to_parameters(row, plain.parameters())
        grads = torch.autograd.grad(
            mean_loss(objective, plain(x[k]), y[k]), list(plain.parameters())
        )
        for gradient, own in zip(grads, found.values(), strict=True):
            torch.testing.assert_close(own[k], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make", [lstm_words, lstm_trajectory])
def test_dropout_is_each_clients_own(make: Make) -> None:
    shape, classes, objective, _ = COUNTS[make]
    flat = prepare_module(make(shape, classes), shape, classes, objective=objective)
    x, _, _ = objective.example(shape, classes)
    rows, both = flat.views(flat.initial().expand(3, -1)), x.expand(3, *x.shape)
    first, second, third = flat.stacked(rows, both, torch.tensor([5, 6, 5]))
    torch.testing.assert_close(first, third)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(
        first, flat.call(flat.views(flat.initial()), x, torch.tensor(5)), rtol=1e-4, atol=1e-5
    )


def test_positions_are_counted_from_the_middle_of_the_area_in_standard_deviations() -> None:
    module = lstm_trajectory((6, 2), 2).double().eval()
    x = torch.rand(50, 6, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = nn.LSTM(2, 4, batch_first=True).double()
    own.load_state_dict(module.lstm.state_dict())  # type: ignore[union-attr, arg-type]
    h = own((x - 0.5) * math.sqrt(12))[0][:, -1]
    for name in ("hidden1", "hidden2", "hidden3"):
        h = nn.functional.leaky_relu(getattr(module, name)(h))
    torch.testing.assert_close(module(x), 0.5 + module.out(h))  # type: ignore[operator]
    uniform = np.random.default_rng(0).random(100_000)
    assert ((uniform - 0.5) * math.sqrt(12)).std() == pytest.approx(1, abs=0.01)


def test_hidden_layers_of_trajectories_start_as_he_et_al_and_can_be_drawn_anew() -> None:
    flat = prepare_module(lstm_trajectory((10, 2), 2), (10, 2), 2, objective=TRACK)
    for row in (flat.initial(), flat.redrawn(Randomness(3), "other")):
        views = flat.views(row)
        for name in ("hidden1", "hidden2", "hidden3", "out"):
            assert not views[f"{name}.bias"].any()
        for name in ("hidden2", "hidden3"):
            bound = math.sqrt(6 / 20)
            assert 0.9 * bound < float(views[f"{name}.weight"].abs().max()) <= bound
    assert not torch.equal(flat.initial(), flat.redrawn(Randomness(3), "other"))
