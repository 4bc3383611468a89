"""R-DPCFL: clusters by the first private gradients, softly at first, then by private choices.

Malekmohammadi, Taik, Farnadi, "Differentially private clustered federated learning" (R-DPCFL),
TMLR 2025. The paper's text was not at hand: this file follows the authors' published program
(repository Saber-mm/DPCFL), in words of its own.

θ_c    the k models; all begin at θ_0
Δ_i    client i's first update, one step of DP-SGD over all its samples
π_i    client i's shares of the k clusters, by a Gaussian mixture of the Δ_i
E_c    the round up to which clusters are soft

Round 1 asks each client for Δ_i, whose noise is divided by n_i. The server standardises each
coordinate over clients, takes the two leading principal directions (`directions`), projects the
Δ_i on them, scales each coordinate to [0, 1] and fits a mixture of k spherical Gaussians. In the
rounds up to E_c each client trains the model of a cluster that is drawn from π_i, and θ_c is the
plain mean of its clients' models. E_c is half of all rounds, times one less the largest overlap of
two components. Then, for a tenth of the rounds, each client chooses the model of the largest
training accuracy by the exponential mechanism, and keeps its last choice.

What differs: choices have a multiplier relative to that of training, so that `target_epsilon` finds
both together, where the authors subtract the price of the choices; choices are priced for adding or
removing a sample; a rotation as a mask changes what standardising does, a permutation does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

torch = fl.torch

Array = NDArray[np.float64]
LARGEST_K = 6  # number of clusters that is tried where it is not given
STARTS = 5  # of the mixture
SEEDS = 1 << 32  # that scikit-learn takes
SWITCH = 0.5  # share of the rounds after which separate clusters are chosen


class PrivateChoiceClient(fl.AssignedModelClient):
    """Clients that send one private gradient, and later choose among k models in private."""

    one_start: ClassVar[bool] = True
    # set by the protocol
    selection_ratio = 0.0  # multiplier of a choice over that of training
    first_ratio = 1.0  # multiplier of the first gradient over that of training
    largest_loss = 1.0  # B, of a sample without a class

    @fl.answers(fl.GATHER, through=("delta",), fresh=True, trains="first")
    def send_first_update(self, context: fl.CallContext, query: fl.Empty) -> fl.Update:
        """Return Δ_i: one step along the gradient of all samples at θ_0, with noise."""
        # One gradient over all n_i samples: its noise is divided by n_i and not by a batch's size.
        usual = self.training
        noise = self.first_ratio * usual.noise
        plan = replace(fl.FULL_GRADIENT, lr=usual.lr, clip=usual.clip, noise=noise)
        start = fl.Rows(self.cohort.start[None], (0,) * len(context.positions))
        room = self._pipeline.buffer_width(self.cohort.model.dimension)
        delta = self.cohort.train(start, context.positions, plan, context.step, room)
        return fl.Update(fl.Rows(delta), None)

    @fl.answers(fl.GATHER, fl.SUM, through=("delta",), fresh=True, trains="usual")
    def contribute(self, context: fl.CallContext, query: fl.AssignedModel) -> fl.Update:
        """Return Δ_i from the model of the query: means are over clients, not samples.

        Raises:
            PolicyError: a client has no models yet, or has received later averages.
        """
        update = self.train_assigned(context, query)
        delta = update.delta
        if update.size is not None:
            # the client computed n_i·Δ_i, and a mean over clients needs Δ_i
            sizes = update.size.values.to(delta.values)
            delta = fl.Rows(delta.values / sizes[:, None])
        return fl.Update(delta, None)

    # The first average of a cluster of one client is its first update, which has its noise.
    @fl.answers(fl.GATHER, relays=("means",))
    def choose(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.ModelChoice:
        """Return the model of the largest accuracy on all training samples.

        Without classes it is the model of the least loss. With noise it is the choice of the
        exponential mechanism.

        Raises:
            PolicyError: the request is late, and is about averages before the current ones.
        """
        models = self.apply_averages(context, query)
        offered = list(range(len(models)))
        return fl.ModelChoice(fl.Rows(self._chosen_models(context, query.start, offered)))

    @fl.answers(fl.GATHER, private=False, relays=("means",))
    def receive_models(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.Ack:
        """Apply the averages of all models, as `choose` does."""
        return super().receive_models(context, query)

    @fl.answers(fl.GATHER, relays=("means",))
    def join(self, context: fl.CallContext, query: fl.ModelAverages) -> fl.ModelChoice:
        """Return a newcomer's choice among the models of the query.

        Raises:
            PolicyError: the query contains no models.
        """
        offered = sorted(set(query.models.table.tolist()))
        if not offered:
            raise fl.PolicyError("join needs models to choose from, and this request has none")
        self.apply_averages(context, query)
        return fl.ModelChoice(fl.Rows(self._chosen_models(context, query.start, offered)))

    def _chosen_models(
        self, context: fl.CallContext, start: int, offered: Sequence[int]
    ) -> torch.Tensor:
        """Return each client's choice among some models, (b,), as it may leave.

        Args:
            context: the clients.
            start: the start of the models.
            offered: the models' numbers.
        """
        columns = []
        for j in offered:
            rows = self.evaluated_rows(start, j, context.positions)
            columns.append(self._right_answers(rows, context.positions))
        counts = np.stack(columns, 1)
        multiplier = 0.0
        if context.noise is not None:
            multiplier = self.selection_ratio * context.noise.noise
            if multiplier and context.noise.unit == "client":
                # all samples of a client together change the share of right answers by 1 at most
                sizes = np.array([max(1, self.cohort.sizes[k]) for k in context.positions])
                counts = counts / sizes[:, None]
        numbers = torch.as_tensor(offered)
        chosen = context.release_choice(counts, multiplier)
        return context.postprocess(lambda best: numbers[best], chosen)

    def _right_answers(self, models: fl.Rows, positions: Sequence[int]) -> Array:
        """Return the number of training samples that each client's model gets right.

        A sample without a class counts 1 − min(F, B)/B, so that it changes a number by 1 at most,
        as one with a class does (not in the paper).

        Args:
            models: (b, d).
            positions: of the clients.
        """
        cohort = self.cohort
        objective = cohort.model.objective
        samples = cohort.training_samples
        sizes = np.array([cohort.sizes[k] for k in positions])
        if isinstance(objective, fl.Classification):
            means = samples.mean(objective.scores, cohort.model, models, positions, bound=1.0)
            numbers = np.rint(means * sizes)
        else:
            bound = self.largest_loss
            means = samples.mean(self._finite_losses, cohort.model, models, positions, bound)
            numbers = sizes * (1 - means / bound)
        # the mean of no samples is not a number
        counts: Array = np.nan_to_num(numbers)
        return counts

    def _finite_losses(self, outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample (n,); one that is not a number is as bad as any."""
        losses = self.cohort.model.objective.losses(outputs, y)
        return losses.nan_to_num(nan=math.inf)


