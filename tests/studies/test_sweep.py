"""`securecluster sweep` and `securecluster.sweep` as a user meets them, and breaks them."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from scipy import stats

import securecluster
from securecluster import CFL, FLHC, FedAvg, Federation, LabelSwap
from securecluster.cli.main import main
from securecluster.errors import RunFolderError, SecureClusterWarning, UpdateError, UsageError
from securecluster.figures import looks
from securecluster.folders import run_folder
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import Settings
from securecluster.protocols.common.averages.averaging import AveragingState
from securecluster.protocols.registry import PROTOCOLS
from securecluster.studies import (
    sweep,
    sweep_latex,
    sweep_pairs,
    sweep_plan,
    sweep_report,
    sweep_runner,
    sweep_tables,
    worker_pool,
)
from securecluster.studies import sweep_figures as plots
from securecluster.studies.sweep_runner import Parallel, _Clock

DEALT = {"clients": 6, "clusters": 2, "samples": 40}
SHARED = {"model": "linear", "rounds": 2, "clip": 1.0}
SMALL = [
    "--clients", "6", "--clusters", "2", "--samples", "40", "--model", "linear",
    "--rounds", "2", "--jobs", "1",
]  # fmt: skip


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders hold no pictures: drawing them takes longer than the runs."""
    monkeypatch.setattr(plots, "draw", lambda *_: [])


