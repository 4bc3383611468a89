"""Figures: an empty one, and one saved as a file."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files


def figure(
    width: float, height: float, rows: int = 1, columns: int = 1, share: bool = True
) -> tuple[Any, Any]:
    """Return a new figure and its axes.

    Args:
        width: in inches.
        height: in inches.
        rows: rows of axes.
        columns: columns of axes.
        share: whether rows share their horizontal axis.
    """
    # no warning about a cache folder that cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    # not pyplot: it keeps every figure in global state until it is closed
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    axes = picture.subplots(rows, columns, sharex=share and rows > 1)
    return picture, axes


def save(path: Path, picture: Any) -> Path:
    """Write a figure as PNG and return its path.

    Args:
        path: of the file, which appears whole or not at all.
        picture: a matplotlib figure.

    Raises:
        RunFolderError: the file cannot be written.
    """
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=120)
    atomic_files.write_atomic(path, buffer.getvalue())
    return path
