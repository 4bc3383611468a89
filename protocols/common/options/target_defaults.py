"""Defaults under a target ε: options that nobody gave, chosen from public quantities before a run.

A budget buys other runs than those without noise: forty rounds of a network with thousands of
parameters are a good default for the one, and the end of the other. With `target_epsilon`, options
that are not given are chosen by one rule, from the number of clients, the form of a sample, the
number of classes, the options that are given and, for the privacy of single examples, the clients'
numbers of samples. All of these are public in such a run (`runs.config.known`,
`PrivacyOptions.needs_samples`), so the choice costs nothing. The rule, in this order:

1. Clip norm 1 where there is none, since noise needs a bound.
2. Secure sums with noise in shares, where all that clients send of whole clients is in sums: a mean
   over m clients then has the noise of one release in place of m.
3. Larger batches of DP-SGD (`_larger_batch`), with a learning rate that grows with their root
   (Krizhevsky 2014, "One weird trick", section 5): at one ε models are as accurate
   (`benchmarks.private.batches`), and up to ten times fewer Gaussians are drawn.
4. As long as the power check (`runs.power_check`) does not say that training and clusters carry:
   the linear network; one start; of whole clients' updates fewer rounds, by halves, down to
   `FEWEST`; less noise in what clusters follow from, by halves, as long as that of training grows
   by no more than `DEARER`.
5. Where clusters still do not carry, for methods that cluster by updates as they are or shortened
   (`cfl`, `flhc`): the first mechanism of `MECHANISMS` that brings them closer, with the changes of
   2 to 4 anew, and does not drown training: a signature, which is sent once, or else sketches.

In DP-SGD no rounds are given up: at one ε the noise of a step grows with the root of their number
T, so both the noise of all steps and what they learn grow with T, and their ratio stays. The
exception are models that every client tunes without noise in the end (`finetune`, `tune_rounds`),
which start from all of that noise: their own network stays, with its rounds, until the check says
that training is drowned, and with the linear one rounds are given up from `ENOUGH_TUNED` on.

Participation stays at 1, its default: no amplification by sampling clients is claimed, and a mean
over fewer clients has more noise. Never chosen are options that say what is protected, and from
whom: the unit of privacy, δ, masks, and a trusted server. An option that is given stays as it is,
also with the value that it has by default.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from securecluster.errors import SecureClusterError
from securecluster.parties import power_check
from securecluster.parties.derived import CHOSEN, given_options, training_sizes
from securecluster.protections.registry import ADVISED

if TYPE_CHECKING:
    from securecluster.data.facts import Facts
    from securecluster.parties.method import Method

CLIP = 1.0
# a batch's part of the smallest client's samples, and its most samples, with which memory and the
# rounding of sums stay small (not in the papers)
PART = 4
LARGEST_BATCH = 200
DISTRIBUTED = "distributed"
FEWEST = 10  # rounds
# Strain of training, by kinds of rows, up to which rounds are kept. A clipped update moves a model
# by S at most, and its noise counts in full, so that fewer rounds help beyond what is borne. Found
# on the settings of `benchmarks.private.target` called "development" and "drowned".
ENOUGH: Mapping[str, float] = {power_check.UPDATE: -0.5, power_check.GRADIENTS: math.inf}
ENOUGH_TUNED = 0.6  # of DP-SGD on the linear network, before it is tuned without noise
TUNED_DROWNED = 1.0  # strain of training up to which a network that is tuned stays
# strain of training from which on a choice counts as bad
LOST: Mapping[str, float] = {power_check.UPDATE: 1.0, power_check.GRADIENTS: 0.6}
DIGITS = 2  # of strains that are compared
# what a larger share for clusters may cost: noise of training over that before, which is reached
# where clusters get about a third of the budget
DEARER = 1.25
STARTS = 1
# options by which clusters are read, in the order in which they are tried
MECHANISMS: tuple[Mapping[str, Any], ...] = (
    {"signature": "gradient"},
    {"sketch": power_check.SKETCHED},
)
# options that make another algorithm of a method
ALGORITHM = frozenset[str]().union(*MECHANISMS)
# options that are the noise of what clusters follow from over that of training, by kinds of rows
RATIOS: Mapping[str, tuple[str, ...]] = {
    power_check.DESCRIPTOR: ("descriptor_noise", "cluster_noise"),
    power_check.EXAMPLES: ("cluster_noise",),
    power_check.SIGNATURE: ("cluster_noise",),
    power_check.GRAM: ("cluster_noise",),
    power_check.EIGENVECTORS: ("cluster_noise",),
    power_check.LOSSES: ("loss_noise",),
    power_check.GRADIENTS: ("first_noise", "gradient_noise"),
}


def chosen_for(method: Method, facts: Facts) -> dict[str, Any]:
    """Return the options that a target ε chooses for a run, by name, in place of their defaults.

    Args:
        method: with a `target_epsilon`.
        facts: of the clients and their data, of which public ones are read.

    Raises:
        UsageError: options that were given do not work with these clients.
    """
    free = method.get_params().keys() - given_options(method)
    start = _started(method, facts, free, {})
    candidate = _Candidate.of(method, facts, start)
    if candidate is not None:
        candidate = _improved(candidate, free)
        # what other methods cluster by is what they are, and no choice
        by_updates = free >= {"signature", "sketch", "compress"}
        for mechanism in MECHANISMS:
            if candidate.strain(power_check.CLUSTERS) > 0 and by_updates:
                other = _improved_with(mechanism, candidate, free)
                if other is not None:
                    candidate = other
                    break
        start = dict(candidate.chosen)
    if "batch_size" in start:
        # the network is known now, by which the usual rate goes
        usual = _with(method, start).training.resolved(method, facts, {})["lr"]
        larger = start["batch_size"] / method.training.batch_size
        start["lr"] = float(f"{usual * math.sqrt(larger):.3g}")
    return {name: value for name, value in start.items() if getattr(method, name) != value}


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Options that may be chosen, with the power check of a run with them."""

    method: Any
    facts: Facts
    chosen: Mapping[str, Any]
    check: power_check.PowerCheck
    noise: float

    @classmethod
    def of(cls, method: Any, facts: Facts, chosen: Mapping[str, Any]) -> _Candidate | None:
        """Return a candidate; None of a run that cannot be, or whose noise has no limits."""
        made = _with(method, chosen)
        try:
            made.check(facts.clients)
            config = made.config(facts, "float32")
            check = power_check.powers_of(made, facts, config)
        except SecureClusterError:
            return None
        if not check.powers:
            return None
        return cls(method, facts, chosen, check, float(config["noise"]))

    @property
    def strains(self) -> tuple[float, ...]:
        """Return how far the uses are from what is enough for them, the worse off first."""
        excess = [
            max(self.strain(power_check.CLUSTERS), 0.0),
            max(self.strain(power_check.TRAINING) - self.enough, 0.0),
        ]
        return tuple(sorted((round(strain, DIGITS) for strain in excess), reverse=True))

    @property
    def enough(self) -> float:
        """Return the strain of training up to which no rounds are given up."""
        worst = self.check.worst(power_check.TRAINING)
        if worst is None:
            return 0.0
        if self.tuned and worst.kind == power_check.GRADIENTS:
            small = self.value("model") == power_check.SMALL_NETWORK
            return ENOUGH_TUNED if small else TUNED_DROWNED
        return ENOUGH[worst.kind]

    @property
    def tuned(self) -> bool:
        """Return whether clients tune their models without noise after the run."""
        return bool(self.method.training.tuning(self.method))

    @property
    def drowned(self) -> bool:
        """Return whether the noise of training is too much for whatever else is chosen."""
        worst = self.check.worst(power_check.TRAINING)
        return worst is not None and worst.strain >= LOST[worst.kind]

    def strain(self, use: str) -> float:
        """Return the place of a use between its limits, on a log scale: 0 and 1 at the limits."""
        worst = self.check.worst(use)
        return 0.0 if worst is None else worst.strain

    def value(self, option: str) -> Any:
        """Return the value of an option."""
        return self.chosen.get(option, getattr(self.method, option))

    def with_options(self, **options: Any) -> _Candidate | None:
        """Return the candidate with other options; None where a run cannot have them."""
        return _Candidate.of(self.method, self.facts, {**self.chosen, **options})

    def changed(self, **options: Any) -> _Candidate:
        """Return the candidate with other options if these help, and else itself."""
        other = self.with_options(**options)
        if other is None or other.strains >= self.strains:
            return self
        return other


