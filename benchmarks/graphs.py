"""How often SR-FCA finds the true clusters without a number of them or a λ: right after ONE_SHOT,
and at the end.

python -m securecluster.benchmarks.graphs [--seeds 20]

20 clients: scikit-learn's digits (label swap, and one distribution for all), and MNIST with 200
samples each (label swap, rotation), where SECURECLUSTER_DATA or the hub has it. By cross-cluster
loss and by l2, with one short refinement, since what is counted is the graph of the one-shot models
and what RECLUSTER and MERGE make of it. Clients that the graph leaves in no cluster count against
`graph`, and not against `refined` where they are then sent to the right one.
"""

from __future__ import annotations

import argparse
from typing import Any

from securecluster import Federation, Iid, LabelSwap, Rotation
from securecluster.benchmarks.table import write
from securecluster.clustering.metrics import agreement
from securecluster.data import Scenario
from securecluster.protocols import SRFCA

CASES: list[tuple[str, Scenario, int | None]] = [
    ("digits", LabelSwap(), None),
    ("digits", Iid(), None),
    ("mnist", LabelSwap(), 200),
    ("mnist", Rotation(), 200),
]


def measure(
    data: str, scenario: Scenario, samples: int | None, distance: str, seed: int
) -> dict[str, Any]:
    """One run: the clusters of its graph, those at the end, λ, and the spanning tree's edges on
    both sides of it.
    """
    federation = Federation.simulate(
        data, scenario=scenario, clients=20, samples=samples, seed=seed
    )
    fitted = SRFCA(distance=distance, rounds=5, refine=1).fit(federation)
    line = next(line for line in fitted.history_ if "lambda" in line)
    assert federation.truth is not None
    assert fitted.agreement_ is not None
    label = {i: c for c, own in enumerate(line["clustered"]) for i in own}
    first = [label.get(i, len(line["clustered"]) + i) for i in range(20)]
    edges = line["edges"]
    return {
        "data": data,
        "scenario": str(scenario),
        "distance": distance,
        "seed": seed,
        "graph": agreement(first, federation.truth)["exact"],
        "refined": fitted.agreement_["exact"],
        "waiting": sum(i not in label for i in range(20)),
        "lambda": f"{line['lambda']:.4g}",
        "joined": f"{max([e for e in edges if e <= line['lambda']], default=0):.4g}",
        "apart": f"{min([e for e in edges if e > line['lambda']], default=0):.4g}",
    }


def main() -> None:
    """Run, write, print counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    seeds, rows = parser.parse_args().seeds, list[dict[str, Any]]()
    for data, scenario, samples in CASES:
        for distance in ("loss", "l2"):
            own = [measure(data, scenario, samples, distance, seed) for seed in range(seeds)]
            rows += own
            counts = {name: sum(row[name] for row in own) for name in ("graph", "refined")}
            print(
                f"{data} {scenario} {distance}: graph right {counts['graph']}, refined "
                f"{counts['refined']} of {seeds}",
                flush=True,
            )
            write("graphs", rows)


if __name__ == "__main__":
    main()
