"""IFCA against a plain loop over clients, and what restarts, masks and drop-outs must leave
unchanged.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import torch
from torch import nn

from securecluster import Federation, LabelSwap
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import initial_model
from securecluster.parties.endpoints import build_client
from securecluster.protocols import FedAvg, Settings
from securecluster.protocols.common.averages.restarts import OfferedModels, Restart
from securecluster.protocols.ifca.client import IFCAClient
from securecluster.protocols.ifca.protocol import IFCA, IFCAState
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess
from securecluster.training.local_trainer import LocalTraining

SIZES = (7, 12, 20, 9, 15, 10, 8)
TINY: dict[str, Any] = {"model": "mlp-32", "lr": 0.1, "epochs": 2, "batch_size": 6}


def tiny() -> Federation:
    """Seven clients of unequal sizes, whose labels follow one of two rules."""
    rng = np.random.default_rng(1)
    clients = {}
    for i, n in enumerate(SIZES):
        x = rng.normal(size=(n, 8))
        clients[f"c{i}"] = (x, (np.argmax(x[:, :3], 1) + (i % 2)) % 3)
    return Federation.from_arrays(
        clients, test=clients, truth={name: i % 2 for i, name in enumerate(clients)}, seed=3
    )


def served(
    made: Any, federation: Federation, dtype: str = "float64", lost: cases.Lost = cases.no_client
) -> tuple[IFCAState, torch.Tensor, Endpoint[Any], ServerChannel, Transcript]:
    """The server's final state, each client's last model, both ends, and what went between them."""
    state, endpoint, net, transcript = cases.serve(made, federation, lost, Settings(dtype=dtype))
    return (
        state,
        made.observer.final_models(endpoint.client, state).values,
        endpoint,
        net,
        transcript,
    )


class Reference:
    """Algorithm 1 with restarts, client by client with torch.optim; batches are those the cohort
    draws for the same call.
    """

    def __init__(self, made: IFCA, federation: Federation) -> None:
        self.made, self.shards = made, federation.shards
        self.cohort = build_client(made, federation, Settings(dtype="float64")).client.cohort
        self.plan = LocalTraining(made.lr, made.epochs, made.batch_size)
        self.step = 0
        self.losses: list[float] = []

    def run(self) -> tuple[list[int], torch.Tensor]:
        made, tried = self.made, []
        for start in range(made.starts):
            models = [
                self.cohort.drawn("start", start, j) if start or j else self.cohort.start
                for j in range(made.k)
            ]
            for _ in range(made.start_rounds if made.starts > 1 else made.rounds):
                models = self.round(models)
            self.step += made.starts > 1  # the call that asks for the loss
            tried.append(models)
            own = [min(self.loss(theta, i) for theta in models) for i in range(len(SIZES))]
            self.losses.append(float(np.average(own, weights=SIZES)))
        models = tried[int(np.argmin(self.losses))]
        for _ in range(made.rounds - made.starts * made.start_rounds if made.starts > 1 else 0):
            models = self.round(models)
        choice = [self.choice(models, i) for i in range(len(SIZES))]
        return choice, torch.stack([models[j] for j in choice])

    def round(self, models: list[torch.Tensor]) -> list[torch.Tensor]:
        self.step += 2  # a call for the choice, a call for the update
        choice = [self.choice(models, i) for i in range(len(SIZES))]
        new = []
        for j, theta in enumerate(models):
            own = [(n, self.trained(theta, i)) for i, n in enumerate(SIZES) if choice[i] == j]
            new.append(
                sum((n * w for n, w in own), torch.zeros(())) / sum(n for n, _ in own)
                if own
                else theta
            )
        return new

    def choice(self, models: list[torch.Tensor], i: int) -> int:
        return min(range(len(models)), key=lambda j: self.loss(models[j], i))

    def module(self, theta: torch.Tensor) -> nn.Module:
        module = copy.deepcopy(self.cohort.model.module)
        nn.utils.vector_to_parameters(theta.clone(), module.parameters())
        return module

    def loss(self, theta: torch.Tensor, i: int) -> float:
        x, y = torch.as_tensor(self.shards[i].x).double(), torch.as_tensor(self.shards[i].y)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.module(theta)(x), y))

    def trained(self, theta: torch.Tensor, i: int) -> torch.Tensor:
        module = self.module(theta)
        optimizer = torch.optim.SGD(module.parameters(), lr=self.plan.lr)
        for batch in self.cohort.batches(i, self.plan, self.step):
            own = batch - sum(SIZES[:i])
            optimizer.zero_grad()
            x, y = (
                torch.as_tensor(self.shards[i].x[own]).double(),
                torch.as_tensor(self.shards[i].y[own]),
            )
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(module.parameters()).detach()


LOOPS = [
    (k, starts, rounds, mask)
    for k, starts, rounds in ((3, 1, 5), (2, 4, 10), (3, 4, 8))
    for mask in ("none", "permutation", "rotation")
]


@pytest.mark.parametrize(
    ("k", "starts", "rounds", "mask"),
    # several starts, under a mask: what one start and plain updates need is part of it
    [loop if loop == (2, 4, 10, "permutation") else cases.exhaustive(*loop) for loop in LOOPS],
)
def test_ifca_equals_a_plain_loop(k: int, starts: int, rounds: int, mask: str) -> None:
    made = IFCA(k=k, starts=starts, start_rounds=2, rounds=rounds, mask=mask, **TINY)
    state, models, *_ = served(made, tiny())
    plain = Reference(made, tiny())
    choice, expected = plain.run()
    assert state.running.choice == choice
    torch.testing.assert_close(models, expected, rtol=0, atol=1e-9)
    assert state.running.number == int(np.argmin(plain.losses))
    if starts > 1:
        assert state.running.loss == pytest.approx(min(plain.losses), abs=1e-9)
        assert state.running.number in (1, 2)  # neither the first nor the last start


def test_labels_are_numbered_without_gaps_and_name_the_models_in_use() -> None:
    state = IFCAState(Restart(0, [], [3, 1, 3, 5]))
    assert (state.labels, state.used) == ([1, 0, 1, 2], [1, 3, 5])


def test_of_equal_models_the_first_is_taken(
    small: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = IFCA(k=3, starts=1, rounds=1)
    endpoint = build_client(made, small, Settings())
    monkeypatch.setattr(endpoint.client.cohort, "drawn", lambda *path: endpoint.client.cohort.start)
    net = build_network(made, InProcess(endpoint.answer), made.config(small, "float32"))
    chosen = made._choose(net, IFCAState(made.begin(net)), net.clients)
    assert chosen.rows.model.values.tolist() == [0] * 6


def test_one_model_is_fedavg() -> None:
    # batches hold all samples, so that their order does not matter
    whole = {**TINY, "batch_size": 20, "mask": "none", "rounds": 6}
    _, models, *_ = served(IFCA(k=1, starts=1, **whole), tiny())
    expected = FedAvg(**whole).fit(tiny(), Settings(dtype="float64")).client_models_.values
    torch.testing.assert_close(models, expected, rtol=0, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", cases.seeds(1, of=2))
def test_the_clusters_of_swapped_digits_are_found(seed: int) -> None:
    federation = Federation.simulate("digits", seed=seed)
    fitted = IFCA(rounds=60).fit(federation)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]
    judged = [line["loss"] for line in fitted.history_ if line["loss"] is not None]
    assert len(judged) == 6 and fitted.history_[-1]["start"] == int(np.argmin(judged))
    assert len(fitted.history_) == 60


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", ["none", "permutation", "signed-permutation", "rotation"])
def test_who_misses_rounds_ends_with_the_models_of_its_peers(mask: str, small: Federation) -> None:
    made = IFCA(k=2, starts=3, start_rounds=2, rounds=8, mask=mask)

    def lost(call: Call) -> set[int]:
        """Client 1 misses the second start and more, client 2 single calls, client 3 the loss of
        each start.
        """
        gone = {1} if call.round in (3, 4, 5) else set()
        gone |= (
            {2}
            if (call.method, call.round) in (("choose", 2), ("contribute", 4), ("choose", 7))
            else set()
        )
        return gone | ({3} if call.method == "lowest_loss" else set())

    state, _, endpoint, net, _ = served(made, small, "float32", lost)
    assert net.state.lost == {1: [3, 4, 5], 2: [2, 4, 7], 3: [2, 4, 6]}
    (bank,) = [endpoint.client.model_sets[state.running.number]]
    for model in bank:
        assert len(model.models.table) == 1 and set(model.models.index) == {0}
    assert not any(box.lagging_clients() for box in state.running.pending)
    assert all(not box.posts for box in state.running.pending) or mask == "none"


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_who_missed_rounds_is_sent_every_average_of_every_model_or_one_sum_of_them(
    mask: str, small: Federation
) -> None:
    made = IFCA(k=2, starts=1, rounds=5, mask=mask)
    *_, transcript = served(
        made, small, "float32", lambda call: {2} if call.round in (2, 3) else set()
    )
    calls = [
        transcript.content(n) for n, e in enumerate(transcript.entries) if e.method == "choose"
    ]
    # models that somebody chose in a round
    moved = [set(answer.reply.model.values.tolist()) for _, answer in calls]
    query = calls[3][0].query  # of round 4
    got = sum(len(own) for own in moved[:3]) if mask != "none" else len(set().union(*moved[:3]))
    assert [len(picks) for picks in query.means.picks] == [
        got if i == 2 else len(moved[2]) for i in range(6)
    ]
    assert query.absolute == (mask == "none")


def test_a_client_that_slept_through_a_start_can_go_on_with_it(small: Federation) -> None:
    made = IFCA(k=2, starts=2, start_rounds=2, rounds=6)
    for number in (0, 1):  # whichever start is the best
        gone = range(1 + 2 * number, 3 + 2 * number)
        state, _, endpoint, *_ = served(
            made, small, "float32", lambda call, gone=gone: {4} if call.round in gone else set()
        )  # type: ignore[misc]
        assert all(
            len(model.models.table) == 1
            for model in endpoint.client.model_sets[state.running.number]
        )


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_with_a_share_of_the_clients_everyone_ends_with_the_same_models(
    mask: str, small: Federation
) -> None:
    made = IFCA(k=2, starts=2, start_rounds=3, rounds=9, participation=0.4, mask=mask)
    state, _, endpoint, _, transcript = served(made, small, "float32")
    assert [len(e.to) for e in transcript.entries if e.method == "choose"] == [2] * 9 + [6]
    judges = [e.to for e in transcript.entries if e.method == "lowest_loss"]
    assert len(judges) == 2 and judges[0] == judges[1] and len(judges[0]) == 2
    assert all(
        len(model.models.table) == 1 for model in endpoint.client.model_sets[state.running.number]
    )


def test_updates_leave_in_sums_by_choice_and_choices_one_by_one(small: Federation) -> None:
    *_, transcript = served(IFCA(k=2, starts=1, rounds=2), small)
    verbs = {e.method: e.verb for e in transcript.entries}
    assert (verbs["choose"], verbs["contribute"]) == ("gather", "sum")
    for n, entry in enumerate(transcript.entries):
        if entry.method == "contribute":
            choice = transcript.content(n - 1)[1].reply.model.values.tolist()
            assert list(transcript.content(n)[0].members) == [choice.count(j) for j in choice]
    assert any("cluster of one" in line for line in IFCA().disclosures().server)


@pytest.mark.few(1)
@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
def test_newcomers_take_the_model_that_fits_them_best(mask: str, tmp_path: Path) -> None:
    federation = Federation.simulate("digits", scenario=LabelSwap(clusters=3), clients=12, seed=1)
    fitted = IFCA(k=5, starts=3, start_rounds=5, rounds=18, mask=mask).fit(
        federation, Settings(dtype="float64")
    )
    fresh = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=3), clients=15, samples=60, seed=1
    )
    labels = fitted.join(fresh)
    start = initial_model(fitted, federation)
    for i, shard in enumerate(fresh.shards):
        losses = []
        for theta in fitted.models_:
            module = copy.deepcopy(start.module).double()
            module.load_state_dict(theta)
            with torch.no_grad():
                losses.append(
                    float(
                        nn.functional.cross_entropy(
                            module(torch.as_tensor(shard.x).double()), torch.as_tensor(shard.y)
                        )
                    )
                )
        assert labels[i] == int(np.argmin(losses))
    assert set(labels) <= set(fitted.labels_) and len(set(labels)) > 1
    assert (
        set(fitted.joined_.bytes) >= {"up", "down"}
        and fitted.joined_.bytes["down"] > 15 * 8 * start.dimension
    )
    fitted.save(tmp_path)
    assert list(IFCA.load(tmp_path).join(fresh)) == list(labels)


def test_a_newcomer_takes_no_model_that_it_is_not_offered(small: Federation) -> None:
    made = IFCA(k=2, starts=1, mask="none")
    client: Any = build_client(made, small, Settings()).client
    far = torch.full((1, client.cohort.model.dimension), 5.0)  # a model that fits nobody
    query = OfferedModels([1], [0], far).message_for(Restart.begin(0, 2, 6, fresh=False), 6)
    context = CallContext(tuple(range(6)), tuple(range(6)), 1, 1)
    assert client.choose(context, query).model.values.tolist() == [0] * 6
    assert client.join(context, query).model.values.tolist() == [1] * 6


def test_a_model_is_shown_by_another_client_where_the_first_does_not_reply(
    small: Federation,
) -> None:
    made, asked = IFCA(k=2, starts=1, rounds=3), list[tuple[int, ...]]()

    def lost(call: Call) -> set[int]:
        if call.method == "send_model":
            asked.append(call.to)
        return set(call.to) if call.method == "send_model" and len(asked) < 3 else set()

    state, *_ = served(made, small, "float32", lost)
    assert len(asked) == 3 and asked[0] != asked[1]
    assert (
        state.offers is not None
        and state.offers.models == state.used
        and len(state.offers.table) == len(state.used)
    )
    state, *_ = served(
        made, small, "float32", lambda call: set(call.to) if call.method == "send_model" else set()
    )
    assert state.offers is not None and not state.offers.models
    with pytest.raises(UsageError, match="run it anew"):
        made.assign_newcomers(None, state, [6, 7])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"k": 0}, "k = 0"),
        ({"k": 1.5}, "k = 1.5"),
        ({"k": 7}, "k = 7 clusters cannot be made of 6 clients"),
        ({"starts": 0}, "starts = 0"),
        ({"start_rounds": 0}, "start_rounds = 0"),
        ({"rounds": 8, "starts": 3, "start_rounds": 3}, "take 9 rounds, and the run has 8"),
    ],
)
def test_what_cannot_work_is_refused(params: dict[str, Any], word: str, small: Federation) -> None:
    with pytest.raises(UsageError, match=word):
        IFCA(**params).fit(small)
    IFCA(k=6).check(6)


@pytest.mark.parametrize(
    ("rounds", "options", "expected"),
    [
        (2, {}, [2]),
        (20, {}, [5, 5, 10]),
        (24, {"starts": 3}, [4, 4, 4, 12]),
        (4, {"starts": 3}, [1, 1, 1, 1]),
        (13, {"start_rounds": 3}, [3, 3, 7]),
        (6, {"starts": 2, "start_rounds": 3}, [3, 3]),
        (9, {"starts": 1}, [9]),
    ],
)
def test_rounds_are_those_of_all_starts(
    rounds: int, options: dict[str, Any], expected: list[int], small: Federation
) -> None:
    """Runs of one start are counted in the history, whose last ones continue the best start."""
    history = IFCA(k=2, rounds=rounds, model="linear", **options).fit(small).history_
    starts = [line["start"] for line in history]
    assert len(starts) == rounds == sum(expected)
    judged = [n for n, line in enumerate(history, 1) if line["loss"] is not None]
    short = expected[:-1] if len(expected) > 1 and len(judged) < len(expected) else expected
    assert judged == (list(np.cumsum(short)) if len(expected) > 1 else [])


def test_a_model_that_cannot_be_drawn_anew_is_refused_before_anything_runs(
    small: Federation, tmp_path: Path
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))
            self.inner = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scale * torch.as_tensor(self.inner(x))

    with pytest.raises(UsageError, match="'scale' of Scaled cannot be drawn anew"):
        IFCA(model=Scaled()).fit(small, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    IFCA(model=Scaled(), k=1, starts=1, rounds=1).config(small, "float32")


def test_a_client_that_missed_the_last_average_does_not_show_a_model_to_newcomers(
    small: Federation,
) -> None:
    made = IFCA(k=1, starts=1, rounds=2, mask="permutation")
    state, _, endpoint, *_ = served(
        made, small, lost=lambda call: {0} if call.method == "choose" and call.round == 3 else set()
    )
    client, offer = endpoint.client, state.offers
    assert offer is not None and offer.models == [0]
    mine, peers = (client.model_sets[0][0].models.row(i) for i in (0, 1))
    assert not torch.equal(mine, peers)
    torch.testing.assert_close(
        client.cohort.start + client._pipeline.inverse(offer.table[0], offer.steps[0]),
        peers,
        rtol=0,
        atol=1e-12,
    )


def test_a_client_that_was_never_reached_shows_the_model_everyone_begins_with(
    small: Federation,
) -> None:
    deaf = {"choose", "contribute", "lowest_loss"}
    state, *_ = served(
        IFCA(k=2, starts=1, rounds=1),
        small,
        lost=lambda call: set(range(6)) if call.method in deaf else set(),
    )
    assert state.offers is not None and not state.offers.table.any()


@pytest.mark.parametrize("starts", [1, 2])
def test_losses_of_starts_are_told_where_clients_send_them(starts: int, small: Federation) -> None:
    made = IFCA(k=2, starts=starts, start_rounds=1, rounds=4, model="linear")
    *_, transcript = served(made, small)
    sent = any(entry.method == "lowest_loss" for entry in transcript.entries)
    views = made.disclosures().server
    told = any("lowest training loss" in view for view in views)
    assert sent == told == (starts > 1)


@pytest.mark.parametrize(
    ("step", "averages", "choice", "words"),
    [
        (5, 5, 5, None),  # the same request again
        (6, 5, 5, None),
        (6, 3, 6, None),
        (5, 6, 4, "late"),
        (5, 4, 6, "late"),
        (5, 5, 0, "choose comes first"),
    ],
)
def test_a_client_trains_the_model_that_it_chose_and_no_earlier_one(
    step: int, averages: int, choice: int, words: str | None
) -> None:
    context: Any = SimpleNamespace(step=step, positions=[0, 1], ids=[0, 1])
    bound: list[Any] = []
    client: Any = SimpleNamespace(
        bind_models=lambda context, starts: bound.append(starts),
        _chosen=torch.tensor([[0, 1, choice], [0, 0, 5]]),
        _last_call=torch.tensor([[averages, 9], [5, 9]]),
        model_sets={0: "the models of the only start"},
    )
    if words is None:
        IFCAClient._check_chosen(client, context)
        assert bound == [[0, 0]]
    else:
        with pytest.raises(PolicyError, match=words):
            IFCAClient._check_chosen(client, context)
        assert not bound
