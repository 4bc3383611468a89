"""What both halves of a run derive from a method and facts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from securecluster.parties.derived import training_size, training_sizes


@pytest.mark.parametrize(
    ("samples", "share", "trains"),
    [(20, 0.0, 20), (20, 0.25, 15), (10, 0.25, 8), (7, 0.5, 4), (1, 0.5, 1), (0, 0.5, 0)],
)
def test_a_client_trains_on_what_is_not_held_out(samples: int, share: float, trains: int) -> None:
    method: Any = SimpleNamespace(training=SimpleNamespace(validation_share=lambda _: share))
    assert training_size(method, samples) == trains
    facts: Any = SimpleNamespace(sizes=[samples, 20])
    assert training_sizes(method, facts) == [trains, training_size(method, 20)]
