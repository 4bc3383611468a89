"""FeSEM as an author would write it: each client joins the centre nearest to its own model.

Xie, Long, Shen, Zhou, Wang, Jiang, "Multi-Center Federated Learning", 2021: in the E-step client i
joins argmin_j ‖W_i − c_j‖, in the M-step the centre c_j is the mean of its members' models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, ClassVar

import torch

from securecluster.messaging.bounds import Whole
from securecluster.privacy.dp.loss_mechanism import noised_rows
from securecluster.protocols.authoring import (
    FOLLOWS,
    GATHER,
    SUM,
    AssignedModel,
    AssignedModelClient,
    CallContext,
    FieldNoise,
    ModelAverages,
    ModelChoice,
    ModelSetProtocol,
    ModelSetState,
    OfferedModels,
    PrivacySpec,
    ReleaseCounts,
    Restart,
    Rows,
    Run,
    ServerChannel,
    TrainingClient,
    Update,
    answers,
    check_clusters,
    deliver_models,
    protocol,
    sample_clients,
)


@dataclass(frozen=True, eq=False)
class NearestCentre:
    """Client to server: the number of the centre nearest to its model."""

    centre: Annotated[Rows, Whole(below="models")]  # (b,) int64


class NearestCentreClient(AssignedModelClient):
    """Clients that remember the model that they trained last."""

    one_start: ClassVar[bool] = True

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        # by position: the centre that training began at, and how far it led from there
        self.trained_from: dict[int, torch.Tensor] = {}
        self.moved: dict[int, torch.Tensor] = {}

    @answers(GATHER)
    def choose(self, context: CallContext, query: ModelAverages) -> NearestCentre:
        """Return the nearest centre; before the first training, one by the client's number."""
        centres = self.apply_averages(context, query)
        chosen = []
        for i, k in zip(context.ids, context.positions, strict=True):
            if k not in self.moved:
                first = -torch.nn.functional.one_hot(torch.tensor([i % query.k]), query.k)
                chosen.append(int(self.noised(context, i, first.double()).argmin()))
                continue
            begun = self.trained_from[k]
            apart = torch.stack([centre.models.row(k) - begun for centre in centres])
            chosen.append(self.nearest(context, i, k, apart.double()))
        return NearestCentre(Rows(torch.as_tensor(chosen)))

    def nearest(self, context: CallContext, i: int, k: int, apart: torch.Tensor) -> int:
        """Return argmin_j ‖a_j − Δ_i‖² = argmin_j ‖a_j‖² − 2⟨a_j, Δ_i⟩, with noise if any.

        Args:
            context: the clients.
            i: the client's number.
            k: its position.
            apart: a_j, the centres less the one that training began at (k, d).
        """
        lengths = apart.norm(dim=1)
        units = apart / lengths.clamp_min(1e-30)[:, None]
        products = (units @ self.moved[k].double())[None]
        products = self.noised(context, i, products)
        return int((lengths.square() - 2 * lengths * products[0]).argmin())

    def noised(self, context: CallContext, i: int, row: torch.Tensor) -> torch.Tensor:
        """Return a row (1, k) with noise where the run protects whole clients."""
        guard = self._pipeline.guard
        if guard is None or guard.unit == "example":
            return row
        return noised_rows(guard, "choose", [i], context.step, row)

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AssignedModel) -> Update:
        """Train the chosen centre, and remember where that led."""
        update = self.train_assigned(context, query)
        for row, k in enumerate(context.positions):
            centre = self.model_sets[0][int(query.model.values[row])]
            begun = centre.models.row(k).clone()
            weight = 1.0 if update.size is None else float(update.size.values[row])
            self.trained_from[k] = begun
            self.moved[k] = update.delta.values[row, : len(begun)] / weight
        return update

    @answers(GATHER)
    def join(self, context: CallContext, query: ModelAverages) -> ModelChoice:
        """Return the offered centre under which a newcomer's loss is lowest (not in the paper)."""
        losses = self.offered_losses(context, query)
        return ModelChoice(Rows(torch.as_tensor(losses.argmin(1))))

    def memory(self) -> dict[str, torch.Tensor]:
        """Add the last models."""
        known = sorted(self.moved)
        empty = torch.zeros(0, 0)
        begun = torch.stack([self.trained_from[k] for k in known]) if known else empty
        moved = torch.stack([self.moved[k] for k in known]) if known else empty
        positions = torch.tensor(known, dtype=torch.int64)
        return {**super().memory(), "begun": begun, "moved": moved, "known": positions}

    def recall(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Restore the last models, too."""
        super().recall(memory)
        known = memory["known"].tolist()
        self.trained_from = dict(zip(known, memory["begun"], strict=True))
        self.moved = dict(zip(known, memory["moved"], strict=True))


@dataclass
class FeSEMState(ModelSetState):
    """State of the server's loop."""

    training: list[int] = field(default_factory=list)  # clients that chose in this round


@protocol
class FeSEM(ModelSetProtocol):
    """k centres, each the mean of the models of the clients nearest to it."""

    mask: str = "permutation"
    """map of updates that the server does not know"""
    k: int = 4
    """number of centres"""

    name: ClassVar[str] = "fesem-plain"
    client: ClassVar[type[TrainingClient]] = NearestCentreClient

    def run_server(self, net: ServerChannel, run: Run) -> FeSEMState:
        """Alternate between the E-step and the M-step."""
        state = FeSEMState(self.begin(net))
        client: Any = self.client
        for t in run.rounds("train", state, self.rounds):
            to = sample_clients(net, net.clients, self.participation, t)
            run.commit(state, partial(self._choose, net, state, to))
            self.average_assigned(net, state.running, state.training, client.contribute)
        state.running = run.once("deliver", lambda: self._deliver(net, state), Restart)
        state.offers = run.once("offer", lambda: self.offered_models(net, state), OfferedModels)
        return state

    def _choose(self, net: ServerChannel, state: FeSEMState, to: Sequence[int]) -> None:
        client: Any = self.client
        replies = net.gather(client.choose, state.running.message_for(to), to=to)
        state.running.acknowledge(replies.ids)
        state.training = list(replies.ids)
        chosen = replies.rows.centre.values.tolist() if replies.ids else []
        for i, centre in zip(replies.ids, chosen, strict=True):
            state.running.choice[i] = centre

    def _deliver(self, net: ServerChannel, state: FeSEMState) -> Restart:
        deliver_models(net, state.running)
        return state.running

    @property
    def model_count(self) -> int:
        """Return k."""
        return int(self.k)

    @property
    def weighted(self) -> bool:
        """Return True: centres are means over samples."""
        return True

    def check(self, clients: int) -> None:
        """Check k, too."""
        super().check(clients)
        check_clusters(self.k, clients)

    def secure_sums_refusal(self) -> str | None:
        """Return that a centre of one client would show its update."""
        return "a centre may have one client, whose secure sum would be its update: take plain"

    def privacy_spec(self, noise: float) -> PrivacySpec:
        """Count updates and choices; a choice follows from training where that has noise."""
        spec = super().privacy_spec(noise)
        releases = ReleaseCounts(updates=2 * self.rounds, trainings=self.rounds)
        spec = spec.with_releases(releases)
        if not noise:
            return spec
        centre = FOLLOWS if self.per_example else FieldNoise(noise)
        return spec.with_fields(centre=centre, model=FieldNoise(noise, replacement=1.0))
