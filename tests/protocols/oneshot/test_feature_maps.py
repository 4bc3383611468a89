"""Feature maps against scikit-learn, numpy and plain modules; refusals of what cannot be a map."""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy.fft import dctn
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import nn

from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.protocols.oneshot import feature_maps
from securecluster.protocols.oneshot.feature_maps import build, check

SEED = Randomness(0)


def images(n: int, shape: tuple[int, ...] = (1, 8, 8), seed: int = 1) -> torch.Tensor:
    return torch.rand(n, *shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def digits() -> torch.Tensor:
    return torch.from_numpy((load_digits().images / 16).astype(np.float32))[:, None]


def test_identity_flattens() -> None:
    x = images(5, (3, 4, 2))
    found = build("identity", (3, 4, 2), SEED)
    assert found.dimension == 24 and found.describe() == "identity"
    assert torch.equal(found(x), x.reshape(5, 24))
    assert found(x[:0]).shape == (0, 24)


def test_pca_is_scikit_learns_on_the_public_samples(digits: torch.Tensor) -> None:
    found = build("pca", (1, 8, 8), SEED, public="digits", dimension=7)
    known = PCA(7, svd_solver="full").fit(digits.flatten(1).numpy().astype(np.float64))
    x = images(20)
    exact = x.flatten(1).numpy() @ known.components_.T  # about the origin, as G is
    signs = np.sign((exact * found(x).numpy()).sum(0))
    np.testing.assert_allclose(found(x).numpy() * signs, exact, rtol=0, atol=1e-5)


def test_a_draw_of_public_samples_follows_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_maps, "PUBLIC", 100)
    one, two, three = (
        build("pca", (1, 8, 8), Randomness(seed), public="digits") for seed in (0, 0, 1)
    )
    x = images(4)
    assert torch.equal(one(x), two(x)) and one.describe() == two.describe()
    assert not torch.allclose(one(x), three(x)) and one.describe() != three.describe()


@pytest.mark.parametrize(
    ("shape", "dimension"), [((1, 8, 8), 16), ((3, 6, 10), 25), ((1, 5, 4), 20)]
)
def test_dct_keeps_the_lowest_frequencies(shape: tuple[int, int, int], dimension: int) -> None:
    found = build("dct", shape, SEED, dimension=dimension)
    x = images(7, shape)
    whole = dctn(x.numpy().astype(np.float64), axes=(2, 3), norm="ortho")
    u, v = np.meshgrid(
        np.arange(shape[1]) / shape[1], np.arange(shape[2]) / shape[2], indexing="ij"
    )
    size = np.broadcast_to(u**2 + v**2, shape)
    kept, left = np.sort(size.ravel())[:dimension], np.sort(size.ravel())[dimension:]
    assert not len(left) or kept.max() <= left.min()
    rows = found(x).numpy()
    # each is one of the transform's, in the order of its frequency
    for k, coefficients in enumerate(rows.T):
        match = np.isclose(whole, coefficients[:, None, None, None], rtol=0, atol=1e-5).all(0)
        assert match.sum() == 1 and size[match][0] == pytest.approx(kept[k])
    assert (
        np.linalg.norm(rows, axis=1) <= np.linalg.norm(x.flatten(1).numpy(), axis=1) + 1e-5
    ).all()
    assert found.dimension == dimension and found.describe() == {"dct": dimension}


def test_conv_is_the_plain_network() -> None:
    found = build("conv", (3, 12, 10), SEED, dimension=30)
    draws = [SEED.generator("features", "conv", k) for k in (0, 1)]
    net = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 8, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
    )
    with torch.no_grad():
        for layer, draw in zip((net[0], net[3]), draws, strict=True):
            bound = 1 / np.sqrt(layer.weight[0].numel())  # type: ignore[operator, index, union-attr]
            for part in (layer.weight, layer.bias):
                part.copy_(torch.from_numpy(draw.uniform(-bound, bound, tuple(part.shape))))  # type: ignore[operator, union-attr]
        x = images(9, (3, 12, 10))
        np.testing.assert_allclose(
            found(x).numpy(), net(x - 0.5).flatten(1)[:, :30].numpy(), rtol=1e-4, atol=1e-6
        )
    assert found.dimension == 30
    other = build("conv", (3, 12, 10), Randomness(1), dimension=30)
    assert not torch.allclose(found(x), other(x))


def test_default_dimensions() -> None:
    assert build("conv", (1, 8, 8), SEED).dimension == 512
    assert build("dct", (1, 8, 8), SEED).dimension == 16
    assert build("pca", (1, 8, 8), SEED, public="digits").dimension == 64


def test_batches_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = images(23)
    whole = build("conv", (1, 8, 8), SEED)(x)
    monkeypatch.setattr(feature_maps, "BATCH", 5)
    np.testing.assert_allclose(
        build("conv", (1, 8, 8), SEED)(x).numpy(), whole.numpy(), rtol=1e-5, atol=1e-6
    )


def test_a_module_is_copied_and_evaluated() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.BatchNorm1d(6), nn.Dropout(0.5))
    found = build(net, (1, 8, 8), SEED)
    x = images(10)
    assert net.training
    with torch.no_grad():
        # statistics of a fresh batch norm: mean 0, variance 1
        exact = net[1](x.flatten(1)) / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(found(x).numpy(), exact.numpy(), rtol=1e-5, atol=1e-6)
    before = found(x)
    with torch.no_grad():
        net[1].weight += 1  # type: ignore[operator]
    assert torch.equal(found(x), before)
    assert build(net, (1, 8, 8), SEED).describe() != found.describe()


def halves(x: torch.Tensor) -> torch.Tensor:
    return x.flatten(1)[:, ::2].double()


