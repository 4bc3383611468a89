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

`--grid readme --seeds 20` (about ten minutes on one core) has those of `epsilon` that are not told
the number of clusters, with enough seeds for intervals: the README's picture, methods.png. Options
that are not given are chosen for each ε, as in a user's own run, so that CFL and FL+HC compare
signatures.

`--grid full` is for a GPU: updates and epsilon on MNIST, Fashion-MNIST and CIFAR-10 with the
networks that suit them. A grid that was stopped goes on from its folders, runs/noise-DATA-PART,
which also have pictures of each part as PDF and SVG. `--picture` draws those of the pages anew from
the tables, and runs nothing. noise.png has the parts, accuracy at equal ε, and the accuracy of
honest clients over the share of malicious ones (`benchmarks.leaks.malicious_clients`, the behaviour
that does most harm to each protocol).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.grid import script_parser
from benchmarks.sheet import distinct
from benchmarks.table import RESULTS, read, write
from securecluster.cli.main import main as command_line
from securecluster.data import locations
from securecluster.data.locations import FOLDER
from securecluster.figures.looks import looks, name_of
from securecluster.studies.pareto import efficient
from securecluster.studies.sweep_tables import HOLDS

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
# those of `epsilon` that are not told the number of clusters
METHODS = Part(("signature", "srfca", "rdpcfl", "flhc", "cfl"), EPSILON.levels, EPSILON.options)
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
BELOW = -0.17  # of a panel: place of its legend
MULTIPLIER = "noise multiplier z (standard deviation by clip norm)"
EPSILON_OF = "ε of a run for one example, at δ = 1e-5"
# pictures that pages show: of which part, over what, and the scores
PICTURES = (
    ("digits_updates", "epsilon", ("ari", "accuracy")),
    ("digits_epsilon", "epsilon", ("ari", "accuracy")),
    ("mobility_positions", "noise", ("ari", "position_error")),
)
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
    for table in ("runs", "summary", "thresholds"):
        rows = read(folder / f"{table}.csv")
        print(write(f"noise_{name}_{table}", rows))
    if "--epsilon" in sweep.levels:
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
    """Draw ARI and accuracy, or error, of the parts that pages show, from their tables."""
    from securecluster import plot
    from securecluster.figures.figure import save

    paths = []
    for name, x, scores in PICTURES:
        path = RESULTS / f"noise_{name}_over_{x}.png"
        paths.append(save(path, plot.sweep(_runs(name), x=x, y=scores)))
    return paths


def _runs(name: str) -> DataFrame:
    """Return the runs of a part as `plot.sweep` takes them."""
    import pandas

    return pandas.read_csv(RESULTS / f"noise_{name}_runs.csv", comment="#")


def draw_methods() -> Path:
    """Draw the README's picture: ARI over ε, large enough for a phone."""
    from securecluster import plot
    from securecluster.figures.figure import save

    picture = plot.sweep(
        _runs("digits_methods"),
        size=(5.6, 4.6),
        font=13,
        title="clusters by signatures need the least ε",
        xlabel="ε of a run for one image, at δ = 1e-5",
        ylabel="clusters found (ARI)",
    )
    return save(RESULTS / "methods.png", picture)


def draw_all() -> Path:
    """Draw ARI, NSIM's correlation, accuracy over bytes, and the harm of malicious clients."""
    from securecluster.figures.figure import figure, save

    picture, axes = figure(10.4, 13.6, rows=3, columns=2, share=False)
    updates, eigenvectors, positions, equal, accuracy, malicious = axes.flat
    for panel in axes.flat:
        panel.grid(alpha=0.25)
        panel.set_ylim(-0.15, 1.05)
    _draw_part(updates, "digits_updates", "ari", "noise", MULTIPLIER)
    updates.set_title("updates, compressed updates and losses (whole clients)", fontsize=9)
    _draw_part(eigenvectors, "digits_eigenvectors", "ari", "noise", MULTIPLIER)
    eigenvectors.set_title("eigenvectors and signatures (single examples)", fontsize=9)
    _draw_part(positions, "mobility_positions", "pearson", "noise", MULTIPLIER)
    positions.set_title("NSIM: layers of models of positions (whole clients)", fontsize=9)
    positions.set_ylabel("correlation with true similarity")
    _draw_part(equal, "digits_epsilon", "ari", "target_epsilon", EPSILON_OF)
    equal.set_title("at equal ε (single examples)", fontsize=9)
    _draw_accuracy(accuracy)
    accuracy.set_title("accuracy at equal ε (dots: efficient in accuracy, bytes and ε)", fontsize=9)
    accuracy.set_ylabel("accuracy, mean over seeds")
    _draw_malicious(malicious)
    malicious.set_title("malicious clients, the worst of six behaviours", fontsize=9)
    for panel in (updates, eigenvectors, equal):
        panel.set_ylabel("ARI, mean over seeds")
        panel.axhline(HOLDS, color="0.8", linewidth=0.8, zorder=0)
    malicious.set_ylabel("accuracy of honest clients")
    return save(RESULTS / "noise.png", picture)


