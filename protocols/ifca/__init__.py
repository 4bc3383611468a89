"""Iterative Federated Clustering (Ghosh et al. 2020)."""

from securecluster.protocols.ifca.protocol import IFCA

__all__ = ["IFCA"]
