"""FedSoft: clients whose data are mixtures of k sources, each with a model.

Ruan, Joe-Wong, "FedSoft: Soft Clustered Federated Learning with Proximal Local Updating", AAAI 2022
(arXiv 2112.06053). c_s is model s; u_ks is the share of client k's samples that c_s fits best, at
least σ. A client trains one model, argmin f_k(w) + λ/2 Σ_s u_ks ‖w − c_s‖², whose pull is that to
the mixture Σ_s u_ks c_s, since the u_ks add up to 1. The server draws the model that it counts for
from u_k.

Not in the paper: a client counts for one model a round (there for several, drawn with replacement),
masks, noise and secure sums, and newcomers, who take the model of lowest loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from securecluster.protocols import authoring as fl

torch = fl.torch


@dataclass(frozen=True, eq=False)
class Shares:
    """Client to server: the share of its samples that each model fits best."""

    shares: Annotated[fl.Rows, fl.Real(("models",))]  # (b, k)


class MixtureClient(fl.AssignedModelClient):
    """Clients that tell which models fit their samples, and train near the mixture of these."""

    mixture = fl.ClientTensor("dimension")  # Σ_s u_ks c_s
    pull: float = 0.0  # λ
    least: float = 0.0  # σ

    @fl.answers(fl.GATHER, unmasked=("shares",))
    def weigh(self, context: fl.CallContext, query: fl.ModelAverages) -> Shares:
        """Return u_k, with noise where the run adds noise, and keep the mixture."""
        sets = self.apply_averages(context, query)
        losses = [self.sample_losses(context.positions, j) for j in range(len(sets))]
        best = [torch.stack(of_client).argmin(0) for of_client in zip(*losses, strict=True)]
        counts = torch.stack([row.bincount(minlength=len(sets)) for row in best]).to(self.dtype)
        shares = counts / counts.sum(1, keepdim=True)
        released = context.postprocess(self._proper, context.release(shares, norm=1.0))
        models = torch.stack([each.models.select(context.positions).values for each in sets], 1)
        self.mixture[context.positions] = (released[:, :, None] * models).sum(1)
        return Shares(fl.Rows(released))

    def _proper(self, shares: torch.Tensor) -> torch.Tensor:
        """Return shares of at least σ that add up to 1."""
        shares = shares.clamp(min=self.least)
        return shares / shares.sum(1, keepdim=True)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of numbers."""
        return self.cohort.start.dtype

    def loss_term(self, context: fl.CallContext) -> fl.MeanRegularizer:
        """Return the pull to the mixture."""
        return fl.MeanRegularizer(fl.Rows(self.mixture[context.positions]), self.pull)


@fl.protocol
class FedSoft(fl.AssignEachRound):
    """k models, and clients that are mixtures of them."""

    k: Annotated[int, fl.AtLeast(2)] = 4
    """number of models"""
    pull: Annotated[float, fl.Number(0, 100)] = 0.1
    """λ, the strength of the proximal term"""
    least: Annotated[float, fl.Number(0, 0.5)] = 0.01
    """σ, the least share of a model"""

    name: ClassVar[str] = "fedsoft"
    client: ClassVar[type[fl.TrainingClient]] = MixtureClient
    ask: ClassVar[Any] = MixtureClient.weigh

    def assign(self, net: fl.ServerChannel, state: Any, replies: Any, t: int) -> Sequence[int]:
        """Draw each client's model from its shares; in the last round it is the largest."""
        shares = replies.rows.shares.values.double().numpy()
        if t == self.rounds - 1:
            largest: list[int] = shares.argmax(1).tolist()
            return largest
        draw = net.randomness.generator("server", "mixture", t)
        return [int(draw.choice(self.k, p=row / row.sum())) for row in shares]

    def make_client(
        self, cohort: fl.LocalTrainer, pipeline: fl.Pipeline, config: Mapping[str, Any]
    ) -> fl.TrainingClient:
        """Return the client object, with λ and σ."""
        client: Any = super().make_client(cohort, pipeline, config)
        client.pull, client.least = float(self.pull), float(self.least)
        return client  # type: ignore[no-any-return]

    def disclosures(self) -> fl.Disclosures:
        """Return what stays visible to the server under every mask."""
        return fl.Disclosures(server=["each client's shares of the k models, in every round"])
