"""Runs whose clients take part in secure sums by cohorts: no sums can be solved for one client."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, node_each, serve, two_clusters, variant

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call, Picks, format_ids
from securecluster.parties.deployment import Deployment
from securecluster.privacy.cohorts import RowSpace
from securecluster.protections.secure_sums.messages import LostMembers
from securecluster.protocols import IFCA, FedAvg, Hidden, Settings
from securecluster.runtime.endpoint import SUM
from securecluster.statements import privacy_section

TINY: dict[str, Any] = {"rounds": 8, "epochs": 1, "model": "linear", "mask": "none"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(8, 10)


def make(name: str = "fedavg", **params: Any) -> Any:
    small: dict[str, Any] = {**TINY, "aggregation": "secagg"}
    if name in ("hidden", "ifca"):
        small["k"] = 2
    if name == "ifca":
        small["starts"] = 1
    kinds = {"fedavg": FedAvg, "hidden": Hidden, "ifca": IFCA}
    if name in kinds:
        return kinds[name](**{**small, **params})
    return variant(name, **{**small, **params})


def lists_of(fitted: Any) -> list[list[int]]:
    """The clients of every sum that the server read, as a replay of the transcript tells them."""
    return [
        sorted(group)
        for outcome in fitted.verb_outcomes()
        if outcome.verb == SUM
        for group in outcome.groups
        if group
    ]


# clients that train alone, since few others are in their block, may do no better than chance
@pytest.mark.filterwarnings("ignore:after 12 rounds the models of")
@pytest.mark.parametrize("name", ["fedavg", "hidden", "ifca", "mrmtl", "flhc"])
@pytest.mark.parametrize(("share", "dropout"), [(0.5, 0.0), (1.0, 0.3)])
def test_sums_of_a_run_can_be_solved_for_nobody_with_cohorts_and_for_many_without(
    name: str, share: float, dropout: float, federation: Federation
) -> None:
    found = {}
    for size in (None, 0):
        made = make(name, participation=share, cohort_size=size, rounds=12)
        fitted = made.fit(federation, Settings(transcript="full", dropout=dropout))
        lists = lists_of(fitted)
        found[size] = RowSpace(8, lists).solvable
        kept = fitted.kept_.learned.network.sum_lists
        assert RowSpace(8, kept).solvable == found[size]
        assert len(kept) == RowSpace(8, lists).rank
    assert found[None] == []
    assert len(found[0]) >= 4


def test_cohorts_change_nothing_where_all_clients_reply(federation: Federation) -> None:
    whole = make().fit(federation, FULL)
    single = make(cohort_size=0).fit(federation, FULL)
    assert torch.equal(whole.client_models_.values, single.client_models_.values)
    assert [e.method for e in whole.transcript_.entries] == [
        e.method for e in single.transcript_.entries
    ]


def test_a_share_of_the_cohorts_is_asked_and_each_client_as_often_as_participation_says() -> None:
    many = two_clusters(20, 4)
    fitted = make(participation=0.7, cohort_size=5, rounds=100).fit(many, FULL)
    lists = lists_of(fitted)
    assert {len(members) for members in lists} <= {10, 15}
    assert np.mean([len(members) for members in lists]) / 20 == pytest.approx(0.7, abs=0.05)


def test_a_cohort_that_lost_a_member_waits_and_the_others_go_on(federation: Federation) -> None:
    made = make(cohort_size=2, rounds=2)
    cohorts = Deployment(made, made.config(federation, "float64")).cohorts().of(range(8))
    gone = cohorts[1][0]

    def lost(call: Call) -> set[int]:
        return {gone} if call.verb == SUM and call.round == 1 else set()

    served = serve(made, federation, lost)
    missing = list(cohorts[1])
    assert served.net.state.sum_lists[0] == [i for i in range(8) if i not in missing]
    assert served.net.state.lost == {client: [1] for client in missing}

    def others(call: Call) -> set[int]:
        return set(missing) if call.verb == SUM and call.round == 1 else set()

    plain = serve(make(aggregation="plain", rounds=2), federation, others)
    torch.testing.assert_close(
        served.endpoint.client.models.values, plain.endpoint.client.models.values, rtol=0, atol=1e-6
    )


def test_a_client_that_reveals_no_pads_keeps_its_cohort_out(federation: Federation) -> None:
    made = make(cohort_size=2, rounds=1)
    cohorts = Deployment(made, made.config(federation, "float64")).cohorts().of(range(8))

    def lost(call: Call) -> set[int]:
        gone = {cohorts[0][0]} if call.verb == SUM else set()
        return gone | ({cohorts[1][0]} if call.method == "reveal_pads" else set())

    served = serve(made, federation, lost)
    missing = {*cohorts[0], *cohorts[1]}
    # five of eight would survive, and four are no majority: nothing is read
    assert served.net.state.sum_lists == [] or served.net.state.sum_lists == [
        [i for i in range(8) if i not in missing]
    ]
    assert not missing & {i for members in served.net.state.sum_lists for i in members}


def nodes_before_rows(
    federation: Federation, **params: Any
) -> tuple[Callable[..., Any], dict[str, Call], list[tuple[int, ...]]]:
    """Nodes that have exchanged their keys, the honest server's calls, and the cohorts."""
    made = make(rounds=1, **params)
    honest = serve(made, federation)
    calls: dict[str, Call] = {}
    for k, entry in enumerate(honest.transcript.entries):
        calls.setdefault(entry.method, honest.transcript.content(k)[0])
    nodes = node_each(made, federation, DOUBLE)

    def ask(client: int, call: Call, **changes: Any) -> Any:
        own = call.select([call.to.index(client)])
        return nodes[client].answer(dataclasses.replace(own, **changes))

    for method in ("sum_offer", "sum_keys"):
        for client in range(len(nodes)):
            ask(client, calls[method])
    config = made.config(federation, "float64")
    rule = Deployment(made, config).cohorts()
    return ask, calls, [] if rule is None else rule.of(range(8))


