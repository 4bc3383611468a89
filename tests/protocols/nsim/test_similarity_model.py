"""The pair network: symmetric, learns what it is given, and says what it cannot take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from securecluster.clustering.metrics import pearson
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.errors import UpdateError, UsageError
from securecluster.protocols.nsim.similarity_model import (
    GRID,
    Fitted,
    PairNetworkConfig,
    SimilarityModel,
    Trial,
    fit,
    predict,
)

QUICK = PairNetworkConfig(width=32, embedding=8, head=16, dropout=0.0, steps=300)
BRIEF = replace(QUICK, steps=30)  # where only bits are compared


def places(users: int, seed: int, inputs: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows that are a linear map of a place in the unit square, and exp(−distance) as the
    similarity.
    """
    draw = np.random.default_rng(seed)
    at = draw.uniform(size=(users, 2))
    away = np.linalg.norm(at[:, None] - at[None], axis=2)
    mix = np.random.default_rng(99).normal(size=(2, inputs))
    rows = at @ mix + 0.01 * draw.normal(size=(users, inputs))
    return torch.as_tensor(rows, dtype=torch.float32), torch.as_tensor(
        np.exp(-2 * away), dtype=torch.float32
    )


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    rows, similarity = places(80, 0)
    return fit(rows, similarity, Randomness(0), search=False, grid=(QUICK,), networks=2)


@pytest.mark.always
def test_a_known_similarity_is_learned_for_users_that_were_never_seen(fitted: Fitted) -> None:
    assert fitted.pearson > 0.95 and fitted.pearson_pairs > 0.95
    rows, similarity = places(30, 1)
    predicted = predict(fitted.estimator, rows, rows)
    upper = np.triu_indices(30, 1)
    assert np.corrcoef(predicted.numpy()[upper], similarity.numpy()[upper])[0, 1] > 0.95
    assert float((predicted - similarity)[upper].abs().mean()) < 0.1


def test_what_is_learned_is_nothing_where_there_is_nothing_to_learn() -> None:
    rows, similarity = places(80, 0)
    other = torch.as_tensor(np.random.default_rng(5).normal(size=rows.shape), dtype=torch.float32)
    assert abs(fit(other, similarity, Randomness(0), grid=(QUICK,), networks=1).pearson) < 0.5


def test_swapping_the_users_changes_no_bit(fitted: Fitted) -> None:
    a, b = places(37, 2)[0], places(23, 3)[0]
    assert torch.equal(predict(fitted.estimator, a, b), predict(fitted.estimator, b, a).T)
    square = predict(fitted.estimator, a, a)
    assert torch.equal(square, square.T)
    assert square.shape == (37, 37) and 0 <= float(square.min()) <= float(square.max()) <= 1


