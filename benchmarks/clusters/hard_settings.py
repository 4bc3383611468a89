"""Run the protocols on settings where earlier defaults overlooked clusters or found false ones.

python -m benchmarks.clusters.hard_settings [--seeds 2] [--minutes 600]
    [--settings mnist-swap-4x5-sizes fashion-dirichlet-3x7] [--name hard_settings]

Network and training are each protocol's defaults unless a setting has others. Data are read from
SECURECLUSTER_DATA or the hub.

The rows do not say which version of the code measured them. To measure an earlier version, copy
this file, robust.py and sheet.py over its files and run there with `--name
hard_settings_before` (version 8231a8a has no `recipe`: leave it out of `robust.clients_of` there).
Where benchmarks/results/hard_settings_before.csv exists, the report shows its rows beside the
current ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from benchmarks.clusters.robust import clients_of
from benchmarks.clusters.robust_settings import Setting
from benchmarks.grid import Grid, parser_of, read_options
from benchmarks.sheet import Cell, Row, Spread, spread
from benchmarks.table import RESULTS, UNRECORDED, read
from securecluster import Dirichlet, Federation, LabelPermutation, LabelSwap, Rotation
from securecluster.clustering.metrics import mean
from securecluster.errors import SecureClusterError
from securecluster.protocols.registry import protocol_class

CLUSTERED = ("cfl", "flhc", "srfca")

# of CFL's published code, whose ConvNet has the layers of cnn-ali
AUTHORS_TRAINING = {
    "model": "cnn-ali",
    "lr": 0.1,
    "momentum": 0.9,
    "batch_size": 128,
    "epochs": 1,
    "rounds": 60,
}


@dataclass(frozen=True)
class Hard:
    """A setting with the protocols that run on it, and their training.

    Attributes:
        clients: of the setting.
        protocols: names of those that run on it, beside FedAvg.
        training: hyper-parameters that are not left at their defaults; each protocol gets those
            that it has.
    """

    clients: Setting
    protocols: tuple[str, ...] = CLUSTERED
    training: Mapping[str, Any] = field(default_factory=dict)


def _even(data: str, scenario: Any, sizes: tuple[int, ...], samples: int) -> Setting:
    """Return clients that keep all samples that they are dealt.

    Args:
        data: a data set's name.
        scenario: how clusters differ.
        sizes: clients in each true cluster.
        samples: training samples of each client.
    """
    return Setting(
        about="",
        half="",
        data=data,
        scenario=scenario,
        sizes=sizes,
        samples=(samples,),
        dealt=samples,
    )


SETTINGS: dict[str, Hard] = {
    "mnist-permutation-8x3": Hard(_even("mnist", LabelPermutation(8), (3,) * 8, 100)),
    "digits-permutation-6x4": Hard(_even("digits", LabelPermutation(6), (4,) * 6, 40)),
    "digits-swap-4x5-36": Hard(_even("digits", LabelSwap(4), (5,) * 4, 36)),
    "digits-swap-4x5-20": Hard(_even("digits", LabelSwap(4), (5,) * 4, 20)),
    "mnist-swap-4x5-sizes": Hard(
        Setting(
            about="",
            half="",
            data="mnist",
            scenario=LabelSwap(4),
            sizes=(5,) * 4,
            samples=(20, 50, 100, 200, 400),
            dealt=400,
        )
    ),
    "fashion-permutation-4x5-foreign": Hard(
        Setting(
            about="",
            half="",
            data="fashion_mnist",
            scenario=LabelPermutation(4),
            sizes=(5,) * 4,
            samples=(100,),
            dealt=100,
            foreign=0.4,
        )
    ),
    "fashion-dirichlet-3x7": Hard(
        _even("fashion_mnist", Dirichlet(alpha=0.3, clusters=3), (7,) * 3, 100)
    ),
    "cifar10-permutation-2x5": Hard(
        _even("cifar10", LabelPermutation(2), (5, 5), 250), training={"model": "cnn-ali"}
    ),
    "mnist-swap-4x5-authors": Hard(
        _even("mnist", LabelSwap(4), (5,) * 4, 300), ("cfl",), AUTHORS_TRAINING
    ),
    "mnist-rotation-4x5-authors": Hard(
        _even("mnist", Rotation(4), (5,) * 4, 300), ("cfl",), AUTHORS_TRAINING
    ),
    # 60 samples are one batch of at most 128: a local epoch is a single step
    "mnist-swap-4x5-one-step": Hard(
        _even("mnist", LabelSwap(4), (5,) * 4, 60),
        ("cfl",),
        {**AUTHORS_TRAINING, "model": "mlp-200", "rounds": 40},
    ),
}


def cells(seeds: int, settings: Sequence[str] = tuple(SETTINGS)) -> list[Cell]:
    """Return FedAvg and a setting's protocols, by setting and seed.

    Args:
        seeds: how many, from 0 on.
        settings: names among `SETTINGS`.
    """
    grid: list[Cell] = []
    for name in settings:
        for seed in range(seeds):
            for protocol in ("fedavg", *SETTINGS[name].protocols):
                grid.append({"setting": name, "protocol": protocol, "seed": seed})
    return grid


# one entry is enough: the protocols of one setting and seed are measured in succession
@lru_cache(maxsize=1)
def _federation(name: str, seed: int) -> Federation:
    return clients_of(SETTINGS[name].clients, seed)


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol; a run that ends with an error has its sentence as outcome.

    Args:
        cell: one of `cells`.

    Returns:
        outcome ("ok", or the error), ari, clusters, accuracy (mean over clients) and the rounds of
        splits.
    """
    federation = _federation(cell["setting"], cell["seed"])
    protocol = protocol_class(cell["protocol"])()
    defaults = protocol.get_params()
    training = SETTINGS[cell["setting"]].training
    params = {name: value for name, value in training.items() if name in defaults}
    protocol.set_params(**params)
    try:
        fitted = protocol.fit(federation, UNRECORDED)
    except SecureClusterError as error:
        return {"outcome": str(error)}
    ari = None
    # ARI compares clusters: it is left empty where all clients are of one true cluster
    if fitted.agreement_ and len(set(federation.truth or ())) > 1:
        ari = fitted.agreement_["ari"]
    return {
        "outcome": "ok",
        "ari": ari,
        "clusters": len(set(fitted.labels_.tolist())),
        "accuracy": mean(fitted.scores_),
        "splits": [line["round"] for line in fitted.history_ if line.get("splits")],
    }


