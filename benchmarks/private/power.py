"""Compare the power check of private runs with what happened in them.

python -m benchmarks.private.power [--seeds 3] [--minutes 20]

The check (`securecluster.power_check`) says of clusters and of training whether they carry, are
doubtful or are drowned, from public quantities alone. What happened is measured against the same
runs without noise:

- clusters are "found" where the mean ARI is at least nine tenths of that without noise, and "lost"
  where it is at most a quarter of it;
- training is "found" where the mean accuracy above chance is at least nine tenths of that without
  noise, and "lost" where it is at most a half; it is compared where clusters were found, or where
  the protocol looks for none, since models for the wrong clients are no matter of noise in
  training.

Between the two values what happened is "between", with which no verdict but "doubtful" agrees.
Settings without clusters in the run without noise are left out.

`noise` has the runs of `benchmarks.private.noise` on digits, and `field` those of
`benchmarks.private.field --tune` on MNIST: the limits were chosen on both. `new` has settings on
MNIST and Fashion-MNIST that were looked at once, when the limits no longer changed; six of them
were moved since, on `field`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from benchmarks.grid import as_told, parser_of, product, read_options, with_seeds
from benchmarks.private import field
from benchmarks.sheet import Cell, Row, Sheet, distinct
from benchmarks.table import PAPERS, RESULTS, SEEDED, read, write
from securecluster import Federation, LabelSwap, Rotation
from securecluster.parties.power_check import CARRIES, CLUSTERS, DROWNED, TRAINING
from securecluster.parties.run_check import power_check
from securecluster.protocols.registry import protocol_class

FOUND, BETWEEN, LOST = "found", "between", "lost"
ENOUGH = 0.9
LITTLE = {CLUSTERS: 0.25, TRAINING: 0.5}
FIRST_SEED = 2100
CLASSES = 10
# options of the parts of benchmarks.private.noise, and the option that its levels are
PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "updates": ({"model": "mlp-32", "rounds": 20}, "noise"),
    "eigenvectors": ({"model": "mlp-32", "rounds": 5}, "noise"),
    "epsilon": ({"model": "linear", "rounds": 20}, "target_epsilon"),
}
# mechanisms whose multiplier is an option of its own, which a sweep over the noise sets, too
OWN_NOISE = {"signature": "signature_noise", "gram": "gram_noise", "naive": "gram_noise"}
EXAMPLE = {"dp_unit": "example", "clip": 1.0}
CLIENT = {"dp_unit": "client", "clip": 1.0}
SHARED = {"placement": "distributed", "aggregation": "secagg"}


@dataclass(frozen=True)
class Setting:
    """Runs of one protocol on one kind of federation, at some levels of noise.

    Attributes:
        protocol: its name.
        data: a data set.
        scenario: "swap" or "rotation", into four clusters.
        clients: how many.
        samples: of each.
        options: of the protocol.
        by: the option that is the level.
        levels: values of it; without it, the run has no noise.
        also: options that have the level's value, too.
    """

    protocol: str
    data: str
    scenario: str
    clients: int
    samples: int
    options: Mapping[str, Any]
    by: str
    levels: tuple[float, ...]
    also: tuple[str, ...] = ()


SHORT = {"rounds": 12, "model": "linear"}
SETTINGS: dict[str, Setting] = {
    "cfl": Setting("cfl", "mnist", "swap", 16, 120, {**SHORT, **CLIENT}, "noise", (0.01, 0.1)),
    "cfl sketch": Setting(
        "cfl", "fashion_mnist", "swap", 24, 100,
        {**SHORT, **CLIENT, "sketch": 128}, "noise", (0.03, 0.3),
    ),
    "cfl examples": Setting(
        "cfl", "mnist", "swap", 12, 300, {**SHORT, **EXAMPLE}, "target_epsilon", (1.0, 4.0)
    ),
    "flhc": Setting(
        "flhc", "mnist", "rotation", 16, 150, {**SHORT, **CLIENT}, "noise", (0.015, 0.2)
    ),
    "srfca": Setting(
        "srfca", "fashion_mnist", "swap", 12, 150,
        {**SHORT, **CLIENT, "distance": "l2"}, "noise", (0.01, 0.1),
    ),
    "ifca": Setting(
        "ifca", "mnist", "swap", 20, 150,
        {**SHORT, **CLIENT, "k": 4, "starts": 2}, "noise", (0.003, 0.1),
    ),
    "clove": Setting(
        "clove", "fashion_mnist", "rotation", 16, 200,
        {**SHORT, **EXAMPLE, "k": 4}, "target_epsilon", (1.0, 16.0),
    ),
    "rdpcfl": Setting(
        "rdpcfl", "mnist", "rotation", 16, 200,
        {**SHORT, **EXAMPLE, "k": 4}, "target_epsilon", (1.0, 32.0),
    ),
    "signature": Setting(
        "signature", "fashion_mnist", "swap", 16, 250,
        {**SHORT, **EXAMPLE, "k": 4}, "target_epsilon", (0.5, 6.0),
    ),
    "oneshot": Setting(
        "oneshot", "mnist", "rotation", 16, 200,
        {**SHORT, **EXAMPLE, "tasks": 4, "features": "dct"}, "noise", (0.5, 8.0), ("gram_noise",),
    ),
    "hidden": Setting(
        "hidden", "mnist", "rotation", 100, 40,
        {**SHORT, **CLIENT, **SHARED, "k": 4}, "noise", (0.3, 6.0),
    ),
    "fedavg local": Setting(
        "fedavg", "mnist", "rotation", 24, 100, {**SHORT, **CLIENT}, "noise", (0.05, 1.5)
    ),
    "fedavg shared": Setting(
        "fedavg", "fashion_mnist", "rotation", 40, 60,
        {**SHORT, **CLIENT, **SHARED}, "noise", (0.5, 10.0),
    ),
    "fedavg examples": Setting(
        "fedavg", "mnist", "rotation", 16, 100, {**SHORT, **EXAMPLE}, "target_epsilon", (0.5, 8.0)
    ),
    "local examples": Setting(
        "local", "fashion_mnist", "swap", 12, 150,
        {**SHORT, **EXAMPLE}, "target_epsilon", (0.5, 32.0),
    ),
}  # fmt: skip


def cells(seeds: int) -> list[Cell]:
    """Return setting by level by seed; the level 0 is without noise.

    Args:
        seeds: how many.
    """
    grid: list[Cell] = []
    for name, setting in SETTINGS.items():
        grid += product(setting=[name], level=[0.0, *setting.levels])
    return with_seeds(grid, range(FIRST_SEED, FIRST_SEED + seeds))


@lru_cache(maxsize=2)
def dealt(name: str, seed: int) -> Federation:
    """Return the clients of a setting.

    Args:
        name: one of `SETTINGS`.
        seed: of the federation.
    """
    setting = SETTINGS[name]
    scenario = LabelSwap(4) if setting.scenario == "swap" else Rotation(4)
    return Federation.simulate(
        setting.data, scenario=scenario, clients=setting.clients, samples=setting.samples, seed=seed
    )


def method_of(name: str, level: float) -> Any:
    """Return the protocol of a setting.

    Args:
        name: one of `SETTINGS`.
        level: of its noise; 0 for none.
    """
    setting = SETTINGS[name]
    options = dict(setting.options)
    if level:
        options |= dict.fromkeys((setting.by, *setting.also), level)
    else:
        options.pop("placement", None)
    return as_told(protocol_class(setting.protocol), options)


def measure(cell: Cell) -> dict[str, Any]:
    """Run one setting.

    Args:
        cell: one of `cells`.

    Returns:
        Adjusted Rand index and mean accuracy.
    """
    federation = dealt(cell["setting"], cell["seed"])
    fitted = method_of(cell["setting"], cell["level"]).fit(federation, SEEDED)
    return {"ari": fitted.agreement_["ari"], "accuracy": float(np.nanmean(fitted.scores_))}


def outcome(use: str, measured: float, without_noise: float) -> str:
    """Return what happened, "found", "between" or "lost".

    Args:
        use: "clusters" or "training".
        measured: ARI, or accuracy above chance.
        without_noise: the same without noise, above 0.
    """
    share = measured / without_noise
    if share >= ENOUGH:
        return FOUND
    return LOST if share <= LITTLE[use] else BETWEEN


def agrees(verdict: str, happened: str) -> bool:
    """Return whether a verdict is what happened; a doubtful one excludes nothing.

    Args:
        verdict: of the check.
        happened: as `outcome` returns it.
    """
    expected = {CARRIES: FOUND, DROWNED: LOST}.get(verdict)
    return expected is None or expected == happened


@dataclass(frozen=True)
class Runs:
    """Runs at one level of noise beside those without.

    Attributes:
        source: "noise", "field" or "new".
        name: of the setting.
        level: of its noise.
        method: the protocol with its options.
        federation: the clients.
        scores: mean ARI and accuracy.
        without: the same without noise.
    """

    source: str
    name: str
    level: float
    method: Any
    federation: Federation
    scores: tuple[float, float]
    without: tuple[float, float]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each use on which the check has a verdict."""
        check = power_check(self.method, self.federation)
        if check is None:
            return []
        looks = check.verdict(CLUSTERS) is not None
        are_found = looks and self.without[0] > 0 and self.scores[0] >= ENOUGH * self.without[0]
        chance = 1 / CLASSES
        compared = {}
        if looks and self.without[0] >= 0.5:
            compared[CLUSTERS] = (self.scores[0], self.without[0])
        if are_found or not looks:
            compared[TRAINING] = (self.scores[1] - chance, self.without[1] - chance)
        rows = []
        for use, (measured, without_noise) in compared.items():
            worst = check.worst(use)
            if worst is None:
                continue
            happened = outcome(use, measured, without_noise)
            column = 0 if use == CLUSTERS else 1
            row = {
                "source": self.source,
                "setting": self.name,
                "protocol": self.method.name,
                "level": self.level,
                "use": use,
                "kind": worst.kind,
                "ratio": round(worst.ratio, 3),
                "verdict": worst.verdict,
                "score": round(self.scores[column], 3),
                "without_noise": round(self.without[column], 3),
                "found": happened == FOUND,
                "between": happened == BETWEEN,
                "lost": happened == LOST,
                "agrees": agrees(worst.verdict, happened),
                "decided": worst.verdict in (CARRIES, DROWNED),
            }
            rows.append(row)
        return rows


