"""What is dealt where the user names no scenario: what the protocols are made for."""

from __future__ import annotations

import json
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import pytest
from commands import exit_of

from securecluster.core import installed_packages
from securecluster.data import Federation, LabelSwap, Tasks
from securecluster.data.simulation import Simulation
from securecluster.protocols import FedAvg, registry
from securecluster.protocols.authoring import Disclosures

FAST = ["--samples", "20", "--rounds", "2", "--epochs", "1", "--threads", "1", "--quiet"]


class Grouped(FedAvg):
    """FedAvg under another name, made for tasks, which says that it has local parameter servers."""

    name: ClassVar[str] = "grouped"
    scenario: ClassVar[str | None] = "tasks"

    def disclosures(self) -> Disclosures:
        """Return what the result must repeat."""
        return Disclosures(lps=["updates of its clients"])


@pytest.fixture(autouse=True)
def grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("grouped_protocol")
    module.Grouped = Grouped  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    declared = EntryPoint("grouped", f"{module.__name__}:Grouped", registry.GROUP)
    monkeypatch.setattr(installed_packages, "points", lambda group: [declared])


@pytest.mark.parametrize(
    ("given", "scenario", "clients"),
    [
        ({}, "tasks", None),
        ({"minority": 0.2}, "tasks", None),
        ({"task_sizes": (2.0, 1.0), "overlap": True}, "tasks", None),
        ({"scenario": "iid"}, "iid", None),
        ({"clusters": 2}, None, None),  # tasks have no number of clusters to choose: label swap has
        ({"data": "femnist"}, None, None),  # its writers are its clients
        ({"data": "fashion_mnist"}, "tasks", 10),  # five, three and two
        ({"data": "fashion_mnist", "scenario": "rotation"}, "rotation", None),
        ({"data": "fashion_mnist", "clients": 30}, "tasks", 30),
    ],
)
def test_a_protocol_names_the_default(
    given: dict[str, object], scenario: str | None, clients: int | None
) -> None:
    found = Simulation(**given).made_for(["tasks"])  # type: ignore[arg-type]
    assert (found.scenario, found.clients) == (scenario, clients)
    assert found.made_for(["tasks"]) == found == found.made_for([None]), (
        "what is written is read as the same"
    )


def test_several_protocols_must_agree() -> None:
    assert Simulation().made_for(["tasks", "tasks"]).scenario == "tasks"
    for named in ([None], [None, "tasks"], ["tasks", None], ["tasks", "rotation"]):
        assert Simulation().made_for(named) == Simulation()


def test_the_default_is_dealt_written_resumed_and_replayed(tmp_path: Path) -> None:
    out = tmp_path / "r"
    assert exit_of("run grouped --clients 6", *FAST, "--out", out) == 0
    config = json.loads((out / "config.json").read_text())
    assert (
        config["simulation"]["scenario"]
        == json.loads((out / "result.json").read_text())["scenario"]
        == "tasks"
    )
    assert (
        config["data_digest"]
        == Federation.simulate("digits", scenario=Tasks(), clients=6, samples=20, seed=0).digest()
    )
    assert json.loads((out / "result.json").read_text())["privacy"]["lps_view"] == [
        "updates of its clients"
    ]
    assert exit_of("replay", out) == 0
    assert exit_of("resume", out, "--quiet") == 0


def test_a_comparison_keeps_label_swap_unless_all_agree(tmp_path: Path) -> None:
    assert (
        exit_of("compare grouped fedavg --clients 6 --clusters 2", *FAST, "--out", tmp_path / "a")
        == 0
    )
    assert exit_of("compare fedavg grouped --clients 8", *FAST, "--out", tmp_path / "b") == 0
    for name in ("grouped", "fedavg"):
        digest = json.loads((tmp_path / "b" / name / "config.json").read_text())["data_digest"]
        assert (
            digest
            == Federation.simulate(
                "digits", scenario=LabelSwap(), clients=8, samples=20, seed=0
            ).digest()
        )


@pytest.mark.parametrize(
    "arguments",
    [["--minority", "0.7"], ["--clients", "1"], ["--scenario", "task"], ["--clusters", "9"]],
)
def test_mistakes_are_still_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of("run grouped", *FAST, *arguments, "--out", tmp_path / "r") == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "r").exists()


def test_a_protocol_without_a_wish_changes_nothing(tmp_path: Path) -> None:
    assert exit_of("run fedavg --clients 6 --clusters 2", *FAST, "--out", tmp_path / "r") == 0
    kept = json.loads((tmp_path / "r" / "config.json").read_text())["simulation"]
    assert (kept["scenario"], kept["clients"]) == (None, 6)


def test_news_are_dealt_in_samples_that_two_cores_can_train_on() -> None:
    assert Simulation(data="ag_news").made_for([None]).samples == 300
    assert Simulation(data="ag_news", samples=7).made_for([None]).samples == 7
    assert Simulation(data="mnist").made_for([None]).samples is None
