"""Linkage of clients across rounds, by the Gram rows of their updates.

A mask that is drawn anew each round keeps inner products (a permutation and an orthogonal map do).
A client's row of the Gram matrix of a round, with its norm on the diagonal, therefore looks alike
in two rounds, as far as the clients' directions do. The attack matches rows of two rounds: it knows
neither the mask nor which rows belong together.

A row's order of columns is not known in the other round either, so rows are first compared by
values that need no order: the norm, and the sorted cosines. The best match then gives an order of
columns, under which rows are compared entry by entry, and matched again, until nothing changes. Of
several starts, the match counts under which the two matrices agree best.

This is graph matching. Vogelstein et al. 2015, "Fast Approximate Quadratic Programming for Graph
Matching", have the linear assignments; the starts from sorted rows and the exchanges at the end are
not in the paper.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.arrays import as_array
from securecluster.attacks.base import SUMS, Attack, Guess, Harm, Knowledge, Scorer, Truth, View
from securecluster.attacks.views import observed_updates

Array = NDArray[np.float64]
PASSES = 30  # of one matching
STARTS = 10  # of the matching, for each of two matrices
MOST_EXCHANGED = 40  # rows up to which exchanges of two partners are tried
TINY = 1e-12  # an improvement that is no rounding error
FEWEST = 3  # clients in a round: two have one cosine, which both share
Labels = dict[int, Array]  # rows by label
Match = tuple[NDArray[np.int64], NDArray[np.int64]]  # rows, and their partners


class LinkedClients(Scorer):
    """Share of labels that are linked to the same client in the next round."""

    metric = "share of clients linked across rounds"

    def units(self, guess: Guess, truth: Truth) -> NDArray[Any]:
        """Return 1 for each correct link and 0 for each wrong one, (n,).

        Args:
            guess: label in a later round by label in an earlier one.
            truth: of the run, with the identities behind the labels.
        """
        correct = []
        for earlier, later in guess.values.items():
            same = truth.identities[earlier] == truth.identities[later]
            correct.append(same)
        return np.asarray(correct, dtype=float)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> NDArray[Any]:
        """Return the same for links to random labels of the same later rounds.

        Args:
            guess: label in a later round by label in an earlier one.
            truth: of the run.
            draw: source of the shuffle.
        """
        correct = []
        for earlier, linked in self._identities(guess, truth):
            correct.append(earlier == linked[draw.permutation(len(linked))])
        return np.concatenate(correct).astype(float)

    def _identities(self, guess: Guess, truth: Truth) -> list[tuple[Array, Array]]:
        """Return by round who is behind labels, and behind those that they are linked to."""

        def compared() -> list[tuple[Array, Array]]:
            pairs = []
            for earlier, later in guess.details["rounds"]:
                labels = [guess.values[label] for label in earlier]
                assert set(labels) <= set(later)
                both = [[truth.identities[label] for label in side] for side in (earlier, labels)]
                pairs.append((np.asarray(both[0]), np.asarray(both[1])))
            return pairs

        known: list[tuple[Array, Array]] = guess.once(truth, "identities", compared)
        return known


class Linkage(Attack):
    """Links between the anonymous senders of updates in consecutive calls."""

    name = "linkage"
    learns = "which messages of different rounds are of the same client"
    harm = Harm.GROUPS
    source = (
        "Vogelstein et al. 2015, Fast Approximate Quadratic Programming for Graph Matching, on "
        "Gram matrices"
    )
    needs = "single updates of two rounds or more, whose mask keeps inner products"
    anonymous = True
    scorer = LinkedClients()
    reads = ("delta",)
    hidden_by = (SUMS,)  # masks keep inner products

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if len(_calls(view, knowledge)) < 2:
            return (
                f"not applicable: single updates of {FEWEST} clients in two rounds were not "
                "observed"
            )
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return a label in the next call for each label of a call.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        calls = _calls(view, knowledge)
        links: dict[int, int] = {}
        rounds = []
        for earlier, later in itertools.pairwise(calls):
            before = list(earlier)
            after = list(later)
            rows_before = np.stack(list(earlier.values()))
            rows_after = np.stack(list(later.values()))
            linked = []
            for row, column in matched(rows_before, rows_after):
                label = before[row]
                links[label] = after[column]
                linked.append(label)
            rounds.append((tuple(linked), tuple(after)))
        return Guess("links", links, {"rounds": rounds})


def matched(first: Array, second: Array, seed: int = 0) -> list[tuple[int, int]]:
    """Return pairs of rows that are likely to belong to one client.

    Args:
        first: rows of one round, (n, d).
        second: rows of another, (k, d), under another mask.
        seed: of the starts of the matching.

    Returns:
        min(n, k) pairs of positions.
    """
    draw = np.random.default_rng(seed)
    pairs = [(_cosines(first), _cosines(second))]
    if len(first) == len(second):
        # With other clients in them the rounds have other means.
        pairs.insert(0, (_correlations(first), _correlations(second)))
    # agreements are compared across starts, so all are measured on the same matrices
    chosen, chosen_other = pairs[0]
    matches = []
    for gram, other in pairs:
        costs = _profile_costs(gram, other)
        for start in range(STARTS):
            # the first start is the best guess, and further ones vary it
            spread = costs.std() * min(start, 1)
            jitter = spread * draw.normal(size=costs.shape)
            matches.append(_fixed_point(gram, other, costs + jitter))
    best = max(matches, key=lambda match: _agreement(chosen, chosen_other, match))
    rows, columns = _exchanged(chosen, chosen_other, best)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _cosines(rows: Array) -> Array:
    """Return cosines off the diagonal, and norms over their mean on it, (n, n)."""
    norms = np.linalg.norm(rows, axis=1)
    lengths = np.where(norms > 0, norms, 1.0)
    directions = rows / lengths[:, None]
    gram: Array = directions @ directions.T
    scale = norms.mean() or 1.0
    np.fill_diagonal(gram, norms / scale)
    return gram


def _correlations(rows: Array) -> Array:
    """Return the same of what distinguishes rows from their mean, which a mask does not change."""
    return _cosines(rows - rows.mean(0))


def _profile_costs(gram: Array, other: Array) -> Array:
    """Return how much each pair of rows differs in values that need no order, (n, k)."""
    quantiles = np.linspace(0, 1, min(len(gram), len(other)))
    profiles = _profiles(gram, quantiles)
    other_profiles = _profiles(other, quantiles)
    differences = profiles[:, None] - other_profiles[None]
    return np.asarray((differences**2).sum(-1))


def _profiles(gram: Array, quantiles: Array) -> Array:
    """Return each row's norm and quantiles of its cosines."""
    count = len(gram)
    # quantiles do not depend on the order of columns, which is unknown in the other round
    cosines = gram[~np.eye(count, dtype=bool)].reshape(count, count - 1)
    return np.column_stack([np.diag(gram), np.quantile(cosines, quantiles, axis=1).T])


