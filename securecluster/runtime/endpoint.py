"""The client's side of a call: what may be requested of a client, and how its reply may leave.

A client method is a remote call by its own name. It declares with `@answers` through which verbs
its reply may be read; the endpoint refuses everything else.

Security rules: a private reply with floating-point numbers that neither the pipeline nor a
declaration covers is refused whatever the mask; a reply that is said not to be private has no
content but what is declared public by name, and stands as such in ledger, report and audit.
`private=False` and `derived=True` are believed here, and checked by
`protocols/conformance/privacy.py`, which sends the same requests to clients with other data.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, get_type_hints

from securecluster.core.lazy_torch import torch
from securecluster.core.validation import Between
from securecluster.errors import (
    FrameError,
    LateError,
    OwnerPolicyError,
    PolicyError,
    UnknownRunError,
    UsageError,
)
from securecluster.messaging import refusals, wire
from securecluster.messaging.bounds import Limits, check, out_of_range, sample_fields, undeclared
from securecluster.messaging.messages import (
    RELAY,
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
from securecluster.messaging.receipts import GAUSSIAN, MOST, Receipt, Receipts
from securecluster.privacy.pipeline import Pipeline
from securecluster.runtime import services
from securecluster.runtime.call_context import CallContext, Releases
from securecluster.runtime.client_half import ClientHalf, HiddenReplies
from securecluster.runtime.origins import origins_of
from securecluster.runtime.refusals import answered
from securecluster.runtime.release_policy import ReleasePolicy
from securecluster.runtime.services import KeyAgreement, Service

if TYPE_CHECKING:
    from securecluster.privacy.dp.client_noise import ClientNoise
    from securecluster.privacy.masking.key_agreement import KeyRing
    from securecluster.runtime.release_guard import ReleaseGuard, Traces

C = TypeVar("C")
F = TypeVar("F", bound=Callable[..., Any])

GATHER = services.GATHER
SUM = services.SUM
PAIRS = services.PAIRS
# parties that may call a client
_SENDER = re.compile(r"server|lps/\d{1,9}")
# members of the smallest sum that a reply takes part in if it may leave in sums only: a sum over
# one client is that client's own reply
MINIMUM = 2
# entry of a configuration whose smallest sum has more members
LEAST_MEMBERS = "least_members"
# fractions of a secure sum's members that may be lost, and that may work with the server
LOST = 0.1
COLLUDING = 0.1
KEY_METHODS = services.KEY_METHODS


def answers(*via: str, **declared: Any) -> Callable[[F], F]:
    """Declare a client method callable by the server, and how its reply may leave.

    Args:
        *via: verbs that the reply may be read through.
        **declared: the other fields of `ReleasePolicy`.

    Raises:
        UsageError: the method cannot be called by the server as it is written, or the declaration
            contradicts itself.
    """

    if via and callable(via[0]):
        method_name = getattr(via[0], "__qualname__", "a method")
        raise UsageError(f"@answers on {method_name} names no verb: write @answers(GATHER, ...)")

    def mark(method: F) -> F:
        method.__release__ = _declared(method, via, declared)  # type: ignore[attr-defined]
        return method

    return mark


def _declared(
    method: Callable[..., Any], via: tuple[str, ...], declared: Mapping[str, Any]
) -> ReleasePolicy:
    """Return what a method declares, after checks of the declaration and of its signature."""
    name = method.__qualname__
    for option in ("through", "sealed", "unmasked", "public", "relays"):
        if isinstance(declared.get(option), str):
            raise UsageError(
                f"@answers on {name} gives {option} as a text: write "
                f'{option}=("{declared[option]}",)'
            )
    _check_verbs(name, via)
    _check_options(name, declared)
    _check_signature(method, via)
    release = ReleasePolicy(via, **declared)
    if release.public and release.private:
        raise UsageError(
            f"@answers on {name} names public fields of a private reply: write private=False as "
            "well, or leave public out"
        )
    if release.public and PAIRS in via:
        raise UsageError(
            f"@answers on {name} names public fields of rows of pairs: those are of clients' data"
        )
    # A seal replaces the last stages of the pipeline, so a sealed field must pass through it.
    bypassing = set(release.sealed) - set(release.through)
    if bypassing:
        listed = ", ".join(sorted(bypassing))
        raise UsageError(
            f"@answers on {name} seals {listed}: name it in through as well, or it leaves as it is"
        )
    return release


def _check_verbs(name: str, via: tuple[str, ...]) -> None:
    """Raise UsageError unless a method names verbs, and only existing ones."""
    verbs = (GATHER, SUM, PAIRS, RELAY)
    if not via or any(verb not in verbs for verb in via):
        raise UsageError(
            f"@answers on {name} names the verbs of its answer: one or more of {', '.join(verbs)}"
        )


def _check_options(name: str, declared: Mapping[str, Any]) -> None:
    """Raise UsageError for an option of `@answers` that does not exist."""
    options = [field.name for field in dataclasses.fields(ReleasePolicy)]
    options.remove("via")  # the positional arguments
    unknown = sorted(set(declared) - set(options))
    if unknown:
        listed = ", ".join(options)
        raise UsageError(f"@answers on {name} knows no {unknown[0]!r}: it takes {listed}")


def _check_signature(method: Callable[..., Any], via: tuple[str, ...]) -> None:
    """Raise UsageError unless a method's parameters and annotations are those of a remote call."""
    name = method.__qualname__
    parameters = list(inspect.signature(method).parameters)
    expected = ["context", "query"]
    if via == (RELAY,):  # a call between servers has no clients, and so no context
        expected = ["query"]
    if parameters[1:] != expected:
        written = ", ".join(parameters)
        required = ", ".join(["self", *expected])
        raise UsageError(
            f"the server cannot call {name}({written}): a method with @answers takes ({required})"
        )
    # Annotations name the message classes, by which both sides decode the frames.
    purposes = {
        "query": "the message class that it is asked with",
        "return": "the message class that it replies with",
    }
    for annotated, purpose in purposes.items():
        if method.__annotations__.get(annotated) in (None, "None"):
            raise UsageError(
                f"{name} does not say what its {annotated} is: annotate it with {purpose}"
            )


