"""A comparison's table and pictures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from securecluster.core.number_format import NONE, fixed, printable, shown
from securecluster.figures.curves import bounded, kept, labelled
from securecluster.figures.figure import COLUMN, Drawing, figure, in_column, save_all, titled
from securecluster.figures.looks import GREY, looks, name_of
from securecluster.privacy import run_secret
from securecluster.reports.report import megabytes
from securecluster.results.scores import SCORES
from securecluster.studies import sweep_figures
from securecluster.studies.sweep_costs import NOT_COUNTED, TWO_UNITS

Content = dict[str, Any]
Row = dict[str, Any]  # of `protocols` or `together` in compare.json
Lines = list[dict[str, Any]]
Cells = dict[str, str]  # by heading
HEIGHT = 3.2  # inches
THIN = 1.4  # points of a line
WIDER = 2.0  # points more for each curve that lies on it
Point = tuple[int, float, bool]  # round, metric, and whether clusters changed in this round


def show(content: Content, console: Any = None) -> None:
    """Print the comparison as one table, or as several where one is wider than the console.

    A column that has no number for any protocol is left out.

    Args:
        content: content of compare.json.
        console: rich's; None is one on standard output.
    """
    from securecluster.reports import terminal

    if console is None:
        # names of clients and data may contain what looks like markup
        console = terminal.Console(markup=False)
    target = content["target"]
    metric = content["metric"]
    of_runs = [_cells(row, target, metric) for row in content["protocols"]]
    tables = [(_title(content), of_runs)]
    if any(row.get("below_baseline") is not None for row in content["protocols"]):
        of_scores = [_score_cells(row, metric) for row in content["protocols"]]
        tables.append(("means of clients' scores", of_scores))
    for title, rows in tables:
        headings = [heading for heading in rows[0] if not _is_empty(heading, rows)]
        cells = [[row[heading] for heading in headings] for row in rows]
        for table in terminal.fitting(headings, cells, title, console.width):
            console.print(table)
    units = _units_of_privacy(content)
    if units:
        console.print("; ".join(units))
    for line in _together(content):
        console.print(line)
    if content.get("reproducible_keys"):
        console.print(f"not covered: {run_secret.FROM_SEED}")


def _is_empty(heading: str, rows: list[Cells]) -> bool:
    """Return whether a column has a dash for every protocol."""
    return all(row[heading] == NONE for row in rows)


def _title(content: Content) -> str:
    """Return the title of the table.

    Args:
        content: content of compare.json.
    """
    phrases = [_simulated(content)]
    true_clusters = content.get("true_clusters")
    if true_clusters == 1:
        phrases.append("1 true cluster")
    elif true_clusters is not None:
        phrases.append(f"{true_clusters} true clusters")
    if content["seed"] is not None:
        phrases.append(f"seed {content['seed']}")
    return ", ".join(phrases)


def _simulated(content: Content) -> str:
    """Return the data, the scenario and the number of clients in words.

    Args:
        content: content of compare.json.
    """
    data = printable(content["data"])
    scenario = content["scenario"]
    return f"{data} ({scenario}), {content['clients']} clients"


def _units_of_privacy(content: Content) -> list[str]:
    """Return which protocols' ε is that of a client and which that of an example, and δ of both.

    Args:
        content: content of compare.json.
    """
    # both stand in one column, although the two cannot be compared
    deltas = {cost["unit"]: cost["delta"] for cost in content.get("together", [])}
    lines = []
    for unit in ("client", "example"):
        rows = content["protocols"]
        names = [row["protocol"] for row in rows if row.get("dp_unit") == unit]
        delta_text = f", at δ = {deltas[unit]:g}" if unit in deltas else ""
        if names:
            lines.append(f"ε of one {unit}{delta_text}: {', '.join(names)}")
    return lines


def _together(content: Content) -> list[str]:
    """Return in words what the runs cost together.

    Args:
        content: content of compare.json.
    """
    totals = content.get("together")
    if not totals:
        return []
    lines = [_cost_text(cost) for cost in totals]
    if len(totals) > 1:
        lines.append(TWO_UNITS)
    rows = content["protocols"]
    failed = [row["protocol"] for row in rows if row["error"] is not None]
    without_noise = [row["protocol"] for row in rows if _ended_without_noise(row)]
    if without_noise:
        lines.append(f"without noise, so that ε with it is infinite: {', '.join(without_noise)}")
    if failed:
        lines.append(f"{NOT_COUNTED}: {', '.join(failed)}")
    return lines


def _cost_text(cost: Row) -> str:
    """Return the joint ε of the runs of one unit of privacy in words.

    Args:
        cost: an entry of `together` in compare.json.
    """
    epsilon = _epsilon_text(cost["epsilon"])
    if cost["epsilon"] is not None:
        epsilon += f" at δ = {cost['delta']:g}"
    names = ", ".join(cost["protocols"])
    return f"together, ε of one {cost['unit']}: {epsilon} ({names})"


def _epsilon_text(epsilon: float | None) -> str:
    # compare.json has null for infinite
    if epsilon is None:
        return "∞"
    return f"{epsilon:.4g}"


def _ended_without_noise(row: Row) -> bool:
    if row["error"] is not None:
        return False
    return row["epsilon"] is None and not row["dp_unit"]


def _cells(row: Row, target: float | None, metric: str) -> Cells:
    """Return a row of the table by heading.

    Args:
        row: an entry of `protocols` in compare.json.
        target: score that `at_target` counts clients by; None where the metric has none.
        metric: the metric's name.
    """
    cells = {
        "protocol": row["protocol"],
        "clusters": "failed",
        "ARI": fixed(row["ari"], 2),
        "before": shown(row[f"{metric}_before"], metric),
        metric: shown(row[metric], metric),
        f"at {target}": fixed(row["at_target"], 3),
        "given": _given_text(row.get("given")),
        "rounds": fixed(row.get("rounds"), 0),
        "up+down": NONE,
        "servers": NONE,
        "ε": NONE,
        "s": fixed(row["seconds"], 1),
    }
    if row["servers"]:
        cells["servers"] = megabytes(row["servers"])
    # a failed run has no numbers, and its epsilon of null is not infinite
    if row["error"] is None:
        cells["clusters"] = str(row["clusters"])
        cells["up+down"] = megabytes(row["up"] + row["down"])
        cells["ε"] = _epsilon_text(row["epsilon"])
    return cells


def _score_cells(row: Row, metric: str) -> Cells:
    """Return the scores of a row by heading, with the baseline and how many models are below it.

    Args:
        row: an entry of `protocols` in compare.json.
        metric: the metric's name.
    """
    scores = row.get("scores") or {}
    cells = {
        "protocol": row["protocol"],
        metric: shown(row[metric], metric),
        "baseline": shown(row.get(f"{metric}_baseline"), metric),
        "below": fixed(row.get("below_baseline"), 0),
    }
    # one that failed has none
    own = sorted(scores.keys() - set(SCORES))
    further = {name.replace("_", " "): fixed(scores.get(name), 3) for name in (*SCORES, *own)}
    return cells | {name: text for name, text in further.items() if name not in cells}


def _given_text(options: dict[str, int] | None) -> str:
    """Return in words which options gave a protocol the number of clusters."""
    if not options:
        return NONE
    texts = [f"{name}={value}" for name, value in options.items()]
    return ", ".join(texts)


def draw(
    folder: Path, content: Content, histories: dict[str, Lines], missing: bool = False
) -> list[Path]:
    """Write the pictures of a comparison.

    One shows the metric over the rounds (accuracy.png, say), the other the metric against the
    bytes (cost.png). A picture that no protocol has numbers for is left out, and one that cannot be
    drawn or written is a warning.

    Args:
        folder: of the comparison.
        content: content of compare.json.
        histories: the lines of each protocol's rounds, by its name.
        missing: draw those that have no file yet.

    Returns:
        The paths of the pictures.
    """
    metric = content["metric"]
    unit = content["unit"]
    title = _simulated(content)
    if content["seed"] is not None:
        title += f", seed {content['seed']}"
    curves: dict[str, list[Point]] = {}
    given_up: dict[str, int] = {}
    for name, lines in histories.items():
        continued = kept(lines)
        given_up[name] = len(lines) - len(continued)
        points = _points(continued, metric)
        if points:
            curves[name] = points + _tuned(name, points[-1], content)
    ended = [row for row in content["protocols"] if row[metric] is not None]
    drawings: dict[str, Drawing] = {}
    if curves:
        drawings[f"{metric}.png"] = partial(_learning, title, curves, given_up, metric, unit)
    if ended:
        drawings["cost.png"] = partial(_cost, title, ended, metric, unit)
    return save_all(folder, drawings, missing)


def _points(lines: Lines, metric: str) -> list[Point]:
    """Return the points of the rounds that were evaluated.

    Args:
        lines: a line for each round.
        metric: the metric's name.
    """
    points = []
    # rounds are counted here, since a line's own number also counts those of other starts
    for number, line in enumerate(lines, 1):
        if line.get(metric) is not None:
            points.append((number, line[metric], _clusters_changed(line)))
    return points


def _tuned(name: str, last: Point, content: Content) -> list[Point]:
    """Return the point of a run's result, if clients changed their models after the last round.

    Args:
        name: of the protocol.
        last: the point of the last round.
        content: content of compare.json.
    """
    metric = content["metric"]
    values = [row[metric] for row in content["protocols"] if row["protocol"] == name]
    return [(last[0] + 1, value, True) for value in values if value not in (None, last[1])]


def _clusters_changed(line: dict[str, Any]) -> bool:
    return bool(line.get("splits") or line.get("clustered"))


def _style(name: str, names: list[str]) -> dict[str, Any]:
    """Return a protocol's colour, marker and line, the same in all pictures.

    Args:
        name: of the protocol.
        names: of all protocols that are compared.
    """
    look = looks(names)[name]
    # dashes above a curve of equal values show both
    above = 3 if look.color == GREY else look.order
    return {
        "color": look.color, "marker": look.marker, "linestyle": look.line, "zorder": above,
    }  # fmt: skip


def _learning(
    title: str, curves: dict[str, list[Point]], given_up: dict[str, int], metric: str, unit: str
) -> Any:
    """Return a figure of the metric over the rounds of each protocol.

    Args:
        title: of the picture.
        curves: points of each protocol that has some.
        given_up: for every protocol, the number of rounds of starts that were given up; these
            rounds are not drawn.
        metric: the metric's name.
        unit: of the metric; empty where it has none.
    """
    names = list(given_up)
    drawn = list(curves.values())
    with in_column():
        picture, axes = figure(COLUMN, HEIGHT)
        for position, (name, points) in enumerate(curves.items()):
            width = THIN + WIDER * _hidden_by(points, drawn[position + 1 :])
            style = {**_style(name, names), "linewidth": width}
            _draw_curve(axes, points, style, _label(name, given_up[name]))
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.set(
            xlabel="round (markers: new clusters, or tuned alone)",
            ylabel=f"{labelled(metric, unit)},\nmean over clients",
        )
        titled(picture, title)
        bounded(axes, metric)
        axes.grid(alpha=0.25)
        return sweep_figures.with_legend(picture, [axes])


def _hidden_by(points: list[Point], later: list[list[Point]]) -> int:
    """Return how many later curves lie on this one: it is drawn wider, and seen at both sides."""
    places = [(number, round(value, 2)) for number, value, _ in points]
    return sum(places == [(number, round(value, 2)) for number, value, _ in own] for own in later)


def _draw_curve(axes: Any, points: list[Point], style: dict[str, Any], label: str) -> None:
    """Draw one protocol's metric, with a marker in each round that changed its clusters.

    Args:
        axes: matplotlib axes over rounds.
        points: of the rounds that were evaluated, at least one.
        style: colour and marker.
        label: of the legend.
    """
    rounds, values, changes = zip(*points, strict=True)
    marked = [position for position, changed in enumerate(changes) if changed]
    options = {**style, "label": label}
    # a single point without a change has its marker, or it would be invisible
    if marked:
        options["markevery"] = marked
        options["markersize"] = 6
    elif len(points) > 1:
        options["marker"] = ""  # nor does the legend show one that is on no curve
    axes.plot(rounds, values, **options)


def _label(name: str, given_up: int) -> str:
    """Return a protocol's entry in the legend.

    Args:
        name: of the protocol.
        given_up: the number of its rounds that are not drawn.
    """
    if not given_up:
        return name_of(name)
    return f"{name_of(name)} (kept start; {given_up} rounds in others)"


def _cost(title: str, rows: list[Row], metric: str, unit: str) -> Any:
    """Return a figure of the metric of each protocol over the bytes that it sent.

    Args:
        title: of the picture.
        rows: entries of `protocols` in compare.json that have the metric.
        metric: the metric's name.
        unit: of the metric; empty where it has none.
    """
    # as a sweep of one level and one seed, without an interval
    of_a_sweep = {"noise": 0.0, f"{metric}_low": None, f"{metric}_high": None}
    lines = [{**row, **of_a_sweep, "variant": row["protocol"]} for row in rows]
    labels = {metric: f"{labelled(metric, unit)}, mean over clients"}
    picture = sweep_figures.over(lines, "bytes", [metric], labels)
    titled(picture, title)
    (axes,) = picture.axes
    axes.autoscale(axis="y")  # points that are close are told apart
    axes.margins(y=0.15)
    return picture
