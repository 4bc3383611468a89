"""Sealed boxes of shares open for their receiver, in their own context, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest

from securecluster.errors import FrameError, UsageError
from securecluster.protections.secure_sums.shamir import PRIME
from securecluster.protections.secure_sums.shares import ShareSeal, box_size

KEY = bytes(range(32))
VALUES = (0, 12345, PRIME - 1)
WHERE: dict[str, Any] = {"block": b"calls 4 to 9", "sender": 3, "receiver": 5}


def box() -> bytes:
    return ShareSeal(KEY, b"run").close(VALUES, **WHERE)


def test_a_box_opens_for_its_receiver() -> None:
    sealed = box()
    assert len(sealed) == box_size(3) == 3 * 33 + 16
    assert ShareSeal(KEY, b"run").open(sealed, 3, **WHERE) == VALUES
    assert box() == sealed
    assert (12345).to_bytes(33, "big") not in sealed


@pytest.mark.parametrize(
    "change",
    [
        {"block": b"calls 4 to 8"},
        {"sender": 4},
        {"receiver": 6},
        # a box that is sent back to its sender
        {"sender": 5, "receiver": 3},
    ],
)
def test_a_box_opens_nowhere_else(change: dict[str, Any]) -> None:
    with pytest.raises(FrameError, match="cannot open"):
        ShareSeal(KEY, b"run").open(box(), 3, **{**WHERE, **change})


def test_a_box_opens_in_no_other_run_and_under_no_other_key() -> None:
    for seal in (ShareSeal(KEY, b"another run"), ShareSeal(bytes(32), b"run")):
        with pytest.raises(FrameError, match="cannot open"):
            seal.open(box(), 3, **WHERE)


def test_an_altered_box_is_refused_whichever_bit_it_is() -> None:
    sealed = box()
    seal = ShareSeal(KEY, b"run")
    for place in range(len(sealed)):
        altered = bytearray(sealed)
        altered[place] ^= 1 << (place % 8)
        with pytest.raises(FrameError, match="cannot open"):
            seal.open(bytes(altered), 3, **WHERE)


def test_a_box_of_another_size_is_refused() -> None:
    for forged in (b"", box()[:-1], box() + b"!"):
        with pytest.raises(FrameError, match="bytes, not 115"):
            ShareSeal(KEY, b"run").open(forged, 3, **WHERE)
    with pytest.raises(FrameError, match="bytes, not 82"):
        ShareSeal(KEY, b"run").open(box(), 2, **WHERE)


def test_a_number_that_is_no_share_is_refused() -> None:
    seal = ShareSeal(KEY, b"run")
    forged = seal.close([PRIME], **WHERE)
    with pytest.raises(FrameError, match="no share"):
        seal.open(forged, 1, **WHERE)


def test_keys_have_32_bytes_and_are_not_printed() -> None:
    with pytest.raises(UsageError, match="31"):
        ShareSeal(bytes(31), b"run")
    assert KEY.hex()[:8] not in repr(ShareSeal(KEY, b"run"))
