"""Clients of one-shot clustering, which compare their data by leading eigenvectors.

The comparison is that of Ali & Arafa 2024, Algorithm 2.
"""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from securecluster.clustering.eigenvectors import projected, relevance, span_relevance
from securecluster.core.lazy_torch import torch
from securecluster.protections.pair_rows import PairRange
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.comparison.eigenvectors import EigenvectorOptions
from securecluster.protocols.common.comparison.gram_mechanism import told_by_all
from securecluster.protocols.common.disclosures import OfPaddedPairs, OfPlainPairs

VIEWS = {
    "gps": (
        OfPlainPairs(
            "each client's relevance to every other's data (the plain pairs read the rows), and so "
            "R"
        ),
        OfPaddedPairs(
            "R of all pairs of clients: r_ij to within |r_ij − r_ji|/2, and exactly where the "
            "server knows r_ji"
        ),
        "the clusters, and each client's cluster",
        "how each cluster's common layers have moved in every round (under the mask), and over how "
        "many samples (clipped: clients)",
    ),
    "client": (
        "all other clients' eigenvectors: directions in which their data vary",
        "newcomers: these, and each client's cluster",
    ),
    "lps": (
        fl.OfPlainSums("each of its clients' number of samples (the plain sum reads every reply)"),
        "how the common layers of all clusters have moved on average: of two clusters, the other's "
        "up to their samples",
    ),
}


OTHERS = fl.Upto("others", "clients", minimum=1)
COMPARED = fl.Upto("compared", "clients")
# r is in [0, 1], up to rounding
RELEVANCE = PairRange(low=-0.01, high=1.01, bits=32, itself=1.0)


@dataclass(frozen=True, eq=False)
class OtherEigenvectors:
    """Server to client: other clients' eigenvectors as received, never the client's own."""

    # (r, p, D), or (r, n) uint8
    vectors: Annotated[
        fl.Picks, fl.Real((OTHERS, "vectors", "features"), sent="vectors", sealed=True)
    ]
    # (r,) int64, the clients they belong to, ascending
    ids: Annotated[fl.Picks, fl.Whole((OTHERS,), below="clients")]
    # (r,) int64, these clients' clusters: for newcomers
    labels: Annotated[fl.Picks | None, fl.Whole((OTHERS,), below="clients")]
    step: Annotated[int, fl.Between(maximum="steps")]  # the call in which they were received


@dataclass(frozen=True, eq=False)
class RelevanceRow:
    """Client to server: the relevance of all clients' data to the client's own."""

    # (b, m) r(i, j) for all clients j in ascending order, 1 for the client itself
    row: Annotated[fl.Rows, fl.Real((COMPARED,), low=RELEVANCE.low, maximum=RELEVANCE.high)]


@dataclass(frozen=True, eq=False)
class TaskChoice:
    """Newcomer to server: the cluster to join."""

    cluster: Annotated[fl.Rows, fl.Whole(below="clients")]  # (b,) int64


@dataclass(frozen=True)
class RelevanceOptions(EigenvectorOptions):
    """Options of the comparison of clients' data.

    Args:
        floor: a client's own eigenvalues below this share of its largest are left out.
    """

    floor: float = 0.0


