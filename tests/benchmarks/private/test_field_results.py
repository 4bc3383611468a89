"""The stored table of the field: new rows take the place of old ones of the same run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.private import field_results
from securecluster import __version__
from securecluster.studies import field_stored, sweep_tables


def _row(**values: Any) -> dict[str, Any]:
    row: dict[str, Any] = dict.fromkeys(field_stored.COLUMNS)
    return {**row, "hash": "h", "target_epsilon": 4.0, "variant": "fedavg", "seed": 1, **values}


def test_new_rows_replace_those_of_the_same_run_alone(tmp_path: Path) -> None:
    stored, measured = tmp_path / "stored.csv", tmp_path / "runs.csv"
    old = [_row(accuracy=0.1), _row(accuracy=0.2, seed=2), _row(accuracy=0.3, hash="other")]
    sweep_tables.write(stored, old)
    new = [_row(accuracy=0.7, seconds=3.0), _row(accuracy=0.8, target_epsilon=1.0)]
    sweep_tables.write(measured, new)
    field_results.store(measured, stored)
    found = {(r["hash"], r["target_epsilon"], r["seed"]): r["accuracy"] for r in _read(stored)}
    assert found == {
        ("h", 1.0, 1): 0.8,
        ("h", 4.0, 1): 0.7,
        ("h", 4.0, 2): 0.2,
        ("other", 4.0, 1): 0.3,
    }
    assert {row["seconds"] for row in _read(stored)} == {None}
    versions = {row["accuracy"]: row["version"] for row in _read(stored)}
    assert versions[0.7] == f"{__version__}+{field_results.commit()}" and versions[0.2] is None


def _read(path: Path) -> list[dict[str, Any]]:
    return field_stored.read(path)
