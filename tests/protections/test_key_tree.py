"""One root stands for all keys: each is in it at the place of its client, and nothing else is."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.errors import FrameError
from securecluster.privacy.masking.pads import purpose_hash
from securecluster.protections.key_tree import NODE, KeyTree, root_of

RUN = b"the hash of a configuration"


def key(client: int) -> bytes:
    return hashlib.sha256(client.to_bytes(4, "big")).digest()


def path_of(tree: KeyTree, client: int) -> list[bytes]:
    return [tree.nodes[row] for row in tree.path(client)]


clients = st.sets(st.integers(0, 5000), min_size=1, max_size=40)


@given(ids=clients)
def test_each_keys_path_leads_to_the_root_and_to_no_other(ids: set[int]) -> None:
    tree = KeyTree(RUN, {client: key(client) for client in ids})
    assert len(tree.nodes) <= len(ids) * max(ids).bit_length() + max(ids).bit_length()
    for client in ids:
        path = path_of(tree, client)
        assert len(path) == max(ids).bit_length()
        assert root_of(RUN, client, key(client), path) == tree.root
        assert root_of(b"another run", client, key(client), path) != tree.root
        assert root_of(RUN, client, key(client + 1), path) != tree.root
        for k, node in enumerate(path):
            changed = [*path[:k], bytes([node[0] ^ 1]) + node[1:], *path[k + 1 :]]
            assert root_of(RUN, client, key(client), changed) != tree.root
            # the key of a client at the place of another one
            assert root_of(RUN, client ^ 1 << k, key(client), path) != tree.root


@given(ids=clients, more=st.integers(0, 5000))
def test_a_further_key_and_another_key_give_another_root(ids: set[int], more: int) -> None:
    keys = {client: key(client) for client in ids}
    tree = KeyTree(RUN, keys)
    assert KeyTree(RUN, dict(reversed(keys.items()))).root == tree.root  # whoever came first
    assert KeyTree(RUN, {**keys, more: key(6000)}).root != tree.root


def test_the_root_is_that_of_the_whole_tree_level_by_level() -> None:
    """A tree that is written out: five clients of eight places, of which id 2 has no key."""
    leaves = [purpose_hash("securecluster key leaf v1", RUN, k, key(k)) for k in range(6)]
    level = [*leaves[:2], bytes(NODE), *leaves[3:6], bytes(NODE), bytes(NODE)]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        joined = [b"securecluster key node v1" + left + right for left, right in pairs]
        level = [hashlib.sha256(both).digest() for both in joined]
    tree = KeyTree(RUN, {k: key(k) for k in (0, 1, 3, 4, 5)})
    assert tree.root == purpose_hash("securecluster key root v1", RUN, 3, level[0])


def test_no_inner_node_is_taken_for_a_leaf_and_no_short_path_for_a_whole_one() -> None:
    tree = KeyTree(RUN, {k: key(k) for k in range(8)})
    path = path_of(tree, 5)
    with pytest.raises(FrameError, match="client 5 has 2 nodes: too few"):
        root_of(RUN, 5, key(5), path[:2])
    longer = [*path, bytes(NODE)]
    assert root_of(RUN, 5, key(5), longer) != tree.root
    assert root_of(RUN, 0, path[0] + path[1], path_of(tree, 0)[1:]) != tree.root
