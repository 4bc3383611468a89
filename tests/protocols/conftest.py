"""Shared by the tests of protocols: NSIM's pair network hardly trains, and nothing is drawn."""

from __future__ import annotations

from collections.abc import Iterator

import cases
import pytest

from securecluster import Federation


@pytest.fixture(scope="module", autouse=True)
def stub_pair_network() -> Iterator[None]:
    """A pair network for NSIM that trains for three steps."""
    with pytest.MonkeyPatch.context() as patch:
        cases.stub_pair_network(patch)
        yield


@pytest.fixture(scope="session")
def four_clients() -> Federation:
    """Four clients in two clusters, 20 samples each."""
    return cases.two_clusters(clients=4, samples=20)
