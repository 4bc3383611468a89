"""Digests of replies: the same for what is the same on the wire, and for nothing else."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from securecluster.messaging.digests import reply_digests, tells_noise
from securecluster.messaging.messages import Picks, Rows, Shared


@dataclasses.dataclass(frozen=True, eq=False)
class Reply:
    value: Any


def digest(value: Any) -> str:
    (found,) = reply_digests(Reply(value), 1)
    return found


def test_frames_that_differ_in_anything_have_other_digests() -> None:
    numbers = torch.arange(4.0)
    values = [
        Rows(numbers[None]),
        Rows(numbers.reshape(1, 2, 2)),
        Rows(numbers.double()[None]),
        Rows((numbers + 1)[None]),
        Shared(numbers + 2),
        Shared(numbers.reshape(2, 2) + 2),
        # rows of a frame: none, one of four numbers, two of two, and these in another order
        Picks(numbers[None], ((),)),
        Picks(numbers[None], ((0,),)),
        Picks(numbers.reshape(2, 2), ((0, 1),)),
        Picks(numbers.reshape(2, 2), ((1, 0),)),
        3,
        "3",
        None,
    ]
    for one, other in itertools.combinations(values, 2):
        assert digest(one) != digest(other)


def test_the_same_numbers_have_the_same_digest_wherever_they_lie() -> None:
    table = torch.tensor([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    assert digest(Picks(table, ((0, 1),))) == digest(Picks(table.flip(0), ((0, 1),)))
    assert digest(Picks(table, ((2, 1),))) == digest(Picks(table[:2], ((0, 1),)))
    assert digest(Rows(table, (2,))) == digest(Rows(table[:1]))
    assert digest(Shared(table.T)) == digest(Shared(table.T.contiguous()))


def test_each_frame_of_a_batch_has_the_digest_that_it_has_alone() -> None:
    table = torch.arange(6.0).reshape(3, 2)
    picks = Picks(table, ((0,), (), (2, 1)))
    batch = reply_digests(Reply(picks), 3)
    assert list(batch) == [digest(picks.select([k])) for k in range(3)]
    shared = Shared(table)
    assert set(reply_digests(Reply(shared), 3)) == {digest(shared)}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64, torch.int64])
def test_choices_alone_tell_nothing_of_noise(dtype: torch.dtype) -> None:
    table = torch.ones(1, 2, dtype=dtype)
    for value in (Rows(table), Shared(table), Picks(table, ((0,),))):
        assert tells_noise(Reply(value)) == (dtype != torch.int64)
    assert not tells_noise(Reply(1))
