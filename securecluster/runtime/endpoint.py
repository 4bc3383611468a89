"""The client's side of a call: what may be asked of a client, and how its answer may leave.

A client method is a remote call by its own name. It declares with `@answers` through which verbs
its answer may be read; the endpoint refuses everything else.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, get_type_hints

from securecluster.core.lazy_torch import torch
from securecluster.errors import (
    FrameError,
    PolicyError,
    SecureClusterError,
    UnforeseenError,
    UsageError,
)
from securecluster.messaging import wire
from securecluster.messaging.bounds import Limits, check, out_of_range
from securecluster.messaging.messages import (
    RELAY,
    Ack,
    Batched,
    Call,
    Empty,
    Header,
    Picks,
    Response,
    Rows,
    Shared,
    kinds,
    optional,
    reply_header,
)
from securecluster.privacy.masking.key_agreement import (
    KeyRing,
    Peers,
    PublicKey,
    SealedSeed,
    SealedSeeds,
)
from securecluster.privacy.pipeline import Pipeline

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

GATHER, SUM, PAIRS = "gather", "sum", "pairs"
_SENDER = re.compile(r"server|lps/\d{1,9}")
MINIMUM = 2  # the fewest members of a sum of answers that may leave in sums only
KEY_METHODS = {
    "key_offer": (Empty, PublicKey),
    "key_seal": (Peers, SealedSeeds),
    "key_open": (SealedSeed, Ack),
}


@dataclass(frozen=True)
class Release:
    """How a method's answer may leave its client.

    Args:
        via: the verbs it may be read through.
        through: the fields of the answer that go through the client's pipeline.
        sealed: the fields that only other clients may read: sealed, where the run seals, instead of
            going through the pipeline.
        private: whether the answer depends on the client's data (then the ledger hears of it).
        fresh: whether the client keeps none of the tensors in `through`, so that they are masked
            where they lie.
        derived: whether the answer depends on data only through what was released before, such as
            the averages a client was sent: it is masked like any other, and neither clipped nor
            noised again.
        trains: whether the client trains to answer: "usual" as it always does, "full" by one step
            over all its samples.
        unmasked: the fields of numbers that no mask covers, such as losses; every other one is in
            `through`.
    """

    via: tuple[str, ...]
    through: tuple[str, ...] = ()
    private: bool = True
    fresh: bool = False
    sealed: tuple[str, ...] = ()
    derived: bool = False
    trains: str = ""
    unmasked: tuple[str, ...] = ()


def answers(*via: str, **declared: Any) -> Callable[[F], F]:
    """Declare a client method callable by the server, and how its answer may leave: the fields of
    `Release`.

    Raises:
        UsageError: the method cannot be called by the server as it is written, or the declaration
            contradicts itself.
    """

    def mark(method: F) -> F:
        method.__release__ = _declared(method, via, declared)  # type: ignore[attr-defined]
        return method

    return mark


def _declared(
    method: Callable[..., Any], via: tuple[str, ...], declared: Mapping[str, Any]
) -> Release:
    """Return what a method declares, after a check of its signature."""
    name = method.__qualname__
    verbs = (GATHER, SUM, PAIRS, RELAY)
    if not via or any(verb not in verbs for verb in via):
        raise UsageError(
            f"@answers on {name} names the verbs of its answer: one or more of {', '.join(verbs)}"
        )
    known = [field.name for field in dataclasses.fields(Release)][1:]
    strange = sorted(set(declared) - set(known))
    if strange:
        raise UsageError(f"@answers on {name} knows no {strange[0]!r}: it takes {', '.join(known)}")
    parameters = list(inspect.signature(method).parameters)
    expected = ["query"] if via == (RELAY,) else ["context", "query"]
    if parameters[1:] != expected:
        written, wanted = ", ".join(parameters), ", ".join(["self", *expected])
        raise UsageError(
            f"the server cannot call {name}({written}): a method with @answers takes ({wanted})"
        )
    for part, what in (
        ("query", "the message class that it is asked with"),
        ("return", "the message class that it replies with"),
    ):
        if method.__annotations__.get(part) in (None, "None"):
            raise UsageError(f"{name} does not say what its {part} is: annotate it with {what}")
    release = Release(via, **declared)
    open_ = set(release.sealed) - set(release.through)
    if open_:
        raise UsageError(
            f"@answers on {name} seals {', '.join(sorted(open_))}: name it in through as well, or "
            "it leaves as it is"
        )
    return release


def release_of(method: Callable[..., Any]) -> Release:
    """A method's declaration."""
    found = getattr(method, "__release__", None)
    if not isinstance(found, Release):
        raise PolicyError(
            f"{getattr(method, '__name__', method)} is not a remote method: declare it with "
            "@answers"
        )
    return found


