"""Figures from Python show what the run found, and take texts, a size and axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas
import pytest
from matplotlib.figure import Figure

from securecluster import CFL, FLHC, FedAvg, Federation, OneShot, plot
from securecluster.errors import UsageError

SMALL: dict[str, Any] = {"model": "linear", "epochs": 1}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate("digits", scenario="label-swap", clients=6, samples=40, seed=0)


@pytest.fixture(scope="module")
def cfl(federation: Federation) -> CFL:
    return CFL(rounds=4, **SMALL).fit(federation)


def runs() -> pandas.DataFrame:
    """Runs of two seeds at three levels, as a sweep returns them."""
    rows = []
    for run, (variant, noise, seed) in enumerate(
        (v, z, s) for v in ("cfl", "fedavg") for z in (0.0, 0.1, 1.0) for s in (0, 1)
    ):
        rows.append(
            {
                "run": run, "protocol": variant, "variant": variant, "mechanism": "gaussian",
                "dp_unit": "client", "delta": 1e-5, "seed": seed, "noise": noise,
                "target_epsilon": None, "epsilon": math.inf if noise == 0 else 10 / noise,
                "status": "done", "reason": None, "fault": False, "clusters": 2,
                "ari": 0.5 + 0.1 * seed, "pearson": None, "accuracy": 0.8 - 0.2 * noise,
                "worst_accuracy": 0.1, "up": 1000, "down": 1000, "servers": 0, "rounds": 4,
                "seconds": 1.0,
            }
        )  # fmt: skip
    return pandas.DataFrame(rows)


def test_accuracy_is_that_of_the_history(cfl: CFL) -> None:
    picture = plot.accuracy(cfl, size=(3, 2), title="mine", xlabel="t", ylabel="share")
    (axes,) = picture.axes
    curve = axes.get_lines()[0]
    assert list(curve.get_xdata()) == [1, 2, 3, 4]
    np.testing.assert_allclose(curve.get_ydata(), [line["accuracy"] for line in cfl.history_])
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("mine", "t", "share")
    assert tuple(picture.get_size_inches()) == (3, 2)


def test_given_axes_are_drawn_on(cfl: CFL) -> None:
    whole = Figure(figsize=(8, 3))
    left, right = whole.subplots(1, 2)
    assert plot.similarity(cfl, ax=left, title="", size=(1, 1)) is whole
    assert plot.accuracy(cfl.result_, ax=right) is whole
    assert left.get_images() and right.get_lines() and left.get_title() == ""
    assert tuple(whole.get_size_inches()) == (8, 3)


def test_similarity_is_the_servers_in_the_order_of_clusters(cfl: CFL) -> None:
    (image,) = plot.similarity(cfl).axes[0].get_images()
    order = np.argsort(cfl.labels_, kind="stable")
    alpha = cfl.state_.alpha.numpy()[np.ix_(order, order)]
    off_diagonal = ~np.eye(6, dtype=bool)
    shown = np.ma.filled(image.get_array(), np.nan)
    np.testing.assert_allclose(shown[off_diagonal], alpha[off_diagonal])


def test_the_other_pictures_of_runs(cfl: CFL, federation: Federation) -> None:
    assert len(plot.separation(cfl, size=(4, 5)).axes) == 2
    flhc = FLHC(rounds=3, pre_rounds=1, **SMALL).fit(federation)
    assert "6 clients' updates" in plot.dendrogram(flhc).axes[0].get_title()
    oneshot = OneShot(rounds=1, **SMALL).fit(federation)
    assert "clients by relevance" in plot.dendrogram(oneshot).axes[0].get_title()
    (image,) = plot.relevance(oneshot).axes[0].get_images()
    assert image.get_clim() == (0, 1)


def test_a_tree_has_a_box_for_each_node(cfl: CFL) -> None:
    picture = plot.tree(cfl, title="mine", size=(5, 4))
    assert picture.get_size_inches().tolist() == [5, 4]
    axes = picture.axes[0]
    assert axes.get_title() == "mine"
    headings = [text.get_text().splitlines()[0] for text in axes.texts]
    nodes = cfl.state_.tree.nodes
    assert headings == [
        f"node {n}: {len(node.members)} client{'s' * (len(node.members) > 1)}"
        for n, node in enumerate(nodes)
    ]
    own = Figure().subplots()
    assert plot.tree(cfl, ax=own) is own.figure


@pytest.mark.parametrize("x", ["noise", "epsilon", "bytes"])
def test_a_sweep_has_a_curve_for_each_variant(x: str) -> None:
    picture = plot.sweep(runs(), x=x, y="accuracy", size=(4, 3), ylabel="accuracy")
    (axes,) = picture.axes
    labels = [text.get_text() for text in picture.legends[0].get_texts()]
    assert sorted(labels) == ["CFL", "FedAvg"] and axes.get_ylabel() == "accuracy"
    if x == "noise":
        curve = next(line for line in axes.get_lines() if line.get_label() == "CFL")
        # without noise, beyond a break; then with it
        np.testing.assert_allclose(curve.get_ydata(), [0.78, 0.6])
    assert len(plot.sweep(runs(), x=x, y=["ari", "accuracy"]).axes) == 2


def test_a_sweep_is_drawn_on_given_axes() -> None:
    axes = Figure().subplots()
    assert plot.sweep(runs(), ax=axes, xlabel="privacy loss") is axes.figure
    assert axes.get_xlabel() == "privacy loss" and axes.get_legend() is not None


def test_texts_have_a_size_and_variants_the_given_names() -> None:
    picture = plot.sweep(runs(), x="noise", names={"cfl": "ours"}, font=6)
    texts = [text.get_text() for text in picture.legends[0].get_texts()]
    assert texts == ["ours", "FedAvg"]
    axes = picture.axes[0]
    sized = [axes.xaxis.label, *axes.get_xticklabels(), *picture.legends[0].get_texts()]
    assert {text.get_fontsize() for text in sized} == {6}


def test_what_cannot_be_drawn_is_said(cfl: CFL, federation: Federation) -> None:
    fedavg = FedAvg(rounds=1, **SMALL).fit(federation)
    for draw, words in (
        (lambda: plot.similarity(CFL()), "not of CFL: call fit"),
        (lambda: plot.similarity(fedavg), "fedavg has no similarity matrix"),
        (lambda: plot.relevance(cfl), "cfl has no relevance"),
        (lambda: plot.dendrogram(cfl), "cfl has no linkage"),
        (lambda: plot.separation(fedavg), "fedavg tested no split"),
        (lambda: plot.tree(fedavg), "fedavg has no parameter tree"),
        (lambda: plot.sweep(runs(), x="rounds"), "x = 'rounds' is no axis"),
        (lambda: plot.sweep(runs(), y="f1"), "give ari or accuracy"),
        (lambda: plot.sweep(runs(), y=["ari", "accuracy"], xlabel="x"), "for a single score"),
        (
            lambda: plot.sweep(
                runs().assign(dp_unit=["client"] * 6 + ["example"] * 6), ax=Figure().subplots()
            ),
            "share no axis",
        ),
        (lambda: plot.sweep(runs().assign(ari=None)), "no run of this sweep has y = 'ari'"),
    ):
        with pytest.raises(UsageError, match=words):
            draw()
