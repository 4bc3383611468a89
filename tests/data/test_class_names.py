"""Labels of any kind, the class numbers that they become, and the names that stay."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.preprocessing import LabelEncoder

from securecluster import Federation
from securecluster.errors import UsageError

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(30, 3))
WARDS = DRAW.choice(["surgery", "icu", "er"], 30)


def made(y: Any, **more: Any) -> Federation:
    """A federation of two clients with the same labels."""
    return Federation.from_arrays({"ann": (X, y), "bob": (X + 0.1, y)}, seed=0, **more)


def numbers_of(federation: Federation) -> list[int]:
    """Class numbers of one client's samples, in the order of X."""
    shard = federation.shards[0]
    samples = np.concatenate([shard.x, shard.x_test])
    labels = np.concatenate([shard.y, shard.y_test])
    number_of = {x.tobytes(): int(y) for x, y in zip(samples, labels, strict=True)}
    return [number_of[x.tobytes()] for x in X.astype(np.float32)]


@pytest.mark.parametrize(
    "y",
    [
        WARDS,
        WARDS.tolist(),
        WARDS.astype(object),
        WARDS[:, None],
        WARDS == "icu",
        (WARDS == "icu").astype(object),
    ],
    ids=["text", "list", "objects", "column", "booleans", "boolean objects"],
)
def test_labels_are_numbered_in_ascending_order_as_scikit_learn_does(y: Any) -> None:
    encoder = LabelEncoder()
    expected = encoder.fit_transform(np.ravel(y))
    federation = made(y)
    assert numbers_of(federation) == expected.tolist()
    assert federation.class_names == tuple(encoder.classes_.tolist())
    assert federation.classes == len(encoder.classes_)
    assert {shard.y.dtype for shard in federation.shards} == {np.dtype(np.int64)}


def test_signs_are_names_of_two_classes() -> None:
    federation = made(np.where(WARDS == "icu", 1, -1))
    assert federation.class_names == (-1, 1)
    assert numbers_of(federation) == (WARDS == "icu").astype(int).tolist()


@pytest.mark.parametrize(
    ("first", "second"),
    [("icu", "icu "), ("i cu", "i  cu"), ("icu", "ICU"), ("ic\u00fc", "icu\u0308"), ("1", "1.0")],
)
def test_labels_are_compared_as_names_of_clients_are(first: str, second: str) -> None:
    clients = {name: (X, [label, "er"] * 15) for name, label in (("ann", first), ("bob", second))}
    said = r"the labels .* \(client 'ann'\) and .* \(client 'bob'\) read as one class: spell"
    with pytest.raises(UsageError, match=said):
        Federation.from_arrays(clients, seed=0)


def test_who_names_two_labels_tells_them_apart() -> None:
    clients = {"ann": (X, ["icu", "er"] * 15), "bob": (X, ["ICU", "er"] * 15)}
    assert Federation.from_arrays(clients, classes=["icu", "ICU", "er"], seed=0).classes == 3


def test_a_label_of_a_newcomer_is_compared_so_too() -> None:
    names = ("er", "icu", "surgery")
    blank = np.where(WARDS == "icu", "icu ", WARDS)
    assert made(blank).with_classes(names).digest() == made(WARDS).digest()
    assert made(blank).class_names == names
    with pytest.raises(UsageError, match=r"none of the classes .*: did you mean 'icu'"):
        made(np.where(WARDS == "icu", "Icu", WARDS)).with_classes(names)


def test_labels_of_pandas_and_polars_are_numbered_too() -> None:
    pandas = pytest.importorskip("pandas")
    plain = made(WARDS)
    for y in (
        pandas.Series(WARDS),
        pandas.Series(pandas.Categorical(WARDS, ["unused", "er", "icu", "surgery"])),
        pandas.Series(WARDS, dtype="string"),
        pandas.get_dummies(WARDS),
    ):
        assert made(y).class_names == ("er", "icu", "surgery")
        assert made(y).digest() == plain.digest()
    numbers = pandas.Series(np.arange(30) % 3, dtype="Int64")
    assert made(numbers).class_names is None
    assert made(numbers).digest() == made(np.arange(30) % 3).digest()
    numbers[4] = pandas.NA
    with pytest.raises(UsageError, match="client 'ann': some labels are empty"):
        made(numbers)