def message_types(client: type, method: str) -> tuple[type, type]:
    """(query class, reply class) of a remote method."""
    if method in KEY_METHODS:
        return KEY_METHODS[method]
    target = getattr(client, method, None)
    if target is None or not hasattr(target, "__release__"):
        raise FrameError(
            f"{method!r} is not a method this client answers: both sides must run the same protocol"
        )
    try:
        hints = get_type_hints(target)
    except NameError as error:
        raise UsageError(
            f"{target.__qualname__} is annotated with a class that is not there: {error}"
        ) from None
    for part in ("query", "return"):
        _check_message(target, part, hints[part])
    return hints["query"], hints["return"]


def _check_message(method: Callable[..., Any], part: str, kind: Any) -> None:
    """Raise UsageError where what a method is asked with, or replies with, is no message."""
    name = f"{method.__qualname__}'s {part}"
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise UsageError(
            f"{name} is {getattr(kind, '__name__', kind)}, no message: make it a frozen dataclass "
            "of Rows, Shared and scalars"
        )
    try:
        kinds(kind)
    except TypeError as error:
        raise UsageError(f"{name} cannot be sent: {error}") from None


def check_reply(
    method: Callable[..., Any], release: Release, reply: Any, expected: type, clients: int
) -> None:
    """Check that a reply is what its method declares, before any of it is masked.

    Args:
        expected: the message class that the method replies with.
        clients: how many were asked: a field of rows has as many.

    Raises:
        UsageError: the reply is of another class, or one of its fields is, or has another number of
            rows.
        PolicyError: numbers of the client's would leave without a mask, and the method does not say
            that they do.
    """
    name = method.__qualname__
    if not isinstance(reply, expected):
        raise UsageError(
            f"{name} replied with a {type(reply).__name__}: it declares a {expected.__name__}, so "
            "it must return one"
        )
    declared = kinds(expected)
    absent = sorted({*release.through, *release.unmasked} - set(declared))
    if absent:
        raise UsageError(
            f"@answers on {name} names {absent[0]!r}: a {expected.__name__} has "
            f"{', '.join(declared) or 'no fields'}"
        )
    for field, kind in declared.items():
        value = getattr(reply, field)
        if value is None and optional(expected, field):
            continue
        if kind in (Rows, Picks, Shared) and not isinstance(value, kind):
            found = type(value).__name__
            raise UsageError(
                f"{name} replied with a {found} as {field}: put it into {kind.__name__}(…), as "
                f"{expected.__name__} declares"
            )
        if isinstance(value, Batched) and len(value) != clients:
            raise UsageError(
                f"{name} replied with {len(value)} row(s) of {field} for {clients} client(s): each "
                "has one row of its own"
            )
        if (
            release.private
            and field not in (*release.through, *release.unmasked)
            and _is_numbers(value)
        ):
            raise PolicyError(
                f"{name} would send {field} without a mask: name it in through=, or in unmasked= "
                "where no mask is to cover it"
            )


def _is_numbers(value: Any) -> bool:
    """Return whether a field of a reply holds floating-point numbers."""
    if isinstance(value, Shared):
        return value.value.is_floating_point()
    return isinstance(value, Batched) and value.table.is_floating_point()


@dataclass(frozen=True)
class CallContext:
    """Context of a call: client ids, their positions at this endpoint, round and step."""

    ids: tuple[int, ...]
    positions: tuple[int, ...]
    round: int
    step: int


