"""PACFL: clusters by principal angles between clients' data subspaces, then FedAvg in each cluster.

Vahidian, Morafah, Wang, Kungurtsev, Chen, Shah, Lin, "Efficient Distribution Similarity
Identification in Clustered Federated Learning via Principal Angles Between Client Data Subspaces",
AAAI 2023 (arXiv 2209.10526), Algorithm 1, equations 2 and 3.

p: singular vectors of a subspace; C: number of classes; D: number of values in a sample;
U_i (D, q): vectors that client i sends, here as rows. Algorithm 1 takes q = p of all samples; the
authors' programs take p of the samples of each class that a client has, side by side. Both are
options here. A client has C·p rows then, zeros for a class that it lacks, so that row k belongs to
the same class at all clients.

A_ij: angle between clients i and j, in degrees; β: largest angle at which clusters merge.

Beyond the paper: noise. The left singular vectors of samples are eigenvectors of their Gram
matrix, so the noise is that of one-shot clustering (`gram_mechanism`), in one matrix a client or in
one for each class. k may be told in place of β.

A sample has one class, so the Gram matrices of all classes move no further than one does, and are
one release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from securecluster.protocols import authoring as fl

torch = fl.torch

SUBSPACES = ("classes", "samples")
ANGLES = ("sum", "smallest", "vectors")
# singular values of unit vectors side by side, below which a direction is rounding
RANK = 1e-4


@dataclass(frozen=True)
class SubspaceOptions(fl.EigenvectorOptions):
    """Options of the subspaces that clients share.

    Args:
        classes: C, if each class has a subspace of its own; 0 takes all samples together.
    """

    classes: int = 0


class SubspaceClient(fl.EigenvectorClient):
    """Clients that share singular vectors of their samples, and then contribute to averages.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
        options: of the subspaces.
    """

    def __init__(
        self,
        cohort: fl.LocalTrainer,
        training: fl.LocalTraining,
        pipeline: fl.Pipeline,
        weighted: bool,
        options: SubspaceOptions,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted, options)
        self._classes = options.classes

    def _parts(self, k: int) -> list[torch.Tensor]:
        """Return the features of each class, or of all samples.

        A sample changes the matrix of its own class only, so all together cost what one does.

        Args:
            k: the client's position.
        """
        if not self._classes:
            return super()._parts(k)
        features = self._features(k)
        labels = self.cohort.labels(k)
        return [features[labels == c] for c in range(self._classes)]


@fl.protocol
class PACFL(fl.EigenvectorProtocol, fl.ClusterOnce):
    """Linkage of clients by angles between their data's subspaces, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of singular vectors and updates that the server does not know; it keeps angles"""
    vectors: int = 3
    """p, singular vectors of each subspace"""
    subspaces: Annotated[str, fl.OneOf(*SUBSPACES)] = "classes"
    """classes: one subspace for each class of a client's samples, as the authors' programs have;
    samples: one for all samples, as Algorithm 1 has
    """
    angle: Annotated[str, fl.OneOf(*ANGLES), fl.IN_PYTHON] = "sum"
    """A_ij: smallest principal angle (equation 2); sum of the angles of paired vectors (equation
    3), which sees what label a sample has; or vectors, the smallest angle of any two vectors, as
    the authors' programs take it
    """
    linkage: Annotated[str, fl.OneOf("average", "single", "complete")] = "average"
    """distance of two clusters: average, single or complete"""
    threshold: Annotated[float | None, fl.Number(0)] = None
    """β, largest A_ij at which clusters merge, in degrees; None takes k, or the largest gap"""
    k: int | None = None
    """number of clusters; None takes the threshold, or the largest gap"""
    gram_noise: float = 0.0
    """noise multiplier of each client's Gram matrix, or of its classes' matrices together, whose
    samples are clipped to norm 1, for its dp_unit
    """

    name: ClassVar[str] = "pacfl"
    client: ClassVar[type[fl.TrainingClient]] = SubspaceClient

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        """Return the cluster of each client (Algorithm 1, the server's part before training).

        Args:
            signatures: (r, q, D) vectors of the clients.
            seed: not used.
        """
        distance = angles(signatures, signatures, self.angle)
        # a client is at angle 0 to itself; rounding makes it more
        distance.fill_diagonal_(0)
        # rounding also makes A_ij and A_ji differ, which linkage does not accept
        symmetric = (distance + distance.T) / 2
        return fl.linkage_clusters(
            symmetric.numpy(), self.linkage, count=self.k, height=self.threshold
        )

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        """Return the cluster that each newcomer would merge with first.

        Args:
            newcomers: (n, q, D) vectors of newcomers.
            signatures: (r, q, D) of the run's clients.
            labels: (r,) their clusters.
        """
        distance = angles(newcomers, signatures, self.angle)
        return fl.nearest(distance.numpy(), labels, self.linkage)

    def shared_facts(self, facts: fl.Facts) -> dict[str, Any]:
        """Return the length of vectors.

        Args:
            facts: of the clients and their data.

        Raises:
            UsageError: the data are text, or have no labels while each label has a subspace.
        """
        agreed = super().shared_facts(facts)
        if self.subspaces == "classes":
            facts.check_classes(
                "subspaces classes is of samples by class", "take subspaces samples"
            )
        return agreed

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the number of vectors that a client shares.

        Args:
            config: the run's configuration.
        """
        sizes = super().frame_sizes(config)
        subspaces = self._classes(config) or 1
        return {**sizes, "vectors": subspaces * sizes["vectors"]}

    def eigenvector_options(self, config: Mapping[str, Any]) -> SubspaceOptions:
        """Return the clients' options.

        Args:
            config: the run's configuration.
        """
        options = super().eigenvector_options(config)
        return SubspaceOptions(
            options.features, options.count, options.noise, self._classes(config)
        )

    def _classes(self, config: Mapping[str, Any]) -> int:
        """Return C, or 0 if all samples have one subspace."""
        if self.subspaces == "classes":
            return int(config["classes"])
        return 0

    def disclosures(self) -> fl.Disclosures:
        """Return what the server sees of all vectors together."""
        shown = super().disclosures()
        server = [*shown.server]
        if self.subspaces == "classes":
            sentence = "which classes each client has samples of"
            if self.gram.noisy(self.privacy):
                sentence += ", as far as the noise shows it"
            server.append(sentence)
        return replace(shown, server=server)

    def check(self, clients: int) -> None:
        """Check the subspaces, the angle, the linkage and the cut, too.

        Args:
            clients: m.

        Raises:
            UsageError: an option is out of range, or the cut is given twice.
        """
        super().check(clients)
        if self.threshold is not None and self.k is not None:
            raise fl.UsageError("--threshold and --k are two ways to cut: give one of them")
        if self.k is not None:
            fl.check_clusters(self.k, clients)


def angles(ours: torch.Tensor, theirs: torch.Tensor, measure: str) -> torch.Tensor:
    """Return A_ij of clients' vectors (Vahidian et al. 2023, equations 2 and 3).

    A row of zeros is at a right angle to everything.

    Args:
        ours: (a, q, D) rows of unit length, or zeros.
        theirs: (b, q, D)
        measure: "smallest" is the smallest principal angle of the two spans; "sum" is
            Tr(arccos |U_iᵀU_j|), of the vectors of the same number; "vectors" is the smallest angle
            of any two vectors. The sign of a singular vector is arbitrary, so an angle is at most a
            right one (not in the paper).

    Returns:
        (a, b) float64, degrees.

    Raises:
        UsageError: too many clients on both sides (`check_pairs`).
    """
    fl.check_pairs(min(len(ours), len(theirs)))
    # arccos is steep near 1, where float32 turns rounding errors into hundredths of a degree
    rows = ours.double()
    others = theirs.double()
    if measure == "sum":
        cosines = torch.einsum("ikd,jkd->ijk", rows, others)
        return _degrees(cosines.abs()).sum(2)
    if measure == "smallest":
        # principal angles are those of orthonormal bases; noisy vectors are not orthogonal
        rows = _orthonormal(rows)
        others = _orthonormal(others)
    distance = rows.new_zeros(len(rows), len(others))
    for n, row in enumerate(rows):
        cosines = row @ others.mT  # U_iᵀU_j of all j, (b, q, q)
        if measure == "smallest":
            # the smallest principal angle has the largest singular value as its cosine (equation 2)
            largest = torch.linalg.svdvals(cosines)[:, 0]
        else:
            largest = cosines.abs().amax((1, 2))
        distance[n] = _degrees(largest)
    return distance


def _degrees(cosines: torch.Tensor) -> torch.Tensor:
    """Return angles in degrees; rounding may make a cosine more than 1."""
    return cosines.clamp(max=1).arccos().rad2deg()


def _orthonormal(vectors: torch.Tensor) -> torch.Tensor:
    """Return orthonormal rows with the span of each client's vectors, and zeros for the rest.

    Args:
        vectors: (m, q, D)

    Returns:
        (m, min(q, D), D)
    """
    _, values, basis = torch.linalg.svd(vectors, full_matrices=False)
    within_rank = values > RANK
    rows: torch.Tensor = basis * within_rank[..., None]
    return rows
