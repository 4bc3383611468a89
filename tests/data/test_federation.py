"""Federations, dealt from a data set or made of users' own arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from securecluster import Federation, Iid, LabelSwap
from securecluster.data import Shard
from securecluster.data.datasets import digits
from securecluster.data.federation import fingerprint
from securecluster.errors import SecureClusterWarning, UsageError

POOL = 1797
BUNCH = load_digits()
ORIGINAL = {
    (image / 16).astype(np.float32).tobytes(): int(label)
    for image, label in zip(BUNCH.images, BUNCH.target, strict=True)
}


def refused(sentence: str, make: Callable[[], object]) -> None:
    """Refused in one sentence that matches."""
    with pytest.raises(UsageError, match=sentence) as caught:
        make()
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text and len(text) < 250


def test_the_digits_are_scikit_learns() -> None:
    source = digits()
    assert len(ORIGINAL) == POOL  # no image twice, so that an image names its label
    x = source.train.read(np.arange(POOL))
    assert x.shape == (POOL, 1, 8, 8)
    assert x.dtype == np.float32
    assert source.classes == 10
    assert source.test is None
    assert x.min() == 0 and x.max() == 1
    assert [ORIGINAL[image.tobytes()] for image in x] == source.train.y.tolist()


@pytest.mark.parametrize(("clusters", "seed"), [(4, 3), (5, 0), (1, 1)])
def test_each_cluster_swaps_its_own_pair_in_training_and_test_alike(
    clusters: int, seed: int
) -> None:
    federation = Federation.simulate("digits", scenario=LabelSwap(clusters=clusters), seed=seed)
    assert federation.truth is not None
    pairs: dict[tuple[int, str], set[tuple[int, int]]] = {}
    kept: dict[int, set[int]] = {c: set() for c in range(clusters)}
    for shard, cluster in zip(federation.shards, federation.truth, strict=True):
        for part, x, y in (("train", shard.x, shard.y), ("test", shard.x_test, shard.y_test)):
            seen = {(ORIGINAL[a.tobytes()], int(b)) for a, b in zip(x, y, strict=True)}
            pairs.setdefault((cluster, part), set()).update((a, b) for a, b in seen if a != b)
            kept[cluster] |= {a for a, b in seen if a == b}
    swapped: list[int] = []
    for cluster in range(clusters):
        mine = pairs[cluster, "train"]
        assert mine == pairs[cluster, "test"]
        assert len(mine) == 2 and {(b, a) for a, b in mine} == mine
        own = {a for a, _ in mine}
        assert kept[cluster] == set(range(10)) - own
        swapped += own
    assert len(swapped) == len(set(swapped)) == 2 * clusters


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"data": "digit"}, "did you mean 'digits'"),
        (
            {"data": "xyz"},
            "choose one of ag_news, cifar10, cifar100, digits, fashion_mnist, femnist, femnist14, "
            "hospitals, mnist, mnist14, mobility, shakespeare",
        ),
        ({"clients": 0}, "0 clients"),
        ({"clients": -3}, "-3 clients"),
        ({"clients": 1000, "samples": 5}, "at most 0 each, not 5"),
        ({"clients": 1798}, "use fewer clients"),
        ({"clients": 10, "samples": 1000}, "at most 143 each, not 1000"),
        ({"samples": 0}, "not 0"),
        ({"samples": -4}, "not -4"),
        ({"scenario": LabelSwap(clusters=6)}, "at most 5 clusters"),
        ({"scenario": LabelSwap(clusters=4), "clients": 3}, "at most 3 clusters"),
        ({"scenario": LabelSwap(clusters=0)}, "at least one"),
        ({"scenario": Iid(clusters=3)}, "one cluster"),
    ],
)
def test_what_cannot_be_dealt_is_refused_in_one_sentence(
    asked: dict[str, Any], sentence: str
) -> None:
    refused(sentence, lambda: Federation.simulate(**{"data": "digits", "seed": 0, **asked}))


X, Y = np.random.default_rng(0).random((10, 3)), np.arange(10) % 2
NAN = np.where(np.arange(12).reshape(4, 3) == 5, np.nan, 0.0)


@pytest.mark.parametrize(
    ("bob", "sentence"),
    [
        ((X[:0], Y[:0]), "no training samples"),
        (([], []), "one label per sample"),
        ((NAN, Y[:4]), "a feature is NaN"),
        ((NAN / 0.5 + np.inf, Y[:4]), "NaN or infinite"),
        ((X * 1e300, Y), "NaN or infinite"),
        ((X, Y[:9]), r"X \(10, 3\) and y \(9,\)"),
        ((X, np.ones((10, 2), int)), "one-hot, with a single 1 in each row"),
        ((X, 3), "one label per sample"),
        ((Y, Y), "at least one feature"),
        ((X[:, :0], Y), "at least one feature"),
        ((X, Y / 2), "class numbers.*floats that are not whole numbers"),
        ((X, Y.astype(str)), "labels are numbers of client 'ann' and text of client 'bob'"),
        ((X, None), "some labels are empty"),
        ((X, Y - 1), "outside 0"),
        ((X[:, :2], Y), r"shape \(2,\), those of 'ann' have \(3,\)"),
        ((X[:, :, None], Y), r"shape \(3, 1\)"),
        (([[1, 2], [3]], [0, 1]), "rectangular"),
        ((X[:2], [[0], [1, 2]]), "rectangular"),
        (([["a", "b"]], [0]), "column 0 holds text, not numbers: leave it out of X"),
        (X, "client 'bob'"),
        ((X,), "client 'bob'"),
    ],
)
def test_a_client_that_cannot_take_part_is_refused_by_name(bob: Any, sentence: str) -> None:
    def make() -> object:
        return Federation.from_arrays({"ann": (X, Y), "bob": bob}, seed=0)

    refused(sentence, make)
    refused("client 'bob'", make)


@pytest.mark.parametrize(
    "held",
    [
        (NAN, Y[:4]), (X, Y[:9]), (X, np.ones((10, 2), int)), (X, Y / 2), (X, Y - 1),
        (X[:, :2], Y), ([[1, 2], [3]], [0, 1]), (X,),
    ],
    ids=[
        "nan", "fewer labels", "several labels", "float labels", "negative labels",
        "another shape", "ragged", "no pair",
    ],
)  # fmt: skip
def test_held_out_samples_that_cannot_be_used_are_refused_by_name(held: Any) -> None:
    clients, test = {"ann": (X, Y), "bob": (X, Y)}, {"ann": (X, Y), "bob": held}
    refused("client 'bob'", lambda: Federation.from_arrays(clients, test=test, seed=0))


@pytest.mark.parametrize(
    ("clients", "more", "sentence"),
    [
        ({}, {}, "needs clients"),
        (
            {"ann": (X, Y)},
            {"truth": {"bob": 1}},
            "truth must have an entry for every client.*'ann', 'bob'",
        ),
        ({"ann": (X, Y)}, {"truth": {"ann": 0, "bob": 1}}, "truth must.*'bob'"),
        ({"ann": (X, Y)}, {"test": {}}, "test must.*'ann'"),
        ({"ann": (X, Y), "bob": (X, Y)}, {"test": {"ann": (X, Y)}}, "test must.*'bob'"),
        ({"ann": (X, Y)}, {"truth": {"ann": "north"}}, "'ann'"),
    ],
)
def test_mappings_that_do_not_fit_together_are_refused(
    clients: dict[str, Any], more: dict[str, Any], sentence: str
) -> None:
    refused(sentence, lambda: Federation.from_arrays(clients, seed=0, **more))


def test_own_arrays_keep_their_samples_and_hold_out_a_fifth_at_random() -> None:
    federation = Federation.from_arrays(
        {"ann": (X, Y), "bob": (X + 1, Y)}, truth={"bob": 0, "ann": 1}, seed=0
    )
    ann = federation.shards[0]
    assert (len(ann.y), len(ann.y_test), federation.truth) == (8, 2, (1, 0))
    assert (federation.classes, federation.names) == (2, ("ann", "bob"))
    given = sorted((tuple(x), int(y)) for x, y in zip(X.astype(np.float32), Y, strict=True))
    kept = zip((*ann.x, *ann.x_test), (*ann.y, *ann.y_test), strict=True)
    assert sorted((tuple(x), int(y)) for x, y in kept) == given
    assert ann.x.dtype == np.float32 and ann.y.dtype == np.int64
    splits = [Federation.from_arrays({"ann": (X, Y)}, seed=seed).shards[0] for seed in range(10)]
    assert len({shard.x_test.tobytes() for shard in splits}) > 5


def test_a_clients_split_does_not_depend_on_who_else_is_there() -> None:
    alone = Federation.from_arrays({"bob": (X, Y)}, seed=4).shards[0]
    beside = Federation.from_arrays({"ann": (X + 1, Y), "bob": (X, Y)}, seed=4).shards[1]
    assert fingerprint(alone) == fingerprint(beside)


def test_held_out_samples_are_kept_and_may_be_none() -> None:
    federation = Federation.from_arrays(
        {"ann": (X, Y), "bob": (X, Y)}, test={"ann": (X[:3], Y[:3] + 4), "bob": ([], [])}, seed=0
    )
    assert [(len(s.y), len(s.y_test)) for s in federation.shards] == [(10, 3), (10, 0)]
    assert np.array_equal(federation.shards[0].x, X.astype(np.float32)) and federation.classes == 6
    with pytest.warns(SecureClusterWarning, match="client 'ann' has no test samples, so its score"):
        (few,) = Federation.from_arrays({"ann": (X[:4], Y[:4])}, seed=0).shards
    assert len(few.y_test) == 0


def test_lists_are_arrays_too() -> None:
    lists = Federation.from_arrays({"ann": (X.tolist(), Y.tolist())}, seed=0)
    assert lists.digest() == Federation.from_arrays({"ann": (X, Y)}, seed=0).digest()


def test_the_digest_changes_with_every_sample() -> None:
    base = Federation.from_arrays(
        {"ann": (X, Y), "bob": (X, Y)}, test={"ann": (X[:3], Y[:3]), "bob": (X[:3], Y[:3])}, seed=0
    )
    seen = {base.digest()}

    def changed(who: int, part: str, at: int) -> str:
        array = getattr(base.shards[who], part).copy()
        array[at] = 1 - array[at]
        shards = list(base.shards)
        shards[who] = replace(shards[who], **{part: array})
        return replace(base, shards=tuple(shards)).digest()

    for who, part in itertools.product((0, 1), ("x", "y", "x_test", "y_test")):
        seen |= {changed(who, part, at) for at in range(len(getattr(base.shards[who], part)))}
    assert len(seen) == 1 + 2 * (10 + 10 + 3 + 3)
    assert replace(base, shards=base.shards[:1], names=("ann",)).digest() not in seen


def test_the_digest_tells_shapes_and_order_apart() -> None:
    y = np.zeros(4, np.int64)
    x = np.arange(16, dtype=np.float32)
    flat = Shard(x.reshape(4, 4), y, x[:0].reshape(0, 4), y[:0])
    square = Shard(x.reshape(4, 2, 2), y, x[:0].reshape(0, 2, 2), y[:0])
    moved = Shard(flat.x[:3], y[:3], flat.x[3:], y[3:])
    shards = (flat, square, moved, replace(flat, x=flat.x[::-1]))
    assert len({fingerprint(shard) for shard in shards}) == 4
    both = Federation(("a", "b"), (flat, moved), 1, 0).digest()
    assert both != Federation(("a", "b"), (moved, flat), 1, 0).digest()


def test_clients_whose_names_read_alike_are_refused() -> None:
    two: dict[Any, Any] = {"1": (X, Y), "2": (X, Y)}
    twice: dict[Any, Any] = {1: (X, Y), **two}
    made = partial(Federation.from_arrays, seed=0)
    refused("clients: 1 and '1' would both be the client '1'", lambda: made(twice))
    refused("test: 1 and '1' would both be", lambda: made(two, test=twice))
    refused("truth: 1 and '1' would both be", lambda: made(two, truth=dict.fromkeys(twice, 0)))


def test_names_are_stored_as_they_print() -> None:
    samples: Any = {" north ": (X, Y), 2.0: (X, Y), "new\u00a0 york": (X, Y)}
    assert Federation.from_arrays(samples, seed=0).names == ("north", "2", "new york")


def test_numbers_are_names_too_however_they_are_written() -> None:
    plain = Federation.from_arrays({1: (X, Y), 2: (X, Y)}, seed=0)  # type: ignore[dict-item]
    assert plain.names == ("1", "2")
    numpy: Any = {np.int64(k): (X, Y) for k in (1, 2)}
    truth: Any = {2: 5, "1": 3}
    same = Federation.from_arrays(numpy, truth=truth, seed=0)
    assert same.digest() == plain.digest() and same.truth == (3, 5)


@pytest.mark.parametrize(
    ("clients", "more", "sentence"),
    [
        ((X, Y), {}, r"clients is a mapping {name: \(X, y\)}, not tuple: or a list of pairs"),
        (X, {}, "clients is a mapping"),
        (
            {"ann": (X, Y)},
            {"truth": [0]},
            "truth is a mapping {name: cluster}, not list: with an entry for every client",
        ),
        ({"ann": (X, Y)}, {"truth": "north"}, "truth is a mapping"),
        ({"ann": (X, Y)}, {"test": [(X, Y)]}, "test is a mapping"),
        ({"ann": (X, Y)}, {"truth": {"ann": "north"}}, "number the clusters from 0"),
        ({"ann": (X, Y)}, {"truth": {1: 0}}, r"check \['1', 'ann'\]"),
    ],
)
def test_what_is_no_mapping_is_refused(clients: Any, more: dict[str, Any], sentence: str) -> None:
    refused(sentence, lambda: Federation.from_arrays(clients, seed=0, **more))


def test_scenarios_go_by_name_too() -> None:
    def digest(kind: Any) -> str:
        return Federation.simulate("digits", scenario=kind, clients=6, samples=20, seed=0).digest()

    assert digest("label-swap") == digest(LabelSwap()) != digest("iid")
    assert digest("rotation+dirichlet")
    refused("did you mean 'label-swap'", lambda: digest("label-swpa"))
    none = "scenario = .* is none: give a name such as 'label-swap', or an object"
    for kind in (LabelSwap, 3):
        refused(none, partial(digest, kind))


def test_a_repr_is_one_short_line() -> None:
    federation = Federation.simulate("digits", clients=4, samples=20, seed=0)
    assert repr(federation) == (
        "<Federation digits (label-swap): 4 clients, 80 training and 20 test samples of shape (1, "
        "8, 8), 10 classes, seed 0>"
    )
    wide = Federation.from_arrays({"ann": (np.ones((5, 500)), [0, 1, 0, 1, 0])}, seed=0)
    named = replace(wide, feature_names=tuple(f"pixel{k}" for k in range(500)))
    assert len(repr(named)) < 400 and "pixel11 and 488 more" in repr(named)


@pytest.mark.parametrize("seed", [-1, 1.5, "0", True, None])
def test_a_seed_is_a_whole_number_from_0(seed: Any) -> None:
    with pytest.raises(UsageError, match=r"seed = .* is not possible: it is a whole number"):
        Federation.simulate("digits", clients=4, samples=20, seed=seed)
    data = {name: (np.eye(10), [0, 1] * 5) for name in "ab"}
    with pytest.raises(UsageError, match="whole number from 0"):
        Federation.from_arrays(data, seed=seed)
    assert Federation.from_arrays(data, seed=np.int64(3)).seed == 3
