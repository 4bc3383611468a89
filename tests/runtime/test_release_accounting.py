"""What a reply costs: the training behind it, and each of its fields."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from securecluster.messaging.messages import Rows
from securecluster.privacy.dp.gaussian_mechanism import Clip, Noise
from securecluster.privacy.dp.ledger import Event
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime.endpoint import GATHER, ReleasePolicy
from securecluster.runtime.release_accounting import FieldNoise, ReleaseAccounting
from securecluster.training.config import LocalTraining

NOISY = Pipeline([Clip(1.0), Noise(1.0, 3.0)])
CALL = Event("tell", GATHER, (), 1, (0,))


@dataclass(frozen=True, eq=False)
class Two:
    """Rows that pass the pipeline, and rows that do not."""

    delta: Rows
    size: Rows


REPLY = Two(Rows(torch.ones(1, 3)), Rows(torch.ones(1)))


def test_a_field_beside_a_noisy_one_is_exact_unless_it_has_noise_of_its_own() -> None:
    release = ReleasePolicy((GATHER,), through=("delta",), unmasked=("size",))
    delta, size = ReleaseAccounting(NOISY).events(release, CALL, REPLY)
    assert (delta.fields, delta.mechanism, delta.noise_multiplier) == (("delta",), "gaussian", 3.0)
    assert (size.fields, size.mechanism, size.noise_multiplier) == (("size",), "exact", None)
    costs = ReleaseAccounting(NOISY, {"size": FieldNoise(math.inf)})
    assert [event.mechanism for event in costs.events(release, CALL, REPLY)] == ["gaussian", "free"]


def test_a_training_counts_as_kept_where_nothing_of_it_leaves() -> None:
    plan = LocalTraining(0.1, 2, 10, clip=1.0, noise=1.5)
    costs = ReleaseAccounting(Pipeline(), training={"usual": plan})
    for private in (True, False):
        release = ReleasePolicy((GATHER,), private=private, trains="usual")
        first, *fields = costs.events(release, CALL, REPLY)
        assert (first.mechanism, first.noise_multiplier, first.batch, first.epochs) == (
            "dp-sgd",
            1.5,
            10,
            2,
        )
        assert first.kept is not private
        assert len(fields) == 2 * private
