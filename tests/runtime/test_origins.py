"""Digests of what rows of sums follow from: equal for equal bytes, and for these alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from securecluster import Federation
from securecluster.messaging.messages import Picks, Rows, Shared
from securecluster.parties.endpoints import build_client
from securecluster.protocols import FedAvg, Settings
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.client import TrainingClient
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.origins import digest, origins_of


def of_bits(bits: int) -> torch.Tensor:
    return torch.tensor([bits], dtype=torch.int32).view(torch.float32)


def test_whatever_differs_in_a_bit_a_shape_or_a_type_has_another_digest() -> None:
    values = [
        of_bits(0),
        of_bits(0x7FC00000),  # two kinds of NaN
        of_bits(0x7FC00001),
        -torch.zeros(1),
        torch.zeros(1, 1),
        torch.tensor(0.0),
        torch.zeros(1, dtype=torch.float64),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.zeros(2),
    ]
    assert len({digest(value) for value in values}) == len(values)


def test_a_digest_is_of_numbers_and_not_of_where_they_lie() -> None:
    table = torch.arange(12.0).view(3, 4)
    assert digest(table.T) == digest(table.T.contiguous())
    assert digest(table[1]) == digest(torch.arange(4.0, 8.0))
    assert digest(table.requires_grad_()) == digest(table.detach())


@dataclass(frozen=True, eq=False)
class Asked:
    number: int
    text: str
    centres: Shared
    parts: Shared | None
    own: Rows
    several: Picks


@dataclass(frozen=True, eq=False)
class AskedElsewhere(Asked):
    pass


def asked(kind: type[Asked] = Asked, **changes: Any) -> Asked:
    none = Picks(torch.zeros(0, 1), ((), ()))
    query = kind(1, "a", Shared(torch.ones(2)), None, Rows(torch.zeros(2)), none)
    return dataclasses.replace(query, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"number": 2},
        {"number": True},
        {"text": "1"},
        {"centres": Shared(torch.tensor([1.0, 1.0 + 2**-23]))},
        {"parts": Shared(torch.ones(2))},
        {"kind": AskedElsewhere},
    ],
)
def test_fields_that_are_the_same_for_all_are_bound(changes: dict[str, Any]) -> None:
    assert origins_of(asked(), (4, 7), {}) != origins_of(asked(**changes), (4, 7), {})


def test_fields_of_single_clients_are_bound_by_their_method_alone() -> None:
    other = asked(own=Rows(torch.ones(2)), several=Picks(torch.ones(1, 1), ((0,), ())))
    assert origins_of(asked(), (4, 7), {}) == origins_of(other, (4, 7), {})
    context = CallContext((4, 7), (0, 1), round=1, step=1)
    context.bind([b"model", b"model"])
    both = origins_of(asked(), context.ids, context.origins)
    assert both[0] == both[1] != origins_of(asked(), (4,), {})[0]
    context.select([1]).bind([b"another"])
    first, second = origins_of(asked(), context.ids, context.origins)
    assert first == both[0] != second


# in each round, who is sent its averages, and whose reply is lost
ROUND = st.tuples(st.sets(st.integers(0, 3)), st.sets(st.integers(0, 3)))
SIZE = 4


@given(st.lists(ROUND, max_size=6), st.booleans())
def test_whoever_misses_whatever_the_lineage_of_one_model_is_the_same(
    rounds: list[tuple[set[int], set[int]]], fresh: bool
) -> None:
    made = FedAvg(rounds=8, epochs=1, model="linear", mask="none")
    client: TrainingClient = build_client(made, FEDERATION, Settings()).client
    box = PendingUpdates.start(SIZE, fresh)
    generator = torch.Generator().manual_seed(0)
    width = client.cohort.model.dimension
    known = {bytes(32)}

    def deliver(ids: list[int], lost: set[int]) -> None:
        query = box.message_for(ids)
        client.take(ids, query)
        box.acknowledge([i for i in ids if i not in lost])
        (lineage,) = set(client.lineage(ids))
        known.add(lineage)

    for step, (ids, lost) in enumerate(rounds, 1):
        box.post(step, torch.randn(1, width, generator=generator), [0] * SIZE)
        if ids:
            before = len(known)
            deliver(sorted(ids), lost)
            assert len(known) == before + 1
            deliver(sorted(ids), set())  # asked again
            assert len(known) == before + 1
    deliver(list(range(SIZE)), set())
    assert len(set(client.models.index or ())) == 1


FEDERATION = Federation.simulate("digits", clients=SIZE, samples=10, seed=0)
