"""A server that breaks the protocol sends other models to other clients of one secure sum.

Clients that start from a network of dead units have updates of its last biases alone, so the sum is
one client's update everywhere else (Pasquini, Francati & Ateniese 2022). No rule of secure sums is
broken: what remains to an active server is said in docs/security.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.messaging.messages import Call, Picks, Response
from securecluster.protocols import FedAvg, Settings
from securecluster.runs.experiment import ATTRIBUTE, Experiment
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


def test_a_server_that_sends_other_models_reads_one_update_in_a_secure_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updates: dict[int, torch.Tensor] = {}
    sums: list[torch.Tensor] = []
    exchange, add_up = InProcess.exchange, ServerChannel.sum

    def lying(self: InProcess, call: Call) -> Response:
        second = call.method == "contribute" and call.round == 2
        return exchange(self, with_dead_units(call) if second else call)

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
    options: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "mlp", "mask": "none"}
    protocol = FedAvg(**options, aggregation="secagg")
    vars(protocol)[ATTRIBUTE] = Experiment(before_pipeline=before)
    protocol.fit(federation, Settings(threads=1))
    own = updates[TARGET][:-CLASSES]
    read = sums[-1][: len(own)]
    assert float((read - own).norm() / own.norm()) < 1e-4
