"""A sweep's pictures: ARI and the clients' score over noise, over ε and over bytes.

Noise and ε for a client never share an axis with those for an example: each unit has panels of its
own. 0 and ∞,
which have no place on a logarithmic axis, stand beyond a break. With fewer than `FEWEST` seeds each
seed is a dot, and no interval pretends to know their spread; with more, bands are bootstrap
intervals of the mean.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from securecluster.core import atomic_files
from securecluster.core.number_format import printable
from securecluster.figures.curves import bounded, labelled
from securecluster.figures.figure import (
    COLUMN,
    COLUMN_TEXT,
    LETTERS_PER_INCH,
    figure,
    in_column,
    titled,
)
from securecluster.figures.looks import UNITS, Look, looks, name_of
from securecluster.studies.sweep_tables import FEWEST, HOLDS, KEYS, groups

Row = dict[str, Any]  # of the summary
AXES = ("noise", "epsilon")  # of levels
# of the files: no dates, the same names inside, and text that stays text
STYLE: Any = {"svg.hashsalt": "securecluster", "svg.fonttype": "none", "pdf.fonttype": 42}
METADATA: dict[str, Any] = {"png": {}, "pdf": {"CreationDate": None}, "svg": {"Date": None}}
PALEST = 0.25  # opacity of the level with the most noise
MOST_TICKS = 9
HANDLE = 9  # letters in place of a legend's line, with its gaps
TICK_GAP = 0.07  # between two ticks, as a share of the axis
LONG = 1000  # from here on powers of ten are written as such
MARGIN = 2.0  # least factor between the outermost level and the place of 0 or infinity
BREAK = 0.16  # of the axis's decades, between a level and the place of 0 or infinity
MEGABYTE = 1e6
COINCIDING = 2  # digits of scores that are drawn at one place
APART = 1.05  # factor between marks that would hide each other
FARTHEST = 3.0  # steps of `APART` from a mark's own place
HEIGHT = 2.2  # inches, of a panel
DPI = 240  # of a PNG
DOT = 9  # area of a seed's dot, in square points


def draw(
    folder: Path, rows: Sequence[Row], title: str, metric: str, unit: str, runs: Sequence[Row] = ()
) -> list[Path]:
    """Write the pictures of a sweep, each as PNG, PDF and SVG.

    Args:
        folder: of the sweep.
        rows: the summary, a line per variant and level.
        title: of the pictures.
        metric: the clients' score.
        unit: of the metric; empty where it has none.
        runs: a line per run, whose scores are dots where there are few seeds.

    Returns:
        The paths of the files.
    """
    done = [row for row in rows if row["runs"]]
    if not done:
        return []
    scores = [name for name in ("ari", metric) if any(row[name] is not None for row in done)]
    if not scores:
        return []
    labels = over_seeds(metric, unit)
    paths = []
    for name in (*AXES, "bytes"):
        picture = over(done, name, scores, labels, runs=runs)
        titled(picture, printable(title))
        paths += save(folder, name, picture)
    return paths


def units(rows: Sequence[Row]) -> list[str]:
    """Return what ε of the runs is about: "client", "example" or both; none where it is 0.

    Args:
        rows: of the summary.
    """
    row_units = {str(row["dp_unit"]) for row in rows if row["dp_unit"] and row["epsilon"]}
    return [unit for unit in UNITS if unit in row_units]


def over_seeds(metric: str, unit: str) -> dict[str, str]:
    """Return the labels of the vertical axes of a sweep's pictures, by score.

    Args:
        metric: the clients' score.
        unit: of the metric; empty where it has none.
    """
    labels = {"ari": "ARI", metric: labelled(metric, unit)}
    return {score: f"{label}, mean over seeds" for score, label in labels.items()}


def over(
    rows: Sequence[Row],
    x: str,
    scores: Sequence[str],
    labels: dict[str, str],
    axes: Any = None,
    *,
    runs: Sequence[Row] = (),
    names: Mapping[str, str] | None = None,
) -> Any:
    """Return a figure of scores over the noise, ε or bytes of runs.

    Args:
        rows: of the summary, with runs.
        x: "noise", "epsilon" or "bytes".
        scores: columns, one for each panel.
        labels: of the scores.
        axes: matplotlib axes for a single score, and for ε of a single unit; None for a new figure.
        runs: a line per run, whose scores are dots where there are few seeds.
        names: of variants, in place of their usual ones.
    """
    row_units = units(rows)
    row_groups = [rows]
    if x in AXES and len(row_units) > 1:
        # a multiplier hides one of a client's samples, or all; what releases nothing has ε = 0
        row_groups = [[row for row in rows if _is_of(row, rows, unit)] for unit in row_units]
    drawn = _Drawn(looks(_variants(rows)), _dots(runs), names or {}, labels)

    def draw_in(panels: Sequence[Sequence[Any]]) -> None:
        for row_group, line in zip(row_groups, panels, strict=True):
            for panel, score in zip(line, scores, strict=True):
                if x in AXES:
                    _draw_levels(panel, row_group, x, score, drawn)
                else:
                    _draw_bytes(panel, row_group, score, drawn)

    if axes is not None:
        draw_in([[axes]])
        axes.legend(fontsize=COLUMN_TEXT)
        return axes.figure
    with in_column():
        picture, panels = panels_of(len(row_groups), len(scores))
        draw_in(panels)
        return with_legend(picture, [panel for line in panels for panel in line])


class _Drawn(NamedTuple):
    """Elements that all panels of a figure share.

    Attributes:
        looks: of the variants.
        dots: runs by variant and level.
        names: of variants, in place of their usual ones.
        labels: of the scores.
    """

    looks: dict[str, Look]
    dots: dict[Any, list[Row]]
    names: Mapping[str, str]
    labels: dict[str, str]

    def name(self, variant: str) -> str:
        """Return what a variant is called."""
        return self.names.get(variant) or name_of(variant)


def _is_of(row: Row, rows: Sequence[Row], unit: str) -> bool:
    """Return whether a line belongs to the panels of a unit: of it, or of no release at all."""
    return row["dp_unit"] == unit or _is_level_line(row, rows)


def _is_level_line(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether the variant of a line releases nothing at any level."""
    variant_rows = [line for line in rows if line["variant"] == row["variant"]]
    return not any(line["epsilon"] for line in variant_rows)


