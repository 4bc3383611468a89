"""Lines about work within a round."""

from __future__ import annotations

import logging

import pytest

from securecluster.core import progress


def test_only_work_that_takes_long_is_told_and_not_at_every_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds)
    watch = progress.told_while_slow("test: draw")
    with caplog.at_level(logging.INFO, progress.logger.name):
        for step in range(1, 9):
            seconds += 1.0
            watch(step, 8)
    assert caplog.messages == ["test: draw 3 of 8", "test: draw 6 of 8"]
