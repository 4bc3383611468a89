"""IFCA, the iterative federated clustering algorithm: Algorithm 1, with model averaging.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020. A baseline: it is told the number of clusters.

θ_j    the k models; under a mask the server knows no more of them than where each began and how
       far it has moved
F_i    the mean loss of client i's training samples; its estimate of its cluster is
       argmin_j F_i(θ_j)
s_ij   1 where client i takes model j: it tells its choice, and its update goes into a sum over
       those who chose alike

Restarts: a start whose models begin badly may keep two clusters in one model, so the paper starts
several times from random models. That all starts are short, and only the one with the lowest
training loss goes on, is ours. So is the weighting of a model's mean by |D_i|: the paper takes the
plain mean over the clients with s_ij = 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from securecluster.clustering.labels import check_number
from securecluster.core.randomness import Randomness
from securecluster.core.validation import check_whole
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Empty, Rows
from securecluster.messaging.replies import Replies
from securecluster.protocols.common.averaging import total_weights
from securecluster.protocols.common.base import ClusteringProtocol, ReleaseCounts
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.messages import ModelChoice
from securecluster.protocols.common.newcomers import check_newcomers, check_offered
from securecluster.protocols.common.sampling import sample_clients
from securecluster.protocols.ifca.client import IFCAClient, server_view
from securecluster.protocols.ifca.server import OfferedModels, Restart, collect_models
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class IFCAState:
    """What the server's loop changes."""

    running: Restart
    best: Restart | None = None  # of those that are over, while others are tried
    offers: OfferedModels | None = None  # the models that newcomers choose from

    @property
    def used(self) -> list[int]:
        """The models that some client took last; label c is model `used[c]`."""
        return sorted(set(self.running.choice))

    @property
    def labels(self) -> list[int]:
        """Each client's cluster."""
        return [self.used.index(j) for j in self.running.choice]


