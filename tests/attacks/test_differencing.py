"""Differencing: exact for plain sums, secure ones of two calls alike; at chance under noise."""

from __future__ import annotations

from typing import Any

import pytest
from attacked import FULL, digits, result_of

from securecluster import Federation
from securecluster.attacks.differencing import Differencing
from securecluster.attacks.experiments import tapped
from securecluster.protocols import FedAvg
from securecluster.protocols.common.averages.averaging import AveragingState, SumClient
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel

RESAMPLES = (100, 50)

ONE: dict[str, Any] = {
    "rounds": 1, "epochs": 1, "batch_size": 1000, "model": "linear", "mask": "none",
}  # fmt: skip
NO_PAIR = "not applicable: no two sums over groups that differ in one client were observed"


class Twice(FedAvg):
    """A server that asks for everyone's sum, and then once without each of the first clients."""

    lone = 4

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        m = len(net.clients)
        state = AveragingState([0] * m, PendingUpdates.start(m, fresh=False))
        for _ in run.rounds("train", state, self.rounds):
            groups = [list(range(m))]
            for lone in range(self.lone):
                groups.append([i for i in range(m) if i != lone])
            for group in groups:
                net.sum(SumClient.contribute, state.outbox.message_for(group), to=group)
        return state


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(clients=8, samples=30)


def scored(made: Any, federation: Federation) -> Any:
    fitted, taps = tapped(made, federation, FULL)
    return result_of(Differencing(), fitted, federation, taps=taps)


def test_plain_sums_give_single_updates_away(federation: Federation) -> None:
    found = scored(Twice(**ONE), federation)
    assert found.units == 4
    assert found.value > 0.999
    assert found.beats_chance and found.chance < 0.99


@pytest.mark.parametrize("placement", ["local", "central"])
def test_under_noise_nothing_is_recovered(placement: str, federation: Federation) -> None:
    found = scored(Twice(**ONE, clip=0.5, noise=2.0, placement=placement), federation)
    assert abs(found.value) < 0.2
    assert not found.beats_chance


@pytest.mark.always
def test_secure_sums_of_different_calls_prevent_it_by_cohorts_alone(federation: Federation) -> None:
    # Clients compare the members of a sum with those of sums of the same rows. Rows of another call
    # are new, though a client that has no new average computes the same update again.
    secure = {**ONE, "aggregation": "secagg"}
    assert scored(Twice(**secure, cohort_size=0), federation).value > 0.999
    # the sums are over other cohorts, which differ in more than one client
    assert scored(Twice(**secure), federation) == NO_PAIR


def test_sums_over_the_same_clients_are_not_applicable(federation: Federation) -> None:
    assert scored(FedAvg(**{**ONE, "rounds": 2}), federation) == NO_PAIR
    masked = scored(Twice(**{**ONE, "mask": "permutation"}), federation)
    assert masked == "not applicable: sums of different calls have different masks"
