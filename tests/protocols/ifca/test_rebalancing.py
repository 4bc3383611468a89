"""Rebalancing of IFCA's models: how many clients train each, what moves, and what it costs."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Rows
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import IFCA, Settings
from securecluster.protocols.ifca.client import ModelAssignment
from securecluster.protocols.ifca.rebalancing import rebalanced
from securecluster.runtime.call_context import CallContext

SMALL: dict[str, Any] = {"k": 3, "starts": 1, "rounds": 3, "model": "linear", "mask": "none"}
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 0.7}


@pytest.mark.parametrize(
    ("choices", "k", "least"),
    [
        ([0] * 9, 3, 3),
        ([0] * 7 + [1, 1], 3, 2),
        ([0, 0, 0, 1, 1, 1, 2, 2, 2], 3, 3),
        ([2, 2, 2, 2, 0, 1], 3, 1),
        ([1] * 4, 4, 1),
    ],
)
def test_every_model_has_enough_clients_and_no_more_move_than_must(
    choices: list[int], k: int, least: int
) -> None:
    models = rebalanced(choices, k, least, np.random.default_rng(0))
    counts = Counter(models)
    assert all(counts[j] >= least for j in range(k))
    before = Counter(choices)
    must = sum(max(0, least - before[j]) for j in range(k))
    assert sum(a != b for a, b in zip(choices, models, strict=True)) == must
    # who moves leaves a model that has more than enough
    assert all(counts[j] >= min(before[j], least) for j in range(k))


def test_every_client_of_a_large_model_is_as_likely_to_move() -> None:
    draw = np.random.default_rng(0)
    moved = np.zeros(8)
    for _ in range(4000):
        models = rebalanced([0] * 5 + [1] * 3, 3, 1, draw)
        moved += np.array(models) == 2
    # model 0 has 4 to spare and model 1 has 2: 4/6 of the moves, shared by 5, and 2/6 by 3
    expected = 4000 * np.array([4 / 6 / 5] * 5 + [2 / 6 / 3] * 3)
    deviation = np.sqrt(expected * (1 - expected / 4000))
    assert np.all(np.abs(moved - expected) < 4 * deviation)


def test_fewer_replies_than_needed_are_shared_out() -> None:
    models = rebalanced([0, 0, 0, 0, 0], 2, 4, np.random.default_rng(0))
    assert sorted(Counter(models).values()) == [2, 3]


def test_every_sum_of_a_round_has_enough_clients(small: Federation) -> None:
    """Six clients, three models: two clients train each, whatever they chose."""
    sums: list[Any] = []
    made = IFCA(**SMALL, rebalance=2)
    endpoint = build_client(made, small, Settings(dtype="float64"))
    from securecluster.runtime.run import Run
    from securecluster.runtime.transport import InProcess

    net = build_network(made, InProcess(endpoint.answer), made.config(small, "float64"))
    exact_sum = net.sum

    def spied(method: Any, query: Any, **options: Any) -> Any:
        result = exact_sum(method, query, **options)
        sums.append((method.__name__, list(result.counts)))
        return result

    net.sum = spied  # type: ignore[method-assign]
    made.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    assert sums == [("contribute_to", [2, 2, 2])] * 3


def test_clients_train_the_model_that_they_are_given(small: Federation) -> None:
    made = IFCA(**SMALL, rebalance=2)
    served = cases.serve(made, small)
    client: Any = served.endpoint.client
    positions = tuple(range(6))
    context = CallContext(positions, positions, 9, 90)
    models = [0, 1, 2, 2, 1, 0]
    reply = client.contribute_to(context, ModelAssignment(Rows(torch.tensor(models)), 0))
    sets = client.model_sets[0]
    for k, j in enumerate(models):
        start = Rows(sets[j].models.row(k)[None], (0,))
        expected = client.cohort.train(start, [k], client.training, 90)[0] * client.cohort.sizes[k]
        torch.testing.assert_close(reply.delta.values[k], expected, rtol=0, atol=1e-10)


def test_a_model_of_another_start_is_refused(small: Federation) -> None:
    served = cases.serve(IFCA(**SMALL, rebalance=2), small)
    client: Any = served.endpoint.client
    query = ModelAssignment(Rows(torch.tensor([0])), 1)
    with pytest.raises(PolicyError, match="start"):
        client.contribute_to(CallContext((0,), (0,), 9, 90), query)


@pytest.mark.parametrize("unit", ["client", "example"])
def test_rebalancing_costs_nothing(unit: str, small: Federation) -> None:
    """Who is moved follows from choices, which are priced as noisy losses."""
    plain = IFCA(**SMALL, **NOISE, dp_unit=unit, epochs=1, batch_size=100).fit(small)
    moved = IFCA(**SMALL, **NOISE, dp_unit=unit, epochs=1, batch_size=100, rebalance=2).fit(small)
    assert moved.ledger_.exact() == []
    assert moved.ledger_.epsilon == plain.ledger_.epsilon < math.inf
    # three updates, and four rows of losses, the last of them at the end
    expected = gaussian_epsilon(math.sqrt(3 + 4) / 0.7, 1e-5)
    assert moved.ledger_.epsilon == pytest.approx(expected, rel=1e-6)


@pytest.mark.few(1)
@pytest.mark.parametrize("rebalance", [0, 2])
def test_a_total_target_holds_with_nothing_unpriced(rebalance: int, small: Federation) -> None:
    options: dict[str, Any] = {"dp_unit": "example", "clip": 1.0, "target_epsilon": 4.0}
    fitted = IFCA(**SMALL, **options, rebalance=rebalance).fit(small)
    assert fitted.ledger_.exact() == []
    assert 3.9 < fitted.ledger_.epsilon <= 4.0


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"rebalance": -1}, "rebalance = -1"),
        ({"rebalance": 1.5}, "rebalance = 1.5"),
        ({"rebalance": 3}, "lower rebalance to 2"),
        ({"rebalance": 2, "participation": 0.5}, "lower rebalance to 1"),
        ({"rebalance": 2, "aggregation": "secagg"}, "aggregation plain"),
    ],
)
def test_what_cannot_be_rebalanced_is_refused(
    options: dict[str, Any], sentence: str, small: Federation
) -> None:
    with pytest.raises(UsageError, match=sentence):
        IFCA(**{**SMALL, **options}).fit(small)
