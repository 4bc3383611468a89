"""Synthetic users, made by a server that knows the format of users' data and none of the data (Pacheco et al. 2021, Section 3.1)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.errors import UsageError

Array = NDArray[np.float64]


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
    samples: tuple[int, int] = (150, 1200)
    seconds: float = 10.0
    step: float = 0.033

    def __post_init__(self) -> None:
        least, most = self.samples
        whole = all(isinstance(n, Integral) for n in (self.coordinates, self.window, least, most))
        if not (whole and self.coordinates >= 1 and 1 <= self.window < least <= most):
            raise UsageError(
                f"samples = {self.samples!r} of a user: the fewest are more than the {self.window} of a window, the most no less"
            )
        if not all(isinstance(v, Real) and 0 < v < np.inf for v in (self.seconds, self.step)):
            raise UsageError(f"seconds = {self.seconds!r} and step = {self.step!r} are positive numbers")

    def as_json(self) -> dict[str, Any]:
        """For a configuration."""
        return {**asdict(self), "samples": list(self.samples)}


Generator = Callable[[Format, int, np.random.Generator], list[Any]]
"""What makes synthetic users: format, how many, randomness -> each one's positions (n_i, k) in units of the area, or its training
samples (x, y) themselves, which any kind of data has."""

Samples = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class RandomWalk:
    """Users that go from place to place, each at a pace of its own, with a heading that strays and comes back, and stay for a while.

    The paper names a random walk and no more; all of this is ours. As many users are made at once as are asked for.

    Args:
        places: a user's own, fewest and most; half of the ways lead to the first, its home.
        pace: the slowest user's, as a share of the fastest step.
        stray: how far a heading deviates from the way to the place, in radians about.
        memory: how much of a deviation is left after a step, in [0, 1).
        stay: positions at a place, at most.
    """

    places: tuple[int, int] = (2, 5)
    pace: float = 0.05
    stray: float = 0.5
    memory: float = 0.9
    stay: int = 18

    def __call__(self, form: Format, users: int, draw: np.random.Generator) -> list[Array]:
        """Positions (n_i, k) of each user, n_i log-uniform in the format's range."""
        least, most = form.samples
        sizes = np.exp(draw.uniform(np.log(least), np.log(most), users)).round().astype(int).clip(least, most)
        own = draw.integers(self.places[0], self.places[1] + 1, users)
        spots = draw.random((users, self.places[1], form.coordinates))
        pace = form.step * np.exp(draw.uniform(np.log(self.pace), 0, users))
        path = self._walked(int(sizes.max(initial=0)), spots, own, pace, draw)
        return [path[i, :n] for i, n in enumerate(sizes)]

    def _walked(self, steps: int, spots: Array, own: NDArray[np.int64], pace: Array, draw: np.random.Generator) -> Array:
        """Positions of all users, (users, steps, k)."""
        users, _, k = spots.shape
        everyone = np.arange(users)
        path = np.empty((users, steps, k))
        here: Array = spots[:, 0].copy()
        goal: Array = spots[:, 1].copy()
        left, aside = draw.integers(0, self.stay + 1, (users,)), np.zeros((users, k))
        for t in range(steps):
            path[:, t] = here
            away = goal - here
            far = np.asarray(np.linalg.norm(away, axis=1))
            aside = self.memory * aside + np.sqrt(1 - self.memory**2) * self.stray * draw.normal(size=(users, k))
            heading = away / np.maximum(far, 1e-12)[:, None] + aside
            heading /= np.maximum(np.linalg.norm(heading, axis=1), 1e-12)[:, None]
            there = np.less_equal(far, pace)
            moved = np.where(there[:, None], goal, here + pace[:, None] * heading)
            here = np.where((left > 0)[:, None], here, moved).clip(0, 1)
            arrived = there & (left == 0)
            next_place = draw.integers(0, own, (users,)) * (draw.random(users) >= 0.5)
            left = np.where(arrived, draw.integers(0, self.stay + 1, (users,)), np.maximum(left - 1, 0))
            goal = np.where(arrived[:, None], spots[everyone, next_place], goal)
        return path


def generated(generator: Generator, form: Format, users: int, draw: np.random.Generator) -> list[Samples]:
    """The training samples (x, y) of the users that a generator makes, in the order of time.

    Raises:
        UsageError: not as many users as were asked for, or positions that are not finite, or no more than a window.
    """
    made = generator(form, users, draw)
    if not isinstance(made, list | tuple) or len(made) != users:
        raise UsageError(f"the generator of synthetic users must give a list of {users}: a sequence of positions for each")
    return [(np.asarray(own[0]), np.asarray(own[1])) if isinstance(own, tuple) and len(own) == 2 else _samples(own, form) for own in made]


def _samples(path: Any, form: Format) -> Samples:
    positions = np.asarray(path, dtype=np.float64)
    if positions.ndim != 2 or positions.shape[1] != form.coordinates or len(positions) <= form.window or not np.isfinite(positions).all():
        raise UsageError(
            f"the generator gives a sequence of shape {positions.shape}: it must be finite positions (n, {form.coordinates}), more than the"
            f" {form.window} of a window"
        )
    return windows(positions, form.window)


def windows(positions: Array, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Samples of a sequence (n, k) in time order: `length` past positions (n − length, length, k), and the next one (n − length, k)."""
    path = np.ascontiguousarray(positions, dtype=np.float32)
    past = np.lib.stride_tricks.sliding_window_view(path, length, axis=0)[:-1].swapaxes(1, 2)
    return np.ascontiguousarray(past), path[length:]
