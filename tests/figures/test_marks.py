"""What pictures show, in one table: names of axes, entries of legends, ranges, and marks.

Pixels are not compared. Curves of one panel differ in grey, too, and none has a colour that people
with a colour-blindness may confuse with another.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text

from securecluster.figures import curves
from securecluster.figures.dendrogram import dendrogram
from securecluster.figures.looks import COLORS, NAMES, look_of, looks
from securecluster.figures.matrices import graph
from securecluster.reports import html_page
from securecluster.studies import comparison_figures, plan_figure, sweep_figures

GREYS = {"#000000", "#ffffff", *(to_hex(f"0.{k}") for k in (45, 5, 7, 75, 8)), to_hex("grey")}
ROUND = {"clusters": 2, "accuracy": 0.5, "gap": 0.1}
TEST: dict[str, Any] = {"gap": 0.2, "max_norm": 0.5, "mean_norm": 0.1}
HISTORY = [
    {**ROUND, "round": k, "split_tests": [{**TEST, "cluster": c} for c in (0, 1)]} for k in (1, 2)
]
POINTS: Any = [(1, 0.5, False), (2, 0.8, True)]
MERGES = torch.tensor([[0, 1, 1, 2], [2, 3, 2, 3]], dtype=torch.float64)
LINKAGE = SimpleNamespace(ids=range(3), threshold=1.5, merges=MERGES)
RECORD = SimpleNamespace(
    edges=torch.tensor([1.0, 3.0]), threshold=2.0, distance=torch.tensor([[0.0, 1, 3]] * 3)
)


def line(variant: str, unit: str, noise: float, ari: float) -> dict[str, Any]:
    """Return a line of a sweep's summary, whose runs found clusters with an ARI."""
    scores = {"ari": ari, "ari_low": None, "ari_high": None}
    return {
        "variant": variant, "protocol": variant.partition(":")[0], "dp_unit": unit, "noise": noise,
        "target_epsilon": None, "epsilon": 8 / noise, "delta": 1e-5, "runs": 2, "up": 1e6,
        "down": 1e6, **scores,
    }  # fmt: skip


SUMMARY = [line(name, "client", z, 1.0) for name in ("cfl", "flhc", "srfca") for z in (1, 2)]
TWO_UNITS = SUMMARY + [line("signature", "example", z, 1.0) for z in (1, 2)]


def forecast(epsilon: float, ari: tuple[float, float]) -> dict[str, Any]:
    """Return a forecast whose simulations differ in their ARI."""
    least, most = ari
    return {
        "protocol": "cfl", "dp_unit": "client", "epsilon": epsilon, "delta": 1e-5,
        "ari": (least + most) / 2, "ari_least": least, "ari_most": most,
        "accuracy": 0.8, "accuracy_least": 0.8, "accuracy_most": 0.8,
    }  # fmt: skip


def sweep(rows: list[dict[str, Any]], x: str) -> Any:
    return sweep_figures.over(rows, x, ["ari"], {"ari": "ARI"})


