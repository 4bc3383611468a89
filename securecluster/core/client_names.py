"""Clients' names, and which client a user means by a name, a number or a position.

A name wins: 3 and "3" are the client called 3. Where no client is called by a number, a number is a
position, counted from 0; `at(2)` is always one.

Names that differ only in type or blanks are refused by every `Federation`. Runs and frames number
clients by position; what people read has names.
"""

from __future__ import annotations

import difflib
import math
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, TypeAlias

from securecluster.errors import SecureClusterError, UsageError

SHOWN = 3  # names in an error message
NO_NUMBERS = "bool", "bool_"  # types of Python's and numpy's booleans, which are integers to both


@dataclass(frozen=True)
class At:
    """Position of a client in a federation, a run or a ledger, whatever it is called.

    Args:
        position: counted from 0.
    """

    position: int

    def __repr__(self) -> str:
        return f"at({self.position})"


Client: TypeAlias = int | str | At


def at(position: int) -> At:
    """Return the client at a position, whatever it is called.

    Args:
        position: counted from 0.

    Raises:
        UsageError: no whole number from 0.
    """
    if not _is_integer(position) or position < 0:
        raise UsageError(f"a position is a whole number from 0, not {position!r}")
    return At(int(position))


def name_of(key: Any) -> str:
    """Return the name of a client that a user calls by a key.

    Whole numbers are called alike whatever their type is. Blanks around a name count for nothing,
    and several within it for one, since such names print alike.

    Args:
        key: text, a number, or anything else with a text of its own.

    Raises:
        UsageError: a key that names nobody: a boolean, None, NaN or blanks alone.
    """
    text = _text(key)
    if text is None or not text:
        raise UsageError(f"{key!r} is no client's name: give text or a whole number")
    return text


def names_of(keys: Iterable[Any]) -> tuple[str, ...]:
    """Return the names of different clients.

    Args:
        keys: what a user calls them.

    Raises:
        UsageError: a key that names nobody, or two that name the same client.
    """
    keys_by_name: dict[str, Any] = {}
    for key in keys:
        name = name_of(key)
        if name in keys_by_name:
            raise UsageError(
                f"{keys_by_name[name]!r} and {key!r} would both be the client {name!r}: give them "
                "different names"
            )
        keys_by_name[name] = key
    return tuple(keys_by_name)


def stream_of(name: str) -> str | int:
    """Return what stands for a client in the paths of its public random streams: its name alone.

    A whole number stands for a name that is one, so that a client called 3 draws what the client at
    position 3 draws where clients have no names. No two names stand for the same streams: "007" is
    a text, and 7 a number.

    Args:
        name: of the client, as `name_of` returns it.
    """
    number = _whole_number(name)
    return name if number is None else number


def called_by_position(names: Sequence[str]) -> bool:
    """Return whether clients are called 0, 1, …, in this order, as those of a list are.

    Args:
        names: of the clients in order.
    """
    return all(name == str(position) for position, name in enumerate(names))


@contextmanager
def named_in_errors(names: Sequence[str]) -> Iterator[None]:
    """Add clients' names to errors of runs, in which clients go by position.

    Args:
        names: of the clients in order.
    """
    try:
        yield
    except SecureClusterError as error:
        error.args = (with_names(str(error), names), *error.args[1:])
        raise


def with_names(text: str, names: Sequence[str]) -> str:
    """Return a sentence with the names of the clients whose positions it gives.

    Args:
        text: such as "round 0: the model of client(s) 2, 5 is not finite".
        names: of the clients in order; one that is its position is not repeated.
    """
    positions: dict[int, None] = {}
    for listed in re.findall(r"\b(?:client|newcomer)(?:s|\(s\))? (\d+(?:, \d+)*)", text):
        positions.update(dict.fromkeys(map(int, listed.split(", "))))
    explained = []
    for position in positions:
        if position < len(names) and names[position] != str(position):
            explained.append(f"client {position} is {names[position]!r}")
    if not explained:
        return text
    return f"{text} ({', '.join(explained)})"


