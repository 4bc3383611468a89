"""`securecluster predict` on the heart data: from four files to predictions by one command each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import softmax
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from securecluster import FedAvg, Federation
from securecluster.cli.main import main
from securecluster.core.randomness import Randomness
from securecluster.data.splits import Split

HEART = Path(os.environ.get("SECURECLUSTER_DATA", "")) / "tables" / "heart"
TINY = "site,age,sex,ill\n" + "".join(
    f"{'ab'[k % 2]},{20 + k},{('f', 'm', '')[k % 3]},{('no', 'yes')[k // 10]}\n" for k in range(20)
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a table and a run on it."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "rows.csv").write_text(TINY)
    columns = ["--client-column", "site", "--label-column", "ill", "--prepare", "auto"]
    options = ["--rounds", "2", "--model", "linear", "--quiet", "--out", str(folder / "run")]
    assert main(["run", "fedavg", "--data", str(folder / "rows.csv"), *columns, *options]) == 0
    return folder


def test_rows_of_a_file_get_their_classes(tiny: Path, capsys: Any) -> None:
    run, rows, out = (str(tiny / name) for name in ("run", "rows.csv", "out.csv"))
    assert main(["predict", run, rows, "--client", "a", "--out", out]) == 0
    said = capsys.readouterr()
    frame = pd.read_csv(rows)
    fitted = FedAvg.load(tiny / "run")
    shares = fitted.predict_proba("a", frame[["age", "sex"]])
    found = pd.read_csv(out)
    assert found.columns.tolist() == ["predicted", "no", "yes"]
    assert np.allclose(found[["no", "yes"]], shares, atol=1e-6)
    assert (found["predicted"] == fitted.predict_samples("a", frame[["age", "sex"]])).all()
    assert said.out.startswith("20 rows: no ")
    # whoever joined has predictions in every other process, too
    joined = Federation.from_frame(
        frame[frame["site"] == "a"].assign(site="c"),
        client="site",
        label="ill",
        prepare={"sex": ["f", "m"]},
        classes=["no", "yes"],
        seed=0,
    )
    fitted.join(joined)
    assert main(["predict", run, rows, "--client", "c", "--out", out]) == 0
    again = pd.read_csv(out)
    np.testing.assert_allclose(
        again["yes"], fitted.predict_proba("c", frame[["age", "sex"]])[:, 1], atol=1e-6
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "rows.csv"], "predict answers by a client's model: name it, --client NAME"),
        (["run"], "predict takes the file after the run folder"),
        (["run", "rows.csv", "--client", "z"], "there is no client 'z'"),
        (["run", "none.csv", "--client", "a"], "none.csv does not exist"),
        (["run", "other.csv", "--client", "a"], "column of other.csv 'sex'"),
        (["run", "rows.csv", "--client", "a", "--out", "rows.csv"], "rows.csv"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, tiny: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny)
    Path("other.csv").write_text("age\n1\n2\n")
    assert main(["predict", *arguments]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1
    assert Path("rows.csv").read_text() == TINY


@pytest.mark.skipif(not HEART.is_dir(), reason="SECURECLUSTER_DATA has no tables/heart")
def test_heart_from_four_files_is_what_scikit_learn_has_of_the_same_rows(tmp_path: Path) -> None:
    columns = ["--client-column", "@file", "--label-column", "target", "--prepare", "auto"]
    options = ["--rounds", "5", "--model", "linear", "--out", str(tmp_path / "run"), "--quiet"]
    assert main(["run", "fedavg", "--data", str(HEART), *columns, *options]) == 0
    fitted = FedAvg.load(tmp_path / "run")
    for file in sorted(HEART.glob("*.csv")):
        out = tmp_path / f"{file.stem}.csv"
        asked = ["--client", file.stem, "--out", str(out), "--quiet"]
        assert main(["predict", str(tmp_path / "run"), str(file), *asked]) == 0
        rows = pd.read_csv(file, na_values="?")
        draw = Randomness(0).generator("split", file.stem)
        train_rows, _ = Split().sides(file.stem, rows["target"].to_numpy(), draw)
        train = rows.iloc[train_rows].drop(columns="target")
        imputer = SimpleImputer(strategy="median", keep_empty_features=True)
        preparation = make_pipeline(imputer, StandardScaler()).fit(train)
        x = preparation.transform(rows.drop(columns="target"))
        # what is constant in training counts for nothing, where scikit-learn has a width of 1
        x[:, preparation[-1].var_ == 0] = 0
        state = fitted.model_of(file.stem)
        logits = x.astype(np.float32) @ state["1.weight"].numpy().T + state["1.bias"].numpy()
        found = pd.read_csv(out)
        assert found["predicted"].tolist() == logits.argmax(1).tolist()
        np.testing.assert_allclose(found[list("01234")], softmax(logits, axis=1), atol=2e-6)
