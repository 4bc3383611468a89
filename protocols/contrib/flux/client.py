"""Clients that describe their samples under a joint model, and contribute to averages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from securecluster.protocols import authoring as fl
from securecluster.protocols.contrib.flux.descriptors import (
    REACH,
    REPLACE,
    DescriptorMap,
    latent_layer,
)

torch = fl.torch


Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Descriptor:
    """Client to server: moments of its latent vectors, over all samples and by class."""

    # (b, 2(U + 1), l) [μ_x, σ_x, μ_1 … μ_U, σ_1 … σ_U]
    moments: Annotated[fl.Rows, fl.Real(("moment_groups", "components"), squared=True)]


@dataclass(frozen=True, eq=False)
class FeatureDescriptor:
    """Client to server: moments of its latent vectors, without labels."""

    # (b, kinds, l) [μ_x, σ_x]
    moments: Annotated[fl.Rows, fl.Real(("moment_kinds", "components"), squared=True)]


class DescriptorClient(fl.SharedModelClient):
    """Clients that send a descriptor of their samples once, and then contribute to averages."""

    # set by the protocol
    descriptors: DescriptorMap
    noise_ratio = 1.0  # multiplier of a descriptor over that of training
    _encoder: LatentVectors | None = None

    @fl.answers(fl.GATHER, unmasked=("moments",))
    def describe(self, context: fl.CallContext, query: fl.AverageDeltas) -> Descriptor:
        """Return d after the query's averages: moments of all samples, and of those of each class.

        Raises:
            PolicyError: the request is late, and is about averages before the current ones.
        """
        return Descriptor(fl.Rows(self._described(context, query, labelled=True)))

    @fl.answers(fl.GATHER, unmasked=("moments",))
    def describe_features(
        self, context: fl.CallContext, query: fl.AverageDeltas
    ) -> FeatureDescriptor:
        """Return d′ after the query's averages: moments of all samples, for which no label is read.

        Raises:
            PolicyError: as `describe`.
        """
        return FeatureDescriptor(fl.Rows(self._described(context, query, labelled=False)))

    def _described(
        self, context: fl.CallContext, query: fl.AverageDeltas, labelled: bool
    ) -> torch.Tensor:
        """Return the clients' descriptors as they may leave, (b, …, l).

        Args:
            context: the clients.
            query: the averages that each client lacks.
            labelled: whether samples are described by class, too.
        """
        self.catch_up(context, query)
        start = self.cohort.start
        multiplier = 0.0
        if context.noise is not None:
            multiplier = self.noise_ratio * context.noise.noise
        if not multiplier:
            exact = np.stack([self._moments(k, labelled) for k in context.positions])
            return torch.from_numpy(exact).to(start)
        sums = [self._sums(k, labelled) for k in context.positions]
        sizes = [self.cohort.sizes[k] for k in context.positions]
        noisy = release_sums(context, np.stack(sums), sizes, multiplier)
        moments = partial(self.descriptors.torch_moments_of_sums, deviation=REACH * multiplier)
        return context.postprocess(lambda noisy_sums: moments(noisy_sums).to(start), noisy)

    def _sums(self, k: int, labelled: bool) -> Array:
        """Return Σ φ of a client's samples, by class or of all together.

        Args:
            k: the client's position.
            labelled: whether samples are summed by class.
        """
        labels = self._labels(k) if labelled else None
        return self.descriptors.sums(self._latent_vectors(k), labels)

    def _moments(self, k: int, labelled: bool) -> Array:
        """Return the exact moments of a client's samples."""
        latents = self._latent_vectors(k)
        if labelled:
            return self.descriptors.moments(latents, self._labels(k))
        return self.descriptors.feature_moments(latents)

    def _labels(self, k: int) -> NDArray[np.int64]:
        """Return the classes of a client's samples, (n,)."""
        labels: NDArray[np.int64] = self.cohort.labels(k).cpu().numpy().astype(np.int64)
        return labels

    def _latent_vectors(self, k: int) -> Array:
        """Return the latent vectors of a client's samples under its model, (n, D) float64."""
        if self._encoder is None:
            self._encoder = LatentVectors(self.cohort.model)
        inputs = self.cohort.inputs(k)
        if not len(inputs):
            return np.zeros((0, self.descriptors.latents))
        return self._encoder.of(self.models.row(k), inputs)


def release_sums(
    context: fl.CallContext, sums: Array, sizes: Sequence[int], multiplier: float
) -> torch.Tensor:
    """Return Σ φ of each client as it may leave, (b, …) float64, with noise.

    Blanking a sample moves Σ φ by `REACH` at most. Where a whole client is protected it is the mean
    of φ that leaves, which is no longer than that.

    Args:
        context: the clients.
        sums: (b, …) Σ φ.
        sizes: (b,) numbers of samples.
        multiplier: z.
    """
    assert context.noise is not None
    if context.noise.unit == "client":
        divisors = np.maximum(np.asarray(sizes, dtype=np.float64), 1.0)
        sums = sums / divisors[:, None, None]
    rows = torch.from_numpy(sums)
    return context.release(rows, sensitivity=REACH, noise=multiplier, replace=REPLACE)


class LatentVectors:
    """The encoder f_e: what the dense layer of `latent_layer` gets of samples.

    Args:
        model: the network, of which a copy is made.
    """

    def __init__(self, model: fl.FlatModel) -> None:
        self._model = model.copy()
        layer = latent_layer(self._model.module)
        assert layer is not None
        self._seen: list[torch.Tensor] = []
        layer.register_forward_pre_hook(self._keep)

    def _keep(self, layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        """Keep the inputs of the layer."""
        self._seen.append(inputs[0])

    def of(self, flat: torch.Tensor, inputs: torch.Tensor) -> Array:
        """Return latent vectors, (n, D) float64.

        Args:
            flat: (d,) the model.
            inputs: (n, …) samples, at least one.
        """
        views = self._model.views(flat)
        blocks = []
        with torch.no_grad():
            for block in torch.split(inputs, fl.EVALUATED):
                self._seen.clear()
                self._model.call(views, block)
                vectors = self._seen[-1].reshape(len(block), -1)
                blocks.append(vectors.double().cpu().numpy())
        self._seen.clear()
        return np.concatenate(blocks)
