"""Which rows of own data are held out, against scikit-learn's splitters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import GroupShuffleSplit, StratifiedShuffleSplit

from securecluster import Federation, Split, sweep
from securecluster.cli.main import main
from securecluster.data.simulation import Simulation
from securecluster.data.splits import class_counts
from securecluster.errors import UsageError
from securecluster.folders.run_folder import run_config
from securecluster.models.objectives import Language
from securecluster.protocols import ClusteringProtocol

# whose only feature is the number of the row
pytestmark = pytest.mark.filterwarnings("ignore:.*(root mean square of column|looks like an id)")
DRAW = np.random.default_rng(5)
SIZES = ((60, 30, 10), (97, 3), (50,), (5, 5, 5), (41, 17, 9, 2), (2, 2))


def rows(labels: Any) -> tuple[Any, Any]:
    """Samples whose one feature is the number of their row."""
    return np.arange(len(labels), dtype=float)[:, None], np.asarray(labels)


def one(labels: Any, **more: Any) -> Any:
    """The shard of a client of its own."""
    return Federation.from_arrays({"ann": rows(labels)}, **{"classes": 9, "seed": 0, **more})


def held(federation: Federation, client: int = 0) -> list[int]:
    """The numbers of a client's held-out rows, of which all others are trained on."""
    shard = federation.shards[client]
    sides = [shard.x[:, 0].astype(int), shard.x_test[:, 0].astype(int)]
    everyone = np.concatenate(sides)
    assert sorted(everyone) == list(range(len(everyone)))
    return sorted(sides[1].tolist())


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("share", [0.2, 0.25, 0.5])
def test_each_class_has_the_share_that_scikit_learn_gives_it(
    sizes: tuple[int, ...], share: float
) -> None:
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(len(sizes)), sizes))
    count = int(len(labels) * share + 1e-9)
    if len(sizes) > min(count, len(labels) - count):
        pytest.skip("scikit-learn wants a row of each class on both sides")
    splitter = StratifiedShuffleSplit(1, test_size=count, random_state=0)
    ((_, test),) = splitter.split(labels, labels)
    expected = np.bincount(labels[test], minlength=len(sizes))
    found = np.bincount(one(labels, test=share).shards[0].y_test, minlength=len(sizes))
    exact = np.asarray(sizes) * count / len(labels)
    # of equal remainders either class may have the row
    remainders = (exact % 1).round(9).tolist()
    untied = [k for k, remainder in enumerate(remainders) if remainders.count(remainder) == 1]
    assert found[untied].tolist() == expected[untied].tolist()
    assert found.sum() == count and (abs(found - exact) < 1).all()


def test_a_class_with_one_row_is_trained_on() -> None:
    shard = one([0] * 8 + [1] * 8 + [2, 3]).shards[0]
    assert {2, 3} <= set(shard.y) and {2, 3}.isdisjoint(shard.y_test)
    assert np.bincount(shard.y_test).tolist() in ([2, 1], [1, 2])
    assert class_counts(np.array([1, 2, 2]), 4).tolist() == [0, 1, 1]
    # nothing to stratify by
    assert len(one(range(10), classes=10).shards[0].y_test) == 2


def test_of_one_class_or_without_strata_the_split_is_the_draw_alone() -> None:
    labels = DRAW.integers(0, 3, 40)
    plain = held(one(labels, test=Split(stratify=False)))
    assert plain == held(one(np.zeros(40, int)))
    for row in range(40):  # and depends on no label
        changed = labels.copy()
        changed[row] = 3
        assert plain == held(one(changed, test=Split(stratify=False)))


def test_a_split_depends_on_the_clients_own_rows_alone() -> None:
    labels = np.array(["no", "yes"])[(DRAW.random(30) < 0.3).astype(int)]
    others = np.array(["abc", "no", "zzz"])[DRAW.integers(0, 3, 20)]
    classes = ["zzz", "yes", "no", "abc"]
    beside = Federation.from_arrays({"bob": rows(others), "ann": rows(labels)}, seed=0)
    alone = Federation.from_arrays({"ann": rows(labels)}, classes=classes, seed=0)
    assert held(beside, 1) == held(alone)


@pytest.mark.parametrize("patients", [2, 3, 12])
def test_rows_of_one_group_are_never_on_both_sides(patients: int) -> None:
    names = np.array([f"p{k}" for k in DRAW.integers(0, patients, 60)])
    test = names[held(one([0, 1] * 30, test=Split(groups={"ann": names})))]
    splitter = GroupShuffleSplit(1, test_size=0.2, random_state=0)
    ((_, expected),) = splitter.split(names, groups=names)
    assert len(set(test)) == len(set(names[expected]))
    assert np.isin(names, test).sum() == len(test)


