"""What ε buys, before anything private is touched: `securecluster.plan` and its command.

Nobody has a formula for the clusters and the accuracy of a private run, so they come from
simulations: the same protocol, with the noise that the ledger finds for the same ε, on stand-ins
for the clients out of a public sample (`securecluster/data/stand_ins.py`). The noise, the bytes and
the number of rounds follow from public quantities and are those of the run itself.

An interval is for one new run on other data of the same sizes. Other data are as if there were more
or less noise, so it spans what the stand-ins did at `EASIER` times the ε and at as much less, and
beyond that how far runs were from stand-ins: the 90 % quantile of split conformal prediction
(Vovk et al. 2005; Lei et al. 2018) over the settings of `benchmarks.private.plan`, which holds the
intervals to others. The margins (`MARGINS`) differ where stand-ins are a better
or a poorer guide: ARI is surest where the stand-ins lose the clusters and the power check takes
them for lost too; accuracy where the public sample is of the clients' own kind.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.clustering.metrics import agreement
from securecluster.commands.failures import Row
from securecluster.core.number_format import fixed, printable
from securecluster.core.optional_packages import need
from securecluster.core.progress import bar
from securecluster.core.validation import MOST, check_whole_value
from securecluster.data.scenarios import scenario as scenario_named
from securecluster.data.simulation import Simulation
from securecluster.data.stand_ins import PublicSample, public_sample
from securecluster.errors import SecureClusterWarning, UsageError, quoted, unknown
from securecluster.parties.power_check import CLUSTERS, DROWNED
from securecluster.protocols.registry import PROTOCOLS
from securecluster.runtime.settings import Settings
from securecluster.studies import comparison_options, sweep_plan
from securecluster.studies.sweep_plan import Cell, Variant
from securecluster.studies.sweep_report import units_in_words
from securecluster.studies.sweep_runner import DONE, REFUSED

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

EASIER = 2.0
LOST_ARI = 0.25  # of the stand-ins, below which their clusters are lost
# what an interval adds on both sides, by score and by what is known: differences of ARI, and of the
# logits of accuracies
MARGINS: Mapping[tuple[str, bool], float] = {
    ("ari", False): 0.37,
    ("ari", True): 0.07,  # where clusters are lost for certain
    ("accuracy", False): 1.06,
    ("accuracy", True): 0.29,  # where the sample is the user's own
}
BOUNDS: Mapping[str, tuple[float, float]] = {"ari": (-0.25, 1.0), "accuracy": (0.0, 1.0)}
DRAWS_BY_CHANCE = 1000
TAIL = 0.025  # on each side of what chance does
EDGE = 0.02  # accuracies up to this far from 0 and 1 count as this far
CLIP = 1.0  # where the user says nothing: noise needs a bound
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
REACHED = 0.9
FOUND_BY = ("epsilon", "clients", "samples")
# what a search tries, from the least on; each is about 1.4 times the one before
EPSILON_GRID = tuple(2.0 ** (j / 2) for j in range(-4, 21))
SIZES = tuple(size << j for j in range(2, 9) for size in (2, 3))
MOST_ROWS = 100_000_000  # of all clients' stand-ins
MOST_CLIENTS = 384
MOST_SAMPLES = 1536
FIRST_SEED = 0


@dataclass(frozen=True)
class Forecast:
    """Forecast for a protocol at an ε.

    Args:
        protocol: with its options.
        epsilon: the target of the whole run.
        dp_unit: whose ε it is, one "client" or one "example".
        delta: δ of this ε.
        noise: multiplier that the ledger finds for it.
        ari: mean over the simulations; None where they have no clusters.
        ari_low: lower end of the interval for one new run.
        ari_high: its upper end.
        ari_least: the least of the simulations at about this ε, from which the interval follows.
        ari_most: the most of them.
        accuracy: mean accuracy of the clients, as `ari`.
        accuracy_low: as `ari_low`.
        accuracy_high: as `ari_high`.
        accuracy_least: as `ari_least`.
        accuracy_most: as `ari_most`.
        rounds: of a run.
        up: bytes that one client sends in a run.
        down: bytes that one client receives.
        seconds: of a simulation here, on one core.
        power: verdict of the power check.
        runs: number of simulations at this ε.
    """

    protocol: str
    epsilon: float
    dp_unit: str
    delta: float
    noise: float
    ari: float | None
    ari_low: float | None
    ari_high: float | None
    ari_least: float | None
    ari_most: float | None
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    accuracy_least: float
    accuracy_most: float
    rounds: int
    up: int
    down: int
    seconds: float
    power: str
    runs: int


@dataclass(frozen=True)
class Need:
    """The least of a quantity with which a protocol finds the clusters.

    Args:
        protocol: with its options.
        quantity: "epsilon", "clients" or "samples".
        value: the least on the grid of the search that suffices; None where not even the most does.
        below: the largest that was tried and does not suffice; None where the least does.
        ari: mean at the value, or at the most that was tried.
        dp_unit: whose ε the runs have, one "client" or one "example".
        delta: δ of this ε.
        ari_low: lower end of the interval for one new run there, as of a `Forecast`.
        ari_high: its upper end.
    """

    protocol: str
    quantity: str
    value: float | None
    below: float | None
    ari: float
    dp_unit: str
    delta: float
    ari_low: float | None = None
    ari_high: float | None = None


@dataclass(frozen=True, repr=False)
class Outlook:
    """Forecasts of private runs, from public quantities alone.

    Args:
        clients: number of clients.
        samples: that each trains on.
        forecasts: of each protocol at each ε.
        needs: answers of a search, in place of forecasts.
        reached: mean ARI that is searched for.
        notes: what was simulated, and what was not as asked, in sentences.
        refused: reasons by protocol and ε, where a protocol cannot run like this.
    """

    clients: int
    samples: int
    forecasts: tuple[Forecast, ...] = ()
    needs: tuple[Need, ...] = ()
    reached: float = REACHED
    notes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_frame(self) -> DataFrame:
        """Return a line for each forecast, or each answer of a search.

        Raises:
            UsageError: pandas is not installed.
        """
        pandas = need("pandas")
        lines = [asdict(line) for line in self.forecasts or self.needs]
        line_class = Forecast if self.forecasts else Need
        return pandas.DataFrame(lines, columns=[item.name for item in fields(line_class)])

    def as_json(self) -> dict[str, Any]:
        """Return everything as JSON has it; an infinite ε is null."""
        content = asdict(self)
        for line in content["forecasts"]:
            if math.isinf(line["epsilon"]):
                line["epsilon"] = None
        return content

    def __repr__(self) -> str:
        """Return the table with its notes."""
        return "\n".join(self.lines())

    def lines(self) -> list[str]:
        """Return the table, then the notes, as lines of text."""
        head = f"{self.clients} clients with {self.samples} samples each"
        if self.needs:
            if self.needs[0].quantity == "clients":
                head = f"clients with {self.samples} samples each"
            elif self.needs[0].quantity == "samples":
                head = f"{self.clients} clients"
            lines = [f"{head}: the least with a mean ARI of {self.reached:g}"]
            lines += [self._sentence(answer) for answer in self.needs]
        else:
            lines = [f"{head}: expected, with the interval for one run", *self._table()]
        lines += [f"{printable(label)}: {reason}" for label, reason in self.refused.items()]
        rows = [self._row(line) for line in self.forecasts or self.needs]
        return [*lines, *units_in_words(rows), *self.notes]

    def _row(self, line: Forecast | Need) -> Row:
        """Return protocol, unit and δ of a line as a sweep has them."""
        epsilon = line.epsilon if isinstance(line, Forecast) else math.inf
        unit, delta = line.dp_unit, line.delta
        return {"variant": line.protocol, "epsilon": epsilon, "dp_unit": unit, "delta": delta}

    def _sentence(self, answer: Need) -> str:
        """Return an answer of a search in words."""
        name = "ε" if answer.quantity == "epsilon" else answer.quantity
        label = printable(answer.protocol)
        ari_text = f"ARI {_with_interval(answer.ari, answer.ari_low, answer.ari_high)}"
        if answer.value is None:
            return f"{label}: no {name} up to {answer.below:g} suffices ({ari_text} there)"
        tried = "the least that was tried"
        if answer.below is not None:
            tried = f"{answer.below:.3g} does not suffice"
        return f"{label}: {name} {answer.value:.3g} ({ari_text}; {tried})"

    def _table(self) -> list[str]:
        """Return the forecasts as lines with aligned columns."""
        heads = (
            "protocol", "ε", "noise", "ARI", "accuracy", "rounds", "kB up", "kB down", "seconds",
            "power check",
        )  # fmt: skip
        rows = [heads]
        for line in self.forecasts:
            cells = (
                printable(line.protocol),
                f"{line.epsilon:g}",
                f"{line.noise:.3g}",
                _with_interval(line.ari, line.ari_low, line.ari_high),
                _with_interval(line.accuracy, line.accuracy_low, line.accuracy_high),
                str(line.rounds),
                f"{line.up / 1000:,.0f}",
                f"{line.down / 1000:,.0f}",
                f"{line.seconds:.1f}",
                line.power,
            )
            rows.append(cells)
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = []
        for row in rows:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
        return lines


def _with_interval(mean: float | None, low: float | None, high: float | None) -> str:
    """Return a mean and its interval as text."""
    if mean is None:
        return "–"
    if low is None:
        return fixed(mean, 2)
    return f"{fixed(mean, 2)} ({fixed(low, 2)} to {fixed(high, 2)})"


def plan(  # noqa: PLR0913 (what the command has)
    protocols: Sequence[Any],
    *,
    clients: int = 20,
    samples: int = 100,
    epsilon: Sequence[float] = EPSILONS,
    data: str | None = None,
    shape: Sequence[int] | None = None,
    classes: int | None = None,
    mean: float | None = None,
    public: Any = "digits",
    label_column: str | None = None,
    scenario: str = "label-swap",
    clusters: int | None = None,
    find: str | None = None,
    ari: float = REACHED,
    seeds: int = 3,
    seed: int = FIRST_SEED,
    progress: bool | None = None,
    **options: Any,
) -> Outlook:
    """Return what ε buys with protocols, or what clusters cost, without private data.

    Args:
        protocols: names, `"cfl"` or `"cfl:sketch=64"`, or protocols with their hyper-parameters.
        clients: number of clients.
        samples: that each client trains on.
        epsilon: targets for the ε of a whole run. A search for clients or samples takes one.
        data: name of the known set of images that the clients have, whose public form the stand-ins
            take; None where the data are their own.
        shape: height and width of the clients' images, or channels, height and width; None is that
            of the sample. The number of parameters, and with it the noise, follows from it.
        classes: number of labels; None is that of the sample.
        mean: about that of the clients' pixels, from 0 (black) to 1 (white); None is that of the
            sample. Ink on white paper has 0.8 and more.
        public: what stands in for the clients' data: the name of a data set, a CSV file, arrays
            (x, y), or a federation of public samples.
        label_column: of a CSV file.
        scenario: how clusters differ.
        clusters: number of true clusters; None is the scenario's own.
        find: "epsilon", "clients" or "samples": search for the least of it, in place of forecasts.
        ari: mean ARI that is searched for.
        seeds: number of simulations at each ε.
        seed: of the first.
        progress: show a bar; None shows it in notebooks and at the prompt of a terminal only.
        options: those of the protocols, which each protocol takes that has them. The clip norm is 1
            where it is left out.

    Raises:
        UsageError: an unknown name, an impossible number, or protocols of which none can run.
    """
    variants = _variants(protocols, options, clusters)
    if isinstance(epsilon, str) or not isinstance(epsilon, Iterable):
        raise UsageError(f"epsilon is a list of numbers: give [1, 4], not {epsilon!r}")
    _, levels = sweep_plan.levels_of((), tuple(epsilon))
    all_seeds = sweep_plan.seeds_of(seed, seeds)
    _check_sizes(clients=clients, samples=samples)
    _check_search(find, levels, ari)
    sample = public_sample(public, label_column)
    if data is not None:
        sample = sample.standing_for(data)
    sample = sample.like(shape, classes, mean)
    stage = _Stage(sample, scenario, clusters, all_seeds)
    stage.check(clients, samples)
    if find is not None:
        return _searched(stage, variants, clients, samples, levels, find, ari, progress)
    forecasts: list[Forecast] = []
    refused: dict[str, str] = {}
    with bar("plan", len(variants) * len(levels), progress) as advance:
        for number, (variant, level) in enumerate(_pairs(variants, levels), 1):
            outcome = stage.forecast(variant, level, clients, samples)
            if isinstance(outcome, str):
                refused[f"{variant.label} at ε = {level:g}"] = outcome
            else:
                forecasts.append(outcome)
            advance(number)
    if not forecasts:
        raise UsageError(next(iter(refused.values())))
    return Outlook(clients, samples, tuple(forecasts), notes=stage.notes(), refused=refused)


def _pairs(variants: Sequence[Variant], levels: Sequence[float]) -> Iterator[tuple[Variant, float]]:
    """Yield each protocol with each ε."""
    for variant in variants:
        for level in levels:
            yield variant, level


def _check_sizes(**sizes: int) -> None:
    """Raise UsageError for numbers of clients and samples that no plan is made for."""
    for name, value in sizes.items():
        check_whole_value(name, value)
        if not 2 <= value <= MOST:
            raise UsageError(
                f"{name} = {quoted(value)} is not possible: it is a whole number from 2 to {MOST:,}"
            )
    if math.prod(sizes.values()) > MOST_ROWS:
        product = " x ".join(f"{value:,} {name}" for name, value in sizes.items())
        raise UsageError(
            f"{product} are more than the {MOST_ROWS:,} rows that a simulation is made of: "
            "give fewer of either"
        )


def _check_search(find: str | None, levels: Sequence[float], ari: float) -> None:
    """Raise UsageError for a search that is none.

    Args:
        find: what is searched for.
        levels: of ε.
        ari: that is to be reached.
    """
    if find is not None and find not in FOUND_BY:
        raise unknown("quantity to find", find, FOUND_BY)
    if not isinstance(ari, Real) or isinstance(ari, bool) or not 0 < ari <= 1:
        shown = f"{ari:g}" if isinstance(ari, float) else quoted(ari)
        raise UsageError(f"ari = {shown} is not possible: it is above 0, and at most 1")
    if find is None:
        if ari != REACHED:
            raise UsageError("ari is what a search is to reach: give find, or leave ari out")
        return
    if find != "epsilon" and len(levels) != 1:
        raise UsageError(f"a search for {find} takes a single ε: --epsilon 4")


def _variants(
    protocols: Sequence[Any], options: Mapping[str, Any], clusters: int | None
) -> tuple[Variant, ...]:
    """Return the protocols, each with a clip norm.

    Raises:
        UsageError: an unknown protocol or option.
    """
    if isinstance(protocols, str) or not protocols:
        raise UsageError('plan takes a list of protocols: ["cfl", "hidden"]')
    labels = [item for item in protocols if isinstance(item, str)]
    names = comparison_options.option_names(sweep_plan.names_of(labels)) - sweep_plan.VARIED
    for name in options:
        if name not in names:
            raise unknown("option", name, names)
    named = {}
    namespace = type("Given", (), {})()
    vars(namespace).update(options)
    for variant in sweep_plan.variants_of(labels, namespace, clusters):
        named[variant.label] = variant
    variants = []
    for item in protocols:
        variant = named[item] if isinstance(item, str) else sweep_plan.variant_of(item)
        if variant.options.get("clip") is None:
            variant = Variant(variant.label, variant.protocol, {**variant.options, "clip": CLIP})
        variants.append(variant)
    sweep_plan.check_distinct(variants)
    return tuple(variants)


class _Stage:
    """Simulations on stand-ins, of which each is run once.

    Args:
        sample: what the stand-ins are made of.
        scenario: how clusters differ.
        clusters: number of true clusters; None is the scenario's own.
        seeds: of the simulations.
    """

    def __init__(
        self, sample: PublicSample, scenario: str, clusters: int | None, seeds: Sequence[int]
    ) -> None:
        self.sample = sample
        self.scenario = scenario
        self.clusters = clusters
        self.seeds = seeds
        self.most_repeats = 0.0
        self._federations: dict[tuple[int, int, int], Any] = {}
        self._rows: dict[tuple[str, float, int, int, int], Row] = {}

    def check(self, clients: int, samples: int) -> None:
        """Raise UsageError for stand-ins that cannot be made."""
        self._federation(clients, samples, self.seeds[0])

    def _federation(self, clients: int, samples: int, seed: int) -> Any:
        """Return stand-ins for clients."""
        key = (clients, samples, seed)
        if key not in self._federations:
            while len(self._federations) > len(self.seeds):
                self._federations.pop(next(iter(self._federations)))
            made = scenario_named(self.scenario, self.clusters)
            self._federations[key] = self.sample.clients(clients, samples, made, seed)
            self.most_repeats = max(self.most_repeats, self.sample.repeats(clients, samples))
        return self._federations[key]

    def row(self, variant: Variant, level: float, clients: int, samples: int, seed: int) -> Row:
        """Return what one simulation measured, as a sweep does.

        Args:
            variant: the protocol.
            level: target ε.
            clients: how many.
            samples: of each.
            seed: of the simulation.
        """
        key = (variant.label, level, clients, samples, seed)
        if key not in self._rows:
            federation = self._federation(clients, samples, seed)
            simulation = Simulation(self.sample.name, scenario=self.scenario, seed=seed)
            settings = Settings(
                transcript="none", threads=1, device="cpu", dtype="float32", keys_from_seed=True
            )
            cell = Cell(0, variant, sweep_plan.EPSILON, level, simulation, settings)
            with warnings.catch_warnings():
                # of runs that learn nothing: to find them is what this is for
                warnings.simplefilter("ignore", SecureClusterWarning)
                self._rows[key] = cell.row(federation)
        return self._rows[key]

    def rows(self, variant: Variant, level: float, clients: int, samples: int) -> list[Row]:
        """Return what all simulations at an ε measured, as `row`."""
        return [self.row(variant, level, clients, samples, seed) for seed in self.seeds]

    def forecast(
        self, variant: Variant, level: float, clients: int, samples: int
    ) -> Forecast | str:
        """Return what a protocol will do at an ε, or why it cannot run.

        Args:
            variant: the protocol.
            level: target ε; infinite is without noise.
            clients: how many.
            samples: of each.
        """
        rows = self.rows(variant, level, clients, samples)
        done = [row for row in rows if row["status"] == DONE]
        if not done:
            return str(rows[0]["reason"])
        around = list(done)
        for other in (level / EASIER, level * EASIER) if math.isfinite(level) else ():
            some = self.rows(variant, other, clients, samples)
            around += [row for row in some if row["status"] == DONE]
        mean = _mean_of(done)
        power = str(done[0]["power"] or "no noise")
        scores: dict[str, float | None] = {}
        for name in ("ari", "accuracy"):
            if name == "ari" and not _looks_for_clusters(variant):
                rows_of_score: list[Row] = []
            else:
                rows_of_score = around
            values = [row[name] for row in rows_of_score if row[name] is not None]
            chance = by_chance(self._sizes(clients, samples))
            low, high = interval(values, name, power=power, own=self.sample.own, chance=chance)
            middle = mean(name) if values else None
            scores |= {name: middle, f"{name}_low": low, f"{name}_high": high}
            scores |= {f"{name}_least": min(values, default=None)}
            scores |= {f"{name}_most": max(values, default=None)}
        return Forecast(
            protocol=variant.label,
            epsilon=level,
            dp_unit=done[0]["dp_unit"],
            delta=done[0]["delta"],
            noise=mean("noise") or 0.0,
            rounds=int(done[0]["rounds"]),
            up=round((mean("up") or 0.0) / clients),
            down=round((mean("down") or 0.0) / clients),
            seconds=round(mean("seconds") or 0.0, 3),
            power=power,
            runs=len(done),
            **scores,  # type: ignore[arg-type]
        )

    def _sizes(self, clients: int, samples: int) -> tuple[int, ...]:
        """Return the sizes of the true clusters of stand-ins."""
        truth = self._federation(clients, samples, self.seeds[0]).truth
        return tuple(sorted(Counter(truth or [0] * clients).values()))

    def ari(self, variant: Variant, level: float, clients: int, samples: int) -> float:
        """Return the mean ARI of the simulations; 0 of those that ended in an error.

        Raises:
            UsageError: the protocol cannot run like this, or looks for no clusters.
        """
        sum_of_aris = 0.0
        for row in self.rows(variant, level, clients, samples):
            if row["status"] == REFUSED:
                raise UsageError(f"{variant.label}: {row['reason']}")
            sum_of_aris += float(row.get("ari") or 0.0)
        return sum_of_aris / len(self.seeds)

    def tried(self, variant: Variant) -> Row:
        """Return what the first simulation of a protocol measured."""
        return next(row for (label, *_), row in self._rows.items() if label == variant.label)

    def notes(self, searching: bool = False) -> tuple[str, ...]:
        """Return what was simulated, in sentences.

        Args:
            searching: whether a quantity was searched for.
        """
        runs = len(self.seeds)
        rows = len(self.sample.y)
        on = (
            f"on {rows:,} public rows of {self.sample.name} ({self.scenario}); no private data "
            "were read"
        )
        if searching:
            first = f"simulated: {runs} at each value that was tried, {on}"
        else:
            first = (
                f"simulated: ARI, accuracy and seconds, {runs} at each ε and at half and twice of "
                f"it, {on}; noise and rounds are those of the run itself, and so are bytes but for "
                "what depends on the clusters"
            )
        notes = [first, *self.sample.notes]
        if not self.sample.own and not searching:
            notes.append(
                f"intervals of accuracy are for data about as hard to learn as {self.sample.name}: "
                "hand in a public sample of your own kind where there is one"
            )
        if self.most_repeats > 1:
            notes.append(
                f"there are fewer public rows than the clients want: each is used about "
                f"{self.most_repeats:.1f} times, so that accuracy may be too low"
            )
        return tuple(notes)


def _looks_for_clusters(variant: Variant) -> bool:
    """Return whether a protocol looks for clusters, as no baseline does."""
    fact = PROTOCOLS.get(variant.protocol)
    return fact is None or not fact.finds.startswith("none")


def interval(
    values: Sequence[float | None],
    name: str,
    *,
    power: str,
    own: bool,
    margins: Mapping[tuple[str, bool], float] | None = None,
    chance: tuple[float, float] | None = None,
) -> tuple[float | None, float | None]:
    """Return the interval for one new run.

    Args:
        values: of simulations at the ε, and at more and less of it.
        name: "ari" or "accuracy".
        power: verdict of the power check, in words.
        own: whether the simulations are on a public sample of the clients' own kind.
        margins: in place of `MARGINS`.
        chance: ARI between which labels by chance are. An interval ends below the lower one only
            where a simulation does, and never below the upper one.

    Returns:
        Its ends; None where a simulation has no such value.
    """
    scores = [float(value) for value in values if value is not None]
    if not scores:
        return None, None
    minimum, maximum = min(scores), max(scores)
    margins = MARGINS if margins is None else margins
    if name == "ari":
        margin = margins[name, surely_lost(scores, power)]
        low, high = minimum - margin, maximum + margin
    else:
        margin = margins[name, own]
        low, high = _moved(minimum, -margin), _moved(maximum, margin)
    lowest, highest = BOUNDS[name]
    if name == "ari" and chance is not None:
        lowest = chance[0]
        high = max(high, chance[1])
    return min(minimum, max(lowest, low)), max(maximum, min(highest, high))


@lru_cache(maxsize=64)
def by_chance(sizes: tuple[int, ...]) -> tuple[float, float]:
    """Return the ARI between which labels by chance are, 95 times of 100.

    Args:
        sizes: of the true clusters; labels are of as many, and of two where there is one.
    """
    truth = np.repeat(np.arange(len(sizes)), sizes)
    draw = np.random.default_rng(0)
    labels = draw.integers(max(2, len(sizes)), size=(DRAWS_BY_CHANCE, len(truth)))
    aris = [agreement(some.tolist(), truth.tolist())["ari"] for some in labels]
    low, high = np.quantile(aris, [TAIL, 1 - TAIL])
    return float(low), float(high)


def surely_lost(values: Sequence[float], power: str) -> bool:
    """Return whether both simulations and the power check say that clusters are lost.

    Args:
        values: ARI of simulations.
        power: verdict of the power check, in words.
    """
    return max(values) < LOST_ARI and f"{CLUSTERS} {DROWNED}" in power


def _moved(accuracy: float, step: float) -> float:
    """Return the accuracy whose logit is a step away.

    Args:
        accuracy: from 0 to 1.
        step: a difference of logits.
    """
    inside = min(max(accuracy, EDGE), 1 - EDGE)
    return 1 / (1 + (1 / inside - 1) * math.exp(-step))


def _mean_of(rows: Sequence[Row]) -> Callable[[str], float | None]:
    """Return a function from a column to its mean over runs; None where none has a value."""

    def mean(name: str) -> float | None:
        scores = [float(row[name]) for row in rows if row.get(name) is not None]
        return math.fsum(scores) / len(scores) if scores else None

    return mean


def _searched(  # noqa: PLR0913
    stage: _Stage,
    variants: Sequence[Variant],
    clients: int,
    samples: int,
    levels: Sequence[float],
    find: str,
    ari: float,
    progress: bool | None,
) -> Outlook:
    """Return the least of a quantity with which each protocol finds the clusters.

    Args:
        stage: of the simulations.
        variants: the protocols.
        clients: how many, unless they are searched for.
        samples: of each, unless they are searched for.
        levels: one ε, unless it is searched for.
        find: the quantity.
        ari: mean ARI that is to be reached.
        progress: whether to show a bar.
    """
    for variant in variants:
        if not _looks_for_clusters(variant):
            raise UsageError(f"{variant.label} looks for no clusters: leave it out of a search")

    def place(value: float) -> tuple[float, int, int]:
        if find == "epsilon":
            return value, clients, samples
        if find == "clients":
            return levels[0], int(value), samples
        return levels[0], clients, int(value)

    needs = []
    with bar("plan", len(variants), progress) as advance:
        for number, variant in enumerate(variants, 1):
            needs.append(_need(stage, variant, find, place, ari))
            advance(number)
    notes = stage.notes(searching=True)
    return Outlook(clients, samples, needs=tuple(needs), reached=ari, notes=notes)


def _need(
    stage: _Stage,
    variant: Variant,
    find: str,
    conditions: Callable[[float], tuple[float, int, int]],
    ari: float,
) -> Need:
    """Return the least of a quantity with which a protocol finds the clusters.

    Args:
        stage: of the simulations.
        variant: the protocol.
        find: the quantity.
        conditions: value of the quantity -> ε, number of clients, and samples of each.
        ari: mean ARI that is to be reached.
    """
    grid: Sequence[float] = EPSILON_GRID
    if find != "epsilon":
        maximum = MOST_CLIENTS if find == "clients" else MOST_SAMPLES
        grid = [size for size in SIZES if size <= maximum]
    value, below, mean = least(lambda size: stage.ari(variant, *conditions(size)), grid, ari)
    forecast_at = grid[-1] if value is None else value
    forecast = stage.forecast(variant, *conditions(forecast_at))
    ends = (None, None) if isinstance(forecast, str) else (forecast.ari_low, forecast.ari_high)
    tried = stage.tried(variant)
    unit, delta = tried["dp_unit"], tried["delta"]
    return Need(variant.label, find, value, below, mean, unit, delta, *ends)


def least(
    score: Callable[[float], float], grid: Sequence[float], level: float
) -> tuple[float | None, float | None, float]:
    """Return the least value of a grid whose score reaches a level, by bisection.

    More of the quantity is taken to never lower the score.

    Args:
        score: of a value.
        grid: ascending.
        level: that is to be reached.

    Returns:
        The value, or None where the last one does not reach it; the value before it in the grid, or
        the last one, or None where the first reaches it; and the score at the value, or at the last
        one.
    """
    scores = {len(grid) - 1: score(grid[-1])}
    low, high = -1, len(grid) - 1
    if scores[high] < level:
        return None, grid[-1], scores[high]
    while high - low > 1:
        middle = (low + high) // 2
        scores[middle] = score(grid[middle])
        if scores[middle] >= level:
            high = middle
        else:
            low = middle
    return grid[high], grid[low] if low >= 0 else None, scores[high]


def frontier(outlook: Outlook, axes: Any = None) -> Figure:
    """Return a picture of what ε buys: ARI and accuracy over ε, with intervals.

    Args:
        outlook: with forecasts.
        axes: matplotlib axes to draw accuracy on alone; None for a new figure with both.

    Raises:
        UsageError: an outlook of a search has no frontier, or given axes for ε of both units.
    """
    from securecluster.studies import plan_figure as picture
    from securecluster.studies.sweep_figures import units

    if not outlook.forecasts:
        raise UsageError("a search has no frontier to draw: call plan without find")
    rows = [asdict(line) for line in outlook.forecasts]
    if axes is not None and len(units(rows)) > 1:
        raise UsageError(
            "this plan has ε of one client and ε of one example, which share no axis: draw it "
            "without axes of your own"
        )
    title = f"expected of {outlook.clients} clients with {outlook.samples} samples each"
    figure: Figure = picture.frontier(rows, title, axes)
    return figure


__all__ = ["Forecast", "Need", "Outlook", "frontier", "plan"]
