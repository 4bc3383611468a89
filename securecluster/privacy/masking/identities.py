"""Who a client is: an Ed25519 key of its own, and the roster by which others know it.

A roster comes from outside of the run: from the seed in a simulation, and in a deployment from
    whoever enrols
clients. What a server hands on during the run is held against it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from securecluster.core import atomic_files
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, UsageError

SIGNATURE = 64  # bytes
# stands for the signature of a client without an identity; no key verifies it
UNSIGNED = bytes(SIGNATURE)


class Identity:
    """A client's signing key (Ed25519, RFC 8032).

    Args:
        private: 32 secret bytes.

    Example:
        >>> identity = Identity(bytes(32))
        >>> Roster({0: identity.public}).check(0, b"text", identity.sign(b"text"))
    """

    def __init__(self, private: bytes) -> None:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        if not isinstance(private, bytes) or len(private) != 32:
            raise UsageError("an identity is 32 secret bytes: make one with Identity.generate()")
        self._private = private
        self._key = Ed25519PrivateKey.from_private_bytes(private)

    def __repr__(self) -> str:
        return f"Identity({self.public.hex()[:16]}…)"

    @classmethod
    def generate(cls) -> Identity:
        """Return a new identity from the operating system's generator."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def derived(cls, randomness: Randomness, client: int) -> Identity:
        """Return a simulated client's identity: whoever knows the run's seed has it, too."""
        return cls(randomness.key("client", client, "ed25519"))

    @classmethod
    def load(cls, path: Path | str) -> Identity:
        """Return the identity in a file that `save` wrote.

        Raises:
            UsageError: the file does not hold an identity.
        """
        return cls(atomic_files.read(Path(path)))

    def save(self, path: Path | str) -> None:
        """Write the secret key to a file that its owner alone can read."""
        atomic_files.write_atomic(Path(path), self._private, 0o600)

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes: what a roster has of this client."""
        return self._key.public_key().public_bytes_raw()

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes; the same for the same message."""
        return self._key.sign(message)


class Roster:
    """The clients that take part, and the public key of each one's identity.

    Args:
        keys: client number -> public key, 32 bytes; or a function that returns it, None for a
            stranger.

    Raises:
        UsageError: a number or a key that cannot be one.
    """

    def __init__(self, keys: Mapping[int, bytes] | Callable[[int], bytes | None]) -> None:
        self._known: dict[int, bytes] = {}
        self._find: Callable[[int], bytes | None] = lambda client: None
        if isinstance(keys, Mapping):
            for client, key in keys.items():
                if (
                    not isinstance(client, int)
                    or client < 0
                    or not isinstance(key, bytes)
                    or len(key) != 32
                ):
                    raise UsageError(
                        "a roster has a public key of 32 bytes for each client's number: that of "
                        f"{client!r} is none"
                    )
            self._known.update(keys)
        elif callable(keys):
            self._find = keys
        else:
            raise UsageError(
                "a roster is made of a mapping from clients' numbers to public keys, not of "
                f"{type(keys).__name__}"
            )

    @classmethod
    def derived(cls, randomness: Randomness) -> Roster:
        """Return the roster of a simulation: of all clients, and of any that may join later."""
        return cls(lambda client: Identity.derived(randomness, client).public)

    def key(self, client: int) -> bytes | None:
        """Return a client's public key; None for who is not on the roster."""
        if client not in self._known:
            found = self._find(client)
            if found is None:
                return None
            self._known[client] = found
        return self._known[client]

    def check(self, client: int, message: bytes, signature: bytes) -> None:
        """Raise FrameError unless a client on the roster signed a message."""
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

        key = self.key(client)
        if key is None:
            raise FrameError(f"client {client} is not on the roster: the key agreement is refused")
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise FrameError(
                f"client {client} did not sign what the server hands on in its name: the key "
                "agreement was tampered with"
            ) from None


def check_roster(roster: Roster, identity: Identity, own: tuple[int, ...], clients: int) -> None:
    """Raise UsageError for a roster that lacks a client of the run, or has another key for a client
    than its own.

    Args:
        own: the numbers of the clients that use this identity.
        clients: how many began the run; who joins later may be on the roster, too.
    """
    missing = [i for i in range(clients) if roster.key(i) is None]
    if missing:
        few = ", ".join(map(str, missing[:5]))
        raise UsageError(
            f"the roster lacks client(s) {few}: it needs the public key of every client of the run"
        )
    for i in own:
        if roster.key(i) != identity.public:
            raise UsageError(
                f"the roster has another public key for client {i} than its identity: enrol it "
                "again, or give its own key"
            )
