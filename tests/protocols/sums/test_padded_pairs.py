"""Runs with padded pairs: the same labels, R within its stated error, and rows nobody reads."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, Served, node_each, serve, two_clusters, variant

from securecluster import Federation
from securecluster.errors import (
    FrameError,
    PolicyError,
    SecureClusterError,
    UpdateError,
    UsageError,
)
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Header, Picks, Response, Rows, format_ids
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protections.key_exchange import KeyExchange
from securecluster.protections.pads.client import padded_class
from securecluster.protections.pads.server import PaddedPairs, _sums_of_pairs
from securecluster.protections.pair_rows import PairRange
from securecluster.protocols.conformance import (
    check_frames,
    check_nodes,
    check_replay,
    check_resume,
    example,
)
from securecluster.protocols.oneshot.client import RELEVANCE, OneShotClient, RelevanceRow
from securecluster.protocols.srfca.protocol import PairsOfLosses
from securecluster.runtime.endpoint import PAIRS, Endpoint
from securecluster.runtime.pair_aggregators import PairFunctions
from securecluster.runtime.transport import InProcess
from securecluster.statements import disclosures, privacy_section

PADS: dict[str, Any] = {"relevance": "pads"}
SECURE: dict[str, Any] = {**PADS, "aggregation": "secagg"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


def make(name: str, **params: Any) -> Any:
    """A variant with few rounds."""
    small: dict[str, Any] = {"rounds": 1, "epochs": 1, "model": "linear"}
    return variant(name, **{**small, **params})


def rows_of(served: Served, method: str) -> torch.Tensor:
    """The rows of the last call of a method, as the server received them."""
    (position,) = [k for k, e in enumerate(served.transcript.entries) if e.method == method]
    ((_, field),) = vars(served.transcript.content(position)[1].reply).items()
    return field.values


@pytest.fixture(scope="module")
def plain(federation: Federation) -> Served:
    return serve(make("oneshot"), federation)


@pytest.fixture(scope="module")
def honest(federation: Federation) -> Served:
    return serve(make("oneshot", **PADS), federation)


def test_r_of_one_shot_is_within_a_billionth_and_labels_are_those_of_plain_pairs(
    plain: Served, honest: Served
) -> None:
    rows = rows_of(plain, "relevance").double()
    expected = (rows + rows.T) / 2
    error = (honest.state.relevance - expected).abs().max()
    assert RELEVANCE.error_bound() == 2.0**-30 < 1e-9
    assert 0 < error <= 2.0**-30
    assert honest.state.labels == plain.state.labels
    assert honest.net.state.ledger.events[0].ids == plain.net.state.ledger.events[0].ids


def test_r_of_losses_is_exact_to_1e_10_and_labels_are_those_of_plain_pairs(
    federation: Federation,
) -> None:
    plain = serve(make("srfca", aggregation="secagg"), federation)
    secure = serve(make("srfca", **SECURE), federation)
    rows = rows_of(plain, "losses")
    expected = ((rows + rows.T) / 2).fill_diagonal_(0)
    torch.testing.assert_close(
        secure.state.graph.distance,
        expected,
        rtol=0,
        atol=PairsOfLosses.fields["loss"].error_bound(),
    )
    assert PairsOfLosses.fields["loss"].error_bound() < 1e-10
    assert secure.state.labels == plain.state.labels
    # sums and pairs share the exchange of keys
    methods = [entry.method for entry in secure.transcript.entries]
    assert methods.count("sum_offer") == methods.count("sum_keys") == 1
    masked = rows_of(secure, "losses")
    assert masked.dtype == torch.int64
    off_diagonal = masked[~torch.eye(6, dtype=torch.bool)].double().abs()
    # a loss of ten nats is below 2^38
    assert float(off_diagonal.median()) > 2.0**58


def test_the_server_receives_no_row_in_any_frame(plain: Served, honest: Served) -> None:
    """Neither the numbers themselves nor their fixed-point integers are in what it received."""
    rows = rows_of(plain, "relevance")
    codes = RELEVANCE.fixed_point("row").encode(rows)
    seen = b"".join(numbers_of(frame.content) for frame in honest.transcript.seen_by("server"))
    shown = b"".join(numbers_of(frame.content) for frame in plain.transcript.seen_by("server"))
    for i in range(6):
        for j in range(6):
            if i == j:
                continue
            value = rows[i, j].numpy().tobytes()
            assert value in shown  # the search finds what is there
            assert value not in seen
            assert codes[i, j].numpy().tobytes() not in seen
    masked = rows_of(honest, "relevance")
    assert masked.dtype == torch.int32
    assert torch.equal(masked.diagonal(), torch.zeros(6, dtype=torch.int32))


def numbers_of(message: Any) -> bytes:
    """All numbers of a message, as bytes."""
    parts = []
    for value in vars(message).values():
        table = getattr(value, "table", getattr(value, "value", None))
        if isinstance(table, torch.Tensor):
            parts.append(table.contiguous().numpy().tobytes())
    return b"".join(parts)


def test_frames_are_as_long_as_told_and_runs_can_be_replayed_resumed_and_spread_over_nodes(
    federation: Federation, tmp_path: Path
) -> None:
    run = example(partial(make, "oneshot", rounds=2, gram_noise=0.7, **PADS), federation)
    check_frames(run.fitted)
    check_replay(run)
    check_resume(run, tmp_path / "run")
    check_nodes(partial(make, "oneshot", **PADS), federation)


@pytest.mark.parametrize("method", ["relevance", "pair_attempt", "sum_keys"])
def test_a_client_that_is_lost_costs_its_own_row_and_column(
    method: str, plain: Served, federation: Federation
) -> None:
    def lost(call: Call) -> set[int]:
        return {2, 5} if call.method == method else set()

    served = serve(make("oneshot", **PADS), federation, lost)
    alive = [0, 1, 3, 4]
    rows = rows_of(plain, "relevance").double()[alive][:, alive]
    assert served.state.linkage.ids == alive
    assert (served.state.relevance - (rows + rows.T) / 2).abs().max() <= 2.0**-30
    assert served.net.state.lost[2] == served.net.state.lost[5]


def test_a_server_that_was_restarted_asks_other_members_in_a_new_attempt(
    federation: Federation,
) -> None:
    """It had asked all clients when it died; then client 5 is gone, and the rest are asked anew
    under the same number.
    """
    made = make("oneshot", **PADS)
    endpoint = build_client(made, federation, DOUBLE)
    found = []
    for gone in (set(), {5}):
        attempts: list[int] = []

        def exchange(call: Call, gone: set[int] = gone, seen: list[int] = attempts) -> Response:
            if call.verb == PAIRS:
                seen.append(call.attempt)
            alive = [k for k, client in enumerate(call.to) if client not in gone]
            return endpoint.answer(call.select(alive)) if alive else Response((), None)

        net = build_network(made, InProcess(exchange), made.config(federation, "float64"))
        found.append((made._cluster(net), attempts))
    (first, once), (second, again) = found
    assert (once, again) == ([0], [1] * len(again))
    torch.testing.assert_close(second.relevance, first.relevance[:5, :5], rtol=0, atol=1e-9)


def test_methods_without_pairs_are_refused_with_the_choice_that_works(
    federation: Federation,
) -> None:
    for name in ("fedavg", "cfl", "flhc", "ifca", "nsim", "local"):
        with pytest.raises(UsageError, match=r"leaves in pairs.*: take relevance plain"):
            make(name, **PADS).check(6)
    with pytest.raises(UsageError, match="take distance loss, or relevance plain"):
        make("srfca l2", **PADS).check(6)
    with pytest.raises(UsageError, match="take aggregation secagg, or relevance plain"):
        make("srfca", **PADS).check(6)
    for name in ("oneshot", "srfca"):
        make(name, **SECURE).check(6)


def test_a_number_beyond_its_range_is_refused_by_name_or_clamped(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = PairRange(low=-0.5, high=0.5, bits=32, itself=1.0)
    made = make("oneshot", **PADS)
    monkeypatch.setattr(type(made.pairs), "fields", {"row": narrow})
    with pytest.raises(UpdateError, match=r"row: .* beyond its bound 0.5: .*fields of PairOptions"):
        serve(made, federation)
    clamped = dataclasses.replace(narrow, clamped=True)
    monkeypatch.setattr(type(made.pairs), "fields", {"row": clamped})
    relevance = serve(made, federation).state.relevance
    assert float(relevance[~torch.eye(6, dtype=torch.bool)].max()) <= 0.5


def test_noise_is_priced_as_under_plain_pairs(federation: Federation) -> None:
    found = []
    for relevance in ("plain", "pads"):
        served = serve(make("oneshot", gram_noise=0.7, relevance=relevance), federation)
        # noise follows the configuration, so clusters and their sums may differ
        events = [e for e in served.net.state.ledger.events if e.method != "contribute"]
        found.append([(e.method, e.verb, e.fields, e.noise_multiplier, e.ids) for e in events])
    assert found[0] == found[1]


def test_the_report_tells_what_r_shows(federation: Federation) -> None:
    fitted = make("oneshot", **PADS).fit(federation, FULL)
    padded = privacy_section.section(fitted.result_)
    assert disclosures.PADDED in disclosures.protections(padded)
    assert disclosures.ENCRYPTED not in disclosures.protections(padded)
    text = " ".join(padded["server_view"])
    assert "R of pairs of clients, from row" in text and "|r_ij − r_ji|/2" in text
    assert "plain pairs" not in str(padded)
    assert any("has no client on its side" in line for line in padded["not_covered"])
    assert any("row of relevance of a single client" in line for line in padded["unseen"])
    assert any("within half the difference" in line for line in padded["unprotected"])
    assert not any(line.startswith("row") for line in padded["unprotected"])


# --- a server, or a client, that lies ---


class Clients:
    """The nodes of a federation, which have answered an honest server up to a call."""

    def __init__(self, honest: Served, federation: Federation, upto: str) -> None:
        self.calls: dict[str, Call] = {}
        self.nodes = node_each(make("oneshot", **PADS), federation, DOUBLE)
        for k, entry in enumerate(honest.transcript.entries):
            call = honest.transcript.content(k)[0]
            self.calls.setdefault(entry.method, call)
        for method in self.calls:
            if method == upto:
                break
            for client in self.calls[method].to:
                self.ask(client, method)

    def ask(self, client: int, method: str, **changes: Any) -> Any:
        """Send one client its frame of a call, with changes."""
        call = self.calls[method]
        own = call.select([call.to.index(client)])
        node: Endpoint[Any] = self.nodes[client]
        return node.answer(dataclasses.replace(own, **changes)).reply


@pytest.fixture
def clients(honest: Served, federation: Federation) -> Clients:
    return Clients(honest, federation, "relevance")


def without(query: Any, client: int) -> Any:
    """A request about all clients but one."""
    (picks,) = query.ids.picks
    kept = tuple(row for row in picks if int(query.ids.table[row]) != client)
    changed = {}
    for name in ("vectors", "ids"):
        changed[name] = Picks(getattr(query, name).table, (kept,))
    return dataclasses.replace(query, **changed)


def test_the_same_row_leaves_again_and_no_other_under_the_same_attempt(clients: Clients) -> None:
    first = clients.ask(0, "relevance").row.table
    assert torch.equal(clients.ask(0, "relevance").row.table, first)
    query = clients.calls["relevance"].select([0]).query
    with pytest.raises(PolicyError, match="other members in this attempt"):
        clients.ask(
            0, "relevance", query=without(query, 5), group=(format_ids(range(5)),), members=(5,)
        )
    client: OneShotClient = clients.nodes[0].client
    honest_answer = client._opened

    def other(query: Any) -> torch.Tensor:
        return honest_answer(query).flip(0)

    client._opened = other  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match="another row in this attempt"):
        clients.ask(0, "relevance")
    # a new attempt has other pads, and then the old frame is refused
    assert clients.ask(0, "pair_attempt").attempt.values.tolist() == [1]
    second = clients.ask(0, "relevance", attempt=1).row.table
    assert not set(second[0, 1:].tolist()) & set(first[0, 1:].tolist())
    client._opened = honest_answer  # type: ignore[method-assign]
    with pytest.raises(PolicyError, match="took part in attempt 1"):
        clients.ask(0, "relevance")


REFUSED: list[tuple[dict[str, Any], type[SecureClusterError], str]] = [
    ({"group": ()}, FrameError, "without members"),
    ({"group": ("0",), "members": (1,)}, PolicyError, "2 or more"),
    ({"group": ("1-5",), "members": (5,)}, PolicyError, "itself among them"),
    ({"group": ("0-4",), "members": (5,)}, FrameError, "about other clients"),
    ({"group": ("0-4",), "members": (6,)}, FrameError, "no list of its members"),
    ({"group": ("1,0,2-5",)}, FrameError, "no list of its members"),
    ({"verb": "gather"}, PolicyError, "not gather"),
    ({"verb": "sum"}, PolicyError, "not sum"),
]


def test_members_are_checked_before_a_row_is_computed(clients: Clients) -> None:
    computed: list[int] = []
    clients.nodes[0].client._relevant = lambda *_: computed.append(1)
    for changes, error, words in REFUSED:
        with pytest.raises(error, match=words):
            clients.ask(0, "relevance", **changes)
    assert not computed


def test_a_row_about_others_than_the_members_is_refused(clients: Clients) -> None:
    query = clients.calls["relevance"].select([0]).query
    with pytest.raises(FrameError, match="about other clients"):
        clients.ask(0, "relevance", query=without(query, 3))


def test_keys_that_were_swapped_or_changed_are_refused(
    honest: Served, federation: Federation
) -> None:
    clients = Clients(honest, federation, "sum_keys")
    query = clients.calls["sum_keys"].select([0]).query
    swapped = query.keys.table.clone()
    swapped[[1, 2]] = swapped[[2, 1]]
    with pytest.raises(FrameError):  # not what these clients signed
        keys = Picks(swapped, query.keys.picks)
        clients.ask(0, "sum_keys", query=dataclasses.replace(query, keys=keys))


def test_a_client_with_another_key_is_found_by_the_range_of_r(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("oneshot", **PADS)
    endpoint = build_client(made, federation, DOUBLE)
    right = KeyExchange.pair_key

    def wrong(self: KeyExchange, client: int, peer: int) -> bytes:
        return bytes(32) if client == 2 else right(self, client, peer)

    monkeypatch.setattr(KeyExchange, "pair_key", wrong)
    net = build_network(made, InProcess(endpoint.answer), made.config(federation, "float64"))
    with pytest.raises(FrameError, match=r"row: .*forged"):
        made._cluster(net)


def test_a_pad_that_does_not_cancel_is_found_in_each_pair_of_losses() -> None:
    pairs = PaddedPairs("run", PairsOfLosses.fields, PairFunctions())
    refused: list[Any] = []
    pairs.keys.port = SimpleNamespace(refuse=lambda *told: refused.append(told))  # type: ignore[assignment]
    draws = torch.from_numpy(np.random.default_rng(0).integers(-(2**63), 2**63, (400, 2, 2)))
    left_out = 0
    for rows in draws:
        kept = pairs._without_forged("loss", _sums_of_pairs(rows), (0, 1))
        left_out += kept == []
    assert left_out == len(refused) >= 395


# by name: clients, pairs whose sum is beyond its range, who is left out, and who is named
LEFT_OUT: dict[str, tuple[int, list[tuple[int, int]], set[int], set[int]]] = {
    "nobody": (5, [], set(), set()),
    "one forged every number": (5, [(2, k) for k in (0, 1, 3, 4)], {2}, {2}),
    "one forged two of four": (5, [(2, 0), (2, 1)], {2}, set()),
    "one forged a single number": (5, [(0, 3)], {0, 3}, set()),
    "two forged every number": (6, [(j, k) for j in (1, 4) for k in range(6)], {1, 4}, {1, 4}),
    "two against one": (6, [(1, 5), (4, 5)], {5}, set()),
    "one after the other": (6, [(2, k) for k in (0, 1, 3, 4)] + [(4, 5)], {2, 4, 5}, {2}),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_who_is_left_out_for_sums_beyond_their_range(name: str) -> None:
    count, pairs, left_out, named = LEFT_OUT[name]
    padded = PaddedPairs("run", PairsOfLosses.fields, PairFunctions())
    told: set[int] = set()
    refuse = lambda error, clients: told.update(clients)  # noqa: E731
    padded.keys.port = SimpleNamespace(refuse=refuse)  # type: ignore[assignment]
    sums = torch.zeros(count, count, dtype=torch.int64)
    for j, k in pairs:
        if j != k:
            sums[j, k] = sums[k, j] = -(2**63)  # of which there is no magnitude in the ring
    kept = padded._without_forged("loss", sums, range(10, 10 + count))
    assert set(range(count)) - set(kept) == left_out
    assert told == {10 + client for client in named}


def test_rows_of_another_length_or_type_are_refused(federation: Federation) -> None:
    made = make("oneshot", **PADS)
    endpoint = build_client(made, federation, DOUBLE)

    def forged(table: torch.Tensor) -> InProcess:
        def exchange(call: Call) -> Response:
            response = endpoint.answer(call)
            if call.verb != PAIRS:
                return response
            return Response(call.to, type(response.reply)(Rows(table)))

        return InProcess(exchange)

    for table, words in (
        (torch.zeros(6, 5, dtype=torch.int32), "a row of 6 numbers"),
        (torch.zeros(6, 6, dtype=torch.int64), "int32 numbers of a ring"),
    ):
        net = build_network(made, forged(table), made.config(federation, "float64"))
        with pytest.raises(FrameError, match=words):
            made._cluster(net)


def test_a_node_without_pads_answers_no_padded_call(honest: Served, federation: Federation) -> None:
    node = build_client(make("oneshot"), federation, DOUBLE, [0])
    clients = Clients(honest, federation, "sum_offer")
    call = clients.calls["pair_attempt"].select([0])
    config = node._config
    with pytest.raises(FrameError, match="same protocol with the same protections"):
        node.answer(dataclasses.replace(call, config=config))


def test_padded_rows_of_a_hundred_clients_have_half_a_kilobyte() -> None:
    clients = 100
    group = format_ids(range(clients))
    header = Header("c" * 32, "relevance", PAIRS, 1, 5, "client/99", "server", clients, group, 0)
    row = torch.zeros(1, clients, dtype=torch.int32)
    padded = padded_class(RelevanceRow, 32)(Rows(row))
    assert 400 < wire.size(header, padded) < 640
    assert np.dtype("int32").itemsize * clients == 400
