"""How much noise until the clusters are lost, at which ε, and at how many bytes: σ* and ε* of
protocols and mechanisms, ARI and accuracy over noise, ε and bytes.

python -m securecluster.benchmarks.noise [--seeds 5] [--jobs 0] [--grid digits] [--only PART …]

`--grid digits` (about five minutes on two cores) has three parts, each a `securecluster sweep`:

- updates: what clients send of their updates, with noise for whole clients. 20 clients with four
  swapped labels, clip norm 1 (chosen by trial on these data, which no ε covers);
- eigenvectors: one-shot clustering by noisy Gram matrices or naively noised eigenvectors, and
  signatures of gradients, with noise for single examples. 20 clients with rotated images;
- epsilon: all of them at equal ε of whole runs, for single examples. 8 clients, two clusters.

`--grid full` is for a GPU: updates and epsilon on MNIST, Fashion-MNIST and CIFAR-10 with the
networks that suit them. A grid that was stopped goes on from its folders, runs/noise-DATA-PART,
which also have the pictures as PDF and SVG.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from securecluster.app.cli import main as command_line
from securecluster.benchmarks.table import RESULTS, write
from securecluster.core import atomic_files


@dataclass(frozen=True)
class Part:
    """One sweep of a grid.

    Attributes:
        variants: protocols with options of their own.
        levels: `--noise` or `--epsilon`, and the levels.
        options: of the command line.
    """

    variants: tuple[str, ...]
    levels: tuple[str, ...]
    options: tuple[str, ...]

    def on(self, *options: str) -> Part:
        """Return the same part with further options.

        Args:
            options: of the command line.
        """
        return Part(self.variants, self.levels, (*self.options, *options))


BASELINES = ("fedavg", "finetune", "local")
UPDATES = Part(
    (
        "cfl",
        "cfl:placement=central",
        "cfl:sketch=64",
        "cfl:compress=4bit",
        "flhc",
        "flhc:sketch=64",
        "srfca:distance=l2",
        "ifca:loss-clip=4",
        *BASELINES,
    ),
    ("--noise", "0", "0.003", "0.01", "0.03", "0.1", "0.3", "1"),
    ("--clip", "1"),
)
EIGENVECTORS = Part(
    (
        "oneshot:tasks=4",
        "oneshot:tasks=4,vectors=1",
        "oneshot:tasks=4,gram-mechanism=naive",
        "signature:k=4",
        "signature:k=4,signature-releases=1",
    ),
    ("--noise", "0.03", "0.1", "0.3", "1", "3", "10"),
    ("--scenario", "rotation", "--dp-unit", "example", "--clip", "1"),
)
EPSILON = Part(
    ("signature", "cfl", "flhc", "srfca", "ifca", *BASELINES),
    ("--epsilon", "1", "2", "4", "8", "inf"),
    ("--dp-unit", "example", "--clip", "1"),
)
GPU = ("--device", "cuda")
GRIDS: dict[str, dict[str, dict[str, Part]]] = {
    "digits": {
        "digits": {
            "updates": UPDATES.on("--model", "mlp-32", "--rounds", "20"),
            "eigenvectors": EIGENVECTORS.on("--model", "mlp-32", "--rounds", "5"),
            "epsilon": EPSILON.on(
                *("--model", "linear", "--rounds", "20", "--clients", "8", "--clusters", "2")
            ),
        }
    },
    "full": {
        data: {
            "updates": UPDATES.on("--data", data, *GPU),
            "epsilon": EPSILON.on("--data", data, *GPU),
        }
        for data in ("mnist", "fashion_mnist", "cifar10")
    },
}
PICTURES = ("noise", "epsilon", "bytes")


def measure(name: str, part: Part, seeds: int, jobs: int, folder: Path) -> None:
    """Sweep over one part, or go on with a sweep that was stopped.

    Args:
        name: of its results.
        part: what to sweep over.
        seeds: number of seeds.
        jobs: number of processes; 0 is one for each core.
        folder: of the sweep.
    """
    arguments = ["resume", str(folder)]
    if not (folder / "config.json").is_file():
        numbers = ["--seeds", str(seeds), "--jobs", str(jobs)]
        arguments = ["sweep", *part.variants, *part.options, *numbers, *part.levels]
        arguments += ["--out", str(folder)]
    code = command_line(arguments)
    if not (folder / "thresholds.csv").is_file():
        raise SystemExit(code)
    for table in ("runs", "summary", "thresholds"):
        with (folder / f"{table}.csv").open(newline="") as stream:
            print(write(f"noise_{name}_{table}", list(csv.DictReader(stream))))
    for picture in PICTURES:
        path = folder / f"{picture}.png"
        if path.is_file():
            target = RESULTS / f"noise_{name}_over_{picture}.png"
            atomic_files.write_atomic(target, atomic_files.read(path))


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a grid, and write its tables and pictures to `results`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grid", choices=tuple(GRIDS), default="digits")
    parser.add_argument("--only", nargs="+", default=(), help="parts, such as updates")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    chosen = parser.parse_args(argv)
    for data, parts in GRIDS[chosen.grid].items():
        for name, part in parts.items():
            if chosen.only and name not in chosen.only:
                continue
            folder = chosen.out / f"noise-{data}-{name}"
            measure(f"{data}_{name}", part, chosen.seeds, chosen.jobs, folder)


if __name__ == "__main__":
    main()
