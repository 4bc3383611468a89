"""How often the one-shot clustering finds the number of tasks by itself: on IID clients (one
cluster), on tasks and on rotated images.

python -m securecluster.benchmarks.tasks [--seeds 3]

`possible`: whether the merges hold the true clusters, so that the right height would give them.
`ANGLE` in `hierarchy` was chosen by trial on seeds 0 to 3 of the same settings; the seeds here are
others, from 10 on. Image sets are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from securecluster import Federation
from securecluster.benchmarks.papers.oneshot_runs import judged, mapped, matrices
from securecluster.benchmarks.table import write
from securecluster.data.datasets import Source, source
from securecluster.data.pools import ArrayPool
from securecluster.data.scenarios import scenario

SAMPLES = {
    "digits": (40, 80),
    "fashion_mnist": (100, 300, 1000),
    "mnist": (100, 300, 1000),
    "cifar10": (100, 300, 1000),
}
SCENARIOS, CLIENTS, FEATURES = ("iid", "tasks", "rotation"), (10, 20), ("identity", "conv")
FIRST, ROWS, VECTORS = 10, 30_000, 5


def loaded(name: str) -> Source:
    """A data set whose first training samples are in memory, and serve for testing too."""
    given = source(name)
    count = min(ROWS, len(given.train.y))
    return replace(
        given, train=ArrayPool(given.train.read(np.arange(count)), given.train.y[:count]), test=None
    )


def measure(
    given: Source, kind: str, clients: int, samples: int, seed: int
) -> list[dict[str, Any]]:
    """Both feature maps on one federation."""
    federation = Federation.simulate(
        given, scenario=scenario(kind), clients=clients, samples=samples, seed=seed
    )
    truth, rows = federation.truth or (0,) * clients, []
    for name in FEATURES:
        (r,) = matrices(
            mapped([shard.x for shard in federation.shards], name, given.name, seed), (VECTORS,)
        )
        found = judged(r, truth)
        key = {
            "data": given.name,
            "scenario": kind,
            "clients": clients,
            "samples": samples,
            "features": name,
            "seed": seed,
        }
        rows.append(
            {
                **key,
                "right": found["exact_without_T"],
                "possible": found["exact"],
                **{k: found[k] for k in ("within", "across")},
            }
        )
    return rows


def main() -> None:
    """Run, write after each data set, print counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error("--seeds is at least 1")
    torch.set_num_threads(min(2, torch.get_num_threads()))
    table: list[dict[str, Any]] = []
    for name, sizes in SAMPLES.items():
        given = loaded(name)
        settings = [
            (k, m, n)
            for k in SCENARIOS
            for m in CLIENTS
            for n in sizes
            if m * n * 1.25 <= len(given.train.y) / 1.25
        ]
        for setting in settings:
            table += [
                row
                for seed in range(FIRST, FIRST + options.seeds)
                for row in measure(given, *setting, seed)
            ]
        write(
            "tasks",
            [
                {key: f"{v:.4f}" if isinstance(v, float) else v for key, v in row.items()}
                for row in table
            ],
        )
        for kind in SCENARIOS:
            for features in FEATURES:
                own = [
                    row
                    for row in table
                    if (row["data"], row["scenario"], row["features"]) == (name, kind, features)
                ]
                right, possible = (sum(row[what] for row in own) for what in ("right", "possible"))
                print(
                    f"{name} {kind} {features}: right {right}, possible {possible} of {len(own)}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
