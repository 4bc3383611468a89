"""The transformer whose adapters are clustered, before any training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.apps import adapters
from securecluster.data.text import LENGTH, TOPICS
from securecluster.models.validation import prepare_module


def test_adapters_start_as_the_frozen_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = adapters.TopicTransformer()
    monkeypatch.setattr(adapters, "public_transformer", lambda: whole)
    adapted = adapters.trained("adapters")
    x = torch.randint(adapters.WORDS, (3, LENGTH))
    torch.testing.assert_close(adapted(x), whole(x), rtol=0, atol=0)
    small = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    # rank 4 beside each of four dense layers of two blocks, and the last layer
    dense = [layer for layer in whole.blocks.modules() if isinstance(layer, nn.Linear)]
    sides = [layer.in_features + layer.out_features for layer in dense]
    assert len(sides) == 8 and small == 4 * sum(sides) + (64 + 1) * 4
    # clients train together, not one by one
    assert prepare_module(adapted, (LENGTH,), len(TOPICS)).together
    assert all(parameter.requires_grad for parameter in whole.parameters())
