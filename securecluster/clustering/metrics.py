"""Scores of a clustering against the true one, and summaries over clients."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypedDict

import numpy as np

Values = np.ndarray[Any, Any]

# names of what is told of clients' scores beside their mean, and the shares of clients below
SPREAD = {"lowest": 0.0, "lower_quartile": 0.25, "upper_quartile": 0.75, "highest": 1.0}


class Agreement(TypedDict):
    """Scores of a clustering against the true one; 1 is perfect for each.

    `exact` is True for the same partition, whatever the clusters are numbered.
    """

    ari: float
    nmi: float
    purity: float
    exact: bool


def agreement(labels: Sequence[int], truth: Sequence[int]) -> Agreement:
    """Compare a clustering with the true one.

    Args:
        labels: each client's cluster, (m,).
        truth: each client's true cluster, (m,).

    Returns:
        Adjusted Rand index, normalised mutual information, purity, and exact recovery.
    """
    # A run asks for it in every round, and clusters seldom change.
    return _agreement(tuple(labels), tuple(truth)).copy()


@lru_cache(maxsize=64)
def _agreement(labels: tuple[int, ...], truth: tuple[int, ...]) -> Agreement:
    """Return the scores of `agreement`, which are stored."""
    table = _contingency(truth, labels)
    # The partitions are the same if each cluster meets one true cluster only, and the reverse.
    true_clusters_met = np.count_nonzero(table, axis=0)
    clusters_met = np.count_nonzero(table, axis=1)
    exact = bool((true_clusters_met == 1).all() and (clusters_met == 1).all())
    majorities = table.max(axis=0)
    return {
        "ari": _adjusted_rand(table),
        "nmi": _normalized_mutual_information(table),
        "purity": float(majorities.sum() / table.sum()),
        "exact": exact,
    }


def _contingency(truth: tuple[int, ...], labels: tuple[int, ...]) -> Values:
    """Return how many clients each pair of a true cluster and a found one has, (true, found)."""
    rows, row_of = np.unique(truth, return_inverse=True)
    columns, column_of = np.unique(labels, return_inverse=True)
    table = np.zeros((len(rows), len(columns)), dtype=np.int64)
    np.add.at(table, (row_of, column_of), 1)
    return table


# scikit-learn has both scores, too, but takes longer to load than torch: tests compare them
def _adjusted_rand(table: Values) -> float:
    """Return the adjusted Rand index (Hubert & Arabie 1985, equation 5).

    Args:
        table: as `_contingency` returns it.
    """
    m = int(table.sum())
    together = int((table**2).sum())  # ordered pairs, and each client with itself
    true_pairs = int((table.sum(axis=1) ** 2).sum())
    found_pairs = int((table.sum(axis=0) ** 2).sum())
    if together == true_pairs == found_pairs:
        return 1.0
    # pairs of two clients: in both, in the true clusters alone, in the found ones alone, in none
    in_both = together - m
    true_alone = true_pairs - together
    found_alone = found_pairs - together
    none = m * m - true_pairs - found_pairs + together
    expected = (in_both + true_alone) * (true_alone + none)
    expected += (in_both + found_alone) * (found_alone + none)
    return 2 * (in_both * none - true_alone * found_alone) / expected


def _normalized_mutual_information(table: Values) -> float:
    """Return the mutual information over the mean of both entropies (Vinh et al. 2010, NMI_sum).

    Args:
        table: as `_contingency` returns it.
    """
    if table.size == 1:
        return 1.0
    shares = table / table.sum()
    true_shares = shares.sum(axis=1)
    found_shares = shares.sum(axis=0)
    entropies = _entropy(true_shares) + _entropy(found_shares)
    information = max(entropies - _entropy(shares), 0.0)
    # what two independent clusterings have in common is rounding
    if information <= np.finfo(np.float64).eps * shares.size:
        return 0.0
    return 2 * information / entropies


def _entropy(shares: Values) -> float:
    """Return the entropy of shares, in nats."""
    present = shares[shares > 0]
    return float(-(present * np.log(present)).sum())


def mean(values: Values) -> float | None:
    """Return the mean over the clients that have test data.

    Args:
        values: one value a client, (m,); NaN for a client without test data.

    Returns:
        The mean, or None if no client has test data.
    """
    present = _present(values)
    if not present.size:
        return None
    return float(present.mean())


def spread(values: Values) -> dict[str, float]:
    """Return the lowest and the highest value of clients that have test data, and the quartiles.

    Quartiles are values of clients, those nearest to a quarter and three quarters of the way from
    the lowest to the highest.

    Args:
        values: one value a client, (m,); NaN for a client without test data.

    Returns:
        `lowest`, `lower_quartile`, `upper_quartile` and `highest`; nothing if no client has test
        data.
    """
    present = _present(values)
    if not present.size:
        return {}
    # no interpolation, which between two infinite perplexities is NaN
    quantiles = np.quantile(present, tuple(SPREAD.values()), method="nearest")
    return {name: float(value) for name, value in zip(SPREAD, quantiles, strict=True)}


def share_at(values: Values, target: float) -> float | None:
    """Return the share of clients that reach a target value.

    Args:
        values: one value a client, (m,); NaN for a client without test data, which does not count.
        target: the least value that reaches it.

    Returns:
        The share in [0, 1], or None if no client has test data.
    """
    present = _present(values)
    if not present.size:
        return None
    reached = present >= target
    return float(reached.mean())


def pearson(a: Values, b: Values) -> float:
    """Return Pearson's correlation of two arrays of one shape, in float64.

    Args:
        a: numbers of any shape.
        b: numbers of the same shape.

    Returns:
        The correlation; NaN if an array is constant or has fewer than two numbers.
    """
    x = _centred(a)
    y = _centred(b)
    x_square = (x * x).sum()
    y_square = (y * y).sum()
    scale = float(np.sqrt(x_square * y_square))
    if not scale > 0:
        return float("nan")
    return float(x @ y) / scale


def _present(values: Values) -> Values:
    return values[~np.isnan(values)]


def _centred(values: Values) -> Values:
    """Return the numbers less their mean, flattened, float64."""
    # The mean of no numbers is NaN, with a warning.
    if not values.size:
        return values
    flat = values.astype(np.float64).ravel()
    return np.asarray(flat - np.mean(values, dtype=np.float64))
