"""Secure sums among simulated parties: every pattern of dropouts, and every rule of the clients."""

from __future__ import annotations

import hashlib
import itertools
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster.core.serialization import pack, unpack
from securecluster.errors import FrameError, PolicyError, SecureClusterError, UsageError
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.pads import pad_sign
from securecluster.protections.secure_sums.double_mask import (
    ClientMasks,
    GuardState,
    MaskedSum,
    SumContext,
    TooFewSurvivorsError,
    Unmasking,
    UnmaskingGuard,
    broken_pairs,
    covered_shares,
    mask_tables,
    opened_shares,
)
from securecluster.protections.secure_sums.graph import Graph, all_pairs_threshold, complete_graph
from securecluster.protections.secure_sums.pair_secrets import Pairs, PairSecrets

RUN = b"the hash of a configuration"
FIELD = "delta"
WIDTH = 3

# when a client is lost
BEFORE_ROW, BEFORE_PADS, BEFORE_SHARES, NEVER = range(4)


def context_of(members: Sequence[int], threshold: int, **changes: Any) -> SumContext:
    told = {"run": RUN, "purpose": "train", "call": 4, "attempt": 0, "root": b"root"}
    return SumContext(members=tuple(members), threshold=threshold, **{**told, **changes})


def pair_keys(members: Sequence[int], run: bytes = RUN) -> dict[int, dict[int, bytes]]:
    """Agree on the keys of all pairs."""
    # X25519 ignores bits of the first and the last byte
    keys = {i: pads.KeyPair(bytes(14) + i.to_bytes(4, "big") + bytes(14)) for i in members}
    agreed: dict[int, dict[int, bytes]] = {i: {} for i in members}
    for i, j in itertools.permutations(members, 2):
        agreed[i][j] = keys[i].pair_key(i, j, keys[j].public, run, "sums")
    return agreed


def masks_of(
    client: int,
    secret: bytes,
    keys: dict[int, bytes],
    context: SumContext,
    graph: Graph,
    origin: bytes = b"",
) -> ClientMasks:
    """The masks of a client on a machine of its own."""
    pairs = Pairs(graph, lambda own, peer: keys[peer])
    return ClientMasks(client, secret, context, PairSecrets(pairs, context.hash, origin))


class Group:
    """Members of a sum with random rows in the ring, and what they send where nobody is lost."""

    def __init__(
        self, graph: Graph, dtype: torch.dtype = torch.int32, seed: int = 0, **changes: Any
    ) -> None:
        self.graph = graph
        self.members = tuple(sorted(graph.ring))
        self.context = context_of(self.members, graph.threshold, **changes)
        self.keys = keys = pair_keys(self.members)
        info = torch.iinfo(dtype)
        generator = torch.Generator().manual_seed(seed)
        self.rows, self.masked, self.masks = {}, {}, {}
        for i in self.members:
            secret = bytes([9]) * 28 + i.to_bytes(4, "big")
            masks = masks_of(i, secret, keys[i], self.context, graph)
            row = torch.randint(info.min, info.max, (WIDTH,), generator=generator, dtype=dtype)
            masked = row.clone()
            masks.mask(masked, FIELD)
            self.rows[i], self.masked[i], self.masks[i] = row, masked, masks
        self.boxes = {i: self.masks[i].boxes() for i in self.members}
        self.commitments = {i: self.masks[i].commitment() for i in self.members}
        self.shares = {j: self.masks[j].shares(graph.holders(j)) for j in self.members}

    def unmasking(self, survivors: Sequence[int]) -> Unmasking:
        return Unmasking(self.context, self.graph, survivors, self.commitments, self.boxes)

    def on_one_machine(self, clients: Sequence[int], origins: Sequence[bytes]) -> list[ClientMasks]:
        """The masks of some clients of one machine, by the origin of each."""
        pairs = Pairs(self.graph, lambda own, peer: self.keys[own][peer])
        of = {origin: PairSecrets(pairs, self.context.hash, origin) for origin in set(origins)}
        return [
            ClientMasks(i, self.masks[i].secret, self.context, of[origin])
            for i, origin in zip(clients, origins, strict=True)
        ]

    def server(self) -> MaskedSum:
        dtype = self.rows[self.members[0]].dtype
        return MaskedSum(self.context, self.graph, FIELD, (WIDTH,), dtype)

    def guards(self, minimum: int = 1, active: bool = False) -> dict[int, UnmaskingGuard]:
        found = {}
        for i in self.members:
            found[i] = UnmaskingGuard(i, minimum, active_server=active)
            found[i].take_part(self.context, self.graph)
        return found

    def true_sum(self, clients: Sequence[int]) -> torch.Tensor:
        """The sum in the ring, by integers of Python."""
        bits = torch.iinfo(self.rows[self.members[0]].dtype).bits
        rows = [self.rows[i].tolist() for i in clients]
        totals = [sum(column) for column in zip(*rows, strict=True)]
        wrapped = [(x + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1) for x in totals]
        return torch.tensor(wrapped, dtype=self.rows[self.members[0]].dtype)


