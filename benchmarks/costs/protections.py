"""What hiding single replies costs: bytes and processor time of each aggregator and stage.

python -m benchmarks.costs.protections [--quick]

`privacy_stages.csv` has one client's and the server's work on one sum, by stage, for rows of
d = 10^4 … 10^7 numbers and m = 20, 100 and 1,000 members, without dropouts. A client's work is done
by its real masks, and the bytes are those of the real frames. The server's is of one row, in a
buffer of its own: a row is copied, added as in a plain sum, or added and unmasked.

`privacy_rounds.csv` has whole runs of FedAvg on digits with 20 clients, over each aggregator in
turn: bytes a client and round, processor time beside plain sums, and how far the models are apart.

Times are medians of processor seconds of this process, on one thread; only their ratios mean much.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.table import write
from securecluster import Federation, LabelSwap
from securecluster.messaging import wire
from securecluster.messaging.messages import Ack, Empty, Header, Picks, Rows, Shared, format_ids
from securecluster.privacy.fixed_point import FixedPoint
from securecluster.privacy.masking import pads
from securecluster.privacy.masking.identities import SIGNATURE
from securecluster.protections.key_exchange import SumKey, SumKeys
from securecluster.protections.key_tree import NODE
from securecluster.protections.secure_sums.double_mask import (
    TAG,
    ClientMasks,
    SumContext,
    covered_shares,
    deal,
)
from securecluster.protections.secure_sums.graph import Graph, Plan, build_graph
from securecluster.protections.secure_sums.messages import (
    BOX,
    LostMembers,
    SeedShares,
    masked_class,
)
from securecluster.protections.secure_sums.pair_secrets import Pairs, PairSecrets
from securecluster.protections.secure_sums.shamir import VALUE
from securecluster.protocols import FedAvg, Settings
from securecluster.protocols.common.messages import Update

NUMBERS = (10**4, 10**5, 10**6, 10**7)
MEMBERS = (20, 100, 1000)
BOUND = 4.0
RUN = b"benchmark"
# rows in memory at a time: more than fits a cache, so that a row comes from memory
BUFFERS = 16
# seeds whose pads are timed for the server's share of one row
SEEDS = 8
Row = dict[str, Any]


def key(number: int) -> bytes:
    """Return 32 bytes that stand for a secret."""
    return bytes(14) + number.to_bytes(4, "big") + bytes(14)


def seconds(work: Callable[[], object], repetitions: int) -> float:
    """Return the median processor time of one execution."""
    work()
    times = []
    for _ in range(repetitions):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return statistics.median(times)


class Member:
    """Client 0 of a secure sum, with everything that its neighbours sent it.

    Args:
        members: number of members.
    """

    def __init__(self, members: int) -> None:
        self.members = members
        self.graph: Graph = build_graph(range(members), b"seed", Plan(2))
        group = tuple(range(members))
        self.context = SumContext(RUN, "contribute", 1, 0, group, self.graph.threshold, b"root")
        self.pairs = [pads.KeyPair(key(k)) for k in range(members)]
        self.masks = self.masks_of(0)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Return the ids of the client's neighbours."""
        return tuple(self.graph.neighbours(0))

    def masks_of(self, client: int) -> ClientMasks:
        """Return the masks of one client, after an agreement on keys.

        Args:
            client: id of the client.
        """
        pairs = Pairs(self.graph, self._pair_key)
        return ClientMasks(client, key(client), self.context, self._secrets(pairs))

    def masks_anew(self) -> ClientMasks:
        """Return the masks of client 0 for a further call, for which nothing is derived yet."""
        pairs = self.masks._secrets.pairs
        return ClientMasks(0, key(0), self.context, self._secrets(pairs))

    def _secrets(self, pairs: Pairs) -> PairSecrets:
        return PairSecrets(pairs, self.context.hash, b"")

    def _pair_key(self, client: int, peer: int) -> bytes:
        public = self.pairs[peer].public
        return self.pairs[client].pair_key(client, peer, public, RUN, "secure sums")

    def agree(self) -> None:
        """Compute the keys with all neighbours, once a run."""
        self.masks_of(0)

    def deal(self) -> None:
        """Deal shares of a new seed to all neighbours."""
        masks = self.masks_anew()
        deal([masks])
        covered_shares([masks])


