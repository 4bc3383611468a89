"""CLoVE: clusters by clients' losses under k models, which are matched to the clusters.

Bhatia, Papadis, Kodialam, Lakshman, Chakrabarty, "CLoVE: Personalized Federated Learning through
Clustering of Loss Vector Embeddings", 2025 (arXiv 2506.22427). This file follows the paper's
abstract and the authors' published programs; the text of its algorithm was not at hand.

θ_j    the k models; their first weights are drawn one by one
F_i    the mean loss of client i's training samples
ℓ_i    client i's loss vector (F_i(θ_1), …, F_i(θ_k))

In each round clients send ℓ_i. The server clusters the vectors by k-means into k clusters, and
matches clusters to models so that the sum of F_i(θ_j) over all clients i of a cluster with model j
is least. Each client trains the model of its cluster, and θ_j is the mean of the trained models,
weighted by samples. Once every client has had the same model in some rounds, clusters are kept.

Beyond the paper: noise on loss vectors (`loss_mechanism`); an upper limit of the rounds in which
clients are clustered, which limits what their losses cost; and newcomers.

Clients and queues are IFCA's, with one start. The server chooses in the clients' place, and a
checkpoint has its choices before anyone trains. Losses are asked in an agreed number of rounds at
most, stable clusters or not, so that `target_epsilon` knows their price.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class LossVector:
    """Client to server: the mean loss of each model."""

    # (b, k) float64, in nats for labels; with noise where the run adds some
    losses: Annotated[
        fl.Rows, fl.Real(("models",), low=-fl.LARGEST_SENT_LOSS, maximum=fl.LARGEST_SENT_LOSS)
    ]


class LossVectorClient(fl.AssignedModelClient):
    """Clients that send their losses under all models, and train the one they are assigned."""

    @fl.answers(fl.GATHER, unmasked=("losses",))
    def measure(self, context: fl.CallContext, query: fl.ModelAverages) -> LossVector:
        """Return ℓ_i after the query's averages: the mean losses of all training samples.

        Raises:
            PolicyError: the request is late, and is about averages before the current ones.
        """
        exact = self.mean_losses(context, query)
        released = self.release_losses(context, exact)
        # k-means on the server computes with these numbers, and infinity has no distance
        finite = context.postprocess(lambda losses: losses.clamp(max=fl.WORST_LOSS), released)
        return LossVector(fl.Rows(finite))

    @fl.answers(
        fl.GATHER, fl.SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",)
    )
    def contribute(self, context: fl.CallContext, query: fl.AssignedModel) -> fl.Update:
        """Return n_i·Δ_i and n_i, from the model that the client is assigned.

        Clipped updates are not weighted. A cluster of one is allowed.

        Raises:
            PolicyError: a client has no models yet, or has received later averages.
        """
        return self.train_assigned(context, query)


@dataclass
class CLoVEState(fl.AssignEachRoundState):
    """The state of the server's loop, as checkpoints store it."""

    # (m,) rounds in a row in which a client was assigned the same model; 0 before the first
    streaks: list[int] = field(default_factory=list)
    stable: bool = False  # whether clusters are kept

    def store(self, ids: Sequence[int], models: Sequence[int]) -> None:
        """Store the models that clients are assigned, and in how many rounds they were the same.

        Args:
            ids: the clients.
            models: of each of them.
        """
        if not self.streaks:
            self.streaks = [0] * len(self.running.choice)
        for i, model in zip(ids, models, strict=True):
            if self.streaks[i] and self.running.choice[i] == model:
                self.streaks[i] += 1
            else:
                self.streaks[i] = 1
        super().store(ids, models)


@dataclass(kw_only=True)
class SumsOfNewClusters(fl.SumOptions):
    """Options of sums over clusters that are formed anew in every round."""

    def refusal(self, method: Any) -> str:
        """Return that a cluster of one would show its update."""
        return (
            "CLoVE's server forms clusters anew in every round, also of one client, whose secure "
            "sum would be its update: take IFCA (ifca), or aggregation plain"
        )


