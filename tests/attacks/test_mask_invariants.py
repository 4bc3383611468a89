"""Property inference from what masks leave unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attacked import FULL, NO_UPDATES, digits, result_of, samples_of

from securecluster import Dirichlet, Federation
from securecluster.attacks.mask_invariants import MaskInvariants, PresenceByClass, invariants
from securecluster.privacy.masking.masks import build
from securecluster.protocols import FedAvg

ROUND: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "lr": 0.1}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Dirichlet(alpha=0.3), clients=24, samples=20)


def scored(federation: Federation, **params: Any) -> Any:
    fitted = FedAvg(**ROUND, **params).fit(federation, FULL)
    public = digits(scenario=Dirichlet(alpha=100.0), clients=2, samples=300, seed=7)
    return result_of(MaskInvariants(shadows=200), fitted, federation, samples_of(public))


def test_sorted_values_tell_which_classes_a_client_holds(federation: Federation) -> None:
    result = scored(federation, mask="permutation")
    assert result.value > 0.62 and result.beats_chance
    assert abs(result.chance - 0.5) < 0.05


def test_much_noise_brings_the_attack_to_chance(federation: Federation) -> None:
    result = scored(federation, mask="permutation", clip=1.0, noise=5.0)
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
    assert scored(federation, mask="permutation", aggregation="secagg") == NO_UPDATES
