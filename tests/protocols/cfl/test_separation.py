"""The Separation Theorem against vectors that satisfy its premises, brute force over all
bipartitions, and values by hand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.clustering.bipartition import bipartition
from securecluster.errors import UsageError
from securecluster.protocols.cfl.separation import (
    approximation_noise,
    assurance,
    cross_bound,
    guaranteed_noise,
    intra_bound,
    is_correct,
    largest_noise,
    noise_cosines,
    observed_noise,
    separation_gap,
)

Array = np.ndarray[Any, Any]


def cosines(rows: Array) -> Array:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    alpha: Array = unit @ unit.T
    np.fill_diagonal(alpha, 1.0)
    return alpha


def every_bipartition(alpha: Array) -> list[tuple[float, tuple[int, ...], tuple[int, ...]]]:
    """(largest cross similarity, first, second) of all bipartitions."""
    m, found = len(alpha), []
    for size in range(1, m):
        for rest in itertools.combinations(range(1, m), m - size):
            first = tuple(i for i in range(m) if i not in rest)
            found.append((max(alpha[i, j] for i in first for j in rest), first, rest))
    return found


def stationary(k: int, d: int, rng: np.random.Generator, flat: float) -> Array:
    """v_1 … v_k with Σ a_l·v_l = 0 for positive a_l; `flat` near 0 squeezes all but one direction,
    which makes chains.
    """
    v = rng.normal(size=(k, d)) * np.array([1.0] + [flat] * (d - 1))
    a = rng.uniform(0.05, 5, k)
    v[-1] = -(a[:-1] @ v[:-1]) / a[-1]
    return v


def noisy(v: Array, gamma: float, rng: np.random.Generator, worst: bool) -> Array:
    """v + X with ‖X‖ = γ·‖v‖, X random or as Lemma 2's worst: at a right angle to v + X."""
    x = rng.normal(size=v.shape)
    if worst:
        side = x - (x @ v) / (v @ v) * v
        side *= np.linalg.norm(v) / np.linalg.norm(side)
        context = math.asin(gamma)
        return math.cos(context) * (math.cos(context) * v + math.sin(context) * side)
    return v + x * gamma * np.linalg.norm(v) / np.linalg.norm(x)


