"""The scripts for Pacheco et al. 2021 at the smallest scale.

The tests are on what they measure, draw and leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.grid import Grid
from benchmarks.papers.nsim import ceiling as nsim_ceiling
from benchmarks.papers.nsim import fig4 as nsim_fig4
from benchmarks.papers.nsim import pearson as nsim_pearson
from benchmarks.papers.nsim import runs as nsim_runs
from benchmarks.sheet import Row, numbers
from securecluster import Federation
from securecluster.protocols import Local
from securecluster.protocols.nsim import synthetic_users
from securecluster.protocols.nsim.random_walks import Format, RandomWalk

Filled = Callable[[Grid, Sequence[dict[str, Any]]], list[Row]]
SMALL = {
    "scale": "cpu", "synthetic": 12, "clients": 6, "local_rounds": 1, "epochs": 1, "batch_size": 32,
    "lr": 0.1, "seed": 0,
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_set(monkeypatch: pytest.MonkeyPatch, traces: None, brief_fit: Callable[..., Any]) -> None:
    """A small set of traces, short walks and a pair network that hardly trains."""
    for script in (nsim_ceiling, nsim_runs, synthetic_users):
        monkeypatch.setattr(script, "fit", brief_fit)
    monkeypatch.setattr(nsim_runs, "Format", lambda: Format(samples=(30, 60)))
    for kept in (nsim_runs.real_users, nsim_runs.synthetic_users):
        kept.cache_clear()
    nsim_runs._kept.clear()


@pytest.mark.exhaustive
def test_correlations_of_every_layer_and_start(filled: Filled) -> None:
    rows = filled(
        nsim_pearson.GRID,
        [
            {**SMALL, "init": i, "layer": k}
            for i in ("common", "independent")
            for k in ("hidden", "last")
        ],
    )
    for row in rows:
        true, told = numbers(row["points_true_real"]), numbers(row["points_nsim_real"])
        assert len(true) == 15  # all pairs of six persons
        assert numbers(row["pearson_real"])[0] == pytest.approx(
            np.corrcoef(true, told)[0, 1], abs=0.02
        )
        assert row["cka_real"] and (row["cca_real"] == "") == (row["layer"] == "hidden")
    assert len({row["pearson_real"] for row in rows}) == 4


def test_models_are_those_of_clients_who_train_alone() -> None:
    users = Federation.simulate("mobility", clients=6, seed=0)
    found = nsim_runs.models(SMALL, [(s.x, s.y) for s in users.shards], "common", 0)
    numbered = replace(users, names=tuple(str(k) for k in range(6)))
    local = Local(rounds=1, epochs=1, batch_size=32, lr=0.1).fit(numbered)
    # which train one by one, and round otherwise
    np.testing.assert_allclose(found.numpy(), local.client_models_.values.numpy(), atol=1e-6)


@pytest.mark.exhaustive
def test_errors_by_cluster_together_and_alone(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    walks = RandomWalk()
    monkeypatch.setattr(
        "securecluster.protocols.nsim.protocol.RandomWalk",
        lambda: lambda form, users, draw: walks(Format(samples=(30, 60)), users, draw),
    )
    fixed = {**SMALL, "rounds": 2, "optimizer": "sgd"}
    rows = {
        row["method"]: row
        for row in filled(nsim_fig4.GRID, [{**fixed, "method": name} for name in nsim_fig4.METHODS])
    }
    assert all(len(numbers(row["errors_last"])) == 6 for row in rows.values())
    assert [name for name, row in rows.items() if row["errors_once"]] == [
        "nsim",
        "together",
        "local",
    ]
    assert (
        rows["together"]["clusters"],
        rows["together"]["lone"],
        rows["together"]["largest"],
    ) == ("1", "0", "6")
    for row in rows.values():
        assert float(row["mean_last"]) == pytest.approx(
            np.mean(numbers(row["errors_last"])), abs=0.1
        )
    alone = Local(rounds=1, epochs=1, batch_size=32, lr=0.1, optimizer="sgd").fit(
        Federation.simulate("mobility", clients=6, seed=0)
    )
    np.testing.assert_allclose(numbers(rows["local"]["errors_once"]), alone.scores_, atol=0.06)


def test_cells_cover_what_the_paper_compares() -> None:
    assert {(c["init"], c["layer"]) for c in nsim_pearson.cells("cpu", 1)} == {
        (i, k) for i in ("common", "independent") for k in ("hidden", "last")
    }
    assert {c["clients"] for c in nsim_fig4.cells("full", 1)} == {400}


@pytest.mark.exhaustive
def test_what_true_statistics_tell(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    # there are six persons in the small set, too few to learn from
    real = nsim_runs.synthetic_users(14, 5)
    monkeypatch.setattr(nsim_ceiling, "real_users", lambda clients, seed: real)
    monkeypatch.setattr(nsim_runs, "real_users", lambda clients, seed: real)
    cells = [
        {**SMALL, "init": "common", "reads": r, "learns": k}
        for r in nsim_ceiling.READS
        for k in nsim_ceiling.LEARNS
    ]
    rows = filled(nsim_ceiling.GRID, cells)
    assert all(-1 <= float(row["pearson_real"]) <= 1 for row in rows)
    assert [bool(row["pearson"]) for row in rows] == [True, False, True, False]
    assert len({row["pearson_real"] for row in rows}) == 4


def test_statistics_are_numpys_own() -> None:
    y = np.random.default_rng(0).random((50, 2)).astype(np.float32)
    (row,) = nsim_ceiling.statistics([(y, y)]).double().numpy()
    spread = np.cov(y[:, 0], y[:, 1])
    np.testing.assert_allclose(
        row,
        [y[:, 0].mean(), y[:, 1].mean(), spread[0, 0], spread[0, 1], spread[1, 1], np.log(50)],
        rtol=1e-5,
    )
