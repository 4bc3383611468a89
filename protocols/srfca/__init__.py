"""Successive Refine Federated Clustering (Vardhan et al. 2024)."""

from securecluster.protocols.srfca.protocol import SRFCA

__all__ = ["SRFCA"]
