"""Kernel alignment and canonical correlations against their other definitions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.linalg import subspace_angles

from securecluster.errors import UsageError
from securecluster.protocols.nsim.representation_similarity import cca, cka, svcca

LAYERS = np.random.default_rng(0).normal(size=(5, 12, 4))


def hsic(k: np.ndarray, l: np.ndarray) -> float:  # noqa: E741 the paper's letters
    """Gretton et al. 2005, with the centring matrix H."""
    n = len(k)
    h = np.eye(n) - np.ones((n, n)) / n
    return float(np.trace(k @ h @ l @ h)) / (n - 1) ** 2


def test_cka_is_the_normalised_hsic_of_linear_kernels() -> None:
    grams = [x @ x.T for x in LAYERS]
    wanted = [[hsic(a, b) / np.sqrt(hsic(a, a) * hsic(b, b)) for b in grams] for a in grams]
    np.testing.assert_allclose(cka(LAYERS), wanted, atol=1e-12)


def test_cca_is_the_mean_cosine_of_the_angles_between_column_spaces() -> None:
    centred = LAYERS - LAYERS.mean(1, keepdims=True)
    wanted = [[np.cos(subspace_angles(a, b)).mean() for b in centred] for a in centred]
    np.testing.assert_allclose(cca(LAYERS), wanted, atol=1e-12)
    np.testing.assert_allclose(svcca(LAYERS, 1.0), wanted, atol=1e-12)


def test_svcca_leaves_out_weak_directions() -> None:
    draw = np.random.default_rng(1)
    strong, weak = draw.normal(size=(4, 12, 2)), 1e-3 * draw.normal(size=(4, 12, 3))
    np.testing.assert_allclose(svcca(np.concatenate([strong, weak], 2)), svcca(strong), atol=0.01)
    assert np.abs(cca(np.concatenate([strong, weak], 2)) - cca(strong)).max() > 0.05
    one, other = LAYERS[0][:4, :3] * [9, 3, 1], LAYERS[1][:4, :3] * [9, 3, 1]
    bases = []
    for x in (one - one.mean(0), other - other.mean(0)):
        u, s, _ = np.linalg.svd(x, full_matrices=False)
        bases.append(
            u[:, : 1 + next(q for q in range(3) if (s[: q + 1] ** 2).sum() >= 0.99 * (s**2).sum())]
        )
    np.testing.assert_allclose(
        svcca(np.stack([one, other]))[0, 1], np.cos(subspace_angles(*bases)).mean(), atol=1e-12
    )


@pytest.mark.parametrize("compare", [cka, cca, svcca])
def test_rotations_scales_and_shifts_change_nothing(compare: object) -> None:
    assert callable(compare)
    context = np.linalg.qr(np.random.default_rng(2).normal(size=(4, 4)))[0]
    moved = LAYERS.copy()
    moved[0] = 7 * LAYERS[0] @ context + np.arange(4)
    np.testing.assert_allclose(compare(moved), compare(LAYERS), atol=1e-10)
    found = compare(LAYERS)
    np.testing.assert_array_equal(found, found.T)
    assert (found >= 0).all()
    assert (found <= 1).all()


@pytest.mark.parametrize("compare", [cka, cca, svcca])
def test_constant_layers_are_like_no_other(compare: object) -> None:
    assert callable(compare)
    layers = LAYERS.copy()
    layers[1], layers[3] = 0, np.arange(4) / 3
    found = compare(layers)
    for k in (1, 3):
        assert found[k].tolist() == [float(j == k) for j in range(5)]


def test_square_layers_of_full_rank_tell_cca_nothing() -> None:
    np.testing.assert_allclose(cca(np.random.default_rng(3).normal(size=(3, 6, 6))), 1.0)


def test_what_is_no_stack_of_layers_is_refused() -> None:
    for wrong in (np.zeros((3, 4)), np.zeros((0, 3, 4)), np.full((2, 3, 4), np.nan)):
        for compare in (cka, cca, svcca):
            with pytest.raises(UsageError, match="layers of shape"):
                compare(wrong)
    with pytest.raises(UsageError, match="share"):
        svcca(LAYERS, 0)


def test_a_layer_whose_directions_are_all_in_another_one_is_like_it() -> None:
    wide = LAYERS[0]
    narrow = wide[:, :1] * np.arange(1.0, wide.shape[1] + 1)  # of rank one
    np.testing.assert_allclose(cca(np.stack([narrow, wide])), 1, atol=1e-12)
