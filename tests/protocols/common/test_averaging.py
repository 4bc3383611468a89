"""Averaging within clusters: by sums of two or more, and alone where a cluster is one client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import interrupt_after

from securecluster import Federation
from securecluster.errors import PolicyError, UpdateError
from securecluster.messaging.messages import Call, Empty, Response
from securecluster.parties.endpoints import build_client
from securecluster.protocols import FLHC, FLUX, ClusteringProtocol, FedAvg, Local, Settings
from securecluster.protocols.common.averages.averaging import (
    AveragingState,
    SumClient,
    average_clusters,
)
from securecluster.protocols.common.averages.pending_updates import PendingUpdates, flush
from securecluster.protocols.common.client import TrainingClient
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess

EXACT = Settings(dtype="float64", transcript="full")


@dataclass
class Told(ClusteringProtocol):
    """Clusters that someone names: everyone together first, from round 3 on as told."""

    clusters: Sequence[int] = (0, 0, 0, 1, 2, 2)

    name: ClassVar[str] = "told"
    client: ClassVar[type[TrainingClient]] = SumClient

    def run_server(self, net: ServerChannel, run: Run) -> AveragingState:
        m = len(net.clients)
        state = AveragingState([0] * m, PendingUpdates.start(m, fresh=self.mask != "none"))
        for t in run.rounds("train", state, self.rounds):
            if t == 3:
                state.labels = list(self.clusters)
            average_clusters(net, state, self.participation, t)
        flush(net, run, state)
        return state

    def assign_newcomers(self, net: ServerChannel, state: Any, to: Sequence[int]) -> list[int]:
        return [0] * len(to)


def test_lone_clients_are_asked_beside_the_sum_of_the_others(
    small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    begin, exchange = InProcess.begin, InProcess.exchange

    def noted_begin(transport: InProcess, call: Call) -> Callable[[], Response]:
        events.append(f"ask {call.method}")
        return begin(transport, call)

    def noted_exchange(transport: InProcess, call: Call) -> Response:
        events.append(f"collect {call.method}")
        return exchange(transport, call)

    monkeypatch.setattr(InProcess, "begin", noted_begin)
    monkeypatch.setattr(InProcess, "exchange", noted_exchange)
    Told(rounds=4, mask="none", model="linear").fit(small, EXACT)
    beside = ["ask train_locally", "collect contribute", "collect train_locally"]
    assert events == [*["collect contribute"] * 2, *beside * 2, "collect receive"]


@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
def test_each_cluster_is_its_own_fedavg_and_a_lone_client_trains_where_it_was(
    mask: str, small: Federation
) -> None:
    """Round by round against means of the updates that a cohort makes, weighted by hand."""
    fitted = Told(rounds=5, mask=mask, model="linear").fit(small, EXACT)
    cohort = build_client(Told(model="linear"), small, EXACT).client.cohort
    weight = torch.tensor([float(len(s.y)) for s in small.shards], dtype=torch.float64)
    theta = cohort.start.expand(6, -1).clone()
    calls = [e for e in fitted.transcript_.entries if e.method in ("contribute", "train_locally")]
    for number in range(1, 6):
        labels = [0] * 6 if number < 3 else [0, 0, 0, 1, 2, 2]
        new = theta.clone()
        for entry in (e for e in calls if e.round == number):
            from securecluster.messaging.messages import Rows

            delta = cohort.train(
                Rows(theta[list(entry.to)]),
                entry.to,
                fitted.training.usual(fitted, {"lr": 0.2}),
                entry.step,
            )
            for c in {labels[i] for i in entry.to}:
                own = [k for k, i in enumerate(entry.to) if labels[i] == c]
                share = weight[[entry.to[k] for k in own]]
                new[[entry.to[k] for k in own]] += (share[:, None] * delta[own]).sum(
                    0
                ) / share.sum()
        theta = new
    torch.testing.assert_close(fitted.client_models_.values, theta, rtol=0, atol=1e-10)


def test_nothing_leaves_a_lone_client_and_the_others_stay_out_of_its_way(small: Federation) -> None:
    fitted = Told(rounds=6, mask="permutation").fit(small, EXACT)
    for position, entry in enumerate(fitted.transcript_.entries):
        if entry.round >= 3 and entry.method == "contribute":
            assert 3 not in entry.to
        if entry.method == "train_locally":
            assert entry.to == (3,)
            assert not vars(fitted.transcript_.content(position)[1].reply)
    assert sum(e.method == "train_locally" for e in fitted.transcript_.entries) == 4
    assert {e.method for e in fitted.ledger_.events} == {"contribute"}


def test_a_share_is_never_a_single_client(small: Federation) -> None:
    fitted = FedAvg(rounds=4, participation=0.01).fit(small, EXACT)
    assert [len(e.to) for e in fitted.transcript_.entries if e.method == "contribute"] == [2] * 4


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_lone_clients_survive_dropouts_and_resume(
    mask: str, small: Federation, tmp_path: Any
) -> None:
    settings = Settings(dropout=0.3, dtype="float64")
    whole = Told(rounds=6, mask=mask).fit(small, settings)

    with pytest.raises(KeyboardInterrupt):
        Told(rounds=6, mask=mask).fit(small, settings, folder=tmp_path, report=interrupt_after(4))
    again = Told(rounds=6, mask=mask).fit(small, settings, folder=tmp_path)
    assert torch.equal(again.client_models_.values, whole.client_models_.values)
    assert again.history_ == whole.history_


@pytest.mark.parametrize("kind", [FLHC, FLUX])
def test_a_model_that_was_trained_alone_does_not_leave_as_one_of_averages(
    kind: Any, small: Federation
) -> None:
    client: Any = build_client(kind(model="mlp-32"), small, Settings()).client
    nothing = PendingUpdates.start(len(small), fresh=False).message_for([1])
    client.train_locally(CallContext((1,), (1,), 1, 1), nothing)
    posted = client.post(CallContext((0, 2), (0, 2), 1, 2), Empty())
    assert not posted.delta.table.any()  # no average has arrived yet
    with pytest.raises(PolicyError, match="who has trained alone holds one of its own"):
        client.post(CallContext((0, 1), (0, 1), 1, 2), Empty())


def test_local_training_diverges_by_name(small: Federation) -> None:
    with pytest.raises(UpdateError, match=r"round 1: the model of client\(s\) 0, 1"):
        Local(rounds=1, lr=1e30).fit(small)
    assert np.isfinite(Local(rounds=1).fit(small).accuracy_).all()


def test_clipped_updates_have_no_weights_and_tell_no_sizes() -> None:
    draw = np.random.default_rng(0)
    arrays = {f"c{n}": (draw.normal(size=(n, 3)), np.arange(n) % 2) for n in (5, 8, 20)}
    federation = Federation.from_arrays(arrays, classes=2, seed=0)
    told = []
    for clip in (None, 1e9):  # it cuts nothing
        fitted = FedAvg(rounds=1, model="linear", mask="none", clip=clip).fit(federation, EXACT)
        entries = fitted.transcript_.entries
        position = [entry.method for entry in entries].index("contribute")
        told.append(fitted.transcript_.content(position)[1].reply)
    weighted, clipped = told
    assert clipped.size is None
    rows, sizes = weighted.delta.values, weighted.size.values
    torch.testing.assert_close(clipped.delta.values, rows / sizes[:, None], rtol=1e-9, atol=1e-12)
