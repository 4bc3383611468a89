"""Means and deviations that clients share: exact sums, bounded contributions, and their price."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pandas
import pytest
from scipy import stats

from securecluster import Federation
from securecluster.errors import UsageError
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Settings
from securecluster.reports import loading
from securecluster.runs.replay import replay
from securecluster.training.shared_scale import WaitingSamples, scale_of

BOUNDS = {0: (0, 120), 1: (-400, 400), 2: (0, 5)}
LOW, HIGH = np.array(list(BOUNDS.values()), float).T
DELTA = 1e-5


def federation(gaps: float = 0.1, **changes: Any) -> Federation:
    """Return four sites of one table, with gaps and with values beyond the bounds."""
    draws = np.random.default_rng(5)
    sites = {}
    for site, size in enumerate((30, 50, 90, 40)):
        x = draws.normal(size=(size, 3)) * [12, 250, 0.1] + [50 + 5 * site, 0, 2]
        y = (x[:, 0] + 3 * draws.normal(size=size) > 57).astype(int)
        x[draws.random(x.shape) < gaps] = np.nan
        sites[f"site {site}"] = (x, y)
    options = {"classes": 2, "scaling": ("shared", BOUNDS), "prepare": {}, "seed": 0, **changes}
    return Federation.from_arrays(sites, **options)


def found(run: Any) -> np.ndarray:
    """Return the means and deviations that a run found, (2, 3)."""
    return np.array(run.kept_.learned.network.scale)


def quick(**options: Any) -> FedAvg:
    """Return FedAvg of few rounds."""
    return FedAvg(**{"model": "linear", "rounds": 3, **options})


@pytest.mark.parametrize("options", [{}, {"aggregation": "secagg"}], ids=["plain", "secagg"])
def test_without_noise_the_numbers_are_those_of_all_rows(options: dict[str, Any]) -> None:
    of_all = federation()
    rows = np.concatenate([shard.samples for shard in of_all.shards])  # −1 … 1, NaN for gaps
    run = quick(**options).fit(of_all)
    expected = [np.nanmean(rows, 0), np.nanstd(rows, 0)]
    assert found(run) == pytest.approx(np.stack(expected), abs=1e-5)
    assert math.isinf(run.ledger_.price(DELTA).epsilon)


@pytest.mark.filterwarnings("ignore:values in")  # of 7.3, which all rows have
def test_what_is_constant_everywhere_counts_for_nothing_and_at_one_client_for_the_others() -> None:
    sites = {}
    for site in range(3):
        x = np.full((20, 2), 7.3)
        x[:, 1] = 1.0 if site == 0 else np.linspace(0, 5, 20)
        sites[str(site)] = (x, np.arange(20) % 2)
    of_all = Federation.from_arrays(sites, scaling=("shared", (0, 9)), classes=2, seed=0)
    run = quick().fit(of_all)
    assert found(run)[1, 0] == 0
    assert found(run)[1, 1] > 0
    rows = np.array([[7.3, 2.0], [3.0, 2.0]])
    outputs = run.predict_proba("0", rows)
    assert (outputs[0] == outputs[1]).all()


@pytest.mark.parametrize("means", [True, False], ids=["clients", "examples"])
def test_blanking_one_moves_the_sums_by_the_norm_at_most(means: bool) -> None:
    draws = np.random.default_rng(0)
    for trial in range(40):
        # extreme values and gaps, one of them at the bounds throughout
        x = draws.choice([-1.0, 1.0, np.nan, 0.3, 7.0, -1e30], (6, 4))
        if trial == 0:
            x[:] = 1.0
        blanked = x.copy()
        blanked[slice(None) if means else 2] = np.nan
        moved = []
        for rows in (x, blanked):
            waiting = WaitingSamples(range(4), [[(rows, np.zeros(6))]] * 3)
            moved.append(waiting.sums([0], means, 1.0)[0])
        distance = np.linalg.norm(moved[0] - moved[1])
        assert distance <= 1 + 1e-12
        assert trial or distance == pytest.approx(1.0)


def gaussian_epsilon(mu: float) -> float:
    """Return ε of a Gaussian mechanism with sensitivity over deviation μ (Balle and Wang 2018)."""
    grid = np.linspace(0, 200, 400_001)
    first = stats.norm.cdf(mu / 2 - grid / mu)
    with np.errstate(over="ignore", invalid="ignore"):
        log_second = grid + stats.norm.logcdf(-mu / 2 - grid / mu)
    return float(grid[np.argmax(first - np.exp(log_second) <= DELTA)])


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_the_sum_is_priced_as_one_gaussian_release_beside_training(ratio: float) -> None:
    noise = {"clip": 1.0, "noise": 2.0, "placement": "local"}
    run = quick(**noise, scale_noise=ratio).fit(federation())
    mu = math.sqrt(3 / 2.0**2 + 1 / (2.0 * ratio) ** 2)
    assert run.ledger_.price(DELTA).epsilon == pytest.approx(gaussian_epsilon(mu), rel=2e-3)
    (event,) = (event for event in run.ledger_.events if event.method == "sum_columns")
    assert (event.mechanism, event.noise_multiplier) == ("gaussian", 2.0 * ratio)


TARGETS: dict[str, dict[str, Any]] = {
    "client": {"dp_unit": "client"},  # in shares of secure sums
    "client, plain": {"dp_unit": "client", "aggregation": "plain", "placement": "local"},
    "client, central": {"dp_unit": "client", "aggregation": "plain", "placement": "central"},
    "example": {"dp_unit": "example"},
    "example, secagg": {"dp_unit": "example", "aggregation": "secagg"},
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_has_room_for_the_sum(case: str, tmp_path: Path) -> None:
    made = quick(target_epsilon=6.0, **TARGETS[case])
    settings = Settings(transcript="full")
    run = made.fit(federation(), settings, folder=tmp_path)
    assert 5.5 < run.ledger_.price(DELTA).epsilon <= 6.0
    config = run.kept_.learned.config
    assert config["chosen"]["scale_noise"] == config["scale_noise"]
    means, deviations = found(run)
    assert (np.abs(means) <= 1).all() and (deviations > 0).all() and (deviations <= 1).all()
    assert run.replay(run.transcript_, config) == run.server_state_
    # about a tenth of the budget, in 1/z², where training is not sampled
    if "example" not in case:
        rounds = config["chosen"].get("rounds", 3)
        assert 1 / config["scale_noise"] ** 2 / rounds == pytest.approx(1 / 9)


def test_the_more_noise_the_closer_to_what_the_bounds_say() -> None:
    sums = np.array([[200.0, 200.0], [100.0, -50.0], [60.0, 40.0]])
    exact = scale_of(sums, 0.0, 200)
    assert exact == pytest.approx(np.array([[0.5, -0.25], [0.05**0.5, 0.1375**0.5]]))
    distances = []
    for deviation in (1.0, 30.0, 1000.0, 1e9):
        means, deviations = scale_of(sums, deviation, 200)
        distances.append(np.abs(means).max() + np.abs(deviations - 3**-0.5).max())
    assert sorted(distances, reverse=True) == distances and distances[-1] < 1e-6


@pytest.mark.parametrize("value", [-1e30, 0.0, 1e30])
def test_whatever_a_sum_is_the_scale_is_within_the_bounds(value: float) -> None:
    draws = np.random.default_rng(1)
    for deviation in (0.0, 0.1, 1e6):
        sums = draws.choice([value, 1.0, -3.0], (3, 50))
        means, deviations = scale_of(sums, deviation, 10)
        assert np.isfinite([means, deviations]).all()
        assert (np.abs(means) <= 1).all() and (deviations >= 0).all() and (deviations <= 1).all()


@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(stop: int, tmp_path: Path) -> None:
    settings = Settings(keys_from_seed=True)
    noise = {"clip": 1.0, "noise": 1.0, "mask": "permutation"}
    whole = quick(**noise).fit(federation(), settings)
    with pytest.raises(KeyboardInterrupt):
        quick(**noise).fit(
            federation(), settings, folder=tmp_path, report=cases.interrupt_after(stop)
        )
    resumed = quick(**noise).fit(federation(), settings, folder=tmp_path)
    assert (found(resumed) == found(whole)).all()
    assert resumed.server_state_ == whole.server_state_
    assert resumed.accuracy_.tolist() == whole.accuracy_.tolist()
    assert resumed.ledger_.price(DELTA) == whole.ledger_.price(DELTA)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_a_longer_run_keeps_the_noise_with_which_its_scale_was_found(
    unit: str, tmp_path: Path
) -> None:
    options = {"clip": 1.0, "noise": 1.0, "dp_unit": unit}
    settings = Settings(transcript="full")
    begun = quick(**options).fit(federation(), settings, folder=tmp_path)
    longer = quick(**options, rounds=5).fit(federation(), settings, folder=tmp_path)
    assert (found(longer) == found(begun)).all()
    ratio = begun.kept_.learned.config["scale_noise"]
    in_one = quick(**options, rounds=5, scale_noise=ratio).fit(federation())
    assert longer.ledger_.price(DELTA).epsilon == pytest.approx(
        in_one.ledger_.price(DELTA).epsilon, rel=1e-9
    )
    replay(*loading.plan_of(tmp_path), tmp_path)


def test_bounds_of_targets_are_no_features() -> None:
    draws = np.random.default_rng(2)
    table = pandas.DataFrame({"age": draws.uniform(20, 80, 40), "site": ["a", "b"] * 20})
    table["cost"] = 30 * table["age"]
    table["row"] = table["age"]
    bounds = {"age": (0, 120), "row": (0, 120), "cost": (1000, 2000)}
    of_all = Federation.from_frame(
        table, client="site", label="cost", task="regression", scaling=("shared", bounds), seed=0
    )
    for shard in of_all.shards:
        cost = 30 * (60 + 60 * shard.x[:, 0])
        assert shard.y[:, 0] == pytest.approx((np.clip(cost, 1000, 2000) - 1500) / 500, abs=1e-5)
    run = quick(rounds=1).fit(of_all)
    assert found(run).shape == (2, 2)


def test_nodes_of_their_own_end_as_clients_in_one_process() -> None:
    cases_of_nodes = {"cfl": CFL(rounds=3, model="linear"), "fedavg": quick(aggregation="secagg")}
    for made in cases_of_nodes.values():
        state, nodes = cases.serve_nodes(made, federation())
        together = made.fit(federation(), cases.DOUBLE).client_models_.values
        kept = [made.observer.kept_models(node.client, state).values for node in nodes]
        assert np.concatenate(kept) == pytest.approx(together.numpy(), abs=1e-9)


def test_who_was_lost_is_told_before_a_later_round() -> None:
    run = quick(rounds=8).fit(federation(), Settings(dropout=0.8))
    assert run.kept_.learned.network.scaled == [0, 1, 2, 3]
    # what nobody replied to is asked for again
    assert (found(run) != [[0.0] * 3, [1.0] * 3]).all()


REFUSED = [
    (("shared", "none"), "public bounds"),
    (("shared", {0: (0, 1)}), "bounds lack 1, 2"),
    ("shared", "or .'shared', bounds"),
]


@pytest.mark.parametrize(("scaling", "words"), REFUSED)
def test_bounds_are_needed(scaling: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        federation(scaling=scaling)


def test_images_have_no_columns() -> None:
    images = {"a": (np.zeros((4, 1, 3, 3)), [0, 1, 0, 1])}
    with pytest.raises(UsageError, match="columns of numbers of a table"):
        Federation.from_arrays(images, scaling=("shared", (0, 1)), seed=0)


METHODS = (
    *("cfl", "flhc", "srfca", "ifca", "clove", "cflgp", "rdpcfl", "flux", "local-kmeans"),
    *("random", "finetune", "mrmtl", "nsim", "oneshot noise", "pacfl noise", "signature noise"),
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_stays_within_its_target(name: str, unit: str) -> None:
    sites = federation(gaps=0.0)
    made: ClusteringProtocol = cases.variant(
        name, rounds=3, epochs=1, mask="permutation", dp_unit=unit, target_epsilon=20.0
    )
    run = made.fit(sites)
    assert 0 < run.ledger_.price(DELTA).epsilon <= 20.0
    assert any(event.method == "sum_columns" for event in run.ledger_.events)


def test_features_in_another_order_keep_their_gaps() -> None:
    rows = {name: np.array([[0.1, np.nan], [0.3, 0.4]] * 5) for name in "ab"}
    sites = {
        name: (pandas.DataFrame(x, columns=["p", "q"]), [0, 1] * 5) for name, x in rows.items()
    }
    first = Federation.from_arrays(sites, scaling=("shared", (0, 1)), prepare={}, classes=2, seed=0)
    for old, new in zip(first.shards, first.with_features(["q", "p"]).shards, strict=True):
        assert np.array_equal(old.samples[:, ::-1], new.samples, equal_nan=True)
        assert np.isnan(new.samples).any()


def test_a_table_with_text_and_gaps_is_scored_as_it_is_predicted() -> None:
    draws = np.random.default_rng(4)
    table = pandas.DataFrame({"age": draws.uniform(20, 80, 60), "sex": ["f", "m"] * 30})
    table["ill"], table["site"] = (table["age"] > 50).astype(int), ["a", "b", "c"] * 20
    table.loc[::7, "age"] = np.nan
    of_all = Federation.from_frame(
        table,
        client="site",
        label="ill",
        classes=[0, 1],
        scaling=("shared", {"age": (0, 120)}),
        prepare={"sex": ["f", "m"]},
        seed=0,
    )
    run = quick().fit(of_all)
    x, y = table[["age", "sex"]], table["ill"]
    right = run.predict_samples("a", x) == y.to_numpy()
    assert run.score("a", x, y.sample(frac=1, random_state=0)) == pytest.approx(right.mean())
