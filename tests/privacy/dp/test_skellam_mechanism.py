"""Noise in shares of secure sums: what is planned, what leaves, and what it costs."""

from __future__ import annotations

import math
from dataclasses import replace

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, UsageError
from securecluster.privacy.dp import accounting, renyi
from securecluster.privacy.dp.accounting import skellam_epsilon
from securecluster.privacy.dp.ledger import Event, Ledger
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.renyi import SKELLAM_ORDERS, SkellamRelease, skellam_divergence
from securecluster.privacy.dp.skellam_mechanism import (
    STEPS,
    SkellamMechanism,
    least_release,
    rounded,
)
from securecluster.protections.secure_sums.graph import Plan, build_graph

# of which a secure sum is unmasked, by its members
SURVIVORS = Plan(2).least_survivors

DELTA = 1e-5
STREAMS = NoiseStreams.derived(Randomness(0), "run")


def divergence(variance: float, shift: int, order: int) -> float:
    """Return the exact Rényi divergence of Skellam numbers from shifted ones."""
    width = int(20 * math.sqrt(variance)) + 4 * order * shift + 40
    with mpmath.workprec(200):
        log_p = [mpmath.log(mpmath.besseli(k, variance)) for k in range(width + shift + 1)]
        total = mpmath.mpf(0)
        for k in range(-width, width + 1):
            ratio = order * log_p[abs(k - shift)] - (order - 1) * log_p[abs(k)]
            total += mpmath.exp(ratio - variance)
        return float(mpmath.log(total) / (order - 1))


@pytest.mark.parametrize("variance", [0.1, 1, 40])
@pytest.mark.parametrize("shift", [1, 3])
@pytest.mark.parametrize("order", [2, 7])
def test_the_bound_is_above_the_exact_divergence(variance: float, shift: int, order: int) -> None:
    exact = divergence(variance, shift, order)
    release = SkellamRelease(shift, shift, variance)
    bound = skellam_divergence(release, order)
    assert exact <= bound
    assert order * shift**2 / (2 * variance) <= bound
    if variance == 40 and order * shift < 10:
        assert bound < 1.06 * exact


@pytest.mark.parametrize(("variance", "shift"), [(40, 4), (100, 10), (900, 10)])
def test_epsilon_is_above_that_of_the_exact_privacy_loss(variance: int, shift: int) -> None:
    values = np.arange(-2000, 2001)
    law = stats.skellam(variance / 2, variance / 2)
    without = law.logpmf(values)
    shifted = law.logpmf(values - shift)
    kept = np.isfinite(without) & np.isfinite(shifted)
    release = SkellamRelease(shift, shift, variance)
    claimed = skellam_epsilon([], [(release, 1)], DELTA).epsilon
    exact = np.maximum(np.exp(shifted[kept]) - np.exp(claimed + without[kept]), 0).sum()
    assert exact < DELTA
    less = 0.85 * claimed
    assert np.maximum(np.exp(shifted[kept]) - np.exp(less + without[kept]), 0).sum() > DELTA


@pytest.mark.parametrize("times", [1, 10])
def test_large_sums_cost_what_gaussians_of_their_variance_do(times: int) -> None:
    plan = SkellamMechanism(1.0, 1.0, SURVIVORS).plan(10**6, 100)
    release = plan.release(plan.shares)
    z = math.sqrt(release.variance) / release.norm
    found = skellam_epsilon([], [(release, times)], DELTA)
    gaussian = renyi.bound(((z, 1.0, times),), DELTA)
    assert found.accountant == "RDP"
    assert gaussian * 0.999 < found.epsilon < 1.05 * gaussian
    assert found.epsilon > accounting.epsilon([(z, 1.0, times)], DELTA).epsilon


def test_other_releases_are_composed_at_the_same_orders() -> None:
    release = SkellamRelease(10.0, 50.0, 400.0)
    found = skellam_epsilon([(2.0, 1.0, 3), (1.5, 0.1, 4)], [(release, 2)], DELTA)
    alone = skellam_epsilon([], [(release, 2)], DELTA)
    assert found.epsilon > alone.epsilon
    # Gaussians alone: their divergence is αq²/(2z²), of which conversion gives the same bound
    gaussian = SkellamRelease(1e6, 1e6, 4e12)
    pair = skellam_epsilon([], [(gaussian, 3), (release, 2)], DELTA)
    both = skellam_epsilon([(2.0, 1.0, 3)], [(release, 2)], DELTA)
    assert pair.epsilon == pytest.approx(both.epsilon, rel=1e-6)
    assert skellam_epsilon([(0.0, 1.0, 1)], [(release, 2)], DELTA).epsilon == math.inf
    assert skellam_epsilon([(2.0, 1.0, 1)], [], DELTA).accountant == "exact Gaussian"


