"""The scripts for SR-FCA's evidence: their cells, and a sheet at the smallest scale, read back and
gone on with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from benchmarks.grid import Grid
from benchmarks.papers import srfca_cifar, srfca_femnist, srfca_mnist, srfca_runs
from benchmarks.sheet import Row
from securecluster import Federation, Rotation
from securecluster.data import Source
from securecluster.data.datasets import digits
from securecluster.data.pools import ArrayPool
from securecluster.protocols import SRFCA, FedAvg

Filled = Callable[[Grid, Sequence[dict[str, Any]]], list[Row]]
SETTING: dict[str, Any] = {
    "data": "digits", "overlap": False, "clients": 8, "samples": 60, "clusters": 2,
    "model": "mlp-32", "rounds": 12,
}  # fmt: skip
SETTING |= {"optimizer": "sgd", "lr": 0.2, "batch_size": 20, "participation": 1.0}


def iterations(script: Any) -> set[tuple[str, int, int]]:
    """Return scenario, samples and iterations of a script's full scale."""
    found = set()
    for cell in script.cells("full", 1):
        batches = -(-cell["samples"] // cell["batch_size"])
        found.add((cell["scenario"], cell["samples"], cell["rounds"] * batches))
    return found


def test_the_cells_of_both_scripts() -> None:
    for script, methods in ((srfca_mnist, 7), (srfca_cifar, 4)):
        for scale in ("cpu", "full"):
            cells = script.cells(scale, 3)
            assert len(cells) == 3 * 2 * methods
            with_a_word = {cell["method"] for cell in cells if cell["paper"]}
            assert with_a_word == {"srfca"}
            assert len({cell["seed"] for cell in cells[: len(cells) // 3]}) == 1, (
                "one seed of everything comes first"
            )
    assert iterations(srfca_mnist) == {("rotation", 600, 252), ("inversion", 600, 276)}, (
        "250 and 280 iterations, in whole epochs"
    )
    assert iterations(srfca_cifar) == {("rotation", 3125, 2394), ("label-split", 4375, 2376)}
    assert all(cell["overlap"] for cell in srfca_cifar.cells("full", 1)), (
        "32 clients have more samples together than CIFAR-10"
    )


@pytest.mark.filterwarnings("ignore:no client's model ever answers")
@pytest.mark.exhaustive
def test_a_sheet_is_measured_drawn_and_gone_on_with(filled: Filled) -> None:
    cells = srfca_runs.cells({"rotation": SETTING}, list(srfca_runs.MADE), "cpu", 1, {"srfca": "p"})
    rows = filled(srfca_mnist.GRID, cells)
    done = {row["method"]: row for row in rows}
    assert list(done) == list(srfca_runs.MADE)
    federation = Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=8, samples=60, seed=0
    )
    training: dict[str, Any] = {
        "rounds": 12, "model": "mlp-32", "lr": 0.2, "batch_size": 20, "epochs": 1, "mask": "none",
    }  # fmt: skip
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
        assert {cell["clients"] for cell in cells} == {clients}
        assert {cell["lr"] for cell in cells} == {0.03}
        told = {cell["method"]: cell["clusters"] for cell in cells}
        assert [told[f"ifca k={k}"] for k in (2, 3, 4, 5)] == [2, 3, 4, 5]
        assert (told["srfca"], told["cfl"], told["global"]) == (None, None, None)
        assert {cell["starts"] for cell in cells if cell["method"].startswith("ifca")} == {10}
        assert {cell["refine"] for cell in cells if cell["method"] == "srfca"} == {1}


@pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")
@pytest.mark.exhaustive
def test_writers_without_true_clusters_are_measured(
    filled: Filled, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("securecluster.data.federation.source", writers)
    small = {"clients": 5, "samples": 20, "model": "mlp-32", "rounds": 6}
    cells = [{**cell, **small} for cell in srfca_femnist.cells("cpu", 1)]
    done = {row["method"]: row for row in filled(srfca_femnist.GRID, cells)}
    assert len(done) == 13
    assert {row["ari"] for row in done.values()} == {""}
    assert int(done["ifca k=2"]["found"]) <= 2 and int(done["local-kmeans k=3"]["found"]) <= 3
    assert done["global"]["found"] == "1" and done["local"]["found"] == "5"
    assert all(0 <= float(row["accuracy"]) <= 1 for row in done.values())
