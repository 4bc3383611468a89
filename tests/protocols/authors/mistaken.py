"""Mistakes that authors make about privacy, masks, state and the server's view, one class each.

Each class deviates in one point from FlexCFL or FeSEM as they should be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from fesem import FeSEM, NearestCentreClient
from flexcfl import FirstUpdate, FirstUpdateClient, FlexCFL

from securecluster import Federation
from securecluster.clustering.k_means import kmeans
from securecluster.core.option_groups import group, grouped
from securecluster.errors import PolicyError
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise
from securecluster.protocols.authoring import (
    GATHER,
    SUM,
    Ack,
    AssignedModel,
    CallContext,
    ClientTensor,
    ClusterOnceState,
    Empty,
    Picks,
    Real,
    Rows,
    Run,
    ServerChannel,
    TrainingClient,
    Update,
    answers,
)
from securecluster.protocols.common.client_tensors import ClientRows
from securecluster.protocols.common.options.privacy_options import PrivacyOptions


def units(rows: torch.Tensor) -> torch.Tensor:
    """Return rows (b, d) that are clipped to norm 1."""
    return rows / rows.norm(dim=1, keepdim=True).clamp_min(1)


# An update that leaves otherwise than it should


class UnmaskedClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.first_updates(context)))


class Unmasked(FlexCFL):
    """Names the update in unmasked= where through= is meant."""

    client: ClassVar[type[TrainingClient]] = UnmaskedClient
    signature_method: ClassVar[Any] = UnmaskedClient.pretrain


class OpenClient(FirstUpdateClient):
    @answers(GATHER, fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.first_updates(context)))


class Open(FlexCFL):
    """Forgets through=."""

    client: ClassVar[type[TrainingClient]] = OpenClient
    signature_method: ClassVar[Any] = OpenClient.pretrain


class LittleNoiseClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        rows = units(self.first_updates(context))
        return FirstUpdate(Rows(context.release(rows, sensitivity=0.1)))


class LittleNoise(FlexCFL):
    """Scales its noise to a tenth of the sensitivity."""

    client: ClassVar[type[TrainingClient]] = LittleNoiseClient
    signature_method: ClassVar[Any] = LittleNoiseClient.pretrain


class GlobalNoiseClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        rows = units(self.first_updates(context))
        noise = np.random.default_rng().normal(size=rows.shape)
        return FirstUpdate(Rows(rows + torch.as_tensor(noise).to(rows)))


class GlobalNoise(FlexCFL):
    """Draws its noise from a generator of its own."""

    client: ClassVar[type[TrainingClient]] = GlobalNoiseClient
    signature_method: ClassVar[Any] = GlobalNoiseClient.pretrain


class FixedNoiseClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        rows = units(self.first_updates(context))
        generator = torch.Generator().manual_seed(0)
        return FirstUpdate(Rows(rows + torch.randn(rows.shape[1], generator=generator).to(rows)))


class FixedNoise(FlexCFL):
    """Adds the same noise at every client."""

    client: ClassVar[type[TrainingClient]] = FixedNoiseClient
    signature_method: ClassVar[Any] = FixedNoiseClient.pretrain


class UnusedNoiseClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        rows = self.first_updates(context)
        context.release(rows)
        return FirstUpdate(Rows(rows))


class UnusedNoise(FlexCFL):
    """Sends an update in place of the released one."""

    client: ClassVar[type[TrainingClient]] = UnusedNoiseClient
    signature_method: ClassVar[Any] = UnusedNoiseClient.pretrain


class ChangedClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        rows = self.first_updates(context)
        released = context.release(rows)
        released.copy_(rows)
        return FirstUpdate(Rows(released))


class Changed(FlexCFL):
    """Changes what was released."""

    client: ClassVar[type[TrainingClient]] = ChangedClient
    signature_method: ClassVar[Any] = ChangedClient.pretrain


class SmuggledClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        rows = self.first_updates(context)
        return FirstUpdate(Rows(context.postprocess(lambda _: rows + 0, context.release(rows))))


class Smuggled(FlexCFL):
    """Lets a function of released numbers return others."""

    client: ClassVar[type[TrainingClient]] = SmuggledClient
    signature_method: ClassVar[Any] = SmuggledClient.pretrain


class ReadAgainClient(FirstUpdateClient):
    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        released = context.release(self.first_updates(context))

        def with_means(rows: torch.Tensor) -> torch.Tensor:
            means = [self.cohort.inputs(k).mean() for k in context.positions]
            return rows + torch.stack(means)[:, None]

        return FirstUpdate(Rows(context.postprocess(with_means, released)))


class ReadAgain(FlexCFL):
    """Reads data in a function of released numbers."""

    client: ClassVar[type[TrainingClient]] = ReadAgainClient
    signature_method: ClassVar[Any] = ReadAgainClient.pretrain


class KeptClient(FirstUpdateClient):
    kept = ClientTensor("dimension")

    @answers(GATHER, private=False)
    def look(self, context: CallContext, query: Empty) -> Ack:
        for k in context.positions:
            pixels = self.cohort.inputs(k).flatten(1).mean(0)
            self.kept[k][: len(pixels)] = pixels
        return Ack()

    @answers(GATHER, unmasked=("update",))
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.kept[context.positions]))


class Kept(FlexCFL):
    """Its clients send what they kept of their data in an earlier call."""

    client: ClassVar[type[TrainingClient]] = KeptClient
    signature_method: ClassVar[Any] = KeptClient.pretrain

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        net.gather(KeptClient.look, Empty(), to=net.clients)
        return super().run_server(net, run)


class KeptTrainingClient(KeptClient):
    @answers(GATHER, unmasked=("update",), trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.first_updates(context) + self.kept[context.positions]))


class KeptTraining(Kept):
    """Its clients add what they kept of their data to what they trained in private."""

    client: ClassVar[type[TrainingClient]] = KeptTrainingClient
    signature_method: ClassVar[Any] = KeptTrainingClient.pretrain


class FreeClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, private=False, public=("update",))
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.first_updates(context)))


class Free(FlexCFL):
    """States that the update is of nobody's data."""

    client: ClassVar[type[TrainingClient]] = FreeClient
    signature_method: ClassVar[Any] = FreeClient.pretrain


class DerivedClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, derived=True)
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.first_updates(context)))


class Derived(FlexCFL):
    """States that the update was released before."""

    client: ClassVar[type[TrainingClient]] = DerivedClient
    signature_method: ClassVar[Any] = DerivedClient.pretrain


class WideClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        width = 50 + int((self.cohort.inputs(context.positions[0]) > 0.5).sum()) % 100
        return FirstUpdate(Rows(self.first_updates(context)[:, :width].contiguous()))


class Wide(FlexCFL):
    """Sends as many numbers as there are bright pixels."""

    client: ClassVar[type[TrainingClient]] = WideClient
    signature_method: ClassVar[Any] = WideClient.pretrain


class UntoldTrainingClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True)
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        return FirstUpdate(Rows(self.first_updates(context)))


class UntoldTraining(FlexCFL):
    """Forgets trains=, by which DP-SGD is priced."""

    client: ClassVar[type[TrainingClient]] = UntoldTrainingClient
    signature_method: ClassVar[Any] = UntoldTrainingClient.pretrain


class LoudClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        sample = self.cohort.inputs(context.positions[0])[0].flatten()
        raise ValueError(f"odd sample {sample[20:22].tolist()}")


class Loud(FlexCFL):
    """Ends with an exception that has a part of a sample in its text."""

    client: ClassVar[type[TrainingClient]] = LoudClient
    signature_method: ClassVar[Any] = LoudClient.pretrain


class ShyClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        if any(float(self.cohort.inputs(k).mean()) > 0.2 for k in context.positions):
            raise PolicyError("not with these data")
        return FirstUpdate(Rows(self.first_updates(context)))


class Shy(FlexCFL):
    """Refuses a call because of its data."""

    client: ClassVar[type[TrainingClient]] = ShyClient
    signature_method: ClassVar[Any] = ShyClient.pretrain


# Messages


@dataclass(frozen=True, eq=False)
class Boundless:
    """Client to server: an update of any size."""

    update: Rows


class BoundlessClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> Boundless:
        return Boundless(Rows(self.first_updates(context)))


class NoBound(FlexCFL):
    """Declares no bound of what clients send."""

    client: ClassVar[type[TrainingClient]] = BoundlessClient
    signature_method: ClassVar[Any] = BoundlessClient.pretrain


@dataclass(frozen=True, eq=False)
class Noted:
    """Client to server: an update, and a number of the data."""

    update: Annotated[Rows, Real(("width",))]
    note: int = 0


class NotedClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> Noted:
        note = int(self.cohort.inputs(context.positions[0]).sum())
        return Noted(Rows(self.first_updates(context)), note)


class Note(FlexCFL):
    """Sends a number of the data beside the update."""

    client: ClassVar[type[TrainingClient]] = NotedClient
    signature_method: ClassVar[Any] = NotedClient.pretrain


@dataclass(frozen=True, eq=False)
class AllUpdates:
    """Server to client: the updates of all clients, under the mask that all clients know."""

    updates: Annotated[Picks, Real(("clients", "width"), sent="update")]


class ListeningClient(FirstUpdateClient):
    @answers(GATHER, private=False)
    def listen(self, context: CallContext, query: AllUpdates) -> Ack:
        return Ack()


class Relayed(FlexCFL):
    """Sends the replies of all clients to every client, who can undo the mask."""

    client: ClassVar[type[TrainingClient]] = ListeningClient
    signature_method: ClassVar[Any] = ListeningClient.pretrain

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        state = super().run_server(net, run)
        assert state.signatures is not None
        rows = state.signatures.rows
        everybody = tuple(tuple(range(len(rows))) for _ in net.clients)
        net.gather(ListeningClient.listen, AllUpdates(Picks(rows, everybody)), to=net.clients)
        return state


# Stages and counts


@dataclass(kw_only=True)
class UnclippedNoise(PrivacyOptions):
    def stages(self, config: Mapping[str, Any]) -> Any:
        noise = config["noise"]
        return (Noise(config["clip"], noise),) if self.per_client and noise else ()


