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
    """A figure of the cosines (m, m) of updates."""
    made, axes = figure(5.4, 4.6)
    shown = _off_diagonal(alpha)
    limit = max(0.05, float(np.nanmax(np.abs(shown))))
    image = _show(axes, shown, labels, cmap="RdBu_r", vmin=-limit, vmax=limit)
    axes.set(title="cosine of updates under one shared model")
    made.colorbar(image, ax=axes, label="cosine")
    return made


def relevance(between: Matrix, labels: Sequence[int], ids: Sequence[int] | None = None) -> Any:
    """A figure of the relevance (r, r) of clients' data to each other, from 0 to 1 (Ali & Arafa
    2024, eq. 5).

    Args:
        labels: each client's cluster, (m,).
        ids: the r clients that the matrix is about; all without it.
    """
    made, axes = figure(5.4, 4.6)
    image = _show(axes, _off_diagonal(between), labels, ids, cmap="viridis", vmin=0, vmax=1)
    axes.set(title="relevance of clients' data to each other")
    made.colorbar(image, ax=axes, label="R")
    return made


def graph(look: Any, labels: Sequence[int]) -> Any:
    """A figure of the first graph of clients: its spanning tree's edges with the threshold, and all
    distances.

    Args:
        look: what the server kept of the graph: `edges` of the minimum spanning tree, ascending (m
            − 1,), `threshold` λ, up to which clients are joined, and `distance`; where not all
            clients are in it, their numbers, `ids`.
        labels: each client's cluster in the end, (m,).
    """
    made, (left, right) = figure(9.6, 4.4, columns=2)
    edges, at = look.edges.numpy(), float(look.threshold)
    for chosen, colour, word in ((edges <= at, "C0", "joined"), (edges > at, "C3", "left apart")):
        if chosen.any():
            left.plot(
                1 + np.flatnonzero(chosen),
                edges[chosen],
                color=colour,
                marker=".",
                linestyle="none",
                label=word,
            )
    left.axhline(at, color="black", linestyle="--", linewidth=1, label=f"λ = {at:.4g}")
    left.set(
        title="edges of the minimum spanning tree",
        xlabel="edge, the shortest first",
        ylabel="distance of one-shot models",
    )
    left.set_ylim(0, 1.05 * max(at, float(edges.max(initial=0))) or 1.0)
    left.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    left.legend(loc="best", fontsize=8)
    image = _show(
        right,
        _off_diagonal(look.distance.numpy()),
        labels,
        getattr(look, "ids", None),
        cmap="viridis",
    )
    right.set(title="all distances")
    made.colorbar(image, ax=right, label="distance")
    return made


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
    """The matrix (r, r) of the clients `ids`, all by default, with clusters side by side and lines
    between them.
    """
    ids = range(len(labels)) if ids is None else ids
    own = np.array([labels[i] for i in ids])
    order = np.argsort(own, kind="stable")
    image = axes.imshow(matrix[np.ix_(order, order)], **colours)
    for edge in 1 + np.flatnonzero(np.diff(own[order])):
        axes.axhline(edge - 0.5, color="black", linewidth=1)
        axes.axvline(edge - 0.5, color="black", linewidth=1)
    places, names = (
        (range(len(own)), [str(ids[k]) for k in order]) if len(own) <= NAMED else ([], [])
    )
    axes.set_xticks(places, names, fontsize=6, rotation=90 if len(own) > 25 else 0)
    axes.set_yticks(places, names, fontsize=6)
    axes.set(xlabel="client, by found cluster", ylabel="client")
    return image
