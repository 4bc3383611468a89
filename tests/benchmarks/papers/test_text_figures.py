"""The scripts on text at the smallest scale: what they measure, that they go on, and what they
draw.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.grid import Grid
from benchmarks.papers import shakespeare
from benchmarks.papers.cfl import fig9 as cfl_fig9
from benchmarks.sheet import Row
from securecluster import Federation
from securecluster.data import Natural
from securecluster.data.datasets import FOLDER
from securecluster.protocols import FedAvg

Filled = Callable[[Grid, Sequence[dict[str, Any]]], list[Row]]
WORDS = (
    "one two three four five",
    "six seven eight nine ten",
    "red green blue black white",
    "north south east west up",
)


@pytest.fixture(autouse=True)
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A little text of both kinds."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "data"))
    rng = np.random.default_rng(0)
    for name in ("ag_news", "shakespeare"):
        (tmp_path / "data" / name).mkdir(parents=True)
    articles = [
        (label, " ".join(rng.permutation(words.split())))
        for _ in range(160)
        for label, words in enumerate(WORDS)
    ]
    table = pa.table(
        {
            "text": [text for _, text in articles],
            "label": pa.array([label for label, _ in articles], pa.int64()),
        }
    )
    for split in ("train", "test"):
        pq.write_table(table, tmp_path / "data/ag_news" / f"{split}.parquet")
    roles = {
        f"ROLE_{k}": f"to be {k} or not to be, {words}. " * 20 for k, words in enumerate(WORDS)
    }
    pq.write_table(
        pa.table({"character_id": list(roles), "text": list(roles.values())}),
        tmp_path / "data/shakespeare/shakespeare.parquet",
    )


@pytest.mark.exhaustive
def test_figure_9(filled: Filled) -> None:
    assert cfl_fig9.splits(100) == [30, 60, 90]
    assert [cell["rounds"] for cell in cfl_fig9.cells("full", 2)] == [100, 100]
    small = {
        **cfl_fig9.COMMON,
        "clients": 4,
        "clusters": 2,
        "samples": 10,
        "epochs": 1,
        "batch_size": 10,
        "rounds": 10,
        "lr": 2.0,
    }
    (row,) = filled(cfl_fig9.GRID, [{"scale": "cpu", **small, "seed": 0, "paper": "p"}])
    curves = {
        name: [float(word) for word in row[name].split()]
        for name in ("shared", "perplexity_0", "perplexity_1", "ari")
    }
    assert {len(curve) for curve in curves.values()} == {10}
    assert row["splits"] == "3" and row["exact"] == "True"
    both = np.mean([curves["perplexity_0"], curves["perplexity_1"]], axis=0)
    assert both[:3] == pytest.approx(curves["shared"][:3], rel=1e-4), (
        "before a split there is one model"
    )
    assert both[-1] < curves["shared"][-1], "the topics have no word in common"
    assert curves["ari"][:2] == [0, 0] and curves["ari"][3:] == [1] * 7
    assert float(row["perplexity_after"]) == pytest.approx(both[-1], rel=1e-4)


@pytest.mark.exhaustive
def test_shakespeare(filled: Filled) -> None:
    full = shakespeare.cells("full", 2)
    assert len(full) == 10 and {cell["model"] for cell in full} == {"lstm-chars-256"}
    cells = [
        {**cell, "rounds": 3, "clients": 3, "samples": 5, "lr": 0.01}
        for cell in shakespeare.cells("cpu", 1)
    ]
    rows = {row["method"]: row for row in filled(shakespeare.GRID, cells)}
    assert list(rows) == ["global", "local", "cfl", "flhc", "srfca"] == list(shakespeare.MADE)
    assert (rows["global"]["found"], rows["local"]["found"]) == ("1", "3")
    federation = Federation.simulate(
        "shakespeare", scenario=Natural(), clients=3, samples=5, seed=0
    )
    training: dict[str, Any] = {
        "rounds": 3, "lr": 0.01, "optimizer": "adam", "epochs": 1, "batch_size": 10,
    }  # fmt: skip
    scores = FedAvg(**training).fit(federation).scores_
    assert float(rows["global"]["perplexity"]) == pytest.approx(np.mean(scores), rel=1e-4)
    assert float(rows["global"]["worst"]) == pytest.approx(np.max(scores), rel=1e-4)
