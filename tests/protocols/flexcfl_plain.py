"""FlexCFL as an author would write it: clusters by the directions of first updates, then FedAvg.

Duan, Liu, Guo, Ren, Qiu, "Flexible Clustered Federated Learning for Client-Level Data Distribution
Shift", IEEE TPDS 2021: clients train once from θ_0, the server decomposes the matrix of their
updates, and runs k-means on the cosines between updates and its leading singular vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

import torch

from securecluster import Federation
from securecluster.clustering.k_means import kmeans
from securecluster.protocols.authoring import (
    FOLLOWS,
    GATHER,
    CallContext,
    ClusterOnce,
    Empty,
    PrivacySpec,
    Real,
    Rows,
    SignatureClient,
    TrainingClient,
    answers,
    check_clusters,
    protocol,
)


@dataclass(frozen=True, eq=False)
class FirstUpdate:
    """Client to server: the update of a local training from θ_0."""

    update: Annotated[Rows, Real(("width",))]  # (b, d)


class FirstUpdateClient(SignatureClient):
    """Clients that train once before the rounds."""

    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        """Return the update of each client."""
        return FirstUpdate(Rows(self.first_updates(context)))

    def first_updates(self, context: CallContext) -> torch.Tensor:
        """Return SGD(θ_0, D_i) − θ_0 of the called clients, (b, d)."""
        start = self.cohort.start
        width = len(start)
        models = Rows(start[None], (0,) * len(context.positions))
        return self.cohort.train(
            models, context.positions, self.training, context.step, width, None
        )


@protocol
class FlexCFL(ClusterOnce):
    """k-means on the directions of first updates, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of updates that the server does not know"""
    k: int = 3
    """number of clusters, and of singular vectors"""

    name: ClassVar[str] = "flexcfl-plain"
    client: ClassVar[type[TrainingClient]] = FirstUpdateClient
    signature_method: ClassVar[Any] = FirstUpdateClient.pretrain

    def signature_width(self, federation: Federation) -> int:
        """Return the numbers of an update."""
        return int(self.flat_model(federation).dimension)

    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        """Return k-means on cosines to the leading right singular vectors."""
        updates = signatures.double()
        directions = torch.linalg.svd(updates, full_matrices=False).Vh[: self.k]
        cosines = torch.nn.functional.normalize(updates, dim=1) @ directions.T
        inner = cosines @ cosines.T
        return [int(label) for label in kmeans(inner.numpy(), self.k, seed)]

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> Sequence[int]:
        """Return the cluster whose mean update has the largest cosine to a newcomer's."""
        label_of = torch.as_tensor(labels)
        means = [signatures[label_of == c].mean(0) for c in sorted(set(labels))]
        units = torch.nn.functional.normalize(torch.stack(means), dim=1)
        nearest: list[int] = (newcomers @ units.T).argmax(1).tolist()
        return nearest

    def privacy_spec(self, noise: float) -> PrivacySpec:
        """Count the first update; where training has noise it follows from that."""
        spec = super().privacy_spec(noise)
        releases = replace(spec.releases, trainings=self.rounds + 1)
        spec = spec.with_releases(releases)
        return spec.with_fields(update=FOLLOWS) if self.per_example and noise else spec

    def check(self, clients: int) -> None:
        """Check the number of clusters, too."""
        super().check(clients)
        check_clusters(self.k, clients)