class OneShotClient(fl.EigenvectorClient):
    """Clients that share eigenvectors, compute relevance, and then contribute to averages.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
        options: of the comparison of data.
    """

    def __init__(
        self,
        cohort: fl.LocalTrainer,
        training: fl.LocalTraining,
        pipeline: fl.Pipeline,
        weighted: bool,
        options: RelevanceOptions,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted, options)
        self._floor = options.floor

    @fl.answers(fl.PAIRS, unmasked=("row",), columns="ids", relays=("vectors",))
    def relevance(self, context: fl.CallContext, query: OtherEigenvectors) -> RelevanceRow:
        """Return the relevance r(i, ·) of all clients' data (lines 6 to 13).

        Raises:
            FrameError: the others' numbers do not ascend, or include the client's own.
        """
        start = self.cohort.start
        rows = []
        compared = self._compared(context, query)
        for i, (others, relevances) in zip(context.ids, compared, strict=True):
            # r(i, i) = 1, in the client's own place
            position = bisect(others, i)
            rows.append(context.postprocess(partial(_with_itself, position), relevances))
        table = context.postprocess(lambda *rows: torch.stack(rows).to(start), *rows)
        return RelevanceRow(fl.Rows(table))

    @fl.answers(fl.GATHER, relays=("vectors",))
    def choose(self, context: fl.CallContext, query: OtherEigenvectors) -> TaskChoice:
        """Return a newcomer's cluster, and nothing else (not in the paper).

        It is the cluster whose members' data are, on average, most relevant to the newcomer's.

        Raises:
            PolicyError: the query lacks the others' clusters.
            FrameError: the others' numbers do not ascend, or include the client's own.
        """
        if query.labels is None:
            raise fl.PolicyError(
                "choose needs the clusters of the run's clients, and this request has none"
            )
        chosen = []
        compared = self._compared(context, query)
        for picks, (_, relevances) in zip(query.labels.picks, compared, strict=True):
            # each newcomer receives the eigenvectors of all clients of the run
            labels = query.labels.table[list(picks)]
            chosen.append(context.postprocess(partial(_most_relevant, labels), relevances))
        choices = context.postprocess(lambda *numbers: torch.stack(numbers).cpu(), *chosen)
        return TaskChoice(fl.Rows(choices))

    def _check_others(self, context: fl.CallContext, query: OtherEigenvectors) -> None:
        """Raise FrameError unless each client receives vectors of others, in ascending order."""
        for i, picks in zip(context.ids, query.ids.picks, strict=True):
            ids = query.ids.table[list(picks)].tolist()
            if ids != sorted(set(ids)) or i in ids:
                raise fl.FrameError(
                    f"OtherEigenvectors.ids for client {i} are not others' numbers in ascending "
                    "order: the frame is refused"
                )

    def _compared(
        self, context: fl.CallContext, query: OtherEigenvectors
    ) -> list[tuple[list[int], torch.Tensor]]:
        """Compare each client's data with the eigenvectors that it received.

        Returns:
            For each client of the call: the other clients, and r(i, j) of each, (r,).
        """
        self._check_others(context, query)
        vectors = self._opened(query)
        compared = []
        for n, picks in enumerate(query.vectors.picks):
            rows = list(picks)
            others = query.ids.table[rows].tolist()
            relevances = self._relevant(context.select([n]), vectors[rows])
            compared.append((others, relevances))
        return compared

    def _relevant(self, context: fl.CallContext, vectors: torch.Tensor) -> torch.Tensor:
        """Return r(i, ·), from G_i or from the noisy matrix of the client's eigenvectors.

        Args:
            context: of a call to the client alone.
            vectors: (r, p, D) of other clients.

        Returns:
            (r,) in [0, 1].
        """
        (k,) = context.positions
        flat = vectors.flatten(0, 1)
        shape = vectors.shape[:2]
        noise = self._gram_noise
        if noise is None:
            # λ̂_k = ‖G_i v_k‖, and the ratios of eq. 3 and 4
            image = projected(self._features(k), flat).view(shape)
            values, _ = self._spectrum(k)
            return relevance(values, image, self._floor, vectors.any(-1))

        def of_matrix(noisy: torch.Tensor) -> torch.Tensor:
            # In the ratios, noise that turns the first vector slightly changes ‖G v_k‖ of all later
            # ones by the first eigenvalue. The energy of a span does not depend on its basis.
            products = flat.to(noisy) @ noisy[0]
            image = products.norm(dim=1).view(shape)
            values, _ = self._noisy_spectrum(k, noisy)
            return span_relevance(values, image, self._floor, told_by_all(vectors))

        return context.postprocess(of_matrix, self._noisy(context, noise))

    def _opened(self, query: OtherEigenvectors) -> torch.Tensor:
        """Return the eigenvectors of the query's table, (r, p, D), opened or unmasked."""
        start = self.cohort.start
        table = query.vectors.table
        seal = self._pipeline.seal
        if not seal:
            mask = self._pipeline.of("vectors")
            return mask.inverse(table.to(start), query.step)
        template = start.new_empty(self._count, self._phi.dimension)
        owners = query.ids.table.tolist()
        return seal.open(table, owners, query.step, "eigen", "vectors", template)


def _with_itself(position: int, relevances: torch.Tensor) -> torch.Tensor:
    """Return a client's relevance to others (r,) with a 1 for itself, (r + 1,).

    Args:
        position: of the client.
        relevances: of the others, in ascending order.
    """
    before = relevances[:position]
    after = relevances[position:]
    itself = relevances.new_ones(1)
    return torch.cat([before, itself, after])


def _most_relevant(labels: torch.Tensor, relevances: torch.Tensor) -> torch.Tensor:
    """Return the cluster whose members' data are on average most relevant, a number.

    Args:
        labels: cluster of each of the others (r,).
        relevances: to each of them (r,).
    """
    members_of = labels.to(relevances.device)
    clusters = sorted(set(labels.tolist()))
    means = [relevances[members_of == c].mean() for c in clusters]
    return torch.stack(means).argmax()
