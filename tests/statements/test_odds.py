"""ε in the odds of one client or one record."""

from __future__ import annotations

import math
from typing import Any

import pytest

from securecluster.statements import odds

LOCAL = "local: each client adds the noise itself, so it protects from the server, too"


def said(epsilon: float | None, delta: float = 1e-5, **others: Any) -> str:
    """Return what is said of an ε."""
    privacy: Any = {"placement": LOCAL, "neighbouring": "for one client's data", **others}
    return " ".join(odds.in_words(privacy | {"epsilon": epsilon, "delta": delta}))


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 2.341, 30.0, 800.0])
@pytest.mark.parametrize("before", [0.01, 0.5, 0.9])
def test_odds_rise_by_bayes_rule_and_never_to_more_than_one(epsilon: float, before: float) -> None:
    after = odds.after(epsilon, before)
    assert before <= after <= 1
    if epsilon < 100:
        grown = math.exp(epsilon) * before
        assert after == pytest.approx(grown / (1 - before + grown))


@pytest.mark.parametrize(
    ("epsilon", "others", "words"),
    [
        (2.341, {}, "50 in 100) that one client's data, and not blanks, went into this run to 92"),
        (2.341, {}, "the server included, can raise"),
        (2.341, {}, "but for a chance of 1 in 100,000 (δ)"),
        (2.341, {"neighbouring": "for one example of one client"}, "one person's record"),
        (2.341, {"placement": "central: a trusted server"}, "but not the server itself"),
        (2.341, {"placement": "each client adds a share of the noise"}, "reads the secure sums"),
        (20.0, {}, "as good as certainty"),
        (None, {}, "No ε limits what readers"),
        (0.0, {"delta": 0.0}, "tells nothing of anyone"),
    ],
)
def test_a_board_reads_who_learns_what_and_how_much(
    epsilon: float | None, others: dict[str, Any], words: str
) -> None:
    assert words in said(epsilon, **others)
    if epsilon:
        assert "does not cover" in said(epsilon, **others)
