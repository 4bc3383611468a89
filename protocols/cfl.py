"""Clustered Federated Learning: Sattler, Müller, Samek, "Clustered Federated Learning: Model-Agnostic Distributed Multi-Task
Optimization under Privacy Constraints", arXiv 1910.01991 (2019) / IEEE TNNLS 32(8), 2021. Algorithm 5, with Algorithms 1 and 3.

θ      a client's model; the server never needs it (it may know θ_0)
Δ_i    client i's masked update P(SGD_n(θ_i, D_i) − θ_i); Δ_c the mean over cluster c
α      cosine similarities of updates (eq. 44); α_cross^max the largest across the two halves of a split (eq. 35)
ε1, ε2 the split test: ‖Δ_c‖ < ε1 and max ‖Δ_i‖ > ε2 (eq. 32–34); γ_max the assumed approximation noise (eq. 39)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from securecluster.protocols.base import Protocol

from securecluster.backend import torch
from securecluster.clustering import bipartition, evidence
from securecluster.clustering import members as clusters_of
from securecluster.data import Federation
from securecluster.displacements import Outbox, Trainee, deliver, invite
from securecluster.errors import UsageError
from securecluster.network import Network
from securecluster.run import Line, Run
from securecluster.separation import largest_noise, separation_gap
from securecluster.similarity import cosine, gram, gram_norms, mean_norm, mean_row


@dataclass
class State:
    """What the server's loop changes."""

    labels: list[int]
    outbox: Outbox
    scale: float = 0.0  # max ‖Δ_i‖ of the first round, the unit of later ones
    wanted: list[int] = field(default_factory=list)  # clusters that wait for a round with every member
    alpha: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))  # (m, m), of the last round that all clients shared
    shared: bool = True  # whether alpha is of this round


