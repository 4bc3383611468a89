"""A sweep's pictures: ARI and the clients' score over noise, over ε and over bytes."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from securecluster.app.sweep_tables import HOLDS
from securecluster.core import atomic_files
from securecluster.runs.number_format import printable
from securecluster.runs.plots.curves import bounded, labelled
from securecluster.runs.plots.figure import figure

Row = dict[str, Any]  # of the summary
AXES = {"noise": "noise multiplier", "epsilon": "ε of the run"}  # labels of levels
BASELINES = ("fedavg", "finetune", "local")  # which do not cluster
COLORS = (0, 1, 2, 3, 4, 5, 6, 8, 9)  # C7 is grey, which belongs to baselines
COLOR_LINES = ("-", "-.", "--")
GREY_LINES = ("--", ":", "-.")
GREY_MARKERS = "x+12"
MARKERS = "osD^vP*X<>"
# of the files: no dates, the same names inside, and text that stays text
STYLE: Any = {"svg.hashsalt": "securecluster", "svg.fonttype": "none", "pdf.fonttype": 42}
METADATA: dict[str, Any] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
PALEST = 0.25  # opacity of the level with the most noise
MOST_TICKS = 9
LETTERS_PER_INCH = 17.0  # of a legend's texts
HANDLE = 9  # letters in place of a legend's line, with its gaps
TICK_GAP = 0.07  # between two ticks, as a share of the axis
LONG = 1000  # from here on powers of ten are written as such
MARGIN = 2.0  # factor between the outermost level and the place of 0 or infinity


class Look(NamedTuple):
    """How a variant is drawn in all pictures."""

    color: str
    marker: str
    line: str
    width: float
    order: float


def draw(folder: Path, rows: Sequence[Row], title: str, metric: str, unit: str) -> list[Path]:
    """Write the pictures of a sweep, each as PNG, PDF and SVG.

    Args:
        folder: of the sweep.
        rows: the summary, a line per variant and level.
        title: of the pictures.
        metric: the clients' score.
        unit: of the metric; empty where it has none.

    Returns:
        The paths of the files.
    """
    done = [row for row in rows if row["runs"]]
    if not done:
        return []
    scores = [name for name in ("ari", metric) if any(row[name] is not None for row in done)]
    if not scores:
        return []
    labels = {"ari": "ARI", metric: labelled(metric, unit)}
    pictures = {level: over(done, level, scores, labels) for level in (*AXES, "bytes")}
    paths = []
    for name, picture in pictures.items():
        picture.suptitle(printable(title), fontsize=10)
        paths += _save(folder, name, picture)
    return paths


def looks(variants: Sequence[str]) -> dict[str, Look]:
    """Return how each variant is drawn: baselines in grey, all others in colours.

    Args:
        variants: their labels, which begin with a protocol's name.
    """
    styles = {}
    grey = 0
    colored = 0
    for label in variants:
        protocol = label.partition(":")[0]
        if protocol in BASELINES:
            line = GREY_LINES[grey % len(GREY_LINES)]
            marker = GREY_MARKERS[grey % len(GREY_MARKERS)]
            styles[label] = Look("0.5", marker, line, 1.2, 1)
            grey += 1
        else:
            marker = MARKERS[colored % len(MARKERS)]
            # colours that come again have another line
            line = COLOR_LINES[colored // len(COLORS) % len(COLOR_LINES)]
            color = COLORS[colored % len(COLORS)]
            styles[label] = Look(f"C{color}", marker, line, 1.6, 2)
            colored += 1
    return styles


def over(
    rows: Sequence[Row], x: str, scores: Sequence[str], labels: dict[str, str], axes: Any = None
) -> Any:
    """Return a figure of scores over the noise, ε or bytes of runs.

    Args:
        rows: of the summary, with runs.
        x: "noise", "epsilon" or "bytes".
        scores: columns, one for each panel.
        labels: of the scores.
        axes: matplotlib axes for a single score; None for a new figure.
    """
    picture, panels = _panels(len(scores)) if axes is None else (axes.figure, [axes])
    if x in AXES:
        _draw_levels(panels, rows, x, scores, labels)
    else:
        _draw_bytes(panels, rows, scores, labels)
    if axes is None:
        return _with_legend(picture, panels)
    axes.legend(fontsize=8)
    return picture


def _draw_levels(
    panels: Sequence[Any],
    rows: Sequence[Row],
    column: str,
    scores: Sequence[str],
    labels: dict[str, str],
) -> None:
    """Draw the scores over the noise or ε.

    Args:
        panels: matplotlib axes, one for each score.
        rows: of the summary, with runs.
        column: "noise" or "epsilon".
        scores: columns.
        labels: of the scores.
    """
    scale, ends = _scale([_level(row, column) for row in rows])
    for panel, score in zip(panels, scores, strict=True):
        for label, look in looks(_variants(rows)).items():
            points = [row for row in rows if row["variant"] == label and row[score] is not None]
            points.sort(key=lambda row: _level(row, column))
            if points and column == "epsilon" and _level(points[-1], column) == 0:
                _draw_level_line(panel, points, score, look, label)
            else:
                places = [scale(_level(row, column)) for row in points]
                _draw_curve(panel, places, points, score, look, label)
        _finish(panel, AXES[column], labels[score], score)
        _ticks(panel, [_level(row, column) for row in rows], ends)


def _level(row: Row, column: str) -> float:
    """Return where a line of the summary stands on the horizontal axis.

    A variant that releases nothing spends no ε; in a sweep over targets it stands at the target,
    whose noise its clients train with.

    Args:
        row: of the summary.
        column: "noise" or "epsilon".
    """
    target = row.get("target_epsilon")
    if column == "epsilon" and row[column] == 0 and target is not None:
        return float(target)
    return float(row[column])


def _draw_bytes(
    panels: Sequence[Any], rows: Sequence[Row], scores: Sequence[str], labels: dict[str, str]
) -> None:
    """Draw the scores over the bytes of a run, paler with more noise.

    Args:
        panels: matplotlib axes, one for each score.
        rows: of the summary, with runs.
        scores: columns.
        labels: of the scores.
    """
    levels = sorted({float(row["noise"]) for row in rows})
    for panel, score in zip(panels, scores, strict=True):
        for label, look in looks(_variants(rows)).items():
            points = [row for row in rows if row["variant"] == label and row[score] is not None]
            points.sort(key=lambda row: float(row["noise"]))
            places = [max(1.0, row["up"] + row["down"]) for row in points]
            values = [row[score] for row in points]
            options = {"color": look.color, "zorder": look.order}
            panel.plot(places, values, linewidth=0.6, alpha=0.4, **options)
            for position, row in zip(places, points, strict=True):
                share = levels.index(float(row["noise"])) / max(1, len(levels) - 1)
                opacity = 1 - (1 - PALEST) * share
                spread = _spread([row], score)
                panel.errorbar(
                    [position], [row[score]], yerr=spread, fmt=look.marker, alpha=opacity,
                    elinewidth=0.8, markersize=6, **options,
                )  # fmt: skip
            # for the legend, in full colour
            panel.plot([], [], look.marker, color=look.color, label=label)
        panel.set_xscale("log")
        text = "bytes of a run, up and down (paler: more noise)"
        _finish(panel, text, labels[score], score)


def _panels(count: int) -> tuple[Any, list[Any]]:
    """Return a figure with some panels beside each other."""
    picture, axes = figure(4.6 * count + 0.4, 4.4, columns=count)
    if count == 1:
        return picture, [axes]
    return picture, list(axes)


def _variants(rows: Sequence[Row]) -> list[str]:
    """Return the labels of the variants, in their order."""
    return list(dict.fromkeys(row["variant"] for row in rows))


def _scale(values: Sequence[float]) -> tuple[Callable[[float], float], dict[float, str]]:
    """Return places on a logarithmic axis that has room for 0 and for infinity.

    Args:
        values: of all points.

    Returns:
        A function from a value to its place, and the text at each place that is no number.
    """
    positive = [value for value in values if 0 < value < math.inf]
    smallest = min(positive, default=1.0) / MARGIN
    greatest = max(positive, default=1.0) * MARGIN
    ends = {}
    if any(value == 0 for value in values):
        ends[smallest] = "0"
    if any(math.isinf(value) for value in values):
        ends[greatest] = "∞"

    def place(value: float) -> float:
        return min(max(value, smallest), greatest)

    return place, ends


def _ticks(panel: Any, values: Sequence[float], ends: dict[float, str]) -> None:
    """Make an axis logarithmic, with ticks at the levels, and at the places of 0 and infinity.

    Args:
        panel: matplotlib axes.
        values: of all points.
        ends: the text at each place of 0 or infinity.
    """
    from matplotlib.ticker import NullLocator

    panel.set_xscale("log")
    low, high = panel.get_xlim()
    levels = sorted({float(f"{value:.2g}") for value in values if 0 < value < math.inf})
    # the ε of many variants and levels
    if len(levels) > MOST_TICKS:
        levels = _powers_of_ten(levels)
    numbers = _apart(levels, [*ends])
    texts = [_tick_text(number) for number in numbers]
    panel.set_xticks([*numbers, *ends], [*texts, *ends.values()])
    # between a level and 0 or infinity there is no scale
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(low, high)


def _powers_of_ten(levels: Sequence[float]) -> list[float]:
    """Return the powers of ten between the levels, or the levels where there are hardly any."""
    first = math.ceil(math.log10(min(levels)))
    last = math.floor(math.log10(max(levels)))
    if last <= first:
        return list(levels)
    return [10.0**exponent for exponent in range(first, last + 1)]


def _apart(levels: Sequence[float], taken: Sequence[float]) -> list[float]:
    """Return the levels that have a tick, with room for their texts.

    Args:
        levels: positive, ascending.
        taken: places that have a text already.
    """
    everything = [*levels, *taken]
    if not levels:
        return []
    width = math.log10(max(everything) / min(everything))
    chosen: list[float] = []
    for level in levels:
        neighbours = [*taken, *chosen[-1:]]
        distances = [abs(math.log10(level / neighbour)) for neighbour in neighbours]
        if min(distances, default=math.inf) >= TICK_GAP * width:
            chosen.append(level)
    return chosen


def _tick_text(level: float) -> str:
    """Return a level as the text of a tick."""
    exponent = math.log10(level)
    if level >= LONG and exponent.is_integer():
        return f"$10^{{{int(exponent)}}}$"
    return f"{level:g}"


def _draw_curve(
    panel: Any, places: list[float], rows: Sequence[Row], score: str, look: Look, label: str
) -> None:
    """Draw a variant's means with a band for their interval.

    Args:
        panel: matplotlib axes.
        places: of the levels.
        rows: of the levels.
        score: the column.
        look: of the variant.
        label: of the legend.
    """
    means = [row[score] for row in rows]
    options = {"color": look.color, "zorder": look.order}
    line = {"linestyle": look.line, "linewidth": look.width, "marker": look.marker}
    panel.plot(places, means, markersize=4.5, label=label, **line, **options)
    below, above = _spread(rows, score)
    low = [mean - length for mean, length in zip(means, below, strict=True)]
    high = [mean + length for mean, length in zip(means, above, strict=True)]
    panel.fill_between(places, low, high, alpha=0.15, linewidth=0, **options)


def _draw_level_line(panel: Any, rows: Sequence[Row], score: str, look: Look, label: str) -> None:
    """Draw a variant that releases nothing, whatever the noise, as a horizontal line.

    Args:
        panel: matplotlib axes.
        rows: of the levels.
        score: the column.
        look: of the variant.
        label: of the legend.
    """
    # with the least noise: what is not released needs none
    quietest = min(rows, key=lambda row: float(row["noise"]))
    mean = quietest[score]
    text = f"{label} (ε = 0)"
    panel.axhline(mean, color=look.color, linestyle=look.line, linewidth=look.width, label=text)


def _spread(rows: Sequence[Row], score: str) -> tuple[list[float], list[float]]:
    """Return how far the interval of each level reaches below and above its mean.

    It ends where the ARI and the accuracy end, at 1, and the accuracy at 0.

    Args:
        rows: of the levels.
        score: the column.
    """
    below = []
    above = []
    for row in rows:
        mean = row[score]
        low = row[f"{score}_low"]
        high = row[f"{score}_high"]
        if low is None:
            low = high = mean
        if score in ("ari", "accuracy"):
            high = min(high, max(1.0, mean))
        if score == "accuracy":
            low = max(low, 0.0)
        below.append(max(mean - low, 0.0))
        above.append(max(high - mean, 0.0))
    return below, above


def _finish(panel: Any, xlabel: str, ylabel: str, score: str) -> None:
    """Label a panel, and bound its vertical axis.

    Args:
        panel: matplotlib axes.
        xlabel: of the horizontal axis.
        ylabel: of the vertical axis.
        score: the column.
    """
    panel.set_xlabel(xlabel)
    panel.set_ylabel(f"{ylabel}, mean over seeds")
    panel.grid(alpha=0.25)
    if score == "ari":
        panel.axhline(HOLDS, color="0.8", linewidth=0.8, zorder=0)
        low, _ = panel.get_ylim()
        panel.set_ylim(min(-0.05, max(low, -0.6)), 1.03)
    else:
        bounded(panel, score)


def _with_legend(picture: Any, panels: Sequence[Any]) -> Any:
    """Return the figure with one legend below its panels."""
    handles, labels = panels[0].get_legend_handles_labels()
    width = LETTERS_PER_INCH * picture.get_figwidth()
    columns = _legend_columns([len(label) for label in labels], width)
    picture.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    return picture


def _legend_columns(lengths: Sequence[int], width: float) -> int:
    """Return the number of columns of a legend, at most 4, that fit a figure.

    Args:
        lengths: of its texts, in letters.
        width: of the figure, in letters.
    """
    for columns in (4, 3, 2):
        height = math.ceil(len(lengths) / columns)
        longest = [max(lengths[k : k + height]) for k in range(0, len(lengths), height)]
        if sum(longest) + HANDLE * columns <= width:
            return min(columns, len(lengths))
    return 1


def _save(folder: Path, name: str, picture: Any) -> list[Path]:
    """Write a figure in all formats, and return the paths.

    Args:
        folder: of the files.
        name: without ending.
        picture: a matplotlib figure.

    Raises:
        RunFolderError: a file cannot be written.
    """
    from matplotlib import rc_context

    paths = []
    for form, metadata in METADATA.items():
        buffer = io.BytesIO()
        with rc_context(STYLE):
            picture.savefig(buffer, format=form, dpi=120, metadata=metadata)
        # the places of the first format are those of all, and take a while to find
        picture.set_layout_engine("none")
        path = folder / f"{name}.{form}"
        atomic_files.write_atomic(path, buffer.getvalue())
        paths.append(path)
    return paths
