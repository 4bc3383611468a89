"""Runs with encrypted pairs: the same labels, a server without a secret key, and a key authority
that decrypts sums alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from authority_runs import Run, ask, run_with_authority
from cases import DOUBLE, FULL, Served, node_each, run_server, serve, two_clusters, variant

from securecluster import Federation
from securecluster.core.serialization import pack, unpack
from securecluster.errors import FrameError, PolicyError, SecureClusterError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Picks, Response, Rows
from securecluster.messaging.parties import AUTHORITY
from securecluster.messaging.receipts import Receipts
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import Deployment, build_network
from securecluster.parties.derived import call_types, state_class
from securecluster.parties.endpoints import build_client
from securecluster.privacy.masking.key_agreement import AuthorityKeys
from securecluster.protections.encryption import client as encryption_client
from securecluster.protections.encryption.authority import KEPT_CALLS, AuthorityState, DecryptedSum
from securecluster.protections.encryption.ciphers import (
    CiphertextSum,
    PublicCipher,
    SecretCipher,
    tenseal,
)
from securecluster.protections.encryption.client import EncryptionService
from securecluster.protections.encryption.envelopes import padded
from securecluster.protections.encryption.parameters import Parameters
from securecluster.protections.encryption.tags import text_bytes
from securecluster.protocols.conformance import (
    Example,
    check_frames,
    check_repeats,
    check_replay,
    check_resume,
    example,
)
from securecluster.runtime.endpoint import PAIRS, SUM, release_of
from securecluster.runtime.transport import Framed, InProcess, Transport, WithAuthority
from securecluster.statements import disclosures, privacy_section

# clients are lost one by one
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear", "cohort_size": 0}
BOTH: dict[str, Any] = {"relevance": "ckks", "aggregation": "secagg"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


def make(name: str, **params: Any) -> Any:
    """A variant with few rounds."""
    return variant(name, **{**SMALL, **params})


# --- the same results ---


def replies_to(served: Served, method: str) -> Any:
    """The replies to the first call of a method."""
    positions = [k for k, e in enumerate(served.transcript.entries) if e.method == method]
    return served.transcript.content(positions[0])[1].reply


@pytest.mark.few(1)
@pytest.mark.parametrize("aggregation", ["plain", "secagg"])
def test_frames_replay_repeat_resume_and_dropouts(
    aggregation: str, federation: Federation, tmp_path: Path
) -> None:
    run = example(partial(make, "oneshot", relevance="ckks", aggregation=aggregation), federation)
    check_frames(run.fitted)
    check_replay(run)
    check_repeats(run)
    check_resume(run, tmp_path / "run")
    assert run.fitted.dropped_
    assert run.fitted.bytes_["servers"] > 0


@pytest.mark.parametrize("release", ["labels", "matrix"])
def test_encrypted_pairs_repeat_and_resume(
    release: str, federation: Federation, tmp_path: Path
) -> None:
    anew = partial(make, "oneshot", rounds=4, relevance="ckks", relevance_release=release)
    run = Example(anew, federation, FULL, anew().fit(federation, FULL))
    check_replay(run)
    check_repeats(run)
    check_resume(run, tmp_path / "run")


def test_of_too_few_survivors_nothing_is_asked(federation: Federation) -> None:
    asked: list[str] = []

    def lost(call: Call) -> set[int]:
        asked.append(call.method)
        return {1, 2, 3, 4, 5} if call.verb == PAIRS else set()

    with pytest.raises(SecureClusterError, match="at least two replies, 1 came"):
        serve(make("oneshot", relevance="ckks"), federation, lost)
    assert "relevance" in asked and "authority_pairs" not in asked


# --- pairs ---


def test_labels_are_all_that_the_server_is_told_of_r(federation: Federation) -> None:
    plain = make("oneshot").fit(federation)
    told = make("oneshot", **BOTH).fit(federation, FULL)
    assert list(told.labels_) == list(plain.labels_)
    state = unpack(told.server_state_, state_class(told.result_.method))
    assert state.relevance is None and state.linkage is None
    assert state.found.relevance.numel() == state.found.linkage.merges.numel() == 0
    (position,) = [
        k for k, e in enumerate(told.transcript_.entries) if e.method == "authority_pairs"
    ]
    (numbers,) = told.transcript_.content(position)[1].reply.numbers.values.tolist()
    assert numbers == state.found.labels


def test_r_is_released_as_the_mean_of_what_two_clients_rounded(federation: Federation) -> None:
    plain = serve(make("oneshot"), federation)
    told = serve(make("oneshot", relevance="ckks", relevance_release="matrix"), federation)
    rows = replies_to(plain, "relevance").row.values.double().numpy()
    rounded = np.rint(rows * 2**14)
    expected = (rounded + rounded.T) / 2**15
    np.fill_diagonal(expected, 1)
    assert np.array_equal(told.state.relevance.numpy(), expected)
    off = told.state.relevance - plain.state.relevance
    assert 1e-6 < float(off.abs().max()) <= 2.0**-15
    assert told.state.labels == plain.state.labels


def test_losses_of_pairs_are_carried_by_the_same_ciphertexts(federation: Federation) -> None:
    plain = make("srfca").fit(federation)
    told = make("srfca", **BOTH).fit(federation)
    assert list(told.labels_) == list(plain.labels_)
    with pytest.raises(UsageError, match="matrix"):
        make("srfca", relevance_release="labels", **BOTH).fit(federation)
    with pytest.raises(UsageError, match="relevance ckks"):
        make("oneshot", relevance_release="labels").fit(federation)


def test_a_client_that_is_lost_costs_its_own_row_and_column(federation: Federation) -> None:
    def lost(call: Call) -> set[int]:
        return {2} if call.method == "relevance" else set()

    plain = serve(make("oneshot"), federation, lost)
    told = serve(make("oneshot", relevance="ckks", relevance_release="matrix"), federation, lost)
    assert told.state.linkage.ids == [0, 1, 3, 4, 5]
    torch.testing.assert_close(
        told.state.relevance, plain.state.relevance.double(), rtol=0, atol=0.6e-4
    )


def test_a_client_that_answers_the_second_request_keeps_its_place(federation: Federation) -> None:
    asked: list[int] = []

    def late(call: Call) -> set[int]:
        first = call.method == "relevance" and 2 in call.to and not asked
        if first:
            asked.append(2)
        return {2} if first else set()

    matrix = {"relevance": "ckks", "relevance_release": "matrix"}
    on_time = serve(make("oneshot", **matrix), federation)
    told = serve(make("oneshot", **matrix), federation, late)
    assert asked and told.state.linkage.ids == [0, 1, 2, 3, 4, 5]
    assert torch.equal(told.state.relevance, on_time.state.relevance)


# --- who sees what ---


def server_view(served: Served) -> bytes:
    """All frames from and to the server, and its state."""
    frames = [
        wire.encode(_header(entry, served.transcript.content(k)[0], row), message, row, receipts)
        for k, entry in enumerate(served.transcript.entries)
        for message, row, receipts in _messages(served.transcript.content(k))
    ]
    return b"".join([*frames, pack(served.net.state), pack(served.state)])


def _messages(contents: tuple[Call, Response]) -> list[tuple[Any, int, Receipts]]:
    call, response = contents
    asked: list[tuple[Any, int, Receipts]] = [(call.query, k, ()) for k in range(len(call.to))]
    told = range(len(response.ids))
    return asked + [(response.reply, k, response.receipts_at(k)) for k in told]


def _header(entry: Any, call: Call, row: int) -> Any:
    return call.header(row)


def pieces(data: bytes, size: int = 24) -> list[bytes]:
    """Parts of bytes that do not occur elsewhere by chance."""
    return [data[k : k + size] for k in range(64, len(data) - size, 997)]


def rows_of(served: Served) -> list[bytes]:
    """Beginnings of the clients' relevance."""
    return [row.numpy().tobytes()[:40] for row in replies_to(served, "relevance").row.values]


