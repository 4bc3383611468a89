"""The loop of methods that, in each round, ask clients, assign each a model, average and deliver.

CLoVE, R-DPCFL and FeSEM are such methods. A method says what its clients are asked (`ask`), and
which models follow from the answers (`assign`). The rest is here.

Line by line of one round:

1. invited clients get the averages that they lack; those that are asked answer
2. each client that replied is assigned one of the k models
3. a checkpoint is written, so that a resumed run keeps these models
4. clients train the models that they are assigned, and each model is averaged
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from securecluster.clustering.labels import check_clusters, largest
from securecluster.core.option_groups import grouped
from securecluster.errors import UsageError
from securecluster.messaging.replies import Replies
from securecluster.parties.labels import checked_labels
from securecluster.protocols.common.averages import model_set_protocol
from securecluster.protocols.common.averages.restarts import OfferedModels, Restart
from securecluster.protocols.common.averages.sampling import sample_clients
from securecluster.runtime.endpoint import GATHER, release_of
from securecluster.runtime.run import Run

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


@dataclass
class AssignEachRoundState(model_set_protocol.ModelSetState):
    """The state of the server's loop, as checkpoints store it."""

    assigned: list[int] = field(default_factory=list)  # clients that were ever assigned a model
    training: list[int] = field(default_factory=list)  # clients that train in this round

    def store(self, ids: Sequence[int], models: Sequence[int]) -> None:
        """Store the models that clients are assigned.

        Args:
            ids: the clients.
            models: of each of them.
        """
        for i, model in zip(ids, models, strict=True):
            self.running.choice[i] = model
        self.assigned = sorted({*self.assigned, *ids})

    def final_choice(self) -> list[int]:
        """Return each client's model, (m,); where none was assigned, that of most clients."""
        models = list(self.running.choice)
        default = largest([models[i] for i in self.assigned]) if self.assigned else 0
        assigned = set(self.assigned)
        return [model if i in assigned else default for i, model in enumerate(models)]


