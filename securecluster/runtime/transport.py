"""Transports, which deliver calls: in one process as a batch, as frames, recorded, or replayed.

A client is a batch of one: `InProcess` answers a call in one batched pass over all clients, and
`Framed` runs the same methods client by client, through real bytes.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from securecluster.core.client_names import stream_of
from securecluster.core.randomness import Part, Randomness
from securecluster.errors import (
    FrameError,
    RefusedError,
    ReplayError,
    SecureClusterWarning,
    UpdateError,
)
from securecluster.messaging import wire
from securecluster.messaging.chunks import in_chunks
from securecluster.messaging.messages import (
    AUTHORITY_CALL,
    Call,
    Header,
    Picks,
    Response,
    Rows,
    Shared,
    reply_header,
    stack,
)
from securecluster.messaging.receipts import Receipts
from securecluster.messaging.refusals import BUDGET, FRAME, WITHOUT_RELEASE, code_of, refused

if TYPE_CHECKING:
    from securecluster.messaging.transcript import Transcript


class Transport(Protocol):
    """Interface of transports; clients without a reply in the response dropped out."""

    def exchange(self, call: Call) -> Response:
        """Send a call's frames and collect the replies that arrive.

        Args:
            call: requests to clients.
        """
        ...

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        """Send several calls one after another, and collect their replies.

        A network sends all of them at once.

        Args:
            calls: requests to clients, none of which waits for another's replies.
        """
        return [self.exchange(call) for call in calls]

    def begin(self, call: Call) -> Callable[[], Response]:
        """Return a function that brings the replies to a call, beside which others go out.

        A network sends the call at once. In one process clients answer when the function is called.

        Args:
            call: requests to clients.
        """
        return lambda: self.exchange(call)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Send a call's frames, and yield the replies in parts, for sums over many clients.

        A network asks all clients at once. In one process `chunks.in_chunks` asks as many as
        memory allows, and goes on when their replies are in the sum.

        Args:
            call: requests to clients.
            chunk: clients of a part, where parts are asked one after another; None takes as many
                as memory allows.

        Yields:
            (part of the call, its response), in the order of the call.
        """
        ...

    def relay(self, call: Call, answer: Response) -> None:
        """Carry frames between servers.

        All servers run in this process, so there is nothing to send; transports may record or
        compare the frames.

        Args:
            call: frames of local parameter servers.
            answer: the server's replies to them.
        """
        ...

    def tolerate(self, error: Exception) -> None:
        """Raise the error of a reply that was read and is of no use, or let the run go on.

        Here it raises, since in a simulation one user is both sides.

        Args:
            error: that the reply caused.
        """
        raise error

    def give_up(self, error: Exception) -> None:
        """End a run that nobody takes part in, since all its clients refuse for one reason.

        Args:
            error: that names the reason.
        """
        raise error


