"""Shared by tests of attacks: runs, what an adversary has of them, and what attacks achieve."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np

from securecluster import Federation
from securecluster.attacks.base import Attack, Knowledge, Tap, Truth, View
from securecluster.attacks.scoring import Score, evaluate
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.messaging.parties import SERVER
from securecluster.protocols import Settings

FULL = Settings(transcript="full", threads=1)
Samples = tuple[Any, Any] | None
digits = partial(Federation.simulate, "digits", seed=0)
NO_UPDATES = "not applicable: no single update of a first round was observed"


def scene(
    fitted: Any,
    federation: Federation,
    samples: Samples = None,
    taps: Iterable[Tap] = (),
    parties: Any = SERVER,
    colluders: Iterable[int] = (),
    **view: Any,
) -> tuple[View, Knowledge, Truth]:
    """Return a run as parties see it, what they know, and the truth."""
    seen = view_of(fitted, parties, **view)
    knowledge = knowledge_of(fitted, federation, colluders, samples)
    return seen, knowledge, truth_of(fitted, federation, seen, tuple(taps))


def result_of(attack: Attack, fitted: Any, federation: Federation, *more: Any, **named: Any) -> Any:
    """Return the score of an attack, or why it is not applicable."""
    return evaluate(attack, *scene(fitted, federation, *more, **named))


def score_of(attack: Attack, *run: Any, **named: Any) -> Score:
    """Return the score of an attack that is applicable."""
    found = result_of(attack, *run, **named)
    assert isinstance(found, Score), found
    return found


def samples_of(*federations: Federation, part: str = "") -> tuple[Any, Any]:
    """Return all clients' samples; of `part` "_test" those that they hold out."""
    shards = [shard for federation in federations for shard in federation.shards]
    x = np.concatenate([getattr(shard, f"x{part}") for shard in shards])
    return x, np.concatenate([getattr(shard, f"y{part}") for shard in shards])
