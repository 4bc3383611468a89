"""Views in which the adversary has undone what it can: masks, and its own part of sums.

All clients share the seed of a mask, so one of them that colludes undoes it: of what clients sent,
of what verbs made of that, and of averages that clients were sent. Colluders subtract what they
sent from a sum themselves, and a sum over one other client is then that client's reply. Attacks run
on what is left. A colluder's reply is known where its noise is not needed to know it.

Seals stay: attacks that read sealed rows open them by the same seed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from securecluster.attacks.base import Attack, Knowledge, View
from securecluster.attacks.views import RecordedView
from securecluster.core.lazy_torch import torch
from securecluster.messaging.bounds import declared
from securecluster.messaging.messages import FIRST_SEPARATE_STEP, Picks, Rows, Shared, select
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import SERVER, Party, client
from securecluster.messaging.transcript import ObservedMessage
from securecluster.privacy.pipeline import Kind, Pipeline
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.endpoint import GATHER, SUM, releases_of
from securecluster.runtime.release_policy import ReleasePolicy

ROUNDING = 64  # of a row's largest number, in units of its last place: no mask leaves more


@dataclass(frozen=True)
class UndoneView(View):
    """View of a run without its mask, as far as the adversary undoes it.

    Args:
        view: as it was observed.
        pipeline: of the run; its mask is unlocked where a colluder gives the seed.
        releases: declarations of client methods, by name.
        replies: by colluder what it computed before any protection, by method and call.
        unmasks: True where the mask is undone.
    """

    view: RecordedView
    pipeline: Pipeline = field(repr=False)
    releases: Mapping[str, ReleasePolicy] = field(repr=False)
    replies: Mapping[int, Mapping[tuple[str, int], Any]] = field(repr=False)
    unmasks: bool

    @property
    def parties(self) -> frozenset[Party]:  # type: ignore[override]
        """Return the colluding parties."""
        return self.view.parties

    @property
    def anonymous(self) -> bool:  # type: ignore[override]
        """Return whether other clients appear under labels."""
        return self.view.anonymous

    @property
    def clusters(self) -> Mapping[int, int]:
        """Return by client its cluster at the end, as far as the parties know."""
        return self.view.clusters

    def messages(
        self, method: str | None = None, round: int | None = None
    ) -> Iterator[ObservedMessage]:
        """Yield the frames, and then the replies that were read of sums.

        Args:
            method: only those of this client method; None for all.
            round: only those of this round; None for all.
        """
        for message in self.view.messages(method, round):
            if not self.unmasks:
                yield message
            # models that are posted since averages are masked: those of averages, and no updates
            elif message.step < FIRST_SEPARATE_STEP:
                yield replace(message, content=self._undone(message))
        for message in self._read_of_sums:
            if method in (None, message.method) and round in (None, message.round):
                yield message

    @cached_property
    def outcomes(self) -> tuple[VerbOutcome, ...]:
        """Return what verbs gave the parties, without the mask."""
        undone = []
        for outcome in self.view.outcomes:
            content = self._reply(outcome.method, outcome.step, outcome.content)
            undone.append(replace(outcome, content=content))
        return tuple(undone)

    def _undone(self, message: ObservedMessage) -> Any:
        """Return the content of a frame without its mask."""
        if message.sender.kind in ("client", "anonymous"):
            return self._reply(message.method, message.step, message.content)
        return self._query(message.content)

    def _reply(self, method: str, step: int, content: Any) -> Any:
        """Return a reply, or a sum of replies, without its mask."""
        release = self.releases.get(method)
        if release is None or not self.unmasks or not dataclasses.is_dataclass(content):
            return content
        changes = {}
        for name in release.through:
            rows = getattr(content, name, None)
            # what is sealed is bytes, and a row in a secure sum integers
            if isinstance(rows, Rows) and rows.table.is_floating_point():
                changes[name] = replace(rows, table=self._inverse(name, rows.table, step))
        return dataclasses.replace(content, **changes)  # type: ignore[type-var]

    def _query(self, content: Any) -> Any:
        """Return a request without the mask of what it relays."""
        if not self.unmasks or not dataclasses.is_dataclass(content):
            return content
        changes: dict[str, Any] = {}
        # a message, which names the call of what it relays
        query: Any = content
        message_class: Any = type(content)
        for name, bound in declared(message_class).items():
            sent = getattr(bound, "sent", "")
            value = getattr(content, name)
            if not sent:
                continue
            if isinstance(value, Picks) and value.table.is_floating_point():
                changes[name] = replace(value, table=self._table(content, sent, value.table))
            elif isinstance(value, Shared) and value.value.is_floating_point():
                undone = self._inverse(sent, value.value, int(query.step))
                changes[name] = Shared(undone)
        return dataclasses.replace(content, **changes)  # type: ignore[type-var]

    def _table(self, content: Any, sent: str, table: torch.Tensor) -> torch.Tensor:
        """Return rows that a request relays, each under the mask of the call that it was made in.

        Args:
            content: the request.
            sent: field of the replies that they are made of.
            table: rows, (r, …).
        """
        if not len(table):
            return table
        steps = getattr(content, "steps", None)
        if steps is None:
            return self._inverse(sent, table, int(content.step))
        rows = [
            self._inverse(sent, row[None], int(step))[0]
            for row, step in zip(table, steps.table, strict=True)
        ]
        return torch.stack(rows)

    def _inverse(self, name: str, rows: torch.Tensor, step: int) -> torch.Tensor:
        """Return rows of a field without the mask of a call, whose rounding leaves no zeros."""
        undone = self.pipeline.of(name).masking_stages.inverse(rows, step)
        rounding = ROUNDING * torch.finfo(rows.dtype).eps * rows.abs().amax(-1, keepdim=True)
        return torch.where(undone.abs() > rounding, undone, 0.0)

    @cached_property
    def _read_of_sums(self) -> list[ObservedMessage]:
        """Return the replies that sums tell: those of one client beside colluders."""
        read = []
        for outcome in self.outcomes:
            if outcome.verb != SUM or outcome.reader != SERVER or self.anonymous:
                continue
            for position, group in enumerate(outcome.groups):
                others = [number for number in group if number not in self.replies]
                own = [number for number in group if number in self.replies]
                if len(others) != 1:
                    continue
                content = self._less(outcome, select(outcome.content, [position]), own)
                if content is not None:
                    read.append(_as_reply(outcome, others[0], content))
        return read

    def _less(self, outcome: VerbOutcome, content: Any, own: list[int]) -> Any:
        """Return a sum less what colluders sent; None where one does not know what that was.

        Args:
            outcome: of the verb.
            content: the sum, as a batch of one.
            own: the colluders in it.
        """
        changes = {}
        for name, rows in vars(content).items():
            if not isinstance(rows, Rows) or not rows.table.is_floating_point():
                continue
            rest = rows.values.clone()
            for number in own:
                row = self._sent(outcome, number, name)
                if row is None:
                    return None
                # what a client computes has room for its mask
                rest -= row.to(rest)[..., : rest.shape[-1]]
            changes[name] = Rows(rest)
        return dataclasses.replace(content, **changes)

    def _sent(self, outcome: VerbOutcome, number: int, name: str) -> torch.Tensor | None:
        """Return a field that a colluder sent to a sum, (1, …); None where noise hides it."""
        reply = self.replies[number].get((outcome.method, outcome.step))
        rows = getattr(reply, name, None)
        if not isinstance(rows, Rows):
            return None
        release = self.releases.get(outcome.method)
        if release is None or name not in release.through:
            return rows.values
        pipeline = self.pipeline.of(name)
        if pipeline.multiplier is not None:
            return None
        row = rows.values
        for stage in pipeline.stages:
            if stage.kind is Kind.CLIP:
                row = stage.forward(row, outcome.step)
        return row


def _as_reply(outcome: VerbOutcome, sender: int, content: Any) -> ObservedMessage:
    """Return what was read of a sum as if a client had sent it alone."""
    return ObservedMessage(
        client(sender), SERVER, outcome.method, GATHER, outcome.round, outcome.step, 0, content
    )


def undone(
    fitted: ClusteringProtocol, attack: Attack, view: View, knowledge: Knowledge
) -> tuple[View, Knowledge]:
    """Return the view and the knowledge of an adversary that has undone what it can.

    Attacks on masks get what was observed, since what they guess is what the mask hides.

    Args:
        fitted: the run.
        attack: that is to run.
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    if attack.of_masks or not isinstance(view, RecordedView):
        return view, knowledge
    method = fitted.result_.method
    pipeline = method.pipeline(knowledge.config)
    seeds = [
        colluder.secrets.seed[number]
        for number, colluder in knowledge.colluders.items()
        if number in colluder.secrets.seed
    ]
    seeds += _in_frames(fitted, view)
    # of a run without a mask nothing is left to undo
    if seeds and pipeline.keyed:
        pipeline.unlock(seeds[0])
        knowledge = replace(knowledge, unmasked=True, width=knowledge.dimension)
    replies = {number: colluder.replies for number, colluder in knowledge.colluders.items()}
    releases = releases_of(method.client)
    return UndoneView(view, pipeline, releases, replies, knowledge.unmasked), knowledge


def _in_frames(fitted: ClusteringProtocol, view: RecordedView) -> list[bytes]:
    """Return the clients' seed where a frame that was observed holds it as it is.

    Whoever has a candidate sees by the rows that it unmasks whether it is the seed. Here it is
    compared with the seed itself, where the run's folder has that.

    Args:
        fitted: the run.
        view: what was observed.
    """
    known: dict[frozenset[Party], list[bytes]] = vars(fitted).setdefault("seeds_in_frames_", {})
    if view.parties not in known:
        seeds = set(fitted.kept_.clients.secrets.seed.values())
        found = {
            seed
            for message in view.messages()
            for row in _octets(message.content)
            for seed in seeds
            if seed in row
        }
        known[view.parties] = sorted(found)
    return known[view.parties]


def _octets(content: Any) -> Iterator[bytes]:
    """Yield the rows of bytes of a frame."""
    for value in vars(content).values() if dataclasses.is_dataclass(content) else ():
        tensor = getattr(value, "table", getattr(value, "value", None))
        if isinstance(tensor, torch.Tensor) and tensor.dtype is torch.uint8:
            yield tensor.contiguous().numpy().tobytes()