def _dots(runs: Sequence[Row]) -> dict[Any, list[Row]]:
    """Return the runs that ended by the variant and level of their line of the summary."""
    done = [run for run in runs if run["status"] == "done"]
    runs_by_level: dict[Any, list[Row]] = {}
    for group in groups(done, KEYS):
        runs_by_level.setdefault(_key(group[0]), []).extend(group)
    return runs_by_level


def _key(row: Row) -> Any:
    """Return variant and level of a run, or of a line of the summary."""
    target = row.get("target_epsilon")
    # a mean of equal numbers may differ in its last bits
    noise = f"{float(row['noise']):.9g}" if target is None else None
    return row["variant"], target, noise


def axis_label(rows: Sequence[Row], column: str) -> str:
    """Return the label of an axis of levels, with its unit.

    Args:
        rows: of one panel.
        column: "noise" or "epsilon".
    """
    row_units = units(rows)
    if column == "noise":
        unit = f" for one {row_units[0]}" if len(row_units) == 1 else ""
        return f"noise multiplier z{unit} (σ by clip norm)"
    deltas = sorted({float(row["delta"]) for row in rows if row.get("delta")})
    text = f"ε of a run for one {' or '.join(row_units)}" if row_units else "ε of a run"
    if len(deltas) == 1:
        text += f", at δ = {deltas[0]:g}"
    return text


def _draw_levels(panel: Any, rows: Sequence[Row], column: str, score: str, drawn: _Drawn) -> None:
    """Draw a score over the noise or ε.

    Args:
        panel: matplotlib axes.
        rows: of the summary, with runs.
        column: "noise" or "epsilon".
        score: column.
        drawn: what all panels share.
    """
    # a line over the whole axis takes no place on it
    placed = [row for row in rows if column != "epsilon" or not _is_level_line(row, rows)]
    values = [_level(row, column) for row in placed or rows]
    scale, ends = _scale(values)
    shifts = shifts_of(rows, column, score)
    for variant in _variants(rows):
        points = [row for row in rows if row["variant"] == variant and row[score] is not None]
        points.sort(key=lambda row: _level(row, column))
        if not points:
            continue
        if column == "epsilon" and _is_level_line(points[0], rows):
            _draw_level_line(panel, points, score, drawn)
        else:
            places = [scale(_level(row, column)) for row in points]
            _draw_curve(panel, places, points, score, drawn, ends, shifts[variant])
    _finish(panel, axis_label(rows, column), drawn.labels[score], score)
    _ticks(panel, values, ends)
    _mark_breaks(panel, values, ends)


