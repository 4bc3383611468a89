"""What was sent, who saw it, on disk as in memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securecluster.core.client_names import at
from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Picks, Response, Rows, Shared, reply_header
from securecluster.messaging.parties import AUTHORITY, SERVER, WIRE, Party, client, lps, parse
from securecluster.messaging.receipts import Receipt
from securecluster.messaging.transcript import (
    ObservedMessage,
    Recording,
    Transcript,
    entry_of,
    load_entries,
)


@dataclass(frozen=True, eq=False)
class Query:
    shared: Shared
    picks: Picks
    name: str
    maybe: Rows | None


@dataclass(frozen=True, eq=False)
class Reply:
    rows: Rows
    number: int


def types(method: str) -> tuple[type, type]:
    return Query, Reply


def query(step: int, count: int) -> Query:
    picks = tuple((k, 0) if k % 2 else () for k in range(count))
    maybe = Rows(torch.arange(2)[:, None], tuple(k % 2 for k in range(count))) if step % 2 else None
    table = torch.arange(8).view(4, 2)
    return Query(Shared(torch.tensor(float(step))), Picks(table, picks), "é", maybe)


CALLS = [("train", (0, 1, 2), (0, 2)), ("receive", (2, 1), (2, 1)), ("train", (1,), ())]


def filled(mode: str, folder: Path | None = None, calls: int = 3) -> Transcript:
    transcript = Transcript(mode, folder, types)
    for step, (method, to, came) in enumerate(CALLS[:calls]):
        rows = torch.tensor([[10.0 * step + i] * 3 for i in came])
        reply = Reply(Rows(rows), step) if came else None
        asked, members = query(step, len(to)), (1,) * len(to)
        call = Call("c" * 32, method, "gather", step + 1, step, to, asked, members)
        transcript.record(call, Response(came, reply))
    return transcript


def test_every_frame_is_counted_at_its_encoded_length() -> None:
    transcript = filled("full")
    first, second, third = transcript.entries
    assert (first.to, first.lost, first.up[1]) == ((0, 1, 2), (1,), 0)
    assert (second.lost, third.lost, third.up) == ((), (1,), (0,))
    for k, entry in enumerate(transcript.entries):
        call, answer = transcript.content(k)
        lengths = [len(frame) for frame in frames(call, answer)]
        assert entry.down == tuple(lengths[: len(call.to)])
        ups = dict(zip(answer.ids, lengths[len(call.to) :], strict=True))
        assert entry.up == tuple(ups.get(i, 0) for i in entry.to)
    totals = transcript.totals()
    assert totals["up"] == sum(sum(e.up) for e in transcript.entries) > 0
    assert totals["down"] == sum(sum(e.down) for e in transcript.entries)
    assert totals["by_message"]["receive"] == {"up": sum(second.up), "down": sum(second.down)}
    assert set(totals["by_message"]) == {"train", "receive"}


# numbers of one digit to nine, so that lengths differ although headers are padded to eight bytes
GROWING = tuple(10**k for k in range(9))


@pytest.mark.parametrize("varied", ["to", "members", "asker", "group", "receipts", "picks"])
@pytest.mark.parametrize("verb", ["sum", "relay"])
def test_whatever_makes_a_frame_longer_is_counted(varied: str, verb: str) -> None:
    """One frame of each length is measured, so whatever a length depends on tells them apart."""
    count = len(GROWING)
    to = GROWING if varied == "to" else tuple(range(count))
    picks = tuple((0,) * k for k in range(count)) if varied == "picks" else ((0,),) * count
    asked = Query(Shared(torch.tensor(1.0)), Picks(torch.arange(8).view(4, 2), picks), "é", None)
    call = Call(
        "c" * 32, "train", verb, 3, 7, to, asked,
        members=GROWING if varied == "members" else (2,) * count,
        asker=GROWING if varied == "asker" else (),
        group=tuple("9" * 2**k for k in range(count)) if varied == "group" else (),
    )  # fmt: skip
    # all but two reply, in another order
    came = to[:0:-1][1:]
    receipts = [(Receipt("public", ("rows",)),) * n for n in range(len(came))]
    answer = Response(
        came,
        Reply(Rows(torch.zeros(len(came), 3)), 5),
        tuple(receipts) if varied == "receipts" else (),
    )
    entry = entry_of(call, answer)
    down = [len(wire.encode(call.header(k), call.query, k)) for k in range(count)]
    up = []
    for k, number in enumerate(to):
        length = 0
        if number in came:
            n = came.index(number)
            header = reply_header(call.header(k))
            length = len(wire.encode(header, answer.reply, n, answer.receipts_at(n)))
        up.append(length)
    counted = (entry.up, entry.down) if verb == "relay" else (entry.down, entry.up)
    assert counted == (tuple(down), tuple(up))
    # a relay is not asked for by a local parameter server: it comes from one
    assert len({*down, *up, 0}) > 3 or (verb, varied) == ("relay", "asker")
    assert entry.lost == (to[0], to[-1])


@pytest.mark.parametrize("mode", ["none", "sizes", "full"])
@pytest.mark.parametrize("stored", [False, True])
def test_every_mode_counts_the_same_bytes_and_keeps_no_more_than_it_says(
    mode: str, stored: bool, tmp_path: Path
) -> None:
    transcript = filled(mode, tmp_path if stored else None)
    assert transcript.totals() == filled("full").totals()
    assert transcript.count == 3
    assert transcript.entries == ([] if mode == "none" else filled("full").entries)
    assert len(list(tmp_path.glob("*.safetensors"))) == (3 if mode == "full" and stored else 0)
    assert load_entries(tmp_path) == (transcript.entries if stored else [])
    if mode != "full":
        with pytest.raises(UsageError, match=f"holds {mode} only"):
            transcript.content(0)


def frames(call: Call, answer: Response) -> list[bytes]:
    down = [wire.encode(call.header(k), call.query, k) for k in range(len(call.to))]
    return down + [
        wire.encode(reply_header(call.header(call.to.index(i))), answer.reply, n)
        for n, i in enumerate(answer.ids)
    ]


def test_disk_and_memory_give_the_same_contents(tmp_path: Path) -> None:
    stored, kept = filled("full", tmp_path), filled("full")
    for k in range(3):
        (call, answer), (other, reply) = stored.content(k), kept.content(k)
        assert (call.to, call.members, call.round) == (other.to, other.members, other.round)
        assert answer.ids == reply.ids
        assert frames(call, answer) == frames(other, reply)
        assert (answer.reply is None) == (reply.reply is None) == (k == 2)
    views = [
        [(s.sender, s.receiver, s.bytes, said(s)) for s in t.seen_by({client(2)})]
        for t in (stored, kept)
    ]
    assert views[0] == views[1]


def test_a_repetition_in_memory_is_told_from_another_run(tmp_path: Path) -> None:
    stored = filled("full", tmp_path)
    assert stored.same_as(filled("full"))
    assert not stored.same_as(filled("full", calls=2))
    other = filled("full")
    other.content(1)[1].reply.rows.table[0, 0] += 1
    assert other.entries == stored.entries
    assert not stored.same_as(other)


def named(mode: str = "full") -> Transcript:
    """The same calls among four clients with names, of whom the last was never asked."""
    transcript = filled(mode)
    transcript.names = ("site-0", "site-1", "1", "site-3")
    return transcript


def said(seen: ObservedMessage) -> Any:
    """What a party read in a frame, in plain numbers; None where it read nothing."""
    if seen.content is None:
        return None
    if isinstance(seen.content, Reply):
        return seen.content.rows.values.tolist()
    return [seen.content.picks.table[list(p)].tolist() for p in seen.content.picks.picks]


def view(*parties: Party) -> list[tuple[str, str, str, int, Any]]:
    return [
        (str(s.sender), str(s.receiver), s.method, s.step, said(s))
        for s in filled("full").seen_by(parties)
    ]


FIRST, PICKED = [[]], [[[2, 3], [0, 1]]]


def test_the_server_sees_every_frame_in_order() -> None:
    assert view(SERVER) == [
        ("server", "client/0", "train", 0, FIRST),
        ("client/0", "server", "train", 0, [[0.0] * 3]),
        ("server", "client/1", "train", 0, PICKED),
        ("server", "client/2", "train", 0, FIRST),
        ("client/2", "server", "train", 0, [[2.0] * 3]),
        ("server", "client/2", "receive", 1, FIRST),
        ("client/2", "server", "receive", 1, [[12.0] * 3]),
        ("server", "client/1", "receive", 1, PICKED),
        ("client/1", "server", "receive", 1, [[11.0] * 3]),
        ("server", "client/1", "train", 2, FIRST),
    ]


def test_a_client_sees_its_own_frames_alone() -> None:
    assert view(client(1)) == [f for f in view(SERVER) if "client/1" in f[:2]]
    assert view(client(0), client(2)) == [f for f in view(SERVER) if "client/1" not in f[:2]]


@pytest.mark.parametrize(
    ("given", "party"),
    [
        (SERVER, SERVER), ("server", SERVER), ({"server"}, SERVER), ("wire", WIRE),
        (1, client(2)),  # its name
        ([1], client(2)), (np.int64(1), client(2)), (at(1), client(1)),
        ([at(np.int64(1))], client(1)), ({client(1)}, client(1)), ("site-1", client(1)),
        (client("site-1"), client(1)),  # type: ignore[arg-type]
        ("1", client(2)), (client("1"), client(2)),  # type: ignore[arg-type]
    ],
    ids=str,
)  # fmt: skip
def test_parties_go_by_name_or_position(given: Any, party: Party) -> None:
    def frames_of(transcript: Transcript, who: Any) -> list[tuple[str, int, int]]:
        return [(s.method, s.step, s.bytes) for s in transcript.seen_by(who)]

    assert frames_of(named(), given) == frames_of(filled("full"), {party}) != []
    several = [*given, at(0)] if isinstance(given, list | set) else [given, at(0)]
    assert frames_of(named(), several) == frames_of(filled("full"), {party, client(0)})


def test_who_exists_and_was_never_asked_saw_nothing() -> None:
    for given in (at(3), "site-3", {client(3)}):
        assert list(named().seen_by(given)) == []


@pytest.mark.parametrize(
    "given",
    [
        (), set(), 0, 3, 4, -1, {99}, at(4), client(99), client(-1), client("x"), client(None),
        "site-4", "", "servers", b"server", None, True, 1.5, [True], {client(True)}, AUTHORITY,
        lps(0),
        Party("server", 0), Party("nobody"), [SERVER, 99], [["server"]], ("server", "site-9"),
    ],
    ids=repr,
)  # fmt: skip
def test_parties_that_do_not_exist_are_refused_at_once(given: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"this transcript has SERVER, WIRE, clients by name \('site-0', 'site-1', '1' …\) "
        r"or position \(at\(0\) to at\(3\)\)$",
    ) as caught:
        named().seen_by(given)  # before the first frame is read
    assert "\n" not in str(caught.value)


def test_without_names_clients_go_by_position_alone() -> None:
    for given in ("site-0", client("3"), 3, at(3)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"clients by position \(at\(0\) to at\(2\)\)$"):
            filled("full").seen_by(given)
    assert filled("full").resolved([2, "1", at(0)]) == {client(2), client(1), client(0)}


def test_a_name_of_two_parties_is_refused() -> None:
    transcript = filled("full")
    transcript.names = ("a", "wire", "a")
    with pytest.raises(UsageError, match=r"'a' is the name of several clients: give at\(0\) or at"):
        transcript.seen_by("a")
    with pytest.raises(UsageError, match=r"'wire' is the name of a client, too: give at\(1\), or"):
        transcript.seen_by("wire")
    assert list(transcript.seen_by(WIRE))


def test_a_transcript_without_entries_does_not_say_that_nobody_saw_anything() -> None:
    with pytest.raises(UsageError, match="transcript sizes or full"):
        filled("none").seen_by(SERVER)


def test_the_wire_sees_every_length_and_no_content() -> None:
    assert view(WIRE) == [(*f[:4], None) for f in view(SERVER)]
    lengths = [s.bytes for s in filled("sizes").seen_by({WIRE})]
    assert lengths == [s.bytes for s in filled("full").seen_by({SERVER})]
    assert all(n > 8 for n in lengths)
    assert view(WIRE, client(1)) == [
        f if "client/1" in f[:2] else (*f[:4], None) for f in view(SERVER)
    ]
    assert view(WIRE, SERVER) == view(SERVER)


@pytest.mark.parametrize("party", [SERVER, client(1)])
def test_contents_that_were_not_kept_are_not_made_up(party: Party) -> None:
    with pytest.raises(UsageError, match="transcript='full'"):
        list(filled("sizes").seen_by({party}))
    assert list(named("sizes").seen_by({client(3)})) == [], "it exists, and nobody asked it"


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("mode", ["sizes", "full"])
def test_rewinding_forgets_what_came_later_and_the_run_writes_it_again(
    mode: str, stored: bool, tmp_path: Path
) -> None:
    transcript = filled(mode, tmp_path if stored else None, 1)
    before = transcript.snapshot()
    assert before.count == 1
    later = filled(mode, tmp_path / "x" if (tmp_path / "x").mkdir() is None and stored else None)
    for k in (1, 2):
        call, answer = filled("full").content(k)
        transcript.record(call, answer)
    assert transcript.entries == later.entries
    transcript.rewind(before)
    assert (transcript.count, transcript.entries) == (1, later.entries[:1])
    assert transcript.totals() == filled(mode, None, 1).totals()
    if stored:
        assert load_entries(tmp_path) == later.entries[:1]
        assert [p.name for p in tmp_path.glob("*.safetensors")] == (
            ["000000.safetensors"] if mode == "full" else []
        )
    for k in (1, 2):
        transcript.record(*filled("full").content(k))
    assert (transcript.entries, transcript.totals()) == (later.entries, later.totals())
    if mode == "full":
        assert [said(s) for s in transcript.seen_by({SERVER})] == [f[4] for f in view(SERVER)]


def test_another_process_goes_on_from_the_folder(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    two = filled("full", tmp_path / "two", 2).snapshot()
    whole = filled("full", tmp_path)
    again = Transcript("full", tmp_path, types)
    again.rewind(two)
    assert again.entries == whole.entries[:2]
    assert frames(*again.content(1)) == frames(*filled("full").content(1))
    again.record(*filled("full").content(2))
    assert load_entries(tmp_path) == whole.entries


def test_a_line_cut_short_is_left_out_and_a_lost_one_is_said(tmp_path: Path) -> None:
    transcript, index = filled("sizes", tmp_path, 2), tmp_path / "index.jsonl"
    two = transcript.snapshot()
    transcript.record(*filled("full").content(2))
    three, text = transcript.snapshot(), index.read_text()
    index.write_text(text[:-5])
    assert load_entries(tmp_path) == transcript.entries[:2]
    with pytest.raises(RunFolderError, match=r"index\.jsonl differs"):
        Transcript("sizes", tmp_path, types).rewind(three)
    Transcript("sizes", tmp_path, types).rewind(two)
    assert index.read_text() == "".join(text.splitlines(keepends=True)[:2])
    index.unlink()
    with pytest.raises(RunFolderError, match=r"index\.jsonl is missing"):
        Transcript("sizes", tmp_path, types).rewind(two)


def test_files_of_other_names_are_left_alone(tmp_path: Path) -> None:
    transcript = filled("full", tmp_path)
    (tmp_path / "notes.safetensors").write_text("mine")
    transcript.rewind(Recording())
    assert [path.name for path in tmp_path.glob("*.safetensors")] == ["notes.safetensors"]


def test_an_opened_transcript_reads_what_the_run_wrote(tmp_path: Path) -> None:
    for mode in ("sizes", "full"):
        folder = tmp_path / mode
        folder.mkdir()
        whole, found = filled(mode, folder), Transcript.read(mode, folder, types)
        assert (found.mode, found.entries, found.totals()) == (mode, whole.entries, whole.totals())
        assert found.surplus() == []
    (folder / "000009.safetensors").write_bytes(b"")
    assert [path.name for path in found.surplus()] == ["000009.safetensors"]


@pytest.mark.parametrize("line", ["garbage", "{}", "[]", json.dumps({"method": "x", "unknown": 1})])
def test_a_damaged_index_is_said_in_a_sentence(line: str, tmp_path: Path) -> None:
    filled("sizes", tmp_path)
    with (tmp_path / "index.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(RunFolderError):
        load_entries(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "cut", "foreign", "bit"])
def test_a_damaged_content_is_said_in_a_sentence(damage: str, tmp_path: Path) -> None:
    transcript, path = filled("full", tmp_path), tmp_path / "000001.safetensors"
    if damage == "missing":
        path.unlink()
    else:
        data = path.read_bytes()
        flipped = data[:-1] + bytes([data[-1] ^ 1])
        path.write_bytes({"cut": data[:-1], "foreign": b"x" * 100, "bit": flipped}[damage])
    with pytest.raises(RunFolderError, match=r"000001\.safetensors (is missing|differs)"):
        transcript.content(1)
    assert transcript.content(0)[0].to == (0, 1, 2)


def test_parties_have_names_that_can_be_read_back() -> None:
    for party in (SERVER, WIRE, AUTHORITY, client(12), lps(0)):
        assert parse(str(party)) == party
    assert len({str(p) for p in (SERVER, WIRE, AUTHORITY, client(1), client(2), lps(1))}) == 6


@dataclass(frozen=True, eq=False)
class LongerReply(Reply):
    origin: Rows


def test_a_message_that_lacks_a_field_of_this_version_is_refused_by_name(tmp_path: Path) -> None:
    filled("full", tmp_path)
    later = Transcript.read("full", tmp_path, lambda method: (Query, LongerReply))
    with pytest.raises(RunFolderError, match="a LongerReply of this transcript has no origin: use"):
        later.content(0)
