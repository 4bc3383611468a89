"""Pairs of users: what a network told of their similarity, against the true one."""

from __future__ import annotations

from typing import Any

import numpy as np

from securecluster.app.plots.figure import figure


def similarity_pairs(state: Any, history: list[dict[str, Any]]) -> Any | None:
    """A figure of predicted against true similarity, of unseen synthetic users and of clients; None
    before clients were clustered.

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
    made, axes = figure(8.4, 4.2, columns=2)
    for place, points, name, score in (
        (axes[0], unseen, "synthetic users, unseen", line["pearson"]),
        (axes[1], np.array(line["pairs_real"]), "clients", line["pearson_real"]),
    ):
        place.plot([0, 1], [0, 1], color="grey", linewidth=0.8)
        place.plot(points[:, 0], points[:, 1], ".", markersize=3, alpha=0.5)
        known = "no correlation" if score is None else f"Pearson {score:.3f}"
        place.set(
            title=f"{name}: {known}",
            xlabel="true similarity (LCSS)",
            ylabel="predicted",
            xlim=(-0.02, 1.02),
            ylim=(-0.02, 1.02),
        )
    return made
