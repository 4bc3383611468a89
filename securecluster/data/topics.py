"""Clients that hold samples of one group each, such as articles of one topic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.data.allocation import SampleSupply, Wanted, amount, halves, hand_out, held_out
from securecluster.data.datasets import Source
from securecluster.data.partitioners import OwnedSamples
from securecluster.data.pools import Labels
from securecluster.data.scenario_base import Partition, Partitioner, spread
from securecluster.errors import UsageError


@dataclass(frozen=True)
class Topics(Partitioner):
    """Each client holds samples of one group, and each group is a true cluster.

    Sattler et al. 2019, Fig. 9, have AG News, 20 clients and four topics. The groups are the set's
    largest ones, and clients are spread over them as evenly as can be.
    Clients hold equally many samples, no two the same unless with `overlap`, and test on samples of
    the same group. Of a set that has clients of its own (mobility, whose groups are a reference)
    equally many clients of each group are drawn, who hold their own samples as in `natural`.
    """

    name: ClassVar[str] = "topics"
    classified: ClassVar[bool] = False
    clusters: int = 4
    overlap: bool = False

    def check(self, source: Source, clients: int) -> None:
        """Raise UsageError beyond this scenario's own limits."""
        super().check(source, clients)
        groups = source.train.groups
        if groups is None:
            raise UsageError(
                "scenario 'topics' needs a data set whose samples lie in groups, as those of "
                f"ag_news and mobility, not {source.name}"
            )
        known = len(np.unique(groups))
        if self.clusters > known:
            raise UsageError(
                f"scenario 'topics' makes at most {known} clusters of {source.name}, a group each, "
                f"not {self.clusters}"
            )
        if self.overlap and source.train.owners is not None:
            raise UsageError(
                f"clients of {source.name} hold their own samples and share none: leave the "
                "overlap out, or use iid"
            )

    def deal(
        self, source: Source, clients: int, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal samples of each client's group."""
        truth = spread(np.zeros(clients, np.int64), self.clusters, randomness)
        if source.train.owners is not None:
            return self._owned(source, truth, samples, randomness)
        wanted = Wanted(np.eye(self.clusters)[truth], np.ones(clients), self.overlap)
        train, test = self._stocks(source, randomness)
        each = amount(source, wanted, train, samples, randomness)
        held = held_out(source, wanted, test, each, samples, randomness)
        return Partition(
            hand_out(train, wanted, each, randomness),
            hand_out(test, wanted, held, randomness),
            truth,
        )

    def _stocks(self, source: Source, randomness: Randomness) -> tuple[SampleSupply, SampleSupply]:
        """Return the samples of the chosen groups that may be trained on, and those held out.

        The groups' numbers stand in the place of labels.
        """
        assert source.train.groups is not None
        names, counts = np.unique(source.train.groups, return_counts=True)
        chosen = names[_largest(counts, self.clusters)].tolist()
        train, test = halves(source, randomness)
        tested = source.train.groups if source.test is None else source.test.groups
        if tested is None:
            raise UsageError(
                f"the test samples of {source.name} lie in no groups: give its test pool groups, "
                "as its train pool has"
            )
        return _of(train, source.train.groups, chosen), _of(test, tested, chosen)

    def _owned(
        self, source: Source, truth: Labels, samples: int | None, randomness: Randomness
    ) -> Partition:
        """Deal the own samples of owners of each group, who are drawn at random."""
        owned = OwnedSamples.of(source)
        assert owned.groups is not None
        chosen = np.empty(len(truth), np.int64)
        largest = _largest(np.bincount(owned.groups), self.clusters)
        for cluster, group in enumerate(largest.tolist()):
            clients = np.flatnonzero(truth == cluster)
            owners = np.flatnonzero(owned.groups == group)
            if len(clients) > len(owners):
                raise UsageError(
                    f"a group of {source.name} has {len(owners)} clients, not {len(clients)}: use "
                    "fewer clients, or fewer clusters"
                )
            draw = randomness.generator("scenario", "topics", cluster)
            chosen[clients] = draw.permutation(owners)[: len(clients)]
        return replace(owned.deal(chosen, samples, randomness), clusters=truth)


def _largest(counts: Labels, clusters: int) -> Labels:
    """Return the numbers of the largest groups, ascending; of equal ones the first."""
    return np.sort(np.argsort(-counts, kind="stable")[:clusters])


def _of(stock: SampleSupply, groups: NDArray[Any], chosen: list[Any]) -> SampleSupply:
    """Return the stock's rows of the chosen groups, with these groups' numbers."""
    names = groups[stock.rows]
    number = np.full(len(names), -1)
    for k, name in enumerate(chosen):
        number[names == name] = k
    keep = number >= 0
    return SampleSupply(stock.part, stock.rows[keep], number[keep])
