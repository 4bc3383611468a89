"""Packed trees come back bit for bit, and nothing else is taken for one."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from securecluster.core.serialization import pack, unpack
from securecluster.errors import RunFolderError
from securecluster.privacy.masking.key_agreement import Secrets


@dataclass
class Leaf:
    value: torch.Tensor
    secret: bytes = b""


@dataclass
class Tree:
    number: int = 0
    share: float = 0.0
    word: str = ""
    flag: bool = False
    leaves: list[Leaf] = field(default_factory=list)
    named: dict[int, list[int]] = field(default_factory=dict)
    secrets: dict[int, bytes] = field(default_factory=dict)
    maybe: torch.Tensor | None = None
    loose: dict[str, Any] = field(default_factory=dict)


@given(
    st.integers(),
    st.floats(allow_nan=False),
    st.text(max_size=9) | st.just("\ud800"),
    st.dictionaries(st.integers(), st.lists(st.integers())),
    st.binary(max_size=40),
    st.sampled_from([torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]),
    st.lists(st.integers(0, 3), max_size=3),
)
def test_a_tree_comes_back_bit_for_bit(
    number: int,
    share: float,
    word: str,
    named: dict[int, list[int]],
    secret: bytes,
    dtype: torch.dtype,
    shape: list[int],
) -> None:
    value = torch.randint(0, 2, shape).to(dtype)
    leaves = [Leaf(value, secret), Leaf(value + value)]
    maybe = value.T if len(shape) == 2 else None
    tree = Tree(number, share, word, True, leaves, named, {1: secret}, maybe)
    back = unpack(pack(tree), Tree)
    for name in ("number", "share", "word", "flag", "named", "secrets"):
        assert getattr(back, name) == getattr(tree, name)
    assert [leaf.secret for leaf in back.leaves] == [secret, b""]
    pairs = [
        (leaf.value, other.value) for leaf, other in zip(back.leaves, tree.leaves, strict=True)
    ]
    assert (back.maybe is None) == (tree.maybe is None)
    if back.maybe is not None and tree.maybe is not None:
        pairs.append((back.maybe, tree.maybe))
    assert all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)
    assert pack(back) == pack(tree)


def test_untyped_trees_get_their_tensors_back_wherever_they_are() -> None:
    loose = {"a": [torch.arange(3), {"b": torch.ones(2)}], "c": None, "d": {"e": "x"}}
    back = unpack(pack(Tree(loose=loose)), Tree).loose
    assert torch.equal(back["a"][0], loose["a"][0])
    assert torch.equal(back["a"][1]["b"], torch.ones(2))
    assert (back["c"], back["d"]) == (None, {"e": "x"})


def test_a_packed_tensor_is_a_copy() -> None:
    leaf = Leaf(torch.zeros(2))
    data = pack(leaf)
    leaf.value += 1
    assert unpack(data, Leaf).value.tolist() == [0, 0]


def test_secrets_survive_a_checkpoint() -> None:
    secrets = Secrets({0: bytes(range(32))}, {0: bytes(32), 4: b"\xff" * 32})
    back = unpack(pack(secrets), Secrets)
    assert (back.private, back.seed) == (secrets.private, secrets.seed)


GOOD = pack(Tree(3, 0.5, "x", True, [Leaf(torch.ones(2), b"ab")], {1: [2]}))


def forged(state: Any, tensors: dict[str, torch.Tensor] | None = None) -> bytes:
    return bytes(
        save(tensors or {}, {"state": state if isinstance(state, str) else json.dumps(state)})
    )


@pytest.mark.parametrize(
    "data",
    [
        b"", bytes(40), GOOD[:-1], GOOD + b"x", GOOD[: len(GOOD) // 2],
        pack(Leaf(torch.zeros(1))), forged({"number": 1, "unknown": 2}),
        forged({"number": "many"}), forged({"maybe": {"tensor": "t0"}}),
        forged({"leaves": [{"secret": ""}]}), forged({"secrets": {"1": "zz"}}), forged([1]),
        forged("{"), bytes(save({}, {"other": "x"})), bytes(save({})),
    ],
)  # fmt: skip
def test_damaged_or_foreign_state_is_refused_in_a_sentence(data: bytes) -> None:
    with pytest.raises(RunFolderError, match="start the run anew") as caught:
        unpack(data, Tree)
    assert "\n" not in str(caught.value)


@given(st.integers(0, len(GOOD) - 1), st.integers(1, 255), st.booleans())
def test_damage_is_refused_or_gives_a_tree_but_never_crashes(
    place: int, flip: int, cut: bool
) -> None:
    data = bytearray(GOOD)
    data[place] ^= flip
    try:
        assert isinstance(unpack(bytes(data[:place] if cut else data), Tree), Tree)
    except RunFolderError:
        return
    assert not cut


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(RunFolderError):
        unpack(forged('{"loose":{"a":' + "[" * 100_000), Tree)
    text = b'{"__metadata__":' + b"[" * 100_000
    with pytest.raises(RunFolderError):
        unpack(struct.pack("<Q", len(text)) + text, Tree)
