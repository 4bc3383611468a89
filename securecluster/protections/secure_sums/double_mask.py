"""Secure sums with double masking (Bonawitz et al. 2017), on the graph of Bell et al. 2020.

A client sends

    y_i = encode(x_i) + PRG(b_i) + Σ_{j > i} PRG(k_ij) - Σ_{j < i} PRG(k_ij)   in Z_2^32 or Z_2^64,

where j are its neighbours, k_ij the key of the pair for this call and the row's origin, and b_i the
seed of its self mask (Bonawitz et al. 2017, Section 4). It seals Shamir shares of b_i to its
neighbours, in the same message. Then there are two phases:

1. Only where clients were lost: the others reveal their k_ij with them. Who does not reply is lost,
   too, and its row is left out, so the phase is repeated with the larger list.
2. The survivors reveal their shares of each other's b_i, of which a threshold is enough.

The pads between survivors cancel. `UnmaskingGuard` is what a client insists on before it reveals
anything. (Two deviations from the papers: keys of pairs for each call are revealed by their owners,
so that the X25519 keys last a run and no share of them exists; and shares travel with the row.)
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, islice

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError, SecureClusterError, UsageError
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.pads import pad_sign
from securecluster.protections.secure_sums import shamir
from securecluster.protections.secure_sums.graph import Graph
from securecluster.protections.secure_sums.shares import ShareSeal

# of the shares of a seed, which are tried where some were altered
MOST_SUBSETS = 1000
# bytes of the tag of a row's origin
TAG = 16

# key of a pair, hash of the context, and origin of the row
CallEnds = tuple[bytes, bytes, bytes]


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
            "securecluster sum context v1",
            self.run,
            self.purpose,
            self.call,
            self.attempt,
            self.members_hash,
            self.threshold,
            self.values,
        )
        return hashlib.sha256(text).digest()


def coordinate(client: int) -> int:
    """Return the x-coordinate of the shares that a client holds.

    Args:
        client: id of the client, from 0.
    """
    # The polynomial is the seed itself at zero: nobody holds that point.
    return client + 1


def commitment(seed: bytes, context: SumContext) -> bytes:
    """Return a commitment to the seed of a self mask, 32 bytes.

    It hides the seed, which is uniform, and no other seed has the same one.

    Args:
        seed: 32 secret bytes.
        context: the attempt that the seed is for.
    """
    info = pads.transcript("securecluster seed commitment v1", context.hash)
    return pads.expand(seed, info)


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
        pair_keys: neighbour -> key of the pair (`KeyPair.pair_key`).
        context: the attempt.
        graph: graph of its members.
        seal: returns the seal of a pair's key; None makes it anew.
        call_keys: (key of a pair, hash of the context, origin) -> key of its pads in this call, as
            another client of the machine has derived it; completed in place.
        origin: digest of the public numbers that the row follows from. Pads cancel between rows of
            one origin only.

    Raises:
        UsageError: a graph of other members or another threshold, or a neighbour without a key.
    """

    def __init__(  # noqa: PLR0913 (all that the masks of one attempt follow from)
        self,
        client: int,
        secret: bytes,
        pair_keys: Mapping[int, bytes],
        context: SumContext,
        graph: Graph,
        seal: Callable[[bytes], ShareSeal] | None = None,
        call_keys: dict[CallEnds, bytes] | None = None,
        origin: bytes = b"",
    ) -> None:
        _check_graph(context, graph)
        self.client = client
        self.neighbours = graph.neighbours(client)
        missing = [peer for peer in self.neighbours if peer not in pair_keys]
        if missing:
            raise UsageError(
                f"client {client} has no key with client {missing[0]}: agree on keys first"
            )
        self._context = context
        self._secret = secret
        # Keys of clients that are no neighbours stay out of reach of a request to reveal them.
        self._pair_keys = {peer: pair_keys[peer] for peer in self.neighbours}
        self._seal_of = seal or partial(ShareSeal, run=context.run)
        self._derived = {} if call_keys is None else call_keys
        self._origin = origin
        self._seed = self._derive("securecluster self mask v1")

    def __repr__(self) -> str:
        return f"ClientMasks(client={self.client}, keys hidden)"

    def mask(self, rows: torch.Tensor, field: str) -> None:
        """Add the client's self mask and pads to an encoded row, in place.

        Args:
            rows: contiguous int32 or int64 row (…) on the CPU.
            field: name of the field; each field of a reply has masks of its own.
        """
        mask_table([self], rows[None], field)

    def commitment(self) -> bytes:
        """Return the commitment to the seed of the self mask, 32 bytes, for the server."""
        return commitment(self._seed, self._context)

    def boxes(self) -> dict[int, bytes]:
        """Return the sealed share of the seed for each neighbour, by its id."""
        boxes = {}
        # The own share needs no box: it never leaves before the client may reveal it.
        for client in self.neighbours:
            seal = self._seal(client)
            value = self._own_share(client)
            boxes[client] = seal.close([value], self._context.hash, self.client, client)
        return boxes

    def pad_keys(self, lost: Iterable[int]) -> dict[int, bytes]:
        """Return the call's pair keys with lost neighbours, by their ids.

        Args:
            lost: neighbours, as `UnmaskingGuard.reveal_pads` allows them.
        """
        return {peer: self._call_keys[peer] for peer in lost}

    def shares(self, owners: Iterable[int], boxes: Mapping[int, bytes]) -> dict[int, int]:
        """Return the client's shares of the seeds of survivors, by their owners.

        Args:
            owners: neighbours and the client itself, as `UnmaskingGuard.reveal_shares` allows them.
            boxes: owner -> box that it sealed for this client.

        Raises:
            FrameError: a box that is missing, was altered, or belongs to something else.
        """
        values = {}
        for owner in owners:
            if owner == self.client:
                # The client holds a share, too: fewer others are needed.
                values[owner] = self._own_share(owner)
                continue
            if owner not in boxes:
                raise FrameError(f"client {self.client} was sent no box of client {owner}")
            seal = self._seal(owner)
            opened = seal.open(boxes[owner], 1, self._context.hash, owner, self.client)
            values[owner] = opened[0]
        return values

    def _own_share(self, holder: int) -> int:
        """Return the value of a holder's share of the client's own seed."""
        return shamir.evaluate(self._polynomial, coordinate(holder))

    @cached_property
    def _polynomial(self) -> list[int]:
        """Return the polynomial that the shares of the client's own seed lie on."""
        # Derived coefficients: a client that is asked again deals the same shares, and not a second
        # set, which together with the first would need fewer holders.
        source = pads.byte_source(self._derive("securecluster share polynomial v1"))
        return shamir.polynomial(self._seed, self._context.threshold, source)

    def _derive(self, label: str) -> bytes:
        return pads.expand(self._secret, pads.transcript(label, self._context.hash))

    @cached_property
    def _call_keys(self) -> dict[int, bytes]:
        """Return the call's key of the pads with each neighbour."""
        context = self._context
        keys = {}
        for peer, pair_key in self._pair_keys.items():
            ends = (pair_key, context.hash, self._origin)
            if ends not in self._derived:
                self._derived[ends] = pads.call_key(
                    pair_key, context.call, context.attempt, context.members_hash, self._origin
                )
            keys[peer] = self._derived[ends]
        return keys

    def _seal(self, peer: int) -> ShareSeal:
        return self._seal_of(self._pair_keys[peer])


