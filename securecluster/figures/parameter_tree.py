"""The picture of a parameter tree: its clusters, when each was split, and what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from securecluster.core.number_format import printable, shown
from securecluster.figures.figure import figure_of
from securecluster.figures.looks import look_of
from securecluster.folders.schemas import Result, scores_of

COLUMN = 1.6  # inches between boxes side by side
ROW = 0.95  # inches between rows of boxes
TITLE = 4.8  # inches
WIDEST = 24  # characters in a line of a box
Box = tuple[float, int]  # x and depth, in boxes
Extent = tuple[float, float]  # smallest and largest x of a row of boxes


class PlottedNode(Protocol):
    """A node as the picture needs it; node 0 is the root."""

    children: list[int]
    members: list[int]
    round: int
    cluster: int


def tree(nodes: Sequence[Any], content: Result, axes: Any = None) -> Any:
    """Return a figure with a box per node, the root on top.

    Args:
        nodes: the tree; a leaf's `cluster` is its label, an inner node's `round` that of its split.
        content: content of result.json.
        axes: to draw on; None for those of a new figure.
    """
    boxes = positions(nodes)
    xs = [x for x, _ in boxes]
    row_count = max(depth for _, depth in boxes) + 1
    width = max(xs) - min(xs) + 1
    # the title needs as much also above a single box
    figure_width = max(TITLE, COLUMN * width + 0.3)
    figure_height = ROW * row_count + 0.5
    picture, axes = figure_of(axes, figure_width, figure_height)
    for number, node in enumerate(nodes):
        _draw_edges(axes, boxes, number, node)
        _draw_box(axes, boxes, number, node, content)
    axes.set(
        xlim=(min(xs) - 0.55, max(xs) + 0.55), ylim=(0.5 - row_count, 0.5), title="parameter tree"
    )
    axes.title.set_fontsize(9)
    axes.set_axis_off()
    return picture


def _draw_edges(axes: Any, boxes: Sequence[Box], number: int, node: PlottedNode) -> None:
    """Draw a line from a node to each of its children."""
    x, depth = boxes[number]
    for child in node.children:
        child_x, child_depth = boxes[child]
        # rows count downwards and the vertical axis upwards
        axes.plot([x, child_x], [-depth, -child_depth], color="grey", linewidth=1, zorder=1)


def _draw_box(
    axes: Any, boxes: Sequence[Box], number: int, node: PlottedNode, content: Result
) -> None:
    x, depth = boxes[number]
    axes.text(
        x,
        -depth,
        _text(number, node, content),
        bbox=_box_style(node),
        ha="center",
        va="center",
        fontsize=7,
        linespacing=1.25,
        zorder=2,
    )


def positions(nodes: Sequence[PlottedNode]) -> list[Box]:
    """Return the position (x, depth) of each node, in boxes.

    A parent stands over the middle of its children, and boxes of a row are at least 1 apart.

    Args:
        nodes: the tree, whose node 0 is the root.
    """
    # each subtree is laid out on its own, then moved as close to those on its left as rows allow
    xs = [0.0] * len(nodes)
    depths = [0] * len(nodes)

    def lay_out(node: int, depth: int) -> list[Extent]:
        """Lay out the tree below `node`, and return the extent of each of its rows."""
        depths[node] = depth
        children = nodes[node].children
        rows_below: list[Extent] = []
        for child in children:
            rows = lay_out(child, depth + 1)
            shift = _shift(rows_below, rows)
            move_right(child, shift)
            shifted = [(start + shift, end + shift) for start, end in rows]
            rows_below = _side_by_side(rows_below, shifted)
        if children:
            child_xs = [xs[child] for child in children]
            xs[node] = float(np.mean(child_xs))
        return [(xs[node], xs[node]), *rows_below]

    def move_right(node: int, shift: float) -> None:
        """Move a node and all nodes below it."""
        xs[node] += shift
        for child in nodes[node].children:
            move_right(child, shift)

    lay_out(0, 0)
    return list(zip(xs, depths, strict=True))


def _shift(placed: list[Extent], rows: list[Extent]) -> float:
    """Return how far a tree must move to the right of those placed before it.

    Args:
        placed: extents of the rows of the trees on the left, from the top.
        rows: extents of the tree's rows, from the top.

    Returns:
        The least shift at which boxes of a row are 1 apart.
    """
    shifts = []
    # rows below the end of the shorter tree have no neighbour
    for (_, placed_end), (start, _) in zip(placed, rows, strict=False):
        shifts.append(placed_end + 1 - start)
    return max(shifts, default=0.0)


def _side_by_side(placed: list[Extent], rows: list[Extent]) -> list[Extent]:
    """Return the extents of the rows of two trees together, one of which may be deeper.

    Args:
        placed: extents of the rows of the tree on the left, from the top.
        rows: extents of the rows of the tree on the right, from the top.
    """
    joined = []
    for (start, _), (_, end) in zip(placed, rows, strict=False):
        joined.append((start, end))
    depth = len(joined)
    return joined + placed[depth:] + rows[depth:]


def _text(number: int, node: PlottedNode, content: Result) -> str:
    """Return the lines of a node's box.

    Args:
        number: of the node.
        node: an inner node or a leaf.
        content: content of result.json.
    """
    names = [printable(content["names"][client]) for client in node.members]
    heading = f"node {number}: {len(names)} client"
    if len(names) > 1:
        heading += "s"
    lines = [heading, few(names)]
    if node.children:
        lines.append(f"split in round {node.round}")
    else:
        lines += _leaf_lines(number, node, content)
    return "\n".join(lines)


def _leaf_lines(number: int, node: PlottedNode, content: Result) -> list[str]:
    """Return the lines of a leaf's box below its clients.

    They name its cluster with the metric, the true clusters within where these are known, and the
    node of its model where that is another.
    """
    metric = content["metric"]
    score = scores_of(content)["per_cluster"][node.cluster]
    cluster = f"cluster {node.cluster}"
    if score is not None:
        value = shown(score, metric, content["unit"])
        cluster += f": {metric} {value}"
    lines = [cluster]
    if content["truth"] is not None:
        held = sorted({content["truth"][client] for client in node.members})
        lines.append(f"true cluster {held[0]}" if len(held) == 1 else f"{len(held)} true clusters")
    model_nodes: list[int] = []
    if "fallback" in content:
        model_nodes = content["fallback"]["nodes"]
    if model_nodes and model_nodes[node.cluster] != number:
        lines.append(f"has node {model_nodes[node.cluster]}'s model")
    return lines


def few(names: Sequence[str]) -> str:
    """Return as many names as fit into a box; names of any length are cut.

    Args:
        names: in their order; an ellipsis stands for those that do not fit.
    """
    text = ""
    last = len(names) - 1
    for position, name in enumerate(names):
        more = " …" if position < last else ""
        longer = f"{text} {name}".strip()
        if len(longer + more) > WIDEST:
            if text:
                return f"{text} …"
            # the first name alone is too long: cut it, with an ellipsis of its own
            width = WIDEST - 1 - len(more)
            return f"{name[:width]}…{more}"
        text = longer
    return text


def _box_style(node: PlottedNode) -> dict[str, Any]:
    """Return the style of a node's box.

    A leaf has its cluster's colour, mixed with white; a node that was split is white.
    """
    from matplotlib.colors import to_rgb

    style: dict[str, Any] = {"boxstyle": "round,pad=0.4", "linewidth": 1}
    if node.children:
        style["facecolor"] = "white"
        style["edgecolor"] = to_rgb("black")
        return style
    colour = to_rgb(look_of(node.cluster).color)
    # a fifth of the colour, so that the text on it is readable
    style["facecolor"] = tuple(0.2 * channel + 0.8 for channel in colour)
    style["edgecolor"] = colour
    return style
