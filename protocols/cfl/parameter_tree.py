"""The parameter tree of recursive clustering (Sattler et al. 2019, V-C, Algorithm 4).

A server that cannot read a model holds the tree. It has a node for every current or former cluster.
A node stores its stationary model θ*_v as a displacement from θ_0, under a mask of its own where
updates are masked. The edges below a node store the updates from θ*_v of each child's clients,
under the mask of their round. A newcomer removes the first mask and replies under the second, so it
finds its leaf without showing the server either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.clustering.similarity import cross_cosine
from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl
from securecluster.protocols.cfl.client import CFLClient, PathModels
from securecluster.protocols.common.averages.pending_updates import request_models
from securecluster.protocols.common.comparison.compressed_updates import updates_of


@dataclass
class TreeNode:
    """A cluster: an inner node that was split, or a leaf."""

    members: list[int]
    parent: int | None = None
    children: list[int] = field(default_factory=list)  # two, or none
    cluster: int = -1  # a leaf's label
    round: int = 0  # of its split
    model: fl.ModelDelta = field(default_factory=fl.ModelDelta)  # θ*_v
    updates: torch.Tensor = field(default_factory=fl.empty_tensor)  # (len(members), d), from θ*_v
    step: int = 0  # the call whose mask the updates carry
    # what its split was decided by: the clients, and their α (n, n); none with landmarks
    compared: list[int] = field(default_factory=list)
    alpha: torch.Tensor = field(default_factory=fl.empty_tensor)
    cross_max: float = 0.0  # α_cross^max of the sides
    noise: float = 0.0  # norm of privacy's noise in a row, over that of the row without it


@dataclass
class LeafModels:
    """Final models, in the order of the leaves.

    They are stored apart from the tree, so that a checkpoint does not contain the tree twice.
    """

    models: list[fl.ModelDelta]


@dataclass
class ParameterTree:
    """Nodes by number; 0 is the root, and children come after their parents."""

    nodes: list[TreeNode]

    @classmethod
    def start(cls, clients: int) -> ParameterTree:
        """Return a tree with all clients in one cluster."""
        return cls([TreeNode(list(range(clients)), cluster=0)])

    def leaf(self, cluster: int) -> int:
        """Return the number of a cluster's node.

        Args:
            cluster: its label.
        """
        return next(v for v, node in enumerate(self.nodes) if node.cluster == cluster)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to a node, both included.

        Args:
            node: its number.
        """
        parent = self.nodes[node].parent
        if parent is None:
            return [node]
        return [*self.path(parent), node]

    def branch(self, cluster: int, sides: tuple[list[int], list[int]], new: int) -> TreeNode:
        """Split a cluster and return the node that was its leaf.

        Args:
            cluster: label of the cluster, which its first half keeps.
            sides: the clients of each half.
            new: label of the second half.
        """
        v = self.leaf(cluster)
        node = self.nodes[v]
        node.cluster = -1
        first_child = len(self.nodes)
        node.children = [first_child, first_child + 1]
        for half, label in zip(sides, (cluster, new), strict=True):
            self.nodes.append(TreeNode(half, v, cluster=label))
        return node

    def leaf_models(self, net: fl.ServerChannel, outbox: fl.PendingUpdates) -> LeafModels:
        """Fetch every leaf's final model from its members.

        Args:
            net: the channel to the clients.
            outbox: the averages of the run, all of which were sent.
        """
        width = max(len(node.model.displacement) for node in self.nodes)
        members = [leaf.members for leaf in self._leaves()]
        return LeafModels(request_models(net, outbox, members, width))

    def complete(self, leaves: LeafModels) -> None:
        """Store the leaves' final models in the tree.

        Args:
            leaves: the result of `leaf_models`.
        """
        for leaf, model in zip(self._leaves(), leaves.models, strict=True):
            leaf.model = model

    def _leaves(self) -> list[TreeNode]:
        return [node for node in self.nodes if not node.children]

    def message_for(self, nodes: Sequence[Sequence[int]], count: int) -> fl.AverageDeltas:
        """Return a message with the models of nodes, as displacements from θ_0.

        Args:
            nodes: for each recipient, the nodes whose models it receives.
            count: number of averages that recipients have received. A recipient with fewer takes
                the last model of its nodes for the latest average.
        """
        unique = sorted(set[int]().union(*nodes))  # each model is sent once
        row_of = {v: row for row, v in enumerate(unique)}
        rows = []
        for recipient_nodes in nodes:
            rows.append(tuple(row_of[v] for v in recipient_nodes))
        picks = tuple(rows)
        models = [self.nodes[v].model for v in unique]
        deltas = torch.stack([model.displacement for model in models])
        steps = torch.as_tensor([model.step for model in models])
        counts = torch.full((len(nodes),), count)
        return fl.AverageDeltas(
            fl.Picks(deltas, picks), fl.Picks(steps, picks), absolute=True, count=fl.Rows(counts)
        )


