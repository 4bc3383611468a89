"""Leading eigenvectors of clients' Gram matrices, and relevance (Ali & Arafa 2024, II-B).

The Gram matrix of features Φ (n, D) is G = ΦᵀΦ/n (eq. 1). With p ≪ D it is never decomposed whole:
scipy's ARPACK needs products with it alone, and where there are fewer samples than features these
go through Φ or the smaller ΦΦᵀ/n, so that no (D, D) is made.

Under noise eigenvectors are compared by the energy of their span: in the paper's ratios a small
turn of the first vector changes ‖G v_k‖ of all later ones by the first eigenvalue.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.similarity import BLOCK
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness

Operator = Callable[["torch.Tensor"], "torch.Tensor"]
Pairs = tuple["torch.Tensor", "torch.Tensor"]  # eigenvalues and eigenvectors
# up to so many rows a Gram matrix is cheaper to form than to multiply with through the features
SMALL = 1024
# a matrix of fewer than so many times the required eigenvectors is decomposed whole
WHOLE = 80


def top(features: torch.Tensor, p: int) -> Pairs:
    """Return the p largest eigenvalues of ΦᵀΦ/n and their eigenvectors.

    Each vector has unit length, and its entry of largest magnitude is positive (not in the paper).
    Holds Φ in float64 once, and nothing of size (D, D) where n < D or D > SMALL unless p is within
    a factor WHOLE of both, or ARPACK does not converge.

    Args:
        features: Φ (n, D), finite.
        p: number of eigenvectors.

    Returns:
        Eigenvalues (p,), descending, and eigenvectors as rows (p, D), float64, on the features'
        device. Both are zero beyond the rank, so that shapes agree between clients (not in the
        paper).
    """
    wide = features.double()
    n, d = wide.shape
    k = min(p, n, d)
    values = torch.zeros(p, dtype=wide.dtype, device=wide.device)
    vectors = torch.zeros(p, d, dtype=wide.dtype, device=wide.device)
    if not k or not bool(wide.any()):
        return values, vectors
    values[:k], vectors[:k] = _leading(wide, k)
    # Eigenvalues below this are rounding, and their eigenvectors arbitrary.
    precision = torch.finfo(wide.dtype).eps
    rounding = max(n, d) * precision * values[0]
    within_rank = values > rounding
    values = torch.where(within_rank, values, 0.0)
    vectors = torch.where(within_rank[:, None], _signed(vectors), 0.0)
    return values, vectors


def leading(matrix: torch.Tensor, p: int) -> Pairs:
    """Return the algebraically largest eigenvalues of a symmetric matrix and their eigenvectors.

    Args:
        matrix: (D, D) float64; eigenvalues may be negative.
        p: number of eigenvectors, at most D.

    Returns:
        Eigenvalues (p,), descending, and eigenvectors as rows (p, D) with the signs of `top`.
    """
    pairs = None
    if p * WHOLE <= len(matrix):
        pairs = arpack(lambda x: matrix @ x, len(matrix), p, matrix, "LA")
    if pairs is None:
        pairs = _decomposed(matrix, p)
    values, columns = pairs
    return values, _signed(columns.T)


def arpack(
    product: Operator, side: int, k: int, prototype: torch.Tensor, which: str = "LM"
) -> Pairs | None:
    """Return the largest eigenvalues of a symmetric operator by scipy's `eigsh`, on the CPU.

    Args:
        product: the operator, (side,) -> (side,).
        side: its size.
        k: number of eigenvalues.
        prototype: a tensor of the type and device of the results.
        which: "LM", largest in magnitude, for positive semidefinite operators; or "LA",
            algebraically.

    Returns:
        Eigenvalues (k,), descending, and eigenvectors as columns (side, k); or None if it does not
        converge.
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    def multiply(vector: NDArray[np.float64]) -> NDArray[np.float64]:
        # ARPACK passes views of its work space, which torch must not share.
        copied = torch.from_numpy(vector.ravel().copy())
        image = product(copied.to(prototype))
        result: NDArray[np.float64] = image.cpu().numpy()
        return result

    # A fixed start, since scipy's default differs from run to run.
    generator = Randomness(0).generator("spectra", side)
    start = generator.standard_normal(side)
    operator = LinearOperator((side, side), matvec=multiply, dtype=np.float64)
    try:
        values, columns = eigsh(operator, k=k, which=which, v0=start)
    except ArpackError:
        return None
    order = np.argsort(-values, kind="stable")
    descending_values = torch.from_numpy(values[order])
    descending_columns = torch.from_numpy(columns[:, order].copy())
    return descending_values.to(prototype), descending_columns.to(prototype)


