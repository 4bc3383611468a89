"""Every protocol at its defaults on twenty settings, and on twenty-seven everyday ones.

python -m benchmarks.clusters.robust [--seeds 3] [--half first|second] [--protocols cfl,ifca]
    [--settings digits-tasks-2x7|everyday] [--minutes 600] [--name robust] [--markdown]

The settings come in two halves that each cover permuted and swapped labels, shares of labels,
turned images, combinations, mixtures and clients of one distribution. The first half may be looked
at while defaults are chosen; the second is for one look at the end. Every hyper-parameter, the
network too, is the protocol's default but k, which protocols that ask for it are told: the true
number of clusters, and 3 of IID clients. `signature` is also run with sketches (`signature-plain`)
and with k told (`signature-told`), CFL with balanced batches (`cfl-balanced`). NSIM runs on
trajectories only, since its server makes synthetic users of the data's format.

Everyday settings (`--settings everyday`) have label skew of each client, feature noise, outliers
and the like. Their runs tune models for three rounds at the end, so that each row has the scores
before and after. Each run's difference from FedAvg after tuning is written as NAME_tuned.csv.

The rows say nothing of the code that measured them: after a change give the sheet another name
(`--name`), which becomes benchmarks/results/NAME.csv. Data are read from SECURECLUSTER_DATA or the
hub.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from benchmarks.clusters.robust_settings import EVERYDAY, SETTINGS, Setting
from benchmarks.grid import Grid, parser_of, read_options
from benchmarks.sheet import Cell, Row, Spread, distinct, spread
from benchmarks.table import RESULTS, UNRECORDED, markdown_line, write
from securecluster import Federation
from securecluster.clustering.metrics import mean
from securecluster.core.client_names import at
from securecluster.core.randomness import Randomness
from securecluster.data import Shard
from securecluster.errors import SecureClusterError, SecureClusterWarning
from securecluster.protocols.registry import protocol_class

BASELINES = ("fedavg", "finetune", "local", "mrmtl")
# of these IFCA, Local-KMeans, hidden and CLoVE are given k; the others find the number of clusters
CLUSTERED = (
    "cfl", "flhc", "srfca", "oneshot", "ifca", "local-kmeans", "signature", "hidden", "pacfl",
    "clove", "rdpcfl",
)  # fmt: skip
# protocols whose server knows the format of trajectories and of no other data
TRAJECTORIES = ("nsim",)
# protocols with one hyper-parameter that is not their default: sketches, k told, batches by labels
SKETCHES = "signature-plain"
TOLD = "signature-told"
BALANCED = "cfl-balanced"
VARIANTS: dict[str, dict[str, Any]] = {
    SKETCHES: {"signature_blocks": "plain"},
    TOLD: {},
    BALANCED: {"batches": "balanced"},
}
NAMES = (*BASELINES, *CLUSTERED, *TRAJECTORIES, *VARIANTS)
# on everyday settings: those that find the number of clusters, and FedAvg before and after tuning
EVERYDAY_NAMES = ("fedavg", "cfl", BALANCED, "flhc", "srfca", "signature")

FIRST_SEED = 1700  # no other table has these seeds
FIRST_EVERYDAY_SEED = 2700
TUNE_ROUNDS = 3  # as many as `finetune` has by default
MARGIN = 0.01  # of accuracy; of perplexity and position error, relative to FedAvg's


# one entry is enough: the protocols of one setting and seed are measured in succession
@lru_cache(maxsize=1)
def federation(name: str, seed: int) -> Federation:
    """Return the clients of a setting, in the order of their true clusters.

    Args:
        name: one of `SETTINGS`.
        seed: of every draw, here and in the runs on this federation.
    """
    return clients_of(setting_of(name), seed)


def setting_of(name: str) -> Setting:
    """Return a setting by its name.

    Args:
        name: one of `SETTINGS` or `EVERYDAY`.
    """
    return SETTINGS.get(name) or EVERYDAY[name]


def clients_of(setting: Setting, seed: int) -> Federation:
    """Return a setting's clients, in the order of their true clusters.

    Args:
        setting: data, scenario and sizes of the clusters.
        seed: of every draw, here and in the runs on this federation.
    """
    clusters = len(setting.sizes)
    dealt = Federation.simulate(
        setting.data,
        scenario=setting.scenario,
        # clusters are dealt equally large, and surplus clients of the smaller ones are left out
        clients=clusters * max(setting.sizes),
        samples=setting.dealt,
        seed=seed,
    )
    selected = dealt.select(map(at, _chosen(dealt, setting.sizes)))
    shards = list(selected.shards)
    # samples are exchanged before shards are shortened: the exchange needs shards of one length
    if setting.foreign:
        shards = _mixed(shards, clusters, setting.foreign)
    sample_counts: list[int] = []
    for size in setting.sizes:
        for position in range(size):
            cycled = position % len(setting.samples)
            sample_counts.append(setting.samples[cycled])
    pairs = zip(shards, sample_counts, strict=True)
    shards = [_shortened(shard, n) for shard, n in pairs]
    if setting.noise:
        shards = _half_noisy(shards, setting.noise, seed)
    # the recipe of the simulation no longer describes the shards
    return replace(selected, shards=tuple(shards), recipe=None)


def _chosen(dealt: Federation, sizes: Sequence[int]) -> list[int]:
    """Return the first `sizes[c]` clients of each true cluster c."""
    assert dealt.truth is not None
    truth = np.array(dealt.truth)
    clients: list[int] = []
    for cluster, size in enumerate(sizes):
        members = np.flatnonzero(truth == cluster)
        clients += members[:size].tolist()
    return clients


def _mixed(shards: Sequence[Shard], clusters: int, share: float) -> list[Shard]:
    """Return shards that exchanged a share of their samples across clusters, none held twice.

    Args:
        shards: in the order of their clusters, equally many in each and all of one length.
        clusters: how many there are; every other cluster gives the same number of samples.
        share: of the samples that come from other clusters.
    """
    x = [shard.x for shard in shards]
    y = [shard.y for shard in shards]
    x_test = [shard.x_test for shard in shards]
    y_test = [shard.y_test for shard in shards]
    training = _exchanged(x, y, clusters, share)
    test = _exchanged(x_test, y_test, clusters, share)
    columns = zip(*training, *test, strict=True)
    return [Shard(*arrays) for arrays in columns]


def _exchanged(
    x: Sequence[NDArray[Any]], y: Sequence[NDArray[Any]], clusters: int, share: float
) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
    """Return samples and labels after evenly spaced ones were exchanged between clusters.

    Args:
        x: a client's samples each, in the order of the clusters.
        y: a client's labels each, in the same order.
        clusters: how many there are, of equally many clients.
        share: of the samples that are exchanged.
    """
    size = len(x) // clusters
    xs = np.stack(x)
    ys = np.stack(y)
    n = ys.shape[1]
    count = round(share * n)
    leaving = np.linspace(0, n - 1, count).round().astype(int)
    for shift in range(1, clusters):
        # rows of this shift alone, so that each other cluster gives the same share of them
        rows = leaving[shift - 1 :: clusters - 1]
        # clients are ordered by cluster, so a roll by whole clusters never stays within one
        offset = shift * size
        xs[:, rows] = np.roll(xs[:, rows], offset, axis=0)
        ys[:, rows] = np.roll(ys[:, rows], offset, axis=0)
    return list(xs), list(ys)


def _half_noisy(shards: Sequence[Shard], scale: float, seed: int) -> list[Shard]:
    """Return shards in which every second client's features have Gaussian noise.

    Args:
        shards: of all clients.
        scale: standard deviation of the noise, in units of the features.
        seed: of the draws.
    """
    noisy = []
    for client, shard in enumerate(shards):
        if client % 2:
            draw = Randomness(seed).generator("robust", "noise", client)
            x, x_test = (
                (features + scale * draw.standard_normal(features.shape)).astype(features.dtype)
                for features in (shard.x, shard.x_test)
            )
            shard = replace(shard, x=x, x_test=x_test)
        noisy.append(shard)
    return noisy


def _shortened(shard: Shard, samples: int) -> Shard:
    """Return the shard with its first training samples only."""
    # held-out samples stay, so that clients with few samples are tested on enough
    return replace(shard, x=shard.x[:samples], y=shard.y[:samples])


def cells(
    seeds: int, settings: Iterable[str] = tuple(SETTINGS), protocols: Iterable[str] = NAMES
) -> list[Cell]:
    """Return protocols by settings by seeds; of `TRAJECTORIES` those on trajectories only.

    Args:
        seeds: how many, from `FIRST_SEED` on, or `FIRST_EVERYDAY_SEED` on everyday settings.
        settings: names among `SETTINGS` or `EVERYDAY`.
        protocols: names among `NAMES`.
    """
    settings = tuple(settings)
    protocols = tuple(protocols)
    selected = []
    for number in range(seeds):
        for setting, protocol in product(settings, protocols):
            first = FIRST_EVERYDAY_SEED if setting in EVERYDAY else FIRST_SEED
            if _can_run(protocol, setting):
                selected.append(_cell(setting, protocol, first + number))
    return selected


def _can_run(protocol: str, setting: str) -> bool:
    """Return whether a protocol runs on a setting's data."""
    return protocol not in TRAJECTORIES or setting_of(setting).data == "mobility"


