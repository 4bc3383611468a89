"""Audits of differential privacy: lower bounds of ε from a run with canaries.

`with_canaries` repeats a run in which a coin decides for each client whether its updates are a
canary, a long row in a direction of its own, or zeros. What the server observes along the canary's
direction is the statistic that guesses the coin.

- One run (Steinke, Nasr & Jagielski 2023): of m coins, r are guessed and v guesses are right. An
  (ε, δ)-private run makes each guess right with a probability of about e^ε/(1 + e^ε) at most, so
  many right guesses refute a small ε. Nothing is assumed of the noise, and of the coins that they
  are fair and independent, as `tossed` tosses them.
- Two worlds (Dong, Roth & Su 2022): the statistics with and without the canary are samples of two
  Gaussians, and `securecluster.privacy.dp.auditing` bounds their distance μ. It is sharper, and
  holds for Gaussian noise alone. Half of its coins are heads (`heads`).

A bound above the ε that a ledger claims refutes the claim; one below proves nothing. Masks are left
out of the repeated run, since ε does not count on them. `securecluster.attacks.release_audits` does
the same for losses, Gram matrices, eigenvectors, and training with DP-SGD.

A canary that comes after the noise is refused: it would not be of the mechanism.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar, TypeVar

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import Attack, Guess, Harm, Knowledge, Scorer, Tap, Truth, View
from securecluster.attacks.experiments import with_malicious_updates
from securecluster.attacks.scoring import Score, score
from securecluster.attacks.views import knowledge_of, observed_updates, view_of
from securecluster.core.client_names import at
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.messaging.parties import SERVER
from securecluster.messaging.transcript import Parties
from securecluster.parties.derived import initial_model
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.dp.auditing import LONG, Audit, directions
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.settings import Settings

P = TypeVar("P", bound=ClusteringProtocol)
Array = NDArray[np.float64]

ERROR = 0.05  # probability that a bound of one run is false
# Canaries reach the whole μ of Gaussian noise, so a bound of two worlds is above a true claim this
# often: audits of many runs must not refute one.
TWO_WORLD_ERROR = 1e-3
HALVED = 40  # audits of half of the noise that are drawn
DELTA = 1e-5
CANARIES = "canaries"  # method of the tap that holds the coins
HALVES = "canaries of one half"  # the same, where half of the coins are heads
SEED = 20  # of the canaries' directions, which are public
FEWEST = 2  # statistics of each world that have a variance
NOISELESS = 1000.0  # largest μ that is told from infinity, since rounding is noise, too
MOST_NUMBERS = 50_000_000  # in all clients' canaries
HALVINGS = 40  # of the range that holds a bound


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Return how likely a private run allows this many correct guesses (Steinke et al., Thm. 5.2).

    Args:
        canaries: m, coins that were tossed.
        guesses: r, coins that were guessed.
        correct: v, guesses that are right.
        epsilon: ε of the run.
        delta: δ of the run.

    Returns:
        An upper bound of the probability, at most 1.
    """
    from scipy.stats import binom

    # randomised response: the best guess that ε-DP allows
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if not correct or not delta:
        return min(tail, 1.0)
    # the largest mean probability of falling short by 1, …, i guesses
    shortfalls = np.arange(1, correct + 1)
    sums = np.cumsum(binom.pmf(correct - shortfalls, guesses, right))
    largest = float((sums / shortfalls).max())
    return min(tail + 2 * canaries * delta * largest, 1.0)


@cache
def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, error: float = ERROR
) -> float:
    """Return the lower bound of ε that a number of correct guesses gives.

    Args:
        canaries: m, coins that were tossed.
        guesses: r, coins that were guessed; chosen before they are compared.
        correct: v, guesses that are right.
        delta: δ of the run.
        error: probability that the bound is false.

    Raises:
        UsageError: not 0 ≤ v ≤ r ≤ m.
    """
    if not 0 <= correct <= guesses <= canaries:
        raise UsageError(
            f"{correct} correct of {guesses} guesses about {canaries} canaries: give "
            "0 ≤ correct ≤ guesses ≤ canaries"
        )
    if one_run_p_value(canaries, guesses, correct, 0.0, delta) >= error:
        return 0.0
    # the p-value grows with ε: bracket the smallest ε that is not refuted, then bisect
    high = 1.0
    while one_run_p_value(canaries, guesses, correct, high, delta) < error:
        high *= 2
    low = 0.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if one_run_p_value(canaries, guesses, correct, middle, delta) < error:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True)
