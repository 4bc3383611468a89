"""How often CFL's split test, which draws a sample of the clients, splits them.

python -m benchmarks.clusters.split_test [--minutes 60]

Clients are those without clusters, and those of whom few or half differ. The test is as it is, and
the same with draws of all clients.

Run with OMP_NUM_THREADS=1: several threads add up to more processor time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest

from benchmarks.grid import script_parser
from benchmarks.sheet import Cell, Sheet
from benchmarks.table import RESULTS
from securecluster.clustering.bipartition import separated, separation_scores
from securecluster.clustering.noise_robust import (
    SplitEvidence,
    eigengap,
    evidence_for_split,
    mean_separation,
    partition,
)
from securecluster.clustering.significance import Null, p_value
from securecluster.core.lazy_torch import torch
from securecluster.protocols import CFL

Array = NDArray[np.float64]
DIRECTIONS = 200  # numbers of an update
# distance of two clusters' centres from the origin, in norms of the noise: cosines of 0.6 in them
APART = 1.2
APART_UNDER_NOISE = 0.9  # in cosines of 0.45
CLUSTERERS = ("paper", "average")
REPETITIONS = 400  # of clients without clusters


def draws_of_all(
    alpha: Array, clusterer: str, minimum: float, level: float, seed: int, *watch: object
) -> SplitEvidence:
    """Test a split as `evidence_for_split` does, with draws of all clients, one at a time.

    Args:
        alpha: cosines, (m, m).
        clusterer: "paper" or another one.
        minimum: separations up to this are not tested.
        level: at most 1 / level draws are made.
        seed: of the draws.
        watch: not used; CFL passes it.
    """

    def separation(cosines: Array) -> tuple[float, list[int]]:
        if clusterer == "paper":
            found = separated(cosines)
            return found.score, found.labels
        count = max(2, eigengap(cosines))
        labels = partition(cosines, clusterer, count, seed)
        return mean_separation(cosines, labels), labels

    def statistic(drawn: Array) -> Iterator[float]:
        for cosines in drawn:
            if clusterer == "paper":
                scores = separation_scores(cosines[None])
                yield float(scores[0])
            else:
                yield separation(cosines)[0]

    observed, labels = separation(alpha)
    if observed <= minimum or len(set(labels)) in (1, len(labels)):
        return SplitEvidence(observed, 1.0)
    null = Null.within(alpha, labels)
    generator = np.random.default_rng(seed)
    # draws of a test that stops early are not made in advance
    with patch("securecluster.clustering.significance._batch_sizes", _one_by_one):
        found = p_value(statistic, observed, null, level, generator)
    return SplitEvidence(observed, found)


def _one_by_one(draws: int, clients: int) -> Iterator[int]:
    """Yield 1 for each draw."""
    yield from [1] * draws


def updates(clients: int, few: int, apart: float, seed: int) -> NDArray[np.float32]:
    """Return updates of clients around one or two centres, (m, `DIRECTIONS`).

    Args:
        clients: m, how many.
        few: so many of them are around the second centre.
        apart: norm of both centres, which are orthogonal, in norms of the noise.
        seed: of the draws.
    """
    generator = np.random.default_rng([seed, clients, few])
    second = np.arange(clients) < few
    rows = generator.standard_normal((clients, DIRECTIONS))
    distance = apart * DIRECTIONS**0.5
    rows[:, 0] += np.where(second, 0.0, distance)
    rows[:, 1] += np.where(second, distance, 0.0)
    return rows.astype(np.float32)


def cosines_of(rows: NDArray[np.float32], noise: float, seed: int) -> Array:
    """Return the cosines of updates, with noise, (m, m).

    Args:
        rows: the updates.
        noise: standard deviation of the noise in each cosine.
        seed: of the noise.
    """
    wide = rows.astype(np.float64)
    unit = wide / np.linalg.norm(wide, axis=1, keepdims=True)
    alpha: Array = unit @ unit.T
    if noise:
        drawn = np.random.default_rng(seed).normal(scale=noise, size=alpha.shape)
        half = np.triu(drawn, 1)
        alpha += half + half.T
    np.fill_diagonal(alpha, 1.0)
    return alpha.clip(-1, 1, out=alpha)


def cells() -> list[Cell]:
    """Return clients with and without clusters, by their number, clusterer and level."""
    grid: list[Cell] = []
    for clusterer in CLUSTERERS:
        for clients, repetitions, compared in ((250, 20, 10), (500, 20, 4), (1000, 10, 1)):
            for few in _sizes(clients):
                grid.append(_cell(clusterer, clients, few, 0.05, repetitions, compared))
    for few in _sizes(250):
        grid.append(_cell("paper", 250, few, CFL().additions.level, 20, 2))
    for clients, compared in ((250, 40), (500, 10), (1000, 2)):
        for clusterer in CLUSTERERS:
            grid.append(_cell(clusterer, clients, 0, 0.05, REPETITIONS, compared))
    return grid


def _sizes(clients: int) -> tuple[int, ...]:
    """Return sizes of the smaller of two clusters: 50 %, 10 % and 3 % of the clients, and five."""
    return clients // 2, clients // 10, clients * 3 // 100, 5


def _cell(
    clusterer: str, clients: int, few: int, level: float, repetitions: int, compared: int
) -> Cell:
    """Return a cell.

    Args:
        clusterer: "paper" or another one.
        clients: how many.
        few: so many of them are the smaller cluster; 0 of clients without clusters.
        level: of the test.
        repetitions: of the test.
        compared: the repetitions in which all clients are drawn, too.
    """
    # other clusterers are for noise, under which they find clusters that are nearer
    paper = clusterer == "paper"
    return {
        "clusterer": clusterer,
        "clients": clients,
        "smaller_cluster": few,
        "apart": APART if paper else APART_UNDER_NOISE,
        "noise": 0.0 if paper else 0.3,
        "level": level,
        "repetitions": repetitions,
        "compared": compared,
    }


def decisions(cell: Cell) -> dict[str, Any]:
    """Count the splits of one cell.

    Args:
        cell: one of `cells`.

    Returns:
        Splits by a sample, and the interval of their rate with probability 0.95; splits by draws of
        all clients, and on how many of the same updates both decide alike.
    """
    minimum = CFL().additions.evidence
    # without clusters no separation would be tested
    if not cell["smaller_cluster"]:
        minimum = 0.0
    level = cell["level"]
    sampled = []
    every_one = []
    for seed in range(cell["repetitions"]):
        rows = updates(cell["clients"], cell["smaller_cluster"], cell["apart"], seed)
        alpha = cosines_of(rows, cell["noise"], seed)
        arguments = (alpha, cell["clusterer"], minimum, level, seed)
        sampled.append(evidence_for_split(*arguments).p_value <= level)
        if seed < cell["compared"]:
            every_one.append(draws_of_all(*arguments).p_value <= level)
    pairs = zip(sampled, every_one, strict=False)
    interval = binomtest(sum(sampled), len(sampled)).proportion_ci(0.95)
    return {
        "split": sum(sampled),
        "rate_low": round(interval.low, 4),
        "rate_high": round(interval.high, 4),
        "split_by_all": sum(every_one),
        "alike": sum(one == other for one, other in pairs),
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure, and write the CSV file."""
    parser = script_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="no cell is started after")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    sheet = Sheet("split_test_decisions", RESULTS)
    sheet.fill(cells(), decisions, options.minutes)
    return sheet.path


if __name__ == "__main__":
    print(main())
