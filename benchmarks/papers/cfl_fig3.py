"""P[g > 0] for random vectors over k and γ (Sattler et al. 2019, Fig. 3), beside the region that
Theorem 1 guarantees.

python -m securecluster.benchmarks.papers.cfl_fig3 [--seeds 3] [--full] [--minutes 10]

The paper: d = 100, m = 3k, ∇R_l and ∇R_I(i) − ∇r_i normally distributed, P ≈ 1 even for k > 10 and
    γ_max > 1. Drawn here (ours, where the
paper is silent): v_1 … v_k standard normal less their mean, so that they sum to zero, as Theorem 1
    asks at a stationary point; three
clients of each distribution; X_i standard normal, scaled to ‖X_i‖ = γ·‖v_I(i)‖. A trial is correct
where `clustering.bipartition` leaves every distribution whole, which can happen with g <= 0 too.
`--full` has ten times the trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.benchmarks.papers.sheet import Cell, Row, Sheet, figure, options, spread
from securecluster.clustering.bipartition import bipartition
from securecluster.core.randomness import Randomness
from securecluster.protocols.cfl.separation import guaranteed_noise, is_correct, separation_gap

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
    fixed = {
        "scale": scale,
        "d": 100,
        "clients_each": 3,
        "trials": 1000 if scale == "full" else 100,
        "paper": PAPER,
    }
    return [
        {**fixed, "k": k, "gamma": gamma, "seed": seed}
        for seed, k, gamma in product(range(seeds), KS, GAMMAS)
    ]


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
    x = rng.standard_normal((len(truth), d))
    mean_norms = np.linalg.norm(means, axis=1, keepdims=True)
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    x *= gamma * mean_norms / norms
    return means + x, truth


def measure(cell: Cell) -> dict[str, Any]:
    """Return the shares of trials with g > 0 and with a correct bipartition."""
    k = cell["k"]
    gamma = cell["gamma"]
    trials = cell["trials"]
    positive = 0
    correct = 0
    for trial in range(trials):
        rng = Randomness(cell["seed"]).generator("benchmark", "fig3", k, str(gamma), trial)
        r, truth = vectors(k, cell["clients_each"], cell["d"], gamma, rng)
        unit = r / np.linalg.norm(r, axis=1, keepdims=True)
        alpha = unit @ unit.T
        gap = separation_gap(alpha, truth)
        if gap is not None and gap > 0:
            positive += 1
        correct += is_correct(*bipartition(alpha)[:2], truth)
    return {
        "p_gap_positive": positive / trials,
        "p_correct": correct / trials,
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
    for (k, gamma), (mean, *_) in spread(rows, ["k", "gamma"], value).items():
        means.setdefault(int(k), {})[float(gamma)] = mean
    largest: dict[int, float] = {}
    for number in sorted(means):
        largest[number] = 0.0
        for noise in sorted(means[number]):
            if not means[number][noise] >= share:
                break
            largest[number] = noise
    return largest


def draw(rows: Sequence[Row]) -> Any:
    """Draw two maps over k and γ, with Theorem 1's region below the line."""
    picture, axes = figure(9.6, 4.0, columns=2)
    titles = {"p_gap_positive": "P[g > 0]", "p_correct": "P[correct bipartition]"}
    for axis, (value, title) in zip(axes.flat, titles.items(), strict=True):
        means = spread(rows, ["k", "gamma"], value)
        ks = sorted({int(k) for k, _ in means})
        gammas = sorted({float(gamma) for _, gamma in means})
        table = np.full((len(gammas), len(ks)), np.nan)
        for (k, gamma), (mean, *_) in means.items():
            table[gammas.index(float(gamma)), ks.index(int(k))] = mean
        image = axis.imshow(table, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
        edges = []
        for number in ks:
            # the map's rows are numbers of γ, not γ itself
            edge = np.interp(guaranteed_noise(number), gammas, range(len(gammas)), left=-0.5)
            edges.append(float(edge))
        label = "Theorem 1: g > 0 below"
        axis.plot(range(len(ks)), edges, color="crimson", marker=".", label=label)
        axis.set_xticks(range(len(ks)), [str(number) for number in ks])
        axis.set_yticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
        axis.set(title=title, xlabel="k", ylabel="γ")
        if means:
            picture.colorbar(image, ax=axis)
            axis.legend(loc="upper right", fontsize=8)
    return picture


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("cfl_fig3")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measure, chosen.minutes)
    for value in ("p_gap_positive", "p_correct"):
        limits = reached(rows, value)
        text = ", ".join(f"k = {k}: {gamma:g}" for k, gamma in limits.items())
        print(f"{value} is at least 0.99 up to γ: {text}")
    guaranteed = {k: guaranteed_noise(k) for k in KS}
    text = ", ".join(f"k = {k}: {gamma:.2f}" for k, gamma in guaranteed.items())
    print(f"paper: {PAPER}; Theorem 1: {text}")
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
