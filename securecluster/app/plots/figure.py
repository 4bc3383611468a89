"""How a picture is begun and saved."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files


def figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure of `width` × `height` inches that no global state knows of, and its axes."""
    # no word on a cache folder that cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    return made, made.subplots(rows, columns, sharex=rows > 1)


def save(path: Path, made: Any) -> Path:
    """Write a figure as PNG, whole or not at all."""
    buffer = io.BytesIO()
    made.savefig(buffer, format="png", dpi=120)
    atomic_files.write_atomic(path, buffer.getvalue())
    return path
