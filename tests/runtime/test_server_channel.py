"""The three verbs: what they bring, what they refuse, and what they write down."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any

import numpy as np
import pytest
import torch
from cases import two_clusters

from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.errors import FrameError, PolicyError, UpdateError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Call, Empty, Header, Response, Rows, Shared
from securecluster.messaging.parties import Party, lps
from securecluster.messaging.refusals import reraise
from securecluster.messaging.replies import _finite, check_finite
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.masking.masks import Permutation
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols import CFL, Settings
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.channel_state import ChannelState
from securecluster.runtime.endpoint import (
    GATHER,
    PAIRS,
    SUM,
    Endpoint,
    answers,
    hidden_message_types,
)
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import Framed, InProcess

CONFIG = "c" * 32
Lost = Callable[[Call], set[int]]


@dataclass(frozen=True, eq=False)
class Own:
    """One row per client."""

    rows: Annotated[Rows, Real(("numbers",))]


@dataclass(frozen=True, eq=False)
class Sized:
    rows: Annotated[Rows, Real(("numbers",))]
    size: Annotated[Rows | None, Real(low=0, maximum=1000)]


@dataclass(frozen=True, eq=False)
class Done:
    pass


class Toy:
    """Client i holds row i, and adds what it is sent."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    @answers(GATHER, SUM, unmasked=("rows",))
    def row(self, context: CallContext, query: Empty) -> Own:
        return Own(Rows(self.rows[list(context.positions)]))

    @answers(GATHER, SUM, unmasked=("rows",))
    def unsized(self, context: CallContext, query: Empty) -> Sized:
        return Sized(Rows(self.rows[list(context.positions)]), None)

    @answers(GATHER, unmasked=("rows",))
    def shifted(self, context: CallContext, query: Own) -> Own:
        return Own(Rows(self.rows[list(context.positions)] + query.rows.values))

    @answers(SUM, unmasked=("rows",))
    def only_summed(self, context: CallContext, query: Empty) -> Own:
        return Own(Rows(self.rows[list(context.positions)]))

    @answers(PAIRS, unmasked=("rows",))
    def relevance(self, context: CallContext, query: Empty) -> Own:
        return Own(Rows(self.rows[list(context.positions)]))

    @answers(GATHER, SUM, through=("rows",))
    def masked(self, context: CallContext, query: Empty) -> Own:
        return Own(Rows(self.rows[list(context.positions)]))

    @answers(SUM, through=("rows",))
    def masked_sum(self, context: CallContext, query: Empty) -> Own:
        return Own(Rows(self.rows[list(context.positions)]))

    @answers(GATHER, private=False)
    def ready(self, context: CallContext, query: Empty) -> Done:
        return Done()

    def hidden(self, context: CallContext, query: Empty) -> Own:
        return Own(Rows(self.rows[list(context.positions)]))


def nobody(call: Call) -> set[int]:
    return set()


def endpoint(
    rows: torch.Tensor, masked: bool = False, ids: Sequence[int] | None = None
) -> Endpoint[Toy]:
    stage = Permutation()
    pipeline = Pipeline([stage] if masked else [])
    at = range(len(rows)) if ids is None else ids
    made = Endpoint(
        Toy(rows[list(at)]), at, CONFIG, pipeline, KeyRing(CONFIG, Randomness(5), stage.unlock)
    )
    made.on_refusal = reraise
    return made


def network(rows: torch.Tensor, lost: Lost = nobody, masked: bool = False) -> ServerChannel:
    stages = [Permutation()] if masked else []
    net = ServerChannel(
        len(rows),
        InProcess(endpoint(rows, masked).answer, lost, chunk=2),
        CONFIG,
        Pipeline(stages),
        Randomness(0),
    )
    net.round = 6
    return net


ROWS = torch.from_numpy(np.random.default_rng(1).normal(size=(5, 5)))
ALL = range(5)


