"""Allocation of samples: each client gets given shares of the labels."""

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
    """Rows (r,) of a pool with their labels y (r,), or the numbers of their groups.

    Args:
        part: "train" or "test".
        rows: numbers of the rows.
        y: their labels or groups.
    """

    part: str
    rows: Labels
    y: Labels

    def counts(self, classes: int) -> Labels:
        """Return the number of samples of each label (classes,)."""
        return np.bincount(self.y, minlength=classes)


@dataclass(frozen=True)
class Wanted:
    """Shares of the labels, and numbers of samples, that clients should get.

    Args:
        shares: of the labels (m, K), each row adding to 1.
        sizes: relative numbers of samples (m,), the largest 1.
        overlap: two clients may get the same sample; one client never gets a sample twice.
    """

    shares: Shares
    sizes: Shares
    overlap: bool = False

    def counts(self, each: int, randomness: Randomness) -> Labels:
        """Return the number of samples (m, K) per client and label.

        They are sizes · each in all, each number its share rounded up or down at random, without
        bias.
        """
        totals = np.maximum(1, np.round(self.sizes * each)).astype(np.int64)
        starts = randomness.generator("scenario", "rounding").random(len(totals))
        counts = np.zeros(self.shares.shape, np.int64)
        for client, shares in enumerate(self.shares):
            held = np.flatnonzero(shares)
            ends = np.cumsum(shares[held]) * totals[client]
            ends[-1] = totals[client]  # against rounding errors of the sum
            # systematic rounding: one random shift of all cumulative counts, then rounding down
            counts[client, held] = np.diff(np.floor(ends + starts[client]), prepend=0)
        return counts

    def fits(self, stock: Labels, each: int, randomness: Randomness) -> bool:
        """Return whether counts of `each` samples can be taken from a stock (K,)."""
        needed = self._over_clients(self.counts(each, randomness))
        return bool((needed <= stock).all())

    def most(self, stock: Labels, randomness: Randomness) -> int:
        """Return the largest number of samples per client that a stock (K,) allows."""
        needed = self._over_clients(self.shares * self.sizes[:, None])
        asked = needed > 0
        each = int((stock[asked] / needed[asked]).min())
        # the bound knows nothing of rounding to whole samples
        while each > 0 and not self.fits(stock, each, randomness):
            each -= 1
        return each

    def _over_clients(self, counts: NDArray[Any]) -> NDArray[Any]:
        """Return what all clients (m, K) need of a stock (K,), which they share with `overlap`."""
        needed: NDArray[Any] = counts.max(axis=0) if self.overlap else counts.sum(axis=0)
        return needed


def halves(source: Source, randomness: Randomness) -> tuple[SampleSupply, SampleSupply]:
    """Return the samples that may be trained on, and those that are held out.

    They are the source's two pools, or four fifths and a fifth of its only one at random.
    """
    y = source.train.y
    if source.test is not None:
        y_test = source.test.y
        train = SampleSupply("train", np.arange(len(y)), y)
        test = SampleSupply("test", np.arange(len(y_test)), y_test)
        return train, test
    order = randomness.generator("scenario", "held out").permutation(len(y))
    kept, held = np.split(order, [len(y) - len(y) // 5])
    return SampleSupply("train", kept, y[kept]), SampleSupply("test", held, y[held])


def amount(
    source: Source, wanted: Wanted, stock: SampleSupply, samples: int | None, randomness: Randomness
) -> int:
    """Return the number of training samples per client.

    Args:
        source: named in errors.
        wanted: shares and sizes.
        stock: the samples to train on.
        samples: as the user asks for; None is as many as there are.
        randomness: of the scenario.

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
    refusal = (
        f"{source.name} has {len(stock.y)} samples to train on: in this scenario {clients} clients "
        f"can train on at most {most} each"
    )
    if samples is None:
        raise UsageError(f"{refusal}: use fewer clients")
    if samples < 1 or wanted.overlap:
        raise UsageError(f"{refusal}, not {samples}")
    raise UsageError(
        f"{refusal}, not {samples}; with overlap=True (--overlap) they may share samples"
    )


def held_out(
    source: Source,
    wanted: Wanted,
    stock: SampleSupply,
    train: int,
    samples: int | None,
    randomness: Randomness,
) -> int:
    """Return the number of held-out samples per client.

    It is a quarter of the training samples where the user asked for a number of these, and at most
    what there is.
    """
    most = wanted.most(stock.counts(wanted.shares.shape[1]), randomness)
    if not most:
        raise UsageError(
            f"{source.name} has {len(stock.y)} samples to test on, too few for {len(wanted.sizes)} "
            "clients in this scenario: use fewer"
        )
    if samples is None:
        return most
    return min(most, max(1, round(train / 4)))


def hand_out(
    stock: SampleSupply, wanted: Wanted, each: int, randomness: Randomness
) -> list[Labels]:
    """Return rows for each client, in random order."""
    counts = wanted.counts(each, randomness)
    draw = _draw_shared if wanted.overlap else _draw_disjoint
    rows_of = []
    for client, rows in enumerate(draw(stock, counts, randomness)):
        order = randomness.generator("scenario", "order", stock.part, client)
        rows_of.append(order.permutation(rows))
    return rows_of


def _draw_disjoint(stock: SampleSupply, counts: Labels, randomness: Randomness) -> list[Labels]:
    """Return rows by client, where no two clients have the same."""
    pieces_of: list[list[Labels]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        draw = randomness.generator("scenario", "deal", stock.part, label)
        rows = draw.permutation(stock.rows[stock.y == label])
        # the last piece is what nobody gets
        *dealt, _ = np.split(rows, np.cumsum(counts[:, label]))
        for pieces, piece in zip(pieces_of, dealt, strict=True):
            pieces.append(piece)
    return [np.concatenate(pieces) for pieces in pieces_of]


def _draw_shared(stock: SampleSupply, counts: Labels, randomness: Randomness) -> list[Labels]:
    """Return rows by client, where a client has no row twice."""
    rows_with = [stock.rows[stock.y == label] for label in range(counts.shape[1])]
    rows_of = []
    for client, wanted in enumerate(counts):
        draw = randomness.generator("scenario", "deal", stock.part, "shared", client)
        pieces = []
        for label in np.flatnonzero(wanted):
            pieces.append(draw.permutation(rows_with[label])[: wanted[label]])
        rows_of.append(np.concatenate(pieces))
    return rows_of
