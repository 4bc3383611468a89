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
    """Every k and γ."""
    fixed = {
        "scale": scale,
        "d": 100,
        "clients_each": 3,
        "trials": 1000 if scale == "full" else 100,
        "paper": PAPER,
    }
    return [
        {**fixed, "k": k, "gamma": gamma, "seed": seed}
        for seed in range(seeds)
        for k in KS
        for gamma in GAMMAS
    ]


def vectors(
    k: int, clients_each: int, d: int, gamma: float, rng: np.random.Generator
) -> tuple[NDArray[np.float64], list[int]]:
    """The clients' gradients v_I(i) + X_i, (k·each, d), and I."""
    v = rng.standard_normal((k, d))
    v -= v.mean(axis=0)
    truth = [c for c in range(k) for _ in range(clients_each)]
    x = rng.standard_normal((len(truth), d))
    x *= (
        gamma
        * np.linalg.norm(v[truth], axis=1, keepdims=True)
        / np.linalg.norm(x, axis=1, keepdims=True)
    )
    return v[truth] + x, truth


def measure(cell: Cell) -> dict[str, Any]:
    """Shares of trials with g > 0 and with a correct bipartition."""
    k, gamma, trials = cell["k"], cell["gamma"], cell["trials"]
    positive = correct = 0
    for trial in range(trials):
        rng = Randomness(cell["seed"]).generator("benchmark", "fig3", k, str(gamma), trial)
        r, truth = vectors(k, cell["clients_each"], cell["d"], gamma, rng)
        unit = r / np.linalg.norm(r, axis=1, keepdims=True)
        alpha = unit @ unit.T
        gap = separation_gap(alpha, truth)
        positive += gap is not None and gap > 0
        correct += is_correct(*bipartition(alpha)[:2], truth)
    return {
        "p_gap_positive": positive / trials,
        "p_correct": correct / trials,
        "guaranteed": gamma < guaranteed_noise(k),
    }


def reached(rows: Sequence[Row], value: str, share: float = 0.99) -> dict[int, float]:
    """For each k the largest γ up to which the mean over seeds is at least `share`."""
    found: dict[int, float] = {}
    means = {
        (int(k), float(gamma)): mean
        for (k, gamma), (mean, *_) in spread(rows, ["k", "gamma"], value).items()
    }
    for k in sorted({k for k, _ in means}):
        held = True
        found[k] = 0.0
        for gamma in sorted(gamma for other, gamma in means if other == k):
            held = held and means[k, gamma] >= share
            found[k] = gamma if held else found[k]
    return found


def draw(rows: Sequence[Row]) -> Any:
    """Two maps over k and γ, with Theorem 1's region below the line."""
    made, axes = figure(9.6, 4.0, columns=2)
    for axis, (value, title) in zip(
        axes.flat,
        (("p_gap_positive", "P[g > 0]"), ("p_correct", "P[correct bipartition]")),
        strict=True,
    ):
        means = spread(rows, ["k", "gamma"], value)
        ks, gammas = sorted({int(k) for k, _ in means}), sorted({float(g) for _, g in means})
        table = np.full((len(gammas), len(ks)), np.nan)
        for (k, gamma), (mean, *_) in means.items():
            table[gammas.index(float(gamma)), ks.index(int(k))] = mean
        shown = axis.imshow(table, origin="lower", aspect="auto", vmin=0, vmax=1, cmap="viridis")
        edges = [
            float(np.interp(guaranteed_noise(k), gammas, range(len(gammas)), left=-0.5)) for k in ks
        ]
        axis.plot(
            range(len(ks)), edges, color="crimson", marker=".", label="Theorem 1: g > 0 below"
        )
        axis.set_xticks(range(len(ks)), [str(k) for k in ks])
        axis.set_yticks(range(len(gammas)), [f"{gamma:g}" for gamma in gammas])
        axis.set(title=title, xlabel="k", ylabel="γ")
        if means:
            made.colorbar(shown, ax=axis)
            axis.legend(loc="upper right", fontsize=8)
    return made


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("cfl_fig3")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    for value in ("p_gap_positive", "p_correct"):
        print(
            f"{value} is at least 0.99 up to γ: "
            + ", ".join(f"k = {k}: {gamma:g}" for k, gamma in reached(rows, value).items())
        )
    print(
        f"paper: {PAPER}; Theorem 1: "
        + ", ".join(f"k = {k}: {guaranteed_noise(k):.2f}" for k in KS)
    )
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
