"""What a client method reads is held to what it declares, and its receipts are its deeds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import numpy as np
import pytest
import torch
from cases import FULL, two_clusters

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.receipts import GAUSSIAN, MOST, Receipt
from securecluster.privacy.dp.gaussian_mechanism import Noise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.pipeline import Kind
from securecluster.protocols.authoring import (
    GATHER,
    Ack,
    AveragingState,
    CallContext,
    ClusterOnce,
    ClusterOnceState,
    Empty,
    PendingUpdates,
    Real,
    Rows,
    Run,
    ServerChannel,
    SignatureClient,
    TrainingClient,
    answers,
    linkage_clusters,
    nearest,
    protocol,
)
from securecluster.runtime.release_guard import ReleaseGuard, Traces, _training_receipts
from securecluster.runtime.release_policy import KEPT
from securecluster.training.config import LocalTraining
from securecluster.training.data_access import DataAccess, Reads, Training

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

    @answers(GATHER, unmasked=("mean",))
    def right(self, context: CallContext, query: Empty) -> SampleMean:
        return SampleMean(Rows(context.release(self.means(context))))

    @answers(GATHER, unmasked=("mean",))
    def without(self, context: CallContext, query: Empty) -> SampleMean:
        return SampleMean(Rows(self.means(context)))

    @answers(GATHER, unmasked=("mean",))
    def half(self, context: CallContext, query: Empty) -> SampleMean:
        noise = context.noise.noise / 2 if context.noise else 0.0
        return SampleMean(Rows(context.release(self.means(context), noise=noise)))

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
        return self.after(context, LocalTraining(0.1, 1, 20))

    @answers(GATHER, unmasked=("mean",), trains="usual")
    def trained_with_noise(self, context: CallContext, query: Empty) -> SampleMean:
        return self.after(context, self.training)

    @answers(GATHER, unmasked=("mean",), trains="usual")
    def trained_and_read(self, context: CallContext, query: Empty) -> SampleMean:
        self.means(context)
        return self.after(context, self.training)

    @answers(GATHER, unmasked=("mean",), trains="usual")
    def trained_twice(self, context: CallContext, query: Empty) -> SampleMean:
        self.after(context, self.training)
        return self.after(context, replace(self.training, noise=2 * self.training.noise))

    @answers(GATHER, unmasked=("mean",), trains="usual")
    def of_the_model(self, context: CallContext, query: Empty) -> SampleMean:
        return SampleMean(Rows(self.models.select(context.positions).values[:, :64].clone()))

    @answers(GATHER, unmasked=("mean",), trains=KEPT)
    def kept(self, context: CallContext, query: Empty) -> SampleMean:
        return self.after(context, self.training)

    @answers(GATHER, unmasked=("mean",), trains=KEPT)
    def kept_again(self, context: CallContext, query: Empty) -> SampleMean:
        return self.after(replace(context, step=1), self.training)

    @answers(GATHER, unmasked=("mean",), trains=KEPT)
    def kept_of_everyone(self, context: CallContext, query: Empty) -> SampleMean:
        everyone = tuple(range(len(self.cohort.ids)))
        updates = self.cohort.train(
            Rows(self.cohort.start[None], (0,) * len(everyone)), everyone, self.training, 1
        )
        return SampleMean(Rows(updates[list(context.positions), :64].clone()))

    @answers(GATHER, unmasked=("mean",), trains="usual")
    def with_momentum(self, context: CallContext, query: Empty) -> SampleMean:
        return self.after(context, replace(self.training, momentum=0.5, keep_momentum=True))

    @answers(GATHER, unmasked=("mean",))
    def of_everyone(self, context: CallContext, query: Empty) -> SampleMean:
        self.cohort.inputs(0)
        return SampleMean(Rows(context.release(self.means(context))))

    def after(self, context: CallContext, plan: LocalTraining) -> SampleMean:
        start = Rows(self.cohort.start[None], (0,) * len(context.positions))
        updates = self.cohort.train(start, context.positions, plan, context.step)
        return SampleMean(Rows(updates[:, :64].clone()))

    @answers(GATHER, private=False)
    def look(self, context: CallContext, query: Empty) -> Ack:
        self.means(context)
        return Ack()


@protocol
class Means(ClusterOnce):
    """Clusters by means."""

    name: ClassVar[str] = "means-under-guard"
    client: ClassVar[type[TrainingClient]] = MeanClient
    signature_method: ClassVar[Any] = MeanClient.right

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        distance = torch.cdist(signatures, signatures).double().numpy()
        return linkage_clusters(distance, "average", count=2)

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        distance = torch.cdist(newcomers, signatures).double().numpy()
        return nearest(distance, labels, "average")


def means(method: str) -> type[Means]:
    """Return the protocol whose signatures are those of another client method."""
    return type("Means", (Means,), {"signature_method": getattr(MeanClient, method)})


def fit(kind: type[Means], federation: Federation, **params: Any) -> Any:
    small: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear"}
    return kind(**{**small, "clip": 1.0, "noise": Z, **params}).fit(federation, FULL)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(4, 20)


def of_means(fitted: Any) -> list[tuple[str, float | None, tuple[str, ...]]]:
    """Return mechanism, noise multiplier and fields of the events of means."""
    method = fitted.signature_method.__name__
    events = [event for event in fitted.ledger_.events if event.method == method]
    return [(event.mechanism, event.noise_multiplier, event.fields) for event in events]


def test_the_price_is_that_of_the_noise_that_was_drawn(federation: Federation) -> None:
    assert of_means(fit(means("right"), federation)) == [("gaussian", Z, ("mean",))]
    assert of_means(fit(means("half"), federation)) == [("gaussian", Z / 2, ("mean",))]


def test_what_was_not_released_is_exact(federation: Federation) -> None:
    fitted = fit(means("without"), federation)
    assert of_means(fitted) == [("exact", None, ("mean",))]
    assert fitted.ledger_.epsilon == float("inf")


def test_an_update_follows_from_training_with_noise(federation: Federation) -> None:
    fitted = fit(means("trained_with_noise"), federation, dp_unit="example")
    assert of_means(fitted) == [("dp-sgd", Z, ()), ("free", None, ("mean",))]


def test_every_training_of_a_call_is_priced_as_it_was(federation: Federation) -> None:
    fitted = fit(means("trained_twice"), federation, dp_unit="example")
    assert of_means(fitted) == [("dp-sgd", Z, ()), ("dp-sgd", 2 * Z, ()), ("free", None, ("mean",))]


@pytest.mark.parametrize("unit", ["client", "example"])
def test_an_update_of_a_training_without_noise_is_exact(unit: str, federation: Federation) -> None:
    fitted = fit(means("trained_without_noise"), federation, dp_unit=unit)
    assert of_means(fitted) == [("exact", None, ("mean",))]


def test_nothing_follows_from_training_where_data_were_read_as_well(federation: Federation) -> None:
    fitted = fit(means("trained_and_read"), federation, dp_unit="example")
    assert of_means(fitted) == [("dp-sgd", Z, ()), ("exact", None, ("mean",))]


class LooksFirst(Means):
    """Its clients read their data in a call before."""

    signature_method: ClassVar[Any] = MeanClient.of_the_model

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        net.gather(MeanClient.look, Empty(), to=net.clients[:2])
        return super().run_server(net, run)


def test_a_model_follows_from_training_unless_its_client_has_read_data(
    federation: Federation,
) -> None:
    fitted = fit(means("of_the_model"), federation, dp_unit="example")
    assert of_means(fitted) == [("free", None, ("mean",))]
    informed = fit(LooksFirst, federation, dp_unit="example")
    assert of_means(informed) == [("exact", None, ("mean",)), ("free", None, ("mean",))]
    exact, free = (event.ids for event in informed.ledger_.events if event.fields == ("mean",))
    assert (exact, free) == ((0, 1), (2, 3))


def test_what_clients_have_read_is_known_after_a_resumption(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(self: Any, *given: Any) -> Any:
        raise KeyboardInterrupt

    class LooksEarlier(LooksFirst):
        def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
            def look() -> AveragingState:
                net.gather(MeanClient.look, Empty(), to=net.clients[:2])
                return AveragingState([0], PendingUpdates.start(1, fresh=False))

            run.once("look", look, AveragingState)
            return Means.run_server(self, net, run)

    made = LooksEarlier(
        rounds=1, epochs=1, model="linear", clip=1.0, noise=Z, dp_unit="example", mask="none"
    )
    with monkeypatch.context() as early, pytest.raises(KeyboardInterrupt):
        early.setattr(Means, "cluster", killed)
        made.fit(federation, FULL, folder=tmp_path)
    resumed = made.fit(federation, FULL, folder=tmp_path)
    assert of_means(resumed) == [("exact", None, ("mean",)), ("free", None, ("mean",))]


class ReadingClient(MeanClient):
    """Clients that keep something of their data from the beginning."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.first = self.cohort.inputs(0)


