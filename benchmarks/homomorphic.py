"""Pads, BFV and CKKS side by side: bytes up, processor time and error.

python -m securecluster.benchmarks.homomorphic relevance [clients, 20 and 100]
python -m securecluster.benchmarks.homomorphic sums [numbers, 10000 100000 1000000]

Relevance is R of m clients: one row of a client, as pads or as ciphertexts of its part of all
pairs. Sums are of updates of d numbers: one row of a client, as plain float32, as masked int32 of
secure sums (without their keys and shares), or as ciphertexts. Times are processor seconds of one
thread, of encrypting one row, of adding one row to a sum, and of decrypting the sum; errors are the
largest ones of the sum, relative to the range of one client's number. CKKS is given twice: as it is
decrypted, and as the key authority releases it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from securecluster.benchmarks.table import machine
from securecluster.privacy.homomorphic.ciphers import CiphertextSum, PublicCipher, SecretCipher
from securecluster.privacy.homomorphic.envelopes import EnvelopeContext, open_envelope, seal
from securecluster.privacy.homomorphic.packing import FieldShape, Layout, pack, unpack
from securecluster.privacy.homomorphic.parameters import BFV, CKKS, default_parameters
from securecluster.privacy.secure_sum.fixed_point import FixedPoint
from securecluster.privacy.secure_sum.pads import KeyPair, add_pads
from securecluster.privacy.secure_sum.pair_pads import PairContext, add_pair_pads
from securecluster.runtime.pair_release import own_pairs

# the range of one client's number
BOUND = 1.0
SUMMED = 3
# pads of a row in a secure sum of 100 clients
PADS = 100
RELEVANCE_CLIENTS = (20, 100)
SUM_NUMBERS = (10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Cost:
    """What one way of forming a sum costs.

    Args:
        way: name of the way.
        up: bytes of one client's row, with its envelope.
        encrypt: processor seconds for one client's row.
        add: processor seconds to open the row of one client, and to add it.
        decrypt: processor seconds for the sum.
        error: largest error of the sum, relative to the range of one number.
    """

    way: str
    up: int
    encrypt: float
    add: float
    decrypt: float
    error: float


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return a result, and the processor seconds that it took."""
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def encrypted(scheme: str, rows: NDArray[np.float64], members: int) -> list[Cost]:
    """Return the costs of a sum of ciphertexts.

    Args:
        scheme: "bfv" or "ckks".
        rows: numbers of some clients (n, d), whose sum is formed.
        members: clients for which the fixed point is planned.
    """
    parameters = default_parameters(scheme)
    secret = SecretCipher.generate(parameters)
    public = PublicCipher(parameters, secret.public)
    codec = FixedPoint(BOUND, members)
    layout = Layout((FieldShape("delta", 32, rows.shape[1:]),))
    largest = {"delta": codec.largest}
    server = KeyPair(b"s" * 32)
    clients = [KeyPair(bytes([k + 1]) * 32) for k in range(len(rows))]
    context = EnvelopeContext(
        public.fingerprint, "run", "contribute", 1, 0, "client/0", "server", "0", str(layout)
    )

    def close(k: int) -> bytes:
        integers = codec.encode(torch.from_numpy(rows[k : k + 1])).numpy()
        slots = pack({"delta": integers}, layout, largest, parameters)
        ciphertexts = [public.encrypt(numbers) for numbers in slots]
        return seal(ciphertexts, clients[k], server.public, context)

    total = CiphertextSum(public)
    count = layout.ciphertexts(parameters)

    def add(k: int, envelope: bytes) -> None:
        total.add(open_envelope(envelope, server, clients[k].public, context, count, parameters))

    encrypting = []
    adding = []
    size = 0
    for k in range(len(rows)):
        envelope, seconds = timed(partial(close, k))
        size = len(envelope)
        encrypting.append(seconds)
        _, seconds = timed(partial(add, k, envelope))
        adding.append(seconds)
    data = total.serialized()
    slots, decrypting = timed(lambda: [secret.decrypt(ciphertext) for ciphertext in data])
    released = unpack(slots, layout, largest, parameters, len(rows))["delta"]
    truth = rows.sum(0)
    unit = 2.0**-codec.exponent
    error = float(np.abs(released * unit - truth).max())
    best = (float(np.median(encrypting)), float(np.median(adding)), decrypting)
    costs = [Cost(scheme, size, *best, error)]
    if scheme == CKKS:
        raw = np.stack(slots)[:, 1:].reshape(-1)[: layout.slots] * codec.largest * unit
        # what the fixed point and the ciphertexts err by, before the sum is rounded
        before = float(np.abs(raw.reshape(truth.shape) - truth).max())
        costs.insert(0, Cost("ckks, not rounded", size, *best, before))
    return costs


