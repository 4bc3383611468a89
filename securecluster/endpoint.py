"""The client's side of a call: what may be asked of a client, and how its answer may leave.

A client method is a remote call by its own name. It declares with `@answers` through which verbs its answer may be read; the endpoint
refuses everything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from securecluster import wire
from securecluster.bounds import Limits, check, out_of_range
from securecluster.errors import FrameError, PolicyError, SecureClusterError, UnforeseenError
from securecluster.messages import Answer, Call, Header, Rows, reply_header
from securecluster.privacy.keys import Box, Boxes, Done, Hello, KeyRing, Peers, PublicKey
from securecluster.privacy.stages import Pipeline

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

GATHER, SUM, PAIRS = "gather", "sum", "pairs"
_SENDER = re.compile(r"server|lps/\d{1,9}")
MINIMUM = 2  # the fewest members of a sum of answers that may leave in sums only
KEY_METHODS = {"key_offer": (Hello, PublicKey), "key_seal": (Peers, Boxes), "key_open": (Box, Done)}


@dataclass(frozen=True)
class Release:
    """How a method's answer may leave its client.

    Args:
        via: the verbs it may be read through.
        through: the fields of the answer that go through the client's pipeline.
        sealed: the fields that only other clients may read: sealed, where the run seals, instead of going through the pipeline.
        private: whether the answer depends on the client's data (then the ledger hears of it).
        fresh: whether the client keeps none of the tensors in `through`, so that they are masked where they lie.
        derived: whether the answer depends on data only through what was released before, such as the averages a client was sent: it is
            masked like any other, and neither clipped nor noised again.
        trains: whether the client trains to answer: "usual" as it always does, "full" by one step over all its samples.
    """

    via: tuple[str, ...]
    through: tuple[str, ...] = ()
    private: bool = True
    fresh: bool = False
    sealed: tuple[str, ...] = ()
    derived: bool = False
    trains: str = ""


def answers(*via: str, **declared: Any) -> Callable[[F], F]:
    """Declare a client method callable by the server, and how its answer may leave: the fields of `Release`."""

    def mark(method: F) -> F:
        method.__release__ = Release(via, **declared)  # type: ignore[attr-defined]
        return method

    return mark


def release_of(method: Callable[..., Any]) -> Release:
    """A method's declaration."""
    found = getattr(method, "__release__", None)
    if not isinstance(found, Release):
        raise PolicyError(f"{getattr(method, '__name__', method)} is not a remote method: declare it with @answers")
    return found


def message_types(client: type, method: str) -> tuple[type, type]:
    """(query class, reply class) of a remote method."""
    if method in KEY_METHODS:
        return KEY_METHODS[method]
    target = getattr(client, method, None)
    if target is None or not hasattr(target, "__release__"):
        raise FrameError(f"{method!r} is not a method this client answers: both sides must run the same protocol")
    hints = get_type_hints(target)
    return hints["query"], hints["return"]


@dataclass(frozen=True)
class Turn:
    """Who is asked, and when: `ids` are client numbers, `at` their positions at this endpoint."""

    ids: tuple[int, ...]
    at: tuple[int, ...]
    round: int
    step: int


