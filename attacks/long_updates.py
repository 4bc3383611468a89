"""Long updates: clients that send more than the clip that ε assumes.

An update u with ‖u‖ ≤ S and noise N(0, σ²) in d coordinates has ‖u + noise‖² of mean
‖u‖² + σ²d and variance 2dσ⁴ + 4‖u‖²σ². What is far beyond that was not clipped, or has more noise
than was agreed to. Masks keep lengths, so they are tested, too.
"""

from __future__ import annotations

import math

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import (
    NOISE,
    SUMS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.attacks.low_bits import noise_multiplier
from securecluster.attacks.views import observed_updates

FAR = 6.0  # standard deviations beyond which an update is too long
NOT_CLIPPED = "not applicable: clients of this run clip and noise no updates of their own"


class TooLong(Scorer):
    """Number of updates that are longer than the clip and the noise allow."""

    metric = "updates that are too long"
    counted = True

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each update that is too long, (n,).

        Args:
            guess: whether it is, by round and client.
            truth: of the run, unused.
        """
        return np.asarray(guess.listed, dtype=float)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return zeros: of clients that clip, none is.

        Args:
            guess: whether it is, by round and client.
            truth: of the run, unused.
            draw: unused.
        """
        return np.zeros(len(guess.values))

    def summary(self, units: Array) -> float:
        """Return their number.

        Args:
            units: (n,).
        """
        return float(units.sum())


class LongUpdates(Attack):
    """Says which updates are longer than the clip and the noise of the run allow."""

    name = "long-updates"
    learns = "whose contribution no ε covers, since it was not clipped"
    harm = Harm.MESSAGES
    source = "this project's threat model: the norm of a Gaussian vector"
    needs = "single updates with clients' noise"
    scorer = TooLong()
    reads = ("delta",)
    hidden_by = (NOISE, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        config = knowledge.config
        local = config.get("placement") in (None, "local") and config.get("dp_unit") != "example"
        if not local or not config.get("clip") or not noise_multiplier(config):
            return NOT_CLIPPED
        if not observed_updates(view, knowledge):
            return "not applicable: no single updates were observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return by call and client whether its update is too long.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        clip = float(knowledge.config["clip"])
        variance = (noise_multiplier(knowledge.config) * clip) ** 2
        d = knowledge.dimension
        spread = math.sqrt(2 * d * variance**2 + 4 * clip**2 * variance)
        longest = clip**2 + d * variance + FAR * spread
        too_long = {}
        for update in observed_updates(view, knowledge):
            length = float(update.row.double().square().sum())
            too_long[update.method, update.step, update.sender] = length > longest
        return Guess("too long", too_long)
