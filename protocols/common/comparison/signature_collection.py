"""Collection of gradient signatures by the server, and their comparison.

`signature`, and every method with `signature="gradient"`, asks clients and newcomers like this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.clustering import noisy_residuals, noisy_rows
from securecluster.clustering.similarity import FLOOR, cosine
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty, Rows, Shared
from securecluster.messaging.replies import Replies
from securecluster.protocols.common.averages.sampling import TRIES
from securecluster.protocols.common.comparison import (
    gradient_signatures,
    packed_signatures,
    signature_plan,
)
from securecluster.protocols.common.messages import empty_tensor
from securecluster.protocols.common.newcomers import check_newcomers

if TYPE_CHECKING:
    from securecluster.runtime.server_channel import ServerChannel

# variance of clients' shares over that of equal shares, from which they are skewed, and in standard
# deviations of what noise gives it
SKEWED = 0.05
SURE = 3.0
# standard deviation of this variance from which shares cannot be read
UNREADABLE = 0.5
# clients from which the number of clusters of residuals without noise is sure
MANY = 16


@dataclass(frozen=True)
class Asked:
    """Request that clients were asked with, and newcomers are asked with, too.

    Attributes:
        kind: of the signatures, its place in `KINDS`.
        centre: that was subtracted from each number.
        means: (C, w) means of classes, under the mask of class sums; empty without residuals.
        means_step: the call of the class sums.
        crowd: (C,) shares of classes over all clients.
        spread: of clients' shares about these, as in `CrowdMeans`.
        shifts: (C, w) what residuals have in common, under their mask.
        directions: (a, C, w) of the second release of residuals, under their mask.
    """

    kind: int = 0
    centre: float = 0.0
    means: torch.Tensor = field(default_factory=empty_tensor)
    means_step: int = 0
    crowd: torch.Tensor = field(default_factory=empty_tensor)
    spread: float = 0.0
    shifts: torch.Tensor = field(default_factory=empty_tensor)
    directions: torch.Tensor = field(default_factory=empty_tensor)

    @property
    def name(self) -> str:
        """Return the name of the kind."""
        return signature_plan.KINDS[self.kind]


@dataclass(frozen=True)
class Collected:
    """Signatures that clients sent."""

    ids: list[int]  # the r clients that replied, in the order of the rows
    rows: torch.Tensor  # (r, ...) the signatures, under the mask of their call
    step: int  # the call in which they were received, which determines the mask
    asked: Asked = field(default_factory=Asked, kw_only=True)
    # (r,) clusters of clients' shares of classes, which class blocks tell; empty without any blocks
    by_shares: list[int] = field(default_factory=list, kw_only=True)

    def doubt(self, labels: Sequence[int]) -> str | None:
        """Return a sentence where shares of classes and a run's clusters disagree.

        Args:
            labels: (m,) the clusters of the run's clients.
        """
        kinds = len(set(self.by_shares))
        found = [labels[i] for i in self.ids]
        if kinds < 2 or len(set(zip(found, self.by_shares, strict=True))) == len(set(found)):
            return None
        return (
            f"clients' shares of classes, which they told for their signatures, form {kinds} "
            f"clusters, and the {len(set(found))} of this run mix them: signatures of the kind "
            f"{self.asked.name} tell other things apart"
        )

    def shortfall(self) -> str:
        """Return in words how far signatures that are one cluster are from several."""
        return comparable(self.rows, self.rows).shortfall()

    @cached_property
    def clusters(self) -> list[int] | None:
        """Return the clusters that residuals of all clients show; None for other kinds."""
        rows = comparable(self.rows, self.rows)
        if not isinstance(rows, noisy_residuals.NoisyResiduals):
            return None
        return rows.clusters(None, 0)


@dataclass(frozen=True)
class _ClassSums:
    """Class blocks that clients sent.

    Attributes:
        ids: of the clients.
        blocks: (m, C, w + 1) projections, under the mask, and counts, over n.
        examples: (m,) numbers of examples, as far as they are public.
        deviations: (m,) of the noise in each number.
        width: r.
        step: the call.
    """

    ids: list[int]
    blocks: signature_plan.Array
    examples: signature_plan.Array
    deviations: signature_plan.Array
    width: int
    step: int

    @cached_property
    def by_shares(self) -> list[int]:
        """Return the clusters of clients' shares, (m,)."""
        return noisy_residuals.share_clusters(self.blocks[:, :, -1], self.deviations, self.examples)

    @property
    def crowd(self) -> noisy_residuals.CrowdMeans:
        """Return what they tell of all clients together."""
        return noisy_residuals.CrowdMeans.of(
            self.blocks, self.deviations, self.examples, self.width
        )

    def of(self, ids: Sequence[int]) -> _ClassSums:
        """Return those of some clients.

        Args:
            ids: their numbers, among `ids`.
        """
        position = {i: n for n, i in enumerate(self.ids)}
        rows = [position[i] for i in ids]
        return replace(
            self,
            ids=list(ids),
            blocks=self.blocks[rows],
            examples=self.examples[rows],
            deviations=self.deviations[rows],
        )


