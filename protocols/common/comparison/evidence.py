"""What a server compares clients by: updates, compressed updates, full gradients or signatures.

A method asks its clients for evidence, and clusters them by its similarities or distances. It need
not know which kind of evidence that is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.bipartition import Bipartition
from securecluster.clustering.distances import alike, distances
from securecluster.clustering.landmarks import extended_halves, extended_labels
from securecluster.clustering.noisy_residuals import NoisyResiduals
from securecluster.clustering.noisy_rows import NoisyBlocks, NoisyRows
from securecluster.clustering.similarity import FLOOR, cosine, gram, gram_norms, row_norms
from securecluster.core.lazy_torch import torch
from securecluster.messaging.replies import Replies
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.averages.sampling import TRIES, sample_landmarks
from securecluster.protocols.common.comparison import signature_collection
from securecluster.protocols.common.comparison.compressed_updates import (
    CompressedUpdate,
    updates_of,
)
from securecluster.protocols.common.messages import empty_tensor

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Evidence(ABC):
    """Values that r clients sent to be compared.

    Attributes:
        ids: the r clients, in the order of their rows.
        step: the call whose mask their updates carry.
    """

    ids: list[int]
    step: int = field(default=0, kw_only=True)

    of_round: ClassVar[bool]
    """Whether each round has evidence of its own, of the current models. Otherwise clients send it
    once, and one that did not never will."""

    @property
    def updates(self) -> torch.Tensor:
        """Return the rows (r, d) that newcomers' updates are compared with; empty by default."""
        return empty_tensor()

    @abstractmethod
    def select(self, clients: Sequence[int]) -> Self:
        """Return the evidence of some clients, without those that sent none.

        Args:
            clients: their numbers.
        """

    def landmarks(self, net: ServerChannel, count: int | None, *path: int) -> Self:
        """Return the evidence of a random sample of the clients, for clusters of all.

        Args:
            net: draws the sample.
            count: the number of clients; None for all.
            path: names the draw, such as by round and cluster.
        """
        if count is None or count >= len(self.ids):
            return self
        return self.select(sample_landmarks(net, self.ids, count, *path))

    @abstractmethod
    def similarities(self, metric: str = "cosine") -> Array:
        """Return similarities, (r, r).

        Args:
            metric: of updates, one of `distances.METRICS`.
        """

    @abstractmethod
    def distances(self, metric: str) -> Array:
        """Return distances, (r, r).

        Args:
            metric: of updates, one of `distances.METRICS`.
        """

    def count(self) -> int | None:
        """Return the number of clusters by the noise; None where its size does not tell it."""
        return None

    def sides(self, compared: Evidence, sides: Bipartition) -> tuple[list[int], list[int]]:
        """Return the clients of each half.

        Args:
            compared: the clients that were split: all, or `landmarks`.
            sides: by position among these.
        """
        return [self.ids[k] for k in sides.first], [self.ids[k] for k in sides.second]

    def labels(
        self, compared: Evidence, labels: Sequence[int], metric: str, linkage: str
    ) -> list[int]:
        """Return the clusters of all clients, (r,).

        Args:
            compared: the clients that were clustered: all, or `landmarks`.
            labels: their clusters.
            metric: of updates.
            linkage: by which other clients join clusters.
        """
        return list(labels)


