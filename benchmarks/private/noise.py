"""How much noise until the clusters are lost, at which ε, and at how many bytes: σ* and ε* of
protocols and mechanisms, ARI and accuracy over noise, ε and bytes.

python -m benchmarks.private.noise [--seeds 5] [--jobs 0] [--grid digits] [--only PART …]

`--grid digits` (about seven minutes on two cores) has four parts, each a `securecluster sweep`:

- updates: what clients send of their updates, with noise for whole clients: full or compressed,
  sketches, signatures, losses, noise of a trusted server or in shares. 20 clients with four swapped
  labels, clip norm 1 (chosen by trial on these data, which no ε covers);
- eigenvectors: one-shot clustering by noisy Gram matrices or naively noised eigenvectors, and
  signatures of gradients, with noise for single examples. 20 clients with rotated images;
- epsilon: all of them at equal ε of whole runs, for single examples, and which of them are
  efficient in accuracy (or ARI), bytes and ε. 8 clients, two clusters;
- positions: NSIM, which takes positions and no images. 20 persons of mobility, noise for whole
  clients on the layer that they send and on updates. It is left out where the data are not there.

`--grid readme --seeds 20` (about 15 minutes on one core) has those of `epsilon` that are not told
the number of clusters, with enough seeds for intervals, and the rival of all clusters, one model
that each client fine-tunes: the README's picture, methods.png. Options that are not given are
chosen for each ε, as in a user's own run, so that CFL and FL+HC compare signatures. Fine-tuning is
tuned: of 3, 10 and 16 of 20 rounds, with its usual learning rate or 0.4, 16 rounds with 0.4 have
the best mean accuracy over all ε on seeds 100 and 101.

`--grid full` is for a GPU: updates and epsilon on MNIST, Fashion-MNIST and CIFAR-10 with the
networks that suit them. A grid that was stopped goes on from its folders, runs/noise-DATA-PART,
which also have pictures of each part as PDF and SVG. `--picture` draws those of the pages anew from
the tables, and runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.grid import script_parser
from benchmarks.table import RESULTS, read, write
from securecluster.cli.main import main as command_line
from securecluster.data import locations
from securecluster.data.locations import FOLDER
from securecluster.studies.pareto import efficient

if TYPE_CHECKING:
    from pandas import DataFrame


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
# each client adds a share of the noise, inside secure sums
DISTRIBUTED = "placement=distributed,aggregation=secagg"
UPDATES = Part(
    (
        "cfl",
        "cfl:placement=central",
        "cfl:sketch=64",
        "cfl:compress=4bit",
        "cfl:signature=gradient",
        "flhc",
        "flhc:sketch=64",
        "flhc:compress=4bit",
        "srfca:distance=l2",
        "ifca:loss-clip=4",
        "clove:k=4",
        f"hidden:k=4,{DISTRIBUTED}",
        f"fedavg:{DISTRIBUTED}",
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
POSITIONS = Part(
    ("nsim", "nsim:layer=last", "fedavg", "local"),
    ("--noise", "0", "0.03", "0.1", "0.3"),
    (
        *("--data", "mobility", "--samples", "200", "--clip", "0.3"),
        # the paper's numbers of synthetic users and networks, in the format of such clients
        *("--synthetic", "100", "--networks", "1", "--grid", "1", "--positions", "90", "210"),
        *("--rounds", "10", "--local-rounds", "5"),
    ),
)
EPSILON = Part(
    (
        "signature",
        "cfl",
        "cfl:signature=gradient",
        "flhc",
        "flhc:signature=gradient",
        "srfca",
        "ifca:k=2",
        "clove:k=2",
        "rdpcfl:k=2",
        *BASELINES,
    ),
    ("--epsilon", "1", "2", "4", "8", "inf"),
    ("--dp-unit", "example", "--clip", "1"),
)
# those of `epsilon` that are not told the number of clusters, and their rival
RIVAL = "finetune:tune-rounds=16,lr=0.4"
METHODS = Part(
    ("signature", "srfca", "rdpcfl", "flhc", "cfl", RIVAL), EPSILON.levels, EPSILON.options
)
SMALL = ("--model", "linear", "--rounds", "20", "--clients", "8", "--clusters", "2")
GPU = ("--device", "cuda")
GRIDS: dict[str, dict[str, dict[str, Part]]] = {
    "digits": {
        "digits": {
            "updates": UPDATES.on("--model", "mlp-32", "--rounds", "20"),
            "eigenvectors": EIGENVECTORS.on("--model", "mlp-32", "--rounds", "5"),
            "epsilon": EPSILON.on(*SMALL),
        },
        "mobility": {"positions": POSITIONS},
    },
    "readme": {"digits": {"methods": METHODS.on(*SMALL)}},
    "full": {
        data: {
            "updates": UPDATES.on("--data", data, *GPU),
            "epsilon": EPSILON.on("--data", data, *GPU),
        }
        for data in ("mnist", "fashion_mnist", "cifar10")
    },
}
TRACES = "most_mobility/traces.parquet"
FONT = 13  # points of a text in the README's picture
WIDTH = 5.6  # inches of a picture, whose texts a phone can show
# pictures that pages show: of which part, and their height, with a legend of all variants
PICTURES = (("digits_updates", 8.4), ("digits_epsilon", 5.4))
PARETO = (
    "target_epsilon", "variant", "accuracy", "ari", "up", "down", "efficient", "efficient_ari",
)  # fmt: skip


def measure(name: str, sweep: Part, seeds: int, jobs: int, folder: Path) -> None:
    """Sweep over one part, or go on with a sweep that was stopped.

    Args:
        name: of its results.
        sweep: what to sweep over.
        seeds: number of seeds.
        jobs: number of processes; 0 is one for each core.
        folder: of the sweep.
    """
    arguments = ["resume", str(folder), "--jobs", str(jobs)]
    if not (folder / "config.json").is_file():
        numbers = ["--seeds", str(seeds), "--jobs", str(jobs)]
        options = [*sweep.options, *numbers, *sweep.levels]
        arguments = ["sweep", *sweep.variants, *options, "--out", str(folder)]
    code = command_line(arguments)
    if not (folder / "thresholds.csv").is_file():
        raise SystemExit(code)
    for table in ("runs", "thresholds"):
        rows = read(folder / f"{table}.csv")
        print(write(f"noise_{name}_{table}", rows))
    if name.endswith("epsilon"):
        lines = pareto(read(folder / "summary.csv"))
        print(write(f"noise_{name}_pareto", lines))


def pareto(rows: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """Return the lines of a sweep over ε that are efficient, by target.

    A line is efficient by accuracy, by ARI, or by accuracy among those that cluster: baselines may
    dominate all of these.

    Args:
        rows: of its summary, as texts.
    """
    clustering = [row for row in rows if row["protocol"] not in BASELINES and row["accuracy"]]
    marks = efficient(clustering, "accuracy")
    best = [row for row, mark in zip(clustering, marks, strict=True) if mark]
    lines = []
    for row in rows:
        among_clustering = row in best
        efficient_in_all = "True" in (row["efficient"], row["efficient_ari"])
        if efficient_in_all or among_clustering:
            line: dict[str, Any] = {name: row[name] for name in PARETO}
            line["efficient_clustering"] = among_clustering
            line["bytes"] = float(row["up"]) + float(row["down"])
            lines.append(line)
    # stable, so that variants stay in the grid's order
    return sorted(lines, key=lambda line: float(line["target_epsilon"]))


def _has_positions() -> bool:
    """Return whether the data of mobility are there."""
    folder = locations.folder()
    return folder is not None and (folder / TRACES).is_file()


def draw_parts() -> list[Path]:
    """Draw the ARI of the parts that pages show, from their tables."""
    from securecluster import plot
    from securecluster.figures.figure import save

    paths = []
    for name, height in PICTURES:
        path = RESULTS / f"noise_{name}_over_epsilon.png"
        paths.append(save(path, plot.sweep(_runs(name), size=(WIDTH, height), font=12)))
    return paths


def _runs(name: str) -> DataFrame:
    """Return the runs of a part as `plot.sweep` takes them."""
    import pandas

    return pandas.read_csv(RESULTS / f"noise_{name}_runs.csv", comment="#")


def draw_methods() -> Path:
    """Draw the README's picture: ARI and accuracy over ε, large enough for a phone."""
    from securecluster import plot
    from securecluster.figures.figure import figure, save

    runs = _runs("digits_methods")
    picture, panels = figure(WIDTH, 7.6, rows=2, columns=1)
    found, accuracy = panels
    clustering = runs[runs["variant"] != RIVAL]
    plot.sweep(clustering, ax=found, font=FONT, xlabel="", ylabel="clusters found (ARI)")
    names = {RIVAL: "fine-tuning"}
    xlabel = "ε of a run for one image, at δ = 1e-5"
    ylabel = "accuracy of the clients"
    plot.sweep(
        runs, y="accuracy", names=names, ax=accuracy, font=FONT, xlabel=xlabel, ylabel=ylabel
    )
    for panel in panels:
        panel.get_legend().remove()
    entries = accuracy.get_legend_handles_labels()
    picture.legend(*entries, loc="outside lower center", ncols=2, fontsize=FONT)
    return save(RESULTS / "methods.png", picture)


def main(argv: Sequence[str] | None = None) -> None:
    """Measure a grid, and write its tables and pictures to `results`."""
    parser = script_parser(__doc__)
    parser.add_argument("--grid", choices=tuple(GRIDS), default="digits")
    parser.add_argument("--only", nargs="+", default=(), help="parts, such as updates")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--picture", action="store_true", help="draw, and run nothing")
    chosen = parser.parse_args(argv)
    if chosen.picture:
        print(*draw_parts(), draw_methods(), sep="\n")
        return
    for data, sweeps in GRIDS[chosen.grid].items():
        for name, sweep in sweeps.items():
            if chosen.only and name not in chosen.only:
                continue
            if data == "mobility" and not _has_positions():
                print(f"{name} is left out: {FOLDER} names no folder that holds {TRACES}")
                continue
            folder = chosen.out / f"noise-{data}-{name}"
            measure(f"{data}_{name}", sweep, chosen.seeds, chosen.jobs, folder)
    if chosen.grid == "readme":
        print(draw_methods())
    if chosen.grid == "digits" and not chosen.only:
        print(*draw_parts(), sep="\n")


if __name__ == "__main__":
    main()
