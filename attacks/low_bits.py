"""Low bits of noise: which of two rows noise was added to, from the last bits of the sum.

A floating-point sum y = x + n is a number that some n gives, and not every y is one for every x
(Mironov 2012). Where y is smaller than n, it has finer digits than n, and these are those of x: a
reader with two candidates for x finds numbers y that one of them cannot give.

Noise of clients is tried as they send it, in the type of the run's numbers. The two candidates are
so near to each other that the noise hides the difference, at any noise level of use: only the last
bits can tell them apart. Rows and noise are made for the attack.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import NOISE, Attack, Guess, Harm, Knowledge, Scorer, Truth, View
from securecluster.attacks.views import observed_updates
from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.noise_streams import NoiseStreams

ROWS = 60
DIMENSION = 4096
DISTANCE = 1e-3  # of the candidates, relative to their norm
# (row, noise multiplier, norm of rows, number of the row) -> the released row
Release = Callable[[torch.Tensor, float, float, int], torch.Tensor]


def grid_release() -> Release:
    """Return the noise of clients, under a new key."""
    key = os.urandom(32)
    streams = NoiseStreams(lambda client: key, "low bits")

    def release(row: torch.Tensor, multiplier: float, norm: float, number: int) -> torch.Tensor:
        return streams.noised(0, "low bits", number, row, multiplier, norm)

    return release


def naive_release(row: torch.Tensor, multiplier: float, norm: float, number: int) -> torch.Tensor:
    """Return a row with Gaussian noise in floating point, which no run sends.

    Args:
        row: numbers of any shape.
        multiplier: noise multiplier.
        norm: norm of rows.
        number: of the row.
    """
    draw = torch.Generator().manual_seed(number)
    noise = torch.randn(row.shape, generator=draw, dtype=row.dtype)
    return row + multiplier * norm * noise


def impossible(released: torch.Tensor, candidate: torch.Tensor) -> int:
    """Return how many released numbers are no floating-point sum of a candidate and any number.

    Args:
        released: (d,).
        candidate: (d,), of the same type.
    """
    # The difference is itself rounded, so the noise that was added may be a neighbour of it.
    nearest = released - candidate
    reached = candidate + nearest == released
    for direction in (-torch.inf, torch.inf):
        beyond = torch.full_like(nearest, direction)
        neighbour = torch.nextafter(nearest, beyond)
        reached |= candidate + neighbour == released
    return int((~reached).sum())


class ToldApart(Scorer):
    """Share of rows whose candidate is right; a half is chance.

    The rows are the attack's own, so the truth about them is in the details of its guess.
    """

    metric = "share of rows told from a candidate"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each right candidate, (rows,).

        Args:
            guess: candidate of each row.
            truth: of the run, unused.
        """
        return self._right(guess, guess.details["worlds"])

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for candidates that are drawn anew.

        Args:
            guess: candidate of each row.
            truth: of the run, unused.
            draw: of the candidates.
        """
        return self._right(guess, draw.integers(0, 2, len(guess.values)))

    def _right(self, guess: Guess, worlds: Array) -> Array:
        """Return 1 for each row whose candidate is that of `worlds`."""
        guessed = np.asarray(guess.listed)
        return np.asarray(guessed == worlds, dtype=float)


class RowMechanism(Attack):
    """Base class of attacks on the noise that clients add to rows, with rows of their own."""

    reads = ("delta",)
    hidden_by = (NOISE,)
    of_mechanism = True

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        config = knowledge.config
        if not observed_updates(view, knowledge):
            return "not applicable: no single updates were observed"
        if noise_multiplier(config) == 0:
            return None
        if config.get("placement") not in (None, "local") or config.get("dp_unit") == "example":
            return "not applicable: clients add no noise to their updates"
        return None


class LowBits(RowMechanism):
    """Distinguishes two close rows by released numbers that only one of them can produce.

    Args:
        release: adds noise; None for the clients' own.
    """

    name = "low-bits"
    learns = "what noise was added to, from the last bits of numbers"
    harm = Harm.MESSAGES
    source = "Mironov 2012, On Significance of the Least Significant Bits"
    needs = "single updates with clients' noise; two candidates for each"
    scorer = ToldApart()

    def __init__(self, release: Release | None = None) -> None:
        self._release = release

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the candidate of each row, 0 or 1; the true ones are in the details.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        config = knowledge.config
        dtype = getattr(torch, config["dtype"])
        multiplier = noise_multiplier(config)
        norm = float(config.get("clip") or 1.0)
        release = self._release or grid_release()
        draw = np.random.default_rng(0)
        worlds = draw.integers(0, 2, ROWS)
        guesses = {}
        for number in range(ROWS):
            # half of the rows are in each world on average, so guessing one world gives 1/2
            candidates = near_rows(draw, norm, dtype)
            row = candidates[worlds[number]]
            if multiplier > 0:
                row = release(row, multiplier, norm, number)
            misses = [impossible(row, candidate) for candidate in candidates]
            if multiplier == 0:
                # without noise the row itself is read
                misses = [int((row != candidate).sum()) for candidate in candidates]
            # a tie tells nothing, so a coin decides
            guesses[number] = int(draw.integers(0, 2))
            if misses[0] != misses[1]:
                guesses[number] = int(np.argmin(misses))
        return Guess("candidates", guesses, {"worlds": worlds})


def near_rows(
    draw: np.random.Generator, norm: float, dtype: torch.dtype, d: int = DIMENSION
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two rows whose distance is small, (d,) each.

    Args:
        draw: source of both.
        norm: of the first row.
        dtype: of their numbers.
        d: numbers in a row.
    """
    first = draw.normal(size=d) * norm / np.sqrt(d)
    second = first * (1 + DISTANCE * draw.normal(size=d))
    return torch.tensor(first, dtype=dtype), torch.tensor(second, dtype=dtype)


def noise_multiplier(config: Mapping[str, Any]) -> float:
    """Return the noise multiplier of a configuration; 0 without noise.

    Args:
        config: the configuration.
    """
    return float(config.get("noise") or 0.0)