@dataclass(frozen=True, eq=False)
class UpdateEvidence(Evidence):
    """Updates, whole or compressed, or full gradients, under the mask of one call.

    Attributes:
        table: (·, d) rows of these clients, and maybe of others.
        positions: (r,) the clients' rows of the table.
        noise: expected squared norm of the noise in each row.
        floor: share of the median norm below which no norm counts in a cosine: subtracting the
            noise can leave a squared norm near zero, or below it.
    """

    table: torch.Tensor
    positions: list[int]
    noise: float = 0.0
    floor: float = 0.0

    of_round: ClassVar[bool] = True

    @classmethod
    def of(cls, net: ServerChannel, replies: Replies[Any], *trains: str) -> Self:
        """Return what clients replied, as evidence.

        Args:
            net: tells the size of the noise.
            replies: updates, compressed updates or gradients.
            trains: the kind of training that they come from, if it is not the usual one.
        """
        ids = list(replies.ids)
        if not ids:
            return cls(ids, torch.zeros(0, 0), [], step=replies.step)
        noised = "compressed" if isinstance(replies.rows, CompressedUpdate) else "delta"
        noise = net.noise(noised, *trains)
        floor = FLOOR if noise else 0.0
        positions = list(range(len(ids)))
        return cls(ids, updates_of(replies), positions, noise, floor, step=replies.step)

    @classmethod
    def of_all_clients(
        cls, net: ServerChannel, outbox: PendingUpdates, ask: Callable[..., Any]
    ) -> Self:
        """Ask all clients, and those that do not reply again, under the mask of the first call.

        Args:
            net: the server's channel.
            outbox: the averages that clients may lack.
            ask: the client method, which returns updates or compressed updates.
        """
        collected: list[Self] = []
        silent = list(net.clients)
        step: int | None = None
        for _ in range(TRIES):
            if not silent:
                break
            query = outbox.message_for(silent)
            replies: Replies[Any] = net.gather(ask, query, to=silent, step=step)
            step = replies.step
            outbox.acknowledge(replies.ids)
            collected.append(cls.of(net, replies))
            silent = [i for i in silent if i not in replies.ids]
        nonempty = [evidence for evidence in collected if evidence.ids]
        if len(nonempty) < 2:
            return (nonempty or collected)[0]
        ids = [i for evidence in nonempty for i in evidence.ids]
        order = sorted(range(len(ids)), key=ids.__getitem__)
        table = torch.cat([evidence.table for evidence in nonempty])
        return replace(nonempty[0], ids=sorted(ids), table=table, positions=order)

    def select(self, clients: Sequence[int]) -> Self:
        """Return the evidence of some clients, without those that sent none.

        Args:
            clients: their numbers.
        """
        selected = set(clients)
        chosen = [k for k, i in enumerate(self.ids) if i in selected]
        ids = [self.ids[k] for k in chosen]
        positions = [self.positions[k] for k in chosen]
        return replace(self, ids=ids, positions=positions)

    @property
    def updates(self) -> torch.Tensor:
        """Return the rows, (r, d)."""
        if self.positions == list(range(len(self.table))):
            return self.table
        return self.table[self.positions]

    @cached_property
    def inner(self) -> torch.Tensor:
        """Return the Gram matrix of the rows without noise, (r, r)."""
        return gram(self.table, self.positions, self.noise)

    def norms(self, compared: UpdateEvidence) -> torch.Tensor:
        """Return the norms of the rows without noise, (r,).

        Args:
            compared: these clients, or `landmarks`; only their Gram matrix is computed.
        """
        if compared is self:
            return gram_norms(self.inner)
        return row_norms(self.table, self.positions, self.noise)

    def similarities(self, metric: str = "cosine") -> Array:
        """Return similarities that suit a metric, (r, r).

        Args:
            metric: one of `distances.METRICS`.
        """
        if metric in ("cosine", "chord"):
            similarity = cosine(self.inner, self.floor)
        else:
            similarity = alike(self.updates, metric, self.noise)
        array: Array = similarity.cpu().numpy()
        return array

    def distances(self, metric: str) -> Array:
        """Return distances without the part that noise adds to them, (r, r).

        Args:
            metric: one of `distances.METRICS`.
        """
        array: Array = distances(self.updates, metric, self.noise).cpu().numpy()
        return array

    def sides(self, compared: Evidence, sides: Bipartition) -> tuple[list[int], list[int]]:
        """Return the clients of each half; others join that of the landmark most similar to them.

        Args:
            compared: the clients that were split: all, or `landmarks`.
            sides: by position among these.
        """
        if compared is self:
            return super().sides(compared, sides)
        first, second = extended_halves(self.updates, self._positions_of(compared), sides)
        return [self.ids[k] for k in first], [self.ids[k] for k in second]

    def labels(
        self, compared: Evidence, labels: Sequence[int], metric: str, linkage: str
    ) -> list[int]:
        """Return the clusters of all clients, (r,); others join that of the nearest landmarks.

        Args:
            compared: the clients that were clustered: all, or `landmarks`.
            labels: their clusters.
            metric: one of `distances.METRICS`.
            linkage: by which other clients join clusters.
        """
        if compared is self:
            return super().labels(compared, labels, metric, linkage)
        landmarks = self._positions_of(compared)
        return extended_labels(self.updates, landmarks, labels, metric, linkage, self.noise)

    def _positions_of(self, compared: Evidence) -> list[int]:
        """Return the positions in `ids` of other evidence's clients."""
        position = {i: k for k, i in enumerate(self.ids)}
        return [position[i] for i in compared.ids]


@dataclass(frozen=True, eq=False)
class SignatureEvidence(Evidence):
    """Gradient signatures (not in the papers).

    They are of one public model in every round, and the mean of the compared clients' is
    subtracted. So they stand for updates at a stationary point (Σ a_l·v_l = 0) from the first round
    on.

    Attributes:
        signatures: of these clients, and maybe of others.
    """

    signatures: signature_collection.Collected

    of_round: ClassVar[bool] = False

    @classmethod
    def of(cls, signatures: signature_collection.Collected) -> Self:
        """Return the signatures of all clients that sent one, as evidence.

        Args:
            signatures: as they were collected.
        """
        return cls(signatures.ids, signatures)

    def select(self, clients: Sequence[int]) -> Self:
        """Return the evidence of some clients, without those that sent none.

        Args:
            clients: their numbers.
        """
        sent = set(self.ids)
        return replace(self, ids=[i for i in clients if i in sent])

    @cached_property
    def _rows(self) -> NoisyRows | NoisyBlocks | NoisyResiduals:
        """Return the signatures with what is known of their noise."""
        position = {i: n for n, i in enumerate(self.signatures.ids)}
        rows = self.signatures.rows
        return signature_collection.comparable(rows, rows).select([position[i] for i in self.ids])

    @cached_property
    def _squared(self) -> Array:
        """Return squared distances less noise, (r, r)."""
        return self._rows.pair_distances()

    def similarities(self, metric: str = "cosine") -> Array:
        """Return the cosines of signatures less the mean of these clients', (r, r).

        Args:
            metric: without effect.
        """
        return signature_collection.centred_cosines(self._squared, self._rows.noisy)

    def distances(self, metric: str) -> Array:
        """Return L2 distances, (r, r).

        Args:
            metric: without effect: signatures are means of clipped rows, so all have one scale.
        """
        distance: Array = np.sqrt(self._squared)
        return distance

    def count(self) -> int | None:
        """Return the number of clusters by the known size of the noise; None without noise.

        Residuals of few clients tell little of what sampling adds, so theirs are those clusters of
        all clients to which some of these belong.
        """
        if not self._rows.noisy:
            return None
        clusters = self.signatures.clusters
        if clusters is None:
            return self._rows.count()
        cluster_of = dict(zip(self.signatures.ids, clusters, strict=True))
        return len({cluster_of[i] for i in self.ids})
