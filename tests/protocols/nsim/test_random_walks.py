"""Synthetic users keep to the declared format."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from securecluster.errors import UsageError
from securecluster.protocols.nsim.random_walks import Format, RandomWalk, generated, windows


def walks(seed: int, form: Format, users: int = 40) -> list[Any]:
    return RandomWalk()(form, users, np.random.default_rng(seed))


@pytest.mark.parametrize(
    "form",
    [Format(), Format(coordinates=1, samples=(20, 60)), Format(coordinates=3, window=4, step=0.2)],
)
def test_walks_keep_to_the_format(form: Format) -> None:
    made = walks(0, form)
    sizes = np.array([len(path) for path in made])
    assert form.samples[0] <= sizes.min() < sizes.max() <= form.samples[1]
    for path in made:
        assert path.shape[1] == form.coordinates
        assert 0 <= path.min() <= path.max() <= 1
        assert np.linalg.norm(np.diff(path, axis=0), axis=1).max() <= form.step * (1 + 1e-9)


def test_users_differ_in_pace_and_some_go_back_and_stay() -> None:
    made = [path for path in walks(1, Format(), users=80) if len(path) > 250]
    steps = [np.linalg.norm(np.diff(path, axis=0), axis=1) for path in made]
    pace = np.array([np.median(own[own > 0]) for own in steps])
    assert pace.max() > 4 * pace.min()
    stays = np.array([(own == 0).mean() for own in steps])
    # those between places; who strolls never stands still
    assert 0.25 < (stays > 0.01).mean() < 0.75
    assert np.mean([np.ptp(path, axis=0).max() for path in made]) > 0.3
    homes = [path[0] for path, own in zip(made, stays, strict=True) if own > 0.01]
    back = [
        (np.abs(path[30:] - home).max(1) < 1e-9).any()
        for path, home in zip(
            (m for m, s in zip(made, stays, strict=True) if s > 0.01), homes, strict=True
        )
    ]
    assert np.mean(back) > 0.3


def test_parameters_of_walks_matter() -> None:
    straight = RandomWalk(between=1.0, bend=0.0, central=0.0, spread=0.2, stay=0)(
        Format(), 30, np.random.default_rng(0)
    )
    wild = RandomWalk(between=0.0, memory=(0.0, 0.1))(Format(), 30, np.random.default_rng(0))

    def turning(path: np.ndarray) -> float:
        move = np.diff(path, axis=0)
        return float(np.mean(np.sum(move[:-1] * move[1:], axis=1) > 0))

    assert np.mean([turning(path) for path in straight]) > 0.9
    assert np.mean([turning(path) for path in wild]) < 0.65


def test_the_same_draw_makes_the_same_users() -> None:
    for one, other in zip(walks(2, Format()), walks(2, Format()), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not np.array_equal(walks(2, Format())[0][:100], walks(3, Format())[0][:100])


def test_windows_are_the_past_positions_and_the_next() -> None:
    path = np.arange(14.0).reshape(7, 2)
    x, y = windows(path, 3)
    assert x.dtype == y.dtype == np.float32
    for n in range(4):
        np.testing.assert_array_equal(x[n], path[n : n + 3])
        np.testing.assert_array_equal(y[n], path[n + 3])
    assert len(x) == len(y) == 4
    (made,) = generated(
        lambda form, users, draw: [path],
        Format(window=3, samples=(4, 9)),
        1,
        np.random.default_rng(0),
    )
    np.testing.assert_array_equal(made[0], x)
    np.testing.assert_array_equal(made[1], y)


def test_a_generator_may_give_samples_themselves() -> None:
    own = (np.zeros((4, 3), np.int64), np.ones((4, 3), np.int64))
    (made,) = generated(lambda form, users, draw: [own], Format(), 1, np.random.default_rng(0))
    assert made[0] is own[0]
    assert made[1] is own[1]


def test_a_format_is_public_json() -> None:
    assert json.loads(json.dumps(Format().as_json()))["samples"] == [150, 600]
    for wrong in (
        {"samples": (10, 100)},
        {"samples": (200, 100)},
        {"coordinates": 0},
        {"window": 0},
    ):
        with pytest.raises(UsageError, match="positions"):
            Format(**wrong)
    with pytest.raises(UsageError, match="step = 0"):
        Format(step=0)


@pytest.mark.parametrize(
    "wrong",
    [
        [np.zeros((20, 2))],
        [np.zeros((20, 3))] * 2,
        [np.zeros((10, 2))] * 2,
        [np.full((20, 2), np.nan)] * 2,
        None,
    ],
)
def test_what_a_users_own_generator_gives_is_checked(wrong: Any) -> None:
    with pytest.raises(UsageError, match="the generator"):
        generated(lambda form, users, draw: wrong, Format(), 2, np.random.default_rng(0))
