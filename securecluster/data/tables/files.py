"""Files of a table, and the text in them: which ones of a folder, which separator, which header.

What a file holds is told by its beginning, not by its name; of a folder, names tell which files are
tables. pyarrow reads text, the first line too, all of it as text: types are found out later.
"""

from __future__ import annotations

import codecs
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from securecluster.core.optional_packages import need
from securecluster.data.feature_columns import listed
from securecluster.data.tables.cells import is_number
from securecluster.data.tables.parts import FILE, FOLDER, Part, Table, parquet_part
from securecluster.errors import UsageError

PARQUET = (".parquet", ".pq")
TABLES = (".csv", ".tsv", ".tab", ".xlsx", *PARQUET)
LOOSE = (".txt", ".data")  # tables where no file of a folder has a name of a table
SEPARATORS = ",;\t|"
MOST_QUOTED = 120  # letters of another package's error
BLOCK = 1 << 23  # bytes that are parsed at once, of which the longest line is a part


def file_table(path: Path, wanted: Sequence[str] = ()) -> Table:
    """Return the table of a file, or of all tables in a folder and below, by their names.

    Args:
        path: of the file or the folder.
        wanted: columns that the files should have, by which a first line is known to name columns.

    Raises:
        UsageError: there is no such file, or it cannot be read.
    """
    files, left_out = _files(path)
    lies_in = [_lies_in(file, path) for file in files]
    labels = [label for label, _ in lies_in]
    twice = [name for name, count in Counter(labels).items() if count > 1]
    if twice and FILE in wanted:
        alike = [str(file) for file, name in zip(files, labels, strict=True) if name == twice[0]]
        raise UsageError(f"{' and '.join(alike)} would both be the client {twice[0]!r}: rename one")
    parts = [_part(file, names, wanted) for file, names in zip(files, lies_in, strict=True)]
    return Table(str(path), parts, left_out)


def _files(path: Path) -> tuple[list[Path], list[Path]]:
    """Return the file at a path, or the tables in a folder by their names, and the other files."""
    advice = "give a CSV, parquet or Excel file, or a folder of them"
    if not os.path.exists(path):  # false for a path that no file can have
        raise UsageError(f"{path} does not exist: {advice}")
    if not os.path.isdir(path):
        return [path], []
    files = []
    for file in sorted(path.rglob("*")):
        hidden = any(name.startswith(".") for name in file.relative_to(path).parts)
        if file.is_file() and not hidden:
            files.append(file)
    tables = [file for file in files if _suffix(file) in TABLES]
    tables = tables or [file for file in files if _suffix(file) in LOOSE]
    if not tables:
        raise UsageError(f"{path} holds no table ({' '.join((*TABLES, *LOOSE))}): {advice}")
    return tables, [file for file in files if file not in tables]


def _bare(file: Path) -> Path:
    """Return a path without the ending of a compressed file."""
    return file.with_suffix("") if file.suffix.lower() == ".gz" else file


def _suffix(file: Path) -> str:
    """Return how the name of a file ends, in lower case, whether it is compressed or not."""
    return _bare(file).suffix.lower()


def _lies_in(file: Path, folder: Path) -> tuple[str, str]:
    """Return a file's name from its folder on, without its ending, and that of its own folder."""
    inside = Path(file.name) if file == folder else file.relative_to(folder)
    name = _bare(inside)
    if name.suffix.lower() in (*TABLES, *LOOSE):
        name = name.with_suffix("")
    own = inside.parent.as_posix()
    return name.as_posix(), file.resolve().parent.name if own == "." else own


def _part(file: Path, lies_in: tuple[str, str], wanted: Sequence[str]) -> Part:
    """Return the rows of a file.

    Args:
        file: its path.
        lies_in: as in `Part`.
        wanted: as for `file_table`.
    """
    arrow = need("pyarrow")
    try:
        with file.open("rb") as stream:
            begin = stream.read(4)
        if begin == b"PAR1" or _suffix(file) in PARQUET:
            return parquet_part(file, lies_in)
        unit = "line"
        if begin == b"PK\3\4":
            unit = "row"
            cells = _sheet(file)
        else:
            cells = _text(file, begin, wanted)
    except (OSError, UnicodeDecodeError, arrow.ArrowException, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0][:MOST_QUOTED]
        raise UsageError(
            f"{file} cannot be read as CSV ({reason}): it is text in UTF-8, with the same number "
            "of columns in each line"
        ) from None
    first = [str(values[0]).strip() for values in cells.columns if len(values)]
    has_header = _names_columns(first, wanted)
    names = tuple(first) if has_header else tuple(cells.column_names)
    columns = dict(zip(names, cells.slice(1).columns if has_header else cells.columns, strict=True))
    return Part(
        title=str(file),
        names=names,
        rows=cells.num_rows - has_header,
        read=columns.__getitem__,
        is_text=True,
        first=1 + has_header,
        unit=unit,
        headless=not has_header,
        lies_in=lies_in,
    )