def _fixed_point(gram: Array, other: Array, costs: Array) -> Match:
    """Return a match that is the best one under the order of columns that it gives.

    Args:
        gram: of one round, (n, n).
        other: of another round, (k, k).
        costs: of the first match, (n, k).
    """
    from scipy.optimize import linear_sum_assignment

    rows, columns = linear_sum_assignment(costs)
    norms = np.diag(gram)
    other_norms = np.diag(other)
    norm_differences = norms[:, None] - other_norms[None, :]
    diagonals = norm_differences**2
    for _ in range(PASSES):
        # entries of both matrices that the current match makes one client's
        differences = gram[:, None, rows] - other[None, :, columns]
        costs = (differences**2).sum(-1) + diagonals
        next_rows, next_columns = linear_sum_assignment(costs)
        same_rows = np.array_equal(rows, next_rows)
        unchanged = same_rows and np.array_equal(columns, next_columns)
        rows = next_rows
        columns = next_columns
        if unchanged:
            break
    return rows, columns


def _agreement(gram: Array, other: Array, match: Match) -> float:
    """Return minus the squared distance of two matrices, as far as rows are matched."""
    rows, columns = match
    matched_gram = gram[np.ix_(rows, rows)]
    matched_other = other[np.ix_(columns, columns)]
    differences = matched_gram - matched_other
    return -float((differences**2).sum())


def _exchanged(gram: Array, other: Array, match: Match) -> Match:
    """Return a match that no exchange of two partners improves."""
    rows, columns = match
    columns = columns.copy()
    own = gram[np.ix_(rows, rows)]
    # a step compares all pairs in O(n³) operations
    while len(rows) <= MOST_EXCHANGED:
        gains = _exchange_gains(own, other[np.ix_(columns, columns)])
        a, b = np.unravel_index(gains.argmax(), gains.shape)
        if gains[a, b] <= TINY:
            break
        columns[[a, b]] = columns[[b, a]]
    return rows, columns


def _exchange_gains(own: Array, partners: Array) -> Array:
    """Return how much each exchange of two partners would improve the agreement, (n, n).

    Args:
        own: symmetric matrix of one round, (n, n).
        partners: of another, in the order of a match, (n, n).
    """
    # The squared norms stay, so the agreement changes by twice the change of ⟨own, partners⟩. For
    # an exchange of a and b this is 2 Σ (own_ak − own_bk)(partners_bk − partners_ak) over the other
    # columns k, and what changes on the diagonal.
    products = own @ partners
    same = np.diag(products)
    all_columns = products + products.T - same[:, None] - same[None]
    own_norms, norms = np.diag(own), np.diag(partners)
    to_a = (own_norms[:, None] - own) * (partners - norms[:, None])
    diagonal = (own_norms[:, None] - own_norms) * (norms - norms[:, None])
    return np.asarray(2 * (2 * (all_columns - to_a - to_a.T) + diagonal))


def _calls(view: View, knowledge: Knowledge) -> list[Labels]:
    """Return the updates of each call with enough clients, by their senders' labels.

    Colluding clients appear under their own numbers, in every round: nothing is left to link.
    """
    calls: dict[tuple[str, int], Labels] = {}
    for update in observed_updates(view, knowledge):
        label = update.sender.index
        if label is None or update.sender.kind != "anonymous":
            continue
        call = (update.method, update.step)
        rows = calls.setdefault(call, {})
        rows[label] = as_array(update.row)
    return [_by_norm(rows) for rows in calls.values() if len(rows) >= FEWEST]


def _by_norm(rows: Labels) -> Labels:
    """Return rows in an order that masks keep, from which the search for a matching begins."""
    return dict(sorted(rows.items(), key=lambda item: float(np.linalg.norm(item[1]))))
