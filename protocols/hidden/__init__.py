"""Clusters by noisy sums, to which clients assign themselves."""

from securecluster.protocols.hidden.protocol import Hidden

__all__ = ["Hidden"]
