"""What client methods release by their context: bounds, noise and receipts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Picks, Rows, Shared
from securecluster.messaging.receipts import GAUSSIAN, PUBLIC, Receipt
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.runtime.call_context import CallContext, Releases, outside_run
from securecluster.training.data_access import DataAccess

S, Z, B = 2.0, 0.5, 3.0
ROWS = torch.tensor([[30.0, 40.0, 0.0], [0.3, 0.4, 0.0]])  # norms 50 and 0.5


class Steps(NoiseStreams):
    """Streams whose noise is the standard deviation, z times the sensitivity, and a log."""

    def __init__(self) -> None:
        super().__init__(lambda client: bytes([client] * 32), "run")
        self.asked: list[tuple[int, str, int]] = []

    def noised(
        self,
        client: int,
        purpose: str,
        step: int,
        row: torch.Tensor,
        multiplier: float,
        sensitivity: float,
    ) -> torch.Tensor:
        self.asked.append((client, purpose, step))
        return row + multiplier * sensitivity


def context(
    unit: str = "client", noise: float = Z, draws: NoiseStreams | None = None, step: int = 4
) -> CallContext:
    """Return the context of a call to clients 5 and 6."""
    noise_of_clients = ClientNoise(unit, S, noise, B, draws or Steps())
    made = outside_run(noise_of_clients, (5, 6), step)
    return replace(made, releases=Releases("tell"))


@dataclass(frozen=True, eq=False)
class Told:
    """A reply with fields of every kind."""

    rows: Rows | None = None
    picks: Picks | None = None
    shared: Shared | None = None
    number: int = 0


def receipts(made: CallContext, reply: Told, client: int = 5) -> list[Receipt]:
    """Return the receipts of a client's noise in a reply."""
    (written,) = made.releases.receipts(reply, [client])
    return list(written)


def test_a_clients_row_is_clipped_and_has_noise_of_the_clip_norm() -> None:
    made = context()
    released = made.release(ROWS)
    expected = torch.tensor([[1.2, 1.6, 0.0], [0.3, 0.4, 0.0]]) + Z * S
    # the clip leaves room for rounding
    torch.testing.assert_close(released, expected, rtol=1e-4, atol=0)
    assert receipts(made, Told(Rows(released))) == [Receipt(GAUSSIAN, ("rows",), Z, 2.0)]


def test_where_examples_are_protected_one_may_move_a_row_through_the_ball() -> None:
    made = context("example")
    released = made.release(ROWS, norm=1.0)
    expected = torch.tensor([[0.6, 0.8, 0.0], [0.3, 0.4, 0.0]]) + Z * 2.0
    # the clip leaves room for rounding
    torch.testing.assert_close(released, expected, rtol=1e-4, atol=0)
    # replacing an example moves it no further
    assert receipts(made, Told(Rows(released))) == [Receipt(GAUSSIAN, ("rows",), Z, 1.0)]


def test_a_sensitivity_is_each_clients_own_and_clips_nothing() -> None:
    made = context("example")
    released = made.release(ROWS, sensitivity=[0.1, 0.2], replace=math.sqrt(2), noise=4.0)
    torch.testing.assert_close(released, ROWS + torch.tensor([[0.4], [0.8]]))
    expected = [Receipt(GAUSSIAN, ("rows",), 4.0, math.sqrt(2))]
    assert receipts(made, Told(Rows(released))) == expected


def test_a_row_that_is_not_finite_counts_as_zeros() -> None:
    released = context().release(torch.tensor([[math.nan, 1.0], [math.inf, 1.0]]))
    assert torch.equal(released, torch.full((2, 2), Z * S))


@pytest.mark.parametrize("noise", [None, 0.0])
def test_without_noise_rows_are_as_they_are_and_have_no_receipt(noise: float | None) -> None:
    made = CallContext((5, 6), (0, 1), 1, 4) if noise is None else context(noise=noise)
    released = made.release(ROWS)
    assert torch.equal(released, ROWS)
    assert receipts(made, Told(Rows(released))) == []
    assert made.loss_bound is None


