"""Tables with gaps, texts and dates as numbers, as scikit-learn's own classes make them."""

from __future__ import annotations

from pathlib import Path
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
from securecluster.errors import SecureClusterWarning, UsageError

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


NUMBERS = [str(k) for k in range(30, 90)]
READ: dict[str, tuple[list[str], list[float] | None]] = {  # of `auto`: numbers, or None for texts
    "blanks and no-break spaces": ([f"\u00a0{k} " for k in NUMBERS], list(range(30, 90))),
    "a day, an hour, a zone": (
        [f"2024-01-02T{k % 24:02d}:30:00+02:00" for k in range(60)],
        [19724 + (k % 24 - 1.5) / 24 for k in range(60)],
    ),
    "truth": (["TRUE", "False", "true"] * 20, [1, 0, 1] * 20),
    "codes": (["0121", "0345"] * 30, None),
    "yes and no": (["yes", "no", "?"] * 20, None),
}
REFUSED = {
    "points and commas": ["1.5", "2,5"] * 30,
    "thousands": [f"{k},000.5" for k in NUMBERS],
    "thousands with points": [f"{k}.000,5" for k in NUMBERS],
    "thousands with blanks": [f"{k}\u00a0000" for k in NUMBERS],
    "some with thousands": ["1,000", "12"] * 30,
    "percent": [f"{k} %" for k in NUMBERS],
    "a unit": [f"{k} mg" for k in NUMBERS],
    "a word among numbers": ["unknown", *NUMBERS[1:]],
    "below a limit": ["<0.5", *NUMBERS[1:]],
    "another minus": [f"\u2212{k}" for k in NUMBERS],
    "infinite": ["inf", *NUMBERS[1:]],
    "beyond all numbers": ["1e400", *NUMBERS[1:]],
    "days in two forms": ["2024-01-31", "31.01.2024"] * 30,
    "days as in no calendar": ["2024-02-28", "2024-02-30"] * 30,
    "days as in America": [f"{1 + k % 12}/{1 + k % 28}/2024" for k in range(60)],
    "times": [f"{k % 24}:30" for k in range(60)],
    "case": ["yes", "Yes", "no"] * 20,
    "blanks within": ["a b", "a  b"] * 30,
    "accents in two forms": ["K\u00f6ln", "Ko\u0308ln"] * 30,
}


def with_column(values: list[str], folder: Path, **more: Any) -> Federation:
    """Return the federation of a file with one more column, `x`."""
    path = folder / "rows.csv"
    TABLE[["site", "age", "ill"]].assign(x=values).to_csv(path, index=False)
    roles: Any = {"client_column": "site", "label_column": "ill", "prepare": "auto", "seed": 0}
    return Federation.from_csv(path, **{**roles, **more})


@pytest.mark.parametrize("case", READ)
def test_cells_that_are_certain_are_read(case: str, tmp_path: Path) -> None:
    texts, values = READ[case]
    federation = with_column(texts, tmp_path)
    assert federation.scaling is not None
    kinds = federation.scaling.categories[1]
    expected = None if values else tuple(sorted({*texts} - {"?"}))
    assert kinds == expected
    if values:
        shard = federation.shards[0]
        assert shard.seen is not None
        of_site = np.array(values)[::3][federation_order("a", 20)[: len(shard.y)]]
        np.testing.assert_allclose(shard.seen[:, 1], [of_site.min(), of_site.max()])


@pytest.mark.parametrize("case", REFUSED)
def test_cells_that_are_not_are_refused_with_their_line(case: str, tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"column 'x' of .*rows.csv holds .*\(line \d+\)"
    ) as caught:
        with_column(REFUSED[case], tmp_path)
    assert "\n" not in str(caught.value)


def test_texts_that_begin_as_numbers_do_are_said(tmp_path: Path) -> None:
    with pytest.warns(SecureClusterWarning, match=r"'x' holds texts that begin as numbers do"):
        with_column(["1-5 years", "6-9 years", "more"] * 20, tmp_path)
    named = {"x": ["1-5 years", "6-9 years", "More"]}
    with pytest.warns(SecureClusterWarning, match=r"'x' has 20 cells that are none of its categ"):
        with_column(["1-5 years", "6-9 years", "more"] * 20, tmp_path, prepare=named)
    with pytest.warns(SecureClusterWarning, match=r"'ward' has 20 cells that are none of its"):
        table = TABLE.assign(ward=[1, 2, 4] * 20)
        options: Any = {"client": "site", "label": "ill", "seed": 0}
        Federation.from_frame(table, prepare={"sex": SEX, "ward": [1, 2]}, **options)


def test_infinite_values_are_refused_before_they_are_scaled() -> None:
    with pytest.raises(UsageError, match=r"'dose' of the table holds inf .row 1., which is"):
        Federation.from_frame(
            TABLE.assign(dose=np.inf), client="site", label="ill", prepare="auto", seed=0
        )
    x = np.array([[1.0, np.inf]] * 6)
    with pytest.raises(UsageError, match="client 'a': a feature is NaN or infinite"):
        Federation.from_arrays({"a": (x, [0, 1] * 3)}, prepare="auto", seed=0)
