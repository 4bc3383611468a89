"""Numbers of a node for Prometheus, on loopback: those of `status`, and no others."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from securecluster.core.optional_packages import need
from securecluster.errors import UsageError
from securecluster.nodes.status import NodeStatus

LOOPBACK = "127.0.0.1"


class _Numbers:
    """Collector of prometheus_client, which reads the folder of a node when it is asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._core = need("prometheus_client.core")

    def collect(self) -> Iterator[Any]:
        """Yield each number with what it is of."""
        status = NodeStatus.of(self._folder)
        yield self._family("Counter", "messages", "messages answered", status.messages)
        octets = {("received",): status.received, ("sent",): status.sent}
        yield self._family("Counter", "bytes", "of messages and of answers", octets)
        rounds = {(run,): number for run, number in status.rounds.items()}
        yield self._family("Gauge", "round", "latest round of a run", rounds)
        so_far = {
            (one.unit,): math.inf if one.spent is None else one.spent for one in status.epsilon
        }
        yield self._family("Gauge", "epsilon_spent", "of all runs", so_far)
        left = {(one.unit,): one.left for one in status.epsilon if one.left is not None}
        yield self._family("Gauge", "epsilon_left", "of what the owner allows", left)

    def _family(self, kind: str, name: str, about: str, values: dict[Any, Any]) -> Any:
        """Return the numbers of one name, by the values of its labels."""
        family = getattr(self._core, f"{kind}MetricFamily")(
            f"securecluster_{name}", about, labels=LABELS[name]
        )
        for labels, value in values.items():
            family.add_metric(labels, value)
        return family


LABELS = {
    "messages": ("kind", "outcome"),
    "bytes": ("direction",),
    "round": ("run",),
    "epsilon_spent": ("unit",),
    "epsilon_left": ("unit",),
}


def serve(folder: Path, port: int) -> Any:
    """Serve a node's numbers at http://127.0.0.1:PORT/metrics, which this machine alone reaches.

    Args:
        folder: of the node.
        port: a free one; 0 is any.

    Returns:
        The server, which `shutdown` ends.

    Raises:
        UsageError: prometheus_client is not installed, or the port is taken.
    """
    client = need("prometheus_client")
    registry = client.CollectorRegistry()
    registry.register(_Numbers(folder))
    try:
        server, _ = client.start_http_server(port, LOOPBACK, registry)
    except (OSError, OverflowError) as error:
        raise UsageError(f"port {port} cannot be listened on ({error}): give a free one") from None
    return server
