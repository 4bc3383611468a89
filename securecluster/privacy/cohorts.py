"""Fixed cohorts of clients, and which clients the sums of a run can be solved for.

A server that reads the sum of other clients in every round solves a linear system over the rounds:
with enough of them every client's own row follows, although each sum hides it. Where the clients
are divided once into cohorts, and a cohort is in a sum as a whole or not at all, all sums are
combinations of those of cohorts, and no row of a single client follows (batch partitioning: So,
Ali, Güler, Jiao, Avestimehr, "Securing secure aggregation: mitigating multi-round privacy leakage
in federated learning", AAAI 2023, Section 5.2). What the sum of a whole cohort tells, remains.

Where all sums are over all clients (`SumOptions.over_all`), clients derive the cohorts and refuse
other lists. Elsewhere they are the server's rule alone, and sums over clusters that change can be
solved together. A silent client is asked again, since it would keep out its whole cohort. The
channel keeps the lists that enlarge the row space, and reports count who can be solved for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness

# members of a cohort by default. More hide better, and one client that is gone for good keeps as
# many others from every sum.
LARGEST_DEFAULT = 10

Cohort = tuple[int, ...]


@dataclass(frozen=True)
class Cohorts:
    """Public rule by which any list of clients is divided into cohorts, the same at all parties.

    Args:
        minimum: least members of a cohort by default.
        share: share of the clients that a round asks, in (0, 1].
        size: members of a cohort; None is the number of clients that a round
            asks, up to ten, and a third of them where it asks all: a sum needs a majority of those
            that are asked, also where a cohort is gone for good.
        order: all clients of the run, in a random order that is public.
    """

    minimum: int
    share: float
    size: int | None
    order: tuple[int, ...]

    @classmethod
    def drawn(
        cls, clients: int, seed: int, minimum: int, share: float, size: int | None
    ) -> Cohorts:
        """Return the rule of a run, whose order follows from a seed.

        Args:
            clients: m.
            seed: of the run, or of a roster, the same in all of its runs.
            minimum: least members of a cohort by default.
            share: share of the clients that a round asks.
            size: members of a cohort; None for the default.
        """
        order = Randomness(seed).generator("cohorts").permutation(clients)
        return cls(minimum, share, size, tuple(order.tolist()))

    def of(self, clients: Iterable[int]) -> list[Cohort]:
        """Return the cohorts of some clients, which are all clients of the run or of a cluster.

        Their sizes differ by one at most, and none is smaller than asked for where there are as
        many clients.

        Args:
            clients: ids of the clients.
        """
        chosen = set(clients)
        ordered = [client for client in self.order if client in chosen]
        size = self.size
        if size is None:
            requested = round(self.share * len(ordered))
            if requested == len(ordered):
                requested = len(ordered) // 3
            size = max(self.minimum, min(requested, LARGEST_DEFAULT))
        count = max(1, len(ordered) // size)
        cohorts = []
        for cohort in np.array_split(ordered, count):
            members: list[int] = cohort.tolist()
            cohorts.append(tuple(sorted(members)))
        return cohorts


def whole_cohorts(clients: Iterable[int], cohorts: Sequence[Cohort]) -> set[int]:
    """Return the clients whose cohort is among some clients as a whole.

    Args:
        clients: ids of the clients.
        cohorts: disjoint.
    """
    present = set(clients)
    complete: set[int] = set()
    for cohort in cohorts:
        if present.issuperset(cohort):
            complete.update(cohort)
    return complete


# Row spaces are computed modulo this prime: the product of two numbers below it fits 64 bits.
PRIME = 2**31 - 1


class RowSpace:
    """The row space of the 0/1 matrix (sums, m) of which clients are in which sum.

    A client can be solved for where its unit vector is in the row space: then some combination of
    the sums is its own row, as far as rows stay the same from sum to sum. The reduced echelon form
    is kept modulo the prime 2^31 - 1, in integers, so nothing is rounded. It differs from that over
    the rationals only where the prime divides a minor of the matrix, for lists that do not aim at
    it about once in 10^9 rows.

    Args:
        clients: m, the number of columns.
        lists: the clients of each row.
    """

    def __init__(self, clients: int, lists: Iterable[Sequence[int]] = ()) -> None:
        self._rows: NDArray[np.int64] = np.zeros((0, clients), dtype=np.int64)
        self._pivots: list[int] = []
        for members in lists:
            self.add(members)

    @property
    def rank(self) -> int:
        """Return the number of independent rows."""
        return len(self._pivots)

    @property
    def solvable(self) -> list[int]:
        """Return the clients whose unit vector is in the row space, ascending."""
        # In the reduced form a unit vector of the space is a row: pivots are in one row each.
        entries = np.count_nonzero(self._rows[: self.rank], axis=1)
        alone = zip(self._pivots, entries.tolist(), strict=True)
        return sorted(pivot for pivot, count in alone if count == 1)

    def add(self, members: Sequence[int]) -> bool:
        """Add a row, and return whether it is independent of those before.

        Args:
            members: the clients in the sum.
        """
        rank = self.rank
        row = np.zeros(self._rows.shape[1], dtype=np.int64)
        row[list(members)] = 1
        # A pivot's column has zeros in all other rows, so all pivots are eliminated at once.
        pivot_rows = np.flatnonzero(row[self._pivots])
        row = (row - self._rows[pivot_rows].sum(0)) % PRIME
        columns = np.flatnonzero(row)
        if not len(columns):
            return False
        pivot = int(columns[0])
        row = row * pow(int(row[pivot]), -1, PRIME) % PRIME

        factors = self._rows[:rank, pivot]
        touched = np.flatnonzero(factors)
        block = self._rows[np.ix_(touched, columns)]
        block -= factors[touched, None] * row[columns] % PRIME
        self._rows[np.ix_(touched, columns)] = block % PRIME
        if rank == len(self._rows):
            more = np.zeros((max(rank, 16), len(row)), dtype=np.int64)
            self._rows = np.vstack([self._rows, more])
        self._rows[rank] = row
        self._pivots.append(pivot)
        return True
