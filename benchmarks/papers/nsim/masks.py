"""Measure what NSIM's masks still hide (not in the paper).

The server has one layer in the clear, and synthetic models from the same start.

python -m benchmarks.papers.nsim.masks [--seeds 3] [--full] [--minutes 10]

After training alone each client sends its layer as it is, and then n_i·P(θ_i − θ_0) and n_i for its
cluster's first average; a server that adds replies up itself reads each of them. The server knows
θ_0 and what its synthetic users learned from there. A ridge regression over these users predicts
the other d − q coordinates of a client's displacement from its layer. No client helps the server.

Figures are relative errors of these coordinates, over all real users at once, of the server's
estimate from

- `by_mean`: the mean of its synthetic users, without any client;
- `by_layer`: the layer, whatever the mask;
- `by_gram`: the layer and the inner products that every orthonormal mask preserves, rotation and
  haar too;
- `by_signed` and `by_permuted`: the layer and displacements under these masks, whose columns are
  assigned to predicted ones.

`placed` and `placed_signed` are the shares of columns assigned right; `seeded` is that of all
columns by clients' starts alone, where these are their own and drawn from a seed that the server
knows. Traces are read from SECURECLUSTER_DATA.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.papers.nsim.runs import TRAINED, federation, network, trained_models
from benchmarks.sheet import Cell, Row, figure, spread
from securecluster.core.randomness import Randomness
from securecluster.protocols.nsim.client import INITIALIZATIONS, LAYERS, find_layer, initial_models
from securecluster.training.local_trainer import LocalTrainer

Array = NDArray[np.float64]
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"synthetic": 400, "clients": 100},
    "full": {"synthetic": 1000, "clients": 400},
}
RIDGE = 30.0  # on standardised numbers
ERRORS = ("by_mean", "by_layer", "by_gram", "by_signed", "by_permuted")
SHARES = ("placed_signed", "placed", "seeded")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return every layer and start, by seed."""
    fixed = {"scale": scale, **SCALES[scale], **TRAINED}
    settings = [{**fixed, **varied} for varied in product(init=INITIALIZATIONS, layer=LAYERS)]
    return with_seeds(settings, range(seeds))


def regressed(layers: Array, others: Array, observed: Array) -> Array:
    """Predict the other coordinates of observed layers by a ridge regression.

    Args:
        layers: the layers of synthetic users, (u, q).
        others: their other coordinates, (u, r).
        observed: the layers that the server receives, (m, q).

    Returns:
        The other coordinates of the observed layers, (m, r).
    """
    centre = layers.mean(0)
    # a constant coordinate has no deviation to divide by
    scale = layers.std(0) + 1e-9
    mean = others.mean(0)
    inputs = (layers - centre) / scale
    targets = others - mean
    penalty = RIDGE * np.eye(inputs.shape[1])
    covariance = inputs.T @ inputs + penalty
    # W = (XᵀX + ridge·I)⁻¹XᵀY
    weights = np.linalg.solve(covariance, inputs.T @ targets)
    standardised = (observed - centre) / scale
    return np.asarray(standardised @ weights + mean)


def assigned(columns: Array, guess: Array, signed: bool = False) -> tuple[Array, float]:
    """Put columns of unknown order, and signs, where they fit a guess best.

    Args:
        columns: the columns under the mask, (m, r).
        guess: predicted columns, (m, r).
        signed: the mask has flipped signs, too.

    Returns:
        The columns in their assigned order, and the share that is right.
    """
    inner = columns.T @ guess
    # both norms are the same in every assignment, so the inner products decide
    cost = -inner
    if signed:
        cost = -np.abs(inner)
    sources, targets = linear_sum_assignment(cost)
    flips = np.ones(len(sources))
    if signed:
        matched = inner[sources, targets]
        flips = np.sign(matched)
    ordered = np.empty_like(guess)
    ordered[:, targets] = columns[:, sources] * flips
    # the columns are given in their true order and with their true signs
    right = (sources == targets) & (flips > 0)
    return ordered, float(right.mean())