def shifts_of(rows: Sequence[Row], column: str, score: str) -> dict[str, float]:
    """Return how far each variant's marks are set apart from others at their places.

    Args:
        rows: of the summary, with runs.
        column: "noise" or "epsilon".
        score: column.

    Returns:
        Steps of `APART` by variant.
    """
    taken: Counter[tuple[float, float]] = Counter()
    shifts = {}
    for variant in _variants(rows):
        points = [row for row in rows if row["variant"] == variant and row[score] is not None]
        marks = {(_level(row, column), round(float(row[score]), COINCIDING)) for row in points}
        shifts[variant] = max((taken[mark] for mark in marks), default=0)
        taken.update(marks)
    # nobody reads a mark at another level than its own
    most = max(shifts.values(), default=0)
    return {name: shift * min(1.0, FARTHEST / max(1, most)) for name, shift in shifts.items()}


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


def _draw_bytes(panel: Any, rows: Sequence[Row], score: str, drawn: _Drawn) -> None:
    """Draw a score over the bytes of a run, paler with more noise.

    Args:
        panel: matplotlib axes.
        rows: of the summary, with runs.
        score: column.
        drawn: what all panels share.
    """
    levels = sorted({float(row["noise"]) for row in rows})
    everywhere = []
    for variant in _variants(rows):
        look = drawn.looks[variant]
        points = [row for row in rows if row["variant"] == variant and row[score] is not None]
        points.sort(key=lambda row: float(row["noise"]))
        places = [max(1.0, row["up"] + row["down"]) / MEGABYTE for row in points]
        everywhere += places
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
            _draw_dots(panel, position, row, score, drawn)
        # for the legend, in full colour
        panel.plot([], [], look.marker, color=look.color, label=drawn.name(variant))
    text = "MB of a run, up and down"
    if len(levels) > 1:
        text += " (paler: more noise)"
    _finish(panel, text, drawn.labels[score], score)
    _ticks_of_bytes(panel, everywhere)


