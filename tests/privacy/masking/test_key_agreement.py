"""Masks, the agreement on their seed, and the order of stages."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import pack, unpack
from securecluster.errors import FrameError, RunFolderError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Rows, Shared, reply_header
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.privacy.masking.key_agreement import (
    KeyRing,
    Peers,
    PublicKey,
    SealedSeed,
    Secrets,
    _public,
)
from securecluster.privacy.masking.masks import Permutation, build
from securecluster.protocols import CFL, Settings


def mask(seed: int = 1) -> Permutation:
    stage = Permutation()
    stage.unlock(bytes([seed]) * 32)
    return stage


def test_the_seed_is_in_no_repr_and_a_mask_without_one_refuses() -> None:
    seed = bytes(range(32))
    ring = KeyRing("c", Randomness(0), lambda s: None)
    ring.secrets.seed[0] = ring.secrets.private[0] = seed
    for text in (repr(mask()), repr(ring.secrets), str(vars(ring))):
        assert seed.hex() not in text
        assert repr(seed)[2:20] not in text
    with pytest.raises(UsageError, match="key agreement"):
        Permutation().forward(torch.zeros(1, 3), 1)
    with pytest.raises(UsageError, match="did you mean 'permutation'"):
        build("permutaton")


def test_public_keys_are_those_of_rfc_7748() -> None:
    # section 6.1
    alice = bytes.fromhex("77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a")
    alices = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert _public(alice).hex() == alices
    bob = bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb")
    assert _public(bob).hex() == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"


def ring(client: int, seed: int, got: list[bytes]) -> KeyRing:
    return KeyRing("config", Randomness(seed), got.append)


def peers_of(ids: list[int], offers: list[PublicKey]) -> Peers:
    """What a server makes of the offers of some clients."""
    keys = torch.cat([offer.key.values for offer in offers])
    signatures = torch.cat([offer.signature.values for offer in offers])
    return Peers(Shared(torch.tensor(ids)), Shared(keys), Shared(signatures))


def box_of(boxes: Any, leader: int, place: int) -> SealedSeed:
    """What a server makes of a leader's boxes for one peer."""
    box, signature = (
        rows.values[0][place : place + 1] for rows in (boxes.ciphertexts, boxes.signatures)
    )
    return SealedSeed(leader, Shared(boxes.key.values[0]), Rows(box), Rows(signature))


def agreement() -> tuple[list[bytes], list[bytes], KeyRing, KeyRing, Any]:
    leader_got: list[bytes] = []
    peer_got: list[bytes] = []
    leader, peer = ring(0, 1, leader_got), ring(1, 1, peer_got)
    boxes = leader.seal(0, peers_of([0, 1], [leader.offer((0,)), peer.offer((1,))]))
    return leader_got, peer_got, leader, peer, boxes


def test_both_ends_get_the_same_seed() -> None:
    leader_got, peer_got, leader, peer, boxes = agreement()
    assert not leader_got
    peer.open((1,), box_of(boxes, 0, 1), 3)
    leader.open((0,), box_of(boxes, 0, 0), 3)
    assert leader_got == peer_got
    assert len(peer_got[0]) == 32


def test_deployed_nodes_take_their_keys_from_the_operating_system(small: Federation) -> None:
    method = CFL()
    build = partial(build_client, method, small, Settings(), [0])
    nodes = [build(key_source=KeySource(simulated)) for simulated in (True, True, False, False)]
    offers = [node.keys.offer((0,)).key.values for node in nodes]
    assert torch.equal(offers[0], offers[1])
    assert not torch.equal(offers[2], offers[3])


@pytest.mark.parametrize("what", ["box", "key", "leader", "low order"])
def test_a_tampered_agreement_is_refused(what: str) -> None:
    _, got, _, peer, boxes = agreement()
    key, sealed = boxes.key.values[0].clone(), boxes.ciphertexts.values[0][1:].clone()
    signature = Rows(boxes.signatures.values[0][1:])
    if what == "box":
        sealed[0, 5] ^= 1
    if what == "key":
        key[3] ^= 1
    if what == "low order":
        key[:] = 0
    leader = 7 if what == "leader" else 0
    with pytest.raises(FrameError):
        peer.open((1,), SealedSeed(leader, Shared(key), Rows(sealed), signature), 3)
    assert not got


def test_no_seed_is_sealed_twice_to_one_client() -> None:
    leader = ring(0, 1, [])
    offers = [leader.offer((0,)), ring(1, 1, []).offer((1,)), ring(2, 1, []).offer((2,))]
    assert len(leader.seal(0, peers_of([0, 1, 2], offers)).ciphertexts.values[0]) == 3
    with pytest.raises(FrameError, match="include a client twice"):
        leader.seal(0, peers_of([0, 1, 1], offers))


def test_another_seed_for_one_client_is_refused() -> None:
    _, _, _, peer, boxes = agreement()
    peer.secrets.seed[5] = bytes(32)
    with pytest.raises(FrameError, match="another mask seed"):
        peer.open((1,), box_of(boxes, 0, 1), 3)


def test_no_frame_of_a_masked_run_carries_a_secret(small: Federation) -> None:
    method = CFL(rounds=2)
    fitted = method.fit(small, Settings(transcript="full"))
    secrets = build_client(method, small, Settings()).keys
    secrets.offer(tuple(range(6)))
    secrets.seal(0, peers_of([1], [secrets.offer((1,))]))
    hidden = [*secrets.secrets.private.values(), *secrets.secrets.drawn.values()]
    assert len(hidden) == 7
    for position in range(len(fitted.transcript_.entries)):
        call, answer = fitted.transcript_.content(position)
        for k in range(len(call.to)):
            header = call.header(k)
            frames = wire.encode(header, call.query, k)
            frames += wire.encode(reply_header(header), answer.reply, k)
            assert not any(secret in frames or secret.hex().encode() in frames for secret in hidden)


