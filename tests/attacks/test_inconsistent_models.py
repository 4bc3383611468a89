"""A server that breaks the protocol sends other models to other clients of one secure sum.

Clients that start from a network of dead units have updates of its last biases alone, so the sum is
one client's update everywhere else (Pasquini, Francati & Ateniese 2022). Pads follow from what each
member was sent, so nothing cancels; `tests/protocols/sums/test_bound_sums.py` has all protocols.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.errors import FrameError
from securecluster.messaging.messages import Call, Picks, Response, Rows
from securecluster.parties.experiment import ATTRIBUTE, Experiment
from securecluster.protocols import FedAvg, Settings
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess

TARGET = 3
CLASSES = 10


def with_dead_units(call: Call) -> Call:
    """Return a call that moves every weight of all clients but the target by -1."""
    query = call.query
    means, steps = query.means.table, query.steps.table
    dead = torch.full((1, means.shape[1]), -1.0, dtype=means.dtype)
    last = (len(means),)
    others = [client != TARGET for client in call.to]

    def picks(table: torch.Tensor, honest: Picks) -> Picks:
        pairs = zip(others, honest.picks, strict=True)
        return Picks(table, tuple(last if other else own for other, own in pairs))

    moved = dataclasses.replace(
        query,
        means=picks(torch.cat([means, dead]), query.means),
        steps=picks(torch.cat([steps, steps[:1]]), query.steps),
    )
    return dataclasses.replace(call, query=moved)


def attacked(
    monkeypatch: pytest.MonkeyPatch, received: Callable[[Response], Response], **options: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Run the attack in the second round, and return the target's update and the sums.

    Args:
        monkeypatch: undoes what it changes.
        received: what the server makes of the replies of the second round.
        options: of FedAvg.
    """
    updates: dict[int, torch.Tensor] = {}
    sums: list[torch.Tensor] = []
    exchange, add_up = InProcess.exchange, ServerChannel.sum

    def lying(self: InProcess, call: Call) -> Response:
        if call.method != "contribute" or call.round != 2:
            return exchange(self, call)
        return received(exchange(self, with_dead_units(call)))

    def kept(self: ServerChannel, *args: Any, **named: Any) -> Any:
        outcome = add_up(self, *args, **named)
        sums.append(outcome.rows.delta.table[0].clone())
        return outcome

    def before(call: Call, reply: Any) -> Any:
        if call.method == "contribute" and call.round == 2:
            updates.update(zip(call.to, reply.delta.values.clone(), strict=True))
        return reply

    monkeypatch.setattr(InProcess, "exchange", lying)
    monkeypatch.setattr(ServerChannel, "sum", kept)
    federation = Federation.simulate("digits", clients=6, samples=20, seed=0)
    protocol = FedAvg(rounds=2, epochs=1, model="mlp", mask="none", **options)
    vars(protocol)[ATTRIBUTE] = Experiment(before_pipeline=before)
    protocol.fit(federation, Settings(threads=1))
    return updates[TARGET], sums


def of_one_model(response: Response) -> Response:
    """Return replies whose rows all claim to follow from the model of the first one."""
    claimed = response.reply.origin.table[:1].expand(len(response.ids), -1)
    reply = dataclasses.replace(response.reply, origin=Rows(claimed))
    return dataclasses.replace(response, reply=reply)


def test_a_plain_sum_of_other_models_is_one_update(monkeypatch: pytest.MonkeyPatch) -> None:
    update, sums = attacked(monkeypatch, lambda response: response, aggregation="plain")
    own = update[:-CLASSES]
    assert float((sums[-1][: len(own)] - own).norm() / own.norm()) < 1e-4


def test_a_secure_sum_of_other_models_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FrameError, match=rf"client\(s\) {TARGET} follows from another model"):
        attacked(monkeypatch, lambda response: response, aggregation="secagg")


def test_a_server_that_looks_away_opens_no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    # covers follow from a row's origin, as pads do
    with pytest.raises(FrameError, match="do not give what it committed to"):
        attacked(monkeypatch, of_one_model, aggregation="secagg")
