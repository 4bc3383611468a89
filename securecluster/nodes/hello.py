"""What a node signs for a server, and what a server takes as a proof of who a node is.

A node signs two statements, and each names the digest of its roster and the server:

- the *introduction*, with which it tells facts of its data before there is a run: it says who
  carries its messages, and is part of no run;
- the *hello* of one run, by the run's fingerprint, which it signs only if it has agreed to it.

A server that hands on the challenge of another federation gets neither: its roster is another one,
or it has another name than the owner was told (`server` of the policy), and the node has not agreed
to the other one's run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from securecluster.errors import FrameError, OwnerPolicyError, ProposalError
from securecluster.nodes.policy import Policy

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster

INTRODUCTION, HELLO = "introduction v2", "hello v2"
# `run` is the carrier's number of the run in an introduction, and the fingerprint in a hello
ENTRIES = ("run", "node", "nonce", "roster", "server")
MOST = 1 << 10  # characters of a challenge


def challenge_of(
    run: int | str, node: int, nonce: str, roster: Roster | None, server: str
) -> dict[str, Any]:
    """Return what a server asks a node to sign.

    Args:
        run: the carrier's number of the run, or, of a hello, the run's fingerprint.
        node: the carrier's number for the node.
        nonce: drawn for this answer.
        roster: that the server was given; None verifies nothing.
        server: its name, as owners of nodes know it.
    """
    digest = None if roster is None else roster.digest
    return {"run": run, "node": node, "nonce": nonce, "roster": digest, "server": server}


def statement_of(purpose: str, challenge: Mapping[str, Any]) -> bytes:
    """Return what a node signs.

    Args:
        purpose: INTRODUCTION or HELLO.
        challenge: of the server.
    """
    entries = {name: challenge[name] for name in ENTRIES}
    return f"securecluster {purpose} ".encode() + json.dumps(entries, sort_keys=True).encode()


def challenge_in(data: bytes, roster: Roster | None, policy: Policy) -> dict[str, Any]:
    """Return the challenge of a server that a node may answer.

    Args:
        data: of a server that may send anything.
        roster: of the node; None for none.
        policy: of its owner.

    Raises:
        FrameError: no challenge, or that of an earlier version.
        OwnerPolicyError: of a server that the owner does not name.
        ProposalError: of a server with another roster.
    """
    try:
        content = json.loads(data)
        challenge = {name: content[name] for name in ("run", "node", "nonce")}
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FrameError("a server's challenge has no run, node and nonce") from None
    if not {"roster", "server"} <= content.keys():
        raise FrameError(
            "the server asks for the statement of an earlier version, which names neither roster "
            "nor server, and is good for any of them: let it run this version"
        )
    challenge |= {"roster": content["roster"], "server": content["server"]}
    scalars = all(isinstance(value, (str, int, type(None))) for value in challenge.values())
    if not scalars or not isinstance(challenge["server"], str) or len(data) > MOST:
        raise FrameError("a server's challenge has no run, node and nonce")
    if challenge["roster"] != (None if roster is None else roster.digest):
        raise ProposalError("the server's roster is another one than this node was given")
    if policy.server is not None and challenge["server"] != policy.server:
        raise OwnerPolicyError(
            f"this client answers the server {policy.server}, and not {challenge['server']!r:.60}"
        )
    return challenge
