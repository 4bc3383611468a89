"""Where a node stands, by its own folder: runs, ε, bytes, the last refusal. Nothing of its data."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from securecluster.messaging.refusals import SENTENCES
from securecluster.nodes import events, run_progress
from securecluster.nodes.node import NO_BUDGET, ledger_of
from securecluster.nodes.party import AGREED, RUN, stamp_of
from securecluster.nodes.policy import Policy
from securecluster.nodes.revoked_runs import RevokedRuns
from securecluster.privacy.dp.budget import UNITS, Budget

IDENTITY, POLICY = "identity.key", "policy.toml"
DAMAGED = "damaged"  # of a refusal by a code that this version does not know


@dataclass(frozen=True)
class Spent:
    """Privacy that a node has spent in all its runs, for one unit.

    Args:
        unit: client or example.
        delta: δ of (ε, δ).
        spent: ε so far; None is infinite.
        allowed: by the owner; None is no limit.
        left: what is allowed and not spent; None where there is no limit.
    """

    unit: str
    delta: float
    spent: float | None
    allowed: float | None
    left: float | None


@dataclass(frozen=True)
class Refusal:
    """The last message that a node refused.

    Args:
        time: in UTC.
        kind: of the message, or the method of a frame.
        code: of the refusal.
        sentence: that the code stands for.
    """

    time: str
    kind: str
    code: str
    sentence: str


@dataclass(frozen=True)
class NodeStatus:
    """Where a node stands.

    Args:
        rounds: the latest round of each run that the node agreed to, by fingerprint.
        revoked: runs that its owner has taken it out of.
        epsilon: spent so far, for each unit with a ledger.
        messages: number of messages by kind and outcome, since `events.jsonl` begins.
        received: bytes of these messages.
        sent: bytes of their answers.
        last: time of the last of them, in UTC; empty without any.
        refusal: the last that was refused; None without any.
    """

    rounds: dict[str, int]
    revoked: list[str]
    epsilon: list[Spent]
    messages: dict[tuple[str, str], int]
    received: int
    sent: int
    last: str
    refusal: Refusal | None

    @classmethod
    def of(cls, folder: Path) -> NodeStatus:
        """Return the status of the node of a folder.

        Raises:
            RunFolderError: a file of the node does not parse.
            UsageError: its policy is none.
        """
        told = events.read(folder)
        refused = [event for event in told if event.outcome != events.OK]
        runs = sorted(path.parent for path in folder.glob(f"{RUN}*/{AGREED}"))
        return cls(
            rounds={run.name.removeprefix(RUN): run_progress.read(run).round for run in runs},
            revoked=sorted(RevokedRuns(folder).read()),
            epsilon=spent(folder),
            messages=dict(Counter((event.kind, event.outcome) for event in told)),
            received=sum(event.received for event in told),
            sent=sum(event.sent for event in told),
            last=told[-1].time if told else "",
            refusal=_refusal(refused[-1]) if refused else None,
        )


def _refusal(event: events.Answered) -> Refusal:
    """Return the refusal of an event."""
    sentence = SENTENCES.get(event.outcome, SENTENCES["failed"])
    return Refusal(event.time, event.method or event.kind, event.outcome, sentence)


def spent(folder: Path) -> list[Spent]:
    """Return what the node of a folder has spent, by the ledgers that it has."""
    path = folder / POLICY
    policy = Policy.load(path) if path.exists() else Policy()
    found = []
    for unit in UNITS:
        stamp = stamp_of(ledger_of(folder, unit))
        if stamp is None:
            continue
        epsilon = _epsilon(folder, unit, policy.delta, stamp)
        allowed = policy.most_epsilon if unit == policy.unit else None
        left = None if allowed is None else max(0.0, allowed - epsilon)
        known = None if math.isinf(epsilon) else epsilon
        found.append(Spent(unit, policy.delta, known, allowed, left))
    return found


@lru_cache(maxsize=8)
def _epsilon(folder: Path, unit: str, delta: float, stamp: tuple[int, int]) -> float:
    """Return ε of a ledger, which takes seconds; `stamp` tells its versions apart."""
    return Budget(ledger_of(folder, unit), NO_BUDGET, delta, unit).spent
