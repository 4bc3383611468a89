"""Shared by the tests of the command line: runs without pictures, where nobody reads these."""

from __future__ import annotations

import pytest

from securecluster.app.plots import comparison, curves


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders hold no pictures: drawing them takes longer than a small run."""
    for module in (comparison, curves):
        monkeypatch.setattr(module, "draw", lambda *_: [])
