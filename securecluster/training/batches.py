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


@dataclass(frozen=True)
class Minibatches:
    """One mini-batch of each of k clients, n examples wide.

    Attributes:
        x: (k, n, …), padded with samples of the same client.
        y: targets, (k, n, …).
        weight: (k, n) of each sample's loss; 0 for padding.
        keys: (k,) of dropout, or (k, n) of each example's own; None without dropout.
    """

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    keys: torch.Tensor | None = None

    def of_client(self, k: int) -> Minibatches:
        """Return the k-th client's mini-batch alone."""
        one = slice(k, k + 1)
        keys = None if self.keys is None else self.keys[one]
        return Minibatches(self.x[one], self.y[one], self.weight[one], keys)


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
    steps = len(batches[0])
    width = max((max(map(len, own)) for own in batches if own), default=0)
    index = np.zeros((steps, len(batches), width), dtype=np.int64)
    weight = np.zeros(index.shape)
    for k, own in enumerate(batches):
        divisor = None if divisors is None else divisors[k]
        _fill(index[: len(own), k], weight[: len(own), k], own, int(first[k]), divisor)
    active = [sum(len(own) > step for own in batches) for step in range(steps)]
    widths = [width] * steps
    if divisors is not None:  # batches of random sizes
        widths = [_longest(batches[:count], step) for step, count in enumerate(active)]
    return Chunk(
        torch.as_tensor(index).to(device),
        torch.as_tensor(weight).to(device, dtype),
        active,
        widths,
        torch.as_tensor(first, device=device)[:, None],
    )


def _fill(
    index: NDArray[np.int64],
    weight: NDArray[np.float64],
    batches: Sequence[NDArray[np.int64]],
    first: int,
    divisor: int | None,
) -> None:
    """Write one client's batches into its rows (S, B) of the table, in place.

    Args:
        first: where the client's data begin.
        divisor: of its sums of losses; None divides each batch's by its size.
    """
    sizes = np.array([len(batch) for batch in batches])
    filled = np.arange(index.shape[1]) < sizes[:, None]
    # Padding is the client's own sample: 0 times another client's overflow would be NaN.
    padding = [batch[0] if len(batch) else first for batch in batches]
    index[:] = np.array(padding)[:, None]
    index[filled] = np.concatenate(batches)
    divisors = sizes if divisor is None else np.full(len(batches), divisor)
    weight[filled] = np.repeat(1 / np.maximum(divisors, 1), sizes)


def _longest(batches: Sequence[Sequence[NDArray[np.int64]]], step: int) -> int:
    """Return the size of the largest batch of a step."""
    return max(len(own[step]) for own in batches)
