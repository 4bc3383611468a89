"""Federations of the same clients with other data: of all samples, or of one example each.

A mistake shows where a choice falls otherwise or a statistic moves. So there are several kinds of
other data: random samples, samples that are all alike, the opposite of what clients have, all
classes in equal numbers, and, where whole clients are protected, fewer and more samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.data.federation import Shard
from securecluster.protocols import authoring as fl

Array = NDArray[Any]
FEWEST = 4  # samples of a client that has few
OUTLIER = 1000.0  # times a feature of an example that is far from all others


def other_data(federation: fl.Federation, seed: int = 1) -> fl.Federation:
    """Return the same clients with random samples, and with labels in other proportions.

    Args:
        federation: the clients and their data.
        seed: of the samples.
    """
    draw = np.random.default_rng(seed)
    classes = federation.classes

    def shard(original: Shard, position: int) -> Shard:
        x = _random_samples(original.x, classes, draw)
        y = _random_targets(original.y, classes, draw)
        x_test = _random_samples(original.x_test, classes, draw)
        y_test = _random_targets(original.y_test, classes, draw)
        return replace(original, x=x, y=y, x_test=x_test, y_test=y_test)

    return _each(federation, shard)


def other_clients(federation: fl.Federation, unit: str) -> list[fl.Federation]:
    """Return the same clients with other data, of several kinds.

    Numbers of samples are others, too, where they are private: under the unit "client".

    Args:
        federation: the clients and their data.
        unit: "client" or "example".
    """
    worlds = [other_data(federation), alike(federation), opposite(federation), balanced(federation)]
    if unit == "client":
        smaller = resized(other_data(federation, seed=2), lambda n, k: max(FEWEST, n // 4 + k % 3))
        larger = resized(other_data(federation, seed=3), lambda n, k: 2 * n + 1 + k % 3)
        worlds += [smaller, larger]
    return worlds


def alike(federation: fl.Federation) -> fl.Federation:
    """Return clients all of whose samples are their first one, of one class.

    Args:
        federation: the clients and their data.
    """

    def shard(original: Shard, position: int) -> Shard:
        x = np.repeat(original.x[:1], len(original.x), axis=0)
        y = np.repeat(original.y[:1], len(original.y), axis=0)
        if y.dtype.kind != "f":
            y = np.zeros_like(y)
        return replace(original, x=x, y=y)

    return _each(federation, shard)


def opposite(federation: fl.Federation) -> fl.Federation:
    """Return clients with low features where theirs are high, and with all labels of the last
    class.

    Args:
        federation: the clients and their data.
    """

    def shard(original: Shard, position: int) -> Shard:
        y = _mirrored(original.y)
        if y.dtype.kind != "f":
            y = np.full_like(y, federation.classes - 1)
        return replace(original, x=_mirrored(original.x), y=y)

    return _each(federation, shard)


def balanced(federation: fl.Federation) -> fl.Federation:
    """Return clients with samples of each other, and with all classes in equal numbers.

    Args:
        federation: the clients and their data.
    """
    shards = federation.shards

    def shard(original: Shard, position: int) -> Shard:
        next_one = shards[(position + 1) % len(shards)]
        rows = np.arange(len(original.x))[::-1] % len(next_one.x)
        y = next_one.y[rows]
        if y.dtype.kind != "f":
            classes = np.arange(y.size) % federation.classes
            y = classes.reshape(y.shape).astype(y.dtype)
        return replace(original, x=next_one.x[rows], y=y)

    return _each(federation, shard)


def resized(federation: fl.Federation, size: Callable[[int, int], int]) -> fl.Federation:
    """Return clients with other numbers of samples, which are theirs again and again.

    Args:
        federation: the clients and their data.
        size: new number of samples by the old one and the client's position.
    """

    def shard(original: Shard, position: int) -> Shard:
        rows = np.arange(size(len(original.x), position)) % len(original.x)
        return replace(original, x=original.x[rows], y=original.y[rows])

    return _each(federation, shard)


def changed_examples(federation: fl.Federation) -> dict[str, fl.Federation]:
    """Return clients each of whom has one other example, by what is done to it.

    All of these change the same example of a client, so that any two of them are neighbours.

    Args:
        federation: the clients and their data.
    """
    classes = federation.classes
    changes: Mapping[str, Callable[[Array, Array, Array], tuple[Array, Array]]] = {
        "blank": lambda x, y, others: (np.zeros_like(x), y),
        "class": lambda x, y, others: (x, _other_target(y, others, classes)),
        "negative": lambda x, y, others: (_mirrored_example(x, classes), y),
        "outlier": lambda x, y, others: (_far_example(x, classes), y),
    }
    return {name: _one_example(federation, change) for name, change in changes.items()}


def blank(federation: fl.Federation) -> fl.Federation:
    """Return clients all of whose samples are zeros, with their labels.

    Args:
        federation: the clients and their data.
    """

    def shard(original: Shard, position: int) -> Shard:
        return replace(original, x=np.zeros_like(original.x))

    return _each(federation, shard)


def _each(federation: fl.Federation, shard: Callable[[Shard, int], Shard]) -> fl.Federation:
    """Return the clients with other shards, of each one's shard and position."""
    shards = tuple(shard(original, k) for k, original in enumerate(federation.shards))
    return replace(federation, shards=shards)


def _one_example(
    federation: fl.Federation, change: Callable[[Array, Array, Array], tuple[Array, Array]]
) -> fl.Federation:
    """Return the clients, of whom each has one example changed: another one at each."""

    def shard(original: Shard, position: int) -> Shard:
        x = np.array(original.x)
        y = np.array(original.y)
        row = position % len(x)
        x[row], y[row] = change(x[row], y[row], original.y)
        return replace(original, x=x, y=y)

    return _each(federation, shard)


def _random_samples(x: Array, classes: int, draw: np.random.Generator) -> Array:
    """Return random features in [0, 1), or random tokens."""
    if x.dtype.kind in "iu":
        return draw.integers(classes, size=x.shape).astype(x.dtype)
    return draw.random(x.shape).astype(x.dtype)


def _random_targets(y: Array, classes: int, draw: np.random.Generator) -> Array:
    """Return labels or tokens of which some are frequent and others are not; targets permuted."""
    if y.dtype.kind == "f":
        return draw.permutation(y)
    shares = draw.dirichlet(np.full(classes, 0.5))
    return draw.choice(classes, size=y.shape, p=shares).astype(y.dtype)


def _mirrored(values: Array) -> Array:
    """Return values that are low where the given ones are high, in the same range."""
    if not values.size:
        return values
    mirrored: Array = values.max() + values.min() - values
    return mirrored


def _mirrored_example(x: Array, classes: int) -> Array:
    """Return the negative of an example's features, or its last tokens first."""
    return x[::-1] if x.dtype.kind in "iu" else -x


def _far_example(x: Array, classes: int) -> Array:
    """Return an example that is far from all others; of tokens, one token again and again."""
    if x.dtype.kind in "iu":
        return np.full_like(x, classes - 1)
    signs = np.where(np.arange(x.size) % 2, 1, -1).reshape(x.shape)
    outlier: Array = (OUTLIER * signs).astype(x.dtype)
    return outlier


def _other_target(y: Array, others: Array, classes: int) -> Array:
    """Return another target: of a class that its client has not, if there is one."""
    if y.dtype.kind == "f":
        return -y
    absent = np.setdiff1d(np.arange(classes), others)
    if absent.size and not y.ndim:
        return absent[0]  # type: ignore[no-any-return]
    shifted: Array = (y + 1) % classes
    return shifted