class Planted:
    """Statistics of clients' canaries in releases, and the ε that the ledger claims.

    Args:
        statistics: by client, larger where its canary shows.
        coins: by client, whether it had a canary.
        claimed: ε of the ledger at δ = `DELTA`.
        gaussian: True if both worlds are Gaussian, which `TwoWorldScorer` assumes; otherwise
            `RateScorer` takes its place.
        balanced: True if half of the coins are heads, and not each coin was tossed.
    """

    statistics: Mapping[int, float]
    coins: tuple[bool, ...]
    claimed: float
    gaussian: bool = True
    balanced: bool = True

    def score(self, scorer: Scorer, federation: Federation) -> Score:
        """Return a lower bound of ε, with its interval and negative control.

        Args:
            scorer: one- or two-world scorer.
            federation: the clients.
        """
        guess, truth = self._guessed(federation)
        return score(self._scorer(scorer), guess, truth)

    def bound(self, scorer: Scorer) -> float:
        """Return the lower bound of ε alone.

        Args:
            scorer: one- or two-world scorer.
        """
        used = self._scorer(scorer)
        return used.summary(used.units(*self._guessed(None)))

    def _scorer(self, scorer: Scorer) -> Scorer:
        """Return the scorer that fits the statistics."""
        return scorer if self.gaussian else RateScorer()

    def _guessed(self, federation: Any) -> tuple[Guess, Truth]:
        """Return the statistics as a guess, and the coins as the truth."""
        truth = Truth(federation, taps=(tap_of(self.coins, self.balanced),))
        return Guess("canaries", self.statistics), truth


def heads(clients: int, seed: int = 0) -> tuple[bool, ...]:
    """Return each client's coin; half of all coins are heads.

    Args:
        clients: number of clients.
        seed: of the coins.
    """
    coins = np.arange(clients) % 2 == 0
    np.random.default_rng(seed).shuffle(coins)
    return tuple(coins.tolist())


def tossed(clients: int, seed: int = 0) -> tuple[bool, ...]:
    """Return each client's coin, which is fair and independent of all others.

    Args:
        clients: number of clients.
        seed: of the coins.
    """
    coins = np.random.default_rng(seed).integers(0, 2, clients) == 1
    return tuple(coins.tolist())


def tap_of(coins: tuple[bool, ...], balanced: bool = True) -> Tap:
    """Return the tap that tells scorers the coins.

    Args:
        coins: of all clients.
        balanced: True if half of the coins are heads, and not each coin was tossed.
    """
    method = HALVES if balanced else CANARIES
    return Tap(method, "", 0, 0, tuple(range(len(coins))), coins)


def with_canaries(
    protocol: P,
    federation: Federation,
    settings: Settings | None = None,
    seed: int = 0,
    balanced: bool = False,
) -> tuple[P, tuple[Tap, ...]]:
    """Run a protocol whose clients send canaries or zeros instead of their updates.

    Args:
        protocol: its hyper-parameters; it is left as it is. Its mask is left out.
        federation: the clients and their data, which the updates do not depend on.
        settings: of the run; its transcript must be full.
        seed: of the coins.
        balanced: True makes half of the coins heads, for two worlds alone: the theorem of one run
            holds for coins that are tossed one by one.

    Returns:
        The fitted protocol, and taps for `truth_of` that hold the coins.

    Raises:
        UsageError: the protocol has no clip, so that no canary is longest, or its noise is in the
            training, which a canary would come after.
    """
    params = protocol.get_params()
    if params.get("clip") is None:
        raise UsageError("an audit needs a clip, which bounds a canary: give the clip norm")
    if params.get("dp_unit") == "example":
        raise UsageError(
            "the noise of dp_unit example is in the training, and a canary in place of an update "
            "would get none: dp-audit-training audits it"
        )
    clients = len(federation)
    coins = heads(clients, seed) if balanced else tossed(clients, seed)
    # longer than the clip norm, so that clipping brings every canary to the full sensitivity
    length = LONG * float(params["clip"])

    # Zeros and not the client's update: its direction would overlap canaries and blur the worlds.
    def plant(client: int, row: torch.Tensor, round: int) -> torch.Tensor:
        if not coins[client]:
            return torch.zeros_like(row)
        return (length * canaries(clients, len(row))[client]).to(row)

    # without a mask directions stay readable; masks do not count towards ε anyway
    unmasked = type(protocol)(**{**params, "mask": "none"})
    everybody = map(at, range(clients))
    fitted = with_malicious_updates(unmasked, federation, everybody, plant, settings)
    return fitted, (tap_of(coins, balanced),)


