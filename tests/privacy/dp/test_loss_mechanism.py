"""Mean losses with noise: what one sample can change, and what is added."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation
from securecluster.messaging.messages import Rows
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.loss_mechanism import noised
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols import SRFCA, Settings
from securecluster.runtime.call_context import CallContext, Releases, outside_run

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
    client: Any = build_client(SRFCA(mask="none", model="linear"), small, DOUBLE).client
    draw = np.random.default_rng(0)
    noise = torch.from_numpy(draw.normal(size=(3, client.cohort.model.dimension)))
    for bound in (0.5, 2.0, 50.0):
        found = client.cohort.losses(noise, [4, 1], bound)
        expected = [[clipped(client, row, k, bound) for row in noise] for k in (4, 1)]
        np.testing.assert_allclose(found, expected, rtol=1e-12)
    whole = client.cohort.losses(noise, [4, 1])
    assert np.array_equal(client.cohort.losses(noise, [4, 1], 1e9), whole)
    assert (whole > found * 0.99).all()
    broken = torch.stack([noise[0] * float("nan"), noise[0] * 1e200])
    assert (client.cohort.losses(broken, [4, 1], 2.0)[:, 0] == 2).all()
    assert (client.cohort.losses(broken, [4, 1], 2.0) <= 2).all()
    own = [clipped(client, noise[k], k, 2.0) for k in range(3)]
    assert client.cohort.loss(Rows(noise), [0, 1, 2], 2.0) == pytest.approx(own)


class Ones(NoiseStreams):
    """Draws that are all 1, and remember what they were asked for."""

    def __init__(self) -> None:
        super().__init__(lambda client: b"", "run")
        self.asked: list[tuple[int, str, int, list[float]]] = []

    def noised(
        self, client: int, purpose: str, step: int, row: torch.Tensor, z: float, reach: float
    ) -> torch.Tensor:
        self.asked.append((client, purpose, step, row.tolist()))
        return row + z * reach


def guard(unit: str, noise: float, bound: float) -> ClientNoise:
    return ClientNoise(unit, 1.0, noise, bound, Ones())


def test_a_context_releases_the_same_rows_and_names_its_draws_by_their_number() -> None:
    means = np.array([[1.0, 2, 3, 4], [4.0, 3, 2, 1]])
    for unit, expected in (("example", [4 * 2 / 10, 4 * 2 / 40]), ("client", [8.0, 8.0])):
        own = guard(unit, 0.5, 8.0)
        context = replace(outside_run(own, [7, 9], step=5), releases=Releases("fits"))
        released = context.release_losses(means, [10, 40])
        assert released.dtype == torch.float64
        shifts = np.repeat(np.array(expected)[:, None], 4, 1)
        np.testing.assert_allclose(released.numpy() - means, shifts, rtol=1e-12)
        second = context.select([1]).release_losses(means[1:], [40], widths=[2]).numpy()
        # of two numbers of four, the sensitivity is smaller by the root of two
        shift = expected[1] / np.sqrt(2)
        np.testing.assert_allclose(second, [[4 + shift, 3 + shift, 0, 0]], rtol=1e-12)
        assert own.draws.asked == [  # type: ignore[attr-defined]
            (7, "fits 1", 5, [1, 2, 3, 4]),
            (9, "fits 1", 5, [4, 3, 2, 1]),
            (9, "fits 2", 5, [4, 3]),
        ]


def test_numbers_that_are_not_a_clients_get_no_noise_and_cost_none() -> None:
    found = noised(
        guard("client", 1.0, 2.0), ["judge"] * 2, (0, 1), 1, np.zeros((2, 3)), [5, 5], widths=[3, 1]
    )
    np.testing.assert_allclose(found, [[2 * np.sqrt(3)] * 3, [2, 0, 0]])


def test_what_is_no_number_counts_as_the_bound_and_without_noise_nothing_changes() -> None:
    odd = np.array([[np.nan, np.inf, 1.0]])
    found = noised(guard("example", 1.0, 3.0), ["x"], (0,), 1, odd, [1])
    np.testing.assert_allclose(found - 3 * np.sqrt(3), [[3, 3, 1]])
    context = outside_run(guard("example", 1.0, 3.0))
    np.testing.assert_array_equal(context.release_losses(odd, [1]).numpy(), found)
    assert context.loss_bound == 3.0
    silent = guard("client", 0.0, 3.0)
    for quiet in (outside_run(silent), CallContext((0,), (0,), 1, 1)):
        np.testing.assert_array_equal(quiet.release_losses(odd, [1]).numpy(), odd)
        assert quiet.loss_bound is None
    assert not silent.draws.asked  # type: ignore[attr-defined]