class InProcess(Transport):
    """Transport to clients in this process: a call is one batched pass, and nothing is encoded.

    Args:
        answer: the endpoint's function from a call to its response.
        lost: returns the clients that do not reply to a call, as a network would lose them.
        chunk: clients of a part of a sum; None takes as many as memory allows.
    """

    def __init__(
        self,
        answer: Callable[[Call], Response],
        lost: Callable[[Call], set[int]] = lambda call: set(),
        chunk: int | None = None,
    ) -> None:
        self._answer = answer
        self._lost = lost
        self._chunk = chunk

    def exchange(self, call: Call) -> Response:
        """Answer a call in one batched pass over the clients that are not lost.

        Args:
            call: requests to clients.
        """
        lost = self._lost(call)
        reached = [k for k, client in enumerate(call.to) if client not in lost]
        if not reached:  # endpoints expect one recipient or more
            return Response((), None)
        return self._answer(call.select(reached))

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Answer a call chunk by chunk.

        Args:
            call: requests to clients.
            chunk: clients of a part; None takes as many as memory allows.
        """
        return in_chunks(self.exchange, call, self._chunk or chunk)

    def relay(self, call: Call, answer: Response) -> None:
        """Do nothing, since all servers are in this process."""


def random_dropouts(
    rate: float, randomness: Randomness, names: Sequence[str] = ()
) -> Callable[[Call], set[int]]:
    """Return a function that draws which clients miss a call, for `InProcess`.

    Each client misses each call with probability `rate`, drawn from (client, method, step), and
    drawn again if the same call is sent again.

    Args:
        rate: probability in [0, 1).
        randomness: the run's random streams.
        names: of the run's clients; empty where they have none but their numbers.
    """
    if rate <= 0:
        return lambda call: set()
    streams = [stream_of(name) for name in names]
    # step and number of repetitions of the last request, by client and method
    last_requests: dict[tuple[int, str], tuple[int, int]] = {}

    def misses(client: int, call: Call) -> bool:
        key = (client, call.method)
        step, repetitions = last_requests.get(key, (call.step, 0))
        if step != call.step:
            repetitions = 0
        last_requests[key] = (call.step, repetitions + 1)
        stream = streams[client] if streams else client
        path: list[Part] = ["client", stream, "dropout", call.method, call.step]
        if repetitions:  # a first request has no count, so that its draw depends on the call alone
            path.append(repetitions)
        uniform = randomness.generator(*path).random()
        return bool(uniform < rate)

    def lost(call: Call) -> set[int]:
        return {client for client in call.to if misses(client, call)}

    return lost


class Framed(Transport):
    """Transport to clients behind functions from request bytes to reply bytes.

    It does what a network transport does, over local calls.

    Args:
        clients: each client's function, by client id. One that raises `ConnectionError` has
            dropped out.
        replies: returns the reply class of a method name.
        strict: whether a client that refuses, or sends a frame that is no reply, ends the run, as
            suits simulations. Otherwise the run goes on without it, and says so.
        check: raises FrameError or UpdateError for a reply that the run does not allow, so that it
            is refused here, client by client; the server's channel would end the run.
    """

    def __init__(
        self,
        clients: Mapping[int, Callable[[bytes], bytes]],
        replies: Callable[[str], type],
        strict: bool = True,
        check: Callable[[Call, int, Any], None] = lambda call, client, reply: None,
    ) -> None:
        self._clients = clients
        self._replies = replies
        self._strict = strict
        self._check = check

    def exchange(self, call: Call) -> Response:
        """Encode a call, send each client its frame, and decode and stack the replies.

        Args:
            call: requests to clients.

        Raises:
            FrameError: where the transport is strict: a client's frame does not parse, or replies
                to another request.
            RefusedError: where the transport is strict: a client refuses, for another reason than
                its budget.
        """
        return self.read(call, self.carried(call, self.frames_of(call)), call.to)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Send a call to one chunk of its clients after another.

        Args:
            call: requests to clients.
            chunk: clients of a part; None takes as many as memory allows.
        """
        return in_chunks(self.exchange, call, chunk)

    def frames_of(self, call: Call) -> Iterator[tuple[int, bytes]]:
        """Yield the request of each client.

        Args:
            call: requests to clients.

        Yields:
            (client, bytes of its request).
        """
        for position, client in enumerate(call.to):
            header = call.header(position)
            if deadline := self.deadline_of(client):
                header = replace(header, deadline=deadline)
            yield client, wire.encode(header, call.query, position)

    def deadline_of(self, client: int) -> int:
        """Return by when a client is to answer, as a header has it; here without a deadline.

        Args:
            client: its number.
        """
        return 0

    def read(
        self, call: Call, answers: Iterable[tuple[int, bytes]], recipients: Collection[int]
    ) -> Response:
        """Decode and stack what clients answered.

        Args:
            call: requests to clients.
            answers: (client, bytes of its answer) of clients that did not drop out.
            recipients: clients of the call that the request was sent to.

        Raises:
            FrameError: as `exchange`.
            RefusedError: as `exchange`.
        """
        requests = {client: call.header(position) for position, client in enumerate(call.to)}
        replies: dict[int, Any] = {}
        receipts: dict[int, Receipts] = {}
        refusals: dict[int, str] = {}
        without_release = set(call.to).difference(recipients)
        for client, frame in answers:
            try:
                reply, receipts[client] = self._reply(client, requests[client], frame)
                self._check(call, client, reply)
            except (RefusedError, FrameError, UpdateError) as error:
                refusals[client] = self._code_of(error)
                if _is_refusal_of(requests[client], frame, error):
                    without_release.add(client)
            else:
                replies[client] = reply
        if not self._strict:
            for client in _of_another_form(replies):
                del replies[client]
                refusals[client] = FRAME
                text = f"client {client} sent a reply of another form than most clients did"
                warnings.warn(text, SecureClusterWarning, stacklevel=2)
        spared = tuple(sorted(without_release))
        response = Response((), None, refused=refusals, without_release=spared)
        if not replies:
            return response
        written = tuple(receipts[client] for client in replies)
        stacked = stack(list(replies.values()))
        return replace(response, ids=tuple(replies), reply=stacked, receipts=written)

    def _code_of(self, error: Exception) -> str:
        """Return the code of a reply that is of no use, with a warning; raise it where strict."""
        code = error.code if isinstance(error, RefusedError) else code_of(error)
        # A client that has spent its budget takes part no more, as one that is gone.
        if self._strict and code != BUDGET:
            raise error
        warnings.warn(str(error), SecureClusterWarning, stacklevel=3)
        return code

    def carried(
        self, call: Call, frames: Iterable[tuple[int, bytes]]
    ) -> Iterable[tuple[int, bytes]]:
        """Return what clients answer to their frames, in the order of the call.

        Args:
            call: that the frames are of.
            frames: (client, bytes of the request), made as they are taken.

        Returns:
            (client, bytes of its answer) of each client that did not drop out.
        """
        for client, data in frames:
            answer_frame = self._clients[client]
            # A client that drops out is a gap in the replies, and not an error.
            with suppress(ConnectionError):
                yield client, answer_frame(data)

    def _reply(self, client: int, request: Header, frame: bytes) -> tuple[Any, Receipts]:
        """Return a client's reply and what it released in it.

        Raises:
            FrameError: the frame does not parse, or replies to another request.
            RefusedError: the client refuses.
        """
        # Known before the bytes arrive: a client cannot choose how it is parsed.
        reply_type = self._replies(request.method)
        reply: Any
        try:
            header, reply, written = wire.decode_reply(frame, reply_type)
        except RefusedError as error:
            # The sentence is about this request, whatever else the frame names.
            raise refused(reply_header(request), error.code) from None
        # A reply to an earlier request would be of other weights and under another mask.
        if header != reply_header(request):
            raise FrameError(
                f"client {client} answered another request than {request.method} of round "
                f"{request.round}: its frame is refused"
            )
        return reply, written

    def relay(self, call: Call, answer: Response) -> None:
        """Do nothing, since all servers are in this process."""

    def tolerate(self, error: Exception) -> None:
        """Warn of a reply that is of no use, or raise where the transport is strict.

        Args:
            error: that the reply caused.
        """
        if self._strict:
            raise error
        warnings.warn(str(error), SecureClusterWarning, stacklevel=2)


