"""What clients keep between the encrypted sums of a run."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class EncryptionKeys:
    """Public keys that the clients of one endpoint encrypt and seal with.

    Attributes:
        public: the key authority's public key, by encryption scheme.
        server: the server's public key for envelopes, by encryption scheme.
        authority: the key authority's public key for boxes of tags, by encryption scheme.
    """

    public: dict[str, bytes] = field(default_factory=dict)
    server: dict[str, bytes] = field(default_factory=dict)
    authority: dict[str, bytes] = field(default_factory=dict)