@grouped
class AssignEachRound(model_set_protocol.ModelSetProtocol):
    """Base class of methods that assign each client one of k models in every round.

    A method sets `client`, a subclass of `AssignedModelClient`, and `ask`. It defines `assign`
    where clients do not answer `ask` with a `ModelChoice`.
    """

    k: Any  # number of models; methods declare it with a default

    ask: ClassVar[Any]
    """Client method that is asked in each round: gathered, with `ModelAverages` as query."""
    state_type: ClassVar[type[AssignEachRoundState]] = AssignEachRoundState
    """Class of the state of the server's loop."""

    def assign(
        self, net: ServerChannel, state: Any, replies: Replies[Any], t: int
    ) -> Sequence[int]:
        """Return the models of the clients that replied to `ask`, (r,).

        By default these are the clients' own choices.

        Args:
            net: has the server's random draws, such as `net.randomness.generator("server", t)`.
            state: of the loop; `state.running.choice` has the models before.
            replies: of r clients, in the order of `replies.ids`.
            t: number of the round.
        """
        models: list[int] = replies.rows.model.values.tolist()
        return models

    def invited(self, net: ServerChannel, state: Any, t: int) -> list[int]:
        """Return the clients that get averages in round t, in order.

        By default it is a random share of all.

        Args:
            net: has the clients.
            state: of the loop.
            t: number of the round.
        """
        return sample_clients(net, net.clients, self.participation, t)

    def is_asked(self, state: Any, i: int, t: int) -> bool:
        """Return whether an invited client is asked in round t, and not sent averages alone.

        By default all are. One that is not asked keeps its model.

        Args:
            state: of the loop.
            i: the client's number.
            t: number of the round.
        """
        return True

    def stored(self, state: Any, ids: Sequence[int]) -> None:
        """Note that clients were assigned models; by default nothing follows.

        Args:
            state: of the loop.
            ids: the clients, one or more.
        """

    def received(self, net: ServerChannel, state: Any, ids: Sequence[int], t: int) -> None:
        """Note that clients got averages and were not asked; by default nothing follows.

        Args:
            net: has the server's random draws.
            state: of the loop.
            ids: the clients.
            t: number of the round.
        """

    def notes(self, state: Any) -> dict[str, Any]:
        """Return what a round's line of the history says besides the usual; by default nothing.

        Args:
            state: of the loop.
        """
        return {}

    def run_server(self, net: ServerChannel, run: Run) -> AssignEachRoundState:
        """Run the server's side.

        Args:
            net: the server's channel.
            run: rounds, checkpoints and history.
        """
        state = self.state_type(self.begin(net))
        for t in run.rounds("train", state, self.rounds):
            self.one_round(net, run, state, t)
        state.running = run.once("deliver", lambda: self.deliver(net, state), Restart)
        state.offers = run.once("offer", lambda: self.offered_models(net, state), OfferedModels)
        return state

    def one_round(self, net: ServerChannel, run: Run, state: Any, t: int) -> None:
        """Run one round: ask, assign and average.

        Args:
            net: the server's channel.
            run: checkpoints and history.
            state: of the loop.
            t: number of the round.
        """
        # the assignments are checkpointed before anyone trains: computed again, from other
        # replies, they could be others
        run.commit(state, partial(self._assign_models, net, state, t))
        self.average_models(net, state)
        run.note(**self.notes(state))

    def _assign_models(self, net: ServerChannel, state: AssignEachRoundState, t: int) -> None:
        """Send averages to the clients of round t, and assign their models."""
        invited = self.invited(net, state, t)
        requested = [i for i in invited if self.is_asked(state, i, t)]
        others = sorted(set(invited) - set(requested))
        replied = self._ask(net, state, requested, t) if requested else []
        received: Sequence[int] = []
        if others:
            client: Any = self.client  # whose own declaration of the method holds
            received = model_set_protocol.send_models(
                net, state.running, others, client.receive_models
            )
            self.received(net, state, received, t)
        state.training = sorted([*replied, *received])

    def _ask(
        self, net: ServerChannel, state: AssignEachRoundState, to: Sequence[int], t: int
    ) -> list[int]:
        """Return the clients that answered, once they are assigned models.

        Raises:
            UsageError: `assign` returned no models.
        """
        cls = type(self)
        query = state.running.message_for(to)
        replies: Replies[Any] = net.gather(cls.ask, query, to=to)
        state.running.acknowledge(replies.ids)
        ids = list(replies.ids)
        if ids:
            name = f"{cls.__name__}.assign"
            models = checked_labels(name, self.assign(net, state, replies, t), len(ids))
            if max(models) >= self.model_count:
                raise UsageError(
                    f"{name} returns model {max(models)}: there are {self.model_count}, numbered "
                    "from 0"
                )
            state.store(ids, models)
            self.stored(state, ids)
        return ids

    def average_models(self, net: ServerChannel, state: Any) -> None:
        """Let the clients of this round train, and average each model.

        A method whose clients contribute to several models does this otherwise:
        `state.running.post` takes weighted sums of updates for each model, and their weights.

        Where updates leave in sums only, the clients of a model that too few have do not train,
        since a sum over one client is its update. Their model stays as it is.

        Args:
            net: the server's channel.
            state: of the loop; `state.training` has the clients of this round.

        Raises:
            UsageError: the clients have no method `contribute`.
        """
        method = getattr(self.client, "contribute", None)
        if method is None:
            raise UsageError(
                f"{self.client.__name__} has no method contribute: derive it from "
                "AssignedModelClient"
            )
        to = state.training
        if GATHER not in release_of(method).via:
            sizes = Counter(state.running.choice[i] for i in to)
            to = [i for i in to if sizes[state.running.choice[i]] >= net.least_members]
        self.average_assigned(net, state.running, to, method)

    def deliver(self, net: ServerChannel, state: Any) -> Restart:
        """Send the last averages to all clients, and return the models.

        Clients that were never assigned a model use that of most clients (not in the papers).

        Args:
            net: the server's channel.
            state: of the loop.
        """
        client: Any = self.client
        model_set_protocol.deliver_models(net, state.running, client.receive_models)
        state.running.choice = state.final_choice()
        running: Restart = state.running
        return running

    @property
    def model_count(self) -> int:
        """Return k."""
        return int(self.k)

    @property
    def weighted(self) -> bool:
        """Return True: each model is the mean over samples."""
        return True

    def check(self, clients: int) -> None:
        """Check the number of models, too.

        Args:
            clients: m.

        Raises:
            UsageError: a hyper-parameter is out of range.
        """
        super().check(clients)
        if self.k is not None:
            check_clusters(self.k, clients)
