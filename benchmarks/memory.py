"""Peak memory of one round of a thousand clients of the 1.66-million-parameter CNN: sums, and a
gather of every update.

python -m securecluster.benchmarks.memory [--clients 1000] [--model cnn-briggs] [--cases …]

Each case runs in a process of its own: one round of one mini-batch of 10 samples per client, so
    that memory is all it measures.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.benchmarks.table import write
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Local
from securecluster.runtime.settings import Settings

GIB = 1 << 30
CASES: dict[str, Callable[..., ClusteringProtocol]] = {
    "local": partial(Local),
    "fedavg": partial(FedAvg),
    "cfl": partial(CFL, mask="none"),
    "cfl-permutation": partial(CFL, mask="permutation"),
    "cfl-rotation": partial(CFL, mask="rotation"),
}


def peak() -> float:
    """The most memory this process has held so far, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def one(case: str, model: str, clients: int) -> dict[str, Any]:
    """One round in this process."""
    rng = np.random.default_rng(0)
    arrays = {
        f"c{k}": (rng.random((10, 1, 28, 28), dtype=np.float32), rng.integers(0, 10, 10))
        for k in range(clients)
    }
    federation = Federation.from_arrays(
        arrays, test={name: (x[:2], y[:2]) for name, (x, y) in arrays.items()}, seed=0
    )
    before, began = peak(), time.perf_counter()
    fitted = CASES[case](model=model, rounds=1, epochs=1, batch_size=10).fit(
        federation, Settings(transcript="none")
    )
    d = sum(value.numel() for value in fitted.model_of(0).values())
    return {
        "protocol": fitted.name,
        "mask": fitted.mask,
        "model": model,
        "clients": clients,
        "parameters": d,
        "all_updates_gib": round(4 * d * clients / GIB, 2),
        "before_gib": round(before, 2),
        "peak_gib": round(peak(), 2),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--model", default="cnn-briggs")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one, options.model, options.clients)))
        return
    rows = []
    for case in options.cases:
        command = [sys.executable, "-m", "securecluster.benchmarks.memory", "--one", case]
        command += ["--model", options.model, "--clients", str(options.clients)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    print(write("memory", rows))


if __name__ == "__main__":
    main()
