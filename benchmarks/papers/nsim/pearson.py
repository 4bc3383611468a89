"""Measure how well a layer predicts the similarity of users' data.

These are Figures 1 to 3 of Pacheco et al. 2021.

python -m benchmarks.papers.nsim.pearson [--seeds 3] [--full] [--minutes 10]

NSIM, CCA and CKA are compared with LCSS.

The paper: 100 synthetic users by random walks; an LSTM of four cells and three layers of 20 on
Monaco's traces; the weights of the last hidden layer. Pearson's correlation with LCSS is 0.96 for
NSIM and low for CCA and CKA. The paper does not say whether its pairs were seen in training, prints
neither radius nor training, and shows no numbers for CCA and CKA.

Measured here: `pearson` is over pairs of synthetic users that no step of the fit has seen,
`pearson_pairs` over pairs left out between users that were seen, `pearson_real` over real users,
whose data only this script compares. Mean CCA of a square layer is 1 for every pair, so for the
hidden layer it has no correlation; SVCCA, which drops weak directions, has one. There are common
and independent initial weights, and the hidden and the last layer. Traces are read from
SECURECLUSTER_DATA.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from benchmarks.grid import Grid
from benchmarks.papers.nsim.runs import SCALES, TRAINED, layer_correlations
from benchmarks.sheet import Cell, Row, figure, numbers
from securecluster.protocols.nsim.client import INITIALIZATIONS, LAYERS

VALUES = (
    "pearson",
    "pearson_pairs",
    "pearson_real",
    "cka",
    "cka_real",
    "cca",
    "cca_real",
    "svcca",  # drops weak directions, so it is not constant where mean CCA is 1 for every pair
    "svcca_real",
)
PAPER = {"hidden": "pearson 0.96 (pairs not said to be unseen); CCA and CKA low", "last": ""}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return every layer and start, by seed.

    The hidden layer and one start have cells with twice as many synthetic users, too.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    fixed = {"scale": scale, **SCALES[scale], **TRAINED}
    settings: list[Cell] = []
    # the paper says both “last layer” and “last hidden layer”, and “random” initial weights
    for init, seed, layer in product(INITIALIZATIONS, range(seeds), LAYERS):
        varied = {"init": init, "layer": layer, "paper": PAPER[layer], "seed": seed}
        settings.append({**fixed, **varied})
    more = {
        "synthetic": 2 * fixed["synthetic"],
        "init": "common",
        "layer": "hidden",
        "paper": PAPER["hidden"],
    }
    for seed in range(seeds):
        settings.append({**fixed, **more, "seed": seed})
    return settings


def pictures(rows: Sequence[Row]) -> Any:
    """Draw Figures 1 to 3 for unseen synthetic users (above) and real ones (below).

    They show the first seed with the hidden layer and one start.
    """
    picture, axes = figure(11.4, 7.4, rows=2, columns=3)
    for row in rows:
        if row["layer"] != "hidden" or row["init"] != "common":
            continue
        if row.get("points_nsim"):
            _scatter(axes[0], row, "", "synthetic, unseen")
            _scatter(axes[1], row, "_real", "real")
            break
    return picture


def _scatter(axes: Any, row: Row, suffix: str, users: str) -> None:
    """Draw NSIM, CCA and CKA against LCSS.

    Args:
        axes: three axes.
        row: the measurements.
        suffix: the end of its columns' names.
        users: the kind of users, for the titles.
    """
    # Figures 1, 2 and 3
    scores = {"nsim": "pearson", "cca": "cca", "cka": "cka"}
    for axis, (measure, score) in zip(axes, scores.items(), strict=True):
        label = measure.upper()
        correlation = numbers(row[f"{score}{suffix}"])
        text = "no correlation"
        if correlation:
            text = f"Pearson {correlation[0]:.3f}"
        true = numbers(row[f"points_true{suffix}"])
        points = numbers(row[f"points_{measure}{suffix}"])
        axis.plot(true, points, ".", markersize=3)
        axis.set_title(f"{label}, {users}: {text}", fontsize=10)
        axis.set(xlabel="LCSS", ylabel=label, xlim=(-0.02, 1.02))


GRID = Grid(
    __doc__,
    "nsim_pearson",
    cells,
    layer_correlations,
    by=["synthetic", "init", "layer"],
    values=VALUES,
    full="last",
    draw=pictures,
)

if __name__ == "__main__":
    print(GRID.main())
