"""NSIM's server: the average of a cluster's layers."""

from __future__ import annotations

from securecluster.clustering.labels import members, relabel
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Empty
from securecluster.protocols.common.averaging import AveragingState, weighted_means
from securecluster.protocols.nsim.client import NSIMClient
from securecluster.runtime.server_channel import ServerChannel


def average_layers(net: ServerChannel, state: AveragingState) -> None:
    """The paper's one average in each cluster, of what its members learned alone; a cluster that
    does not reply goes apart (ours).
    """
    clusters, averages, step = members(state.labels), dict[int, torch.Tensor](), 0
    asked = [i for i in net.clients if len(clusters[state.labels[i]]) > 1]
    if asked:
        total = net.sum(
            NSIMClient.pool,
            Empty(),
            to=asked,
            by=[state.labels[i] for i in asked],
            groups=len(clusters),
        )
        if total.ids:
            step, means = total.step, weighted_means(total)
            averages = {c: means[c] for c, count in enumerate(total.counts) if count}
    old = [c if c in averages else -1 for c in state.labels]
    state.labels = relabel(old)
    state.outbox.unsubscribe([i for i in net.clients if old[i] < 0])
    if averages:
        row = dict(zip(state.labels, old, strict=True))
        nobody = torch.zeros_like(next(iter(averages.values())))
        state.outbox.post(
            step, torch.stack([averages.get(row[c], nobody) for c in sorted(row)]), state.labels
        )
