"""MR-MTL: mean-regularized multi-task learning, one model per client near the mean of all.

Liu, Hu, Wu, Smith, "On Privacy and Personalization in Cross-Silo Federated Learning", NeurIPS 2022.
Each client minimises F_k(w) + λ/2 ‖w − w̄‖², where w̄ is the mean of all clients' models. With
λ = 0 every client trains alone; the larger λ, the nearer all models stay to one. The steps and the
mean are those of the authors' code (kenziyuliu/private-cross-silo-fl, trainers/mrmtl.py), but for
the place of the regularizer: it is outside the clip and the noise here.

w_k: the model of client k, which never leaves it; w̄: the mean, which server and clients update by
the mean of the clients' updates. The server needs sums of updates only.

In the paper's setting ("silo-specific example-level privacy", dp_unit example) each client trains
by DP-SGD, so its updates protect its own examples, and every other party may read them.

The regularizer's gradient follows from released models. A training whose update was lost is undone:
the server names the last update that arrived from each client, or a later one would follow from a
training that the ledger does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from securecluster.protocols import authoring as fl

torch = fl.torch


@dataclass(frozen=True, eq=False)
class MeanUpdates(fl.AverageDeltas):
    """Server to client: the updates of the mean that the client lacks, and its last reply."""

    # (b,) int64, the call of the last update that arrived from each client; 0 before the first
    received: Annotated[fl.Rows | None, fl.Whole(maximum="steps")] = None


class PersonalClient(fl.TrainingClient):
    """Clients that hold a model of their own, and train it near the mean of all models.

    `models` holds the mean w̄, which averages move. A client's own model has two versions, before
    and after its last training: a training whose update did not arrive is undone, so that nothing
    that was not counted as a release is behind a later one (not in the paper).

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: stages between an update and the wire.
        weighted: clients send |D_i|; they do not.
        regularization: λ.
    """

    _before = fl.ClientTensor("dimension", start="model")
    _after = fl.ClientTensor("dimension", start="model")
    _calls = fl.ClientTensor(dtype="int64")  # the call of each client's last training

    def __init__(
        self,
        cohort: fl.LocalTrainer,
        training: fl.LocalTraining,
        pipeline: fl.Pipeline,
        weighted: bool,
        regularization: float,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self._regularization = regularization

    @fl.answers(fl.SUM, through=("delta",), fresh=True, trains="usual")
    def contribute(self, context: fl.CallContext, query: MeanUpdates) -> fl.Update:
        """Train each client's own model near the mean, and return its update.

        w̄ ← w̄ + P⁻¹Δ; w_k ← SGD_n(w_k) on F_k(w) + λ/2 ‖w − w̄‖²; the reply is P(the change of w_k).

        Args:
            query: the updates of w̄ that each client lacks.

        Raises:
            PolicyError: the request comes too late, or does not say which update arrived.
        """
        if query.received is None:
            raise fl.PolicyError("contribute needs the call of each client's last update")
        late = []
        for i, k in zip(context.ids, context.positions, strict=True):
            # a client that has trained in a later call no longer has the models of this one
            if self._calls[k] > context.step:
                late.append(i)
        if late:
            raise fl.late_request_error(late)
        self.catch_up(context, query)
        self._begin(context, query.received.values.tolist())

        positions = list(context.positions)
        regularizer = None
        # Without the term clients draw the batches and the noise of local training.
        if self._regularization:
            means = self.models.select(positions)
            regularizer = fl.MeanRegularizer(means, self._regularization)
        delta = self.cohort.train(
            fl.Rows(self._before[positions]),
            positions,
            self.training,
            context.step,
            self._pipeline.buffer_width(self.cohort.model.dimension),
            regularizer=regularizer,
        )
        updates = delta[:, : self.cohort.model.dimension]
        # An update that is not finite is refused, or counts as zeros under noise.
        finite = updates.isfinite().all(1, keepdim=True)
        trained = self._before[positions] + updates
        self._after[positions] = torch.where(finite, trained, self._before[positions])
        return fl.Update(fl.Rows(delta), None)

    def _begin(self, context: fl.CallContext, received: Sequence[int]) -> None:
        """Choose the models to train from: after the last training if its update arrived.

        Args:
            context: the clients.
            received: (b,) the call of the last update that arrived from each client.
        """
        for k, call in zip(context.positions, received, strict=True):
            # A repeated call trains from the same model again.
            if self._calls[k] == context.step:
                continue
            if self._calls[k] == call:
                self._before[k] = self._after[k]
            self._calls[k] = context.step

    @property
    def own_models(self) -> fl.Rows:
        """Return each client's own model, (m, d)."""
        return fl.Rows(self._after.values, tuple(range(len(self._after))))

    @property
    def unshared(self) -> frozenset[int]:
        """Return the positions of clients that have trained their own model."""
        return frozenset(k for k, call in enumerate(self._calls.values) if call)


