"""What is sealed client to client: for the clients of the run, from its sender, in its call;
nothing for anyone else.
"""

from __future__ import annotations

import pytest
import torch

from securecluster.errors import FrameError, UsageError
from securecluster.privacy.masking.sealing import OVERHEAD, Seal

ABOUT = ("eigen", "vectors")


def seal(byte: int = 7, run: str = "run") -> Seal:
    made = Seal(run)
    made.unlock(bytes([byte]) * 32)
    return made


def test_the_runs_clients_read_it_bit_for_bit() -> None:
    rows = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    boxes = seal().close(rows, (4, 7, 1), 9, *ABOUT)
    assert boxes.shape == (3, 4 * 5 * 4 + OVERHEAD)
    assert boxes.dtype == torch.uint8
    assert torch.equal(seal().open(boxes, (4, 7, 1), 9, *ABOUT, rows[0]), rows)
    wide = rows.double()
    assert torch.equal(
        seal().open(seal().close(wide, (4, 7, 1), 9, *ABOUT), (4, 7, 1), 9, *ABOUT, wide[0]), wide
    )


def test_what_is_sent_again_is_the_same_and_equal_rows_of_two_clients_or_calls_are_not() -> None:
    rows = torch.ones(2, 6)
    one, two = seal().close(rows, (0, 1), 3, *ABOUT), seal().close(rows, (0, 1), 4, *ABOUT)
    assert torch.equal(one, seal().close(rows, (0, 1), 3, *ABOUT))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one[0], two[0])
    assert rows.numpy()[0].tobytes() not in one[0].numpy().tobytes()


@pytest.mark.parametrize(
    "wrong", ["seed", "client", "call", "method", "field", "run", "altered", "exchanged"]
)
def test_a_box_that_is_not_what_it_says_is_refused(wrong: str) -> None:
    rows = torch.arange(12.0).view(2, 6)
    boxes = seal().close(rows, (0, 1), 3, *ABOUT)
    boxes[0, 5] ^= wrong == "altered"
    boxes = boxes.flip(0) if wrong == "exchanged" else boxes
    with pytest.raises(FrameError, match="cannot be opened"):
        opener = seal(8 if wrong == "seed" else 7, "other" if wrong == "run" else "run")
        ids = (2, 1) if wrong == "client" else (0, 1)
        method = "send_model" if wrong == "method" else "eigen"
        field = "delta" if wrong == "field" else "vectors"
        opener.open(boxes, ids, 2 if wrong == "call" else 3, method, field, rows[0])


def test_rows_of_another_size_are_refused_and_so_is_sealing_without_a_seed() -> None:
    boxes = seal().close(torch.ones(1, 6), (0,), 3, *ABOUT)
    with pytest.raises(FrameError, match="24 bytes"):
        seal().open(boxes, (0,), 3, *ABOUT, torch.ones(7))
    with pytest.raises(UsageError, match="key agreement"):
        Seal("run").close(torch.ones(1, 6), (0,), 3, *ABOUT)
    assert "seed hidden" in repr(seal())
