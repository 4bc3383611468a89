"""`securecluster field`: methods beside the built-in ones at equal ε and equal budget."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import securecluster
from securecluster.cli.main import main
from securecluster.core import manifest
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError, UsageError
from securecluster.folders import run_folder
from securecluster.studies import (
    field_figures,
    field_plan,
    field_report,
    field_stored,
    sweep_tables,
)
from securecluster.studies.field_plan import Plan, Setting
from securecluster.studies.sweep_plan import Cell, Variant

VERSION = securecluster.__version__
TINY = tuple(
    Setting(
        name,
        Simulation("digits", scenario=scenario, clients=4, clusters=2, samples=20),
        2,
        rates=(0.5, 2.0),
        rounds=2,
    )
    for name, scenario in (("swaps", "label-swap"), ("rotations", "rotation"))
)
ARGUMENTS = [
    "field", "flexcfl:FlexCFL", "--quick", "--beside", "fedavg", "finetune", "hidden",
    "--epsilon", "8", "--seeds", "2", "--jobs", "1", "--settings", "swaps", "--quiet",
]  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Settings are tiny, nothing is stored, and no pictures are drawn."""
    monkeypatch.setattr(field_plan, "QUICK", TINY)
    monkeypatch.setattr(field_stored, "STORED", tmp_path / "none.csv")
    monkeypatch.setattr(field_figures, "draw", lambda *_: [])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A field that nobody disturbed: a method of the user's own beside three, on two seeds."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(field_plan, "QUICK", TINY)
        patched.setattr(field_stored, "STORED", out.parent / "none.csv")
        assert main([*ARGUMENTS, "--out", str(out)]) == 0
    return out


def _rows(path: Path) -> list[dict[str, str]]:
    """Return the lines of a table without their clocks."""
    with path.open(newline="") as stream:
        return [{n: v for n, v in row.items() if n != "seconds"} for row in csv.DictReader(stream)]


def test_methods_stand_beside_each_other_at_equal_epsilon_and_rounds(whole: Path) -> None:
    rows = _rows(whole / "runs.csv")
    methods = ["flexcfl", "fedavg", "finetune", "hidden"]
    assert [(r["seed"], r["variant"]) for r in rows] == [
        (seed, name) for seed in ("2000", "2001") for name in methods
    ]
    for row in rows:
        assert row["hash"] == TINY[0].hash("example") != TINY[0].hash("client")
        if row["variant"] == "hidden":
            assert row["status"] == "refused" and "take --dp-unit client" in row["reason"]
            continue
        assert row["status"] == "done"
        assert 0.9 * 8 < float(row["epsilon"]) <= 8
        assert int(row["rounds"]) + int(row["tuned_alone"]) == 2
    assert {row["chosen"].split(";")[0] for row in rows if row["variant"] == "fedavg"} <= {
        "lr=0.5",
        "lr=2.0",
    }
    # the means and the bytes of a client, computed anew
    lines = _rows(whole / "summary.csv")
    assert [line["variant"] for line in lines] == methods
    for line in lines[:3]:
        own = [row for row in rows if row["variant"] == line["variant"]]
        accuracies = [float(row["accuracy"]) for row in own]
        assert float(line["accuracy"]) == pytest.approx(np.mean(accuracies))
        sent = [(float(row["up"]) + float(row["down"])) / 4 for row in own]
        assert float(line["bytes"]) == pytest.approx(np.mean(sent))
        assert line["accuracy_low"] == ""  # of two seeds there is no interval
    assert {line["p"] for line in _rows(whole / "paired.csv")} == {""}
    page = (whole / "field.html").read_text()
    assert "could not tell: too few common seeds" in page
    assert TINY[0].hash("example") in page and "flexcfl" in page
    assert "2 of 2 runs not done: the sums of hidden protect whole clients" in page


def test_the_learning_rate_is_the_most_accurate_one_of_another_seed(whole: Path) -> None:
    plan = Plan.of(run_folder.swept(whole) or {})
    cells = plan.tuning()
    # two rates of each of three methods, and two lengths of tuning that are one with two rounds
    assert len(cells) == 4 * 2
    assert {cell.simulation.seed for cell in cells} == {100}
    rows = [{"run": cell.number, "status": "done", "accuracy": 0.5} for cell in cells]
    rows[3]["accuracy"] = 0.7  # fedavg at the larger rate
    rows[5]["status"] = "failed"
    chosen = plan.chosen_of(cells, rows)
    rates = {key[2]: variant.options["lr"] for key, variant in chosen.items()}
    assert rates == {"flexcfl": 0.5, "fedavg": 2.0, "finetune": 0.5, "hidden": 0.5}


