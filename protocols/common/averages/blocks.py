"""Rows of several blocks, one for each of k models."""

from __future__ import annotations

from securecluster.core.lazy_torch import torch
from securecluster.privacy.pipeline import Kind, Pipeline, Stage


class BlockStage:
    """Stage that applies another one to each of the k blocks of a row.

    Args:
        stage: of rows (b, d).
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    @property
    def kind(self) -> Kind:
        """Return the kind of the stage."""
        return self._stage.kind

    @property
    def name(self) -> str:
        """Return the name of the stage."""
        return self._stage.name

    def width(self, d: int) -> int:
        """Return the width of a block after the stage.

        Args:
            d: numbers of a block.
        """
        return Pipeline([self._stage]).width(d)

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return the rows that leave the client, (b, k, d').

        Args:
            rows: rows (b, k, d).
            step: number of the call.
        """
        blocks = self._stage.forward(rows.flatten(0, 1), step)
        return blocks.view(*rows.shape[:2], -1)

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return averages of blocks with the mask undone.

        Args:
            rows: averages (b, k, d').
            step: number of the call whose rows were averaged.
        """
        blocks = self._stage.inverse(rows.flatten(0, 1), step)
        return blocks.view(*rows.shape[:2], -1)
