"""Compare private clustering with the field at equal ε of whole runs: ARI, accuracy, bytes.

`securecluster field` compares methods as they are, and tunes learning rates alone. This stays
beside it for what that cannot say: from which ε on a method finds clusters at all, where its share
of ε for clustering is tuned as well, with clusters of unequal sizes.

python -m benchmarks.private.field --tune [--minutes 15]       settings, on seeds 100 and 101
python -m benchmarks.private.field [--seeds 20] [--minutes 10] the comparison, on seeds 2000 to 2019
    [--methods signature ifca ...] some methods only
    [--part field|ari|few|rdpcfl] one part of the comparison only

21 clients with 300 MNIST images each, in four clusters of 3, 6, 6 and 6 clients whose labels are
swapped or whose images are turned. The model is softmax regression, trained by DP-SGD: every
example of a client is protected from everyone else. ε is that of clustering and training together,
for an example that is blanked (n public), δ = 1e-5. Protocols that ask for the number of clusters
are told it. `tuned` is the accuracy after every client has trained its model alone for 20 steps
without noise, which is the same for all methods. Local training is MR-MTL without regularization,
whose models are released.

Every method has the same grid at each ε: four learning rates by the values of one option of its
own, which for all methods that cluster is the share of the budget (of 1/z²) that clustering gets.
The setting of the largest mean accuracy over both shifts is taken. Methods that cluster are
compared with the settings of their largest ARI, too, at more levels; those that cluster once, by
what they release before training, then have one learning rate. PACFL has the settings of one-shot
clustering. `rdpcfl-directions` is R-DPCFL with k - 1 principal directions in place of two. The clip
norm is 1, and each step takes all examples.

Seeds 0 to 4 were those of this comparison before, and constants of `signature` were found on seeds
0 to 2: no constant was found on the seeds from 2000 on.

`few` has many clients with few samples, 240 with 60 each, with the settings for accuracy. `rdpcfl`
is R-DPCFL's own setting but for its size: turned images, batches of 32, δ = 1e-4, 1000 images a
client and 10 rounds in place of about 6,400 and 200, since clients of 6,400 images share images.
MNIST is read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.grid import as_told, parser_of, product, read_options, with_seeds
from benchmarks.sheet import Cell, Row, Sheet, figure, summarise
from benchmarks.table import SEEDED, read, write
from securecluster import Federation, Iid, LabelSwap, Rotation
from securecluster.core.client_names import at
from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.accounting import find_noise
from securecluster.privacy.dp.ledger import COSTLESS, Ledger
from securecluster.protocols import (
    CFLGP,
    FLUX,
    IFCA,
    MRMTL,
    PACFL,
    RDPCFL,
    CLoVE,
    FedAvg,
    FineTune,
    OneShot,
    Signature,
)

DATA = "mnist"
CLUSTERS = 4
PER_CLUSTER = 6  # but for the smallest cluster, which has half of it
SAMPLES = 300
STEPS = 20  # of DP-SGD that are released
FIRST_SEED = 2000
SEEDS = 20
ALONE_RATE = 0.5  # learning rate of training alone without noise
CLIP = 1.0
Settings = dict[tuple[str, float], tuple[float, int]]  # learning rate and option, by method and ε
DELTA = 1e-5
EPSILONS: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0)
ARI_EPSILONS = (0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.7, 8.0)
BY_FIELD = "field"  # settings of the largest accuracy
BY_ARI = "ari"  # settings of the largest ARI, of methods that cluster
TUNING_SEEDS = (100, 101)
TUNING = "field_shares_tuning"  # the sheet of settings
RATES = (0.5, 1.0, 2.0, 4.0)
SHIFTS: dict[str, Any] = {
    "swap": LabelSwap(clusters=CLUSTERS),
    "rotation": Rotation(clusters=CLUSTERS),
}
# R-DPCFL's setting
OWN_SAMPLES = 1000
OWN_BATCH = 32
OWN_ROUNDS = 10
OWN_DELTA = 1e-4
OWN_EPSILONS = (3.0,)
OWN_RATE = 0.5
# many clients with few samples
FEW_PER_CLUSTER = 60
FEW_SAMPLES = 60
FEW_EPSILONS = (2.0, 4.0)
FEW_SEEDS = 5
PARTS = ("field", "ari", "few", "rdpcfl")
ENOUGH = 0.9  # ARI of which the table of needed ε is

TWENTY_ROUNDS = {"rounds": STEPS, "epochs": 1}
TEN_ROUNDS = {"rounds": STEPS // 2, "epochs": 2}


@dataclass(frozen=True)
class Method:
    """A protocol, its options in all runs, and the values of its own that are tuned.

    Attributes:
        protocol: the class.
        own: dicts of options. "share" is the share of the privacy budget (of 1/z²) that clustering
            gets, and "pull" λ times the learning rate.
        fixed: options of all runs.
        clustering: the option that is the noise multiplier of clustering; of methods that train in
            the same rounds, over that of training; None where nothing is clustered.
        once: whether clusters follow from what is released before training.
        releases: how often a client releases what clusters follow from, by the options of a run.
        before: rounds before training.
    """

    protocol: Any
    own: tuple[dict[str, Any], ...]
    fixed: dict[str, Any] = field(default_factory=dict)
    clustering: str | None = None
    once: bool = False
    releases: Callable[[Mapping[str, Any]], int] = lambda options: 1
    before: int = 0


SHARES: tuple[dict[str, Any], ...] = ({"share": 0.2}, {"share": 0.6})
# R-DPCFL's choices are a small part of its price
_RDPCFL = {"k": CLUSTERS, "selection_noise": 10.0}
METHODS: dict[str, Method] = {
    "signature": Method(Signature, SHARES, {"k": CLUSTERS}, "signature_noise", once=True),
    "oneshot": Method(
        OneShot,
        SHARES,
        {"tasks": CLUSTERS, "features": "dct", "vectors": 1, "common": "none"},
        "gram_noise",
        once=True,
    ),
    "pacfl": Method(
        PACFL,
        SHARES,
        {"k": CLUSTERS, "subspaces": "samples", "vectors": 1},
        "gram_noise",
        once=True,
    ),
    "clove": Method(
        CLoVE,
        # the first two shares are those of losses that have the noise of training
        (
            {"cluster_rounds": 5, "share": 0.2},
            {"cluster_rounds": STEPS, "share": 0.5},
            {"cluster_rounds": 5, "share": 0.6},
            {"cluster_rounds": STEPS, "share": 0.2},
        ),
        {"k": CLUSTERS},
        "loss_noise",
        releases=lambda options: int(options["cluster_rounds"]),
    ),
    "rdpcfl": Method(RDPCFL, SHARES, _RDPCFL, "first_noise", before=1),
    "rdpcfl-directions": Method(
        RDPCFL, SHARES, {**_RDPCFL, "directions": CLUSTERS - 1}, "first_noise", before=1
    ),
    "cflgp": Method(
        CFLGP,
        (
            {"cluster_rounds": 5, "share": 0.2},
            {"cluster_rounds": STEPS, "share": 0.2},
            {"cluster_rounds": 5, "share": 0.6},
            {"cluster_rounds": STEPS, "share": 0.6},
        ),
        {"k": CLUSTERS, "period": 1},
        "gradient_noise",
        # a gradient over all samples in each of these rounds
        releases=lambda options: int(options["cluster_rounds"]),
    ),
    "flux": Method(
        FLUX,
        (
            {"share": 0.2, "moments": 1},
            {"share": 0.6, "moments": 1},
            {"share": 0.2, "moments": 2},
            {"share": 0.6, "moments": 2},
        ),
        # the latent vectors of softmax regression are the samples, whatever was trained before
        {"k": CLUSTERS, "pre_rounds": 0},
        "descriptor_noise",
    ),
    "ifca": Method(
        IFCA,
        (
            {**TWENTY_ROUNDS, "share": 21 / 41},
            {**TEN_ROUNDS, "share": 11 / 31},
            {**TWENTY_ROUNDS, "share": 0.2},
            {**TEN_ROUNDS, "share": 0.6},
        ),
        {"k": CLUSTERS, "starts": 1},
        "loss_noise",
        # in each round, and at the end among the final models
        releases=lambda options: 1 + int(options["rounds"]),
    ),
    "mrmtl": Method(MRMTL, ({"pull": 0.1}, {"pull": 0.3})),
    "fedavg": Method(FedAvg, (TWENTY_ROUNDS, TEN_ROUNDS)),
    "finetune": Method(
        FineTune,
        ({"rounds": STEPS + 5, "tune_rounds": 5}, {"rounds": 2 * STEPS, "tune_rounds": STEPS}),
    ),
    "local": Method(
        MRMTL, (TWENTY_ROUNDS, {"rounds": STEPS // 2, "epochs": 1}), {"regularization": 0.0}
    ),
}
# PACFL's eigenvectors of 784 numbers take long: it has the settings of the method most like it
TUNED_AS = {"pacfl": "oneshot"}
# methods without clusters, whose ARI says nothing
ONE_CLUSTER = ("mrmtl", "fedavg", "finetune", "local")


def tuning_cells() -> list[Cell]:
    """Return method by ε by learning rate by option by shift by seed.

    Levels that only ARI is compared at have one learning rate for methods that cluster once.
    """
    grid: list[Cell] = []
    tuned = [method for method in METHODS if method not in TUNED_AS]
    for method, epsilon in itertools.product(tuned, ARI_EPSILONS):
        description = METHODS[method]
        rates: Sequence[float] = RATES
        if epsilon not in EPSILONS:
            if description.clustering is None:
                continue
            if description.once or description.protocol is RDPCFL:
                rates = RATES[:1]
        option_numbers = range(len(description.own))
        settings = itertools.product(rates, option_numbers, SHIFTS, TUNING_SEEDS)
        for rate, number, shift, seed in settings:
            grid.append(
                {
                    "method": method,
                    "target": epsilon,
                    "lr": rate,
                    "own": number,
                    "shift": shift,
                    "seed": seed,
                }
            )
    return grid


def cells(seeds: int, part_names: Sequence[str] = PARTS) -> list[Cell]:
    """Return seed by method by shift by ε, with settings for accuracy and for ARI, and R-DPCFL's.

    Args:
        seeds: how many.
        part_names: some of `PARTS`.
    """
    clusterers = [method for method in METHODS if method not in ONE_CLUSTER]
    tables: dict[str, list[Cell]] = {
        "field": product(setting=[BY_FIELD], method=METHODS, shift=SHIFTS, target=EPSILONS),
        "ari": product(setting=[BY_ARI], method=clusterers, shift=SHIFTS, target=ARI_EPSILONS),
        "few": product(setting=["few"], method=METHODS, shift=["swap"], target=FEW_EPSILONS),
        "rdpcfl": product(
            setting=["rdpcfl"], method=METHODS, shift=["rotation"], target=OWN_EPSILONS
        ),
    }
    grid: list[Cell] = []
    for part_name in part_names:
        count = min(seeds, FEW_SEEDS) if part_name in ("few", "rdpcfl") else seeds
        grid += with_seeds(tables[part_name], range(FIRST_SEED, FIRST_SEED + count))
    return grid


@lru_cache(maxsize=4)
def clients_of(shift: str, samples: int, seed: int, size: int = PER_CLUSTER) -> Federation:
    """Return clients of MNIST in four clusters, of which the first is half as large.

    Args:
        shift: a name of `SHIFTS`.
        samples: of each client.
        seed: of the federation.
        size: clients of a cluster.
    """
    federation = Federation.simulate(
        DATA, scenario=Iid() + SHIFTS[shift], clients=CLUSTERS * size, samples=samples, seed=seed
    )
    assert federation.truth is not None
    # A small cluster is the hard case: the noise in its mean is the largest.
    smallest = [i for i, cluster in enumerate(federation.truth) if cluster == 0]
    left_out = smallest[size // 2 :]
    remaining = [at(i) for i in range(len(federation)) if i not in left_out]
    return federation.select(remaining)


def options_of(method: str, epsilon: float, rate: float, option_number: int) -> dict[str, Any]:
    """Return a method's options for a total ε.

    Args:
        method: a name of `METHODS`.
        epsilon: the target, at `DELTA`.
        rate: learning rate.
        option_number: 0 or 1, the value of its own option.
    """
    description = METHODS[method]
    options: dict[str, Any] = {
        **TWENTY_ROUNDS,
        "batch_size": SAMPLES,
        "lr": rate,
        **_common_options(DELTA),
        **description.fixed,
        **description.own[option_number],
    }
    share = options.pop("share", None)
    pull = options.pop("pull", None)
    # what a step pulls towards the mean is lr·λ, so the tuned value does not depend on the rate
    if pull is not None:
        options["regularization"] = pull / rate
    if share is None or description.clustering is None:
        return {**options, "target_epsilon": epsilon}
    if not description.once:
        steps = (options["rounds"] - description.before) * options["epochs"]
        ratio = noise_ratio(description.releases(options), steps, share)
        return {**options, description.clustering: ratio, "target_epsilon": epsilon}
    steps = options["rounds"] * options["epochs"]
    clustering, training = noises_for(epsilon, share, steps)
    return {**options, description.clustering: clustering, "noise": training}


def noise_ratio(releases: int, steps: int, share: float) -> float:
    """Return the noise multiplier of clustering over that of training, which gives it its share.

    L releases for clusters and T steps of training cost L/z_c² and T/z_t², the first a share s of
    both: z_c/z_t = √(L (1 − s) / (T s)).

    Args:
        releases: L.
        steps: T.
        share: s, in (0, 1).
    """
    return math.sqrt(releases * (1 - share) / (steps * share))


def _common_options(delta: float) -> dict[str, Any]:
    """Return what all runs have in common."""
    return {"model": "linear", "clip": CLIP, "dp_unit": "example", "mask": "none", "delta": delta}


def noises_for(epsilon: float, share: float, steps: int) -> tuple[float, float]:
    """Return the noise multipliers of clustering and of each step over all examples.

    Gaussian mechanisms compose as Σ 1/z², of which clustering gets a share.

    Args:
        epsilon: of both together, at `DELTA`.
        share: of clustering, in (0, 1).
        steps: of training.
    """
    # 1/joint² = 1/clustering² + steps/training²: the two terms are share and 1 − share of it
    joint = find_noise(lambda z: [(z, 1.0, 1)], epsilon, DELTA)
    clustering = joint / math.sqrt(share)
    training = joint * math.sqrt(steps / (1 - share))
    return clustering, training


def own_setting(method: str, epsilon: float) -> dict[str, Any]:
    """Return a method's options in R-DPCFL's setting, where all noise is of one multiplier.

    Args:
        method: a name of `METHODS`.
        epsilon: the target, at `OWN_DELTA`.
    """
    description = METHODS[method]
    options = {
        **_common_options(OWN_DELTA),
        **description.fixed,
        "rounds": OWN_ROUNDS,
        "epochs": 1,
        "batch_size": OWN_BATCH,
        "lr": OWN_RATE,
        "target_epsilon": epsilon,
    }
    if method == "mrmtl":
        options["regularization"] = 0.1
    if method == "finetune":
        options |= {"rounds": OWN_ROUNDS + 3, "tune_rounds": 3}
    return options


def outcome(federation: Federation, method: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Run a method, and return what is compared.

    Args:
        federation: the clients.
        method: a name of `METHODS`.
        options: of the protocol.

    Returns:
        Mean accuracy over clients, adjusted Rand index, the accuracy after tuning, ε of the run,
        releases of a client, and bytes of a client.
    """
    protocol = as_told(METHODS[method].protocol, options)
    fitted = protocol.fit(federation, SEEDED)
    assert fitted.ledger_.exact() == []
    clients = len(federation)
    return {
        "accuracy": float(np.nanmean(fitted.scores_)),
        "ari": fitted.agreement_["ari"],
        "tuned": tuned_accuracy(federation, fitted),
        "epsilon": fitted.ledger_.price(options["delta"]).epsilon,
        "releases": releases(fitted.ledger_),
        "bytes": (fitted.bytes_["up"] + fitted.bytes_["down"]) / clients,
    }


