"""Gram matrices with noise, from which a client's eigenvectors and all its relevance values follow
(ours; Ali & Arafa 2024 have none).

A is XᵀX of features whose rows are clipped to norm 1: a rule that looks at one sample at a time.
Neither eigenvectors nor relevance, which is made of ratios, need the division by n, so for unit
"example" there is none: one sample more or less moves A by at most 1 in Frobenius norm, one
replaced by at most √2. For unit "client" it is XᵀX/n, whose norm is at most 1, against zero, or √2
from another client's.

The symmetric matrices are a vector space of D(D + 1)/2 numbers whose Frobenius norm is the norm of
(diagonal, √2 · what is above it). Noise is isotropic there: N(0, s²) on the diagonal, N(0, s²/2)
beside it. The privacy is that of Analyze Gauss (Dwork, Talwar, Thakurta, Zhang 2014), which has
N(0, s²) everywhere, and the spectral norm tends to s·√(2D) instead of s·√(4D), by Wigner's
semicircle.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from securecluster.clustering.eigenvectors import leading
from securecluster.clustering.similarity import BLOCK
from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_choice, check_noise
from securecluster.errors import UsageError
from securecluster.privacy.dp.noise_streams import NoiseStreams

# ‖xxᵀ − yyᵀ‖ ≤ √2 where ‖x‖, ‖y‖ ≤ 1; so do two positive semidefinite matrices of norm 1 differ
REPLACE = math.sqrt(2)
# `benchmarks.papers.oneshot_noise` tells what it is good for; chosen by trial on other seeds (ours)
APART = 2.0


def clipped(features: torch.Tensor) -> torch.Tensor:
    """x·min(1, 1/‖x‖) of each row of (n, D), float64; a row that is not finite counts as zeros."""
    wide = features.double()
    wide = wide.masked_fill(~wide.isfinite().all(1, keepdim=True), 0)
    found: torch.Tensor = wide / wide.norm(dim=1, keepdim=True).clamp_min(1)
    return found


def gram(features: torch.Tensor, mean: bool = False) -> torch.Tensor:
    """A = XᵀX (D, D) float64 of the clipped rows of features (n, D), or XᵀX/n where `mean` says so;
    zero without rows.
    """
    n, d = features.shape
    total = torch.zeros(d, d, dtype=torch.float64, device=features.device)
    for rows in torch.split(features, max(1, BLOCK // d)):
        own = clipped(rows)
        total += own.T @ own
    return total / max(n, 1) if mean else total


def packed(matrix: torch.Tensor) -> torch.Tensor:
    """A symmetric matrix (D, D) as the D(D + 1)/2 numbers a_ii and √2·a_ij, i < j, whose norm is
    its Frobenius norm.
    """
    i, j = torch.triu_indices(*matrix.shape, device=matrix.device)
    row = matrix[i, j]
    row[i != j] *= math.sqrt(2)
    return row


def unpacked(row: torch.Tensor, d: int) -> torch.Tensor:
    """The symmetric matrix (D, D) that `packed` made the row of."""
    i, j = torch.triu_indices(d, d, device=row.device)
    out = row.new_zeros(d, d)
    out[i, j] = row
    out.div_(math.sqrt(2)).diagonal().mul_(math.sqrt(2))
    return out + out.triu(1).T


def edge(sigma: float, d: int) -> float:
    """s·√(2D): what the spectral norm of the noise on a matrix (D, D) tends to, and its
    eigenvectors tell nothing below.
    """
    return sigma * math.sqrt(2 * d)


@dataclass(frozen=True)
class GramNoise:
    """How clients hide their Gram matrices.

    Args:
        multiplier: z, positive: noise of std s = z times the sensitivity to adding or removing the
            unit, which is 1.
        mechanism: "gram" noises A; "naive" leaves it, and noises unit eigenvectors by z times their
            trivial sensitivity 2√p.
        per_client: whether a whole client is the unit, not one of its samples.
        draws: what noise is drawn from.
        apart: an eigenvalue counts from so many times the noise's spectral norm on.
    """

    multiplier: float
    mechanism: str
    per_client: bool
    draws: NoiseStreams
    apart: float = APART

    @property
    def naive(self) -> bool:
        """Return whether the eigenvectors alone are noised.

        This is for research on how robust the clustering is.
        """
        return self.mechanism == "naive"

    def matrix(self, features: torch.Tensor, client: int) -> torch.Tensor:
        """The client's noisy A, (D, D) float64: the same for the same data, rounded alike.

        It is made again when it is needed and not kept; making it holds about six matrices (D, D)
        in float64.
        """
        row = packed(gram(features, self.per_client))
        return unpacked(
            self.draws.noised(client, "gram", 0, row, self.multiplier, 1.0), features.shape[1]
        )

    def spectrum(self, matrix: torch.Tensor, p: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The p largest eigenvalues (p,) of a noisy A and its eigenvectors (p, D), as far as they
        stand out of the noise.

        An eigenvalue below `apart` times the noise's edge and its vector are zero, as those beyond
        a rank are; the first vector is always told, and its eigenvalue zero where it is negative.
        All this is made from the noisy matrix, so it costs nothing (ours).
        """
        values, vectors = leading(matrix, p)
        stands = values >= self.apart * edge(self.multiplier, len(matrix))
        stands[0] = True
        return torch.where(stands, values.clamp_min(0), 0.0), torch.where(
            stands[:, None], vectors, 0.0
        )

    def blurred(self, vectors: torch.Tensor, client: int) -> torch.Tensor:
        """The naive mechanism: unit eigenvectors (p, D), or zeros, with noise of std z·2√p, scaled
        to unit norm again.
        """
        reach = 2 * math.sqrt(len(vectors))
        noisy = self.draws.noised(client, "eigenvectors", 0, vectors, self.multiplier, reach)
        found: torch.Tensor = noisy / noisy.norm(dim=1, keepdim=True).clamp_min(
            torch.finfo(noisy.dtype).tiny
        )
        return found


