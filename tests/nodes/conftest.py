"""Shared by tests of nodes."""

from __future__ import annotations

import pytest
from cases import two_clusters

from securecluster import Federation


@pytest.fixture(scope="module")
def federation(request: pytest.FixtureRequest) -> Federation:
    """As many clients in two clusters as `CLIENTS` of the test's module says."""
    return two_clusters(request.module.CLIENTS, 20)
