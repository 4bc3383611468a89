"""Synthetic users, whose data a server generates from the format of users' data alone.

The server has none of the data (Pacheco et al. 2021, Section 3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl

Array = NDArray[np.float64]
NEARLY = 1e-12  # in place of a length of zero in a division
# lower bound of `Format.step`: a path from end to end of the area in shorter steps would have
# hundreds of millions of positions
SHORTEST = 1e-5


@dataclass(frozen=True)
class Format:
    """The declared format of users' sequences, which is public and the same for all users.

    Args:
        coordinates: k, of a position.
        window: T, past positions in a sample.
        samples: positions of a user, fewest and most.
        seconds: between two positions.
        step: the longest step between two positions, in units of the area.
    """

    coordinates: int = 2
    window: int = 10
    samples: tuple[int, int] = (150, 600)
    seconds: float = 10.0
    step: float = 0.033

    def __post_init__(self) -> None:
        minimum, maximum = self.samples
        numbers = (self.coordinates, self.window, minimum, maximum)
        whole_numbers = all(isinstance(n, Integral) for n in numbers)
        in_order = self.coordinates >= 1 and 1 <= self.window < minimum <= maximum
        if not (whole_numbers and in_order):
            raise fl.UsageError(
                f"positions = {self.samples!r} of a user: the fewest are more than the "
                f"{self.window} of a window, the most no less"
            )
        if not (isinstance(self.seconds, Real) and 0 < self.seconds < np.inf):
            raise fl.UsageError(
                f"seconds = {self.seconds!r} between two positions: it is a positive number"
            )
        if not (isinstance(self.step, Real) and SHORTEST <= self.step <= 1):
            raise fl.UsageError(
                f"step = {self.step!r} is no way between two positions: give {SHORTEST:g} to 1, in "
                "units of the area"
            )

    def as_json(self) -> dict[str, Any]:
        """Return the format for a configuration."""
        return {**asdict(self), "samples": list(self.samples)}


Generator = Callable[[Format, int, np.random.Generator], list[Any]]
"""A source of synthetic users: (format, number of users, random generator) -> for each user its
positions (n_i, k) in units of the area, or, for any kind of data, its training samples (x, y).
"""

Samples = tuple[NDArray[Any], NDArray[Any]]


@dataclass(frozen=True)
class RandomWalk:
    """Random walks of two kinds of users.

    Some travel between a few places of their own and stay at each for a while. The others stroll
    with a persistent heading.

    The paper mentions a random walk without details. All details here are not in the paper; they
    were chosen by how well a network trained on such users predicts for other users of this kind.

    Args:
        between: share of users that travel between places.
        places: number of a user's places, fewest and most; half of all trips lead to the first one,
            its home.
        central: share of homes that are drawn around the middle of the area; the others are
            anywhere.
        spread: largest distance at which places scatter around a home, in units of the area.
        pace: slowest and fastest user, as shares of the longest step.
        bend: deviation of a trip from the straight line, as a share of its length.
        stay: most positions at a place.
        memory: share of a stroller's step that persists in the next one, smallest and largest.
    """

    between: float = 0.5
    places: tuple[int, int] = (2, 4)
    central: float = 0.5
    spread: float = 0.5
    pace: tuple[float, float] = (0.036, 0.6)
    bend: float = 0.15
    stay: int = 18
    memory: tuple[float, float] = (0.5, 0.99)

    def __call__(self, form: Format, users: int, draw: np.random.Generator) -> list[Array]:
        """Return the positions of each user, (n_i, k), with n_i log-uniform in the format's range.

        Args:
            form: the declared format.
            users: how many.
            draw: the source of all random numbers.
        """
        minimum, maximum = form.samples
        logarithms = draw.uniform(np.log(minimum), np.log(maximum), users)
        sizes = np.exp(logarithms).round().astype(int).clip(minimum, maximum)
        travels = draw.random(users) < self.between
        # all strolls are drawn at once, with as many positions as the longest sequence
        strollers = int((~travels).sum())
        strolls = iter(self._strolls(strollers, int(sizes.max(initial=0)), form, draw))
        paths = []
        for size, is_traveller in zip(sizes.tolist(), travels, strict=True):
            if is_traveller:
                paths.append(self._trips(size, form, draw))
            else:
                paths.append(next(strolls)[:size])
        return paths

    def _pace(self, form: Format, users: int, draw: np.random.Generator) -> Array:
        """Draw the users' mean steps, (users,), log-uniform in units of the area."""
        slowest, fastest = self.pace
        logarithms = draw.uniform(math.log(slowest), math.log(fastest), users)
        return np.asarray(form.step * np.exp(logarithms))

    def _strolls(self, users: int, steps: int, form: Format, draw: np.random.Generator) -> Array:
        """Draw Gauss-Markov walks that are reflected at the border.

        Args:
            users: how many.
            steps: positions of each.
            form: the declared format.
            draw: the source of all random numbers.

        Returns:
            (users, steps, k)
        """
        shape = (users, form.coordinates)
        pace = self._pace(form, users, draw)[:, None]
        memory = draw.uniform(*self.memory, users)[:, None]
        position = draw.random(shape)
        move = pace * draw.normal(size=shape)
        # scaled so that the variance of a move is pace² in every step
        innovation = np.sqrt(1 - memory**2) * pace
        path = np.empty((users, steps, form.coordinates))
        for t in range(steps):
            path[:, t] = position
            move = memory * move + innovation * draw.normal(size=shape)
            length = np.linalg.norm(move, axis=1, keepdims=True)
            shortening = form.step / np.maximum(length, NEARLY)
            move *= np.minimum(1, shortening)
            target = position + move
            outside = (target < 0) | (target > 1)
            # a reflected walker continues in the mirrored direction
            move = np.where(outside, -move, move)
            position = _reflected(target)
        return path

    def _trips(self, size: int, form: Format, draw: np.random.Generator) -> Array:
        """Draw a user's trips between its own places, and its stays there.

        Args:
            size: number of positions.
            form: the declared format.
            draw: the source of all random numbers.

        Returns:
            (size, k)
        """
        spots = self._spots(form.coordinates, draw)
        pace = float(self._pace(form, 1, draw)[0])
        segments: list[Array] = []
        positions = 0
        current = 0
        while positions < size:
            # half of all trips lead home (place 0)
            if current and draw.random() < 0.5:
                target = 0
            else:
                others = [spot for spot in range(len(spots)) if spot != current]
                target = int(draw.choice(others))
            trip = self._trip(spots[current], spots[target], pace, form.step, draw)
            pause = draw.integers(0, self.stay + 1)
            stay = spots[target].repeat(pause, 0)
            segments += [trip, stay]
            positions += len(trip) + len(stay)
            current = target
        return np.concatenate(segments)[:size]

    def _spots(self, k: int, draw: np.random.Generator) -> Array:
        """Draw a user's places, (places, 1, k), its home first."""
        if draw.random() < self.central:
            home = draw.normal(0.5, 0.2, k).clip(0, 1)
        else:
            home = draw.random(k)
        scale = draw.uniform(0.06, 1) * self.spread
        fewest, most_places = self.places
        count = draw.integers(fewest, most_places + 1) - 1
        others = home + scale * draw.normal(size=(count, k))
        others = _reflected(others.clip(-1, 2))
        return np.concatenate([home[None], others])[:, None]

    def _trip(
        self, start: Array, end: Array, pace: float, longest: float, draw: np.random.Generator
    ) -> Array:
        """Draw a bent path between two places at an uneven pace.

        Args:
            start: (1, k).
            end: (1, k).
            pace: mean step, in units of the area.
            longest: longest step, in units of the area.
            draw: the source of all random numbers.

        Returns:
            (n, k)
        """
        distance = float(np.linalg.norm(end - start))
        mean_step = pace * math.exp(draw.normal(0, 0.3))
        steps = max(12, math.ceil(distance / mean_step))
        # share of the path at each step, from 0 to 1
        travelled = np.cumsum(np.exp(draw.normal(0, 0.5, steps)))
        first = travelled[0]
        last = travelled[-1]
        progress = ((travelled - first) / (last - first))[:, None]

        # one arc to a side
        arc = draw.normal(size=start.shape)
        height = distance * draw.normal(0, self.bend)
        arc *= height / max(float(np.linalg.norm(arc)), NEARLY)
        # and a Brownian bridge, which is zero at both ends
        increments = draw.normal(size=(steps, start.shape[1]))
        drift = np.cumsum(increments, axis=0) / math.sqrt(steps)
        time = np.linspace(0, 1, steps)[:, None]
        drift -= drift[0] + time * (drift[-1] - drift[0])

        path = start + progress * (end - start)
        path = path + arc * np.sin(np.pi * progress)
        path = path + drift * distance * self.bend / 2
        return _resampled(path.clip(0, 1), longest)


