"""Pools of samples and their targets: targets are read at once, images are decoded only for the
rows that are asked for.
"""

from __future__ import annotations

import importlib
import io
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError, unknown

Features = NDArray[np.float32]
Labels = NDArray[np.int64]
Pixels = NDArray[np.uint8]

_PACKAGES = {
    "pyarrow": "pyarrow",
    "pyarrow.parquet": "pyarrow",
    "PIL.Image": "Pillow",
    "datasets": "datasets",
}
_BATCH = 1000  # rows whose bytes or floats are in memory besides the result


class Pool(Protocol):
    """Samples and their targets `y` (n, …), natural `owners` and `groups` (n,) where samples have
    them, and `read`.
    """

    @property
    def y(self) -> NDArray[Any]:
        """Labels (n,) in 0 … classes − 1, or the targets of another objective."""

    @property
    def owners(self) -> NDArray[Any] | None:
        """The name of the client each sample belongs to by nature (n,), or None."""

    @property
    def groups(self) -> NDArray[Any] | None:
        """The name of the group each sample belongs to (n,), such as its topic, or None; an owner's
        samples belong to one group.
        """

    @property
    def gap(self) -> int | None:
        """None where an owner's rows are in no order; where they ascend in time, how many are left
        out before the held-out ones.
        """

    def read(self, rows: Labels) -> NDArray[Any]:
        """Samples (k, …) of the given rows (k,), in their order, float32 or int64 tokens: copies,
        which the caller may change.
        """


@dataclass(frozen=True)
class ArrayPool:
    """Samples x (n, …), float32 or int64 tokens, and targets y (n, …) that lie in memory; the rest
    as in `Pool`.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    owners: NDArray[Any] | None = None
    groups: NDArray[Any] | None = None
    gap: int | None = None

    def read(self, rows: Labels) -> NDArray[Any]:
        """Copies of the rows."""
        return self.x[rows]


def lasting(owners: NDArray[Any], gap: int) -> Labels:
    """Rows of owners who have enough of them to hold out the last fifth, leave a gap out, and keep
    one to train on.
    """
    _, number, counts = np.unique(owners, return_inverse=True, return_counts=True)
    held = counts // 5
    return np.flatnonzero(((held > 0) & (counts - held > gap))[number])


class _Images(ABC):
    """What pools of encoded images share; their owners' images are in no order."""

    shape: tuple[int, int, int]
    groups = None
    gap = None

    @abstractmethod
    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """(where it lies, encoded image) of the given rows, which are ascending."""
        ...

    def read(self, rows: Labels) -> Features:
        """Images (k, channels, height, width) in [0, 1]; each row is decoded once, however often it
        is asked for.
        """
        unique, order = np.unique(rows, return_inverse=True)
        return floats(decode(self.blobs(unique), len(unique), self.shape), order)


@dataclass(frozen=True)
class ParquetPool(_Images):
    """Rows of parquet files in the hub's layout: an image column (struct of bytes and path) and a
    label column.
    """

    files: tuple[Path, ...]
    image: str
    label: str
    shape: tuple[int, int, int]
    owner: str | None = None

    @cached_property
    def y(self) -> Labels:
        """Labels, without touching the images."""
        return np.concatenate(
            [_integers(column(path, self.label), path, self.label) for path in self.files]
        )

    @cached_property
    def owners(self) -> NDArray[Any] | None:
        """The owner column, where there is one."""
        owner = self.owner
        return (
            None
            if owner is None
            else np.concatenate([column(path, owner).to_numpy() for path in self.files])
        )

    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """Reads only the row groups that hold one of the rows."""
        start = 0
        for path in self.files:
            file = open_parquet(path, (self.image,))
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                own = rows[np.searchsorted(rows, start) : np.searchsorted(rows, stop)] - start
                if len(own):
                    with reading(path):
                        cells = (
                            file.read_row_group(group, columns=[self.image])
                            .column(self.image)
                            .take(own)
                        )
                    yield from (
                        (f"image {r} of {path}", b)
                        for r, b in zip(own + start, encoded(cells, path), strict=True)
                    )
                start = stop


@dataclass(frozen=True)
class HubPool(_Images):
    """Rows of a Hugging Face `datasets.Dataset` whose image column is not decoded."""

    dataset: Any
    image: str
    label: str
    shape: tuple[int, int, int]
    owner: str | None = None

    @cached_property
    def y(self) -> Labels:
        """Labels, without touching the images."""
        return np.asarray(self._column(self.label), dtype=np.int64)

    @cached_property
    def owners(self) -> NDArray[Any] | None:
        """The owner column, where there is one."""
        return None if self.owner is None else np.asarray(self._column(self.owner), dtype=object)

    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """In batches, so that encoded images do not pile up."""
        images = self.dataset.select_columns([self.image])
        for start in range(0, len(rows), _BATCH):
            part = rows[start : start + _BATCH].tolist()
            for row, cell in zip(part, images[part][self.image], strict=True):
                yield (
                    f"image {row}",
                    cell["bytes"] if cell["bytes"] is not None else Path(cell["path"]).read_bytes(),
                )

    def _column(self, name: str) -> Any:
        return self.dataset.select_columns([name])[:][name]


