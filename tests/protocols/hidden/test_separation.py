"""Whether a run says that it cut one cluster in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cases import FULL

from securecluster import Federation, Iid, Rotation
from securecluster.clustering import noisy_centres
from securecluster.protocols import Hidden
from securecluster.protocols.hidden.separation import (
    APART,
    WEAKEST,
    hardly_apart,
    separation_warning,
)


def fitted(clusters: int, **params: Any) -> Any:
    scenario: Any = Iid()
    if clusters > 1:
        scenario = Iid() + Rotation(clusters=clusters)
    clients = Federation.simulate("digits", scenario=scenario, clients=16, samples=80, seed=3)
    made = Hidden(k=4, rounds=1, model="linear", mask="none", aggregation="plain", **params)
    return made.fit(clients, FULL)


def test_four_clusters_are_told_apart_and_one_that_is_cut_in_four_is_not() -> None:
    four, one = fitted(4), fitted(1)
    assert four.agreement_["ari"] == 1.0
    assert one.state_.centres.separation < APART < four.state_.centres.separation
    assert separation_warning(four.result_.method, four.state_) is None
    text = separation_warning(one.result_.method, one.state_)
    assert text is not None and "hardly told apart" in text and "less noise" not in text


def test_the_report_has_the_separation_and_noise_is_named_where_there_is_some() -> None:
    one = fitted(1, clip=1.0, noise=0.02, placement="central")
    fields = one.result_.method.report_fields(one.state_)
    assert fields == {"separation": one.state_.centres.separation}
    text = separation_warning(one.result_.method, one.state_)
    assert text is not None and "less noise or more clients" in text


@pytest.mark.parametrize(
    ("centres", "counts", "weakest"),
    [
        # three corners of a triangle about their mean
        ([[1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]], [5, 5, 5], 1.0),
        ([[1, 0], [-0.5, 0.75**0.5], [-0.5, -(0.75**0.5)]], [5, 5, 0], 0.0),  # nobody is at one
        ([[1, 0], [-1, 0], [0, 0]], [5, 5, 5], 0.0),  # one lies between the others
        ([[1.0]], [5], 1.0),
    ],
)
def test_centres_differ_in_their_weakest_direction_or_say_nothing(
    centres: list[list[float]], counts: list[float], weakest: float
) -> None:
    found = noisy_centres.weakest_direction(np.array(centres), np.array(counts, dtype=float))
    assert found == pytest.approx(weakest, abs=1e-9)


def test_a_centre_of_noise_is_named_however_far_the_others_are_apart() -> None:
    four = fitted(4)
    found = four.state_.centres
    assert found.weakest > WEAKEST and not hardly_apart(found.separation, found.weakest)
    found.weakest = WEAKEST / 2
    text = separation_warning(four.result_.method, four.state_)
    assert text is not None and "at least one of the 4 clusters found is hardly told" in text
