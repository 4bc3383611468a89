"""A comparison's table and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from securecluster.app.number_format import printable, shown
from securecluster.app.plots.curves import bounded, labelled
from securecluster.app.plots.figure import figure, save
from securecluster.app.report import megabytes

Lines = list[dict[str, Any]]
NONE = "–"
WHITE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.5}
LEADER = {"arrowstyle": "-", "linewidth": 0.5, "color": "grey"}
MARKERS = "osD^vP*X<>"


def show(content: dict[str, Any], console: Any = None) -> None:
    """Print the comparison as one table, or as several where one is wider than the console.

    A column that has no number for any protocol is left out.
    """
    from rich.console import Console

    console = console or Console(markup=False, highlight=False)
    rows = [_cells(row, content["target"], content["metric"]) for row in content["protocols"]]
    headings = [name for name in rows[0] if any(row[name] != NONE for row in rows)]
    tables = _fitting(headings, rows, console.width)
    tables[0].title = _title(content)
    for table in tables:
        console.print(table)
    units = _protected(content["protocols"])
    if units:
        console.print("; ".join(units))
    for line in _together(content):
        console.print(line)


def _title(content: dict[str, Any]) -> str:
    known = content.get("true_clusters")
    clusters = "" if known is None else f"{known} true cluster{'s' * (known != 1)}, "
    data = printable(content["data"])
    simulated = f"{data} ({content['scenario']}), {content['clients']} clients"
    return f"{simulated}, {clusters}seed {content['seed']}"


def _fitting(headings: list[str], rows: list[dict[str, str]], width: int) -> list[Any]:
    """Return tables of at most `width` cells with all columns, the first of them in each."""
    first, *rest = headings
    groups: list[list[str]] = [[]]
    for heading in rest:
        if groups[-1] and _width([first, *groups[-1], heading], rows) > width:
            groups.append([])
        groups[-1].append(heading)
    return [_table([first, *group], rows) for group in groups]


def _width(headings: list[str], rows: list[dict[str, str]]) -> int:
    """Return the width of a table in cells: a gap of two between columns, and an edge of one."""
    from rich.cells import cell_len

    widths = [
        max(cell_len(text) for text in (name, *(row[name] for row in rows))) for name in headings
    ]
    return sum(widths) + 2 * len(headings)


def _table(headings: list[str], rows: list[dict[str, str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in headings:
        side: Any = "left" if heading == "protocol" else "right"
        table.add_column(heading, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*(row[heading] for heading in headings))
    return table


def _protected(rows: Lines) -> list[str]:
    """Whose ε each protocol's is: of a client and of an example they are not to be compared."""
    units = {
        unit: [row["protocol"] for row in rows if row.get("dp_unit") == unit]
        for unit in ("client", "example")
    }
    return [f"ε of one {unit}: {', '.join(names)}" for unit, names in units.items() if names]


def _together(content: dict[str, Any]) -> list[str]:
    """Return in words what the runs cost together."""
    totals = content.get("together")
    if not totals:
        return []
    lines = []
    for total in totals:
        epsilon = (
            "∞" if total["epsilon"] is None else f"{total['epsilon']:.4g} at δ = {total['delta']:g}"
        )
        lines.append(
            f"together, ε of one {total['unit']}: {epsilon} ({', '.join(total['protocols'])})"
        )
    if len(totals) > 1:
        lines.append(
            "ε of a client and ε of an example do not add up: neither figure covers the runs of "
            "the other"
        )
    rows = content["protocols"]
    clear = [
        row["protocol"]
        for row in rows
        if row["error"] is None and row["epsilon"] is None and not row["dp_unit"]
    ]
    failed = [row["protocol"] for row in rows if row["error"] is not None]
    if clear:
        lines.append(f"without noise, so that ε with it is infinite: {', '.join(clear)}")
    if failed:
        lines.append(f"not counted, what was released before it failed: {', '.join(failed)}")
    return lines


def _cells(row: dict[str, Any], target: float | None, metric: str) -> dict[str, str]:
    """A row of the table by heading."""
    failed = row["error"] is not None
    return {
        "protocol": row["protocol"],
        "clusters": "failed" if failed else str(row["clusters"]),
        "ARI": _number(row["ari"], 2),
        "before": shown(row[f"{metric}_before"], metric),
        metric: shown(row[metric], metric),
        f"at {target}": _number(row["at_target"], 3),
        "told": ", ".join(f"{name}={value}" for name, value in (row.get("told") or {}).items())
        or NONE,
        "rounds": NONE if row.get("rounds") is None else str(row["rounds"]),
        "up+down": NONE if failed else megabytes(row["up"] + row["down"]),
        "servers": megabytes(row["servers"]) if row["servers"] else NONE,
        "ε": NONE if failed else "∞" if row["epsilon"] is None else f"{row['epsilon']:.4g}",
        "s": _number(row["seconds"], 1),
    }


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def draw(folder: Path, content: dict[str, Any], histories: dict[str, Lines]) -> list[Path]:
    """Write accuracy.png (or the picture of another metric) and cost.png, as far as there are
    numbers for them; returns their paths.
    """
    metric, unit = content["metric"], content["unit"]
    title = f"{printable(content['data'])} ({content['scenario']}), {content['clients']} clients"
    kept = {name: _kept(lines) for name, lines in histories.items()}
    curves = {name: points for name, lines in kept.items() if (points := _points(lines, metric))}
    aside = {name: len(histories[name]) - len(lines) for name, lines in kept.items()}
    ended = [row for row in content["protocols"] if row[metric] is not None]
    made = (
        [save(folder / f"{metric}.png", _learning(title, curves, aside, metric, unit))]
        if curves
        else []
    )
    return (
        [*made, save(folder / "cost.png", _cost(title, ended, list(histories), metric, unit))]
        if ended
        else made
    )


