"""Figures of runs and sweeps, from Python: the pictures of run folders, to label and to place.

    from securecluster import plot

    plot.similarity(cfl).savefig("similarity.pdf")
    plot.sweep(runs, x="epsilon", y="ari", ax=axes[0], title="", xlabel="privacy loss ε")

All functions return matplotlib's Figure and take, by name:

    ax: axes to draw on, whose figure is returned; without it the figure is new.
    size: width and height of a new figure, in inches.
    font: size of all texts, in points.
    title, xlabel, ylabel: texts in place of the usual ones; "" for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from securecluster.errors import UsageError
from securecluster.figures import curves, matrices
from securecluster.figures.dendrogram import dendrogram as merges
from securecluster.figures.parameter_tree import tree as parameter_tree
from securecluster.models.objectives import METRICS
from securecluster.results.fitted import FittedRun
from securecluster.statements.result_json import Subject, result_of
from securecluster.studies import plan as plans
from securecluster.studies import sweep_figures as sweeps
from securecluster.studies import sweep_tables

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from pandas import DataFrame

__all__ = [
    "accuracy",
    "dendrogram",
    "plan",
    "relevance",
    "separation",
    "similarity",
    "sweep",
    "tree",
]


class Look(TypedDict, total=False):
    """What every function of this module takes."""

    ax: Axes
    size: tuple[float, float]
    font: float
    title: str
    xlabel: str
    ylabel: str


def accuracy(fitted: Any, **look: Unpack[Look]) -> Figure:
    """Return a figure of the clients' mean accuracy, or other metric, over the rounds.

    Args:
        fitted: a fitted protocol, or its `result_`.
        look: see the module.

    Raises:
        UsageError: not fitted, or no round was evaluated.
    """
    result = _result(fitted)
    metric = result.metric_
    if not any(line.get(metric) is not None for line in result.history_):
        raise UsageError(f"no round of this run has the {metric} of its clients")
    unit = result.network_.objective.unit
    picture = curves.learning(result.history_, metric, unit, result.method.name, look.get("ax"))
    return _labelled(picture, look)


def similarity(fitted: Any, **look: Unpack[Look]) -> Figure:
    """Return a figure of the cosines between clients' updates, with clusters side by side.

    Args:
        fitted: a fitted protocol, or its `result_`.
        look: see the module.

    Raises:
        UsageError: not fitted, or a protocol whose server compares no updates.
    """
    result = _result(fitted)
    alpha = _state(result, "alpha", "similarity matrix of updates").numpy()
    names = result.kept_.learned.names
    labels = result.labels_.tolist()
    return _labelled(matrices.similarity(alpha, labels, names, axes=look.get("ax")), look)


def relevance(fitted: Any, **look: Unpack[Look]) -> Figure:
    """Return a figure of the relevance of clients' data to each other (Ali & Arafa 2024, eq. 5).

    Args:
        fitted: a fitted protocol, or its `result_`.
        look: see the module.

    Raises:
        UsageError: not fitted, or a protocol whose server knows no relevance.
    """
    result = _result(fitted)
    between = _state(result, "relevance", "relevance of clients' data").numpy()
    ids = getattr(getattr(result.state_, "linkage", None), "ids", None)
    labels = result.labels_.tolist()
    names = result.kept_.learned.names
    return _labelled(matrices.relevance(between, labels, ids, names, look.get("ax")), look)


def dendrogram(fitted: Any, **look: Unpack[Look]) -> Figure:
    """Return a figure of the merges of a hierarchical clustering, with the cut as a line.

    Args:
        fitted: a fitted protocol, or its `result_`.
        look: see the module.

    Raises:
        UsageError: not fitted, or a protocol that does not cluster by linkage.
    """
    result = _result(fitted)
    linkage = _state(result, "linkage", "linkage")
    distance, compared = curves.merged(result.state_)
    names = result.kept_.learned.names
    labels = result.labels_.tolist()
    picture = merges(linkage, labels, distance, compared, names, look.get("ax"))
    return _labelled(picture, look)


def separation(fitted: Any, size: tuple[float, float] | None = None) -> Figure:
    """Return a figure of CFL's split tests: separation gaps above, norms of updates below.

    Args:
        fitted: a fitted CFL, or its `result_`.
        size: width and height of the figure, in inches.

    Raises:
        UsageError: not fitted, or a protocol without split tests.
    """
    result = _result(fitted)
    if not any(line.get("split_tests") for line in result.history_):
        raise UsageError(f"{result.method.name} tested no split in this run: fit CFL")
    return _labelled(curves.separation(result.history_), {} if size is None else {"size": size})


def tree(fitted: Any, **look: Unpack[Look]) -> Figure:
    """Return a figure of CFL's parameter tree: its clusters, and when each was split.

    Args:
        fitted: a fitted CFL, or its `result_`.
        look: see the module.

    Raises:
        UsageError: not fitted, or a protocol that splits no clusters in two.
    """
    result = _result(fitted)
    nodes = _state(result, "tree", "parameter tree").nodes
    names = tuple(result.kept_.learned.names)
    subject = Subject(names, seed=0, objective=result.network_.objective)
    return _labelled(parameter_tree(nodes, result_of(subject, result), look.get("ax")), look)


def sweep(
    runs: DataFrame,
    x: str = "epsilon",
    y: str | Sequence[str] = "ari",
    names: Mapping[str, str] | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Return a figure of scores of a sweep over its noise, ε or bytes, a curve for each variant.

    Bands are 95 % bootstrap intervals over the seeds; with fewer than five seeds each is a dot.
    Noise and ε of a client have panels of their own, and so have those of an example.

    Args:
        runs: what `securecluster.sweep` returned, or `runs.csv` of its folder as a DataFrame.
        x: "epsilon", "noise" or "bytes".
        y: "ari", the name of the metric ("accuracy"), or several of them, each with a panel.
        names: what variants are called, by the column `variant`, in place of their usual names.
        look: see the module; `ax`, `xlabel` and `ylabel` are for a single score.

    Raises:
        UsageError: an unknown axis or score, or no run that ended.
    """
    import pandas

    metric = next((name for name in METRICS if name in runs.columns), "")
    scores = [y] if isinstance(y, str) else list(y)
    axes = (*sweeps.AXES, "bytes")
    if x not in axes:
        raise UsageError(f"x = {x!r} is no axis of a sweep: give one of {', '.join(axes)}")
    unknown = [name for name in scores if name not in ("ari", metric)]
    if unknown or not scores:
        raise UsageError(f"y = {y!r} is no score of these runs: give ari or {metric}")
    if len(scores) > 1 and look.keys() & {"ax", "xlabel", "ylabel"}:
        raise UsageError("ax, xlabel and ylabel are for a single score: give one y")
    # pandas has NaN where rows have None
    rows = runs.astype(object).where(pandas.notna(runs), None).to_dict("records")
    done = [row for row in sweep_tables.summary(rows, metric) if row["runs"]]
    if not all(any(row[score] is not None for row in done) for score in scores):
        raise UsageError(f"no run of this sweep has y = {y!r}: see the columns status and reason")
    several = x in sweeps.AXES and len(sweeps.units(done)) > 1
    if several and look.keys() & {"ax", "xlabel", "ylabel"}:
        raise UsageError(
            "these runs have noise and ε of one client and of one example, which share no axis: "
            'give runs of one unit, such as runs[runs.dp_unit == "client"]'
        )
    labels = sweeps.over_seeds(metric, "")
    picture = sweeps.over(done, x, scores, labels, look.get("ax"), runs=rows, names=names)
    return _labelled(picture, look)


