"""Timings: seconds a round of batched training, a plain PyTorch loop and one centralised model."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from benchmarks.costs.recurrent import (
    CASES,
    batched_round,
    load,
    no_tests,
    optimizer_of,
    plain,
    plain_module,
)
from benchmarks.gpu.pieces import Budget, Row, Skipped, Timing
from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.models.validation import build
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

GIB = 1 << 30
PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=10)
POOLED = 1000  # samples of a mini-batch of the centralised model, at most
ROUNDS = 5  # turns of each way that are counted, at most
FEWEST = 2  # turns of each way that are counted, at least
IMAGES = {"mlp-200": (1, 28, 28), "cnn-briggs": (1, 28, 28), "resnet9": (3, 32, 32)}
PROBED = 10  # clients that the first estimate is made with
# Seconds of a probe on two cores, about; the order is that of the work.
PROBES = {
    "mlp-200": 0.5,
    "lstm-trajectory": 1.0,
    "lstm-words": 6.0,
    "cnn-briggs": 8.0,
    "lstm-chars": 10.0,
    "resnet9": 50.0,
}
CLIENTS = (100, 1000)


def every_timing() -> list[Timing]:
    """Return the cases from cheap to expensive."""
    timings = []
    for clients in CLIENTS:
        for network, cost in PROBES.items():
            name = f"{network}, {clients} clients"
            timings.append(Timing(name, partial(measure, network, clients), cost))
    return timings


def build_cohort(network: str, clients: int, device: torch.device) -> LocalTrainer:
    """Return clients with random samples.

    They have 100 images each, or as many samples as the network's own data.

    Args:
        network: one of `PROBES`.
        clients: how many.
        device: of the training, which is in float32.
    """
    if network in CASES:
        return CASES[network].cohort(clients, torch.float32, device)
    shape = IMAGES[network]
    draw = np.random.default_rng(0)
    arrays = {}
    for k in range(clients):
        x = draw.random((100, *shape), dtype=np.float32)
        y = draw.integers(0, 10, 100)
        arrays[f"c{k}"] = x, y
    federation = Federation.from_arrays(arrays, test=no_tests(arrays), seed=0)
    flat = build(network, federation.shape, 10, Randomness(0))
    return LocalTrainer(federation, flat, Randomness(0), device, torch.float32)


@dataclass(frozen=True)
class Way:
    """One way to train, and how many of the clients it is timed with.

    Args:
        once: trains one round.
        clients: how many of them take part in it.
    """

    once: Callable[[], object]
    clients: int


def centralised(cohort: LocalTrainer, module: torch.nn.Module) -> None:
    """Train one model for an epoch over all clients' samples, in large mini-batches.

    Args:
        cohort: holds the samples and the initial weights.
        module: the network; its weights change in place.
    """
    load(module, cohort.start)
    module.train()
    optimizer = optimizer_of(PLAN, module)
    order = np.random.default_rng(0).permutation(len(cohort._y))
    # as many samples a step as all clients' mini-batches together have, up to POOLED
    size = min(POOLED, PLAN.batch_size * len(cohort.ids))
    shuffled = torch.as_tensor(order).to(cohort.device)
    for rows in torch.split(shuffled, size):
        optimizer.zero_grad()
        # without a name for the outputs, which would add them to the peak of memory
        losses = cohort.model.objective.losses(module(cohort._x[rows]), cohort._y[rows])
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def seconds(way: Way, device: torch.device, budget: Budget) -> float:
    """Return the time of one turn, to the end of what it started on the device.

    Args:
        way: trains one round.
        device: that it trains on.
        budget: has the clock.
    """
    synchronise(device)
    began = budget.now()
    way.once()
    synchronise(device)
    return budget.now() - began


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(network: str, clients: int, device: torch.device, budget: Budget) -> list[Row]:
    """Return the rows of one case.

    Args:
        network: one of `PROBES`.
        clients: how many.
        device: of the training.
        budget: the remaining time; it learns what a turn of this network takes.

    Raises:
        Skipped: it would not fit into the budget.
    """
    _check_budget(network, clients, device, budget)
    cohort = build_cohort(network, clients, device)
    module = plain_module(cohort.model.module, seeded=False)
    ways = {
        "batched": Way(partial(batched_round, cohort, PLAN), clients),
        "one centralised model": Way(partial(centralised, cohort, module), clients),
    }
    # the first turn of each way is a warm-up, and tells how many turns fit into the budget
    first = {name: seconds(way, device, budget) for name, way in ways.items()}
    loop_clients = _plain_loop_clients(cohort, module, sum(first.values()), device, budget)
    loop = Way(partial(plain, cohort, module, PLAN, loop_clients), loop_clients)
    ways["plain loop"] = loop
    first["plain loop"] = seconds(loop, device, budget)
    turn = sum(first.values())
    rounds = int(min(ROUNDS, budget.left() / 3 / turn))
    if rounds < FEWEST:
        remaining = budget.left()
        reason = f"a turn of all ways takes {turn:.0f} s, and {remaining:.0f} s were left"
        raise Skipped(reason)
    taken, peaks = take_turns(ways, rounds, device, budget)
    median_turn = sum(median(turns) for turns in taken.values())
    # in the unit of `probe`, a turn of PROBED clients, for the next case of this network
    budget.known[network] = median_turn * PROBED / clients
    medians = {}
    for name, turns in taken.items():
        # scaled up to all clients, of which the plain loop may train a few
        medians[name] = median(turns) * clients / ways[name].clients
    rows = []
    for name, turns in taken.items():
        timed_clients = ways[name].clients
        scale = clients / timed_clients
        times_batched = medians[name] / medians["batched"]
        rows.append(
            {
                "network": network,
                "parameters": cohort.model.dimension,
                "clients": clients,
                "way": name,
                "clients_timed": timed_clients,
                "rounds": rounds,
                "median_seconds": f"{medians[name]:.4f}",
                "min_seconds": f"{min(turns) * scale:.4f}",
                "max_seconds": f"{max(turns) * scale:.4f}",
                "times_batched": f"{times_batched:.2f}",
                "device_peak_gib": peaks[name],
                "ram_peak_gib": f"{ram_peak():.2f}",
            }
        )
    return rows


def _check_budget(network: str, clients: int, device: torch.device, budget: Budget) -> None:
    """Check that the fewest turns, with their warm-up, fit into the budget.

    Args:
        network: one of `PROBES`.
        clients: how many.
        device: of the training.
        budget: the remaining time, and what a turn of this network took.

    Raises:
        Skipped: they do not.
    """
    needed = budget.known.get(network)
    if needed is None:
        needed = probe(network, device, budget)
    # a turn's work is proportional to its clients
    turn = needed * clients / PROBED
    expected = turn * (1 + FEWEST)
    remaining = budget.left()
    if expected > remaining:
        raise Skipped(f"needs about {expected:.0f} s, and {remaining:.0f} s were left")


def _plain_loop_clients(
    cohort: LocalTrainer,
    module: torch.nn.Module,
    others: float,
    device: torch.device,
    budget: Budget,
) -> int:
    """Return how many clients the plain loop is timed with.

    Args:
        cohort: of all clients.
        module: the network of the plain loop.
        others: seconds of a turn of the other ways.
        device: of the training.
        budget: a quarter of its remaining time is for the first turn and the fewest others.
    """
    few = Way(partial(plain, cohort, module, PLAN, 2), 2)
    seconds(few, device, budget)  # a warm-up
    per_client = seconds(few, device, budget) / few.clients
    quarter = budget.left() / 4
    spare = quarter / (1 + FEWEST) - others
    affordable = max(spare / per_client, PROBED)
    clients = len(cohort.ids)
    return int(min(clients, affordable))


def probe(network: str, device: torch.device, budget: Budget) -> float:
    """Return the seconds of one turn of all ways with `PROBED` clients, after a warm-up.

    Args:
        network: one of `PROBES`.
        device: of the training.
        budget: has the clock.
    """
    cohort = build_cohort(network, PROBED, device)
    module = plain_module(cohort.model.module, seeded=False)
    ways = (
        Way(partial(batched_round, cohort, PLAN), PROBED),
        Way(partial(centralised, cohort, module), PROBED),
        Way(partial(plain, cohort, module, PLAN, 2), 2),
    )
    for way in ways:
        seconds(way, device, budget)
    scaled = []
    for way in ways:
        turn = seconds(way, device, budget)
        scaled.append(turn * PROBED / way.clients)
    return sum(scaled)


def take_turns(
    ways: dict[str, Way], rounds: int, device: torch.device, budget: Budget
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds of each turn, and the most memory of the device, by way.

    The memory is the most that each way held.

    Args:
        ways: by name.
        rounds: turns of each way.
        device: of the training.
        budget: has the clock.

    Returns:
        Seconds of the turns, and GiB as text, empty on the CPU.
    """
    taken: dict[str, list[float]] = {name: [] for name in ways}
    peaks = dict.fromkeys(ways, "")
    gc.collect()
    for _ in range(rounds):
        for name, way in ways.items():
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            taken[name].append(seconds(way, device, budget))
            if device.type == "cuda":
                allocated = torch.cuda.max_memory_allocated(device) / GIB
                previous = float(peaks[name] or 0)
                peaks[name] = f"{max(allocated, previous):.2f}"
    return taken, peaks


def ram_peak() -> float:
    """Return the most main memory that this process has held so far, GiB."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_maxrss * 1024 / GIB  # Linux counts it in KiB