class ClientNames:
    """Names of some clients, which tell whom a user means.

    Args:
        names: of the clients in order; empty if they are unknown.
        count: number of the clients; None is that of the names.
        position_text: how a user gives a position, in errors.
    """

    def __init__(
        self, names: Sequence[str], count: int | None = None, position_text: str = "at({})"
    ) -> None:
        self.names = names
        self.count = len(names) if count is None else count
        self._position_text = position_text

    @cached_property
    def _positions_of(self) -> dict[str, list[int]]:
        """Return the positions of the clients of each name."""
        positions_of: dict[str, list[int]] = {}
        for position, name in enumerate(self.names):
            positions_of.setdefault(_text(name) or "", []).append(position)
        return positions_of

    @cached_property
    def _numeric(self) -> list[str]:
        """Return the names that are numbers."""
        return [name for name in self._positions_of if _is_number(name)]

    def positions_called(self, key: Any) -> list[int]:
        """Return the positions of the clients of a name, of which a run has one at most.

        Args:
            key: a name, as text or as a number.
        """
        text = _text(key)
        return [] if text is None else self._positions_of.get(text, [])

    def find(self, client: Any) -> int | None:
        """Return the position of the client that a user means, or None if there is none.

        Args:
            client: its name, `at` its position, or, where no client is called by a number, the
                number of its position.

        Raises:
            UsageError: a name of several clients.
        """
        if isinstance(client, At):
            return client.position if client.position < self.count else None
        called = self.positions_called(client)
        if len(called) > 1:
            choices = " or ".join(self.spelled(position) for position in called)
            raise UsageError(f"{client!r} is the name of several clients: give {choices}")
        if called:
            return called[0]
        number = _whole_number(client)
        # a number among numbers is a name, which nobody here has
        if number is None or number >= self.count or self._numeric:
            return None
        return number

    def position(self, client: Any) -> int:
        """Return the position of the client that a user means.

        Args:
            client: as for `find`.

        Raises:
            UsageError: no such client, or a number that could be a name.
        """
        position = self.find(client)
        if position is None:
            shown = repr(client)
            if isinstance(client, At):
                shown = self.spelled(client.position)
            raise UsageError(f"there is no client {shown}: {self.advice(client)}clients go {self}")
        return position

    def positions(self, clients: Iterable[Any]) -> list[int]:
        """Return the positions of the clients that a user means.

        Args:
            clients: each as for `find`; a text alone is one name.

        Raises:
            UsageError: no such client, or a number that could be a name.
        """
        if isinstance(clients, str):
            clients = [clients]
        return [self.position(client) for client in clients]

    def parsed(self, text: str) -> int:
        """Return the position of the client that a user types on the command line.

        Args:
            text: a name or a number, as for `find`, or "#2", which is `at(2)` unless clients have
                names like this.

        Raises:
            UsageError: no such client, or a number that could be a name.
        """
        position = re.fullmatch(r"#(\d{1,9})", text.strip(), re.ASCII)
        named_alike = any(re.fullmatch(r"#\d+", name) for name in self._positions_of)
        if position is None or named_alike:
            return self.position(text)
        return self.position(At(int(position[1])))

    def spelled(self, position: int) -> str:
        """Return a position as a user gives it.

        Args:
            position: of a client.
        """
        return self._position_text.format(position)

    def advice(self, client: Any, others: Sequence[str] = ()) -> str:
        """Return what a user may have meant who gave no client, where that can be told.

        Args:
            client: as the user gave it.
            others: what the user may have meant besides clients.
        """
        number = _whole_number(client)
        if number is not None and number < self.count and self._numeric:
            name = self.names[number]
            return (
                "clients are called by numbers here, so a number is a name, and "
                f"{self.spelled(number)} is the client at this position, {name!r}; "
            )
        choices = {name.lower(): name for name in [*others, *self._positions_of]}
        given = str(client).lower()
        closest = difflib.get_close_matches(given, choices, n=1)
        closest = closest or [name for name in choices if given and name.endswith(given)][:1]
        if not closest:
            return ""
        return f"did you mean {choices[closest[0]]!r}? "

    def __str__(self) -> str:
        """Return how clients are given, for error messages."""
        positions = self.spelled(0)
        if self.count > 1:
            positions += f" to {self.spelled(self.count - 1)}"
        if not self.names:
            return f"by position ({positions})"
        examples = ", ".join(repr(str(name)) for name in self.names[:SHOWN])
        if len(self.names) > SHOWN:
            examples += " …"
        return f"by name ({examples}) or position ({positions})"


def _text(key: Any) -> str | None:
    """Return a key as the text of a name, or None if it cannot be one."""
    if key is None or isinstance(key, At) or type(key).__name__ in NO_NUMBERS:
        return None
    if isinstance(key, Integral):
        return str(int(key))
    if isinstance(key, Real):
        number = float(key)
        if math.isnan(number):
            return None
        # 1.0 is the number 1
        return str(int(number)) if number.is_integer() else str(key)
    return plain_text(str(key))


def plain_text(text: str) -> str:
    """Return a text without blanks around it, with single ones within, and accents in one form.

    Args:
        text: as somebody typed it.
    """
    # NFC: letters with accents have two codes
    return " ".join(unicodedata.normalize("NFC", text).split())


def _is_number(name: str) -> bool:
    """Return whether a name can be read as a number, such as "3", "003" or "3.0"."""
    try:
        return math.isfinite(float(name))
    except ValueError:
        return False


def _whole_number(client: Any) -> int | None:
    """Return a whole number from 0 that a user gave as a number or as text; None for others."""
    text = _text(client) or ""
    if not re.fullmatch(r"0|[1-9]\d{0,17}", text, re.ASCII):
        return None
    return int(text)


def _is_integer(value: Any) -> bool:
    return isinstance(value, Integral) and type(value).__name__ not in NO_NUMBERS
