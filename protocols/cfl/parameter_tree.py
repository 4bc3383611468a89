"""The parameter tree of recursive clustering (Sattler et al. 2019, V-C, Algorithm 4), held by a server that cannot read a model.

A node for every cluster that was or is, with its stationary model θ*_v as a displacement from θ_0, under a mask of its own where updates
are masked; on the edges below it the updates from θ*_v of each child's clients, under the mask of their round. A newcomer undoes the
first and replies under the second, so it finds its leaf without showing the server either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np

from securecluster.clustering.similarity import cross_cosine
from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UpdateError
from securecluster.messaging.bounds import Between, Real, Upto
from securecluster.messaging.messages import Picks, Rows
from securecluster.privacy.dp.loss_mechanism import loss_clip, noised
from securecluster.privacy.masking.key_agreement import Hello
from securecluster.protocols.common.compressed_updates import Outliner, updates_of
from securecluster.protocols.common.pending_updates import MOST_SAMPLES, Discloser, Means, Outbox, Posted, Trainee, Update, nothing
from securecluster.runtime.endpoint import GATHER, MINIMUM, SUM, Turn, answers
from securecluster.runtime.server_channel import Network
from securecluster.training.local_trainer import LocalTraining

FULL = LocalTraining(lr=1.0, epochs=1, batch_size=1 << 62, dropout=False)  # one step over all samples: θ − ∇r(θ)
TRIES = 5
WORST = 1e30  # stands for a loss that is not finite, as that of weights that overflow: no cluster is handed such a model


@dataclass(frozen=True, eq=False)
class PathModels(Means):
    """Server to client: the models on the path from the root to its cluster."""

    depth: Annotated[int, Between(most="clients")] = 0  # models on the longest path of a client that is asked


@dataclass(frozen=True, eq=False)
class Losses:
    """Client to server: how several models do on samples that it keeps aside."""

    # (b, 1 + depth), summed over those samples: its own model's first, then the path's from the root; 0 after its end
    loss: Annotated[Rows, Real((Upto("depths", "clients", least=1),))]
    size: Annotated[Rows | None, Real(low=0, most=MOST_SAMPLES)]  # (b,) how many samples; without it losses are means


class Branching(Outliner):
    """Clients that also reply with gradients, and judge the models on their path."""

    @answers(GATHER, through=("delta",), fresh=True, trains="full")
    def gradient(self, turn: Turn, query: Means) -> Update:
        """−∇r_i(θ_i) over all of D_i (Sattler et al. 2019, eq. 50; cosines do not mind the sign)."""
        self.catch_up(turn, query)
        room = self._pipeline.room(self.cohort.model.dimension)
        return Update(
            Rows(
                self.cohort.train(
                    self.models.select(turn.at), turn.at, replace(FULL, clip=self.training.clip, noise=self.training.noise), turn.step, room
                )
            ),
            None,
        )

    @answers(SUM, unmasked=("loss", "size"))
    def judge(self, turn: Turn, query: PathModels) -> Losses:
        """The losses of θ_i and of the models on its path, which the query brings, on the samples kept aside; with noise where the run
        adds some.
        """
        self.check_not_behind(turn, query)
        widths = [1 + len(p) for p in query.means.picks]
        depth, clip = query.depth, loss_clip(self._pipeline.guard)
        if depth < max(widths) - 1:
            raise FrameError(f"PathModels.depth is {depth}, and a path has {max(widths) - 1} models: the frame is refused")
        found = np.zeros((len(turn.at), 1 + depth))
        sizes = [self.cohort.aside[k] for k in turn.at]
        found[:, 0] = self.cohort.loss_aside(self.models.select(turn.at), turn.at, clip)  # NaN for a client that keeps nothing aside
        for n in range(max(widths) - 1):
            far = [k for k, picks in enumerate(query.means.picks) if len(picks) > n]
            table, index = self._of(query, sorted({query.means.picks[k][n] for k in far}))
            rows = Rows(table, tuple(index[query.means.picks[k][n]] for k in far))
            found[far, 1 + n] = self.cohort.loss_aside(rows, [turn.at[k] for k in far], clip)
        kind = self.models.table.dtype
        found = np.nan_to_num(noised(self._pipeline.guard, "judge", turn, found, sizes, widths), nan=WORST, posinf=WORST)
        if self._pipeline.clips:  # n_i stays here
            return Losses(Rows(torch.as_tensor(found, dtype=kind)), None)
        size = np.array(sizes, dtype=np.float64)
        return Losses(Rows(torch.as_tensor(found * size[:, None], dtype=kind)), Rows(torch.as_tensor(size, dtype=kind)))

    def _of(self, query: Means, rows: Sequence[int]) -> tuple[torch.Tensor, dict[int, int]]:
        """The models that a letter's rows stand for, (len(rows), d), and each row's place."""
        models = [self.model_at(query.means.table[row], int(query.steps.table[row])) for row in rows]
        return torch.stack(models), {row: n for n, row in enumerate(rows)}


def ask_for_model(net: Network, outbox: Outbox, members: Sequence[int], width: int) -> Posted:
    """A cluster's model; where no member that has it replies, none.

    Without a mask the server knows its displacement (zero of `width` numbers before the first average); under fresh masks, whose averages
    it cannot add, a member posts it: one that lacks no average.
    """
    if not outbox.fresh:
        return Posted(outbox.displacement(members[0], width))
    late = set(outbox.late())
    for i in (i for i in members if i not in late):
        got = net.post(Discloser.post, Hello(), to=[i])
        if got.ids:
            return Posted(got.rows.delta.values[0].cpu(), got.step)
    return Posted()


@dataclass
class Node:
    """A cluster: one of its time, which was split, or a leaf."""

    members: list[int]
    parent: int | None = None
    children: list[int] = field(default_factory=list)  # two, or none
    cluster: int = -1  # a leaf's label
    round: int = 0  # of its split
    model: Posted = field(default_factory=Posted)  # θ*_v
    updates: torch.Tensor = field(default_factory=nothing)  # (len(members), d), from θ*_v
    step: int = 0  # the call whose mask they carry


@dataclass
class Leaves:
    """Final models, in the order of their nodes: apart from the tree, so that a checkpoint does not hold that twice."""

    models: list[Posted]


@dataclass
class Tree:
    """Nodes by number; 0 is the root, and children come after their parents."""

    nodes: list[Node]

    @classmethod
    def start(cls, clients: int) -> Tree:
        """Everyone in one cluster."""
        return cls([Node(list(range(clients)), cluster=0)])

    def leaf(self, cluster: int) -> int:
        """The number of a cluster's node."""
        return next(v for v, node in enumerate(self.nodes) if node.cluster == cluster)

    def path(self, node: int) -> list[int]:
        """From the root to a node, both included."""
        above = self.nodes[node].parent
        return [node] if above is None else [*self.path(above), node]

    def branch(self, cluster: int, halves: tuple[list[int], list[int]], new: int) -> Node:
        """Split a cluster; its second half becomes the cluster `new`. Returns the node that was its leaf."""
        v = self.leaf(cluster)
        self.nodes[v].cluster = -1
        self.nodes[v].children = [len(self.nodes), len(self.nodes) + 1]
        self.nodes += [Node(half, v, cluster=label) for half, label in zip(halves, (cluster, new), strict=True)]
        return self.nodes[v]

    def leaf_models(self, net: Network, outbox: Outbox) -> Leaves:
        """Every leaf's final model, asked of its members."""
        width = max(len(node.model.displacement) for node in self.nodes)
        return Leaves([ask_for_model(net, outbox, node.members, width) for node in self.nodes if not node.children])

    def complete(self, leaves: Leaves) -> None:
        """Keep them, too."""
        for node, model in zip([node for node in self.nodes if not node.children], leaves.models, strict=True):
            node.model = model

    def letter(self, nodes: Sequence[Sequence[int]], count: int) -> Means:
        """Frames that bring the models of some nodes each, (len(nodes[k])) of them to recipient k.

        Args:
            count: of averages that recipients have had; who has had fewer takes the model for the last one.
        """
        used = sorted({v for own in nodes for v in own})
        models, place = [self.nodes[v].model for v in used], {v: n for n, v in enumerate(used)}
        picks = tuple(tuple(place[v] for v in own) for own in nodes)
        table = torch.stack([model.displacement for model in models])
        steps, counts = torch.as_tensor([model.step for model in models]), torch.full((len(nodes),), count)
        return Means(Picks(table, picks), Picks(steps, picks), True, Rows(counts))


