"""Clusters of users by the predicted similarity of their models (Pacheco et al. 2021)."""

from securecluster.protocols.nsim.protocol import NSIM

__all__ = ["NSIM"]
