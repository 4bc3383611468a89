"""The benchmark of sums over rounds: its cells, with cohorts and without, and one of its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.leaks import sums_over_rounds as benchmark
from benchmarks.sheet import Sheet
from securecluster.attacks import scoring


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two settings of few rounds, and one subject."""
    settings = {"1": benchmark.Setting(1.0, 0.0, 2), "0.5": benchmark.Setting(0.5, 0.0, 4)}
    monkeypatch.setattr(benchmark, "PARTICIPATION", settings)
    monkeypatch.setattr(benchmark, "SUBJECTS", {"fedavg": benchmark.Subject("fedavg", seeds=1)})
    monkeypatch.setattr(scoring, "RESAMPLES", 50)
    monkeypatch.setattr(scoring, "SHUFFLES", 20)
    for cached in (benchmark.federation_of, benchmark.run_of):
        cached.cache_clear()


def test_cells_with_cohorts_are_those_of_protocols_that_have_them(
    small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for has, expected in ((True, {"without", "with"}), (False, {"without"})):
        monkeypatch.setattr(benchmark, "has_cohorts", lambda subject, has=has: has)
        found = benchmark.cells(5, subjects=["fedavg"])
        assert {cell["cohorts"] for cell in found} == expected
        assert len(found) == len(expected) * 2 * len(benchmark.OF_DATA)


def test_subjects_are_protocols_that_run_under_each_setting() -> None:
    for name, subject in benchmark.SUBJECTS.items():
        for participation, setting in benchmark.PARTICIPATION.items():
            made = benchmark.protocol_of(subject, setting, "without")
            made.check(benchmark.CLIENTS)
            assert made.sums.hide_replies, (name, participation)


def test_a_row_says_how_many_can_be_solved_for(small: None, tmp_path: Path) -> None:
    sheet = Sheet("sums", tmp_path)
    requested = benchmark.cells(1, ["without"], ["fedavg"])
    rows = sheet.fill(requested, benchmark.measure)
    of_all, _, of_half, sizes = rows
    assert (of_all["rank"], of_all["solvable"], of_all["beaten"]) == ("1", "0", "False")
    assert of_all["reason"].startswith("not applicable: all sums of updates")
    # four sums of ten clients each cannot be solved for all twenty
    assert of_half["sums"] == of_half["rank"] == "4" and int(of_half["solvable"]) < 20
    assert of_half["metric"] == "correlation of guessed and true label counts"
    assert float(sizes["score"]) > 0


def test_clients_of_the_skewed_scene_have_numbers_of_samples_of_their_own() -> None:
    counts = [len(shard.y) for shard in benchmark.federation_of("skewed", 0).shards]
    assert min(counts) == benchmark.FEWEST and max(counts) == benchmark.SAMPLES["skewed"]
    assert len(set(counts)) > 10
