"""Measure accuracy by task over rounds in one-shot and in random clusters.

These are Figures 2 and 3 of Ali & Arafa 2024.

python -m benchmarks.papers.oneshot.accuracy --figure 2 [--seeds 6] [--full]
    [--minutes 10]

Figure 2: CIFAR-10 with two tasks. The paper: five users with vehicles and five with animals, 10 %
of each user's labels from the other task; a network of two 5×5 convolutions, two pools and dense
layers of 120 and 84, whose convolutions are the common layers. Φ is here the untrained network
"conv", since ImageNet weights are not at hand.

Figure 3: Fashion-MNIST with three tasks of unequal size. The paper: five users with clothes, three
with shoes, two with bags, and a minority of the others' labels; fewer samples from task to task; a
784-32-10 network, pixels as features. The common layers are here the first one.

In both, six runs are averaged, and one-shot clusters reach a higher accuracy with less variance
than random ones, in Fig. 3 above all for the third task. The paper prints no numbers, and neither
samples, rounds, learning rate nor batch size. Random clusters are as large as the tasks and train
in the same way. Accuracy is the mean over a task's users, each on test samples with the
distribution of its training ones. `--full` distributes all of CIFAR-10, or as many samples of
Fashion-MNIST as the tasks allow; the former needs a GPU. Images are read from SECURECLUSTER_DATA or
the hub.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.grid import Grid, parser_of, read_options, with_seeds
from benchmarks.papers.oneshot.runs import CLUSTERS, compared, curves, trained
from benchmarks.sheet import Cell


@dataclass(frozen=True)
class Figure:
    """A figure of the paper.

    Args:
        common: what its cells share at every scale.
        scales: what they share at one scale.
        paper: what the paper finds.
        tasks: the tasks' names.
    """

    common: Mapping[str, Any]
    scales: Mapping[str, Mapping[str, Any]]
    paper: str
    tasks: tuple[str, ...]

    def cells(self, scale: str, seeds: int) -> list[Cell]:
        """Return the cells of one-shot and random clusters, by seed.

        Args:
            scale: "cpu" or "full".
            seeds: the number of seeds.
        """
        shared = {"scale": scale, **self.common, **self.scales[scale], "paper": self.paper}
        settings = [{**shared, "clusters": clusters} for clusters in CLUSTERS]
        return with_seeds(settings, range(seeds))


# samples, rounds, learning rate and batch size are not in the paper
FIGURES = {
    2: Figure(
        common={
            "data": "cifar10",
            "clients": 10,
            "minority": 0.1,  # of each user's labels, as in Section III
            "features": "conv",  # untrained: ImageNet weights are not at hand
            "model": "cnn-ali",  # its two convolutions are the common layers
            "gps_every": 1,
        },
        scales={
            "cpu": {"samples": 300, "batch_size": 10, "epochs": 1, "lr": 0.1, "rounds": 40},
            "full": {"samples": 4000, "batch_size": 50, "epochs": 1, "lr": 0.05, "rounds": 200},
        },
        paper="one-shot above random, with less variance",
        tasks=("vehicles", "animals"),
    ),
    3: Figure(
        common={
            "data": "fashion_mnist",
            "clients": 10,
            "minority": 0.1,  # the paper: “a minority”
            "features": "identity",  # the paper: no Φ is needed, since raw pixels are informative
            "model": "mlp-32",  # 784-32-10; the paper does not say which layers are common
            "gps_every": 1,
        },
        scales={
            "cpu": {"samples": 1200, "batch_size": 20, "epochs": 1, "lr": 0.05, "rounds": 40},
            "full": {"samples": None, "batch_size": 20, "epochs": 1, "lr": 0.05, "rounds": 100},
        },
        paper="one-shot above random, with less variance",
        tasks=("clothes", "shoes", "bag"),
    ),
}


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print and draw one figure."""
    parser = parser_of(__doc__, seeds=6)
    parser.add_argument(
        "--figure",
        type=int,
        required=True,
        choices=FIGURES,
        help="the figure's number in the paper",
    )
    options = read_options(parser, argv)
    selected = FIGURES[options.figure]
    grid = Grid(
        __doc__,
        f"oneshot_fig{options.figure}",
        selected.cells,
        trained,
        full="last",
        report=lambda rows: print(*compared(rows, selected.tasks), sep="\n"),
        draw=lambda rows: curves(rows, selected.tasks),
    )
    return grid.run(options)


if __name__ == "__main__":
    print(main())
