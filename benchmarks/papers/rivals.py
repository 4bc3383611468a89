"""Compare SR-FCA with rivals that are tuned, and with as many steps, on rotated and inverted MNIST.

python -m benchmarks.papers.rivals [--seeds 0 1 2] [--settings inversion]

The settings are those of `srfca_mnist`'s small scale with 20 clients. Fine-tuning has six forms:
three rounds of tuning at the end of T, half of T, or T more rounds after T, each at the rate of
FedAvg and at a third of it. All are run on seed 100, and the best one of each scenario is run on
the other seeds. CFL has T rounds, and the 3 T that SR-FCA has. `steps` are the local steps that a
client's final model has had in a row. Rows are written as they are measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.papers.srfca_mnist import OWN
from benchmarks.papers.srfca_runs import OWN as OWN_OPTIONS
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS, UNRECORDED, Journal, read
from securecluster import Federation
from securecluster.clustering.metrics import mean
from securecluster.data.scenarios import scenario
from securecluster.protocols import CFL, SRFCA, ClusteringProtocol, FedAvg, FineTune, Local

CLIENTS, SAMPLES, BATCH = 20, 200, 20
TUNED_ON = 100
SEEDS = (0, 1, 2)
SHARES = ("3", "half", "T after T")
RATES = (1.0, 0.33)
KEY = ("scenario", "method", "share", "rate", "seed")
COLUMNS = (*KEY, "rounds", "steps", "ari", "accuracy")
Params = dict[str, Any]


@dataclass(frozen=True)
class Comparison:
    """Methods beside fine-tuning that is tuned, in settings.

    Args:
        name: of the file.
        settings: names of them.
        seeds: of the comparison.
        methods: beside fine-tuning.
        columns: of the file.
        measured: returns the row of one of `cells`.
    """

    name: str
    settings: Sequence[str]
    seeds: Sequence[int]
    methods: Sequence[str]
    columns: Sequence[str]
    measured: Callable[[Cell], Mapping[str, Any]]


def tuned(params: Params, rounds: int, share: str, rate: float) -> ClusteringProtocol:
    """Return FedAvg with fine-tuning in one of its forms."""
    own = {"3": 3, "half": rounds // 2, "T after T": rounds}[share]
    total = 2 * rounds if share == "T after T" else rounds
    params = {**params, "lr": params["lr"] * rate}
    return FineTune(**params, rounds=total, tune_rounds=own)


METHODS: dict[str, Callable[[Params, int], ClusteringProtocol]] = {
    "global": lambda params, rounds: FedAvg(**params, rounds=rounds),
    "local": lambda params, rounds: Local(**params, rounds=rounds),
    "cfl": lambda params, rounds: CFL(**params, rounds=rounds, tree=False),
    "cfl, 3 T": lambda params, rounds: CFL(**params, rounds=3 * rounds, tree=False),
    "srfca": lambda params, rounds: SRFCA(
        **params, rounds=rounds, local_rounds=rounds, **OWN_OPTIONS["srfca"]
    ),
}


def cells(
    settings: Sequence[str], seeds: Sequence[int], methods: Iterable[str], path: Path
) -> Iterator[Cell]:
    """Yield what is measured: first all forms of fine-tuning on a seed of their own.

    Args:
        settings: names of them.
        seeds: of the comparison.
        methods: beside fine-tuning.
        path: of the measurements, from which the best form is taken.
    """
    for name, share, rate in product(settings, SHARES, RATES):
        yield _cell(name, "finetune", TUNED_ON, share, rate)
    for seed, name in product(seeds, settings):
        best = chosen(path, name)
        yield _cell(name, "finetune", seed, best["share"], float(best["rate"]))
        for method in methods:
            yield _cell(name, method, seed)


def _cell(name: str, method: str, seed: int, share: str = "", rate: float = 1.0) -> Cell:
    """Return the key of a measurement."""
    return dict(zip(KEY, (name, method, share, rate, seed), strict=True))


def chosen(path: Path, name: str) -> dict[str, str]:
    """Return the row of the form of fine-tuning that is the most accurate on its own seed.

    Args:
        path: of the measurements.
        name: of the scenario.
    """
    rows = [row for row in read(path) if row["scenario"] == name and row["seed"] == str(TUNED_ON)]
    return max(rows, key=lambda row: float(row["accuracy"]))


def measured(cell: Cell) -> dict[str, Any]:
    """Return a cell with its accuracy.

    Args:
        cell: one of `cells`.
    """
    setting = OWN["cpu"][cell["scenario"]]
    federation = Federation.simulate(
        "mnist",
        scenario=scenario(cell["scenario"], setting["clusters"]),
        clients=CLIENTS,
        samples=SAMPLES,
        seed=cell["seed"],
    )
    # masks change no result
    params = {"model": "mlp-200", "batch_size": BATCH, "epochs": 1, "mask": "none"}
    params["lr"] = setting["lr"]
    rounds = setting["rounds"]
    if cell["method"] == "finetune":
        protocol = tuned(params, rounds, cell["share"], cell["rate"])
    else:
        protocol = METHODS[cell["method"]](params, rounds)
    fitted = protocol.fit(federation, UNRECORDED)
    assert fitted.agreement_ is not None
    return {
        **cell,
        "rounds": protocol.total_rounds,
        # REFINE starts anew from w_0, so an SR-FCA model has had the T rounds of the last one
        "steps": (rounds if cell["method"] == "srfca" else protocol.rounds) * SAMPLES // BATCH,
        "ari": fitted.agreement_["ari"],
        "accuracy": round(mean(fitted.scores_) or 0.0, 4),
    }


def fill(
    comparison: Comparison, description: str | None, arguments: Sequence[str] | None = None
) -> None:
    """Measure what a comparison's file does not have yet.

    Args:
        comparison: with the file.
        description: the script's docstring.
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(comparison.seeds))
    names = list(comparison.settings)
    parser.add_argument("--settings", nargs="+", default=names, choices=names)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{comparison.name}.csv")
    options = parser.parse_args(arguments)
    journal = Journal(options.out, KEY, comparison.columns)
    for cell in cells(options.settings, options.seeds, comparison.methods, options.out):
        if journal.lacks(cell):
            journal.append([comparison.measured(cell)])


COMPARISON = Comparison(
    "papers/rivals", tuple(OWN["cpu"]), SEEDS, tuple(METHODS), COLUMNS, measured
)

if __name__ == "__main__":
    fill(COMPARISON, __doc__)