def projected(features: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return λ̂ = ‖G v‖ (Ali & Arafa 2024, eq. 2), not vᵀGv.

    Computed by G or through Φ, whichever takes fewer operations, in blocks of about `BLOCK` numbers
    beside G.

    Args:
        features: Φ (n, D) of the client.
        vectors: eigenvectors of other clients, (r, D).

    Returns:
        (r,) float64, on the features' device.
    """
    n, d = features.shape
    r = len(vectors)
    norms = torch.zeros(r, dtype=torch.float64, device=features.device)
    gram = None
    # n·D² operations make G, and r·D² apply it, against 2·r·n·D through Φ.
    by_gram_is_cheaper = r * (2 * n - d) > n * d
    if by_gram_is_cheaper:
        gram = _gram(features)
    step = max(1, BLOCK // max(d, 1))
    for start in range(0, r, step):
        block = vectors[start : start + step]
        block = block.to(features.device).double()
        image = _image(features, block, gram)
        norms[start : start + step] = image.norm(dim=1)
    return norms


def relevance(
    values: torch.Tensor,
    projected: torch.Tensor,
    floor: float = 0.0,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return r(i, j) = Π_k (min(λ_k, λ̂_k) / max(λ_k, λ̂_k))^(1/p) (Ali & Arafa 2024, eq. 3, 4).

    Eq. 4 takes the root over all D. Here it is over the eigenvalues that count: those of the client
    above floor · λ_1 and above 0, with a shared vector (not in the paper). A small λ̂ is evidence
    and counts; λ̂ = 0 gives 0.

    Args:
        values: the client's own eigenvalues λ, (p,), descending.
        projected: λ̂ of j other clients' vectors, (j, p).
        floor: share of λ_1, in [0, 1).
        shared: mask (j, p) of existing vectors; those beyond another client's rank do not count.
            None: all exist.

    Returns:
        (j,) float64 in [0, 1]; 0 where no eigenvalue counts.
    """
    own_values = values.double()
    estimates = projected.double()
    counts = _counted(own_values, estimates, floor, shared)
    safe = torch.where(counts, own_values, torch.ones_like(own_values))
    # In logs, since products of many ratios underflow. log 0 is −inf, whose ratio is 0.
    differences = estimates.log() - safe.log()
    logs = torch.where(counts, differences, torch.zeros_like(estimates)).abs()
    number = counts.sum(1)
    # Without a number the sum is 0; only the division must be safe.
    exponents = -logs.sum(1) / number.clamp_min(1)
    means = torch.exp(exponents)
    return torch.where(number > 0, means, torch.zeros_like(means))


def span_relevance(
    values: torch.Tensor,
    projected: torch.Tensor,
    floor: float = 0.0,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the relevance of whole spans, min(E, Ê) / max(E, Ê) (not in the paper).

    E² = Σ_k λ_k² and Ê² = Σ_k λ̂_k². For one vector it is `relevance`. With more, `relevance`
    compares each vector on its own, and an error of angle θ in one mixes λ_1 into its λ̂_k: the
    ratio is wrong by about (θ λ_1 / λ_k)² / 2, which is large for every k but the first. Noise
    turns the vectors, so clients of one distribution may look farther apart the more vectors there
    are. Ê² = tr(V G² Vᵀ) is the same for all bases V of a span and at most E² for the exact
    eigenvalues (Ky Fan 1949), so it falls with the square of the angle between spans, and isotropic
    noise adds equally to all λ̂_k².

    Args:
        values: the client's own eigenvalues λ, (p,), descending.
        projected: λ̂ of j other clients' vectors, (j, p).
        floor: share of λ_1, in [0, 1), below which an eigenvalue does not count.
        shared: mask (j, p) of existing vectors; None: all exist.

    Returns:
        (j,) float64 in [0, 1]; 0 where no eigenvalue counts.
    """
    own_values = values.double()
    estimates = projected.double()
    counts = _counted(own_values, estimates, floor, shared)
    # Relative to the largest eigenvalue, so that no square underflows.
    unit = torch.where(counts, own_values, 0.0).amax(1, keepdim=True)
    energy = torch.where(counts, own_values / unit, 0.0).norm(dim=1)
    estimate = torch.where(counts, estimates / unit, 0.0).norm(dim=1)
    smaller = torch.minimum(energy, estimate)
    ratio = smaller / torch.maximum(energy, estimate)
    return torch.where(counts.any(1), ratio, 0.0)


def _leading(wide: torch.Tensor, k: int) -> Pairs:
    """Return the k largest eigenvalues of G and eigenvectors (k, D) by the cheapest method.

    Args:
        wide: Φ (n, D), float64.
        k: number of eigenvectors, at most min(n, D).
    """
    n, d = wide.shape
    side = min(n, d)
    iterate = k * WHOLE <= side
    if iterate and side > SMALL:
        pairs = arpack(lambda x: wide.T @ (wide @ x) / n, d, k, wide)
        if pairs is not None:
            values, columns = pairs
            return values, columns.T
    small = _smaller_gram(wide)
    pairs = None
    if iterate:
        pairs = arpack(lambda x: small @ x, side, k, small)
    if pairs is None:
        pairs = _decomposed(small, k)
    values, columns = pairs
    if n < d:
        return values, _lifted(wide, columns.T)
    return values, columns.T


def _smaller_gram(wide: torch.Tensor) -> torch.Tensor:
    """Return ΦΦᵀ/n or ΦᵀΦ/n, whichever is smaller; their positive eigenvalues are the same."""
    n, d = wide.shape
    if n < d:
        return wide @ wide.T / n
    return wide.T @ wide / n


def _decomposed(matrix: torch.Tensor, k: int) -> Pairs:
    """Return the k largest eigenvalues, descending, and columns of a whole decomposition."""
    ascending, columns = torch.linalg.eigh(matrix)
    largest = ascending[-k:]
    largest_columns = columns[:, -k:]
    return largest.flip(0), largest_columns.flip(1)


def _lifted(wide: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """Return eigenvectors (k, D) of ΦᵀΦ from those of ΦΦᵀ, (k, n)."""
    rows = vectors @ wide
    # Zero rows, beyond the rank, stay zero.
    tiny = torch.finfo(rows.dtype).tiny
    norms = rows.norm(dim=1, keepdim=True).clamp_min(tiny)
    return rows.div_(norms)


def _signed(vectors: torch.Tensor) -> torch.Tensor:
    """Return vectors (k, D) with the sign that makes the entry of largest magnitude positive."""
    positions = vectors.abs().argmax(1, keepdim=True)
    largest = vectors.gather(1, positions)
    return torch.where(largest < 0, -vectors, vectors)


def _gram(features: torch.Tensor) -> torch.Tensor:
    """Return G = ΦᵀΦ/n (D, D), float64, by blocks of rows."""
    n, d = features.shape
    gram = torch.zeros(d, d, dtype=torch.float64, device=features.device)
    block_rows = max(1, BLOCK // d)
    for rows in torch.split(features, block_rows):
        wide = rows.double()
        gram += wide.T @ wide / n
    return gram


def _image(
    features: torch.Tensor, vectors: torch.Tensor, gram: torch.Tensor | None
) -> torch.Tensor:
    """Return v G of each vector v.

    Args:
        features: Φ (n, D).
        vectors: (r, D) float64.
        gram: G (D, D); None to multiply through Φ by blocks of its rows.

    Returns:
        (r, D) float64.
    """
    if gram is not None:
        return vectors @ gram
    n, d = features.shape
    image = torch.zeros_like(vectors)
    block_rows = max(1, BLOCK // max(d, len(vectors)))
    for rows in torch.split(features, block_rows):
        wide = rows.double()
        image += (vectors @ wide.T) @ wide / n
    return image


def _counted(
    values: torch.Tensor, projected: torch.Tensor, floor: float, shared: torch.Tensor | None
) -> torch.Tensor:
    """Return the mask (j, p) of pairs of eigenvalue and vector that count.

    Args:
        values: the client's own eigenvalues, (p,).
        projected: (j, p), for the shape.
        floor: share of the largest eigenvalue that an eigenvalue must exceed.
        shared: mask (j, p) of existing vectors; None: all exist.
    """
    counts = values > 0
    if len(values):
        counts = counts & (values > floor * values.max())
    counts = counts.expand(projected.shape)
    if shared is None:
        return counts
    return counts & shared.to(counts.device)
