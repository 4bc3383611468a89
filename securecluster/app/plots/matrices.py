"""Matrices over pairs of clients, ordered by found cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.app.plots.figure import figure

NAMED = 40  # clients; with more, their numbers would not be readable
Matrix = NDArray[np.float64]


def similarity(alpha: Matrix, labels: Sequence[int]) -> Any:
    """Return a figure of the cosines (m, m) of updates."""
    picture, axes = figure(5.4, 4.6)
    shown = _off_diagonal(alpha)
    limit = max(0.05, float(np.nanmax(np.abs(shown))))
    image = _show(axes, shown, labels, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set(title="cosine of updates under one shared model")
    picture.colorbar(image, ax=axes, label="cosine")
    return picture


def relevance(between: Matrix, labels: Sequence[int], ids: Sequence[int] | None = None) -> Any:
    """Return a figure of the relevance (r, r) of clients' data to each other.

    It lies between 0 and 1 (Ali & Arafa 2024, eq. 5).

    Args:
        between: the relevance of each client's data to each other's.
        labels: each client's cluster, (m,).
        ids: the r clients that the matrix is about; all without it.
    """
    picture, axes = figure(5.4, 4.6)
    image = _show(axes, _off_diagonal(between), labels, ids, cmap="viridis", vmin=0, vmax=1)
    axes.set(title="relevance of clients' data to each other")
    picture.colorbar(image, ax=axes, label="R")
    return picture


def graph(record: Any, labels: Sequence[int]) -> Any:
    """Return a figure of the first graph of clients.

    Its left half has the edges of the spanning tree and the threshold, its right half all
    distances.

    Args:
        look: what the server kept of the graph: `edges` of the minimum spanning tree, ascending (m
            − 1,), `threshold` λ, up to which clients are joined, and `distance`; where not all
            clients are in it, their numbers, `ids`.
        labels: each client's cluster in the end, (m,).
    """
    picture, (left, right) = figure(9.6, 4.4, columns=2)
    _draw_edges(left, record.edges.numpy(), float(record.threshold))
    distance = _off_diagonal(record.distance.numpy())
    image = _show(right, distance, labels, getattr(record, "ids", None), cmap="viridis")
    right.set(title="all distances")
    picture.colorbar(image, ax=right, label="distance")
    return picture


def _draw_edges(axes: Any, edges: Matrix, threshold: float) -> None:
    """Draw the ascending edges (m − 1,) of a spanning tree, and the threshold."""
    sides = (
        (edges <= threshold, "C0", "joined"),
        (edges > threshold, "C3", "left apart"),
    )
    for chosen, colour, label in sides:
        if chosen.any():
            numbers = 1 + np.flatnonzero(chosen)
            style = {"color": colour, "marker": ".", "linestyle": "none"}
            axes.plot(numbers, edges[chosen], label=label, **style)
    label = f"λ = {threshold:.4g}"
    axes.axhline(threshold, color="black", linestyle="--", linewidth=1, label=label)
    axes.set(
        title="edges of the minimum spanning tree",
        xlabel="edge, the shortest first",
        ylabel="distance of one-shot models",
    )
    longest = float(edges.max(initial=0))
    axes.set_ylim(0, 1.05 * max(threshold, longest) or 1.0)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.legend(loc="best", fontsize=8)


def _off_diagonal(matrix: Matrix) -> Matrix:
    shown = matrix.copy()
    np.fill_diagonal(shown, np.nan)
    return shown


def _show(
    axes: Any,
    matrix: Matrix,
    labels: Sequence[int],
    ids: Sequence[int] | None = None,
    **colours: Any,
) -> Any:
    """Draw a matrix (r, r) with clusters side by side and lines between them.

    Args:
        axes: to draw into.
        matrix: a row and a column for each of the clients `ids`.
        labels: each client's cluster, (m,).
        ids: the r clients that the matrix is about; None is all of them.
        colours: as `imshow` takes them.
    """
    ids = range(len(labels)) if ids is None else ids
    clusters = np.array([labels[i] for i in ids])
    order = np.argsort(clusters, kind="stable")
    image = axes.imshow(matrix[np.ix_(order, order)], **colours)
    for first in 1 + np.flatnonzero(np.diff(clusters[order])):
        axes.axhline(first - 0.5, color="black", linewidth=1)
        axes.axvline(first - 0.5, color="black", linewidth=1)
    names: list[str] = []
    if len(ids) <= NAMED:
        names = [str(ids[k]) for k in order]
    places = range(len(names))
    axes.set_xticks(places, names, fontsize=6, rotation=90 if len(ids) > 25 else 0)
    axes.set_yticks(places, names, fontsize=6)
    axes.set(xlabel="client, by found cluster", ylabel="client")
    return image
