"""What the experimenter computes outside the protocol: scores, models and clusters of all clients.

The observer sees all clients' data, which no party of a run does. Nothing that it computes reaches
a client or the server, and ε does not cover it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.metrics import agreement, mean
from securecluster.messaging.messages import Rows
from securecluster.runtime.run import Line

if TYPE_CHECKING:
    from securecluster.data.federation import Federation


class Observer:
    """The experimenter's measurements of a method.

    Args:
        method: with its hyper-parameters.
    """

    def __init__(self, method: Any) -> None:
        self.method = method

    @property
    def server_knows_labels(self) -> bool:
        """Return whether the final state of `run_server` has the clients' clusters."""
        return True

    def known_labels(self, client: Any, state: Any) -> list[int]:
        """Return each client's cluster as the experimenter knows it, (m,).

        These are the server's, unless clients do not tell it their clusters.

        Args:
            client: the clients' object.
            state: the server's state.
        """
        return [int(label) for label in state.labels]

    def newcomer_labels(self, client: Any, state: Any, labels: list[int]) -> list[int]:
        """Return the clusters of newcomers as the experimenter knows them.

        Args:
            client: the newcomers' object.
            state: the server's final state.
            labels: what `assign_newcomers` returned.
        """
        return labels

    def models_after_round(self, client: Any, state: Any) -> Rows:
        """Return the model each client would use after this round, (m, d).

        The observer calls it outside the network, so it changes no client.

        Args:
            client: the clients' object.
            state: the server's state after the round.
        """
        clients = client.cohort.ids
        # With the averages that are still in the queue.
        query = state.outbox.message_for(clients)
        models: Rows = client.advanced(range(len(clients)), query)
        return models

    @property
    def needs_state(self) -> bool:
        """Return whether the server's state decides which model a client has at the end."""
        return False

    def evaluate(self, client: Any, state: Any) -> NDArray[np.float64]:
        """Return each client's accuracy, or other metric of the objective, after a round, (m,).

        Clients without test data have NaN.

        Args:
            client: the clients' object.
            state: the server's state after the round.
        """
        models = self.models_after_round(client, state)
        scores: NDArray[np.float64] = client.cohort.scores(models)
        return scores

    def final_models(self, client: Any, state: Any) -> Rows:
        """Return the model that each client has at the end of the run, (m, d).

        Args:
            client: the clients' object.
            state: the server's final state.
        """
        models: Rows = client.models
        return models

    def kept_models(self, client: Any, state: Any) -> Rows:
        """Return the model that each client keeps of the run, (m, d).

        It is the final one, which the client has tuned alone where the run says so.

        Args:
            client: the clients' object.
            state: the server's final state.
        """
        rounds = self.method.training.tuning(self.method)
        models: Rows = client.tuned(self.final_models(client, state), rounds)
        return models

    def shared_models(self, client: Any) -> Any:
        """Return the clusters' models, (k, d), where clients continued alone from them.

        Args:
            client: the clients' object.

        Returns:
            None where the clients' own models are the clusters'.
        """
        return None

    def observe(
        self, federation: Federation, client: Any, state: Any, scores: NDArray[np.float64]
    ) -> Line:
        """Return the observer's numbers after a round, for the history.

        Args:
            federation: the clients, with their true clusters where they are known.
            client: the clients' object.
            state: the server's state after the round.
            scores: (m,) the result of `evaluate`.
        """
        labels = self.known_labels(client, state)
        line: Line = {"clusters": len(set(labels)), federation.objective.metric: mean(scores)}
        if federation.truth is not None:
            line["ari"] = agreement(labels, federation.truth)["ari"]
        return line
