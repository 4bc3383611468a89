"""Users' own text and trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.models.objectives import Language, Objective, Trajectory

STREAM = np.arange(61) % 7
X, Y = STREAM[:-1].reshape(12, 5), STREAM[1:].reshape(12, 5)
TRACK = np.random.default_rng(0).random((14, 2))
PAST, NEXT = np.stack([TRACK[k : k + 3] for k in range(11)]), TRACK[3:]


def test_of_text_the_last_fifth_is_held_out() -> None:
    federation = Federation.from_arrays(
        {"ann": (X, Y), "bob": (X[:4].astype(np.uint8), Y[:4].tolist())},
        objective=Language(),
        seed=0,
    )
    ann, bob = federation.shards
    assert np.array_equal(ann.x, X[:10]) and np.array_equal(ann.y, Y[:10])
    assert np.array_equal(ann.x_test, X[10:]) and np.array_equal(ann.y_test, Y[10:])
    assert {part.dtype for s in (ann, bob) for part in (s.x, s.y, s.x_test, s.y_test)} == {
        np.dtype(np.int64)
    }
    assert (
        (len(bob.y), len(bob.y_test)) == (4, 0)
        and federation.classes == 7
        and federation.objective == Language()
    )


def test_of_trajectories_the_last_fifth_is_held_out() -> None:
    federation = Federation.from_arrays(
        {"ann": (PAST, NEXT)}, objective=Trajectory((10.0, 20.0)), seed=0
    )
    (ann,) = federation.shards
    assert np.array_equal(ann.x, PAST[:9].astype(np.float32)) and np.array_equal(
        ann.y_test, NEXT[9:].astype(np.float32)
    )
    assert {part.dtype for part in (ann.x, ann.y, ann.x_test, ann.y_test)} == {np.dtype(np.float32)}
    assert federation.classes == 2 and federation.shape == (3, 2)


def test_whole_numbers_are_positions_too_and_no_tokens() -> None:
    federation = Federation.from_arrays(
        {"ann": (np.round(PAST).astype(int), np.round(NEXT).astype(int))},
        objective=Trajectory(),
        seed=0,
    )
    assert federation.shards[0].x.dtype == federation.shards[0].y.dtype == np.float32


def test_large_tokens_never_pass_through_floats() -> None:
    large = np.full((5, 3), 2**24 + 1)
    federation = Federation.from_arrays({"ann": (large, large)}, objective=Language(), seed=0)
    assert federation.classes == 2**24 + 2 and np.array_equal(federation.shards[0].x, large[:4])


def test_the_vocabulary_may_be_larger_than_what_occurs() -> None:
    assert (
        Federation.from_arrays({"ann": (X, Y)}, objective=Language(), classes=50, seed=0).classes
        == 50
    )
    assert Federation.from_arrays({"ann": (X, Y[:, 0])}, classes=9, seed=0).classes == 9
    seen = Federation.from_arrays(
        {"ann": (X, Y)}, test={"ann": (X + 3, Y)}, objective=Language(), seed=0
    )
    assert (
        seen.classes == 10
        and np.array_equal(seen.shards[0].x_test, X + 3)
        and np.array_equal(seen.shards[0].x, X)
    )


def test_given_held_out_sequences_may_be_none() -> None:
    for kind, pair in ((Language(), (X, Y)), (Trajectory(), (PAST, NEXT))):
        federation = Federation.from_arrays(
            {"ann": pair}, test={"ann": ([], [])}, objective=kind, seed=0
        )
        shard = federation.shards[0]
        assert (
            len(shard.y) == len(pair[0])
            and shard.x_test.shape == (0, *pair[0].shape[1:])
            and shard.y_test.shape[0] == 0
        )


@pytest.mark.parametrize(
    ("kind", "bob", "words"),
    [
        (Language(), (X, Y[:, :4]), r"both \(n, L\), not int64 \(10, 5\) and \(10, 4\)"),
        (Language(), (X, Y[:, 0]), r"both \(n, L\)"),
        (Language(), (X / 2, Y), r"both \(n, L\), not float32"),
        (Language(), (X, Y[:9]), "one target per sample"),
        (Language(), (X - 1, Y), "a token lies outside 0"),
        (Language(), (X[:, :4], Y[:, :4]), r"shape \(4,\), those of 'ann' have \(5,\)"),
        (Language(), ([["a"]], [["b"]]), "rectangular"),
        (Language(), ([[1, 2], [3]], Y[:2]), "rectangular"),
        (Language(), (X,), "a pair"),
        (Language(), X, "a pair"),
        (Language(), (X[:0], Y[:0]), "no training samples"),
        (Language(), (3, 4), "one target per sample"),
        (Trajectory(), (PAST, NEXT[:, :1]), r"trajectories are x \(n, T, 2\) and y \(n, 2\)"),
        (Trajectory(), (PAST[:, :, :1], NEXT), r"shape \(3, 1\), those of 'ann'"),
        (Trajectory(), (PAST, NEXT[:, 0]), r"trajectories are x"),
        (Trajectory(), (PAST, np.where(NEXT > 0.5, np.nan, NEXT)), "a position is NaN"),
        (Trajectory(), (PAST * np.nan, NEXT), "NaN or infinite"),
        (Trajectory(), (PAST * 1e300, NEXT), "NaN or infinite"),
        (Trajectory(), (PAST, [*NEXT.astype(str).tolist()[:-1], ["x", "y"]]), "rectangular"),
        (Trajectory((1.0,)), (PAST, NEXT), "metres are 1 numbers"),
    ],
)
def test_sequences_that_cannot_be_learned_are_refused(
    kind: Objective, bob: Any, words: str
) -> None:
    ann = (X, Y) if isinstance(kind, Language) else (PAST, NEXT)
    with pytest.raises(UsageError, match=words) as caught:
        Federation.from_arrays({"ann": ann, "bob": bob}, objective=kind, seed=0)
    assert "\n" not in str(caught.value)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match="client 'ann': a token lies outside 0 … 5"):
        Federation.from_arrays({"ann": (X, Y)}, objective=Language(), classes=6, seed=0)
    with pytest.raises(UsageError, match="client 'ann'"):
        Federation.from_arrays(
            {"ann": (X, Y)}, test={"ann": ([[1, 2], [3]], [1])}, objective=Language(), seed=0
        )


@pytest.mark.parametrize("kind", ["trajectory", Trajectory], ids=["name", "class"])
def test_what_is_no_objective_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match="pass Classification"):
        Federation.from_arrays(
            {"a": (np.zeros((5, 3, 2)), np.zeros((5, 2)))}, objective=kind, seed=0
        )


@pytest.mark.parametrize("metres", [5, (5.0, np.nan), (5.0, -1.0), (0, 1), ("a", "b")])
def test_metres_are_positive_numbers(metres: Any) -> None:
    with pytest.raises(UsageError, match="positive numbers"):
        Trajectory(metres)


@pytest.mark.parametrize("classes", [0, -3, True, 4.0, "4"])
def test_the_number_of_outputs_is_a_whole_number(classes: Any) -> None:
    with pytest.raises(UsageError, match="whole number from 1"):
        Federation.from_arrays(
            {"a": (np.zeros((5, 3), int), np.zeros((5, 3), int))},
            objective=Language(),
            classes=classes,
            seed=0,
        )


@pytest.mark.parametrize("kind", ["complex64", "datetime64[s]", "timedelta64[s]"])
def test_dates_and_complex_numbers_are_no_positions(kind: str) -> None:
    with pytest.raises(UsageError, match="not a rectangular array of numbers"):
        Federation.from_arrays(
            {"a": (np.zeros((5, 3, 2), kind), np.zeros((5, 2)))}, objective=Trajectory(), seed=0
        )


def test_test_samples_of_another_window_are_named() -> None:
    with pytest.raises(UsageError, match=r"its test samples have shape \(4, 2\)"):
        Federation.from_arrays(
            {"a": (np.zeros((5, 3, 2)), np.zeros((5, 2)))},
            test={"a": (np.zeros((5, 4, 2)), np.zeros((5, 2)))},
            objective=Trajectory(),
            seed=0,
        )
