"""What the scripts for Figures 5 to 8 of Sattler et al. 2019 share: runs that never split, and g
from updates and from full gradients.

Ours, since the paper prints neither: learning rates, and batch sizes but for Fig. 8. Gradients and
    updates are compared at the same point:
the model θ that the round's updates start from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster import Federation, LabelSwap
from securecluster.benchmarks.papers.sheet import Cell
from securecluster.clustering.bipartition import bipartition
from securecluster.clustering.similarity import cosine, gram
from securecluster.protocols import CFL
from securecluster.protocols.cfl.separation import is_correct, separation_gap
from securecluster.runtime.run import Line
from securecluster.training.config import FULL_GRADIENT

# one model for all
NEVER: dict[str, Any] = {
    "criterion": "absolute",
    "eps1": 1e-9,
    "eps2": 1e9,
    "mask": "none",
    "tree": False,
}


def training(cell: Cell) -> dict[str, Any]:
    """Return a cell's hyper-parameters of federated learning."""
    return {name: cell[name] for name in ("rounds", "model", "lr", "epochs", "batch_size")}


@dataclass
class Watched(CFL):
    """CFL whose observer also compares full gradients (eq. 50), from round `since` on."""

    since: int = 1
    seen = 0  # rounds; without an annotation, so no hyper-parameter

    def observe(
        self, federation: Federation, client: Any, state: Any, accuracy: NDArray[np.float64]
    ) -> Line:
        """Add g and the bipartition's correctness for gradients, and the latter for updates."""
        line = super().observe(federation, client, state, accuracy)
        self.seen += 1
        truth = federation.truth
        if self.seen < self.since or truth is None:
            return line
        clients = range(len(federation))
        # an update of one step of rate 1 is the negative gradient
        updates = client.cohort.train(client.models, clients, FULL_GRADIENT, self.seen)
        by_gradient = cosine(gram(-updates)).cpu().numpy()
        by_update = state.alpha.numpy()
        return {
            **line,
            "gap_gradients": separation_gap(by_gradient, truth),
            "correct_gradients": is_correct(*bipartition(by_gradient)[:2], truth),
            "correct_updates": is_correct(*bipartition(by_update)[:2], truth),
        }


def watched(cell: Cell, since: int) -> list[Line]:
    """Return the history of a cell's run, with gradients from round `since` on.

    The run has label swap and one model for all.
    """
    scenario = LabelSwap(clusters=cell["clusters"])
    federation = Federation.simulate(
        cell["data"],
        scenario=scenario,
        clients=cell["clients"],
        samples=cell["points"],
        seed=cell["seed"],
    )
    return Watched(**NEVER, **training(cell), since=since).fit(federation).history_
