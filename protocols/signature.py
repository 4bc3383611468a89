"""Clusters by private signatures of gradients, then FedAvg in each cluster (not in a paper).

Before any training each client sends a few numbers: a sketch of its clipped gradients at the zero
weights of a softmax regression, or sums of projections by class. With noise, ε is what these few
numbers cost, which is far less than whole updates do.

q: numbers of a sketch; r: projections of a class block; z: noise multiplier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from securecluster.clustering.labels import check_clusters
from securecluster.core.lazy_torch import torch
from securecluster.parties.derived import resolved_defaults
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.comparison import signature_collection
from securecluster.protocols.common.comparison.signature_plan import DEFAULT_SIZES, PLAIN
from securecluster.protocols.common.options.signature_options import GRADIENT


@dataclass(kw_only=True)
class OwnSignatures(fl.GradientSignatureOptions):
    """Options of a method whose signatures are those of gradients."""

    choices: ClassVar[tuple[str, ...]] = (GRADIENT,)


@fl.protocol
class Signature(fl.ClusterOnce):
    """Clusters by noisy signatures of clients' gradients, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of signatures and updates that the server does not know; it keeps inner products"""
    dp_unit: str = "example"
    """what is protected: client (all data of one) or example (one sample of one client: DP-SGD in
    local training); ε bounds what blanking one tells: it keeps its place and contributes zeros,
    while numbers of samples and who takes part are public
    """
    k: int | None = None
    """number of clusters; None finds it by the known size of the noise"""
    signatures: fl.GradientSignatureOptions = fl.group(OwnSignatures)
    signature: str = GRADIENT
    """what clients are clustered by: gradient signatures, which are this method's own"""

    name: ClassVar[str] = "signature"
    client: ClassVar[type[fl.TrainingClient]] = fl.SignatureClient
    signature_method: ClassVar[Any] = fl.SignatureClient.send_signature

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        """Return the cluster of each client.

        Args:
            signatures: (r, ...) as they were packed.
            seed: of the starts of k-means.
        """
        return signature_collection.comparable(signatures, signatures).clusters(self.k, seed)

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        """Return the cluster whose members are nearest to each newcomer.

        Args:
            newcomers: (n, ...) as they were packed.
            signatures: (r, ...) of the run's clients.
            labels: (r,) their clusters.
        """
        return signature_collection.nearest_on_average(
            signature_collection.squared_distances(newcomers, signatures), labels
        )

    def signature_width(self, facts: fl.Facts) -> int:
        """Return the numbers of a sketch.

        Args:
            facts: of the clients and their data.
        """
        configured_size = resolved_defaults(self, facts)["signature_size"]
        return int(configured_size or DEFAULT_SIZES[PLAIN])

    def report_fields(self, state: Any) -> dict[str, Any]:
        """Return which kind of signatures the clients sent, and their centre.

        Args:
            state: the final state of `run_server`.
        """
        request = state.signatures.asked
        return {"signature_kind": request.name, "signature_centre": request.centre}

    def _rows(self, rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """Return signatures as they were packed, since `cluster` reads their noise."""
        return rows

    def _check_replaceable(self) -> None:
        """Accept gradient signatures of every kind, which are this method's own."""

    def check(self, clients: int) -> None:
        """Check the number of clusters, too.

        Args:
            clients: m.

        Raises:
            UsageError: no number of clusters of so many clients.
        """
        super().check(clients)
        if self.k is not None:
            check_clusters(self.k, clients)
