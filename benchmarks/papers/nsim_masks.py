"""What NSIM's masks still hide, since the server has one layer in the clear and synthetic models
from the same start (ours).

python -m securecluster.benchmarks.papers.nsim_masks [--seeds 3] [--full] [--minutes 10]

After training alone each client sends its layer as it is, and then n_i·P(θ_i − θ_0) and n_i for its
cluster's first average; the plain sum reads every reply. The server knows θ_0 and what its
synthetic users learned from there. A ridge regression over these users predicts the other d − q
coordinates of a client's displacement from its layer. Figures are relative errors of these
coordinates, over all real users at once, of what the server makes of: `by_mean`, the mean of its
synthetic users, without any client; `by_layer`, the layer, whatever the mask; `by_gram`, the layer
and the inner products that every orthonormal mask leaves as they were, rotation and haar too;
`by_signed` and `by_permuted`, the layer and displacements under these masks, whose columns are
assigned to predicted ones. `placed` and `placed_signed` are the shares of columns assigned right;
`seeded` is that of all columns by clients' starts alone, where these are their own and drawn from a
seed that the server knows. In none of this does a client help. Traces are read from
SECURECLUSTER_DATA.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from securecluster.benchmarks.papers.nsim_runs import TRAINED, both, federation, network
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    options,
    spread,
    summarise,
)
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
    """Every layer and start, by seed."""
    fixed = {"scale": scale, **SCALES[scale], **TRAINED}
    return [
        {**fixed, "init": init, "layer": layer, "seed": seed}
        for seed in range(seeds)
        for init in INITIALIZATIONS
        for layer in LAYERS
    ]


def regressed(layers: Array, rest: Array, seen: Array) -> Array:
    """The other coordinates (m, r) of layers `seen` (m, q), by a ridge regression from synthetic
    users' (u, q) to theirs (u, r).
    """
    middle, scale, mean = layers.mean(0), layers.std(0) + 1e-9, rest.mean(0)
    x, new = (layers - middle) / scale, (seen - middle) / scale
    return np.asarray(
        new @ np.linalg.solve(x.T @ x + RIDGE * np.eye(x.shape[1]), x.T @ (rest - mean)) + mean
    )


def assigned(columns: Array, guess: Array, signed: bool = False) -> tuple[Array, float]:
    """Columns (m, r) whose order, and signs, nobody told, put where they fit a guess (m, r) best;
    and the share that is right.
    """
    inner = columns.T @ guess
    # both norms are the same in every assignment
    came, place = linear_sum_assignment(-np.abs(inner) if signed else -inner)
    flips = np.sign(inner[came, place]) if signed else np.ones(len(came))
    found = np.empty_like(guess)
    found[:, place] = columns[:, came] * flips
    return found, float(((came == place) & (flips > 0)).mean())


def turned(inner: Array, guess: Array) -> Array:
    """The rows (m, r) with these inner products (m, m) that lie nearest a guess (m, r): an
    orthogonal Procrustes problem.
    """
    values, vectors = np.linalg.eigh(inner)
    root = vectors * np.sqrt(values.clip(0)) @ vectors.T
    left, _, right = np.linalg.svd(root @ guess, full_matrices=False)
    return np.asarray(root @ left @ right)


def measure(cell: Cell) -> dict[str, Any]:
    """Relative errors, and shares of coordinates that are placed right."""
    flat = network(cell)
    begin = flat.initial().double().numpy()
    made, real = (own.double().numpy() - begin for own in both(cell))
    layer = find_layer(flat, cell["layer"])
    known = layer.rows(torch.arange(len(begin))[None])[0].numpy()
    rest = np.setdiff1d(np.arange(len(begin)), known)
    guess, true = regressed(made[:, known], made[:, rest], real[:, known]), real[:, rest]
    permuted, placed = assigned(true, guess)
    signed, placed_signed = assigned(true, guess, signed=True)
    told = (made[:, rest].mean(0), guess, turned(true @ true.T, guess), signed, permuted)
    errors = {
        name: float(np.linalg.norm(own - true) / np.linalg.norm(true))
        for name, own in zip(ERRORS, told, strict=True)
    }
    return {
        **errors,
        "placed_signed": placed_signed,
        "placed": placed,
        "seeded": seeded(cell, real, begin),
    }


def seeded(cell: Cell, real: Array, begin: Array) -> float | None:
    """The share of all coordinates that clients' own starts place, where these are drawn from the
    run's seed.
    """
    if cell["init"] == "common":
        return None
    cohort = LocalTrainer(
        federation(cell), network(cell), Randomness(cell["seed"]), torch.device("cpu")
    )
    return assigned(real, initial_models(cohort, cell["init"]).double().numpy() - begin)[1]


def picture(rows: Sequence[Row]) -> Any:
    """Relative errors by layer and start, means over seeds."""
    made, axes = figure(6.4, 3.8)
    groups = [(init, layer) for init in INITIALIZATIONS for layer in LAYERS]
    for k, name in enumerate(ERRORS):
        found = spread(rows, ("init", "layer"), name)
        there = [n for n, group in enumerate(groups) if group in found]
        axes[0, 0].bar(
            [n + 0.15 * k for n in there], [found[groups[n]][0] for n in there], 0.14, label=name
        )
    axes[0, 0].set_xticks(
        [n + 0.3 for n in range(len(groups))], [f"{init},\n{layer} layer" for init, layer in groups]
    )
    axes[0, 0].set(ylabel="relative error of the other coordinates")
    made.legend(loc="outside upper center", ncols=len(ERRORS), fontsize=7)
    return made


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("nsim_masks")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(rows, ("init", "layer"), (*ERRORS, *SHARES))
    return sheet.save(picture(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
