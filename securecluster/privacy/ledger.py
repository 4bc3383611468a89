"""What a run released, event by event, and the ε of all of it together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Event:
    """One verb's release of clients' data. `noise_multiplier` None: nothing random was added, so the release is exact.

    `reader`: who reads it, "server" or "lps", a local parameter server.
    """

    method: str
    verb: str
    fields: tuple[str, ...]
    round: int
    clients: int
    noise_multiplier: float | None = None
    reader: str = "server"


@dataclass
class Ledger:
    """All events of a run; an accountant prices their union once."""

    events: list[Event] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Record a release."""
        self.events.append(event)

    @property
    def epsilon(self) -> float:
        """ε of everything released: 0 when nothing was, infinite when anything went out without noise."""
        return math.inf if self.events else 0.0

    def reported(self) -> float | None:
        """ε as result files write it: null where it is infinite."""
        return None if math.isinf(self.epsilon) else self.epsilon
