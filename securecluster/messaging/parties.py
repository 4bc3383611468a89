"""Parties that can hold a secret or observe a message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

from securecluster.core.client_names import At, ClientNames
from securecluster.errors import UsageError


@dataclass(frozen=True)
class Party:
    """Party of a run: the server, a client, a local parameter server, a key authority or the wire.

    Args:
        kind: "server", "client", "lps", "authority" or "wire".
        index: position among the parties of its kind, from 0; None if there is only one.
    """

    kind: str
    index: int | None = None

    def __str__(self) -> str:
        if self.index is None:
            return self.kind
        return f"{self.kind}/{self.index}"


SERVER = Party("server")
AUTHORITY = Party("authority")
WIRE = Party("wire")


def client(index: int) -> Party:
    """Return the party of the client at a position, as frames name it.

    Args:
        index: position of the client, from 0, whatever its name is.
    """
    return Party("client", index)


def lps(index: int) -> Party:
    """Return the party of a local parameter server.

    Args:
        index: number of its cluster.
    """
    return Party("lps", index)


def parse(text: str) -> Party:
    """Return the party with a text form; inverse of `str(party)`.

    Args:
        text: such as "server" or "client/3".
    """
    party_kind, _, index = text.partition("/")
    if not index:
        return Party(party_kind)
    return Party(party_kind, int(index))


@dataclass(frozen=True)
class Present:
    """Parties of one transcript.

    Args:
        clients: number of clients; their positions are 0 … clients - 1.
        servers: number of local parameter servers.
        names: names of the clients in the order of their positions; empty if they are unknown.
        authority: True if a key authority took part.
    """

    clients: int
    servers: int = 0
    names: Sequence[str] = ()
    authority: bool = False

    @cached_property
    def _names(self) -> ClientNames:
        return ClientNames(self.names, self.clients)

    @property
    def _single(self) -> tuple[Party, ...]:
        """Return the parties of which there is one."""
        if self.authority:
            return (SERVER, WIRE, AUTHORITY)
        return (SERVER, WIRE)

    def resolve(self, parties: Any) -> frozenset[Party]:
        """Return the parties that a user specifies.

        Args:
            parties: one party or several: a Party, a client as for `ClientNames.find`, "server" or
                "wire".

        Raises:
            UsageError: no party is specified, or one that does not exist here.
        """
        # a name is iterable, too, but stands for one party
        several = isinstance(parties, Iterable) and not isinstance(parties, str | bytes)
        if not several:
            parties = (parties,)
        resolved = frozenset(self._one(party) for party in parties)
        if not resolved:
            raise UsageError(f"no party is named: {self}")
        return resolved

    def __str__(self) -> str:
        """Return a list of the existing parties, for error messages."""
        options = [str(party).upper() for party in self._single]
        if self.servers > 1:
            options.append(f"lps(0) to lps({self.servers - 1})")
        elif self.servers:
            options.append("lps(0)")
        if self.clients:
            options.append(f"clients {self._names}")
        return "this transcript has " + ", ".join(options)

    def _one(self, party: Any) -> Party:
        """Return the party that one specification stands for."""
        if not isinstance(party, Party):
            return self._named(party)
        if party in self._single:
            return party
        if party.kind == "client":
            index: Any = party.index
            if isinstance(index, str):  # users also write client("site-0")
                return self._named(index)
            if _is_index(index, self.clients):
                return client(int(index))
        if party.kind == "lps" and _is_index(party.index, self.servers):
            return party
        raise self._unknown(party)

    def _named(self, name: Any) -> Party:
        """Return the one party of a name, which a client may share with the server or the wire."""
        single = [party for party in self._single if party.kind == name]
        called = [] if isinstance(name, At) else self._names.positions_called(name)
        if single and called:
            raise UsageError(
                f"{name!r} is the name of a client, too: give {self._names.spelled(called[0])}, or "
                f"{name.upper()}"
            )
        if single:
            return single[0]
        position = self._names.find(name)
        if position is None:
            raise self._unknown(name)
        return client(position)

    def _unknown(self, specified: object) -> UsageError:
        """Return the error for a party that does not exist."""
        shown = repr(specified)
        if isinstance(specified, Party):
            shown = str(specified)
            if isinstance(specified.index, str):  # client("site-0")
                specified = specified.index
        advice = self._names.advice(specified, ("server", "wire"))
        return UsageError(f"there is no party {shown}: {advice}{self}")


def _is_index(number: object, count: int) -> bool:
    """Return True for an integer from 0 to `count` - 1; booleans are not integers here."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        return False
    return 0 <= int(number) < count
