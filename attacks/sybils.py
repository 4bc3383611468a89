"""Sybils: clients of one adversary that try to be the only other members of a victim's sums.

A secure sum hides a row among those of the other members. Whoever plays all of them subtracts its
own rows and reads the last one (Douceur, "The Sybil Attack", IPTPS 2002). Where the server forms
clusters, Sybils choose what they are compared by so that they are split off with their victim, and
no honest client besides. They add zeros to the sums, so that the sum is the victim's update.

These attacks are active. They read no transcript of a finished run, so they are no `Attack` of an
audit: a run has to be repeated with clients that lie, which `run_with_sybils` does. The server is
honest. Of a server that lies no run is needed: it names the members of a sum as it likes, so that
the least number of members alone is in its way.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from securecluster.attacks.base import Tap
from securecluster.attacks.experiments import with_hook
from securecluster.attacks.views import observed_sums, view_of
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.errors import unknown
from securecluster.messaging.messages import Call, Rows, kinds
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.endpoint import PAIRS, SUM
from securecluster.runtime.settings import Settings

P = TypeVar("P", bound=ClusteringProtocol)
# (rows of a call, position of the victim, positions of the Sybils) -> rows that the Sybils send
Mimicry = Callable[[torch.Tensor, int, Sequence[int]], torch.Tensor]

# fields of sums that hold updates, whole or in blocks
UPDATES = ("delta", "blocks")
# sums in which clients say where they belong
CLAIMS = ("count",)
# numbers of pairs by which a client is near to another one, and far from it: losses of SR-FCA, and
# relevance of one-shot clustering
PAIRED = {"loss": (0.0, 1e3), "row": (1.0, 0.0)}


def kept(rows: torch.Tensor, victim: int, sybils: Sequence[int]) -> torch.Tensor:
    """Return what the Sybils computed."""
    return rows[list(sybils)]


def copied(rows: torch.Tensor, victim: int, sybils: Sequence[int]) -> torch.Tensor:
    """Return the victim's row for each Sybil."""
    return torch.stack([rows[victim]] * len(sybils))


def beyond(rows: torch.Tensor, victim: int, sybils: Sequence[int]) -> torch.Tensor:
    """Return the victim's row, moved away from the mean of the others, for each Sybil."""
    others = [k for k in range(len(rows)) if k != victim and k not in sybils]
    row = rows[victim]
    displaced = row + (row - rows[others].mean(0))
    return torch.stack([displaced] * len(sybils))


@dataclass(frozen=True)
class Behaviour:
    """Behaviour of Sybils, by which they are compared.

    Args:
        about: description in words.
        mimic: makes their rows; None if they send what they computed.
    """

    about: str
    mimic: Mimicry | None


BEHAVIOURS: dict[str, Behaviour] = {
    "honest": Behaviour("sends what it computed, and adds zeros to sums", None),
    "copy": Behaviour("sends what the victim sends to be compared", copied),
    "beyond": Behaviour("sends the victim's row, moved away from the mean of all others", beyond),
}


@dataclass(frozen=True)
class SybilRun(Generic[P]):
    """A finished run with Sybils.

    Args:
        fitted: the protocol, with its results.
        victim: its position.
        sybils: positions of the adversary's clients.
        taps: replies before any protection, as they were sent.
    """

    fitted: P
    victim: int
    sybils: frozenset[int]
    taps: tuple[Tap, ...]


def run_with_sybils(
    protocol: P,
    federation: Federation,
    behaviour: str,
    victim: int,
    sybils: Collection[int],
    settings: Settings | None = None,
) -> SybilRun[P]:
    """Run a protocol with Sybils that know what their victim sends to be compared.

    This is the strongest of them: one that has the server, or data like the victim's, on its side.

    Args:
        protocol: its hyper-parameters; it is left as it is.
        federation: the clients and their data.
        behaviour: a name of `BEHAVIOURS`.
        victim: its position.
        sybils: positions of the adversary's clients.
        settings: of the run; its transcript is kept in full.

    Raises:
        UsageError: an unknown behaviour.
    """
    if behaviour not in BEHAVIOURS:
        raise unknown("behaviour", behaviour, BEHAVIOURS)
    mimic = BEHAVIOURS[behaviour].mimic
    taps: list[Tap] = []

    def lie(call: Call, reply: Any) -> Any:
        sent = _lied(call, reply, mimic, victim, frozenset(sybils))
        tapped = copy.deepcopy(sent)
        taps.append(Tap(call.method, call.verb, call.round, call.step, call.to, tapped))
        return sent

    recorded = dataclasses.replace(settings or Settings(), transcript="full")
    fitted = with_hook(protocol, lie, federation, recorded)
    return SybilRun(fitted, victim, frozenset(sybils), tuple(taps))


