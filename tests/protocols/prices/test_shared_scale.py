"""Scales of features that clients share: exact sums, bounded contributions, and their price."""

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
from securecluster.data.scaling import FOUND, QUANTILES, SHARED
from securecluster.errors import UsageError
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Settings
from securecluster.reports import loading
from securecluster.runs.replay import replay
from securecluster.training.shared_scale import BINS, STATISTICS, WaitingSamples

BOUNDS = {0: (0, 120), 1: (-400, 400), 2: (0, 5)}
LOW, HIGH = np.array(list(BOUNDS.values()), float).T
DELTA = 1e-5
KINDS = pytest.mark.parametrize("kind", FOUND)


def federation(gaps: float = 0.1, kind: str = SHARED, **changes: Any) -> Federation:
    """Return four sites of one table, with gaps and with values beyond the bounds."""
    draws = np.random.default_rng(5)
    sites = {}
    for site, size in enumerate((30, 50, 90, 40)):
        x = draws.normal(size=(size, 3)) * [12, 250, 0.1] + [50 + 5 * site, 0, 2]
        y = (x[:, 0] + 3 * draws.normal(size=size) > 57).astype(int)
        x[draws.random(x.shape) < gaps] = np.nan
        sites[f"site {site}"] = (x, y)
    options = {"classes": 2, "scaling": (kind, BOUNDS), "prepare": {}, "seed": 0, **changes}
    return Federation.from_arrays(sites, **options)


def found(run: Any) -> np.ndarray:
    """Return the centres and widths that a run found, (2, 3)."""
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


def quartiles(rows: np.ndarray) -> np.ndarray:
    """Return the quartiles of columns (n, f) without their gaps, each that of a row, (3, f)."""
    found: np.ndarray = np.nanquantile(rows, [0.25, 0.5, 0.75], axis=0, method="inverted_cdf")
    return found


@pytest.mark.parametrize("options", [{}, {"aggregation": "secagg"}], ids=["plain", "secagg"])
def test_without_noise_quartiles_are_those_of_all_rows_within_a_bin(
    options: dict[str, Any],
) -> None:
    of_all = federation(kind=QUANTILES)
    rows = np.concatenate([shard.samples for shard in of_all.shards])
    medians, widths = found(quick(**options).fit(of_all))
    first, expected, third = quartiles(rows)
    assert np.abs(medians - expected).max() <= 2 / BINS
    assert np.abs(widths - (third - first) / 1.349).max() <= 2 * (2 / BINS) / 1.349


def test_quantiles_of_a_skewed_feature_do_not_follow_its_tail() -> None:
    draws = np.random.default_rng(3)
    values = np.minimum(draws.lognormal(0, 1.5, (3, 300, 1)), 20)
    sites = {name: (x, np.arange(300) % 2) for name, x in zip("abc", values, strict=True)}
    scales = {}
    for kind in FOUND:
        of_all = Federation.from_arrays(sites, scaling=(kind, (0, 20)), classes=2, seed=0)
        rows = np.concatenate([shard.samples for shard in of_all.shards])
        scales[kind] = found(quick(rounds=1).fit(of_all))[:, 0]
    first, median, third = quartiles(rows)[:, 0]
    expected = [median, (third - first) / 1.349]
    assert scales[QUANTILES] == pytest.approx(expected, abs=1 / BINS)
    assert (scales[SHARED] > np.array(expected) + 4 / BINS).all()


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


@KINDS
@pytest.mark.parametrize("means", [True, False], ids=["clients", "examples"])
def test_blanking_one_moves_the_sums_by_the_norm_at_most(means: bool, kind: str) -> None:
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
            waiting = WaitingSamples(range(4), [[(rows, np.zeros(6))]] * 3, STATISTICS[kind])
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


@KINDS
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0])
def test_the_sum_is_priced_as_one_gaussian_release_beside_training(ratio: float, kind: str) -> None:
    noise = {"clip": 1.0, "noise": 2.0, "placement": "local"}
    run = quick(**noise, scale_noise=ratio).fit(federation(kind=kind))
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


@KINDS
@pytest.mark.parametrize("case", TARGETS)
def test_a_target_has_room_for_the_sum(case: str, kind: str, tmp_path: Path) -> None:
    made = quick(target_epsilon=6.0, **TARGETS[case])
    settings = Settings(transcript="full")
    run = made.fit(federation(kind=kind), settings, folder=tmp_path)
    assert 5.5 < run.ledger_.price(DELTA).epsilon <= 6.0
    config = run.kept_.learned.config
    assert config["chosen"]["scale_noise"] == config["scale_noise"]
    centres, widths = found(run)
    assert (np.abs(centres) <= 1).all() and (widths > 0).all()
    assert (widths <= LARGEST[kind]).all()
    assert run.replay(run.transcript_, config) == run.server_state_
    # about a tenth of the budget, in 1/z², where training is not sampled
    if "example" not in case:
        rounds = config["chosen"].get("rounds", 3)
        assert 1 / config["scale_noise"] ** 2 / rounds == pytest.approx(1 / 9)


