"""Which clients are of one cluster, and which records a cluster's model was trained on.

A cluster says what its members' data are like, so whoever knows a client's cluster profiles the
client (Zhang et al. 2025, MingledPie, NDSS). Where a protocol tells its server the clusters, they
are taken; else clients are compared by the cosines of their updates, which a mask keeps.

A cluster's model is an average over its members, and the fewer they are the more of each record
stays in it (Jung et al. 2025, arXiv 2503.09414). Secure sums hide no average. The attack asks which
records of a cluster's clients it was trained on, by how small their loss is under its last model
(Yeom et al. 2018). Further scores are those of the clusters of the fewest and the most clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from securecluster.attacks import base
from securecluster.attacks.arrays import Array, as_array, sample_keys
from securecluster.attacks.base import (
    MASK,
    SUMS,
    TRUE_CLUSTERS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Truth,
    View,
)
from securecluster.attacks.client_models import CHOICE, candidate_losses, initial_model
from securecluster.attacks.cluster_property import cluster_models
from securecluster.attacks.subspaces import Detection, scored_answers
from securecluster.attacks.views import observed_updates
from securecluster.core.lazy_torch import torch

FEWEST = 4  # clients that are compared
MEMBERS = "members"  # detail of a guess: the clients of each cluster
PREFERENCES = "Zhang et al. 2025, MingledPie, NDSS"


class SameCluster(Detection):
    """AUC of the question which other clients are of a client's true cluster."""

    metric = "AUC of who is in the same cluster"

    def answers(self, guess: Guess, truth: Truth, client: int) -> Array:
        """Return for each other client of the guess True if it is of the same true cluster."""
        assert truth.clusters is not None
        own = truth.clusters[client]
        others = [other for other in guess.values if other != client]
        return np.asarray([truth.clusters[other] == own for other in others])


