"""Gram matrices with noise, from which a client's eigenvectors and relevance values follow.

None of this is in the papers of the methods that cluster clients by eigenvectors.

A = XᵀX of features whose rows are clipped to norm 1, a rule that considers one sample at a time.
Neither eigenvectors nor relevance, which is made of ratios, require the division by n. So for the
unit "example" there is none: blanking a sample, adding or removing one moves A by at most 1 in
Frobenius norm, replacing one by at most √2. For the unit "client", A = XᵀX/n, whose norm is at most
1: this is its distance to the zero matrix, and it is at most √2 from another client's matrix.

The symmetric matrices are a vector space of D(D + 1)/2 numbers, in which the Frobenius norm is the
Euclidean norm of (diagonal, √2 · entries above it). Noise is isotropic there: N(0, s²) on the
diagonal, N(0, s²/2) beside it. The privacy is that of Analyze Gauss (Dwork, Talwar, Thakurta, Zhang
2014), which adds N(0, s²) everywhere. By Wigner's semicircle law, the spectral norm of the noise
tends to s·√(2D) instead of s·√(4D).

A client has one noisy matrix, drawn from its key and its data, of which eigenvectors and all
relevance values are made: the same when a server asks again, also with crafted eigenvectors. It is
made anew when needed, so that no (D, D) matrix a client stays in memory. A client remembers the
digest of the first, and refuses to answer from another one, such as a machine that rounds otherwise
would make.

Eigenvectors that noise alone could produce, whose eigenvalue is below twice the noise's spectral
norm, and those beyond the rank, are zeros. All pairs compare equally many: pairs that compared
fewer would look more similar whatever their data.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from securecluster.clustering.eigenvectors import leading
from securecluster.clustering.similarity import BLOCK
from securecluster.core.lazy_torch import torch
from securecluster.runtime.call_context import CallContext

# ‖xxᵀ − yyᵀ‖ ≤ √2 where ‖x‖, ‖y‖ ≤ 1; so do two positive semidefinite matrices of norm 1 differ
REPLACE = math.sqrt(2)
# measured by `benchmarks.papers.oneshot.noise`; chosen by trial on other seeds (not in the paper)
APART = 2.0


def clipped(features: torch.Tensor) -> torch.Tensor:
    """Clip each row to norm 1.

    Args:
        features: (n, D); a row that is not finite counts as zeros, since an error would be a
            release without noise.

    Returns:
        (n, D) float64.
    """
    wide = features.double()
    finite_rows = wide.isfinite().all(1, keepdim=True)
    wide = wide.masked_fill(~finite_rows, 0)
    norms = wide.norm(dim=1, keepdim=True)
    rows: torch.Tensor = wide / norms.clamp_min(1)
    return rows


def gram(features: torch.Tensor, mean: bool = False) -> torch.Tensor:
    """Return the Gram matrix A of clipped rows.

    Args:
        features: (n, D).
        mean: if True, return XᵀX/n instead of XᵀX.

    Returns:
        (D, D) float64; zero without rows.
    """
    n, d = features.shape
    matrix = torch.zeros(d, d, dtype=torch.float64, device=features.device)
    # by blocks of rows, so that the float64 copy of the features stays small
    for block in torch.split(features, max(1, BLOCK // d)):
        rows = clipped(block)
        matrix += rows.T @ rows
    if mean:
        return matrix / max(n, 1)
    return matrix


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """Return a symmetric matrix as a vector of the same norm.

    Args:
        matrix: (D, D), symmetric.

    Returns:
        (D(D + 1)/2,) the numbers a_ii and √2·a_ij, i < j, whose Euclidean norm is the matrix's
        Frobenius norm.
    """
    i, j = torch.triu_indices(*matrix.shape, device=matrix.device)
    row = matrix[i, j]
    row[i != j] *= math.sqrt(2)
    return row


def unpacked(row: torch.Tensor, d: int) -> torch.Tensor:
    """Return the symmetric matrix that `packed` made the vector of.

    Args:
        row: (D(D + 1)/2,).
        d: D.

    Returns:
        (D, D)
    """
    i, j = torch.triu_indices(d, d, device=row.device)
    upper = row.new_zeros(d, d)
    upper[i, j] = row
    upper.div_(math.sqrt(2))
    upper.diagonal().mul_(math.sqrt(2))
    return upper + upper.triu(1).T


def edge(sigma: float, d: int) -> float:
    """Return s·√(2D), to which the spectral norm of the noise tends.

    Eigenvectors with eigenvalues below it contain no information about the data.

    Args:
        sigma: s, the standard deviation of the noise on the diagonal.
        d: D, the size of the matrix.
    """
    return sigma * math.sqrt(2 * d)


@dataclass(frozen=True)
class GramNoise:
    """The noise of clients' Gram matrices.

    Args:
        multiplier: z, positive: the noise has the standard deviation s = z times the sensitivity to
            blanking the unit, which is 1.
        mechanism: "gram" adds noise to A; "naive" adds noise to unit eigenvectors, z times their
            trivial sensitivity 2√p, and leaves A exact.
        per_client: whether the unit of privacy is a whole client, not one of its samples.
        separation: an eigenvalue counts if it is at least this multiple of the noise's spectral
            norm.
    """

    multiplier: float
    mechanism: str
    per_client: bool
    separation: float = APART

    @property
    def naive(self) -> bool:
        """Return whether noise is added to eigenvectors alone.

        This is for research on how robust the clustering is.
        """
        return self.mechanism == "naive"

    def matrix(self, features: torch.Tensor, context: CallContext) -> torch.Tensor:
        """Return a client's noisy A.

        It is the same for the same data, as long as they are rounded alike. It is computed again
        whenever it is needed, since storing one for each client would take D² numbers each; the
        computation holds about six (D, D) matrices in float64.

        Args:
            features: (n, D).
            context: of a call to the client alone.

        Returns:
            (D, D) float64, released.
        """
        matrices = self.matrices([features], context)
        return context.postprocess(lambda noisy: noisy[0], matrices)

    def matrices(self, by_class: Sequence[torch.Tensor], context: CallContext) -> torch.Tensor:
        """Return noisy Gram matrices of disjoint parts of a client's samples, as one release.

        A sample is in one part, so all matrices together move no further than a single one does:
        by 1 where a sample is blanked, added or removed, and by at most √2 where it is replaced,
        also by a sample of another part. For the unit "client" each is divided by the number n of
        all samples, so their norms add up to at most 1.

        Args:
            by_class: (n_c, D) features of each part.
            context: of a call to the client alone.

        Returns:
            (parts, D, D) float64, released.
        """
        samples = sum(len(features) for features in by_class)
        rows = []
        for features in by_class:
            matrix = gram(features, self.per_client)
            if self.per_client:
                matrix *= len(features) / max(samples, 1)
            rows.append(packed(matrix))
        together = torch.cat(rows)[None]
        released = context.release(
            together, sensitivity=1.0, noise=self.multiplier, replace=REPLACE, once="gram"
        )
        d = by_class[0].shape[1]

        def unpacked_parts(noisy: torch.Tensor) -> torch.Tensor:
            return torch.stack([unpacked(row, d) for row in noisy[0].chunk(len(by_class))])

        return context.postprocess(unpacked_parts, released)

    def spectrum(self, matrix: torch.Tensor, p: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest eigenvalues of a noisy A, and their eigenvectors.

        An eigenvalue below `separation` times the noise's edge, and its vector, are zero, as those
        beyond a rank are. The first vector is always returned; its eigenvalue is zero if it is
        negative (not in the paper).

        Args:
            matrix: (D, D) noisy A.
            p: number of eigenvectors.

        Returns:
            Eigenvalues (p,) and eigenvectors (p, D).
        """
        # all of this is post-processing of the noisy matrix, so it has no privacy cost
        values, vectors = leading(matrix, p)
        significant = values >= self.separation * edge(self.multiplier, len(matrix))
        significant[0] = True
        values = torch.where(significant, values.clamp_min(0), 0.0)
        vectors = torch.where(significant[:, None], vectors, 0.0)
        return values, vectors

    def blurred(self, vectors: torch.Tensor, context: CallContext) -> torch.Tensor:
        """Return eigenvectors with the noise of the naive mechanism, scaled to unit norm again.

        The standard deviation is z·2√p. The bound 2√p holds for any change of them.

        Args:
            vectors: (p, D) unit vectors, or zeros.
            context: of a call to the client alone.

        Returns:
            (p, D), released.
        """
        sensitivity = 2 * math.sqrt(len(vectors))
        noisy = context.release(
            vectors[None],
            sensitivity=sensitivity,
            noise=self.multiplier,
            replace=1.0,
            once="eigenvectors",
        )
        return context.postprocess(_of_unit_norm, noisy)


def _of_unit_norm(noisy: torch.Tensor) -> torch.Tensor:
    """Return the rows (p, D) of (1, p, D), scaled to norm 1."""
    norms = noisy[0].norm(dim=1, keepdim=True)
    unit: torch.Tensor = noisy[0] / norms.clamp_min(torch.finfo(noisy.dtype).tiny)
    return unit


def told_by_all(vectors: torch.Tensor) -> torch.Tensor:
    """Return which eigenvectors all clients have released (not in the paper).

    The first vector of a client that has released any always counts.

    Args:
        vectors: (r, p, D) of r clients; zeros are vectors that were not released.

    Returns:
        (r, p) bool.
    """
    # Pairs that compare more vectors are less relevant to each other than other pairs, whatever
    # their data, so all pairs compare the same number.
    released = vectors.any(-1)
    by_all = released.all(0)
    by_all[:1] = True
    return released & by_all