def release_of(method: Callable[..., Any]) -> ReleasePolicy:
    """Return a method's declaration.

    Args:
        method: a client method.

    Raises:
        PolicyError: the method has none, so it is not a remote method.
    """
    release = getattr(method, "__release__", None)
    if not isinstance(release, ReleasePolicy):
        raise PolicyError(
            f"{getattr(method, '__name__', method)} is not a remote method: declare it with "
            "@answers"
        )
    return release


def releases_of(client: type) -> dict[str, ReleasePolicy]:
    """Return the declarations of a client class's remote methods, by their names.

    Args:
        client: class of the client object.
    """
    releases = {}
    for name, _ in inspect.getmembers(client):
        release = getattr(getattr(client, name, None), "__release__", None)
        if isinstance(release, ReleasePolicy):
            releases[name] = release
    return releases


def fixed_sums(client: type) -> frozenset[str]:
    """Return the methods of a client class whose rows in sums are the same in every call.

    Security rule: a method that is asked without a query counts as one of these unless it declares
    otherwise, so a forgotten declaration refuses a sum and reveals none.

    Args:
        client: class of the client object.
    """
    fixed = set()
    for name, release in releases_of(client).items():
        repeats = release.fixed
        if repeats is None:
            query, _ = message_types(client, name)
            repeats = query is Empty
        if repeats and SUM in release.via:
            fixed.add(name)
    return frozenset(fixed)


def refuse_unpriced_fields(client: type) -> None:
    """Raise UsageError for a client method whose reply has content that no ledger would record.

    Security rule: a reply that is said not to be private costs nothing, so it is empty, but for
    fields that are declared public by name.

    Args:
        client: class of the client object.
    """
    for name, release in releases_of(client).items():
        # a call between servers has no client's reply
        if release.private or release.via == (RELAY,):
            continue
        _, reply = message_types(client, name)
        unpriced = [field for field in kinds(reply) if field not in release.public]
        if unpriced:
            raise UsageError(_unpriced(f"{client.__name__}.{name}", unpriced[0]))


def refuse_unbounded_messages(client: type) -> None:
    """Raise UsageError for a client method with a message that may hold anything.

    Messages that are defined later are refused when the method is first called.

    Args:
        client: class of the client object.
    """
    for name in releases_of(client):
        try:
            get_type_hints(getattr(client, name))
        except NameError:
            continue
        message_types(client, name)


