"""The dendrogram of a hierarchical clustering: who was merged with whom, at what distance, and
where the tree was cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NAMED = 200  # leaves; with more, their numbers would not be readable
ACROSS = "0.45"  # grey of merges of different clusters


def dendrogram(
    look: Any, labels: Sequence[int], distance: str = "distance", compared: str = "clients' updates"
) -> Any:
    """A figure of the merges, coloured by cluster, with the cut as a line.

    Args:
        look: what the server kept of the clustering: `ids` of the leaves, `merges` (scipy's linkage
            matrix), `threshold`.
        labels: each client's cluster, (m,).
        distance: names the vertical axis.
        compared: what the title says was merged.
    """
    from matplotlib.figure import Figure
    from scipy.cluster.hierarchy import dendrogram as arrange

    merges = look.merges.numpy()
    colours = _colours(merges, [labels[i] for i in look.ids])
    tree = arrange(merges, no_plot=True, link_color_func=colours.__getitem__)
    leaves = [look.ids[k] for k in tree["leaves"]]
    figure = Figure(
        figsize=(min(16.0, max(6.4, 1.2 + 0.12 * len(leaves))), 4.6), layout="constrained"
    )
    axes = figure.subplots()
    for x, y, colour in zip(tree["icoord"], tree["dcoord"], tree["color_list"], strict=True):
        axes.plot(x, y, color=colour, linewidth=1.1, solid_joinstyle="miter")
    _mark_cut(axes, float(look.threshold), float(merges[:, 2].max()))
    _name_leaves(axes, leaves, labels)
    count = len({labels[i] for i in leaves})
    title = (
        f"merges of {len(leaves)} {compared}, cut into {count} cluster{'s' if count > 1 else ''}"
    )
    axes.set(title=title, xlabel="client, coloured by cluster", ylabel=distance)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.legend(loc="best", fontsize=8, framealpha=0.8)
    return figure


def _colours(merges: Any, labels: Sequence[int]) -> dict[int, str]:
    """The colour of each node by its number: its cluster's, or grey where it joins several."""
    m = len(labels)
    inside: dict[int, set[int]] = {k: {label} for k, label in enumerate(labels)}
    for n, (a, b, *_) in enumerate(merges):
        inside[m + n] = inside[int(a)] | inside[int(b)]
    return {
        node: _colour(min(found)) if len(found) == 1 else ACROSS for node, found in inside.items()
    }


def _colour(cluster: int) -> str:
    """Nine hues (matplotlib's tenth is the grey of merges across), repeated where there are more
    clusters.
    """
    return f"C{(0, 1, 2, 3, 4, 5, 6, 8, 9)[cluster % 9]}"


def _mark_cut(axes: Any, at: float, top: float) -> None:
    """A dashed line at the threshold, or a word where it lies far above all merges."""
    if at <= 1.3 * top or top == 0:
        axes.axhline(at, color="black", linestyle="--", linewidth=1, label=f"cut at {at:.4g}")
    else:
        axes.plot(
            [],
            [],
            color="black",
            linestyle="--",
            linewidth=1,
            label=f"cut above all merges, at {at:.4g}",
        )
    axes.set_ylim(0, 1.05 * max(top, at if at <= 1.3 * top else 0) or 1.0)


def _name_leaves(axes: Any, leaves: Sequence[int], labels: Sequence[int]) -> None:
    """Client numbers under the leaves, in their clusters' colours."""
    places = 5 + 10 * np.arange(len(leaves))  # where scipy puts them
    axes.set_xlim(0, 10 * len(leaves))
    if len(leaves) > NAMED:
        axes.set_xticks([])
        return
    size = min(8.0, max(4.0, 620 / len(leaves)))
    axes.set_xticks(
        places, [str(i) for i in leaves], rotation=90 if len(leaves) > 30 else 0, fontsize=size
    )
    for text, i in zip(axes.get_xticklabels(), leaves, strict=True):
        text.set_color(_colour(labels[i]))
    axes.tick_params(axis="x", length=0)
