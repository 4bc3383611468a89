"""Attacks that a module holds and no package declares, and an audit in one call from Python."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cases import SMALL_FEDERATION

import securecluster
from securecluster import Federation
from securecluster.attacks import registry
from securecluster.cli.main import main
from securecluster.errors import UsageError
from securecluster.protocols import FedAvg

MODULE = """
import numpy as np

from securecluster.attacks.base import MASK, SUMS
from securecluster.attacks.label_counts import LabelCounts
from securecluster.attacks.base import Scorer


class Mine(LabelCounts):
    name = "mine"


class Taken(LabelCounts):
    pass


class Ones(Scorer):
    metric = "share of right guesses"
    value = 1.0

    def units(self, guess, truth):
        return np.full(len(guess.values), self.value)

    def shuffled(self, guess, truth, draw):
        return draw.random(len(guess.values))


class Halves(Ones):
    value = 0.5


class Seeing(LabelCounts):
    name = "seeing"
    scorer = Ones()
    hidden_by = {MASK}


class Blind(Seeing):
    name = "blind"
    scorer = Halves()


class Silent(Seeing):
    name = "silent"
    hidden_by = ()


class Elsewhere(Seeing):
    name = "elsewhere"
    hidden_by = {SUMS}


number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the current folder."""
    (tmp_path / "own_attacks.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(registry, "PARTS", replace(registry.PARTS, kept={}))
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
        frame = result.to_frame().set_index("on")
        assert frame.loc["run", "attack"] == "mine"
        assert frame.loc["run", "score"] == result.tried[0].score.value
        assert frame.loc["run", "low"] <= frame.loc["run", "score"] <= frame.loc["run", "high"]
        result.show()
        assert "mine" in capsys.readouterr().out
    again = securecluster.audit("fitted", attacks=["mine"])
    assert again.tried[0].score == result.tried[0].score, "of the simulation, made again"
    with pytest.raises(UsageError, match="no attacks were given"):
        securecluster.audit(fitted, federation, attacks=[])


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run under a mask, without secure sums."""
    folder = tmp_path_factory.mktemp("own") / "run"
    run = ["run", "fedavg", *SMALL_FEDERATION, "--rounds", "1", "--epochs", "1", "--quiet"]
    assert (
        main([*run, "--mask", "permutation", "--aggregation", "plain", "--out", str(folder)]) == 0
    )
    return folder


@pytest.mark.parametrize(
    ("kind", "verdict", "claims", "sentence"),
    [
        ("Seeing", "broken", ["a mask"], "Broken, although the run claims it: a mask by seeing."),
        ("Blind", "could not tell", ["a mask"], "Could not tell: blind."),
        ("Silent", "visible", [], "Visible, as the report says: silent."),
        # the run has no secure sums to break
        ("Elsewhere", "visible", [], "Visible, as the report says: elsewhere."),
    ],
)
def test_an_attack_of_ones_own_says_what_is_to_hide_its_guess(
    kind: str,
    verdict: str,
    claims: list[str],
    sentence: str,
    masked: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "pages"
    options = ["--attack", f"own_attacks:{kind}", "--out", str(out), "--strict"]
    codes = {"broken": 4, "could not tell": 5, "visible": 0}
    assert main(["audit", str(masked), *options]) == codes[verdict]
    assert sentence in " ".join(capsys.readouterr().out.split())
    (path,) = out.glob("*.json")
    table = json.loads(path.read_text())
    assert sentence in table["headline"]
    (row,) = table["attacks"]
    assert (row["run"]["verdict"], row["run"]["claims"]) == (verdict, claims)
    (page,) = out.glob("*.html")
    assert verdict in page.read_text()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("no_such_module:Mine", "correct the module, or its name, as my_module:MyClass"),
        ("own_attacks:Absent", "correct the module, or its name, as my_module:MyClass"),
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