@pytest.mark.always
def test_the_servers_view_holds_no_row_and_no_secret_key(federation: Federation) -> None:
    plain = serve(make("oneshot", rounds=1), federation)
    rows = rows_of(plain)
    run = run_with_authority(make("oneshot", rounds=1, relevance="ckks"), federation)
    view = server_view(run.served)
    plain_view = server_view(plain)
    assert all(row in plain_view for row in rows)  # the search can find something
    assert not any(row in view for row in rows)
    cipher = SecretCipher(Parameters(), run.authority.state.secret["ckks"])
    secret_part = cipher.secret[len(cipher.public) :]
    assert all(piece in cipher.secret for piece in pieces(secret_part))
    assert not any(piece in view for piece in pieces(secret_part))
    assert run.authority.state.exchange not in view
    assert any(piece in view for piece in pieces(cipher.public))  # nor is the search blind


def test_the_authority_sees_sums_and_no_ciphertext_of_one_client(federation: Federation) -> None:
    run = run_with_authority(make("oneshot", rounds=1, relevance="ckks"), federation)
    seen = list(run.served.transcript.seen_by(AUTHORITY))
    assert {frame.method for frame in seen} == {"authority_key", "authority_pairs"}
    assert all(frame.content is not None for frame in seen)
    (position,) = [
        k for k, e in enumerate(run.served.transcript.entries) if e.method == "relevance"
    ]
    own = run.served.transcript.content(position)[1].reply.envelope.table.numpy().tobytes()
    asked = b"".join(
        frame.content.envelope.table.numpy().tobytes()
        for frame in seen
        if hasattr(frame.content, "envelope")
    )
    assert asked and not any(piece in own for piece in pieces(asked))