def _is_refusal_of(request: Header, frame: bytes, error: Exception) -> bool:
    """Return whether a client refused this request, and not an earlier one, before any release."""
    if not isinstance(error, RefusedError) or error.code not in WITHOUT_RELEASE:
        return False
    return wire.peek(frame) == reply_header(request)


def _of_another_form(replies: Mapping[int, Any]) -> list[int]:
    """Return the clients whose reply cannot be stacked with those of most clients.

    Args:
        replies: a reply by client.
    """
    forms = {client: _form(reply) for client, reply in replies.items()}
    if len(set(forms.values())) < 2:
        return []
    ((usual, _),) = Counter(forms.values()).most_common(1)
    return [client for client, form in forms.items() if form != usual]


def _form(reply: Any) -> tuple[Any, ...]:
    """Return what must be equal in replies that are stacked: shapes, types and shared values."""
    form: list[Any] = [type(reply)]
    for name, value in vars(reply).items():
        form += [name, type(value)]
        if isinstance(value, (Rows, Picks)):
            table = value.table
            form += [tuple(table.shape[1:]), table.dtype]
        elif isinstance(value, Shared):
            tensor = value.value.contiguous()
            form += [tuple(tensor.shape), tensor.dtype, tensor.numpy().tobytes()]
        else:
            form.append(value)
    return tuple(form)