def noise_runs() -> list[Runs]:
    """Return the runs of `benchmarks.private.noise` on digits, from its tables."""
    all_runs = []
    for part_name, (options, by) in PARTS.items():
        rows = read(RESULTS / f"noise_digits_{part_name}_runs.csv")
        done = [row for row in rows if row["status"] == "done"]
        for variant in distinct(done, "variant"):
            runs = [row for row in done if row["variant"] == variant]
            quiet = [row for row in runs if _level(row, by) is None]
            # without a run without noise, the one of least noise stands for it
            levels = sorted({_level(row, by) or 0.0 for row in runs} - {0.0})
            if not quiet:
                quietest = levels[0] if by == "noise" else levels[-1]
                quiet = [row for row in runs if _level(row, by) == quietest]
            for level in levels:
                at_level = [row for row in runs if _level(row, by) == level]
                method = _of_variant(variant, at_level[0], {**options, by: level})
                federation = _digits(at_level[0]["scenario"], int(at_level[0]["clients"]))
                scores, without = _scores(at_level), _scores(quiet)
                all_runs.append(Runs("noise", variant, level, method, federation, scores, without))
    return all_runs


def _level(row: Row, by: str) -> float | None:
    """Return the level of a run; None of one without noise."""
    value = float(row[by] or "inf")
    return None if value in (0.0, float("inf")) else value


