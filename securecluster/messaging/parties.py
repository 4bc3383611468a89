"""Parties that can hold a secret or observe a message."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from securecluster.errors import UsageError


@dataclass(frozen=True)
class Party:
    """Party of a run: the server, a client, a local parameter server, a key authority or the wire.

    Args:
        kind: "server", "client", "lps", "authority" or "wire".
        index: number among the parties of its kind; None if there is only one.
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
    """Return the party of a client.

    Args:
        index: number of the client.
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
    kind, _, index = text.partition("/")
    if not index:
        return Party(kind)
    return Party(kind, int(index))


@dataclass(frozen=True)
class Present:
    """Parties of one transcript.

    Args:
        clients: number of clients; their numbers are 0 … clients - 1.
        servers: number of local parameter servers.
        names: names of the clients in the order of their numbers; empty if they are unknown.
        authority: True if a key authority took part.
    """

    clients: int
    servers: int = 0
    names: Sequence[str] = ()
    authority: bool = False

    @property
    def _single(self) -> tuple[Party, ...]:
        """Return the parties of which there is one."""
        if self.authority:
            return (SERVER, WIRE, AUTHORITY)
        return (SERVER, WIRE)

    def resolve(self, parties: Any) -> frozenset[Party]:
        """Return the parties that a user specifies.

        Args:
            parties: one party or several: a Party, a client's number or name, "server" or "wire".

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
        if self.clients:
            options.append(self._client_options())
        if self.servers > 1:
            options.append(f"lps(0) to lps({self.servers - 1})")
        elif self.servers:
            options.append("lps(0)")
        return "this transcript has " + ", ".join(options)

    def _client_options(self) -> str:
        """Return the numbers of all clients, and the names of the first three."""
        numbers = "client 0"
        if self.clients > 1:
            numbers = f"clients 0 to {self.clients - 1}"
        options = f"{numbers} by number"
        if not self.names:
            return options
        examples = ", ".join([repr(str(name)) for name in self.names[:3]])
        if len(self.names) > 3:
            examples += " …"
        return f"{options} or name ({examples})"

    def _one(self, party: Any) -> Party:
        """Return the party that one specification stands for."""
        if isinstance(party, str):
            return self._named(party)
        if isinstance(party, Integral) and not isinstance(party, bool):
            return self._client(int(party), party)
        if not isinstance(party, Party):
            raise self._unknown(party)
        if party in self._single:
            return party
        if party.kind == "client":
            index: Any = party.index  # users also write client("site-0")
            if isinstance(index, str):
                return self._named(index)
            return self._client(index, party)
        if party.kind == "lps" and _is_index(party.index, self.servers):
            return party
        raise self._unknown(party)

    def _named(self, name: str) -> Party:
        """Return the one party of a name, which a client may share with the server or the wire."""
        matches = [client(k) for k, other in enumerate(self.names) if other == name]
        matches += [party for party in self._single if party.kind == name]
        if len(matches) > 1:
            owners = " and ".join(map(str, matches))
            raise UsageError(
                f"{name!r} is the name of {owners}: give the number, or SERVER or WIRE"
            )
        if not matches:
            raise self._unknown(name)
        return matches[0]

    def _client(self, number: Any, specified: object) -> Party:
        """Return the client of a number.

        Args:
            number: the number.
            specified: the user's specification, for the error.
        """
        if not _is_index(number, self.clients):
            raise self._unknown(specified)
        return client(int(number))

    def _unknown(self, specified: object) -> UsageError:
        """Return the error for a party that does not exist."""
        shown = repr(specified)
        if isinstance(specified, Party):
            shown = str(specified)
        return UsageError(f"there is no party {shown}: {self._nearest(specified)}{self}")

    def _nearest(self, specified: object) -> str:
        """Return a question that names the most similar party, or no text if none is similar."""
        text = str(specified)
        if isinstance(specified, Party) and isinstance(specified.index, str):
            text = specified.index  # client("site-0")
        names = ["server", "wire", *map(str, self.names)]
        choices = {name.lower(): name for name in names}
        closest = difflib.get_close_matches(text.lower(), choices, n=1)
        if not closest:
            return ""
        return f"did you mean {choices[closest[0]]!r}? "


def _is_index(number: object, count: int) -> bool:
    """Return True for an integer from 0 to `count` - 1; booleans are not integers here."""
    if not isinstance(number, Integral) or isinstance(number, bool):
        return False
    return 0 <= int(number) < count
