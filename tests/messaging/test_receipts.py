"""Receipts in JSON, in frames and in transcripts: exact, short, and refused where they are none."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from securecluster.errors import FrameError
from securecluster.messaging import wire
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import (
    Call,
    Header,
    Picks,
    Response,
    Rows,
    kinds,
    reply_header,
)
from securecluster.messaging.receipts import (
    FOLLOWS,
    GAUSSIAN,
    MOST,
    PUBLIC,
    TRAINING,
    Receipt,
    receipts_as_json,
    receipts_from_json,
)
from securecluster.messaging.transcript import Transcript
from securecluster.protections.encryption.messages import encrypted_pairs_class

HEADER = Header("c" * 32, "train", "gather", 3, 7, "client/1", "server", 1)


@dataclass(frozen=True, eq=False)
class Query:
    number: int


@dataclass(frozen=True, eq=False)
class Reply:
    delta: Rows
    size: Rows
    note: str


# each with the text that a frame has of it, written by hand
WRITTEN = [
    (Receipt("public", ("size",)), '["public",["size"]]'),
    (Receipt("follows", ("delta", "size")), '["follows",["delta","size"]]'),
    (Receipt("gaussian", ("delta",), 1.5), '["gaussian",["delta"],1.5]'),
    (Receipt("gaussian", (), 0.5), '["gaussian",[],0.5]'),
    (Receipt("gaussian", ("delta",), 1.5, 1.0), '["gaussian",["delta"],1.5,1.0]'),
    (
        Receipt("gaussian", ("delta",), 0.1 + 0.2, 2**0.5),
        '["gaussian",["delta"],0.30000000000000004,1.4142135623730951]',
    ),
    (Receipt("gaussian", ("é\u2028",), 5e-324), '["gaussian",["\\u00e9\\u2028"],5e-324]'),
    (
        Receipt("gaussian", ("delta",), 1.7976931348623157e308, once="gram"),
        '["gaussian",["delta"],1.7976931348623157e+308,2.0,0,1,"gram"]',
    ),
    (
        Receipt("dp-sgd", ("delta",), 1.1, batch=2**62),
        '["dp-sgd",["delta"],1.1,2.0,4611686018427387904]',
    ),
    (
        Receipt("dp-sgd", (), 1e-12, batch=2**63 - 1, epochs=2**31 - 1),
        '["dp-sgd",[],1e-12,2.0,9223372036854775807,2147483647]',
    ),
    (Receipt("dp-sgd", (), 3.0, epochs=4), '["dp-sgd",[],3.0,2.0,0,4]'),
]


@pytest.mark.parametrize(("receipt", "text"), WRITTEN, ids=[text for _, text in WRITTEN])
def test_a_receipt_is_written_without_the_defaults_at_its_end_and_read_back_exactly(
    receipt: Receipt, text: str
) -> None:
    assert json.dumps(receipt.as_json(), separators=(",", ":")) == text
    assert Receipt.from_json(json.loads(text)) == receipt


def test_the_shortest_receipt_is_a_name() -> None:
    assert Receipt("public").as_json() == ["public"]
    assert Receipt.from_json(["follows"]) == Receipt("follows")


def test_every_mechanism_has_a_written_example() -> None:
    assert {receipt.mechanism for receipt, _ in WRITTEN} == {GAUSSIAN, TRAINING, FOLLOWS, PUBLIC}


POSITIVE = st.floats(min_value=0, exclude_min=True, allow_infinity=False)
RATIO = st.floats(1, 2)
NAMES = st.lists(st.text(max_size=8), max_size=4, unique=True).map(tuple)
RECEIPTS = st.one_of(
    st.builds(Receipt, st.sampled_from(["follows", "public"]), NAMES, once=st.text(max_size=8)),
    st.builds(Receipt, st.just("gaussian"), NAMES, POSITIVE, RATIO, once=st.text(max_size=8)),
    st.builds(
        Receipt,
        st.just("dp-sgd"),
        NAMES,
        POSITIVE,
        RATIO,
        st.integers(0, 2**63 - 1),
        st.integers(1, 2**31 - 1),
    ),
)


@given(st.lists(RECEIPTS, min_size=1, max_size=5))
def test_receipts_survive_the_text_of_a_frame(receipts: list[Receipt]) -> None:
    text = json.dumps(receipts_as_json(tuple(receipts)))
    assert receipts_from_json(json.loads(text)) == tuple(receipts)


MALFORMED: list[Any] = [
    None, 1, "gaussian", {"mechanism": "public"}, ("public",), [], [None], [1], [["public"]],
    ["public", [], 0.0, 2.0, 0, 1, "", ""],
    # values of other types
    ["public", None], ["public", "delta"], ["public", {"delta": 1}], ["public", [1]],
    ["public", [None]], ["public", [["delta"]]], ["gaussian", [], 1], ["gaussian", [], "1.0"],
    ["gaussian", [], True], ["gaussian", [], None], ["gaussian", [], 1.0, 2],
    ["gaussian", [], 1.0, True], ["gaussian", [], 1.0, "2.0"], ["dp-sgd", [], 1.0, 2.0, 1.0],
    ["dp-sgd", [], 1.0, 2.0, True], ["dp-sgd", [], 1.0, 2.0, "1"],
    ["dp-sgd", [], 1.0, 2.0, 1, 1.0], ["dp-sgd", [], 1.0, 2.0, 1, True],
    ["gaussian", [], 1.0, 2.0, 0, 1, 1], ["gaussian", [], 1.0, 2.0, 0, 1, None],
    # no such mechanism
    [""], ["exact"], ["free"], ["skellam", [], 1.0], ["laplace", [], 1.0], ["Gaussian", [], 1.0],
    # noise that is none, and none that is noise
    ["gaussian"], ["gaussian", []], ["gaussian", [], 0.0], ["gaussian", [], -1.0],
    ["gaussian", [], math.inf], ["gaussian", [], -math.inf], ["gaussian", [], math.nan],
    ["dp-sgd", [], 0.0, 2.0, 10], ["dp-sgd", [], math.inf, 2.0, 10], ["follows", [], 1.0],
    ["follows", [], math.inf], ["public", [], 1.0], ["public", [], math.nan, 0.5],
    # ratios of sensitivities
    ["gaussian", [], 1.0, 0.999], ["gaussian", [], 1.0, 2.001], ["gaussian", [], 1.0, 0.0],
    ["gaussian", [], 1.0, -1.5], ["gaussian", [], 1.0, math.inf],
    ["gaussian", [], 1.0, math.nan],
    # trainings
    ["dp-sgd", [], 1.0, 2.0, -1], ["dp-sgd", [], 1.0, 2.0, 1 << 63],
    ["dp-sgd", [], 1.0, 2.0, 1 << 200], ["dp-sgd", [], 1.0, 2.0, 1, 0],
    ["dp-sgd", [], 1.0, 2.0, 1, -1], ["dp-sgd", [], 1.0, 2.0, 1, 1 << 31],
    # other texts of a receipt that there is
    ["public", []], ["public", [], -0.0], ["gaussian", [], 1.0, 2.0], ["gaussian", [], 1.0, 2.0, 0],
    ["dp-sgd", [], 1.0, 2.0, 10, 1], ["dp-sgd", [], 1.0, 2.0, 10, 1, ""],
]  # fmt: skip


@pytest.mark.parametrize("values", MALFORMED, ids=str)
def test_what_is_no_receipt_is_refused(values: Any) -> None:
    with pytest.raises(ValueError, match="a receipt"):
        Receipt.from_json(values)
    with pytest.raises(ValueError, match="a receipt"):
        receipts_from_json([["public"], values])


def test_a_list_of_receipts_is_a_list_and_neither_empty_nor_long() -> None:
    others: list[Any] = [None, 1, "public", {}, (["public"],), []]
    for values in others:
        with pytest.raises(ValueError, match="receipts"):
            receipts_from_json(values)
    assert receipts_from_json([["public"]] * MOST) == (Receipt("public"),) * MOST
    # refused before it is read: its receipts are none
    with pytest.raises(ValueError, match="not a list of some"):
        receipts_from_json([None] * (MOST + 1))


def replies(count: int = 3) -> Reply:
    rows = torch.arange(4.0 * count).view(count, 4)
    return Reply(Rows(rows), Rows(torch.arange(count)), "é")


FIELDS = st.lists(st.sampled_from(["delta", "size", "note"]), max_size=3, unique=True).map(tuple)


@given(
    st.lists(
        st.builds(Receipt, st.just("gaussian"), FIELDS, POSITIVE, RATIO, once=st.text(max_size=12))
        | st.builds(Receipt, st.just("follows"), FIELDS),
        max_size=4,
    ).map(tuple),
    st.integers(0, 2),
)
def test_a_frames_length_is_known_without_encoding_and_its_receipts_are_read_back(
    receipts: tuple[Receipt, ...], position: int
) -> None:
    data = wire.encode(HEADER, replies(), position, receipts)
    assert wire.size(HEADER, replies(), position, receipts) == len(data)
    header, message, read = wire.decode_reply(data, Reply)
    assert (header, read) == (HEADER, receipts)
    assert torch.equal(message.delta.values[0], replies().delta.table[position])
    if not receipts:
        assert data == wire.encode(HEADER, replies(), position)


def test_the_frames_of_a_batch_are_as_long_as_their_own_receipts_make_them() -> None:
    written = [(), (Receipt("public", ("size",)),), tuple(receipt for receipt, _ in WRITTEN[2:6])]
    encoded = [wire.encode(HEADER, replies(), k, written[k]) for k in range(3)]
    lengths = wire.sizes(lambda k: HEADER, [()] * 3, replies(), range(3), written)
    assert lengths == [len(data) for data in encoded]
    assert lengths[0] < lengths[1] < lengths[2]


def test_a_request_with_receipts_is_refused() -> None:
    data = wire.encode(HEADER, Query(1), 0, (Receipt("public"),))
    with pytest.raises(FrameError, match="a request has receipts"):
        wire.decode(data, Query)
    assert wire.decode(wire.encode(HEADER, Query(1)), Query)[1].number == 1


@pytest.mark.parametrize("name", ["deltas", "", "values", "delta ", "__class__"])
def test_a_receipt_of_a_field_that_the_message_lacks_is_refused(name: str) -> None:
    receipts = (Receipt("public", ("size",)), Receipt("gaussian", ("delta", name), 1.0))
    data = wire.encode(HEADER, replies(), 0, receipts)
    with pytest.raises(FrameError, match=f"a receipt of {name!r}"):
        wire.decode_reply(data, Reply)


@dataclass(frozen=True, eq=False)
class Row:
    row: Annotated[Rows, Real(("width",))]


def test_receipts_of_ciphertexts_name_the_field_in_them() -> None:
    encrypted: Any = encrypted_pairs_class(Row, 32)
    assert encrypted.__hidden_fields__ == ("row",)
    octets = torch.zeros(1, 5, dtype=torch.uint8)
    values = {Rows: Rows(octets), Picks: Picks(octets, ((0,),)), str: "x"}
    message = encrypted(**{name: values[kind] for name, kind in kinds(encrypted).items()})
    receipts = (Receipt("gaussian", ("row",), 1.0),)
    data = wire.encode(HEADER, message, 0, receipts)
    assert wire.decode_reply(data, encrypted)[2] == receipts
    other = wire.encode(HEADER, message, 0, (Receipt("public", ("rows",)),))
    with pytest.raises(FrameError, match="a receipt of 'rows'"):
        wire.decode_reply(other, encrypted)


def forged(*behind: str) -> bytes:
    """Return a frame of `Reply` whose text has anything behind the scalars."""
    parts = [json.dumps(wire.header_fields(HEADER)), json.dumps({"note": "x"}), *behind]
    tensors = load(wire.encode(HEADER, replies(), 0))
    return bytes(save(tensors, {"frame": f"[{','.join(parts)}]"}))


def test_a_hand_made_frame_is_read() -> None:
    _, _, read = wire.decode_reply(forged('[["gaussian",["delta"],1.5]]'), Reply)
    assert read == (Receipt("gaussian", ("delta",), 1.5),)
    assert wire.decode_reply(forged(), Reply)[2] == ()


@pytest.mark.parametrize(
    "behind",
    [
        ("[]",),  # one text for a reply without receipts
        ("null",), ("{}",), ('"public"',), ('["public"]',), ('[["public"]]', "[]"),
        ('[["public"]]', '[["public"]]'), ('[["laplace",["delta"],1.0]]',),
        ('[["gaussian",["delta"],1e999]]',), ('[["gaussian",["delta"],Infinity]]',),
        ('[["gaussian",["delta"],NaN]]',), ('[["gaussian",["delta"],1]]',),
        ('[["dp-sgd",[],1.0,2.0,1e3]]',), ("[" + ",".join(['["public"]'] * (MOST + 1)) + "]",),
        ("[" * 10_000 + "]" * 10_000,),
    ],
    ids=lambda behind: " ".join(behind)[:40],
)  # fmt: skip
def test_forged_receipts_are_refused_by_name(behind: tuple[str, ...]) -> None:
    data = forged(*behind)
    with pytest.raises(FrameError, match="header does not parse"):
        wire.decode_reply(data, Reply)
    with pytest.raises(FrameError, match="header does not parse"):
        wire.peek(data)


def types(method: str) -> tuple[type, type]:
    return Query, Reply


RECEIPTS_OF = {
    0: (Receipt("gaussian", ("delta",), 0.1 + 0.2, 2**0.5, once="gram"), Receipt("public")),
    1: (),
    2: (Receipt("dp-sgd", ("delta", "size"), 1.1, batch=2**62, epochs=3),),
}


def recorded(folder: Path | None = None, mode: str = "full") -> Transcript:
    """Return a transcript of three calls: receipts of some, of nobody, and a call without reply."""
    transcript = Transcript(mode, folder, types)
    for step, ids in enumerate([(0, 1, 2), (2, 1), ()]):
        to = (0, 1, 2)
        call = Call("c" * 32, "train", "gather", 1, step, to, Query(step), (1,) * 3)
        reply = replies(len(ids)) if ids else None
        receipts = tuple(RECEIPTS_OF[i] for i in ids) if step == 0 else ()
        transcript.record(call, Response(ids, reply, receipts))
    return transcript


@pytest.mark.parametrize("stored", [False, True])
def test_transcripts_give_receipts_back(stored: bool, tmp_path: Path) -> None:
    recorded(tmp_path if stored else None)
    kept = Transcript.read("full", tmp_path, types) if stored else recorded()
    _, first = kept.content(0)
    assert first.receipts == tuple(RECEIPTS_OF[i] for i in (0, 1, 2))
    assert [first.receipts_at(k) for k in range(3)] == [RECEIPTS_OF[i] for i in (0, 1, 2)]
    _, second = kept.content(1)
    assert (second.receipts, second.receipts_at(0), second.receipts_at(1)) == ((), (), ())
    _, nobody = kept.content(2)
    assert (nobody.reply, nobody.receipts) == (None, ())


@pytest.mark.parametrize("mode", ["sizes", "full"])
def test_transcripts_count_the_bytes_of_receipts(mode: str) -> None:
    first, second, _ = recorded(mode=mode).entries
    header = reply_header(Call("c" * 32, "train", "gather", 1, 0, (0,), None, (1,)).header(0))
    plain = len(wire.encode(header, replies(), 0))
    expected = [len(wire.encode(header, replies(), k, RECEIPTS_OF[k])) for k in range(3)]
    assert first.up == tuple(expected)
    assert expected[0] > plain and expected[2] > plain
    assert second.up == (0, plain, plain)
