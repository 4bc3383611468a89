"""Shared code of the scripts for the tables of Briggs et al. 2020.

It runs plain FL and FL+HC on the same clients, seeds and rounds.

The paper: 100 clients with 600 MNIST samples (FEMNIST: 367 writers; the stored set has 100),
cnn-briggs, batch 10, 3 epochs, learning rate 0.1, 50 rounds; accuracy and the share of clients at
99 % (FEMNIST 80 %) in the round after the clustering and in the last, as ratios to FL. `--full`
runs these.

The scale for a CPU is not in the paper: mlp-200, 30 rounds, 100 samples (FEMNIST: all, learning
rate 0.03). Its targets, 92 % and 50 %, are near the accuracy of FL there on IID MNIST and on
FEMNIST. Updates are not masked, which changes no result. Ratios are to FL with the same seed and
share of clients, measured once. Beside the clusters of the given threshold stand those of the
default rule on the same merges (`rule_…`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from benchmarks.papers.cfl.runs import training
from benchmarks.sheet import Cell, Row, Sheet, numbers, spread
from securecluster import Federation
from securecluster.clustering.agglomerative import cut, gap_of, threshold
from securecluster.clustering.metrics import agreement
from securecluster.data.scenarios import scenario
from securecluster.protocols import FLHC, FedAvg, Settings

SCALES: dict[tuple[str, str], dict[str, Any]] = {
    ("mnist", "cpu"): {
        "clients": 100,
        "samples": 100,
        "model": "mlp-200",
        "lr": 0.1,
        "rounds": 30,
        "target": 0.92,  # near the accuracy of FL on IID MNIST
    },
    ("mnist", "full"): {
        "clients": 100,
        "samples": 600,
        "model": "cnn-briggs",
        "lr": 0.1,
        "rounds": 50,
        "target": 0.99,  # of Section III
    },
    ("femnist", "cpu"): {
        "clients": 100,
        "samples": None,
        "model": "mlp-200",
        "lr": 0.03,
        "rounds": 30,
        "target": 0.5,  # near the accuracy of FL
    },
    ("femnist", "full"): {
        "clients": 100,  # 367 writers in the paper; the stored set has 100
        "samples": None,
        "model": "cnn-briggs",
        "lr": 0.1,
        "rounds": 50,
        "target": 0.8,  # of Section III
    },
}
SHARES = (0.1, 0.2, 0.5, 1.0)  # cf of Tables I to III
BEFORE = (1, 3, 5, 10)  # n of Tables I to III
# ward linkage is defined for l2 alone
PAIRS = [
    ("cosine", "average"),
    ("cosine", "complete"),
    ("cosine", "single"),
    ("l2", "average"),
    ("l2", "complete"),
    ("l2", "single"),
    ("l2", "ward"),
    ("l1", "average"),
    ("l1", "complete"),
    ("l1", "single"),
]
PAIRS_BEFORE = 10  # n of Tables IV to VI
PAIRS_SHARE = 0.2  # cf of Tables IV to VI
# of the merges' heights, among which the best threshold is: 21 and 4 clusters of 100 clients
QUANTILES = (0.8, 0.97)
# columns of the paper's tables: accuracy and share of clients at the target, in the round
# after the clustering and in the last
FOUR = ("post_accuracy", "last_accuracy", "post_share", "last_share")
OWN = ("n", "metric", "linkage", "threshold", "paper")  # a cell's keys that plain FL does not have


def plain(data: str, name: str, scale: str, seed: int, cf: float) -> dict[str, Any]:
    """Return the cell of FL, which has all that shapes a run but the clustering.

    Args:
        data: the data set.
        name: the scenario.
        scale: "cpu" or "full".
        seed: the seed of the run.
        cf: the share of clients that train in a round.
    """
    # of the paper: local epochs and mini-batches
    common = {"epochs": 3, "batch_size": 10, **SCALES[data, scale]}
    return {
        "scale": scale,
        "data": data,
        "scenario": name,
        **common,
        "seed": seed,
        "cf": cf,
        "method": "fl",
    }


def grid(
    data: str,
    name: str,
    scale: str,
    seeds: int,
    cut_at: float,
    paper: Mapping[tuple[float, int], str],
) -> list[Cell]:
    """Return the cells of a table over cf and n, with ward and l2.

    Args:
        data: the data set.
        name: the scenario.
        scale: "cpu" or "full".
        seeds: the number of seeds.
        cut_at: the paper's threshold.
        paper: what the paper prints, by cf and n.

    Returns:
        Each cf begins with its FL; the costly ones come last.
    """
    cells: list[Cell] = []
    # costs grow with cf, so a run that is out of time lacks the most expensive cells
    for cf, seed in product(SHARES, range(seeds)):
        fl = plain(data, name, scale, seed, cf)
        cells.append(fl)
        for n in BEFORE:
            keys = clustering(n, "l2", "ward", cut_at)
            cells.append({**fl, **keys, "paper": paper[cf, n]})
    return cells


def pairs(
    data: str, name: str, scale: str, seeds: int, cut_at: str, paper: Mapping[tuple[str, str], str]
) -> list[Cell]:
    """Return the cells of a table over metric and linkage, at n = 10 and cf = 0.2.

    Args:
        data: the data set.
        name: the scenario.
        scale: "cpu" or "full".
        seeds: the number of seeds.
        cut_at: "gap" or "best", as of `clustering`.
        paper: what the paper prints, by metric and linkage.
    """
    cells: list[Cell] = []
    for seed in range(seeds):
        fl = plain(data, name, scale, seed, PAIRS_SHARE)
        cells.append(fl)
        for metric, linkage in PAIRS:
            keys = clustering(PAIRS_BEFORE, metric, linkage, cut_at)
            cells.append({**fl, **keys, "paper": paper[metric, linkage]})
    return cells


def clustering(n: int, metric: str, linkage: str, cut_at: float | str) -> dict[str, Any]:
    """Return the keys of FL+HC.

    Args:
        n: the round of the clustering.
        metric: the distance between updates.
        linkage: the linkage of the merges.
        cut_at: a threshold, "gap" for the default rule, or "best" for the best of that and
            QUANTILES.
    """
    return {"method": "flhc", "n": n, "metric": metric, "linkage": linkage, "threshold": cut_at}


def measured(sheet: Sheet) -> Callable[[Cell], dict[str, Any]]:
    """Return the function that measures a sheet's cells.

    It returns FL's curves, or FL+HC's figures beside those of its FL.

    Args:
        sheet: the sheet, which has the row of each cell's FL.
    """

    def measure(cell: Cell) -> dict[str, Any]:
        if cell["method"] == "fl":
            protocol = FedAvg(**training_of(cell))
            fitted = protocol.fit(clients_of(cell), run_settings(cell))
            lines = fitted.history_
            return {
                "accuracies": [line["accuracy"] for line in lines],
                "shares": [line["at_target"] for line in lines],
            }
        fl_cell = {name: value for name, value in cell.items() if name not in OWN}
        fl_cell["method"] = "fl"
        (fl,) = sheet.expect([fl_cell])
        results = _clustered(cell)
        accuracies = numbers(fl["accuracies"])
        shares = numbers(fl["shares"])
        return {**results, **_beside(results, accuracies, shares, cell["n"])}

    return measure


def _clustered(cell: Cell) -> dict[str, Any]:
    """Return the figures of FL+HC with the cell's threshold."""
    if cell["threshold"] == "best":
        return _best(cell)
    return _run(cell, cell["threshold"])


