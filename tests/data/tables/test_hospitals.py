"""Heart patients of four hospitals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from securecluster.data import Federation
from securecluster.data.datasets import source
from securecluster.data.locations import FOLDER
from securecluster.data.tables.hospitals import HOSPITALS, USUAL
from securecluster.errors import UsageError

PATIENT = "63,1,4,150,0,1,2,115,0,1,2,?,,"  # no cholesterol, ca and thal; then the target


def _write(folder: Path, rows: int = 100, header: str = ",".join(USUAL)) -> None:
    """Write the files of four hospitals, in each of which every second patient is ill."""
    place = folder / "tables" / "heart"
    place.mkdir(parents=True)
    for hospital in HOSPITALS:
        lines = [f"{header},target", *(f"{PATIENT}{row % 2 * 3}" for row in range(rows))]
        (place / f"processed.{hospital}.csv").write_text("\n".join(lines))


def test_hospitals_are_the_true_clusters_of_their_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    clients = Federation.simulate("hospitals", clients=8, seed=1)
    assert [name.rpartition("-")[0] for name in clients.names] == [*np.repeat(HOSPITALS, 2)]
    assert list(clients.truth or []) == [0, 0, 1, 1, 2, 2, 3, 3]
    row = dict(zip(USUAL, clients.shards[0].x[0].tolist(), strict=True))
    assert row["chol"] == row["ca"] == row["thal"] == 0
    assert (row["age"], row["thalach"]) == pytest.approx(((63 - 55) / 10, (115 - 140) / 25))
    assert set(clients.shards[0].y.tolist()) == {0, 1}


def test_the_real_hospitals_have_their_published_patients(real_data: Path) -> None:
    if not (real_data / "tables" / "heart").is_dir():
        pytest.skip(f"tables/heart is not in {real_data}")
    pool = source("hospitals").train
    patients = {name: int(np.sum(pool.groups == name)) for name in HOSPITALS}
    assert patients == {"cleveland": 303, "hungarian": 294, "switzerland": 123, "va": 200}
    ill = {name: int(pool.y[pool.groups == name].sum()) for name in HOSPITALS}
    assert ill == {"cleveland": 139, "hungarian": 106, "switzerland": 115, "va": 149}


def test_missing_or_other_files_are_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(UsageError, match="tables/heart: put UCI's heart disease data"):
        source("hospitals")
    monkeypatch.setenv(FOLDER, str(tmp_path))
    with pytest.raises(UsageError, match=r"no tables/heart/processed\.cleveland\.csv lies"):
        source("hospitals")
    _write(tmp_path, header="years")
    with pytest.raises(UsageError, match=r"is not UCI's .* with a header \(KeyError: 'age'\)"):
        source("hospitals")