def collect_gradient_signatures(
    net: ServerChannel, to: Sequence[int], run_signatures: Collected | None = None
) -> Collected:
    """Return the signatures of clients, or of newcomers, with what is known of their noise.

    Where nobody declared the centre of the data, clients first tell their mean number. Where the
    kind is to be chosen, class blocks choose it: they tell the shares of classes.

    Args:
        net: client ids and the verbs by which the server calls clients.
        to: the clients' numbers.
        run_signatures: the signatures of the run, for newcomers.
    """
    plan = signature_plan.plan_of(net.agreed)
    run_request = None
    if run_signatures is not None:
        run_request = run_signatures.asked
        signature_kind, centre = run_request.name, run_request.centre
    else:
        centre = _centre(net, plan, to)
        signature_kind = plan.kind
    sums = None
    if signature_kind != signature_plan.PLAIN:
        # newcomers' blocks need the mask of the run's, which follows from the step of its call
        step = None
        if run_signatures is not None and signature_kind == signature_plan.BLOCKS:
            step = run_signatures.step
        sums = _class_sums(net, plan, to, centre, step)
        if not sums.ids:
            return Collected([], torch.zeros(0), sums.step)
        to = sums.ids
        if signature_kind == signature_plan.AUTO:
            signature_kind = _chosen(plan, sums)
    request = Asked(signature_plan.KINDS.index(signature_kind), centre)
    collected = _of_kind(net, plan, to, sums, request, run_signatures)
    if sums is None or run_signatures is not None:
        return collected
    cluster_of = dict(zip(sums.ids, sums.by_shares, strict=True))
    return replace(collected, by_shares=[cluster_of[i] for i in collected.ids])


def _of_kind(
    net: ServerChannel,
    plan: signature_plan.SignaturePlan,
    to: Sequence[int],
    sums: _ClassSums | None,
    request: Asked,
    run_signatures: Collected | None,
) -> Collected:
    """Return the signatures of a kind that was chosen.

    Args:
        net: client ids and the verbs by which the server calls clients.
        plan: of the signatures.
        to: the clients.
        sums: their class blocks, which all kinds but sketches need.
        request: with the kind and the centre.
        run_signatures: the signatures of the run, for newcomers.
    """
    if request.name == signature_plan.PLAIN:
        return _sketches(net, plan, to, request, run_signatures)
    assert sums is not None
    if request.name == signature_plan.BLOCKS:
        signatures = packed_signatures.BlockSignatures(
            sums.blocks, sums.deviations, sums.examples, sums.width
        )
        return Collected(sums.ids, signatures.packed(), sums.step, asked=request)
    return _residuals(net, plan, sums, request, run_signatures)


def _chosen(plan: signature_plan.SignaturePlan, sums: _ClassSums) -> str:
    """Return the kind of signatures that suits clients' shares of classes.

    Where shares form clusters, sketches show these, and what else clients differ in; residuals and
    blocks do not, the less the smaller the noise. Shares were released already. Without noise,
    residuals find most where shares are equal and clients many, and blocks in all other cases. With
    noise, residuals find no less than sketches do, where shares form no clusters. But where it is
    so large beside the classes that their shares cannot be read, neither can the means of classes.

    Args:
        plan: of the signatures.
        sums: class blocks of all clients.
    """
    if max(sums.by_shares):
        return signature_plan.PLAIN
    crowd = sums.crowd
    skewed = crowd.spread > SKEWED and crowd.spread > SURE * crowd.spread_error
    if not plan.noise:
        return signature_plan.BLOCKS if skewed or len(sums.ids) < MANY else signature_plan.RESIDUALS
    if crowd.spread_error > UNREADABLE and not skewed:
        return signature_plan.PLAIN
    return signature_plan.RESIDUALS


