"""A federation: who holds which samples, and what is known of the true clusters."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.own import outputs, own_samples
from securecluster.data.parquet import read_clients
from securecluster.data.parts import numbered, spread
from securecluster.data.pools import Labels, Pool
from securecluster.data.scenarios import Iid, LabelSwap, Natural, Scenario, Topics, arrange
from securecluster.data.sources import Source, source
from securecluster.errors import UsageError
from securecluster.objectives import CLASSIFICATION, Classification, Objective
from securecluster.randomness import Randomness


@dataclass(frozen=True)
class Shard:
    """One client's samples: x (n, …) and y (n, …) to train on, x_test and y_test held out (possibly empty).

    For classification x is float32 and y (n,) int64; for text both are int64 tokens (n, L); for trajectories both are float32.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]


@dataclass(frozen=True)
class Federation:
    """Clients and their data; `truth` holds each client's true cluster where it is known.

    `classes` is the number of outputs: classes, tokens of the vocabulary, or coordinates of a position.

    Build one with `simulate`, `from_arrays` or `from_parquet`.
    """

    names: tuple[str, ...]
    shards: tuple[Shard, ...]
    classes: int
    seed: int
    truth: tuple[int, ...] | None = None
    data: str = "arrays"
    scenario: str = "own"
    objective: Objective = CLASSIFICATION

    def __post_init__(self) -> None:
        _check(self.names, self.shards, self.classes, self.objective)

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.shards[0].x.shape[1:]

    @classmethod
    def simulate(
        cls, data: str | Source = "digits", *, scenario: Scenario | None = None, clients: int = 20, samples: int | None = None, seed: int
    ) -> Federation:
        """Deal a data set to clients; only the samples that are dealt are decoded.

        Args:
            data: a name in `SOURCES`, or a source of your own.
            scenario: how clusters differ; by default label swap in four clusters, the set's own clients where it has some (femnist,
                shakespeare, mobility), and four topics where its samples lie in groups (ag_news).
            samples: training samples per client, with up to a quarter as many for testing; None deals as many as the scenario allows.
                Test samples come from the set's test pool where it has one, else from its only pool.
            seed: of every draw, here and in the runs on this federation.

        Raises:
            UsageError: an unknown name, data that cannot be read, or more samples, clients or clusters than can be dealt.
        """
        given, randomness = source(data) if isinstance(data, str) else data, Randomness(seed)
        if clients < 1:
            raise UsageError(f"{clients} clients cannot hold data: ask for at least two")
        kind = scenario or _default(given)
        dealing, changes = arrange(kind, Iid(), given, clients)
        deal = dealing.deal(given, clients, samples, randomness)
        truths = [np.zeros(clients, np.int64) if deal.clusters is None else numbered([deal.clusters])]
        trains, tests = _read(given.train, deal.train), _read(given.train if given.test is None else given.test, deal.test)
        for change in changes:
            truths.append(spread(numbered(truths), change.clusters, randomness))
            for k, cluster in enumerate(truths[-1].tolist()):
                for x, y in (trains[k], tests[k]):  # in place: a copy of the whole data set would double the memory
                    x[:], y[:] = change.transform(cluster, x, y, given.classes, randomness)
        shards = tuple(Shard(*train, *test) for train, test in zip(trains, tests, strict=True))
        truth = None if deal.clusters is None and not changes else tuple(numbered(truths).tolist())
        return cls(
            deal.names or tuple(str(k) for k in range(clients)), shards, given.classes, seed, truth, given.name, str(kind), given.objective
        )

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, tuple[Any, Any]],
        *,
        test: Mapping[str, tuple[Any, Any]] | None = None,
        truth: Mapping[str, int] | None = None,
        objective: Objective = CLASSIFICATION,
        classes: int | None = None,
        seed: int,
    ) -> Federation:
        """A federation of your own arrays: name -> (X, y), X (n, …) numbers, y (n,) class numbers from 0.

        Args:
            test: held-out samples by the same names; without it a fifth of each client's samples is held out at random, of sequences the
                last fifth.
            truth: each client's true cluster, where it is known.
            objective: what is learned. `Language()`: X and y (n, L) tokens, y the next one at each place; `Trajectory(metres)`: X (n, T, k)
                past positions and y (n, k) the next one.
            classes: outputs of the network, such as the vocabulary; None is one more than the largest label or token that occurs.

        Raises:
            UsageError: no client, a client without samples, mismatched shapes, values that are not finite, or labels below zero.
        """
        if not isinstance(objective, Objective):
            raise UsageError(f"objective = {objective!r} is none: pass Classification(), Language() or Trajectory(metres)")
        if not clients:
            raise UsageError("a federation needs clients: pass {name: (X, y)}")
        for what, given in (("test", test), ("truth", truth)):
            if given is not None and set(given) != set(clients):
                raise UsageError(f"{what} must have an entry for every client and no other: check {sorted(set(given) ^ set(clients))[:3]}")
        random = Randomness(seed)
        parts = [own_samples(name, pair, None if test is None else test[name], objective, random) for name, pair in clients.items()]
        if classes is None:
            classes = outputs([pair for both in parts for pair in both], objective)
        known = None if truth is None else tuple(_cluster(name, truth[name]) for name in clients)
        shards = tuple(Shard(*train, *held) for train, held in parts)
        return cls(tuple(str(n) for n in clients), shards, classes, seed, known, objective=objective)

    @classmethod
    def from_parquet(
        cls, path: str | Path, *, client_column: str, label_column: str, truth_column: str | None = None, seed: int
    ) -> Federation:
        """A federation of your own parquet file, or of all parquet files of a folder in the order of their names.

        Features are an image column (encoded images, or structs with a field `bytes`) alone, else a column of equally long lists alone,
        else all other columns, which must be numbers, in the order of the file. Labels of any type become class numbers in ascending order.
        Clients are ordered by name, and a fifth of each client's rows is held out at random.

        Args:
            truth_column: each client's true cluster, where it is known: one value per client.

        Raises:
            UsageError: a file, column or value that cannot be used, or a client with a single row.
        """
        table = read_clients(Path(path), client_column, label_column, truth_column)
        made = cls.from_arrays(table.clients, truth=table.truth, seed=seed)
        return replace(made, data=Path(path).resolve().stem)

    def select(self, clients: Sequence[int]) -> Federation:
        """The federation of some of the clients, in this order; what was held back can join later (`Protocol.predict`).

        Raises:
            UsageError: a number that is no client's, or one twice.
        """
        if len(set(clients)) < len(clients) or not set(clients) <= set(range(len(self))):
            raise UsageError(f"clients are numbers from 0 to {len(self) - 1}, each once: {list(clients)[:5]} …")
        names, shards = tuple(self.names[i] for i in clients), tuple(self.shards[i] for i in clients)
        return replace(self, names=names, shards=shards, truth=None if self.truth is None else tuple(self.truth[i] for i in clients))

    def digest(self) -> str:
        """A fingerprint of all samples, in hex: a resumed run refuses other data."""
        total = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            total.update(fingerprint(shard))
        return total.hexdigest()


