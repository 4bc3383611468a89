"""A federation: who holds which samples, and what is known of the true clusters."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.scenarios import SCENARIOS, Iid, LabelSwap, Scenario
from securecluster.data.sources import SOURCES
from securecluster.errors import UsageError, unknown
from securecluster.randomness import Randomness


@dataclass(frozen=True)
class Shard:
    """One client's samples: x (n, …) float32 and y (n,) int64 to train on, x_test and y_test held out (possibly empty)."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    x_test: NDArray[np.float32]
    y_test: NDArray[np.int64]


@dataclass(frozen=True)
class Federation:
    """Clients and their data; `truth` holds each client's true cluster where it is known.

    Build one with `simulate` or `from_arrays`.
    """

    names: tuple[str, ...]
    shards: tuple[Shard, ...]
    classes: int
    seed: int
    truth: tuple[int, ...] | None = None
    data: str = "arrays"
    scenario: str = "own"

    def __post_init__(self) -> None:
        _check(self.names, self.shards, self.classes)

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.shards[0].x.shape[1:]

    @classmethod
    def simulate(
        cls, data: str = "digits", *, scenario: Scenario | None = None, clients: int = 20, samples: int | None = None, seed: int
    ) -> Federation:
        """Deal a data set to clients.

        Args:
            data: a name in `SOURCES`.
            scenario: how clusters differ; label swap in four clusters by default.
            samples: training samples per client, with a quarter as many for testing; None deals everything, a fifth held out.
            seed: of every draw, here and in the runs on this federation.

        Raises:
            UsageError: an unknown name, or more samples, clients or clusters than can be dealt.
        """
        if data not in SOURCES:
            raise unknown("data", data, SOURCES)
        source, kind, randomness = SOURCES[data](), scenario or LabelSwap(), Randomness(seed)
        if clients < 1:
            raise UsageError(f"{clients} clients cannot hold data: ask for at least two")
        kind.check(clients, source.classes)
        train, test = _shares(data, len(source.y), clients, samples)
        truth = kind.truth(clients, randomness)
        shards = []
        for own, cluster in zip(kind.deal(source.y, clients, train + test, randomness), truth, strict=True):
            x, y = kind.transform(int(cluster), source.x[own], source.y[own], source.classes, randomness)
            shards.append(Shard(x[:train], y[:train], x[train:], y[train:]))
        names = tuple(str(i) for i in range(clients))
        return cls(names, tuple(shards), source.classes, seed, tuple(int(t) for t in truth), data, kind.name)

    @classmethod
    def from_arrays(
        cls,
        clients: Mapping[str, tuple[Any, Any]],
        *,
        test: Mapping[str, tuple[Any, Any]] | None = None,
        truth: Mapping[str, int] | None = None,
        seed: int,
    ) -> Federation:
        """A federation of your own arrays: name -> (X, y), X (n, …) numbers, y (n,) class numbers from 0.

        Args:
            test: held-out samples by the same names; without it a fifth of each client's samples is held out at random.
            truth: each client's true cluster, where it is known.

        Raises:
            UsageError: no client, a client without samples, mismatched shapes, values that are not finite, or labels below zero.
        """
        if not clients:
            raise UsageError("a federation needs clients: pass {name: (X, y)}")
        for what, given in (("test", test), ("truth", truth)):
            if given is not None and set(given) != set(clients):
                raise UsageError(f"{what} must have an entry for every client and no other: check {sorted(set(given) ^ set(clients))[:3]}")
        shards = [_own(name, pair, None if test is None else test[name], Randomness(seed)) for name, pair in clients.items()]
        classes = 1 + max(int(y.max(initial=0)) for s in shards for y in (s.y, s.y_test))
        known = None if truth is None else tuple(_cluster(name, truth[name]) for name in clients)
        return cls(tuple(str(n) for n in clients), tuple(shards), classes, seed, known)

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


