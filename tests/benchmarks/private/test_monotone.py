"""Falls of the mean over ε, and that the stored measurements have none beyond its interval."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import ttest_rel

from benchmarks.private.monotone import SCENARIOS, falls
from benchmarks.table import RESULTS, read


def test_a_fall_has_the_interval_of_a_paired_t_test() -> None:
    scores = np.random.default_rng(0).random((6, 3))
    pairs = [(0, 1), (0, 2), (1, 2)]
    for (low, high), (fall, width) in zip(pairs, falls(scores), strict=True):
        interval = ttest_rel(scores[:, low], scores[:, high]).confidence_interval(0.95)
        assert (fall - width, fall + width) == pytest.approx(tuple(interval), abs=1e-3)


def test_no_scenario_loses_clusters_as_epsilon_grows() -> None:
    rows = list(read(RESULTS / "monotone_summary.csv"))
    assert [row["scenario"] for row in rows[::2]] == list(SCENARIOS)
    assert [row["falls"] for row in rows] == ["False"] * len(rows)
