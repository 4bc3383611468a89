"""Random rebalancing of the clients that train each model (RR-Cluster).

Yang, Hu, Kim, Li, "Differentially Private Federated Clustering with Random Rebalancing", 2025, by
its abstract: the paper itself was not at hand.

The server's own draws cost nothing, since the choices were released. Where secure sums hide
choices, it is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def rebalanced(
    choices: Sequence[int], k: int, minimum: int, draw: np.random.Generator
) -> list[int]:
    """Return the model that each client trains, of which every one has at least B clients.

    Random clients of models with more than B are moved to random places of those with fewer. No
    more are moved than are missing, so no model is left with fewer than B.

    Args:
        choices: (b,) the model that each client chose.
        k: number of models.
        minimum: B; where clients do not suffice for all models, the largest number that they do.
        draw: numpy generator.
    """
    minimum = min(minimum, len(choices) // k)
    counts = np.bincount(choices, minlength=k)
    spare: list[int] = []
    missing: list[int] = []
    for model in range(k):
        members = np.flatnonzero(np.asarray(choices) == model)
        surplus = max(0, int(counts[model]) - minimum)
        spare += draw.choice(members, surplus, replace=False).tolist()
        missing += [model] * max(0, minimum - int(counts[model]))
    models = list(choices)
    reassigned: list[int] = []
    if missing:
        reassigned = draw.choice(spare, len(missing), replace=False).tolist()
    for client, model in zip(reassigned, missing, strict=True):
        models[client] = model
    return models
