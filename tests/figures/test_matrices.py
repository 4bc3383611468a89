"""Pictures of matrices over pairs of clients, read back from the figures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.cluster.hierarchy import linkage

from securecluster.clustering.metrics import spread
from securecluster.figures import curves
from securecluster.figures.dendrogram import dendrogram
from securecluster.figures.matrices import graph, relevance, similarity

BETWEEN = np.array([[1, 0.2, 0.9, 0.3], [0.2, 1, 0.1, 0.8], [0.9, 0.1, 1, 0.4], [0.3, 0.8, 0.4, 1]])
LABELS = [0, 1, 0, 1]
ORDERED = np.array(
    [
        [np.nan, 0.9, 0.2, 0.3],
        [0.9, np.nan, 0.1, 0.4],
        [0.2, 0.1, np.nan, 0.8],
        [0.3, 0.4, 0.8, np.nan],
    ]
)


def _shown(axes: Any) -> np.ndarray:
    (image,) = axes.get_images()
    found: np.ndarray = np.ma.filled(image.get_array(), np.nan)
    return found


def test_clients_stand_by_cluster_and_the_diagonal_is_empty() -> None:
    before = BETWEEN.copy()
    axes, bar = relevance(BETWEEN, LABELS).axes
    np.testing.assert_array_equal(_shown(axes), ORDERED)
    np.testing.assert_array_equal(BETWEEN, before)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0", "2", "1", "3"]
    assert {line.get_xdata()[0] for line in axes.get_lines()} == {0, 1.5}, (
        "a line between the clusters, in both directions"
    )
    assert axes.get_images()[0].get_clim() == (0, 1) and bar.get_ylabel() == "R"
    cosines = similarity(BETWEEN, LABELS).axes[0]
    np.testing.assert_array_equal(_shown(cosines), ORDERED)
    assert cosines.get_images()[0].get_clim() == (-0.9, 0.9)


def test_a_matrix_may_be_about_some_clients() -> None:
    axes = relevance(BETWEEN, [1, 7, 0, 3, 1, 0], [0, 2, 4, 5]).axes[0]  # of clusters 1, 0, 1, 0
    np.testing.assert_array_equal(_shown(axes), ORDERED[np.ix_([2, 3, 0, 1], [2, 3, 0, 1])])
    assert [text.get_text() for text in axes.get_xticklabels()] == ["2", "5", "0", "4"]
    assert {line.get_xdata()[0] for line in axes.get_lines()} == {0, 1.5}


def test_clients_stand_under_their_names() -> None:
    hospitals = ["1", "2", "3", "4"]
    merges = torch.from_numpy(linkage(1 - BETWEEN[np.triu_indices(4, 1)], "average"))
    record = SimpleNamespace(ids=[0, 1, 2, 3], merges=merges, threshold=0.5)
    distances = _graph([0.1, 0.2, 0.8], 0.5, 1 - BETWEEN)
    for figure, part in (
        (relevance(BETWEEN, LABELS, names=hospitals), 0),
        (similarity(BETWEEN, LABELS, hospitals), 0),
        (graph(distances, LABELS, hospitals), 1),
        (dendrogram(record, LABELS, names=hospitals), 0),
    ):
        marks = [text.get_text() for text in figure.axes[part].get_xticklabels()]
        assert sorted(marks) == hospitals
    some = relevance(BETWEEN, [1, 7, 0, 3, 1, 0], [0, 2, 4, 5], names=list("abcdef")).axes[0]
    assert [text.get_text() for text in some.get_xticklabels()] == ["c", "f", "a", "e"]


def test_long_names_are_turned_and_cut_and_are_no_formulas() -> None:
    names = ["St. Mary's Hospital, London", "$x_1$ $", "a\x1bb", "d"]
    figure = relevance(BETWEEN, LABELS, names=names)
    figure.canvas.draw()
    marks = figure.axes[0].get_xticklabels()
    assert [text.get_text() for text in marks] == ["St. Mary's Ho…", "a\\x1bb", "$x_1$ $", "d"]
    assert {text.get_rotation() for text in marks} == {90.0}


def test_marks_show_the_true_clusters_in_the_order_of_the_clients() -> None:
    truth = [5, 3, 3, 3]
    of_three, of_five = relevance(BETWEEN, LABELS, truth=truth).axes[0].collections
    # clients 2, 0, 1, 3: within a cluster by true cluster
    assert [y for _, y in of_three.get_offsets()] == [0, 2, 3]
    assert [y for _, y in of_five.get_offsets()] == [1]
    assert of_three.get_facecolor().tolist() != of_five.get_facecolor().tolist()
    # told apart in grey, too
    assert len(of_three.get_paths()[0]) != len(of_five.get_paths()[0])
    marks = relevance(BETWEEN, LABELS, truth=truth).axes[0].get_xticklabels()
    assert [text.get_text() for text in marks] == ["2", "0", "1", "3"]
    merges = torch.from_numpy(linkage(1 - BETWEEN[np.triu_indices(4, 1)], "average"))
    record = SimpleNamespace(ids=[0, 1, 2, 3], merges=merges, threshold=0.5)
    axes = dendrogram(record, LABELS, truth=truth).axes[0]
    of_three, of_five = axes.collections
    leaves = [text.get_text() for text in axes.get_xticklabels()]
    odd = leaves.index("0")
    assert of_five.get_offsets()[0][0] == axes.get_xticks()[odd]
    assert "true clusters" in axes.get_xlabel()


def test_starts_that_were_given_up_begin_where_the_kept_one_does() -> None:
    history = [
        {"round": t, "start": start, "accuracy": value, "splits": []}
        for t, start, value in ((1, 0, 0.1), (2, 0, 0.2), (3, 1, 0.3), (4, 1, 0.4), (5, 1, 0.5))
    ]
    (axes,) = curves.learning(history, "accuracy", "", "").axes
    given_up, kept = axes.get_lines()
    assert (list(given_up.get_xdata()), list(given_up.get_ydata())) == ([1, 2], [0.1, 0.2])
    assert (list(kept.get_xdata()), list(kept.get_ydata())) == ([1, 2, 3], [0.3, 0.4, 0.5])
    assert given_up.get_label() == "other starts, given up (1)"
    assert not axes.collections  # these lines know no spread


def test_a_curve_lies_between_the_scores_of_its_clients() -> None:
    scores = np.array([[0.1, 0.2, 0.4, 0.5, 0.9], [0.3, 0.3, 0.6, 0.8, 1.0]])
    history = [
        {"round": t, "accuracy": own.mean(), "splits": [], **spread(own)}
        for t, own in enumerate(scores, 1)
    ]
    history.append({"round": 3, "accuracy": None, "splits": []})  # not evaluated
    (axes,) = curves.learning(history, "accuracy", "", "").axes
    everybody, middle = axes.collections
    for band, lows, highs in (
        (everybody, [0.1, 0.3], [0.9, 1.0]),
        (middle, [0.2, 0.3], [0.5, 0.8]),
    ):
        (outline,) = band.get_paths()
        corners = {(float(x), float(y)) for x, y in outline.vertices}
        assert corners == {*zip((1, 2), lows, strict=True), *zip((1, 2), highs, strict=True)}
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert texts == ["mean over clients", "all clients", "middle half of clients"]
    axes.figure.draw_without_rendering()
    legend = axes.get_legend().get_window_extent()
    assert not legend.overlaps(axes.get_window_extent())


def test_starts_that_were_given_up_have_no_band() -> None:
    own = spread(np.array([0.1, 0.5, 0.9]))
    history = [
        {"round": t, "start": start, "accuracy": 0.5, "splits": [], **own}
        for t, start in ((1, 0), (2, 0), (3, 1), (4, 1), (5, 1))
    ]
    (axes,) = curves.learning(history, "accuracy", "", "").axes
    for band in axes.collections:
        assert {x for x, _ in band.get_paths()[0].vertices} == {1, 2, 3}


def _graph(edges: list[float], at: float, distance: np.ndarray) -> Any:
    return SimpleNamespace(
        edges=torch.tensor(edges), threshold=at, distance=torch.from_numpy(distance)
    )


def test_the_graph_shows_its_tree_and_the_threshold() -> None:
    edges, matrix, _ = graph(_graph([0.1, 0.2, 0.8], 0.5, 1 - BETWEEN), LABELS).axes
    joined, apart, line = edges.get_lines()
    np.testing.assert_allclose(joined.get_xydata(), [[1, 0.1], [2, 0.2]], rtol=1e-6)
    np.testing.assert_allclose(apart.get_xydata(), [[3, 0.8]], rtol=1e-6)
    assert set(line.get_ydata()) == {0.5} and line.get_label() == "λ = 0.5"
    assert edges.get_ylim()[1] > 0.8
    np.testing.assert_allclose(_shown(matrix), 1 - ORDERED)


@pytest.mark.few(3)
@pytest.mark.parametrize("at", [0.0, 0.5, 9.0])
@pytest.mark.parametrize("m", [2, 3, 60])
def test_any_size_and_threshold_is_drawn(m: int, at: float) -> None:
    distance = np.full((m, m), 0.4)
    figure = graph(_graph([0.4] * (m - 1), at, distance), [0] * m)
    figure.canvas.draw()
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == ["joined" if at >= 0.4 else "left apart", f"λ = {at:.4g}"]
    assert len(figure.axes[1].get_xticklabels()) == (m if m <= 40 else 0), (
        "places are no client numbers"
    )


@pytest.mark.usefixtures("pictures")
def test_a_state_brings_the_pictures_it_has(tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "protocol": "oneshot",
        "data": "digits",
        "scenario": "tasks",
        "clients": 4,
        "seed": 0,
        "truth": [0, 1, 0, 1],
        "labels": LABELS,
        "names": ["1", "2", "3", "4"],
        "metric": "accuracy",
        "metrics": {"accuracy": {"after": None}},
    }
    empty = SimpleNamespace(relevance=torch.zeros(0, 0), graph=None, linkage=None)
    assert curves.draw(tmp_path, content, [], empty) == []
    record = SimpleNamespace(
        ids=[0, 1, 2, 3],
        merges=torch.from_numpy(linkage(1 - BETWEEN[np.triu_indices(4, 1)], "average")),
        threshold=0.5,
    )
    whole = SimpleNamespace(
        relevance=torch.from_numpy(BETWEEN),
        graph=_graph([0.1, 0.2, 0.8], 0.5, 1 - BETWEEN),
        linkage=record,
    )
    made = curves.draw(tmp_path, content, [], whole)
    assert sorted(path.name for path in made) == ["dendrogram.png", "graph.png", "relevance.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in made)
    assert curves.title_of(content) == "one-shot on digits (tasks), 4 clients, seed 0"
    assert curves.title_of(content | {"seed": None}).endswith(", 4 clients")
