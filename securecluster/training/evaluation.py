"""What models make of clients' samples: those of all clients that share a model go through it
together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel

EVALUATED = 1000  # samples at a time


@dataclass(frozen=True)
class Samples:
    """Clients' samples, x (N, …) and y (N, …), one client after the other: client k's are
    `offsets[k]` to `offsets[k + 1]`.
    """

    x: torch.Tensor
    y: torch.Tensor
    offsets: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        x: Sequence[NDArray[Any]],
        y: Sequence[NDArray[Any]],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> Samples:
        """One client after the other, on the device where they are used; labels and tokens stay
        whole numbers.
        """
        ends = np.cumsum([0, *map(len, y)])

        def placed(parts: Sequence[NDArray[Any]]) -> torch.Tensor:
            whole = torch.as_tensor(np.concatenate(parts))
            return whole.to(device, dtype if whole.is_floating_point() else None)

        return cls(placed(x), placed(y), ends)

    def digest(self, k: int) -> bytes:
        """32 bytes that stand for client k's samples."""
        own = slice(int(self.offsets[k]), int(self.offsets[k + 1]))
        found = hashlib.blake2b(self.x[own].cpu().numpy().tobytes(), digest_size=32)
        found.update(self.y[own].cpu().numpy().tobytes())
        return found.digest()

    def targets(self, who: Sequence[int]) -> NDArray[Any]:
        """Return the targets of some clients' samples, one client after the other."""
        parts = [self.y[int(self.offsets[k]) : int(self.offsets[k + 1])] for k in who]
        found: NDArray[Any] = torch.cat(parts).cpu().numpy()
        return found

    def mean(
        self,
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        model: FlatModel,
        flat: Rows,
        who: Sequence[int],
        bound: float | None = None,
    ) -> NDArray[np.float64]:
        """The mean score of each of `who`'s samples under its own row of `flat`, (len(who),); NaN
        where it has no sample.

        Args:
            score: of (outputs, targets), a number a sample: the objective's `losses` or `scores`.
            flat: parameters, one row for each of `who`.
            who: positions of clients.
            bound: B, where each sample's score is clipped to [0, B], so that none moves the mean by
                more than B over their number.
        """
        means = np.full(len(who), np.nan)
        index = flat.index if flat.index is not None else tuple(range(len(flat)))
        sharing: dict[int, list[int]] = {}  # the places in `who` of clients with samples, by model
        for place, client in enumerate(who):
            if self._rows(client).size:
                sharing.setdefault(index[place], []).append(place)
        for row, places in sharing.items():
            samples = [self._rows(who[place]) for place in places]
            scores = self._scores(score, model, flat.table[row], np.concatenate(samples))
            if bound is not None:
                scores = scores.clip(0, bound)
            ends = np.cumsum([len(rows) for rows in samples])
            means[places] = [part.mean() for part in np.split(scores, ends[:-1])]
        return means

    def _rows(self, client: int) -> NDArray[np.int64]:
        """Return the rows of a client's samples."""
        return np.arange(self.offsets[client], self.offsets[client + 1])

    def _scores(
        self,
        score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        model: FlatModel,
        flat: torch.Tensor,
        places: NDArray[np.int64],
    ) -> NDArray[np.float64]:
        """Each sample's score under one model, dropout off; infinite where a model that has
        diverged gives none (inf − inf).
        """
        views = model.views(flat)
        with torch.no_grad():
            parts = torch.split(torch.as_tensor(places).to(self.x.device), EVALUATED)
            values = torch.cat(
                [score(model.call(views, self.x[part]), self.y[part]) for part in parts]
            )
        found: NDArray[np.float64] = values.double().cpu().numpy()
        return np.where(np.isnan(found), np.inf, found)