def _beside(
    results: Mapping[str, Any], accuracies: Sequence[float], shares: Sequence[float], n: int
) -> dict[str, Any]:
    """Return FL's four figures in the same rounds, and the ratios to them.

    Args:
        results: the four figures of FL+HC.
        accuracies: FL's accuracy after each round.
        shares: FL's share of clients at the target after each round.
        n: the round of the clustering.

    Returns:
        `fl_NAME` and `NAME_x` for each of `FOUR`; the ratio to 0 is "–".
    """
    fl = {
        "post_accuracy": accuracies[n],
        "last_accuracy": accuracies[-1],
        "post_share": shares[n],
        "last_share": shares[-1],
    }
    figures: dict[str, Any] = {f"fl_{name}": value for name, value in fl.items()}
    for name, value in fl.items():
        # the paper's tables have no ratio to 0 either
        ratio = "–"
        if value:
            ratio = f"{results[name] / value:.2f}"
        figures[f"{name}_x"] = ratio
    return figures


def _run(cell: Cell, cut_at: float | str) -> dict[str, Any]:
    """Return one run's four figures, its clusters, and those of the default rule.

    Args:
        cell: the clustering, and the setting of the run.
        cut_at: a threshold, or "gap" for the default rule.
    """
    metric = cell["metric"]
    linkage = cell["linkage"]
    federation = clients_of(cell)
    method = FLHC(
        **training_of(cell), pre_rounds=cell["n"], metric=metric, linkage=linkage,
        clustering_batches="shuffled",
    )  # fmt: skip
    if cut_at != "gap":
        method.set_params(threshold=cut_at)
    lines = method.fit(federation, run_settings(cell)).history_
    # lines are numbered from zero, so this is the round after the first n
    line = lines[cell["n"]]
    last = lines[-1]
    clusters = line["clustered"]
    tree = np.array(line["merges"])
    # the largest gap of the same merges (not in the paper), which the default rule begins with
    by_rule = cut(tree, threshold(tree, gap_of(metric, linkage)))
    rule_ari = None
    if federation.truth is not None:
        rule_ari = agreement(by_rule, federation.truth)["ari"]
    heights = tree[:, 2]
    return {
        "post_accuracy": line["accuracy"],
        "last_accuracy": last["accuracy"],
        "post_share": line["at_target"],
        "last_share": last["at_target"],
        "clusters": len(clusters),
        "singles": sum(len(cluster) == 1 for cluster in clusters),
        "ari": line.get("ari"),
        "cut_at": line["threshold"],
        "rule_clusters": 1 + max(by_rule),
        "rule_ari": rule_ari,
        "heights": np.quantile(heights, QUANTILES),
    }


