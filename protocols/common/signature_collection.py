"""Collection of gradient signatures by the server, and their comparison.

`signature`, and every method with `signature="gradient"`, asks clients and newcomers like this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from securecluster.clustering.noisy_rows import (
    NoisyBlocks,
    NoisyRows,
    centred_products,
    leading_directions,
)
from securecluster.clustering.similarity import FLOOR, cosine
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty, Rows, Shared
from securecluster.messaging.replies import Replies
from securecluster.protocols.common.gradient_signatures import (
    AXES,
    CLIP,
    Array,
    BlockSignatures,
    SignatureDirections,
    SignaturePlan,
    SignatureSender,
    SketchSignatures,
    plan_of,
)
from securecluster.protocols.common.newcomers import check_newcomers
from securecluster.protocols.common.sampling import TRIES
from securecluster.runtime.server_channel import ServerChannel


@dataclass(frozen=True)
class Collected:
    """Signatures that clients sent."""

    ids: list[int]  # the r clients that replied, in the order of the rows
    rows: torch.Tensor  # (r, ...) the signatures, under the mask of their call
    step: int  # the call in which they were received, which determines the mask


def collect_gradient_signatures(
    net: ServerChannel, to: Sequence[int], run_signatures: Collected | None = None
) -> Collected:
    """Return the signatures of clients, or of newcomers, with what is known of their noise.

    Args:
        net: client ids and the verbs by which the server calls clients.
        to: the clients' numbers.
        run_signatures: the signatures of the run, for newcomers.
    """
    plan = plan_of(net.agreed)
    # newcomers' signatures need the mask of the run's, which follows from the step of its call
    step = None if run_signatures is None else run_signatures.step
    method: Any = SignatureSender.send_signature
    if plan.blocks:
        method = SignatureSender.send_class_sums
    replies: Replies[Any] = net.gather(method, Empty(), to=to, step=step, tries=TRIES)
    if not replies.ids:
        return Collected([], torch.zeros(0), replies.step)
    if plan.blocks:
        return _class_blocks(plan, replies)
    return _sketches(net, plan, replies, run_signatures)


def _class_blocks(plan: SignaturePlan, replies: Replies[Any]) -> Collected:
    """Return class blocks, as `BlockSignatures` packs them."""
    ids = list(replies.ids)
    projections = replies.rows.projections.values.cpu().double().numpy()
    shares = replies.rows.shares.values.cpu().double().numpy()
    blocks = np.concatenate([projections, shares[:, :, None]], axis=2)
    examples = _examples(plan, ids, replies.rows.size)
    signatures = BlockSignatures(blocks, plan.deviations(ids, CLIP), examples, plan.size)
    return Collected(ids, signatures.packed(), replies.step)


def _sketches(
    net: ServerChannel, plan: SignaturePlan, replies: Replies[Any], run_signatures: Collected | None
) -> Collected:
    """Return sketches of one or two releases, as `SketchSignatures` packs them."""
    ids = list(replies.ids)
    first = replies.rows.signature.values.cpu().double().numpy()
    examples = _examples(plan, ids, replies.rows.size)
    second = np.zeros((len(ids), 0))
    if plan.releases > 1:
        reference = first
        if run_signatures is not None:
            # newcomers answer in the run's own directions, or their coordinates would not compare
            reference = SketchSignatures.unpacked(run_signatures.rows).first
        elif len(ids) < 2:
            return Collected(ids, torch.zeros(0), replies.step)
        again = _second_release(net, ids, reference, replies.step)
        # Some clients may be lost between the two releases: only those that sent both are kept.
        position = {i: n for n, i in enumerate(ids)}
        kept = [position[i] for i in again.ids]
        first = first[kept]
        examples = examples[kept]
        ids = again.ids
        second = again.rows.numpy()
    signatures = SketchSignatures(first, second, plan.deviations(ids, CLIP), examples, plan.size)
    return Collected(ids, signatures.packed(), replies.step)


def _examples(plan: SignaturePlan, ids: Sequence[int], size: Rows | None) -> Array:
    """Return how many examples clients have, (r,), or what is assumed of it.

    Args:
        plan: of the signatures.
        ids: the clients.
        size: what they sent of it, or None.
    """
    if size is None:
        return plan.examples(ids)
    sizes = size.values.cpu().double().numpy()
    examples: Array = np.maximum(sizes, 1.0)  # a client may have none
    return examples


def _second_release(
    net: ServerChannel, to: Sequence[int], reference: Array, step: int
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
    replies = net.gather(SignatureSender.send_coordinates, query, to=to, tries=TRIES)
    rows = torch.zeros(0, AXES)
    if replies.ids:
        rows = replies.rows.coordinates.values.cpu().double()
    return Collected(list(replies.ids), rows, replies.step)


def comparable(rows: torch.Tensor, reference: torch.Tensor) -> NoisyRows | NoisyBlocks:
    """Return signatures as they are compared, with what is known of their noise.

    Args:
        rows: (m, ...) as they were packed.
        reference: (r, ...) of the run's clients, which give the directions of a second release.
    """
    if rows.ndim == 3:
        return BlockSignatures.unpacked(rows).comparable()
    directions = leading_directions(SketchSignatures.unpacked(reference).first, AXES)
    return SketchSignatures.unpacked(rows).comparable(directions)


def squared_distances(newcomers: torch.Tensor, reference: torch.Tensor) -> Array:
    """Return squared distances of newcomers from the run's clients, less noise, (n, r).

    Args:
        newcomers: (n, ...) as they were packed.
        reference: (r, ...) of the run's clients.
    """
    ours: Any = comparable(newcomers, reference)
    squared: Array = ours.squared_distances(comparable(reference, reference))
    return squared


def centred_cosines(squared: Array, noisy: bool) -> Array:
    """Return cosines of signatures less their mean, (m, m).

    At a stationary point updates have the mean zero; signatures are made to.

    Args:
        squared: (m, m) squared distances less noise, with zeros in the diagonal.
        noisy: whether there was noise, after whose subtraction a row can be next to nothing.
    """
    floor = 0.0
    if noisy:
        floor = FLOOR
    products = torch.from_numpy(centred_products(squared))
    cosines: Array = cosine(products, floor).numpy()
    return cosines


def nearest_on_average(distance: Array, labels: Sequence[int]) -> list[int]:
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


def assign_by_signatures(
    net: ServerChannel, labels: Sequence[int], known: Collected, to: Sequence[int]
) -> list[int]:
    """Return the clusters of newcomers whose members' signatures are nearest on average.

    Args:
        net: a channel to the newcomers.
        labels: (m,) the clusters of the run's clients.
        known: the signatures of the run.
        to: the newcomers' numbers.

    Raises:
        UpdateError: a newcomer does not reply.
    """
    collected = collect_gradient_signatures(net, to, known)
    check_newcomers(to, collected.ids)
    squared = squared_distances(collected.rows, known.rows)
    clusters = nearest_on_average(squared, [labels[i] for i in known.ids])
    cluster_of = dict(zip(collected.ids, clusters, strict=True))
    return [cluster_of[i] for i in to]
