"""What the split test sees: norms without the noise that clients add, of uniform and weighted means."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from securecluster.displacements import Update
from securecluster.looks import look_at
from securecluster.messages import Rows
from securecluster.privacy.gaussian import Clip, Noise
from securecluster.privacy.stages import Pipeline
from securecluster.replies import Replies

D, SIGMA = 100_000, 0.02  # noise of norm 6.3 on updates of norm about 1.4


def replies(weighted: bool, noisy: bool) -> Replies[Any]:
    """Clients 0, 1, 2 of one cluster and 4, 5 of another; client 3 did not reply."""
    generator = torch.Generator().manual_seed(1)
    rows = (torch.randn(5, D, generator=generator) + torch.randn(D, generator=generator)) / D**0.5
    rows += noisy * SIGMA * torch.randn(5, D, generator=generator)
    size = Rows(torch.tensor([1.0, 5.0, 2.0, 3.0, 3.0])) if weighted else None
    return Replies((0, 1, 2, 4, 5), Update(Rows(rows), size), (3,), 9)


@pytest.mark.parametrize("weighted", [False, True])
def test_norms_are_those_of_the_updates_without_noise(weighted: bool) -> None:
    quiet: Any = SimpleNamespace(noise=lambda field: Pipeline().noise(D))
    loud: Any = SimpleNamespace(noise=lambda field: Pipeline([Clip(1.0), Noise(1.0, SIGMA)]).noise(D))
    labels, members = [0, 0, 0, 0, 1, 1], [0, 1, 2, 3]
    clean = look_at(quiet, replies(weighted, noisy=False), 0, members, labels)
    found = look_at(loud, replies(weighted, noisy=True), 0, members, labels)
    blind = look_at(quiet, replies(weighted, noisy=True), 0, members, labels)
    assert found.max_norm == pytest.approx(clean.max_norm, rel=0.2)
    assert found.mean_norm == pytest.approx(clean.mean_norm, rel=0.2)
    assert blind.max_norm > 4 * clean.max_norm and blind.mean_norm > 2 * clean.mean_norm
    assert found.came == [0, 1, 2] and not found.complete


def test_a_pipeline_adds_up_the_noise_of_its_stages() -> None:
    assert Pipeline().noise(10) == 0
    assert Pipeline([Clip(1.0)]).noise(10) == 0
    assert Pipeline([Clip(1.0), Noise(1.0, SIGMA)]).noise(D) == pytest.approx(40)
