"""The dendrogram of a hierarchical clustering: its merges, their distances, and the cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NAMED = 200  # leaves; with more, their numbers would not be readable
ACROSS = "0.45"  # grey of merges of different clusters


def dendrogram(
    linkage: Any,
    labels: Sequence[int],
    distance: str = "distance",
    compared: str = "clients' updates",
) -> Any:
    """Return a figure of the merges, coloured by cluster, with the cut as a line.

    Args:
        look: what the server kept of the clustering: `ids` of the leaves, `merges` (scipy's linkage
            matrix), `threshold`.
        labels: each client's cluster, (m,).
        distance: names the vertical axis.
        compared: what the title says was merged.
    """
    from matplotlib.figure import Figure
    from scipy.cluster.hierarchy import dendrogram as arrange

    merges = linkage.merges.numpy()
    colours = _colours(merges, [labels[i] for i in linkage.ids])
    tree = arrange(merges, no_plot=True, link_color_func=colours.__getitem__)
    leaves = [linkage.ids[k] for k in tree["leaves"]]
    width = min(16.0, max(6.4, 1.2 + 0.12 * len(leaves)))
    picture = Figure(figsize=(width, 4.6), layout="constrained")
    axes = picture.subplots()
    for x, y, colour in zip(tree["icoord"], tree["dcoord"], tree["color_list"], strict=True):
        axes.plot(x, y, color=colour, linewidth=1.1, solid_joinstyle="miter")
    _mark_cut(axes, float(linkage.threshold), float(merges[:, 2].max()))
    _name_leaves(axes, leaves, labels)
    count = len({labels[i] for i in leaves})
    plural = "s" if count > 1 else ""
    title = f"merges of {len(leaves)} {compared}, cut into {count} cluster{plural}"
    axes.set(title=title, xlabel="client, coloured by cluster", ylabel=distance)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="best", fontsize=8, framealpha=0.8)
    return picture


def _colours(merges: Any, labels: Sequence[int]) -> dict[int, str]:
    """Return the colour of each node by its number.

    It is that of the node's cluster, or grey where the node joins several.
    """
    clusters_in: dict[int, set[int]] = {leaf: {label} for leaf, label in enumerate(labels)}
    # scipy numbers the merges after the leaves
    for node, (one, other, *_) in enumerate(merges, len(labels)):
        clusters_in[node] = clusters_in[int(one)] | clusters_in[int(other)]
    colours = dict.fromkeys(clusters_in, ACROSS)
    for node, clusters in clusters_in.items():
        if len(clusters) == 1:
            colours[node] = _colour(min(clusters))
    return colours


def _colour(cluster: int) -> str:
    """Return one of nine hues, which repeat where there are more clusters.

    The hue that matplotlib has beside these is the grey of merges across clusters.
    """
    hues = (0, 1, 2, 3, 4, 5, 6, 8, 9)
    return f"C{hues[cluster % len(hues)]}"


def _mark_cut(axes: Any, cut: float, top: float) -> None:
    """Draw a dashed line at the cut, or only name it where it lies far above all merges."""
    style = {"color": "black", "linestyle": "--", "linewidth": 1}
    near = cut <= 1.3 * top
    if near or top == 0:
        axes.axhline(cut, label=f"cut at {cut:.4g}", **style)
    else:
        axes.plot([], [], label=f"cut above all merges, at {cut:.4g}", **style)
    highest = max(top, cut) if near else top
    axes.set_ylim(0, 1.05 * max(highest, 0) or 1.0)


def _name_leaves(axes: Any, leaves: Sequence[int], labels: Sequence[int]) -> None:
    """Write client numbers under the leaves, in their clusters' colours."""
    axes.set_xlim(0, 10 * len(leaves))
    if len(leaves) > NAMED:
        axes.set_xticks([])
        return
    places = 5 + 10 * np.arange(len(leaves))  # as scipy spaces the leaves
    names = [str(i) for i in leaves]
    rotation = 90 if len(leaves) > 30 else 0
    size = min(8.0, max(4.0, 620 / len(leaves)))
    axes.set_xticks(places, names, rotation=rotation, fontsize=size)
    for text, i in zip(axes.get_xticklabels(), leaves, strict=True):
        text.set_color(_colour(labels[i]))
    axes.tick_params(axis="x", length=0)
