"""The work to do, piece by piece, and the time that it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Row = dict[str, Any]
ON_A_GPU = 5.0  # seconds until a timing has measured a few clients there


class Skipped(Exception):  # noqa: N818 - nothing went wrong
    """Raised by a piece that cannot be done here; its message says why."""


@dataclass(frozen=True)
class Check:
    """A comparison with a bound on its error.

    Args:
        name: unique.
        bound: the largest error that passes.
        why: the reason for the bound.
        error: computes the error on a device.
        cost: seconds on two cores, about.
    """

    name: str
    bound: float
    why: str
    error: Callable[[torch.device], float]
    cost: float = 0.2

    category = "check"

    def needs(self, device: torch.device, budget: Budget) -> float:
        """Return the seconds that it takes, about."""
        return budget.estimate(self.cost)

    def run(self, device: torch.device, budget: Budget) -> list[Row]:
        """Return one row: the error and whether it is within the bound. NaN is not."""
        error = float(self.error(device))
        result = "failed"
        if error <= self.bound:  # false for NaN
            result = "passed"
        return [self.row(result, f"{error:.2e}")]

    def row(self, result: str, error: str = "", message: str = "") -> Row:
        """Return a row of checks.csv.

        Args:
            result: "passed" or "failed".
            error: as text; empty where none was computed.
            message: the exception, if there was one.
        """
        bound = "0"
        if self.bound:
            bound = f"{self.bound:.0e}"
        return {
            "check": self.name,
            "result": result,
            "error": error,
            "bound": bound,
            "why": self.why,
            "message": message,
        }


@dataclass(frozen=True)
class Timing:
    """A measurement of several ways to do the same.

    Args:
        name: unique.
        measure: returns the rows of timings.csv; it may raise `Skipped` after a look at the budget.
        cost: seconds on two cores, about, before the first measurement says more; a GPU takes
            `ON_A_GPU`.
    """

    name: str
    measure: Callable[[torch.device, Budget], list[Row]]
    cost: float

    category = "timing"

    def needs(self, device: torch.device, budget: Budget) -> float:
        """Return the seconds until it knows better itself, about."""
        if device.type == "cpu":
            return budget.estimate(self.cost)
        return ON_A_GPU

    def run(self, device: torch.device, budget: Budget) -> list[Row]:
        """Return its rows."""
        return self.measure(device, budget)


Piece = Check | Timing


class Budget:
    """The seconds that are left, and this machine's pace beside the pieces' nominal costs.

    Args:
        seconds: in all.
        clock: returns seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._end = clock() + seconds
        self._paces: list[float] = []
        self.known: dict[str, float] = {}  # what a piece measured that tells others' costs

    def left(self) -> float:
        """Return the seconds that are left; negative after the end."""
        return self._end - self._clock()

    def now(self) -> float:
        """Return the clock's seconds."""
        return self._clock()

    def learn(self, cost: float, took: float) -> None:
        """Note how long a piece of some nominal cost took.

        Args:
            cost: nominal, in seconds on two cores.
            took: seconds on this machine.
        """
        self._paces.append(took / cost)  # seconds here for one nominal second

    def estimate(self, cost: float) -> float:
        """Return the seconds that a piece takes here, by the pace of those before.

        Args:
            cost: nominal, in seconds on two cores.
        """
        if not self._paces:
            return cost
        return cost * median(self._paces)
