"""Figures: an empty one, and one saved as a file."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """Return a figure of `width` × `height` inches that no global state knows of, and its axes."""
    # no warning about a cache folder that cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    return picture, picture.subplots(rows, columns, sharex=rows > 1)


def save(path: Path, picture: Any) -> Path:
    """Write a figure as PNG, whole or not at all, and return its path."""
    buffer = io.BytesIO()
    picture.savefig(buffer, format="png", dpi=120)
    atomic_files.write_atomic(path, buffer.getvalue())
    return path
