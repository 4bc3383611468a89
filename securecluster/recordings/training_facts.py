"""What is known of the training of an app of others, which is in none of its messages."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from securecluster.errors import UsageError

PLACEMENTS = ("local", "central")
OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class TrainingFacts:
    """Facts that a user declares of an app's training; None where one is not known.

    Attacks that need an absent fact are not applicable, and say which one it is.

    Args:
        lr: learning rate of a client's optimizer.
        epochs: passes over a client's samples in a round.
        batch_size: samples in a step.
        optimizer: "sgd", "adam" or "adamw".
        momentum: of the optimizer.
        clip: norm to which a client's update is clipped; None also without clipping.
        noise: deviation of the Gaussian noise on an update ("local"), or on the sum of a round
            ("central"), over `clip`. Flower's LocalDpMod has √(2 ln(1.25/δ))·sensitivity/(ε·clip);
            its strategies call it noise_multiplier.
        placement: who adds the noise: "local", a client's mod, or "central", the server's strategy.
        delta: δ of the guarantee that is priced.
        sampled_clients: clients of a round for which the strategy scales its noise; Flower's
            strategies call it num_sampled_clients.

    Raises:
        UsageError: a value that no training can have.
    """

    lr: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    optimizer: str | None = None
    momentum: float | None = None
    clip: float | None = None
    noise: float | None = None
    placement: str | None = None
    delta: float | None = None
    sampled_clients: int | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "noise", "delta"):
            self._check(name, lambda value: is_number(value) and value > 0, "a positive number")
        for name in ("epochs", "batch_size", "sampled_clients"):
            self._check(name, _is_count, "a positive integer")
        self._check("momentum", lambda value: is_number(value) and 0 <= value < 1, "in [0, 1)")
        self._check("delta", lambda value: value < 1, "below 1")
        for name, choices in (("optimizer", OPTIMIZERS), ("placement", PLACEMENTS)):
            self._check(name, choices.__contains__, " or ".join(choices))

    def _check(self, name: str, holds: Callable[[Any], bool], must: str) -> None:
        """Raise UsageError if a fact that is declared is not what it must be."""
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise UsageError(f"TrainingFacts: {name} is {must}, not {value!r}")

    @property
    def known(self) -> dict[str, Any]:
        """Return the facts that were declared."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number.

    Args:
        value: of anything.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)
