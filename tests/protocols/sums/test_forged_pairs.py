"""A server that breaks the protocol, and a key authority that decrypts no ciphertexts but sums of
pairs that the listed clients encrypted; and what is left to such a server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from authority_runs import Run, ask, run_with_authority
from cases import two_clusters, variant

from securecluster import Federation
from securecluster.core.serialization import pack, unpack
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.messaging.messages import Call, Shared
from securecluster.privacy.masking.pads import KeyPair
from securecluster.protections.encryption import packing
from securecluster.protections.encryption.authority import AuthorityState
from securecluster.protections.encryption.ciphers import PublicCipher, SecretCipher
from securecluster.protections.encryption.client import AUTHORITY, EncryptionService
from securecluster.protections.encryption.envelopes import EnvelopeContext, seal_bytes
from securecluster.protections.encryption.pair_release import rounding
from securecluster.protections.encryption.pairs import EncryptedPairService
from securecluster.protections.encryption.parameters import MOST_DECRYPTIONS, Parameters
from securecluster.protections.encryption.server import GroupSum
from securecluster.protections.encryption.tags import LinearTags, as_text, tag_key
from securecluster.protections.pair_rows import PairRange

CLIENTS = 6
THEN = "cluster_tasks"
FOREIGN = "not the sum of what clients 0-5 encrypted in this call: they are not decrypted"


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(CLIENTS, 30)


def oneshot() -> Any:
    # R itself is released, so that numbers can be compared
    params = {"relevance": "ckks", "relevance_release": "matrix"}
    return variant("oneshot", rounds=1, epochs=1, model="linear", **params)


@dataclasses.dataclass
class Server:
    """A server after a run, with all that it received, and after a second call for the same rows.

    Attributes:
        run: the run.
        calls: requests for rows, with the replies.
        requests: its own requests to the authority for the sums.
        rows: integers that each client packed, by call.
        again: encrypts the same rows once more, by call.
    """

    run: Run
    calls: list[tuple[Call, Any]]
    requests: list[Call]
    rows: list[list[Any]]
    again: list[Callable[[], Any]]

    @property
    def cipher(self) -> PublicCipher:
        return self.run.served.net.pair_aggregator.keys.cipher

    @property
    def secret(self) -> SecretCipher:
        """What the server does not have, to see what a decryption would have told it."""
        (secret,) = self.run.authority.state.secret.values()
        return SecretCipher(self.cipher.parameters, secret)

    def sum_of(self, round_index: int, clients: Sequence[int]) -> GroupSum:
        """A sum of some replies to a call, with the boxes that came with them."""
        call, reply = self.calls[round_index]
        total = GroupSum(self.run.served.net.pair_aggregator.keys)
        for client in clients:
            total.add(call, client, reply, client)
        return total

    def forged(self, round_index: int, change: Callable[[list[bytes]], list[bytes]]) -> Call:
        """The request for the sum of all clients, with other ciphertexts in its envelope."""
        total = self.sum_of(round_index, range(CLIENTS))
        assert total._sum is not None
        own = total._sum.serialized()
        total._sum = Changed(change(own))  # type: ignore[assignment]
        query = total.sealed(self.calls[round_index][0], "0-5", THEN)
        return dataclasses.replace(self.requests[round_index], query=query)

    def ciphertexts(self, round_index: int, client: int) -> list[bytes]:
        total = self.sum_of(round_index, [client])
        assert total._sum is not None
        return total._sum.serialized()


@dataclasses.dataclass
class Changed:
    data: list[bytes]

    def serialized(self) -> list[bytes]:
        return self.data


def recorded(federation: Federation) -> Server:
    rows: list[list[Any]] = [[]]
    packed = packing.pack

    def tapped(*args: Any) -> Any:
        rows[-1].append(args[0])
        if len(rows[-1]) > CLIENTS:
            rows.append([rows[-1].pop()])
        return packed(*args)

    asked: list[tuple[Any, ...]] = []
    hidden = EncryptedPairService.hidden

    def kept(*args: Any) -> Any:
        asked.append(args)
        return hidden(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("securecluster.protections.encryption.client.pack", tapped)
        patch.setattr(EncryptedPairService, "hidden", kept)
        run = run_with_authority(oneshot(), federation)
    content = run.served.transcript.content
    entries = run.served.transcript.entries
    ((call, response),) = [content(k) for k, e in enumerate(entries) if e.method == "relevance"]
    (request,) = [content(k)[0] for k, e in enumerate(entries) if e.method == "authority_pairs"]
    ((service, _, *others),) = asked
    later = dataclasses.replace(call, step=call.step + 1)
    calls = [(call, response.reply), (later, hidden(service, later, *others))]
    again = [partial(hidden, service, one, *others) for one, _ in calls]
    server = Server(run, calls, [request], rows, again)
    query = server.sum_of(1, range(CLIENTS)).sealed(later, "0-5", THEN)
    server.requests.append(dataclasses.replace(request, step=later.step, query=query))
    return server


@pytest.fixture(scope="module")
def server(federation: Federation) -> Server:
    return recorded(federation)


def fresh(server: Server) -> None:
    """Let the authority forget what it decrypted, so that it refuses for the one reason left."""
    state = server.run.authority.state
    server.run.authority.restore(dataclasses.replace(state, sums={}))


@pytest.mark.always
def test_a_single_reply_that_is_called_the_sum_of_all_is_not_decrypted(server: Server) -> None:
    """One client's ciphertext, to which the server added the count of the others."""
    cipher = server.cipher
    others = np.zeros(cipher.parameters.slots)
    others[0] = CLIENTS - 1
    layout = server.sum_of(0, [0]).layout
    for client in range(CLIENTS):
        forged = []
        for data in server.ciphertexts(0, client):
            vector = cipher.load(data)
            vector += cipher.load(cipher.encrypt(others))
            forged.append(vector.serialize())
        # The attack is one: what the authority would open is that client's reply.
        largest = {"row": server.run.authority._pairs.largest("row")}
        numbers = [server.secret.decrypt(data) for data in forged]
        opened = packing.unpack(numbers, layout, largest, cipher.parameters, CLIENTS)
        assert np.array_equal(opened["row"], server.rows[0][client]["row"])
        fresh(server)
        request = server.forged(0, lambda own, forged=forged: forged)  # type: ignore[misc]
        with pytest.raises(FrameError, match=FOREIGN):
            ask(server.run, request)


