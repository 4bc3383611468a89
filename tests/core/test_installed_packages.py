"""Entry points of installed packages that lead nowhere."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from securecluster.core import installed_packages
from securecluster.errors import UsageError


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of an installed package, two of which cannot be imported."""
    (tmp_path / "outside_good.py").write_text("number = 3\n")
    (tmp_path / "outside_bad.py").write_text("dict(1, 2)\n")
    (tmp_path / "outside_refused.py").write_text(
        "from securecluster.errors import UsageError\nraise UsageError('give another name')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def point(value: str) -> EntryPoint:
    return EntryPoint("mine", value, "securecluster.things")


def test_an_entry_point_is_loaded() -> None:
    assert installed_packages.load("thing", point("outside_good:number")) == 3


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:X", "No module named"),
        ("outside_good:Absent", "no attribute 'Absent'"),
        ("outside_bad:X", "dict expected at most 1 argument"),
    ],
)
def test_what_cannot_be_imported_is_one_sentence(value: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        installed_packages.load("thing", point(value))
    assert str(caught.value).startswith(f"the thing 'mine', which is declared as {value}, cannot")
    assert str(caught.value).endswith("correct the entry point, or install the package again")


def test_a_mistake_that_the_module_names_stays_as_it_is() -> None:
    with pytest.raises(UsageError) as caught:
        installed_packages.load("thing", point("outside_refused:X"))
    assert str(caught.value) == "give another name"
