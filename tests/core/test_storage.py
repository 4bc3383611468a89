"""Checkpoints, atomic files and packed state."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.errors import RunFolderError
from securecluster.protocols import CFL, FLHC


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
