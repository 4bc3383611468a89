"""The clients' half of a run: their endpoint, and what an observer measures of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Call, Rows
from securecluster.parties.client_state import ClientState
from securecluster.parties.endpoints import KeySource, build_client, samples_of
from securecluster.parties.method import Method
from securecluster.runs.block import BlockEnd, shared_rows
from securecluster.runs.observed_clients import ObservedClients
from securecluster.runtime.release_target import ReleaseTarget
from securecluster.runtime.run import CheckpointPart
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import InProcess, Transport
from securecluster.training.baselines import HeldOut
from securecluster.training.chance_level import Chance, at_chance

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.runtime.endpoint import Endpoint


class ClientsHalf(ObservedClients):
    """The clients' half of a run: of one client, of some, or of all.

    It shares nothing with the server but a transport.

    Args:
        method: with the hyper-parameters of the run.
        federation: the clients and their data.
        settings: of the run.
        endpoint: answers calls to these clients.
    """

    def __init__(
        self, method: Method, federation: Federation, settings: Settings, endpoint: Endpoint[Any]
    ) -> None:
        super().__init__(method, federation, settings)
        self.endpoint = endpoint
        self.client = endpoint.client
        self._end: BlockEnd | None = None

    @classmethod
    def of(
        cls,
        method: Method,
        federation: Federation,
        settings: Settings,
        secrets: Randomness | None = None,
    ) -> ClientsHalf:
        """Return the half of all clients of a simulated run.

        Args:
            method: with the hyper-parameters of the run.
            federation: the clients and their data.
            settings: of the run.
            secrets: secret random streams of the run.
        """
        endpoint = build_client(method, federation, settings, key_source=KeySource(secrets=secrets))
        return cls(method, federation, settings, endpoint)

    def transport(self, lost: Callable[[Call], set[int]]) -> Transport:
        """Return the transport to the clients.

        Clients of one process share a batch, and messages skip encoding.

        Args:
            lost: returns the clients that do not reply to a call.
        """
        return InProcess(self.endpoint.answer, lost)

    def close(self) -> None:
        """Do nothing, since clients end with this process."""

    @property
    def device(self) -> torch.device:
        """Return where the clients compute."""
        device: torch.device = self.client.cohort.device
        return device

    @property
    def samples(self) -> dict[int, int]:
        """Return the number of samples that each client trains on, where these are public."""
        return samples_of(self.client) if self.method.privacy.per_example else {}

    def part(self) -> CheckpointPart:
        """Return the clients' part of a checkpoint, which must stay private."""
        return CheckpointPart(ClientState, self._state, self._restore)

    def _state(self) -> ClientState:
        state: ClientState = self.client.state(self.endpoint.keys.secrets)
        return state

    def _restore(self, state: ClientState) -> None:
        self.client.restore(state)
        self.endpoint.keys.restore(state.secrets)

    def hold(self, events: Callable[[], list[Any]]) -> None:
        """Hold the clients to a target ε, of which a resumed run has spent a part.

        Args:
            events: returns those of the ledger so far.
        """
        for reservation in self.endpoint.reservations:
            if isinstance(reservation, ReleaseTarget):
                reservation.learn(events())

    @property
    def observed(self) -> Any:
        """Return the clients' object."""
        return self.client

    def evaluate(self, state: Any) -> NDArray[np.float64]:
        """Return each client's score after a round, (m,).

        Args:
            state: the server's state.
        """
        return self.method.observer.evaluate(self.client, state)

    def models(self, state: Any) -> Rows:
        """Return the model that each client keeps, (m, d).

        Args:
            state: the server's final state.
        """
        self._end = BlockEnd.of(self.method, self.client, state)
        return self._end.models

    def scores(self, models: Rows) -> NDArray[np.float64]:
        """Return each client's score on its test data, (m,): the server holds none.

        Args:
            models: (m, d) of the clients.
        """
        scores: NDArray[np.float64] = self.client.cohort.scores(models)
        return scores

    def held_out(self, models: Rows) -> HeldOut:
        """Return what models and baselines say of the clients' test samples.

        Args:
            models: (m, d) of the clients.
        """
        return HeldOut.of(self.client.cohort, models)

    def tuned_once(self, models: Rows) -> Rows:
        """Return the clients' models after a round in which each trains its own alone, (m, d).

        Args:
            models: (m, d) of the clients.
        """
        tuned: Rows = self.client.tuned(models, 1)
        return tuned

    def final(self, models: Rows, labels: Sequence[int]) -> ClientState:
        """Return what clients keep of the run: their models and secrets.

        Args:
            models: (m, d) of the clients at the end, as `models` returned them.
            labels: (m,) each client's cluster.
        """
        assert models.index is not None and self._end is not None
        extra = shared_rows(self._end.shared, self._end.untuned, labels, self.unshared)
        index = list(models.index)
        return ClientState(models.table, index, self.endpoint.keys.secrets, extra=extra)

    def chance(self, models: Rows, scores: NDArray[np.float64]) -> Chance:
        """Return a comparison of the models with chance.

        Args:
            models: (m, d) of the clients.
            scores: (m,) on their test data.
        """
        return at_chance(self.client.cohort, models, scores)

    @property
    def unshared(self) -> list[int]:
        """Return the numbers of clients whose final model was trained alone."""
        return sorted(self.client.cohort.ids[k] for k in self.client.unshared)
