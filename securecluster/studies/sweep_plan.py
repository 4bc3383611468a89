"""The plan of a sweep: which protocols run at which levels of noise, and with which seeds.

A level of noise is the multiplier of all that a protocol releases: its `noise`, and each option
whose name ends in `_noise`. A protocol that takes no such noise is recorded as refused. How many
runs go at the same time is no part of the plan.
"""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import lru_cache, partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from securecluster.commands import command_line
from securecluster.commands.command_line import Section
from securecluster.commands.failures import Row
from securecluster.core.option_groups import option_groups
from securecluster.core.serialization import typed
from securecluster.core.validation import check_whole_value
from securecluster.data.simulation import Simulation
from securecluster.errors import (
    RunFolderError,
    SecureClusterError,
    SecureClusterWarning,
    UsageError,
    quoted,
    unknown,
)
from securecluster.parties.derived import CHOSEN
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.options.signature_options import by_gradients
from securecluster.protocols.common.options.target_defaults import ALGORITHM
from securecluster.protocols.registry import keep, protocol_class, protocol_names
from securecluster.runtime.settings import Settings
from securecluster.studies import sweep_costs, sweep_runner
from securecluster.studies.comparison_options import given_params

if TYPE_CHECKING:
    from securecluster.data.facts import Facts

NOISE = "noise"
EPSILON = "epsilon"
VARIED = frozenset({"noise", "target_epsilon"})  # options of protocols that a sweep sets
MOST_SEEDS = 10_000


@dataclass(frozen=True)
class Variant:
    """A protocol with options of its own.

    Args:
        label: as the user typed it, or the protocol and its options.
        protocol: its name.
        options: values by name, as JSON has them.
    """

    label: str
    protocol: str
    options: Mapping[str, Any]

    def at(self, by: str, level: float) -> Any:
        """Return the protocol at a level.

        Noise of multiplier Z is put on all that the protocol releases: it is the value of `noise`
        and of each option whose name ends in `_noise` (`noise_options`). Options that the variant
        sets itself stay.
        Without a clip norm nothing but fields with a bound of their own, such as Gram matrices,
        can have noise, so `noise` is left out where there are such fields.

        Args:
            by: "noise" or "epsilon".
            level: the noise multiplier Z, or the target ε; infinite is a run without noise.

        Raises:
            UsageError: the protocol has no such option.
        """
        protocol_type = protocol_class(self.protocol)
        params = dict(self.options)
        if by == EPSILON:
            if math.isfinite(level):
                _check_option(protocol_type, "target_epsilon")
                params["target_epsilon"] = level
        elif level > 0:
            multipliers = noise_options(protocol_type(**params))
            others = [name for name in multipliers if name not in params]
            if others and params.get("clip") is None:
                params.update(dict.fromkeys(others, level))
            else:
                _check_option(protocol_type, "noise")
                params.update(dict.fromkeys(["noise", *others], level))
        return protocol_type(**params)


@dataclass(frozen=True)
class Plan:
    """Everything that config.json needs to repeat a sweep.

    Args:
        variants: the protocols.
        by: "noise" or "epsilon".
        levels: ascending, of either.
        seeds: of the federations, one for each run of a variant at a level.
        simulation: options that make the clients, whatever their seed.
        settings: of every run.
    """

    variants: tuple[Variant, ...]
    by: str
    levels: tuple[float, ...]
    seeds: tuple[int, ...]
    simulation: Simulation
    settings: Settings

    def content(self) -> dict[str, Any]:
        """Return the plan as JSON values; an infinite ε is null."""
        content = asdict(self)
        content["levels"] = [_as_json(level) for level in self.levels]
        as_read: dict[str, Any] = json.loads(json.dumps(content))
        return as_read

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Plan:
        """Return the plan that `content` describes.

        Raises:
            RunFolderError: it does not parse.
        """
        try:
            if content["by"] not in (NOISE, EPSILON):
                raise ValueError
            return cls(
                tuple(typed(variant, Variant) for variant in content["variants"]),
                content["by"],
                tuple(_level(value) for value in content["levels"]),
                tuple(typed(content["seeds"], list[int])),
                typed(content["simulation"], Simulation),
                typed(content["settings"], Settings),
            )
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise RunFolderError(
                f"the plan of the sweep does not parse ({type(error).__name__}): start it anew"
            ) from None

    def cells(self) -> Iterator[Cell]:
        """Yield the runs, numbered from 0, all of one seed before those of the next."""
        number = 0
        for seed in self.seeds:
            simulation = replace(self.simulation, seed=seed)
            for level in self.levels:
                for variant in self.variants:
                    yield Cell(number, variant, self.by, level, simulation, self.settings)
                    number += 1


