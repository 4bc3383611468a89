"""Key agreement: clients come to share a mask seed that the server relays and cannot read.

The first client that replies is the leader, or, where replies were lost or a server was restarted,
the first that has a seed already. It draws the seed and seals it to every other client's X25519
key.

Keys and sealed seeds are signed with the clients' identities. A client with a roster takes part
only with clients on it, so a server can neither name itself a peer, to read the seed, nor play
leader, to set it. Without a roster no signature is verified: then the agreement protects against an
honest-but-curious server only.

Security rules: a seed that something has left under is fixed, and another one is refused. Until
then a later agreement replaces it, since all replies to the first may have been lost. Who missed
the agreement is left out of the masked round and joins at its next call. Seeds are sealed with
AES-SIV, which needs no nonce: a leader may seal two seeds under one key.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import restored
from securecluster.core.validation import Between
from securecluster.errors import FrameError
from securecluster.messaging.bounds import Octets, Upto, Whole
from securecluster.messaging.messages import Ack, Rows, Shared
from securecluster.privacy.masking.identities import MOST_CLIENTS, SIGNATURE, UNSIGNED

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

    from securecluster.privacy.masking.identities import Identity, Roster

T = TypeVar("T")
R = TypeVar("R")

# bytes of a public key, and of a sealed seed
KEY = 32
BOX = 48
# recipients of the seed in one frame; a server with more sends several frames
PEERS = Upto("peers", "clients", minimum=1)


@dataclass(frozen=True, eq=False)
class PublicKey:
    """Client's offer to the server."""

    key: Annotated[Rows, Octets((KEY,))]  # (b, 32) uint8, X25519
    # (b,) uint8, 1 where the client has a seed already: one of these leads, since a seed that was
    # used stays
    seeded: Annotated[Rows, Octets(maximum=1)]
    # (b, 64) uint8, Ed25519, of the key; zeros where the client has no identity
    signature: Annotated[Rows, Octets((SIGNATURE,))]


@dataclass(frozen=True, eq=False)
class Peers:
    """Server's request to the leader: the clients to seal the seed to."""

    ids: Annotated[Shared, Whole((PEERS,), below=MOST_CLIENTS)]  # (k,) int64
    keys: Annotated[Shared, Octets((PEERS, KEY))]  # (k, 32) uint8
    signatures: Annotated[Shared, Octets((PEERS, SIGNATURE))]  # (k, 64) uint8, of the keys


@dataclass(frozen=True, eq=False)
class SealedSeeds:
    """Leader's reply to the server: the seed, sealed to each peer."""

    key: Annotated[Rows, Octets((KEY,))]  # (1, 32) uint8, the leader's public key
    ciphertexts: Annotated[Rows, Octets((PEERS, BOX))]  # (1, k, 48) uint8, AES-256-SIV
    signatures: Annotated[Rows, Octets((PEERS, SIGNATURE))]  # (1, k, 64) uint8, of each box


@dataclass(frozen=True, eq=False)
class SealedSeed:
    """Server's message to a client: its box of the seed."""

    leader: Annotated[int, Between(below=MOST_CLIENTS)]
    key: Annotated[Shared, Octets((KEY,))]  # (32,) uint8
    ciphertext: Annotated[Rows, Octets((BOX,))]  # (b, 48) uint8
    signature: Annotated[Rows, Octets((SIGNATURE,))]  # (b, 64) uint8, of the box


@dataclass
class PairwiseKeys:
    """Keys by which pairs of clients agree on pads.

    Attributes:
        private: X25519 private keys of the clients of one endpoint, by client id.
        public: public keys of other clients, as the server relayed them.
        roots: root of the tree of all keys that each client of the endpoint was told last.
    """

    private: dict[int, bytes] = field(default_factory=dict, repr=False)
    public: dict[int, bytes] = field(default_factory=dict)
    roots: dict[int, bytes] = field(default_factory=dict)

    def of(self, client: int) -> PairwiseKeys:
        """Return the private key and root of one client alone, and the public keys of others.

        Args:
            client: its id.
        """
        own = _entry_of(self.private, client)
        return PairwiseKeys(own, dict(self.public), _entry_of(self.roots, client))


