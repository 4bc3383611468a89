"""Pools of samples and their targets.

Targets are read at once; images are decoded only for the rows that are read.
"""

from __future__ import annotations

import importlib
import io
import struct
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.errors import UsageError, unknown

Features = NDArray[np.float32]
Labels = NDArray[np.int64]
Pixels = NDArray[np.uint8]

_BATCH = 1000  # rows whose bytes or floats are in memory at once besides the result


class Pool(Protocol):
    """Samples and their targets, with the samples' natural owners and groups if there are any."""

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
        """Return the number of rows of an owner to leave out before its held-out rows.

        It is None if an owner's rows are in no order; otherwise they ascend in time.
        """

    def read(self, rows: Labels) -> NDArray[Any]:
        """Return copies of samples (k, …), float32 or int64 tokens.

        Args:
            rows: of the samples, in the order of the result (k,).
        """


@dataclass(frozen=True)
class ArrayPool:
    """Pool in memory.

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


@dataclass(frozen=True)
class Halved:
    """Pool of images at half their side.

    Args:
        pool: of the whole images, whose sides are even.
    """

    pool: Pool

    @property
    def y(self) -> Labels:
        """Return the labels."""
        return self.pool.y

    @property
    def owners(self) -> NDArray[Any] | None:
        """Return the owners."""
        return self.pool.owners

    @property
    def groups(self) -> NDArray[Any] | None:
        """Return the groups of owners."""
        return self.pool.groups

    @property
    def gap(self) -> int | None:
        """Return the rows between training and held-out rows."""
        return self.pool.gap

    def read(self, rows: Labels) -> Features:
        """Return images whose pixels are means of two by two."""
        images = self.pool.read(rows)
        count, channels, height, width = images.shape
        squares = images.reshape(count, channels, height // 2, 2, width // 2, 2)
        means: Features = squares.mean(axis=(3, 5), dtype=np.float32)
        return means


def lasting(owners: NDArray[Any], gap: int) -> Labels:
    """Return the rows of owners that have enough rows to be split in time.

    The split holds out the last fifth and leaves a gap before it; at least one row remains to train
    on.

    Args:
        owners: name of the owner of each row (n,).
        gap: number of rows to leave out.
    """
    _, owner_numbers, counts = np.unique(owners, return_inverse=True, return_counts=True)
    test_sizes = counts // 5
    is_enough = (test_sizes > 0) & (counts - test_sizes > gap)
    return np.flatnonzero(is_enough[owner_numbers])


class _Images(ABC):
    """Base class of pools of encoded images, where those of an owner are in no order."""

    shape: tuple[int, int, int]
    groups = None
    gap = None

    @abstractmethod
    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """Yield the location, for errors, and the encoded bytes of each image.

        Args:
            rows: of the images, ascending.
        """
        ...

    def read(self, rows: Labels) -> Features:
        """Return images (k, channels, height, width) in [0, 1].

        Args:
            rows: of the images (k,); a row that occurs several times is decoded once.
        """
        distinct, order = np.unique(rows, return_inverse=True)
        blobs = self.blobs(distinct)
        pixels = decode(blobs, len(distinct), self.shape)
        return floats(pixels, order)


@dataclass(frozen=True)
class ParquetPool(_Images):
    """Pool of images in parquet files with the layout of the Hugging Face hub.

    Args:
        files: in the order of the rows.
        image: name of the image column (a struct of bytes and path).
        label: name of the label column.
        shape: (channels, height, width) of each image.
        owner: name of the column of owners, or None.
    """

    files: tuple[Path, ...]
    image: str
    label: str
    shape: tuple[int, int, int]
    owner: str | None = None

    @cached_property
    def y(self) -> Labels:
        """Return the labels, without reading the images."""
        labels = []
        for path in self.files:
            cells = column(path, self.label)
            labels.append(_integers(cells, path, self.label))
        return np.concatenate(labels)

    @cached_property
    def owners(self) -> NDArray[Any] | None:
        """Return the column of owners, or None."""
        if self.owner is None:
            return None
        columns = [column(path, self.owner) for path in self.files]
        return np.concatenate([cells.to_numpy() for cells in columns])

    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """Yield the location and the encoded bytes of each image."""
        start = 0  # number of the row group's first row, counted over all files
        for path in self.files:
            file = open_parquet(path, (self.image,))
            for group in range(file.num_row_groups):
                stop = start + file.metadata.row_group(group).num_rows
                first, last = np.searchsorted(rows, (start, stop))
                rows_in_group = rows[first:last]
                # row groups without one of the rows are not read
                if len(rows_in_group):
                    with reading(path):
                        table = file.read_row_group(group, columns=[self.image])
                        cells = table.column(self.image).take(rows_in_group - start)
                    blobs = encoded(cells, path)
                    for row, blob in zip(rows_in_group, blobs, strict=True):
                        yield f"image {row} of {path}", blob
                start = stop


@dataclass(frozen=True)
class HubPool(_Images):
    """Pool of images in a Hugging Face `datasets.Dataset`.

    Args:
        dataset: whose image column is not decoded.
        image: name of the image column.
        label: name of the label column.
        shape: (channels, height, width) of each image.
        owner: name of the column of owners, or None.
    """

    dataset: Any
    image: str
    label: str
    shape: tuple[int, int, int]
    owner: str | None = None

    @cached_property
    def y(self) -> Labels:
        """Return the labels, without reading the images."""
        return np.asarray(self._column(self.label), dtype=np.int64)

    @cached_property
    def owners(self) -> NDArray[Any] | None:
        """Return the column of owners, or None."""
        if self.owner is None:
            return None
        return np.asarray(self._column(self.owner), dtype=object)

    def blobs(self, rows: Labels) -> Iterator[tuple[str, bytes | None]]:
        """Yield the location and the encoded bytes of each image."""
        images = self.dataset.select_columns([self.image])
        # in batches, so that the encoded images of all rows are never in memory at once
        for start in range(0, len(rows), _BATCH):
            batch = rows[start : start + _BATCH].tolist()
            cells = images[batch][self.image]
            for row, cell in zip(batch, cells, strict=True):
                blob = cell["bytes"]
                if blob is None:  # the set stores images as files
                    blob = Path(cell["path"]).read_bytes()
                yield f"image {row}", blob

    def _column(self, name: str) -> Any:
        # selected first, since reading a row would read its image as well
        return self.dataset.select_columns([name])[:][name]


@contextmanager
def reading(path: object) -> Iterator[None]:
    """Turn errors of pyarrow within the context into a UsageError.

    Args:
        path: of the file that the context reads.
    """
    arrow_error = need("pyarrow").ArrowException
    try:
        yield
    except (OSError, arrow_error) as error:
        if isinstance(error, FileNotFoundError | PermissionError):
            raise UsageError(
                f"{path} cannot be opened ({error.strerror or 'no access'}): check the path and "
                "its permissions"
            ) from None
        raise UsageError(
            f"{path} is no parquet file, or not a whole one: download or write it again"
        ) from None


def open_parquet(path: Path, columns: Iterable[str]) -> Any:
    """Return an open file (`pyarrow.parquet.ParquetFile`).

    Args:
        path: of the file.
        columns: names of columns that the file must have.

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
    """Return one column (`pyarrow.ChunkedArray`) of a parquet file.

    Args:
        path: of the file.
        name: of the column.

    Raises:
        UsageError: the file or the column is missing or damaged, or has empty cells.
    """
    cells = cells_of(path, name)
    if cells.null_count:
        raise UsageError(
            f"column {name!r} of {path} has {cells.null_count} empty cells (null): fill or drop "
            "these rows"
        )
    return cells


