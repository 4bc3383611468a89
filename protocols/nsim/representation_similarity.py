"""Similarity of layers by kernel alignment and canonical correlations, for all pairs at once.

A layer is a matrix (r, c) whose r rows are the examples: of two layers' weights, Kornblith et al.
2019 would put activations there. Columns are centred. CCA of matrices whose centred rank is r − 1
(square ones of full rank are) finds 1 for every pair and tells nothing; SVCCA, which drops weak
directions first, still may.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]
KEPT = 0.99  # of the variance, in SVCCA
NOTHING = 1e-12  # of a matrix's norm: what rounding leaves of a constant one


def cka(layers: Any) -> Array:
    """Linear CKA of all pairs of layers (m, r, c), (m, m) in [0, 1] (Kornblith, Norouzi, Lee,
    Hinton, ICML 2019, Section 3).

    A constant layer, whose rows are all the same, has 0 with every other layer, and 1 with itself
    (ours).

    Raises:
        UsageError: not (m, r, c), or a number that is not finite.
    """
    x = _centred(layers)
    grams = (x @ x.transpose(0, 2, 1)).reshape(len(x), -1)
    size = np.linalg.norm(grams, axis=1, keepdims=True)
    unit = np.divide(grams, size, out=np.zeros_like(grams), where=size > 0)
    return _with_itself(unit @ unit.T)


def cca(layers: Any) -> Array:
    """Mean canonical correlation of all pairs of layers (m, r, c), (m, m) in [0, 1] (ρ̄_CCA of
    Kornblith et al. 2019).

    The mean is over as many correlations as the layer of lower rank has (ours, where a rank is
    below c); a constant layer as in `cka`.

    Raises:
        UsageError: as `cka`.
    """
    return _mean_correlation(_centred(layers), 1.0)


def svcca(layers: Any, kept: float = KEPT) -> Array:
    """As `cca`, of the leading singular directions that hold a share `kept` of a layer's variance
    (Raghu, Gilmer, Yosinski, Sohl-Dickstein, NeurIPS 2017, Section 2).

    Raises:
        UsageError: as `cka`, or no share.
    """
    if not 0 < kept <= 1:
        raise UsageError(f"kept = {kept!r} is no share of the variance: it lies in (0, 1]")
    return _mean_correlation(_centred(layers), kept)


def _mean_correlation(x: Array, kept: float) -> Array:
    """Canonical correlations of two subspaces are the singular values of the product of their
    orthonormal bases.
    """
    bases, values, _ = np.linalg.svd(x, full_matrices=False)  # (m, r, q), (m, q)
    there = values > NOTHING * values[:, :1]
    if kept < 1:
        share = np.cumsum(values**2, axis=1) / np.maximum(
            (values**2).sum(1, keepdims=True), np.finfo(float).tiny
        )
        # until the share is reached
        there &= np.concatenate([np.zeros((len(x), 1)), share[:, :-1]], axis=1) < kept
    bases, ranks = bases * there[:, None], there.sum(1)
    found = np.zeros((len(x), len(x)))
    for i, own in enumerate(bases):  # one layer with those after it: memory stays at (m, q, q)
        total = np.linalg.svd(own.T @ bases[i:], compute_uv=False).sum(1)
        found[i, i:] = found[i:, i] = total / np.maximum(np.minimum(ranks[i], ranks[i:]), 1)
    return _with_itself(found)


def _centred(layers: Any) -> Array:
    x = np.asarray(layers, dtype=np.float64)
    if x.ndim != 3 or not x.size or not np.isfinite(x).all():
        raise UsageError(
            f"layers of shape {x.shape} cannot be compared: give finite matrices of one shape, (m, "
            "r, c)"
        )
    apart = x - x.mean(1, keepdims=True)
    size, left = (np.linalg.norm(own, axis=(1, 2), keepdims=True) for own in (x, apart))
    return np.where(left > NOTHING * size, apart, 0.0)


def _with_itself(found: Array) -> Array:
    found = found.clip(0, 1)
    np.fill_diagonal(found, 1.0)
    return found
