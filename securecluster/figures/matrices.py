"""Matrices over pairs of clients, ordered by computed cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.figures.figure import figure, figure_of, long, mark_true_clusters, tick_names
from securecluster.figures.looks import Look, look_of

NAMED = 40  # clients; with more, their names would not be readable
UPRIGHT = 25  # clients; with more, their names are turned so that they do not overlap
Matrix = NDArray[np.float64]


TRUE = "marks at the right: true clusters"


def similarity(
    alpha: Matrix,
    labels: Sequence[int],
    names: Sequence[str] | None = None,
    axes: Any = None,
    truth: Sequence[Any] | None = None,
) -> Any:
    """Return a figure of the cosines between updates.

    Args:
        alpha: cosine similarity of every two clients' updates, (m, m).
        labels: each client's cluster, (m,).
        names: of the clients, (m,); None is their positions.
        axes: matplotlib axes to draw on; None for a new figure.
        truth: each client's true cluster, (m,), which marks at the right show.
    """
    picture, axes = figure_of(axes, 5.4, 4.6)
    cosines = _off_diagonal(alpha)
    # the scale is symmetric, so that white is a cosine of 0
    largest = float(np.nanmax(np.abs(cosines)))
    limit = max(0.05, largest)
    colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -limit, "vmax": limit}
    image = _draw_matrix(axes, cosines, labels, names=names, truth=truth, **colours)
    axes.set(title="cosine of updates under one shared model")
    picture.colorbar(image, ax=axes, label="cosine")
    return picture


def relevance(
    between: Matrix,
    labels: Sequence[int],
    ids: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    axes: Any = None,
    truth: Sequence[Any] | None = None,
) -> Any:
    """Return a figure of the relevance of clients' data to each other.

    Relevance lies between 0 and 1 (Ali & Arafa 2024, eq. 5).

    Args:
        between: relevance of each client's data to each other client's, (r, r).
        labels: each client's cluster, (m,).
        ids: the r clients of the matrix; None is all clients.
        names: of the clients, (m,); None is their positions.
        axes: matplotlib axes to draw on; None for a new figure.
        truth: each client's true cluster, (m,), which marks at the right show.
    """
    picture, axes = figure_of(axes, 5.4, 4.6)
    values = _off_diagonal(between)
    colours: dict[str, Any] = {"cmap": "viridis", "vmin": 0, "vmax": 1}
    image = _draw_matrix(axes, values, labels, ids, names, truth, **colours)
    axes.set(title="relevance of clients' data to each other")
    picture.colorbar(image, ax=axes, label="R")
    return picture


def graph(
    record: Any,
    labels: Sequence[int],
    names: Sequence[str] | None = None,
    truth: Sequence[Any] | None = None,
) -> Any:
    """Return a figure of the first graph of clients.

    The left half shows the edges of the minimum spanning tree and the threshold, the right half
    all distances.

    Args:
        record: the server's record of the graph of r clients: `edges` of the minimum spanning
            tree, ascending (r − 1,), `threshold` λ, up to which clients are joined, and `distance`
            (r, r); also `ids`, the clients' numbers, where not all clients are in the graph.
        labels: each client's cluster at the end, (m,).
        names: of the clients, (m,); None is their positions.
        truth: each client's true cluster, (m,), which marks at the right show.
    """
    picture, (tree_axes, matrix_axes) = figure(9.6, 4.4, columns=2)
    _draw_edges(tree_axes, record.edges.numpy(), float(record.threshold))
    distance = _off_diagonal(record.distance.numpy())
    ids = getattr(record, "ids", None)
    image = _draw_matrix(matrix_axes, distance, labels, ids, names, truth, cmap="viridis")
    matrix_axes.set(title="all distances")
    picture.colorbar(image, ax=matrix_axes, label="distance")
    return picture


def _draw_edges(axes: Any, edges: Matrix, threshold: float) -> None:
    """Draw the edges of a spanning tree, and the threshold.

    Args:
        axes: matplotlib axes.
        edges: lengths, ascending, (r − 1,).
        threshold: λ; shorter edges join clients.
    """
    joined = edges <= threshold
    _draw_edge_points(axes, edges, joined, look_of(0), "joined")
    _draw_edge_points(axes, edges, ~joined, look_of(1), "left apart")
    axes.axhline(
        threshold, color="black", linestyle="--", linewidth=1, label=f"λ = {threshold:.4g}"
    )
    axes.set(
        title="edges of the minimum spanning tree",
        xlabel="edge, the shortest first",
        ylabel="distance of one-shot models",
    )
    longest = float(edges.max(initial=0))
    height = 1.05 * max(threshold, longest)
    # matplotlib warns of an axis without height
    axes.set_ylim(0, height or 1.0)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.legend(loc="best", fontsize=8)


def _draw_edge_points(
    axes: Any, edges: Matrix, selected: NDArray[np.bool_], look: Look, label: str
) -> None:
    """Draw the selected edges at their ranks, counted from 1; nothing where there are none."""
    if not selected.any():
        return
    ranks = 1 + np.flatnonzero(selected)
    style = {"color": look.color, "marker": look.marker, "markersize": 4, "linestyle": "none"}
    axes.plot(ranks, edges[selected], label=label, **style)


def _off_diagonal(matrix: Matrix) -> Matrix:
    """Return a copy with an empty diagonal, whose constant values would fix the colour scale."""
    values = matrix.copy()
    np.fill_diagonal(values, np.nan)
    return values


def _draw_matrix(
    axes: Any,
    matrix: Matrix,
    labels: Sequence[int],
    ids: Sequence[int] | None = None,
    names: Sequence[str] | None = None,
    truth: Sequence[Any] | None = None,
    **colours: Any,
) -> Any:
    """Draw a matrix with the clients of a cluster side by side, and lines between clusters.

    Within one, clients of a true cluster stand side by side, so that one that holds several true
    clusters shows them as blocks.

    Args:
        axes: matplotlib axes.
        matrix: a row and a column for each of the clients `ids`, (r, r).
        labels: each client's cluster, (m,).
        ids: the r clients of the matrix; None is all clients.
        names: of the clients, (m,); None is their positions.
        truth: each client's true cluster, (m,); None where it is not known.
        colours: colour options of `imshow`.

    Returns:
        The image, for a colour bar.
    """
    if ids is None:
        ids = range(len(labels))
    clusters = np.array([labels[client] for client in ids])
    true = [0 if truth is None else truth[client] for client in ids]
    # within a found cluster clients stand by true cluster, and then by number
    order = np.lexsort((np.array(true), clusters))
    ordered = matrix[np.ix_(order, order)]
    image = axes.imshow(ordered, **colours)

    label_changes = np.diff(clusters[order])
    for start in 1 + np.flatnonzero(label_changes):
        # cells are centred on whole numbers, so their borders lie between
        axes.axhline(start - 0.5, color="black", linewidth=1)
        axes.axvline(start - 0.5, color="black", linewidth=1)

    marks: list[str] = []
    if len(ids) <= NAMED:
        marks = tick_names([ids[position] for position in order], names)
    ticks = range(len(marks))
    rotation = 0
    if len(ids) > UPRIGHT or long(marks):
        rotation = 90
    axes.set_xticks(ticks, marks, fontsize=6, rotation=rotation, parse_math=False)
    axes.set_yticks(ticks, marks, fontsize=6, parse_math=False)
    label = "client, by found cluster"
    if truth is not None:
        shown = [ids[position] for position in order]
        mark_true_clusters(axes, shown, truth, range(len(shown)), "right")
        label = f"{label} ({TRUE})"
    axes.set(xlabel=label, ylabel="client")
    return image
