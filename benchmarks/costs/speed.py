"""Measure batched local training beside a plain PyTorch loop, and profile it.

python -m benchmarks.costs.speed [--clients 100] [--models mlp-200 cnn-briggs] [--rounds 9]

The plain loop runs on one thread and on all threads, and all variants take turns in one run. A
round is 10 mini-batches of 10 images of 28×28 for every client, the same ones in every variant; in
float64 their updates agree. The profile is of one batched round on one thread.
"""

from __future__ import annotations

import argparse
import copy
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.costs.recurrent import Variants, best_of, medians_of, no_tests, relative_error
from benchmarks.table import write
from securecluster import Federation
from securecluster.core.devices import cpu_threads
from securecluster.core.randomness import Randomness
from securecluster.messaging.messages import Rows
from securecluster.models.validation import FlatModel, build
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

PLAN = LocalTraining(lr=0.05, epochs=1, batch_size=10, steps=10)
OPERATIONS = 12  # of the profile, the slowest ones


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
    """Return a trainer of clients with 100 random images each.

    Args:
        model: a network's name.
        clients: how many.
        general: the model has no gradients by hand.
        dtype: of samples and weights.
        shape: of one image.
    """
    rng = np.random.default_rng(0)
    arrays = {}
    for k in range(clients):
        images = rng.random((100, *shape), dtype=np.float32)
        labels = rng.integers(0, 10, 100)
        arrays[f"c{k}"] = (images, labels)
    federation = Federation.from_arrays(arrays, test=no_tests(arrays), seed=0)
    flat = build(model, federation.shape, 10, Randomness(0))
    batched = LocalTrainer(federation, flat, Randomness(0), torch.device("cpu"), dtype)
    if general:
        batched.model = General(batched.model.module)
    return batched


def train(batched: LocalTrainer) -> torch.Tensor:
    """Return the updates (clients, d) of one batched round of all clients.

    Args:
        batched: the clients, their samples and first weights.
    """
    clients = range(len(batched.ids))
    # all clients start from row 0 of a table with one model
    models = Rows(batched.start[None], (0,) * len(clients))
    return batched.train(models, clients, PLAN, 1)


def plain(batched: LocalTrainer, module: nn.Module) -> torch.Tensor:
    """Train one client after the other in a plain PyTorch loop, with one optimizer each.

    Args:
        batched: the clients, their samples and first weights.
        module: the network, of the same order of parameters as `batched.model`.

    Returns:
        The clients' updates (clients, d).
    """
    clients = len(batched.ids)
    out = torch.empty(clients, batched.model.dimension, dtype=batched.dtype)
    for client in range(clients):
        # a clone, since parameters become views of the vector and training would change it
        nn.utils.vector_to_parameters(batched.start.clone(), module.parameters())
        optimizer = torch.optim.SGD(module.parameters(), lr=PLAN.lr)
        for batch in batched.batches(client, PLAN, 1):
            optimizer.zero_grad()
            outputs = module(batched._x[batch])
            loss = nn.functional.cross_entropy(outputs, batched._y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        trained = nn.utils.parameters_to_vector(module.parameters()).detach()
        out[client] = trained - batched.start
    return out


def variants(model: str, clients: int, dtype: torch.dtype = torch.float32) -> Variants:
    """Return, by name, the threads and one round of each variant.

    Args:
        model: a network's name.
        clients: how many.
        dtype: of samples and weights.
    """
    batched = cohort(model, clients, dtype=dtype)
    threads = torch.get_num_threads()
    # a copy, since the plain loop overwrites its parameters
    module = copy.deepcopy(batched.model.module)
    general = cohort(model, clients, general=True, dtype=dtype)
    return {
        "batched": (threads, lambda: train(batched)),
        "batched, torch.func": (threads, lambda: train(general)),
        "plain loop, 1 thread": (1, lambda: plain(batched, module)),
        f"plain loop, {threads} threads": (threads, lambda: plain(batched, module)),
    }


def errors_in_float64(model: str, clients: int = 4) -> dict[str, float]:
    """Return the largest difference of each variant's updates from those of the plain loop.

    Args:
        model: a network's name.
        clients: how many train; few are enough to compare updates.

    Returns:
        By variant, relative to the largest number in the plain loop's updates.
    """
    updates = {}
    # in float32 the order of sums alone changes the last bits, which training amplifies
    exact = variants(model, clients, torch.float64)
    for name, (_, run_once) in exact.items():
        updates[name] = run_once()
    reference = updates["plain loop, 1 thread"]
    return {name: relative_error(update, reference) for name, update in updates.items()}


def timed(tasks: Variants, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each variant's rounds, which take turns; the first only warms up.

    Args:
        tasks: threads and one round of each variant, by name.
        rounds: timed ones, after the first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    for _ in range(rounds + 1):
        for name, (threads, run_once) in tasks.items():
            with cpu_threads(threads):
                start = time.perf_counter()
                run_once()
                seconds[name].append(time.perf_counter() - start)
    return seconds


def measure(model: str, clients: int, rounds: int) -> list[dict[str, Any]]:
    """Measure seconds a round of each variant, in turn.

    Args:
        model: a network's name.
        clients: how many are timed.
        rounds: timed ones of each variant.

    Returns:
        A line of the table for each variant.
    """
    errors = errors_in_float64(model)
    seconds = timed(variants(model, clients), rounds)
    # without the first round, which only warms up
    counted = {name: times[1:] for name, times in seconds.items()}
    medians = medians_of(counted)
    # the ratio is to the plain loop at its better number of threads
    best_plain = best_of(medians, "plain")
    rows = []
    for name, times in seconds.items():
        first, *later = times
        row = {
            "model": model,
            "clients": clients,
            "variant": name,
            "rounds": rounds,
            "first": round(first, 4),
            "median": round(medians[name], 4),
            "min": round(min(later), 4),
            "max": round(max(later), 4),
            "times_faster": round(best_plain / medians[name], 2),
            "error_in_float64": f"{errors[name]:.1e}",
        }
        rows.append(row)
    return rows


def profile(model: str, clients: int) -> list[dict[str, Any]]:
    """Return the slowest operations of a batched round on one thread, by their share of its time.

    Args:
        model: a network's name.
        clients: how many train.
    """
    batched = cohort(model, clients)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with cpu_threads(1):
        # the first round only warms up
        train(batched)
        with (
            torch.profiler.profile(activities=activities) as profiler,
            torch.profiler.record_function("whole"),
        ):
            train(batched)
    return _shares(profiler.key_averages(), model)


def _shares(events: Any, model: str) -> list[dict[str, Any]]:
    """Return a line of the table for each of the slowest operations.

    Args:
        events: the profiler's averages, by operation.
        model: a network's name.
    """
    # microseconds of each operation itself, without the operations that it calls
    times = [(event.self_cpu_time_total, event.key) for event in events]
    elapsed = sum(microseconds for microseconds, _ in times)
    times.sort(reverse=True)
    rows = []
    for microseconds, name in times[:OPERATIONS]:
        # the round's own time, outside all operations of torch, is the interpreter's
        operation = name
        if name == "whole":
            operation = "Python"
        share = round(microseconds / elapsed, 3)
        rows.append({"model": model, "operation": operation, "share": share})
    return rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--models", nargs="+", default=["mlp-200", "cnn-briggs"])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = []
    shares = []
    for model in options.models:
        measured = measure(model, options.clients, options.rounds)
        profiled = profile(model, min(options.clients, 20))
        for row in measured + profiled:
            print(row, flush=True)
        rows += measured
        shares += profiled
    print(write("speed", rows), write("profile", shares))


if __name__ == "__main__":
    main()