@pytest.mark.parametrize("d", [1, 10, 2410, 10**6])
@pytest.mark.parametrize("members", [2, 12, 100, 500])
@pytest.mark.parametrize("z", [0.3, 1.0, 3.0])
def test_plans_have_the_noise_that_was_asked_for(d: int, members: int, z: float) -> None:
    norm = 0.37
    plan = SkellamMechanism(norm, z, SURVIVORS).plan(d, members)
    step = math.ldexp(1.0, -plan.exponent)
    assert STEPS * math.sqrt(d) <= norm / step < 2 * STEPS * math.sqrt(d)
    sensitivity = math.sqrt(plan.squared_norm) * step
    assert norm + step * math.sqrt(d) / 2 <= sensitivity < 1.01 * norm
    release = plan.release(plan.shares)
    deviation = math.sqrt(release.variance) * step
    assert z * sensitivity * (1 - 1e-12) <= deviation
    if z**2 * STEPS**2 * d > 100 * members:
        assert deviation < 1.02 * z * norm
    assert release.variance >= (z * release.norm) ** 2 * (1 - 1e-12)
    costliest = least_release(z)
    for order in SKELLAM_ORDERS:
        assert skellam_divergence(release, order) <= skellam_divergence(costliest, order)


def test_survivors_below_the_planned_shares_cost_more_and_above_the_same() -> None:
    mechanism = SkellamMechanism(1.0, 2.0, SURVIVORS)
    plan = mechanism.plan(1000, 12)
    assert plan.shares == 8
    usual = plan.release(8)
    assert plan.release(12) == usual
    fewer = plan.release(5)
    assert fewer.variance == usual.variance * 5 / 8
    # 3 of 8 shares lost: the deviation is 1.57 norms in place of 2
    ratio = math.sqrt(fewer.variance) / fewer.norm
    assert ratio == pytest.approx(2 * math.sqrt(5 / 8), rel=1e-3)
    priced = []
    for release in (usual, fewer):
        ledger = Ledger([event(release)])
        priced.append(ledger.price(DELTA).epsilon)
    assert priced[1] > 1.2 * priced[0]


def event(release: SkellamRelease, **changes: object) -> Event:
    usual = Event("contribute", "sum", ("delta",), 1, (0, 1), "skellam", 1.0)
    sizes = (release.norm, release.magnitudes)
    return replace(usual, sensitivities=sizes, variance=release.variance, **changes)  # type: ignore[arg-type]


def test_the_ledger_prices_sums_with_everything_else() -> None:
    release = SkellamRelease(100.0, 1000.0, 1e4)
    sums = [event(release), event(release, round=2, ids=(0,))]
    gaussian = Event("train", "gather", ("loss",), 1, (0,), "gaussian", 3.0)
    price = Ledger([*sums, gaussian]).price(DELTA)
    expected = skellam_epsilon([(3.0, 1.0, 1)], [(release, 2)], DELTA).epsilon
    assert (price.epsilon, price.client, price.accountant) == (expected, 0, "RDP")
    # a client with Gaussians alone may cost more
    strong = Event("train", "gather", ("loss",), 1, (5,), "gaussian", 0.1)
    price = Ledger([*sums, strong]).price(DELTA)
    assert (price.client, price.accountant) == (5, "exact Gaussian")
    doubled = skellam_epsilon([], [(release.scaled(2.0), 2)], DELTA).epsilon
    assert Ledger(sums).price(DELTA, "replace").epsilon == doubled
    assert Ledger([*sums, Event("a", "gather", ("x",), 1, (0,))]).price(DELTA).epsilon == math.inf


