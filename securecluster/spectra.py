"""Leading eigenvectors of a client's Gram matrix, and how relevant another client's are to it (Ali & Arafa 2024, II-B).

The Gram matrix of features Φ (n, D) is G = ΦᵀΦ/n (eq. 1). With p ≪ D it is never decomposed whole: block Lanczos needs products with G
alone, and where there are fewer samples than features these go through Φ, so that no (D, D) is made. Written here instead of scipy's
`eigsh`, because ARPACK draws restart vectors of its own where features have few dimensions, multiplies one vector at a time, and stays on
the CPU.
"""

from __future__ import annotations

from collections.abc import Callable

from securecluster.backend import torch
from securecluster.randomness import Randomness
from securecluster.similarity import BLOCK

Operator = Callable[["torch.Tensor"], "torch.Tensor"]
SMALL = 1024  # up to so many rows a Gram matrix is cheaper to form than to multiply with through the features
WHOLE = 80  # a matrix of fewer than so many times the wanted eigenvectors is decomposed whole
TOLERANCE = 1e-13  # residual ‖Gv − λv‖ by the norm of G


def top(features: torch.Tensor, p: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The p largest eigenvalues (p,) of ΦᵀΦ/n and their eigenvectors as rows (p, D), float64, on the features' device.

    Eigenvalues descend; each vector has unit length and its entry of largest magnitude is positive (ours). Beyond the rank both are
    zero, so that shapes agree between clients (ours). Holds Φ in float64 once, and nothing of size (D, D) where n < D or D > SMALL
    unless p is within a factor WHOLE of both, or Lanczos does not converge within half of the smaller side.

    Args:
        features: Φ (n, D), finite.
    """
    wide = features.double()
    n, d = wide.shape
    k = min(p, n, d)
    values, vectors = torch.zeros(p, dtype=wide.dtype, device=wide.device), torch.zeros(p, d, dtype=wide.dtype, device=wide.device)
    if k and bool(wide.any()):
        values[:k], vectors[:k] = _leading(wide, k)
        known = values > max(n, d) * torch.finfo(wide.dtype).eps * values[0]
        values, vectors = torch.where(known, values, 0.0), torch.where(known[:, None], _signed(vectors), 0.0)
    return values, vectors


def _leading(wide: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k ≤ min(n, D) largest eigenvalues of G and eigenvectors (k, D), by the cheapest way."""
    n, d = wide.shape
    side = min(n, d)
    if side > SMALL and k * WHOLE <= side:
        found = lanczos(lambda x: wide.T @ (wide @ x) / n, d, k, side // 2, wide)
        if found is not None:
            return found[0], found[1].T
    small = (wide @ wide.T if n < d else wide.T @ wide) / n
    found = lanczos(lambda x: small @ x, side, k, side // 2, small) if k * WHOLE <= side else None
    if found is None:
        values, vectors = torch.linalg.eigh(small)
        found = values[-k:].flip(0), vectors[:, -k:].flip(1)
    return found[0], _lifted(wide, found[1].T) if n < d else found[1].T


def _lifted(wide: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    """Eigenvectors (k, D) of ΦᵀΦ from those of ΦΦᵀ, (k, n)."""
    rows = left @ wide
    size = rows.norm(dim=1, keepdim=True).clamp_min(torch.finfo(rows.dtype).tiny)
    return rows.div_(size)


def _signed(vectors: torch.Tensor) -> torch.Tensor:
    largest = vectors.gather(1, vectors.abs().argmax(1, keepdim=True))
    return torch.where(largest < 0, -vectors, vectors)


def lanczos(product: Operator, side: int, k: int, most: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The k largest eigenvalues (k,) of a symmetric operator and its eigenvectors (side, k), by block Lanczos.

    Blocks of k + 2 vectors, so that eigenvalues may repeat, from a start that is the same in every run; every block is
    orthogonalised against the whole basis, twice (Golub & Van Loan, Matrix Computations, 10.3.6; Rayleigh–Ritz on the basis, whenever
    it has grown by a fifth).

    Args:
        product: (side, b) -> (side, b). most: vectors of the basis. like: a tensor of the wanted type and device.

    Returns:
        None where residuals are above TOLERANCE times the norm with a basis of `most` vectors.
    """
    draw = Randomness(0).generator("spectra", side).standard_normal((side, k + 2))
    block = torch.linalg.qr(torch.from_numpy(draw).to(like))[0]
    basis, inner, due = block[:, :0], like.new_zeros(most, most), 0.0
    while (size := basis.shape[1] + block.shape[1]) <= most:
        old, basis, image = basis.shape[1], torch.cat([basis, block], 1), product(block)
        inner[:size, old:size] = basis.T @ image
        inner[old:size, :size] = inner[:size, old:size].T
        rest = _outside(image, basis)
        left, spread, _ = torch.linalg.svd(rest, full_matrices=False)
        small = TOLERANCE * inner[:size, :size].norm()
        fresh = spread > small
        if size >= due or not bool(fresh.any()):
            values, weights = torch.linalg.eigh(inner[:size, :size])
            values, weights = values[-k:].flip(0), weights[:, -k:].flip(1)
            if bool(((rest @ weights[old:]).norm(dim=0) <= small).all()):
                return values, basis @ weights
            due = 1.2 * size
        block = torch.linalg.qr(_outside(left[:, fresh], basis))[0]
    return None


def _outside(block: torch.Tensor, basis: torch.Tensor) -> torch.Tensor:
    """What of a block (side, b) lies outside the span of the orthonormal basis (side, k)."""
    for _ in range(2):
        block = block - basis @ (basis.T @ block)
    return block


def projected(features: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """λ̂ = ‖G v‖ of vectors (r, D), as (r,) float64 (Ali & Arafa 2024, eq. 2), not vᵀGv.

    By G or through Φ (n, D), whichever takes fewer operations; it holds blocks of about `BLOCK` numbers, and G where that is used.
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


def relevance(values: torch.Tensor, projected: torch.Tensor, floor: float = 0.0, shared: torch.Tensor | None = None) -> torch.Tensor:
    """r(i, j) = Π_k (min(λ_k, λ̂_k) / max(λ_k, λ̂_k))^(1/p) in [0, 1], (j,) float64, in logs (Ali & Arafa 2024, eq. 3, 4).

    Eq. 4 takes the root over all D; over the p shared ones is ours. Only the client's own eigenvalues above floor · λ_1 and above 0
    count, and the root is over as many (ours): a small λ̂ is evidence and stays in. λ̂ = 0 gives 0; so does a client where none counts.

    Args:
        values: the client's own eigenvalues λ, (p,), descending. projected: λ̂ of j other clients' vectors, (j, p).
        floor: share of λ_1, in [0, 1).
        shared: (j, p), which vectors there are; those beyond the other's rank are none, and do not count either.
    """
    own, other = values.double(), projected.double()
    counts = ((own > 0) & (own > floor * own.max()) if len(own) else own > 0).expand(other.shape)
    counts = counts if shared is None else counts & shared.to(counts.device)
    safe = torch.where(counts, own, torch.ones_like(own))
    logs = torch.where(counts, other.log() - safe.log(), torch.zeros_like(other)).abs()  # log 0 is −inf, whose ratio is 0
    number = counts.sum(1)
    return torch.where(number > 0, torch.exp(-logs.sum(1) / number.clamp_min(1)), torch.zeros_like(logs[:, 0]))
