"""What a server that splits clusters sees of one cluster in one round (Sattler et al. 2019, Algorithm 5, lines 15–21)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from securecluster.backend import torch
from securecluster.displacements import Outbox, Posted, nothing
from securecluster.network import Network
from securecluster.replies import Replies
from securecluster.run import Line
from securecluster.similarity import gram, gram_norms, mean_norm, mean_row
from securecluster.tree import Branching, Tree, ask_for_model


@dataclass
class Look:
    """Norms, and what a split needs."""

    cluster: int
    members: list[int]
    came: list[int]  # who replied with what α compares
    mean: torch.Tensor | None = None  # Δ_c, (d,)
    mean_norm: float = 0.0  # ‖Δ_c‖
    max_norm: float = 0.0  # max ‖Δ_i‖
    inner: torch.Tensor = field(default_factory=nothing)  # Gram matrix of what α compares; none in a round that is not tested
    updates: torch.Tensor = field(default_factory=nothing)  # what α compares, (·, d)
    places: list[int] = field(default_factory=list)  # rows of `updates`, of those that came
    step: int = 0  # the call they answered
    gap: float | None = None
    evidence: float | None = None
    halves: tuple[list[int], list[int]] | None = None
    model: Posted = field(default_factory=Posted)  # θ*

    @property
    def complete(self) -> bool:
        """Whether every member replied."""
        return len(self.came) == len(self.members)

    def line(self) -> Line:
        """For the history."""
        known = {name: getattr(self, name) for name in ("cluster", "mean_norm", "max_norm", "gap", "evidence")}
        return {**known, "members": len(self.members), "split": self.halves is not None}


def look_at(net: Network, got: Replies[Any], cluster: int, members: list[int], labels: Sequence[int]) -> Look:
    """Norms of a cluster's updates, free of the noise that clients add; α compares the updates (eq. 51)."""
    places = [k for k, i in enumerate(got.ids) if labels[i] == cluster]
    look = Look(cluster, members, [got.ids[k] for k in places])
    if places:
        delta, size = got.rows.delta.values, None if got.rows.size is None else got.rows.size.values[places]
        noise = net.noise("delta")
        share = torch.ones(len(places)) / len(places) if size is None else size / size.sum()
        look.inner, look.mean = gram(delta, places, noise), mean_row(delta, places, size)
        norms = gram_norms(look.inner)
        look.mean_norm = mean_norm(look.mean, norms, len(members), noise * float(share.double().square().sum()))
        look.max_norm = float(norms.max())
        look.updates, look.places, look.step = delta, places, got.step
    return look


def compare_gradients(net: Network, outbox: Outbox, look: Look) -> None:
    """Ask those that came for their full gradients: α compares these instead (eq. 50)."""
    got = net.gather(Branching.gradient, outbox.letter(look.came), to=look.came)
    look.came, look.places, look.step = list(got.ids), list(range(len(got.ids))), got.step
    if got.ids:
        look.updates = got.rows.delta.values
        look.inner = gram(look.updates, None, net.noise("delta"))


def model_for(net: Network, outbox: Outbox, look: Look) -> bool:
    """Get the model that a cluster is split at, before it moves on; False where no member posts it."""
    look.model = ask_for_model(net, outbox, look.members, look.updates.shape[1])
    return len(look.model.displacement) > 0


def divide(tree: Tree, labels: list[int], look: Look, number: int) -> None:
    """Split a cluster in round `number`: the second half becomes a new cluster; the node keeps what newcomers will be compared with."""
    assert look.halves is not None
    new = 1 + max(labels)
    node = tree.branch(look.cluster, look.halves, new)
    node.round = number
    if len(look.model.displacement):
        node.model = look.model
        node.updates, node.step = look.updates[look.places].cpu(), look.step
    for i in look.halves[1]:
        labels[i] = new
