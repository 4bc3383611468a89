"""The script on sketches: what it clusters offline is what a run clusters."""

from __future__ import annotations

import pytest

from benchmarks.papers import sketches
from securecluster.core.randomness import Randomness
from securecluster.privacy.compression.sketches import Sketch
from securecluster.protocols import FLHC


@pytest.mark.exhaustive
def test_offline_clusters_are_those_of_a_run() -> None:
    rows, first = sketches._recorded("flhc", 20)
    assert rows.shape == (20, 4810) and first > 0
    fitted = FLHC(rounds=11, mask="none", sketch=64).fit(sketches._federation(20))
    step = fitted.state_.memory.step
    short = Sketch(64, Randomness(20)).forward(rows, step)
    assert sketches._flhc(short, 0.0, "paper", 64, first) == list(fitted.labels_)
    cell = {"seed": 20, "sketch": 64, "compress": "none", "method": "flhc"}
    noisy, pipeline = sketches._brief(rows, cell, 0.1, 1.0, 0)
    assert noisy.shape == (20, 64) and abs(pipeline.noise(4810) - 0.64) < 2e-3


def test_the_noise_that_is_borne_is_the_last_before_the_first_fall() -> None:
    scores = dict.fromkeys(sketches.SIGMAS, 1.0) | {0.06: 0.8, 0.5: 0.0}
    row = {"method": "cfl", "sketch": ""} | {
        f"{c}_{s:g}": str(v) for c in sketches.CLUSTERERS for s, v in scores.items()
    }
    assert set(sketches.borne([row]).values()) == {0.03}