def _improved(candidate: _Candidate, free: set[str]) -> _Candidate:
    """Return a candidate with the changes of the rule that help.

    Args:
        candidate: what is changed.
        free: names of options that are not given.
    """
    candidate = _smaller_network(candidate, free)
    if "starts" in free and any(candidate.strains):
        candidate = candidate.changed(starts=STARTS)
    candidate = _fewer_rounds(candidate, free)
    quieter = _quieter_clusters(candidate, free)
    if quieter is candidate:
        return candidate
    return _fewer_rounds(_smaller_network(quieter, free), free)


def _smaller_network(candidate: _Candidate, free: set[str]) -> _Candidate:
    """Return a candidate with the linear network, if training does not carry with its own."""
    threshold = TUNED_DROWNED if candidate.tuned else 0.0
    if "model" not in free or candidate.strain(power_check.TRAINING) <= threshold:
        return candidate
    smaller = candidate.with_options(model=power_check.SMALL_NETWORK)
    if smaller is None or smaller.strain(power_check.TRAINING) >= candidate.strain(
        power_check.TRAINING
    ):
        return candidate
    return smaller


def _fewer_rounds(candidate: _Candidate, free: set[str]) -> _Candidate:
    """Return a candidate with as many rounds as training bears, by halves."""
    worst = candidate.check.worst(power_check.TRAINING)
    configured_rounds = int(candidate.value("rounds"))
    if "rounds" not in free or worst is None or worst.strain <= candidate.enough:
        return candidate
    carried, drowned = worst.limits
    borne = carried * (drowned / carried) ** candidate.enough
    # at one ε, noise grows with the root of the number of releases
    affordable_rounds = max(configured_rounds * (borne / worst.ratio) ** 2, FEWEST)
    tried = [configured_rounds >> half for half in range(1, configured_rounds.bit_length())]
    fitting = [rounds for rounds in tried if rounds >= FEWEST]
    # from the first that is few enough on; a method may need more of them
    few = [rounds for rounds in fitting if rounds <= affordable_rounds][:1] or fitting[-1:]
    for rounds in reversed(fitting):
        if few and rounds >= few[0]:
            changed = candidate.changed(rounds=rounds)
            if changed is not candidate:
                return changed
    return candidate


