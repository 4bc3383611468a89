"""A protocol of an author who has the published ones and their documentation: clusters once by
means, then FedAvg.

Each client tells the mean of its samples, under the mask that its updates would have; the server
runs k-means on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar

import numpy as np

from securecluster.clustering.distances import to_others
from securecluster.clustering.k_means import kmeans
from securecluster.clustering.labels import members
from securecluster.clustering.similarity import gram, mean_row
from securecluster.core.lazy_torch import torch
from securecluster.data.facts import Facts
from securecluster.privacy.masking.masks import build
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols.authoring import (
    GATHER,
    TRIES,
    AveragingState,
    CallContext,
    ClusteringProtocol,
    Empty,
    PendingUpdates,
    Real,
    Rows,
    Run,
    ServerChannel,
    SumClient,
    TrainingClient,
    UsageError,
    answers,
    average_clusters,
    check_newcomers,
    flush,
    protocol,
)


@dataclass(frozen=True, eq=False)
class Mean:
    """Client to server."""

    mean: Annotated[Rows, Real(("width",))]  # (b, D) of its samples


class Client(SumClient):
    """Clients that tell the mean of their samples, and contribute to averages."""

    @answers(GATHER, through=("mean",), fresh=True)
    def tell(self, context: CallContext, query: Empty) -> Mean:
        """Return the mean of each client's samples."""
        return Mean(Rows(self.means(context)))

    def means(self, context: CallContext) -> torch.Tensor:
        """Return the means (b, D)."""
        rows = [self.cohort.inputs(k).flatten(1).mean(0) for k in context.positions]
        return torch.stack(rows)


@dataclass
class Found:
    """The clusters, and how newcomers are compared with them."""

    labels: list[int]
    step: int  # of the call that brought the means: it names their mask
    centres: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 0))


@dataclass
class State(AveragingState):
    """What the server's loop changes."""

    found: Found | None = None


@protocol
class Sixth(ClusteringProtocol):
    """k-means on the means of clients' samples, then FedAvg in each cluster."""

    mask: str = "permutation"
    """map of updates and means that the server does not know"""
    k: int = 2
    """number of clusters"""

    name: ClassVar[str] = "sixth"
    client: ClassVar[type[TrainingClient]] = Client

    def check(self, clients: int) -> None:
        """Check that noise covers whole clients, whose means are released."""
        super().check(clients)
        if self.privacy.per_example:
            raise UsageError("noise covers a client's mean, and no sample: take dp_unit client")

    def run_server(self, net: ServerChannel, run: Run) -> State:
        """Cluster once, then average."""
        found = run.once("cluster", lambda: self.cluster(net), Found)
        state = State(
            found.labels, PendingUpdates.start(len(net.clients), fresh=self.mask != "none"), found
        )
        for t in run.rounds("train", state, self.rounds):
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    def cluster(self, net: ServerChannel) -> Found:
        """Run k-means on the means; who does not reply joins the first cluster."""
        tell: Any = type(self).client.tell  # type: ignore[attr-defined]
        got = net.gather(tell, Empty(), to=net.clients, tries=TRIES)
        rows = got.rows.mean.values
        inner = gram(rows).numpy()
        own = kmeans(inner, self.k, self.seed_of(net))
        centres = torch.stack([mean_row(rows, one) for one in members(own)])
        of = dict(zip(got.ids, own, strict=True))
        return Found([of.get(i, 0) for i in net.clients], got.step, centres)

    def seed_of(self, net: ServerChannel) -> int:
        """Return what k-means draws from."""
        return net.randomness.integer("server", "k-means")

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        """Send newcomers to the nearest centre, under the mask that the centres have."""
        return self.nearest(net, state, to, state.found.step)

    def nearest(
        self, net: ServerChannel, state: Any, to: Sequence[int], step: int | None
    ) -> list[int]:
        """Return each newcomer's cluster."""
        tell: Any = type(self).client.tell  # type: ignore[attr-defined]
        got = net.gather(tell, Empty(), to=to, step=step, tries=TRIES)
        check_newcomers(to, got.ids)
        away = to_others(got.rows.mean.values.cpu(), state.found.centres)
        found = dict(zip(got.ids, away.argmin(1).tolist(), strict=True))
        return [found[i] for i in to]

    def shared_facts(self, facts: Facts) -> dict[str, Any]:
        """Add how many numbers a sample has."""
        return {"width": int(np.prod(facts.shape))}

    def frame_sizes(self, config: Mapping[str, Any]) -> dict[str, int]:
        """Add how many numbers a sample has."""
        return {**super().frame_sizes(config), "width": int(config["width"])}

    def pipeline(self, config: Mapping[str, Any]) -> Pipeline:
        """Return the stages of updates, and of means, which have a mask of their own width."""
        stages = self.privacy.stages(config)
        means = Pipeline([*stages, *build(self.mask, config["width"])])
        return Pipeline([*stages, *build(self.mask, config["dimension"])], fields={"mean": means})
