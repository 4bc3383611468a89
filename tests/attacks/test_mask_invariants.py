"""Property inference from what masks leave unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Dirichlet, Federation
from securecluster.attacks.mask_invariants import MaskInvariants, PresenceByClass, invariants
from securecluster.attacks.scoring import Score, evaluate
from securecluster.attacks.views import knowledge_of, truth_of, view_of
from securecluster.privacy.masking.masks import build
from securecluster.protocols import FedAvg, Settings

ROUND: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "lr": 0.1}
FULL = Settings(transcript="full", threads=1)
SKEWED = Dirichlet(alpha=0.3)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate("digits", scenario=SKEWED, clients=24, samples=20, seed=0)


def scored(federation: Federation, **params: Any) -> Score | str:
    fitted = FedAvg(**ROUND, **params).fit(federation, FULL)
    public = Federation.simulate(
        "digits", scenario=Dirichlet(alpha=100.0), clients=2, samples=300, seed=7
    )
    x = np.concatenate([shard.x for shard in public.shards])
    y = np.concatenate([shard.y for shard in public.shards])
    view = view_of(fitted)
    knowledge = knowledge_of(fitted, samples=(x, y))
    truth = truth_of(fitted, federation, view)
    return evaluate(MaskInvariants(shadows=200), view, knowledge, truth)


def test_sorted_values_tell_which_classes_a_client_holds(federation: Federation) -> None:
    result = scored(federation, mask="permutation")
    assert isinstance(result, Score)
    assert result.value > 0.62 and result.beats_chance
    assert abs(result.chance - 0.5) < 0.05


def test_much_noise_brings_the_attack_to_chance(federation: Federation) -> None:
    result = scored(federation, mask="permutation", clip=1.0, noise=5.0)
    assert isinstance(result, Score)
    assert not result.beats_chance
    assert abs(result.value - 0.5) < 0.15


@pytest.mark.parametrize("mask", ["permutation", "signed-permutation", "rotation"])
def test_invariants_are_the_same_before_and_after_the_mask(mask: str) -> None:
    draw = np.random.default_rng(0)
    rows = torch.from_numpy(draw.normal(size=(3, 50)))
    rows[:, :5] = 0
    (stage,) = build(mask, 50)
    stage.unlock(bytes(32))  # type: ignore[attr-defined]
    padded = torch.zeros(3, stage.width(50) if mask == "rotation" else 50, dtype=torch.float64)  # type: ignore[attr-defined]
    padded[:, :50] = rows
    masked = stage.forward(padded, 1).numpy()
    assert not np.allclose(masked[:, :50], rows.numpy())
    kept = invariants(masked, mask, 50)
    assert np.allclose(kept, invariants(rows.numpy(), mask, 50))
    if mask == "rotation":  # which leaves the norm alone
        assert kept.shape == (3, 1)


def test_the_score_is_the_mean_auc_of_classes() -> None:
    units = np.zeros((4, 3, 2))
    units[:, 0] = [[1, 0], [2, 1], [3, 0], [4, 1]]  # 3 of 4 pairs in order
    units[:, 1] = [[5, 1], [4, 1], [1, 0], [0, 0]]  # all
    units[:, 2, 1] = 1  # no client is without it
    assert PresenceByClass().summary(units) == pytest.approx((0.75 + 1) / 2)


def test_where_the_attack_does_not_apply_it_says_why(federation: Federation) -> None:
    assert scored(federation, mask="none") == "not applicable: updates are not masked"
    secure = scored(federation, mask="permutation", aggregation="secagg")
    assert secure == "not applicable: no single update of a first round was observed"
