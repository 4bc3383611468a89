"""Gradients by hand against autograd on the module itself, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from securecluster.models.fused_layers import Pooling, Relu, compile_stack, cross_entropy_gradient
from securecluster.models.optimizers import Sgd
from securecluster.models.validation import FlatModel

DENSE: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 7), nn.ReLU(), nn.Linear(7, 3)),
    "no bias": lambda: nn.Sequential(
        nn.Flatten(), nn.Linear(128, 7, bias=False), nn.ReLU(), nn.Linear(7, 3)
    ),
    "relu first and last": lambda: nn.Sequential(
        nn.ReLU(), nn.Flatten(), nn.ReLU(), nn.Linear(128, 9), nn.Linear(9, 3), nn.ReLU()
    ),
    "nested": lambda: nn.Sequential(
        nn.Flatten(), nn.Sequential(nn.Linear(128, 7), nn.ReLU()), nn.Sequential(nn.Linear(7, 3))
    ),
}


def _cnn(convolution: nn.Module, *rest: nn.Module) -> nn.Module:
    body = nn.Sequential(convolution, *rest, nn.Flatten())
    width = body(torch.zeros(1, 2, 8, 8)).shape[1]
    return nn.Sequential(*body, nn.Linear(width, 5), nn.ReLU(), nn.Linear(5, 3))


CONVOLUTIONAL: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: _cnn(nn.Conv2d(2, 4, 3), nn.ReLU()),
    "pool": lambda: _cnn(
        nn.Conv2d(2, 4, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 3, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ),
    "pool before relu": lambda: _cnn(nn.Conv2d(2, 4, 3), nn.MaxPool2d(2), nn.ReLU()),
    "odd pool": lambda: _cnn(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1, ceil_mode=True)
    ),
    "uneven": lambda: _cnn(
        nn.Conv2d(
            2, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2), groups=2, bias=False
        ),
        nn.ReLU(),
    ),
    "same": lambda: _cnn(
        nn.Conv2d(2, 4, (5, 3), padding="same"), nn.ReLU(), nn.Conv2d(4, 2, 2, padding="valid")
    ),
    "pool of one number": lambda: _cnn(nn.Conv2d(2, 4, 3), nn.MaxPool2d((2,))),
    "pool first": lambda: _cnn(nn.MaxPool2d(2), nn.Conv2d(2, 4, 3), nn.ReLU()),
}


class OneChannel(nn.Sequential):
    """A subclass may compute anything: it is no plain stack."""


def hooked() -> nn.Module:
    module = DENSE["mlp"]()
    module[1].register_forward_hook(lambda m, i, o: 2 * o)  # type: ignore[index]
    return module


def hooked_outside() -> nn.Module:
    module = DENSE["nested"]()
    module[1].register_forward_hook(lambda m, i, o: 2 * o)  # type: ignore[index]
    return module


def hooked_backward() -> nn.Module:
    module = DENSE["mlp"]()
    module[1].register_full_backward_hook(lambda m, i, o: (2 * i[0],))  # type: ignore[index]
    return module


def patched() -> nn.Module:
    module = DENSE["mlp"]()
    module[2].forward = torch.tanh  # type: ignore[index]
    return module


def tied() -> nn.Module:
    module = nn.Sequential(
        nn.Flatten(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.Linear(128, 3)
    )
    module[3].weight = module[1].weight
    return module


def twice() -> nn.Module:
    layer = nn.Linear(128, 128)
    return nn.Sequential(nn.Flatten(), layer, layer)


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(128, 3), nn.Tanh()),
    "a linear used twice": twice,
    "linear before flatten": lambda: nn.Sequential(nn.Linear(8, 2), nn.Flatten(), nn.Linear(32, 3)),
    "two flattens": lambda: nn.Sequential(nn.Flatten(), nn.Flatten(), nn.Linear(128, 3)),
    "flatten of some axes": lambda: nn.Sequential(nn.Flatten(2), nn.Flatten(), nn.Linear(128, 3)),
    "no flatten": lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()),
    "circular": lambda: _cnn(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular")),
    "same with an even kernel": lambda: nn.Sequential(
        nn.Conv2d(2, 4, 2, padding="same"), nn.Flatten(), nn.Linear(256, 3)
    ),
    "a subclass": lambda: OneChannel(nn.Flatten(), nn.Linear(128, 3)),
    "a hook": hooked,
    "a hook on a sequence": hooked_outside,
    "a backward hook": hooked_backward,
    "a forward pass of its own": patched,
    "tied weights": tied,
    "nothing that trains": lambda: nn.Sequential(nn.Flatten(), nn.ReLU()),
}


@pytest.fixture(autouse=True)
def initial_weights() -> Iterator[None]:
    """The same ones in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check_step(module: nn.Module, clients: int, x: torch.Tensor) -> None:
    """One step with lr 1 moves each weight by autograd's gradient of the weighted loss."""
    module = module.double()
    flat, n = FlatModel(module), x.shape[1]
    assert flat.stack is not None
    before = torch.stack(
        [flat.initial() + 0.05 * normal(k, flat.dimension) for k in range(clients)]
    )
    rows, y = before.clone(), torch.arange(clients * n).view(clients, n) % 3
    weight = normal(9, clients, n).abs()
    weight[-1, -1] = 0  # padding
    views = flat.views(rows)
    with torch.no_grad():
        flat.stack.step(views, x.clone(), y, weight, Sgd(views, 1.0))
    for k in range(clients):
        own = copy.deepcopy(module)
        nn.utils.vector_to_parameters(before[k].clone(), own.parameters())
        losses = nn.functional.cross_entropy(own(x[k]), y[k], reduction="none")
        parts = torch.autograd.grad((losses * weight[k]).sum(), list(own.parameters()))
        gradient = torch.cat([part.flatten() for part in parts])
        torch.testing.assert_close(before[k] - rows[k], gradient, rtol=1e-10, atol=1e-12)
        assert gradient.abs().max() > 1e-3


