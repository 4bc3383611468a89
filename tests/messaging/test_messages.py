"""Batches of frames: cutting out, putting together, and what does not fit together."""

from __future__ import annotations

import dataclasses
import tracemalloc
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from securecluster.errors import FrameError
from securecluster.messaging.messages import (
    Call,
    Header,
    Picks,
    Rows,
    Shared,
    frames,
    kinds,
    optional,
    parse_ids,
    reply_header,
    select,
    stack,
)
from securecluster.messaging.wire import decode, encode

DIFFER = "rows: the frames differ in shape or type"
HEADER = Header("c", "m", "gather", 1, 2, "server", "client/0", 1)


@dataclass(frozen=True, eq=False)
class Mixed:
    shared: Shared
    rows: Rows
    picks: Picks
    number: int
    maybe: Rows | None


@dataclass(frozen=True, eq=False)
class OfPicks:
    picks: Picks


@dataclass(frozen=True, eq=False)
class OfShared:
    shared: Shared


@st.composite
def mixed(draw: st.DrawFn) -> Mixed:
    count = draw(st.integers(1, 5))
    index = draw(st.none() | st.lists(st.integers(0, 2), min_size=count, max_size=count).map(tuple))
    table = torch.arange(4.0 * (3 if index else count)).view(-1, 4)
    picks = tuple(tuple(draw(st.lists(st.integers(0, 3), max_size=4))) for _ in range(count))
    maybe = Rows(torch.arange(count)) if draw(st.booleans()) else None
    picked = Picks(torch.arange(8).view(4, 2), picks)
    return Mixed(Shared(torch.tensor(7)), Rows(table, index), picked, draw(st.integers()), maybe)


def same(one: Mixed, other: Mixed) -> bool:
    picked = [[m.picks.table[list(p)].tolist() for p in m.picks.picks] for m in (one, other)]
    maybe = [None if m.maybe is None else m.maybe.values.tolist() for m in (one, other)]
    plain = one.number == other.number and picked[0] == picked[1] and maybe[0] == maybe[1]
    rows = torch.equal(one.rows.values, other.rows.values)
    return plain and rows and torch.equal(one.shared.value, other.shared.value)


@given(mixed())
def test_a_stack_of_single_frames_is_the_batch(message: Mixed) -> None:
    count = len(message.rows)
    assert frames(message, 99) == count
    assert same(stack([select(message, [k]) for k in range(count)]), message)
    decoded = [decode(encode(HEADER, message, k), Mixed)[1] for k in range(count)]
    assert same(stack(decoded), message)


@given(mixed(), st.data())
def test_a_stack_of_batches_is_the_batch_that_they_were_cut_from(
    message: Mixed, data: st.DataObject
) -> None:
    count = len(message.rows)
    cut = data.draw(st.integers(0, count))
    later = data.draw(st.integers(cut, count))
    parts = [range(cut), range(cut, later), range(later, count)]
    assert same(stack([select(message, part) for part in parts]), message)


@given(mixed(), st.data())
def test_select_takes_the_frames_asked_for_in_their_order(
    message: Mixed, data: st.DataObject
) -> None:
    at = data.draw(st.lists(st.integers(0, len(message.rows) - 1), min_size=1, max_size=6))
    some = select(message, at)
    assert frames(some, 99) == len(at)
    for k, position in enumerate(at):
        assert encode(HEADER, some, k) == encode(HEADER, message, position)


def test_selecting_shared_rows_stores_each_once_and_drops_the_others() -> None:
    some = Rows(torch.tensor([[10.0], [20.0], [30.0]]), (0, 2, 2, 0, 1)).select([1, 0, 2])
    assert some.table.tolist() == [[10.0], [30.0]]
    assert some.values.tolist() == [[30.0], [10.0], [30.0]]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": Rows(torch.zeros(1, 5))}, DIFFER),
        ({"rows": Rows(torch.zeros(1, 4, 1))}, DIFFER),
        ({"rows": Rows(torch.zeros(1, 4, dtype=torch.float64))}, DIFFER),
        ({"shared": Shared(torch.tensor([1.0, 3.0]))}, "shared: shared by all frames"),
        ({"shared": Shared(torch.tensor([[1.0, 2.0]]))}, "shared: shared by all frames"),
        ({"number": 2}, "number: shared by all frames"),
        ({"number": True}, "number: present in some"),
        ({"maybe": Rows(torch.zeros(1))}, "maybe: present in some"),
    ],
)
def test_frames_that_do_not_fit_together_are_refused(
    change: dict[str, object], sentence: str
) -> None:
    picks = Picks(torch.zeros(1, 2), ((0,),))
    one = Mixed(Shared(torch.tensor([1.0, 2.0])), Rows(torch.zeros(1, 4)), picks, 1, None)
    assert same(stack([one]), one)
    other = dataclasses.replace(one, **change)
    for pair in ([one, other], [other, one]):
        with pytest.raises(FrameError, match=sentence):
            stack(pair)


