"""One-shot data similarity for multi-task hierarchical FL (Ali and Arafa 2024)."""

from securecluster.protocols.oneshot.protocol import OneShot

__all__ = ["OneShot"]
