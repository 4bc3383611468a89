"""Secure sums with double masking (Bonawitz et al. 2017), on the graph of Bell et al. 2020.

A client sends

    y_i = encode(x_i) + PRG(b_i) + Σ_{j > i} PRG(k_ij) - Σ_{j < i} PRG(k_ij)   in Z_2^32 or Z_2^64,

where j are its neighbours, k_ij the key of the pair for this call and the row's origin, and b_i the
seed of its self mask (Bonawitz et al. 2017, Section 4). In the same message it sends Shamir shares
of b_i for its neighbours, each under a cover c_ij that the two derive for this call, a one-time
pad. Then there are two phases:

1. Only where clients were lost: the others reveal their k_ij with them. Who does not reply is lost,
   too, and its row is left out, so the phase is repeated with the larger list.
2. The survivors reveal the covers of their shares of each other's b_i, of which a threshold is
   enough.

The pads between survivors cancel. `UnmaskingGuard` is what a client insists on before it reveals
anything. (Deviations from the papers: keys of pairs for each call are revealed by their owners, so
that the X25519 keys last a run and no share of them exists; shares travel with the row; and they
stay at the server, which is sent a cover in place of an opened share, so that no box is relayed.)

Why covers hide shares as sealed boxes do. k_ij, c_ij and c_ji are parts of one output of a
pseudorandom function of the pair's key and of the whole context (`pair_secrets`). To whoever lacks
the pair's key they are uniform, and each covers one share: what is dealt follows from the client's
secret and the same context, so that a client that is asked again sends the same bytes, and the
guard lets no client take part twice in one context with another origin. Until a neighbour reveals
c_ij its share is as good as not sent, and then the server reads what the opened box would have told
it. The server hands nothing to the neighbour, so there is nothing that it could alter: a share that
a client altered is found by the commitment to b_i, as before. One sum tells nothing of another,
since b_i, its polynomial and all three keys of each pair are outputs for this context alone.
"""

from __future__ import annotations

import hashlib
import hmac
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import combinations, islice

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError, SecureClusterError, UsageError
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.pads import KEPT, derived, pad_sign, purpose_hash
from securecluster.protections.secure_sums import shamir
from securecluster.protections.secure_sums.graph import Graph
from securecluster.protections.secure_sums.pair_secrets import Octets, PairSecrets

# of the shares of a seed, which are tried where some were altered
MOST_SUBSETS = 1000
# bytes of the tag of a row's origin
TAG = 16


class TooFewSurvivorsError(SecureClusterError):
    """A secure sum that too few clients survived: nothing of it can be unmasked."""


@dataclass(frozen=True)
class SumContext:
    """One attempt at one sum; masks, shares and boxes are bound to all of it.

    Args:
        run: hash of the run's configuration.
        purpose: what the sum is for, such as the client method.
        call: number of the call.
        attempt: number of the attempt at this call, from 0.
        members: clients that are asked for a row, ascending.
        threshold: number of shares that give a seed.
        root: of the tree of the clients' keys, as the client was told (`key_exchange`).
        values: text that all calls with the same rows have in common, such as "samples"; empty
            where each call has new rows.

    Raises:
        FrameError: members that do not ascend, or a negative number.
    """

    run: bytes
    purpose: str
    call: int
    attempt: int
    members: tuple[int, ...]
    threshold: int
    root: bytes
    values: str = ""

    def __post_init__(self) -> None:
        # One order of the members, so that all parties hash the same bytes.
        ascending = tuple(sorted(set(self.members)))
        if not self.members or self.members != ascending or self.members[0] < 0:
            raise FrameError("the members of a secure sum are distinct ids in ascending order")
        if min(self.call, self.attempt, self.threshold) < 0:
            raise FrameError("the call, attempt and threshold of a secure sum are not negative")

    @cached_property
    def members_hash(self) -> bytes:
        """Return the hash of the members, 32 bytes."""
        return pads.members_hash(self.members)

    @cached_property
    def hash(self) -> bytes:
        """Return SHA-256 of the whole context, 32 bytes."""
        text = pads.transcript(
            "securecluster sum context v2",
            self.run,
            self.purpose,
            self.call,
            self.attempt,
            self.members_hash,
            self.threshold,
            self.root,
            self.values,
        )
        return hashlib.sha256(text).digest()


@lru_cache(KEPT)
def _about(label: str, context: bytes) -> bytes:
    """Return what bytes of one attempt are for, by the hash of its context."""
    return purpose_hash(label, context)


def seed_of(secret: shamir.Numbers, context: SumContext) -> bytes:
    """Return the seed of a self mask, 32 bytes, by the secret that shares give.

    Args:
        secret: sixteen numbers below the prime.
        context: the attempt that the seed is for.
    """
    return derived(secret.astype("<u2").tobytes(), _about("securecluster seed v2", context.hash))


