"""Data sets on the hub: what is read of them, and what is said where that fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from securecluster.data import locations
from securecluster.data.locations import hub_rows, hub_texts
from securecluster.errors import UsageError


def hub(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    """Let the package `datasets` load by a function of the test."""
    package = SimpleNamespace(load_dataset=load)
    monkeypatch.setattr(locations, "need", lambda name: package)


def test_a_set_that_does_not_load_is_refused_with_the_files_to_put_instead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(name: str, split: str) -> None:
        raise ConnectionError(f"no route to {name}, {split}")

    hub(monkeypatch, fails)
    said = "toys could not be loaded from the hub as 'them/toys' .ConnectionError.*holds "
    with pytest.raises(UsageError, match=said + r"toys/test-\*\.parquet$"):
        hub_rows("toys", "them/toys", "test", ["image"])
    with pytest.raises(UsageError, match=said + "toys.csv$"):
        hub_rows("toys", "them/toys", "test", ["image"], files="toys.csv")


def test_a_set_without_a_column_is_refused_by_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = SimpleNamespace(column_names=["image", "labels"])
    hub(monkeypatch, lambda name, split: rows)
    assert hub_rows("toys", "them/toys", "train", ["image", "labels"]) is rows
    with pytest.raises(UsageError, match=r"column of them/toys 'label'.*labels"):
        hub_rows("toys", "them/toys", "train", ["image", "label"])


def test_an_empty_cell_of_texts_is_an_empty_text() -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": ["a line", None, ""]})

    class Rows:
        def with_format(self, name: str) -> Any:
            assert name == "arrow"
            return table

    assert hub_texts(Rows(), "text") == ["a line", "", ""]