def _as_json(level: float) -> float | None:
    """Return a level as JSON has it: null for an infinite ε."""
    if math.isinf(level):
        return None
    return level


def _level(value: float | None) -> float:
    """Return the level that `_as_json` wrote."""
    if value is None:
        return math.inf
    return float(value)


@dataclass(frozen=True)
class Cell(sweep_runner.Cell):
    """One run of a sweep.

    Args:
        number: from 0.
        variant: the protocol.
        by: "noise" or "epsilon".
        level: of either.
        simulation: with the run's seed.
        settings: of the run.
    """

    number: int
    variant: Variant
    by: str
    level: float
    simulation: Simulation
    settings: Settings

    @property
    def label(self) -> str:
        """Return what the run is called."""
        return self.variant.label

    def described(self) -> Row:
        """Return what is known before the run, by column."""
        row: Row = {
            "run": self.number,
            "protocol": self.variant.protocol,
            "variant": self.variant.label,
            "data": self.simulation.data,
            "scenario": self.simulation.scenario,
            "seed": self.simulation.seed,
            "noise": None,
            "target_epsilon": None,
        }
        if self.by == NOISE:
            row["noise"] = self.level
        else:
            row["target_epsilon"] = self.level
        # with some noise also at the level without: the mechanism is the variant's
        noisy = self.variant.at(self.by, 1.0)
        row["mechanism"] = mechanism(noisy)
        for name in ("dp_unit", "clip", "delta"):
            row[name] = getattr(noisy, name)
        return row

    def measured(self, federation: Any) -> Row:
        """Carry out the run, and return what it measured, by column.

        Args:
            federation: the clients; None to deal them out.
        """
        federation = federation or dealt(self.simulation)
        protocol = self.variant.at(self.by, self.level)
        protocol.fit(federation, self.settings)
        config = protocol.kept_.learned.config
        ledger = protocol.ledger_
        price = ledger.price(protocol.delta)
        agreement = protocol.agreement_ or {"ari": None}
        worst = min
        if not federation.objective.higher:
            worst = max
        measured = {
            "data": federation.data,
            "scenario": federation.scenario,
            "clients": len(federation),
            "epsilon": price.epsilon,
            "clusters": len(set(protocol.labels_.tolist())),
            "ari": agreement["ari"],
            "pearson": _correlation(protocol.history_),
            protocol.metric_: _finite(protocol.scores_.mean()),
            f"worst_{protocol.metric_}": _finite(worst(protocol.scores_)),
            **self.further_scores(protocol, federation),
            "up": protocol.bytes_["up"],
            "down": protocol.bytes_["down"],
            "servers": protocol.bytes_["servers"],
            "rounds": len(protocol.history_),
            "seconds": round(protocol.seconds_, 3),
            "power": (protocol.kept_.learned.power or {}).get("summary"),
            "spent": sweep_costs.as_json(ledger.costliest(protocol.delta)),
            "chosen": _as_text(config.get(CHOSEN, {})),
        }
        if self.by == EPSILON:
            # a target chooses what is not given
            settled = protocol.result_.method
            measured["noise"] = float(config["noise"])
            measured |= {"mechanism": mechanism(settled), "clip": settled.privacy.clip}
        return measured

    def further_scores(self, fitted: Any, federation: Any) -> Row:
        """Return the scores beside the metric, and report fields, by column.

        Args:
            fitted: the protocol.
            federation: the clients.
        """
        from securecluster.results.declared import own_fields
        from securecluster.results.scores import study_scores

        return study_scores(fitted.kept_, federation.objective, own_fields(fitted.result_))


