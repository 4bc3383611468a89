"""Federations whose clusters have a known reason that nobody simulated.

python -m benchmarks.clusters.natural [--seeds 1 2 3 4 5] [--settings heart]

- `heart`: a client is a part of one hospital's patients (heart disease, UCI 45: 60 rows, four
  hospitals); labels are disease or none.
- `wine`: a part of one kind of wine (UCI 186: 150 rows, eight parts of red and twelve of white);
  quality from 6, or below.
- `tcga`: a part of the breast cancer patients of one region of the USA (TCGA as in FLamby: 30 rows,
  four regions), death within five years or not; who was lost before is left out.
- `heart, one-hot` and `tcga, one-hot`: the same clients, whose tables have a column of 0 and 1 for
  each category, for each interval of numbers between public cuts, and for a cell that is missing.
- `writers`: a writer of FEMNIST, half of them at school (hsf_4), half census employees.

The seed draws rows or writers. Each client of a table scales its own columns to mean 0 and variance
1 over its training rows and puts 0 for what is missing; columns of 0 and 1 stay as they are. A
third of the rows is held out.

Fine-tuning is the best of six forms on a seed of its own (`benchmarks.papers.rivals`). Private runs
have a target ε of 8, 4 or 2 for an example. Models are linear, the learning rate is 0.1, and other
options are defaults. Tables are in the folder tables of SECURECLUSTER_DATA.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers.rivals import KEY, Comparison, fill, tuned
from benchmarks.sheet import Cell
from benchmarks.table import UNRECORDED
from securecluster import Federation
from securecluster.clustering.metrics import mean
from securecluster.core.randomness import Randomness
from securecluster.data.datasets import image_set
from securecluster.protocols import (
    CFL,
    FLHC,
    SRFCA,
    ClusteringProtocol,
    FedAvg,
    Local,
    OneShot,
    Signature,
)

Table = NDArray[np.float64]
Clients = dict[str, tuple[NDArray[np.float32], NDArray[np.int64]]]

COLUMNS = (*KEY, "ari", "clusters", "accuracy")
SEEDS = (1, 2, 3, 4, 5)
ROUNDS = 40
HELD_OUT = 1 / 3
WRITERS = 12  # of a cluster
SCHOOL = 4  # hsf_4 of NIST SD19: pupils
FIVE_YEARS = 5 * 365.0  # days
CHARACTERS = 62


@dataclass(frozen=True)
class Parts:
    """Tables of which clients are parts.

    Args:
        rows: of a client, about.
        tables: returns by source the most clients and the table, whose last column is the label.
        positive_from: the smallest value of a positive label.
        cuts: between the intervals of each column that have a column of 0 and 1 of their own; those
            of the last given column count for all further ones. None takes numbers as they are.
    """

    rows: int
    tables: Callable[[], dict[str, tuple[int, Table]]]
    positive_from: float
    cuts: tuple[tuple[float, ...], ...] | None = None


def hospitals() -> dict[str, tuple[int, Table]]:
    """Return the patients of four hospitals."""
    names = ("cleveland", "hungarian", "switzerland", "va")
    return {name: (5, _numbers(f"heart/processed.{name}.csv")) for name in names}


def wines() -> dict[str, tuple[int, Table]]:
    """Return red and white wines."""
    return {
        "red": (8, _numbers("wine/winequality-red.csv")),
        "white": (12, _numbers("wine/winequality-white.csv")),
    }


def regions() -> dict[str, tuple[int, Table]]:
    """Return the patients of American regions, whose label is 1 if they died within five years."""
    import pandas as pd

    folder = _folder() / "tcga"
    patients = pd.read_csv(folder / "brca.csv")
    centres = pd.read_csv(folder / "centers.csv", keep_default_na=False)
    region_of = dict(zip(centres["TSS Code"], centres["Region"], strict=True))
    region = patients["pid"].str.split("-").str[1].map(region_of)
    known = (patients["T"] >= FIVE_YEARS) | (patients["E"] == 1)
    died = (patients["T"] < FIVE_YEARS).astype(float)
    table = patients.drop(columns=["pid", "T", "E"]).assign(died=died)
    return {
        name: (5, table[known & (region == name)].to_numpy(np.float64))
        for name in ("Northeast", "South", "Midwest", "West")
    }


BINARY = (0.5,)
AGES = (40, 50, 60, 70)
# age, sex, kind of pain, pressure, cholesterol, sugar, ECG, heart rate, angina, oldpeak, slope,
# vessels, thal; a cholesterol of 0 was not measured
OF_HEART = (
    AGES, BINARY, (1.5, 2.5, 3.5), (120, 140, 160), (1, 200, 240, 280), BINARY, (0.5, 1.5),
    (100, 120, 140, 160), BINARY, (0.5, 1.5, 2.5), (1.5, 2.5), (0.5, 1.5, 2.5), (4.5, 6.5),
)  # fmt: skip
PARTS = {
    "heart": Parts(60, hospitals, 1),
    "wine": Parts(150, wines, 6),
    "tcga": Parts(30, regions, 1),
    "heart, one-hot": Parts(60, hospitals, 1, OF_HEART),
    "tcga, one-hot": Parts(30, regions, 1, (AGES, BINARY)),
}
PRIVATE: dict[str, Any] = {"target_epsilon": 4.0, "dp_unit": "example"}
TRAINING: dict[str, Any] = {"model": "linear", "lr": 0.1}

PRIVATE_TOO: dict[str, Callable[..., ClusteringProtocol]] = {
    "fedavg": FedAvg, "cfl": CFL, "flhc": FLHC, "oneshot": OneShot, "signature": Signature,
}  # fmt: skip
METHODS: dict[str, Callable[[], ClusteringProtocol]] = {
    "fedavg": lambda: FedAvg(**TRAINING, rounds=ROUNDS),
    "local": lambda: Local(**TRAINING, rounds=ROUNDS),
    "cfl": lambda: CFL(**TRAINING, rounds=ROUNDS),
    "flhc": lambda: FLHC(**TRAINING, rounds=ROUNDS),
    "srfca": lambda: SRFCA(**TRAINING, rounds=ROUNDS // 2, local_rounds=ROUNDS // 2),
    "signature": lambda: Signature(**TRAINING, rounds=ROUNDS),
    "fedavg, ε 4": lambda: FedAvg(**TRAINING, rounds=ROUNDS, **PRIVATE),
    "signature, ε 4": lambda: Signature(**TRAINING, rounds=ROUNDS, **PRIVATE),
    "oneshot": lambda: OneShot(**TRAINING, rounds=ROUNDS),
}
for name, method in PRIVATE_TOO.items():
    for epsilon in (8.0, 2.0):
        options = {**TRAINING, **PRIVATE, "rounds": ROUNDS, "target_epsilon": epsilon}
        METHODS[f"{name}, ε {epsilon:g}"] = partial(method, **options)
options = {**PRIVATE, "rounds": ROUNDS // 2, "local_rounds": ROUNDS // 2}
for epsilon in (8.0, 2.0):
    METHODS[f"srfca, ε {epsilon:g}"] = partial(
        SRFCA, **{**TRAINING, **options, "target_epsilon": epsilon}
    )


def federation(name: str, seed: int) -> Federation:
    """Return a setting's clients.

    Args:
        name: among `SETTINGS`.
        seed: of the clients, the held-out rows and the run.
    """
    clients, truth = writers(seed) if name == "writers" else parts_of(PARTS[name], seed)
    held_out = {}
    for client, (_, y) in clients.items():
        held_out[client] = np.arange(len(y)) >= _training_rows(len(y))
    classes = CHARACTERS if name == "writers" else 2
    return Federation.from_arrays(clients, test=held_out, truth=truth, classes=classes, seed=seed)


def parts_of(parts: Parts, seed: int) -> tuple[Clients, dict[str, int]]:
    """Return parts of tables as clients, and the tables that they are of.

    Args:
        parts: the tables.
        seed: of the parts.
    """
    clients: Clients = {}
    truth: dict[str, int] = {}
    for cluster, (source, (most, table)) in enumerate(parts.tables().items()):
        order = Randomness(seed).generator("natural", source).permutation(len(table))
        # a source with few rows has smaller parts, but no fewer than one
        count = max(1, round(len(table) / parts.rows))
        for number, part in enumerate(np.array_split(order, count)[:most]):
            client = f"{source}-{number}"
            clients[client] = _samples(table[part[: parts.rows]], parts)
            truth[client] = cluster
    return clients, truth


def writers(seed: int) -> tuple[Clients, dict[str, int]]:
    """Return writers of FEMNIST as clients, and which of them were at school.

    Args:
        seed: of the writers, and of the order of their images.
    """
    import pandas as pd

    (file,) = sorted((_folder().parent / "femnist").glob("train-*.parquet"))
    forms = pd.read_parquet(file, columns=["writer_id", "hsf_id"]).drop_duplicates("writer_id")
    pool = image_set("femnist").train
    assert pool.owners is not None
    clients: Clients = {}
    truth: dict[str, int] = {}
    randomness = Randomness(seed)
    for cluster, at_school in enumerate((True, False)):
        names = forms["writer_id"][(forms["hsf_id"] == SCHOOL) == at_school].to_numpy()
        draw = randomness.generator("natural", cluster)
        for name in draw.permutation(names)[:WRITERS]:
            rows = draw.permutation(np.flatnonzero(pool.owners == name))
            images = pool.read(rows).reshape(len(rows), -1)
            clients[str(name)] = (images, pool.y[rows])
            truth[str(name)] = cluster
    return clients, truth


def _folder() -> Path:
    """Return the folder of tables."""
    return Path(os.environ["SECURECLUSTER_DATA"]) / "tables"


def _numbers(file: str) -> Table:
    """Return a file's numbers, NaN where one is missing."""
    import pandas as pd

    table: Table = pd.read_csv(_folder() / file, na_values="?").to_numpy(np.float64)
    return table


