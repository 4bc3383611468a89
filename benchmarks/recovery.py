"""Exact recovery of label swap by CFL's defaults, over data sets and seeds, and IID digits, which
must stay one cluster.

python -m securecluster.benchmarks.recovery [--data digits mnist fashion_mnist] [--seeds 10]
[--samples N]

Image sets other than digits are read from the folder SECURECLUSTER_DATA, or from the Hugging Face
hub.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from securecluster import Federation, Iid, LabelSwap
from securecluster.benchmarks.table import write
from securecluster.data import Scenario
from securecluster.protocols import CFL


def margins(history: list[Any]) -> tuple[float | None, float]:
    """Return the least evidence of a split, and the most in the rounds after the last one, in which
    a split was considered.
    """
    split_tests = [
        (line["round"], test)
        for line in history
        for test in line["split_tests"]
        if test["evidence"] is not None
    ]
    last = max((number for number, test in split_tests if test["split"]), default=0)
    at_split = [test["evidence"] for _, test in split_tests if test["split"]]
    after = [test["evidence"] for number, test in split_tests if number > last]
    return min(at_split, default=None), max(after, default=0.0)


def one(
    data: str, scenario: Scenario, samples: int | None, seed: int, **params: float
) -> dict[str, Any]:
    """One run."""
    federation = Federation.simulate(
        data, scenario=scenario, clients=20, samples=samples, seed=seed
    )
    cfl = CFL(**params).fit(federation)  # type: ignore[arg-type]
    assert cfl.agreement_ is not None
    least, most = margins(cfl.history_)
    before = next((line["accuracy"] for line in cfl.history_ if line["splits"]), None)
    return {
        "data": data,
        "scenario": str(scenario),
        "samples_per_client": round(float(np.mean([len(shard.y) for shard in federation.shards]))),
        "seed": seed,
        "exact": cfl.agreement_["exact"],
        "ari": round(cfl.agreement_["ari"], 4),
        "clusters": len(set(cfl.labels_)),
        "splits": " ".join(str(line["round"]) for line in cfl.history_ if line["splits"]),
        "least_evidence_of_a_split": None if least is None else round(least, 3),
        "most_evidence_after_the_last": round(most, 3),
        "accuracy_before_first_split": None if before is None else round(before, 4),
        "accuracy": round(float(np.mean(cfl.scores_)), 4),
        "bytes": cfl.bytes_["up"] + cfl.bytes_["down"],
        "seconds": round(cfl.seconds_, 1),
    }


def main() -> None:
    """Run, print, write after each run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", nargs="+", default=["digits", "mnist", "fashion_mnist"])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--samples", type=int)
    parser.add_argument(
        "--eps1",
        type=float,
        help="another stationarity threshold than the default; its table has a name of its own",
    )
    options = parser.parse_args()
    params, name = (
        ({}, "recovery")
        if options.eps1 is None
        else ({"eps1": options.eps1}, f"recovery-eps1-{options.eps1}")
    )
    rows = []
    for data, scenario in [("digits", Iid()), *((data, LabelSwap()) for data in options.data)]:
        for seed in range(options.seeds):
            rows.append(one(data, scenario, options.samples, seed, **params))
            print(rows[-1], flush=True)
            write(name, rows)
        mine = rows[-options.seeds :]
        print(f"{data}, {scenario}: exact {sum(row['exact'] for row in mine)} of {len(mine)}")


if __name__ == "__main__":
    main()
