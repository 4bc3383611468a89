"""Clients that compare their data with others' by leading eigenvectors (Ali & Arafa 2024, Algorithm
2).
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from securecluster.clustering.eigenvectors import projected, relevance, span_relevance, top
from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, PolicyError
from securecluster.messaging.bounds import Between, Real, Upto, Whole
from securecluster.messaging.messages import Empty, Picks, Rows
from securecluster.privacy.dp.noise_streams import digest
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import SumClient
from securecluster.protocols.oneshot.feature_maps import Features
from securecluster.protocols.oneshot.gram_mechanism import GramNoise, told_by_all
from securecluster.runtime.endpoint import GATHER, PAIRS, CallContext, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

DIGEST = 32  # bytes of the digest of a noisy matrix

VIEWS = {
    "gps": (
        "each client's relevance to every other's data (the plain pairs read the rows), and so R",
        "the clusters, and each client's cluster",
        "how each cluster's common layers have moved in every round (under the mask), and over how "
        "many samples (clipped: clients)",
    ),
    "client": (
        "all other clients' eigenvectors: directions in which their data vary",
        "newcomers: these, and each client's cluster",
    ),
    "lps": (
        "each of its clients' number of samples (the plain sum reads every reply)",
        "how the common layers of all clusters have moved on average: of two clusters, the other's "
        "up to their samples",
    ),
}


@dataclass(frozen=True, eq=False)
class Eigenvectors:
    """Client to server."""

    # (b, p, D) unit eigenvectors v_k of G_i, or (b, n) uint8, sealed; zero beyond the rank
    vectors: Annotated[Rows, Real(("vectors", "features"), squared=True)]


OTHERS = Upto("others", "clients", minimum=1)


@dataclass(frozen=True, eq=False)
class OtherEigenvectors:
    """Server to client: other clients' eigenvectors, as they came; never the client's own."""

    # (r, p, D), or (r, n) uint8
    vectors: Annotated[Picks, Real((OTHERS, "vectors", "features"), sent="vectors", sealed=True)]
    # (r,) int64, whose they are, ascending
    ids: Annotated[Picks, Whole((OTHERS,), below="clients")]
    # (r,) int64, their clusters: for newcomers
    labels: Annotated[Picks | None, Whole((OTHERS,), below="clients")]
    step: Annotated[int, Between(maximum="steps")]  # the call in which they came


@dataclass(frozen=True, eq=False)
class RelevanceRow:
    """Client to server."""

    # (b, m) r(i, j) for all clients j in ascending order, 1 for itself
    row: Annotated[Rows, Real((Upto("compared", "clients"),), low=-0.01, maximum=1.01)]


@dataclass(frozen=True, eq=False)
class TaskChoice:
    """Client to server."""

    cluster: Annotated[Rows, Whole(below="clients")]  # (b,) int64


@dataclass(frozen=True)
class EigenvectorOptions:
    """How clients compare their data.

    Args:
        features: Φ.
        count: p, the eigenvectors that are shared.
        floor: own eigenvalues below this share of the largest are left out.
        noise: what hides Gram matrices; None leaves them exact.
    """

    features: Features
    count: int
    floor: float
    noise: GramNoise | None = None


class OneShotClient(SumClient):
    """Clients that share eigenvectors, tell how relevant others' data are to theirs, and then
    contribute to means.
    """

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        options: EigenvectorOptions,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self._phi = options.features
        self._count = options.count
        self._floor = options.floor
        self._noise = options.noise
        # by position: eigenvalues and eigenvectors
        self._own: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._made: dict[int, bytes] = {}  # by position: the digest of its noisy matrix, once used

    @answers(GATHER, through=("vectors",), sealed=("vectors",), fresh=True)
    def eigen(self, context: CallContext, query: Empty) -> Eigenvectors:
        """The first p eigenvectors of G_i = Φ(X_i)ᵀΦ(X_i)/n_i (lines 2–5), or of what noise makes
        of it; the eigenvalues stay here.
        """
        vectors = torch.stack([self._released(k) for k in context.positions])
        return Eigenvectors(Rows(vectors.to(self.cohort.start)))

    @answers(PAIRS, unmasked=("row",))
    def relevance(self, context: CallContext, query: OtherEigenvectors) -> RelevanceRow:
        """r(i, ·) (lines 6–13)."""
        rows = []
        for i, (others, relevances) in zip(
            context.ids, self._compared(context, query), strict=True
        ):
            position = bisect(others, i)
            before, after = relevances[:position], relevances[position:]
            rows.append(torch.cat([before, relevances.new_ones(1), after]))
        return RelevanceRow(Rows(torch.stack(rows).to(self.cohort.start)))

    @answers(GATHER)
    def choose(self, context: CallContext, query: OtherEigenvectors) -> TaskChoice:
        """The cluster whose members' data are, on average, most relevant to a newcomer's own; it
        tells no more than that (ours).
        """
        if query.labels is None:
            raise PolicyError(
                "choose brings the clusters of the others: without them there is nothing to choose "
                "from"
            )
        chosen = []
        compared = self._compared(context, query)
        for picks, (_, relevances) in zip(query.labels.picks, compared, strict=True):
            labels = query.labels.table[list(picks)].to(relevances.device)
            clusters = sorted(set(labels.tolist()))
            means = torch.stack([relevances[labels == c].mean() for c in clusters])
            chosen.append(int(means.argmax()))
        return TaskChoice(Rows(torch.as_tensor(chosen)))

    def _check_others(self, context: CallContext, query: OtherEigenvectors) -> None:
        """Raise FrameError unless each client is sent vectors of others, each once, by ascending
        number.
        """
        for i, picks in zip(context.ids, query.ids.picks, strict=True):
            ids = query.ids.table[list(picks)].tolist()
            if ids != sorted(set(ids)) or i in ids:
                raise FrameError(
                    f"OtherEigenvectors.ids for client {i} are not others' numbers in ascending "
                    "order: the frame is refused"
                )

    def _compared(
        self, context: CallContext, query: OtherEigenvectors
    ) -> list[tuple[list[int], torch.Tensor]]:
        """For each client that is asked: whose vectors it was sent, and r(i, j) of each, (r,)."""
        self._check_others(context, query)
        vectors = self._opened(query)
        return [
            (query.ids.table[list(picks)].tolist(), self._relevant(k, vectors[list(picks)]))
            for k, picks in zip(context.positions, query.vectors.picks, strict=True)
        ]

    def _relevant(self, k: int, vectors: torch.Tensor) -> torch.Tensor:
        """Return r(i, ·) from G_i, or, where that has noise, r of spans from the noisy matrix that
        the client's eigenvectors are of.
        """
        features, flat = self._features(k), vectors.flatten(0, 1)
        if self._noise is None or self._noise.naive:
            image = projected(features, flat)
            return relevance(
                self._spectrum(k)[0], image.view(vectors.shape[:2]), self._floor, vectors.any(-1)
            )
        noisy = self._noisy(k, features, self._noise)
        image = (flat.to(noisy) @ noisy).norm(dim=1)
        own = self._spectrum(k)[0]
        return span_relevance(own, image.view(vectors.shape[:2]), self._floor, told_by_all(vectors))

    def _opened(self, query: OtherEigenvectors) -> torch.Tensor:
        """(r, p, D) of the query's table."""
        start, table = self.cohort.start, query.vectors.table
        if self._pipeline.seal:
            like = start.new_empty(self._count, self._phi.dimension)
            return self._pipeline.seal.open(
                table, query.ids.table.tolist(), query.step, "eigen", "vectors", like
            )
        return self._pipeline.of("vectors").inverse(table.to(start), query.step)

    def _features(self, k: int) -> torch.Tensor:
        """Φ of the samples of the client at position k, (n, D)."""
        noisy = self._noise is not None and not self._noise.naive
        return self._phi(self.cohort.inputs(k), finite=not noisy)

    def _noisy(self, k: int, features: torch.Tensor, noise: GramNoise) -> torch.Tensor:
        """Return the one noisy Gram matrix (D, D) of the client at position k.

        Its noise depends on every bit of the exact matrix. Where this is rounded otherwise, the
        noisy matrix is a new one, and whatever is told of it is a second release.

        Raises:
            PolicyError: the matrix differs from the one that was used before.
        """
        client = self.cohort.ids[k]
        matrix = noise.matrix(features, client)
        found = digest(matrix)
        if self._made.setdefault(k, found) != found:
            raise PolicyError(
                f"client {client}'s noisy Gram matrix came out otherwise than when it was first "
                "used, as on a machine that rounds otherwise, and its noise covers one matrix "
                "only: answer with the data, hardware, software and number of threads of before, "
                "or start a new run"
            )
        return matrix

    def memory(self) -> dict[str, torch.Tensor]:
        """Add digests of the noisy Gram matrices that were used, and their clients' positions."""
        at = sorted(self._made)
        digests = torch.tensor([list(self._made[k]) for k in at], dtype=torch.uint8)
        return {
            **super().memory(),
            "made": digests.view(len(at), DIGEST),
            "made_at": torch.tensor(at, dtype=torch.int64),
        }

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take over what `memory` returned; what was made of other matrices is made again."""
        super().recall(memory)
        digests = [bytes(row) for row in memory["made"].tolist()]
        self._made = dict(zip(memory["made_at"].tolist(), digests, strict=True))
        self._own = {}

    def _released(self, k: int) -> torch.Tensor:
        """The eigenvectors (p, D) that leave the client at position k."""
        vectors = self._spectrum(k)[1]
        return (
            self._noise.blurred(vectors, self.cohort.ids[k])
            if self._noise and self._noise.naive
            else vectors
        )

    def _spectrum(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Eigenvalues (p,) and eigenvectors (p, D) of the client at position k."""
        if k not in self._own:
            features = self._features(k)
            if self._noise is None or self._noise.naive:
                self._own[k] = top(features, self._count)
            else:
                matrix = self._noisy(k, features, self._noise)
                self._own[k] = self._noise.spectrum(matrix, self._count)
        return self._own[k]
