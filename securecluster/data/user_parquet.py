"""Users' own parquet files: a column names each row's client, another its label, the others are
features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.pools import (
    Features,
    Labels,
    column,
    decode,
    encoded,
    floats,
    need,
    open_parquet,
    opened,
    reading,
)
from securecluster.errors import UsageError


@dataclass(frozen=True)
class ClientColumns:
    """Samples by client, each client's true cluster where it is known, and the columns that are
    features.
    """

    clients: dict[str, tuple[NDArray[Any], Labels]]
    truth: dict[str, int] | None
    columns: tuple[str, ...]


def read_clients(
    path: Path,
    client: str,
    label: str,
    truth: str | None,
    features: Sequence[str] | None = None,
    drop: Sequence[str] = (),
) -> ClientColumns:
    """The rows of a file, or of a folder's files, by client.

    Args:
        features: the columns that are features, in this order; None is all that are left.
        drop: columns that are no features.

    Raises:
        UsageError: a file, column or value that cannot be used, or a client with a single row.
    """
    files, named = _files(path), [name for name in (client, label, truth) if name is not None]
    if len(set(named)) < len(named):
        raise UsageError(f"client, label and truth are different columns, not {', '.join(named)}")
    wanted = None if features is None else _several("feature_columns", features, named)
    left_out = _several("drop_columns", drop, named)
    if wanted is not None and left_out:
        raise UsageError("feature_columns and drop_columns say the same twice: give one of them")
    for file in files:
        open_parquet(file, [*named, *(wanted or ()), *left_out])
    names, owner = _values(files, client)
    classes, y = _values(files, label)
    if len(classes) < 2:
        raise UsageError(
            f"column {label!r} of {path} has the same value in every row, so there is nothing to "
            "learn: choose another label"
        )
    single = np.flatnonzero(np.bincount(owner) < 2)
    if len(single):
        raise UsageError(
            f"client {str(names[single[0]])!r} of {path} has a single row, so none can be held "
            "out: leave it out"
        )
    known = None if truth is None else _truth(names, owner, *_values(files, truth), truth)
    x, columns = _features(files, {*named, *left_out}, wanted)
    order = np.split(np.argsort(owner, kind="stable"), np.cumsum(np.bincount(owner))[:-1])
    return ClientColumns(
        {str(name): (x[rows], y[rows]) for name, rows in zip(names, order, strict=True)},
        known,
        columns,
    )


def _several(option: str, given: Sequence[str], named: Sequence[str]) -> tuple[str, ...]:
    """Return columns that a user names; a text is one column."""
    columns = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(name, str) for name in columns) or len(set(columns)) < len(columns):
        raise UsageError(f"{option} = {columns!r} are names of columns, each once")
    taken = [name for name in columns if name in named]
    if taken:
        raise UsageError(
            f"column {taken[0]!r} names the client, the label or the true cluster: leave it out of "
            f"{option}"
        )
    if not columns and option == "feature_columns":
        raise UsageError(
            "feature_columns names no column: name one, or leave it out for all that are left"
        )
    return columns


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise UsageError(
                f"{path} holds no .parquet file: give a parquet file, or a folder of them"
            )
        return files
    if not path.exists():
        raise UsageError(f"{path} does not exist: give a parquet file, or a folder of them")
    return [path]


def _values(files: Sequence[Path], name: str) -> tuple[NDArray[Any], Labels]:
    """The distinct values (k,) of a column in ascending order, and each row's number among them
    (n,).
    """
    cells = np.concatenate([column(file, name).to_numpy(zero_copy_only=False) for file in files])
    if not len(cells):
        raise UsageError(
            f"{files[0].parent if len(files) > 1 else files[0]} has no rows: give a file that has "
            "some"
        )
    if cells.dtype.kind == "f" and np.isnan(cells).any():
        raise UsageError(
            f"column {name!r} of {files[0]} has empty cells (NaN): fill or drop these rows"
        )
    try:
        values, number = np.unique(cells, return_inverse=True)
    except (TypeError, ValueError):
        raise UsageError(
            f"column {name!r} of {files[0]} holds values that cannot be put in order: use numbers "
            "or text"
        ) from None
    return values, number.reshape(-1).astype(np.int64)


def _truth(
    names: NDArray[Any], owner: Labels, values: NDArray[Any], number: Labels, column: str
) -> dict[str, int]:
    """Each client's cluster, which all its rows must name."""
    pairs = np.unique(np.stack([owner, number], axis=1), axis=0)
    several = np.flatnonzero(np.bincount(pairs[:, 0]) > 1)
    if len(several):
        raise UsageError(
            f"client {str(names[several[0]])!r} has several values in column {column!r}: a true "
            "cluster is one value per client"
        )
    return {str(names[client]): int(cluster) for client, cluster in pairs}


