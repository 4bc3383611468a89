"""Runs under secure sums: the same models and labels, and a server that reads no single reply."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from cases import (
    DOUBLE,
    FULL,
    Served,
    node_each,
    run_server,
    serve,
    stub_pair_network,
    two_clusters,
    variant,
)

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.errors import (
    FrameError,
    PolicyError,
    SecureClusterError,
    UpdateError,
    UsageError,
)
from securecluster.messaging import chunks, wire
from securecluster.messaging.messages import (
    Call,
    Empty,
    Header,
    Picks,
    Response,
    Rows,
    Shared,
    format_ids,
)
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protections.key_exchange import SumKey
from securecluster.protections.secure_sums import client as sum_client
from securecluster.protections.secure_sums import server as sum_server
from securecluster.protections.secure_sums.messages import (
    BOX,
    LostMembers,
    SeedShares,
    masked_class,
)
from securecluster.protections.secure_sums.shamir import VALUE
from securecluster.protections.sum_calls import FollowingSum
from securecluster.protocols.common.averages.counted_blocks import BlockCount
from securecluster.protocols.common.messages import Update
from securecluster.protocols.conformance import Example, check_frames, check_replay, example
from securecluster.protocols.hidden.client import HiddenClient, PublicMean
from securecluster.protocols.nsim.client import NSIMClient
from securecluster.protocols.registry import PROTOCOLS, protocol_class
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import SUM, Endpoint, answers, fixed_sums, releases_of
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess
from securecluster.statements import privacy_section

ACCEPTED = (
    "cfl sketch", "cfl compress", "cfl signature", "flhc", "flhc apart", "flhc signature", "flux",
    "srfca", "srfca sealed", "oneshot", "nsim", "nsim apart", "hidden", "ifca", "local-kmeans",
    "random", "fedavg", "finetune", "mrmtl", "local",
)  # fmt: skip
REFUSED = {
    "cfl": ("single updates", "sketch"),
    "cfl gradient": ("single updates", "sketch"),
    "cfl fallback": ("single updates", "sketch"),
    "srfca l2": ("one by one", "distance loss"),
    "srfca trim": ("one by one", "trim 0"),
}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 40)


@pytest.fixture(autouse=True)
def small_pair_network(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_pair_network(monkeypatch)


def make(name: str, **params: Any) -> Any:
    """A variant with secure sums and few rounds, whose clients are lost one by one."""
    small: dict[str, Any] = {"rounds": 4, "epochs": 1, "model": "mlp-32", "cohort_size": 0}
    return variant(name, **{**small, "aggregation": "secagg", **params})


def row_dropouts(share: float) -> Callable[[Call], set[int]]:
    """Lose clients in the calls for rows alone, by client and call."""
    randomness = Randomness(3)

    def lost(call: Call) -> set[int]:
        if call.verb != SUM:
            return set()
        gone = set()
        for client in call.to:
            if randomness.generator("lost", client, call.step).random() < share:
                gone.add(client)
        return gone

    return lost


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ACCEPTED)
def test_models_and_labels_are_those_of_plain_sums(name: str, federation: Federation) -> None:
    plain = make(name, aggregation="plain").fit(federation)
    run: Example = example(partial(make, name), federation)
    made = make(name)
    calm = made.fit(federation, FULL)
    assert list(calm.labels_) == list(plain.labels_)
    if not made.sums.other_than_plain:
        torch.testing.assert_close(
            calm.client_models_.values, plain.client_models_.values, rtol=0, atol=1e-6
        )
    check_frames(calm)
    check_frames(run.fitted)
    check_replay(run)


def test_every_other_method_is_refused_with_a_reason_and_a_choice_that_works(
    federation: Federation,
) -> None:
    for name, words in REFUSED.items():
        with pytest.raises(UsageError) as caught:
            make(name).fit(federation)
        for word in words:
            assert word in str(caught.value)
    with pytest.raises(UsageError, match="placement local"):
        make("fedavg", clip=1.0, noise=1.0, placement="central").fit(federation)
    with pytest.raises(UsageError, match="aggregation"):
        make("fedavg", aggregation="paillier").fit(federation)
    with pytest.raises(UsageError, match="sum_bound"):
        make("fedavg", sum_bound=0.0).fit(federation)


@pytest.mark.parametrize("name", ["fedavg", "srfca"])
def test_dropouts_of_rows_cost_no_more_than_under_plain_sums(name: str) -> None:
    many = two_clusters(12, 20)
    lost = row_dropouts(0.3 if name == "fedavg" else 0.1)
    found = []
    for aggregation in ("plain", "secagg"):
        served = serve(make(name, aggregation=aggregation), many, lost)
        found.append(served)
    plain, secure = found
    assert secure.net.state.lost == plain.net.state.lost
    assert any(plain.net.state.lost.values())
    torch.testing.assert_close(
        secure.endpoint.client.models.values, plain.endpoint.client.models.values, rtol=0, atol=1e-6
    )
    pads = [e for e in secure.transcript.entries if e.method == "reveal_pads"]
    shares = [e for e in secure.transcript.entries if e.method == "reveal_shares"]
    rows = [e for e in secure.transcript.entries if e.verb == SUM]
    assert 0 < len(pads) <= len(shares) == len(rows)


def test_without_dropouts_a_sum_takes_two_exchanges_and_a_run_two_more(
    federation: Federation,
) -> None:
    fitted = make("fedavg").fit(federation, FULL)
    methods = [entry.method for entry in fitted.transcript_.entries]
    assert methods == ["sum_offer", "sum_keys", *["contribute", "reveal_shares"] * 4, "receive"]


def test_keys_of_masks_and_of_sums_go_out_together(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    trips: list[list[str]] = []

    def exchange_all(transport: InProcess, calls: Sequence[Call]) -> list[Response]:
        trips.append([call.method for call in calls])
        return [transport.exchange(call) for call in calls]

    monkeypatch.setattr(InProcess, "exchange_all", exchange_all)
    fitted = make("fedavg", mask="rotation").fit(federation, FULL)
    together = [["key_offer", "sum_offer"], ["key_seal", "sum_keys"], ["key_open"]]
    assert trips == together
    methods = [entry.method for entry in fitted.transcript_.entries]
    assert methods[5] == "contribute"


def test_who_offers_no_key_beside_the_agreement_is_asked_again(federation: Federation) -> None:
    def lost(call: Call) -> set[int]:
        return {1} if call.method == "sum_offer" and call.step == 1 else set()

    served = serve(make("fedavg", mask="rotation", rounds=1), federation, lost)
    entries = served.transcript.entries
    sent = [served.transcript.content(k)[0] for k in range(len(entries))]
    assert [call.to for call in sent if call.method == "sum_offer"] == [tuple(range(6)), (1,)]
    # the others then lack its key, and it lacks none
    assert next(call.to for call in sent if call.method == "sum_keys") == (0, 2, 3, 4, 5)
    assert [call.to for call in sent if call.method == "contribute"] == [tuple(range(6))]
    assert set(served.net.state.sum_keys.told.values()) == {6}


def test_a_client_that_is_lost_after_its_row_arrived_is_taken_out_of_the_sum() -> None:
    """Client 0's row is lost, and client 1 reveals no pads: the sum is that of the others."""
    many = two_clusters(8, 20)

    def late(call: Call) -> set[int]:
        gone = {0} if call.verb == SUM else set()
        return gone | ({1} if call.method in ("reveal_pads", "reveal_shares") else set())

    def early(call: Call) -> set[int]:
        return {0, 1} if call.verb == SUM else set()

    secure = serve(make("fedavg", rounds=1), many, late)
    plain = serve(make("fedavg", rounds=1, aggregation="plain"), many, early)
    assert secure.net.state.lost == plain.net.state.lost == {0: [1], 1: [1]}
    torch.testing.assert_close(
        secure.state.outbox.posts[0].table, plain.state.outbox.posts[0].table, rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("method", "gone"), [("contribute", 3), ("contribute", 6), ("reveal_shares", 3)]
)
def test_too_few_survivors_release_nothing(method: str, gone: int, federation: Federation) -> None:
    def lost(call: Call) -> set[int]:
        return set(range(gone)) if call.method == method else set()

    served = serve(make("fedavg", rounds=2), federation, lost)
    assert not served.state.outbox.posts
    assert served.net.state.lost == {i: [1, 2] for i in range(6)}
    assert served.net.state.ledger.events == []


