"""How long a request of a run can be, from the configuration that its parties agreed on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from securecluster.messaging.bounds import Limits, most_bytes
from securecluster.messaging.wire import MAX_FRAME
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types
from securecluster.parties.method import Method
from securecluster.protections.encryption.messages import AUTHORITY_METHODS
from securecluster.runtime.endpoint import message_types, releases_of
from securecluster.runtime.services import KEY_METHODS

HEADER = 1 << 20  # bytes of what is no tensor
HEADER_PER_CLIENT = 64  # such as a member's number
# bytes that a key authority is sent: of a ciphertext for each byte of a reply, and of each client
ENCRYPTED = 64
PROOF = 1 << 16


def largest_request(method: Method, config: Mapping[str, Any]) -> int:
    """Return how many bytes a request to a client has at most.

    Args:
        method: the protocol.
        config: that clients and server agreed on.
    """
    limits = _limits(method, config)
    header = HEADER + HEADER_PER_CLIENT * int(config["clients"])
    requests = (call_types(method, name)[0] for name in _methods(method))
    return min(header + max(_bytes(message, limits) for message in requests), MAX_FRAME)


def largest_authority_request(method: Method, config: Mapping[str, Any]) -> int:
    """Return how many bytes a request to a key authority has at most.

    Args:
        method: the protocol.
        config: that clients and server agreed on.
    """
    limits = _limits(method, config)
    replies = [message_types(method.client, name)[1] for name in releases_of(method.client)]
    header = HEADER + (HEADER_PER_CLIENT + PROOF) * int(config["clients"])
    return min(header + ENCRYPTED * max(_bytes(message, limits) for message in replies), MAX_FRAME)


def _limits(method: Method, config: Mapping[str, Any]) -> Limits:
    """Return the bounds of a run's messages."""
    deployment = Deployment(method, config)
    return deployment.limits(deployment.pipeline())


def _methods(method: Method) -> Iterator[str]:
    """Yield the names of all methods that a client answers."""
    yield from releases_of(method.client)
    yield from KEY_METHODS
    for protection in (method.sums.protection, method.pairs.protection):
        yield from protection.methods.keys() - AUTHORITY_METHODS.keys()


def _bytes(message: type, limits: Limits) -> int:
    """Return the largest size of a message's tensors, where nothing bounds them that of a frame."""
    size = most_bytes(message, limits)
    return MAX_FRAME if size is None else size
