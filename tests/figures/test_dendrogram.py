"""The dendrogram, read back from the figure."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import linkage

from securecluster.clustering.agglomerative import cut
from securecluster.figures.curves import RELATED
from securecluster.figures.dendrogram import dendrogram
from securecluster.protocols.flhc import LinkageRecord


def clustered(points: np.ndarray, at: float, ids: list[int]) -> tuple[LinkageRecord, list[int]]:
    tree = linkage(points, "average")
    labels = dict(zip(ids, cut(tree, at), strict=True))
    record = LinkageRecord(ids, torch.zeros(len(ids), len(ids)), torch.from_numpy(tree), at)
    return record, [labels.get(i, 0) for i in range(1 + max(ids))]


def test_clusters_have_their_colours_and_the_cut_its_line() -> None:
    points = np.array([[0.0], [0.1], [5.0], [5.2], [9.0]])
    linkage, labels = clustered(points, 1.0, [4, 2, 7, 0, 3])
    figure = dendrogram(linkage, labels, "how far")
    axes = figure.axes[0]
    assert axes.get_ylabel() == "how far"
    assert "5 clients" in axes.get_title() and "3 clusters" in axes.get_title()
    named = {int(text.get_text()): text.get_color() for text in axes.get_xticklabels()}
    assert set(named) == {4, 2, 7, 0, 3}
    assert named[4] == named[2] != named[7] == named[0] != named[3]
    *links, line = axes.get_lines()
    assert line.get_ydata()[0] == 1.0
    colours = {round(float(max(link.get_ydata())), 3): link.get_color() for link in links}
    assert colours[0.1] == named[4] and colours[0.2] == named[7]
    grey = {colour for height, colour in colours.items() if height > 1}
    assert len(grey) == 1 and not grey & set(named.values())


@pytest.mark.few(4)
@pytest.mark.parametrize("m", [2, 12, 100, 300])
@pytest.mark.parametrize("at", [0.0, 0.5, 1e9])
def test_any_size_and_any_cut_is_drawn(m: int, at: float) -> None:
    points = np.random.default_rng(0).normal(size=(m, 3))
    linkage, labels = clustered(points, at, list(range(m)))
    figure = dendrogram(linkage, labels)
    figure.canvas.draw()
    axes = figure.axes[0]
    assert len(axes.get_xticklabels()) == (m if m <= 200 else 0)
    top = float(linkage.merges[:, 2].max())
    assert top < axes.get_ylim()[1] < 1.5 * top


def test_the_title_says_what_was_merged() -> None:
    linkage, labels = clustered(np.array([[0.0], [1.0], [5.0]]), 2.0, [0, 1, 2])
    figure = dendrogram(linkage, labels, *RELATED)
    assert (
        figure.axes[0].get_title()
        == "merges of 3 clients by relevance of data, cut into 2 clusters"
    )
    assert "3 clients' updates" in dendrogram(linkage, labels).axes[0].get_title()


@pytest.mark.parametrize("words", [(), RELATED])
def test_the_title_fits(words: tuple[str, ...]) -> None:
    linkage, labels = clustered(np.arange(40.0)[:, None] ** 2, 10.0, list(range(40)))
    figure = dendrogram(linkage, labels, *words)
    figure.canvas.draw()
    box = figure.axes[0].title.get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1


def test_identical_updates_are_drawn_too() -> None:
    linkage, labels = clustered(np.zeros((4, 2)), 0.0, [0, 1, 2, 3])
    dendrogram(linkage, labels).canvas.draw()