def _names_columns(first: Sequence[str], wanted: Sequence[str]) -> bool:
    """Return whether a first line names columns; else they are called f0, f1, …

    Args:
        first: its cells.
        wanted: columns that the file should have.
    """
    named = [name for name in wanted if name not in (FILE, FOLDER)]
    if named and set(named) <= set(first):
        return True
    numbered = named and all(re.fullmatch(r"f\d+", name) for name in named)
    return not (numbered or any(is_number(cell) for cell in first))


def _sheet(file: Path) -> Any:
    """Return the cells (pyarrow) of the only sheet of an Excel file, as text."""
    need("openpyxl")
    pandas = need("pandas")
    try:
        sheets = pandas.read_excel(
            file, sheet_name=None, header=None, dtype=str, na_filter=False, engine="openpyxl"
        )
    except Exception as error:  # of whatever a damaged file makes it meet
        reason = f"{type(error).__name__} {error}"[:MOST_QUOTED]
        raise UsageError(f"{file} cannot be read as Excel ({reason}): write it again") from None
    filled = {name: frame for name, frame in sheets.items() if frame.size}
    if len(filled) != 1:
        names = listed([repr(name) for name in filled]) or "none"
        raise UsageError(f"{file} has several sheets with cells, or none ({names}): leave one")
    (frame,) = filled.values()
    return _of_frame(frame)


def _of_frame(frame: Any) -> Any:
    """Return a DataFrame of text (pandas) as a table of pyarrow with columns f0, f1, …"""
    arrow = need("pyarrow")
    columns = [arrow.array(frame[name].astype(str), "string") for name in frame.columns]
    return arrow.table({f"f{k}": values for k, values in enumerate(columns)})


def _text(file: Path, begin: bytes, wanted: Sequence[str]) -> Any:
    """Return the cells (pyarrow) of a text file, its first line among them.

    Args:
        file: its path.
        begin: its first bytes, which tell whether it is compressed.
        wanted: as for `file_table`.
    """
    arrow = need("pyarrow")
    compression = "gzip" if begin.startswith(b"\x1f\x8b") else None

    def opened() -> Any:
        return arrow.input_stream(str(file), compression=compression)

    with opened() as stream:
        first_lines = stream.read(BLOCK)
    width, separator = _separator(first_lines, wanted)
    if width < 2:
        frame = need("pandas").read_csv(
            opened(), sep=r"\s+", header=None, dtype=str, keep_default_na=False
        )
        return _of_frame(frame)
    try:
        return _parsed("read_csv", opened(), separator, width)
    except arrow.ArrowInvalid:
        # a single thread counts the lines, of which it says the first that is no part of the table
        return _parsed("read_csv", opened(), separator, width, use_threads=False)


def _parsed(
    reader: str,
    source: Any,
    separator: str,
    width: int = 0,
    use_threads: bool = True,
    invalid: Callable[[Any], str] | None = None,
) -> Any:
    """Return what a reader of `pyarrow.csv` makes of a text, with columns f0, f1, …

    Args:
        reader: "read_csv" or "open_csv".
        source: of the text.
        separator: of the columns.
        width: how many columns stay text, of which pyarrow does not guess the types.
        use_threads: without them errors have the numbers of lines.
        invalid: says what to do with lines with another number of columns; None is an error.
    """
    arrow_csv = need("pyarrow.csv")
    return getattr(arrow_csv, reader)(
        source,
        arrow_csv.ReadOptions(
            autogenerate_column_names=True, block_size=BLOCK, use_threads=use_threads
        ),
        arrow_csv.ParseOptions(
            delimiter=separator, newlines_in_values=True, invalid_row_handler=invalid
        ),
        arrow_csv.ConvertOptions(column_types={f"f{k}": "string" for k in range(width)}),
    )


def _separator(first_lines: bytes, wanted: Sequence[str]) -> tuple[int, str]:
    """Return how many columns a text has, and what separates them.

    It is what makes the first lines have the wanted columns, or else agree best.

    Args:
        first_lines: of the text, of which the last may be cut off.
        wanted: columns that it should have.
    """
    arrow = need("pyarrow")
    codecs.getincrementaldecoder("utf-8")().decode(first_lines)
    if len(first_lines) == BLOCK:
        first_lines = first_lines.rpartition(b"\n")[0] or first_lines
    ranks = []
    for separator in SEPARATORS:
        ragged: list[Any] = []

        def skip(row: Any, ragged: list[Any] = ragged) -> str:
            ragged.append(row)
            return "skip"

        source = arrow.BufferReader(first_lines)
        with _parsed("open_csv", source, separator, invalid=skip) as reader:
            batch = reader.read_next_batch()
        names = {str(values[0]).strip() for values in batch.columns if len(values)}
        found = sum(name in names for name in wanted)
        width = batch.num_columns
        ranks.append((width > 1, found, -len(ragged), width, separator))
    *_, width, separator = max(ranks)
    return width, separator
