"""Count how often CFL's defaults recover the clusters of swapped labels, over data sets and seeds.

python -m benchmarks.clusters.recovery [--data digits mnist fashion_mnist] [--seeds 10]
    [--samples N]

IID clients of the digits are measured too; they must stay one cluster. Image sets other than digits
are read from the folder SECURECLUSTER_DATA, or from the Hugging Face hub.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from benchmarks.table import SEEDED, tabulate
from securecluster import Federation, Iid, LabelSwap
from securecluster.data import Scenario
from securecluster.protocols import CFL


def margins(history: list[Any]) -> tuple[float | None, float]:
    """Return the evidence of CFL's split tests next to its threshold.

    Args:
        history: lines of a run, one a round.

    Returns:
        The least evidence of a split, None without splits; and the most evidence in the rounds
        after the last split, of tests that considered one.
    """
    split_tests = []
    for line in history:
        for test in line["split_tests"]:
            if test["evidence"] is not None:
                split_tests.append((line["round"], test))
    split_rounds = [number for number, test in split_tests if test["split"]]
    last = max(split_rounds, default=0)
    at_split = [test["evidence"] for _, test in split_tests if test["split"]]
    after = [test["evidence"] for number, test in split_tests if number > last]
    lowest = min(at_split, default=None)
    # where the clusters are exact by then, a threshold below this would make a false split
    highest = max(after, default=0.0)
    return lowest, highest


def _rounded(value: float | None, digits: int) -> float | None:
    """Return a rounded number; None stays None.

    Args:
        value: the number.
        digits: decimals.
    """
    if value is None:
        return None
    return round(value, digits)


def one(
    data: str, scenario: Scenario, samples: int | None, seed: int, **params: float
) -> dict[str, Any]:
    """Run CFL once, and return its line of the table.

    Args:
        data: a data set's name.
        scenario: how clusters differ.
        samples: training samples of each client; None are all that it is dealt.
        seed: of the federation and the run.
        params: hyper-parameters of CFL that are not left at their defaults.
    """
    # m = 20 as in Sattler et al. 2019
    federation = Federation.simulate(
        data, scenario=scenario, clients=20, samples=samples, seed=seed
    )
    cfl = CFL(**params).fit(federation, SEEDED)
    assert cfl.agreement_ is not None
    lowest, highest = margins(cfl.history_)
    split_lines = [line for line in cfl.history_ if line["splits"]]
    splits = [str(line["round"]) for line in split_lines]
    # in the round of the first split all clients still have one model
    before = None
    if split_lines:
        before = split_lines[0]["accuracy"]
    sizes = [len(shard.y) for shard in federation.shards]
    return {
        "data": data,
        "scenario": str(scenario),
        "samples_per_client": round(float(np.mean(sizes))),
        "seed": seed,
        "exact": cfl.agreement_["exact"],
        "ari": round(cfl.agreement_["ari"], 4),
        "clusters": len(set(cfl.labels_)),
        "splits": " ".join(splits),
        "least_evidence_of_a_split": _rounded(lowest, 3),
        "most_evidence_after_the_last": round(highest, 3),
        "accuracy_before_first_split": _rounded(before, 4),
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
    params = {}
    name = "recovery"
    if options.eps1 is not None:
        params["eps1"] = options.eps1
        name = f"recovery-eps1-{options.eps1}"
    # one true cluster: every split is a false one
    cases: list[tuple[str, Scenario]] = [("digits", Iid())]
    cases += [(data, LabelSwap()) for data in options.data]
    measured = (
        [one(data, scenario, options.samples, seed, **params)]
        for data, scenario in cases
        for seed in range(options.seeds)
    )
    print(tabulate(name, measured, by=("data", "scenario"), counted=("exact",)))


if __name__ == "__main__":
    main()
