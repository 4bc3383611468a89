"""Measure the peak memory of one round of a thousand clients of the CNN with 1.66 million
parameters.

python -m benchmarks.costs.memory [--clients 1000] [--model cnn-briggs] [--cases …]

Some protocols sum the updates, and others gather every update. Each case runs in a process of its
own. A round is one mini-batch of 10 samples per client, so that memory is all it measures.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.table import tabulate
from securecluster import Federation
from securecluster.core.client_names import at
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Local
from securecluster.runtime.settings import Settings

GIB = 1 << 30
CASES: dict[str, Callable[..., ClusteringProtocol]] = {
    "local": partial(Local),
    "fedavg": partial(FedAvg),
    # CFL compares updates, so all of them are in memory; sums are streamed
    "cfl": partial(CFL, mask="none"),
    "cfl-permutation": partial(CFL, mask="permutation"),
    "cfl-rotation": partial(CFL, mask="rotation"),
}


def peak() -> float:
    """Return the largest resident set of this process up to now, in GiB."""
    # Linux counts in KiB
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kibibytes * 1024 / GIB


def _federation(clients: int) -> Federation:
    """Return clients with 10 random images each.

    Args:
        clients: how many.
    """
    rng = np.random.default_rng(0)
    train = {}
    test = {}
    for k in range(clients):
        # one mini-batch of 10: more samples would add time and no memory of updates
        images = rng.random((10, 1, 28, 28), dtype=np.float32)
        labels = rng.integers(0, 10, 10)
        train[f"c{k}"] = (images, labels)
        test[f"c{k}"] = (images[:2], labels[:2])
    return Federation.from_arrays(train, test=test, seed=0)


def one(case: str, model: str, clients: int) -> dict[str, Any]:
    """Run one round in this process, and return its line of the table.

    Args:
        case: one of `CASES`.
        model: a network's name.
        clients: how many.
    """
    federation = _federation(clients)
    # with imports and samples, so the rest of the peak is the run's
    before = peak()
    start = time.perf_counter()
    protocol = CASES[case](model=model, rounds=1, epochs=1, batch_size=10)
    # a full transcript would keep every update
    fitted = protocol.fit(federation, Settings(transcript="none", keys_from_seed=True))
    parameters = fitted.model_of(at(0)).values()
    d = sum(value.numel() for value in parameters)
    # float32: four bytes a parameter
    all_updates = 4 * d * clients / GIB
    return {
        "protocol": fitted.name,
        "mask": fitted.mask,
        "model": model,
        "clients": clients,
        "parameters": d,
        "all_updates_gib": round(all_updates, 2),
        "before_gib": round(before, 2),
        "peak_gib": round(peak(), 2),
        "seconds": round(time.perf_counter() - start, 1),
    }


def in_own_process(case: str, model: str, clients: int) -> dict[str, Any]:
    """Return a case's line from a process of its own, since the largest resident set never falls.

    Args:
        case: one of `CASES`.
        model: a network's name.
        clients: how many.
    """
    options = ["--one", case, "--model", model, "--clients", str(clients)]
    return line_of("benchmarks.costs.memory", options)


def line_of(module: str, options: Sequence[str], limit: float | None = None) -> dict[str, Any]:
    """Run a benchmark in a process of its own, and return the line of the table that it prints.

    Args:
        module: of the benchmark.
        options: of its command line.
        limit: seconds after which it is stopped, if any.

    Raises:
        subprocess.TimeoutExpired: it was stopped.
    """
    command = [sys.executable, "-m", module, *options]
    finished = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit)
    last = finished.stdout.splitlines()[-1]
    line: dict[str, Any] = json.loads(last)
    return line


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--model", default="cnn-briggs")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        row = one(options.one, options.model, options.clients)
        print(json.dumps(row))
        return
    measured = ([in_own_process(case, options.model, options.clients)] for case in options.cases)
    print(tabulate("memory", measured))


if __name__ == "__main__":
    main()
