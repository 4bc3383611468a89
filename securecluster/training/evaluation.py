"""Evaluation of models on clients' samples.

The samples of all clients that share a model are evaluated in one pass.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.devices import to_device
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows

if TYPE_CHECKING:
    from securecluster.models.validation import FlatModel

EVALUATED = 1000  # samples at a time, which bounds the memory of activations
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Score = Callable[["torch.Tensor", "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Samples:
    """Samples of m clients, one client after the other.

    Attributes:
        x: inputs, (N, …).
        y: targets, (N, …).
        offsets: client k has the rows from `offsets[k]` to `offsets[k + 1]`, (m + 1,).
        weights: given factors of the samples' losses in training, (N,), or None for 1. Scores and
            losses that are released count every sample the same, so that their bounds hold.
    """

    x: torch.Tensor
    y: torch.Tensor
    offsets: IntArray
    weights: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Sequence[NDArray[Any]],
        y: Sequence[NDArray[Any]],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> Samples:
        """Return clients' samples on a device.

        Args:
            x: inputs of each client, (n_k, …).
            y: targets of each client, (n_k, …).
            device: where they are used.
            dtype: type of floating-point numbers; labels and tokens stay integers.
        """
        sizes = [len(targets) for targets in y]
        offsets = np.cumsum([0, *sizes])

        def joined(arrays: Sequence[NDArray[Any]]) -> torch.Tensor:
            table = torch.as_tensor(np.concatenate(arrays))
            if table.is_floating_point():
                return table.to(device, dtype)
            return table.to(device)

        return cls(joined(x), joined(y), offsets)

    def digest(self, k: int) -> bytes:
        """Return 32 bytes (BLAKE2b) that identify a client's samples.

        Args:
            k: position of the client.
        """
        return self._digests[k]

    @cached_property
    def _digests(self) -> list[bytes]:
        """Return the digest of each client's samples."""
        given = [self.x, self.y] if self.weights is None else [self.x, self.y, self.weights]
        tables = [table.cpu().numpy() for table in given]  # a GPU copies them once
        digests = []
        for k in range(len(self.offsets) - 1):
            hasher = hashlib.blake2b(digest_size=32)
            for table in tables:
                hasher.update(table[self._slice(k)].tobytes())
            digests.append(hasher.digest())
        return digests

    def targets(self, clients: Sequence[int]) -> NDArray[Any]:
        """Return the targets of some clients' samples, one client after the other.

        Args:
            clients: positions of the clients.
        """
        by_client = [self.y[self._slice(k)] for k in clients]
        targets: NDArray[Any] = torch.cat(by_client).cpu().numpy()
        return targets

    def by_client(self) -> list[torch.Tensor]:
        """Return the targets of each client's samples, (n_k, …), on the CPU."""
        return list(torch.split(self.y.cpu(), np.diff(self.offsets).tolist()))

    def mean(
        self,
        score: Score,
        model: FlatModel,
        flat: Rows,
        clients: Sequence[int],
        bound: float | None = None,
    ) -> FloatArray:
        """Return the mean score of each client's samples under its own model.

        Args:
            score: function of (outputs, targets) with a number per sample: the objective's `losses`
                or `scores`.
            model: the network.
            flat: parameters, one row for each of `clients`.
            clients: positions of the clients.
            bound: B, if each sample's score is clipped to [0, B], so that no sample moves the mean
                by more than B over their number.

        Returns:
            Means, (len(clients),); NaN for a client without samples.
        """
        means = np.full(len(clients), np.nan)
        values, _, entries, sizes = self._each(score, model, flat, clients)
        if not len(entries):
            return means
        starts = np.cumsum(sizes) - sizes
        # means are taken in float64, whatever the models' type
        scores: FloatArray = values.double().cpu().numpy()
        scores = np.where(np.isnan(scores), np.inf, scores)
        if bound is not None:
            scores = scores.clip(0, bound)
        for size in np.unique(sizes):  # clients of equal sizes at once
            alike = np.flatnonzero(sizes == size)
            of_clients = scores[starts[alike, None] + np.arange(size)]  # (clients, size)
            means[entries[alike]] = of_clients.mean(1)
        return means

    def outputs(self, model: FlatModel, flat: Rows) -> torch.Tensor:
        """Return what each client's own model gives for its samples, (N, …), in their order.

        Args:
            model: the network.
            flat: parameters, one row for each client.
        """
        clients = range(len(self.offsets) - 1)
        values, rows, _, _ = self._each(lambda outputs, y: outputs, model, flat, clients)
        in_order = torch.empty_like(values)
        in_order[rows] = values
        return in_order

    def _each(
        self, function: Score, model: FlatModel, flat: Rows, clients: Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor, IntArray, IntArray]:
        """Return what a function gives for each sample of some clients, model by model.

        Args:
            function: of (outputs, targets), with an entry a sample.
            model: the network.
            flat: parameters, one row for each of `clients`.
            clients: positions of the clients.

        Returns:
            The values (n, …), and the rows of their samples (n,), client after client; the entries
            of `clients` that they belong to, in this order, and the number of samples of each.
        """
        positions = np.asarray(clients, dtype=np.int64)
        first = self.offsets[positions]
        sizes = self.offsets[positions + 1] - first
        model_of = np.arange(len(positions)) if flat.index is None else np.asarray(flat.index)
        # clients with samples, those of one model beside each other: they go in one pass
        entries = np.flatnonzero(sizes)
        entries = entries[np.argsort(model_of[entries], kind="stable")]
        sizes = sizes[entries]
        starts = np.cumsum(sizes) - sizes  # of each client's values
        rows = np.repeat(first[entries] - starts, sizes) + np.arange(sizes.sum())
        # one copy to a GPU, and one back, whatever the number of models
        index = to_device(rows, self.x.device)
        if not len(entries):
            return index.new_zeros(0), index, entries, sizes
        models, begins = np.unique(model_of[entries], return_index=True)
        of_models = np.add.reduceat(sizes, begins)
        values = []
        for row, of_model in zip(models, torch.split(index, of_models.tolist()), strict=True):
            values += self._values(function, model, flat.table[int(row)], of_model)
        return torch.cat(values), index, entries, sizes

    def _slice(self, client: int) -> slice:
        """Return the slice of a client's samples."""
        first = int(self.offsets[client])
        end = int(self.offsets[client + 1])
        return slice(first, end)

    def _values(
        self, function: Score, model: FlatModel, flat: torch.Tensor, rows: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return what a function gives for each sample under one model, without dropout.

        Args:
            function: of (outputs, targets), with an entry a sample.
            model: the network.
            flat: its parameters, (d,).
            rows: rows of the samples, on their device.

        Returns:
            (len(rows), …) in parts; scores are NaN where a diverged model has none (inf − inf).
        """
        views = model.views(flat)
        blocks = torch.split(rows, EVALUATED)
        values = []
        with torch.no_grad():
            for block in blocks:
                outputs = model.call(views, self.x[block])
                values.append(function(outputs, self.y[block]))
        return values
