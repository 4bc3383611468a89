"""A comparison's table and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from securecluster.app.number_format import printable, shown
from securecluster.app.plots.curves import bounded, labelled, legend_place
from securecluster.app.plots.figure import figure, save
from securecluster.app.report import megabytes

Lines = list[dict[str, Any]]
Point = tuple[int, float, bool]  # round, metric, and whether clusters changed in this round
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
    headings = [heading for heading in rows[0] if not _is_empty(heading, rows)]
    tables = _fitting(headings, rows, console.width)
    tables[0].title = _title(content)
    for table in tables:
        console.print(table)
    units = _units_of_privacy(content["protocols"])
    if units:
        console.print("; ".join(units))
    for line in _together(content):
        console.print(line)


def _is_empty(heading: str, rows: list[dict[str, str]]) -> bool:
    """Return whether a column has a dash for every protocol."""
    return all(row[heading] == NONE for row in rows)


def _title(content: dict[str, Any]) -> str:
    parts = [_simulated(content)]
    known = content.get("true_clusters")
    if known is not None:
        plural = "" if known == 1 else "s"
        parts.append(f"{known} true cluster{plural}")
    parts.append(f"seed {content['seed']}")
    return ", ".join(parts)


def _simulated(content: dict[str, Any]) -> str:
    """Return the data, the scenario and the number of clients."""
    data = printable(content["data"])
    return f"{data} ({content['scenario']}), {content['clients']} clients"


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

    width = 0
    for heading in headings:
        texts = [heading, *(row[heading] for row in rows)]
        width += max(cell_len(text) for text in texts) + 2
    return width


def _table(headings: list[str], rows: list[dict[str, str]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for heading in headings:
        side: Any = "left" if heading == "protocol" else "right"
        table.add_column(heading, justify=side, overflow="fold")
    for row in rows:
        cells = [row[heading] for heading in headings]
        table.add_row(*cells)
    return table


def _units_of_privacy(rows: Lines) -> list[str]:
    """Return which protocols' ε is that of a client and which that of an example.

    The two are not to be compared.
    """
    lines = []
    for unit in ("client", "example"):
        names = [row["protocol"] for row in rows if row.get("dp_unit") == unit]
        if names:
            lines.append(f"ε of one {unit}: {', '.join(names)}")
    return lines


def _together(content: dict[str, Any]) -> list[str]:
    """Return in words what the runs cost together."""
    totals = content.get("together")
    if not totals:
        return []
    lines = [_total_text(total) for total in totals]
    if len(totals) > 1:
        lines.append(
            "ε of a client and ε of an example do not add up: neither figure covers the runs of "
            "the other"
        )
    rows = content["protocols"]
    failed = [row["protocol"] for row in rows if row["error"] is not None]
    without_noise = [row["protocol"] for row in rows if _ended_without_noise(row)]
    if without_noise:
        lines.append(f"without noise, so that ε with it is infinite: {', '.join(without_noise)}")
    if failed:
        lines.append(f"not counted, what was released before it failed: {', '.join(failed)}")
    return lines


def _total_text(total: dict[str, Any]) -> str:
    epsilon = "∞"
    if total["epsilon"] is not None:
        epsilon = f"{total['epsilon']:.4g} at δ = {total['delta']:g}"
    return f"together, ε of one {total['unit']}: {epsilon} ({', '.join(total['protocols'])})"


def _ended_without_noise(row: dict[str, Any]) -> bool:
    return row["error"] is None and row["epsilon"] is None and not row["dp_unit"]


def _cells(row: dict[str, Any], target: float | None, metric: str) -> dict[str, str]:
    """Return a row of the table by heading."""
    cells = {
        "protocol": row["protocol"],
        "clusters": "failed",
        "ARI": _number(row["ari"], 2),
        "before": shown(row[f"{metric}_before"], metric),
        metric: shown(row[metric], metric),
        f"at {target}": _number(row["at_target"], 3),
        "given": _given_text(row.get("given")),
        "rounds": _number(row.get("rounds"), 0),
        "up+down": NONE,
        "servers": NONE,
        "ε": NONE,
        "s": _number(row["seconds"], 1),
    }
    if row["servers"]:
        cells["servers"] = megabytes(row["servers"])
    if row["error"] is None:
        cells["clusters"] = str(row["clusters"])
        cells["up+down"] = megabytes(row["up"] + row["down"])
        cells["ε"] = "∞" if row["epsilon"] is None else f"{row['epsilon']:.4g}"
    return cells


def _given_text(given: dict[str, int] | None) -> str:
    """Return what a protocol was given of the number of clusters."""
    if not given:
        return NONE
    return ", ".join(f"{name}={value}" for name, value in given.items())


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def draw(folder: Path, content: dict[str, Any], histories: dict[str, Lines]) -> list[Path]:
    """Write the picture of the metric (accuracy.png, say) and cost.png, and return their paths.

    A picture that no protocol has numbers for is left out.
    """
    metric, unit = content["metric"], content["unit"]
    title = _simulated(content)
    curves: dict[str, list[Point]] = {}
    given_up: dict[str, int] = {}
    for name, lines in histories.items():
        kept = _kept(lines)
        given_up[name] = len(lines) - len(kept)
        points = _points(kept, metric)
        if points:
            curves[name] = points
    ended = [row for row in content["protocols"] if row[metric] is not None]
    paths = []
    if curves:
        picture = _learning(title, curves, given_up, metric, unit)
        paths.append(save(folder / f"{metric}.png", picture))
    if ended:
        picture = _cost(title, ended, list(histories), metric, unit)
        paths.append(save(folder / "cost.png", picture))
    return paths


def _kept(lines: Lines) -> Lines:
    """Return the rounds of the start that went on.

    Return all rounds where a protocol did not try several starts.
    """
    if not lines or "start" not in lines[-1]:
        return lines
    return [line for line in lines if line.get("start") == lines[-1]["start"]]


def _points(lines: Lines, metric: str) -> list[Point]:
    """Return the points of the rounds that were evaluated."""
    points = []
    for number, line in enumerate(lines, 1):
        if line.get(metric) is not None:
            points.append((number, line[metric], _changed(line)))
    return points


def _changed(line: dict[str, Any]) -> bool:
    return bool(line.get("splits") or line.get("clustered"))


def _style(name: str, names: list[str]) -> dict[str, Any]:
    """Return a protocol's colour and marker, the same in both pictures."""
    k = names.index(name)
    return {"color": f"C{k % 10}", "marker": MARKERS[k % len(MARKERS)]}


