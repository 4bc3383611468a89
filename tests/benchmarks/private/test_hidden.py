"""The bound on labels that follow from a private reply, and the benchmark's cells."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from benchmarks.private import hidden, hidden_runs
from securecluster import LabelSwap
from securecluster.core.randomness import Randomness
from securecluster.protocols.hidden.class_means import ClassMeans


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("k", [2, 4, 7])
def test_randomised_response_reaches_the_bound(epsilon: float, k: int) -> None:
    # the reply is the true label with e^ε times the probability of each other one
    weights = np.ones((k, k)) + (math.exp(epsilon) - 1) * np.eye(k)
    reply = weights / weights.sum(1, keepdims=True)
    ratios = reply[:, None] / reply[None]
    assert ratios.max() == pytest.approx(math.exp(epsilon))
    assert np.diag(reply).mean() == pytest.approx(hidden.bound(epsilon, k))


def test_no_reply_within_epsilon_beats_the_bound() -> None:
    draw = np.random.default_rng(0)
    k, epsilon = 4, 1.0
    for _ in range(200):
        # replies of 6 values, whose likelihood ratios between clusters are at most e^ε
        base = draw.dirichlet(np.ones(6))
        tilted = base * np.exp(draw.uniform(0, epsilon / 2, (k, 6)))
        reply = tilted / tilted.sum(1, keepdims=True)
        worst = math.log((reply[:, None] / reply[None]).max())
        right = reply.max(0).sum() / k  # the most likely cluster of each value
        assert right <= hidden.bound(worst, k) + 1e-12


def test_the_best_matching_counts_right_labels() -> None:
    assert hidden.share_right([2, 2, 0, 1], [0, 0, 1, 1], 4) == 0.75


def test_noise_hides_clusters_only_where_it_is_large() -> None:
    draw = np.random.default_rng(1)
    truth = np.repeat(np.arange(4), 50)
    points = np.eye(6)[truth] + 0.1 * draw.standard_normal((200, 6))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    shares = []
    for noise in (0.0, 1000.0):
        labels = hidden.assigned(points, 4, noise, np.random.default_rng(0))
        shares.append(hidden.share_right(labels, truth.tolist(), 4))
    assert shares[0] == 1.0 and shares[1] < 0.8


def test_every_cell_is_a_setting_at_a_seed_that_no_constant_was_chosen_on() -> None:
    cells = hidden.cells("cpu", 10)
    assert len(cells) == len(hidden.SETTINGS) * len(hidden.EPSILONS) * 10
    assert min(cell["seed"] for cell in cells) >= 200
    for name, setting in hidden.SETTINGS.items():
        # no image is at two clients
        assert sum(setting.sizes) * setting.samples <= 60_000
        assert f"{sum(setting.sizes)} clients" in name or sum(setting.sizes) == 200
        assert setting.told == len(setting.sizes) or len(setting.sizes) == 1


@pytest.mark.parametrize("alpha", [None, 0.3])
def test_no_two_clients_have_an_image_in_common(alpha: float | None) -> None:
    draw = np.random.default_rng(3)
    labels = np.repeat(np.arange(10), 100)
    setting = hidden.Setting("mnist", "swaps", (10, 10), samples=25, alpha=alpha)
    dealt = hidden.rows_of(setting, labels, draw)
    together = np.concatenate(dealt)
    assert len(dealt) == 20 and len(set(together)) == len(together)
    shares = [np.bincount(labels[rows], minlength=10).max() / len(rows) for rows in dealt]
    if alpha is None:
        assert {len(rows) for rows in dealt} == {25}
        assert np.mean(shares) < 0.35
    else:
        assert np.mean(shares) > 0.45


def test_points_are_those_of_clients_that_hold_the_images(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(5)
    images = draw.random((200, 1, 28, 28)).astype(np.float32)
    labels = np.repeat(np.arange(10), 20)
    low = ClassMeans(hidden.SHAPE, 10, 1, 0).smooth(images.reshape(200, -1).astype(np.float64))
    monkeypatch.setattr(hidden, "pool_of", lambda data: (np.stack([low] * 4), labels))
    setting = hidden.Setting("mnist", "swaps", (3, 3), samples=30, told=2)
    monkeypatch.setitem(hidden.SETTINGS, "small", setting)
    parts, truth = hidden.parts_of("small", 7)
    points = hidden.points_of(parts)
    rows = hidden.rows_of(setting, labels, Randomness(7).generator("images"))
    sketch = ClassMeans(hidden.SHAPE, 10, 2 * hidden.POINT_SIZE, 7)
    swap = LabelSwap(clusters=2)
    for point, cluster, own in zip(points, truth, rows, strict=True):
        x, y = swap.transform(cluster, images[own], labels[own], 10, Randomness(7))
        expected = sketch.point(torch.as_tensor(x), list(y))
        np.testing.assert_allclose(point, expected / np.linalg.norm(expected), atol=1e-9)


def test_centres_that_cut_one_cluster_are_known_by_their_separation() -> None:
    draw = np.random.default_rng(2)
    truth = np.repeat(np.arange(4), 50)
    separations = []
    for spread in (0.05, 10.0):
        points = np.eye(6)[truth] + spread * draw.standard_normal((200, 6))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        _, (separation, _) = hidden.clustered(points, 4, 0.0, np.random.default_rng(0))
        separations.append(separation)
    assert separations[0] > 0.9 and separations[1] < 0.6


def test_each_protocol_has_its_own_best_settings_of_one_grid() -> None:
    rows = [
        {"protocol": "a", "clip": "0.5", "lr": "0.2", "accuracy": "0.7"},
        {"protocol": "a", "clip": "1", "lr": "0.2", "accuracy": "0.8"},
        {"protocol": "b", "clip": "0.5", "lr": "0.2", "accuracy": "0.9"},
        {"protocol": "b", "clip": "1", "lr": "0.2", "accuracy": ""},  # was not run
    ]
    assert hidden_runs.chosen_settings(rows) == {"a": (1.0, 0.2), "b": (0.5, 0.2)}
    assert hidden_runs.TUNING_SEED not in {c["seed"] for c in hidden_runs.cells(3, {"a": (1, 1)})}