def _centre(net: ServerChannel, plan: signature_plan.SignaturePlan, to: Sequence[int]) -> float:
    """Return the centre of the data: as it was declared, or the mean of what clients tell.

    Args:
        plan: of the signatures.
        to: the clients.
    """
    if plan.centre is not None:
        return plan.centre
    replies = net.gather(
        gradient_signatures.SignatureSender.send_mean_number, Empty(), to=to, tries=TRIES
    )
    if not replies.ids:
        return 0.0
    means = replies.rows.mean.values.cpu().double().numpy()[:, 0]
    weights = plan.examples(replies.ids)
    # means are clipped to [−1, 1], whatever noise makes of them
    return float(np.clip(np.average(means, weights=weights), -1.0, 1.0))


def _request(net: ServerChannel, centre: float) -> gradient_signatures.SignatureRequest:
    """Return the request of signatures with a centre."""
    shared_centre = torch.tensor([centre], dtype=_dtype(net))
    return gradient_signatures.SignatureRequest(Shared(shared_centre))


def _dtype(net: ServerChannel) -> torch.dtype:
    """Return the type of the run's numbers."""
    return torch.float64 if net.agreed["dtype"] == "float64" else torch.float32


def _class_sums(
    net: ServerChannel,
    plan: signature_plan.SignaturePlan,
    to: Sequence[int],
    centre: float,
    step: int | None,
) -> _ClassSums:
    """Return class blocks.

    Args:
        plan: of the signatures.
        to: the clients.
        centre: that they subtract.
        step: the call whose mask they use; None for a new one.
    """
    query = _request(net, centre)
    replies: Replies[Any] = net.gather(
        gradient_signatures.SignatureSender.send_class_sums, query, to=to, step=step, tries=TRIES
    )
    ids = list(replies.ids)
    own_kind = plan.may_be(signature_plan.BLOCKS)
    width = plan.block_size
    multiplier = plan.multiplier(signature_plan.BLOCKS) if own_kind else plan.outline_multiplier
    deviations = plan.deviations(ids, multiplier)
    if not ids:
        empty = np.zeros(0)
        return _ClassSums(ids, np.zeros((0, 1, 1)), empty, deviations, width, replies.step)
    projections = replies.rows.projections.values.cpu().double().numpy()
    shares = replies.rows.shares.values.cpu().double().numpy()
    blocks = np.concatenate([projections, shares[:, :, None]], axis=2)
    examples = _examples(plan, ids, replies.rows.size)
    return _ClassSums(ids, blocks, examples, deviations, width, replies.step)


def _residuals(
    net: ServerChannel,
    plan: signature_plan.SignaturePlan,
    sums: _ClassSums,
    request: Asked,
    run_signatures: Collected | None,
) -> Collected:
    """Return residuals of two releases, as `ResidualSignatures` packs them.

    Args:
        plan: of the signatures.
        sums: class blocks of the clients.
        request: with the kind and the centre.
        run_signatures: the signatures of the run, for newcomers.
    """
    crowd = sums.crowd
    step = None
    if run_signatures is None:
        means = torch.from_numpy(crowd.means)
        of_all = torch.from_numpy(crowd.crowd)
        request = replace(
            request, means=means, means_step=sums.step, crowd=of_all, spread=crowd.spread
        )
    else:
        request = run_signatures.asked
        step = run_signatures.step
        of_run = request.crowd.numpy()
        shares = noisy_residuals.shares_of(sums.blocks, sums.deviations, of_run, request.spread)
        crowd = replace(crowd, crowd=of_run, shares=shares)
    shared_means = Shared(request.means.to(_dtype(net)))
    query = gradient_signatures.ClassMeans(shared_means, request.means_step)
    replies: Replies[Any] = net.gather(
        gradient_signatures.SignatureSender.send_residuals,
        query,
        to=sums.ids,
        step=step,
        tries=TRIES,
    )
    ids = list(replies.ids)
    if not ids or (run_signatures is None and len(ids) < 2):
        return Collected(ids, torch.zeros(0), replies.step)
    position = {i: n for n, i in enumerate(sums.ids)}
    crowd = crowd.select([position[i] for i in ids])
    rows = replies.rows.residuals.values.cpu().double().numpy()
    deviations = plan.deviations(ids, plan.multiplier(signature_plan.RESIDUALS))
    if run_signatures is None:
        rows, shifts = noisy_residuals.without_common(rows, deviations, crowd, sums.width)
        flat = noisy_rows.leading_directions(rows.reshape(len(ids), -1), plan.axes)
        directions = torch.from_numpy(flat.reshape(plan.axes, *rows.shape[1:]))
        request = replace(request, shifts=torch.from_numpy(shifts), directions=directions)
    else:
        rows = rows - crowd.shares[:, :, None] * request.shifts.numpy()
    again = _residual_coordinates(net, request, ids, replies.step)
    retained = [ids.index(i) for i in again.ids]
    if not retained:
        return Collected([], torch.zeros(0), replies.step)
    # beyond the rank of the rows there are no directions
    nonzero = request.directions.flatten(1).any(1).numpy()
    directions_used = request.directions.numpy()[nonzero]
    signatures = packed_signatures.ResidualSignatures(
        np.einsum("icw,acw->ia", rows[retained], directions_used),
        again.rows.numpy()[:, nonzero],
        noisy_residuals.designs(crowd.select(retained).ratios, directions_used),
        deviations[retained],
        sums.of(again.ids).examples,
    )
    return Collected(again.ids, signatures.packed(), replies.step, asked=request)


