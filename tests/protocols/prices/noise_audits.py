"""Halved noise, for tests that audits refute it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from securecluster.privacy.dp import grid_noise, noise_streams
from securecluster.protocols import Settings
from securecluster.training import dp_sgd

FULL = Settings(transcript="full", threads=1)
SMALL: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "clip": 0.5}


@contextmanager
def halved_noise() -> Iterator[None]:
    """Halve the standard deviation of Gaussian noise, while ledgers claim all of it."""

    def half(multiplier: float, norm: float, d: int) -> float:
        return grid_noise.deviation(multiplier, norm, d) / 2

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise_streams, "deviation", half)
        patch.setattr(dp_sgd, "deviation", half)
        yield