def _results(name: str) -> list[dict[str, str]]:
    """Return the lines of a table of `results`, without its comment."""
    return read(RESULTS / f"{name}.csv")


def _draw_part(panel: Any, name: str, score: str, column: str, text: str) -> None:
    """Draw a score of each variant over a column of a part's summary.

    Args:
        panel: matplotlib axes.
        name: of the part's tables.
        score: column of the vertical axis.
        column: of the horizontal axis, whose levels are evenly spaced.
        text: of the horizontal axis.
    """
    summary = _results(f"noise_{name}_summary")
    rows = [row for row in summary if row[score]]
    levels = _levels(rows, column)
    variants = distinct(rows, "variant")
    for label, look in looks(variants).items():
        if look.color == "0.5":
            continue  # baselines do not cluster
        points = [row for row in rows if row["variant"] == label]
        places = [levels.index(float(row[column])) for row in points]
        means = [float(row[score]) for row in points]
        name = name_of(label)
        panel.plot(places, means, look.line, marker=look.marker, color=look.color, label=name)
    _finish(panel, levels, text)


def _levels(rows: Sequence[dict[str, str]], column: str) -> list[float]:
    """Return the different numbers of a column, in ascending order."""
    return sorted({float(row[column]) for row in rows})


def _draw_accuracy(panel: Any) -> None:
    """Draw the accuracy of each variant at equal ε, with a filled mark where it is efficient.

    Args:
        panel: matplotlib axes.
    """
    rows = _results("noise_digits_epsilon_summary")
    levels = _levels(rows, "target_epsilon")
    variants = distinct(rows, "variant")
    for label, look in looks(variants).items():
        points = [row for row in rows if row["variant"] == label and row["accuracy"]]
        places = [levels.index(float(row["target_epsilon"])) for row in points]
        means = [float(row["accuracy"]) for row in points]
        panel.plot(
            places,
            means,
            marker=look.marker,
            fillstyle="none",
            label=name_of(label),
            color=look.color,
            linestyle=look.line,
            linewidth=0.8,
        )
        for position, mean, row in zip(places, means, points, strict=True):
            if row["efficient"] == "True":
                panel.plot(position, mean, "o", color=look.color, markersize=8)
    _finish(panel, levels, EPSILON_OF)


def _finish(panel: Any, levels: Sequence[float], text: str) -> None:
    """Label evenly spaced levels, and add the legend.

    Args:
        panel: matplotlib axes.
        levels: of noise or ε.
        text: of the horizontal axis.
    """
    texts = ["∞" if math.isinf(level) else f"{level:g}" for level in levels]
    panel.set_xticks(range(len(levels)), texts)
    panel.set_xlabel(text)
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, BELOW), ncols=2, fontsize=7)


def _draw_malicious(panel: Any) -> None:
    """Draw the lowest accuracy of honest clients over the behaviours of malicious ones.

    Args:
        panel: matplotlib axes.
    """
    accuracies: dict[tuple[str, float, str], list[float]] = {}
    for row in _results("malicious_clients"):
        measured = row["data"] == "digits" and row["status"] == "done"
        if not measured or not row["accuracy"]:
            continue
        key = (row["protocol"], float(row["share"]), row["behaviour"])
        values = accuracies.setdefault(key, [])
        values.append(float(row["accuracy"]))
    worst: dict[str, dict[float, float]] = {}
    for (protocol, share, _), values in accuracies.items():
        mean = sum(values) / len(values)
        by_share = worst.setdefault(protocol, {})
        by_share[share] = min(mean, by_share.get(share, mean))
    # "srfca trimmed" is a variant of srfca
    variants = {name.replace(" ", ":", 1): name for name in worst}
    for label, look in looks(list(variants)).items():
        by_share = worst[variants[label]]
        shares = sorted(by_share)
        means = [by_share[share] for share in shares]
        name = name_of(label)
        panel.plot(shares, means, look.line, marker=look.marker, color=look.color, label=name)
    panel.set_xlabel("share of malicious clients")
    panel.legend(loc="upper center", bbox_to_anchor=(0.5, BELOW), ncols=2, fontsize=7)


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
        print(*draw_parts(), draw_methods(), draw_all(), sep="\n")
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
        print(draw_all())


if __name__ == "__main__":
    main()
