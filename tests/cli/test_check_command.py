"""`securecluster check`: a line for each check, the exit code, and mistakes in its arguments."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from securecluster.cli.main import main

SOURCE = '''
"""An average whose clients name their update in unmasked=."""
from securecluster.protocols import FedAvg

class Mean(FedAvg):
    """FedAvg under another name."""

class Odd:
    """No protocol."""
'''


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, with a module of an author."""
    (tmp_path / "author_mean.py").write_text(SOURCE)
    (tmp_path / "author_broken.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def test_a_line_for_each_check_and_a_closing_line(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "fedavg", "--only", "bytes", "newcomers-price", "--epochs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("✓ bytes: ")
    assert lines[1].startswith("– newcomers-price: ") and "release nothing" in lines[1]
    assert lines[2] == "FedAvg: 1 of 2 checks passed, 0 failed, 1 not applicable"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--masks", "nope"], "unknown --mask 'nope'"),
        (["--masks", "none", "rotaton", "rotation"], "did you mean 'rotation'?"),
        (["--masks", ""], "unknown --mask ''"),
        (["--aggregation", "nope"], "unknown --aggregation 'nope'"),
        (["--relevance", "nope"], "unknown --relevance 'nope'"),
        (["--optimizer", "nope"], "unknown --optimizer 'nope'"),
        (["--model", "nope"], "unknown --model 'nope'"),
        (["--participation", "2"], "--participation = 2.0 is not possible"),
        (["--batch-size", "0"], "--batch-size = 0 cannot train"),
        (["--delta", "2"], "--delta = 2.0 is not possible"),
    ],
)
@pytest.mark.parametrize("only", [["--only", "masks"], []])
def test_what_is_refused_for_another_reason_is_no_check_that_passed(
    arguments: list[str], sentence: str, only: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "fedavg", *only, *arguments]) == 2
    printed = capsys.readouterr()
    assert sentence in printed.err and printed.err.count("\n") == 1
    assert not printed.out


def test_a_failure_is_exit_code_1(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["check", "rdpcfl", "--only", "masks", "--masks", "none", "permutation"]
    assert main(command) == 0
    (here / "author_wrong.py").write_text(
        "from securecluster.protocols.contrib.clove import CLoVE, CLoVEState\n"
        "class Wrong(CLoVE):\n"
        '    """Foresees the releases of one round."""\n'
        "    def run_server(self, net, run) -> CLoVEState:\n"
        "        rounds = self.rounds\n"
        "        if run.dry:\n"
        "            self.rounds = 1\n"
        "        state = super().run_server(net, run)\n"
        "        self.rounds = rounds\n"
        "        return state\n"
    )
    command = ["check", "author_wrong:Wrong", "--only", "unit-client", "--json", "found.json"]
    capsys.readouterr()
    assert main(command) == 1
    told = " ".join(capsys.readouterr().out.split())
    assert "✗ unit-client: " in told
    assert "more than in a run without data; leave --target-epsilon out" in told
    found = json.loads((here / "found.json").read_text())
    assert found["passed"] is False and found["results"][0]["name"] == "unit-client"
    assert main([*command, "--quiet"]) == 1
    assert capsys.readouterr().out == ""


def test_a_class_in_the_current_folder(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "author_mean:Mean", "--only", "bytes"]) == 0
    assert "Mean: 1 of 1 checks passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["fedavgg"], "did you mean 'fedavg'"),
        (["nowhere:Mean"], "nowhere:Mean cannot be imported (ModuleNotFoundError"),
        (["author_mean:Meen"], "cannot be imported (AttributeError"),
        (["author_broken:Mean"], "cannot be imported (ZeroDivisionError"),
        (["author_mean:Odd"], "is no ClusteringProtocol: name its class"),
        (["fedavg", "--only", "byte"], "did you mean 'bytes'"),
        (["fedavg", "--rounds", "7"], "the checks set rounds themselves: leave it out"),
        (["fedavg", "--noise", "1.0"], "the checks set noise themselves: leave it out"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    told = capsys.readouterr().err
    assert sentence in told and told.count("\n") == 1


def test_without_a_protocol_it_says_how_it_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert "securecluster check cfl" in capsys.readouterr().err
