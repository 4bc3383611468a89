"""Allocation of samples to clients by prescribed shares of the labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.data.datasets import Source
from securecluster.data.pools import Labels
from securecluster.errors import UsageError

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class SampleSupply:
    """Rows of a pool that can be allocated, with their labels or the numbers of their groups.

    Args:
        split: "train" or "test"; the two splits have random draws of their own.
        rows: numbers of the rows (r,).
        y: labels or groups of the rows (r,).
    """

    split: str
    rows: Labels
    y: Labels

    def counts(self, classes: int) -> Labels:
        """Return the number of samples of each label (classes,)."""
        return np.bincount(self.y, minlength=classes)


@dataclass(frozen=True)
class Wanted:
    """Target distribution of each client: shares of the labels, and a relative size.

    Args:
        shares: of the labels (m, K), each row adding to 1.
        sizes: relative numbers of samples (m,), the largest 1.
        overlap: two clients may get the same sample; one client never gets a sample twice.
    """

    shares: Shares
    sizes: Shares
    overlap: bool = False

    def counts(self, samples: int, randomness: Randomness) -> Labels:
        """Return the number of samples (m, K) per client and label.

        A client gets sizes · samples in all. Each count is its exact share, rounded up or down at
        random without bias.

        Args:
            samples: number of samples of the largest client.
            randomness: of the federation.
        """
        sizes = np.round(self.sizes * samples)
        # no client is empty, however small its relative size
        sizes = np.maximum(1, sizes).astype(np.int64)
        draw = randomness.generator("scenario", "rounding")
        shifts = draw.random(len(sizes))
        counts = np.zeros(self.shares.shape, np.int64)
        for client, shares in enumerate(self.shares):
            size = sizes[client]
            labels = np.flatnonzero(shares)
            ends = np.cumsum(shares[labels]) * size
            ends[-1] = size  # against rounding errors of the sum
            # systematic rounding: one random shift of all cumulative counts, then rounding down
            shifted = np.floor(ends + shifts[client])
            counts[client, labels] = np.diff(shifted, prepend=0)
        return counts

    def fits(self, available: Labels, samples: int, randomness: Randomness) -> bool:
        """Return True if the counts for `samples` samples do not exceed the available ones.

        Args:
            available: number of samples of each label (K,).
            samples: number of samples of the largest client.
            randomness: of the federation.
        """
        needed = self._over_clients(self.counts(samples, randomness))
        return bool((needed <= available).all())

    def most(self, available: Labels, randomness: Randomness) -> int:
        """Return the largest number of samples per client for which `fits` holds, or 0.

        Args:
            available: number of samples of each label (K,).
            randomness: of the federation.
        """
        relative_sizes = self.sizes[:, None]  # (m, 1)
        needed = self._over_clients(self.shares * relative_sizes)
        labels = needed > 0
        # the label that is scarcest relative to its demand limits all clients
        ratios = available[labels] / needed[labels]
        samples = int(ratios.min())
        # this bound ignores the rounding to whole samples
        while samples > 0 and not self.fits(available, samples, randomness):
            samples -= 1
        return samples

    def _over_clients(self, counts: NDArray[Any]) -> NDArray[Any]:
        """Return the number of distinct samples of each label (K,) that counts (m, K) take."""
        if self.overlap:
            # clients that share samples need no more than the largest of them
            shared: NDArray[Any] = counts.max(axis=0)
            return shared
        disjoint: NDArray[Any] = counts.sum(axis=0)
        return disjoint


def halves(source: Source, randomness: Randomness) -> tuple[SampleSupply, SampleSupply]:
    """Return the samples available for training, and those available for testing.

    They are the source's two pools. A source with one pool is split at random into four fifths for
    training and one fifth for testing.

    Args:
        source: the data set.
        randomness: of the federation.
    """
    y = source.train.y
    if source.test is not None:
        y_test = source.test.y
        train = SampleSupply("train", np.arange(len(y)), y)
        test = SampleSupply("test", np.arange(len(y_test)), y_test)
        return train, test
    draw = randomness.generator("scenario", "held out")
    order = draw.permutation(len(y))
    train_size = len(y) - len(y) // 5
    train_rows, test_rows = np.split(order, [train_size])
    train = SampleSupply("train", train_rows, y[train_rows])
    test = SampleSupply("test", test_rows, y[test_rows])
    return train, test


def amount(
    source: Source,
    target: Wanted,
    supply: SampleSupply,
    samples: int | None,
    randomness: Randomness,
) -> int:
    """Return the number of training samples per client.

    Args:
        source: the data set, for errors.
        target: distribution of each client.
        supply: samples available for training.
        samples: number that the user asked for; None is the maximum.
        randomness: of the federation.

    Raises:
        UsageError: fewer samples are available, or none.
    """
    if target.overlap and samples is None:
        raise UsageError(
            "clients that may share samples need a number of samples: say how many (samples, "
            "--samples)"
        )
    classes = target.shares.shape[1]
    maximum = target.most(supply.counts(classes), randomness)
    if samples is not None and 1 <= samples <= maximum:
        return samples
    if samples is None and maximum:
        return maximum
    clients = len(target.sizes)
    refusal = (
        f"{source.name} has {len(supply.y)} samples to train on: in this scenario {clients} "
        f"clients can train on at most {maximum} each"
    )
    if samples is None:
        raise UsageError(f"{refusal}: use fewer clients")
    if samples < 1 or target.overlap:
        raise UsageError(f"{refusal}, not {samples}")
    raise UsageError(f"{refusal}, not {samples}; with overlap=True they may share samples")


def held_out(
    source: Source,
    target: Wanted,
    supply: SampleSupply,
    train_samples: int,
    samples: int | None,
    randomness: Randomness,
) -> int:
    """Return the number of test samples per client.

    It is the maximum, or at most a quarter of the training samples if the user asked for a number
    of these.

    Args:
        source: the data set, for errors.
        target: distribution of each client.
        supply: samples available for testing.
        train_samples: number of training samples per client.
        samples: number of training samples that the user asked for, or None.
        randomness: of the federation.

    Raises:
        UsageError: not every client can get a test sample.
    """
    classes = target.shares.shape[1]
    maximum = target.most(supply.counts(classes), randomness)
    if not maximum:
        raise UsageError(
            f"{source.name} has {len(supply.y)} samples to test on, too few for "
            f"{len(target.sizes)} clients in this scenario: use fewer"
        )
    if samples is None:
        return maximum
    quarter = round(train_samples / 4)
    return min(maximum, max(1, quarter))


def hand_out(
    supply: SampleSupply, target: Wanted, samples: int, randomness: Randomness
) -> list[Labels]:
    """Return the rows allocated to each client, in random order.

    Args:
        supply: rows to allocate.
        target: distribution of each client.
        samples: number of samples of the largest client.
        randomness: of the federation.
    """
    counts = target.counts(samples, randomness)
    if target.overlap:
        allocated = _draw_shared(supply, counts, randomness)
    else:
        allocated = _draw_disjoint(supply, counts, randomness)
    rows_of_clients = []
    for client, rows in enumerate(allocated):
        # shuffled, since they were drawn label by label
        draw = randomness.generator("scenario", "order", supply.split, client)
        rows_of_clients.append(draw.permutation(rows))
    return rows_of_clients


def _draw_disjoint(supply: SampleSupply, counts: Labels, randomness: Randomness) -> list[Labels]:
    """Return rows for each client, disjoint between clients.

    Args:
        supply: rows to allocate.
        counts: number of rows per client and label (m, K).
        randomness: of the federation.
    """
    clients, classes = counts.shape
    pieces: list[list[Labels]] = [[] for _ in range(clients)]
    for label in range(classes):
        draw = randomness.generator("scenario", "deal", supply.split, label)
        rows_with_label = supply.rows[supply.y == label]
        rows = draw.permutation(rows_with_label)
        ends = np.cumsum(counts[:, label])
        # np.split appends one more piece, the rows that no client gets
        *allocated, _ = np.split(rows, ends)
        for client, piece in enumerate(allocated):
            pieces[client].append(piece)
    return [np.concatenate(pieces_of_client) for pieces_of_client in pieces]


def _draw_shared(supply: SampleSupply, counts: Labels, randomness: Randomness) -> list[Labels]:
    """Return rows for each client, drawn independently; no client has a row twice.

    Args:
        supply: rows to allocate.
        counts: number of rows per client and label (m, K).
        randomness: of the federation.
    """
    classes = counts.shape[1]
    rows_with_label = []
    for label in range(classes):
        rows_with_label.append(supply.rows[supply.y == label])
    rows_of_clients = []
    for client, counts_of_client in enumerate(counts):
        draw = randomness.generator("scenario", "deal", supply.split, "shared", client)
        pieces = []
        for label in np.flatnonzero(counts_of_client).tolist():
            shuffled = draw.permutation(rows_with_label[label])
            pieces.append(shuffled[: counts_of_client[label]])
        rows_of_clients.append(np.concatenate(pieces))
    return rows_of_clients