def run_cells(cells: Sequence[Cell]) -> list[Row]:
    """Carry out runs, whose clients train together if they are several; what worker processes do.

    Args:
        cells: runs of one variant.
    """
    from securecluster.core.devices import choose_device, cpu_threads, reproducible
    from securecluster.training.joint_training import in_threads
    from securecluster.training.stacked_runs import StackedRuns

    with warnings.catch_warnings():
        # of runs whose models learned nothing, as many do at the highest noise
        warnings.simplefilter("ignore", SecureClusterWarning)
        if len(cells) == 1:
            return [cells[0].row()]
        try:
            federations: dict[int, Any] = {}  # which the threads share
            runs = []
            for cell in cells:
                seed = cell.simulation.seed
                if seed not in federations:
                    federations[seed] = dealt(cell.simulation)
                runs.append(partial(cell.row, federations[seed]))
            settings = cells[0].settings
            device = choose_device(settings.device)
            # these settings are the process's: each run would restore them while others still train
            with cpu_threads(settings.threads), reproducible(device):
                return in_threads(StackedRuns().train, runs)
        except RunFolderError:
            raise
        except Exception as error:
            return [cell.failed_by(error) for cell in cells]


@lru_cache(maxsize=2)
def dealt(simulation: Simulation) -> Any:
    """Return the federation of a seed, which the runs of this process share."""
    return simulation.noted_federation()


def _as_text(chosen: Row) -> str | None:
    """Return options that a target ε has chosen, as a label has them; None where there are none."""
    texts = [f"{name}={value}" for name, value in sorted(chosen.items())]
    return ",".join(texts) or None


def _finite(value: Any) -> float | None:
    """Return a number, or None where it is not finite, as of clients without test samples."""
    number = float(value)
    if math.isfinite(number):
        return number
    return None


def _correlation(history: Sequence[Mapping[str, Any]]) -> float | None:
    """Return Pearson's correlation of predicted and true similarities of clients' data.

    Args:
        history: lines of a run; NSIM's have it after the clustering.
    """
    for line in reversed(history):
        if line.get("pearson_real") is not None:
            return float(line["pearson_real"])
    return None


def mechanism(protocol: Any) -> str:
    """Return in a few words which noise a protocol's options put where.

    Args:
        protocol: with its hyper-parameters.
    """
    phrases = []
    if protocol.clip is not None and protocol.privacy.per_example:
        phrases.append("dp-sgd")
    elif protocol.clip is not None:
        phrases.append(protocol.privacy.placed(protocol))
    if getattr(protocol, "gram_noise", 0) or (
        hasattr(protocol, "gram_noise") and protocol.target_epsilon is not None
    ):
        phrases.append(getattr(protocol, "gram_mechanism", "gram"))
    if by_gradients(protocol) and (protocol.signature_noise or protocol.target_epsilon is not None):
        phrases.append("signature")
    return "+".join(phrases) or "none"


def noise_options(protocol: Any) -> list[str]:
    """Return a protocol's options, besides `noise`, that are noise multipliers and have an effect.

    One that is not 0 by default is relative to `noise`, which turns it on and off.

    Args:
        protocol: with its hyper-parameters.
    """
    names = []
    for option in fields(protocol):
        if option.name.endswith("_noise") and option.default == 0:
            names.append(option.name)
    unused: set[str] = set()
    for options in option_groups(protocol):
        unused |= options.unused
    return [name for name in names if name not in unused]


def _check_option(protocol: Any, name: str) -> None:
    """Raise UsageError if a protocol's class has no such option."""
    if name not in {option.name for option in fields(protocol)}:
        raise UsageError(f"{protocol.name} has no option {name}, so that it takes no such noise")


