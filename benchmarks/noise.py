"""How much noise until the clusters are lost, at which ε, and at how many bytes: σ* and ε* of
protocols and mechanisms, ARI and accuracy over noise, ε and bytes.

python -m securecluster.benchmarks.noise [--seeds 5] [--jobs 0] [--grid digits]

`--grid digits` (about five minutes on two cores): 20 clients of digits with four swapped labels,
20 rounds of mlp-32, clip norm 1 (chosen by trial on these data, which no ε covers), noise from
0.003 to 1. `--grid full` is for a GPU: MNIST, Fashion-MNIST and CIFAR-10 with the networks that
suit them. It is `securecluster sweep` with the options below: a grid that was stopped goes on from
its folder, runs/noise-GRID, which also has the pictures as PDF and SVG.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from securecluster.app.cli import main as command_line
from securecluster.benchmarks.table import RESULTS, write
from securecluster.core import atomic_files

VARIANTS = (
    "cfl",
    "cfl:placement=central",
    "cfl:sketch=64",
    "cfl:compress=4bit",
    "flhc",
    "flhc:sketch=64",
    "fedavg",
    "finetune",
    "local",
)
LEVELS = ("0", "0.003", "0.01", "0.03", "0.1", "0.3", "1")
DIGITS = ("--model", "mlp-32", "--rounds", "20", "--clip", "1")
GRIDS: dict[str, dict[str, tuple[str, ...]]] = {
    "digits": {"digits": DIGITS},
    "full": {
        "mnist": ("--data", "mnist", "--clip", "1", "--device", "cuda"),
        "fashion_mnist": ("--data", "fashion_mnist", "--clip", "1", "--device", "cuda"),
        "cifar10": ("--data", "cifar10", "--clip", "1", "--device", "cuda"),
    },
}
TABLES = {"runs": "noise", "summary": "noise_summary", "thresholds": "noise_thresholds"}


def measure(data: str, options: Sequence[str], seeds: int, jobs: int, folder: Path) -> None:
    """Sweep over one data set, or go on with a sweep that was stopped.

    Args:
        data: name of the data set.
        options: of the command line.
        seeds: number of seeds.
        jobs: number of processes; 0 is one for each core.
        folder: of the sweep.
    """
    arguments = ["resume", str(folder)]
    if not (folder / "config.json").is_file():
        numbers = ["--seeds", str(seeds), "--jobs", str(jobs)]
        arguments = ["sweep", *VARIANTS, *options, *numbers, "--noise", *LEVELS]
        arguments += ["--out", str(folder)]
    code = command_line(arguments)
    if not (folder / "thresholds.csv").is_file():
        raise SystemExit(code)
    # of a data set of its own name, but for the default grid
    suffix = "" if data == "digits" else f"_{data}"
    for name, result in TABLES.items():
        with (folder / f"{name}.csv").open(newline="") as stream:
            print(write(result + suffix, list(csv.DictReader(stream))))
    for name in ("noise", "epsilon", "bytes"):
        picture = atomic_files.read(folder / f"{name}.png")
        atomic_files.write_atomic(RESULTS / f"noise{suffix}_{name}.png", picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a grid, and write its tables and pictures to `results`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grid", choices=tuple(GRIDS), default="digits")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    chosen = parser.parse_args(argv)
    for data, options in GRIDS[chosen.grid].items():
        measure(data, options, chosen.seeds, chosen.jobs, chosen.out / f"noise-{data}")


if __name__ == "__main__":
    main()
