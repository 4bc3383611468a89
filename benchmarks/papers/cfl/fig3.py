"""Measure P[g > 0] for random vectors over k and γ (Sattler et al. 2019, Fig. 3).

python -m benchmarks.papers.cfl.fig3 [--seeds 3] [--full] [--minutes 10]

The region that Theorem 1 guarantees is drawn beside the measurements.

The paper: d = 100 and m = 3k, ∇R_l and ∇R_I(i) − ∇r_i are normally distributed, and P is close to 1
even for k > 10 and γ_max > 1.

Where the paper is silent, vectors are drawn as follows. v_1 … v_k are standard normal less their
mean, so that they sum to zero, as Theorem 1 asks at a stationary point. There are three clients of
each distribution. X_i is standard normal, scaled to ‖X_i‖ = γ·‖v_I(i)‖. A trial is correct where
`clustering.bipartition` splits no distribution, which can happen with g <= 0 too. `--full` has ten
times the trials.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.sheet import Cell, Row, figure, spread
from securecluster.clustering.bipartition import bipartition
from securecluster.core.randomness import Randomness
from securecluster.protocols.cfl.separation import guaranteed_noise, is_correct, separation_gap

# both beyond the paper's k = 10 and γ = 1
KS = (2, 3, 4, 6, 8, 10, 12, 16, 20, 30)
GAMMAS = (
    0.05,
    0.1,
    0.2,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1.0,
    1.1,
    1.2,
    1.3,
    1.4,
    1.5,
    1.75,
    2.0,
    2.5,
    3.0,
)
PAPER = "near 1 for k above 10 and noise above 1"


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells of every k and γ."""
    settings = product(
        scale=[scale],
        d=[100],  # d = 10² and m = 3k, as before eq. 30
        clients_each=[3],
        trials=[1000 if scale == "full" else 100],  # not in the paper
        paper=[PAPER],
        k=KS,
        gamma=GAMMAS,
    )
    return with_seeds(settings, range(seeds))


def vectors(
    k: int, clients_each: int, d: int, gamma: float, rng: np.random.Generator
) -> tuple[NDArray[np.float64], list[int]]:
    """Draw the clients' gradients v_I(i) + X_i.

    Args:
        k: the number of distributions.
        clients_each: clients of each distribution.
        d: coordinates of a gradient.
        gamma: ‖X_i‖/‖v_I(i)‖.
        rng: the source of the draws.

    Returns:
        The gradients, (k·clients_each, d), and I.
    """
    v = rng.standard_normal((k, d))
    # Theorem 1 asks that they sum to zero, as at a stationary point
    v -= v.mean(axis=0)
    truth: list[int] = []
    for c in range(k):
        truth += [c] * clients_each
    means = v[truth]
    # eq. 30 is for normally distributed X_i; the same γ_i for all (eq. 16) is not in the paper
    x = rng.standard_normal((len(truth), d))
    mean_norms = np.linalg.norm(means, axis=1, keepdims=True)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    x *= gamma * mean_norms / norms
    return means + x, truth


def measure(cell: Cell) -> dict[str, Any]:
    """Return the shares of trials with g > 0 and with a correct bipartition.

    Args:
        cell: k, γ, the number of trials and their seed.
    """
    k = cell["k"]
    gamma = cell["gamma"]
    trials = cell["trials"]
    randomness = Randomness(cell["seed"])
    positive = 0
    correct = 0
    for trial in range(trials):
        # a trial is drawn anew from its number, so that more trials do not change the first ones
        rng = randomness.generator("benchmark", "fig3", k, str(gamma), trial)
        r, truth = vectors(k, cell["clients_each"], cell["d"], gamma, rng)
        norms = np.linalg.norm(r, axis=1, keepdims=True)
        unit = r / norms
        # eq. 50: cosines of gradients
        alpha = unit @ unit.T
        gap = separation_gap(alpha, truth)
        if gap is not None and gap > 0:
            positive += 1
        # g > 0 is sufficient for a correct bipartition but not necessary, so both are counted
        first, second, *_ = bipartition(alpha)
        correct += is_correct(first, second, truth)
    return {
        "p_gap_positive": positive / trials,
        "p_correct": correct / trials,
        # the paper's green region, where Theorem 1 holds whatever the vectors
        "guaranteed": gamma < guaranteed_noise(k),
    }