def test_what_clients_read_when_they_are_built_is_known(federation: Federation) -> None:
    kind = type("Reading", (means("of_the_model"),), {"client": ReadingClient})
    assert of_means(fit(kind, federation, dp_unit="example")) == [("exact", None, ("mean",))]


class AsksTwice(Means):
    """Its clients send their signatures twice."""

    def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
        net.gather(self.signature_method, Empty(), to=net.clients)
        return super().run_server(net, run)


@pytest.mark.parametrize(("method", "trainings"), [("kept", 2), ("kept_again", 1)])
def test_a_reply_that_follows_from_a_kept_training_pays_for_it_once(
    method: str, trainings: int, federation: Federation
) -> None:
    kind = type("Kept", (AsksTwice,), {"signature_method": getattr(MeanClient, method)})
    released = of_means(fit(kind, federation, dp_unit="example"))
    assert Counter(mechanism for mechanism, *_ in released) == {"dp-sgd": trainings, "free": 2}


@pytest.mark.parametrize("method", ["of_everyone", "kept_of_everyone"])
def test_a_method_uses_data_of_the_clients_that_are_called(
    method: str, federation: Federation
) -> None:
    class AsksOne(Means):
        def run_server(self, net: ServerChannel, run: Run) -> ClusterOnceState:
            net.gather(getattr(MeanClient, method), Empty(), to=net.clients[1:])
            return super().run_server(net, run)

    sentence = (
        r"for a client that was not called \(at position 0\): take those of context\.positions"
    )
    with pytest.raises(PolicyError, match=sentence):
        fit(AsksOne, federation, dp_unit="example")


