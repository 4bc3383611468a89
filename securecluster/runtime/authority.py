"""The third party of some protections, as runs ask for it: it opens what the server computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from securecluster.messaging.outcomes import VerbOutcome


class Authority(Protocol):
    """Interface of key authorities, which are reached by frames alone.

    Attributes:
        state: what it keeps between messages, a dataclass; never printed.
        observe: called with what it reads of clients, for audits; None asks for nothing.
    """

    state: Any
    observe: Callable[[VerbOutcome], None] | None

    def restore(self, state: Any) -> None:
        """Set the state of a checkpoint, or of an earlier process.

        Args:
            state: the state.
        """
        ...

    def answer_frame(self, data: bytes) -> bytes:
        """Answer one encoded frame of the server.

        Args:
            data: bytes of the request.

        Returns:
            The bytes of the reply, or of a refusal.
        """
        ...

    def reply_frame(self, data: bytes) -> bytes:
        """Return the reply to a frame, or raise the error of a refusal.

        Args:
            data: bytes of the request.
        """
        ...