def _unpriced(name: str, field: str) -> str:
    """Return the sentence on a field of a reply that is said not to be private."""
    return (
        f"{name} would send {field} with private=False, at no cost to ε: leave private=False out "
        f'and name {field} in through= or unmasked=, or write public=("{field}",) if it is of '
        "nobody's data"
    )


def has_pairs(client: type) -> bool:
    """Return whether some reply of a client class may leave in pairs.

    Args:
        client: class of the client object.
    """
    return any(PAIRS in release.via for release in releases_of(client).values())


def message_types(client: type, method: str) -> tuple[type, type]:
    """Return the query class and the reply class of a remote method.

    Args:
        client: class of the client object.
        method: name of the method.

    Raises:
        FrameError: the client has no remote method of this name.
        UsageError: the method is annotated with something that is not a message.
    """
    target = getattr(client, method, None)
    if target is None or not hasattr(target, "__release__"):
        raise FrameError(
            f"{method!r} is not a method this client answers: both sides must run the same "
            "protocol with the same protections"
        )
    return _annotated_types(target)


@cache
def _annotated_types(method: Callable[..., Any]) -> tuple[type, type]:
    """Return the (query class, reply class) that a client method is annotated with.

    Args:
        method: with `@answers`.

    Raises:
        UsageError: an annotation names no message class.
    """
    try:
        hints = get_type_hints(method)
    except NameError as error:
        raise UsageError(
            f"{method.__qualname__} is annotated with a class that is not there: {error}"
        ) from None
    for annotated in ("query", "return"):
        _check_message(method, annotated, hints[annotated])
        _check_bounds(method, annotated, hints[annotated])
    _check_relays(method, hints["query"])
    return hints["query"], hints["return"]


def hidden_message_types(
    client: type, method: str, protections: Mapping[str, HiddenReplies]
) -> tuple[type, type]:
    """Return the query class and the reply class of a method, as its frames have them.

    A reply that leaves by a protected verb alone is of another class then. The methods of the
    protections, and of the key agreement, are known as well.

    Args:
        client: class of the client object.
        method: name of the method.
        protections: what hides the replies of each verb.

    Raises:
        FrameError: the client has no remote method of this name.
        UsageError: a reply that cannot be hidden.
    """
    if method in KEY_METHODS:
        return KEY_METHODS[method]
    for protection in protections.values():
        if method in protection.methods:
            return protection.methods[method]
    query, reply = message_types(client, method)
    release = release_of(getattr(client, method))
    for verb, protection in protections.items():
        if release.via == (verb,):
            reply = protection.reply_class(reply, release)
    return query, reply


def _check_message(method: Callable[..., Any], annotated: str, annotation: Any) -> None:
    """Raise UsageError unless an annotation is a message class.

    Args:
        method: the annotated method.
        annotated: "query" or "return".
        annotation: the annotation.
    """
    name = f"{method.__qualname__}'s {annotated}"
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        shown = getattr(annotation, "__name__", annotation)
        raise UsageError(
            f"{name} is {shown}, no message: make it a frozen dataclass of Rows, Shared and scalars"
        )
    try:
        kinds(annotation)
    except TypeError as error:
        raise UsageError(f"{name} cannot be sent: {error}") from None


def _check_bounds(method: Callable[..., Any], annotated: str, message: type) -> None:
    """Raise UsageError for a message with a field that may hold anything.

    Security rule: sizes and values of a field without a bound are the sender's choice, so they may
    follow from its data, and no other party would notice. Frames between servers need no bounds:
    no client sends or reads them.

    Args:
        method: the client method.
        annotated: "query" or "return".
        message: its message class.
    """
    unbounded = undeclared(message)
    if not unbounded or release_of(method).via == (RELAY,):
        return
    field = unbounded[0]
    field_type = kinds(message)[field]
    bound = "Between(maximum=10)" if field_type is int else 'Real(("width",))'
    if field_type is Picks:
        bound = 'Real((Upto("rows", "clients"), "width"))'
    raise UsageError(
        f"{method.__qualname__}'s {annotated} may hold anything as {message.__name__}.{field}: "
        f"give it a bound, such as {field}: Annotated[{field_type.__name__}, {bound}]"
    )