def test_a_pair_does_not_depend_on_the_others(
    fitted: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = places(9, 2)[0], places(7, 3)[0]
    whole = predict(fitted.estimator, a, b)
    torch.testing.assert_close(predict(fitted.estimator, a[4:5], b[2:3]), whole[4:5, 2:3])
    monkeypatch.setattr("securecluster.protocols.nsim.pair_network.CHUNK", 10)
    torch.testing.assert_close(predict(fitted.estimator, a, b), whole)
    assert predict(fitted.estimator, a[:0], b).shape == (0, 7)


def test_a_fit_is_its_seed() -> None:
    rows, similarity = places(80, 0)
    packed = []
    for seed in (0, 0, 1):
        torch.rand(3)  # global draws do not count
        found = fit(rows, similarity, Randomness(seed), search=False, grid=(BRIEF,), networks=2)
        packed.append(pack(found))
    first, again, other = packed
    assert again == first
    assert other != first


def test_it_is_stored_and_read(fitted: Fitted) -> None:
    rows = places(11, 4)[0]
    back = unpack(pack(fitted), Fitted)
    assert (
        back.grid == fitted.grid and back.unseen == fitted.unseen and back.pearson == fitted.pearson
    )
    assert torch.equal(predict(back.estimator, rows, rows), predict(fitted.estimator, rows, rows))
    assert isinstance(unpack(pack(fitted.estimator), SimilarityModel), SimilarityModel)


def test_the_search_takes_what_the_validation_users_favour() -> None:
    rows, similarity = places(60, 0)
    idle = replace(QUICK, steps=1, lr=1e-9)
    found = fit(rows, similarity, Randomness(0), grid=(idle, QUICK), networks=1)
    assert [trial.plan for trial in found.grid] == [idle, QUICK]
    assert found.grid[1].pearson > found.grid[0].pearson + 0.1
    alone = fit(rows, similarity, Randomness(0), grid=(idle, QUICK), networks=1, search=False)
    assert [trial.plan for trial in alone.grid] == [idle] and alone.pearson < found.pearson


def test_the_unseen_users_are_in_no_part_of_the_fit() -> None:
    rows, similarity = places(60, 0)
    first = fit(rows, similarity, Randomness(0), grid=(BRIEF,), networks=2)
    away = first.unseen
    other, shuffled = rows.clone(), similarity.clone()
    other[away] = 7.0
    shuffled[away] = shuffled[:, away] = 0.5
    shuffled = torch.minimum(shuffled, shuffled.T)
    second = fit(other, shuffled, Randomness(0), grid=(BRIEF,), networks=2)
    assert len(away) == 12 and pack(second.estimator) == pack(first.estimator)
    assert torch.equal(first.true, similarity[away][:, away])


@pytest.mark.exhaustive
def test_held_pairs_are_not_trained_on() -> None:
    rows = places(60, 0)[0]
    memorise = replace(QUICK, width=256, embedding=64, steps=800)
    draw = np.triu(np.random.default_rng(0).uniform(size=(60, 60)), 1)
    noise = torch.as_tensor(draw + draw.T + np.eye(60), dtype=torch.float32)
    found = fit(rows, noise, Randomness(0), grid=(memorise,), networks=1)
    assert abs(found.pearson_pairs) < 0.4 and isinstance(found.grid[0], Trial)


@pytest.mark.parametrize(
    ("users", "bend", "said"),
    [
        (7, lambda s: s, "at least 8"),
        (20, lambda s: s[:-1], "a square of that size"),
        (20, lambda s: s * 2, "divide the LCSS"),
        (20, lambda s: s.tril(), "divide the LCSS"),
        (20, lambda s: s * float("nan"), "divide the LCSS"),
    ],
)
def test_what_cannot_be_fitted(users: int, bend: object, said: str) -> None:
    rows, similarity = places(users, 0)
    with pytest.raises(UsageError, match=said):
        fit(rows, bend(similarity), Randomness(0))  # type: ignore[operator]


def test_an_empty_grid() -> None:
    with pytest.raises(UsageError, match="at least one architecture"):
        fit(*places(20, 0), Randomness(0), grid=())


def test_layers_that_are_not_finite_or_of_another_length(fitted: Fitted) -> None:
    rows, similarity = places(20, 0)
    broken = rows.clone()
    broken[3, 2] = float("nan")
    with pytest.raises(UpdateError, match="user\\(s\\) 3 are not finite"):
        fit(broken, similarity, Randomness(0))
    with pytest.raises(UpdateError, match="not finite"):
        predict(fitted.estimator, rows, broken)
    with pytest.raises(UsageError, match="12 numbers"):
        predict(fitted.estimator, rows[:, :5], rows)


def test_the_smallest_number_of_users_fits() -> None:
    rows, similarity = places(8, 0)
    found = fit(rows, similarity, Randomness(0), grid=(replace(QUICK, steps=20),))
    assert len(found.unseen) == 2 and len(GRID) > 1


def test_pearson_is_scipys_and_nan_where_nothing_varies() -> None:
    from scipy.stats import pearsonr

    a, b = np.random.default_rng(0).normal(size=(2, 5, 7))
    assert pearson(a, b + a) == pytest.approx(
        float(pearsonr(a.ravel(), (b + a).ravel())[0]), abs=1e-12
    )
    assert np.isnan(pearson(a, np.ones_like(a))) and np.isnan(pearson(a[:0], b[:0]))
