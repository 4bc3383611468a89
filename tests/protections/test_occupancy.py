"""How many members of a hidden sum move each coordinate, against a plain count."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from securecluster.protections import occupancy
from securecluster.protections.occupancy import FEW, SumTap

SHAPES = [(1,), (7,), (8,), (65,), (3, 5), (4, 8), (2, 3, 3)]


def sparse(clients: int, shape: tuple[int, ...], seed: int) -> Any:
    """Return integer rows of which most numbers are zero, and some are at the bound."""
    draw = np.random.default_rng(seed)
    rows = draw.integers(-5, 6, (clients, *shape))
    return np.where(draw.random(rows.shape) < 0.2, rows, 0).astype(np.int32)


def call(to: tuple[int, ...], step: int = 1) -> Any:
    """Return the request to some clients, as a tap reads it."""
    return SimpleNamespace(method="send", step=step, to=to)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("clients", [1, 2, 3, 5, 8, 13])
@pytest.mark.parametrize("chunk", [1, occupancy.BYTES])
def test_figures_are_those_of_a_plain_count(
    shape: tuple[int, ...], clients: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(occupancy, "BYTES", chunk)
    rows = sparse(clients, shape, seed=clients)
    tap = SumTap()
    tap.add(call(tuple(range(clients))), "row", rows, None)
    tap.settle("send", 1, [list(range(clients)), []])
    (found,) = tap.occupancy.fields
    counts = (rows != 0).sum(0)
    assert (found.method, found.field, found.sums) == ("send", "row", 1)
    assert found.coordinates == counts.size
    assert found.of_one == (counts == 1).sum()
    assert found.of_few == ((counts > 0) & (counts < FEW)).sum()
    blocks = shape[0] if len(shape) > 1 else 1
    filled = (rows.reshape(clients, blocks, -1) != 0).any(-1).sum(0)
    assert found.blocks == (filled > 0).sum() and found.blocks_of_one == (filled == 1).sum()
    assert found.least_members == filled[filled > 0].min(initial=clients) * bool(filled.any())


def test_who_is_not_in_the_sum_is_not_counted() -> None:
    rows = sparse(6, (9,), seed=0)
    tap = SumTap()
    # a call in two parts, of which one client is lost, in two sums
    tap.add(call((3, 1)), "row", rows[[3, 1]], None)
    tap.add(call((0, 5, 2, 4)), "row", rows[[0, 5, 2, 4]], None)
    tap.settle("send", 1, [[0, 1, 2], [4, 5]])
    (found,) = tap.occupancy.fields
    counts = [(rows[[0, 1, 2]] != 0).sum(0), (rows[[4, 5]] != 0).sum(0)]
    assert found.sums == 2 and found.coordinates == 18
    assert found.of_one == sum((count == 1).sum() for count in counts)


def test_of_a_client_that_is_asked_again_the_last_row_counts() -> None:
    tap = SumTap()
    tap.add(call((0, 1)), "row", np.array([[1, 0], [1, 1]]), None)
    tap.add(call((1,)), "row", np.array([[1, 0]]), None)
    tap.settle("send", 1, [[0, 1]])
    assert tap.occupancy.fields[0].of_one == 0


def test_a_call_of_which_no_sum_came_leaves_nothing() -> None:
    tap = SumTap()
    tap.add(call((0, 1), step=1), "row", np.ones((2, 3), dtype=int), None)
    tap.add(call((0, 1), step=2), "row", np.ones((2, 3), dtype=int), None)
    tap.settle("send", 1, [[0, 1]])
    assert tap.occupancy.fields == []
    tap.settle("send", 2, [[0, 1]])
    tap.settle("send", 2, [[0, 1]])
    assert tap.occupancy.fields[0].sums == 1


@pytest.mark.parametrize("bound", [9, -9])
def test_a_number_at_the_bound_moves_nothing_where_numbers_are_clamped(bound: int) -> None:
    # of three losses two overflow: the sum less two bounds is the third one
    rows = np.array([[bound, 4], [bound, 4], [3, 4]])
    for largest, alone in ((None, 0), ([9, 9, 9], 1)):
        tap = SumTap()
        tap.add(call((0, 1, 2)), "loss", rows, largest)
        tap.settle("send", 1, [[0, 1, 2]])
        assert tap.occupancy.fields[0].of_one == alone