def test_noise_is_priced_as_under_plain_sums(federation: Federation) -> None:
    noised: dict[str, Any] = {
        "clip": 0.5,
        "noise": 1.0,
        "mask": "permutation",
        "placement": "local",
    }
    plain = make("fedavg", aggregation="plain", **noised).fit(federation)
    secure = make("fedavg", **noised).fit(federation)
    for fitted in (plain, secure):
        fitted.events = [
            (e.method, e.verb, e.fields, e.mechanism, e.noise_multiplier, e.ids)
            for e in fitted.ledger_.events
        ]
    assert secure.events == plain.events
    assert secure.ledger_.price(1e-5).epsilon == plain.ledger_.price(1e-5).epsilon < 100
    assert "most_samples" not in secure.kept_.learned.config


def masked_rows(federation: Federation) -> tuple[Served, list[Any], torch.Tensor]:
    """A run of one round, what the server read from `contribute`, and the clients' updates."""
    secure = serve(make("fedavg", rounds=1), federation)
    plain = serve(make("fedavg", rounds=1, aggregation="plain"), federation)
    frames = [
        seen.content
        for seen in secure.transcript.seen_by("server")
        if seen.method == "contribute" and seen.receiver.kind == "server"
    ]
    (position,) = [k for k, e in enumerate(plain.transcript.entries) if e.verb == SUM]
    updates = plain.transcript.content(position)[1].reply.delta.values
    return secure, frames, updates


