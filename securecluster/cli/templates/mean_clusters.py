"""Clusters by the means of clients' samples, then FedAvg in each cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch

from securecluster.protocols import authoring as fl


@dataclass(frozen=True, eq=False)
class SampleMean:
    """Client to server: the mean of the client's samples."""

    mean: Annotated[fl.Rows, fl.Real(("width",))]  # (b, D)


class MeanClient(fl.SignatureClient):
    """Clients that send the mean of their samples, and then contribute to averages."""

    @fl.answers(fl.GATHER, through=("mean",), fresh=True)
    def send_mean(self, context: fl.CallContext, query: fl.Empty) -> SampleMean:
        """Return the mean of each client's samples."""
        means = [self.cohort.inputs(k).flatten(1).mean(0) for k in context.positions]
        return SampleMean(fl.Rows(torch.stack(means)))


@fl.protocol
class MeanClusters(fl.ClusterOnce):
    """Average linkage on the means of clients' samples, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of means and updates that the server does not know"""
    k: int | None = None
    """number of clusters; None cuts at the largest gap"""

    name: ClassVar[str] = "mean-clusters"
    client: ClassVar[type[fl.TrainingClient]] = MeanClient
    signature_method: ClassVar[Any] = MeanClient.send_mean
    clusters_rows: ClassVar[bool] = True

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        """Return the cluster of each client."""
        distance = torch.cdist(signatures, signatures).double().numpy()
        return fl.linkage_clusters(distance, "average", count=self.k)

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        """Return the cluster whose members' means are nearest on average."""
        distance = torch.cdist(newcomers, signatures).double().numpy()
        return fl.nearest(distance, labels, "average")

    def check(self, clients: int) -> None:
        """Check the number of clusters, too, and that noise covers whole clients."""
        super().check(clients)
        if self.k is not None:
            fl.check_clusters(self.k, clients)
        if self.privacy.per_example and not self.signatures.by_gradients:
            raise fl.UsageError("noise covers a client's mean, and no sample: take dp_unit client")
