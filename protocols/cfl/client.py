"""The clients of CFL.

They reply with updates, full gradients, models of splits, and the losses that the fallback
compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.bounds import Between, Real, Upto
from securecluster.messaging.messages import Rows
from securecluster.privacy.dp.loss_mechanism import WORST, loss_clip, noised
from securecluster.protocols.common.compressed_updates import CompressedUpdateClient
from securecluster.protocols.common.messages import MOST_SAMPLES, AverageDeltas, Update
from securecluster.runtime.endpoint import GATHER, SUM, CallContext, answers
from securecluster.training.config import FULL_GRADIENT


@dataclass(frozen=True, eq=False)
class PathModels(AverageDeltas):
    """Server to client: the models on the path from the root to its cluster."""

    # models on the longest path of a client that is asked
    depth: Annotated[int, Between(most="clients")] = 0


@dataclass(frozen=True, eq=False)
class PathLosses:
    """Client to server: how several models do on samples that it keeps aside."""

    # (b, 1 + depth), summed over those samples: its own model's first, then the path's from the
    # root; 0 after its end
    loss: Annotated[Rows, Real((Upto("depths", "clients", least=1),))]
    # (b,) how many samples; without it losses are means
    size: Annotated[Rows | None, Real(low=0, most=MOST_SAMPLES)]


class CFLClient(CompressedUpdateClient):
    """Clients that also reply with gradients, and judge the models on their path."""

    @answers(GATHER, through=("delta",), fresh=True, trains="full")
    def gradient(self, turn: CallContext, query: AverageDeltas) -> Update:
        """Return −∇r_i(θ_i) over all of D_i (Sattler et al. 2019, eq. 50).

        The sign makes no difference to cosines.
        """
        self.catch_up(turn, query)
        room = self._pipeline.room(self.cohort.model.dimension)
        return Update(
            Rows(
                self.cohort.train(
                    self.models.select(turn.at),
                    turn.at,
                    replace(FULL_GRADIENT, clip=self.training.clip, noise=self.training.noise),
                    turn.step,
                    room,
                )
            ),
            None,
        )

    @answers(SUM, unmasked=("loss", "size"))
    def judge(self, turn: CallContext, query: PathModels) -> PathLosses:
        """Return the losses of θ_i and of the models on its path, on the samples kept aside.

        The query brings the models. The losses have noise where the run adds some.
        """
        self.check_not_behind(turn, query)
        widths = [1 + len(p) for p in query.means.picks]
        depth, clip = query.depth, loss_clip(self._pipeline.guard)
        if depth < max(widths) - 1:
            raise FrameError(
                f"PathModels.depth is {depth}, and a path has {max(widths) - 1} models: the frame "
                "is refused"
            )
        found = np.zeros((len(turn.at), 1 + depth))
        sizes = [self.cohort.aside[k] for k in turn.at]
        # NaN for a client that keeps nothing aside
        found[:, 0] = self.cohort.loss_aside(self.models.select(turn.at), turn.at, clip)
        for n in range(max(widths) - 1):
            far = [k for k, picks in enumerate(query.means.picks) if len(picks) > n]
            table, index = self._of(query, sorted({query.means.picks[k][n] for k in far}))
            rows = Rows(table, tuple(index[query.means.picks[k][n]] for k in far))
            found[far, 1 + n] = self.cohort.loss_aside(rows, [turn.at[k] for k in far], clip)
        kind = self.models.table.dtype
        found = np.nan_to_num(
            noised(self._pipeline.guard, "judge", turn.ids, turn.step, found, sizes, widths),
            nan=WORST,
            posinf=WORST,
        )
        if self._pipeline.clips:  # n_i stays here
            return PathLosses(Rows(torch.as_tensor(found, dtype=kind)), None)
        size = np.array(sizes, dtype=np.float64)
        return PathLosses(
            Rows(torch.as_tensor(found * size[:, None], dtype=kind)),
            Rows(torch.as_tensor(size, dtype=kind)),
        )

    def _of(self, query: AverageDeltas, rows: Sequence[int]) -> tuple[torch.Tensor, dict[int, int]]:
        """The models that a letter's rows stand for, (len(rows), d), and each row's place."""
        models = [
            self.model_at(query.means.table[row], int(query.steps.table[row])) for row in rows
        ]
        return torch.stack(models), {row: n for n, row in enumerate(rows)}