@dataclass
class AuthorityKeys:
    """Public keys that the clients of one endpoint encrypt and seal with.

    Attributes:
        public: the key authority's public key, by encryption scheme.
        server: the server's public key for envelopes, by encryption scheme.
        authority: the key authority's public key for boxes of tags, by encryption scheme.
    """

    public: dict[str, bytes] = field(default_factory=dict)
    server: dict[str, bytes] = field(default_factory=dict)
    authority: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Secrets:
    """Secrets that clients keep between rounds, by client id; never printed.

    Args:
        private: X25519 private keys.
        drawn: seeds that clients drew as leaders.
        seed: shared seeds, once clients have them.
        noise: keys of the noise.
        unused: number of the key call that brought a seed under which nothing was released yet.
        pairwise: keys by which pairs of clients agree on pads.
        authority: public keys of a key authority.
        records: what protections keep of each client, by protection (`KeyRing.record`).
    """

    private: dict[int, bytes] = field(default_factory=dict, repr=False)
    drawn: dict[int, bytes] = field(default_factory=dict, repr=False)
    seed: dict[int, bytes] = field(default_factory=dict, repr=False)
    noise: dict[int, bytes] = field(default_factory=dict, repr=False)
    unused: dict[int, int] = field(default_factory=dict)
    pairwise: PairwiseKeys = field(default_factory=PairwiseKeys)
    authority: AuthorityKeys = field(default_factory=AuthorityKeys)
    records: dict[str, dict[int, Any]] = field(default_factory=dict, repr=False)

    def of(self, client: int) -> Secrets:
        """Return the secrets of one client alone.

        Args:
            client: its id.
        """
        return Secrets(
            private=_entry_of(self.private, client),
            drawn=_entry_of(self.drawn, client),
            seed=_entry_of(self.seed, client),
            noise=_entry_of(self.noise, client),
            unused=_entry_of(self.unused, client),
            pairwise=self.pairwise.of(client),
            authority=self.authority,
            records={name: _entry_of(entries, client) for name, entries in self.records.items()},
        )


def _entry_of(entries: Mapping[int, T], client: int) -> dict[int, T]:
    """Return the entry of one client, as a dictionary that is empty if it has none."""
    if client not in entries:
        return {}
    return {client: entries[client]}