def levels_of(noise: Sequence[float], epsilon: Sequence[float]) -> tuple[str, tuple[float, ...]]:
    """Return what a sweep varies, and its levels in ascending order.

    Args:
        noise: noise multipliers; empty where the sweep is over ε.
        epsilon: targets of ε, of which infinite is a run without noise; empty where the sweep is
            over noise.

    Raises:
        UsageError: none or both are given, or a level is impossible or given twice.
    """
    if noise and epsilon:
        raise UsageError(
            "--noise and --target-epsilon both say how much noise there is: sweep over one of them"
        )
    if not noise and not epsilon:
        raise UsageError(
            "a sweep takes levels of noise: --noise 0 0.1 0.5, or --target-epsilon 1 2 4 8"
        )
    by = NOISE
    levels = noise
    if epsilon:
        by = EPSILON
        levels = epsilon
    for level in levels:
        if not isinstance(level, Real) or isinstance(level, bool):
            raise UsageError(f"{by} = {quoted(level)} is not possible: it is a number")
        _check_level(by, level)
        if list(levels).count(level) > 1:
            raise UsageError(f"{by} = {level:g} is given twice: give each level once")
    return by, tuple(sorted(float(level) for level in levels))


def _check_level(by: str, level: float) -> None:
    """Raise UsageError for a noise multiplier or a target that no run can have.

    Args:
        by: "noise" or "epsilon".
        level: of either.
    """
    if isinstance(level, Integral) and level > sys.float_info.max:
        raise UsageError(f"{by} = {quoted(level)} is too large: give a smaller number")
    if by == EPSILON and not level > 0:
        raise UsageError(f"epsilon = {level:g} is not possible: a target is above 0")
    if by == NOISE and not 0 <= level < math.inf:
        raise UsageError(f"noise = {level:g} is not possible: it is 0, for none, or more")


def seeds_of(first: int, count: int) -> tuple[int, ...]:
    """Return the seeds of a sweep.

    Args:
        first: seed.
        count: number of seeds.

    Raises:
        UsageError: no such number.
    """
    check_whole_value("seeds", count)
    check_whole_value("seed", first)
    if not 1 <= count <= MOST_SEEDS:
        raise UsageError(
            f"seeds = {quoted(count)} is not possible: it is a number from 1 to {MOST_SEEDS}"
        )
    return tuple(range(first, first + count))


def names_of(labels: Sequence[str]) -> list[str]:
    """Return the protocols that labels name, each once, in their order.

    Args:
        labels: a protocol each, `cfl`, or one with options of its own, `cfl:sketch=64`.

    Raises:
        UsageError: an unknown protocol.
    """
    names = []
    for label in labels:
        name, _, _ = label.partition(":")
        if name not in protocol_names():
            raise unknown("protocol", name, protocol_names())
        names.append(name)
    return list(dict.fromkeys(names))


def variants_of(
    labels: Sequence[str],
    options: Any,
    clusters: int | None = None,
    varied: Collection[str] = VARIED,
) -> tuple[Variant, ...]:
    """Return the variants that labels name.

    Args:
        labels: a protocol each, `cfl`, or one with options of its own,
            `cfl:placement=central,sketch=64`.
        options: of all protocols that have them, as attributes; None is each one's own default.
        clusters: number of true clusters, where the user says it; k where none is given.
        varied: options that no label has, since the levels set them.

    Raises:
        UsageError: an unknown protocol or option, an impossible value, or a label given twice.
    """
    names = names_of(labels)
    shared = dict(zip(names, given_params(names, options, clusters), strict=True))
    variants = []
    for label in labels:
        if labels.count(label) > 1:
            raise UsageError(f"{label} is named twice, and both would run the same: name it once")
        name, _, text = label.partition(":")
        params = _own_options(name, text, varied)
        variants.append(Variant(label, name, shared[name] | params))
    return tuple(variants)


def check_distinct(variants: Sequence[Variant]) -> None:
    """Raise UsageError for two variants that would run the same.

    Args:
        variants: of a sweep.
    """
    for n, variant in enumerate(variants):
        for other in variants[:n]:
            same = variant.protocol == other.protocol and variant.options == other.options
            if same or variant.label == other.label:
                raise UsageError(
                    f"{other.label} and {variant.label} would run the same: leave one of them out"
                )