def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return by * x.flatten(1)


def test_a_callable_is_told_by_its_name_and_what_it_does() -> None:
    found = build(halves, (1, 8, 8), SEED)
    assert found.dimension == 32 and found(images(3)).dtype == torch.float32
    assert found.describe()["callable"].endswith("test_feature_maps.halves")
    one, two = (build(partial(scaled, by=by), (1, 8, 8), SEED).describe() for by in (1.0, 2.0))
    assert one["callable"] == two["callable"] and one != two
    # rounding is no other map
    assert build(partial(scaled, by=1 + 1e-6), (1, 8, 8), SEED).describe() == one
    for what in (
        one,
        found.describe(),
        build("conv", (1, 8, 8), SEED).describe(),
        build(nn.Flatten(), (1, 8, 8), SEED).describe(),
    ):
        json.dumps(what)


calls = [0]


def drifting(x: torch.Tensor) -> torch.Tensor:
    calls[0] += 1
    return x.flatten(1) + calls[0]


def broken(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no\nmore")


@pytest.mark.parametrize(
    ("features", "words"),
    [
        (drifting, "differ from call to call"),
        (broken, "do not take samples of shape 1×8×8: no"),
        (lambda x: x.flatten(1) - x.mean(), "depend on the others of its batch"),
        (lambda x: x, "give 3×1×8×8 for 3 samples"),
        (lambda x: x.flatten(1)[:2], "give 2×64 for 3 samples"),
        (lambda x: x.flatten(1)[:, :0], "give 3×0 for 3 samples"),
        (lambda x: x.flatten(1).numpy(), "give ndarray"),
        (lambda x: x.flatten(1) / 0, "not finite"),
        (lambda x: x.flatten(1) * 1j, "complex"),
        (nn.Linear(5, 5), "do not take samples of shape 1×8×8"),
    ],
)
def test_what_is_no_map_is_refused(features: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build(features, (1, 8, 8), SEED)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"features": "convv"}, "did you mean 'conv'"),
        ({"features": 3}, "not int"),
        ({"features": "pca"}, "need public data"),
        ({"features": "conv", "public": "digits"}, "leave public out"),
        ({"features": "pca", "public": "digit"}, "did you mean 'digits'"),
        ({"features": "identity", "dimension": 4}, "leave them out"),
        ({"features": halves, "dimension": 4}, "leave them out"),
        ({"features": "conv", "dimension": 0}, "whole number from 1"),
        ({"features": "conv", "dimension": 2.5}, "components = 2.5"),
        ({"features": "conv", "dimension": "8"}, "components = '8'"),
        ({"features": "pca", "public": []}, "unknown public data"),
    ],
)
def test_options_that_cannot_work(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        check(**given)
    with pytest.raises(UsageError, match=words):
        build(shape=(1, 8, 8), randomness=SEED, **given)


def test_samples_that_do_not_fit() -> None:
    with pytest.raises(UsageError, match="at least 4×4 pixels, not samples of shape 64"):
        build("conv", (64,), SEED)
    with pytest.raises(
        UsageError, match="digits have samples of shape 1×8×8, the clients' have 1×28×28"
    ):
        build("pca", (1, 28, 28), SEED, public="digits")
    with pytest.raises(
        UsageError, match="dct take images, not samples of shape 64: use identity or pca"
    ):
        build("dct", (64,), SEED)
    with pytest.raises(UsageError, match="64 frequencies, not 65"):
        build("dct", (1, 8, 8), SEED, dimension=65)
    with pytest.raises(UsageError, match="at most 64 principal components, not 65"):
        build("pca", (1, 8, 8), SEED, public="digits", dimension=65)
    with pytest.raises(UsageError, match="made for samples of shape 1×8×8, not 1×4×4"):
        build("conv", (1, 8, 8), SEED)(images(3, (1, 4, 4)))


@pytest.mark.parametrize(
    "features",
    [
        lambda x: x.flatten(1).sub_(0.5),
        nn.Sequential(nn.Threshold(0.5, 0.0, inplace=True), nn.Flatten()),
    ],
)
def test_a_map_that_works_in_place_leaves_the_samples_alone(features: Any) -> None:
    x = images(4)
    build(features, (1, 8, 8), SEED)(x)
    assert torch.equal(x, images(4))


def test_a_dimension_of_numpys_is_described_for_json() -> None:
    assert json.dumps(build("conv", (1, 8, 8), SEED, dimension=np.int64(8)).describe())


def test_a_later_sample_that_breaks_the_map() -> None:
    found = build(lambda x: x.flatten(1).log(), (1, 8, 8), SEED)
    with pytest.raises(UsageError, match="not finite"):
        found(torch.zeros(2, 1, 8, 8))


def test_a_width_that_follows_the_batch() -> None:
    with pytest.raises(UsageError, match="give 63 numbers for a sample, then 61"):
        build(lambda x: x.flatten(1)[:, : len(x) + 60], (4, 4, 4), SEED)


def test_checking_options_needs_no_torch() -> None:
    import subprocess

    load = "import sys; from securecluster.protocols.oneshot.feature_maps import check"
    code = f"{load}; check('conv', dimension=8); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("identity", {}),
        ("dct", {"dimension": 8}),
        ("conv", {"dimension": 8}),
        ("pca", {"public": "digits", "dimension": 8}),
    ],
)
def test_maps_take_samples_of_runs_in_float64(name: str, options: dict[str, Any]) -> None:
    features = build(name, (1, 8, 8), Randomness(0), **options)
    x = torch.rand(5, 1, 8, 8)
    found = features(x.double())
    assert found.dtype == torch.float32
    assert torch.equal(found, features(x))
