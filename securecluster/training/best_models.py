"""The best model that each client has had, by the loss on samples that it keeps out of training.

It stays with the client: no reply follows from it, so no price covers it, and none is due.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows


class BestModels:
    """Model with the least loss of each client so far.

    Args:
        clients: number of clients.
        prototype: a model (d,) of their type and device.
    """

    def __init__(self, clients: int, prototype: torch.Tensor) -> None:
        self._losses = torch.full((clients,), torch.inf, dtype=torch.float64)
        self._models = prototype.repeat(clients, 1)

    def note(self, models: Rows, positions: Sequence[int], losses: NDArray[np.float64]) -> None:
        """Keep the models that have less loss than any before.

        Args:
            models: one for each of the clients, (b, d).
            positions: the b clients' positions.
            losses: mean losses on their validation samples, (b,); NaN is never less.
        """
        for n, (k, loss) in enumerate(zip(positions, losses.tolist(), strict=True)):
            if loss < float(self._losses[k]):
                self._losses[k] = loss
                self._models[k] = models.row(n)

    def chosen(
        self, models: Rows, positions: Sequence[int], losses: NDArray[np.float64]
    ) -> torch.Tensor:
        """Return the models, (b, d), in whose place is an earlier one where that has less loss.

        Args:
            models: as in `note`.
            positions: as in `note`.
            losses: as in `note`.
        """
        rows = models.values.clone()
        for n, (k, loss) in enumerate(zip(positions, losses.tolist(), strict=True)):
            if float(self._losses[k]) < loss:
                rows[n] = self._models[k]
        return rows

    def memory(self) -> dict[str, torch.Tensor]:
        """Return everything that a later choice depends on, by name."""
        return {"best_losses": self._losses, "best_models": self._models}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore the state that `memory` returned.

        Args:
            memory: tensors by name.
        """
        # copies, since they are changed in place
        self._losses = memory["best_losses"].to(self._losses, copy=True)
        self._models = memory["best_models"].to(self._models, copy=True)
