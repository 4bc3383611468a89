"""Secure sums over nodes of which some leave: each is that of what its members' nodes trained.

What a node trained is read at the node, before anything is masked; the sums are the server's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.messaging import wire
from securecluster.messaging.messages import Call
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.server_run import ServerRun
from securecluster.parties.derived import call_types
from securecluster.protocols import FedAvg
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.transport import Framed

CLIENTS = 6
ROW, PADS, SHARES = "contribute", "reveal_pads", "reveal_shares"
STEP = 1e-3  # beyond what the rounding to whole numbers changes in a sum of six rows
MADE = FedAvg(rounds=3, epochs=1, model="linear", mask="none", aggregation="secagg", cohort_size=0)
# by case: (round, method) at which a client leaves, by client; with True it comes back
Leaving = Mapping[int, tuple[int, str, bool]]
LEAVING: dict[str, Leaving] = {
    "nobody leaves": {},
    "before its row": {1: (2, ROW, False)},
    "after its row": {1: (2, SHARES, False)},
    "after its row, and is back": {1: (2, SHARES, True)},
    "one before and one after": {1: (2, ROW, False), 4: (2, SHARES, False)},
    "two after their rows": {0: (1, SHARES, False), 5: (3, SHARES, False)},
    "too many": dict.fromkeys(range(1, CLIENTS), (2, SHARES, True)),
}


class Telling(Node):
    """Node that tells what it trained, by the number of the call."""

    trained: dict[int, torch.Tensor]

    def _endpoint(self, config: Mapping[str, Any]) -> Endpoint[Any]:
        endpoint = super()._endpoint(config)

        def told(call: Call, reply: Any) -> Any:
            if call.method == ROW:
                self.trained[call.step] = reply.delta.values[0].clone()
            return reply

        endpoint.before_pipeline = told
        return endpoint


def door(node: Telling, leaving: Leaving) -> Callable[[bytes], bytes]:
    """Return what a node answers until it leaves."""
    gone: list[str] = []
    number, method, returns = leaving.get(node.number, (0, "", False))

    def answer(frame: bytes) -> bytes:
        header = wire.peek(frame)
        if header.round == number and header.method == method:
            gone.append(method)
        if gone and (header.round == number or not returns):
            raise ConnectionError
        return node.answer(frame)

    return answer


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")
@pytest.mark.parametrize("case", LEAVING)
def test_a_sum_is_that_of_what_its_members_trained(
    case: str, federation: Federation, tmp_path: Path
) -> None:
    leaving = LEAVING[case]
    policy = Policy(roster=False)
    nodes = []
    for i in range(CLIENTS):
        node = Telling(MADE, federation.select([i]), tmp_path / f"{i}", number=i, policy=policy)
        node.trained = {}
        nodes.append(node)
    proposal = Proposal.of(MADE, federation.facts, "float32", None)
    for node in nodes:
        node.agree(proposal.packed())
    doors = {node.number: door(node, leaving) for node in nodes}
    transport = Framed(doors, lambda name: call_types(MADE, name)[1], strict=False)
    fitted = ServerRun(MADE, proposal.config, transport).carried_out()
    sums = [one for one in fitted.verb_outcomes() if one.verb == "sum"]
    # without enough of them nobody reads a sum, in the round of the many that leave
    assert [one.round for one in sums] == ([1, 3] if case == "too many" else [1, 2, 3])
    model = fitted.network_.initial()
    for one in sums:
        (members,) = one.groups
        rows = [nodes[i].trained[one.step] for i in members]
        torch.testing.assert_close(
            one.content.delta.values[0], torch.stack(rows).sum(0), atol=STEP, rtol=0
        )
        model = model + one.content.delta.values[0] / one.content.size.values[0]
        gone = {i for i, (number, *_, back) in leaving.items() if number < one.round and not back}
        before = {i for i, (n, at, _) in leaving.items() if n == one.round and at == ROW}
        assert set(members) == set(range(CLIENTS)) - gone - before
    for node in nodes:
        if node.number not in leaving:
            (running,) = node._running.values()
            own = running.endpoint.client.models.row(0)
            torch.testing.assert_close(own, model, atol=STEP, rtol=0)
