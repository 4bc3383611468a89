"""What ε buys, before anything private is touched: `securecluster.plan` and its command.

The noise, the number of rounds and the power check follow from public quantities by formula, and
are those of the run itself. Nobody has a formula for clusters and accuracy, so they are simulated:
the same protocol with the same noise, on a public sample that the plan names
(`securecluster/data/public_sample.py`). They are scores on this sample, and no forecast for others.

Simulations have a bounded amount of work, counted in samples that clients train on (`cost`), and
never in seconds: what does not fit is left out, on every machine the same. The first simulation of
each line comes before the second of any.

Masks of secure sums change no sum, and take most of the time of many clients. So beyond
`MOST_MASKED` clients a trusted server adds as much noise to plain sums.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from numbers import Real
from typing import TYPE_CHECKING, Any

from securecluster.commands.failures import Row, reason
from securecluster.core.devices import cpu_threads
from securecluster.core.number_format import fixed, printable
from securecluster.core.optional_packages import need
from securecluster.core.progress import bar
from securecluster.core.validation import MOST, check_whole_value
from securecluster.data.public_sample import OWN_SAMPLE, PublicSample, public_sample
from securecluster.data.scenarios import scenario as scenario_named
from securecluster.data.transforms import LabelSwap
from securecluster.errors import (
    SecureClusterError,
    SecureClusterWarning,
    UsageError,
    quoted,
    unknown,
)
from securecluster.parties.run_check import RunCheck, checked_run
from securecluster.protections.registry import sum_plan_of
from securecluster.protocols.registry import PROTOCOLS
from securecluster.runtime.settings import Settings
from securecluster.studies import comparison_options, sweep_plan, sweep_runner
from securecluster.studies.sweep_plan import Variant
from securecluster.studies.sweep_report import units_in_words
from securecluster.studies.sweep_tables import WIDE

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

CLIP = 1.0  # where the user says nothing: noise needs a bound
EPSILONS = (1.0, 2.0, 4.0, 8.0, 16.0)
MOST_ROWS = 100_000_000  # of all clients
WORK = 10.0  # million samples
MOST_MASKED = 40  # clients
# what a sample costs of which an update of this many numbers follows, over one of none
DOUBLED = 20_000
OWN_GRADIENT = 3  # what a sample costs whose gradient is clipped by itself
PAIRED = 0.1  # what a sample costs on which a client tries the model of another
MILLION = 1_000_000
FIRST_SEED = 0
# options of 0.2, which guessed from other data what the clients' would do, and what to do instead
LEFT: Mapping[str, str] = {
    "find": "give several targets (--target-epsilon 1 2 4 8) and read off the least",
    "ari": "give several targets (--target-epsilon 1 2 4 8) and read off the least",
    "data": "name the set that is simulated on (--public), or hand in your own public sample",
    "shape": "hand in a public sample of this shape (--public)",
    "classes": "hand in a public sample with as many classes (--public)",
    "mean": "hand in a public sample as light as your images (--public)",
}
SETTINGS = Settings(
    transcript="none", threads=1, device="cpu", dtype="float32", keys_from_seed=True
)


@dataclass(frozen=True)
class Forecast:
    """What a protocol does at an ε.

    What is simulated is None where all simulations were left out.

    Args:
        protocol: with its options.
        epsilon: the target of the whole run.
        dp_unit: whose ε it is, one "client" or one "example".
        delta: δ of this ε.
        noise: multiplier that the ledger finds for it.
        rounds: of a run.
        power: verdict of the power check.
        runs: number of simulations.
        left_out: number of those that were left out, since they are too much work.
        ari: mean over the simulations; None also where they have no clusters.
        ari_least: the least of them.
        ari_most: the most of them.
        accuracy: mean accuracy of the clients, as `ari`.
        accuracy_least: as `ari_least`.
        accuracy_most: as `ari_most`.
        up: bytes that one client sends in a run; None also where masks were left out.
        down: bytes that one client receives, as `up`.
        seconds: of a simulation here, on one core.
    """

    protocol: str
    epsilon: float
    dp_unit: str
    delta: float
    noise: float
    rounds: int
    power: str
    runs: int
    left_out: int
    ari: float | None
    ari_least: float | None
    ari_most: float | None
    accuracy: float | None
    accuracy_least: float | None
    accuracy_most: float | None
    up: int | None
    down: int | None
    seconds: float | None


@dataclass(frozen=True, repr=False)
class Outlook:
    """What private runs do, from public quantities and a public sample alone.

    Args:
        clients: number of clients.
        samples: that each trains on.
        forecasts: of each protocol at each ε.
        notes: what was simulated, and what was left out, in sentences.
        refused: reasons by protocol and ε, where a protocol cannot run like this.
    """

    clients: int
    samples: int
    forecasts: tuple[Forecast, ...] = ()
    notes: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    def to_frame(self) -> DataFrame:
        """Return a line for each forecast.

        Raises:
            UsageError: pandas is not installed.
        """
        pandas = need("pandas")
        columns = [item.name for item in fields(Forecast)]
        return pandas.DataFrame([asdict(line) for line in self.forecasts], columns=columns)

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
        lines = [f"{self.clients} clients with {self.samples} samples each", *self._table()]
        lines += [f"{printable(label)}: {reason}" for label, reason in self.refused.items()]
        rows: list[Row] = [{**asdict(line), "variant": line.protocol} for line in self.forecasts]
        return [*lines, *units_in_words(rows), *self.notes]

    def _table(self) -> list[str]:
        """Return the forecasts as lines with aligned columns."""
        heads = (
            "protocol", "ε", "noise", "rounds", "power check", "ARI", "accuracy", "kB up",
            "kB down", "seconds",
        )  # fmt: skip
        rows = [heads]
        for line in self.forecasts:
            ari = _score(line.ari, line.ari_least, line.ari_most, line.runs)
            accuracy = _score(line.accuracy, line.accuracy_least, line.accuracy_most, line.runs)
            cells = (
                printable(line.protocol),
                f"{line.epsilon:g}",
                f"{line.noise:.3g}",
                str(line.rounds),
                line.power,
                ari,
                accuracy,
                "–" if line.up is None else f"{line.up / 1000:,.0f}",
                "–" if line.down is None else f"{line.down / 1000:,.0f}",
                "–" if line.seconds is None else f"{line.seconds:.1f}",
            )
            rows.append(cells)
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        lines = []
        for row in rows:
            padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(padded).rstrip())
        return lines


def _score(mean: float | None, least: float | None, most: float | None, runs: int) -> str:
    """Return the mean of simulations, with the least and the most, as text."""
    if not runs:
        return "left out"
    if mean is None or least is None or most is None:
        return "–"
    if runs == 1:
        return f"{fixed(mean, 2)} (1 run)"
    if not _tells(least, most):
        return "could not tell"
    return f"{fixed(mean, 2)} ({fixed(least, 2)} to {fixed(most, 2)})"


def _tells(least: float | None, most: float | None) -> bool:
    """Return whether simulations are near enough to each other to say what one run does."""
    return least is None or most is None or most - least <= WIDE


def plan(  # noqa: PLR0913 (what the command has)
    protocols: Sequence[Any],
    *,
    clients: int = 20,
    samples: int = 100,
    epsilon: Sequence[float] = EPSILONS,
    public: Any = "digits",
    label_column: str | None = None,
    client_column: str | None = None,
    scenario: str | None = None,
    clusters: int | None = None,
    seeds: int = 3,
    seed: int = FIRST_SEED,
    work: float = WORK,
    progress: bool | None = None,
    **options: Any,
) -> Outlook:
    """Return what ε buys with protocols, without private data.

    Args:
        protocols: names, `"cfl"` or `"cfl:sketch=64"`, or protocols with their hyper-parameters.
        clients: number of clients.
        samples: that each trains on.
        epsilon: targets for the ε of a whole run.
        public: what is simulated on: the name of a data set, a CSV file, arrays (x, y), or a
            federation, of which the client with the most rows is taken.
        label_column: of a CSV file.
        client_column: of a CSV file that has one; the client with the most rows is taken.
        scenario: how clusters differ; None is label-swap, or label-permutation where the sample has
            too few labels for it.
        clusters: number of true clusters; None is the scenario's own.
        seeds: number of simulations at each ε.
        seed: of the first.
        work: of all simulations at most, in million samples that clients train on; 0 leaves
            formulas alone.
        progress: show a bar; None shows it in notebooks and at the prompt of a terminal only.
        options: those of the protocols, which each protocol takes that has them. The clip norm is 1
            where it is left out.

    Raises:
        UsageError: an unknown name, an impossible number, or protocols of which none can run.
    """
    refuse_left(options)
    if isinstance(epsilon, str) or not isinstance(epsilon, Iterable):
        raise UsageError(f"epsilon is a list of numbers: give [1, 4], not {epsilon!r}")
    _, levels = sweep_plan.levels_of((), tuple(epsilon))
    all_seeds = sweep_plan.seeds_of(seed, seeds)
    _check_sizes(clients=clients, samples=samples)
    if not isinstance(work, Real) or isinstance(work, bool) or not 0 <= work < math.inf:
        raise UsageError(f"work = {quoted(work)} is not possible: it is 0 or more million samples")
    _variants(protocols, options, clusters)  # mistakes first, before a sample is read
    sample = public_sample(public, label_column, client_column)
    if scenario is None:
        scenario, clusters = _fitting_scenario(sample.classes, clusters)
    variants = _variants(protocols, options, clusters)

    @lru_cache(maxsize=1)
    def federation(seed: int) -> Any:
        made = scenario_named(scenario, clusters)
        return sample.clients(clients, samples, made, seed)

    pairs = [(variant, level) for variant in variants for level in levels]
    steps = len(pairs) * (1 + len(all_seeds))
    # more threads only wait for each other on work as small as this
    with bar("plan", steps, progress) as advance, cpu_threads(1):
        lines, refused = _formulas(pairs, federation(seed), advance)
        _simulate(lines, federation, all_seeds, work * MILLION, advance)
    refused |= {f"simulation of {line.name}": line.error for line in lines if line.error}
    forecasts = tuple(line.forecast(clients) for line in lines)
    shift = f"{scenario}, {len(set(federation(seed).truth or [0]))} cluster(s)"
    notes = [*_notes(lines, forecasts, sample, shift, work), *sample.notes]
    repeats = sample.repeats(clients, samples)
    if repeats > 1:
        notes.append(
            "there are fewer public rows than the clients want: each is used about "
            f"{repeats:.1f} times, so that accuracy may be too low"
        )
    return Outlook(clients, samples, forecasts, tuple(notes), refused)


def refuse_left(names: Iterable[str]) -> None:
    """Raise UsageError for an option that plans had.

    Args:
        names: of options.
    """
    for name in names:
        if name in LEFT:
            raise UsageError(f"plan has no option {name} any more: {LEFT[name]}")


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


def _fitting_scenario(classes: int, clusters: int | None) -> tuple[str, int | None]:
    """Return a scenario that clients with so many labels can have, and its number of clusters.

    Args:
        classes: number of labels.
        clusters: that the user asks for; None is as many as the scenario has by default, or can
            have.
    """
    usual = clusters or LabelSwap.clusters
    if classes >= 2 * usual:
        return "label-swap", clusters
    return "label-permutation", clusters or min(usual, math.factorial(classes))


def _variants(
    protocols: Sequence[Any], options: Mapping[str, Any], clusters: int | None
) -> tuple[Variant, ...]:
    """Return the protocols, each with a clip norm.

    Raises:
        UsageError: an unknown protocol or option.
    """
    if isinstance(protocols, str) or not protocols:
        raise UsageError('plan takes a list of protocols: ["cfl", "hidden"]')
    protocols = comparison_options.with_own_names(protocols)
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


def _formulas(
    pairs: Sequence[tuple[Variant, float]], federation: Any, advance: Callable[[int], None]
) -> tuple[list[_Line], dict[str, str]]:
    """Return a line for each protocol and ε, and reasons by name where one cannot run.

    Raises:
        UsageError: none can.
    """
    lines: list[_Line] = []
    refused: dict[str, str] = {}
    for number, (variant, level) in enumerate(pairs, 1):
        try:
            check = checked_run(variant.at(sweep_plan.EPSILON, level), federation, SETTINGS)
            lines.append(_Line(variant, level, check))
        except SecureClusterError as error:
            refused[f"{variant.label} at ε = {level:g}"] = reason(error)
        advance(number)
    if not lines:
        raise UsageError(next(iter(refused.values())))
    return lines, refused


def _simulate(
    lines: Sequence[_Line],
    federation: Callable[[int], Any],
    seeds: Sequence[int],
    work: float,
    advance: Callable[[int], None],
) -> None:
    """Add simulations to lines, as far as the work allows.

    Args:
        lines: of the plan.
        federation: seed -> the clients.
        seeds: of the simulations.
        work: of all simulations at most, in samples that clients train on.
        advance: called with the number of steps that are done, formulas among them.
    """
    done = len(lines)
    for seed in seeds:
        for line in lines:
            if line.cost > work:
                line.left_out += 1
            else:
                work -= line.cost
                line.simulate(federation(seed))
            done += 1
            advance(done)


class _Line(sweep_runner.Cell):
    """A protocol at an ε: what follows by formula, then simulations.

    Args:
        variant: the protocol.
        level: target ε; infinite is without noise.
        check: its run.
    """

    def __init__(self, variant: Variant, level: float, check: RunCheck) -> None:
        self.variant = variant
        self.level = level
        self.name = f"{variant.label} at ε = {level:g}"
        self.check = check
        self.power = "no noise" if check.power is None else check.power.summary
        self.simulated, self.masked = _without_masks(check)
        self.cost = cost(check)
        self.rows: list[Row] = []
        self.left_out = 0
        self.error = ""

    @property
    def label(self) -> str:
        """Return what it is called."""
        return self.variant.label

    def described(self) -> Row:
        """Return nothing: what is known before the run is in the forecast."""
        return {}

    def measured(self, federation: Any) -> Row:
        """Return what a simulation measures, by column."""
        fitted = self.simulated.fit(federation, SETTINGS, progress=False)
        fact = PROTOCOLS.get(self.variant.protocol)
        has_clusters = fact is None or not fact.finds.startswith("none")
        return {
            "ari": (fitted.agreement_ or {}).get("ari") if has_clusters else None,
            "accuracy": float(fitted.scores_.mean()),
            "up": fitted.bytes_["up"],
            "down": fitted.bytes_["down"],
            "seconds": fitted.seconds_,
        }

    def simulate(self, federation: Any) -> None:
        """Add a simulation, or the reason why there is none."""
        with warnings.catch_warnings():
            # of runs that learn nothing: to find them is what this is for
            warnings.simplefilter("ignore", SecureClusterWarning)
            row = self.row(federation)
        if row["status"] == sweep_runner.DONE:
            self.rows.append(row)
        else:
            self.error = str(row["reason"])

    def forecast(self, clients: int) -> Forecast:
        """Return what is known.

        Args:
            clients: of a simulation.
        """
        method, config = self.check.method, self.check.config
        up, down = self._mean("up"), self._mean("down")
        seconds = self._mean("seconds")
        return Forecast(
            protocol=self.variant.label,
            epsilon=self.level,
            dp_unit=method.dp_unit,
            delta=method.delta,
            noise=float(config["noise"]),
            rounds=int(method.total_rounds),
            power=self.power,
            runs=len(self.rows),
            left_out=self.left_out,
            ari=self._mean("ari"),
            ari_least=min(self._values("ari"), default=None),
            ari_most=max(self._values("ari"), default=None),
            accuracy=self._mean("accuracy"),
            accuracy_least=min(self._values("accuracy"), default=None),
            accuracy_most=max(self._values("accuracy"), default=None),
            up=None if up is None or not self.masked else round(up / clients),
            down=None if down is None or not self.masked else round(down / clients),
            seconds=None if seconds is None else round(seconds, 3),
        )

    def _values(self, name: str) -> list[float]:
        """Return a column of the simulations."""
        return [float(row[name]) for row in self.rows if row[name] is not None]

    def _mean(self, name: str) -> float | None:
        """Return the mean of a column; None where there is no value."""
        values = self._values(name)
        return math.fsum(values) / len(values) if values else None


def _without_masks(check: RunCheck) -> tuple[Any, bool]:
    """Return the method to simulate, and whether its messages are those of the run.

    Args:
        check: the run.
    """
    method = check.method
    if not method.sums.hide_replies or len(check.federation) <= MOST_MASKED:
        return method, True
    params = method.get_params()
    plain: dict[str, Any] = {"aggregation": "plain"}
    defaults = {item.name: item.default for item in fields(type(method))}
    # of secure sums alone
    for name in ("cohort_size", "least_members", "lost", "colluding", "exact_weights"):
        if name in params:
            plain[name] = defaults[name]
    if method.privacy.placed(method) == "distributed":
        # shares of noise are for the fewest survivors whose sum is read, and all clients reply
        shares = sum_plan_of(check.config).least_survivors(len(check.federation))
        noise = float(check.config["noise"]) * math.sqrt(len(check.federation) / shares)
        plain |= {"placement": "central", "noise": noise, "target_epsilon": None}
    return type(method)(**{**params, **plain}), False


def cost(check: RunCheck) -> float:
    """Return the work of a simulation, in samples that clients train on.

    Args:
        check: the run.
    """
    method, clients = check.method, len(check.federation)
    samples = sum(len(shard.y) for shard in check.federation.shards)
    rounds = max(method.rounds, method.total_rounds)
    trained = samples * method.epochs * rounds * (1 + check.config["dimension"] / DOUBLED)
    if method.privacy.noisy and method.privacy.per_example:
        trained *= OWN_GRADIENT
    return float(trained + PAIRED * clients * samples)


def _notes(
    lines: Sequence[_Line],
    forecasts: Sequence[Forecast],
    sample: PublicSample,
    shift: str,
    work: float,
) -> list[str]:
    """Return what follows by formula, what was simulated and what was left out, in sentences.

    Args:
        lines: of the plan.
        forecasts: of the lines.
        sample: that was simulated on.
        shift: how clusters differ.
        work: of all simulations at most.
    """
    notes = ["by formula, as of the run itself: noise, rounds and power check"]
    runs = sorted({len(line.rows) for line in lines if line.rows})
    if runs:
        times = f"{runs[0]} to {runs[-1]} runs" if len(runs) > 1 else f"{runs[0]} run(s)"
        notes.append(
            f"simulated, {times} each: ARI, accuracy, kB and seconds, on {len(sample.y):,} public "
            f"rows of {sample.name} ({shift}); no private data were read"
        )
        if sample.name != OWN_SAMPLE:
            notes.append(
                f"scores are those of {sample.name}, and your data have others: a public sample of "
                "your own says more (--public)"
            )
    left_out = [f"{line.left_out} of {line.name}" for line in lines if line.left_out]
    if left_out:
        notes.append(
            f"left out for time, simulations: {', '.join(left_out)}; clients of all simulations "
            f"train on {work:g} million samples at most (--work)"
        )
    plain = dict.fromkeys(line.label for line in lines if line.rows and not line.masked)
    if plain:
        notes.append(
            f"left out for time, masks of secure sums, and with them kB: {', '.join(plain)}; masks "
            "change no sum, so a trusted server added as much noise to plain ones"
        )
    if 1 in runs:
        notes.append("could not tell how far runs differ where there is a single one")
    if not all(
        _tells(line.ari_least, line.ari_most) and _tells(line.accuracy_least, line.accuracy_most)
        for line in forecasts
    ):
        notes.append(f"could not tell: simulations differ by more than {WIDE:g}")
    return notes


def frontier(outlook: Outlook, axes: Any = None) -> Figure:
    """Return a picture of what ε buys: simulated ARI and accuracy over ε.

    Args:
        outlook: with simulations.
        axes: matplotlib axes to draw accuracy on alone; None for a new figure with both.

    Raises:
        UsageError: nothing was simulated, or given axes for ε of both units.
    """
    from securecluster.studies import plan_figure as picture
    from securecluster.studies.sweep_figures import units

    rows = [asdict(line) for line in outlook.forecasts if line.runs]
    if not rows:
        raise UsageError("nothing was simulated, so there is nothing to draw: give more work")
    if axes is not None and len(units(rows)) > 1:
        raise UsageError(
            "this plan has ε of one client and ε of one example, which share no axis: draw it "
            "without axes of your own"
        )
    title = f"{outlook.clients} clients with {outlook.samples} samples each"
    figure: Figure = picture.frontier(rows, title, axes)
    return figure


__all__ = ["Forecast", "Outlook", "frontier", "plan"]
