"""Shared code of the scripts for Figures 5 to 8 of Sattler et al. 2019.

It runs CFL so that it never splits, and computes g from updates and from full gradients, which are
compared at the same point: the model θ that the round's updates start from. Learning rates, and
batch sizes but for Fig. 8, are not in the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.sheet import Cell
from benchmarks.table import SEEDED
from securecluster import Federation, LabelSwap
from securecluster.clustering.bipartition import bipartition
from securecluster.clustering.similarity import cosine, gram
from securecluster.protocols import CFL
from securecluster.protocols.cfl.protocol import CFLObserver
from securecluster.protocols.cfl.separation import is_correct, separation_gap
from securecluster.runtime.run import Line
from securecluster.training.config import FULL_GRADIENT

# no norm of a mean update falls below this ε1, so all clients share one model to the end
NEVER: dict[str, Any] = {
    "criterion": "absolute",
    "eps1": 1e-9,
    "eps2": 1e9,  # and no update exceeds this ε2 (eq. 33)
    "mask": "none",
    "tree": False,  # no newcomers, so no updates are stored for them
}


def training(cell: Cell) -> dict[str, Any]:
    """Return a cell's hyper-parameters of federated learning.

    Args:
        cell: the setting of a run, which may have other keys too.
    """
    names = ("rounds", "model", "lr", "epochs", "batch_size")
    return {name: cell[name] for name in names}


class GradientObserver(CFLObserver):
    """CFL's observer that also compares full gradients (eq. 50), from round `since` on."""

    def observe(
        self, federation: Federation, client: Any, state: Any, accuracy: NDArray[np.float64]
    ) -> Line:
        """Add g and the bipartition's correctness for gradients, and the latter for updates.

        Args:
            federation: the clients' data and their true clusters.
            client: the clients' side of the run.
            state: the server's state.
            accuracy: each client's test accuracy, (m,).
        """
        line = super().observe(federation, client, state, accuracy)
        self.method.seen += 1
        truth = federation.truth
        if self.method.seen < self.method.since or truth is None:
            return line
        clients = range(len(federation))
        # an update of one step of rate 1 is the negative gradient
        updates = client.cohort.train(client.models, clients, FULL_GRADIENT, self.method.seen)
        # eq. 50: cosines of full gradients
        by_gradient = cosine(gram(-updates)).cpu().numpy()
        # eq. 51: cosines of weight-updates
        by_update = state.alpha.numpy()
        gap_gradients = separation_gap(by_gradient, truth)
        return {
            **line,
            "gap_gradients": gap_gradients,
            "correct_gradients": _correct(by_gradient, truth),
            "correct_updates": _correct(by_update, truth),
        }


@dataclass
class Watched(CFL):
    """CFL whose observer also compares full gradients (eq. 50), from round `since` on."""

    since: int = 1
    # rounds so far; without an annotation, so that it is no hyper-parameter
    seen = 0

    @property
    def observer(self) -> GradientObserver:
        """Return what the experimenter computes outside the protocol."""
        return GradientObserver(self)


def _correct(alpha: NDArray[np.float64], truth: Sequence[int]) -> bool:
    """Return true where the bipartition by α splits no true cluster.

    Args:
        alpha: similarities, (m, m).
        truth: the clients' true clusters, (m,).
    """
    # Definition 1, for the bipartition with the smallest α_cross^max
    first, second, *_ = bipartition(alpha)
    return is_correct(first, second, truth)


def watched(cell: Cell, since: int) -> list[Line]:
    """Return the history of a cell's run, with label swap and one model for all.

    Args:
        cell: the setting of the run.
        since: the round from which on full gradients are compared.
    """
    federation = Federation.simulate(
        cell["data"],
        scenario=LabelSwap(clusters=cell["clusters"]),
        clients=cell["clients"],
        samples=cell["points"],
        seed=cell["seed"],
    )
    protocol = Watched(**NEVER, **training(cell), since=since)
    return protocol.fit(federation, SEEDED).history_
