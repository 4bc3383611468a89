"""Protocols that are given as module:Class, and data sets that packages declare."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest

from securecluster import FedAvg, plan, sweep
from securecluster.cli.main import main
from securecluster.core import installed_packages
from securecluster.data import datasets
from securecluster.data.simulation import Simulation
from securecluster.errors import UsageError
from securecluster.protocols import registry
from securecluster.protocols.authoring import protocol

MODULE = """
from dataclasses import replace
from typing import ClassVar

from securecluster.protocols.authoring import protocol
from securecluster.data.datasets import digits
from securecluster.protocols import FedAvg


@protocol
class Mine(FedAvg):
    \"\"\"FedAvg under another name.\"\"\"

    extra: int = 3
    \"\"\"a number of no use\"\"\"

    name: ClassVar[str] = "mine"


@protocol
class Taken(FedAvg):
    \"\"\"FedAvg under a name that is taken.\"\"\"

    name: ClassVar[str] = "cfl"


number = 3


def few():
    \"\"\"Return digits under another name.\"\"\"
    return replace(digits(), name="few")
"""
SMALL = ["--clients", "4", "--samples", "20", "--rounds", "2", "--epochs", "1", "--quiet"]
PATH = "own_method:Mine"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with a module of an author."""
    (tmp_path / "own_method.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv(registry.OWN, "")
    monkeypatch.setenv(datasets.PARTS.variable, "")
    monkeypatch.setattr(registry, "_KEPT", {})
    installed_packages._given.cache_clear()
    yield tmp_path
    installed_packages._given.cache_clear()
    sys.modules.pop("own_method", None)


def test_it_runs_and_is_known_by_its_name_where_the_environment_names_it(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["run", PATH, *SMALL, "--extra", "5", "--out", "run"]) == 0
    assert json.loads((here / "run/result.json").read_text())["protocol"] == "mine"
    assert os.environ[registry.OWN] == PATH
    assert main(["resume", "run"]) == 0
    # a folder chooses nothing that its reader imports
    monkeypatch.setenv(registry.OWN, "")
    assert main(["resume", "run"]) == 2
    assert "one of your own is named by its path, as my_module:MyClass" in capsys.readouterr().err
    assert "own_method" not in (here / "run/config.json").read_text()


def test_it_is_compared_and_swept_with_options_of_its_own(here: Path) -> None:
    assert main(["compare", f"{PATH}:extra=7", "fedavg", *SMALL, "--out", "compared"]) == 0
    rows = json.loads((here / "compared/compare.json").read_text())["protocols"]
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    arguments = [PATH, "fedavg", *SMALL, "--seeds", "1", "--clip", "1", "--noise", "0"]
    assert main(["sweep", *arguments, "--jobs", "2", "--out", "swept"]) == 0
    table = pd.read_csv(here / "swept/runs.csv")
    assert table["variant"].tolist() == ["mine", "fedavg"] and (table["status"] == "done").all()


@protocol
class OfATest(FedAvg):
    """FedAvg, as a class that a script defines."""

    extra: int = 3
    """a number of no use"""

    name: ClassVar[str] = "of-a-test"


def test_objects_of_any_class_are_swept_and_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OfATest, "__module__", "__main__")
    small: dict[str, Any] = {"rounds": 1, "model": "linear", "epochs": 1, "clip": 1.0}
    clients = {"seeds": 1, "clients": 4, "samples": 20}
    runs = sweep([OfATest(**small, extra=4), PATH], noise=[0], **clients, clip=1.0, rounds=1)
    assert runs["variant"].str.partition(":")[0].tolist() == ["of-a-test", "mine"]
    assert (runs["status"] == "done").all(), runs["reason"].tolist()
    planned = plan([OfATest(**small)], clients=4, samples=20, epsilon=[8.0])
    assert "of-a-test" in str(planned)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("own_method:number", "is no ClusteringProtocol: name its class"),
        ("own_method:Absent", "no attribute 'Absent'"),
        ("own_method:Taken", "has the name 'cfl' of another protocol"),
        ("no_such:Mine", "No module named 'no_such'"),
        ("mine", "one of your own is named by its path"),
    ],
)
def test_a_path_that_leads_to_no_protocol_is_one_sentence(path: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        registry.protocol_class(path)
    assert "\n" not in str(caught.value)


def test_a_class_of_a_script_does_not_take_a_name_that_is_taken() -> None:
    other = type("Fedavg", (OfATest,), {"name": "fedavg", "__module__": "__main__"})
    with pytest.raises(UsageError, match="has the name 'fedavg' of another protocol"):
        registry.keep(other)


def test_what_a_folder_names_by_a_path_is_not_imported(here: Path) -> None:
    with pytest.raises(UsageError, match="no folder chooses what is imported"):
        registry.class_of_folder(PATH)
    with pytest.raises(UsageError, match="unknown data 'own_method:few'"):
        Simulation(data="own_method:few").federation()
    assert "own_method" not in sys.modules


def test_a_data_set_of_a_module_has_the_name_of_its_function(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--data", "own_method:few", *SMALL]
    assert main(["run", "fedavg", *arguments, "--out", "run"]) == 0
    assert json.loads((here / "run/config.json").read_text())["simulation"]["data"] == "few"
    assert main(["resume", "run"]) == 0
    levels = ["--seeds", "1", "--clip", "1", "--noise", "0", "--jobs", "2"]
    assert main(["sweep", "fedavg", "local", *arguments, *levels, "--out", "swept"]) == 0
    assert (pd.read_csv(here / "swept/runs.csv")["status"] == "done").all()
    monkeypatch.setenv(datasets.PARTS.variable, "")
    assert main(["resume", "run"]) == 2
    assert main(["run", "fedavg", "--data", "own_method:number", *SMALL]) == 2
    told = capsys.readouterr().err
    assert "unknown --data 'few'" in told and "is no function: name one that returns" in told


@pytest.mark.always
def test_it_is_checked_and_audited(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", PATH, "--only", "repeats"]) == 0
    assert main(["run", PATH, *SMALL, "--transcript", "full", "--out", "run"]) == 0
    for command in (["audit", "run", "--attack", "linkage"], ["replay", "run"], ["report", "run"]):
        assert main(command) == 0
    assert "1 of 1" in capsys.readouterr().out


def a_few_digits() -> datasets.Source:
    """Digits under another name."""
    return replace(datasets.digits(), name="few")


def nothing() -> int:
    """No data set."""
    return 3


def test_a_declared_data_set_has_its_name_everywhere(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    functions = {"few": "a_few_digits", "nothing": "nothing", "digits": "nothing"}
    points = [
        EntryPoint(name, f"{__name__}:{function}", datasets.GROUP)
        for name, function in functions.items()
    ]
    monkeypatch.setattr(installed_packages, "points", lambda group: points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    assert main(["run", "fedavg", "--data", "few", *SMALL, "--out", "run"]) == 0
    assert main(["resume", "run"]) == 0
    assert json.loads((here / "run/result.json").read_text())["data"] == "few"
    assert main(["run", "fedavg", "--data", "nothing", *SMALL]) == 2
    assert "returns no Source" in capsys.readouterr().err
    assert datasets.source("digits").name == "digits"
