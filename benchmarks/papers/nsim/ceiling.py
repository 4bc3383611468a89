"""Measure how well the similarity of real users could be predicted at all, beside NSIM.

python -m benchmarks.papers.nsim.ceiling [--seeds 3] [--full] [--minutes 15]

This experiment is not in the paper (Pacheco et al. 2021); its settings are those of Figures 1 to 3.

The pair network reads the last hidden layer of users' models, or in its place what no server has:
the mean, covariance and number of each user's true positions. It learns from synthetic users, as
NSIM's does, or from real ones, which no server has either; then `pearson_real` is over pairs of
real users that it never saw. The correlation with the true statistics bounds that of any layer
which contains no more than these.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.papers.nsim.runs import (
    SCALES,
    TRAINED,
    Users,
    network,
    real_users,
    synthetic_users,
    trained_models,
)
from benchmarks.sheet import Cell, Row, figure, pooled
from securecluster.clustering.metrics import pearson
from securecluster.core.randomness import Randomness
from securecluster.protocols.nsim.client import find_layer
from securecluster.protocols.nsim.similarity_model import fit, predict

READS = ("layer", "statistics")
LEARNS = ("synthetic", "real")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the inputs and the training users of the pair network, by seed.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    fixed = {"scale": scale, **SCALES[scale], **TRAINED, "init": "common"}
    settings = [{**fixed, **varied} for varied in product(reads=READS, learns=LEARNS)]
    return with_seeds(settings, range(seeds))


def statistics(users: Users) -> torch.Tensor:
    """Return mean, covariance and the logarithm of the number of each user's positions, (u, 6).

    Args:
        users: the users' samples, (x, y) each.
    """
    upper = np.triu_indices(2)
    rows = []
    for _, y in users:
        mean = y.mean(0)
        positions = y.T.astype(np.float64)
        # a symmetric matrix has three different entries
        covariance = np.cov(positions)[upper]
        count = np.log(len(y))
        rows.append([*mean, *covariance, count])
    return torch.tensor(np.array(rows), dtype=torch.float32)


def measured(cell: Cell) -> dict[str, Any]:
    """Return Pearson's correlations over unseen users.

    These are users of the kind that is learned from, and real ones.

    Args:
        cell: what the pair network reads, the users that it learns from, and the training of users.
    """
    seed = cell["seed"]
    randomness = Randomness(seed)
    synthetic, true = synthetic_users(cell["synthetic"], seed)
    real, true_real = real_users(cell["clients"], seed)
    if cell["reads"] == "layer":
        # that of the paper's results
        layer = find_layer(network(cell), "hidden")
        rows, rows_real = (layer.rows(models) for models in trained_models(cell))
    else:
        rows = statistics(synthetic)
        rows_real = statistics(real)
    if cell["learns"] == "real":
        fitted = fit(rows_real, torch.from_numpy(true_real), randomness)
        # users that the fit held out, which are real ones here
        return {"pearson_real": fitted.pearson}
    fitted = fit(rows, torch.from_numpy(true), randomness)
    predicted = predict(fitted.estimator, rows_real, rows_real).numpy()
    # each pair once, without the diagonal
    pairs = np.triu_indices(len(real), 1)
    pearson_real = pearson(predicted[pairs], true_real[pairs])
    return {"pearson": fitted.pearson, "pearson_real": pearson_real}


def pictures(rows: Sequence[Row]) -> Any:
    """Draw Pearson's correlation over real users, with a point for each seed."""
    picture, axes = figure(6.0, 3.6)
    axis = axes[0, 0]
    settings = list(itertools.product(READS, LEARNS))
    for n, setting in enumerate(settings):
        selected = [row for row in rows if (row["reads"], row["learns"]) == setting]
        correlations = pooled(selected, "pearson_real")
        x = [n] * len(correlations)
        axis.plot(x, correlations, "o", color=f"C{n}")
    labels = [f"{reads},\nfrom {learns} users" for reads, learns in settings]
    axis.set_xticks(range(4), labels, fontsize=8)
    axis.set(ylabel="Pearson, real users")
    axis.grid(axis="y", alpha=0.3)
    return picture


GRID = Grid(
    __doc__,
    "nsim_ceiling",
    cells,
    measured,
    by=["reads", "learns"],
    values=["pearson", "pearson_real"],
    minutes=15.0,
    full="last",
    draw=pictures,
)

if __name__ == "__main__":
    print(GRID.main())
