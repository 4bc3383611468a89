"""Mean losses that leave a client with Gaussian noise, in units of what one sample, or one client,
can change (ours).

A row of k mean losses of one client's n samples, each sample's loss clipped to [0, B], moves by at
most

- B·√k/n where the unit is the example: the divisor is n, which is taken as public, and a sample
  more, a sample less or another sample changes each of the k sums by the difference of two numbers
  in [0, B];
- B·√k where the unit is the client: each mean lies in [0, B], and a client that does not count has
  zeros in their place, or another's.

So its sensitivity is the same whether units of privacy are added and removed, or replaced.

Beside it, noise on rows that leave in another way than a pipeline's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise

if TYPE_CHECKING:
    from securecluster.privacy.dp.client_noise import ClientNoise


Array = NDArray[np.float64]

# stands for a loss that is not finite, as that of weights that overflow: no cluster is handed such
# a model
WORST = 1e30


def loss_clip(guard: ClientNoise | None) -> float | None:
    """B, where losses leave with noise; None where they leave as they are."""
    return None if guard is None else guard.loss_clip


def sensitivity(guard: ClientNoise, k: int, n: int) -> float:
    """How far a row of k mean losses over n samples can move, L2, in the losses' unit."""
    return guard.loss_clip * math.sqrt(k) / (max(n, 1) if guard.unit == "example" else 1)


def noised(
    guard: ClientNoise | None,
    purpose: str,
    ids: Sequence[int],
    step: int,
    means: Array,
    sizes: Sequence[int],
    widths: Sequence[int] | None = None,
) -> Array:
    """Rows (b, k) of mean losses as they may leave: noise z times their sensitivity; the rows
    themselves where a run has no noise.

    Args:
        purpose: names the draw, with the client, the call and the row: asked the same again, a
            client adds the same.
        ids: (b,) numbers of the clients.
        step: number of the call.
        means: of losses that were clipped to [0, B]; one that is not finite counts as B (a client
            without samples).
        sizes: (b,) n of each client.
        widths: (b,) how many numbers of its row are a client's, the first ones; all of them without
            it.
    """
    if guard is None:
        return means
    found = np.nan_to_num(means, nan=guard.loss_clip, posinf=guard.loss_clip)
    for n, i in enumerate(ids):
        own = found[n, : None if widths is None else widths[n]]
        reach = sensitivity(guard, len(own), sizes[n])
        own[:] = guard.draws.noised(
            i, purpose, step, torch.as_tensor(own.copy()), guard.noise, reach
        ).numpy()
    return found


def noised_rows(
    guard: ClientNoise, purpose: str, ids: Sequence[int], step: int, rows: torch.Tensor
) -> torch.Tensor:
    """Rows (b, d) clipped to S, with noise zS in every number."""
    noise = Noise(guard.clip, guard.noise)
    noise.arm(guard.draws)
    return noise.forward_for(Clip(guard.clip, total=True).forward(rows, step), step, ids, purpose)
