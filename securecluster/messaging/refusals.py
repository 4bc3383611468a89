"""Refusals of requests, as they cross the wire: a code of a closed set, and never a text.

The text of an error may hold what its client holds: a number that is out of range, a label, a path.
So it stays with the party that refuses, in its own log, and the other side reads one of the
sentences below.

Whoever answers frames, clients and the key authority, returns a code, one for each reason, and
`decode` raises `RefusedError` with the code's sentence. Simulated nodes raise the error itself,
since one user is both sides. A client whose budget is spent counts as dropped out.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from securecluster.errors import (
    BudgetError,
    FrameError,
    LateError,
    OwnerPolicyError,
    PolicyError,
    ProposalError,
    RefusedError,
    RevokedRunError,
    StaleError,
    TargetError,
    UnforeseenError,
    UnknownRunError,
    UpdateError,
)
from securecluster.messaging.messages import Header

logger = logging.getLogger(__name__)

FRAME, RUN, PROPOSAL, STALE, LATE = "frame", "run", "proposal", "stale", "late"
POLICY, RULE, BUDGET, TARGET = "policy", "rule", "budget", "target"
REVOKED, UPDATE, FAILED = "revoked", "update", "failed"
# by code: what its sender says by it
SENTENCES: Mapping[str, str] = {
    FRAME: "the request is damaged, forged, or not for it",
    RUN: "it has agreed to no such run, or to another configuration",
    PROPOSAL: "its own protocol and data give another configuration than the server proposes",
    STALE: "it has moved on from what the request is about, which comes too late, or from a server "
    "that started over without its checkpoint",
    LATE: "the request's deadline had passed",
    POLICY: "its owner's policy forbids what the request asks for",
    REVOKED: "its owner has taken it out of this run for good",
    RULE: "a rule of the protocol, which protects clients, forbids what the request asks for",
    BUDGET: "the release would exceed its owner's privacy budget",
    TARGET: "the release would exceed the run's target epsilon",
    UPDATE: "its reply would not be finite, or would be out of range",
    FAILED: "the request could not be answered",
}
# of refusals before anything is released; by the others a client may have written down a release
WITHOUT_RELEASE = (FRAME, RUN, PROPOSAL, STALE, LATE, POLICY, REVOKED, BUDGET, TARGET)
# the first class that fits decides
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (BudgetError, BUDGET),
    (TargetError, TARGET),
    (RevokedRunError, REVOKED),
    (OwnerPolicyError, POLICY),
    (ProposalError, PROPOSAL),
    (StaleError, STALE),
    (LateError, LATE),
    (UnforeseenError, FAILED),
    (UnknownRunError, RUN),
    (FrameError, FRAME),
    (PolicyError, RULE),
    (UpdateError, UPDATE),
)


def code_of(error: Exception) -> str:
    """Return the code by which an error crosses the wire.

    Args:
        error: that a request caused.
    """
    for error_class, code in _CODES:
        if isinstance(error, error_class):
            return code
    return FAILED


def refused(header: Header, code: str) -> RefusedError:
    """Return the error that stands for a refusal at the party that made the request.

    Args:
        header: of the frame with the refusal.
        code: in it.
    """
    # shortened, since the sender has chosen them
    sender = header.sender[:40] or "a party"
    return RefusedError(
        f"{sender} refused {header.method[:40]} of round {header.round}: {SENTENCES[code]} (its "
        "own log says more)",
        code,
    )


def refusal(requested: str, code: str) -> RefusedError:
    """Return the error that stands for a refusal outside of any frame.

    Args:
        requested: what was asked for.
        code: of the refusal; one that is none stands for a failure.
    """
    known_code = code if code in SENTENCES else FAILED
    return RefusedError(
        f"the node refused {requested}: {SENTENCES[known_code]} (its own log says more)", known_code
    )


def log(error: Exception) -> None:
    """Write the text of a refusal into the log of the party that refuses.

    Args:
        error: that a request caused; one that no check expects is written with its traceback.
    """
    unforeseen = code_of(error) == FAILED
    logger.warning("refused a request: %s", error, exc_info=error if unforeseen else None)


def reraise(error: Exception) -> None:
    """Raise the error again: for simulations, where one user is client and server.

    Args:
        error: that a request caused.
    """
    raise error
