"""Rows of single clients' replies that a query would bring to other clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
import torch

from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Real, Upto, Whole
from securecluster.messaging.messages import Call, Picks, Rows, Shared
from securecluster.runtime.relays import Gathered

SENT = torch.tensor([[0.25, -1.5, 0.75, 2.25], [0.5, 0.125, -0.75, 1.25], [1.5, 3.5, 0.3, 0.6]])


@dataclass(frozen=True, eq=False)
class Told:
    """Client to server: a row."""

    row: Annotated[Rows, Real(("width",))]


@dataclass(frozen=True, eq=False)
class Given:
    """Server to client: anything."""

    rows: Annotated[Rows | None, Real(("width",))] = None
    picks: Annotated[Picks | None, Real((Upto("r", 9), "width"))] = None
    means: Annotated[Picks | None, Real((Upto("r", 9), "width"), average=True)] = None
    shared: Annotated[Shared | None, Real(("r", "width"))] = None
    numbers: Annotated[Rows | None, Whole(("width",), maximum=99)] = None


def gathered(table: torch.Tensor = SENT, ids: Sequence[int] = (0, 1, 2)) -> Gathered:
    """Return a memory of one call in which clients sent the rows of a table."""
    memory = Gathered()
    memory.remember("tell", 1, ids, [Rows(table)])
    return memory


def check(memory: Gathered, to: Sequence[int], *relays: str, **fields: Any) -> None:
    call = Call("c", "hear", "gather", 1, 2, tuple(to), Given(**fields), (1,) * len(to))
    memory.check("hear", relays, call)


def refused(memory: Gathered, to: Sequence[int], *relays: str, **fields: Any) -> None:
    with pytest.raises(PolicyError, match=r"hear would bring a single client's reply to") as told:
        check(memory, to, *relays, **fields)
    assert "\n" not in str(told.value)


def test_a_row_of_another_client_needs_a_declaration_and_the_sentence_says_which() -> None:
    everything = Picks(SENT, ((0, 1, 2),) * 3)
    with pytest.raises(PolicyError, match=r"in picks of .*relays=\(\"picks\",\)"):
        check(gathered(), (0, 1, 2), picks=everything)
    check(gathered(), (0, 1, 2), "picks", picks=everything)
    # the declaration of one field is none of another
    refused(gathered(), (0, 1, 2), "picks", picks=everything, rows=Rows(SENT[[1, 2, 0]]))


def test_each_client_may_have_its_own_row() -> None:
    check(gathered(), (0, 1, 2), rows=Rows(SENT))
    check(gathered(), (2, 0), picks=Picks(SENT, ((2,), (0,))))
    refused(gathered(), (0, 1, 2), rows=Rows(SENT[[0, 2, 1]]))
    # stored once for two clients, of whom one sent it
    refused(gathered(), (0, 1), rows=Rows(SENT[:1], (0, 0)))
    refused(gathered(), (3,), rows=Rows(SENT[:1]))


def test_rows_are_found_in_any_shape() -> None:
    matrices = torch.stack([SENT, SENT + 0.01])  # (2, 3, 4)
    memory = gathered(matrices, (0, 1))
    refused(memory, (1,), rows=Rows(matrices[:1]))
    refused(memory, (1,), rows=Rows(matrices[:1].reshape(1, 12)))
    refused(memory, (1,), rows=Rows(SENT[1:2]))  # one of the rows of client 0
    refused(memory, (1,), shared=Shared(SENT))
    refused(gathered(), (0, 1, 2), shared=Shared(SENT))  # all replies, to everyone
    refused(gathered(), (0, 1), shared=Shared(SENT[2]))
    transposed = SENT.T.contiguous().T  # other strides, the same numbers
    refused(gathered(), (1, 0), rows=Rows(transposed[:2]))


def test_averages_and_other_numbers_are_nobodys_rows() -> None:
    check(gathered(), (0, 1, 2), picks=Picks(SENT.mean(0)[None], ((0,),) * 3))
    check(gathered(), (0, 1), rows=Rows(SENT[[1, 0]] * 2))
    check(Gathered(), (0, 1), rows=Rows(SENT[[1, 0]]))


@pytest.mark.parametrize(
    "row",
    [
        [0.0, 0.0, 0.0, 0.0],
        [0.0, 1.0, 0.0, 0.0],
        [12.0, 3.0, 7.0, 2.0],
        [0.5, 0.5, 0.5, 0.5],
        [0.25, 0.75, 0.0, 0.0],
    ],
)
def test_rows_that_clients_have_in_common_by_chance_are_no_alarm(row: list[float]) -> None:
    table = torch.tensor([row, [0.1, 0.2, 0.3, 0.4]])
    check(gathered(table, (0, 1)), (1, 2), rows=Rows(table[[0, 0]]))
    counts = torch.tensor([[12, 3, 7, 2], [1, 2, 3, 4]])
    check(gathered(counts, (0, 1)), (1, 0), numbers=Rows(counts))


def test_codes_and_sealed_rows_count_from_some_bytes_on() -> None:
    codes = torch.arange(32, dtype=torch.uint8).reshape(2, 16)
    refused(gathered(codes, (0, 1)), (1, 0), rows=Rows(codes))
    few = codes % 4
    check(gathered(few, (0, 1)), (1, 0), rows=Rows(few))


def test_a_row_that_several_clients_sent_may_go_to_them() -> None:
    same = SENT[[0, 0, 1]]
    check(gathered(same), (0, 1), rows=Rows(same[:2]))
    refused(gathered(same), (1, 2), rows=Rows(same[:2]))


def test_an_average_over_one_client_reaches_those_that_did_not_reply() -> None:
    lone = gathered(SENT[:1], (0,))
    check(lone, (0, 1, 2), means=Picks(SENT[:1], ((0,),) * 3))
    # client 1 replied to the same call, so it would be in the average
    both = gathered(SENT[:2], (0, 1))
    check(both, (0, 2), means=Picks(SENT[:1], ((0,),) * 2))
    refused(both, (0, 1), means=Picks(SENT[:1], ((0,),) * 2))
    # a retry of a call is the same call
    again = gathered(SENT[:1], (0,))
    again.remember("tell", 1, (1,), [Rows(SENT[1:2])])
    refused(again, (0, 1), means=Picks(SENT[:1], ((0,),) * 2))
    refused(lone, (1,), picks=Picks(SENT[:1], ((0,),)))


def test_memory_holds_the_last_replies_and_no_more() -> None:
    memory = Gathered(most=6)
    for step in range(4):
        memory.remember("tell", step, (0, 1, 2), [Rows(SENT + step)])
    assert (len(memory._order), len(memory._sources)) == (6, 6)
    check(memory, (1,), rows=Rows(SENT[:1] + 1))  # the oldest are forgotten
    refused(memory, (1,), rows=Rows(SENT[:1] + 3))
    for _ in range(4):  # equal rows, again and again
        memory.remember("tell", 3, (0, 1, 2), [Rows(SENT + 3)])
    assert (len(memory._order), len(memory._sources)) == (6, 3)
