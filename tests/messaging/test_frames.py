"""Frames: their length, their round trip, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from securecluster.errors import FrameError
from securecluster.messaging.messages import (
    Header,
    Picks,
    Rows,
    Shared,
    reply_header,
    select,
    stack,
)
from securecluster.messaging.wire import decode, encode, peek, size

DTYPES = [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
HEADER = Header("c" * 32, "train", "gather", 3, 7, "server", "client/1", 1)


@dataclass(frozen=True, eq=False)
class Everything:
    shared: Shared
    rows: Rows
    picks: Picks
    number: int
    share: float
    word: str
    flag: bool
    maybe: Rows | None


@dataclass(frozen=True, eq=False)
class Small:
    rows: Rows
    number: int


def tensor(draw: st.DrawFn, *lead: int) -> torch.Tensor:
    shape = (*lead, *draw(st.lists(st.integers(0, 4), max_size=2)))
    return torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))


@st.composite
def messages(draw: st.DrawFn) -> Everything:
    count = draw(st.integers(1, 4))
    rows = tensor(draw, draw(st.integers(1, 4)))
    index = tuple(draw(st.lists(st.integers(0, len(rows) - 1), min_size=count, max_size=count)))
    table = tensor(draw, draw(st.integers(1, 4)))
    picks = tuple(
        tuple(draw(st.lists(st.integers(0, len(table) - 1), max_size=3))) for _ in range(count)
    )
    maybe = Rows(tensor(draw, count)) if draw(st.booleans()) else None
    word = draw(st.text(max_size=8))
    sent = Shared(tensor(draw)), Rows(rows, index), Picks(table, picks)
    return Everything(*sent, draw(st.integers()), 0.5, word, draw(st.booleans()), maybe)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, Shared):
        return torch.equal(one.value, other.value)
    if isinstance(one, Rows):
        return torch.equal(one.values, other.values)
    if isinstance(one, Picks):
        return all(
            torch.equal(one.table[list(a)], other.table[list(b)])
            for a, b in zip(one.picks, other.picks, strict=True)
        )
    return bool(one == other)


@given(messages())
def test_size_is_the_encoded_length_and_frames_come_back_bit_for_bit(message: Everything) -> None:
    singles = []
    for k in range(len(message.rows)):
        data = encode(HEADER, message, k)
        assert size(HEADER, message, k) == len(data)
        assert encode(HEADER, message, k) == data
        header, back = decode(data, Everything)
        assert header == HEADER == peek(data)
        wanted = select(message, [k])
        assert all(equal(getattr(wanted, name), getattr(back, name)) for name in vars(message))
        singles.append(back)
    joined = stack(singles)
    assert all(equal(getattr(message, name), getattr(joined, name)) for name in vars(message))


@given(st.binary(max_size=200), st.integers(0, 10**6), st.integers(1, 255))
def test_damaged_frames_are_refused_or_parse_but_never_crash(
    noise: bytes, place: int, flip: int
) -> None:
    good = bytearray(encode(HEADER, Small(Rows(torch.arange(6.0).view(1, 6)), 1)))
    for data in (noise, bytes(good[: place % len(good)])):
        with pytest.raises(FrameError):
            decode(data, Small)
    good[place % len(good)] ^= flip
    try:
        decode(bytes(good), Small)
    except FrameError as error:
        assert "\n" not in str(error)


def _forged(scalars: Any, tensors: dict[str, torch.Tensor], header: Any = None) -> bytes:
    told = list(vars(HEADER).values()) if header is None else header
    return bytes(save(tensors, {"frame": json.dumps([told, scalars])}))


ROWS = {"rows": torch.zeros(2)}


@pytest.mark.parametrize(
    "data",
    [
        _forged({"number": 1, "extra": 2}, ROWS),
        _forged({"number": 1}, {**ROWS, "extra": torch.zeros(1)}),
        _forged({}, ROWS),
        _forged({"number": 1}, {}),
        _forged({"number": 1.5}, ROWS),
        _forged({"number": True}, ROWS),
        _forged({"number": "1"}, ROWS),
        _forged({"number": 1, "rows": 2}, ROWS),
        _forged([1], ROWS),
        _forged({"number": 1}, ROWS, header=["x"]),
        _forged({"number": 1}, ROWS, header=[1] * 8),
        bytes(save(ROWS, {"frame": "[" * 100_000})),
        bytes(save(ROWS, {"other": "x"})),
        (1 << 62).to_bytes(8, "little") + b"{}",
        b"",
    ],
)
def test_forged_frames_are_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(data, Small)


def test_frames_that_differ_in_shape_or_in_what_they_share_do_not_stack() -> None:
    one, other = Small(Rows(torch.zeros(1, 3)), 1), Small(Rows(torch.zeros(1, 4)), 1)
    with pytest.raises(FrameError, match="shape"):
        stack([one, other])
    with pytest.raises(FrameError, match="shared"):
        stack([one, Small(one.rows, 2)])


def test_a_reply_names_its_sender() -> None:
    back = reply_header(HEADER)
    assert (back.sender, back.recipient, back.step) == ("client/1", "server", HEADER.step)
