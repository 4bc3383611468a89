"""What the scripts for the tables of Briggs et al. 2020 share: plain FL and FL+HC on the same
clients, seeds and rounds.

The paper: 100 clients with 600 MNIST samples (FEMNIST: 367 writers; the stored set has 100),
    cnn-briggs, batch 10, 3 epochs, learning rate
0.1, 50 rounds; accuracy and the share of clients at 99 % (FEMNIST 80 %) in the round after the
clustering and in the last, as ratios to FL. `--full` runs these. The scale for a CPU is ours:
mlp-200, 30 rounds, 100 samples (FEMNIST: all, learning rate 0.03); its targets, 92 % and 50 %, are
near what FL reaches there on IID MNIST and on FEMNIST. Updates are not masked, which changes no
result. Ratios are to FL with the same seed and share of clients, measured once. Beside the clusters
of the given threshold stand those of our default rule on the same merges (`rule_…`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import Cell, Row, Sheet, numbers, spread
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
        "target": 0.92,
    },
    ("mnist", "full"): {
        "clients": 100,
        "samples": 600,
        "model": "cnn-briggs",
        "lr": 0.1,
        "rounds": 50,
        "target": 0.99,
    },
    ("femnist", "cpu"): {
        "clients": 100,
        "samples": None,
        "model": "mlp-200",
        "lr": 0.03,
        "rounds": 30,
        "target": 0.5,
    },
    ("femnist", "full"): {
        "clients": 100,
        "samples": None,
        "model": "cnn-briggs",
        "lr": 0.1,
        "rounds": 50,
        "target": 0.8,
    },
}
SHARES, BEFORE = (0.1, 0.2, 0.5, 1.0), (1, 3, 5, 10)  # cf and n of Tables I to III
PAIRS = [
    (m, k)
    for m in ("cosine", "l2", "l1")
    for k in ("average", "complete", "single", "ward")
    if k != "ward" or m == "l2"
]
PAIRS_BEFORE, PAIRS_SHARE = 10, 0.2  # n and cf of Tables IV to VI
# of the merges' heights, where "best threshold" is looked for: 21 and 4 clusters of 100 clients
QUANTILES = (
    0.8,
    0.97,
)
FOUR = ("post_accuracy", "last_accuracy", "post_share", "last_share")
OWN = ("n", "metric", "linkage", "threshold", "paper")  # a cell's keys that plain FL does not have


def plain(data: str, name: str, scale: str, seed: int, cf: float) -> dict[str, Any]:
    """The cell of FL: all that shapes a run but the clustering."""
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
    data: str, name: str, scale: str, seeds: int, at: float, paper: Mapping[tuple[float, int], str]
) -> list[Cell]:
    """Cells of a table over cf and n: ward, l2 and the paper's threshold; each cf begins with its
    FL, the costly ones come last.
    """
    found: list[Cell] = []
    for cf in SHARES:
        for seed in range(seeds):
            found.append(fl := plain(data, name, scale, seed, cf))
            found += [
                {**fl, **clustering(n, "l2", "ward", at), "paper": paper[cf, n]} for n in BEFORE
            ]
    return found


def pairs(
    data: str, name: str, scale: str, seeds: int, at: str, paper: Mapping[tuple[str, str], str]
) -> list[Cell]:
    """Cells of a table over metric and linkage, at n = 10 and cf = 0.2."""
    found: list[Cell] = []
    for seed in range(seeds):
        found.append(fl := plain(data, name, scale, seed, PAIRS_SHARE))
        found += [
            {**fl, **clustering(PAIRS_BEFORE, metric, linkage, at), "paper": paper[metric, linkage]}
            for metric, linkage in PAIRS
        ]
    return found


def clustering(n: int, metric: str, linkage: str, at: float | str) -> dict[str, Any]:
    """The keys of FL+HC; `at` is a threshold, "gap" for our default rule, or "best" for the best of
    that and QUANTILES.
    """
    return {"method": "flhc", "n": n, "metric": metric, "linkage": linkage, "threshold": at}


def measured(sheet: Sheet) -> Callable[[Cell], dict[str, Any]]:
    """How a sheet's cells are measured: FL's curves, and FL+HC beside those of its FL."""

    def measure(cell: Cell) -> dict[str, Any]:
        if cell["method"] == "fl":
            lines = FedAvg(**_training(cell)).fit(_clients(cell), _settings(cell)).history_
            return {
                "accuracies": [line["accuracy"] for line in lines],
                "shares": [line["at_target"] for line in lines],
            }
        (fl,) = sheet.expect(
            [{name: value for name, value in {**cell, "method": "fl"}.items() if name not in OWN}]
        )
        found = _best(cell) if cell["threshold"] == "best" else _run(cell, cell["threshold"])
        return {
            **found,
            **_beside(found, numbers(fl["accuracies"]), numbers(fl["shares"]), cell["n"]),
        }

    return measure


def _beside(
    found: Mapping[str, Any], accuracies: Sequence[float], shares: Sequence[float], n: int
) -> dict[str, Any]:
    """FL's four figures in the same rounds, and the ratios to them."""
    fl = dict(zip(FOUR, (accuracies[n], accuracies[-1], shares[n], shares[-1]), strict=True))
    ratios = {f"{name}_x": f"{found[name] / fl[name]:.2f}" if fl[name] else "–" for name in FOUR}
    return {**{f"fl_{name}": value for name, value in fl.items()}, **ratios}


