"""Weights of classes and samples against plain torch, scikit-learn, and opacus' per-sample
gradients.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from securecluster import FedAvg, Federation
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models import validation
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

pytestmark = [
    pytest.mark.filterwarnings("ignore::securecluster.SecureClusterWarning"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),  # of opacus
]

SIZES = (31, 12, 20)
CLASSES = 3
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, CLASSES)),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.ReLU(), nn.Linear(7, CLASSES)),
    "tanh": lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 7), nn.Tanh(), nn.Linear(7, CLASSES)),
    "stack": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, CLASSES)
    ),
}
KINDS: dict[str, Any] = {"balanced": "balanced", "given": (0.5, 2.0, 7.0), "of samples": None}


class Keys:
    """Keys that follow from what is asked for."""

    def seed(self, client: int, purpose: str, step: int, about: bytes = b"") -> bytes:
        return hashlib.sha256(repr((client, purpose, step, about)).encode()).digest()


def federation(weighted: bool = True, scale: float = 1.0) -> Federation:
    draw = np.random.default_rng(0)
    clients, weights = {}, {}
    for k, size in enumerate(SIZES):
        x = draw.normal(size=(size, 1, 6, 6)).astype(np.float32)
        clients[f"c{k}"] = (x, np.minimum(draw.integers(6, size=size), CLASSES - 1))
        weights[f"c{k}"] = scale * draw.random(size)
        weights[f"c{k}"][0] = 0  # a sample that does not count
    test = dict.fromkeys(clients, ([], []))
    given = weights if weighted else None
    return Federation.from_arrays(clients, test=test, weights=given, classes=CLASSES, seed=0)


def trainer(network: str, fed: Federation) -> LocalTrainer:
    torch.manual_seed(1)
    model = validation.build(NETWORKS[network](), fed.shape, CLASSES, Randomness(5))
    device = torch.device("cpu")
    return LocalTrainer(fed, model, Randomness(5), device, torch.float64, secret=Keys())


def expected_weights(fed: Federation, k: int, class_weight: Any) -> torch.Tensor:
    shard = fed.shards[k]
    weights = np.ones(len(shard.y)) if shard.weights is None else shard.weights
    if class_weight == "balanced":
        held = np.unique(shard.y)
        balanced = compute_class_weight("balanced", classes=held, y=shard.y)
        table = dict(zip(held, balanced, strict=True))
        weights = weights * np.array([table[label] for label in shard.y])
    elif class_weight is not None:
        weights = weights * np.array(class_weight)[shard.y]
    return torch.as_tensor(weights)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("batch_size", [1 << 40, 7])
def test_weighted_training_is_that_of_torch(network: str, kind: str, batch_size: int) -> None:
    fed = federation()
    plan = LocalTraining(0.1, 3, batch_size, momentum=0.5, class_weight=KINDS[kind])
    batched = trainer(network, fed)
    clients = range(len(SIZES))
    found = batched.train(Rows(batched.start[None], (0,) * len(SIZES)), clients, plan, 1)
    for k in clients:
        module = copy.deepcopy(batched.model.module).double()
        optimizer = torch.optim.SGD(module.parameters(), lr=plan.lr, momentum=plan.momentum)
        weights = expected_weights(fed, k, plan.class_weight)
        x, y = torch.as_tensor(fed.shards[k].x).double(), torch.as_tensor(fed.shards[k].y)
        for batch in batched.batches(k, plan, 1):
            rows = torch.as_tensor(batch - batched.first_row(k))
            losses = nn.functional.cross_entropy(module(x[rows]), y[rows], reduction="none")
            optimizer.zero_grad()
            (weights[rows] * losses).mean().backward()
            optimizer.step()
        moved = nn.utils.parameters_to_vector(module.parameters()).detach() - batched.start
        torch.testing.assert_close(found[k], moved, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("kind", ["given", "of samples"])
@pytest.mark.parametrize("network", NETWORKS)
def test_weights_are_inside_the_clip_as_by_opacus(network: str, kind: str, scale: float) -> None:
    from opacus import GradSampleModule

    fed = federation(scale=scale)
    plan = LocalTraining(0.1, 2, 1 << 40, clip=0.4, class_weight=KINDS[kind])
    batched = trainer(network, fed)
    clients = range(len(SIZES))
    found = batched.train(Rows(batched.start[None], (0,) * len(SIZES)), clients, plan, 1)
    for k in clients:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = GradSampleModule(
                copy.deepcopy(batched.model.module).double(), loss_reduction="sum"
            )
        weights = expected_weights(fed, k, plan.class_weight)
        x, y = torch.as_tensor(fed.shards[k].x).double(), torch.as_tensor(fed.shards[k].y)
        for _ in range(2):
            module.zero_grad()
            losses = nn.functional.cross_entropy(module(x), y, reduction="none")
            (weights * losses).sum().backward()
            parts = [p.grad_sample.flatten(1) for p in module.parameters()]  # type: ignore[union-attr]
            each = torch.cat(parts, 1)
            factors = (plan.clip / each.norm(dim=1)).clamp(max=1)
            assert bool((factors < 1).any())
            step = plan.lr * (each * factors[:, None]).sum(0) / len(y)
            assert step.norm() <= plan.lr * plan.clip  # whatever the weights are
            sizes = [p.numel() for p in module.parameters()]
            with torch.no_grad():
                for p, change in zip(module.parameters(), step.split(sizes), strict=True):
                    p -= change.view_as(p)
        moved = nn.utils.parameters_to_vector(module.parameters()).detach() - batched.start
        torch.testing.assert_close(found[k], moved, rtol=0, atol=1e-10)


def test_other_weights_have_other_noise() -> None:
    plan = LocalTraining(0.1, 1, 1 << 40, clip=1e-12, noise=1.0)
    moved = []
    for fed in (federation(), federation(scale=2.0), federation(weighted=False)):
        batched = trainer("linear", fed)
        moved.append(batched.train(Rows(batched.start[None], (0,)), [0], plan, 1))
    assert all(not torch.equal(moved[0], other) for other in moved[1:])


def rows_of_table() -> pd.DataFrame:
    draw = np.random.default_rng(3)
    values = draw.random(60).round(3) + 0.1
    return pd.DataFrame(
        {"site": np.repeat(["b", "a", "c"], 20), "age": values, "ill": draw.integers(2, size=60),
         "w": values}
    )  # fmt: skip


def test_weights_stay_with_their_samples(tmp_path: Path) -> None:
    table = rows_of_table()
    table.to_csv(tmp_path / "table.csv", index=False)
    of_file = Federation.from_csv(
        tmp_path / "table.csv", client_column="site", label_column="ill", weight_column="w", seed=0
    )
    of_frame = Federation.from_frame(table, client="site", label="ill", weight="w", seed=0)
    plain = Federation.from_frame(table.drop(columns="w"), client="site", label="ill", seed=0)
    for fed in (of_file, of_frame):
        assert fed.feature_names == ("age",)
        for shard, alike in zip(fed.shards, plain.shards, strict=True):
            np.testing.assert_array_equal(shard.x, alike.x)
            assert shard.weights is not None
            np.testing.assert_allclose(shard.weights, shard.x[:, 0], rtol=1e-6)
    assert of_frame.digest() != plain.digest()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({"a": [1, 1, 1]}, "every client"),
        ({"a": [1, 1, 1], "b": [1, 1]}, "each of its 3 samples"),
        ({"a": [1, 1, 1], "b": [1, -1, 1]}, "from 0"),
        ({"a": [1, 1, 1], "b": [0, 0, 0]}, "some above 0"),
        ({"a": [1, 1, np.nan], "b": [1, 1, 1]}, "'a'"),
        ({"a": ["x", "y", "z"], "b": [1, 1, 1]}, "'a'"),
    ],
)
def test_weights_that_are_none_are_refused(weights: Any, words: str) -> None:
    clients = {name: (np.eye(3), [0, 1, 1]) for name in "ab"}
    with pytest.raises(UsageError, match=words):
        Federation.from_arrays(clients, weights=weights, seed=0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"class_weight": "balanced", "dp_unit": "example", "clip": 1.0}, "price of DP-SGD"),
        ({"class_weight": {"0": 1.0}}, "each class"),
        ({"class_weight": {0: 1.0, 1: -1.0}}, "from 0"),
        ({"class_weight": ("0=1", "1=many")}, "CLASS=NUMBER"),
        ({"class_weight": 3}, "balanced"),
    ],
)
def test_weights_of_classes_that_cannot_be_are_refused(options: Any, words: str) -> None:
    fed = Federation.from_frame(rows_of_table(), client="site", label="ill", seed=0)
    with pytest.raises(UsageError, match=words):
        FedAvg(rounds=1, model="linear", **options).fit(fed)


def test_weights_of_classes_are_in_the_configuration_by_number(tmp_path: Path) -> None:
    fed = Federation.from_frame(
        rows_of_table().replace({"ill": {0: "no", 1: "yes"}}), client="site", label="ill", seed=0
    )
    by_name = FedAvg(rounds=1, model="linear", class_weight={"yes": 3, "no": 1})
    assert by_name.config(fed, "float32")["class_weight"] == [1.0, 3.0]
    assert "class_weight" not in FedAvg(model="linear").config(fed, "float32")
    by_name.fit(fed, folder=tmp_path / "run")
    as_typed = FedAvg(rounds=1, model="linear", class_weight=("no=1", "yes=3")).fit(fed)
    loaded = FedAvg.load(tmp_path / "run")
    x = fed.shards[0].x
    for other in (as_typed, loaded):
        np.testing.assert_array_equal(other.predict_proba("b", x), by_name.predict_proba("b", x))
