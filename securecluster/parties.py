"""Who can hold a secret or see a message."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Party:
    """A party of a run: the server, a client, a local parameter server, a key authority, or the wire itself."""

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        return self.kind if self.index is None else f"{self.kind}/{self.index}"


SERVER = Party("server")
AUTHORITY = Party("authority")
WIRE = Party("wire")


def client(index: int) -> Party:
    """The party id of client number `index`."""
    return Party("client", index)


def lps(index: int) -> Party:
    """The party id of the local parameter server of cluster `index`."""
    return Party("lps", index)


def parse(text: str) -> Party:
    """The inverse of `str(party)`."""
    kind, _, index = text.partition("/")
    return Party(kind, int(index) if index else None)