def _cell(name: str, protocol: str, seed: int) -> Cell:
    """Return everything that shapes a run."""
    setting = setting_of(name)
    k = None
    if _takes_k(protocol):
        k = setting.told
    cell: Cell = {
        "half": setting.half,
        "setting": name,
        "data": setting.data,
        "scenario": repr(setting.scenario),
        "sizes": setting.sizes,
        "samples": setting.samples,
        "dealt": setting.dealt,
        "foreign": setting.foreign,
        "protocol": protocol,
        "k": k,
        "seed": seed,
    }
    if name in EVERYDAY:
        cell = {**cell, "noise": setting.noise, "tune_rounds": TUNE_ROUNDS}
    return cell


def _takes_k(protocol: str) -> bool:
    """Return whether a protocol is told the number of clusters, which most that have a k need."""
    if protocol == TOLD:
        return True
    defaults = _class_of(protocol)().get_params()
    return defaults.get("k") is not None


def _class_of(protocol: str) -> Any:
    """Return the class of a protocol, or of a variant, whose name begins with the protocol's."""
    if protocol in VARIANTS:
        protocol, _, _ = protocol.partition("-")
    return protocol_class(protocol)


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol; a run that ends with an error has its sentence as outcome.

    Args:
        cell: one of `cells`.

    Returns:
        outcome ("ok", or the error), ari, clusters, metric, score (mean over clients), worst
        client, bytes (up and down) and fit_seconds. With rounds of tuning, score is that before
        them and `tuned` that after; `exact` is 1 where the clusters are the true ones, and `warned`
        the sentence that the run warned by.
    """
    clients = federation(cell["setting"], cell["seed"])
    params = dict(VARIANTS.get(cell["protocol"], {}))
    if cell["k"] is not None:
        params["k"] = cell["k"]
    tune_rounds = cell.get("tune_rounds", 0)
    if tune_rounds:
        params["tune_rounds"] = tune_rounds
    # all other hyper-parameters, the network too, are the protocol's defaults: they are under test
    protocol = _class_of(cell["protocol"])(**params)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SecureClusterWarning)  # the row has the sentence
            fitted = protocol.fit(clients, UNRECORDED)
    except SecureClusterError as error:
        return {"outcome": str(error)}
    assert fitted.agreement_ is not None
    # perplexity and position error are better where they are less
    if fitted.metric_ == "accuracy":
        worst = float(np.nanmin(fitted.scores_))
    else:
        worst = float(np.nanmax(fitted.scores_))
    results = {
        "outcome": "ok",
        "ari": fitted.agreement_["ari"],
        "clusters": len(set(fitted.labels_.tolist())),
        "metric": fitted.metric_,
        "score": mean(fitted.scores_),
        "worst": worst,
        "bytes": fitted.bytes_["up"] + fitted.bytes_["down"],
        "fit_seconds": fitted.seconds_,
    }
    if tune_rounds:
        results |= {
            "exact": int(fitted.agreement_["ari"] == 1),
            "score": fitted.history_[-1][fitted.metric_],
            "tuned": mean(fitted.scores_),
            "warned": fitted.warning_ or "",
        }
    return results


def gains(rows: Sequence[Row]) -> dict[tuple[str, str], float]:
    """Return how much better than FedAvg a protocol is, by setting and protocol.

    The mean over the seeds that both were run with: of accuracy the difference, of perplexity and
    position error, where less is better, the share of FedAvg's that was saved.
    """
    baselines: dict[tuple[str, str], Row] = {}
    for row in rows:
        if row["protocol"] == "fedavg":
            baselines[row["setting"], row["seed"]] = row
    gains_by_key: dict[tuple[str, str], list[float]] = {}
    for row in rows:
        setting = row["setting"]
        baseline = baselines.get((setting, row["seed"]))
        if baseline is None:
            continue
        score = row.get("score")
        reference = baseline.get("score")
        # runs that ended with an error have no score
        if not score or not reference:
            continue
        gain = _gain(row["metric"], float(score), float(reference))
        key = (setting, row["protocol"])
        gains_by_key.setdefault(key, []).append(gain)
    return {key: float(np.mean(values)) for key, values in gains_by_key.items()}


def _gain(metric: str, score: float, reference: float) -> float:
    """Return how much better a score is than FedAvg's."""
    if metric == "accuracy":
        return score - reference
    # relative, since perplexities and metres have scales of their own; positive is better
    return 1 - score / reference