def _learning(
    title: str,
    curves: dict[str, list[Point]],
    given_up: dict[str, int],
    metric: str,
    unit: str,
) -> Any:
    """Draw the metric over the rounds of each protocol.

    Args:
        title: of the picture.
        curves: the points of each protocol that has some.
        given_up: for every protocol, how many rounds went into starts that were given up, which
            are not drawn.
        metric: the name of the metric.
        unit: of the metric; empty where it has none.
    """
    names = list(given_up)
    picture, axes = figure(6.8, 4.2)
    for name, points in curves.items():
        rounds, values, changes = zip(*points, strict=True)
        marked = [k for k, changed in enumerate(changes) if changed]
        style = {**_style(name, names), "linewidth": 1.4, "label": _label(name, given_up[name])}
        # a single point without a change keeps its marker, or it would not be seen
        if marked or len(points) > 1:
            style |= {"markevery": marked, "markersize": 6}
        axes.plot(rounds, values, **style)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set(
        title=title,
        xlabel="round (markers: clusters changed)",
        ylabel=f"{labelled(metric, unit)}, mean over clients",
    )
    bounded(axes, metric)
    axes.grid(alpha=0.25)
    axes.legend(loc=legend_place(metric), fontsize=8)
    return picture


def _label(name: str, given_up: int) -> str:
    if not given_up:
        return name
    return f"{name} (kept start; {given_up} rounds in others)"


def _cost(title: str, rows: Lines, names: list[str], metric: str, unit: str) -> Any:
    """Draw the metric of each protocol over the bytes that it sent."""
    picture, axes = figure(6.8, 4.2)
    # a logarithm needs a byte
    sent = [max(1, row["up"] + row["down"]) for row in rows]
    scores = [row[metric] for row in rows]
    for row, x, y in zip(rows, sent, scores, strict=True):
        axes.plot([x], [y], linestyle="none", markersize=7, **_style(row["protocol"], names))
    axes.set(
        title=title,
        xlabel="bytes on the wire, up and down",
        ylabel=f"{labelled(metric, unit)}, mean over clients",
        xscale="log",
    )
    axes.set_xlim(min(sent) / 2, max(sent) * 2)
    axes.tick_params(axis="x", which="minor", labelsize=6)
    axes.margins(y=0.15)
    axes.grid(alpha=0.25)
    label(axes, list(zip(sent, scores, strict=True)), [row["protocol"] for row in rows])
    return picture


def label(axes: Any, spots: list[tuple[float, float]], texts: list[str]) -> list[Any]:
    """Write each text beside its point, and return the texts that were drawn.

    A text goes to the nearest place where it covers no point, no other text and no edge, with a
    thin line when it is far.
    """
    from matplotlib.transforms import Bbox

    axes.figure.draw_without_rendering()  # fixes where points lie
    pixels = axes.transData.transform(spots)
    taken = [Bbox.from_bounds(x - 6, y - 6, 12, 12) for x, y in pixels]
    notes = []
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
            inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
            if inside and not any(box.overlaps(other) for other in taken):
                break
        if max(abs(dx), abs(dy)) > 16:
            axes.annotate(
                "", spot, xytext=(dx, dy), textcoords="offset points", arrowprops=LEADER, zorder=1
            )
        taken.append(box)
        notes.append(note)
    return notes


def _offsets() -> list[tuple[float, float, str]]:
    """Return places around a point, nearest first.

    Returns:
        (right, up) in typographic points, and the text's alignment.
    """
    sides = (
        (1, 0, "left"),
        (-1, 0, "right"),
        (0, 1, "center"),
        (0, -1, "center"),
        (1, 1, "left"),
        (1, -1, "left"),
        (-1, 1, "right"),
        (-1, -1, "right"),
    )
    places = []
    for ring in range(1, 13):
        for x, y, alignment in sides:
            places.append((8.0 * ring * x, 11.0 * ring * y, alignment))
    return places
