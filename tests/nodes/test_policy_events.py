"""An owner's policy is compared with what a run releases, and not with the words of its options.

Options of noise are found from the methods' declarations. What stands against the run of stand-ins
is the ledger of the run itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation, ForeignModel, Settings
from securecluster.data.facts import agree
from securecluster.errors import OwnerPolicyError, RefusedError, SecureClusterError
from securecluster.messaging.messages import Call, Rows
from securecluster.messaging.transcript import Transcript
from securecluster.nodes import policy_events
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.policy_events import check_run
from securecluster.nodes.proposal import Proposal
from securecluster.parties.derived import call_types
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.dp.ledger import COSTLESS, Event
from securecluster.protocols import FedAvg, Signature
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.transport import Framed
from tests.protocols import cases

CLIENTS = 6
RUN: dict[str, Any] = {"rounds": 3, "epochs": 1, "model": "linear", "clip": 1.0, "noise": 1.0}
WEAK = (0.0, 0.001)
# whose own noise is 0 unless it is given
OFF = ("signature_noise", "gram_noise")


def noises_of(made: Any) -> list[str]:
    """Return the options by which something has other noise than the rest."""
    return [name for name in made.get_params() if name.endswith("_noise")]


def build(name: str, unit: str, **options: Any) -> Any:
    off = [one for one in OFF if one != "signature_noise" or "signature" in name]
    given = dict.fromkeys(set(noises_of(cases.variant(name))) & set(off), 1.0)
    return cases.variant(name, **{**RUN, "dp_unit": unit, **given, **options})


TABLE = [
    (name, unit, option, value)
    for name in cases.VARIANTS
    for unit in ("client", "example")
    for option in noises_of(cases.variant(name))
    for value in WEAK
]
# protocols with an option of their own, each once
OPEN = {
    ("cflgp", "example", "gradient_noise", 0.001),
    ("flux", "client", "descriptor_noise", 0.001),
    ("ifca", "client", "loss_noise", 0.001),
    ("oneshot noise", "client", "gram_noise", 0.001),
    ("pacfl noise", "client", "gram_noise", 0.0),
    ("rdpcfl", "client", "selection_noise", 0.001),
    ("rdpcfl", "example", "first_noise", 0.001),
    ("signature noise", "example", "signature_noise", 0.0),
    ("signature auto", "example", "signature_noise", 0.001),
    ("clove", "client", "loss_noise", 0.001),
    ("cfl signature", "client", "signature_noise", 0.001),
}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return cases.two_clusters(CLIENTS, 24)


@pytest.fixture(autouse=True)
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.stub_pair_network(monkeypatch)


def least_multiplier(events: Iterable[Event]) -> float:
    """Return the least multiplier of a real run's ledger."""
    priced = [event for event in events if event.mechanism not in COSTLESS]
    return min((event.noise_multiplier or 0.0 for event in priced), default=math.inf)


@pytest.mark.parametrize(
    ("name", "unit", "option", "value"),
    [case if case in OPEN else cases.exhaustive(*case) for case in TABLE],
)
def test_what_a_run_releases_with_less_noise_than_allowed_is_refused_before_it(
    name: str, unit: str, option: str, value: float, federation: Federation
) -> None:
    try:
        made = build(name, unit, **{option: value})
        made.check(CLIENTS)
        config = made.config(federation, "float32")
    except SecureClusterError:  # the method itself refuses it
        assert (name, unit, option, value) not in OPEN
        return
    whole = made.fit(federation, Settings(threads=1))
    released = least_multiplier(whole.ledger_.events)
    policy = Policy(roster=False, least_noise=1.0)
    if released >= 1.0 and (name, unit, option, value) not in OPEN:
        check_run(policy, made, federation.facts, config)
        return
    assert released < 1.0
    with pytest.raises(OwnerPolicyError, match="noise multipliers of at least 1, and in this run"):
        check_run(policy, made, federation.facts, config)


