"""What a client keeps between the secure sums of a run."""

from __future__ import annotations

from dataclasses import dataclass, field

from securecluster.protections.secure_sums.double_mask import GuardState

# calls of which a client keeps what it allowed; it refuses older ones
KEPT_CALLS = 64


@dataclass
class SumRecord:
    """Key and record of one client; never printed.

    Args:
        mask: key of its self masks; empty before its first sum.
        guard: what it has sent and revealed.
        floor: number of the first call that it still answers.
    """

    mask: bytes = field(default=b"", repr=False)
    guard: GuardState = field(default_factory=GuardState)
    floor: int = 0

    def forget(self) -> None:
        """Drop the records of all but the last `KEPT_CALLS` calls."""
        calls = sorted(self.guard.attempts)
        for call in calls[:-KEPT_CALLS]:
            del self.guard.attempts[call]
            self.floor = call + 1