@given(
    k=st.integers(2, 5),
    d=st.sampled_from([2, 2, 3, 7, 40]),
    flat=st.sampled_from([1.0, 0.3, 0.01]),
    top=st.sampled_from([0.1, 0.5, 0.999]),
    worst=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_no_vectors_that_satisfy_the_premises_break_a_bound(
    k: int, d: int, flat: float, top: float, worst: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    v, truth = stationary(k, d, rng, flat), [*range(k), *(int(c) for c in rng.integers(0, k, 3))]
    drawn = rng.uniform(0, top, len(truth))
    r = np.array([noisy(v[c], g, rng, worst) for c, g in zip(truth, drawn, strict=True)])
    gamma = approximation_noise(r, v, truth)
    assert gamma == pytest.approx(drawn, rel=1e-6, abs=1e-7)
    alpha = cosines(r)
    options = every_bipartition(alpha)
    cross = min(options)[0]
    intra = min(
        (
            alpha[i, j]
            for i, j in itertools.combinations(range(len(truth)), 2)
            if truth[i] == truth[j]
        ),
        default=1.0,
    )
    assert cross <= cross_bound(drawn, k, truth) + 1e-9 <= cross_bound(drawn, k) + 2e-9
    assert intra >= intra_bound(drawn, truth) - 1e-9 >= intra_bound(drawn) - 2e-9
    gap = separation_gap(alpha, truth)
    assert gap == pytest.approx(intra - cross, abs=1e-12)
    chosen = [(a, b) for value, a, b in options if value == cross]
    if (gap is not None and gap > 1e-9) or drawn.max() < largest_noise(cross) - 1e-9:
        assert all(not {truth[i] for i in a} & {truth[j] for j in b} for a, b in chosen)
        assert is_correct(*bipartition(alpha)[:2], truth)
    if drawn.max() < guaranteed_noise(k):
        assert gap is not None and gap > -1e-9


def fan(k: int, gamma: float) -> tuple[Array, list[int], Array]:
    """Lemma 4's worst case in the plane: directions a step of π/(k−1) apart over half a circle; two
    clients each, turned both ways.

    The outer two lie a little lower, so that a small positive weight of the others makes the sum
    zero.
    """
    tilt = 1e-4 if k > 2 else 0.0
    angles = np.linspace(-tilt, math.pi + tilt, k)
    weights = np.full(k, 2 * math.sin(tilt) / max(np.sin(angles[1:-1]).sum(), 1e-9))
    weights[[0, -1]] = 1.0
    v = np.array([[math.cos(a), math.sin(a)] for a in angles])
    assert (weights > 0).all() and weights @ v == pytest.approx(np.zeros(2), abs=1e-12)
    turned = [angle + side * math.asin(gamma) for angle in angles for side in (-1, 1)]
    r = math.sqrt(1 - gamma**2) * np.array([[math.cos(a), math.sin(a)] for a in turned])
    return v, [c for c in range(k) for _ in range(2)], r


@pytest.mark.parametrize("k", [2, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_the_bounds_are_tight(k: int, share: float) -> None:
    gamma = share * guaranteed_noise(k)
    v, truth, r = fan(k, gamma)
    assert approximation_noise(r, v, truth) == pytest.approx([gamma] * 2 * k, abs=1e-9)
    alpha = cosines(r)
    assert min(every_bipartition(alpha))[0] == pytest.approx(
        cross_bound([gamma] * 2 * k, k, truth), abs=2e-4
    )
    assert alpha[0, 1] == pytest.approx(intra_bound([gamma] * 2 * k, truth), abs=1e-9)


@pytest.mark.parametrize("k", [2, 3, 5])
def test_the_guaranteed_region_ends_where_a_counterexample_begins(k: int) -> None:
    for share, holds in ((0.98, True), (1.02, False)):
        gamma = share * guaranteed_noise(k)
        bounds = intra_bound([gamma] * 2) - cross_bound([gamma] * 2, k)
        gap = separation_gap(cosines(fan(k, gamma)[2]), fan(k, gamma)[1])
        assert gap is not None and (bounds > 0) is holds and (gap > 0) is holds


def test_values_by_hand() -> None:
    # 3-4-5 triangles
    assert noise_cosines([0.6, 0.8]) == pytest.approx(np.array([[0.28, 0.0], [0.0, -0.28]]))
    assert cross_bound([0.6, 0.0], 2) == pytest.approx(-0.8)  # −H (eq. 22)
    assert cross_bound([0.6, 0.0], 3) == pytest.approx(0.6)  # cos 90°·0.8 + sin 90°·0.6
    assert cross_bound([0.6, 0.6], 4) == 1.0  # H = 0.28 < cos 60°
    assert cross_bound([0.0, 0.0], 4) == pytest.approx(0.5)
    # the pair of two noisy clients is within
    assert cross_bound([0.6, 0.0, 0.6], 2, [0, 1, 0]) == pytest.approx(-0.8)
    assert intra_bound([0.6, 0.8, 0.0], [0, 1, 1]) == pytest.approx(0.6)
    assert intra_bound([0.6, 0.8, 0.0]) == pytest.approx(1 - 2 * 0.64)
    assert intra_bound([0.6, 0.8], [0, 1]) == 1.0
    assert [largest_noise(a) for a in (-1.0, 0.5, 1.0, 1 + 1e-16)] == pytest.approx(
        [1.0, 0.5, 0.0, 0.0]
    )
    assert [guaranteed_noise(k) for k in (2, 3)] == pytest.approx([math.sqrt(0.5), 0.3826834])
    assert approximation_noise(
        [[3.0, 4.0], [0.0, 2.0]], [[3.0, 0.0], [0.0, 1.0]], [0, 1]
    ) == pytest.approx([4 / 3, 1.0])


@given(st.floats(0, 0.999), st.floats(0, 0.999), st.integers(2, 9))
def test_the_bound_is_equation_19_as_printed(a: float, b: float, k: int) -> None:
    h, angle = -a * b + math.sqrt(1 - a * a) * math.sqrt(1 - b * b), math.pi / (k - 1)
    printed = (
        math.cos(angle) * h + math.sin(angle) * math.sqrt(max(0.0, 1 - h * h))
        if h >= math.cos(angle)
        else 1.0
    )
    assert cross_bound([a, b], k) == pytest.approx(printed, abs=1e-6)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=7), st.integers(0, 10**6))
def test_the_separation_gap_is_equation_29_by_brute_force(truth: list[int], seed: int) -> None:
    raw = np.random.default_rng(seed).uniform(-1, 1, (len(truth), len(truth)))
    alpha = (raw + raw.T) / 2
    np.fill_diagonal(alpha, 1.0)
    intra = min(
        alpha[i, j] for i in range(len(truth)) for j in range(len(truth)) if truth[i] == truth[j]
    )
    assert separation_gap(alpha, truth) == pytest.approx(intra - min(every_bipartition(alpha))[0])


def symmetric(upper: Sequence[float]) -> Array:
    """Similarities from those above the diagonal, row by row."""
    m = round((1 + math.sqrt(1 + 8 * len(upper))) / 2)
    alpha = np.zeros((m, m))
    alpha[np.triu_indices(m, 1)] = upper
    filled: Array = alpha + alpha.T + np.eye(m)
    return filled


def gap_of(upper: Sequence[float], truth: Sequence[int]) -> float | None:
    return separation_gap(symmetric(upper), truth)


def test_the_separation_gap_by_hand() -> None:
    three = (0.9, 0.2, -0.4)  # α_01, α_02, α_12
    assert gap_of(three, [0, 0, 1]) == pytest.approx(0.7)
    # α_02 is the weakest of its own and the cut's largest
    assert gap_of(three, [0, 1, 0]) == pytest.approx(0.0)
    # one distribution: below zero, as in Fig. 8's last rounds
    assert gap_of(three, [0, 0, 0]) == pytest.approx(-0.6)
    assert gap_of(three, [0, 1, 2]) == pytest.approx(0.8)
    assert separation_gap(np.ones((1, 1)), [0]) is None
    # distributions {0, 1}, {2}, {3}: the closest other pair does not count, the best cut does
    four = (0.9, 0.0, 0.0, 0.0, 0.0, -0.5)
    assert gap_of(four, [0, 0, 1, 2]) == pytest.approx(0.9)


def test_a_correct_bipartition_does_not_need_a_positive_gap() -> None:
    # 0–1–2 hold together by links, 0 and 2 are less alike than the best cut
    chain = (0.9, 0.1, 0.3, 0.9, 0.3, 0.3)
    sides = bipartition(symmetric(chain))
    assert gap_of(chain, [0, 0, 0, 1]) == pytest.approx(-0.2)
    assert is_correct(sides.first, sides.second, [0, 0, 0, 1])
    assert not is_correct((0, 1), (2, 3), [0, 1, 1, 2])


def test_what_the_theorem_does_not_cover_is_refused() -> None:
    for gamma in ([1.0], [-0.1], [math.nan]):
        with pytest.raises(UsageError, match=r"\[0, 1\)"):
            noise_cosines(gamma)
    with pytest.raises(UsageError, match="at least 2"):
        cross_bound([0.1, 0.1], 1)
    with pytest.raises(UsageError, match="at least 2"):
        guaranteed_noise(1)
    with pytest.raises(UsageError, match="one distribution"):
        cross_bound([0.1, 0.1], 2, [0, 0])
    with pytest.raises(UsageError, match="gradient is zero"):
        approximation_noise([[1.0, 0.0]], [[0.0, 0.0]], [0])


@pytest.mark.parametrize("noise", [0.3, 1.0, 2.0])
def test_observed_noise_is_the_sine_of_the_angle_to_the_true_gradient(noise: float) -> None:
    """Of clients of several lengths, which no cosine depends on."""
    rng = np.random.default_rng(0)
    truth = [i % 3 for i in range(60)]
    true = rng.normal(size=(3, 4000))
    true /= np.linalg.norm(true, axis=1, keepdims=True)
    own = noise * rng.uniform(0.5, 1.0, size=(60, 1))
    rows = true[truth] + own * rng.normal(size=(60, 4000)) / np.sqrt(4000)
    rows *= rng.uniform(0.1, 10, size=(60, 1))
    along = (rows * true[truth]).sum(1) / np.linalg.norm(rows, axis=1)
    found = observed_noise(cosines(rows), truth)
    np.testing.assert_allclose(found, np.sqrt(1 - along**2), atol=0.06)
    assert np.isnan(observed_noise(cosines(rows), range(60))).all()


def test_an_assured_split_is_right_and_noise_of_privacy_assures_less() -> None:
    rng = np.random.default_rng(1)
    assured = 0
    for _ in range(60):
        truth = [i % 3 for i in range(15)]
        true = rng.normal(size=(3, 200))
        true -= true.mean(0)
        scale = rng.uniform(0.1, 2.0) * np.linalg.norm(true, axis=1).mean() / np.sqrt(200)
        alpha = cosines(true[truth] + scale * rng.normal(size=(15, 200)))
        sides = bipartition(alpha)
        entry = assurance(alpha, truth, sides.cross_max, 0.0, 2)
        if entry["gamma"] < entry["allowed"]:
            assured += 1
            assert is_correct(sides.first, sides.second, truth)
            assert "it is right if" in entry["sentence"]
        noisy = assurance(alpha, truth, sides.cross_max, 3.0, 2)
        assert noisy["gamma"] > max(entry["gamma"], 0.9)
        assert "ν = 3.00 of privacy" in noisy["sentence"]
        assert entry["clusters"] == 3 and entry["guaranteed"] == guaranteed_noise(3)
    assert 10 < assured < 60
