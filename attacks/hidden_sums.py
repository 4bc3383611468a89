"""Differencing attacks on the hidden protocol, by a server that subtracts two sums.

The server of `hidden` reads nothing but sums over clients. If two groups differ in one client,
their sums differ by this client's contribution (Denning 1980, on trackers). Clients refuse such
groups within a call, and of points, moments, cells and steps within a run; but an honest server
gets them from two runs, before and after a client leaves or joins. Without noise the difference
reveals:

- from points: the client's point, exactly, since it is a function of the client's data alone; and,
  with the public centres, its cluster, by the rule that the client itself follows. With residuals,
  points depend on an earlier sum, and the sum of their parts takes their place. Where label maps
  are sought, so does the first sum of class means, whose labels no sum tells
- from blocks of the first round: the client's weighted update, since the sum over all blocks holds
  the updates of all clients from θ_0, whatever cluster each is in; and its number of samples, from
  the difference of the weights. The update gives away what any single update does: label counts,
  and which samples the client trains on.

Second moments, cells and steps are not subtracted: they depend on the results of earlier sums,
which differ between two runs. Noise in the sums stays in the difference, √2 times as large.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from securecluster.attacks import label_counts, signatures
from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import (
    NO_SAMPLES,
    TAPS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.attacks.scoring import AgainstOthers, cosine
from securecluster.clustering import noisy_centres
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows
from securecluster.models.per_example_gradients import Each, Outer
from securecluster.runtime.endpoint import SUM

POINT = "point"  # fields of sums
PARTS = "parts"
ANCHORS = "anchors"
BLOCKS = "blocks"
SOURCE = "Denning 1980, on trackers; on these sums not in a paper"
NEEDS = "sums over two groups that differ in one client, such as those of a run before it left"
NO_PAIR = "not applicable: no two sums over groups that differ in one client were observed"
FIRST_ROUND = 1
ROUNDING = 1e-9  # singular values, relative to the largest, below which they are rounding
MOST_DIRECTIONS = 128  # of gradients, in which candidates are compared
MOST_AT_ONCE = 2**18  # numbers of the gradients that are taken at once, which a cache holds


@dataclass(frozen=True)
class ObservedSum:
    """A sum of the hidden protocol.

    Attributes:
        field: of the message.
        round: the protocol's round; 0 before the first one.
        step: number of the call.
        members: the clients.
        values: the sum, flat.
        weight: summed numbers of samples; None where there are none.
    """

    field: str
    round: int
    step: int
    members: frozenset[int]
    values: Array
    weight: float | None


@dataclass(frozen=True)
class Difference:
    """Contribution of one client to a sum.

    Attributes:
        step: number of the call of the larger sum.
        values: of the client's row, flat.
        weight: its number of samples; None where it is not summed.
    """

    step: int
    values: Array
    weight: float | None


class TwoSums(Attack):
    """Base class of attacks that subtract two sums of the hidden protocol.

    Args:
        second: by client, the view of another run with the same configuration without it. Its
            other clients are numbered from 0 in the same order.

    Attributes:
        protocol: name of the protocol.
        field: of the message whose sums are subtracted.
    """

    source = SOURCE
    protocol: ClassVar[str] = "hidden"
    field: ClassVar[str] = POINT

    def __init__(self, second: Mapping[int, View] | None = None) -> None:
        self.second = dict(second or {})

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.protocol != self.protocol:
            return "not applicable: clients are not clustered by sums of hidden"
        if self.field == BLOCKS and knowledge.mask != "none":
            return "not applicable: updates are under masks, which are not those of another sum"
        if not self.differences(view):
            return NO_PAIR
        return None

    def subtracted(self, view: View) -> str:
        """Return the field whose sums are subtracted.

        Args:
            view: what the adversary observed.
        """
        if self.field == POINT:
            for field in (PARTS, ANCHORS):
                if any(_sums(view, field)):
                    return field
        return self.field

    def differences(self, view: View) -> dict[int, Difference]:
        """Return by client what it added to the first sum that is known with and without it.

        Args:
            view: what the adversary observed.
        """
        field = self.subtracted(view)
        sums = list(_sums(view, field))
        # A second run numbers its clients anew from 0: undo this before comparing members.
        candidates = [*sums]
        for client, second_view in self.second.items():
            for observed in _sums(second_view, field):
                members = _numbers_before(observed.members, client)
                candidates.append(replace(observed, members=members))
        by_client: dict[int, Difference] = {}
        for larger in sums:
            for smaller in candidates:
                missing = larger.members - smaller.members
                if len(missing) != 1 or not smaller.members < larger.members:
                    continue
                # other clients' terms cancel only if both sums are of the same round
                if smaller.round == larger.round:
                    (client,) = missing
                    by_client.setdefault(client, _difference(larger, smaller))
        return dict(sorted(by_client.items()))


class RecoveredPoints(AgainstOthers):
    """Cosine of recovered points with the true ones."""

    metric = "cosine of the recovered point with the true one"

    def others(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> list[int]:
        """Return for each client of a guess any other one that sent a point.

        Args:
            guess: points by client.
            truth: of the run, with taps.
            draw: source of the other clients.
        """
        # Points of all clients have a common part: only what goes beyond it is a success.
        clients = list(_true_points(truth))
        others = []
        for client in guess.values:
            possible = [other for other in clients if other != client]
            chosen = draw.integers(len(possible))
            others.append(possible[chosen])
        return others

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the cosine of each guess with a client's point, (n,).

        Args:
            guess: points by client.
            truth: of the run, with taps.
            subjects: clients, one for each guess.
        """
        points = _true_points(truth)
        cosines = [cosine(row, points[client].ravel()) for row, client in guess.beside(subjects)]
        return np.asarray(cosines)