def test_the_report_tells_what_server_and_authority_saw(federation: Federation) -> None:
    told = privacy_section.section(make("oneshot", **BOTH).fit(federation).result_)
    assert disclosures.ENCRYPTED in disclosures.protections(told)
    assert disclosures.SUMMED in disclosures.protections(told)
    authority = " ".join(told["authority_view"])
    assert "must not work together" in authority and "secret key" in authority
    assert "delta" not in authority and "row of relevance" in authority
    assert "labels alone" in " ".join(told["server_view"])
    assert "plain" not in str(told["server_view"]) and "pads" not in str(told["server_view"])
    assert any("row of relevance" in sentence for sentence in told["unseen"])
    assert "authority_view" not in privacy_section.section(make("oneshot").fit(federation).result_)


# --- parties that lie, and processes that end ---


class Meddled:
    """Transport whose frames to and from clients, and to the authority, a test changes."""

    def __init__(self, inner: Transport, change: Callable[[Call, Response], Any]) -> None:
        self._inner, self._change = inner, change

    def exchange(self, call: Call) -> Response:
        return self._change(call, self._inner.exchange(call))

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        return [self.exchange(call) for call in calls]

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        for part, response in self._inner.stream(call, chunk):
            yield part, self._change(part, response)

    def relay(self, call: Call, answer: Response) -> None:
        self._inner.relay(call, answer)

    def tolerate(self, error: Exception) -> None:
        self._inner.tolerate(error)


def altered_replies(
    federation: Federation, change: Callable[[Call, Response], Any]
) -> Callable[[], Run]:
    made = make("oneshot", relevance="ckks")
    return lambda: run_with_authority(made, federation, meddle=lambda inner: Meddled(inner, change))


