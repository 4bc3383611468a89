"""Compare defaults under a target ε with the best of a grid at the same ε.

python -m benchmarks.private.target [--part held-out] [--seeds 2] [--minutes 15]

A setting names a protocol, what it protects, its clients and an ε. `default` is the run with
`target_epsilon` and nothing else said, whose other options `protocols.common.target_defaults`
chooses from public quantities. The grid has the same ε and gives them: the network (the data's own
or the linear one), 40 or 10 rounds (of whole clients also 5), and values of the protocol's own
mechanism or of where the noise is added (`GRIDS`); the data's own network with one of these and 40
rounds alone.

The best of a grid is chosen by hindsight, and the more settings it has, the more luck is in its
mean. So `gap` compares on each seed the default with the setting that is best on the other seeds.
`chance` is the accuracy of guessing.

`development` has the settings on which the rule was found. Those of `held-out`, which are of the
sizes of `benchmarks.private.field` and `benchmarks.private.hidden` and twenty that were drawn at
random (`drawn`), were run once, when the rule no longer changed. `misses` has those settings of
`held-out anew` that the default missed, on five new seeds: the rule's options (of then where it has
changed, too) and those that were best in the grid by hindsight, in pairs of one federation
(`compared`).
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.grid import as_told, parser_of, product, read_options, with_seeds
from benchmarks.sheet import Cell, Row, Sheet
from benchmarks.table import RESULTS, SEEDED, read, write
from securecluster import Federation
from securecluster.data.scenarios import scenario
from securecluster.protocols.registry import protocol_class

DEVELOPMENT, HELD_OUT = "development", "held-out"
DROWNED, NEW = "drowned", "held-out anew"
PARTS = (DEVELOPMENT, HELD_OUT, DROWNED, NEW)
MISSES = "misses"
# settings of `held-out anew` with the options that were best in their grids
MISSED: Mapping[str, dict[str, Any]] = {
    "finetune 1": {"model": "linear", "rounds": 10},
    "signature 1": {"model": "linear", "rounds": 10},
    "rdpcfl 1": {"model": "linear", "rounds": 40},
    "mrmtl 1": {"model": "linear", "rounds": 10},
    "oneshot 1": {"model": "linear", "rounds": 10},
    "hidden 2": {"model": "linear", "rounds": 5},
}
# what the rule chose of `finetune 1` when it missed: the data's own network
FORMER: Mapping[str, dict[str, Any]] = {"finetune 1": {"model": "auto", "rounds": 40}}
DEFAULT = "default"
FIRST_SEED = {DEVELOPMENT: 0, HELD_OUT: 5200, DROWNED: 300, NEW: 6200, MISSES: 7200}
CLASSES = 10
MARGIN = 0.02
ABOVE_CHANCE = 0.05
DRAWS = {HELD_OUT: (52, 20), NEW: (53, 15)}  # seed and number of settings
CLIENTS = {HELD_OUT: (12, 16, 20), NEW: (10, 14, 18)}
EXAMPLE = {"dp_unit": "example"}
CLIENT = {"dp_unit": "client"}
SECURE = {"aggregation": "secagg"}


@dataclass(frozen=True)
class Setting:
    """A run of which nothing is said but what has to be.

    Attributes:
        protocol: its name.
        data: a data set.
        shift: scenario, with four clusters.
        clients: how many.
        samples: of each.
        epsilon: the target.
        options: that are given.
    """

    protocol: str
    data: str
    shift: str
    clients: int
    samples: int
    epsilon: float
    options: Mapping[str, Any]


FOUR = {"k": 4}
# steps over all samples, as in `benchmarks.private.field`: a few hundred by mini-batches take
# minutes
WHOLE = {"epochs": 1, "batch_size": 1000, "lr": 1.0}
# values of mechanisms, by protocol
GRIDS: dict[str, list[dict[str, Any]]] = {
    "signature": [{}, {"cluster_noise": 0.25}, {"cluster_noise": 0.0625}],
    "cfl": [{}, {"signature": "gradient", "cluster_noise": 0.25}, {"sketch": 64}],
    "flhc": [{}, {"signature": "gradient", "cluster_noise": 0.25}, {"sketch": 64}],
    "hidden": [{}, {"cluster_share": 0.5}],
    "ifca": [{"starts": 3}, {"starts": 1}],
    "clove": [{}, {"loss_noise": 0.5}],
    "rdpcfl": [{}, {"first_noise": 0.25}],
    "oneshot": [{}, {"cluster_noise": 0.25}],
}
# of protocols without clusters, for whole clients
PLACES: list[dict[str, Any]] = [{}, SECURE]
NETWORKS_AND_ROUNDS = [("linear", 40), ("linear", 10), ("auto", 40)]
FEWER = [("linear", 5)]  # for whole clients
# protocols with what they are given, and the ends of the range of ε
PROTOCOLS: Mapping[str, tuple[dict[str, Any], float, float]] = {
    "fedavg": (CLIENT, 2.0, 32.0),
    "finetune": (EXAMPLE, 0.5, 8.0),
    "signature": ({**EXAMPLE, **FOUR}, 1.0, 16.0),
    "hidden": ({**CLIENT, **FOUR}, 8.0, 128.0),
    "cfl": (EXAMPLE, 4.0, 32.0),
    "flhc": (EXAMPLE, 4.0, 32.0),
    "ifca": ({**EXAMPLE, **FOUR}, 2.0, 32.0),
    "rdpcfl": ({**EXAMPLE, **FOUR}, 2.0, 32.0),
    "mrmtl": (EXAMPLE, 0.5, 8.0),
    "oneshot": ({**EXAMPLE, "tasks": 4, "features": "dct"}, 1.0, 16.0),
}
SWAP, TURN = "label-swap", "rotation"
DEVELOPED: dict[str, Setting] = {
    "fedavg": Setting("fedavg", "digits", "iid", 20, 60, 4.0, CLIENT),
    "signature": Setting("signature", "digits", SWAP, 16, 80, 4.0, {**EXAMPLE, **FOUR}),
    "signature few": Setting("signature", "digits", SWAP, 16, 80, 16.0, {**EXAMPLE, **FOUR}),
    "flhc": Setting("flhc", "digits", SWAP, 16, 80, 8.0, EXAMPLE),
    "cfl": Setting("cfl", "digits", SWAP, 16, 80, 8.0, EXAMPLE),
    "hidden": Setting("hidden", "digits", SWAP, 24, 50, 32.0, {**CLIENT, **FOUR}),
    "oneshot": Setting(
        "oneshot", "digits", TURN, 16, 80, 4.0, {**EXAMPLE, "tasks": 4, "features": "dct"}
    ),
}
# of single examples, where the noise of training is about as long as its updates, or longer
OF_DROWNED: dict[str, Setting] = {
    "signature 2": Setting("signature", "digits", SWAP, 12, 60, 2.0, {**EXAMPLE, **FOUR}),
    "signature 4": Setting("signature", "digits", TURN, 16, 40, 4.0, {**EXAMPLE, **FOUR}),
    "finetune 1": Setting("finetune", "digits", TURN, 16, 60, 1.0, EXAMPLE),
    "finetune 2": Setting("finetune", "digits", SWAP, 20, 40, 2.0, EXAMPLE),
    "finetune 3": Setting("finetune", "digits", SWAP, 16, 60, 0.5, EXAMPLE),
    "finetune 4": Setting("finetune", "digits", TURN, 12, 50, 4.0, EXAMPLE),
    "finetune 5": Setting("finetune", "mnist", SWAP, 16, 80, 2.0, {**EXAMPLE, **WHOLE}),
    "finetune 6": Setting("finetune", "fashion_mnist", TURN, 12, 80, 8.0, {**EXAMPLE, **WHOLE}),
    "fedavg 2": Setting("fedavg", "digits", TURN, 16, 60, 2.0, EXAMPLE),
    "mrmtl 1": Setting("mrmtl", "digits", TURN, 16, 60, 1.0, EXAMPLE),
    "ifca 4": Setting("ifca", "digits", SWAP, 16, 60, 4.0, {**EXAMPLE, **FOUR}),
}
# secure sums over so many clients take minutes, and have the noise of a trusted server
TRUSTED = {"aggregation": "plain", "placement": "central"}
OF_OTHERS: dict[str, Setting] = {
    "field signature": Setting(
        "signature", "mnist", SWAP, 21, 300, 4.0, {**EXAMPLE, **FOUR, **WHOLE}
    ),
    "field fedavg": Setting("fedavg", "mnist", TURN, 21, 300, 4.0, {**EXAMPLE, **WHOLE}),
    "hidden": Setting("hidden", "mnist", SWAP, 200, 100, 8.0, {**CLIENT, **FOUR, **TRUSTED}),
}


def drawn(part_name: str) -> dict[str, Setting]:
    """Return settings that are drawn at random, each protocol equally often.

    Args:
        part_name: "held-out" or "held-out anew".
    """
    seed, count = DRAWS[part_name]
    draw = np.random.default_rng(seed)
    names = list(PROTOCOLS)
    settings = {}
    for number in range(count):
        name = names[number % len(names)]
        options, low, high = PROTOCOLS[name]
        power = draw.integers(int(math.log2(low)), int(math.log2(high)), endpoint=True)
        data = str(draw.choice(["digits", "mnist", "fashion_mnist"]))
        if data != "digits" and options["dp_unit"] == "example":
            options = {**options, **WHOLE}
        settings[f"{name} {1 + number // len(names)}"] = Setting(
            name,
            data,
            str(draw.choice([SWAP, TURN])),
            int(draw.choice(CLIENTS[part_name])),
            int(draw.choice([40, 60])) * (1 if data == "digits" else 2),
            2.0 ** int(power),
            options,
        )
    return settings


def settings_of(part_name: str) -> dict[str, Setting]:
    """Return the settings of a part by name.

    Args:
        part_name: one of `PARTS`, or `MISSES`.
    """
    if part_name == NEW:
        return drawn(NEW)
    if part_name == MISSES:
        return {name: drawn(NEW)[name] for name in MISSED}
    fixed = {DEVELOPMENT: DEVELOPED, DROWNED: OF_DROWNED}
    return fixed.get(part_name) or {**OF_OTHERS, **drawn(HELD_OUT)}


def grid_of(setting: Setting) -> list[dict[str, Any]]:
    """Return the options of a setting's grid.

    Args:
        setting: of the runs.
    """
    mechanisms = GRIDS.get(setting.protocol, [{}])
    if setting.protocol not in GRIDS and setting.options["dp_unit"] == "client":
        mechanisms = PLACES
    grid = []
    trained = NETWORKS_AND_ROUNDS + (FEWER if setting.options["dp_unit"] == "client" else [])
    for (network, rounds), mechanism in itertools.product(trained, mechanisms):
        # before its clusters FL+HC trains for ten rounds
        if setting.protocol == "flhc" and rounds <= 10:
            continue
        if network == "linear" or mechanism == mechanisms[min(1, len(mechanisms) - 1)]:
            grid.append({"model": network, "rounds": rounds, **mechanism})
    return grid


def cells(part_name: str, seeds: int) -> list[Cell]:
    """Return setting by options by seed.

    Args:
        part_name: one of `PARTS`, or `MISSES`.
        seeds: how many.
    """
    grid: list[Cell] = []
    for name, setting in settings_of(part_name).items():
        others = grid_of(setting)
        if part_name == MISSES:
            others = [by_setting[name] for by_setting in (MISSED, FORMER) if name in by_setting]
        texts = [DEFAULT, *(json.dumps(options) for options in others)]
        grid += product(part=[part_name], setting=[name], options=texts)
    first = FIRST_SEED[part_name]
    return with_seeds(grid, range(first, first + seeds))


@lru_cache(maxsize=4)
def clients_of(part_name: str, name: str, seed: int) -> Federation:
    """Return the clients of a setting.

    Args:
        part_name: of the setting.
        name: of the setting.
        seed: of the federation.
    """
    setting = settings_of(part_name)[name]
    clusters = None if setting.shift == "iid" else 4
    return Federation.simulate(
        setting.data,
        scenario=scenario(setting.shift, clusters),
        clients=setting.clients,
        samples=setting.samples,
        seed=seed,
    )


def measure(cell: Cell) -> dict[str, Any]:
    """Run a setting with some options.

    Args:
        cell: one of `cells`.

    Returns:
        Mean accuracy, ARI, and what was chosen.
    """
    setting = settings_of(cell["part"])[cell["setting"]]
    federation = clients_of(cell["part"], cell["setting"], cell["seed"])
    protocol = protocol_class(setting.protocol)
    options = {**setting.options, "target_epsilon": setting.epsilon}
    if cell["options"] == DEFAULT:
        method = protocol(**options)
    else:
        method = as_told(protocol, {"clip": 1.0, **options, **json.loads(cell["options"])})
    fitted = method.fit(federation, SEEDED)
    return {
        "accuracy": float(np.nanmean(fitted.scores_)),
        "ari": None if fitted.agreement_ is None else fitted.agreement_["ari"],
        "chosen": json.dumps(fitted.kept_.learned.config.get("chosen", {})),
        "noise": float(fitted.kept_.learned.config["noise"]),
    }


def judged(part_name: str, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each setting the default beside the best of the grid.

    Args:
        part_name: of the settings.
        rows: of the sheet.
    """
    verdicts = []
    for name, setting in settings_of(part_name).items():
        scores: dict[str, dict[str, float]] = {}
        chosen = ""
        for row in rows:
            if (row["part"], row["setting"], row["status"]) == (part_name, name, "done"):
                scores_by_seed = scores.setdefault(row["options"], {})
                scores_by_seed[row["seed"]] = float(row["accuracy"])
                chosen = row["chosen"] if row["options"] == DEFAULT else chosen
        # seeds of which every run is done
        seeds = set.intersection(*map(set, scores.values())) if scores else set()
        of_default = scores.pop(DEFAULT, {})
        default_scores = {seed: score for seed, score in of_default.items() if seed in seeds}
        if not default_scores or not scores:
            continue
        best = max(scores, key=lambda key: fmean(scores[key][seed] for seed in default_scores))
        best_mean = fmean(scores[best][seed] for seed in default_scores)
        fair = fmean(_fairly_best(scores, default_scores, seed) for seed in default_scores)
        mean = fmean(default_scores.values())
        verdicts.append(
            {
                "part": part_name,
                "setting": name,
                "protocol": setting.protocol,
                "data": setting.data,
                "clients": setting.clients,
                "epsilon": setting.epsilon,
                "chosen": _in_words(chosen),
                "accuracy": f"{mean:.3f}",
                "best": f"{best_mean:.3f}",
                "best_options": _in_words(best),
                "gap": f"{fair - mean:.3f}",
                "within": fair - mean <= MARGIN,
                "lost": mean < 1 / CLASSES + ABOVE_CHANCE <= fair,
                "seeds": len(default_scores),
            }
        )
    return verdicts


