"""Power of a private run: the noise of what clients release beside the largest signal in it.

Everything here follows from public quantities: noise multipliers, clip norms, numbers of clients,
samples, parameters and rounds. No data are read, so it costs no privacy, and it is known before the
first client is asked.

A row of d numbers whose norm is at most B, with Gaussian noise of standard deviation σ in each, has
noise of norm σ√d, and r = σ√d/B compares it with the longest row:

    an update, clipped to S (unit client)         σ = zS,    B = S         r = z√d
    an update by T steps of DP-SGD                σ² of `LocalTraining.variance`,  B = T·lr·C
    a mean over n bounded terms (unit example)    σ = zB/n                 r = z√d/n
    losses under k models (unit client)           σ = zB√k,  B√k           r = z√k

The mean over m clients has r/m where they share one noise (placement distributed or central), and
r/√m where each adds its own.

How much noise is borne depends on what is read. `LIMITS` has two values of r for each kind: up to
the first, runs end as they do without noise, and from the second on as if nothing was read. They
were found on the runs of `benchmarks.private.noise` and `benchmarks.private.field --tune`, and
`benchmarks.private.power` checks them on others.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from securecluster.errors import SecureClusterError, SecureClusterWarning
from securecluster.parties.derived import initial_model, params_as_json
from securecluster.parties.dry_run import Draw, observed
from securecluster.parties.method import Method
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.ledger import COSTLESS, Event
from securecluster.runtime.endpoint import SUM

if TYPE_CHECKING:
    from securecluster.data.facts import Facts

CLUSTERS, TRAINING = "clusters", "training"
CARRIES, DOUBTFUL, DROWNED = "carries", "doubtful", "drowned"
_IN_A_WORD = {CARRIES: "fine", DOUBTFUL: "doubtful", DROWNED: "lost in noise"}  # of tables
# kinds of rows
UPDATE = "update"  # clipped to S as it leaves
GRADIENTS = "gradients"  # an update by DP-SGD
SKETCH = "sketch"  # a short row of a whole client, as a sketch of its update
SIGNATURE = "signature"  # of a whole client's gradients
EXAMPLES = "examples"  # a mean over bounded terms of examples, as their gradients' signature
DESCRIPTOR = "descriptor"  # moments of examples' latent vectors, by class
GRAM = "gram"  # a Gram matrix of examples, of which a few directions are read
EIGENVECTORS = "eigenvectors"  # with noise of their own
LOSSES = "losses"
CHOICE = "choice"  # by the exponential mechanism
MODELS = "models"  # updates of models whose losses tell the clusters
SUMS = "sums"  # rows that are read in sums only

LIMITS: dict[tuple[str, str], tuple[float, float]] = {
    (CLUSTERS, UPDATE): (1.7, 4.0),
    (CLUSTERS, GRADIENTS): (0.25, 2.6),
    (CLUSTERS, SKETCH): (0.8, 2.0),
    (CLUSTERS, SIGNATURE): (0.04, 0.8),
    (CLUSTERS, EXAMPLES): (0.25, 1.75),
    (CLUSTERS, DESCRIPTOR): (0.05, 0.3),
    (CLUSTERS, GRAM): (0.8, 3.0),
    (CLUSTERS, EIGENVECTORS): (0.005, 0.1),
    (CLUSTERS, LOSSES): (0.05, 0.2),
    (CLUSTERS, CHOICE): (0.6, 2.0),
    (CLUSTERS, MODELS): (0.45, 2.0),
    (CLUSTERS, SUMS): (0.6, 2.5),
    (TRAINING, UPDATE): (3.3, 10.0),
    (TRAINING, GRADIENTS): (0.5, 5.0),
}
# by the names of draws whose rows have a structure of their own
NAMED = {"gram": GRAM, "eigenvectors": EIGENVECTORS}
DESCRIPTORS = ("describe", "describe_features")  # calls of FLUX
SIGNATURES = ("signature", "coordinates")
# options that have the noise of some kinds in place of the run's, where they are given
OWN_NOISE = {
    GRAM: "gram_noise",
    EIGENVECTORS: "gram_noise",
    EXAMPLES: "signature_noise",
    SIGNATURE: "signature_noise",
}
# of remedies
BISECTIONS = 40
MOST_KNOWN = 256
SKETCHED = 64
SMALL_NETWORK = "linear"
FEWER = 4


_WORDS = {
    UPDATE: "update",
    GRADIENTS: "update by DP-SGD",
    SKETCH: "row",
    SIGNATURE: "signature",
    EXAMPLES: "mean over examples",
    DESCRIPTOR: "descriptor",
    GRAM: "Gram matrix",
    EIGENVECTORS: "eigenvectors",
    LOSSES: "row of losses",
    CHOICE: "choice",
    MODELS: "update of a model",
    SUMS: "row",
}
_FOLLOWS = {
    (CLUSTERS, CARRIES): "clusters can be read",
    (CLUSTERS, DOUBTFUL): "it is doubtful whether clusters can be read",
    (CLUSTERS, DROWNED): "clusters are lost in the noise",
    (TRAINING, CARRIES): "training hardly suffers",
    (TRAINING, DOUBTFUL): "training suffers",
    (TRAINING, DROWNED): "training is lost in the noise",
}


@dataclass(frozen=True)
class Power:
    """The noise of one kind of release beside its largest signal.

    Args:
        method: client method that releases it.
        field: of its reply.
        kind: what the rows are.
        use: "clusters" or "training".
        numbers: d, of a row.
        rows: clients whose rows are averaged in what is read; 1 where each is read by itself.
        ratio: r of what is read.
    """

    method: str
    field: str
    kind: str
    use: str
    numbers: int
    rows: float
    ratio: float

    @property
    def limits(self) -> tuple[float, float]:
        """Return r up to which nothing is lost, and from which nothing is left."""
        return LIMITS[self.use, self.kind]

    @property
    def verdict(self) -> str:
        """Return "carries", "doubtful" or "drowned"."""
        carried, drowned = self.limits
        if self.ratio <= carried:
            return CARRIES
        return DOUBTFUL if self.ratio < drowned else DROWNED

    @property
    def strain(self) -> float:
        """Return the place of r between its limits, on a log scale: 0 and 1 at the limits."""
        carried, drowned = self.limits
        return math.log(self.ratio / carried) / math.log(drowned / carried)

    def as_json(self) -> dict[str, Any]:
        """Return what result.json has of it."""
        carried, drowned = self.limits
        return {
            "method": self.method,
            "field": self.field,
            "kind": self.kind,
            "use": self.use,
            "numbers": self.numbers,
            "rows": round(self.rows, 1),
            "noise_over_signal": float(f"{self.ratio:.3g}"),
            "carried_up_to": carried,
            "drowned_from": drowned,
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Remedy:
    """A change of the run, and r after it.

    Args:
        change: in words, with options as on the command line.
        use: "clusters" or "training".
        ratio: r of what is read.
        verdict: of that r.
    """

    change: str
    use: str
    ratio: float
    verdict: str


@dataclass(frozen=True)
class PowerCheck:
    """Check of what noise leaves of a private run, as far as public quantities tell.

    Args:
        powers: of everything that clients release with noise.
        remedies: changes that would help, if anything is not carried.
    """

    powers: tuple[Power, ...]
    remedies: tuple[Remedy, ...] = ()

    def worst(self, use: str) -> Power | None:
        """Return the release that limits a use most; None where nothing noisy is used for it.

        Args:
            use: "clusters" or "training".
        """
        candidates = [power for power in self.powers if power.use == use]
        return max(candidates, key=lambda power: power.strain, default=None)

    def verdict(self, use: str) -> str | None:
        """Return the verdict of a use; None where nothing noisy is used for it.

        Args:
            use: "clusters" or "training".
        """
        worst = self.worst(use)
        return None if worst is None else worst.verdict

    @property
    def summary(self) -> str:
        """Return the verdicts in one phrase, as a table has them."""
        verdicts = {use: self.verdict(use) for use in (CLUSTERS, TRAINING)}
        return ", ".join(
            f"{use} {_IN_A_WORD[verdict]}" for use, verdict in verdicts.items() if verdict
        )

    @property
    def sentences(self) -> list[str]:
        """Return a sentence for each use, and one on what would change it."""
        sentences = []
        for use in (CLUSTERS, TRAINING):
            worst = self.worst(use)
            if worst is None:
                continue
            read = "each read by itself"
            if worst.rows > 1:
                read = f"in a mean over {worst.rows:.0f} clients"
            carried, drowned = worst.limits
            sentences.append(
                f"{_FOLLOWS[use, worst.verdict]}: the noise is {short(worst.ratio)} times as long "
                f"as the longest {_WORDS[worst.kind]} ({worst.numbers:,} numbers, {read}), where "
                f"{carried:g} is borne and {drowned:g} is too much"
            )
            changes = [
                f"{short(remedy.ratio)} times with {remedy.change}" for remedy in self.changes(use)
            ]
            if changes:
                sentences.append(f"it would be {', '.join(changes)}")
        return sentences

    @property
    def warning(self) -> str | None:
        """Return one sentence if noise drowns clusters or training, with what helps most."""
        for use in (CLUSTERS, TRAINING):
            worst = self.worst(use)
            if worst is None or worst.verdict != DROWNED:
                continue
            # less noise always helps, and is said last
            advice = ", or ".join(remedy.change for remedy in self.changes(use)[-3:])
            text = (
                f"{_FOLLOWS[use, DROWNED]}, which is {short(worst.ratio)} times as long as the "
                f"longest {_WORDS[worst.kind]}: try {advice}"
            )
            # with options as they are written here: in Python, or on the command line
            return str(SecureClusterWarning(text))
        return None

    def changes(self, use: str) -> list[Remedy]:
        """Return the remedies of one use.

        Args:
            use: "clusters" or "training".
        """
        return [remedy for remedy in self.remedies if remedy.use == use]

    def as_json(self) -> dict[str, Any]:
        """Return what result.json has of it."""
        return {
            "summary": self.summary,
            "clusters": self.verdict(CLUSTERS),
            "training": self.verdict(TRAINING),
            "sentences": self.sentences,
            "warning": self.warning,
            "releases": [power.as_json() for power in self.powers],
            "remedies": [
                {**vars(remedy), "ratio": float(f"{remedy.ratio:.3g}")} for remedy in self.remedies
            ],
        }


_KNOWN: dict[str, PowerCheck | None] = {}


def power_of(method: Method, facts: Facts, config: Mapping[str, Any]) -> PowerCheck | None:
    """Return what noise leaves of a run, without any data; None of a run without noise.

    Args:
        method: with its hyper-parameters.
        facts: of the clients and their data.
        config: what clients and server agreed on; "noise" is the run's multiplier.
    """
    if not method.privacy.noisy:
        return None
    # everything that it follows from: the terminal, the run and its result ask for the same check
    known_by = (
        f"{type(method).__module__}.{type(method).__qualname__}",
        params_as_json(method),
        list(facts.shape),
        facts.classes,
        facts.objective.as_json(),
        facts.clients,
        config["noise"],
        config["clip"],
        config["placement"],
        config.get("sizes"),
    )
    key = json.dumps(known_by, sort_keys=True, default=str)
    if key not in _KNOWN:
        while len(_KNOWN) >= MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)))
        measured = _Measured(method, facts, config)
        powers = tuple(measured.powers())
        check = PowerCheck(powers)
        remedies = tuple(_remedies(measured, check))
        _KNOWN[key] = PowerCheck(powers, remedies) if powers else None
    return _KNOWN[key]


def powers_of(method: Method, facts: Facts, config: Mapping[str, Any]) -> PowerCheck:
    """Return what `power_of` does, without remedies, which need further runs of stand-ins.

    Args:
        method: with its hyper-parameters.
        facts: of the clients and their data.
        config: what clients and server agreed on.
    """
    return PowerCheck(tuple(_Measured(method, facts, config).powers()))


def power_entry(method: Method, facts: Facts, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what result.json has of a run's power; None of a run without noise.

    Args:
        method: with its hyper-parameters.
        facts: of the clients and their data.
        config: what clients and server agreed on.
    """
    check = power_of(method, facts, config)
    return None if check is None else check.as_json()