@dataclass
class RDPCFLState(fl.AssignEachRoundState):
    """The state of the server's loop, as checkpoints store it."""

    # (m, k) π, of zeros for clients that sent no first update
    shares: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))
    last_soft: int = 0  # E_c

    def final_choice(self) -> list[int]:
        """Return each client's model: its choice, or else that of its largest share."""
        models = list(self.running.choice)
        if not len(self.shares):
            return models
        likeliest = self.shares.argmax(1).tolist()
        for i, model in enumerate(likeliest):
            if i not in self.assigned:
                models[i] = model
        return models


@dataclass(kw_only=True)
class SumsOfDrawnClusters(fl.SumOptions):
    """Options of sums over clusters that are drawn anew in every round."""

    def refusal(self, method: Any) -> str:
        """Return that a cluster of one would show its update."""
        return (
            "R-DPCFL's server draws clusters anew in every round, also of one client, whose secure "
            "sum would be its update: take IFCA (ifca), or aggregation plain"
        )


@fl.protocol
class RDPCFL(fl.AssignEachRound):
    """Soft clusters of the first private gradients, then private choices among k models."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation,
    signed-permutation, rotation or haar; with the last two, clusters are other ones
    """
    dp_unit: str = "example"
    """unit of privacy: client (all data of one client) or example (one sample of one client: DP-SGD
    in local training); ε bounds what blanking one tells: it keeps its place and contributes zeros,
    while numbers of samples and who takes part are public
    """
    k: int | None = None
    """number of clusters; None takes the number from 2 to 6 whose components are most separate"""
    selection_share: Annotated[float, fl.Number(0, 1, low_in=False)] = 0.1
    """share of the rounds, in (0, 1), in which clients choose a model; afterwards clusters are kept
    """
    selection_noise: Annotated[float, fl.Number(fl.SMALLEST_RATIO, 1e6, high_in=True)] = 10.0
    """noise multiplier of a choice over that of training, where there is noise"""
    first_noise: Annotated[float, fl.Number(fl.SMALLEST_RATIO, 1e6, high_in=True)] = 1.0
    """noise multiplier of the first gradient, which clusters follow from, over that of training;
    below 1, clustering gets a larger share of ε (not in the paper)
    """
    directions: Annotated[int, fl.AtLeast(1)] = 2
    """principal directions in which first gradients are clustered; 2 are the authors', and k - 1
    keep k clusters apart whose gradients differ in more (not in the paper)
    """

    sums: fl.SumOptions = fl.group(SumsOfDrawnClusters)
    name: ClassVar[str] = "rdpcfl"
    other_clusters_under: ClassVar[tuple[str, ...]] = ("rotation", "haar")
    client: ClassVar[type[fl.TrainingClient]] = PrivateChoiceClient

    ask: ClassVar[Any] = PrivateChoiceClient.choose
    state_type: ClassVar[type[fl.AssignEachRoundState]] = RDPCFLState

    def one_round(self, net: fl.ServerChannel, run: fl.Run, state: RDPCFLState, t: int) -> None:
        """Cluster the first updates in round 1, and assign and average models in all others.

        Args:
            net: the server's channel.
            run: checkpoints and history.
            state: of the loop.
            t: number of the round.
        """
        if t == 1:
            run.commit(state, partial(self._cluster, net, state))
            return
        super().one_round(net, run, state, t)

    def _cluster(self, net: fl.ServerChannel, state: RDPCFLState) -> None:
        """Cluster the first updates softly, and move each model by those of its clients."""
        method = PrivateChoiceClient.send_first_update
        replies = net.gather(method, fl.Empty(), to=net.clients, tries=fl.TRIES)
        ids = list(replies.ids)
        state.shares = torch.zeros(len(net.clients), self.model_count, dtype=torch.float64)
        if not ids:
            return
        rows = replies.rows.delta.values
        seed = net.randomness.integer("server", "mixture")
        updates = rows.cpu().double().numpy()
        mixture = soft_clusters(updates, self.k, seed, self.directions)
        components = mixture.shares.shape[1]
        state.shares[ids, :components] = torch.from_numpy(mixture.shares)
        # E_c: the more the components overlap, the sooner clients choose for themselves
        state.last_soft = int((1 - mixture.overlap) * SWITCH * self.rounds)
        labels = state.shares[ids].argmax(1)
        for i, label in zip(ids, labels.tolist(), strict=True):
            state.running.choice[i] = label
        # Clients can still train several models later, but a gradient moves the likeliest one.
        sums = rows.new_zeros(self.model_count, rows.shape[1])
        sums.index_add_(0, labels.to(rows.device), rows)
        counts = torch.bincount(labels, minlength=self.model_count)
        state.running.post(replies.step, sums, counts.to(sums))

    def is_asked(self, state: RDPCFLState, i: int, t: int) -> bool:
        """Return whether clients choose their models in round t.

        Args:
            state: of the loop.
            i: the client's number.
            t: number of the round.
        """
        first_choice = state.last_soft + 1
        return first_choice <= t < first_choice + self.selection_rounds

    def received(
        self, net: fl.ServerChannel, state: RDPCFLState, ids: Sequence[int], t: int
    ) -> None:
        """Draw the cluster of each client from its shares, while clusters are soft.

        Args:
            net: has the draws.
            state: of the loop.
            ids: the clients.
            t: number of the round.
        """
        if t > state.last_soft:
            return
        generator = net.randomness.generator("server", "soft", t)
        # a draw for every client, so that it does not depend on who replies
        uniforms = generator.random(len(net.clients))
        cumulative = state.shares.numpy().cumsum(1)
        for i in ids:
            share_sum = cumulative[i, -1]
            if share_sum > 0:
                # inverse of the distribution function; shares sum to 1 only up to rounding
                threshold = uniforms[i] * share_sum
                state.running.choice[i] = int((cumulative[i] <= threshold).sum())

    def deliver(self, net: fl.ServerChannel, state: RDPCFLState) -> fl.Restart:
        """Send the last averages to all clients, and return the models.

        Args:
            net: the server's channel.
            state: of the loop.
        """
        fl.deliver_models(net, state.running, PrivateChoiceClient.receive_models)
        return state.running

    @property
    def weighted(self) -> bool:
        """Return False: each model is the mean over clients."""
        return False

    @property
    def model_count(self) -> int:
        """Return k, or the largest number of clusters that is tried."""
        if self.k is None:
            return LARGEST_K
        return self.k

    def _unlike_longer(self, longer: Any) -> None:
        """Refuse: clusters are chosen in rounds that follow from the number of all."""
        raise fl.UsageError(
            f"separate clusters were chosen in rounds that follow from rounds = {self.rounds}, and "
            "a longer run does not begin like this one: start it anew"
        )

    @property
    def selection_rounds(self) -> int:
        """Return the number of rounds in which clients choose a model."""
        return max(1, round(self.selection_share * self.rounds))

    def make_client(
        self, cohort: Any, pipeline: Any, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the clients, with the noise of their choices.

        Args:
            cohort: the clients' data and local training.
            pipeline: the stages between a client's reply and the wire.
            config: the run's configuration.
        """
        client = PrivateChoiceClient(
            cohort, self.training.usual(self, config), pipeline, self.weighted
        )
        client.selection_ratio = float(config["selection_noise"])
        client.first_ratio = float(config["first_noise"])
        client.largest_loss = float(config["loss_clip"])
        return client

    def trainings(
        self, usual: fl.LocalTraining, config: Mapping[str, Any]
    ) -> dict[str, fl.LocalTraining]:
        """Add the first step, along the gradient of all samples.

        Args:
            usual: the training of a round.
            config: what clients and server agreed on.
        """
        plans = super().trainings(usual, config)
        full = plans["full"]
        noise = float(config["first_noise"]) * full.noise
        return {**plans, "first": replace(full, lr=config["lr"], noise=noise)}

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible to the server under every mask."""
        noise = "with noise, " if self.privacy.noisy else ""
        return fl.Disclosures(
            server=[
                f"{noise}norms and inner products of the clients' first updates, and their values "
                "coordinate by coordinate, in an unknown order",
                f"{noise}each client's choice among the models, in some rounds",
                f"{noise}each client's update (the plain sum reads all replies)",
                "at the end how far each model has moved (masked where updates are)",
            ]
        )


class Mixture(NamedTuple):
    """Soft clusters.

    Attributes:
        shares: (m, k) π, whose rows sum to 1.
        overlap: o, the largest overlap of two components, in [0, 1].
    """

    shares: Array
    overlap: float


def soft_clusters(updates: Array, k: int | None, seed: int, directions: int = 2) -> Mixture:
    """Return shares of clusters by a mixture of spherical Gaussians with equal weights.

    Args:
        updates: (m, d) the first updates.
        k: number of components; None takes the one from 2 to `LARGEST_K` whose components are most
            separate.
        seed: of the mixture's starts.
        directions: principal directions in which they are clustered.
    """
    points = projected(updates, directions)
    numbers = [k]
    if k is None:
        numbers = list(range(2, min(LARGEST_K, len(points) - 1) + 1))
    best: Mixture | None = None
    best_separation = -math.inf
    for number in numbers:
        # a mixture with a component for each point has variances of zero
        if number is None or number < 2 or number >= len(points):
            continue
        shares, separation = _fitted(points, number, seed)
        if separation > best_separation:
            best_separation = separation
            # two Gaussians of deviation σ at distance 2σ·s overlap by erfc(s/√2) = 2Φ(−s)
            best = Mixture(shares, math.erfc(separation / math.sqrt(2)))
    if best is None:
        # one component, or a client for each
        return Mixture(np.ones((len(points), 1)), 0.0)
    return best


def projected(updates: Array, directions: int = 2) -> Array:
    """Return the updates in their principal directions, each scaled to [0, 1], (m, directions).

    The directions are the principal ones of standardised coordinates; the updates themselves are
    projected on them.

    Args:
        updates: (m, d).
        directions: how many, of which there are min(m, d) at most.
    """
    # Otherwise a few coordinates of large variance would determine the directions.
    deviations = updates.std(0)
    scale = np.where(deviations > 0, deviations, 1.0)
    standardised = (updates - updates.mean(0)) / scale
    _, _, principal = np.linalg.svd(standardised, full_matrices=False)
    points = updates @ principal[:directions].T
    low = points.min(0)
    width = points.max(0) - low
    scaled: Array = (points - low) / np.where(width > 0, width, 1.0)
    return scaled


def _fitted(points: Array, k: int, seed: int) -> tuple[Array, float]:
    """Return shares (m, k) by k components, and how separate the two nearest ones are.

    The separation of two components is ‖μ_a − μ_b‖ / (2 max(σ_a, σ_b)).

    Args:
        points: (m, directions).
        k: number of components.
        seed: of the starts.
    """
    from sklearn.mixture import GaussianMixture

    mixture = GaussianMixture(
        k,
        covariance_type="spherical",
        init_params="k-means++",
        n_init=STARTS,
        random_state=seed % SEEDS,
    )
    mixture.fit(points)
    # clusters are equally likely a priori, as in the authors' program
    mixture.weights_ = np.full(k, 1 / k)
    shares = np.asarray(mixture.predict_proba(points), dtype=np.float64)
    deviations = np.sqrt(mixture.covariances_)
    separations = []
    for a in range(k):
        for b in range(a):
            distance = float(np.linalg.norm(mixture.means_[a] - mixture.means_[b]))
            separations.append(distance / (2 * max(deviations[a], deviations[b])))
    return shares, min(separations)
