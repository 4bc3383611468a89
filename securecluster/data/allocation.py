"""Dealing out a stock of samples so that each client gets given shares of the labels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.data.datasets import Source
from securecluster.data.pools import Labels
from securecluster.errors import UsageError

Shares = NDArray[np.float64]


@dataclass(frozen=True)
class SampleSupply:
    """Rows (r,) of a pool with their labels y (r,), or numbers of their groups; `part` is "train"
    or "test".
    """

    part: str
    rows: Labels
    y: Labels

    def counts(self, classes: int) -> Labels:
        """Samples of each label (classes,)."""
        return np.bincount(self.y, minlength=classes)


@dataclass(frozen=True)
class Wanted:
    """What clients should get: shares (m, K) of the labels, each row adding to 1, and relative
    numbers of samples (m,), the largest 1.

    With `overlap` two clients may get the same sample; one client never gets a sample twice.
    """

    shares: Shares
    sizes: Shares
    overlap: bool = False

    def counts(self, each: int, randomness: Randomness) -> Labels:
        """Samples (m, K) per client and label: sizes · each in all, each number its share rounded
        up or down at random, without bias.
        """
        total = np.maximum(1, np.round(self.sizes * each)).astype(np.int64)
        start = randomness.generator("scenario", "rounding").random(len(total))
        out = np.zeros(self.shares.shape, np.int64)
        for client, shares in enumerate(self.shares):
            held = np.flatnonzero(shares)
            ends = np.cumsum(shares[held]) * total[client]
            ends[-1] = total[client]  # against rounding errors of the sum
            out[client, held] = np.diff(np.floor(ends + start[client]), prepend=0)
        return out

    def fits(self, stock: Labels, each: int, randomness: Randomness) -> bool:
        """Whether counts of `each` samples can be taken from a stock (K,)."""
        counts = self.counts(each, randomness)
        return bool(((counts.max(axis=0) if self.overlap else counts.sum(axis=0)) <= stock).all())

    def most(self, stock: Labels, randomness: Randomness) -> int:
        """The largest number of samples per client that a stock (K,) allows."""
        wanted = self.shares * self.sizes[:, None]
        wanted = wanted.max(axis=0) if self.overlap else wanted.sum(axis=0)
        asked = wanted > 0
        each = int((stock[asked] / wanted[asked]).min())
        # the bound knows nothing of rounding to whole samples
        while each > 0 and not self.fits(stock, each, randomness):
            each -= 1
        return each


def halves(source: Source, randomness: Randomness) -> tuple[SampleSupply, SampleSupply]:
    """What may be trained on and what is held out: the source's two pools, or four fifths and a
    fifth of its only one at random.
    """
    y = source.train.y
    if source.test is not None:
        return SampleSupply("train", np.arange(len(y)), y), SampleSupply(
            "test", np.arange(len(source.test.y)), source.test.y
        )
    order = randomness.generator("scenario", "held out").permutation(len(y))
    keep, out = np.split(order, [len(y) - len(y) // 5])
    return SampleSupply("train", keep, y[keep]), SampleSupply("test", out, y[out])


def amount(
    source: Source, wanted: Wanted, stock: SampleSupply, samples: int | None, randomness: Randomness
) -> int:
    """Training samples per client.

    Raises:
        UsageError: more samples than there are, or none.
    """
    if wanted.overlap and samples is None:
        raise UsageError(
            "clients that may share samples need a number of samples: say how many (samples, "
            "--samples)"
        )
    most = wanted.most(stock.counts(wanted.shares.shape[1]), randomness)
    if samples is not None and 1 <= samples <= most:
        return samples
    if samples is None and most:
        return most
    clients = len(wanted.sizes)
    raise UsageError(
        f"{source.name} has {len(stock.y)} samples to train on: in this scenario {clients} clients "
        f"can train on at most {most} each"
        + (": use fewer clients" if samples is None else f", not {samples}")
        + (
            ""
            if wanted.overlap or samples is None or samples < 1
            else "; with overlap=True (--overlap) they may share samples"
        )
    )


def held_out(
    source: Source,
    wanted: Wanted,
    stock: SampleSupply,
    train: int,
    samples: int | None,
    randomness: Randomness,
) -> int:
    """Held-out samples per client: a quarter of the training samples where their number was asked
    for, at most what there is.
    """
    most = wanted.most(stock.counts(wanted.shares.shape[1]), randomness)
    if not most:
        raise UsageError(
            f"{source.name} has {len(stock.y)} samples to test on, too few for {len(wanted.sizes)} "
            "clients in this scenario: use fewer"
        )
    return most if samples is None else min(most, max(1, round(train / 4)))


def hand_out(
    stock: SampleSupply, wanted: Wanted, each: int, randomness: Randomness
) -> list[Labels]:
    """Rows for each client, in random order."""
    counts = wanted.counts(each, randomness)
    hands = (_shared if wanted.overlap else _apart)(stock, counts, randomness)
    return [
        randomness.generator("scenario", "order", stock.part, k).permutation(hand)
        for k, hand in enumerate(hands)
    ]


def _apart(stock: SampleSupply, counts: Labels, randomness: Randomness) -> list[Labels]:
    """No sample twice."""
    hands: list[list[Labels]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        own = randomness.generator("scenario", "deal", stock.part, label).permutation(
            stock.rows[stock.y == label]
        )
        for hand, piece in zip(hands, np.split(own, np.cumsum(counts[:, label]))[:-1], strict=True):
            hand.append(piece)
    return [np.concatenate(hand) for hand in hands]


def _shared(stock: SampleSupply, counts: Labels, randomness: Randomness) -> list[Labels]:
    """No sample twice within a client."""
    own = [stock.rows[stock.y == label] for label in range(counts.shape[1])]
    hands = []
    for client, wanted in enumerate(counts):
        draw = randomness.generator("scenario", "deal", stock.part, "shared", client)
        hands.append(
            np.concatenate(
                [draw.permutation(own[label])[: wanted[label]] for label in np.flatnonzero(wanted)]
            )
        )
    return hands
