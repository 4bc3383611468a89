"""IFCA, the iterative federated clustering algorithm: Algorithm 1, with model averaging.

Ghosh, Chung, Yin, Ramchandran, "An Efficient Framework for Clustered Federated Learning",
NeurIPS 2020. A baseline: the number of clusters is an input.

θ_j    the k models; under a mask the server has only their initial weights and their masked deltas
F_i    the mean loss of client i's training samples; its estimate of its cluster is
       argmin_j F_i(θ_j)
s_ij   1 where client i chooses model j: it sends its choice, and its update is added to a sum over
       the clients with the same choice

Where sums are secure, neither leaves a client: a secure sum counts the choices of each model, and
another one has a block of d numbers for each (not in the paper; `hidden_client`).

Rebalancing ("RR-Cluster": Yang, Hu, Kim, Li, "Differentially Private Federated Clustering with
Random Rebalancing", 2025; `rebalancing`): before clients train, the server moves clients at
random from models that many of them chose to models that fewer than B chose. The mean of B noisy
updates has at most the noise of one over √B. It follows from choices that were released, so it
costs no ε. The next choice, and the result, are the clients' own.

Restarts: a start whose initial models are poor may keep two clusters in one model, so the paper
starts several times from random models. Not in the paper: all starts are short, and only the one
with the lowest training loss is continued; rounds are those of all starts. Nor is the weighting of
a model's mean by |D_i|: the paper takes the plain mean over the clients with s_ij = 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

from securecluster.clustering.labels import check_clusters
from securecluster.core.lazy_torch import torch
from securecluster.protections.registry import AGGREGATIONS, PLAIN
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.averages.averaging import total_weights
from securecluster.protocols.common.averages.blocks import BlockStage
from securecluster.protocols.common.averages.model_set_protocol import ModelSetObserver, offer_to
from securecluster.protocols.common.averages.restarts import collect_models
from securecluster.protocols.common.options.sum_options import CountedSums
from securecluster.protocols.ifca import hidden_server
from securecluster.protocols.ifca.client import (
    IFCAClient,
    ModelAssignment,
    hidden_view,
    server_view,
)
from securecluster.protocols.ifca.hidden_client import HiddenChoiceClient
from securecluster.protocols.ifca.rebalancing import rebalanced

# short starts at most, and rounds of each, where they are not given
MOST_STARTS = 10
START_ROUNDS = 5


@dataclass
class IFCAState(fl.ModelSetState):
    """The state of the server's loop, as checkpoints store it."""

    best: fl.Restart | None = None  # of the starts that are over, while others are tried
    # what the server knows of choices in the end, where they are hidden
    final: hidden_server.FinalCounts = field(default_factory=hidden_server.FinalCounts)

    @property
    def used(self) -> list[int]:
        """Return the models that some client chose last; label c is model `used[c]`.

        Where choices are hidden, these are the models of `least_choosers` clients or more.
        """
        if self.final.counts:
            return self.final.shared
        return super().used

    @property
    def labels(self) -> list[int]:
        """Return each client's cluster, (m,), as far as the server knows.

        Where choices are hidden, that is one cluster of all clients.
        """
        if self.final.counts:
            return [0] * len(self.running.choice)
        return super().labels


@dataclass(kw_only=True)
class SumsOfChoices(CountedSums):
    """Options of sums of blocks, one for each model, by which clients hide their choice."""

    def refusal(self, method: Any) -> str | None:
        """Return that counts of choosers have no noise, or that sums are not remembered."""
        if self.hide_replies and not self.protection.remembers_sums:
            able = [name for name, other in AGGREGATIONS.items() if other.remembers_sums]
            return (
                "IFCA's clients compare the members of a sum with those of an earlier one, which "
                f"{self.aggregation} keeps no record of: take aggregation {' or '.join(able)}, or "
                "FL+HC (flhc)"
            )
        if not method.privacy.noisy:
            return None
        return (
            "IFCA under secure sums tells how many clients chose each model, and no noise covers "
            "these counts: take noise 0, FL+HC (flhc), or aggregation plain"
        )

    def weights_updates(self, method: Any) -> bool:
        """Return whether updates are weighted by numbers of samples.

        Where choices are hidden, their sums by model are not sent but where asked for.
        """
        return not method.privacy.per_client and (method.exact_weights or not self.hide_replies)

    def fields(self, method: Any, config: Mapping[str, Any]) -> dict[str, float]:
        """Add losses."""
        fields = super().fields(method, config)
        return {**fields, "loss": fl.LARGEST_LOSS * fields["size"]}


