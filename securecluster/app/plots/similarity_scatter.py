"""Similarity of pairs of users: as a network predicts it, against the true one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.app.plots.figure import figure


def similarity_pairs(state: Any, history: list[dict[str, Any]]) -> Any | None:
    """Return a figure of predicted against true similarity; None before clients were clustered.

    One half is about synthetic users that the network has not seen, the other about clients.

    Args:
        state: of NSIM's server: `known.fitted` has `true` and `predicted` (k, k) of unseen users.
        history: one line has `pairs_real`, [true, predicted] of clients, which the observer knows,
            and the correlations.
    """
    line = next((line for line in history if line.get("pairs_real")), None)
    if line is None:
        return None
    fitted = state.known.fitted
    above = np.triu_indices(len(fitted.true), 1)
    unseen = np.stack([fitted.true.numpy()[above], fitted.predicted.numpy()[above]], axis=1)
    picture, (left, right) = figure(8.4, 4.2, columns=2)
    _draw_pairs(left, unseen, "synthetic users, unseen", line["pearson"])
    _draw_pairs(right, np.array(line["pairs_real"]), "clients", line["pearson_real"])
    return picture


def _draw_pairs(axes: Any, pairs: NDArray[Any], name: str, score: float | None) -> None:
    """Draw pairs (n, 2) of a true and a predicted similarity, and the line of a perfect one."""
    axes.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
    axes.plot(pairs[:, 0], pairs[:, 1], ".", markersize=3, alpha=0.5)
    correlation = "no correlation" if score is None else f"Pearson {score:.3f}"
    axes.set(
        title=f"{name}: {correlation}",
        xlabel="true similarity (LCSS)",
        ylabel="predicted",
        xlim=(-0.02, 1.02),
        ylim=(-0.02, 1.02),
    )
