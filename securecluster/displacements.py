"""Both ends of federated averaging by displacements, so that the server never needs a model.

Client: `Trainee` holds θ, applies the averaged updates it is sent, trains, replies with its own. Server: `Outbox` keeps every average
until each client it is meant for has it; a client that missed rounds is sent what it lacks, and that counts as bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from securecluster.backend import torch
from securecluster.cohort import Cohort, LocalTraining
from securecluster.endpoint import GATHER, SUM, Turn, answers
from securecluster.errors import UpdateError
from securecluster.messages import Picks, Rows
from securecluster.network import Network
from securecluster.privacy.keys import Done, Hello, Secrets
from securecluster.privacy.stages import Pipeline
from securecluster.run import Run

NEVER = 1 << 62  # no post has this number


@dataclass(frozen=True, eq=False)
class Means:
    """Server to client: the averages it lacks, oldest first."""

    means: Picks  # (r, d) as they were summed, hence masked where updates are
    steps: Picks  # (r,) int64, the call whose updates each one averages: it names the mask
    absolute: bool  # one row, the whole displacement since θ_0, instead of one per missed round
    restart: int | None = None  # the rows count from θ_0 for who has not heard of this restart; None where nobody ever restarts


@dataclass(frozen=True, eq=False)
class Update:
    """Client to server."""

    delta: Rows  # (b, d) SGD_n(θ_i, D_i) − θ_i
    size: Rows | None  # (b,) |D_i|, only where the average is weighted


def nothing() -> torch.Tensor:
    """No tensor yet."""
    return torch.zeros(0)


@dataclass
class Posted:
    """A model as the server may hold it."""

    displacement: torch.Tensor = field(default_factory=nothing)  # θ − θ_0, (d,), masked where updates are; empty: not posted
    step: int = 0  # the call whose mask it carries


@dataclass
class TraineeState:
    """What clients keep between rounds; equal models are stored once."""

    table: torch.Tensor  # (u, d)
    index: list[int]  # (m,)
    secrets: Secrets
    starts: list[int] = field(default_factory=list)  # where clients hold several models: the starts they belong to
    extra: torch.Tensor = field(default_factory=nothing)  # (m, …) what else a method's clients remember


class Trainee:
    """Clients that train from their cluster's model; how an update may leave is for those that inherit from it to say."""

    clear: ClassVar[bool] = False  # whether a part of a model leaves without a mask

    def __init__(
        self, cohort: Cohort, training: LocalTraining, pipeline: Pipeline, weighted: bool, start: torch.Tensor | None = None
    ) -> None:
        self.cohort, self.training, self._pipeline, self._weighted = cohort, training, pipeline, weighted
        self._start = cohort.start if start is None else start
        self.models = Rows(self._start[None].clone(), (0,) * len(cohort.ids))
        self._memo = _Memo()
        self._printed: tuple[torch.Tensor | None, list[bytes]] = (None, [])  # a table of models, and the digests of its rows

    def trained(self, turn: Turn, query: Means, scale: Sequence[float] | None = None, plan: LocalTraining | None = None) -> Update:
        """The reply before any mask, each client's update times its `scale`; of a `plan` other than its usual training."""
        self.take(turn.at, query)
        room = self._pipeline.room(self.cohort.model.dimension)
        delta = self.cohort.train(self.models.select(turn.at), turn.at, plan or self.training, turn.step, room, scale)
        return Update(Rows(delta), self._sizes(turn) if self._weighted else None)

    @answers(GATHER, private=False)
    def receive(self, turn: Turn, query: Means) -> Done:
        """θ_i ← θ_i + P⁻¹Δ_c(i), and no training: how the last average reaches everyone."""
        self.take(turn.at, query)
        return Done()

    def take(self, at: Sequence[int], query: Means) -> None:
        """θ_i ← θ_i + P⁻¹Δ_c(i) for the clients at positions `at`."""
        self.models = self.advanced(at, query)

    def origin(self, at: Sequence[int], query: Means) -> Rows:
        """All clients' models before what the query brings those at positions `at`."""
        return self.models

    def advanced(self, at: Sequence[int], query: Means) -> Rows:
        """All clients' models, with those at positions `at` moved by what the query brings them."""
        models = self.origin(at, query)
        assert models.index is not None
        picks = dict(zip(at, query.means.picks, strict=True))
        if self._memo.letter is not query.means.table:
            self._memo = _Memo(query.means.table)
        known, prints = self._printed
        if known is not models.table:
            prints = [_print(row) for row in models.table]
        rows: dict[bytes, torch.Tensor] = {}  # who caught up shares its peers' row again
        place: list[bytes] = []
        for k, row in enumerate(models.index):
            theta, digest = self._moved(models.table[row], prints[row], picks.get(k, ()), query)
            rows.setdefault(digest, theta)
            place.append(digest)
        order = {digest: n for n, digest in enumerate(rows)}
        table = torch.stack(list(rows.values()))
        self._printed = (table, list(rows))
        return Rows(table, tuple(order[digest] for digest in place))

    def _moved(self, theta: torch.Tensor, digest: bytes, picks: tuple[int, ...], query: Means) -> tuple[torch.Tensor, bytes]:
        """A model moved by some averages, and its digest; what a letter has already moved is not moved again."""
        if not picks:
            return theta, digest
        key = (digest, picks)
        if key not in self._memo.moved:
            for p in picks:
                if p not in self._memo.undone:
                    self._memo.undone[p] = self._undone(query.means.table[p], int(query.steps.table[p]))
                theta = self.bounded((self._start if query.absolute else theta) + self._memo.undone[p])
            self._memo.moved[key] = (theta, _print(theta))
        return self._memo.moved[key]

    def bounded(self, theta: torch.Tensor) -> torch.Tensor:
        """The model (d,) after an average, where it must lie; everywhere, if a method does not say otherwise."""
        return theta

    def _undone(self, row: torch.Tensor, step: int) -> torch.Tensor:
        return self._pipeline.inverse(row.to(self.cohort.start.device, self.cohort.start.dtype), step)

    def model_at(self, displacement: torch.Tensor, step: int) -> torch.Tensor:
        """θ_0 + P⁻¹(displacement), (d,), of a displacement under the mask of call `step`."""
        return self._start + self._undone(displacement, step)

    def displaced(self, at: Sequence[int]) -> Update:
        """θ_i − θ_0 of the clients at positions `at`, before any mask."""
        d = self.cohort.model.dimension
        delta = self._start.new_zeros(len(at), self._pipeline.room(d))
        for row, k in zip(delta, at, strict=True):
            torch.sub(self.models.row(k), self._start, out=row[:d])
        return Update(Rows(delta), None)

    def _sizes(self, turn: Turn) -> Rows:
        return Rows(torch.as_tensor([float(self.cohort.sizes[k]) for k in turn.at], dtype=self.models.table.dtype))

    def state(self, secrets: Secrets) -> TraineeState:
        """For a checkpoint."""
        assert self.models.index is not None
        return TraineeState(self.models.table, list(self.models.index), secrets)

    def restore(self, state: TraineeState) -> None:
        """From a checkpoint."""
        self.models = Rows(state.table.to(self.cohort.start.device), tuple(state.index))