class IFCAObserver(ModelSetObserver):
    """The experimenter knows the clusters that clients choose and keep to themselves."""

    @property
    def server_knows_labels(self) -> bool:
        """Return False where choices are hidden."""
        return not self.method.sums.hide_replies

    def known_labels(self, client: Any, state: IFCAState) -> list[int]:
        """Return each client's cluster, which only the clients know where choices are hidden.

        The first clusters are the models of `least_choosers` clients or more. Each client that ends
        with a model that it trained alone is a cluster of its own.

        Args:
            client: a `HiddenChoiceClient`.
            state: the server's `IFCAState`.
        """
        if not self.method.sums.hide_replies:
            return super().known_labels(client, state)
        label_of = {("model", model): label for label, model in enumerate(state.final.shared)}
        start = state.running.number
        choices = client.choices(start)
        labels = []
        for k, (model, alone) in enumerate(zip(choices, client.trained_alone(start), strict=True)):
            cluster = ("client", k) if alone else ("model", model)
            labels.append(label_of.setdefault(cluster, len(label_of)))
        return labels

    def newcomer_labels(self, client: Any, state: IFCAState, labels: list[int]) -> list[int]:
        """Return the newcomers' clusters, which only they know where choices are hidden.

        Args:
            client: the newcomers' `HiddenChoiceClient`.
            state: the server's `IFCAState`.
            labels: what the server knows.
        """
        if not self.method.sums.hide_replies:
            return labels
        return [state.used.index(model) for model in client.choices(state.running.number)]

    def held_models(self, client: Any, state: Any, positions: Sequence[int]) -> fl.Rows:
        """Return each client's last choice, after pending averages of those at some positions.

        Args:
            client: an `IFCAClient`.
            state: the server's `IFCAState`.
            positions: of clients of the cohort.
        """
        recipients = [client.cohort.ids[k] for k in positions]
        query = state.running.message_for(recipients, state.best)
        if self.method.sums.hide_replies:
            held: fl.Rows = client.held(query, positions)
            return held
        choice = [state.running.choice[i] for i in client.cohort.ids]
        models: fl.Rows = client.taken(query, positions, choice)
        return models


