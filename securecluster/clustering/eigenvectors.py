"""Leading eigenvectors of a client's Gram matrix, and how relevant another client's are to it (Ali
& Arafa 2024, II-B).

The Gram matrix of features Φ (n, D) is G = ΦᵀΦ/n (eq. 1). With p ≪ D it is never decomposed whole:
scipy's ARPACK needs products with it alone, and where there are fewer samples than features these
go through Φ or the smaller ΦΦᵀ/n, so that no (D, D) is made.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.similarity import BLOCK
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness

Operator = Callable[["torch.Tensor"], "torch.Tensor"]
# up to so many rows a Gram matrix is cheaper to form than to multiply with through the features
SMALL = 1024
WHOLE = 80  # a matrix of fewer than so many times the wanted eigenvectors is decomposed whole


def top(features: torch.Tensor, p: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The p largest eigenvalues (p,) of ΦᵀΦ/n and their eigenvectors as rows (p, D), float64, on
    the features' device.

    Eigenvalues descend; each vector has unit length and its entry of largest magnitude is positive
    (ours). Beyond the rank both are zero, so that shapes agree between clients (ours). Holds Φ in
    float64 once, and nothing of size (D, D) where n < D or D > SMALL unless p is within a factor
    WHOLE of both, or ARPACK does not converge.

    Args:
        features: Φ (n, D), finite.
    """
    wide = features.double()
    n, d = wide.shape
    k = min(p, n, d)
    values, vectors = (
        torch.zeros(p, dtype=wide.dtype, device=wide.device),
        torch.zeros(p, d, dtype=wide.dtype, device=wide.device),
    )
    if k and bool(wide.any()):
        values[:k], vectors[:k] = _leading(wide, k)
        known = values > max(n, d) * torch.finfo(wide.dtype).eps * values[0]
        values, vectors = (
            torch.where(known, values, 0.0),
            torch.where(known[:, None], _signed(vectors), 0.0),
        )
    return values, vectors


