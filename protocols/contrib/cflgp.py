"""CFL-GP: spectral clusters of gradients that accumulate over rounds and over k models.

Kim, Kim, de Veciana, "Clustered Federated Learning via Gradient-based Partitioning" (CFL-GP), ICML
2024. The paper's text was not at hand: this file follows its abstract, the authors' poster and
their published program (repository Heasung-Kim/
clustered-federated-learning-via-gradient-based-partitioning), in words of its own.

θ_j    the k models; their first weights are drawn one by one
P      the period: clients are clustered in rounds 1, 1 + P, 1 + 2P, … up to `cluster_rounds`
g_i    client i's gradient at the criterion model of such a round, −∇F_i(θ_j) over all its samples
G      the gradient profile: a column for each client, with a block of rows for each clustering

In a round with a clustering:

1. each client sends g_i at the criterion model θ_j, with j = 0, 1, …, k − 1, 0, … from one
   clustering to the next
2. the server adds the g_i to G, projects the columns on the k leading left singular vectors of G,
   and clusters them by k-means
3. clusters are numbered so that as many clients as possible keep their model

In every round each client trains the model of its cluster, and θ_j is the mean of the trained
models, weighted by samples.

What differs (not in the paper): G holds one block for each clustering, where the authors' program
keeps the running mean of each model's block. Masks are fresh in each call, so the server has the
inner products of one call's gradients and none of two calls'. It needs no others: the singular
vectors and projected columns follow from GᵀG, which is the sum of the calls' Gram matrices. Here it
is their mean, over the calls in which both clients replied, and all clients are called. What noise
adds to the diagonal on average is subtracted. The program leaves the criterion model at j = 0 and
lets its gradients be those of clients' own models; its weights 1/(1 + ⌊(t + 1)/(kP)⌋) are those of
a criterion that goes through all k models, as it does here. Gradients are over all samples, where
the program takes a batch or the clients' local training, and k-means has ten starts. Noise, secure
sums and newcomers are not in the paper either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

torch = fl.torch

Array = NDArray[np.float64]


def criterion_of(t: int, period: int, k: int) -> int:
    """Return the model at which gradients are computed in a round with a clustering.

    Args:
        t: number of the round, from 1.
        period: P.
        k: number of models.
    """
    return ((t - 1) // period) % k


class GradientClient(fl.AssignedModelClient):
    """Clients that send gradients at the criterion model, and train the model of their cluster."""

    # set by the protocol
    period = 1  # P
    gradient_ratio = 1.0  # noise multiplier of a gradient over that of training

    @fl.answers(fl.GATHER, through=("delta",), fresh=True, trains="criterion")
    def send_gradient(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.Update:
        """Return g_i = −∇F_i(θ_j) over all samples, for the criterion model θ_j of this round.

        The number of the round says which model it is. The sign makes no difference to clusters.

        Args:
            query: the averages that each client lacks.

        Raises:
            PolicyError: the request is late, and is about averages before the current ones.
        """
        self.apply_averages(context, query)
        j = criterion_of(context.round, self.period, query.k)
        models = self.evaluated_rows(query.start, j, context.positions)
        # One step of learning rate 1 over all samples moves the model by the negative gradient.
        usual = self.training
        noise = self.gradient_ratio * usual.noise
        plan = replace(fl.FULL_GRADIENT, clip=usual.clip, noise=noise)
        room = self._pipeline.buffer_width(self.cohort.model.dimension)
        gradients = self.cohort.train(models, context.positions, plan, context.step, room)
        return fl.Update(fl.Rows(gradients), None)


@dataclass
class CFLGPState(fl.AssignEachRoundState):
    """The state of the server's loop, as checkpoints store it."""

    # (m, m) float64, sums over calls of inner products of the gradients of one call
    inner: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.float64))
    # (m, m) int64, calls to which both clients replied
    together: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.int64))

    def accumulate(self, ids: Sequence[int], inner: torch.Tensor) -> None:
        """Add the inner products of one call's gradients.

        Args:
            ids: the r clients that replied.
            inner: (r, r).
        """
        m = len(self.running.choice)
        if not len(self.inner):
            self.inner = torch.zeros(m, m, dtype=torch.float64)
            self.together = torch.zeros(m, m, dtype=torch.int64)
        rows = torch.as_tensor(list(ids))
        self.inner[rows[:, None], rows] += inner.cpu()
        self.together[rows[:, None], rows] += 1

    @property
    def seen(self) -> list[int]:
        """Return the clients that have sent a gradient."""
        clients: list[int] = self.together.diagonal().nonzero()[:, 0].tolist()
        return clients

    def profile(self) -> Array:
        """Return GᵀG of the clients of `seen`, (s, s), by the mean over calls.

        It is 0 for clients that never replied to one call.
        """
        clients = torch.as_tensor(self.seen)
        inner = self.inner[clients[:, None], clients]
        together = self.together[clients[:, None], clients]
        profile: Array = (inner / together.clamp(min=1)).numpy()
        return profile


