"""PACFL: clusters by principal angles between clients' data subspaces, then FedAvg in each cluster.

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity
Identification in Clustered Federated Learning via Principal Angles Between Client Data Subspaces",
AAAI 2023, Algorithm 1.

m: number of clients; D: number of values in a sample; p: vectors that a client sends;
U_i (D, p): the first p left singular vectors u_1, …, u_p of client i's samples, here as rows;
A_ij: angle between span U_i and span U_j, in degrees; β: largest angle at which clusters merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from securecluster.protocols.authoring import (
    ClusterOnce,
    EigenvectorClient,
    EigenvectorProtocol,
    UsageError,
    check_choice,
    check_clusters,
    check_number,
    linkage_clusters,
    nearest,
    protocol,
    torch,
)


def angles(ours: torch.Tensor, theirs: torch.Tensor, kind: str) -> torch.Tensor:
    """Return A, (a, b), of subspaces (a, p, D) and (b, p, D), by equation 2 or 3 (kind "sum")."""
    cosines = torch.einsum("ikd,jld->ijkl", ours.double(), theirs.double())  # U_iᵀ U_j
    if kind == "smallest":
        largest = torch.linalg.svdvals(cosines)[..., 0]
        return largest.clamp(max=1).arccos().rad2deg()
    matched = cosines.diagonal(dim1=2, dim2=3).abs()  # |u_kᵀ u_k|, (a, b, p)
    return matched.clamp(max=1).arccos().rad2deg().sum(2)


@protocol
class PACFL(EigenvectorProtocol, ClusterOnce):
    """Linkage of clients by the angles between their subspaces, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of eigenvectors and updates that the server does not know; it keeps angles"""
    vectors: int = 3
    """p, number of singular vectors that each client sends"""
    angle: str = "smallest"
    """A_ij: smallest principal angle (equation 2), or sum of the p angles (equation 3)"""
    linkage: str = "average"
    """distance of two clusters: average, single or complete"""
    threshold: float | None = None
    """β, largest distance at which clusters merge, in degrees; None takes k, or the largest gap"""
    k: int | None = None
    """number of clusters; None finds it"""

    name: ClassVar[str] = "outside-pacfl"
    signature_method = EigenvectorClient.eigen

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        """Return the cluster of each client."""
        distance = angles(signatures, signatures, self.angle).fill_diagonal_(0).numpy()
        return linkage_clusters(distance, self.linkage, count=self.k, height=self.threshold)

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        """Return the cluster that each newcomer would merge with first."""
        return nearest(angles(newcomers, signatures, self.angle).numpy(), labels, self.linkage)

    def check(self, clients: int) -> None:
        """Check the angle, the linkage and the cut, too."""
        super().check(clients)
        check_choice(self, angle=("smallest", "sum"), linkage=("average", "single", "complete"))
        if self.threshold is not None and self.k is not None:
            raise UsageError("threshold and k are two ways to cut; give one of them")
        if self.threshold is not None:
            check_number(self, "threshold", 0)
        if self.k is not None:
            check_clusters(self.k, clients)
