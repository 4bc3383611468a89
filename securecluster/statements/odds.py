"""ε in the odds of one person or one client: what whoever reads a run can come to believe at most.

Of two worlds that differ in one unit of privacy, everything released is at most e^ε times as likely
in one as in the other, but for a part of probability δ. So odds of p rise at most to
e^ε·p / (1 − p + e^ε·p), by Bayes' theorem (Dwork & Roth 2014, The Algorithmic Foundations of
Differential Privacy, Section 2.3).
"""

from __future__ import annotations

import math

from securecluster.folders.schemas import Privacy

EVEN = 0.5  # odds of whoever knows nothing
RARE = 0.01
CERTAIN = 0.999  # odds from which nothing is left to be learned
UNITS = {"client": "one client's data", "example": "one record"}
SUPPOSED = {
    "client": "that one client's data, and not blanks, went into this run",
    "example": "that one person's record was among a client's data in this run",
}
# by the first word of the placement, who adds the noise
READERS = {
    "central": "Whoever reads what the trusted server releases, but not the server itself,",
    "distributed": "Whoever reads the secure sums of this run, the server included,",
}
READER = "Whoever reads every message of this run, the server included,"


def after(epsilon: float, before: float) -> float:
    """Return the largest odds, as a probability, after reading all that ε covers.

    Args:
        epsilon: ε of all releases.
        before: the probability before.
    """
    # of the other world, so that no large ε overflows
    other = (1 - before) * math.exp(-epsilon)
    return before / (before + other)


def in_words(privacy: Privacy) -> list[str]:
    """Return what ε says of one person or one client, in sentences.

    Args:
        privacy: `privacy` of result.json.
    """
    epsilon = privacy["epsilon"]
    # runs of older versions have fewer entries
    unit = "example" if "example" in privacy["neighbouring"] else "client"
    if epsilon is None:
        return [f"No ε limits what readers of this run's messages learn of {UNITS[unit]}."]
    delta = privacy.get("delta")
    if not delta:
        return ["Nothing that was sent depends on anybody's data, so it tells nothing of anyone."]
    placed, _, _ = privacy["placement"].replace(":", " ").partition(" ")
    placed = "distributed" if placed == "each" else placed
    reader = READERS.get(placed, READER)
    sentences = [
        f"{reader} can raise even odds (50 in 100) {SUPPOSED[unit]} to {_odds(epsilon, EVEN)} at "
        f"most, and odds of 1 in 100 to {_odds(epsilon, RARE)}, but for a chance of 1 in "
        f"{1 / delta:,.0f} (δ)."
    ]
    if after(epsilon, EVEN) > CERTAIN:
        sentences.append("That is as good as certainty: this ε limits nothing in practice.")
    sentences.append(
        "This does not cover what follows from all data alike, who takes part, other runs on the "
        "same data, and what stands under “It does not cover”."
    )
    return sentences


def _odds(epsilon: float, before: float) -> str:
    """Return the largest odds of a hundred, rounded up."""
    value = 100 * after(epsilon, before)
    if value > 100 * CERTAIN:
        return "more than 99.9 in 100"
    digits = 1 if value > 99 or value < 10 else 0
    scale = 10**digits
    return f"{math.ceil(value * scale - 1e-9) / scale:g} in 100"
