"""What is sealed client to client: for the clients of the run, from its sender, in its call; nothing for anyone else."""

from __future__ import annotations

import pytest
import torch

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.seals import OVERHEAD, Seal


def seal(byte: int = 7) -> Seal:
    made = Seal()
    made.unlock(bytes([byte]) * 32)
    return made


def test_the_runs_clients_read_it_bit_for_bit() -> None:
    rows = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    boxes = seal().close(rows, (4, 7, 1), 9)
    assert boxes.shape == (3, 4 * 5 * 4 + OVERHEAD)
    assert boxes.dtype == torch.uint8
    assert torch.equal(seal().open(boxes, (4, 7, 1), 9, rows[0]), rows)
    wide = rows.double()
    assert torch.equal(seal().open(seal().close(wide, (4, 7, 1), 9), (4, 7, 1), 9, wide[0]), wide)


def test_what_is_sent_again_is_the_same_and_equal_rows_of_two_clients_or_calls_are_not() -> None:
    rows = torch.ones(2, 6)
    one, two = seal().close(rows, (0, 1), 3), seal().close(rows, (0, 1), 4)
    assert torch.equal(one, seal().close(rows, (0, 1), 3))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], two[0])
    assert rows.numpy()[0].tobytes() not in one[0].numpy().tobytes()


@pytest.mark.parametrize("wrong", ["seed", "client", "call", "altered", "exchanged"])
def test_a_box_that_is_not_what_it_says_is_refused(wrong: str) -> None:
    rows = torch.arange(12.0).view(2, 6)
    boxes = seal().close(rows, (0, 1), 3)
    boxes[0, 5] ^= wrong == "altered"
    boxes = boxes.flip(0) if wrong == "exchanged" else boxes
    with pytest.raises(FrameError, match="cannot be opened"):
        seal(8 if wrong == "seed" else 7).open(boxes, (2, 1) if wrong == "client" else (0, 1), 2 if wrong == "call" else 3, rows[0])


def test_rows_of_another_size_are_refused_and_so_is_sealing_without_a_seed() -> None:
    boxes = seal().close(torch.ones(1, 6), (0,), 3)
    with pytest.raises(FrameError, match="24 bytes"):
        seal().open(boxes, (0,), 3, torch.ones(7))
    with pytest.raises(UsageError, match="key agreement"):
        Seal().close(torch.ones(1, 6), (0,), 3)
    assert "seed hidden" in repr(seal())
