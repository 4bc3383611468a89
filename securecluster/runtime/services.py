"""Services of an endpoint: calls that it answers itself, beside those of the protocol's client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from securecluster.errors import PolicyError
from securecluster.messaging.messages import Ack, Call, Empty
from securecluster.privacy.masking.key_agreement import Peers, PublicKey, SealedSeed, SealedSeeds

if TYPE_CHECKING:
    from securecluster.privacy.masking.key_agreement import KeyRing

GATHER = "gather"
SUM = "sum"
PAIRS = "pairs"
MessageTypes = tuple[type, type]  # query class, reply class
# methods of the clients' agreement on the mask seed
KEY_METHODS: Mapping[str, MessageTypes] = {
    "key_offer": (Empty, PublicKey),
    "key_seal": (Peers, SealedSeeds),
    "key_open": (SealedSeed, Ack),
}


class Service(Protocol):
    """Interface of services.

    Attributes:
        methods: (query class, reply class) by method name.
    """

    @property
    def methods(self) -> Mapping[str, MessageTypes]:
        """Return the (query class, reply class) of each method, by its name."""
        ...

    def answer(self, call: Call) -> Any:
        """Return the reply to a call of one of the methods.

        The endpoint has checked the call's configuration, recipients and bounds.

        Args:
            call: requests to clients of the endpoint.
        """
        ...


class KeyAgreement:
    """Service by which clients agree on the mask seed.

    Args:
        keys: the clients' keys.
    """

    methods = KEY_METHODS

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def answer(self, call: Call) -> Any:
        """Return the clients' reply in the key agreement.

        Args:
            call: requests to clients of the endpoint.

        Raises:
            PolicyError: another verb than gather.
            FrameError: messages that were tampered with.
        """
        refuse_other_verbs(call)
        if call.method == "key_offer":
            return self._keys.offer(call.to)
        if call.method == "key_seal":  # one client leads
            return self._keys.seal(call.to[0], call.query)
        return self._keys.open(call.to, call.query, call.step)


def refuse_other_verbs(call: Call) -> None:
    """Raise PolicyError for a service's call by another verb than gather.

    Args:
        call: the call.
    """
    if call.verb != GATHER:
        raise PolicyError(
            f"{call.method} may leave its client through {GATHER}, not {call.verb}: the "
            "request is refused"
        )