def _kept(lines: Lines) -> Lines:
    """Return the rounds of the start that went on.

    Return all rounds where a protocol did not try several starts.
    """
    if not lines or "start" not in lines[-1]:
        return lines
    return [line for line in lines if line.get("start") == lines[-1]["start"]]


def _points(lines: Lines, metric: str) -> list[tuple[int, float, bool]]:
    """(round, metric, whether clusters changed in it) of each round that was evaluated."""
    numbered = enumerate(lines, 1)
    return [
        (t, line[metric], _changed(line)) for t, line in numbered if line.get(metric) is not None
    ]


def _changed(line: dict[str, Any]) -> bool:
    return bool(line.get("splits") or line.get("clustered"))


def _style(name: str, names: list[str]) -> dict[str, Any]:
    """A protocol's colour and marker, the same in both pictures."""
    k = names.index(name)
    return {"color": f"C{k % 10}", "marker": MARKERS[k % len(MARKERS)]}


def _learning(
    title: str,
    curves: dict[str, list[tuple[int, float, bool]]],
    aside: dict[str, int],
    metric: str,
    unit: str,
) -> Any:
    """Draw the metric over the rounds of each protocol.

    Args:
        curves: the points of each protocol that has some.
        aside: for every protocol, how many rounds went into starts that were given up, which are
            not drawn.
    """
    names = list(aside)
    made, axes = figure(6.8, 4.2)
    for name, points in curves.items():
        at = [k for k, (_, _, changed) in enumerate(points) if changed]
        look = {**_style(name, names), "linewidth": 1.4, "label": _label(name, aside)}
        if at or len(points) > 1:
            look |= {"markevery": at, "markersize": 6}
        axes.plot([t for t, _, _ in points], [value for _, value, _ in points], **look)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set(
        title=title,
        xlabel="round (markers: clusters changed)",
        ylabel=f"{labelled(metric, unit)}, mean over clients",
    )
    bounded(axes, metric)
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right" if metric == "accuracy" else "best", fontsize=8)
    return made


def _label(name: str, aside: dict[str, int]) -> str:
    return f"{name} (kept start; {aside[name]} rounds in others)" if aside[name] else name


def _cost(title: str, rows: Lines, names: list[str], metric: str, unit: str) -> Any:
    made, axes = figure(6.8, 4.2)
    # a logarithm needs a byte
    spots = [(max(1, row["up"] + row["down"]), row[metric]) for row in rows]
    for row, (x, y) in zip(rows, spots, strict=True):
        axes.plot([x], [y], linestyle="none", markersize=7, **_style(row["protocol"], names))
    low, high = min(x for x, _ in spots), max(x for x, _ in spots)
    axes.set(
        title=title,
        xlabel="bytes on the wire, up and down",
        ylabel=f"{labelled(metric, unit)}, mean over clients",
        xscale="log",
    )
    axes.set_xlim(low / 2, high * 2)
    axes.tick_params(axis="x", which="minor", labelsize=6)
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
    label(axes, spots, [row["protocol"] for row in rows])
    return made


def label(axes: Any, spots: list[tuple[float, float]], texts: list[str]) -> list[Any]:
    """Write each text beside its point where it covers no point, no other text and no edge, with a
    thin line when it is far.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # fixes where points lie
    pixels = axes.transData.transform(spots)
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in pixels]
    made = []
    for spot, text in zip(spots, texts, strict=True):
        note = axes.annotate(
            text,
            spot,
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=8,
            va="center",
            zorder=4,
            bbox=WHITE,
        )
        note.set_in_layout(False)
        for dx, dy, side in _offsets():
            note.set(position=(dx, dy), ha=side)
            box = note.get_window_extent().padded(1)
            if (
                not any(box.overlaps(other) for other in taken)
                and axes.bbox.contains(*box.min)
                and axes.bbox.contains(*box.max)
            ):
                break
        if max(abs(dx), abs(dy)) > 16:
            axes.annotate(
                "", spot, xytext=(dx, dy), textcoords="offset points", arrowprops=LEADER, zorder=1
            )
        taken.append(box)
        made.append(note)
    return made


def _offsets() -> list[tuple[float, float, str]]:
    """Places around a point, nearest first: (right, up) in typographic points, and the text's
    alignment.
    """
    sides = [
        (1, 0, "left"),
        (-1, 0, "right"),
        (0, 1, "center"),
        (0, -1, "center"),
        (1, 1, "left"),
        (1, -1, "left"),
    ]
    sides += [(-1, 1, "right"), (-1, -1, "right")]
    return [(8.0 * r * x, 11.0 * r * y, side) for r in range(1, 13) for x, y, side in sides]