@dataclass
class MRMTLState:
    """State of the server's loop: one cluster, pending updates of the mean, and last replies."""

    labels: list[int]
    outbox: fl.PendingUpdates
    received: list[int]  # (m,) the call of the last update that arrived from each client

    def message_for(self, to: Sequence[int]) -> MeanUpdates:
        """Return the updates of the mean that each recipient lacks, and its last reply.

        Args:
            to: numbers of the recipients.
        """
        averages = self.outbox.message_for(to)
        received = torch.as_tensor([self.received[i] for i in to], dtype=torch.int64)
        return MeanUpdates(
            averages.means,
            averages.steps,
            averages.absolute,
            averages.count,
            averages.restart,
            fl.Rows(received),
        )


@dataclass(kw_only=True)
class MeanOverClients(fl.SumsOverAll):
    """Options of sums of models, whose mean is over clients, as in the paper's objective."""

    def weights_updates(self, method: Any) -> bool:
        """Return False."""
        return False


class MRMTLObserver(fl.Observer):
    """The experimenter's measurements where each client has a model of its own."""

    def shared_models(self, client: Any) -> Any:
        """Return the mean of the clients' models, (1, d).

        Args:
            client: a `PersonalClient`.
        """
        return client.models.row(0)[None]

    def models_after_round(self, client: Any, state: Any) -> fl.Rows:
        """Return each client's own model.

        Args:
            client: a `PersonalClient`.
            state: the server's state after the round.
        """
        models: fl.Rows = client.own_models
        return models

    def final_models(self, client: Any, state: Any) -> fl.Rows:
        """Return each client's own model.

        Args:
            client: a `PersonalClient`.
            state: the server's final state.
        """
        models: fl.Rows = client.own_models
        return models


@fl.protocol
class MRMTL(fl.ClusteringProtocol):
    """One model per client, regularized towards the mean of all models; no clusters."""

    regularization: Annotated[float, fl.Number(0, 1e9, high_in=True)] = 0.1
    """λ of λ/2 ‖w − w̄‖², from 0, with which every client trains alone, to 1/lr, with which each
    step of SGD ends one gradient step away from the mean
    """

    sums: fl.SumOptions = fl.group(MeanOverClients)
    name: ClassVar[str] = "mrmtl"
    client: ClassVar[type[fl.TrainingClient]] = PersonalClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> MRMTLState:
        """Add the mean of the clients' updates to the mean model in every round."""
        m = len(net.clients)
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = MRMTLState([0] * m, outbox, [0] * m)
        for t in run.rounds("train", state, self.rounds):
            least_members = net.least_members
            clients = net.clients
            sampled = fl.sample_clients(net, clients, self.participation, t, minimum=least_members)
            sums = net.sum(PersonalClient.contribute, state.message_for(sampled), to=sampled)
            state.outbox.acknowledge(sums.ids)
            # told with the next request: a client undoes a training whose update did not arrive
            for i in sums.ids:
                state.received[i] = sums.step
            if sums.ids:
                # with all clients in the sum, w̄ stays the mean of the w_k: all begin at θ_0
                state.outbox.post(sums.step, fl.weighted_means(sums), state.labels)
        fl.flush(net, run, state)
        return state

    def assign_newcomers(self, net: fl.ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return cluster 0 for every newcomer, which starts from the mean."""
        return [0] * len(to)

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the client object, with λ.

        Args:
            cohort: the clients' data and local training.
            pipeline: stages between an update and the wire.
            config: what clients and server agreed on.
        """
        training = self.training.usual(self, config)
        return PersonalClient(cohort, training, pipeline, self.weighted, float(self.regularization))

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Check λ against the learning rate, too.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: steps along the regularizer's gradient would go beyond the mean.
        """
        # A step on λ/2 ‖w − w̄‖² maps w − w̄ to (1 − lr·λ)(w − w̄), which changes sign if lr·λ > 1.
        lr = float(fl.resolved_defaults(self, facts)["lr"])
        if self.training.optimizer == "sgd" and self.regularization * lr > 1:
            raise fl.UsageError(
                f"regularization {self.regularization:g} at learning rate {lr:g} steps beyond the "
                f"mean: give at most 1/lr = {1 / lr:g}"
            )
        return super().shared_facts(facts)

    @property
    def observer(self) -> MRMTLObserver:
        """Return what the experimenter computes outside the protocol."""
        return MRMTLObserver(self)