def commitment(seed: bytes, context: SumContext) -> bytes:
    """Return a commitment to the seed of a self mask, 32 bytes.

    It hides the seed, which is uniform, and nobody finds another seed with the same one.

    Args:
        seed: 32 secret bytes.
        context: the attempt that the seed is for.
    """
    return derived(seed, _about("securecluster seed commitment v2", context.hash))


def origin_tag(origin: bytes, context: SumContext) -> bytes:
    """Return what tells the server which rows of a sum have one origin, 16 bytes.

    It hides nothing: an origin follows from what the server has sent.

    Args:
        origin: digest of the public numbers that a row follows from.
        context: the attempt.
    """
    text = pads.transcript("securecluster origin tag v1", context.hash, origin)
    return hashlib.sha256(text).digest()[:TAG]


class ClientMasks:
    """A client's masks and shares for one attempt at a sum.

    All of it follows from the keys and the context, so a client that is asked again sends the same
    bytes, and needs to store nothing. One context may mask one row only: see
    `UnmaskingGuard.take_part`.

    Args:
        client: id of the client, a member.
        secret: key of its self masks, 32 secret bytes drawn for this run.
        context: the attempt.
        secrets: what its pairs derive for this attempt and the row's origin. Pads cancel between
            rows of one origin only.

    Raises:
        UsageError: pairs of another graph than that of the members and the threshold.
    """

    def __init__(
        self, client: int, secret: bytes, context: SumContext, secrets: PairSecrets
    ) -> None:
        self._graph = secrets.pairs.graph
        _check_graph(context, self._graph)
        self.client = client
        self.neighbours = self._graph.neighbours(client)
        self.secret = secret
        self._context = context
        self._secrets = secrets
        # Keys of clients that are no neighbours stay out of reach of a request to reveal them.
        self._pairs, self._signs = secrets.pairs.of(client)
        # place among the holders of its seed, from 0
        self._rank = bisect_left(self.neighbours, client)
        self._dealt: _Dealt | None = None

    def __repr__(self) -> str:
        return f"ClientMasks(client={self.client}, keys hidden)"

    def mask(self, rows: torch.Tensor, field: str) -> None:
        """Add the client's self mask and pads to an encoded row, in place.

        Args:
            rows: contiguous int32 or int64 row (…) on the CPU.
            field: name of the field; each field of a reply has masks of its own.
        """
        mask_tables([self], {field: rows[None]})

    def commitment(self) -> bytes:
        """Return the commitment to the seed of the self mask, 32 bytes, for the server."""
        return commitment(self._seed, self._context)

    def boxes(self) -> Octets:
        """Return the covered share of the seed for each neighbour (k, 32), in ascending order."""
        (boxes,) = covered_shares([self])
        return boxes

    def shares(self, owners: Sequence[int]) -> Octets:
        """Return what opens the client's shares of survivors' seeds, as `opened_shares` does.

        Args:
            owners: ascending, as `UnmaskingGuard.reveal_shares` allows them.
        """
        (opened,) = opened_shares([self], [owners])
        return opened

    def pad_keys(self, lost: Sequence[int]) -> dict[int, bytes]:
        """Return the call's pair keys with lost neighbours, by their ids.

        Args:
            lost: neighbours, as `UnmaskingGuard.reveal_pads` allows them.
        """
        positions = [self.neighbours.index(peer) for peer in lost]
        keys = self._secrets.pad_keys(self._pairs[positions])
        return dict(zip(lost, keys, strict=True))

    @property
    def _seed(self) -> bytes:
        """Return the seed of the self mask."""
        return self._dealing.seed

    @property
    def _dealing(self) -> _Dealt:
        """Return the seed and its shares."""
        if self._dealt is None:
            deal([self])
        assert self._dealt is not None
        return self._dealt


@dataclass(frozen=True)
class _Dealt:
    """A client's seed, and its shares by holder (holders, 32)."""

    seed: bytes = field(repr=False)
    shares: Octets = field(repr=False)


def deal(clients: Sequence[ClientMasks]) -> None:
    """Draw the seeds of clients and their shares, of those of one attempt at once.

    The coefficients follow from a client's secret: one that is asked again deals the same shares,
    and not a second set, which together with the first would need fewer holders.

    Args:
        clients: their masks; those that have dealt theirs are left as they are.
    """
    for group in _by_attempt([masks for masks in clients if masks._dealt is None]):
        context = group[0]._context
        about = _about("securecluster share polynomial v2", context.hash)
        sources = [partial(derived, masks.secret, about) for masks in group]
        coefficients = shamir.polynomials(context.threshold, sources)
        shares = shamir.share(coefficients, len(group[0].neighbours) + 1)
        octets = shares.astype("<u2", copy=False).view(np.uint8)
        for masks, own, secret in zip(group, octets, coefficients[:, 0], strict=True):
            masks._dealt = _Dealt(seed_of(secret, context), own)