def planted_updates(
    protocol: ClusteringProtocol,
    federation: Federation,
    settings: Settings,
    parties: Parties = SERVER,
    balanced: bool = True,
) -> Planted:
    """Return what a repeated run shows of canaries in place of updates.

    Args:
        protocol: its hyper-parameters.
        federation: the clients.
        settings: of the run; its transcript must be full.
        parties: whose view is read.
        balanced: whether half of the coins are heads, as for two worlds.

    Raises:
        UsageError: see `with_canaries`; no update and no sum was observed; or the canaries would
            take too much memory.
    """
    numbers = len(federation) * initial_model(protocol, federation).dimension
    if numbers > MOST_NUMBERS:
        raise UsageError(f"canaries would take {numbers} numbers in memory")
    fitted, (tap,) = with_canaries(protocol, federation, settings, balanced=balanced)
    statistics = _statistics(view_of(fitted, parties), knowledge_of(fitted))
    if not statistics:
        raise UsageError("neither updates nor their sums were observed")
    claimed = fitted.ledger_.price(DELTA).epsilon
    return Planted(statistics, tuple(tap.reply), claimed, balanced=balanced)


@cache
def canaries(clients: int, width: int) -> torch.Tensor:
    """Return the orthogonal unit directions of all clients' canaries, (clients, width).

    Args:
        clients: number of clients.
        width: of an update.
    """
    return directions(clients, width, SEED)


class CanaryScorer(Scorer):
    """Scorer of statistics against coins; its units are (statistic, coin) of each client."""

    bound = True

    def why_not(self, guess: Guess, truth: Truth) -> str | None:
        """Return why there is no bound; None if there is one.

        Args:
            guess: statistics by client.
            truth: of the run.
        """
        if not np.all(np.isfinite(np.asarray(guess.listed, float))):
            return "a statistic is infinite or no number, so that it ranks nowhere"
        return None

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return each client's statistic and coin, (m, 2).

        Args:
            guess: statistics by client.
            truth: of the run, with the tap of `with_canaries`.
        """
        statistics = guess.listed
        coins = _coins(guess, truth)
        return np.asarray(list(zip(statistics, coins, strict=True)))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the statistics with shuffled coins, (m, 2).

        Args:
            guess: statistics by client.
            truth: of the run.
            draw: source of the shuffle.
        """
        units = self.units(guess, truth)
        units[:, 1] = draw.permutation(units[:, 1])
        return units