def scenario(name: str, clusters: int | None) -> Scenario:
    """The named scenario, with its own default number of clusters where None is given."""
    if name not in SCENARIOS:
        raise unknown("scenario", name, SCENARIOS)
    return SCENARIOS[name]() if clusters is None else SCENARIOS[name](clusters=clusters)


def _shares(data: str, pool: int, clients: int, samples: int | None) -> tuple[int, int]:
    """Training and test samples per client."""
    if samples is None:
        each = pool // clients
        train, test = each - round(each / 5), round(each / 5)
    else:
        train, test = samples, max(1, round(samples / 4))
    if train < 1 or (train + test) * clients > pool:
        most = pool // clients * 4 // 5
        raise UsageError(
            f"{data} has {pool} samples: {clients} clients can train on at most {most} each"
            + (f", not {samples}" if samples is not None else ": use fewer clients")
        )
    return train, test


def _cluster(name: str, cluster: Any) -> int:
    try:
        return operator.index(cluster)
    except TypeError:
        raise UsageError(f"truth of client {name!r} is the number of its cluster, not {cluster!r}") from None


def _own(name: str, pair: Any, held: Any, randomness: Randomness) -> Shard:
    features, labels = _labelled(name, pair)
    if held is not None:
        return Shard(features, labels, *_labelled(name, held, features.shape[1:]))
    order = randomness.generator("split", name).permutation(len(labels))
    train = len(labels) - len(labels) // 5
    keep, out = order[:train], order[train:]
    return Shard(features[keep], labels[keep], features[out], labels[out])


def _labelled(name: str, pair: Any, shape: tuple[int, ...] | None = None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """A user's (X, y) as arrays; held-out samples (`shape` given) may be none at all."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"client {name!r}: its samples are a pair (X, y)")
    try:
        features, labels = np.asarray(pair[0], dtype=np.float32), np.asarray(pair[1])
    except (ValueError, TypeError):
        raise UsageError(f"client {name!r}: its samples are not a rectangular array of numbers") from None
    if shape is not None and not features.size and not labels.size:
        return np.empty((0, *shape), np.float32), np.empty(0, np.int64)
    if labels.size and not np.issubdtype(labels.dtype, np.integer):
        raise UsageError(f"client {name!r}: labels are class numbers (integers from 0), not {labels.dtype}")
    if features.ndim < 2 or not features.shape[1] or labels.shape != features.shape[:1]:
        raise UsageError(f"client {name!r}: X {features.shape} and y {labels.shape} must have one label per sample of at least one feature")
    return features, labels.astype(np.int64)


def _check(names: Sequence[str], shards: Sequence[Shard], classes: int) -> None:
    for name, shard in zip(names, shards, strict=True):
        if not len(shard.y):
            raise UsageError(f"client {name!r} has no training samples: leave it out, or give it some")
        if shard.x.shape[1:] != shards[0].x.shape[1:] or (len(shard.y_test) and shard.x_test.shape[1:] != shards[0].x.shape[1:]):
            raise UsageError(
                f"client {name!r}: its samples have shape {shard.x.shape[1:]}, those of {names[0]!r} have {shards[0].x.shape[1:]}"
            )
        if len(shard.x_test) != len(shard.y_test):
            raise UsageError(f"client {name!r}: {len(shard.x_test)} test samples have {len(shard.y_test)} labels")
        if not (np.isfinite(shard.x).all() and np.isfinite(shard.x_test).all()):
            raise UsageError(f"client {name!r}: a feature is NaN or infinite: clean the data first")
        if min(shard.y.min(), shard.y_test.min(initial=0)) < 0 or max(shard.y.max(), shard.y_test.max(initial=0)) >= classes:
            raise UsageError(f"client {name!r}: a label lies outside 0 … {classes - 1}")


__all__ = ["SCENARIOS", "Federation", "Iid", "LabelSwap", "Shard", "fingerprint", "scenario"]
