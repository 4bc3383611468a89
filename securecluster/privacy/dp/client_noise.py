"""Noise of clients on replies that do not go through a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from securecluster.privacy.dp.noise_streams import NoiseStreams


@dataclass(frozen=True)
class ClientNoise:
    """Noise that a run's clients add to losses, layers and the like.

    Args:
        unit: unit of privacy, "client" or "example".
        clip: S, the norm to which rows are clipped.
        noise: noise multiplier z, positive.
        loss_clip: B, the largest loss of a sample.
        draws: source of the noise.
    """

    unit: str
    clip: float
    noise: float
    loss_clip: float
    draws: NoiseStreams
