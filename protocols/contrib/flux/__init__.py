"""FLUX: clusters by descriptors of clients' distributions (Fenoglio et al. 2025)."""

from securecluster.protocols.contrib.flux.protocol import FLUX

__all__ = ["FLUX"]
