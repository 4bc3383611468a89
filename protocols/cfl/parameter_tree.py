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
        return LeafModels(
            [
                request_model(net, outbox, node.members, width)
                for node in self.nodes
                if not node.children
            ]
        )

    def complete(self, leaves: LeafModels) -> None:
        """Keep them, too."""
        for node, model in zip(
            [node for node in self.nodes if not node.children], leaves.models, strict=True
        ):
            node.model = model

    def message_for(self, nodes: Sequence[Sequence[int]], count: int) -> AverageDeltas:
        """Frames that bring the models of some nodes each, (len(nodes[k])) of them to recipient k.

        Args:
            count: of averages that recipients have had; who has had fewer takes the model for the
                last one.
        """
        used = sorted({v for own in nodes for v in own})
        models, place = [self.nodes[v].model for v in used], {v: n for n, v in enumerate(used)}
        picks = tuple(tuple(place[v] for v in own) for own in nodes)
        table = torch.stack([model.displacement for model in models])
        steps, counts = (
            torch.as_tensor([model.step for model in models]),
            torch.full((len(nodes),), count),
        )
        return AverageDeltas(Picks(table, picks), Picks(steps, picks), True, Rows(counts))


def find_leaves(
    net: ServerChannel, tree: ParameterTree, ask: Callable[..., Any], to: Sequence[int]
) -> list[int]:
    """Return each newcomer's leaf (Sattler et al. 2019, Algorithm 4).

    At every node a newcomer goes to the child that holds the single most similar update, and on a
    tie to the second child.

    Args:
        ask: the client method whose replies the tree holds.

    Raises:
        UpdateError: a newcomer does not reply.
    """
    at = dict.fromkeys(to, 0)
    for v, node in enumerate(tree.nodes):
        left = [i for i in to if at[i] == v]
        for _ in range(TRIES if node.children else 0):
            if not left:
                break
            letter = tree.message_for([[v]] * len(left), count=v + 1)  # further down comes later
            got = net.gather(ask, letter, to=left, step=node.step)
            if got.ids:
                alpha = cross_cosine(updates_of(got), node.updates).numpy()
                one, two = (
                    alpha[:, np.isin(node.members, tree.nodes[u].members)].max(1)
                    for u in node.children
                )
                at |= {
                    i: node.children[0 if nearer else 1]
                    for i, nearer in zip(got.ids, one > two, strict=True)
                }
            left = [i for i in left if at[i] == v]
        if left and node.children:
            raise UpdateError(
                f"newcomer(s) {', '.join(map(str, left[:5]))} do not reply: ask them again later"
            )
    return [tree.nodes[v].cluster for v in at.values()]


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
    handed = FallbackResult(list(leaves), [{} for _ in leaves])
    above = [tree.path(v)[:-1] for v in leaves]
    late = set(outbox.lagging_clients())
    judges = Counter(c for i, c in enumerate(labels) if i not in late)
    to = [i for i, c in enumerate(labels) if above[c] and i not in late and judges[c] >= MINIMUM]
    if not to:
        return handed
    letter = tree.message_for([above[labels[i]] for i in to], outbox.number)
    depth = max(len(path) for path in above)
    path = PathModels(letter.means, letter.steps, letter.absolute, letter.count, depth=depth)
    total = net.sum(CFLClient.judge, path, to=to, by=[labels[i] for i in to], groups=len(leaves))
    width = total.rows.loss.table.shape[1] if total.ids else 1 + depth
    if width < 1 + depth:
        raise FrameError(
            f"Losses.loss has {width} numbers where {1 + depth} were expected: the replies are "
            "refused"
        )
    sizes = (
        []
        if not total.ids
        else total.counts
        if total.rows.size is None
        else total.rows.size.table.tolist()
    )
    for c in (c for c, size in enumerate(sizes) if size):
        nodes = [leaves[c], *above[c]]
        losses = {v: float(total.rows.loss.table[c, n]) / sizes[c] for n, v in enumerate(nodes)}
        handed.losses[c], handed.nodes[c] = losses, min(nodes, key=losses.__getitem__)
    return handed


def send_fallback_models(
    net: ServerChannel,
    tree: ParameterTree,
    outbox: PendingUpdates,
    labels: Sequence[int],
    handed: FallbackResult,
) -> FallbackResult:
    """Send the clusters that return to an earlier model that model.

    It is a phase of its own: clients judge their final model, so a server that asks them again must
        not have replaced it.
    """
    leaves = [tree.leaf(c) for c in range(1 + max(labels))]
    back = [i for i, c in enumerate(labels) if handed.nodes[c] != leaves[c]]
    for _ in range(TRIES):
        if back:
            letter = tree.message_for([[handed.nodes[labels[i]]] for i in back], outbox.number + 1)
            back = sorted(set(back) - set(net.gather(TrainingClient.receive, letter, to=back).ids))
    return handed
