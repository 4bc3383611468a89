"""Scores of clients' models are scikit-learn's of what the models predict, and so are baselines."""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics
from sklearn.dummy import DummyClassifier, DummyRegressor

from securecluster import Federation, LabelSwap
from securecluster.cli.main import main
from securecluster.core.randomness import Randomness
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import Binary, Language, MultiLabel, Trajectory
from securecluster.protocols import CFL, FedAvg, Settings
from securecluster.results.scores import (
    SCORES,
    class_scores,
    label_scores,
    score_rows,
    study_scores,
    value_scores,
)

CLASSES = SCORES[:7]


def oracle(y: Any, p: Any, predicted: Any) -> dict[str, float]:
    """Return scikit-learn's scores of classes as its user guide computes them."""
    classes = p.shape[1]
    two = classes == 2
    several = len(np.unique(y)) > 1
    present = np.unique(y)
    one_hot = np.eye(classes)[y]
    found = {
        "accuracy": metrics.accuracy_score(y, predicted),
        "balanced_accuracy": np.mean([(predicted[y == k] == k).mean() for k in present]),
        "f1": metrics.f1_score(y, predicted, average="binary" if two else "macro"),
        "log_loss": metrics.log_loss(y, p, labels=range(classes)),
        "brier_score": ((one_hot - p) ** 2).sum(1).mean() / (2 if two else 1),
        "roc_auc": np.nan,
        "average_precision": np.nan,
    }
    if several and two:
        found["roc_auc"] = metrics.roc_auc_score(y, p[:, 1])
        found["average_precision"] = metrics.average_precision_score(y, p[:, 1])
    elif several:
        columns = [(one_hot[:, k], p[:, k]) for k in present]
        found["roc_auc"] = np.mean([metrics.roc_auc_score(*pair) for pair in columns])
        precisions = [metrics.average_precision_score(*pair) for pair in columns]
        found["average_precision"] = np.mean(precisions)
    return found


def drawn(seed: int, n: int, classes: int, present: int) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    return draw.integers(present, size=n), draw.dirichlet(np.ones(classes), n)


@pytest.mark.parametrize(
    ("n", "classes", "present"), [(50, 2, 2), (40, 5, 5), (30, 5, 3), (9, 3, 1), (1, 4, 4)]
)
def test_scores_of_classes_are_those_of_scikit_learn(n: int, classes: int, present: int) -> None:
    for seed in range(6):
        y, p = drawn(seed, n, classes, present)
        if seed % 2:
            p = p.round(1)  # equal shares
            p /= p.sum(1, keepdims=True)
        found = class_scores(y, p)
        assert tuple(found) == CLASSES
        assert found == pytest.approx(oracle(y, p, p.argmax(1)), abs=1e-12, nan_ok=True)
        if len(np.unique(y)) == classes > 2:
            ovr = metrics.roc_auc_score(y, p, multi_class="ovr")
            assert found["roc_auc"] == pytest.approx(ovr)


def test_the_brier_score_is_that_of_scikit_learn() -> None:
    y, p = drawn(0, 40, 2, 2)
    assert class_scores(y, p)["brier_score"] == pytest.approx(metrics.brier_score_loss(y, p[:, 1]))


def test_what_is_not_defined_is_no_number_and_no_warning() -> None:
    y, p = drawn(0, 12, 2, 1)
    p[:, :] = [0.9, 0.1]
    scores = class_scores(y, p)
    # one class, which is always right: there is no ROC curve, and nobody is found or missed
    undefined = {name for name, value in scores.items() if np.isnan(value)}
    assert undefined == {"roc_auc", "average_precision", "f1"} and scores["accuracy"] == 1
    assert all(np.isnan(value) for value in class_scores(y[:0], p[:0]).values())
    diverged = class_scores(*drawn(0, 8, 3, 3)[:1], np.full((8, 3), np.nan))
    assert not np.isnan(diverged["accuracy"]) and np.isnan(diverged["log_loss"])
    assert np.isnan(value_scores(np.ones(1), np.ones((1, 1)))["r2_score"])
    assert np.isnan(value_scores(np.ones(0), np.ones((0, 1)))["mean_absolute_error"])


