"""Dealing sequences: topics, natural clients in the order of time, and what has no labels to deal
by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.data import (
    SCENARIOS,
    ClientDirichlet,
    Dirichlet,
    Federation,
    Iid,
    Inversion,
    LabelPermutation,
    LabelSplit,
    LabelSwap,
    Natural,
    Pathological,
    Rotation,
    Scenario,
    Source,
    Tasks,
    Topics,
)
from securecluster.data.datasets import default_scenario
from securecluster.data.pools import ArrayPool, lasting
from securecluster.data.scenarios import scenario
from securecluster.errors import UsageError
from securecluster.models.objectives import Language, Objective, Trajectory

TEST_ROWS = 100_000  # rows of the test pool are numbered from here
NAMES = np.array(["arts", "law", "sport", "war", "trade"], object)
SEEDS = st.integers(0, 10**6)


def deal(
    source: Any, kind: Any, clients: int, samples: int | None = None, seed: int = 0
) -> Federation:
    return Federation.simulate(source, scenario=kind, clients=clients, samples=samples, seed=seed)


def tokens(first: int, count: int, **known: Any) -> ArrayPool:
    """Texts of four tokens that all are the row's number."""
    rows = np.repeat(first + np.arange(count), 4).reshape(count, 4)
    return ArrayPool(rows, rows.copy(), **known)


def text(
    n: int = 500,
    test: int | None = 200,
    owners: Any = None,
    groups: Any = None,
    gap: int | None = None,
) -> Source:
    """A source of texts; groups by the row's number unless they are given, and larger the later
    they come.
    """
    draw = np.random.default_rng(n)

    def topics(count: int) -> Any:
        return NAMES[draw.choice(5, count, p=[0.1, 0.15, 0.2, 0.25, 0.3])]

    train = tokens(0, n, owners=owners, groups=topics(n) if owners is None else groups, gap=gap)
    held = None if test is None else tokens(TEST_ROWS, test, groups=topics(test))
    return Source("texts", 10**6, (4,), train, held, objective=Language())


def hands(federation: Federation) -> Iterator[tuple[list[int], list[int]]]:
    """Rows to train and to test on, per client."""
    for shard in federation.shards:
        assert shard.x.dtype == shard.y.dtype == np.int64 and np.array_equal(shard.x, shard.y)
        yield shard.x[:, 0].tolist(), shard.x_test[:, 0].tolist()


@given(
    st.integers(1, 5),
    st.integers(5, 14),
    st.sampled_from([None, 6]),
    st.sampled_from([None, 500]),
    SEEDS,
)
def test_clients_hold_one_topic_each_and_no_window_twice(
    clusters: int, clients: int, samples: int | None, test: int | None, seed: int
) -> None:
    source = text(1500, test)
    federation = deal(source, Topics(clusters), clients, samples, seed=seed)
    assert source.train.groups is not None
    assert federation.truth is not None
    assert federation.scenario == "topics"
    sizes = Counter(federation.truth)
    assert set(sizes) == set(range(clusters)) and max(sizes.values()) - min(sizes.values()) <= 1
    topic: dict[int, set[str]] = {}
    for (train, held), cluster in zip(hands(federation), federation.truth, strict=True):
        known = [source.train.groups[row] for row in train]
        for row in held:
            pool = source.train if test is None else source.test
            assert pool is not None and pool.groups is not None
            known.append(pool.groups[row - (TEST_ROWS if test else 0)])
        topic.setdefault(cluster, set()).update(known)
    assert all(len(names) == 1 for names in topic.values())
    assert len(set(map(frozenset, topic.values()))) == clusters
    largest = {name for name, _ in Counter(source.train.groups.tolist()).most_common(clusters)}
    assert {name for names in topic.values() for name in names} == largest
    dealt = [row for pair in hands(federation) for hand in pair for row in hand]
    assert len(dealt) == len(set(dealt))
    assert len({len(s.y) for s in federation.shards}) == 1
    assert len({len(s.y_test) for s in federation.shards}) == 1
    if samples:
        assert {(len(s.y), len(s.y_test)) for s in federation.shards} == {(6, 2)}


