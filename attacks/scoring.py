"""Scores of attacks: a value with an interval, and the same for a guess about others.

The negative control scores the same guess against a truth whose subjects are shuffled. What it
reaches is what a guess without any information about the subjects reaches: chance.

Intervals are those of the bootstrap over units, such as clients. What a score fits to its units,
such as the best matching of labels, stays as it is fitted to all of them: resamples repeat units,
and a maximum that is taken anew on each lies above the score itself, so that its percentiles would
begin there. The best choice, held fixed, is the derivative of the maximum, by which the bootstrap
is right again where one choice is best (Fang & Santos 2019, Inference on Directionally
Differentiable Functions, Theorem 3.2). A bound with an error of its own has no interval, and
neither has a score without spread between units, of which a bootstrap tells no width. A true
positive rate has the exact interval of Clopper and Pearson (1934), at the threshold that the
non-members give: at low rates few members are found, of which a bootstrap makes too little.

A score within the range of shuffled truths is at chance; one beyond it whose own interval reaches
into it is undecided. A rate is told where units suffice for it: a true positive rate at 0.1 % takes
1000 non-members, and `Scorer.why_not` says how many are missing.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import Attack, Guess, Knowledge, Scorer, Truth, View, unmet
from securecluster.errors import UsageError

RESAMPLES = 1000  # bootstrap samples
SHUFFLES = 200  # of the negative control
LEVEL = 0.95  # of all intervals
# verdicts
BETTER = "better than chance"
CHANCE = "at chance"
UNDECIDED = "not decided"
# how an interval was found, or why there is none
BOOTSTRAP = "bootstrap"
EXACT = "exact (Clopper–Pearson)"
OF_BOUND = "none: the score is a bound with an error of its own"
OF_COUNT = "none: what was read is counted, and not estimated"
OF_EQUALS = "none: all units score alike"
SPREAD = 1e-9  # relative width below which an interval is rounding


@dataclass(frozen=True)
class Interval:
    """Range of a score at the level `LEVEL`.

    Args:
        low: lower end.
        high: upper end.
    """

    low: float
    high: float

    @classmethod
    def of(cls, values: Array) -> Interval:
        """Return the central interval of a sample.

        Args:
            values: (n,).
        """
        tail = (1 - LEVEL) / 2
        low, high = np.quantile(values, [tail, 1 - tail])
        return cls(float(low), float(high))


@dataclass(frozen=True)
class Score:
    """Success of one attack.

    Args:
        metric: what the value measures.
        value: of the guess.
        interval: of the value over units, such as clients; None if there is none.
        chance: mean of the negative control; of a bound its median.
        chance_interval: interval of the negative control over shuffled truths, by which a score is
            at chance or not.
        higher: True if a larger value is a more successful attack.
        units: number of units.
        interval_by: how the interval was found, or why there is none.
    """

    metric: str
    value: float
    interval: Interval | None
    chance: float
    chance_interval: Interval
    higher: bool
    units: int
    interval_by: str = BOOTSTRAP

    @property
    def beats_chance(self) -> bool:
        """Return True if the interval lies on the better side of the negative control's.

        A score without an interval stands for itself.
        """
        interval = self.interval or Interval(self.value, self.value)
        if self.higher:
            return interval.low > self.chance_interval.high
        return interval.high < self.chance_interval.low

    @property
    def at_chance(self) -> bool:
        """Return True if shuffled truths give scores as good as this one, to within rounding."""
        rounding = SPREAD * max(1.0, abs(self.value))
        if self.higher:
            return self.value <= self.chance_interval.high + rounding
        return self.value >= self.chance_interval.low - rounding

    @property
    def verdict(self) -> str:
        """Return the verdict, which takes the spread of the score and that of chance into account.

        A score beyond chance whose interval reaches into that of chance decides nothing.
        """
        if self.at_chance:
            return CHANCE
        if self.beats_chance:
            return BETTER
        return UNDECIDED


class AgainstOthers(Scorer):
    """Base class of scorers that compare each guess with the truth about its subject.

    The negative control compares it with the truth about another subject.
    """

    @abstractmethod
    def compared(self, guess: Guess, truth: Truth, subjects: list[Any]) -> Array:
        """Return how well each guess agrees with the truth about a subject, (n,) or (n, …).

        Args:
            guess: by the attack.
            truth: of the run.
            subjects: for each guess the one that it is compared with.
        """

    def others(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> list[Any]:
        """Return for each guess the subject that the control compares it with: they are shuffled.

        Args:
            guess: by the attack.
            truth: of the run.
            draw: source of the shuffle.
        """
        subjects = list(guess.values)
        order = draw.permutation(len(subjects))
        return [subjects[k] for k in order]

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the agreement of each guess with the truth about its own subject.

        Args:
            guess: by the attack.
            truth: of the run.
        """
        return self.compared(guess, truth, list(guess.values))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the agreement of each guess with the truth about another subject.

        Args:
            guess: by the attack.
            truth: of the run.
            draw: source of the other subjects.
        """
        others = self.others(guess, truth, draw)
        return self.compared(guess, truth, others)


class AgainstOtherClients(AgainstOthers):
    """Base class of scorers whose control compares with any other client of the run."""

    def others(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> list[int]:
        """Return for each client of a guess a random other one, never the client itself.

        Args:
            guess: by client.
            truth: of the run.
            draw: source of the other clients.
        """
        clients = len(truth.federation)
        others = []
        for client in guess.values:
            step = int(draw.integers(1, clients)) if clients > 1 else 0
            others.append((client + step) % clients)
        return others


def cosine(row: Array, other: Array) -> float:
    """Return the cosine of two rows; 0 if one of them is zero.

    Args:
        row: (d,).
        other: (d,).
    """
    lengths = float(np.linalg.norm(row) * np.linalg.norm(other))
    if lengths > 0:
        return float(row @ other) / lengths
    return 0.0


def score(scorer: Scorer, guess: Guess, truth: Truth, seed: int = 0) -> Score:
    """Return the score of a guess.

    Args:
        scorer: of the attack.
        guess: the attack's.
        truth: of the run.
        seed: of the bootstrap and the negative control.

    Raises:
        UsageError: the guess is about no unit, a value of it is no number, or this score cannot be
            told of it.
    """
    reason = scorer.why_not(guess, truth)
    if reason is not None:
        raise UsageError(f"there is no {scorer.metric}: {reason}")
    draw = np.random.default_rng(seed)
    units = np.asarray(scorer.units(guess, truth))
    count = len(units)
    if not count:
        raise UsageError(
            f"a guess of {guess.quantity} that names nothing has no score: let the attack say that "
            "it is not applicable"
        )
    value = scorer.summary(units)
    if np.isnan(value):
        raise UsageError(
            f"a guess of {guess.quantity} has NaN among its values, which agrees with nothing: let "
            "the attack leave such subjects out"
        )
    interval, interval_by = _interval(scorer, units, value, draw)
    # Each control draws a new wrong truth, so its spread is that of guessing without information.
    controls = scorer.controls(guess, truth, draw, SHUFFLES)
    # a shuffle that is nearly the truth gives a bound that is as good as infinite
    chance = np.median(controls) if scorer.bound else np.mean(controls)
    return Score(
        metric=scorer.metric,
        value=value,
        interval=interval,
        chance=float(chance),
        chance_interval=Interval.of(np.asarray(controls)),
        higher=scorer.higher,
        units=count,
        interval_by=interval_by,
    )


def _interval(
    scorer: Scorer, units: Array, value: float, draw: np.random.Generator
) -> tuple[Interval | None, str]:
    """Return the interval of a score, and how it was found or why there is none.

    Args:
        scorer: of the attack.
        units: what the score is made of, (n, …).
        value: the score.
        draw: of the resamples.
    """
    count = len(units)
    if scorer.bound:
        return None, OF_BOUND
    if scorer.counted:
        return None, OF_COUNT
    exact = scorer.exact_interval(units)
    if exact is not None:
        return Interval(*exact), EXACT
    summary = scorer.of_resamples(units)
    # Units are resampled whole: rows of one client depend on each other.
    resampled = [summary(draw.integers(0, count, count)) for _ in range(RESAMPLES)]
    interval = _unbiased(np.asarray(resampled), value)
    if interval.high - interval.low <= SPREAD * max(1.0, abs(value)):
        return None, OF_EQUALS
    return interval, BOOTSTRAP


def further_scores(
    attack: Attack, guess: Guess, truth: Truth, seed: int = 0
) -> dict[str, Score | str]:
    """Return the scores of an attack's further scorers, by their metrics.

    Args:
        attack: the attack; it may have scorers in an attribute `further`.
        guess: its guess.
        truth: of the run.
        seed: of the bootstrap and the negative control.

    Returns:
        Each score, or why it cannot be told.
    """
    further: dict[str, Score | str] = {}
    for scorer in attack.further:
        reason = scorer.why_not(guess, truth)
        further[scorer.metric] = reason or score(scorer, guess, truth, seed)
    return further


def _unbiased(resampled: Array, value: float) -> Interval:
    """Return the bootstrap interval of a score, without the bootstrap's bias.

    Percentiles are shifted by the mean difference between resamples and score, though not beyond
    what was reached, so that a share stays one, and not beyond the score, since a few resamples of
    one unit alone may be far from all others.

    Args:
        resampled: scores of resamples, (n,).
        value: the score itself.
    """
    # bootstrap estimate of bias (Efron & Tibshirani 1993, Section 10.2)
    bias = float(np.mean(resampled)) - value
    reached = np.append(resampled, value)
    shifted = Interval.of(resampled - bias)
    low = max(shifted.low, float(reached.min()))
    high = min(shifted.high, float(reached.max()))
    return Interval(min(low, value), max(high, value))


def evaluate(
    attack: Attack, view: View, knowledge: Knowledge, truth: Truth, seed: int = 0
) -> Score | str:
    """Run an attack and score its guess.

    Args:
        attack: the attack.
        view: what the adversary observed.
        knowledge: what it knows besides.
        truth: of the run.
        seed: of the bootstrap and the negative control.

    Returns:
        The score, or why the attack is not applicable.

    Raises:
        UsageError: the attack needs an anonymous view, and this one names the clients.
    """
    if attack.anonymous and not view.anonymous:
        raise UsageError(
            f"{attack.name} would read its answer from a view that names the clients: make it with "
            "anonymous=True"
        )
    reason = unmet(attack, truth) or attack.applies(view, knowledge)
    if reason:
        return reason
    guess = attack.run(view, knowledge)
    return score(attack.scorer, guess, truth, seed)
