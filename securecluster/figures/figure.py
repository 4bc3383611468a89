"""Figures: an empty one, one saved as a file, and all those of a folder."""

from __future__ import annotations

import io
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from securecluster.core import atomic_files
from securecluster.core.number_format import printable
from securecluster.errors import SecureClusterWarning

Drawing = Callable[[], Any]  # returns a figure, or None where there is nothing to show

WIDEST = 14  # letters of a client's name at an axis
DPI = 120  # of a file
PIXELS = 800  # least width of a file
COLUMN = 3.4  # inches, of a paper in two columns
COLUMN_TEXT = 8  # points
LETTERS_PER_INCH = 17.0  # of texts of this size
UPRIGHT_LETTERS = 3  # of names that stand side by side at a horizontal axis


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
    _load_matplotlib()
    # not pyplot: it keeps every figure in global state until it is closed
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(picture)  # whatever backend the session or the environment has
    axes = picture.subplots(rows, columns, sharex=share and rows > 1)
    return picture, axes


def figure_of(axes: Any, width: float, height: float) -> tuple[Any, Any]:
    """Return the figure of given axes, or a new figure and its axes.

    Args:
        axes: matplotlib axes to draw on; None for new ones.
        width: of a new figure, in inches.
        height: of a new figure, in inches.
    """
    if axes is None:
        return figure(width, height)
    return axes.figure, axes


@contextmanager
def in_column() -> Iterator[None]:
    """Draw with letters that can be read where a figure of `COLUMN` width is printed as it is."""
    _load_matplotlib()
    from matplotlib import rc_context

    with rc_context({"font.size": COLUMN_TEXT, "axes.titlesize": COLUMN_TEXT}):
        yield


def titled(picture: Any, title: str) -> None:
    """Put a title above a figure, in as many lines as its width needs.

    Args:
        picture: a matplotlib figure.
        title: of the figure.
    """
    letters = int(LETTERS_PER_INCH * picture.get_figwidth())
    lines = [textwrap.fill(line, letters) for line in title.splitlines()]
    picture.suptitle("\n".join(lines), fontsize=COLUMN_TEXT)


def tick_names(clients: Sequence[int], names: Sequence[str] | None) -> list[str]:
    """Return what clients are called at an axis; names of any length are cut.

    Args:
        clients: their positions.
        names: of all clients; None is their positions.
    """
    if names is None:
        return [str(client) for client in clients]
    texts = []
    for client in clients:
        text = printable(names[client])
        if len(text) > WIDEST:
            text = f"{text[: WIDEST - 1]}…"
        texts.append(text)
    return texts


def long(texts: Sequence[str]) -> bool:
    """Return whether texts at a horizontal axis would overlap if they were upright."""
    return max(map(len, texts), default=0) > UPRIGHT_LETTERS


def mark_true_clusters(
    axes: Any, clients: Sequence[int], truth: Sequence[Any], places: Sequence[float], side: str
) -> None:
    """Draw a mark for each client in colour and shape of its true cluster, beside an axis.

    Args:
        axes: matplotlib axes.
        clients: in their order along the axis.
        truth: true cluster of every client, (m,).
        places: of the clients along the axis.
        side: "right" of a vertical axis, or the "top" of a horizontal one.
    """
    from securecluster.figures.looks import look_of

    size = min(18.0, 2400 / max(1, len(clients)) ** 1.3)
    for number, group in enumerate(sorted(set(truth))):
        along = [at for at, client in zip(places, clients, strict=True) if truth[client] == group]
        outside = [1.02] * len(along)
        look = look_of(number)
        style = {"s": size, "marker": look.marker, "clip_on": False, "linewidths": 0, "zorder": 4}
        if side == "right":
            transform = axes.get_yaxis_transform()
            axes.scatter(outside, along, transform=transform, color=look.color, **style)
        else:
            transform = axes.get_xaxis_transform()
            axes.scatter(along, outside, transform=transform, color=look.color, **style)


def _load_matplotlib() -> None:
    """Import matplotlib, whatever backend the environment names: these figures need none."""
    if "matplotlib" in sys.modules:
        return
    # no warning about a cache folder that cannot be written
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib
    except ValueError:
        # MPLBACKEND is no backend that matplotlib knows: half of its modules are loaded now
        for name in [name for name in sys.modules if name.startswith("matplotlib.")]:
            del sys.modules[name]
        backend = os.environ.pop("MPLBACKEND", "")
        try:
            import matplotlib  # noqa: F401
        finally:
            os.environ["MPLBACKEND"] = backend


def save(path: Path, picture: Any) -> Path:
    """Write a figure as PNG and return its path.

    Args:
        path: of the file, which appears whole or not at all.
        picture: a matplotlib figure.

    Raises:
        RunFolderError: the file cannot be written.
    """
    from matplotlib.image import imsave

    # not savefig: it goes through the drawing twice, for the same pixels
    dots = max(DPI, PIXELS / picture.get_figwidth())
    picture.set_dpi(dots)
    picture.canvas.draw()
    buffer = io.BytesIO()
    imsave(buffer, picture.canvas.buffer_rgba(), format="png", dpi=dots)
    atomic_files.write_atomic(path, buffer.getvalue())
    return path


def save_all(folder: Path, drawings: Mapping[str, Drawing], missing: bool = False) -> list[Path]:
    """Draw figures and write them, and return the paths of their files.

    One that cannot be drawn or written is a warning.

    Args:
        folder: of the files.
        drawings: by file name.
        missing: draw those that have no file yet.
    """
    paths = []
    for name, drawing in drawings.items():
        path = folder / name
        if missing and path.is_file():
            paths.append(path)
            continue
        with optional(path):
            picture = drawing()
            if picture is not None:
                paths.append(save(path, picture))
    return paths


@contextmanager
def optional(path: Path) -> Iterator[None]:
    """Turn any error within the context into a warning that a picture is missing.

    Args:
        path: of the picture, whose numbers are on the disk already.
    """
    try:
        yield
    except Exception as error:
        # the first line: some of matplotlib's reasons are long
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        warnings.warn(
            f"{path} was not drawn ({reason}): the numbers are complete without it, and resume "
            "tries again",
            SecureClusterWarning,
            stacklevel=3,
        )
