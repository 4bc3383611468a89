"""Views, knowledge and truth of a finished run.

Groups, sums, a trusted server's noise, unmasked secure sums and R are in no frame. The server's
replay gives them bit for bit, so no file has to hold them. A key authority is a party, with its
frames and the sums that it decrypts; of R there is no record, so a run with taps records it. A view
has clusters where its parties compute them, and none where clients choose in secret.

An anonymous view has new labels for every call, in an order that says nothing, so that an attack
that links calls cannot read its answer. A colluding client gives its own secrets away, and those of
no other; it keeps its number and is linked to nobody.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import Colluder, Knowledge, Tap, Truth, View
from securecluster.core.client_names import Client, ClientNames, at
from securecluster.core.lazy_torch import torch
from securecluster.data import Federation
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows, select
from securecluster.messaging.outcomes import VerbOutcome
from securecluster.messaging.parties import SERVER, Party
from securecluster.messaging.transcript import ObservedMessage, Parties
from securecluster.protocols.common.base import ClusteringProtocol
from securecluster.runtime.endpoint import GATHER, PAIRS, SUM

# methods whose rows are updates times the client's number of samples, where it is sent with them
WEIGHTED = frozenset({"contribute", "contribute_kept_update"})
# outcomes of all verbs, by run: an audit has a view for each attack, and all need the same replay
OUTCOMES: MutableMapping[Any, tuple[VerbOutcome, ...]] = WeakKeyDictionary()
# likewise the frames that parties observed, by transcript and then by view and calls so far
OBSERVED: MutableMapping[Any, dict[Any, tuple[ObservedMessage, ...]]] = WeakKeyDictionary()
MOST_KEPT = 2**28  # bytes of a transcript whose frames are kept in memory


@dataclass(frozen=True)
class RecordedView(View):
    """View of a run with a full transcript.

    Args:
        fitted: after the run, or loaded from its folder.
        parties: the colluding parties.
        anonymous: True if other clients appear under labels that are new for every call.
        seed: of the labels.
    """

    fitted: ClusteringProtocol
    parties: frozenset[Party]
    anonymous: bool = False
    seed: int = 0

    def messages(
        self, method: str | None = None, round: int | None = None
    ) -> Iterator[ObservedMessage]:
        """Yield the frames that the parties sent, received or overheard, in order.

        Args:
            method: only those of this client method; None for all.
            round: only those of this round; None for all.
        """
        for message in self._observed():
            if method is not None and message.method != method:
                continue
            if round is not None and message.round != round:
                continue
            yield message

    def _observed(self) -> Iterable[ObservedMessage]:
        """Return all frames of the view."""
        transcript = self.fitted.transcript_
        view = (self.parties, self.anonymous, self.seed)
        known = (view, len(transcript.entries))
        totals = transcript.totals()
        if totals["up"] + totals["down"] > MOST_KEPT:
            frames: Iterator[ObservedMessage] = transcript.seen_by(*view)
            return frames
        kept = OBSERVED.setdefault(transcript, {})
        if known not in kept:
            kept[known] = tuple(transcript.seen_by(*view))
        return kept[known]

    @cached_property
    def outcomes(self) -> tuple[VerbOutcome, ...]:
        """Return what verbs gave the parties, in order; they are computed by a replay.

        In an anonymous view only the number of clients behind a row is told: clients are 0, 1, …,
        and rows of single replies, and those of R, are in random order.

        A key authority reads the sums that it decrypts, before the server does. Of R, which the
        server is told less of, the view has what a run of `experiments.tapped` recorded.
        """
        listed = []
        for position, outcome in enumerate(self._all_outcomes()):
            if outcome.reader not in self.parties:
                continue
            if self.anonymous:
                # seeded by position, so that reading a view twice gives the same order
                draw = np.random.default_rng([self.seed, position])
                outcome = _anonymous(outcome, draw)
            listed.append(outcome)
        return tuple(listed)

    @cached_property
    def clusters(self) -> Mapping[int, int]:
        """Return by client its cluster at the end, which the server has in most methods.

        An anonymous view has none, and neither has one of clients that choose in secret.
        """
        observer = self.fitted.result_.method.observer
        server_clusters = SERVER in self.parties and observer.server_knows_labels
        if self.anonymous or not server_clusters:
            return {}
        return {client: int(label) for client, label in enumerate(self.fitted.state_.labels)}

    def _all_outcomes(self) -> Iterator[VerbOutcome]:
        """Yield what verbs gave anyone."""
        result = self.fitted.result_
        if result not in OUTCOMES:
            OUTCOMES[result] = tuple(self.fitted.verb_outcomes())
        yield from OUTCOMES[result]
        yield from getattr(self.fitted, "authority_outcomes_", ())


def _anonymous(outcome: VerbOutcome, draw: np.random.Generator) -> VerbOutcome:
    """Return an outcome that does not tell which clients are behind a row.

    Args:
        outcome: of a verb.
        draw: of the order of rows that belong to one client each.
    """
    if outcome.verb == PAIRS:
        # rows and columns alike, so that the matrix stays one of pairs
        order = draw.permutation(len(outcome.content)).tolist()
        content = outcome.content[order][:, order]
        return replace(outcome, groups=(tuple(range(len(order))),), content=content)
    content = outcome.content
    if outcome.verb == GATHER:
        content = select(content, draw.permutation(len(outcome.groups)).tolist())
    # Sizes of groups stay, since a party sees how many clients replied; numbers are new.
    groups = []
    first = 0
    for group in outcome.groups:
        groups.append(tuple(range(first, first + len(group))))
        first += len(group)
    return replace(outcome, groups=tuple(groups), content=content)


def view_of(
    fitted: ClusteringProtocol, parties: Parties = SERVER, anonymous: bool = False, seed: int = 0
) -> View:
    """Return what some colluding parties observed of a run.

    Args:
        fitted: after a run with a full transcript, or loaded from its folder.
        parties: one party or several, as for `Transcript.seen_by`.
        anonymous: replace other clients by labels that are new for every call, for attacks that
            link calls.
        seed: of the labels.

    Raises:
        UsageError: the run has no such party, or its transcript has no contents.
    """
    transcript = getattr(fitted, "transcript_", None)
    if transcript is None:
        raise UsageError(
            f"this {type(fitted).__name__} has no transcript: fit it with "
            'Settings(transcript="full"), or load the folder of a run'
        )
    observers = transcript.resolved(parties)
    if transcript.mode != "full":
        transcript.content(0)  # refuses, and says what to do
    return RecordedView(fitted, observers, anonymous, seed)


def knowledge_of(
    fitted: ClusteringProtocol,
    federation: Federation | None = None,
    colluders: Iterable[Client] = (),
    samples: tuple[NDArray[Any], NDArray[Any]] | None = None,
    taps: Collection[Tap] = (),
) -> Knowledge:
    """Return what an adversary may know of a run besides its view.

    Args:
        fitted: after the run, or loaded from its folder.
        federation: the clients, of which only the colluding ones' data are used.
        colluders: the clients that collude with the adversary, each as for
            `ClusteringProtocol.model_of`.
        samples: public samples (X, y) of the same distribution as the clients'.
        taps: replies before any protection, of which the colluders' own are used.

    Raises:
        UsageError: not fitted, colluders without a federation, or a client that does not exist.
    """
    # secrets of these clients alone: that of a simulated run would give everybody's
    colluding = {}
    learned = fitted.kept_.learned
    for number in ClientNames(learned.names).positions(colluders):
        secrets = fitted.secrets_of(at(number))
        if federation is None:
            raise UsageError("colluding clients give their data away: give the federation, too")
        replies = _replies_of(number, taps)
        colluding[number] = Colluder(number, federation.shards[number], secrets, replies)
    config = learned.config
    network = fitted.network_
    pipeline = fitted.result_.method.pipeline(config)
    dtypes = {"float32": torch.float32, "float64": torch.float64}
    return Knowledge(
        protocol=learned.protocol,
        config=config,
        network=network,
        initial=network.initial().to(dtypes[config["dtype"]]),
        width=pipeline.width(network.dimension),
        weighted=WEIGHTED,
        colluders=colluding,
        samples=samples,
        names=tuple(learned.names) if learned.named_draws else (),
    )


def _replies_of(client: int, taps: Collection[Tap]) -> dict[tuple[str, int], Any]:
    """Return what one client computed, by method and call."""
    replies = {}
    for tap in taps:
        if client in tap.ids:
            client_reply = select(tap.reply, [tap.ids.index(client)])
            replies[tap.method, tap.step] = client_reply
    return replies


def truth_of(
    fitted: ClusteringProtocol, federation: Federation, view: View, taps: Collection[Tap] = ()
) -> Truth:
    """Return what scorers compare guesses about a run with.

    Args:
        fitted: after the run, or loaded from its folder.
        federation: the clients and their data.
        view: the view that was attacked, for the labels of an anonymous one.
        taps: replies before any protection, of `securecluster.attacks.experiments.tapped`.

    Raises:
        UsageError: the federation has other clients than the run.
    """
    # clients are compared by name, since another federation would be scored without an error
    names = fitted.kept_.learned.names
    if list(federation.names) != list(names):
        raise UsageError("this federation has other clients than the run: give that of the run")
    identities: dict[int, int] = {}
    if isinstance(view, RecordedView) and view.anonymous:
        identities = fitted.transcript_.identities(view.seed)
    return Truth(federation, identities, tuple(taps))


@dataclass(frozen=True)
class ObservedSum:
    """A field of a sum over clients.

    Args:
        method: name of the client method.
        round: the protocol's round.
        step: number of the call.
        members: the clients.
        row: the sum.
    """

    method: str
    round: int
    step: int
    members: frozenset[int]
    row: torch.Tensor


def observed_sums(view: View, field: str) -> Iterator[ObservedSum]:
    """Yield the sums of a field of replies, in order.

    Args:
        view: what the adversary observed.
        field: of the replies.
    """
    for outcome in view.outcomes:
        rows = getattr(outcome.content, field, None)
        if outcome.verb != SUM or not isinstance(rows, Rows):
            continue
        for row, group in zip(rows.values, outcome.groups, strict=True):
            members = frozenset(group)
            yield ObservedSum(outcome.method, outcome.round, outcome.step, members, row)


@dataclass(frozen=True)
class ObservedUpdate:
    """A client's update as an adversary reads it.

    Args:
        sender: the client, or its label in an anonymous view.
        method: client method that made it.
        round: the protocol's round.
        step: number of the call.
        row: coordinates, (width,), under the run's mask, and not multiplied by a weight.
        size: the client's number of samples, if it sent it.
    """

    sender: Party
    method: str
    round: int
    step: int
    row: torch.Tensor
    size: float | None


def observed_updates(view: View, knowledge: Knowledge) -> list[ObservedUpdate]:
    """Return the updates that a view contains one by one, in order.

    Rows that cannot be read, since they are coded, sealed or masked for a secure sum, are left out.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    kept: dict[Any, list[ObservedUpdate]] = vars(view).setdefault("updates_", {})
    known = (knowledge.width, knowledge.weighted)
    if known in kept:
        return kept[known]
    updates = []
    for message in view.messages():
        delta = getattr(message.content, "delta", None)
        from_client = message.sender.kind in ("client", "anonymous")
        if delta is None or not from_client:
            continue
        row = delta.values[0]
        # coded and sealed rows are bytes, and rows masked for a secure sum are integers
        if not row.is_floating_point() or row.shape != (knowledge.width,):
            continue
        sizes = getattr(message.content, "size", None)
        size = None
        if sizes is not None:
            size = float(sizes.values[0])
        # clients send n·Δ for a mean over samples; attacks are on Δ
        if message.method in knowledge.weighted and size:
            row = row / size
        updates.append(
            ObservedUpdate(message.sender, message.method, message.round, message.step, row, size)
        )
    if sum(update.row.nbytes for update in updates) <= MOST_KEPT:
        kept[known] = updates
    return updates
