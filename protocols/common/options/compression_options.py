"""Options of the methods that cluster by updates, whole or compressed (CFL, FL+HC)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from securecluster.clustering.noise_robust import CLUSTERERS
from securecluster.core.validation import IN_PYTHON, OneOf
from securecluster.errors import UsageError
from securecluster.privacy.compression import codecs
from securecluster.privacy.compression.sketches import check_size
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.comparison.compressed_updates import (
    uses_compression,
    with_compression,
)
from securecluster.protocols.common.options.option_group import OptionGroup

if TYPE_CHECKING:
    from securecluster.parties.method import Method


@dataclass(kw_only=True)
class CompressionOptions(OptionGroup):
    """Options of sketches, compression and clusterers."""

    sketch: int | None = None
    """cluster by sketches of this many numbers (64 to 256, for instance), which tolerate more
    noise; full updates leave in sums only
    """
    compress: Annotated[str, IN_PYTHON] = "none"
    """cluster by compressed updates: none, 8bit, 4bit, 1bit or topk:SHARE (the largest
    numbers); full updates leave in sums only
    """
    clusterer: Annotated[str, OneOf(*CLUSTERERS)] = "paper"
    """how clusters are found: paper, or average, spectral or kmeans, which tolerate more noise"""

    @property
    def used(self) -> bool:
        """Return whether clients send compressed updates for clustering."""
        return uses_compression(vars(self))

    def check(self, method: Method, clients: int) -> None:
        """Check these options.

        Args:
            method: whose options they are.
            clients: m.

        Raises:
            UsageError: options that are unknown, or that do not work together.
        """
        if self.sketch is not None:
            check_size(self.sketch)
        codecs.check(self.compress, method.mask, self.sketch)
        if self.used:
            self._check_compared(method)
        if getattr(method, "metric", "l2") == "l1" and self.sketch is not None:
            raise UsageError(
                "a sketch keeps inner products, hence l2 and cosine, and not l1: use one of these "
                "metrics, or no sketch"
            )

    def _check_compared(self, method: Method) -> None:
        """Raise UsageError for a method that compares something else than updates."""
        if getattr(method, "similarity", "update") == "gradient":
            raise UsageError(
                "sketches and compression are of updates, and similarity='gradient' compares full "
                "gradients: choose one of them"
            )
        signatures = getattr(method, "signatures", None)
        if signatures is not None and signatures.by_gradients:
            raise UsageError(
                "sketches and compression are of updates, and gradient signatures are compared: "
                "leave sketch and compress out, or take signature update"
            )

    def pipeline(self, method: Method, config: Mapping[str, Any], pipeline: Pipeline) -> Pipeline:
        """Return the pipeline with that of compressed updates.

        Args:
            method: whose options they are.
            config: what clients and server agreed on.
            pipeline: the stages of clients' replies.
        """
        return with_compression(pipeline, method.privacy.stages(config), config)