def test_one_hot_labels_are_the_numbers_of_their_columns() -> None:
    numbers = np.arange(30) % 3
    for rows in (np.eye(3)[numbers], np.eye(3, dtype=bool)[numbers], np.eye(3, dtype=int)[numbers]):
        federation = made(rows)
        assert numbers_of(federation) == numbers.tolist() and federation.class_names is None
    for wrong in (np.eye(3)[numbers] * 0.5, np.ones((30, 2)), np.zeros((30, 2))):
        with pytest.raises(UsageError, match="one-hot, with a single 1 in each row"):
            made(wrong)


def test_class_numbers_need_no_names() -> None:
    for y in (np.arange(30) % 3, (np.arange(30) % 3).astype(float), (np.arange(30) % 3)[:, None]):
        assert made(y).class_names is None
        assert "class_names" not in repr(made(y).facts_of(0).class_names)
    assert made(np.arange(30) % 3, classes=[0, 1, 2]).class_names is None


def test_given_classes_are_in_their_order_and_may_be_more_than_occur() -> None:
    names = ["surgery", "er", "icu", "ward"]
    federation = made(WARDS, classes=names)
    assert federation.class_names == tuple(names) and federation.classes == 4
    assert [names[k] for k in numbers_of(federation)] == WARDS.tolist()
    tens = made(np.arange(30) % 3 * 10, classes=[20, 10, 0])
    assert tens.class_names == (20, 10, 0)
    assert numbers_of(tens) == [2 - k % 3 for k in range(30)]


@pytest.mark.parametrize(
    ("y", "more", "sentence"),
    [
        (WARDS, {"classes": ["er", "icu"]}, "'surgery' is none of the classes 'er', 'icu'"),
        (WARDS, {"classes": 3}, "labels are text, and classes = 3: give the names of the classes"),
        (WARDS, {"classes": ["er", "er"]}, "at least two different labels"),
        (WARDS, {"classes": ["er", 1]}, "different labels of one kind"),
        (WARDS, {"classes": [("er",)]}, "is no label|at least two"),
        ([1, "a"] * 15, {}, "labels are of several types"),
        ([b"a", b"b"] * 15, {}, "class numbers .*, text or booleans, not"),
        ([None, "a"] * 15, {}, "some labels are empty"),
        ([0.5, 1.0] * 15, {}, "text or booleans, not floats that are not whole numbers"),
        ([float("nan"), 1.0] * 15, {}, "some labels are empty"),
        (np.array([float("nan"), 1.0] * 15, object), {}, "some labels are empty"),
        (np.zeros((30, 2, 2)), {}, "one label per sample"),
    ],
)
def test_labels_that_are_none_are_refused_in_one_sentence(
    y: Any, more: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        made(y, **more)
    assert "\n" not in str(caught.value)


def test_held_out_labels_are_numbered_with_the_others() -> None:
    clients = {"ann": (X, WARDS), "bob": (X, WARDS)}
    test = {"ann": (X[:2], ["dead", "er"]), "bob": (X[:1], ["icu"])}
    federation = Federation.from_arrays(clients, test=test, seed=0)
    assert federation.class_names == ("dead", "er", "icu", "surgery")
    assert federation.shards[0].y_test.tolist() == [0, 1]
    assert federation.shards[1].y_test.tolist() == [2]


def test_classes_of_another_federation_number_these_labels() -> None:
    whole = made(WARDS)
    some = made(np.where(WARDS == "icu", "icu", "surgery"))
    renumbered = some.with_classes(whole.class_names or ())
    assert renumbered.class_names == whole.class_names and renumbered.classes == 3
    expected = np.where(WARDS == "icu", 1, 2).tolist()
    assert numbers_of(renumbered) == expected
    with pytest.raises(UsageError, match="client 'ann': the label 'er' is none of the classes"):
        whole.with_classes(("icu", "surgery"))
    with pytest.raises(UsageError, match="have no names: give its labels as 'icu'"):
        made(np.arange(30) % 3).with_classes(("icu", "er", "surgery"))


def test_a_client_tells_no_names_that_its_data_gave() -> None:
    with pytest.raises(UsageError, match=r"would say which labels this client has.*classes=\["):
        made(WARDS).facts_of(0)
    told = made(WARDS, classes=["er", "icu", "surgery"]).facts_of(0)
    assert told.class_names == ("er", "icu", "surgery")
    # booleans are both, whichever of them occur
    only = Federation.from_arrays({"ann": (X, [True] * 30)}, seed=0)
    assert only.facts_of(0).class_names == (False, True)


def test_a_repr_has_the_names() -> None:
    assert "3 classes (er, icu, surgery), seed 0" in repr(made(WARDS))
