"""How clients come to share a mask seed that the server relays and cannot read.

The first client that replies is the leader, or, where replies were lost or a server was restarted,
the first that has a seed already: it draws the seed and seals it to every other client's X25519
key.

Keys and sealed seeds are signed with the clients' identities. A client that has a roster of these
takes part with nobody else, so a server can neither name itself a peer, to read the seed, nor play
leader, to set it. Without a roster no signature is verified: then the agreement protects against an
honest-but-curious server only.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError
from securecluster.messaging.bounds import Between, Octets, Upto, Whole
from securecluster.messaging.messages import Rows, Shared
from securecluster.privacy.masking.identities import SIGNATURE, UNSIGNED, Identity, Roster

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

from securecluster.messaging.messages import Ack

KEY, BOX = 32, 48  # bytes of a public key, and of a sealed seed
MOST_CLIENTS = 1 << 31  # numbers of clients, of those that join later too, are below
# who gets the seed from one frame; a server with more sends several
PEERS = Upto("peers", "clients", minimum=1)


@dataclass(frozen=True, eq=False)
class PublicKey:
    """Client to server."""

    key: Annotated[Rows, Octets((KEY,))]  # (b, 32) uint8, X25519
    # (b,) uint8, 1 where the client has a seed already: one of these leads, since a seed that was
    # used stays
    seeded: Annotated[Rows, Octets(maximum=1)]
    # (b, 64) uint8, Ed25519, of the key; zeros where the client has no identity
    signature: Annotated[Rows, Octets((SIGNATURE,))]


@dataclass(frozen=True, eq=False)
class Peers:
    """Server to leader: who is to get the seed."""

    ids: Annotated[Shared, Whole((PEERS,), below=MOST_CLIENTS)]  # (k,) int64
    keys: Annotated[Shared, Octets((PEERS, KEY))]  # (k, 32) uint8
    signatures: Annotated[Shared, Octets((PEERS, SIGNATURE))]  # (k, 64) uint8, of the keys


@dataclass(frozen=True, eq=False)
class SealedSeeds:
    """Leader to server: the seed, sealed to each peer."""

    key: Annotated[Rows, Octets((KEY,))]  # (1, 32) uint8, the leader's public key
    ciphertexts: Annotated[Rows, Octets((PEERS, BOX))]  # (1, k, 48) uint8, AES-256-SIV
    signatures: Annotated[Rows, Octets((PEERS, SIGNATURE))]  # (1, k, 64) uint8, of each box


@dataclass(frozen=True, eq=False)
class SealedSeed:
    """Server to client."""

    leader: Annotated[int, Between(below=MOST_CLIENTS)]
    key: Annotated[Shared, Octets((KEY,))]  # (32,) uint8
    ciphertext: Annotated[Rows, Octets((BOX,))]  # (b, 48) uint8
    signature: Annotated[Rows, Octets((SIGNATURE,))]  # (b, 64) uint8, of the box


@dataclass
class Secrets:
    """What a client keeps between rounds: its private key, a seed it drew as leader, the shared
    seed once it has it, and the key of its noise. Never printed.
    """

    private: dict[int, bytes] = field(default_factory=dict, repr=False)
    drawn: dict[int, bytes] = field(default_factory=dict, repr=False)
    seed: dict[int, bytes] = field(default_factory=dict, repr=False)
    noise: dict[int, bytes] = field(default_factory=dict, repr=False)
    # the key call that brought a seed under which nothing has left yet
    unused: dict[int, int] = field(default_factory=dict)


class KeyRing:
    """The keys of the clients of one endpoint.

    Args:
        config: the hash of the run's configuration, bound into every seal.
        randomness: derives all keys from the run seed, for reproducible simulations; None takes
            them from the operating system.
        unlock: called with the shared seed.
        identity: client number -> what it signs with; None for a client without an identity.
        roster: whose signatures count; None takes part with whomever the server names.
    """

    def __init__(
        self,
        config: str,
        randomness: Randomness | None,
        unlock: Callable[[bytes], None],
        identity: Callable[[int], Identity | None] = lambda client: None,
        roster: Roster | None = None,
    ) -> None:
        self._config, self._randomness, self._unlock = config.encode(), randomness, unlock
        self._identity, self._roster = identity, roster
        self.secrets = Secrets()

    def restore(self, secrets: Secrets) -> None:
        """Take over the secrets of a checkpoint."""
        self.secrets = secrets
        for seed in list(secrets.seed.values())[:1]:
            self._unlock(seed)

    def _bytes(self, client: int, purpose: str) -> bytes:
        return (
            os.urandom(32)
            if self._randomness is None
            else self._randomness.key("client", client, purpose)
        )

    def noise(self, client: int) -> bytes:
        """The key that a client's noise is drawn by."""
        return self.secrets.noise.setdefault(client, self._bytes(client, "noise"))

    def _private(self, client: int) -> bytes:
        return self.secrets.private.setdefault(client, self._bytes(client, "x25519"))

    def use(self, clients: tuple[int, ...]) -> None:
        """Note that these clients answer a call of the protocol: from now on their seed stays what
        it is.
        """
        for i in clients:
            self.secrets.unused.pop(i, None)

    def _take(self, client: int, seed: bytes, step: int) -> None:
        """Take a seed that key call `step` brought.

        Replies may be lost, and then clients agree anew, led by one that never had the first seed.
        So a later agreement replaces a seed as long as nothing has left under it, which tells a
        server that swaps seeds no more than the first agreement does.
        """
        unused = self.secrets.unused
        fixed = [
            own
            for i, own in self.secrets.seed.items()
            if own != seed and step < unused.get(i, math.inf)
        ]
        if fixed:
            raise FrameError(
                f"client {client} was handed another mask seed than it, or a peer, has used: the "
                "key agreement was tampered with, or a"
                " server was restarted before it knew who took part; start a new run"
            )
        if self.secrets.seed.get(client) != seed:
            unused[client] = step
        elif client in unused:
            unused[client] = max(unused[client], step)
        self.secrets.seed[client] = seed
        self._unlock(seed)

    def offer(self, clients: tuple[int, ...]) -> PublicKey:
        """Public keys of some clients."""
        keys = [_public(self._private(i)) for i in clients]
        seeded = torch.tensor([i in self.secrets.seed for i in clients], dtype=torch.uint8)
        signatures = [
            self._sign(i, self._offered(i, key)) for i, key in zip(clients, keys, strict=True)
        ]
        return PublicKey(Rows(_table(keys)), Rows(seeded), Rows(_table(signatures)))

    def seal(self, leader: int, peers: Peers) -> SealedSeeds:
        """The leader's seed, sealed to each peer; it takes a seed it drew itself only out of its
        own box, like everyone else.
        """
        ids = peers.ids.value.tolist()
        if len(set(ids)) < len(ids):
            raise FrameError(
                "the peers of a key agreement include a client twice: ask for the frame again"
            )
        keys = [_bytes(key) for key in peers.keys.value]
        for i, key, signature in zip(ids, keys, peers.signatures.value, strict=True):
            self._verify(i, self._offered(i, key), _bytes(signature))
        seed = self.secrets.seed.get(leader) or self.secrets.drawn.setdefault(
            leader, self._bytes(leader, "mask")
        )
        mine, own = self._private(leader), _public(self._private(leader))
        contexts = [self._context(leader, i, own, key) for i, key in zip(ids, keys, strict=True)]
        boxes = []
        signatures = []
        for key, context in zip(keys, contexts, strict=True):
            box = _aead(mine, key, context).encrypt(seed, None)
            boxes.append(box)
            signatures.append(self._sign(leader, _sealed(context, box)))
        return SealedSeeds(
            Rows(_tensor(own)[None]), Rows(_table(boxes)[None]), Rows(_table(signatures)[None])
        )

    def open(self, clients: tuple[int, ...], box: SealedSeed, step: int) -> Ack:
        """Take the seed out of each client's box, in key call `step`."""
        from cryptography.exceptions import InvalidTag

        leader = _bytes(box.key.value)
        for i, row, signature in zip(
            clients, box.ciphertext.values, box.signature.values, strict=True
        ):
            mine, sealed = self._private(i), _bytes(row)
            context = self._context(box.leader, i, leader, _public(mine))
            self._verify(box.leader, _sealed(context, sealed), _bytes(signature))
            try:
                seed = _aead(mine, leader, context).decrypt(sealed, None)
            except InvalidTag:
                raise FrameError(
                    f"client {i} cannot open its box: the key agreement was tampered with, start a "
                    "new run"
                ) from None
            self._take(i, seed, step)
        return Ack()

    def _sign(self, client: int, statement: bytes) -> bytes:
        identity = self._identity(client)
        return UNSIGNED if identity is None else identity.sign(statement)

    def _verify(self, client: int, statement: bytes, signature: bytes) -> None:
        if self._roster is not None:
            self._roster.check(client, statement, signature)

    def _offered(self, client: int, key: bytes) -> bytes:
        """Return what a client signs when it offers its public key."""
        return b"|".join(
            [b"securecluster key offer v1", self._config, b"%d" % client, key.hex().encode()]
        )

    def _context(self, leader: int, peer: int, leader_key: bytes, peer_key: bytes) -> bytes:
        ends = b"%d %d" % (leader, peer)
        return b"|".join(
            [
                b"securecluster mask seed v3",
                self._config,
                ends,
                leader_key.hex().encode(),
                peer_key.hex().encode(),
            ]
        )


def _sealed(context: bytes, box: bytes) -> bytes:
    """Return what a leader signs of a seed that it sealed to a peer."""
    return b"|".join([b"securecluster sealed seed v1", context, box.hex().encode()])


def _table(rows: Sequence[bytes]) -> torch.Tensor:
    return torch.stack([_tensor(row) for row in rows])


def _tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _public(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def _aead(private: bytes, public: bytes, context: bytes) -> AESSIV:
    """Return AES-256-SIV (RFC 5297) under a key that only the two ends know.

    A leader's seed may change between two agreements, so one key may seal two seeds. AES-SIV takes
    no nonce: two seeds under one key show only that they differ, and equal seeds give equal boxes.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    from cryptography.hazmat.primitives.hashes import SHA512
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        secret = X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(public)
        )
    except ValueError:
        raise FrameError(
            "a public key of the key agreement is not a valid X25519 key: its sender must be left "
            "out"
        ) from None
    key = HKDF(SHA512(), 64, salt=None, info=context).derive(secret)
    return AESSIV(key)
