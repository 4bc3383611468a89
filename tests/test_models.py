"""Networks as functions of one flat vector."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from securecluster import models
from securecluster.errors import UsageError
from securecluster.models import FlatModel
from securecluster.randomness import Randomness


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def flat_of(module: nn.Module) -> FlatModel:
    named = dict(module.named_parameters())
    return FlatModel(module, tuple(named), tuple(p.shape for p in named.values()))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(16), nn.BatchNorm1d(16, track_running_stats=False)], ids=["running", "batch only"])
def test_batch_norm_is_refused_by_name(norm: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "normed", lambda shape, classes: nn.Sequential(nn.Flatten(), norm, nn.Linear(16, classes)))
    with pytest.raises(UsageError, match=r"'normed'.*group norm") as caught:
        models.build("normed", (1, 4, 4), 3, Randomness(0))
    assert "\n" not in str(caught.value)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="did you mean 'linear'"):
        models.build("linaer", (4,), 2, Randomness(0))


@pytest.mark.parametrize("name", models.MODELS)
def test_initial_weights_follow_the_seed_alone(name: str) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one = models.build(name, (1, 4, 4), 3, Randomness(0)).initial()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert torch.equal(one, models.build(name, (1, 4, 4), 3, Randomness(0)).initial())
    assert not torch.equal(one, models.build(name, (1, 4, 4), 3, Randomness(1)).initial())
    assert one.unique().numel() > len(one) // 2


@pytest.mark.parametrize(("name", "hidden"), [("mlp", 64), ("mlp-200", 200), ("linear", None)])
def test_networks_have_the_sizes_they_are_named_for(name: str, hidden: int | None) -> None:
    flat = models.build(name, (1, 8, 8), 10, Randomness(0))
    assert flat.dimension == (64 * 10 + 10 if hidden is None else 64 * hidden + hidden + hidden * 10 + 10)
    assert flat.module(torch.zeros(5, 1, 8, 8)).shape == (5, 10)


@pytest.mark.parametrize("name", models.MODELS)
def test_views_are_torchs_own_parameters(name: str) -> None:
    flat = models.build(name, (2, 3), 4, Randomness(1))
    assert torch.equal(flat.initial(), nn.utils.parameters_to_vector(flat.module.parameters()).detach())
    vector = normal(flat.dimension).float()
    module = copy.deepcopy(flat.module)
    nn.utils.vector_to_parameters(vector, module.parameters())
    views = flat.views(vector)
    assert list(views) == [n for n, _ in module.named_parameters()]
    assert all(torch.equal(views[n], p) for n, p in module.named_parameters())
    assert torch.equal(torch.cat([v.flatten() for v in views.values()]), vector)
    views[flat.names[0]][...] = 7.0
    assert (vector[: flat.shapes[0].numel()] == 7).all()
    rows = normal(5, flat.dimension).float()
    assert all(torch.equal(v[3], flat.views(rows[3])[n]) for n, v in flat.views(rows).items())


def _tied() -> nn.Module:
    relu = nn.ReLU()
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 8), relu, nn.Linear(8, 8), relu, nn.Linear(8, 3))


def _repeated() -> nn.Module:
    layer = nn.Linear(16, 16)
    return nn.Sequential(nn.Flatten(), layer, nn.ReLU(), layer, nn.Linear(16, 3))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: models.mlp((1, 4, 4), 3),
    "linear": lambda: models.linear((1, 4, 4), 3),
    "deep": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
    "no bias": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3)),
    "cnn": lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
    "one relu used twice": _tied,
    "one linear used twice": _repeated,
    "linear before flatten": lambda: nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)),
    "flatten of some axes": lambda: nn.Sequential(nn.Flatten(3), nn.Linear(4, 2), nn.Flatten(), nn.Linear(8, 3)),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_stacked_models_compute_what_each_module_does(make: Callable[[], nn.Module]) -> None:
    flat = flat_of(make().double())
    rows, x = normal(4, flat.dimension), normal(4, 6, 1, 4, 4)
    found = flat.stacked(rows, x)
    for row, own, outputs in zip(rows, x, found, strict=True):
        module = copy.deepcopy(flat.module)
        nn.utils.vector_to_parameters(row.clone(), module.parameters())
        torch.testing.assert_close(outputs, module(own), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", models.MODELS)
def test_the_dense_path_equals_the_general_one_in_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = models.build(name, (1, 4, 4), 3, Randomness(1))
    assert flat._dense
    rows, x = normal(4, flat.dimension), normal(4, 6, 1, 4, 4)
    results = []
    for dense in (True, False):
        monkeypatch.setattr(FlatModel, "_dense", dense)
        leaf = rows.clone().requires_grad_()
        out = flat.stacked(leaf, x)
        results.append((out.detach(), torch.autograd.grad(out.square().sum(), leaf)[0]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