class WithAuthority(Transport):
    """Transport that delivers the server's calls to a key authority, and passes all others on.

    Args:
        inner: the transport that reaches clients.
        authority: the authority's function from request bytes to reply bytes. One that raises
            `ConnectionError` does not reply.
        replies: returns the reply class of a method name.
    """

    def __init__(
        self, inner: Transport, authority: Callable[[bytes], bytes], replies: Callable[[str], type]
    ) -> None:
        self._inner = inner
        # The authority is one recipient, reached by real frames as clients are.
        self._authority = Framed({0: authority}, replies)

    def exchange(self, call: Call) -> Response:
        """Deliver a call.

        Args:
            call: requests to clients, or to the key authority.
        """
        if call.verb == AUTHORITY_CALL:
            return self._authority.exchange(call)
        return self._inner.exchange(call)

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        """Pass calls to clients on.

        Args:
            calls: requests to clients, none of which waits for another's replies.
        """
        return self._inner.exchange_all(calls)

    def begin(self, call: Call) -> Callable[[], Response]:
        """Pass a call to clients on.

        Args:
            call: requests to clients.
        """
        return self._inner.begin(call)

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Pass a call to clients on.

        Args:
            call: requests to clients.
            chunk: clients of a part; None takes as many as memory allows.
        """
        return self._inner.stream(call, chunk)

    def relay(self, call: Call, answer: Response) -> None:
        """Pass frames between servers on.

        Args:
            call: frames of local parameter servers.
            answer: the server's replies to them.
        """
        self._inner.relay(call, answer)

    def tolerate(self, error: Exception) -> None:
        """Pass the error of a reply on.

        Args:
            error: that the reply caused.
        """
        self._inner.tolerate(error)

    def give_up(self, error: Exception) -> None:
        """Pass on that nobody takes part.

        Args:
            error: that names the reason.
        """
        self._inner.give_up(error)


class Recorded(Transport):
    """Transport that passes calls on and records them in a transcript, with their bytes.

    Args:
        inner: the transport that delivers the calls.
        transcript: the record.
    """

    def __init__(self, inner: Transport, transcript: Transcript) -> None:
        self._inner = inner
        self._transcript = transcript

    def exchange(self, call: Call) -> Response:
        """Pass a call on and record it.

        Args:
            call: requests to clients.
        """
        response = self._inner.exchange(call)
        self._transcript.record(call, response)
        return response

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        """Pass calls on, and record them in their order.

        Args:
            calls: requests to clients, none of which waits for another's replies.
        """
        responses = self._inner.exchange_all(calls)
        for call, response in zip(calls, responses, strict=True):
            self._transcript.record(call, response)
        return responses

    def begin(self, call: Call) -> Callable[[], Response]:
        """Pass a call on, and record it when its replies are there.

        Args:
            call: requests to clients.
        """
        finish = self._inner.begin(call)

        def finished() -> Response:
            response = finish()
            self._transcript.record(call, response)
            return response

        return finished

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Pass a call on, and record its parts as they arrive.

        Args:
            call: requests to clients.
            chunk: clients of a part; None takes as many as memory allows.
        """
        for subcall, response in self._inner.stream(call, chunk):
            self._transcript.record(subcall, response)
            yield subcall, response

    def relay(self, call: Call, answer: Response) -> None:
        """Pass frames between servers on and record them.

        Args:
            call: frames of local parameter servers.
            answer: the server's replies to them.
        """
        self._inner.relay(call, answer)
        self._transcript.record(call, answer)

    def tolerate(self, error: Exception) -> None:
        """Pass the error of a reply on; it follows from what is recorded.

        Args:
            error: that the reply caused.
        """
        self._inner.tolerate(error)

    def give_up(self, error: Exception) -> None:
        """Pass on that nobody takes part; it follows from what is recorded.

        Args:
            error: that names the reason.
        """
        self._inner.give_up(error)


