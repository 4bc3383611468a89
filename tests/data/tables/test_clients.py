"""Users' own parquet files."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation
from securecluster.data.tables import clients as table_clients
from securecluster.data.tables.clients import Roles, read_clients
from securecluster.data.tables.parts import frame_table
from securecluster.errors import SecureClusterWarning, UsageError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")
Image = pytest.importorskip("PIL.Image")

N = 30
SITE = np.array([f"s{k}" for k in (2, 0, 1)])[np.arange(N) % 3]
X = np.random.default_rng(0).normal(size=(N, 4))
BARE: dict[str, Any] = {"site": SITE, "label": np.arange(N) % 5 * 10}
PLAIN: dict[str, Any] = {**{f"f{k}": X[:, k] for k in range(4)}, **BARE}


def write(path: Path, columns: dict[str, Any]) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=7)
    return path


def load(path: Path, **more: Any) -> Federation:
    return Federation.from_parquet(
        path, **{"client_column": "site", "label_column": "label", "seed": 0, **more}
    )


def samples(federation: Federation) -> dict[str, set[tuple[bytes, int]]]:
    """Each client's (features, label) pairs, training and held-out."""
    found = {}
    for name, s in zip(federation.names, federation.shards, strict=True):
        rows = zip((*s.x, *s.x_test), (*s.y, *s.y_test), strict=True)
        found[name] = {(x.tobytes(), int(y)) for x, y in rows}
    return found


@pytest.mark.parametrize("kind", [np.int8, np.int64, np.float32, np.float64, str])
def test_numbers_of_clients_are_their_names_whatever_their_type_is(
    kind: Any, tmp_path: Path
) -> None:
    columns = {**PLAIN, "site": (np.arange(N) % 3 + 1).astype(kind), "region": np.arange(N) % 3}
    federation = load(write(tmp_path / "numbered.parquet", columns), truth_column="region")
    assert federation.names == ("1", "2", "3") and federation.truth == (0, 1, 2)
    rows = X.astype(np.float32)
    mine = {(rows[k].tobytes(), k % 5) for k in range(1, N, 3)}
    for two in (2, "2"):
        assert samples(federation.select([two]))["2"] == mine


def test_rows_go_to_their_clients_with_labels_numbered_in_ascending_order(tmp_path: Path) -> None:
    federation = load(write(tmp_path / "mine.parquet", PLAIN))
    assert federation.names == ("s0", "s1", "s2")
    assert federation.classes == 5
    assert federation.truth is None
    assert (federation.data, federation.scenario, federation.shape) == ("mine", "own", (4,))
    rows = X.astype(np.float32)
    for site, own in samples(federation).items():
        assert own == {(rows[k].tobytes(), k % 5) for k in np.flatnonzero(site == SITE)}
    assert [(len(s.y), len(s.y_test)) for s in federation.shards] == [(8, 2)] * 3
    assert load(tmp_path / "mine.parquet").digest() == federation.digest()
    assert load(tmp_path / "mine.parquet", seed=1).digest() != federation.digest()


def test_a_folder_of_files_is_one_table(tmp_path: Path) -> None:
    whole = load(write(tmp_path / "whole.parquet", PLAIN))
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, part in (("a", slice(0, 11)), ("b", slice(11, N))):
        write(folder / f"{name}.parquet", {k: v[part] for k, v in PLAIN.items()})
    assert load(folder).digest() == whole.digest() and load(folder).data == "parts"
    (folder / "notes.txt").write_text("not data")
    with pytest.warns(
        SecureClusterWarning, match=r"not read, since they are no tables: notes\.txt"
    ):
        assert load(folder).digest() == whole.digest()


def test_truth_is_a_column_too(tmp_path: Path) -> None:
    group = np.where(SITE == "s1", "north", "east")
    federation = load(
        write(tmp_path / "x.parquet", {**PLAIN, "group": group}), truth_column="group"
    )
    assert federation.truth == (0, 1, 0) and federation.shape == (4,)


def test_names_with_dots_and_dictionaries_are_read_as_they_are(tmp_path: Path) -> None:
    plain = load(write(tmp_path / "x.parquet", PLAIN)).digest()
    columns = dict(zip(("f0.1", "f0", "f2", "f3"), X.T, strict=True)) | BARE
    assert load(write(tmp_path / "d.parquet", columns)).digest() == plain
    coded = PLAIN | {name: pa.array(BARE[name]).dictionary_encode() for name in BARE}
    assert load(write(tmp_path / "c.parquet", coded)).digest() == plain


