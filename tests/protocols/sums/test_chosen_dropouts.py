"""A server that drops chosen clients, between the steps of a secure sum or over rounds, isolates
nobody.

What one call tells such a server is tried on the guard, in
`tests/protections/secure_sums/test_double_mask.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cases
import pytest
from cases import serve, stub_pair_network, two_clusters, variant

from securecluster import Federation
from securecluster.errors import PolicyError, SecureClusterWarning
from securecluster.messaging import wire
from securecluster.messaging.messages import Call
from securecluster.messaging.transcript import Transcript
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.parties.derived import call_types
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.cohorts import RowSpace
from securecluster.protections.secure_sums.messages import SUM_METHODS
from securecluster.runtime.endpoint import SUM, releases_of
from securecluster.runtime.transport import Framed

CLIENTS = 8
STEPS = ("row", "pads", "shares")
# clients hold the server to their cohorts, since every sum is over all of them
OVER_ALL = ("fedavg", "hidden", "ifca", "finetune", "mrmtl")
# the server's own rule, while clusters stay as they are
BY_CLUSTER = ("flux", "flhc", "oneshot", "random", "cfl sketch", "pacfl", "signature", "nsim")


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(CLIENTS, 20)


def make(name: str, **params: Any) -> Any:
    small: dict[str, Any] = {"rounds": 10, "epochs": 1, "model": "linear"}
    return variant(name, **{**small, "aggregation": "secagg", **params})


def aimed(step: str, first: int = 0) -> Callable[[Call], set[int]]:
    """Drop another client in each round from the first one on, in one step of its sums.

    Without a row that is lost no pads are asked for, so another client's is.
    """

    def lost(call: Call) -> set[int]:
        if call.round < first:
            return set()
        victim, other = call.round % CLIENTS, (call.round + 3) % CLIENTS
        if call.verb == SUM:
            return {victim if step == "row" else other}
        return {victim} if call.method == f"reveal_{step}" else set()

    return lost


def solvable(made: Any, federation: Federation, step: str, first: int = 0) -> list[int]:
    lists = serve(made, federation, aimed(step, first)).net.state.sum_lists
    return RowSpace(CLIENTS, lists).solvable


@pytest.mark.always
@pytest.mark.few(6)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", [*OVER_ALL, *BY_CLUSTER])
def test_clients_that_are_dropped_by_choice_isolate_nobody_of_a_cohort(
    name: str, step: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_pair_network(monkeypatch)
    # who is gone whenever clusters are looked for ends a run of hidden, whose counts need everybody
    first = 1 if name == "hidden" else 0
    assert solvable(make(name), federation, step, first) == []


@pytest.mark.parametrize("name", ["fedavg", cases.exhaustive("ifca"), cases.exhaustive("flhc")])
def test_without_cohorts_they_isolate_everybody(name: str, federation: Federation) -> None:
    assert solvable(make(name, cohort_size=0), federation, "row") == list(range(CLIENTS))


def opened(
    made: Any, federation: Federation, policy: Policy, folder: Path, gone: dict[str, set[int]]
) -> list[list[int]]:
    """Return the lists of the sums that a server opens, over nodes whose owners have a policy.

    Args:
        made: the protocol.
        federation: of all clients.
        policy: of each owner.
        folder: of the nodes.
        gone: by method of a frame, the clients that the server calls lost.
    """

    def door(node: Node, frame: bytes) -> bytes:
        method = wire.peek(frame).method
        step = method if method in SUM_METHODS else "row"
        if node.number in gone.get(step, set()):
            raise ConnectionError
        return node.answer(frame)

    nodes = [
        Node(
            made, federation.select([i]), folder / f"node-{i}", number=i, policy=policy,
            durable=False,
        )
        for i in range(CLIENTS)
    ]  # fmt: skip
    proposal = Proposal.of(made, federation.facts, "float32", None)
    for node in nodes:
        node.agree(proposal.packed())
    doors = {node.number: partial(door, node) for node in nodes}
    transport = Framed(doors, lambda name: call_types(made, name)[1], strict=False)
    half = ServerHalf.over(transport, made, proposal.config, Transcript("full"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)  # of refusals
        half.final_state(half.started())
    return [list(members) for members in half.net.state.sum_lists]


@pytest.mark.parametrize(
    ("least", "gone", "survivors"),
    [
        (0, {"row": {0, 1}}, [[2, 3, 4, 5, 6, 7]]),
        (6, {"row": {0, 1}}, [[2, 3, 4, 5, 6, 7]]),
        (7, {"row": {0, 1}}, []),
        (6, {"row": {0}, "reveal_pads": {1}}, [[2, 3, 4, 5, 6, 7]]),
        (7, {"row": {0}, "reveal_pads": {1}}, []),
        (8, {"row": {0}}, []),
        (8, {}, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (6.5, {"row": {0, 1}}, []),
    ],
)
def test_no_node_unmasks_a_sum_of_which_fewer_survive_than_its_owner_allows(
    least: float,
    gone: dict[str, set[int]],
    survivors: list[list[int]],
    federation: Federation,
    tmp_path: Path,
) -> None:
    made = make("fedavg", rounds=1, cohort_size=0)
    policy = Policy(roster=False, least_clients=least)
    assert opened(made, federation, policy, tmp_path, gone) == survivors


def test_no_node_takes_part_in_a_sum_with_fewer_members_than_its_owner_allows(
    federation: Federation, tmp_path: Path
) -> None:
    made = make("fedavg", rounds=1, cohort_size=0)
    sums = []
    for least in (6, 5):
        policy = Policy(roster=False, least_clients=least)
        node = Node(made, federation.select([0]), tmp_path / f"{least}", number=0, policy=policy)
        endpoint = node._endpoint(made.config(federation, "float32"))
        half: Any = endpoint.halves[SUM]
        release = releases_of(type(endpoint.client))["contribute"]
        call = Call(
            config="0" * 32,
            method="contribute",
            verb=SUM,
            round=1,
            step=1,
            to=(0,),
            query=None,
            members=(5,),
            group=("0-4",),
        )
        sums.append(partial(half.check, call, release))
    with pytest.raises(PolicyError, match="asks for 6 or more"):
        sums[0]()
    with pytest.raises(Exception) as other:
        sums[1]()
    assert "or more" not in str(other.value)


@pytest.mark.parametrize(
    ("params", "least", "refused"),
    [
        ({"participation": 0.5}, 5, True),
        ({"participation": 0.5}, 4, False),
        ({}, 8, False),
        ({"participation": 0.5, "aggregation": "plain"}, 5, False),
    ],
)
def test_a_run_whose_rounds_ask_too_few_is_refused_at_agreement(
    params: dict[str, Any], least: int, refused: bool, federation: Federation
) -> None:
    config = make("fedavg", **params).config(federation, "float32")
    policy = Policy(roster=False, least_clients=least)
    if refused:
        with pytest.raises(PolicyError, match="at least 5 clients, and a round of this run asks 4"):
            policy.check(config)
    else:
        policy.check(config)