class OneRunScorer(CanaryScorer):
    """Lower bound of ε by the number of coins that are guessed right, all coins being guessed.

    Heads are guessed where a statistic is nearer to the mean of the larger half of them than to
    that of the smaller half.
    """

    metric = f"lower bound of ε at δ = {DELTA:g}, one run"

    def why_not(self, guess: Guess, truth: Truth) -> str | None:
        """Return why there is no bound; None if there is one.

        Args:
            guess: statistics by client.
            truth: of the run.
        """
        if any(tap.method == HALVES for tap in truth.taps):
            return "half of the coins are heads, and it takes coins that are tossed one by one"
        return super().why_not(guess, truth)

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return each client's guess, 1 or 0, and coin, (m, 2).

        Args:
            guess: statistics by client.
            truth: of the run, with the tap of `with_canaries`.
        """
        units = super().units(guess, truth)
        smaller, larger = np.array_split(np.sort(units[:, 0]), 2)
        middle = (smaller.mean() + larger.mean()) / 2
        units[:, 0] = units[:, 0] >= middle
        return units

    def summary(self, units: Array) -> float:
        """Return the lower bound of ε.

        Args:
            units: (m, 2).
        """
        correct = int((units[:, 0] == units[:, 1]).sum())
        return one_run_epsilon(len(units), len(units), correct, DELTA)


def by_outlier(present: Array, absent: Array) -> float:
    """Return the lower bound of ε by the statistic of the canary that shows most.

    One client whose contribution is not bounded is lost in means. Of an (ε, δ)-private release a
    statistic of probability p without the canary has one of e^ε·p + δ at most with it, and there
    are as many tries as canaries.

    Args:
        present: statistics of canaries, (n,).
        absent: those of the others, (m,), at least two.
    """
    from scipy import stats

    deviation = float(absent.std(ddof=1))
    if not deviation:
        return 0.0
    distance = (float(present.max()) - float(absent.mean())) / deviation
    # the mean and the deviation are estimated of m
    chance = float(stats.t.sf(distance / math.sqrt(1 + 1 / len(absent)), len(absent) - 1))
    beyond_delta = TWO_WORLD_ERROR / len(present) - DELTA
    if beyond_delta <= 0:
        return 0.0
    return max(0.0, math.log(beyond_delta) - math.log(max(chance, math.ulp(0.0))))


def with_half_the_noise(planted: Planted, scorer: Scorer, draws: int = HALVED) -> float:
    """Return the bound that half of the claimed noise would give in nineteen of twenty audits.

    The statistics are drawn anew: of a Gaussian release whose ε is the ledger's, with half of its
    noise. An audit that would not refute this cannot tell whether the noise is there.

    Args:
        planted: with the coins, and the ledger's ε.
        scorer: one- or two-world scorer.
        draws: of all statistics.
    """
    low, high = 0.0, 1.0
    while gaussian_epsilon(high, DELTA) < planted.claimed and high < NOISELESS:
        high *= 2
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if gaussian_epsilon(middle, DELTA) < planted.claimed:
            low = middle
        else:
            high = middle
    draw = np.random.default_rng(0)
    bounds = []
    for _ in range(draws):
        noise = draw.normal(size=len(planted.coins))
        shown = 2 * high * np.asarray(planted.coins, dtype=float) + noise
        drawn = replace(planted, statistics=dict(enumerate(shown.tolist())))
        bounds.append(drawn.bound(scorer))
    return float(np.quantile(bounds, 0.05))


class TwoWorldScorer(CanaryScorer):
    """Lower bound of ε by the distance of the statistics with and without a canary."""

    metric = f"lower bound of ε at δ = {DELTA:g}, two Gaussian worlds"

    def summary(self, units: Array) -> float:
        """Return the lower bound of ε.

        Args:
            units: (m, 2).
        """
        present, absent = _worlds(units)
        if min(len(present), len(absent)) < FEWEST:
            return 0.0
        # Without noise the variance is that of rounding, and its estimate of μ is arbitrary.
        spread = max(present.std(), absent.std())
        if present.mean() - absent.mean() > NOISELESS * spread:
            return float(gaussian_epsilon(NOISELESS, DELTA))
        # for Gaussian noise (ε, δ) follows from μ exactly (Dong et al. 2022, Cor. 2.13)
        mu = Audit(present, absent, 1 - TWO_WORLD_ERROR).by_moments(TWO_WORLD_ERROR)
        return max(float(gaussian_epsilon(mu, DELTA)), by_outlier(present, absent))


class RateScorer(CanaryScorer):
    """Lower bound of ε by hits and false alarms, which assumes nothing of the noise."""

    metric = f"lower bound of ε at δ = {DELTA:g}, two worlds"

    def summary(self, units: Array) -> float:
        """Return the lower bound of ε.

        Args:
            units: (m, 2).
        """
        present, absent = _worlds(units)
        # one half of each world chooses a threshold, and the other is tested
        if min(len(present), len(absent)) < FEWEST:
            return 0.0
        return Audit(present, absent, 1 - TWO_WORLD_ERROR).epsilon(DELTA)


class CanaryAudit(Attack):
    """Audit of noise, which repeats releases with canaries.

    Attributes:
        release: what is repeated; audits of the same releases may share a repetition.
    """

    release: ClassVar[str]

    @abstractmethod
    def planted_in(
        self,
        protocol: ClusteringProtocol,
        federation: Federation,
        settings: Settings,
        parties: Parties = SERVER,
    ) -> Planted:
        """Return what a repetition with canaries shows.

        Args:
            protocol: its hyper-parameters; it is left as it is.
            federation: the clients.
            settings: of the run; its transcript must be full.
            parties: whose view is read.

        Raises:
            UsageError: the protocol has no such release, or canaries do not fit it.
        """


class OneRunAudit(CanaryAudit):
    """Guesses which clients sent a canary, and bounds ε by the right ones.

    Args:
        planted: True for the runs of `with_canaries`; other runs have no canaries.
    """

    name = "dp-audit-one-run"
    learns = "who took part"
    harm = Harm.MEMBERS
    release = "updates, coins tossed"
    balanced: ClassVar[bool] = False
    source = "Steinke, Nasr & Jagielski 2023, Privacy Auditing with One (1) Training Run"
    needs = "updates or their sums, of a repeated run whose clients send canaries or zeros"
    scorer: ClassVar[Scorer] = OneRunScorer()

    def __init__(self, planted: bool = False) -> None:
        self.planted = planted

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not self.planted:
            return "not applicable: the run has no canaries; with_canaries repeats it with them"
        if not _statistics(view, knowledge):
            return "not applicable: neither updates nor their sums were observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return each client's statistic, larger where its canary shows.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        return Guess("canaries", _statistics(view, knowledge))

    def planted_in(
        self,
        protocol: ClusteringProtocol,
        federation: Federation,
        settings: Settings,
        parties: Parties = SERVER,
    ) -> Planted:
        """Return what a repeated run shows of canaries in place of updates.

        Args:
            protocol: its hyper-parameters.
            federation: the clients.
            settings: of the run.
            parties: whose view is read.

        Raises:
            UsageError: see `planted_updates`.
        """
        return planted_updates(protocol, federation, settings, parties, self.balanced)


class TwoWorldAudit(OneRunAudit):
    """Measures how far canaries move what the server observes, and bounds ε by it.

    Args:
        planted: True for the runs of `with_canaries`; other runs have no canaries.
    """

    name = "dp-audit-two-worlds"
    release = "updates"
    balanced = True
    learns = "who took part"
    harm = Harm.MEMBERS
    source = "Dong, Roth & Su 2022, Gaussian Differential Privacy; auditing: Nasr et al. 2021"
    scorer: ClassVar[Scorer] = TwoWorldScorer()


def _worlds(units: Array) -> tuple[Array, Array]:
    """Return the statistics of clients with canaries and of those without."""
    statistics, coins = units.T
    return statistics[coins == 1], statistics[coins == 0]


def _coins(guess: Guess, truth: Truth) -> list[float]:
    """Return the coins of the guess's clients.

    Raises:
        UsageError: the truth has no coins.
    """
    for tap in truth.taps:
        if tap.method in (CANARIES, HALVES):
            return [float(tap.reply[client]) for client in guess.values]
    raise UsageError("the truth has no canaries: give it the taps of with_canaries")


def _statistics(view: View, knowledge: Knowledge) -> dict[int, float]:
    """Return the sum of each client's releases along its canary, by its number.

    A sum over clients has the noise of all of them where each adds its own, so it counts less, and
    its terms are read where they can be.
    """
    planted = canaries(knowledge.clients, knowledge.width).double()
    statistics: dict[int, float] = {}
    # a trusted server reads terms without noise, and no ε says that it does not
    own_noise = knowledge.config.get("placement") != "central"
    terms = observed_updates(view, knowledge) if own_noise else []
    for update in terms:
        if update.sender.index is not None:
            along = float(update.row.double() @ planted[update.sender.index])
            earlier = statistics.get(update.sender.index, 0.0)
            statistics[update.sender.index] = earlier + along
    read = {(update.method, update.step) for update in terms}
    for outcome in view.outcomes:
        delta = getattr(outcome.content, "delta", None)
        if not isinstance(delta, Rows) or delta.values.shape[-1] != knowledge.width:
            continue
        if (outcome.method, outcome.step) in read:
            continue
        for row, group in zip(delta.values.double(), outcome.groups, strict=True):
            for client in group:
                # canaries are orthogonal, so those of the group's other clients add nothing
                along = float(row @ planted[client])
                earlier = statistics.get(client, 0.0)
                statistics[client] = earlier + along / len(group)
    return dict(sorted(statistics.items()))