def test_dictionaries_may_hold_values_that_no_row_has_and_values_twice(tmp_path: Path) -> None:
    plain = load(write(tmp_path / "x.parquet", PLAIN))
    # the second row group has codes of its own
    first = pa.DictionaryArray.from_arrays([2, 0, 1] * 4, ["s0", "s1", "s2", "nobody"])
    second = pa.DictionaryArray.from_arrays([1, 3, 2] * 6, ["ghost", "s2", "s1", "s0", "s2"])
    for codes in (pa.chunked_array([first, second]), pa.chunked_array([first[:0], first, second])):
        table = pa.table({**PLAIN, "site": codes})
        federation = Federation.from_frame(table, client="site", label="label", seed=0)
        assert federation.names == plain.names and federation.digest() == plain.digest()
    repeated = pa.DictionaryArray.from_arrays(
        [2, 0, 1, 3, 4, 1] * 5, ["s0", "s1", "s2", "s2", "s0"]
    )
    table = pa.table({**PLAIN, "site": repeated})
    federation = Federation.from_frame(table, client="site", label="label", seed=0)
    assert federation.digest() == plain.digest()
    empty = pa.DictionaryArray.from_arrays([0, 1, 2] * 10, ["s0", None, "s2"])
    with pytest.raises(UsageError, match="'site' of the table has 10 empty cells"):
        Federation.from_frame(
            pa.table({**PLAIN, "site": empty}), client="site", label="label", seed=0
        )


@pytest.mark.parametrize("clients", [255, 256, 257, 300])
def test_the_rows_of_many_clients_stay_with_them_in_their_order(clients: int) -> None:
    order = np.random.default_rng(1).permutation(6 * clients)
    site = order % clients
    table = pa.table(
        {"site": site, "label": order // clients, "a": site, "b": np.arange(len(site))}
    )
    read = read_clients(frame_table(table), Roles("site", "label"), None)
    assert list(read.clients) == [str(k) for k in range(clients)]
    for name, (x, y) in read.clients.items():
        (rows,) = np.nonzero(site == int(name))
        assert x.tolist() == [[int(name), row] for row in rows]
        assert y.tolist() == (order[rows] // clients).tolist()


def test_long_tables_are_put_together_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = {"f2": np.arange(N) * 2**30, "f3": np.arange(N) % 2 == 0}  # beyond single precision
    table = pa.table({**PLAIN, **wide})
    monkeypatch.setattr(table_clients, "ROWS_OF_BLOCK", 7)
    read = read_clients(frame_table(table), Roles("site", "label"), None)
    expected = np.stack([X[:, 0], X[:, 1], *wide.values()], 1)
    for name, (x, _) in read.clients.items():
        assert np.array_equal(x, expected[name == SITE]) and x.dtype == np.float64


def test_lists_and_images_are_features(tmp_path: Path) -> None:
    plain = load(write(tmp_path / "x.parquet", PLAIN)).digest()
    listed = {**BARE, "x": [row.tolist() for row in X], "note": ["text"] * N}
    assert load(write(tmp_path / "l.parquet", listed)).digest() == plain
    squares = {**listed, "x": [row.reshape(2, 2).tolist() for row in X]}
    assert load(write(tmp_path / "n.parquet", squares)).shape == (2, 2)
    fixed = {**listed, "x": pa.FixedSizeListArray.from_arrays(pa.array(X.ravel()), 4)}
    assert load(write(tmp_path / "f.parquet", fixed)).digest() == plain
    part = pa.table(listed)
    chunks = pa.concat_tables([part.slice(0, 4), part.slice(0, 0), part.slice(4)])
    sliced = Federation.from_frame(
        chunks, client="site", label="label", feature_columns=["x"], seed=0
    )
    assert sliced.digest() == plain

    for shape, expected in (((5, 6), (1, 5, 6)), ((5, 6, 3), (3, 5, 6))):
        pixels = np.random.default_rng(1).integers(0, 256, (N, *shape), dtype=np.uint8)
        blobs = []
        for p in pixels:
            Image.fromarray(p).save(out := io.BytesIO(), "PNG")
            blobs.append(out.getvalue())
        cells = [{"bytes": blob, "path": None} for blob in blobs]
        pictures = {**BARE, "img": cells, "age": np.arange(N)}
        federation = load(write(tmp_path / "i.parquet", pictures))
        assert federation.shape == expected
        images = [x for s in federation.shards for x in (*s.x, *s.x_test)]
        found = {tuple(np.round(x * 255).astype(int).ravel()) for x in images}
        planes = pixels[:, None] if pixels.ndim == 3 else pixels.transpose(0, 3, 1, 2)
        assert found == {tuple(p.astype(int).ravel()) for p in planes}
        bare = write(tmp_path / "b.parquet", {**pictures, "img": blobs})
        assert load(bare).digest() == federation.digest()


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        (pa.array([[1.0], [1.0, 2.0]] * 15), "has lists of different lengths"),
        (pa.array([[[1.0], [2.0]], [[1.0, 2.0], [3.0]]] * 15), "has lists of different lengths"),
        (pa.array([[[1.0]], [None]] * 15), "has lists of different lengths"),
        (pa.chunked_array([[[1.0]] * 15, [[1.0, 2.0]] * 15]), "has lists of different lengths"),
        (pa.array([["one"]] * N), "has lists with empty cells or of other things"),
        (pa.array([[1.0, None]] * N), "has lists with empty cells or of other things"),
        (pa.array([[None]] * N, pa.list_(pa.list_(pa.int8()))), "has lists with empty cells"),
    ],
)
def test_lists_that_are_no_arrays_of_numbers_are_refused(cells: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"column 'x' of the table {words}"):
        Federation.from_frame(pa.table({**BARE, "x": cells}), client="site", label="label", seed=0)


