"""Newcomers: how many of the clients that join a finished run are sent to their true cluster, plain
and masked.

python -m securecluster.benchmarks.newcomers [--seeds 3] [--full] [--minutes 10]

20 clients run, 20 others of the same clusters join (MNIST: 100 training samples each, `--full`
1500). A newcomer counts as right where its true cluster is that of most clients of its label.
One-shot clustering compares features: its clients hold tasks, those of the others swapped labels or
turned images. MNIST is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securecluster import Federation, LabelSwap, Rotation, Tasks
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.protocols import CFL, FLHC, IFCA, SRFCA, OneShot

RUNS, LATER = 20, 20
PROTOCOLS: dict[str, Any] = {p.name: p for p in (CFL, FLHC, IFCA, SRFCA, OneShot)}
SCENARIOS: dict[str, Any] = {
    "label-swap": LabelSwap(clusters=4),
    "rotation": Rotation(clusters=4),
    "tasks": Tasks(),
}
MASKS = ("none", "permutation", "rotation")
SAMPLES: dict[str, dict[str, int | None]] = {
    "digits": {"cpu": None, "full": None},
    "mnist": {"cpu": 100, "full": 1500},
}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Data by scenario by protocol by mask by seed."""
    kinds = [
        {"data": data, "scenario": scenario, "protocol": protocol, "mask": mask}
        for data in SAMPLES
        for scenario in SCENARIOS
        for protocol in PROTOCOLS
        for mask in MASKS
        if (protocol == "oneshot") == (scenario == "tasks")
    ]
    return [{"scale": scale, **kind, "seed": seed} for seed in range(seeds) for kind in kinds]


def measure(cell: Cell) -> dict[str, Any]:
    """One run, and those who come later."""
    samples = SAMPLES[cell["data"]][cell["scale"]]
    scenario = SCENARIOS[cell["scenario"]]
    whole = Federation.simulate(
        cell["data"], scenario=scenario, clients=RUNS + LATER, samples=samples, seed=cell["seed"]
    )
    federation, newcomers = whole.select(range(RUNS)), whole.select(range(RUNS, RUNS + LATER))
    fitted = PROTOCOLS[cell["protocol"]](mask=cell["mask"]).fit(federation)
    assert (
        federation.truth is not None
        and newcomers.truth is not None
        and fitted.agreement_ is not None
    )
    most = {
        c: Counter(
            t for t, label in zip(federation.truth, fitted.labels_, strict=True) if label == c
        ).most_common(1)[0][0]
        for c in set(fitted.labels_.tolist())
    }
    found = fitted.predict(newcomers)
    return {
        "right": sum(most[int(c)] == t for c, t in zip(found, newcomers.truth, strict=True)),
        "of": LATER,
        "run_exact": fitted.agreement_["exact"],
        "bytes_each_up": fitted.joined_.bytes["up"] // LATER,
        "bytes_each_down": fitted.joined_.bytes["down"] // LATER,
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen, sheet = options(__doc__, argv), Sheet("newcomers")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows,
        ["data", "scenario", "protocol", "mask"],
        ["right", "run_exact", "bytes_each_up", "bytes_each_down"],
    )
    return sheet.path


if __name__ == "__main__":
    print(main())
