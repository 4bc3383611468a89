"""Eigenvectors, projections and relevance against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from securecluster.clustering import eigenvectors
from securecluster.clustering.eigenvectors import projected, relevance, span_relevance, top

Rows = NDArray[np.float64]


def data(seed: int, n: int, d: int, rank: int | None = None, decay: float = 0.7) -> torch.Tensor:
    """Rows (n, d) float32 around a mean, with a decaying spectrum of at most `rank` dimensions."""
    draw = np.random.default_rng(seed)
    r = min(n, d) if rank is None else rank
    rows = draw.normal(size=(n, r)) * decay ** np.arange(r) @ draw.normal(size=(r, d))
    return torch.from_numpy(rows.astype(np.float32))


def direct(x: torch.Tensor) -> tuple[Rows, Rows, Rows]:
    """G, its eigenvalues, descending, and its eigenvectors as rows."""
    wide = x.numpy().astype(np.float64)
    gram = wide.T @ wide / len(wide)
    values, vectors = np.linalg.eigh(gram)
    return gram, values[::-1], vectors[:, ::-1].T


def check(x: torch.Tensor, p: int, rank: int) -> None:
    """What defines leading eigenpairs: eigenvalues, residuals, orthonormality, signs; zeros beyond
    the rank.
    """
    values, vectors = top(x, p)
    gram, known, _ = direct(x)
    own, rows = values.numpy(), vectors.numpy()
    k = min(p, rank)
    assert own.shape == (p,)
    assert rows.shape == (p, x.shape[1])
    assert values.dtype == vectors.dtype == torch.float64
    np.testing.assert_allclose(own[:k], known[:k], rtol=0, atol=1e-12 * known[0])
    np.testing.assert_allclose(
        rows[:k] @ gram, own[:k, None] * rows[:k], rtol=0, atol=1e-11 * known[0]
    )
    np.testing.assert_allclose(rows[:k] @ rows[:k].T, np.eye(k), rtol=0, atol=1e-8)
    assert (rows[np.arange(k), np.abs(rows[:k]).argmax(1)] > 0).all()
    assert not own[k:].any() and not rows[k:].any()


@given(st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_eigenpairs_are_numpys_for_every_shape(seed: int, n: int, d: int, p: int) -> None:
    check(data(seed, n, d), p, min(n, d))


@pytest.mark.parametrize(("n", "d"), [(300, 120), (120, 300), (90, 90)])
@pytest.mark.parametrize(
    "small", [0, 1024]
)  # through the features, and through the smaller Gram matrix
def test_truncated_eigenpairs_are_numpys(
    n: int, d: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eigenvectors, "SMALL", small)
    monkeypatch.setattr(eigenvectors, "WHOLE", 8)
    monkeypatch.setattr(torch.linalg, "eigh", narrow(torch.linalg.eigh, 60))
    check(data(1, n, d), 5, min(n, d))


def narrow(eigh: object, most: int) -> object:
    def decompose(a: torch.Tensor) -> object:
        assert a.shape[-1] <= most, "a whole decomposition where p is small"
        return eigh(a)  # type: ignore[operator]

    return decompose


@pytest.mark.parametrize("small", [0, 1024])
def test_where_arpack_gives_up_the_whole_is_decomposed(
    small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eigenvectors, "SMALL", small)
    monkeypatch.setattr(eigenvectors, "WHOLE", 8)
    x = data(2, 200, 150, decay=1.0)
    monkeypatch.setattr(eigenvectors, "arpack", lambda *given: None)
    check(x, 5, 150)


@pytest.mark.parametrize(
    ("n", "d", "rank", "p"), [(60, 200, 3, 5), (200, 60, 2, 5), (50, 50, 1, 5), (300, 100, 4, 40)]
)
@pytest.mark.parametrize("small", [0, 1024])
def test_vectors_beyond_the_rank_are_zero(
    n: int, d: int, rank: int, p: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eigenvectors, "SMALL", small)
    monkeypatch.setattr(eigenvectors, "WHOLE", 8)
    draw = np.random.default_rng(3)
    left, right = draw.integers(-3, 4, (n, rank)), draw.integers(-3, 4, (rank, d))
    x = torch.from_numpy(left.astype(np.float32) @ right.astype(np.float32))
    assert np.linalg.matrix_rank(x.numpy()) == rank
    check(x, p, rank)


@pytest.mark.parametrize("small", [0, 1024])
def test_repeated_eigenvalues_all_count(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eigenvectors, "SMALL", small)
    monkeypatch.setattr(eigenvectors, "WHOLE", 8)
    x = torch.eye(100)  # every direction is an eigenvector with 1/100
    values, vectors = top(x, 5)
    np.testing.assert_allclose(values.numpy(), np.full(5, 0.01), rtol=1e-12)
    np.testing.assert_allclose((vectors @ vectors.T).numpy(), np.eye(5), atol=1e-12)


def test_one_sample_and_no_data() -> None:
    x = torch.tensor([[0.0, -3.0, 4.0]])
    values, vectors = top(x, 2)
    np.testing.assert_allclose(values.numpy(), [25.0, 0.0], rtol=1e-14)
    np.testing.assert_allclose(vectors.numpy(), [[0, -0.6, 0.8], [0, 0, 0]], atol=1e-14)
    values, vectors = top(torch.zeros(4, 3), 2)
    assert not values.any() and not vectors.any()
    assert not projected(torch.zeros(4, 3), torch.eye(3)).any()


def test_the_same_bits_every_time() -> None:
    x = data(4, 2000, 1100)  # through the features, as p is small against both sides
    one, two = top(x, 5), top(x.clone(), 5)
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    # of rank 1, where ARPACK has to start again
    low = torch.outer(torch.arange(1.0, 1201), torch.arange(1.0, 1101))
    one, two = top(low, 5), top(low.clone(), 5)
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    assert one[0].count_nonzero() == 1


@given(
    st.integers(0, 10**6),
    st.integers(1, 30),
    st.integers(1, 30),
    st.integers(1, 80),
    st.integers(10, 300),
)
def test_projections_are_direct_products(seed: int, n: int, d: int, r: int, block: int) -> None:
    x = data(seed, n, d)
    vectors = torch.from_numpy(np.random.default_rng(seed).normal(size=(r, d)))
    gram = direct(x)[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eigenvectors, "BLOCK", block)
        found = projected(x, vectors)
    assert found.dtype == torch.float64
    np.testing.assert_allclose(
        found.numpy(), np.linalg.norm(vectors.numpy() @ gram, axis=1), rtol=1e-10
    )


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 10**6),
    st.floats(0, 0.5),
)
def test_relevance_is_the_geometric_mean_of_ratios(
    values: list[float], j: int, seed: int, floor: float
) -> None:
    own = np.sort(values)[::-1].copy()
    other = np.random.default_rng(seed).exponential(size=(j, len(own))) * own
    counts = own > floor * own[0]
    ratio = np.minimum(own, other) / np.maximum(own, other)
    found = relevance(torch.from_numpy(own), torch.from_numpy(other), floor)
    np.testing.assert_allclose(
        found.numpy(), ratio[:, counts].prod(1) ** (1 / counts.sum()), rtol=1e-9
    )


def test_relevance_at_its_limits() -> None:
    own = torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64)  # rank two: the padding does not count
    other = torch.tensor(
        [[4.0, 1.0, 7.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 2.0, 0.0]], dtype=torch.float64
    )
    np.testing.assert_allclose(relevance(own, other).numpy(), [1, 0, 0, 0.5], rtol=1e-14)
    np.testing.assert_allclose(relevance(own, other, 0.5).numpy(), [1, 1, 0, 0.5], rtol=1e-14)
    np.testing.assert_allclose(relevance(torch.zeros(3), other).numpy(), np.zeros(4))
    tiny = torch.full((5,), 1e-200, dtype=torch.float64)  # a plain product would underflow
    np.testing.assert_allclose(relevance(tiny, tiny[None] / 4).numpy(), [0.25], rtol=1e-9)


def test_clients_of_one_distribution_are_relevant_to_each_other() -> None:
    draw = np.random.default_rng(5)
    bases = [np.linalg.qr(draw.normal(size=(60, 6)))[0] for _ in range(2)]
    clients = []
    for k in (0, 0, 1):
        rows = draw.normal(size=(400, 6)) * np.arange(6, 0, -1)
        clients.append(torch.from_numpy(rows @ bases[k].T))
    spectrum = [top(x, 4) for x in clients]

    def of(i: int, j: int) -> float:
        return float(relevance(spectrum[i][0], projected(clients[i], spectrum[j][1])[None]))

    r = [[of(i, j) for j in range(3)] for i in range(3)]
    np.testing.assert_allclose(np.diag(r), 1, rtol=1e-9)
    assert min(r[0][1], r[1][0]) > 0.8 and max(r[0][2], r[2][0], r[1][2], r[2][1]) < 0.3


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 4), st.floats(0, 0.5))
def test_relevance_of_spans_is_the_ratio_of_their_energies(
    seed: int, p: int, j: int, floor: float
) -> None:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(20, 7)) * 0.7 ** np.arange(7)
    gram = x.T @ x
    own = np.linalg.eigvalsh(gram)[::-1][:p]
    bases = [np.linalg.qr(draw.normal(size=(7, p)))[0] for _ in range(j)]
    images = np.stack([np.linalg.norm(gram @ basis, axis=0) for basis in bases])
    counts = own > floor * own[0]
    found = span_relevance(torch.from_numpy(own.copy()), torch.from_numpy(images), floor)
    energy = np.linalg.norm(own[counts])
    seen = [np.linalg.norm(gram @ basis[:, counts]) for basis in bases]  # Frobenius
    np.testing.assert_allclose(found.numpy(), np.array(seen) / energy, rtol=1e-9)
    assert bool((found <= 1 + 1e-12).all())  # Ky Fan


def test_relevance_of_spans_does_not_depend_on_the_basis() -> None:
    draw = np.random.default_rng(3)
    basis, turn = (np.linalg.qr(draw.normal(size=size))[0] for size in ((9, 3), (3, 3)))
    gram = np.diag(np.arange(9.0, 0, -1))
    own = torch.tensor([9.0, 8.0, 7.0], dtype=torch.float64)
    images = np.stack([np.linalg.norm(gram @ v, axis=0) for v in (basis, basis @ turn)])
    found = span_relevance(own, torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12)
    alone = relevance(own, torch.from_numpy(images)).numpy()
    assert abs(alone[0] - alone[1]) > 0.01  # one vector at a time, it does


# squares of smaller numbers are zero
IMAGES = st.one_of(st.just(0.0), st.floats(1e-100, 1e7))


@given(st.floats(1e-6, 1e6), st.lists(IMAGES, min_size=1, max_size=5))
def test_of_one_vector_both_relevances_are_the_papers(value: float, others: list[float]) -> None:
    own = torch.tensor([value], dtype=torch.float64)
    images = torch.tensor(others, dtype=torch.float64)[:, None]
    expected = relevance(own, images).numpy()
    np.testing.assert_allclose(span_relevance(own, images).numpy(), expected, rtol=1e-9)


def test_relevance_of_spans_at_its_limits() -> None:
    own = torch.tensor([4.0, 3.0, 0.0], dtype=torch.float64)  # rank two: the padding does not count
    rows = [[4.0, 3.0, 7.0], [4.0, 0.0, 0.0], [0.0, 0.0, 0.0], [8.0, 6.0, 0.0]]
    other = torch.tensor(rows, dtype=torch.float64)
    np.testing.assert_allclose(span_relevance(own, other).numpy(), [1, 0.8, 0, 0.5], rtol=1e-14)
    first = torch.tensor([[True, False, False]]).expand(4, 3)
    found = span_relevance(own, other, shared=first).numpy()
    np.testing.assert_allclose(found, [1, 1, 0, 0.5], rtol=1e-14)
    np.testing.assert_array_equal(span_relevance(torch.zeros(3), other).numpy(), np.zeros(4))
    tiny = torch.full((5,), 1e-200, dtype=torch.float64)  # whose squares underflow
    np.testing.assert_allclose(span_relevance(tiny, tiny[None] / 4).numpy(), [0.25], rtol=1e-9)
