"""Pads of pairs: what cancels, what a row shows, and what a client refuses to send."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from securecluster.core.serialization import pack, unpack
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.protections.pads.pair_pads import (
    KEPT_CALLS,
    PairContext,
    PairGuard,
    PairState,
    add_pair_pads,
    pair_pad,
)

CONTEXT = PairContext(b"run", "relevance", call=3, attempt=0, members=(0, 2, 3, 7))


def key(first: int, second: int) -> bytes:
    low, high = sorted((first, second))
    return bytes([low, high]) * 16


def keys_of(client: int, members: tuple[int, ...]) -> dict[int, bytes]:
    return {peer: key(client, peer) for peer in members if peer != client}


def padded(rows: torch.Tensor, context: PairContext) -> torch.Tensor:
    table = rows.clone()
    for row, client in zip(table, context.members, strict=True):
        add_pair_pads(row, client, keys_of(client, context.members), context, "row")
    return table


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pads_cancel_in_the_sum_of_each_pair_whoever_is_lost(dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(draw.integers(limits.min // 2, limits.max // 2, (4, 4))).to(dtype)
    sent = padded(rows, CONTEXT)
    for alive in itertools.combinations(range(4), 3):
        square = sent[list(alive)][:, list(alive)]
        total = square + square.T
        own = rows[list(alive)][:, list(alive)]
        expected = (own + own.T).fill_diagonal_(0)  # of itself a client sends a zero
        assert torch.equal(total, expected)
    assert not torch.equal(sent, rows)


def test_a_padded_row_is_uniform_and_correlates_with_nothing() -> None:
    members = tuple(range(4001))
    context = dataclasses.replace(CONTEXT, members=members)
    values = torch.linspace(0, 1 << 29, len(members)).to(torch.int32)
    row = values.clone()
    add_pair_pads(row, 0, {peer: peer.to_bytes(32, "big") for peer in members[1:]}, context, "row")
    sent = row[1:].double().numpy()
    # 16 equal parts of the ring: chi-squared with 15 degrees of freedom, below 1e-6
    counts, _ = np.histogram(sent, bins=16, range=(-(2.0**31), 2.0**31))
    assert ((counts - 250) ** 2 / 250).sum() < 60
    assert abs(np.corrcoef(sent, values[1:].double().numpy())[0, 1]) < 6 / np.sqrt(4000)


@pytest.mark.parametrize(
    "other",
    [
        {"run": b"another run"},
        {"purpose": "losses"},
        {"call": 4},
        {"attempt": 1},
        {"members": (0, 2, 3)},
    ],
)
def test_a_pad_is_of_one_context(other: dict[str, object]) -> None:
    context = dataclasses.replace(CONTEXT, **other)  # type: ignore[arg-type]
    first = pair_pad(key(0, 2), CONTEXT, "row", 64)
    assert pair_pad(key(0, 2), context, "row", 64) != first
    assert pair_pad(key(0, 2), CONTEXT, "loss", 64) != first
    assert pair_pad(key(0, 3), CONTEXT, "row", 64) != first
    assert pair_pad(key(0, 2), CONTEXT, "row", 64) == first


def test_numbers_that_no_pad_covers_leave_as_zeros() -> None:
    row = torch.tensor([5, 6, 7, 8], dtype=torch.int32)
    add_pair_pads(row, 2, {0: key(0, 2), 3: key(2, 3)}, CONTEXT, "row")
    assert row[1] == 0  # of itself
    assert row[3] == 0  # of client 7, with which it has no key
    assert row[0] != 5 and row[2] != 7


def test_rows_and_members_of_another_form_are_refused() -> None:
    with pytest.raises(FrameError, match="numbers for 4 members"):
        add_pair_pads(torch.zeros(3, dtype=torch.int32), 0, {}, CONTEXT, "row")
    with pytest.raises(FrameError, match="client 1 has a row"):
        add_pair_pads(torch.zeros(4, dtype=torch.int32), 1, {}, CONTEXT, "row")
    with pytest.raises(UsageError, match="int32 or int64"):
        add_pair_pads(torch.zeros(4), 0, {}, CONTEXT, "row")
    for members in ((), (2, 0), (0, 0, 1), (-1, 0)):
        with pytest.raises(FrameError, match="ascending"):
            PairContext(b"run", "relevance", 0, 0, members)
    with pytest.raises(FrameError, match="not negative"):
        dataclasses.replace(CONTEXT, attempt=-1)


def test_one_attempt_pads_one_row() -> None:
    guard = PairGuard(0, PairState())
    assert guard.next_attempt(CONTEXT) == 0
    guard.take_part(CONTEXT, b"row")
    guard.take_part(CONTEXT, b"row")  # the same row again
    assert guard.next_attempt(CONTEXT) == 0
    with pytest.raises(PolicyError, match="another row in this attempt"):
        guard.take_part(CONTEXT, b"other")
    # another row needs a new attempt
    assert guard.next_attempt(CONTEXT) == 1
    again = dataclasses.replace(CONTEXT, attempt=1)
    guard.take_part(again, b"other")
    with pytest.raises(PolicyError, match="took part in attempt 1"):
        guard.take_part(CONTEXT, b"row")  # an old frame


def test_another_list_of_members_needs_a_new_attempt() -> None:
    guard = PairGuard(0, PairState())
    guard.take_part(CONTEXT, b"row")
    fewer = dataclasses.replace(CONTEXT, members=(0, 2, 3))
    with pytest.raises(PolicyError, match="other members"):
        guard.check(fewer)
    assert guard.next_attempt(fewer) == 1
    guard.take_part(dataclasses.replace(fewer, attempt=1), b"row")
    # the same members in another method's call are others, too
    other = dataclasses.replace(fewer, attempt=1, purpose="losses")
    with pytest.raises(PolicyError, match="other members"):
        guard.check(other)


def test_the_record_outlives_the_process_and_old_calls_are_forgotten() -> None:
    state = PairState()
    for call in range(KEPT_CALLS + 3):
        context = dataclasses.replace(CONTEXT, call=call)
        PairGuard(0, state).take_part(context, b"row")
    guard = PairGuard(0, unpack(pack(state), PairState))
    assert len(guard.state.calls) == KEPT_CALLS
    with pytest.raises(PolicyError, match="long answered later calls"):
        guard.check(dataclasses.replace(CONTEXT, call=2))
    last = dataclasses.replace(CONTEXT, call=KEPT_CALLS + 2)
    guard.take_part(last, b"row")
    with pytest.raises(PolicyError, match="another row"):
        guard.take_part(last, b"other")
