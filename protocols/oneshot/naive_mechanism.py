"""The naive mechanism: noise on unit eigenvectors in place of their Gram matrix, for research.

Its sensitivity is the trivial one, 2√p. It shows how much noise the clustering tolerates, and
protects less than it seems to: relevance stays exact (not in the paper).
"""

from __future__ import annotations

import math
from typing import Any

from securecluster.protocols import authoring as fl


def check(options: Any) -> None:
    """Check the choice of a mechanism.

    Args:
        options: a protocol with the options of one-shot clustering.

    Raises:
        UsageError: an unknown mechanism, or one that does not fit the noise.
    """
    naive = options.gram_mechanism == "naive"
    if naive and options.target_epsilon is not None:
        raise fl.UsageError(
            "naive noise leaves relevance exact, so no noise reaches a target_epsilon: use the "
            "gram mechanism"
        )
    if naive and not options.gram_noise:
        raise fl.UsageError(
            "the naive mechanism is noise on eigenvectors: say how much (gram_noise), or leave it "
            "out"
        )


def price(z: float, p: int, delta: float) -> str:
    """Return a sentence on the price of the mechanism, which is not the run's.

    Args:
        z: the noise multiplier.
        p: eigenvectors that each client shares.
        delta: δ.
    """
    from securecluster.privacy.dp.accounting import epsilon

    alone = epsilon([(z, 1.0, 1)], delta).epsilon
    deviation = z * 2 * math.sqrt(p)
    return (
        f"naive noise of std {deviation:.3g} is on eigenvectors alone: by their trivial "
        "sensitivity 2√p, whoever is protected,"
        f" ε = {alone:.3g} for them; relevance is exact, so ε of all that is released is infinite"
    )