def _ticks_of_bytes(panel: Any, places: Sequence[float]) -> None:
    """Make an axis of megabytes logarithmic, with numbers that do not overlap.

    Args:
        panel: matplotlib axes.
        places: of all points.
    """
    from matplotlib.ticker import NullLocator

    if not places:
        return
    panel.set_xscale("log")
    low, high = min(places) / 1.5, max(places) * 1.5
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    within: list[float] = []
    for finer in ((1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        steps = [step * 10.0**power for power in range(first, last + 1) for step in finer]
        # one number alone is no scale
        if len(within) < 2:
            within = [step for step in steps if low <= step <= high]
    chosen = _apart(within, [])
    panel.set_xticks(chosen, [_tick_text(step) for step in chosen])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.set_xlim(low, high)


def panels_of(groups: int, scores: int) -> tuple[Any, list[list[Any]]]:
    """Return a figure, and the panels of each group: one for each score, below each other.

    A group is as wide as a column of a paper.
    """
    picture, axes = figure(
        COLUMN * groups, HEIGHT * scores + 0.7, rows=scores, columns=groups, share=False
    )
    flat = [axes] if groups * scores == 1 else list(axes.flat)
    return picture, [flat[group::groups] for group in range(groups)]


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
    decades = math.log10(max(positive, default=1.0) / min(positive, default=1.0))
    # as far on any axis, whatever its decades
    margin = max(MARGIN, 10 ** (BREAK * decades))
    smallest = min(positive, default=1.0) / margin
    greatest = max(positive, default=1.0) * margin
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


def _mark_breaks(panel: Any, values: Sequence[float], ends: Mapping[float, str]) -> None:
    """Mark where the axis is broken, between the levels and 0 or infinity.

    Args:
        panel: matplotlib axes, with a logarithmic axis.
        values: of all points.
        ends: the text at each place of 0 or infinity.
    """
    positive = [value for value in values if 0 < value < math.inf]
    if not positive:
        return
    for position in ends:
        nearest = min(positive) if position < min(positive) else max(positive)
        middle = math.sqrt(position * nearest)
        panel.text(
            middle, 0, "//", transform=panel.get_xaxis_transform(), ha="center", va="center",
            fontsize=9, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6}, zorder=5,
        )  # fmt: skip


def _draw_curve(
    panel: Any,
    places: list[float],
    rows: Sequence[Row],
    score: str,
    drawn: _Drawn,
    ends: Mapping[float, str],
    shift: float,
) -> None:
    """Draw a variant's means, with a band for their interval or a dot for each seed.

    Args:
        panel: matplotlib axes.
        places: of the levels.
        rows: of the levels.
        score: the column.
        drawn: what all panels share.
        ends: places of 0 and infinity, to which no line leads.
        shift: to the right, in steps of `APART`, so that no other variant's marks hide these.
    """
    look = drawn.looks[rows[0]["variant"]]
    means = [row[score] for row in rows]
    below, above = _spread(rows, score)
    options = {"color": look.color, "zorder": look.order}
    line = {"linestyle": look.line, "linewidth": look.width, "marker": look.marker}
    on_scale = [k for k, position in enumerate(places) if position not in ends]
    broken = [k for k, position in enumerate(places) if position in ends]
    # the name is that of the first stretch that is drawn
    name: str | None = drawn.name(rows[0]["variant"])
    for indices in (on_scale, *([k] for k in broken)):
        if not indices:
            continue
        x = [places[k] * APART**shift for k in indices]
        y = [means[k] for k in indices]
        low = [means[k] - below[k] for k in indices]
        high = [means[k] + above[k] for k in indices]
        panel.plot(x, y, markersize=4.5, label=name, **line, **options)
        name = None
        if len(indices) > 1:
            panel.fill_between(x, low, high, alpha=0.15, linewidth=0, **options)
        else:
            panel.vlines(x, low, high, linewidth=3, alpha=0.25, **options)
    for position, row in zip(places, rows, strict=True):
        _draw_dots(panel, position * APART**shift, row, score, drawn)


def _draw_dots(panel: Any, position: float, row: Row, score: str, drawn: _Drawn) -> None:
    """Draw a dot for each seed of a level, where there are too few for an interval.

    Args:
        panel: matplotlib axes.
        position: of the level.
        row: of the level.
        score: the column.
        drawn: what all panels share.
    """
    values = [run[score] for run in drawn.dots.get(_key(row), ()) if run[score] is not None]
    if not 1 < len(values) < FEWEST:
        return
    look = drawn.looks[row["variant"]]
    options = {"s": DOT, "color": look.color, "alpha": 0.45, "linewidths": 0}
    panel.scatter([position] * len(values), values, zorder=look.order - 0.5, **options)


def _draw_level_line(panel: Any, rows: Sequence[Row], score: str, drawn: _Drawn) -> None:
    """Draw a variant that releases nothing, whatever the noise, as a horizontal line.

    Args:
        panel: matplotlib axes.
        rows: of the levels.
        score: the column.
        drawn: what all panels share.
    """
    # with the least noise: what is not released needs none
    quietest = min(rows, key=lambda row: float(row["noise"]))
    look = drawn.looks[quietest["variant"]]
    text = f"{drawn.name(quietest['variant'])} (ε = 0)"
    panel.axhline(
        quietest[score], color=look.color, linestyle=look.line, linewidth=look.width, label=text
    )


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
    panel.set_ylabel(ylabel)
    panel.grid(alpha=0.25)
    if score == "ari":
        panel.axhline(HOLDS, color="0.8", linewidth=0.8, zorder=0)
        panel.text(
            0.01, HOLDS, f"found: {HOLDS:g}", transform=panel.get_yaxis_transform(), va="bottom",
            fontsize=7, color="0.45",
        )  # fmt: skip
        low, _ = panel.get_ylim()
        panel.set_ylim(min(-0.05, low), 1.03)
    else:
        bounded(panel, score)


def with_legend(picture: Any, panels: Sequence[Any]) -> Any:
    """Return the figure with one legend below its panels."""
    entries: dict[str, Any] = {}
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    handles, labels = list(entries.values()), list(entries)
    width = LETTERS_PER_INCH * picture.get_figwidth()
    columns = _legend_columns([len(label) for label in labels], width)
    picture.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=COLUMN_TEXT)
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


def save(folder: Path, name: str, picture: Any) -> list[Path]:
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
            picture.savefig(buffer, format=form, dpi=DPI, metadata=metadata)
        # the places of the first format are those of all, and take a while to find
        picture.set_layout_engine("none")
        path = folder / f"{name}.{form}"
        atomic_files.write_atomic(path, buffer.getvalue())
        paths.append(path)
    return paths
