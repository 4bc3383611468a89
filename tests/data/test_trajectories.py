"""Trajectories read from small files made by hand.

The oracle is a plain loop over the same rows.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster.data import Federation
from securecluster.data.datasets import FOLDER, source
from securecluster.errors import UsageError
from securecluster.models.objectives import Trajectory

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = 40 + 30 + 59 + 12 + 14 + 11


def write(path: Path, **columns: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three users in it, which the environment names."""
    write_mobility(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    return tmp_path


def write_mobility(
    folder: Path, users: tuple[str, ...] = ("a", "b", "c"), **changed: Any
) -> list[tuple[str, int, float, float, int]]:
    """Rows (user, t, x, y, leg) in random order: two legs each, `b` misses a sample within a leg,
    `c` has hardly any.
    """
    draw, rows = np.random.default_rng(0), []
    for user, legs in (("a", (40, 30)), ("b", (60, 12)), ("c", (14, 11))):
        time = 1000
        for leg, length in enumerate(legs):
            for k in range(length):
                if (user, leg, k) != ("b", 0, 30):
                    x, y = float(draw.uniform(-1, 10_000)), float(draw.uniform(0, 6200))
                    rows.append((user, time + 10 * k, x, y, leg))
            # the next leg starts ten seconds after, and is another one all the same
            time += 10 * length
    draw.shuffle(rows)
    names = ("user_id", "t", "x", "y", "leg")
    columns: dict[str, Any] = {
        name: [row[k] for row in rows] for k, name in enumerate(names)
    } | changed
    given = {name: values for name, values in columns.items() if values is not None}
    write(folder / "most_mobility" / "traces.parquet", **given)
    slices = ["3to1" if u == "b" else "1to1" for u in users]
    write(folder / "most_mobility" / "users.parquet", user_id=list(users), slice=slices)
    return rows


def test_windows_of_a_track_lie_within_a_leg(folder: Path) -> None:
    rows = write_mobility(folder)
    found = source("mobility")
    assert found.objective == Trajectory((10_000, 6_200))
    assert (found.classes, found.shape, found.train.gap) == (2, (10, 2), 10)
    expected: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {"a": [], "b": [], "c": []}
    for user in expected:
        own = sorted((r for r in rows if r[0] == user), key=lambda r: r[1])
        for i in range(len(own) - 10):
            span = own[i : i + 11]
            if len({r[4] for r in span}) == 1 and span[-1][1] - span[0][1] == 100:
                spots = np.array([(r[2] / 10_000, r[3] / 6_200) for r in span])
                expected[user].append((spots[:10], spots[10]))
    assert [len(v) for v in expected.values()] == [30 + 20, 20 + 19 + 2, 4 + 1]
    assert found.train.owners is not None and set(found.train.owners) == {
        "a",
        "b",
    }  # of 5 windows one is held out, and a gap of ten is too much
    x = found.train.read(np.arange(len(found.train.y)))
    assert x.dtype == found.train.y.dtype == np.float32
    for user in ("a", "b"):
        own_rows = found.train.owners == user
        assert np.abs(x[own_rows] - np.stack([a for a, _ in expected[user]])).max() < 1e-6
        assert (
            np.abs(found.train.y[own_rows] - np.stack([b for _, b in expected[user]])).max() < 1e-6
        )
    assert found.train.groups is not None
    pairs = set(zip(found.train.owners, found.train.groups, strict=True))
    assert pairs == {("a", "1to1"), ("b", "3to1")}


def test_no_position_lies_on_both_sides_of_the_gap(folder: Path) -> None:
    federation = Federation.simulate("mobility", clients=2, seed=0)
    assert federation.scenario == "natural"
    assert federation.names == ("a", "b")
    assert federation.truth == (0, 1)
    for shard, count in zip(federation.shards, (50, 41), strict=True):
        assert (len(shard.y), len(shard.y_test)) == (count - count // 5 - 10, count // 5)
        trained = {tuple(p) for p in np.concatenate([shard.x.reshape(-1, 2), shard.y]).tolist()}
        assert not trained & {
            tuple(p) for p in np.concatenate([shard.x_test.reshape(-1, 2), shard.y_test]).tolist()
        }
    first = Federation.simulate("mobility", clients=2, samples=8, seed=0).shards[0]
    assert np.array_equal(first.y, federation.shards[0].y[:8])
    assert np.array_equal(first.y_test, federation.shards[0].y_test[:2])


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"users": ("a", "c")}, "users.parquet has no row for user 'b'"),
        ({"x": [float("nan")] * ROWS}, "column 'x' of .*traces.parquet has a value that is NaN"),
        ({"t": ["now"] * ROWS}, "column 't' of .*traces.parquet holds .*string, not numbers"),
        ({"user_id": [1] * ROWS}, "column 'user_id' of .*traces.parquet holds int64, not text"),
        ({"leg": None}, "unknown column of traces.parquet 'leg'"),
        (
            {"leg": list(range(ROWS))},
            "no user of .*traces.parquet has a held-out window of 11 positions",
        ),
        (
            {"user_id": [str(k) for k in range(ROWS)]},
            "no user of .*traces.parquet has a held-out window of 11 positions",
        ),
    ],
)
def test_what_cannot_be_read_is_said_in_one_sentence(
    changed: dict[str, Any], sentence: str, folder: Path
) -> None:
    write_mobility(folder, **changed)
    with pytest.raises(UsageError, match=sentence) as caught:
        source("mobility")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["traces", "users"])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / "most_mobility" / f"{name}.parquet").unlink()
    with pytest.raises(
        UsageError, match=f"where no most_mobility/{name}.parquet lies: put it there$"
    ):
        source("mobility")


def test_positions_beyond_single_precision_are_refused_without_a_warning(folder: Path) -> None:
    write_mobility(folder, x=[1e300] * ROWS)
    with pytest.raises(UsageError, match="NaN or infinite"):
        Federation.simulate("mobility", clients=2, seed=0)


def test_mobility_is_on_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    with pytest.raises(UsageError, match="mobility is no set of the hub: set SECURECLUSTER_DATA"):
        source("mobility")


def test_a_set_is_read_once(folder: Path) -> None:
    assert source("mobility") is source("mobility")
