"""What works and is probably not meant: labels, scales and ids."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine

from securecluster import Federation, LabelSwap
from securecluster.data import plausibility
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import Language, Trajectory

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(60, 4))
Y = np.arange(60) % 3


def three(x: Any, y: Any, **more: Any) -> Federation:
    """Three clients with a third of the samples each; warnings are errors here."""
    parts = [range(k, len(x), 3) for k in range(3)]
    return Federation.from_arrays(
        {f"site-{k}": (x[p], y[p]) for k, p in enumerate(parts)}, seed=0, **more
    )


def standard(x: Any) -> Any:
    """Columns with mean 0 and standard deviation 1."""
    return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-9)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (Y + 2_000_000, 3),
        (Y * 10**12, 3),
        (np.where(Y == 0, 1000, Y), 3),
        (np.arange(60) * 400, 60),
    ],
    ids=["from two million", "ten to the twelfth", "one beyond a thousand", "spread wide"],
)
def test_labels_far_beyond_their_number_are_refused(labels: Any, classes: int) -> None:
    largest = int(labels.max())
    with pytest.raises(
        UsageError,
        match=f"largest label is {largest}, and only {classes} different labels occur: number "
        "labels from 0",
    ) as e:
        three(X, labels)
    assert f"classes={largest + 1}" in str(e.value) and "\n" not in str(e.value)


def test_a_number_of_classes_that_is_given_is_taken_as_it_is() -> None:
    assert three(X, Y + 2_000_000, classes=2_000_003).classes == 2_000_003
    assert three(X, Y + 1, classes=4).classes == 4


@pytest.mark.parametrize(
    ("labels", "sentence", "classes"),
    [
        (Y + 1, "labels start at 1, so 4 classes are learned: number labels from 0", 4),
        (Y * 300, "601 classes are learned, and only 3 of them occur", 601),
    ],
)
def test_gaps_that_may_be_meant_are_said(labels: Any, sentence: str, classes: int) -> None:
    with pytest.warns(SecureClusterWarning, match=sentence) as caught:
        assert three(X, labels).classes == classes
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "labels", [Y, Y * 2, np.where(Y == 2, 5, Y)], ids=["whole", "every other", "a small gap"]
)
def test_small_gaps_are_not_worth_a_word(labels: Any) -> None:
    assert three(X, labels).classes == labels.max() + 1


def test_numbers_to_predict_are_no_classes() -> None:
    x, y = DRAW.normal(size=(300, 2)), np.arange(300)
    with pytest.warns(SecureClusterWarning, match="300 samples have 300 different labels"):
        three(x, y)
    with pytest.warns(SecureClusterWarning, match="150 different labels, and 2 has the rarest"):
        three(x, y // 2)
    three(x, y // 30)
    with pytest.warns(SecureClusterWarning, match="30 samples have 30 different labels"):
        three(x[:30], y[:30])
    three(x[:30], y[:30] // 3)


def test_clients_that_hold_nothing_out_are_named() -> None:
    x, y = DRAW.normal(size=(12, 2)), np.arange(12) % 2
    clients = {"ann": (x, y), "bob": (x[:4], y[:4]), "cyd": (x[:2], y[:2])}
    said = "clients bob, cyd have no test samples, so their score is NaN: give five samples or more"
    with pytest.warns(SecureClusterWarning, match=said):
        Federation.from_arrays(clients, seed=0)
    nobody = dict.fromkeys(clients, (x[:0], y[:0]))
    Federation.from_arrays(clients, test=nobody, seed=0)  # on purpose


def test_labels_below_zero_say_where_labels_start() -> None:
    with pytest.raises(UsageError, match=r"client 'site-0'.*-1: labels start at 0"):
        three(X, Y - 1)


@pytest.mark.parametrize(
    "labels",
    [
        Y.astype(float), Y.astype(np.float32), Y[:, None], Y.astype(np.uint8), torch.tensor(Y),
        torch.tensor(Y, dtype=torch.float64),
    ],
    ids=["float64", "float32", "a column", "uint8", "tensor", "float tensor"],
)  # fmt: skip
def test_labels_that_can_only_mean_one_thing_are_taken(labels: Any) -> None:
    assert three(X, labels).digest() == three(X, Y).digest()


def test_truth_values_are_labels() -> None:
    assert three(X, Y == 1).digest() == three(X, (Y == 1).astype(int)).digest()


def test_tensors_that_record_gradients_are_samples() -> None:
    x = torch.tensor(X, requires_grad=True)
    assert three(x, torch.tensor(Y)).digest() == three(X, Y).digest()


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        (X * [1, 1, 300, 1], "root mean square of column 2 is"),
        (X * [1, 11, 300, 1] + [0, 5, 0, 0], "of columns 1, 2 is"),
        (X * 5, "of columns 0, 1, 2, 3 is"),
        (X + 20, "standardise the features"),
        (X * 1e-3, "root mean square of the samples' norms is"),
        (DRAW.integers(0, 256, (60, 1, 4, 4)), "divide them by the largest, 255"),
        (DRAW.random((60, 1, 4, 4)) * 1e-3, "the samples' norms"),
    ],
    ids=[
        "one column", "two columns", "all columns", "far from zero", "tiny", "pixels",
        "tiny pixels",
    ],
)  # fmt: skip
def test_scales_that_networks_do_not_bear_are_said(x: Any, sentence: str) -> None:
    with pytest.warns(SecureClusterWarning, match=sentence) as caught:
        three(x, Y)
    assert len(caught) == 1 and "\n" not in str(caught[0].message)


@pytest.mark.parametrize(
    "x",
    [
        X, X * 3, X * [1, 1, 5, 1], X + 2, X * 0.2, X * 0, DRAW.random((60, 1, 4, 4)),
        DRAW.normal(size=(60, 1, 4, 4)),
    ],
    ids=[
        "standard", "times three", "one column times five", "off by two", "a fifth", "zeros",
        "pixels", "standard pixels",
    ],
)  # fmt: skip
def test_usual_scales_are_not_worth_a_word(x: Any) -> None:
    three(x, Y)


def test_raw_sets_are_said_and_scaled_ones_are_not() -> None:
    for load in (load_digits, load_wine, load_breast_cancer):
        x, y = load(return_X_y=True)
        with pytest.warns(SecureClusterWarning, match="root mean square"):
            three(x, y)
        three(standard(x), y)
    digits = load_digits()
    three(digits.data / 16, digits.target), three(digits.images[:, None] / 16, digits.target)
    with pytest.warns(SecureClusterWarning, match="divide them by the largest, 255"):
        three(digits.images[:, None] / 16 * 255, digits.target)


def test_simulated_sets_would_raise_no_doubts() -> None:
    federation = Federation.simulate("digits", scenario=LabelSwap(clusters=2), clients=4, seed=0)
    assert plausibility.feature_doubts([shard.x for shard in federation.shards], None, "") == []
    assert plausibility.count_classes([shard.y for shard in federation.shards]) == (10, [])


N = 240
WIDE = DRAW.normal(size=(N, 2))
CLASS = np.arange(N) % 2
SITE = np.arange(N) % 3  # as `three` deals them


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        (
            np.arange(N),
            r"column 2 looks like an id \(a whole number that differs in nearly every row\)",
        ),
        (DRAW.permutation(N) + 2**40, "differs in nearly every row"),
        (np.where(np.arange(N) % 30, np.arange(N), 0), "differs in nearly every row"),
        (SITE, "one whole number for each client"),
        (1000 - 7 * SITE, "one whole number for each client"),
    ],
    ids=["row number", "long number", "a few twice", "client number", "client code"],
)
def test_columns_that_look_like_ids_are_said(column: Any, sentence: str) -> None:
    with pytest.warns(SecureClusterWarning, match=sentence) as caught:
        three(np.c_[WIDE, column], CLASS)
    assert len(caught) == 1 and "leave it out of X" in str(caught[0].message)


@pytest.mark.parametrize(
    "column",
    [
        DRAW.integers(0, 9, N), DRAW.normal(size=N), SITE == 1, np.ones(N),
        np.where(SITE == 1, 1, CLASS), SITE / 7,
    ],
    ids=[
        "counts", "measurements", "two sites alike", "constant", "constant in one",
        "no whole number",
    ],
)  # fmt: skip
def test_usual_columns_are_not_worth_a_word(column: Any) -> None:
    three(np.c_[WIDE, column], CLASS)


def test_few_rows_and_few_clients_may_differ_by_chance() -> None:
    short = np.arange(60) % 20 / 1.0
    three(np.c_[X, short // 1 - 10], Y)
    Federation.from_arrays(
        {f"site-{k}": (np.c_[WIDE[:9], np.full(9, k)], CLASS[:9]) for k in range(2)}, seed=0
    )


def test_text_and_positions_raise_no_doubts() -> None:
    tokens, track = (
        np.arange(600).reshape(30, 20) + 5000,
        np.random.default_rng(0).random((30, 3, 2)) * 1e4,
    )
    Federation.from_arrays({"ann": (tokens, tokens)}, objective=Language(), seed=0)
    Federation.from_arrays({"ann": (track, track[:, 0])}, objective=Trajectory(), seed=0)


def test_a_repr_shows_no_data() -> None:
    federation = three(X, Y)
    assert repr(federation) == (
        "<Federation arrays (own): 3 clients, 48 training and 12 test samples of shape (4,), 3 "
        "classes, seed 0>"
    )
    assert repr(federation.shards[0]) == "<Shard: 16 samples of shape (4,), 4 held out>"