@grouped
class NoiseAlone(FlexCFL):
    """Adds noise without a clip."""

    privacy: PrivacyOptions = group(UnclippedNoise)


class LooseClip(Clip):
    """Clips nothing."""

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        return rows.clone()

    def overwrite(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        return rows


@dataclass(kw_only=True)
class UnclippedRows(PrivacyOptions):
    def stages(self, config: Mapping[str, Any]) -> Any:
        if not self.per_client:
            return ()
        clip = LooseClip(config["clip"])
        local = config["noise"] and config["placement"] == "local"
        return (clip, Noise(config["clip"], config["noise"])) if local else (clip,)


@grouped
class NoClip(FlexCFL):
    """Has a stage of the kind CLIP that does not clip."""

    privacy: PrivacyOptions = group(UnclippedRows)


class Uncounted(FlexCFL):
    """Asks again if first updates are long, as they are with noise, and those of stand-ins not."""

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        state = super().run_server(net, run)
        assert state.signatures is not None
        if float(state.signatures.rows.norm(dim=1).mean()) > 1.5:
            net.gather(FirstUpdateClient.pretrain, Empty(), to=net.clients)
        return state


# What the server reads

SEEN: dict[int, torch.Tensor] = {}


def pairs_of(rows: Sequence[torch.Tensor]) -> list[int]:
    """Return k-means of rows in two clusters."""
    stacked = torch.stack(list(rows)).double()
    return [int(label) for label in kmeans((stacked @ stacked.T).numpy(), 2, 0)]


class TellingClient(FirstUpdateClient):
    @answers(GATHER, through=("update",), fresh=True, trains="usual")
    def pretrain(self, context: CallContext, query: Empty) -> FirstUpdate:
        for i, k in zip(context.ids, context.positions, strict=True):
            SEEN[i] = self.cohort.inputs(k).flatten(1).mean(0)
        return FirstUpdate(Rows(self.first_updates(context)))


class Global(FlexCFL):
    """Clusters by a variable of the module, which clients fill."""

    client: ClassVar[type[TrainingClient]] = TellingClient
    signature_method: ClassVar[Any] = TellingClient.pretrain

    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        return pairs_of([SEEN[i] for i in range(len(signatures))])


class Keeps(FlexCFL):
    """Keeps the federation."""

    def config(self, federation: Federation, dtype: str) -> dict[str, Any]:
        self.kept_federation = federation
        return super().config(federation, dtype)


class Peeking(Keeps):
    """Clusters by the clients' data."""

    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        shards = self.kept_federation.shards[: len(signatures)]
        return pairs_of([torch.as_tensor(shard.x).flatten(1).mean(0) for shard in shards])


class Knowing(Keeps):
    """Clusters by the true clusters."""

    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        return list(self.kept_federation.truth or ())[: len(signatures)]


# How the server clusters


class FromOne(FlexCFL):
    """Numbers its clusters from 1."""

    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        return [1 + label for label in super().cluster(signatures, seed)]


class Ordered(FlexCFL):
    """Reads the order of coordinates, which no mask keeps."""

    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        scores = signatures[:, :40].sum(1)
        return [int(score > scores.median()) for score in scores]


class Random(FlexCFL):
    """Clusters by numbers of a global generator."""

    def cluster(self, signatures: torch.Tensor, seed: int) -> Sequence[int]:
        scores = np.random.default_rng().random(len(signatures))
        return [int(score > np.median(scores)) for score in scores]


# What clients remember


class ForgetfulClient(NearestCentreClient):
    moved: Any = None  # in place of the declared tensor

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.moved = ClientRows(torch.zeros(len(self.cohort.ids), len(self.cohort.start)))


class Forgetful(FeSEM):
    """Its clients' models are in no checkpoint."""

    client: ClassVar[type[TrainingClient]] = ForgetfulClient


class ViewClient(NearestCentreClient):
    views: Any = None

    @answers(SUM, through=("delta",), fresh=True, trains="usual", unmasked=("size",))
    def contribute(self, context: CallContext, query: AssignedModel) -> Update:
        update = super().contribute(context, query)
        self.views = {**(self.views or {})}
        for row, k in enumerate(context.positions):
            self.views[k] = update.delta.values[row, : len(self.cohort.start)]
        return update

    def release_training(self, context: CallContext, rows: torch.Tensor) -> torch.Tensor:
        known = [
            row if self.views is None else self.views.get(k, row)
            for k, row in zip(context.positions, rows, strict=True)
        ]
        return super().release_training(context, torch.stack(known))


class View(FeSEM):
    """Its clients keep a view of a tensor that is masked in place."""

    client: ClassVar[type[TrainingClient]] = ViewClient


# Choices


class ExactChoiceClient(NearestCentreClient):
    def release_training(self, context: CallContext, rows: torch.Tensor) -> torch.Tensor:
        return rows


class ExactChoice(FeSEM):
    """Chooses by what it trained, as it is."""

    client: ClassVar[type[TrainingClient]] = ExactChoiceClient
