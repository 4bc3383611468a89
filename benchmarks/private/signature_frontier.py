"""Measure what a user gets of private signatures: the automatic kind, end to end, over ε.

python -m benchmarks.private.signature_frontier [--seeds 540 541] [--half 1] [--kinds auto]
python -m benchmarks.private.signature_frontier --summary

Whole runs of `signature` with its defaults and one round of training; ε at δ = 1e-5 is that of all
that a client releases before it, for single examples. Clients are dealt from one half of a data
set's training images. The constants were chosen on the other half (`--half 0`) and on seeds below
500. Each run is made with k told and with k found. Rows are written as they are measured, and a run
that was cut off goes on.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.private.signatures import noise_for, swapped_labels
from benchmarks.table import RESULTS, Journal, write
from securecluster import Federation
from securecluster.clustering.metrics import agreement
from securecluster.data import Iid
from securecluster.protocols import Signature
from securecluster.protocols.common.comparison.signature_collection import comparable

Labels = NDArray[np.int64]

HALF = 30_000  # images of a half
BOOTSTRAPS = 10_000
HELD_OUT = 20  # images of each client that are in no signature
UNEQUAL = (3, 6, 6, 6)
EPSILONS = (0.5, 1.0, 2.0, 4.0)
SEEDS = tuple(range(540, 560))
KEY = ("setting", "kind", "epsilon", "seed")
COLUMNS = (*KEY, "chosen", "ari", "exact", "found", "right", "ari_found")
KIND_OF_CALL = {
    "send_signature": "plain",
    "send_residuals": "residuals",
    "send_class_sums": "blocks",
}


@dataclass(frozen=True)
class Setting:
    """One kind of federation.

    Attributes:
        data: "mnist" or "fashion_mnist".
        shift: "swap" of two labels, "permutation" of all, "rotation" by quarter turns or "none".
        sizes: numbers of clients of each cluster.
        samples: n of each client.
        alpha: of each client's Dirichlet distribution of classes; 0 for equal shares.
    """

    data: str
    shift: str
    sizes: tuple[int, ...]
    samples: int
    alpha: float = 0.0


SETTINGS = {
    "swap": Setting("mnist", "swap", UNEQUAL, 300),
    "swap, fashion": Setting("fashion_mnist", "swap", UNEQUAL, 300),
    "rotation": Setting("mnist", "rotation", UNEQUAL, 300),
    "swap, alpha 1": Setting("mnist", "swap", UNEQUAL, 300, 1.0),
    "swap, alpha 1, fashion": Setting("fashion_mnist", "swap", UNEQUAL, 300, 1.0),
    "rotation, alpha 1": Setting("mnist", "rotation", UNEQUAL, 300, 1.0),
    "swap, alpha 0.3": Setting("mnist", "swap", UNEQUAL, 300, 0.3),
    "swap, 100 samples": Setting("mnist", "swap", UNEQUAL, 100),
    "swap, 100 samples, fashion": Setting("fashion_mnist", "swap", UNEQUAL, 100),
    "rotation, 100 samples": Setting("mnist", "rotation", UNEQUAL, 100),
    "8 permutations": Setting("mnist", "permutation", (3,) * 8, 300),
    "12 permutations": Setting("mnist", "permutation", (3,) * 12, 300),
    "12 permutations, alpha 1": Setting("mnist", "permutation", (3,) * 12, 300, 1.0),
    "one cluster": Setting("mnist", "none", (21,), 300),
    "one cluster, alpha 1": Setting("mnist", "none", (21,), 300, 1.0),
}


@lru_cache(maxsize=2)
def images(data: str, half: int) -> tuple[NDArray[np.float32], Labels]:
    """Return the images and labels of one half of a data set's training images.

    Args:
        data: name of the data set.
        half: 0 or 1.
    """
    halves = Federation.simulate(data, scenario=Iid(), clients=2, samples=HALF, seed=0)
    shard = halves.shards[half]
    return shard.x, shard.y


def dealt(setting: Setting, seed: int, half: int) -> Federation:
    """Return clients with samples of one half, without replacement as long as a class lasts.

    Args:
        setting: of the federation.
        seed: of the deal, of swaps and of the shares of classes.
        half: 0 or 1.
    """
    x, y = images(setting.data, half)
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.arange(len(setting.sizes)), setting.sizes)
    classes = 1 + int(y.max())
    pairs = draw.permutation(classes)
    permutations = [draw.permutation(classes) for _ in setting.sizes]
    decks = [_Deck(np.flatnonzero(y == label), draw) for label in range(classes)]
    clients = {}
    held_out = {}
    for i, cluster in enumerate(truth):
        shares = np.full(classes, 1 / classes)
        if setting.alpha:
            shares = draw.dirichlet(np.full(classes, setting.alpha))
        counts = draw.multinomial(setting.samples + HELD_OUT, shares)
        rows = np.concatenate([deck.deal(n) for deck, n in zip(decks, counts, strict=True)])
        rows = draw.permutation(rows)
        inputs, labels = x[rows], y[rows]
        if setting.shift == "swap":
            labels = swapped_labels(pairs, int(cluster))[labels]
        elif setting.shift == "permutation":
            labels = permutations[cluster][labels]
        elif setting.shift == "rotation":
            inputs = np.rot90(inputs, int(cluster), axes=(-2, -1)).copy()
        name = f"client{i:02d}"
        labels = np.asarray(labels, dtype=np.int64)
        clients[name] = (inputs[HELD_OUT:], labels[HELD_OUT:])
        held_out[name] = (inputs[:HELD_OUT], labels[:HELD_OUT])
    return Federation.from_arrays(
        clients,
        test=held_out,
        classes=classes,
        seed=seed,
        truth={name: int(cluster) for name, cluster in zip(clients, truth, strict=True)},
    )


class _Deck:
    """Images of one class in random order, which is shuffled again when all are dealt."""

    def __init__(self, rows: Labels, draw: np.random.Generator) -> None:
        self._rows = rows
        self._draw = draw
        self._left: list[int] = []

    def deal(self, count: int) -> Labels:
        """Return the next images.

        Args:
            count: how many.
        """
        while len(self._left) < count:
            self._left += self._draw.permutation(self._rows).tolist()
        dealt_now, self._left = self._left[:count], self._left[count:]
        return np.asarray(dealt_now, dtype=np.int64)


def measured(
    name: str, release: str, epsilon: float, seed: int, federation: Federation, centre: float | None
) -> dict[str, Any]:
    """Return what one federation's clients are found to be, with k told and with k found.

    Args:
        name: of the setting.
        release: `signature_blocks`.
        epsilon: ε of a client's signature.
        seed: of the federation.
        federation: its clients.
        centre: `signature_centre`.
    """
    truth = list(federation.truth or ())
    clusters = len(set(truth))
    params: dict[str, Any] = {
        "rounds": 1,
        "epochs": 1,
        "model": "linear",
        "signature_blocks": release,
    }
    params |= {"signature_noise": noise_for(epsilon), "signature_centre": centre}
    fitted = Signature(k=clusters, **params).fit(federation)
    rows = fitted.state_.signatures.rows
    labels = comparable(rows, rows).clusters(None, seed)
    calls = fitted.bytes_["by_message"]
    chosen = next(release for call, release in KIND_OF_CALL.items() if call in calls)
    ari = agreement(fitted.labels_.tolist(), truth)["ari"]
    return {
        "setting": name,
        "kind": release,
        "epsilon": epsilon,
        "seed": seed,
        "chosen": chosen,
        "ari": round(ari, 4),
        "exact": ari == 1,
        "found": len(set(labels)),
        "right": len(set(labels)) == clusters,
        "ari_found": round(agreement(labels, truth)["ari"], 4),
    }


def cells(
    seeds: Sequence[int], kinds: Sequence[str], names: Sequence[str], epsilons: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Yield what is measured.

    Args:
        seeds: of the federations.
        kinds: values of `signature_blocks`.
        names: of settings.
        epsilons: of a client's signature.
    """
    for seed in seeds:
        for name in names:
            for epsilon in epsilons:
                for release in kinds:
                    yield {"setting": name, "kind": release, "epsilon": epsilon, "seed": seed}