def test_momentum_does_not_carry_private_training_on(federation: Federation) -> None:
    with pytest.raises(UsageError, match=r"a training whose reply was lost, and is not counted"):
        fit(means("with_momentum"), federation, dp_unit="example")


class ReleasesOften(MeanClient):
    """Clients that release more in a call than a reply has receipts for."""

    @answers(GATHER, unmasked=("mean",))
    def often(self, context: CallContext, query: Empty) -> SampleMean:
        rows = [context.release(self.means(context)) for _ in range(MOST + 1)]
        return SampleMean(Rows(context.postprocess(lambda *all_rows: sum(all_rows), *rows)))


def test_a_reply_has_as_many_releases_as_its_frame_takes(federation: Federation) -> None:
    kind = type(
        "Often", (Means,), {"client": ReleasesOften, "signature_method": ReleasesOften.often}
    )
    with pytest.raises(UsageError, match=r"often makes more than 64 releases in a call"):
        fit(kind, federation)


def test_a_method_that_tells_nothing_new_reads_no_data(federation: Federation) -> None:
    with pytest.raises(PolicyError, match=r"reads cohort\.inputs: leave the declaration out"):
        fit(means("derived"), federation, clip=None, noise=0.0)


def test_a_training_that_is_not_declared_is_refused(federation: Federation) -> None:
    with pytest.raises(PolicyError, match='add trains="usual", by which DP-SGD is priced'):
        fit(means("pretrain"), federation, clip=None, noise=0.0)


def test_a_training_of_a_fixed_number_of_steps_has_no_price() -> None:
    plan = LocalTraining(0.1, 1, 10, clip=1.0, noise=Z)
    (receipt,) = _training_receipts([Training(plan, (0,), 1)], ())
    assert (receipt.multiplier, receipt.epochs, receipt.batch) == (Z, 1, 10)
    with pytest.raises(PolicyError, match=r"priced by its epochs.*fixed number of steps"):
        _training_receipts([Training(replace(plan, steps=5), (0,), 1)], ())


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


def test_no_number_is_so_large_that_it_swallows_its_noise() -> None:
    streams = NoiseStreams(lambda client: bytes(32), "run")
    for dtype in (torch.float32, torch.float64):
        row = torch.full((64,), 1e20, dtype=dtype)
        noisy = streams.noised(0, "losses", 1, row, 1.0, 1.0)
        # at the largest number itself half of the draws are told apart, and no exact one
        assert len(noisy.unique()) > 16
        assert torch.isfinite(noisy).all()


