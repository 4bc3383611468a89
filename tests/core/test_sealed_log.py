"""Sealed logs: each line vouches for all before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from securecluster.core.manifest import EMPTY
from securecluster.core.sealed_log import SealedLog
from securecluster.errors import RunFolderError

CONTENTS: list[dict[str, Any]] = [
    {"a": 1, "b": ["\u2028", '", "sha256": "']},
    {"a": None},
    {"a": 2.5},
]


@pytest.fixture
def log(tmp_path: Path) -> SealedLog:
    made = SealedLog(tmp_path / "log.jsonl")
    for content in CONTENTS:
        made.append(content)
    return made


def test_lines_come_back_and_later_ones_are_counted(log: SealedLog) -> None:
    mark = log.mark
    log.append({"a": 3})
    assert SealedLog(log.path).read(mark) == ([*CONTENTS, {"a": 3}], 1)


def test_a_line_that_was_cut_short_is_left_out_and_removed_to_go_on(log: SealedLog) -> None:
    whole = log.path.read_bytes()
    log.path.write_bytes(whole + b'{"a": 3, "sha')
    again = SealedLog(log.path)
    assert again.read(log.mark) == (CONTENTS, 0)
    again.go_on()
    assert log.path.read_bytes() == whole
    again.append({"a": 3})
    assert SealedLog(log.path).read(again.mark) == ([*CONTENTS, {"a": 3}], 0)


def test_every_changed_byte_is_found(log: SealedLog) -> None:
    whole = log.path.read_bytes()
    for position in range(len(whole)):
        changed = bytes([whole[position] ^ 1])
        log.path.write_bytes(whole[:position] + changed + whole[position + 1 :])
        with pytest.raises(RunFolderError, match="differs"):
            SealedLog(log.path).read(log.mark)
        if position < len(whole) - 1:  # without the last end, the last line was cut short
            with pytest.raises(RunFolderError, match="differs"):
                SealedLog(log.path).read(EMPTY)


@pytest.mark.parametrize("order", [[1, 0, 2], [0, 2], [0, 0, 1, 2], [1, 2], [0, 1, 2, 2]])
def test_lines_in_another_order_are_found_without_a_mark(log: SealedLog, order: list[int]) -> None:
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[k] for k in order))
    with pytest.raises(RunFolderError, match="differs"):
        SealedLog(log.path).read(EMPTY)


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_lines_that_are_missing_at_the_end_are_found_by_the_mark(log: SealedLog, kept: int) -> None:
    lines = log.path.read_bytes().splitlines(keepends=True)
    log.path.write_bytes(b"".join(lines[:kept]))
    with pytest.raises(RunFolderError, match="differs"):
        SealedLog(log.path).read(log.mark)
    log.path.unlink()
    with pytest.raises(RunFolderError, match="is missing"):
        SealedLog(log.path).read(log.mark)


def test_nothing_is_appended_to_what_somebody_else_has_written(log: SealedLog) -> None:
    other = SealedLog(log.path)
    other.go_on()
    other.append({"a": 3})
    with pytest.raises(RunFolderError, match="was changed while"):
        log.append({"a": 4})
    assert SealedLog(log.path).read(other.mark) == ([*CONTENTS, {"a": 3}], 0)
    log.go_on()
    log.append({"a": 4})
    log.path.unlink()
    with pytest.raises(RunFolderError, match="was changed while"):
        log.append({"a": 5})
