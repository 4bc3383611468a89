"""Clustered Federated Learning (Sattler et al. 2019)."""

from securecluster.protocols.cfl.protocol import CFL

__all__ = ["CFL"]