class ClusterIdentity(Attack):
    """Clients of one true cluster, by the clusters that the parties know, or by updates."""

    name = "cluster-identity"
    learns = "which clients are in the same cluster"
    harm = Harm.GROUPS
    source = PREFERENCES
    needs = f"clusters that the parties know, or single updates of {FEWEST} clients"
    scorer = SameCluster()
    requires = (TRUE_CLUSTERS,)
    reads = ("delta",)
    hidden_by = (SUMS,)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if len(set(view.clusters.values())) > 1:
            return None
        if len(_first_updates(view, knowledge)) < FEWEST:
            return (
                "not applicable: the parties know no clusters, and fewer than "
                f"{FEWEST} clients' single updates were observed"
            )
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return by client how alike each other one is, (clients - 1,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        rows = _first_updates(view, knowledge)
        if len(set(view.clusters.values())) > 1:
            number = max(view.clusters.values()) + 1
            rows = {client: np.eye(number)[label] for client, label in view.clusters.items()}
        return Guess("same cluster", similarities(rows))


def similarities(rows: Mapping[int, Array]) -> dict[int, Array]:
    """Return by client the cosines of its row with those of all others, (n - 1,).

    Args:
        rows: by client, (d,).
    """
    table = np.stack(list(rows.values()))
    lengths = np.linalg.norm(table, axis=1, keepdims=True)
    units = table / np.where(lengths > 0, lengths, 1.0)
    cosines = units @ units.T
    return {client: np.delete(cosines[k], k) for k, client in enumerate(rows)}


class ClusterMembership(Detection):
    """AUC of the question which records of a cluster's clients are trained on, or held out.

    Records of other clusters are no question: their loss tells the cluster, and no membership.
    """

    metric = "AUC of membership in a cluster"

    def why_not(self, guess: Guess, truth: Truth) -> str | None:
        """Return that no candidate is of a client of these clusters, where that is so."""
        if self._tables(guess, truth):
            return None
        return "the candidates are of no client of these clusters"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the score of each record, and whether it is trained on, (records, 2)."""
        return np.concatenate(self._tables(guess, truth))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same with the answers about each cluster in random order."""
        tables = self._tables(guess, truth)
        for table in tables:
            table[:, 1] = draw.permutation(table[:, 1])
        return np.concatenate(tables)

    def chosen(self, guess: Guess) -> list[int]:
        """Return the clusters that are asked about: all.

        Args:
            guess: scores by cluster.
        """
        return list(guess.values)

    def _tables(self, guess: Guess, truth: Truth) -> list[Array]:
        """Return by cluster scores and answers, (records, 2)."""
        tables = []
        for cluster in self.chosen(guess):
            answered = partial(self._answered, guess, truth, cluster)
            own, answers = guess.once(truth, ("records of a cluster", cluster), answered)
            if own.any():
                tables.append(scored_answers(guess.values[cluster][own], answers[own]))
        return tables

    def _answered(self, guess: Guess, truth: Truth, cluster: int) -> tuple[Array, Array]:
        """Return which candidates clients of a cluster hold, and which they train on."""
        shards = [truth.federation.shards[i] for i in guess.details[MEMBERS][cluster]]
        candidates = np.asarray(guess.details["candidates"])
        keys = sample_keys(candidates.astype(np.asarray(shards[0].x).dtype))
        trained = {key for shard in shards for key in sample_keys(np.asarray(shard.x))}
        held_out = {key for shard in shards for key in sample_keys(np.asarray(shard.x_test))}
        own = np.asarray([key in trained or key in held_out for key in keys], dtype=bool)
        return own, np.asarray([key in trained for key in keys], dtype=bool)


class OfOneSize(ClusterMembership):
    """The same of the clusters of one size alone.

    Args:
        smallest: True for those of the fewest clients; False for those of the most.
    """

    def __init__(self, smallest: bool) -> None:
        self._size_of = min if smallest else max
        self.metric = (
            f"{ClusterMembership.metric} of the {'fewest' if smallest else 'most'} clients"
        )

    def why_not(self, guess: Guess, truth: Truth) -> str | None:
        """Return that all clusters are of one size, where that is so."""
        if len({len(clients) for clients in guess.details[MEMBERS].values()}) == 1:
            return "all clusters have as many clients"
        return super().why_not(guess, truth)

    def chosen(self, guess: Guess) -> list[int]:
        """Return the clusters of this size."""
        sizes = {cluster: len(clients) for cluster, clients in guess.details[MEMBERS].items()}
        return [cluster for cluster, size in sizes.items() if size == self._size_of(sizes.values())]


class ClusterModelMembership(Attack):
    """Membership of candidates in the data of a cluster, by the losses of clusters' models."""

    name = "membership-cluster-model"
    learns = "whether a record is in the data of a cluster's clients"
    harm = Harm.MEMBERS
    source = "Jung et al. 2025, Mitigating Membership Inference Vulnerability, arXiv 2503.09414"
    needs = (
        "the models of clusters, without a mask, who is in each, and candidate samples, of which "
        "some may be clients' own"
    )
    scorer = ClusterMembership()
    further = (OfOneSize(smallest=True), OfOneSize(smallest=False))
    reads = ("delta",)
    hidden_by = (MASK,)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.samples is None:
            return base.NO_SAMPLES
        if knowledge.mask != "none":
            return "not applicable: no model can be evaluated under a mask"
        if not _models_and_members(view, knowledge):
            return "not applicable: no model of a cluster was observed, or not who is in it"
        knowledge.expect()
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return minus the loss of each candidate by cluster, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        scores = {}
        members = {}
        for cluster, (model, clients) in _models_and_members(view, knowledge).items():
            scores[cluster] = -candidate_losses(model, knowledge)
            members[cluster] = clients
        details = {"candidates": knowledge.inputs, MEMBERS: members}
        return Guess("membership in a cluster", scores, details)


def _models_and_members(
    view: View, knowledge: Knowledge
) -> dict[int, tuple[torch.Tensor, list[int]]]:
    """Return by cluster its last model, (d,), and the clients that are in it."""
    models = cluster_models(view, knowledge)
    labels = dict(view.clusters)
    chosen = _chosen_models(view, knowledge)
    if chosen:
        models, labels = chosen
    found = {}
    for cluster, model in sorted(models.items()):
        clients = sorted(client for client, label in labels.items() if label == cluster)
        if clients:
            found[cluster] = (model, clients)
    return found


def _chosen_models(
    view: View, knowledge: Knowledge
) -> tuple[dict[int, torch.Tensor], dict[int, int]] | None:
    """Return the last models of the last start, by number, and by client the one that it chose.

    None where clients choose among no models, or nobody observes what they choose.
    """
    models: dict[int, torch.Tensor] = {}
    choices: dict[int, int] = {}
    start = 0
    for message in view.messages():
        content: Any = message.content
        sender = message.sender.index
        if message.method == CHOICE and sender is not None and hasattr(content, "model"):
            choices[sender] = int(content.model.values[0])
        if not hasattr(content, "models"):
            continue
        if content.start != start:
            start, models = int(content.start), {}
        for row in content.means.picks[0] if content.absolute else ():
            number = int(content.models.table[row])
            first = initial_model(knowledge, number, start)
            models[number] = first + content.means.table[row].to(first)
    return (models, choices) if choices else None


def _first_updates(view: View, knowledge: Knowledge) -> dict[int, Array]:
    """Return by client the first update that it sent, beyond the mean of all, (width,)."""
    first: dict[int, Array] = {}
    for update in observed_updates(view, knowledge):
        if update.sender.index is not None:
            first.setdefault(update.sender.index, as_array(update.row))
    common = np.mean(list(first.values()), axis=0) if first else 0.0
    return {client: row - common for client, row in sorted(first.items())}
