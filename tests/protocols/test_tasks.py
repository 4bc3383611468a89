"""Every protocol with every task: it runs from end to end, or names the task it cannot learn."""

from __future__ import annotations

import json
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import mean_absolute_error, root_mean_squared_error

from securecluster import FedAvg, Federation
from securecluster.errors import UsageError
from securecluster.models.objectives import MultiLabel, Objective, Regression
from securecluster.protocols import CFL, FLHC, IFCA, RDPCFL, SRFCA
from securecluster.protocols.conformance.checks import small_params
from securecluster.protocols.registry import ALL_TASKS, PROTOCOLS, protocol_class
from securecluster.results.exported_models import Prepared

CLIENTS, ROWS, FEATURES = 8, 40, 6
TARGETS = {"regression": 1, "multilabel": 3, "binary": 1}
OWN: dict[str, dict[str, Any]] = {"hidden": {"aggregation": "plain"}}


def samples(task: str, seed: int = 0, scale: float = 1.0) -> dict[str, Any]:
    """Clients of two groups, whose targets go against each other."""
    draw, clients = np.random.default_rng(seed), {}
    for i in range(CLIENTS):
        x = draw.normal(size=(ROWS, FEATURES)).astype(np.float32)
        z = x @ np.array([1, -2, 0.5, 0, 0, 1]) * (1 if i % 2 else -1)
        y: Any = scale * (z + 3)
        if task == "binary":
            y = np.where(z > 0, "yes", "no")
        elif task == "multilabel":
            y = np.stack([z > 0, x[:, 0] > 0, x[:, 1] > 0.5], 1).astype(int)
        clients[f"c{i}"] = (x, y)
    return clients


def federation(task: Any, scale: float = 1.0, **options: Any) -> Federation:
    named = task if isinstance(task, str) else task.kind
    if named == "binary":
        options["classes"] = ["no", "yes"]
    return Federation.from_arrays(samples(named, 0, scale), objective=task, seed=0, **options)


def made(name: str) -> Any:
    options = small_params(protocol_class(name)) | OWN.get(name, {})
    return protocol_class(name)(**options | {"model": "linear"})


