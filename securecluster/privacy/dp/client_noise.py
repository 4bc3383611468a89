"""What clients know of their own noise, where a method adds some besides what the pipeline does."""

from __future__ import annotations

from dataclasses import dataclass

from securecluster.privacy.dp.noise_streams import NoiseStreams


@dataclass(frozen=True)
class ClientNoise:
    """The noise that a run's clients put on losses, layers and the like.

    Args:
        unit: "client" or "example".
        clip: S, of rows.
        noise: the noise multiplier z, positive.
        loss_clip: B, of a sample's loss.
        draws: what it is drawn from.
    """

    unit: str
    clip: float
    noise: float
    loss_clip: float
    draws: NoiseStreams
