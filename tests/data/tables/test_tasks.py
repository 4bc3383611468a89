"""What a table's labels are learned as: said by the task, or chosen by them and told."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from commands import exit_of

from securecluster import Federation
from securecluster.data.simulation import Simulation
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import Binary, MultiLabel, Regression

N = 48
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(N, 2))
COLUMNS: dict[str, Any] = {
    "site": [f"s{k % 3}" for k in range(N)],
    "a": X[:, 0],
    "b": X[:, 1],
    "price": 100 + 20 * X[:, 0],
    "Size, m2": 10 + X[:, 1],
    "rain": (X[:, 0] > 0).astype(int),
    "wind": X[:, 1] > 0,
    "sick": np.where(X[:, 0] > 0, "yes", "no"),
    "grade": np.arange(N) % 3 / 2,
}
FEATURES = {"client": "site", "feature_columns": ("a", "b"), "seed": 0}


def frame(label: Any, **options: Any) -> Federation:
    return Federation.from_frame(pandas.DataFrame(COLUMNS), label=label, **FEATURES, **options)


@pytest.mark.parametrize(
    ("label", "task", "kind", "names"),
    [
        ("price", "regression", Regression(), ("price",)),
        ("price", "regression:huber:0.5", Regression("huber", 0.5), ("price",)),
        ("Size, m2", "regression", Regression(), ("Size, m2",)),
        (["price", "Size, m2"], "regression", Regression(), ("price", "Size, m2")),
        ("rain, wind", "multilabel", MultiLabel(), ("rain", "wind")),
        (["rain"], "multilabel", MultiLabel(), ("rain",)),
        ("sick", "binary", Binary(), ("no", "yes")),
        ("wind", Binary(), Binary(), (False, True)),
        ("rain", "regression", Regression(), ("rain",)),
    ],
)
def test_a_task_is_learned_as_it_is_said(label: Any, task: Any, kind: Any, names: Any) -> None:
    fed = frame(label, task=task)
    assert fed.objective == kind and fed.class_names == names
    rows = np.concatenate([np.r_[shard.y, shard.y_test] for shard in fed.shards])
    columns = label
    if isinstance(label, str):
        columns = [label] if label in COLUMNS else label.split(", ")
    given = np.stack([np.asarray(COLUMNS[name]) for name in columns], 1)
    if kind == Binary():
        given = (given == names[1]) * 1
    assert np.sort(rows, 0) == pytest.approx(np.sort(given.astype(np.float32), 0), rel=1e-6)


@pytest.mark.parametrize(
    ("label", "kind", "said"),
    [
        ("price", Regression(), "label price holds numbers that are not whole, .* regression"),
        (["price", "Size, m2"], Regression(), "are several, so the task is regression"),
        (["rain", "wind"], MultiLabel(), "are of 0 and 1, so the task is multilabel"),
    ],
)
def test_labels_that_choose_a_task_say_so(label: Any, kind: Any, said: str) -> None:
    with pytest.warns(SecureClusterWarning, match=said):
        fed = frame(label)
    assert fed.objective == kind and fed.classes_counted
    with pytest.raises(UsageError, match="the task was read from the clients' targets: say it"):
        fed.facts_of(0)


@pytest.mark.parametrize(
    ("label", "options", "said"),
    [
        ("grade", {}, "not whole, .* 'grade'|'grade' .* take the task regression, or"),
        ("sick", {"task": "regression"}, "'sick' .* holds text, not numbers"),
        (["rain", "sick"], {"task": "multilabel"}, "'sick' .* holds text"),
        (["rain", "price"], {"task": "multilabel"}, "'price' .* other values than 0 and 1"),
        (["rain", "wind"], {"task": "classification"}, "learns one column, and 2 are named"),
        (["rain", "wind"], {"task": "binary"}, "learns one column, and 2 are named"),
        ("site", {"task": "regression"}, "different columns"),
        ("grade", {"task": "binary", "classes": [0.0, 0.5, 1.0]}, "3 classes, and the task binary"),
        ("price", {"task": "regresion"}, "did you mean 'regression'"),
        (
            ["price", "Size, m2"],
            {"task": "regression", "scaling": "client"},
            "give their public bounds",
        ),
        (
            ["price", "Size, m2"],
            {"task": "regression", "scaling": {"a": (-4, 4), "b": (-4, 4), "price": (0, 200)}},
            "bounds name some targets, and not Size, m2",
        ),
    ],
)
def test_a_task_that_labels_do_not_suit_is_refused(label: Any, options: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        frame(label, **options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("of_features", [{}, {"a": (-4, 4), "b": (-4, 4)}], ids=["none", "all"])
def test_bounds_of_a_target_are_those_of_its_column(of_features: dict[str, Any]) -> None:
    fed = frame("price", task="regression", scaling={**of_features, "price": (50, 150)})
    assert fed.objective == Regression(bounds=((50.0, 150.0),))
    assert (fed.scaling is not None) == bool(of_features)
    rows = np.concatenate([np.r_[shard.y, shard.y_test] for shard in fed.shards])
    assert np.sort(rows[:, 0]) == pytest.approx(np.sort(COLUMNS["price"] - 100) / 50, abs=1e-6)


@pytest.mark.parametrize(
    ("label", "task", "options", "header"),
    [
        ("price", "regression:huber", ["--bounds", "price=0:200"], ["predicted"]),
        ("price,size", "regression", [], ["predicted price", "predicted size"]),
        ("rain,wind", "multilabel", [], ["predicted", "rain", "wind"]),
        ("sick", "binary", ["--prepare", "auto"], ["predicted", "no", "yes"]),
    ],
)
def test_the_command_line_learns_and_predicts(
    label: str, task: str, options: list[str], header: list[str], tmp_path: Path, capsys: Any
) -> None:
    table = pandas.DataFrame(COLUMNS).rename(columns={"Size, m2": "size"})
    table.to_csv(tmp_path / "t.csv", index=False)
    given = ["--data", tmp_path / "t.csv", "--client-column", "site", "--label-column", label]
    given += ["--feature-columns", "a", "b", "--task", task, *options]
    out = tmp_path / "run"
    run = ["fedavg", *given, "--rounds", "2", "--model", "linear", "--out", out]
    assert exit_of("run", *run) == 0
    told = capsys.readouterr().out
    kind = task.partition(":")[0]
    assert "rarest" in told if kind == "binary" else f"task: {task}" in told
    result = json.loads((out / "result.json").read_text())
    metrics = {"regression": "mean_absolute_error", "multilabel": "label_accuracy"}
    metric = metrics.get(kind, "accuracy")
    assert result["metric"] == metric and metric in told
    assert exit_of("replay", out) == exit_of("report", out, "--html") == 0
    written = tmp_path / "p.csv"
    assert exit_of("predict", out, tmp_path / "t.csv", "--client", "s0", "--out", written) == 0
    first, *rows = csv.reader(written.read_text().splitlines())
    assert first == header and len(rows) == N
    assert exit_of("describe", tmp_path / "t.csv", *given[2:11]) == 0
    assert "a run would train on 3 clients" in capsys.readouterr().out


def test_noise_asks_for_the_task_that_labels_have_chosen(tmp_path: Path, capsys: Any) -> None:
    pandas.DataFrame(COLUMNS).to_csv(tmp_path / "t.csv", index=False)
    given = ["--data", tmp_path / "t.csv", "--client-column", "site", "--label-column", "price"]
    given += ["--feature-columns", "a", "b", "--clip", "1", "--noise", "1", "--rounds", "1"]
    given += ["--model", "linear", "--out", tmp_path / "run"]
    assert exit_of("run", "fedavg", *given) == 2
    assert "say it (--task regression)" in capsys.readouterr().err
    assert exit_of("run", "fedavg", *given, "--task", "regression") == 0


def test_a_federation_of_a_file_is_made_again_by_its_options(tmp_path: Path) -> None:
    pandas.DataFrame(COLUMNS).to_csv(tmp_path / "t.csv", index=False)
    roles = {"client_column": "site", "feature_columns": ("a", "b"), "seed": 0}
    made = Federation.from_csv(
        tmp_path / "t.csv", label_column=["rain", "wind"], task="multilabel", **roles
    )
    options = Simulation.of(made)
    assert options is not None and options.label_column == "rain,wind"
    assert options.federation().digest() == made.digest()
    own = Regression(bounds=((0, 200),))
    kept = Federation.from_csv(tmp_path / "t.csv", label_column="price", task=own, **roles)
    assert Simulation.of(kept) is None
