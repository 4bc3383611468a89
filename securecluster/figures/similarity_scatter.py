"""Similarity of pairs of users: as a network predicts it, against the true one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.figures.figure import figure


def similarity_pairs(state: Any, history: list[dict[str, Any]]) -> Any | None:
    """Return a figure of predicted against true similarity; None before clients were clustered.

    The left half shows synthetic users on which the network was not trained, the right half
    clients.

    Args:
        state: final state of NSIM's server; `known.fitted` has `true` and `predicted`
            similarities (k, k) of k users held out from training.
        history: a line for each round; the line of the clustering has `pairs_real`, [true,
            predicted] of every two clients, which only the observer computes, and both
            correlations.
    """
    clustering = None
    for line in history:
        if line.get("pairs_real"):
            clustering = line
            break
    if clustering is None:
        return None

    fitted = state.known.fitted
    # the matrices are symmetric: each pair counts once
    pairs = np.triu_indices(len(fitted.true), 1)
    true = fitted.true.numpy()[pairs]
    predicted = fitted.predicted.numpy()[pairs]
    synthetic = np.stack([true, predicted], axis=1)
    clients = np.array(clustering["pairs_real"])

    picture, (synthetic_axes, client_axes) = figure(8.4, 4.2, columns=2)
    _draw_pairs(synthetic_axes, synthetic, "synthetic users, unseen", clustering["pearson"])
    _draw_pairs(client_axes, clients, "clients", clustering["pearson_real"])
    return picture


def _draw_pairs(axes: Any, pairs: NDArray[Any], name: str, correlation: float | None) -> None:
    """Draw one point for each pair of users, and the line of a perfect prediction.

    Args:
        axes: matplotlib axes.
        pairs: true and predicted similarity of each pair, (n, 2).
        name: the users, as the title names them.
        correlation: Pearson's; None where it is not defined.
    """
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.plot(pairs[:, 0], pairs[:, 1], ".", markersize=3, alpha=0.5)
    score = "no correlation"
    if correlation is not None:
        score = f"Pearson {correlation:.3f}"
    axes.set(
        title=f"{name}: {score}",
        xlabel="true similarity (LCSS)",
        ylabel="predicted",
        # 0 and 1 are common values, whose points would lie on the edge
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
    )
