"""The guard of ratios: which numbers it lets pass, with numbers that are made up."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import ratios
from benchmarks.costs.terminal import once
from benchmarks.ratios import MEASURES, complaints, main, measured, read_references

ROOT = Path(__file__).parents[2]


class Given:
    """Returns given ratios, one after the other."""

    def __init__(self, *values: tuple[float, ...]) -> None:
        self._values: Iterator[tuple[float, ...]] = iter(values)

    def __call__(self) -> tuple[float, ...]:
        return next(self._values)


def test_a_ratio_may_double_and_no_more() -> None:
    references = {"a": 0.5, "b": 3.0}
    assert complaints({"a": 1.0, "b": 0.1}, references) == []
    (sentence,) = complaints({"a": 1.01, "b": 6.0}, references)
    assert sentence.startswith("a: the ratio is 1.01, over 2 times its reference 0.5: ")


def test_a_ratio_without_a_reference_is_named_and_so_is_the_opposite() -> None:
    missing, gone = complaints({"new": 1.0}, {"old": 1.0})
    assert missing.startswith("new: there is no reference") and ratios.UPDATE in missing
    assert gone.startswith("old: nothing measures it") and ratios.UPDATE in gone


def test_what_is_too_large_is_measured_once_more_and_the_lesser_value_counts() -> None:
    limits = {"a": 2.0, "b": 2.0}
    assert measured(["a", "b"], Given((2.0, 1.0)), limits) == {"a": 2.0, "b": 1.0}
    assert measured(["a", "b"], Given((2.1, 1.0), (1.5, 1.2)), limits) == {"a": 1.5, "b": 1.0}
    assert measured(["a", "b"], Given((2.1, 1.0), (3.0, 0.9)), limits) == {"a": 2.1, "b": 0.9}
    # without a limit there is nothing to exceed
    assert measured(["a"], Given((9.0,)), {}) == {"a": 9.0}


def test_the_command_writes_references_and_checks_against_them(
    elsewhere: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measuring(*values: tuple[float, ...]) -> None:
        monkeypatch.setattr(ratios, "MEASURES", {("a", "b"): Given(*values)})

    measuring((1.0, 1.0))
    assert main(["--check"]) == 1  # there are no references yet
    measuring((0.25, 4.0))
    assert main(["--update"]) == 0
    assert read_references() == {"a": 0.25, "b": 4.0}
    measuring((0.5, 8.0))
    assert main(["--check"]) == 0
    capsys.readouterr()
    measuring((0.5, 8.1), (0.5, 8.2))
    assert main(["--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "b: the ratio is 8.1, over 2 times its reference 4: find what became slow, or, where it is "
        f"meant, write the references with {ratios.UPDATE}"
    ]
    measuring((0.5, 8.1))
    assert main([]) == 0  # which only prints
    measuring((0.3, math.nan))
    assert main(["--update"]) == 0
    assert read_references() == {"a": 0.3, "b": 4.0}  # what could not be measured keeps its own


def test_nothing_is_downloaded_for_a_ratio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECURECLUSTER_DATA", raising=False)
    assert math.isnan(*ratios.private_signature())


def test_every_ratio_has_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    names = [name for group in MEASURES for name in group]
    assert list(read_references()) == names


def test_a_command_that_fails_has_no_time(tmp_path: Path) -> None:
    failing = (sys.executable, "-c", "raise SystemExit(3)")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 3"):
        once(failing, tmp_path)
    assert once(failing, tmp_path, status=3) > 0
