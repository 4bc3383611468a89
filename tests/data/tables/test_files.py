"""Tables as they lie in files: no two values become one, and whatever the file, one of two things
is true: it is right, or refused in a sentence.
"""

from __future__ import annotations

import csv
import gzip
import io
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation
from securecluster.errors import SecureClusterError, SecureClusterWarning, UsageError

pandas = pytest.importorskip("pandas")
pa = pytest.importorskip("pyarrow")

N = 24
Columns = dict[str, list[Any]]
COLUMNS: Columns = {
    "age": [30 + k % 7 for k in range(N)],
    "dose": [k / 8 for k in range(N)],
    "site": [f"s{k % 3}" for k in range(N)],
    "label": ["ill" if k // 3 % 2 else "well" for k in range(N)],
}
ROLES = {"client_column": "site", "label_column": "label", "seed": 0}


def text_of(columns: Columns, separator: str = ",", header: bool = True) -> str:
    out = io.StringIO()
    pandas.DataFrame(columns).to_csv(out, index=False, sep=separator, header=header)
    return out.getvalue()


def read(path: Path, **more: Any) -> Federation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)  # of scales
        return Federation.from_csv(path, **{**ROLES, **more})


def of_text(text: str | bytes, folder: Path, name: str = "x.csv", **more: Any) -> Federation:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read(path, **more)


def frame(columns: Columns = COLUMNS) -> Federation:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)
        table = pandas.DataFrame(columns)
        return Federation.from_frame(table, client="site", label="label", seed=0)


DIFFERENT = [
    ["1.1", "1.2", "1.10", "1.20"], ["1e3", "1000", "2e3"], ["1e1", "10", "11"],
    ["0.1", "0.10", "0.2"], ["-0", "0", "1"], ["+1", "1", "2"], ["1", "1.0", "2"],
    ["007", "7", "07"], ["00", "0", "1"], ["True", "1", "2"], ["yes", "y", "1"],
    ["9007199254740993", "9007199254740992"], ["9007199254740993", "9007199254740992", "3.5"],
    ["12345678901234567890", "12345678901234567891"], ["0.12345678901234567891",
    "0.12345678901234567892", "1.5"], ["inf", "-inf", "1"], ["1E5", "1e5x", "100000"],
    ["1_0", "10"], ["0x10", "16"], ["1,5", "1.5", "15"], ["1,000", "1000"], ["2024-01-01",
    "2024-1-1"], ["01:00", "1:00"], ["\uff11", "1"], ["\u0661", "1"], ["None", "none2", "b"],
    ["a/b", "../../etc", "/abs"], ["a\nb", "b a"], ['a,"b"', "c;d", "e'f"], ["--force", "-x"],
    ["\U0001f468\u200d\U0001f469", "\U0001f468"], ["a", "a\u200b"], ["[red]a[/red]", "{0}"],
    ["5", "5 %"], ["1", "1st"], ["1.0", "1.00", "1.000"], ["1e-7", "0.0000001"],
    [".5", "0.5", "0.50"], ["1.", "1", "1.0"], ["1e400", "inf", "1e401"],
]  # fmt: skip


@pytest.mark.parametrize("names", DIFFERENT, ids=[" | ".join(names) for names in DIFFERENT])
def test_names_that_differ_in_the_file_are_different_clients(
    names: list[str], tmp_path: Path
) -> None:
    columns = COLUMNS | {"site": [names[k % len(names)] for k in range(N)]}
    found = of_text(text_of(columns), tmp_path)
    written = frame(columns)
    assert len(found) == len(written) == len(names)
    assert found.names == written.names or set(found.names) == set(written.names)


SPELLED_ALIKE = [
    ["s", "s "], ["s t", "s  t"], ["caf\u00e9", "cafe\u0301"], ["\u00a0s", "s"], ["\ts", "s"],
]  # fmt: skip


