"""What is made of NSIM's layers and masked models: the pieces against what they undo, and the
script at the smallest scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.grid import Grid
from benchmarks.papers.nsim import masks as nsim_masks
from benchmarks.papers.nsim import runs as nsim_runs
from benchmarks.sheet import Row
from securecluster.protocols.nsim.random_walks import Format

SMALL = {
    "scale": "cpu", "synthetic": 12, "clients": 6, "local_rounds": 1, "epochs": 1, "batch_size": 32,
    "lr": 0.1, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("signed", [False, True])
def test_columns_are_put_where_the_guess_has_them(signed: bool) -> None:
    draw = np.random.default_rng(0)
    true = draw.normal(size=(30, 50))
    order, signs = draw.permutation(50), draw.choice([-1, 1], 50) if signed else np.ones(50)
    guess = true + 0.3 * draw.normal(size=true.shape)
    found, share = nsim_masks.assigned(true[:, order] * signs, guess, signed)
    np.testing.assert_array_equal(found, true)
    assert share == np.mean((order == np.arange(50)) & (signs > 0))
    assert nsim_masks.assigned(true, guess, signed)[1] == 1


def test_rows_are_turned_to_the_guess_and_keep_their_inner_products() -> None:
    draw = np.random.default_rng(0)
    true, other = draw.normal(size=(2, 8, 40))
    np.testing.assert_allclose(nsim_masks.turned(true @ true.T, true), true, atol=1e-10)
    found = nsim_masks.turned(true @ true.T, other)
    np.testing.assert_allclose(found @ found.T, true @ true.T, atol=1e-10)
    assert np.linalg.norm(found - other) < np.linalg.norm(true - other)


def test_a_linear_map_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    layers, seen, linear = (
        draw.normal(size=(40, 5)),
        draw.normal(size=(7, 5)),
        draw.normal(size=(5, 9)),
    )
    monkeypatch.setattr(nsim_masks, "RIDGE", 1e-9)
    np.testing.assert_allclose(
        nsim_masks.regressed(layers, layers @ linear + 3, seen), seen @ linear + 3, atol=1e-6
    )


@pytest.mark.exhaustive
@pytest.mark.usefixtures("traces")
def test_the_script_measures_both_layers_and_starts(
    filled: Callable[[Grid, Sequence[dict[str, Any]]], list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nsim_runs, "Format", lambda: Format(samples=(30, 60)))
    for kept in (nsim_runs.real_users, nsim_runs.synthetic_users):
        kept.cache_clear()
    nsim_runs._kept.clear()
    cells = [
        {**SMALL, "init": "common", "layer": "last"},
        {**SMALL, "init": "independent", "layer": "hidden"},
    ]
    rows = filled(nsim_masks.GRID, cells)
    for row in rows:
        assert all(float(row[name]) > 0 for name in nsim_masks.ERRORS)
        assert bool(row["seeded"]) == (row["init"] == "independent")
    assert float(rows[1]["seeded"]) > 0.9
