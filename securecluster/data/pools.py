"""Pools of samples and their targets.

Targets are read at once, and images are decoded only for the rows that are asked for.
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
    """Samples and their targets, with their natural owners and groups where they have some."""

    @property
    def y(self) -> NDArray[Any]:
        """Return labels (n,) in 0 … classes − 1, or the targets (n, …) of another objective."""

    @property
    def owners(self) -> NDArray[Any] | None:
        """Return the name of the client each sample belongs to by nature (n,), or None."""

    @property
    def groups(self) -> NDArray[Any] | None:
        """Return the name of the group each sample belongs to (n,), such as its topic, or None.

        All samples of an owner belong to one group.
        """

    @property
    def gap(self) -> int | None:
        """Return how many rows of an owner are left out before the held-out ones.

        It is None where an owner's rows are in no order; otherwise they ascend in time.
        """

    def read(self, rows: Labels) -> NDArray[Any]:
        """Return samples (k, …) of the given rows (k,), in their order, float32 or int64 tokens.

        They are copies, which the caller may change.
        """


@dataclass(frozen=True)
class ArrayPool:
    """Samples and targets in memory.

    Args:
        x: samples (n, …), float32 or int64 tokens.
        y: targets (n, …).
        owners: as in `Pool`.
        groups: as in `Pool`.
        gap: as in `Pool`.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    owners: NDArray[Any] | None = None
    groups: NDArray[Any] | None = None
    gap: int | None = None

    def read(self, rows: Labels) -> NDArray[Any]:
        """Return copies of the rows."""
        return self.x[rows]


def lasting(owners: NDArray[Any], gap: int) -> Labels:
    """Return the rows of owners who have enough of them.

    An owner holds out the last fifth, leaves a gap out, and keeps one row or more to train on.
    """
    _, number, counts = np.unique(owners, return_inverse=True, return_counts=True)
    held = counts // 5
    enough = (held > 0) & (counts - held > gap)
    return np.flatnonzero(enough[number])


class _Images(ABC):
    """A pool of encoded images; those of an owner are in no order."""

    shape: tuple[int, int, int]
    groups = None
    gap = None

    @abstractmethod
    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """Yield (where it lies, encoded image) of the given rows, which are ascending."""
        ...

    def read(self, rows: Labels) -> Features:
        """Return images (k, channels, height, width) in [0, 1].

        Each row is decoded once, however often it is asked for.
        """
        unique, order = np.unique(rows, return_inverse=True)
        return floats(decode(self.blobs(unique), len(unique), self.shape), order)


@dataclass(frozen=True)
class ParquetPool(_Images):
    """Rows of parquet files in the hub's layout.

    They have an image column (struct of bytes and path) and a label column.
    """

    files: tuple[Path, ...]
    image: str
    label: str
    shape: tuple[int, int, int]
    owner: str | None = None

    @cached_property
    def y(self) -> Labels:
        """Return labels, without touching the images."""
        return np.concatenate(
            [_integers(column(path, self.label), path, self.label) for path in self.files]
        )

    @cached_property
    def owners(self) -> NDArray[Any] | None:
        """Return the owner column, where there is one."""
        if self.owner is None:
            return None
        return np.concatenate([column(path, self.owner).to_numpy() for path in self.files])

    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """Yield encoded images; only the row groups that hold one of the rows are read."""
        start = 0
        for path in self.files:
            file = open_parquet(path, (self.image,))
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                first, last = np.searchsorted(rows, (start, stop))
                within = rows[first:last]
                if len(within):
                    with reading(path):
                        table = file.read_row_group(group, columns=[self.image])
                        cells = table.column(self.image).take(within - start)
                    for row, blob in zip(within, encoded(cells, path), strict=True):
                        yield f"image {row} of {path}", blob
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
        """Return labels, without touching the images."""
        return np.asarray(self._column(self.label), dtype=np.int64)

    @cached_property
    def owners(self) -> NDArray[Any] | None:
        """Return the owner column, where there is one."""
        if self.owner is None:
            return None
        return np.asarray(self._column(self.owner), dtype=object)

    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """Yield encoded images, read in batches so that they do not pile up."""
        images = self.dataset.select_columns([self.image])
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH].tolist()
            for row, cell in zip(batch, images[batch][self.image], strict=True):
                blob = cell["bytes"]
                if blob is None:
                    blob = Path(cell["path"]).read_bytes()
                yield f"image {row}", blob

    def _column(self, name: str) -> Any:
        return self.dataset.select_columns([name])[:][name]


def need(module: str) -> Any:
    """Return an optional module.

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
    """Return the opened file, which has these columns.

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
    """Return one column (pyarrow) of a file, which has no empty cell."""
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
    """Return a column of class numbers."""
    if not need("pyarrow").types.is_integer(cells.type):
        raise UsageError(
            f"column {name!r} of {path} holds {cells.type}, not class numbers: this is not the "
            "layout of the hub"
        )
    return np.asarray(cells.to_numpy(), dtype=np.int64)


def encoded(cells: Any, path: Path) -> list[bytes | None]:
    """Return the encoded images of a pyarrow column of bytes or of structs with a field `bytes`."""
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
    """Return a decoded Pillow image.

    Raises:
        UsageError: no bytes, or bytes that Pillow cannot decode.
    """
    pillow = need("PIL.Image")
    # Pillow raises SyntaxError on a broken PNG
    refusals = (OSError, ValueError, SyntaxError, pillow.DecompressionBombError)
    try:
        image = pillow.open(io.BytesIO(blob or b""))
        image.load()
    except refusals:
        raise UsageError(
            f"{where} cannot be decoded as an image: download or write the file again"
        ) from None
    return image


def decode(
    blobs: Iterable[tuple[str, bytes | None]], count: int, shape: tuple[int, int, int]
) -> Pixels:
    """Return encoded images as pixels (count, height, width, channels).

    They are grey where the shape has one channel, else RGB.

    Args:
        blobs: where each image lies, for errors, and its bytes.
        count: how many images there must be.
        shape: (channels, height, width) of each.
    """
    channels, height, width = shape
    pixels = np.empty((count, height, width, channels), np.uint8)
    mode = "L" if channels == 1 else "RGB"
    decoded = 0
    for where, blob in blobs:
        image = opened(where, blob)
        if image.size != (width, height):
            raise UsageError(
                f"{where} has {image.size[0]} × {image.size[1]} pixels, the first one {width} × "
                f"{height}: use one size"
            )
        if image.mode != mode:
            image = image.convert(mode)
        pixels[decoded] = np.asarray(image).reshape(height, width, channels)
        decoded += 1
    if decoded != count:
        raise IndexError(
            f"{count} images were asked for and {decoded} are there: the rows lie beyond the pool"
        )
    return pixels


def floats(pixels: Pixels, order: NDArray[np.intp]) -> Features:
    """Return pixels (u, height, width, channels) as float32 images in [0, 1].

    They are converted in batches, without a second copy of all of them.

    Returns:
        Images (k, channels, height, width), number k made of pixels[order[k]].
    """
    _, height, width, channels = pixels.shape
    images = np.empty((len(order), channels, height, width), np.float32)
    for start in range(0, len(order), _BATCH):
        batch = slice(start, start + _BATCH)
        channels_first = pixels[order[batch]].transpose(0, 3, 1, 2)
        np.divide(channels_first, 255, out=images[batch], dtype=np.float32)
    return images