def _residual_coordinates(
    net: ServerChannel, request: Asked, to: Sequence[int], step: int
) -> Collected:
    """Return clients' coordinates in the directions in which residuals differ.

    Args:
        request: with means, shifts and directions.
        to: the clients that sent residuals.
        step: the call of the run's residuals.
    """
    dtype = _dtype(net)
    query = gradient_signatures.ResidualDirections(
        Shared(request.directions.to(dtype)),
        Shared(request.shifts.to(dtype)),
        step,
        Shared(request.means.to(dtype)),
        request.means_step,
    )
    replies = net.gather(
        gradient_signatures.SignatureSender.send_residual_coordinates, query, to=to, tries=TRIES
    )
    rows = torch.zeros(0, len(request.directions))
    if replies.ids:
        rows = replies.rows.coordinates.values.cpu().double()
    return Collected(list(replies.ids), rows, replies.step)


def _sketches(
    net: ServerChannel,
    plan: signature_plan.SignaturePlan,
    to: Sequence[int],
    request: Asked,
    run_signatures: Collected | None,
) -> Collected:
    """Return sketches of one or two releases, as `SketchSignatures` packs them."""
    # newcomers' signatures need the mask of the run's, which follows from the step of its call
    step = None if run_signatures is None else run_signatures.step
    query = _request(net, request.centre)
    replies: Replies[Any] = net.gather(
        gradient_signatures.SignatureSender.send_signature, query, to=to, step=step, tries=TRIES
    )
    ids = list(replies.ids)
    if not ids:
        return Collected([], torch.zeros(0), replies.step)
    first = replies.rows.signature.values.cpu().double().numpy()
    examples = _examples(plan, ids, replies.rows.size)
    deviations = plan.deviations(ids, plan.multiplier(signature_plan.PLAIN))
    width = plan.sizes_of_kinds[signature_plan.PLAIN]
    second = np.zeros((len(ids), 0))
    if plan.releases(signature_plan.PLAIN) > 1:
        reference = first
        if run_signatures is not None:
            # newcomers answer in the run's own directions, or their coordinates would not compare
            of_run = packed_signatures.SketchSignatures.unpacked(run_signatures.rows)
            reference = of_run.first
            count = of_run.second.shape[1]
        elif len(ids) < 2:
            return Collected(ids, torch.zeros(0), replies.step)
        else:
            count = _directions_for(net, plan, first, float(deviations.mean()), width)
        again = _second_release(net, ids, reference, replies.step, count)
        # Some clients may be lost between the two releases: only those that sent both are kept.
        position = {i: n for n, i in enumerate(ids)}
        retained = [position[i] for i in again.ids]
        first = first[retained]
        examples = examples[retained]
        deviations = deviations[retained]
        ids = again.ids
        second = again.rows.numpy()
    signatures = packed_signatures.SketchSignatures(first, second, deviations, examples, width)
    return Collected(ids, signatures.packed(), replies.step, asked=request)


def _directions_for(
    net: ServerChannel,
    plan: signature_plan.SignaturePlan,
    rows: signature_plan.Array,
    deviation: float,
    width: int,
) -> int:
    """Return in how many directions sketches are asked again.

    That is one fewer than clusters are wanted, or than noisy rows show, and `AXES` at least.

    Args:
        plan: of the signatures.
        rows: (m, w) the first release.
        deviation: of the noise in each number.
        width: q.
    """
    directions = int(net.agreed.get("k") or 0) - 1
    if directions < 0:
        singular = np.linalg.svd(rows - rows.mean(0), compute_uv=False)
        edge = deviation * (math.sqrt(len(rows)) + math.sqrt(width))
        directions = int((singular > edge).sum()) + 1
    return min(plan.axes, max(signature_plan.AXES, directions))


