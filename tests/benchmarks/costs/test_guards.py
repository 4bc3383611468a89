"""The benchmark of bookkeeping: what it counts, leaves out and writes. No time is asserted."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.costs import guards
from benchmarks.evidence import read
from benchmarks.table import SEEDED
from securecluster.messaging.messages import Call, Empty, Response, Rows
from securecluster.messaging.receipts import GAUSSIAN, Receipt
from securecluster.parties import dry_run
from securecluster.privacy.dp.target import Target
from securecluster.protocols.common.messages import Update
from securecluster.runtime import relays
from securecluster.runtime.release_guard import ReleaseGuard
from securecluster.training.data_access import DataAccess

CLIENTS = 6
ROUNDS = 2


def test_receipts_add_their_text_to_a_frame() -> None:
    call = Call("0" * 32, "train", "gather", 1, 1, (3, 12), Empty(), (1, 1))
    reply = Update(Rows(torch.zeros(2, 5)), None)
    receipt = Receipt(GAUSSIAN, ("delta",), 0.5)
    text = ',[["gaussian",["delta"],0.5]]'
    # a JSON string within JSON has its quotes escaped, and frames are filled up to 8 bytes
    added = len(text) + text.count('"')
    found = list(guards.frame_bytes(call, Response((12, 3), reply, ((receipt,), ()))))
    assert abs(found[0][0] - found[0][1] - added) < 8
    assert found[1][0] == found[1][1]


@pytest.mark.parametrize("case", guards.CASES)
def test_what_is_left_out_changes_no_result(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = guards.federation_of(CLIENTS)
    memory: guards.Memory = {}

    def fitted(parts: Sequence[str]) -> Any:
        protocol = guards.protocol_of(case, ROUNDS)
        with guards.without(parts, memory):
            return protocol.fit(federation, SEEDED)

    whole = fitted([])
    fitted([guards.RECEIPTS])
    # without them nothing of the bookkeeping is called
    for owner, name in (
        (ReleaseGuard, "receipts"),
        (ReleaseGuard, "_follows_training"),
        (DataAccess, "during"),
        (DataAccess, "read"),
        (DataAccess, "train"),
        (Target, "admit"),
        (relays, "_digests_of_rows"),
    ):
        monkeypatch.setattr(owner, name, lambda *given, name=name, **named: pytest.fail(name))
    bare = fitted(list(guards.PARTS))
    assert bare.bytes_ == whole.bytes_
    assert list(bare.labels_) == list(whole.labels_)
    assert torch.equal(bare.client_models_.values, whole.client_models_.values)
    assert bare.ledger_.events == whole.ledger_.events


def test_pairs_alternate() -> None:
    asked = []
    ticks = iter([4.0, 2.0, 3.0, 9.0, 5.0, 1.0])

    def run(parts: Sequence[str], part: str) -> guards.Watch:
        asked.append((*parts, part))
        return guards.Watch(next(ticks) + 1, measured=1.0, inside=1.0)

    pairs = guards.compare(run, guards.READS, 3)
    # of the runs with the part, its own time is taken, too
    kept = (guards.RECEIPTS, guards.READS)
    left_out = (guards.RECEIPTS, guards.READS, guards.NOTHING)
    assert asked == [kept, left_out, left_out, kept, kept, left_out]
    assert pairs.ratios == [2.0, 3.0, 5.0]
    assert pairs.shares == [1 / 4, 1 / 9, 1 / 5]


def test_the_own_time_of_a_part_counts_nested_calls_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = guards.Watch(_running=True)
    ticks = iter([1.0, 2.0, 4.0, 10.0, 11.0, 20.0, 23.0, 30.0, 40.0])
    monkeypatch.setattr(time, "process_time", lambda: next(ticks))

    @contextmanager
    def context() -> Iterator[str]:
        yield "value"

    inner = watch._timed(lambda: "reply")
    assert watch._timed(lambda: inner())() == "reply"
    assert watch.inside == 4.0 - 1.0
    # what is done within a context is not its own
    with watch._timed_context(context)() as value:
        assert value == "value"
    assert watch.inside == 3.0 + (11.0 - 10.0) + (23.0 - 20.0)
    # nor is what is called before or after the server's loop
    watch._running = False
    inner()
    assert watch.inside == 7.0


def test_a_dry_run_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = guards.federation_of(CLIENTS)
    protocol = guards.protocol_of("clove noisy losses", ROUNDS)
    runs = []
    counted = dry_run._counted

    def counting(*given: Any) -> Any:
        runs.append(given)
        return counted(*given)

    monkeypatch.setattr(dry_run, "_counted", counting)
    for _ in range(2):
        guards.dry_run_seconds(protocol, federation)
    assert len(runs) == 2 * (1 + len(protocol.dry_runs()))


@pytest.mark.exhaustive
def test_a_quick_run_writes_all_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cases = ["fedavg DP-SGD", "cfl masked"]
    sizes = ["--clients", str(CLIENTS), "--rounds", "1", "--pairs", "1"]
    frames, seconds, dry_runs = [read(path) for path in guards.main([*sizes, "--cases", *cases])]
    share_of = {(row["case"], row["method"]): float(row["share_of_up"]) for row in frames}
    assert share_of["cfl masked", guards.ALL] == 0
    assert 0 < share_of["fedavg DP-SGD", "contribute"] == share_of["fedavg DP-SGD", guards.ALL]
    of_dp_sgd = [row["part"] for row in seconds if row["case"] == "fedavg DP-SGD"]
    assert of_dp_sgd == list(guards.PARTS)
    # a run without noise has no target
    assert len(seconds) == 2 * len(guards.PARTS) - 1
    assert all(0 <= float(row["share"]) < 1 for row in seconds)
    assert {row["share"] for row in seconds if row["part"] == guards.NOTHING} == {"0.0"}
    assert [row["case"] for row in dry_runs] == ["fedavg DP-SGD"]


def test_no_pairs_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        guards.main(["--pairs", "0"])
    assert "--pairs is at least 1" in capsys.readouterr().err
