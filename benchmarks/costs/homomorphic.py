"""Pads and CKKS side by side for the relevance of pairs: bytes up, processor time and error.

python -m benchmarks.costs.homomorphic [clients, 20 and 100]

Relevance is R of m clients: one row of a client, as pads or as ciphertexts of its part of all
pairs. Times are processor seconds of one thread: of encrypting one row and tagging its ciphertexts,
of adding one row to a sum, and of the key authority, which checks the tags of the sum's clients and
decrypts it. Errors are the largest ones of the sum, relative to the range of one client's number.
The sum of integers is exact, and what errs is their rounding before they are encrypted.
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

from benchmarks.table import machine, markdown_line
from securecluster.privacy.fixed_point import FixedPoint
from securecluster.privacy.masking.pads import KeyPair
from securecluster.protections.encryption.ciphers import CiphertextSum, PublicCipher, SecretCipher
from securecluster.protections.encryption.envelopes import (
    EnvelopeContext,
    open_bytes,
    open_envelope,
    seal,
    seal_bytes,
)
from securecluster.protections.encryption.packing import FieldShape, Layout, pack, unpack
from securecluster.protections.encryption.pair_release import own_pairs, rounding
from securecluster.protections.encryption.parameters import CKKS, Parameters
from securecluster.protections.encryption.tags import LinearTags, as_text, from_text
from securecluster.protections.pads.pair_pads import PairContext, add_pair_pads
from securecluster.protocols.oneshot.client import RELEVANCE

# the range of one client's number
BOUND = 1.0
RELEVANCE_CLIENTS = (20, 100)
TAG_KEY = b"t" * 32


@dataclass(frozen=True)
class Cost:
    """Costs of one way of forming a sum.

    Args:
        way: name of the way.
        up: bytes of one client's row, with its envelope and its box for the key authority.
        encrypt: processor seconds for one client's row.
        add: processor seconds to open the row of one client, and to add it.
        decrypt: processor seconds of the key authority for the sum.
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


def encrypted(rows: NDArray[np.float64], codec: FixedPoint) -> Cost:
    """Return the costs of a sum of ciphertexts.

    Args:
        rows: numbers of some clients (n, d), whose sum is formed.
        codec: fixed point of their numbers.
    """
    parameters = Parameters()
    secret = SecretCipher.generate(parameters)
    public = PublicCipher(parameters, secret.public)
    layout = Layout((FieldShape("delta", 32, rows.shape[1:]),))
    largest = {"delta": codec.largest}
    server = KeyPair(b"s" * 32)
    clients = [KeyPair(bytes([k + 1]) * 32) for k in range(len(rows))]
    context = EnvelopeContext(
        public.fingerprint, "run", "contribute", 1, 0, "client/0", "server", "0", str(layout)
    )
    authority = KeyPair(b"a" * 32)
    tags = LinearTags(parameters, TAG_KEY)

    def close(k: int) -> tuple[bytes, bytes]:
        row = torch.from_numpy(rows[k : k + 1])
        values = {"delta": codec.encode(row).numpy()}
        slots = pack(values, layout, largest, parameters)
        ciphertexts = [public.encrypt(numbers) for numbers in slots]
        row_tags = [tags.of(public.coefficients(data)) for data in ciphertexts]
        text = as_text(TAG_KEY, row_tags)
        box = seal_bytes(text, clients[k], authority.public, context)
        envelope = seal(ciphertexts, clients[k], server.public, context)
        return envelope, box

    ciphertext_sum = CiphertextSum(public)
    count = layout.ciphertexts(parameters)

    def add(k: int, envelope: bytes) -> None:
        ciphertext_sum.add(
            open_envelope(envelope, server, clients[k].public, context, count, parameters)
        )

    encrypting = []
    adding = []
    boxes = []
    size = 0
    for k in range(len(rows)):
        (envelope, box), seconds = timed(partial(close, k))
        boxes.append(box)
        size = len(envelope) + len(box)
        encrypting.append(seconds)
        _, seconds = timed(partial(add, k, envelope))
        adding.append(seconds)
    data = ciphertext_sum.serialized()

    def decrypt() -> list[NDArray[Any]]:
        opened = []
        for k, box in enumerate(boxes):
            text = open_bytes(box, authority, clients[k].public, context)
            _, row = from_text(text, count, parameters)
            opened.append(row)
        for number, ciphertext in enumerate(data):
            expected = tags.added([row[number] for row in opened])
            assert tags.of(secret.coefficients(ciphertext)) == expected
        return [secret.flooded(ciphertext, len(rows)) for ciphertext in data]

    slots, decrypting = timed(decrypt)
    released = unpack(slots, layout, largest, parameters, len(rows))["delta"]
    truth = rows.sum(0)
    unit = 2.0**-codec.exponent
    errors = np.abs(released * unit - truth)
    return Cost(
        CKKS,
        size,
        float(np.median(encrypting)),
        float(np.median(adding)),
        decrypting,
        float(errors.max()),
    )


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
    padded_sum = torch.zeros_like(row)
    _, adding = timed(lambda: padded_sum.add_(row))
    encoded = codec.encode(torch.from_numpy(rows))
    integers = encoded.sum(0, dtype=torch.int32)
    decoded, decrypting = timed(lambda: codec.decode(integers, len(rows), torch.float64))
    errors = np.abs(decoded.numpy() - rows.sum(0))
    up = row.numel() * 4
    return Cost("pads", up, encrypting, adding, decrypting, float(errors.max()))


def relevance(clients: int) -> list[Cost]:
    """Return the costs of R of some clients.

    Args:
        clients: m.
    """
    generator = np.random.default_rng(0)
    rows = generator.uniform(0, BOUND, (clients, clients))
    members = tuple(range(clients))
    keys = {peer: peer.to_bytes(2, "big") * 16 for peer in members[1:]}
    context = PairContext(b"run", "relevance", 1, 0, members)

    def mask(row: torch.Tensor) -> None:
        add_pair_pads(row, 0, keys, context, "row")

    costs = [padded(rows[:2], 2, mask)]
    pair_rows = np.stack([own_pairs(row, k) for k, row in enumerate(rows)])
    costs.append(encrypted(pair_rows, rounding("row", RELEVANCE)))
    return costs


def show(title: str, costs: Sequence[Cost]) -> None:
    """Print a table of costs."""
    print(f"\n{title}\n")
    print("| way | bytes up | encrypt, CPU s | add, CPU s | authority, CPU s | max error |")
    print("| --- | --- | --- | --- | --- | --- |")
    for cost in costs:
        seconds = [f"{value:.4f}" for value in (cost.encrypt, cost.add, cost.decrypt)]
        cells = [cost.way, f"{cost.up:,}", *seconds, f"{cost.error:.1e}"]
        print(markdown_line(cells), flush=True)


def main(arguments: Sequence[str]) -> None:
    """Measure what is asked for, and print it."""
    torch.set_num_threads(1)
    print(machine())
    sizes = [int(word) for word in arguments]
    for clients in sizes or RELEVANCE_CLIENTS:
        show(f"Relevance of m = {clients} clients", relevance(clients))


if __name__ == "__main__":
    main(sys.argv[1:])
