"""Property inference from cluster memberships and public knowledge.

Clustering methods reveal to the server which clients share a cluster. Clients of a cluster have
similar data, so knowledge about one member, or about the cluster's model, carries over to all:

- If the property of some members is known, because it is public or because they collude, the most
  common one is guessed for the rest of the cluster.
- If no member's property is known, the cluster's model is evaluated on public samples, provided
  that it can be read. This also works under secure sums.

Clients whose property is known are not guessed. Guessing the most common property for every client
needs no clusters, so an attack must do better than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import (
    NO_LABELS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.attacks.client_models import candidate_losses
from securecluster.core.lazy_torch import torch
from securecluster.data.federation import Shard
from securecluster.data.transforms import TURNS
from securecluster.errors import UsageError

MAJORITY_CLASS = "majority class"
ROTATION = "rotation"


class Property(ABC):
    """A whole number that describes a client's data."""

    def why_not(self, knowledge: Knowledge) -> str | None:
        """Return why clients have no such property, as "not applicable: …"; None if they have.

        Args:
            knowledge: of the configuration.
        """
        return None

    @abstractmethod
    def of_client(self, truth: Truth, client: int) -> int:
        """Return a client's property.

        Args:
            truth: of the run.
            client: its number.
        """

    @abstractmethod
    def of_data(self, shard: Shard) -> int | None:
        """Return the property of a colluding client; None if its data do not tell it.

        Args:
            shard: its data.
        """

    @abstractmethod
    def of_model(self, model: torch.Tensor, knowledge: Knowledge) -> int:
        """Return the property that a model was most likely trained with.

        Args:
            model: (d,).
            knowledge: with public samples.
        """


class MajorityClass(Property):
    """The class that most of a client's samples have."""

    def why_not(self, knowledge: Knowledge) -> str | None:
        """Return that the data have no classes, where that is so.

        Args:
            knowledge: of the configuration.
        """
        if not knowledge.has_labels:
            return NO_LABELS
        return None

    def of_client(self, truth: Truth, client: int) -> int:
        """Return the class with the largest count.

        Args:
            truth: of the run.
            client: its number.
        """
        return int(truth.label_counts(client).argmax())

    def of_data(self, shard: Shard) -> int | None:
        """Return the class with the largest count.

        Args:
            shard: the client's data.
        """
        return int(np.bincount(np.asarray(shard.y)).argmax())

    def of_model(self, model: torch.Tensor, knowledge: Knowledge) -> int:
        """Return the class with the largest mean prediction on public samples.

        Args:
            model: (d,).
            knowledge: with public samples.
        """
        x = torch.as_tensor(knowledge.inputs).to(model)
        parameters = knowledge.parameters(model)
        with torch.no_grad():
            outputs = knowledge.network.call(parameters, x)
        # a model trained on unbalanced classes shifts its predictions towards the frequent ones
        mean_prediction = outputs.double().softmax(-1).mean(0)
        return int(mean_prediction.argmax())


class Rotation(Property):
    """Number of quarter turns of a client's images, in the scenario "rotation".

    Public samples are not turned.
    """

    def why_not(self, knowledge: Knowledge) -> str | None:
        """Return that samples are no square images, where that is so.

        Args:
            knowledge: of the configuration.
        """
        shape = tuple(knowledge.config["shape"])
        if len(shape) < 2 or shape[-1] != shape[-2]:
            return "not applicable: the clients' samples are no square images"
        return None

    def of_client(self, truth: Truth, client: int) -> int:
        """Return the quarter turns of a client's true cluster.

        Args:
            truth: of the run.
            client: its number.

        Raises:
            UsageError: the federation is of another scenario.
        """
        if truth.federation.scenario != ROTATION or truth.clusters is None:
            raise UsageError(
                f"clients of the scenario {truth.federation.scenario!r} have no rotation: ask for "
                'another property, or simulate the scenario "rotation"'
            )
        # the scenario's angles depend on its number of clusters
        turns = TURNS[max(truth.clusters) + 1]
        return int(turns[truth.clusters[client]])

    def of_data(self, shard: Shard) -> int | None:
        """Return None: a client's own images do not say that they are turned.

        Args:
            shard: the client's data.
        """
        return None

    def of_model(self, model: torch.Tensor, knowledge: Knowledge) -> int:
        """Return the turns of public samples with which a model has the least mean loss.

        Args:
            model: (d,).
            knowledge: with public samples.
        """
        x = knowledge.inputs
        losses = []
        for turns in range(4):
            # torch takes no arrays with negative strides, which rot90 returns: hence the copy
            turned = np.rot90(x, turns, axes=(-2, -1)).copy()
            loss = candidate_losses(model, knowledge, turned).mean()
            losses.append(loss)
        return int(np.argmin(losses))


PROPERTIES: dict[str, Property] = {MAJORITY_CLASS: MajorityClass(), ROTATION: Rotation()}


