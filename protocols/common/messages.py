"""Messages of all protocols: averages, updates, models and choices.

A restart is a number, which every message of averages names: a client to which it is new first goes
back to θ_0, so one that missed a whole refinement needs no other message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import Between
from securecluster.messaging.bounds import MOST_SAMPLES as MOST_SAMPLES
from securecluster.messaging.bounds import Real, Upto, Whole
from securecluster.messaging.messages import Picks, Rows, Shared

NO_END = 1 << 62  # larger than the number of any post
AVERAGES = Upto("posts", "averages")  # averages in one frame


@dataclass(frozen=True, eq=False)
class AverageDeltas:
    """Server to client: the averages that the client lacks, oldest first."""

    # (r, d) as the updates were summed, hence masked where updates are
    means: Annotated[Picks, Real((AVERAGES, "dimension"), sent="delta", average=True)]
    # (r,) int64, the call of the averaged updates, which identifies the mask
    steps: Annotated[Picks, Whole((AVERAGES,), maximum="steps")]
    absolute: bool  # one row, the displacement since θ_0, instead of one per missed round
    # (b,) int64, the number of averages that a client has had once it has applied these; the last
    # row is number count - 1
    count: Annotated[Rows, Whole(maximum="averages")]
    # clients that have not seen this restart apply the rows to θ_0; None where models never restart
    restart: Annotated[int | None, Between(maximum="restarts")] = None


@dataclass(frozen=True, eq=False)
class Update:
    """Client to server: a local update."""

    delta: Annotated[Rows, Real(("dimension",), squared=True)]  # (b, d) SGD_n(θ_i, D_i) − θ_i
    # (b,) |D_i|, only where the average is weighted
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)]


@dataclass(frozen=True, eq=False)
class ColumnSums:
    """Client to server, in a sum: what a scale of its features follows from."""

    column_sums: Annotated[Rows, Real(("column_sums",))]  # (b, sf)


@dataclass(frozen=True, eq=False)
class ColumnScale:
    """Server to client: the centre and the width of each feature on its public bounds."""

    # (f,)
    centres: Annotated[
        Shared, Real(("columns",), low=-1, maximum=1, average=True, made_of=("column_sums",))
    ]
    # (f,)
    widths: Annotated[
        Shared, Real(("columns",), low=0, maximum=1.5, average=True, made_of=("column_sums",))
    ]


def empty_tensor() -> torch.Tensor:
    """Return an empty placeholder tensor."""
    return torch.zeros(0)


@dataclass
class ModelDelta:
    """Model as a displacement from θ_0, which the server may hold."""

    # θ − θ_0, (d,), masked where updates are; empty where no client posted it
    displacement: torch.Tensor = field(default_factory=empty_tensor)
    step: int = 0  # the call whose mask it carries


@dataclass(frozen=True, eq=False)
class ModelChoice:
    """Client to server: the model with the lowest training loss."""

    # (b,) int64, by the noisy loss in a run with noise
    model: Annotated[Rows, Whole(below="models")]