def report(rows: Sequence[Row]) -> list[str]:
    """Return the table as lines: a line a setting and protocol, then the cells below FedAvg."""
    by = ["setting", "protocol"]
    gain = gains(rows)
    ari = spread(rows, by, "ari")
    score = spread(rows, by, "score")
    worst = spread(rows, by, "worst")
    lines = []
    for key, (mean_score, _, _, seeds) in score.items():
        setting, protocol = key
        mean_ari = ari[key][0]
        mean_worst = worst[key][0]
        gain_text = "-"
        if (setting, protocol) in gain:
            gain_text = f"{gain[setting, protocol]:+.3f}"
        lines.append(
            f"{setting:34} {protocol:12} "
            f"ARI {mean_ari:5.2f}  "
            f"score {mean_score:8.3f}  "
            f"worst {mean_worst:8.3f}  "
            f"beside FedAvg {gain_text}  "
            f"({seeds} seeds)"
        )
    return lines + _failures(rows) + _below_fedavg(gain) + below_tuned(rows)


def below_tuned(rows: Sequence[Row]) -> list[str]:
    """Return a line for each setting and protocol on its distance from tuned FedAvg, and a count.

    The distance is the mean over seeds, with the 95 % interval by Student's t. Rows without tuning
    give no line.
    """
    runs_of: dict[tuple[str, str], list[Row]] = {}
    for run in beside_tuned(rows):
        runs_of.setdefault((run["setting"], run["protocol"]), []).append(run)
    lines = []
    below = 0
    for (setting, protocol), runs in runs_of.items():
        differences = [float(run["difference"]) for run in runs]
        difference = float(np.mean(differences))
        exact = sum(int(run["exact"]) for run in runs)
        below += round(difference, 6) < -MARGIN  # a mean of rounded numbers
        lines.append(
            f"{setting:34} {protocol:12} beside tuned FedAvg {difference:+.3f} "
            f"± {half_width(differences):.3f}, exact {exact} of {len(runs)} runs"
        )
    if lines:
        lines.append(f"{below} of {len(runs_of)} cells end more than {MARGIN} below it")
    return lines


