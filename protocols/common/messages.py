"""Messages that all protocols share: averages, updates, models and choices."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from securecluster.core.lazy_torch import torch
from securecluster.messaging.bounds import Between, Real, Upto, Whole
from securecluster.messaging.messages import Picks, Rows

NO_END = 1 << 62  # no post has this number
AVERAGES = Upto("posts", "averages")  # averages in one frame
MOST_SAMPLES = 2.0**53  # that a client can say it holds


@dataclass(frozen=True, eq=False)
class AverageDeltas:
    """Server to client: the averages it lacks, oldest first."""

    # (r, d) as they were summed, hence masked where updates are
    means: Annotated[Picks, Real((AVERAGES, "dimension"), sent="delta")]
    # (r,) int64, the call whose updates each one averages: it names the mask
    steps: Annotated[Picks, Whole((AVERAGES,), maximum="steps")]
    absolute: bool  # one row, the whole displacement since θ_0, instead of one per missed round
    # (b,) int64, the averages that a client has had in all, once it has these; the last row is
    # number count - 1
    count: Annotated[Rows, Whole(maximum="averages")]
    # the rows count from θ_0 for who has not heard of this restart; None where nobody ever restarts
    restart: Annotated[int | None, Between(maximum="restarts")] = None


@dataclass(frozen=True, eq=False)
class Update:
    """Client to server."""

    delta: Annotated[Rows, Real(("dimension",), squared=True)]  # (b, d) SGD_n(θ_i, D_i) − θ_i
    # (b,) |D_i|, only where the average is weighted
    size: Annotated[Rows | None, Real(low=0, maximum=MOST_SAMPLES)]


def empty_tensor() -> torch.Tensor:
    """No tensor yet."""
    return torch.zeros(0)


@dataclass
class ModelDelta:
    """A model as the server may hold it."""

    # θ − θ_0, (d,), masked where updates are; empty: not posted
    displacement: torch.Tensor = field(default_factory=empty_tensor)
    step: int = 0  # the call whose mask it carries


@dataclass(frozen=True, eq=False)
class ModelChoice:
    """Client to server."""

    # (b,) int64, the one with the lowest training loss, or noisy loss
    model: Annotated[Rows, Whole(below="models")]
