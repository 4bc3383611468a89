"""Epochs in which a label's share follows a power of its count."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from securecluster import Federation
from securecluster.errors import UsageError
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, FLHC, FedAvg, Settings
from securecluster.training.batches import Drawn, packed, resampled, sizes_of_epochs
from securecluster.training.local_trainer import LocalTraining, check_training

SKEWED = np.repeat([0, 1, 2], [64, 16, 1])


def shares(labels: np.ndarray[Any, Any], power: float, epochs: int = 400) -> Any:
    """Return each label's mean number of samples in an epoch."""
    draw = np.random.default_rng(0)
    counts = [np.bincount(labels[resampled(labels, power, draw)]) for _ in range(epochs)]
    return np.mean(counts, 0)


@pytest.mark.parametrize(
    ("power", "expected"),
    [(1.0, (64, 16, 1)), (0.5, (8, 4, 1)), (0.0, (1, 1, 1))],  # n_c^q, up to a factor
)
def test_shares_follow_the_power_of_the_counts(power: float, expected: tuple[int, ...]) -> None:
    wanted = 81 * np.array(expected) / sum(expected)
    assert np.abs(shares(SKEWED, power) - wanted).max() < 1


@given(st.lists(st.integers(0, 6), max_size=40), st.floats(0, 1), st.integers(0, 99))
def test_an_epoch_has_as_many_samples_as_the_client(
    labels: list[int], power: float, seed: int
) -> None:
    order = resampled(np.array(labels, dtype=int), power, np.random.default_rng(seed))
    assert len(order) == len(labels)
    assert set(order.tolist()) <= set(range(len(labels)))
    again = resampled(np.array(labels, dtype=int), power, np.random.default_rng(seed))
    assert order.tolist() == again.tolist()


def test_samples_of_a_label_come_equally_often() -> None:
    """But for one, and for what is left out where quotas are rounded up."""
    labels = np.repeat([0, 1], [30, 10])  # 20 each: no quota is rounded
    order = resampled(labels, 0.0, np.random.default_rng(1))
    assert np.bincount(order, minlength=40)[:30].max() == 1
    assert np.bincount(order, minlength=40)[30:].tolist() == [2] * 10


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 20)), min_size=1, max_size=5),
    st.integers(1, 12),
)
def test_batches_are_cut_epoch_by_epoch(clients: list[tuple[int, int]], batch_size: int) -> None:
    samples, steps = np.array(clients).T
    table = sizes_of_epochs(samples, batch_size, steps)
    assert table.shape == (len(clients), max(steps))
    for row, size, number in zip(table.tolist(), samples, steps, strict=True):
        sizes: list[int] = []
        while len(sizes) < number:  # epochs, each cut into batches
            sizes += [min(batch_size, size - first) for first in range(0, size, batch_size)]
        assert row[:number] == sizes[:number]
        assert not any(row[number:])


@given(st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4), st.data())
def test_batches_side_by_side_are_those_of_each_client(
    sizes: list[list[int]], data: st.DataObject
) -> None:
    sizes.sort(key=len, reverse=True)
    first = np.arange(len(sizes)) * 100
    drawn = [[100 * k + 1 + np.arange(n) for n in own] for k, own in enumerate(sizes)]
    divisors = data.draw(st.none() | st.just(np.arange(len(sizes)) + 3))
    chunk = packed(Drawn.of(drawn), first, divisors, torch.device("cpu"), torch.float64)
    assert chunk.active == [sum(len(own) > s for own in sizes) for s in range(len(sizes[0]))]
    assert chunk.first.tolist() == [[row] for row in first]
    for k, own in enumerate(drawn):
        for s in range(len(sizes[0])):
            batch = own[s] if s < len(own) else np.zeros(0, dtype=int)
            index, weight = chunk.index[s, k], chunk.weight[s, k]
            assert index[: len(batch)].tolist() == batch.tolist()
            # padding is of the client itself, without weight
            assert set(index[len(batch) :].tolist()) <= {batch[0] if len(batch) else first[k]}
            divisor = max(1, len(batch)) if divisors is None else divisors[k]
            assert weight[: len(batch)].tolist() == [1 / divisor] * len(batch)
            assert not weight[len(batch) :].any()
    widest = [
        max((own[s] for own in sizes if s < len(own)), default=0) for s in range(len(sizes[0]))
    ]
    assert chunk.width == (
        widest if divisors is not None else [max(widest, default=0)] * len(widest)
    )


def skewed_clients() -> Federation:
    """Two clients with nine samples of label 0 for each of label 1."""
    draw = np.random.default_rng(0)
    y = np.repeat([0, 1], [36, 4])
    samples = {name: (draw.normal(size=(40, 5)).astype(np.float32), y) for name in ("a", "b")}
    return Federation.from_arrays(samples, classes=2, seed=0)


def test_training_draws_batches_by_labels_and_tuning_does_not() -> None:
    drawn = {}
    for batches in ("shuffled", "balanced"):
        method = FedAvg(model="linear", rounds=2, batches=batches, tune_rounds=1)
        client = build_client(method, skewed_clients(), Settings()).client
        trainer, plan = client.cohort, client.training
        labels = trainer.labels(0).numpy()
        rows = np.concatenate(list(trainer.batches(0, plan, 3)))
        drawn[batches] = np.bincount(labels[rows]).tolist()
        plans = []
        train = trainer.train
        trainer.train = lambda *a, plans=plans, train=train, **b: plans.append(a[2]) or train(*a)
        client.tuned(client.models, 1)
        assert [plan.label_power for plan in plans] == [1.0]
    held = np.bincount(labels)
    size = len(labels)
    assert size % 2 == 0 and held[0] > 4 * held[1]
    assert drawn["shuffled"] == (3 * held).tolist()  # in three epochs
    assert drawn["balanced"] == [3 * size // 2, 3 * size // 2]


def clustering_batches(**options: Any) -> str:
    """Return which batches the clustering round of FL+HC has, as clients and server agree."""
    config = FLHC(model="linear", **options).config(skewed_clients(), "float32")
    return str(config["clustering_batches"])


def test_the_clustering_round_of_flhc_samples_by_labels_where_it_can() -> None:
    assert clustering_batches() == "square-root"
    assert clustering_batches(batches="balanced") == "balanced"
    assert clustering_batches(clustering_batches="shuffled") == "shuffled"
    assert clustering_batches(clip=1.0, noise=0.1) == "square-root"
    assert clustering_batches(clip=1.0, noise=0.1, dp_unit="example") == "shuffled"
    method = FLHC(model="linear", clustering_batches="balanced")
    client = build_client(method, skewed_clients(), Settings()).client
    assert client.read_training.label_power == 0.0
    assert client.training.label_power == 1.0


def test_a_configuration_is_as_before_without_batches_by_labels() -> None:
    assert "batches" not in CFL().config(skewed_clients(), "float32")
    assert CFL(batches="balanced").config(skewed_clients(), "float32")["batches"] == "balanced"


@pytest.mark.parametrize(
    ("method", "options"),
    [(CFL, {"batches": "balanced"}), (FLHC, {"clustering_batches": "square-root"})],
)
def test_dp_sgd_refuses_batches_by_labels(method: Any, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="label counts, which the price of DP-SGD does not cover"):
        method(**options, clip=1.0, noise=1.0, dp_unit="example").fit(skewed_clients())


@pytest.mark.parametrize("power", [-0.1, 1.1, float("nan")])
def test_powers_out_of_range_are_refused(power: float) -> None:
    with pytest.raises(UsageError, match="give a number from 0 to 1"):
        check_training(LocalTraining(0.1, 1, 10, label_power=power))