def _table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def _timeless(path: Path) -> list[dict[str, str]]:
    """Return the lines of runs.csv without their clocks."""
    lines = _table(path)
    for line in lines:
        del line["seconds"]
    return lines


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep that nobody disturbed, without pictures: 2 variants, 2 levels and 2 seeds."""
    out = tmp_path_factory.mktemp("whole") / "out"
    arguments = ["fedavg", "local", *SMALL, "--clip", "1", "--noise", "0.5", "0", "--seeds", "2"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plots, "draw", lambda *_: [])
        assert main(["sweep", *arguments, "--seed", "3", "--quiet", "--out", str(out)]) == 0
    return out


def test_each_run_is_the_one_that_fit_makes(whole: Path) -> None:
    lines = _table(whole / "runs.csv")
    cells = [(line["seed"], line["noise"], line["variant"]) for line in lines]
    assert cells == [
        (seed, noise, name)
        for seed in ("3", "4")
        for noise in ("0.0", "0.5")
        for name in ("fedavg", "local")
    ]
    federation = Federation.simulate("digits", scenario=LabelSwap(2), clients=6, samples=40, seed=4)
    settings = Settings(transcript="none", threads=1)
    fitted = FedAvg(model="linear", rounds=2, clip=1.0, noise=0.5).fit(federation, settings)
    (line,) = [x for x in lines if (x["seed"], x["noise"], x["variant"]) == ("4", "0.5", "fedavg")]
    assert float(line["accuracy"]) == fitted.scores_.mean()
    assert float(line["worst_accuracy"]) == fitted.scores_.min() < fitted.scores_.mean()
    frame = fitted.to_frame("scores")
    for name in ("accuracy_baseline", "roc_auc", "log_loss"):
        assert float(line[name]) == pytest.approx(frame[name].mean())
    below = frame["accuracy"] < frame["accuracy_baseline"]
    assert int(line["below_baseline"]) == below.sum() > 0
    of_level = [x for x in lines if x["noise"] == "0.5" and x["variant"] == "fedavg"]
    (mean,) = [
        x for x in _table(whole / "summary.csv") if x["noise"] == "0.5" and x["variant"] == "fedavg"
    ]
    for name in ("below_baseline", "f1"):
        expected = np.mean([float(x[name]) for x in of_level])
        assert float(mean[name]) == pytest.approx(expected)
    assert (int(line["up"]), int(line["down"])) == (fitted.bytes_["up"], fitted.bytes_["down"])
    assert float(line["epsilon"]) == pytest.approx(gaussian_epsilon(math.sqrt(2) / 0.5, 1e-5))
    assert (line["mechanism"], line["clip"], line["rounds"]) == ("local", "1.0", "2")
    assert (line["status"], line["reason"], line["ari"]) == ("done", "", "0.0")
    epsilons = {float(line["epsilon"]) for line in lines if line["noise"] == "0.0"}
    assert epsilons == {math.inf, 0}


def test_csv_and_parquet_hold_the_same_numbers(whole: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    for name in ("runs", "summary"):
        table = parquet.read_table(whole / f"{name}.parquet")
        lines = _table(whole / f"{name}.csv")
        assert table.column_names == list(lines[0])
        for column in table.column_names:
            for value, text in zip(table[column].to_pylist(), lines, strict=True):
                if value is None:
                    assert text[column] == ""
                elif isinstance(value, str | bool):
                    assert text[column] == str(value)
                else:
                    assert float(text[column]) == value
    types = {field.name: str(field.type) for field in parquet.read_schema(whole / "runs.parquet")}
    assert (types["seed"], types["noise"], types["variant"]) == ("int64", "double", "string")


def test_pictures_are_png_pdf_and_svg_without_a_date(tmp_path: Path) -> None:
    rows = _grid({0: (1, 0.9), 0.1: (0.5, 0.2)})
    for row in rows:
        row |= {"up": 1000, "down": 10, "accuracy": 0.5}
    baseline = [row | {"variant": "local", "epsilon": 0.0, "ari": 0.0} for row in rows]
    means = sweep_tables.summary(rows + baseline, "accuracy")
    paths = plots.draw(tmp_path, means, "a title", "accuracy", "")
    names = ("noise", "epsilon", "bytes")
    wanted = [tmp_path / f"{name}.{form}" for name in names for form in ("png", "pdf", "svg")]
    assert paths == wanted
    assert {path.name for path in tmp_path.iterdir()} == set(run_folder.SWEEP_PICTURES)
    for png, pdf, svg in (wanted[:3], wanted[3:6], wanted[6:]):
        assert png.read_bytes().startswith(b"\x89PNG")
        assert pdf.read_bytes().startswith(b"%PDF") and b"CreationDate" not in pdf.read_bytes()
        text = svg.read_text()
        assert "<dc:date>" not in text
        assert ">CFL</text>" in text, "text stays text, which can be searched and edited"
    epsilon = (tmp_path / "epsilon.svg").read_text()
    assert ">∞</text>" in epsilon and ">//</text>" in epsilon
    assert plots.draw(tmp_path, [], "a title", "accuracy", "") == []


def test_baselines_are_grey_and_a_method_has_one_colour_everywhere() -> None:
    found = looks.looks(["cfl", "fedavg", "cfl:sketch=64", "local", "finetune", "flhc"])
    grey = [label for label, look in found.items() if look.color == looks.GREY]
    assert grey == ["fedavg", "local", "finetune"]
    assert len({(look.line, look.marker) for look in found.values()}) == 6, "also without colours"
    assert found["cfl"].color == found["cfl:sketch=64"].color != found["flhc"].color
    # whoever else is in the picture
    for others in (["flhc"], ["srfca", "mine", "flhc"], list(looks.NAMES)):
        assert looks.looks(others)["flhc"] == found["flhc"]
    everybody = looks.looks(list(looks.NAMES))
    methods = [everybody[name] for name in looks.NAMES if name not in looks.BASELINES]
    assert len({(look.color, look.line) for look in methods}) == len(methods)
    assert set(PROTOCOLS) <= set(looks.NAMES)


def test_colours_are_told_apart_in_grey_and_by_the_colour_blind() -> None:
    """Distances in CIELAB (CIE 1976) as Machado et al. 2009 simulate deutan and protan vision."""
    seen = {
        "all": np.eye(3),
        "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                   [-0.011820, 0.042940, 0.968881]],
        "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    }  # fmt: skip
    colours = np.array([to_rgb(color) for color in looks.COLORS])
    linear = np.where(colours <= 0.04045, colours / 12.92, ((colours + 0.055) / 1.055) ** 2.4)
    to_xyz = np.array(
        [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    )
    white = to_xyz.sum(axis=1)
    for vision, matrix in seen.items():
        xyz = np.clip(linear @ np.asarray(matrix).T, 0, 1) @ to_xyz.T / white
        f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
        lab = np.stack([116 * f[:, 1] - 16, 500 * (f[:, 0] - f[:, 1]), 200 * (f[:, 1] - f[:, 2])])
        for k in range(1, len(lab.T)):
            apart = np.linalg.norm(lab.T[k] - lab.T[k - 1])
            assert apart > 15, (vision, looks.COLORS[k - 1 : k + 1])
        # beside each other in the list: in print without colours by their lightness alone
        if vision == "all":
            assert np.abs(np.diff(lab[0])).min() > 10


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("cfl", "CFL"),
        ("flhc:signature=gradient", "FL+HC with signatures"),
        ("cfl:sketch=64", "CFL, sketch 64"),
        ("fedavg:dp-unit=example", "FedAvg, per example"),
        ("flhc:placement=central,exact_weights=true", "FL+HC, placement central, exact weights"),
        ("mine:sealed=false", "mine, no sealed"),
    ],
)
def test_variants_are_named_in_words(variant: str, name: str) -> None:
    assert looks.name_of(variant) == name


def _two_units() -> list[dict[str, Any]]:
    """Return runs with ε of a client, with ε of an example, and without any release."""
    rows = []
    for variant, unit in (("cfl", "client"), ("fedavg:dp-unit=example", "example")):
        for row in _grid({0: (1, 0.9, 0.8), 0.1: (0.5, 0.2, 0.2), 0.01: (0.7, 0.7, 0.6)}):
            rows.append(row | {"variant": variant, "dp_unit": unit, "delta": 1e-5})
    rows += [row | {"variant": "local", "epsilon": 0.0, "ari": 0.3} for row in rows[:9]]
    return [row | {"up": 10, "down": 10, "run": k} for k, row in enumerate(rows)]


def test_epsilon_of_a_client_and_of_an_example_share_no_axis() -> None:
    runs = _two_units()
    means = sweep_tables.summary(runs, "accuracy")
    picture = plots.over(means, "epsilon", ["ari"], {"ari": "ARI"}, runs=runs)
    first, second = picture.axes
    assert first.get_xlabel() == "ε of a run for one client, at δ = 1e-05"
    assert second.get_xlabel() == "ε of a run for one example, at δ = 1e-05"
    shown = [set(panel.get_legend_handles_labels()[1]) for panel in (first, second)]
    assert shown == [
        {"CFL", "local training (ε = 0)"},
        {"FedAvg, per example", "local training (ε = 0)"},
    ]
    noise = plots.over(means, "noise", ["ari"], {"ari": "ARI"}, runs=runs).axes
    units = [panel.get_xlabel().removesuffix(" (σ by clip norm)") for panel in noise]
    assert units == [f"noise multiplier z for one {unit}" for unit in ("client", "example")]


def test_infinity_stands_beyond_a_break_that_no_line_crosses() -> None:
    runs = _two_units()
    means = sweep_tables.summary(runs, "accuracy")
    panel = plots.over(means, "epsilon", ["ari"], {"ari": "ARI"}, runs=runs).axes[0]
    curves = [line for line in panel.get_lines() if len(line.get_xdata()) > 1]
    (curve,) = [line for line in curves if line.get_label() == "CFL"]
    assert list(curve.get_xdata()) == [10, 100]
    texts = dict(
        zip([text.get_text() for text in panel.get_xticklabels()], panel.get_xticks(), strict=True)
    )
    (mark,) = [text for text in panel.texts if text.get_text() == "//"]
    assert texts["100"] < mark.get_position()[0] < texts["∞"]


def test_below_five_seeds_each_is_a_dot_and_no_interval_pretends_to_know() -> None:
    runs = _two_units()
    means = sweep_tables.summary(runs, "accuracy")
    panel = plots.over(means, "noise", ["ari"], {"ari": "ARI"}, runs=runs).axes[0]
    heights = [y for cloud in panel.collections for _, y in np.asarray(cloud.get_offsets())]
    for value in (1, 0.9, 0.8, 0.5, 0.7, 0.6):
        assert value in heights
    assert {row["ari_low"] for row in means} == {None}
    (line, *_) = sweep_tables.thresholds(_grid({0.01: (1, 1, 1), 1: (0.8, 0.8, 0.8)}))
    assert line["sigma_star"] is not None
    assert (line["sigma_star_low"], line["sigma_star_high"]) == (None, None)


def test_ticks_of_bytes_are_numbers_that_do_not_overlap() -> None:
    axes = Figure(figsize=(4, 3)).subplots()
    for places in ([0.0235, 0.28, 0.341], [1.175, 1.2], [3.0, 90000.0]):
        axes.clear()
        plots._ticks_of_bytes(axes, places)
        ticks = axes.get_xticks()
        low, high = np.log10(axes.get_xlim())
        assert 1 <= len(ticks) <= 15
        assert np.diff(np.log10(ticks) / (high - low)).min(initial=1) >= 0.06
        assert not axes.get_xticks(minor=True).size


def test_a_latex_table_has_units_delta_and_escaped_names() -> None:
    runs = [row | {"accuracy": 0.5} for row in _two_units()]
    text = sweep_latex.table(
        sweep_tables.summary(runs, "accuracy"), "accuracy", "my_data (50 %), ε & δ"
    )
    assert r"\caption{my\_data (50 \%), $\varepsilon$ \& $\delta$}" in text
    rows = [line.strip() for line in text.splitlines() if line.endswith(r"\\")]
    assert {line.count("&") for line in rows} == {8}
    numbers = r"$\infty$ & 0 & \textbf{0.900} & 0.500 & $2\cdot10^{-5}$ & 3 \\"
    assert rows[1] == r"CFL & one client & $10^{-5}$ & " + numbers
    assert any(line.startswith("FedAvg, per example & one example & ") for line in rows)
    assert any(line.startswith("local training & nothing released & -- & 0 & ") for line in rows)


@pytest.mark.parametrize(("higher", "best"), [(True, "0.700"), (False, "0.600")])
def test_of_methods_at_one_level_the_best_is_bold(higher: bool, best: str) -> None:
    rows = [_row(variant=name, accuracy=a, noise=1.0) for name, a in (("cfl", 0.6), ("flhc", 0.7))]
    rows.append(_row(variant="cfl", accuracy=0.9, noise=0.0))  # has no rival
    sent = {"up": 1, "down": 1}
    means = sweep_tables.summary([row | sent for row in rows], "accuracy")
    text = sweep_latex.table(means, "accuracy", "x", higher)
    bold = re.findall(r"textbf{([\d.]+)", text)
    assert bold == [best]  # nor is anything bold in which all are equal


@pytest.mark.parametrize("chosen", [None, "clip=1.0,signature=gradient"])
def test_a_latex_table_keeps_the_rules_of_latex(chosen: str | None) -> None:
    rows = [row | {"accuracy": 0.5, "chosen": chosen} for row in _two_units()]
    text = sweep_latex.table(sweep_tables.summary(rows, "accuracy"), "accuracy", "a_b {50 %} #1")
    depth = list(accumulate({"{": 1, "}": -1}.get(c, 0) for c in re.sub(r"\\[{}]", "", text)))
    assert min(depth) == depth[-1] == 0
    opened = re.findall(r"\\begin{(\w+)}", text)
    assert re.findall(r"\\end{(\w+)}", text) == opened[::-1] == ["tabular", "table"]
    (columns,) = re.findall(r"begin{tabular}{(\w+)}", text)
    lines = [line for line in text.splitlines() if line.endswith(r" \\")]
    assert {len(re.findall(r"(?<!\\)&", line)) for line in lines} == {len(columns) - 1}
    body = text.partition("\n")[2]  # after the comment that names the package
    outside = re.split(r"(?<!\\)\$", body)[::2]  # of mathematics, which has as many ends
    assert not re.search(r"(?<!\\)[%#~^_]", " ".join(outside)) and body.isascii()
    assert len(re.split(r"(?<!\\)\$", body)) % 2 == 1


def test_a_legend_has_as_many_columns_as_its_texts_leave_room_for() -> None:
    assert plots._legend_columns([5] * 8, 160) == 4
    assert plots._legend_columns([5, 5], 160) == 2
    # four columns of 21, 22, 51 and 48 letters need 142 and their lines
    texts = [3, 21, 13, 18, 22, 4, 14, 17, 17, 16, 9, 51, 48, 6, 8, 15]
    assert plots._legend_columns(texts, 142 + 4 * 9) == 4
    assert plots._legend_columns(texts, 142 + 4 * 9 - 1) == 3
    assert plots._legend_columns([200] * 3, 160) == 1


def test_the_summary_has_means_and_bootstrap_intervals() -> None:
    aris = (0.1, 0.3, 0.5, 0.7, 0.9)
    rows = [_row(seed=seed, ari=ari) for seed, ari in enumerate(aris)]
    rows.append(_row(seed=5, status="failed", ari=None))
    (line,) = sweep_tables.summary(rows, "accuracy")
    # the mean of five draws has the deviation of one by √5, here √0.08 by √5
    assert line["ari"] == pytest.approx(0.5)
    assert line["ari_low"] == pytest.approx(0.5 - 1.96 * math.sqrt(0.08 / 5), abs=0.03)
    assert line["ari_high"] == pytest.approx(0.5 + 1.96 * math.sqrt(0.08 / 5), abs=0.03)
    assert (line["runs"], line["failed"], line["refused"]) == (5, 1, 0)
    (few,) = sweep_tables.summary(rows[:4], "accuracy")
    assert (few["ari"], few["ari_low"], few["ari_high"]) == (pytest.approx(0.4), None, None)


def _row(**values: Any) -> dict[str, Any]:
    """Return a row of a run."""
    row: dict[str, Any] = dict.fromkeys(sweep_tables.columns("accuracy"))
    row |= {"run": 0, "protocol": "cfl", "variant": "cfl", "seed": 0, "noise": 0.1}
    return row | {"epsilon": 5.0, "status": "done", "ari": 1.0, **values}


def _grid(aris: dict[float, Sequence[float]]) -> list[dict[str, Any]]:
    """Return rows of one variant, ARIs by noise and seed, with ε = 1 / noise."""
    rows = []
    for noise, values in aris.items():
        epsilon = 1 / noise if noise else math.inf
        for seed, ari in enumerate(values):
            rows.append(_row(noise=noise, epsilon=epsilon, seed=seed, ari=ari))
    return rows


@pytest.mark.parametrize(
    ("aris", "star", "kind"),
    [
        # halfway from 1 to 0.8 on a logarithmic axis from 0.01 to 1
        ({0.01: (1, 1), 1: (0.8, 0.8), 10: (0, 0)}, 0.1, "interpolated"),
        ({0.01: (1, 1), 1: (1, 0.6), 10: (0, 0)}, 0.1, "interpolated"),
        # the first fall counts, whatever comes after it
        ({0.01: (1, 1), 1: (0.8, 0.8), 10: (1, 1)}, 0.1, "interpolated"),
        ({0: (1, 1), 1: (0.8, 0.8)}, 0, "grid"),
        ({0.01: (1, 1), 1: (0.95, 0.9)}, 1, "beyond"),
        ({0.01: (0.89, 0.89), 1: (1, 1)}, None, "none"),
    ],
)
def test_sigma_star_and_epsilon_star_are_where_the_mean_ari_falls_below_nine_tenths(
    aris: dict[float, Sequence[float]], star: float | None, kind: str
) -> None:
    (line,) = sweep_tables.thresholds(_grid(aris))
    assert (line["sigma_star_kind"], line["epsilon_star_kind"]) == (kind, kind)
    if star is None:
        assert line["sigma_star"] is line["epsilon_star"] is line["sigma_star_low"] is None
        return
    assert line["sigma_star"] == pytest.approx(star)
    assert line["epsilon_star"] == pytest.approx(1 / star if star else math.inf)
    # as five seeds or more say: three times the same ones
    more = _grid({noise: tuple(values) * 3 for noise, values in aris.items()})
    (line,) = sweep_tables.thresholds(more)
    assert line["sigma_star_low"] <= line["sigma_star"] <= line["sigma_star_high"]
    assert line["epsilon_star_low"] <= line["epsilon_star"] <= line["epsilon_star_high"]


def test_the_interval_of_sigma_star_is_that_of_resampled_seeds() -> None:
    aris = {0.01: (1, 1, 1, 1, 1), 1: (1, 1, 0.4, 0.4, 0.4)}
    (line,) = sweep_tables.thresholds(_grid(aris))
    # more than 2.5 % of resamples have bad seeds alone, and fall within a sixth of two decades;
    # as many have one of five or none, and 1 % have none
    assert line["sigma_star_low"] == pytest.approx(0.01 * 100 ** (0.1 / 0.6))
    assert line["sigma_star_high"] == pytest.approx(0.01 * 100 ** (0.1 / 0.12))
    (alone,) = sweep_tables.thresholds(_grid({0.01: (1,), 1: (0.8,)}))
    assert (alone["sigma_star_low"], alone["sigma_star_high"]) == (None, None)


def test_a_level_at_which_all_runs_diverged_has_lost_the_clusters() -> None:
    rows = _grid({0.01: (1, 1), 1: (1, 1), 10: (1, 1)})
    for row in rows[4:]:
        row |= {"status": "failed", "ari": None, "epsilon": None}
    (line,) = sweep_tables.thresholds(rows)
    assert line["sigma_star"] == pytest.approx(10**0.1)
    # which ε they would have had is not known
    assert (line["epsilon_star"], line["epsilon_star_kind"]) == (1, "grid")
    assert (line["failed"], line["left_out"]) == (2, 0)
    rows = [row | {"target_epsilon": 1 / row["noise"]} for row in rows]
    for row in rows[4:]:
        row["noise"] = None
    (line,) = sweep_tables.thresholds(rows)
    assert line["epsilon_star"] == pytest.approx(10**-0.1)
    assert (line["sigma_star"], line["sigma_star_kind"]) == (1, "grid")


def test_a_fault_says_nothing_of_the_clusters_and_its_level_is_left_out() -> None:
    rows = _grid({0.01: (1, 1), 1: (1, 1), 10: (0, 0)})
    rows[2] |= {"status": "failed", "ari": None, "fault": True}
    (line,) = sweep_tables.thresholds(rows)
    assert line["sigma_star"] == pytest.approx(0.01 * 1000**0.1)
    assert (line["failed"], line["left_out"]) == (1, 1)


def test_thresholds_and_means_of_a_frame_are_those_of_its_rows() -> None:
    pandas = pytest.importorskip("pandas")
    rows = _grid({0.01: (1, 1), 1: (1, 0.2)})
    rows[3] |= {"status": "failed", "ari": None, "epsilon": None}
    frame = pandas.DataFrame(rows).to_dict("records")
    assert math.isnan(frame[3]["ari"]), "the gap that pandas makes"
    assert sweep_tables.thresholds(frame) == sweep_tables.thresholds(rows)
    assert sweep_tables.summary(frame, "accuracy") == sweep_tables.summary(rows, "accuracy")


def test_a_failed_run_has_lost_its_clusters_and_a_refused_level_is_left_out() -> None:
    rows = _grid({0.01: (1, 1), 1: (1, 1)})
    rows[-1] |= {"status": "failed", "ari": None}
    (line,) = sweep_tables.thresholds(rows)
    assert line["sigma_star"] == pytest.approx(0.01 * 100**0.2)
    rows = _grid({0.01: (1, 1), 1: (1, 1)})
    rows[-1] |= {"status": "refused", "ari": None, "epsilon": None}
    (line,) = sweep_tables.thresholds(rows)
    assert (line["sigma_star"], line["sigma_star_kind"]) == (0.01, "beyond")
    rows = [_row(ari=None)]
    assert sweep_tables.thresholds(rows)[0]["sigma_star_kind"] == "unknown"


@pytest.mark.usefixtures("no_drawings")
def test_epsilon_is_a_target_for_the_whole_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fedavg", "fedavg:placement=central", *SMALL, "--clip", "1", "--seeds", "1"]
    arguments += ["--aggregation", "plain"]
    out = tmp_path / "r"
    assert main(["sweep", *arguments, "--epsilon", "inf", "8", "--out", str(out)]) == 0
    lines = _table(out / "runs.csv")
    assert [line["mechanism"] for line in lines] == ["local", "central"] * 2
    for line in lines[:2]:
        assert line["target_epsilon"] == "8.0"
        assert 7.9 < float(line["epsilon"]) <= 8
        exact = gaussian_epsilon(math.sqrt(2) / float(line["noise"]), 1e-5)
        assert float(line["epsilon"]) == pytest.approx(exact, rel=1e-3)
    for line in lines[2:]:
        assert (line["target_epsilon"], line["noise"], line["epsilon"]) == ("inf", "0.0", "inf")
    printed = capsys.readouterr().out
    assert "run 4/4" in printed and "s left" in printed and str(out) in printed


@pytest.mark.usefixtures("no_drawings")
def test_what_takes_no_such_noise_is_recorded_with_the_reason(tmp_path: Path) -> None:
    arguments = ["oneshot", "oneshot:gram-mechanism=naive", *SMALL, "--tasks", "2", "--clip", "1"]
    out = tmp_path / "r"
    levels = ["--epsilon", "8", "--seeds", "1", "--dp-unit", "client", "--aggregation", "plain"]
    assert main(["sweep", *arguments, *levels, "--quiet", "--out", str(out)]) == 0
    done, refused = _table(out / "runs.csv")
    assert (done["status"], done["mechanism"]) == ("done", "local+gram")
    assert (refused["status"], refused["epsilon"]) == ("refused", "")
    assert "no noise reaches a --target-epsilon" in refused["reason"]
    assert refused["mechanism"] == "local+naive"
    assert _table(out / "summary.csv")[1]["refused"] == "1"


def test_the_multiplier_is_that_of_all_releases() -> None:
    (gram, both, own, naive) = sweep_plan.variants_of(
        [
            "oneshot",
            "oneshot:clip=1",
            "oneshot:clip=1,gram-noise=2",
            "oneshot:gram-mechanism=naive",
        ],
        object.__new__(type("Nothing", (), {})),
    )
    noise = [(v.at("noise", 0.5).noise, v.at("noise", 0.5).gram_noise) for v in (gram, both, own)]
    assert noise == [(0.0, 0.5), (0.5, 0.5), (0.5, 2.0)]
    assert sweep_plan.mechanism(naive.at("noise", 0.5)) == "naive"
    assert sweep_plan.mechanism(gram.at("noise", 0.5)) == "gram"
    assert both.at("noise", 0.0).gram_noise == both.at("epsilon", math.inf).gram_noise == 0
    assert both.at("epsilon", 4.0).target_epsilon == 4


def test_a_noise_that_is_relative_to_training_stays_as_it_is() -> None:
    (plain, own) = sweep_plan.variants_of(
        ["rdpcfl:clip=1", "rdpcfl:clip=1,selection-noise=3"],
        object.__new__(type("Nothing", (), {})),
    )
    noise = [(v.at("noise", 0.5).noise, v.at("noise", 0.5).selection_noise) for v in (plain, own)]
    assert noise == [(0.5, 10.0), (0.5, 3.0)]


def test_the_mechanism_names_noise_of_signatures() -> None:
    labels = ["signature", "signature:clip=1", "cfl:signature=gradient,clip=1", "cfl:clip=1"]
    variants = sweep_plan.variants_of(labels, object.__new__(type("Nothing", (), {})))
    names = [sweep_plan.mechanism(variant.at("noise", 0.5)) for variant in variants]
    assert names == ["signature", "dp-sgd+signature", "local+signature", "local"]
    assert sweep_plan.mechanism(variants[1].at("epsilon", 4.0)) == "dp-sgd+signature"


@pytest.mark.usefixtures("no_drawings")
def test_a_run_that_nobody_replies_to_has_failed_and_is_not_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["hidden", "signature", "oneshot", *SMALL, "--noise", "0", "--seeds", "1"]
    arguments += ["--k", "2", "--tasks", "2", "--dropout", "0.99"]
    assert main(["sweep", *arguments, "--quiet", "--out", str(tmp_path / "r")]) == 2
    assert "3 of 3 runs failed" in capsys.readouterr().err
    lines = _table(tmp_path / "r" / "runs.csv")
    assert [line["status"] for line in lines] == ["failed"] * 3


@pytest.mark.usefixtures("no_drawings")
def test_a_run_that_fails_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def diverge(*_: object) -> AveragingState:
        raise UpdateError("round 1: not finite")

    monkeypatch.setattr(FedAvg, "run_server", diverge)
    arguments = ["fedavg", "local", *SMALL, "--clip", "1", "--noise", "0.1", "--seeds", "1"]
    assert main(["sweep", *arguments, "--quiet", "--out", str(tmp_path / "r")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    sentence = (
        "1 of 2 runs failed (run 0), the first of them fedavg with seed 0: round 1: not finite"
    )
    assert sentence in said
    lines = _table(tmp_path / "r" / "runs.csv")
    assert [line["status"] for line in lines] == ["failed", "done"]


def _arguments(out: Path, *more: str) -> list[str]:
    """Return the command line of a sweep of FedAvg over two levels and two seeds."""
    options = [*SMALL, "--clip", "1", "--noise", "0", "0.5", "--seeds", "2", *more]
    return ["sweep", "fedavg", *options, "--quiet", "--out", str(out)]


def _poison(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException) -> None:
    """Let one run of each sweep end in an error."""
    measured = sweep_plan.Cell.measured

    def poisoned(cell: sweep_plan.Cell, federation: Any) -> dict[str, Any]:
        if cell.number == number:
            raise error
        return measured(cell, federation)

    monkeypatch.setattr(sweep_plan.Cell, "measured", poisoned)


@pytest.mark.usefixtures("no_drawings")
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (RuntimeError("first line\n\x1b[31msecond"), r"RuntimeError: first line \\x1b\[31msecond"),
        (MemoryError(), "MemoryError"),
        (ValueError("\ud800" * 9000), r"ValueError: (\\ud800)+\S*…"),
    ],
)
def test_a_run_with_an_error_that_nobody_foresaw_fails_and_the_others_go_on(
    error: Exception,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "r"
    with monkeypatch.context() as patched:
        _poison(patched, 1, error)
        assert main(_arguments(out)) == 2
    said = capsys.readouterr().err
    assert "1 of 4 runs failed (run 1), the first of them fedavg with seed 0: " in said
    assert f"and failures.txt, and try them again with: securecluster resume {out} --retry" in said
    assert said.count("\n") == 1
    lines = _table(out / "runs.csv")
    assert [line["status"] for line in lines] == ["done", "failed", "done", "done"]
    assert [line["fault"] for line in lines] == ["False", "True", "False", "False"]
    assert re.fullmatch(reason, lines[1]["reason"])
    tracebacks = (out / "failures.txt").read_text()
    assert tracebacks.startswith("run 1: fedavg, noise 0.5, seed 0\nTraceback")
    assert "raise error" in tracebacks
    (threshold,) = _table(out / "thresholds.csv")
    assert (threshold["failed"], threshold["left_out"]) == ("1", "1")

    # it stays as it is, until it is asked for
    record = (out / "runs.jsonl").read_bytes()
    assert main(["resume", str(out)]) == 2
    shown = " ".join(capsys.readouterr().out.split())
    assert "(1 of 4 runs failed)" in shown
    assert "fedavg: 1 run failed (run 1; in no mean, and σ* and ε* leave out their levels)" in shown
    assert (out / "runs.jsonl").read_bytes() == record
    assert main(["resume", str(out), "--quiet", "--retry"]) == 0
    assert [line["status"] for line in _table(out / "runs.csv")] == ["done"] * 4
    assert not (out / "failures.txt").exists()
    assert (out / "runs.jsonl").read_bytes().startswith(record), "nothing is rewritten"


@pytest.mark.usefixtures("no_drawings")
def test_python_warns_of_runs_that_failed_and_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pandas")
    _poison(monkeypatch, 1, RuntimeError("a bug"))
    options: dict[str, Any] = {"noise": [0, 0.5], "seeds": 2, **DEALT, **SHARED}
    with pytest.warns(SecureClusterWarning, match=r"1 of 4 runs failed \(run 1\).*a bug; see the"):
        frame = securecluster.sweep(["fedavg"], **options)
    assert list(frame.status) == ["done", "failed", "done", "done"]
    assert list(frame.fault) == [False, True, False, False]
    assert frame.reason[1] == "RuntimeError: a bug"


@pytest.mark.usefixtures("no_drawings")
def test_a_run_that_measures_what_no_run_can_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sweep_plan, "_finite", lambda _: math.nan)
    assert main(_arguments(tmp_path / "r")) == 2
    assert "4 of 4 runs failed (runs 0, 1, 2, 3)" in capsys.readouterr().err
    lines = _table(tmp_path / "r" / "runs.csv")
    assert {line["reason"] for line in lines} == {"it measured what no run can: score = nan"}
    assert {line["accuracy"] for line in lines} == {""}


class _Deaths:
    """A pool of processes in which some tasks kill theirs; all others are done here."""

    def __init__(self, deadly: Callable[[Any], bool]) -> None:
        self.deadly = deadly
        self.calls: list[tuple[list[list[int]], int]] = []

    def __call__(self, work: Any, tasks: Any, processes: int) -> Any:
        self.calls.append(([[cell.number for cell in task] for task in tasks], processes))
        for task in tasks:
            yield worker_pool.Died(task, -9) if self.deadly(task) else work(task)


@pytest.mark.usefixtures("no_drawings")
def test_the_runs_of_a_process_that_died_are_tried_once_more_and_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    # both batches, and one of their runs again
    pool = _Deaths(lambda task: len(task) > 1 or task[0].number == 2)
    monkeypatch.setattr(worker_pool, "results", pool)
    assert main(_arguments(out, "--jobs", "2", "--together", "2")) == 2
    # the runs of both batches, each alone, in one process
    assert pool.calls == [([[0, 1], [2, 3]], 2), ([[0], [1], [2], [3]], 1)]
    lines = _table(out / "runs.csv")
    assert [line["status"] for line in lines] == ["done", "done", "failed", "done"]
    assert lines[2]["reason"].startswith("its process was killed by signal 9, alone as well")
    assert "(run 2)" in capsys.readouterr().err


@pytest.mark.usefixtures("no_drawings")
@pytest.mark.parametrize(("jobs", "processes"), [("1", 0), ("2", 1)])
def test_the_last_batch_has_a_process_of_its_own_unless_one_job_is_asked_for(
    jobs: str, processes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = _Deaths(lambda task: False)
    monkeypatch.setattr(worker_pool, "results", pool)
    assert main(_arguments(tmp_path / "r", "--jobs", jobs, "--together", "4")) == 0
    assert pool.calls[0] == ([[0, 1, 2, 3]], processes)


@pytest.mark.usefixtures("no_drawings")
def test_a_fault_of_a_batch_is_one_of_each_run_only_if_it_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from securecluster.training.stacked_runs import StackedRuns

    def no_memory(*_: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(StackedRuns, "train", no_memory)
    out = tmp_path / "r"
    assert main(_arguments(out, "--together", "4")) == 0
    assert {line["status"] for line in _table(out / "runs.csv")} == {"done"}


@pytest.mark.usefixtures("no_drawings")
def test_resume_takes_the_jobs_of_the_start_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    # only the number of jobs is looked at
    taken: list[Parallel] = []

    def none_left(
        cells: Any, settings: Any, recorded: Sequence[Any], parallel: Parallel, say: Any
    ) -> Sequence[Any]:
        taken.append(parallel)
        return recorded

    assert main(_arguments(out, "--jobs", "1", "--together", "3")) == 0
    monkeypatch.setattr(sweep, "_rows", none_left)
    assert main(["resume", str(out), "--quiet"]) == 0
    assert main(["resume", str(out), "--quiet", "--jobs", "2"]) == 0
    assert main(["resume", str(out), "--quiet", "--together", "1"]) == 0
    assert main(["resume", str(out), "--quiet"]) == 0, "only that one call was told otherwise"
    assert taken == [Parallel(1, 3), Parallel(2, 3), Parallel(1, 1), Parallel(1, 3)]
    assert main(["resume", str(out), "--jobs", "-1"]) == 2
    assert "jobs = -1 is not possible" in capsys.readouterr().err
    config = json.loads((out / "config.json").read_text())
    assert config["parallel"] == {"jobs": 1, "together": 3}
    assert "jobs" not in json.dumps(config["sweep"]), "the same sweep may go on with others"


def test_options_of_a_sweep_are_refused_for_other_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = [option for option in SMALL[:-2] if option != "--jobs"]
    run, comparison = tmp_path / "run", tmp_path / "comparison"
    assert main(["run", "local", *few, "--quiet", "--out", str(run)]) == 0
    assert main(["compare", "local", "fedavg", *few, "--quiet", "--out", str(comparison)]) == 0
    for folder, what in (
        (run, "a single run"),
        (comparison, "a comparison, which does what failed"),
    ):
        options = [["--jobs", "2"], ["--together", "2"], ["--retry"]]
        for option in options[folder == comparison :]:
            assert main(["resume", str(folder), *option]) == 2
            said = capsys.readouterr().err
            assert f"{folder} holds {what}" in said and f"takes no {option[0]}: leave it" in said
            assert said.count("\n") == 1


def test_a_process_that_cannot_start_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_process(*_: object) -> None:
        raise worker_pool.WorkerError("a process could not start")

    monkeypatch.setattr(worker_pool, "results", no_process)
    out = tmp_path / "a folder"
    assert main(_arguments(out)) == 2
    said = capsys.readouterr().err
    assert f"could not start; go on with: securecluster resume '{out}'\n" in said


def test_pictures_that_cannot_be_drawn_withhold_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pandas = pytest.importorskip("pandas")

    def no_pictures(folder: Path, *_: object) -> None:
        assert (folder / "runs.csv").is_file() and (folder / "thresholds.csv").is_file()
        raise ValueError("no such backend")

    monkeypatch.setattr(plots, "draw", no_pictures)
    out = tmp_path / "r"
    assert main(_arguments(out)) == 0
    said = capsys.readouterr().err
    assert "note: the pictures cannot be drawn (ValueError: no such backend)" in said
    options: dict[str, Any] = {"noise": [0.5], "seeds": 1, **DEALT, **SHARED}
    with pytest.warns(SecureClusterWarning, match="no such backend"):
        frame = securecluster.sweep(["local"], folder=tmp_path / "python", **options)
    assert isinstance(frame, pandas.DataFrame)


@pytest.mark.usefixtures("no_drawings")
def test_a_sweep_over_ones_own_columns_is_gone_on_with(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import numpy as np
    import pyarrow

    draws = np.random.default_rng(0)
    columns: dict[str, Any] = {f"x{n}": draws.normal(size=120) for n in range(3)}
    columns |= {"who": np.repeat(list("abcdef"), 20), "y": draws.integers(2, size=120)}
    parquet.write_table(pyarrow.table(columns), tmp_path / "own.parquet")
    arguments = [
        "sweep", "local", "--data", str(tmp_path / "own.parquet"), "--client-column", "who",
    ]  # fmt: skip
    arguments += ["--label-column", "y", "--feature-columns", "x0", "x1", "--rounds", "1"]
    arguments += ["--model", "linear", "--noise", "0", "--seeds", "2", "--jobs", "1", "--quiet"]
    out = tmp_path / "r"
    assert main([*arguments, "--out", str(out)]) == 0
    lines = _timeless(out / "runs.csv")
    record = out / "runs.jsonl"
    record.write_text(record.read_text().splitlines(keepends=True)[0])
    assert main(["resume", str(out), "--quiet"]) == 0
    assert _timeless(out / "runs.csv") == lines


@pytest.mark.always
@pytest.mark.usefixtures("no_drawings")
def test_a_stopped_sweep_goes_on_and_does_no_run_twice(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r"
    out.mkdir()
    for name in (".securecluster", "config.json"):
        (out / name).write_bytes((whole / name).read_bytes())
    lines = (whole / "runs.jsonl").read_text().splitlines(keepends=True)
    # a kill in the middle of the fourth line
    (out / "runs.jsonl").write_text("".join(lines[:3]) + lines[3][:40])
    begun: list[int] = []
    row = sweep_plan.Cell.row
    monkeypatch.setattr(
        sweep_plan.Cell, "row", lambda self, *_: begun.append(self.number) or row(self)
    )
    monkeypatch.setattr("securecluster.studies.sweep_runner.Parallel.processes", lambda *_: 1)
    assert main(["resume", str(out), "--quiet"]) == 0
    assert begun == [3, 4, 5, 6, 7]
    assert _timeless(out / "runs.csv") == _timeless(whole / "runs.csv")
    assert (out / "runs.csv").read_text().splitlines()[:4] == (
        (whole / "runs.csv").read_text().splitlines()[:4]
    )
    assert main(["resume", str(out), "--quiet"]) == 0, "a complete sweep is shown"
    assert begun == [3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "damage",
    [
        "line",
        "config",
        "data",
        "earlier version",
        ("by", "time"),
        ("seeds", "34"),
        ("levels", ["a"]),
        ("variants", [{"label": 3, "protocol": "cfl", "options": {}}]),
        ("settings", {"threads": "1"}),
        ("simulation", {"clients": [6]}),
    ],
)
def test_a_damaged_sweep_is_refused_in_one_sentence(
    damage: str | tuple[str, Any], whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    out.mkdir()
    for name in (".securecluster", "config.json", "runs.jsonl"):
        (out / name).write_bytes((whole / name).read_bytes())
    sentence = "differs from what was written there"
    config = json.loads((out / "config.json").read_text())
    if damage == "line":
        sentence = f"line 1 of {out / 'runs.jsonl'} {sentence}"
        (out / "runs.jsonl").write_text('{"run": 0, "ari": \n')
    elif damage == "config":
        (out / "config.json").write_text("{}")
    elif damage == "data":
        config["data_digest"] += "0"
        sentence = "was run on other data"
        _sealed(out, config)
    elif damage == "earlier version":
        del config["parallel"]
        sentence = "is of an earlier version, whose runs.jsonl has no digests"
        _sealed(out, config)
    else:
        name, value = damage
        config["sweep"][name] = value
        sentence = "the plan of the sweep does not parse"
        _sealed(out, config)
    assert main(["resume", str(out), "--quiet"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and sentence in said


def test_a_sweep_with_settings_that_have_left_goes_on(
    whole: Path, tmp_path: Path, no_drawings: None
) -> None:
    out = shutil.copytree(whole, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    config["sweep"]["settings"] |= {"engine": "process", "workers": 0}
    _sealed(out, config)
    lines = (out / "runs.jsonl").read_text().splitlines(keepends=True)
    (out / "runs.jsonl").write_text("".join(lines[:-1]))
    assert main(["resume", str(out), "--quiet"]) == 0
    assert _timeless(out / "runs.csv") == _timeless(whole / "runs.csv")


def _sealed(folder: Path, config: dict[str, Any]) -> None:
    """Write a config.json whose digest the marker has."""
    from securecluster.core import manifest

    text = json.dumps(config)
    marker = manifest.encode({"config.json": manifest.Mark.of(text.encode())})
    (folder / "config.json").write_text(text)
    (folder / ".securecluster").write_bytes(marker)


@pytest.mark.exhaustive
def test_a_killed_sweep_of_two_processes_ends_as_if_it_never_had_been(
    whole: Path, tmp_path: Path
) -> None:
    out = tmp_path / "r"
    arguments = ["fedavg", "local", *SMALL[:-1], "2", "--clip", "1", "--noise", "0.5", "0"]
    arguments += ["--keys-from-seed"]  # as `whole` has them, by the default of tests
    command = [sys.executable, "-m", "securecluster", "sweep", *arguments, "--seeds", "2"]
    process = subprocess.Popen([*command, "--seed", "3", "--quiet", "--out", str(out)])
    record = out / "runs.jsonl"
    deadline = time.monotonic() + 120
    while not record.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "runs.csv").exists()
    assert main(["resume", str(out), "--quiet"]) == 0
    assert _timeless(out / "runs.csv") == _timeless(whole / "runs.csv")
    numbers = [json.loads(line)["run"] for line in record.read_text().splitlines()]
    assert sorted(numbers) == list(range(8))


def test_the_time_that_is_left_is_that_of_the_runs_ahead() -> None:
    plan = sweep_plan.Plan(
        (sweep_plan.Variant("a", "cfl", {}), sweep_plan.Variant("b", "cfl", {})),
        "noise", (0.0, 1.0), (0, 1), sweep_plan.Simulation(), Settings(),
    )  # fmt: skip
    clock = _Clock(list(plan.cells()), processes=2)
    # four runs of each: 3 · 10 s and, as nothing is known of b, 4 · 10 s
    assert clock.left({"run": 0, "seconds": 10.0}) == pytest.approx(70 / 2)
    assert clock.left({"run": 1, "seconds": 2.0}) == pytest.approx((3 * 10 + 3 * 2) / 2)


def test_python_returns_the_same_as_a_frame(whole: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = securecluster.sweep(
        ["fedavg", FedAvg(**SHARED, placement="central")], noise=(0, 0.5), seeds=1, seed=3,
        **DEALT, **SHARED,
    )  # fmt: skip
    read = pandas.read_csv(whole / "runs.csv")
    assert list(frame.columns) == list(read.columns)
    ours = frame[frame.variant == "fedavg"].reset_index(drop=True)
    theirs = read[(read.variant == "fedavg") & (read.seed == 3)].reset_index(drop=True)
    names = ["noise", "epsilon", "ari", "accuracy", "worst_accuracy", "up", "down", "rounds"]
    pandas.testing.assert_frame_equal(ours[names], theirs[names], check_dtype=False)
    central = frame[frame.mechanism == "central"]
    label = "fedavg:rounds=2,model=linear,clip=1.0,placement=central"
    assert list(central.variant) == [label] * 2


@pytest.mark.usefixtures("no_drawings")
def test_runs_that_train_together_are_those_that_train_alone() -> None:
    protocols = [FedAvg(**SHARED), CFL(**SHARED)]
    frames = []
    for together in (1, 4):
        frame = securecluster.sweep(
            protocols, noise=[0, 0.1], seeds=3, together=together, dtype="float64", **DEALT
        )
        frames.append(frame.sort_values(["variant", "noise", "seed"]).reset_index())
    alone, together = frames
    for column in ("variant", "noise", "seed", "epsilon", "clusters", "ari", "up", "down"):
        assert list(alone[column]) == list(together[column]), column
    assert list(together["accuracy"]) == pytest.approx(list(alone["accuracy"]), abs=1e-9)
    assert (alone["status"] == "done").all()


def test_batches_hold_runs_of_one_variant() -> None:
    variants = [sweep_plan.Variant(name, name, {}) for name in ("cfl", "fedavg")]
    cells = [
        sweep_plan.Cell(number, variants[number % 2], "noise", 0.0, None, None)  # type: ignore[arg-type]
        for number in range(7)
    ]
    numbers = [[cell.number for cell in batch] for batch in sweep_runner.batches(cells, 3)]
    assert numbers == [[0, 2, 4], [6], [1, 3, 5]]
    assert [len(batch) for batch in sweep_runner.batches(cells, 1)] == [1] * 7


def test_python_goes_on_in_a_folder_and_refuses_another_sweep(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    out = tmp_path / "r"
    options: dict[str, Any] = {**DEALT, **SHARED, "seeds": 1, "folder": out}
    first = securecluster.sweep(["local"], noise=[0.1], **options)
    again = securecluster.sweep(["local"], noise=[0.1], **options)
    assert first.seconds.tolist() == again.seconds.tolist()
    with pytest.raises(RunFolderError, match="holds another sweep"):
        securecluster.sweep(["local"], noise=[0.2], **options)
    with pytest.raises(UsageError, match=r"unknown option 'ronds'.*'rounds'"):
        securecluster.sweep(["local"], noise=[0.1], ronds=2)
    with pytest.raises(UsageError, match="noise of flhc is what the sweep varies"):
        securecluster.sweep([FLHC(clip=1.0, noise=1.0)], noise=[0.1])
    with pytest.raises(UsageError, match="takes a list of protocols"):
        securecluster.sweep("cfl", noise=[0.1])
    with pytest.raises(UsageError, match="cfl and cfl would run the same"):
        securecluster.sweep([CFL(), "cfl"], noise=[0.1])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"noise": 1.0}, "noise is a list of numbers"),
        ({"noise": "1"}, "noise is a list of numbers"),
        ({"noise": (), "epsilon": 4}, "epsilon is a list of numbers"),
        ({"noise": None}, "takes levels of noise"),
        ({"noise": ["1"]}, "noise = '1' is not possible"),
        ({"noise": [True]}, "noise = True is not possible"),
        ({"seeds": [1, 2]}, "seeds = [1, 2] is not possible"),
        ({"seeds": 1.5}, "seeds = 1.5 is not possible"),
        ({"seed": "x"}, "seed = 'x' is not possible"),
        ({"jobs": 1.5}, "jobs = 1.5 is not possible"),
        ({"together": None}, "together = None is not possible"),
        ({"clients": "six"}, "clients = 'six' is not possible"),
        ({"data": 3}, "data is the name of a data set"),
        ({"protocols": [3]}, "3 is no protocol"),
        ({"protocols": [FedAvg]}, "is no protocol"),
        ({"engine": "ray"}, "engine has left securecluster: "),
    ],
)
def test_mistakes_in_python_get_one_sentence(options: dict[str, Any], sentence: str) -> None:
    call: dict[str, Any] = {"protocols": ["local"], "noise": [0.0], "seeds": 1, **options}
    with pytest.raises(UsageError) as caught:
        securecluster.sweep(call.pop("protocols"), **call)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["cfll", "--noise", "1"], "did you mean 'cfl'"),
        (["--noise", "1"], "the protocols first"),
        (["cfl"], "a sweep takes levels of noise"),
        (["cfl", "--noise", "1", "--epsilon", "1"], "sweep over one of them"),
        (["cfl", "--clip", "1", "--noise", "-0.1"], "noise = -0.1 is not possible"),
        (["cfl", "--clip", "1", "--noise", "nan"], "noise = nan is not possible"),
        (["cfl", "--clip", "1", "--epsilon", "0"], "epsilon = 0 is not possible"),
        (["cfl", "--clip", "1", "--noise", "1", "1"], "noise = 1 is given twice"),
        (["cfl", "--clip", "1", "--noise", "1", "--seeds", "0"], "seeds = 0 is not possible"),
        (["cfl", "--clip", "1", "--noise", "1", "--jobs", "-1"], "jobs = -1 is not possible"),
        (["cfl", "cfl", "--clip", "1", "--noise", "1"], "cfl is named twice"),
        (["cfl", "cfl:", "--clip", "1", "--noise", "1"], "cfl and cfl: would run the same"),
        (["cfl:sketch=64,sketch=32", "--clip", "1", "--noise", "1"], "gives sketch twice"),
        (["rdpcfl", "--noise", "0.1"], "noise without a clip bounds nothing"),
        (["cfl", "--noise", "0.1"], "noise without a clip bounds nothing"),
        (["cfl:foo=1", "--noise", "1"], "unknown option of cfl 'foo'"),
        (["cfl:sketch", "--noise", "1"], "has no value: write cfl:OPTION=VALUE"),
        (["cfl:sketch=many", "--noise", "1"], "is not a value that --sketch takes"),
        (["cfl:noise=1", "--noise", "1"], "noise is what the sweep varies"),
        (["cfl", "--clip", "1", "--noise", "0", "--eps1", "-1"], "eps1 = -1.0 is not possible"),
        (
            ["cfl", "--noise", "0", "--gram-noise", "1"],
            "--gram-noise is an option of oneshot, pacfl only",
        ),
        (["cfl", "--noise", "0", "--transcript", "full"], "a sweep keeps no frames"),
        (["cfl", "--noise", "0", "--mask", "permutatoin"], "did you mean 'permutation'"),
        (["cfl", "--noise", "0", "--data", "digit"], "did you mean 'digits'"),
        (["cfl", "--noise", "0", "--model", "mpl"], "did you mean 'mlp'"),
        (["cfl", "local", "--noise", "0", "--clients", "3"], "4 clusters among 3 clients"),
    ],
)
def test_mistakes_get_one_sentence_and_leave_nothing(
    arguments: list[str], sentence: str, refused_by: Callable[..., None]
) -> None:
    refused_by(sentence, "sweep", *arguments)


@pytest.mark.usefixtures("no_drawings")
def test_a_sweep_is_replaced_by_force_alone_and_is_no_run(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    out.mkdir()
    for path in whole.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    (out / "noise.png").write_bytes(b"a picture")
    arguments = ["local", *SMALL, "--noise", "0", "--seeds", "1", "--quiet", "--out", str(out)]
    assert main(["sweep", *arguments]) == 2
    assert "exists and is not empty" in capsys.readouterr().err
    for command in ("replay", "report"):
        assert main([command, str(out)]) == 2
        assert "holds a sweep, whose runs have no folders" in capsys.readouterr().err
    assert main(["sweep", *arguments, "--force"]) == 0
    assert [line["variant"] for line in _table(out / "runs.csv")] == ["local"]
    assert not (out / "noise.png").exists(), "pictures of the other sweep are gone"
    (out / "thesis.tex").write_text("years of work")
    assert main(["sweep", *arguments, "--force"]) == 2


def test_help_begins_with_the_sweeps_own_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "cfl", "fedavg", "--help"]) == 0
    text = capsys.readouterr().out
    assert text.index("--target-epsilon") < text.index("--rounds")
    assert text.count("--target-epsilon") == 1 and "--epsilon" not in text
    assert main(["sweep", "--help"]) == 0


def test_objects_of_ones_own_are_refused() -> None:
    from torch import nn

    with pytest.raises(UsageError, match="model of cfl is an object"):
        sweep_plan.variant_of(CFL(model=nn.Linear(2, 2)))


def _levels(**aris: Sequence[float]) -> list[dict[str, Any]]:
    """Return rows of runs at one level, ARIs by variant and seed; accuracies are half of them."""
    rows = []
    for variant, values in aris.items():
        rows += [
            _row(variant=variant, seed=seed, ari=ari, accuracy=ari / 2)
            for seed, ari in enumerate(values)
        ]
    return rows


def test_paired_differences_have_the_p_values_of_wilcoxon_adjusted_by_holm() -> None:
    first, second, third = (0.9, 0.8, 1.0, 0.7, 0.6, 0.9, 0.8), (0.5,) * 7, (0.5,) * 7
    rows = _levels(cfl=first, flhc=second, local=third)
    lines = sweep_pairs.paired([*rows, _row(seed=9, variant="cfl")], "accuracy")
    assert [line["score"] for line in lines] == ["ari"] * 3 + ["accuracy"] * 3
    (one, two, none) = lines[:3]
    assert (one["first"], one["second"], one["seeds"]) == ("cfl", "flhc", 7)
    assert one["difference"] == pytest.approx(np.mean(first) - 0.5)
    assert one["p"] == stats.wilcoxon(np.subtract(first, second)).pvalue == 2 / 2**7
    # three tests of one score: the smallest p times three, the next times two, never less than it
    assert one["p_holm"] == two["p_holm"] == pytest.approx(6 / 2**7)
    assert (none["p"], none["p_holm"], none["difference"]) == (1.0, 1.0, 0.0)
    (few,) = sweep_pairs.paired(_levels(cfl=(1.0,), flhc=(0.5,)), "accuracy")[:1]
    assert (few["p"], few["p_holm"], few["low"]) == (None, None, None)


def test_rounds_that_are_not_equal_are_said() -> None:
    means = [
        {"variant": "fedavg", "rounds": 40.0},
        {"variant": "srfca", "rounds": 60.0},
        {"variant": "srfca", "rounds": None},
        {"variant": "flhc", "rounds": 20.0},
        {"variant": "flhc", "rounds": 40.0},
    ]
    (sentence,) = sweep_report.rounds_in_words(means)
    assert sentence == "not at equal rounds: fedavg 40, srfca 60, flhc 20 to 40"
    assert not sweep_report.rounds_in_words([means[0], means[4], means[2]])


def test_a_curve_that_falls_with_less_noise_is_said() -> None:
    worse = _grid({0.1: (0.2, 0.1, 0.3, 0.2, 0.2), 1: (1, 0.9, 1, 1, 1)})
    (sentence,) = sweep_pairs.losses_with_less_noise(worse)
    assert sentence.startswith("cfl is worse with less noise: from noise 1 to noise 0.1 its ARI")
    also = [row | {"accuracy": row["ari"] / 2} for row in worse]
    of_ari, of_accuracy = sweep_pairs.losses_with_less_noise(also, ("ari", "accuracy"))
    assert of_ari == sentence and "its accuracy falls by 0.39" in of_accuracy
    better = _grid({0.1: (1, 0.9, 1, 1, 1), 1: (0.2, 0.1, 0.3, 0.2, 0.2)})
    assert not sweep_pairs.losses_with_less_noise(better)
    few = _grid({0.1: (0, 0), 1: (1, 1)})
    assert not sweep_pairs.losses_with_less_noise(few), "two seeds cannot tell"


def test_coinciding_marks_are_set_apart_and_others_stay() -> None:
    rows = _grid({0.1: (1, 1), 1: (0.5, 0.5)})
    rows = [row | {"variant": name} for name in ("cfl", "flhc") for row in rows]
    rows += [row | {"variant": "local", "ari": 0.1} for row in rows[:4]]
    for row in rows:
        row |= {"up": 1000, "down": 10, "accuracy": 0.5}
    means = sweep_tables.summary(rows, "accuracy")
    assert plots.shifts_of(means, "noise", "ari") == {"cfl": 0, "flhc": 1, "local": 0}
    assert plots.shifts_of(means, "noise", "accuracy") == {"cfl": 0, "flhc": 1, "local": 2}


def test_a_curve_over_targets_is_of_one_algorithm(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--dp-unit", "example", "--epsilon", "1", "inf", "--seeds", "1", "--quiet"]
    arguments = ["flhc", *SMALL, "--pre-rounds", "1", *options]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(plots, "draw", lambda *_: [])
        assert main(["sweep", *arguments, "--out", str(out)]) == 0
    lines = _table(out / "runs.csv")
    assert {line["variant"] for line in lines} == {"flhc:sketch=64"}
    assert [line["chosen"] for line in lines if line["epsilon"] == "inf"] == [""]
    assert lines[0]["chosen"] == "clip=1.0"
    assert "FL+HC, sketch 64" in (out / "summary.tex").read_text()