@fl.protocol
class CFLGP(fl.AssignEachRound):
    """k models, each of which the clients of one cluster of accumulated gradients train."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar
    """
    k: int = 4
    """number of models and of clusters"""
    period: Annotated[int, fl.AtLeast(1)] = 2
    """clients are clustered once in so many rounds, for the first time in round 1; all take part in
    these rounds
    """
    cluster_rounds: Annotated[int, fl.AtLeast(1)] = 10
    """first rounds, in which clients are clustered; later clusters are kept. Each gradient costs ε,
    so noise is spread over 1 + (cluster_rounds − 1) // period of them
    """
    gradient_noise: Annotated[float, fl.Number(fl.SMALLEST_RATIO, 1e6, high_in=True)] = 1.0
    """noise multiplier of a gradient, which clusters follow from, over that of training, where
    dp_unit is example; below 1, clustering gets a larger share of ε (not in the paper)
    """

    name: ClassVar[str] = "cflgp"
    client: ClassVar[type[fl.TrainingClient]] = GradientClient

    ask: ClassVar[Any] = GradientClient.send_gradient
    state_type: ClassVar[type[fl.AssignEachRoundState]] = CFLGPState

    def invited(self, net: fl.ServerChannel, state: CFLGPState, t: int) -> list[int]:
        """Return all clients where they are clustered, and else a random share of those clustered.

        Inner products need gradients of one call, so a share of the clients would leave out most
        pairs.

        Args:
            net: has the clients.
            state: of the loop.
            t: number of the round.
        """
        if self.clusters_in(t):
            return list(net.clients)
        sampled = fl.sample_clients(net, net.clients, self.participation, t)
        assigned = set(state.assigned)
        return [i for i in sampled if i in assigned]

    def is_asked(self, state: CFLGPState, i: int, t: int) -> bool:
        """Return whether clients are clustered in round t.

        Args:
            state: of the loop.
            i: the client's number.
            t: number of the round.
        """
        return self.clusters_in(t)

    def clusters_in(self, t: int) -> bool:
        """Return whether clients are clustered in a round.

        Args:
            t: number of the round, from 1.
        """
        return t <= self.cluster_rounds and (t - 1) % self.period == 0

    def assign(
        self, net: fl.ServerChannel, state: CFLGPState, replies: fl.Replies[fl.Update], t: int
    ) -> Sequence[int]:
        """Add the gradients to the profile, and return each client's model by its clusters.

        Clients that sent gradients in other rounds alone are assigned models, too.

        Args:
            net: has the draws of k-means.
            state: of the loop.
            replies: the gradients.
            t: number of the round.
        """
        noise = net.noise("delta", "criterion")
        state.accumulate(replies.ids, fl.gram(replies.rows.delta.values, noise=noise))
        clients = state.seen
        seed = net.randomness.integer("server", "clusterer", t)
        labels = partition(state.profile(), self.k, seed)
        assigned_before = set(state.assigned)
        old = [state.running.choice[i] if i in assigned_before else None for i in clients]
        model_of = dict(zip(clients, kept_numbers(labels, old, self.k), strict=True))
        others = sorted(set(clients) - set(replies.ids))
        state.store(others, [model_of[i] for i in others])
        return [model_of[i] for i in replies.ids]

    def make_client(
        self, cohort: Any, pipeline: Any, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the clients, with the period and the noise of their gradients.

        Args:
            cohort: the clients' data and local training.
            pipeline: the stages between a client's reply and the wire.
            config: the run's configuration.
        """
        usual = self.training.usual(self, config)
        client = GradientClient(cohort, usual, pipeline, self.weighted)
        client.period = int(config["period"])
        client.gradient_ratio = float(config["gradient_noise"])
        return client

    def trainings(
        self, usual: fl.LocalTraining, config: Mapping[str, Any]
    ) -> dict[str, fl.LocalTraining]:
        """Add the gradient at the criterion model.

        Args:
            usual: the training of a round.
            config: what clients and server agreed on.
        """
        plans = super().trainings(usual, config)
        full = plans["full"]
        noise = float(config["gradient_noise"]) * full.noise
        return {**plans, "criterion": replace(full, noise=noise)}

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

    def check(self, clients: int) -> None:
        """Check that a multiplier of its own has noise that it applies to.

        Args:
            clients: m.

        Raises:
            UsageError: a hyper-parameter is out of range, or has no effect.
        """
        super().check(clients)
        if self.gradient_noise != 1 and self.privacy.per_client:
            raise fl.UsageError(
                f"gradient_noise = {self.gradient_noise!r} scales the noise of DP-SGD, and with "
                "dp_unit client gradients have that of updates: leave it out, or take dp_unit "
                "example"
            )

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible to the server under every mask."""
        noise = "with noise, " if self.privacy.noisy else ""
        update = "update (the plain sum reads every reply)"
        if self.privacy.per_client:
            update = f"{noise}each client's clipped {update}"
        else:
            update = f"{noise}each client's number of samples and weighted {update}"
        return fl.Disclosures(
            server=[
                f"{noise}norms and inner products of the clients' gradients, in each round with a "
                "clustering",
                "the clusters, and each client's cluster, in every round",
                fl.OfPlainSums(update),
                "at the end how far each model has moved (masked where updates are)",
            ]
        )


def partition(profile: Array, k: int, seed: int) -> list[int]:
    """Return clusters of the columns of G, projected on its k leading left singular vectors.

    With G = P S Qᵀ the projected columns are S_k Q_kᵀ, and GᵀG = Q S² Qᵀ.

    Args:
        profile: (m, m) GᵀG.
        k: number of singular vectors and of clusters.
        seed: of the random starts of k-means.

    Returns:
        (m,) labels from 0.
    """
    values, vectors = np.linalg.eigh(profile)
    # what noise left of the smallest squared norms can be negative, which no square is
    leading = values[-k:].clip(0)
    projected = (vectors[:, -k:] * leading) @ vectors[:, -k:].T
    return fl.kmeans(projected, k, seed)


def kept_numbers(labels: Sequence[int], old: Sequence[int | None], k: int) -> list[int]:
    """Return clusters numbered so that as many clients as possible keep their number.

    Args:
        labels: (m,) from 0, below k.
        old: (m,) the numbers before; None for clients without one.
        k: number of clusters.
    """
    from scipy.optimize import linear_sum_assignment

    # agreement[c, j] is the number of clients of cluster c that had number j
    agreement = np.zeros((k, k), dtype=np.int64)
    for label, number in zip(labels, old, strict=True):
        if number is not None:
            agreement[label, number] += 1
    # one to one (the Hungarian algorithm); the authors' program tries all orders
    _, number_of = linear_sum_assignment(agreement, maximize=True)
    return [int(number_of[label]) for label in labels]
