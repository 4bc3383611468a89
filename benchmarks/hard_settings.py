"""Settings on which earlier defaults overlooked clusters, or found false ones.

python -m securecluster.benchmarks.hard_settings [--seeds 2] [--minutes 600]
    [--settings mnist-swap-4x5-sizes fashion-dirichlet-3x7] [--name hard_settings]

The rows say nothing of the code that measured them. To measure an earlier version, copy this file,
robust.py and papers/sheet.py over its own and run there with `--name hard_settings_before` (8231a8a
knows no `recipe`: leave it out of `robust.clients_of` there). The report shows the rows of
benchmarks/results/hard_settings_before.csv beside ours where that file exists.
Network and training are each protocol's defaults unless a setting gives its own. Data are read
from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from securecluster import (
    Dirichlet,
    Federation,
    LabelPermutation,
    LabelSwap,
    Rotation,
)
from securecluster.app.registry import protocol_class
from securecluster.benchmarks.papers.sheet import Cell, Row, Sheet, spread
from securecluster.benchmarks.robust import Setting, clients_of
from securecluster.benchmarks.table import RESULTS
from securecluster.clustering.metrics import mean
from securecluster.errors import SecureClusterError
from securecluster.protocols import Settings

CLUSTERED = ("cfl", "flhc", "srfca")
AUTHORS_TRAINING = {
    "model": "cnn-ali",
    "lr": 0.1,
    "momentum": 0.9,
    "batch_size": 128,
    "epochs": 1,
    "rounds": 60,
}  # of CFL's published code, whose ConvNet has the layers of cnn-ali


@dataclass(frozen=True)
class Hard:
    """A setting, what is run on it, and with which training.

    Attributes:
        clients: its clients.
        protocols: run on it, beside FedAvg.
        training: hyper-parameters that are not left at their defaults; a protocol gets those it
            has.
    """

    clients: Setting
    protocols: tuple[str, ...] = CLUSTERED
    training: Mapping[str, Any] = field(default_factory=dict)


def _even(data: str, scenario: Any, sizes: tuple[int, ...], samples: int) -> Setting:
    """Return clients that all keep the `samples` that they are dealt."""
    return Setting("", "", data, scenario, sizes, (samples,), samples)


SETTINGS: dict[str, Hard] = {
    "mnist-permutation-8x3": Hard(_even("mnist", LabelPermutation(8), (3,) * 8, 100)),
    "digits-permutation-6x4": Hard(_even("digits", LabelPermutation(6), (4,) * 6, 40)),
    "digits-swap-4x5-36": Hard(_even("digits", LabelSwap(4), (5,) * 4, 36)),
    "digits-swap-4x5-20": Hard(_even("digits", LabelSwap(4), (5,) * 4, 20)),
    "mnist-swap-4x5-sizes": Hard(
        Setting("", "", "mnist", LabelSwap(4), (5,) * 4, (20, 50, 100, 200, 400), 400),
    ),
    "fashion-permutation-4x5-foreign": Hard(
        Setting("", "", "fashion_mnist", LabelPermutation(4), (5,) * 4, (100,), 100, foreign=0.4),
    ),
    "fashion-dirichlet-3x7": Hard(
        _even("fashion_mnist", Dirichlet(alpha=0.3, clusters=3), (7,) * 3, 100),
    ),
    "cifar10-permutation-2x5": Hard(
        _even("cifar10", LabelPermutation(2), (5, 5), 250),
        training={"model": "cnn-ali"},
    ),
    "mnist-swap-4x5-authors": Hard(
        _even("mnist", LabelSwap(4), (5,) * 4, 300),
        ("cfl",),
        AUTHORS_TRAINING,
    ),
    "mnist-rotation-4x5-authors": Hard(
        _even("mnist", Rotation(4), (5,) * 4, 300),
        ("cfl",),
        AUTHORS_TRAINING,
    ),
    "mnist-swap-4x5-one-step": Hard(
        _even("mnist", LabelSwap(4), (5,) * 4, 60),
        ("cfl",),
        {**AUTHORS_TRAINING, "model": "mlp-200", "rounds": 40},
    ),
}


def cells(seeds: int, settings: Sequence[str] = tuple(SETTINGS)) -> list[Cell]:
    """Return FedAvg and a setting's protocols, by setting and seed."""
    return [
        {"setting": name, "protocol": protocol, "seed": seed}
        for name in settings
        for seed in range(seeds)
        for protocol in ("fedavg", *SETTINGS[name].protocols)
    ]


@lru_cache(maxsize=1)  # the protocols of one setting and seed come one after the other
def _federation(name: str, seed: int) -> Federation:
    return clients_of(SETTINGS[name].clients, seed)


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol: outcome ("ok", or its error), ari, clusters, accuracy and its splits."""
    federation = _federation(cell["setting"], cell["seed"])
    protocol = protocol_class(cell["protocol"])()
    own = protocol.get_params()
    training = SETTINGS[cell["setting"]].training
    protocol.set_params(**{name: value for name, value in training.items() if name in own})
    try:
        fitted = protocol.fit(federation, Settings(transcript="none"))
    except SecureClusterError as error:
        return {"outcome": str(error)}
    known = fitted.agreement_ is not None and len(set(federation.truth or ())) > 1
    return {
        "outcome": "ok",
        "ari": fitted.agreement_["ari"] if known and fitted.agreement_ else None,
        "clusters": len(set(fitted.labels_.tolist())),
        "accuracy": mean(fitted.scores_),
        "splits": [line["round"] for line in fitted.history_ if line.get("splits")],
    }


def report(now: Sequence[Row], before: Sequence[Row]) -> list[str]:
    """Return a line a setting and protocol: ARI and accuracy, and before where it is known."""
    by = ["setting", "protocol"]
    ari, accuracy = spread(now, by, "ari"), spread(now, by, "accuracy")
    was_ari, was_accuracy = spread(before, by, "ari"), spread(before, by, "accuracy")
    lines = []
    for key, (value, _, _, seeds) in accuracy.items():
        line = f"{key[0]:32} {key[1]:7} ARI {_shown(ari.get(key))}  accuracy {value:.3f}"
        if key in was_accuracy:
            line += f"  before: ARI {_shown(was_ari.get(key))}  accuracy {was_accuracy[key][0]:.3f}"
        lines.append(f"{line}  ({seeds} seeds)")
    return lines


def _shown(found: tuple[float, float, float, int] | None) -> str:
    """Return the mean, and the lowest and highest in parentheses."""
    if found is None:
        return "  -               "
    middle, least, most, _ = found
    return f"{middle:5.2f} ({least:.2f}–{most:.2f})"


def _read(path: Path) -> list[Row]:
    """Return the rows of another sheet's file, none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        next(stream)  # the machine
        return list(csv.DictReader(stream))


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--minutes", type=float, default=600.0, help="no cell is started after")
    parser.add_argument("--name", default="hard_settings", help="of the CSV file")
    options = parser.parse_args(argv)
    sheet = Sheet(options.name, RESULTS)
    rows = sheet.fill(cells(options.seeds, options.settings), measure, options.minutes)
    print("\n".join(report(rows, _read(RESULTS / f"{options.name}_before.csv"))))
    return sheet.path


if __name__ == "__main__":
    print(main())
