"""The two rotations: orthonormal, as defined (against naive implementations), uniform or spreading,
and undone.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from hypothesis import given
from hypothesis import strategies as st
from scipy.linalg import hadamard as sylvester
from scipy.stats import norm

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking import hadamard
from securecluster.privacy.masking import keystream as stream
from securecluster.privacy.masking.masks import build, width
from securecluster.privacy.masking.rotations import DENSEST, Haar, RotationMask, padded

SEED = bytes(range(32))


def keystream(step: int, purpose: int, count: int) -> bytes:
    """RFC 8439's stream under the nonce this package defines: 64 bits of step, 32 of purpose,
    little-endian.
    """
    nonce = bytes(4) + step.to_bytes(8, "little") + purpose.to_bytes(4, "little")
    return Cipher(ChaCha20(SEED, nonce), mode=None).encryptor().update(bytes(count))


def rotation(d: int, seed: bytes = SEED) -> RotationMask:
    stage = RotationMask(d)
    stage.unlock(seed)
    return stage


def haar(seed: bytes = SEED) -> Haar:
    stage = Haar()
    stage.unlock(seed)
    return stage


def rows(b: int, d: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(d).normal(size=(b, d))).to(dtype)


@pytest.mark.parametrize("order", hadamard._orders())
def test_every_factor_is_a_hadamard_matrix(order: int) -> None:
    h = hadamard.matrix(order).astype(np.int64)
    assert set(np.unique(h)) <= {-1, 1}
    assert np.array_equal(h @ h.T, order * np.eye(order, dtype=np.int64))


def test_powers_of_two_are_sylvesters_and_unknown_orders_are_refused() -> None:
    for k in range(8):
        assert np.array_equal(hadamard.matrix(1 << k), sylvester(1 << k))
    # Hadamard matrices of orders 52 and 92 exist, by other constructions
    for order in (3, 6, 52, 92):
        with pytest.raises(ValueError, match="no Hadamard matrix"):
            hadamard.matrix(order)


@pytest.mark.exhaustive
@given(st.integers(1, 3_000_000))
def test_padding_is_small_and_settled(d: int) -> None:
    n = padded(d)
    assert d <= n <= max(d + 3, 1.5 * d)
    assert d < 1000 or n <= 1.044 * d
    assert d < 14_000 or n <= 1.021 * d
    assert d < 1_000_000 or n <= 1.007 * d
    assert padded(n) == n
    assert hadamard.factors(n) == hadamard.factors(d)
    assert max(hadamard.factors(d)) <= hadamard.LARGEST


@pytest.mark.parametrize(
    ("d", "n"),
    [
        (1, 1), (3, 4), (64, 64), (650, 672), (4810, 4864), (159_010, 159_744),
        (1_663_370, 1_663_488),
    ],
)  # fmt: skip
def test_the_width_of_known_models(d: int, n: int) -> None:
    assert padded(d) == width("rotation", d) == n
    assert width("haar", d) == width("permutation", d) == d


@pytest.mark.parametrize("sizes", [(5,), (2, 3), (4, 1, 7), (2, 2, 2, 3)])
def test_small_products_make_the_kronecker_product(sizes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(k, k)) for k in sizes]
    whole = parts[0]
    for part in parts[1:]:
        whole = np.kron(whole, part)
    x = rng.normal(size=(3, math.prod(sizes)))
    found = hadamard.transform(torch.from_numpy(x), [torch.from_numpy(p) for p in parts])
    np.testing.assert_allclose(found.numpy(), x @ whole.T, atol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 8, 64, 256, 1024])
def test_it_is_two_hadamard_and_sign_layers_and_a_last_sign_layer(d: int) -> None:
    """Against scipy's Hadamard matrix and bits taken from the stream one by one."""
    step = 9
    data = keystream(step, 2, 3 * d)
    flips = np.array([1 - 2 * ((data[k // 8] >> (k % 8)) & 1) for k in range(3 * d)]).reshape(3, d)
    h, x = sylvester(d) / math.sqrt(d), rows(4, d)
    expected = flips[2] * ((flips[1] * ((flips[0] * x.numpy()) @ h.T)) @ h.T)
    np.testing.assert_allclose(rotation(d).forward(x, step).numpy(), expected, atol=1e-13)


@pytest.mark.parametrize("d", [3, 5, 100, 650, 4810])
def test_padded_rows_rotate_as_the_naive_product(d: int) -> None:
    n = padded(d)
    h = np.ones((1, 1))
    for k in hadamard.factors(d):
        h = np.kron(h, hadamard.matrix(k))
    octets = np.frombuffer(keystream(1, 2, 3 * n), np.uint8)
    flips = 1 - 2 * np.unpackbits(octets, bitorder="little")[: 3 * n].reshape(3, n).astype(int)
    x = rows(2, d).numpy()
    full = np.concatenate([x, np.zeros((2, n - d))], axis=1)
    expected = flips[2] * ((flips[1] * ((flips[0] * full) @ h.T)) @ h.T) / n
    found = rotation(d).forward(torch.from_numpy(x), 1).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-12)


@pytest.mark.parametrize("d", [1, 2, 3, 30, 300])
def test_both_are_orthonormal(d: int) -> None:
    unit = torch.eye(d, dtype=torch.float64)
    for stage in (rotation(d), haar()):
        there = stage.forward(unit, 5).numpy()
        np.testing.assert_allclose(there @ there.T, np.eye(d), atol=1e-13)


@pytest.mark.parametrize("name", ["rotation", "haar"])
@pytest.mark.parametrize(
    ("d", "dtype", "bound"),
    [(700, torch.float32, 1e-6), (700, torch.float64, 1e-13), (7, torch.float64, 1e-13)],
)
def test_a_client_that_only_receives_undoes_them(
    name: str, d: int, dtype: torch.dtype, bound: float
) -> None:
    x = rows(3, d, dtype)
    sender, receiver = build(name, d)[0], build(name, d)[0]
    for stage in (sender, receiver):
        stage.unlock(SEED)  # type: ignore[attr-defined]
    mean = sender.forward(x, 4).mean(0)
    back = receiver.inverse(mean, 4)
    assert (back.shape, back.dtype, mean.dtype) == ((d,), dtype, dtype)
    assert (back - x.mean(0)).norm() <= bound * x.mean(0).norm()
    assert (receiver.inverse(mean, 5) - x.mean(0)).norm() > 0.5 * x.mean(0).norm()


def test_a_large_model_is_rotated_in_float32_to_one_in_a_million() -> None:
    x = rows(1, 1_663_370, torch.float32)
    stage = rotation(1_663_370)
    there = stage.forward(x, 1)
    assert there.shape == (1, 1_663_488)
    assert abs(there.double().norm() / x.double().norm() - 1) < 1e-6
    assert (stage.inverse(there, 1) - x).norm() <= 1e-6 * x.norm()


@pytest.mark.parametrize("name", ["rotation", "haar"])
def test_a_client_is_a_batch_of_one_and_rows_stay_as_they_were(name: str) -> None:
    x = rows(5, 200, torch.float32)
    kept, (stage,) = x.clone(), build(name, 200)
    stage.unlock(SEED)  # type: ignore[attr-defined]
    there = stage.forward(x, 3)
    assert torch.equal(x, kept)
    alone = torch.stack([stage.forward(row, 3) for row in x])
    torch.testing.assert_close(alone, there, rtol=0, atol=2e-6)
    torch.testing.assert_close(stage.forward(x.view(1, 5, 200), 3)[0], there, rtol=0, atol=2e-6)
    masked = there.clone()
    stage.inverse(there, 3)
    assert torch.equal(there, masked)


def test_fresh_for_each_step_and_seed() -> None:
    x = torch.zeros(1, 512, dtype=torch.float64)
    x[0, 7] = 1
    for make in (lambda s: rotation(512, s), haar):
        drawn = ((SEED, 1), (SEED, 2), (bytes(32), 1), (SEED, 2**40))
        found = [make(seed).forward(x, step) for seed, step in drawn]
        for k, one in enumerate(found):
            for other in found[:k]:
                assert float((one @ other.T).abs()) < 5 / math.sqrt(512)


def test_a_unit_vector_is_spread_over_all_coordinates() -> None:
    """Every coordinate of a fixed direction is of the order 1/√n: the largest of n is about sqrt(2
    log n / n).
    """
    d = 5000
    n = padded(d)
    x = torch.zeros(4, d, dtype=torch.float64)
    x[0, 0] = x[1, d - 1] = x[2, 1234] = 1
    x[3] = 1 / math.sqrt(d)
    largest = rotation(d).forward(x, 1).abs().amax(1) / math.sqrt(2 * math.log(n) / n)
    assert float(largest.max()) < 1.4
    assert float(largest.min()) > 0.7


def test_haar_is_the_q_of_a_gaussian_with_the_signs_of_r() -> None:
    d, step = 40, 11
    top = np.frombuffer(keystream(step, 3, 8 * d * d), "<u8") >> np.uint64(12)
    g = norm.ppf((top + 0.5) / 2**52).reshape(d, d)
    q, r = np.linalg.qr(g)
    expected = rows(3, d).numpy() @ (q * np.sign(np.diag(r))).T
    np.testing.assert_allclose(haar().forward(rows(3, d), step).numpy(), expected, atol=1e-11)


def test_haar_has_the_moments_of_the_uniform_law() -> None:
    """E Q_ij = 0, E Q_ij² = 1/d, E Q_ij⁴ = 3/(d(d+2)), E tr Q = 0, E (tr Q)² = 1, and det Q is ±1
    alike.
    """
    d, trials = 6, 600
    stage, unit = haar(), torch.eye(d, dtype=torch.float64)
    q = torch.stack([stage.forward(unit, step) for step in range(trials)]).numpy()
    assert np.abs(q.mean(0)).max() < 4 / math.sqrt(d * trials)
    spread = math.sqrt(3 / (d * (d + 2)) - 1 / d**2)
    assert np.abs((q**2).mean(0) - 1 / d).max() < 4.5 * spread / math.sqrt(trials)
    assert abs((q**4).mean() - 3 / (d * (d + 2))) < 0.003  # a tenth above: 0.069 for 0.0625
    trace = np.trace(q, axis1=1, axis2=2)
    assert abs(trace.mean()) < 4 / math.sqrt(trials)
    assert abs((trace**2).mean() - 1) < 4 * math.sqrt(2 / trials)
    assert abs((np.linalg.det(q) > 0).mean() - 0.5) < 2 / math.sqrt(trials)


@pytest.mark.exhaustive
def test_layers_of_signs_are_uniform() -> None:
    counts = np.zeros(4096)
    stage = rotation(4)
    for step in range(20_000):
        negative = (torch.stack(stage._of(4, step)).flatten() < 0).long()
        counts[int((negative * (1 << torch.arange(12))).sum())] += 1
        stage._drawn.clear()
    expected = counts.sum() / 4096
    assert ((counts - expected) ** 2 / expected).sum() < 4095 + 4 * math.sqrt(2 * 4095)


def test_purposes_draw_from_disjoint_streams() -> None:
    for purpose in range(4):
        for step in (0, 1, 2**64 - 1):
            assert stream.words(SEED, step, 8, purpose).tobytes() == keystream(step, purpose, 64)


def test_gaussians_are_finite_and_symmetric_at_the_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    extreme = np.array([0, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr(stream, "words", lambda *_: extreme)
    low, high = stream.gaussians(SEED, 1, 2)
    assert low == pytest.approx(norm.ppf(2**-53), rel=1e-12)
    assert high == pytest.approx(-low, rel=1e-12)


def test_a_dense_rotation_is_refused_above_2048_and_names_the_fast_one() -> None:
    assert DENSEST == 2048
    assert build("haar", 2048)[0].name == "haar"
    assert build("haar")[0].name == "haar"  # a server that knows no dimension
    with pytest.raises(UsageError, match="'rotation'"):
        build("haar", 2049)
    with pytest.raises(UsageError, match="'rotation'"):
        haar().forward(torch.zeros(1, 2049), 1)
    with pytest.raises(UsageError, match="did you mean 'rotation'"):
        build("rotatoin", 10)


def test_an_average_of_another_width_or_a_mask_without_seed_or_dimension_is_refused() -> None:
    with pytest.raises(FrameError, match="has 12 numbers, 10 came"):
        rotation(10).inverse(torch.zeros(10), 1)
    with pytest.raises(UsageError, match="build it with one"):
        build("rotation")[0].inverse(torch.zeros(12), 1)
    for name in ("rotation", "haar", "signed-permutation"):
        (stage,) = build(name, 12)
        with pytest.raises(UsageError, match="no mask seed yet"):
            stage.forward(torch.zeros(1, 12), 1)
