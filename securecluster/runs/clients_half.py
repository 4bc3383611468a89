"""The clients' half of a run: their endpoint, and what an observer measures of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members as clusters_of
from securecluster.clustering.metrics import agreement, share_at, spread
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Call, Rows
from securecluster.parties.client_state import ClientState
from securecluster.parties.endpoints import KeySource, build_client, samples_of
from securecluster.parties.method import Method
from securecluster.results.fitted_state import SHARED, UNTUNED
from securecluster.runtime.release_target import ReleaseTarget
from securecluster.runtime.run import CheckpointPart, Line
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import InProcess, Transport
from securecluster.training.baselines import HeldOut
from securecluster.training.chance_level import Chance, at_chance

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.runtime.endpoint import Endpoint


class ClientsHalf:
    """The clients' half of a run: of one client, of some, or of all.

    It shares nothing with the server but a transport. What an observer measures of its clients lies
    outside the protocol, and needs the server's state beside their data.

    Args:
        method: with the hyper-parameters of the run.
        federation: the clients and their data.
        settings: of the run.
        endpoint: answers calls to these clients.
    """

    def __init__(
        self, method: Method, federation: Federation, settings: Settings, endpoint: Endpoint[Any]
    ) -> None:
        self.method = method
        self.federation = federation
        self.settings = settings
        self.endpoint = endpoint
        self.client = endpoint.client
        # of each client before it tuned its model alone at the end; None where nobody did
        self._untuned: Rows | None = None

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

    def hold(self, events: list[Any]) -> None:
        """Hold the clients to a target ε, of which a resumed run has spent a part.

        Args:
            events: of the ledger so far.
        """
        for reservation in self.endpoint.reservations:
            if isinstance(reservation, ReleaseTarget):
                reservation.learn(events)

    def observe(self, state: Any) -> Line:
        """Return the observer's numbers after a round.

        Args:
            state: the server's state.
        """
        observer = self.method.observer
        scores = observer.evaluate(self.client, state)
        line = dict(observer.observe(self.federation, self.client, state, scores))
        line |= spread(scores)
        line["at_target"] = None
        if self.federation.objective.higher:
            line["at_target"] = share_at(scores, self.settings.target)
        return line

    def labels(self, state: Any) -> list[int]:
        """Return each client's cluster, (m,), as the experimenter knows it.

        Args:
            state: the server's final state.
        """
        return self.method.observer.known_labels(self.client, state)

    def agreement(self, labels: list[int]) -> dict[str, Any] | None:
        """Return scores against the true clusters; None where nobody knows these.

        Args:
            labels: each client's cluster, (m,).
        """
        # Files of one's own data have no true clusters to be compared with.
        if self.federation.truth is None:
            return None
        return dict(agreement(labels, self.federation.truth))

    def models(self, state: Any) -> Rows:
        """Return the model that each client keeps, (m, d).

        Args:
            state: the server's final state.
        """
        observer = self.method.observer
        if self.method.training.personal(self.method):
            self._untuned = observer.final_models(self.client, state)
        return observer.kept_models(self.client, state)

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
        assert models.index is not None
        shared = self.method.observer.shared_models(self.client)
        extra = shared_rows(shared, self._untuned, labels, self.unshared)
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


def shared_rows(
    shared: torch.Tensor | None,
    untuned: Rows | None,
    labels: Sequence[int],
    unshared: Collection[int],
) -> dict[str, torch.Tensor]:
    """Return the clusters' models, (k, d), where clients' own are others, by name.

    Of clients that tuned their models, a cluster's is that of its first client before tuning, of
    the first whose model was not trained alone if there is one.

    Args:
        shared: the clusters' models where the method has them beside the clients' own.
        untuned: all clients' models before tuning; None where there was none.
        labels: (m,) each client's cluster.
        unshared: numbers of the clients whose model was trained alone in the run.
    """
    if shared is not None:
        return {SHARED: shared}
    if untuned is None:
        return {}
    rows = []
    for members in clusters_of(labels):
        averaged = [i for i in members if i not in unshared]
        # a label that no client has, as where clients choose their own, stands for no model
        first = [*averaged, *members, 0][0]
        rows.append(untuned.row(first))
    return {UNTUNED: torch.stack(rows)}
