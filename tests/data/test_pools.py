"""PNGs without filters, which are read without Pillow: only those, and as Pillow reads them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

import numpy as np
import pytest

from securecluster.data import pools
from securecluster.data.pools import decode
from securecluster.errors import UsageError

pytest.importorskip("PIL.Image")

RNG = np.random.default_rng(0)


def chunk(kind: bytes, data: bytes) -> bytes:
    check_sum = zlib.crc32(kind + data)
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", check_sum)


def png(pixels: np.ndarray, filters: Sequence[int] = (), parts: int = 1, level: int = 9) -> bytes:
    """A PNG of pixels (height, width, channels) by its specification, rows as they are."""
    height, width, channels = pixels.shape
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    rows = [bytes([0]) + row.tobytes() for row in pixels]
    for number, filtered in enumerate(filters):
        rows[number] = bytes([filtered]) + rows[number][1:]
    data = zlib.compress(b"".join(rows), level)
    size = -(-len(data) // parts)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    body = b"".join(chunk(b"IDAT", piece) for piece in pieces)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + chunk(b"IEND", b"")


def without_pillow(*_: object) -> None:
    pytest.fail("Pillow was asked")


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("level", [0, 9])
def test_rows_without_filters_are_read_without_pillow(
    channels: int, level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = RNG.integers(0, 256, (4, 5, 7, channels), dtype=np.uint8)
    blobs = [("here", png(image, level=level)) for image in pixels]
    monkeypatch.setattr(pools, "opened", without_pillow)
    assert np.array_equal(decode(blobs, 4, (channels, 5, 7)), pixels)


def as_pillow_reads(blob: bytes, shape: tuple[int, int, int]) -> bytes | str:
    """The pixels of an image, or what is wrong with it."""
    try:
        return decode([("here", blob)], 1, shape).tobytes()
    except UsageError as error:
        return str(error)


@pytest.mark.parametrize("channels", [1, 3])
def test_whatever_else_an_image_is_pillow_has_its_say(
    channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = RNG.integers(0, 256, (3, 4, channels), dtype=np.uint8)
    blob = png(pixels)
    others = [png(pixels, [filtered]) for filtered in (1, 2, 3, 4, 9)]
    others += [png(pixels, parts=2), blob + b"more", blob[:-1], blob[:50], blob[:8], b""]
    others += [png(pixels[:2]), png(np.repeat(pixels[..., :1], 4 - channels, axis=2))]
    # one byte is another: of the signature, a length, a type, the data or a check sum
    for place in range(len(blob)):
        for bits in (1, 0x20, 0xFF):
            damaged = bytearray(blob)
            damaged[place] ^= bits
            others.append(bytes(damaged))
    shape = (channels, 3, 4)
    found = [as_pillow_reads(other, shape) for other in others]
    monkeypatch.setattr(pools, "_unfiltered_rows", lambda *_: None)
    assert found == [as_pillow_reads(other, shape) for other in others]
    assert as_pillow_reads(blob, shape) == pixels.tobytes()
    # a filter changes the pixels, and some damage is told of
    assert len(set(map(str, found))) > 5