@pytest.mark.few(6)
@pytest.mark.parametrize("unit", ["client", "example"])
@pytest.mark.parametrize("name", [name for name in cases.VARIANTS if name != "hidden residuals"])
def test_a_run_with_as_much_noise_everywhere_is_allowed(
    name: str, unit: str, federation: Federation
) -> None:
    if unit == "example" and name.startswith("hidden"):
        pytest.skip("its sums protect whole clients")
    if unit == "example" and name == "fedavg momentum":
        pytest.skip("it refuses to keep momentum then")
    made = build(name, unit, average="uniform") if name.endswith("compress") else build(name, unit)
    config = made.config(federation, "float32")
    check_run(Policy(roster=False, least_noise=1.0), made, federation.facts, config)
    with pytest.raises(OwnerPolicyError, match=r"of at least 1\.001"):
        check_run(Policy(roster=False, least_noise=1.001), made, federation.facts, config)


@pytest.mark.parametrize("cluster_noise", [1.0, 0.05])
def test_noise_for_a_target_is_compared_as_it_was_found(
    cluster_noise: float, federation: Federation
) -> None:
    made = Signature(
        rounds=2, epochs=1, model="linear", target_epsilon=6.0, cluster_noise=cluster_noise
    )
    config = made.config(federation, "float32")
    released = least_multiplier(made.fit(federation, Settings(threads=1)).ledger_.events)
    below, above = (Policy(roster=False, least_noise=released * by) for by in (0.9, 1.1))
    check_run(below, made, federation.facts, config)
    with pytest.raises(OwnerPolicyError, match="of at least"):
        check_run(above, made, federation.facts, config)


def test_a_run_without_noise_is_allowed_by_who_asks_for_none(federation: Federation) -> None:
    made = FedAvg(rounds=1, epochs=1, model="linear")
    check_run(Policy(roster=False), made, federation.facts, made.config(federation, "float32"))


class Broken(FedAvg):
    """A protocol whose loop stand-ins cannot carry out."""

    name = "fedavg"

    def run_server(self, net: Any, run: Any) -> Any:
        raise ZeroDivisionError("no stand-in gets further")


@pytest.mark.parametrize("policy", [{"least_noise": 0.5}, {"samples": False}])
def test_what_cannot_be_found_by_a_run_without_data_is_refused(
    policy: dict[str, Any], federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_events, "_KNOWN", {})
    made = Broken(**RUN)
    config = made.config(federation, "float32")
    with pytest.raises(OwnerPolicyError, match="could not be found by a run without data"):
        check_run(Policy(roster=False, **policy), made, federation.facts, config)


def zeros(arrays: Any, x: Any, y: Any, call: Any) -> Any:
    return [np.zeros_like(array) for array in arrays]


def test_the_noise_of_a_network_of_somebody_else_is_found_too(federation: Federation) -> None:
    model = ForeignModel([np.zeros((10, 64))], zeros)
    made = FedAvg(**{**RUN, "model": model, "epochs": 1})
    config = made.config(federation, "float32")
    check_run(Policy(roster=False, least_noise=1.0), made, federation.facts, config)
    with pytest.raises(OwnerPolicyError, match="of at least 2"):
        check_run(Policy(roster=False, least_noise=2.0), made, federation.facts, config)


# --- numbers of samples ---


def nodes_of(made: Any, federation: Federation, folder: Path, policy: Policy) -> list[Node]:
    return [
        Node(made, federation.select([i]), folder / f"n{i}", number=i, policy=policy, durable=False)
        for i in range(CLIENTS)
    ]


COUNTS = {"rounds": 2, "epochs": 1, "model": "linear"}
# numbers of validation samples, and those of a call that these clients' clusters do not come to
BEYOND = ("cfl fallback", "nsim apart")