def _quieter_clusters(candidate: _Candidate, free: set[str]) -> _Candidate:
    """Return a candidate with a larger share of the budget for what clusters follow from.

    Args:
        candidate: what is changed.
        free: names of options that are not given.
    """
    worst = candidate.check.worst(power_check.CLUSTERS)
    if worst is None or worst.strain <= 0:
        return candidate
    tries = [(name, 2.0**-half) for name in RATIOS.get(worst.kind, ()) for half in (1, 2, 3, 4)]
    quietest = candidate
    for option, value in tries:
        if option not in free:
            continue
        changed = candidate.with_options(**{option: value})
        if changed is None or changed.strain(power_check.CLUSTERS) >= quietest.strain(
            power_check.CLUSTERS
        ):
            break
        noise = changed.noise / candidate.noise
        if noise > DEARER:
            break
        quietest = changed
        if changed.strain(power_check.CLUSTERS) <= 0:
            break
    return quietest


def _improved_with(
    mechanism: Mapping[str, Any], baseline: _Candidate, free: set[str]
) -> _Candidate | None:
    """Return a candidate with another mechanism; None where it brings clusters no closer.

    Args:
        mechanism: options by which clusters are read.
        baseline: the candidate with the method's own mechanism.
        free: names of options that are not given.
    """
    try:
        start = _started(baseline.method, baseline.facts, free, mechanism)
    except SecureClusterError:
        return None
    other = _Candidate.of(baseline.method, baseline.facts, start)
    if other is None:
        return None
    other = _improved(other, free)
    drowns = other.drowned and not baseline.drowned
    return (
        other
        if other.strain(power_check.CLUSTERS) < baseline.strain(power_check.CLUSTERS) and not drowns
        else None
    )


def _started(
    method: Method, facts: Facts, free: set[str], mechanism: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a mechanism with a clip norm and, where they are possible, secure sums.

    Args:
        method: with the options that were given.
        facts: of the clients.
        free: names of options that are not given.
        mechanism: options.

    Raises:
        UsageError: a run cannot have these options.
    """
    chosen = dict(mechanism)
    if method.privacy.clip is None:
        chosen["clip"] = CLIP
    chosen |= _larger_batch(method, facts, free)
    secure = {**chosen, "aggregation": ADVISED}
    if "aggregation" in free and method.privacy.per_client:
        made = _with(method, secure)
        if _possible(made, facts) and made.privacy.placed(made) == DISTRIBUTED:
            return secure
    _with(method, chosen).check(facts.clients)
    return chosen


def _larger_batch(method: Method, facts: Facts, free: set[str]) -> dict[str, int]:
    """Return the batch size of DP-SGD, by name; nothing where it stays.

    It stays where it or the learning rate is given, where Adam finds its own rate, and where a
    larger rate may be too large: for terms of the loss that no clip bounds, and for models that are
    tuned without noise in the end.

    Args:
        method: with the options that were given.
        facts: of the clients, whose numbers of samples are public under DP-SGD with noise.
        free: names of options that are not given.
    """
    options = method.training
    plain = options.optimizer == "sgd" and not options.tuning(method)
    terms = {"weight_decay", "proximal", "ditto", "regularization"}
    if not (method.privacy.per_example and plain and free >= {"batch_size", "accumulate", "lr"}):
        return {}
    if any(getattr(method, name, 0) for name in terms):
        return {}
    size = min(min(training_sizes(method, facts)) // PART, LARGEST_BATCH)
    return {"batch_size": size} if size > options.batch_size else {}


def _possible(made: Any, facts: Facts) -> bool:
    """Return whether a run can have its options."""
    try:
        made.check(facts.clients)
    except SecureClusterError:
        return False
    return True


def _with(method: Method, chosen: Mapping[str, Any]) -> Any:
    """Return a copy of a method with some options, of which no more are chosen."""
    made: Any = copy.copy(method)
    made.set_params(**chosen)
    vars(made)[CHOSEN] = dict(chosen)
    # searches for exact noise would take seconds each
    made.privacy = made.privacy.for_estimates()
    return made
