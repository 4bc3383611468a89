"""What the primitives of secure sums cost beside a copy of the row, in processor time.

python -m benchmarks.secure_sum_primitives [numbers, 1000000] [repetitions, 9]

Every time is the median of processor seconds of this process, on one thread, and every ratio is to
a copy of the int32 row with numpy in the same process. Shares and keys do not depend on the row.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.table import machine
from securecluster.core.randomness import Randomness
from securecluster.messaging import wire
from securecluster.messaging.messages import Ack, Empty, Header, Picks, Rows, format_ids
from securecluster.privacy.dp.accounting import epsilon, skellam_epsilon
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.dp.skellam_mechanism import SkellamMechanism, rounded
from securecluster.privacy.dp.skellam_noise import table
from securecluster.privacy.fixed_point import FixedPoint
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.identities import SIGNATURE
from securecluster.protections.key_exchange import SumKey, SumKeys
from securecluster.protections.pads.client import NextAttempt, PairsRequest, padded_class
from securecluster.protections.pads.pair_pads import PairContext, add_pair_pads
from securecluster.protections.secure_sums import shamir
from securecluster.protections.secure_sums.double_mask import (
    ClientMasks,
    MaskedSum,
    SumContext,
    Unmasking,
)
from securecluster.protections.secure_sums.graph import Graph, build_graph, least_survivors
from securecluster.protections.secure_sums.shares import ShareSeal
from securecluster.protocols.oneshot.client import RelevanceRow

# of which a secure sum is unmasked, by its members
SURVIVORS = partial(least_survivors, minimum=2)

MEMBERS = 100
BOUND = 4.0
MULTIPLIER = 1.0
DELTA = 1e-5
RUN = b"benchmark"
Work = Callable[[], object]


def key(number: int) -> bytes:
    """Return 32 bytes that stand for a secret."""
    return bytes(14) + number.to_bytes(4, "big") + bytes(14)


def seconds(work: Work, repetitions: int) -> float:
    """Return the median processor time of one execution."""
    work()
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


def on_rows(numbers: int) -> dict[str, Work]:
    """Return what is done to a row.

    Args:
        numbers: numbers of the row.
    """
    floats = torch.randn(numbers).clamp(-BOUND, BOUND)
    point = FixedPoint(BOUND, MEMBERS)
    wide = FixedPoint(BOUND, MEMBERS, 64)
    row = point.encode(floats)
    row64 = wide.encode(floats)
    source = row.numpy()
    target = np.empty(numbers, np.int32)
    total = torch.zeros_like(row)
    streams = [(key(k), 1) for k in range(MEMBERS)]

    def copy() -> None:
        np.copyto(target, source)

    return {
        "numpy copy of the int32 row": copy,
        "add a row to a sum": lambda: total.add_(row),
        "encode float32 to int32": lambda: point.encode(floats),
        "encode, saturated": lambda: point.encode(floats[None], saturate=True),
        "encode float32 to int64": lambda: wide.encode(floats),
        "decode int32 to float32": lambda: point.decode(row, MEMBERS),
        "one pad, int32": lambda: pads.add_pad(row, streams[0][0], 1),
        "one pad, int64": lambda: pads.add_pad(row64, streams[0][0], 1),
        f"{MEMBERS} pads, int32": lambda: pads.add_pads(row, streams),
    }


def on_keys() -> dict[str, Work]:
    """Return what is done once for each pair, call or secret, whatever the row."""
    own = pads.KeyPair(key(1))
    peer = pads.KeyPair(key(2))
    members = pads.members_hash(range(MEMBERS))
    holders = range(1, MEMBERS + 1)
    source = pads.byte_source(key(3))

    def agree() -> bytes:
        return own.pair_key(0, 1, peer.public, RUN, "sums")

    def share() -> list[shamir.Share]:
        return shamir.share(key(4), holders, 52, source)

    pair = agree()
    shares = share()

    def recover() -> None:
        shamir.lagrange_weights.cache_clear()
        shamir.recover(shares[:52])

    return {
        "key of a pair (X25519, HKDF)": agree,
        "key of a call (HKDF)": lambda: pads.call_key(pair, 1, 0, members),
        "box of a share (AES-SIV)": lambda: ShareSeal(pair, RUN).close([1], members, 0, 1),
        f"share a seed, n = {MEMBERS}": share,
        f"recover a seed, n = {MEMBERS}": recover,
        "recover with weights that are kept": lambda: shamir.recover(shares[:52]),
    }


def on_noise(numbers: int) -> dict[str, Work]:
    """Return how a client adds noise to its row: a share in a secure sum, and all of it.

    Args:
        numbers: numbers of a row.
    """
    row = torch.randn(numbers)
    row /= 1.01 * row.norm()
    streams = NoiseStreams.derived(Randomness(0), "run")
    mechanism = SkellamMechanism(1.0, MULTIPLIER, SURVIVORS, streams)
    plan = mechanism.plan(numbers, MEMBERS)
    total = torch.zeros(numbers, dtype=torch.int32)

    def new_table() -> None:
        table.cache_clear()
        table(plan.draw_variance)

    return {
        "round to the grid of noised sums": lambda: rounded(row, plan),
        "round, and add a share of Skellam noise": lambda: mechanism.encode(
            row, plan, 0, "delta", 1
        ),
        "table of Skellam noise, once a run": new_table,
        "Gaussian noise of placement local": lambda: streams.noised(
            0, "delta", 1, row, MULTIPLIER, 1.0
        ),
        "decode a noised sum": lambda: mechanism.decode(total, plan),
    }


def prices(numbers: int) -> list[tuple[int, float, float, float]]:
    """Return what noised sums cost at one noise multiplier.

    Args:
        numbers: numbers of a row.

    Returns:
        Numbers of rounds, and ε of Skellam noise, of Gaussian noise by Rényi divergences, and of
        Gaussian noise exactly.
    """
    plan = SkellamMechanism(1.0, MULTIPLIER, SURVIVORS).plan(numbers, MEMBERS)
    release = plan.release(plan.shares)
    found = []
    for rounds in (1, 3, 10, 30, 100):
        skellam = skellam_epsilon([], [(release, rounds)], DELTA).epsilon
        gaussian = epsilon([(MULTIPLIER, 1.0, rounds)], DELTA)
        found.append((rounds, skellam, gaussian.rdp, gaussian.epsilon))
    return found


def clients_of(context: SumContext, graph: Graph) -> list[ClientMasks]:
    """Return the masks of every member of a sum, after an agreement on keys."""
    pairs = [pads.KeyPair(key(k)) for k in range(MEMBERS)]
    clients = []
    for i, own in enumerate(pairs):
        keys = {}
        for j in graph.neighbours(i):
            public = pairs[j].public
            keys[j] = own.pair_key(i, j, public, RUN, "sums")
        clients.append(ClientMasks(i, key(i), keys, context, graph))
    return clients


def on_sums(numbers: int) -> dict[str, Work]:
    """Return a client's and the server's work on one sum, and a plain sum beside them.

    Args:
        numbers: numbers of a row.
    """
    graph = build_graph(range(MEMBERS), b"seed", minimum=3, colluding=0.0)
    members = tuple(range(MEMBERS))
    context = SumContext(RUN, "train", 0, 0, members, graph.threshold)
    clients = clients_of(context, graph)
    boxes = [client.boxes() for client in clients]
    point = FixedPoint(BOUND, MEMBERS)
    floats = torch.randn(numbers).clamp(-BOUND, BOUND)
    commitments = {i: client.commitment() for i, client in enumerate(clients)}
    unmasking = Unmasking(context, graph, range(MEMBERS), commitments)
    for j, client in enumerate(clients[: graph.threshold]):
        received = {i: boxes[i][j] for i in graph.neighbours(j)}
        unmasking.add_shares(j, client.shares(range(MEMBERS), received))
    seeds = unmasking.seeds()
    masked = torch.zeros(numbers, dtype=torch.int32)

    def client_sends() -> None:
        fresh = ClientMasks(0, key(0), clients[0]._pair_keys, context, graph)
        fresh.mask(point.encode(floats), "delta")
        fresh.boxes()

    def server_sums() -> None:
        total = MaskedSum(context, graph, "delta", (numbers,), torch.int32)
        for i in range(MEMBERS):
            total.add(i, masked)
        unmasking.seeds()
        total.unmask(seeds, {})

    def plain_sum() -> None:
        total = torch.zeros(numbers)
        for _ in range(MEMBERS):
            total.add_(floats)

    return {
        f"client's row and boxes, m = {MEMBERS}": client_sends,
        f"server's sum and unmasking, m = {MEMBERS}": server_sums,
        f"plain sum of float32 rows, m = {MEMBERS}": plain_sum,
    }


def on_pairs() -> dict[str, Work]:
    """Return a client's and the server's work on rows of pairs, which have a number per client."""
    members = tuple(range(MEMBERS))
    context = PairContext(RUN, "relevance", 0, 0, members)
    point = FixedPoint(1.0, 2)
    floats = torch.rand(1, MEMBERS)
    pairs = [pads.KeyPair(key(k)) for k in members]
    keys = {}
    for peer in members[1:]:
        public = pairs[peer].public
        keys[peer] = pairs[0].pair_key(0, peer, public, RUN, "pads")
    rows = torch.zeros(MEMBERS, MEMBERS, dtype=torch.int32)

    def client_pads() -> None:
        row = point.encode(floats)[0]
        add_pair_pads(row, 0, keys, context, "row")

    def server_adds() -> None:
        point.decode((rows + rows.T).contiguous(), 2, torch.float64)

    return {
        f"client's row of pairs, m = {MEMBERS}": client_pads,
        f"server's R, m = {MEMBERS}": server_adds,
    }


def bytes_of_pairs() -> dict[str, int]:
    """Return the bytes that a client sends and receives for one call for rows of pairs.

    The rest of the request, such as eigenvectors, is the same without pads.
    """
    group = format_ids(range(MEMBERS))

    def header(method: str, verb: str, sender: str, recipient: str) -> Header:
        return Header("c" * 32, method, verb, 1, 5, sender, recipient, MEMBERS, group)

    def size(method: str, verb: str, query: Any, reply: Any) -> tuple[int, int]:
        down = wire.size(header(method, verb, "server", "client/99"), query)
        up = wire.size(header(method, verb, "client/99", "server"), reply)
        return up, down

    row = Rows(torch.zeros(1, MEMBERS, dtype=torch.int32))
    padded_row = padded_class(RelevanceRow, 32)
    row_up, row_down = size("relevance", "pairs", Empty(), padded_row(row))
    attempt = NextAttempt(Rows(torch.zeros(1, dtype=torch.int64)))
    request = PairsRequest("relevance")
    attempt_up, attempt_down = size("pair_attempt", "gather", request, attempt)

    def octets(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.uint8)

    offer = SumKey(Rows(octets(1, pads.KEY)), Rows(octets(1, SIGNATURE)))
    picks = (tuple(range(MEMBERS)),)
    keys = SumKeys(
        Picks(torch.arange(MEMBERS), picks),
        Picks(octets(MEMBERS, pads.KEY), picks),
        Picks(octets(MEMBERS, SIGNATURE), picks),
    )
    offer_up, offer_down = size("sum_offer", "gather", Empty(), offer)
    keys_up, keys_down = size("sum_keys", "gather", keys, Ack())
    return {
        "row of pairs, up (pads alone: 4 a client)": row_up,
        "attempt, up": attempt_up,
        "row and attempt, down, without the query": row_down + attempt_down,
        "keys, once a run, up": offer_up + keys_up,
        "keys, once a run, down": offer_down + keys_down,
    }


def main(arguments: list[str]) -> None:
    """Print the table.

    Args:
        arguments: numbers of a row, and repetitions.
    """
    numbers = int(arguments[0]) if arguments else 1_000_000
    repetitions = int(arguments[1]) if len(arguments) > 1 else 9
    torch.set_num_threads(1)
    print(machine())
    heading = f"work on a row of {numbers:,} numbers"
    print(f"{heading:48}{'CPU ms':>10}{'copies':>10}")
    works = {**on_rows(numbers), **on_noise(numbers), **on_keys(), **on_sums(numbers), **on_pairs()}
    copy = 0.0
    for name, work in works.items():
        taken = seconds(work, repetitions)
        copy = copy or taken  # the first work is the copy
        milliseconds = 1e3 * taken
        copies = taken / copy
        print(f"{name:48}{milliseconds:10.3f}{copies:10.2f}")
    heading = f"bytes of a client, m = {MEMBERS}"
    print(f"{heading:48}{'bytes':>10}")
    for name, count in bytes_of_pairs().items():
        print(f"{name:48}{count:10,}")
    print(f"epsilon at noise {MULTIPLIER:g} and delta {DELTA:g}, m = {MEMBERS}")
    print(f"{'rounds':>6}{'Skellam':>10}{'Gaussian, RDP':>16}{'Gaussian':>10}")
    for rounds, skellam, renyi, exact in prices(numbers):
        print(f"{rounds:6}{skellam:10.3f}{renyi:16.3f}{exact:10.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