def _own_options(name: str, text: str, varied: Collection[str]) -> Row:
    """Return the options in the label of a variant.

    Args:
        name: of the protocol.
        text: "placement=central,sketch=64"; empty without options.
        varied: options that the sweep sets.

    Raises:
        UsageError: an unknown option, or a value that it does not take.
    """
    protocol_type = protocol_class(name)
    names = {option.name for option in fields(protocol_type)}.difference(varied)
    options = {}
    for entry in filter(None, text.split(",")):
        typed, sign, value = entry.partition("=")
        option = typed.replace("-", "_")
        if option in varied:
            raise UsageError(f"{name}:{entry}: {typed} is what the sweep varies: leave it out")
        if not sign:
            raise UsageError(f"{name}:{entry} has no value: write {name}:OPTION=VALUE")
        if option not in names:
            choices = [choice.replace("_", "-") for choice in names]
            raise unknown(f"option of {name}", typed, choices)
        if option in options:
            raise UsageError(f"{name}:{text} gives {typed} twice: give it once")
        options[option] = _parsed(name, option, value)
    return options


def _parsed(name: str, option: str, value: str) -> Any:
    """Return the value of an option, as `run` would parse it.

    Args:
        name: of the protocol.
        option: its field.
        value: as typed.

    Raises:
        UsageError: the option takes no such value.
    """
    typed = f"--{option.replace('_', '-')}"
    arguments = [typed, value]
    # switches
    if value.lower() == "true":
        arguments = [typed]
    elif value.lower() == "false":
        arguments = [f"--no-{typed[2:]}"]
    sections = {"protocol": Section("", protocol_class(name), all_options=True)}
    try:
        parsed = command_line.parsed(name, arguments, "", sections).protocol
    except UsageError:
        raise UsageError(f"{name}:{option}={value} is not a value that {typed} takes") from None
    return getattr(parsed, option)


def of_one_algorithm(variant: Variant, levels: Sequence[float], facts: Facts) -> Variant:
    """Return a variant that compares clients by the same at every target ε.

    What most of the targets choose there, of equally many what the larger ones do, is chosen for
    all, and is in the label. All else that targets choose may differ between them, and is in the
    column `chosen`.

    Args:
        variant: a protocol, whose options are as they were given.
        levels: targets of ε in ascending order, of which infinite is a run without noise.
        facts: of the clients of the first seed.

    Returns:
        The variant itself where nothing is chosen, or where it does not run.
    """
    votes: Counter[str] = Counter()
    # the first of equally many is the most common one
    for level in reversed([level for level in levels if math.isfinite(level)]):
        try:
            method = variant.at(EPSILON, level)
            chosen = vars(method.privacy.settled(method, facts)).get(CHOSEN, {})
        except SecureClusterError:
            continue  # the sweep says why
        votes[_as_text({name: chosen[name] for name in ALGORITHM & chosen.keys()}) or ""] += 1
    text = votes.most_common(1)[0][0] if votes else ""
    if not text:
        return variant
    sign = "," if ":" in variant.label else ":"
    options = _own_options(variant.protocol, text, VARIED)
    return Variant(variant.label + sign + text, variant.protocol, {**variant.options, **options})


def variant_of(protocol: Any) -> Variant:
    """Return the variant of a protocol's object, with the options that are not its defaults.

    Args:
        protocol: with its hyper-parameters.

    Raises:
        UsageError: it is no protocol, has noise already, an object as an option, or the name of
            another protocol.
    """
    if not isinstance(protocol, ClusteringProtocol):
        raise UsageError(
            f"{protocol!r} is no protocol: give names, such as 'cfl', or protocols with their "
            "hyper-parameters, such as CFL(clip=1.0)"
        )
    keep(type(protocol))
    defaults = type(protocol)().get_params()
    options = {}
    for name, value in protocol.get_params().items():
        if value == defaults[name]:
            continue
        if name in VARIED:
            raise UsageError(f"{name} of {protocol.name} is what the sweep varies: leave it out")
        try:
            options[name] = json.loads(json.dumps(value))
        except TypeError:
            raise UsageError(
                f"{name} of {protocol.name} is an object, which a sweep cannot write down: give a "
                "name, such as 'mlp'"
            ) from None
    texts = [f"{name}={value}" for name, value in options.items()]
    label = protocol.name
    if texts:
        label += ":" + ",".join(texts)
    return Variant(label, protocol.name, options)
