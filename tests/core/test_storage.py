"""Checkpoints, atomic files and packed state."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.core import atomic_files
from securecluster.core.serialization import pack, unpack
from securecluster.errors import RunFolderError
from securecluster.protocols import CFL, FLHC
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.runtime.run import CheckpointPart, Run


@dataclass
class Inner:
    value: torch.Tensor
    secret: bytes = b""


@dataclass
class Outer:
    count: int = 0
    inner: list[Inner] = field(default_factory=list)
    named: dict[int, list[int]] = field(default_factory=dict)
    maybe: torch.Tensor | None = None


def test_state_comes_back_bit_for_bit() -> None:
    tree = Outer(3, [Inner(torch.randn(2, 3), b"\x00\xff"), Inner(torch.arange(4))], {5: [1, 2]})
    back = unpack(pack(tree), Outer)
    assert (back.count, back.named, back.maybe) == (3, {5: [1, 2]}, None)
    assert back.inner[0].secret == b"\x00\xff"
    assert all(torch.equal(a.value, b.value) for a, b in zip(tree.inner, back.inner, strict=True))
    assert pack(back) == pack(tree)


@pytest.mark.parametrize("data", [b"", b"\x00" * 40, pack(Inner(torch.zeros(1)))])
def test_damaged_or_foreign_state_is_refused(data: bytes) -> None:
    with pytest.raises(RunFolderError):
        unpack(data, Outer)


def kept(box: dict[str, Any]) -> dict[str, CheckpointPart]:
    part = CheckpointPart(Inner, lambda: box["value"], lambda value: box.update(value=value))
    return {"clients": part}


def test_rounds_go_on_after_the_last_checkpoint(tmp_path: Path) -> None:
    box: dict[str, Any] = {"value": Inner(torch.zeros(1))}
    made: list[str] = []
    (tmp_path / atomic_files.MARKER).touch()  # as whoever claims a run's folder does

    def once() -> Outer:
        made.append("made")
        return Outer(41)

    run, state = Run(tmp_path, kept(box), lambda s: {"count": s.count}), Outer()
    assert run.once("phase", once, Outer).count == 41
    with pytest.raises(ZeroDivisionError):
        for number in run.rounds("loop", state, 5):
            state.count += number
            box["value"].value += 1
            if number == 3:
                raise ZeroDivisionError
    with (tmp_path / "history.jsonl").open("a") as stream:
        stream.write('{"torn')
    (tmp_path / ".checkpoint.tmp").mkdir()
    (tmp_path / ".checkpoint.tmp" / "clock").write_text("x")

    fresh: dict[str, Any] = {"value": Inner(torch.full((1,), 9.0))}
    again, state = Run(tmp_path, kept(fresh), lambda s: {"count": s.count}), Outer()
    assert [line["count"] for line in again.history] == [1, 3]
    assert fresh["value"].value == 2
    assert again.once("phase", once, Outer).count == 41
    assert made == ["made"]
    done = []
    for number in again.rounds("loop", state, 5):
        state.count += number
        done.append(number)
    assert done == [3, 4, 5]
    assert [line["count"] for line in again.history] == [1, 3, 6, 10, 15]
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 5
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    assert stat.S_IMODE((checkpoint / "clients").stat().st_mode) == 0o600


def test_a_full_disk_is_one_sentence_and_the_run_goes_on_afterwards(
    tmp_path: Path, small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = CFL(rounds=4).fit(small)
    real, writes = os.replace, []

    def full(source: Any, target: Any) -> None:
        writes.append(target)
        if len(writes) > 12:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RunFolderError, match="free some space, then resume") as caught:
        CFL(rounds=4).fit(small, folder=tmp_path)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr(os, "replace", real)
    resumed = CFL(rounds=4).fit(small, folder=tmp_path)
    assert torch.equal(resumed.client_models_.values, whole.client_models_.values)
    assert resumed.history_ == whole.history_


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic_files.write_atomic(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(RunFolderError):
        atomic_files.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_an_outbox_keeps_what_somebody_lacks_and_drops_what_nobody_does() -> None:
    box = PendingUpdates.start(3, fresh=True)
    box.post(1, torch.tensor([[1.0, 2.0]]), [0, 0, 0])
    box.post(2, torch.tensor([[3.0, 4.0], [5.0, 6.0]]), [0, 0, 1])
    means = box.message_for([2]).means
    assert means.select([0]).table[list(means.picks[0])].tolist() == [[1, 2], [5, 6]]
    box.acknowledge([0, 1])
    assert len(box.posts) == 2
    assert box.message_for([0, 2]).means.picks == ((), (0, 2))
    assert box.lagging_clients() == [2]
    box.acknowledge([2])
    assert not box.posts
    assert not box.lagging_clients()


def test_without_a_mask_one_row_per_cluster_holds_the_whole_displacement() -> None:
    box = PendingUpdates.start(3, fresh=False)
    box.post(1, torch.tensor([[1.0]]), [0, 0, 0])
    box.post(2, torch.tensor([[10.0], [20.0]]), [0, 1, 0])
    letter = box.message_for([0, 1, 2])
    assert letter.absolute
    assert letter.means.table.tolist() == [[11.0], [21.0]]
    assert letter.means.picks == ((0,), (1,), (0,))


def test_what_a_round_adds_to_a_checkpoint_does_not_grow_with_the_rounds_before(
    tmp_path: Path, small: Federation
) -> None:
    """The ledger has an event for every reply: it is appended to, and no checkpoint holds it."""
    sizes: list[int] = []
    logged: list[int] = []

    def look(line: dict[str, Any]) -> None:
        (checkpoint,) = tmp_path.glob("checkpoint-*")
        files = [checkpoint / name for name in ("network", "clock", "transcript", "manifest.json")]
        sizes.append(sum(file.stat().st_size for file in files if file.exists()))
        logged.append((tmp_path / "ledger.jsonl").read_bytes().count(b"\n"))

    fitted = FLHC(rounds=24, pre_rounds=1, model="linear", epochs=1).fit(
        small, folder=tmp_path, report=look
    )
    assert sizes[-1] < sizes[3] + 64, sizes  # some numbers have gained a digit
    assert logged[-1] > logged[3] + 20
    lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert logged[-1] <= len(fitted.ledger_.events) == len(lines)
