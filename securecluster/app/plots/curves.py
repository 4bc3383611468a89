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


def draw(
    folder: Path, content: dict[str, Any], history: list[dict[str, Any]], state: Any
) -> list[Path]:
    """Write the pictures that this run, which ended in the server's `state`, has numbers for;
    returns their paths.
    """
    metric = content["metric"]
    made = (
        [save(folder / f"{metric}.png", _learning(history, content))]
        if content["metrics"][metric]["after"] is not None
        else []
    )
    alpha = getattr(state, "alpha", None)
    if alpha is not None and len(alpha):
        made.append(save(folder / "similarity.png", similarity(alpha.numpy(), content["labels"])))
    related, look = (getattr(state, name, None) for name in ("relevance", "look"))
    words: tuple[str, ...] = ()
    if related is not None and len(related):
        made.append(
            save(
                folder / "relevance.png",
                relevance(related.numpy(), content["labels"], getattr(look, "ids", None)),
            )
        )
        words = RELATED
    linked = getattr(state, "graph", None)
    if linked is not None and len(linked.distance) > 1:
        made.append(save(folder / "graph.png", graph(linked, content["labels"])))
    if any(line.get("looks") for line in history):
        made.append(save(folder / "separation.png", _separation(history)))
    grown = getattr(state, "tree", None)
    if grown is not None:
        made.append(save(folder / "tree.png", tree(grown.nodes, content)))
    if (
        getattr(state, "known", None) is not None
        and (shown := similarity_pairs(state, history)) is not None
    ):
        made.append(save(folder / "similarity-pairs.png", shown))
    if look is not None:
        made.append(save(folder / "dendrogram.png", dendrogram(look, content["labels"], *words)))
    return made


def _marks(axes: Any, history: list[dict[str, Any]]) -> None:
    """Whole rounds on the axis, and lines where clusters changed."""
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for word, key in (("split", "splits"), ("clustered", "clustered")):
        for k, number in enumerate([line["round"] for line in history if line.get(key)]):
            axes.axvline(
                number, color="grey", linestyle=":", linewidth=1, label=word if k == 0 else None
            )


def _learning(history: list[dict[str, Any]], content: dict[str, Any]) -> Any:
    metric = content["metric"]
    made, axes = figure(6.4, 3.8)
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
    axes.legend(loc="lower right" if metric == "accuracy" else "best")
    return made


def labelled(metric: str, unit: str) -> str:
    """What an axis of a metric says."""
    return f"test {metric.replace('_', ' ')}" + (f" ({unit})" if unit else "")


def bounded(axes: Any, metric: str) -> None:
    """The range of an axis of a metric: accuracy lies in [0, 1], perplexity spans orders of
    magnitude.
    """
    if metric == "accuracy":
        axes.set(ylim=(0, 1.02))
    elif metric == "perplexity":
        axes.set(yscale="log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.tick_params(axis="y", which="minor", labelsize=7)


def _separation(history: list[dict[str, Any]]) -> Any:
    made, (top, bottom) = figure(6.4, 5.6, rows=2)
    true = [(line["round"], line["gap"]) for line in history if line.get("gap") is not None]
    if true:
        top.plot(
            *zip(*true, strict=True),
            color="black",
            marker=".",
            label="true clusters (all clients, one model)",
        )
    for c in sorted({look["cluster"] for line in history for look in line["looks"]}):
        seen = [
            (line["round"], look)
            for line in history
            for look in line["looks"]
            if look["cluster"] == c
        ]
        gaps = [(t, look["gap"]) for t, look in seen if look["gap"] is not None]
        if gaps:  # a marker, since one round alone draws no line
            top.plot(
                *zip(*gaps, strict=True),
                color=f"C{c % 10}",
                marker=".",
                linestyle="--",
                linewidth=1,
                label=f"halves of cluster {c}, as tested",
            )
        rounds = [t for t, _ in seen]
        bottom.plot(
            rounds,
            [look["max_norm"] for _, look in seen],
            color=f"C{c % 10}",
            marker=".",
            label=f"cluster {c}",
        )
        bottom.plot(
            rounds,
            [look["mean_norm"] for _, look in seen],
            color=f"C{c % 10}",
            marker=".",
            linestyle="--",
        )
    top.axhline(0, color="grey", linewidth=0.8)
    for axes in (top, bottom):
        _marks(axes, history)
        if axes.get_legend_handles_labels()[0] and len(axes.get_lines()) < 24:
            axes.legend(fontsize=6, loc="upper right", framealpha=0.6)
    top.set(ylabel="separation gap")
    bottom.set(xlabel="round", ylabel="norm (solid: max, dashed: mean)", yscale="log")
    return made
