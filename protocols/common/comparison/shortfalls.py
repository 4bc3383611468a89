"""How far merges that ended in one cluster, or joined no clients, are from several, in words."""

from __future__ import annotations

from securecluster.clustering import agglomerative
from securecluster.clustering.agglomerative import Array


def of_cut(tree: Array, cut: float, option: str) -> str:
    """Return what a given height cut.

    Args:
        tree: scipy's linkage matrix, (m − 1, 4).
        cut: the height.
        option: that gave it.
    """
    high = agglomerative.heights(tree)
    return (
        f"merges are at distances of {high[0]:.3g} to {high[-1]:.3g}, and those up to {cut:.3g} "
        f"({option}) were made"
    )


def of_gap(tree: Array, gap: float) -> str:
    """Return the largest ratio of heights beside the one that clusters need.

    Args:
        tree: scipy's linkage matrix, (m − 1, 4).
        gap: the smallest ratio that is a gap between clusters.
    """
    largest = agglomerative.ratios(tree).max(initial=0.0)
    return (
        f"distances rise from merge to merge by a factor of at most {largest:.3g}, and clusters "
        f"need {gap:.3g}, or fewer where they are significant"
    )


def of_angles(tree: Array) -> str:
    """Return the largest gap of angles beside the one that clusters need.

    Args:
        tree: merges of 1 − R by average linkage, (m − 1, 4).
    """
    largest = 0.0
    if len(tree) >= agglomerative.LEAST_MERGES:
        largest = agglomerative.angle_gaps(tree)[1].max(initial=0.0)
    return (
        f"angles of dissimilarity rise from merge to merge by at most {largest:.3g}, and clusters "
        f"need {agglomerative.ANGLE:g}"
    )
