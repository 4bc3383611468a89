"""Coordinates that one client alone moves: the column of a category, read in a secure sum."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from attacked import FULL, score_of

from securecluster import FedAvg, Federation
from securecluster.attacks.experiments import tapped
from securecluster.attacks.scoring import BETTER, CHANCE, further_scores
from securecluster.attacks.single_coordinate import LABELS, CategoryLabels, SingleCoordinates
from securecluster.audits.run_audit import Finding, adversary_of, finding_of

pytestmark = pytest.mark.filterwarnings("ignore:on their own test samples")

CLASSES, FEATURES, CLIENTS = 3, 8, 6
OPTIONS: dict[str, Any] = {
    "rounds": 1, "epochs": 1, "model": "linear", "batch_size": 100, "lr": 1.0,
    "aggregation": "secagg", "mask": "none",
}  # fmt: skip
LABEL = CategoryLabels().metric


@cache
def categories(owners: int, feature: int = 7, value: float = 1.0) -> Federation:
    """Clients, of which some have records with a category."""
    data = {}
    for i in range(CLIENTS):
        draw = np.random.default_rng(i)
        x = 0.1 + draw.random((30, FEATURES)).astype("float32")
        if owners < CLIENTS:
            x[:, feature] = 0
        if CLIENTS > owners > 0 and 1 <= i <= owners:
            x[:6, feature] = value
        data[f"c{i}"] = (x, draw.integers(0, CLASSES, 30))
    return Federation.from_arrays(data, classes=CLASSES, seed=0)


def found(owners: int, helpers: str | None = None, feature: int = 7, **options: Any) -> Finding:
    """Return what the attack by the server achieves."""
    federation = categories(owners, feature)
    fitted, taps = tapped(FedAvg(**{**OPTIONS, **options}), federation, FULL)
    adversary = adversary_of(federation.names, "server", helpers)
    return finding_of(SingleCoordinates(), fitted, federation, adversary, taps)


@pytest.mark.parametrize(
    ("owners", "options", "verdict"),
    [
        (1, {}, BETTER),
        (1, {"rounds": 3}, BETTER),
        (1, {"feature": 0}, BETTER),
        (1, {"model": "mlp"}, BETTER),
        (1, {"clip": 1.0}, BETTER),
        (1, {"aggregation": "plain"}, BETTER),
        (2, {}, CHANCE),
        (3, {}, CHANCE),
        (CLIENTS, {}, CHANCE),  # every client has every feature
        (1, {"clip": 1.0, "noise": 0.3}, CHANCE),
    ],
)
def test_the_update_of_one_client_is_read_where_it_alone_has_a_category(
    owners: int, options: dict[str, Any], verdict: str
) -> None:
    result = found(owners, **options)
    assert result.outcome == verdict, result.reason
    assert result.score is not None
    assert (result.score.value >= 1) == (verdict == BETTER)


@pytest.mark.parametrize("mask", ["permutation", "signed-permutation", "rotation"])
def test_a_mask_hides_whose_column_it_is_until_a_client_undoes_it(mask: str) -> None:
    alone = found(1, mask=mask)
    assert alone.score is None and "a mask hides which coordinate" in alone.reason
    assert found(1, "client:c0", mask=mask).outcome == BETTER
    assert found(3, "client:c0", mask=mask).outcome == CHANCE


def test_the_labels_of_the_records_with_the_category_are_counted() -> None:
    result = found(1)
    assert result.guess is not None and result.truth is not None
    told = further_scores(SingleCoordinates(), result.guess, result.truth)[LABEL]
    assert not isinstance(told, str)
    assert told.value < 0.1
    shard = categories(1).shards[1]
    true = np.bincount(np.asarray(shard.y)[np.asarray(shard.x)[:, 7] != 0], minlength=CLASSES)
    (counts,) = [row for subject, row in result.guess.details[LABELS].items() if subject[-1] == 7]
    assert np.array_equal(np.rint(counts), true)


@pytest.mark.parametrize(
    ("owners", "noise", "verdict"), [(1, 0, BETTER), (3, 0, CHANCE), (1, 1, CHANCE)]
)
def test_the_weights_of_a_unit_are_read_that_is_dead_for_all_others(
    owners: int, noise: float, verdict: str
) -> None:
    data = {}
    for i in range(CLIENTS):
        draw = np.random.default_rng(i)
        x = (1 + 0.01 * draw.random((30, FEATURES))).astype("float32")
        if i < owners:
            x[:6] *= -1  # what activates units that records of the other sign do not
        data[f"c{i}"] = (x, draw.integers(0, CLASSES, 30))
    federation = Federation.from_arrays(data, classes=CLASSES, seed=0)
    protection = {"clip": 1.0, "noise": noise} if noise else {}
    options = {**OPTIONS, "model": "mlp", **protection}
    fitted, taps = tapped(FedAvg(**options), federation, FULL)
    adversary = adversary_of(federation.names, "server")
    result = finding_of(SingleCoordinates(), fitted, federation, adversary, taps)
    assert result.score is not None, result.reason or result.trace
    assert result.score.verdict == verdict
    assert (result.score.value > 1) == (verdict == BETTER)


def test_labels_are_told_of_no_feature_that_was_not_read() -> None:
    result = found(3)
    assert result.guess is not None and result.truth is not None
    told = further_scores(SingleCoordinates(), result.guess, result.truth)[LABEL]
    assert isinstance(told, str)


def test_sums_over_different_members_tell_who_may_have_a_feature() -> None:
    # without public samples, by what moves in some sums and not in others
    federation = categories(1)
    options = {"rounds": 12, "participation": 0.5, "cohort_size": 0}
    fitted, taps = tapped(FedAvg(**{**OPTIONS, **options}), federation, FULL)
    result = score_of(SingleCoordinates(), fitted, federation, None, taps)
    assert (result.value, result.units, result.verdict) == (1, 1, BETTER)
