"""Users' own text and trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import sparse

from securecluster.data import Federation
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import Language, Objective, Trajectory

STREAM = np.arange(61) % 7
X, Y = STREAM[:-1].reshape(12, 5), STREAM[1:].reshape(12, 5)
TRACK = np.random.default_rng(0).random((14, 2))
PAST, NEXT = np.stack([TRACK[k : k + 3] for k in range(11)]), TRACK[3:]


ZEROS = (np.zeros((5, 3, 2)), np.zeros((5, 2)))


def own(ann: Any, kind: Any, bob: Any = None, **more: Any) -> Federation:
    """A federation of one client, or of two."""
    clients = {"ann": ann} if bob is None else {"ann": ann, "bob": bob}
    return Federation.from_arrays(clients, objective=kind, seed=0, **more)


def test_of_text_the_last_fifth_is_held_out() -> None:
    with pytest.warns(SecureClusterWarning, match="client 'bob' has no test samples"):
        federation = own((X, Y), Language(), bob=(X[:4].astype(np.uint8), Y[:4].tolist()))
    ann, bob = federation.shards
    assert np.array_equal(ann.x, X[:10]) and np.array_equal(ann.y, Y[:10])
    assert np.array_equal(ann.x_test, X[10:]) and np.array_equal(ann.y_test, Y[10:])
    assert {part.dtype for s in (ann, bob) for part in (s.x, s.y, s.x_test, s.y_test)} == {
        np.dtype(np.int64)
    }
    assert (len(bob.y), len(bob.y_test)) == (4, 0)
    assert federation.classes == 7
    assert federation.objective == Language()


def test_of_trajectories_the_last_fifth_is_held_out() -> None:
    federation = own((PAST, NEXT), Trajectory((10.0, 20.0)))
    (ann,) = federation.shards
    assert np.array_equal(ann.x, PAST[:9].astype(np.float32))
    assert np.array_equal(ann.y_test, NEXT[9:].astype(np.float32))
    assert {part.dtype for part in (ann.x, ann.y, ann.x_test, ann.y_test)} == {np.dtype(np.float32)}
    assert federation.classes == 2 and federation.shape == (3, 2)


def test_whole_numbers_are_positions_too_and_no_tokens() -> None:
    whole = (np.round(PAST).astype(int), np.round(NEXT).astype(int))
    federation = own(whole, Trajectory())
    assert federation.shards[0].x.dtype == federation.shards[0].y.dtype == np.float32


def test_large_tokens_never_pass_through_floats() -> None:
    large = np.full((5, 3), 2**24 + 1)
    federation = own((large, large), Language())
    assert federation.classes == 2**24 + 2 and np.array_equal(federation.shards[0].x, large[:4])


def test_the_vocabulary_may_be_larger_than_what_occurs() -> None:
    assert own((X, Y), Language(), classes=50).classes == 50
    assert Federation.from_arrays({"ann": (X, Y[:, 0])}, classes=9, seed=0).classes == 9
    seen = own((X, Y), Language(), test={"ann": (X + 3, Y)})
    assert seen.classes == 10
    assert np.array_equal(seen.shards[0].x_test, X + 3)
    assert np.array_equal(seen.shards[0].x, X)


def test_given_held_out_sequences_may_be_none() -> None:
    for kind, pair in ((Language(), (X, Y)), (Trajectory(), (PAST, NEXT))):
        federation = own(pair, kind, test={"ann": ([], [])})
        shard = federation.shards[0]
        assert len(shard.y) == len(pair[0])
        assert shard.x_test.shape == (0, *pair[0].shape[1:])
        assert shard.y_test.shape[0] == 0


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
        own(ann, kind, bob=bob)
    assert "\n" not in str(caught.value)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(UsageError, match="client 'ann': a token lies outside 0 … 5"):
        own((X, Y), Language(), classes=6)
    with pytest.raises(UsageError, match="client 'ann'"):
        own((X, Y), Language(), test={"ann": ([[1, 2], [3]], [1])})


@pytest.mark.parametrize("kind", ["trajectory", Trajectory], ids=["name", "class"])
def test_what_is_no_objective_is_refused(kind: Any) -> None:
    with pytest.raises(UsageError, match=r"pass Classification|unknown task"):
        own(ZEROS, kind)


@pytest.mark.parametrize("metres", [5, (5.0, np.nan), (5.0, -1.0), (0, 1), ("a", "b")])
def test_metres_are_positive_numbers(metres: Any) -> None:
    with pytest.raises(UsageError, match="positive numbers"):
        Trajectory(metres)


@pytest.mark.parametrize("classes", [0, -3, True, 4.0, "4"])
def test_the_number_of_outputs_is_a_whole_number(classes: Any) -> None:
    with pytest.raises(UsageError, match="whole number from 1"):
        own((np.zeros((5, 3), int), np.zeros((5, 3), int)), Language(), classes=classes)


@pytest.mark.parametrize("kind", ["complex64", "datetime64[s]", "timedelta64[s]"])
def test_dates_and_complex_numbers_are_no_positions(kind: str) -> None:
    with pytest.raises(UsageError, match="not a rectangular array of numbers"):
        own((np.zeros((5, 3, 2), kind), np.zeros((5, 2))), Trajectory())


def test_test_samples_of_another_window_are_named() -> None:
    with pytest.raises(UsageError, match=r"its test samples have shape \(4, 2\)"):
        own(ZEROS, Trajectory(), test={"ann": (np.zeros((5, 4, 2)), np.zeros((5, 2)))})


ROWS = np.random.default_rng(0).normal(size=(20, 2))
CLASSES = (ROWS[:, 0] > 0).astype(int)
SHUFFLED = np.random.default_rng(1).permutation(20)


def frames(index: Any = None, order: Any = None) -> tuple[Any, Any]:
    """X and y of pandas with the same labels of rows, y in another order if there is one."""
    pandas = pytest.importorskip("pandas")
    x = pandas.DataFrame(ROWS, columns=["a", "b"], index=index)
    y = pandas.Series(CLASSES, index=index)
    return x, y if order is None else y.iloc[order]


def pairs_of(federation: Federation) -> set[tuple[bytes, int]]:
    """The samples of the first client, training and held-out, each with its label."""
    shard = federation.shards[0]
    x, y = np.concatenate([shard.x, shard.x_test]), np.concatenate([shard.y, shard.y_test])
    return pairs(x, y)


def pairs(x: Any, y: Any) -> set[tuple[bytes, int]]:
    return {(row.tobytes(), int(label)) for row, label in zip(x, y, strict=True)}


RIGHT = pairs(ROWS.astype(np.float32), CLASSES)
LABELS = [
    None,
    range(100, 120),
    [f"patient-{k}" for k in range(20)],
    [(k // 5, k % 5) for k in range(20)],  # labels of two levels
]


@pytest.mark.parametrize("index", LABELS, ids=["default", "numbers", "text", "pairs"])
def test_labels_go_to_the_rows_of_their_index(index: Any) -> None:
    pandas = pytest.importorskip("pandas")
    if index is not None and isinstance(index[0], tuple):
        index = pandas.MultiIndex.from_tuples(index)
    x, y = frames(index, SHUFFLED)
    assert pairs_of(Federation.from_arrays({"ann": (x, y)}, seed=0)) == RIGHT
    column = y.to_frame("ill")  # a table of one column
    assert pairs_of(Federation.from_arrays({"ann": (x, column)}, seed=0)) == RIGHT
    plain = Federation.from_arrays({"ann": (ROWS, CLASSES)}, seed=0)
    aligned = Federation.from_arrays({"ann": (x.to_numpy(), y.loc[x.index].to_numpy())}, seed=0)
    assert Federation.from_arrays({"ann": (x, y)}, seed=0).digest() == plain.digest()
    assert aligned.digest() == plain.digest()


def test_held_out_rows_and_sequences_are_aligned_too() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = frames(None, SHUFFLED)
    federation = Federation.from_arrays({"ann": (x, y)}, test={"ann": (x, y)}, seed=0)
    assert np.array_equal(federation.shards[0].y_test, CLASSES)
    tokens, following = pandas.DataFrame(X), pandas.DataFrame(Y).iloc[::-1]
    text = Federation.from_arrays({"ann": (tokens, following)}, objective=Language(), seed=0)
    shard = text.shards[0]
    assert np.array_equal(np.concatenate([shard.y, shard.y_test]), Y)


def test_weights_go_to_the_rows_of_their_index() -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame({"row": np.arange(20) / 20}, index=[f"patient-{k}" for k in range(20)])
    labels = pandas.Series(np.arange(20) % 2, index=rows.index)
    weights = rows["row"].iloc[SHUFFLED]
    for given in (weights, weights.loc[rows.index], weights.loc[rows.index].to_numpy()):
        shard = Federation.from_arrays(
            {"ann": (rows, labels)}, weights={"ann": given}, seed=0
        ).shards[0]
        assert shard.weights == pytest.approx(shard.x[:, 0], abs=1e-6)
    with pytest.raises(UsageError, match="client 'ann', weights as y"):
        weights.index = [f"other-{k}" for k in range(20)]
        Federation.from_arrays({"ann": (rows, labels)}, weights={"ann": weights}, seed=0)


def test_rows_go_by_position_unless_both_have_an_index() -> None:
    x, y = frames(None, SHUFFLED)
    by_position = pairs(ROWS.astype(np.float32), CLASSES[SHUFFLED])
    for pair in ((ROWS, y), (x, y.to_numpy()), (x, y.tolist()), (ROWS, CLASSES[SHUFFLED])):
        assert pairs_of(Federation.from_arrays({"ann": pair}, seed=0)) == by_position
    # equal labels of rows after a new numbering
    renumbered = (x.reset_index(drop=True), y.reset_index(drop=True))
    assert pairs_of(Federation.from_arrays({"ann": renumbered}, seed=0)) == by_position


def test_repeated_labels_in_the_same_order_go_by_position() -> None:
    repeated = [k // 2 for k in range(20)]
    assert pairs_of(Federation.from_arrays({"ann": frames(repeated)}, seed=0)) == RIGHT


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda x, y: (x, y.set_axis(range(1, 21))), "the index of X has other rows than that"),
        (lambda x, y: (x, y.iloc[:19]), "the index of X has other rows than that of y"),
        (lambda x, y: (x.iloc[:19], y), "the index of X has other rows than that of y"),
        (lambda x, y: (x, y.set_axis([str(k) for k in range(20)])), "the index of X has other"),
        (lambda x, y: (x.set_axis([0, *range(19)]), y), "some labels repeat, so nothing says"),
        (lambda x, y: (x, y.set_axis([0, *range(19)])), "some labels repeat, so nothing says"),
    ],
    ids=["shifted", "fewer labels", "fewer rows", "text", "repeated rows", "repeated labels"],
)
@pytest.mark.parametrize("held_out", [False, True])
def test_rows_that_nothing_brings_together_are_refused(
    change: Any, sentence: str, held_out: bool
) -> None:
    x, y = frames()
    clients = {"ann": (x, y) if held_out else change(x, y)}
    test = {"ann": change(x, y)} if held_out else None
    with pytest.raises(UsageError, match=rf"client 'ann': .*{sentence}.*: give them the same inde"):
        Federation.from_arrays(clients, test=test, seed=0)


def test_true_clusters_may_be_a_series_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    clients = {1: (ROWS, CLASSES), 2: (ROWS + 1, CLASSES)}
    truth = pandas.Series([7, 5], index=[2, 1])
    assert Federation.from_arrays(clients, truth=truth, seed=0).truth == (5, 7)
    for wrong, sentence in (
        (pandas.Series([7, 5, 5], index=[2, 1, 1]), "truth: 1 and 1 would both be the client '1'"),
        (pandas.Series([7, 5]), r"truth must have an entry for every client.*check \['0', '2'\]"),
    ):
        with pytest.raises(UsageError, match=sentence):
            Federation.from_arrays(clients, truth=wrong, seed=0)
    series = pandas.Series([(ROWS, CLASSES), (ROWS + 1, CLASSES)], index=[1, 2])
    same = Federation.from_arrays(series, seed=0)
    assert same.digest() == Federation.from_arrays(clients, seed=0).digest()


GROUPS = np.array(["north", "south"])[np.arange(20) % 2]


def of_groups(x: Any, y: Any, groups: Any) -> str:
    return Federation.from_groups(x, y, groups, seed=0).digest()


def test_a_list_calls_clients_by_their_positions() -> None:
    pair = (ROWS, CLASSES)
    listed = Federation.from_arrays([pair, pair], test=[pair, pair], truth=[1, 0], seed=0)
    named = {0: pair, 1: pair}
    same = Federation.from_arrays(named, test=named, truth={0: 1, 1: 0}, seed=0)
    assert listed.names == ("0", "1") and listed.truth == same.truth == (1, 0)
    assert listed.digest() == same.digest()
    assert Federation.from_arrays([pair, pair], truth=np.array([3, 4]), seed=0).truth == (3, 4)
    with pytest.raises(UsageError, match="test must have an entry for every client"):
        Federation.from_arrays([pair, pair], test=[pair], seed=0)


def test_sparse_samples_are_the_dense_ones() -> None:
    dense = np.where(ROWS > 0, ROWS, 0)
    plain = Federation.from_arrays({"ann": (dense, CLASSES)}, seed=0).digest()
    for kind in (sparse.csr_matrix, sparse.csc_array, sparse.coo_matrix):
        made = {"ann": (kind(dense), CLASSES)}
        assert Federation.from_arrays(made, seed=0).digest() == plain
        whole = Federation.from_groups(kind(dense), CLASSES, GROUPS, seed=0)
        assert whole.digest() == of_groups(dense, CLASSES, GROUPS)


def test_samples_of_groups_are_their_clients() -> None:
    by_name = {name: (ROWS[name == GROUPS], CLASSES[name == GROUPS]) for name in set(GROUPS)}
    expected = Federation.from_arrays(dict(sorted(by_name.items())), seed=0)
    made = Federation.from_groups(ROWS, CLASSES, GROUPS, seed=0)
    assert made.names == expected.names == ("north", "south")
    assert made.digest() == expected.digest()
    assert of_groups(ROWS.tolist(), CLASSES.tolist(), GROUPS.tolist()) == made.digest()
    numbered = Federation.from_groups(ROWS, CLASSES, np.arange(20) % 2 + 3, seed=0)
    assert numbered.names == ("3", "4")


def test_groups_of_tables_are_taken_by_their_rows() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = frames(None, SHUFFLED)
    plain = of_groups(ROWS, CLASSES, GROUPS)
    assert of_groups(x, y, GROUPS) == plain
    assert of_groups(x, y, pandas.Series(GROUPS, index=x.index)) == plain
    assert of_groups(x, CLASSES, pandas.Categorical(GROUPS)) == plain
    with pytest.raises(UsageError, match="the index of groups is another one than that of X"):
        of_groups(x, y, pandas.Series(GROUPS, index=x.index[::-1]))


@pytest.mark.parametrize(
    ("groups", "sentence"),
    [
        (GROUPS[:19], "a row for each sample, and not X 20, y 20, groups 19"),
        (np.array(["a", None] * 10, object), "groups hold values of several types, or empty ones"),
        (np.array([np.nan, 1.0] * 10), "nan is no client's name"),
    ],
)
def test_groups_that_name_no_clients_are_refused(groups: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        of_groups(ROWS, CLASSES, groups)


def test_a_column_that_holds_no_numbers_is_named() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS).rename(columns=str)
    for values, content in (
        (["er", "icu"] * 10, "text"),
        (pandas.Categorical(["er", "icu"] * 10), "text"),
        (pandas.to_datetime(["2024-01-01"] * 20), "dates"),
    ):
        mixed = table.assign(ward=pandas.Series(values, dtype=getattr(values, "dtype", object)))
        with pytest.raises(
            UsageError,
            match=f"client 'ann': column 'ward' holds {content}, not numbers: leave it out of X, or"
            " encode it as numbers",
        ):
            Federation.from_arrays({"ann": (mixed, CLASSES)}, seed=0)
    for empty in (np.nan, None):
        missing = table.assign(**{"1": empty})
        with pytest.raises(UsageError, match="client 'ann': a value of '1' is NaN or infinite"):
            Federation.from_arrays({"ann": (missing, CLASSES)}, seed=0)


def test_channels_may_be_the_last_axis() -> None:
    images = np.random.default_rng(0).random((20, 6, 5, 3))
    first = Federation.from_arrays({"ann": (images.transpose(0, 3, 1, 2), CLASSES)}, seed=0)
    clients = {"ann": (images, CLASSES)}
    last = Federation.from_arrays(clients, test=clients, channels="last", seed=0)
    assert last.shape == first.shape == (3, 6, 5)
    assert np.array_equal(last.shards[0].x_test, images.transpose(0, 3, 1, 2).astype(np.float32))
    said = r"shape \(6, 5, 3\) look like images with the channels last.*give channels='last'"
    with pytest.warns(SecureClusterWarning, match=said):
        Federation.from_arrays(clients, seed=0)
    with pytest.raises(UsageError, match="client 'ann': channels='last' is for images"):
        Federation.from_arrays({"ann": (ROWS, CLASSES)}, channels="last", seed=0)
    with pytest.raises(UsageError, match="channels = 'middle': give 'first' or 'last'"):
        Federation.from_arrays(clients, channels="middle", seed=0)


def test_one_table_in_place_of_clients_is_sent_to_from_frame() -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(ROWS)
    with pytest.raises(UsageError, match=r"not DataFrame: .*Federation.from_frame takes one table"):
        Federation.from_arrays(table, seed=0)
    with pytest.raises(UsageError, match=r"'ann': .* a pair .*not pandas.*DataFrame"):
        Federation.from_arrays({"ann": table}, seed=0)
    with pytest.raises(UsageError, match=r"client 'ann': its samples are a pair .*, and 3 things"):
        Federation.from_arrays({"ann": (ROWS, CLASSES, CLASSES)}, seed=0)
