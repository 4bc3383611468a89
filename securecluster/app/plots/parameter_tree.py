"""The picture of a parameter tree: which clusters there were, when each was split, and what became
of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from securecluster.app.number_format import shown
from securecluster.app.plots.figure import figure

COLUMN, ROW = 1.6, 0.95  # inches between boxes side by side, and between rows
WIDEST = 24  # characters in a line of a box


class TreeNode(Protocol):
    """What the picture needs of a node; node 0 is the root."""

    children: list[int]
    members: list[int]
    round: int
    cluster: int


def tree(nodes: Sequence[Any], content: dict[str, Any]) -> Any:
    """A figure with a box per node, the root on top.

    Args:
        nodes: the tree; a leaf's `cluster` is its label, an inner node's `round` that of its split.
        content: what result.json holds.
    """
    spots = positions(nodes)
    xs, depths = [x for x, _ in spots], [depth for _, depth in spots]
    width, rows = max(xs) - min(xs) + 1, max(depths) + 1
    made, axes = figure(max(3.2, COLUMN * width + 0.3), ROW * rows + 0.5)
    for v, node in enumerate(nodes):
        x, depth = spots[v]
        for child in node.children:
            axes.plot(
                [x, spots[child][0]],
                [-depth, -spots[child][1]],
                color="grey",
                linewidth=1,
                zorder=1,
            )
        axes.text(
            x,
            -depth,
            _text(v, node, content),
            ha="center",
            va="center",
            fontsize=7,
            linespacing=1.25,
            zorder=2,
            bbox=_box(node),
        )
    axes.set(
        xlim=(min(xs) - 0.55, max(xs) + 0.55),
        ylim=(0.5 - rows, 0.5),
        title=f"parameter tree of {content['protocol']}",
    )
    axes.title.set_fontsize(9)
    axes.set_axis_off()
    return made


def positions(nodes: Sequence[TreeNode]) -> list[tuple[float, int]]:
    """(x, depth) of each node, in boxes: a parent stands over the middle of its children, and boxes
    of a row are at least 1 apart.
    """
    found = [(0.0, 0)] * len(nodes)

    def place(v: int, depth: int) -> list[tuple[float, float]]:
        """Lay out the nodes below `v`; returns the least and largest x of each row from its own
        down.
        """
        below: list[tuple[float, float]] = []
        for child in nodes[v].children:
            edge = place(child, depth + 1)
            shift = max(
                (left[1] + 1 - right[0] for left, right in zip(below, edge, strict=False)),
                default=0.0,
            )
            move(child, shift)
            edge = [(low + shift, high + shift) for low, high in edge]
            joined = [(left[0], right[1]) for left, right in zip(below, edge, strict=False)]
            below = joined + below[len(joined) :] + edge[len(joined) :]
        x = (
            float(np.mean([found[child][0] for child in nodes[v].children]))
            if nodes[v].children
            else 0.0
        )
        found[v] = (x, depth)
        return [(x, x), *below]

    def move(v: int, shift: float) -> None:
        found[v] = (found[v][0] + shift, found[v][1])
        for child in nodes[v].children:
            move(child, shift)

    place(0, 0)
    return found


def _text(v: int, node: TreeNode, content: dict[str, Any]) -> str:
    names = [content["names"][i] for i in node.members]
    lines = [f"node {v}: {len(names)} client{'s' if len(names) > 1 else ''}", few(names)]
    if node.children:
        return "\n".join([*lines, f"split in round {node.round}"])
    metric = content["metric"]
    score = content["metrics"][metric]["per_cluster"][node.cluster]
    lines.append(
        f"cluster {node.cluster}"
        + ("" if score is None else f": {metric} {shown(score, metric, content['unit'])}")
    )
    handed = content.get("fallback", {}).get("nodes")
    if handed and handed[node.cluster] != v:
        lines.append(f"has node {handed[node.cluster]}'s model")
    return "\n".join(lines)


def few(names: Sequence[str]) -> str:
    """As many names as a box is wide; names of any length are cut."""
    told = ""
    for k, name in enumerate(names):
        more = " …" if k + 1 < len(names) else ""
        longer = f"{told} {name}".strip()
        if len(longer + more) > WIDEST:
            return f"{told} …" if told else f"{name[: WIDEST - 1 - len(more)]}…{more}"
        told = longer
    return told


def _box(node: TreeNode) -> dict[str, Any]:
    """A leaf has its cluster's colour, mixed with white; what was split is white."""
    from matplotlib.colors import to_rgb

    colour = to_rgb("black" if node.children else f"C{node.cluster % 10}")
    pale = "white" if node.children else tuple(0.2 * part + 0.8 for part in colour)
    return {"boxstyle": "round,pad=0.4", "facecolor": pale, "edgecolor": colour, "linewidth": 1}