def reached(rows: Sequence[Row], value: str, share: float = 0.99) -> dict[int, float]:
    """Return for each k the largest γ up to which the mean over seeds is at least `share`.

    Args:
        rows: the rows.
        value: the column of the shares of trials.
        share: the share that every γ up to the returned one reaches.
    """
    means: dict[int, dict[float, float]] = {}
    statistics = spread(rows, ["k", "gamma"], value)
    for (k, gamma), (mean, *_) in statistics.items():
        by_gamma = means.setdefault(int(k), {})
        by_gamma[float(gamma)] = mean
    largest: dict[int, float] = {}
    for number in sorted(means):
        by_gamma = means[number]
        largest[number] = 0.0
        for noise in sorted(by_gamma):
            if not by_gamma[noise] >= share:
                break
            largest[number] = noise
    return largest


def draw(rows: Sequence[Row]) -> Any:
    """Draw two maps over k and γ, with Theorem 1's region below the line."""
    picture, axes = figure(9.6, 4.0, columns=2)
    titles = {"p_gap_positive": "P[g > 0]", "p_correct": "P[correct bipartition]"}
    for axis, (value, title) in zip(axes.flat, titles.items(), strict=True):
        means = spread(rows, ["k", "gamma"], value)
        image = _map(axis, means)
        axis.set(title=title, xlabel="k", ylabel="γ")
        if means:
            picture.colorbar(image, ax=axis)
            axis.legend(loc="upper right", fontsize=8)
    return picture


def _map(axis: Any, means: Mapping[tuple[str, ...], Sequence[float]]) -> Any:
    """Draw one map, and return its image.

    Args:
        axis: the panel.
        means: the mean over seeds and other statistics, by k and γ.
    """
    ks = sorted({int(k) for k, _ in means})
    gammas = sorted({float(gamma) for _, gamma in means})
    table = np.full((len(gammas), len(ks)), np.nan)
    for (k, gamma), (mean, *_) in means.items():
        line = gammas.index(float(gamma))
        column = ks.index(int(k))
        table[line, column] = mean
    image = axis.imshow(table, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
    lines = range(len(gammas))
    edges = []
    for number in ks:
        # the map's rows are numbers of γ, not γ itself
        limit = guaranteed_noise(number)
        edge = np.interp(limit, gammas, lines, left=-0.5)
        edges.append(float(edge))
    columns = range(len(ks))
    axis.plot(columns, edges, color="crimson", marker=".", label="Theorem 1: g > 0 below")
    axis.set_xticks(columns, [str(number) for number in ks])
    axis.set_yticks(lines, [f"{gamma:g}" for gamma in gammas])
    return image


def report(rows: Sequence[Row]) -> None:
    """Print up to which noise bipartitions are correct, and what Theorem 1 guarantees.

    Args:
        rows: of the sheet.
    """
    for value in ("p_gap_positive", "p_correct"):
        limits = reached(rows, value)
        measured = [f"k = {k}: {gamma:g}" for k, gamma in limits.items()]
        text = ", ".join(measured)
        print(f"{value} is at least 0.99 up to γ: {text}")
    guaranteed = [f"k = {k}: {guaranteed_noise(k):.2f}" for k in KS]
    text = ", ".join(guaranteed)
    print(f"paper: {PAPER}; Theorem 1: {text}")


GRID = Grid(__doc__, "cfl_fig3", cells, measure, report=report, draw=draw)

if __name__ == "__main__":
    print(GRID.main())
