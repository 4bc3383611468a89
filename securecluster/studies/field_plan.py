"""The field: methods beside the built-in ones, at equal ε and equal budget, on named settings.

A setting says how clients are dealt out, and how long every method trains. Each method is tuned
alike, by the same learning rates on federations of another seed; those of `_own_choices` also by
an option of their own. What was chosen is run on the seeds that are compared.

The hash of a setting covers all of this but for ε, the seeds and the methods. Rows with the same
hash and the same digest of the data may stand in one table, whoever measured them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import product
from typing import Any

from securecluster.commands.failures import Row
from securecluster.core.serialization import typed
from securecluster.data.simulation import Simulation
from securecluster.errors import RunFolderError, UsageError, unknown
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.runtime.settings import Settings
from securecluster.studies import sweep_plan
from securecluster.studies.sweep_plan import EPSILON, Variant
from securecluster.studies.sweep_runner import DONE

METRIC = "accuracy"
FIRST_SEED = 2000  # no constant was found on this seed and those that follow
TUNING_SEED = 100
# those that are set beside where the user names none; `OTHERS` are the rest
BUILT_IN = (
    "signature", "oneshot", "pacfl", "flux", "clove", "ifca", "cflgp", "rdpcfl", "mrmtl", "fedavg",
    "finetune", "local",
)  # fmt: skip
# NSIM learns positions
OTHERS = tuple(name for name in PROTOCOLS if name not in (*BUILT_IN, "nsim"))
# derived keys, so that everybody repeats the stored rows bit for bit on a processor of their kind
SETTINGS = Settings(transcript="none", threads=1, device="cpu", keys_from_seed=True)
DELTA = 1e-5
ALL = 10_000  # samples of a step: more than any client has
HASH_LETTERS = 12
RATES = (2.0, 4.0, 8.0, 16.0)


@dataclass(frozen=True)
class Setting:
    """How clients differ, and the budget of every method.

    Args:
        name: of the setting.
        simulation: options that make the clients, whatever their seed.
        k: number of clusters that methods are told that ask for it.
        rates: learning rates among which each method's is chosen.
        rounds: of each run; in one, clients take one step over all of their samples.
        model: network.
        clip: norm.
    """

    name: str
    simulation: Simulation
    k: int
    rates: tuple[float, ...] = (0.5, 1.0, 2.0, 4.0)
    rounds: int = 20
    model: str = "linear"
    clip: float = 1.0

    def hash(self, dp_unit: str) -> str:
        """Return what two tables must share to be compared, in hex.

        Args:
            dp_unit: "client" or "example".
        """
        given = asdict(self.simulation)
        for name, value in asdict(Simulation()).items():
            if given[name] == value and name != "data":  # so that a new option changes no hash
                del given[name]
        content = {**asdict(self), "simulation": given, "dp_unit": dp_unit, "delta": DELTA}
        text = json.dumps({**content, "tuned on": TUNING_SEED}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:HASH_LETTERS]

    def budget(self, protocol: str, dp_unit: str) -> dict[str, Any]:
        """Return the options that are the same for all methods, as far as a protocol has them.

        Args:
            protocol: its name.
            dp_unit: "client" or "example".
        """
        options = {
            "rounds": self.rounds,
            "epochs": 1,
            "batch_size": ALL,
            "model": self.model,
            "clip": self.clip,
            "mask": "none",
            "dp_unit": dp_unit,
            "delta": DELTA,
            "k": self.k,
            "tasks": self.k,
        }
        if protocol == "srfca":  # trains alone first, for as many rounds as together
            half = self.rounds // 2
            options |= {"rounds": self.rounds - half, "local_rounds": half}
        names = {option.name for option in fields(protocol_class(protocol))}
        return {name: value for name, value in options.items() if name in names}


# options of `budget` that no method may change
BUDGET = frozenset({"rounds", "local_rounds", "epochs", "batch_size", "dp_unit", "delta", "model"})


def _images(name: str, scenario: str, samples: int = 300, clients: int = 16) -> Setting:
    """Return a setting of MNIST in four clusters."""
    simulation = Simulation(
        "mnist14", scenario=scenario, clients=clients, clusters=4, samples=samples
    )
    return Setting(name, simulation, 4, rates=RATES, rounds=10)


def _digits(name: str, scenario: str) -> Setting:
    """Return a setting of the embedded digits in two clusters, for `--quick`."""
    simulation = Simulation("digits", scenario=scenario, clients=8, clusters=2, samples=150)
    return Setting(name, simulation, 2, rates=(1.0, 2.0, 4.0, 8.0), rounds=10)


def _own_clients(
    name: str, data: str, clients: int, samples: int | None, model: str = "linear"
) -> Setting:
    """Return a setting of a data set with clients of its own."""
    simulation = Simulation(data, scenario="natural", clients=clients, samples=samples)
    return Setting(name, simulation, 4, rates=RATES, rounds=10, model=model)


FULL = (
    _images("swaps", "label-swap"),
    _images("rotations", "rotation"),
    _images("permutations", "label-permutation"),
    _images("shares", "dirichlet"),
    _images("dirichlet", "label-swap+client-dirichlet"),
    _images("few", "label-swap", samples=60),
    _images("many", "label-swap", clients=64),
    _own_clients("writers", "femnist14", clients=16, samples=100),
    _own_clients("hospitals", "hospitals", clients=20, samples=None),
    _own_clients("roles", "shakespeare", clients=8, samples=20, model="auto"),
)
SLOW = ("roles",)  # a language model
QUICK = (_digits("swaps", "label-swap"), _digits("rotations", "rotation"))


def settings_of(names: Sequence[str], quick: bool) -> tuple[Setting, ...]:
    """Return settings by name; where none is named, all but `SLOW`.

    Args:
        names: of the settings.
        quick: those of the embedded digits.

    Raises:
        UsageError: an unknown name, or one given twice.
    """
    known = {setting.name: setting for setting in (QUICK if quick else FULL)}
    for name in names:
        if name not in known:
            raise unknown("setting", name, known)
        if list(names).count(name) > 1:
            raise UsageError(f"setting {name} is named twice: name it once")
    return tuple(known[name] for name in names or known if names or name not in SLOW)


@dataclass(frozen=True)
class Cell(sweep_plan.Cell):
    """One run of the field."""

    setting: str

    def further_scores(self, fitted: Any, federation: Any) -> Row:
        """Return no scores: no table of a field has any, and they would take most of the time."""
        return {}


@dataclass(frozen=True)
class Plan:
    """Everything that config.json needs to repeat a field.

    Args:
        own: the user's methods.
        beside: names of built-in methods.
        epsilons: targets, ascending.
        seeds: of the federations that are compared.
        settings: how clients differ.
        dp_unit: "client" or "example".
        digests: of the data of each setting, of the first seed.
        programs: name of each protocol, and the digest of its source and of this version.
        stored: setting, method and ε of which results are stored, so that no run is needed.
    """

    own: tuple[Variant, ...]
    beside: tuple[str, ...]
    epsilons: tuple[float, ...]
    seeds: tuple[int, ...]
    settings: tuple[Setting, ...]
    dp_unit: str
    digests: tuple[str, ...] = ()
    programs: tuple[tuple[str, str], ...] = ()
    stored: tuple[tuple[str, str, float], ...] = ()

    def content(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        as_read: dict[str, Any] = json.loads(json.dumps({"field": asdict(self)}))
        return as_read

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Plan:
        """Return the plan that `content` describes.

        Raises:
            RunFolderError: it does not parse.
        """
        try:
            return typed(content["field"], cls)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise RunFolderError(
                f"the plan of the field does not parse ({type(error).__name__}): start it anew"
            ) from None

    @property
    def variants(self) -> tuple[Variant, ...]:
        """Return all methods, the user's first."""
        return (*self.own, *(Variant(name, name, {}) for name in self.beside))

    def setting(self, name: str) -> Setting:
        """Return a setting by its name."""
        return next(setting for setting in self.settings if setting.name == name)

    def tuning(self) -> list[Cell]:
        """Return the runs by which learning rates are chosen, numbered from 0."""
        cells: list[Cell] = []
        for setting, epsilon, variant in self._open():
            simulation = replace(setting.simulation, seed=TUNING_SEED)
            for choice in self.choices(setting, variant):
                cells.append(self._cell(len(cells), setting, choice, epsilon, simulation))
        return cells

    def runs(self, chosen: Mapping[tuple[str, float, str], Variant]) -> list[Cell]:
        """Return the runs that are compared, numbered from 0, all of one seed before the next.

        Args:
            chosen: the variant of each setting, ε and method, as `chosen_of` returns it.
        """
        cells: list[Cell] = []
        for seed in self.seeds:
            for setting, epsilon, variant in self._open():
                simulation = replace(setting.simulation, seed=seed)
                best = chosen[setting.name, epsilon, variant.label]
                cells.append(self._cell(len(cells), setting, best, epsilon, simulation))
        return cells

    def choices(self, setting: Setting, variant: Variant) -> list[Variant]:
        """Return the variants of a method among which one is chosen, each with a label of its own.

        Args:
            setting: where it runs.
            variant: the method.
        """
        budget = setting.budget(variant.protocol, self.dp_unit)
        names = {option.name for option in fields(protocol_class(variant.protocol))}
        choices = []
        for options in _own_choices(variant.protocol, setting):
            own = {n: v for n, v in options.items() if n in names and n not in variant.options}
            label = ",".join(f"{name}={value:g}" for name, value in own.items())
            choice = Variant(
                f"{variant.label} [{label}]", variant.protocol, {**budget, **own, **variant.options}
            )
            if choice not in choices:
                choices.append(choice)
        return choices

    def chosen_of(
        self, cells: Sequence[Cell], rows: Sequence[Row]
    ) -> dict[tuple[str, float, str], Variant]:
        """Return the most accurate choice by setting, ε and method; the first where none ran.

        Args:
            cells: the runs of the tuning.
            rows: of these runs.
        """
        scores = {row["run"]: row[METRIC] for row in rows if row["status"] == DONE}
        best: dict[tuple[str, float, str], tuple[float, Variant]] = {}
        for cell in cells:
            label, _, _ = cell.variant.label.rpartition(" [")
            score = scores.get(cell.number)
            score = -math.inf if score is None else float(score)
            key = (cell.setting, cell.level, label)
            if key not in best or score > best[key][0]:
                best[key] = (score, replace(cell.variant, label=label))
        return {key: variant for key, (_, variant) in best.items()}

    def _open(self) -> Iterator[tuple[Setting, float, Variant]]:
        """Yield setting, ε and method of which no results are stored."""
        for setting, epsilon, variant in product(self.settings, self.epsilons, self.variants):
            if (setting.name, variant.label, epsilon) not in self.stored:
                yield setting, epsilon, variant

    def _cell(
        self, number: int, setting: Setting, variant: Variant, epsilon: float, clients: Simulation
    ) -> Cell:
        """Return a run."""
        return Cell(number, variant, EPSILON, epsilon, clients, SETTINGS, setting.name)


def _own_choices(protocol: str, setting: Setting) -> list[dict[str, float]]:
    """Return the options that are tried: learning rates, and of baselines an option of their own.

    Args:
        protocol: its name.
        setting: where it runs.
    """
    choices: list[dict[str, float]] = []
    for rate in setting.rates:
        if protocol == "finetune":  # within the same rounds
            for share in (4, 2):
                choices.append({"lr": rate, "tune_rounds": max(1, setting.rounds // share)})
        elif protocol == "mrmtl":  # a step pulls towards the mean by the product of both
            for pull in (0.1, 0.3):
                choices.append({"lr": rate, "regularization": pull / rate})
        else:
            choices.append({"lr": rate})
    return choices