def walk(net: Network, tree: Tree, ask: Callable[..., Any], to: Sequence[int]) -> list[int]:
    """Each newcomer's leaf: at every node it goes to the child that holds the single most similar update, on a tie to the second
    (Sattler et al. 2019, Algorithm 4).

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
            letter = tree.letter([[v]] * len(left), count=v + 1)  # further down comes later
            got = net.gather(ask, letter, to=left, step=node.step)
            if got.ids:
                alpha = cross_cosine(updates_of(got), node.updates).numpy()
                one, two = (alpha[:, np.isin(node.members, tree.nodes[u].members)].max(1) for u in node.children)
                at |= {i: node.children[0 if nearer else 1] for i, nearer in zip(got.ids, one > two, strict=True)}
            left = [i for i in left if at[i] == v]
        if left and node.children:
            raise UpdateError(f"newcomer(s) {', '.join(map(str, left[:5]))} do not reply: ask them again later")
    return [tree.nodes[v].cluster for v in at.values()]


@dataclass
class Handed:
    """Which node's model each cluster is handed, and why."""

    nodes: list[int]
    losses: list[dict[int, float]]  # of each cluster: node -> mean validation loss in nats; none where it was not judged


def fall_back(net: Network, tree: Tree, outbox: Outbox, labels: Sequence[int]) -> Handed:
    """Where a split made validation worse, the cluster returns to the best model before it (Sattler et al. 2019, end of II-A).

    Clusters that were split off are judged, through sums, by their members that have the final model; where these are fewer than two the
    cluster keeps its model, for a sum over one hides nothing. Labels stay as they are.
    """
    leaves = [tree.leaf(c) for c in range(1 + max(labels))]
    handed = Handed(list(leaves), [{} for _ in leaves])
    above = [tree.path(v)[:-1] for v in leaves]
    late = set(outbox.late())
    judges = Counter(c for i, c in enumerate(labels) if i not in late)
    to = [i for i, c in enumerate(labels) if above[c] and i not in late and judges[c] >= MINIMUM]
    if not to:
        return handed
    letter = tree.letter([above[labels[i]] for i in to], outbox.number)
    depth = max(len(path) for path in above)
    path = PathModels(letter.means, letter.steps, letter.absolute, letter.count, depth=depth)
    total = net.sum(Branching.judge, path, to=to, by=[labels[i] for i in to], groups=len(leaves))
    width = total.rows.loss.table.shape[1] if total.ids else 1 + depth
    if width < 1 + depth:
        raise FrameError(f"Losses.loss has {width} numbers where {1 + depth} were expected: the replies are refused")
    sizes = [] if not total.ids else total.counts if total.rows.size is None else total.rows.size.table.tolist()
    for c in (c for c, size in enumerate(sizes) if size):
        nodes = [leaves[c], *above[c]]
        losses = {v: float(total.rows.loss.table[c, n]) / sizes[c] for n, v in enumerate(nodes)}
        handed.losses[c], handed.nodes[c] = losses, min(nodes, key=losses.__getitem__)
    return handed


def hand_back(net: Network, tree: Tree, outbox: Outbox, labels: Sequence[int], handed: Handed) -> Handed:
    """Send the clusters that return to an earlier model that model.

    It is a phase of its own: clients judge their final model, so a server that asks them again must not have replaced it.
    """
    leaves = [tree.leaf(c) for c in range(1 + max(labels))]
    back = [i for i, c in enumerate(labels) if handed.nodes[c] != leaves[c]]
    for _ in range(TRIES):
        if back:
            letter = tree.letter([[handed.nodes[labels[i]]] for i in back], outbox.number + 1)
            back = sorted(set(back) - set(net.gather(Trainee.receive, letter, to=back).ids))
    return handed