def mask_table(clients: Sequence[ClientMasks], table: torch.Tensor, field: str) -> None:
    """Add the masks of clients of one machine to their rows, in place.

    Each row becomes what it would be alone, but a pad of two of the clients is made once.

    Args:
        clients: masks of each row's client (k,).
        table: contiguous int32 or int64 rows (k, …) on the CPU.
        field: name of the field; each field of a reply has masks of its own.
    """
    # key of a pad -> rows that it is added to, with its signs
    places: dict[bytes, list[tuple[int, int]]] = {}
    pad_keys: dict[bytes, bytes] = {}  # by the call's key
    for row, masks in enumerate(clients):
        # The self mask keeps the row hidden if the server learns all of its pads: a row may come
        # late.
        places[pads.field_key(masks._seed, field)] = [(row, 1)]
        for peer, call_key in masks._call_keys.items():
            key = pad_keys.get(call_key)
            if key is None:
                key = pad_keys[call_key] = pads.field_key(call_key, field)
            places.setdefault(key, []).append((row, pad_sign(masks.client, peer)))
    pads.add_shared_pads(table, list(places.items()))


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
        streams = []
        for seed in seeds.values():
            streams.append((pads.field_key(seed, self._field), -1))
        for (survivor, lost), key in pad_keys.items():
            # Only the survivor added this pad: nothing of the lost row is in the sum.
            sign = -pad_sign(survivor, lost)
            streams.append((pads.field_key(key, self._field), sign))
        # The masked sum stays as it is: a caller may find a wrong key and ask again.
        unmasked = self._total.clone()
        pads.add_pads(unmasked, streams)
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
    ) -> None:
        _check_graph(context, graph)
        # Without its commitment, a seed from altered shares could not be told from the true one.
        missing = [client for client in survivors if client not in commitments]
        if missing:
            raise FrameError(f"client {missing[0]} sent no commitment to its seed")
        self._context = context
        self._graph = graph
        self._survivors = tuple(sorted(survivors))
        self._commitments = commitments
        self._replied: set[int] = set()
        self.altered: set[int] = set()
        self._shares: dict[int, list[shamir.Share]] = {owner: [] for owner in self._survivors}

    def expected_shares(self, holder: int) -> tuple[int, ...]:
        """Return the survivors whose shares a survivor is to reveal, ascending.

        Args:
            holder: id of the survivor.
        """
        holds = set(self._graph.holders(holder))
        return tuple(owner for owner in self._survivors if owner in holds)

    def add_shares(self, holder: int, values: Mapping[int, int]) -> None:
        """Store the shares that a survivor revealed.

        Args:
            holder: id of the survivor.
            values: owner of the seed -> value of the share.

        Raises:
            FrameError: a client that did not survive or replied before, or other owners than
                `expected_shares`.
        """
        if holder not in self._survivors or holder in self._replied:
            raise FrameError(
                f"client {holder} is no survivor of the secure sum, or revealed its shares twice"
            )
        # More would be shares of lost clients, whose pair keys are revealed: together they open a
        # row.
        if set(values) != set(self.expected_shares(holder)):
            raise FrameError(
                f"client {holder} revealed shares of other clients than it was asked for"
            )
        self._replied.add(holder)
        for owner, value in values.items():
            item = shamir.Share(
                secret=b"%d" % owner,
                threshold=self._context.threshold,
                x=coordinate(holder),
                y=value,
            )
            self._shares[owner].append(item)

    def seeds(self) -> dict[int, bytes]:
        """Return the seed of each survivor's self mask.

        Raises:
            TooFewSurvivorsError: fewer holders than the threshold replied for some survivor; no
                seed is returned then.
            FrameError: shares that do not give the seed that a survivor committed to.
        """
        # All seeds or none: some of them would give nothing but a reason to ask on.
        threshold = self._context.threshold
        for owner, shares in self._shares.items():
            if len(shares) < threshold:
                raise TooFewSurvivorsError(
                    f"the secure sum of call {self._context.call} cannot be unmasked: "
                    f"{len(shares)} holders of the seed of client {owner} replied, and "
                    f"{threshold} are needed"
                )
        seeds = {}
        for owner, shares in self._shares.items():
            # the same holders for all owners where possible, whose weights are computed once
            seed = self._seed(owner, shares)
            if seed is None:
                raise FrameError(
                    f"the shares of the seed of client {owner} do not give what it committed to: "
                    "a share was altered"
                )
            seeds[owner] = seed
        return seeds

    def _seed(self, owner: int, shares: Sequence[shamir.Share]) -> bytes | None:
        """Return the seed that an owner committed to; None if no shares give it.

        Where shares were altered, the others are looked for: one altered share after another is
        left out, first those of clients that altered another owner's.
        """
        suspects = {coordinate(client) for client in self.altered}
        ordered = sorted(shares, key=lambda item: (item.x in suspects, item.x))
        threshold = self._context.threshold
        seed = self._checked(owner, ordered[:threshold])
        if seed is not None:
            return seed
        subsets = (
            [item for item in ordered if item not in left_out][:threshold]
            for count in range(1, len(ordered) - threshold + 1)
            for left_out in combinations(ordered, count)
        )
        for chosen in islice(subsets, MOST_SUBSETS):
            seed = self._checked(owner, chosen)
            if seed is not None:
                self._find_altered(owner, ordered, chosen)
                return seed
        return None

    def _find_altered(
        self, owner: int, shares: Sequence[shamir.Share], fitting: Sequence[shamir.Share]
    ) -> None:
        """Note who revealed a share that does not fit those that give the seed.

        Clients that work together can make shares that give the seed and do not fit those of honest
        ones. Their polynomial has the seed in common with the true one, and so at most t - 2 honest
        shares. So nobody is named unless more shares fit than these and as many as do not fit.
        """
        holder_at = {coordinate(client): client for client in self._survivors}
        altered = {
            holder_at[item.x]
            for item in shares
            if item not in fitting and self._checked(owner, [item, *fitting[1:]]) is None
        }
        if len(shares) - len(altered) > self._context.threshold - 2 + len(altered):
            self.altered |= altered

    def _checked(self, owner: int, shares: Sequence[shamir.Share]) -> bytes | None:
        """Return the seed that some shares give, if its owner committed to it."""
        try:
            seed = shamir.recover(shares)
        except FrameError:
            return None
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
    has. (Clients of rows of two origins have two such keys, and neither ever reveals the other's.)
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
        self._check_same_rows(context, set(self._earlier(context, ())) <= set(context.members))
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
        alive = tuple(sorted(set(survivors)))
        if record.survivors is not None and alive != record.survivors:
            raise self._refusal(context, "it revealed its shares for another list of survivors")
        # Pair keys and seed of one client together are its row.
        if set(alive) & set(record.lost):
            raise self._refusal(
                context, "it revealed its pair key with a client whose share it is asked for"
            )
        if not set(alive) <= set(context.members):
            raise self._refusal(context, "a survivor is no member")
        self._check_survivors(context, record, alive)
        if record.survivors is None:
            self._check_same_rows(context, alive == self._earlier(context, alive))
            self._store(context, replace(record, survivors=alive))
            if context.values:
                self.state.summed[context.values] = alive
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
        alive = set(survivors)
        reachable = [holder for holder in record.holders if holder in alive]
        if len(reachable) < record.threshold:
            raise self._refusal(
                context,
                f"{len(reachable)} holders of its seed survived, and {record.threshold} must",
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
            raise self._refusal(context, "it did not take part with these members")
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
    if set(graph.ring) != set(context.members) or graph.threshold != context.threshold:
        raise UsageError("the graph of a secure sum has its members and its threshold: build it")