def _check_relays(method: Callable[..., Any], query: type) -> None:
    """Raise UsageError for a relayed field that the query of a method does not have."""
    release = release_of(method)
    missing = sorted(set(release.relays) - set(kinds(query)))
    if missing:
        existing = ", ".join(kinds(query)) or "no fields"
        raise UsageError(
            f"@answers on {method.__qualname__} relays {missing[0]!r}: its query, "
            f"{query.__name__}, has {existing}"
        )


def check_reply(
    method: Callable[..., Any], release: ReleasePolicy, reply: Any, expected: type, clients: int
) -> None:
    """Check that a reply matches its method's declaration, before any of it is masked.

    Args:
        method: the client method that made the reply.
        release: its declaration.
        reply: the reply.
        expected: message class that the method declares to reply with.
        clients: number of clients called; a field of rows has one row for each.

    Raises:
        UsageError: the reply is of another class, or one of its fields is, or has another number of
            rows.
        PolicyError: private numbers would leave without a mask, and the method does not declare
            that they do.
    """
    name = method.__qualname__
    declared = expected.__name__
    if not isinstance(reply, expected):
        received = type(reply).__name__
        raise UsageError(
            f"{name} replied with a {received}: it declares a {declared}, so it must return one"
        )
    field_kinds = kinds(expected)
    # a misspelt field in the declaration would leave without its mask
    named = {*release.through, *release.unmasked, *release.public}
    missing = sorted(named - set(field_kinds))
    if missing:
        existing = ", ".join(field_kinds) or "no fields"
        raise UsageError(f"@answers on {name} names {missing[0]!r}: a {declared} has {existing}")
    for field, field_kind in field_kinds.items():
        value = getattr(reply, field)
        if value is None and optional(expected, field):
            continue
        is_tensor_field = field_kind in (Rows, Picks, Shared)
        if is_tensor_field and not isinstance(value, field_kind):
            received = type(value).__name__
            raise UsageError(
                f"{name} replied with a {received} as {field}: put it into "
                f"{field_kind.__name__}(…), as {declared} declares"
            )
        if is_tensor_field and not isinstance(_tensor_of(value), torch.Tensor):
            received = type(_tensor_of(value)).__name__
            raise UsageError(
                f"{name} put a {received} into {field_kind.__name__} as {field}: make it a "
                "torch.Tensor"
            )
        if isinstance(value, Batched):
            _check_row_count(name, field, len(value), clients)
        _refuse_undeclared(name, release, field, value)


def _check_row_count(name: str, field: str, rows: int, clients: int) -> None:
    """Raise UsageError for a field that does not have one row per client."""
    if rows != clients:
        raise UsageError(
            f"{name} replied with {rows} row(s) of {field} for {clients} client(s): each has one "
            "row of its own"
        )


def _refuse_undeclared(name: str, release: ReleasePolicy, field: str, value: Any) -> None:
    """Raise PolicyError for content that would leave unmasked, or unpriced, without a declaration.

    Security rule: numbers leave unmasked only by name, and a reply that is said not to be private
    has no content, unless that is declared public. The rule holds whatever the run's mask is, so a
    forgotten declaration fails in every test and not only in masked runs.
    """
    if not release.private:
        if field not in release.public:
            raise PolicyError(_unpriced(name, field))
        return
    if not _is_numeric(value):
        return
    if field in release.through or field in release.unmasked:
        return
    raise PolicyError(
        f"{name} would send {field} without a mask: name it in through=, or in unmasked= where no "
        "mask is to cover it"
    )


def _tensor_of(value: Any) -> Any:
    """Return what a field of a reply holds."""
    if isinstance(value, Shared):
        return value.value
    return value.table


def _is_numeric(value: Any) -> bool:
    """Return True if a field of a reply holds floating-point numbers."""
    if isinstance(value, Shared):
        return value.value.is_floating_point()
    return isinstance(value, Batched) and value.table.is_floating_point()


def least_members(config: Mapping[str, Any]) -> int:
    """Return the members of the smallest sum of a run.

    Args:
        config: what clients and server agreed on.
    """
    return int(config.get(LEAST_MEMBERS, MINIMUM))


