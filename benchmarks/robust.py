"""Every protocol at its defaults on twenty settings that no default was chosen on.

python -m securecluster.benchmarks.robust [--seeds 3] [--half first|second] [--protocols cfl,ifca]
    [--settings digits-tasks-2x7] [--minutes 600] [--name robust] [--markdown]

The settings come in two halves that each cover permuted and swapped labels, shares of labels,
turned images, combinations, mixtures and clients of one distribution. The first half may be looked
at while defaults are chosen; the second is for one look at the end. Every
hyper-parameter, the network too, is the protocol's default but k, which protocols that ask for it
are told: the true number of clusters, and 3 of IID clients. NSIM runs on trajectories only, since
its server makes synthetic users of the data's format.

The rows say nothing of the code that measured them: after a change give the sheet another name
(`--name`), which becomes benchmarks/results/NAME.csv. Data are read from SECURECLUSTER_DATA or the
hub.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster import (
    Dirichlet,
    Federation,
    Iid,
    Inversion,
    LabelPermutation,
    LabelSwap,
    Natural,
    Pathological,
    Rotation,
    Tasks,
)
from securecluster.app.registry import protocol_class
from securecluster.benchmarks.papers.sheet import Cell, Row, Sheet, spread
from securecluster.benchmarks.table import RESULTS
from securecluster.clustering.metrics import mean
from securecluster.data import Scenario, Shard, Topics
from securecluster.errors import SecureClusterError
from securecluster.protocols import Settings

BASELINES = ("fedavg", "finetune", "local")
CLUSTERED = ("cfl", "flhc", "srfca", "oneshot", "ifca", "local-kmeans")
# protocols whose server knows the format of trajectories and of no other data
TRAJECTORIES = ("nsim",)
NAMES = (*BASELINES, *CLUSTERED, *TRAJECTORIES)

Spread = tuple[float, float, float, int]  # mean, least, most and number of values

FIRST_SEED = 1700  # no other table has these seeds
MARGIN = 0.01  # of accuracy; of perplexity and position error, relative to FedAvg's


@dataclass(frozen=True)
class Setting:
    """Clients with known true clusters.

    Attributes:
        about: what is special about it, in words.
        half: "first" or "second".
        data: a data set's name.
        scenario: how clusters differ.
        sizes: clients in each true cluster.
        samples: training samples of the first, second, ... client of each cluster, over and over.
        dealt: training samples dealt to a client before it keeps its first `samples` of them. A
            quarter as many are held out, so that clients with few samples are tested on enough.
        foreign: share of each client's samples, trained on and held out, that were swapped for
            samples of clients of the other clusters.
        k: clusters told; None is the true number.
    """

    about: str
    half: str
    data: str
    scenario: Scenario
    sizes: tuple[int, ...]
    samples: tuple[int, ...]
    dealt: int
    foreign: float = 0.0
    k: int | None = None

    @property
    def told(self) -> int:
        """The number of clusters that protocols are told which ask for it."""
        return len(self.sizes) if self.k is None else self.k


SETTINGS: dict[str, Setting] = {
    "mnist-permutation-12x3": Setting(
        "twelve small clusters",
        "first", "mnist", LabelPermutation(12), (3,) * 12, (100,), 200,
    ),
    "fashion-swap-9-5-2": Setting(
        "swapped labels, clusters of unequal size, 30 to 300 samples a client",
        "first", "fashion_mnist", LabelSwap(3), (9, 5, 2), (100, 30, 300), 400,
    ),
    "digits-pathological-3x4": Setting(
        "three labels a client, small images",
        "first", "digits", Pathological(labels=3, clusters=3), (4,) * 3, (60,), 88,
    ),
    "cifar10-dirichlet-2x5": Setting(
        "two sets of label shares on colour images",
        "first", "cifar10", Dirichlet(alpha=0.2, clusters=2), (5, 5), (150,), 320,
    ),
    "mnist-rotation-5-2": Setting(
        "seven clients, turned images, 60 to 600 samples a client",
        "first", "mnist", Rotation(2), (5, 2), (600, 60, 240), 800,
    ),
    "fashion-nested-4x6": Setting(
        "swapped labels within negatives and images",
        "first", "fashion_mnist", LabelSwap(2) + Inversion(), (6,) * 4, (120,), 320,
    ),
    "fashion-mixture-25-5x4": Setting(
        "permuted labels, a quarter of each client's samples of other clusters",
        "first", "fashion_mnist", LabelPermutation(5), (4,) * 5, (120,), 400, foreign=0.25,
    ),
    "mnist-iid-100": Setting(
        "a hundred clients of one distribution",
        "first", "mnist", Iid(), (100,), (40,), 80, k=3,
    ),
    "femnist-writers-permutation-12-8": Setting(
        "writers, permuted labels, clusters of unequal size",
        "first", "femnist", Natural() + LabelPermutation(2), (12, 8), (120,), 120,
    ),
    "mobility-topics-2x5": Setting(
        "trajectories, of which the groups by home and work area are only a reference",
        "first", "mobility", Topics(clusters=2), (5, 5), (60,), 160,
    ),
    "fashion-permutation-9x4": Setting(
        "nine clusters",
        "second", "fashion_mnist", LabelPermutation(9), (4,) * 9, (90,), 200,
    ),
    "mnist-swap-40-30-20-10": Setting(
        "a hundred clients, clusters of unequal size, 20 to 60 samples a client",
        "second", "mnist", LabelSwap(4), (40, 30, 20, 10), (20, 40, 60), 80,
    ),
    "fashion-dirichlet-4x4": Setting(
        "four sets of label shares",
        "second", "fashion_mnist", Dirichlet(alpha=0.2, clusters=4), (4,) * 4, (200,), 400,
    ),
    "cifar10-permutation-3x3": Setting(
        "permuted labels on colour images",
        "second", "cifar10", LabelPermutation(3), (3,) * 3, (160,), 400,
    ),
    "fashion-rotation-7-3-2": Setting(
        "turned images, clusters of unequal size, 40 to 400 samples a client",
        "second", "fashion_mnist", Rotation(3), (7, 3, 2), (120, 40, 400), 600,
    ),
    "digits-tasks-2x7": Setting(
        "two tasks of five labels, small images",
        "second", "digits", Tasks(), (7, 7), (80,), 80,
    ),
    "mobility-topics-7-3": Setting(
        "trajectories, groups (a reference) of unequal size, 30 or 90 samples a client",
        "second", "mobility", Topics(clusters=2), (7, 3), (30, 90), 160,
    ),
    "mnist-mixture-40-3x6": Setting(
        "permuted labels, 40 % of each client's samples of other clusters",
        "second", "mnist", LabelPermutation(3), (6,) * 3, (150,), 400, foreign=0.4,
    ),
    "fashion-iid-9": Setting(
        "clients of one distribution, 20 to 600 samples a client",
        "second", "fashion_mnist", Iid(), (9,), (20, 60, 180, 600), 800, k=3,
    ),
    "femnist-writers-nested-4x5": Setting(
        "writers, permuted labels within turned and upright images",
        "second", "femnist", Natural() + LabelPermutation(2) + Rotation(2), (5,) * 4, (120,), 120,
    ),
}  # fmt: skip


@lru_cache(maxsize=1)  # the protocols of one setting and seed come one after the other
def federation(name: str, seed: int) -> Federation:
    """Return the clients of a setting, in the order of their true clusters.

    Args:
        name: one of `SETTINGS`.
        seed: of every draw, here and in the runs on this federation.
    """
    return clients_of(SETTINGS[name], seed)


def clients_of(setting: Setting, seed: int) -> Federation:
    """Return a setting's clients, in the order of their true clusters."""
    clusters = len(setting.sizes)
    dealt = Federation.simulate(
        setting.data,
        scenario=setting.scenario,
        clients=clusters * max(setting.sizes),
        samples=setting.dealt,
        seed=seed,
    )
    made = dealt.select(_chosen(dealt, setting.sizes))
    shards = list(made.shards)
    if setting.foreign:
        shards = _mixed(shards, clusters, setting.foreign)
    places = [place for size in setting.sizes for place in range(size)]
    kept = [setting.samples[place % len(setting.samples)] for place in places]
    shards = [_shortened(shard, n) for shard, n in zip(shards, kept, strict=True)]
    return replace(made, shards=tuple(shards), recipe=None)


