"""Intervals of scores."""

from __future__ import annotations

import numpy as np
import pytest

from securecluster.attacks.scoring import _unbiased


def test_the_interval_of_a_biased_score_is_shifted_to_the_score() -> None:
    draw = np.random.default_rng(0)
    resampled = 0.61 + 0.01 * draw.standard_normal(1000)
    interval = _unbiased(resampled, 0.6)
    # two standard deviations, nearly, beside the score and not beside the resamples' mean
    assert interval.low == pytest.approx(0.6 - 0.0196, abs=0.002)
    assert interval.high == pytest.approx(0.6 + 0.0196, abs=0.002)


def test_a_few_far_resamples_do_not_move_the_interval_off_the_score() -> None:
    # one resample in a thousand has no spread, and a bound that is as good as infinite
    resampled = np.zeros(1000)
    resampled[0] = 5e5
    interval = _unbiased(resampled, 0.0)
    assert (interval.low, interval.high) == (0.0, 0.0)