def planned_losses(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the fractions of a secure sum's members that may be lost, and that may collude.

    Args:
        config: what clients and server agreed on.
    """
    return float(config.get("lost", LOST)), float(config.get("colluding", COLLUDING))


def config_hash(config: Mapping[str, Any]) -> str:
    """Return the 128-bit fingerprint of a configuration that client and server must share.

    Args:
        config: values that JSON can hold; the order of keys does not matter.

    Returns:
        32 hexadecimal digits.
    """
    serialized = json.dumps(config, sort_keys=True).encode()
    return hashlib.sha256(serialized).hexdigest()[:32]


class Reservation(Protocol):
    """Count of what replies cost, which decides whether one may leave."""

    def reserve(
        self, call: Call, release: ReleasePolicy, reply: Any, receipts: Sequence[Receipts]
    ) -> None:
        """Count what a reply releases, or raise PolicyError where it must not leave.

        Args:
            call: the request.
            release: declaration of the called method.
            reply: after the pipeline, and before it is hidden.
            receipts: of each client.
        """
        ...


class Endpoint(Generic[C]):
    """Client runtime that answers calls for one or more clients, and enforces their policy.

    An endpoint does not rely on the server: it refuses, before anything is computed, another
    configuration, clients that are not here, values outside the configuration's bounds, verbs that
    the method does not allow, and sums that would show a single reply or lack noise.

    Args:
        client: the protocol's client object, over the clients `ids`.
        ids: numbers of the clients, in the order of their positions.
        config: hash of the shared configuration.
        pipeline: stages that replies pass through before they leave.
        keys: the clients' part in the key agreement.
        minimum: members of the smallest sum in which a method takes part if its replies may leave
            in sums only.
        limits: bounds that the configuration sets on requests; without it only the types of their
            fields are checked.
        halves: the clients' part in each protection, by the verb whose replies it hides.
    """

    def __init__(  # noqa: PLR0913 (what the clients of one run are made of)
        self,
        client: C,
        ids: Sequence[int],
        config: str,
        pipeline: Pipeline,
        keys: KeyRing,
        minimum: int = MINIMUM,
        limits: Limits | None = None,
        halves: Mapping[str, ClientHalf] | None = None,
    ) -> None:
        self.limits = limits or Limits()
        self.client = client
        self.ids = tuple(ids)
        self.keys = keys
        self.minimum = minimum
        self.halves = dict(halves or {})
        # For research only: called with a reply before the pipeline, and returns the reply to use.
        # Experiments read replies there, or play malicious clients.
        self.before_pipeline: Callable[[Call, Any], Any] | None = None
        # Noise of the clients' own releases; None where an endpoint is built by hand.
        self.noise: ClientNoise | None = None
        # Holds each call of a client method to its declaration.
        self.guard: ReleaseGuard | None = None
        # Asked about each reply before it leaves, in this order.
        self.reservations: list[Reservation] = []
        # Whether the clients' owner tells numbers of samples; in hidden sums they are told.
        self.tells_samples = True
        # Called with each error that a frame caused: its text stays here. Simulations raise it.
        self.on_refusal: Callable[[Exception], None] = refusals.log
        services: list[Service] = [KeyAgreement(keys), *self.halves.values()]
        self._service_of: dict[str, Service] = {}
        for service in services:
            self._service_of.update(dict.fromkeys(service.methods, service))
        self._config = config
        self._pipeline = pipeline
        self._position_of = {client: position for position, client in enumerate(self.ids)}

    @property
    def least_survivors(self) -> Callable[[int], int] | None:
        """Return the function to the smallest number of survivors whose sum has enough noise.

        None where clients add no shares of noise in sums.
        """
        if SUM not in self.halves:
            return None
        return self.halves[SUM].least_survivors

    def answer(self, call: Call) -> Response:
        """Answer a call in one batched pass over its recipients.

        Args:
            call: requests to clients of this endpoint.

        Raises:
            FrameError: another configuration, a client that is not here, a value outside its
                bounds, or an unknown method.
            LateError: the call's deadline has passed.
            PolicyError: a verb that the method does not allow, or a sum over too few members.
        """
        # Cheap refusals first: nothing is computed for a call that this endpoint does not accept.
        _refuse_late(call)
        self._refuse_other_configuration(call.config)
        self._refuse_strangers(call)
        self._check_counts(call)
        check(call.query, self.limits)
        reply, receipts = self._reply(call)
        if not any(receipts):
            receipts = ()
        return Response(call.to, reply, tuple(receipts))

    def _refuse_other_configuration(self, config: str) -> None:
        """Raise UnknownRunError for the hash of another configuration.

        The configuration fixes masks, noise and bounds: under another one, a client would protect
        its reply by rules that it did not agree to.
        """
        if config != self._config:
            raise UnknownRunError(
                f"the server runs another configuration ({config[:8]}… against "
                f"{self._config[:8]}…): start both from the same one"
            )

    def _refuse_strangers(self, call: Call) -> None:
        """Raise FrameError for a call to clients that are not at this endpoint."""
        strangers = [client for client in call.to if client not in self._position_of]
        if strangers:
            raise FrameError(
                f"frames for clients {strangers[:3]} reached another client: check the addresses"
            )

    def _check_counts(self, call: Call) -> None:
        """Raise FrameError for a round, step or group that the configuration does not allow."""
        counts = (
            ("round", [call.round], "rounds"),
            ("step", [call.step], "steps"),
            ("members", call.members, "clients"),
        )
        for name, values, size_name in counts:
            valid = Between(maximum=size_name).within(self.limits.sizes)
            for value in values:
                if not valid.holds(value):
                    raise out_of_range(f"the {name} of a frame", value, valid)

    def _reply(self, call: Call) -> tuple[Any, Sequence[Receipts]]:
        """Return the reply of the called method, after the release policy and the pipeline.

        Returns:
            The reply, and the receipts of each client.
        """
        if call.method in self._service_of:
            return self._service_of[call.method].answer(call), ()
        _, expected = message_types(type(self.client), call.method)
        method = getattr(self.client, call.method)
        release = release_of(method)
        _refuse_other_verbs(call, release)
        self._refuse_small_sums(call, release)
        half = self.halves.get(call.verb)
        if half is not None:
            half.check(call, release)
        # from now on the mask seed is fixed, since a reply leaves under it
        self.keys.use(call.to)
        context = self.context(call.to, call.round, call.step, call.method)
        tells_samples = self.tells_samples or (call.verb == SUM and half is not None)
        context = dataclasses.replace(context, tells_samples=tells_samples)
        with self._guarded(call, release, expected, context) as traces:
            reply = method(context, call.query)
        receipts = self._receipts(traces, reply, expected, context)
        if self.before_pipeline is not None:
            reply = self.before_pipeline(call, reply)
        check_reply(method, release, reply, expected, len(call.to))
        if not tells_samples:
            _refuse_samples(call, reply)
        reply, receipts = self._after_pipeline(call, release, reply, receipts)
        if half is not None:
            origins = origins_of(call.query, call.to, context.origins)
            bound = dataclasses.replace(call, origins=tuple(origins))
            reply = half.hidden(bound, reply, expected, release)
        return reply, receipts

    def context(
        self, clients: Sequence[int], number: int, step: int, method: str = ""
    ) -> CallContext:
        """Return the context of a call to some clients.

        Args:
            clients: their numbers.
            number: of the round.
            step: number of the call.
            method: name of the called method.
        """
        releases = Releases(method)
        if self.guard is not None:
            releases = Releases(method, self.guard.samples, self.guard.access.closed)
        return CallContext(
            ids=tuple(clients),
            positions=tuple(self._position_of[client] for client in clients),
            round=number,
            step=step,
            noise=self.noise,
            releases=releases,
        )

    def _guarded(
        self, call: Call, release: ReleasePolicy, expected: type, context: CallContext
    ) -> AbstractContextManager[Traces | None]:
        """Return the context in which a client method may do what it declares."""
        if self.guard is None:
            return nullcontext()
        name = f"{type(self.client).__name__}.{call.method}"
        return self.guard.during(name, release, bool(kinds(expected)), context)

    def _receipts(
        self, traces: Traces | None, reply: Any, expected: type, context: CallContext
    ) -> list[Receipts]:
        """Return the receipts of what a client method has done."""
        # a reply of another class is refused by name later
        if self.guard is None or traces is None or not isinstance(reply, expected):
            return [()] * len(context.ids)
        return self.guard.receipts(traces, reply, context)

    def _after_pipeline(
        self, call: Call, release: ReleasePolicy, reply: Any, receipts: Sequence[Receipts]
    ) -> tuple[Any, list[Receipts]]:
        """Return a reply whose fields are clipped, noised and masked, and whose cost is reserved.

        Returns:
            The reply, and the receipts of each client with those of the pipeline's noise.

        Raises:
            TargetError: the reply costs more than the run's target ε allows.
            BudgetError: the reply costs more than the client's budget allows.
        """
        protected = {}
        written = [list(of_client) for of_client in receipts]
        for name in release.through:
            rows = getattr(reply, name).values
            rows, multipliers = self._protected(call, release, name, rows)
            protected[name] = Rows(rows)
            for of_client, client in zip(written, call.to, strict=True):
                if client in multipliers:
                    of_client.append(Receipt(GAUSSIAN, (name,), multipliers[client]))
        reply = dataclasses.replace(reply, **protected)
        complete = [tuple(of_client) for of_client in written]
        if max(map(len, complete)) > MOST:
            raise UsageError(
                f"{call.method} makes more than {MOST} releases in a call: release rows together, "
                "or in several calls"
            )
        _refuse_late(call)  # nobody waits for what took too long, so it need not be released
        for reservation in self.reservations:
            # On the disk before anything leaves: a client that is killed has spent it.
            reservation.reserve(call, release, reply, complete)
        return reply, complete

    def _refuse_small_sums(self, call: Call, release: ReleasePolicy) -> None:
        """Raise PolicyError for a sum over too few members of replies that leave in sums only.

        Security rule: the sum over one client is that client's own reply, so a server could request
        sums to read replies one by one. The client enforces the size itself, since the number
        of members comes from the server.
        """
        sums_only = GATHER not in release.via
        if call.verb != SUM or not sums_only:
            return
        smallest = min(call.members)
        if smallest < self.minimum:
            raise PolicyError(
                f"a sum over {smallest} client(s) would show a single {call.method} answer: "
                f"clients ask for {self.minimum} or more"
            )

    def _protected(
        self, call: Call, release: ReleasePolicy, name: str, rows: torch.Tensor
    ) -> tuple[torch.Tensor, dict[int, float]]:
        """Return a field's rows as they leave: after the pipeline, and sealed where declared.

        Args:
            call: the request.
            release: declaration of the called method.
            name: name of the field.
            rows: its rows, one per recipient, (b, …).

        Returns:
            The rows, and the multiplier of the pipeline's noise by client.

        Raises:
            PolicyError: the noise is in shares, and the sum has fewer members than shares.
        """
        pipeline = self._pipeline.of(name)
        _refuse_incomplete_noise(call, release, pipeline)
        self._refuse_shares_outside_sums(call, release, pipeline)
        seal = None
        if name in release.sealed:
            seal = self._pipeline.seal
        if release.derived:
            # Made of earlier releases, which have their noise: masked, and not noised again.
            pipeline = pipeline.masking_stages
        elif seal is not None:
            # The seal hides the row from the server; the noise protects it from its readers.
            pipeline = pipeline.noising_stages
        with self._logged() as draws:
            rows = pipeline.forward(rows, call.step, release.fresh, call.to, name)
        multipliers: dict[int, float] = {}
        for client, multiplier in draws:
            # the members of a sum complete the noise of one that has shares of it
            complete = multiplier * math.sqrt(pipeline.shares)
            multipliers[client] = min(complete, multipliers.get(client, math.inf))
        if seal is not None:
            rows = seal.close(rows, call.to, call.step, call.method, name)
        return rows, multipliers

    def _logged(self) -> AbstractContextManager[list[tuple[int, float]]]:
        """Return a context in which draws of the clients' noise are logged."""
        if self.noise is None:
            return nullcontext([])
        return self.noise.draws.logged()

    def _refuse_shares_outside_sums(
        self, call: Call, release: ReleasePolicy, pipeline: Pipeline
    ) -> None:
        """Raise PolicyError for a clipped row that would leave without the noise of secure sums.

        Security rule: where clients add their shares of the noise in secure sums, a row that leaves
        otherwise would have none.
        """
        if self.least_survivors is None or release.derived:
            return
        if pipeline.clips and call.verb != SUM:
            raise PolicyError(
                f"{call.method} would leave without noise, which clients add in secure sums only: "
                "the request is refused"
            )

    def answer_frame(self, data: bytes) -> bytes:
        """Answer one encoded frame, as a node with one client does.

        Security rule: no error leaves a node but as a code, since its text may hold data. The text
        goes to `on_refusal`.

        Args:
            data: bytes of the request.

        Returns:
            The bytes of the reply, or of a refusal.
        """
        recipient = f"client/{self.ids[0]}"
        return answered(self.reply_frame, data, recipient, self.on_refusal)

    def reply_frame(self, data: bytes) -> bytes:
        """Return the reply to a frame, or raise one of many errors, whose text may hold data.

        Args:
            data: bytes of the request.
        """
        header = wire.peek(data)
        self._refuse_other_addresses(header)
        # Before its query is decoded: another configuration may have other methods.
        self._refuse_other_configuration(header.config)
        query_type, _ = self._message_types(header.method)
        query: Any
        _, query = wire.decode(data, query_type)
        response = self.answer(_call_of(header, query))
        return wire.encode(reply_header(header), response.reply, receipts=response.receipts_at(0))

    def _message_types(self, method: str) -> tuple[type, type]:
        """Return the query class and the reply class of a method, before its reply is hidden."""
        if method in self._service_of:
            return self._service_of[method].methods[method]
        return message_types(type(self.client), method)

    def _refuse_other_addresses(self, header: Header) -> None:
        """Raise FrameError for a frame that no server sent, or that is for another client."""
        recipients = {f"client/{client}" for client in self.ids}
        if not _SENDER.fullmatch(header.sender) or header.recipient not in recipients:
            # shortened, since the sender has chosen them
            sender = header.sender[:40]
            recipient = header.recipient[:40]
            raise FrameError(
                f"a frame from {sender} to {recipient} reached another client: check the addresses"
            )


def _refuse_other_verbs(call: Call, release: ReleasePolicy) -> None:
    """Raise PolicyError for a verb that the called method does not allow.

    Security rule: the verb decides who can read a reply. A reply that is declared for sums must not
    be read on its own.
    """
    if call.verb not in release.via:
        allowed = " or ".join(release.via)
        raise PolicyError(
            f"{call.method} may leave its client through {allowed}, not {call.verb}: the request "
            "is refused"
        )


def _refuse_samples(call: Call, reply: Any) -> None:
    """Raise OwnerPolicyError for a reply with a field that declares a number of samples."""
    counts = [name for name in sample_fields(type(reply)) if getattr(reply, name) is not None]
    if counts:
        raise OwnerPolicyError(
            f"{call.method} would tell this client's number of samples as {counts[0]}, which its "
            "owner does not tell (samples of its policy)"
        )


def _refuse_incomplete_noise(call: Call, release: ReleasePolicy, pipeline: Pipeline) -> None:
    """Raise PolicyError for a sum with fewer members than its noise has shares.

    Security rule: each member adds one share of the noise, so a sum over fewer members would have
    less noise than it is accounted for. Replies made of earlier releases get no noise.
    """
    smallest = min(call.members)
    if pipeline.shares > smallest and not release.derived:
        raise PolicyError(
            f"{call.method} leaves with noise in {pipeline.shares} shares, and a sum over "
            f"{smallest} would lack some of it"
        )


def _call_of(header: Header, query: Any) -> Call:
    """Return a frame's request as a call to one client."""
    _, _, client = header.recipient.partition("/")
    return Call(
        config=header.config,
        method=header.method,
        verb=header.verb,
        round=header.round,
        step=header.step,
        to=(int(client),),
        query=query,
        members=(header.members,),
        group=(header.group,) if header.group else (),
        attempt=header.attempt,
        deadline=header.deadline,
    )


def _refuse_late(call: Call) -> None:
    """Raise LateError for a call whose deadline has passed, so that nobody waits for its reply."""
    late = time.time() - call.deadline
    if call.deadline and late > 0:
        raise LateError(
            f"{call.method} of round {call.round} was due {late:.0f} s ago, and the server waits "
            "no longer: the request is refused"
        )
