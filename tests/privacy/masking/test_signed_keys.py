"""A server that names itself a peer, or plays leader: it succeeds where nobody has a roster, and
fails where clients have one.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch

from securecluster import Federation, Iid
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, SecureClusterError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Header, Rows, Shared
from securecluster.parties.deployment import build_network
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.privacy.masking.identities import UNSIGNED, Identity, Roster
from securecluster.privacy.masking.key_agreement import (
    KeyRing,
    Peers,
    SealedSeed,
    SealedSeeds,
    _aead,
    _bytes,
    _public,
    _table,
    _tensor,
)
from securecluster.protocols import FedAvg, Settings
from securecluster.runtime.run import Run
from securecluster.runtime.transport import Framed

RUN = "the hash of a configuration"
SERVER = bytes(range(32))  # a private key of the server's own
IDENTITIES = {i: Identity(bytes([i + 1]) * 32) for i in range(3)}


def roster() -> Roster:
    return Roster({i: identity.public for i, identity in IDENTITIES.items()})


def ring(client: int, known: Roster | None, run: str = RUN) -> KeyRing:
    return KeyRing(run, Randomness(client), lambda seed: None, IDENTITIES.get, known)


def peers(client: int, key: bytes, signature: bytes) -> Peers:
    return Peers(Shared(torch.tensor([client])), Shared(_table([key])), Shared(_table([signature])))


def read_by_the_server(leader: KeyRing, client: int, signature: bytes) -> bytes:
    """Name the server's key as that of a client; return the seed that the leader seals to it."""
    public = _public(SERVER)
    boxes = leader.seal(0, peers(client, public, signature))
    own = _bytes(boxes.key.values[0])
    context = leader._context(0, client, own, public)
    return _aead(SERVER, own, context).decrypt(_bytes(boxes.ciphertexts.values[0, 0]), None)


def set_by_the_server(
    victim: KeyRing, client: int, seed: bytes, signature: bytes = UNSIGNED
) -> None:
    """Play client 0 as leader, and seal a seed of the server's choice to a client."""
    public, theirs = _public(SERVER), _public(victim._private(client))
    box = _aead(SERVER, theirs, victim._context(0, client, public, theirs)).encrypt(seed, None)
    rows = Rows(_table([box])), Rows(_table([signature]))
    victim.open((client,), SealedSeed(0, Shared(_tensor(public)), *rows), 1)


def test_without_a_roster_a_server_that_names_itself_a_peer_reads_the_seed() -> None:
    leader = ring(0, None)
    assert read_by_the_server(leader, 1, UNSIGNED) == leader.secrets.drawn[0]


@pytest.mark.parametrize(
    "signed",
    ["unsigned", "by a key of its own", "for another key", "in another run", "as another client"],
)
def test_with_a_roster_it_does_not(signed: str) -> None:
    leader, public = ring(0, roster()), _public(SERVER)
    signature = {
        "unsigned": UNSIGNED,
        "by a key of its own": Identity(bytes(32)).sign(leader._offered(1, public)),
        "for another key": _bytes(ring(1, None).offer((1,)).signature.values[0]),
        "in another run": IDENTITIES[1].sign(ring(1, None, "another run")._offered(1, public)),
        "as another client": IDENTITIES[2].sign(leader._offered(1, public)),
    }[signed]
    with pytest.raises(FrameError, match="client 1 did not sign"):
        read_by_the_server(leader, 1, signature)
    assert not leader.secrets.drawn


def test_a_stranger_is_no_peer() -> None:
    with pytest.raises(FrameError, match="client 7 is not on the roster"):
        read_by_the_server(ring(0, roster()), 7, UNSIGNED)


def test_without_a_roster_a_server_that_plays_leader_sets_a_clients_seed() -> None:
    victim = ring(1, None)
    set_by_the_server(victim, 1, b"\x07" * 32)
    assert victim.secrets.seed[1] == b"\x07" * 32