def turned(inner: Array, guess: Array) -> Array:
    """Return the rows with given inner products that lie nearest a guess.

    This is an orthogonal Procrustes problem.

    Args:
        inner: the inner products, (m, m).
        guess: the rows to approximate, (m, r).

    Returns:
        The rows, (m, r).
    """
    values, vectors = np.linalg.eigh(inner)
    # rounding makes some eigenvalues slightly negative
    deviations = np.sqrt(values.clip(0))
    # the symmetric root S: all rows with these inner products are S·Q for orthonormal Q
    root = vectors * deviations @ vectors.T
    rotation_in, _, rotation_out = np.linalg.svd(root @ guess, full_matrices=False)
    # Q = UVᵀ of S·guess = UΣVᵀ minimises ‖S·Q − guess‖
    return np.asarray(root @ rotation_in @ rotation_out)


def measure(cell: Cell) -> dict[str, Any]:
    """Return relative errors, and shares of coordinates that are placed right.

    Args:
        cell: the layer, the start, and the training of users.
    """
    flat = network(cell)
    begin = flat.initial().double().numpy()
    # displacements θ_i − θ_0, which masked averages consist of
    of_synthetic, of_real = trained_models(cell)
    synthetic = of_synthetic.double().numpy() - begin
    real = of_real.double().numpy() - begin
    layer = find_layer(flat, cell["layer"])
    # the layer's rows of a model whose weights are their own positions
    positions = torch.arange(len(begin))
    public = layer.rows(positions[None])[0].numpy()
    # the d − q coordinates that leave a client under the mask alone
    hidden = np.setdiff1d(positions.numpy(), public)
    true = real[:, hidden]
    others = synthetic[:, hidden]
    layers = synthetic[:, public]
    observed = real[:, public]
    guess = regressed(layers, others, observed)
    permuted, placed = assigned(true, guess)
    signed, placed_signed = assigned(true, guess, signed=True)
    estimates = {
        "by_mean": others.mean(0),
        "by_layer": guess,
        # rotation and haar keep inner products; less those of the known layer, they are these
        "by_gram": turned(true @ true.T, guess),
        "by_signed": signed,
        "by_permuted": permuted,
    }
    size = np.linalg.norm(true)
    results: dict[str, Any] = {}
    for name in ERRORS:
        error = np.linalg.norm(estimates[name] - true)
        results[name] = float(error / size)
    results["placed_signed"] = placed_signed
    results["placed"] = placed
    results["seeded"] = seeded(cell, real, begin)
    return results


def seeded(cell: Cell, real: Array, begin: Array) -> float | None:
    """Return the share of all coordinates that clients' own starts place.

    Args:
        cell: the cell; the starts are drawn from its seed.
        real: displacements of real users, (m, d).
        begin: θ_0, (d,).

    Returns:
        The share, None where all clients start from θ_0.
    """
    if cell["init"] == "common":
        return None
    device = torch.device("cpu")
    randomness = Randomness(cell["seed"])
    persons = federation(cell)
    # as the models of `nsim_runs` are drawn
    numbered = replace(persons, names=tuple(str(k) for k in range(len(persons))))
    cohort = LocalTrainer(numbered, network(cell), randomness, device)
    starts = initial_models(cohort, cell["init"])
    # displacements count from θ_0, so an own start is part of each of them
    guess = starts.double().numpy() - begin
    _, share = assigned(real, guess)
    return share


def picture(rows: Sequence[Row]) -> Any:
    """Draw relative errors by layer and start, as means over seeds."""
    drawing, axes = figure(6.4, 3.8)
    axis = axes[0, 0]
    groups = list(itertools.product(INITIALIZATIONS, LAYERS))
    for k, name in enumerate(ERRORS):
        means = spread(rows, ("init", "layer"), name)
        x = []
        heights = []
        for n, group in enumerate(groups):
            if group in means:
                mean, *_ = means[group]
                x.append(n + 0.15 * k)
                heights.append(mean)
        axis.bar(x, heights, 0.14, label=name)
    ticks = [n + 0.3 for n in range(len(groups))]
    labels = [f"{init},\n{layer} layer" for init, layer in groups]
    axis.set_xticks(ticks, labels)
    axis.set(ylabel="relative error of the other coordinates")
    drawing.legend(loc="outside upper center", ncols=len(ERRORS), fontsize=7)
    return drawing


GRID = Grid(
    __doc__,
    "nsim_masks",
    cells,
    measure,
    by=["init", "layer"],
    values=[*ERRORS, *SHARES],
    full="last",
    draw=picture,
)

if __name__ == "__main__":
    print(GRID.main())
