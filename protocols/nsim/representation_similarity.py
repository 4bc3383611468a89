"""Similarity of layers by kernel alignment and canonical correlations, for all pairs at once.

A layer is a matrix (r, c) whose r rows are the examples. Kornblith et al. 2019 compare activations;
here the matrices are two layers' weights. Columns are centred. CCA of matrices whose centred rank
is r − 1, such as square ones of full rank, is 1 for every pair and thus uninformative. SVCCA, which
drops weak directions first, may still be informative.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

Array = NDArray[np.float64]
KEPT = 0.99  # of the variance, in SVCCA
NOTHING = 1e-12  # of a matrix's norm: the size of rounding errors of a constant matrix


def cka(layers: Any) -> Array:
    """Return the linear CKA of all pairs of layers (Kornblith et al., ICML 2019, Section 3).

    A constant layer, whose rows are all the same, has 0 with every other layer and 1 with itself
    (not in the paper).

    Args:
        layers: (m, r, c).

    Returns:
        (m, m) in [0, 1], symmetric.

    Raises:
        UsageError: not (m, r, c), or a number that is not finite.
    """
    x = _centred(layers)
    grams = x @ x.transpose(0, 2, 1)
    flat = grams.reshape(len(x), -1)
    norms = np.linalg.norm(flat, axis=1, keepdims=True)
    unit = np.divide(flat, norms, out=np.zeros_like(flat), where=norms > 0)
    return _with_itself(unit @ unit.T)


def cca(layers: Any) -> Array:
    """Return the mean canonical correlation of all pairs of layers.

    It is ρ̄_CCA of Kornblith et al. 2019. The mean is over as many correlations as the layer of
    lower rank has (not in the paper, where a rank is below c). Constant layers are treated as in
    `cka`.

    Args:
        layers: (m, r, c).

    Returns:
        (m, m) in [0, 1], symmetric.

    Raises:
        UsageError: as `cka`.
    """
    return _mean_correlation(_centred(layers), 1.0)


def svcca(layers: Any, variance: float = KEPT) -> Array:
    """Return `cca` of the layers' leading singular directions.

    See Raghu, Gilmer, Yosinski, Sohl-Dickstein, NeurIPS 2017, Section 2.

    Args:
        layers: (m, r, c).
        variance: share of a layer's variance that the directions must explain, in (0, 1].

    Returns:
        (m, m) in [0, 1], symmetric.

    Raises:
        UsageError: as `cka`, or a share out of range.
    """
    if not 0 < variance <= 1:
        raise fl.UsageError(
            f"variance = {variance!r} is no share of the variance: it lies in (0, 1]"
        )
    return _mean_correlation(_centred(layers), variance)


def _mean_correlation(x: Array, variance: float) -> Array:
    """Return the mean canonical correlation of all pairs of centred layers.

    Args:
        x: (m, r, c), centred.
        variance: share of a layer's variance that its directions explain; 1 means all directions.

    Returns:
        (m, m)
    """
    bases, values, _ = np.linalg.svd(x, full_matrices=False)  # (m, r, q), (m, q)
    in_basis = values > NOTHING * values[:, :1]
    if variance < 1:
        square = values**2
        variances = np.maximum(square.sum(1, keepdims=True), np.finfo(float).tiny)
        explained = np.cumsum(square, axis=1) / variances
        # a direction is needed if those before it explain too little
        nothing = np.zeros((len(x), 1))
        before = np.concatenate([nothing, explained[:, :-1]], axis=1)
        in_basis &= before < variance
    bases = bases * in_basis[:, None]
    ranks = in_basis.sum(1)

    # Canonical correlations of two subspaces are the singular values of the product of their
    # orthonormal bases. One layer is compared with those after it, so memory stays at (m, q, q).
    result = np.zeros((len(x), len(x)))
    for i, basis in enumerate(bases):
        products = basis.T @ bases[i:]
        correlations = np.linalg.svd(products, compute_uv=False)
        lower_rank = np.minimum(ranks[i], ranks[i:])
        mean = correlations.sum(1) / np.maximum(lower_rank, 1)
        result[i, i:] = mean
        result[i:, i] = mean
    return _with_itself(result)


def _centred(layers: Any) -> Array:
    """Return layers with centred columns, and zeros for constant layers, (m, r, c).

    Raises:
        UsageError: not (m, r, c), or a number that is not finite.
    """
    x = np.asarray(layers, dtype=np.float64)
    if x.ndim != 3 or not x.size or not np.isfinite(x).all():
        raise fl.UsageError(
            f"layers of shape {x.shape} cannot be compared: give finite matrices of one shape, (m, "
            "r, c)"
        )
    centred = x - x.mean(1, keepdims=True)
    norm = np.linalg.norm(x, axis=(1, 2), keepdims=True)
    centred_norm = np.linalg.norm(centred, axis=(1, 2), keepdims=True)
    return np.where(centred_norm > NOTHING * norm, centred, 0.0)


def _with_itself(similarity: Array) -> Array:
    """Return similarities in [0, 1], with 1 on the diagonal, whatever rounding made of them."""
    similarity = similarity.clip(0, 1)
    np.fill_diagonal(similarity, 1.0)
    return similarity