def covered_shares(clients: Sequence[ClientMasks]) -> list[Octets]:
    """Return what each client sends its neighbours by way of the server, (k, 32) in their order.

    Args:
        clients: their masks.
    """
    boxes: dict[int, Octets] = {}
    for group in _by_attempt(clients):
        pairs = np.stack([masks._pairs for masks in group])
        signs = np.stack([masks._signs for masks in group])
        shares = np.stack([masks._dealing.shares for masks in group])
        # The own share needs no cover: it never leaves before the client may reveal it.
        others = np.ones(shares.shape[:2], dtype=bool)
        others[np.arange(len(group)), [masks._rank for masks in group]] = False
        covered = group[0]._secrets.covers(pairs, signs > 0)
        covered ^= shares[others].reshape(covered.shape)
        for masks, rows in zip(group, covered, strict=True):
            boxes[id(masks)] = rows
    return [boxes[id(masks)] for masks in clients]


def opened_shares(clients: Sequence[ClientMasks], owners: Sequence[Sequence[int]]) -> list[Octets]:
    """Return what opens each client's shares of survivors' seeds, (o, 32).

    It is the cover of each neighbour's share, and the client's share of its own seed, which it
    holds, too, so that fewer others are needed.

    Args:
        clients: their masks.
        owners: neighbours of each client and the client itself, ascending, as
            `UnmaskingGuard.reveal_shares` allows them.
    """
    allowed = {id(masks): chosen for masks, chosen in zip(clients, owners, strict=True)}
    opened: dict[int, Octets] = {}
    for group in _by_attempt(clients):
        pairs = np.stack([masks._pairs for masks in group])
        # The neighbour dealt the share, which is the lower id where the client subtracts the pad.
        signs = np.stack([masks._signs for masks in group])
        covers = group[0]._secrets.covers(pairs, signs < 0)
        for masks, rows in zip(group, covers, strict=True):
            rank = masks._rank
            own = masks._dealing.shares[rank : rank + 1]
            of_all = np.concatenate([rows[:rank], own, rows[rank:]])
            chosen = allowed[id(masks)]
            if len(chosen) < len(of_all):
                of_all = of_all[np.isin(masks._graph.holders(masks.client), chosen)]
            opened[id(masks)] = of_all
    return [opened[id(masks)] for masks in clients]


def _by_attempt(clients: Sequence[ClientMasks]) -> Iterable[list[ClientMasks]]:
    """Return clients' masks by the attempt and origin that they are for."""
    groups: dict[int, list[ClientMasks]] = {}
    for masks in clients:
        groups.setdefault(id(masks._secrets), []).append(masks)
    return groups.values()


def mask_tables(clients: Sequence[ClientMasks], tables: Mapping[str, torch.Tensor]) -> None:
    """Add the masks of clients of one machine to their rows, in place.

    Each row becomes what it would be alone, but a pad of two of the clients is made once.

    Args:
        clients: masks of each row's client (k,).
        tables: contiguous int32 or int64 rows (k, …) on the CPU, by field; each field of a reply
            has masks of its own.
    """
    # The self mask keeps the row hidden if the server learns all of its pads: a row may come late.
    keys = [masks._seed for masks in clients]
    row_of = {id(masks): row for row, masks in enumerate(clients)}
    assert len(row_of) == len(clients), "each row is of a client of its own"
    places = []
    for group in _by_attempt(clients):
        secrets = group[0]._secrets
        pairs = np.stack([masks._pairs for masks in group])
        is_used = np.zeros(len(secrets.pairs.keys), dtype=bool)
        is_used[pairs] = True
        used = np.flatnonzero(is_used)
        place = np.zeros(len(is_used), dtype=np.int64)
        place[used] = np.arange(len(keys), len(keys) + len(used))
        keys += secrets.pad_keys(used)
        rows = [row_of[id(masks)] for masks in group]
        chosen = np.column_stack([rows, place[pairs]])
        signs = np.stack([masks._signs for masks in group])
        signs = np.column_stack([np.ones_like(rows), signs])
        places.append(pads.Places(rows, chosen, signs))
    for name, table in tables.items():
        pads.add_shared_pads(table, keys, places, name)