@pytest.mark.parametrize("make", DENSE.values(), ids=DENSE)
@pytest.mark.parametrize("clients", [1, 4])
def test_dense_stacks_step_by_autograds_gradient(
    make: Callable[[], nn.Module], clients: int
) -> None:
    check_step(make(), clients, normal(1, clients, 6, 2, 8, 8))


@pytest.mark.parametrize("make", CONVOLUTIONAL.values(), ids=CONVOLUTIONAL)
def test_convolutional_stacks_step_by_autograds_gradient(make: Callable[[], nn.Module]) -> None:
    module = make()
    check_step(module, 1, normal(1, 1, 6, 2, 8, 8))
    stack = compile_stack(module, cross_entropy_gradient)
    assert stack is not None and stack.convolves


def test_one_channel_whose_layout_is_ambiguous() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
    )
    check_step(module, 1, normal(1, 1, 6, 1, 8, 8))


@pytest.mark.parametrize(
    "make", [*DENSE.values(), *CONVOLUTIONAL.values()], ids=[*DENSE, *CONVOLUTIONAL]
)
def test_outputs_are_the_modules(make: Callable[[], nn.Module]) -> None:
    module = make().double()
    flat, x = FlatModel(module), normal(2, 1, 5, 2, 8, 8)
    assert flat.stack is not None
    found, _ = flat.stack.forward(flat.views(flat.initial()[None]), x.clone())
    torch.testing.assert_close(found[0], module(x[0]).detach(), rtol=1e-12, atol=1e-12)


def test_a_relu_after_a_convolution_waits_for_the_pool() -> None:
    stack = compile_stack(CONVOLUTIONAL["pool"](), cross_entropy_gradient)
    assert stack is not None
    kinds = [type(layer) for layer in stack.layers]
    assert kinds.index(Pooling) + 1 == kinds.index(Relu)


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_anything_else_goes_through_torch_func(make: Callable[[], nn.Module]) -> None:
    assert compile_stack(make(), cross_entropy_gradient) is None


def test_frozen_parameters_keep_a_module_off_this_path() -> None:
    module = DENSE["mlp"]()
    assert FlatModel(module).stack is not None
    module[1].weight.requires_grad_(False)  # type: ignore[index]
    assert FlatModel(module).stack is None