def test_of_time_the_last_rows_are_held_out() -> None:
    when = DRAW.permutation(50)
    days = np.datetime64("2020-01-01") + when
    for values in (when, when / 7, days, pd.Series(days)):
        test = held(one([0, 1] * 25, test=Split(0.3, time={"ann": values})))
        assert sorted(when[test].tolist()) == list(range(35, 50))


def test_sequences_are_split_by_groups_too() -> None:
    x = DRAW.integers(0, 5, (20, 4))
    speech = np.repeat(np.arange(5), 4)
    made = Federation.from_arrays(
        {"ann": (x, x)}, objective=Language(), test=Split(groups={"ann": speech}), seed=0
    )
    assert (len(made.shards[0].y), len(made.shards[0].y_test)) == (16, 4)


@pytest.mark.parametrize("kind", [bool, int, str])
def test_rows_that_are_said_to_be_held_out_are(kind: type) -> None:
    said = DRAW.random(30) < 0.3
    values = {bool: said, int: said.astype(int), str: np.where(said, "test", "Train ")}[kind]
    assert held(one([0, 1] * 15, test=Split(rows={"ann": values}))) == np.flatnonzero(said).tolist()
    frame = pd.DataFrame({"x": np.arange(30.0), "y": [0, 1] * 15, "who": "ann", "side": values})
    of_frame = Federation.from_frame(frame, client="who", label="y", test="side", seed=0)
    assert of_frame.feature_names == ("x",)
    assert held(of_frame) == np.flatnonzero(said).tolist()


def test_booleans_beside_samples_and_groups() -> None:
    said = DRAW.random(40) < 0.5
    who = np.repeat(["ann", "bob"], 20)
    x, y = rows([0, 1] * 20)
    grouped = Federation.from_groups(x, y, who, test=said, seed=0)
    listed = [(x[:20], y[:20]), (x[20:], y[20:])]
    by_client = Federation.from_arrays(listed, test=[said[:20], said[20:]], seed=0)
    assert grouped.digest() == by_client.digest()
    # an index says which row a value belongs to, as it does of labels
    order = DRAW.permutation(20)
    table, series = pd.DataFrame(x[:20]), pd.Series(said[:20])
    shuffled = Federation.from_arrays(
        {"ann": (table, y[:20])}, test={"ann": series.iloc[order]}, seed=0
    )
    assert held(shuffled) == np.flatnonzero(said[:20]).tolist()


TABLE = pd.DataFrame(
    {
        "site": ["a"] * 20 + ["b"] * 20,
        "age": np.arange(40.0),
        "patient": [f"p{k // 2}" for k in range(40)],
        "day": [f"2021-{1 + k % 12:02}-03" for k in range(40)],
        "ill": ["no", "yes", "yes", "no"] * 10,
    }
)
ROLES = {"client": "site", "label": "ill"}


def test_a_second_table_holds_the_test_rows(tmp_path: Path) -> None:
    table = TABLE[["site", "age", "ill"]]
    first, second = table[table["age"] % 10 < 8], table[table["age"] % 10 >= 8]
    made = Federation.from_frame(first, **ROLES, test=second, seed=0)
    for shard, site in zip(made.shards, "ab", strict=True):
        assert shard.x[:, 0].tolist() == first[first["site"] == site]["age"].tolist()
        assert shard.x_test[:, 0].tolist() == second[second["site"] == site]["age"].tolist()
    (tmp_path / "both").mkdir()
    first.to_csv(tmp_path / "both" / "train.csv", index=False)
    second.to_csv(tmp_path / "both" / "test.csv", index=False)
    roles = {"client_column": "site", "label_column": "ill"}
    of_files = Federation.from_csv(
        tmp_path / "both" / "train.csv", **roles, test=tmp_path / "both" / "test.csv", seed=0
    )
    of_folder = Federation.from_csv(tmp_path / "both", **roles, test="@file", seed=0)
    assert made.digest() == of_files.digest() == of_folder.digest()
    again = Simulation.of(of_folder)
    assert again is not None and again.test_column == "@file"
    assert again.federation().digest() == made.digest()
    assert Simulation.of(of_files) is None