def fingerprint(shard: Shard) -> bytes:
    """A hash of one client's samples."""
    total = hashlib.blake2b(digest_size=16)
    for part in (shard.x, shard.y, shard.x_test, shard.y_test):
        total.update(f"{part.shape}{part.dtype}".encode())
        total.update(np.ascontiguousarray(part).tobytes())
    return total.digest()


def _default(given: Source) -> Scenario:
    """The scenario of a source where none is named."""
    if given.train.owners is not None:
        return Natural()
    if given.train.groups is not None:
        return Topics()
    return LabelSwap() if given.objective.kind == Classification.kind else Iid()


def _read(pool: Pool, hands: Sequence[Labels]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Each client's samples, views into one array that holds all of them."""
    rows = np.concatenate(hands)
    ends = np.cumsum([len(hand) for hand in hands])[:-1]
    return list(zip(np.split(pool.read(rows), ends), np.split(pool.y[rows], ends), strict=True))


def _cluster(name: str, cluster: Any) -> int:
    try:
        return operator.index(cluster)
    except TypeError:
        raise UsageError(f"truth of client {name!r} is the number of its cluster, not {cluster!r}") from None


def _check(names: Sequence[str], shards: Sequence[Shard], classes: int, objective: Objective) -> None:
    if isinstance(classes, bool) or not isinstance(classes, Integral) or classes < 1:
        raise UsageError(f"classes = {classes!r}: the number of outputs is a whole number from 1, or left out")
    for name, shard in zip(names, shards, strict=True):
        if not len(shard.y):
            raise UsageError(f"client {name!r} has no training samples: leave it out, or give it some")
        for what, own in (("samples", shard.x), ("test samples", shard.x_test if len(shard.y_test) else shard.x)):
            if own.shape[1:] != shards[0].x.shape[1:]:
                raise UsageError(
                    f"client {name!r}: its {what} have shape {own.shape[1:]}, those of {names[0]!r} have {shards[0].x.shape[1:]}"
                )
        if len(shard.x_test) != len(shard.y_test):
            raise UsageError(f"client {name!r}: {len(shard.x_test)} test samples have {len(shard.y_test)} labels")
        if not (np.isfinite(shard.x).all() and np.isfinite(shard.x_test).all()):
            raise UsageError(f"client {name!r}: a feature is NaN or infinite: clean the data first")
        objective.check(name, shard.x, shard.y, classes)
        if len(shard.y_test):
            objective.check(name, shard.x_test, shard.y_test, classes)
