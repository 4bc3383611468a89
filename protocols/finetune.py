"""FedAvg with local fine-tuning, a baseline for personalisation.

Clients train one shared model by FedAvg, and then each client trains it alone.

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021 (FTFA); Yu, Bagdasaryan,
Shmatikov, "Salvaging Federated Learning by Local Adaptation", 2020, who adapt a model that was
trained with differential privacy without any noise, as here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from securecluster.core.lazy_torch import torch
from securecluster.core.option_groups import group
from securecluster.core.validation import AtLeast
from securecluster.errors import PolicyError
from securecluster.messaging.messages import Ack, select
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import (
    AveragingState,
    SumClient,
    average_clusters,
    visible_sample_counts,
)
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.common.disclosures import Disclosures
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.protocols.common.observer import Observer
from securecluster.protocols.common.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.sum_options import SumOptions, SumsOverAll
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, SUM, answers
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer, LocalTraining


class FineTuneClient(SumClient):
    """Clients that contribute to one mean, then train its model alone and contribute no more.

    Fine-tuned models never leave their clients, so fine-tuning has no noise and costs no ε.
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
        # (d,) FedAvg's model, as the first client that fine-tunes starts from it
        self.shared = self._start

    @answers(SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AverageDeltas) -> Update:
        """Contribute to the mean as in FedAvg.

        Raises:
            PolicyError: a client has trained alone without noise, so its update would release what
                it learned.
        """
        if self._unshared[context.positions].any():
            raise PolicyError(
                "contribute is about the model of averages: who has tuned it alone contributes no "
                "more"
            )
        return super().contribute(context, query)

    @answers(GATHER, private=False, trains="kept")
    def train_locally(self, context: CallContext, query: AverageDeltas) -> Ack:
        """Train the model alone, without noise, and send no update."""
        starting = []
        for n, tuned in enumerate(self._unshared[context.positions].tolist()):
            if not tuned:
                starting.append(n)
        if starting:
            # FedAvg's model is read after the averages that these clients lack, before it changes.
            starting_context = context.select(starting)
            self.catch_up(starting_context, select(query, starting))
            if not self._unshared.values.any():
                self.shared = self.models.row(starting_context.positions[0]).clone()
        return super().train_locally(context, query)

    # one model of all clients: no row for each
    def memory(self) -> dict[str, torch.Tensor]:
        """Add the shared model."""
        return {**super().memory(), "shared": self.shared}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore what `memory` returned."""
        super().recall(memory)
        self.shared = memory["shared"].to(self._start.device)


class FineTuneObserver(Observer):
    """The experimenter's measurements where clients continue alone."""

    def shared_models(self, client: Any) -> Any:
        """Return FedAvg's model, (1, d), once clients have fine-tuned it.

        Return None before that, when the clients' own models are FedAvg's.
        """
        if not client.unshared:
            return None
        return client.shared[None]


@protocol
class FineTune(ClusteringProtocol):
    """FedAvg, then every client trains the model alone for some rounds."""

    tune_rounds: Annotated[int, AtLeast(0)] = 3
    """rounds at the end, at most all but one, in which every client trains the model alone; 3 of 3
    epochs each are about the 10 epochs of fine-tuning after FedAvg that Collins et al. 2021
    (FedRep) compare with, 0 is FedAvg
    """

    sums: SumOptions = group(SumsOverAll)
    name: ClassVar[str] = "finetune"
    client: ClassVar[type[TrainingClient]] = FineTuneClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """Run FedAvg, then ask all clients to train alone.

        All clients take part in the rounds of fine-tuning, whatever the participation.
        """
        m = len(net.clients)
        outbox = PendingUpdates.start(m, fresh=self.mask != "none")
        state = AveragingState([0] * m, outbox)
        for t in run.rounds("train", state, self.rounds):
            if t <= self._shared_rounds:
                average_clusters(net, state, self.participation, t)
            else:
                self._fine_tune(net, state)
        flush(net, run, state)
        return state

    def _fine_tune(self, net: ServerChannel, state: AveragingState) -> None:
        """Ask all clients to train FedAvg's model alone for one round."""
        # Averages still reach clients that missed them, but no later one may replace their models.
        state.outbox.unsubscribe(net.clients)
        query = state.outbox.message_for(net.clients)
        replies = net.gather(FineTuneClient.train_locally, query, to=net.clients)
        state.outbox.acknowledge(replies.ids)

    @property
    def _shared_rounds(self) -> int:
        """Return the number of FedAvg's rounds."""
        return max(1, self.rounds - self.tune_rounds)

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return cluster 0 for every newcomer, which starts from FedAvg's model."""
        return [0] * len(to)

    def disclosures(self) -> Disclosures:
        """Return what the weights of the average show."""
        return Disclosures(server=visible_sample_counts(weighted=not self.privacy.per_client))

    @property
    def observer(self) -> FineTuneObserver:
        """Return what the experimenter computes outside the protocol."""
        return FineTuneObserver(self)
