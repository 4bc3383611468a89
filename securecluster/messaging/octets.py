"""Rows of bytes as tables of numbers, as messages hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from securecluster.core.lazy_torch import torch


def as_table(rows: Sequence[bytes], width: int) -> torch.Tensor:
    """Return rows of bytes as a table (r, width), uint8.

    Args:
        rows: rows of `width` bytes.
        width: bytes of a row, where there is none.
    """
    data = np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), width)
    return torch.as_tensor(data.copy())


def as_rows(table: torch.Tensor) -> list[bytes]:
    """Return the rows of a table as bytes.

    Args:
        table: bytes (r, width), uint8.
    """
    count, width = table.shape
    data = table.numpy().tobytes()
    return [data[k * width : (k + 1) * width] for k in range(count)]


def as_bytes(row: torch.Tensor) -> bytes:
    """Return a row of uint8 as bytes.

    Args:
        row: bytes (n,).
    """
    data: bytes = row.numpy().tobytes()
    return data
