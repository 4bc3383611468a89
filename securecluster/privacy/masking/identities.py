"""Identities of clients: Ed25519 keys, and the roster of their public keys.

A roster comes from outside of the run: from the secret of the run in a simulation, and in a
deployment from the enrolment of clients. Keys that a server relays during the run are verified
against it.

Signatures cover the configuration's hash and the numbers of both ends. A node is given identity and
roster when it is built; without a roster it verifies nothing. A newcomer is admitted where the
leader's roster names it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from securecluster.core import atomic_files
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, UsageError

# bytes of a signature
SIGNATURE = 64
# Stands for the signature of a client without an identity; no key verifies it.
UNSIGNED = bytes(SIGNATURE)
# Ids of clients, also of those that join later, are below.
MOST_CLIENTS = 1 << 31
# number of a key authority on rosters, and the word before its key in their files
AUTHORITY_NUMBER = MOST_CLIENTS - 1
AUTHORITY_WORD = "authority"


class Identity:
    """A client's signing key (Ed25519, RFC 8032).

    Args:
        private: 32 secret bytes.

    Raises:
        UsageError: not 32 bytes.

    Example:
        >>> identity = Identity(bytes(32))
        >>> Roster({0: identity.public}).check(0, b"text", identity.sign(b"text"))
    """

    def __init__(self, private: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if not _is_key(private):
            raise UsageError("an identity is 32 secret bytes: make one with Identity.generate()")
        self._private = private
        self._key = Ed25519PrivateKey.from_private_bytes(private)

    def __repr__(self) -> str:
        # the public key: no secret may be printed
        return f"Identity({self.public.hex()[:16]}…)"

    @classmethod
    def generate(cls) -> Identity:
        """Return a new identity from the operating system's generator."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        key = Ed25519PrivateKey.generate()
        return cls(key.private_bytes_raw())

    @classmethod
    def derived(cls, randomness: Randomness, client: int) -> Identity:
        """Return a simulated client's identity, which everyone who knows the run's secret has.

        Args:
            randomness: secret random streams of the run.
            client: id of the client.
        """
        return cls(randomness.key("client", client, "ed25519"))

    @classmethod
    def load(cls, path: Path | str) -> Identity:
        """Return the identity in a file that `save` wrote.

        Args:
            path: path of the file.

        Raises:
            UsageError: the file does not contain an identity.
        """
        return cls(atomic_files.read(Path(path)))

    def save(self, path: Path | str) -> None:
        """Write the secret key to a file that only its owner can read.

        Args:
            path: path of the file.

        Raises:
            UsageError: something is there: a key that is lost cannot be made again.
        """
        with atomic_files.as_run_folder_error(Path(path), "write"):
            exists = os.path.lexists(path)
        if exists:
            raise UsageError(f"{path} exists, and a lost key cannot be made again: give a new path")
        atomic_files.write_atomic(Path(path), self._private, 0o600)

    @property
    def public(self) -> bytes:
        """Return the public key, 32 bytes, for a roster."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes; the same for the same message.

        Args:
            message: bytes to sign.
        """
        return self._key.sign(message)