def cells_of(path: Path, name: str) -> Any:
    """Return one column (`pyarrow.ChunkedArray`) of a parquet file, with its empty cells.

    Args:
        path: of the file.
        name: of the column.

    Raises:
        UsageError: the file or the column is missing or damaged.
    """
    file = open_parquet(path, (name,))
    with reading(path):
        return file.read(columns=[name]).column(name)


def _integers(cells: Any, path: Path, name: str) -> Labels:
    """Return a column of class numbers as an array.

    Args:
        cells: of the column (pyarrow).
        path: of the file, for the error.
        name: of the column, for the error.

    Raises:
        UsageError: the column has other values than integers.
    """
    if not need("pyarrow").types.is_integer(cells.type):
        raise UsageError(
            f"column {name!r} of {path} holds {cells.type}, not class numbers: this is not the "
            "layout of the hub"
        )
    return np.asarray(cells.to_numpy(), dtype=np.int64)


def encoded(cells: Any, path: object) -> list[bytes | None]:
    """Return the encoded images of a column.

    Args:
        cells: of the column (pyarrow), bytes or structs with a field `bytes`.
        path: of the file, for the error.

    Raises:
        UsageError: the column has values of another type.
    """
    types = need("pyarrow").types
    if types.is_struct(cells.type) and cells.type.get_field_index("bytes") >= 0:
        compute = importlib.import_module("pyarrow.compute")
        cells = compute.struct_field(cells, "bytes")
    if not (types.is_binary(cells.type) or types.is_large_binary(cells.type)):
        raise UsageError(
            f"{path} has no images where they should be, but {cells.type}: images are bytes, or "
            "structs with a field bytes"
        )
    return list(cells.to_pylist())


