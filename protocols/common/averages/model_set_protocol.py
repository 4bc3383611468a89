"""The server's half of methods that average k models, of which each client trains one in a round.

IFCA, CLoVE and R-DPCFL differ in who picks a client's model, and by what. What they share is here:
the state of their loops, models at the end of a run, and newcomers, who choose a model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import grouped
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.protocols.common.averages import model_sets, restarts
from securecluster.protocols.common.averages.averaging import total_weights
from securecluster.protocols.common.averages.sampling import TRIES
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.newcomers import check_newcomers, check_offered
from securecluster.protocols.common.observer import Observer

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


@dataclass
class ModelSetState:
    """The state of the server's loop, as checkpoints store it."""

    running: restarts.Restart  # the models, and the one that each client chose or was assigned last
    offers: restarts.OfferedModels | None = None  # the models that newcomers choose from

    def final_choice(self) -> list[int]:
        """Return each client's model, (m,), as it would be if the run ended now."""
        return self.running.choice

    def shortfall(self, method: Any, history: Any) -> str:
        """Return how many of the models clients share.

        Args:
            method: of the run.
            history: of the run, which is not read.
        """
        return f"by their losses, clients share {len(self.used)} of the {method.k} models"

    @property
    def used(self) -> list[int]:
        """Return the models of some client; label c is model `used[c]`."""
        return sorted(set(self.final_choice()))

    @property
    def labels(self) -> list[int]:
        """Return each client's cluster, (m,)."""
        label_of = {model: label for label, model in enumerate(self.used)}
        return [label_of[model] for model in self.final_choice()]


class ModelSetObserver(Observer):
    """The experimenter's measurements where clients use the best of several models."""

    @property
    def needs_state(self) -> bool:
        """Return True: a client's state has all models, and its choice is the server's to tell."""
        return True

    def models_after_round(self, client: Any, state: Any) -> Rows:
        """Return each client's model, after the averages it has yet to receive.

        Args:
            client: a `ModelSetClient`.
            state: a `ModelSetState`.
        """
        return self.held_models(client, state, range(len(client.cohort.ids)))

    def final_models(self, client: Any, state: Any) -> Rows:
        """Return each client's model.

        Args:
            client: a `ModelSetClient`.
            state: a `ModelSetState`.
        """
        return self.held_models(client, state, [])

    def held_models(self, client: Any, state: Any, positions: Sequence[int]) -> Rows:
        """Return each client's model, after pending averages of those at some positions.

        Args:
            client: a `ModelSetClient`.
            state: a `ModelSetState`.
            positions: of clients of the cohort.
        """
        recipients = [client.cohort.ids[k] for k in positions]
        query = state.running.message_for(recipients)
        models = state.final_choice()
        choice = [models[i] for i in client.cohort.ids]
        held: Rows = client.taken(query, positions, choice)
        return held


@grouped
class ModelSetProtocol(ClusteringProtocol):
    """Base class of methods whose clients derive from `ModelSetClient`.

    The clients' method `join` answers `ModelAverages` with a newcomer's `ModelChoice`.
    """

    @property
    @abstractmethod
    def model_count(self) -> int:
        """Return the number of models, which is the largest number of clusters."""

    @property
    def vectors_per_round(self) -> int:
        """Return the vectors of d numbers that a client exchanges: k averages and an update."""
        return 1 + self.model_count

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the numbers of models, of starts, and of averages of all models.

        Args:
            config: the run's configuration.
        """
        sizes = super().frame_sizes(config)
        averages = self.model_count * sizes["averages"]
        return {**sizes, "models": self.model_count, "starts": 1, "model_averages": averages}

    def begin(self, net: ServerChannel, start: int = 0) -> restarts.Restart:
        """Return a start before its first round.

        Args:
            net: has the clients.
            start: the start's number, by which clients draw its initial models.
        """
        return restarts.Restart.begin(
            start, self.model_count, len(net.clients), fresh=self.mask != "none"
        )

    def average_assigned(
        self, net: ServerChannel, running: restarts.Restart, to: Sequence[int], method: Any
    ) -> None:
        """Let clients train the models that they are assigned, and average each model.

        Args:
            net: the server's channel.
            running: the models and assignments.
            to: the clients of this round.
            method: of an `AssignedModelClient`, which returns an `Update`.
        """
        if not to:
            return
        models = [running.choice[i] for i in to]
        assignment = model_sets.AssignedModel(Rows(torch.as_tensor(models)))
        sums = net.sum(method, assignment, to=to, by=models, groups=self.model_count)
        if sums.ids:
            running.post(sums.step, sums.rows.delta.table, total_weights(sums))

    def offered_models(self, net: ServerChannel, state: ModelSetState) -> restarts.OfferedModels:
        """Return the models in use, which newcomers are to choose from.

        Args:
            net: the server's channel.
            state: after the last averages were delivered.
        """
        return restarts.collect_models(net, state.running, self.mask != "none", state.used)

    def assign_newcomers(
        self, net: ServerChannel, state: ModelSetState, to: Sequence[int]
    ) -> list[int]:
        """Send newcomers the models in use, of which each chooses one (not in the papers).

        Args:
            net: the server's channel.
            state: the run's final state.
            to: the newcomers.

        Raises:
            UsageError: the run ended without models.
            UpdateError: a newcomer does not reply.
        """
        offer = offer_to(state, len(to))
        client: Any = self.client
        replies = net.gather(client.join, offer, to=to)
        check_newcomers(to, replies.ids)
        choices = replies.rows.model.values.tolist()
        model_of = check_offered(replies.ids, choices, offer.models.table.tolist())
        return [state.used.index(model_of[i]) for i in to]

    @property
    def observer(self) -> ModelSetObserver:
        """Return what the experimenter computes outside the protocol."""
        return ModelSetObserver(self)


def offer_to(state: ModelSetState, newcomers: int) -> model_sets.ModelAverages:
    """Return a message with all models in use to each newcomer.

    Args:
        state: the run's final state.
        newcomers: how many.

    Raises:
        UsageError: the run ended without models.
    """
    if state.offers is None or not state.offers.models:
        raise UsageError(
            "no client could show its model at the end of the run, so newcomers have none to "
            "choose: run it anew"
        )
    return state.offers.message_for(state.running, newcomers)


def send_models(
    net: ServerChannel,
    running: restarts.Restart,
    to: Sequence[int],
    method: Any = model_sets.AssignedModelClient.receive_models,
) -> Sequence[int]:
    """Send clients the averages that they lack, and return those that received them.

    Args:
        net: the server's channel.
        running: the models.
        to: the clients.
        method: the client method that receives them.
    """
    query = running.message_for(to)
    replies = net.gather(method, query, to=to)
    running.acknowledge(replies.ids)
    return replies.ids


def deliver_models(
    net: ServerChannel,
    running: restarts.Restart,
    method: Any = model_sets.AssignedModelClient.receive_models,
) -> None:
    """Send the last averages to all clients.

    Args:
        net: the server's channel.
        running: the models.
        method: the client method that receives them.
    """
    for _ in range(TRIES):
        lagging = sorted(restarts.lagging_clients_of(running))
        if not lagging:
            break
        send_models(net, running, lagging, method)
