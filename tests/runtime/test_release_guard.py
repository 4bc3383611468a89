"""What a client method reads and draws is held to what it declares, at the first run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
from cases import FULL, two_clusters

from securecluster import Federation
from securecluster.errors import PolicyError
from securecluster.privacy.dp.gaussian_mechanism import Noise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.pipeline import Kind
from securecluster.protocols.authoring import (
    FOLLOWS,
    GATHER,
    CallContext,
    ClusterOnce,
    Empty,
    FieldNoise,
    PrivacySpec,
    Real,
    Rows,
    SignatureClient,
    TrainingClient,
    answers,
    linkage_clusters,
    nearest,
    protocol,
)
from securecluster.training.config import LocalTraining
from securecluster.training.data_access import DataAccess

Z = 1.0


@dataclass(frozen=True, eq=False)
class SampleMean:
    """Mean of a client's samples, scaled to norm 1 at most."""

    mean: Annotated[Rows, Real(("width",))]


class MeanClient(SignatureClient):
    """Clients that send their means, by several declarations."""

    def means(self, context: CallContext) -> torch.Tensor:
        means = [self.cohort.inputs(k).flatten(1).mean(0) for k in context.positions]
        rows = torch.stack(means)
        return rows / rows.norm(dim=1, keepdim=True).clamp_min(1.0)

    def noised(
        self, context: CallContext, factor: float = 1.0, sensitivity: float = 1.0
    ) -> SampleMean:
        """Return means with the noise of the clients' streams, or some of it."""
        guard = self._pipeline.guard
        rows = self.means(context)
        if guard is None:
            return SampleMean(Rows(rows))
        noisy = []
        for client, row in zip(context.ids, rows, strict=True):
            multiplier = factor * guard.noise
            noisy.append(
                guard.draws.noised(client, "mean", context.step, row, multiplier, sensitivity)
            )
        return SampleMean(Rows(torch.stack(noisy)))

    @answers(GATHER, unmasked=("mean",))
    def right(self, context: CallContext, query: Empty) -> SampleMean:
        return self.noised(context)

    @answers(GATHER, unmasked=("mean",))
    def without(self, context: CallContext, query: Empty) -> SampleMean:
        return SampleMean(Rows(self.means(context)))

    @answers(GATHER, unmasked=("mean",))
    def own_generator(self, context: CallContext, query: Empty) -> SampleMean:
        rows = self.means(context)
        generator = torch.Generator().manual_seed(0)
        return SampleMean(Rows(rows + torch.randn(rows.shape, generator=generator)))

    @answers(GATHER, unmasked=("mean",))
    def half(self, context: CallContext, query: Empty) -> SampleMean:
        return self.noised(context, factor=0.5)

    @answers(GATHER, unmasked=("mean",), derived=True)
    def derived(self, context: CallContext, query: Empty) -> SampleMean:
        return SampleMean(Rows(self.means(context)))

    @answers(GATHER, unmasked=("mean",))
    def pretrain(self, context: CallContext, query: Empty) -> SampleMean:
        start = Rows(self.cohort.start[None], (0,) * len(context.positions))
        updates = self.cohort.train(
            start, context.positions, LocalTraining(0.1, 1, 20), context.step
        )
        width = self.means(context).shape[1]
        return SampleMean(Rows(updates[:, :width].clone()))

    @answers(GATHER, unmasked=("mean",), trains="usual")
    def trained_without_noise(self, context: CallContext, query: Empty) -> SampleMean:
        start = Rows(self.cohort.start[None], (0,) * len(context.positions))
        plan = LocalTraining(0.1, 1, 20)
        updates = self.cohort.train(start, context.positions, plan, context.step)
        return SampleMean(Rows(updates[:, :64].clone()))


@protocol
class Means(ClusterOnce):
    """Clusters by means."""

    name: ClassVar[str] = "means-under-guard"
    client: ClassVar[type[TrainingClient]] = MeanClient
    signature_method: ClassVar[Any] = MeanClient.right
    price: ClassVar[Callable[[float], FieldNoise]] = staticmethod(FieldNoise)

    def privacy_spec(self, noise: float) -> PrivacySpec:
        spec = super().privacy_spec(noise)
        return spec.with_fields(mean=type(self).price(noise)) if noise else spec

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        distance = torch.cdist(signatures, signatures).double().numpy()
        return linkage_clusters(distance, "average", count=2)

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        distance = torch.cdist(newcomers, signatures).double().numpy()
        return nearest(distance, labels, "average")


def means(method: str, price: Callable[[float], FieldNoise] = FieldNoise) -> type[Means]:
    """Return the protocol whose signatures are those of another client method."""
    body = {"signature_method": getattr(MeanClient, method), "price": staticmethod(price)}
    return type("Means", (Means,), body)


def fit(kind: type[Means], federation: Federation, **params: Any) -> Any:
    small: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear"}
    return kind(**{**small, "clip": 1.0, "noise": Z, **params}).fit(federation, FULL)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(4, 20)


def test_noise_of_the_clients_streams_is_what_the_price_says(federation: Federation) -> None:
    fitted = fit(means("right"), federation)
    (event,) = [event for event in fitted.ledger_.events if event.fields == ("mean",)]
    assert (event.mechanism, event.noise_multiplier) == ("gaussian", Z)