class Replay(Transport):
    """Transport that answers from a transcript, without clients.

    A request that differs from the recorded one by a bit is refused: a server that used anything
    but replies would send another request sooner or later.

    Args:
        transcript: full record of a run.
    """

    def __init__(self, transcript: Transcript) -> None:
        self._transcript = transcript
        self._position = 0

    def exchange(self, call: Call) -> Response:
        """Return the recorded response to a request that equals the recorded one.

        Args:
            call: the server's request.

        Raises:
            ReplayError: the request differs from the recorded one, or the record has ended.
        """
        recorded, response = self._next(call)
        _check_same(call, recorded)
        return response

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Yield the recorded responses to the parts of a request, as the run asked them.

        Args:
            call: the server's request.
            chunk: ignored, since the record tells the parts.

        Raises:
            ReplayError: a part differs from the recorded one, or the record has ended.
        """
        first = 0
        while first < len(call.to):
            recorded, response = self._next(call)
            end = min(first + len(recorded.to), len(call.to))
            subcall = call.select(range(first, end))
            _check_same(subcall, recorded)
            yield subcall, response
            first = end

    def _next(self, call: Call) -> tuple[Call, Response]:
        """Return the next recorded call and its response.

        Raises:
            ReplayError: the record has ended.
        """
        recorded_calls = len(self._transcript.entries)
        if self._position >= recorded_calls:
            raise ReplayError(
                f"the server asks for {call.method} (step {call.step}) after the recorded run had "
                "ended"
            )
        content = self._transcript.content(self._position)
        # Also after a call that differs: a replay goes on nowhere.
        self._position += 1
        return content

    def relay(self, call: Call, answer: Response) -> None:
        """Check that frames between servers are the recorded ones, in both directions.

        Args:
            call: frames of local parameter servers.
            answer: the server's replies to them.

        Raises:
            ReplayError: a frame differs from the recorded one.
        """
        recorded = self.exchange(call)
        for position in range(len(call.to)):
            if not _same_frame(call, answer.reply, call, recorded.reply, position):
                raise ReplayError(
                    f"the server's reply to {call.method} (step {call.step}) differs from the "
                    "recorded one"
                )

    def tolerate(self, error: Exception) -> None:
        """Do nothing: where the recorded run ended here, the record ends, too.

        Args:
            error: that a reply caused.
        """

    def give_up(self, error: Exception) -> None:
        """Do nothing: a recorded run may have gone on, in an earlier version.

        Args:
            error: that names the reason.
        """

    def finish(self) -> None:
        """Raise ReplayError unless the server repeated every recorded call."""
        recorded_calls = len(self._transcript.entries)
        if self._position != recorded_calls:
            raise ReplayError(
                f"the server ended after {self._position} of {recorded_calls} recorded calls"
            )


def _check_same(call: Call, recorded: Call) -> None:
    """Raise ReplayError unless a request equals the recorded one."""
    if not _same_requests(call, recorded):
        raise ReplayError(
            f"the server's request {call.method} (step {call.step}) differs from the recorded "
            f"{recorded.method}"
        )


def _same_requests(call: Call, recorded: Call) -> bool:
    """Return True if two calls send equal frames to the same clients."""
    # The order counts: replies are in the order of the call.
    if call.to != recorded.to:
        return False
    return all(
        _same_frame(call, call.query, recorded, recorded.query, position)
        for position in range(len(call.to))
    )


def _same_frame(call: Call, message: Any, other_call: Call, other: Any, position: int) -> bool:
    """Return True if the frames of one position of two batches are equal byte for byte.

    Args:
        call: the call, for the header of the first frame.
        message: the first batch.
        other_call: the call of the second batch.
        other: the second batch.
        position: number of the frame in both batches.
    """
    frame = wire.encode(call.header(position), message, position)
    return frame == wire.encode(other_call.header(position), other, position)
