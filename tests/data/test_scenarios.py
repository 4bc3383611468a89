"""Scenarios: who gets which samples, and what a cluster does to its own."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from securecluster.data.federation import scenario
from securecluster.data.scenarios import SCENARIOS, Iid, LabelSwap
from securecluster.errors import UsageError
from securecluster.randomness import Randomness

SEEDS = st.integers(0, 10**6)


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.integers(1, 60), st.data())
def test_clusters_are_as_even_as_can_be(seed: int, clients: int, data: st.DataObject) -> None:
    clusters = data.draw(st.integers(1, clients))
    truth = LabelSwap(clusters=clusters).truth(clients, Randomness(seed))
    counts = Counter(truth.tolist())
    assert sum(counts.values()) == clients and set(counts) == set(range(clusters))
    assert max(counts.values()) - min(counts.values()) <= 1


def test_clusters_come_in_random_order() -> None:
    truths = [LabelSwap(clusters=4).truth(20, Randomness(seed)).tolist() for seed in range(20)]
    assert len({tuple(t) for t in truths}) == 20
    assert sorted(truths[0]) not in truths and [k % 4 for k in range(20)] not in truths
    assert {t[0] for t in truths} == {0, 1, 2, 3}


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(1, 9), st.integers(1, 11))
def test_every_sample_is_dealt_at_most_once(seed: int, clients: int, each: int) -> None:
    hands = Iid().deal(np.zeros(100, dtype=np.int64), clients, each, Randomness(seed))
    dealt = np.concatenate(hands)
    assert [len(h) for h in hands] == [each] * clients
    assert len(set(dealt.tolist())) == clients * each
    assert set(dealt.tolist()) <= set(range(100))


@settings(deadline=None, max_examples=40)
@given(SEEDS, st.integers(2, 12))
def test_each_cluster_swaps_exactly_one_pair_and_no_two_share_a_label(seed: int, classes: int) -> None:
    y = np.tile(np.arange(classes), 3)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    touched: list[int] = []
    for cluster in range(classes // 2):
        new_x, new_y = LabelSwap(clusters=classes // 2).transform(cluster, x, y, classes, Randomness(seed))
        moved = {(int(a), int(b)) for a, b in zip(y, new_y, strict=True) if a != b}
        assert len(moved) == 2 and {(b, a) for a, b in moved} == moved
        assert all(b == dict(moved).get(int(a), int(a)) for a, b in zip(y, new_y, strict=True))
        assert np.array_equal(new_x, x) and new_y.dtype == np.int64
        touched += [a for a, _ in moved]
    assert len(touched) == len(set(touched)) == classes // 2 * 2
    assert np.array_equal(y, np.tile(np.arange(classes), 3))


def test_pairs_follow_the_seed() -> None:
    y = np.arange(10)
    swaps = {tuple(LabelSwap().transform(0, y[:, None], y, 10, Randomness(seed))[1].tolist()) for seed in range(20)}
    assert len(swaps) > 5


def test_iid_leaves_everything_as_it_is() -> None:
    x, y = np.ones((3, 2), np.float32), np.array([0, 1, 2])
    new_x, new_y = Iid().transform(0, x, y, 3, Randomness(0))
    assert np.array_equal(new_x, x) and np.array_equal(new_y, y)
    assert Iid().truth(7, Randomness(0)).tolist() == [0] * 7


@pytest.mark.parametrize(
    ("kind", "clients", "classes", "word"),
    [
        (LabelSwap(clusters=6), 20, 10, "at most 5 clusters"),
        (LabelSwap(clusters=2), 20, 3, "at most 1 clusters"),
        (LabelSwap(clusters=5), 4, 10, "at most 4 clusters"),
        (LabelSwap(clusters=0), 4, 10, "at least one"),
        (LabelSwap(clusters=-1), 4, 10, "at least one"),
        (Iid(clusters=2), 4, 10, "one cluster"),
        (Iid(clusters=0), 4, 10, "at least one"),
    ],
)
def test_combinations_that_cannot_be_made_are_refused(kind: LabelSwap | Iid, clients: int, classes: int, word: str) -> None:
    with pytest.raises(UsageError, match=word) as caught:
        kind.check(clients, classes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [LabelSwap(clusters=5), LabelSwap(clusters=1), Iid()])
def test_combinations_at_the_limit_are_made(kind: LabelSwap | Iid) -> None:
    kind.check(5, 10)


def test_scenarios_by_name() -> None:
    assert scenario("label-swap", None) == LabelSwap(clusters=4)
    assert scenario("label-swap", 2) == LabelSwap(clusters=2)
    assert scenario("iid", None) == Iid()
    assert all(kind.name == name for name, kind in SCENARIOS.items())
    for wrong, near in (("label_swap", "label-swap"), ("idd", "iid")):
        with pytest.raises(UsageError, match=f"did you mean '{near}'"):
            scenario(wrong, None)
    with pytest.raises(UsageError, match="choose one of iid, label-swap"):
        scenario("xyz", None)
