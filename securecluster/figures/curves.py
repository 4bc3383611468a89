"""The pictures of a run."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

from securecluster.clustering.metrics import SPREAD
from securecluster.core.number_format import printable
from securecluster.figures.dendrogram import dendrogram
from securecluster.figures.figure import Drawing, figure, figure_of, save_all
from securecluster.figures.looks import COLORS, look_of, name_of
from securecluster.figures.matrices import graph, relevance, similarity
from securecluster.figures.parameter_tree import tree
from securecluster.figures.similarity_scatter import similarity_pairs
from securecluster.folders.schemas import Result

UPDATES = ("distance", "clients' updates")  # axis label and title of a dendrogram
RELATED = ("1 − R", "clients by relevance of data")
BANDS = {  # opacity of what lies between two scores of a round, and what it is called
    ("lowest", "highest"): (0.12, "all clients"),
    ("lower_quartile", "upper_quartile"): (0.25, "middle half of clients"),
}
BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.01, 0.5), "fontsize": 8}
MOST_LINES = 24  # with as many lines, the legend would cover the curves
History = list[dict[str, Any]]
Drawings = dict[str, Drawing]  # by file name
NumberedTest = tuple[int, dict[str, Any]]  # a round, and one cluster's split test in it


def draw(
    folder: Path, content: Result, history: History, state: Any, missing: bool = False
) -> list[Path]:
    """Write the pictures of a run, as far as it has numbers for them.

    One that cannot be drawn or written is a warning.

    Args:
        folder: of the run.
        content: content of result.json.
        history: a line for each round.
        state: final state of the server; its fields decide which pictures there are.
        missing: draw those that have no file yet.

    Returns:
        The paths of the pictures.
    """
    pictures: Drawings = {}
    metric = content["metric"]
    # without clients' scores in each round the metric has no curve
    if any(line.get(metric) is not None for line in history):
        pictures[f"{metric}.png"] = partial(learning, history, metric, content["unit"], "")
    pictures |= _matrices(state, content)
    pictures |= _histories(state, history, content)
    pictures |= _dendrogram(state, content)
    title = title_of(content)
    titled = {name: partial(_titled, drawing, title) for name, drawing in pictures.items()}
    return save_all(folder, titled, missing)


def title_of(content: Result) -> str:
    """Return the method, data, scenario, number of clients and seed of a run.

    Args:
        content: content of result.json.
    """
    data = f"{content['data'].rpartition('/')[2]} ({content['scenario']})"
    title = f"{name_of(content['protocol'])} on {data}, {content['clients']} clients"
    # where keys and noise follow from the seed, it is in no result
    if content["seed"] is not None:
        title += f", seed {content['seed']}"
    return printable(title)


def _titled(drawing: Drawing, title: str) -> Any:
    """Return a figure under the title of its run; None where there is nothing to show."""
    picture = drawing()
    if picture is not None:
        picture.suptitle(title, fontsize=11)
        for axes in picture.axes:
            axes.title.set_fontsize(9)
    return picture


def _matrices(state: Any, content: Result) -> Drawings:
    """Return drawings of the server's matrices over pairs of clients, by file name.

    Args:
        state: final state of the server.
        content: content of result.json.
    """
    labels, names, truth = content["labels"], content["names"], content["truth"]
    figures: Drawings = {}
    # which of these fields a state has depends on the protocol; they are empty before the round
    # that computes them
    alpha = getattr(state, "alpha", None)
    if alpha is not None and len(alpha):
        figures["similarity.png"] = partial(similarity, alpha.numpy(), labels, names, truth=truth)
    between = getattr(state, "relevance", None)
    if between is not None and len(between):
        linkage = getattr(state, "linkage", None)
        ids = getattr(linkage, "ids", None)
        drawing = partial(relevance, between.numpy(), labels, ids, names, truth=truth)
        figures["relevance.png"] = drawing
    record = getattr(state, "graph", None)
    if record is not None and len(record.distance) > 1:
        figures["graph.png"] = partial(graph, record, labels, names, truth)
    return figures


def _histories(state: Any, history: History, content: Result) -> Drawings:
    """Return drawings of how clusters were formed, by file name.

    Args:
        state: final state of the server.
        history: a line for each round.
        content: content of result.json.
    """
    figures: Drawings = {}
    if any(line.get("split_tests") for line in history):
        figures["separation.png"] = partial(separation, history)
    parameter_tree = getattr(state, "tree", None)
    if parameter_tree is not None:
        figures["tree.png"] = partial(tree, parameter_tree.nodes, content)
    # NSIM's model of similarity
    if getattr(state, "known", None) is not None:
        figures["similarity-pairs.png"] = partial(similarity_pairs, state, history)
    return figures


def _dendrogram(state: Any, content: Result) -> Drawings:
    """Return the drawing of a hierarchical clustering by file name; nothing where there was none.

    Args:
        state: final state of the server.
        content: content of result.json.
    """
    labels, names, truth = content["labels"], content["names"], content["truth"]
    linkage = getattr(state, "linkage", None)
    if linkage is None:
        return {}
    distance, compared = merged(state)
    drawing = partial(dendrogram, linkage, labels, distance, compared, names, truth=truth)
    return {"dendrogram.png": drawing}


def merged(state: Any) -> tuple[str, str]:
    """Return what a dendrogram shows: the label of its axis, and what was merged.

    Args:
        state: final state of the server.
    """
    between = getattr(state, "relevance", None)
    # clusters of relevance, not of updates
    return RELATED if between is not None and len(between) else UPDATES


def _mark_rounds(axes: Any, history: History) -> None:
    """Put whole rounds on the horizontal axis, and lines where clusters changed.

    Args:
        axes: matplotlib axes over rounds.
        history: a line for each round.
    """
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for name, key in (("split", "splits"), ("clustered", "clustered")):
        label: str | None = name
        for line in history:
            if not line.get(key):
                continue
            axes.axvline(line["round"], color="grey", linestyle=":", linewidth=1, label=label)
            label = None  # the legend has one entry for all of these lines


def learning(history: History, metric: str, unit: str, title: str, axes: Any = None) -> Any:
    """Return a figure of the metric over the rounds: its mean, and how far clients are apart.

    Args:
        history: a line for each round; those of earlier versions have the mean alone.
        metric: the name of the clients' score.
        unit: of the metric; empty where it has none.
        title: of the picture.
        axes: matplotlib axes to draw on; None for a new figure.
    """
    picture, axes = figure_of(axes, 7.6, 3.8)
    continued = kept(history)
    _draw_given_up(axes, history, continued, metric)
    rounds = [line["round"] for line in history]
    if len(continued) < len(history):
        rounds = list(range(1, len(continued) + 1))
    # matplotlib leaves a gap where a round was not evaluated (None)
    values = [line[metric] for line in continued]
    axes.plot(rounds, values, color=COLORS[0], marker=".", label="mean over clients")
    _draw_spread(axes, rounds, continued)
    _mark_rounds(axes, history)
    axes.set(title=printable(title), xlabel="round", ylabel=labelled(metric, unit))
    bounded(axes, metric)
    axes.legend(**BESIDE)
    return picture


def _draw_spread(axes: Any, rounds: list[int], history: History) -> None:
    """Draw between which scores the clients lie in each round, where its line says so.

    Args:
        axes: matplotlib axes over rounds.
        rounds: numbers of the rounds at the axis.
        history: their lines.
    """
    if not any(SPREAD.keys() <= line.keys() for line in history):
        return
    for (low, high), (opacity, label) in BANDS.items():
        # NaN leaves a gap
        lows = [line.get(low, math.nan) for line in history]
        highs = [line.get(high, math.nan) for line in history]
        axes.fill_between(
            rounds, lows, highs, color=COLORS[0], alpha=opacity, linewidth=0, label=label
        )


def kept(history: History) -> History:
    """Return the rounds of the start that was continued, or all rounds without several starts.

    Args:
        history: a line for each round.
    """
    # IFCA may try several starts; the last line belongs to the one that it continues with
    if not history or "start" not in history[-1]:
        return history
    continued = history[-1]["start"]
    return [line for line in history if line.get("start") == continued]


def _draw_given_up(axes: Any, history: History, continued: History, metric: str) -> None:
    """Draw the rounds of starts that were given up, each from its own first round.

    Args:
        axes: matplotlib axes over rounds.
        history: a line for each round.
        continued: those of the start that was kept.
        metric: the name of the clients' score.
    """
    starts: dict[int, list[Any]] = {}
    for line in history:
        if continued and line.get("start") != continued[-1].get("start"):
            starts.setdefault(line["start"], []).append(line[metric])
    label: str | None = f"other starts, given up ({len(starts)})"
    for values in starts.values():
        rounds = range(1, len(values) + 1)
        axes.plot(
            rounds, values, color="0.75", linewidth=0.8, marker=".", markersize=3, label=label
        )
        label = None  # the legend has one entry for all of these curves


def labelled(metric: str, unit: str) -> str:
    """Return the label of a metric's axis.

    Args:
        metric: its name, such as `position_error`.
        unit: of the metric; empty where it has none.
    """
    name = metric.replace("_", " ")
    if unit:
        return f"test {name} ({unit})"
    return f"test {name}"


def legend_place(metric: str) -> str:
    """Return matplotlib's name of the corner that curves of a metric leave free.

    Args:
        metric: its name.
    """
    if metric == "accuracy":
        return "lower right"  # its curves rise
    return "best"


def bounded(axes: Any, metric: str) -> None:
    """Set the range and scale of a metric's axis.

    Args:
        axes: matplotlib axes.
        metric: its name.
    """
    if metric == "accuracy":
        # a little above 1, so that a perfect curve does not lie on the edge
        axes.set(ylim=(0, 1.02))
    elif metric == "perplexity":
        # perplexity spans orders of magnitude
        axes.set(yscale="log")
        _plain_numbers(axes)


def separation(history: History) -> Any:
    """Return a figure of the separation gaps of CFL's split tests, and below them the norms.

    Args:
        history: a line for each round, with its `split_tests`.
    """
    picture, (gap_axes, norm_axes) = figure(8.4, 5.6, rows=2)
    _draw_true_gaps(gap_axes, history)
    for cluster, split_tests in sorted(_tests_by_cluster(history).items()):
        _draw_gaps(gap_axes, cluster, split_tests)
        _draw_norms(norm_axes, cluster, split_tests)
    gap_axes.axhline(0, color="grey", linewidth=0.8)
    for axes in (gap_axes, norm_axes):
        _mark_rounds(axes, history)
        handles, _ = axes.get_legend_handles_labels()
        if handles and len(axes.get_lines()) < MOST_LINES:
            # beside the curves, which may be anywhere
            axes.legend(**BESIDE)
    gap_axes.set(ylabel="separation gap")
    norm_axes.set(xlabel="round", ylabel="norm (solid: max, dashed: mean)", yscale="log")
    _plain_numbers(norm_axes)
    return picture


def _plain_numbers(axes: Any) -> None:
    """Write the numbers of a logarithmic vertical axis without powers of ten."""
    from matplotlib.ticker import LogLocator

    # evenly enough that they do not overlap
    axes.yaxis.set_minor_locator(LogLocator(subs=(2, 3, 5, 7)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(axis="y", which="minor", labelsize=7)


def _tests_by_cluster(history: History) -> dict[int, list[NumberedTest]]:
    """Return the split tests of each cluster in the order of their rounds.

    Args:
        history: a line for each round, with its `split_tests`.
    """
    by_cluster: dict[int, list[NumberedTest]] = {}
    for line in history:
        for test in line["split_tests"]:
            tests = by_cluster.setdefault(test["cluster"], [])
            tests.append((line["round"], test))
    return by_cluster


def _draw_true_gaps(axes: Any, history: History) -> None:
    """Draw the gap between the true clusters, which only the observer computes."""
    rounds = []
    gaps = []
    for line in history:
        if line.get("gap") is not None:
            rounds.append(line["round"])
            gaps.append(line["gap"])
    if not rounds:
        return
    axes.plot(
        rounds, gaps, color="black", marker=".", label="true clusters (all clients, one model)"
    )


def _draw_gaps(axes: Any, cluster: int, split_tests: list[NumberedTest]) -> None:
    """Draw the separation gap between the two halves of a cluster, as tested.

    Args:
        axes: matplotlib axes over rounds.
        cluster: its label, which decides its colour.
        split_tests: of this cluster, by round.
    """
    # a test without a pair of replies has no gap
    rounds = []
    gaps = []
    for number, test in split_tests:
        if test["gap"] is not None:
            rounds.append(number)
            gaps.append(test["gap"])
    if not rounds:
        return
    look = look_of(cluster)
    axes.plot(
        rounds,
        gaps,
        color=look.color,
        marker=look.marker,  # one round alone draws no line
        markersize=4,
        linestyle="--",
        linewidth=1,
        label=f"halves of cluster {cluster}, as tested",
    )


def _draw_norms(axes: Any, cluster: int, split_tests: list[NumberedTest]) -> None:
    """Draw the norms that the split test compares: the largest update, and the mean update.

    Args:
        axes: matplotlib axes over rounds.
        cluster: its label, which decides its colour.
        split_tests: of this cluster, by round.
    """
    look = look_of(cluster)
    style = {"color": look.color, "marker": look.marker, "markersize": 4}
    rounds = [number for number, _ in split_tests]
    largest_norms = [test["max_norm"] for _, test in split_tests]
    mean_norms = [test["mean_norm"] for _, test in split_tests]
    axes.plot(rounds, largest_norms, label=f"cluster {cluster}", **style)
    axes.plot(rounds, mean_norms, linestyle="--", **style)
