"""The dendrogram of a hierarchical clustering: its merges, their distances, and the cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from securecluster.figures.figure import figure_of, long, mark_true_clusters, tick_names
from securecluster.figures.looks import look_of

NAMED = 200  # leaves; with more, their names would not be readable
UPRIGHT = 30  # leaves; with more, their names are turned so that they do not overlap
ACROSS = "0.45"  # grey of merges of different clusters
LEAF_SPACING = 10  # scipy puts leaf k at x = 5 + 10 k
FIRST_LEAF = 5


def dendrogram(
    linkage: Any,
    labels: Sequence[int],
    distance: str = "distance",
    compared: str = "clients' updates",
    names: Sequence[str] | None = None,
    axes: Any = None,
    truth: Sequence[Any] | None = None,
) -> Any:
    """Return a figure of the merges, coloured by cluster, with the cut as a line.

    Args:
        linkage: the server's record of the clustering of r clients: `ids` of the leaves (r,),
            `merges`, scipy's linkage matrix (r − 1, 4), and `threshold`, the distance of the cut.
        labels: each client's cluster, (m,).
        distance: label of the vertical axis.
        compared: the merged quantity, as the title names it.
        names: of the clients, (m,); None is their positions.
        axes: matplotlib axes to draw on; None for a new figure.
        truth: each client's true cluster, (m,), which marks at the top show.
    """
    from scipy.cluster.hierarchy import dendrogram as scipy_dendrogram

    merges = linkage.merges.numpy()
    leaf_labels = [labels[client] for client in linkage.ids]
    colours = _node_colours(merges, leaf_labels)
    # scipy computes the layout only: its own drawing needs pyplot, which keeps global state
    layout = scipy_dendrogram(merges, no_plot=True, link_color_func=colours.__getitem__)
    leaves = [linkage.ids[position] for position in layout["leaves"]]

    width = 1.2 + 0.12 * len(leaves)  # inches
    width = min(16.0, max(6.4, width))
    picture, axes = figure_of(axes, width, 4.6)
    _draw_links(axes, layout)
    highest_merge = float(merges[:, 2].max())
    _mark_cut(axes, float(linkage.threshold), highest_merge)
    _name_leaves(axes, leaves, labels, names)
    label = "client, coloured by found cluster"
    if truth is not None:
        places = FIRST_LEAF + LEAF_SPACING * np.arange(len(leaves))
        mark_true_clusters(axes, leaves, truth, places.tolist(), "top")
        label = f"{label} (marks at the top: true clusters)"
    # above the marks
    axes.set_title(_title(leaves, labels, compared), pad=6 if truth is None else 14)
    axes.set(xlabel=label, ylabel=distance)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="best", fontsize=8, framealpha=0.8)
    return picture


def _title(leaves: Sequence[int], labels: Sequence[int], compared: str) -> str:
    # clusters among the leaves: clients that were not clustered have labels too
    cluster_count = len({labels[client] for client in leaves})
    title = f"merges of {len(leaves)} {compared}, cut into {cluster_count} cluster"
    if cluster_count > 1:
        title += "s"
    return title


def _draw_links(axes: Any, layout: dict[str, Any]) -> None:
    """Draw each merge as the bracket that scipy's layout gives.

    Args:
        axes: matplotlib axes.
        layout: result of scipy's `dendrogram`: for each of the r − 1 merges four x (`icoord`),
            four y (`dcoord`) and a colour (`color_list`).
    """
    all_x = layout["icoord"]
    all_y = layout["dcoord"]
    for x, y, colour in zip(all_x, all_y, layout["color_list"], strict=True):
        axes.plot(x, y, color=colour, linewidth=1.1, solid_joinstyle="miter")


def _node_colours(merges: Any, leaf_labels: Sequence[int]) -> dict[int, str]:
    """Return the colour of each node by its number.

    A node has the colour of its cluster, or grey where it joins several clusters.

    Args:
        merges: scipy's linkage matrix (r − 1, 4); the first two columns number the merged nodes.
        leaf_labels: cluster of each leaf, (r,).
    """
    clusters_below: dict[int, set[int]] = {}
    for leaf, label in enumerate(leaf_labels):
        clusters_below[leaf] = {label}
    # scipy numbers the merges after the leaves
    first_merge = len(leaf_labels)
    for node, merge in enumerate(merges, first_merge):
        first_child = int(merge[0])
        second_child = int(merge[1])
        clusters_below[node] = clusters_below[first_child] | clusters_below[second_child]

    colours = dict.fromkeys(clusters_below, ACROSS)
    for node, clusters in clusters_below.items():
        if len(clusters) == 1:
            (cluster,) = clusters
            colours[node] = look_of(cluster).color
    return colours


def _mark_cut(axes: Any, cut: float, highest_merge: float) -> None:
    """Draw a dashed line at the cut, and set the range of the vertical axis.

    Args:
        axes: matplotlib axes.
        cut: the distance at which the tree is cut.
        highest_merge: the largest distance of a merge.
    """
    style = {"color": "black", "linestyle": "--", "linewidth": 1}
    # a line far above all merges would press them onto the horizontal axis: the legend names it
    in_range = cut <= 1.3 * highest_merge
    # where all updates are identical, every merge is at 0 and every cut far above them
    if in_range or highest_merge == 0:
        axes.axhline(cut, label=f"cut at {cut:.4g}", **style)
    else:
        axes.plot([], [], label=f"cut above all merges, at {cut:.4g}", **style)

    top = highest_merge
    if in_range:
        top = max(highest_merge, cut)
    height = 1.05 * max(top, 0)
    # matplotlib warns of an axis without height
    axes.set_ylim(0, height or 1.0)


def _name_leaves(
    axes: Any, leaves: Sequence[int], labels: Sequence[int], names: Sequence[str] | None
) -> None:
    """Write clients' names under the leaves, in their clusters' colours.

    Args:
        axes: matplotlib axes.
        leaves: positions of clients from left to right, (r,).
        labels: each client's cluster, (m,).
        names: of the clients, (m,); None is their positions.
    """
    axes.set_xlim(0, LEAF_SPACING * len(leaves))
    if len(leaves) > NAMED:
        axes.set_xticks([])
        return
    ticks = FIRST_LEAF + LEAF_SPACING * np.arange(len(leaves))
    marks = tick_names(leaves, names)
    rotation = 0
    if len(leaves) > UPRIGHT or long(marks):
        rotation = 90
    font_size = 620 / len(leaves)  # points
    font_size = min(8.0, max(4.0, font_size))
    axes.set_xticks(ticks, marks, rotation=rotation, fontsize=font_size, parse_math=False)
    for text, client in zip(axes.get_xticklabels(), leaves, strict=True):
        text.set_color(look_of(labels[client]).color)
    axes.tick_params(axis="x", length=0)