def _reflected(positions: Array) -> Array:
    """Return positions in [−1, 2] reflected at the borders 0 and 1."""
    above_zero = np.abs(positions)
    return np.asarray(1 - np.abs(1 - above_zero))


def _resampled(path: Array, longest: float) -> Array:
    """Return a path with enough positions that no step is longer than `longest`.

    Args:
        path: (n, k).
        longest: longest step, in units of the area.

    Returns:
        (n', k), n' ≥ n.
    """
    steps = len(path)
    lengths = np.linalg.norm(np.diff(path, axis=0), axis=1)
    factor = float(lengths.max()) / longest
    if factor <= 1:
        return np.asarray(path)
    intervals = math.ceil((steps - 1) * factor)
    finer = np.linspace(0, steps - 1, intervals + 1)
    columns = []
    for column in path.T:
        resampled = np.interp(finer, np.arange(steps), column)
        columns.append(np.asarray(resampled))
    return np.stack(columns, axis=1)


def generated(
    generator: Generator, form: Format, users: int, draw: np.random.Generator
) -> list[Samples]:
    """Return the training samples of generated users.

    Args:
        generator: the source of users.
        form: the declared format.
        users: how many.
        draw: the source of all random numbers.

    Returns:
        (x, y) of each user, in the order of time.

    Raises:
        UsageError: another number of users, or positions that are not finite, or no more than a
            window.
    """
    drawn = generator(form, users, draw)
    if not isinstance(drawn, list | tuple) or len(drawn) != users:
        raise fl.UsageError(
            f"the generator of synthetic users must give a list of {users}: a sequence of "
            "positions for each"
        )
    samples = []
    for data in drawn:
        if isinstance(data, tuple) and len(data) == 2:
            x, y = data
            samples.append((np.asarray(x), np.asarray(y)))
        else:
            samples.append(_samples(data, form))
    return samples


