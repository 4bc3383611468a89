"""Repeated seed: the change of a client's row, from two runs that may share their noise.

If noise follows from a run's seed alone, then two runs on one seed have the same noise, and the
difference of what they release is that of their rows. Here a client's noise also follows from its
key, the configuration, the call and the row itself (`securecluster.privacy.dp.noise_streams`), so
rows that differ have independent noise. Equal rows of the same key, configuration and call are
released with equal bits: two such runs tell that nothing has changed, and no more.

Clients' noise is tried on pairs of rows that are made for the attack, half of them in runs of
one configuration and half in runs of two.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import Guess, Harm, Knowledge, Scorer, Truth, View
from securecluster.attacks.low_bits import RowMechanism, naive_release, near_rows, noise_multiplier
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp.noise_streams import NoiseStreams

PAIRS = 24
DIMENSION = 1024
RUNS = ("one configuration", "another configuration")
# (configuration's hash, row, noise multiplier, norm of rows, number of the call) -> released row
Release = Callable[[str, torch.Tensor, float, float, int], torch.Tensor]


def derived_release(
    run: str, row: torch.Tensor, multiplier: float, norm: float, number: int
) -> torch.Tensor:
    """Return a row with a simulated client's noise, whose key follows from a seed.

    Args:
        run: hash of the configuration.
        row: numbers of any shape.
        multiplier: noise multiplier.
        norm: norm of rows.
        number: of the call.
    """
    streams = NoiseStreams.derived(Randomness(0), run)
    return streams.noised(0, "update", number, row, multiplier, norm)


def seeded_release(
    run: str, row: torch.Tensor, multiplier: float, norm: float, number: int
) -> torch.Tensor:
    """Return a row with noise that follows from the seed and the call alone; no run sends it.

    Args:
        run: hash of the configuration, unused.
        row: numbers of any shape.
        multiplier: noise multiplier.
        norm: norm of rows.
        number: of the call.
    """
    return naive_release(row, multiplier, norm, number)


class RecoveredDifferences(Scorer):
    """Cosine of recovered differences with the true ones.

    The rows are the attack's own, so the truth about them is in the details of its guess.
    """

    metric = "cosine of the recovered difference with the true one"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the cosine of each pair, (pairs,).

        Args:
            guess: differences by number of the pair.
            truth: of the run, unused.
        """
        return self._cosines(guess, guess.details["differences"])

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the cosines with the differences of other pairs.

        Args:
            guess: differences by number of the pair.
            truth: of the run, unused.
            draw: of the order.
        """
        others = draw.permutation(guess.details["differences"])
        return self._cosines(guess, others)

    def _cosines(self, guess: Guess, true: Array) -> Array:
        """Return the cosines of recovered rows with rows (pairs, d)."""
        differences = np.stack(guess.listed)
        lengths = np.linalg.norm(differences, axis=1) * np.linalg.norm(true, axis=1)
        products = (differences * true).sum(1)
        return np.asarray(products / np.maximum(lengths, np.finfo(float).tiny))


class RepeatedSeed(RowMechanism):
    """Differences of rows, from two releases under one seed.

    Args:
        release: adds noise; None for the clients' own.
    """

    name = "repeated-seed"
    learns = "what changed in a client's data, from two runs on one seed"
    harm = Harm.MESSAGES
    source = "Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy, 3.5"
    needs = "single updates of a client in two runs on one seed"
    scorer = RecoveredDifferences()

    def __init__(self, release: Release | None = None) -> None:
        self._release = release or derived_release

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the difference of each pair of releases; the true ones are in the details.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        config = knowledge.config
        multiplier = noise_multiplier(config)
        norm = float(config.get("clip") or 1.0)
        draw = np.random.default_rng(0)
        recovered = {}
        differences = []
        for number in range(PAIRS):
            first, second = near_rows(draw, norm, torch.float64, DIMENSION)
            differences.append((first - second).numpy())
            if multiplier > 0:
                other = RUNS[number % 2]
                first = self._release(RUNS[0], first, multiplier, norm, number)
                second = self._release(other, second, multiplier, norm, number)
            recovered[number] = (first - second).numpy()
        details = {"differences": np.stack(differences)}
        return Guess("differences", recovered, details)