@fl.protocol
class IFCA(fl.ModelSetProtocol):
    """k models; each client trains the one that fits its own samples best."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    sums: CountedSums = fl.group(SumsOfChoices)
    aggregation: str = PLAIN
    """how sums of updates are formed: plain (the server reads every choice and every reply) or
    secagg (the server reads neither, but how many clients chose each model; a client then sends k
    blocks of the model's size in place of one, and trains alone where too few chose its model)
    """
    k: int = 4
    """number of models"""
    starts: Annotated[int | None, fl.AtLeast(1)] = None
    """short starts from different initial models, of which the best is continued (not in the
    paper); 1 is a single start, None as many as half of the rounds have room for, 10 at most
    """
    start_rounds: Annotated[int | None, fl.AtLeast(1)] = None
    """rounds of a short start; those of all starts count towards rounds; None is 5, or fewer where
    half of the rounds have no room for the starts that are asked for
    """
    exact_weights: bool = False
    """secure sums only: weight updates by clients' numbers of samples, whose exact sums by cluster
    the server then reads; by default every client counts the same
    """
    rebalance: Annotated[int, fl.AtLeast(0)] = 0
    """least number B of clients that train each model in a round: the server moves random clients
    of other models there (RR-Cluster); 0 leaves all clients with their choices
    """

    name: ClassVar[str] = "ifca"
    client: ClassVar[type[fl.TrainingClient]] = HiddenChoiceClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> IFCAState:
        """Run the server's side of Algorithm 1.

        Args:
            net: the server's channel.
            run: rounds, checkpoints and history.
        """
        state = IFCAState(self.begin(net))
        for start in run.stages("train", state, self._short_starts, self._short_rounds):
            if start.fresh and start.number:
                state.best = self._best(state)
                state.running = self.begin(net, start.number)
            for t in start.rounds:
                self._average(net, state, t)
                run.note(start=state.running.number, loss=None)
            run.note(loss=self._judge(net, state))  # of models with the last round's averages
        if state.best is not None:
            state.running = self._best(state)
            state.best = None
        for t in run.rounds("train", state, self.rounds):
            self._average(net, state, t)
            run.note(start=state.running.number, loss=None)

        state.running = run.once("deliver", lambda: self._settle(net, state), fl.Restart)
        if self.sums.hide_replies:
            state.final = run.once(
                "count",
                lambda: hidden_server.count_at_end(net, state.running, state.best, self._least),
                hidden_server.FinalCounts,
            )
        state.offers = run.once("offer", lambda: self.offered_models(net, state), fl.OfferedModels)
        return state

    def offered_models(self, net: fl.ServerChannel, state: Any) -> fl.OfferedModels:
        """Return the models in use, which newcomers are to choose from.

        Args:
            net: the server's channel.
            state: the `IFCAState`, after the last averages were delivered.
        """
        if not self.sums.hide_replies:
            return super().offered_models(net, state)
        shared = state.final.shared
        return collect_models(net, state.running, self.mask != "none", shared, hidden=True)

    def assign_newcomers(
        self, net: fl.ServerChannel, state: fl.ModelSetState, to: Sequence[int]
    ) -> list[int]:
        """Send newcomers the models in use, of which each chooses the best (not in the paper).

        Args:
            net: the server's channel.
            state: the run's final state.
            to: the newcomers.

        Raises:
            UsageError: the run ended without models.
            UpdateError: a newcomer does not reply.
        """
        if not self.sums.hide_replies:
            return super().assign_newcomers(net, state, to)
        replies = net.gather(HiddenChoiceClient.join_unseen, offer_to(state, len(to)), to=to)
        fl.check_newcomers(to, replies.ids)
        return [0] * len(to)

    @property
    def model_count(self) -> int:
        """Return k."""
        return int(self.k)

    def _unlike_longer(self, longer: Any) -> None:
        """Refuse a run whose short starts would have been longer, or more.

        Args:
            longer: the same with more rounds.
        """
        ours = (self._short_starts, self._short_rounds)
        theirs = (longer._short_starts, longer._short_rounds)
        if ours != theirs and max(ours[0], theirs[0]):
            raise fl.UsageError(
                f"a run of rounds = {longer.rounds} has {theirs[0]} short starts of {theirs[1]}, "
                f"and this one had {ours[0]} of {ours[1]}: give starts and start_rounds, or start "
                "it anew"
            )

    @property
    def _short_starts(self) -> int:
        """Return the number of short starts; a single start is not short."""
        starts = self.starts
        if starts is None:
            starts = min(MOST_STARTS, self.rounds // (2 * self._short_rounds))
        return starts if starts > 1 else 0

    @property
    def _short_rounds(self) -> int:
        """Return the rounds of one short start."""
        if self.start_rounds is not None:
            return self.start_rounds
        room = self.rounds // (2 * (self.starts or 1))
        return min(START_ROUNDS, max(1, room))

    @property
    def _least(self) -> int:
        """Return the least number of clients whose updates are averaged in secure sums."""
        return self.sums.least_choosers

    @property
    def vectors_per_round(self) -> int:
        """Return the vectors of d numbers that a client exchanges: k averages and an update.

        Where choices are hidden, the update is one of k blocks.
        """
        if self.sums.hide_replies:
            return 2 * self.k
        return super().vectors_per_round

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the numbers of starts and of blocks.

        Args:
            config: the run's configuration.
        """
        sizes = super().frame_sizes(config)
        return {**sizes, "starts": max(1, self._short_starts), "blocks": self.model_count}

    def _best(self, state: IFCAState) -> fl.Restart:
        """Return the start of lowest loss: the running one, which is over, or the best before."""
        best = state.best
        if best is None or state.running.loss < best.loss:
            best = state.running
        return best

    def _average(self, net: fl.ServerChannel, state: IFCAState, t: int) -> None:
        """Make round t of averaging (lines 4 to 11)."""
        # line 4: the server sends the models to a share of the clients
        if self.sums.hide_replies:
            recipients = fl.sample_clients(
                net, net.clients, self.participation, t, minimum=net.least_members
            )
            hidden_server.average_unseen(net, state.running, state.best, recipients, self._least)
            return
        recipients = fl.sample_clients(net, net.clients, self.participation, t)
        # lines 5–7: each client estimates its cluster, argmin_j F_i(θ_j)
        chosen = self._choose(net, state, recipients)
        if not chosen.ids:
            return
        # lines 8–9: local training of the chosen model, and a sum for each model
        choices = [state.running.choice[i] for i in chosen.ids]
        if self.rebalance:
            sums = self._rebalanced_sums(net, state, chosen.ids, choices, t)
        else:
            sums = net.sum(
                IFCAClient.contribute, fl.Empty(), to=chosen.ids, by=choices, groups=self.k
            )
        # line 11: model averaging
        if sums.ids:
            weights = total_weights(sums)
            state.running.post(sums.step, sums.rows.delta.table, weights)

    def _rebalanced_sums(
        self,
        net: fl.ServerChannel,
        state: IFCAState,
        ids: Sequence[int],
        choices: Sequence[int],
        t: int,
    ) -> fl.Sums[fl.Update]:
        """Return the sum of each model's updates, where each has at least B clients.

        Args:
            net: the server's channel.
            state: the server's state.
            ids: clients that have chosen.
            choices: their models.
            t: the round.
        """
        draw = net.randomness.generator("server", "rebalance", t)
        models = rebalanced(choices, self.k, self.rebalance, draw)
        assignment = ModelAssignment(fl.Rows(torch.as_tensor(models)), state.running.number)
        return net.sum(IFCAClient.contribute_to, assignment, to=ids, by=models, groups=self.k)

    def _choose(
        self, net: fl.ServerChannel, state: IFCAState, to: Sequence[int]
    ) -> fl.Replies[fl.ModelChoice]:
        """Send clients the averages that they lack, and receive their choices."""
        query = state.running.message_for(to, state.best)
        replies = net.gather(IFCAClient.choose, query, to=to)
        state.running.taken(replies)
        return replies

    def _judge(self, net: fl.ServerChannel, state: IFCAState) -> float | None:
        """Return the training loss of a start, where each client uses its best model.

        None where no client replied.
        """
        # round number 0 in the draw: the same clients evaluate every start
        clients = fl.sample_clients(
            net, net.clients, self.participation, 0, minimum=net.least_members
        )
        query = state.running.message_for(clients, state.best)
        sums = net.sum(IFCAClient.lowest_loss, query, to=clients)
        return state.running.judged(sums)

    def _settle(self, net: fl.ServerChannel, state: IFCAState, tries: int = 5) -> fl.Restart:
        """Send the last averages to all clients, which choose once more (not in the paper).

        Clients that do not reply keep their last choice.
        """
        if self.sums.hide_replies:
            return hidden_server.deliver_unseen(net, state.running, state.best, tries)
        silent = tuple(net.clients)
        for _ in range(tries):
            if silent:
                silent = self._choose(net, state, silent).lost
        return state.running

    @property
    def weighted(self) -> bool:
        """Return True: each model is the mean over samples (the paper's is over clients)."""
        return True

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Check that clients can draw the models that are never sent.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: the initial weights of a user's module cannot be drawn again.
        """
        # all but the first model of the first start are drawn by clients, and never sent
        if max(self.k, self._short_starts) > 1:
            fl.check_start_models(self, facts)
        return super().shared_facts(facts)

    def check(self, clients: int) -> None:
        """Add checks of the numbers of models and starts.

        Args:
            clients: m.

        Raises:
            UsageError: a hyper-parameter is out of range.
        """
        super().check(clients)
        check_clusters(self.k, clients)
        self._check_starts()
        self._check_rebalance(clients)

    def _check_starts(self) -> None:
        """Raise UsageError where the rounds have no room for the starts."""
        needed = self._short_starts * self._short_rounds
        if needed > self.rounds:
            raise fl.UsageError(
                f"{self._short_starts} starts of {self._short_rounds} rounds take {needed} rounds, "
                f"and the run has {self.rounds} in all: lower starts or start_rounds, or ask for "
                "more rounds"
            )

    def _check_rebalance(self, clients: int) -> None:
        """Raise UsageError where there are too few clients to rebalance, or none may be moved."""
        if not self.rebalance:
            return
        if self.sums.hide_replies:
            raise fl.UsageError(
                "rebalance moves clients by their choices, which secure sums hide: take "
                "aggregation plain, or leave rebalance out"
            )
        sampled = max(1, round(self.participation * clients))
        if self.k * self.rebalance > sampled:
            raise fl.UsageError(
                f"{sampled} clients a round do not suffice for {self.rebalance} of each of "
                f"{self.k} models: lower rebalance to {sampled // self.k} or less"
            )

    def pipeline(self, config: Mapping[str, Any]) -> fl.Pipeline:
        """Return the stages between a client's update and the wire, for each block where there are.

        Args:
            config: what clients and server agreed on.
        """
        pipeline = super().pipeline(config)
        if self.sums.hide_replies:
            stages = [BlockStage(stage) for stage in pipeline.stages]
            pipeline.fields["blocks"] = fl.Pipeline(stages)
        return pipeline

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the client object, which hides its choices where sums are secure.

        Args:
            cohort: the clients' data and local training.
            pipeline: stages between an update and the wire.
            config: what clients and server agreed on.
        """
        training = self.training.usual(self, config)
        return HiddenChoiceClient(
            cohort,
            training,
            pipeline,
            self.weighted,
            self.sums.hide_replies,
            exact=self.exact_weights,
            least_choosers=self._least,
        )

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible to the server under every mask."""
        if self.sums.hide_replies:
            server = hidden_view(self.k, self.sums.weights_updates(self), self._least)
            clients = f"the averages of all models of {self._least} clients or more"
            return fl.Disclosures(server=server, clients=[clients])
        # Which clients the server moves follows from their choices, and shows nothing new.
        return fl.Disclosures(
            server=server_view(self.privacy.noisy, self.privacy.per_client, self._short_starts)
        )

    @property
    def observer(self) -> IFCAObserver:
        """Return what the experimenter computes outside the protocol."""
        return IFCAObserver(self)
