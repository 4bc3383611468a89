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
    """cluster by sketches of so many numbers (64 to 256, say), which bear more noise; whole
    updates leave in sums only
    """
    compress: str = "none"
    """cluster by compressed updates: none, 8bit, 4bit, 1bit or topk:SHARE (the largest
    numbers); whole updates leave in sums only
    """
    clusterer: str = "paper"
    """how clusters are found: paper, or average, spectral or kmeans, which bear more noise"""

    @property
    def compresses(self) -> bool:
        """Return whether clients send compressed updates for clustering."""
        return uses_compression(vars(self))

    @property
    def smallest_cluster(self) -> int:
        """Return the fewest clients of a cluster: one alone cannot contribute to a sum."""
        return MINIMUM if self.compresses else 1

    def check(self, clients: int) -> None:
        """Check these options, too."""
        super().check(clients)
        check_compression(self)

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the pipeline with that of compressed updates."""
        return with_compression(super().pipeline(config), self.stages(config), config)

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Add the multipliers of compressed updates, made of the same updates, and of losses."""
        found, z = super().multipliers(config), float(config["noise"])
        return (
            found
            | ({"compressed": found["delta"]} if "delta" in found else {})
            | ({"loss": z} if z else {})
        )

    def replacement_factors(self) -> dict[str, float]:
        """A row of losses moves as far (`noisy_losses`)."""
        return {"loss": 1.0}