def _best(cell: Cell) -> dict[str, Any]:
    """Return the run with the best test accuracy in the last round.

    The runs are the default rule's, whose figures stand beside the best ones, and those of a few
    thresholds.

    Args:
        cell: the clustering, and the setting of the runs.
    """
    merges = cell["clients"] - 1
    rule = _run(cell, "gap")
    runs = [rule]
    counts = {rule["clusters"]}
    for height, quantile in zip(rule["heights"], QUANTILES, strict=True):
        # m − 1 merges make one cluster, and each merge that is not made leaves one more
        expected = 1 + round((1 - quantile) * merges)
        # a number of clusters that a run has had would give the same run again
        if expected not in counts:
            run = _run(cell, float(height))
            runs.append(run)
            counts |= {expected, run["clusters"]}
    # test samples choose, which flatters: the default rule's figures stand beside (rule_…)
    best = max(runs, key=lambda run: run["last_accuracy"])
    rule_figures = {f"rule_{name}": rule[name] for name in (*FOUR, "clusters", "ari")}
    return {**best, **rule_figures}


def training_of(cell: Cell) -> dict[str, Any]:
    """Return a cell's hyper-parameters of federated learning."""
    params = training(cell)
    # averages of masked updates are the same, so masks would only cost time
    return {**params, "participation": cell["cf"], "mask": "none"}


def run_settings(cell: Cell) -> Settings:
    """Return the settings of a cell's run, with its target."""
    return Settings(target=cell["target"], transcript="none", keys_from_seed=True)


def clients_of(cell: Cell) -> Federation:
    """Return the clients of a cell."""
    names = ("data", "scenario", "clients", "samples", "seed")
    return _dealt(*(cell[name] for name in names))


# the cells of one seed follow each other, and share their clients
@lru_cache(maxsize=1)
def _dealt(data: str, name: str, clients: int, samples: int | None, seed: int) -> Federation:
    return Federation.simulate(
        data, scenario=scenario(name), clients=clients, samples=samples, seed=seed
    )


def report(rows: Sequence[Row], by: Sequence[str]) -> None:
    """Print a line for each setting.

    It has four figures in percent with ratios to FL, clusters and ARI, as means over seeds, and the
    paper's four figures.

    Args:
        rows: the rows of FL and of FL+HC.
        by: the columns that tell settings apart.
    """
    clustered = [row for row in rows if row["method"] == "flhc"]
    paper: dict[tuple[str, ...], str] = {}
    for row in clustered:
        key = tuple(row[column] for column in by)
        paper[key] = row["paper"]
    extra = ("clusters", "ari", "rule_clusters", "rule_ari", "rule_last_accuracy")
    of_fl = [f"fl_{name}" for name in FOUR]
    # a value that no row of a setting has is left out of its means
    means: dict[tuple[str, ...], dict[str, float]] = {}
    for name in (*FOUR, *of_fl, *extra):
        for key, (mean, *_) in spread(clustered, by, name).items():
            values = means.setdefault(key, {})
            values[name] = mean
    for key in spread(clustered, by, "last_accuracy"):
        values = means[key]
        setting = " ".join(key)
        figures = [_with_ratio(values[name], values[f"fl_{name}"]) for name in FOUR]
        clusters = [f"{name} {values[name]:.3g}" for name in extra if name in values]
        phrases = ["  ".join(figures), ", ".join(clusters), f"paper: {paper[key]}"]
        line = "; ".join(phrases)
        print(f"{setting:18} {line}")


def _with_ratio(mean: float, fl: float) -> str:
    """Return a figure in percent with its ratio to FL's, as the paper's tables have it."""
    percent = f"{100 * mean:.1f}"
    if not fl:
        return f"{percent} (–)"
    return f"{percent} ({mean / fl:.1f}x)"


def table(
    name: str, cells: Callable[[str, int], Sequence[Cell]], by: Sequence[str], options: Any
) -> Sheet:
    """Fill and report a sheet at the chosen scale.

    The cells of the paper's scale are listed in it either way.

    Args:
        name: the sheet's name.
        cells: the cells of a scale and a number of seeds.
        by: the columns that tell settings apart.
        options: a script's options, as of `sheet.options`.
    """
    sheet = Sheet(name)
    sheet.expect(cells("full", options.seeds))
    requested = cells(options.scale, options.seeds)
    rows = sheet.fill(requested, measured(sheet), options.minutes)
    report(rows, by)
    return sheet
