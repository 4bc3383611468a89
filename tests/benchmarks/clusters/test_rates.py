"""Default learning rates: by network, and lower for known sets of bright images where a layer sees
all of one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation, Inversion, LabelSwap, Rotation
from securecluster.data.datasets import SOURCES
from securecluster.data.facts import Facts
from securecluster.models.architectures import BRIGHT_RATE, RATE
from securecluster.protocols import CFL, FedAvg, Local


def resolved(facts: Facts, **params: Any) -> float:
    lr: float = FedAvg(**params).config(facts, "float32")["lr"]
    return lr


def known(federation: Federation, data: str, scenario: str) -> Federation:
    """The same clients, as if they had been dealt a data set."""
    assert data in SOURCES
    return replace(federation, data=data, scenario=scenario)


def convolution() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(72, 10)
    )


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("data", "scenario", "lr"),
    [
        ("digits", "label-swap", 0.2),
        ("digits", "inversion", 0.2),
        ("mnist", "label-swap", 0.2),
        ("mnist", "pathological+rotation", 0.2),
        ("mnist", "inversion", 0.03),
        ("mnist", "tasks+inversion", 0.03),
        ("fashion_mnist", "iid", 0.2),
        ("fashion_mnist", "rotation+inversion", 0.03),
        ("cifar10", "label-swap", 0.03),
        ("cifar100", "iid", 0.03),
        ("femnist", "natural", 0.03),
        ("femnist", "inversion", 0.03),
    ],
)
def test_bright_images_of_known_sets_have_a_lower_rate(
    data: str, scenario: str, lr: float, small: Federation
) -> None:
    dealt = known(small, data, scenario)
    assert resolved(dealt) == lr
    assert (
        resolved(dealt, model=torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10)))
        == lr
    )
    assert resolved(dealt, model="mlp-32") == resolved(dealt, model="linear") == lr
    assert resolved(dealt, model="cnn-briggs") == resolved(dealt, model=convolution()) == 0.2
    assert resolved(dealt, optimizer="adam") == RATE["adam"]
    assert resolved(dealt, lr=0.7) == 0.7


def test_a_simulated_scenario_is_known_by_its_parts() -> None:
    for scenario in (
        Inversion(),
        LabelSwap(clusters=2) + Inversion(),
        Rotation(clusters=2) + Inversion(),
    ):
        dealt = Federation.simulate("digits", scenario=scenario, clients=4, samples=20, seed=0)
        assert not dealt.bright
        assert replace(dealt, data="mnist").bright
        assert replace(dealt, data="mnist").select([0, 1]).bright


def test_own_data_keep_the_networks_rate_whatever_they_are_called(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    draw = np.random.default_rng(0)
    table = {
        "who": ["a"] * 20 + ["b"] * 20,
        "label": [0, 1] * 20,
        "v": draw.normal(size=40),
        "w": draw.normal(size=40),
    }
    pq.write_table(pa.table(table), tmp_path / "femnist.parquet")
    own = Federation.from_parquet(
        tmp_path / "femnist.parquet", client_column="who", label_column="label", seed=0
    )
    assert own.data == "femnist"
    assert resolved(own) == RATE["sgd"]
    arrays = {name: (draw.normal(size=(20, 4)), np.arange(20) % 2) for name in ("a", "b")}
    assert resolved(Federation.from_arrays(arrays, seed=0)) == RATE["sgd"]


@pytest.mark.parametrize("method", [FedAvg, Local])
def test_inverted_images_are_learned_at_the_default_rate(method: Any) -> None:
    """Negatives are as bright as those of MNIST.

    At the usual rate the second cluster learns nothing.
    """
    draw = np.random.default_rng(0)
    templates = draw.random((4, 1, 28, 28)) < 0.1
    clients = {}
    for k in range(4):
        y = np.arange(80) % 4
        x = (templates[y] & (draw.random((80, 1, 28, 28)) < 0.7)).astype(np.float32)
        clients[f"c{k}"] = (1 - x if k % 2 else x, y)
    own = Federation.from_arrays(clients, classes=4, seed=0)
    dealt = known(own, "mnist", "inversion")
    assert resolved(dealt) == BRIGHT_RATE
    assert method(rounds=8).fit(dealt).accuracy_.min() > 0.8
    assert method(rounds=8, lr=0.2).fit(dealt).accuracy_.min() < 0.5


def test_the_rate_is_agreed_on(small: Federation) -> None:
    dealt = known(small, "femnist", "natural")
    fitted = CFL(rounds=1).fit(dealt)
    assert fitted.kept_.learned.config["lr"] == BRIGHT_RATE
    given = CFL(rounds=1, lr=BRIGHT_RATE).fit(dealt)
    assert torch.equal(fitted.client_models_.values, given.client_models_.values)