def summary(path: Path) -> Iterator[dict[str, Any]]:
    """Yield one row for each setting, kind and ε, over its federations.

    Args:
        path: of the measurements.
    """
    with path.open(encoding="utf-8") as file:
        lines = (line for line in file if not line.startswith("#"))
        rows = list(csv.DictReader(lines))
    for name in SETTINGS:
        of_setting = [row for row in rows if row["setting"] == name]
        for release, epsilon in sorted({(row["kind"], row["epsilon"]) for row in of_setting}):
            runs = [
                row for row in of_setting if (row["kind"], row["epsilon"]) == (release, epsilon)
            ]
            scores = np.array([float(row["ari"]) for row in runs])
            draw = np.random.default_rng(0)
            drawn = draw.choice(scores, (BOOTSTRAPS, len(scores))).mean(1)
            low, high = np.quantile(drawn, (0.025, 0.975))
            yield {
                "setting": name,
                "kind": release,
                "epsilon": epsilon,
                "runs": len(runs),
                "ari": round(float(scores.mean()), 4),
                "low": round(float(low), 4),
                "high": round(float(high), 4),
                "exact": sum(row["exact"] == "True" for row in runs),
                "right": sum(row["right"] == "True" for row in runs),
                "ari_found": round(float(np.mean([float(row["ari_found"]) for row in runs])), 4),
            }


def main(arguments: list[str] | None = None) -> None:
    """Measure what the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--half", type=int, choices=(0, 1), default=1)
    parser.add_argument("--kinds", nargs="+", default=["auto"])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument(
        "--centre", type=float, help="declared mean number; the clients' own private one without"
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "signature_frontier.csv")
    parser.add_argument("--summary", action="store_true", help="write means and intervals")
    options = parser.parse_args(arguments)
    if options.summary:
        print(write("signature_frontier_summary", list(summary(options.out))))
        return
    journal = Journal(options.out, KEY, COLUMNS)
    for cell in cells(options.seeds, options.kinds, options.settings, options.epsilons):
        if journal.lacks(cell):
            federation = dealt(SETTINGS[cell["setting"]], cell["seed"], options.half)
            row = measured(
                cell["setting"],
                cell["kind"],
                cell["epsilon"],
                cell["seed"],
                federation,
                options.centre,
            )
            journal.append([row])


if __name__ == "__main__":
    main()
