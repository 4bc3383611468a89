"""FedAvg with local fine-tuning, a baseline for personalisation.

Clients train one shared model by FedAvg, and then each client trains it alone, as it does in any
method with `tune_rounds` (`TrainingClient.tuned`).

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021 (FTFA); Yu, Bagdasaryan,
Shmatikov, "Salvaging Federated Learning by Local Adaptation", 2020, who adapt a model that was
trained with differential privacy without any noise, as here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from securecluster.core.option_groups import group
from securecluster.core.validation import AtLeast
from securecluster.protocols.common.averages.averaging import (
    AveragingState,
    SumClient,
    average_clusters,
    visible_sample_counts,
)
from securecluster.protocols.common.averages.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.common.disclosures import Disclosures
from securecluster.protocols.common.options.sum_options import SumOptions, SumsOverAll
from securecluster.protocols.common.options.training_options import TrainingOptions
from securecluster.runtime.run import Run

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel


@dataclass(kw_only=True)
class TrainingWithTuning(TrainingOptions):
    """Options of local training, with rounds of tuning among those of the run."""

    tune_rounds: Annotated[int, AtLeast(0)] = 3
    """rounds at the end, at most all but one, in which every client trains the model alone, without
    noise; what comes of it stays at the client, so it costs no ε; 3 of 3 epochs each are about the
    10 epochs of fine-tuning after FedAvg that Collins et al. 2021 (FedRep) compare with, 0 is
    FedAvg
    """

    def tuning(self, method: Any) -> int:
        """Return the number of rounds that FedAvg leaves for tuning.

        Args:
            method: whose options they are.
        """
        return int(method.rounds - method.total_rounds)


@protocol
class FineTune(ClusteringProtocol):
    """FedAvg, then every client trains the model alone for some rounds."""

    training: TrainingOptions = group(TrainingWithTuning)
    sums: SumOptions = group(SumsOverAll)
    name: ClassVar[str] = "finetune"
    client: ClassVar[type[TrainingClient]] = SumClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        """Run FedAvg; clients tune its model without the server."""
        m = len(net.clients)
        outbox = PendingUpdates.start(m, fresh=self.mask != "none")
        state = AveragingState([0] * m, outbox)
        for t in run.rounds("train", state, self.total_rounds):
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    @property
    def total_rounds(self) -> int:
        """Return the number of FedAvg's rounds: clients tune its model in the others."""
        return max(1, self.rounds - self.training.tune_rounds)

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return cluster 0 for every newcomer, which starts from FedAvg's model."""
        return [0] * len(to)

    def disclosures(self) -> Disclosures:
        """Return what the weights of the average show."""
        return Disclosures(server=visible_sample_counts(weighted=not self.privacy.per_client))