def test_what_the_server_reads_of_one_client_is_uniform_and_correlates_with_nothing(
    federation: Federation,
) -> None:
    _, frames, updates = masked_rows(federation)
    d = updates.shape[1]
    assert len(frames) == len(updates) == 6
    for frame in frames:
        row = frame.delta.values[0].to(torch.float64)
        assert frame.delta.table.dtype == torch.int32
        assert frame.size.table.dtype == torch.int64
        # 16 equal parts of the ring: chi-squared with 15 degrees of freedom, below 1e-6
        counts, _ = np.histogram(row.numpy(), bins=16, range=(-(2.0**31), 2.0**31))
        assert ((counts - d / 16) ** 2 / (d / 16)).sum() < 60
        for update in updates:
            correlation = np.corrcoef(row.numpy(), update.numpy())[0, 1]
            assert abs(correlation) < 6 / np.sqrt(d)
    # a number of samples, 40, is far from the masked ones
    sizes = [int(frame.size.values[0]) for frame in frames]
    assert len(set(sizes)) == 6
    assert min(abs(size) for size in sizes) > 1 << 32


def test_the_same_rows_are_masked_anew_in_each_call(federation: Federation) -> None:
    secure = serve(make("fedavg", rounds=2, lr=1e-12), federation)
    rows = [
        secure.transcript.content(k)[1].reply.delta.values
        for k, entry in enumerate(secure.transcript.entries)
        if entry.verb == SUM
    ]
    for first, second in zip(*rows, strict=True):
        assert float((first == second).double().mean()) < 0.01


def test_a_number_beyond_the_range_is_one_clear_sentence(federation: Federation) -> None:
    with pytest.raises(UpdateError, match=r"delta: .* beyond its bound .*: raise sum_bound"):
        make("fedavg", sum_bound=1e-6).fit(federation)
    noised = make("fedavg", sum_bound=1e-6, clip=1.0, noise=0.1, placement="local")
    noised.fit(federation)  # an error would tell of the data


