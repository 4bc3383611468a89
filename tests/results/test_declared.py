"""Scores and report fields that installed packages declare."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import top_k_accuracy_score

from securecluster import FedAvg, Federation
from securecluster.cli.main import main
from securecluster.core import installed_packages
from securecluster.errors import UsageError
from securecluster.results.declared import check_declared

MODULE = """
import numpy as np

def top_2(y, shares):
    return np.mean((shares.argsort(axis=1)[:, -2:] == y[:, None]).any(axis=1))

def largest(fitted):
    return int(np.bincount(fitted.labels_).max())

def sizes(fitted):
    return np.bincount(fitted.labels_).tolist()

def broken(*arguments):
    return 1 / 0

def unwritable(fitted):
    return {1, 2}

number = 3
"""
SMALL = ["--clients", "4", "--samples", "20", "--rounds", "1", "--epochs", "1", "--quiet"]
Declare = Callable[..., None]


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Declare]:
    """Declares names of the module as scores and as report fields."""
    (tmp_path / "outside_measures.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_measures", raising=False)

    info = tmp_path / "outside_measures-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-measures\n")

    def declared(scores: str = "", fields: str = "", module: str = "outside_measures") -> None:
        lines = ["[securecluster.scores]", *(f"{n} = {module}:{n}" for n in scores.split())]
        lines += ["[securecluster.fields]", *(f"{n} = {module}:{n}" for n in fields.split())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        installed_packages.points.cache_clear()

    yield declared
    installed_packages.points.cache_clear()


def test_a_score_stands_beside_ours_with_that_of_the_baseline(declare: Declare) -> None:
    declare(scores="top_2")
    federation = Federation.simulate("digits", clients=4, samples=40, seed=0)
    fitted = FedAvg(rounds=2, model="linear", epochs=1).fit(federation)
    frame = fitted.to_frame("scores")
    for name, shard in zip(federation.names, federation.shards, strict=True):
        shares = fitted.predict_proba(name, shard.x_test)
        expected = top_k_accuracy_score(shard.y_test, shares, k=2, labels=np.arange(10))
        assert frame.loc[name, "top_2"] == pytest.approx(expected)
    assert (frame["top_2_baseline"] < frame["top_2"]).any()


def test_commands_have_them_in_results_and_tables(
    declare: Declare, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(scores="top_2", fields="largest sizes")
    assert main(["run", "fedavg", *SMALL, "--out", "run"]) == 0
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["fields"] == {"largest": 4, "sizes": [4]}
    assert main(["report", "run"]) == 0 and main(["replay", "run"]) == 0
    assert "largest: 4" in capsys.readouterr().out
    levels = ["--clip", "1", "--noise", "0", "--seeds", "1", "--model", "linear"]
    assert main(["sweep", "fedavg", *levels, *SMALL, "--out", "swept"]) == 0
    for table in ("runs.csv", "summary.csv"):
        columns = pd.read_csv(tmp_path / "swept" / table)
        assert columns["largest"].tolist() == [4] and 0 < columns["top_2"][0] <= 1
    assert main(["compare", "fedavg", "local", *SMALL, "--out", "compared"]) == 0
    row, _ = json.loads((tmp_path / "compared/compare.json").read_text())["protocols"]
    assert row["scores"]["largest"] == 4 and "top_2" in row["scores"]


@pytest.mark.parametrize(
    ("scores", "fields", "sentence"),
    [
        ("broken", "", "the score 'broken', which is declared as outside_measures:broken, fails "),
        ("", "broken", "the report field 'broken', .* fails .ZeroDivisionError: division by zero"),
        ("", "unwritable", "fails .TypeError: Object of type set is not JSON serializable"),
    ],
)
def test_one_that_fails_is_one_sentence_and_the_run_goes_on_without_it(
    scores: str, fields: str, sentence: str, declare: Declare, tmp_path: Path
) -> None:
    declare(scores, fields)
    federation = Federation.simulate("digits", clients=4, samples=20, seed=0)
    method = FedAvg(rounds=1, model="linear", epochs=1)
    with pytest.raises(UsageError, match=sentence) as caught:
        method.fit(federation, folder=tmp_path / "run").to_frame("scores")
    assert "\n" not in str(caught.value)
    declare()
    fitted = FedAvg(rounds=1, model="linear", epochs=1).fit(federation, folder=tmp_path / "run")
    assert len(fitted.to_frame("scores")) == 4


@pytest.mark.parametrize(
    ("scores", "module", "sentence"),
    [
        ("number", "outside_measures", "is no function: name one"),
        ("top_2", "no_such_module", "declared as no_such_module:top_2, cannot be imported"),
        ("top-2", "outside_measures", "cannot be imported"),
    ],
)
def test_a_broken_declaration_is_refused_before_a_run(
    scores: str, module: str, sentence: str, declare: Declare, capsys: pytest.CaptureFixture[str]
) -> None:
    declare(scores, module=module)
    with pytest.raises(UsageError, match=sentence):
        check_declared()
    assert main(["run", "fedavg", *SMALL, "--out", "run"]) == 2
    assert sentence in capsys.readouterr().err and not Path("run").exists()