def beside_tuned(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a row for each run with tuning, with its distance from FedAvg on the same clients.

    `difference` is that of the accuracies after tuning. Rows without tuning, and FedAvg's own, give
    none.
    """
    tuned = {(row["setting"], row["protocol"], row["seed"]): row.get("tuned") for row in rows}
    compared = []
    for row in rows:
        reference = tuned.get((row["setting"], "fedavg", row["seed"]))
        tuned_accuracy = row.get("tuned")
        if row["protocol"] == "fedavg" or not tuned_accuracy or not reference:
            continue
        shown = ("setting", "protocol", "seed", "ari", "exact", "score", "tuned")
        run = {name: row[name] for name in shown}
        compared.append({**run, "difference": round(float(tuned_accuracy) - float(reference), 6)})
    return compared


def half_width(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of the mean of values, by Student's t; inf of one value."""
    if len(values) < 2:
        return float("inf")
    error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return float(t.ppf(0.975, len(values) - 1)) * error


def _below_fedavg(gain: Mapping[tuple[str, str], float]) -> list[str]:
    """Return how many cells end below FedAvg, and a line for each protocol with its own.

    Args:
        gain: by setting and protocol, as `gains` returns it.
    """
    # FedAvg's gain over itself is 0
    measured = {key: value for key, value in gain.items() if key[1] != "fedavg"}
    cells_of = Counter(protocol for _, protocol in measured)
    below: dict[str, list[str]] = {protocol: [] for protocol in cells_of}
    for (setting, protocol), value in measured.items():
        if value < -MARGIN:
            below[protocol].append(f"{setting} {value:+.3f}")
    count = sum(len(settings) for settings in below.values())
    # the claim of docs/evidence/defaults.md is that no cell does
    lines = [f"{count} of {len(measured)} cells end more than {MARGIN} below FedAvg"]
    for protocol, settings in below.items():
        summary = f"  {protocol}: {len(settings)} of {cells_of[protocol]}"
        lines.append("; ".join([summary, *settings]))
    return lines


def _failures(rows: Sequence[Row]) -> list[str]:
    """Return a line for each run that ended with an error."""
    lines = []
    for row in rows:
        outcome = row.get("outcome", "ok")
        if outcome in ("ok", ""):
            continue
        run = f"{row['setting']} {row['protocol']} seed {row['seed']}"
        lines.append(f"{run}: {outcome}")
    return lines


def markdown(rows: Sequence[Row], protocols: Sequence[str]) -> list[str]:
    """Return a table of settings by protocols: the mean score, and the mean ARI in parentheses.

    Protocols without clusters of their own have no ARI. Scores are accuracies, or metres.

    Args:
        rows: of the sheet.
        protocols: the table's columns.
    """
    by = ["setting", "protocol"]
    score = spread(rows, by, "score")
    ari = spread(rows, by, "ari")
    header = [f"`{name}`" for name in protocols]
    lines = [markdown_line(["setting", *header])]
    lines.append("| --- " * (1 + len(protocols)) + "|")
    for setting in distinct(rows, "setting"):
        texts = []
        for name in protocols:
            key = (setting, name)
            clusters = None
            if name not in BASELINES:
                clusters = ari.get(key)
            texts.append(_cell_text(score.get(key), clusters))
        lines.append(markdown_line([setting, *texts]))
    return lines


def _cell_text(score: Spread | None, ari: Spread | None) -> str:
    """Return a mean score, and a mean ARI in parentheses."""
    if score is None:
        return "–"
    mean_score = score[0]
    text = f"{mean_score:,.0f} m"
    # no accuracy is above 1, so anything above is a position error
    if mean_score <= 1:
        text = f"{mean_score:.3f}"
    if ari is None:
        return text
    return f"{text} ({ari[0]:.2f})"


def _names(text: str) -> list[str]:
    """Return the names of a list that commas separate."""
    return [name for name in text.split(",") if name]


def chosen(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's options, with `settings` and `protocols` as lists of names."""
    parser = parser_of(__doc__, minutes=600.0)
    parser.add_argument("--half", choices=("first", "second"), help="both where it is left out")
    parser.add_argument("--protocols", type=_names, default=list(NAMES), help=", ".join(NAMES))
    parser.add_argument(
        "--settings", type=_names, default=list(SETTINGS), help="twenty by default; or everyday"
    )
    parser.add_argument("--name", default="robust", help="of the CSV file, robust by default")
    parser.add_argument("--markdown", action="store_true", help="print a table of means")
    options = read_options(parser, argv)
    if options.settings == ["everyday"]:
        options.settings = list(EVERYDAY)
        if options.protocols == list(NAMES):
            options.protocols = list(EVERYDAY_NAMES)
    for option, valid in (("protocols", NAMES), ("settings", (*SETTINGS, *EVERYDAY))):
        names = getattr(options, option)
        unknown = [name for name in names if name not in valid]
        if unknown:
            choices = ", ".join(valid)
            parser.error(f"--{option} has no {unknown[0]}: choose from {choices}")
    halves = ["first", "second"]
    if options.half is not None:
        halves = [options.half]
    names = options.settings
    options.settings = [name for name in names if setting_of(name).half in halves]
    return options


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    options = chosen(argv)

    def shown(rows: Sequence[Row]) -> None:
        lines = report(rows)
        if options.markdown:
            lines = markdown(rows, options.protocols)
        print(*lines, sep="\n")
        summary = beside_tuned(rows)
        if summary:
            print(write(f"{options.name}_tuned", summary))

    grid = Grid(
        __doc__,
        options.name,
        lambda scale, seeds: cells(seeds, options.settings, options.protocols),
        measure,
        folder=RESULTS,
        report=shown,
    )
    return grid.run(options)


if __name__ == "__main__":
    print(main())