def _examples(
    plan: signature_plan.SignaturePlan, ids: Sequence[int], size: Rows | None
) -> signature_plan.Array:
    """Return how many examples clients have, (r,), or what is assumed of it.

    Args:
        plan: of the signatures.
        ids: the clients.
        size: what they sent of it, or None.
    """
    if size is None:
        return plan.examples(ids)
    sizes = size.values.cpu().double().numpy()
    examples: signature_plan.Array = np.maximum(sizes, 1.0)  # a client may have none
    return examples


def _second_release(
    net: ServerChannel, to: Sequence[int], reference: signature_plan.Array, step: int, count: int
) -> Collected:
    """Return clients' coordinates in the directions in which reference rows differ.

    Args:
        to: the clients that sent a signature.
        reference: (m, w) signatures of the run's clients.
        step: the call of the signatures.
        count: number of directions; the others that the message has room for are zeros.
    """
    room = signature_plan.axes_of(net.agreed)
    directions = np.zeros((room, reference.shape[1]))
    directions[:count] = noisy_rows.leading_directions(reference, count)
    shared_directions = torch.from_numpy(directions).to(_dtype(net))
    query = gradient_signatures.SignatureDirections(Shared(shared_directions), step)
    replies = net.gather(
        gradient_signatures.SignatureSender.send_coordinates, query, to=to, tries=TRIES
    )
    rows = torch.zeros(0, count)
    if replies.ids:
        rows = replies.rows.coordinates.values.cpu().double()[:, :count]
    return Collected(list(replies.ids), rows, replies.step)


def comparable(
    rows: torch.Tensor, reference: torch.Tensor
) -> noisy_rows.NoisyRows | noisy_rows.NoisyBlocks | noisy_residuals.NoisyResiduals:
    """Return signatures as they are compared, with what is known of their noise.

    Args:
        rows: (m, ...) as they were packed.
        reference: (r, ...) of the run's clients, which give the directions of a second release.
    """
    directions = None
    if packed_signatures.is_sketch(reference):
        signatures = packed_signatures.SketchSignatures.unpacked(reference)
        directions = noisy_rows.leading_directions(signatures.first, signatures.second.shape[1])
    return packed_signatures.compared(rows, directions)


def squared_distances(newcomers: torch.Tensor, reference: torch.Tensor) -> signature_plan.Array:
    """Return squared distances of newcomers from the run's clients, less noise, (n, r).

    Args:
        newcomers: (n, ...) as they were packed.
        reference: (r, ...) of the run's clients.
    """
    ours: Any = comparable(newcomers, reference)
    squared: signature_plan.Array = ours.squared_distances(comparable(reference, reference))
    return squared


def centred_cosines(squared: signature_plan.Array, noisy: bool) -> signature_plan.Array:
    """Return cosines of signatures less their mean, (m, m).

    At a stationary point updates have the mean zero; signatures are made to.

    Args:
        squared: (m, m) squared distances less noise, with zeros in the diagonal.
        noisy: whether there was noise, after whose subtraction a row can be next to nothing.
    """
    floor = 0.0
    if noisy:
        floor = FLOOR
    products = torch.from_numpy(noisy_rows.centred_products(squared))
    cosines: signature_plan.Array = cosine(products, floor).numpy()
    return cosines


def nearest_on_average(distance: signature_plan.Array, labels: Sequence[int]) -> list[int]:
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
    net: ServerChannel, labels: Sequence[int], run_signatures: Collected, to: Sequence[int]
) -> list[int]:
    """Return the clusters of newcomers whose members' signatures are nearest on average.

    Args:
        net: a channel to the newcomers.
        labels: (m,) the clusters of the run's clients.
        run_signatures: the signatures of the run.
        to: the newcomers' numbers.

    Raises:
        UpdateError: a newcomer does not reply.
    """
    collected = collect_gradient_signatures(net, to, run_signatures)
    check_newcomers(to, collected.ids)
    squared = squared_distances(collected.rows, run_signatures.rows)
    clusters = nearest_on_average(squared, [labels[i] for i in run_signatures.ids])
    cluster_of = dict(zip(collected.ids, clusters, strict=True))
    return [cluster_of[i] for i in to]