def told_by_all(vectors: torch.Tensor) -> torch.Tensor:
    """Which of the vectors (r, p, D) of r clients are told by all of them, (r, p); the first of one
    that tells any counts always (ours).

    Pairs that compare more vectors are less relevant to each other than other pairs whatever their
    data, so all compare as many.
    """
    there = vectors.any(-1)
    everywhere = there.all(0)
    everywhere[:1] = True
    return there & everywhere


def hidden(config: Mapping[str, Any], secret: object) -> GramNoise | None:
    """Return the noise of a run's configuration, drawn from its clients' secret.

    Return None where there is none.
    """
    if not config["gram_noise"]:
        return None
    assert isinstance(secret, NoiseStreams)
    return GramNoise(
        config["gram_noise"], config["gram_mechanism"], config["dp_unit"] == "client", secret
    )


def multipliers(z: float, mechanism: str) -> dict[str, float]:
    """Noise multipliers of one-shot clustering's replies, by field: rows of relevance follow from
    the matrix whose eigenvectors are told.

    A newcomer tells the cluster it chooses, and nothing else, so that is its one release. Naive
    noise is in none but the eigenvectors.
    """
    if not z:
        return {}
    return {"vectors": z} if mechanism == "naive" else {"vectors": z, "row": math.inf, "cluster": z}


def check(given: Any) -> None:
    """Raise UsageError for noise of Gram matrices that cannot be, or is said twice; `given` has the
    options of one-shot clustering.
    """
    check_choice(given, gram_mechanism=("gram", "naive"))
    check_noise(given, "gram_noise")
    naive = given.gram_mechanism == "naive"
    if naive and given.target_epsilon is not None:
        raise UsageError(
            "naive noise leaves relevance exact, so no noise reaches a target_epsilon: use the "
            "gram mechanism"
        )
    if naive and not given.gram_noise:
        raise UsageError(
            "the naive mechanism is noise on eigenvectors: say how much (gram_noise), or leave it "
            "out"
        )
    if given.gram_noise and given.target_epsilon is not None:
        raise UsageError(
            "gram_noise and target_epsilon both say how much noise there is: give one of them"
        )


def said(z: float, mechanism: str, p: int, delta: float) -> list[str]:
    """What the naive mechanism's own price is, which does not stand for the run's."""
    if not (z and mechanism == "naive"):
        return []
    from securecluster.privacy.dp.accounting import epsilon

    alone = epsilon([(z, 1.0, 1)], delta).epsilon
    return [
        f"naive noise of std {z * 2 * math.sqrt(p):.3g} is on eigenvectors alone: by their trivial "
        "sensitivity 2√p, whoever is protected,"
        f" ε = {alone:.3g} for them; relevance is exact, so ε of all that is released is infinite"
    ]


def trusted(features: object, public: str | None) -> list[str]:
    """What is taken for granted of the feature map where Gram matrices have noise."""
    if features == "pca":
        return [
            f"the features are principal components of {public}, taken as public: clients' samples "
            "that are among these are not covered"
        ]
    return (
        []
        if isinstance(features, str)
        else [
            "features of your own are taken as made without any client's data, one sample at a time"
        ]
    )
