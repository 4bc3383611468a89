"""Shared by tests of nodes."""

from __future__ import annotations

import pytest

from securecluster import Federation, LabelSwap


@pytest.fixture(scope="module")
def federation(request: pytest.FixtureRequest) -> Federation:
    """As many clients in two clusters as `CLIENTS` of the test's module says."""
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=2), clients=request.module.CLIENTS, samples=20, seed=0
    )
