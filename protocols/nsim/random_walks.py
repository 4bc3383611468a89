"""Synthetic users, made by a server that knows the format of users' data and none of the data
(Pacheco et al. 2021, Section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]
NEARLY = 1e-12
# step: ways of shorter ones, from end to end of the area, would have hundreds of millions of
# positions
SHORTEST = 1e-5


@dataclass(frozen=True)
class Format:
    """The declared format of users' sequences: public, the same for everyone.

    Args:
        coordinates: k, of a position.
        window: T, past positions in a sample.
        samples: positions of a user, fewest and most.
        seconds: between two positions.
        step: the longest way between two positions, in units of the area.
    """

    coordinates: int = 2
    window: int = 10
    samples: tuple[int, int] = (150, 600)
    seconds: float = 10.0
    step: float = 0.033

    def __post_init__(self) -> None:
        least, most = self.samples
        whole = all(isinstance(n, Integral) for n in (self.coordinates, self.window, least, most))
        if not (whole and self.coordinates >= 1 and 1 <= self.window < least <= most):
            raise UsageError(
                f"positions = {self.samples!r} of a user: the fewest are more than the "
                f"{self.window} of a window, the most no less"
            )
        if not (isinstance(self.seconds, Real) and 0 < self.seconds < np.inf):
            raise UsageError(
                f"seconds = {self.seconds!r} between two positions: it is a positive number"
            )
        if not (isinstance(self.step, Real) and SHORTEST <= self.step <= 1):
            raise UsageError(
                f"step = {self.step!r} is no way between two positions: give {SHORTEST:g} to 1, in "
                "units of the area"
            )

    def as_json(self) -> dict[str, Any]:
        """For a configuration."""
        return {**asdict(self), "samples": list(self.samples)}


Generator = Callable[[Format, int, np.random.Generator], list[Any]]
"""What makes synthetic users: format, how many, randomness -> each one's positions (n_i, k) in
units of the area, or its training samples (x, y) themselves, which any kind of data has.
"""

Samples = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class RandomWalk:
    """Two kinds of users: some go between places of their own and stay there for a while, the
    others stroll with a heading that persists.

    The paper names a random walk and no more; all of this is ours, and was chosen by how well what
    is learned from such users holds for others of the kind.

    Args:
        between: share of users that go between places.
        places: a user's, fewest and most; half of the ways lead to the first, its home.
        central: share of homes that lie about the middle of the area; the others lie anywhere.
        apart: how far places scatter about a home, at most, in units of the area.
        pace: slowest and fastest user, as shares of the longest step.
        bend: how far a way leaves the straight line, as a share of its length.
        stay: positions at a place, at most.
        memory: how much of a stroller's step is left in the next one, least and most.
    """

    between: float = 0.5
    places: tuple[int, int] = (2, 4)
    central: float = 0.5
    apart: float = 0.5
    pace: tuple[float, float] = (0.036, 0.6)
    bend: float = 0.15
    stay: int = 18
    memory: tuple[float, float] = (0.5, 0.99)

    def __call__(self, form: Format, users: int, draw: np.random.Generator) -> list[Array]:
        """Positions (n_i, k) of each user, n_i log-uniform in the format's range."""
        least, most = form.samples
        sizes = (
            np.exp(draw.uniform(np.log(least), np.log(most), users))
            .round()
            .astype(int)
            .clip(least, most)
        )
        going = draw.random(users) < self.between
        strolls = iter(self._strolls(int((~going).sum()), int(sizes.max(initial=0)), form, draw))
        return [
            self._ways(n, form, draw) if goes else next(strolls)[:n]
            for n, goes in zip(sizes.tolist(), going, strict=True)
        ]

    def _pace(self, form: Format, users: int, draw: np.random.Generator) -> Array:
        return np.asarray(
            form.step * np.exp(draw.uniform(math.log(self.pace[0]), math.log(self.pace[1]), users))
        )

    def _strolls(self, users: int, steps: int, form: Format, draw: np.random.Generator) -> Array:
        """Gauss-Markov walks that the border reflects, (users, steps, k)."""
        pace, memory = (
            self._pace(form, users, draw)[:, None],
            draw.uniform(*self.memory, users)[:, None],
        )
        here, move = (
            draw.random((users, form.coordinates)),
            pace * draw.normal(size=(users, form.coordinates)),
        )
        path = np.empty((users, steps, form.coordinates))
        for t in range(steps):
            path[:, t] = here
            move = memory * move + np.sqrt(1 - memory**2) * pace * draw.normal(size=here.shape)
            move *= np.minimum(
                1, form.step / np.maximum(np.linalg.norm(move, axis=1, keepdims=True), NEARLY)
            )
            there = here + move
            move = np.where((there < 0) | (there > 1), -move, move)
            here = 1 - np.abs(1 - np.abs(there))
        return path

    def _ways(self, size: int, form: Format, draw: np.random.Generator) -> Array:
        """Ways between a user's own places, and stays, (size, k)."""
        spots, pace = self._spots(form.coordinates, draw), float(self._pace(form, 1, draw)[0])
        parts: list[Array] = []
        place = 0
        while sum(map(len, parts)) < size:
            others = [k for k in range(len(spots)) if k != place]
            after = 0 if place and draw.random() < 0.5 else int(draw.choice(others))
            parts += [
                self._way(spots[place], spots[after], pace, form.step, draw),
                spots[after].repeat(draw.integers(0, self.stay + 1), 0),
            ]
            place = after
        return np.concatenate(parts)[:size]

    def _spots(self, k: int, draw: np.random.Generator) -> Array:
        """A user's places, (places, 1, k), its home first."""
        home = (
            draw.normal(0.5, 0.2, k).clip(0, 1) if draw.random() < self.central else draw.random(k)
        )
        apart = draw.uniform(0.06, 1) * self.apart
        others = home + apart * draw.normal(
            size=(draw.integers(self.places[0], self.places[1] + 1) - 1, k)
        )
        return np.concatenate([home[None], 1 - np.abs(1 - np.abs(others.clip(-1, 2)))])[:, None]

    def _way(
        self, start: Array, end: Array, pace: float, longest: float, draw: np.random.Generator
    ) -> Array:
        """A bent way between two places (1, k) at an uneven pace, (n, k), in steps no longer than
        `longest`.
        """
        far = float(np.linalg.norm(end - start))
        steps = max(12, math.ceil(far / (pace * math.exp(draw.normal(0, 0.3)))))
        part = np.cumsum(np.exp(draw.normal(0, 0.5, steps)))
        part = ((part - part[0]) / (part[-1] - part[0]))[:, None]
        aside = draw.normal(size=start.shape)
        aside *= far * draw.normal(0, self.bend) / max(float(np.linalg.norm(aside)), NEARLY)
        drift = np.cumsum(draw.normal(size=(steps, start.shape[1])), axis=0) / math.sqrt(steps)
        drift -= drift[0] + np.linspace(0, 1, steps)[:, None] * (drift[-1] - drift[0])  # a bridge
        path = (
            start
            + part * (end - start)
            + aside * np.sin(np.pi * part)
            + drift * far * self.bend / 2
        ).clip(0, 1)
        faster = float(np.linalg.norm(np.diff(path, axis=0), axis=1).max()) / longest
        if faster <= 1:
            return np.asarray(path)
        finer = np.linspace(0, steps - 1, math.ceil((steps - 1) * faster) + 1)
        return np.stack(
            [np.asarray(np.interp(finer, np.arange(steps), column)) for column in path.T], axis=1
        )


