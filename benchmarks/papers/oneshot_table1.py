"""R of five CIFAR-10 users with two tasks (Ali & Arafa 2024, Table I), for several feature maps.

python -m securecluster.benchmarks.papers.oneshot_table1 [--seeds 6] [--full] [--minutes 10]

The paper: users 1 and 2 have vehicles, users 3 to 5 animals; Φ is an ImageNet ResNet-18 up to its
    average pool; R is 0.97–0.98 within a
task and 0.31–0.32 across. Numbers of samples and of eigenvectors are not printed: ours are 1000
samples (`--full` 5000) and p = 5. Here with and without the 10 % minority that the paper's training
has. pca takes CIFAR-100 as its public data; resnet18 runs where torchvision and its weights are at
hand (else its rows say "not run"). Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

from securecluster import Federation
from securecluster.benchmarks.papers.oneshot_runs import dealt, judged, mapped, matrices, usable
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.data.scenarios import Tasks

SAMPLES = {"cpu": 1000, "full": 5000}
USERS = (2, 3)  # of each task
VECTORS = 5
FEATURES = ("identity", "pca", "conv", "resnet18")


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return features by minority by seed."""
    kinds = [
        {"minority": minority, "features": features}
        for features, minority in product(FEATURES, (0.0, 0.1))
    ]
    fixed = {
        "scale": scale,
        "data": "cifar10",
        "samples": SAMPLES[scale],
        "vectors": VECTORS,
        "paper": "0.97 within, 0.31 across",
    }
    settings: list[Cell] = []
    for setting in kinds:
        settings += [{**fixed, **setting, "seed": seed} for seed in range(seeds)]
    return settings


def measure(cell: Cell) -> dict[str, Any]:
    """Return R's values within and across tasks, and R itself, row by row, first task first."""
    scenario = Tasks(minority=cell["minority"])
    data_set = dealt(cell["data"], USERS)
    federation = Federation.simulate(
        data_set, scenario=scenario, clients=sum(USERS), samples=cell["samples"], seed=cell["seed"]
    )
    assert federation.truth is not None
    order = sorted(range(len(federation)), key=federation.truth.__getitem__)
    truth = [federation.truth[i] for i in order]
    features = mapped(
        [federation.shards[i].x for i in order], cell["features"], cell["data"], cell["seed"]
    )
    (r,) = matrices(features, (cell["vectors"],))
    return {"dimension": features[0].shape[1], **judged(r, truth), "R": r.flatten()}


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure what is missing, print."""
    chosen = options(__doc__, argv, seeds=6)
    sheet = Sheet("oneshot_table1")
    requested = cells(chosen.scale, chosen.seeds)
    sheet.fill(usable(requested), measure, chosen.minutes)
    rows = sheet.expect(requested)
    sheet.expect(cells("full", chosen.seeds))
    summarise(rows, ("features", "minority"), ("within", "across", "exact", "exact_without_T"))
    return sheet


if __name__ == "__main__":
    main()
