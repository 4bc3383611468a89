"""Mini-batches of several clients as one table of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.devices import to_device
from securecluster.core.lazy_torch import torch
from securecluster.training.config import BALANCED

IntArray = NDArray[np.int64]


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
        importance: factors of the samples' losses that DP-SGD applies before its clip, (S, b, B);
            None where `weight` has them.
    """

    index: torch.Tensor
    weight: torch.Tensor
    active: list[int]
    width: list[int]
    first: torch.Tensor
    keys: torch.Tensor | None = None
    importance: torch.Tensor | None = None


@dataclass(frozen=True)
class Minibatches:
    """Mini-batch of each of k clients, n examples wide.

    Attributes:
        x: samples, (k, n, …), padded with samples of the same client.
        y: targets, (k, n, …).
        weight: weight of each sample's loss, (k, n); 0 for padding.
        keys: dropout keys of each client, (k,), or of each example, (k, n); None without dropout.
        importance: factor of each sample's loss before the clip of DP-SGD, (k, n), or None.
    """

    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    keys: torch.Tensor | None = None
    importance: torch.Tensor | None = None

    def of_client(self, k: int) -> Minibatches:
        """Return the mini-batch of one client.

        Args:
            k: position of the client.
        """
        one = slice(k, k + 1)
        keys = None if self.keys is None else self.keys[one]
        importance = None if self.importance is None else self.importance[one]
        return Minibatches(self.x[one], self.y[one], self.weight[one], keys, importance)


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


def of_classes(labels: NDArray[Any], class_weight: Sequence[float] | str) -> NDArray[np.float64]:
    """Return the weight of each of a client's samples by its class, (n,).

    Args:
        labels: of the samples, (n,).
        class_weight: of each class; or "balanced" for n/(k n_c), as scikit-learn's
            `compute_class_weight` has it, with k the classes that the client holds.
    """
    if class_weight == BALANCED:
        _, group, counts = np.unique(labels, return_inverse=True, return_counts=True)
        balanced: NDArray[np.float64] = (len(labels) / (len(counts) * counts))[group]
        return balanced
    weights: NDArray[np.float64] = np.asarray(class_weight, dtype=np.float64)[labels]
    return weights


@dataclass(frozen=True)
class Drawn:
    """Mini-batches of b clients, as they were drawn.

    Attributes:
        rows: rows of the samples, client by client and batch by batch, (Σ sizes,).
        sizes: number of samples in each batch, (b, S); 0 after a client's last one.
        steps: number of batches of each client, of which some may be empty, (b,).
    """

    rows: IntArray
    sizes: IntArray
    steps: IntArray

    @classmethod
    def of(cls, batches: Sequence[Sequence[IntArray]]) -> Drawn:
        """Return batches side by side.

        Args:
            batches: rows of each client's batches in order.
        """
        steps = np.array([len(of_client) for of_client in batches], dtype=np.int64)
        sizes = np.zeros((len(batches), steps.max(initial=0)), dtype=np.int64)
        rows: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        for k, of_client in enumerate(batches):
            sizes[k, : len(of_client)] = [len(batch) for batch in of_client]
            rows += of_client
        return cls(np.concatenate(rows), sizes, steps)


def sizes_of_epochs(samples: IntArray, batch_size: int, steps: IntArray) -> IntArray:
    """Return the sizes of the mini-batches of whole epochs, (b, S).

    The last mini-batch of an epoch has what is left of the samples.

    Args:
        samples: number of each client's samples, (b,).
        batch_size: B.
        steps: number of each client's mini-batches, (b,); S is the largest.
    """
    of_epoch = np.maximum(1, -(-samples // batch_size))[:, None]  # mini-batches
    remainder = samples[:, None] - (of_epoch - 1) * batch_size
    step = np.arange(steps.max(initial=0))
    sizes = np.where(step % of_epoch == of_epoch - 1, remainder, batch_size)
    return np.where(step < steps[:, None], sizes, 0)


def packed(
    drawn: Drawn,
    first: IntArray,
    divisors: IntArray | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Chunk:
    """Return the mini-batches of several clients side by side.

    Args:
        drawn: the mini-batches, of clients with most of them first.
        first: row of each client's first sample, (b,).
        divisors: what each client's sums of losses are divided by, (b,); None for the sizes of its
            batches.
        device: where the tables are used.
        dtype: type of the weights.
    """
    sizes = drawn.sizes  # (b, S)
    clients, steps = sizes.shape
    width = int(sizes.max(initial=0))  # B
    filled = np.arange(width) < sizes[:, :, None]  # (b, S, B), in the order of the rows
    # Padding is a sample of the client itself: 0 times another client's overflow would be NaN.
    padding = np.repeat(first[:, None], steps, axis=1)  # (b, S)
    ends = np.cumsum(sizes).reshape(clients, steps)
    begun = sizes > 0  # with random batches, some are empty
    padding[begun] = drawn.rows[(ends - sizes)[begun]]
    index = np.empty((steps, clients, width), dtype=np.int64)
    by_client = index.transpose(1, 0, 2)  # a view
    by_client[:] = padding[:, :, None]
    by_client[filled] = drawn.rows
    divided = sizes if divisors is None else divisors[:, None]
    weights = 1 / np.maximum(divided, 1)  # an empty batch has no sample to weight
    weight = np.where(filled, weights[:, :, None], 0.0).transpose(1, 0, 2)
    active = (drawn.steps[:, None] > np.arange(steps)).sum(0)
    widths = np.full(steps, width)
    if divisors is not None:
        # batches of random sizes (DP-SGD), of which most are narrower than the widest
        widths = sizes.max(0)
    first_rows = to_device(first, device)
    return Chunk(
        index=to_device(index, device),
        weight=to_device(np.ascontiguousarray(weight), device, dtype),
        active=active.tolist(),
        width=widths.tolist(),
        first=first_rows[:, None],
    )