def need(module: str) -> Any:
    """An optional module.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UsageError(
            f"this data needs {_PACKAGES[module]}: pip install 'securecluster[data]'"
        ) from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what pyarrow raises on a damaged file into one sentence."""
    broken = need("pyarrow").ArrowException
    try:
        yield
    except (OSError, broken) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise UsageError(
                f"{path} cannot be opened ({error.strerror or 'no access'}): check the path and "
                "its permissions"
            ) from None
        raise UsageError(
            f"{path} is no parquet file, or not a whole one: download or write it again"
        ) from None


def open_parquet(path: Path, columns: Iterable[str]) -> Any:
    """The opened file, which has these columns.

    Raises:
        UsageError: a file that is missing, damaged or without one of the columns.
    """
    parquet = need("pyarrow.parquet")
    with reading(path):
        file = parquet.ParquetFile(path)
    names = list(file.schema_arrow.names)
    if len(set(names)) < len(names):
        raise UsageError(f"{path} has two columns of the same name: rename one")
    for name in columns:
        if name not in names:
            raise unknown(f"column of {path.name}", name, names)
    return file


def column(path: Path, name: str) -> Any:
    """One column (pyarrow) of a file, which has no empty cell."""
    file = open_parquet(path, (name,))
    with reading(path):
        cells = file.read(columns=[name]).column(name)
    if cells.null_count:
        raise UsageError(
            f"column {name!r} of {path} has {cells.null_count} empty cells (null): fill or drop "
            "these rows"
        )
    return cells


def _integers(cells: Any, path: Path, name: str) -> Labels:
    if not need("pyarrow").types.is_integer(cells.type):
        raise UsageError(
            f"column {name!r} of {path} holds {cells.type}, not class numbers: this is not the "
            "layout of the hub"
        )
    return np.asarray(cells.to_numpy(), dtype=np.int64)


def encoded(cells: Any, path: Path) -> list[bytes | None]:
    """The encoded images of a pyarrow column of bytes or of structs with a field `bytes`."""
    arrow = need("pyarrow")
    if arrow.types.is_struct(cells.type) and cells.type.get_field_index("bytes") >= 0:
        cells = importlib.import_module("pyarrow.compute").struct_field(cells, "bytes")
    if not (arrow.types.is_binary(cells.type) or arrow.types.is_large_binary(cells.type)):
        raise UsageError(
            f"{path} has no images where they should be, but {cells.type}: images are bytes, or "
            "structs with a field bytes"
        )
    return list(cells.to_pylist())


def opened(where: str, blob: bytes | None) -> Any:
    """A decoded Pillow image.

    Raises:
        UsageError: no bytes, or bytes that Pillow cannot decode.
    """
    pillow = need("PIL.Image")
    try:
        image = pillow.open(io.BytesIO(blob or b""))
        image.load()
    except (
        OSError,
        ValueError,
        SyntaxError,
        pillow.DecompressionBombError,
    ):  # Pillow raises SyntaxError on a broken PNG
        raise UsageError(
            f"{where} cannot be decoded as an image: download or write the file again"
        ) from None
    return image


def decode(
    blobs: Iterable[tuple[str, bytes | None]], count: int, shape: tuple[int, int, int]
) -> Pixels:
    """Encoded images as pixels (count, height, width, channels); grey where the shape has one
    channel, else RGB.
    """
    channels, height, width = shape
    pixels = np.empty((count, height, width, channels), np.uint8)
    mode = "L" if channels == 1 else "RGB"
    came = 0
    for k, (where, blob) in enumerate(blobs):
        came, image = k + 1, opened(where, blob)
        if image.size != (width, height):
            raise UsageError(
                f"{where} has {image.size[0]} × {image.size[1]} pixels, the first one {width} × "
                f"{height}: use one size"
            )
        pixels[k] = np.asarray(image if image.mode == mode else image.convert(mode)).reshape(
            height, width, channels
        )
    if came != count:
        raise IndexError(
            f"{count} images were asked for and {came} are there: the rows lie beyond the pool"
        )
    return pixels


def floats(pixels: Pixels, order: NDArray[np.intp]) -> Features:
    """Pixels (u, height, width, channels) as float32 (k, channels, height, width) in [0, 1], row
    order[k] each, without a second copy.
    """
    n, height, width, channels = len(order), *pixels.shape[1:]
    out = np.empty((n, channels, height, width), np.float32)
    for start in range(0, n, _BATCH):
        part = slice(start, start + _BATCH)
        np.divide(pixels[order[part]].transpose(0, 3, 1, 2), 255, out=out[part], dtype=np.float32)
    return out
