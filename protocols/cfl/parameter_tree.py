"""The parameter tree of recursive clustering (Sattler et al. 2019, V-C, Algorithm 4).

It is held by a server that cannot read a model. It has a node for every cluster that was or is,
with its stationary model θ*_v as a displacement from θ_0, under a mask of its own where updates are
masked. The edges below a node hold the updates from θ*_v of each child's clients, under the mask of
their round. A newcomer undoes the first mask and replies under the second, so it finds its leaf
without showing the server either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np

from securecluster.clustering.similarity import cross_cosine
from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UpdateError
from securecluster.messaging.messages import Picks, Rows
from securecluster.protocols.cfl.client import CFLClient, PathModels
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.compressed_updates import updates_of
from securecluster.protocols.common.messages import AverageDeltas, ModelDelta, empty_tensor
from securecluster.protocols.common.pending_updates import PendingUpdates, request_model
from securecluster.protocols.common.sampling import TRIES
from securecluster.runtime.endpoint import MINIMUM
from securecluster.runtime.server_channel import ServerChannel


@dataclass
class TreeNode:
    """A cluster: one of its time, which was split, or a leaf."""

    members: list[int]
    parent: int | None = None
    children: list[int] = field(default_factory=list)  # two, or none
    cluster: int = -1  # a leaf's label
    round: int = 0  # of its split
    model: ModelDelta = field(default_factory=ModelDelta)  # θ*_v
    updates: torch.Tensor = field(default_factory=empty_tensor)  # (len(members), d), from θ*_v
    step: int = 0  # the call whose mask they carry


@dataclass
class LeafModels:
    """Final models, in the order of their nodes.

    They lie apart from the tree, so that a checkpoint does not hold the tree twice.
    """

    models: list[ModelDelta]


@dataclass
class ParameterTree:
    """Nodes by number; 0 is the root, and children come after their parents."""

    nodes: list[TreeNode]

    @classmethod
    def start(cls, clients: int) -> ParameterTree:
        """Everyone in one cluster."""
        return cls([TreeNode(list(range(clients)), cluster=0)])

    def leaf(self, cluster: int) -> int:
        """The number of a cluster's node."""
        return next(v for v, node in enumerate(self.nodes) if node.cluster == cluster)

    def path(self, node: int) -> list[int]:
        """From the root to a node, both included."""
        above = self.nodes[node].parent
        return [node] if above is None else [*self.path(above), node]

    def branch(self, cluster: int, halves: tuple[list[int], list[int]], new: int) -> TreeNode:
        """Split a cluster and return the node that was its leaf.

        The second half becomes the cluster `new`.
        """
        v = self.leaf(cluster)
        self.nodes[v].cluster = -1
        self.nodes[v].children = [len(self.nodes), len(self.nodes) + 1]
        self.nodes += [
            TreeNode(half, v, cluster=label)
            for half, label in zip(halves, (cluster, new), strict=True)
        ]
        return self.nodes[v]

    def leaf_models(self, net: ServerChannel, outbox: PendingUpdates) -> LeafModels:
        """Every leaf's final model, asked of its members."""
        width = max(len(node.model.displacement) for node in self.nodes)
        models = [request_model(net, outbox, leaf.members, width) for leaf in self._leaves()]
        return LeafModels(models)

    def complete(self, leaves: LeafModels) -> None:
        """Keep them, too."""
        for leaf, model in zip(self._leaves(), leaves.models, strict=True):
            leaf.model = model

    def _leaves(self) -> list[TreeNode]:
        return [node for node in self.nodes if not node.children]

    def message_for(self, nodes: Sequence[Sequence[int]], count: int) -> AverageDeltas:
        """Frames that bring the models of some nodes each, (len(nodes[k])) of them to recipient k.

        Args:
            count: of averages that recipients have had; who has had fewer takes the model for the
                last one.
        """
        used = sorted(set(chain.from_iterable(nodes)))
        row_of = {v: row for row, v in enumerate(used)}
        rows = []
        for recipient in nodes:
            rows.append(tuple(row_of[v] for v in recipient))
        picks = tuple(rows)
        models = [self.nodes[v].model for v in used]
        deltas = torch.stack([model.displacement for model in models])
        steps = torch.as_tensor([model.step for model in models])
        counts = torch.full((len(nodes),), count)
        return AverageDeltas(Picks(deltas, picks), Picks(steps, picks), True, Rows(counts))


def find_leaves(
    net: ServerChannel, tree: ParameterTree, method: Callable[..., Any], to: Sequence[int]
) -> list[int]:
    """Return each newcomer's leaf (Sattler et al. 2019, Algorithm 4).

    At every node a newcomer goes to the child that holds the single most similar update, and on a
    tie to the second child.

    Args:
        method: of clients, whose replies the tree holds.

    Raises:
        UpdateError: a newcomer does not reply.
    """
    node_of = dict.fromkeys(to, 0)
    for v, node in enumerate(tree.nodes):
        arrived = [i for i in to if node_of[i] == v]
        if arrived and node.children:
            node_of |= _choose_children(net, tree, v, method, arrived)
    return [tree.nodes[v].cluster for v in node_of.values()]