def _run(cell: Cell, at: float | str) -> dict[str, Any]:
    """One run of FL+HC: its four figures, its clusters, and those of our default rule."""
    federation = _clients(cell)
    method = FLHC(
        **_training(cell), pre_rounds=cell["n"], metric=cell["metric"], linkage=cell["linkage"]
    )
    lines = (
        method.set_params(threshold=None if at == "gap" else at)
        .fit(federation, _settings(cell))
        .history_
    )
    line = lines[cell["n"]]
    tree = np.array(line["merges"])
    ours = cut(tree, threshold(tree, gap_of(cell["metric"], cell["linkage"])))
    four = (line["accuracy"], lines[-1]["accuracy"], line["at_target"], lines[-1]["at_target"])
    return {
        **dict(zip(FOUR, four, strict=True)),
        "clusters": len(line["clustered"]),
        "singles": sum(len(own) == 1 for own in line["clustered"]),
        "ari": line.get("ari"),
        "cut_at": line["threshold"],
        "rule_clusters": 1 + max(ours),
        "rule_ari": None if federation.truth is None else agreement(ours, federation.truth)["ari"],
        "heights": np.quantile(tree[:, 2], QUANTILES),
    }


def _best(cell: Cell) -> dict[str, Any]:
    """The run with the best test accuracy in the last round: of our default rule's, whose figures
    stand beside it, and a few thresholds.
    """
    rule = _run(cell, "gap")
    runs, known = [rule], {rule["clusters"]}
    for at, quantile in zip(rule["heights"], QUANTILES, strict=True):
        expected = 1 + round((1 - quantile) * (cell["clients"] - 1))
        if expected not in known:
            runs.append(_run(cell, float(at)))
            known |= {expected, runs[-1]["clusters"]}
    best = max(runs, key=lambda run: run["last_accuracy"])
    return {**best, **{f"rule_{name}": rule[name] for name in FOUR}}


def _training(cell: Cell) -> dict[str, Any]:
    return {
        **{name: cell[name] for name in ("rounds", "model", "lr", "epochs", "batch_size")},
        "participation": cell["cf"],
        "mask": "none",
    }


def _settings(cell: Cell) -> Settings:
    return Settings(target=cell["target"], transcript="none")


def _clients(cell: Cell) -> Federation:
    return _dealt(*(cell[name] for name in ("data", "scenario", "clients", "samples", "seed")))


@lru_cache(maxsize=1)
def _dealt(data: str, name: str, clients: int, samples: int | None, seed: int) -> Federation:
    return Federation.simulate(
        data, scenario=scenario(name), clients=clients, samples=samples, seed=seed
    )


def report(rows: Sequence[Row], by: Sequence[str]) -> None:
    """A line for each setting: four figures in percent with ratios to FL, clusters and ARI, as
    means over seeds, and the paper's four.
    """
    own = [row for row in rows if row["method"] == "flhc"]
    extra = ("clusters", "ari", "rule_clusters", "rule_ari", "rule_last_accuracy")
    of = {name: spread(own, by, name) for name in (*FOUR, *(f"fl_{name}" for name in FOUR), *extra)}
    paper = {tuple(row[name] for name in by): row["paper"] for row in own}
    for key in of["last_accuracy"]:
        words = []
        for name in FOUR:
            mean, fl = of[name][key][0], of[f"fl_{name}"][key][0]
            words.append(f"{100 * mean:.1f} ({f'{mean / fl:.1f}x' if fl else '–'})")
        groups = ", ".join(f"{name} {of[name][key][0]:.3g}" for name in extra if key in of[name])
        print(f"{' '.join(key):18} {'  '.join(words)}; {groups}; paper: {paper[key]}")


def table(
    name: str, cells: Callable[[str, int], Sequence[Cell]], by: Sequence[str], options: Any
) -> Sheet:
    """Fill and report a sheet at the scale that was asked for; the cells of the paper's scale are
    listed in it either way.
    """
    sheet = Sheet(name)
    sheet.expect(cells("full", options.seeds))
    report(sheet.fill(cells(options.scale, options.seeds), measured(sheet), options.minutes), by)
    return sheet