def test_with_a_roster_it_does_not_play_leader() -> None:
    victim = ring(1, roster())
    with pytest.raises(FrameError, match="client 0 did not sign"):
        set_by_the_server(victim, 1, b"\x07" * 32)
    assert not victim.secrets.seed


def test_a_box_of_one_peer_is_not_signed_for_another() -> None:
    rings = {i: ring(i, roster()) for i in range(3)}
    offers = [rings[i].offer((i,)) for i in (1, 2)]
    keys = Shared(torch.cat([offer.key.values for offer in offers]))
    signatures = Shared(torch.cat([offer.signature.values for offer in offers]))
    boxes: SealedSeeds = rings[0].seal(0, Peers(Shared(torch.tensor([1, 2])), keys, signatures))

    def box(place: int) -> SealedSeed:
        tables = (boxes.ciphertexts, boxes.signatures)
        rows = (Rows(table.values[0][place : place + 1]) for table in tables)
        return SealedSeed(0, Shared(boxes.key.values[0]), *rows)

    with pytest.raises(FrameError, match="client 0 did not sign"):
        rings[1].open((1,), box(1), 1)
    rings[1].open((1,), box(0), 1)
    assert rings[1].secrets.seed[1] == rings[0].secrets.drawn[0]


def test_an_identity_signs_as_rfc_8032_says_and_its_file_is_its_owners(tmp_path: Path) -> None:
    # section 7.1, test 1
    private = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
    identity = Identity(private)
    assert identity.sign(b"").hex().startswith("e5564300c360ac729086e2cc806e828a84877f1eb8e5d974")
    identity.save(tmp_path / "identity")
    assert stat.S_IMODE(os.stat(tmp_path / "identity").st_mode) == 0o600
    assert Identity.load(tmp_path / "identity").public == identity.public
    assert private.hex() not in repr(identity) + repr(vars(Roster({0: identity.public})))
    assert Identity.generate().public != Identity.generate().public


@pytest.mark.parametrize("keys", [{0: b"short"}, {-1: bytes(32)}, {"0": bytes(32)}])
def test_a_roster_of_no_keys_is_refused(keys: Any) -> None:
    with pytest.raises(UsageError, match="a roster has a public key of 32 bytes"):
        Roster(keys)


@pytest.mark.parametrize("private", [b"", bytes(31), bytes(33), "0" * 32, bytearray(32)])
def test_an_identity_of_no_key_is_refused(private: Any) -> None:
    with pytest.raises(UsageError, match="an identity is 32 secret bytes"):
        Identity(private)
    with pytest.raises(UsageError, match="a roster is made of a mapping"):
        Roster([private])  # type: ignore[arg-type]


def deployed(federation: Federation, known: Roster | None, own: dict[int, Identity | None]) -> Any:
    method = FedAvg(mask="permutation", model="linear", rounds=2, epochs=1)
    return method, {i: node(method, federation, i, identity, known) for i, identity in own.items()}


def node(method: Any, federation: Federation, i: int, identity: Any, known: Any) -> Any:
    settings = Settings()
    return build_client(
        method,
        federation,
        settings,
        [i],
        key_source=KeySource(simulated=False, identity=identity, roster=known),
    )


def serve(method: Any, federation: Federation, doors: dict[int, Any]) -> Any:
    framed = Framed(doors, lambda name: call_types(method, name)[1])
    net = build_network(method, framed, method.config(federation, "float32"))
    return method.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))


def three() -> Federation:
    return Federation.simulate("digits", scenario=Iid(), clients=3, samples=12, seed=0)


@pytest.mark.parametrize("known", [None, roster()])
def test_deployed_nodes_agree_with_and_without_a_roster(known: Roster | None) -> None:
    federation = three()
    own: dict[int, Identity | None] = dict(IDENTITIES) if known else dict.fromkeys(range(3))
    method, nodes = deployed(federation, known, own)
    serve(method, federation, {i: node.answer_frame for i, node in nodes.items()})
    seeds = {node.keys.secrets.seed[i] for i, node in nodes.items()}
    assert len(seeds) == 1