def frame_bytes(member: Member, numbers: int) -> dict[str, tuple[int, int]]:
    """Return the bytes (up, down) of one client's frames in one sum, by message.

    The request for the rows is the same for all aggregators, but for the list of members.

    Args:
        member: the client.
        numbers: numbers of a row.
    """
    members = member.members
    group = format_ids(range(members))
    degree = len(member.neighbours)

    def size(method: str, query: Any, reply: Any, text: str = group) -> tuple[int, int]:
        verb = "sum" if method == "contribute" else "gather"

        def header(sender: str, recipient: str) -> Header:
            return Header("c" * 32, method, verb, 40, 40, sender, recipient, members, text)

        client = f"client/{members - 1}"
        up = header(client, "server")
        down = header("server", client)
        return wire.size(up, reply), wire.size(down, query)

    def rows(*shape: int, dtype: torch.dtype) -> Rows:
        row = torch.empty(1, *shape, dtype=dtype, device="meta")
        return Rows(row)

    def ids(count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.int64, device="meta")

    def block(count: int, width: int) -> Picks:
        table = torch.empty(count, width, dtype=torch.uint8, device="meta")
        return Picks(table, (tuple(range(count)),))

    update = Update(rows(numbers, dtype=torch.float32), rows(dtype=torch.float32))
    masked_update = masked_class(Update, ("delta",))
    masked = masked_update(
        delta=rows(numbers, dtype=torch.int32),
        size=rows(dtype=torch.int64),
        commitment=rows(pads.KEY, dtype=torch.uint8),
        boxes=block(degree, BOX),
        origin=rows(TAG, dtype=torch.uint8),
    )
    survivors = LostMembers("contribute", Picks(ids(0), ((),)))
    public_key = rows(pads.KEY, dtype=torch.uint8)
    offer = SumKey(public_key, rows(SIGNATURE, dtype=torch.uint8))
    root = torch.empty(NODE, dtype=torch.uint8, device="meta")
    directory = SumKeys(
        root=Shared(root),
        path=block((members - 1).bit_length(), NODE),
        ids=Picks(ids(degree), (tuple(range(degree)),)),
        keys=block(degree, pads.KEY),
        signatures=block(degree, SIGNATURE),
    )
    shares = SeedShares(block(degree + 1, VALUE))
    offer_up, offer_down = size("sum_offer", Empty(), offer, "")
    keys_up, keys_down = size("sum_keys", directory, Ack(), "")
    return {
        "plain row": size("contribute", Empty(), update, ""),
        "masked row": size("contribute", Empty(), masked),
        "shares": size("reveal_shares", survivors, shares),
        "keys, once a run": (offer_up + keys_up, offer_down + keys_down),
    }


def stages(member: Member, numbers: int, repetitions: int) -> list[Row]:
    """Return one client's and the server's stages of one sum.

    Args:
        member: the client.
        numbers: numbers of a row.
        repetitions: of each stage.
    """
    timed = partial(seconds, repetitions=repetitions)
    point = FixedPoint(BOUND, member.members)
    floats = torch.randn(numbers).clamp(-BOUND, BOUND)
    encoded = point.encode(floats)
    masks = member.masks
    owners = sorted([0, *member.neighbours])

    sources = [torch.full((numbers,), k, dtype=torch.int32) for k in range(BUFFERS)]
    plain_sources = [floats.clone() for _ in range(BUFFERS)]
    targets = [torch.zeros(numbers, dtype=torch.int32) for _ in range(BUFFERS)]
    int_sum = torch.zeros(numbers, dtype=torch.int32)
    total_of_floats = torch.zeros(numbers)
    unmask = partial(pads.add_pads, int_sum, [(key(k), -1) for k in range(SEEDS)], "delta")

    def copy_rows() -> None:
        for source, target in zip(sources, targets, strict=True):
            np.copyto(target.numpy(), source.numpy())

    def add_rows() -> None:
        for source in sources:
            int_sum.add_(source)

    def add_plain_rows() -> None:
        for source in plain_sources:
            total_of_floats.add_(source)

    times = {
        ("client", "keys, once a run"): timed(member.agree),
        ("client", "encode"): timed(lambda: point.encode(floats)),
        ("client", "pads"): timed(lambda: member.masks_anew().mask(encoded, "delta")),
        ("client", "boxes"): timed(member.deal),
        ("client", "shares"): timed(lambda: masks.shares(owners)),
        ("server", "copy a row"): timed(copy_rows) / BUFFERS,
        ("server", "add a plain row"): timed(add_plain_rows) / BUFFERS,
        ("server", "add a masked row"): timed(add_rows) / BUFFERS,
        ("server", "unmask, for each row"): timed(unmask) / SEEDS,
    }
    copied = times["server", "copy a row"]
    rows = []
    for (party, stage), taken in times.items():
        rows.append(
            {
                "numbers": numbers,
                "members": member.members,
                "neighbours": len(member.neighbours),
                "party": party,
                "stage": stage,
                "cpu_ms": round(1e3 * taken, 4),
                "copies": round(taken / copied, 3),
            }
        )
    return rows


