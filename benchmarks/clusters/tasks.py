"""Count how often one-shot clustering finds the number of tasks by itself.

python -m benchmarks.clusters.tasks [--seeds 3]

Clients are IID (one cluster), have tasks, or have rotated images. `possible` says whether the
merges contain the true clusters, so that the right height would give them. `ANGLE` in
`securecluster.clustering.agglomerative` was chosen by trial on seeds 0 to 3 of the same settings;
the seeds here are others, from 10 on. Image sets are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from benchmarks.grid import counts
from benchmarks.papers.oneshot.runs import judged, mapped, matrices
from benchmarks.table import tabulate
from securecluster import Federation
from securecluster.data.datasets import Source, source
from securecluster.data.pools import ArrayPool
from securecluster.data.scenarios import scenario

SAMPLES = {
    "digits": (40, 80),
    "fashion_mnist": (100, 300, 1000),
    "mnist": (100, 300, 1000),
    "cifar10": (100, 300, 1000),
}
SCENARIOS = ("iid", "tasks", "rotation")
# 10 users as in Figs. 2 and 3 of Ali & Arafa 2024, and twice as many
CLIENTS = (10, 20)
FEATURES = ("identity", "conv")
FIRST = 10  # no default was chosen on seeds from here on
ROWS = 30_000  # samples in memory
# p, as in Ali & Arafa 2024: five were enough in their Fig. 4
VECTORS = 5


def loaded(name: str) -> Source:
    """Return a data set whose first training samples are in memory, and also serve for testing.

    Args:
        name: a key of `SAMPLES`.
    """
    data = source(name)
    count = min(ROWS, len(data.train.y))
    images = data.train.read(np.arange(count))
    return replace(data, train=ArrayPool(images, data.train.y[:count]), test=None)


def measure(
    data: Source, scenario_name: str, clients: int, samples: int, seed: int
) -> list[dict[str, Any]]:
    """Return a line of the table for each feature map on one federation.

    Args:
        data: a data set that `loaded` returned.
        scenario_name: one of `SCENARIOS`.
        clients: how many.
        samples: training samples of each client.
        seed: of the federation and the feature maps.
    """
    federation = Federation.simulate(
        data, scenario=scenario(scenario_name), clients=clients, samples=samples, seed=seed
    )
    truth = federation.truth or (0,) * clients
    images = [shard.x for shard in federation.shards]
    rows = []
    for name in FEATURES:
        features = mapped(images, name, data.name, seed)
        (relevance,) = matrices(features, (VECTORS,))
        results = judged(relevance, truth)
        row = {
            "data": data.name,
            "scenario": scenario_name,
            "clients": clients,
            "samples": samples,
            "features": name,
            "seed": seed,
            "right": results["exact_without_T"],
            "possible": results["exact"],
            "within": results["within"],
            "across": results["across"],
        }
        rows.append(row)
    return rows


def settings(name: str, available: int) -> Iterator[tuple[str, int, int]]:
    """Yield scenario, clients and samples of the federations of one data set.

    Args:
        name: a key of `SAMPLES`.
        available: samples of the data set, for training and testing together.
    """
    for scenario_name in SCENARIOS:
        for clients in CLIENTS:
            for samples in SAMPLES[name]:
                # up to a quarter as many samples are held out for testing
                if clients * samples * 1.25 <= available / 1.25:
                    yield scenario_name, clients, samples


def measurements(seeds: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each federation.

    Args:
        seeds: how many of each setting.
    """
    for name in SAMPLES:
        data = loaded(name)
        for setting in settings(name, len(data.train.y)):
            for seed in range(FIRST, FIRST + seeds):
                yield [_text(row) for row in measure(data, *setting, seed)]


def _text(row: dict[str, Any]) -> dict[str, Any]:
    """Return a line of the table with numbers of four decimals."""
    texts = dict(row)
    for name, value in row.items():
        if isinstance(value, float):
            texts[name] = f"{value:.4f}"
    return texts


def main() -> None:
    """Run, write after each data set, print counts."""
    options = counts(__doc__, seeds=3)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    by = ("data", "scenario", "features")
    print(tabulate("tasks", measurements(options.seeds), by, counted=("right", "possible")))


if __name__ == "__main__":
    main()
