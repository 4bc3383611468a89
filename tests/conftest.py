"""Shared by all tests: small federations, and no spinning threads on busy machines."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: two test processes on two cores would fight

import pytest

from securecluster import Federation, LabelSwap


@pytest.fixture
def small() -> Federation:
    """Six clients in two clusters, 40 training samples each."""
    return Federation.simulate("digits", scenario=LabelSwap(clusters=2), clients=6, samples=40, seed=0)
