"""Batched local training beside a plain PyTorch loop at one and at all threads, taking turns in one
run; and where the time goes.

python -m securecluster.benchmarks.speed [--clients 100] [--models mlp-200 cnn-briggs] [--rounds 9]

A round is 10 mini-batches of 10 samples of 28×28 for every client, the same in every variant: in
float64 their updates agree.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from securecluster import Federation
from securecluster.benchmarks.table import write
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.validation import FlatModel, build
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=10, steps=10)


class General(FlatModel):
    """The same model without gradients by hand."""

    stack = None


def cohort(
    model: str,
    clients: int,
    general: bool = False,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (1, 28, 28),
) -> LocalTrainer:
    """Clients with 100 random images each."""
    rng = np.random.default_rng(0)
    arrays = {
        f"c{k}": (rng.random((100, *shape), dtype=np.float32), rng.integers(0, 10, 100))
        for k in range(clients)
    }
    federation = Federation.from_arrays(arrays, test={name: ([], []) for name in arrays}, seed=0)
    flat = build(model, federation.shape, 10, Randomness(0))
    batched = LocalTrainer(federation, flat, Randomness(0), torch.device("cpu"), dtype)
    if general:
        batched.model = General(batched.model.module)
    return batched


def plain(batched: LocalTrainer, module: nn.Module) -> torch.Tensor:
    """The loop everyone writes: one client after the other, one optimizer each."""
    out = torch.empty(len(batched.ids), batched.model.dimension, dtype=batched.dtype)
    for client in range(len(batched.ids)):
        nn.utils.vector_to_parameters(batched.start.clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=PLAN.lr)
        for batch in batched._batches(client, PLAN, 1):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(batched._x[batch]), batched._y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        out[client] = nn.utils.parameters_to_vector(module.parameters()).detach() - batched.start
    return out


def variants(
    model: str, clients: int, dtype: torch.dtype = torch.float32
) -> dict[str, tuple[int, Callable[[], torch.Tensor]]]:
    """Name -> (threads, one round)."""
    batched, threads = cohort(model, clients, dtype=dtype), torch.get_num_threads()
    module = copy.deepcopy(batched.model.module)
    general = cohort(model, clients, general=True, dtype=dtype)

    def ours(of: LocalTrainer) -> torch.Tensor:
        return of.train(Rows(of.start[None], (0,) * clients), range(clients), PLAN, 1)

    return {
        "batched": (threads, lambda: ours(batched)),
        "batched, torch.func": (threads, lambda: ours(general)),
        "plain loop, 1 thread": (1, lambda: plain(batched, module)),
        f"plain loop, {threads} threads": (threads, lambda: plain(batched, module)),
    }


def measure(model: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """Seconds a round of each variant, in turn."""
    exact = {name: round_of() for name, (_, round_of) in variants(model, 4, torch.float64).items()}
    known = variants(model, clients)
    seconds: dict[str, list[float]] = {name: [] for name in known}
    for _ in range(rounds + 1):
        for name, (threads, round_of) in known.items():
            with cpu_threads(threads):
                began = time.perf_counter()
                round_of()
                seconds[name].append(time.perf_counter() - began)
    plainly = exact["plain loop, 1 thread"]
    largest = plainly.abs().max()
    errors = {name: float((exact[name] - plainly).abs().max() / largest) for name in seconds}
    best = min(float(np.median(s[1:])) for name, s in seconds.items() if name.startswith("plain"))
    return [
        {
            "model": model,
            "clients": clients,
            "variant": name,
            "rounds": rounds,
            "first": round(taken[0], 4),
            "median": round(float(np.median(taken[1:])), 4),
            "min": round(min(taken[1:]), 4),
            "max": round(max(taken[1:]), 4),
            "times_faster": round(best / float(np.median(taken[1:])), 2),
            "error_in_float64": f"{errors[name]:.1e}",
        }
        for name, taken in seconds.items()
    ]


def profile(model: str, clients: int) -> list[dict[str, Any]]:
    """The operations of a batched round on one thread, by their share of its time."""
    batched = cohort(model, clients)

    def once() -> None:
        batched.train(Rows(batched.start[None], (0,) * clients), range(clients), PLAN, 1)

    with cpu_threads(1):
        once()
        activities = [torch.profiler.ProfilerActivity.CPU]
        with (
            torch.profiler.profile(activities=activities) as found,
            torch.profiler.record_function("whole"),
        ):
            once()
    events = {event.key: event.self_cpu_time_total for event in found.key_averages()}
    whole = sum(events.values())
    top = sorted(((t, name) for name, t in events.items()), reverse=True)[:12]
    names = {"whole": "Python"}
    return [
        {"model": model, "operation": names.get(n, n), "share": round(t / whole, 3)} for t, n in top
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--models", nargs="+", default=["mlp-200", "cnn-briggs"])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows, shares = [], []
    for model in options.models:
        for row in (found := measure(model, options.clients, options.rounds)):
            print(row, flush=True)
        rows += found
        for row in (found := profile(model, min(options.clients, 20))):
            print(row, flush=True)
        shares += found
    print(write("speed", rows), write("profile", shares))


if __name__ == "__main__":
    main()