def test_clients_of_one_machine_send_what_each_sends_alone() -> None:
    """Also clients that are in sums of other members, or of another attempt."""
    groups = [
        Group(complete_graph(range(5), 4)),
        Group(complete_graph(range(4), 3)),
        Group(complete_graph(range(5), 4), attempt=1),
    ]
    clients, rows, alone, boxes, opened = [], [], [], [], []
    for group in groups:
        chosen = (3, 0, 2)
        clients += group.on_one_machine(chosen, [b""] * 3)
        for i in chosen:
            rows.append(group.rows[i])
            alone.append(group.masked[i])
            boxes.append(group.boxes[i])
            opened.append(group.shares[i])
    table = torch.stack(rows)
    mask_tables(clients, {FIELD: table})
    assert torch.equal(table, torch.stack(alone))
    owners = [masks._graph.holders(masks.client) for masks in clients]
    for own, expected in (
        (covered_shares(clients), boxes),
        (opened_shares(clients, owners), opened),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(own, expected, strict=True))


@dataclass
class Outcome:
    survivors: tuple[int, ...]
    total: torch.Tensor


def run_sum(group: Group, lost_at: dict[int, int], minimum: int = 1) -> Outcome:
    """Run the two phases of unmasking, with clients that are lost at given times.

    Raises:
        PolicyError, TooFewSurvivorsError: as the parties do.
    """
    guards, server = group.guards(minimum), group.server()
    for i in group.members:
        if lost_at[i] > BEFORE_ROW:
            server.add(i, group.masked[i])
    keys: dict[int, dict[int, bytes]] = {}
    here = {i for i in server.survivors if lost_at[i] > BEFORE_PADS}
    while len(server.survivors) < len(group.members):
        lost = [i for i in group.members if i not in server.survivors]
        for i in sorted(here & set(server.survivors)):
            allowed = guards[i].reveal_pads(group.context, lost)
            keys[i] = group.masks[i].pad_keys(allowed)
        silent = [i for i in server.survivors if i not in here]
        if not silent:
            break
        for i in silent:
            server.discard(i, group.masked[i])
    # without anyone lost there is no first phase, so that who is lost then is lost in the second
    replying = [i for i in server.survivors if i in here and lost_at[i] > BEFORE_SHARES]
    unmasking = group.unmasking(server.survivors)
    for i in replying:
        owners = guards[i].reveal_shares(group.context, server.survivors)
        assert owners == unmasking.expected_shares(i)
        unmasking.add_shares(i, group.masks[i].shares(owners))
    seeds = unmasking.seeds()
    revealed = {(i, j): key for i in server.survivors for j, key in keys.get(i, {}).items()}
    return Outcome(server.survivors, server.unmask(seeds, revealed))


def can_unmask(group: Group, lost_at: dict[int, int]) -> bool:
    """Return whether enough holders of every survivor's seed stay to the end."""
    first_phase = BEFORE_ROW in lost_at.values()
    survivors = [
        i
        for i in group.members
        if lost_at[i] > BEFORE_PADS or (lost_at[i] == BEFORE_PADS and not first_phase)
    ]
    enough = 2 * len(survivors) > len(group.members)
    for i in survivors:
        holders = group.graph.holders(i)
        near = [j for j in holders if j in survivors]
        replying = [j for j in holders if lost_at[j] == NEVER]
        enough = enough and min(len(near), len(replying)) >= group.graph.threshold
    return enough and bool(survivors)


def check_pattern(group: Group, lost_at: dict[int, int]) -> bool:
    """Run a pattern; return whether it could be unmasked."""
    if not can_unmask(group, lost_at):
        with pytest.raises((PolicyError, TooFewSurvivorsError)):
            run_sum(group, lost_at)
        return False
    outcome = run_sum(group, lost_at)
    assert torch.equal(outcome.total, group.true_sum(outcome.survivors))
    staying = {i for i in group.members if lost_at[i] >= BEFORE_SHARES}
    assert staying <= set(outcome.survivors)
    assert all(lost_at[i] > BEFORE_ROW for i in outcome.survivors)
    return True


RINGS = (torch.int32, torch.int64)


