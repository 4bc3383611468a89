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
from functools import partial
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
BEGINNING = 1 << 16  # bytes by whose lines, and two more, separators are told
# what a text begins with that is not in UTF-8, the longer ones first
MARKS = dict.fromkeys((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE), "utf-32")
MARKS |= dict.fromkeys((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE), "utf-16")


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
        if not begin:
            raise UsageError(f"{file} is empty: leave it out, or write it again")
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
    rows = cells.slice(1) if has_header else cells
    # what a separator at the end of each line makes is no column
    kept = [k for k, name in enumerate(names) if name or not _is_blank(rows.column(k))]
    names = tuple(names[k] for k in kept)
    columns = dict(zip(names, [rows.column(k) for k in kept], strict=True))
    return Part(
        title=str(file),
        names=names,
        rows=rows.num_rows,
        read=columns.__getitem__,
        is_text=True,
        first=1 + has_header,
        unit=unit,
        headless=not has_header,
        lies_in=lies_in,
    )


def _is_blank(cells: Any) -> bool:
    """Return whether cells of text (pyarrow) have nothing but blanks."""
    compute = need("pyarrow.compute")
    return not compute.any(compute.not_equal(compute.utf8_trim_whitespace(cells), "")).as_py()


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
        advice = "write it again, or unpack it if it is another archive"
        raise UsageError(f"{file} cannot be read as Excel ({reason}): {advice}") from None
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
    opened = _opener(file, begin)
    with opened() as stream:
        first_lines = stream.read(BLOCK)
    if b"\0" in first_lines.partition(b"\n")[0]:
        raise UsageError(
            f"{file} has zeros in its first line, so it is no text, or in UTF-16 without a mark: "
            "save it as UTF-8"
        )
    width = 0
    try:
        width, separator = _separator(first_lines, wanted)
        if width < 2:
            frame = need("pandas").read_csv(
                opened(), sep=r"\s+", header=None, dtype=str, keep_default_na=False
            )
            return _of_frame(frame)
        return _parsed("read_csv", opened(), separator, width)
    except (arrow.ArrowInvalid, UnicodeDecodeError):
        _check_encoding(file, opened)
        if width < 2:
            raise
        # a single thread counts the lines, of which it says the first that is no part of the table
        return _parsed("read_csv", opened(), separator, width, use_threads=False)


def _opener(file: Path, begin: bytes) -> Callable[[], Any]:
    """Return a function that opens a text file as UTF-8, whatever its byte order mark says.

    Args:
        file: its path.
        begin: its first bytes, which tell whether it is compressed.
    """
    arrow = need("pyarrow")
    compression = "gzip" if begin.startswith(b"\x1f\x8b") else None
    opened = partial(arrow.input_stream, str(file), compression=compression)
    with opened() as stream:
        mark = stream.read(4)
    encodings = [name for bytes_of_mark, name in MARKS.items() if mark.startswith(bytes_of_mark)]
    if not encodings:
        return opened
    return lambda: arrow.transcoding_input_stream(opened(), encodings[0], "utf-8")


def _check_encoding(file: Path, opened: Callable[[], Any]) -> None:
    """Raise UsageError for a text that is not in UTF-8, with its first such line.

    No other encoding is certain: each has a letter for most bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    line, block = 1, b"\n"
    with opened() as stream:
        while block:
            block = stream.read(BLOCK)
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                before, after = error.object[: error.start], error.object[error.start :]
                line += before.count(b"\n")
                beside = before.splitlines()[-1:] if not before.endswith(b"\n") else []
                near = b"".join(beside)[-12:] + after[:12].splitlines()[0]
                raise UsageError(
                    f"{file} is not in UTF-8: line {line} has the byte 0x{after[0]:02X}, in "
                    f"Windows-1252 {near.decode('cp1252', 'replace')!r}: save it as UTF-8 (in "
                    "Excel, CSV UTF-8)"
                ) from None
            line += block.count(b"\n")


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
    more = first_lines[BEGINNING:].split(b"\n", 2)
    if len(more) > 2:
        first_lines = first_lines[:BEGINNING] + b"\n".join(more[:2])
    elif len(first_lines) == BLOCK:
        first_lines = first_lines.rpartition(b"\n")[0] or first_lines
    codecs.getincrementaldecoder("utf-8")().decode(first_lines)
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