# --- rows that are the same in every call ---

# Methods whose rows in sums are not the same in every call, with the reason. All others are held to
# one list of clients.
CHANGING = {
    "cluster_losses": "losses of the clusters' models of a round",
    "contribute": "an update from the averages, or of the model, of a round",
    "contribute_block": "an update from the averages of the query",
    "contribute_blocks": "an update of the model just chosen",
    "contribute_counted": "an update from the averages that came with a count",
    "contribute_kept_update": "the update of its own round",
    "contribute_to": "an update of the model of the query",
    "count_block": "ones of a cluster, over the clients of a round",
    "count_choice": "a choice among the query's models",
    "judge": "losses of the query's models",
    "known_losses": "losses of other clients' models, over the clusters of a round",
    "lowest_loss": "losses of the query's models",
    "train": "an update from the averages of the query",
}


def test_every_row_of_a_sum_is_held_to_one_list_or_says_why_it_changes() -> None:
    changing = set()
    fixed = set()
    for name in PROTOCOLS:
        client = protocol_class(name).client
        summed = {method for method, release in releases_of(client).items() if SUM in release.via}
        changing |= summed - fixed_sums(client)
        fixed |= fixed_sums(client)
    assert changing == set(CHANGING)
    of_hidden = {"send_parts", "send_residual", "send_moments", "send_cell", "send_step"}
    counted = {"count_parts", "count_cell", "count_step", "count_cluster"}
    counted |= {"send_counted_parts", "send_counted_step"}
    of_labels = {"send_means", "send_matched", "send_map", "count_map"}
    assert fixed == {"send_point", "pool", "sum_columns"} | of_hidden | counted | of_labels


class Asked(HiddenClient):
    @answers(SUM, unmasked=("count",))
    def forgotten(self, context: CallContext, query: Empty) -> BlockCount:
        """Return something of the data without saying that it never changes."""
        raise NotImplementedError


def test_a_method_that_is_asked_nothing_is_held_to_one_list_by_itself() -> None:
    assert "forgotten" in fixed_sums(Asked)


