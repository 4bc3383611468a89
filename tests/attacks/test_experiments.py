"""Experiments on clients: taps change nothing, malicious clients send what they are told to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import FULL, two_clusters

from securecluster import Federation
from securecluster.attacks.experiments import (
    probe,
    tapped,
    unprotected,
    with_malicious_updates,
    with_poisoned_data,
)
from securecluster.attacks.views import knowledge_of, observed_updates, view_of
from securecluster.data.federation import Shard
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.messaging.messages import Call, Picks, Rows
from securecluster.parties.endpoints import build_client
from securecluster.parties.experiment import ATTRIBUTE, Experiment
from securecluster.protocols import CFL, FedAvg, Hidden, OneShot, Settings, Signature
from securecluster.protocols.common.messages import AverageDeltas
from securecluster.runtime.endpoint import config_hash

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
NOISY: dict[str, Any] = {"clip": 1.0, "noise": 0.5, "mask": "permutation"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


def updates(fitted: Any) -> list[torch.Tensor]:
    return [update.row for update in observed_updates(view_of(fitted), knowledge_of(fitted))]


def test_taps_are_what_a_client_computed_and_change_nothing(federation: Federation) -> None:
    plain = CFL(**SMALL, **NOISY).fit(federation, FULL)
    fitted, taps = tapped(CFL(**SMALL, **NOISY), federation, FULL)
    for row, other in zip(updates(fitted), updates(plain), strict=True):
        assert torch.equal(row, other)
    assert torch.equal(fitted.client_models_.values, plain.client_models_.values)
    first = next(tap for tap in taps if tap.method == "train" and tap.round == 1)
    twin = unprotected(CFL(**SMALL, **NOISY))
    assert (twin.mask, twin.clip, twin.noise, twin.rounds) == ("none", None, 0.0, 2)
    open_rows = torch.stack(updates(twin.fit(federation, FULL))[:6])
    d = open_rows.shape[1]
    assert first.ids == tuple(range(6))
    assert torch.equal(first.reply.delta.values[:, :d], open_rows)
    sent = torch.stack(updates(plain)[:6])
    assert float((sent - open_rows).norm()) > 1


@pytest.mark.parametrize("aggregation", ["plain", "secagg"])
def test_what_verbs_gave_a_tapped_run_is_what_its_replay_gives(
    federation: Federation, aggregation: str
) -> None:
    central: dict[str, Any] = {"clip": 1.0, "noise": 0.5, "placement": "central"}
    options = central if aggregation == "plain" else {"aggregation": aggregation}
    fitted, _ = tapped(FedAvg(**SMALL, **options), federation, FULL)
    noted = view_of(fitted).outcomes
    replayed = fitted.verb_outcomes()
    assert len(noted) == len(replayed) > 2
    for outcome, other in zip(noted, replayed, strict=True):
        assert (outcome.verb, outcome.step, outcome.groups) == (
            other.verb, other.step, other.groups,
        )  # fmt: skip
        for name, rows in vars(outcome.content).items():
            if isinstance(rows, Rows):
                assert torch.equal(rows.values, vars(other.content)[name].values)


def test_a_twin_has_nothing_that_protects() -> None:
    secure = FedAvg(**SMALL, aggregation="secagg", mask="rotation")
    assert (unprotected(secure).aggregation, secure.aggregation) == ("plain", "secagg")
    central = FedAvg(**SMALL, clip=1.0, noise=1.0, placement="central")
    assert (unprotected(central).placement, unprotected(central).noise) == ("auto", 0.0)
    assert not unprotected(OneShot(sealed=True, gram_noise=1.0)).sealed
    assert unprotected(OneShot(gram_noise=1.0)).gram_noise == 0.0
    assert unprotected(Signature(signature_noise=1.0)).signature_noise == 0.0
    # its sums are secure unless another option says otherwise
    assert (unprotected(Hidden()).aggregation, Hidden().aggregation) == ("plain", "secagg")


def test_malicious_clients_send_what_they_are_told_to(federation: Federation) -> None:
    def flipped(client: int, update: torch.Tensor, round: int) -> torch.Tensor:
        return -3 * update if round == 1 else update

    protocol = CFL(**{**SMALL, "rounds": 1}, mask="none")
    honest = updates(protocol.fit(federation, FULL))
    attacked = updates(with_malicious_updates(protocol, federation, [1, 4], flipped, FULL))
    for client in range(6):
        expected = -3 * honest[client] if client in (1, 4) else honest[client]
        assert torch.equal(attacked[client], expected)
    again = updates(protocol.fit(federation, FULL))
    assert torch.equal(torch.stack(again), torch.stack(honest)), "the next run is honest again"
    with pytest.raises(UsageError, match="there is no client 6: clients go by name"):
        with_malicious_updates(protocol, federation, [6], flipped, FULL)


def test_a_malicious_client_obeys_the_clip(federation: Federation) -> None:
    def scaled(client: int, update: torch.Tensor, round: int) -> torch.Tensor:
        return 1000 * update

    clipped = CFL(**SMALL, clip=0.1, mask="none")
    rows = updates(with_malicious_updates(clipped, federation, [0], scaled, FULL))
    assert float(rows[0].norm()) == pytest.approx(0.1, rel=1e-3)


def test_poisoned_data_are_those_of_the_chosen_clients(federation: Federation) -> None:
    def flip(client: int, shard: Shard) -> Shard:
        return replace(shard, y=9 - shard.y)

    poisoned = with_poisoned_data(federation, [2], flip)
    for client, (before, after) in enumerate(zip(federation.shards, poisoned.shards, strict=True)):
        expected = 9 - before.y if client == 2 else before.y
        assert np.array_equal(after.y, expected)
    assert poisoned.recipe is None and federation.recipe is not None


def test_an_experiment_leaves_no_run_folder(federation: Federation, tmp_path: Path) -> None:
    protocol = FedAvg(**SMALL)
    vars(protocol)[ATTRIBUTE] = Experiment(before_pipeline=lambda call, reply: reply)
    with pytest.raises(UsageError, match="leave out folder"):
        protocol.fit(federation, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_probe_shows_replies_and_refusals(federation: Federation) -> None:
    protocol = FedAvg(**SMALL)
    settings = Settings(threads=1)
    endpoint = build_client(protocol, federation, settings)
    run = config_hash(protocol.config(federation, settings.dtype))
    empty = torch.zeros(0, dtype=torch.int64)
    dimension = endpoint.client.cohort.model.dimension
    query = AverageDeltas(
        means=Picks(torch.zeros(0, dimension), ((), ())),
        steps=Picks(empty, ((), ())),
        absolute=True,
        count=Rows(torch.zeros(2, dtype=torch.int64)),
    )
    honest = Call(run, "contribute", "sum", 1, 1, (0, 3), query, (2, 2))
    assert probe(endpoint, honest).reply.delta.values.shape == (2, dimension)
    single = probe(endpoint, replace(honest, verb="gather"))
    assert single.refused and isinstance(single.refusal, PolicyError)
    alone = probe(endpoint, replace(honest, members=(1, 1)))
    assert isinstance(alone.refusal, PolicyError)
    stranger = probe(endpoint, replace(honest, to=(0, 9)))
    assert isinstance(stranger.refusal, FrameError)
    assert "a sum over 1 client(s)" in str(alone.refusal) and alone.reply is None
