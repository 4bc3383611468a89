"""Protocols whose servers read what no message contained.

Each is FedAvg, except for the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from securecluster.data import Federation
from securecluster.protocols import FedAvg
from securecluster.protocols.authoring import AveragingState, Run, ServerChannel


class KeepsFederation(FedAvg):
    """Keeps the federation where clients and server agree on the configuration."""

    def config(self, federation: Federation, dtype: str) -> dict[str, Any]:
        self.fed = federation
        return super().config(federation, dtype)


class ReadsTruth(KeepsFederation):
    """Its loop returns the true clusters."""

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        state = super().run_server(net, run)
        assert self.fed.truth is not None
        state.labels = list(self.fed.truth)
        return state


class ReadsTruthOfNewcomers(KeepsFederation):
    """Assigns newcomers by the run's true clusters."""

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        assert self.fed.truth is not None
        return list(self.fed.truth)[: len(to)]


class Misspells(FedAvg):
    """Its loop asks another object for an attribute that does not exist."""

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        net.fed  # type: ignore[attr-defined]  # noqa: B018
        return super().run_server(net, run)