@pytest.mark.parametrize("killed_in", ["tuning.jsonl", "runs.jsonl"])
def test_a_killed_field_goes_on_and_does_no_run_twice(
    killed_in: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    names = [".securecluster", "config.json", "tuning.jsonl", "runs.jsonl"]
    for name in names[: names.index(killed_in) + 1]:
        (out / name).write_bytes((whole / name).read_bytes())
    content = (out / killed_in).read_bytes()
    (out / killed_in).write_bytes(content[:-40])  # in the middle of the last line
    begun: list[str] = []
    row = Cell.row
    monkeypatch.setattr(Cell, "row", lambda self, *_: begun.append(self.variant.label) or row(self))
    if killed_in == "tuning.jsonl":
        assert main(["resume", str(out), "--quiet", "--jobs", "1"]) == 0
        assert len(begun) == 1 + 8
    else:  # the same command goes on, too
        assert main([*ARGUMENTS, "--out", str(out)]) == 0
        assert begun == ["hidden"]
    assert _rows(out / "runs.csv") == _rows(whole / "runs.csv")


def test_python_goes_on_in_the_folder_of_the_command_and_returns_its_runs(whole: Path) -> None:
    options: dict[str, Any] = {"quick": True, "beside": ["fedavg", "finetune", "hidden"]}
    options |= {"epsilon": [8], "seeds": 2, "settings": ["swaps"]}
    found = securecluster.field(["flexcfl:FlexCFL"], folder=whole, **options)
    assert list(found.columns) == list(field_stored.COLUMNS)
    written = [row["accuracy"] for row in _rows(whole / "runs.csv")]
    assert ["" if value != value else str(value) for value in found["accuracy"]] == written
    with pytest.raises(UsageError, match=r"epsilon is a list: give \[8\]"):
        securecluster.field(folder=whole, epsilon=8)
    with pytest.raises(UsageError, match="unknown option 'epsilons': did you mean 'epsilon'"):
        securecluster.field(folder=whole, epsilons=[8])
    with pytest.raises(UsageError, match="exists and is not empty"):
        securecluster.field(["flexcfl:FlexCFL"], folder=whole, **{**options, "seeds": 1})


def test_a_full_disk_says_how_to_go_on_and_changed_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise RunFolderError("cannot write") from OSError(28, "No space left on device")

    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(manifest.Log, "append", full)
        assert main([*ARGUMENTS, "--out", str(out)]) == 2
    assert f"go on with: securecluster resume {out}" in capsys.readouterr().err
    monkeypatch.setattr(field_stored, "program", lambda _: "another")
    assert main(["resume", str(out)]) == 2
    assert "of two programs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--settings", "swap"], "unknown setting 'swap': did you mean 'swaps'"),
        (["--settings", "swaps", "swaps"], "named twice"),
        (["--epsilon", "-1"], "a target is above 0"),
        (["--epsilon", "inf"], "equal, finite ε"),
        (["--beside", "nsim"], "unknown built-in method 'nsim'"),
        (["--dp-unit", "row"], "unknown --dp-unit 'row'"),
        (["--seeds", "0"], "seeds = 0"),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing(
    options: Sequence[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*ARGUMENTS, *options, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ("fedavg:rounds=9", "rounds of fedavg:rounds=9 is the same for all methods"),
        ("sixth:Sixth", "sixth: noise covers a client's mean, and no sample"),
    ],
)
def test_a_method_that_cannot_have_the_budget_is_refused(
    method: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["field", method, *ARGUMENTS[2:]]) == 2
    assert sentence in capsys.readouterr().err


def test_hashes_are_those_of_the_settings_whatever_epsilon_seeds_and_methods() -> None:
    # published with every table: a change makes all of them incomparable
    from securecluster.studies.field_plan import FULL

    found = {setting.name: setting.hash("example") for setting in FULL}
    assert found == FULL_HASHES
    named_by_none = [setting.name for setting in field_plan.settings_of((), quick=False)]
    assert [*named_by_none, "roles"] == [*found]
    first = FULL[0]
    others = [
        replace(first, rounds=11),
        replace(first, rates=(1.0,)),
        replace(first, clip=2.0),
        replace(first, simulation=replace(first.simulation, samples=301)),
        replace(first, k=3),
    ]
    hashes = {setting.hash("example") for setting in (first, *others)}
    assert len(hashes) == 6
    assert first.hash("client") not in hashes


