"""The exponential mechanism against its own distributions, enumerated, and closed forms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from securecluster.privacy.dp.exponential_mechanism import (
    bounded_range,
    choice,
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


def test_more_noise_than_any_range_needs_makes_all_choices_equally_likely() -> None:
    # The Gaussian of z = 1e12 tells data sets apart by 1e-12 at most, and η does by about η/2.5.
    assert bounded_range(1e12) < 1e-11


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
