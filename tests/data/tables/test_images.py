"""Columns of images: depth and colours are kept, or refused by what they are."""

from __future__ import annotations

import io
import zlib
from typing import Any

import numpy as np
import pytest

from securecluster import Federation
from securecluster.errors import UsageError

pa = pytest.importorskip("pyarrow")
Image = pytest.importorskip("PIL.Image")

N = 12


def coded(image: Any, form: str = "PNG", **more: Any) -> bytes:
    image.save(out := io.BytesIO(), form, **more)
    return out.getvalue()


def federation(blobs: list[bytes]) -> Federation:
    columns = {"site": [k % 2 for k in range(N)], "label": [k // 2 % 2 for k in range(N)]}
    table = pa.table({**columns, "x": pa.array(blobs, pa.binary())})
    return Federation.from_frame(table, client="site", label="label", seed=0)


def values(made: Federation) -> set[float]:
    return {float(v) for s in made.shards for x in (s.x, s.x_test) for v in np.unique(x)}


def test_sixteen_bits_and_floats_are_kept() -> None:
    deep = [Image.fromarray(np.full((2, 3), 1000 * k, np.uint16)) for k in range(N)]
    made = federation([coded(image) for image in deep])
    assert made.shape == (1, 2, 3)
    assert values(made) == {float(np.float32(1000 * k / 65535)) for k in range(N)}
    floats = [Image.fromarray(np.full((2, 3), k / 8, np.float32)) for k in range(N)]
    assert values(federation([coded(image, "TIFF") for image in floats])) == {
        k / 8 for k in range(N)
    }


@pytest.mark.parametrize("first", ["L", "RGB", "P"])
def test_one_image_in_colour_makes_all_colours(first: str) -> None:
    images = [Image.new(first, (3, 2)), *[Image.new("RGB", (3, 2), (255, 0, 51))] * (N - 1)]
    made = federation([coded(image) for image in images])
    assert made.shape == (3, 2, 3) and values(made) == {0.0, 1.0, float(np.float32(0.2))}
    opaque = [Image.new("RGBA", (3, 2), (255, 0, 51, 255))] * N
    assert values(federation([coded(image) for image in opaque])) == values(made)


def png_of_48_bits() -> bytes:
    """A header is enough: pixels are refused before they are decoded."""
    eight = bytearray(coded(Image.new("RGB", (3, 2))))
    eight[24] = 16
    eight[29:33] = zlib.crc32(bytes(eight[12:29])).to_bytes(4, "big")
    return bytes(eight)


@pytest.mark.parametrize(
    ("blob", "lost"),
    [
        (coded(Image.new("RGBA", (3, 2), (9, 9, 9, 9))), "transparent pixels"),
        (coded(Image.new("CMYK", (3, 2)), "TIFF"), "pixels of mode CMYK"),
        (png_of_48_bits(), "16 bits a colour"),
        (
            coded(
                Image.new("L", (3, 2)),
                "TIFF",
                save_all=True,
                append_images=[Image.new("L", (3, 2))],
            ),
            "2 images in one",
        ),
    ],
    ids=["transparent", "CMYK", "48 bits", "pages"],
)
def test_what_would_be_lost_is_refused(blob: bytes, lost: str) -> None:
    with pytest.raises(UsageError, match=f"image 3 of the table has {lost}, which would be lost"):
        federation([*[coded(Image.new("L", (3, 2)))] * 3, blob, *[blob] * (N - 4)])


def test_depths_are_not_mixed() -> None:
    deep = coded(Image.fromarray(np.zeros((2, 3), np.uint16)))
    with pytest.raises(UsageError, match="image 1 of the table has 16 bits, the first one 8 bits"):
        federation([coded(Image.new("L", (3, 2))), *[deep] * (N - 1)])
    with pytest.raises(UsageError, match="image 1 of the table has 8 bits of grey, the first one"):
        federation([deep, *[coded(Image.new("L", (3, 2)))] * (N - 1)])
