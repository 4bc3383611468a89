"""Mini-batches of several clients as one table of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.devices import to_device
from securecluster.core.lazy_torch import torch

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class Chunk:
    """Mini-batches of b clients, sorted by number of steps, most first.

    The clients that still train are then always the first ones, so that clients of unequal size
    need no padding steps. S is the number of steps of the first client, B the largest size of a
    mini-batch.

    Attributes:
        index: rows of the samples, (S, b, B).
        weight: weight of each sample's loss, (S, b, B): 1 / (size of its batch), or 1 / (the
            client's divisor); 0 for padding.
        active: number of clients in each step.
        width: number of columns in use in each step.
        first: row of each client's first sample, (b, 1).
        keys: dropout keys, (S, b), or None.
    """

    index: torch.Tensor
    weight: torch.Tensor
    active: list[int]
    width: list[int]
    first: torch.Tensor
    keys: torch.Tensor | None = None


@dataclass(frozen=True)
class Minibatches:
    """Mini-batch of each of k clients, n examples wide.

    Attributes:
        x: samples, (k, n, …), padded with samples of the same client.
        y: targets, (k, n, …).
        weight: weight of each sample's loss, (k, n); 0 for padding.
        keys: dropout keys of each client, (k,), or of each example, (k, n); None without dropout.
    """

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    keys: torch.Tensor | None = None

    def of_client(self, k: int) -> Minibatches:
        """Return the mini-batch of one client.

        Args:
            k: position of the client.
        """
        one = slice(k, k + 1)
        keys = self.keys
        if keys is not None:
            keys = keys[one]
        return Minibatches(x=self.x[one], y=self.y[one], weight=self.weight[one], keys=keys)


def resampled(labels: NDArray[Any], power: float, generator: np.random.Generator) -> IntArray:
    """Return an epoch's samples in order, in which a label's share follows a power of its count.

    A label with n_c of the samples has a share of n_c^q / Σ n^q: with q = 1/2 this is square-root
    sampling, with q = 0 class-balanced sampling (Kang et al. 2020, "Decoupling representation and
    classifier for long-tailed recognition", ICLR, eq. 1). Labels whose share grows have samples
    that come more than once.

    Args:
        labels: of a client's n samples, (n,).
        power: q in [0, 1].
        generator: of the draws.

    Returns:
        (n,) positions. Shares are rounded up, and what is too much is left out at random.
    """
    size = len(labels)
    _, group, counts = np.unique(labels, return_inverse=True, return_counts=True)
    weights = counts.astype(np.float64) ** power
    quotas = np.ceil(size * weights / max(1.0, weights.sum())).astype(np.int64)
    drawn: list[IntArray] = [np.zeros(0, dtype=np.int64)]
    for label, quota in enumerate(quotas):
        samples = np.flatnonzero(group == label)
        repetitions = -(-quota // len(samples))
        shuffled = [generator.permutation(samples) for _ in range(repetitions)]
        drawn.append(np.concatenate(shuffled)[:quota])
    return generator.permutation(np.concatenate(drawn))[:size]


def packed(
    batches: Sequence[list[IntArray]],
    first: IntArray,
    divisors: Sequence[int] | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Chunk:
    """Return the mini-batches of several clients side by side.

    Args:
        batches: rows of each client's batches in order, which may be empty; the first client has
            the most batches.
        first: row of each client's first sample, (b,).
        divisors: what each client's sums of losses are divided by; None for the sizes of its
            batches.
        device: where the tables are used.
        dtype: type of the weights.
    """
    steps = len(batches[0])  # S
    largest_sizes = [max(map(len, client_batches), default=0) for client_batches in batches]
    width = max(largest_sizes, default=0)  # B
    shape = (steps, len(batches), width)
    # After a client's last step, too, its rows are of its own samples.
    index = np.empty(shape, dtype=np.int64)
    index[:] = np.asarray(first)[:, None]
    weight = np.zeros(shape)
    for k, client_batches in enumerate(batches):
        divisor = None
        if divisors is not None:
            divisor = divisors[k]
        client_steps = len(client_batches)
        client_index = index[:client_steps, k]  # views, which `_fill` writes to
        client_weight = weight[:client_steps, k]
        _fill(client_index, client_weight, client_batches, int(first[k]), divisor)
    active = [_number_active(batches, step) for step in range(steps)]
    widths = [width] * steps
    if divisors is not None:
        # batches of random sizes (DP-SGD), of which most are narrower than the widest
        widths = []
        for step, count in enumerate(active):
            widths.append(_largest_size(batches[:count], step))
    first_rows = to_device(first, device)
    return Chunk(
        index=to_device(index, device),
        weight=to_device(weight, device, dtype),
        active=active,
        width=widths,
        first=first_rows[:, None],
    )


def _fill(
    index: IntArray,
    weight: FloatArray,
    batches: Sequence[IntArray],
    first: int,
    divisor: int | None,
) -> None:
    """Write one client's batches into its part of the table, in place.

    Args:
        index: rows of samples to write, (S, B).
        weight: weights to write, (S, B), zero so far.
        batches: rows of each batch.
        first: row of the client's first sample.
        divisor: what its sums of losses are divided by; None for the size of each batch.
    """
    sizes = np.array([len(batch) for batch in batches])  # (S,)
    columns = np.arange(index.shape[1])
    filled = columns < sizes[:, None]  # (S, B), in the order of the concatenated batches
    # Padding is the client's own sample: 0 times another client's overflow would be NaN.
    padding = np.full(len(batches), first)
    for step, batch in enumerate(batches):
        if len(batch):  # with random batches, some are empty
            padding[step] = batch[0]
    index[:] = padding[:, None]
    index[filled] = np.concatenate(batches)
    divisors = sizes
    if divisor is not None:
        divisors = np.full(len(batches), divisor)
    weights = 1 / np.maximum(divisors, 1)  # an empty batch has no sample to weight
    weight[filled] = np.repeat(weights, sizes)


def _number_active(batches: Sequence[Sequence[IntArray]], step: int) -> int:
    """Return the number of clients that have a batch for a step."""
    return sum(len(client_batches) > step for client_batches in batches)


def _largest_size(batches: Sequence[Sequence[IntArray]], step: int) -> int:
    """Return the size of the largest batch of a step."""
    return max(len(client_batches[step]) for client_batches in batches)