def test_columns_of_groups_and_times_are_no_features() -> None:
    by_patient = Federation.from_frame(
        TABLE.drop(columns="day"), **ROLES, test=Split(groups="patient"), seed=0
    )
    assert by_patient.feature_names == ("age",)
    for shard in by_patient.shards:
        assert {x // 2 for x in shard.x[:, 0]}.isdisjoint({x // 2 for x in shard.x_test[:, 0]})
    in_time = Federation.from_frame(
        TABLE.drop(columns="patient"), **ROLES, test=Split(time="day"), seed=0
    )
    months = np.arange(20) % 12  # of which the last that occur are held out
    assert sorted(months[held(in_time)]) == sorted(months)[16:]


@pytest.mark.parametrize(
    ("test", "sentence"),
    [
        (1.0, "the share of rows that are held out is 1.0: give a number from 0"),
        ("age", "does not say whether a row is held out: write true and false"),
        ("nobody", "unknown column of the table 'nobody'"),
        ("ill", "truth, weight and what says which rows are held out are different"),
        (
            Split(time="patient"),
            "column 'patient' of the table holds text, .*give numbers or dates",
        ),
        ([True, False], "give a value for each"),
        (TABLE.assign(site="c"), "client 'c' has no training samples"),
    ],
)
def test_what_does_not_say_which_rows_are_held_out_is_refused(test: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Federation.from_frame(TABLE, **ROLES, drop_columns=[], prepare="auto", test=test, seed=0)


def test_two_splits_at_once_are_refused() -> None:
    with pytest.raises(UsageError, match="groups and time both say which rows are held out"):
        Split(groups="patient", time="day")
    with pytest.raises(UsageError, match=r"groups of the test rows is a mapping \{name: values\}"):
        one([0, 1], test=Split(groups="patient"))
    with pytest.raises(UsageError, match="groups of the test rows has the shape"):
        one([0, 1], test=Split(groups={"ann": [1, 2, 3]}))
    with pytest.raises(UsageError, match="time of its test rows holds something else"):
        one([0, 1], test=Split(time={"ann": [1.0, np.nan]}))


def test_describe_tells_who_trains_on_what(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "t.csv"
    TABLE.assign(side=["test", "train", "train", "train"] * 10).to_csv(path, index=False)
    columns = [
        "--client-column", "site", "--label-column", "ill", "--drop-columns", "patient", "day",
    ]  # fmt: skip
    assert main(["describe", str(path), *columns, "--test-column", "side"]) == 0
    said = capsys.readouterr().out
    assert "  a: 15 trained on (no 5, yes 10), 5 held out (no 5)" in said
    assert (
        main(["describe", str(path), *columns[:4], "--drop-columns", "patient", "day", "side"]) == 0
    )
    assert "  b: 16 trained on (no 8, yes 8), 4 held out (no 2, yes 2)" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["binary", "multilabel", "regression"])
def test_describe_takes_every_task_and_weights(task: str, tmp_path: Path, capsys: Any) -> None:
    table = TABLE.assign(ill=(TABLE["ill"] == "yes").astype(int), w=np.linspace(1, 2, len(TABLE)))
    table.assign(other=1 - table["ill"]).to_csv(tmp_path / "t.csv", index=False)
    label = "ill,other" if task == "multilabel" else "ill"
    more = [] if task == "multilabel" else ["other"]
    command = ["describe", str(tmp_path / "t.csv"), "--client-column", "site", "--task", task]
    command += ["--label-column", label, "--weight-column", "w", "--drop-columns", "patient", "day"]
    assert main([*command, *more]) == 0
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if "trained on" in line]
    assert len(lines) == table["site"].nunique()
    assert all(("(" in line) == (task == "binary") for line in lines)
    for client, line in zip(sorted(table["site"].unique()), lines, strict=True):
        size = (table["site"] == client).sum()
        assert f"{client}: {size - size // 5} trained on" in line


def test_every_method_of_a_sweep_and_a_comparison_has_the_same_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, set[str]] = {}

    def noted(method: Any, federation: Federation, *given: Any, **more: Any) -> Any:
        seen.setdefault(method.name, set()).add(federation.digest())
        return fit(method, federation, *given, **more)

    fit = ClusteringProtocol.fit
    monkeypatch.setattr(ClusteringProtocol, "fit", noted)
    path = tmp_path / "t.csv"
    TABLE.drop(columns=["patient", "day"]).to_csv(path, index=False)
    roles = {"client_column": "site", "label_column": "ill", "classes": ("no", "yes")}
    options: dict[str, Any] = {"rounds": 1, "model": "linear", "scaling": "client"}
    sweep(["fedavg", "local"], noise=[0.0], seeds=2, data=str(path), **roles, **options)
    assert len(seen["fedavg"]) == 2 and seen["fedavg"] == seen["local"]
    out = tmp_path / "out"
    asked = ["--client-column", "site", "--label-column", "ill", "--scaling", "client", "--quiet"]
    few = ["--rounds", "1", "--model", "linear", "--out", str(out)]
    assert main(["compare", "fedavg", "local", "--data", str(path), *asked, *few]) == 0
    digests = {run_config(out / name)["data_digest"] for name in ("fedavg", "local")}
    assert digests < seen["fedavg"]