class RightClusters(Scorer):
    """Share of clients whose cluster is guessed.

    The true cluster of a client is the block that its update is in, which no server reads.
    """

    metric = "share of clusters guessed"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each right cluster and 0 for each wrong one, (n,).

        Args:
            guess: clusters by client.
            truth: of the run, with taps.
        """
        guessed, true = self._clusters(guess, truth)
        return np.asarray(guessed == true, dtype=float)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for shuffled clients.

        Args:
            guess: clusters by client.
            truth: of the run, with taps.
            draw: source of the shuffle.
        """
        guessed, true = self._clusters(guess, truth)
        return np.asarray(guessed == draw.permutation(true), dtype=float)

    def _clusters(self, guess: Guess, truth: Truth) -> tuple[Array, Array]:
        """Return the guessed and the true clusters of the clients that have one."""
        blocks = _true_rows(truth, BLOCKS)
        guessed = []
        true = []
        for client, cluster in guess.values.items():
            if client not in blocks:
                continue
            # A client fills the block of its own cluster and leaves the others at zero, or sends
            # zeros alone where too few others are in it.
            magnitudes = np.abs(blocks[client]).sum(1)
            if not magnitudes.any():
                continue
            guessed.append(cluster)
            filled = int(magnitudes.argmax())
            true.append(filled)
        return np.asarray(guessed), np.asarray(true)


class HiddenDifferencing(TwoSums):
    """Points of single clients, recovered by subtracting sums of points."""

    name = "hidden-differencing"
    learns = "the point of a single client"
    harm = Harm.MESSAGES
    needs = NEEDS
    scorer = RecoveredPoints()
    requires = (TAPS,)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return recovered points (q,) by client, or their parts, flat.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        points = {}
        for client, difference in self.differences(view).items():
            points[client] = difference.values.ravel()
        return Guess("points", points)


class HiddenCluster(TwoSums):
    """Clusters that single clients assign themselves to, from their recovered points."""

    name = "hidden-cluster"
    learns = "which cluster a client belongs to"
    harm = Harm.GROUPS
    needs = f"{NEEDS}, and the public centres"
    scorer = RightClusters()
    requires = (TAPS,)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        reason = super().applies(view, knowledge)
        if reason is None and _public_centres(view) is None:
            return "not applicable: the centres were not observed"
        return reason

    def subtracted(self, view: View) -> str:
        """Return the field of what clients assign themselves by.

        Args:
            view: what the adversary observed.
        """
        return PARTS if any(_sums(view, PARTS)) else POINT

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed cluster by client: that of the nearest centre.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        public = _public_centres(view)
        assert public is not None
        mean, basis, centres, mean_parts = public
        # The steps below are those by which a client assigns itself.
        guesses = {}
        for client, difference in self.differences(view).items():
            row = difference.values[None]
            if mean_parts is None:
                point = noisy_centres.unit(row)
            else:
                point = noisy_centres.residuals(row, mean_parts)
            directions = noisy_centres.directions_from(point, mean)
            coordinates = noisy_centres.projections(directions, basis)
            (nearest,) = noisy_centres.nearest_centres(coordinates, centres)
            guesses[client] = int(nearest)
        return Guess("clusters", guesses)


