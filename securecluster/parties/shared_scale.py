"""The scale of features that the clients of a run share: one sum at its begin, told to all of them.

The sum goes through the run's own protections as updates do, and is priced by a receipt like every
release. Where whole clients are protected, a client contributes means over its samples, else a
sample contributes its own numbers; both are bounded by the public bounds of the features. The sum
is formed under every method before its first round; who misses the result is told before the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from securecluster.core.lazy_torch import torch
from securecluster.data.scaling import Scaling
from securecluster.data.shared_scale import STATISTICS, row_norm, scale_of
from securecluster.messaging.messages import Empty, Shared
from securecluster.messaging.replies import Sums
from securecluster.parties.derived import SCALE_NOISE
from securecluster.privacy.dp.gaussian_mechanism import Clip, RowNoise
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import message_types
from securecluster.runtime.port import TRIES

if TYPE_CHECKING:
    from securecluster.parties.method import Method
    from securecluster.runtime.server_channel import ServerChannel

FIELD = "column_sums"  # of clients' replies
# standard deviations of noise that the range of a hidden sum has room for, and room for rounding
DEVIATIONS = 8.0
ROUNDING = 1.01
LOCAL = "local"


def columns_of(config: Mapping[str, Any]) -> int:
    """Return the number of features that a run scales, f; 0 where it finds no scale.

    Args:
        config: what clients and server agreed on.
    """
    scaling = Scaling.read(config.get("scaling"))
    return len(scaling.numbers) if scaling is not None and scaling.shared else 0


def sizes(config: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes that bound the messages of a shared scale, by name.

    Args:
        config: what clients and server agreed on.
    """
    columns = columns_of(config)
    return {"columns": columns, FIELD: STATISTICS * columns}


def row_noise(method: Method, config: Mapping[str, Any]) -> dict[str, RowNoise]:
    """Return the noise of the sum by its field; empty where rows are not clipped, or without noise.

    Args:
        method: of the run.
        config: what clients and server agreed on.
    """
    if not (columns_of(config) and method.privacy.per_client and config["noise"]):
        return {}
    return {FIELD: RowNoise(1.0, float(config["noise"]) * float(config[SCALE_NOISE]))}


def with_scale(method: Method, config: Mapping[str, Any]) -> Pipeline:
    """Return the stages of clients' replies, with those of the sum, which no mask covers.

    Args:
        method: of the run.
        config: what clients and server agreed on.
    """
    pipeline = method.pipeline(config)
    if columns_of(config):
        stages: Sequence[Any] = ()
        noises = row_noise(method, config)
        if noises:
            stages = method.privacy.row_stages(noises[FIELD], config)
        elif method.privacy.per_client:
            stages = (Clip(1.0),)
        pipeline.fields[FIELD] = Pipeline(stages)
    return pipeline


def largest(method: Method, config: Mapping[str, Any]) -> dict[str, float]:
    """Return the largest number of a client in a hidden sum, by the sum's field.

    Args:
        method: of the run.
        config: what clients and server agreed on.
    """
    if not columns_of(config):
        return {}
    bound = ROUNDING * float(config.get("most_samples", 1))
    if config["placement"] == LOCAL and config["noise"]:
        bound += DEVIATIONS * float(config["noise"]) * float(config[SCALE_NOISE])
    return {FIELD: bound}


def find_scale(method: Method, net: ServerChannel) -> None:
    """Find the scale of a run whose clients share one, unless it is known, and tell who lacks it.

    Args:
        method: of the run.
        net: the server's channel to the clients.
    """
    if not columns_of(net.agreed):
        return
    if not net.state.scale:
        sums = net.sum(method.client.sum_columns, Empty(), to=net.clients)
        net.state.scale = _found(method, net.agreed, sums)
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
    means, deviations = torch.tensor(net.state.scale, dtype=_dtype(net.agreed))
    query, _ = message_types(method.client, "receive_scale")
    message = query(Shared(means), Shared(deviations))
    replies = net.gather(method.client.receive_scale, message, to=lacking, tries=TRIES)
    net.state.scaled = sorted({*net.state.scaled, *replies.ids})


def _found(method: Method, config: Mapping[str, Any], sums: Sums[Any]) -> list[list[float]]:
    """Return means and deviations by sums over clients, or the public bounds' where there are none.

    Args:
        method: of the run.
        config: what clients and server agreed on.
        sums: one row, or none.
    """
    columns = columns_of(config)
    members = len(sums.ids)
    if sums.rows is None or not members:
        return [[0.0] * columns, [1.0] * columns]
    row = getattr(sums.rows, FIELD).values.double().cpu()[0]
    noise = float(config["noise"]) * float(config[SCALE_NOISE])
    norm = 1.0
    most = float(members) if method.privacy.per_client else math.inf
    if method.privacy.per_client or noise:
        norm = row_norm(columns)
    deviation = noise * norm
    if config["placement"] == LOCAL:  # each client adds all of it, and variances add up
        deviation *= math.sqrt(members)
    scale = scale_of((row * norm).numpy().reshape(STATISTICS, columns), deviation, most)
    # as clients receive it
    found: list[list[float]] = torch.tensor(scale, dtype=_dtype(config)).tolist()
    return found


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """Return the type of the run's numbers."""
    return torch.float64 if config["dtype"] == "float64" else torch.float32
