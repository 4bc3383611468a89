"""Mean losses that leave a client with Gaussian noise (not in the papers).

A row of k mean losses of one client's n samples, each sample's loss clipped to [0, B], moves by at
most

- B·√k/n where the unit is the example: the divisor is n, which is taken as public, and a blanked
  sample, which costs 0, or another sample in its place changes each of the k sums by the difference
  of two numbers in [0, B];
- B·√k where the unit is the client: each mean lies in [0, B], and a blanked client has zeros, or a
  replaced one another client's means, in their place.

So its sensitivity is the same whether units of privacy are blanked or replaced. A sample that is
really added or removed also moves n, which this noise does not cover.

The smallest of k means changes as one mean does, so a comparison of minima needs the noise of one.
Losses get their noise once: a client stores them as it sent them, so that sums of them, and choices
among models that it has evaluated, cost nothing more (`derived`). New noise is left to a separate
method (`choose`, and not `choose_again`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch

if TYPE_CHECKING:
    from securecluster.privacy.dp.client_noise import ClientNoise


Array = NDArray[np.float64]

# Stands for a loss that is not finite, as that of weights that overflow: no cluster chooses such a
# model.
WORST_LOSS = 1e30
# Bound of the magnitude of a loss that leaves a client, noise included: its square is finite.
LARGEST_SENT_LOSS = 10 * WORST_LOSS
# Sensitivity to replacing a unit of privacy over that to blanking it.
REPLACE = 1.0


def sensitivity(noise: ClientNoise, k: int, n: int) -> float:
    """Return the L2 sensitivity of a row of mean losses, in units of the loss.

    Args:
        noise: of the run.
        k: mean losses in the row.
        n: samples behind each mean.
    """
    largest = noise.loss_clip * math.sqrt(k)
    if noise.unit == "example":
        return largest / max(n, 1)
    return largest


def noised(
    noise: ClientNoise,
    purposes: Sequence[str],
    ids: Sequence[int],
    step: int,
    means: Array,
    sizes: Sequence[int],
    widths: Sequence[int] | None = None,
) -> Array:
    """Return rows (b, k) of mean losses with noise `noise.of_losses` times their sensitivity.

    Args:
        noise: of the run.
        purposes: name of each client's draw. With the client, the call and the row it determines
            the noise, so a client that is asked the same again adds the same.
        ids: clients (b,).
        step: number of the call.
        means: means (b, k) of losses clipped to [0, B]. One that is not finite counts as B (a
            client without samples).
        sizes: number of samples n of each client (b,).
        widths: for each client (b,), the means that are its own, the first ones of its row, after
            which zeros follow; None for all.
    """
    finite = np.nan_to_num(means, nan=noise.loss_clip, posinf=noise.loss_clip)
    noisy = finite.clip(0, noise.loss_clip)
    for n, (client, purpose) in enumerate(zip(ids, purposes, strict=True)):
        width = None if widths is None else widths[n]
        row = noisy[n, :width]
        reach = sensitivity(noise, len(row), sizes[n])
        exact = torch.as_tensor(row.copy())
        released = noise.draws.noised(client, purpose, step, exact, noise.of_losses, reach)
        row[:] = released.numpy()
        noisy[n, len(row) :] = 0  # no mean of this client
    return noisy
