"""Which lines of a sweep are efficient, on lines made by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from securecluster.studies import sweep_tables
from securecluster.studies.pareto import Costs, efficient


def line(
    accuracy: float | None, sent: float | None, epsilon: float, **values: Any
) -> dict[str, Any]:
    """Return a line of a summary, with all bytes up."""
    row = {"accuracy": accuracy, "up": sent, "down": 0.0, "epsilon": epsilon}
    return row | {"target_epsilon": None, **values}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ((0.9, 100.0, 2.0), True),  # more accurate for the same bytes and ε
        ((0.8, 99.0, 2.0), True),  # fewer bytes
        ((0.8, 100.0, 1.9), True),  # less ε
        ((0.8, 100.0, 2.0), False),  # the same in all three
        ((0.9, 100.0, 2.1), False),  # more accurate for more ε
        ((0.9, 101.0, 2.0), False),  # more accurate for more bytes
        ((0.7, 1.0, 0.1), False),  # cheaper and less accurate
    ],
)
def test_a_line_is_dominated_by_what_is_better_once_and_worse_never(
    other: tuple[float, float, float], told: bool
) -> None:
    marks = efficient([line(0.8, 100.0, 2.0), line(*other)], "accuracy")
    assert marks[0] is not told
    assert Costs(0.0, 1.0, 1.0).dominates(Costs(0.0, 1.0, 1.0)) is False


def test_the_efficient_lines_of_a_plane_are_its_staircase() -> None:
    # accuracy by bytes, at one ε: the staircase rises at 10, 30 and 60 bytes
    points = {10: 0.5, 20: 0.4, 30: 0.7, 40: 0.7, 50: 0.6, 60: 0.9, 70: 0.9}
    rows = [line(accuracy, sent, 1.0) for sent, accuracy in points.items()]
    marks = efficient(rows, "accuracy")
    assert [sent for sent, mark in zip(points, marks, strict=True) if mark] == [10, 30, 60]
    # the same numbers as errors, of which less is better
    marks = efficient(rows, "accuracy", higher=False)
    assert [sent for sent, mark in zip(points, marks, strict=True) if mark] == [10, 20]


def test_up_and_down_count_and_so_does_more_noise_elsewhere() -> None:
    rows = [
        line(0.8, 10.0, 1.0, down=90.0), line(0.8, 50.0, 1.0, down=49.0),
        line(0.7, 10.0, math.inf, down=9.0), line(0.8, 10.0, math.inf, down=9.0),
    ]  # fmt: skip
    assert efficient(rows, "accuracy") == [False, True, False, True]


def test_at_equal_targets_what_the_search_left_of_epsilon_decides_nothing() -> None:
    rows = [
        line(0.8, 100.0, 0.9991, target_epsilon=1.0),
        line(0.9, 100.0, 0.9999, target_epsilon=1.0),
        line(0.9, 100.0, 0.0, target_epsilon=2.0),  # releases nothing, with less noise
    ]
    assert efficient(rows, "accuracy") == [False, True, False]


def test_lines_without_a_score_are_not_judged_and_dominate_nothing() -> None:
    rows = [line(0.8, 100.0, 1.0), line(None, 1.0, 0.1), line(0.5, None, 0.1)]
    assert efficient(rows, "accuracy") == [True, None, None]


def test_the_summary_marks_accuracy_and_clusters_apart() -> None:
    rows = []
    for run, (variant, ari, accuracy) in enumerate([("cfl", 1.0, 0.7), ("fedavg", 0.0, 0.9)]):
        row: dict[str, Any] = dict.fromkeys(sweep_tables.columns("accuracy"))
        row |= {"run": run, "variant": variant, "seed": 0, "noise": 0.1, "status": "done"}
        rows.append(row | {"epsilon": 5.0, "ari": ari, "accuracy": accuracy, "up": 9, "down": 1})
    cfl, fedavg = sweep_tables.summary(rows, "accuracy")
    assert (cfl["efficient"], cfl["efficient_ari"]) == (False, True)
    assert (fedavg["efficient"], fedavg["efficient_ari"]) == (True, False)
    # where less is better
    cfl, fedavg = sweep_tables.summary(rows, "accuracy", higher=False)
    assert (cfl["efficient"], fedavg["efficient"]) == (True, False)
