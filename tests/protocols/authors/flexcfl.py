"""FlexCFL (FedGroup): groups by one update before training, then FedAvg in each group.

Duan, Liu, Ji, Wu, Liang, Chen, Tan, Ren, "Flexible Clustered Federated Learning for Client-Level
Data Distribution Shift", 2021 (arXiv 2108.09749). Every client trains once from θ_0. The rows of
cosines between its update and the leading singular directions of all updates are grouped by
k-means, and newcomers join the group whose mean update has the largest cosine to theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from securecluster.parties.derived import initial_model
from securecluster.protocols.authoring import (
    GATHER,
    CallContext,
    ClusterOnce,
    Empty,
    Real,
    Rows,
    SignatureClient,
    TrainingClient,
    answers,
    check_clusters,
    kmeans,
    protocol,
    torch,
)


@dataclass(frozen=True, eq=False)
class FirstUpdate:
    """Client to server: the update of one local training from θ_0."""

    update: Annotated[Rows, Real(("width",))]  # (b, d)


class FirstUpdateClient(SignatureClient):
    """Clients that send the update of one training, and then contribute to averages."""

    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        """Return each client's update from θ_0."""
        return FirstUpdate(Rows(self.first_updates(context)))

    def first_updates(self, context: CallContext) -> torch.Tensor:
        """Return the updates of one training, (b, d)."""
        start = Rows(self.cohort.start[None], (0,) * len(context.positions))
        return self.cohort.train(start, context.positions, self.training, context.step)


@protocol
class FlexCFL(ClusterOnce):
    """k-means of the cosines between first updates and their singular directions, then FedAvg."""

    mask: str = "permutation"
    """map of updates that the server does not know, which keeps cosines"""
    k: int = 3
    """number of groups, and of singular directions"""

    name: ClassVar[str] = "flexcfl"
    client: ClassVar[type[TrainingClient]] = FirstUpdateClient
    signature_method: ClassVar[Any] = FirstUpdateClient.pretrain
    clusters_rows: ClassVar[bool] = True

    def signature_width(self, facts: Any) -> int:
        """Return d."""
        return int(initial_model(self, facts).dimension)

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        """Return the group of each client."""
        rows = torch.nn.functional.normalize(signatures.double(), dim=1)
        directions = torch.linalg.svd(signatures.double(), full_matrices=False).Vh[: self.k]
        cosines = (rows @ directions.T).numpy()
        return list(kmeans(cosines @ cosines.T, self.k, seed))

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        """Return the group whose mean update has the largest cosine to each newcomer's."""
        group = torch.as_tensor(labels)
        means = torch.stack([signatures[group == c].mean(0) for c in range(max(labels) + 1)])
        return torch.cosine_similarity(newcomers[:, None], means[None], dim=2).argmax(1).tolist()

    def check(self, clients: int) -> None:
        """Check the number of groups, too."""
        super().check(clients)
        check_clusters(self.k, clients)