def plus(cipher: PublicCipher, data: bytes, other: bytes, sign: int = 1) -> bytes:
    vector = cipher.load(data)
    if sign > 0:
        vector += cipher.load(other)
    else:
        vector -= cipher.load(other)
    added: bytes = vector.serialize()
    return added


def changed_sums(server: Server) -> dict[str, Callable[[list[bytes]], list[bytes]]]:
    """Other ciphertexts than the sum, each of which the public key alone makes."""
    cipher = server.cipher
    zeros = np.zeros(cipher.parameters.slots)
    own = server.ciphertexts(0, 3)
    return {
        "made by the server": lambda data: [cipher.encrypt(zeros + CLIENTS) for _ in data],
        "with zeros added": lambda data: [plus(cipher, d, cipher.encrypt(zeros)) for d in data],
        "with one reply twice": lambda data: [
            plus(cipher, d, o) for d, o in zip(data, own, strict=True)
        ],
        "without one reply": lambda data: [
            plus(cipher, d, o, -1) for d, o in zip(data, own, strict=True)
        ],
        "of another round": lambda data: [
            plus(cipher, plus(cipher, d, o, -1), e)
            for d, o, e in zip(data, own, server.ciphertexts(1, 3), strict=True)
        ],
    }


@pytest.mark.parametrize(
    "what",
    [
        "made by the server",
        "with zeros added",
        "with one reply twice",
        "without one reply",
        "of another round",
    ],
)
def test_nothing_is_decrypted_but_the_sum(what: str, server: Server) -> None:
    fresh(server)
    request = server.forged(0, changed_sums(server)[what])
    with pytest.raises(FrameError, match=FOREIGN):
        ask(server.run, request)
    # the sum itself is, and again where the reply was lost
    assert ask(server.run, server.requests[0]).ids == (0,)
    assert ask(server.run, server.requests[0]).ids == (0,)


