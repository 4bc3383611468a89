"""Measure what a mask costs beside a client's training, in seconds and in bytes.

python -m benchmarks.costs.masks [repetitions, 7]

Three steps of a mask are timed: making a call's map, masking one update, and undoing the mask of
one average. Training is on random images with batches of 10. Ten steps are timed; the round of
Briggs et al. 2020 (600 samples, 3 epochs: 180 steps) takes eighteen times as long. A deployed
client trains in a plain loop and makes its own map. In a cohort of 8 clients, which train as one
batch, one map serves all. Masks and training alternate in one process; the table has medians and
quartiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.costs.speed import cohort, train
from benchmarks.table import tabulate
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.models.validation import build as build_model
from securecluster.privacy.masking.masks import MASKS, build, width

ROUND = 180  # steps of a client's round in Briggs et al. 2020
SHORT = 10  # steps that are timed
BATCH = 10
COHORT = 8
# a small model is among them, since the dense Haar map has d² numbers
MODELS = {"linear": (1, 14, 14), "mlp-200": (1, 28, 28), "cnn-briggs": (1, 28, 28)}
STEPS = ("make", "mask", "undo")

Task = Callable[[], object]
Key = tuple[str, str]  # a mask and its step, or "training" and its way


def trainer(module: nn.Module, shape: tuple[int, ...]) -> Callable[[], None]:
    """Return a function that trains one client for ten SGD steps in a plain loop.

    Args:
        module: the client's model.
        shape: of one image.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.rand(SHORT, BATCH, *shape)
    y = torch.randint(0, 10, (SHORT, BATCH))

    def run_steps() -> None:
        for inputs, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return run_steps


def batched(model: str, shape: tuple[int, ...]) -> Task:
    """Return a function that trains each client of a cohort for ten SGD steps.

    Args:
        model: one of `MODELS`.
        shape: of one image.
    """
    clients = cohort(model, COHORT, shape=shape)
    return lambda: train(clients)


def stages_of(name: str, d: int) -> dict[str, Task]:
    """Return the timed steps of a mask, by name.

    A client makes each call's map once, and then masks one row and undoes one average with it.

    Args:
        name: one of `MASKS`.
        d: the number of a model's parameters.

    Raises:
        UsageError: the mask cannot be applied to rows of this width.
    """
    stage: Any = build(name, d)[0]
    stage.unlock(bytes(range(32)))
    masked_width = width(name, d)
    rows = torch.randn(1, d)
    mean = torch.randn(masked_width)
    step = 0

    def make() -> None:
        nonlocal step
        # a new step each time, since the stage keeps the maps of the last few steps
        step += 1
        stage._of(masked_width, step)

    return {
        "make": make,
        "mask": lambda: stage.overwrite(rows, step),
        "undo": lambda: stage.inverse(mean, step),
    }


def seconds(task: Task) -> float:
    """Return the seconds that one execution of a task takes."""
    start = time.perf_counter()
    task()
    return time.perf_counter() - start


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return the median, the lower and the upper quartile in milliseconds.

    Args:
        values: in seconds.
    """
    milliseconds = 1e3 * np.quantile(values, [0.25, 0.5, 0.75])
    lower, median, upper = [round(float(value), 3) for value in milliseconds]
    return median, lower, upper


def measure(model: str, shape: tuple[int, ...], repetitions: int) -> list[dict[str, Any]]:
    """Time training and every mask of one model in turn.

    Args:
        model: one of `MODELS`.
        shape: of one image.
        repetitions: counted ones, after one that only warms up.

    Returns:
        A line of the table for each mask.
    """
    flat = build_model(model, shape, 10, Randomness(0))
    d = flat.dimension
    tasks: dict[Key, Task] = {
        ("training", "steps"): trainer(flat.module, shape),
        ("training", "batched"): batched(model, shape),
    }
    masks = []
    # the first mask is none
    for name in MASKS[1:]:
        try:
            stages = stages_of(name, d)
        except UsageError as refused:
            print(f"{model}: {refused}")
            continue
        masks.append(name)
        for step, task in stages.items():
            tasks[name, step] = task
    times: dict[Key, list[float]] = {key: [] for key in tasks}
    for repetition in range(repetitions + 1):
        for key, task in tasks.items():
            elapsed = seconds(task)
            # the first repetition only warms up
            if repetition:
                times[key].append(elapsed)
    return [row(model, d, name, times) for name in masks]


def row(model: str, d: int, name: str, times: dict[Key, list[float]]) -> dict[str, Any]:
    """Return the line of one mask on one model, beside the training of the same run.

    Args:
        model: one of `MODELS`.
        d: the number of its parameters.
        name: of the mask.
        times: seconds of every repetition, of the mask's steps and of training.
    """
    spread: dict[str, float] = {}
    medians = {}
    for step in STEPS:
        medians[step], lower, upper = quartiles(times[name, step])
        spread[f"{step}_ms"] = medians[step]
        spread[f"{step}_ms_q1"] = lower
        spread[f"{step}_ms_q3"] = upper
    loop, loop_lower, loop_upper = quartiles(times["training", "steps"])
    together, together_lower, together_upper = quartiles(times["training", "batched"])
    alone = sum(medians.values())
    # a cohort masks a row for each client, with one map for all of them
    shared = COHORT * medians["mask"] + medians["make"] + medians["undo"]
    loop_round = loop * ROUND / SHORT
    cohort_round = together * ROUND / SHORT
    return {
        "model": model,
        "d": d,
        "mask": name,
        **spread,
        "train_10_steps_ms": loop,
        "train_10_steps_ms_q1": loop_lower,
        "train_10_steps_ms_q3": loop_upper,
        "cohort_10_steps_ms": together,
        "cohort_10_steps_ms_q1": together_lower,
        "cohort_10_steps_ms_q3": together_upper,
        "percent_of_180_steps": round(100 * alone / loop_round, 3),
        "percent_of_10_steps": round(100 * alone / loop, 2),
        "cohort_percent_of_180_steps": round(100 * shared / cohort_round, 3),
        "cohort_percent_of_10_steps": round(100 * shared / together, 2),
        # float32, so four bytes for each number that padding adds
        "extra_bytes_per_update": 4 * (width(name, d) - d),
    }


def main(repetitions: int = 7) -> None:
    """Print and write the table.

    Args:
        repetitions: of every measurement.
    """
    torch.manual_seed(0)
    measured = (measure(model, shape, repetitions) for model, shape in MODELS.items())
    print(tabulate("masks", measured))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
