"""FedAvg with local fine-tuning, a baseline for personalisation.

Clients train one shared model by FedAvg, and then each client trains it alone, as it does in any
method with `tune_rounds` (`TrainingClient.tuned`).

Cheng, Chadha, Duchi, "Fine-tuning is Fine in Federated Learning", 2021 (FTFA); Yu, Bagdasaryan,
Shmatikov, "Salvaging Federated Learning by Local Adaptation", 2020, who adapt a model that was
trained with differential privacy without any noise, as here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from securecluster.core.option_groups import group
from securecluster.core.validation import AtLeast
from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.common.training_options import TrainingOptions
from securecluster.protocols.fedavg import FedAvg


@dataclass(kw_only=True)
class TrainingWithTuning(TrainingOptions):
    """Options of local training, with rounds of tuning among those of the run."""

    tune_rounds: Annotated[int, AtLeast(0)] = 3
    """rounds at the end, at most all but one, in which every client trains the model alone, without
    noise; what comes of it stays at the client, so it costs no ε; 3 of 3 epochs each are about the
    10 epochs of fine-tuning after FedAvg that Collins et al. 2021 (FedRep) compare with, 0 is
    FedAvg
    """


@protocol
class FineTune(FedAvg):
    """FedAvg, then every client trains the model alone for some rounds."""

    training: TrainingOptions = group(TrainingWithTuning)
    name: ClassVar[str] = "finetune"

    @property
    def total_rounds(self) -> int:
        """Return the number of FedAvg's rounds: clients tune its model in the others."""
        return max(1, self.rounds - self.training.tune_rounds)

    @property
    def tuning_rounds(self) -> int:
        """Return the number of rounds that are left for tuning."""
        return self.rounds - self.total_rounds