def find_leaves(
    net: fl.ServerChannel, tree: ParameterTree, method: Callable[..., Any], to: Sequence[int]
) -> list[int]:
    """Return each newcomer's cluster (Sattler et al. 2019, Algorithm 4).

    At every node a newcomer goes to the child that has the single most similar update, and on a tie
    to the second child.

    Args:
        method: the client method whose replies the tree stores.
        to: the newcomers.

    Raises:
        UpdateError: a newcomer does not reply.
    """
    node_of = dict.fromkeys(to, 0)  # line 2: v ← v_root
    # Children come after their parents, so one pass visits every newcomer's path. Newcomers at one
    # node are called together.
    for v, node in enumerate(tree.nodes):
        arrived = [i for i in to if node_of[i] == v]
        if arrived and node.children:  # line 3
            chosen = _choose_children(net, tree, v, method, arrived)
            node_of.update(chosen)
    leaves = [tree.nodes[v] for v in node_of.values()]
    return [leaf.cluster for leaf in leaves]


def _choose_children(
    net: fl.ServerChannel,
    tree: ParameterTree,
    v: int,
    method: Callable[..., Any],
    newcomers: Sequence[int],
) -> dict[int, int]:
    """Return the child of a node to which each newcomer goes on (lines 4–14).

    Args:
        v: the node's number.
        method: the client method whose replies the tree stores.
        newcomers: those that arrived at the node.

    Raises:
        UpdateError: a newcomer does not reply.
    """
    node = tree.nodes[v]
    chosen: dict[int, int] = {}
    waiting = list(newcomers)
    for _ in range(fl.TRIES):
        if not waiting:
            break
        # The count grows down the tree, so that a later node's model replaces an earlier one's.
        models = [[v]] * len(waiting)
        message = tree.message_for(models, count=v + 1)
        replies = net.gather(method, message, to=waiting, step=node.step)  # line 5
        if replies.ids:
            first, second = _similarity_to_children(tree, node, updates_of(replies))
            goes_second = ~(first > second)  # lines 8–12
            for i, position in zip(replies.ids, goes_second.astype(int), strict=True):
                chosen[i] = node.children[position]
        waiting = [i for i in waiting if i not in chosen]
    fl.check_newcomers(newcomers, list(chosen))
    return chosen


def _similarity_to_children(
    tree: ParameterTree, node: TreeNode, updates: torch.Tensor
) -> list[NDArray[np.float64]]:
    """Return α_0 and α_1, (n,) each: the largest cosine to any update of each child (lines 6–7).

    Args:
        updates: (n, d) of newcomers, from the node's model and under the mask of its updates.
    """
    alpha = cross_cosine(updates, node.updates).numpy()
    similarity = []
    for child in node.children:
        in_child = np.isin(node.members, tree.nodes[child].members)
        similarity.append(alpha[:, in_child].max(1))
    return similarity


@dataclass
class FallbackResult:
    """Result of the fallback: the node whose model each cluster receives."""

    nodes: list[int]
    # of each cluster: node -> mean validation loss in nats; empty where it was not evaluated
    losses: list[dict[int, float]]


