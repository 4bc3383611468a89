"""Graphs of secure sums: which clients share pads, and hold shares of each other's seeds.

The members stand on a ring in random order, and each is a neighbour of the k/2 next ones on either
side: a Harary graph on a random permutation (Bell et al. 2020, Section 3). k is the smallest number
for which the sum fails or leaks with probability below 2^-SECURITY, where given fractions of the
members are lost and collude (`Plan`), and FEWEST or more, below which little would be saved. What a
client computes and sends grows with k. Where no such graph does, all pairs share pads (Bonawitz et
al. 2017).

The bound is over the random order: the seed must not be known to those who choose who colludes or
drops out before they choose. It follows from the root of the tree of all keys, and each client
insists that its own key is in it. An active server may choose dropouts afterwards, and can try as
many graphs as it can draw, by the keys of clients that collude with it; then only the threshold
protects, which every client checks in its own neighbourhood.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError
from securecluster.privacy.masking import keystream
from securecluster.privacy.masking.pads import members_hash, transcript
from securecluster.protections.protection import SumPlan

# neighbours in the sparsest graph: small sums then bear more lost members than planned (not in the
# papers)
FEWEST = 20
# -log2 of the probability that a random graph fails
SECURITY = 40


@dataclass(frozen=True)
class Graph:
    """Neighbours of the members of a sum.

    Args:
        ring: members in the order of the ring.
        degree: number k of each member's neighbours: even, or all others.
        threshold: number of holders whose shares give a member's seed.

    Raises:
        UsageError: a repeated member, or a degree or threshold that does not fit.
    """

    ring: tuple[int, ...]
    degree: int
    threshold: int
    _place: dict[int, int] = field(init=False, repr=False, compare=False)
    # neighbours, and holders of shares, of the members that were asked for
    _found: dict[int, tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _holders: dict[int, tuple[int, ...]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )

    def __post_init__(self) -> None:
        count = len(self.ring)
        places = {client: position for position, client in enumerate(self.ring)}
        if len(places) < count:
            raise UsageError("a member of a secure sum is named twice: name each once")
        even = self.degree % 2 == 0 and 0 <= self.degree < count
        if not even and self.degree != count - 1:
            raise UsageError(
                f"each of {count} members of a secure sum has an even number of neighbours, or all "
                f"others: {self.degree} is neither"
            )
        if not 1 <= self.threshold <= self.degree + 1:
            raise UsageError(
                f"the threshold of a secure sum lies between 1 and the {self.degree + 1} holders "
                f"of a seed: {self.threshold} does not"
            )
        object.__setattr__(self, "_place", places)

    @property
    def is_complete(self) -> bool:
        """Return whether all pairs share pads."""
        return self.degree == len(self.ring) - 1

    def neighbours(self, client: int) -> tuple[int, ...]:
        """Return the members that a member shares pads with, ascending.

        Args:
            client: id of the member.

        Raises:
            UsageError: no member.
        """
        if client not in self._place:
            raise UsageError(f"client {client} is no member of this secure sum")
        if client not in self._found:
            self._found[client] = tuple(sorted(self._on_either_side(client)))
        return self._found[client]

    def _on_either_side(self, client: int) -> list[int]:
        """Return the members that are at most k/2 places away on the ring."""
        if self.is_complete:
            # Of all pairs the order on the ring says nothing.
            return [other for other in self.ring if other != client]
        position = self._place[client]
        neighbours = []
        for distance in range(1, self.degree // 2 + 1):
            after = (position + distance) % len(self.ring)
            neighbours.append(self.ring[position - distance])
            neighbours.append(self.ring[after])
        return neighbours

    def holders(self, client: int) -> tuple[int, ...]:
        """Return the members that hold a share of a member's seed: its neighbours and itself.

        Args:
            client: id of the member.
        """
        if client not in self._holders:
            self._holders[client] = tuple(sorted((client, *self.neighbours(client))))
        return self._holders[client]

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Return the members in ascending order."""
        return tuple(sorted(self.ring))

    @cached_property
    def holder_table(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return who holds shares of whose seeds, for all members at once.

        Returns:
            The holders of each member's seed (n, k + 1), as places among `members`, ascending; and
            for each of these pairs (owner, holder), row by row, where (holder, owner) stands.
        """
        count = len(self.ring)
        if self.is_complete:
            table = np.tile(np.arange(count), (count, 1))
        else:
            # the place among `members` of who stands where on the ring
            ring = np.searchsorted(np.array(self.members), np.array(self.ring))
            half = self.degree // 2
            around = np.arange(count)[:, None] + np.arange(-half, half + 1)
            table = np.empty(around.shape, dtype=np.int64)
            table[ring] = np.sort(ring[around % count], axis=1)
        owners = np.repeat(np.arange(count), table.shape[1])
        # The relation is symmetric: its pairs in the order of (holder, owner) are all pairs again.
        return table, np.argsort(table.ravel() * count + owners)


def complete_graph(members: Sequence[int], threshold: int) -> Graph:
    """Return the graph of all pairs.

    Args:
        members: ids of the members.
        threshold: number of holders whose shares give a member's seed.
    """
    ring = tuple(sorted(members))
    return Graph(ring, len(ring) - 1, threshold)


class Plan(SumPlan):
    """What the graphs of a run's sums have to bear."""

    def degree_and_threshold(self, members: int) -> tuple[int, int]:
        """Return the number of neighbours of each of some members, and the threshold of its seed.

        Args:
            members: number of members.

        Raises:
            UsageError: a sum of so few that it cannot hide each among `minimum`.
        """
        return _planned(members, self.minimum, self.lost, self.colluding)

    def least_survivors(self, members: int) -> int:
        """Return the smallest number of survivors of which a sum is unmasked.

        It is what `UnmaskingGuard` insists on: a majority, and the holders that a seed takes.

        Args:
            members: number of members.

        Raises:
            UsageError: as `degree_and_threshold`.
        """
        _, threshold = self.degree_and_threshold(members)
        return max(self.minimum, threshold, members // 2 + 1)

    def bears(self, members: int) -> bool:
        """Return whether all pairs of some members, which bear the most, bear the lost ones.

        Args:
            members: number of members.
        """
        try:
            threshold = all_pairs_threshold(members, self.minimum, self.colluding)
        except UsageError:
            return False
        return members - threshold >= _part(self.lost, members)

    def is_sparse(self, members: int) -> bool:
        """Return whether fewer than all pairs of some members share keys.

        Args:
            members: number of members.
        """
        degree, _ = self.degree_and_threshold(members)
        return degree < members - 1

    def sentence(self, members: int) -> str:
        """Return how many neighbours share keys, and what that bears.

        Args:
            members: number of members.
        """
        degree, threshold = self.degree_and_threshold(members)
        if degree == members - 1:
            return (
                f"in a sum of {members} all pairs share keys: it is read with {threshold} "
                f"survivors or more, where up to {self.colluding:.0%} collude with the server"
            )
        return (
            f"in a sum of {members} each member shares keys with {degree} others: where up to "
            f"{self.lost:.0%} are lost and {self.colluding:.0%} collude with the server, it fails "
            f"or shows more than itself with probability 2^-{SECURITY} at most"
        )


def build_graph(members: Sequence[int], seed: bytes, plan: Plan) -> Graph:
    """Return the graph of a sum, the same for everyone who knows its members and the seed.

    Args:
        members: ids of the members (n,), in any order.
        seed: public seed, any bytes, such as a hash of the root of the clients' keys.
        plan: what the graph has to bear.

    Raises:
        UsageError: a sum of so few that it cannot hide each among `plan.minimum`.
    """
    count = len(members)
    degree, threshold = plan.degree_and_threshold(count)
    if degree == count - 1:
        return complete_graph(members, threshold)
    # The order must be unknown when clients choose whom to collude with: the seed follows from all
    # keys. Members are part of it, or a server could leave out whoever stands between others.
    text = transcript("securecluster sum graph v1", seed, members_hash(members))
    order = keystream.order(hashlib.sha256(text).digest(), 0, count)
    # The order of the argument must not matter: parties list members in their own.
    ascending = sorted(members)
    ring = tuple(ascending[position] for position in order)
    return Graph(ring, degree, threshold)


@lru_cache(maxsize=256)
def _planned(members: int, minimum: int, lost: float, colluding: float) -> tuple[int, int]:
    """Return what `Plan.degree_and_threshold` does."""
    try:
        return degree_and_threshold(members, minimum, lost, colluding, FEWEST)
    except UsageError:
        return members - 1, all_pairs_threshold(members, minimum, colluding)


def all_pairs_threshold(members: int, minimum: int, colluding: float = 0.0) -> int:
    """Return the threshold t that protects all pairs from a server that sends different lists.

    A server that names other survivors to each client learns sums, and differences of sums, over at
    least 2t - n - c honest clients, where c of the n members collude with it (see
    `double_mask.UnmaskingGuard`). So t = ⌈(n + minimum + c) / 2⌉, which is above n/2. (not in the
    papers: there, signatures make all clients agree on the survivors in one more round.)

    Args:
        members: number n of members.
        minimum: smallest number of honest clients in anything that the server may learn, at least
            1.
        colluding: fraction of the members that may collude with the server.

    Raises:
        UsageError: no t up to n will do.
    """
    _check_fraction("colluding clients", colluding)
    if minimum < 1:
        raise UsageError(f"a secure sum has a minimum of at least 1 client, not {minimum}")
    colluders = _part(colluding, members)
    # Ceiling without a float.
    threshold = -(-(members + minimum + colluders) // 2)
    if threshold > members:
        raise UsageError(
            f"a secure sum over {members} clients cannot hide each among {minimum} where "
            f"{colluders} collude: sum over more clients, or lower the minimum"
        )
    return threshold


def degree_and_threshold(
    members: int, minimum: int, dropouts: float, colluding: float, fewest: int = 2
) -> tuple[int, int]:
    """Return the smallest even k, and a threshold for it, that fail rarely enough.

    Args:
        members: number n of members.
        minimum: smallest number of honest clients in anything that the server may learn.
        dropouts: fraction of the members that may drop out.
        colluding: fraction of the members that may collude with the server.
        fewest: the smallest k to try, even.

    Returns:
        The degree k, and the smallest threshold t whose `failure_probability` is below
        2^-SECURITY.

    Raises:
        UsageError: a fraction below 0 or from 1, or no k below n - 1 will do.
    """
    _check_fraction("dropouts", dropouts)
    _check_fraction("colluding clients", colluding)
    tolerance = 2.0**-SECURITY
    # The bound of event 1 does not depend on t, so most degrees end here at once.
    for degree in range(fewest, members - 1, 2):
        disconnected = _disconnected(members, degree, dropouts, colluding)
        if disconnected >= tolerance:
            continue
        leaks = _tails(members - 1, _part(colluding, members), degree)
        losses = _tails(members - 1, _part(dropouts, members), degree)
        # Below a majority of the holders, two disjoint sets could open both secrets of a client.
        for threshold in range(degree // 2 + 1, degree + 2):
            leaking = _at(leaks, 2 * threshold - degree - minimum)
            failing = _at(losses, degree + 2 - threshold)
            if disconnected + members * (leaking + failing) < tolerance:
                return degree, threshold
    raise UsageError(
        f"no graph of {members} clients bears {dropouts:.0%} dropouts and {colluding:.0%} "
        "colluding clients: plan for fewer"
    )


def failure_probability(
    members: int, degree: int, threshold: int, minimum: int, dropouts: float, colluding: float
) -> float:
    """Return a bound on the probability that a random graph of a sum fails.

    It is the union bound over three events, as in Bell et al. 2020, Section 3, where ⌊δn⌋ members
    drop out and ⌊γn⌋ collude, independently of the order on the ring:

    1. The honest survivors' graph is disconnected: sums of its parts leak. Two disjoint runs of k/2
       members that stand together are then lost or collude. There are n(n - k - 1)/2 pairs of runs,
       and k given members are among the B = ⌊δn⌋ + ⌊γn⌋ bad ones with the hypergeometric
       probability C(B, k)/C(n, k).
    2. Too many of a member's neighbours collude. Their number c is hypergeometric (k draws of
       n - 1, ⌊γn⌋ marked), and 2t - (k + 1) - c must be at least `minimum`; the paper's
       honest-but-curious server needs c < t only.
    3. Fewer than t holders of a member's seed survive. The number of lost neighbours is
       hypergeometric (k draws of n - 1, ⌊δn⌋ marked), and k + 1 less it must be at least t.

    Args:
        members: number n of members.
        degree: even number k of neighbours.
        threshold: t.
        minimum: smallest number of honest clients in anything that the server may learn.
        dropouts: δ.
        colluding: γ.
    """
    leaks = _tails(members - 1, _part(colluding, members), degree)
    losses = _tails(members - 1, _part(dropouts, members), degree)
    # the smallest c that breaks 2t - (k + 1) - c >= minimum
    leaking = _at(leaks, 2 * threshold - degree - minimum)
    # the smallest number of lost neighbours that leaves t - 1 holders; the client holds one
    failing = _at(losses, degree + 2 - threshold)
    disconnected = _disconnected(members, degree, dropouts, colluding)
    return disconnected + members * (leaking + failing)


def _disconnected(members: int, degree: int, dropouts: float, colluding: float) -> float:
    """Return the bound on the probability of event 1 of `failure_probability`."""
    # At worst nobody is both lost and colluding: the two sets are disjoint.
    bad = min(_part(dropouts, members) + _part(colluding, members), members)
    if bad < degree:
        return 0.0
    pairs_of_runs = members * (members - degree - 1) / 2
    return pairs_of_runs * math.exp(_log_binomial(bad, degree) - _log_binomial(members, degree))


def _tails(population: int, marked: int, draws: int) -> list[float]:
    """Return the hypergeometric P[X >= x] for x = 0 … `draws`.

    Small tails are sums of small probabilities, so they are exact to float64's precision.

    Args:
        population: number of items.
        marked: number of marked ones.
        draws: number of items drawn without replacement; X of them are marked.
    """
    ways = _log_binomial(population, draws)
    tails = [0.0] * (draws + 1)
    tail = 0.0
    for count in range(draws, -1, -1):
        if count <= marked and draws - count <= population - marked:
            drawn = _log_binomial(marked, count)
            rest = _log_binomial(population - marked, draws - count)
            tail += math.exp(drawn + rest - ways)
        tails[count] = tail
    return tails


def _at(tails: Sequence[float], count: int) -> float:
    """Return P[X >= count] of `_tails`, for any count."""
    if count >= len(tails):
        return 0.0
    return tails[max(count, 0)]


def _log_binomial(n: int, k: int) -> float:
    """Return log C(n, k), for 0 <= k <= n."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def _part(fraction: float, members: int) -> int:
    """Return ⌊fraction · members⌋, where a product just below an integer counts as the integer."""
    return math.floor(fraction * members + 1e-9)


def _check_fraction(name: str, fraction: float) -> None:
    if not 0 <= fraction < 1:
        raise UsageError(
            f"the fraction of {name} clients lies between 0 and 1: {fraction} does not"
        )