def test_draws_are_logged_within_one_context() -> None:
    streams = NoiseStreams(lambda client: bytes([client] * 32), "run")
    streams.noised(0, "a", 1, torch.zeros(2), 1.0, 1.0)
    with streams.logged() as drawn:
        streams.noised(3, "a", 1, torch.zeros(2), 0.7, 1.0)
    streams.noised(4, "a", 1, torch.zeros(2), 1.0, 1.0)
    assert drawn == [(3, 0.7)]


def training(noise: float, step: int = 3) -> Training:
    plan = LocalTraining(lr=0.1, epochs=1, batch_size=8, clip=1.0, noise=noise)
    return Training(plan, (0,), step)


PRIVATE, PLAIN = training(1.0), training(0.0)
PAID = 3  # the step of PRIVATE


# declarations: of replies with fields, of models that stay and have a receipt, and that have none
USUAL, PAID_FOR, STAYS = ("usual", True), (KEPT, True), (KEPT, False)


@pytest.mark.parametrize(
    ("trainings", "declared", "paid", "present", "informed", "trained"),
    [
        # plain training leaves a state that follows from data, and private training does not
        ([PLAIN], USUAL, -1, ["delta"], True, -1),
        ([PRIVATE], USUAL, -1, ["delta"], False, PAID),
        ([PRIVATE, PLAIN], USUAL, -1, ["delta"], True, PAID),
        ([], USUAL, -1, ["delta"], False, -1),
        ([PRIVATE], PAID_FOR, -1, [], False, PAID),
        ([PRIVATE], STAYS, -1, [], True, -1),
        ([PLAIN], STAYS, -1, [], True, -1),
        ([], STAYS, -1, [], False, -1),
        # what leaves has receipts of its own
        ([PRIVATE], PAID_FOR, PAID, ["delta"], False, PAID),
        ([PRIVATE], STAYS, -1, ["delta"], False, -1),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_a_state_follows_from_data_unless_all_of_it_was_paid_for(
    trainings: list[Training],
    declared: tuple[str, bool],
    paid: int,
    present: list[str],
    informed: bool,
    trained: int,
    before: bool,
) -> None:
    trains, private = declared
    release: Any = SimpleNamespace(trains=trains, private=private, derived=False)
    guard = ReleaseGuard(SimpleNamespace(), DataAccess(), {}, True)  # type: ignore[arg-type]
    traces = Traces("train", release, Reads())
    outcome = guard._outcome(traces, trainings, (), before, paid, present)
    assert outcome.informed is (informed or before)
    assert outcome.trained == trained


def test_a_state_follows_from_data_that_was_read() -> None:
    release: Any = SimpleNamespace(trains="usual", private=True, derived=False)
    guard = ReleaseGuard(SimpleNamespace(), DataAccess(), {}, True)  # type: ignore[arg-type]
    traces = Traces("train", release, Reads(data={"inputs"}))
    assert guard._outcome(traces, [PRIVATE], (), False, -1, []).informed


OF_SIZE = Receipt(GAUSSIAN, ("size",), 2.0)


@pytest.mark.parametrize(
    ("trainings", "of_releases", "informed", "expected"),
    [
        # a field with noise of its own does not follow from the training as well
        ([PRIVATE], (OF_SIZE,), False, [("dp-sgd", ("delta",)), ("gaussian", ("size",))]),
        ([PRIVATE], (), False, [("dp-sgd", ("delta", "size"))]),
        ([], (OF_SIZE,), False, [("follows", ("delta",)), ("gaussian", ("size",))]),
        # what data beside private training went into has no receipt: it is exact
        ([PRIVATE, PLAIN], (OF_SIZE,), False, [("dp-sgd", ()), ("gaussian", ("size",))]),
        ([], (OF_SIZE,), True, [("gaussian", ("size",))]),
        ([PLAIN], (), False, []),
    ],
)
def test_each_field_of_a_reply_has_the_receipt_of_what_it_follows_from(
    trainings: list[Training],
    of_releases: tuple[Receipt, ...],
    informed: bool,
    expected: list[tuple[str, tuple[str, ...]]],
) -> None:
    release: Any = SimpleNamespace(trains="usual", private=True, derived=False)
    guard = ReleaseGuard(SimpleNamespace(), DataAccess(), {}, True)  # type: ignore[arg-type]
    traces = Traces("train", release, Reads())
    outcome = guard._outcome(traces, trainings, of_releases, informed, -1, ["delta", "size"])
    assert [(receipt.mechanism, receipt.fields) for receipt in outcome.receipts] == expected
