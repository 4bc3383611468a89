"""Options of the methods that cluster by updates, whole or compressed (CFL, FL+HC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.compressed_updates import (
    check_compression,
    uses_compression,
    with_compression,
)
from securecluster.runtime.endpoint import MINIMUM


@dataclass(kw_only=True)
class CompressionOptions(ClusteringProtocol):
    """Options of sketches, compression and clusterers."""

    sketch: int | None = None
    """cluster by sketches of this many numbers (64 to 256, for instance), which tolerate more
    noise; full updates leave in sums only
    """
    compress: str = "none"
    """cluster by compressed updates: none, 8bit, 4bit, 1bit or topk:SHARE (the largest
    numbers); full updates leave in sums only
    """
    clusterer: str = "paper"
    """how clusters are found: paper, or average, spectral or kmeans, which tolerate more noise"""

    @property
    def compresses(self) -> bool:
        """Return whether clients send compressed updates for clustering."""
        return uses_compression(vars(self))

    @property
    def smallest_cluster(self) -> int:
        """Return the smallest size of a cluster after a split.

        With compression full updates leave in sums, to which no client can contribute alone.
        """
        return MINIMUM if self.compresses else 1

    def check(self, clients: int) -> None:
        """Check these options, too."""
        super().check(clients)
        check_compression(self)

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the pipeline with that of compressed updates."""
        return with_compression(super().pipeline(config), self.stages(config), config)
