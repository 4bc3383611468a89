"""Measure how many rounds of FL the clustering round of FL+HC stands for, up to a cluster each.

python -m benchmarks.papers.flhc_rounds [--seeds 0 1 2] [--stored]

Briggs et al. 2020 say of pathological MNIST (Section III-B) that accuracy right after the
clustering in round 10 with l1 exceeds that of FL on IID data in round 50, "a vast reduction (5x) in
communication rounds", and the abstract that FL+HC needs fewer rounds. Thresholds and numbers of
clusters are not printed.

The rows of complete and ward linkage of Tables IV (pathological) and V (label-swap) are read from
their sheets, beside FL's accuracy after each round on the same clients, and on IID clients of the
same seed. `fl_rounds` is the first round after which FL has the accuracy that FL+HC has in the
eleventh, the one after the clustering, and `iid_rounds` that of FL on IID clients; it is empty
where none of 30 rounds is. `--stored` measures nothing. Otherwise merges of pathological clients
are cut into `CUTS` clusters, too: with one for each client every metric has the same models, which
are those of clients that train on alone. Rows are written as they are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.flhc_runs import (
    PAIRS_BEFORE,
    PAIRS_SHARE,
    clients_of,
    plain,
    run_settings,
    training_of,
)
from benchmarks.sheet import numbers
from benchmarks.table import PAPERS, Journal, read
from securecluster.clustering.agglomerative import between
from securecluster.protocols import FLHC

TABLES = {"pathological": "flhc_table4", "label-swap": "flhc_table5"}
PAIRS = (("cosine", "complete"), ("l2", "ward"), ("l1", "complete"))
CUTS = (100, 50)  # of 100 clients; the first leaves each alone
SEEDS = (0, 1, 2)
KEY = ("scenario", "seed", "metric", "linkage", "clusters")
COLUMNS = (*KEY, "post_accuracy", "last_accuracy", "fl_rounds", "iid_rounds", "iid_last")


def stored() -> Iterator[dict[str, Any]]:
    """Yield the rows of the tables' sheets."""
    for name, table in TABLES.items():
        for row in _cpu_rows(table):
            pair = (row["metric"], row["linkage"])
            if pair in PAIRS:
                accuracies = (float(row["post_accuracy"]), float(row["last_accuracy"]))
                yield _row(name, int(row["seed"]), pair, int(row["clusters"]), *accuracies)


def measured(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a seed's cuts.

    Args:
        seed: of clients and runs.
    """
    for metric, linkage in PAIRS:
        merges: Any = None
        for cut in CUTS:
            threshold = 0.0 if merges is None else between(merges, cut)
            cell = plain("mnist", "pathological", "cpu", seed, PAIRS_SHARE)
            method = FLHC(
                **training_of(cell), pre_rounds=PAIRS_BEFORE, metric=metric, linkage=linkage,
                clustering_batches="shuffled", threshold=threshold,
            )  # fmt: skip
            lines = method.fit(clients_of(cell), run_settings(cell)).history_
            # lines are numbered from zero, so this is the round after the first n
            line = lines[PAIRS_BEFORE]
            merges = np.array(line["merges"])
            accuracies = (line["accuracy"], lines[-1]["accuracy"])
            count = len(line["clustered"])
            yield _row("pathological", seed, (metric, linkage), count, *accuracies)


def _row(
    name: str, seed: int, pair: tuple[str, str], clusters: int, post: float, last: float
) -> dict[str, Any]:
    """Return a row of the table, with rounds of FL from the sheets."""
    iid = _curve("flhc_iid", seed)
    return {
        "scenario": name,
        "seed": seed,
        "metric": pair[0],
        "linkage": pair[1],
        "clusters": clusters,
        "post_accuracy": round(post, 4),
        "last_accuracy": round(last, 4),
        "fl_rounds": first_round(_curve(TABLES[name], seed), post),
        "iid_rounds": first_round(iid, post),
        "iid_last": iid[-1],
    }


def first_round(accuracies: Sequence[float], target: float) -> int | None:
    """Return the first round, from 1, after which accuracy is at least a target.

    Args:
        accuracies: after each round.
        target: an accuracy.
    """
    enough = [number for number, value in enumerate(accuracies, 1) if value >= target]
    return min(enough, default=None)


def _curve(sheet: str, seed: int) -> list[float]:
    """Return FL's accuracy after each round."""
    (row,) = [row for row in _cpu_rows(sheet) if row["method"] == "fl" and row["seed"] == str(seed)]
    return list(numbers(row["accuracies"]))


def _cpu_rows(sheet: str) -> list[dict[str, str]]:
    """Return the rows of a sheet at the scale for a CPU and the tables' share of clients."""
    rows = read(PAPERS / f"{sheet}.csv")
    return [row for row in rows if row["scale"] == "cpu" and float(row["cf"]) == PAIRS_SHARE]


def main(arguments: Sequence[str] | None = None) -> None:
    """Write what the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--stored", action="store_true")
    parser.add_argument("--out", type=Path, default=PAPERS / "flhc_rounds.csv")
    options = parser.parse_args(arguments)
    journal = Journal(options.out, KEY, COLUMNS)
    journal.append(row for row in stored() if journal.lacks(row))
    for seed in () if options.stored else options.seeds:
        cuts = {"scenario": "pathological", "seed": seed, "clusters": CUTS[-1]}
        pairs = [{**cuts, "metric": metric, "linkage": linkage} for metric, linkage in PAIRS]
        if any(map(journal.lacks, pairs)):
            journal.append(measured(seed))


if __name__ == "__main__":
    main()
