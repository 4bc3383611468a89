"""How calls reach clients: in one process as a batch, as real frames, recorded, or replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, ReplayError
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Response, reply_header, stack
from securecluster.messaging.transcript import Transcript


class Transport(Protocol):
    """One method; clients missing from the answer dropped out."""

    def exchange(self, call: Call) -> Response:
        """Send the call's frames and collect the replies that come."""
        ...

    def relay(self, call: Call, answer: Response) -> None:
        """Frames between the servers, which all run here: there is nothing to send."""
        ...


class InProcess:
    """All clients in this process: one call is one batched pass, nothing is encoded.

    `lost` names the clients that do not reply to a call, as a network would lose them.
    """

    def __init__(
        self,
        answer: Callable[[Call], Response],
        lost: Callable[[Call], set[int]] = lambda call: set(),
    ) -> None:
        self._answer = answer
        self._lost = lost

    def exchange(self, call: Call) -> Response:
        """One batched pass over the clients that are not lost."""
        gone = self._lost(call)
        alive = [k for k, i in enumerate(call.to) if i not in gone]
        return self._answer(call.select(alive)) if alive else Response((), None)

    def relay(self, call: Call, answer: Response) -> None:
        """Nothing to send."""


def random_dropouts(rate: float, randomness: Randomness) -> Callable[[Call], set[int]]:
    """Each client misses each call with probability `rate`, drawn from (client, method, step), and
    anew when it is asked again.
    """
    # the step at which a client was last asked, and how often
    last: dict[tuple[int, str], tuple[int, int]] = {}

    def misses(i: int, call: Call) -> bool:
        step, times = last.get((i, call.method), (call.step, 0))
        times = times if step == call.step else 0
        last[i, call.method] = (call.step, times + 1)
        again = (times,) if times else ()
        return bool(
            randomness.generator("client", i, "dropout", call.method, call.step, *again).random()
            < rate
        )

    def lost(call: Call) -> set[int]:
        return {i for i in call.to if misses(i, call)}

    return lost if rate > 0 else lambda call: set()


class Framed:
    """Each client behind its own function from request bytes to reply bytes: what a network
    transport does, over a local call.

    `replies` gives the reply class of a method name. A client that raises `ConnectionError` has
    dropped out.
    """

    def __init__(
        self, clients: Mapping[int, Callable[[bytes], bytes]], replies: Callable[[str], type]
    ) -> None:
        self._clients = clients
        self._replies = replies

    def exchange(self, call: Call) -> Response:
        """Encode, send, decode and stack."""
        ids: list[int] = []
        replies: list[Any] = []
        for k, i in enumerate(call.to):
            request = call.header(k)
            try:
                frame = self._clients[i](wire.encode(request, call.query, k))
            except ConnectionError:
                continue
            reply: Any
            header, reply = wire.decode(frame, self._replies(call.method))
            if header != reply_header(request):
                raise FrameError(
                    f"client {i} answered another request than {call.method} of round "
                    f"{call.round}: its frame is refused"
                )
            ids.append(i)
            replies.append(reply)
        return Response(tuple(ids), stack(replies) if replies else None)

    def relay(self, call: Call, answer: Response) -> None:
        """Nothing to send."""


class Recorded:
    """Writes every call and its answer to a transcript, with the byte length of each frame."""

    def __init__(self, inner: Transport, transcript: Transcript) -> None:
        self._inner = inner
        self._transcript = transcript

    def exchange(self, call: Call) -> Response:
        """Pass on and write down."""
        answer = self._inner.exchange(call)
        self._transcript.record(call, answer)
        return answer

    def relay(self, call: Call, answer: Response) -> None:
        """Pass on and write down."""
        self._inner.relay(call, answer)
        self._transcript.record(call, answer)


class Replay:
    """Answers from a transcript, with no client anywhere; a request that differs from the recorded
    one by a bit is refused.
    """

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._at = 0

    def exchange(self, call: Call) -> Response:
        """The recorded answer, if the request is the recorded one."""
        if self._at >= len(self._transcript.entries):
            raise ReplayError(
                f"the server asks for {call.method} (step {call.step}) after the recorded run had "
                "ended"
            )
        recorded, answer = self._transcript.content(self._at)
        self._at += 1
        same = call.to == recorded.to and all(
            _same(call, call.query, recorded, recorded.query, k) for k in range(len(call.to))
        )
        if not same:
            raise ReplayError(
                f"the server's request {call.method} (step {call.step}) differs from the recorded "
                f"{recorded.method}"
            )
        return answer

    def relay(self, call: Call, answer: Response) -> None:
        """Frames between servers are made again: both ways they must be the recorded ones."""
        recorded = self.exchange(call)
        if not all(_same(call, answer.reply, call, recorded.reply, k) for k in range(len(call.to))):
            raise ReplayError(
                f"the server's reply to {call.method} (step {call.step}) differs from the recorded "
                "one"
            )

    def finish(self) -> None:
        """Raise unless every recorded call was asked for again."""
        if self._at != len(self._transcript.entries):
            raise ReplayError(
                f"the server ended after {self._at} of {len(self._transcript.entries)} recorded "
                "calls"
            )


def _same(call: Call, message: Any, other: Call, known: Any, k: int) -> bool:
    return wire.encode(call.header(k), message, k) == wire.encode(other.header(k), known, k)
