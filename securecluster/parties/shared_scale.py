"""The scale of features that the clients of a run share: one sum at its begin, told to all of them.

The sum goes through the run's own protections as updates do, and is priced by a receipt like every
release. Where whole clients are protected, a client contributes means over its samples, else a
sample contributes its own numbers; both are bounded by the public bounds of the features. The sum
is formed under every method before its first round; who misses the result is told before the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.data.scaling import Scaling
from securecluster.messaging.messages import Empty, Shared
from securecluster.messaging.replies import Sums
from securecluster.parties.derived import SCALE_NOISE
from securecluster.privacy.dp.gaussian_mechanism import Clip, RowNoise
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import message_types
from securecluster.runtime.port import TRIES
from securecluster.training.shared_scale import STATISTICS, row_norm, scale_of

if TYPE_CHECKING:
    from securecluster.parties.method import Method
    from securecluster.runtime.server_channel import ServerChannel

FIELD = "column_sums"  # of clients' replies
# standard deviations of noise that the range of a hidden sum has room for, and room for rounding
DEVIATIONS = 8.0
ROUNDING = 1.01
LOCAL = "local"


@dataclass(frozen=True)
class SharedScale:
    """What all parties derive of a scale that clients share; nothing in runs without one.

    Args:
        method: of the run.
        config: what clients and server agreed on.
    """

    method: Method
    config: Mapping[str, Any]

    @property
    def columns(self) -> int:
        """Return the number of features that the run scales, f; 0 where it finds no scale."""
        scaling = Scaling.read(self.config.get("scaling"))
        return len(scaling.numbers) if scaling is not None and scaling.shared else 0

    @property
    def multiplier(self) -> float:
        """Return the noise multiplier of the sum."""
        return float(self.config["noise"]) * float(self.config[SCALE_NOISE])

    @property
    def sizes(self) -> dict[str, int]:
        """Return the sizes that bound its messages, by name."""
        return {"columns": self.columns, FIELD: STATISTICS * self.columns}

    @property
    def row_noises(self) -> dict[str, RowNoise]:
        """Return the noise of clients' rows by field; empty where they are not clipped."""
        if not (self.columns and self.method.privacy.per_client and self.config["noise"]):
            return {}
        return {FIELD: RowNoise(1.0, self.multiplier)}

    @property
    def largest(self) -> dict[str, float]:
        """Return the largest number of a client in a hidden sum, by field."""
        if not self.columns:
            return {}
        bound = ROUNDING * float(self.config.get("most_samples", 1))
        if self.config["placement"] == LOCAL and self.config["noise"]:
            bound += DEVIATIONS * self.multiplier
        return {FIELD: bound}

    def pipeline(self) -> Pipeline:
        """Return the stages of clients' replies, with those of the sum, which no mask covers."""
        privacy = self.method.privacy
        pipeline = self.method.pipeline(self.config)
        if self.columns:
            stages: Sequence[Any] = ()
            if self.row_noises:
                stages = privacy.row_stages(self.row_noises[FIELD], self.config)
            elif privacy.per_client:
                stages = (Clip(1.0),)
            pipeline.fields[FIELD] = Pipeline(stages)
        return pipeline

    def found(self, sums: Sums[Any]) -> list[list[float]]:
        """Return means and deviations by sums over clients; those of the bounds where nobody sent.

        Args:
            sums: one row, or none.
        """
        members = len(sums.ids)
        if sums.rows is None or not members:
            return [[0.0] * self.columns, [1.0] * self.columns]
        row = getattr(sums.rows, FIELD).values.double().cpu().numpy()[0]
        by_client = self.method.privacy.per_client
        # without a bound on what a client contributes, rows are sums as they are
        norm = row_norm(self.columns) if by_client or self.multiplier else 1.0
        deviation = self.multiplier * norm
        if self.config["placement"] == LOCAL:  # each client adds all of it, and variances add up
            deviation *= math.sqrt(members)
        most = float(members) if by_client else math.inf
        scale = scale_of((norm * row).reshape(STATISTICS, self.columns), deviation, most)
        # as clients receive it
        found: list[list[float]] = torch.tensor(scale, dtype=self.dtype).tolist()
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of the run's numbers."""
        return torch.float64 if self.config["dtype"] == "float64" else torch.float32


def find_scale(method: Method, net: ServerChannel) -> None:
    """Find the scale of a run whose clients share one, unless it is known, and tell who lacks it.

    Args:
        method: of the run.
        net: the server's channel to the clients.
    """
    scale = SharedScale(method, net.agreed)
    if not scale.columns:
        return
    if not net.state.scale:
        for _ in range(TRIES):
            sums = net.sum(method.client.sum_columns, Empty(), to=net.clients)
            if sums.ids:
                break
        net.state.scale = scale.found(sums)
    tell_scale(method, net, net.clients)


def tell_scale(method: Method, net: ServerChannel, to: Sequence[int]) -> None:
    """Tell a run's scale to those clients that have not received it.

    Args:
        method: of the run.
        net: the server's channel to the clients.
        to: the clients.
    """
    if not net.state.scale:
        return
    lacking = sorted(set(to).difference(net.state.scaled))
    if not lacking:
        return
    dtype = SharedScale(method, net.agreed).dtype
    means, deviations = torch.tensor(net.state.scale, dtype=dtype)
    query, _ = message_types(method.client, "receive_scale")
    message = query(Shared(means), Shared(deviations))
    replies = net.gather(method.client.receive_scale, message, to=lacking, tries=TRIES)
    net.state.scaled = sorted({*net.state.scaled, *replies.ids})
