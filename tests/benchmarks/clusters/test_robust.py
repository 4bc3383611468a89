"""The twenty settings of the robust table: what their clients hold, and a table of one tiny
setting.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.clusters import robust
from benchmarks.clusters.robust_settings import EVERYDAY, SETTINGS, OnePair, Setting
from securecluster import FedAvg, LabelPermutation
from securecluster.core.randomness import Randomness
from securecluster.data import Source
from securecluster.data.datasets import CIFAR10, FASHION, digits
from securecluster.data.pools import ArrayPool
from securecluster.models.objectives import Trajectory

TINY = Setting("tiny", "first", "digits", LabelPermutation(2), (3, 2), (10, 20), 20)


def images(n: int, classes: int, owners: int = 0) -> ArrayPool:
    """A pool of random labels whose images hold the number of their row."""
    draw = np.random.default_rng(0)
    x = np.broadcast_to(np.arange(n, dtype=np.float32)[:, None, None, None], (n, 1, 2, 2))
    writers = np.array([f"w{k % owners:03}" for k in range(n)]) if owners else None
    return ArrayPool(x, draw.integers(0, classes, n), writers)


def walks() -> ArrayPool:
    """A pool of 60 persons in two groups, with 300 windows each."""
    owners = np.repeat([f"p{k:02}" for k in range(60)], 300)
    groups = np.repeat([f"g{k % 2}" for k in range(60)], 300)
    number = np.arange(len(owners), dtype=np.float32)
    x = np.broadcast_to(number[:, None, None], (len(owners), 10, 2))
    return ArrayPool(x, x[:, 0], owners, groups, gap=10)


def stand_in(name: str) -> Source:
    """A data set of the real one's size, without its files."""
    if name == "digits":
        return digits()
    if name == "mobility":
        return Source(name, 2, (10, 2), walks(), objective=Trajectory(metres=(1.0, 1.0)))
    if name == "femnist":
        return Source(name, 62, (1, 2, 2), images(100 * 150, 62, owners=100))
    train = 50_000 if name == "cifar10" else 60_000
    tasks = {"fashion_mnist": FASHION, "cifar10": CIFAR10}.get(name, ())
    return Source(name, 10, (1, 2, 2), images(train, 10), images(10_000, 10), tasks)


@pytest.fixture(autouse=True)
def no_cache() -> Iterator[None]:
    robust.federation.cache_clear()
    yield
    robust.federation.cache_clear()


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("securecluster.data.federation.source", stand_in)


def kinds(half: str) -> set[str]:
    own = [setting for setting in SETTINGS.values() if setting.half == half]
    found = {part.name for setting in own for part in setting.scenario.parts}
    found |= {"nested"} if any(len(s.scenario.parts) > 1 for s in own) else set()
    found |= {"mixture"} if any(s.foreign for s in own) else set()
    found |= {"unequal clusters"} if any(len(set(s.sizes)) > 1 for s in own) else set()
    found |= {"unequal samples"} if any(len(s.samples) > 1 for s in own) else set()
    return found


def test_both_halves_cover_every_kind() -> None:
    assert Counter(setting.half for setting in SETTINGS.values()) == {"first": 10, "second": 10}
    shared = {
        "label-permutation", "label-swap", "dirichlet", "rotation", "iid", "natural", "topics",
        "nested", "mixture", "unequal clusters", "unequal samples",
    }  # fmt: skip
    assert shared <= kinds("first") and shared <= kinds("second")
    assert kinds("first") - shared == {"pathological", "inversion"}
    assert kinds("second") - shared == {"tasks"}
    data = {"digits", "mnist", "fashion_mnist", "cifar10", "femnist", "mobility"}
    for half in ("first", "second"):
        assert {s.data for s in SETTINGS.values() if s.half == half} == data
    clusters = [len(setting.sizes) for setting in SETTINGS.values()]
    clients = [sum(setting.sizes) for setting in SETTINGS.values()]
    samples = [n for setting in SETTINGS.values() for n in setting.samples]
    assert (min(clusters), max(clusters)) == (1, 12)
    assert (min(clients), max(clients)) == (7, 100)
    assert (min(samples), max(samples)) == (20, 600)


@pytest.mark.few(10)
@pytest.mark.parametrize("name", [*SETTINGS, *EVERYDAY])
def test_clients_are_those_of_the_setting(name: str, offline: None) -> None:
    setting, made = robust.setting_of(name), robust.federation(name, 1)
    assert made.truth == tuple(np.repeat(range(len(setting.sizes)), setting.sizes))
    places = [place for size in setting.sizes for place in range(size)]
    wanted = [setting.samples[place % len(setting.samples)] for place in places]
    assert [len(shard.y) for shard in made.shards] == wanted
    assert min(len(shard.y_test) for shard in made.shards) >= 14
    assert made.digest() != robust.federation(name, 2).digest()
    again = robust.federation(name, 1)
    assert made.digest() == again.digest() and made is not again


