"""Shared by the tests of protocols: NSIM's pair network hardly trains, and nothing is drawn."""

from __future__ import annotations

from collections.abc import Iterator

import cases
import pytest

from securecluster import Federation
from securecluster.app.plots import curves


@pytest.fixture(scope="module", autouse=True)
def stub_pair_network() -> Iterator[None]:
    """A pair network for NSIM that trains for three steps."""
    with pytest.MonkeyPatch.context() as patch:
        cases.stub_pair_network(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def no_pictures() -> Iterator[None]:
    """Folders of runs hold no pictures; tests that read them override this fixture."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(curves, "draw", lambda *_: [])
        yield


@pytest.fixture(scope="session")
def four_clients() -> Federation:
    """Four clients in two clusters, 20 samples each."""
    return cases.two_clusters(clients=4, samples=20)
