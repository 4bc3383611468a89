"""Records of clients, by a server that sends a crafted model through their own endpoints.

Every unit of the first layer gets the same weights γv and a threshold of its own, so that a record
x activates the units whose threshold lies below ⟨v, x⟩; all units have the same weights into the
next layer, so that a record moves each unit that it activates alike. Units in the order of their
thresholds then differ by the records between two of them: one record alone there is

    x = (ΔW_k − ΔW_{k+1}) / (Δb_k − Δb_{k+1})

(Fowl et al. 2022, Robbing the Fed; the imprint of LOKI, Zhao et al. 2024, and of ARES, Gong et al.
2026, which reach larger batches by further means). Nothing tells a client that the model is
crafted: it is an average like any other. A sum of updates is as good as a single one, where few
records share a gap; a clip scales numerator and denominator alike. Noise covers both. A client's
mask undoes the model, which the server cannot craft under a seed that it lacks.

Clients of one secure sum must have the same model (`tests/attacks/test_inconsistent_models.py`), so
LOKI's way of giving each client units of its own ends the run, and the units are shared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from scipy.spatial.distance import cdist
from scipy.special import ndtri

from securecluster.attacks.arrays import Array, as_array, flat_rows
from securecluster.attacks.base import (
    MASK,
    NO_SAMPLES,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Response
from securecluster.protocols.common.averages.averaging import SumClient
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.protocols.common.client import UpdateClient
from securecluster.protocols.registry import protocol_class
from securecluster.runtime.aggregators import Exchange, Plain, Total

FIRST_ROUND = 1
LAYERS = 4  # tensors of a perceptron with one hidden layer
GAIN = 0.3  # γ, which keeps outputs near to those of the last biases
SHARE = 0.1  # of γ, the size of the next layer's weights: no step of training moves a threshold far
SMALLEST = 1e-7  # relative difference of two biases that is not rounding
TOLERANCE = 0.05  # relative error of a record that counts as read
Server = Callable[[ClusteringProtocol, Any], None]


class RecordsRead(Scorer):
    """Share of the clients' records that a reconstruction is equal to, to within 5 %."""

    metric = "share of training records read to within 5 %"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each training record that was read, and 0 for each other one, (records,)."""
        return self._read(guess, [shard.x for shard in truth.federation.shards])

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for records that clients hold out, drawn with replacement."""
        held_out = guess.once(
            truth,
            "held-out records that were read",
            lambda: self._read(guess, [shard.x_test for shard in truth.federation.shards]),
        )
        if not len(held_out):
            return np.zeros(1)
        return np.asarray(draw.choice(held_out, len(held_out)))

    def _read(self, guess: Guess, parts: list[Any]) -> Array:
        records = flat_rows(np.concatenate([np.asarray(part) for part in parts]))
        nearest = cdist(records, np.stack(guess.listed)).min(axis=1)
        return np.asarray(nearest <= TOLERANCE * np.linalg.norm(records, axis=1), float)