def summary(member: Member, numbers: int, stage_rows: list[Row]) -> Row:
    """Return one line for a size of rows and a number of members, beside plain sums.

    Args:
        member: the client.
        numbers: numbers of a row.
        stage_rows: rows of `stages`.
    """
    times = {row["stage"]: float(row["cpu_ms"]) for row in stage_rows}
    sent = frame_bytes(member, numbers)
    plain_up, _ = sent["plain row"]
    up = sent["masked row"][0] + sent["shares"][0]
    once, once_down = sent["keys, once a run"]
    masked = times["add a masked row"] + times["unmask, for each row"]
    client = times["encode"] + times["pads"] + times["boxes"] + times["shares"]
    return {
        "numbers": numbers,
        "members": member.members,
        "neighbours": len(member.neighbours),
        "aggregation": "secagg",
        "plain_up": plain_up,
        "up": up,
        "up_ratio": round(up / plain_up, 5),
        "up_ratio_with_keys": round((up + once) / plain_up, 5),
        "down_beside_request": sent["shares"][1] + sent["masked row"][1] - sent["plain row"][1],
        "keys_up": once,
        "keys_down": once_down,
        "client_ms": round(client, 3),
        "server_ms_a_row": round(masked, 4),
        "server_copies": round(masked / times["copy a row"], 3),
        "error": 2.0 ** -FixedPoint(BOUND, member.members).exponent / 2,
    }


# hyper-parameters of the whole runs
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "secagg": {"aggregation": "secagg"},
    "plain, noise": {"clip": 1.0, "noise": 1.0},
    "secagg, noise in shares": {
        "clip": 1.0,
        "noise": 1.0,
        "aggregation": "secagg",
        "placement": "distributed",
    },
}


def rounds(model: str) -> list[Row]:
    """Return whole runs of FedAvg over each aggregator in turn.

    Args:
        model: name of the network.
    """
    count = 5
    federation = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=2), clients=20, samples=40, seed=0
    )
    lines: list[Row] = []
    plain_seconds = 0.0
    plain_models: torch.Tensor | None = None
    for way, params in WAYS.items():
        start = time.process_time()
        fitted = FedAvg(rounds=count, model=model, **params).fit(
            federation, Settings(threads=1, keys_from_seed=True)
        )
        taken = time.process_time() - start
        models = fitted.client_models_.values
        if plain_models is None:
            plain_seconds = taken
            plain_models = models
        sent = fitted.bytes_
        difference: float | str = ""
        if not params.get("noise"):
            difference = float((models - plain_models).abs().max())
        lines.append(
            {
                "model": model,
                "numbers": models.shape[1],
                "clients": len(federation),
                "rounds": count,
                "way": way,
                "up": round(sent["up"] / len(federation) / count),
                "down": round(sent["down"] / len(federation) / count),
                "servers": round(sent["servers"] / count),
                "cpu_seconds": round(taken, 3),
                "cpu_ratio": round(taken / plain_seconds, 2),
                "apart": difference,
                "epsilon": fitted.ledger_.price(1e-5).epsilon,
            }
        )
    return lines


def main(arguments: list[str] | None = None) -> None:
    """Measure, print and store the tables.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smallest sizes, nothing stored")
    quick = parser.parse_args(arguments).quick
    torch.set_num_threads(1)
    member_counts: Sequence[int] = MEMBERS
    numbers: Sequence[int] = NUMBERS
    models = ["mlp-32", "mlp-200"]
    if quick:
        member_counts = MEMBERS[:1]
        numbers = NUMBERS[:1]
        models = ["linear"]
    detailed: list[Row] = []
    lines: list[Row] = []
    for members in member_counts:
        member = Member(members)
        for d in numbers:
            stage_rows = stages(member, d, _repetitions(members, d))
            detailed += stage_rows
            line = summary(member, d, stage_rows)
            lines.append(line)
            _print([line])
    runs: list[Row] = []
    for model in models:
        runs += rounds(model)
    _print(runs)
    if not quick:
        write("privacy_stages", detailed)
        write("privacy_sums", lines)
        write("privacy_rounds", runs)


def _repetitions(members: int, numbers: int) -> int:
    """Return how often stages are timed: less often where they take long."""
    if numbers * members > 10**8:
        return 3
    return 7


def _print(rows: Sequence[Row]) -> None:
    """Print rows, each on a line."""
    for row in rows:
        texts = [f"{name} {value}" for name, value in row.items()]
        print("  ".join(texts), flush=True)


if __name__ == "__main__":
    main()