def tables(query: Any, order: Sequence[int]) -> dict[str, Shared]:
    """The clients' keys, boxes and signatures in another order."""
    names = ("keys", "boxes", "signatures")
    return {name: Shared(getattr(query, name).value[list(order)]) for name in names}


def test_boxes_hold_for_their_client_and_call_alone(server: Server) -> None:
    fresh(server)
    first, second = server.requests
    with pytest.raises(FrameError, match="client 0 did not sign"):
        ask(server.run, first, **tables(first.query, [1, 0, 2, 3, 4, 5]))
    with pytest.raises(FrameError, match="client 0 did not sign"):
        ask(server.run, second, **tables(first.query, range(CLIENTS)))
    # signatures of others, and none
    rolled = first.query.signatures.value.roll(1, 0)
    for signatures in (rolled, torch.zeros_like(rolled)):
        with pytest.raises(FrameError, match="client 0 did not sign"):
            ask(server.run, first, signatures=Shared(signatures))


def test_without_signatures_boxes_still_hold_for_their_client_and_call_alone(
    federation: Federation,
) -> None:
    server = recorded(federation)
    server.run.authority._roster = None
    fresh(server)
    first, second = server.requests
    with pytest.raises(FrameError, match="ciphertexts of client/0 were altered"):
        ask(server.run, first, **tables(first.query, [1, 0, 2, 3, 4, 5]))
    with pytest.raises(FrameError, match="ciphertexts of client/0 were altered"):
        ask(server.run, second, **tables(first.query, range(CLIENTS)))
    flipped = first.query.boxes.value.clone()
    flipped[2, 40] ^= 1
    with pytest.raises(FrameError, match="ciphertexts of client/2 were altered"):
        ask(server.run, first, boxes=Shared(flipped))


def test_doctored_lists_of_members_are_refused(server: Server) -> None:
    fresh(server)
    call = server.requests[0]
    five = server.sum_of(0, range(5)).sealed(server.calls[0][0], "0-5", THEN)
    of_five = dataclasses.replace(call, query=five, members=(5,))
    # all six ciphertexts, said to be of five
    six = server.sum_of(0, range(CLIENTS))
    six.survivors = (0, 1, 2, 3, 4)
    doctored = six.sealed(server.calls[0][0], "0-5", THEN)
    with pytest.raises(FrameError, match="not the sum of what clients 0-4 encrypted"):
        ask(server.run, dataclasses.replace(of_five, query=doctored))
    # one client in the place of two
    twice = tables(call.query, [0, 0, 2, 3, 4, 5])
    with pytest.raises(FrameError, match="client 1 did not sign"):
        ask(server.run, call, **twice)
    for order in ([0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5]):
        with pytest.raises(FrameError, match="boxes of more or fewer clients"):
            ask(server.run, call, **tables(call.query, order))
    with pytest.raises(FrameError):
        ask(server.run, call, survivors="0,0-4")
    # of one call, the authority decrypts one sum over a client
    assert ask(server.run, of_five).ids == (0,)
    with pytest.raises(PolicyError, match="another sum over some of these clients"):
        ask(server.run, call)


