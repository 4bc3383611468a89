"""A target is a promise: a run stops before the release by which it would cost more."""

from __future__ import annotations

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import FULL, WAYS, framed, node_each, two_clusters
from sixth import Client, Mean, Sixth

from securecluster import Federation
from securecluster.errors import RefusedError, SecureClusterWarning, TargetError, UsageError
from securecluster.messaging.messages import Call
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp import target as targets
from securecluster.protocols import FedAvg, RandomClusters, Settings
from securecluster.protocols.authoring import (
    GATHER,
    AveragingState,
    CallContext,
    Empty,
    Run,
    ServerChannel,
    answers,
)
from securecluster.protocols.common.observer import Observer
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.transport import InProcess

EVERY_WAY = {**WAYS, "distributed": {"placement": "distributed", "aggregation": "secagg"}}
# two values of the noise cannot be asked for, and these variants give one
OWN_NOISE = ("cfl signature", "flhc signature", "oneshot noise", "pacfl noise", "signature noise")
NOISY = (*OWN_NOISE, "signature blocks")
NAMES = [name for name in cases.VARIANTS if name not in NOISY]
SMALL: dict[str, Any] = {"epochs": 1, "model": "linear", "clip": 1.0, "target_epsilon": 8.0}
# what a target chooses otherwise
PLAIN = {"aggregation": "plain"}


class Uncounted(FedAvg):
    """Runs two rounds alone where it has stand-ins for clients, of which there are 12 at most."""

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        rounds = self.rounds
        if run.dry:
            self.rounds = 2
        state = super().run_server(net, run)
        self.rounds = rounds
        return state


class ExactClient(Client):
    """Clients that tell means without noise."""

    @answers(GATHER, unmasked=("mean",))
    def tell(self, context: CallContext, query: Empty) -> Mean:
        return super().tell(context, query)


class Exact(Sixth):
    """Its clients release something that nothing prices."""

    client = ExactClient


def priced(history: Any, delta: float) -> None:
    """Stand in for the accountant, which runs within their plans do not ask."""
    raise AssertionError("an accountant was asked")