@pytest.mark.parametrize("names", SPELLED_ALIKE)
@pytest.mark.parametrize("column", ["site", "label"])
def test_names_that_read_alike_are_refused(column: str, names: list[str], tmp_path: Path) -> None:
    columns = COLUMNS | {column: [names[k // 3 % 2] if k % 3 else "other" for k in range(N)]}
    said = (
        "would both be the client" if column == "site" else r"\(client .*line.* read as one class"
    )
    with pytest.raises(UsageError, match=said):
        of_text(text_of(columns), tmp_path)
    with pytest.raises(UsageError, match=said.replace("line", "row")):
        frame(columns)


@pytest.mark.parametrize("names", [["Ward", "ward"], ["A", "a"], ["01", "1"], ["2", "2.0"]])
def test_clients_that_differ_in_case_or_zeros_are_said(names: list[str], tmp_path: Path) -> None:
    columns = COLUMNS | {"site": [names[k % 2] for k in range(N)]}
    path = tmp_path / "x.csv"
    path.write_text(text_of(columns))
    with pytest.warns(SecureClusterWarning, match=r"differ in case alone"):
        assert len(Federation.from_csv(path, **ROLES, scaling="client")) == 2


@pytest.mark.parametrize(
    "labels", [["1.1", "1.10", "1.2"], ["True", "true", "x"], ["1", "1.0", "2"], ["0.5", "0.25"]]
)
def test_labels_are_never_merged(labels: list[str], tmp_path: Path) -> None:
    columns = COLUMNS | {"label": [labels[k // 3 % len(labels)] for k in range(N)]}
    with pytest.raises(UsageError, match=r"regression|read as one class"):
        of_text(text_of(columns), tmp_path)
    named = of_text(text_of(columns), tmp_path, classes=labels)
    assert named.class_names == tuple(labels)


@pytest.mark.parametrize("labels", [["1e3", "1000", "2"], ["-0", "0", "1"], ["007", "7", "8"]])
def test_labels_that_are_numbers_written_otherwise_are_classes_of_text(
    labels: list[str], tmp_path: Path
) -> None:
    columns = COLUMNS | {"label": [labels[k // 3 % 3] for k in range(N)]}
    assert of_text(text_of(columns), tmp_path).class_names == tuple(sorted(labels))


def excel(columns: Columns) -> bytes:
    pytest.importorskip("openpyxl")
    out = io.BytesIO()
    pandas.DataFrame(columns).to_excel(out, index=False)
    return out.getvalue()


def parquet(columns: Columns) -> bytes:
    out = io.BytesIO()
    pandas.DataFrame(columns).to_parquet(out)
    return out.getvalue()


COMMAS = COLUMNS | {"dose": [str(value).replace(".", ",") for value in COLUMNS["dose"]]}
NAMELESS = {"client_column": "f2", "label_column": "f3"}
FORMS: dict[str, tuple[str, Callable[[], str | bytes], dict[str, Any]]] = {
    "CSV": ("x.CSV", lambda: text_of(COLUMNS), {}),
    "semicolons": ("x.csv", lambda: text_of(COLUMNS, ";"), {}),
    "tabs": ("x.tsv", lambda: text_of(COLUMNS, "\t"), {}),
    "bars": ("x.txt", lambda: text_of(COLUMNS, "|"), {}),
    "blanks": ("x.data", lambda: text_of(COLUMNS, " ").replace(" ", "   "), {}),
    "blanks around": ("x.csv", lambda: text_of(COLUMNS).replace(",", " , "), {}),
    "gzip": ("x.csv.gz", lambda: gzip.compress(text_of(COLUMNS).encode()), {}),
    "gzip by another name": ("x.csv", lambda: gzip.compress(text_of(COLUMNS).encode()), {}),
    "byte order mark": ("x.csv", lambda: b"\xef\xbb\xbf" + text_of(COLUMNS).encode(), {}),
    "UTF-16": ("x.csv", lambda: text_of(COLUMNS).encode("utf-16"), {}),
    "UTF-16, packed": ("x.gz", lambda: gzip.compress(text_of(COLUMNS).encode("utf-16")), {}),
    "UTF-32": ("x.txt", lambda: text_of(COLUMNS, "\t").encode("utf-32"), {}),
    "separators at the end": ("x.csv", lambda: text_of(COLUMNS).replace("\n", ", ,\n"), {}),
    "CRLF": ("x.csv", lambda: text_of(COLUMNS).replace("\n", "\r\n"), {}),
    "blank lines": ("x.csv", lambda: text_of(COLUMNS).replace("\n", "\n\n"), {}),
    "parquet": ("x.pq", lambda: parquet(COLUMNS), {}),
    "Excel": ("x.xlsx", lambda: excel(COLUMNS), {}),
    "decimal commas": ("x.csv", lambda: text_of(COMMAS, ";"), {}),
    "quoted decimal commas": ("x.csv", lambda: text_of(COMMAS), {}),
    "no header": ("x.data", lambda: text_of(COLUMNS, header=False), NAMELESS),
    "a line end in a name": ("x.csv", lambda: text_of(COLUMNS).replace("dose", '"do\nse"'), {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_table_is_the_same_in_whatever_form_it_lies(form: str, tmp_path: Path) -> None:
    name, content, more = FORMS[form]
    expected = frame()
    found = of_text(content(), tmp_path, name, **more)
    assert as_read(found) == as_read(expected) and found.names == expected.names
    assert found.class_names == expected.class_names


BROKEN: dict[str, bytes] = {
    "no archive": b"PK\3\4garbage",
    "cut off": gzip.compress(text_of(COLUMNS).encode())[:90],
    "half of UTF-16": text_of(COLUMNS).encode("utf-16")[:-1],
    "zeros": b"age,site,label\n" + b"\0" * 1000,
    "a line too short": text_of(COLUMNS).encode() + b"1,2\n",
    "an open quote": text_of(COLUMNS).encode() + b'"1,2,s0,ill\n',
    "blank lines alone": b"\n\n",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_files_that_are_no_tables_are_refused(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"x\.csv cannot be read as (CSV|Excel) \("):
        of_text(content, tmp_path)


LETTERS = COLUMNS | {"site": [f"K\u00f6ln \u2013 {k % 3}" for k in range(N)]}
ACCENTS = text_of(LETTERS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            ACCENTS.encode("cp1252"),
            r"line 2 has the byte 0xF6, in Windows-1252 '.*K\u00f6ln \u2013",
        ),
        (ACCENTS.encode("utf-16-le"), "zeros in its first line, so it is no text, or in UTF-16"),
        (
            (text_of(COLUMNS) * 2000 + ACCENTS[:-1]).encode() + b"\xe9\n",
            f"line {2025 + 48000} has the byte 0xE9",
        ),
        (gzip.compress(("x\n" * 9 + ACCENTS).encode("latin-1", "replace")), "line 11 has the byte"),
    ],
    ids=["Windows-1252", "UTF-16 without a mark", "in the last line", "packed, one column"],
)
def test_other_encodings_are_never_guessed(text: bytes, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=rf"x\.csv .*{sentence}.*: save it as UTF-8"):
        of_text(text, tmp_path)
    expected = frame(LETTERS)
    for encoding in ("utf-8-sig", "utf-16", "utf-32"):
        assert as_read(of_text(ACCENTS.encode(encoding), tmp_path)) == as_read(expected)


@pytest.mark.parametrize("kind", ["string_view", "large_string", "dictionary"])
def test_texts_of_any_type_are_read(kind: str) -> None:
    if not hasattr(pa, kind) and kind == "string_view":
        pytest.skip("this pyarrow has no views of texts")
    columns = {}
    for name, values in COLUMNS.items():
        texts = pa.array(map(str, values))
        columns[name] = texts.dictionary_encode() if kind == "dictionary" else texts.cast(kind)
    made = Federation.from_frame(
        pa.table(columns), client="site", label="label", scaling="client", seed=0
    )
    assert made.names == ("s0", "s1", "s2") and made.class_names == ("ill", "well")


def test_tabs_with_commas_in_names(tmp_path: Path) -> None:
    text = text_of(COLUMNS, "\t").replace("age", "age, years").replace("dose", "dose, mg, daily")
    assert of_text(text, tmp_path).feature_names == ("age, years", "dose, mg, daily")


@pytest.mark.parametrize("gap", ["", "?", "-", "NA", "nan", "null", " ", "N/A"])
def test_what_stands_for_a_missing_value_is_said(gap: str, tmp_path: Path) -> None:
    doses = [gap if k == 4 else k / 8 for k in range(N)]
    said = r"column 'dose' of .* has 1 empty cell.*, the first in line 6"
    with pytest.raises(UsageError, match=said):
        of_text(text_of(COLUMNS | {"dose": doses}), tmp_path)
    sites = [gap if k % 3 == 0 else f"s{k % 3}" for k in range(N)]
    with pytest.raises(UsageError, match=r"empty cells|may be a name or stand for a missing"):
        of_text(text_of(COLUMNS | {"site": sites}), tmp_path)
    if gap.strip():
        named = of_text(text_of(COLUMNS | {"site": sites}), tmp_path, missing=("",))
        assert gap in named.names
        with pytest.raises(UsageError, match=r"holds text, .*line 6"):
            of_text(text_of(COLUMNS | {"dose": doses}), tmp_path, missing=("none",))


def test_all_faults_are_in_one_sentence(tmp_path: Path) -> None:
    columns = COLUMNS | {
        "age": ["old" if k == 2 else k for k in range(N)],
        "dose": ["1,000"] * N,
        "code": [f"00{k % 3}" for k in range(N)],
        "day": ["?" if k == 5 else k for k in range(N)],
        "site": ["" if k == 7 else "s" for k in range(N)],
        "label": [k / 3 for k in range(N)],
        "id": [str(2**60 + k) for k in range(N)],
    }
    with pytest.raises(UsageError) as caught:
        of_text(text_of(columns), tmp_path, task="classification")
    sentence = str(caught.value)
    assert "\n" not in sentence and "has 7 faults" in sentence
    for fault in (
        "'site' has 1 empty cell, the first in line 9",
        "'label' holds numbers that are not whole, such as '0.33",
        "'age' holds text, not numbers, the first of it 'old' (line 4)",
        "'dose' holds '1,000' (line 2), whose comma may mark decimals or thousands",
        "'code' holds codes such as '000' (line 2)",
        "'day' has 1 empty cell ('?'), the first in line 7",
        "'id' holds whole numbers such as 1152921504606846976",
    ):
        assert fault in sentence, fault


def test_a_folder_has_a_file_for_each_client(tmp_path: Path) -> None:
    for k, place in enumerate(("a.csv", "b.CSV", "north/c.tsv", "north/d.parquet")):
        rows = {name: values[k::4] for name, values in COLUMNS.items() if name != "site"}
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        if k == 3:
            pandas.DataFrame(rows).to_parquet(path)
        elif k == 1:  # in another order
            path.write_text(text_of(dict(reversed(rows.items()))))
        else:
            path.write_text(text_of(rows, "\t" if k == 2 else ","))
    (tmp_path / "notes.md").write_text("not a table")
    (tmp_path / "._a.csv").write_bytes(b"\0\1")
    with pytest.warns(SecureClusterWarning) as caught:
        found = Federation.from_csv(tmp_path, **ROLES | {"client_column": "@file"})
    assert found.names == ("a", "b", "north/c", "north/d") and found.feature_names == (
        "age",
        "dose",
    )
    assert any("are no tables: notes.md" in str(warning.message) for warning in caught)
    assert [len(shard.x) + len(shard.x_test) for shard in found.shards] == [6] * 4
    assert read(tmp_path, client_column="@folder").names == ("north", tmp_path.name)
    (tmp_path / "a.tsv").write_text(text_of({"age": [1], "dose": [2], "label": ["ill"]}))
    with pytest.raises(UsageError, match=r"a\.csv and .*a\.tsv would both be the client 'a'"):
        read(tmp_path, client_column="@file")


SEPARATED = {"CSV": ",", "semicolons": ";", "tabs": "\t"}
PIECES = [
    b",", b"\n", b'"', b";", b"\t", b" ", b"?", b"\0", b"NA", b"-", b"1,5", b"1e3", b"\xe9", b"007",
]  # fmt: skip


def damaged(draw: random.Random) -> tuple[bytes, str | None]:
    """A table in a random form with random damage, and what separates its columns."""
    name = draw.choice([*SEPARATED, *SEPARATED, "parquet", "gzip", "no header", "blanks"])
    content = FORMS[name][1]()
    data = bytearray(content.encode() if isinstance(content, str) else content)
    for _ in range(draw.choice([1, 1, 1, 2, 9])):
        place = draw.randrange(len(data))
        kind = draw.randrange(4)
        if kind == 0:
            data[place] = draw.randrange(256)
        elif kind == 1:
            data[place : place + 1] = draw.choice(PIECES)
        elif kind == 2:
            del data[place : place + draw.randrange(1, 9)]
        else:
            data[place:place] = draw.choice(PIECES)
    return bytes(data), SEPARATED.get(name)


def as_read(federation: Federation) -> list[tuple[Any, ...]]:
    """Each row as (client, label, features)."""
    names = federation.class_names or tuple(range(federation.classes))
    rows = []
    for client, shard in zip(federation.names, federation.shards, strict=True):
        for x, y in ((shard.x, shard.y), (shard.x_test, shard.y_test)):
            rows += [
                (client, str(names[label]), *map(float, values))
                for values, label in zip(x, y, strict=True)
            ]
    return sorted(rows)


def by_python(text: str, separator: str) -> list[tuple[Any, ...]]:
    """The same by Python's own reader of CSV."""
    header, *lines = [
        line for line in csv.reader(io.StringIO(text, newline=""), delimiter=separator) if line
    ]
    rows = []
    for line in lines:
        row = dict(zip(header, line, strict=True))
        client, label = (" ".join(row.pop(name).split()) for name in ("site", "label"))
        values = [float(np.float32(float(value.replace(",", ".")))) for value in row.values()]
        rows.append((client, label, *values))
    return sorted(rows)


def test_damaged_tables_are_right_or_refused_in_a_sentence(tmp_path: Path) -> None:
    draw = random.Random(5)
    outcomes = {"read": 0, "refused": 0}
    for number in range(200):
        data, separator = damaged(draw)
        path = tmp_path / f"{number}{draw.choice(['.csv', '.parquet', '.data'])}"
        path.write_bytes(data)
        try:
            found = read(path)
        except SecureClusterError as error:
            assert "\n" not in str(error) and len(str(error)) > 20
            outcomes["refused"] += 1
            continue
        outcomes["read"] += 1
        if separator is not None:
            assert as_read(found) == by_python(data.decode("utf-8-sig"), separator)
    assert min(outcomes.values()) > 10
