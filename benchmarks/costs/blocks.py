"""Compare runs whose clients are in blocks on Ray's actors with the same runs in one process.

python -m benchmarks.costs.blocks [--workers 2] [--rounds 5] [--small 40] [--large 200]

Clients train an MLP on digits, with labels swapped in four clusters. Of each run the table has
whether its results are equal to the bit, the bytes in frames, the messages and bytes between
processes, and seconds beside those in one process. Seconds of blocks are without the start of the
actors, which `start` has. `results/blocks.csv` has the lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import cache, partial
from typing import Any

from benchmarks.grid import counts
from benchmarks.table import markdown_line, write
from securecluster import Federation
from securecluster.core.devices import cpu_threads
from securecluster.core.lazy_torch import torch
from securecluster.core.serialization import pack
from securecluster.protocols import CFL, MRMTL, ClusteringProtocol, FedAvg, Settings
from securecluster.results.fitted_state import FittedState
from securecluster.runs.ray_blocks import BlockedClients
from securecluster.runs.simulated_run import SimulatedRun

WIDTH = 13_333
SAMPLES = 6  # of each client, as many as 200 clients can have


@cache
def wide() -> torch.nn.Module:
    """Return a network of 10^6 parameters, of which few clients make a part of a sum."""
    layers = (torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 10))
    return torch.nn.Sequential(torch.nn.Flatten(), *layers)


CASES: dict[str, Callable[..., ClusteringProtocol]] = {
    "fedavg": partial(FedAvg, model="mlp"),
    "fedavg, wide": lambda **options: FedAvg(model=wide(), **options),
    "cfl": partial(CFL, model="mlp"),
    "mrmtl": partial(MRMTL, model="mlp"),
}


def timed(
    method: ClusteringProtocol, federation: Federation, settings: Settings
) -> tuple[FittedState, dict[str, Any]]:
    """Carry out a run, and return its result with its seconds and traffic.

    Args:
        method: with its hyper-parameters.
        federation: the clients.
        settings: of the run.
    """
    began = time.perf_counter()
    with (
        torch.inference_mode(False),
        cpu_threads(settings.threads),
        closing(SimulatedRun(method, federation, settings, None)) as simulated,
    ):
        started = time.perf_counter()
        run = simulated.start(lambda line: None)
        state = simulated.server.final_state(run)
        fitted, _ = simulated.fitted(run, state)
        ended = time.perf_counter()
        measured: dict[str, Any] = {"start": started - began, "seconds": ended - started}
        if isinstance(simulated.clients, BlockedClients):
            traffic = simulated.clients.blocks.traffic
            measured |= {"messages": traffic.messages, "between": traffic.bytes}
    return fitted, measured


def equal(one: FittedState, other: FittedState) -> bool:
    """Return whether two runs have the same results to the bit.

    Args:
        one: of a run.
        other: of another.
    """
    first, second = one.learned, other.learned
    return (
        one.server == other.server
        and pack(first.network) == pack(second.network)
        and (first.labels, first.scores) == (second.labels, second.scores)
        and (first.history, first.bytes) == (second.history, second.bytes)
        and torch.equal(
            one.clients.table[one.clients.index], other.clients.table[other.clients.index]
        )
    )


def measure(case: str, clients: int, rounds: int, workers: int) -> dict[str, Any]:
    """Return the line of one method and number of clients.

    Args:
        case: one of `CASES`.
        clients: how many.
        rounds: of each run.
        workers: number of blocks.
    """
    federation = Federation.simulate("digits", clients=clients, samples=SAMPLES, seed=0)
    options: dict[str, Any] = {"threads": 1, "keys_from_seed": True, "transcript": "none"}

    def run(**more: Any) -> tuple[FittedState, dict[str, Any]]:
        made = CASES[case](rounds=rounds)
        return timed(made, federation, Settings(**options, **more))

    run()  # the first run loads what later ones have
    alone, in_process = run()
    together, blocks = run(engine="ray", workers=workers)
    frames = alone.learned.bytes["up"] + alone.learned.bytes["down"]
    return {
        "case": case,
        "clients": clients,
        "workers": workers,
        "rounds": rounds,
        "equal": equal(alone, together),
        "frames_bytes": frames,
        "messages": blocks["messages"],
        "between_bytes": blocks["between"],
        "seconds": round(blocks["seconds"], 2),
        "in_process_seconds": round(in_process["seconds"], 2),
        "start_seconds": round(blocks["start"], 1),
    }


def main() -> None:
    """Measure all cases, print them, and write the table."""
    import ray

    options = counts(__doc__, workers=2, rounds=5, small=40, large=200)
    ray.init(num_cpus=options.workers, include_dashboard=False, log_to_driver=False)
    try:
        rows = [
            measure(case, clients, options.rounds, options.workers)
            for case in CASES
            for clients in (options.small, options.large)
            if clients == options.large or case != "fedavg, wide"
        ]
    finally:
        ray.shutdown()
    print(markdown_line(rows[0]))
    for row in rows:
        print(markdown_line(map(str, row.values())))
    print(write("blocks", rows))


if __name__ == "__main__":
    main()
