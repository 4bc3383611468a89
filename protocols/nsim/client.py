"""Clients of NSIM, which train alone, send one layer of their model, and then average in clusters.

The layer leaves unmasked (Pacheco et al. 2021). Its noise is on how far it moved from its first
weights.

Clients keep what they learned alone until an average is for them, and that one counts from θ_0. So
clients without a cluster go on as they are, one that missed the sum starts from the average, and
independent starts average too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.protocols import authoring as fl

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel


# The paper says both "last layer" and "last hidden layer"; its results are of the hidden one.
LAYERS = ("hidden", "last")
# Weights are comparable only under a common start, which is not in the paper; "independent" is the
# paper's wording.
INITIALIZATIONS = ("common", "independent")


@dataclass(frozen=True)
class LayerSlice:
    """The position of a dense layer in the flat vector of a model.

    Args:
        name: of the layer.
        first: index of its first weight; weights (outputs, inputs) are followed by the bias.
        outputs: numbers of its output.
        inputs: numbers of its input.
        bias: whether it has a bias (outputs,).
    """

    name: str
    first: int
    outputs: int
    inputs: int
    bias: bool

    @property
    def size(self) -> int:
        """Return q, the numbers of its weights and bias."""
        return self.outputs * (self.inputs + self.bias)

    def rows(self, models: torch.Tensor) -> torch.Tensor:
        """Return the layer of each model.

        Args:
            models: (m, d).

        Returns:
            (m, q), a view.
        """
        return models[:, self.first : self.first + self.size]

    def weights(self, rows: torch.Tensor) -> NDArray[np.float64]:
        """Return the weights of layers without their biases, for CKA and CCA.

        Args:
            rows: (m, q).

        Returns:
            (m, inputs, outputs); inputs are the examples (not in the paper).
        """
        without_bias = rows[:, : self.outputs * self.inputs]
        flat = without_bias.double().cpu().numpy()
        matrices = flat.reshape(-1, self.outputs, self.inputs)
        return np.asarray(matrices.swapaxes(1, 2))


def find_layer(flat: FlatModel, which: str) -> LayerSlice:
    """Return the layer that clients send.

    Args:
        flat: the network.
        which: "last", the last dense layer, or "hidden", the one before it, in the order in which
            the module declares them.

    Raises:
        UsageError: another word, or a model with too few dense layers.
    """
    if which not in LAYERS:
        raise fl.unknown("layer", which, LAYERS)
    first_index = {}
    index = 0
    for name, shape in flat.shapes.items():
        first_index[name] = index
        index += shape.numel()
    # frozen layers are not in the vector
    dense = []
    for name, module in flat.module.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in first_index:
            dense.append(name)
    from_end = 1 if which == "last" else 2
    if len(dense) < from_end:
        raise fl.UsageError(
            f"the model has {len(dense)} dense layer(s) that train, and layer={which!r} needs "
            f"{from_end}: use another model"
        )
    name = dense[-from_end]
    weight = f"{name}.weight"
    outputs, inputs = flat.shapes[weight]
    return LayerSlice(
        name=name,
        first=first_index[weight],
        outputs=outputs,
        inputs=inputs,
        bias=f"{name}.bias" in first_index,
    )


def initial_models(
    cohort: fl.LocalTrainer, start: str, positions: Sequence[int] | None = None
) -> torch.Tensor:
    """Return the weights that clients begin with.

    Args:
        cohort: the clients.
        start: "common" or "independent".
        positions: of the clients; None means all of the cohort.

    Returns:
        (m, d)
    """
    clients = range(len(cohort.ids)) if positions is None else positions
    if start == "common":
        return cohort.start.repeat(len(clients), 1)
    return torch.stack([cohort.own_start(k) for k in clients])


def check_layer_mask(mask: str) -> None:
    """Raise UsageError for any mask of the layers."""
    if mask != "none":
        raise fl.UsageError(
            f"layer_mask = {mask!r}: the network that predicts similarity reads the weights "
            "themselves, so under a mask it"
            " would be fed noise; leave it at none (mask hides the averages)"
        )


def server_view(layer: str, start: str, noisy: str, sizes: bool) -> list[str]:
    """Return what a server that trains synthetic users sees of clients, one phrase each.

    `benchmarks.papers.nsim.masks` measures what layers without noise reveal.

    Args:
        layer: "hidden" or "last".
        start: "common" or "independent".
        noisy: the unit that noise protects; "" without noise.
        sizes: whether clients send their numbers of samples.
    """
    name = "last hidden" if layer == "hidden" else "last"
    protection = {
        "": "in the clear",
        "client": "clipped and with noise, unmasked",
        "example": "unmasked, as training with noise left it",
    }[noisy]
    amount = "something" if noisy else "much"
    if start == "common":
        rest_of_model = (
            f"{amount} of the rest of that model, whatever the mask: training starts from what the "
            "server knows, and synthetic users' does too"
        )
    else:
        rest_of_model = (
            "each client's first weights, from the seed: they tell where a permutation of the "
            "first sum has put most coordinates"
        )
    views = [
        f"each client's {name} layer after training alone, {protection}",
        rest_of_model,
        "the predicted similarity of all pairs of clients' data, the clusters, and each client's "
        "cluster",
    ]
    if sizes:
        views.append(
            fl.OfPlainSums("each client's number of samples (the plain sum reads every reply)")
        )
    return views


@dataclass(frozen=True, eq=False)
class ClientLayer:
    """Client to server: one layer of the client's model."""

    # (b, q) weights and bias of the layer; with noise, its initial values plus their clipped and
    # noised change
    layer: Annotated[fl.Rows, fl.Real(("layer",), squared=True)]