@dataclass
class IFCA(ClusteringProtocol):
    """k models; each client trains the one that fits its own samples best."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    k: int = 4
    """number of models"""
    starts: int = 10
    """short starts from other models, of which the best goes on (ours); 1 tries no other"""
    start_rounds: int = 5
    """rounds of a short start, at most all; those of the best count towards rounds"""

    name: ClassVar[str] = "ifca"
    client: ClassVar[type[TrainingClient]] = IFCAClient
    one_model: ClassVar[bool] = False

    def run_server(self, net: ServerChannel, run: Run) -> IFCAState:
        """Algorithm 1."""
        state = IFCAState(self._begin(net, 0))
        for t in run.rounds("train", state, self.total_rounds):
            judged = t <= self._short and t % self._each == 0
            if judged:  # clients judge the models with this round's averages
                run.commit(state, partial(self._average, net, state, t))
            else:
                self._average(net, state, t)
            run.note(start=state.running.number, loss=self._judge(net, state) if judged else None)
        self._turn(net, state, self.total_rounds + 1)
        state.running = run.once("deliver", lambda: self._settle(net, state), Restart)
        state.offers = run.once(
            "offer",
            lambda: collect_models(net, state.running, masked=self.mask != "none"),
            OfferedModels,
        )
        return state

    def assign_newcomers(
        self, net: ServerChannel, state: IFCAState, to: Sequence[int]
    ) -> list[int]:
        """Each newcomer gets the models in use and takes the best of them (ours)."""
        if state.offers is None or not state.offers.models:
            raise UsageError(
                "no client could show its model at the end of the run, so newcomers have none to "
                "choose: run it anew"
            )
        got = net.gather(IFCAClient.join, state.offers.message_for(state.running, len(to)), to=to)
        check_newcomers(to, got.ids)
        found = check_offered(got.ids, got.rows.model.values.tolist(), state.offers.models)
        return [state.used.index(found[i]) for i in to]

    @property
    def total_rounds(self) -> int:
        """Rounds of all starts."""
        return self.rounds + max(0, self._short - self._each)

    @property
    def vectors_per_round(self) -> int:
        """Each client gets all k averages, and sends an update."""
        return 1 + self.k

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the numbers of models and of starts."""
        found = super().frame_sizes(config)
        k = int(self.k)
        return {
            **found,
            "models": k,
            "starts": int(self.starts),
            "ifca_averages": k * found["averages"],
        }

    @property
    def _each(self) -> int:
        return min(self.start_rounds, self.rounds)

    @property
    def _short(self) -> int:
        """The round with which the last of several short starts ends."""
        return self.starts * self._each if self.starts > 1 else 0

    def _begin(self, net: ServerChannel, start: int) -> Restart:
        return Restart.begin(start, self.k, len(net.clients), fresh=self.mask != "none")

    def _turn(self, net: ServerChannel, state: IFCAState, t: int) -> None:
        """When a short start is over: the next one, or after the last the best of all goes on."""
        over, left = divmod(t - 1, self._each)
        if left or not 1 <= over <= self.starts or not self._short:
            return
        if state.best is None or state.running.loss < state.best.loss:
            state.best = state.running
        if over < self.starts:
            state.running = self._begin(net, over)
        else:
            state.running, state.best = state.best, None

    def _average(self, net: ServerChannel, state: IFCAState, t: int) -> None:
        """Round t of averaging."""
        self._turn(net, state, t)
        # lines 4–7
        chosen = self._choose(net, state, sample_clients(net, net.clients, self.participation, t))
        if chosen.ids:
            by = [state.running.choice[i] for i in chosen.ids]
            # lines 8–9
            sums = net.sum(IFCAClient.contribute, Empty(), to=chosen.ids, by=by, groups=self.k)
            if sums.ids:
                state.running.post(sums.step, sums.rows.delta.table, total_weights(sums))  # line 11

    def _choose(
        self, net: ServerChannel, state: IFCAState, to: Sequence[int]
    ) -> Replies[ModelChoice]:
        """Each client takes what it lacks of the models and names the one it takes."""
        got = net.gather(IFCAClient.choose, state.running.message_for(to, state.best), to=to)
        state.running.taken(got)
        return got

    def _judge(self, net: ServerChannel, state: IFCAState) -> float | None:
        """The training loss of a start, each client with its best model; the same clients judge
        every start.
        """
        judges = sample_clients(net, net.clients, self.participation, 0, minimum=MINIMUM)
        return state.running.judged(
            net.sum(
                IFCAClient.lowest_loss, state.running.message_for(judges, state.best), to=judges
            )
        )

    def _settle(self, net: ServerChannel, state: IFCAState, tries: int = 5) -> Restart:
        """The last averages reach everyone, who chooses once more (ours); who does not reply stays
        with its last choice.
        """
        left = tuple(net.clients)
        for _ in range(tries):
            if left:
                left = self._choose(net, state, left).lost
        return state.running

    @property
    def weighted(self) -> bool:
        """Always: each model is the mean over samples (ours; the paper's is over clients)."""
        return True

    def config(self, federation: Federation, dtype: str) -> dict[str, Any]:
        """Refuses a model whose initial weights cannot be drawn anew."""
        if max(self.k, self.starts) > 1:
            self.flat_model(federation).redrawn(Randomness(federation.seed), "start", 0, 1)
        return super().config(federation, dtype)

    def check(self, clients: int) -> None:
        """Adds the numbers of models and starts."""
        super().check(clients)
        check_number(self.k, clients)
        check_whole(self, starts=1, start_rounds=1)

    def releases(self) -> ReleaseCounts:
        """In every round a choice, a row of k losses, and an update; a choice at the end, and the
        least loss of each short start.
        """
        return ReleaseCounts(
            updates=self.total_rounds,
            losses=self.total_rounds + 1 + (self.starts if self._short else 0),
            trainings=self.total_rounds,
        )

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Of losses, and of choices, which are made of noisy ones."""
        z = float(config["noise"])
        return super().multipliers(config) | ({"loss": z, "model": z} if z else {})

    def replacement_factors(self) -> dict[str, float]:
        """A row of losses moves as far (`noisy_losses`)."""
        return {"loss": 1.0, "model": 1.0}

    def server_view(self) -> list[str]:
        """What the choices show."""
        return server_view(self.noisy, self.per_client)

    def models_after_round(self, client: Any, state: Any) -> Rows:
        """The model each client took last, with the averages it has yet to get."""
        return self._held(client, state, range(len(client.cohort.ids)))

    def final_models(self, client: Any, state: Any) -> Rows:
        """The model each client took last."""
        return self._held(client, state, [])

    def _held(self, client: Any, state: IFCAState, at: Sequence[int]) -> Rows:
        choice = [state.running.choice[i] for i in client.cohort.ids]
        models: Rows = client.taken(
            state.running.message_for([client.cohort.ids[k] for k in at], state.best), at, choice
        )
        return models
