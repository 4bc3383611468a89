"""What a run does grows with its clients, and not with their square.

Timings are no tests: the lines of Python that a run executes are counted instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from cases import exhaustive

from securecluster import Federation
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, IFCA, CLoVE, FedAvg, Hidden, OneShot, Settings
from securecluster.protocols.common.averages.pending_updates import PendingUpdates

FEW = 100
FACTOR = 4


def federation(clients: int) -> Federation:
    """Return clients with four samples each."""
    rng = np.random.default_rng(0)
    data = {}
    for k in range(clients):
        features = rng.standard_normal((4, 4)).astype(np.float32)
        data[f"c{k}"] = (features, (features[:, 0] > 0).astype(np.int64))
    return Federation.from_arrays(data, test=data, classes=2, seed=0)


def lines(task: Callable[[], Any]) -> int:
    """Return how many lines of this project's code a task executes."""
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        name = frame.f_globals.get("__name__", "")
        return line if name.startswith("securecluster") else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        task()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("protocol", "params"),
    [
        (FedAvg, {"mask": "permutation"}),
        exhaustive(FedAvg, {"clip": 1.0, "noise": 1.0}),
        exhaustive(CFL, {"mask": "permutation", "landmarks": 10}),
        exhaustive(CLoVE, {"k": 2}),
        exhaustive(IFCA, {"k": 2, "starts": 1}),
        exhaustive(OneShot, {"tasks": 2, "vectors": 2, "landmarks": 10, "mask": "permutation"}),
        exhaustive(Hidden, {"k": 2, "aggregation": "plain"}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_four_times_the_clients_take_four_times_the_lines(protocol: Any, params: Any) -> None:
    made = protocol(model="linear", rounds=2, epochs=1, batch_size=4, **params)

    def lines_of(clients: int) -> int:
        data = federation(clients)
        return lines(lambda: made.fit(data, Settings(threads=1, transcript="none")))

    lines_of(20)  # what is imported or made once
    assert lines_of(FACTOR * FEW) < 1.1 * FACTOR * lines_of(FEW)


def test_averages_for_a_few_clients_take_as_long_whoever_else_there_is() -> None:
    """A sum calls its clients chunk by chunk."""

    def lines_of(clients: int) -> int:
        endpoint = build_client(CFL(model="linear", mask="none"), federation(clients), Settings())
        client = endpoint.client
        box = PendingUpdates.start(clients, fresh=True)
        box.post(1, torch.ones(1, client.cohort.model.dimension), [0] * clients)
        chunk = range(10)
        return lines(lambda: client.take(chunk, box.message_for(chunk)))

    lines_of(20)
    assert lines_of(FACTOR * FEW) < 1.1 * lines_of(FEW)
