"""The record of a sweep's runs: what is written is read, and no damage goes unnoticed."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.commands.failures import Row
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError
from securecluster.runtime.settings import Settings
from securecluster.studies.sweep_plan import Cell, Plan, Variant
from securecluster.studies.sweep_record import Record

PLAN = Plan(
    (Variant("local", "local", {}), Variant("fedavg:clip=1.0", "fedavg", {"clip": 1.0})),
    "noise", (0.0, 0.5), (3, 4), Simulation(), Settings(),
)  # fmt: skip
TARGETS = Plan(PLAN.variants, "epsilon", (8.0, math.inf), (3,), Simulation(), Settings())
CELLS = list(PLAN.cells())
MEASURED: dict[str, Any] = {
    "scenario": "label-swap", "clients": 6, "epsilon": math.inf, "clusters": 2, "ari": 0.25,
    "pearson": None, "accuracy": 0.75, "worst_accuracy": None, "up": 10, "down": 20, "servers": 0,
    "rounds": 2, "seconds": 0.5, "power": None,
    "chosen": None, "accuracy_baseline": 0.5, "below_baseline": 1, "scores": None,
    "spent": [
        {
            "mechanism": "exact", "noise_multiplier": 0.0, "replace": 2.0, "batch": None,
            "epochs": 1, "samples": None, "again": False, "sensitivities": [], "variance": 0.0,
            "times": 2,
        }
    ],
}  # fmt: skip


def done(cell: Cell) -> Row:
    """Return the row of a run that has ended."""
    return cell.ended("done") | MEASURED


def written(path: Path, count: int = 4) -> list[Row]:
    """Write the record of some runs, and return their rows."""
    record = Record(path, CELLS, "accuracy")
    return [record.append(done(cell)) for cell in CELLS[:count]]


def read(path: Path, cells: Sequence[Cell] = CELLS) -> list[Row]:
    """Return the rows of a record."""
    return Record(path, cells, "accuracy").rows()


def sealed(texts: Sequence[str]) -> bytes:
    """Return lines that end with the digest of the lines before them and of their own text."""
    data = b""
    for text in texts:
        body = text.removesuffix("}").encode("utf-8", "surrogatepass")
        before = hashlib.sha256(data).hexdigest().encode()
        seal = hashlib.sha256(before + body).hexdigest()
        data += body + f', "sha256": "{seal}"}}\n'.encode()
    return data


def contents(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a record without their digests."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        del line["sha256"]
    return lines


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    assert read(path) == []
    rows = written(path)
    assert read(path) == rows
    assert path.read_bytes() == sealed([json.dumps(content) for content in contents(path)])
    assert contents(path)[0]["epsilon"] == "inf", "JSON has no infinite numbers"
    targets = list(TARGETS.cells())
    other = Record(tmp_path / "targets.jsonl", targets, "accuracy")
    rows = [other.append(done(cell) | {"noise": 0.3}) for cell in targets]
    assert read(tmp_path / "targets.jsonl", targets) == rows


def test_a_record_goes_on_after_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    rows = written(path, 2)
    record = Record(path, CELLS, "accuracy")
    assert record.rows() == rows
    rows.append(record.append(done(CELLS[2])))
    assert read(path) == rows


@pytest.mark.parametrize("left", [0, 1, 40, -1])
def test_a_last_line_that_a_kill_cut_off_is_removed(left: int, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    rows = written(path)
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    whole = b"".join(lines[:3])
    path.write_bytes(whole + lines[3][:left])
    assert read(path) == rows[:3]
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"\0" * 50)
    assert read(path) == rows[:3]


def edited(number: int, **values: Any) -> Any:
    """Return a damage: values of a line that were edited, and its digest left as it was."""

    def damage(lines: list[str]) -> list[str]:
        line = {**json.loads(lines[number]), **values}
        sha256 = line.pop("sha256")
        return [*lines[:number], json.dumps({**line, "sha256": sha256}), *lines[number + 1 :]]

    return damage


DAMAGES: dict[str, tuple[int, Any]] = {
    "an edited ari": (1, edited(0, ari=0.5)),
    "a text for a number": (2, edited(1, ari="abc")),
    "a list for a number": (1, edited(0, epsilon=[1])),
    "not a number": (1, edited(0, ari=math.nan)),
    "an infinite run": (1, edited(0, run=math.inf)),
    "a run beyond the plan": (4, edited(3, run=9999)),
    "a negative run": (1, edited(0, run=-1)),
    "an unknown status": (3, edited(2, status="weird")),
    "another variant": (1, edited(0, variant="cfl")),
    "a line of its own": (1, lambda lines: ['{"run": 0}', *lines[1:]]),
    "1e400": (1, lambda lines: ['{"run": 1e400}', *lines[1:]]),
    "deep lists": (1, lambda lines: ["[" * 50_000 + "]" * 50_000, *lines[1:]]),
    "a repeated line": (5, lambda lines: [*lines, lines[0]]),
    "swapped lines": (2, lambda lines: [lines[0], lines[2], lines[1], lines[3]]),
    "a removed line": (2, lambda lines: [lines[0], *lines[2:]]),
    "a removed first line": (1, lambda lines: lines[1:]),
    "an empty line": (3, lambda lines: [*lines[:2], "", *lines[2:]]),
    "zeros": (2, lambda lines: [lines[0], "\0" * 100, *lines[2:]]),
    "other ends of lines": (1, lambda lines: [line + "\r" for line in lines]),
    "a separator of lines": (1, lambda lines: [lines[0].replace("label", "\u2028"), *lines[1:]]),
    "not UTF-8": (1, lambda lines: ["\udcff\udcfe", *lines]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_line_is_named(name: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    written(path)
    number, damage = DAMAGES[name]
    text = "".join(line + "\n" for line in damage(path.read_text().splitlines()))
    data = text.encode("utf-8", "surrogateescape")
    path.write_bytes(data)
    with pytest.raises(RunFolderError) as caught:
        read(path)
    assert str(caught.value) == (
        f"line {number} of {path} differs from what was written there: restore the file from a "
        "copy, or remove this line and all after it, whose runs resume then does again"
    )
    assert path.read_bytes() == data, "nothing is lost"
    # what the sentence says helps
    path.write_bytes(b"".join(data.splitlines(keepends=True)[: number - 1]))
    assert len(read(path)) == number - 1


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found(
    position: int, bit: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("record") / "runs.jsonl"
    rows = written(path, 3)
    data = bytearray(path.read_bytes())
    position %= len(data)
    data[position] ^= 1 << bit
    path.write_bytes(data)
    if position == len(data) - 1:
        # the end of the last line, which is then one that a kill cut off
        assert read(path) == rows[:2]
        return
    with pytest.raises(RunFolderError, match=r"line [123] of"):
        read(path)


IMPOSSIBLE = "has values that no run has"
ELSEWHERE = "is of no run of this sweep"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"ari": "0.5"}, IMPOSSIBLE),
        ({"ari": 7.0}, IMPOSSIBLE),
        ({"ari": math.nan}, IMPOSSIBLE),
        ({"epsilon": [1]}, IMPOSSIBLE),
        ({"epsilon": -1.0}, IMPOSSIBLE),
        ({"epsilon": None}, IMPOSSIBLE),
        ({"run": 0.5}, IMPOSSIBLE),
        ({"run": None}, IMPOSSIBLE),
        ({"up": -1}, IMPOSSIBLE),
        ({"up": 10**400}, IMPOSSIBLE),
        ({"clusters": 7}, IMPOSSIBLE),
        ({"seconds": math.inf}, IMPOSSIBLE),
        ({"spent": [{"times": 1}]}, IMPOSSIBLE),
        ({"spent": [{**MEASURED["spent"][0], "times": 10**400}]}, IMPOSSIBLE),
        ({"score": math.inf}, IMPOSSIBLE),
        ({"status": "weird"}, IMPOSSIBLE),
        ({"status": "failed"}, IMPOSSIBLE),
        ({"status": "failed", "reason": "why"}, IMPOSSIBLE),
        ({"reason": "why"}, IMPOSSIBLE),
        ({"fault": True}, IMPOSSIBLE),
        ({"scenario": "\ud800"}, IMPOSSIBLE),
        ({"unknown": 1}, IMPOSSIBLE),
        ({"run": 9999}, ELSEWHERE),
        ({"run": -1}, ELSEWHERE),
        ({"run": 1}, ELSEWHERE),
        ({"variant": "cfl"}, ELSEWHERE),
        ({"seed": 17}, ELSEWHERE),
        ({"noise": 7.0}, ELSEWHERE),
    ],
)
def test_a_forged_line_is_a_run_of_the_plan_or_refused(
    values: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "runs.jsonl"
    written(path)
    first, *others = contents(path)
    path.write_bytes(sealed([json.dumps(line) for line in ({**first, **values}, *others)]))
    with pytest.raises(RunFolderError, match=f"line 1 of .* {sentence}"):
        read(path)


DEEP = '{"run": ' + "[" * 50_000
LONG = '{"run": ' + "1" * 9999


@pytest.mark.parametrize("text", ["[1]", "{}", '{"run": 0}', "[" * 50_000, DEEP, LONG])
def test_a_forged_line_of_another_form_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_bytes(sealed([text]))
    with pytest.raises(RunFolderError, match=f"line 1 of .* {IMPOSSIBLE}"):
        read(path)


def test_only_a_run_that_failed_has_a_later_line_which_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    record = Record(path, CELLS, "accuracy")
    record.append(CELLS[0].failed("no memory", fault=True))
    record.append(CELLS[1].failed("round 1: not finite", fault=False))
    again = record.append(done(CELLS[0]))
    first, second = read(path)
    assert first == again
    assert (second["status"], second["reason"]) == ("failed", "round 1: not finite")
    record.append(done(CELLS[0]))
    with pytest.raises(RunFolderError, match=r"line 4 of .* repeats run 0"):
        read(path)
