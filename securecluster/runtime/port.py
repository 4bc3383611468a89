"""What parts of the server's channel share: how they send messages beside the protocol's calls.

Keys of masks, of pads and of an encryption are exchanged in three ways that look the same from
outside: `ready` returns the clients that have the keys, after an exchange where one is needed.

Over a network each message takes a round trip, so two exchanges that do not wait for each other go
out together (`Port.together`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from securecluster.messaging.messages import Call, Response
from securecluster.runtime.channel_state import ChannelState

# calls of a party that does not reply
TRIES = 5


class Send(Protocol):
    """Interface of the function that sends a message of a part of the channel."""

    def __call__(
        self,
        method: str,
        to: Sequence[int],
        query: Any,
        step: int = 0,
        call: Call | None = None,
        group: Sequence[str] = (),
        members: Sequence[int] = (),
    ) -> Response:
        """Send a message to some parties, and return their replies.

        Args:
            method: name of the method.
            to: ids of the recipients.
            query: message with one frame per recipient.
            step: number of the message, where it belongs to no call.
            call: the call that it belongs to, whose numbers it has.
            group: members of each recipient's sum, as text.
            members: their numbers; one for each recipient by default.
        """
        ...


@dataclass(frozen=True)
class KeyMessage:
    """A message of an exchange of keys.

    Args:
        method: name of the method.
        to: ids of the recipients.
        query: message with one frame per recipient.
        step: number of the message.
        from_server: False for a message from whoever calls the clients.
    """

    method: str
    to: Sequence[int]
    query: Any
    step: int
    from_server: bool


# members of each of a call's sums, by the clients that can take part in it
Lists = Callable[[Sequence[int]], Sequence[Sequence[int]]]
# yields its messages one after another, and takes the response to each
KeyMessages = Generator[KeyMessage, Response, None]


@dataclass(frozen=True)
class Port:
    """By which a part of the channel sends its messages, and keeps its keys.

    Args:
        to_clients: sends a message to clients, from whoever calls them.
        from_server: sends a message to clients from the server, also where local parameter servers
            call them.
        to_authority: sends a message to the key authority, whose number is 0.
        all_to_clients: sends several messages at once, and returns the response to each.
        state: returns the state of the channel, which a resumed run replaces.
        refuse: notes that replies are of no use: the error that they caused, and the clients that
            are to blame, where these are known. It raises the error where that ends the run.
    """

    to_clients: Send
    from_server: Send
    to_authority: Send
    all_to_clients: Callable[[Sequence[KeyMessage]], list[Response]]
    state: Callable[[], ChannelState]
    refuse: Callable[[Exception, Sequence[int]], None]

    def together(self, *exchanges: KeyMessages) -> None:
        """Carry out exchanges, of which the first messages go out together, then the second ones.

        Args:
            exchanges: none of which waits for another.
        """
        due: list[tuple[KeyMessages, KeyMessage]] = []
        for exchange in exchanges:
            with suppress(StopIteration):
                due.append((exchange, next(exchange)))
        while due:
            responses = self.all_to_clients([message for _, message in due])
            answered = zip(due, responses, strict=True)
            due = []
            for (exchange, _), response in answered:
                with suppress(StopIteration):
                    due.append((exchange, exchange.send(response)))


class Keys(Protocol):
    """Interface of exchanges of keys."""

    def connect(self, port: Port) -> None:
        """Take the channel's port.

        Args:
            port: sends the messages of the exchange.
        """
        ...

    def ready(self, clients: Sequence[int], lists: Lists) -> list[int]:
        """Return the clients that have the keys, after an exchange where one is needed.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of its sums, by the clients that can take part.
        """
        ...

    def beside(self, clients: Sequence[int], lists: Lists) -> KeyMessages:
        """Return as much of the exchange as may go out beside another one; `ready` does the rest.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of its sums, by the clients that can take part.
        """
        ...


class Connected:
    """Part of a channel that may exchange keys before its calls.

    Attributes:
        keys: the exchange; None without any.
        needs_seed: True if clients need the seed that they agree on for masks.
    """

    keys: Keys | None = None
    needs_seed = False

    def connect(self, port: Port) -> None:
        """Take the channel's port.

        Args:
            port: sends the messages of the part itself.
        """
        if self.keys is not None:
            self.keys.connect(port)

    def ready(self, clients: Sequence[int], lists: Lists) -> list[int]:
        """Return the clients that can take part now, after an exchange of keys where needed.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of its sums, by the clients that can take part.
        """
        if self.keys is None:
            return list(clients)
        return self.keys.ready(clients, lists)

    def beside(self, clients: Sequence[int], lists: Lists) -> KeyMessages:
        """Yield what of an exchange of keys may go out beside another one.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of its sums, by the clients that can take part.
        """
        if self.keys is not None:
            yield from self.keys.beside(clients, lists)
