"""The scripts for the tables and figures of Ali & Arafa 2024, at the smallest scale: what they
measure, draw and leave out.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.clusters import tasks
from benchmarks.grid import Grid
from benchmarks.papers.oneshot import accuracy as oneshot_accuracy
from benchmarks.papers.oneshot import fig4 as oneshot_fig4
from benchmarks.papers.oneshot import noise as oneshot_noise
from benchmarks.papers.oneshot import runs as oneshot_runs
from benchmarks.papers.oneshot import table1 as oneshot_table1
from benchmarks.papers.oneshot import table2 as oneshot_table2
from benchmarks.papers.oneshot import vectors as oneshot_vectors
from benchmarks.papers.oneshot.runs import (
    CLUSTERS,
    RandomTasks,
    dealt,
    judged,
    matrices,
    parts,
    trained,
    usable,
)
from benchmarks.sheet import Row, numbers
from securecluster import Federation
from securecluster.data.scenarios import Tasks
from securecluster.errors import UsageError

Filled = Callable[[Grid, Sequence[dict[str, Any]]], list[Row]]
RUN = {
    "data": "digits", "clients": 5, "samples": 60, "minority": 0.1, "features": "identity",
    "model": "mlp-32", "gps_every": 1,
}  # fmt: skip
RUN |= {"batch_size": 20, "epochs": 1, "lr": 0.1, "rounds": 2, "seed": 0}


def on_disk(name: str) -> list[dict[str, str]]:
    return list(
        csv.DictReader(Path(f"benchmarks/results/papers/{name}.csv").read_text().splitlines()[1:])
    )


def test_r_is_made_from_whole_decompositions() -> None:
    draw = np.random.default_rng(0)
    xs = [
        draw.normal(size=(n, 6))
        * [4, 3, 2, 1, 0.5, 0.2]
        @ np.linalg.qr(draw.normal(size=(6, 6)))[0]
        for n in (30, 40, 50)
    ]
    grams = [x.T @ x / len(x) for x in xs]
    eigen = [np.linalg.eigh(g) for g in grams]
    for p, found in zip((1, 4), matrices([torch.from_numpy(x) for x in xs], (1, 4)), strict=True):
        r = np.empty((3, 3))
        for i in range(3):
            own = eigen[i][0][::-1][:p]
            for j in range(3):
                other = np.linalg.norm(grams[i] @ eigen[j][1][:, ::-1][:, :p], axis=0)
                r[i, j] = (np.minimum(own, other) / np.maximum(own, other)).prod() ** (1 / p)
        np.testing.assert_allclose(found, (r + r.T) / 2, rtol=1e-9)


def test_pairs_within_and_across() -> None:
    r = np.array([[1, 0.9, 0.1, 0.2], [0.9, 1, 0.3, 0.4], [0.1, 0.3, 1, 0.8], [0.2, 0.4, 0.8, 1]])
    within, across = parts(r, (0, 0, 1, 1))
    assert within.tolist() == [0.9, 0.8] and across.tolist() == [0.1, 0.2, 0.3, 0.4]
    found = judged(r, (0, 0, 1, 1))
    assert found["within"] == pytest.approx(0.85) and (
        found["within_min"],
        found["across_max"],
    ) == (0.8, 0.4)
    assert found["exact"] and found["exact_without_T"]
    assert not judged(r, (0, 1, 0, 1))["exact"]
    alone = judged(np.full((4, 4), 0.9), (0, 0, 0, 0))
    assert alone["across"] is None and alone["exact_without_T"]


def test_users_per_task() -> None:
    federation = Federation.simulate(
        dealt("digits", (2, 3)), scenario=Tasks(), clients=5, samples=20, seed=0
    )
    assert np.bincount(federation.truth or ()).tolist() == [2, 3]


def test_features_that_cannot_be_made_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise UsageError("no weights")

    monkeypatch.setattr(oneshot_runs, "build", refuse)
    cells = oneshot_table1.cells("cpu", 1)
    assert {cell["features"] for cell in usable(cells)} == {"identity", "pca", "conv"}
    assert "no weights" in capsys.readouterr().out


def test_table_1(filled: Filled) -> None:
    fixed = {"scale": "cpu", "data": "digits", "samples": 80, "vectors": 5, "seed": 0, "paper": "p"}
    kinds = [{"minority": m, "features": name} for name in ("identity", "conv") for m in (0.0, 0.1)]
    rows = filled(oneshot_table1.GRID, [{**fixed, **kind} for kind in kinds])
    for row in rows:
        r = np.reshape(numbers(row["R"]), (5, 5))
        assert (np.diag(r) == 1).all() and (r == r.T).all()
        assert float(row["within"]) == pytest.approx(
            np.mean([r[0, 1], r[2, 3], r[2, 4], r[3, 4]]), rel=1e-4
        )
    assert rows[0]["exact"] == "True" and float(rows[0]["within_min"]) > float(
        rows[0]["across_max"]
    )


def test_table_2(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        oneshot_table2, "USERS", (("digits", "0-4"), ("digits", "0-4"), ("digits", "5-9"))
    )
    cells = [
        {
            "scale": "cpu", "samples": 100, "vectors": 5, "features": "identity", "seed": 0,
            "paper": "p",
        }
    ]  # fmt: skip
    (row,) = filled(oneshot_table2.GRID, cells)
    assert row["nearer"] == "True" and float(row["R12"]) == 1  # the same draw of the same task
    with pytest.raises(
        UsageError, match="digits here has 896 training samples of 5-9, and 2000 are wanted"
    ):
        oneshot_table2.samples("digits", "5-9", 2000, 0)


@pytest.mark.exhaustive
def test_figure_4(filled: Filled) -> None:
    cells = [
        {
            "scale": "cpu", "data": "digits", "clients": 10, "samples": 60, "minority": 0.1,
            "seed": s, "paper": "p",
        }
        for s in (0, 1)
    ]  # fmt: skip
    rows = filled(oneshot_fig4.GRID, cells)
    for row in rows:
        within, across = numbers(row["within_min"]), numbers(row["across_max"])
        assert len(within) == len(numbers(row["R09"])) == 50
        first = next(
            p
            for p, pair in enumerate(zip(within, across, strict=True), start=1)
            if pair[0] > pair[1]
        )
        assert int(row["apart_from"]) == first
        assert float(row["within_5"]) == pytest.approx(numbers(row["within"])[4], rel=1e-4)


@pytest.mark.exhaustive
@pytest.mark.few(1)
@pytest.mark.parametrize("figure", oneshot_accuracy.FIGURES)
@pytest.mark.usefixtures("elsewhere")
def test_figures_2_and_3(
    figure: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = oneshot_accuracy.Figure(RUN, {"cpu": {}, "full": {}}, "p", ("0-4", "5-9"))
    monkeypatch.setitem(oneshot_accuracy.FIGURES, figure, small)
    oneshot_accuracy.main(["--figure", str(figure), "--seeds", "1"])
    name = f"oneshot_fig{figure}"
    rows = on_disk(name)
    assert [row["status"] for row in rows] == ["done"] * 2 + ["not run"] * 2
    rows = rows[:2]
    assert [row["clusters"] for row in rows] == list(CLUSTERS)
    assert Path(f"benchmarks/results/papers/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert [len(numbers(row["task_1"])) for row in rows] == [2, 2]
    assert rows[0]["exact"] == "True" and numbers(rows[0]["task_0"])[-1] == float(rows[0]["last_0"])
    assert "0-4: one-shot" in capsys.readouterr().out


def test_random_clusters_are_as_large_as_the_tasks() -> None:
    federation = Federation.simulate("digits", scenario=Tasks(), clients=5, samples=60, seed=1)
    kind = RandomTasks.of_sizes((4, 1))
    protocol = kind(tasks=2, rounds=1, model="mlp-32", mask="none")
    assert sorted(np.bincount(protocol.fit(federation).labels_)) == [1, 4]
    found = trained({**RUN, "clusters": "random", "clients": 6})
    assert set(found) >= {"exact", "last_0", "last_1", "task_0", "task_1"}


def test_the_rule_for_the_number_of_tasks_is_judged() -> None:
    rows = tasks.measure(tasks.loaded("digits"), "tasks", 10, 60, 10)
    assert [row["features"] for row in rows] == ["identity", "conv"]
    assert rows[0]["possible"] and rows[0]["within"] > rows[0]["across"]
    (iid, _) = tasks.measure(tasks.loaded("digits"), "iid", 10, 60, 10)
    assert iid["right"] and iid["possible"] and iid["across"] is None


def test_clusters_over_epsilon(filled: Filled) -> None:
    cells = [
        {
            "data": "digits", "samples": 60, "features": "dct", "mechanism": mechanism,
            "scenario": "tasks", "scale": "cpu", "clients": 6, "seed": 20,
        }
        for mechanism in ("gram", "all", "naive")
    ]  # fmt: skip
    # a picture needs the cells of all panels
    undrawn = replace(oneshot_noise.GRID, draw=None)
    gram, every, naive = filled(undrawn, cells)
    assert gram["dimension"] == "16" and float(gram["ari_inf"]) == float(every["ari_inf"]) == 1
    assert float(gram["ari_16"]) == 1 and float(gram["ari_0.25"]) < 1
    assert float(naive["s_0.02"]) == 1 and float(naive["s_1"]) < 1
    assert float(naive["alone_0.05"]) == pytest.approx(4380, rel=0.01) and float(
        naive["alone_1"]
    ) == pytest.approx(28.4, rel=0.01)


def test_noise_multipliers_are_those_of_the_gaussian_mechanism() -> None:
    for e in (0.25, 1.0, 8.0):
        z = oneshot_noise.multiplier(e)
        normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 1.0)
        above, below = (
            float(normal.cdf(torch.tensor(sign * 0.5 / z - e * z, dtype=torch.float64)))
            for sign in (1, -1)
        )
        # Balle & Wang 2018, eq. 6: never more than δ
        assert 9.7e-6 < above - np.exp(e) * below <= 1.0001e-5
        assert oneshot_noise.priced(z) == pytest.approx(e, rel=1e-3)


def test_epsilon_is_drawn_with_and_without_a_projection() -> None:
    rows = [
        {
            "data": data, "samples": str(n), "features": features, "mechanism": mechanism,
            "scenario": "tasks", "seed": str(seed),
        }
        | {f"ari_{e:g}": f"{0.1 * seed:g}" for e in oneshot_noise.EPSILONS}
        for data, sizes in oneshot_noise.SAMPLES.items()
        for n in sizes
        for features in oneshot_noise.FEATURES[data]
        for mechanism in ("gram", "all")
        for seed in (1, 3)
    ]  # fmt: skip
    axes = oneshot_noise.draw(rows).axes
    assert len(axes) == 6 and [len(place.lines) for place in axes] == [5] * 3 + [7] * 3
    assert all(np.allclose(line.get_ydata(), 0.2) for place in axes for line in place.lines)


@pytest.mark.exhaustive
def test_vectors_alone_and_their_span(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = {"data": "digits", "samples": 100, "features": "dct", "scale": "cpu", "seed": 20}
    cells = [{"scenario": scenario, **fixed} for scenario in ("tasks", "rotation")]
    monkeypatch.setattr(oneshot_vectors, "DEALT", 100)
    monkeypatch.setattr(oneshot_vectors, "SIZES", (3, 3))
    rows = filled(replace(oneshot_vectors.GRID, draw=None), cells)
    for row in rows:
        for e in oneshot_vectors.EPSILONS:
            assert row[f"alone_1_{e:g}"] == row[f"span_1_{e:g}"]
        assert {row[f"span_{p}_16"] for p in oneshot_vectors.VECTORS} == {"1"}


def test_vectors_are_drawn_alone_and_as_a_span() -> None:
    names = [
        f"{what}_{p}_{e:g}"
        for what in ("alone", "span")
        for p in oneshot_vectors.VECTORS
        for e in oneshot_vectors.EPSILONS
    ]
    rows = [
        dict(zip(oneshot_vectors.KEYS, map(str, setting), strict=True))
        | dict.fromkeys(names, "0.5")
        for setting in oneshot_vectors.SETTINGS
    ]
    axes = oneshot_vectors.draw(rows).axes
    assert [len(place.lines) for place in axes] == [2 * len(oneshot_vectors.VECTORS) + 1] * 9