def test_draws_are_named_by_the_method_and_counted_by_client() -> None:
    together, one_by_one = Steps(), Steps()
    made = context(draws=together)
    made.release(ROWS)
    made.release(ROWS)
    for n in range(2):
        alone = context(draws=one_by_one).select([n])
        alone.release(ROWS[n : n + 1])
        alone.release(ROWS[n : n + 1])
    assert together.asked[:2] == [(5, "tell 1", 4), (6, "tell 1", 4)]
    assert sorted(together.asked) == sorted(one_by_one.asked)


def test_a_release_that_is_made_once_has_one_name_in_every_call() -> None:
    draws = Steps()
    first, second = context(draws=draws, step=1), context(draws=draws, step=9)
    released = [made.release(ROWS, once="gram") for made in (first, second)]
    assert set(draws.asked) == {(5, "gram", 0), (6, "gram", 0)}
    (one,), (two,) = (
        receipts(made, Told(Rows(rows)))
        for made, rows in zip((first, second), released, strict=True)
    )
    assert one == two == Receipt(GAUSSIAN, ("rows",), Z, 2.0, once=one.once)
    assert one.once.startswith("gram ")
    # other bits under the same name are another release
    other = first.release(ROWS.flip(1), once="gram")
    (three,) = receipts(first, Told(Rows(other)))
    assert three.once.startswith("gram ")
    assert three.once != one.once


def test_exact_numbers_among_released_ones_make_the_result_exact() -> None:
    made = context()
    exact = made.release(ROWS, noise=0.0)
    noisy = made.release(ROWS)
    mixed = made.postprocess(lambda a, b: a + 0 * b, exact, noisy)
    assert receipts(made, Told(Rows(mixed))) == []


def test_losses_have_noise_by_their_bound_and_the_samples_behind_them() -> None:
    means = np.array([[1.0, math.nan, math.inf], [2.0, 7.0, 0.5]])
    made = context("example")
    released = made.release_losses(means, [10, 20], widths=[3, 2])
    of_first = Z * B * math.sqrt(3) / 10
    of_second = Z * B * math.sqrt(2) / 20
    rows = [
        [1 + of_first, B + of_first, B + of_first],
        [2 + of_second, B + of_second, 0.0],  # the third mean is none of its own
    ]
    by_hand = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(released, by_hand)
    assert receipts(made, Told(Rows(released))) == [Receipt(GAUSSIAN, ("rows",), Z, 1.0)]
    assert made.loss_bound == B


def test_choices_are_the_best_without_noise_and_random_with_much() -> None:
    counts = np.tile([0.0, 4.0, 4.0], (2, 1))
    assert context(noise=0.0).release_choice(counts).tolist() == [1, 1]
    seen = set()
    for step in range(40):
        streams = NoiseStreams(lambda client: bytes([client] * 32), "run")
        made = context(noise=50.0, draws=streams, step=step)
        chosen = made.release_choice(counts)
        seen.update(chosen.tolist())
        assert receipts(made, Told(Rows(chosen))) == [Receipt(GAUSSIAN, ("rows",), 50.0)]
    assert seen == {0, 1, 2}


def test_what_is_computed_from_releases_has_their_receipts() -> None:
    made = context()
    one, two = made.release(ROWS), made.release(2 * ROWS, norm=1.0, noise=3.0)
    both = made.postprocess(lambda a, b: a.argmax(1) + b.argmax(1), one, two)
    of_one = made.postprocess(torch.sum, one)
    assert receipts(made, Told(Rows(both), shared=Shared(of_one))) == [
        Receipt(GAUSSIAN, ("rows", "shared"), Z, 2.0),
        Receipt(GAUSSIAN, ("rows",), 3.0, 2.0),
    ]


def test_what_is_computed_from_anything_else_has_none() -> None:
    made = context()
    released = made.release(ROWS)
    for tensors in ([ROWS], [released, ROWS], [released + 0]):
        mixed = made.postprocess(lambda *rows: sum(rows), *tensors)
        assert receipts(made, Told(Rows(mixed))) == []


