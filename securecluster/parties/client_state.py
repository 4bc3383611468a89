"""State of clients, as checkpoints and fitted results have it."""

from __future__ import annotations

from dataclasses import dataclass, field

from securecluster.core.lazy_torch import torch
from securecluster.privacy.masking.key_agreement import Secrets


@dataclass
class ClientState:
    """Models and secrets of clients between rounds; equal models are stored once."""

    table: torch.Tensor  # (u, d)
    index: list[int]  # (m,)
    secrets: Secrets
    # where clients hold several models: the starts they belong to
    starts: list[int] = field(default_factory=list)
    extra: dict[str, torch.Tensor] = field(default_factory=dict)  # other memory, by name

    @classmethod
    def none(cls) -> ClientState:
        """Return the state of no client, as a server has it whose clients are nodes elsewhere."""
        return cls(torch.zeros(0, 0), [], Secrets())