def _leading(wide: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k ≤ min(n, D) largest eigenvalues of G and eigenvectors (k, D), by the cheapest way."""
    n, d = wide.shape
    side = min(n, d)
    if side > SMALL and k * WHOLE <= side:
        found = arpack(lambda x: wide.T @ (wide @ x) / n, d, k, wide)
        if found is not None:
            return found[0], found[1].T
    small = (wide @ wide.T if n < d else wide.T @ wide) / n
    found = arpack(lambda x: small @ x, side, k, small) if k * WHOLE <= side else None
    if found is None:
        values, vectors = torch.linalg.eigh(small)
        found = values[-k:].flip(0), vectors[:, -k:].flip(1)
    return found[0], _lifted(wide, found[1].T) if n < d else found[1].T


def leading(matrix: torch.Tensor, p: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The p ≤ D algebraically largest eigenvalues (p,), descending, of a symmetric matrix (D, D)
    float64, and eigenvectors (p, D).

    Signs are those of `top`; eigenvalues may be negative.
    """
    found = (
        arpack(lambda x: matrix @ x, len(matrix), p, matrix, "LA")
        if p * WHOLE <= len(matrix)
        else None
    )
    if found is None:
        values, vectors = torch.linalg.eigh(matrix)
        found = values[-p:].flip(0), vectors[:, -p:].flip(1)
    return found[0], _signed(found[1].T)


def _lifted(wide: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Eigenvectors (k, D) of ΦᵀΦ from those of ΦΦᵀ, (k, n)."""
    rows = left @ wide
    size = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return rows.div_(size)


def _signed(vectors: torch.Tensor) -> torch.Tensor:
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def arpack(
    product: Operator, side: int, k: int, like: torch.Tensor, which: str = "LM"
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The k largest eigenvalues (k,) of a symmetric operator and its eigenvectors (side, k), by
    scipy's `eigsh`, on the CPU.

    The start is the same in every run.

    Args:
        product: (side,) -> (side,). like: a tensor of the wanted type and device. which: "LM",
            largest in magnitude, as suits positive semidefinite operators; or "LA", algebraically.

    Returns:
        None where it does not converge.
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    def by(v: NDArray[np.float64]) -> NDArray[np.float64]:
        found: NDArray[np.float64] = (
            product(torch.from_numpy(v.ravel().copy()).to(like)).cpu().numpy()
        )
        return found

    start = Randomness(0).generator("spectra", side).standard_normal(side)
    try:
        values, vectors = eigsh(
            LinearOperator((side, side), matvec=by, dtype=np.float64), k=k, which=which, v0=start
        )
    except ArpackError:
        return None
    order = np.argsort(-values, kind="stable")
    return torch.from_numpy(values[order]).to(like), torch.from_numpy(vectors[:, order].copy()).to(
        like
    )


def projected(features: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """λ̂ = ‖G v‖ of vectors (r, D), as (r,) float64 (Ali & Arafa 2024, eq. 2), not vᵀGv.

    By G or through Φ (n, D), whichever takes fewer operations; it holds blocks of about `BLOCK`
    numbers, and G where that is used.
    """
    (n, d), r = features.shape, len(vectors)
    out = torch.zeros(r, dtype=torch.float64, device=features.device)
    gram = _gram(features) if r * (2 * n - d) > n * d else None
    step = max(1, BLOCK // max(d, 1))
    for start in range(0, r, step):
        own = vectors[start : start + step].to(features.device).double()
        if gram is not None:
            image = own @ gram
        else:
            image = torch.zeros_like(own)
            for rows in torch.split(features, max(1, BLOCK // max(d, len(own)))):
                wide = rows.double()
                image += (own @ wide.T) @ wide / n
        out[start : start + step] = image.norm(dim=1)
    return out


def _gram(features: torch.Tensor) -> torch.Tensor:
    n, d = features.shape
    total = torch.zeros(d, d, dtype=torch.float64, device=features.device)
    for rows in torch.split(features, max(1, BLOCK // d)):
        wide = rows.double()
        total += wide.T @ wide / n
    return total


def relevance(
    values: torch.Tensor,
    projected: torch.Tensor,
    floor: float = 0.0,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """r(i, j) = Π_k (min(λ_k, λ̂_k) / max(λ_k, λ̂_k))^(1/p) in [0, 1], (j,) float64, in logs (Ali &
    Arafa 2024, eq. 3, 4).

    Eq. 4 takes the root over all D; over the p shared ones is ours. Only the client's own
    eigenvalues above floor · λ_1 and above 0 count, and the root is over as many (ours): a small λ̂
    is evidence and stays in. λ̂ = 0 gives 0; so does a client where none counts.

    Args:
        values: the client's own eigenvalues λ, (p,), descending. projected: λ̂ of j other clients'
            vectors, (j, p).
        floor: share of λ_1, in [0, 1).
        shared: (j, p), which vectors there are; those beyond the other's rank are none, and do not
            count either.
    """
    own, other = values.double(), projected.double()
    counts = _counted(own, other, floor, shared)
    safe = torch.where(counts, own, torch.ones_like(own))
    # log 0 is −inf, whose ratio is 0
    logs = torch.where(counts, other.log() - safe.log(), torch.zeros_like(other)).abs()
    number = counts.sum(1)
    return torch.where(
        number > 0, torch.exp(-logs.sum(1) / number.clamp_min(1)), torch.zeros_like(logs[:, 0])
    )


def span_relevance(
    values: torch.Tensor,
    projected: torch.Tensor,
    floor: float = 0.0,
    shared: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return r(i, j) of whole spans, min(E, Ê) / max(E, Ê) with E² = Σ_k λ_k² and Ê² = Σ_k λ̂_k²
    (ours).

    For one vector it is `relevance`. With more, `relevance` compares each vector on its own, and an
    error of angle θ in one mixes λ_1 into its λ̂_k: the ratio is wrong by about (θ λ_1 / λ_k)² / 2,
    which is large for every k but the first. Noise turns the vectors, so clients of one
    distribution may look farther apart the more vectors there are. Ê² = tr(V G² Vᵀ) is the same for
    all bases V of a span and at most E² for the exact eigenvalues (Ky Fan 1949), so it falls with
    the square of the angle between spans, and isotropic noise adds equally to all λ̂_k².

    Args:
        values: the client's own eigenvalues λ, (p,), descending.
        projected: λ̂ of j other clients' vectors, (j, p).
        floor: share of λ_1, in [0, 1), below which an eigenvalue does not count.
        shared: (j, p), which vectors there are.

    Returns:
        (j,) float64 in [0, 1]; 0 where no eigenvalue counts.
    """
    own, other = values.double(), projected.double()
    counts = _counted(own, other, floor, shared)
    unit = torch.where(counts, own, 0.0).amax(1, keepdim=True)  # so that no square underflows
    energy = torch.where(counts, own / unit, 0.0).norm(dim=1)
    found = torch.where(counts, other / unit, 0.0).norm(dim=1)
    ratio = torch.minimum(energy, found) / torch.maximum(energy, found)
    return torch.where(counts.any(1), ratio, 0.0)


def _counted(
    values: torch.Tensor,
    projected: torch.Tensor,
    floor: float,
    shared: torch.Tensor | None,
) -> torch.Tensor:
    """Return which pairs of eigenvalue and vector count, (j, p)."""
    counts = values > 0
    if len(values):
        counts = counts & (values > floor * values.max())
    counts = counts.expand(projected.shape)
    return counts if shared is None else counts & shared.to(counts.device)