SUMS = {
    SHARED: np.array([[200.0, 200.0], [100.0, -50.0], [60.0, 40.0]]),
    QUANTILES: np.array([[120.0, 0.0], [80.0, 0.0], *[[0.0, 0.0]] * (BINS - 3), [0.0, 200.0]]),
}
EXACT = {
    SHARED: np.array([[0.5, -0.25], [0.05**0.5, 0.1375**0.5]]),
    # quartiles at 50/120, 100/120 and 1 + 30/80 bins, and at 31 and 1, 2 and 3 quarters
    QUANTILES: np.array([[100 / 120, 31.5], [(165 / 120 - 50 / 120) / 1.349, 0.5 / 1.349]])
    * (2 / BINS)
    - [[1], [0]],
}
# of a feature that is uniform on its bounds
UNIFORM = {SHARED: 3**-0.5, QUANTILES: 1 / 1.349}
# half of all values at each of the bounds
LARGEST = {SHARED: 1.0, QUANTILES: 2 / 1.349}


@KINDS
def test_the_more_noise_the_closer_to_what_the_bounds_say(kind: str) -> None:
    scale_of = STATISTICS[kind].scale_of
    assert scale_of(SUMS[kind], 0.0, 200) == pytest.approx(EXACT[kind])
    distances = []
    for deviation in (1.0, 30.0, 1000.0, 1e9):
        centres, widths = scale_of(SUMS[kind], deviation, 200)
        distances.append(np.abs(centres).max() + np.abs(widths - UNIFORM[kind]).max())
    assert sorted(distances, reverse=True) == distances and distances[-1] < 1e-6


@KINDS
@pytest.mark.parametrize("value", [-1e30, 0.0, 1e30])
def test_whatever_a_sum_is_the_scale_is_within_the_bounds(value: float, kind: str) -> None:
    draws = np.random.default_rng(1)
    statistics = STATISTICS[kind]
    for deviation in (0.0, 0.1, 1e6):
        sums = draws.choice([value, 1.0, -3.0], (statistics.count, 50))
        centres, widths = statistics.scale_of(sums, deviation, 10)
        assert np.isfinite([centres, widths]).all()
        assert (np.abs(centres) <= 1).all()
        assert (widths >= 0).all() and (widths <= LARGEST[kind]).all()


@pytest.mark.parametrize(("stop", "kind"), [(1, SHARED), (2, SHARED), (1, QUANTILES)])
def test_a_run_that_is_resumed_ends_as_one_that_was_not(
    stop: int, kind: str, tmp_path: Path
) -> None:
    settings = Settings(keys_from_seed=True)
    noise = {"clip": 1.0, "noise": 1.0, "mask": "permutation"}
    whole = quick(**noise).fit(federation(kind=kind), settings)
    with pytest.raises(KeyboardInterrupt):
        quick(**noise).fit(
            federation(kind=kind), settings, folder=tmp_path, report=cases.interrupt_after(stop)
        )
    resumed = quick(**noise).fit(federation(kind=kind), settings, folder=tmp_path)
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


@KINDS
def test_nodes_of_their_own_end_as_clients_in_one_process(kind: str) -> None:
    cases_of_nodes = {"cfl": CFL(rounds=3, model="linear"), "fedavg": quick(aggregation="secagg")}
    for made in cases_of_nodes.values():
        state, nodes = cases.serve_nodes(made, federation(kind=kind))
        together = made.fit(federation(kind=kind), cases.DOUBLE).client_models_.values
        kept = [made.observer.kept_models(node.client, state).values for node in nodes]
        assert np.concatenate(kept) == pytest.approx(together.numpy(), abs=1e-9)


def test_who_was_lost_is_told_before_a_later_round() -> None:
    run = quick(rounds=8).fit(federation(), Settings(dropout=0.8))
    assert run.kept_.learned.network.scaled == [0, 1, 2, 3]
    # what nobody replied to is asked for again
    assert (found(run) != [[0.0] * 3, [1.0] * 3]).all()


REFUSED = [
    (("shared", "none"), "public bounds"),
    (("shared-quantiles", "none"), r"give them: .'shared-quantiles'"),
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


def table_users(form: Any, users: int, draw: np.random.Generator) -> list[Any]:
    """Return synthetic users of NSIM for the table, whose labels differ by user."""
    return [(draw.uniform(-1, 1, (20, 3)), draw.integers(k % 2, 2, 20)) for k in range(users)]


METHODS = (
    *("cfl", "flhc", "srfca", "ifca", "clove", "cflgp", "rdpcfl", "flux", "local-kmeans"),
    *("random", "finetune", "mrmtl", "nsim", "oneshot", "pacfl", "signature"),
)


@pytest.mark.exhaustive
@KINDS
@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_stays_within_its_target(name: str, unit: str, kind: str) -> None:
    sites = federation(gaps=0.0, kind=kind)
    common: dict[str, Any] = {"rounds": 3, "epochs": 1, "mask": "permutation", "dp_unit": unit}
    if name == "nsim":
        common["walks"] = table_users
    made: ClusteringProtocol = cases.variant(name, target_epsilon=20.0, **common)
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