def tuned_accuracy(federation: Federation, fitted: Any) -> float:
    """Return the mean accuracy after every client has trained its model alone, without noise.

    Such models must stay with their clients: no ε covers them.

    Args:
        federation: the clients.
        fitted: a protocol whose model is softmax regression.
    """
    accuracies = []
    for client, shard in enumerate(federation.shards):
        model = fitted.model_of(at(client))
        weight, bias = (value.clone() for value in model.values())
        weight.requires_grad_()
        bias.requires_grad_()
        x = torch.as_tensor(shard.x).flatten(1)
        y = torch.as_tensor(shard.y)
        optimizer = torch.optim.SGD([weight, bias], lr=ALONE_RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            logits = x @ weight.T + bias
            loss = torch.nn.functional.cross_entropy(logits, y)
            torch.autograd.backward(loss)
            optimizer.step()
        tested = torch.as_tensor(shard.x_test).flatten(1)
        with torch.no_grad():
            logits = tested @ weight.T + bias
            predicted = logits.argmax(1).numpy()
        right = predicted == shard.y_test
        accuracies.append(float(np.mean(right)))
    return float(np.mean(accuracies))


def releases(ledger: Ledger) -> int:
    """Return the releases of the client that has most: noisy replies, and trainings by DP-SGD.

    Args:
        ledger: of a run.
    """
    counts: dict[int, int] = {}
    for event in ledger.events:
        if event.mechanism in COSTLESS:
            continue
        for client in event.ids:
            counts[client] = counts.get(client, 0) + 1
    return max(counts.values())


def setting_of(cell: Cell) -> tuple[str, float]:
    """Return the method and the ε whose setting a cell of the comparison takes.

    Args:
        cell: one of `cells`, but for R-DPCFL's setting.
    """
    method = str(cell["method"])
    return TUNED_AS.get(method, method), float(cell["target"])


def tuning_outcome(cell: Cell) -> dict[str, Any]:
    """Run one setting on a tuning seed.

    Args:
        cell: one of `tuning_cells`.
    """
    method = cell["method"]
    options = options_of(method, cell["target"], cell["lr"], cell["own"])
    federation = clients_of(cell["shift"], SAMPLES, cell["seed"])
    return outcome(federation, method, options)


def measure(cell: Cell, settings: Mapping[str, Settings]) -> dict[str, Any]:
    """Run one cell of the comparison.

    Args:
        cell: one of `cells`.
        settings: learning rate and option by method and ε, as `chosen` returns them, for each
            setting.
    """
    method = cell["method"]
    target = cell["target"]
    if cell["setting"] == "rdpcfl":
        federation = clients_of("rotation", OWN_SAMPLES, cell["seed"])
        options = own_setting(method, target)
    else:
        few = cell["setting"] == "few"
        tuned_for = BY_FIELD if few else cell["setting"]
        rate, option_number = settings[tuned_for][setting_of(cell)]
        if few:
            federation = clients_of(cell["shift"], FEW_SAMPLES, cell["seed"], FEW_PER_CLUSTER)
        else:
            federation = clients_of(cell["shift"], SAMPLES, cell["seed"])
        options = options_of(method, target, rate, option_number)
    return outcome(federation, method, options)


def chosen(rows: Sequence[Row], column: str = "accuracy") -> Settings:
    """Return the learning rate and option of the largest mean accuracy, by method and ε.

    Args:
        rows: of the tuning sheet; settings that were not run on all seeds and shifts do not count.
        column: "accuracy" or "ari".
    """
    scores: dict[tuple[str, float, float, int], list[float]] = {}
    for row in rows:
        if row["status"] != "done":
            continue
        setting = (row["method"], float(row["target"]), float(row["lr"]), int(row["own"]))
        values = scores.setdefault(setting, [])
        values.append(float(row[column]))
    complete = len(SHIFTS) * len(TUNING_SEEDS)
    best: Settings = {}
    largest: dict[tuple[str, float], float] = {}
    for (method, epsilon, rate, option_number), values in scores.items():
        if len(values) < complete:
            continue
        mean = float(np.mean(values))
        key = (method, epsilon)
        if mean > largest.get(key, -1.0):
            largest[key] = mean
            best[key] = (rate, option_number)
    return best


def write_needed(rows: Sequence[Row]) -> Path:
    """Write the smallest ε of the grid at which a method's mean ARI is `ENOUGH` or more.

    Args:
        rows: of the comparison.
    """
    table = []
    for method, shift in itertools.product(METHODS, SHIFTS):
        if method in ONE_CLUSTER:
            continue
        row = {"method": method, "shift": shift}
        row["needed"] = _needed(rows, BY_FIELD, method, shift, EPSILONS)
        row["needed_by_ari"] = _needed(rows, BY_ARI, method, shift, ARI_EPSILONS)
        table.append(row)
    return write("field_shares_needed", table)


def _needed(
    rows: Sequence[Row], setting: str, method: str, shift: str, epsilons: Sequence[float]
) -> str:
    """Return the smallest ε from which on a method's mean ARI is `ENOUGH` or more, as text."""
    needed = f"above {max(epsilons):g}"
    # from the largest down, until the first level that does not suffice
    for epsilon in sorted(epsilons, reverse=True):
        values = _values(rows, method, shift, epsilon, "ari", setting)
        if not values or np.mean(values) < ENOUGH:
            break
        needed = f"{epsilon:g}"
    return needed


def _values(
    rows: Sequence[Row], method: str, shift: str, epsilon: float, name: str, setting: str = BY_FIELD
) -> list[float]:
    """Return a column of the comparison for one method, shift and ε."""
    values = []
    for row in rows:
        of_field = row["setting"] == setting and row["status"] == "done"
        key = (row["method"], row["shift"], float(row["target"]))
        if of_field and key == (method, shift, epsilon):
            values.append(float(row[name]))
    return values


def draw(sheet: Sheet, rows: Sequence[Row]) -> Path:
    """Draw ARI (above) and accuracy (below) over ε, for each shift, each with settings for it.

    Args:
        sheet: the table, which saves the figure.
        rows: of the comparison.
    """
    canvas, axes = figure(9, 7, 2, 2)
    for column, shift in enumerate(SHIFTS):
        for line, name in enumerate(("ari", "accuracy")):
            ax = axes[line, column]
            _draw_panel(ax, rows, shift, name)
        axes[0, column].set_title(f"{shift}: 21 clients with {SAMPLES} images")
        axes[1, column].set_xlabel("ε of the whole run (δ = 1e-5, an example)")
    handles, labels = axes[1, 0].get_legend_handles_labels()
    canvas.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9)
    return sheet.save(canvas, "cpu")