def _choose_children(
    net: ServerChannel,
    tree: ParameterTree,
    v: int,
    method: Callable[..., Any],
    newcomers: Sequence[int],
) -> dict[int, int]:
    """Return the child of node v that each newcomer goes on to."""
    node = tree.nodes[v]
    chosen: dict[int, int] = {}
    waiting = list(newcomers)
    for _ in range(TRIES):
        if not waiting:
            break
        # a count that grows down the tree: a later node's model replaces an earlier one's
        message = tree.message_for([[v]] * len(waiting), count=v + 1)
        replies = net.gather(method, message, to=waiting, step=node.step)
        if replies.ids:
            alpha = cross_cosine(updates_of(replies), node.updates).numpy()
            nearest = []
            for child in node.children:
                members = np.isin(node.members, tree.nodes[child].members)
                nearest.append(alpha[:, members].max(1))
            goes_first = nearest[0] > nearest[1]
            for i, first in zip(replies.ids, goes_first, strict=True):
                chosen[i] = node.children[0 if first else 1]
        waiting = [i for i in waiting if i not in chosen]
    if waiting:
        raise UpdateError(
            f"newcomer(s) {', '.join(map(str, waiting[:5]))} do not reply: ask them again later"
        )
    return chosen


@dataclass
class FallbackResult:
    """Which node's model each cluster is handed, and why."""

    nodes: list[int]
    # of each cluster: node -> mean validation loss in nats; none where it was not judged
    losses: list[dict[int, float]]


def choose_fallback_models(
    net: ServerChannel, tree: ParameterTree, outbox: PendingUpdates, labels: Sequence[int]
) -> FallbackResult:
    """Choose the models that clusters return to where a split made validation worse.

    Such a cluster returns to the best model before the split (Sattler et al. 2019, end of II-A).

    Clusters that were split off are judged, through sums, by their members that have the final
    model; where these are fewer than two the cluster keeps its model, for a sum over one hides
    nothing. Labels stay as they are.
    """
    leaves = [tree.leaf(c) for c in range(1 + max(labels))]
    ancestors = [tree.path(leaf)[:-1] for leaf in leaves]
    result = FallbackResult(list(leaves), [{} for _ in leaves])
    judges = _judges(outbox, labels, ancestors)
    if not judges:
        return result

    depth = max(len(path) for path in ancestors)
    message = tree.message_for([ancestors[labels[i]] for i in judges], outbox.number)
    query = PathModels(message.means, message.steps, message.absolute, message.count, depth=depth)
    groups = [labels[i] for i in judges]
    sums = net.sum(CFLClient.judge, query, to=judges, by=groups, groups=len(leaves))
    if not sums.ids:
        return result

    losses = sums.rows.loss.table
    if losses.shape[1] < 1 + depth:
        raise FrameError(
            f"PathLosses.loss has {losses.shape[1]} numbers where {1 + depth} were expected: the "
            "replies are refused"
        )
    # clients that clip do not tell how many samples they keep aside: each of them counts the same
    sizes = sums.counts if sums.rows.size is None else sums.rows.size.table.tolist()
    for c, size in enumerate(sizes):
        if size:
            nodes = [leaves[c], *ancestors[c]]
            means = {v: float(losses[c, n]) / size for n, v in enumerate(nodes)}
            result.losses[c] = means
            result.nodes[c] = min(nodes, key=means.__getitem__)
    return result


def _judges(
    outbox: PendingUpdates, labels: Sequence[int], ancestors: Sequence[Sequence[int]]
) -> list[int]:
    """Return the clients that judge: those with the final model, in clusters that were split off.

    A cluster with fewer than two of them has no judges.
    """
    lagging = set(outbox.lagging_clients())
    current = [i for i in range(len(labels)) if i not in lagging]
    current_members = Counter(labels[i] for i in current)
    judged = {c for c, n in current_members.items() if n >= MINIMUM and ancestors[c]}
    return [i for i in current if labels[i] in judged]


def send_fallback_models(
    net: ServerChannel,
    tree: ParameterTree,
    outbox: PendingUpdates,
    labels: Sequence[int],
    fallback_models: FallbackResult,
) -> FallbackResult:
    """Send the clusters that return to an earlier model that model.

    It is a phase of its own: clients judge their final model, so a server that asks them again must
        not have replaced it.
    """
    leaves = [tree.leaf(c) for c in range(1 + max(labels))]
    waiting = [i for i, c in enumerate(labels) if fallback_models.nodes[c] != leaves[c]]
    for _ in range(TRIES):
        if not waiting:
            break
        nodes = [[fallback_models.nodes[labels[i]]] for i in waiting]
        message = tree.message_for(nodes, outbox.number + 1)
        replies = net.gather(TrainingClient.receive, message, to=waiting)
        waiting = sorted(set(waiting) - set(replies.ids))
    return fallback_models