def test_a_released_tensor_that_was_changed_has_no_receipt() -> None:
    made = context()
    released = made.release(ROWS)
    released[0] = ROWS[0]
    assert receipts(made, Told(Rows(released))) == []
    assert made.releases.of([made.postprocess(torch.clone, released)]) is None


def test_other_writes_are_noticed_too() -> None:
    made = context()
    written, kept = made.release(ROWS), made.release(ROWS)
    written.numpy()[0] = ROWS[0].numpy()
    assert receipts(made, Told(Rows(written), shared=Shared(kept))) == [
        Receipt(GAUSSIAN, ("shared",), Z, 2.0)
    ]


def test_which_rows_of_a_table_a_client_has_may_depend_on_its_data() -> None:
    made = context()
    released = made.release(ROWS)
    assert receipts(made, Told(Rows(released, (1, 0)))) == []
    assert receipts(made, Told(picks=Picks(released, ((0,), (1,))))) == []


def test_a_row_that_is_not_finite_counts_as_zeros_whatever_its_sensitivity() -> None:
    rows = torch.tensor([[math.nan, 1.0], [3.0, 4.0]])
    released = context("example").release(rows, sensitivity=0.1)
    torch.testing.assert_close(released, torch.tensor([[0.0, 0.0], [3.0, 4.0]]) + Z * 0.1)


@pytest.mark.parametrize(
    ("rows", "options", "sentence"),
    [
        (ROWS.long(), {}, r"takes a row of real numbers for each of 2 client\(s\).*torch\.int64"),
        (ROWS[:1], {}, r"was given torch\.float32 of shape \(1, 3\)"),
        (ROWS, {"noise": -1.0}, r"noise = -1 and replace = 2 have no price"),
        (ROWS, {"replace": 0.5}, r"the second from 1 to 2"),
        (ROWS, {"replace": 3.0}, r"replace = 3 have no price"),
    ],
)
def test_releases_without_a_price_are_refused(
    rows: torch.Tensor, options: dict[str, float], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence):
        context().release(rows, **options)


def test_postprocessing_takes_tensors() -> None:
    made = context()
    with pytest.raises(UsageError, match=r"give other values to the function itself"):
        made.postprocess(lambda rows, k: rows[:, :k], made.release(ROWS), 2)


def test_each_client_has_receipts_of_its_own_noise() -> None:
    made = context()
    rows = [made.select([n]).release(ROWS[n : n + 1], noise=1.0 + n) for n in range(2)]
    stacked = made.postprocess(lambda *parts: torch.cat(parts), *rows)
    reply = Told(Rows(stacked))
    assert receipts(made, reply, client=5) == [Receipt(GAUSSIAN, ("rows",), 1.0)]
    assert receipts(made, reply, client=6) == [Receipt(GAUSSIAN, ("rows",), 2.0)]


def test_data_cannot_be_read_within_postprocessing() -> None:
    access = DataAccess()
    made = replace(context(), releases=Releases("tell", closed=access.closed))

    def reads(rows: torch.Tensor) -> torch.Tensor:
        access.read("inputs")
        return rows

    with access.during("Client.tell", may_read=True, may_train=True):
        released = made.release(ROWS)
        access.read("inputs")
        with pytest.raises(PolicyError, match=r"reads cohort\.inputs in a function that it gives"):
            made.postprocess(reads, released)
        access.read("labels")


@pytest.mark.parametrize(("counts", "public"), [([20, 30], True), ([20, 31], False)])
def test_numbers_of_samples_are_public_where_the_run_says_so(
    counts: Sequence[int], public: bool
) -> None:
    samples = {5: frozenset((20.0, 4.0)), 6: frozenset((30.0, 0.0))}
    made = replace(context("example"), releases=Releases("tell", samples))
    told = Told(Rows(made.sample_counts(counts, torch.float32)))
    expected: list[Any] = [Receipt(PUBLIC, ("rows",))] if public else []
    assert receipts(made, told) == expected
    # elsewhere nothing is known of them
    assert receipts(context(), Told(Rows(context().sample_counts(counts, torch.float32)))) == []
