"""Scores of attacks with few resamples."""

from __future__ import annotations

import pytest

from securecluster.attacks import scoring


@pytest.fixture(autouse=True)
def few_resamples(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take as many resamples and shuffles as the module's RESAMPLES says, if it says so."""
    given = getattr(request.module, "RESAMPLES", (scoring.RESAMPLES, scoring.SHUFFLES))
    resamples, shuffles = given
    monkeypatch.setattr(scoring, "RESAMPLES", resamples)
    monkeypatch.setattr(scoring, "SHUFFLES", shuffles)