def _chosen(dealt: Federation, sizes: Sequence[int]) -> list[int]:
    """Return the first `sizes[c]` clients of each true cluster c."""
    assert dealt.truth is not None
    truth = np.array(dealt.truth)
    members = [np.flatnonzero(truth == c)[:size].tolist() for c, size in enumerate(sizes)]
    return [client for cluster in members for client in cluster]


def _mixed(shards: Sequence[Shard], clusters: int, share: float) -> list[Shard]:
    """Return shards that exchanged a share of their samples across clusters, none held twice.

    Args:
        shards: in the order of their clusters, equally many in each and all of one length.
        clusters: how many there are; every other cluster gives the same number of samples.
        share: of the samples that come from other clusters.
    """
    x, y = _exchanged([s.x for s in shards], [s.y for s in shards], clusters, share)
    x_test, y_test = _exchanged(
        [s.x_test for s in shards],
        [s.y_test for s in shards],
        clusters,
        share,
    )
    return [Shard(*parts) for parts in zip(x, y, x_test, y_test, strict=True)]


def _exchanged(
    x: Sequence[NDArray[Any]],
    y: Sequence[NDArray[Any]],
    clusters: int,
    share: float,
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Return samples and labels of which evenly spaced ones were passed on to other clusters."""
    size = len(x) // clusters
    xs, ys = np.stack(x), np.stack(y)
    n = ys.shape[1]
    leaving = np.linspace(0, n - 1, round(share * n)).round().astype(int)
    for shift in range(1, clusters):
        rows = leaving[shift - 1 :: clusters - 1]
        xs[:, rows] = np.roll(xs[:, rows], shift * size, axis=0)
        ys[:, rows] = np.roll(ys[:, rows], shift * size, axis=0)
    return list(xs), list(ys)


def _shortened(shard: Shard, samples: int) -> Shard:
    """Return the shard with its first training samples only."""
    return replace(shard, x=shard.x[:samples], y=shard.y[:samples])


def cells(
    seeds: int,
    settings: Iterable[str] = tuple(SETTINGS),
    protocols: Iterable[str] = NAMES,
) -> list[Cell]:
    """Return protocols by settings by seeds; of `TRAJECTORIES` those on trajectories only."""
    names, wanted = tuple(settings), tuple(protocols)
    return [
        _cell(name, protocol, FIRST_SEED + k)
        for k in range(seeds)
        for name in names
        for protocol in wanted
        if protocol not in TRAJECTORIES or SETTINGS[name].data == "mobility"
    ]


def _cell(name: str, protocol: str, seed: int) -> Cell:
    """Return everything that shapes a run."""
    setting = SETTINGS[name]
    return {
        "half": setting.half,
        "setting": name,
        "data": setting.data,
        "scenario": repr(setting.scenario),
        "sizes": setting.sizes,
        "samples": setting.samples,
        "dealt": setting.dealt,
        "foreign": setting.foreign,
        "protocol": protocol,
        "k": setting.told if _takes_k(protocol) else None,
        "seed": seed,
    }


def _takes_k(protocol: str) -> bool:
    return "k" in protocol_class(protocol)().get_params()


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol; a run that ends with an error has its sentence as outcome.

    Returns:
        outcome ("ok", or the error), ari, clusters, metric, score (mean over clients), worst
        client, bytes (up and down) and fit_seconds.
    """
    clients = federation(cell["setting"], cell["seed"])
    given = {} if cell["k"] is None else {"k": cell["k"]}
    protocol = protocol_class(cell["protocol"])(**given)
    try:
        fitted = protocol.fit(clients, Settings(transcript="none"))
    except SecureClusterError as error:
        return {"outcome": str(error)}
    assert fitted.agreement_ is not None
    higher = fitted.metric_ == "accuracy"
    return {
        "outcome": "ok",
        "ari": fitted.agreement_["ari"],
        "clusters": len(set(fitted.labels_.tolist())),
        "metric": fitted.metric_,
        "score": mean(fitted.scores_),
        "worst": float(np.nanmin(fitted.scores_) if higher else np.nanmax(fitted.scores_)),
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
        "fit_seconds": fitted.seconds_,
    }


def gains(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return how much better than FedAvg a protocol is, by setting and protocol.

    The mean over the seeds that both were run with: of accuracy the difference, of perplexity and
    position error, where less is better, the share of FedAvg's that was saved.
    """
    base = {(row["setting"], row["seed"]): row for row in rows if row["protocol"] == "fedavg"}
    found: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        fedavg = base.get((row["setting"], row["seed"]))
        if fedavg is None or not row.get("score") or not fedavg.get("score"):
            continue
        own, reference = float(row["score"]), float(fedavg["score"])
        gain = own - reference if row["metric"] == "accuracy" else 1 - own / reference
        found.setdefault((row["setting"], row["protocol"]), []).append(gain)
    return {key: float(np.mean(values)) for key, values in found.items()}


def report(rows: Sequence[Row]) -> list[str]:
    """Return the table as lines: a line a setting and protocol, then the cells below FedAvg."""
    by = ["setting", "protocol"]
    gained, ari, score = gains(rows), spread(rows, by, "ari"), spread(rows, by, "score")
    worst = spread(rows, by, "worst")
    lines = []
    for key, (value, _, _, seeds) in score.items():
        gain = f"{gained[key]:+.3f}" if key in gained else "-"
        lines.append(
            f"{key[0]:34} {key[1]:12} ARI {ari[key][0]:5.2f}  score {value:8.3f}  "
            f"worst {worst[key][0]:8.3f}  beside FedAvg {gain}  ({seeds} seeds)"
        )
    lines += _failures(rows)
    measured = {key: gain for key, gain in gained.items() if key[1] != "fedavg"}
    below = {key: gain for key, gain in measured.items() if gain < -MARGIN}
    lines.append(f"{len(below)} of {len(measured)} cells end more than {MARGIN} below FedAvg")
    for protocol in dict.fromkeys(key[1] for key in measured):
        own = [f"{key[0]} {gain:+.3f}" for key, gain in below.items() if key[1] == protocol]
        total = sum(key[1] == protocol for key in measured)
        lines.append(f"  {protocol}: {len(own)} of {total}" + "".join(f"; {text}" for text in own))
    return lines


def _failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each run that ended with an error."""
    failed = [row for row in rows if row.get("outcome", "ok") not in ("ok", "")]
    return [
        f"{row['setting']} {row['protocol']} seed {row['seed']}: {row['outcome']}"
        for row in failed
    ]  # fmt: skip


def markdown(rows: Sequence[Row], protocols: Sequence[str]) -> list[str]:
    """Return a table of settings by protocols: the mean score, and the mean ARI in parentheses.

    Protocols without clusters of their own have no ARI. Scores are accuracies, or metres.
    """
    by = ["setting", "protocol"]
    score, ari = spread(rows, by, "score"), spread(rows, by, "ari")
    lines = [f"| setting | {' | '.join(f'`{name}`' for name in protocols)} |"]
    lines.append("| --- " * (1 + len(protocols)) + "|")
    for setting in dict.fromkeys(row["setting"] for row in rows):
        found = []
        for name in protocols:
            key = (setting, name)
            clusters = None if name in BASELINES else ari.get(key)
            found.append(_cell_text(score.get(key), clusters))
        lines.append(f"| {setting} | {' | '.join(found)} |")
    return lines


def _cell_text(score: Spread | None, ari: Spread | None) -> str:
    if score is None:
        return "–"
    mean_score = score[0]
    shown = f"{mean_score:.3f}" if mean_score <= 1 else f"{mean_score:,.0f} m"
    return shown if ari is None else f"{shown} ({ari[0]:.2f})"


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def chosen(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options, with `settings` and `protocols` as lists of names."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--half", choices=("first", "second"), help="both where it is left out")
    parser.add_argument("--protocols", type=_names, default=list(NAMES), help=", ".join(NAMES))
    parser.add_argument("--settings", type=_names, default=list(SETTINGS), help="all by default")
    parser.add_argument("--minutes", type=float, default=600.0, help="no cell is started after")
    parser.add_argument("--name", default="robust", help="of the CSV file, robust by default")
    parser.add_argument("--markdown", action="store_true", help="print a table of means")
    found = parser.parse_args(argv)
    if found.seeds < 1 or not found.minutes >= 0:
        parser.error("--seeds is at least 1, and --minutes at least 0")
    for what, known in (("protocols", NAMES), ("settings", tuple(SETTINGS))):
        unknown = [name for name in getattr(found, what) if name not in known]
        if unknown:
            parser.error(f"--{what} has no {unknown[0]}: choose from {', '.join(known)}")
    halves = ("first", "second") if found.half is None else (found.half,)
    found.settings = [name for name in found.settings if SETTINGS[name].half in halves]
    return found


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    options = chosen(argv)
    sheet = Sheet(options.name, RESULTS)
    wanted = cells(options.seeds, options.settings, options.protocols)
    rows = sheet.fill(wanted, measure, options.minutes)
    print("\n".join(markdown(rows, options.protocols) if options.markdown else report(rows)))
    return sheet.path


if __name__ == "__main__":
    print(main())