class KeyRing:
    """Keys of the clients of one endpoint.

    Args:
        config: hash of the run's configuration, bound into every seal.
        randomness: secret random streams of a simulated run, which give all keys; None takes
            them from the operating system.
        unlock: function that is called with the shared seed.
        identity: client id -> identity that it signs with; None for a client without one.
        roster: clients whose signatures count. None verifies nothing, and takes part with any peer
            that the server names.
    """

    def __init__(
        self,
        config: str,
        randomness: Randomness | None,
        unlock: Callable[[bytes], None],
        identity: Callable[[int], Identity | None] = lambda client: None,
        roster: Roster | None = None,
    ) -> None:
        self._config = config.encode()
        self._randomness = randomness
        self._unlock = unlock
        self._identity = identity
        self._roster = roster
        self.secrets = Secrets()

    def restore(self, secrets: Secrets) -> None:
        """Set the secrets of a checkpoint.

        Args:
            secrets: secrets of this endpoint's clients.
        """
        self.secrets = secrets
        # All clients of a run share one seed.
        for seed in list(secrets.seed.values())[:1]:
            self._unlock(seed)

    def secret(self, client: int, purpose: str) -> bytes:
        """Return 32 new secret bytes, or those that follow from the secret of a simulated run.

        Args:
            client: id of the client.
            purpose: what the bytes are for.
        """
        if self._randomness is None:
            return os.urandom(32)
        return self._randomness.key("client", client, purpose)

    def record(self, protection: str, client: int, record_class: type[R]) -> R:
        """Return what a protection keeps of a client, to be changed in place; at first a new one.

        Args:
            protection: its name.
            client: id of the client.
            record_class: class of the record, a dataclass whose fields have defaults.

        Raises:
            RunFolderError: a record that was damaged in a checkpoint.
        """
        records = self.secrets.records.setdefault(protection, {})
        entry = records.get(client)
        if not isinstance(entry, record_class):
            # Whoever reads a checkpoint does not know the class.
            entry = record_class() if entry is None else restored(entry, record_class)
            records[client] = entry
        return entry

    def noise(self, client: int) -> bytes:
        """Return the key by which a client's noise is drawn, 32 bytes.

        Args:
            client: id of the client.
        """
        key = self.secret(client, "noise")
        return self.secrets.noise.setdefault(client, key)

    def _private(self, client: int) -> bytes:
        key = self.secret(client, "x25519")
        return self.secrets.private.setdefault(client, key)

    def use(self, clients: tuple[int, ...]) -> None:
        """Fix the seeds of clients that answer a call of the protocol.

        Args:
            clients: ids of the clients.
        """
        for client in clients:
            self.secrets.unused.pop(client, None)

    def _take(self, client: int, seed: bytes, step: int) -> None:
        """Store a seed and unlock what needs it.

        Args:
            client: id of the client.
            seed: 32 secret bytes.
            step: number of the key call that brought the seed.
        """
        unused = self.secrets.unused
        if self.secrets.seed.get(client) != seed:
            unused[client] = step
        elif client in unused:
            unused[client] = max(unused[client], step)
        self.secrets.seed[client] = seed
        self._unlock(seed)

    def _fixed_seeds(self, step: int) -> set[bytes]:
        """Return the seeds that no seed of a key call may replace.

        A seed stays once something was released under it. Before, replies may be lost, and then
        clients agree anew, led by one that never had the first seed. So a later agreement replaces
        a seed as long as nothing was released under it: this reveals no more to a server that swaps
        seeds than the first agreement does.

        Args:
            step: number of the key call. Its own seeds are never among those returned, so clients
                that take them one after another do not change the result.
        """
        unused = self.secrets.unused
        # A seed in use is not in `unused`; one that is there yields to a later key call.
        return {
            seed
            for client, seed in self.secrets.seed.items()
            if step < unused.get(client, math.inf)
        }

    def offer(self, clients: tuple[int, ...]) -> PublicKey:
        """Return the signed public keys of some clients.

        Args:
            clients: ids of the clients (b,).
        """
        keys = []
        signatures = []
        for client in clients:
            key = _public(self._private(client))
            offer = self._offered(client, key)
            keys.append(key)
            signatures.append(self.sign(client, offer))
        # A client with a seed leads, so that a seed in use stays.
        seeds = self.secrets.seed
        seeded = torch.tensor([client in seeds for client in clients], dtype=torch.uint8)
        return PublicKey(
            key=Rows(_table(keys)), seeded=Rows(seeded), signature=Rows(_table(signatures))
        )

    def seal(self, leader: int, peers: Peers) -> SealedSeeds:
        """Return the leader's seed, sealed to each peer.

        The leader itself stores a seed that it drew only when it opens its own box, like every
        other client.

        Args:
            leader: id of the leader.
            peers: clients to seal the seed to.

        Raises:
            FrameError: a peer that is included twice, or whose key is not signed by a client on the
                roster.
        """
        ids = peers.ids.value.tolist()
        _check_distinct(ids)
        keys = [_bytes(key) for key in peers.keys.value]
        # Every signature is checked before anything is sealed: a server that names itself a peer
        # would read the seed.
        signatures = [_bytes(signature) for signature in peers.signatures.value]
        for peer, key, signature in zip(ids, keys, signatures, strict=True):
            offer = self._offered(peer, key)
            self.verify(peer, offer, signature)
        seed = self._leader_seed(leader)
        private = self._private(leader)
        public = _public(private)
        boxes = []
        box_signatures = []
        for peer, key in zip(ids, keys, strict=True):
            context = self._context(leader, peer, public, key)
            box = _aead(private, key, context).encrypt(seed, None)
            statement = _sealed(context, box)
            boxes.append(box)
            box_signatures.append(self.sign(leader, statement))
        return SealedSeeds(
            key=Rows(_tensor(public)[None]),
            ciphertexts=Rows(_table(boxes)[None]),
            signatures=Rows(_table(box_signatures)[None]),
        )

    def _leader_seed(self, leader: int) -> bytes:
        """Return the seed that a leader shares: the one in use, else one that it draws once."""
        shared = self.secrets.seed.get(leader)
        if shared:
            return shared
        seed = self.secret(leader, "mask")
        return self.secrets.drawn.setdefault(leader, seed)

    def open(self, clients: tuple[int, ...], box: SealedSeed, step: int) -> Ack:
        """Store the seed in each client's box.

        Args:
            clients: ids of the clients (b,).
            box: boxes of the clients.
            step: number of the key call.

        Raises:
            FrameError: a box that the leader did not sign, that cannot be opened, or whose seed
                would replace one in use.
        """
        from cryptography.exceptions import InvalidTag

        leader_key = _bytes(box.key.value)
        fixed = self._fixed_seeds(step)
        rows = zip(clients, box.ciphertext.values, box.signature.values, strict=True)
        for client, ciphertext, signature in rows:
            private = self._private(client)
            sealed = _bytes(ciphertext)
            client_key = _public(private)
            context = self._context(box.leader, client, leader_key, client_key)
            # A server that plays leader would set the seed, so the signature is checked first.
            statement = _sealed(context, sealed)
            self.verify(box.leader, statement, _bytes(signature))
            try:
                seed = _aead(private, leader_key, context).decrypt(sealed, None)
            except InvalidTag:
                raise FrameError(
                    f"client {client} cannot open its box: the key agreement was tampered with, "
                    "start a new run"
                ) from None
            if fixed - {seed}:
                raise FrameError(
                    f"client {client} received another mask seed than it, or a peer, has used: "
                    "the key agreement was tampered with, or a server was restarted before it knew "
                    "who took part; start a new run"
                )
            self._take(client, seed, step)
        return Ack()

    def sign(self, client: int, statement: bytes) -> bytes:
        """Return a client's signature of a statement, or zeros where it has no identity.

        Args:
            client: id of the client.
            statement: bytes to sign.
        """
        identity = self._identity(client)
        if identity is None:
            return UNSIGNED
        return identity.sign(statement)

    def verify(self, client: int, statement: bytes, signature: bytes) -> None:
        """Raise FrameError unless a client signed a statement; without a roster, verify nothing.

        Args:
            client: id of the client.
            statement: bytes that were signed.
            signature: 64 bytes.

        Raises:
            FrameError: a client that is not on the roster, or another signature.
        """
        if self._roster is not None:
            self._roster.check(client, statement, signature)

    def _offered(self, client: int, key: bytes) -> bytes:
        """Return what a client of this run signs when it offers its public key."""
        return offer_statement(self._config, client, key)

    def _context(self, leader: int, peer: int, leader_key: bytes, peer_key: bytes) -> bytes:
        """Return the context of a box, from which its key is derived.

        It names the run and both ends, so that a box of one peer is not that of another.

        Args:
            leader: id of the leader.
            peer: id of the peer.
            leader_key: public key of the leader, 32 bytes.
            peer_key: public key of the peer, 32 bytes.
        """
        ends = b"%d %d" % (leader, peer)
        fields = [
            b"securecluster mask seed v3",
            self._config,
            ends,
            leader_key.hex().encode(),
            peer_key.hex().encode(),
        ]
        return b"|".join(fields)