class CraftedModel(Attack):
    """Records of clients, by the units of a crafted first layer that single ones activate.

    Args:
        clients: run the clients with a server; without them the attack is not applicable.
    """

    name = "crafted-model"
    learns = "records of the clients"
    harm = Harm.RECORDS
    source = (
        "Fowl et al. 2022, Robbing the Fed, arXiv 2110.13057; Zhao et al. 2024, LOKI; Gong et al. "
        "2026, ARES, arXiv 2603.17623"
    )
    needs = (
        "an active server, a network whose first two layers are dense, no mask or a client that "
        "undoes it, and public samples"
    )
    scorer = RecordsRead()
    reads = ("delta",)
    hidden_by = (MASK,)

    def __init__(self, clients: Callable[[Server], None] | None = None) -> None:
        self.clients = clients

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if self.clients is None:
            return "not applicable: the adversary only observed, and sent no models of its own"
        client = protocol_class(knowledge.protocol).client
        if not issubclass(client, SumClient | UpdateClient):
            return "not applicable: clients of this protocol do not train the average of a cluster"
        if layers_of(knowledge) is None:
            return "not applicable: the network is no perceptron with one hidden layer"
        if knowledge.samples is None:
            return NO_SAMPLES
        if knowledge.mask != "none":
            return "not applicable: clients undo a mask that the server does not know"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return records by number, (D,) each, as many as there are gaps with some activity.

        Args:
            view: what the adversary observed, of which nothing is used.
            knowledge: what it knows besides.

        Raises:
            SecureClusterError: the clients refuse what the server asks.
        """
        assert self.clients is not None
        crafted = crafted_model(knowledge)
        updates: list[Array] = []
        self.clients(sends(crafted - knowledge.initial, updates))
        records = [record for update in updates for record in isolated(update, knowledge)]
        if not records:
            records = [np.full(math.prod(knowledge.config["shape"]), np.inf)]
        return Guess("records", dict(enumerate(records)))


class ReadReplies(Plain):
    """Plain sums, each term of which the server keeps.

    Args:
        updates: gets the terms.
    """

    def __init__(self, updates: list[Array]) -> None:
        super().__init__(wide=True)  # no transport adds rows before the server reads them
        self._updates = updates

    def run(self, exchange: Exchange, *call: Any, **named: Any) -> Total:
        """Call the clients, and keep their replies.

        Args:
            exchange: sends calls.
            call: as of `Plain.run`.
            named: as of `Plain.run`.
        """

        def stream(*request: Any) -> Iterator[Response]:
            for response in exchange.stream(*request):
                if response.reply is not None:
                    self._updates.extend(as_array(row) for row in response.reply.delta.values)
                yield response

        return super().run(cast(Exchange, SimpleNamespace(stream=stream)), *call, **named)


def layers_of(knowledge: Knowledge) -> tuple[int, int] | None:
    """Return the inputs D and the units h of a perceptron with one hidden layer; None of another.

    Args:
        knowledge: of the network.
    """
    shapes = [tuple(shape) for shape in knowledge.network.shapes.values()]
    inputs = math.prod(knowledge.config["shape"])
    if not knowledge.has_labels or len(shapes) != LAYERS or len(shapes[0]) != 2:
        return None
    units = shapes[0][0]
    expected = [(units, inputs), (units,), (knowledge.classes, units), (knowledge.classes,)]
    return (inputs, units) if shapes == expected else None


def crafted_model(knowledge: Knowledge) -> torch.Tensor:
    """Return a model, (d,), whose units tell records apart by their activity.

    Args:
        knowledge: with public samples, whose quantiles are the thresholds.
    """
    layers = layers_of(knowledge)
    assert layers is not None
    inputs, units = layers
    direction, thresholds = _imprint(knowledge, inputs, units)
    draw = np.random.default_rng(knowledge.classes)
    outward = GAIN * SHARE * draw.standard_normal(knowledge.classes)
    parts = [
        np.tile(GAIN * direction, (units, 1)),
        -GAIN * thresholds,
        np.tile(outward[:, None], (1, units)),
        np.zeros(knowledge.classes),
    ]
    flat = np.concatenate([part.ravel() for part in parts])
    return torch.as_tensor(flat).to(knowledge.initial)


def isolated(update: Array, knowledge: Knowledge) -> Iterator[Array]:
    """Yield what lies between the thresholds of neighbouring units, (D,) each, as if one record.

    Args:
        update: of a client, or a sum of updates, in any scale, (d,).
        knowledge: of the network.
    """
    layers = layers_of(knowledge)
    assert layers is not None
    inputs, units = layers
    weights = update[: units * inputs].reshape(units, inputs)
    biases = update[units * inputs : units * (inputs + 1)]
    # beyond the highest threshold nothing is active
    above_weights = np.vstack([weights[1:], np.zeros(inputs)])
    above_biases = np.append(biases[1:], 0.0)
    between = biases - above_biases
    smallest = SMALLEST * float(np.abs(biases).max(initial=0.0))
    for row, move in zip(weights - above_weights, between, strict=True):
        if abs(move) > smallest:
            yield row / move


def sends(displacement: torch.Tensor, updates: list[Array]) -> Server:
    """Return a server that posts a displacement from θ_0 as an average, and keeps what comes back.

    Args:
        displacement: (d,).
        updates: gets the updates, one by one where replies are read one by one; else their sum.
    """

    def server(protocol: ClusteringProtocol, net: Any) -> None:
        net.round = FIRST_ROUND
        clients = list(net.clients)
        outbox = PendingUpdates.start(len(clients), fresh=False)
        outbox.post(0, displacement[None], [0] * len(clients))
        query = outbox.message_for(clients)
        if issubclass(protocol.client, UpdateClient):
            rows = net.gather(UpdateClient.train, query, to=clients).rows.delta.values
            updates.extend(as_array(row) for row in rows)
            return
        if net.aggregator.server_reads_replies:
            net.aggregator = ReadReplies(updates)
        sums = net.sum(SumClient.contribute, query, to=clients)
        if not updates:
            updates.extend(as_array(row) for row in sums.rows.delta.table)

    return server


def _imprint(knowledge: Knowledge, inputs: int, units: int) -> tuple[Array, Array]:
    """Return a direction of length 1, (D,), and ascending thresholds along it, (units,)."""
    draw = np.random.default_rng(units)
    direction = draw.standard_normal(inputs)
    direction /= np.linalg.norm(direction)
    along = flat_rows(knowledge.inputs) @ direction
    # of a normal distribution, since few public samples have few quantiles of their own
    quantiles = (np.arange(units) + 0.5) / units
    return direction, along.mean() + along.std() * ndtri(quantiles)