def exported(folder: Path) -> Any:
    spec = util.spec_from_file_location("loader", folder / "load.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.parametrize("name", PROTOCOLS)
def test_protocols_learn_the_tasks_that_the_list_says(name: str, task: str) -> None:
    said = PROTOCOLS[name].tasks
    if task in said.split(", "):
        assert made(name).config(federation(task), "float32")["objective"]["kind"] == task
        assert said == ALL_TASKS
        return
    with pytest.raises(UsageError, match=f"the task {task}") as refused:
        made(name).config(federation(task), "float32")
    assert "\n" not in str(refused.value) and ": " in str(refused.value)


LEARNED = [name for name, fact in PROTOCOLS.items() if fact.tasks == ALL_TASKS]


# one model of two opposite groups may be worse than a constant
@pytest.mark.filterwarnings("ignore:on their own test samples the models of")
@pytest.mark.few(6)
@pytest.mark.parametrize("task", TARGETS)
@pytest.mark.parametrize("name", LEARNED)
def test_runs_predict_are_saved_and_exported(name: str, task: str, tmp_path: Path) -> None:
    fed = federation(task)
    fitted = made(name).fit(fed)
    x, y = samples(task)["c0"]
    predicted = fitted.predict_samples("c0", x)
    assert predicted.shape == np.shape(y)
    assert np.isfinite(fitted.scores_).all() and fitted.metric_ == fed.objective.metric
    right = (predicted == y).mean() if task != "regression" else np.abs(predicted - y).mean()
    # float32 predictions around 1
    assert fitted.score("c0", x, y) == pytest.approx(right, abs=1e-7)
    if task == "regression":
        with pytest.raises(UsageError, match="a number has no probability"):
            fitted.predict_proba("c0", x)
    else:
        shares = fitted.predict_proba("c0", x)
        assert shares.shape == (ROWS, 3 if task == "multilabel" else 2)
        most = shares > 0.5 if task == "multilabel" else fitted.classes_[shares.argmax(1)]
        assert (most == predicted).all()
    fitted.save(tmp_path / "run")
    loaded = protocol_class(name).load(tmp_path / "run")
    assert (loaded.predict_samples("c0", x) == predicted).all()
    loaded.export(tmp_path / "models", clients=["c0"])
    assert json.loads((tmp_path / "models" / "clusters.json").read_text())["objective"] == task
    loader = exported(tmp_path / "models")
    answers = loader.predict(loader.load("c0"), torch.as_tensor(x))
    assert (np.asarray(answers).reshape(predicted.shape) == predicted).all()


SCALES: dict[str, tuple[Objective, dict[str, Any]]] = {
    "each client's": (Regression(), {"scaling": "client"}),
    "prepared": (Regression("huber"), {"prepare": "auto"}),
    "bounds": (Regression("absolute", bounds=((-3e6, 9e6),)), {}),
    "bounds of all": (Regression(bounds=((-3e6, 9e6),)), {"scaling": (-4, 4)}),
}


@pytest.mark.filterwarnings("ignore")  # of the exporter
@pytest.mark.parametrize("form", ["safetensors", "onnx"])
@pytest.mark.parametrize("scale", SCALES)
def test_the_scale_of_targets_is_undone_wherever_they_are_predicted(
    scale: str, form: str, tmp_path: Path
) -> None:
    kind, options = SCALES[scale]
    fed = federation(kind, 1e6, **options)
    fitted = CFL(model="linear", rounds=30, eps1=0.9, lr=0.1).fit(fed)
    x, y = samples("regression", 0, 1e6)["c0"]
    predicted = fitted.predict_samples("c0", x)
    assert np.abs(predicted - y).mean() < 0.6e6 < 2e6 < np.abs(y - y.mean()).mean() * 1.3
    # of held-out rows in their own numbers, and of all rows alike
    assert 0.2 < fitted.scores_[0] / fitted.score("c0", x, y) < 5
    if form == "onnx":
        pytest.importorskip("onnxscript")
    fitted.export(tmp_path / "m", clients=["c0"], format=form)
    if form == "onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "m/client0.onnx")
        (taken,) = session.get_inputs()
        given = x.astype(np.float64 if "double" in taken.type else np.float32)
        (answers,) = session.run(None, {"samples": given})
    else:
        loader = exported(tmp_path / "m")
        model = loader.load("c0")
        assert type(model).__name__ == Prepared.__name__
        answers = np.asarray(loader.predict(model, torch.as_tensor(x)))
        if kind.as_json().get("standardised") or options.get("scaling") == "client":
            with pytest.raises(ValueError, match="its own mean and deviation"):
                loader.load(cluster=int(fitted.labels_[0]))
    assert answers[:, 0] == pytest.approx(predicted, rel=1e-4)


def test_a_clients_score_is_its_error_in_its_own_unit() -> None:
    fed = federation("regression", 1e6, scaling="client")
    fitted = FedAvg(model="linear", rounds=2).fit(fed)
    for k, (name, shard) in enumerate(zip(fed.names, fed.shards, strict=True)):
        assert shard.scale is not None and shard.target is not None
        x = shard.x_test * np.asarray(shard.scale.width) + np.asarray(shard.scale.centre)
        y = shard.y_test * shard.target.width[0] + shard.target.centre[0]
        assert fitted.scores_[k] == pytest.approx(fitted.score(name, x, y), rel=1e-4)
        row = fitted.to_frame("scores").loc[name]
        assert row["mean_absolute_error"] == pytest.approx(fitted.scores_[k], rel=1e-4)
        y_train = shard.y * shard.target.width[0] + shard.target.centre[0]
        away = mean_absolute_error(y, np.full_like(y, np.median(y_train)))
        assert row["mean_absolute_error_baseline"] == pytest.approx(away, rel=1e-4)
        assert row["root_mean_squared_error"] == pytest.approx(
            root_mean_squared_error(y, fitted.predict_samples(name, x)), rel=1e-4
        )


@pytest.mark.parametrize(
    "method",
    [
        IFCA(k=2, starts=1, rounds=2, clip=1.0, noise=1.0, dp_unit="client", model="linear"),
        SRFCA(rounds=2, local_rounds=1, clip=1.0, noise=1.0, dp_unit="client", model="linear"),
        RDPCFL(k=2, rounds=2, clip=1.0, noise=1.0, dp_unit="example", model="linear"),
        FedAvg(rounds=2, clip=1.0, noise=1.0, dp_unit="example", model="linear"),
        FLHC(rounds=2, pre_rounds=1, clip=1.0, noise=1.0, dp_unit="client", model="linear"),
    ],
    ids=lambda method: f"{method.name} {method.privacy.dp_unit}",
)
@pytest.mark.parametrize("kind", [Regression(bounds=((-9, 15),)), MultiLabel()], ids=repr)
def test_private_runs_say_what_of_the_targets_is_public(method: Any, kind: Objective) -> None:
    fitted = method.fit(federation(kind))
    assert 0 < fitted.ledger_.price(fitted.kept_.learned.config["delta"]).epsilon < np.inf
    assert np.isfinite(fitted.scores_).all()


def test_targets_that_each_client_standardises_protect_no_single_example() -> None:
    fed = federation("regression", scaling="client")
    method = FedAvg(rounds=1, clip=1.0, noise=1.0, dp_unit="example", model="linear")
    with pytest.raises(UsageError, match="standardises its targets"):
        method.config(fed, "float32")
    own = federation(Regression(standardised=True))
    with pytest.raises(UsageError, match="standardises its targets"):
        method.config(own, "float32")


def test_newcomers_have_the_task_of_the_run() -> None:
    fitted = FedAvg(model="linear", rounds=1).fit(federation("regression"))
    others = Federation.from_arrays(
        {"n": samples("multilabel")["c1"]}, objective="multilabel", seed=0
    )
    with pytest.raises(UsageError, match="give the same kind of data"):
        fitted.join(others)
    (label,) = fitted.join(
        Federation.from_arrays(
            {"n": samples("regression", 3)["c1"]}, objective="regression", seed=0
        )
    )
    assert (
        label == 0
        and np.isfinite(fitted.predict_samples("n", samples("regression")["c1"][0])).all()
    )
