"""FLUX's descriptors against numpy and scikit-learn, and how far one sample moves noised sums."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.decomposition import PCA

from securecluster.core.randomness import Randomness
from securecluster.models.architectures import cnn_ali, linear, mlp
from securecluster.models.flat_model import FlatModel
from securecluster.protocols.contrib.flux.client import LatentVectors
from securecluster.protocols.contrib.flux.descriptors import (
    LACKING,
    POINTS,
    REACH,
    REPLACE,
    DescriptorMap,
    latent_layer,
)

CLASSES = 3
PLAN = DescriptorMap(latents=7, components=4, classes=CLASSES, seed=5)


def samples(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    return draw.gamma(2.0, size=(n, PLAN.latents)), draw.integers(0, CLASSES, n)


def test_directions_are_scikit_learns_principal_ones_of_random_points() -> None:
    points = Randomness(5).generator("flux", "points").random((POINTS, PLAN.latents))
    expected = PCA(PLAN.components).fit(points).components_
    cosines = PLAN.directions @ expected.T
    # a direction's sign is arbitrary
    np.testing.assert_allclose(np.abs(cosines), np.eye(PLAN.components), atol=1e-9)
    largest = np.abs(PLAN.directions).argmax(1)
    assert (PLAN.directions[np.arange(PLAN.components), largest] > 0).all()


def test_the_scale_of_the_points_changes_no_direction() -> None:
    points = Randomness(5).generator("flux", "points").random((POINTS, PLAN.latents))
    for scale in (0.3, 20.0):
        expected = PCA(PLAN.components).fit(scale * points).components_
        cosines = np.abs(PLAN.directions @ expected.T)
        np.testing.assert_allclose(cosines, np.eye(PLAN.components), atol=1e-9)


def test_moments_are_numpys_of_all_samples_and_of_each_class() -> None:
    latents, labels = samples(40)
    labels[labels == 2] = 0
    labels[0] = 2  # alone in its class, which counts as lacking
    found = PLAN.moments(latents, labels)
    z = latents @ PLAN.directions.T
    assert found.shape == (2 * (CLASSES + 1), PLAN.components)
    np.testing.assert_allclose(found[0], np.mean(z, 0))
    np.testing.assert_allclose(found[1], np.std(z, 0))
    for u in range(2):
        np.testing.assert_allclose(found[2 + u], np.mean(z[labels == u], 0))
        np.testing.assert_allclose(found[2 + CLASSES + u], np.std(z[labels == u], 0))
    assert (found[[4, 7]] == LACKING).all()
    np.testing.assert_array_equal(PLAN.feature_moments(latents), found[:2])


def test_means_alone_are_the_same_means() -> None:
    latents, labels = samples(40)
    means = DescriptorMap(7, 4, CLASSES, 5, second=False)
    both = PLAN.moments(latents, labels)
    np.testing.assert_array_equal(means.moments(latents, labels), both[[0, 2, 3, 4]])
    np.testing.assert_array_equal(means.feature_moments(latents), both[:1])


@pytest.mark.parametrize("second", [True, False])
def test_moments_of_sums_without_noise_are_those_of_clipped_rows(second: bool) -> None:
    plan = DescriptorMap(7, 4, CLASSES, 5, second=second, clip=0.9)
    latents, labels = samples(60)
    unit = latents / np.linalg.norm(latents, axis=1, keepdims=True)
    z = math.sqrt(7 / 4) * unit @ plan.directions.T
    norms = np.linalg.norm(z, axis=1, keepdims=True)
    assert (norms > 0.9).any() and (norms < 0.9).any()
    z = z / np.maximum(norms, 0.9)
    found = plan.moments_of_sums(plan.sums(latents, labels), 1e-12)
    means = [z.mean(0), *(z[labels == u].mean(0) for u in range(CLASSES))]
    spreads = [z.std(0), *(z[labels == u].std(0) for u in range(CLASSES))]
    rows = [means[0], *means[1:]]
    if second:
        rows = [means[0], spreads[0], *means[1:], *spreads[1:]]
    np.testing.assert_allclose(found, rows, atol=1e-9)
    free = plan.moments_of_sums(plan.sums(latents, None), 1e-12)
    np.testing.assert_allclose(free, rows[: plan.kinds], atol=1e-9)


def test_moments_of_rare_classes_shrink_instead_of_having_large_noise() -> None:
    latents, _ = samples(30)
    labels = np.zeros(30, dtype=np.int64)
    labels[:2] = 1
    sums = PLAN.sums(latents, labels)
    exact = PLAN.moments_of_sums(sums, 1e-12)
    shrunk = PLAN.moments_of_sums(sums, 2.0)
    # two samples count as 2·2·√3 of them, and none as zeros, whatever the noise
    np.testing.assert_allclose(shrunk[3], exact[3] * 2 / (4 * math.sqrt(3)))
    np.testing.assert_allclose(shrunk[2], exact[2])
    assert not shrunk[4].any()
    assert np.isfinite(shrunk).all()
    # the floor of all samples together is √U as high
    np.testing.assert_allclose(shrunk[0], exact[0] * 30 / max(30, 4 * math.sqrt(3) * math.sqrt(3)))


finite = st.floats(-1e3, 1e3)
latent_rows = st.lists(finite, min_size=7, max_size=7)


@given(latent_rows, latent_rows, st.integers(0, 2), st.integers(0, 2), st.booleans())
def test_a_sample_moves_sums_by_no_more_than_their_sensitivity(
    one: list[float], other: list[float], own_class: int, other_class: int, second: bool
) -> None:
    plan = DescriptorMap(7, 4, CLASSES, 5, second=second)
    phi = plan.sums(np.array([one]), np.array([own_class]))
    theirs = plan.sums(np.array([other]), np.array([other_class]))
    assert np.linalg.norm(phi) <= REACH * (1 + 1e-12)
    assert np.linalg.norm(phi - theirs) <= REACH * REPLACE * (1 + 1e-12)
    assert np.linalg.norm(plan.sums(np.array([one]), None)) <= REACH * (1 + 1e-12)


def test_the_sensitivities_are_attained() -> None:
    plan = DescriptorMap(7, 1, CLASSES, 5)
    direction = plan.directions
    phi = plan.sums(direction, np.array([0]))
    assert np.linalg.norm(phi) == pytest.approx(REACH)
    elsewhere = plan.sums(direction, np.array([1]))
    assert np.linalg.norm(phi - elsewhere) == pytest.approx(REACH * REPLACE)


def test_a_sample_that_is_not_finite_counts_as_blank() -> None:
    latents, labels = samples(5)
    before = PLAN.sums(latents[:4], labels[:4])
    for odd in (math.nan, math.inf):
        latents[4, 2] = odd
        np.testing.assert_array_equal(PLAN.sums(latents, labels), before)
    latents[4] = 1e308  # whose square overflows
    assert np.isfinite(PLAN.sums(latents, labels)).all()
    latents[4] = 0.0
    assert PLAN.sums(latents, labels)[labels[4], 0] > before[labels[4], 0]


def test_latent_vectors_are_what_the_last_dense_layer_gets() -> None:
    torch.manual_seed(0)
    x = torch.rand(6, 1, 8, 8)
    perceptron = mlp((1, 8, 8), 10, hidden=5)
    model = FlatModel(perceptron)
    found = LatentVectors(model).of(model.initial(), x)
    expected = perceptron[:-1](x).detach().double().numpy()
    np.testing.assert_array_equal(found, expected)
    softmax = FlatModel(linear((1, 8, 8), 10))
    flat = LatentVectors(softmax).of(softmax.initial(), x)
    np.testing.assert_array_equal(flat, x.flatten(1).double().numpy())
    # the model that it looks into trains as before
    assert model.stack is not None


def test_latent_vectors_of_convolutions_are_what_the_first_dense_layer_gets() -> None:
    torch.manual_seed(0)
    x = torch.rand(3, 1, 28, 28)
    network = cnn_ali((1, 28, 28), 10)
    flatten = next(n for n, m in enumerate(network) if isinstance(m, torch.nn.Flatten))
    model = FlatModel(network)
    found = LatentVectors(model).of(model.initial(), x)
    expected = network[: flatten + 1](x).detach().double().numpy()
    np.testing.assert_array_equal(found, expected)


def test_a_network_without_a_dense_layer_has_no_latent_vectors() -> None:
    assert latent_layer(torch.nn.Sequential(torch.nn.Flatten())) is None