@pytest.mark.parametrize("method", ["without", "own_generator"])
def test_a_price_without_a_draw_is_refused(method: str, federation: Federation) -> None:
    with pytest.raises(PolicyError, match="client 0 drew none from its own streams"):
        fit(means(method), federation)


def test_less_noise_than_is_priced_is_refused(federation: Federation) -> None:
    with pytest.raises(PolicyError, match=r"drew noise of multiplier 0\.5: draw as much"):
        fit(means("half"), federation)


def test_what_has_no_price_needs_no_noise(federation: Federation) -> None:
    kind = type("Exact", (Means,), {"signature_method": MeanClient.without})
    kind.privacy_spec = ClusterOnce.privacy_spec  # type: ignore[method-assign]
    fitted = fit(kind, federation)
    assert fitted.ledger_.epsilon == float("inf")


def test_what_is_read_from_data_does_not_follow_from_earlier_releases(
    federation: Federation,
) -> None:
    with pytest.raises(PolicyError, match=r"priced as following .* reads cohort\.inputs"):
        fit(means("without", lambda noise: FOLLOWS), federation)


def test_a_method_that_tells_nothing_new_reads_no_data(federation: Federation) -> None:
    with pytest.raises(PolicyError, match=r"reads cohort\.inputs: leave the declaration out"):
        fit(means("derived"), federation, clip=None, noise=0.0)


def test_a_training_that_is_not_declared_is_refused(federation: Federation) -> None:
    with pytest.raises(PolicyError, match='add trains="usual", by which DP-SGD is priced'):
        fit(means("pretrain"), federation, clip=None, noise=0.0)


def test_a_training_without_the_noise_that_it_is_priced_by_is_refused(
    federation: Federation,
) -> None:
    kind = means("trained_without_noise", lambda noise: FOLLOWS)
    with pytest.raises(PolicyError, match='another plan than trains="usual" is priced by'):
        fit(kind, federation, dp_unit="example")


def test_an_update_without_noise_does_not_follow_from_a_training_without_noise(
    federation: Federation,
) -> None:
    kind = means("trained_without_noise", lambda noise: FOLLOWS)
    with pytest.raises(PolicyError, match=r"priced as following .* reads cohort\.train"):
        fit(kind, federation)


def test_what_is_read_between_calls_is_not_the_servers(federation: Federation) -> None:
    access = DataAccess()
    with (
        pytest.raises(PolicyError, match="leave the declaration out"),
        access.during("m", may_read=False, may_train=False),
    ):
        access.read("inputs")
    access.read("inputs")
    fitted = fit(means("right"), federation)  # scores are of the clients' test data
    assert np.isfinite([row["accuracy"] for row in fitted.history_]).all()


class Unclipped:
    """Stage in the place of a clip, which clips nothing."""

    kind = Kind.CLIP
    name = "unclipped"

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        return rows

    def inverse(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        return rows


def test_noise_scales_rows_that_a_clip_left_too_long() -> None:
    exact = NoiseStreams(lambda client: bytes(32), "run", bounds_rows=True)
    row = torch.full((4,), 50.0)
    noisy = exact.noised(0, "update", 1, row, 1e-3, 1.0)
    torch.testing.assert_close(noisy, row / 100, atol=0.01, rtol=0)
    assert torch.equal(row, torch.full((4,), 50.0))


def test_rows_of_clipped_norm_are_left_as_they_are() -> None:
    bounded = NoiseStreams(lambda client: bytes(32), "run", bounds_rows=True)
    free = NoiseStreams(lambda client: bytes(32), "run")
    row = torch.nn.functional.normalize(torch.arange(1.0, 9.0), dim=0)
    one = bounded.noised(0, "update", 1, row, 1.0, 1.0)
    assert torch.equal(one, free.noised(0, "update", 1, row, 1.0, 1.0))


def test_a_stage_that_does_not_clip_releases_no_longer_rows(federation: Federation) -> None:
    def stages(self: Any, config: Any) -> tuple[Any, ...]:
        return (Unclipped(), Noise(1.0, float(config["noise"]))) if config["noise"] else ()

    kind = type("Unbounded", (means("right"),), {"stages": stages})
    # so much training that updates are longer than 1, and so little noise that it would show
    trained = {"rounds": 1, "epochs": 20, "lr": 1.0, "noise": 1e-3}
    fitted = fit(kind, federation, **trained)
    sums = [o.content for o in fitted.verb_outcomes() if o.method == "contribute"]
    lengths = torch.cat([one.delta.table.norm(dim=1) for one in sums])
    assert float(lengths.max()) <= len(federation) * 1.1


def test_receipts_are_those_of_one_context() -> None:
    streams = NoiseStreams(lambda client: bytes([client] * 32), "run")
    streams.noised(0, "a", 1, torch.zeros(2), 1.0, 1.0)
    with streams.receipts() as receipts:
        streams.noised(3, "a", 1, torch.zeros(2), 0.7, 1.0)
    streams.noised(4, "a", 1, torch.zeros(2), 1.0, 1.0)
    assert [(receipt.client, receipt.multiplier) for receipt in receipts] == [(3, 0.7)]
