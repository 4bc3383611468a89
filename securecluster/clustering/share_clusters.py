"""Clusters of clients that have alike shares of classes, from shares with noise of a known size.

Shares that each client draws for itself (a Dirichlet distribution, say) differ without any
clusters, and no few clusters explain how: what clusters leave unexplained tells the two apart. None
of this is from a paper.
"""

from __future__ import annotations

import numpy as np

from securecluster.clustering.k_means import kmeans_of_points
from securecluster.clustering.labels import relabel
from securecluster.clustering.noisy_residuals import MOST_CLUSTERS, Labels, information_criterion
from securecluster.clustering.significance import Array

# share of what is beyond noise and sampling that clusters explain, at least: of clients with
# Dirichlet shares, clusters explain less unless most have one class; found by trial
EXPLAINED = 0.9
# clients of a cluster on average, at least
MEMBERS = 3
SEED = 0  # of the starts of k-means
TINY = 1e-12  # divides by nothing


def share_clusters(counts: Array, deviations: Array, examples: Array) -> list[int]:
    """Return labels (m,) of clusters of alike shares; one cluster where shares show none.

    Args:
        counts: (m, C) of each client's examples by class, over n, with noise.
        deviations: (m,) the standard deviation of the noise in each number; 0 without.
        examples: (m,) n, as far as it is public.
    """
    m, classes = counts.shape
    if m < 2 * MEMBERS:
        return [0] * m
    total = max(float(counts.sum(1).mean()), TINY)
    shares = counts / total
    crowd = shares.mean(0).clip(0, 1)
    sampling = float(np.mean(crowd * (1 - crowd))) / np.maximum(examples, 1.0)
    variances = np.maximum(np.square(deviations / total) + sampling, TINY)
    alone = np.zeros(m, dtype=np.int64)
    loss_alone = _loss(shares, variances, alone)
    best = information_criterion(loss_alone, alone, 1, classes)
    labels, left = alone, 1.0
    beyond = loss_alone - (m - 1) * classes
    for k in range(2, min(MOST_CLUSTERS, m // MEMBERS) + 1):
        candidate = np.asarray(kmeans_of_points(shares, k, SEED))
        loss = _loss(shares, variances, candidate)
        criterion = information_criterion(loss, candidate, k, classes)
        if criterion < best:
            best, labels = criterion, candidate
            within = loss * (m - 1) / (m - k) - (m - 1) * classes
            left = within / max(beyond, TINY)
    return relabel(labels.tolist()) if left <= 1 - EXPLAINED else [0] * m


def _loss(rows: Array, variances: Array, labels: Labels) -> float:
    """Return the sum of squares of rows from their clusters' means, over their variances."""
    members = np.eye(int(labels.max()) + 1)[labels] / variances[:, None]
    means = (members.T @ rows) / members.sum(0)[:, None]
    return float((np.square(rows - means[labels]).sum(1) / variances).sum())
