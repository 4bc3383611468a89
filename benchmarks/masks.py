"""What a mask costs beside a client's training: seconds to make the map, to mask a row, to undo an average, and bytes.

python -m securecluster.benchmarks.masks [repetitions, 7]

Training is a plain torch loop on random images of MNIST's shape, batch 10: ten steps are measured, and the round of Briggs et al. 2020
(600 samples, 3 epochs: 180 steps) is eighteen times that. Masks and training alternate in one process; medians, with quartiles.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from securecluster.benchmarks.table import write
from torch import nn

from securecluster.errors import UsageError
from securecluster.privacy.masks import MASKS, build, width

ROUND, SHORT, BATCH = 180, 10, 10


def mlp() -> nn.Module:
    """784-200-10: d = 159,010."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def cnn() -> nn.Module:
    """Briggs, Fan, Andras 2020: two 5×5 convolutions with 32 and 64 channels and pools, dense 512: d = 1,663,370."""
    first = [nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, 10))


def linear() -> nn.Module:
    """Logistic regression on 14×14 pixels: d = 1,970, small enough for a dense rotation."""
    return nn.Sequential(nn.AvgPool2d(2), nn.Flatten(), nn.Linear(196, 10))


def trainer(module: nn.Module) -> Callable[[], None]:
    """Ten SGD steps."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = torch.rand(SHORT, BATCH, 1, 28, 28), torch.randint(0, 10, (SHORT, BATCH))

    def train() -> None:
        for inputs, labels in zip(x, y, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    return train


def stages_of(name: str, d: int) -> dict[str, Callable[[], object]]:
    """What is timed of a mask: a client makes each call's map once, masks one row, and undoes one average with the map it has."""
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


def measure(model: str, module: nn.Module, repetitions: int) -> list[dict[str, Any]]:
    """The rows of one model: training and every mask in turn, `repetitions` times after one that is not counted."""
    d = sum(p.numel() for p in module.parameters())
    work: dict[tuple[str, str], Callable[[], object]] = {("training", "steps"): trainer(module)}
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
    return [row(model, d, name, found) for name in dict.fromkeys(name for name, _ in work) if name != "training"]


def row(model: str, d: int, name: str, found: dict[tuple[str, str], list[float]]) -> dict[str, Any]:
    """One mask on one model, beside the training of the same run."""
    steps = quartiles(found["training", "steps"])
    parts = {what: quartiles(found[name, what]) for what in ("make", "mask", "undo")}
    whole = sum(median for median, _, _ in parts.values())
    spread = {f"{what}_ms{end}": value for what, three in parts.items() for end, value in zip(("", "_q1", "_q3"), three, strict=True)}
    return {
        "model": model,
        "d": d,
        "mask": name,
        **spread,
        "train_10_steps_ms": steps[0],
        "train_10_steps_ms_q1": steps[1],
        "train_10_steps_ms_q3": steps[2],
        "percent_of_180_steps": round(100 * whole / (steps[0] * ROUND / SHORT), 3),
        "percent_of_10_steps": round(100 * whole / steps[0], 2),
        "extra_bytes_per_update": 4 * (width(name, d) - d),
    }


def main(repetitions: int = 7) -> None:
    """Print and write the table."""
    torch.manual_seed(0)
    rows = []
    for model, module in (("linear-14x14", linear()), ("784-200-10", mlp()), ("cnn-briggs", cnn())):
        for line in measure(model, module, repetitions):
            rows.append(line)
            print(line, flush=True)
    print(write("masks", rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