def _draw_panel(ax: Any, rows: Sequence[Row], shift: str, name: str) -> None:
    """Draw a line of means with their range for each method.

    Args:
        ax: the panel's axes.
        rows: of the comparison.
        shift: a name of `SHIFTS`.
        name: "ari" or "accuracy".
    """
    setting, epsilons = BY_FIELD, EPSILONS
    if name == "ari":
        setting, epsilons = BY_ARI, ARI_EPSILONS
    for number, method in enumerate(METHODS):
        if name == "ari" and method in ONE_CLUSTER:
            continue
        levels = []
        means = []
        lows = []
        highs = []
        for epsilon in epsilons:
            values = _values(rows, method, shift, epsilon, name, setting)
            if values:
                levels.append(epsilon)
                means.append(float(np.mean(values)))
                lows.append(min(values))
                highs.append(max(values))
        ax.plot(levels, means, label=method, **_line(number, method))
        ax.fill_between(levels, lows, highs, color=f"C{number}", alpha=0.1)
    ax.set_xscale("log")
    ticks = (ARI_EPSILONS[0], *EPSILONS)
    ax.set_xticks(ticks, [f"{epsilon:g}" for epsilon in ticks])
    ax.minorticks_off()
    ax.set_ylim(0, 1.02)
    if name == "ari":
        ax.set_ylim(-0.1, 1.05)
    labels = {"ari": "ARI (settings for ARI)", "accuracy": "accuracy (settings for it)"}
    ax.set_ylabel(labels[name])
    ax.grid(alpha=0.3)


