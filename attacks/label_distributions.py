"""Label distributions of all clients, up to the labels' names, from one call's updates.

Under a permutation a coordinate of all clients' updates is still one column, and the weights of an
output unit move together over clients: by how many samples of its label each client has. The
adversary groups columns that move alike by k-means, and takes each group's mean over its columns as
a guess of one label's share at every client. It cannot name the labels, so the score matches groups
with labels by the truth, and holds up to the labels' names.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import NO_LABELS, SUMS, Attack, Guess, Harm, Knowledge, Truth, View
from securecluster.attacks.scoring import AgainstOthers
from securecluster.attacks.unmasking import NO_UPDATES, first_updates

GROUPS = 30  # more than labels: hidden units move together, too
KEPT = 0.2  # share of columns, those that vary most over clients
FEWEST = 4  # clients of a call: fewer move alike by accident


class MatchedCorrelation(AgainstOthers):
    """Mean correlation over clients of labels' shares with the guess, matched one to one.

    The negative control shuffles the clients of the truth, and so includes what matching gains.
    """

    metric = "correlation of label shares"

    def compared(self, guess: Guess, truth: Truth, subjects: list[int]) -> Array:
        """Return each guess beside the true shares of a client, (m, 2, columns), padded with NaN.

        Args:
            guess: shares of unnamed labels by client.
            truth: of the run.
            subjects: clients, one for each guess.
        """
        rows = []
        for guessed, client in guess.beside(subjects):
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

    def of_resamples(self, units: Array) -> Callable[[Array], float]:
        """Return the correlation of resamples under the matching of these clients.

        Args:
            units: (m, 2, columns).
        """
        guess, shares = _tables(units)
        labels, groups = matching(guess, shares)
        matched_guess, matched_shares = guess[:, groups], shares[:, labels]

        def correlation(chosen: Array) -> float:
            if not len(labels):
                return 0.0
            of_labels = _standardised(matched_shares[chosen])
            of_groups = _standardised(matched_guess[chosen])
            products = of_labels * of_groups
            return float(products.sum(0).mean())

        return correlation


class LabelDistributions(Attack):
    """Shares of unnamed labels at every client, from columns that move alike over clients.

    Args:
        groups: of columns; at most three times the number of clients are made.
        seed: of k-means.
    """

    name = "label-distributions"
    learns = "how a client's samples spread over labels, without the labels' names"
    harm = Harm.CONTENTS
    source = (
        "this project's threat model: k-means of columns over clients (method: Lloyd 1982); label "
        "counts by the last layer's movement as in Wang et al. 2019, Beyond Inferring Class "
        "Representatives"
    )
    needs = f"single updates of {FEWEST} clients or more in one call of the first round"
    scorer = MatchedCorrelation()
    reads = ("delta",)
    hidden_by = (SUMS,)  # under a mask columns still move alike

    def __init__(self, groups: int = GROUPS, seed: int = 0) -> None:
        self.groups = groups
        self.seed = seed

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not knowledge.has_labels:
            return NO_LABELS
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
        updates = np.stack(list(rows.values()))
        groups = min(self.groups, 3 * len(rows))
        shares = guess_shares(updates, groups, self.seed)
        by_client = dict(zip(rows, shares, strict=True))
        return Guess("label shares", by_client)


def _call(view: View, knowledge: Knowledge) -> dict[int, Array]:
    """Return by client the updates of the first round's call with most clients."""
    calls: dict[tuple[str, int], dict[int, Array]] = {}
    for subject, update in first_updates(view, knowledge).items():
        method, step, client = subject
        rows = calls.setdefault((method, step), {})
        rows[client] = as_array(update.row)
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
    minimum = np.quantile(norms, 1 - KEPT)
    selected = (norms >= minimum) & (norms > 0)
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
    guess = units[:, 0]
    shares = units[:, 1]
    groups = ~np.isnan(guess[0])
    labels = ~np.isnan(shares[0])
    return guess[:, groups], shares[:, labels]


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
    return np.asarray(_standardised(shares).T @ _standardised(guess))


def _standardised(table: Array) -> Array:
    """Return columns with mean zero and norm one; a constant column is zero."""
    centred = table - table.mean(0)
    norms = np.linalg.norm(centred, axis=0)
    return np.asarray(centred / np.where(norms > 0, norms, 1.0))
