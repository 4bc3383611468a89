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
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import NOISE, Attack, Guess, Knowledge, Truth, View
from securecluster.attacks.low_bits import near_rows, noise_multiplier, why_not_on_rows
from securecluster.attacks.scoring import Scorer
from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.privacy.dp.noise_streams import NoiseStreams

PAIRS = 24
DIMENSION = 1024
RUNS = ("one configuration", "another configuration")
# (configuration's hash, row, noise multiplier, norm of rows, number of the call) -> released row
Release = Callable[[str, torch.Tensor, float, float, int], torch.Tensor]

Array = NDArray[Any]


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
    draw = torch.Generator().manual_seed(number)
    noise = torch.randn(row.shape, generator=draw, dtype=row.dtype)
    return row + multiplier * norm * noise


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
        return self._cosines(guess, draw.permutation(guess.details["differences"]))

    def _cosines(self, guess: Guess, true: Array) -> Array:
        """Return the cosines of recovered rows with rows (pairs, d)."""
        differences = np.stack(list(guess.values.values()))
        lengths = np.linalg.norm(differences, axis=1) * np.linalg.norm(true, axis=1)
        cosines: Array = (differences * true).sum(1) / np.maximum(lengths, np.finfo(float).tiny)
        return cosines


class RepeatedSeed(Attack):
    """Differences of rows, from two releases under one seed.

    Args:
        release: adds noise; None for the clients' own.
    """

    name = "repeated-seed"
    source = "Dwork and Roth 2014, The Algorithmic Foundations of Differential Privacy, 3.5"
    needs = "single updates of a client in two runs on one seed"
    scorer = RecoveredDifferences()
    reads = frozenset({"delta"})
    hidden_by = frozenset({NOISE})
    of_mechanism = True

    def __init__(self, release: Release | None = None) -> None:
        self._release = release or derived_release

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        return why_not_on_rows(view, knowledge)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the difference of each pair of releases; the true ones are in the details.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        multiplier = noise_multiplier(knowledge.config)
        norm = float(knowledge.config.get("clip") or 1.0)
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
        return Guess("differences", recovered, {"differences": np.stack(differences)})