@pytest.mark.parametrize("known", [None, roster()])
def test_a_server_that_swaps_a_key_on_the_wire_fails_where_nodes_have_a_roster(
    known: Roster | None, caplog: pytest.LogCaptureFixture
) -> None:
    """It replaces client 1's key by its own in client 1's offer, reads the seed, and seals it anew
    to client 1.
    """
    federation = three()
    own: dict[int, Identity | None] = dict(IDENTITIES) if known else dict.fromkeys(range(3))
    method, nodes = deployed(federation, known, own)
    read: list[bytes] = []

    def door(i: int) -> Any:
        def answer(data: bytes) -> bytes:
            header = wire.peek(data)
            reply = nodes[i].answer_frame(data)
            if header.method == "key_offer" and i == 1:
                back, offer = wire.decode(reply, call_types(method, "key_offer")[1])
                offer.key.table[0] = _tensor(_public(SERVER))
                return wire.encode(back, offer)
            if header.method == "key_seal":
                _, boxes = wire.decode(reply, SealedSeeds)
                leader = _bytes(boxes.key.values[0])
                context = nodes[i].keys._context(i, 1, leader, _public(SERVER))
                sealed = _bytes(boxes.ciphertexts.values[0, 1])
                read.append(_aead(SERVER, leader, context).decrypt(sealed, None))
                raise ConnectionError
            return reply

        return answer

    try:
        serve(method, federation, {i: door(i) for i in nodes})
    except SecureClusterError as error:
        assert known is not None
        assert "refused key_" in str(error)
        assert "client 1 did not sign" in caplog.text
    assert bool(read) == (known is None)


def test_a_newcomer_is_admitted_where_the_roster_names_it() -> None:
    """Client 2 joins two others: the leader's roster decides."""
    for names in ((0, 1), (0, 1, 2)):
        known = Roster({i: IDENTITIES[i].public for i in names})
        offer = ring(2, known).offer((2,))
        keys, signatures = Shared(offer.key.values), Shared(offer.signature.values)
        query = Peers(Shared(torch.tensor([2])), keys, signatures)
        if 2 in names:
            assert ring(0, known).seal(0, query)
            continue
        with pytest.raises(FrameError, match="client 2 is not on the roster"):
            ring(0, known).seal(0, query)


def test_what_cannot_go_together_is_refused_when_a_node_is_built() -> None:
    federation, own = three(), IDENTITIES[0]
    method, known = FedAvg(model="linear"), roster()
    with pytest.raises(UsageError, match="simulated=False"):
        build_client(
            method, federation, Settings(), [0], key_source=KeySource(identity=own, roster=known)
        )
    for client, identity, names, sentence in (
        (0, None, known, "a roster needs an identity"),
        (1, own, known, "another public key for client 1"),
        (0, own, Roster({0: own.public}), r"lacks client\(s\) 1, 2"),
        (0, own.public, known, "identity is bytes: make it with Identity"),
        (0, own, {0: own.public}, "roster is dict: make it with Roster"),
    ):
        with pytest.raises(UsageError, match=sentence):
            node(method, federation, client, identity, names)


def test_simulated_clients_sign_with_identities_of_the_seed() -> None:
    federation = three()
    method = FedAvg(model="linear", mask="permutation")
    node = build_client(method, federation, Settings(), [0])
    with pytest.raises(FrameError, match="client 1 did not sign"):
        read_by_the_server(node.keys, 1, UNSIGNED)
    query = peers(1, _public(SERVER), UNSIGNED)
    header = Header(node._config, "key_seal", "gather", 1, 1, "server", "client/0", 1)
    with pytest.raises(FrameError, match="client 1 did not sign"):
        node.answer_frame(wire.encode(header, query))
