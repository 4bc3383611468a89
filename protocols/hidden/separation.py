"""Whether the clusters that hidden assignment found are told apart, from what its sums released.

Told k clusters where there are fewer, it cuts one in pieces, and no index without the true clusters
says so. The centres of the fourth sum do: those of pieces are close beside the spread of their
members (`noisy_centres.separation`). Nothing more is released for it.
"""

from __future__ import annotations

from typing import Any

# Below this separation clusters are not told apart. Chosen on seeds 20 to 22 of
# `benchmarks.private.hidden` settings: one cluster that was cut in four has 0.2 without noise, and
# up to 0.3 with skewed labels; clusters that were found have 0.45 or more.
APART = 0.35


def separation_warning(method: Any, state: Any) -> str | None:
    """Return a sentence, with advice, if the clusters of a run are not told apart.

    Args:
        method: the `Hidden` of the run.
        state: its final state.
    """
    separation = state.centres.separation
    if len(state.centres.sizes) < 2 or separation >= APART:
        return None
    advice = "fewer clusters (--k)"
    if method.privacy.noisy:
        advice = "fewer clusters (--k), less noise or more clients"
    return (
        f"the {len(state.centres.sizes)} clusters found are hardly told apart: their centres "
        f"account for {separation:.2f} of the clients' differences, as pieces of one cluster "
        f"would (below {APART:g}): try {advice}"
    )
