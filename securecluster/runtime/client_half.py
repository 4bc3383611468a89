"""The clients' half of a protection, as the endpoint and the codec ask for it.

A protection hides the replies that leave through one verb. Its client half refuses calls that would
show more than that, and brings replies into the form in which they leave. What the forms are is
known without any keys, so that every party finds the same message classes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from securecluster.messaging.messages import Call
from securecluster.runtime.services import MessageTypes, Service

if TYPE_CHECKING:
    from securecluster.runtime.release_policy import ReleasePolicy


# (call, field, encoded rows, largest integer by client where these are clamped to it) -> nothing
Tap = Callable[[Call, str, "NDArray[np.signedinteger]", Sequence[int] | None], None]


class HiddenReplies(Protocol):
    """Interface of the messages of a protection.

    Attributes:
        methods: (query class, reply class) by name of the methods that belong to it.
    """

    @property
    def methods(self) -> Mapping[str, MessageTypes]:
        """Return the (query class, reply class) of each method of its own, by its name."""
        ...

    def reply_class(self, reply: type, release: ReleasePolicy) -> type:
        """Return the class of a reply as it leaves its client.

        Args:
            reply: class of the reply.
            release: declaration of its method.

        Raises:
            UsageError: a reply that cannot be hidden.
        """
        ...


class ClientHalf(Service, Protocol):
    """Interface of the part of one endpoint's clients in a protection.

    Attributes:
        tap: called in simulations with the integers of each field of a sum, before these are
            hidden; None calls nothing.
    """

    tap: Tap | None = None

    @property
    def least_survivors(self) -> Callable[[int], int] | None:
        """Return the function to the smallest number of survivors whose sum has enough noise.

        None where clients add no shares of noise here, but all of it in the pipeline.
        """
        return None

    @abstractmethod
    def check(self, call: Call, release: ReleasePolicy) -> None:
        """Raise an error for a call that a client cannot or will not answer.

        It comes before the client's method, so nothing is computed for such a call. Rules that need
        the reply follow in `hidden`.

        Args:
            call: the request.
            release: declaration of the called method.

        Raises:
            FrameError: a frame that another configuration has.
            PolicyError: a reply that would not be hidden.
        """

    @abstractmethod
    def hidden(self, call: Call, reply: Any, expected: type, release: ReleasePolicy) -> Any:
        """Return a reply in the form in which it leaves.

        Args:
            call: the request.
            reply: the reply after the pipeline, with one row per recipient in each field.
            expected: class of the reply.
            release: declaration of the called method.

        Raises:
            UpdateError: a number beyond the range of its field.
            PolicyError: a client sent another reply in this call already.
        """