def _features(
    files: Sequence[Path], named: set[str], wanted: Sequence[str] | None
) -> tuple[NDArray[Any], tuple[str, ...]]:
    """Samples (n, …) of all rows, images, lists or numbers, and the columns they come from."""
    schemas = [
        {f.name: f.type for f in open_parquet(file, ()).schema_arrow if f.name not in named}
        for file in files
    ]
    for file, other in zip(files, schemas, strict=True):
        if list(other) != list(schemas[0]):
            raise UsageError(
                f"{file} has other columns than {files[0]}: files of one folder have the same ones"
            )
    types = need("pyarrow").types
    schema = schemas[0] if wanted is None else {name: schemas[0][name] for name in wanted}
    pictures = [
        name
        for name, kind in schema.items()
        if types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    ]
    lists = [
        name
        for name, kind in schema.items()
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    ]
    chosen = pictures or lists
    if len(chosen) > 1:
        raise UsageError(
            f"{files[0]} has several columns of {'images' if pictures else 'lists'} "
            f"({', '.join(chosen)}): leave one, drop the others"
        )
    if chosen and wanted is not None and len(wanted) > 1:
        kind = "images" if pictures else "lists"
        raise UsageError(
            f"column {chosen[0]!r} of {files[0]} holds {kind}, which are the only feature then: "
            "name it alone"
        )
    if pictures:
        return _images(files, pictures[0]), (pictures[0],)
    if lists:
        return np.concatenate([_rows(file, lists[0]) for file in files]), (lists[0],)
    plain = list(schema)
    if wanted is None:
        # pandas writes its row numbers under this name
        plain = [name for name in schema if not name.startswith("__index_level_")]
    if not plain:
        raise UsageError(
            f"{files[0]} has no feature column besides {', '.join(sorted(named))}: add some"
        )
    x = np.concatenate(
        [np.stack([_numbers(file, name) for name in plain], axis=1) for file in files]
    )
    return x, tuple(plain)


def _images(files: Sequence[Path], name: str) -> Features:
    blobs = [
        (f"image {k} of {file}", b)
        for file in files
        for k, b in enumerate(encoded(column(file, name), file))
    ]
    first = opened(*blobs[0])
    shape = (1 if first.mode in ("1", "L", "I", "I;16", "F") else 3, first.height, first.width)
    return floats(decode(blobs, len(blobs), shape), np.arange(len(blobs)))


def _rows(file: Path, name: str) -> Features:
    """A column of equally long (possibly nested) lists of numbers."""
    cells = column(file, name)
    with reading(file):
        values = cells.to_pylist()
    try:
        rows = np.asarray(values)
    except ValueError:
        raise UsageError(
            f"column {name!r} of {file} has lists of different lengths: make them equally long"
        ) from None
    if rows.dtype.kind not in "biuf":
        raise UsageError(
            f"column {name!r} of {file} has lists with empty cells or of other things than "
            "numbers: use numbers"
        )
    return _single(rows)


def _numbers(file: Path, name: str) -> NDArray[Any]:
    """A column of numbers; in double precision where single precision would make large whole
    numbers equal.
    """
    values = np.asarray(column(file, name).to_numpy(zero_copy_only=False))
    if values.dtype.kind not in "biuf":
        raise UsageError(
            f"column {name!r} of {file} holds {_kind(file, name)}, not numbers: drop it, or encode "
            "it as numbers"
        )
    if values.dtype.kind in "iu" and np.abs(values.astype(np.float64)).max(initial=0) >= 2**24:
        return values.astype(np.float64)
    return _single(values)


def _single(values: NDArray[Any]) -> Features:
    """Return values as float32.

    What is too large becomes infinite and is refused with its client's name later.
    """
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def _kind(file: Path, name: str) -> str:
    return str(open_parquet(file, (name,)).schema_arrow.field(name).type)