def change_envelope(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the envelope of client 0 on its way to the server."""

    def meddle(call: Call, response: Response) -> Response:
        if call.verb != PAIRS:
            return response
        field = response.reply.envelope
        table = change(field.table.clone())
        reply = dataclasses.replace(response.reply, envelope=Picks(table, field.picks))
        return dataclasses.replace(response, reply=reply)

    return meddle


def flipped(table: torch.Tensor) -> torch.Tensor:
    table[3, 5] ^= 1
    return table


def test_altered_ciphertexts_of_clients_are_refused(federation: Federation) -> None:
    with pytest.raises(FrameError, match="client 0 did not sign"):
        altered_replies(federation, change_envelope(flipped))()
    with pytest.raises(FrameError, match="client 0 did not sign"):
        altered_replies(federation, change_envelope(torch.zeros_like))()


def test_a_ciphertext_of_another_client_is_refused(federation: Federation) -> None:
    def swapped(call: Call, response: Response) -> Response:
        if call.verb != PAIRS:
            return response
        order = [1, 0, *range(2, len(response.ids))]
        reply = response.reply
        fields = {
            "envelope": reply.envelope.select(order),
            "key": reply.key.select(order),
            "signature": reply.signature.select(order),
        }
        return dataclasses.replace(response, reply=dataclasses.replace(reply, **fields))

    with pytest.raises(FrameError, match="client 0 did not sign"):
        altered_replies(federation, swapped)()


def test_ciphertexts_without_signatures_are_still_bound_to_their_call(
    federation: Federation,
) -> None:
    """A server that has no roster opens envelopes, which hold their own context."""
    made = make("oneshot", relevance="ckks")
    config = made.config(federation, "float64")
    endpoint, authority = (
        build_client(made, federation, DOUBLE),
        Deployment(made, config).authority(),
    )

    def served(change: Callable[[Call, Response], Any]) -> Any:
        def replies(name: str) -> type:
            return call_types(made, name)[1]

        inner = WithAuthority(InProcess(endpoint.answer), authority.answer_frame, replies)
        net = build_network(made, Meddled(inner, change), config, key=b"k" * 32)
        return run_server(made, net)

    with pytest.raises(FrameError, match="ciphertexts of client/0 were altered"):
        served(change_envelope(flipped))


def test_a_server_that_swaps_the_public_key_is_refused(federation: Federation) -> None:
    """With its own key in place of the authority's, it would read every row."""
    made = make("oneshot", relevance="ckks")
    own = SecretCipher.generate(Parameters())

    def swapped(call: Call, response: Response) -> Response:
        if call.method != "authority_key":
            return response
        data = torch.frombuffer(bytearray(padded(own.public)), dtype=torch.uint8)
        reply = dataclasses.replace(response.reply, public=Rows(data[None]))
        return dataclasses.replace(response, reply=reply)

    with pytest.raises(FrameError, match="authority did not sign the public key"):
        altered_replies(federation, swapped)()
    # a client keeps the first key that it accepted
    run = run_with_authority(made, federation)
    (call,) = [
        run.served.transcript.content(k)[0]
        for k, e in enumerate(run.served.transcript.entries)
        if e.method == "encryption_key"
    ]
    data = torch.frombuffer(bytearray(padded(own.public)), dtype=torch.uint8)
    query = dataclasses.replace(
        call.query, public=dataclasses.replace(call.query.public, value=data)
    )
    with pytest.raises(FrameError, match="another public key"):
        run.served.endpoint.answer(dataclasses.replace(call, query=query))
    node = node_each(made, federation, DOUBLE)[0]
    pairs_call = next(
        run.served.transcript.content(k)[0]
        for k, e in enumerate(run.served.transcript.entries)
        if e.verb == PAIRS
    )
    with pytest.raises(PolicyError, match="no public key"):
        node.answer(pairs_call.select([0]))


@pytest.fixture(scope="module")
def asked(federation: Federation) -> tuple[Run, Call]:
    """A run, and the server's last request to its authority."""
    run = run_with_authority(make("oneshot", rounds=1, **BOTH), federation)
    (call,) = [
        run.served.transcript.content(k)[0]
        for k, e in enumerate(run.served.transcript.entries)
        if e.method == "authority_pairs"
    ]
    return run, call


CHANGES: list[tuple[dict[str, Any], type[SecureClusterError], str]] = [
    ({"survivors": "0", "members": (1,)}, PolicyError, "2 clients or more"),
    ({"survivors": "0-4", "members": (5,)}, PolicyError, "another sum over some"),
    ({"survivors": "0-6", "members": (7,)}, PolicyError, "no members"),
    ({"survivors": "0-4"}, FrameError, "no list of its members"),
    ({"step": 9}, FrameError, "server were altered"),
    ({"attempt": 1}, FrameError, "server were altered"),
    ({"purpose": "contribute"}, FrameError, "are not encrypted"),
    ({"purpose": "nothing"}, FrameError, "not a method"),
    ({"layout": "row:32:14"}, FrameError, "another length than its clients have pairs"),
    ({"layout": "noise:32:15"}, FrameError, "describes no fields"),
    ({"scheme": "bfv"}, FrameError, "does not encrypt by"),
    ({"config": "0" * 32}, FrameError, "another configuration"),
    ({"verb": "gather"}, FrameError, "check the addresses"),
]


@pytest.mark.parametrize(("changes", "error", "words"), CHANGES)
def test_the_authority_refuses_other_sums(
    changes: dict[str, Any], error: type[SecureClusterError], words: str, asked: tuple[Run, Call]
) -> None:
    run, call = asked
    again = ask(run, call)  # the same sum is released again
    assert again.ids == (0,)
    with pytest.raises(error, match=words):
        ask(run, call, **changes)


@pytest.mark.parametrize("then", ["", "cluster", "cluster_tasks "])
def test_where_labels_are_released_no_other_function_gives_r(
    then: str, asked: tuple[Run, Call]
) -> None:
    run, call = asked
    assert ask(run, call).reply.numbers.values.shape == (1, 6)  # labels of six clients
    with pytest.raises(PolicyError, match="tells labels by cluster_tasks alone"):
        ask(run, call, then=then)


def test_the_authority_keeps_sums_of_the_last_calls_and_closes_those_before(
    asked: tuple[Run, Call],
) -> None:
    run, call = asked
    before = run.authority.state
    kept = DecryptedSum("0-5", b"", [])
    later = {f"{call.step + k} relevance": [kept] for k in range(1, KEPT_CALLS + 1)}
    try:
        # of the first calls, one of which another method was summed in, too
        old = {"0 relevance": [kept], "0 pool": [kept]}
        run.authority.restore(dataclasses.replace(before, sums={**old, **later}, floor=0))
        assert ask(run, call).ids == (0,)
        assert set(run.authority.state.sums) == set(later)
        with pytest.raises(PolicyError, match="long decrypted later ones"):
            ask(run, call)
    finally:
        run.authority.restore(before)


def other_scale(cipher: PublicCipher, numbers: Any) -> bytes:
    """Encrypt at a scale that this run does not have."""
    data: bytes = tenseal().ckks_vector(cipher._context, numbers.tolist(), 2.0**20).serialize()
    return data


def test_a_ciphertext_of_another_scale_in_a_valid_envelope_names_its_client(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    encrypt = PublicCipher.encrypt
    tagged = EncryptionService._tagged
    sent = 0

    def of_the_fourth(cipher: PublicCipher, numbers: Any) -> bytes:
        nonlocal sent
        sent += 1
        return other_scale(cipher, numbers) if sent == 4 else encrypt(cipher, numbers)

    def made_up(service: EncryptionService, client: int, ciphertexts: Any) -> bytes:
        if client == 3:
            return bytes(text_bytes(len(ciphertexts), Parameters()))
        return tagged(service, client, ciphertexts)

    monkeypatch.setattr(PublicCipher, "encrypt", of_the_fourth)
    monkeypatch.setattr(EncryptionService, "_tagged", made_up)
    # fifteen pairs take one ciphertext, so the fourth is that of client 3
    with pytest.raises(FrameError, match=r"client 3 cannot be added.*parameters, scale and level"):
        run_with_authority(make("oneshot", relevance="ckks"), federation)


def test_the_authority_refuses_ciphertexts_that_no_client_makes(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that adds otherwise, in envelopes that are valid."""
    serialized = CiphertextSum.serialized
    made = make("oneshot", relevance="ckks")

    def replaced(change: Callable[[PublicCipher, bytes], bytes]) -> None:
        def changed(total: CiphertextSum) -> list[bytes]:
            return [change(total._cipher, data) for data in serialized(total)]

        monkeypatch.setattr(CiphertextSum, "serialized", changed)
        run_with_authority(made, federation)

    ones = np.ones(Parameters().slots)
    with pytest.raises(FrameError, match="parameters, scale and level"):
        replaced(lambda cipher, data: other_scale(cipher, ones))
    with pytest.raises(FrameError, match="not the sum of what clients 0-5 encrypted"):
        replaced(lambda cipher, data: cipher.encrypt(6 * ones))


def test_a_client_that_encrypts_no_integers_has_the_sum_refused(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = encryption_client.pack

    def between(*args: Any) -> Any:
        slots = packed(*args)
        slots[0][1] += 0.4 / (1 << 14) / 6
        return slots

    monkeypatch.setattr(encryption_client, "pack", between)
    with pytest.raises(FrameError, match="row of a decrypted sum lies between two integers"):
        run_with_authority(make("oneshot", relevance="ckks"), federation)


def test_more_clients_than_a_sum_can_hold_are_refused_before_anything_is_sent() -> None:
    sent: list[Any] = []
    everyone = tuple(range(5000))
    made = make("oneshot", relevance="ckks")
    config = made.config(two_clusters(6, 30), "float64")
    call = Call("", "relevance", PAIRS, 1, 1, everyone, None, (5000,) * 5000)
    with pytest.raises(UsageError, match=r"1 to 4096 clients, not 5000.*pads"):
        Deployment(made, config).pair_aggregator().run(sent.append, call, everyone, "cluster")
    assert sent == []
    # nor does a client answer a server that would send it
    service = build_client(made, two_clusters(6, 30), DOUBLE).halves[PAIRS]
    named = dataclasses.replace(call, to=(0,), members=(5000,), group=("0-4999",))
    with pytest.raises(UsageError, match="1 to 4096 clients, not 5000"):
        service.check(named, release_of(made.client.relevance))


MEMBERS: list[tuple[dict[str, Any], type[SecureClusterError], str]] = [
    ({"group": ("1-5",), "members": (5,)}, PolicyError, "client 0 is no member of the encrypted"),
    ({"group": ("0",), "members": (1,)}, PolicyError, "asks for 2 or more"),
    ({"group": ("0-4",), "members": (6,)}, FrameError, "no list of its members"),
    ({"group": ()}, FrameError, "without members"),
]


def test_clients_encrypt_for_the_members_of_their_pairs_alone(asked: tuple[Run, Call]) -> None:
    run, _ = asked
    content = run.served.transcript.content
    entries = run.served.transcript.entries
    call = next(content(k)[0] for k, e in enumerate(entries) if e.verb == PAIRS).select([0])
    call = dataclasses.replace(call, to=(0,), group=("0-5",), members=(6,))
    service = run.served.endpoint.halves[PAIRS]
    release = release_of(getattr(type(run.served.endpoint.client), call.method))
    service.check(call, release)
    for changes, error, words in MEMBERS:
        with pytest.raises(error, match=words):
            service.check(dataclasses.replace(call, **changes), release)
    with pytest.raises(FrameError, match="asked about other clients than the members"):
        service.check(dataclasses.replace(call, group=("0-4",), members=(5,)), release)
    with pytest.raises(PolicyError, match="leave in other ways than padded pairs"):
        service.check(call, dataclasses.replace(release, via=(PAIRS, SUM)))


def test_a_client_takes_no_key_of_a_scheme_that_its_run_does_not_use(
    asked: tuple[Run, Call],
) -> None:
    run, _ = asked
    content = run.served.transcript.content
    entries = run.served.transcript.entries
    call = next(content(k)[0] for k, e in enumerate(entries) if e.method == "encryption_key")
    query = dataclasses.replace(call.query, scheme="bfv")
    with pytest.raises(FrameError, match="'bfv', by which this run does not encrypt"):
        run.served.endpoint.answer(dataclasses.replace(call, query=query))


@pytest.mark.parametrize("relevance", ["ckks", "pads"])
@pytest.mark.parametrize("columns", [(1, 0), (0, 0, 1)])
def test_pairs_name_each_client_once_in_ascending_order(
    relevance: str, columns: tuple[int, ...], federation: Federation
) -> None:
    """Frames have ranges of ids, so that another order would permute rows of R."""
    sent: list[Any] = []
    made = make("oneshot", relevance=relevance)
    aggregator = Deployment(made, made.config(federation, "float64")).pair_aggregator()
    call = Call("", "relevance", PAIRS, 1, 1, columns, None, (len(columns),) * len(columns))
    with pytest.raises(UsageError, match="name each client once, in ascending order"):
        aggregator.run(sent.append, call, columns, "cluster_tasks")
    assert sent == []


def test_a_client_without_keys_encrypts_nothing_also_where_it_had_some_before(
    federation: Federation,
) -> None:
    served = serve(make("oneshot", rounds=1, relevance="ckks"), federation)
    entries = served.transcript.entries
    (position,) = [k for k, e in enumerate(entries) if e.method == "relevance"]
    call, _ = served.transcript.content(position)
    keys = served.endpoint.keys
    keys.restore(dataclasses.replace(keys.secrets, authority=AuthorityKeys()))
    with pytest.raises(PolicyError, match="no public key of the key authority"):
        served.endpoint.answer(call)


def test_the_authority_may_be_a_new_process_for_every_frame(federation: Federation) -> None:
    made = make("oneshot", rounds=1, **BOTH)
    config = made.config(federation, "float64")
    packed: dict[Any, bytes] = {}

    def authority(data: bytes) -> bytes:
        living = Deployment(made, config).authority(simulated=False)
        living._identity = Deployment(made, config).authority()._identity
        if "authority" in packed:
            living.restore(unpack(packed["authority"], AuthorityState))
        reply: bytes = living.answer_frame(data)
        packed["authority"] = pack(living.state)
        return reply

    def door(i: int) -> Callable[[bytes], bytes]:
        def answer(data: bytes) -> bytes:
            node = build_client(made, federation, DOUBLE, [i])
            if i in packed:
                state = unpack(packed[i], ClientState)
                node.client.restore(state)
                node.keys.restore(state.secrets)
            reply: bytes = node.answer_frame(data)
            packed[i] = pack(node.client.state(node.keys.secrets))
            return reply

        return answer

    def replies(name: str) -> type:
        return call_types(made, name)[1]

    doors = {i: door(i) for i in range(len(federation))}
    net = build_network(made, WithAuthority(Framed(doors, replies), authority, replies), config)
    state = run_server(made, net)
    assert state.labels == serve(make("oneshot", rounds=1), federation).state.labels
    assert b"secret" in packed["authority"]
    assert "secret" not in repr(unpack(packed["authority"], AuthorityState))


def test_an_authority_that_does_not_reply_is_one_clear_sentence(federation: Federation) -> None:
    def silent(call: Call, response: Response) -> Response:
        return Response((), None) if call.method == "authority_pairs" else response

    with pytest.raises(FrameError, match="authority does not reply"):
        altered_replies(federation, silent)()


def told_by_authority(method: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Change the first table of the authority's replies to a method."""

    def meddle(call: Call, response: Response) -> Response:
        if call.method != method:
            return response
        name, field = next(iter(vars(response.reply).items()))
        reply = dataclasses.replace(response.reply, **{name: Rows(change(field.table))})
        return dataclasses.replace(response, reply=reply)

    return meddle


@pytest.mark.parametrize(
    ("release", "change", "words"),
    [
        ("labels", lambda table: table[:, :-1], "no labels of the clients"),
        ("labels", lambda table: table + 6, "no labels of the clients"),
        ("labels", lambda table: table - 1, "no labels of the clients"),
        ("matrix", lambda table: table[:, :-1], "another number of pairs than there are"),
        ("matrix", lambda table: table + (1 << 20), "pairs beyond their range"),
    ],
)
def test_the_server_refuses_what_r_cannot_have(
    release: str, change: Callable[[torch.Tensor], torch.Tensor], words: str, federation: Federation
) -> None:
    made = make("oneshot", rounds=1, relevance="ckks", relevance_release=release)
    meddle = told_by_authority("authority_pairs", change)
    with pytest.raises(FrameError, match=words):
        run_with_authority(made, federation, meddle=lambda inner: Meddled(inner, meddle))


def test_a_forged_row_of_pairs_is_not_told_to_the_server(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each client has a number in all pairs, of which it is in a few."""
    packed = encryption_client.pack

    def forged(row: Any, layout: Any, largest: Any, parameters: Any) -> Any:
        full = {name: np.full_like(row[name], largest[name]) for name in row}
        return packed(full, layout, largest, parameters)

    monkeypatch.setattr(encryption_client, "pack", forged)
    made = make("oneshot", rounds=1, relevance="ckks", relevance_release="matrix")
    with pytest.raises(FrameError, match="a pair of clients has a sum beyond its range"):
        run_with_authority(made, federation)