class NSIMClient(fl.LocalFirstClient):
    """Clients that train alone, send one layer, and then contribute to averages since θ_0.

    Args:
        cohort: the clients' data and local training.
        training: local training between two averages.
        pipeline: the stages between a client's update and the wire.
        weighted: whether averages are weighted by |D_i|.
        layer: the layer that leaves unmasked.
        start: "common", or "independent": then each client begins with weights of its own.
    """

    clear: ClassVar[bool] = True  # the layer leaves without a mask

    def __init__(
        self,
        cohort: fl.LocalTrainer,
        training: fl.LocalTraining,
        pipeline: fl.Pipeline,
        weighted: bool,
        layer: LayerSlice,
        start: str,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self._layer = layer
        self._began = start
        if start != "common":
            # each client has a row of its own
            positions = tuple(range(len(cohort.ids)))
            self.models = fl.Rows(initial_models(cohort, start), positions)

    @fl.answers(fl.GATHER, unmasked=("layer",))
    def send_model(self, context: fl.CallContext, query: fl.Empty) -> ClientLayer:
        """Return the layer of θ_i; no mask can hide it, since a trained network reads it.

        The reply is the same whenever the client is asked. Where the unit of privacy is the client,
        the layer's change from its initial values is clipped and noised (not in the paper): these
        values follow from the public configuration. Where it is the example, training has added the
        noise.

        Raises:
            PolicyError: the client no longer holds the model that it trained alone.
        """
        self.check_alone(context, "send_model")
        models = self.models.select(context.positions).values
        rows = self._layer.rows(models)
        noise = context.noise
        if noise is None or not noise.noise or noise.unit == "example":
            # a copy, since training alone changes the models in place
            return ClientLayer(fl.Rows(rows.clone()))
        first_models = initial_models(self.cohort, self._began, context.positions)
        initial = self._layer.rows(first_models)
        noisy_change = self.release_training(context, rows - initial)
        noisy_layer = context.postprocess(lambda change: initial + change, noisy_change)
        return ClientLayer(fl.Rows(noisy_layer))

    @fl.answers(fl.SUM, through=("delta",), fresh=True, unmasked=("size",))
    def pool(self, context: fl.CallContext, query: fl.Empty) -> fl.Update:
        """Return n_i·P(θ_i − θ_0) and n_i, for the first average of the client's cluster.

        Clipped updates are not weighted.

        Raises:
            PolicyError: the client no longer holds the model that it trained alone.
        """
        self.check_alone(context, "pool")
        update = self.displaced(context.positions)
        if self._pipeline.clips:
            return update
        sizes = self._sizes(context)
        table = update.delta.table
        # in place: there is one (m, d) matrix at most
        table.mul_(sizes.table.to(table)[:, None])
        return fl.Update(update.delta, sizes)