@pytest.mark.parametrize(
    "other",
    [torch.zeros(1, 4), torch.zeros(1, 3, 1), torch.zeros(1), torch.zeros(1, 3, dtype=torch.int64)],
)
def test_picks_of_different_shapes_or_types_are_refused(other: torch.Tensor) -> None:
    with pytest.raises(FrameError, match="picks"):
        stack([OfPicks(Picks(torch.zeros(1, 3), ((0,),))), OfPicks(Picks(other, ((0,),)))])


def test_picks_stack_where_some_frames_have_none() -> None:
    parts = [Picks(torch.arange(2.0 * n).view(n, 2), (tuple(range(n)),)) for n in (0, 2, 0, 1)]
    joined = stack([OfPicks(part) for part in parts]).picks
    picked = [joined.table[list(p)].tolist() for p in joined.picks]
    assert picked == [[], [[0, 1], [2, 3]], [], [[0, 1]]]


def test_shared_values_of_different_types_are_refused() -> None:
    numbers = (torch.zeros(3), torch.zeros(3, dtype=torch.float64))
    with pytest.raises(FrameError, match="shared"):
        stack([OfShared(Shared(values)) for values in numbers])


def test_fields_that_disagree_on_the_number_of_frames_are_refused() -> None:
    picks = Picks(torch.zeros(1, 1), ((), (), ()))
    message = Mixed(Shared(torch.zeros(1)), Rows(torch.zeros(2, 1)), picks, 1, None)
    with pytest.raises(FrameError, match="number of frames"):
        frames(message, 1)
    assert frames(OfShared(Shared(torch.zeros(9))), 5) == 5


def test_the_kinds_of_fields_are_read_off_the_class() -> None:
    assert list(kinds(Mixed)) == ["shared", "rows", "picks", "number", "maybe"]
    assert list(kinds(Mixed).values()) == [Shared, Rows, Picks, int, Rows]
    assert [name for name in kinds(Mixed) if optional(Mixed, name)] == ["maybe"]

    @dataclass(frozen=True)
    class Wrong:
        table: list  # type: ignore[type-arg]

    @dataclass(frozen=True)
    class Either:
        value: int | str

    for message in (Wrong, Either):
        with pytest.raises(TypeError, match=r"Shared, Rows, Picks or a scalar"):
            kinds(message)


def test_the_headers_of_a_call_name_each_recipient_and_its_group() -> None:
    query = OfPicks(Picks(torch.arange(3.0), ((0,), (1,), (2,))))
    call = Call("h", "train", "sum", 3, 9, (4, 7, 2), query, (2, 1, 2))
    assert call.header(1) == Header("h", "train", "sum", 3, 9, "server", "client/7", 1)
    some = call.select([2, 0])
    assert (some.to, some.members, some.query.picks.picks) == ((2, 4), (2, 2), ((2,), (0,)))
    back = reply_header(call.header(1))
    assert (back.sender, back.recipient) == ("client/7", "server")
    assert dataclasses.replace(back, sender="server", recipient="client/7") == call.header(1)


@pytest.mark.parametrize("index", [None, (2, 0, 0)])
def test_a_row_is_no_copy(index: tuple[int, ...] | None) -> None:
    rows = Rows(torch.arange(12.0).view(3, 4), index)
    for k in range(3):
        assert torch.equal(rows.row(k), rows.values[k])
        assert rows.row(k).untyped_storage().data_ptr() == rows.table.untyped_storage().data_ptr()


@pytest.mark.parametrize(
    ("text", "count"),
    [("0-999999", 1), ("0-4,6-1000000", 6), ("0-999999", 999_999), ("0,1-1000000", 0)],
)
def test_a_long_list_of_ids_is_refused_before_it_takes_memory(text: str, count: int) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            parse_ids(text, count)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000  # the ids would take eight


def test_a_reply_names_its_sender() -> None:
    back = reply_header(Header("c" * 32, "train", "gather", 3, 7, "server", "client/1", 1))
    assert (back.sender, back.recipient, back.step) == ("client/1", "server", 7)
