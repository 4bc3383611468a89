"""What is kept of clients' test samples at the end of a run, and answers that know targets alone.

The baseline of a client knows nothing but its own training targets, and gives every test sample one
answer: the shares of the labels, of which the most frequent one is predicted, or the median of
numbers, or the mean position. The observer computes it when a run is over, outside the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows
from securecluster.models.objectives import (
    Binary,
    Classification,
    Language,
    MultiLabel,
    Objective,
    Regression,
    Trajectory,
)
from securecluster.training.chance_level import TOLERANCE
from securecluster.training.evaluation import EVALUATED

if TYPE_CHECKING:
    from securecluster.training.local_trainer import LocalTrainer

FloatArray = NDArray[np.float64]
# in the clients' extra state, client after client
OUTPUTS = "test_outputs"  # of each client's model, (N, …)
TARGETS = "test_targets"  # (N, …)
SIZES = "test_sizes"  # test samples of each client, (m,)
KNOWN = "training_targets"  # what the baselines know, (m, …)
LABELS = (Classification.kind, Language.kind)
SHARES = (Binary.kind, MultiLabel.kind)
# kinds whose metric alone is kept: a vocabulary of outputs a token would be large
OF_METRIC = (Language.kind, Trajectory.kind)
# as scikit-learn clips probabilities, so that a label that never occurred has a finite loss
SMALLEST = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """What was measured on clients' test samples at the end of a run.

    Args:
        scores: the objective's metric of each client's model, (m,); NaN without test samples.
        baselines: the same of each client's baseline.
        kept: tensors that further scores follow from, by their names in the clients' state.
    """

    scores: FloatArray
    baselines: FloatArray
    kept: dict[str, torch.Tensor]

    @classmethod
    def of(cls, cohort: LocalTrainer, models: Rows) -> HeldOut:
        """Return what models say of their clients' test samples.

        Args:
            cohort: the clients' data.
            models: each client's own model, (m, d).
        """
        scores = cohort.scores(models)
        if not cohort.measures:
            return cls(scores, np.full(len(scores), np.nan), {})
        objective = cohort.model.objective
        held, trained = cohort.test_samples, cohort.training_samples
        known = [known_of(objective, y, cohort.classes) for y in trained.by_client()]
        parts = list(zip(known, held.by_client(), strict=True))
        baselines = np.array([mean_score(objective, *part) for part in parts], dtype=np.float64)
        # where clients standardised their targets, in each one's own numbers, as its score
        baselines = baselines * cohort.units
        kept = {SIZES: torch.as_tensor(np.diff(held.offsets))}
        if objective.kind not in OF_METRIC and len(held.y):
            outputs = held.outputs(cohort.model, models)
            kept |= {OUTPUTS: outputs, TARGETS: held.y, KNOWN: torch.stack(known)}
        kept = {name: tensor.detach().cpu().contiguous() for name, tensor in kept.items()}
        return cls(scores, objective.judged(baselines), kept)


def known_of(objective: Objective, y: torch.Tensor, classes: int) -> torch.Tensor:
    """Return what a baseline knows of training targets.

    Args:
        objective: of the run.
        y: targets, (n, …).
        classes: outputs of the network.

    Returns:
        How often each label or token occurs (classes,); of several labels a sample the share that
        has each (L,); of values their mean and median (2, k).
    """
    if objective.kind in LABELS:
        padding = getattr(objective, "padding", None)
        labels = y.flatten() if padding is None else y[y != padding]
        return torch.bincount(labels, minlength=classes)
    values = y.reshape(len(y), -1).double()
    if objective.kind in SHARES:
        return values.mean(0)
    median = torch.as_tensor(np.median(values.numpy(), axis=0))
    return torch.stack([values.mean(0), median])


def answer(objective: Objective, known: torch.Tensor) -> torch.Tensor:
    """Return the outputs of a network that gives every sample the baseline's answer.

    Args:
        objective: of the run.
        known: as `known_of` returns it.

    Returns:
        (classes,), (L,) or (k,), float64.
    """
    if objective.kind in LABELS:
        return (known.double() / known.sum()).clamp(min=SMALLEST).log()
    if objective.kind in SHARES:
        return known.clamp(SMALLEST, 1 - SMALLEST).logit()
    # no other value has a smaller mean absolute error than the median
    return known[1 if objective.kind == Regression.kind else 0]


def below(objective: Objective, scores: FloatArray, baselines: FloatArray) -> list[int]:
    """Return the positions of clients whose model is worse than their baseline.

    A baseline that is never wrong, as where a client has one label, cannot be beaten, and is left
    out.

    Args:
        objective: whose metric it is.
        scores: of the models, (m,); NaN without test samples.
        baselines: of the baselines, (m,).
    """
    sign = 1.0 if objective.higher else -1.0
    # the metric of samples that are all right
    best = float(objective.judged(np.array([1.0 if objective.higher else 0.0]))[0])
    margin = TOLERANCE * np.maximum(1.0, np.abs(baselines))
    worse = sign * scores < sign * baselines - margin
    return np.flatnonzero(worse & (sign * baselines < sign * best)).tolist()


def mean_score(objective: Objective, known: torch.Tensor, y: torch.Tensor) -> float:
    """Return the mean score of a client's baseline; NaN without test samples.

    Args:
        objective: of the run.
        known: as `known_of` returns it.
        y: test targets, (n, …).
    """
    outputs = answer(objective, known)
    scores = [torch.zeros(0, dtype=torch.float64)]
    for targets in torch.split(y, EVALUATED):
        shape = targets.shape if objective.kind == Language.kind else targets.shape[:1]
        if targets.is_floating_point():
            targets = targets.double()
        repeated = outputs.expand(*shape, *outputs.shape)
        scores.append(objective.scores(repeated, targets).double())
    return float(torch.cat(scores).mean())
