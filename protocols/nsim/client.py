"""Clients that train alone, hand in one layer of their model in the clear, and then average within
clusters (Pacheco et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError, unknown
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Empty, Rows
from securecluster.privacy.dp.loss_mechanism import noised_rows
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.common.averaging import LocalFirstClient
from securecluster.protocols.common.messages import Update
from securecluster.runtime.endpoint import GATHER, SUM, CallContext, answers
from securecluster.training.local_trainer import LocalTrainer, LocalTraining

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel


LAYERS = ("hidden", "last")
INITIALIZATIONS = ("common", "independent")


@dataclass(frozen=True)
class LayerSlice:
    """A dense layer's weights (outputs, inputs) and bias (outputs,) within the flat vector, in this
    order.
    """

    name: str
    first: int
    outputs: int
    inputs: int
    bias: bool

    @property
    def size(self) -> int:
        """q, the numbers of its weights and bias."""
        return self.outputs * (self.inputs + self.bias)

    def rows(self, models: torch.Tensor) -> torch.Tensor:
        """Of models (m, d): the layer of each, (m, q)."""
        return models[:, self.first : self.first + self.size]

    def weights(self, rows: torch.Tensor) -> NDArray[np.float64]:
        """Of layers (m, q): the weights alone as (m, inputs, outputs), what a kernel compares
        (inputs are its examples: ours).
        """
        flat = rows[:, : self.outputs * self.inputs].double().cpu().numpy()
        return np.asarray(flat.reshape(-1, self.outputs, self.inputs).swapaxes(1, 2))


def find_layer(flat: FlatModel, which: str) -> LayerSlice:
    """The last dense layer of a model ("last"), or the one before it ("hidden"), in the order in
    which the module declares them.

    Raises:
        UsageError: another word, or a model with too few dense layers.
    """
    if which not in LAYERS:
        raise unknown("layer", which, LAYERS)
    slices = dict(
        zip(
            flat.shapes,
            np.cumsum([0, *(s.numel() for s in flat.shapes.values())]).tolist(),
            strict=False,
        )
    )
    dense = [
        name
        for name, part in flat.module.named_modules()
        if isinstance(part, torch.nn.Linear) and f"{name}.weight" in slices
    ]
    place = 1 if which == "last" else 2
    if len(dense) < place:
        raise UsageError(
            f"the model has {len(dense)} dense layer(s) that train, and layer={which!r} needs "
            f"{place}: use another model"
        )
    name = dense[-place]
    outputs, inputs = flat.shapes[f"{name}.weight"]
    return LayerSlice(name, slices[f"{name}.weight"], outputs, inputs, f"{name}.bias" in slices)


def initial_models(
    cohort: LocalTrainer, start: str, ids: Sequence[int] | None = None
) -> torch.Tensor:
    """The weights that each client of a cohort, or of some numbers, begins with, (m, d)."""
    who = cohort.ids if ids is None else ids
    if start == "common":
        return cohort.start.repeat(len(who), 1)
    return torch.stack([cohort.drawn("client", i, "start") for i in who])


def check_layer_mask(mask: str) -> None:
    """Raise UsageError for any mask of the layers."""
    if mask != "none":
        raise UsageError(
            f"layer_mask = {mask!r}: the network that predicts similarity reads the weights "
            "themselves, so under a mask it"
            " would be fed noise; leave it at none (mask hides the averages)"
        )


def server_view(layer: str, start: str, noisy: str, sizes: bool) -> list[str]:
    """What a server that trains synthetic users sees of layers, and makes of them
    (`benchmarks.papers.nsim_masks` measures layers in the clear).

    Args:
        noisy: the unit that noise protects; "" without any.
        sizes: whether clients tell how many samples they hold.
    """
    name = "last hidden" if layer == "hidden" else "last"
    how = {
        "": "in the clear",
        "client": "clipped and with noise, unmasked",
        "example": "unmasked, as training with noise left it",
    }[noisy]
    much = "something" if noisy else "much"
    common = (
        f"{much} of the rest of that model, whatever the mask: training starts from what the "
        "server knows, and synthetic users' does too"
    )
    own = (
        "each client's first weights, from the seed: they tell where a permutation of the first "
        "sum has put most coordinates"
    )
    return [
        f"each client's {name} layer after training alone, {how}",
        common if start == "common" else own,
        "the predicted similarity of all pairs of clients' data, the clusters, and each client's "
        "cluster",
        *["each client's number of samples (the plain sum reads every reply)"] * sizes,
    ]


@dataclass(frozen=True, eq=False)
class ClientLayer:
    """Client to server."""

    # (b, q) weights and bias of one layer, as they are, or moved from the first ones by what was
    # clipped and noised
    layer: Annotated[Rows, Real(("layer",), squared=True)]


class NSIMClient(LocalFirstClient):
    """Clients that train alone, hand in one layer in the clear, and then contribute to means that
    count from θ_0.

    Args:
        layer: which.
        start: "common", or "independent": then a client begins with weights of its own.
    """

    clear: ClassVar[bool] = True

    def __init__(
        self,
        cohort: LocalTrainer,
        training: LocalTraining,
        pipeline: Pipeline,
        weighted: bool,
        layer: LayerSlice,
        start: str,
    ) -> None:
        super().__init__(cohort, training, pipeline, weighted)
        self._layer, self._began = layer, start
        if start != "common":
            self.models = Rows(initial_models(cohort, start), tuple(range(len(cohort.ids))))

    @answers(GATHER, unmasked=("layer",))
    def send_model(self, context: CallContext, query: Empty) -> ClientLayer:
        """The layer of θ_i; no mask can hide it, since a trained network is to read it. Asked
        again, the answer is the same.

        Where the unit of privacy is the client, what it has moved from its first weights, which
        follow from the public configuration, is clipped and noised (ours); where it is the example,
        training has paid for it.
        """
        self.check_alone(context, "send_model")
        rows, guard = (
            self._layer.rows(self.models.select(context.positions).values),
            self._pipeline.guard,
        )
        if guard is None or guard.unit == "example":
            return ClientLayer(Rows(rows.clone()))
        began = self._layer.rows(initial_models(self.cohort, self._began, context.ids))
        return ClientLayer(
            Rows(began + noised_rows(guard, "layer", context.ids, context.step, rows - began))
        )

    @answers(SUM, through=("delta",), fresh=True, unmasked=("size",))
    def pool(self, context: CallContext, query: Empty) -> Update:
        """n_i·P(θ_i − θ_0) and n_i: what a client learned alone, for its cluster's first average.
        Clipped, they count the same.
        """
        self.check_alone(context, "pool")
        found = self.displaced(context.positions)
        if self._pipeline.clips:
            return found
        sizes = self._sizes(context)
        found.delta.table.mul_(sizes.table.to(found.delta.table)[:, None])
        return Update(found.delta, sizes)