def offer_statement(run: bytes, client: int, key: bytes) -> bytes:
    """Return what a client signs when it offers its public key for the mask seed.

    It names the run and the client, so that an offer holds in no other run, and for no other
    client.

    Args:
        run: hash of the run's configuration.
        client: id of the client.
        key: public key, 32 bytes.
    """
    fields = [b"securecluster key offer v1", run, b"%d" % client, key.hex().encode()]
    return b"|".join(fields)


def _check_distinct(ids: Sequence[int]) -> None:
    if len(set(ids)) < len(ids):
        raise FrameError(
            "the peers of a key agreement include a client twice: ask for the frame again"
        )


def _sealed(context: bytes, box: bytes) -> bytes:
    """Return the statement that a leader signs for a seed that it sealed to a peer.

    Args:
        context: context of the box.
        box: sealed seed, 48 bytes.
    """
    fields = [b"securecluster sealed seed v1", context, box.hex().encode()]
    return b"|".join(fields)


def _table(rows: Sequence[bytes]) -> torch.Tensor:
    return torch.stack([_tensor(row) for row in rows])


def _tensor(data: bytes) -> torch.Tensor:
    # a copy, since tensors need writable memory
    array = np.frombuffer(data, dtype=np.uint8).copy()
    return torch.from_numpy(array)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()


def _public(private: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    key = X25519PrivateKey.from_private_bytes(private)
    return key.public_key().public_bytes_raw()


def _aead(private: bytes, public: bytes, context: bytes) -> AESSIV:
    """Return AES-256-SIV (RFC 5297) under a key that only the two ends can derive.

    A leader's seed may change between two agreements, so one key may seal two seeds. AES-SIV takes
    no nonce: two seeds under one key reveal only that they differ, and equal seeds give equal
    boxes.

    Args:
        private: X25519 private key of one end, 32 bytes.
        public: X25519 public key of the other end, 32 bytes.
        context: bytes that the key is bound to.

    Raises:
        FrameError: an invalid public key.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV
    from cryptography.hazmat.primitives.hashes import SHA512
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        peer = X25519PublicKey.from_public_bytes(public)
        secret = X25519PrivateKey.from_private_bytes(private).exchange(peer)
    except ValueError:
        raise FrameError(
            "a public key of the key agreement is not a valid X25519 key: its sender must be left "
            "out"
        ) from None
    derivation = HKDF(SHA512(), 64, salt=None, info=context)
    return AESSIV(derivation.derive(secret))
