"""NSIM's server: the first average of each cluster."""

from __future__ import annotations

from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.nsim.client import NSIMClient


def average_layers(net: fl.ServerChannel, state: fl.AveragingState) -> None:
    """Average in each cluster what its members learned alone (the one average of the paper).

    A cluster without replies is divided into single clients (not in the paper).

    Args:
        net: the server's channel.
        state: its labels and queue of averages are updated.
    """
    clusters = fl.members(state.labels)
    averages: dict[int, torch.Tensor] = {}
    step = 0
    # a sum over one client would reveal its model
    recipients = []
    for i in net.clients:
        peers = clusters[state.labels[i]]
        if len(peers) > 1:
            recipients.append(i)
    if recipients:
        sums = net.sum(
            NSIMClient.pool,
            fl.Empty(),
            to=recipients,
            by=[state.labels[i] for i in recipients],
            groups=len(clusters),
            rosters=clusters,
        )
        if sums.ids:
            step = sums.step
            means = fl.weighted_means(sums)
            averages = {c: means[c] for c, count in enumerate(sums.counts) if count}

    # clusters without an average become single clients, which go on alone
    old = [c if c in averages else -1 for c in state.labels]
    state.labels = fl.relabel(old)
    single = [i for i in net.clients if old[i] < 0]
    state.outbox.unsubscribe(single)
    if not averages:
        return
    old_label = dict(zip(state.labels, old, strict=True))
    # The average counts from θ_0 whatever a member holds, so a member that missed the sum starts
    # from it, too.
    zeros = torch.zeros_like(next(iter(averages.values())))  # for single clients
    table = []
    for label in sorted(old_label):
        table.append(averages.get(old_label[label], zeros))
    state.outbox.post(step, torch.stack(table), state.labels)