NOISE = "noise multiplier z for one {} (σ by clip norm)"
EPSILON = "ε of a run for one {}, at δ = 1e-05"
OF_CURVES = "mean over clients", "halves of cluster 0, as tested", "halves of cluster 1, as tested"
METHODS = {"CFL", "FL+HC", "SR-FCA"}
# a picture; (x, y) of its panels; entries of its legends that must be there; range of y
CASES: dict[str, tuple[Callable[[], Any], list[tuple[str, str]], set[str], tuple[float, float]]] = {
    "learning": (
        lambda: curves.learning(HISTORY, "accuracy", "", ""),
        [("round", "test accuracy")], {OF_CURVES[0]}, (0, 1.02),
    ),
    "separation": (
        lambda: curves.separation(HISTORY),
        [("", "separation gap"), ("round", "norm (solid: max, dashed: mean)")],
        {*OF_CURVES[1:], "cluster 0", "cluster 1"}, (0, 0.2),
    ),
    "dendrogram": (
        lambda: dendrogram(LINKAGE, [0, 0, 1]),
        [("client, coloured by found cluster", "distance")], {"cut at 1.5"}, (0, 2.0),
    ),
    "graph": (
        lambda: graph(RECORD, [0, 0, 1]),
        [
            ("edge, the shortest first", "distance of one-shot models"),
            ("client, by found cluster", "client"),
        ],
        {"joined", "left apart", "λ = 2"}, (0, 3),
    ),
    "comparison": (
        lambda: comparison_figures._learning(
            "", {"cfl": POINTS, "srfca": POINTS}, {"cfl": 0, "srfca": 0}, "accuracy", ""
        ),
        [("round (markers: new clusters, or tuned alone)", "test accuracy,\nmean over clients")],
        {"CFL", "SR-FCA"}, (0, 1.02),
    ),
    "noise": (
        lambda: sweep(TWO_UNITS, "noise"),
        [(NOISE.format("client"), "ARI"), (NOISE.format("example"), "ARI")],
        {*METHODS, "signature"}, (-0.05, 1.03),
    ),
    "epsilon": (
        lambda: sweep(TWO_UNITS, "epsilon"),
        [(EPSILON.format("client"), "ARI"), (EPSILON.format("example"), "ARI")],
        {*METHODS, "signature"}, (-0.05, 1.03),
    ),
    "bytes": (
        lambda: sweep(SUMMARY, "bytes"),
        [("MB of a run, up and down (paler: more noise)", "ARI")], METHODS, (-0.05, 1.03),
    ),
    "plan": (
        lambda: plan_figure.frontier([forecast(2, (0, 1)), forecast(4, (0.9, 1))]),
        [(EPSILON.format("client"), "ARI"), (EPSILON.format("client"), "accuracy")],
        {"CFL"}, (-0.15, 1.02),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def drawn() -> dict[str, Any]:
    return {name: make() for name, (make, *_) in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_axes_are_named_scores_are_in_range_and_marks_are_told_apart(
    name: str, drawn: dict[str, Any]
) -> None:
    _, labels, entries, (low, high) = CASES[name]
    picture = drawn[name]
    panels = [panel for panel in picture.axes if panel.get_label() != "<colorbar>"]
    assert [(panel.get_xlabel(), panel.get_ylabel()) for panel in panels] == labels
    legends = [*picture.legends, *(p.get_legend() for p in panels if p.get_legend())]
    texts = {text.get_text() for legend in legends for text in legend.get_texts()}
    assert entries <= texts and len(texts) < curves.MOST_LINES
    bottom, top = panels[0].get_ylim()
    assert bottom <= low and high <= top and top - bottom <= 1.5 * (high - low)
    for panel in panels:
        named = [line for line in panel.get_lines() if not line.get_label().startswith("_")]
        used = {to_hex(line.get_color()) for line in panel.get_lines()}
        assert used <= {*COLORS, *GREYS}
        for one, other in combinations(named, 2):  # in grey colours may be alike
            assert marks(one) != marks(other), (one.get_label(), other.get_label())


def marks(line: Any) -> tuple[Any, ...]:
    """Return how a curve is drawn, without its colour: its line and its marker."""
    return line.get_linestyle(), line.get_marker()


def test_equal_curves_and_marks_are_all_seen(drawn: dict[str, Any]) -> None:
    first, second = drawn["comparison"].axes[0].get_lines()
    assert first.get_linewidth() > second.get_linewidth(), "the one below is seen at both sides"
    curves_of_panel = drawn["epsilon"].axes[0].get_lines()
    starts = [line.get_xdata()[0] for line in curves_of_panel if len(line.get_xdata()) == 2]
    methods = starts[: len(METHODS)]
    assert all(left < right for left, right in pairwise(methods)), "beside each other"


def test_equal_marks_of_a_plan_are_beside_each_other() -> None:
    rows = [forecast(2, (0.9, 1)) | {"protocol": name} for name in ("cfl", "ifca", "signature")]
    panel = plan_figure.frontier(rows).axes[0]
    places = [line.get_xdata()[0] for line in panel.get_lines()]
    assert places[0] == 2 and all(left < right for left, right in pairwise(places))
    assert places[-1] < 2.5, "nobody reads it at another level"


def test_what_simulations_could_not_tell_is_hollow_and_scores_have_one_range(
    drawn: dict[str, Any],
) -> None:
    ari, accuracy = drawn["plan"].axes
    assert ari.get_ylim() == accuracy.get_ylim()
    lines = [line for line in ari.get_lines() if line.get_markerfacecolor() == "white"]
    hollow = [point for line in lines for point in line.get_xydata().tolist()]
    assert hollow == [[2, 0.5]]
    assert "hollow" in drawn["plan"].get_suptitle()


def test_methods_and_clusters_are_told_apart_without_colour() -> None:
    grey = [look_of(cluster) for cluster in range(9)]
    assert len({look.marker for look in grey}) == len({look.color for look in grey}) == 9
    names = [*NAMES, "cfl:sketch=64", "cfl:sketch=8", "flhc:signature=gradient", "ifca:k=9"]
    assert len({(look.marker, look.line) for look in looks(names).values()}) == len(names)
    in_greys = looks(["flhc", "ifca", "signature", "cfl", "fedavg", "finetune", "local"]).values()
    assert len({look.line for look in in_greys}) == 7, "where a curve has no marker"


# linear sRGB as people without one kind of cones see it (Machado et al. 2009, severity 1)
CONES = {
    "red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
TO_XYZ = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]


def lab(color: str, seen: Any) -> Any:
    """Return CIELAB of a colour that is seen in another way."""
    given = np.array(to_rgb(color))
    linear = np.where(given <= 0.04045, given / 12.92, ((given + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(np.array(TO_XYZ) @ np.clip(np.array(seen) @ linear, 0.001, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("missing", CONES)
def test_colours_are_told_apart_without_one_kind_of_cones(missing: str) -> None:
    seen = [lab(color, CONES[missing]) for color in COLORS]
    # of 2.3 one notices; a pure red and a green of its lightness are at 10 and less
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 12


@pytest.mark.parametrize("name", ["comparison", "noise", "epsilon", "bytes", "plan"])
def test_pictures_of_studies_fit_a_column_as_they_are(name: str, drawn: dict[str, Any]) -> None:
    picture = drawn[name]
    groups = len({round(panel.get_position().x0, 2) for panel in picture.axes})
    assert picture.get_figwidth() == pytest.approx(3.4 * groups)
    picture.canvas.draw()
    for text in picture.findobj(Text):
        if text.get_text() and text.get_visible():
            assert text.get_fontsize() >= 7
    labels = [axis.label for panel in picture.axes for axis in (panel.xaxis, panel.yaxis)]
    for label in [*labels, *picture.legends, *picture.texts]:
        box = label.get_window_extent()
        assert picture.bbox.x0 <= box.x0 + 1 and box.x1 <= picture.bbox.x1 + 1, label


def test_charts_of_pages_name_their_axes_and_differ_in_grey() -> None:
    roc = html_page.curves("c", ("x", "y"), [("a", [(0, 0), (1, 1)]), ("b", [(0, 0), (1, 1)])])
    assert ">x</text>" in roc and ">y</text>" in roc and roc.count("stroke-dasharray") == 2
    bars = html_page.bars("c", ["k"], [("a", [1.0]), ("b", [2.0])])
    assert bars.count('fill="none"') == 1 and bars.count("<rect") == 2
