"""Protocols whose servers read what no message contained: a module that a new process can import.

Each is FedAvg, except for the mistake.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from securecluster.data import Federation
from securecluster.protocols import FedAvg
from securecluster.protocols.authoring import AveragingState, Run, ServerChannel, TrainingClient

# by client: what its client method wrote there
LEAKED: dict[int, float] = {}


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


class Leaks(FedAvg):
    """Its clients write a number of each client to a variable of the module."""

    def make_client(self, cohort: Any, pipeline: Any, config: Any) -> TrainingClient:
        for k, client in enumerate(cohort.ids):
            LEAKED[client] = float(cohort.sizes[k])
        return super().make_client(cohort, pipeline, config)


class ReadsLeaks(Leaks):
    """Its loop needs what the clients wrote."""

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        state = super().run_server(net, run)
        state.labels = [int(LEAKED[client] > 0) for client in net.clients]
        return state


class ReadsLeaksQuietly(Leaks):
    """Its loop goes on where the clients wrote nothing."""

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        state = super().run_server(net, run)
        state.labels = [int(LEAKED.get(client, 0.0) > 0) for client in net.clients]
        return state


class Misspells(FedAvg):
    """Its loop asks another object for an attribute that does not exist."""

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        net.fed  # type: ignore[attr-defined]  # noqa: B018
        return super().run_server(net, run)