def _samples(path: Any, form: Format) -> Samples:
    """Return the samples of a sequence of positions.

    Args:
        path: (n, k) in units of the area.
        form: the declared format.

    Raises:
        UsageError: no finite positions of the format, or no more than a window.
    """
    try:
        positions = np.asarray(path, dtype=np.float64)
    except (ValueError, TypeError):
        raise fl.UsageError(
            f"the generator gives a {type(path).__name__} that is no array of positions (n, "
            f"{form.coordinates}); samples are a tuple (x, y)"
        ) from None
    has_format = positions.ndim == 2 and positions.shape[1] == form.coordinates
    long_enough = has_format and len(positions) > form.window
    if not long_enough or not np.isfinite(positions).all():
        raise fl.UsageError(
            f"the generator gives a sequence of shape {positions.shape}: it must be finite "
            f"positions (n, {form.coordinates}), more than the {form.window} of a window"
        )
    return windows(positions, form.window)


def windows(positions: Array, length: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the samples of a sequence, in the order of time.

    Args:
        positions: (n, k).
        length: T, past positions in a sample.

    Returns:
        Past positions (n − T, T, k), and the next position of each (n − T, k).
    """
    path = np.ascontiguousarray(positions, dtype=np.float32)
    view = np.lib.stride_tricks.sliding_window_view(path, length, axis=0)
    past = view[:-1].swapaxes(1, 2)
    return np.ascontiguousarray(past), path[length:]
