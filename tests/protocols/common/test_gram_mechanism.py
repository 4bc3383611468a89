"""Noisy Gram matrices against numpy: the noise's covariance in a basis of symmetric matrices,
sensitivities, spectra.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from securecluster.clustering import eigenvectors
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.protocols.common.comparison import gram_mechanism
from securecluster.protocols.common.comparison.gram_mechanism import (
    APART,
    REPLACE,
    GramNoise,
    clipped,
    edge,
    gram,
    packed,
    told_by_all,
    unpacked,
)
from securecluster.runtime.call_context import CallContext, outside_run

Rows = NDArray[np.float64]


class Drawn:
    """Gaussians by numpy, a function of all that they are asked for."""

    def noised(
        self, client: int, purpose: str, step: int, row: torch.Tensor, z: float, reach: float
    ) -> torch.Tensor:
        text = f"{client} {purpose} {step} ".encode() + row.numpy().tobytes()
        seed = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
        return row + z * reach * torch.from_numpy(
            np.random.default_rng(seed).normal(size=tuple(row.shape))
        )


class Unit:
    """Instead of Gaussians, the k-th unit vector."""

    def __init__(self, k: int) -> None:
        self.k = k

    def noised(
        self, client: int, purpose: str, step: int, row: torch.Tensor, z: float, reach: float
    ) -> torch.Tensor:
        out = row.clone()
        out[self.k] += z * reach
        return out


def noise(z: float, per_client: bool = False, mechanism: str = "gram") -> GramNoise:
    return GramNoise(z, mechanism, per_client)


def of(client: int, draws: Any = None) -> CallContext:
    """A call to one client, in a run whose own noise is another one."""
    own: Any = draws or Drawn()
    return outside_run(ClientNoise("example", 7.0, 11.0, 1.0, own), [client])


def data(seed: int, n: int, d: int, size: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(
        (size * np.random.default_rng(seed).normal(size=(n, d))).astype(np.float32)
    )


def direct(x: torch.Tensor) -> Rows:
    """XᵀX of the clipped rows, sample by sample."""
    total = np.zeros((x.shape[1],) * 2)
    for row in x.numpy().astype(np.float64):
        own = row * min(1.0, 1 / max(np.linalg.norm(row), 1e-300))
        total += np.outer(own, own)
    return total


def basis(d: int) -> list[Rows]:
    """An orthonormal basis of the symmetric matrices: e_a e_aᵀ, and (e_a e_bᵀ + e_b e_aᵀ)/√2."""
    unit, found = np.eye(d), []
    for a in range(d):
        for b in range(a, d):
            both = np.outer(unit[a], unit[b]) + np.outer(unit[b], unit[a])
            found.append(both / np.linalg.norm(both))
    return found


@given(
    st.integers(0, 10**6),
    st.integers(0, 30),
    st.integers(1, 12),
    st.floats(0.05, 20),
    st.integers(1, 60),
)
def test_the_gram_matrix_is_that_of_clipped_rows(
    seed: int, n: int, d: int, size: float, block: int
) -> None:
    x = data(seed, n, d, size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gram_mechanism, "BLOCK", block)
        one, mean = gram(x), gram(x, mean=True)
    assert one.dtype == torch.float64
    np.testing.assert_allclose(one.numpy(), direct(x), rtol=0, atol=1e-12 * max(n, 1))
    np.testing.assert_allclose(mean.numpy(), direct(x) / max(n, 1), rtol=0, atol=1e-12)
    assert bool((clipped(x).norm(dim=1) <= 1 + 1e-12).all())


def test_short_rows_are_left_and_no_other_row_matters() -> None:
    x = torch.tensor([[0.3, 0.4], [0.0, 0.0], [3.0, 4.0]])
    np.testing.assert_allclose(clipped(x).numpy(), [[0.3, 0.4], [0, 0], [0.6, 0.8]], rtol=1e-6)
    assert torch.equal(clipped(x)[:1], clipped(x[:1]))


@pytest.mark.parametrize("d", [1, 2, 5])
def test_noise_is_isotropic_on_the_space_of_symmetric_matrices(d: int) -> None:
    x, own = data(0, 9, d), basis(d)
    # noise is linear in what is drawn, so its covariance is s² in every direction of the basis
    for k, matrix in enumerate(own):
        found = noise(2.5).matrix(x, of(0, Unit(k))).numpy() - direct(x)
        np.testing.assert_allclose(found, 2.5 * matrix, rtol=0, atol=1e-12)
    m = data(1, d, d).double().numpy()
    m = m + m.T
    row = packed(torch.from_numpy(m))
    np.testing.assert_allclose(
        row.numpy(), [np.sum(m * matrix) for matrix in own], rtol=0, atol=1e-12
    )
    np.testing.assert_allclose(unpacked(row, d).numpy(), m, rtol=0, atol=1e-12)


def test_variances_on_and_beside_the_diagonal() -> None:
    x = data(0, 40, 200)
    found = noise(3.0).matrix(x, of(4)).numpy() - direct(x)
    upper = found[np.triu_indices(200, 1)]
    np.testing.assert_array_equal(found, found.T)
    assert np.var(upper) == pytest.approx(9 / 2, rel=0.05) and abs(np.mean(upper)) < 0.05
    assert np.var(np.diag(found)) == pytest.approx(9, rel=0.35)


def test_the_spectral_norm_is_smaller_than_that_of_equal_variances_by_the_root_of_two() -> None:
    found = noise(1.0).matrix(torch.zeros(1, 784), of(0))
    norm = float(np.abs(np.linalg.eigvalsh(found.numpy())).max())
    draw = np.random.default_rng(0).normal(size=(784, 784))
    plain = np.triu(draw) + np.triu(draw, 1).T  # Analyze Gauss: variance 1 everywhere
    other = float(np.abs(np.linalg.eigvalsh(plain)).max())
    assert norm == pytest.approx(np.sqrt(2 * 784), rel=0.02) and edge(1.0, 784) == pytest.approx(
        np.sqrt(2 * 784)
    )
    assert other == pytest.approx(np.sqrt(4 * 784), rel=0.02)
    assert norm / other == pytest.approx(np.sqrt(0.5), rel=0.03)


@given(
    st.integers(0, 10**6),
    st.integers(1, 8),
    st.integers(1, 6),
    st.floats(0.01, 1e4),
    st.floats(0.01, 1e4),
)
def test_one_sample_moves_it_by_no_more_than_the_noise_is_for(
    seed: int, n: int, d: int, size: float, other: float
) -> None:
    x, extra = data(seed, n, d, size), data(seed + 1, 1, d, other)
    whole, replaced = torch.cat([x, extra]), torch.cat([x[:-1], extra])
    assert float((gram(whole) - gram(x)).norm()) <= 1 + 1e-9
    assert float((gram(replaced) - gram(x)).norm()) <= REPLACE + 1e-9
    assert float(gram(whole, mean=True).norm()) <= 1 + 1e-9  # a client against none
    assert float((gram(whole, mean=True) - gram(extra, mean=True)).norm()) <= REPLACE + 1e-9


def test_the_sensitivities_are_reached() -> None:
    x, one, two = data(0, 5, 4), torch.tensor([[9.0, 0, 0, 0]]), torch.tensor([[0, 7.0, 0, 0]])
    assert float((gram(torch.cat([x, one])) - gram(x)).norm()) == pytest.approx(1)
    assert (
        float((gram(torch.cat([x, one])) - gram(torch.cat([x, two]))).norm())
        == pytest.approx(np.sqrt(2))
        == pytest.approx(REPLACE)
    )
    assert float(gram(one.repeat(6, 1), mean=True).norm()) == pytest.approx(1)
    assert float(
        (gram(one.repeat(6, 1), mean=True) - gram(two, mean=True)).norm()
    ) == pytest.approx(np.sqrt(2))


def test_noise_is_drawn_once_for_a_clients_data() -> None:
    x, y = data(0, 20, 6), data(1, 20, 6)
    made = noise(1.5)
    assert torch.equal(made.matrix(x, of(3)), noise(1.5).matrix(x.clone(), of(3)))
    assert not torch.allclose(made.matrix(x, of(3)), made.matrix(x, of(4)))
    apart = (made.matrix(x, of(3)) - made.matrix(y, of(3))).numpy() - (direct(x) - direct(y))
    assert np.abs(apart).max() > 0.1  # other data, other noise: it does not cancel
    client = noise(1.5, per_client=True).matrix(x, of(3)).numpy() - direct(x) / 20
    # of 21 numbers, whatever n is
    assert np.linalg.norm(client) == pytest.approx(1.5 * np.sqrt(21), rel=0.5)


@pytest.mark.parametrize("whole", [8, 1000])  # by ARPACK, and whole
@pytest.mark.parametrize("z", [0.02, 1.2, 50.0])
def test_the_spectrum_is_numpys_as_far_as_it_stands_out(
    z: float, whole: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eigenvectors, "WHOLE", whole)
    x = data(2, 300, 60) * (0.8 ** torch.arange(60))
    made = noise(z)
    noisy = made.matrix(x, of(0))
    values, vectors = made.spectrum(noisy, 6)
    known, directions = np.linalg.eigh(noisy.numpy())
    known, directions = known[::-1][:6], directions[:, ::-1].T[:6]
    k = max(1, int((known >= APART * z * np.sqrt(120)).sum()))
    assert k == {0.02: 6, 1.2: 4, 50.0: 1}[z]
    np.testing.assert_allclose(values.numpy()[:k], known[:k], rtol=1e-9)
    np.testing.assert_allclose(np.abs((vectors.numpy()[:k] * directions[:k]).sum(1)), 1, rtol=1e-7)
    assert not values[k:].any() and not vectors[k:].any()


def test_a_negative_first_eigenvalue_counts_as_zero_and_its_vector_is_told() -> None:
    noisy = torch.diag(torch.tensor([-3.0, -1.0, -2.0], dtype=torch.float64))
    values, vectors = noise(1.0).spectrum(noisy, 2)
    assert values.tolist() == [0, 0]
    assert vectors.tolist() == [[0, 1, 0], [0, 0, 0]]


def test_all_pairs_compare_as_many_vectors() -> None:
    vectors = torch.zeros(4, 3, 2)
    for j, count in enumerate((3, 2, 3, 0)):
        vectors[j, :count, 0] = 1
    yes, no = True, False
    assert told_by_all(vectors[:3]).tolist() == [[yes, yes, no]] * 3
    assert told_by_all(vectors).tolist() == [[yes, no, no]] * 3 + [[no, no, no]]


def test_the_naive_mechanism_noises_every_vector_by_its_trivial_sensitivity() -> None:
    vectors = torch.zeros(4, 500, dtype=torch.float64)
    # beyond the rank there is none: that is hidden too
    vectors[:3, :3] = torch.eye(3, dtype=torch.float64)
    found = noise(0.05, mechanism="naive").blurred(vectors, of(0))
    np.testing.assert_allclose(found.norm(dim=1).numpy(), np.ones(4), rtol=1e-12)
    # s = z · 2√p
    expected = Drawn().noised(0, "eigenvectors", 0, vectors, 0.05, 2 * np.sqrt(4)).numpy()
    np.testing.assert_allclose(
        found.numpy(), expected / np.linalg.norm(expected, axis=1, keepdims=True), rtol=1e-12
    )
    assert np.std(found.numpy()[3]) * np.sqrt(500) == pytest.approx(1, rel=0.01)
