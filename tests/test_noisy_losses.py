"""Mean losses with noise: what one sample can change, and what is added."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from securecluster.protocols import SRFCA, Settings

from securecluster import Federation
from securecluster.endpoint import Turn
from securecluster.messages import Rows
from securecluster.noisy_losses import LossNoise

DOUBLE = Settings(dtype="float64")


def clipped(client: Any, flat: torch.Tensor, k: int, bound: float) -> float:
    """The mean of client k's clipped losses, in numpy."""
    module = copy.deepcopy(client.cohort.model.module).double()
    torch.nn.utils.vector_to_parameters(flat.clone(), module.parameters())
    o = client.cohort._offsets
    logits = module(client.cohort._x[o[k] : o[k + 1]]).detach().numpy()
    y = client.cohort._y[o[k] : o[k + 1]].numpy()
    top = logits.max(1, keepdims=True)
    losses = np.log(np.exp(logits - top).sum(1)) + top[:, 0] - logits[np.arange(len(y)), y]
    return float(np.where(np.isnan(losses), bound, losses).clip(0, bound).mean())


def test_each_samples_loss_is_clipped_before_the_mean(small: Federation) -> None:
    client: Any = SRFCA(mask="none", model="linear").build_client(small, DOUBLE).client
    noise = torch.from_numpy(np.random.default_rng(0).normal(size=(3, client.cohort.model.dimension)))
    for bound in (0.5, 2.0, 50.0):
        found = client.cohort.losses(noise, [4, 1], bound)
        np.testing.assert_allclose(found, [[clipped(client, row, k, bound) for row in noise] for k in (4, 1)], rtol=1e-12)
    whole = client.cohort.losses(noise, [4, 1])
    assert np.array_equal(client.cohort.losses(noise, [4, 1], 1e9), whole) and (whole > found * 0.99).all()
    broken = torch.stack([noise[0] * float("nan"), noise[0] * 1e200])
    assert (client.cohort.losses(broken, [4, 1], 2.0)[:, 0] == 2).all() and (client.cohort.losses(broken, [4, 1], 2.0) <= 2).all()
    assert client.cohort.loss(Rows(noise), [0, 1, 2], 2.0) == pytest.approx([clipped(client, noise[k], k, 2.0) for k in range(3)])


class Ones:
    """Draws that add exactly one standard deviation, and remember what they were asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, str, int, list[float]]] = []

    def normal(self, client: int, purpose: str, step: int, row: torch.Tensor) -> torch.Tensor:
        self.asked.append((client, purpose, step, row.tolist()))
        return torch.ones_like(row)


def test_the_noise_is_z_times_the_sensitivity_of_a_row() -> None:
    means, turn = np.array([[1.0, 2, 3, 4], [4.0, 3, 2, 1]]), Turn((7, 9), (0, 1), 1, 5)
    for clients, expected in ((False, [4 * 2 / 10, 4 * 2 / 40]), (True, [8.0, 8.0])):
        draws: Any = Ones()
        found = LossNoise(0.5, 8.0, clients, draws).added("fits", turn, means, [10, 40])
        np.testing.assert_allclose(found - means, np.repeat(np.array(expected)[:, None], 4, 1), rtol=1e-12)
        assert draws.asked == [(7, "fits", 5, [1, 2, 3, 4]), (9, "fits", 5, [4, 3, 2, 1])]  # keyed by what is hidden
    assert means[0, 0] == 1


def test_numbers_that_are_not_a_clients_get_no_noise_and_cost_none() -> None:
    draws: Any = Ones()
    noise = LossNoise(1.0, 2.0, True, draws)
    found = noise.added("judge", Turn((0, 1), (0, 1), 1, 1), np.zeros((2, 3)), [5, 5], widths=[3, 1])
    np.testing.assert_allclose(found, [[2 * np.sqrt(3)] * 3, [2, 0, 0]])


def test_what_is_no_number_counts_as_the_bound_and_without_noise_nothing_changes() -> None:
    draws: Any = Ones()
    odd = np.array([[np.nan, np.inf, 1.0]])
    turn = Turn((0,), (0,), 1, 1)
    found = LossNoise(1.0, 3.0, False, draws).added("x", turn, odd, [1])
    np.testing.assert_allclose(found - 3 * np.sqrt(3), [[3, 3, 1]])
    assert LossNoise().clip is None and LossNoise().added("x", turn, odd, [1]) is odd
    assert LossNoise(1.0, 3.0).clip == 3.0


def test_no_sample_and_no_client_moves_a_row_by_more_than_is_said() -> None:
    """Random, and worst-case, neighbours: one sample more, less or another; all of a client's."""
    draw, worst = np.random.default_rng(0), {False: 0.0, True: 0.0}
    bound, n, k = 3.0, 12, 4
    for trial in range(300):
        losses = draw.choice([0.0, bound], (n, k)) if trial % 3 else draw.random((n, k)) * bound
        other = draw.choice([0.0, bound], k) if trial % 2 else np.zeros(k)  # another sample, or none: the divisor stays n
        one = np.linalg.norm((losses[0] - other) / n)
        whole = np.linalg.norm((losses.mean(0) if trial else np.full(k, bound)) - other)  # another client's row, or none
        worst = {False: max(worst[False], float(one)), True: max(worst[True], float(whole))}
    for clients, found in worst.items():
        stated = LossNoise(1.0, bound, clients).sensitivity(k, n)
        assert 0.99 * stated <= found <= stated * (1 + 1e-12)