class Discloser(Trainee):
    """Clients whose updates may be read one by one (Sattler et al. 2019, Algorithm 5, "Client i does"), and that post their model."""

    @answers(GATHER, SUM, through=("delta",), fresh=True, trains="usual")
    def train(self, turn: Turn, query: Means) -> Update:
        """θ_i ← θ_i + P⁻¹Δ_c(i); reply P(SGD_n(θ_i, D_i) − θ_i). The mask P is applied on the way out."""
        return self.trained(turn, query)

    @answers(GATHER, through=("delta",), fresh=True, derived=True)
    def post(self, turn: Turn, query: Hello) -> Update:
        """θ_i − θ_0, masked on the way out: how a model reaches those who were not there (Sattler et al. 2019, V-C; ours)."""
        return self.displaced(turn.at)


@dataclass
class _Memo:
    """What clients made of one letter's averages: its frames reach them in several calls, as a sum streams over clients."""

    letter: torch.Tensor | None = None  # the table of averages itself
    undone: dict[int, torch.Tensor] = field(default_factory=dict)
    moved: dict[tuple[bytes, tuple[int, ...]], tuple[torch.Tensor, bytes]] = field(default_factory=dict)


def _print(row: torch.Tensor) -> bytes:
    return hashlib.blake2b(row.cpu().numpy().tobytes()).digest()