def test_shares_are_the_fewest_survivors_that_guards_allow() -> None:
    for members in (2, 3, 6, 12, 57, 200, 400):
        graph = build_graph(range(members), bytes(32), Plan(2))
        least = Plan(2).least_survivors(members)
        assert 2 * least > members
        if graph.degree == members - 1:
            assert least == max(graph.threshold, members // 2 + 1)
        assert SkellamMechanism(1.0, 1.0, SURVIVORS).shares(members) == least


def test_a_row_leaves_on_the_grid_with_its_noise() -> None:
    mechanism = SkellamMechanism(1.0, 1.0, SURVIVORS, STREAMS)
    plan = mechanism.plan(4000, 4)
    row = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    row /= row.norm()
    steps = rounded(row, plan)
    assert np.abs(steps * math.ldexp(1, -plan.exponent) - row.double().numpy()).max() <= (
        math.ldexp(1, -plan.exponent - 1)
    )
    released = mechanism.encode(row, plan, 0, "delta", 1)
    assert released.dtype == torch.int32
    noise = released.numpy() - steps
    assert noise.var() == pytest.approx(plan.share_variance, rel=0.12)
    assert abs(np.corrcoef(noise, steps)[0, 1]) < 0.08
    assert torch.equal(released, mechanism.encode(row, plan, 0, "delta", 1))
    assert not torch.equal(released, mechanism.encode(row, plan, 1, "delta", 1))
    total = released + mechanism.encode(-row, plan, 1, "delta", 1)
    decoded = mechanism.decode(total, plan, torch.float64)
    assert decoded.std() == pytest.approx(math.sqrt(2 / plan.shares) * 1.01, rel=0.06)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e30, 1.2])
def test_rows_beyond_the_norm_count_as_zeros(bad: float) -> None:
    mechanism = SkellamMechanism(1.0, 1.0, SURVIVORS, STREAMS)
    plan = mechanism.plan(8, 4)
    row = torch.zeros(8)
    row[3] = 1.0
    assert rounded(row, plan).any()
    row[3] = bad
    assert not rounded(row, plan).any()
    zeros = mechanism.encode(torch.zeros(8), plan, 0, "delta", 1)
    assert torch.equal(mechanism.encode(row, plan, 0, "delta", 1), zeros)


def test_rounding_cannot_exceed_the_planned_norm() -> None:
    """The worst row is moved by half a step in every coordinate."""
    for d in (1, 7, 1000, 12345):
        plan = SkellamMechanism(1.0, 1.0, SURVIVORS).plan(d, 4)
        level = math.ldexp(1.0, plan.exponent) / math.sqrt(d)
        worst = (math.floor(level) + 0.5000001) * math.ldexp(1.0, -plan.exponent)
        row = torch.full((d,), worst, dtype=torch.float64)
        row *= min(1.0, 1.0 / float(row.norm()))
        assert rounded(row, plan).any()


def test_sums_that_no_clients_can_have_are_refused() -> None:
    mechanism = SkellamMechanism(1.0, 1.0, SURVIVORS)
    plan = mechanism.plan(8, 4)
    total = torch.zeros(8, dtype=torch.int32)
    total[0] = plan.limit
    mechanism.decode(total, plan)
    total[0] += 1
    with pytest.raises(FrameError, match="forged"):
        mechanism.decode(total, plan)
    with pytest.raises(FrameError, match="forged"):
        mechanism.decode(total.long(), plan)


def test_what_does_not_fit_the_ring_is_refused() -> None:
    with pytest.raises(UsageError, match="does not fit 32 bits"):
        SkellamMechanism(1.0, 1.0, SURVIVORS).plan(10**11, 200)
    with pytest.raises(UsageError, match="does not fit 32 bits"):
        SkellamMechanism(1.0, 1e5, SURVIVORS).plan(10**6, 100)
    with pytest.raises(UsageError, match="streams"):
        mechanism = SkellamMechanism(1.0, 1.0, SURVIVORS)
        mechanism.encode(torch.zeros(8), mechanism.plan(8, 4), 0, "delta", 1)


def test_a_target_is_met_and_hardly_undercut() -> None:
    for target in (0.5, 8.0, 60.0):

        def cost(z: float) -> float:
            return skellam_epsilon([(z, 1.0, 2)], [(least_release(z), 5)], DELTA).epsilon

        z = accounting.find_skellam_noise(cost, target, DELTA)
        assert cost(z) <= target < cost(z * 0.99)
    with pytest.raises(UsageError, match="cannot be met"):
        accounting.find_skellam_noise(cost, -1.0, DELTA)
