"""SCAFFOLD: one model for all clients, whose local steps are corrected for their drift.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for
Federated Learning", ICML 2020 (arXiv 1910.06378), Algorithm 1 with option II and η_g = 1. x is the
model, y_i what client i makes of it in K steps y_i ← y_i − η(g_i(y_i) − c_i + c), c_i the client's
control variate and c the mean of all.

c_i⁺ − c_i = −c − (y_i − x)/(Kη) is linear in the update y_i − x, and so is its mean. Whoever has
the mean update therefore has the step of c, and the second message of the paper, Δc_i, is never
sent: one secure sum, and one release with noise, serve both.

Not in the paper: masks, noise and secure sums; a clipped update moves c_i by what is left of it; a
training whose update was lost is undone, also in c_i; c moves by the share of clients that is
asked, whoever replies; DP-SGD, which is priced by its epochs, makes K steps of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, ClassVar

from securecluster.protocols import authoring as fl

torch = fl.torch


@dataclass(frozen=True, eq=False)
class CountedAverages(fl.AverageDeltas):
    """Server to client: the averages that it lacks, and which of its updates arrived last."""

    # (b,) int64, the call of the last update that arrived from each client; 0 before the first
    received: Annotated[fl.Rows | None, fl.Whole(maximum="steps")] = None


class ControlledClient(fl.TrainingClient):
    """Clients that train with control variates, and contribute to the mean of updates."""

    common = fl.ClientTensor("dimension")  # c
    before = fl.ClientTensor("dimension")  # c_i at the start of the last training
    after = fl.ClientTensor("dimension")  # and at its end
    calls = fl.ClientTensor(dtype="int64")  # the call of the last training
    steps: int = 1  # K
    share: float = 1.0  # |S|/N
    clip: float = 0.0  # of updates; 0 for none

    @fl.answers(fl.SUM, through=("delta",), fresh=True, trains="usual")
    def contribute(self, context: fl.CallContext, query: CountedAverages) -> fl.Update:
        """Train from the model with corrected steps, and return the update."""
        positions = context.positions
        if query.received is None or bool((self.calls[positions] > context.step).any()):
            raise fl.late_request_error(context.ids)
        for k, call in zip(positions, query.received.values.tolist(), strict=True):
            if self.calls[k] < context.step:  # a repeated call trains as before
                if self.calls[k] == call:
                    self.before[k] = self.after[k]
                self.calls[k] = context.step
        update = self.trained(context, query)
        rows = update.delta.values[:, : self.cohort.model.dimension]
        rows = torch.where(rows.isfinite().all(1, keepdim=True), rows, torch.zeros_like(rows))
        if self.clip:
            rows = rows * (self.clip / rows.norm(dim=1, keepdim=True)).clamp(max=1)
        self.after[positions] = self.before[positions] + self.step(self.common[positions], rows)
        return update

    def step(self, common: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the change of control variates that follows from updates."""
        return -common - rows / (self.steps * self.training.lr)

    def take(self, positions: Sequence[int], query: fl.AverageDeltas) -> None:
        """Apply averages of updates to the model, and to c."""
        for k, averages in self.new_averages(positions, query).items():
            for mean in averages:
                self.common[k] = self.common[k] + self.share * self.step(self.common[k], mean)
        super().take(positions, query)

    def loss_term(self, context: fl.CallContext) -> fl.LinearTerm:
        """Return the correction c − c_i."""
        positions = context.positions
        return fl.LinearTerm(fl.Rows(self.common[positions] - self.before[positions]))


@dataclass
class ScaffoldState(fl.AveragingState):
    """The model's averages, and the call of the last update that arrived from each client."""

    received: list[int]

    def message_for(self, to: Sequence[int]) -> CountedAverages:
        """Return what each client lacks, and which of its updates arrived."""
        averages = self.outbox.message_for(to)
        sent = {field.name: getattr(averages, field.name) for field in fields(averages)}
        received = torch.tensor([self.received[i] for i in to], dtype=torch.int64)
        return CountedAverages(**sent, received=fl.Rows(received))


@fl.protocol
class Scaffold(fl.ClusteringProtocol):
    """One model for all clients, by steps that are corrected for clients' drift."""

    local_steps: Annotated[int, fl.AtLeast(1)] = 10
    """K, the steps of a client in a round, in place of epochs; with dp_unit example it is epochs
    that count
    """

    sums: fl.SumOptions = fl.group(fl.SumsOverAll)
    name: ClassVar[str] = "scaffold"
    client: ClassVar[type[fl.TrainingClient]] = ControlledClient

    def check(self, clients: int) -> None:
        """Check that steps are those of plain SGD, from which control variates follow."""
        super().check(clients)
        training = self.training
        if training.optimizer != "sgd" or training.momentum or training.lr_schedule != "constant":
            raise fl.UsageError(
                "control variates follow from steps of plain SGD at one rate: leave out "
                "optimizer, momentum and lr_schedule"
            )

    @property
    def weighted(self) -> bool:
        """Return False: means are over clients."""
        return False

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> ScaffoldState:
        """Move the model by the mean of the clients' updates in every round."""
        m = len(net.clients)
        # c follows from the average of each round, so they are delivered one by one
        state = ScaffoldState([0] * m, fl.PendingUpdates.start(m, fresh=True), [0] * m)
        for t in run.rounds("train", state, self.rounds):
            least = net.least_members
            sampled = fl.sample_clients(net, net.clients, self.participation, t, minimum=least)
            sums = net.sum(type(self).client.contribute, state.message_for(sampled), to=sampled)
            state.outbox.acknowledge(sums.ids)
            for i in sums.ids:
                state.received[i] = sums.step
            if sums.ids:
                state.outbox.post(sums.step, fl.weighted_means(sums), state.labels)
        fl.flush(net, run, state)
        return state

    def assign_newcomers(self, net: fl.ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return cluster 0 for every newcomer."""
        return [0] * len(to)

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Add K, of which all clients have one."""
        known = super().shared_facts(facts)
        if not self.privacy.per_example:
            return {**known, "control_steps": self.local_steps}
        plan = fl.LocalTraining(1.0, self.training.epochs, self.training.batch_size)
        steps = {plan.number(size) for size in facts.sizes}
        if len(steps) > 1:
            raise fl.UsageError(
                "control variates need as many steps of every client, and epochs of these have "
                f"from {min(steps)} to {max(steps)}: give a larger batch_size, or dp_unit client"
            )
        return {**known, "control_steps": steps.pop()}

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the client object, with K, the share of clients in a round, and the clip."""
        training = self.training.usual(self, config)
        if not training.private:
            training = replace(training, steps=self.local_steps)
        client: Any = type(self).client(cohort, training, pipeline, self.weighted)
        client.steps = int(config["control_steps"])
        client.share = float(self.participation)
        client.clip = float(config["clip"] or 0) if pipeline.clips else 0.0
        return client  # type: ignore[no-any-return]
