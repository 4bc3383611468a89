"""Both ends of averaging by displacements: nobody is left behind, and nothing is kept too long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import two_clusters
from hypothesis import given
from hypothesis import strategies as st

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.errors import PolicyError, UpdateError
from securecluster.messaging.messages import Call, Picks, Response, Rows
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.masking import masks
from securecluster.privacy.masking.key_agreement import Secrets
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols import CFL, FedAvg, Settings
from securecluster.protocols.common.averages.pending_updates import (
    PendingUpdates,
    flush,
    request_models,
)
from securecluster.protocols.common.averages.sampling import sample_clients
from securecluster.protocols.common.client import TrainingClient
from securecluster.protocols.common.messages import AverageDeltas, Update
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess


def rows(*values: float) -> torch.Tensor:
    return torch.tensor(values)[:, None]


def sent(box: PendingUpdates, to: list[int]) -> list[list[tuple[int, float]]]:
    """What each of `to` is sent: (step, average), oldest first."""
    letter = box.message_for(to)
    assert letter.means.picks == letter.steps.picks
    return [
        [(int(letter.steps.table[p]), float(letter.means.table[p])) for p in picks]
        for picks in letter.means.picks
    ]


def test_each_client_is_sent_its_own_clusters_averages_that_it_lacks() -> None:
    box = PendingUpdates.start(3, fresh=True)
    assert sent(box, [0, 2]) == [[], []]
    box.post(4, rows(1), [0, 0, 0])
    box.acknowledge([1])
    box.post(9, rows(2, 3), [0, 1, 1])
    assert sent(box, [0, 1, 2]) == [[(4, 1), (9, 2)], [(9, 3)], [(4, 1), (9, 3)]]
    assert not box.message_for([0]).absolute
    assert box.lagging_clients() == [0, 1, 2]


def test_what_nobody_lacks_is_dropped_and_what_somebody_lacks_is_kept() -> None:
    box = PendingUpdates.start(3, fresh=True)
    for step in (1, 2, 3):
        box.post(step, rows(step), [0, 0, 0])
        box.acknowledge([0, 1])
        assert [p.step for p in box.posts] == list(range(1, step + 1))
    box.acknowledge([2])
    assert (box.posts, box.first, box.lagging_clients()) == ([], 3, [])
    box.post(4, rows(4), [0, 0, 0])
    assert sent(box, [0, 1, 2]) == [[(4, 4)]] * 3


@given(st.lists(st.sets(st.integers(0, 3)), max_size=8), st.booleans())
def test_whoever_misses_whatever_the_sum_of_what_came_is_the_same(
    came: list[set[int]], fresh: bool
) -> None:
    box, got, posted = PendingUpdates.start(4, fresh), [0.0] * 4, 0.0

    def deliver_to(ids: list[int]) -> None:
        letter = box.message_for(ids)
        for i, picks in zip(ids, letter.means.picks, strict=True):
            assert fresh or len(picks) <= 1
            for p in picks:
                got[i] = float(letter.means.table[p]) + (0 if letter.absolute else got[i])
        box.acknowledge(ids)

    for step, ids in enumerate(came):
        box.post(step, rows(2.0**step), [0, 0, 0, 0])
        posted += 2.0**step
        deliver_to(sorted(ids))
        assert all(got[i] == posted for i in ids)
        behind = {i for i in range(4) if got[i] != posted}
        assert set(box.lagging_clients()) == behind
        lacked = max((step + 1 - bin(int(got[i])).count("1") for i in range(4)), default=0)
        assert len(box.posts) == (lacked if fresh else 1)
    deliver_to(box.lagging_clients())
    assert got == [posted] * 4
    assert not box.lagging_clients()


def test_an_outbox_without_fresh_masks_sends_one_row_since_the_start() -> None:
    box = PendingUpdates.start(4, fresh=False)
    box.post(1, rows(1), [0, 0, 0, 0])
    box.acknowledge([0, 1, 3])
    box.post(2, rows(10, 20), [0, 1, 1, 0])
    box.acknowledge([0])
    box.post(3, rows(100, 200, 300), [0, 1, 2, 0])
    assert sent(box, [0, 1, 2, 3]) == [[(3, 111)], [(3, 221)], [(3, 321)], [(3, 111)]]
    assert box.message_for([2]).absolute
    assert box.message_for([2]).means.table.shape == (3, 1)
    box.acknowledge([0, 1, 2])
    assert (box.lagging_clients(), sent(box, [0, 3])) == ([3], [[], [(3, 111)]])


def test_an_outbox_survives_a_checkpoint() -> None:
    box = PendingUpdates.start(2, fresh=True)
    box.post(1, rows(1), [0, 0])
    box.acknowledge([1])
    box.post(2, rows(2), [0, 0])
    back = unpack(pack(box), PendingUpdates)
    for some in (box, back):
        some.acknowledge([0])
        some.post(3, rows(3), [0, 0])
    assert sent(back, [0, 1]) == sent(box, [0, 1]) == [[(3, 3)], [(2, 2), (3, 3)]]


@pytest.fixture(scope="module")
def tiny() -> Federation:
    return two_clusters(4, 20)


def trained(
    method: CFL | FedAvg, federation: Federation, missing: set[int]
) -> tuple[torch.Tensor, Endpoint[TrainingClient], ServerChannel]:
    """All clients' final models where client 1 misses the training of some rounds."""
    endpoint = build_client(method, federation, Settings())

    def lost(call: Call) -> set[int]:
        return {1} if call.method in ("train", "contribute") and call.round in missing else set()

    net = build_network(
        method, InProcess(endpoint.answer, lost), method.config(federation, "float32")
    )
    method.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    return endpoint.client.models.values, endpoint, net