@pytest.mark.parametrize("name", [name for name, setting in SETTINGS.items() if setting.foreign])
def test_a_mixture_swaps_samples_across_clusters(
    name: str, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, mixed = SETTINGS[name], robust.federation(name, 1)
    pure = Setting(
        setting.about, setting.half, setting.data, setting.scenario, setting.sizes,
        setting.samples, setting.dealt,
    )  # fmt: skip
    monkeypatch.setitem(SETTINGS, "pure", pure)
    apart = robust.federation("pure", 1)
    cluster = {}
    for shard, label in zip(apart.shards, apart.truth or (), strict=True):
        cluster |= {float(row): label for row in shard.x[:, 0, 0, 0]}
    for shard, label in zip(mixed.shards, mixed.truth or (), strict=True):
        seen = Counter(cluster[float(row)] for row in shard.x[:, 0, 0, 0])
        foreign = [n for who, n in seen.items() if who != label]
        assert sum(foreign) / sum(seen.values()) == pytest.approx(setting.foreign, abs=0.02)
        assert len(foreign) == len(setting.sizes) - 1, "every other cluster gives some"
        assert max(foreign) - min(foreign) <= 1
    rows = [float(row) for shard in mixed.shards for row in shard.x[:, 0, 0, 0]]
    assert len(rows) == len(set(rows)), "no sample twice"


def test_both_halves_of_everyday_settings_cover_what_federations_differ_in() -> None:
    """Skew of each client under swaps, permutations and rotations, noise, outliers, pairs, nests,
    mixtures, and unequal sizes of clusters and of clients.
    """
    for half in ("first", "second"):
        own = {name: setting for name, setting in EVERYDAY.items() if setting.half == half}
        skewed = [s for s in own.values() if "client-dirichlet" in str(s.scenario)]
        beside = {part.name for setting in skewed for part in setting.scenario.parts}
        assert {"label-swap", "label-permutation", "rotation"} & beside
        assert any(len(setting.scenario.parts) == 1 for setting in skewed), "one task"
        assert any(setting.noise for setting in own.values())
        assert any(setting.sizes == (14, 1) for setting in own.values())
        assert any("pair" in name for name in own)
        assert any(setting.foreign == 0.2 for setting in own.values())
        assert any(setting.samples == (20, 40, 80, 160, 400) for setting in own.values())
        assert any(len(set(setting.sizes)) > 2 for setting in own.values())
    skews = [s.scenario.parts for s in EVERYDAY.values() if "client-dirichlet" in str(s.scenario)]
    alphas = {getattr(part, "alpha", None) for parts in skews for part in parts}
    assert {0.3, 0.5, 1.0} <= alphas
    assert {len(s.sizes) for s in EVERYDAY.values()} >= {1, 2, 3, 4, 5, 6, 8, 10}
    assert max(sum(s.sizes) for s in EVERYDAY.values()) == 200
    assert not set(EVERYDAY) & set(SETTINGS)


def test_one_cluster_of_two_swaps_one_pair() -> None:
    y = np.arange(10)
    x = np.zeros((10, 1), np.float32)
    _, same = OnePair().transform(0, x, y, 10, Randomness(3))
    _, swapped = OnePair().transform(1, x, y, 10, Randomness(3))
    assert same.tolist() == y.tolist()
    assert sorted(swapped.tolist()) == y.tolist() and (swapped != y).sum() == 2


def test_every_second_client_has_noise(offline: None) -> None:
    name = "fashion-noise-14"
    noisy = robust.federation(name, 1)
    quiet = robust.clients_of(replace(EVERYDAY[name], noise=0.0), 1)
    for client, (one, other) in enumerate(zip(noisy.shards, quiet.shards, strict=True)):
        scale = float((one.x - other.x).std())
        assert scale == pytest.approx(0.5 * (client % 2), abs=0.05)
        assert float((one.x_test - other.x_test).std()) == pytest.approx(scale, abs=0.1)
        assert (one.y == other.y).all()


def test_an_everyday_row_has_scores_before_and_after_tuning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(EVERYDAY, "tiny everyday", TINY)
    cell = robust.cells(1, ["tiny everyday"], ["fedavg"])[0]
    assert (cell["seed"], cell["tune_rounds"]) == (robust.FIRST_EVERYDAY_SEED, robust.TUNE_ROUNDS)
    found = robust.measure(cell)
    clients = robust.clients_of(TINY, cell["seed"])
    plain = FedAvg().fit(clients)
    assert found["score"] == pytest.approx(np.nanmean(plain.scores_))
    tuned = FedAvg(tune_rounds=robust.TUNE_ROUNDS).fit(clients)
    assert found["tuned"] == pytest.approx(np.nanmean(tuned.scores_))
    assert (found["exact"], found["warned"]) == (0, plain.warning_ or "")


def test_every_cell_is_told_apart() -> None:
    cells = robust.cells(3)
    assert len(cells) == 3 * (20 * (len(robust.NAMES) - 1) + 2)
    of_nsim = {cell["data"] for cell in cells if cell["protocol"] == "nsim"}
    assert of_nsim == {"mobility"}
    assert len({str(sorted(cell.items())) for cell in cells}) == len(cells)
    told = {(cell["setting"], cell["protocol"]): cell["k"] for cell in cells}
    assert told["mnist-permutation-12x3", "ifca"] == 12
    assert told["mnist-iid-100", "local-kmeans"] == 3
    assert told["mnist-iid-100", "cfl"] is None
    assert {"cfl", "flhc", "srfca", "oneshot", "ifca", "local-kmeans"} < set(robust.NAMES)
    assert {"fedavg", "local"} < set(robust.NAMES)


def test_a_tiny_setting_gives_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SETTINGS, "tiny", TINY)
    arguments = ["--settings", "tiny", "--protocols", "fedavg,local-kmeans", "--seeds", "1"]
    path = robust.main([*arguments, "--name", "t"])
    assert path == Path("benchmarks/results/t.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()[1:]))
    assert [row["protocol"] for row in rows] == ["fedavg", "local-kmeans"]
    assert [row["status"] for row in rows] == ["done", "done"]
    fedavg, kmeans = rows
    assert (fedavg["clusters"], fedavg["k"], kmeans["k"]) == ("1", "", "2")
    assert (fedavg["metric"], fedavg["sizes"], fedavg["samples"]) == ("accuracy", "3 2", "10 20")
    assert 0 <= float(fedavg["worst"]) <= float(fedavg["score"]) <= 1
    assert int(fedavg["bytes"]) > 0 and float(fedavg["fit_seconds"]) > 0


def test_a_run_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "tiny", TINY)
    cell = {**robust.cells(1, ["tiny"], ["local-kmeans"])[0], "k": 99}
    found = robust.measure(cell)
    assert list(found) == ["outcome"] and "99" in found["outcome"]
    row = {"setting": "tiny", "protocol": "local-kmeans", "seed": "1700", **found}
    lines = robust.report([row])
    assert lines[0] == f"tiny local-kmeans seed 1700: {found['outcome']}"


