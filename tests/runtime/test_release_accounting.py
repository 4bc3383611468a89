"""What a reply costs: the training behind it, and each of its fields."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from securecluster.messaging.messages import Rows
from securecluster.messaging.receipts import FOLLOWS, GAUSSIAN, PUBLIC, TRAINING, Receipt
from securecluster.privacy.dp.gaussian_mechanism import Clip, TrustedCurator
from securecluster.privacy.dp.ledger import Event
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import GATHER
from securecluster.runtime.release_accounting import ReleaseAccounting, without_digests
from securecluster.runtime.release_policy import ReleasePolicy
from securecluster.training.config import LocalTraining

CALL = Event("tell", GATHER, (), 1, (0,))


@dataclass(frozen=True, eq=False)
class Two:
    """Rows that pass the pipeline, and rows that do not."""

    delta: Rows
    size: Rows


REPLY = Two(Rows(torch.ones(1, 3)), Rows(torch.ones(1)))


RELEASE = ReleasePolicy((GATHER,), through=("delta",), unmasked=("size",))
COSTS = ReleaseAccounting(Pipeline())
Charges = list[tuple[str, tuple[str, ...], float | None]]


def charged(*receipts: Receipt, release: ReleasePolicy = RELEASE) -> Charges:
    """Return mechanism, fields and noise multiplier of each event of a reply with receipts."""
    events = COSTS.events(release, CALL, REPLY, [receipts])
    return [(event.mechanism, event.fields, event.noise_multiplier) for event in events]


def test_a_field_that_no_receipt_names_is_exact() -> None:
    assert charged() == [("exact", ("delta",), None), ("exact", ("size",), None)]
    assert charged(Receipt(GAUSSIAN, ("delta",), 3.0)) == [
        ("gaussian", ("delta",), 3.0),
        ("exact", ("size",), None),
    ]


def test_the_first_field_that_follows_from_a_release_pays_for_it() -> None:
    assert charged(Receipt(GAUSSIAN, ("delta", "size"), 3.0)) == [
        ("gaussian", ("delta",), 3.0),
        ("free", ("size",), None),
    ]


def test_a_field_that_follows_from_two_releases_pays_for_both() -> None:
    receipts = (Receipt(GAUSSIAN, ("size",), 3.0), Receipt(GAUSSIAN, ("delta", "size"), 4.0))
    assert charged(*receipts) == [("gaussian", ("delta",), 4.0), ("gaussian", ("size",), 3.0)]


def test_what_is_public_or_follows_from_earlier_releases_costs_nothing() -> None:
    receipts = (Receipt(FOLLOWS, ("delta",)), Receipt(PUBLIC, ("size",)))
    assert charged(*receipts) == [("free", ("delta",), None), ("free", ("size",), None)]


def test_a_derived_reply_needs_no_receipts() -> None:
    derived = ReleasePolicy((GATHER,), through=("delta",), unmasked=("size",), derived=True)
    assert [mechanism for mechanism, *_ in charged(release=derived)] == ["free", "free"]


def test_a_trusted_server_pays_by_its_own_noise() -> None:
    clipped = Pipeline([Clip(1.0)])
    draws = NoiseStreams(lambda client: bytes(32), "run")
    costs = ReleaseAccounting(clipped, curator=TrustedCurator(1.0, 5.0, draws))
    delta, size = costs.events(RELEASE, CALL, REPLY)
    assert (delta.mechanism, delta.noise_multiplier) == ("gaussian", 5.0)
    assert size.mechanism == "exact"


def test_a_training_counts_as_kept_where_nothing_of_it_leaves() -> None:
    training = Receipt(TRAINING, (), 1.5, batch=10, epochs=2)
    for private in (True, False):
        release = ReleasePolicy((GATHER,), private=private, trains="usual")
        first, *fields = COSTS.events(release, CALL, REPLY, [(training,)])
        assert (first.mechanism, first.noise_multiplier, first.batch, first.epochs) == (
            "dp-sgd",
            1.5,
            10,
            2,
        )
        assert first.kept is not private
        assert len(fields) == 2 * private


def test_what_is_released_once_has_each_clients_digest() -> None:
    call = replace(CALL, ids=(3, 8))
    own = [(Receipt(GAUSSIAN, ("delta", "size"), 3.0, once=f"gram {i}"),) for i in call.ids]
    assert without_digests(own[0]) == without_digests(own[1]) != own[0]
    delta, size = COSTS.events(RELEASE, call, REPLY, own)
    assert (delta.once, size.once) == (("gram 3", "gram 8"), ())
    assert delta.select([1]).once == ("gram 8",)


def test_a_client_whose_reply_was_lost_is_taken_to_have_trained() -> None:
    plan = LocalTraining(0.1, 2, 10, clip=1.0, noise=1.5)
    costs = ReleaseAccounting(Pipeline(), training={"usual": plan})
    trains = ReleasePolicy((GATHER,), private=False, trains="usual")
    training = (Receipt(TRAINING, (), 1.5, batch=10, epochs=2),)
    assert costs.receipts_or_assumed(trains, None) == training
    assert costs.receipts_or_assumed(RELEASE, None) == ()
    # it replies to a request that was carried out before, whose reply was lost
    assert costs.receipts_or_assumed(trains, ()) == training
    own = (Receipt(TRAINING, (), 3.0, batch=5, epochs=1),)
    assert costs.receipts_or_assumed(trains, own) == own
    assert costs.receipts_or_assumed(RELEASE, ()) == ()


def test_a_reply_is_repeated_at_a_cost_unless_it_is_exact_or_free() -> None:
    noisy = (Receipt(GAUSSIAN, ("delta", "size"), 3.0),)
    free = (Receipt(FOLLOWS, ("delta", "size")),)
    assert COSTS.repeatable(RELEASE, REPLY, noisy)
    assert not COSTS.repeatable(RELEASE, REPLY, free)
    assert not COSTS.repeatable(RELEASE, REPLY, noisy[:0])
    # another training may be behind what costs nothing itself
    plan = LocalTraining(0.1, 2, 10, clip=1.0, noise=1.5)
    training = ReleaseAccounting(Pipeline(), training={"usual": plan})
    assert training.repeatable(RELEASE, REPLY, free)
