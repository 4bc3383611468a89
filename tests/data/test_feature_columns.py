"""Columns of tables: matched by name, kept, and refused by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation
from securecluster.errors import UsageError
from securecluster.protocols import IFCA, FedAvg

X = np.random.default_rng(0).normal(size=(20, 3))
Y = np.arange(20) % 2
ABC = ["a", "b", "c"]


class Table:
    """A table with no library behind it."""

    def __init__(self, values: Any, columns: list[Any]) -> None:
        self.values, self.columns = np.asarray(values), columns

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.values if dtype is None else self.values.astype(dtype)


def plain() -> Federation:
    """The federation of arrays in the right order."""
    return Federation.from_arrays({"ann": (X, Y), "bob": (X + 1, Y)}, seed=0)


def tables(kind: str, values: Any, columns: list[str]) -> Any:
    """A table of a library."""
    if kind == "own":
        return Table(values, columns)
    library = pytest.importorskip(kind)
    if kind == "pandas":
        return library.DataFrame(values, columns=columns)
    return library.table(dict(zip(columns, np.asarray(values).T, strict=True)))


@pytest.mark.parametrize("kind", ["own", "pandas", "pyarrow"])
def test_columns_are_matched_by_name_and_the_first_clients_order_rules(kind: str) -> None:
    moved = tables(kind, (X + 1)[:, [2, 0, 1]], ["c", "a", "b"])
    federation = Federation.from_arrays(
        {"ann": (tables(kind, X, ABC), Y), "bob": (moved, Y)}, seed=0
    )
    assert federation.digest() == plain().digest()
    assert federation.feature_names == ("a", "b", "c") and plain().feature_names is None
    assert federation.select([1]).feature_names == ("a", "b", "c")
    assert "features a, b, c" in repr(federation)


def test_held_out_tables_are_matched_too() -> None:
    test = {"ann": (Table(X[:4, ::-1], ABC[::-1]), Y[:4]), "bob": ([], [])}
    federation = Federation.from_arrays(
        {name: (Table(X, ABC), Y) for name in test}, test=test, seed=0
    )
    assert np.array_equal(federation.shards[0].x_test, X[:4].astype(np.float32))


@pytest.mark.parametrize(
    ("bob", "sentence"),
    [
        (Table(X[:, :2], ["a", "b"]), "client 'bob' differ from those of 'ann': it lacks c"),
        (
            Table(np.c_[X, X], [*ABC, "d", "e", "f"]),
            "'bob' differ from those of 'ann': it has d, e, f besides",
        ),
        (Table(X, ["a", "b", "z"]), "it lacks c and has z besides"),
        (Table(X, ["a", "b", "b"]), "client 'bob' has two columns 'b'"),
        (
            X,
            "columns of client 'ann' have names and those of 'bob' have none: give tables for all "
            "clients",
        ),
        (Table(X, [0, 1, 2]), "columns of client 'ann' have names and those of 'bob' have none"),
    ],
    ids=["missing", "extra", "renamed", "twice", "array", "numbered"],
)
def test_other_columns_are_refused_by_name(bob: Any, sentence: str) -> None:
    ann = (Table(X, ABC), Y)
    with pytest.raises(UsageError, match=sentence):
        Federation.from_arrays({"ann": ann, "bob": (bob, Y)}, seed=0)
    with pytest.raises(UsageError, match=sentence):
        Federation.from_arrays({"ann": ann, "bob": ann}, test={"ann": ann, "bob": (bob, Y)}, seed=0)


def test_pandas_numbers_of_columns_without_names_are_no_names() -> None:
    federation = Federation.from_arrays(
        {"ann": (Table(X, [0, 1, 2]), Y), "bob": (X + 1, Y)}, seed=0
    )
    assert federation.feature_names is None and federation.digest() == plain().digest()


def newcomers(columns: list[str] | None) -> Federation:
    """Two clients with the columns of the run's, in another order."""
    place = [ABC.index(name) for name in columns or ABC]
    given = {
        f"new-{k}": ((X + k)[:, place] if columns is None else Table((X + k)[:, place], columns), Y)
        for k in range(2)
    }
    return Federation.from_arrays(given, seed=3)


def test_newcomers_columns_are_matched_with_the_runs(tmp_path: Path) -> None:
    named = {f"site-{k}": (Table(X * (-1) ** k, ABC), Y) for k in range(4)}
    fitted = IFCA(rounds=2, k=2, starts=1).fit(Federation.from_arrays(named, seed=0))
    fitted.save(tmp_path)
    for run in (fitted, IFCA.load(tmp_path)):
        found = [run.join(newcomers(columns)).tolist() for columns in (ABC, ["c", "a", "b"])]
        assert found[0] == found[1]
        with pytest.raises(UsageError, match="have names and the newcomers' have none"):
            run.join(newcomers(None))
        choices = [run.joined_.bytes for _ in (run.join(newcomers(["b", "c", "a"])),)]
        assert choices[0]["up"] > 0
        with pytest.raises(UsageError, match="it lacks a and has z besides"):
            run.join(Federation.from_arrays({"new": (Table(X, ["z", "b", "c"]), Y)}, seed=0))


def test_features_are_put_in_order_training_and_held_out_alike() -> None:
    federation = Federation.from_arrays({"ann": (Table(X, ABC), Y)}, seed=0)
    moved = federation.with_features(["c", "b", "a"])
    assert np.array_equal(moved.shards[0].x, federation.shards[0].x[:, ::-1])
    assert moved.feature_names == ("c", "b", "a")
    assert np.array_equal(moved.shards[0].x_test, federation.shards[0].x_test[:, ::-1])
    assert moved.with_features(ABC).digest() == federation.digest()
    with pytest.raises(UsageError, match="have no names"):
        plain().with_features(ABC)


def test_names_are_part_of_what_client_and_server_agree_on_only_where_there_are_some() -> None:
    named = Federation.from_arrays(
        {"ann": (Table(X, ABC), Y), "bob": (Table(X + 1, ABC), Y)}, seed=0
    )
    with_names, without = (
        FedAvg().config(federation, "float32") for federation in (named, plain())
    )
    assert with_names == {**without, "feature_names": ABC} and "feature_names" not in without


def test_as_many_names_as_features() -> None:
    with pytest.raises(UsageError, match=r"2 feature names do not fit samples of shape \(3,\)"):
        replace(plain(), feature_names=("a", "b"))
    assert replace(plain(), feature_names=("x",)).with_features(["x"]).feature_names == ("x",)
