"""How well the similarity of real users could be told at all, beside what NSIM tells (Pacheco et
al. 2021, Figures 1 to 3; all ours).

python -m securecluster.benchmarks.papers.nsim_ceiling [--seeds 3] [--full] [--minutes 15]

The pair network reads the last hidden layer of users' models, or in its place what no server has:
the mean, covariance and number of each user's true positions. It learns from synthetic users, as
NSIM's does, or from real ones, which no server has either; then `pearson_real` is over pairs of
real users that it never saw. What the true statistics reach bounds what a layer that tells no more
than these can reach.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from securecluster.benchmarks.papers.nsim_runs import (
    SCALES,
    TRAINED,
    Users,
    both,
    network,
    real_users,
    synthetic_users,
)
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    options,
    summarise,
)
from securecluster.clustering.metrics import pearson
from securecluster.core.randomness import Randomness
from securecluster.protocols.nsim.client import find_layer
from securecluster.protocols.nsim.similarity_model import fit, predict

READS = ("layer", "statistics")
LEARNS = ("synthetic", "real")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return what is read, and whom is learned from, by seed."""
    fixed = {"scale": scale, **SCALES[scale], **TRAINED, "init": "common"}
    return [
        {**fixed, "reads": reads, "learns": learns, "seed": seed}
        for seed, reads, learns in product(range(seeds), READS, LEARNS)
    ]


def statistics(users: Users) -> torch.Tensor:
    """Return mean, covariance and the logarithm of the number of each user's positions, (u, 6)."""
    rows = []
    for _, y in users:
        mean = y.mean(0)
        positions = y.T.astype(np.float64)
        covariance = np.cov(positions)
        upper = covariance[np.triu_indices(2)]
        rows.append([*mean, *upper, np.log(len(y))])
    return torch.tensor(np.array(rows), dtype=torch.float32)


def measured(cell: Cell) -> dict[str, Any]:
    """Return Pearson's correlations over unseen users.

    These are users of the kind that is learned from, and real ones.
    """
    seed = cell["seed"]
    synthetic, true = synthetic_users(cell["synthetic"], seed)
    real, true_real = real_users(cell["clients"], seed)
    if cell["reads"] == "layer":
        layer = find_layer(network(cell), "hidden")
        rows, rows_real = (layer.rows(models) for models in both(cell))
    else:
        rows = statistics(synthetic)
        rows_real = statistics(real)
    if cell["learns"] == "real":
        fitted = fit(rows_real, torch.from_numpy(true_real), Randomness(seed))
        return {"pearson_real": fitted.pearson}
    fitted = fit(rows, torch.from_numpy(true), Randomness(seed))
    predicted = predict(fitted.estimator, rows_real, rows_real).numpy()
    pairs = np.triu_indices(len(real), 1)
    pearson_real = pearson(predicted[pairs], true_real[pairs])
    return {"pearson": fitted.pearson, "pearson_real": pearson_real}


def pictures(rows: Sequence[Row]) -> Any:
    """Draw Pearson's correlation over real users, with a point for each seed."""
    picture, places = figure(6.0, 3.6)
    axes = places.flat[0]
    settings = list(product(READS, LEARNS))
    for n, setting in enumerate(settings):
        correlations: list[float] = []
        for row in rows:
            if (row["reads"], row["learns"]) == setting:
                correlations += numbers(row.get("pearson_real", ""))
        axes.plot([n] * len(correlations), correlations, "o", color=f"C{n}")
    labels = [f"{reads},\nfrom {learns} users" for reads, learns in settings]
    axes.set_xticks(range(4), labels, fontsize=8)
    axes.set(ylabel="Pearson, real users")
    axes.grid(axis="y", alpha=0.3)
    return picture


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv, minutes=15.0)
    sheet = Sheet("nsim_ceiling")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measured, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(rows, ("reads", "learns"), ("pearson", "pearson_real"))
    return sheet.save(pictures(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
