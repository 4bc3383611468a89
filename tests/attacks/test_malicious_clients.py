"""Malicious clients behave as their names say, and their impact is measured as by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import FULL, two_clusters

from securecluster import Federation
from securecluster.attacks import malicious_clients
from securecluster.attacks.experiments import with_poisoned_data
from securecluster.attacks.views import knowledge_of, observed_updates, view_of
from securecluster.data.scenarios import LabelPermutation
from securecluster.errors import UsageError
from securecluster.protocols import CFL, SRFCA

ONE_ROUND: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear", "mask": "none"}
UPDATES = torch.tensor([[3.0, 4.0, 0.0], [1.0, 0.0, 2.0]])


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


@pytest.fixture(scope="module")
def honest(federation: Federation) -> list[torch.Tensor]:
    return updates(CFL(**ONE_ROUND).fit(federation, FULL))


def updates(fitted: Any) -> list[torch.Tensor]:
    return [update.row for update in observed_updates(view_of(fitted), knowledge_of(fitted))]


def draw() -> np.random.Generator:
    return np.random.default_rng(0)


def test_each_behaviour_sends_what_it_says() -> None:
    assert torch.equal(malicious_clients.sign_flipped(UPDATES, draw()), -UPDATES)
    assert torch.equal(malicious_clients.scaled(UPDATES, draw()), 10 * UPDATES)
    together = torch.tensor([[-2.0, -2.0, -1.0]] * 2)
    assert torch.equal(malicious_clients.colluding(UPDATES, draw()), together)
    # mean (2, 2, 1) and standard deviation (1, 2, 1)
    below = torch.tensor([[0.5, -1.0, -0.5]] * 2)
    assert torch.allclose(malicious_clients.inconspicuous(UPDATES, draw()), below)
    assert torch.equal(malicious_clients.inconspicuous(UPDATES[:1], draw()), UPDATES[:1])


def test_random_updates_are_as_long_as_honest_ones_and_point_elsewhere() -> None:
    rows = torch.ones(4, 1000) * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    sent = malicious_clients.random(rows, draw())
    assert torch.allclose(sent.norm(dim=1), rows.norm(dim=1))
    directions = torch.nn.functional.normalize(torch.cat([sent, rows[:1]]))
    cosines = directions @ directions.T - torch.eye(5)
    assert float(cosines.abs().max()) < 0.15


def test_a_larger_share_has_the_clients_of_a_smaller_one() -> None:
    few, many = (
        malicious_clients.choose_clients(20, 0.1, 3),
        malicious_clients.choose_clients(20, 0.4, 3),
    )
    assert (len(few), len(many)) == (2, 8)
    assert set(few) < set(many) < set(range(20))
    assert malicious_clients.choose_clients(20, 0.4, 4) != many
    assert malicious_clients.choose_clients(20, 0.0, 3) == ()


@pytest.mark.parametrize("behaviour", sorted(malicious_clients.BEHAVIOURS))
def test_honest_clients_stay_honest_and_malicious_ones_do_not(
    federation: Federation, honest: list[torch.Tensor], behaviour: str
) -> None:
    attacked = updates(
        malicious_clients.run_with(CFL(**ONE_ROUND), federation, behaviour, (1, 4), 0, FULL)
    )
    changed = []
    for client, (before, after) in enumerate(zip(honest, attacked, strict=True)):
        if not torch.equal(before, after):
            changed.append(client)
    assert changed == [1, 4]


def test_colluders_know_each_others_updates(
    federation: Federation, honest: list[torch.Tensor]
) -> None:
    attacked = updates(
        malicious_clients.run_with(CFL(**ONE_ROUND), federation, "colluding", (1, 4), 0, FULL)
    )
    assert torch.allclose(attacked[1], -(honest[1] + honest[4]) / 2)
    assert torch.equal(attacked[1], attacked[4])


def test_flipped_labels_are_trained_on_and_not_tested_on(federation: Federation) -> None:
    def by_hand(client: int, shard: Any) -> Any:
        return replace(shard, y=9 - shard.y)

    poisoned = with_poisoned_data(federation, (2,), by_hand)
    expected = CFL(**ONE_ROUND).fit(poisoned, FULL)
    attacked = malicious_clients.run_with(CFL(**ONE_ROUND), federation, "label-flip", (2,), 0, FULL)
    assert torch.equal(updates(attacked)[2], updates(expected)[2])
    assert np.array_equal(attacked.scores_, expected.scores_)


def test_an_unknown_behaviour_is_refused(federation: Federation) -> None:
    with pytest.raises(UsageError, match="unknown behaviour 'scale': did you mean 'scaled'"):
        malicious_clients.run_with(CFL(**ONE_ROUND), federation, "scale", (0,))


def test_impact_is_as_by_hand() -> None:
    # two true clusters; clients 3, 7, 8 are malicious, and 8 sits alone
    truth = [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    labels = [0, 0, 0, 0, 1, 1, 1, 1, 2, 3]
    scores = np.array([0.9, 0.8, 0.7, 0.0, 0.6, 0.5, np.nan, 0.0, 0.0, 0.1])
    found = malicious_clients.impact(labels, truth, scores, (3, 7, 8))
    assert found.accuracy == pytest.approx(3.6 / 6)
    assert found.isolated == pytest.approx(1 / 3)
    assert found.exposed == pytest.approx(6 / 7)
    # clusters 2 and 3 are set aside: one malicious client and one honest one
    assert found.recall == pytest.approx(1 / 3)
    assert found.precision == pytest.approx(1 / 2)
    assert found.cast_out == pytest.approx(1 / 7)
    assert found.clusters == 4
    assert 0 < found.ari < 1


def test_clusters_of_honest_clients_alone_count() -> None:
    found = malicious_clients.impact([0, 0, 1, 1, 1], [0, 0, 1, 1, 0], None, (4,))
    assert found.ari == 1 and found.accuracy is None
    assert (found.isolated, found.recall, found.precision) == (0, 0, None)
    control = malicious_clients.impact([0, 0, 1, 1], [0, 0, 1, 1], np.ones(4), ())
    assert (control.isolated, control.recall, control.precision) == (None, None, None)
    assert (control.ari, control.accuracy, control.exposed, control.cast_out) == (1, 1, 0, 0)


def test_a_large_malicious_cluster_casts_out_honest_clients() -> None:
    truth = [0, 0, 1, 1, 0, 0, 1]
    found = malicious_clients.impact([0, 0, 1, 1, 2, 2, 2], truth, None, (4, 5, 6))
    # the kept ones are the malicious cluster and the first of two equally large ones
    assert found.isolated == 1 and found.ari == 1
    assert (found.recall, found.precision, found.cast_out) == (0, 0, 0.5)


@pytest.mark.exhaustive
def test_under_a_mask_one_member_can_replace_the_model_of_its_cluster() -> None:
    """SR-FCA's server cannot add up masked averages, so it asks the first member for the model."""
    clients = Federation.simulate(
        "digits", scenario=LabelPermutation(2), clients=12, samples=40, seed=0
    )
    assert clients.truth is not None
    first = tuple(clients.truth.index(cluster) for cluster in (0, 1))
    accuracy = {}
    for mask in ("permutation", "none"):
        protocol = SRFCA(local_rounds=6, rounds=8, trim=0.2, mask=mask, model="mlp-32")
        attacked = malicious_clients.run_with(protocol, clients, "sign-flip", first)
        found = malicious_clients.impact(attacked.labels_, clients.truth, attacked.scores_, first)
        assert found.accuracy is not None
        accuracy[mask] = found.accuracy
    assert accuracy["permutation"] < 0.3 < 0.5 < accuracy["none"]