def generated(
    generator: Generator, form: Format, users: int, draw: np.random.Generator
) -> list[Samples]:
    """The training samples (x, y) of the users that a generator makes, in the order of time.

    Raises:
        UsageError: not as many users as were asked for, or positions that are not finite, or no
            more than a window.
    """
    made = generator(form, users, draw)
    if not isinstance(made, list | tuple) or len(made) != users:
        raise UsageError(
            f"the generator of synthetic users must give a list of {users}: a sequence of "
            "positions for each"
        )
    return [
        (np.asarray(own[0]), np.asarray(own[1]))
        if isinstance(own, tuple) and len(own) == 2
        else _samples(own, form)
        for own in made
    ]


def _samples(path: Any, form: Format) -> Samples:
    try:
        positions = np.asarray(path, dtype=np.float64)
    except (ValueError, TypeError):
        raise UsageError(
            f"the generator gives a {type(path).__name__} that is no array of positions (n, "
            f"{form.coordinates}); samples are a tuple (x, y)"
        ) from None
    if (
        positions.ndim != 2
        or positions.shape[1] != form.coordinates
        or len(positions) <= form.window
        or not np.isfinite(positions).all()
    ):
        raise UsageError(
            f"the generator gives a sequence of shape {positions.shape}: it must be finite "
            f"positions (n, {form.coordinates}), more than the {form.window} of a window"
        )
    return windows(positions, form.window)


def windows(positions: Array, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Samples of a sequence (n, k) in time order: `length` past positions (n − length, length, k),
    and the next one (n − length, k).
    """
    path = np.ascontiguousarray(positions, dtype=np.float32)
    past = np.lib.stride_tricks.sliding_window_view(path, length, axis=0)[:-1].swapaxes(1, 2)
    return np.ascontiguousarray(past), path[length:]