def report(now: Sequence[Row], before: Sequence[Row]) -> list[str]:
    """Return a line for each setting and protocol: ARI and accuracy, now and before.

    Args:
        now: rows of this version.
        before: rows of an earlier version; lines without such a row leave the comparison out.
    """
    by = ["setting", "protocol"]
    ari = spread(now, by, "ari")
    accuracy = spread(now, by, "accuracy")
    earlier_ari = spread(before, by, "ari")
    earlier_accuracy = spread(before, by, "accuracy")
    lines = []
    for key, (mean_accuracy, _, _, seeds) in accuracy.items():
        setting, protocol = key
        ari_text = _shown(ari.get(key))
        result = f"ARI {ari_text}  accuracy {mean_accuracy:.3f}"
        line = f"{setting:32} {protocol:7} {result}"
        if key in earlier_accuracy:
            ari_text = _shown(earlier_ari.get(key))
            mean_accuracy = earlier_accuracy[key][0]
            line += f"  before: ARI {ari_text}  accuracy {mean_accuracy:.3f}"
        lines.append(f"{line}  ({seeds} seeds)")
    return lines


def _shown(values: Spread | None) -> str:
    """Return the mean, and the lowest and highest value in parentheses, of a fixed width."""
    if values is None:
        return "  -               "
    middle, lowest, highest, _ = values
    return f"{middle:5.2f} ({lowest:.2f}–{highest:.2f})"


def _read(path: Path) -> list[Row]:
    """Return the rows of another sheet's file; none where there is no such file."""
    if not path.exists():
        return []
    return read(path)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    parser = parser_of(__doc__, seeds=2, minutes=600.0)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--name", default="hard_settings", help="of the CSV file")
    options = read_options(parser, argv)
    earlier_rows = _read(RESULTS / f"{options.name}_before.csv")
    grid = Grid(
        __doc__,
        options.name,
        lambda scale, seeds: cells(seeds, options.settings),
        measure,
        folder=RESULTS,
        report=lambda rows: print(*report(rows, earlier_rows), sep="\n"),
    )
    return grid.run(options)


if __name__ == "__main__":
    print(main())
