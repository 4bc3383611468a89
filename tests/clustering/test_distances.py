"""Pairwise distances against scipy's, and against exact differences where a Gram matrix would
cancel.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import pdist, squareform

from securecluster.clustering import distances as module
from securecluster.clustering.distances import METRICS, alike, distances, euclidean
from securecluster.errors import UsageError

SCIPY = {"l1": "cityblock", "l2": "euclidean", "cosine": "cosine"}


def rows_of(seed: int, m: int, d: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


def exact(rows: torch.Tensor, metric: str) -> np.ndarray:
    wide = rows.double()
    if metric == "chord":
        return squareform(pdist((wide / wide.norm(dim=1, keepdim=True)).numpy(), "euclidean"))
    return squareform(pdist(wide.numpy(), SCIPY[metric]))


@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(1, 60), st.sampled_from(METRICS))
def test_distances_are_scipys(seed: int, m: int, d: int, metric: str) -> None:
    # float32 rows are compared as the float64 numbers they are
    for dtype in (torch.float64, torch.float32):
        rows = rows_of(seed, m, d, dtype)
        found = distances(rows, metric)
        assert found.dtype == torch.float64 and found.shape == (m, m)
        np.testing.assert_allclose(
            found.numpy(), exact(rows, metric), rtol=1e-9, atol=2e-6 if metric == "chord" else 1e-12
        )
        assert torch.equal(found, found.T) and (found.diagonal() == 0).all() and (found >= 0).all()


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("d", [99, 100, 101, 377])
def test_rows_of_several_blocks(metric: str, d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WIDE", 3 * 100)
    rows = rows_of(1, 3, d, torch.float32)
    rows[:, -1] = torch.tensor([1000.0, -1000.0, 0.0])  # a lost last column would show
    np.testing.assert_allclose(distances(rows, metric).numpy(), exact(rows, metric), rtol=1e-9)


@pytest.mark.parametrize("wide", [40, 1 << 18])
@pytest.mark.parametrize("near", [1e-3, 1e-6, 1e-9])
def test_nearly_equal_rows_keep_their_digits(
    near: float, wide: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WIDE", wide)
    base, noise = rows_of(0, 1, 500), rows_of(1, 8, 500)
    together = base + near * noise
    apart = together.clone()
    apart[4:] += 10.0  # two tight groups: the mean is near to neither
    for rows in (together, apart):
        np.testing.assert_allclose(euclidean(rows).numpy(), exact(rows, "l2"), rtol=1e-6)


def test_equal_rows_are_at_distance_zero() -> None:
    rows = rows_of(2, 3, 50, torch.float32)[[0, 1, 0, 2, 1]]
    for metric in ("l1", "l2"):
        found = distances(rows, metric)
        assert found[0, 2] == found[1, 4] == 0
        assert (found[0, [1, 3]] > 1).all()
    assert distances(rows, "cosine")[0, 2] == pytest.approx(0, abs=1e-12)


def test_many_float32_numbers_are_summed_in_float64() -> None:
    rows = torch.zeros(2, 1 << 20)
    rows[0] = 0.1
    rows[1, 0] = 4096.0
    for metric in ("l1", "l2"):
        np.testing.assert_allclose(distances(rows, metric).numpy(), exact(rows, metric), rtol=1e-9)


def test_a_zero_row_is_at_cosine_distance_one_from_everyone() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.0], [-1.0, 0.0], [0.0, 0.0]])
    expected = [[0, 1, 2, 1], [1, 0, 1, 1], [2, 1, 0, 1], [1, 1, 1, 0]]
    assert distances(rows, "cosine").tolist() == expected


@pytest.mark.parametrize("metric", METRICS)
def test_what_each_mask_keeps(metric: str) -> None:
    rows = rows_of(3, 6, 40)
    shuffle = torch.as_tensor(np.random.default_rng(0).permutation(40))
    signs = torch.as_tensor(np.random.default_rng(1).choice([-1.0, 1.0], 40))
    turn = torch.as_tensor(np.linalg.qr(np.random.default_rng(2).normal(size=(40, 40)))[0])
    plain = distances(rows, metric)
    torch.testing.assert_close(
        distances(rows[:, shuffle] * signs, metric), plain, rtol=1e-12, atol=1e-12
    )
    turned = distances(rows @ turn, metric)
    assert bool(torch.allclose(turned, plain, rtol=1e-10, atol=1e-10)) == (metric != "l1")


def test_the_rows_given_are_left_alone() -> None:
    rows = rows_of(4, 5, 30, torch.float64)
    before = rows.clone()
    for metric in METRICS:
        distances(rows, metric)
    assert torch.equal(rows, before)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown metric 'l3'.*cosine, l1, l2"):
        distances(rows_of(0, 2, 2), "l3")


@pytest.mark.parametrize("metric", ["l2", "cosine"])
def test_the_known_noise_comes_off(metric: str) -> None:
    m, d, sigma = 12, 20_000, 0.05  # noise of squared norm 50 on rows of squared norm about 9
    rows = 3 * rows_of(0, m, d) / d**0.5 + 2 * rows_of(1, 1, d) / d**0.5
    loud = rows + sigma * rows_of(2, m, d)
    off = ~np.eye(m, dtype=bool)
    noise = sigma**2 * d
    measured = [distances(rows, metric), distances(loud, metric), distances(loud, metric, noise)]
    true, raw, found = (table.numpy()[off] for table in measured)
    # standard deviation of what noise does, about
    scatter = sigma**2 * d**0.5 / (13 if metric == "cosine" else true.min() / 2**0.5)
    assert np.abs(found - true).max() < 6 * scatter
    assert np.abs((found - true).mean()) < scatter < np.abs(raw - true).min() / 5
    each = torch.full((m,), sigma**2 * d, dtype=torch.float64)
    assert torch.allclose(
        distances(loud, metric, each), distances(loud, metric, sigma**2 * d), atol=1e-12
    )
    assert torch.equal(distances(rows, "l1", 5.0), distances(rows, "l1"))
    assert (distances(rows, metric, 1e9).isfinite()).all(), (
        "more noise than there is: no square root of less than nothing"
    )


@pytest.mark.parametrize("metric", METRICS)
def test_similarities_for_clusterers_do_not_mind_the_origin_where_distances_do_not(
    metric: str,
) -> None:
    rows = rows_of(3, 7, 40)
    found, moved = alike(rows, metric).numpy(), alike(rows + 5.0, metric).numpy()
    if metric in ("cosine", "chord"):
        np.testing.assert_allclose(found, 1 - exact(rows, "cosine"), atol=1e-12)
        assert not np.allclose(found, moved)
        return
    np.testing.assert_allclose(found, moved, atol=1e-9)
    square = exact(rows, metric) ** (2 if metric == "l2" else 1)
    around = np.eye(7) - 1 / 7
    inner = -around @ square @ around / 2  # classical scaling (Torgerson 1952)
    assert np.linalg.eigvalsh(inner).min() > -1e-9
    size = np.sqrt(np.diag(inner))
    np.testing.assert_allclose(found, inner / size / size[:, None], atol=1e-9)