@pytest.mark.parametrize(
    ("count", "dtype"), [*itertools.product((1, 2, 3, 4, 5), RINGS), (6, torch.int32)]
)
def test_masks_cancel_for_every_pattern_of_dropouts(count: int, dtype: torch.dtype) -> None:
    group = Group(complete_graph(range(3, 3 + count), count // 2 + 1), dtype)
    outcomes = []
    for times in itertools.product(range(4), repeat=count):
        outcomes.append(check_pattern(group, dict(zip(group.members, times, strict=True))))
    assert any(outcomes)
    assert not all(outcomes)


def random_group(draw: random.Random) -> Group:
    """A group of 7 to 40 members, all pairs or on a ring."""
    count = draw.randrange(7, 41)
    members = draw.sample(range(10_000), count)
    if draw.random() < 0.5:
        graph = complete_graph(members, draw.randrange(count // 2 + 1, count + 1))
    else:
        degree = 2 * draw.randrange(2, (count - 1) // 2 + 1)
        graph = Graph(tuple(members), degree, draw.randrange(degree // 2 + 1, degree + 2))
    return Group(graph, draw.choice([torch.int32, torch.int64]), draw.randrange(2**32))


def run_random_patterns(groups: int, seed: int) -> int:
    draw = random.Random(seed)
    unmasked = 0
    for _ in range(groups):
        group = random_group(draw)
        for _ in range(25):
            rate = draw.choice([0.0, 0.02, 0.1, 0.3])
            lost_at = {}
            for i in group.members:
                lost_at[i] = draw.randrange(3) if draw.random() < rate else NEVER
            unmasked += check_pattern(group, lost_at)
    return unmasked


@pytest.mark.exhaustive
def test_masks_cancel_for_two_hundred_random_patterns() -> None:
    assert 40 < run_random_patterns(8, 0) < 180


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", range(1, 11))
def test_masks_cancel_for_ten_thousand_random_patterns(seed: int) -> None:
    assert 200 < run_random_patterns(40, seed) < 900


def complete(count: int = 5, threshold: int = 3, **changes: Any) -> Group:
    return Group(complete_graph(range(count), threshold), **changes)


def test_a_masked_row_looks_like_nothing_it_masks() -> None:
    # 20,000 zeros: a uniform byte has a mean of 127.5 with standard error 0.26
    group = complete()
    row = torch.zeros(20_000, dtype=torch.int32)
    group.masks[1].mask(row, FIELD)
    data = torch.tensor(list(row.numpy().tobytes()), dtype=torch.float64)
    assert abs(data.mean() - 127.5) < 1.5
    other = torch.zeros(20_000, dtype=torch.int32)
    group.masks[1].mask(other, "size")
    assert (row == other).sum() < 10


@pytest.mark.parametrize("revealed", [1, 2])
def test_below_the_threshold_nothing_is_released(revealed: int) -> None:
    group = complete()
    server = group.server()
    for i in group.members:
        server.add(i, group.masked[i])
    unmasking = group.unmasking(server.survivors)
    for i in group.members[:revealed]:
        unmasking.add_shares(i, group.shares[i])
    with pytest.raises(TooFewSurvivorsError, match=f"{revealed} holders of the seed of client 0"):
        unmasking.seeds()
    # seeds that a server makes up do not give the sum, nor does leaving the self masks on
    total = group.true_sum(group.members)
    made_up = server.unmask(dict.fromkeys(group.members, bytes(32)), {})
    assert not (made_up == total).any()
    assert not (server._total == total).any()
    for absent in group.members:
        fewer = dict.fromkeys(set(group.members) - {absent}, bytes(32))
        with pytest.raises(FrameError, match="seeds of its survivors"):
            server.unmask(fewer, {})


def test_each_missing_seed_or_pad_leaves_a_uniform_sum() -> None:
    group = complete(5, 3)
    survivors = (0, 1, 2, 4)
    server = group.server()
    for i in survivors:
        server.add(i, group.masked[i])
    seeds = {i: group.masks[i]._seed for i in survivors}
    keys = {(i, 3): group.masks[i].pad_keys([3])[3] for i in survivors}
    right = group.true_sum(survivors)
    assert torch.equal(server.unmask(seeds, keys), right)
    for i in survivors:
        wrong_seed = {**seeds, i: bytes(32)}
        wrong_key = {**keys, (i, 3): bytes(32)}
        assert not (server.unmask(wrong_seed, keys) == right).any()
        assert not (server.unmask(seeds, wrong_key) == right).any()
        fewer = {pair: key for pair, key in keys.items() if pair != (i, 3)}
        with pytest.raises(FrameError, match="lost neighbours"):
            server.unmask(seeds, fewer)


def test_the_server_refuses_rows_that_do_not_belong_to_the_sum() -> None:
    group = complete()
    server = group.server()
    server.add(0, group.masked[0])
    for client, row in (
        (0, group.masked[0]),
        (9, group.masked[1]),
        (1, group.masked[1][:2]),
        (1, group.masked[1].long()),
    ):
        with pytest.raises(FrameError):
            server.add(client, row)
    with pytest.raises(FrameError, match="not in the secure sum"):
        server.discard(1, group.masked[1])
    server.discard(0, group.masked[0])
    assert server.survivors == ()
    with pytest.raises(TooFewSurvivorsError, match="no client survived"):
        server.unmask({}, {})


def test_altered_shares_are_named() -> None:
    group = complete()
    for holder, owner in itertools.product((0, 2), (1, 2)):
        unmasking = group.unmasking(group.members)
        for i in (0, 1, 2):
            revealed = group.shares[i].copy()
            if i == holder:
                revealed[owner, 5] ^= 1
            unmasking.add_shares(i, revealed)
        with pytest.raises(FrameError, match=f"seed of client {owner}"):
            unmasking.seeds()
        # one share more than the threshold gives the seed, and tells who altered one
        unmasking.add_shares(3, group.shares[3])
        assert unmasking.seeds() == {i: group.masks[i]._seed for i in group.members}
        assert unmasking.altered == {holder}


def test_shares_of_strangers_replays_and_other_owners_are_refused() -> None:
    group = complete()
    unmasking = group.unmasking((0, 1, 2, 3))
    mine = group.masks[0].shares((0, 1, 2, 3))
    assert np.array_equal(mine, group.shares[0][:4])
    for holder, revealed in ((4, mine), (0, group.shares[0]), (0, mine[:3])):
        with pytest.raises(FrameError):
            unmasking.add_shares(holder, revealed)
    unmasking.add_shares(0, mine)
    with pytest.raises(FrameError, match="twice"):
        unmasking.add_shares(0, mine)
    with pytest.raises(FrameError, match="no commitment"):
        Unmasking(group.context, group.graph, (0, 1), {0: bytes(32)}, group.boxes)


@pytest.mark.parametrize(
    "changes",
    [
        {"call": 5}, {"attempt": 1}, {"run": b"another"}, {"purpose": "evaluate"},
        {"values": "samples"}, {"threshold": 4},
    ],
)  # fmt: skip
def test_what_one_sum_reveals_opens_nothing_of_another(changes: dict[str, Any]) -> None:
    """Everything that clients can be brought to reveal of one sum, also where some are lost."""
    threshold = changes.pop("threshold", 3)
    opened, other = complete(), complete(5, threshold, **changes)
    if changes.get("run"):
        keys = pair_keys(range(5), b"another")
        for i in other.members:
            other.masks[i] = masks_of(i, other.masks[i].secret, keys[i], other.context, other.graph)
    told = revealed_values(opened)
    assert len(told) == 5 + 10 + 20 + 5  # seeds, keys of pads, covers and own shares
    assert told.isdisjoint(revealed_values(other))
    # the seeds of the one do not follow from its values and the boxes of the other
    unmasking = other.unmasking(other.members)
    for i in other.members:
        unmasking.add_shares(i, opened.shares[i])
    with pytest.raises(FrameError, match="a share was altered"):
        unmasking.seeds()
    # nor does a sum, or a single row, follow from seeds and keys of pads of the other
    seeds = {i: opened.masks[i]._seed for i in opened.members}
    server = other.server()
    for i in other.members[:4]:
        server.add(i, other.masked[i])
    pad_keys = {(i, 4): opened.masks[i].pad_keys([4])[4] for i in other.members[:4]}
    wrong = server.unmask({i: seeds[i] for i in other.members[:4]}, pad_keys)
    assert not (wrong == other.true_sum(other.members[:4])).any()


def revealed_values(group: Group) -> set[bytes]:
    """All values by which clients of a sum open anything of it."""
    values = {group.masks[i]._seed for i in group.members}
    for i in group.members:
        values |= set(group.masks[i].pad_keys(group.graph.neighbours(i)).values())
        values |= {row.tobytes() for row in group.shares[i]}
    return values


def test_a_box_is_its_share_under_a_cover_that_its_holder_alone_reveals() -> None:
    """By integers of Python, and SHAKE256 of `hashlib`."""
    group = complete()
    about = pads.purpose_hash("securecluster sum pair secrets v1", group.context.hash, b"")
    shares: dict[int, dict[int, list[int]]] = {}
    for owner in group.members:
        shares[owner] = {}
        for holder, box in zip(group.graph.neighbours(owner), group.boxes[owner], strict=True):
            made = hashlib.shake_256(group.keys[owner][holder] + about).digest(96)
            cover = made[32:64] if owner < holder else made[64:]
            assert group.shares[holder][owner].tobytes() == cover
            octets = bytes(a ^ b for a, b in zip(box.tobytes(), cover, strict=True))
            shares[owner][holder] = list(struct.unpack("<16H", octets))
        own = struct.unpack("<16H", group.shares[owner][owner].tobytes())
        shares[owner][owner] = list(own)
    # any three give the same polynomials, whose values at 0 the seed follows from
    for owner, of_holder in shares.items():
        secrets = set()
        for chosen in itertools.combinations(of_holder, 3):
            points = [(holder + 1, of_holder[holder]) for holder in chosen]
            secrets.add(tuple(at_zero([(x, ys[k]) for x, ys in points]) for k in range(16)))
        (secret,) = secrets
        seed_about = pads.purpose_hash("securecluster seed v2", group.context.hash)
        seed = hashlib.shake_256(struct.pack("<16H", *secret) + seed_about).digest(32)
        assert seed == group.masks[owner]._seed


def at_zero(points: list[tuple[int, int]]) -> int:
    """Lagrange's formula modulo 65521."""
    total = 0
    for x, y in points:
        term = y
        for other, _ in points:
            if other != x:
                term = term * other * pow(other - x, -1, 65521)
        total += term
    return total % 65521


def test_a_client_that_is_asked_again_sends_the_same_bytes() -> None:
    first, second = complete(), complete()
    assert all(torch.equal(first.masked[i], second.masked[i]) for i in first.members)
    for i in first.members:
        assert np.array_equal(first.boxes[i], second.boxes[i])
        assert np.array_equal(first.shares[i], second.shares[i])
    assert first.commitments == second.commitments


def test_signs_of_a_pair_cancel() -> None:
    for i, j in itertools.permutations(range(5), 2):
        assert pad_sign(i, j) == -pad_sign(j, i)
    # the lower id adds, on every version of the code
    assert pad_sign(0, 1) == 1


def test_broken_pairs_are_those_of_survivors_and_lost_neighbours() -> None:
    graph = Graph((0, 1, 2, 3, 4, 5), 2, 2)
    assert broken_pairs(graph, range(6)) == []
    assert set(broken_pairs(graph, (0, 1, 2, 3))) == {(0, 5), (3, 4)}


def test_contexts_and_graphs_that_do_not_fit_are_refused() -> None:
    for members in ((), (1, 0), (1, 1), (-1, 0)):
        with pytest.raises(FrameError, match="ascending"):
            context_of(members, 2)
    with pytest.raises(FrameError, match="not negative"):
        context_of((0, 1), 2, attempt=-1)
    context, keys = context_of(range(5), 3), pair_keys(range(5))
    for graph in (complete_graph(range(4), 3), complete_graph(range(5), 4)):
        with pytest.raises(UsageError, match="its members and its threshold"):
            masks_of(0, bytes(32), keys[0], context, graph)
        with pytest.raises(UsageError, match="its members and its threshold"):
            UnmaskingGuard(0, 1).take_part(context, graph)


def test_no_secret_is_printed() -> None:
    masks = complete().masks[1]
    assert masks._seed.hex()[:8] not in repr(masks)
    assert masks.secret.hex()[:8] not in repr(masks)
    assert masks._seed.hex()[:8] not in repr(masks._dealt)
    for hidden in (masks._secrets, masks._secrets.pairs):
        assert masks._secrets.pairs.keys[0].hex()[:8] not in repr(hidden)


# The clients' rules


MEMBERS = tuple(range(10))
CONTEXT = context_of(MEMBERS, 7)
GRAPH = complete_graph(MEMBERS, 7)


def guard(minimum: int = 3, **options: Any) -> UnmaskingGuard:
    return UnmaskingGuard(0, minimum, **options)


def taking_part(minimum: int = 3, **options: Any) -> UnmaskingGuard:
    found = guard(minimum, **options)
    found.take_part(CONTEXT, GRAPH)
    return found


def refuses(match: str, act: Callable[..., Any], *arguments: Any) -> None:
    with pytest.raises(PolicyError, match=match):
        act(*arguments)


def test_an_ordinary_sum_passes() -> None:
    client = taking_part()
    assert client.reveal_shares(CONTEXT, MEMBERS) == MEMBERS
    losing = taking_part()
    assert losing.reveal_pads(CONTEXT, [9]) == (9,)
    assert losing.reveal_pads(CONTEXT, [9, 4]) == (4, 9)
    assert losing.reveal_shares(CONTEXT, (0, 1, 2, 3, 5, 6, 7, 8)) == (0, 1, 2, 3, 5, 6, 7, 8)


def test_a_client_reveals_nothing_of_a_sum_that_it_took_no_part_in() -> None:
    client = taking_part()
    changes: dict[str, Any] = {"call": 5, "attempt": 1, "run": b"another", "purpose": "evaluate"}
    changes |= {"members": MEMBERS[:9], "threshold": 8}
    for name, value in changes.items():
        context = replace(CONTEXT, **{name: value})
        refuses("did not take part", client.reveal_pads, context, [9])
        refuses("did not take part", client.reveal_shares, context, MEMBERS)


def test_never_both_the_pads_and_the_share_of_one_client() -> None:
    client = taking_part()
    client.reveal_pads(CONTEXT, [9])
    refuses("pair key with a client", client.reveal_shares, CONTEXT, MEMBERS)
    client.reveal_shares(CONTEXT, MEMBERS[:9])
    # in the other order
    client = taking_part()
    client.reveal_shares(CONTEXT, MEMBERS[:9])
    refuses("another list", client.reveal_pads, CONTEXT, [8])
    refuses("another list", client.reveal_pads, CONTEXT, [9])


def test_shares_are_revealed_for_one_list_and_the_same_request_is_answered_alike() -> None:
    client = taking_part()
    client.reveal_pads(CONTEXT, [9])
    survivors = MEMBERS[:9]
    assert client.reveal_shares(CONTEXT, survivors) == survivors
    assert client.reveal_shares(CONTEXT, survivors[::-1]) == survivors
    assert client.reveal_pads(CONTEXT, [9]) == (9,)
    refuses("another list", client.reveal_shares, CONTEXT, survivors[:8])
    refuses("another list", client.reveal_shares, CONTEXT, MEMBERS)
    refuses("another list", client.reveal_pads, CONTEXT, [8, 9])
    assert client.state.attempts[4][0].survivors == survivors
    assert not client.state.summed


def test_an_earlier_sum_is_settled_once_with_its_client_and_without_the_lost() -> None:
    client = taking_part()
    call = CONTEXT.call
    assert not client.settle(call + 1, MEMBERS)  # it took no part
    assert not client.settle(call, MEMBERS[1:])  # its own row is not in it
    client.reveal_pads(CONTEXT, [9])
    assert not client.settle(call, MEMBERS)  # 9 was said to be lost, and its pad is known
    assert client.settle(call, MEMBERS[8::-1])
    assert client.settle(call, MEMBERS[:9])
    assert not client.settle(call, MEMBERS[:8])
    refuses("another list", client.reveal_shares, CONTEXT, MEMBERS[:8])
    assert client.reveal_shares(CONTEXT, MEMBERS[:9]) == MEMBERS[:9]


def test_clients_that_were_lost_do_not_come_back() -> None:
    client = taking_part()
    client.reveal_pads(CONTEXT, [8, 9])
    refuses("cannot come back", client.reveal_pads, CONTEXT, [9])
    refuses("cannot come back", client.reveal_pads, CONTEXT, [])


def test_too_few_survivors_are_refused() -> None:
    client = taking_part()
    refuses("6 holders of its seed survived, and 7 must", client.reveal_pads, CONTEXT, MEMBERS[6:])
    refuses("6 holders of its seed", client.reveal_shares, CONTEXT, MEMBERS[:6])
    assert client.reveal_shares(CONTEXT, MEMBERS[:7]) == MEMBERS[:7]


@pytest.mark.parametrize(("survivors", "passes"), [(7, False), (8, True)])
def test_planned_shares_of_noise_are_a_minimum_of_survivors(survivors: int, passes: bool) -> None:
    client = taking_part(survivors=8)
    if passes:
        client.reveal_shares(CONTEXT, MEMBERS[:survivors])
    else:
        refuses("7 of 10 members survived", client.reveal_shares, CONTEXT, MEMBERS[:survivors])
        refuses("7 of 10", client.reveal_pads, CONTEXT, MEMBERS[survivors:])


def test_strangers_are_refused_and_so_is_a_client_whose_own_row_was_called_lost() -> None:
    client = taking_part()
    refuses("a lost client is no member", client.reveal_pads, CONTEXT, [10])
    refuses("a survivor is no member", client.reveal_shares, CONTEXT, (*MEMBERS, 10))
    refuses("its own row", client.reveal_pads, CONTEXT, [0])
    refuses("its own row", client.reveal_shares, CONTEXT, MEMBERS[1:])


def test_a_refusal_changes_nothing() -> None:
    client = taking_part()
    before = repr(client.state)
    refuses("6 holders", client.reveal_pads, CONTEXT, MEMBERS[6:])
    refuses("6 holders", client.reveal_shares, CONTEXT, MEMBERS[:6])
    refuses("already", client.take_part, CONTEXT, GRAPH)
    assert repr(client.state) == before


def test_small_groups_and_foreign_ones_are_refused() -> None:
    small = context_of((0, 1), 2)
    refuses("its 2 members are fewer than 3", guard().take_part, small, complete_graph((0, 1), 2))
    foreign = context_of((1, 2, 3), 3)
    refuses("it is no member", guard().take_part, foreign, complete_graph((1, 2, 3), 3))
    with pytest.raises(UsageError, match="at least 1"):
        guard(0)


@pytest.mark.parametrize(
    ("threshold", "minimum", "active", "passes"),
    [
        (5, 1, False, False),  # not above n/2
        (6, 3, False, True),
        (6, 3, True, False),  # 2t - n = 2
        (7, 3, True, True),
        (6, 2, True, True),
        (7, 5, True, False),
    ],
)
def test_thresholds_that_the_server_could_cut_through_are_refused(
    threshold: int, minimum: int, active: bool, passes: bool
) -> None:
    context, graph = context_of(MEMBERS, threshold), complete_graph(MEMBERS, threshold)
    client = guard(minimum, active_server=active)
    if passes:
        client.take_part(context, graph)
    else:
        refuses(f"threshold {threshold} is too low", client.take_part, context, graph)


def test_one_row_is_masked_once_in_each_attempt() -> None:
    client = guard()
    client.take_part(CONTEXT, GRAPH, b"digest of the row")
    client.take_part(CONTEXT, GRAPH, b"digest of the row")
    refuses("already", client.take_part, CONTEXT, GRAPH, b"digest of another row")
    refuses("already", client.take_part, CONTEXT, GRAPH)
    fewer = replace(CONTEXT, members=MEMBERS[:9])
    graph = complete_graph(MEMBERS[:9], 7)
    refuses("already", client.take_part, fewer, graph, b"digest of the row")
    refuses("already", client.take_part, CONTEXT, GRAPH, b"digest of the row", 0, b"model")


def test_a_client_reveals_the_pads_that_it_has_added() -> None:
    client = guard()
    client.take_part(CONTEXT, GRAPH, b"digest of the row", origin=b"model")
    restored = guard()
    restored.state = unpack(pack(client.state), GuardState)
    assert restored.origin(CONTEXT) == b"model"
    later = replace(CONTEXT, call=CONTEXT.call + 1)
    restored.take_part(later, GRAPH, b"digest of the row", origin=b"next model")
    assert (restored.origin(CONTEXT), restored.origin(later)) == (b"model", b"next model")


@pytest.mark.parametrize("strays", [{3}, {0, 1}, {0, 1, 2, 3, 4}])
def test_pads_cancel_between_rows_of_one_origin_alone(strays: set[int]) -> None:
    group = Group(complete_graph(range(5), 4))
    origins = [b"another" if i in strays else b"one" for i in group.members]
    clients = group.on_one_machine(group.members, origins)
    table = torch.stack([group.rows[i] for i in group.members])
    mask_tables(clients, {FIELD: table})
    total = group.server()
    for i, row in zip(group.members, table, strict=True):
        total.add(i, row)
    seeds = {i: group.masks[i]._seed for i in group.members}
    same = torch.equal(total.unmask(seeds, {}), group.true_sum(group.members))
    assert same == (len(strays) == 5)
    # the others' sum is whole once the strays count as lost
    for i in strays:
        total.discard(i, table[i])
    left = [i for i in group.members if i not in strays]
    revealed = {(i, j): clients[i].pad_keys([j])[j] for i in left for j in strays}
    if left:
        found = total.unmask({i: seeds[i] for i in left}, revealed)
        assert torch.equal(found, group.true_sum(left))


def test_a_later_attempt_ends_the_earlier_ones() -> None:
    client = taking_part()
    client.reveal_pads(CONTEXT, [9])
    again = replace(CONTEXT, attempt=2)
    client.take_part(again, GRAPH)
    refuses("later attempt", client.reveal_pads, CONTEXT, [9])
    refuses("later attempt", client.reveal_shares, CONTEXT, MEMBERS[:9])
    refuses("attempt 2 already", client.take_part, replace(CONTEXT, attempt=1), GRAPH)
    # what was revealed of another attempt's pads does not matter
    assert client.reveal_shares(again, MEMBERS) == MEMBERS


def test_of_one_call_only_one_attempt_is_unmasked() -> None:
    client = taking_part()
    client.reveal_shares(CONTEXT, MEMBERS)
    refuses(
        "revealed its shares in attempt 0", client.take_part, replace(CONTEXT, attempt=1), GRAPH
    )


def test_a_later_attempt_lowers_no_threshold_and_adds_no_neighbour() -> None:
    client = taking_part()
    fewer = MEMBERS[:8]
    lower = replace(CONTEXT, attempt=1, members=fewer, threshold=6)
    refuses("threshold is lower", client.take_part, lower, complete_graph(fewer, 6))
    more = replace(CONTEXT, attempt=1, members=(*MEMBERS, 10))
    refuses("neighbours are others", client.take_part, more, complete_graph((*MEMBERS, 10), 7))
    client.take_part(replace(lower, threshold=7), complete_graph(fewer, 7))


def test_sums_of_the_same_rows_are_over_one_list_of_survivors() -> None:
    client = guard()
    first = replace(CONTEXT, values="samples")
    client.take_part(first, GRAPH)
    client.reveal_shares(first, MEMBERS[:9])
    assert client.state.summed == {"samples": MEMBERS[:9]}
    for left_out in (2, 3):
        members = MEMBERS[: 10 - left_out]
        context = replace(first, call=5, members=members)
        graph = complete_graph(members, 7)
        refuses("another list of survivors", client.take_part, context, graph)
        # other rows do not matter
        client.take_part(replace(context, values="", call=20 + left_out), graph)
        client.take_part(replace(context, values="losses", call=30 + left_out), graph)
    # members may be more, of whom the same ones survive
    again = replace(first, call=7)
    client.take_part(again, GRAPH)
    refuses("another list of survivors", client.reveal_shares, again, MEMBERS)
    refuses("another list of survivors", client.reveal_shares, again, MEMBERS[:8])
    assert client.reveal_shares(again, MEMBERS[:9]) == MEMBERS[:9]
    # nor by a list that is said to be an earlier sum's, before its shares are asked for
    settled = replace(first, call=9)
    client.take_part(settled, GRAPH)
    assert client.settle(9, MEMBERS[:8])
    refuses("another list of survivors", client.reveal_shares, settled, MEMBERS[:8])
    # a state that was stored holds the client to the list as well
    restored = guard()
    restored.state = client.state
    later = replace(first, call=8)
    restored.take_part(later, GRAPH)
    refuses("another list of survivors", restored.reveal_shares, later, MEMBERS)


def test_a_restored_guard_refuses_what_it_refused() -> None:
    client = taking_part()
    client.reveal_pads(CONTEXT, [9])
    client.reveal_shares(CONTEXT, MEMBERS[:9])
    restored = guard()
    restored.state = client.state
    refuses("another list", restored.reveal_shares, CONTEXT, MEMBERS)
    refuses("already", restored.take_part, CONTEXT, GRAPH)
    assert restored.reveal_shares(CONTEXT, MEMBERS[:9]) == MEMBERS[:9]


def test_guards_of_a_ring_look_at_their_own_neighbours() -> None:
    ring = Graph(tuple(range(20)), 6, 5)
    context = context_of(range(20), 5)
    client = guard(3)
    client.take_part(context, ring)
    near = (1, 2, 3, 17, 18, 19)
    assert ring.neighbours(0) == near
    half = range(4, 14)
    refuses("and a majority must", client.reveal_pads, context, half)
    refuses("and a majority must", client.reveal_shares, context, {*range(20)} - {*half})
    # 3 of 7 holders lost, and others far away
    refuses("4 holders of its seed", client.reveal_pads, context, (1, 2, 3))
    assert client.reveal_pads(context, (1, 2, 10, 11)) == (1, 2)
    survivors = (0, *range(3, 10), *range(12, 20))
    assert client.reveal_shares(context, survivors) == (0, 3, 17, 18, 19)


# A server that names other survivors to each client


def learned(count: int, threshold: int, named: dict[int, Sequence[int]]) -> list[set[int]]:
    """Return the sets of clients whose sums a server can compute from what guards let out."""
    graph = complete_graph(range(count), threshold)
    context = context_of(range(count), threshold)
    shares: dict[int, set[int]] = {i: set() for i in range(count)}
    pairs: set[tuple[int, int]] = set()
    for i, survivors in named.items():
        client = UnmaskingGuard(i, 1, active_server=False)
        client.take_part(context, graph)
        lost = [j for j in range(count) if j not in survivors]
        pairs |= {(i, j) for j in client.reveal_pads(context, lost)}
        for owner in client.reveal_shares(context, survivors):
            shares[owner].add(i)
    open_seeds = {i for i in range(count) if len(shares[i]) >= threshold}
    found = []
    for size in range(1, count + 1):
        for chosen in itertools.combinations(range(count), size):
            inside = set(chosen)
            outside = set(range(count)) - inside
            known = all((i, j) in pairs or (j, i) in pairs for i in inside for j in outside)
            if inside <= open_seeds and known:
                found.append(inside)
    return found


def test_a_majority_alone_lets_a_lying_server_isolate_a_client() -> None:
    # three clients, t = 2: each is named another list of two
    assert {1} in learned(3, 2, {0: (0, 2), 1: (0, 1), 2: (1, 2)})


@pytest.mark.few(3)
@pytest.mark.parametrize(("count", "threshold"), [(3, 2), (3, 3), (4, 3), (5, 3), (5, 4), (6, 5)])
def test_a_lying_server_learns_sums_and_differences_over_2t_minus_n_clients_only(
    count: int, threshold: int
) -> None:
    draw = random.Random(count * 10 + threshold)
    sizes = range(threshold, count + 1)
    chosen = [own for size in sizes for own in itertools.combinations(range(count), size)]
    lists = {i: [own for own in chosen if i in own] for i in range(count)}
    least = 2 * threshold - count
    smallest = count
    for _ in range(300):
        named = {i: draw.choice(lists[i]) for i in range(count)}
        found = learned(count, threshold, named)
        for first in found:
            smallest = min(smallest, len(first))
            for second in found:
                difference = first - second
                assert not difference or len(difference) >= least
    assert smallest >= least


def test_a_minimum_is_kept_from_a_lying_server() -> None:
    graph, context = complete_graph(range(3), 2), context_of(range(3), 2)
    refuses("too low", UnmaskingGuard(0, 3).take_part, context, graph)
    with pytest.raises(SecureClusterError):
        UnmaskingGuard(0, 2).take_part(context, graph)
    UnmaskingGuard(0, 3).take_part(context_of(range(3), 3), complete_graph(range(3), 3))


def connected(
    count: int, threshold: int, shares: dict[int, set[int]], pairs: set[tuple[int, int]]
) -> list[set[int]]:
    """Return the sets of clients whose sums follow from shares and pair keys."""
    seeds = {i for i in range(count) if len(shares[i]) >= threshold}
    found = []
    for size in range(1, len(seeds) + 1):
        for chosen in itertools.combinations(sorted(seeds), size):
            outside = set(range(count)).difference(chosen)
            if all((i, j) in pairs or (j, i) in pairs for i in chosen for j in outside):
                found.append(set(chosen))
    return found


def attacked(
    count: int, minimum: int, seed: int
) -> Iterator[tuple[dict[int, set[int]], set[tuple[int, int]]]]:
    """Ask clients at random for anything of two attempts at a sum, in any order.

    Yields:
        Of each attempt, who revealed a share of each client's seed, and the pairs (client, lost
        client) whose key was revealed.
    """
    draw = random.Random(seed)
    threshold = all_pairs_threshold(count, minimum)
    graph = complete_graph(range(count), threshold)
    guards = [UnmaskingGuard(i, minimum) for i in range(count)]
    attempts = [context_of(range(count), threshold, attempt=k) for k in range(2)]
    shares: list[dict[int, set[int]]] = [{i: set() for i in range(count)} for _ in attempts]
    pairs: list[set[tuple[int, int]]] = [set() for _ in attempts]
    victim = draw.randrange(count)
    for _ in range(60 * count):
        i, k = draw.randrange(count), draw.choice([0, 0, 0, 0, 1])
        gone = {j for j in range(count) if draw.random() < 0.25}
        gone ^= {victim} if draw.random() < 0.5 else set()
        step = draw.choice(["row", "pads", "shares", "shares"])
        with suppress(PolicyError):
            if step == "row":
                guards[i].take_part(attempts[k], graph, digest=bytes([i, k]))
            elif step == "pads":
                pairs[k] |= {(i, j) for j in guards[i].reveal_pads(attempts[k], sorted(gone))}
            else:
                alive = sorted(set(range(count)) - gone)
                for owner in guards[i].reveal_shares(attempts[k], alive):
                    shares[k][owner].add(i)
    yield from zip(shares, pairs, strict=True)


@pytest.mark.parametrize("seeds", [range(60), cases.exhaustive(range(60, 600))])
@pytest.mark.parametrize(("count", "minimum"), [(3, 2), (4, 2), (5, 3), (6, 2)])
def test_a_server_that_drops_clients_between_the_steps_as_it_likes_isolates_nobody(
    count: int, minimum: int, seeds: range
) -> None:
    threshold = all_pairs_threshold(count, minimum)
    sums = 0
    for seed in seeds:
        opened: list[set[int]] = []
        for shares, pairs in attacked(count, minimum, seed):
            # nobody told both of one client
            assert not {(i, j) for i, j in pairs if i in shares[j]}
            opened += connected(count, threshold, shares, pairs)
        for first in opened:
            assert len(first) >= minimum
            for second in opened:
                assert not first - second or len(first - second) >= minimum
        sums += len(opened)
    assert sums  # some attacks open a sum