def _line(number: int, method: str) -> dict[str, Any]:
    """Return how a method's line looks: dashed without clusters, and that of signatures bold.

    Args:
        number: of the method.
        method: its name.
    """
    style = "--"
    width = 1.2
    if method not in ONE_CLUSTER:
        style = "-"
    if method == "signature":
        width = 2.6
    markers = "osv^D*PhxX<>"
    marker = markers[number % len(markers)]
    return {"color": f"C{number}", "marker": marker, "ls": style, "lw": width}


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, and draw."""
    parser = parser_of(__doc__, seeds=SEEDS)
    parser.add_argument("--part", choices=PARTS, help="one part of the comparison only")
    parser.add_argument("--tune", action="store_true", help="choose settings on seeds 100 and 101")
    parser.add_argument("--methods", nargs="+", choices=tuple(METHODS), default=tuple(METHODS))
    options = read_options(parser, argv)
    tuning = Sheet(TUNING)
    if options.tune:
        requested = [cell for cell in tuning_cells() if cell["method"] in options.methods]
        tuning.fill(requested, tuning_outcome, options.minutes)
    # which another run may be filling
    tuned_rows = read(tuning.path)
    settings = {BY_FIELD: chosen(tuned_rows), BY_ARI: chosen(tuned_rows, "ari")}
    if options.tune:
        return tuning.path
    ready = []
    part_names = PARTS if options.part is None else (options.part,)
    for cell in cells(options.seeds, part_names):
        tuned_for = BY_ARI if cell["setting"] == BY_ARI else BY_FIELD
        tuned = cell["setting"] == "rdpcfl" or setting_of(cell) in settings[tuned_for]
        if tuned and cell["method"] in options.methods:
            ready.append(cell)
    sheet = Sheet("field_shares")
    sheet.fill(ready, lambda cell: measure(cell, settings), options.minutes)
    # rows of other methods, too
    rows = read(sheet.path)
    write_needed(rows)
    summarise(rows, ["setting", "method", "shift", "target"], ["accuracy", "ari"])
    return draw(sheet, rows)


if __name__ == "__main__":
    print(main())
