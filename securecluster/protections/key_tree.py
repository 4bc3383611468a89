"""Merkle tree over the public keys that a run's clients offered: one root stands for all of them.

The leaf of a client stands at the place of its id, so a root has one key of each client at most.
Leaves, inner nodes and the root are hashes of inputs that begin differently, and the root's has the
number of levels: no node is taken for another one (Merkle 1987; as in RFC 6962, section 2.1).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from securecluster.errors import FrameError
from securecluster.privacy.masking.pads import purpose_hash

# bytes of a node
NODE = 32
# the leaf of an id without a key: no hash that anyone has found
EMPTY = bytes(NODE)


class KeyTree:
    """The tree of some clients' keys; what no client is below takes no memory.

    Args:
        run: hash of the run's configuration.
        keys: public key of each client, by its id, at least one.

    Attributes:
        nodes: that paths are made of.
        root: of the tree, 32 bytes.
    """

    def __init__(self, run: bytes, keys: Mapping[int, bytes]) -> None:
        self.nodes: list[bytes] = []
        # by level, from the leaves: the numbers of nodes by their places, and of an empty one
        self._levels: list[tuple[dict[int, int], int]] = []
        depth = max(keys).bit_length()
        level = {client: _leaf(run, client, key) for client, key in keys.items()}
        empty = EMPTY
        for _ in range(depth):
            numbers = {place: len(self.nodes) + k for k, place in enumerate(level)}
            self.nodes += [*level.values(), empty]
            self._levels.append((numbers, len(self.nodes) - 1))
            above = {}
            for place in {place >> 1 for place in level}:
                left = level.get(2 * place, empty)
                above[place] = _inner(left, level.get(2 * place + 1, empty))
            level, empty = above, _inner(empty, empty)
        self.root = _root(run, depth, level[0])

    def path(self, client: int) -> tuple[int, ...]:
        """Return the numbers of the nodes that lead from a client's leaf to the root, upwards.

        Args:
            client: its id.
        """
        path = []
        for numbers, empty in self._levels:
            path.append(numbers.get(client ^ 1, empty))
            client >>= 1
        return tuple(path)


def root_of(run: bytes, client: int, key: bytes, path: Sequence[bytes]) -> bytes:
    """Return the root of the tree that has a client's key, 32 bytes.

    Args:
        run: hash of the run's configuration.
        client: id of the client.
        key: its public key.
        path: the nodes beside those from its leaf to the root, upwards.

    Raises:
        FrameError: a path that is too short for the id.
    """
    if client >> len(path):
        raise FrameError(f"the path of the key of client {client} has {len(path)} nodes: too few")
    node = _leaf(run, client, key)
    for level, beside in enumerate(path):
        is_right = client >> level & 1
        node = _inner(beside, node) if is_right else _inner(node, beside)
    return _root(run, len(path), node)


def _leaf(run: bytes, client: int, key: bytes) -> bytes:
    return purpose_hash("securecluster key leaf v1", run, client, key)


def _inner(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"securecluster key node v1" + left + right).digest()


def _root(run: bytes, depth: int, top: bytes) -> bytes:
    return purpose_hash("securecluster key root v1", run, depth, top)
