"""Heart patients of four hospitals, which are clients' true clusters."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path

import numpy as np

from securecluster.core.randomness import Randomness
from securecluster.data.dataset import Source
from securecluster.data.locations import FOLDER, folder, the_file
from securecluster.data.pools import ArrayPool, Features, Labels
from securecluster.errors import UsageError

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
ORIGIN = "UCI's heart disease data, https://archive.ics.uci.edu/dataset/45"
PART = 40  # patients of a client, at least
# a usual value of each column, and a usual distance from it: public, of no patient of the set
USUAL = {
    "age": (55, 10), "sex": (0.5, 0.5), "cp": (2.5, 1), "trestbps": (130, 20), "chol": (240, 60),
    "fbs": (0.5, 0.5), "restecg": (1, 1), "thalach": (140, 25), "exang": (0.5, 0.5),
    "oldpeak": (1, 1), "slope": (2, 1), "ca": (1, 1), "thal": (5, 2),
}  # fmt: skip
MISSING = ("", "?")


def hospitals() -> Source:
    """Return heart patients of four hospitals: 13 numbers a patient, and whether it is ill.

    A client is a part of one hospital's patients (Janosi, Steinbrunn, Pfisterer, Detrano 1988, UCI
    45); its group is the hospital. Columns are shifted and scaled by public numbers, `USUAL`; 0 is
    a value that is missing, as cholesterol is where it is 0.

    Raises:
        UsageError: no folder of data sets is named, or a file is missing or has another layout.
    """
    data_folder = folder()
    if data_folder is None:
        raise UsageError(f"hospitals are read from {FOLDER}/tables/heart: put {ORIGIN} there")
    return _hospitals(data_folder)


@cache
def _hospitals(data_folder: Path) -> Source:
    """Return the patients in a folder."""
    features, labels, owners, groups = [], [], [], []
    for hospital in HOSPITALS:
        x, y = _patients(the_file(data_folder, f"tables/heart/processed.{hospital}.csv"))
        order = Randomness(0).generator("hospitals", hospital).permutation(len(y))
        parts = np.array_split(order, max(1, len(y) // PART))
        for number, part in enumerate(parts):
            features.append(x[part])
            labels.append(y[part])
            owners += [f"{hospital}-{number}"] * len(part)
            groups += [hospital] * len(part)
    pool = ArrayPool(
        np.concatenate(features), np.concatenate(labels), np.array(owners), np.array(groups)
    )
    return Source("hospitals", 2, (len(USUAL),), pool)


def _patients(path: Path) -> tuple[Features, Labels]:
    """Return the features and labels of a hospital's patients.

    Args:
        path: of the file, whose header has the names of `USUAL` and "target".

    Raises:
        UsageError: it has another layout.
    """
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    try:
        features = [[_scaled(row[name], name) for name in USUAL] for row in rows]
        labels = [float(row["target"]) > 0 for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{path} is not {ORIGIN} with a header ({type(error).__name__}: {error}): put it there"
        ) from None
    return np.array(features, np.float32), np.array(labels, np.int64)


def _scaled(text: str, name: str) -> float:
    """Return a value in units of its column; 0 where it is missing."""
    if text in MISSING or (name == "chol" and float(text) == 0):
        return 0.0
    centre, distance = USUAL[name]
    return (float(text) - centre) / distance