def config_hash(config: Mapping[str, Any]) -> str:
    """The 128-bit fingerprint of a configuration that client and server must share."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:32]


class Endpoint(Generic[C]):
    """A client runtime: answers calls for one or more clients, and refuses what its own policy
    forbids.

    Args:
        client: the protocol's client object, over the clients `ids`.
        minimum: the fewest members of a sum that a method which may only leave in sums takes part
            in.
        limits: what the configuration lets requests hold; without it they are held to nothing but
            their own types.
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

    def answer(self, call: Call) -> Response:
        """One batched pass over the clients that are asked.

        Raises:
            FrameError: another configuration, a client that is not here, or an unknown method.
            PolicyError: a verb the method did not allow, or a sum over too few members.
        """
        if call.config != self._config:
            raise FrameError(
                f"the server runs another configuration ({call.config[:8]}… against "
                f"{self._config[:8]}…): start both from the same one"
            )
        strangers = [i for i in call.to if i not in self._place]
        if strangers:
            raise FrameError(
                f"frames for clients {strangers[:3]} reached another client: check the addresses"
            )
        self._check_counts(call)
        check(call.query, self.limits)
        return Response(call.to, self._reply(call))

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
        """Return what the called method replies, after the release policy and the pipeline."""
        if call.method in KEY_METHODS:
            return self._key_reply(call)
        _, expected = message_types(type(self.client), call.method)
        method = getattr(self.client, call.method)
        release = release_of(method)
        self._check_release(call, release)
        self.keys.use(call.to)
        at = tuple(self._place[i] for i in call.to)
        reply = method(CallContext(call.to, at, call.round, call.step), call.query)
        check_reply(method, release, reply, expected, len(call.to))
        protected = {
            name: Rows(self._protected(call, release, name, getattr(reply, name).values))
            for name in release.through
        }
        return dataclasses.replace(reply, **protected)

    def _key_reply(self, call: Call) -> Any:
        """Return this endpoint's part in the clients' key agreement."""
        if call.verb != GATHER:
            raise PolicyError(
                f"{call.method} may leave its client through {GATHER}, not {call.verb}: the "
                "request is refused"
            )
        if call.method == "key_offer":
            return self.keys.offer(call.to)
        if call.method == "key_seal":
            return self.keys.seal(call.to[0], call.query)
        return self.keys.open(call.to, call.query, call.step)

    def _check_release(self, call: Call, release: Release) -> None:
        """Raise PolicyError for a verb that the method does not allow, or a sum over too few."""
        if call.verb not in release.via:
            raise PolicyError(
                f"{call.method} may leave its client through {' or '.join(release.via)}, not "
                f"{call.verb}: the request is refused"
            )
        sums_only = GATHER not in release.via
        if sums_only and call.verb == SUM and min(call.members) < self.minimum:
            raise PolicyError(
                f"a sum over {min(call.members)} client(s) would show a single {call.method} "
                f"answer: clients ask for {self.minimum} or more"
            )

    def _protected(
        self, call: Call, release: Release, name: str, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return a field's rows after the pipeline, and sealed where the method says so.

        Raises:
            PolicyError: the noise is in shares, and the sum has fewer members than there are.
        """
        pipeline = self._pipeline.of(name)
        if pipeline.shares > min(call.members) and not release.derived:
            raise PolicyError(
                f"{call.method} leaves with noise in {pipeline.shares} shares, and a sum over "
                f"{min(call.members)} would lack some of it"
            )
        seal = self._pipeline.seal if name in release.sealed else None
        if release.derived:  # made of earlier releases: masked, and no noise again
            pipeline = pipeline.veil
        elif seal is not None:  # noise, and no mask
            pipeline = pipeline.shield
        rows = pipeline.forward(rows, call.step, release.fresh, call.to, name)
        return rows if seal is None else seal.close(rows, call.to, call.step, call.method, name)

    def answer_frame(self, data: bytes) -> bytes:
        """Answer one real frame, as a node with one client does."""
        header = wire.peek(data)
        if not _SENDER.fullmatch(header.sender) or header.recipient not in {
            f"client/{i}" for i in self.ids
        }:
            raise FrameError(
                f"a frame from {header.sender[:40]} to {header.recipient[:40]} reached another "
                "client: check the addresses"
            )
        query: Any
        _, query = wire.decode(data, message_types(type(self.client), header.method)[0])
        try:
            answer = self.answer(_call_of(header, query))
        except SecureClusterError:
            raise
        except Exception as error:  # nothing that a server sends may bring a node down
            raise UnforeseenError(
                f"a {header.method} frame could not be answered ({type(error).__name__}): it is "
                "refused, and this is worth reporting"
            ) from error
        return wire.encode(reply_header(header), answer.reply)


def _call_of(header: Header, query: Any) -> Call:
    to = (int(header.recipient.partition("/")[2]),)
    return Call(
        header.config,
        header.method,
        header.verb,
        header.round,
        header.step,
        to,
        query,
        (header.members,),
    )
