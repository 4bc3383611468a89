"""The scripts for SR-FCA's evidence: their cells, and a sheet at the smallest scale, read back and
gone on with.
"""

from __future__ import annotations

import csv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.papers import srfca_cifar, srfca_femnist, srfca_mnist, srfca_runs
from securecluster import Federation, Rotation
from securecluster.data import Source
from securecluster.data.datasets import digits
from securecluster.data.pools import ArrayPool
from securecluster.protocols import SRFCA, FedAvg

SETTING: dict[str, Any] = {
    "data": "digits",
    "overlap": False,
    "clients": 8,
    "samples": 60,
    "clusters": 2,
    "model": "mlp-32",
    "rounds": 12,
}
SETTING |= {"optimizer": "sgd", "lr": 0.2, "batch_size": 20, "participation": 1.0}
OPTIONS = SimpleNamespace(seeds=1, scale="cpu", minutes=10.0)


def test_the_cells_of_both_scripts() -> None:
    for scale in ("cpu", "full"):
        mnist, cifar = srfca_mnist.cells(scale, 3), srfca_cifar.cells(scale, 3)
        assert (len(mnist), len(cifar)) == (3 * 2 * 7, 3 * 2 * 4)
        for cells in (mnist, cifar):
            assert len(
                {tuple(sorted((k, str(v)) for k, v in cell.items())) for cell in cells}
            ) == len(cells)
            assert [bool(cell["paper"]) for cell in cells] == [
                cell["method"] == "srfca" for cell in cells
            ]
            assert len({cell["seed"] for cell in cells[: len(cells) // 3]}) == 1, (
                "one seed of everything comes first"
            )
    full = {
        (c["scenario"], c["samples"], c["rounds"] * -(-c["samples"] // c["batch_size"]))
        for c in srfca_mnist.cells("full", 1)
    }
    assert full == {("rotation", 600, 252), ("inversion", 600, 276)}, (
        "250 and 280 iterations, in whole epochs"
    )
    full = {
        (c["scenario"], c["samples"], c["rounds"] * -(-c["samples"] // c["batch_size"]))
        for c in srfca_cifar.cells("full", 1)
    }
    assert full == {("rotation", 3125, 2394), ("label-split", 4375, 2376)}, "2400 iterations"
    assert all(cell["overlap"] for cell in srfca_cifar.cells("full", 1)), (
        "32 clients have more samples together than CIFAR-10"
    )


@pytest.mark.exhaustive
def test_a_sheet_is_measured_drawn_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def of(scale: str, seeds: int) -> list[Any]:
        return srfca_runs.cells(
            {"rotation": SETTING}, list(srfca_runs.MADE), scale, seeds, {"srfca": "p"}
        )

    srfca_runs.table("t", of, OPTIONS)
    path = Path("benchmarks/results/papers/t.csv")
    rows = list(csv.DictReader(path.read_text().splitlines()[1:]))
    done = {row["method"]: row for row in rows if row["status"] == "done"}
    assert list(done) == list(srfca_runs.MADE)
    assert [row["scale"] for row in rows if row["status"] != "done"] == ["full"] * len(done)
    assert path.with_name("t.png").read_bytes().startswith(b"\x89PNG")
    federation = Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=8, samples=60, seed=0
    )
    training: dict[str, Any] = {
        "rounds": 12,
        "model": "mlp-32",
        "lr": 0.2,
        "batch_size": 20,
        "epochs": 1,
        "mask": "none",
    }
    fedavg = FedAvg(**training).fit(federation)
    assert float(done["global"]["accuracy"]) == pytest.approx(np.mean(fedavg.accuracy_), abs=1e-5)
    own = SRFCA(**training, local_rounds=12, trim=0.15, refine=2).fit(federation)
    assert own.agreement_ is not None
    row = done["srfca"]
    assert float(row["accuracy"]) == pytest.approx(np.mean(own.accuracy_), abs=1e-5)
    assert (row["exact"], int(row["found"])) == (str(own.agreement_["exact"]), len(own.models_))
    assert int(row["bytes"]) == own.bytes_["up"] + own.bytes_["down"]
    d = 64 * 32 + 32 + 32 * 10 + 10
    assert 0 <= int(row["relayed"]) - 4 * 8 * 7 * d < 8 * 2000, (
        "every model to everyone else, and little beside"
    )
    assert float(row["joined"]) < float(row["lambda"]) < float(row["apart"])
    before = path.read_bytes()
    monkeypatch.setattr(srfca_runs, "measure", None)
    srfca_runs.table("t", of, OPTIONS)
    assert path.read_bytes() == before


def writers(name: str) -> Source:
    """Digits that belong to twelve writers, in place of FEMNIST."""
    assert name == "femnist"
    pool = digits().train
    y = np.asarray(pool.y)
    names = np.array([f"w{k % 12:02}" for k in range(len(y))])
    return Source(name, 10, (1, 8, 8), ArrayPool(pool.read(np.arange(len(y))), y, names))


def test_the_cells_of_femnist() -> None:
    for scale, clients in (("cpu", 30), ("full", 100)):
        cells = srfca_femnist.cells(scale, 2)
        assert len(cells) == 2 * (5 + 2 * 4)
        assert len({str(sorted(cell.items(), key=str)) for cell in cells}) == len(cells)
        assert {cell["clients"] for cell in cells} == {clients}
        assert {cell["lr"] for cell in cells} == {0.03}
        told = {cell["method"]: cell["clusters"] for cell in cells}
        assert [told[f"ifca k={k}"] for k in (2, 3, 4, 5)] == [2, 3, 4, 5]
        assert (told["srfca"], told["cfl"], told["global"]) == (None, None, None)
        assert {cell["starts"] for cell in cells if cell["method"].startswith("ifca")} == {10}
        assert {cell["refine"] for cell in cells if cell["method"] == "srfca"} == {1}


@pytest.mark.exhaustive
def test_writers_without_true_clusters_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("securecluster.data.federation.source", writers)
    small = {"clients": 5, "samples": 20, "model": "mlp-32", "rounds": 2}

    def of(scale: str, seeds: int) -> list[Any]:
        return [{**cell, **small} for cell in srfca_femnist.cells(scale, seeds)]

    sheet = srfca_runs.table("f", of, OPTIONS)
    rows = list(csv.DictReader(sheet.path.read_text().splitlines()[1:]))
    done = {row["method"]: row for row in rows if row["status"] == "done"}
    assert len(done) == 13
    assert {row["ari"] for row in done.values()} == {""}
    assert int(done["ifca k=2"]["found"]) <= 2 and int(done["local-kmeans k=3"]["found"]) <= 3
    assert done["global"]["found"] == "1" and done["local"]["found"] == "5"
    assert all(0 <= float(row["accuracy"]) <= 1 for row in done.values())
    assert sheet.path.with_name("f.png").read_bytes().startswith(b"\x89PNG")