@pytest.mark.parametrize("mask", ["none", "permutation", "signed-permutation", "rotation"])
def test_updates_are_masked_where_training_wrote_them(
    mask: str, tiny: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = CFL(rounds=1, mask=mask)
    endpoint = build_client(method, tiny, Settings())
    cohort, written = endpoint.client.cohort, list[torch.Tensor]()
    inner = cohort.train
    monkeypatch.setattr(cohort, "train", lambda *rest: written.append(inner(*rest)) or written[-1])  # type: ignore[func-returns-value]
    sent = list[torch.Tensor]()

    def answer(call: Call) -> Response:
        reply = endpoint.answer(call)
        sent.extend([reply.reply.delta.table] if call.method in ("train", "contribute") else [])
        return reply

    net = build_network(method, InProcess(answer), method.config(tiny, "float32"))
    method.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    assert [t.data_ptr() for t in sent] == [t.data_ptr() for t in written] and len(sent) == 1
    assert sent[0].shape == (4, masks.width(mask, cohort.model.dimension))
    assert torch.equal(
        sent[0], inner(Rows(cohort.start[None], (0,) * 4), range(4), endpoint.client.training, 1)
    ) == (mask == "none")


@pytest.mark.few(8)
@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
@pytest.mark.parametrize("protocol", [CFL, FedAvg])
@pytest.mark.parametrize("missing", [{2, 3}, {1}, {4, 5}, {1, 2, 3, 4, 5}])
def test_a_client_that_misses_rounds_ends_with_the_others_weights_bit_for_bit(
    protocol: type[CFL | FedAvg], mask: str, missing: set[int], tiny: Federation
) -> None:
    models, endpoint, net = trained(protocol(rounds=5, mask=mask), tiny, missing)
    assert net.state.lost == {1: sorted(missing)}
    assert torch.equal(models, models[:1].expand_as(models))
    assert not torch.equal(models[0], endpoint.client.cohort.start)


def trainee(federation: Federation, ids: list[int] | None = None) -> TrainingClient:
    method = CFL(mask="permutation")
    endpoint = build_client(method, federation, Settings(), ids)
    endpoint.keys.restore(Secrets(seed={endpoint.ids[0]: bytes(range(32))}))
    return endpoint.client


def letter(
    means: torch.Tensor,
    steps: list[int],
    picks: tuple[tuple[int, ...], ...],
    absolute: bool = False,
) -> AverageDeltas:
    counts = torch.tensor([len(own) for own in picks])
    return AverageDeltas(
        Picks(means, picks), Picks(torch.tensor(steps), picks), absolute, Rows(counts)
    )


def test_an_absolute_letter_replaces_whatever_the_client_had(tiny: Federation) -> None:
    client = build_client(CFL(mask="none"), tiny, Settings()).client
    d = len(client.cohort.start)
    means = torch.stack([torch.full((d,), 0.5), torch.full((d,), -0.25)])
    for _ in range(2):
        client.take([0, 3], letter(means, [1, 1], ((1,), (0,)), absolute=True))
    assert torch.equal(client.models.values[0], client.cohort.start - 0.25)
    assert torch.equal(client.models.values[3], client.cohort.start + 0.5)
    assert torch.equal(client.models.values[1], client.cohort.start)


def test_an_update_is_what_training_moved_and_sizes_are_told_only_where_weighted(
    tiny: Federation,
) -> None:
    context = CallContext((2, 0), (2, 0), 1, 7)
    empty = letter(torch.zeros(0, 0), [], ((), ()))
    for weighted in (False, True):
        method = CFL(mask="none", average="weighted" if weighted else "uniform")
        client = build_client(method, tiny, Settings()).client
        reply = client.train(context, empty)
        expected = client.cohort.train(client.models.select([2, 0]), [2, 0], client.training, 7)
        assert torch.equal(reply.delta.values, expected)
        assert torch.equal(client.models.values, client.cohort.start.expand(4, -1))
        assert (reply.size is not None) == weighted
        if reply.size is not None:
            assert reply.size.values.tolist() == [20.0, 20.0]


class Silent:
    """A client that only receives."""

    def __init__(self, silent: dict[int, int]) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.silent = silent

    def exchange(self, call: Call) -> Response:
        self.asked.append(call.to)
        came = [
            i
            for i in call.to
            if self.asked.count(call.to)
            and sum(i in to for to in self.asked) > self.silent.get(i, 0)
        ]
        return Response(tuple(came), None)


def test_the_last_averages_are_sent_again_to_who_did_not_reply_a_few_times_only() -> None:
    transport = Silent({1: 2, 3: 99})
    net = ServerChannel(4, transport, "c", Pipeline(), Randomness(0))
    state = type("State", (), {})()
    state.outbox = PendingUpdates.start(4, fresh=True)
    state.outbox.post(1, rows(1), [0, 0, 0, 0])
    net.round = 7
    flush(net, Run(), state)
    assert transport.asked == [(0, 1, 2, 3), (1, 3), (1, 3), (3,), (3,)]
    assert state.outbox.lagging_clients() == [3]
    assert net.state.lost == {1: [7], 3: [7]}
    assert not net.state.ledger.events


def test_nobody_is_asked_to_receive_what_everyone_has() -> None:
    transport = Silent({})
    state = type("State", (), {})()
    state.outbox = PendingUpdates.start(3, fresh=True)
    flush(ServerChannel(3, transport, "c", Pipeline(), Randomness(0)), Run(), state)
    assert transport.asked == []


def test_invitations_are_sorted_distinct_members_at_their_share_and_differ_by_round() -> None:
    net = ServerChannel(20, Silent({}), "c", Pipeline(), Randomness(3))
    members = list(range(40, 60))
    draws = [sample_clients(net, members, 0.3, t, 0) for t in range(200)]
    assert all(len(d) == 6 and d == sorted(set(d)) and set(d) <= set(members) for d in draws)
    assert (
        draws[4]
        == sample_clients(net, members, 0.3, 4, 0)
        != sample_clients(net, members, 0.3, 4, 1)
    )
    counts = np.bincount(np.concatenate(draws) - 40, minlength=20)
    assert counts.min() > 35
    assert counts.max() < 90
    assert sample_clients(net, members, 1.0, 1) == members
    assert len(sample_clients(net, members, 1e-9, 1)) == 1
    assert sample_clients(net, [7], 0.5, 1) == [7]


def test_restored_secrets_undo_the_mask_of_those_they_were_taken_from(tiny: Federation) -> None:
    client = trainee(tiny)
    pipeline, fresh = client._pipeline, build_client(CFL(mask="permutation"), tiny, Settings(), [0])
    fresh.keys.restore(Secrets(seed={0: bytes(range(32))}))
    values = torch.arange(50.0)[None]
    assert torch.equal(fresh.client._pipeline.inverse(pipeline.forward(values, 3), 3), values)


def test_who_has_left_is_sent_what_was_posted_before_and_nothing_after() -> None:
    for fresh in (True, False):
        box = PendingUpdates.start(3, fresh)
        box.post(1, rows(1), [0, 0, 0])
        box.unsubscribe([2])
        # the average of the others; nobody contributes to the cluster of who has left
        box.post(2, rows(10, 0), [0, 0, 1])
        assert sent(box, [2]) == [[(1 if fresh else 2, 1)]]
        assert box.message_for([0, 2]).count.values.tolist() == [2, 1]
        assert box.lagging_clients() == [0, 1, 2]
        box.acknowledge([2])
        box.post(3, rows(100, 0), [0, 0, 1])
        assert (
            sent(box, [2]),
            box.message_for([2]).count.values.tolist(),
            box.lagging_clients(),
        ) == ([[]], [1], [0, 1])
        box.acknowledge([0, 1])
        assert len(box.posts) == (0 if fresh else 1)


def averages(client: TrainingClient, number: int) -> torch.Tensor:
    return torch.stack([torch.full_like(client.cohort.start, 2.0**k) for k in range(number)])


def counted(
    means: torch.Tensor, picks: tuple[int, ...], count: int, absolute: bool = False
) -> AverageDeltas:
    """A letter to one client, whose last average is the last of `count`."""
    steps = torch.zeros(len(means), dtype=torch.int64)
    return AverageDeltas(
        Picks(means, (picks,)), Picks(steps, (picks,)), absolute, Rows(torch.tensor([count]))
    )


def test_an_average_moves_a_model_once_whenever_and_however_often_it_comes(
    tiny: Federation,
) -> None:
    client = build_client(CFL(mask="none"), tiny, Settings(dtype="float64"), [1]).client
    means, start = averages(client, 3), client.cohort.start

    def moved() -> float:
        return float((client.models.row(0) - start)[0])

    client.take([0], counted(means, (0,), 1))
    assert moved() == 1
    for again in (counted(means, (0,), 1), counted(means, (), 0), counted(means, (), 1)):
        client.take([0], again)
        assert moved() == 1
    looked = client.advanced([0], counted(means, (0, 1), 2))  # an observer's look
    assert float((looked.row(0) - start)[0]) == 3 and moved() == 1
    client.take([0], counted(means, (0, 1, 2), 3))
    client.take([0], counted(means, (0, 1), 2))
    assert moved() == pytest.approx(7, abs=1e-12)


def test_an_older_displacement_does_not_move_a_model_back(tiny: Federation) -> None:
    client = build_client(CFL(mask="none"), tiny, Settings(), [1]).client
    means, start = averages(client, 3), client.cohort.start
    client.take([0], counted(means, (2,), 3, absolute=True))
    client.take([0], counted(means, (0,), 1, absolute=True))
    assert torch.equal(client.models.row(0), start + means[2])


@pytest.mark.parametrize("absolute", [False, True])
def test_a_client_that_lost_its_state_says_so(absolute: bool, tiny: Federation) -> None:
    client = build_client(CFL(mask="none"), tiny, Settings(), [1]).client
    means = averages(client, 2)
    with pytest.raises(
        UpdateError, match="client 1 lacks averages that the server takes it to have"
    ):
        client.take([0], counted(means, () if absolute else (1,), 2, absolute))
    assert torch.equal(client.models.row(0), client.cohort.start)


def test_a_request_about_an_earlier_model_is_not_answered_from_a_later_one(
    tiny: Federation,
) -> None:
    client: Any = build_client(CFL(mask="none"), tiny, Settings(), [1]).client
    means, context = averages(client, 2), CallContext((1,), (0,), 1, 1)
    client.receive(context, counted(means, (0, 1), 2))
    for name in ("train", "gradient", "send_compressed_update", "judge"):
        with pytest.raises(PolicyError, match="moved on"):
            getattr(client, name)(context, counted(means, (), 1))
    client.receive(context, counted(means, (0,), 1))
    lone: Any = build_client(FedAvg(), tiny, Settings(), [1]).client
    lone.receive(context, counted(means, (0,), 1))
    for name in ("contribute", "train_locally"):
        with pytest.raises(PolicyError, match="moved on"):
            getattr(lone, name)(context, counted(means, (), 0))


def test_training_alone_is_done_once_a_call_and_never_for_an_earlier_one(tiny: Federation) -> None:
    client: Any = build_client(FedAvg(), tiny, Settings(), [1, 2]).client
    none = PendingUpdates.start(4, fresh=False)
    client.train_locally(CallContext((1,), (0,), 1, 5), none.message_for([1]))
    once = client.models.row(0).clone()
    client.train_locally(
        CallContext((1, 2), (0, 1), 1, 5), none.message_for([1, 2])
    )  # client 2 had not been reached
    client.train_locally(CallContext((1,), (0,), 1, 4), none.message_for([1]))
    assert torch.equal(client.models.row(0), once)
    other: Any = build_client(FedAvg(), tiny, Settings(), [1, 2]).client
    other.train_locally(CallContext((1, 2), (0, 1), 1, 5), none.message_for([1, 2]))
    torch.testing.assert_close(client.models.values, other.models.values, rtol=0, atol=1e-6)
    again: Any = build_client(FedAvg(), tiny, Settings(), [1, 2]).client
    again.restore(unpack(pack(client.state(Secrets())), ClientState))
    again.train_locally(CallContext((1,), (0,), 1, 5), none.message_for([1]))
    assert torch.equal(again.models.values, client.models.values)


def test_after_a_split_both_halves_continue_the_displacement_of_their_parent() -> None:
    outbox = PendingUpdates.start(4, fresh=False)
    outbox.post(1, torch.tensor([[1.0], [10.0]]), [0, 0, 1, 1])
    outbox.post(2, torch.tensor([[2.0], [20.0], [5.0]]), [0, 2, 1, 1])
    assert [float(outbox.displacement(i, 1)) for i in range(4)] == [3.0, 6.0, 30.0, 30.0]


class Together:
    """Clients of which some do not post; calls that come together are listed together."""

    def __init__(self, silent: set[int]) -> None:
        self.asked: list[list[tuple[int, ...]]] = []
        self.silent = silent

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        self.asked.append([call.to for call in calls])
        return [self.exchange(call) for call in calls]

    def exchange(self, call: Call) -> Response:
        came = tuple(i for i in call.to if i not in self.silent)
        if not came:
            return Response((), None)
        return Response(came, Update(Rows(torch.full((1, 2), float(came[0]))), None))


def test_models_of_clusters_are_asked_together_and_each_under_a_mask_of_its_own() -> None:
    transport = Together(silent={0, 4, 5})
    net = ServerChannel(6, transport, "c", Pipeline(), Randomness(0))
    outbox = PendingUpdates.start(6, fresh=True)
    models = request_models(net, outbox, [[0, 1], [2, 3], [4, 5]], width=2)
    assert transport.asked == [[(0,), (2,), (4,)], [(1,), (5,)]]
    assert [model.displacement.tolist() for model in models] == [[1.0, 1.0], [2.0, 2.0], []]
    steps = [model.step for model in models[:2]]
    assert len(set(steps)) == 2 and 0 not in steps