def test_no_ciphertext_is_in_two_sums(federation: Federation) -> None:
    """Clients that are asked again encrypt again; one old and one new reply tell a difference."""
    server = recorded(federation)
    call, _ = server.calls[0]
    again = server.again[0]()
    new = server.sum_of(0, [])
    mixed = server.sum_of(0, [0, 1, 2])
    for client in range(CLIENTS):
        new.add(call, client, again, client)
    for client in (3, 4, 5):
        mixed.add(call, client, again, client)

    def request(total: GroupSum) -> Call:
        return dataclasses.replace(server.requests[0], query=total.sealed(call, "0-5", THEN))

    with pytest.raises(PolicyError, match="another sum with ciphertexts of some of these clients"):
        ask(server.run, request(mixed))
    # A server that was restarted has nothing of the first attempt, and goes on with new ones.
    assert ask(server.run, request(new)).ids == (0,)
    # The record outlives the process.
    state = unpack(pack(server.run.authority.state), AuthorityState)
    server.run.authority.restore(state)
    with pytest.raises(PolicyError, match="another sum with ciphertexts of some of these clients"):
        ask(server.run, request(mixed))
    assert ask(server.run, request(new)).ids == (0,)


def test_what_is_refused_once_it_is_decrypted_counts_as_decrypted(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise refusals of many sums with one ciphertext would tell of its noise."""
    server = recorded(federation)
    fresh(server)
    refuse = FrameError("lies between two integers")

    def refused(*args: Any) -> Any:
        raise refuse

    five = server.sum_of(0, range(5)).sealed(server.calls[0][0], "0-5", THEN)
    with monkeypatch.context() as patch:
        patch.setattr("securecluster.protections.encryption.authority.unpack", refused)
        with pytest.raises(FrameError, match="between two integers"):
            ask(server.run, server.requests[0])
    with pytest.raises(PolicyError, match="another sum over some of these clients"):
        ask(server.run, server.requests[0], survivors="0-4", members=(5,), **vars_of(five))


def vars_of(query: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(query).items() if name != "survivors"}


def test_a_key_authority_decrypts_no_more_than_its_noise_is_for(federation: Federation) -> None:
    server = recorded(federation)
    state = server.run.authority.state
    count = server.sum_of(0, [0]).layout.ciphertexts(server.cipher.parameters)
    assert state.decryptions == count
    server.run.authority.restore(dataclasses.replace(state, decryptions=MOST_DECRYPTIONS))
    with pytest.raises(PolicyError, match="flooding noise is for 1048576: start a new run"):
        ask(server.run, server.requests[0])


def test_a_sum_is_refused_or_rounded_after_the_flooding(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of a whole step of pairs has every sum refused."""
    server = recorded(federation)
    step = 2.0**-14
    monkeypatch.setattr(Parameters, "flooding", lambda self, members: step)
    refused = r"lies between two integers|beyond its range|number of contributors is not 6"
    with pytest.raises(FrameError, match=refused):
        ask(server.run, server.requests[0])


def test_the_range_of_pairs_fits_the_integers_that_sums_give_exactly() -> None:
    """Of 4,096 clients 18 bits, of which numbers of pairs have 14 after the point."""
    assert rounding("row", PairRange(-16, 16, 32, 0)).largest == 1 << 18
    with pytest.raises(UsageError, match=r"up to 16\.5, and .* up to 16 exactly: give it 64 bits"):
        rounding("row", PairRange(-16.5, 16, 32, 0))
    assert rounding("loss", PairRange(-1e6, 1e6, 64, 0)).largest > 1 << 18


def test_rows_with_other_fields_are_not_added(server: Server) -> None:
    call, reply = server.calls[0]
    total = server.sum_of(0, [0])
    before = total.layout
    other = dataclasses.replace(reply, layout="row:32:3")
    with pytest.raises(FrameError, match="encrypted rows of a sum differ in their fields"):
        total.add(call, 1, other, 1)
    assert (total.survivors, total.layout) == ((0,), before)
    total.add(call, 1, reply, 1)
    assert total.survivors == (0, 1)


def test_clients_without_a_common_seed_encrypt_nothing(federation: Federation) -> None:
    server = recorded(federation)
    keys = server.run.served.endpoint.keys
    call, _ = server.calls[0]
    keys.restore(dataclasses.replace(keys.secrets, seed={}))
    with pytest.raises(PolicyError, match="has not agreed on a seed"):
        server.again[0]()
    keys.restore(dataclasses.replace(keys.secrets, seed={k: bytes([k]) * 32 for k in range(6)}))
    other = server.again[0]()
    total = GroupSum(server.run.served.net.pair_aggregator.keys)
    for client in range(CLIENTS):
        total.add(call, client, other, client)
    fresh(server)
    request = dataclasses.replace(server.requests[0], query=total.sealed(call, "0-5", THEN))
    with pytest.raises(FrameError, match="clients 0 and 1 tag their ciphertexts under different"):
        ask(server.run, request)


def test_the_server_refuses_a_box_of_another_size(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EncryptionService, "_tagged", lambda *args: bytes(7))
    with pytest.raises(FrameError, match="the box of client 0 for the key authority has 23 bytes"):
        run_with_authority(oneshot(), federation)


# --- what is left to a server that breaks the protocol ---


def canceled(server: Server, key: bytes, seed: bytes, identity: Any) -> Call:
    """A request with a box of client 5, who cancels the ciphertexts of clients 1 to 4.

    Args:
        server: the server, which tells the ciphertexts of others.
        key: private key of the box.
        seed: the seed that the clients agreed on, as far as whoever plays client 5 knows it.
        identity: signs the box.
    """
    cipher = server.cipher
    call, _ = server.calls[0]
    others = np.zeros(cipher.parameters.slots)
    others[0] = CLIENTS - 1
    row = [cipher.encrypt(others) for _ in server.ciphertexts(0, 0)]
    for client in (1, 2, 3, 4):
        parts = server.ciphertexts(0, client)
        row = [plus(cipher, data, part, -1) for data, part in zip(row, parts, strict=True)]
    total = server.sum_of(0, range(5))
    pair = KeyPair(key)
    context = EnvelopeContext(
        cipher.fingerprint,
        server.run.served.net.pair_aggregator.keys.run,
        call.method,
        call.step,
        call.attempt,
        "client/5",
        AUTHORITY,
        "0-5",
        str(total.layout),
    )
    tags_key = tag_key(seed, context.run, cipher.fingerprint)
    tags = LinearTags(cipher.parameters, tags_key)
    text = as_text(tags_key, [tags.of(cipher.coefficients(data)) for data in row])
    exchange = server.run.served.net.pair_aggregator.keys.exchange
    box = seal_bytes(text, pair, exchange, context)
    assert total._sum is not None
    own = total._sum.serialized()
    total._sum = Changed([plus(cipher, d, r) for d, r in zip(own, row, strict=True)])  # type: ignore[assignment]
    total.survivors = (*total.survivors, 5)
    total._boxes[5] = (pair.public, box, identity.sign(context.signed(box)))
    return dataclasses.replace(server.requests[0], query=total.sealed(call, "0-5", THEN))


def test_a_client_that_works_with_the_server_has_a_single_reply_decrypted(
    federation: Federation,
) -> None:
    """As the documents say: it encrypts all others' ciphertexts but one with the sign turned."""
    server = recorded(federation)
    keys = server.run.served.endpoint.keys
    fresh(server)
    request = canceled(server, b"5" * 32, keys.secrets.seed[5], keys._identity(5))
    told = ask(server.run, request).reply.numbers.values.numpy()[0]
    assert np.array_equal(told, server.rows[0][0]["row"])


def test_with_a_roster_a_server_plays_no_client_and_without_one_it_does(
    federation: Federation,
) -> None:
    """Without a roster it also leads the agreement on the seed, and so has it."""
    server = recorded(federation)
    keys = server.run.served.endpoint.keys
    fresh(server)
    request = canceled(server, b"s" * 32, keys.secrets.seed[0], keys._identity(4))
    with pytest.raises(FrameError, match="client 5 did not sign"):
        ask(server.run, request)
    server.run.authority._roster = None
    told = ask(server.run, request).reply.numbers.values.numpy()[0]
    assert np.array_equal(told, server.rows[0][0]["row"])
