"""The table of mistakes against rules of security fits the code, and its runner tells them."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def _script() -> ModuleType:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / ".ci" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module  # dataclasses look up their module
    spec.loader.exec_module(module)
    return module


mutants = _script()


@pytest.mark.always
def test_every_mutant_changes_code_that_occurs_once() -> None:
    for mutant in mutants.load():
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.apply(source) != source  # raises an error where it does not fit


def test_every_mutant_names_tests_that_exist_and_no_mutant_occurs_twice() -> None:
    seen = Counter((mutant.file, mutant.old, mutant.new) for mutant in mutants.load())
    assert set(seen.values()) == {1}
    for mutant in mutants.load():
        file, _, selected = mutant.tests.partition(" -k ")
        assert (ROOT / file).is_file(), f"{mutant.mistake}: {file}"
        text = (ROOT / file).read_text(encoding="utf-8")
        for word in filter(None, selected.split(" or ")):
            named = rf"def test_\w*{word}|\b{word}\b"  # a test, or a case of one
            assert re.search(named, text), f"{mutant.mistake}: no test {word}"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("z = 3", "z = 4", "occurs 0 times"),
        ("= 1", "= 2", "occurs 2 times"),
        ("x = 1", "x = ", "does not compile"),
        ("x = 1", "x  =  1", "nothing but the layout"),
    ],
)
def test_a_mutant_that_does_not_fit_is_refused(old: str, new: str, problem: str) -> None:
    mutant = mutants.Mutant("", "a.py", old, new, "")
    with pytest.raises(mutants.DoesNotApplyError, match=problem):
        mutant.apply("x = 1\ny = 1\n")


@pytest.mark.parametrize(
    ("test", "verdict"),
    [
        ("import a\ndef test_b():\n    assert a.x == 1\n", "caught by tests/t.py::test_b"),
        ("import a\ndef test_b():\n    assert a.y == 1\n", "SURVIVED"),
        ("import a\ndef test_b():\n    nothing\n", "BROKEN"),
        ("import nothing\n", "BROKEN"),
    ],
)
def test_only_a_failed_test_catches_a_mutant(test: str, verdict: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "t.py").write_text(test)
    (tmp_path / "a.py").write_text("x = 1\ny = 1\n")
    mutant = mutants.Mutant("", "a.py", "x = 1", "x = 2", "tests/t.py")
    assert mutants.verdict(tmp_path, mutant).startswith(verdict)
    assert (tmp_path / "a.py").read_text() == "x = 1\ny = 1\n"
