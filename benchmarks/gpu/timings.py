"""Seconds a round of batched training beside a plain PyTorch loop and one centralised model."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from securecluster import Federation
from securecluster.benchmarks.gpu.pieces import Budget, Row, Skipped, Timing
from securecluster.benchmarks.recurrent import CASES, load, optimizer_of, plain, plain_module
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.validation import build
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

GIB = 1 << 30
PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=10)
POOLED = 1000  # samples of a mini-batch of the centralised model, at most
ROUNDS, FEWEST = 5, 2  # of each way that are counted
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
    found = []
    for clients in CLIENTS:
        for network, cost in PROBES.items():
            found.append(
                Timing(f"{network}, {clients} clients", partial(measure, network, clients), cost)
            )
    return found


def build_cohort(network: str, clients: int, device: torch.device) -> LocalTrainer:
    """Return clients with random samples.

    They have 100 images each, or as many samples as the network's own data.
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
    none: dict[str, Any] = {name: ([], []) for name in arrays}
    federation = Federation.from_arrays(arrays, test=none, seed=0)
    flat = build(network, federation.shape, 10, Randomness(0))
    return LocalTrainer(federation, flat, Randomness(0), device, torch.float32)


@dataclass(frozen=True)
class Way:
    """One way to train, and how many of the clients it is timed with."""

    once: Callable[[], object]
    clients: int


def batched(cohort: LocalTrainer) -> torch.Tensor:
    """Train one round of all clients, and return their updates."""
    everyone = range(len(cohort.ids))
    start = Rows(cohort.start[None], (0,) * len(cohort.ids))
    return cohort.train(start, everyone, PLAN, 1)


def centralised(cohort: LocalTrainer, module: torch.nn.Module) -> None:
    """Train one model for an epoch over all clients' samples, in large mini-batches."""
    load(module, cohort.start)
    module.train()
    optimizer = optimizer_of(PLAN, module)
    order = np.random.default_rng(0).permutation(len(cohort._y))
    size = min(POOLED, PLAN.batch_size * len(cohort.ids))
    for rows in torch.split(torch.as_tensor(order).to(cohort.device), size):
        optimizer.zero_grad()
        losses = cohort.model.objective.losses(module(cohort._x[rows]), cohort._y[rows])
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def seconds(way: Way, device: torch.device, budget: Budget) -> float:
    """Return the time of one turn, to the end of what it started on the device."""
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

    Raises:
        Skipped: it would not fit into the budget.
    """
    needed = budget.known.get(network)
    if needed is None:
        needed = probe(network, device, budget)
    expected = needed * clients / PROBED
    if expected * (1 + FEWEST) > budget.left():
        reason = f"needs about {expected * (1 + FEWEST):.0f} s, and {budget.left():.0f} s were left"
        raise Skipped(reason)
    cohort = build_cohort(network, clients, device)
    module = plain_module(cohort.model.module, seeded=False)
    ways = {
        "batched": Way(partial(batched, cohort), clients),
        "one centralised model": Way(partial(centralised, cohort, module), clients),
    }
    first = {name: seconds(way, device, budget) for name, way in ways.items()}
    few = Way(partial(plain, cohort, module, PLAN, 2), 2)
    seconds(few, device, budget)
    each = seconds(few, device, budget) / few.clients
    spare = budget.left() / 4 / (1 + FEWEST) - sum(first.values())
    timed = int(min(clients, max(spare / each, PROBED)))
    ways["plain loop"] = Way(partial(plain, cohort, module, PLAN, timed), timed)
    first["plain loop"] = seconds(ways["plain loop"], device, budget)
    rounds = int(min(ROUNDS, budget.left() / 3 / sum(first.values())))
    if rounds < FEWEST:
        raise Skipped(
            f"a turn of all ways takes {sum(first.values()):.0f} s, and {budget.left():.0f} s were "
            "left"
        )
    taken, peaks = take_turns(ways, rounds, device, budget)
    budget.known[network] = sum(map(median, taken.values())) * PROBED / clients
    middle = {name: median(turns) * clients / ways[name].clients for name, turns in taken.items()}
    rows = []
    for name, turns in taken.items():
        scale = clients / ways[name].clients
        rows.append(
            {
                "network": network,
                "parameters": cohort.model.dimension,
                "clients": clients,
                "way": name,
                "clients_timed": ways[name].clients,
                "rounds": rounds,
                "median_seconds": f"{middle[name]:.4f}",
                "min_seconds": f"{min(turns) * scale:.4f}",
                "max_seconds": f"{max(turns) * scale:.4f}",
                "times_batched": f"{middle[name] / middle['batched']:.2f}",
                "device_peak_gib": peaks[name],
                "ram_peak_gib": f"{ram_peak():.2f}",
            }
        )
    return rows


def probe(network: str, device: torch.device, budget: Budget) -> float:
    """Return the seconds of one turn of all ways with a few clients, after a warm-up."""
    cohort = build_cohort(network, PROBED, device)
    module = plain_module(cohort.model.module, seeded=False)
    ways = (
        Way(partial(batched, cohort), PROBED),
        Way(partial(centralised, cohort, module), PROBED),
        Way(partial(plain, cohort, module, PLAN, 2), 2),
    )
    for way in ways:
        seconds(way, device, budget)
    return sum(seconds(way, device, budget) * PROBED / way.clients for way in ways)


def take_turns(
    ways: dict[str, Way],
    rounds: int,
    device: torch.device,
    budget: Budget,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Return the seconds of each turn, and the most memory of the device, by way.

    The memory is the most that each way held.
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
                held = torch.cuda.max_memory_allocated(device) / GIB
                peaks[name] = f"{max(held, float(peaks[name] or 0)):.2f}"
    return taken, peaks


def ram_peak() -> float:
    """Return the most main memory that this process has held so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