def choose_fallback_models(
    net: fl.ServerChannel, tree: ParameterTree, outbox: fl.PendingUpdates, labels: Sequence[int]
) -> FallbackResult:
    """Choose the models that clusters return to where a split made validation worse.

    Such a cluster returns to the best model before the split (Sattler et al. 2019, end of II-A).
    Labels do not change.

    Members that have the final model evaluate it and those on its path, and the server receives
    sums of their losses. A cluster with fewer than two such members keeps its model, since a sum
    over one client hides nothing.

    Args:
        labels: (m,) each client's cluster.

    Raises:
        FrameError: the replies have fewer losses than the longest path has models.
    """
    clusters = range(1 + max(labels))
    leaves = [tree.leaf(c) for c in clusters]
    ancestors = [tree.path(leaf)[:-1] for leaf in leaves]
    result = FallbackResult(list(leaves), [{} for _ in leaves])
    evaluators = _evaluators(outbox, labels, ancestors, net.least_members)
    if not evaluators:
        return result

    depth = max(len(path) for path in ancestors)
    cluster_of = [labels[i] for i in evaluators]
    message = tree.message_for([ancestors[c] for c in cluster_of], outbox.number)
    query = PathModels(message.means, message.steps, message.absolute, message.count, depth=depth)
    sums = net.sum(
        CFLClient.judge,
        query,
        to=evaluators,
        by=cluster_of,
        groups=len(leaves),
        rosters=fl.members(labels),
    )
    if not sums.ids:
        return result

    # (K, 1 + depth), the cluster's own model first.
    losses = sums.rows.loss.table
    if losses.shape[1] < 1 + depth:
        raise fl.FrameError(
            f"PathLosses.loss has {losses.shape[1]} numbers where {1 + depth} were expected: the "
            "replies are refused"
        )
    # Clients that clip send no number of validation samples: they have equal weights.
    if sums.rows.size is None:
        sizes: Sequence[float] = sums.counts
    else:
        sizes = sums.rows.size.table.tolist()
    for c, size in enumerate(sizes):
        if not size:
            continue
        nodes = [leaves[c], *ancestors[c]]
        mean_losses = {}
        for n, v in enumerate(nodes):
            mean_losses[v] = float(losses[c, n]) / size
        result.losses[c] = mean_losses
        # On a tie the cluster keeps its own model, which comes first.
        result.nodes[c] = min(mean_losses, key=mean_losses.__getitem__)
    return result


def _evaluators(
    outbox: fl.PendingUpdates,
    labels: Sequence[int],
    ancestors: Sequence[Sequence[int]],
    least_members: int,
) -> list[int]:
    """Return the clients that evaluate models: members of split clusters with the final model.

    A cluster with too few of them for a sum has none.

    Args:
        labels: (m,) each client's cluster.
        ancestors: of each cluster's leaf; empty where the cluster was never split off.
        least_members: members of the smallest sum.
    """
    lagging = set(outbox.lagging_clients())
    current = [i for i in range(len(labels)) if i not in lagging]
    members = Counter(labels[i] for i in current)
    evaluated = set()
    for c, number in members.items():
        if number >= least_members and ancestors[c]:
            evaluated.add(c)
    return [i for i in current if labels[i] in evaluated]


def send_fallback_models(
    net: fl.ServerChannel,
    tree: ParameterTree,
    outbox: fl.PendingUpdates,
    labels: Sequence[int],
    fallback_models: FallbackResult,
) -> FallbackResult:
    """Send each cluster that returns to an earlier model that model.

    This is a separate phase. Clients evaluate their final model, so it must not have been replaced
    when a server that was restarted asks them again.

    Args:
        labels: (m,) each client's cluster.
        fallback_models: the result of `choose_fallback_models`, which is returned.
    """
    replaced = []
    for c, node in enumerate(fallback_models.nodes):
        replaced.append(node != tree.leaf(c))
    waiting = [i for i, c in enumerate(labels) if replaced[c]]
    for _ in range(fl.TRIES):
        if not waiting:
            break
        nodes = [[fallback_models.nodes[labels[i]]] for i in waiting]
        message = tree.message_for(nodes, outbox.number + 1)
        replies = net.gather(fl.TrainingClient.receive, message, to=waiting)
        waiting = sorted(set(waiting) - set(replies.ids))
    return fallback_models