def _one_hot(features: Table, cuts: tuple[tuple[float, ...], ...]) -> Table:
    """Return a column of 0 and 1 for each interval of a column, and for what is missing in it.

    Args:
        features: (n, columns), NaN where one is missing.
        cuts: as of `Parts`.
    """
    blocks = []
    for number, column in enumerate(features.T):
        edges = cuts[min(number, len(cuts) - 1)]
        # NaN is beyond all cuts
        places = np.where(np.isnan(column), len(edges) + 1, np.digitize(column, edges))
        blocks.append(np.eye(len(edges) + 2)[places])
    return np.hstack(blocks)


def _samples(rows: Table, parts: Parts) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return features in a client's own units, or of 0 and 1, and labels.

    Args:
        rows: (n, columns), the last one is the label.
        parts: how the label and the columns are read.
    """
    labels = (rows[:, -1] >= parts.positive_from).astype(np.int64)
    training = slice(_training_rows(len(rows)))
    features = rows[:, :-1]
    if parts.cuts is not None:
        return _one_hot(features, parts.cuts).astype(np.float32), labels
    known = ~np.isnan(features)
    count = known[training].sum(0).clip(1)
    means = np.where(known, features, 0.0)[training].sum(0) / count
    centred = np.where(known, features - means, 0.0)
    deviation = np.sqrt((centred[training] ** 2).sum(0) / count)
    scaled = centred / np.where(deviation > 0, deviation, 1.0)
    return scaled.astype(np.float32), labels


def _training_rows(rows: int) -> int:
    """Return how many of a client's rows are not held out."""
    return round(rows * (1 - HELD_OUT))


def measured(cell: Cell) -> dict[str, Any]:
    """Return a cell with its clusters and accuracy.

    Args:
        cell: one of `cells`.
    """
    clients = federation(cell["scenario"], cell["seed"])
    if cell["method"] == "finetune":
        protocol = tuned(TRAINING, ROUNDS, cell["share"], cell["rate"])
    else:
        protocol = METHODS[cell["method"]]()
    fitted = protocol.fit(clients, UNRECORDED)
    assert fitted.agreement_ is not None
    return {
        **cell,
        "ari": round(fitted.agreement_["ari"], 4),
        "clusters": len(set(fitted.labels_.tolist())),
        "accuracy": round(mean(fitted.scores_) or 0.0, 4),
    }


SETTINGS = (*PARTS, "writers")
COMPARISON = Comparison("natural", SETTINGS, SEEDS, tuple(METHODS), COLUMNS, measured)

if __name__ == "__main__":
    fill(COMPARISON, __doc__)
