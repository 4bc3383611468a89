"""What the server can and cannot tell from masked updates: attacks that work, beside the ones that
must not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.linalg import hadamard as sylvester
from scipy.optimize import linear_sum_assignment
from scipy.stats import ks_2samp, spearmanr

from securecluster.privacy.masking.masks import MASKS, build

ALL = MASKS[1:]


def masked(name: str, rows: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    """What the server gets, from one client at a time."""
    (stage,) = build(name, rows.shape[1])
    keyed: Any = stage
    keyed.unlock(bytes(range(32)))
    return np.concatenate(
        [stage.forward(torch.from_numpy(row[None]), step).numpy() for row in rows]
    )


def updates(m: int, d: int, dead: int = 0, seed: int = 0) -> NDArray[np.float64]:
    """m updates with coordinates of very different sizes, and a unit that never fires: zeros in the
    same places of all.
    """
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(m, d)) * np.exp(rng.normal(size=d))
    rows[:, rng.choice(d, dead, replace=False)] = 0
    return rows


@pytest.mark.parametrize("name", ALL)
def test_every_mask_shows_the_gram_matrix(name: str) -> None:
    rows = updates(6, 500)
    there = masked(name, rows, 3)
    scale = np.linalg.norm(rows, axis=1)
    np.testing.assert_allclose(
        there @ there.T, rows @ rows.T, atol=1e-13 * scale.max() ** 2, rtol=0
    )


def fourth_moments(name: str, rows: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """A statistic that no Gram matrix contains, over fresh maps."""
    return np.array([(masked(name, rows, step)[0] ** 4).sum() for step in range(steps)])


def test_a_fresh_haar_rotation_shows_the_gram_matrix_alone() -> None:
    """Two sets of updates with one Gram matrix look alike: masked, they have the same law. Under a
    permutation they do not.
    """
    d, steps = 24, 400
    sparse = np.eye(3, d) * np.array([[1.0], [2.0], [3.0]])
    dense = sparse @ np.linalg.qr(np.random.default_rng(1).normal(size=(d, d)))[0]
    np.testing.assert_allclose(sparse @ sparse.T, dense @ dense.T, atol=1e-12)
    one = fourth_moments("haar", sparse, steps)
    other = fourth_moments("haar", dense, 2 * steps)[steps:]  # other steps, hence independent maps
    assert ks_2samp(one, other).pvalue > 0.001
    for name in ("permutation", "signed-permutation"):
        moments = [fourth_moments(name, rows, 50) for rows in (sparse, dense)]
        assert ks_2samp(*moments).pvalue < 1e-10


@pytest.mark.parametrize("name", ALL)
def test_a_reused_map_shows_the_gram_matrix_of_all_rounds_and_a_fresh_one_does_not(
    name: str,
) -> None:
    first, second = updates(5, 800), updates(5, 800, seed=1)
    between = first @ second.T
    scale = np.linalg.norm(first) * np.linalg.norm(second)
    reused = masked(name, first, 1) @ masked(name, second, 1).T
    fresh = masked(name, first, 1) @ masked(name, second, 2).T
    np.testing.assert_allclose(reused, between, atol=1e-13 * scale, rtol=0)
    assert abs(np.corrcoef(fresh.ravel(), between.ravel())[0, 1]) < 0.6
    assert np.abs(fresh - between).max() > 0.01 * np.abs(between).max()


@pytest.mark.parametrize("name", ALL)
def test_fresh_maps_do_not_stop_linking(name: str) -> None:
    """Clients whose updates keep their geometry are found again.

    They are found by their rows of the Gram matrix.
    """
    m, rng = 12, np.random.default_rng(2)
    rows = updates(m, 600)
    order = rng.permutation(m)
    later = (rows + 0.05 * np.abs(rows) * rng.normal(size=rows.shape))[order]
    before, after = (
        np.sort(g @ g.T, axis=1) for g in (masked(name, rows, 1), masked(name, later, 2))
    )
    cost = ((before[:, None] - after[None]) ** 2).sum(-1)
    _, match = linear_sum_assignment(cost)
    assert (order[match] == np.arange(m)).mean() >= 0.9


def tuples(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """The columns as a sorted multiset."""
    return rows.T[np.lexsort(rows)]


def test_a_permutation_shows_which_values_share_a_coordinate_and_the_zeros_of_dead_units() -> None:
    rows = updates(4, 300, dead=37)
    there = masked("permutation", rows, 1)
    assert np.array_equal(tuples(there), tuples(rows))
    assert int((there == 0).all(0).sum()) == 37
    assert not np.array_equal(there, rows)


def test_a_signed_permutation_shows_them_up_to_sign() -> None:
    rows = updates(4, 300, dead=37)
    there = masked("signed-permutation", rows, 1)
    first = [np.sign(r[0]) + (r[0] == 0) for r in (rows, there)]
    assert np.array_equal(tuples(there * first[1]), tuples(rows * first[0]))
    assert np.array_equal(np.sort(np.abs(there)), np.sort(np.abs(rows)))
    assert not np.allclose(np.sort(there), np.sort(rows))
    assert int((there == 0).all(0).sum()) == 37
    # the sum is hidden, unlike a permutation's
    assert np.abs(there.sum(1) - rows.sum(1)).min() > 1e-3


def test_a_rotation_shows_neither_zeros_nor_sizes() -> None:
    rows = updates(4, 300, dead=37)
    for name in ("rotation", "haar"):
        there = masked(name, rows, 1)
        assert not (there == 0).any()
        assert np.abs(there).max() < 0.8 * np.abs(rows).max()


@pytest.mark.parametrize("name", ["permutation", "signed-permutation"])
def test_a_reused_permutation_falls_to_one_known_pair(name: str) -> None:
    known, secret = updates(2, 500)
    there, target = masked(name, np.stack([known, secret]), 1)
    place = np.empty(500, dtype=int)
    place[np.argsort(np.abs(known))] = np.argsort(np.abs(there))  # where the k-th largest went
    signs = np.sign(known) * np.sign(there[place])
    assert np.array_equal(target[place] * signs, secret)
    fresh = masked(name, secret[None], 2)[0]
    assert (fresh[place] * signs == secret).mean() < 0.05


@pytest.mark.parametrize("known", [40, 20])
def test_a_reused_dense_rotation_falls_on_the_span_of_the_known_pairs(known: int) -> None:
    d = 40
    rows = updates(known + 1, d)
    there = masked("haar", rows, 1)
    coefficients = np.linalg.lstsq(there[:-1].T, there[-1], rcond=None)[0]
    guess = coefficients @ rows[:-1]
    basis = np.linalg.qr(rows[:-1].T)[0]
    # the projection onto the known updates
    np.testing.assert_allclose(guess, basis @ (basis.T @ rows[-1]), atol=1e-8)
    assert np.allclose(guess, rows[-1], atol=1e-8) == (known == d)


def test_one_hadamard_layer_hides_signs_only_from_who_knows_the_matrix() -> None:
    """y = H·D·x: Hᵀy has |x_i| in place, zeros too; and one known pair gives D away."""
    d = 1024
    h = sylvester(d) / np.sqrt(d)
    flips = np.random.default_rng(3).choice([-1.0, 1.0], d)
    known, secret = updates(2, d, dead=100)
    peeled, other = ((h @ (flips * x)) @ h for x in (secret, known))
    np.testing.assert_allclose(np.abs(peeled), np.abs(secret), atol=1e-12)
    signs = np.sign(other * known)
    np.testing.assert_allclose((peeled * signs)[known != 0], secret[known != 0], atol=1e-12)


def test_two_layers_and_a_last_sign_layer_do_not_yield_to_the_same_attack() -> None:
    d = 1024
    h = sylvester(d) / np.sqrt(d)
    known, secret = updates(2, d, dead=100)
    there, pair = masked("rotation", secret[None], 1)[0], masked("rotation", known[None], 1)[0]
    for peeled, other in ((there @ h, pair @ h), (there @ h @ h, pair @ h @ h), (there, pair)):
        assert abs(spearmanr(np.abs(peeled), np.abs(secret)).statistic) < 0.1  # 3 standard errors
        assert (np.abs(peeled) < 1e-9).mean() < 0.01
        guess = peeled * np.sign(other * known)
        assert abs(guess @ secret) < 0.15 * np.linalg.norm(guess) * np.linalg.norm(secret)
