"""Who gets which samples: disjointness, sizes, shares of labels, and true clusters that match the
data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.core.randomness import Randomness
from securecluster.data import (
    Dirichlet,
    Federation,
    Iid,
    Inversion,
    LabelSplit,
    LabelSwap,
    Natural,
    Pathological,
    Rotation,
    Scenario,
    Source,
    Tasks,
)
from securecluster.data.allocation import Wanted
from securecluster.data.datasets import Task
from securecluster.errors import UsageError

Toy = Callable[..., Source]
TEST_ROWS = 100_000
LOW_HIGH = (Task("low", (0, 1, 2, 3, 4)), Task("high", (5, 6, 7, 8, 9)))
UNEVEN = (
    Task("one", (0, 1, 2, 3, 4, 6), 5, 12),
    Task("two", (5, 7, 9), 3, 10),
    Task("three", (8,), 2, 5),
)
SEEDS = st.integers(0, 10**6)
DEALINGS = [
    Iid(), Pathological(), Pathological(clusters=2), Dirichlet(1.0), Dirichlet(1.0, clusters=2),
    LabelSplit(), Tasks(), LabelSwap(2),
]  # fmt: skip


def deal(
    source: Any, kind: Any, clients: int, samples: int | None = None, seed: int = 0
) -> Federation:
    return Federation.simulate(source, scenario=kind, clients=clients, samples=samples, seed=seed)


def rows(x: np.ndarray) -> list[int]:
    """Which rows of the toy these are."""
    return x.min(axis=(1, 2, 3)).astype(int).tolist()


def hands(federation: Federation) -> Iterator[tuple[list[int], list[int]]]:
    """Rows to train and to test on, per client."""
    for shard in federation.shards:
        yield rows(shard.x), rows(shard.x_test)


@given(
    st.sampled_from(DEALINGS),
    st.sampled_from([None, 500]),
    st.integers(2, 12),
    st.sampled_from([None, 8]),
    SEEDS,
)
def test_no_sample_is_dealt_twice_and_sizes_are_even(
    toy: Toy, kind: Scenario, test: int | None, clients: int, samples: int | None, seed: int
) -> None:
    federation = deal(toy(1500, test=test, tasks=LOW_HIGH), kind, clients, samples, seed=seed)
    train, held = (
        [row for hand in part for row in hand] for part in zip(*hands(federation), strict=True)
    )
    assert len(set(train) | set(held)) == len(train) + len(held)
    assert len({len(s.y) for s in federation.shards}) == 1
    assert len({len(s.y_test) for s in federation.shards}) == 1
    assert all(row < TEST_ROWS for row in train)
    assert all((row >= TEST_ROWS) == (test is not None) for row in held)
    assert federation.truth is not None
    assert set(federation.truth) == set(range(max(federation.truth) + 1))
    if samples is not None:
        assert {(len(s.y), len(s.y_test)) for s in federation.shards} == {(8, 2)}


@given(
    st.sampled_from([k for k in DEALINGS if not isinstance(k, LabelSwap)]),
    st.sampled_from([None, 600]),
    st.integers(4, 12),
    SEEDS,
)
def test_the_true_clusters_match_the_labels(
    toy: Toy, kind: Scenario, test: int | None, clients: int, seed: int
) -> None:
    source = toy(3000, test=test, tasks=LOW_HIGH)
    federation = deal(source, kind, clients, 50, seed=seed)
    assert federation.truth is not None
    held = [set(s.y.tolist()) for s in federation.shards]
    for (train, _), shard in zip(hands(federation), federation.shards, strict=True):
        assert np.array_equal(source.train.y[train], shard.y)  # labels belong to their images
        # where each client has a few labels, held-out samples have no other
        if not isinstance(kind, Iid | Dirichlet):
            assert set(shard.y_test.tolist()) <= set(shard.y.tolist())
    same = [[a == b for b in federation.truth] for a in federation.truth]
    if isinstance(kind, Pathological):
        assert same == [[a == b for b in held] for a in held]
        assert kind.clusters is None or all(a == b or not a & b for a in held for b in held)
    elif isinstance(kind, LabelSplit):
        assert same == [[a == b for b in held] for a in held]
        assert {frozenset(h) for h in held} == {frozenset(range(7)), frozenset(range(3, 10))}
    elif isinstance(kind, Tasks):
        low = [bool((s.y < 5).mean() > 0.5) for s in federation.shards]
        assert same == [[a == b for b in low] for a in low]
    elif isinstance(kind, Dirichlet):
        shares = [np.bincount(s.y, minlength=10) for s in federation.shards]
        # equal up to rounding
        close = [[bool(np.abs(a - b).max() <= 1) for b in shares] for a in shares]
        assert same == close


def test_held_out_samples_come_from_the_test_pool_and_are_at_most_an_even_share(toy: Toy) -> None:
    for test, samples, held in (
        (200, 40, 10),
        (100, 100, 10),
        (100, None, 10),
        (1000, None, 100),
        (1000, 3, 1),
    ):
        federation = deal(toy(2000, test=test), Iid(), 10, samples)
        assert {len(s.y_test) for s in federation.shards} == {held}
        assert {len(s.y) for s in federation.shards} == {samples or 200}


@pytest.mark.parametrize(
    "kind",
    [
        Iid(), Rotation(2), Tasks(), LabelSplit(), Dirichlet(), Pathological(),
        Pathological(clusters=2),
    ],
)  # fmt: skip
@pytest.mark.parametrize("test", [None, 400])
def test_as_many_samples_as_a_refusal_names_can_be_dealt(
    kind: Scenario, test: int | None, toy: Toy
) -> None:
    source = toy(2000, test=test, tasks=LOW_HIGH)
    with pytest.raises(UsageError) as caught:
        deal(source, kind, 8, 2000)
    most = int(str(caught.value).split("at most ")[1].split()[0])
    federation = deal(source, kind, 8, most)
    assert {len(s.y) for s in federation.shards} == {most}
    everything = deal(source, kind, 8)
    assert {len(s.y) for s in everything.shards} == {most} and most > 70
    for wrong in (most + 1 + (kind == Pathological()), 0, -1):
        with pytest.raises(UsageError, match=f"not {wrong}"):
            deal(source, kind, 8, wrong)


def test_more_clients_than_samples_are_refused(toy: Toy) -> None:
    for kind in (Iid(), Tasks(), Pathological(), Dirichlet()):
        with pytest.raises(UsageError, match="use fewer"):
            deal(toy(50, test=50, tasks=LOW_HIGH), kind, 51)
    with pytest.raises(UsageError, match="at most 0 each"):
        deal(toy(50, test=5), Iid(), 6, 1)
    with pytest.raises(UsageError, match="too few for 12 clients"):
        deal(toy(200, test=5), LabelSplit(), 12, 2)


def test_shards_are_cut_from_sorted_labels_as_printed(toy: Toy) -> None:
    """600 samples of ten labels in 20 shards of 24: a shard lies in one label or across two
    neighbours.
    """
    federation = deal(toy(600, test=100), Pathological(), 10)
    assert {len(s.y) for s in federation.shards} == {60}
    kinds = [len(set(s.y.tolist())) for s in federation.shards]
    # 60 samples of a label are exactly two shards of 30, dealt at random
    assert set(kinds) <= {1, 2} and np.mean(kinds) > 1.4
    assert sum(np.bincount(s.y, minlength=10) for s in federation.shards).tolist() == [60] * 10
    assert all(c % 30 == 0 for s in federation.shards for c in np.bincount(s.y))
    with pytest.raises(
        UsageError, match="2 shards of equal size, which 41 samples do not make: use 40"
    ):
        deal(toy(600, test=100), Pathological(), 10, 41)


def test_dirichlet_shares_have_the_distributions_moments(toy: Toy) -> None:
    """Mean 1/K and variance (1/K)(1 − 1/K)/(Kα + 1), of shares counted in the dealt labels."""
    for alpha in (0.2, 1.0, 10.0):
        federation = deal(toy(90_000, test=20_000), Dirichlet(alpha), 150, 200, seed=1)
        shares = np.stack([np.bincount(s.y, minlength=10) / 200 for s in federation.shards])
        assert np.allclose(
            shares.mean(axis=0), 0.1, atol=5 * np.sqrt(0.09 / (10 * alpha + 1) / 150)
        )
        assert shares.var() == pytest.approx(0.09 / (10 * alpha + 1), rel=0.25)
        held = np.stack(
            [np.bincount(s.y_test, minlength=10) / len(s.y_test) for s in federation.shards]
        )
        assert np.abs(held - shares).max() <= 1 / 50 + 1 / 200
    few = deal(toy(3000), Dirichlet(0.01), 8, 20, seed=1)
    assert np.mean([np.bincount(s.y).max() for s in few.shards]) >= 16  # of 20


@pytest.mark.parametrize(
    ("minority", "sizes"), [(0.1, None), (0.0, None), (0.4, None), (0.1, (1.0, 1.0, 1.0))]
)
def test_tasks_have_the_papers_clients_minority_and_sizes(
    minority: float, sizes: tuple[float, ...] | None, toy: Toy
) -> None:
    federation = deal(toy(12_000, test=6000, tasks=UNEVEN), Tasks(minority, sizes), 10, 120, seed=2)
    assert federation.truth is not None and np.bincount(federation.truth).tolist() == [5, 3, 2]
    for shard, task in zip(federation.shards, federation.truth, strict=True):
        n = {0: 120, 1: 100, 2: 50}[task] if sizes is None else 120
        assert len(shard.y) == n and abs(len(shard.y_test) - n / 4) <= 0.5
        for y in (shard.y, shard.y_test):
            outside = ~np.isin(y, UNEVEN[task].labels)
            # a share of some labels, each rounded to whole samples
            assert abs(outside.sum() - minority * len(y)) <= 2
            if not minority:
                assert not outside.any()


def test_labels_of_a_task_are_as_frequent_as_in_the_pool(toy: Toy) -> None:
    source = toy(2000, tasks=LOW_HIGH)
    skewed = np.where(np.arange(2000) < 1000, 0, source.train.y)  # half of all samples have label 0
    pool = type(source.train)(source.train.read(np.arange(2000)), skewed)
    source = Source("skewed", 10, source.shape, pool, None, LOW_HIGH)
    federation = deal(source, Tasks(0.0), 2, 300)
    assert federation.truth is not None
    low = federation.shards[federation.truth.index(0)].y
    counts = np.bincount(skewed)[:5]
    assert np.abs(np.bincount(low, minlength=5) - 300 * counts / counts.sum()).max() <= 1


@given(st.integers(3, 40), st.lists(st.integers(1, 9), min_size=1, max_size=3))
def test_clients_are_apportioned_within_one_of_the_ratio(clients: int, weights: list[int]) -> None:
    from securecluster.data.label_skew import apportion

    counts = apportion(clients, [float(w) for w in weights])
    assert counts.sum() == clients and counts.min() >= 1
    ideal = clients * np.array(weights) / sum(weights)
    if ideal.min() >= 1:
        assert np.abs(counts - ideal).max() < 1


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        (LabelSplit(), [range(7), range(3, 10)]),
        (LabelSplit(4), [range(7), range(1, 8), range(2, 9), range(3, 10)]),
        (LabelSplit(2, labels=5), [range(5), range(5, 10)]),
        (LabelSplit(3, labels=2), [range(2), range(4, 6), range(8, 10)]),
        (LabelSplit(1, labels=3), [range(3)]),
    ],
)
def test_label_windows_are_spread_evenly(kind: Scenario, windows: list[range], toy: Toy) -> None:
    federation = deal(toy(3000), kind, 8, 70)
    assert federation.truth is not None
    held = {t: set(s.y.tolist()) for s, t in zip(federation.shards, federation.truth, strict=True)}
    assert [held[t] for t in sorted(held)] == [set(w) for w in windows]


@pytest.mark.parametrize(
    "kind",
    [
        Iid(overlap=True),
        LabelSplit(overlap=True),
        Dirichlet(5.0, overlap=True),
        Iid(overlap=True) + Inversion(),
    ],
)
@pytest.mark.parametrize("test", [None, 200])
def test_overlapping_clients_share_samples_but_never_train_on_what_is_held_out(
    kind: Scenario, test: int | None, toy: Toy
) -> None:
    federation = deal(toy(1000, test=test), kind, 16, 120)
    parts = list(hands(replaced(federation)))
    assert all(len(set(hand)) == len(hand) for pair in parts for hand in pair)
    train, held = ({row for pair in parts for row in pair[k]} for k in (0, 1))
    # each client draws anew from what there is
    assert not train & held and 500 < len(train) < 16 * 120
    assert {len(t) for t, _ in parts} == {120}
    with pytest.raises(UsageError, match="say how many"):
        deal(toy(1000, test=test), kind, 4)


def replaced(federation: Federation) -> Federation:
    """The same with negatives turned back, so that rows can be read."""
    for shard in federation.shards:
        for x in (shard.x, shard.x_test):
            if x.min() < 0:
                x[:] = 1 - x
    return federation


def test_overlap_is_limited_by_what_a_client_can_hold(toy: Toy) -> None:
    federation = deal(toy(1000, test=100), Iid(overlap=True), 3, 1000)
    assert all(sorted(train) == list(range(1000)) for train, _ in hands(federation))
    for kind, words in (
        (Iid(overlap=True), "1 to 1000 each, not 1001"),
        (LabelSplit(overlap=True), "at most 700 each, not 1001"),
    ):
        with pytest.raises(UsageError, match=words):
            deal(toy(1000, test=100), kind, 3, 1001)


def test_natural_clients_hold_their_own_samples_and_a_fifth_is_held_out(toy: Toy) -> None:
    owner = np.random.default_rng(0).permutation(
        np.repeat([f"w{k}" for k in range(8)], [10, 20, 30, 40, 50, 60, 70, 80])
    )
    federation = Federation.simulate(toy(360, owners=owner), clients=5, seed=3)
    assert federation.scenario == "natural"
    assert federation.truth is None
    assert len(set(federation.names)) == 5
    for name, (train, held) in zip(federation.names, hands(federation), strict=True):
        own = np.flatnonzero(owner == name).tolist()
        assert sorted(train + held) == own and len(held) == len(own) // 5
    drawn = [Federation.simulate(toy(360, owners=owner), clients=5, seed=s) for s in range(8)]
    assert len({federation.names for federation in drawn}) > 3
    for name, (train, held) in zip(
        federation.names,
        hands(Federation.simulate(toy(360, owners=owner), clients=5, samples=30, seed=3)),
        strict=True,
    ):
        size = int((owner == name).sum())
        assert (len(train), len(held)) == (
            (30, 8) if size > 40 else (size - size // 5, size // 5)
        ) or size in (38, 40)
    with pytest.raises(UsageError, match="has 8 clients of its own, not 9"):
        Federation.simulate(toy(360, owners=owner), clients=9, seed=0)
    with pytest.raises(UsageError, match="at least one sample, not 0"):
        deal(toy(360, owners=owner), Natural(), 3, 0)


def test_shares_are_rounded_up_or_down_without_bias() -> None:
    shares = np.array([0.05, 0.0, 0.35, 0.25, 0.0, 0.35])
    m = 4000
    counts = Wanted(np.tile(shares, (m, 1)), np.ones(m)).counts(7, Randomness(0))
    assert (counts.sum(axis=1) == 7).all()
    assert (counts >= np.floor(7 * shares)).all() and (counts <= np.ceil(7 * shares)).all()
    assert np.abs(counts.mean(axis=0) - 7 * shares).max() < 4 * 0.5 / np.sqrt(m)


def test_who_gets_what_follows_the_seed(toy: Toy) -> None:
    for kind in DEALINGS:
        source = toy(1500, test=300, tasks=LOW_HIGH)
        one, two, other = (deal(source, kind, 6, 30, seed=s).digest() for s in (4, 4, 5))
        assert one == two != other


@pytest.mark.parametrize(
    ("kind", "clients", "samples", "seed", "digest"),
    [
        (LabelSwap(4), 20, None, 0, "19fc9fbacbc94eda4b3911e6a948c3a1"),
        (LabelSwap(4), 20, None, 1, "5c2802091eeaddd514a0a673be5f6a56"),
        (LabelSwap(2), 6, 40, 7, "c4c5600539b3ac84eec5e455d203813d"),
        (Iid(), 20, None, 0, "e6d357c623c5f3e5110d9d70fe267360"),
        (Iid(), 6, 40, 1, "36d3399715448401554be664aafb0558"),
    ],
)
def test_digits_are_dealt_as_in_the_first_version(
    kind: Scenario, clients: int, samples: int | None, seed: int, digest: str
) -> None:
    """Recorded before scenarios could be combined: run folders written then still resume."""
    assert deal("digits", kind, clients, samples, seed=seed).digest() == digest
