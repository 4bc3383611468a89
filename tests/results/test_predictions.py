"""Predictions on samples: each client's model as a module, labels, probabilities and scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from securecluster import CFL, Federation, at
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import Language, Trajectory
from securecluster.protocols import (
    IFCA,
    MRMTL,
    RDPCFL,
    ClusteringProtocol,
    FedAvg,
    FineTune,
    Local,
    OneShot,
    Settings,
)

COLUMNS = ["age", "dose", "weight"]


def table(generator: np.random.Generator, size: int = 40) -> tuple[pd.DataFrame, Any]:
    """Return a table whose label follows from its columns."""
    frame = pd.DataFrame(generator.normal(size=(size, 3)), columns=COLUMNS)
    return frame, (frame["age"] - frame["dose"] > 0).astype(int)


@pytest.fixture(scope="module")
def hospitals() -> Federation:
    generator = np.random.default_rng(0)
    tables = {name: table(generator) for name in ("north", "south")}
    return Federation.from_arrays(tables, classes=2, seed=0)


@pytest.fixture(scope="module")
def fitted(hospitals: Federation) -> CFL:
    return CFL(model="linear", rounds=5, mask="none").fit(hospitals)


@pytest.mark.parametrize(
    "made",
    [
        CFL(),
        IFCA(k=2, starts=2, start_rounds=1),
        RDPCFL(),
        FineTune(tune_rounds=1),
        Local(),
        MRMTL(),
        OneShot(tasks=2),
    ],
    ids=lambda made: made.name,
)
def test_the_score_of_a_client_is_what_the_run_observed(made: ClusteringProtocol) -> None:
    federation = cases.two_clusters(4, 40)
    run = made.set_params(rounds=3, model="mlp-32").fit(federation)
    for k, shard in enumerate(federation.shards):
        assert run.score(at(k), shard.x_test, shard.y_test) == pytest.approx(run.accuracy_[k])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_probabilities_and_labels_are_those_of_the_client_s_weights(
    dtype: str, hospitals: Federation
) -> None:
    run = Local(model="linear", rounds=3).fit(hospitals, Settings(dtype=dtype))
    x = np.random.default_rng(1).normal(size=(7, 3))
    for name in ("north", "south"):
        state = run.model_of(name)
        weight, bias = (state[key].double().numpy() for key in ("1.weight", "1.bias"))
        logits = x @ weight.T + bias
        expected = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        with pytest.warns(SecureClusterWarning, match="have no names: they are taken in the order"):
            found = run.predict_proba(name, x)
        np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == "float32" else 1e-12)
        frame = pd.DataFrame(x, columns=COLUMNS)
        assert run.predict_samples(name, frame).tolist() == logits.argmax(1).tolist()


def test_columns_are_found_by_name_and_tensors_are_taken(fitted: CFL) -> None:
    frame, y = table(np.random.default_rng(2))
    expected = fitted.predict_samples("north", frame)
    shuffled = frame[["weight", "age", "dose"]]
    assert (fitted.predict_samples("north", shuffled) == expected).all()
    tensor = torch.tensor(frame.to_numpy(), requires_grad=True)
    with pytest.warns(SecureClusterWarning, match="no names"):
        assert (fitted.predict_samples("north", tensor) == expected).all()
    assert fitted.score("north", frame, y) > 0.8
    # rows go by their index, as in training
    assert fitted.score("north", frame, y[::-1]) == fitted.score("north", frame, y)
    assert fitted.score("north", frame, y.to_numpy()[:, None]) == fitted.score("north", frame, y)


def test_a_module_of_the_user_s_own_class_comes_back(hospitals: Federation) -> None:
    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.dropout = nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.dropout(self.layer(x))
            return out

    own = Network()
    before = own.layer.weight.detach().clone()
    run = FedAvg(model=own, rounds=2).fit(hospitals)
    module = run.module_of("south")
    assert type(module) is Network and not module.training
    assert type(module.dropout) is nn.Dropout
    assert torch.equal(module.layer.weight, run.models_[0]["layer.weight"])
    assert torch.equal(own.layer.weight, before) and not torch.equal(module.layer.weight, before)
    # a new module each time, which trains on without the run's
    module.layer.weight.data.zero_()
    assert run.module_of(cluster=0).layer.weight.any()  # type: ignore[union-attr]


def test_surplus_outputs_are_no_classes(hospitals: Federation) -> None:
    wide = nn.Linear(3, 5)
    with torch.no_grad():
        wide.bias[4] = 50.0
    with pytest.warns(SecureClusterWarning, match="outputs"):
        run = FedAvg(model=wide, rounds=1, lr=1e-6).fit(hospitals)
    frame, _ = table(np.random.default_rng(3))
    shares = run.predict_proba("north", frame)
    assert shares.shape == (40, 2) and np.allclose(shares.sum(1), 1)
    assert set(run.predict_samples("north", frame)) <= {0, 1}


def test_text_predicts_tokens_and_trajectories_predict_positions() -> None:
    generator = np.random.default_rng(0)
    texts = {f"t{k}": (generator.integers(0, 9, (20, 5)),) * 2 for k in range(2)}
    run = FedAvg(rounds=2, model="lstm-words").fit(
        Federation.from_arrays(texts, objective=Language(), seed=0)
    )
    x = texts["t0"][0]
    assert run.predict_proba("t0", x).shape == (20, 5, 9)
    logits = run.module_of("t0")(torch.as_tensor(x)).detach()
    assert (run.predict_samples("t0", x) == logits.argmax(-1).numpy()).all()
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), torch.as_tensor(x).flatten())
    assert run.score("t0", x, x) == pytest.approx(float(losses.exp()), rel=1e-5)
    for bad in (x + 9, x.astype(float), -x):
        with pytest.raises(UsageError, match=r"X is text: give tokens, whole numbers in 0 … 8"):
            run.predict_samples("t0", bad)

    walks = {f"w{k}": (generator.random((20, 4, 2)), generator.random((20, 2))) for k in range(2)}
    moving = FedAvg(rounds=2).fit(
        Federation.from_arrays(walks, objective=Trajectory((10.0, 20.0)), seed=0)
    )
    x, y = walks["w1"]
    positions = moving.predict_samples("w1", x)
    distance = np.linalg.norm((positions - y) * [10, 20], axis=1).mean()
    assert moving.score("w1", x, y) == pytest.approx(distance, rel=1e-5)
    with pytest.raises(UsageError, match="a position has no probability: predict_samples gives"):
        moving.predict_proba("w1", x)


def test_the_ensemble_of_a_path_takes_what_predictions_take(fitted: CFL) -> None:
    frame, _ = table(np.random.default_rng(4))
    expected = fitted.ensemble(0, frame)
    assert torch.equal(fitted.ensemble(0, frame[COLUMNS[::-1]]), expected)
    with pytest.warns(SecureClusterWarning, match="no names"):
        assert torch.equal(fitted.ensemble(0, frame.to_numpy()), expected)


FRAME, LABELS = table(np.random.default_rng(5))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda run: run.predict_samples("west", FRAME), "there is no client 'west'"),
        (lambda run: run.predict_samples("north", FRAME[["age"]]), "lacks dose, weight"),
        (lambda run: run.predict_samples("north", FRAME.assign(ward="A")), "has ward besides"),
        (lambda run: run.predict_samples("north", torch.zeros(2, 4)), r"the run's are \(3,\)"),
        (lambda run: run.predict_samples("north", [["a"]]), "X .list. is no array of numbers"),
        (lambda run: run.predict_proba("north", FRAME * np.nan), "NaN or infinite"),
        (lambda run: run.score("north", FRAME, LABELS.to_numpy()[:9]), "X has 40 samples and y 9"),
        (lambda run: run.score("north", FRAME[:0], LABELS[:0]), "and at least one"),
        (lambda run: run.score("north", FRAME, ["ill"] * 40), "label 'ill' of y is none"),
        (lambda run: run.score("north", FRAME, [2, *LABELS[1:]]), "label '2' of y is none"),
        (lambda run: run.module_of(), "give a client or a cluster"),
        (lambda run: run.module_of("north", cluster=0), "give a client or a cluster"),
        (lambda run: run.module_of(cluster=1), "there is no cluster 1: the run has 0 to 0"),
    ],
)
@pytest.mark.filterwarnings("ignore:the columns of X have no names")
def test_bad_input_is_refused_in_one_sentence(
    ask: Callable[[CFL], Any], message: str, fitted: CFL
) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        ask(fitted)
    assert "\n" not in str(caught.value)


def test_a_cluster_whose_clients_trained_alone_shares_no_module(hospitals: Federation) -> None:
    run = Local(model="linear", rounds=1, clip=1.0, noise=1.0).fit(hospitals)
    with pytest.raises(UsageError, match="cluster 0 shares no model, since its clients trained"):
        run.module_of(cluster=0)
    assert run.module_of("north") is not None


def test_the_old_name_of_join_is_refused_and_completion_does_not_offer_it() -> None:
    run = FedAvg(model="linear", rounds=1).fit(cases.two_clusters(clients=2, samples=20, seed=0))
    newcomers = cases.two_clusters(clients=2, samples=20, seed=5)
    for given in (newcomers, np.ones((3, 2))):
        with pytest.raises(UsageError, match=r"call join\(newcomers\) .* predict_samples"):
            run.predict(given)
    assert "predict" not in dir(run.result_) and "join" in dir(run.result_)


@pytest.mark.parametrize(
    "scaling", ["none", "client", {"age": (-4, 4), "dose": (-4, 4), "weight": (-4, 4)}]
)
def test_labels_have_their_names_and_features_their_scales(scaling: Any) -> None:
    generator = np.random.default_rng(6)
    sites, held_out = {}, {}
    for name in ("north", "south"):
        for part in (sites, held_out):
            frame, y = table(generator)
            part[name] = frame, np.where(y, "sick", "healthy")
    federation = Federation.from_arrays(sites, test=held_out, scaling=scaling, seed=0)
    run = FedAvg(model="linear", rounds=3, mask="none").fit(federation)
    for k, name in enumerate(sites):
        frame, y = held_out[name]
        assert set(run.predict_samples(name, frame)) <= {"healthy", "sick"}
        assert run.score(name, frame, y) == pytest.approx(run.accuracy_[k])
