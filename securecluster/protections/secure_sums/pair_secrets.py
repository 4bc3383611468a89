"""What two clients of a sum derive from the key that they share, for one attempt at one sum.

It is three keys of 32 bytes, one output of SHAKE256 of the pair's key and of the whole context:

- the key of their pads, which either of them reveals if the other is lost;
- for each direction, the cover of the share that one of them deals to the other: a one-time pad.

Outputs of a pseudorandom function tell nothing of each other. So who reveals one of the three tells
nothing of the other two, and nothing that was revealed in one sum tells of another sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from securecluster.privacy.masking.pads import KEY, purpose_hash
from securecluster.protections.secure_sums.graph import Graph

Octets = NDArray[np.uint8]
# the three keys of a pair, in their order
PADS, FROM_LOWER, FROM_HIGHER = range(3)
WIDTH = 3 * KEY


class Pairs:
    """Pairs of neighbours of a sum of which one client is on this machine, in the order of use.

    Args:
        graph: of the sum's members.
        pair_key: (client, neighbour) -> their key; it is called once for each pair.

    Attributes:
        keys: keys of the pairs that were used so far.
    """

    def __init__(self, graph: Graph, pair_key: Callable[[int, int], bytes]) -> None:
        self.graph = graph
        self.keys: list[bytes] = []
        self._pair_key = pair_key
        self._numbers: dict[tuple[int, int], int] = {}
        self._of: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def __repr__(self) -> str:
        return f"Pairs({len(self.keys)} pairs, keys hidden)"

    def __len__(self) -> int:
        """Return how many pairs and members are kept."""
        return len(self.keys) + len(self.graph.ring)

    def of(self, client: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the numbers of a client's pairs, and the signs of its pads (k,).

        They are in the ascending order of its neighbours. The lower id adds a pad, and the higher
        one subtracts it.

        Args:
            client: a member on this machine.
        """
        if client not in self._of:
            numbers = []
            neighbours = self.graph.neighbours(client)
            for peer in neighbours:
                pair = (client, peer) if client < peer else (peer, client)
                number = self._numbers.setdefault(pair, len(self.keys))
                if number == len(self.keys):
                    self.keys.append(self._pair_key(client, peer))
                numbers.append(number)
            signs = np.where(np.array(neighbours, dtype=np.int64) > client, 1, -1)
            self._of[client] = (np.array(numbers, dtype=np.int64), signs)
        return self._of[client]


class PairSecrets:
    """Secrets of pairs for one attempt at a sum, and rows of one origin.

    Both ends derive the same, and the machine that has both derives it once.

    Args:
        pairs: of the members.
        context: hash of the attempt's context, 32 bytes.
        origin: digest of the public numbers that rows follow from.
    """

    def __init__(self, pairs: Pairs, context: bytes, origin: bytes) -> None:
        self.pairs = pairs
        self._context = context
        self._origin = origin
        self._table: Octets = np.empty((0, WIDTH), dtype=np.uint8)
        self._known = np.zeros(0, dtype=bool)

    def __repr__(self) -> str:
        return "PairSecrets(hidden)"

    @cached_property
    def _about(self) -> bytes:
        return purpose_hash("securecluster sum pair secrets v1", self._context, self._origin)

    def pad_keys(self, numbers: NDArray[np.int64]) -> list[bytes]:
        """Return the keys of the pads of some pairs.

        Args:
            numbers: of the pairs (p,).
        """
        data = self._keys(numbers, PADS).tobytes()
        return [data[start : start + KEY] for start in range(0, len(data), KEY)]

    def covers(self, numbers: NDArray[np.int64], from_lower: NDArray[np.bool_]) -> Octets:
        """Return the covers of shares, (…, 32).

        Args:
            numbers: of the pairs (…).
            from_lower: (…) True where the pair's lower id deals the share.
        """
        return self._keys(numbers, np.where(from_lower, FROM_LOWER, FROM_HIGHER))

    def _keys(self, numbers: NDArray[np.int64], which: int | NDArray[np.int64]) -> Octets:
        """Return one key of each of some pairs, after what is missing is derived."""
        keys = self.pairs.keys
        if len(self._table) < len(keys):
            count = max(len(keys), 2 * len(self._table))
            table: Octets = np.empty((count, WIDTH), dtype=np.uint8)
            table[: len(self._table)] = self._table
            known = np.zeros(len(table), dtype=bool)
            known[: len(self._known)] = self._known
            self._table, self._known = table, known
        unknown = np.zeros_like(self._known)
        unknown[numbers] = True
        unknown &= ~self._known
        missing = np.flatnonzero(unknown)
        if len(missing):
            about = self._about
            # `pads.derived` in line: there is one for each pair of clients and sum
            shake = hashlib.shake_256
            made = b"".join([shake(keys[k] + about).digest(WIDTH) for k in missing.tolist()])
            self._table[missing] = np.frombuffer(made, dtype=np.uint8).reshape(-1, WIDTH)
            self._known[missing] = True
        chosen: Octets = self._table.reshape(-1, KEY)[3 * numbers + which]
        return chosen
