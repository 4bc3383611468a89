"""Aggregators for pairs, which form R_ij = (row_i[j] + row_j[i]) / 2.

An aggregator decides who reads the rows, who reads R, and who computes the function of R that the
server asked for. Such a function has a name (`PairFunctions`), so that a party other than the
server finds the same one from the configuration.

Its parameters are those of the configuration, and it is no closure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.messages import Call
from securecluster.runtime.aggregators import Exchange
from securecluster.runtime.port import Connected, KeyMessages, Keys, Lists, Port

# makes a function's value of the clusters' labels alone
LabelledValue = Callable[[list[int]], Any]
# name of the function that returns R itself
IDENTITY = ""


class PairFunction(Protocol):
    """Interface of functions of R, whose parameters are those of the configuration."""

    def __call__(self, relevance: torch.Tensor, config: Mapping[str, Any], /) -> Any:
        """Return what is told of R.

        Args:
            relevance: R over the clients that replied, (r, r).
            config: what clients and server agreed on.
        """
        ...


class PairFunctions:
    """Functions of R by name, with their parameters from the configuration.

    Args:
        functions: by name; `IDENTITY` need not be among them.
        config: what clients and server agreed on.
    """

    def __init__(
        self,
        functions: Mapping[str, PairFunction] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._functions = dict(functions or {})
        self._config = dict(config or {})

    def check(self, name: str) -> None:
        """Raise UsageError for a name without a function.

        Args:
            name: name of the function.
        """
        if name != IDENTITY and name not in self._functions:
            names = ", ".join(self._functions) or "none"
            raise UsageError(
                f"pairs knows no function {name!r} of R: declare it in the functions of its "
                f"PairOptions (declared: {names})"
            )

    def apply(self, name: str, relevance: torch.Tensor) -> Any:
        """Return a function's result.

        Args:
            name: name of the function.
            relevance: R (r, r).

        Raises:
            UsageError: no function has this name.
        """
        self.check(name)
        # R itself is a declared function, too: a caller always says what it wants.
        if name == IDENTITY:
            return relevance
        # The configuration is agreed on, so every party computes the same.
        return self._functions[name](relevance, self._config)


@dataclass(frozen=True, eq=False)
class PairTotal:
    """Result of an aggregator for pairs.

    Args:
        ids: clients whose rows are in R, r of them, in the order of the call.
        value: the result of the function of R.
        relevance: R (r, r) where the server reads it; None where another party does.
    """

    ids: tuple[int, ...]
    value: Any
    relevance: torch.Tensor | None


class PairAggregator(Protocol):
    """Interface of aggregators for pairs.

    Attributes:
        name: name of the aggregator.
        server_reads_rows: True if the server can read single rows.
        needs_seed: True if clients need the seed that they agree on for masks.
    """

    name: str
    server_reads_rows: bool
    needs_seed: bool

    @property
    def keys(self) -> Keys | None:
        """Return its exchange of keys; None without any."""
        ...

    def connect(self, port: Port) -> None:
        """Take the channel's port.

        Args:
            port: sends the messages of the aggregator itself.
        """
        ...

    def check(self, then: str) -> None:
        """Raise UsageError for a function of R that the aggregator does not have.

        It comes before anything is sent.

        Args:
            then: name of the function of R.
        """
        ...

    def ready(self, clients: Sequence[int], lists: Lists) -> list[int]:
        """Return the clients that can take part now, after an exchange where one is needed.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of the sums, by the clients that can take part.
        """
        ...

    def beside(self, clients: Sequence[int], lists: Lists) -> KeyMessages:
        """Yield what of an exchange of keys may go out beside another one.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of the sums, by the clients that can take part.
        """
        ...

    def run(self, exchange: Exchange, call: Call, columns: Sequence[int], then: str) -> PairTotal:
        """Call every client for its row, and compute a function of R.

        Args:
            exchange: sends a call, again to clients that do not reply, and returns the replies.
            call: the call to the clients that are ready.
            columns: the clients that a row has numbers of, in their order; the recipients of the
                call are among them.
            then: name of the function of R.

        Raises:
            UsageError: fewer than two clients replied.
            FrameError: rows of another length.
        """
        ...


class PlainPairs(Connected):
    """Aggregator for pairs whose server reads every row. It protects nothing.

    Args:
        functions: functions of R; by default R itself is all that can be asked for.
    """

    name = "plain"
    server_reads_rows = True

    def __init__(self, functions: PairFunctions | None = None) -> None:
        self._functions = functions or PairFunctions()

    def check(self, then: str) -> None:
        """Raise UsageError for a function of R that is not declared.

        Args:
            then: name of the function of R.
        """
        self._functions.check(then)

    def run(self, exchange: Exchange, call: Call, columns: Sequence[int], then: str) -> PairTotal:
        """Read the rows, and compute a function of R.

        Args:
            exchange: sends a call and returns the replies that arrive.
            call: the call to the clients.
            columns: the clients that a row has numbers of, in their order.
            then: name of the function of R.

        Raises:
            UsageError: fewer than two clients replied.
            FrameError: rows of another length.
        """
        response = exchange(call)
        check_replies(response.ids)
        rows = only_field(response.reply).values
        check_rows(rows, len(response.ids), len(columns))
        # Columns of clients that did not reply have no row to be averaged with.
        square = rows[:, positions(columns, response.ids)]
        # Both ends of a pair measured it: neither of them decides alone.
        relevance = (square + square.T) / 2
        return PairTotal(response.ids, self._functions.apply(then, relevance), relevance)


def check_replies(ids: Sequence[int]) -> None:
    """Raise UsageError unless two clients or more replied.

    Args:
        ids: the clients that replied.
    """
    # One client has no pair, and its own number would be all that is told.
    if len(ids) < 2:
        raise UsageError(f"pairs needs at least two replies, {len(ids)} came: try again")


def only_field(reply: Any) -> Any:
    """Return the one field of a reply of rows.

    Args:
        reply: the replies.
    """
    (field,) = vars(reply).values()
    return field


def check_rows(rows: torch.Tensor, clients: int, columns: int) -> None:
    """Raise FrameError unless each client sent a row of one number per column.

    Args:
        rows: the rows.
        clients: number of clients that replied.
        columns: number of columns.
    """
    if rows.shape != (clients, columns):
        row_shape = tuple(rows.shape[1:])
        raise FrameError(f"pairs needs a row of {columns} numbers per client, {row_shape} came")


def positions(columns: Sequence[int], ids: Sequence[int]) -> list[int]:
    """Return the columns of some clients, so that those of clients that did not reply are dropped.

    Args:
        columns: clients in the order of the columns.
        ids: clients that replied.
    """
    column_of = {client: column for column, client in enumerate(columns)}
    return [column_of[client] for client in ids]
