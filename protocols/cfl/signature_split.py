"""CFL's split test on gradient signatures (not in the paper).

Lines 16–21 of Algorithm 5 with α of signatures in place of updates, and averages by sums. A
signature is of the same public model in every round, and the mean of a cluster's is subtracted. So
it stands for an update at a stationary point (Σ a_l·v_l = 0, eq. 104) from the first round on, and
the conditions on norms (eq. 32 and 33), which tell when updates do, have nothing to test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.labels import members as clusters_of
from securecluster.clustering.noisy_rows import NoisyBlocks, NoisyRows
from securecluster.messaging.replies import Sums
from securecluster.protocols.cfl.client import CFLClient
from securecluster.protocols.cfl.split_test import SplitStatistics
from securecluster.protocols.common.averaging import weighted_means
from securecluster.protocols.common.pending_updates import PendingUpdates
from securecluster.protocols.common.signature_collection import (
    Collected,
    centred_cosines,
    comparable,
)
from securecluster.runtime.server_channel import ServerChannel


def average_by_sums(
    net: ServerChannel, outbox: PendingUpdates, recipients: Sequence[int], labels: Sequence[int]
) -> tuple[list[SplitStatistics], int]:
    """Run lines 5–8 and 15 by one sum for each cluster.

    Args:
        recipients: the clients that are sampled in this round.
        labels: (m,) each client's cluster.

    Returns:
        Statistics of all clusters with their means, and the call whose mask these carry.
    """
    clusters = clusters_of(labels)
    sums: Sums[Any] = net.sum(
        CFLClient.contribute,
        outbox.message_for(recipients),
        to=recipients,
        by=[labels[i] for i in recipients],
        groups=len(clusters),
        rosters=clusters,
    )
    outbox.acknowledge(sums.ids)
    round_statistics = [
        SplitStatistics(c, members, [i for i in sums.ids if labels[i] == c])
        for c, members in enumerate(clusters)
    ]
    if sums.ids:
        means = weighted_means(sums)
        for statistics in round_statistics:
            if statistics.replied:
                statistics.mean = means[statistics.cluster]
    return round_statistics, sums.step


class SignatureSplits:
    """Signatures of all clients, as the split test compares them.

    Args:
        signatures: as they were collected.
    """

    def __init__(self, signatures: Collected) -> None:
        self._position = {i: n for n, i in enumerate(signatures.ids)}
        self._rows = signatures.rows

    def present(self, members: Sequence[int]) -> list[int]:
        """Return the clients that sent a signature.

        Args:
            members: of a cluster.
        """
        return [i for i in members if i in self._position]

    def compared(self, clients: Sequence[int]) -> NoisyRows | NoisyBlocks:
        """Return the signatures of some clients, with what is known of their noise.

        Args:
            clients: their numbers; all sent one.
        """
        positions = [self._position[i] for i in clients]
        return comparable(self._rows, self._rows).select(positions)

    def similarities(self, clients: Sequence[int]) -> NDArray[np.float64]:
        """Return α, the cosines of signatures less the mean of these clients', (n, n).

        Args:
            clients: their numbers; all sent one.
        """
        compared = self.compared(clients)
        return centred_cosines(compared.pair_distances(), compared.noisy)