def test_all_windows_of_the_scarcest_topic_are_dealt() -> None:
    source = text()
    federation = deal(source, Topics(5), 10)
    assert source.train.groups is not None
    assert source.test is not None
    assert source.test.groups is not None
    for pool, size in (
        (source.train.groups, len(federation.shards[0].y)),
        (source.test.groups, len(federation.shards[0].y_test)),
    ):
        assert size == min(Counter(pool.tolist()).values()) // 2
    with pytest.raises(UsageError, match=f"at most {len(federation.shards[0].y)} each, not 300"):
        deal(source, Topics(5), 10, 300)
    shared = deal(source, Topics(5, overlap=True), 10, 30)
    dealt = [row for train, _ in hands(shared) for row in train]
    assert len(dealt) == 300 > len(set(dealt))
    assert all(len(set(train)) == 30 for train, _ in hands(shared))


def test_the_order_of_topics_and_windows_follows_the_seed() -> None:
    made = [Federation.simulate(text(), clients=8, samples=5, seed=seed) for seed in (0, 1, 0)]
    assert made[0].digest() == made[2].digest() != made[1].digest()
    assert len({m.truth for m in made}) == 2
    assert {m.scenario for m in made} == {"topics"}


def owned(gap: int | None, grouped: bool = True) -> Source:
    """Twelve owners of 20 to 31 rows that lie among each other, in three groups."""
    owners = np.concatenate([np.full(20 + k, f"w{k:02d}", object) for k in range(12)])
    owners = np.random.default_rng(0).permutation(owners)
    groups = np.array([f"g{int(name[1:]) % 3}" for name in owners], object)
    return text(len(owners), None, owners, groups if grouped else None, gap)


@pytest.mark.parametrize(("gap", "samples"), [(0, None), (1, None), (3, None), (3, 8), (0, 3)])
def test_in_time_the_last_fifth_is_held_out_after_the_gap(gap: int, samples: int | None) -> None:
    source = owned(gap)
    federation = deal(source, Natural(), 7, samples, seed=2)
    assert source.train.owners is not None
    for name, (train, held) in zip(federation.names, hands(federation), strict=True):
        own = [row for row, owner in enumerate(source.train.owners) if owner == name]
        fifth = len(own) // 5
        first, last = own[: len(own) - fifth - gap], own[len(own) - fifth :]
        kept = None if samples is None else max(1, round(samples / 4))
        assert (train, held) == (first[:samples], last[:kept])


def test_without_an_order_a_random_fifth_is_held_out() -> None:
    source = owned(None)
    held = [rows for _, rows in hands(deal(source, Natural(), 12))]
    assert source.train.owners is not None
    last = [
        set(np.flatnonzero(source.train.owners == name)[-4:].tolist())
        for name in sorted(set(source.train.owners))
    ]
    assert all(set(a) != b for a, b in zip(held, last, strict=True))


def test_groups_of_natural_clients_are_a_reference() -> None:
    federation = Federation.simulate(owned(1), clients=12, seed=0)
    assert federation.scenario == "natural"
    assert federation.truth == tuple(int(name[1:]) % 3 for name in federation.names)
    assert Federation.simulate(owned(1, grouped=False), clients=12, seed=0).truth is None


@pytest.mark.parametrize("seed", range(4))
def test_topics_of_owners_draw_as_many_of_each_group(seed: int) -> None:
    source = owned(2)
    federation = deal(source, Topics(3), 8, seed=seed)
    natural = deal(source, Natural(), 12, seed=seed)
    assert federation.truth is not None and sorted(Counter(federation.truth).values()) == [2, 3, 3]
    assert len(set(federation.names)) == 8
    groups = [int(name[1:]) % 3 for name in federation.names]
    assert len(set(zip(federation.truth, groups, strict=True))) == 3
    for name, shard in zip(federation.names, federation.shards, strict=True):
        assert np.array_equal(shard.x, natural.shards[natural.names.index(name)].x)
        assert np.array_equal(shard.x_test, natural.shards[natural.names.index(name)].x_test)


def test_owners_with_too_few_rows_are_left_out() -> None:
    owners = np.array(list("aaaabbbbbcccccccddddddd")[::-1], object)
    assert {owners[r] for r in lasting(owners, 0)} == {"b", "c", "d"}
    assert {owners[r] for r in lasting(owners, 4)} == {"c", "d"}
    assert lasting(owners, 6).size == 0 and lasting(owners, 0).tolist() == list(range(19))


@pytest.mark.parametrize("test", [None, 60])
def test_iid_deals_sequences_at_random(test: int | None) -> None:
    federation = deal(text(100, test), Iid(), 4)
    dealt = [row for pair in hands(federation) for hand in pair for row in hand]
    assert federation.truth == (0,) * 4 and len(dealt) == len(set(dealt)) == 100 + (test or 0)
    assert sorted(dealt[:20]) != dealt[:20]
    assert federation.objective == Language()
    assert federation.classes == 10**6