@pytest.mark.parametrize(("name", "calls"), [("hidden", 5), ("nsim", 1)])
def test_no_second_list_opens_rows_that_follow_from_data_alone(
    name: str, calls: int, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest_sum = ServerChannel.sum
    held = []

    def asked_again(net: Any, method: Any, query: Any, to: Any, by: Any = None, **rest: Any) -> Any:
        first = honest_sum(net, method, query, to, by, **rest)
        fixed = fixed_sums(HiddenClient) | fixed_sums(NSIMClient)
        # what follows a count has the members of the count
        if method.__name__ in fixed and not isinstance(query, FollowingSum):
            # a server that remembers nothing leaves a client out
            net.aggregator._asked.clear()
            others = None if by is None else by[1:]
            with pytest.raises(PolicyError, match="another list of survivors"):
                honest_sum(net, method, query, to[1:], others, **rest)
            # the same list gives the same sum
            again = honest_sum(net, method, query, to, by, **rest)
            for field, value in vars(first.rows).items():
                if value is not None:
                    assert torch.equal(value.table, getattr(again.rows, field).table)
            held.append(method.__name__)
            return again  # what follows a count follows the last one
        return first

    monkeypatch.setattr(ServerChannel, "sum", asked_again)
    serve(make(name, rounds=1, mask="none"), federation)
    assert len(set(held)) == calls


def test_a_query_that_differs_a_little_opens_no_other_list_either(federation: Federation) -> None:
    net = serve(make("hidden", rounds=1), federation).net
    mean = torch.zeros(net.limits.size("signature"), dtype=torch.float64)
    net.sum(HiddenClient.send_moments, PublicMean(Shared(mean)), to=net.clients)
    net.aggregator._asked.clear()
    with pytest.raises(PolicyError, match="another list of survivors"):
        net.sum(HiddenClient.send_moments, PublicMean(Shared(mean + 1e-9)), to=net.clients[1:])


def points_lost(gone: dict[int, set[int]], calls: list[Call]) -> Callable[[Call], set[int]]:
    """Lose the points of clients by call, and the shares of three clients in the first call."""

    def lost(call: Call) -> set[int]:
        if call.method == "send_point":
            calls.append(call)
            return gone.get(call.step, set())
        # in the first call two clients reveal their shares, which are too few
        if call.method == "reveal_shares" and call.step == 1:
            return {2, 3, 4}
        return set()

    return lost


def test_a_sum_that_failed_after_shares_were_revealed_is_asked_for_over_the_same_clients(
    federation: Federation,
) -> None:
    calls: list[Call] = []
    served = serve(make("hidden", rounds=1), federation, points_lost({1: {5}}, calls))
    assert [call.to for call in calls] == [tuple(range(6))] * 2
    lists = {
        tuple(call.query.lost.table[list(call.query.lost.picks[0])].tolist())
        for k, entry in enumerate(served.transcript.entries)
        for call in [served.transcript.content(k)[0]]
        if entry.method == "reveal_shares" and call.query.purpose == "send_point"
    }
    assert lists == {(5,)}


def test_a_sum_over_other_clients_than_the_one_list_is_not_asked_for(
    federation: Federation,
) -> None:
    """Client 5 is lost in the first attempt, and client 4 in the second; then all are there."""
    calls: list[Call] = []
    served = serve(make("hidden", rounds=1), federation, points_lost({1: {5}, 2: {4}}, calls))
    # in the second attempt all are needed, so client 4 is asked again and again
    assert list(dict.fromkeys(call.step for call in calls)) == [1, 2, 3]
    revealed = [
        served.transcript.content(k)[0]
        for k, entry in enumerate(served.transcript.entries)
        if entry.method in ("reveal_pads", "reveal_shares")
    ]
    assert {call.step for call in revealed if call.query.purpose == "send_point"} == {1, 3}


def test_a_sum_is_given_up_where_a_row_that_must_leave_it_was_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def late(call: Call) -> set[int]:
        gone = {0} if call.verb == SUM else set()
        return gone | ({1} if call.method in ("reveal_pads", "reveal_shares") else set())

    monkeypatch.setattr(sum_server, "KEPT_BYTES", 0)
    served = serve(make("fedavg", rounds=1), two_clusters(8, 20), late)
    assert not served.state.outbox.posts
    assert served.net.state.ledger.events == []
    assert "reveal_shares" not in [entry.method for entry in served.transcript.entries]


# --- clients that lie ---


def told(federation: Federation, method: str, change: Callable[[Any], Any]) -> None:
    """Run one round whose replies to a method a test changes; client 5 sends no row."""
    made = make("fedavg", rounds=1)
    endpoint = build_client(made, federation, DOUBLE)

    def exchange(call: Call) -> Response:
        if call.method == "contribute":
            call = call.select([k for k, client in enumerate(call.to) if client != 5])
        response = endpoint.answer(call)
        if call.method != method:
            return response
        return dataclasses.replace(response, reply=change(response.reply))

    net = build_network(made, InProcess(exchange), made.config(federation, "float64"))
    run_server(made, net)


def one_less(field: str) -> Callable[[Any], Any]:
    """Take one row of the last client out of a reply."""

    def change(reply: Any) -> Any:
        value = getattr(reply, field)
        *others, last = value.picks
        return dataclasses.replace(reply, **{field: Picks(value.table, (*others, last[1:]))})

    return change


@pytest.mark.parametrize(
    ("method", "field", "words"),
    [
        ("contribute", "boxes", "client 4 sent 4 boxes for 5 neighbours"),
        ("reveal_pads", "keys", "client 4 revealed other pads than it was asked for"),
        ("reveal_shares", "shares", "client 4 revealed other shares than it was asked for"),
    ],
)
def test_replies_of_another_length_are_refused_by_client(
    method: str, field: str, words: str, federation: Federation
) -> None:
    with pytest.raises(FrameError, match=words):
        told(federation, method, one_less(field))


def test_rows_with_other_fields_are_refused(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "FIRST_CHUNK", 3)
    seen: list[Any] = []

    def without_size(reply: Any) -> Any:
        seen.append(reply)
        return dataclasses.replace(reply, size=None) if len(seen) == 2 else reply

    with pytest.raises(FrameError, match="rows of a secure sum differ in their fields"):
        told(federation, "contribute", without_size)


# --- a server that lies ---


@pytest.fixture(scope="module")
def honest(federation: Federation) -> Served:
    """One honest round, whose frames a lying server starts from."""
    return serve(make("fedavg", rounds=1), federation)


class Clients:
    """The nodes of a federation, which have answered the first frames of an honest server."""

    def __init__(self, honest: Served, federation: Federation, upto: str) -> None:
        self.calls = {}
        for k, entry in enumerate(honest.transcript.entries):
            self.calls.setdefault(entry.method, honest.transcript.content(k)[0])
        self.nodes = node_each(make("fedavg", rounds=1), federation, DOUBLE)
        for method in ("sum_offer", "sum_keys", "contribute", "reveal_shares"):
            for client in range(len(self.nodes)):
                self.ask(client, self.calls[method])
            if method == upto:
                break

    def ask(self, client: int, call: Call, **changes: Any) -> Response:
        """Send one client its frame of a call, with changes."""
        own = call.select([call.to.index(client)])
        node: Endpoint[Any] = self.nodes[client]
        return node.answer(dataclasses.replace(own, **changes))


def picks(*ids: int) -> Picks:
    return Picks(torch.tensor(ids, dtype=torch.int64), (tuple(range(len(ids))),))


def test_a_client_reveals_shares_for_one_list_of_survivors(
    honest: Served, federation: Federation
) -> None:
    clients = Clients(honest, federation, "reveal_shares")
    call = clients.calls["reveal_shares"]
    clients.ask(0, call)  # the same list again gives the same shares
    own = call.select([0]).query
    other = dataclasses.replace(own, lost=picks(5))
    with pytest.raises(PolicyError, match="another list of survivors"):
        clients.ask(0, call, query=other)
    with pytest.raises(PolicyError, match="another list of survivors"):
        clients.ask(0, call, method="reveal_pads", query=LostMembers("contribute", picks(5)))


def test_a_client_reveals_a_pad_or_a_share_and_never_both(
    honest: Served, federation: Federation
) -> None:
    clients = Clients(honest, federation, "contribute")
    call = clients.calls["reveal_shares"]
    query = LostMembers("contribute", picks(5))
    found = clients.ask(0, call, method="reveal_pads", query=query)
    assert found.reply.keys.table.shape == (1, 32)
    with pytest.raises(PolicyError, match="pair key"):
        clients.ask(0, call)
    with pytest.raises(PolicyError, match="survived"):
        too_many = LostMembers("contribute", picks(3, 4, 5))
        clients.ask(1, call, method="reveal_pads", query=too_many)


@pytest.mark.parametrize(
    ("group", "members", "error", "words"),
    [
        ("", 6, FrameError, "no list of its members"),
        ("0", 1, PolicyError, "a single contribute answer"),
        ("1-5", 5, PolicyError, "client 0 is no member"),
        ("0-4,6", 6, PolicyError, "no key of client 6"),
        ("0-5", 4, FrameError, "no list of its members"),
        ("0,1", 2, FrameError, "no list of its members"),
        ("1,0", 2, FrameError, "no list of its members"),
        ("0-0,1", 2, FrameError, "no list of its members"),
        ("0,0-1", 3, FrameError, "no list of its members"),
        ("0-9999999999", 6, FrameError, "no list of its members"),
        ("x", 2, FrameError, "no list of its members"),
    ],
)
def test_members_are_checked_before_a_row_is_computed(
    group: str,
    members: int,
    error: type[SecureClusterError],
    words: str,
    honest: Served,
    federation: Federation,
) -> None:
    clients = Clients(honest, federation, "sum_keys")
    trained: list[int] = []
    clients.nodes[0].client.cohort.train = lambda *args, **named: trained.append(1)
    with pytest.raises(error, match=words):
        clients.ask(0, clients.calls["contribute"], group=(group,), members=(members,))
    assert not trained


def test_a_client_is_asked_for_one_row_of_a_sum(honest: Served, federation: Federation) -> None:
    clients = Clients(honest, federation, "sum_keys")
    twice = clients.calls["contribute"].select([0, 0])
    with pytest.raises(PolicyError, match="asked for two rows of one secure sum"):
        clients.nodes[0].answer(twice)


def test_lists_that_a_client_refuses_fill_no_memory(
    honest: Served, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sum_client, "KEPT_PAIRS", 12)
    clients = Clients(honest, federation, "sum_keys")
    service: Any = clients.nodes[0].halves[SUM]
    call = dataclasses.replace(clients.calls["contribute"].select([0]), step=1 << 40)
    for least in (3, 4, 5, 6):
        service._context(call, "contribute", tuple(range(least)), b"root")
        assert sum(len(pairs) for pairs in service._pairs.values()) <= 12
    assert [len(pairs.graph.ring) for pairs in service._pairs.values()][-1] == 6


def test_a_plain_sum_of_the_same_client_is_refused(honest: Served, federation: Federation) -> None:
    clients = Clients(honest, federation, "sum_keys")
    call = clients.calls["contribute"]
    with pytest.raises(FrameError, match="sums are secure"):
        clients.ask(0, call, group=())
    plain = make("fedavg", rounds=1, aggregation="plain")
    node = build_client(plain, federation, DOUBLE, [0])
    own = clients.calls["sum_offer"].select([0])
    config = serve(plain, federation).transcript.content(0)[0].config
    with pytest.raises(FrameError, match="same protocol with the same protections"):
        node.answer(dataclasses.replace(own, config=config))


def test_a_call_before_the_last_64_is_answered_no_more(
    honest: Served, federation: Federation
) -> None:
    clients = Clients(honest, federation, "contribute")
    call = clients.calls["contribute"]
    record = clients.nodes[0].halves["sum"]._record(0)
    (attempts,) = record.guard.attempts.values()
    record.guard.attempts.update({call.step + k: attempts for k in range(1, 65)})
    record.forget()
    assert call.step not in record.guard.attempts
    with pytest.raises(PolicyError, match="has long answered later ones"):
        clients.ask(0, call)


def test_members_are_at_least_two_and_as_many_as_frames_count(
    honest: Served, federation: Federation
) -> None:
    clients = Clients(honest, federation, "sum_keys")
    call = clients.calls["contribute"]
    service = clients.nodes[0].halves["sum"]
    release = releases_of(type(clients.nodes[0].client))["contribute"]
    alone = dataclasses.replace(call.select([0]), group=("0",), members=(1,))
    with pytest.raises(PolicyError, match=r"a secure sum over 1 client\(s\) is refused"):
        service.check(alone, release)
    pairwise = service._exchange._keys.secrets.pairwise
    pairwise.public[0] = bytes(32)
    pairwise.roots.update(dict.fromkeys(range(6), pairwise.roots[0]))
    # frames of one list that count its members differently
    differing = dataclasses.replace(call, members=(6, 6, 6, 6, 6, 5))
    with pytest.raises(FrameError, match="another number of members than it counts"):
        service.check(differing, release)


def test_one_message_has_one_key_of_a_client(honest: Served, federation: Federation) -> None:
    clients = Clients(honest, federation, "sum_offer")
    clients.nodes[0].halves["sum"]._exchange._keys._roster = None  # whatever signatures say
    call = clients.calls["sum_keys"]
    query = call.select([0]).query
    ids = query.ids.table.clone()
    ids[2] = 1
    twice = dataclasses.replace(query, ids=Picks(ids, query.ids.picks))
    with pytest.raises(FrameError, match="another key of client 1"):
        clients.ask(0, call, query=twice)


def test_one_attempt_masks_one_row(honest: Served, federation: Federation) -> None:
    clients = Clients(honest, federation, "contribute")
    call = clients.calls["contribute"]
    first = clients.ask(0, call).reply
    again = clients.ask(0, call).reply
    assert torch.equal(first.delta.table, again.delta.table)
    with pytest.raises(PolicyError, match="already"):
        clients.ask(0, call, group=("0-4",), members=(5,))


def test_keys_that_were_swapped_are_refused(honest: Served, federation: Federation) -> None:
    clients = Clients(honest, federation, "sum_offer")
    call = clients.calls["sum_keys"]
    query = call.select([0]).query
    swapped = query.keys.table.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    with pytest.raises(FrameError):  # not what these clients signed
        clients.ask(0, call, query=dataclasses.replace(query, keys=Picks(swapped, query.ids.picks)))
    clients.ask(0, call)
    mine = clients.nodes[0].halves["sum"]
    mine._exchange._keys._roster = None  # even where no signature is verified, a key stays
    other = query.keys.table.clone()
    other[1, 0] ^= 1
    with pytest.raises(FrameError, match="another key of client 1"):
        clients.ask(0, call, query=dataclasses.replace(query, keys=Picks(other, query.ids.picks)))


def test_the_report_tells_what_the_server_read(federation: Federation) -> None:
    secure = privacy_section.section(make("fedavg").fit(federation).result_)
    plain = privacy_section.section(make("fedavg", aggregation="plain").fit(federation).result_)
    text = " ".join(secure["server_view"])
    assert "plain sum" not in str(secure) and "plain sum" in str(plain)
    assert "sums of delta" in text and "number of samples" in text
    assert any("delta of contribute of a single client" in s for s in secure["unseen"])
    assert "lps_view" not in secure


def test_frames_of_a_million_numbers_are_two_percent_longer_at_most() -> None:
    clients, d = 100, 10**6
    run = "c" * 32
    group = format_ids(range(clients))

    def up(method: str, message: Any, secure: bool = True) -> int:
        verb = SUM if method == "contribute" else "gather"
        fields = (group, 0) if secure else ("", 0)
        header = Header(run, method, verb, 40, 40, "client/99", "server", clients, *fields)
        return wire.size(header, message)

    def rows(*shape: int, dtype: torch.dtype) -> Rows:
        return Rows(torch.empty(1, *shape, dtype=dtype, device="meta"))

    def block(count: int, width: int) -> Picks:
        table = torch.empty(count, width, dtype=torch.uint8, device="meta")
        return Picks(table, (tuple(range(count)),))

    sizes = rows(dtype=torch.float32)
    plain = up("contribute", Update(rows(d, dtype=torch.float32), sizes), secure=False)
    masked = masked_class(Update, ("delta",))(
        delta=rows(d, dtype=torch.int32),
        size=rows(dtype=torch.int64),
        commitment=rows(32, dtype=torch.uint8),
        boxes=block(clients - 1, BOX),
        origin=rows(16, dtype=torch.uint8),
    )
    shares = SeedShares(block(clients, VALUE))
    keys = SumKey(rows(32, dtype=torch.uint8), rows(64, dtype=torch.uint8))
    secure = up("contribute", masked) + up("reveal_shares", shares) + up("sum_offer", keys)
    print(f"uplink at d = 1e6, m = 100: {secure / plain:.5f} of plain ({secure - plain} bytes)")
    assert secure < 1.02 * plain
