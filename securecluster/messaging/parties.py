"""Who can hold a secret or see a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from securecluster.errors import UsageError


@dataclass(frozen=True)
class Party:
    """A party of a run: the server, a client, a local parameter server, a key authority, or the
    wire itself.
    """

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


@dataclass(frozen=True)
class Present:
    """The parties of one transcript.

    Args:
        clients: number of clients; their numbers are 0 … clients - 1.
        servers: number of local parameter servers.
        names: the clients' names in the order of their numbers; empty where they are not known.
    """

    clients: int
    servers: int = 0
    names: Sequence[str] = ()

    def resolve(self, given: Any) -> frozenset[Party]:
        """Return the parties that a user names.

        Args:
            given: one party or several: a Party, a client's number or name, "server" or "wire".

        Raises:
            UsageError: nobody is named, or somebody who does not exist here.
        """
        several = isinstance(given, Iterable) and not isinstance(given, str | bytes)
        found = frozenset(self._one(each) for each in (given if several else (given,)))
        if not found:
            raise UsageError(f"no party is named: {self}")
        return found

    def __str__(self) -> str:
        """Say who exists."""
        numbers = f"clients 0 to {self.clients - 1}" if self.clients > 1 else "client 0"
        named = ", ".join(repr(str(name)) for name in self.names[:3])
        more = " …" if len(self.names) > 3 else ""
        clients = f"{numbers} by number" + (f" or name ({named}{more})" if named else "")
        kinds = ["SERVER", "WIRE"]
        if self.clients:
            kinds.append(clients)
        if self.servers:
            kinds.append(f"lps(0) to lps({self.servers - 1})" if self.servers > 1 else "lps(0)")
        return "this transcript has " + ", ".join(kinds)

    def _one(self, given: Any) -> Party:
        if isinstance(given, str):
            return self._named(given)
        if isinstance(given, Integral) and not isinstance(given, bool):
            return self._client(int(given), given)
        if not isinstance(given, Party):
            raise self._unknown(given)
        if given in (SERVER, WIRE):
            return given
        if given.kind == "client":
            index: Any = given.index
            return self._named(index) if isinstance(index, str) else self._client(index, given)
        if given.kind == "lps" and _within(given.index, self.servers):
            return given
        raise self._unknown(given)

    def _named(self, name: str) -> Party:
        found = [client(k) for k, own in enumerate(self.names) if own == name]
        found += [party for party in (SERVER, WIRE) if party.kind == name]
        if len(found) > 1:
            who = " and ".join(map(str, found))
            raise UsageError(f"{name!r} is the name of {who}: give the number, or SERVER or WIRE")
        if not found:
            raise self._unknown(name)
        return found[0]

    def _client(self, number: Any, given: object) -> Party:
        if not _within(number, self.clients):
            raise self._unknown(given)
        return client(int(number))

    def _unknown(self, given: object) -> UsageError:
        shown = str(given) if isinstance(given, Party) else repr(given)
        return UsageError(f"there is no party {shown}: {self}")


def _within(number: object, count: int) -> bool:
    """Return whether something is a whole number from 0 and below `count`."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        return False
    return 0 <= int(number) < count