def test_lists_of_other_lengths_in_another_file_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", {**BARE, "x": [[1.0, 2.0]] * N})
    write(tmp_path / "b.parquet", {**BARE, "x": [[1.0]] * N})
    with pytest.raises(UsageError, match=r"column 'x' of .* has lists of different lengths"):
        load(tmp_path)


def test_whole_numbers_and_truth_values_are_features_and_a_pandas_index_is_not(
    tmp_path: Path,
) -> None:
    numbers = np.arange(N)
    columns = {**BARE, "a": numbers, "b": numbers % 2 == 0, "__index_level_0__": numbers}
    with pytest.warns(SecureClusterWarning, match="root mean square of column 'a' is 16.9"):
        federation = load(write(tmp_path / "x.parquet", columns))
    assert federation.shape == (2,) and federation.feature_names == ("a", "b")
    rows = {tuple(x.tolist()) for s in federation.shards for x in (*s.x, *s.x_test)}
    assert rows == {(k, (k + 1) % 2) for k in range(N)}


def spoiled(**columns: Any) -> dict[str, Any]:
    """The plain table with some columns replaced, or left out where None."""
    return {k: v for k, v in {**PLAIN, **columns}.items() if v is not None}


@pytest.mark.parametrize(
    ("columns", "more", "words"),
    [
        (
            PLAIN,
            {"client_column": "sites"},
            "unknown column of x.parquet 'sites': did you mean 'site'",
        ),
        (PLAIN, {"label_column": "labels"}, "did you mean 'label'"),
        (PLAIN, {"truth_column": "group"}, "unknown column of x.parquet 'group'"),
        (PLAIN, {"label_column": "site"}, "are different columns, not site, site"),
        (spoiled(site=pa.array(["a", None] * (N // 2))), {}, "'site' of .* has 15 empty cells"),
        (spoiled(label=pa.array([1, 2, None] * (N // 3))), {}, "'label' of .* has 10 empty cells"),
        (spoiled(f1=pa.array([1.0, None] * (N // 2))), {}, "'f1' of .* has 15 empty cells"),
        (
            spoiled(f1=np.where(np.arange(N) == 4, np.nan, 0)),
            {},
            "'f1' of .* has 1 empty cell, the first in row 5",
        ),
        (spoiled(f1=np.where(np.arange(N) == 4, 1e300, 0)), {}, "NaN or infinite"),
        (spoiled(city=pa.array(["here"] * N).dictionary_encode()), {}, "'city' of .* not numbers"),
        (
            spoiled(label=np.where(np.arange(N) == 4, np.nan, 0.0)),
            {},
            "'label' of .* has 1 empty cell, the first in row 5",
        ),
        (spoiled(city=["here"] * N), {}, "'city' of .* holds text, .* 'here' .row 1.: drop it"),
        (spoiled(day=np.array(["2024-01-01"] * N, "datetime64[D]")), {}, "'day' of .* not numbers"),
        (spoiled(f0=None, f1=None, f2=None, f3=None), {}, "no feature column besides label, site"),
        (
            spoiled(label=X[:, 0]),
            {"task": "classification"},
            "numbers that are not whole, .*regression",
        ),
        (spoiled(label=[3] * N), {}, "same value in every row"),
        (spoiled(label=[[1]] * N), {}, "cannot be put in order|'label'"),
        ({k: np.asarray(v)[:0] for k, v in PLAIN.items()}, {}, "has no rows"),
        (spoiled(x=[[1.0] * (1 + k % 2) for k in range(N)]), {}, "'x' of .* different lengths"),
        (spoiled(x=[["a"]] * N), {}, "'x' of .* other things than numbers"),
        (spoiled(x=[[1.0, None]] * N), {}, "'x' of .* empty cells"),
        (spoiled(x=[[1.0]] * N, z=[[1.0]] * N), {}, r"several columns of lists \(x, z\)"),
        (spoiled(x=[b"no image"] * N), {}, "image 0 of .* cannot be decoded"),
        (spoiled(x=[{"a": 1}] * N), {}, "has no images where they should be"),
        (
            spoiled(group=np.arange(N)),
            {"truth_column": "group"},
            "client 's0' of .* has several values in column 'group'",
        ),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_sentence(
    columns: dict[str, Any], more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load(write(tmp_path / "x.parquet", columns), **more)
    assert "\n" not in str(caught.value)


def test_paths_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "x.parquet", PLAIN).read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty").mkdir()
    for name, words in (
        ("nowhere", "does not exist"),
        ("empty", r"holds no table \(.csv"),
        ("cut.parquet", "no parquet file, or not a whole"),
    ):
        with pytest.raises(UsageError, match=words):
            load(tmp_path / name)
    twice = pa.Table.from_arrays(
        [pa.array(SITE), pa.array(X[:, 0]), pa.array(X[:, 0])], names=["site", "label", "label"]
    )
    pq.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UsageError, match="two columns of the same name"):
        load(tmp_path / "twice.parquet")
    folder = tmp_path / "parts"
    folder.mkdir()
    write(folder / "a.parquet", PLAIN)
    write(folder / "b.parquet", {k: v for k, v in PLAIN.items() if k != "f2"})
    with pytest.raises(UsageError, match=r"b.parquet has other columns than .*a.parquet"):
        load(folder)


def test_images_of_different_sizes_are_refused(tmp_path: Path) -> None:
    blobs = []
    for k in range(N):
        Image.new("L", (4, 4 + (k == 7))).save(out := io.BytesIO(), "PNG")
        blobs.append(out.getvalue())
    with pytest.raises(UsageError, match=r"image 7 of .* has 4 × 5 pixels, the first one 4 × 4"):
        load(write(tmp_path / "x.parquet", {**BARE, "img": blobs}))


def test_features_are_chosen_by_name_and_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {**PLAIN, "row": np.arange(N), "note": ["text"] * N})
    assert load(write(tmp_path / "p.parquet", PLAIN)).feature_names == ("f0", "f1", "f2", "f3")
    plain = load(tmp_path / "p.parquet").digest()
    dropped = load(path, drop_columns=["row", "note"])
    chosen = load(path, feature_columns=["f0", "f1", "f2", "f3"])
    assert dropped.digest() == chosen.digest() == plain
    assert dropped.feature_names == chosen.feature_names == ("f0", "f1", "f2", "f3")
    moved = load(path, feature_columns=("f3", "f1"))
    assert moved.feature_names == ("f3", "f1") and moved.shape == (2,)
    assert np.array_equal(moved.shards[0].x, dropped.shards[0].x[:, [3, 1]])
    assert load(path, feature_columns="f2").feature_names == ("f2",), "one name is one column"
    listed = write(tmp_path / "l.parquet", {**PLAIN, "x": [row.tolist() for row in X]})
    assert load(listed).feature_names == ("x",) and load(listed).shape == (4,)
    assert load(listed, drop_columns="x").digest() == plain


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"drop_columns": ["f5"]}, "unknown column of x.parquet 'f5': choose one of"),
        ({"feature_columns": ["f0", "g"]}, "unknown column of x.parquet 'g'"),
        (
            {"drop_columns": ["site"]},
            "column 'site' names the client.*leave it out of drop_columns",
        ),
        (
            {"feature_columns": ["f0", "label"]},
            "column 'label' names .*leave it out of feature_columns",
        ),
        ({"feature_columns": ["f0"], "drop_columns": ["f1"]}, "give one of them"),
        ({"feature_columns": ["f0", "f0"]}, "names of columns, each once"),
        ({"feature_columns": []}, "names no column"),
        ({"drop_columns": [1]}, "names of columns"),
        ({"drop_columns": ["f0", "f1", "f2", "f3"]}, "no feature column besides"),
    ],
)
def test_columns_that_cannot_be_chosen_are_refused(
    more: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        load(write(tmp_path / "x.parquet", PLAIN), **more)
    assert "\n" not in str(caught.value)


def test_a_list_beside_other_chosen_columns_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {**PLAIN, "x": [row.tolist() for row in X]})
    with pytest.raises(
        UsageError, match=r"'x' of .* holds lists, which are the only feature then: name it alone"
    ):
        load(path, feature_columns=["f0", "x"])


def write_csv(path: Path, columns: dict[str, Any], separator: str = ",") -> Path:
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame(columns).to_csv(path, index=False, sep=separator)
    return path


def load_csv(path: Path, **more: Any) -> Federation:
    options = {"client_column": "site", "label_column": "label", "seed": 0, **more}
    return Federation.from_csv(path, **options)


def of_frame(table: Any, **more: Any) -> Federation:
    return Federation.from_frame(table, **{"client": "site", "label": "label", "seed": 0, **more})


ILL = np.array(["healthy", "ill", "ill"])[np.arange(N) % 3]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_csv_file_is_the_table_that_it_was_written_from(separator: str, tmp_path: Path) -> None:
    columns = {**PLAIN, "label": ILL, "old": np.arange(N) % 2 == 0, "note": ["a, b; c\nd"] * N}
    path = write_csv(tmp_path / "mine.csv", columns, separator)
    found = load_csv(path, drop_columns=["note"])
    whole = load(write(tmp_path / "mine.parquet", columns), drop_columns=["note"])
    assert found.digest() == whole.digest()
    assert (found.data, found.names, found.feature_names) == (
        "mine",
        whole.names,
        ("f0", "f1", "f2", "f3", "old"),
    )
    assert found.class_names == whole.class_names == ("healthy", "ill")


def test_csv_files_of_a_folder_are_one_table(tmp_path: Path) -> None:
    whole = load_csv(write_csv(tmp_path / "whole.csv", PLAIN))
    folder = tmp_path / "parts"
    folder.mkdir()
    for name, part in (("a", slice(0, 11)), ("b", slice(11, N))):
        write_csv(folder / f"{name}.csv", {k: v[part] for k, v in PLAIN.items()})
    assert load_csv(folder).digest() == whole.digest()


def test_numbers_in_csv_are_names_as_they_are_in_parquet(tmp_path: Path) -> None:
    for site in (np.arange(N) % 3 + 1, np.array([10, 9, 2])[np.arange(N) % 3]):
        columns = {**PLAIN, "site": site}
        found = load_csv(write_csv(tmp_path / "n.csv", columns))
        whole = load(write(tmp_path / "n.parquet", columns))
        assert found.names == whole.names and found.digest() == whole.digest()
    for codes in (["001", "02", "2b"], ["12345678901234567890", "12345678901234567891", "2"]):
        columns = {**PLAIN, "site": np.array(codes)[np.arange(N) % 3]}
        assert load_csv(write_csv(tmp_path / "z.csv", columns)).names == tuple(codes)


def test_a_byte_order_mark_is_no_part_of_a_name(tmp_path: Path) -> None:
    path = write_csv(tmp_path / "x.csv", {"site": SITE, **PLAIN})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert load_csv(path).names == ("s0", "s1", "s2")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("site,label,f\na,1,2\na,1\n", r"cannot be read as CSV \(.*\): it is text in UTF-8"),
        ("", "x.csv is empty: leave it out, or write it again"),
        ("site,label,f,\na,0,1,2\na,1,1,2\n", r"has values and no name: .*\(drop_columns ''\)"),
        ("site,label,f\n", "has no rows"),
        ("site,label,f,f\na,0,1,2\na,1,1,2\n", "has two columns 'f': rename one"),
        ("site,label,f\na,0,1\na,1,\n", "column 'f' of .* has 1 empty cell, .* line 3"),
        (
            "site,label,f\na,0,x\na,1,2\n",
            r"column 'f' of .*x.csv holds text, .* 'x' \(line 2\): drop it",
        ),
        ("place,label,f\na,0,1\na,1,2\n", "unknown column of x.csv 'site'"),
    ],
    ids=["ragged", "empty", "no name", "no rows", "twice", "empty cell", "text", "no column"],
)
def test_csv_files_that_cannot_be_used_are_refused(
    text: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(UsageError, match=sentence) as caught:
        load_csv(path)
    assert "\n" not in str(caught.value)


def test_a_frame_is_the_file_that_it_is_written_to(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({**PLAIN, "label": ILL, "group": SITE == "s1", "row": np.arange(N)})
    path = tmp_path / "x.parquet"
    frame.to_parquet(path)
    written = load(path, truth_column="group", drop_columns=["row"])
    turned = frame.iloc[np.arange(N)[::-1]].iloc[::-1]
    for table in (frame, turned, pa.Table.from_pandas(frame)):
        made = of_frame(table, truth="group", drop_columns=["row"])
        assert made.digest() == written.digest() and made.truth == written.truth
        assert made.feature_names == written.feature_names
        assert made.class_names == ("healthy", "ill") and made.recipe is None
    coded = frame.astype({"site": "category", "label": "category"})
    assert of_frame(coded, drop_columns=["row", "group"]).digest() == written.digest()
    assert of_frame(frame, feature_columns=["f3", "f1"]).feature_names == ("f3", "f1")


def test_a_grouped_frame_names_the_clients() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(PLAIN)
    whole = of_frame(frame)
    for grouped in (frame.groupby("site"), frame.groupby(["site"])):
        for client in (None, "site"):
            made = Federation.from_frame(grouped, client=client, label="label", seed=0)
            assert made.digest() == whole.digest() and made.names == whole.names
    for wrong, client in (
        (frame.groupby(["site", "label"]), None),
        (frame.groupby(frame["f0"] > 0), None),
        (frame.groupby("site"), "label"),
    ):
        with pytest.raises(UsageError, match="by the one column that it is grouped by"):
            Federation.from_frame(wrong, client=client, label="label", seed=0)
    with pytest.raises(UsageError, match="client is missing"):
        Federation.from_frame(frame, label="label", seed=0)


class LikePolars:
    """A table that makes one of pyarrow, as DataFrames of polars do."""

    def to_arrow(self) -> Any:
        return pa.table(PLAIN)


def test_a_table_that_makes_one_of_pyarrow_is_read_too() -> None:
    assert of_frame(LikePolars()).digest() == of_frame(pa.table(PLAIN)).digest()


def test_frames_that_cannot_be_used_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(PLAIN)
    mixed = frame.assign(ward=["a", 1] * (N // 2), city="here", day=pandas.Timestamp("2024-01-01"))
    several = "column 'ward' holds values of several types"
    for table, more, sentence in (
        (mixed, {}, f"the table has 3 faults, {several}"),
        (mixed, {"client": "ward"}, f"the table has 4 faults, {several}"),
        (
            mixed.drop(columns="ward"),
            {},
            r"the table has 2 faults, column 'city' holds text, .*; column 'day' holds dates, not "
            r"numbers: drop it \(drop_columns\), or take prepare auto, which makes numbers of it$",
        ),
        (frame.assign(f0=None), {}, f"column 'f0' of the table has {N} empty cells"),
        (frame, {"label": "labels"}, "unknown column of the table 'labels': did you mean 'label'"),
        (pandas.concat([frame, frame["f0"]], axis=1), {}, "has two columns 'f0'"),
        (X, {}, "the table is a ndarray: give a DataFrame of pandas or polars"),
        (PLAIN, {}, "the table is a dict"),
    ):
        with pytest.raises(UsageError, match=sentence) as caught:
            of_frame(table, **more)
        assert "\n" not in str(caught.value)
    kept = mixed.astype({"f0": "Float64"})
    assert of_frame(kept, drop_columns=["ward", "city", "day"]).shape == (4,)


def test_classes_and_scales_of_a_table_are_chosen_too(tmp_path: Path) -> None:
    path = write(tmp_path / "x.parquet", {**PLAIN, "label": ILL})
    names = ["ill", "healthy", "dead"]
    made = load(path, classes=names, scaling="client")
    assert made.class_names == tuple(names) and made.classes == 3
    assert made.facts_of(0).class_names == tuple(names)
    plain = load(path)
    for shard, other in zip(made.shards, plain.shards, strict=True):
        assert np.array_equal(shard.y, 1 - other.y)
        assert np.allclose(shard.x.mean(axis=0), 0, atol=1e-6)
    with pytest.raises(UsageError, match=r"column 'label' of .*: the label 'healthy' is none of"):
        load(path, classes=["ill", "dead"])
    assert made.recipe is not None and made.recipe["classes"] == tuple(names)
    assert plain.recipe is not None and plain.recipe["classes"] is None
