"""Least squares over rounds: what sums over changing members tell of each of them.

A secure sum hides its summands and names its members. Where members change from sum to sum, since
a share of the clients takes part in a round or since some are lost, the sums of a run are a linear
system: a matrix with a row for each sum and a column for each client, which is 1 where the client
is in the sum, times what each client adds, is what the server reads (So et al. 2023, Securing
Secure Aggregation: Mitigating Multi-Round Privacy Leakage in Federated Learning, Section 3; Pejó
and Biczók 2023, Quality Inference in Federated Learning with Secure Aggregation, for scores of
clients by the same sums). The server follows the protocol, no two sums have to differ in a single
client, and nobody colludes.

What a client adds in every round alike is found exactly as soon as the matrix has its unit vector
in its row space: the number of its samples, and the block of its cluster in `hidden` and in `ifca`
with secure sums. Without numbers of samples in the blocks, the lengths of the blocks tell the same
nearly as well, also under a mask, which keeps lengths. Updates change from round to round, and so
least squares estimates their mean, beyond what all members have in common. The last bias of that
mean has the client's label counts, as in `label_counts`.

Clients that are in the same sums throughout, such as those of a fixed cohort, have equal columns.
All that is found about them is their mean. The negative control therefore shuffles clients among
those that were always summed together, and among those of one cluster where the adversary knows
clusters: what the sum over such a group tells of the group, the run's report says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from scipy.optimize import nnls

from securecluster.attacks import base
from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import MASK, SUMS, TAPS, Attack, Guess, Harm, Knowledge, Truth, View
from securecluster.attacks.label_counts import NO_BIAS, bias_of, last_bias, normalised
from securecluster.attacks.scoring import AgainstOthers, cosine
from securecluster.attacks.views import ObservedSum, observed_sums
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows

SOURCE = (
    "So et al. 2023, Securing Secure Aggregation: Mitigating Multi-Round Privacy Leakage in "
    "Federated Learning"
)
NEEDS = "sums of several calls over different members, and who was in each"
# fields of replies in sums
DELTA = "delta"
BLOCKS = "blocks"
SIZES = ("size", "weight")  # numbers of samples; of `weight` one for each cluster
COUNT = "count"  # a one at the client's cluster
# details of guesses
ALIKE = "alike"  # by client, the group that the negative control shuffles it in
STEPS = "steps"  # calls whose sums a guess was made of
SAID = "said"  # sentences for reports
MOST_POWERS = 5  # of the round number, in what all members have in common
SUMS_PER_POWER = 8
RIDGE = 1.0  # variance of a sum's error over that of a client's own mean; chosen by trial
TOLERANCE = 1e-6  # of a unit vector in the row space


@dataclass(frozen=True, eq=False)
class MemberSums:
    """Sums of one field of one client method, and who is in them.

    Args:
        members: 1 where a client is in a sum, (sums, clients).
        values: the sums, (sums, …).
        rounds: the protocol's round of each sum, (sums,).
        steps: the calls.
    """

    members: Array
    values: Array
    rounds: Array
    steps: tuple[int, ...]

    @property
    def clients(self) -> list[int]:
        """Return the clients that are in a sum."""
        present = self.members.any(0)
        return [int(client) for client in np.flatnonzero(present)]

    @cached_property
    def rank(self) -> int:
        """Return the rank of who is in which sum."""
        return int(np.linalg.matrix_rank(self.members))

    @cached_property
    def solvable(self) -> list[int]:
        """Return the clients whose summand follows from the sums if it is always the same.

        They are those whose unit vector is in the row space of the members.
        """
        projection = np.linalg.pinv(self.members) @ self.members
        in_row_space = np.diag(projection) > 1 - TOLERANCE
        return [int(client) for client in np.flatnonzero(in_row_space)]

    @cached_property
    def together(self) -> Array:
        """Return a number for each client, equal for those in the same sums, (clients,)."""
        _, numbers = np.unique(self.members, axis=1, return_inverse=True)
        # numpy 2.0 alone returns it with another shape
        return np.asarray(numbers).reshape(-1)

    @cached_property
    def columns(self) -> Array:
        """Return how many clients of each number of `together` are in a sum, (sums, numbers)."""
        count = int(self.together.max()) + 1
        group_of_client = np.eye(count)[self.together]
        return np.asarray(self.members @ group_of_client)

    @property
    def in_words(self) -> str:
        """Return what the sums determine, in words."""
        count = len(self.clients)
        return (
            f"{len(self.members)} sums of {count} clients have rank {self.rank}: "
            f"{len(self.solvable)} of {count} clients can be solved for"
        )

    def restricted(self, chosen: Array) -> MemberSums:
        """Return some of the sums.

        Args:
            chosen: True for these, (sums,).
        """
        steps = tuple(np.asarray(self.steps)[chosen].tolist())
        members = self.members[chosen]
        return MemberSums(members, self.values[chosen], self.rounds[chosen], steps)

    def with_values(self, values: Array) -> MemberSums:
        """Return other numbers of the same sums.

        Args:
            values: (sums, …).
        """
        return MemberSums(self.members, values, self.rounds, self.steps)

    def not_negative(self) -> Array:
        """Return what each client adds by non-negative least squares, (clients, q).

        Clients that are in the same sums have their mean.
        """
        by_column = []
        for column in self.values.T:
            summands, _ = nnls(self.columns, column)
            by_column.append(summands)
        by_group = np.stack(by_column, axis=1)
        return np.asarray(by_group[self.together])

    def mean_summands(self) -> Array:
        """Return by how much each client's mean summand differs from that of all, (clients, q).

        What all members have in common is a polynomial of the round. What a client adds besides is
        Gaussian, so that this is ridge regression.
        """
        common = self._in_common()
        design = np.hstack([self.columns, common])
        # the mean of n alike clients has the n-th part of the variance of one
        counts = np.bincount(self.together)
        # what is in common is as good as free, and the system stays regular
        free = np.full(common.shape[1], TOLERANCE)
        penalty = np.hstack([RIDGE * counts, free])
        normal = design.T @ design + np.diag(penalty)
        coefficients = np.linalg.solve(normal, design.T @ self.values)
        by_group = coefficients[: len(counts)]
        return np.asarray(by_group[self.together])

    def _in_common(self) -> Array:
        """Return powers of the round number, from −1 to 1, times each sum's members, (sums, p)."""
        powers = min(MOST_POWERS, len(self.members) // SUMS_PER_POWER)
        first = self.rounds.min()
        last = self.rounds.max()
        middle = (first + last) / 2
        half = max(1.0, (last - first) / 2)
        times = (self.rounds - middle) / half
        sizes = self.columns.sum(1, keepdims=True)
        return np.asarray(sizes * times[:, None] ** np.arange(powers + 1))

    def explained(self, summands: Array) -> float:
        """Return which share of the sums' spread some summands explain.

        The spread is around what every member would add if all added the same.

        Args:
            summands: (clients, q).
        """
        sizes = self.members.sum(1, keepdims=True)
        mean = self.values.sum(0) / sizes.sum()
        differences = self.values - sizes * mean
        residuals = self.values - self.members @ summands
        spread = float((differences**2).sum())
        if spread <= 0:
            return 0.0
        sum_of_squares = float((residuals**2).sum())
        return 1 - sum_of_squares / spread


class AmongAlike(AgainstOthers):
    """Scorer whose negative control shuffles clients among those of one group."""

    def others(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> list[int]:
        """Return the scores if each client is compared with one of its group.

        Args:
            guess: by client, with its groups.
            truth: of the run.
            draw: source of the shuffle.
        """
        alike = guess.details[ALIKE]
        clients = np.asarray(list(guess.values))
        groups = np.asarray([alike[client] for client in guess.values])
        others = clients.copy()
        for group in np.unique(groups):
            positions = np.flatnonzero(groups == group)
            others[positions] = clients[draw.permutation(positions)]
        return [int(client) for client in others]


class ClustersFound(AmongAlike):
    """Share of clients whose cluster is guessed.

    The true cluster of a client is the block that it added to last.
    """

    metric = "share of clusters found"

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return 1 for each right cluster and 0 for each wrong one, (n,).

        Args:
            guess: clusters by client.
            truth: of the run, with taps.
            subjects: clients, one for each guess.
        """
        steps = frozenset(guess.details[STEPS])
        chosen = _chosen_blocks(truth, steps)
        hits = []
        for guessed, client in guess.beside(subjects):
            # of a client that never added anything, no guess is right
            hits.append(chosen.get(client) == guessed)
        return np.asarray(hits, dtype=float)


class LabelCorrelation(AmongAlike):
    """Correlation of the guessed and the true shares of a client's labels, over the classes."""

    metric = "correlation of guessed and true label counts"

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the correlation of each client; 0 where one of both is the same for all classes.

        Args:
            guess: label counts or shares by client.
            truth: of the run.
            subjects: clients, one for each guess.
        """
        correlations = []
        for guessed, client in guess.beside(subjects):
            true = truth.label_counts(client).astype(float)
            correlation = cosine(guessed - guessed.mean(), true - true.mean())
            correlations.append(correlation)
        return np.asarray(correlations)


class CommonestLabel(AmongAlike):
    """Share of clients whose commonest label is guessed."""

    metric = "share of commonest labels found"

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return 1 for each right label and 0 for each wrong one, (n,).

        Args:
            guess: label counts or shares by client.
            truth: of the run.
            subjects: clients, one for each guess.
        """
        hits = []
        for guessed, client in guess.beside(subjects):
            true = truth.label_counts(client)
            commonest = int(guessed.argmax())
            # several labels may be the commonest
            hits.append(true[commonest] == true.max())
        return np.asarray(hits, dtype=float)


class SizeError(AmongAlike):
    """Relative error of the guessed number of a client's samples."""

    metric = "relative error of the number of samples"
    higher = False

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return the error of each client, (n,).

        Args:
            guess: numbers of samples by client.
            truth: of the run.
            subjects: clients, one for each guess.
        """
        errors = []
        for guessed, client in guess.beside(subjects):
            true = len(truth.federation.shards[client].y)
            error = abs(guessed - true)
            errors.append(error / true)
        return np.asarray(errors)


class SumsOverRounds(Attack):
    """Base class of attacks that solve for single clients by sums of several rounds.

    Attributes:
        missing: what there are no sums of where the attack does not apply.
    """

    source = SOURCE
    missing: ClassVar[str]

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        systems = self.systems(view, knowledge)
        if not systems:
            return f"not applicable: no sums of {self.missing} were observed"
        longest = _longest(systems)
        if len(longest.members) == 1:
            return f"not applicable: there is one sum of {self.missing}, and none to set beside it"
        if longest.rank == 1:
            return (
                f"not applicable: all sums of {self.missing} are over the same clients, so none is "
                f"told from another ({longest.in_words})"
            )
        return None

    def systems(self, view: View, knowledge: Knowledge) -> list[MemberSums]:
        """Return the sums that the attack may solve.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        raise NotImplementedError

    def guessed(
        self, quantity: str, view: View, sums: MemberSums, values: Mapping[int, Any]
    ) -> Guess:
        """Return a guess with its groups of clients and what the sums determine.

        Args:
            quantity: what is guessed.
            view: what the adversary observed.
            sums: that it was found by.
            values: by client.
        """
        sizes = np.bincount(sums.together)
        names: dict[tuple[int, int], int] = {}
        alike = {}
        for client in values:
            number = int(sums.together[client])
            # clients that some sum tells from all others are one group
            if sizes[number] == 1:
                number = -1
            group = (view.clusters.get(client, -1), number)
            alike[client] = names.setdefault(group, len(names))
        details = {ALIKE: alike, STEPS: sums.steps, SAID: (sums.in_words,)}
        return Guess(quantity, values, details)


class ClustersOverRounds(SumsOverRounds):
    """Clusters that clients hide, from sums of counts, of weights, or of blocks by length."""

    name = "sums-over-rounds-clusters"
    learns = "which cluster a client belongs to"
    harm = Harm.GROUPS
    needs = f"{NEEDS}; the sums have a number or a block for each cluster"
    missing = "what clients add to the block of their cluster"
    scorer = ClustersFound()
    requires = (TAPS,)
    reads = (COUNT, "weight", BLOCKS)
    hidden_by = (SUMS,)

    def systems(self, view: View, knowledge: Knowledge) -> list[MemberSums]:
        """Return sums of counts, of weights, and lengths of blocks, those that there are.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        member_sums = []
        for field in (COUNT, "weight", BLOCKS):
            for sums in _sums(view, knowledge, field).values():
                # a number or a row for each cluster
                if sums.values.ndim > 1:
                    member_sums.append(_of_last_start(view, knowledge, sums))
        return member_sums

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed cluster by client, by the sums that are explained best.

        Exact numbers are constant, so that summands explain all of their sums; noise is not.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        best: tuple[float, MemberSums, Array] | None = None
        for sums in self.systems(view, knowledge):
            if sums.rank == 1:
                continue
            of_blocks = sums.values.ndim > 2
            numbers = sums
            if of_blocks:
                numbers = sums.with_values(_relative_lengths(sums))
            summands = numbers.not_negative()
            # rounding decides nothing: the first ones are the most exact
            explained = round(numbers.explained(summands), 3)
            # longer updates of a cluster, and noise, are in the lengths of all clients
            if of_blocks:
                summands = _standardised(summands)
            if best is None or explained > best[0]:
                best = explained, sums, summands
        assert best is not None
        _, sums, summands = best
        clusters = summands.argmax(1)
        values = {client: int(clusters[client]) for client in sums.clients}
        return self.guessed("clusters", view, sums, values)


class LabelsOverRounds(SumsOverRounds):
    """Label counts of single clients, as shares, from the last bias in sums of updates."""

    name = "sums-over-rounds-labels"
    learns = "how many samples of each label a client holds"
    harm = Harm.CONTENTS
    source = (
        f"{SOURCE}; Geng et al. 2021, Towards General Deep Leakage in Federated Learning, for the "
        "counts"
    )
    needs = f"{NEEDS}; the sums are of updates"
    missing = "updates"
    scorer = LabelCorrelation()
    further = (CommonestLabel(),)
    reads = (DELTA, BLOCKS)
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not knowledge.has_labels:
            return base.NO_LABELS
        if last_bias(knowledge) is None:
            return NO_BIAS
        return super().applies(view, knowledge)

    def systems(self, view: View, knowledge: Knowledge) -> list[MemberSums]:
        """Return sums of updates, those over blocks added up.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        member_sums = []
        for field in (DELTA, BLOCKS):
            for sums in _sums(view, knowledge, field).values():
                # sums of other things, such as points, have another width
                if sums.values.shape[-1] != knowledge.width:
                    continue
                if field == BLOCKS:
                    sums = sums.with_values(sums.values.sum(1))
                member_sums.append(sums)
        return member_sums

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed shares of labels by client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        sums = _longest(self.systems(view, knowledge))
        bias = bias_of(knowledge, torch.as_tensor(sums.values))
        # a sum of n·Δb is about η·(n_c − n·p̄_c) for each step (see `label_counts`)
        summands = sums.with_values(bias).mean_summands()
        moves = summands[sums.clients]
        # Over many rounds the mean prediction is nearer to equal shares than to that of θ_0.
        equal = 1 / moves.shape[1]
        # Steps shrink as models improve. Shares are not negative, which bounds the scale of each
        # client from below; one scale of all keeps what clients with few labels tell.
        least_scales = (-moves / equal).max(1)
        scale = float(np.median(least_scales))
        shares = equal + moves / max(scale, np.finfo(float).tiny)
        values = {}
        for client, row in zip(sums.clients, shares, strict=True):
            values[client] = normalised(row)
        return self.guessed("label counts", view, sums, values)


class SizesOverRounds(SumsOverRounds):
    """Numbers of samples of single clients, from sums of them."""

    name = "sums-over-rounds-sizes"
    learns = "how many samples a client holds"
    harm = Harm.CONTENTS
    needs = f"{NEEDS}; the sums are of numbers of samples"
    missing = "numbers of samples"
    scorer = SizeError()
    reads = frozenset(SIZES)
    hidden_by = (SUMS,)

    def systems(self, view: View, knowledge: Knowledge) -> list[MemberSums]:
        """Return sums of numbers of samples that clients train on, over all clusters.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        member_sums = []
        of_updates = {*_sums(view, knowledge, DELTA), *_sums(view, knowledge, BLOCKS)}
        for field in SIZES:
            for method, sums in _sums(view, knowledge, field).items():
                # beside losses, for example, there are numbers of other samples
                if method not in of_updates:
                    continue
                flat = sums.values.reshape(len(sums.members), -1)
                sizes = flat.sum(1, keepdims=True)
                member_sums.append(sums.with_values(sizes))
        return member_sums

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed number of samples by client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        sums = _longest(self.systems(view, knowledge))
        sizes = sums.not_negative()[:, 0]
        values = {client: float(sizes[client]) for client in sums.clients}
        return self.guessed("numbers of samples", view, sums, values)


def _sums(view: View, knowledge: Knowledge, field: str) -> dict[str, MemberSums]:
    """Return the sums of a field by client method, in the order of the methods' first calls."""
    by_method: dict[str, list[ObservedSum]] = {}
    for observed in observed_sums(view, field):
        if observed.members:
            listed = by_method.setdefault(observed.method, [])
            listed.append(observed)
    sums_by_method = {}
    for method, listed in by_method.items():
        members = np.zeros((len(listed), knowledge.clients))
        for row, observed in zip(members, listed, strict=True):
            row[list(observed.members)] = 1
        values = [as_array(observed.row) for observed in listed]
        rounds = [observed.round for observed in listed]
        steps = tuple(observed.step for observed in listed)
        sums_by_method[method] = MemberSums(members, np.stack(values), np.asarray(rounds), steps)
    return sums_by_method


def _longest(systems: list[MemberSums]) -> MemberSums:
    """Return the sums of highest rank, and of these the most."""
    return max(systems, key=lambda sums: (sums.rank, len(sums.members)))


def _relative_lengths(sums: MemberSums) -> Array:
    """Return the length of each block, over the mean length that a member of its sum adds.

    Updates of one cluster point into like directions, so that lengths nearly add up. They shrink
    from round to round, and are divided by what they are in the same one.

    Args:
        sums: of blocks, (sums, k, width).
    """
    lengths = np.linalg.norm(sums.values, axis=2)
    by_member = lengths.sum(1) / sums.members.sum(1)
    divisors = np.where(by_member > 0, by_member, 1.0)
    return np.asarray(lengths / divisors[:, None])


def _standardised(values: Array) -> Array:
    """Return numbers with mean 0 and deviation 1 in each column, (n, q)."""
    differences = values - values.mean(0)
    deviations = differences.std(0)
    return np.asarray(differences / np.where(deviations > 0, deviations, 1.0))


def _of_last_start(view: View, knowledge: Knowledge, sums: MemberSums) -> MemberSums:
    """Return the sums of the start that was in use last; all where there is one start alone.

    Clients choose anew among the models of another start, so that its clusters are others.
    """
    if int(knowledge.config.get("starts", 1)) == 1:
        return sums
    starts: dict[int, int] = {}
    for message in view.messages():
        content = message.content
        start = getattr(content, "start", None)
        # blocks follow a count of the same start
        if start is None:
            earlier = getattr(content, "earlier", -1)
            start = starts.get(earlier)
        if start is not None:
            starts.setdefault(message.step, int(start))
    of_sums = np.asarray([starts[step] for step in sums.steps])
    return sums.restricted(of_sums == of_sums[-1])


def _chosen_blocks(truth: Truth, steps: frozenset[int]) -> dict[int, int]:
    """Return by client the block that it added to last in some calls, from the taps of the run."""
    chosen: dict[int, int] = {}
    for tap in truth.taps:
        rows = getattr(tap.reply, COUNT, None)
        if rows is None:
            rows = getattr(tap.reply, BLOCKS, None)
        if tap.step not in steps or not isinstance(rows, Rows):
            continue
        for row, client in zip(rows.values, tap.ids, strict=True):
            magnitudes = row
            if row.ndim > 1:
                magnitudes = row.double().abs().flatten(1).sum(1)
            # a client whose model nobody else chose adds zeros
            if bool(magnitudes.any()):
                chosen[client] = int(magnitudes.argmax())
    return chosen
