"""Scenarios: what a cluster does to its samples, names, and combinations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from securecluster.core.randomness import Randomness
from securecluster.data import (
    SCENARIOS,
    ClientDirichlet,
    Combined,
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
)
from securecluster.data.datasets import Task
from securecluster.data.pools import ArrayPool
from securecluster.data.scenario_base import Part
from securecluster.data.scenarios import scenario
from securecluster.errors import UsageError

SEEDS = st.integers(0, 10**6)
Toy = Callable[..., Source]
HALVES = (Task("low", (0, 1, 2, 3, 4)), Task("high", (5, 6, 7, 8, 9)))


def deal(
    source: Any, kind: Any, clients: int, samples: int | None = None, seed: int = 0
) -> Federation:
    return Federation.simulate(source, scenario=kind, clients=clients, samples=samples, seed=seed)


def flat(classes: int = 10, n: int = 100) -> Source:
    """A source of vectors."""
    return Source(
        "flat", classes, (4,), ArrayPool(np.zeros((n, 4), np.float32), np.arange(n) % classes)
    )


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


@given(SEEDS, st.integers(2, 12))
def test_each_cluster_swaps_exactly_one_pair_and_no_two_share_a_label(
    seed: int, classes: int
) -> None:
    y = np.tile(np.arange(classes), 3)
    x = np.arange(len(y), dtype=np.float32)[:, None]
    touched: list[int] = []
    for cluster in range(classes // 2):
        new_x, new_y = LabelSwap(clusters=classes // 2).transform(
            cluster, x, y, classes, Randomness(seed)
        )
        moved = {(int(a), int(b)) for a, b in zip(y, new_y, strict=True) if a != b}
        assert len(moved) == 2 and {(b, a) for a, b in moved} == moved
        assert all(b == dict(moved).get(int(a), int(a)) for a, b in zip(y, new_y, strict=True))
        assert np.array_equal(new_x, x) and new_y.dtype == np.int64
        touched += [a for a, _ in moved]
    assert len(touched) == len(set(touched)) == classes // 2 * 2
    assert np.array_equal(y, np.tile(np.arange(classes), 3))


def test_pairs_follow_the_seed() -> None:
    y = np.arange(10)
    made = [LabelSwap().transform(0, y[:, None], y, 10, Randomness(seed)) for seed in range(20)]
    assert len({tuple(labels.tolist()) for _, labels in made}) > 5


@given(SEEDS, st.integers(2, 7), st.data())
def test_each_cluster_permutes_all_labels_in_its_own_way(
    seed: int, classes: int, data: st.DataObject
) -> None:
    clusters = data.draw(st.integers(1, 2 if classes == 2 else 6))
    x, y = np.zeros((classes, 1), np.float32), np.arange(classes)
    kind, draw = LabelPermutation(clusters), Randomness(seed)
    labels = [kind.transform(c, x, y, classes, draw)[1] for c in range(clusters)]
    made = [tuple(own.tolist()) for own in labels]
    assert all(sorted(p) == list(range(classes)) for p in made)
    assert len(set(made)) == clusters


@pytest.mark.parametrize(("clusters", "quarters"), [(2, [0, 2]), (3, [0, 1, 2]), (4, [0, 1, 2, 3])])
def test_rotation_turns_by_exact_quarters(clusters: int, quarters: list[int]) -> None:
    side = 4
    x = np.random.default_rng(0).random((2, 3, side, side)).astype(np.float32)
    for cluster, turns in enumerate(quarters):
        expected = x.copy()
        for _ in range(turns):  # counterclockwise: what was in the last column is now on top
            previous = expected.copy()
            for i in range(side):
                for j in range(side):
                    expected[:, :, i, j] = previous[:, :, j, side - 1 - i]
        turned, _ = Rotation(clusters).transform(cluster, x, np.arange(2), 10, Randomness(0))
        assert np.array_equal(turned, expected)


def test_inversion_makes_negatives_of_the_second_cluster() -> None:
    x, y = np.array([[[[0.0, 0.25], [0.75, 1.0]]]], np.float32), np.array([3])
    same, _ = Inversion().transform(0, x, y, 10, Randomness(0))
    inverted, labels = Inversion().transform(1, x, y, 10, Randomness(0))
    assert same.tolist() == x.tolist() and inverted.tolist() == [[[[1.0, 0.75], [0.25, 0.0]]]]
    assert inverted.dtype == np.float32 and labels.tolist() == [3]


@pytest.mark.parametrize(
    "kind",
    [
        Rotation(4), Rotation(2), Inversion(), LabelPermutation(3), Dirichlet() + Rotation(3),
        LabelSwap(2) + Inversion(),
    ],
)  # fmt: skip
def test_federations_treat_training_and_test_data_alike(kind: Scenario, toy: Toy) -> None:
    """What happened to a sample is read off its pixels and label; it must be the same within a
    cluster, and differ elsewhere.
    """
    source = toy(n=2000, test=400)
    federation = deal(source, kind, 12, 40, seed=5)
    assert federation.truth is not None and source.test is not None
    done: dict[int, set[Any]] = {}
    for shard, cluster in zip(federation.shards, federation.truth, strict=True):
        for x, y, pool, first in (
            (shard.x, shard.y, source.train, 0),
            (shard.x_test, shard.y_test, source.test, 100_000),
        ):
            for image, label in zip(x, y, strict=True):
                negative = image.max() < first - 1 or (first == 0 and image.min() < 0)
                plain = 1 - image if negative else image
                row = int(plain.min())
                done.setdefault(cluster, set()).add(
                    (bool(negative), tuple((plain - row).ravel().tolist()))
                )
                if not any(isinstance(p, LabelPermutation | LabelSwap) for p in kind.parts):
                    assert label == pool.y[row - first]
    per_cluster = [frozenset(done[c]) for c in sorted(done)]
    assert all(len(ways) == 1 for ways in per_cluster)
    ways = {"rotation": {2: 2, 3: 3, 4: 4}, "inversion": {2: 2}}
    expected = np.prod([ways[p.name][p.declared] if p.name in ways else 1 for p in kind.parts])
    assert len(set(per_cluster)) == expected


def test_label_permutations_hold_for_all_samples_of_a_cluster(toy: Toy) -> None:
    source = toy(n=2000, test=400)
    federation = deal(source, LabelPermutation(3), 9, 100, seed=1)
    assert federation.truth is not None and source.test is not None
    maps: dict[int, dict[int, set[int]]] = {c: {k: set() for k in range(10)} for c in range(3)}
    for shard, cluster in zip(federation.shards, federation.truth, strict=True):
        for x, y, labels, first in (
            (shard.x, shard.y, source.train.y, 0),
            (shard.x_test, shard.y_test, source.test.y, 100_000),
        ):
            for image, label in zip(x, y, strict=True):
                maps[cluster][int(labels[int(image.min()) - first])].add(int(label))
    assert all(len(to) == 1 for each in maps.values() for to in each.values())
    permutations = [tuple(next(iter(to)) for to in each.values()) for each in maps.values()]
    assert len(set(permutations)) == 3 and all(sorted(p) == list(range(10)) for p in permutations)


def test_iid_leaves_everything_as_it_is(toy: Toy) -> None:
    source = toy(n=70)
    federation = deal(source, Iid(), 7)
    assert federation.truth == (0,) * 7
    for shard in federation.shards:
        rows = shard.x.min(axis=(1, 2, 3)).astype(int)
        assert np.array_equal(shard.x, source.train.read(rows))
        assert np.array_equal(shard.y, source.train.y[rows])


def test_a_source_is_not_changed_by_what_is_dealt_from_it(toy: Toy) -> None:
    source = toy()
    before = source.train.read(np.arange(600))
    deal(source, Inversion() + LabelSwap(), 8)
    assert np.array_equal(source.train.read(np.arange(600)), before)


CANNOT: list[tuple[Scenario, int, int, str]] = [
    (LabelSwap(clusters=6), 20, 10, "at most 5 clusters"),
    (LabelSwap(clusters=2), 20, 3, "at most 1 clusters"),
    (LabelSwap(clusters=5), 4, 10, "at most 4 clusters"),
    (LabelSwap(clusters=0), 4, 10, "at least one"),
    (LabelSwap(clusters=-1), 4, 10, "at least one"),
    (Iid(clusters=2), 4, 10, "one cluster"),
    (Iid(clusters=0), 4, 10, "at least one"),
    (LabelPermutation(clusters=7), 20, 3, "only 6 permutations"),
    (LabelPermutation(clusters=5), 4, 10, "at most 4 clusters"),
    (Rotation(clusters=1), 20, 10, "2, 3 or 4 clusters, not 1"),
    (Rotation(clusters=5), 20, 10, "2, 3 or 4 clusters, not 5"),
    (Inversion(clusters=3), 20, 10, "two clusters"),
    (Pathological(labels=0), 20, 10, "1 to 10 of toy's labels, not 0"),
    (Pathological(labels=11), 20, 10, "1 to 10 of toy's labels, not 11"),
    (Pathological(clusters=6), 20, 10, "need 12 labels, and toy has 10"),
    (Pathological(overlap=True), 20, 10, "cannot share"),
    (Dirichlet(alpha=0), 20, 10, "alpha above 0"),
    (Dirichlet(alpha=-1), 20, 10, "alpha above 0"),
    (Dirichlet(alpha=float("nan")), 20, 10, "alpha above 0"),
    (Dirichlet(alpha=float("inf")), 20, 10, "alpha above 0"),
    (ClientDirichlet(alpha=0), 20, 10, "'client-dirichlet' needs an alpha above 0"),
    (ClientDirichlet(alpha=float("inf")), 20, 10, "alpha above 0"),
    (LabelSwap() + ClientDirichlet() + Dirichlet(), 20, 10, "both"),
    (Dirichlet(clusters=0), 20, 10, "at least one"),
    (Dirichlet(clusters=21), 20, 10, "at most 20 clusters"),
    (LabelSplit(labels=0), 20, 10, "1 to 10 of toy's labels"),
    (LabelSplit(labels=11), 20, 10, "1 to 10 of toy's labels"),
    (LabelSplit(clusters=5), 20, 10, "4 different windows of 7"),
    (LabelSplit(labels=10), 20, 10, "1 different windows of 10"),
    (Tasks(), 20, 10, "none are defined for toy"),
    (Natural(), 20, 10, "needs a data set whose samples belong to clients"),
    (Iid() + Dirichlet(), 20, 10, "'iid' and 'dirichlet' both"),
    (
        LabelSwap() + LabelSwap(),
        20,
        10,
        "'label-swap' can be combined with others, not with itself",
    ),
    (Dirichlet(clusters=3) + Rotation() + Inversion(), 20, 10, "24 clusters among 20 clients"),
    (LabelSwap() + Rotation(), 15, 10, "16 clusters among 15"),
]


@pytest.mark.parametrize(("kind", "clients", "classes", "words"), CANNOT)
def test_combinations_that_cannot_be_made_are_refused(
    kind: Scenario, clients: int, classes: int, words: str, toy: Toy
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        deal(toy(classes=classes), kind, clients)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Tasks(minority=-0.1), "between 0 and 0.5"),
        (Tasks(minority=0.6), "between 0 and 0.5"),
        (Tasks(minority=float("nan")), "between 0 and 0.5"),
        (Tasks(sizes=(1.0,)), "2 tasks"),
        (Tasks(sizes=(1.0, 0.0)), "2 tasks"),
        (Tasks(sizes=(1.0, float("nan"))), "2 tasks"),
        (Tasks(sizes=(1.0, 2.0, 3.0)), "2 tasks"),
    ],
)
def test_tasks_that_cannot_be_made_are_refused(kind: Scenario, words: str, toy: Toy) -> None:
    with pytest.raises(UsageError, match=words):
        deal(toy(tasks=HALVES), kind, 6)
    with pytest.raises(UsageError, match="at least as many clients, not 1"):
        deal(toy(tasks=HALVES), Tasks(), 1)


@pytest.mark.parametrize("kind", [Rotation(), Inversion()])
def test_vectors_cannot_be_turned_or_inverted(kind: Part) -> None:
    with pytest.raises(UsageError, match=rf"'{kind.name}'.*samples of flat have shape \(4,\)"):
        deal(flat(), kind, 4)
    oblong = Source(
        "oblong", 10, (1, 2, 3), ArrayPool(np.zeros((50, 1, 2, 3), np.float32), np.arange(50) % 10)
    )
    if isinstance(kind, Rotation):
        with pytest.raises(UsageError, match=r"square images.*\(1, 2, 3\)"):
            deal(oblong, kind, 4)
    else:
        assert len(deal(oblong, kind, 4)) == 4


@pytest.mark.parametrize(
    "kind",
    [
        LabelSwap(clusters=5),
        LabelSwap(clusters=1),
        Iid(),
        LabelPermutation(5),
        Pathological(clusters=5),
    ],
)
def test_combinations_at_the_limit_are_made(kind: Scenario, toy: Toy) -> None:
    assert len(deal(toy(), kind, 5)) == 5


@pytest.mark.parametrize(
    ("kind", "clusters"),
    [
        (Tasks() + LabelSwap(2), 4),
        (Tasks() + Rotation(4) + Inversion(), 16),
        (LabelSwap(2) + Tasks(), 4),
        (Pathological(clusters=3) + Inversion(), 6),
        (Iid() + Rotation(3), 3),
    ],
)
def test_the_true_clusters_of_a_combination_are_the_distinct_pairs(
    kind: Scenario, clusters: int, toy: Toy
) -> None:
    truth = deal(toy(n=2000, tasks=HALVES), kind, 20, seed=3).truth
    assert truth is not None
    counts = np.bincount(truth)
    assert len(counts) == clusters and counts.min() >= 1 and counts.max() - counts.min() <= 1


def test_combined_clusters_cross_each_other(toy: Toy) -> None:
    """Each label window meets each rotation, and `truth` tells all of these apart."""
    federation = deal(toy(n=4000), Pathological(clusters=2) + Rotation(2), 12, 50)
    assert federation.truth is not None and federation.scenario == "pathological+rotation"
    seen = {
        cluster: (frozenset(shard.y.tolist()), bool(shard.x[0, 0, 0, 0] > shard.x[0, 0, 2, 2]))
        for shard, cluster in zip(federation.shards, federation.truth, strict=True)
    }
    assert len(set(seen.values())) == len(seen) == 4


def test_a_change_of_natural_clients_is_their_truth(toy: Toy) -> None:
    source = toy(owners=np.repeat([f"w{k}" for k in range(12)], 50))
    assert Federation.simulate(source, clients=12, seed=0).truth is None
    changed = deal(source, Natural() + Inversion(), 12)
    assert changed.truth is not None and np.bincount(changed.truth).tolist() == [6, 6]
    assert [bool(s.x.min() < 0) for s in changed.shards] == [bool(t) for t in changed.truth]


def label_counts(federation: Federation) -> Any:
    return np.stack([np.bincount(shard.y, minlength=10) for shard in federation.shards])


def test_every_client_has_labels_of_its_own_within_one_cluster() -> None:
    skewed = deal("digits", ClientDirichlet(0.5), 8, 60)
    assert skewed.truth == (0,) * 8
    shares = label_counts(skewed) / 60
    apart = np.abs(shares[:, None] - shares[None]).sum(2)
    assert (apart + 2 * np.eye(8) > 0.3).all(), "no two clients have the same shares"
    # E max share of Dir(0.5, ...) over ten labels is about 0.4, of even shares 0.1
    assert 0.25 < shares.max(1).mean() < 0.6
    even = label_counts(deal("digits", ClientDirichlet(1000.0), 8, 60)) / 60
    assert even.max() < 0.2
    for shard in skewed.shards:
        held_out = np.bincount(shard.y_test, minlength=10) / len(shard.y_test)
        train = np.bincount(shard.y, minlength=10) / 60
        assert np.abs(held_out - train).max() < 0.1, "tested on what it trains on"
    with_shares = deal("digits", Dirichlet(0.5), 8, 60)
    assert (label_counts(with_shares) == label_counts(skewed)).all()
    assert with_shares.truth == tuple(range(8))


def test_label_skew_within_clusters_of_a_transform() -> None:
    plain = deal("digits", ClientDirichlet(0.5), 8, 60)
    swapped = deal("digits", LabelSwap(4) + ClientDirichlet(0.5), 8, 60)
    assert swapped.truth is not None and np.bincount(swapped.truth).tolist() == [2] * 4
    images = zip(plain.shards, swapped.shards, swapped.truth, strict=True)
    new_labels: dict[int, set[tuple[int, int]]] = {}
    for before, after, cluster in images:
        assert (before.x == after.x).all()
        pairs = zip(before.y.tolist(), after.y.tolist(), strict=True)
        new_labels.setdefault(cluster, set()).update(pairs)
    for renamed in new_labels.values():
        assert len(dict(renamed)) == len(renamed), "one rule for all clients of a cluster"
        assert sum(old != new for old, new in renamed) in (1, 2)


def test_scenarios_by_name() -> None:
    assert scenario("label-swap") == LabelSwap(clusters=4)
    assert scenario("label-swap", 2) == LabelSwap(clusters=2)
    assert scenario("iid") == Iid()
    assert scenario("pathological", labels=3) == Pathological(labels=3)
    assert scenario("label-split", 3, labels=4, overlap=True) == LabelSplit(3, 4, True)
    assert scenario("tasks", minority=0.2, sizes=(1.0, 2.0)) == Tasks(0.2, (1.0, 2.0))
    both = Rotation(2) + Dirichlet(0.1)
    assert scenario("rotation + dirichlet", 2, alpha=0.1) == both
    assert both == Combined((Rotation(2), Dirichlet(0.1)))
    assert scenario("rotation", overlap=True) == Rotation() + Iid(overlap=True)
    skewed = LabelSwap(4) + ClientDirichlet(0.3)
    assert scenario("label-swap+client-dirichlet", 4, alpha=0.3) == skewed
    assert str(Rotation() + Dirichlet()) == "rotation+dirichlet" and str(Rotation()) == "rotation"
    assert all(kind.name == name for name, kind in SCENARIOS.items())
    assert set(SCENARIOS) == {
        "iid", "label-swap", "label-permutation", "rotation", "inversion", "pathological",
        "dirichlet", "client-dirichlet", "label-split", "tasks", "natural", "topics",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "given", "words"),
    [
        ("label_swap", {}, "did you mean 'label-swap'"),
        ("idd", {}, "did you mean 'iid'"),
        ("xyz", {}, "choose one of client-dirichlet, dirichlet"),
        ("rotation+", {}, "unknown scenario ''"),
        ("rotation+tsaks", {}, "did you mean 'tasks'"),
        (
            "rotation",
            {"alpha": 1.0},
            "'rotation' has no alpha: leave it out, or use dirichlet, client",
        ),
        (
            "iid",
            {"labels": 2},
            "has no labels per client: leave it out, or use pathological, label-split",
        ),
        ("dirichlet+rotation", {"minority": 0.1}, "has no minority.*tasks"),
        ("iid", {"sizes": (1.0,)}, "has no task sizes.*tasks"),
        ("natural", {"overlap": True}, "has no overlap"),
        ("tasks", {"clusters": 2}, "takes its clusters from the data set"),
        ("natural", {"clusters": 2}, "takes its clusters from the data set"),
        ("rotation+inversion", {"clusters": 2}, "several numbers of clusters"),
    ],
)
def test_names_and_fields_that_do_not_exist_are_refused(
    text: str, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        scenario(text, **given)
