"""ε against 50-digit arithmetic, closed forms, dp-accounting's answers and an FFT of its own."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from opacus.accountants.analysis import rdp
from scipy.special import logsumexp

from securecluster.errors import UsageError
from securecluster.privacy.dp import accounting, renyi
from securecluster.privacy.dp.accounting import (
    costliest,
    epsilon,
    find_noise,
    find_noise_for_all,
    gaussian_epsilon,
    merged,
    sampling,
)

ROOT = Path(__file__).resolve().parents[3]
DELTA = 1e-5


def gaussian_delta(eps: mpmath.mpf, mu: float) -> mpmath.mpf:
    """δ(ε) of a Gaussian release by its definition: max over sets of P[S] − e^ε Q[S] for N(μ, 1)
    and N(0, 1), a half-line.
    """
    start = eps / mu + mpmath.mpf(mu) / 2
    return upper(start - mu) - mpmath.e**eps * upper(start)


def upper(x: mpmath.mpf) -> mpmath.mpf:
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize("mu", [1e-3, 0.01, 0.25, 1, 5, 20, 300])
@pytest.mark.parametrize("delta", [1e-5, 1e-9])
def test_one_gaussian_is_priced_exactly_and_never_below(mu: float, delta: float) -> None:
    found = gaussian_epsilon(mu, delta)
    with mpmath.workdps(60):
        assert gaussian_delta(mpmath.mpf(found), mu) <= delta
        assert (
            found == 0 or gaussian_delta(mpmath.mpf(found) * (1 - mpmath.mpf("3e-9")), mu) > delta
        )


def test_known_answers() -> None:
    one = epsilon([(4, 1, 1)], DELTA)
    assert (one.accountant, round(one.epsilon, 4)) == ("exact Gaussian", 0.9263)
    union = epsilon([(4, 1, 1), (1.1, 0.05, 200)], DELTA)
    assert (union.accountant, round(union.epsilon, 4), round(union.rdp, 3)) == (
        "PRV",
        4.1060,
        4.590,
    )
    # dp-accounting 0.6 gives the same


@pytest.mark.always
@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("history", "theirs"),
    [
        ([(4, 1, 40)], 7.51128),
        ([(0.3, 1, 3)], 40.54338),
        ([(0.6, 0.05, 400)], 21.64413),
        ([(2, 0.5, 20)], 5.68946),
        ([(5, 1, 3), (8, 1, 20), (1.5, 0.2, 60), (1.5, 1, 2)], 8.08737),
        ([(3, 0.001, 10)], 0.00244),  # on a grid of 1e-5
    ],
)
def test_dp_accounting_says_the_same(history: list[accounting.Step], theirs: float) -> None:
    """Its 0.6's privacy loss distributions, on a grid of 1e-3 (pessimistic by less than 1e-4), at δ
    = 1e-5.
    """
    found = epsilon(history, DELTA)
    if found.accountant == "exact Gaussian":
        assert found.epsilon == pytest.approx(theirs, abs=1e-5)
    else:
        # both are rounded upwards
        assert found.epsilon == pytest.approx(theirs, rel=2e-3, abs=1e-4)


def sampled_deltas(eps: float, z: float, q: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """δ(ε) of one step that samples at rate q, removing and adding: over the half-line where the
    likelihood ratio is above e^ε.
    """
    eps_, q_, base = mpmath.mpf(eps), mpmath.mpf(q), mpmath.e ** mpmath.mpf(eps)
    start = z * z * mpmath.log((base - 1 + q_) / q_) + mpmath.mpf(1) / 2
    mixed = (1 - q_) * upper(start / z) + q_ * upper((start - 1) / z)
    removing = mixed - base * upper(start / z)
    if 1 / base <= 1 - q_:
        return removing, mpmath.mpf(0)
    end = z * z * mpmath.log((1 / base - 1 + q_) / q_) + mpmath.mpf(1) / 2
    below = (1 - q_) * (1 - upper(end / z)) + q_ * (1 - upper((end - 1) / z))
    return removing, (1 - upper(end / z)) - mpmath.e**eps_ * below


@pytest.mark.parametrize(("z", "q"), [(0.7, 0.05), (1.0, 0.5), (3.0, 0.2)])
def test_one_sampled_step_is_an_upper_bound_in_both_directions(z: float, q: float) -> None:
    found = epsilon([(z, q, 1)], DELTA)
    with mpmath.workdps(40):
        assert max(sampled_deltas(found.epsilon, z, q)) <= DELTA
        assert max(sampled_deltas(found.epsilon * (1 - 1e-5), z, q)) > DELTA
    assert (found.accountant, found.rdp >= found.epsilon) == ("PRV", True)


@pytest.mark.parametrize(
    ("history", "delta", "theirs"),
    [
        ([(1.0, 0.4, 6)], 1e-5, 9.49114),
        ([(1.1, 0.05, 200)], 1e-5, 6.18348),
        ([(2, 1, 1), (1.1, 0.05, 200)], 1e-5, 6.65976),
        ([(0.6, 1 / 3, 3)], 1e-5, 11.68887),
        ([(2.0, 0.01, 1000)], 1e-6, 1.37572),
    ],
)
def test_dp_accounting_says_the_same_of_a_replaced_example(
    history: list[accounting.Step], delta: float, theirs: float
) -> None:
    """Its 0.6's privacy loss distributions, by connected dots on a grid of 1e-3, of δ(ε) in closed
    form (`replaced_delta` of `.ci/second_accountant.py`).
    """
    found = epsilon(history, delta, replaced=True)
    assert found.accountant == "PRV"
    assert found.epsilon == pytest.approx(theirs, rel=2e-3)
    # more than blanking it, and no more than where batches are known
    assert epsilon(history, delta).epsilon < found.epsilon <= found.rdp
    known = [(z / 2 if q < 1 else z, 1.0, count) for z, q, count in history]
    assert found.epsilon < epsilon(known, delta).epsilon


def replaced_delta(eps: float, z: float, q: float) -> mpmath.mpf:
    """δ(ε) of one step at rate q, rows 1 and −1: over the half-line where the ratio is above e^ε,
    whose end is found by bisection.
    """
    q_, base = mpmath.mpf(q), mpmath.e ** mpmath.mpf(eps)

    def excess(x: mpmath.mpf) -> mpmath.mpf:
        one = 1 - q_ + q_ * mpmath.e ** ((2 * x - 1) / (2 * z * z))
        other = 1 - q_ + q_ * mpmath.e ** ((-2 * x - 1) / (2 * z * z))
        return one - base * other

    low, high = mpmath.mpf(-50), mpmath.mpf(50)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    start = high
    above = (1 - q_) * upper(start / z)
    one = above + q_ * upper((start - 1) / z)
    other = above + q_ * upper((start + 1) / z)
    return one - base * other


@pytest.mark.parametrize(("z", "q"), [(0.7, 0.05), (1.0, 0.5), (3.0, 0.2)])
def test_one_sampled_step_with_a_replaced_example_is_an_upper_bound(z: float, q: float) -> None:
    found = epsilon([(z, q, 1)], DELTA, replaced=True)
    with mpmath.workdps(40):
        assert replaced_delta(found.epsilon, z, q) <= DELTA
        assert replaced_delta(found.epsilon * (1 - 1e-5), z, q) > DELTA


@pytest.mark.parametrize(("z", "q", "order"), [(1.1, 0.05, 4.0), (0.5, 0.3, 2.5), (4.0, 0.5, 64.0)])
def test_divergences_of_a_replaced_example_are_integrals(z: float, q: float, order: float) -> None:
    def integrand(x: mpmath.mpf) -> mpmath.mpf:
        normal = [mpmath.npdf(x, c, z) for c in (0, 1, -1)]
        one = (1 - q) * normal[0] + q * normal[1]
        other = (1 - q) * normal[0] + q * normal[2]
        return one**order * other ** (1 - order)

    with mpmath.workdps(30):
        points = [-12 * z - 1, 0, 1, order, order + 12 * z]
        exact = mpmath.log(mpmath.quad(integrand, points)) / (order - 1)
    assert renyi.replaced_divergence(z, q, order) == pytest.approx(float(exact), rel=1e-9)


def test_opposite_rows_are_the_worst_pair_of_a_replaced_example() -> None:
    """δ(ε) of other pairs of rows of norm 1 at most, as sums over a grid of the plane."""
    z, q, step = 0.8, 0.3, 0.02
    axis = np.arange(-6, 6, step)
    x, y = np.meshgrid(axis, axis)

    def density(row: tuple[float, float]) -> np.ndarray:
        def normal(a: float, b: float) -> np.ndarray:
            squares = (x - a) ** 2 + (y - b) ** 2
            return np.asarray(np.exp(-squares / (2 * z * z)) / (2 * math.pi * z * z))

        return (1 - q) * normal(0, 0) + q * normal(*row)

    draw = np.random.default_rng(0)
    rows = draw.normal(size=(12, 2, 2))
    rows /= np.maximum(1, np.linalg.norm(rows, axis=2, keepdims=True))
    rows[:3] /= np.linalg.norm(rows[:3], axis=2, keepdims=True)
    for eps in (-1.0, -0.2, 0.0, 0.3, 1.0, 2.0):
        # of γ below 1 by the exchanged pair: δ_γ(P, Q) = 1 − γ + γ δ_{1/γ}(Q, P)
        gamma = math.exp(abs(eps))
        worst = float(replaced_delta(abs(eps), z, q))
        if eps < 0:
            worst = 1 - 1 / gamma + worst / gamma
        for one, other in rows:
            difference = density(tuple(one)) - math.exp(eps) * density(tuple(other))
            found = float(np.maximum(0, difference).sum()) * step * step
            assert found <= worst + 1e-6


def test_unsampled_releases_compose_into_one() -> None:
    assert merged(
        [(3, 1, 4), (4, 1, 1), (2, 0.1, 5), (2, 0.1, 7), (math.inf, 1, 9), (1, 0.3, 0)]
    ) == ((pytest.approx((4 / 9 + 1 / 16) ** -0.5), 1, 1), (2, 0.1, 12))
    assert epsilon([(20, 1, 25)], DELTA).epsilon == pytest.approx(
        epsilon([(4, 1, 1)], DELTA).epsilon, rel=1e-8
    )
    assert epsilon([], DELTA) == (0, 0, "nothing released")
    assert epsilon([(math.inf, 1, 3)], DELTA).epsilon == 0
    assert epsilon([(4, 1, 1), (0, 0.1, 1)], DELTA).epsilon == math.inf


@pytest.mark.parametrize("history", [[(1.0, 0.1, 10**6)], [(0.01, 0.5, 20)]])
def test_where_losses_are_not_composed_the_smallest_other_bound_is_the_price(
    history: list[accounting.Step],
) -> None:
    found = epsilon(history, DELTA)
    assert (found.accountant, found.epsilon) == ("RDP", found.rdp)
    ((z, _, count),) = history  # no sampling costs more
    assert found.epsilon <= gaussian_epsilon(math.sqrt(count) / z, DELTA)


def test_no_divergence_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    genuine = rdp.compute_rdp

    def compute(**step: Any) -> float:
        computed.append(tuple(step.values()))
        return float(genuine(**step))

    monkeypatch.setattr(renyi._of_opacus(), "compute_rdp", compute)
    renyi.divergence.cache_clear()
    accounting._epsilon.cache_clear()
    assert epsilon([(1.1, 0.2, 9)], DELTA).accountant == "PRV"
    assert epsilon([(1.1, 0.2, 10)], DELTA).accountant == "PRV"
    assert len(renyi.WHOLE) < len(computed) < len(renyi.ORDERS)
    assert len(computed) == len(set(computed))


@pytest.mark.few(2)
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize(
    "history",
    [
        [(0.4, 0.01, 1)],
        [(1.1, 0.05, 200), (4.0, 1.0, 1)],
        [(30.0, 0.2, 3)],
        [(0.7, 0.9, 2000), (2.0, 0.001, 5), (9.0, 1.0, 40)],
    ],
)
def test_orders_that_are_left_out_are_not_the_best(
    history: list[accounting.Step], delta: float
) -> None:
    divergences = np.zeros(len(renyi.ORDERS))
    for z, q, count in history:
        divergence = partial(rdp.compute_rdp, q=q, noise_multiplier=z, steps=1)
        one = [divergence(orders=float(order)) for order in renyi.ORDERS]
        divergences += count * np.array(one, dtype=float)
    best, _ = rdp.get_privacy_spent(orders=renyi.ORDERS, rdp=divergences, delta=delta)
    assert epsilon(history, delta).rdp == max(0.0, float(best))


def test_large_and_tiny_noise_are_priced_without_a_grid() -> None:
    assert epsilon([(0.01, 1, 40)], DELTA).epsilon == pytest.approx(40 / (2 * 0.01**2), rel=0.02)
    assert epsilon([(1e6, 1, 1)], DELTA).epsilon == 0  # the total variation distance is below δ
    assert epsilon([(1e6, 0.5, 1)], DELTA).epsilon == 0
    assert 0 < epsilon([(100, 0.5, 1)], DELTA).epsilon < 0.02  # exact without sampling: 0.026


def test_the_dearest_history_is_found_without_pricing_all(monkeypatch: pytest.MonkeyPatch) -> None:
    histories = [((1.0, 16 / n, 3 * math.ceil(n / 16)),) for n in range(40, 80)]
    priced: list[object] = []
    genuine = accounting._epsilon
    dear = max(genuine(history, DELTA).epsilon for history in histories[:20:3])

    def price(history: Any, *rest: Any) -> Any:
        priced.append(history)
        return genuine(history, *rest)

    monkeypatch.setattr(accounting, "_epsilon", price)
    found = costliest(histories, DELTA)
    assert found is not None
    assert found[1].epsilon >= dear
    assert len(priced) <= 6


def test_batches_are_expected_ones() -> None:
    assert sampling(100, 30, 2) == (0.3, 8)
    assert sampling(20, 30, 2) == (1, 2)
    assert sampling(100, None, 1) == (1, 1)
    assert sampling(0, 30, 2) == (0, 0)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("target", "rate"),
    [
        *((target, 1.0) for target in (0.05, 1.0, 30.0)),
        (0.05, 0.1),
        (1.0, 0.1),
        # its least noise is so small that a price takes a second
        pytest.param(30.0, 0.1, marks=pytest.mark.exhaustive),
    ],
)
def test_the_least_noise_for_a_target(target: float, rate: float) -> None:
    steps = 40 if rate == 1 else 50

    def history(z: float) -> list[accounting.Step]:
        return [(z, rate, steps), (2 * z, 1, 1)]

    z = find_noise(history, target, DELTA)
    assert epsilon(history(z), DELTA).epsilon <= target
    assert target < epsilon(history(z / 1.002), DELTA).epsilon


@pytest.mark.exhaustive
def test_the_least_noise_for_all_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    # the dearest of them is the second: any() below need not price the last
    histories = [lambda z, n=n: [(z, *sampling(n, 20, 1)), (z, 1, 2)] for n in (41, 25, 90)]
    z = find_noise_for_all(histories, 2.0, DELTA)
    assert max(epsilon(history(z), DELTA).epsilon for history in histories) <= 2
    assert any(epsilon(history(z / 1.002), DELTA).epsilon > 2 for history in histories)
    monkeypatch.setattr(accounting, "find_noise", lambda *rest: z * 0.99)  # one that errs
    assert find_noise_for_all(histories, 2.0, DELTA) == pytest.approx(z, rel=2e-3)
    assert find_noise_for_all([], 2.0, DELTA) == find_noise_for_all([lambda z: []], 2.0, DELTA) == 0


@pytest.mark.parametrize("z", [1e-9, 1e-8])
def test_hardly_any_noise_has_a_price_all_the_same(z: float) -> None:
    assert 0.5 < epsilon([(z, 1, 1)], DELTA).epsilon * z**2 < 0.5 + 10 * z, "μ²/2 and little more"


def test_targets_that_cannot_be_met_say_so() -> None:
    with pytest.raises(UsageError, match="cannot be met by noise up to"):
        find_noise(lambda z: [(z, 1, 1), (5, 1, 1)], 0.5, DELTA)
    with pytest.raises(UsageError, match="cannot be met"):
        find_noise(lambda z: [(0, 1, 1)], 10, DELTA)
    for target in (0, -1, math.inf, math.nan):
        with pytest.raises(UsageError, match="choose a number above 0"):
            find_noise(lambda z: [(z, 1, 1)], target, DELTA)
    for delta in (0, 1, -0.1, math.nan):
        with pytest.raises(UsageError, match="delta is a probability"):
            epsilon([(1, 1, 1)], delta)


def test_opacus_top_level_packages_never_stand_in_for_ours(tmp_path: Path) -> None:
    code = (
        "import importlib.util as u\n"
        "assert u.find_spec('opacus')\n"
        "specs = [u.find_spec(name) for name in ('benchmarks', 'examples')]\n"
        "print(*[path for spec in specs if spec for path in spec.submodule_search_locations])"
    )
    command = [sys.executable, "-E", "-W", "ignore", "-c", code]
    here, elsewhere = (
        [Path(path) for path in subprocess.check_output(command, cwd=cwd, text=True).split()]
        for cwd in (ROOT, tmp_path)
    )
    assert here[0] == ROOT / "benchmarks"
    # the installed package has no benchmarks and no examples
    assert not {ROOT / "benchmarks", ROOT / "examples"} & set(elsewhere)


def test_a_history_of_more_steps_at_a_lower_rate_is_not_left_out() -> None:
    few, many, less = ((1.0, 0.2, 1),), ((1.0, 0.1, 50),), ((1.0, 0.1, 1),)
    assert set(accounting._undominated([few, many, less])) == {few, many}


def test_noise_is_enough_for_a_history_that_costs_more_than_it_seems_to() -> None:
    """Of Σ count·(q/z)² the first has more, and of ε the second."""
    seeming, sampled = (lambda z: [(z, 1.0, 1)]), (lambda z: [(z, 0.2, 24)])
    assert 24 * 0.2**2 < 1
    z = find_noise_for_all([seeming, sampled], 1.0, DELTA)
    assert find_noise(seeming, 1.0, DELTA) < 0.95 * z
    assert epsilon(sampled(z), DELTA).epsilon <= 1.0 < epsilon(sampled(0.99 * z), DELTA).epsilon
    assert epsilon(seeming(z), DELTA).epsilon <= 1.0


def test_an_exact_release_beside_sampled_ones_costs_most() -> None:
    exact = ((0.0, 1.0, 1), (1.0, 0.1, 5))
    found = costliest([((0.5, 0.1, 500),), exact], DELTA)
    assert found is not None and found[0] == exact
    assert math.isinf(found[1].epsilon)


@pytest.mark.parametrize("target", [0.5, 2.0, 8.0, 32.0])
@pytest.mark.parametrize("step", [(1.0, 1.0, 40), (1.0, 0.4, 100), (1.0, 0.05, 2000)])
def test_an_estimate_is_close_to_the_noise_that_a_search_finds(
    step: tuple[float, float, int], target: float
) -> None:
    z, q, count = step

    def history(scale: float) -> list[tuple[float, float, int]]:
        return [(scale * z, q, count), (scale / 4, 1.0, 1)]

    found = find_noise(history, target, DELTA)
    assert accounting.estimated_noise([history], target, DELTA) == pytest.approx(found, rel=0.06)


def test_an_estimate_is_of_the_dearest_history_and_of_nothing_zero() -> None:
    one, two = [partial(lambda count, z: [(z, 1.0, count)], count) for count in (3, 12)]
    both = accounting.estimated_noise([one, two], 2.0, DELTA)
    assert both == accounting.estimated_noise([two], 2.0, DELTA)
    assert both == pytest.approx(2 * accounting.estimated_noise([one], 2.0, DELTA), rel=5e-3)
    assert accounting.estimated_noise([lambda z: []], 2.0, DELTA) == 0


def tilted_epsilon(z: float, q: float, count: int, delta: float, kind: str) -> float:
    """ε by an FFT of losses that are tilted and rounded to the nearest of 2^18 points: an oracle
    that shares no formula with the package, right to about 1e-5.
    """
    x = np.linspace(-1 - 16 * z, 2 + 16 * z, 200_001)
    normal = {c: -((x - c) ** 2) / (2 * z * z) for c in (-1, 0, 1)}
    mixed = {c: np.logaddexp(math.log1p(-q) + normal[0], math.log(q) + normal[c]) for c in (-1, 1)}
    one, other = {
        "removed": (mixed[1], normal[0]),
        "added": (normal[0], mixed[1]),
        "replaced": (mixed[1], mixed[-1]),
    }[kind]
    loss, mass = one - other, one - logsumexp(one)

    def moment(tilt: float) -> float:
        return count * float(logsumexp(mass + tilt * loss))

    tilts = np.geomspace(0.01, 1e5, 300)
    tilt = min(tilts, key=lambda t: (moment(t) - math.log(delta)) / t)
    weights = np.exp(mass + tilt * loss - moment(tilt) / count)
    mean = float(weights @ loss)
    far = max(
        30 * math.sqrt(count * float(weights @ (loss - mean) ** 2)), np.ptp(loss[weights > 0])
    )
    size = 1 << 18
    spacing = far / size
    place = np.round((loss - mean) / spacing).astype(int) % size
    # the mean of rounded losses is off by this
    drift = float(weights @ ((loss - mean) - spacing * np.round((loss - mean) / spacing)))
    sums = np.fft.irfft(np.fft.rfft(np.bincount(place, weights, size)) ** count, size)
    index = np.fft.fftfreq(size, 1 / size)
    total = count * (mean + drift) + spacing * index
    log_mass = np.log(np.maximum(sums, 1e-300)) - tilt * total + moment(tilt)
    low, high = 0.0, float((moment(tilt) - math.log(delta)) / tilt)
    for _ in range(60):
        middle = (low + high) / 2
        above = (total > middle) & (sums > 1e-14)
        terms = log_mass[above] + np.log(-np.expm1(middle - total[above]))
        low, high = (middle, high) if logsumexp(terms) > math.log(delta) else (low, middle)
    return high


@pytest.mark.few(4)
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9, 1e-11, 1e-12, 1e-13, 1e-14])
@pytest.mark.parametrize(
    ("z", "q", "count"), [(0.6, 0.01, 1000), (1.0, 0.01, 10_000), (2.0, 0.3, 40)]
)
def test_figures_agree_with_a_tilted_transform_at_every_delta(
    z: float, q: float, count: int, delta: float
) -> None:
    blank = max(tilted_epsilon(z, q, count, delta, kind) for kind in ("removed", "added"))
    replaced = tilted_epsilon(z, q, count, delta, "replaced")
    for relation, expected in ((False, blank), (True, replaced)):
        found = epsilon([(z, q, count)], delta, relation).epsilon
        assert expected * (1 - 1e-4) <= found <= expected * (1 + 1e-3)


@pytest.mark.parametrize(
    ("history", "delta", "least"),
    [([(0.6, 0.01, 1000)], 1e-13, 16.9364), ([(0.3, 1e-6, 10_000)], 1e-12, 12.376)],
)
def test_figures_at_small_delta_that_were_too_small(
    history: list[accounting.Step], delta: float, least: float
) -> None:
    """The second by quadrature of one large step, all others at their smallest loss."""
    found = epsilon(history, delta)
    assert least <= found.epsilon <= 1.002 * least
    assert found.accountant == "PRV"


@pytest.mark.few(3)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("delta", [1e-3, 1e-12, 1e-30, 1e-300])
def test_one_sampled_step_is_exact_at_every_delta(delta: float, replaced: bool) -> None:
    z, q = 0.8, 0.1
    found = epsilon([(z, q, 1)], delta, replaced).epsilon
    with mpmath.workdps(400):
        for figure, above in ((found, False), (found * (1 - 1e-4), True)):
            spent = replaced_delta(figure, z, q) if replaced else max(sampled_deltas(figure, z, q))
            assert (spent > delta) is above


# noise multipliers, sampling rates and counts: usual ones, and edges
STEPS = st.tuples(
    st.one_of(st.floats(0.05, 30), st.sampled_from([0.15, 1.0, 1e4, 1.1e4, 1e6])),
    st.one_of(st.floats(1e-7, 1), st.sampled_from([1.0, 0.99, 1e-6])),
    st.integers(1, 2000),
)
HISTORIES = st.lists(STEPS, min_size=1, max_size=3)
DELTAS = st.floats(-15, -1).map(lambda exponent: 10**exponent)


# an example takes a second, so a failing one is told as it is
@settings(max_examples=5, deadline=None, phases=[Phase.explicit, Phase.generate])
@example(
    history=[(2.28, 0.9999999999999999, 599), (14.04, 0.87, 256), (17.53, 1.0, 937)],
    more=(1e6, 1e-7, 67),
    delta=0.01,
    share=1e-6,
    replaced=True,
)
@given(
    history=HISTORIES,
    more=STEPS,
    delta=DELTAS,
    share=st.sampled_from([1e-6, 0.01, 0.5]),
    replaced=st.booleans(),
)
def test_nothing_that_is_released_besides_lowers_epsilon(
    history: list[accounting.Step],
    more: accounting.Step,
    delta: float,
    share: float,
    replaced: bool,
) -> None:
    """Neither do a larger q, a smaller z, a smaller δ, and the relation of replacing."""
    (z, q, count), *rest = history
    least = epsilon(history, delta, replaced).epsilon
    assert epsilon([*history, more], delta, replaced).epsilon >= least
    larger = min(1.0, q * (1 + share))
    # of steps on all samples it is z that knows of a replaced unit, by half of it
    same = z / 2 if replaced and q < larger == 1 else z
    # a step on all samples has no losses to divide into cells, whose bound is a little looser
    close = 1 - 1e-4 if q < larger == 1 else 1
    assert epsilon([(same, larger, count), *rest], delta, replaced).epsilon >= close * least
    assert epsilon([(z * (1 - share), q, count), *rest], delta, replaced).epsilon >= least
    assert epsilon(history, delta * (1 - share), replaced).epsilon >= least
    sampled = [step for step in history if step[1] < 1]
    assert epsilon(sampled, delta, True).epsilon >= epsilon(sampled, delta, False).epsilon


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(("z", "q", "count"), [(0.05, 1e-6, 100), (1e-3, 1e-9, 1), (1.0, 0.01, 3)])
def test_a_unit_that_is_hardly_ever_in_a_batch_costs_nothing(
    z: float, q: float, count: int, replaced: bool
) -> None:
    chance = -math.expm1(count * math.log1p(-q))
    assert epsilon([(z, q, count)], chance, replaced).epsilon == 0
    assert epsilon([(z, q, count)], min(0.9, 2 * chance), replaced).epsilon == 0
    assert epsilon([(z, q, count)], chance / 10, replaced).epsilon > 0
    assert epsilon([(z, q, count), (4.0, 1.0, 1)], chance, replaced).epsilon > 0


def test_no_sampling_is_never_cheaper_than_sampling_and_jumps_do_not_lower() -> None:
    """The batches of nearly all cost no more than those of all, and z of 10,000 is no threshold."""
    assert epsilon([(0.3, 0.99, 100)], DELTA).epsilon < epsilon([(0.3, 1, 100)], DELTA).epsilon
    close, beyond = (epsilon([(z, 0.5, 10**8)], DELTA).epsilon for z in (9.9e3, 1.01e4))
    assert close >= beyond > 0


@pytest.mark.parametrize("z", [5e-324, 1e-310, 1e-155, 1e-120, 0.0, 1e-90, 1e120, 1e308, math.inf])
@pytest.mark.parametrize("q", [0.01, 1.0])
def test_noise_at_the_ends_of_what_floats_hold_has_a_price(z: float, q: float) -> None:
    for replaced in (False, True):
        found = epsilon([(z, q, 10)], DELTA, replaced).epsilon
        assert (found > 1e6) if z < 1 else (found < 1e-3)


@pytest.mark.parametrize(
    "step",
    [
        (math.nan, 1.0, 1), (-1.0, 0.5, 1), ("1", 1.0, 1), (None, 1.0, 1), (1.0, math.nan, 1),
        (1.0, 1.5, 1), (1.0, -0.5, 1), (1.0, 0.5, 1.5), (1.0, 0.5, -1), (1.0, 0.5, math.nan),
        (1.0, 0.5, math.inf), (1.0, 1.0, 10**400),
    ],
)  # fmt: skip
def test_a_step_that_is_none_is_refused_in_a_sentence(step: Any) -> None:
    for history in ([step], [(1.0, 1.0, 1), step], [(0.0, 1.0, 1), step]):
        with pytest.raises(UsageError) as caught:
            epsilon(history, DELTA)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "release",
    [(math.nan, 1, 1), (1, math.nan, 1), (1, 1, math.nan), (1, 1, 0), (1, 1, 5e-324), (-1, 1, 1)],
)
def test_skellam_noise_that_is_none_is_refused_in_a_sentence(release: Any) -> None:
    with pytest.raises(UsageError, match="Skellam noise of variance"):
        accounting.skellam_epsilon([], [(renyi.SkellamRelease(*release), 1)], DELTA)
    with pytest.raises(UsageError, match="cannot be made -1 times"):
        accounting.skellam_epsilon([], [(renyi.SkellamRelease(1, 1, 1), -1)], DELTA)


@pytest.mark.few(4)
@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("history", [[], [(1.0, 0.1, 100)], [(1.0, 0.999, 9)], [(4.0, 1.0, 1)]])
@pytest.mark.parametrize("delta", [1e-3, 1e-13])
def test_skellam_noise_besides_lowers_nothing(
    history: list[accounting.Step], delta: float, replaced: bool
) -> None:
    free, usual, less = (renyi.SkellamRelease(64.0, 4096.0, v) for v in (4e9, 1e4, 9e3))
    alone = epsilon(history, delta, replaced).epsilon
    found = [
        accounting.skellam_epsilon(history, releases, delta, replaced).epsilon
        for releases in ([(free, 1)], [(usual, 1)], [(less, 1)], [(less, 1), (usual, 2)])
    ]
    assert [alone, *found] == sorted([alone, *found])
    more = [*history, (1.0, 0.999, 9), (3.0, 0.2, 4)]
    assert accounting.skellam_epsilon(more, [(less, 1)], delta, replaced).epsilon >= found[2]
    known = [*history, (1.0, 1.0, 9), (3.0, 0.2, 4)]
    if not replaced:
        assert (
            accounting.skellam_epsilon(known, [(less, 1)], delta).epsilon
            >= accounting.skellam_epsilon(more, [(less, 1)], delta).epsilon
        )
