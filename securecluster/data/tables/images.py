"""Columns of encoded images, whose depth and colours are kept, or refused by what they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.pools import decode, encoded, floats, opened
from securecluster.data.tables.parts import Table
from securecluster.errors import UsageError

GREYS, COLOURS, SIXTEEN, FLOATS = "8 bits of grey", "8 bits a colour", "16 bits", "floats"
KINDS = {"1": GREYS, "L": GREYS, "LA": GREYS}  # of Pillow's modes
KINDS |= dict.fromkeys(("RGB", "RGBA", "P", "PA"), COLOURS)
KINDS |= dict.fromkeys(("I", "I;16", "I;16B", "I;16L"), SIXTEEN) | {"F": FLOATS}
MOST = 65535  # of 16 bits
SAMPLE_BITS = 258  # tag of TIFF


def images(table: Table, name: str) -> NDArray[np.float32]:
    """Return a column of encoded images (n, channels, height, width).

    Images of 8 bits are in [0, 1], grey or, where one of them has colours, in colour; those of 16
    bits are in [0, 1], too, and floats as they are.

    Args:
        table: whose rows are read.
        name: of the column.

    Raises:
        UsageError: images that cannot be decoded, or lose something, or differ in size or depth.
    """
    cells = table.column(name)
    if cells.null_count:
        raise UsageError(
            f"column {name!r} of {table.title} has {cells.null_count} empty cells (null): fill or "
            "drop these rows"
        )
    blobs = []
    for number, blob in enumerate(encoded(cells, table.title)):
        blobs.append((f"image {number} of {table.title}", blob))
    first = opened(*blobs[0])
    kinds = [_kind(location, blob) for location, blob in blobs]
    deep = kinds[0] in (SIXTEEN, FLOATS)
    for (location, _), kind in zip(blobs, kinds, strict=True):
        if kind != kinds[0] and (deep or kind in (SIXTEEN, FLOATS)):
            raise UsageError(f"{location} has {kind}, the first one {kinds[0]}: use one depth")
    channels = 3 if COLOURS in kinds else 1
    if not deep:
        pixels = decode(blobs, len(blobs), (channels, first.height, first.width))
        return floats(pixels, np.arange(len(blobs)))
    planes = np.empty((len(blobs), 1, first.height, first.width), np.float32)
    for plane, (location, blob) in zip(planes, blobs, strict=True):
        image = opened(location, blob)
        if image.size != first.size:
            raise UsageError(f"{location} has another size than the first one: use one size")
        plane[0] = np.asarray(image, np.float64) / (MOST if kinds[0] == SIXTEEN else 1)
    return planes


def _kind(location: str, blob: bytes | None) -> str:
    """Return what the pixels of an image are.

    Args:
        location: of the image, for errors.
        blob: the encoded image.

    Raises:
        UsageError: pixels of which a part would be lost.
    """
    image = opened(location, blob, load=False)
    kind = KINDS.get(image.mode)
    bits = _bits(image, blob or b"")
    lost = None
    if getattr(image, "n_frames", 1) > 1:
        lost = f"{image.n_frames} images in one"
    elif kind is None:
        lost = f"pixels of mode {image.mode}"
    elif bits > 8 and kind in (GREYS, COLOURS):
        lost = f"{bits} bits a colour"
    elif image.mode.endswith("A") or "transparency" in image.info:
        alpha = opened(location, blob).convert("RGBA").getchannel("A")
        lost = "transparent pixels" if alpha.getextrema()[0] < 255 else None
    if lost is not None:
        raise UsageError(
            f"{location} has {lost}, which would be lost: write it as grey, or as RGB of 8 bits"
        )
    return str(kind)


def _bits(image: Any, blob: bytes) -> int:
    """Return the bits of a channel as the file says, which Pillow's modes do not.

    Args:
        image: that Pillow made of it.
        blob: the encoded image.
    """
    if image.format == "PNG":
        return blob[24]  # in the header (W3C, Portable Network Graphics, 2003, section 11.2.2)
    tags = getattr(image, "tag_v2", {})  # of TIFF
    return int(max(tags.get(SAMPLE_BITS, (8,))))
