"""Linkage across rounds: Gram rows betray who is who, whatever the mask."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attacked import FULL, digits, result_of, scene, score_of

from securecluster import Dirichlet, Federation
from securecluster.attacks import linkage
from securecluster.attacks.base import Guess
from securecluster.attacks.linkage import Linkage, LinkedClients, matched
from securecluster.attacks.scoring import score
from securecluster.errors import UsageError
from securecluster.messaging.parties import SERVER
from securecluster.protocols import CFL

CLIENTS = 8
RUN: dict[str, Any] = {"rounds": 2, "epochs": 1, "batch_size": 1000, "model": "linear"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=Dirichlet(alpha=1.0), clients=CLIENTS, samples=30)


@pytest.mark.parametrize("mask", ["permutation", "rotation"])
def test_fresh_masks_do_not_hide_who_is_who(mask: str, federation: Federation) -> None:
    fitted = CFL(**RUN, mask=mask).fit(federation, FULL)
    result = score_of(Linkage(), fitted, federation, anonymous=True, seed=4)
    assert result.value == 1.0
    assert result.chance == pytest.approx(1 / CLIENTS, abs=0.05)
    assert result.beats_chance


def test_colluding_clients_are_linked_to_nobody(federation: Federation) -> None:
    fitted = CFL(**{**RUN, "rounds": 3}, mask="rotation").fit(federation, FULL)
    both: dict[str, Any] = {"parties": [SERVER, 3], "colluders": [3], "anonymous": True, "seed": 4}
    view, knowledge, truth = scene(fitted, federation, **both)
    guess = Linkage().run(view, knowledge)
    linked = {truth.identities[label] for label in guess.values}
    assert linked == set(range(CLIENTS)) - {3}
    # every other client in two steps from round to round
    assert len(guess.values) == 2 * (CLIENTS - 1)
    assert score_of(Linkage(), fitted, federation, **both).value == 1.0


def test_a_view_that_names_the_clients_is_refused(federation: Federation) -> None:
    fitted = CFL(**RUN).fit(federation, FULL)
    with pytest.raises(UsageError, match="read its answer from a view that names the clients"):
        result_of(Linkage(), fitted, federation)


def test_one_round_has_nothing_to_link(federation: Federation) -> None:
    fitted = CFL(**{**RUN, "rounds": 1}).fit(federation, FULL)
    assert result_of(Linkage(), fitted, federation, anonymous=True) == (
        "not applicable: single updates of 3 clients in two rounds were not observed"
    )


def test_rows_match_whatever_their_order_and_rotation() -> None:
    draw = np.random.default_rng(0)
    rows = draw.normal(size=(12, 30))
    order = draw.permutation(12)
    rotation = np.linalg.qr(draw.normal(size=(30, 30)))[0]
    noise = 0.05 * draw.normal(size=rows.shape)
    pairs = matched(rows, ((rows + noise) @ rotation)[order])
    assert [int(order[column]) for _, column in sorted(pairs)] == list(range(12))


def test_where_a_client_is_missing_the_others_are_linked() -> None:
    draw = np.random.default_rng(1)
    rows = draw.normal(size=(9, 40)) * np.arange(1, 10)[:, None]
    pairs = matched(rows, rows[1:])
    assert len(pairs) == len({row for row, _ in pairs}) == len({column for _, column in pairs}) == 8
    assert sum(row == column + 1 for row, column in pairs) >= 6


@pytest.mark.parametrize("count", [1, 2, 9])
def test_the_gain_of_an_exchange_is_what_it_adds_to_the_agreement(count: int) -> None:
    draw = np.random.default_rng(count)
    own, other = (rows + rows.T for rows in draw.normal(size=(2, count, count)))
    order = np.arange(count)
    gains = linkage._exchange_gains(own, other)
    before = linkage._agreement(own, other, (order, order))
    for a, b in np.ndindex(count, count):
        exchanged = order.copy()
        exchanged[[a, b]] = exchanged[[b, a]]
        after = linkage._agreement(own, other, (order, exchanged))
        assert np.isclose(gains[a, b], after - before, atol=1e-9)


def test_unrelated_rows_match_by_chance() -> None:
    draw = np.random.default_rng(2)
    hits = []
    for _ in range(20):
        pairs = matched(draw.normal(size=(8, 30)), draw.normal(size=(8, 30)))
        hits.append(np.mean([row == column for row, column in pairs]))
    assert float(np.mean(hits)) == pytest.approx(1 / 8, abs=0.08)


def test_the_control_links_to_clients_of_the_same_round(federation: Federation) -> None:
    fitted = CFL(**RUN).fit(federation, FULL)
    view, _, truth = scene(fitted, federation, anonymous=True)
    number = truth.identities
    senders: dict[int, list[int]] = {1: [], 2: []}
    for message in view.messages("train"):
        if message.receiver == SERVER and message.sender.index is not None:
            senders[message.round].append(message.sender.index)
    calls = (tuple(senders[1]), tuple(senders[2]))
    by_client = {number[label]: label for label in calls[1]}
    links = {label: by_client[number[label]] for label in calls[0]}
    right = Guess("links", links, {"rounds": [calls]})
    result = score(LinkedClients(), right, truth)
    assert result.value == 1.0
    assert result.chance == pytest.approx(1 / CLIENTS, abs=0.05)