class Roster:
    """Public keys of the clients that take part, and of the key authority (`AUTHORITY_NUMBER`).

    Args:
        keys: client id -> public key, 32 bytes; or a function that returns it, and None for a
            stranger.

    Raises:
        UsageError: an id or a key that is invalid.
    """

    def __init__(self, keys: Mapping[int, bytes] | Callable[[int], bytes | None]) -> None:
        self._keys: dict[int, bytes] = {}
        # A mapping names every client: any other one is a stranger.
        self._find: Callable[[int], bytes | None] = lambda client: None
        if isinstance(keys, Mapping):
            for client, key in keys.items():
                _check_entry(client, key)
            self._keys.update(keys)
        elif callable(keys):
            self._find = keys
        else:
            raise UsageError(
                "a roster is made of a mapping from clients' numbers to public keys, not of "
                f"{type(keys).__name__}"
            )

    @classmethod
    def load(cls, path: Path | str) -> Roster:
        """Return the roster of a text file: one public key a line, in the order of the numbers.

        A line `authority KEY` has that of the key authority, which is no client.

        Args:
            path: of the file; what follows a key or # on a line is a note.

        Raises:
            UsageError: no such file, a line that is no key, or a key that is there twice.
        """
        keys: dict[int, bytes] = {}
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"{path} is no roster that can be read: {error}") from None
        for line in lines:
            words = line.partition("#")[0].split()
            if not words:
                continue
            number = len(keys.keys() - {AUTHORITY_NUMBER})
            party = f"client {number}"
            if words[0] == AUTHORITY_WORD:
                number, party = AUTHORITY_NUMBER, "the key authority"
                words = [*words[1:], ""]
            try:
                key = bytes.fromhex(words[0])
            except ValueError:
                key = b""
            if not _is_key(key):
                raise UsageError(f"{path}: a line has no public key of 64 hexadecimal digits")
            if key in keys.values() or number in keys:
                raise UsageError(f"{path}: the key of {party} is there twice")
            keys[number] = key
        return cls(keys)

    @classmethod
    def derived(cls, randomness: Randomness) -> Roster:
        """Return the roster of a simulation: all clients, and any that may join later.

        Args:
            randomness: secret random streams of the run.
        """
        return cls(lambda client: Identity.derived(randomness, client).public)

    def key(self, client: int) -> bytes | None:
        """Return a client's public key; None for a client that is not on the roster.

        Args:
            client: id of the client.
        """
        if client not in self._keys:
            key = self._find(client)
            if key is None:
                return None
            self._keys[client] = key
        return self._keys[client]

    @property
    def size(self) -> int:
        """Return the number of clients whose key was given."""
        return len(self._keys.keys() - {AUTHORITY_NUMBER})

    def number(self, public: bytes) -> int | None:
        """Return the number of a party by its key; None for a key that is not on the roster.

        Args:
            public: 32 bytes.
        """
        for client, key in self._keys.items():
            if key == public:
                return client
        return None

    @property
    def digest(self) -> str:
        """Return a digest of all numbers and keys, which the configuration of a run has.

        Raises:
            UsageError: a roster that names no client in advance, as that of a simulation.
        """
        if not self._keys:
            raise UsageError("a roster without clients has no digest: make it from their keys")
        content = b"".join(
            client.to_bytes(8, "little", signed=True) + key
            for client, key in sorted(self._keys.items())
        )
        return hashlib.sha256(b"roster" + content).hexdigest()

    def check(self, client: int, message: bytes, signature: bytes) -> None:
        """Raise FrameError unless a client on the roster signed a message.

        Args:
            client: id of the client.
            message: signed bytes.
            signature: 64 bytes.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        key = self.key(client)
        if key is None:
            raise FrameError(f"client {client} is not on the roster: the key agreement is refused")
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        # a ValueError is of a malformed key
        except (InvalidSignature, ValueError):
            raise FrameError(
                f"client {client} did not sign what the server relays in its name: the key "
                "agreement was tampered with"
            ) from None


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and len(key) == 32


def _check_entry(client: object, key: object) -> None:
    is_id = isinstance(client, int) and client >= 0
    if not is_id or not _is_key(key):
        raise UsageError(
            "a roster has a public key of 32 bytes for each client's number: that of "
            f"{client!r} is none"
        )


def check_roster(roster: Roster, identity: Identity, ids: tuple[int, ...], clients: int) -> None:
    """Raise UsageError for a roster that does not fit a run.

    It must have a key of every client of the run, and this identity's key for its own clients.

    Args:
        roster: roster to check.
        identity: identity of this node.
        ids: ids of the clients that use this identity.
        clients: number of clients that began the run. Clients that join later may be on the roster,
            too.
    """
    missing = [i for i in range(clients) if roster.key(i) is None]
    if missing:
        examples = ", ".join(map(str, missing[:5]))
        raise UsageError(
            f"the roster lacks client(s) {examples}: it needs the public key of every client of "
            "the run"
        )
    for i in ids:
        if roster.key(i) != identity.public:
            raise UsageError(
                f"the roster has another public key for client {i} than its identity: enrol it "
                "again, or give its own key"
            )