def test_a_client_refuses_a_list_with_a_part_of_any_cohort(federation: Federation) -> None:
    ask, calls, cohorts = nodes_before_rows(federation, cohort_size=2)
    row = calls["contribute"]
    own = cohorts[0]
    parts = [i for i in range(8) if i != cohorts[1][0]]
    without_its_own = [i for i in range(8) if i != own[1]]
    for members in (parts, without_its_own):
        with pytest.raises(PolicyError, match="part of a cohort"):
            ask(own[0], row, group=(format_ids(members),), members=(len(members),))
    union = sorted({*own, *cohorts[2]})
    ask(own[0], row, group=(format_ids(union),), members=(4,))


def test_a_client_reveals_nothing_for_survivors_with_a_part_of_a_cohort(
    federation: Federation,
) -> None:
    ask, calls, cohorts = nodes_before_rows(federation, cohort_size=2)
    for client in range(8):
        ask(client, calls["contribute"])
    own = cohorts[0][0]

    def lost(*ids: int) -> LostMembers:
        table = torch.tensor(ids, dtype=torch.int64)
        return LostMembers("contribute", Picks(table, (tuple(range(len(ids))),)))

    shares = calls["reveal_shares"]
    with pytest.raises(PolicyError, match="part of a cohort"):
        ask(own, shares, method="reveal_pads", query=lost(cohorts[1][0]))
    with pytest.raises(PolicyError, match="part of a cohort"):
        query = dataclasses.replace(
            shares.select([shares.to.index(own)]).query, lost=lost(cohorts[1][0]).lost
        )
        ask(own, shares, query=query)
    ask(own, shares, method="reveal_pads", query=lost(*sorted(cohorts[1])))


def test_without_cohorts_clients_take_lists_as_they_come(federation: Federation) -> None:
    ask, calls, _ = nodes_before_rows(federation, cohort_size=0)
    ask(0, calls["contribute"], group=("0-6",), members=(7,))


def test_the_report_says_how_many_clients_can_be_solved_for(federation: Federation) -> None:
    def over_rounds(**params: Any) -> Any:
        return privacy_section.section(make(**params).fit(federation).result_).get("over_rounds")

    assert over_rounds(aggregation="plain") is None
    whole = over_rounds(participation=0.5)
    assert (whole["rank"], whole["solvable"]) == (2, 0)
    assert "0 of 8 clients can be solved for from sums over rounds" in whole["sentence"]
    single = over_rounds(participation=0.5, cohort_size=0, rounds=20)
    assert (single["rank"], single["solvable"]) == (8, 8)
    assert "8 of 8 clients can be solved for from sums over rounds" in single["sentence"]


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"cohort_size": 1}, "2 clients or more, and 0 is no cohorts"),
        ({"cohort_size": -1}, "whole number from 0"),
        ({"cohort_size": 2.5}, "whole number from 0"),
        ({"cohort_size": 4, "aggregation": "plain"}, "take aggregation secagg"),
        ({"cohort_size": 9}, "9 is more than the 8 clients"),
    ],
)
def test_cohorts_that_cannot_be_are_refused(
    params: dict[str, Any], words: str, federation: Federation
) -> None:
    with pytest.raises(UsageError, match=words):
        make(**params).fit(federation)


@pytest.mark.parametrize("name", ["hidden", "ifca"])
def test_exact_weights_of_plain_sums_are_refused(name: str, federation: Federation) -> None:
    with pytest.raises(UsageError, match="take aggregation secagg, or leave exact_weights out"):
        make(name, aggregation="plain", exact_weights=True).fit(federation)


def test_runs_of_plain_sums_have_no_option_of_cohorts(federation: Federation) -> None:
    for name in ("fedavg", "hidden", "ifca"):
        config = make(name, aggregation="plain").config(federation, "float32")
        assert not {"cohort_size", "exact_weights"} & set(config)


@pytest.mark.parametrize("exact", [False, True])
def test_hidden_tells_no_numbers_of_samples_by_cluster(exact: bool, federation: Federation) -> None:
    made = make("hidden", exact_weights=exact, rounds=1)
    fitted = made.fit(federation, FULL)
    (blocks,) = [o.content for o in fitted.verb_outcomes() if o.method == "contribute_counted"]
    assert (blocks.weight is not None) == exact
    told = " ".join(privacy_section.section(fitted.result_)["server_view"])
    assert ("exact_weights" in told) == exact
