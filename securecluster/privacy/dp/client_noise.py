"""Noise of a run's clients, by which their methods release numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from securecluster.privacy.dp.noise_streams import NoiseStreams


@dataclass(frozen=True)
class ClientNoise:
    """Unit of privacy, noise and bounds that the clients of a run agreed on.

    Args:
        unit: unit of privacy, "client" or "example".
        clip: S, the norm to which rows are clipped; 0 in a run without a clip.
        noise: noise multiplier z; 0 in a run without noise.
        loss_clip: B, the largest loss of a sample.
        draws: source of the noise.
        loss_ratio: noise multiplier of released losses over z.
    """

    unit: str
    clip: float
    noise: float
    loss_clip: float
    draws: NoiseStreams
    loss_ratio: float = 1.0

    @property
    def of_losses(self) -> float:
        """Return the noise multiplier of released losses."""
        return self.loss_ratio * self.noise
