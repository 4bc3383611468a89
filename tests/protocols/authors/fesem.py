"""FeSEM: k centres, each the mean of the models of the clients that are nearest to it.

Xie, Long, Shen, Zhou, Wang, Jiang, "Multi-Center Federated Learning", 2020 (arXiv 2005.01026).
W_i is the model that client i trained last, c_j centre j. In each round client i is assigned the
centre argmin_j ‖W_i − c_j‖ (E), trains it to W_i, and c_j becomes the mean of its clients' W_i,
weighted by samples (M). The first partition is random.

Not in the paper: masks, noise and secure sums, and newcomers, who take the centre of lowest loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from securecluster.protocols.authoring import (
    GATHER,
    SUM,
    AssignEachRound,
    AssignedModel,
    AssignedModelClient,
    CallContext,
    ClientTensor,
    Disclosures,
    ModelAverages,
    Rows,
    ServerChannel,
    TrainingClient,
    Update,
    Whole,
    answers,
    protocol,
    torch,
)


@dataclass(frozen=True, eq=False)
class NearestCentre:
    """Client to server: the centre nearest to its own model."""

    centre: Annotated[Rows, Whole(below="models")]  # (b,) int64


class NearestCentreClient(AssignedModelClient):
    """Clients that keep the model they trained last, and tell which centre is nearest to it."""

    one_start: ClassVar[bool] = True
    base = ClientTensor("dimension", start="model")  # the centre from which W_i was trained
    moved = ClientTensor("dimension")  # W_i less this centre

    @answers(GATHER)
    def choose(self, context: CallContext, query: ModelAverages) -> NearestCentre:
        """Return argmin_j ‖W_i − c_j‖, with noise where the run adds noise."""
        sets = self.apply_averages(context, query)
        centres = [each.models.select(context.positions).values for each in sets]
        base = self.base[context.positions]

        def nearest(moved: torch.Tensor) -> torch.Tensor:
            rows = [centre - (base + moved) for centre in centres]
            return torch.stack(rows, 1).norm(dim=2).argmin(1)

        moved = self.release_training(context, self.moved[context.positions])
        return NearestCentre(Rows(context.postprocess(nearest, moved)))

    @answers(SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AssignedModel) -> Update:
        """Train the assigned centre, and keep W_i."""
        update = self.train_assigned(context, query)
        self.base[context.positions] = self.assigned_models(context, query)
        self.moved[context.positions] = self.own_updates(update)
        return update


@protocol
class FeSEM(AssignEachRound):
    """k centres, each the mean of the models of the clients nearest to it."""

    mask: str = "permutation"
    """map of updates that the server does not know, a fresh one each round"""
    k: int = 4
    """number of centres"""

    name: ClassVar[str] = "fesem"
    client: ClassVar[type[TrainingClient]] = NearestCentreClient
    ask: ClassVar[Any] = NearestCentreClient.choose

    def assign(self, net: ServerChannel, state: Any, replies: Any, t: int) -> Sequence[int]:
        """Return the nearest centres; a client's first one is random."""
        drawn = net.randomness.generator("server", "first centre")
        models = drawn.integers(self.k, size=len(net.clients)).tolist()
        known = set(state.assigned)
        for i, nearest in zip(replies.ids, replies.rows.centre.values.tolist(), strict=True):
            if i in known:
                models[i] = nearest
        return [models[i] for i in replies.ids]

    def disclosures(self) -> Disclosures:
        """Return what stays visible to the server under every mask."""
        return Disclosures(server=["each client's nearest centre, in every round"])