def plan(outlook: plans.Outlook, **look: Unpack[Look]) -> Figure:
    """Return a figure of what ε buys: simulated ARI and accuracy over ε.

    Bands are from the least simulation to the most.

    Args:
        outlook: what `securecluster.plan` returned.
        look: see the module; on given axes accuracy alone is drawn.

    Raises:
        UsageError: nothing was simulated, or given axes for ε of both units.
    """
    return _labelled(plans.frontier(outlook, look.get("ax")), look)


def _result(fitted: Any) -> FittedRun:
    """Return the result of a fitted protocol.

    Raises:
        UsageError: there is none.
    """
    if isinstance(fitted, FittedRun):
        return fitted
    result = getattr(fitted, "result_", None)
    if not isinstance(result, FittedRun):
        raise UsageError(
            f"a picture is drawn of a fitted protocol, not of {type(fitted).__name__}: call fit"
        )
    return result


def _state(result: FittedRun, field: str, what: str) -> Any:
    """Return a field of the server's final state.

    Raises:
        UsageError: the protocol has none, or computed none in this run.
    """
    value = getattr(result.state_, field, None)
    if value is None or (hasattr(value, "__len__") and not len(value)):
        raise UsageError(f"the server of {result.method.name} has no {what} in this run")
    return value


def _labelled(picture: Figure, look: Look) -> Figure:
    """Return a figure with the given texts and size."""
    if "size" in look and "ax" not in look:
        picture.set_size_inches(*look["size"])
    first = look.get("ax", picture.axes[0])
    if "title" in look:
        first.set_title(look["title"])
    if "xlabel" in look:
        first.set_xlabel(look["xlabel"])
    if "ylabel" in look:
        first.set_ylabel(look["ylabel"])
    if "font" in look:
        from matplotlib.text import Text

        for axes in [first] if "ax" in look else picture.axes:
            axes.tick_params(which="both", labelsize=look["font"])
        for text in (first if "ax" in look else picture).findobj(Text):
            text.set_fontsize(look["font"])
    return picture
