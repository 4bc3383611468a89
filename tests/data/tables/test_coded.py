"""Tables with gaps, texts and dates as numbers, as scikit-learn's own classes make them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler

from securecluster import Federation
from securecluster.data.facts import check_private_statistics
from securecluster.data.tables.coded import rows
from securecluster.data.tables.parts import frame_table
from securecluster.errors import UsageError

GENERATOR = np.random.default_rng(0)
ROWS = 60
SEX = ["female", "male"]
TABLE = pd.DataFrame(
    {
        "site": ["a", "b", "c"] * (ROWS // 3),
        "age": GENERATOR.integers(20, 90, ROWS).astype(float),
        "sex": GENERATOR.choice(SEX, ROWS),
        "seen": pd.Timestamp("2020-02-03") + pd.to_timedelta(GENERATOR.random(ROWS) * 900, "D"),
        "dose": GENERATOR.normal(200, 30, ROWS),
        "ill": GENERATOR.choice(["no", "yes"], ROWS),
    }
)
TABLE.loc[::7, "age"] = np.nan
TABLE.loc[3::8, "sex"] = None
TABLE.loc[5::9, "seen"] = pd.NaT
TABLE.loc[TABLE["site"] == "b", "dose"] = np.nan  # a column that one client lacks
TABLE.loc[TABLE["site"] == "c", "dose"] = 14.62  # and one that is constant at another
BOUNDS = {"age": (0, 120), "seen": (18000, 20000), "dose": (0, 400)}


def made(**more: Any) -> Federation:
    options = {"client": "site", "label": "ill", "prepare": "auto", "seed": 0, **more}
    return Federation.from_frame(TABLE, **options)


def by_scikit_learn(part: pd.DataFrame, *steps: Any) -> ColumnTransformer:
    """Return scikit-learn's preparation of a client's rows."""
    encoder = OneHotEncoder(categories=[SEX], handle_unknown="ignore", sparse_output=False)
    return ColumnTransformer(
        [
            ("first", make_pipeline(*steps), ["age"]),
            ("text", encoder, ["sex"]),
            ("others", make_pipeline(*steps), ["seen", "dose"]),
        ]
    ).fit(part)


def numbers(part: pd.DataFrame) -> pd.DataFrame:
    """Return rows with days in place of dates."""
    seen = (part["seen"] - pd.Timestamp(0)) / pd.Timedelta(days=1)
    return part.assign(seen=seen)


def test_each_client_is_prepared_as_scikit_learn_does_it() -> None:
    federation = made()
    for name, shard in zip(federation.names, federation.shards, strict=True):
        part = numbers(TABLE[TABLE["site"] == name])
        order = federation_order(name, len(part))
        train = part.iloc[order[: len(shard.y)]]
        imputer = SimpleImputer(strategy="median", keep_empty_features=True)
        transformer = by_scikit_learn(train, imputer, StandardScaler())
        for x, of_part in ((shard.x, train), (shard.x_test, part.iloc[order[len(shard.y) :]])):
            expected = transformer.transform(of_part)
            assert x.shape == expected.shape == (len(x), 5)
            np.testing.assert_allclose(x, expected, atol=1e-6)
        # a column that is missing or constant counts for nothing
        assert (shard.x[:, 4] == 0).all() == (name != "a")


def federation_order(name: str, size: int) -> Any:
    """Return the order in which a client's rows are divided."""
    from securecluster.core.randomness import Randomness

    return Randomness(0).generator("split", name).permutation(size)


def test_public_bounds_fill_gaps_with_their_middle() -> None:
    federation = made(scaling=BOUNDS, prepare={"sex": SEX}, classes=["no", "yes"])
    low, high = np.transpose([BOUNDS[name] for name in ("age", "seen", "dose")])
    shard = federation.shards[0]
    part = numbers(TABLE[TABLE["site"] == "a"])
    train = part.iloc[federation_order("a", len(part))[: len(shard.y)]]
    scaled = MinMaxScaler((-1, 1)).fit([low, high])
    filled = train[["age", "seen", "dose"]].fillna(dict(zip(BOUNDS, (low + high) / 2, strict=True)))
    expected = scaled.transform(filled.to_numpy())
    np.testing.assert_allclose(shard.x[:, [0, 3, 4]], expected, atol=1e-6)
    assert (shard.x[:, 1:3].sum(1) == train["sex"].notna().to_numpy()).all()
    check_private_statistics(federation.facts, "example")


def test_categories_that_were_found_are_refused_under_noise() -> None:
    with pytest.raises(UsageError, match="categories were read from the clients' rows"):
        check_private_statistics(made(classes=["no", "yes"]).facts, "client")
    check_private_statistics(made(classes=["no", "yes"], prepare={"sex": SEX}).facts, "client")


def test_columns_may_come_in_another_order() -> None:
    federation = made(scaling=BOUNDS, prepare={"sex": SEX})
    order = ["dose", "sex", "age", "seen"]
    assert federation.feature_names is not None
    other = Federation.from_frame(
        TABLE[["site", *order, "ill"]],
        client="site",
        label="ill",
        prepare={"sex": SEX},
        scaling=BOUNDS,
        seed=0,
    )
    turned = federation.with_features(order)
    assert turned.digest() == other.digest() and turned.facts == other.facts
    assert turned.shards[1].scale == other.shards[1].scale


def test_a_text_that_nobody_named_is_no_category() -> None:
    frame = pd.DataFrame({"sex": ["male", "other", None, " female "], "age": [1, None, 3, 4]})
    values = rows(frame_table(frame), ["age", "sex"], categories=(None, ("female", "male")))
    np.testing.assert_array_equal(values, [[1, 1], [np.nan, -1], [3, np.nan], [4, 0]])


def test_a_transformer_of_columns_is_taken_at_its_word() -> None:
    numbers = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())
    encoder = OneHotEncoder(categories=[SEX], handle_unknown="ignore")
    parts = [("n", numbers, ["age", "dose", "seen"]), ("c", encoder, ["sex"])]
    federation = made(prepare=ColumnTransformer(parts))
    assert federation.facts == made(prepare={"sex": SEX}).facts
    assert federation.digest() == made().digest()
    with pytest.raises(UsageError, match="prepare does not name seen: name them, or drop them"):
        made(prepare=ColumnTransformer([("n", numbers, ["age", "dose"]), parts[1]]))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"prepare": "all"},
            "give 'auto', a transformer of scikit-learn, or the categories of columns",
        ),
        ({"prepare": MinMaxScaler()}, "prepare has MinMaxScaler, and a model knows how to prepare"),
        (
            {"prepare": ColumnTransformer([("c", OneHotEncoder(), ["sex"])])},
            "a OneHotEncoder that finds categories",
        ),
        ({"prepare": {"sex": []}}, "give 'auto', a transformer of scikit-learn, or"),
        ({"prepare": {"height": [1, 2]}}, "prepare names height, which are no features"),
        ({"scaling": {"age": (0, 9)}}, "bounds lack dose, seen|bounds lack seen, dose"),
    ],
)
def test_what_is_no_preparation_is_refused(more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(**more)


def test_sentences_are_no_categories() -> None:
    table = TABLE.copy()
    table["note"] = [f"note {k}" for k in range(ROWS)]
    long = pd.concat([table, table.assign(note=[f"more {k}" for k in range(ROWS)])])
    with pytest.raises(UsageError, match="holds 120 different texts, such as 'more 0'"):
        Federation.from_frame(long, client="site", label="ill", prepare="auto", seed=0)
