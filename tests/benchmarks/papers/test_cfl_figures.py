"""The scripts for the figures of Sattler et al. 2019, at the smallest scale: what they draw, that
they go on, and what they report.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.grid import Grid
from benchmarks.papers.cfl import fig3 as cfl_fig3
from benchmarks.papers.cfl import fig5 as cfl_fig5
from benchmarks.papers.cfl import fig6 as cfl_fig6
from benchmarks.papers.cfl import fig7 as cfl_fig7
from benchmarks.papers.cfl import fig8 as cfl_fig8
from benchmarks.sheet import Row

Filled = Callable[[Grid, Sequence[dict[str, Any]]], list[Row]]
SMALL = {
    "data": "digits", "model": "mlp-32", "epochs": 1, "lr": 0.1, "batch_size": 20, "rounds": 3,
    "clients": 6, "clusters": 3, "seed": 0,
}  # fmt: skip


def test_random_vectors_are_drawn_as_said() -> None:
    rng = np.random.default_rng(0)
    r, truth = cfl_fig3.vectors(4, 3, 50, 1.5, rng)
    assert r.shape == (12, 50) and truth == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    v = np.random.default_rng(0).standard_normal((4, 50))  # the first draw
    v -= v.mean(axis=0)
    assert np.abs(v.sum(axis=0)).max() < 1e-12
    assert np.linalg.norm(r - v[truth], axis=1) == pytest.approx(
        1.5 * np.linalg.norm(v[truth], axis=1)
    )


@pytest.mark.exhaustive
def test_figure_3(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    fixed = {"scale": "cpu", "d": 30, "clients_each": 3, "trials": 12, "seed": 0, "paper": "p"}
    rows = filled(
        cfl_fig3.GRID, [{**fixed, "k": k, "gamma": g} for k in (2, 6) for g in (0.1, 1.0, 9.0)]
    )
    share = {
        (row["k"], row["gamma"]): (float(row["p_gap_positive"]), float(row["p_correct"]))
        for row in rows
    }
    assert share["2", "0.1"] == share["6", "0.1"] == (1.0, 1.0)
    assert max(share["6", "9"]) < 0.5 and all(
        correct >= positive for positive, correct in share.values()
    )
    assert [row["guaranteed"] for row in rows] == [
        "True", "False", "False", "True", "False", "False",
    ]  # fmt: skip
    assert "p_correct is at least 0.99 up to γ: k = 2: " in capsys.readouterr().out


def test_figure_5(filled: Filled, capsys: pytest.CaptureFixture[str]) -> None:
    rows = filled(
        cfl_fig5.GRID,
        [{"scale": "cpu", **SMALL, "points": points, "paper": "p"} for points in (10, 40)],
    )
    assert all(-2 <= float(row[name]) <= 2 for row in rows for name in ("updates", "gradients"))
    assert {row[f"correct_{name}"] for row in rows for name in ("updates", "gradients")} <= {
        "True",
        "False",
    }
    assert "g is positive with every seed from {'digits': " in capsys.readouterr().out
    made = [
        {"data": "d", "points": str(p), "seed": "0", "g": str(g)}
        for p, g in ((10, -1), (20, 0.1), (5, 0.3), (40, 0.2))
    ]
    assert cfl_fig5.positive_from(made, "g") == {"d": 20} and cfl_fig5.positive_from(
        made[:1], "g"
    ) == {"d": None}


@pytest.mark.exhaustive
def test_figure_6(filled: Filled) -> None:
    (row,) = filled(
        cfl_fig6.GRID,
        [{"scale": "cpu", **SMALL, "points": 60, "rounds": 8, "epochs": 3, "paper": "p"}],
    )
    for name in ("updates", "gradients"):
        curve = [float(word) for word in row[name].split()]
        assert len(curve) == 8 and float(row[f"{name}_last"]) == curve[-1]
        first = next((str(n) for n, gap in enumerate(curve, 1) if gap > 0), "")
        assert row[f"{name}_positive_from"] == first
    assert row["updates"] != row["gradients"]


@pytest.mark.exhaustive
def test_figure_7(filled: Filled) -> None:
    cells = [
        {"scale": "cpu", "case": case, **SMALL, "samples": 60, "rounds": 20, "paper": "p"}
        for case in ("congruent", "incongruent")
    ]
    for row in filled(cfl_fig7.GRID, cells):
        for name in cfl_fig7.NORMS:
            curve = [float(word) for word in row[name].split()]
            assert float(row[f"{name}_first"]) == pytest.approx(np.mean(curve[:2]), rel=1e-4)
            assert float(row[f"{name}_last"]) == pytest.approx(np.mean(curve[-2:]), rel=1e-4)
            assert float(row[f"{name}_peak"]) == pytest.approx(max(curve), rel=1e-4)
    assert cfl_fig7.trend([3.0 * 0.99**t for t in range(50)]) == pytest.approx(0.99**100)


def test_congruent_clients_hold_halves_of_the_labels() -> None:
    lower, upper = cfl_fig7.halves("digits", 40, 0).shards
    assert set(lower.y) == set(range(5)) and set(upper.y) == set(range(5, 10))
    assert [len(shard.y) for shard in (lower, upper)] == [40, 40] and set(upper.y_test) <= set(
        range(5, 10)
    )


@pytest.mark.exhaustive
def test_figure_8(filled: Filled) -> None:
    small = {
        **SMALL,
        "clients": 8,
        "clusters": 2,
        "samples": 80,
        "rounds": 20,
        "epochs": 3,
        "lr": 0.2,
    }
    cells = [{"scale": scale, **small, "paper": "p"} for scale in ("cpu", cfl_fig8.ANY_ROUND)]
    row, own = filled(cfl_fig8.GRID, cells)
    assert cfl_fig8.splits(200) == [50, 100, 150] and row["splits"] == "5"  # of 5, 10, 15
    assert row["exact"] == "True"
    assert float(row["accuracy_after"]) > float(row["accuracy_before"]) + 0.2
    assert float(row["gap_at_first_split"]) > 0 >= float(row["largest_gap_at_end"])
    split = int(row["splits"].split()[0])
    new = row["gap_1"].split()
    assert len(new) == 20 and set(new[:split]) == {"nan"} and "nan" not in new[split:]
    assert own["exact"] == "True" and int(own["splits"]) not in cfl_fig8.splits(20)
