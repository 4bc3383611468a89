"""What a mask costs beside a client's training: seconds to make the map, to mask a row, to undo an
average, and bytes.

python -m securecluster.benchmarks.masks [repetitions, 7]

Training is on random images, batch 10: ten steps are measured, and the round of Briggs et al. 2020
    (600 samples, 3 epochs: 180 steps)
is eighteen times that. A deployed client trains in a plain loop and makes its own map; in a cohort
of 8 clients, trained as one batch, one map serves all. Masks and training alternate in one process;
medians, with quartiles.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from securecluster.benchmarks.speed import PLAN, cohort
from securecluster.benchmarks.table import write
from securecluster.core.randomness import Randomness
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models.validation import build as build_model
from securecluster.privacy.masking.masks import MASKS, build, width

ROUND, SHORT, BATCH, COHORT = 180, 10, 10, 8
MODELS = {"linear": (1, 14, 14), "mlp-200": (1, 28, 28), "cnn-briggs": (1, 28, 28)}


def trainer(module: nn.Module, shape: tuple[int, ...]) -> Callable[[], None]:
    """Ten SGD steps of one client."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = torch.rand(SHORT, BATCH, *shape), torch.randint(0, 10, (SHORT, BATCH))

    def train() -> None:
        for inputs, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def batched(model: str, shape: tuple[int, ...]) -> Callable[[], object]:
    """Ten SGD steps of each client of a cohort."""
    clients = cohort(model, COHORT, shape=shape)
    return lambda: clients.train(Rows(clients.start[None], (0,) * COHORT), range(COHORT), PLAN, 1)


def stages_of(name: str, d: int) -> dict[str, Callable[[], object]]:
    """What is timed of a mask: a client makes each call's map once, masks one row, and undoes one
    average with the map it has.
    """
    stage: Any = build(name, d)[0]
    stage.unlock(bytes(range(32)))
    rows, mean, step = torch.randn(1, d), torch.randn(width(name, d)), 0

    def make() -> None:
        nonlocal step
        step += 1
        stage._of(width(name, d), step)

    return {
        "make": make,
        "mask": lambda: stage.overwrite(rows, step),
        "undo": lambda: stage.inverse(mean, step),
    }


def seconds(work: Callable[[], object]) -> float:
    """Of one execution."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile, in milliseconds."""
    low, middle, high = 1e3 * np.quantile(values, [0.25, 0.5, 0.75])
    return round(float(middle), 3), round(float(low), 3), round(float(high), 3)


def measure(model: str, shape: tuple[int, ...], repetitions: int) -> list[dict[str, Any]]:
    """The rows of one model: training and every mask in turn, `repetitions` times after one that is
    not counted.
    """
    flat = build_model(model, shape, 10, Randomness(0))
    d = flat.dimension
    work: dict[tuple[str, str], Callable[[], object]] = {
        ("training", "steps"): trainer(flat.module, shape),
        ("training", "batched"): batched(model, shape),
    }
    for name in MASKS[1:]:
        try:
            work |= {(name, what): do for what, do in stages_of(name, d).items()}
        except UsageError as refused:
            print(f"{model}: {refused}")
    found: dict[tuple[str, str], list[float]] = {key: [] for key in work}
    for repetition in range(repetitions + 1):
        for key, do in work.items():
            elapsed = seconds(do)
            if repetition:
                found[key].append(elapsed)
    return [
        row(model, d, name, found)
        for name in dict.fromkeys(name for name, _ in work)
        if name != "training"
    ]


def row(model: str, d: int, name: str, found: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    """One mask on one model, beside the training of the same run."""
    steps, together = quartiles(found["training", "steps"]), quartiles(found["training", "batched"])
    parts = {what: quartiles(found[name, what]) for what in ("make", "mask", "undo")}
    whole = sum(median for median, _, _ in parts.values())
    shared = COHORT * parts["mask"][0] + parts["make"][0] + parts["undo"][0]
    spread = {
        f"{what}_ms{end}": value
        for what, three in parts.items()
        for end, value in zip(("", "_q1", "_q3"), three, strict=True)
    }
    return {
        "model": model,
        "d": d,
        "mask": name,
        **spread,
        "train_10_steps_ms": steps[0],
        "train_10_steps_ms_q1": steps[1],
        "train_10_steps_ms_q3": steps[2],
        "cohort_10_steps_ms": together[0],
        "cohort_10_steps_ms_q1": together[1],
        "cohort_10_steps_ms_q3": together[2],
        "percent_of_180_steps": round(100 * whole / (steps[0] * ROUND / SHORT), 3),
        "percent_of_10_steps": round(100 * whole / steps[0], 2),
        "cohort_percent_of_180_steps": round(100 * shared / (together[0] * ROUND / SHORT), 3),
        "cohort_percent_of_10_steps": round(100 * shared / together[0], 2),
        "extra_bytes_per_update": 4 * (width(name, d) - d),
    }


def main(repetitions: int = 7) -> None:
    """Print and write the table."""
    torch.manual_seed(0)
    rows = []
    for model, shape in MODELS.items():
        for line in measure(model, shape, repetitions):
            rows.append(line)
            print(line, flush=True)
    print(write("masks", rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