class MaskedSum:
    """The server's sum of one field's masked rows.

    Rows are added as they arrive. A row that was added can be taken out again by whoever still has
    it, before the sum is unmasked.

    Args:
        context: the attempt.
        graph: graph of its members.
        field: name of the field.
        shape: shape of a row.
        dtype: torch.int32 or torch.int64.
    """

    def __init__(
        self,
        context: SumContext,
        graph: Graph,
        field: str,
        shape: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        _check_graph(context, graph)
        self._graph = graph
        self._field = field
        # Integers wrap around: the type is the ring.
        self._total = torch.zeros(tuple(shape), dtype=dtype)
        self._added: set[int] = set()

    @property
    def survivors(self) -> tuple[int, ...]:
        """Return the clients whose rows are in the sum, ascending."""
        return tuple(sorted(self._added))

    def add(self, client: int, row: torch.Tensor) -> None:
        """Add a client's masked row, in the ring.

        Args:
            client: id of the client.
            row: masked row.

        Raises:
            FrameError: a client that is no member or whose row is in the sum, or a row of another
                shape or type.
        """
        self.check(row)
        if client in self._added or client not in self._graph.ring:
            raise FrameError(
                f"{self._field}: client {client} is no member of the secure sum, or sent two rows"
            )
        self._total.add_(row)
        self._added.add(client)

    def discard(self, client: int, row: torch.Tensor) -> None:
        """Take the row of a client that was lost later out of the sum.

        Args:
            client: id of the client.
            row: its masked row, as it was added.

        Raises:
            FrameError: a client whose row is not in the sum, or a row of another shape or type.
        """
        self.check(row)
        if client not in self._added:
            raise FrameError(f"{self._field}: the row of client {client} is not in the secure sum")
        # Exact in the ring, which is why a row can be taken out again.
        self._total.sub_(row)
        self._added.remove(client)

    def unmask(
        self, seeds: Mapping[int, bytes], pad_keys: Mapping[tuple[int, int], bytes]
    ) -> torch.Tensor:
        """Return the sum without masks.

        All of what is needed is checked first: a sum that is unmasked in part is no sum. Check the
        result with `FixedPoint.decode`, since a survivor that reveals a wrong key is not noticed
        here.

        Args:
            seeds: survivor -> seed of its self mask (`Unmasking.seeds`).
            pad_keys: (survivor, lost neighbour) -> key of their pads (`ClientMasks.pad_keys`).

        Returns:
            The sum of the survivors' encoded rows, in the ring.

        Raises:
            TooFewSurvivorsError: no row is in the sum.
            FrameError: seeds of other clients than the survivors, or other pairs than those of
                survivors and lost neighbours.
        """
        if not self._added:
            raise TooFewSurvivorsError(f"{self._field}: no client survived the secure sum")
        # A missing seed leaves noise in the sum, and one too many would add some.
        if set(seeds) != self._added:
            raise FrameError(
                f"{self._field}: the secure sum needs the seeds of its survivors, and no others"
            )
        if set(pad_keys) != set(broken_pairs(self._graph, self.survivors)):
            raise FrameError(
                f"{self._field}: the secure sum needs the keys of its survivors with lost "
                "neighbours, and no others"
            )
        streams = [(seed, -1) for seed in seeds.values()]
        for (survivor, lost), key in pad_keys.items():
            # Only the survivor added this pad: nothing of the lost row is in the sum.
            streams.append((key, -pad_sign(survivor, lost)))
        # The masked sum stays as it is: a caller may find a wrong key and ask again.
        unmasked = self._total.clone()
        pads.add_pads(unmasked, streams, self._field)
        return unmasked

    def check(self, row: torch.Tensor) -> None:
        """Raise FrameError for a row of another shape or type than the sum has.

        Args:
            row: masked row.
        """
        if row.shape != self._total.shape or row.dtype != self._total.dtype:
            raise FrameError(
                f"{self._field}: a masked row has shape {tuple(row.shape)} and type {row.dtype}, "
                f"not {tuple(self._total.shape)} and {self._total.dtype}"
            )


def broken_pairs(graph: Graph, survivors: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs (survivor, lost neighbour) whose pads do not cancel.

    Args:
        graph: graph of the members.
        survivors: clients whose rows are in the sum.
    """
    alive = set(survivors)
    # The usual case is not paid for: all pads cancel.
    if len(alive) == len(graph.ring):
        return []
    pairs = []
    for survivor in survivors:
        for peer in graph.neighbours(survivor):
            if peer not in alive:
                pairs.append((survivor, peer))
    return pairs


class Unmasking:
    """Values that survivors reveal to the server, checked and put together.

    Args:
        context: the attempt.
        graph: graph of its members.
        survivors: clients whose rows are in the sum.
        commitments: survivor -> commitment to its seed, as it came with its row.
        boxes: survivor -> covered shares of its seed (k, 32), as they came with its row.

    Attributes:
        altered: clients that revealed a share that does not fit the others, where it is plain.

    Raises:
        FrameError: a survivor without a commitment.
    """

    def __init__(
        self,
        context: SumContext,
        graph: Graph,
        survivors: Sequence[int],
        commitments: Mapping[int, bytes],
        boxes: Mapping[int, Octets],
    ) -> None:
        _check_graph(context, graph)
        # Without its commitment, a seed from altered shares could not be told from the true one.
        missing = [client for client in survivors if client not in commitments]
        if missing:
            raise FrameError(f"client {missing[0]} sent no commitment to its seed")
        self._context = context
        self._graph = graph
        self._survivors = tuple(sorted(survivors))
        self._alive = frozenset(survivors)
        self._commitments = commitments
        self._boxes = boxes
        self._revealed: dict[int, Octets] = {}
        self.altered: set[int] = set()

    def expected_shares(self, holder: int) -> tuple[int, ...]:
        """Return the survivors whose shares a survivor is to reveal, ascending.

        Args:
            holder: id of the survivor.
        """
        holders = self._graph.holders(holder)
        if len(self._alive) == len(self._graph.ring):
            return holders
        return tuple(owner for owner in holders if owner in self._alive)

    def add_shares(self, holder: int, revealed: Octets) -> None:
        """Store what a survivor revealed.

        Args:
            holder: id of the survivor.
            revealed: cover of each neighbour's share, and the own share, in the order of
                `expected_shares`, (o, 32).

        Raises:
            FrameError: a client that did not survive or replied before, or another number of shares
                than is expected.
        """
        if holder not in self._alive or holder in self._revealed:
            raise FrameError(
                f"client {holder} is no survivor of the secure sum, or revealed its shares twice"
            )
        # More would be shares of lost clients, whose pair keys are revealed: together they open a
        # row.
        if len(revealed) != len(self.expected_shares(holder)):
            raise FrameError(f"client {holder} revealed other shares than it was asked for")
        self._revealed[holder] = revealed

    def seeds(self) -> dict[int, bytes]:
        """Return the seed of each survivor's self mask.

        Raises:
            TooFewSurvivorsError: fewer holders than the threshold replied for some survivor; no
                seed is returned then.
            FrameError: shares that do not give the seed that a survivor committed to.
        """
        if not self._survivors:
            return {}
        shares, replied = self._opened()
        # All seeds or none: some of them would give nothing but a reason to ask on.
        self._check_replies(replied)
        seeds = self._of_first_shares(shares, replied)
        for k, owner in enumerate(self._survivors):
            if owner not in seeds:
                ranks = np.flatnonzero(replied[k]).tolist()
                seed = self._seed(owner, {rank: shares[k, rank] for rank in ranks})
                if seed is None:
                    raise FrameError(
                        f"the shares of the seed of client {owner} do not give what it committed "
                        "to: a share was altered"
                    )
                seeds[owner] = seed
        return seeds

    def _check_replies(self, replied: NDArray[np.bool_]) -> None:
        """Raise TooFewSurvivorsError if fewer holders of a seed than the threshold replied."""
        threshold = self._context.threshold
        for owner, count in zip(self._survivors, replied.sum(axis=1).tolist(), strict=True):
            if count < threshold:
                raise TooFewSurvivorsError(
                    f"the secure sum of call {self._context.call} cannot be unmasked: {count} "
                    f"holders of the seed of client {owner} replied, and {threshold} are needed"
                )

    def _of_first_shares(
        self, shares: shamir.Numbers, replied: NDArray[np.bool_]
    ) -> dict[int, bytes]:
        """Return the seeds that the first shares give, where owners committed to them.

        Args:
            shares: of the survivors (s, holders, 16).
            replied: (s, holders) which of them were revealed.
        """
        # the same ranks for all owners where possible, whose weights are computed once
        first = np.argsort(~replied, axis=1, kind="stable")[:, : self._context.threshold]
        alike: dict[bytes, list[int]] = {}
        for k, ranks in enumerate(first):
            alike.setdefault(ranks.tobytes(), []).append(k)
        seeds: dict[int, bytes] = {}
        for rows in alike.values():
            ranks = first[rows[0]]
            secrets = shamir.recover(tuple((ranks + 1).tolist()), shares[np.ix_(rows, ranks)])
            for k, secret in zip(rows, secrets, strict=True):
                owner = self._survivors[k]
                seed = self._checked(owner, secret)
                if seed is not None:
                    seeds[owner] = seed
        return seeds

    def _opened(self) -> tuple[shamir.Numbers, NDArray[np.bool_]]:
        """Return the survivors' shares (s, holders, 16), and which of them were revealed."""
        members = np.array(self._graph.members)
        table, mirror = self._graph.holder_table
        count = len(members)
        alive = np.isin(members, self._survivors)
        replied = np.isin(members, list(self._revealed))
        # rows of all clients, in the order of members and of their holders
        revealed = np.zeros((*table.shape, shamir.VALUE), dtype=np.uint8)
        if self._revealed:
            rows = [rows for _, rows in sorted(self._revealed.items())]
            revealed[replied[:, None] & alive[table]] = np.concatenate(rows)
        # what an owner's holders revealed, in the order of the holders
        opened = revealed.reshape(-1, shamir.VALUE)[mirror].reshape(revealed.shape)
        covered = alive[:, None] & (table != np.arange(count)[:, None])
        opened[covered] ^= np.concatenate([self._boxes[owner] for owner in self._survivors])
        numbers = opened.view("<u2").astype(np.uint16, copy=False)
        return numbers[alive], replied[table][alive]

    def _seed(self, owner: int, shares: Mapping[int, shamir.Numbers]) -> bytes | None:
        """Return the seed that an owner committed to; None if no shares give it.

        Where shares were altered, the others are looked for: one altered share after another is
        left out, first those of clients that altered another owner's.

        Args:
            owner: of the seed.
            shares: by the holder's rank.
        """
        holders = self._graph.holders(owner)
        ordered = sorted(shares, key=lambda rank: (holders[rank] in self.altered, rank))
        threshold = self._context.threshold
        seed = self._given(owner, shares, ordered[:threshold])
        if seed is not None:
            return seed
        subsets = (
            [rank for rank in ordered if rank not in left_out][:threshold]
            for count in range(1, len(ordered) - threshold + 1)
            for left_out in combinations(ordered, count)
        )
        for chosen in islice(subsets, MOST_SUBSETS):
            seed = self._given(owner, shares, chosen)
            if seed is not None:
                self._find_altered(owner, shares, chosen)
                return seed
        return None

    def _find_altered(
        self, owner: int, shares: Mapping[int, shamir.Numbers], fitting: Sequence[int]
    ) -> None:
        """Note who revealed a share that does not fit those that give the seed.

        Clients that work together can make shares that give the seed and do not fit those of honest
        ones. Their polynomial has the seed in common with the true one, and so at most t - 2 honest
        shares. So nobody is named unless more shares fit than these and as many as do not fit.
        """
        holders = self._graph.holders(owner)
        altered = {
            holders[rank]
            for rank in shares
            if rank not in fitting and self._given(owner, shares, [rank, *fitting[1:]]) is None
        }
        if len(shares) - len(altered) > self._context.threshold - 2 + len(altered):
            self.altered |= altered

    def _given(
        self, owner: int, shares: Mapping[int, shamir.Numbers], ranks: Sequence[int]
    ) -> bytes | None:
        """Return the seed that shares of some ranks give, if its owner committed to it."""
        coordinates = tuple(rank + 1 for rank in ranks)
        (secret,) = shamir.recover(coordinates, np.stack([shares[rank] for rank in ranks])[None])
        return self._checked(owner, secret)

    def _checked(self, owner: int, secret: shamir.Numbers) -> bytes | None:
        """Return the seed of a secret, if its owner committed to it."""
        seed = seed_of(secret, self._context)
        # In constant time, as for all secrets.
        if hmac.compare_digest(commitment(seed, self._context), self._commitments[owner]):
            return seed
        return None


@dataclass(frozen=True)
class Attempt:
    """A client's record of one attempt at a sum.

    Args:
        hash: hash of the context.
        holders: clients that hold shares of its seed, itself included.
        threshold: number of shares that give a seed.
        digest: digest of the row that it masked.
        lost: clients with which it revealed its pair keys.
        survivors: clients whose shares it revealed; None before that.
        least: smallest number of survivors that the client was told with its call.
        origin: digest of the public numbers that its row follows from, by which it reveals the keys
            of the pads that it has added.
    """

    hash: bytes
    holders: tuple[int, ...]
    threshold: int
    digest: bytes
    lost: tuple[int, ...] = ()
    survivors: tuple[int, ...] | None = None
    least: int = 0
    origin: bytes = b""


@dataclass
class GuardState:
    """State of a client's guard, to be stored before any message that depends on it leaves.

    Args:
        attempts: call -> attempt -> record.
        summed: text of `SumContext.values` -> survivors that it revealed shares for.
    """

    attempts: dict[int, dict[int, Attempt]] = field(default_factory=dict)
    summed: dict[str, tuple[int, ...]] = field(default_factory=dict)


class UnmaskingGuard:
    """Conditions of a client before it sends a masked row or reveals anything.

    For each attempt it reveals, of each other client, either the call's pair key or the share of
    the seed, never both; only in an attempt that it took part in and that no later one replaced;
    its shares once, for one list of survivors; and of one call only one attempt.

    *A server that names different survivors to different clients* (not in the papers, whose clients
    sign the list of survivors in one more round). Join two clients where neither revealed the key
    of their pads. The server learns sums over connected components only, of clients whose seeds it
    has. (Clients of rows of two origins, or that were told two roots of keys, have two such keys,
    and neither ever reveals the other's; nor does one of another root open a share of theirs.)
    Let S_i be the survivors named to client i, h the holders of a seed and t the threshold. The
    seed of i took t shares, so i ∉ S_j for at most h - t holders j; and S_i has at least t holders.
    So at least 2t - h holders j, i among them, have j ∈ S_i and i ∈ S_j: i is joined to them, and
    no component is smaller. With c of the holders colluding, 2t - h - c are honest. Two attempts at
    a call have no client in common whose seeds the server has, since t > h/2 holders reveal shares
    in each, and none in both.

    Sums of the same rows in several calls (`SumContext.values`) are all over one list of survivors,
    since sums over several lists could be solved for single rows.

    Args:
        client: id of the client.
        minimum: smallest number of clients in a sum, and in the difference of two sums.
        survivors: smallest number of survivors, where it is larger, such as the number of clients
            whose shares of noise were planned.
        active_server: True to demand 2t - h >= minimum, which protects from a server that names
            different survivors; False demands t > h/2, which is enough for an honest-but-curious
            one.

    Raises:
        UsageError: a minimum below 1.
    """

    def __init__(
        self, client: int, minimum: int, survivors: int = 0, active_server: bool = True
    ) -> None:
        if minimum < 1:
            raise UsageError(f"a secure sum has a minimum of at least 1 client, not {minimum}")
        self._client = client
        self._minimum = minimum
        # Shares of noise are planned for so many survivors: with fewer, the sum has too little.
        self._least_survivors = max(minimum, survivors)
        self._active_server = active_server
        self.state = GuardState()

    def take_part(
        self,
        context: SumContext,
        graph: Graph,
        digest: bytes = b"",
        fewest_survivors: int = 0,
        origin: bytes = b"",
    ) -> None:
        """Record that the client sends a masked row, or refuse.

        Two rows under one context would give away their difference. A client that is asked again
        may send the same row again.

        Args:
            context: the attempt.
            graph: graph of its members, as the client itself builds it.
            digest: digest of the encoded row; empty refuses to be asked twice.
            fewest_survivors: smallest number of survivors for which the client reveals anything,
                where it is larger than the guard's own.
            origin: digest of the public numbers that the row follows from.

        Raises:
            PolicyError: a list of members, a threshold or an attempt that the client refuses.
        """
        _check_graph(context, graph)
        self._check_members(context)
        self._check_threshold(context, graph)
        holders = graph.holders(self._client)
        record = Attempt(
            context.hash, holders, context.threshold, digest, least=fewest_survivors, origin=origin
        )
        attempts = self.state.attempts.setdefault(context.call, {})
        # A repeated request is answered as before, since its reply may have been lost on the way.
        earlier = attempts.get(context.attempt)
        if earlier is not None:
            same_row = earlier.hash == record.hash and earlier.digest == digest != b""
            if not same_row or (earlier.least, earlier.origin) != (fewest_survivors, origin):
                raise self._refusal(context, "it masked a row in this attempt already")
            return
        # Checked last, and stored only if nothing refused: a refusal leaves the state as it was.
        self._check_earlier_attempts(context, record, attempts)
        # Those who were not in an earlier sum of these rows may still be left out.
        before = self._earlier(context, ())
        allowed = not before or set(before) <= set(context.members)
        self._check_same_rows(context, allowed)
        attempts[context.attempt] = record

    def reveal_pads(self, context: SumContext, lost: Sequence[int]) -> tuple[int, ...]:
        """Return the lost neighbours with which the client may reveal its pair keys, ascending.

        It may be asked again with more lost clients, until it reveals shares.

        Args:
            context: the attempt.
            lost: all members whose rows are not in the sum.

        Raises:
            PolicyError: a request that the client refuses.
        """
        record = self._record(context)
        # The order of a request, and repeated ids, do not matter.
        gone = tuple(sorted(set(lost)))
        if record.survivors is not None and gone != record.lost:
            raise self._refusal(context, "it revealed its shares for another list of survivors")
        # Its pair keys are with the server already: its seed must never be opened.
        if not set(record.lost) <= set(gone):
            raise self._refusal(context, "a client that was lost cannot come back")
        if not set(gone) <= set(context.members):
            raise self._refusal(context, "a lost client is no member")
        survivors = tuple(client for client in context.members if client not in gone)
        self._check_survivors(context, record, survivors)
        self._store(context, replace(record, lost=gone))
        return tuple(peer for peer in record.holders if peer in gone)

    def origin(self, context: SumContext) -> bytes:
        """Return the origin of the row that the client sent in an attempt.

        Args:
            context: the attempt.

        Raises:
            PolicyError: the client did not take part in it, or took part in a later one.
        """
        return self._record(context).origin

    def reveal_shares(self, context: SumContext, survivors: Sequence[int]) -> tuple[int, ...]:
        """Return the survivors whose shares the client may reveal, itself included, ascending.

        Args:
            context: the attempt.
            survivors: all members whose rows are in the sum.

        Raises:
            PolicyError: a request that the client refuses.
        """
        record = self._record(context)
        # The usual case, that nobody was lost, is not paid for.
        alive = context.members
        if survivors is not alive:
            alive = tuple(sorted(set(survivors)))
        if record.survivors is not None and alive != record.survivors:
            raise self._refusal(context, "it revealed its shares for another list of survivors")
        # Pair keys and seed of one client together are its row.
        if not set(record.lost).isdisjoint(alive):
            raise self._refusal(
                context, "it revealed its pair key with a client whose share it is asked for"
            )
        if alive is not context.members and not set(alive) <= set(context.members):
            raise self._refusal(context, "a survivor is no member")
        self._check_survivors(context, record, alive)
        # also of a list that was settled before any share of it was revealed
        self._check_same_rows(context, alive == self._earlier(context, alive))
        if context.values:
            self.state.summed[context.values] = alive
        if record.survivors is None:
            self._store(context, replace(record, survivors=alive))
        if alive is context.members:
            return record.holders
        return tuple(owner for owner in record.holders if owner in alive)

    def settle(self, call: int, survivors: Sequence[int]) -> bool:
        """Return whether the last sum of a call may be over some clients, and hold it to these.

        Shares for that sum are revealed for the same list only, also where the client learns it
        before it is asked for them.

        Args:
            call: number of the call.
            survivors: the clients whose rows are said to be in the sum.
        """
        attempts = self.state.attempts.get(call)
        if not attempts:
            return False
        number = max(attempts)
        record = attempts[number]
        alive = tuple(sorted(set(survivors)))
        if record.survivors is not None:
            return alive == record.survivors
        if self._client not in alive or set(alive) & set(record.lost):
            return False
        attempts[number] = replace(record, survivors=alive)
        return True

    def _check_members(self, context: SumContext) -> None:
        members = len(context.members)
        if self._client not in context.members:
            raise self._refusal(context, "it is no member")
        if members < self._least_survivors:
            raise self._refusal(
                context, f"its {members} members are fewer than {self._least_survivors}"
            )

    def _check_threshold(self, context: SumContext, graph: Graph) -> None:
        holders = graph.degree + 1
        margin = 2 * context.threshold - holders
        minimum = 1
        if self._active_server:
            minimum = self._minimum
        if margin < minimum:
            raise self._refusal(
                context,
                f"its threshold {context.threshold} is too low for {holders} holders and a "
                f"minimum of {self._minimum} clients",
            )

    def _check_earlier_attempts(
        self, context: SumContext, record: Attempt, attempts: Mapping[int, Attempt]
    ) -> None:
        """Raise PolicyError unless a new attempt at a call may replace the earlier ones."""
        for number, earlier in attempts.items():
            # Going back would let the server choose which of two attempts to open.
            if number > context.attempt:
                raise self._refusal(context, f"it took part in attempt {number} already")
            if earlier.survivors is not None:
                raise self._refusal(context, f"it revealed its shares in attempt {number}")
            # Counting holders over both attempts needs as many shares, from the same holders.
            lower = record.threshold < earlier.threshold
            if lower or not set(record.holders) <= set(earlier.holders):
                raise self._refusal(
                    context,
                    f"its threshold is lower, or its neighbours are others, than in attempt "
                    f"{number}",
                )

    def _check_survivors(
        self, context: SumContext, record: Attempt, survivors: Sequence[int]
    ) -> None:
        """Raise PolicyError for survivors that are too few, or that lack the client itself."""
        if self._client not in survivors:
            raise self._refusal(context, "its own row was called lost")
        minimum = max(self._least_survivors, record.least)
        if len(survivors) < minimum or 2 * len(survivors) <= len(context.members):
            raise self._refusal(
                context,
                f"{len(survivors)} of {len(context.members)} members survived, and "
                f"{minimum} and a majority must",
            )
        if survivors is context.members:
            return
        reachable = len(set(record.holders).intersection(survivors))
        if reachable < record.threshold:
            raise self._refusal(
                context, f"{reachable} holders of its seed survived, and {record.threshold} must"
            )

    def _earlier(self, context: SumContext, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return the survivors of an earlier sum of the same rows; the default without one."""
        if not context.values:
            return default
        return self.state.summed.get(context.values, default)

    def _check_same_rows(self, context: SumContext, allowed: bool) -> None:
        """Raise PolicyError unless a list goes with that of an earlier sum of the same rows."""
        if not allowed:
            raise self._refusal(
                context, "an earlier sum of the same rows is over another list of survivors"
            )

    def _record(self, context: SumContext) -> Attempt:
        """Return the record of an attempt that the client took part in last.

        Args:
            context: the attempt.

        Raises:
            PolicyError: the client did not take part in it, or took part in a later one.
        """
        attempts = self.state.attempts.get(context.call, {})
        record = attempts.get(context.attempt)
        if record is None or record.hash != context.hash:
            raise self._refusal(context, "it did not take part with these members and keys")
        if max(attempts) != context.attempt:
            raise self._refusal(context, "it took part in a later attempt")
        return record

    def _store(self, context: SumContext, record: Attempt) -> None:
        self.state.attempts[context.call][context.attempt] = record

    def _refusal(self, context: SumContext, reason: str) -> PolicyError:
        return PolicyError(
            f"client {self._client} refuses the secure sum of call {context.call}, attempt "
            f"{context.attempt}: {reason}"
        )


def _check_graph(context: SumContext, graph: Graph) -> None:
    """Raise UsageError for a graph of other members or another threshold."""
    if graph.members != context.members or graph.threshold != context.threshold:
        raise UsageError("the graph of a secure sum has its members and its threshold: build it")