def padded(rows: NDArray[np.float64], members: int, mask: Callable[[torch.Tensor], Any]) -> Cost:
    """Return the costs of a row under pads.

    Args:
        rows: numbers of some clients (n, d).
        members: clients for which the fixed point is planned.
        mask: adds the pads to a row of int32.
    """
    codec = FixedPoint(BOUND, members)

    def close() -> torch.Tensor:
        row = codec.encode(torch.from_numpy(rows[:1]))[0]
        mask(row)
        return row

    close()  # imports what it needs
    row, encrypting = timed(close)
    total = torch.zeros_like(row)
    _, adding = timed(lambda: total.add_(row))
    integers = codec.encode(torch.from_numpy(rows)).sum(0, dtype=torch.int32)
    decoded, decrypting = timed(lambda: codec.decode(integers, len(rows), torch.float64))
    error = float(np.abs(decoded.numpy() - rows.sum(0)).max())
    return Cost("pads", row.numel() * 4, encrypting, adding, decrypting, error)


def relevance(clients: int) -> list[Cost]:
    """Return the costs of R of some clients.

    Args:
        clients: m.
    """
    draw = np.random.default_rng(0).uniform(0, BOUND, (clients, clients))
    keys = {peer: peer.to_bytes(2, "big") * 16 for peer in range(1, clients)}
    context = PairContext(b"run", "relevance", 1, 0, tuple(range(clients)))
    costs = [padded(draw[:2], 2, lambda row: add_pair_pads(row, 0, keys, context, "row"))]
    parts = np.stack([own_pairs(draw[k], k) for k in range(clients)])
    for scheme in (BFV, CKKS):
        costs += encrypted(scheme, parts, clients)
    return costs


def sums(numbers: int, clients: int) -> list[Cost]:
    """Return the costs of a sum of updates.

    Args:
        numbers: d.
        clients: clients whose rows are made and added.
    """
    rows = np.random.default_rng(0).uniform(-BOUND, BOUND, (clients, numbers))
    streams = [(bytes([k]) * 32, 1) for k in range(PADS)]
    costs = [padded(rows, clients, lambda row: add_pads(row, streams))]
    for scheme in (BFV, CKKS):
        costs += encrypted(scheme, rows, clients)
    return costs


def show(title: str, costs: Sequence[Cost]) -> None:
    """Print a table of costs."""
    print(f"\n{title}\n")
    print("| way | bytes up | encrypt, CPU s | open and add, CPU s | decrypt, CPU s | max error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for cost in costs:
        times = f"{cost.encrypt:.4f} | {cost.add:.4f} | {cost.decrypt:.4f}"
        print(f"| {cost.way} | {cost.up:,} | {times} | {cost.error:.1e} |", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure what is asked for, and print it."""
    torch.set_num_threads(1)
    print(machine())
    kinds = [word for word in arguments if not word.isdecimal()] or ["relevance", "sums"]
    given = [int(word) for word in arguments if word.isdecimal()]
    if "relevance" in kinds:
        for clients in given or RELEVANCE_CLIENTS:
            show(f"Relevance of m = {clients} clients", relevance(clients))
    if "sums" in kinds:
        for numbers in given or SUM_NUMBERS:
            show(f"A sum of d = {numbers:,} numbers", sums(numbers, SUMMED))


if __name__ == "__main__":
    main(sys.argv[1:])
