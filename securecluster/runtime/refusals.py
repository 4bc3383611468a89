"""Answers to frames that never raise: what a request causes leaves as a reply, or as a code."""

from __future__ import annotations

from collections.abc import Callable

from securecluster.errors import FrameError, SecureClusterError, UnforeseenError
from securecluster.messaging import wire
from securecluster.messaging.messages import Header, reply_header
from securecluster.messaging.refusals import code_of

# of the refusal of a frame that is damaged, or for somebody else
NO_HEADER = Header("", "", "", 0, 0, "", "", 0)


def answered(
    answer: Callable[[bytes], bytes],
    data: bytes,
    recipient: str,
    on_refusal: Callable[[Exception], None],
) -> bytes:
    """Return the frame of a reply, or of a refusal by its code.

    Args:
        answer: returns the reply to a frame, or raises an error.
        data: bytes of the request.
        recipient: who answers, such as "client/3".
        on_refusal: called with the error, whose text does not leave.
    """
    try:
        return answer(data)
    except SecureClusterError as error:
        refusal = error
    except Exception as error:  # a frame of the other side must not stop a node
        refusal = UnforeseenError(
            f"a {_header(data).method} frame could not be answered ({type(error).__name__}): it is "
            "refused, and this is worth reporting"
        )
        refusal.__cause__ = error
    on_refusal(refusal)
    header = reply_header(_header(data))
    if header.sender != recipient:
        header = NO_HEADER
    return wire.encode_refusal(header, code_of(refusal))


def _header(data: bytes) -> Header:
    """Return the header of a frame; an empty one where it does not parse."""
    try:
        return wire.peek(data)
    except FrameError:
        return NO_HEADER
