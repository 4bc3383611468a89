"""The pictures of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from securecluster.app.plots.dendrogram import dendrogram
from securecluster.app.plots.figure import figure, save
from securecluster.app.plots.matrices import graph, relevance, similarity
from securecluster.app.plots.parameter_tree import tree
from securecluster.app.plots.similarity_scatter import similarity_pairs

RELATED = ("1 − R", "clients by relevance of data")  # what a dendrogram of R measures, and merges
NumberedTest = tuple[int, dict[str, Any]]  # a round, and one cluster's split test in it


def draw(
    folder: Path, content: dict[str, Any], history: list[dict[str, Any]], state: Any
) -> list[Path]:
    """Write the pictures of a run, as far as it has numbers for them.

    Args:
        folder: of the run.
        content: what result.json holds.
        history: a line for each round.
        state: the final state of the server. What it has decides which pictures there are.

    Returns:
        The paths of the pictures.
    """
    metric = content["metric"]
    paths = []
    if content["metrics"][metric]["after"] is not None:
        paths.append(save(folder / f"{metric}.png", _learning(history, content)))
    pictures = {
        **_matrices(state, content["labels"]),
        **_histories(state, history, content),
        **_dendrogram(state, content["labels"]),
    }
    paths += [save(folder / name, picture) for name, picture in pictures.items()]
    return paths


def _matrices(state: Any, labels: list[int]) -> dict[str, Any]:
    """Return figures of what a server knows of pairs of clients, by the names of their files."""
    figures = {}
    alpha = getattr(state, "alpha", None)
    if alpha is not None and len(alpha):
        figures["similarity.png"] = similarity(alpha.numpy(), labels)
    related = getattr(state, "relevance", None)
    if related is not None and len(related):
        ids = getattr(getattr(state, "linkage", None), "ids", None)
        figures["relevance.png"] = relevance(related.numpy(), labels, ids)
    linked = getattr(state, "graph", None)
    if linked is not None and len(linked.distance) > 1:
        figures["graph.png"] = graph(linked, labels)
    return figures


def _histories(
    state: Any, history: list[dict[str, Any]], content: dict[str, Any]
) -> dict[str, Any]:
    """Return figures of how clusters came about, by the names of their files."""
    figures = {}
    if any(line.get("split_tests") for line in history):
        figures["separation.png"] = _separation(history)
    parameter_tree = getattr(state, "tree", None)
    if parameter_tree is not None:
        figures["tree.png"] = tree(parameter_tree.nodes, content)
    if getattr(state, "known", None) is not None:
        scatter = similarity_pairs(state, history)
        if scatter is not None:
            figures["similarity-pairs.png"] = scatter
    return figures


def _dendrogram(state: Any, labels: list[int]) -> dict[str, Any]:
    """Return the figure of a hierarchical clustering by its file's name, where there was one."""
    linkage = getattr(state, "linkage", None)
    if linkage is None:
        return {}
    related = getattr(state, "relevance", None)
    if related is not None and len(related):
        return {"dendrogram.png": dendrogram(linkage, labels, *RELATED)}
    return {"dendrogram.png": dendrogram(linkage, labels)}


def _marks(axes: Any, history: list[dict[str, Any]]) -> None:
    """Put whole rounds on the axis, and lines where clusters changed."""
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for word, key in (("split", "splits"), ("clustered", "clustered")):
        label: str | None = word
        for number in [line["round"] for line in history if line.get(key)]:
            axes.axvline(number, color="grey", linestyle=":", linewidth=1, label=label)
            label = None  # the legend has one entry for all of these lines


def _learning(history: list[dict[str, Any]], content: dict[str, Any]) -> Any:
    """Draw the metric over the rounds."""
    metric = content["metric"]
    picture, axes = figure(6.4, 3.8)
    axes.plot(
        [line["round"] for line in history],
        [line[metric] for line in history],
        marker=".",
        label="mean over clients",
    )
    _marks(axes, history)
    axes.set(
        title=f"{content['protocol']} on {content['data']}",
        xlabel="round",
        ylabel=labelled(metric, content["unit"]),
    )
    bounded(axes, metric)
    axes.legend(loc=legend_place(metric))
    return picture


def labelled(metric: str, unit: str) -> str:
    """Return the label of a metric's axis."""
    text = f"test {metric.replace('_', ' ')}"
    if unit:
        text += f" ({unit})"
    return text


def legend_place(metric: str) -> str:
    """Return where curves of a metric leave room: those of accuracy rise and leave it below."""
    return "lower right" if metric == "accuracy" else "best"


def bounded(axes: Any, metric: str) -> None:
    """Set the range of a metric's axis.

    Accuracy lies in [0, 1], and perplexity spans orders of magnitude.
    """
    if metric == "accuracy":
        axes.set(ylim=(0, 1.02))
    elif metric == "perplexity":
        axes.set(yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)


def _separation(history: list[dict[str, Any]]) -> Any:
    """Draw the separation gaps of CFL's split test, and below them the norms that it compares."""
    picture, (top, bottom) = figure(6.4, 5.6, rows=2)
    _draw_true_gaps(top, history)
    for cluster, split_tests in sorted(_tests_by_cluster(history).items()):
        _draw_cluster(top, bottom, cluster, split_tests)
    top.axhline(0, color="grey", linewidth=0.8)
    for axes in (top, bottom):
        _marks(axes, history)
        if axes.get_legend_handles_labels()[0] and len(axes.get_lines()) < 24:
            axes.legend(fontsize=6, loc="upper right", framealpha=0.6)
    top.set(ylabel="separation gap")
    bottom.set(xlabel="round", ylabel="norm (solid: max, dashed: mean)", yscale="log")
    return picture


def _tests_by_cluster(history: list[dict[str, Any]]) -> dict[int, list[NumberedTest]]:
    """Return the split tests of each cluster in the order of their rounds."""
    by_cluster: dict[int, list[NumberedTest]] = {}
    for line in history:
        for test in line["split_tests"]:
            by_cluster.setdefault(test["cluster"], []).append((line["round"], test))
    return by_cluster


def _draw_true_gaps(axes: Any, history: list[dict[str, Any]]) -> None:
    """Draw the gap between the true clusters, which the observer knows."""
    gaps = [(line["round"], line["gap"]) for line in history if line.get("gap") is not None]
    if gaps:
        axes.plot(
            *zip(*gaps, strict=True),
            color="black",
            marker=".",
            label="true clusters (all clients, one model)",
        )


def _draw_cluster(top: Any, bottom: Any, cluster: int, split_tests: list[NumberedTest]) -> None:
    """Draw one cluster's gaps into the upper axes and its norms into the lower ones."""
    colour = f"C{cluster % 10}"
    gaps = [(number, test["gap"]) for number, test in split_tests if test["gap"] is not None]
    if gaps:  # a marker, since one round alone draws no line
        top.plot(
            *zip(*gaps, strict=True),
            color=colour,
            marker=".",
            linestyle="--",
            linewidth=1,
            label=f"halves of cluster {cluster}, as tested",
        )
    rounds = [number for number, _ in split_tests]
    largest = [test["max_norm"] for _, test in split_tests]
    of_mean = [test["mean_norm"] for _, test in split_tests]
    bottom.plot(rounds, largest, color=colour, marker=".", label=f"cluster {cluster}")
    bottom.plot(rounds, of_mean, color=colour, marker=".", linestyle="--")
