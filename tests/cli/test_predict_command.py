"""`securecluster predict`, and real tables from their files to predictions by one command each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import softmax
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from securecluster import FedAvg, Federation
from securecluster.cli.main import main
from securecluster.core.randomness import Randomness
from securecluster.data.splits import Split

TABLES = Path(os.environ.get("SECURECLUSTER_DATA", "")) / "tables"
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


def of_files(folder: str) -> dict[str, pd.DataFrame]:
    """Return the rows of each file by its name."""
    files = sorted((TABLES / folder).glob("*.csv"))
    return {file.stem: pd.read_csv(file, na_values="?") for file in files}


def of_column(path: Path, column: str) -> dict[str, pd.DataFrame]:
    """Return the rows of each client that a column names."""
    return {str(name): rows for name, rows in pd.read_csv(path).groupby(column)}


def with_regions(folder: Path) -> Path:
    """Write the patients of TCGA with the region of the centre that their code names."""
    patients = pd.read_csv(TABLES / "tcga" / "brca.csv")
    centers = pd.read_csv(TABLES / "tcga" / "centers.csv", keep_default_na=False)
    region = dict(zip(centers["TSS Code"], centers["Region"], strict=True))
    table = patients.assign(region=patients["pid"].str[5:7].map(region))
    table.to_csv(folder / "tcga.csv", index=False)
    return folder / "tcga.csv"


ROUNDS, RATE = 200, 1.0
SETS = {  # the column of clients, the label, and columns that are no features
    "heart": ("@file", "target", []),
    "wine": ("@file", "quality", []),
    "har": ("subject", "activity", []),
    "tcga": ("region", "E", ["pid", "T"]),
}


def descended(x: Any, y: Any, classes: int) -> float:
    """Return the loss of logistic regression after as many steps of gradient descent."""
    x, targets = np.c_[x, np.ones(len(x))], np.eye(classes)[y]
    weights = np.zeros((x.shape[1], classes))
    for _ in range(ROUNDS):
        weights -= RATE * x.T @ (softmax(x @ weights, axis=1) - targets) / len(x)
    return float(log_loss(y, softmax(x @ weights, axis=1), labels=range(classes)))


@pytest.mark.skipif(not TABLES.is_dir(), reason="SECURECLUSTER_DATA has no tables")
@pytest.mark.parametrize("name", SETS)
def test_real_tables_are_what_scikit_learn_has_of_the_same_rows(name: str, tmp_path: Path) -> None:
    column, label, dropped = SETS[name]
    data = {"har": TABLES / "har" / "tidydata.csv"}.get(name, TABLES / name)
    if name == "tcga":
        data = with_regions(tmp_path)
    clients = of_files(name) if column == "@file" else of_column(data, column)
    columns = ["--client-column", column, "--label-column", label, "--prepare", "auto"]
    columns += ["--drop-columns", *dropped] if dropped else []
    options = f"--model linear --rounds {ROUNDS} --epochs 1 --batch-size 9999 --lr {RATE} --quiet"
    run = str(tmp_path / "run")
    assert (
        main(["run", "fedavg", "--data", str(data), *columns, *options.split(), "--out", run]) == 0
    )
    fitted = FedAvg.load(run)
    names = list(map(str, fitted.classes_))
    inputs, targets = [], []
    for number, (client, rows) in enumerate(clients.items()):
        out, path = tmp_path / "out.csv", tmp_path / "rows.csv"
        rows.to_csv(path, index=False, na_rep="?")
        asked = ["predict", run, str(path), "--client", client, "--out", str(out), "--quiet"]
        if number:
            assert main(asked) == 0
        else:  # another process
            subprocess.run([sys.executable, "-m", "securecluster", *asked], check=True)
        draw = Randomness(0).generator("split", client)
        train, _ = Split().sides(client, rows[label].to_numpy(), draw)
        y = np.array([names.index(str(value)) for value in rows[label]])
        x = rows.drop(columns=[label, *dropped, *({column} & {*rows})]).astype(float)
        imputer = SimpleImputer(strategy="median", keep_empty_features=True)
        preparation = make_pipeline(imputer, StandardScaler()).fit(x.iloc[train])
        x = preparation.transform(x)
        # what is constant in training counts for nothing, where scikit-learn has a width of 1
        x[:, preparation[-1].var_ == 0] = 0
        state = fitted.model_of(client)
        logits = x.astype(np.float32) @ state["1.weight"].numpy().T + state["1.bias"].numpy()
        found = pd.read_csv(out, dtype={"predicted": str})
        assert found["predicted"].tolist() == [names[k] for k in logits.argmax(1)]
        np.testing.assert_allclose(found[names], softmax(logits, axis=1), atol=2e-6)
        inputs.append(x[train])
        targets.append(y[train])
    assert len(clients) == len(fitted.labels_)
    x, y = np.concatenate(inputs), np.concatenate(targets)
    shares = softmax(x @ state["1.weight"].numpy().T + state["1.bias"].numpy(), axis=1)
    loss = log_loss(y, shares, labels=range(len(names)))
    assert loss == pytest.approx(descended(x, y, len(names)), abs=1e-3)
    if name == "heart":  # where that many steps are enough
        least = LogisticRegression(C=np.inf, max_iter=1000, tol=1e-8).fit(x, y).predict_proba(x)
        assert loss == pytest.approx(log_loss(y, least), abs=1e-3)
