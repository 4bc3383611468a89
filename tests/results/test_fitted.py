"""What a run's result keeps of the names of the data, and what it gives as objects of pandas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import StandardScaler
from torch import nn

from securecluster import CFL, FedAvg, Federation, load
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.results.preparation import SCALES

pandas = pytest.importorskip("pandas")

DRAW = np.random.default_rng(0)
TABLE = pandas.DataFrame(DRAW.normal(size=(80, 3)), columns=["age", "dose", "weight"])
SITES = np.array(["north", "south", "east", "west"])[np.arange(80) % 4]
ILL = pandas.Series(np.where(TABLE["age"] > 0, "ill", "healthy"))
SMALL: dict[str, Any] = {"model": "linear", "rounds": 2}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.from_groups(TABLE, ILL, SITES, classes=["healthy", "ill"], seed=0)


def test_groups_are_fitted_as_their_federation_is(federation: Federation) -> None:
    run = FedAvg(**SMALL).fit(TABLE, ILL, groups=SITES)
    same = FedAvg(**SMALL).fit(federation)
    assert run.to_frame("labels").index.tolist() == ["east", "north", "south", "west"]
    for name, value in run.models_[0].items():
        assert np.array_equal(value, same.models_[0][name])
    for wrong in (lambda: FedAvg().fit(TABLE, ILL), lambda: FedAvg().fit(TABLE)):
        with pytest.raises(UsageError, match=r"not DataFrame: .*fit\(X, y, groups=...\)"):
            wrong()


def test_names_are_in_the_folder_and_in_what_is_loaded(
    federation: Federation, tmp_path: Path
) -> None:
    run = CFL(**SMALL).fit(federation, folder=tmp_path / "run")
    loaded = load(tmp_path / "run")
    for fitted in (run, loaded):
        assert fitted.classes_.tolist() == ["healthy", "ill"]
        assert fitted.kept_.learned.config["feature_names"] == ["age", "dose", "weight"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["class_names"] == ["healthy", "ill"]
    assert result["feature_names"] == ["age", "dose", "weight"]
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["network"]["class_names"] == ["healthy", "ill"]
    assert config["clients"] == ["east", "north", "south", "west"]


def test_class_numbers_are_their_own_names() -> None:
    digits = Federation.simulate("digits", clients=4, samples=20, seed=0)
    run = FedAvg(**SMALL).fit(digits)
    assert run.classes_.tolist() == list(range(10))
    assert run.classes_.dtype.kind == "i"
    assert "class_names" not in run.kept_.learned.config
    answers = Federation.from_groups(TABLE, ILL == "ill", SITES, seed=0)
    assert FedAvg(**SMALL).fit(answers).classes_.tolist() == [False, True]


def test_results_are_objects_of_pandas(federation: Federation) -> None:
    run = CFL(**SMALL, clip=1.0, noise=1.0).fit(federation)
    labels = run.to_frame("labels")
    assert labels.to_dict() == dict(zip(federation.names, run.labels_.tolist(), strict=True))
    history = run.to_frame("history")
    assert history.index.tolist() == [1, 2]
    assert history["up"].tolist() == [line["up"] for line in run.history_]
    sent = run.to_frame("bytes")
    assert sent["up"].sum() == run.bytes_["up"] and sent["down"].sum() == run.bytes_["down"]
    assert set(sent.index) == set(run.bytes_["by_message"])
    ledger = run.to_frame("ledger")
    assert len(ledger) == sum(len(event.ids) for event in run.ledger_.events)
    assert set(ledger["client"]) == set(federation.names)
    noisy = ledger[ledger["mechanism"] == "gaussian"]
    assert noisy["noise_multiplier"].unique().tolist() == [1.0]
    with pytest.raises(UsageError, match="did you mean 'labels'"):
        run.to_frame("label")


def test_newcomers_are_numbered_by_the_names_of_the_run(federation: Federation) -> None:
    run = CFL(**SMALL).fit(federation)

    def joined(labels: Any, **more: Any) -> list[int]:
        rows = {"new": (TABLE[:20], labels)}
        clusters: list[int] = run.join(Federation.from_arrays(rows, seed=0, **more)).tolist()
        return clusters

    only_ill = ["ill"] * 20
    assert joined(only_ill) == joined(only_ill, classes=["ill", "healthy"])
    for labels, more, sentence in (
        (["dead"] * 20, {}, "client 'new': the label 'dead' is none of the classes"),
        ([0] * 20, {}, "have no names: give its labels as 'healthy', 'ill'"),
        (only_ill, {"scaling": "client"}, "features are scaled by .*client.*, the run's by None"),
    ):
        with pytest.raises(UsageError, match=sentence):
            joined(labels, **more)
    numbered = Federation.from_groups(TABLE, (ILL == "ill").astype(int), SITES, seed=0)
    run = CFL(**SMALL).fit(numbered)
    with pytest.raises(UsageError, match=r"have names .* and the run's are class numbers"):
        joined(only_ill)


def test_newcomers_get_the_class_numbers_of_the_run(federation: Federation) -> None:
    run = FedAvg(**SMALL).fit(federation)
    theta = run.models_[0]
    mine = SITES == "north"
    # all ill: number 0 by the labels of this client alone, 1 in the run
    ill = mine & (ILL == "ill").to_numpy()
    newcomer = Federation.from_arrays({"new": (TABLE[ill], ILL[ill])}, seed=0)
    assert newcomer.shards[0].y.max() == 0
    renumbered = newcomer.with_classes(run.kept_.learned.config["class_names"])
    assert renumbered.shards[0].y.min() == 1
    assert len(theta) and run.join(newcomer).tolist() == [0]


@pytest.mark.parametrize("scaling", ["client", {"age": (-1, 1), "dose": (-9, 9), "weight": (0, 1)}])
@pytest.mark.filterwarnings("ignore:values in columns")
def test_a_run_keeps_the_scales_of_its_features(scaling: Any, tmp_path: Path) -> None:
    federation = Federation.from_groups(TABLE, ILL, SITES, scaling=scaling, seed=0)
    run = CFL(**SMALL).fit(federation)
    run.save(tmp_path)
    kept = CFL.load(tmp_path).kept_
    plain = Federation.from_groups(TABLE, ILL, SITES, seed=0)
    for k, shard in enumerate(federation.shards):
        module: Any = run.module_of(federation.names[k])
        found = module.prepared(torch.as_tensor(plain.shards[k].x_test)).numpy()
        assert np.allclose(found, shard.x_test, atol=1e-5)
        if scaling == "client":
            scaler = StandardScaler().fit(plain.shards[k].x)
            assert np.allclose(found, scaler.transform(plain.shards[k].x_test), atol=1e-4)
    # a client's mean is of its data: it is beside its model, and nowhere that the server knows
    assert (SCALES in kept.clients.extra) == (scaling == "client")
    if scaling == "client":
        assert kept.learned.config["scaling"] == {"kind": "client"}
        with pytest.raises(UsageError, match="samples are some client's: say whose"):
            run.module_of(cluster=0)


def test_a_module_with_a_softmax_is_doubted_where_it_is_fitted(federation: Federation) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Softmax(-1))
    said = "Sequential gives probabilities, as with a softmax at its end"
    with pytest.warns(SecureClusterWarning, match=said) as caught:
        FedAvg(model=module, rounds=1).fit(federation)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("scaling", ["none", "client", (-4, 4)])
def test_predictions_are_labels_of_samples_on_the_scale_of_the_data(scaling: Any) -> None:
    federation = Federation.from_groups(TABLE, ILL, SITES, scaling=scaling, seed=0)
    run = FedAvg(model="linear", rounds=20, lr=0.5).fit(federation)
    for name in federation.names:
        mine = name == SITES
        found = run.predict_samples(name, TABLE[mine])
        assert set(found) == {"healthy", "ill"}
        assert run.score(name, TABLE[mine], ILL[mine]) == (found == ILL[mine]).mean() > 0.7
        assert run.predict_proba(name, TABLE[mine][["weight", "age", "dose"]]).shape == (20, 2)
    if scaling == "client":
        moved = FedAvg(model="linear", rounds=20, lr=0.5).fit(
            Federation.from_groups(1000 * TABLE - 7, ILL, SITES, scaling=scaling, seed=0)
        )
        for name in federation.names:
            rows = TABLE[name == SITES]
            expected = run.predict_proba(name, rows)
            assert np.allclose(moved.predict_proba(name, 1000 * rows - 7), expected, atol=1e-3)