def test_each_client_gets_its_own_row_of_the_query() -> None:
    query = Own(Rows(torch.tensor([[10.0], [20.0], [30.0]], dtype=torch.float64)))
    got = network(ROWS, lambda call: {1}).gather(Toy.shifted, query, to=(4, 1, 0))
    assert (got.ids, got.lost, got.step, len(got)) == ((4, 0), (1,), 1, 2)
    torch.testing.assert_close(
        got.rows.rows.values, ROWS[[4, 0]] + torch.tensor([[10.0], [30.0]], dtype=torch.float64)
    )
    with pytest.raises(UsageError, match="3 rows cannot go to 2 clients"):
        network(ROWS).gather(Toy.shifted, query, to=(0, 1))


class Number(int):
    """A number that counts comparisons, of which a search in a list makes one for each item."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Number.compared += 1
        return int(self) == other

    __hash__ = int.__hash__


def numbers(count: int, divisor: int = 1) -> list[int]:
    """Return numbers of which equal ones are other objects, as after they were stored."""
    return [Number(k // divisor) for k in range(count)]


def comparisons_of_a_masked_sum(clients: int) -> int:
    net = network(torch.ones(clients, 3), masked=True)
    net.sum(Toy.masked_sum, Empty(), to=numbers(clients))  # with the key agreement
    net.state.keyed = numbers(clients)
    Number.compared = 0
    net.sum(Toy.masked_sum, Empty(), to=numbers(clients), by=numbers(clients, divisor=10))
    return Number.compared


def test_a_masked_call_searches_no_list_of_clients() -> None:
    assert comparisons_of_a_masked_sum(400) < 1.1 * 4 * comparisons_of_a_masked_sum(100)


def test_steps_count_the_calls_and_rounds_are_in_the_frames() -> None:
    calls: list[Call] = []

    def seen(call: Call) -> set[int]:
        calls.append(call)
        return set()

    net = network(ROWS, seen)
    net.gather(Toy.row, Empty(), to=(0, 1))
    net.sum(Toy.row, Empty(), to=ALL)
    assert [(c.method, c.verb, c.round, c.step, c.members) for c in calls] == [
        ("row", "gather", 6, 1, (1, 1)),
        ("row", "sum", 6, 2, (5, 5)),
        ("row", "sum", 6, 2, (5, 5)),
        ("row", "sum", 6, 2, (5,)),
    ]


@pytest.mark.parametrize("verb", ["gather", "sum", "pairs"])
def test_a_method_that_is_not_declared_is_refused_on_both_sides(verb: str) -> None:
    with pytest.raises((PolicyError, FrameError), match="is not a"):
        getattr(network(ROWS), verb)(Toy.hidden, Empty(), to=ALL)
    for name in ("hidden", "rows", "__init__", "nothing", "answer"):
        with pytest.raises(FrameError, match="not a method this client answers"):
            endpoint(ROWS).answer(Call(CONFIG, name, verb, 1, 1, (0,), Empty(), (5,)))


def test_a_verb_that_is_not_declared_is_refused() -> None:
    net = network(ROWS)
    with pytest.raises(PolicyError, match="through sum, not gather"):
        net.gather(Toy.only_summed, Empty(), to=ALL)
    with pytest.raises(PolicyError, match="through pairs, not sum"):
        net.sum(Toy.relevance, Empty(), to=ALL)
    with pytest.raises(PolicyError, match="through gather or sum, not pairs"):
        net.pairs(Toy.row, Empty(), to=ALL)
    assert not net.state.ledger.events


def test_a_sum_of_one_is_refused_by_a_sum_only_method_and_by_no_other() -> None:
    net = network(ROWS)
    for to, by in (((3,), None), (ALL, [0, 0, 0, 0, 1])):
        with pytest.raises(PolicyError, match=r"1 client\(s\) would show a single"):
            net.sum(Toy.only_summed, Empty(), to=to, by=by)
    assert net.sum(Toy.only_summed, Empty(), to=(3, 4)).counts == (2,)
    with pytest.raises(PolicyError):
        endpoint(ROWS).answer(Call(CONFIG, "only_summed", SUM, 1, 1, (0,), Empty(), (0,)))
    with pytest.raises(PolicyError):
        endpoint(ROWS).answer(Call(CONFIG, "only_summed", SUM, 1, 1, (0, 1), Empty(), (2, 1)))


def test_a_sum_also_takes_replies_with_an_absent_field() -> None:
    total = network(ROWS, lambda call: {2}).sum(
        Toy.unsized, Empty(), to=ALL, by=[0, 1, 0, 1, 0], groups=3
    )
    assert (total.counts, total.ids, total.lost) == ((2, 2, 0), (0, 1, 3, 4), (2,))
    expected = torch.stack(
        [ROWS[0] + ROWS[4], ROWS[1] + ROWS[3], torch.zeros(5, dtype=torch.float64)]
    )
    torch.testing.assert_close(total.rows.rows.table, expected)
    assert total.rows.size is None


HEADER = Header(CONFIG, "row", "gather", 1, 1, "server", "client/0", 1)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"config": "d" * 32}, "another configuration"),
        ({"config": ""}, "another configuration"),
        ({"recipient": "client/1"}, "another client"),
        ({"recipient": "server"}, "another client"),
        ({"recipient": "client/00"}, "another client"),
        ({"sender": "client/1"}, "another client"),
        ({"method": "nothing"}, "not a method"),
        ({"method": "hidden"}, "not a method"),
        ({"method": "relevance"}, "not gather"),
        ({"verb": ""}, "through gather or sum, not"),
    ],
)
def test_frames_that_are_not_for_this_client_or_not_allowed_are_refused(
    change: dict[str, str], sentence: str
) -> None:
    node = endpoint(ROWS, ids=[0])
    header, reply = wire.decode(node.answer_frame(wire.encode(HEADER, Empty())), Own)
    assert (header.sender, header.recipient) == ("client/0", "server")
    assert torch.equal(reply.rows.values[0], ROWS[0])
    with pytest.raises((FrameError, PolicyError), match=sentence):
        node.answer_frame(wire.encode(dataclasses.replace(HEADER, **change), Empty()))


def test_a_batch_with_a_stranger_is_refused() -> None:
    with pytest.raises(FrameError, match=r"clients \[3\]"):
        endpoint(ROWS, ids=[0, 1]).answer(
            Call(CONFIG, "row", GATHER, 1, 1, (0, 3), Empty(), (1, 1))
        )


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("verb", ["gather", "sum", "pairs"])
def test_a_value_that_is_not_finite_names_client_and_round(verb: str, value: float) -> None:
    rows = ROWS.clone()
    rows[3, 1] = value
    net = network(rows)
    with pytest.raises(UpdateError, match=r"^round 6: rows of client\(s\) 3 is not finite"):
        getattr(net, verb)(Toy.relevance if verb == "pairs" else Toy.row, Empty(), to=ALL)
    assert net.gather(Toy.row, Empty(), to=(0, 1, 2, 4)).lost == ()


def test_an_unfinite_row_that_several_clients_share_names_them_all() -> None:
    shared = Own(Rows(torch.tensor([[0.0], [torch.nan]]), (1, 0, 1)))
    net = ServerChannel(3, Canned(shared), CONFIG, Pipeline(), Randomness(0))
    with pytest.raises(UpdateError, match=r"client\(s\) 0, 2 is"):
        net.gather(Toy.masked, Empty(), to=range(3))


def test_unfinite_numbers_that_all_frames_share_are_nobodys() -> None:
    call = Call(CONFIG, "row", GATHER, 6, 1, (0, 3), Empty(), (1, 1))
    for value, finite in ((torch.ones(2), True), (torch.tensor([1.0, torch.inf]), False)):
        answer = Response((0, 3), SimpleNamespace(value=Shared(value)))
        if finite:
            check_finite(call, answer)
            continue
        with pytest.raises(UpdateError, match="round 6: value of the clients' replies is not"):
            check_finite(call, answer)


class Canned:
    """A transport that always brings the same reply."""

    def __init__(self, reply: object) -> None:
        self.reply = reply

    def exchange(self, call: Call) -> Response:
        return Response(call.to, self.reply)

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        return [self.exchange(call) for call in calls]

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        yield call, self.exchange(call)


def test_lost_clients_are_named_once_per_round() -> None:
    net = network(
        ROWS, lambda call: {2} if call.round == 1 else {0, 2} if call.round == 3 else set()
    )
    for number in (1, 2, 3):
        net.round = number
        net.gather(Toy.row, Empty(), to=(1, 2, 3))
        net.sum(Toy.row, Empty(), to=ALL)
    assert net.state.lost == {2: [1, 3], 0: [3]}


def test_when_nobody_replies_there_is_nothing_and_no_release() -> None:
    net = network(ROWS, lambda call: set(ALL))
    got, total = net.gather(Toy.row, Empty(), to=ALL), net.sum(Toy.row, Empty(), to=ALL)
    assert (got.ids, got.rows, got.lost) == ((), None, tuple(ALL))
    assert (total.ids, total.rows, total.counts, total.lost) == ((), None, (0,), tuple(ALL))
    assert not net.state.ledger.events


def test_pairs_is_the_symmetric_half_sum_in_the_order_of_those_asked() -> None:
    net = network(ROWS)
    half = (ROWS + ROWS.T) / 2
    torch.testing.assert_close(net.pairs(Toy.relevance, Empty(), to=ALL).value, half)


def test_pairs_under_another_order_and_losses_matches_columns_to_clients() -> None:
    to, came = (4, 0, 3, 1), [4, 3, 1]
    columns = torch.full((5, 4), 99.0, dtype=torch.float64)
    for k, j in enumerate(to):
        columns[:, k] = ROWS[:, j]
    got = network(columns, lambda call: {0}).pairs(Toy.relevance, Empty(), to=to)
    torch.testing.assert_close(got.value, ((ROWS + ROWS.T) / 2)[came][:, came])
    assert list(got.ids) == came


def test_who_does_not_reply_is_asked_again_and_replies_keep_the_order_of_those_asked() -> None:
    asked: list[tuple[int, ...]] = []

    def lost(call: Call) -> set[int]:
        asked.append((call.step, *call.to))
        return {1, 3} if len(asked) == 1 else {3}

    got = network(ROWS, lost).gather(Toy.row, Empty(), to=(4, 1, 0, 3), tries=3)
    assert asked == [(1, 4, 1, 0, 3), (1, 1, 3), (1, 3)]
    assert (got.ids, got.lost) == ((4, 1, 0), (3,))
    assert torch.equal(got.rows.rows.values, ROWS[[4, 1, 0]])
    asked.clear()
    pairs = network(ROWS, lost).pairs(Toy.relevance, Empty(), to=ALL, tries=2)
    assert pairs.ids == (0, 1, 2, 4)
    torch.testing.assert_close(pairs.value, ((ROWS + ROWS.T) / 2)[[0, 1, 2, 4]][:, [0, 1, 2, 4]])


def test_who_reads_a_sum_is_told_in_the_order_of_the_local_servers() -> None:
    readers: list[Party] = []
    net = network(ROWS)
    net.divide([4, 3, 2, 1, 0])
    net.observe = lambda outcome: readers.append(outcome.reader)
    net.pairs(Toy.relevance, Empty(), to=ALL)
    assert readers == [lps(index) for index in range(5)]


def test_pairs_refuses_rows_of_another_length_and_a_lone_reply() -> None:
    with pytest.raises(FrameError, match="a row of 3 numbers per client"):
        network(ROWS).pairs(Toy.relevance, Empty(), to=(0, 1, 2))
    with pytest.raises(UsageError, match="at least two replies, 1 came"):
        network(ROWS, lambda call: {1}).pairs(Toy.relevance, Empty(), to=(0, 1))
    with pytest.raises(UsageError, match="at least two replies, 0 came"):
        network(ROWS, lambda call: set(ALL)).pairs(Toy.relevance, Empty(), to=ALL)


def test_masked_fields_are_masked_with_one_order_for_all_and_others_are_not() -> None:
    net = network(ROWS, masked=True)
    got, plain = (
        net.gather(Toy.masked, Empty(), to=ALL).rows.rows.values,
        net.gather(Toy.row, Empty(), to=ALL).rows.rows.values,
    )
    assert torch.equal(plain, ROWS)
    assert not torch.equal(got, ROWS)
    torch.testing.assert_close(got @ got.T, ROWS @ ROWS.T, rtol=1e-12, atol=1e-12)
    again = net.gather(Toy.masked, Empty(), to=ALL).rows.rows.values
    assert not torch.equal(again, got)
    assert torch.equal(again.sort().values, got.sort().values)


def test_what_a_network_remembers_survives_a_checkpoint() -> None:
    net = network(ROWS, lambda call: {3}, masked=True)
    net.gather(Toy.masked, Empty(), to=ALL)
    assert unpack(pack(net.state), ChannelState) == net.state
    assert (net.state.keyed, net.state.lost) == ([0, 1, 2, 4], {3: [6]})


def keyed_in(lost: Lost, rounds: int) -> list[list[int]]:
    """Who is in the masked round, round by round."""
    net = network(ROWS, lost, masked=True)
    came = []
    for number in range(1, rounds + 1):
        net.round = number
        came.append(list(net.gather(Toy.masked, Empty(), to=ALL).ids))
    return came


EVERYONE = list(ALL)


@pytest.mark.parametrize(
    ("gone", "expected"),
    [
        ({}, [EVERYONE, EVERYONE]),
        ({("key_offer", 1): {0}}, [[1, 2, 3, 4], EVERYONE]),
        ({("key_seal", 1): {0}}, [EVERYONE, EVERYONE]),
        ({("key_seal", 1): {0, 1}}, [EVERYONE, EVERYONE]),
        ({("key_open", 1): {3}}, [[0, 1, 2, 4], EVERYONE]),
        ({("key_seal", 1): {0}, ("key_open", 1): {0}}, [[1, 2, 3, 4], EVERYONE]),
        ({("key_open", 1): {1, 2, 3, 4}}, [[0], EVERYONE]),
        ({("key_seal", 1): set(ALL)}, [[], EVERYONE]),
        ({("key_offer", 1): set(ALL)}, [[], EVERYONE]),
        ({("key_open", 1): {3}, ("key_seal", 2): {0}}, [[0, 1, 2, 4], EVERYONE]),
        ({("key_open", 1): {3}, ("key_seal", 2): set(ALL)}, [[0, 1, 2, 4], [0, 1, 2, 4], EVERYONE]),
        ({("key_open", 1): {3}, ("key_offer", 2): {3}}, [[0, 1, 2, 4], [0, 1, 2, 4], EVERYONE]),
    ],
)
def test_who_misses_the_key_agreement_sits_out_and_catches_up(
    gone: dict[tuple[str, int], set[int]], expected: list[list[int]]
) -> None:
    assert (
        keyed_in(lambda call: gone.get((call.method, call.round), set()), len(expected)) == expected
    )


def test_a_leader_whose_reply_is_lost_joins_the_seed_of_the_next_leader() -> None:
    """It has drawn a seed that nobody else got; the box of the next leader holds another one."""
    nodes = {i: endpoint(ROWS, True, [i]) for i in ALL}
    fallen: list[bytes] = []

    def flaky(data: bytes) -> bytes:
        reply = nodes[0].answer_frame(data)
        if wire.peek(data).method == "key_seal" and not fallen:
            fallen.append(reply)
            raise ConnectionError
        return reply

    clients = {**{i: node.answer_frame for i, node in nodes.items()}, 0: flaky}
    net = ServerChannel(
        5,
        Framed(clients, lambda name: hidden_message_types(Toy, name, {})[1]),
        CONFIG,
        Pipeline([Permutation()]),
        Randomness(0),
    )
    got = net.gather(Toy.masked, Empty(), to=ALL)
    assert fallen
    inner = got.rows.rows.values @ got.rows.rows.values.T
    torch.testing.assert_close(
        inner, (ROWS @ ROWS.T)[list(got.ids)][:, list(got.ids)], rtol=1e-12, atol=1e-12
    )
    assert net.gather(Toy.masked, Empty(), to=ALL).ids == tuple(ALL)


def test_a_client_that_missed_the_agreement_still_gets_every_average() -> None:
    federation = two_clusters(4, 20)
    method = CFL(rounds=4)
    clients = build_client(method, federation, Settings())
    asked: dict[int, tuple[int, ...]] = {}

    def lost(call: Call) -> set[int]:
        if call.method in ("train", "contribute"):
            asked[call.round] = call.to
        return {1} if call.method == "key_open" and call.round <= 2 else set()

    net = build_network(
        method, InProcess(clients.answer, lost), method.config(federation, "float32")
    )
    method.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    assert asked == {1: (0, 2, 3), 2: (0, 2, 3), 3: (0, 1, 2, 3), 4: (0, 1, 2, 3)}
    assert net.state.lost == {1: [1, 2]}
    models = clients.client.models.values
    assert torch.equal(models, models[:1].expand_as(models))


def test_finite_numbers_whose_sum_overflows_pass_and_others_do_not() -> None:
    rows = torch.full((4, 10), 3e38)
    rows[1, 3], rows[2, 5] = float("nan"), -float("inf")
    assert _finite(rows).tolist() == [True, False, False, True]
    assert _finite(torch.tensor([1.0, float("inf")])).tolist() == [True, False]


def test_a_group_that_shrinks_to_one_client_is_summed_later() -> None:
    net = network(ROWS, lambda call: {3} if call.method == "key_open" else set(), masked=True)
    query = {"to": ALL, "by": (0, 0, 0, 1, 1), "groups": 2}
    total = net.sum(Toy.masked_sum, Empty(), **query)
    assert (total.ids, total.counts, total.lost) == ((0, 1, 2), (3, 0), (3, 4))


def test_posted_calls_have_numbers_and_masks_of_their_own() -> None:
    net = network(ROWS, masked=True)
    first, second = (net.post(Toy.masked, Empty(), to=ALL) for _ in range(2))
    assert second.step == first.step + 1
    assert not torch.equal(first.rows.rows.values, second.rows.rows.values)
    assert net.gather(Toy.masked, Empty(), to=ALL).step == 1


@pytest.mark.parametrize(
    ("ready", "rosters", "clients", "asked"),
    [
        ([0, 1, 2, 3], None, [0, 1, 2, 3], [[0, 1, 2, 3]]),
        # a cohort of which one cannot answer is left out whole
        ([0, 1, 2, 4, 5], [[0, 1, 2], [3, 4, 5]], [0, 1, 2], [[0, 1, 2], [3, 4, 5]]),
        # of a group that nobody answers for there is nothing to divide
        ([0, 1, 2], [[0, 1, 2], [3, 4, 5]], [0, 1, 2], [[0, 1, 2]]),
        ([], [[0, 1, 2], [3, 4, 5]], [], []),
    ],
)
def test_cohorts_answer_as_a_whole(
    ready: list[int], rosters: list[list[int]] | None, clients: list[int], asked: list[list[int]]
) -> None:
    divided: list[list[int]] = []

    def of(roster: list[int]) -> list[list[int]]:
        divided.append(list(roster))
        return [list(roster)]

    channel: Any = SimpleNamespace(cohorts=SimpleNamespace(of=of))
    found, cohorts = ServerChannel._in_cohorts(channel, ready, dict.fromkeys(range(4), 0), rosters)
    assert found == clients
    assert sorted(client for cohort in cohorts for client in cohort) == clients
    assert divided == asked
    channel.cohorts = None
    assert ServerChannel._in_cohorts(channel, ready, {}, rosters) == (ready, [])
