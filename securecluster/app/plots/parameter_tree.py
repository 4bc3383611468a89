"""The picture of a parameter tree: its clusters, when each was split, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from securecluster.app.number_format import shown
from securecluster.app.plots.figure import figure

COLUMN, ROW = 1.6, 0.95  # inches between boxes side by side, and between rows
WIDEST = 24  # characters in a line of a box
Extent = tuple[float, float]  # least and largest x of a row of boxes


class TreeNode(Protocol):
    """A node as the picture needs it; node 0 is the root."""

    children: list[int]
    members: list[int]
    round: int
    cluster: int


def tree(nodes: Sequence[Any], content: dict[str, Any]) -> Any:
    """Return a figure with a box per node, the root on top.

    Args:
        nodes: the tree; a leaf's `cluster` is its label, an inner node's `round` that of its split.
        content: what result.json holds.
    """
    spots = positions(nodes)
    xs, depths = [x for x, _ in spots], [depth for _, depth in spots]
    width, rows = max(xs) - min(xs) + 1, max(depths) + 1
    picture, axes = figure(max(3.2, COLUMN * width + 0.3), ROW * rows + 0.5)
    style = {"ha": "center", "va": "center", "fontsize": 7, "linespacing": 1.25, "zorder": 2}
    for v, node in enumerate(nodes):
        x, depth = spots[v]
        for child in node.children:
            child_x, child_depth = spots[child]
            ends = [x, child_x], [-depth, -child_depth]
            axes.plot(*ends, color="grey", linewidth=1, zorder=1)
        axes.text(x, -depth, _text(v, node, content), bbox=_box(node), **style)
    axes.set(
        xlim=(min(xs) - 0.55, max(xs) + 0.55),
        ylim=(0.5 - rows, 0.5),
        title=f"parameter tree of {content['protocol']}",
    )
    axes.title.set_fontsize(9)
    axes.set_axis_off()
    return picture


def positions(nodes: Sequence[TreeNode]) -> list[tuple[float, int]]:
    """Return (x, depth) of each node, in boxes.

    A parent stands over the middle of its children, and boxes of a row are at least 1 apart.
    """
    xs = [0.0] * len(nodes)
    depths = [0] * len(nodes)

    def place(v: int, depth: int) -> list[Extent]:
        """Lay out the tree below `v`, and return the extent of each of its rows, from `v` down."""
        depths[v] = depth
        children = nodes[v].children
        below: list[Extent] = []
        for child in children:
            rows = place(child, depth + 1)
            shift = _shift(below, rows)
            move(child, shift)
            below = _side_by_side(below, [(low + shift, high + shift) for low, high in rows])
        if children:
            xs[v] = float(np.mean([xs[child] for child in children]))
        return [(xs[v], xs[v]), *below]

    def move(v: int, shift: float) -> None:
        """Move a node and all nodes below it to the right."""
        xs[v] += shift
        for child in nodes[v].children:
            move(child, shift)

    place(0, 0)
    return list(zip(xs, depths, strict=True))


def _shift(left: list[Extent], right: list[Extent]) -> float:
    """Return how far the right tree moves, so that its rows are 1 apart from those on its left."""
    both = zip(left, right, strict=False)
    return max((left_high + 1 - right_low for (_, left_high), (right_low, _) in both), default=0.0)


def _side_by_side(left: list[Extent], right: list[Extent]) -> list[Extent]:
    """Return the extents of the rows of two trees together, one of which may be deeper."""
    both = zip(left, right, strict=False)
    joined = [(left_low, right_high) for (left_low, _), (_, right_high) in both]
    return joined + left[len(joined) :] + right[len(joined) :]


def _text(v: int, node: TreeNode, content: dict[str, Any]) -> str:
    """Return the lines of a node's box."""
    names = [content["names"][i] for i in node.members]
    plural = "s" if len(names) > 1 else ""
    lines = [f"node {v}: {len(names)} client{plural}", few(names)]
    if node.children:
        lines.append(f"split in round {node.round}")
        return "\n".join(lines)
    metric = content["metric"]
    score = content["metrics"][metric]["per_cluster"][node.cluster]
    cluster = f"cluster {node.cluster}"
    if score is not None:
        cluster += f": {metric} {shown(score, metric, content['unit'])}"
    lines.append(cluster)
    handed = content.get("fallback", {}).get("nodes")
    if handed and handed[node.cluster] != v:
        lines.append(f"has node {handed[node.cluster]}'s model")
    return "\n".join(lines)


def few(names: Sequence[str]) -> str:
    """Return as many names as a box is wide; names of any length are cut."""
    text = ""
    for k, name in enumerate(names):
        more = " …" if k + 1 < len(names) else ""
        longer = f"{text} {name}".strip()
        if len(longer + more) > WIDEST:
            if text:
                return f"{text} …"
            return f"{name[: WIDEST - 1 - len(more)]}…{more}"
        text = longer
    return text


def _box(node: TreeNode) -> dict[str, Any]:
    """Return the style of a node's box.

    A leaf has its cluster's colour, mixed with white; a node that was split is white.
    """
    from matplotlib.colors import to_rgb

    style: dict[str, Any] = {"boxstyle": "round,pad=0.4", "linewidth": 1}
    if node.children:
        return style | {"facecolor": "white", "edgecolor": to_rgb("black")}
    colour = to_rgb(f"C{node.cluster % 10}")
    pale = tuple(0.2 * part + 0.8 for part in colour)
    return style | {"facecolor": pale, "edgecolor": colour}