@dataclass
class Post:
    """One round's averages: `table[row_of[i]]` is client i's, -1 where it has none."""

    step: int
    table: torch.Tensor  # (K, d)
    row_of: list[int]  # (m,)


@dataclass
class Outbox:
    """Averages that some client still lacks.

    Under fresh masks every round's average is kept apart, since the server cannot add averages of different rounds; without a mask
    one row per cluster, its displacement since θ_0, replaces them all.
    """

    fresh: bool
    lacks: list[int]  # (m,) the number of the first post each client lacks
    posts: list[Post] = field(default_factory=list)
    first: int = 0  # the number of posts[0]
    restart: int | None = None  # of the models from θ_0, where a method restarts them

    @classmethod
    def start(cls, clients: int, fresh: bool) -> Outbox:
        """An empty outbox."""
        return cls(fresh, [0] * clients)

    @property
    def number(self) -> int:
        """Averages posted so far."""
        return self.first + len(self.posts)

    def post(self, step: int, means: torch.Tensor, labels: Sequence[int]) -> None:
        """Add a round's averages (K, d), kept in main memory; `labels[i]` is client i's row."""
        means = means.cpu()
        if not self.fresh and self.posts:
            before = self.posts[-1]
            source = [before.row_of[list(labels).index(c)] for c in range(len(means))]
            means = before.table[torch.as_tensor(source)] + means
            self.first += 1
            self.posts = []
        self.posts.append(Post(step, means, list(labels)))

    def displacement(self, client: int, width: int) -> torch.Tensor:
        """Without a mask: all averages so far for a client, as one row; zero of `width` numbers before the first."""
        return self.posts[-1].table[self.posts[-1].row_of[client]] if self.posts else torch.zeros(width)

    def letter(self, to: Sequence[int]) -> Means:
        """What each of `to` lacks."""
        if not self.posts:
            none = ((),) * len(to)
            return Means(Picks(torch.zeros(0, 0), none), Picks(torch.zeros(0, dtype=torch.int64), none), False, self.restart)
        starts = [sum(len(p.table) for p in self.posts[:n]) for n in range(len(self.posts))]
        picks = tuple(tuple(starts[n] + p.row_of[i] for n, p in enumerate(self.posts) if self.first + n >= self.lacks[i]) for i in to)
        steps = torch.as_tensor([p.step for p in self.posts for _ in p.table])
        return Means(Picks(torch.cat([p.table for p in self.posts]), picks), Picks(steps, picks), not self.fresh, self.restart)

    def delivered(self, ids: Sequence[int]) -> None:
        """These clients replied, so they have everything posted so far; what nobody lacks is dropped."""
        for i in ids:
            self.lacks[i] = max(self.lacks[i], self.number)
        while self.fresh and self.posts and min(self.lacks) > self.first:
            self.posts.pop(0)
            self.first += 1

    def leave(self, ids: Sequence[int]) -> None:
        """These clients go on alone: nothing posted later is meant for them."""
        for i in ids:
            self.lacks[i] = NEVER

    def late(self) -> list[int]:
        """The clients that lack some average."""
        return [i for i, lacked in enumerate(self.lacks) if lacked < self.number]


def deliver(net: Network, run: Run, state: Any, tries: int = 5) -> None:
    """The last averages reach everyone; who does not reply is asked again, a few times, and then stays behind by name."""

    def send() -> Outbox:
        outbox: Outbox = state.outbox
        for _ in range(tries):
            late = outbox.late()
            if late:
                outbox.delivered(net.gather(Trainee.receive, outbox.letter(late), to=late).ids)
        return outbox

    state.outbox = run.once("deliver", send, Outbox)


def check_newcomers(to: Sequence[int], ids: Sequence[int]) -> None:
    """Raise UpdateError for newcomers `to` that did not reply: nothing is known of them, so they are placed nowhere."""
    silent = [i for i in to if i not in ids]
    if silent:
        raise UpdateError(f"newcomer(s) {', '.join(map(str, silent[:5]))} do not reply: ask them again later")


def invite(net: Network, members: Sequence[int], share: float, *path: int, least: int = 1) -> list[int]:
    """A random share of some clients, `least` or more where there are as many, in order."""
    count = min(len(members), max(least, round(share * len(members))))
    if count == len(members):
        return list(members)
    return sorted(int(i) for i in net.randomness.generator("server", "invite", *path).choice(members, count, replace=False))