def test_scores_of_several_labels_are_means_over_labels() -> None:
    draw = np.random.default_rng(0)
    y, p = draw.integers(2, size=(60, 3)), draw.random((60, 3))
    found = label_scores(y.astype(np.float32), p)
    marked = (p > 0.5).astype(int)
    expected = {
        "accuracy": 1 - metrics.hamming_loss(y, marked),
        "f1": metrics.f1_score(y, marked, average="macro"),
        "roc_auc": metrics.roc_auc_score(y, p),
        "average_precision": metrics.average_precision_score(y, p),
        "log_loss": np.mean([metrics.log_loss(y[:, k], p[:, k]) for k in range(3)]),
        "brier_score": metrics.mean_squared_error(y, p),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-12)
    y[:, 1] = 0  # a label that nobody has counts in no area
    area = np.mean([metrics.roc_auc_score(y[:, k], p[:, k]) for k in (0, 2)])
    assert label_scores(y, p)["roc_auc"] == pytest.approx(area)
    one = label_scores(y[:, 0], p[:, 0])
    assert one == pytest.approx(class_scores(y[:, 0], np.stack([1 - p[:, 0], p[:, 0]], 1)))


@pytest.mark.parametrize("width", [None, 1, 3])
def test_scores_of_values_are_means_over_values(width: int | None) -> None:
    draw = np.random.default_rng(0)
    y = draw.normal(size=40 if width is None else (40, width))
    values = y.reshape(40, -1) + draw.normal(size=(40, width or 1))
    error = y.reshape(40, -1) - values
    spread = y.reshape(40, -1) - y.reshape(40, -1).mean(0)
    assert value_scores(y, values) == pytest.approx(
        {
            "r2_score": (1 - (error**2).sum(0) / (spread**2).sum(0)).mean(),
            "mean_absolute_error": np.abs(error).mean(),
            "root_mean_squared_error": np.sqrt((error**2).mean(0)).mean(),
        }
    )