def _scores(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the mean ARI and accuracy."""
    aris = [float(row["ari"]) for row in rows]
    accuracies = [float(row["accuracy"]) for row in rows]
    return fmean(aris), fmean(accuracies)


def _of_variant(variant: str, row: Row, options: dict[str, Any]) -> Any:
    """Return the protocol of a variant of a sweep, such as "cfl:sketch=64".

    Args:
        variant: its label.
        row: one of its runs.
        options: of all runs of its part, with the level.
    """
    name, _, assignments = variant.partition(":")
    protocol = protocol_class(name)
    options |= {"clip": float(row["clip"]), "dp_unit": row["dp_unit"]}
    for item in filter(None, assignments.split(",")):
        option, value = item.split("=")
        options[option.replace("-", "_")] = _value(value)
    for mechanism, option in OWN_NOISE.items():
        if mechanism in row["mechanism"] and "noise" in options:
            options[option] = options["noise"]
    return as_told(protocol, options)


def _value(text: str) -> int | float | str:
    """Return what an option of a variant is."""
    for value_type in (int, float):
        with suppress(ValueError):
            return value_type(text)
    return text


@lru_cache(maxsize=8)
def _digits(scenario: str, clients: int) -> Federation:
    """Return the clients of a part of `benchmarks.private.noise`; the check reads no data."""
    clusters = 2 if clients < 10 else 4
    differs = LabelSwap(clusters) if scenario == "label-swap" else Rotation(clusters)
    return Federation.simulate("digits", scenario=differs, clients=clients, seed=0)


def field_runs() -> list[Runs]:
    """Return the runs that choose settings of `benchmarks.private.field`, as far as they were made.

    A setting is a method with its own option, a learning rate and a shift. Its runs at the largest
    ε stand for those without noise.
    """
    path = PAPERS / f"{field.TUNING}.csv"
    done = [row for row in read(path) if row["status"] == "done"] if path.is_file() else []
    settings: dict[tuple[str, ...], dict[float, list[Row]]] = {}
    for row in done:
        key = (row["method"], row["lr"], row["own"], row["shift"])
        settings.setdefault(key, {}).setdefault(float(row["target"]), []).append(row)
    all_runs = []
    for (name, rate, option_number, shift), levels in settings.items():
        federation = _of_the_field(shift)
        quiet = levels.pop(max(field.EPSILONS), None)
        for target, rows in levels.items() if quiet else ():
            options = field.options_of(name, target, float(rate), int(option_number))
            method = as_told(field.METHODS[name].protocol, options)
            label = f"{name} {shift}"
            without = _scores(quiet or ())
            all_runs.append(
                Runs("field", label, target, method, federation, _scores(rows), without)
            )
    return all_runs


@lru_cache(maxsize=2)
def _of_the_field(shift: str) -> Federation:
    """Return clients of `benchmarks.private.field`; of their data the check reads nothing."""
    return field.clients_of(shift, field.SAMPLES, field.TUNING_SEEDS[0])


def new_runs(rows: Sequence[Row]) -> list[Runs]:
    """Return the runs of the new settings.

    Args:
        rows: of the sheet.
    """
    all_runs = []
    done = [row for row in rows if row["status"] == "done"]
    for name, setting in SETTINGS.items():
        by_level: dict[float, list[Row]] = {}
        for row in done:
            if row["setting"] == name:
                by_level.setdefault(float(row["level"]), []).append(row)
        for level in setting.levels:
            if 0.0 in by_level and level in by_level:
                scores, without = _scores(by_level[level]), _scores(by_level[0.0])
                federation = dealt(name, FIRST_SEED)
                method = method_of(name, level)
                all_runs.append(Runs("new", name, level, method, federation, scores, without))
    return all_runs


def main(argv: Sequence[str] | None = None) -> Path:
    """Run the new settings, compare all verdicts with what happened, and print how many agree."""
    chosen = read_options(parser_of(__doc__, seeds=3, minutes=20.0), argv)
    sheet = Sheet("power_runs", RESULTS)
    measured = sheet.fill(cells(chosen.seeds), measure, chosen.minutes)
    rows: list[dict[str, Any]] = []
    for runs in (*noise_runs(), *field_runs(), *new_runs(measured)):
        rows += runs.rows()
    for source in ("noise", "field", "new"):
        of_source = [row for row in rows if row["source"] == source]
        decided = [row for row in of_source if row["decided"]]
        agreeing = sum(row["agrees"] for row in decided)
        print(
            f"{source}: {agreeing} of {len(decided)} verdicts agree, "
            f"{len(of_source) - len(decided)} are doubtful"
        )
    return write("power", rows)


if __name__ == "__main__":
    print(main())
