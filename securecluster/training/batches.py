"""Mini-batches of a few clients as one table of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch


@dataclass(frozen=True)
class Chunk:
    """Mini-batches of b clients, sorted by number of steps, so that the clients still training are
    always the first ones.
    """

    index: torch.Tensor  # (S, b, B) rows of the cohort's data
    weight: torch.Tensor  # (S, b, B) of a loss, 1 / (size of that batch); 0 for padding
    active: list[int]  # S counts
    width: list[int]  # S numbers of columns in use
    first: torch.Tensor  # (b, 1) where each client's data begin
    keys: torch.Tensor | None = None  # (S, b) of dropout


def packed(
    batches: Sequence[list[NDArray[np.int64]]],
    first: NDArray[np.int64],
    divisors: Sequence[int] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Chunk:
    """Clients' batches, which may be empty, side by side.

    Args:
        batches: of each client, in order; the first client has the most.
        first: where each client's data begin.
        divisors: of each client's sums of losses, where these are not the sizes of its batches.
    """
    width = max((len(b) for own in batches for b in own), default=0)
    index = np.zeros((len(batches[0]), len(batches), width), dtype=np.int64)
    weight = np.zeros(index.shape)
    for k, own in enumerate(batches):
        sizes = np.array([len(batch) for batch in own])
        filled = np.arange(width) < sizes[:, None]
        # padding is the client's own: 0 times another's overflow would be NaN
        index[: len(own), k] = np.array([batch[0] if len(batch) else first[k] for batch in own])[
            :, None
        ]
        index[: len(own), k][filled] = np.concatenate(own)
        divisor = sizes if divisors is None else np.full(len(own), divisors[k])
        weight[: len(own), k][filled] = np.repeat(1 / np.maximum(divisor, 1), sizes)
    active = [sum(len(own) > s for own in batches) for s in range(len(index))]
    widths = [
        width if divisors is None else max(len(own[s]) for own in batches[:k])
        for s, k in enumerate(active)
    ]
    placed = torch.as_tensor(index).to(device), torch.as_tensor(weight).to(device, dtype)
    return Chunk(*placed, active, widths, torch.as_tensor(first, device=device)[:, None])
