"""Methods that tell clusters from updates, and may do so from updates in brief (CFL, FL+HC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.compressed_updates import briefed, check_briefs, with_briefs
from securecluster.runtime.endpoint import MINIMUM


@dataclass(kw_only=True)
class CompressionOptions(ClusteringProtocol):
    """The options of sketches, compression and clusterers."""

    sketch: int | None = None
    """tell clusters from sketches of so many numbers (64 to 256, say), updates leaving in sums
    alone; under noise they bear more of it
    """
    compress: str = "none"
    """tell clusters from compressed updates, these leaving in sums alone: none, 8bit, 4bit, 1bit or
    topk:SHARE, the largest numbers
    """
    clusterer: str = "paper"
    """what tells clusters: paper, or average, spectral or kmeans, which bear more noise"""

    @property
    def briefs(self) -> bool:
        """Whether clients tell their updates in brief."""
        return briefed(vars(self))

    @property
    def least(self) -> int:
        """Clients of a cluster, at least: one alone could not hand over its update in a sum."""
        return MINIMUM if self.briefs else 1

    def check(self, clients: int) -> None:
        """Adds these options."""
        super().check(clients)
        check_briefs(self)

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Adds what briefs go through."""
        return with_briefs(super().pipeline(config), self.stages(config), config)

    def multipliers(self, config: Mapping[str, Any]) -> dict[str, float]:
        """Adds briefs, and the losses that clients judge models by.

        Briefs are made of the same updates.
        """
        found, z = super().multipliers(config), float(config["noise"])
        return (
            found
            | ({"brief": found["delta"]} if "delta" in found else {})
            | ({"loss": z} if z else {})
        )

    def replacements(self) -> dict[str, float]:
        """A row of losses moves as far (`noisy_losses`)."""
        return {"loss": 1.0}