@pytest.mark.few(8)
@pytest.mark.parametrize("name", cases.VARIANTS)
def test_numbers_of_samples_leave_in_those_runs_alone_that_are_refused_for_it(
    name: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = cases.variant(name, **{**COUNTS, "rounds": 3})
    config = made.config(federation, "float32")
    sizes = {float(len(shard.y)) for shard in federation.shards}
    told: list[str] = []
    answer = Endpoint.answer

    def watched(endpoint: Endpoint[Any], call: Call) -> Any:
        response = answer(endpoint, call)
        for name, value in vars(response.reply).items():
            found = set(value.values.flatten().tolist()) if isinstance(value, Rows) else set()
            told.extend([name] * (bool(found & sizes) and found <= sizes | {0.0}))
        return response

    with monkeypatch.context() as patch:
        patch.setattr(Endpoint, "answer", watched)
        made.fit(federation, Settings(threads=1))
    policy = Policy(roster=False, samples=False)
    if told or name in BEYOND:
        with pytest.raises(OwnerPolicyError, match="number of samples"):
            check_run(policy, made, federation.facts, config)
    else:
        check_run(policy, made, federation.facts, config)


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({}, False),
        ({"aggregation": "secagg"}, False),  # whose bound follows from the largest of them
        ({"clip": 1.0}, True),
        ({"clip": 1.0, "aggregation": "secagg"}, True),
        ({"clip": 1.0, "noise": 1.0, "dp_unit": "example"}, False),
    ],
)
def test_numbers_of_samples_are_told_by_no_run_whose_owner_does_not(
    params: dict[str, Any], allowed: bool, federation: Federation, tmp_path: Path
) -> None:
    made = FedAvg(**COUNTS, **params)
    nodes = nodes_of(made, federation, tmp_path, Policy(roster=False, samples=False))
    assert nodes[0].facts().samples is None
    known = agree([node._data.facts_of(0, samples=True) for node in nodes], 0, 10)
    proposal = Proposal.of(made, known, "float32", None)
    if allowed:
        nodes[0].agree(proposal.packed())
        return
    with pytest.raises(OwnerPolicyError, match="does not tell its number of samples"):
        nodes[0].agree(proposal.packed())
    assert nodes[0].runs() == []


def test_a_number_of_samples_is_refused_in_a_reply_too(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a run without data would have missed it."""
    made = FedAvg(**COUNTS)
    nodes = nodes_of(made, federation, tmp_path, Policy(roster=False, samples=False))
    unseen = policy_events.Rehearsed({}, ())
    monkeypatch.setattr(policy_events, "_rehearsed", lambda *given: unseen)
    over(made, federation, nodes, "its owner's policy forbids what the request asks for")


def test_less_noise_than_allowed_is_refused_in_a_reply_too(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Signature(**{**RUN, "signature_noise": 0.001, "k": 2})
    nodes = nodes_of(made, federation, tmp_path, Policy(roster=False, least_noise=1.0))
    unseen = policy_events.Rehearsed({}, ())
    monkeypatch.setattr(policy_events, "_rehearsed", lambda *given: unseen)
    over(made, federation, nodes, "its owner's policy forbids what the request asks for")
    assert nodes[0].spent() == {}


def over(made: Any, federation: Federation, nodes: list[Node], sentence: str) -> None:
    """Run a server over nodes that all refuse."""
    proposal = Proposal.of(made, federation.facts, "float32", None)
    for node in nodes:
        node.agree(proposal.packed())
    doors = {node.number: node.answer for node in nodes}
    transport = Framed(doors, lambda name: call_types(made, name)[1])
    half = ServerHalf.over(transport, made, proposal.config, Transcript("none"))
    with pytest.raises(RefusedError, match=sentence):
        half.final_state(half.started())


# --- cohorts ---


@pytest.mark.parametrize(
    ("params", "least", "sentence"),
    [
        ({"aggregation": "secagg"}, 6, "sums over cohorts of 2"),
        ({"aggregation": "secagg"}, 2, None),
        ({"aggregation": "secagg", "cohort_size": 6}, 6, None),
        ({"aggregation": "secagg", "cohort_size": 0}, 6, None),
        ({"aggregation": "secagg", "cohort_size": 3, "participation": 0.5}, 3, None),
        ({}, 6, None),
    ],
)
def test_a_run_whose_cohorts_are_too_small_is_refused_at_agreement(
    params: dict[str, Any], least: int, sentence: str | None, federation: Federation
) -> None:
    made = FedAvg(**COUNTS, **params)
    config = made.config(federation, "float32")
    policy = Policy(roster=False, least_clients=least)
    if sentence is None:
        check_run(policy, made, federation.facts, config)
    else:
        with pytest.raises(OwnerPolicyError, match=sentence):
            check_run(policy, made, federation.facts, config)
