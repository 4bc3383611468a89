"""Sums per group, whatever the chunk and whoever is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from securecluster.core.devices import cpu_threads
from securecluster.errors import FrameError
from securecluster.messaging import chunks
from securecluster.messaging.chunks import in_chunks
from securecluster.messaging.messages import Call, Empty, Response, Rows
from securecluster.runtime.aggregators import Plain


@dataclass(frozen=True, eq=False)
class Reply:
    delta: Rows
    size: Rows | None


@dataclass(frozen=True, eq=False)
class Partial:
    delta: Rows
    size: Rows | None


def call(to: tuple[int, ...]) -> Call:
    return Call("c", "train", "sum", 1, 1, to, Empty(), (2,) * len(to))


class InParts:
    """An exchange whose stream asks one chunk of clients after another."""

    def __init__(self, exchange: Callable[[Call], Response], chunk: int | None = None) -> None:
        self._exchange, self._chunk = exchange, chunk

    def __call__(self, call: Call) -> Response:
        return self._exchange(call)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[Response]:
        for _, response in in_chunks(self._exchange, call, self._chunk or chunk):
            yield response


def clients(
    delta: torch.Tensor,
    lost: set[int],
    asked: list[tuple[int, ...]] | None = None,
    chunk: int | None = None,
) -> InParts:
    """Client i replies with row i, through an index, and with i + 1."""

    def exchange(some: Call) -> Response:
        if asked is not None:
            asked.append(some.to)
        ids = tuple(i for i in some.to if i not in lost)
        if not ids:
            return Response((), None)
        places = tuple(range(len(ids)))
        return Response(
            ids,
            Reply(
                Rows(delta[list(reversed(ids))], places[::-1]),
                Rows(torch.tensor([i + 1 for i in ids])),
            ),
        )

    return InParts(exchange, chunk)


@given(st.data())
def test_sums_and_counts_are_numpys_for_any_chunk_and_any_losses(data: st.DataObject) -> None:
    m, d, groups = (
        data.draw(st.integers(1, 12)),
        data.draw(st.integers(0, 5)),
        data.draw(st.integers(1, 4)),
    )
    to = tuple(data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=m, unique=True)))
    by = [data.draw(st.integers(0, groups - 1)) for _ in to]
    lost = data.draw(st.sets(st.integers(0, m - 1)))
    chunk = data.draw(st.none() | st.integers(1, 13))
    values = np.random.default_rng(m * 100 + d).normal(size=(m, d)).round(1)
    asked: list[tuple[int, ...]] = []
    exchange = clients(torch.from_numpy(values), lost, asked, chunk)
    total = Plain().run(exchange, call(to), by, groups)

    came = [i for i in to if i not in lost]
    assert total.ids == tuple(came)
    assert sum(asked, ()) == to
    assert all(len(a) <= (chunk or len(to)) for a in asked)
    members = [
        [i for i, g in zip(to, by, strict=True) if g == group and i not in lost]
        for group in range(groups)
    ]
    assert total.counts == tuple(map(len, members))
    if not came:
        assert total.rows is None
        return
    expected = np.stack([values[own].sum(0) for own in members])
    assert total.rows.delta.table.dtype == torch.float64
    np.testing.assert_allclose(total.rows.delta.table.numpy(), expected, rtol=0, atol=1e-12)
    assert total.rows.size.table.tolist() == [sum(i + 1 for i in own) for own in members]


def test_a_first_chunk_that_is_lost_altogether_changes_nothing() -> None:
    values = torch.arange(12.0).view(6, 2)
    total = Plain().run(clients(values, {0, 1, 4}, chunk=2), call(tuple(range(6))), [0, 1] * 3, 2)
    assert (total.ids, total.counts) == ((2, 3, 5), (1, 2))
    assert total.rows.delta.table.tolist() == [[4.0, 5.0], [16.0, 18.0]]


@pytest.mark.parametrize("chunk", [None, 4])
def test_clients_after_a_lost_one_stay_in_their_groups(chunk: int | None) -> None:
    values = torch.arange(12.0).view(6, 2)
    exchange = clients(values, {1}, chunk=chunk)
    total = Plain().run(exchange, call(tuple(range(6))), [0, 1, 1, 0, 1, 0], 2)
    assert (total.ids, total.counts) == ((0, 2, 3, 4, 5), (3, 2))
    assert total.rows.delta.table.tolist() == [[16.0, 19.0], [12.0, 14.0]]
    assert total.rows.size.table.tolist() == [1 + 4 + 6, 3 + 5]


def test_adding_up_does_not_change_what_clients_sent() -> None:
    values = torch.arange(12.0).view(6, 2)
    sent: list[Response] = []

    def exchange(some: Call) -> Response:
        sent.append(
            Response(some.to, Reply(Rows(values[list(some.to)]), Rows(torch.ones(len(some.to)))))
        )
        return sent[-1]

    Plain().run(InParts(exchange, 3), call(tuple(range(6))), [0] * 6, 1)
    assert [a.reply.delta.table.tolist() for a in sent] == [
        values[:3].tolist(),
        values[3:].tolist(),
    ]


def test_without_a_chunk_what_is_held_stays_below_the_limit_but_keeps_the_threads_busy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values = torch.zeros(300, 10)
    for limit, threads, most in (
        (10 * 4 * 7 + 8 * 7, 1, 7),
        (1, 1, 4),
        (1, 5, 20),
        (1 << 28, 1, 1024),
    ):
        monkeypatch.setitem(chunks.CHUNK_BYTES, "cpu", limit)
        asked: list[tuple[int, ...]] = []
        with cpu_threads(threads):
            Plain().run(clients(values, set(), asked), call(tuple(range(300))), [0] * 300, 1)
        assert max(map(len, asked[1:])) <= most
        assert len(asked[1]) == min(most, 300 - 32)


def test_replies_with_an_absent_field_are_summed_without_it() -> None:
    def exchange(some: Call) -> Response:
        return Response(some.to, Partial(Rows(torch.ones(len(some.to), 2)), None))

    total = Plain().run(InParts(exchange, 2), call((0, 1, 2)), [0, 0, 1], 2)
    assert total.rows.delta.table.tolist() == [[2.0, 2.0], [1.0, 1.0]]
    assert total.rows.size is None


@pytest.mark.parametrize("second", [1, 0])
def test_a_field_of_some_replies_alone_is_refused(second: int) -> None:
    def exchange(some: Call) -> Response:
        size = None if some.to[0] == second else Rows(torch.ones(1))
        return Response(some.to, Partial(Rows(torch.ones(1, 2)), size))

    with pytest.raises(FrameError, match="size: present in some replies and absent in others"):
        Plain().run(InParts(exchange, 1), call((0, 1)), [0, 0], 1)


@pytest.mark.parametrize("other", [torch.ones(1, 3), torch.ones(1), torch.ones(1, 2).double()])
@pytest.mark.parametrize("second", [1, 0])
def test_replies_of_different_shapes_or_types_are_refused_also_across_chunks(
    other: torch.Tensor, second: int
) -> None:
    def exchange(some: Call) -> Response:
        return Response(
            some.to,
            Partial(Rows(other if some.to[0] == second else torch.ones(1, 2)), Rows(torch.ones(1))),
        )

    with pytest.raises(FrameError):
        Plain().run(InParts(exchange, 1), call((0, 1)), [0, 0], 1)


def test_the_plain_sum_says_that_the_server_reads_replies() -> None:
    assert (Plain.name, Plain.server_reads_replies) == ("plain", True)


def test_a_wide_sum_loses_no_small_row_beside_a_large_one() -> None:
    values = torch.tensor([[2.0**24], [1.0], [1.0]])  # float32 has no 2^24 + 1
    asked = call((0, 1, 2))
    wide = Plain(wide=True).run(clients(values, set()), asked, [0, 0, 0], 1)
    assert wide.rows.delta.table.tolist() == [[2.0**24 + 2]]
    assert (wide.rows.delta.table.dtype, wide.rows.size.table.dtype) == (torch.float64, torch.int64)
    narrow = Plain().run(clients(values, set()), asked, [0, 0, 0], 1)
    assert narrow.rows.delta.table.dtype == torch.float32
