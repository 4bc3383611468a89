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
from typing import Annotated, Any, ClassVar

from securecluster.protocols import authoring as fl


@dataclass(kw_only=True)
class TrainingWithTuning(fl.TrainingOptions):
    """Options of local training, with rounds of tuning among those of the run."""

    tune_rounds: Annotated[int, fl.AtLeast(0)] = 3
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


@fl.protocol
class FineTune(fl.ClusteringProtocol):
    """FedAvg, then every client trains the model alone for some rounds."""

    training: fl.TrainingOptions = fl.group(TrainingWithTuning)
    sums: fl.SumOptions = fl.group(fl.SumsOverAll)
    name: ClassVar[str] = "finetune"
    client: ClassVar[type[fl.TrainingClient]] = fl.SumClient

    def run_server(self, net: fl.ServerChannel, run: fl.Run) -> fl.AveragingState:
        """Run FedAvg; clients tune its model without the server."""
        m = len(net.clients)
        outbox = fl.PendingUpdates.start(m, fresh=self.mask != "none")
        state = fl.AveragingState([0] * m, outbox)
        for t in run.rounds("train", state, self.total_rounds):
            fl.average_clusters(net, state, self.participation, t)
        fl.flush(net, run, state)
        return state

    @property
    def total_rounds(self) -> int:
        """Return the number of FedAvg's rounds: clients tune its model in the others."""
        return max(1, self.rounds - self.training.tune_rounds)

    def assign_newcomers(self, net: fl.ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Return cluster 0 for every newcomer, which starts from FedAvg's model."""
        return [0] * len(to)

    def disclosures(self) -> fl.Disclosures:
        """Return what the weights of the average show."""
        return fl.Disclosures(server=fl.visible_sample_counts(weighted=not self.privacy.per_client))
