"""The record that a change of structure is compared with: what it covers, and what it notices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import golden
from securecluster.cli.compatibility import OPTIONS
from securecluster.protocols.registry import PROTOCOLS

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / golden.REFERENCE
RECORD = {
    "labels": [0, 1],
    "models": "ab",
    "norm": 12.3456,
    "scores": [0.5, 1.0],
    "epsilon": 3.14159265358979,
    "events": 7,
    "noised": [4, 3],
    "calls": [[2, 10, 20], [2, 10, 20]],
    "bytes": {"up": 100, "down": 200, "servers": 0},
    "frames": {"train": {"up": 100, "down": 200}},
}
LINE = golden.facts("one, plain", RECORD)


def run(*arguments: str, hash_seed: str = "0") -> subprocess.CompletedProcess[str]:
    """Run the benchmark in a process of its own, since it changes how runs draw."""
    command = [sys.executable, "-m", "benchmarks.golden", *arguments]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def test_every_protocol_is_recorded_under_every_value_of_every_option() -> None:
    cases = list(golden.cases())
    assert {case.build().name for case in cases if case.way == "plain"} == set(PROTOCOLS)
    for option, values in OPTIONS.items():
        if option in ("mask", "noise"):  # masks are maps of one kind; ways of noise are named apart
            continue
        used = {case.protection.get(option, "plain") for case in cases}
        assert used == set(values)
    placements = {case.protection.get("placement") for case in cases}
    assert placements == {None, "local", "central", "distributed"}


def test_the_reference_has_every_case_and_no_other() -> None:
    lines = golden.read_reference(REFERENCE)
    assert list(lines) == [case.name for case in golden.cases()]
    refused = {name: line["refused"] for name, line in lines.items() if line["refused"]}
    assert refused == {case.name: case.refusal for case in golden.cases() if case.refusal}
    assert set(refused) == set(golden.REFUSED)
    # few cases are no runs
    assert 10 * len(refused) <= len(lines)


def test_of_the_ways_that_protocols_refuse_one_of_each_reason_is_a_case() -> None:
    reasons = {case.name: _reason(case) for case in golden.combinations() if case.refusal}
    assert {reasons[name] for name in golden.REFUSED} == set(reasons.values())


def _reason(case: golden.Case) -> str:
    """Return a refusal without the names of its protocol, method and field."""
    protocol, _ = golden.VARIANTS[case.variant]
    names = rf"\b({protocol.__name__}|{case.build().name})\b"
    reason = re.sub(names, "PROTOCOL", case.refusal or "")
    return re.sub(r"send \w+ by itself \(\w+\)", "send FIELD by itself (METHOD)", reason)


@pytest.mark.parametrize("column", RECORD)
def test_whatever_differs_by_a_bit_is_named(column: str) -> None:
    after = {"one, plain": {**RECORD, column: "other"}}
    assert golden.differences({"one, plain": RECORD}, after) == [f"one, plain: {column}"]


def test_a_case_that_is_new_gone_or_refused_now_is_named() -> None:
    refused = {"refused": "it does not work: leave it out"}
    assert golden.differences({"one, plain": RECORD}, {}) == ["one, plain: in one record only"]
    (line,) = golden.differences({"one, plain": RECORD}, {"one, plain": refused})
    assert line.endswith(", refused")
    before = {"one, plain": LINE}
    after = {"one, plain": golden.facts("one, plain", refused)}
    (line,) = golden.other_facts(before, after)
    assert "labels 0 1 -> -" in line
    assert "refused - -> it does not work: leave it out" in line


def test_the_reference_leaves_rounding_out_and_nothing_else() -> None:
    rounded = {**RECORD, "norm": 12.3461, "epsilon": 3.141592654, "models": "cd"}
    before = {"one, plain": LINE}
    assert golden.other_facts(before, {"one, plain": golden.facts("one, plain", rounded)}) == []
    for column, value in (("norm", 12.5), ("epsilon", 3.14160), ("labels", [0, 0]), ("events", 8)):
        changed = golden.facts("one, plain", {**RECORD, column: value})
        (line,) = golden.other_facts(before, {"one, plain": changed})
        assert line.startswith(f"one, plain: {column} ")


def test_of_runs_with_noise_the_reference_has_what_no_rounding_changes() -> None:
    name = "one, noised clients"
    line = golden.facts(name, RECORD)
    assert {column for column, text in line.items() if text} == {"case", "events", "epsilon"}
    other = golden.facts(name, {**RECORD, "epsilon": 3.2})
    assert golden.other_facts({name: line}, {name: other}) == [f"{name}: epsilon 3.14159265 -> 3.2"]
    # other clusters, and so other releases
    more = golden.facts(name, {**RECORD, "noised": [5, 2], "epsilon": 3.2})
    assert golden.other_facts({name: line}, {name: more}) == []
    for nothing in ({**RECORD, "noised": [], "epsilon": 0.0}, {"refused": "it does not work"}):
        assert golden.other_facts({name: line}, {name: golden.facts(name, nothing)})


def test_every_way_with_noise_is_called_so() -> None:
    for case in golden.cases():
        has_noise = any("noise" in option for option in case.protection)
        assert has_noise == (golden.NOISED in case.way), case.name


def test_the_text_of_a_reference_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "golden.csv"
    golden.write_reference(path, [LINE])
    assert golden.read_reference(path) == {"one, plain": LINE}
    assert LINE["epsilon"] == "3.14159265"
    assert LINE["norm"] == "12.346"


def test_a_command_without_a_file_says_what_to_give() -> None:
    found = run()
    assert found.returncode == 2
    assert "give --out, --compare, --reference or --write-reference" in found.stderr