class PropertiesFound(Scorer):
    """Share of clients whose property is guessed.

    The negative control guesses for each client what was guessed for a random one, as if labels
    were permuted, or the commonest property for everybody, whichever is right more often.
    """

    metric = "share of clients whose property is found"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each right guess and 0 for each wrong one, (n,).

        Args:
            guess: properties by client; its quantity is the name of the property.
            truth: of the run.
        """
        true = self._true(guess, truth)
        return np.asarray(self._guessed(guess) == true, dtype=float)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for the better guess that needs no clusters.

        Args:
            guess: properties by client.
            truth: of the run.
            draw: of the permutation.
        """
        true = self._true(guess, truth)
        permuted = draw.permutation(self._guessed(guess)) == true
        commonest = true == _commonest(true.tolist())
        return np.asarray(max(permuted, commonest, key=np.sum), dtype=float)

    def _guessed(self, guess: Guess) -> Array:
        return np.asarray(guess.listed)

    def _true(self, guess: Guess, truth: Truth) -> Array:
        described = PROPERTIES[guess.quantity]
        properties = [described.of_client(truth, client) for client in guess.values]
        return np.asarray(properties)


class ClusterProperty(Attack):
    """A property of each client, from its cluster.

    Args:
        described: name of the property, in `PROPERTIES`.
        public: by client, properties that are known to the public.
    """

    name = "cluster-property"
    learns = "what is common to the data of the clients of a cluster"
    harm = Harm.CONTENTS
    source = (
        "Kim et al. 2023, Exploring Clustered Federated Learning's Vulnerability against Property "
        "Inference Attack"
    )
    needs = (
        "the clients' clusters; and clients whose property is known, or public samples and "
        "clusters' models without a mask"
    )
    scorer = PropertiesFound()

    def __init__(
        self, described: str = MAJORITY_CLASS, public: Mapping[int, int] | None = None
    ) -> None:
        self.described = described
        self.public = dict(public or {})

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        reason = PROPERTIES[self.described].why_not(knowledge)
        if reason is not None:
            return reason
        clusters = view.clusters
        if not clusters:
            return "not applicable: the parties do not know which clients are in a cluster"
        if len(set(clusters.values())) == 1:
            return "not applicable: all clients are in one cluster"
        properties = self._known(knowledge)
        if not set(clusters) - set(properties):
            return "not applicable: the property of every client is known"
        if not properties and not self._by_model(view, knowledge):
            return (
                "not applicable: nothing is known of a client or of a cluster's model; models can "
                "be read without a mask, and evaluated with public samples"
            )
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed property by client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        known_properties = self._known(knowledge)
        of_cluster = self._by_model(view, knowledge)
        # a member's own property is better evidence than the model's, which it replaces
        members: dict[int, list[int]] = {}
        for client, cluster in view.clusters.items():
            if client in known_properties:
                properties = members.setdefault(cluster, [])
                properties.append(known_properties[client])
        for cluster, properties in members.items():
            of_cluster[cluster] = _commonest(properties)
        # fallback for clusters about which nothing is known
        usual = _commonest(known_properties.values() or of_cluster.values())
        guesses = {}
        for client, cluster in view.clusters.items():
            if client not in known_properties:
                guesses[client] = of_cluster.get(cluster, usual)
        return Guess(self.described, guesses, {"clusters": dict(view.clusters)})

    def _known(self, knowledge: Knowledge) -> dict[int, int]:
        """Return the properties of clients that are public or collude."""
        properties = dict(self.public)
        for client, colluder in knowledge.colluders.items():
            colluders_property = PROPERTIES[self.described].of_data(colluder.shard)
            if colluders_property is not None:
                properties[client] = colluders_property
        return properties

    def _by_model(self, view: View, knowledge: Knowledge) -> dict[int, int]:
        """Return the property by cluster, where its model can be read."""
        if knowledge.samples is None:
            return {}
        by_model = {}
        for cluster, model in cluster_models(view, knowledge).items():
            by_model[cluster] = PROPERTIES[self.described].of_model(model, knowledge)
        return by_model


def cluster_models(view: View, knowledge: Knowledge) -> dict[int, torch.Tensor]:
    """Return the last model (d,) of each cluster that the view shows without a mask.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    if knowledge.mask != "none":
        return {}
    models: dict[int, torch.Tensor] = {}
    held: dict[int, torch.Tensor] = {}  # by client
    for message in view.messages():
        content: Any = message.content
        receiver = message.receiver
        client = receiver.index
        if receiver.kind != "client" or client is None or client not in view.clusters:
            continue
        cluster = view.clusters[client]
        sent = getattr(content, "model", None)
        # apps of others send models themselves
        if sent is not None and sent.values.shape[1:] == knowledge.initial.shape:
            models[cluster] = sent.row(0)
            continue
        absolute = getattr(content, "absolute", None)
        # IFCA's averages are of several models at once
        if absolute is None or hasattr(content, "models"):
            continue
        # moves between rounds come where averages are masked, and add up where the mask is undone
        if not absolute and not knowledge.unmasked:
            continue
        # an absolute message holds displacements from θ_0; the last one is the newest model
        chosen = list(content.means.picks[0])
        rows = content.means.table[chosen].to(knowledge.initial)
        if len(rows) and rows.shape[-1] == knowledge.dimension:
            begin = knowledge.initial if absolute else held.get(client, knowledge.initial)
            model = begin + (rows[-1] if absolute else rows.sum(0))
            models[cluster] = held[client] = model
    return models


def _commonest(properties: Iterable[int]) -> int:
    """Return the commonest property, and the smallest of several."""
    counts = Counter(properties)
    # ties are broken by value, so that a guess does not depend on the order of clients
    return min(counts, key=lambda value: (-counts[value], value))