def opened(location: str, blob: bytes | None, load: bool = True) -> Any:
    """Return a Pillow image.

    Args:
        location: of the image, for the error.
        blob: the encoded image.
        load: decode its pixels, too.

    Raises:
        UsageError: no bytes, or bytes that Pillow cannot decode.
    """
    pillow = need("PIL.Image")
    # Pillow raises SyntaxError on a broken PNG
    decoding_errors = (OSError, ValueError, SyntaxError, pillow.DecompressionBombError)
    try:
        image = pillow.open(io.BytesIO(blob or b""))
        if load:
            image.load()
    except decoding_errors:
        raise UsageError(
            f"{location} cannot be decoded as an image: download or write the file again"
        ) from None
    return image


def decode(
    blobs: Iterable[tuple[str, bytes | None]], count: int, shape: tuple[int, int, int]
) -> Pixels:
    """Return encoded images as pixels (count, height, width, channels).

    Images are greyscale if the shape has one channel, otherwise RGB.

    Args:
        blobs: location, for errors, and encoded bytes of each image.
        count: expected number of images.
        shape: (channels, height, width) of each image.

    Raises:
        UsageError: an image that cannot be decoded, or has another size.
        IndexError: fewer images than expected.
    """
    channels, height, width = shape
    # filled image by image, so that no list of decoded images doubles the memory
    pixels = np.empty((count, height, width, channels), np.uint8)
    mode = "RGB"
    if channels == 1:
        mode = "L"
    decoded = 0
    begin = _png_begin(shape)
    for location, blob in blobs:
        rows = _unfiltered_rows(blob or b"", begin, shape)
        if rows is not None:
            pixels[decoded] = rows.reshape(height, width, channels)
            decoded += 1
            continue
        image = opened(location, blob)
        if image.size != (width, height):
            image_width, image_height = image.size
            raise UsageError(
                f"{location} has {image_width} × {image_height} pixels, the first one {width} × "
                f"{height}: use one size"
            )
        if image.mode != mode:
            image = image.convert(mode)
        image_pixels = np.asarray(image)
        pixels[decoded] = image_pixels.reshape(height, width, channels)
        decoded += 1
    # rows beyond the pool yield no image, and would leave pixels uninitialised
    if decoded != count:
        raise IndexError(
            f"{count} images were asked for and {decoded} are there: the rows lie beyond the pool"
        )
    return pixels


def _png_begin(shape: tuple[int, int, int]) -> bytes:
    """Return the bytes that a PNG of 8 bits a channel begins with: its signature and its header.

    Args:
        shape: (channels, height, width) of the image, grey or RGB.
    """
    channels, height, width = shape
    colour_type = 0 if channels == 1 else 2
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    check_sum = zlib.crc32(header)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", check_sum)


def _unfiltered_rows(blob: bytes, begin: bytes, shape: tuple[int, int, int]) -> Pixels | None:
    """Return the pixels of a PNG whose rows are stored as they are, (height, width · channels).

    Pillow takes several times as long for small images, such as those of MNIST (W3C, Portable
    Network Graphics, 2003, sections 5 and 9).

    Args:
        blob: the encoded image.
        begin: as `_png_begin` returns it.
        shape: (channels, height, width) of the image.

    Returns:
        None for every other image, damaged ones among them, which is left to Pillow.
    """
    start = len(begin) + 8  # of the data, after their length and type
    if not blob.startswith(begin) or blob[start - 4 : start] != b"IDAT":
        return None
    length = int.from_bytes(blob[start - 8 : start - 4], "big")
    channels, height, width = shape
    # each row begins with the number of its filter
    bytes_of_row = 1 + width * channels
    size = height * bytes_of_row
    stream = zlib.decompressobj()
    try:
        # no more than fits, whatever the data claim; at their end a sum of them is checked
        data = stream.decompress(blob[start : start + length], size + 1)
    except zlib.error:
        return None
    if len(data) != size or not stream.eof:
        return None
    rows = np.frombuffer(data, np.uint8).reshape(height, bytes_of_row)
    if rows[:, 0].any():
        return None
    return rows[:, 1:]


def floats(pixels: Pixels, order: NDArray[np.intp]) -> Features:
    """Return pixels as float32 images (k, channels, height, width) in [0, 1].

    Args:
        pixels: images of bytes (u, height, width, channels).
        order: position in `pixels` of each image of the result (k,).
    """
    _, height, width, channels = pixels.shape
    shape = (len(order), channels, height, width)
    images = np.empty(shape, np.float32)
    # in batches, without an intermediate copy of all images
    for start in range(0, len(order), _BATCH):
        batch = slice(start, start + _BATCH)
        channels_last = pixels[order[batch]]
        channels_first = channels_last.transpose(0, 3, 1, 2)
        np.divide(channels_first, 255, out=images[batch], dtype=np.float32)
    return images
