"""Label distributions of all clients, up to the labels' names, from one call's updates.

Under a permutation a coordinate of all clients' updates is still one column, and the weights of an
output unit move together over clients: by how many samples of its label each client has. The
adversary groups columns that move alike by k-means, and takes each group's mean over its columns as
a guess of one label's share at every client. It cannot name the labels, so the score matches groups
with labels by the truth, and holds up to the labels' names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import SUMS, Attack, Guess, Knowledge, Truth, View
from securecluster.attacks.scoring import Scorer
from securecluster.attacks.unmasking import NO_UPDATES, first_updates

Array = NDArray[Any]

GROUPS = 30  # more than labels: hidden units move together, too
KEPT = 0.2  # share of columns, those that vary most over clients
FEWEST = 4  # clients of a call: fewer move alike by accident


class MatchedCorrelation(Scorer):
    """Mean correlation over clients of labels' shares with the guess, matched one to one.

    The negative control shuffles the clients of the truth, and so includes what matching gains.
    """

    metric = "correlation of label shares"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return each client's guess and true shares, (m, 2, columns), padded with NaN.

        Args:
            guess: shares of unnamed labels by client.
            truth: of the run.
        """
        return self._rows(guess, truth, list(guess.values))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same with the true shares of shuffled clients.

        Args:
            guess: shares of unnamed labels by client.
            truth: of the run.
            draw: source of the shuffle.
        """
        clients = list(guess.values)
        order = draw.permutation(len(clients))
        return self._rows(guess, truth, [clients[k] for k in order])

    def _rows(self, guess: Guess, truth: Truth, clients: list[int]) -> Array:
        """Return the units against the shares of the given clients, in the guess's order."""
        rows = []
        for guessed, client in zip(guess.values.values(), clients, strict=True):
            counts = truth.label_counts(client)
            columns = max(len(guessed), len(counts))
            row = np.full((2, columns), np.nan)
            row[0, : len(guessed)] = guessed
            row[1, : len(counts)] = counts / counts.sum()
            rows.append(row)
        return np.stack(rows)

    def summary(self, units: Array) -> float:
        """Return the correlation of some clients.

        Args:
            units: (m, 2, columns).
        """
        return matched_correlation(*_tables(units))

    def fixed(self, units: Array) -> Callable[[Array], float]:
        """Return the correlation of resamples under the matching of these clients.

        Args:
            units: (m, 2, columns).
        """
        labels, groups = matching(*_tables(units))

        def correlation(resampled: Array) -> float:
            guess, shares = _tables(resampled)
            products = _standardised(shares)[:, labels] * _standardised(guess)[:, groups]
            return float(products.sum(0).mean()) if len(labels) else 0.0

        return correlation


class LabelDistributions(Attack):
    """Shares of unnamed labels at every client, from columns that move alike over clients.

    Args:
        groups: of columns; at most three times the number of clients are made.
        seed: of k-means.
    """

    name = "label-distributions"
    source = (
        "this project's threat model: k-means of columns over clients (method: Lloyd 1982); label "
        "counts by the last layer's movement as in Wang et al. 2019, Beyond Inferring Class "
        "Representatives"
    )
    needs = f"single updates of {FEWEST} clients or more in one call of the first round"
    scorer = MatchedCorrelation()
    reads = frozenset({"delta"})
    hidden_by = frozenset({SUMS})  # under a mask columns still move alike

    def __init__(self, groups: int = GROUPS, seed: int = 0) -> None:
        self.groups = groups
        self.seed = seed

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.network.objective.kind != "classification":
            return "not applicable: the clients' data have no labels"
        rows = _call(view, knowledge)
        if not rows:
            return NO_UPDATES
        if len(rows) < FEWEST:
            return f"not applicable: a call with {FEWEST} clients' updates was not observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the shares of unnamed labels by client, (groups,), up to scale and offset.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        rows = _call(view, knowledge)
        groups = min(self.groups, 3 * len(rows))
        guess = guess_shares(np.stack(list(rows.values())), groups, self.seed)
        return Guess("label shares", dict(zip(rows, guess, strict=True)))


def _call(view: View, knowledge: Knowledge) -> dict[int, Array]:
    """Return by client the updates of the first round's call with most clients."""
    calls: dict[tuple[str, int], dict[int, Array]] = {}
    for (method, step, client), update in first_updates(view, knowledge).items():
        rows = calls.setdefault((method, step), {})
        rows[client] = update.row.double().cpu().numpy()
    # columns are comparable only within a call, which has one mask
    return max(calls.values(), key=len, default={})


def guess_shares(updates: Array, groups: int = GROUPS, seed: int = 0) -> Array:
    """Return a guess (m, groups) of labels' shares: means of columns that move alike.

    Args:
        updates: what the adversary read, under one mask, (m, d).
        groups: how many groups of columns are made.
        seed: of k-means.
    """
    from sklearn.cluster import KMeans

    # over clients: what all have in common says nothing of their labels
    centred = updates - updates.mean(0)
    norms = np.linalg.norm(centred, axis=0)
    selected = (norms >= np.quantile(norms, 1 - KEPT)) & (norms > 0)
    columns: Array = centred[:, selected]
    if columns.shape[1] < groups:  # too few columns move for any grouping
        return columns
    # k-means compares directions, whatever the norms of columns
    directions = (columns / norms[selected]).T
    kmeans = KMeans(groups, n_init=4, random_state=seed)
    assigned = kmeans.fit_predict(directions)
    means = []
    for group in range(groups):
        members = columns[:, assigned == group]
        means.append(members.mean(1))
    return np.stack(means, axis=1)


def _tables(units: Array) -> tuple[Array, Array]:
    """Return the guess (m, g) and the true shares (m, k) of units, without padding."""
    guess, shares = units[:, 0], units[:, 1]
    return guess[:, ~np.isnan(guess[0])], shares[:, ~np.isnan(shares[0])]


def matched_correlation(guess: Array, shares: Array) -> float:
    """Return the mean correlation of labels' shares with a guess, best matched one to one.

    Args:
        guess: (m, g).
        shares: (m, k).
    """
    labels, groups = matching(guess, shares)
    if not len(labels):
        return 0.0
    correlation = _correlation(guess, shares)
    return float(correlation[labels, groups].mean())


def matching(guess: Array, shares: Array) -> tuple[Array, Array]:
    """Return which label is matched with which group: labels, and their groups.

    Args:
        guess: (m, g).
        shares: (m, k).
    """
    from scipy.optimize import linear_sum_assignment

    # labels have no names here, so each is matched with one group (the Hungarian algorithm); the
    # assignment minimises, and the best match has the largest correlations
    labels, groups = linear_sum_assignment(-_correlation(guess, shares))
    return labels, groups


def _correlation(guess: Array, shares: Array) -> Array:
    """Return the correlation of each label's shares with each group, (k, g)."""
    correlation: Array = _standardised(shares).T @ _standardised(guess)
    return correlation


def _standardised(table: Array) -> Array:
    """Return columns with mean zero and norm one; a constant column is zero."""
    centred = table - table.mean(0)
    norms = np.linalg.norm(centred, axis=0)
    standardised: Array = centred / np.where(norms > 0, norms, 1.0)
    return standardised
