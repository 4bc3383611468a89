"""Rows from centres over iterations: Lloyd's steps are scikit-learn's, on the flowers of Iris."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, digits
from sklearn.datasets import load_iris
from sklearn.metrics import pairwise_distances_argmin

from securecluster import LabelSwap
from securecluster.attacks.experiments import tapped
from securecluster.attacks.on_models.centres import (
    CentresOverRounds,
    Iteration,
    _of_steps,
    moved_alone,
    solved,
)
from securecluster.audits.run_audit import adversary_of, finding_of
from securecluster.clustering.noisy_centres import CELL_REACH, STEP_REACH, displacement_rows
from securecluster.messaging.messages import Rows
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import SERVER
from securecluster.protocols import IFCA, Hidden, LocalKMeans

RESAMPLES = (50, 50)


def lloyd(rows: Any, k: int, seed: int, noise: float = 0.0) -> tuple[Any, list[Iteration]]:
    """Return assignments (iterations, n), and what a server reads of each iteration."""
    draw = np.random.default_rng(seed)
    centres = rows[draw.choice(len(rows), k, replace=False)]
    assignments: list[Any] = []
    iterations = []
    while len(assignments) < 2 or not np.array_equal(assignments[-1], assignments[-2]):
        labels = pairwise_distances_argmin(rows, centres)
        one_hot = np.eye(k)[labels]
        sums = one_hot.T @ rows + noise * draw.standard_normal(centres.shape)
        counts = one_hot.sum(0)
        assignments.append(labels)
        iterations.append(Iteration(counts, sums))
        centres = sums / np.maximum(counts, 1)[:, None]
        if noise and len(assignments) > 10:
            break
    return np.stack(assignments), iterations


def moves_of(rows: Any, noise: float = 0.0) -> list[tuple[Any, Any]]:
    """Return what was read, and the true rows of clients that moved alone, by their labels."""
    pairs = []
    for seed in range(20):
        labels, iterations = lloyd(rows, 3, seed, noise)
        for t, (before, after) in enumerate(itertools.pairwise(iterations)):
            for move in moved_alone(before, after):
                moved = (labels[t] == move.source) & (labels[t + 1] == move.target)
                pairs.append((move.row, rows[moved]))
    return pairs


def test_who_moves_alone_is_read_exactly_and_nobody_under_noise() -> None:
    rows = load_iris().data
    pairs = moves_of(rows)
    assert len(pairs) >= 5
    for read, true in pairs:
        assert len(true) == 1
        assert np.allclose(read, true[0], atol=1e-9)
    assert not moves_of(rows, noise=0.1)


def test_two_that_change_places_are_not_taken_for_one() -> None:
    before = Iteration(np.array([3, 2, 2]), np.array([[9.0], [4.0], [1.0]]))
    # one of 3 went from 0 to 1, while 1 and 2 exchanged a 2 for a 1
    after = Iteration(np.array([2, 3, 2]), np.array([[6.0], [6.0], [2.0]]))
    assert moved_alone(before, after) == []


def test_known_assignments_solve_what_the_row_space_holds() -> None:
    rows = load_iris().data
    labels, iterations = lloyd(rows, 3, 0)
    sums = np.stack([iteration.sums for iteration in iterations])
    found = solved(labels, sums)
    # whoever has a history of its own is in some combination of sums alone, or in none: the least
    # squares residual of its unit vector says so
    members = np.concatenate([np.eye(3)[row].T for row in labels])
    for number in range(len(rows)):
        unit = np.eye(len(rows))[number]
        _, *_ = solution = np.linalg.lstsq(members.T, unit, rcond=None)
        residual = np.linalg.norm(members.T @ solution[0] - unit)
        assert (number in found) == (residual < 1e-6)
    assert found
    for number, row in found.items():
        assert np.allclose(row, rows[number], atol=1e-6)


def found(protocol: Any, federation: Any, party: str = "server", helpers: str | None = None) -> Any:
    fitted, taps = tapped(protocol, federation, FULL)
    adversary = adversary_of(federation.names, party, helpers)
    return fitted, finding_of(CentresOverRounds(), fitted, federation, adversary, taps)


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_a_client_reads_the_other_model_of_a_cluster_of_two(mask: str) -> None:
    federation = digits(scenario=LabelSwap(clusters=4), clients=8, samples=20)
    protocol = LocalKMeans(k=4, rounds=3, local_rounds=2, model="linear", mask=mask)
    fitted, result = found(protocol, federation, "client:#0")
    size = list(fitted.labels_).count(fitted.labels_[0])
    assert result.score is not None, result.trace or result.reason
    assert result.score.value == (size == 2)
    twin = LocalKMeans(
        k=4, rounds=3, local_rounds=2, model="linear", mask=mask, clip=1.0, noise=0.5
    )
    _, noisy = found(twin, federation, "client:#0")
    assert noisy.score is not None and noisy.score.value == 0


@pytest.mark.parametrize("aggregation", ["plain", "secagg"])
def test_updates_of_other_models_are_not_taken_for_one_row(aggregation: str) -> None:
    federation = digits(scenario=LabelSwap(clusters=2), clients=8, samples=20)
    protocol = IFCA(k=2, rounds=4, model="linear", aggregation=aggregation, mask="none", starts=1)
    _, result = found(protocol, federation)
    assert result.score is None and "no client moved alone" in result.reason


def hidden_view(noise: float) -> tuple[Any, Any]:
    """Return what the server of `hidden` sees of points, one of which leaves its cell's centre."""
    points = np.array([[-0.5], [-0.45], [-0.4], [0.04], [0.4], [0.45], [0.5]])
    cells = np.array([[-0.3], [0.45]])  # of the fourth point the first one is nearer
    centres = np.array([[-0.3], [0.25]])  # and here the second one
    draw = np.random.default_rng(0)
    outcomes, messages = [], []
    for step, (field, public, reach) in enumerate(
        [("cells", cells, CELL_REACH), ("steps", centres, STEP_REACH)]
    ):
        row = displacement_rows(points, public, reach).sum(0)
        row = torch.as_tensor(row + noise * draw.standard_normal(row.shape))
        content = SimpleNamespace(**{field: Rows(row[None])})
        outcomes.append(VerbOutcome(SERVER, field, "sum", 0, step, (tuple(range(7)),), content))
        query = SimpleNamespace(centres=SimpleNamespace(value=torch.as_tensor(public)))
        messages.append(SimpleNamespace(step=step, content=query))
    return SimpleNamespace(outcomes=outcomes, messages=lambda: messages), points


def test_who_leaves_the_centre_of_its_cell_is_read_in_the_step_of_hidden() -> None:
    view, points = hidden_view(0.0)
    (row,) = list(_of_steps(view))
    own = displacement_rows(points[3:4], np.array([[-0.3], [0.25]]), STEP_REACH)[0]
    assert row.block == 1 and np.allclose(row.values, own[1])
    assert not list(_of_steps(hidden_view(0.1)[0]))


@pytest.mark.parametrize("aggregation", ["plain", "secagg"])
def test_nothing_is_claimed_of_hidden_where_nobody_moves(aggregation: str) -> None:
    federation = digits(scenario=LabelSwap(clusters=3), clients=12, samples=20)
    options: dict[str, Any] = {"k": 3, "rounds": 1, "model": "linear"}
    _, result = found(Hidden(**options, aggregation=aggregation), federation)
    assert result.score is None and "no client moved alone" in result.reason