@dataclass
class CFL(Protocol):
    """Recursive bipartition of the clients once federated learning has become stationary."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round: none, permutation, signed-permutation, rotation or haar"""
    criterion: str = "relative"
    """split test: relative (scale-free: eps1 as a share of max ‖Δ‖, and evidence) or absolute (eps1 and eps2 are norms)"""
    eps1: float = 0.5
    """a cluster is stationary when ‖mean Δ‖ is below this"""
    eps2: float = 0.6
    """absolute criterion: and its clients are not content when max ‖Δ‖ is above this"""
    evidence: float = 0.4
    """relative criterion: and the better half h has (|h| − 1)·(α_intra^min − α_cross^max)·max ‖Δ‖ / its first-round value above this"""
    gamma_max: float = 0.5
    """accept a split only if γ_max < sqrt((1 − α_cross^max) / 2), in [0, 1)"""
    min_size: int = 3
    """clusters with fewer members are not split"""
    average: str = "uniform"
    """mean over clients: uniform (Algorithm 5) or weighted by |D_i| (Algorithm 2)"""

    name: ClassVar[str] = "cfl"

    def serve(self, net: Network, run: Run) -> State:
        """Algorithm 5, "Server does"."""
        m = len(net.clients)
        state = State([0] * m, Outbox.start(m, fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            asked = self._invited(net, state, t)
            got = net.gather(Trainee.train, state.outbox.letter(asked), to=asked)
            state.outbox.delivered(got.ids)
            means: list[torch.Tensor | None] = []
            looks: list[Look] = []
            for c, members in enumerate(clusters_of(state.labels)):
                came = [k for k, i in enumerate(got.ids) if state.labels[i] == c]
                if not came:
                    means.append(None)
                    continue
                delta, size = got.rows.delta.values, got.rows.size
                means.append(mean_c := mean_row(delta, came, None if size is None else size.values[came]))
                looks.append(self._look(state, c, members, [got.ids[k] for k in came], gram(delta, came), mean_c))
            _post(state, got.step, means)
            splits = [look for look in looks if look.split]
            for look in splits:
                _divide(state, look)
            self._note(run, state, looks)
        deliver(net, run, state)
        return state

    def place(self, net: Network, state: Any, to: Sequence[int]) -> list[int]:
        """Needs the parameter tree."""
        raise UsageError("CFL places no newcomers yet")

    def _look(self, state: State, c: int, members: list[int], came: list[int], inner: torch.Tensor, mean_c: torch.Tensor) -> Look:
        """The split test of one cluster, lines 16–21: ε1, ε2, bipartition, γ_max. A cluster waits for a reply of every member."""
        norms, alpha = gram_norms(inner), cosine(inner)
        look = Look(c, members, mean_norm(mean_c, norms, len(members)), float(norms.max()), alpha)
        state.scale = state.scale or look.max_norm
        state.shared = len(members) == len(state.labels) == len(came)
        if state.shared:
            state.alpha = alpha.cpu()
        state.wanted = [w for w in state.wanted if w != c]
        if len(members) < self.min_size or len(came) < 2:
            return look
        halves = bipartition(alpha.cpu().numpy())
        look.gap, weighed = evidence(alpha.cpu().numpy(), halves)
        look.evidence = weighed * look.max_norm / state.scale if state.scale else 0.0
        if not self._incongruent(look, look.evidence):
            return look
        if len(came) < len(members):
            state.wanted.append(c)
        elif self.gamma_max < largest_noise(halves.cross_max):
            look.split = ([members[k] for k in halves.first], [members[k] for k in halves.second])
        return look

    def _incongruent(self, look: Look, weighed: float) -> bool:
        """Stationary, ‖Δ_c‖ < ε1, while the clients still pull: max ‖Δ_i‖ > ε2 (eq. 32, 33), or the scale-free form of it (ours).

        In the scale-free form, two of many noisy updates align by chance while larger groups do not, so a half counts by its size;
        and pure clusters' updates shrink below those of the first round while incongruent clients' do not.
        """
        if self.criterion == "absolute":
            return look.mean_norm < self.eps1 and look.max_norm > self.eps2
        return look.mean_norm < self.eps1 * look.max_norm and weighed > self.evidence

    def _invited(self, net: Network, state: State, t: int) -> list[int]:
        """A share of each cluster; all of a cluster that only waits for complete replies to be split."""
        shares = [1.0 if c in state.wanted else self.participation for c in range(1 + max(state.labels))]
        return sorted(i for c, members in enumerate(clusters_of(state.labels)) for i in invite(net, members, shares[c], t, c))

    def _note(self, run: Run, state: State, looks: list[Look]) -> None:
        splits = [[look.members, *look.split] for look in looks if look.split]
        run.note(splits=splits, looks=[look.line() for look in looks], wanted=list(state.wanted))

    @property
    def weighted(self) -> bool:
        """Whether clients tell |D_i|: only for the weighted average."""
        return self.average == "weighted"

    def check(self, clients: int) -> None:
        """Adds the split test's own fields."""
        super().check(clients)
        for what, value, known in (
            ("criterion", self.criterion, ("relative", "absolute")),
            ("average", self.average, ("uniform", "weighted")),
        ):
            if value not in known:
                raise UsageError(f"unknown {what} {value!r}: choose one of {', '.join(known)}")
        if not (self.eps1 > 0 and self.eps2 > 0 and self.evidence > 0 and 0 <= self.gamma_max < 1 and self.min_size >= 2):
            raise UsageError("eps1, eps2 and evidence are positive, gamma_max lies in [0, 1) and min_size is at least 2")

    def sees(self) -> list[str]:
        """What stays visible under every mask."""
        counts = [] if not self.weighted else ["each client's number of samples"]
        return [
            *counts,
            "norms and pairwise cosines of the updates of each round",
            "the clusters, when they split, and each client's cluster",
        ]

    def observe(self, federation: Federation, client: Any, state: Any, accuracy: NDArray[np.float64]) -> Line:
        """Adds the true separation gap g (eq. 28) while all clients share one model."""
        line = super().observe(federation, client, state, accuracy)
        known = state.shared and len(state.alpha) and federation.truth is not None
        return {**line, "gap": separation_gap(state.alpha.numpy(), federation.truth) if known and federation.truth else None}


@dataclass
class Look:
    """One cluster in one round, as the server sees it."""

    cluster: int
    members: list[int]
    mean_norm: float
    max_norm: float
    alpha: torch.Tensor
    gap: float | None = None
    evidence: float | None = None
    split: tuple[list[int], list[int]] | None = None

    def line(self) -> Line:
        """For the history."""
        known = {name: getattr(self, name) for name in ("cluster", "mean_norm", "max_norm", "gap", "evidence")}
        return {**known, "members": len(self.members), "split": self.split is not None}


def _post(state: State, step: int, means: Sequence[torch.Tensor | None]) -> None:
    """Δ_c to every member of c; a cluster nobody replied from stays where it is."""
    known = next((v for v in means if v is not None), None)
    if known is not None:
        state.outbox.post(step, torch.stack([torch.zeros_like(known) if v is None else v for v in means]), state.labels)


def _divide(state: State, look: Look) -> None:
    """Both halves go on from the parent's θ (and inherit its mean); the second becomes a new cluster."""
    assert look.split is not None
    new = 1 + max(state.labels)
    for i in look.split[1]:
        state.labels[i] = new