class HiddenLabelCounts(TwoSums):
    """Counts of single clients' labels, from their recovered first updates."""

    name = "hidden-label-counts"
    learns = "how many samples of each label a client holds"
    harm = Harm.CONTENTS
    source = (
        f"{SOURCE}; Geng et al. 2021, Towards General Deep Leakage in Federated Learning, for the "
        "counts"
    )
    needs = f"{NEEDS}, of a first round's updates without a mask, and the learning rate"
    scorer = label_counts.MisplacedLabels()
    field = BLOCKS

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if label_counts.last_bias(knowledge) is None:
            return label_counts.NO_BIAS
        return super().applies(view, knowledge)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed counts by client; shares of 1 where sizes are not summed.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        prediction = label_counts.mean_prediction(knowledge)
        lr = float(knowledge.config["lr"])
        guesses: dict[int, Array] = {}
        for client, difference in self.differences(view).items():
            update = _update(difference, knowledge)
            # Δb/η is about −steps·∂L/∂b, from which counts follow as in `label_counts`
            gradients = label_counts.bias_of(knowledge, update) / lr
            size = _whole_size(difference)
            guesses[client] = label_counts.guessed_counts(knowledge, prediction, gradients, size)
        return Guess("label counts", guesses)


class HiddenMembership(TwoSums):
    """Membership of candidates in single clients' data, by their share in its recovered update.

    The update is about −η times the mean gradient of the client's samples at θ_0, for each step. To
    this a candidate compares its own gradient, as to a signature (`attacks.signatures`).
    """

    name = "hidden-membership"
    learns = "whether a record is in a client's data"
    harm = Harm.MEMBERS
    source = f"{SOURCE}; Dwork et al. 2015, Robust Traceability from Trace Amounts, for membership"
    needs = (
        f"{NEEDS}, of a first round's updates without a mask, and candidate samples, of which some "
        "may be clients' own"
    )
    scorer = signatures.OwnSampleMembership()
    field = BLOCKS

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.samples is None:
            return NO_SAMPLES
        return super().applies(view, knowledge)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the log-likelihood ratio of each candidate by client, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        gradients = candidate_gradients(knowledge)
        # A covariance in d dimensions cannot be estimated from a few hundred candidates.
        basis = _leading_rows(gradients, MOST_DIRECTIONS)
        labels = knowledge.labels.astype(np.int64)
        public = signatures.PublicRows(gradients @ basis.T, labels, knowledge.classes)
        lr = float(knowledge.config["lr"])
        guesses = {}
        for client, difference in self.differences(view).items():
            size = _whole_size(difference) or signatures.TYPICAL_SIZE
            # An update is −η times a sum of mean gradients; `mean_ratios` allows for its scale.
            mean_gradient = -_update(difference, knowledge).numpy() / lr
            row = basis @ mean_gradient
            guesses[client] = signatures.mean_ratios(row, public, size, 0.0)
        details = {"candidates": knowledge.inputs}
        return Guess(signatures.OWN_MEMBERSHIP, guesses, details)


def candidate_gradients(knowledge: Knowledge) -> Array:
    """Return the gradient of each candidate's loss at θ_0, (candidates, d).

    Args:
        knowledge: with the candidates as its samples.
    """
    return as_array(torch.cat(list(gradient_blocks(knowledge))))