def _fairly_best(
    scores: Mapping[str, Mapping[str, float]], seeds: Mapping[str, float], seed: str
) -> float:
    """Return the accuracy on a seed of the options that are best on the others.

    Args:
        scores: by options and seed.
        seeds: all of them.
        seed: one of them.
    """
    others = [other for other in seeds if other != seed] or [seed]
    best = max(scores, key=lambda key: fmean(scores[key][other] for other in others))
    return scores[best][seed]


def compared(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return for each setting of `misses` how far the default is behind other options.

    Args:
        rows: of the sheet.

    Returns:
        A line for each setting and other options, with the mean lead of these over the default in
        pairs of one federation, and its 95 % interval (Student's t).
    """
    from scipy.stats import t

    done: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if (row["part"], row["status"]) == (MISSES, "done"):
            done.setdefault((row["setting"], row["options"]), {})[row["seed"]] = row
    lines = []
    for (name, options), others in done.items():
        default = done.get((name, DEFAULT), {})
        seeds = sorted(default.keys() & others.keys())
        if options == DEFAULT or len(seeds) < 2:
            continue
        default_accuracies = [float(default[seed]["accuracy"]) for seed in seeds]
        other_accuracies = [float(others[seed]["accuracy"]) for seed in seeds]
        leads = np.subtract(other_accuracies, default_accuracies)
        half = t.ppf(0.975, len(seeds) - 1) * leads.std(ddof=1) / math.sqrt(len(seeds))
        lines.append(
            {
                "setting": name,
                "chosen": _in_words(default[seeds[0]]["chosen"]),
                "other": _in_words(options),
                "accuracy": f"{fmean(default_accuracies):.3f}",
                "accuracy_other": f"{fmean(other_accuracies):.3f}",
                "lead": f"{leads.mean():.3f}",
                "low": f"{leads.mean() - half:.3f}",
                "high": f"{leads.mean() + half:.3f}",
                "worse": leads.mean() - half > 0,
                "seeds": len(seeds),
            }
        )
    return lines


def _in_words(options: str) -> str:
    """Return options as on the command line, without the clip norm."""
    values = json.loads(options)
    values.pop("clip", None)
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in values.items())


def main(argv: Sequence[str] | None = None) -> Path:
    """Run what is missing, and print how the defaults compare."""
    parser = parser_of(__doc__, seeds=2, minutes=15.0)
    parser.add_argument("--part", choices=(*PARTS, MISSES), default=NEW)
    chosen = read_options(parser, argv)
    sheet = Sheet("target_runs", RESULTS)
    sheet.fill(cells(chosen.part, chosen.seeds), measure, chosen.minutes)
    rows = read(sheet.path)
    lines = [line for part_name in PARTS for line in judged(part_name, rows)]
    for part_name in PARTS:
        some = [line for line in lines if line["part"] == part_name]
        within = sum(line["within"] for line in some)
        lost = sum(line["lost"] for line in some)
        print(f"{part_name}: {within} of {len(some)} within {MARGIN}, {lost} at chance")
    misses = compared(rows)
    for line in misses:
        print(", ".join(f"{name} {value}" for name, value in line.items()))
    if misses:
        write("target_misses", misses)
    return write("target", lines)


if __name__ == "__main__":
    print(main())
