"""What a checkpoint holds does not grow with the rounds before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from securecluster import Federation
from securecluster.protocols import FLHC


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