def config_hash(config: Mapping[str, Any]) -> str:
    """The 128-bit fingerprint of a configuration that client and server must share."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]


class Endpoint(Generic[C]):
    """A client runtime: answers calls for one or more clients, and refuses what its own policy forbids.

    Args:
        client: the protocol's client object, over the clients `ids`.
        minimum: the fewest members of a sum that a method which may only leave in sums takes part in.
        limits: what the configuration lets requests hold; without it they are held to nothing but their own types.
    """

    def __init__(
        self,
        client: C,
        ids: Sequence[int],
        config: str,
        pipeline: Pipeline,
        keys: KeyRing,
        minimum: int = MINIMUM,
        limits: Limits | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.client, self.ids, self.keys, self.minimum = client, tuple(ids), keys, minimum
        self._config, self._pipeline = config, pipeline
        self._place = {i: k for k, i in enumerate(self.ids)}

    def answer(self, call: Call) -> Answer:
        """One batched pass over the clients that are asked.

        Raises:
            FrameError: another configuration, a client that is not here, or an unknown method.
            PolicyError: a verb the method did not allow, or a sum over too few members.
        """
        if call.config != self._config:
            raise FrameError(
                f"the server runs another configuration ({call.config[:8]}… against {self._config[:8]}…): start both from the same one"
            )
        strangers = [i for i in call.to if i not in self._place]
        if strangers:
            raise FrameError(f"frames for clients {strangers[:3]} reached another client: check the addresses")
        self._check_counts(call)
        check(call.query, self.limits)
        return Answer(call.to, self._reply(call))

    def _check_counts(self, call: Call) -> None:
        """Raise FrameError for a round, step or group that the configuration does not allow."""
        counts = {"round": [call.round], "step": [call.step], "members": call.members}
        most = {"round": "rounds", "step": "steps", "members": "clients"}
        for name, values in counts.items():
            largest = self.limits.size(most[name])
            for value in values:
                if value < 0 or (largest is not None and value > largest):
                    raise out_of_range(f"the {name} of a frame", value, 0, largest)

    def _reply(self, call: Call) -> Any:
        if call.method in KEY_METHODS and call.verb != GATHER:
            raise PolicyError(f"{call.method} may leave its client through {GATHER}, not {call.verb}: the request is refused")
        if call.method == "key_offer":
            return self.keys.offer(call.to)
        if call.method == "key_seal":
            return self.keys.seal(call.to[0], call.query)
        if call.method == "key_open":
            return self.keys.open(call.to, call.query, call.step)
        message_types(type(self.client), call.method)
        method = getattr(self.client, call.method)
        release = release_of(method)
        if call.verb not in release.via:
            raise PolicyError(
                f"{call.method} may leave its client through {' or '.join(release.via)}, not {call.verb}: the request is refused"
            )
        if GATHER not in release.via and call.verb == SUM and min(call.members) < self.minimum:
            raise PolicyError(
                f"a sum over {min(call.members)} client(s) would show a single {call.method} answer: clients ask for {self.minimum} or more"
            )
        self.keys.use(call.to)
        turn = Turn(call.to, tuple(self._place[i] for i in call.to), call.round, call.step)
        reply = method(turn, call.query)
        changes: dict[str, Rows] = {}
        for name in release.through:
            rows, pipeline = getattr(reply, name).values, self._pipeline.of(name)
            closes = name in release.sealed and self._pipeline.seal
            if pipeline.shares > min(call.members) and not release.derived:
                raise PolicyError(
                    f"{call.method} leaves with noise in {pipeline.shares} shares, and a sum over {min(call.members)} would lack some of it"
                )
            pipeline = pipeline.veil if release.derived else pipeline.shield if closes else pipeline
            rows = pipeline.forward(rows, call.step, release.fresh, call.to, name)
            if closes and self._pipeline.seal:
                rows = self._pipeline.seal.close(rows, call.to, call.step, call.method, name)
            changes[name] = Rows(rows)
        return dataclasses.replace(reply, **changes)

    def answer_frame(self, data: bytes) -> bytes:
        """Answer one real frame, as a node with one client does."""
        header = wire.peek(data)
        if not _SENDER.fullmatch(header.sender) or header.recipient not in {f"client/{i}" for i in self.ids}:
            raise FrameError(f"a frame from {header.sender[:40]} to {header.recipient[:40]} reached another client: check the addresses")
        query: Any
        _, query = wire.decode(data, message_types(type(self.client), header.method)[0])
        try:
            answer = self.answer(_call_of(header, query))
        except SecureClusterError:
            raise
        except Exception as error:  # nothing that a server sends may bring a node down
            raise UnforeseenError(
                f"a {header.method} frame could not be answered ({type(error).__name__}): it is refused, and this is worth reporting"
            ) from error
        return wire.encode(reply_header(header), answer.reply)


def _call_of(header: Header, query: Any) -> Call:
    to = (int(header.recipient.partition("/")[2]),)
    return Call(header.config, header.method, header.verb, header.round, header.step, to, query, (header.members,))
