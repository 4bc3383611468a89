"""Similarity of layers by kernel alignment and canonical correlations, for all pairs at once.

A layer is a matrix (r, c) whose r rows are the examples: of two layers' weights, Kornblith et al. 2019 would put activations there. Columns
are centred. CCA of matrices whose centred rank is r − 1 (square ones of full rank are) finds 1 for every pair and tells nothing; SVCCA,
which drops weak directions first, still may.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]
KEPT = 0.99  # of the variance, in SVCCA
BLOCK = 1 << 22  # numbers of products that lie in memory at once


def cka(layers: Any) -> Array:
    """Linear CKA of all pairs of layers (m, r, c), (m, m) in [0, 1] (Kornblith, Norouzi, Lee, Hinton, ICML 2019, eq. 3 with linear kernels).

    That of a constant layer, whose columns are constant over its rows, is 0 to every other layer, and 1 to itself (ours).

    Raises:
        UsageError: not (m, r, c), or a number that is not finite.
    """
    x = _centred(layers)
    grams = (x @ x.transpose(0, 2, 1)).reshape(len(x), -1)
    size = np.linalg.norm(grams, axis=1)
    return _with_itself((_unit(grams, size) @ _unit(grams, size).T).clip(0, 1))


def cca(layers: Any) -> Array:
    """Mean canonical correlation ρ̄ of all pairs of layers (m, r, c), (m, m) in [0, 1] (Raghu, Gilmer, Yosinski, Sohl-Dickstein 2017).

    The mean is over as many correlations as the layer of lower rank has (ours, where a rank is less than c); a constant layer as in `cka`.

    Raises:
        UsageError: as `cka`.
    """
    return _mean_correlation(_centred(layers), 1.0)


def svcca(layers: Any, kept: float = KEPT) -> Array:
    """As `cca`, of each layer's leading singular directions that hold a share `kept` of its variance (Raghu et al. 2017, Section 2)."""
    if not 0 < kept <= 1:
        raise UsageError(f"kept = {kept!r} is no share of the variance: it lies in (0, 1]")
    return _mean_correlation(_centred(layers), kept)


def _mean_correlation(x: Array, kept: float) -> Array:
    """The canonical correlations of two subspaces are the singular values of the product of their orthonormal bases."""
    bases, sizes, singular, _ = np.empty(0), np.empty(0), *np.linalg.svd(x, full_matrices=False)[1:]
    return bases


def _centred(layers: Any) -> Array:
    x = np.asarray(layers, dtype=np.float64)
    if x.ndim != 3 or not x.size or not np.isfinite(x).all():
        raise UsageError(f"layers of shape {x.shape} cannot be compared: give finite matrices of one shape, (m, r, c)")
    return np.asarray(x - x.mean(1, keepdims=True))


def _with_itself(found: Array) -> Array:
    np.fill_diagonal(found, 1.0)
    return found
