"""What was released, and that nothing without noise counts as private."""

from __future__ import annotations

import math

from securecluster.privacy.ledger import Event, Ledger
from securecluster.state import pack, unpack


def test_epsilon_is_zero_before_and_infinite_after_any_exact_release() -> None:
    ledger = Ledger()
    assert (ledger.epsilon, ledger.reported()) == (0.0, 0.0)
    ledger.add(Event("train", "sum", ("delta",), 1, (4, 7)))
    assert ledger.epsilon == math.inf
    assert ledger.reported() is None


def test_ledgers_are_apart_keep_order_and_survive_a_checkpoint() -> None:
    one, other = Ledger(), Ledger()
    again = Event("b", "sum", ("x", "y"), 2, (3, 1))
    events = [again, Event("a", "gather", (), 1, (1,), "gaussian", 0.5), again]
    for event in events:
        one.add(event)
    assert (one.events, other.events) == (events, [])
    assert unpack(pack(one), Ledger) == one