class Party:
    """Three clients of a key agreement, and the seeds that they hold."""

    def __init__(self) -> None:
        self.got: list[list[bytes]] = [[], [], []]
        self.rings = [ring(i, 1, own) for i, own in enumerate(self.got)]

    def led(self, leader: int, peers: list[int]) -> Any:
        offers = [self.rings[i].offer((i,)) for i in peers]
        return self.rings[leader].seal(leader, peers_of(peers, offers))

    def opened(self, boxes: Any, leader: int, client: int, place: int, step: int) -> None:
        self.rings[client].open((client,), box_of(boxes, leader, place), step)


def test_a_seed_that_nothing_left_under_gives_way_to_a_later_agreement() -> None:
    """All replies of the first agreement are lost, and another client leads the second."""
    party = Party()
    first = party.led(0, [0, 1])
    party.opened(first, 0, 0, 0, step=3)  # carried out; the reply is lost
    second = party.led(1, [0, 1])
    for place, client in enumerate((0, 1)):
        party.opened(second, 1, client, place, step=6)
    assert party.got[0][-1] == party.got[1][-1] != party.got[0][0]
    with pytest.raises(FrameError, match="another mask seed"):  # the first one, delivered late
        party.opened(first, 0, 0, 0, step=3)
    assert party.got[0][-1] == party.got[1][-1]


def test_a_seed_stays_once_something_has_left_under_it() -> None:
    party = Party()
    party.opened(party.led(0, [0, 1]), 0, 0, 0, step=3)
    party.rings[0].use((0,))
    with pytest.raises(FrameError, match="another mask seed"):
        party.opened(party.led(1, [0, 1]), 1, 0, 0, step=6)
    kept = ring(0, 1, [])
    kept.restore(party.rings[0].secrets)
    assert kept.offer((0,)).seeded.values.tolist() == [1]
    assert party.rings[2].offer((2,)).seeded.values.tolist() == [0]


def sealed_by(boxes: Any, place: int) -> bytes:
    """Return the bytes of a leader's box for one peer."""
    return bytes(boxes.ciphertexts.values[0][place].tolist())


def xor(one: bytes, two: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(one, two, strict=True))


def test_two_seeds_that_one_leader_seals_to_one_peer_tell_nothing_of_each_other() -> None:
    """Client 0 leads, takes client 2's seed, and is asked to lead again."""
    party = Party()
    first = party.led(0, [1])
    party.opened(party.led(2, [0, 1]), 2, 0, 0, step=3)
    second = party.led(0, [1])
    seeds = [party.rings[i].secrets.drawn[i] for i in (0, 2)]
    one, two = (sealed_by(boxes, 0) for boxes in (first, second))
    assert seeds[0] != seeds[1]
    assert len(one) == len(two) == 48
    apart = xor(one, two)
    parts = [apart[k : k + 32] for k in range(17)]
    assert xor(*seeds) not in parts  # as it is in a stream cipher's, under one key and nonce
    for boxes, seed in zip((first, second), seeds, strict=True):
        got: list[bytes] = []
        peer = ring(1, 1, got)
        peer.open((1,), box_of(boxes, 0, 0), 6)
        assert got == [seed]


def test_a_seed_that_is_sealed_again_gives_the_same_box_and_another_one_for_each_peer() -> None:
    party = Party()
    first, again = party.led(0, [1, 2]), party.led(0, [1, 2])
    assert torch.equal(first.ciphertexts.values, again.ciphertexts.values)
    assert sealed_by(first, 0) != sealed_by(first, 1)


def test_a_box_of_another_run_is_refused() -> None:
    _, got, _, peer, boxes = agreement()
    elsewhere = KeyRing("other config", Randomness(1), got.append)
    assert elsewhere._private(1) == peer._private(1)  # all that differs is the run
    with pytest.raises(FrameError, match="cannot open its box"):
        elsewhere.open((1,), box_of(boxes, 0, 1), 3)
    assert not got


@dataclass
class Record:
    """What a protection keeps of a client."""

    calls: dict[int, list[bytes]] = field(default_factory=dict)


def test_what_protections_keep_of_each_client_survives_a_checkpoint_and_is_its_own() -> None:
    ring = KeyRing("c", Randomness(0), lambda seed: None)
    ring.record("toy", 0, Record).calls[7] = [b"\x01\xff"]
    ring.record("toy", 3, Record)
    assert "ff" not in repr(ring.secrets)
    again = KeyRing("c", Randomness(0), lambda seed: None)
    again.restore(unpack(pack(ring.secrets), Secrets))
    # also where it is written again before it was used
    again.restore(unpack(pack(again.secrets), Secrets))
    assert again.record("toy", 0, Record) == Record({7: [b"\x01\xff"]})
    again.record("toy", 0, Record).calls[8] = []
    assert set(again.record("toy", 0, Record).calls) == {7, 8}
    assert set(again.secrets.of(3).records["toy"]) == {3}
    again.secrets.records["toy"][0] = {"sums": 3}
    with pytest.raises(RunFolderError, match="a saved Record does not parse"):
        again.record("toy", 0, Record)