@pytest.mark.always
@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "way"), list(product(NAMES, EVERY_WAY)))
def test_methods_stay_within_what_runs_without_data_released(
    name: str, way: str, small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cases.variant(
        name, rounds=3, clip=1.0, target_epsilon=8.0, **EVERY_WAY[way], mask="none"
    )
    monkeypatch.setattr(targets, "joint_price", priced)
    try:
        made.check(len(small))
    except UsageError:
        pytest.skip("no such run")
    for dropout in (0.0, 0.3):
        fitted = made.fit(small, Settings(dropout=dropout))
        assert fitted.ledger_.price(made.delta).epsilon <= 8.0


def test_clients_that_were_alone_in_their_cluster_once_have_a_target_too() -> None:
    federation = two_clusters(14, 20)
    made = RandomClusters(
        k=13, rounds=2, model="linear", clip=1.0, target_epsilon=8.0, mask="none", epochs=1
    )
    assert made.fit(federation).ledger_.price(made.delta).epsilon <= 8.0


SENTENCE = (
    r"contribute\.delta would bring the releases of client \d+ to epsilon = {} at delta = 1e-05, "
    r"and target_epsilon is 8: with this one, {} 3, which is more than in a run without data; "
    "leave target_epsilon out"
)
SUMS = {
    "client": ("10.24", r"contribute\.delta"),
    "central": ("10.24", r"contribute\.delta"),
    "example": ("9.9", r"contribute \(training\)"),
    "distributed": ("10.32", r"contribute\.delta"),
}


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_run_stops_before_a_release_that_nobody_counted(
    way: str, small: Federation, tmp_path: Path
) -> None:
    made = Uncounted(rounds=4, **SMALL, **{**PLAIN, **EVERY_WAY[way]})
    if way == "example":
        made.set_params(epochs=2)
        sizes = ("", SUMS[way][1])
        sentence = SENTENCE.format(r"[\d.]+", sizes[1])
    else:
        sentence = SENTENCE.format(*SUMS[way])
    lines: list[Any] = []
    with pytest.raises(TargetError, match=sentence) as told:
        made.fit(small, folder=tmp_path, report=lines.append)
    assert "\n" not in str(told.value)
    # two rounds are over, and nothing of the third was recorded or sent
    assert [line["round"] for line in lines] == [1, 2]
    recorded = (tmp_path / "ledger.jsonl").read_text()
    assert '"round": 2' in recorded
    assert '"round": 3' not in recorded
    # a resumed run has its releases, and stops there again
    with pytest.raises(TargetError, match=sentence):
        made.fit(small, folder=tmp_path)
    assert (tmp_path / "ledger.jsonl").read_text() == recorded


def test_a_field_without_noise_is_refused_at_its_first_release(small: Federation) -> None:
    asked: list[str] = []
    made = Exact(rounds=2, **SMALL, **PLAIN)
    endpoint = build_client(made, small, Settings())

    def answer(call: Call) -> Any:
        asked.append(call.method)
        return endpoint.answer(call)

    net = build_network(made, InProcess(answer), made.config(small, "float32"))
    with pytest.raises(
        TargetError,
        match=r"tell\.mean would leave client 0 without noise, so that epsilon were infinite, and "
        r"target_epsilon is 8: give it noise",
    ):
        cases.run_server(made, net)
    assert [method for method in asked if not method.startswith("key")] == ["tell"]
    assert net.state.ledger.events == []
    # without a target it is priced, as infinite
    free = Exact(rounds=1, epochs=1, model="linear").fit(small)
    assert free.ledger_.epsilon == float("inf")


def test_a_node_refuses_by_a_code_and_keeps_the_sentence(small: Federation) -> None:
    made = Uncounted(rounds=4, **SMALL, **PLAIN, mask="none")
    nodes = node_each(made, small, Settings())
    said: list[Exception] = []
    for node in nodes:
        node.on_refusal = said.append
    net = build_network(made, framed(made, nodes), made.config(small, "float32"))
    with pytest.raises(RefusedError, match="exceed the run's target epsilon") as told:
        cases.run_server(made, net)
    assert told.value.code == "target"
    assert isinstance(said[0], TargetError)
    assert {event.round for event in net.state.ledger.events} == {1, 2}


@pytest.mark.parametrize("way", EVERY_WAY)
def test_a_resumed_run_counts_a_repeated_release_once(
    way: str, small: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed after a round's releases, and before its checkpoint."""
    monkeypatch.setattr(targets, "joint_price", priced)
    made = FedAvg(rounds=3, **SMALL, **EVERY_WAY[way])

    def killed(self: Any, *given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as late, pytest.raises(KeyboardInterrupt):
        late.setattr(Observer, "evaluate", killed)
        made.fit(small, folder=tmp_path)
    assert '"round": 1' in (tmp_path / "ledger.jsonl").read_text()
    fitted = made.fit(small, folder=tmp_path)
    whole = made.fit(small)
    assert fitted.ledger_.price().epsilon == whole.ledger_.price().epsilon <= 8.0


def test_a_repetition_with_other_bits_is_another_release(
    small: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FedAvg(rounds=2, **SMALL, mask="none", placement="central")

    def killed(self: Any, *given: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as late, pytest.raises(KeyboardInterrupt):
        late.setattr(Observer, "evaluate", killed)
        made.fit(small, folder=tmp_path)
    # other noise, as another device might round it
    monkeypatch.setattr(
        "securecluster.runtime.release_billing.reply_digests",
        lambda reply, count: ["0123456789abcdef"] * count,
    )
    with pytest.raises(TargetError, match=r"contribute\.delta would bring .* with this one, .* 3"):
        made.fit(small, folder=tmp_path)
    # it has left its client: the ledger says so
    recorded = (tmp_path / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in recorded] == [1, 1, 2]


def test_a_request_that_is_repeated_is_one_release(
    small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose reply was lost on the way."""
    monkeypatch.setattr(targets, "joint_price", priced)
    made = Sixth(rounds=1, **SMALL)
    endpoint = build_client(made, small, Settings())

    def answer(call: Call) -> Any:
        for _ in range(3):
            response = endpoint.answer(call)
        return response

    net = build_network(made, InProcess(answer), made.config(small, "float32"))
    cases.run_server(made, net)
    # the mean, and the update of a client that is not alone in its cluster
    releases = Counter(client for event in net.state.ledger.events for client in event.ids)
    assert set(releases) == set(range(len(small))) and max(releases.values()) == 2


def test_newcomers_and_runs_without_a_target_are_not_stopped(small: Federation) -> None:
    def reservations(made: Any) -> int:
        endpoint: Endpoint[Any] = build_client(made, small, Settings())
        return len(endpoint.reservations)

    assert reservations(FedAvg(clip=1.0, noise=1.0)) == 0
    assert reservations(FedAvg(clip=1.0, target_epsilon=8.0)) == 1
    fitted = Sixth(rounds=1, **SMALL).fit(small, FULL)
    # two people of the run: what they release beyond its plan is warned of
    with pytest.warns(SecureClusterWarning, match="has now released ε = .*, more than"):
        assert len(fitted.join(two_clusters(clients=2, samples=40, seed=9))) == 2