FULL_HASHES = {
    "swaps": "5cc1f594e916",
    "rotations": "6a6c46a69718",
    "permutations": "90588415d87a",
    "shares": "e8b7310ac717",
    "dirichlet": "6a538e91aced",
    "few": "0df1944086c6",
    "many": "fe5a1dfb1522",
    "writers": "f3b50c55513a",
    "hospitals": "45a7f39aaa41",
    "roles": "c68c2696d043",
}


def _plan(**options: Any) -> Plan:
    """Return a plan of one setting with an own method and two others."""
    own = (Variant("mine", "ifca", {}),)
    plan = Plan(own, ("fedavg", "local"), (1.0,), tuple(range(2000, 2012)), TINY[:1], "example")
    plan = replace(plan, digests=("d",), programs=field_stored.programs(plan))
    return replace(plan, **options)


def _lines(plan: Plan, scores: dict[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return made-up rows of a field, with the same ARI and accuracy."""
    lines = []
    programs = dict(plan.programs)
    for variant in plan.variants:
        for seed, score in zip(plan.seeds, scores[variant.label], strict=False):
            line: dict[str, Any] = dict.fromkeys(field_stored.COLUMNS)
            line |= {"setting": "swaps", "hash": TINY[0].hash("example"), "data_digest": "d"}
            line |= {"variant": variant.label, "protocol": variant.protocol, "seed": seed}
            line |= {"target_epsilon": 1.0, "status": "done", "epsilon": 0.99, "dp_unit": "example"}
            line |= {"ari": score, "accuracy": score, "up": 10.0, "down": 6.0, "clients": 4}
            line |= {"rounds": 2, "tuned_alone": 0, "program": programs[variant.protocol]}
            line["version"] = f"{VERSION}+c0ffee"
            lines.append(line)
    return lines


def test_paired_tests_are_those_of_scipy_adjusted_by_holm() -> None:
    plan = _plan()
    draw = np.random.default_rng(3)
    scores = {
        "mine": draw.uniform(0.6, 0.9, 12).tolist(),
        "fedavg": draw.uniform(0.3, 0.5, 12).tolist(),
        "local": draw.uniform(0.5, 0.9, 12).tolist(),
    }
    pairs = field_report.pairs_of(plan, _lines(plan, scores))
    of_ari = [pair for pair in pairs if pair["score"] == "ari"]
    # only the user's method is compared, and not the built-in ones with each other
    assert [(p["first"], p["second"]) for p in of_ari] == [("mine", "fedavg"), ("mine", "local")]
    expected = [
        stats.wilcoxon(np.subtract(scores["mine"], scores[p["second"]])).pvalue for p in of_ari
    ]
    assert [pair["p"] for pair in of_ari] == expected
    smaller, larger = sorted(expected)
    holm = {smaller: min(1, 2 * smaller), larger: max(min(1, 2 * smaller), larger)}
    assert [pair["p_holm"] for pair in of_ari] == [holm[p] for p in expected]
    assert [field_report.verdict(pair) for pair in of_ari] == [
        "better",
        "could not tell" if holm[expected[1]] >= 0.05 else "better",
    ]
    assert field_report.reach(pairs, "ari") == "ARI: 2 tests over up to 12 common seeds"


@pytest.mark.parametrize("seeds", [4, 5, 6, 7])
def test_a_verdict_that_no_seeds_could_give_is_not_given(seeds: int) -> None:
    plan = _plan()
    scores = {
        "mine": [0.9, 0.8, 0.95, 0.7, 0.85, 0.75, 0.6],
        "fedavg": [0.1] * 7,
        "local": [0.2] * 7,
    }
    lines = _lines(plan, {name: values[:seeds] for name, values in scores.items()})
    pairs = field_report.pairs_of(plan, lines)
    verdicts = {field_report.verdict(pair) for pair in pairs}
    text = field_report.reach(pairs, "accuracy")
    # all differences have one sign, which is the smallest p that there is
    smallest = 2 * stats.wilcoxon(range(1, seeds + 1)).pvalue
    if seeds < 5:
        assert verdicts == {"could not tell: too few common seeds"} and "no test" in text
    elif smallest >= 0.05:
        assert verdicts == {"could not tell"}
        assert "cannot tell any difference" in text and "from 7 seeds on" in text
    else:
        assert verdicts == {"better"} and "cannot" not in text


def test_stored_rows_take_the_place_of_runs_and_say_their_version(tmp_path: Path) -> None:
    plan = _plan()
    scores = {name: [0.5] * 12 for name in ("mine", "fedavg", "local")}
    lines = [line for line in _lines(plan, scores) if line["variant"] != "mine"]
    path = tmp_path / "stored.csv"
    sweep_tables.write(path, lines)
    stored = field_stored.read(path)
    assert stored == lines
    found = field_stored.complete(plan, stored)
    assert sorted(found) == [("swaps", "fedavg", 1.0), ("swaps", "local", 1.0)]
    with_stored = replace(plan, stored=found)
    assert {cell.variant.protocol for cell in with_stored.tuning()} == {"ifca"}
    assert field_stored.used(with_stored, stored) == stored
    levels = field_report.levels_of(with_stored, stored)
    assert field_report.of_version(levels) == [f"stored results are of version {VERSION}+c0ffee"]
    stored[3]["version"] = "0.0.1+dead"
    levels = field_report.levels_of(with_stored, stored)
    older = f"stored results are of version 0.0.1+dead, and this is {VERSION}: --fresh runs them"
    assert any(note.startswith(older) for note in field_report.notes(with_stored, levels))
    # other data, other settings, or a seed more
    assert not field_stored.complete(replace(plan, digests=("e",)), stored)
    assert not field_stored.complete(replace(plan, dp_unit="client"), stored)
    assert not field_stored.complete(replace(plan, seeds=tuple(range(2000, 2013))), stored)


def test_what_departs_from_the_setting_is_said() -> None:
    plan = _plan()
    lines = _lines(plan, {"mine": [0.5] * 3, "fedavg": [0.5] * 3, "local": [0.5] * 3})
    for line in lines:
        if line["variant"] == "mine":
            line["rounds"] = 5
        if line["variant"] == "local":
            line["epsilon"] = 0.0
    lines[3] |= {"status": "refused", "reason": "it takes no noise", "ari": None}
    lines[4]["epsilon"] = 0.4
    remarks = [field_report.remarks(plan, level) for level in field_report.levels_of(plan, lines)]
    assert remarks == [
        ["5 rounds, not 2"],
        ["1 of 3 runs not done: it takes no noise", "spent ε 0.695"],
        ["released nothing (ε 0)"],
    ]


@pytest.mark.parametrize(("chosen", "at_an_end"), [("lr=2.0, k=3", True), ("lr=1.0; by x", False)])
def test_a_learning_rate_at_an_end_of_its_grid_is_said(chosen: str, at_an_end: bool) -> None:
    setting = replace(TINY[0], rates=(0.5, 1.0, 2.0))
    plan = _plan(settings=(setting,))
    lines = _lines(plan, {"mine": [0.5] * 3, "fedavg": [0.5] * 3, "local": [0.5] * 3})
    for line in lines:
        line["chosen"] = chosen
    notes = field_report.notes(plan, field_report.levels_of(plan, lines))
    said = [note for note in notes if note.startswith("the learning rate of 3 lines")]
    assert bool(said) == at_an_end


def test_the_table_for_papers_has_the_best_in_bold() -> None:
    plan = _plan()
    lines = _lines(plan, {"mine": [0.5] * 5, "fedavg": [0.75] * 5, "local": [0.25] * 5})
    text = field_report.latex(plan, field_report.levels_of(plan, lines))
    assert r"FedAvg & \textbf{0.750} {\scriptsize [0.750, 0.750]}" in text
    assert text.count("textbf") == 2  # of ARI and accuracy
    assert TINY[0].hash("example") in text
    assert text.count("{") == text.count("}")


def test_a_figure_fits_a_column_and_tells_levels_apart_without_colour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    plan = _plan(epsilons=(1.0, 4.0))
    lines = _lines(plan, {"mine": [0.5] * 5, "fedavg": [0.75] * 5, "local": [0.25] * 5})
    lines += [{**line, "target_epsilon": 4.0} for line in lines]
    means = [level.line for level in field_report.levels_of(plan, lines)]
    drawn = []
    monkeypatch.setattr(
        field_figures.sweep_figures,
        "save",
        lambda _, name, picture: drawn.append(picture) or [_png],
    )
    _png = tmp_path / "x.png"
    _png.write_bytes(b"png")
    assert field_figures.draw(tmp_path, plan, means) == [b"png"]
    (picture,) = drawn
    assert picture.get_figwidth() == 3.4
    first = picture.axes[0]
    marks = {
        (line.get_marker(), line.get_color()) for line in first.lines if line.get_label()[0] == "ε"
    }
    assert len({mark for mark, _ in marks}) == len({color for _, color in marks}) == 2
    assert all(float(color) >= 0 for _, color in marks)  # greys
    bold = [text.get_text() for text in first.get_yticklabels() if text.get_fontweight() == "bold"]
    assert bold == ["mine"]