def gradient_blocks(knowledge: Knowledge) -> Iterator[torch.Tensor]:
    """Yield the same gradients for a few candidates at a time, (b, d).

    Args:
        knowledge: with the candidates as its samples.
    """
    network = knowledge.network
    inputs = torch.as_tensor(knowledge.inputs).to(knowledge.initial)
    labels = torch.as_tensor(knowledge.labels)
    at_once = max(1, MOST_AT_ONCE // knowledge.dimension) if network.together else 1
    for x, y in zip(torch.split(inputs, at_once), torch.split(labels, at_once), strict=True):
        if network.stack is not None:
            # fused layers overwrite their samples
            parameters = knowledge.parameters(knowledge.initial[None])
            parts = network.stack.examples(parameters, x[None].clone(), y[None])
            yield torch.cat([_rows_of(parts[name]) for name in network.shapes], dim=1)
            continue
        parameters = knowledge.parameters(knowledge.initial.expand(len(x), -1))
        # each candidate is the one sample of a model of its own
        weight = inputs.new_ones(len(x), 1)
        gradients = network.gradients(parameters, x[:, None], y[:, None], weight, None)
        yield torch.cat([gradient.flatten(1) for gradient in gradients.values()], dim=1)


def _rows_of(gradients: Each | Outer) -> torch.Tensor:
    """Return the gradients of one model's examples at a parameter, (n, numbers)."""
    if isinstance(gradients, Each):
        return gradients.rows[0]
    return torch.einsum("no,ni->noi", gradients.backprops[0], gradients.activations[0]).flatten(1)


def _leading_rows(rows: Array, count: int) -> Array:
    """Return orthonormal directions (count or fewer, d) in which rows vary most."""
    centred = rows - rows.mean(0)
    _, scales, directions = np.linalg.svd(centred, full_matrices=False)
    # directions of rounding errors alone would be scaled up by the inverse covariance
    is_direction = scales > ROUNDING * scales[0]
    rank = int(is_direction.sum())
    return np.asarray(directions[: min(rank, count)])


def _sums(view: View, field: str) -> Iterator[ObservedSum]:
    """Yield the sums of points, or of first blocks, that the view's parties got."""
    for outcome in view.outcomes:
        rows = getattr(outcome.content, field, None)
        if outcome.verb != SUM or not isinstance(rows, Rows) or outcome.round > FIRST_ROUND:
            continue
        weights = getattr(outcome.content, "weight", None)
        for position, group in enumerate(outcome.groups):
            values = as_array(rows.values[position])
            if field == BLOCKS:
                # In the first round all clients train from θ_0, whatever block their update is in.
                values = values.sum(0)
            weight = None
            if weights is not None:
                weight = float(weights.values[position].sum())
            yield ObservedSum(field, outcome.round, outcome.step, frozenset(group), values, weight)
        if field == ANCHORS:
            return  # later sums depend on the first


def _difference(larger: ObservedSum, smaller: ObservedSum) -> Difference:
    """Return what the client added that only one of two sums has."""
    weight = None
    if larger.weight is not None and smaller.weight is not None:
        weight = larger.weight - smaller.weight
    return Difference(larger.step, larger.values - smaller.values, weight)


def _numbers_before(members: frozenset[int], gone: int) -> frozenset[int]:
    """Return the numbers that clients had before one of them left."""
    # numbers from the missing one on moved down by one
    return frozenset(member + (member >= gone) for member in members)


def _update(difference: Difference, knowledge: Knowledge) -> torch.Tensor:
    """Return a client's update (d,), which is not multiplied by its number of samples."""
    row = torch.as_tensor(difference.values)
    size = _whole_size(difference)
    if size:
        row = row / size
    return row[: knowledge.dimension]


def _whole_size(difference: Difference) -> int | None:
    """Return a client's number of samples; None where it is not summed."""
    if difference.weight is None:
        return None
    return round(difference.weight)


def _public_centres(view: View) -> tuple[Array, Array, Array, Array | None] | None:
    """Return the mean, basis, centres and mean parts by which clients assign themselves."""
    for message in view.messages("assign"):
        centres = getattr(message.content, "centres", None)
        if centres is not None:
            mean = as_array(message.content.mean.value)
            basis = as_array(message.content.basis.value)
            mean_parts = None
            if message.content.parts is not None:
                mean_parts = as_array(message.content.parts.value)
            return mean, basis, as_array(centres.value), mean_parts
    return None


def _true_points(truth: Truth) -> dict[int, Array]:
    """Return by client what it sent first: parts of its point, class means, or its point."""
    for field in (PARTS, ANCHORS):
        rows = _true_rows(truth, field)
        if rows:
            return rows
    return _true_rows(truth, POINT)


def _true_rows(truth: Truth, field: str) -> dict[int, Array]:
    """Return by client the first row of a field before any protection."""
    rows: dict[int, Array] = {}
    for _, client, row in truth.tapped_rows(field):
        if client not in rows:
            rows[client] = as_array(row)
    return rows
