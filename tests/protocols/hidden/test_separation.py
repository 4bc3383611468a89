"""Whether a run says that it cut one cluster in pieces."""

from __future__ import annotations

from typing import Any

from cases import FULL

from securecluster import Federation, Iid, Rotation
from securecluster.protocols import Hidden
from securecluster.protocols.hidden.separation import APART, separation_warning


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
