"""The exponential mechanism against its own distributions, enumerated, and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import chisquare, norm

from securecluster.errors import UsageError
from securecluster.privacy.dp.exponential_mechanism import (
    bounded_range,
    choice,
    drawn,
    noise_multiplier,
    probabilities,
)
from securecluster.privacy.dp.noise_streams import NoiseStreams

DRAWS = NoiseStreams(lambda client: bytes([client] * 32), "run")


def hockey_stick(first: np.ndarray, second: np.ndarray, epsilon: float) -> float:
    """Return δ(ε) = Σ max(0, p − e^ε q)."""
    return float(np.maximum(0, first - math.exp(epsilon) * second).sum())


def gaussian_delta(epsilon: float, mean: float) -> float:
    """Return δ(ε) of unit Gaussians whose means are `mean` apart (Balle & Wang 2018, theorem 8)."""
    first = norm.cdf(mean / 2 - epsilon / mean)
    return float(first - math.exp(epsilon) * norm.cdf(-mean / 2 - epsilon / mean))


@pytest.mark.parametrize("eta", [0.05, 0.5, 2.0, 6.0])
def test_the_price_is_never_below_the_mechanisms_own_divergence(eta: float) -> None:
    # neighbouring data: one sample adds 0 or 1 to each of four counts
    mean = 1 / noise_multiplier(eta)
    draw = np.random.default_rng(0)
    for _ in range(20):
        counts = draw.integers(0, 30, 4).astype(float)
        for added in itertools.product((0, 1), repeat=4):
            one = probabilities(counts, eta)
            other = probabilities(counts + np.array(added), eta)
            for epsilon in (0.0, eta / 4, eta / 2, 0.9 * eta):
                bound = gaussian_delta(epsilon, mean)
                assert hockey_stick(one, other, epsilon) <= bound + 1e-12
                assert hockey_stick(other, one, epsilon) <= bound + 1e-12


@pytest.mark.parametrize("eta", [0.05, 0.5, 2.0, 6.0])
def test_replacing_a_sample_costs_no_more_than_a_gaussian_of_twice_the_mean(eta: float) -> None:
    # each count loses a sample, gains one, or stays: the range is 2η
    mean = 2 / noise_multiplier(eta)
    draw = np.random.default_rng(0)
    costliest = 0.0
    for _ in range(3):
        counts = draw.integers(1, 30, 4).astype(float)
        one = probabilities(counts, eta)
        for changed in itertools.product((-1, 0, 1), repeat=4):
            other = probabilities(counts + np.array(changed), eta)
            costliest = max(costliest, float(np.ptp(np.log(one / other))))
            for epsilon in (0.0, eta / 2, eta, 1.9 * eta):
                assert hockey_stick(one, other, epsilon) <= gaussian_delta(epsilon, mean) + 1e-12
    assert costliest == pytest.approx(2 * eta)


def joint_delta(first: np.ndarray, second: np.ndarray, mean: float, epsilon: float) -> float:
    """Return δ(ε) of a choice together with a Gaussian release, whose means are `mean` apart."""
    rest = epsilon - np.log(first / second)  # what is left of ε after each choice
    above = first * norm.cdf(mean / 2 - rest / mean)
    below = second * norm.cdf(-mean / 2 - rest / mean)
    return float((above - math.exp(epsilon) * below).sum())


@pytest.mark.parametrize("choices", [2, 3, 5])
@pytest.mark.parametrize("eta", [0.2, 1.0, 3.0])
def test_choices_and_a_gaussian_release_cost_no_more_than_gaussians(
    eta: float, choices: int
) -> None:
    # three choices, of which later ones depend on earlier ones, and one release with noise z = 2
    mean = 0.5
    priced = math.sqrt(3 / noise_multiplier(eta) ** 2 + mean**2)
    draw = np.random.default_rng(choices)
    for _ in range(8):
        one, other = np.ones(1), np.ones(1)
        for step in range(3):
            # counts of each branch, and one sample more: by a whole one or, of a client, by shares
            counts = draw.integers(0, 4, (choices**step, choices)).astype(float)
            more = draw.integers(0, 2, counts.shape) if step else draw.random(counts.shape)
            smaller = np.stack([probabilities(row, eta) for row in counts])
            larger = np.stack([probabilities(row, eta) for row in counts + more])
            one = (one[:, None] * smaller).ravel()
            other = (other[:, None] * larger).ravel()
        for epsilon in (0.0, 0.5, 1.0, 2.0, 4.0):
            bound = gaussian_delta(epsilon, priced) + 1e-12
            assert joint_delta(one, other, mean, epsilon) <= bound
            assert joint_delta(other, one, mean, epsilon) <= bound


@pytest.mark.parametrize("eta", [0.01, 0.3, 1.0, 4.0])
def test_two_equally_likely_answers_need_the_whole_price(eta: float) -> None:
    # randomized response with ratios ±η/2: its vertex lies on the Gaussian's curve
    right = 1 / (1 + math.exp(-eta / 2))
    assert 1 / noise_multiplier(eta) == pytest.approx(2 * norm.ppf(right), rel=1e-5)


def test_small_ranges_cost_about_a_quarter_of_root_two_pi() -> None:
    assert 1 / noise_multiplier(1e-4) == pytest.approx(1e-4 * math.sqrt(2 * math.pi) / 4, rel=1e-3)


@pytest.mark.parametrize("multiplier", [0.3, 1.0, 10.0, 500.0])
def test_the_range_of_a_multiplier_is_the_inverse(multiplier: float) -> None:
    assert noise_multiplier(bounded_range(multiplier)) == pytest.approx(multiplier, rel=1e-6)
    # rounded towards more privacy
    assert noise_multiplier(bounded_range(multiplier)) >= multiplier * (1 - 1e-9)


@pytest.mark.parametrize("multiplier", [1e8, 1e10, 1e13])
def test_a_range_is_never_dearer_than_its_multiplier(multiplier: float) -> None:
    # 2Φ⁻¹(1/(1 + e^(−η/2))) is concave in η, so it lies below its tangent at 0
    tangent = math.sqrt(2 * math.pi) / 4
    assert bounded_range(multiplier) * tangent <= 1 / multiplier


def test_choices_follow_the_probabilities_and_repeat_themselves() -> None:
    counts = np.array([10.0, 12.0, 11.0])
    eta = 0.7
    weights = np.exp(eta * counts - eta * 12)
    expected = weights / weights.sum()
    np.testing.assert_allclose(probabilities(counts, eta), expected, rtol=1e-12)
    draws = 4000
    chosen = [choice(counts, eta, DRAWS, 1, "choose", step) for step in range(draws)]
    shares = np.bincount(chosen, minlength=3) / draws
    # five standard deviations
    np.testing.assert_allclose(shares, expected, atol=5 * 0.5 / math.sqrt(draws))
    assert [choice(counts, eta, DRAWS, 1, "choose", step) for step in range(20)] == chosen[:20]
    others = [choice(counts, eta, DRAWS, 2, "choose", step) for step in range(200)]
    assert others != chosen[:200]


def test_a_draw_of_128_bits_falls_on_choices_far_rarer_than_a_float_can_draw() -> None:
    # e^-40 has four times a 60th bit
    shares = probabilities(np.array([0.0, 1.0]), 40.0)
    rare = math.floor(shares[0] / shares.sum() * 2.0**128)
    assert drawn(shares, rare - 2**80) == 0
    assert drawn(shares, rare + 2**80) == 1
    assert (drawn(shares, 0), drawn(shares, 2**128 - 1)) == (0, 1)


@pytest.mark.parametrize("counts", [[3.0, 5.0, 4.0], [0.0, 0.0, 0.0, 0.0], [9.0, 1.0]])
def test_frequencies_agree_with_the_probabilities(counts: list[float]) -> None:
    shares = np.exp(0.7 * np.array(counts))
    expected = 6000 * shares / shares.sum()
    chosen = [choice(np.array(counts), 0.7, DRAWS, k % 9, "choose", k) for k in range(6000)]
    found = np.bincount(chosen, minlength=len(counts))
    keep = expected > 5
    assert len(found) == len(counts)
    rest = [expected[~keep].sum()] if not keep.all() else []
    others = [found[~keep].sum()] if not keep.all() else []
    statistic = chisquare([*found[keep], *others], [*expected[keep], *rest])
    assert statistic.pvalue > 1e-4


def test_choices_are_drawn_from_the_clients_chacha20_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lengths = []

    def zeros(self: NoiseStreams, *rest: object) -> bytes:
        lengths.append(rest[-1])
        return bytes(16)

    monkeypatch.setattr(NoiseStreams, "stream", zeros)
    monkeypatch.setattr(np.random, "Philox", None)
    assert choice(np.array([1.0, 2.0]), 1.0, DRAWS, 1, "choose", 1) == 0
    assert lengths == [16]


@pytest.mark.parametrize("counts", [[math.nan, 1.0], [1.0, math.inf], [-math.inf, 0.0], []])
def test_counts_without_probabilities_are_refused(counts: list[float]) -> None:
    with pytest.raises(UsageError, match="give one or more finite counts"):
        choice(np.array(counts), 1.0, DRAWS, 1, "choose", 1)
    for eta in (math.nan, math.inf, -1.0):
        with pytest.raises(UsageError, match="a finite range from 0"):
            choice(np.array([1.0, 2.0]), eta, DRAWS, 1, "choose", 1)
