"""Shared by the tests of attacks: runs without pictures, which nobody reads here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from securecluster.app.plots import curves


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Folders of runs hold no pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda *_: [])
        yield