class _Measured:
    """Releases of a run of stand-ins, and the public quantities that their power follows from."""

    def __init__(self, method: Method, facts: Facts, config: Mapping[str, Any]) -> None:
        self.method = method
        self.facts = facts
        self.config = config
        self.dry = observed(method, facts)
        self.dimension = initial_model(method, facts).dimension
        # with a target, stand-ins have the multiplier 1
        target = method.privacy.target_epsilon
        self.scale = 1.0 if target is None else float(config["noise"])
        self.per_example = config["dp_unit"] == "example"
        sizes = sorted(config.get("sizes") or [1])
        self.samples = int(sizes[len(sizes) // 2])
        params = method.get_params()
        self.sketched = params.get("sketch")
        self.k = int(params.get("k") or params.get("tasks") or 1)
        self.participation = float(params.get("participation", 1.0))

    def powers(self) -> Iterator[Power]:
        """Yield the power of each kind of release, once for each use."""
        emitted = set()
        rows = list(self._rows())
        by_losses = any(release_type == LOSSES for _, _, release_type, _, _ in rows)
        for event, field, release_type, numbers, ratio in rows:
            for use, name, clients in self._uses(event, release_type, by_losses):
                key = (event.method, field, use, name)
                if key in emitted:
                    continue
                emitted.add(key)
                read = numbers
                if (use, name) == (CLUSTERS, GRADIENTS) and self.sketched:
                    # a random rotation to q numbers has q/d of the noise
                    read = int(self.sketched)
                of_mean = ratio * math.sqrt(read / numbers) / self.averaged(event, clients)
                yield Power(event.method, field, name, use, read, clients, of_mean)

    def averaged(self, event: Event, clients: float) -> float:
        """Return the factor by which a mean over some clients has less noise than one row.

        Args:
            event: of which the rows are.
            clients: how many.
        """
        shared = event.verb == SUM and self.config["placement"] != "local"
        return clients if shared else math.sqrt(clients)

    def _rows(self) -> Iterator[tuple[Event, str, str, int, float]]:
        """Yield each noisy release with its field, its kind, d, and r of one row."""
        for event in self.dry.events:
            if event.mechanism in (*COSTLESS, "exact") or not event.noise_multiplier:
                continue
            z = self.scale * event.noise_multiplier
            if event.mechanism == "dp-sgd":
                yield event, "delta", GRADIENTS, self.dimension, self._of_training(event, z)
                continue
            field = event.fields[0] if event.fields else event.method
            draw = _draw_of(event, self.dry.draws)
            terms = self.samples if self.per_example else 1
            if draw is None:
                yield event, field, CHOICE, 1, z / terms
                continue
            # a row of blocks has one block of the client's own, and is an update in that block
            is_update = draw.numbers % self.dry.dimension == 0
            numbers = self.dimension if is_update else draw.numbers
            ratio = z * math.sqrt(numbers) / terms
            yield event, field, self._kind(event, draw, is_update), numbers, ratio

    def _kind(self, event: Event, draw: Draw, is_update: bool) -> str:
        """Return the kind of a row with Gaussian noise.

        Args:
            event: its release.
            draw: its noise.
            is_update: whether it is as long as the network.
        """
        if draw.purpose in NAMED:
            return NAMED[draw.purpose]
        if event.replace == 1.0 and not is_update:
            return LOSSES
        if self.per_example:
            return DESCRIPTOR if event.method in DESCRIPTORS else EXAMPLES
        if draw.purpose in SIGNATURES:
            return SIGNATURE
        return UPDATE if is_update else SKETCH

    def _of_training(self, event: Event, z: float) -> float:
        """Return r of an update by DP-SGD.

        Args:
            event: of the training.
            z: its noise multiplier.
        """
        # of Adam there is no closed form: it is taken for sgd, whose rate cancels
        plan = replace(
            self.method.training.usual(self.method, self.config),
            noise=z,
            epochs=event.epochs,
            batch_size=event.batch or self.samples,
            optimizer="sgd",
            momentum=0.0,
            steps=None,
        )
        longest = plan.number(self.samples) * plan.lr * float(self.config["clip"])
        return math.sqrt(self.dimension * plan.variance(self.samples)) / float(longest)

    def _uses(
        self, event: Event, release_type: str, by_losses: bool
    ) -> Iterator[tuple[str, str, float]]:
        """Yield what a release is used for, the kind of limits, and how many rows are averaged.

        Args:
            event: the release.
            release_type: of its rows.
            by_losses: whether clusters follow from losses under models.
        """
        clients = max(1.0, self.facts.clients * self.participation / self.k)
        if self.dry.alone:
            clients = 1.0
        finds = not self.dry.alone
        summed = event.verb == SUM
        if release_type in (UPDATE, GRADIENTS):
            yield TRAINING, release_type, clients
            if finds and by_losses:
                yield CLUSTERS, MODELS, clients if summed else 1.0
            elif finds and not summed:
                yield CLUSTERS, release_type, 1.0
        elif finds and summed and release_type != LOSSES:
            yield CLUSTERS, SUMS, clients
        elif finds and not summed:
            yield CLUSTERS, release_type, 1.0


def _draw_of(event: Event, draws: Sequence[Draw]) -> Draw | None:
    """Return the noise that was drawn for an event; None of a choice."""
    for draw in draws:
        if draw.step == event.step:
            return draw
    for draw in draws:  # of releases that are repeated to the bit
        if not draw.step and draw.multiplier == event.noise_multiplier:
            return draw
    return None


def _remedies(measured: _Measured, check: PowerCheck) -> Iterator[Remedy]:
    """Yield changes of the run with which more is carried, each with its r.

    Args:
        measured: the releases.
        check: their power.
    """
    for use in (CLUSTERS, TRAINING):
        worst = check.worst(use)
        if worst is None or worst.verdict == CARRIES:
            continue
        for change, ratio, release_type in _changes(measured, worst):
            after = replace(worst, kind=release_type, ratio=ratio)
            if after.strain < worst.strain:
                yield Remedy(change, use, ratio, after.verdict)


def short(value: float) -> str:
    """Return a positive number with two digits, and without an exponent where it is large."""
    if value >= 99.5:
        return f"{value:,.0f}"
    return np.format_float_positional(value, precision=2, fractional=False, trim="-")


def _changes(measured: _Measured, worst: Power) -> Iterator[tuple[str, float, str]]:
    """Yield changes in words, r after each, and the kind of rows that are read then.

    Args:
        measured: the releases.
        worst: the one that limits a use most.
    """
    method, ratio = measured.method, worst.ratio
    params = method.get_params()
    of_network = worst.numbers == measured.dimension
    releases = [event.step for event in measured.dry.events if event.method == worst.method]
    if method.privacy.target_epsilon is not None and len(releases) > FEWER:
        rounds = max(1, method.rounds // FEWER)
        share = math.sqrt(rounds / method.rounds)
        yield f"fewer rounds (--rounds {rounds})", ratio * share, worst.kind
    if of_network:
        small = _dimension(measured, model=SMALL_NETWORK)
        if small is not None and small < measured.dimension:
            share = math.sqrt(small / measured.dimension)
            yield f"a smaller network (--model {SMALL_NETWORK})", ratio * share, worst.kind
    if of_network and worst.use == CLUSTERS and params.get("sketch", 1) is None:
        share = math.sqrt(SKETCHED / worst.numbers)
        release_type = SKETCH if worst.kind == UPDATE else worst.kind
        yield f"clusters from sketches (--sketch {SKETCHED})", ratio * share, release_type
    mean = worst.rows > 1
    local = measured.config["placement"] == "local"
    if mean and local and _possible(measured, placement="distributed", aggregation="secagg"):
        change = "noise in shares (--placement distributed, --aggregation secagg)"
        yield change, ratio / math.sqrt(worst.rows), worst.kind
    carried = worst.limits[0]
    if mean and ratio > carried:
        times = (ratio / carried) ** (2 if local else 1)
        clients = math.ceil(measured.facts.clients * times)
        yield f"more clients ({clients:,})", carried, worst.kind
    yield _less_noise(measured, worst, carried / ratio), carried, worst.kind


def _less_noise(measured: _Measured, worst: Power, share: float) -> str:
    """Return in words which option has a release's noise, and the value by which it is less.

    Args:
        measured: the releases.
        worst: one of them.
        share: of its noise that is left.
    """
    params = measured.method.get_params()
    option = OWN_NOISE.get(worst.kind, "")
    if params.get(option):
        flag = option.replace("_", "-")
        return f"less noise (--{flag} {short(float(params[option]) * share)})"
    noise = float(measured.config["noise"]) * share
    if params.get("target_epsilon") is None:
        return f"less noise (--noise {short(noise)})"
    epsilon = _larger_epsilon(float(params["target_epsilon"]), float(params["delta"]), share)
    return f"a larger ε (--target-epsilon {short(epsilon)})"


def _larger_epsilon(epsilon: float, delta: float, share: float) -> float:
    """Return about the ε at which a run's noise is a share of what it is.

    A run of many releases is about as private as one Gaussian release (Dong et al. 2022), whose
    distance μ between neighbours, in deviations, grows as the noise shrinks.

    Args:
        epsilon: of the run.
        delta: δ of both.
        share: of the noise, below 1.
    """
    low, high = 1e-6, 1e6
    for _ in range(BISECTIONS):
        middle = math.sqrt(low * high)
        if gaussian_epsilon(middle, delta) < epsilon:
            low = middle
        else:
            high = middle
    return gaussian_epsilon(low / share, delta)


def _dimension(measured: _Measured, **changes: Any) -> int | None:
    """Return the numbers of the network of a changed method; None if it cannot be made."""
    changed = _changed(measured, changes)
    return None if changed is None else initial_model(changed, measured.facts).dimension


def _possible(measured: _Measured, **changes: Any) -> bool:
    """Return whether a changed method can run with these clients."""
    return _changed(measured, changes) is not None


def _changed(measured: _Measured, changes: Mapping[str, Any]) -> Method | None:
    """Return the method with other hyper-parameters; None where they do not go together."""
    params = measured.method.get_params()
    if not set(changes) <= set(params):
        return None
    try:
        made: Any = type(measured.method)(**{**params, **changes})
        made.check(measured.facts.clients)
        initial_model(made, measured.facts)
    except SecureClusterError:
        return None
    changed: Method = made
    return changed
