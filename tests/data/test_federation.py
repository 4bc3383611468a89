"""Data sets, scenarios, users' own arrays, and the scores."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score

from securecluster import Federation, Iid, LabelSwap
from securecluster.data.sources import digits
from securecluster.errors import UsageError
from securecluster.metrics import agreement, mean, separation_gap
from securecluster.randomness import Randomness
from securecluster.similarity import cosine, gram, gram_norms, mean_norm


def originals() -> dict[bytes, set[int]]:
    source = digits()
    found: dict[bytes, set[int]] = {}
    for x, y in zip(source.x, source.y, strict=True):
        found.setdefault(x.tobytes(), set()).add(int(y))
    return found


def test_each_cluster_swaps_its_own_pair_in_training_and_test_alike() -> None:
    federation, known = Federation.simulate("digits", seed=3), originals()
    assert federation.truth is not None
    pairs: dict[int, set[tuple[int, int]]] = {}
    for shard, cluster in zip(federation.shards, federation.truth, strict=True):
        for x, y in ((shard.x, shard.y), (shard.x_test, shard.y_test)):
            changed = {(next(iter(known[a.tobytes()])), int(b)) for a, b in zip(x, y, strict=True) if int(b) not in known[a.tobytes()]}
            pairs.setdefault(cluster, set()).update(changed)
    assert all(len(p) == 2 and {(b, a) for a, b in p} == p for p in pairs.values())
    labels = [a for p in pairs.values() for a, _ in p]
    assert len(set(labels)) == len(labels) == 8


def test_nobody_holds_a_sample_twice_and_clusters_are_even_and_shuffled() -> None:
    federation = Federation.simulate("digits", scenario=Iid(), clients=7, seed=0)
    dealt = [x.tobytes() for s in federation.shards for x in (*s.x, *s.x_test)]
    assert len(dealt) == len(set(dealt)) == 7 * (1797 // 7)
    truth = Federation.simulate("digits", clients=18, seed=0).truth
    assert truth is not None
    assert sorted(np.bincount(truth)) == [4, 4, 5, 5]
    assert list(truth) != sorted(truth)
    assert Federation.simulate("digits", seed=1).digest() == Federation.simulate("digits", seed=1).digest()
    assert Federation.simulate("digits", seed=1).digest() != Federation.simulate("digits", seed=2).digest()


def test_samples_are_training_samples_with_a_quarter_more_for_testing() -> None:
    federation = Federation.simulate("digits", clients=5, samples=40, scenario=LabelSwap(clusters=2), seed=0)
    assert {(len(s.y), len(s.y_test)) for s in federation.shards} == {(40, 10)}


X, Y = np.random.default_rng(0).random((10, 3)), np.arange(10) % 2


@pytest.mark.parametrize(
    ("clients", "more", "sentence"),
    [
        ({}, {}, "needs clients"),
        ({"ann": (X[:0], Y[:0]), "bob": (X, Y)}, {}, "'ann' has no training samples"),
        ({"ann": (X, Y), "bob": (np.full((4, 3), np.nan), Y[:4])}, {}, "'bob': a feature is NaN"),
        ({"ann": (X, Y), "bob": (np.full((4, 3), np.inf), Y[:4])}, {}, "'bob': a feature is NaN or infinite"),
        ({"ann": (X, Y[:9])}, {}, "'ann': X"),
        ({"ann": (X, Y / 2)}, {}, "class numbers"),
        ({"ann": (X, Y - 1)}, {}, "outside 0"),
        ({"ann": (X, Y), "bob": (X[:, :2], Y)}, {}, "'bob': its samples have shape"),
        ({"ann": ([[1, 2], [3]], [0, 1])}, {}, "rectangular"),
        ({"ann": ([["a", "b"]], [0])}, {}, "rectangular"),
        ({"ann": (Y, Y)}, {}, "at least one feature"),
        ({"ann": (X, Y)}, {"truth": {"bob": 1}}, "entry for every client"),
        ({"ann": (X, Y)}, {"test": {}}, "entry for every client"),
    ],
)
def test_arrays_that_cannot_work_are_refused_by_name(clients: dict[str, Any], more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        Federation.from_arrays(clients, seed=0, **more)
    assert "\n" not in str(caught.value)


def test_own_arrays_keep_their_samples_and_hold_out_a_fifth() -> None:
    federation = Federation.from_arrays({"ann": (X, Y), "bob": (X + 1, Y)}, truth={"ann": 1, "bob": 0}, seed=0)
    ann = federation.shards[0]
    assert (len(ann.y), len(ann.y_test), federation.truth, federation.classes) == (8, 2, (1, 0), 2)
    assert sorted(map(tuple, np.concatenate([ann.x, ann.x_test]))) == sorted(map(tuple, X.astype(np.float32)))
    held = Federation.from_arrays({"ann": (X, Y)}, test={"ann": (X[:3], Y[:3])}, seed=0).shards[0]
    assert (len(held.y), len(held.y_test)) == (10, 3)


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_scikit_learns_and_exact_means_the_same_partition(seed: int) -> None:
    draw = np.random.default_rng(seed)
    labels, truth = draw.integers(0, 3, 9), draw.integers(0, 3, 9)
    found = agreement(labels, truth)
    assert found["ari"] == pytest.approx(adjusted_rand_score(truth, labels))
    assert found["nmi"] == pytest.approx(normalized_mutual_info_score(truth, labels))
    same = np.equal.outer(labels, labels) == np.equal.outer(truth, truth)
    assert found["exact"] == bool(same.all())
    renamed = draw.permutation(3)[truth]
    assert agreement(renamed, truth)["exact"]
    assert agreement([0, 0, 1, 1, 1], [0, 0, 0, 1, 1])["purity"] == pytest.approx(0.8)


def test_the_separation_gap_is_the_one_of_equation_28() -> None:
    draw = np.random.default_rng(0)
    alpha = draw.uniform(-1, 1, (6, 6))
    alpha = (alpha + alpha.T) / 2
    truth = [0, 1, 0, 1, 2, 2]
    pairs = [(i, j) for i in range(6) for j in range(i)]
    intra = min(alpha[i, j] for i, j in pairs if truth[i] == truth[j])
    cross = max(alpha[i, j] for i, j in pairs if truth[i] != truth[j])
    assert separation_gap(alpha, truth) == pytest.approx(intra - cross)
    assert separation_gap(alpha, [0] * 6) is None
    assert separation_gap(alpha, list(range(6))) is None
    assert mean(np.array([np.nan, 0.5, 1.0])) == 0.75
    assert mean(np.array([np.nan])) is None


def test_similarities_are_numpys_in_float64_also_over_several_column_blocks() -> None:
    rows = torch.randn(4, (1 << 16) + 77)
    rows[2] = 0
    exact = rows.double().numpy()
    inner = gram(rows)
    np.testing.assert_allclose(inner.numpy(), exact @ exact.T, rtol=1e-12, atol=1e-9)
    np.testing.assert_allclose(gram_norms(inner).numpy(), np.linalg.norm(exact, axis=1), rtol=1e-12)
    alpha = cosine(inner).numpy()
    assert (alpha[2] == [0, 0, 1, 0]).all()
    assert alpha[0, 1] == pytest.approx(exact[0] @ exact[1] / np.linalg.norm(exact[0]) / np.linalg.norm(exact[1]))
    turn = torch.linalg.qr(torch.randn(50, 50, dtype=torch.float64))[0]
    some = torch.randn(5, 50, dtype=torch.float64)
    torch.testing.assert_close(cosine(gram(some @ turn)), cosine(gram(some)), rtol=1e-10, atol=1e-12)


def test_the_norm_of_a_mean_is_unbiased_under_sampling_and_exact_for_everyone() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = torch.randn(12, 40, generator=draw, dtype=torch.float64) + 0.3
    exact = float(rows.mean(0).norm())
    assert mean_norm(rows.mean(0), rows.norm(dim=1), 12) == pytest.approx(exact)
    picks = [torch.randperm(12, generator=draw)[:4] for _ in range(3000)]
    squares = [mean_norm(rows[p].mean(0), rows[p].norm(dim=1), 12) ** 2 for p in picks]
    naive = np.mean([float(rows[p].mean(0).square().sum()) for p in picks])
    assert np.mean(squares) == pytest.approx(exact**2, rel=0.05)
    assert naive > 1.5 * exact**2


def test_randomness_is_a_function_of_its_path() -> None:
    one, two = Randomness(1), Randomness(1)
    two.generator("anything").random()
    assert one.generator("a", 1).random(3).tolist() == two.generator("a", 1).random(3).tolist()
    draws = {one.key("a", 1), one.key("a", "1"), one.key("a1"), one.key("a", 1, 0), Randomness(2).key("a", 1)}
    assert len(draws) == 5
    assert all(len(key) == 32 for key in draws)
    assert 0 <= one.integer("x") < 1 << 63
