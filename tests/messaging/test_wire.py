"""The codec: exact lengths, exact round trips, and FrameError for everything else."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load, save

from securecluster.errors import FrameError
from securecluster.messaging import wire
from securecluster.messaging.messages import Header, Picks, Rows, Shared
from securecluster.messaging.wire import decode, encode, peek, size

KINDS = (torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
DTYPES = {kind: kind.itemsize for kind in KINDS}
HEADER = Header("c" * 32, "train", "gather", 3, 7, "server", "client/1", 1)


@dataclass(frozen=True, eq=False)
class Wide:
    zeta: Shared
    alpha: Rows
    own: Rows
    mid: Picks
    count: int
    share: float
    word: str
    flag: bool
    maybe: Shared | None
    note: str | None


@dataclass(frozen=True, eq=False)
class Narrow:
    rows: Rows
    number: int


@dataclass(frozen=True, eq=False)
class Listed:
    picks: Picks


@dataclass(frozen=True, eq=False)
class Empty:
    pass


def tensors(*lead: int) -> st.SearchStrategy[torch.Tensor]:
    """Tensors whose bytes are arbitrary (NaN payloads and negative zeros too), possibly of no
    element at all.
    """

    def make(dtype: torch.dtype, rest: list[int], seed: int) -> torch.Tensor:
        shape = (*lead, *rest)
        draw = torch.Generator().manual_seed(seed)
        if dtype == torch.bool:
            return torch.randint(0, 2, shape, generator=draw).bool()
        octets = (*shape, DTYPES[dtype])
        filled = torch.randint(0, 256, octets, dtype=torch.uint8, generator=draw)
        return filled.view(dtype).reshape(shape)

    shapes = st.lists(st.integers(0, 11), max_size=3)
    return st.builds(make, st.sampled_from(list(DTYPES)), shapes, st.integers(0, 99))


def indices(rows: int, least: int, most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, rows - 1), min_size=least, max_size=most).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Header, Wide, int]:
    count, stored = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    words = st.text(max_size=12) | st.sampled_from(
        ['"', "\\", "\x00\n\t", "é 漢 🦉", "\ud800", "\x7f\x80\u2028", '{"frame":[]}']
    )
    message = Wide(
        draw(tensors().map(Shared)),
        Rows(draw(tensors(stored)), draw(indices(stored, count, count))),
        Rows(draw(tensors(count))),
        Picks(draw(tensors(stored)), tuple(draw(indices(stored, 0, 11)) for _ in range(count))),
        draw(st.integers()),
        draw(st.floats(allow_nan=False)),
        draw(words),
        draw(st.booleans()),
        draw(st.none() | tensors().map(Shared)),
        draw(st.none() | words),
    )
    number = st.integers(0, 10**12)
    kinds = (words, words, words, number, number, words, words, number)
    header = Header(*(draw(kind) for kind in kinds))
    return header, message, draw(st.integers(0, count - 1))


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


@given(batches())
def test_size_is_the_length_and_every_bit_comes_back(batch: tuple[Header, Wide, int]) -> None:
    header, message, k = batch
    data = encode(header, message, k)
    assert size(header, message, k) == len(data)
    assert peek(data) == header
    decoded, back = decode(data, Wide)
    assert decoded == header
    assert back.alpha.index is None
    assert bits(back.zeta.value) == bits(message.zeta.value)
    assert bits(back.alpha.table[0]) == bits(message.alpha.values[k])
    assert bits(back.own.table[0]) == bits(message.own.table[k])
    assert bits(back.mid.table[list(back.mid.picks[0])]) == bits(
        message.mid.table[list(message.mid.picks[k])]
    )
    assert (back.maybe is None) == (message.maybe is None)
    if message.maybe is not None and back.maybe is not None:
        assert bits(back.maybe.value) == bits(message.maybe.value)
    for name in ("count", "share", "word", "flag", "note"):
        assert getattr(back, name) == getattr(message, name)


def test_a_frame_is_a_plain_safetensors_file_of_the_one_recipients_rows() -> None:
    table = torch.arange(6.0).view(3, 2)
    data = encode(HEADER, Narrow(Rows(table, (2, 0)), 5), 1)
    assert {name: t.tolist() for name, t in load(data).items()} == {"rows": [0.0, 1.0]}
    assert size(HEADER, Empty()) == len(encode(HEADER, Empty()))
    assert decode(encode(HEADER, Empty()), Empty)[0] == HEADER


def test_a_slice_or_a_transpose_is_sent_as_what_it_shows() -> None:
    whole = torch.arange(12.0).view(3, 4)
    _, back = decode(encode(HEADER, Narrow(Rows(whole.T), 1), 2), Narrow)
    assert back.rows.table.tolist() == [[2.0, 6.0, 10.0]]


GOOD = encode(HEADER, Narrow(Rows(torch.arange(6.0).view(1, 6)), 1))
START = 8 + int.from_bytes(GOOD[:8], "little")


def refused(data: bytes, message: type = Narrow) -> None:
    """Refused by a FrameError of one line, whatever part is read."""
    with pytest.raises(FrameError) as caught:
        decode(data, message)
    assert "\n" not in str(caught.value)


@given(st.binary(max_size=300))
@example(b"\x02" + bytes(7) + b"{}")
@example(b"\x02" + bytes(7) + b"[]")
@example(b"\x04" + bytes(7) + b"null")
@example(b"\x01" + bytes(7) + b"\xff")
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(data)
    with pytest.raises(FrameError):
        peek(data)


@pytest.mark.parametrize("cut", range(0, len(GOOD), 3))
def test_truncated_frames_are_refused(cut: int) -> None:
    refused(GOOD[:cut])


def test_trailing_bytes_are_refused() -> None:
    refused(GOOD + b"\x00")


@given(st.lists(st.tuples(st.integers(0, START - 1), st.integers(1, 255)), min_size=1, max_size=4))
def test_flipped_bytes_in_the_header_region_raise_frame_errors_only(
    flips: list[tuple[int, int]],
) -> None:
    data = bytearray(GOOD)
    for place, flip in flips:
        data[place] ^= flip
    for read in (peek, lambda d: decode(d, Narrow)):
        try:
            read(bytes(data))
        except FrameError as error:
            assert "\n" not in str(error)


def test_a_header_longer_than_the_frame_and_a_frame_longer_than_the_limit_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for length in (len(GOOD) - 7, len(GOOD), 1 << 40, (1 << 64) - 1):
        refused(length.to_bytes(8, "little") + GOOD[8:])
    assert peek(GOOD) == HEADER
    monkeypatch.setattr(wire, "MAX_FRAME", len(GOOD) - 1)
    refused(GOOD)


def framed(text: str, rows: dict[str, torch.Tensor] | None = None) -> bytes:
    return bytes(save({"rows": torch.zeros(2)} if rows is None else rows, {"frame": text}))


FIELDS = list(vars(HEADER).values())[:8]  # without those of secure sums


def said(scalars: Any, header: Any = None) -> str:
    return json.dumps([FIELDS if header is None else header, scalars])


def test_the_forger_of_these_tests_can_write_a_good_frame() -> None:
    assert decode(framed(said({"number": 1})), Narrow)[0] == HEADER


@pytest.mark.parametrize(
    "scalars",
    [
        {}, {"number": None}, {"number": 1, "more": 1}, {"number": 1, "rows": 1}, {"rows": 1},
        [1], 1, "x", None,
    ],
)  # fmt: skip
def test_missing_and_unknown_scalars_are_refused(scalars: Any) -> None:
    refused(framed(said(scalars)))


@pytest.mark.parametrize("value", [1.0, "1", True, [1], {"a": 1}, float("nan")])
def test_scalars_of_another_type_are_refused(value: Any) -> None:
    refused(framed(said({"number": value})))


@pytest.mark.parametrize(
    "rows",
    [
        {},
        {"rows": torch.zeros(1), "number": torch.zeros(1)},
        {"rows": torch.zeros(1), "extra": torch.zeros(1)},
    ],
)
def test_missing_and_unknown_tensors_are_refused(rows: dict[str, torch.Tensor]) -> None:
    refused(framed(said({"number": 1}), rows))


def test_picks_of_a_single_number_are_refused() -> None:
    refused(framed(said({}), {"picks": torch.tensor(1.0)}), Listed)


@pytest.mark.parametrize(
    "header",
    [
        [], FIELDS[:-1], [*FIELDS, 1], [*FIELDS, "", 0], [*FIELDS, "0-1", True],
        [*FIELDS, "0-1", 0, 0], [1] * 8, ["x"] * 8, [*FIELDS[:-1], True], [*FIELDS[:-1], 1.0],
        [*FIELDS[:-1], None], {}, "abcdefgh", 8,
    ],
)  # fmt: skip
def test_headers_with_other_fields_are_refused(header: Any) -> None:
    refused(framed(said({"number": 1}, header)))
    with pytest.raises(FrameError):
        peek(framed(said({"number": 1}, header)))


@pytest.mark.parametrize("field", ["round", "step", "members"])
@pytest.mark.parametrize("value", [-1, 1 << 96])
def test_negative_and_giant_counts_in_a_header_are_refused(field: str, value: int) -> None:
    """The step becomes the nonce of a mask, 12 bytes without a sign: such a frame would crash the
    client that answers it.
    """
    header = dataclasses.replace(HEADER, **{field: value})
    refused(encode(header, Narrow(Rows(torch.zeros(1, 2)), 1)))


@pytest.mark.parametrize(
    "bomb",
    [
        "[" * 200_000,
        "[" * 200_000 + "]" * 200_000,
        '{"a":' * 100_000,
        '[[],{"a":' + "[" * 10**5,
        "1" * 5000,
    ],
)
def test_bombs_in_the_metadata_are_refused(bomb: str) -> None:
    refused(framed(bomb))


def raw(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


@pytest.mark.parametrize("frame", ["1", "null", '["x"]', '{"a":"x"}'])
def test_metadata_that_are_no_text_are_refused(frame: str) -> None:
    refused(raw('{"__metadata__":{"frame":' + frame + "}}"))


@pytest.mark.parametrize(
    "opening",
    ['{"__metadata__":', "[", '{"__metadata__":{"frame":"x"},"a":', '{"__metadata__":{"frame":'],
)
def test_bombs_in_the_file_header_are_refused(opening: str) -> None:
    refused(raw(opening + "[" * 100_000))
    refused(raw(opening * 20_000))


def entry(dtype: str, shape: list[int], count: int) -> bytes:
    """A frame with one hand-written tensor entry."""
    head = {
        "__metadata__": {"frame": said({"number": 1})},
        "rows": {"dtype": dtype, "shape": shape, "data_offsets": [0, count]},
    }
    return raw(json.dumps(head), bytes(count))


@pytest.mark.parametrize(
    "shape", [[0, 1 << 62, 4], [0, 1 << 63], [1 << 63, 0], [1 << 31, 1 << 40, 0], [-1], [2, 2]]
)
def test_shapes_that_do_not_fit_their_data_or_any_memory_are_refused(shape: list[int]) -> None:
    refused(entry("F32", shape, 0))


@pytest.mark.parametrize(
    ("dtype", "count"),
    [("F16", 4), ("BF16", 4), ("U64", 16), ("C64", 16), ("F8_E4M3", 2), ("F4", 1), ("X", 8)],
)
def test_types_that_no_message_has_are_refused(dtype: str, count: int) -> None:
    """`size` has no number for them, so the server would crash on writing them down."""
    refused(entry(dtype, [2], count))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda s: st.lists(s, max_size=9),
    )
)
def test_any_json_as_metadata_is_refused(tree: Any) -> None:
    refused(framed(json.dumps(tree)))
