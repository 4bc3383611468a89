"""The clients of CFL.

They send updates, full gradients, models at splits, and the losses that the fallback compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.privacy.dp.loss_mechanism import WORST_LOSS
from securecluster.protocols import authoring as fl
from securecluster.protocols.common.comparison.compressed_updates import CompressedUpdateClient
from securecluster.protocols.common.comparison.gradient_signatures import SignatureSender
from securecluster.runtime.origins import chained, digest
from securecluster.training.config import FULL_GRADIENT


@dataclass(frozen=True, eq=False)
class PathModels(fl.AverageDeltas):
    """Server to client: the models on the path from the root to its cluster."""

    # models on the longest path of a client that receives this message
    depth: Annotated[int, fl.Between(maximum="clients")] = 0


@dataclass(frozen=True, eq=False)
class PathLosses:
    """Client to server: the losses of several models on the client's validation samples."""

    # (b, 1 + depth), summed over those samples: the client's own model first, then the path's from
    # the root; 0 after its end
    loss: Annotated[fl.Rows, fl.Real((fl.Upto("depths", "clients", minimum=1),))]
    # (b,) number of validation samples; without it losses are means
    size: Annotated[fl.Rows | None, fl.Real(low=0, maximum=fl.MOST_SAMPLES)]


class CFLClient(SignatureSender, CompressedUpdateClient):
    """Clients that also send gradients, and evaluate the models on their path."""

    @fl.answers(fl.GATHER, through=("delta",), fresh=True, trains="full")
    def gradient(self, context: fl.CallContext, query: fl.AverageDeltas) -> fl.Update:
        """Return −∇r_i(θ_i) over all of D_i (Sattler et al. 2019, eq. 50).

        The sign makes no difference to cosines.

        Args:
            query: the averages that each client lacks.
        """
        self.catch_up(context, query)
        # One step of learning rate 1 over all samples moves the model by the negative gradient.
        usual = self.training
        plan = replace(FULL_GRADIENT, clip=usual.clip, noise=usual.noise)
        models = self.models.select(context.positions)
        d = self.cohort.model.dimension
        room = self._pipeline.buffer_width(d)
        gradients = self.cohort.train(models, context.positions, plan, context.step, room)
        return fl.Update(fl.Rows(gradients), None)

    @fl.answers(fl.SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: fl.CallContext, query: fl.AverageDeltas) -> fl.Update:
        """Train from the cluster's model, and return the update for a sum.

        It is multiplied by |D_i| where the average is weighted. Where clusters come from gradient
        signatures, no update is read individually (not in the paper).

        Args:
            query: the averages that each client lacks.
        """
        weights = None
        if self._weighted:
            weights = [float(self.cohort.sizes[k]) for k in context.positions]
        return self.trained(context, query, weights)

    @fl.answers(fl.SUM, unmasked=("loss", "size"))
    def judge(self, context: fl.CallContext, query: PathModels) -> PathLosses:
        """Return the losses of θ_i and of the models on its path, on the validation samples.

        The losses have noise where the run adds some.

        Args:
            query: contains the models of each client's path.

        Raises:
            FrameError: a path is longer than the query's depth.
        """
        self.check_not_behind(context, query)
        lengths = [len(path) for path in query.means.picks]
        if query.depth < max(lengths):
            raise fl.FrameError(
                f"PathModels.depth is {query.depth}, and a path has {max(lengths)} models: the "
                "frame is refused"
            )
        self._bind_path(context, query)
        losses = self._path_losses(context, query, context.loss_bound)
        sizes = [self.cohort.validation_sizes[k] for k in context.positions]
        widths = [1 + length for length in lengths]
        released = context.release_losses(losses, sizes, widths)
        dtype = self.models.table.dtype
        if self._pipeline.clips:  # clients have equal weights, and n_i is not sent
            means = context.postprocess(lambda noisy: _finite(noisy).to(dtype), released)
            return PathLosses(fl.Rows(means), None)
        counts = torch.as_tensor(sizes, dtype=torch.float64)[:, None]
        sums = context.postprocess(lambda noisy: (_finite(noisy) * counts).to(dtype), released)
        return PathLosses(fl.Rows(sums), fl.Rows(context.sample_counts(sizes, dtype)))

    def _bind_path(self, context: fl.CallContext, query: PathModels) -> None:
        """Bind replies to each client's own model and those of its path."""
        digests = [digest(row) for row in query.means.table]
        steps = query.steps.table.tolist()
        origins = []
        for lineage, path in zip(self.lineage(context.positions), query.means.picks, strict=True):
            origin = lineage
            for row in path:
                origin = chained(origin, steps[row], digests[row])
            origins.append(origin)
        context.bind(origins)

    def _path_losses(
        self, context: fl.CallContext, query: PathModels, clip: float | None
    ) -> NDArray[np.float64]:
        """Return mean losses on the validation samples, (b, 1 + depth), 0 after a path's end.

        The first column is that of the client's own model. A client without validation samples
        has NaN.

        Args:
            clip: bound of each sample's loss; None does not bound it.
        """
        positions = context.positions
        paths = query.means.picks
        losses = np.zeros((len(positions), 1 + query.depth))
        final_models = self.models.select(positions)
        losses[:, 0] = self.cohort.validation_loss(final_models, positions, clip)
        longest = max(len(path) for path in paths)
        # One level at a time, in a batch of all clients whose path is as long.
        for level in range(longest):
            frames = []
            clients = []
            rows = []
            for n, path in enumerate(paths):
                if len(path) > level:
                    frames.append(n)
                    clients.append(positions[n])
                    rows.append(path[level])
            models = self._models_of(query, rows)
            losses[frames, 1 + level] = self.cohort.validation_loss(models, clients, clip)
        return losses

    def _models_of(self, query: fl.AverageDeltas, picks: Sequence[int]) -> fl.Rows:
        """Return the models of some rows of the query's table; each row is unmasked once.

        Args:
            picks: the rows, one for each client.
        """
        unique = sorted(set(picks))
        models = []
        for row in unique:
            displacement = query.means.table[row]
            step = int(query.steps.table[row])
            models.append(self.model_at(displacement, step))
        position = {row: n for n, row in enumerate(unique)}
        index = tuple(position[row] for row in picks)
        return fl.Rows(torch.stack(models), index)


def _finite(losses: torch.Tensor) -> torch.Tensor:
    """Return losses with `WORST_LOSS` in place of those that are not finite.

    No cluster may receive a model whose loss is not finite, as after an overflow of weights.
    """
    return losses.nan_to_num(nan=WORST_LOSS, posinf=WORST_LOSS)