def bare(kind: Objective) -> Source:
    """A source without owners and groups."""
    draw = np.random.default_rng(0)
    if isinstance(kind, Language):
        pool = ArrayPool(draw.integers(0, 9, (80, 4)), draw.integers(0, 9, (80, 4)))
        return Source("texts", 9, (4,), pool, objective=kind)
    x, y = draw.random((80, 5, 2), np.float32), draw.random((80, 2), np.float32)
    return Source("tracks", 2, (5, 2), ArrayPool(x, y), objective=kind)


LABELLED = [
    LabelSwap(1), LabelPermutation(2), Pathological(), Dirichlet(), LabelSplit(), Tasks(),
    Rotation(), Inversion(), ClientDirichlet(),
]  # fmt: skip


@pytest.mark.parametrize("kind", [Language(), Trajectory()])
@pytest.mark.parametrize("what", [*LABELLED, Iid() + LabelSwap(2)], ids=str)
def test_scenarios_of_labels_and_images_are_refused(what: Scenario, kind: Objective) -> None:
    with pytest.raises(
        UsageError,
        match=r"deals with labelled samples, and those of (texts|tracks) have no labels: use iid$",
    ):
        deal(bare(kind), what, 4)
    with pytest.raises(UsageError, match=r"have no labels: use iid or natural or topics$"):
        deal(owned(1), what, 4)


def test_every_scenario_is_either_refused_or_dealt() -> None:
    labelled = {part.name for what in LABELLED for part in what.parts}
    assert labelled | {"iid", "natural", "topics"} == set(SCENARIOS)


@pytest.mark.parametrize("kind", [Language(), Trajectory()])
def test_a_source_without_owners_and_groups_is_dealt_iid(kind: Objective) -> None:
    federation = Federation.simulate(bare(kind), clients=4, samples=10, seed=0)
    assert federation.scenario == "iid" and federation.objective == kind
    given = {row.tobytes() for row in bare(kind).train.read(np.arange(80))}
    assert all(
        row.tobytes() in given for shard in federation.shards for row in (*shard.x, *shard.x_test)
    )


@pytest.mark.parametrize(
    ("source", "what", "clients", "words"),
    [
        (text(), Topics(6), 20, "at most 5 clusters of texts, a group each, not 6"),
        (text(), Topics(4), 3, "at most 3 clusters"),
        (text(), Topics(0), 3, "at least one"),
        (text(), Natural(), 3, "needs a data set whose samples belong to clients"),
        (
            bare(Language()),
            Topics(1),
            3,
            "samples lie in groups, as those of ag_news and mobility, not texts",
        ),
        (owned(1), Topics(3), 12 + 1, "a group of texts has 4 clients, not 5: use fewer clients"),
        (owned(1), Topics(3, overlap=True), 6, "share none: leave the overlap out"),
        (owned(1), Natural(), 13, "has 12 clients of its own, not 13"),
        (text(), Topics(5), 400, "use fewer clients"),
    ],
)
def test_what_cannot_be_dealt_is_refused(
    source: Source, what: Scenario, clients: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        deal(source, what, clients)
    assert "\n" not in str(caught.value)


def test_a_test_pool_without_groups_is_refused() -> None:
    source = text()
    without = Source(
        "texts", 10**6, (4,), source.train, tokens(TEST_ROWS, 50), objective=Language()
    )
    with pytest.raises(UsageError, match="test samples of texts lie in no groups"):
        deal(without, Topics(2), 4)


def test_topics_by_name() -> None:
    assert scenario("topics") == Topics() and scenario("topics", 2, overlap=True) == Topics(2, True)
    for name, usual in (("ag_news", "topics"), ("shakespeare", "natural"), ("mobility", "natural")):
        assert default_scenario(name) == usual
    with pytest.raises(UsageError, match="as those of ag_news and mobility, not digits"):
        deal("digits", Topics(), 8)


def test_an_owner_of_four_rows_trains_on_all_of_them() -> None:
    """Where nothing is held out, no gap is left out either."""
    source = text(7, None, np.array(list("aaaabbb"), object), None, gap=2)
    assert list(hands(deal(source, Natural(), 2))) == [([0, 1, 2, 3], []), ([4, 5, 6], [])]
