"""Geometry of rows against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from securecluster.clustering import similarity
from securecluster.clustering.similarity import cosine, gram, gram_norms, mean_norm, mean_row


def rows_of(seed: int, m: int, d: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
        dtype
    )


@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 50),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_inner_products_norms_and_cosines_are_numpys(
    seed: int, m: int, d: int, dtype: torch.dtype
) -> None:
    rows = rows_of(seed, m, d, dtype)
    exact = rows.numpy().astype(np.float64)
    size = np.sqrt((exact**2).sum(1))
    inner = gram(rows)
    assert inner.dtype == torch.float64
    np.testing.assert_allclose(inner.numpy(), exact @ exact.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(gram_norms(inner).numpy(), size, rtol=1e-12)
    np.testing.assert_allclose(
        cosine(inner).numpy(), exact @ exact.T / np.outer(size, size), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("d", [99, 100, 101, 377])
def test_rows_of_several_column_blocks(d: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "BLOCK", 3 * 100)
    rows = rows_of(1, 3, d)
    rows[:, -1] = 1000.0  # a lost last column would show
    assert len(list(similarity.blocks(rows))) == -(-d // 100)
    exact = rows.numpy().astype(np.float64)
    np.testing.assert_allclose(gram(rows).numpy(), exact @ exact.T, rtol=1e-11)
    np.testing.assert_allclose(
        gram_norms(gram(rows)).numpy(), np.linalg.norm(exact, axis=1), rtol=1e-12
    )


@pytest.mark.parametrize("who", [None, [0, 1, 2, 3, 4], [3, 1], [2]])
def test_geometry_of_some_rows(who: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "BLOCK", 5 * 10)
    rows = rows_of(2, 5, 37, torch.float64)
    own = rows.numpy() if who is None else rows.numpy()[who]
    weight = torch.arange(1.0, len(own) + 1, dtype=torch.float64)
    np.testing.assert_allclose(gram(rows, who).numpy(), own @ own.T, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(mean_row(rows, who).numpy(), own.mean(0), rtol=1e-12, atol=1e-14)
    found, expected = mean_row(rows, who, weight).numpy(), np.average(own, 0, weight.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_float32_rows_are_accumulated_in_float64() -> None:
    rows = torch.full((2, 1 << 17), 0.1, dtype=torch.float32)
    rows[1, 0] = 4096.0
    exact = rows.numpy().astype(np.float64)
    np.testing.assert_allclose(gram(rows).numpy(), exact @ exact.T, rtol=1e-11)


def test_a_zero_row_is_like_nobody_but_itself() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    alpha = cosine(gram(rows))
    half = np.sqrt(0.5)
    np.testing.assert_allclose(
        alpha.numpy(), [[1, 0, half, 0], [0, 1, 0, 0], [half, 0, 1, 0], [0, 0, 0, 1]], atol=1e-15
    )
    assert (cosine(gram(torch.zeros(3, 4))) == torch.eye(3)).all()


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_cosines_are_symmetric_bounded_and_blind_to_scale(seed: int, m: int) -> None:
    rows = rows_of(seed, m, 4, torch.float64)
    rows[1] = -3 * rows[0]
    alpha = cosine(gram(rows))
    torch.testing.assert_close(alpha, alpha.T, rtol=0, atol=1e-15)
    assert alpha.abs().max() <= 1 and (alpha.diagonal() == 1).all()
    assert alpha[0, 1] == pytest.approx(-1)
    scale = torch.logspace(-30, 30, m, dtype=torch.float64)[:, None]
    torch.testing.assert_close(cosine(gram(rows * scale)), alpha, rtol=0, atol=1e-12)


def test_the_gram_matrix_given_is_left_alone() -> None:
    inner = gram(rows_of(0, 4, 9))
    before = inner.clone()
    cosine(inner)
    gram_norms(inner)
    assert torch.equal(inner, before)


@given(st.integers(0, 10**6), st.integers(2, 40))
def test_orthonormal_maps_and_permutations_change_nothing(seed: int, d: int) -> None:
    rows = rows_of(seed, 5, d, torch.float64)
    turn = torch.as_tensor(np.linalg.qr(np.random.default_rng(seed).normal(size=(d, d)))[0])
    shuffle = torch.as_tensor(np.random.default_rng(seed).permutation(d))
    for masked in (rows @ turn, rows[:, shuffle], -rows):
        torch.testing.assert_close(gram(masked), gram(rows), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(cosine(gram(masked)), cosine(gram(rows)), rtol=0, atol=1e-10)
        torch.testing.assert_close(
            gram_norms(gram(masked)), gram_norms(gram(rows)), rtol=1e-10, atol=0
        )


def test_clients_in_another_order_are_the_same_matrix_in_another_order() -> None:
    rows, order = rows_of(3, 6, 20, torch.float64), [4, 0, 5, 1, 3, 2]
    torch.testing.assert_close(
        cosine(gram(rows[order])), cosine(gram(rows))[order][:, order], rtol=0, atol=1e-14
    )


def test_the_norm_of_a_mean_is_exact_for_everyone_and_for_one() -> None:
    rows = rows_of(0, 12, 40, torch.float64) + 0.3
    exact = float(np.linalg.norm(rows.numpy().mean(0)))
    assert mean_norm(rows.mean(0), rows.norm(dim=1), 12) == pytest.approx(exact)
    assert mean_norm(rows[0], rows[:1].norm(dim=1), 12) == pytest.approx(
        float(np.linalg.norm(rows[0].numpy()))
    )
    assert mean_norm(torch.zeros(3), torch.ones(4), 8) == 0.0


def test_the_squared_norm_of_a_sampled_mean_is_unbiased() -> None:
    rows = rows_of(0, 12, 40, torch.float64) + 0.3
    exact = float(np.square(rows.numpy().mean(0)).sum())
    draw = torch.Generator().manual_seed(0)
    picks = [torch.randperm(12, generator=draw)[:4] for _ in range(3000)]
    found = np.mean([mean_norm(rows[p].mean(0), rows[p].norm(dim=1), 12) ** 2 for p in picks])
    naive = np.mean([float(rows[p].mean(0).square().sum()) for p in picks])
    assert found == pytest.approx(exact, rel=0.05)
    assert naive > 1.5 * exact


def test_cosines_with_other_rows_are_scikit_learns() -> None:
    from sklearn.metrics.pairwise import cosine_similarity

    rng = np.random.default_rng(5)
    rows, others = rng.normal(size=(5, 300)), rng.normal(size=(7, 300))
    rows[2] = 0
    found = similarity.cross_cosine(torch.as_tensor(rows), torch.as_tensor(others))
    np.testing.assert_allclose(found.numpy(), cosine_similarity(rows, others), rtol=0, atol=1e-14)


def test_norms_and_cosines_are_those_without_noise() -> None:
    """Updates of norm about 1 under noise of norm about 3: what is taken off leaves an error that
    falls as 1/√d.
    """
    generator = torch.Generator().manual_seed(0)
    d, m, sigma = 200_000, 6, 3 / 200_000**0.5
    clean = (
        torch.randn(m, d, generator=generator, dtype=torch.float64) / d**0.5
        + torch.randn(d, generator=generator).double() / d**0.5
    )
    noisy = clean + sigma * torch.randn(m, d, generator=generator, dtype=torch.float64)
    noise = sigma**2 * d
    inner = similarity.gram(noisy, noise=noise)
    norms = similarity.gram_norms(inner)
    torch.testing.assert_close(norms, torch.linalg.norm(clean, dim=1), rtol=0.03, atol=0)
    torch.testing.assert_close(
        similarity.cosine(inner), similarity.cosine(similarity.gram(clean)), rtol=0, atol=0.05
    )
    mean = similarity.mean_norm(noisy.mean(0), norms, m, noise / m)
    assert mean == pytest.approx(float(torch.linalg.norm(clean.mean(0))), rel=0.03)
    assert float(torch.linalg.norm(noisy.mean(0))) > 1.3 * mean  # what the tests would have seen
    some = similarity.mean_norm(noisy[:3].mean(0), norms[:3], m, noise / 3)
    assert some == pytest.approx(mean, rel=0.15)
