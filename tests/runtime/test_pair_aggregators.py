"""Aggregators for pairs: R from rows, and functions of R that both sides know by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.messages import Call, Empty, Response, Rows
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import build_network
from securecluster.protocols import OneShot
from securecluster.protocols.oneshot.client import RelevanceRow
from securecluster.protocols.oneshot.server import cluster_tasks
from securecluster.runtime.pair_aggregators import PairFunctions, PlainPairs
from securecluster.runtime.transport import Recorded

ROWS = torch.tensor([[1.0, 0.25, 0.5], [0.75, 1.0, 0.125], [0.0, 0.375, 1.0]], dtype=torch.float64)


def largest(relevance: torch.Tensor, config: Mapping[str, Any]) -> float:
    return config["scale"] * float(relevance.triu(1).max())


def exchange(call: Call) -> Response:
    return Response(call.to, RelevanceRow(Rows(ROWS[list(call.to)])))


def call(*to: int) -> Call:
    return Call("c" * 32, "relevance", "pairs", 1, 1, to, Empty(), (2,) * len(to))


def test_plain_pairs_drop_the_columns_of_clients_that_did_not_reply() -> None:
    total = PlainPairs().run(exchange, call(0, 2), (0, 1, 2), "")
    assert total.ids == (0, 2)
    assert total.value.tolist() == [[1.0, 0.25], [0.25, 1.0]]
    assert torch.equal(total.value, total.relevance)


def test_a_function_of_r_is_found_by_its_name_and_takes_its_parameters_from_the_configuration() -> (
    None
):
    pairs = PlainPairs(PairFunctions({"largest": largest}, {"scale": 2.0}))
    assert pairs.run(exchange, call(0, 1, 2), (0, 1, 2), "largest").value == 1.0
    with pytest.raises(UsageError, match=r"no function 'mean' of R.*declared: largest"):
        pairs.check("mean")


def test_rows_of_another_length_and_a_lone_row_are_refused() -> None:
    with pytest.raises(FrameError, match="a row of 2 numbers per client"):
        PlainPairs().run(exchange, call(0, 1), (0, 1), "")
    with pytest.raises(UsageError, match="at least two replies, 1 came"):
        PlainPairs().run(exchange, call(0), (0, 1, 2), "")


class Refused:
    """A transport that no call may reach."""

    def exchange(self, call: Call) -> Response:
        raise AssertionError(call.method)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        raise AssertionError(call.method)

    def relay(self, call: Call, response: Response) -> None:
        raise AssertionError(call.method)


def test_an_unknown_function_is_refused_before_anything_is_sent() -> None:
    data = Federation.simulate("digits", clients=4, samples=20, seed=0)
    made = OneShot(tasks=2, model="linear", rounds=1)
    net = build_network(made, Recorded(Refused(), Transcript("none")), made.config(data, "float32"))
    with pytest.raises(UsageError, match="declared: cluster_tasks"):
        net.pairs(OneShot.client.relevance, Empty(), to=[0, 1], then="cluster_task")


def test_tasks_are_clustered_as_the_configuration_says() -> None:
    relevance = torch.tensor([[1.0, 0.9, 0.2], [0.9, 1.0, 0.3], [0.2, 0.3, 1.0]])
    agreed = {"seed": 0, "height": None, "clusterer": "paper", "gram_noise": 0.0}
    assert cluster_tasks(relevance, {**agreed, "tasks": 2}).labels == [0, 0, 1]
    assert len(set(cluster_tasks(relevance, {**agreed, "tasks": 3}).labels)) == 3


def test_a_run_with_plain_pairs_has_the_configuration_of_one_without_the_choice() -> None:
    data = Federation.simulate("digits", clients=4, samples=20, seed=0)
    assert "relevance" not in OneShot(tasks=2, model="linear").config(data, "float32")
    with pytest.raises(UsageError, match="relevance"):
        OneShot(tasks=2, model="linear", relevance="bfv").fit(data)