def table(seed: int = 0) -> dict[str, pd.DataFrame]:
    """Return sites whose labels have names, of which one has a single label to test on."""
    draw = np.random.default_rng(seed)
    sites = {}
    for k, site in enumerate(("north", "south", "west")):
        x = draw.normal(5 * k, 1 + k, (40, 3))
        y = np.array(["ill", "sick", "well"])[(x[:, 0] > 5 * k).astype(int) + (k == 2)]
        sites[site] = pd.DataFrame(x, columns=list("abc")).assign(label=y)
    return sites


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_each_column_is_the_score_of_what_models_and_dummies_predict(
    dtype: str, tmp_path: Path
) -> None:
    data = pd.concat([rows.assign(site=site) for site, rows in table().items()])
    for federation in (
        Federation.from_frame(data, client="site", label="label", scaling="client", seed=0),
        Federation.simulate("digits", scenario=LabelSwap(2), clients=4, samples=60, seed=0),
    ):
        fitted = CFL(rounds=2, model="linear").fit(federation, Settings(dtype=dtype))
        frame = fitted.to_frame("scores")
        assert frame["cluster"].tolist() == fitted.labels_.tolist()
        classes = federation.classes
        atol = 1e-9 if dtype == "float64" else 1e-7  # products of matrices round by their height
        for name, shard in zip(federation.names, federation.shards, strict=True):
            module = fitted.module_of(name)
            network = getattr(module, "network", module)
            logits = _logits(network, shard.x_test, dtype)
            p = np.exp(logits - logits.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            y = shard.y_test
            dummy = DummyClassifier(strategy="prior").fit(shard.x, shard.y)
            shares = np.zeros((len(y), classes))
            shares[:, dummy.classes_] = dummy.predict_proba(shard.x_test)
            expected = oracle(y, p, logits.argmax(1))
            baseline = oracle(y, shares, dummy.predict(shard.x_test))
            row = frame.loc[name]
            assert row["samples"] == len(y)
            for score in CLASSES:
                assert row[score] == pytest.approx(expected[score], abs=atol, nan_ok=True)
                known = row[f"{score}_baseline"]
                assert known == pytest.approx(baseline[score], abs=1e-9, nan_ok=True)
        np.testing.assert_allclose(frame["accuracy"], fitted.accuracy_)
        fitted.save(tmp_path / dtype / federation.data)
        kept = CFL.load(tmp_path / dtype / federation.data).to_frame("scores")
        pd.testing.assert_frame_equal(kept, frame, check_exact=True)


def _logits(network: Any, x: Any, dtype: str) -> Any:
    import torch

    with torch.no_grad():
        outputs = network(torch.as_tensor(x).to(getattr(torch, dtype)))
    return outputs.double().numpy()


def test_probabilities_that_a_user_gets_have_the_same_scores() -> None:
    federation = Federation.simulate("digits", clients=4, samples=60, seed=0)
    fitted = FedAvg(rounds=2, model="linear").fit(federation)
    frame = fitted.to_frame("scores")
    for name, shard in zip(federation.names, federation.shards, strict=True):
        p = fitted.predict_proba(name, shard.x_test)
        expected = oracle(shard.y_test, p, fitted.predict_samples(name, shard.x_test))
        found = frame.loc[name, list(CLASSES)].to_dict()
        assert found == pytest.approx(expected, abs=1e-9, nan_ok=True)


@pytest.mark.parametrize("scaling", ["none", "client", "bounds"])
def test_numbers_are_scored_in_their_own_units(scaling: Any) -> None:
    draw = np.random.default_rng(0)
    sites = {}
    for name in ("north", "south"):
        x = draw.normal(size=(60, 3))
        sites[name] = pd.DataFrame(x, columns=list("abc")).assign(
            age=50 + 9 * x[:, 0] + x[:, 1] ** 2
        )
    given = {"a": (-4, 4), "b": (-4, 4), "c": (-4, 4), "age": (0, 120)}
    data = pd.concat([rows.assign(site=site) for site, rows in sites.items()])
    federation = Federation.from_frame(
        data,
        client="site",
        label="age",
        scaling=given if scaling == "bounds" else scaling,
        task="regression",
        seed=0,
    )
    fitted = FedAvg(rounds=3, model="linear").fit(federation)
    frame = fitted.to_frame("scores")
    for name, rows in sites.items():
        order = Randomness(0).generator("split", name).permutation(60)
        train, test = rows.iloc[order[:48]], rows.iloc[order[48:]]
        y, values = test["age"], fitted.predict_samples(name, test[list("abc")])
        row = frame.loc[name]
        found = row[["r2_score", "mean_absolute_error", "root_mean_squared_error"]].tolist()
        by = (metrics.r2_score, metrics.mean_absolute_error, metrics.root_mean_squared_error)
        assert found == pytest.approx([score(y, values) for score in by], rel=1e-5)
        for score, strategy in zip(by, ("mean", "median", "mean"), strict=True):
            dummy = DummyRegressor(strategy=strategy).fit(train, train["age"]).predict(test)
            known = row[f"{score.__name__}_baseline"]
            assert known == pytest.approx(score(y, dummy), rel=1e-5)
    np.testing.assert_allclose(fitted.scores_, frame["mean_absolute_error"], rtol=1e-5)
    baselines = fitted.kept_.learned.baselines
    np.testing.assert_allclose(baselines, frame["mean_absolute_error_baseline"], rtol=1e-5)


@pytest.mark.parametrize("kind", [Binary, MultiLabel])
def test_labels_of_their_own_outputs_are_scored_by_their_probabilities(kind: Any) -> None:
    draw = np.random.default_rng(0)
    width = 1 if kind is Binary else 3
    sites = {}
    for name in ("north", "south"):
        x = draw.normal(size=(60, 3))
        y = (x + draw.normal(size=(60, 3)) > 0.3).astype(int)
        sites[name] = (x, y[:, 0] if kind is Binary else y)
    federation = Federation.from_arrays(sites, objective=kind(), seed=0)
    fitted = FedAvg(rounds=3, model="linear").fit(federation)
    frame = fitted.to_frame("scores")
    for name, shard in zip(federation.names, federation.shards, strict=True):
        p = fitted.predict_proba(name, shard.x_test)[:, -width:]
        y = shard.y_test.astype(int)
        row = frame.loc[name]
        assert row["roc_auc"] == pytest.approx(metrics.roc_auc_score(y, p), abs=1e-7)
        right = (y == (p > 0.5)).mean()
        dummies = [DummyClassifier(strategy="prior").fit(shard.x, column) for column in shard.y.T]
        given = np.stack([dummy.predict(shard.x_test) for dummy in dummies], axis=1)
        assert row[fitted.metric_] == pytest.approx(right)
        assert row[f"{fitted.metric_}_baseline"] == pytest.approx((given == y).mean())
        shares = [dummy.predict_proba(shard.x_test)[:, 1] for dummy in dummies]
        losses = [metrics.log_loss(*pair) for pair in zip(y.T, shares, strict=True)]
        assert row["log_loss_baseline"] == pytest.approx(np.mean(losses))


def test_text_and_positions_have_their_metric_beside_the_baseline() -> None:
    draw = np.random.default_rng(0)
    tokens = {f"c{k}": draw.integers(0, 5 + k, (30, 9)) for k in range(3)}
    text = {name: (rows[:, :-1], rows[:, 1:]) for name, rows in tokens.items()}
    federation = Federation.from_arrays(text, objective=Language(), classes=8, seed=0)
    fitted = FedAvg(rounds=1).fit(federation)
    frame = fitted.to_frame("scores")
    assert list(frame) == ["cluster", "samples", "perplexity", "perplexity_baseline"]
    for name, shard in zip(federation.names, federation.shards, strict=True):
        dummy = DummyClassifier(strategy="prior").fit(shard.y.reshape(-1, 1), shard.y.ravel())
        tested = shard.y_test.ravel()
        shares = np.zeros((len(tested), 8))
        shares[:, dummy.classes_] = dummy.predict_proba(tested[:, None])
        loss = metrics.log_loss(tested, shares, labels=range(8))
        assert frame.loc[name, "perplexity_baseline"] == pytest.approx(np.exp(loss))
    paths = draw.random((3, 30, 5, 2)).astype(np.float32)
    walks = {f"w{k}": (paths[k, :, :-1], paths[k, :, -1]) for k in range(3)}
    federation = Federation.from_arrays(walks, objective=Trajectory((10.0, 20.0)), seed=0)
    frame = FedAvg(rounds=1).fit(federation).to_frame("scores")
    for name, shard in zip(federation.names, federation.shards, strict=True):
        dummy = DummyRegressor().fit(shard.x[:, 0], shard.y)
        error = (dummy.predict(shard.x_test[:, 0]) - shard.y_test) * (10, 20)
        distance = np.linalg.norm(error, axis=1).mean()
        assert frame.loc[name, "position_error_baseline"] == pytest.approx(distance)


def test_without_predictions_there_are_no_scores_and_a_sentence_says_so() -> None:
    federation = Federation.simulate("digits", clients=4, samples=40, seed=0)
    shards = tuple(replace(s, x_test=s.x_test[:0], y_test=s.y_test[:0]) for s in federation.shards)
    fitted = FedAvg(rounds=1, model="linear").fit(replace(federation, shards=shards))
    frame = fitted.to_frame("scores")
    assert frame[["accuracy", "accuracy_baseline"]].isna().all(axis=None)
    objective = federation.objective
    assert study_scores(fitted.kept_, objective, {})["scores"] == {}
    fitted.kept_.clients.extra.clear()
    assert study_scores(fitted.kept_, objective, {}) == {}
    with pytest.raises(UsageError, match="no predictions on test samples"):
        score_rows(fitted.kept_, objective)


def test_clients_without_test_samples_have_no_scores_beside_others_that_do() -> None:
    federation = Federation.simulate("digits", clients=4, samples=40, seed=0)
    first = federation.shards[0]
    shards = (replace(first, x_test=first.x_test[:0], y_test=first.y_test[:0]),)
    fitted = FedAvg(rounds=1, model="linear").fit(
        replace(federation, shards=shards + federation.shards[1:])
    )
    frame = fitted.to_frame("scores")
    assert frame.loc["0"].drop(["cluster", "samples"]).isna().all()
    found = study_scores(fitted.kept_, federation.objective, {})
    assert found["accuracy_baseline"] == pytest.approx(frame["accuracy_baseline"].mean())
    assert found["scores"]["f1"] == pytest.approx(frame["f1"].mean())


def skewed(samples: int = 40) -> dict[str, Any]:
    """Return two clients of nine samples in ten of one label, each another, and one with one label
    alone, all of which have the same inputs."""
    draw = np.random.default_rng(0)
    sites = {}
    for name, label, share in (("a", 0, 0.9), ("b", 1, 0.9), ("c", 2, 1.0)):
        y = np.where(np.arange(samples) < share * samples, label, (label + 1) % 3)
        sites[name] = (draw.random((samples, 4)), y)
    return sites


def test_models_below_their_baseline_are_told_in_warning_and_result() -> None:
    federation = Federation.from_arrays(skewed(), classes=3, seed=0)
    with pytest.warns(SecureClusterWarning, match="worse than answers that know") as caught:
        fitted = FedAvg(rounds=10, model="linear").fit(federation)
    frame = fitted.to_frame("scores")
    below = frame.index[
        (frame["accuracy"] < frame["accuracy_baseline"]) & (frame["accuracy_baseline"] < 1)
    ]
    assert len(below) > 0 and "c" not in below
    assert fitted.warning_ == str(caught[0].message)
    assert f"the models of {len(below)} of 3 clients" in fitted.warning_
    for name in below:
        score, known = frame.loc[name, ["accuracy", "accuracy_baseline"]]
        said = f"{name} {score:.3f} against {known:.3f} ({frame.loc[name, 'samples']} samples)"
        assert said in fitted.warning_
    assert FedAvg(rounds=9, model="linear").fit(federation).warning_ is None


def test_reports_and_pages_have_them_and_what_is_handed_over_has_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], no_pictures: None
) -> None:
    sites = {f"[bold]{name}": rows for name, rows in skewed().items()}
    federation = Federation.from_arrays(sites, classes=3, seed=0)
    folder = tmp_path / "run"
    fitted = FedAvg(rounds=3, model="linear").fit(federation, folder=folder)
    frame = fitted.to_frame("scores")
    below = frame.index[
        (frame["accuracy"] < frame["accuracy_baseline"]) & (frame["accuracy_baseline"] < 1)
    ].tolist()
    scores = json.loads((folder / "result.json").read_text())["metrics"]["accuracy"]
    assert scores["below_baseline"] == below != []
    assert scores["baseline"] == pytest.approx(frame["accuracy_baseline"].mean())
    assert scores["baseline_per_cluster"] == pytest.approx([scores["baseline"]])
    bundles = [tmp_path / "covered.zip", tmp_path / "all.zip"]
    assert main(["report", str(folder), "--html", "--bundle", str(bundles[0])]) == 0
    printed = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"knows training targets alone: {', '.join(below)}" in printed
    row = frame.iloc[0]
    cells = [f"{row[name]:.3f} ({row[f'{name}_baseline']:.3f})" for name in CLASSES[:2]]
    assert f"[bold]a 0 {row['samples']:.0f} {' '.join(cells)}" in printed
    means = [f"{frame[name].mean():.3f} (" for name in CLASSES[:2]]
    assert f"mean, all clients all {frame['samples'].sum()} {means[0]}" in printed
    page = (folder / "report.html").read_text()
    assert all(text in page for text in (*cells, *means, "no ε covers them"))
    assert main(["report", str(folder), "--bundle", str(bundles[1]), "--with-uncovered"]) == 0
    for path, is_there in zip(bundles, (False, True), strict=True):
        with zipfile.ZipFile(path) as bundle:
            texts = [bundle.read(name).decode() for name in ("report.html", "result.json")]
        assert [cells[0] in texts[0], '"baseline"' in texts[1]] == [is_there, is_there]