@fl.protocol
class CLoVE(fl.AssignEachRound):
    """k models, each of which the clients of one cluster of loss vectors train."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    k: int = 4
    """number of models and of clusters"""
    stable_rounds: Annotated[int, fl.AtLeast(1)] = 3
    """rounds in a row in which all clients of a round have had the same model, after which clusters
    are kept
    """
    cluster_rounds: Annotated[int | None, fl.AtLeast(1)] = None
    """first rounds, in which clients may be clustered; None is all. Losses cost ε in these rounds,
    as long as clusters change (not in the paper)
    """

    sums: fl.SumOptions = fl.group(SumsOfNewClusters)
    name: ClassVar[str] = "clove"
    client: ClassVar[type[fl.TrainingClient]] = LossVectorClient

    ask: ClassVar[Any] = LossVectorClient.measure
    state_type: ClassVar[type[fl.AssignEachRoundState]] = CLoVEState

    def invited(self, net: fl.ServerChannel, state: CLoVEState, t: int) -> list[int]:
        """Return a random share of the clients that are asked, or that have a model.

        Args:
            net: has the clients.
            state: of the loop.
            t: number of the round.
        """
        # k clusters need k loss vectors or more
        minimum = min(self.k, len(net.clients))
        sampled = fl.sample_clients(net, net.clients, self.participation, t, minimum=minimum)
        assigned = set(state.assigned)
        return [i for i in sampled if i in assigned or self.is_asked(state, i, t)]

    def is_asked(self, state: CLoVEState, i: int, t: int) -> bool:
        """Return whether a client is asked for its losses.

        Losses cost ε, so clients are asked only while their clusters may change. Clients without a
        model are still assigned one where clusters are kept, as long as losses may be asked.

        Args:
            state: of the loop.
            i: the client's number.
            t: number of the round.
        """
        if t > self.loss_rounds:
            return False
        return not (state.stable and state.streaks[i])

    def assign(
        self, net: fl.ServerChannel, state: CLoVEState, replies: fl.Replies[LossVector], t: int
    ) -> Sequence[int]:
        """Return each client's model, by clusters of loss vectors.

        Args:
            net: has the draws of k-means.
            state: of the loop.
            replies: the loss vectors.
            t: number of the round.
        """
        losses = replies.rows.losses.values.cpu().double().numpy()
        if state.stable:
            # clusters are kept, so a client that comes late takes the model that fits it best
            return [int(model) for model in losses.argmin(1)]
        seed = net.randomness.integer("server", "clusterer", t)
        return matched_models(losses, self.k, seed)

    def stored(self, state: CLoVEState, ids: Sequence[int]) -> None:
        """Keep clusters once all clients of a round have had the same models for long enough.

        Args:
            state: of the loop.
            ids: the clients that were assigned models.
        """
        if not state.stable:
            state.stable = min(state.streaks[i] for i in ids) >= self.stable_rounds

    def notes(self, state: CLoVEState) -> dict[str, Any]:
        """Return whether clusters are kept.

        Args:
            state: of the loop.
        """
        return {"stable": state.stable}

    @property
    def loss_rounds(self) -> int:
        """Return the number of rounds in which clients may be asked for losses."""
        if self.cluster_rounds is None:
            return self.rounds
        return min(self.cluster_rounds, self.rounds)

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Check that clients can draw the models that are never sent.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: the initial weights of a user's module cannot be drawn again.
        """
        if self.k > 1:
            # Clients draw all models but the first from the seed, so that none has to be sent.
            fl.check_start_models(self, facts)
        return super().shared_facts(facts)

    def dry_runs(self) -> Sequence[Mapping[str, Any]]:
        """Return a run whose clusters are never stable, so that losses are asked to the end."""
        return ({"stable_rounds": 1 + self.rounds},)

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible to the server under every mask."""
        noise = "with noise, " if self.privacy.noisy else ""
        update = "update (the plain sum reads all replies; a cluster of one shows one)"
        if self.privacy.per_client:
            update = f"{noise}each client's clipped {update}"
        else:
            update = f"{noise}each client's number of samples and weighted {update}"
        return fl.Disclosures(
            server=[
                f"{noise}each client's training losses under all models, until clusters are kept",
                "the clusters, and each client's cluster, in every round",
                update,
                "at the end how far each model has moved (masked where updates are)",
            ]
        )


def matched_models(losses: Array, k: int, seed: int) -> list[int]:
    """Return the model of each client: clusters of loss vectors, matched to models.

    Clusters are those of k-means. Each gets another model, so that the sum of all clients' losses
    under their models is least.

    Args:
        losses: (r, k) loss vectors ℓ_i.
        k: number of clusters.
        seed: of the random starts of k-means.

    Returns:
        (r,) numbers of models.
    """
    from scipy.optimize import linear_sum_assignment

    labels = np.asarray(fl.kmeans_of_points(losses, k, seed))
    # cost[c, j] is the loss of all clients of cluster c under model j
    costs = []
    for cluster in range(labels.max() + 1):
        members = labels == cluster
        costs.append(losses[members].sum(0))
    cost = np.stack(costs)
    # one to one (the Hungarian algorithm), so that two clusters never share a model
    _, model_of = linear_sum_assignment(cost)
    models: list[int] = model_of[labels].tolist()
    return models
