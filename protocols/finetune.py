"""FedAvg with local fine-tuning: one model for everyone, which each client then trains alone. A
baseline for personalisation.

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021 (FTFA); Yu, Bagdasaryan,
Shmatikov, "Salvaging Federated Learning by Local Adaptation", 2020, who adapt a model that was
trained with differential privacy without any noise, as here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_whole
from securecluster.errors import PolicyError
from securecluster.messaging.messages import Ack, select
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import AveragingState, SumClient, average_clusters
from securecluster.protocols.common.base import ClusteringProtocol, ReleaseCounts
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.runtime.endpoint import GATHER, SUM, CallContext, answers
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


class FineTuneClient(SumClient):
    """Clients that contribute to one mean, then train its model alone and contribute no more.

    What they learn alone never leaves them, so that training has no noise and no price.
    """

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        start: torch.Tensor | None = None,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted, start)
        self.training_alone = replace(training, clip=0.0, noise=0.0)
        # (d,) the model of averages alone, as the first client to tune had it
        self.shared = self._start

    @answers(SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AverageDeltas) -> Update:
        """Contribute as in FedAvg.

        Raises:
            PolicyError: a client has trained alone without noise, and its update would tell what it
                learned.
        """
        if not self._unshared.isdisjoint(context.positions):
            raise PolicyError(
                "contribute is about the model of averages: who has tuned it alone contributes no "
                "more"
            )
        return super().contribute(context, query)

    @answers(GATHER, private=False)
    def train_locally(self, context: CallContext, query: AverageDeltas) -> Ack:
        """Train the model alone, without noise; nothing leaves."""
        first = [n for n, k in enumerate(context.positions) if k not in self._unshared]
        if first:
            at = [context.positions[n] for n in first]
            self.catch_up(
                CallContext(
                    tuple(context.ids[n] for n in first), tuple(at), context.round, context.step
                ),
                select(query, first),
            )
            if not self._unshared:
                self.shared = self.models.row(at[0]).clone()
        return super().train_locally(context, query)

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the shared model."""
        return {**super().memory(), "shared": self.shared}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned."""
        super().recall(memory)
        self.shared = memory["shared"].to(self._start.device)


@dataclass
class FineTune(ClusteringProtocol):
    """FedAvg, then every client trains the model alone for some rounds."""

    tune_rounds: int = 3
    """rounds at the end, at most all but one, in which every client trains the model alone; 3 of 3
    epochs each are about the 10 epochs of fine-tuning after FedAvg that Collins et al. 2021
    (FedRep) compare with, 0 is FedAvg
    """

    name: ClassVar[str] = "finetune"
    client: ClassVar[type[TrainingClient]] = FineTuneClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """FedAvg, and then nothing but "train": all clients take part in these rounds, whatever the
        participation.
        """
        m = len(net.clients)
        state = AveragingState([0] * m, PendingUpdates.start(m, fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            if t <= self._shared_rounds:
                average_clusters(net, state, self.participation, t)
                continue
            state.outbox.unsubscribe(net.clients)
            letter = state.outbox.message_for(net.clients)
            state.outbox.acknowledge(
                net.gather(FineTuneClient.train_locally, letter, to=net.clients).ids
            )
        flush(net, run, state)
        return state

    @property
    def _shared_rounds(self) -> int:
        """Return the number of FedAvg's rounds."""
        return max(1, self.rounds - self.tune_rounds)

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """There is one cluster: a newcomer starts from its model."""
        return [0] * len(to)

    def check(self, clients: int) -> None:
        """Add the rounds of tuning."""
        super().check(clients)
        check_whole(self, tune_rounds=0)

    def releases(self) -> ReleaseCounts:
        """Return FedAvg's."""
        return ReleaseCounts(updates=self._shared_rounds, trainings=self._shared_rounds)

    def shared_models(self, client: Any) -> Any:
        """Return FedAvg's model where clients have tuned it; before that it is their own."""
        return client.shared[None] if client.unshared else None

    def server_view(self) -> list[str]:
        """Return what the weights show."""
        return ["each client's number of samples (the plain sum reads every reply)"] * (
            not self.per_client
        )
