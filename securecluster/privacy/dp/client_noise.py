"""Noise of a run's clients, by which their methods release numbers."""

from __future__ import annotations

from dataclasses import dataclass

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
    """

    unit: str
    clip: float
    noise: float
    loss_clip: float
    draws: NoiseStreams