def _lied(
    call: Call, reply: Any, mimic: Mimicry | None, victim: int, sybils: frozenset[int]
) -> Any:
    """Return a reply in which Sybils send what they are to be compared by, and zeros in sums."""
    positions = [k for k, client in enumerate(call.to) if client in sybils]
    message: Any = type(reply)
    changed: dict[str, Rows] = {}
    for name, field_type in kinds(message).items():
        value = getattr(reply, name)
        if field_type is not Rows or value is None or not positions:
            continue
        rows = value.values.clone()
        if call.verb == SUM and name in UPDATES:
            rows[positions] = 0
        elif mimic is None or victim not in call.to:
            continue
        elif call.verb == PAIRS:
            rows[positions] = _steered(rows, PAIRED[name], call.to, sybils | {victim})
        else:
            mimicry = _mimicry(mimic, rows, call.verb, name)
            rows[positions] = mimicry(rows, call.to.index(victim), positions)
        changed[name] = Rows(rows)
    return dataclasses.replace(reply, **changed)


def _mimicry(mimic: Mimicry, rows: torch.Tensor, verb: str, name: str) -> Mimicry:
    """Return what makes the Sybils' rows of a field: choices and claims can only be copied."""
    if verb == SUM and name not in CLAIMS:
        return kept
    if verb == SUM or not rows.is_floating_point():
        return copied
    return mimic


def _steered(
    rows: torch.Tensor, levels: tuple[float, float], to: Sequence[int], together: Collection[int]
) -> torch.Tensor:
    """Return a row of pairs by which a Sybil is near its victim and far from all others."""
    near_level, far_level = levels
    row = torch.full_like(rows[0], far_level)
    row[[k for k, client in enumerate(to) if client in together]] = near_level
    return row


@dataclass(frozen=True)
class Crowd:
    """The clients whose updates one number that is read is made of.

    Args:
        round: of the run.
        members: clients in the sum.
        contributors: honest clients whose row is not zero there.
        row: the sum, less what the Sybils added.
        rows: what each contributor added.
    """

    round: int
    members: frozenset[int]
    contributors: frozenset[int]
    row: torch.Tensor
    rows: Mapping[int, torch.Tensor]

    def error(self, client: int) -> float:
        """Return the relative error of the sum as a guess of what a client added.

        Args:
            client: one of the contributors.
        """
        client_row = self.rows[client].double()
        return float((self.row.double() - client_row).norm() / client_row.norm())


def crowds(run: SybilRun[Any]) -> list[Crowd]:
    """Return all sums of updates of a run, one for each block of a sum that has blocks.

    Args:
        run: with its transcript.
    """
    sent: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
    for tap in run.taps:
        for field in UPDATES:
            value = getattr(tap.reply, field, None)
            if tap.verb == SUM and isinstance(value, Rows):
                rows = sent.setdefault((tap.step, field), {})
                rows.update(zip(tap.ids, value.values, strict=True))
    view = view_of(run.fitted)
    crowds_of_run = []
    for field in UPDATES:
        for observed in observed_sums(view, field):
            rows = sent[observed.step, field]
            member_rows = {client: rows[client] for client in observed.members}
            if field == "blocks":
                for j in range(len(observed.row)):
                    block = {client: row[j] for client, row in member_rows.items()}
                    crowds_of_run.append(_crowd(observed.round, observed.row[j], block, run.sybils))
            else:
                crowds_of_run.append(_crowd(observed.round, observed.row, member_rows, run.sybils))
    return crowds_of_run


def _crowd(
    round: int, row: torch.Tensor, summands: Mapping[int, torch.Tensor], sybils: frozenset[int]
) -> Crowd:
    """Return who contributed to a sum."""
    rows = {}
    for client, summand in summands.items():
        if client not in sybils and bool(summand.any()):
            rows[client] = summand
    return Crowd(round, frozenset(summands), frozenset(rows), row, rows)


@dataclass(frozen=True)
class Isolation:
    """Rows that an adversary reads of its victim, and that anybody reads of the others.

    Args:
        isolated: whether the victim was the only honest client in one of the sums.
        rounds: in how many rounds.
        error: the smallest relative error of the victim's update; None if it was never alone.
        droppable: whether a server that drops members between the steps of a sum could have left it
            alone with the Sybils in one of them.
        smallest: members of the smallest sum of the victim; None if it was in none.
        pairs: share of the honest clients that were in a sum of two contributors, or one.
    """

    isolated: bool
    rounds: int
    error: float | None
    droppable: bool
    smallest: int | None
    pairs: float


def isolation(run: SybilRun[Any], needed: Callable[[int], int]) -> Isolation:
    """Return what a run with Sybils shows of the victim.

    Args:
        run: with its transcript.
        needed: the fewest survivors of a sum of so many members.
    """
    victim = run.victim
    clients = frozenset(range(len(run.fitted.labels_)))
    alone: dict[int, float] = {}
    paired: set[int] = set()
    droppable = False
    smallest = None
    for crowd in crowds(run):
        if len(crowd.contributors) <= 2:
            paired |= crowd.contributors
        if victim not in crowd.contributors:
            continue
        size = len(crowd.members)
        smallest = min(size, smallest or size)
        inside = len(crowd.members & run.sybils)
        droppable = droppable or needed(size) <= 1 + inside
        if crowd.contributors == {victim}:
            error = crowd.error(victim)
            alone[crowd.round] = min(error, alone.get(crowd.round, error))
    honest = clients - run.sybils
    return Isolation(
        isolated=bool(alone),
        rounds=len(alone),
        error=min(alone.values(), default=None),
        droppable=droppable,
        smallest=smallest,
        pairs=len(paired & honest) / len(honest),
    )