def row(protocol: str, seed: int, score: float, metric: str = "accuracy") -> dict[str, Any]:
    ari = "0" if protocol == "fedavg" else "1"
    found = {"setting": metric, "protocol": protocol, "seed": str(seed), "metric": metric}
    return found | {"score": str(score), "worst": str(score), "ari": ari, "outcome": "ok"}


def test_the_report_counts_what_ends_below_fedavg() -> None:
    rows = [row("fedavg", 0, 0.5), row("cfl", 0, 0.6), row("local", 0, 0.49)]
    rows += [row("fedavg", 1, 0.5), row("cfl", 1, 0.44), row("local", 1, 0.48)]
    rows += [row("cfl", 2, 0.0)]  # without a FedAvg of this seed
    rows += [row("fedavg", 0, 200, "position_error"), row("cfl", 0, 220, "position_error")]
    gains = robust.gains(rows)
    assert gains["accuracy", "cfl"] == pytest.approx(0.02)
    assert gains["accuracy", "local"] == pytest.approx(-0.015)
    assert gains["position_error", "cfl"] == pytest.approx(-0.1)
    lines = robust.report(rows)
    assert lines[-3] == "2 of 3 cells end more than 0.01 below FedAvg"
    assert lines[-2] == "  cfl: 1 of 2; position_error -0.100"
    assert lines[-1] == "  local: 1 of 1; accuracy -0.015"


def test_the_report_has_distances_from_tuned_fedavg_with_intervals() -> None:
    rows = []
    for seed, (own, exact) in enumerate(((0.80, 1), (0.78, 0), (0.76, 1))):
        rows.append(row("fedavg", seed, 0.5) | {"tuned": "0.8", "exact": "0"})
        rows.append(row("cfl", seed, 0.7) | {"tuned": str(own), "exact": str(exact)})
    lines = robust.below_tuned(rows)
    # differences 0, -0.02, -0.04: t of two degrees is 4.303, the standard error 0.02/√3
    said = "accuracy cfl beside tuned FedAvg -0.020 ± 0.050, exact 2 of 3 runs"
    assert " ".join(lines[0].split()) == said
    assert lines[1] == "1 of 1 cells end more than 0.01 below it"
    assert robust.below_tuned([row("fedavg", 0, 0.5), row("cfl", 0, 0.6)]) == []


def test_a_table_has_scores_and_the_clusters_agreement() -> None:
    rows = [row("fedavg", 0, 0.5), row("cfl", 0, 0.6), row("cfl", 1, 0.7)]
    rows += [row("cfl", 0, 1220, "position_error")]
    assert robust.markdown(rows, ("fedavg", "cfl")) == [
        "| setting | `fedavg` | `cfl` |",
        "| --- | --- | --- |",
        "| accuracy | 0.500 | 0.650 (1.00) |",
        "| position_error | – | 1,220 m (1.00) |",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--protocols", "cfk"], "--protocols has no cfk"),
        (["--settings", "nothing"], "--settings has no nothing"),
        (["--seeds", "0"], "--seeds is at least 1"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        robust.chosen(arguments)
    assert message in capsys.readouterr().err


def test_a_half_has_its_settings() -> None:
    for half in ("first", "second"):
        names = robust.chosen(["--half", half]).settings
        assert len(names) == 10 and {SETTINGS[name].half for name in names} == {half}
