"""What a protection lacks, in sentences: for whoever writes one, and for tests.

Golden cases, faults and attacks are of a project's tests, which know what they run
(`tests/protections/test_registry.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from securecluster.messaging.bounds import Real, Upto, undeclared
from securecluster.messaging.messages import Rows
from securecluster.protections.pair_rows import PairRange
from securecluster.protections.protection import PairProtection, Protection, SumProtection
from securecluster.runtime.client_half import HiddenReplies
from securecluster.runtime.endpoint import PAIRS, SUM
from securecluster.runtime.release_policy import ReleasePolicy

WORDS = ("read", "unseen")
HALVES = ("replies", "client_half", "server_half")
OF_AUTHORITY = ("authority", "authority_view")
NAME = re.compile(r"[a-z][a-z0-9-]*")


@dataclass(frozen=True, eq=False)
class _Row:
    """A reply of one field, as a client method may have it."""

    row: Annotated[Rows, Real((Upto("width", 1000),))]


def lacks(protection: SumProtection | PairProtection) -> list[str]:
    """Return what a protection lacks; nothing of a complete one.

    Args:
        protection: of sums or of pairs.
    """
    return list(_lacking(protection))


def _lacking(protection: SumProtection | PairProtection) -> Iterator[str]:
    """Yield what a protection lacks."""
    name = getattr(protection, "name", "")
    if not NAME.fullmatch(name):
        yield f"name: {name!r} is no name in small letters, digits and hyphens"
    if not getattr(protection, "about", ""):
        yield "about: say what it does, for the command line"
    for missing in _not_written(protection, WORDS):
        yield f"{missing}: say it in words, for reports"
    if protection.hides:
        yield from _lacking_of_hidden(protection)


def _lacking_of_hidden(protection: SumProtection | PairProtection) -> Iterator[str]:
    """Yield what a protection that hides replies lacks."""
    for missing in _not_written(protection, HALVES):
        yield f"{missing}: make it, since the protection hides replies"
    by_authority = isinstance(protection, PairProtection) and protection.by_authority
    of_authority = OF_AUTHORITY if by_authority else ()
    for missing in _not_written(protection, of_authority):
        yield f"{missing}: a key authority opens sums, so make it and say what it saw"
    if not protection.claims:
        yield "claims: say what attacks must not get where a run has it"
    yield from _unbounded(protection)
    if not list(_not_written(protection, ("replies",))):
        yield from _faulty_reply(protection)


def _not_written(protection: Protection, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the methods of the base classes that a protection does not replace."""
    bases = (Protection, SumProtection, PairProtection)
    for name in names:
        if any(getattr(type(protection), name) is getattr(base, name, None) for base in bases):
            yield name


def _unbounded(protection: Protection) -> Iterator[str]:
    """Yield the fields of its messages that may hold anything."""
    for name, classes in protection.methods.items():
        for message in classes:
            for field in undeclared(message):
                yield f"methods: {message.__name__}.{field} of {name} may hold anything"


def _faulty_reply(protection: SumProtection | PairProtection) -> Iterator[str]:
    """Yield what is wrong with the class that a reply of one row has when it is hidden."""
    replies: HiddenReplies
    if isinstance(protection, SumProtection):
        release = ReleasePolicy((SUM,), through=("row",))
        replies = protection.replies()
    else:
        release = ReleasePolicy((PAIRS,), columns="among")
        replies = protection.replies({"row": PairRange(-1.0, 1.0, 32, 0.0)})
    hidden = replies.reply_class(_Row, release)
    if hidden is _Row:
        yield "replies: a hidden reply has the class of one that is not"
    for field in undeclared(hidden):
        yield f"replies: {hidden.__name__}.{field} may hold anything"
    unknown = set(protection.methods) - set(replies.methods)
    if unknown:
        yield f"replies: its messages lack those of {sorted(unknown)}, which clients answer"
