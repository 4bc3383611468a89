"""Attacks that a module holds and no package declares, and an audit in one call from Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import SMALL_FEDERATION

import securecluster
from securecluster import Federation
from securecluster.app.cli import main
from securecluster.attacks import registry
from securecluster.errors import UsageError
from securecluster.protocols import FedAvg

MODULE = """
from securecluster.attacks.label_counts import LabelCounts


class Mine(LabelCounts):
    name = "mine"


class Taken(LabelCounts):
    pass


number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder."""
    (tmp_path / "own_attacks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "_GIVEN", {})
    yield
    sys.modules.pop("own_attacks", None)


def test_the_command_runs_an_attack_of_a_module(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run = ["run", "fedavg", *SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
    assert main([*run, "--out", str(folder)]) == 0
    given = ["--attack", "own_attacks:Mine", "label-counts", "--quiet"]
    assert main(["audit", str(folder), *given]) == 0
    (path,) = folder.glob("audit-server-of-*.json")
    attacks = [row["attack"] for row in json.loads(path.read_text())["attacks"]]
    assert attacks == ["mine", "label-counts"]
    assert not (folder / "audit-server.json").exists(), "that is of all attacks"


def test_one_call_audits_what_was_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    federation = Federation.simulate("digits", clients=6, samples=24, seed=0)
    fitted = FedAvg(model="linear", rounds=1, epochs=1).fit(federation, folder="fitted")
    for run in (fitted, "fitted"):
        result = securecluster.audit(run, federation, attacks=["own_attacks:Mine"])
        assert [row["attack"] for row in result.table["attacks"]] == ["mine"]
        assert result.sentences and not result.failed
        result.show()
        assert "mine" in capsys.readouterr().out
    again = securecluster.audit("fitted", attacks=["mine"])
    assert again.tried[0].score == result.tried[0].score, "of the simulation, made again"
    with pytest.raises(UsageError, match="no attacks were given"):
        securecluster.audit(fitted, federation, attacks=[])


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_module:Mine", "give the module and the class"),
        ("own_attacks:Absent", "give the module and the class"),
        ("own_attacks:number", "is no Attack: name its class"),
        ("own_attacks:Taken", "has the name 'label-counts' of another attack"),
    ],
)
def test_a_path_that_leads_to_no_attack_is_one_sentence(
    path: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=sentence) as caught:
        registry.attack_named(path)
    assert "\n" not in str(caught.value)
