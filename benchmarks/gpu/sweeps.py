"""A small noise grid on the device, and the joint training of its levels and seeds."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.costs.recurrent import batched_round
from benchmarks.gpu.data import apart
from benchmarks.gpu.pieces import Budget, Check, Skipped, Timing
from benchmarks.gpu.timings import PLAN, Way, build_cohort, synchronise, take_turns
from securecluster.commands.failures import Row
from securecluster.data.simulation import Simulation
from securecluster.runtime.settings import Settings
from securecluster.studies.sweep_plan import NOISE, Plan, Variant, run_cells
from securecluster.studies.sweep_runner import batches
from securecluster.training import joint_training
from securecluster.training.local_trainer import LocalTrainer
from securecluster.training.stacked_runs import StackedRuns

LEVELS = (0.0, 0.03, 0.3)
SEEDS = (0, 1)
RUNS = len(LEVELS) * len(SEEDS)
CLIENTS = 20  # of each run
TURNS = 5
NETWORKS = {"mlp-200": 1.0, "cnn-briggs": 50.0}  # and the cost of a timing

SAME = "the same runs in float64, from the same draws: labels are equal, and accuracy nearly"
JOINT = "a client's numbers do not depend on who trains beside it, up to rounding"


def plan(device: str) -> Plan:
    """Return the grid: CFL with central noise, and FedAvg, in float64.

    Args:
        device: that trains.
    """
    options = {"model": "mlp-32", "rounds": 4, "clip": 1.0}
    variants = (
        Variant("cfl", "cfl", {**options, "placement": "central"}),
        Variant("fedavg", "fedavg", options),
    )
    simulation = Simulation(data="digits", clients=8, clusters=2, samples=40)
    settings = Settings(
        device=device, dtype="float64", transcript="none", threads=1, keys_from_seed=True
    )
    return Plan(variants, NOISE, LEVELS, SEEDS, simulation.located(), settings)


def measured(device: str, together: int) -> list[Row]:
    """Return the rows of the grid, in order.

    Args:
        device: that trains.
        together: runs that train as one batch.
    """
    rows = []
    for cells in batches(list(plan(device).cells()), together):
        rows += run_cells(cells)
    return sorted(rows, key=lambda row: row["run"])


def grid(together: int, device: torch.device) -> float:
    """Return by how much ARI and accuracy differ from the CPU's, run by run, at most.

    Args:
        together: runs that train as one batch.
        device: the one that is checked.
    """
    expected = measured("cpu", 1)
    results = measured(device.type, together)
    differences = [0.0]
    for one, other in zip(expected, results, strict=True):
        if one["status"] != "done" or other["status"] != "done":
            return float("inf")
        for column in ("ari", "accuracy"):
            differences.append(abs(one[column] - other[column]))
    return max(differences)


def updates(cohort: LocalTrainer) -> torch.Tensor:
    """Return the clients' updates after one call, (m, d).

    Args:
        cohort: of one run.
    """
    return batched_round(cohort, PLAN)


def together(network: str, device: torch.device) -> list[torch.Tensor]:
    """Return the updates of several runs that train as one batch.

    Args:
        network: name of an architecture.
        device: of the training.
    """
    return joint_training.in_threads(StackedRuns().train, _runs(network, device))


def joint(network: str, device: torch.device) -> float:
    """Return how far updates of joint training are from those of each run alone.

    Args:
        network: name of an architecture.
        device: the one that is checked.
    """
    alone = updates(build_cohort(network, CLIENTS, device))
    alone_on_cpu = alone.cpu()
    return max(
        apart(joint_updates.cpu(), alone_on_cpu) for joint_updates in together(network, device)
    )


def _runs(network: str, device: torch.device) -> list[Any]:
    """Return a function for each run that makes its clients and trains them."""

    def run() -> torch.Tensor:
        return updates(build_cohort(network, CLIENTS, device))

    return [run] * RUNS


def measure(network: str, device: torch.device, budget: Budget) -> list[Row]:
    """Return the seconds of runs one after the other, and of the same runs together.

    Args:
        network: name of an architecture.
        device: of the training.
        budget: the remaining time.

    Raises:
        Skipped: it would not fit into the budget.
    """
    runs = _runs(network, device)

    def one_after_the_other() -> None:
        for run in runs:
            run()

    def as_one_batch() -> None:
        joint_training.in_threads(StackedRuns().train, runs)

    ways = {
        f"{RUNS} runs, one after the other": Way(one_after_the_other, CLIENTS * RUNS),
        f"{RUNS} runs as one batch": Way(as_one_batch, CLIENTS * RUNS),
    }
    synchronise(device)
    began = budget.now()
    for way in ways.values():  # a warm-up
        way.once()
    synchronise(device)
    turn = budget.now() - began
    turns = int(min(TURNS, budget.left() / 3 / turn))
    if turns < 1:
        raise Skipped(f"a turn of both ways takes {turn:.0f} s, and {budget.left():.0f} s are left")
    taken, peaks = take_turns(ways, turns, device, budget)
    medians = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in taken.items()}
    batch = medians[f"{RUNS} runs as one batch"]
    rows = []
    for name, seconds in taken.items():
        rows.append(
            {
                "network": network,
                "parameters": build_cohort(network, 1, device).model.dimension,
                "clients": CLIENTS * RUNS,
                "way": name,
                "clients_timed": CLIENTS * RUNS,
                "rounds": turns,
                "median_seconds": f"{medians[name]:.4f}",
                "min_seconds": f"{min(seconds):.4f}",
                "max_seconds": f"{max(seconds):.4f}",
                "times_batched": f"{medians[name] / batch:.2f}",
                "device_peak_gib": peaks[name],
                "ram_peak_gib": "",
            }
        )
    return rows


def sweep_checks() -> list[Check]:
    """Return the checks of the noise grid, run by run and together."""
    return [
        Check("noise grid: run by run", 0.03, SAME, partial(grid, 1), 8.0),
        Check("noise grid: levels and seeds together", 0.03, SAME, partial(grid, RUNS), 8.0),
        Check("joint training: mlp-200", 1e-5, JOINT, partial(joint, "mlp-200"), 2.0),
    ]


def sweep_timings() -> list[Timing]:
    """Return the timings of levels and seeds as one batch."""
    timings = []
    for network, cost in NETWORKS.items():
        name = f"{network}, levels and seeds together"
        timings.append(Timing(name, partial(measure, network), cost))
    return timings
