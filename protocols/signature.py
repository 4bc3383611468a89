"""Clusters by private signatures of gradients, then FedAvg in each cluster (not in a paper).

Before any training each client sends a few numbers: a sketch of its clipped gradients at the zero
weights of a softmax regression, or sums of projections by class. With noise, ε is what these few
numbers cost, which is far less than whole updates do.

q: numbers of a sketch; r: projections of a class block; z: noise multiplier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from securecluster.clustering.labels import check_number as check_clusters
from securecluster.clustering.noisy_rows import leading_directions
from securecluster.core.lazy_torch import torch
from securecluster.core.validation import check_choice, check_noise, check_number, check_whole
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Empty, Shared
from securecluster.privacy.masking.masks import build
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.cluster_once import (
    ClusterOnce,
    Collected,
    Signatures,
    check_enough,
)
from securecluster.protocols.common.declaration import protocol
from securecluster.protocols.common.gradient_signatures import (
    AXES,
    BLOCK_CHOICES,
    CLIP,
    BlockSignatures,
    SignatureClient,
    SignatureDirections,
    SignatureOptions,
    SketchSignatures,
    example_map,
    plan_of,
    resolved_signature,
)
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.privacy_spec import FOLLOWS, Disclosures, PrivacySpec
from securecluster.protocols.common.sampling import TRIES
from securecluster.runtime.release_accounting import FieldNoise
from securecluster.runtime.server_channel import ServerChannel
from securecluster.training.local_trainer import LocalTrainer


@protocol
class Signature(ClusterOnce):
    """Clusters by noisy signatures of clients' gradients, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of signatures and updates that the server does not know; it keeps inner products"""
    dp_unit: str = "example"
    """what is protected: client (all data of one) or example (one sample of one client: DP-SGD in
    local training)
    """
    k: int | None = None
    """number of clusters; None finds it by the known size of the noise"""
    signature_noise: float = 0.0
    """noise multiplier of a client's signature, all releases together, for its dp_unit"""
    signature_blocks: str = "auto"
    """what signatures are: plain (a sketch of gradients), blocks (sums by class, for clients with
    different shares of classes), or auto (blocks where the noise is small beside n/C)
    """
    signature_size: int | None = None
    """numbers of a sketch, or projections of a class block; None is 64, or 12"""
    signature_releases: int = 2
    """2 asks sketches with noise again, in the directions in which they differ, with half of the
    noise budget; 1 does not
    """
    signature_centre: float = 0.13
    """public constant that is subtracted from each number of a sample"""

    name: ClassVar[str] = "signature"
    client: ClassVar[type[TrainingClient]] = SignatureClient
    signature: ClassVar[Any] = SignatureClient.send_signature
    # signatures have noise of their own, and examples are clipped in place of signatures
    noises_signatures: ClassVar[bool] = False

    def collect_signatures(
        self, net: ServerChannel, to: Sequence[int], known: Signatures | None = None
    ) -> Collected:
        """Return the signatures of clients, or of newcomers, with what is known of their noise.

        Args:
            net: client ids and the verbs by which the server calls clients.
            to: the clients' numbers.
            known: the signatures of the run, for newcomers.

        Raises:
            UsageError: fewer than two clients of the run sent a signature.
            UpdateError: a newcomer does not reply.
        """
        step = None
        if known is not None:
            step = known.step
        if plan_of(net.agreed).blocks:
            collected = self._collect_blocks(net, to, step)
        else:
            collected = self._collect_sketches(net, to, known)
        if known is None:
            check_enough(len(collected.ids))
        else:
            check_newcomers(to, collected.ids)
        return collected

    def _collect_blocks(self, net: ServerChannel, to: Sequence[int], step: int | None) -> Collected:
        """Return class blocks, as `BlockSignatures` packs them."""
        plan = plan_of(net.agreed)
        method = SignatureClient.send_class_sums
        replies = net.gather(method, Empty(), to=to, step=step, tries=TRIES)
        ids = list(replies.ids)
        if not ids:
            return Collected(ids, torch.zeros(0), replies.step)
        projections = replies.rows.projections.values.cpu().double().numpy()
        shares = replies.rows.shares.values.cpu().double().numpy()
        blocks = np.concatenate([projections, shares[:, :, None]], axis=2)
        signatures = BlockSignatures(
            blocks, plan.deviations(ids, CLIP), plan.examples(ids), plan.size
        )
        return Collected(ids, signatures.packed(), replies.step)

    def _collect_sketches(
        self, net: ServerChannel, to: Sequence[int], known: Signatures | None
    ) -> Collected:
        """Return sketches of one or two releases, as `SketchSignatures` packs them."""
        plan = plan_of(net.agreed)
        step = None
        if known is not None:
            step = known.step
        method = SignatureClient.send_signature
        replies = net.gather(method, Empty(), to=to, step=step, tries=TRIES)
        ids = list(replies.ids)
        if not ids:
            return Collected(ids, torch.zeros(0), replies.step)
        first = replies.rows.signature.values.cpu().double().numpy()
        second = np.zeros((len(ids), 0))
        if plan.releases > 1:
            reference = first
            if known is not None:
                reference = SketchSignatures.unpacked(known.rows).first
            elif len(ids) < 2:
                return Collected(ids, torch.zeros(0), replies.step)
            again = self._second_release(net, ids, reference, replies.step)
            position = {i: n for n, i in enumerate(ids)}
            first = first[[position[i] for i in again.ids]]
            ids = again.ids
            second = again.rows.numpy()
        signatures = SketchSignatures(
            first, second, plan.deviations(ids, CLIP), plan.examples(ids), plan.size
        )
        return Collected(ids, signatures.packed(), replies.step)

    def _second_release(
        self, net: ServerChannel, to: Sequence[int], reference: Any, step: int
    ) -> Collected:
        """Return clients' coordinates in the directions in which reference rows differ.

        Args:
            to: the clients that sent a signature.
            reference: (m, w) signatures of the run's clients.
            step: the call of the signatures.
        """
        directions = torch.from_numpy(leading_directions(reference, AXES))
        dtype = torch.float32
        if net.agreed["dtype"] == "float64":
            dtype = torch.float64
        query = SignatureDirections(Shared(directions.to(dtype)), step)
        replies = net.gather(SignatureClient.send_coordinates, query, to=to, tries=TRIES)
        rows = torch.zeros(0, AXES)
        if replies.ids:
            rows = replies.rows.coordinates.values.cpu().double()
        return Collected(list(replies.ids), rows, replies.step)

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        """Return the cluster of each client.

        Args:
            signatures: (r, ...) as they were packed.
            seed: of the starts of k-means.
        """
        if signatures.ndim == 3:
            return BlockSignatures.unpacked(signatures).comparable().clusters(self.k, seed)
        sketches = SketchSignatures.unpacked(signatures)
        directions = leading_directions(sketches.first, AXES)
        return sketches.comparable(directions).clusters(self.k, seed)

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        """Return the cluster whose members are nearest to each newcomer.

        Args:
            newcomers: (n, ...) as they were packed.
            signatures: (r, ...) of the run's clients.
            labels: (r,) their clusters.
        """
        if signatures.ndim == 3:
            ours = BlockSignatures.unpacked(newcomers).comparable()
            theirs = BlockSignatures.unpacked(signatures).comparable()
            distance = ours.distances(theirs).distance
        else:
            run = SketchSignatures.unpacked(signatures)
            directions = leading_directions(run.first, AXES)
            ours_rows = SketchSignatures.unpacked(newcomers).comparable(directions).values
            rows = run.comparable(directions).values
            difference = ours_rows[:, None] - rows[None]
            distance = np.square(difference).sum(2)
        return _nearest_centres(distance, labels)

    def signature_width(self, federation: Federation) -> int:
        """Return q, or r of class blocks.

        Args:
            federation: the clients and their data.
        """
        return int(self.resolve_defaults(federation)["signature_size"])

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add the numbers of classes and of directions.

        Args:
            config: the run's configuration.
        """
        classes = int(config["classes"])
        return {**super().frame_sizes(config), "classes": classes, "axes": AXES}

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages of updates and of signatures, of either kind.

        Args:
            config: the run's configuration.
        """
        updates = super().pipeline(config)
        blocks = Pipeline(build(self.mask, config["width"]))
        fields = {**updates.fields, "projections": blocks}
        return Pipeline(updates.stages, updates.seal, fields, updates.common)

    def make_client(
        self, cohort: LocalTrainer, pipeline: Pipeline, config: Mapping[str, Any]
    ) -> TrainingClient:
        """Return the clients, with the options of their signatures.

        Args:
            cohort: the clients' data and local training.
            pipeline: the stages between a client's reply and the wire.
            config: the run's configuration.
        """
        plan = plan_of(config)
        draws: Any = None
        if plan.noise:
            draws = cohort.secret
        options = SignatureOptions(
            example_map(config), plan.releases, plan.multiplier, plan.per_client, draws
        )
        return SignatureClient(cohort, self.training(config), pipeline, self.weighted, options)

    def resolve_defaults(self, federation: Federation) -> dict[str, Any]:
        """Add the kind, the size and the noise of signatures.

        Args:
            federation: the clients and their data.
        """
        resolved = super().resolve_defaults(federation)
        noise = self._signature_multiplier(resolved["noise"])
        return resolved | resolved_signature(self, federation, noise)

    def _signature_multiplier(self, noise: float) -> float:
        """Return z of signatures; with a `target_epsilon` it is that of all other noise.

        Args:
            noise: Z.
        """
        if self.target_epsilon is not None:
            return float(noise)
        return float(self.signature_noise)

    def privacy_spec(self, noise: float) -> PrivacySpec:
        """Count a signature, and add the noise of its releases.

        Args:
            noise: Z.
        """
        spec = super().privacy_spec(noise)
        spec = spec.with_releases(replace(spec.releases, signatures=1))
        z = self._signature_multiplier(noise)
        if not z:
            return spec
        field_noise = FieldNoise(z)
        half = field_noise
        if self.signature_releases > 1 and self.dp_unit == "example":
            half = FieldNoise(z * 2**0.5)
        spec = replace(spec, keeps_local_models=True)
        # Projections and shares are one vector with one noise, which `projections` counts.
        return spec.with_fields(
            signature=half, coordinates=half, projections=field_noise, shares=FOLLOWS
        )

    def disclosures(self) -> Disclosures:
        """Return what the server sees of all signatures together, and what ε assumes."""
        shown = super().disclosures()
        server = [*shown.server]
        if self.signature_blocks != "plain":
            server.append("of class blocks, each client's share of each class (with their noise)")
        not_covered = [*shown.not_covered]
        noisy = self.signature_noise > 0 or self.target_epsilon is not None
        if noisy and self.dp_unit == "example":
            not_covered.append("each client's number of samples, by which signatures are divided")
        return replace(shown, server=server, not_covered=not_covered)

    def check(self, clients: int) -> None:
        """Check the options of signatures, too.

        Args:
            clients: m.

        Raises:
            UsageError: an option is out of range, or the noise is given twice.
        """
        super().check(clients)
        check_choice(self, signature_blocks=BLOCK_CHOICES)
        check_noise(self, "signature_noise")
        check_whole(self, signature_releases=1)
        check_number(self, "signature_releases", 1, 2, high_in=True)
        check_number(self, "signature_centre", -1e6, 1e6, high_in=True)
        if self.signature_size is not None:
            check_whole(self, signature_size=1)
        if self.k is not None:
            check_clusters(self.k, clients)
        if self.signature_noise and self.target_epsilon is not None:
            raise UsageError(
                "signature_noise and target_epsilon both say how much noise there is: give one of "
                "them"
            )


def _nearest_centres(distance: Any, labels: Sequence[int]) -> list[int]:
    """Return the cluster of least mean squared distance, (n,).

    The spread of a cluster's own members is the same for all newcomers, so it is not subtracted:
    noise gives clusters equal spreads.

    Args:
        distance: (n, r) squared distances from the run's clients.
        labels: (r,) the clients' clusters.
    """
    clusters = np.asarray(labels)
    means = []
    for cluster in range(max(labels) + 1):
        members = clusters == cluster
        # a cluster may have silent clients alone
        mean = np.full(len(distance), np.inf)
        if members.any():
            mean = distance[:, members].mean(1)
        means.append(mean)
    nearest: list[int] = np.argmin(np.stack(means, 1), 1).tolist()
    return nearest
