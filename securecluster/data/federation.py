"""Federations: clients with their samples, and what is known of the true clusters."""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.randomness import Randomness
from securecluster.data import plausibility
from securecluster.data.datasets import Source, is_bright, source
from securecluster.data.feature_columns import Columns, listed, order, reordered
from securecluster.data.pools import Labels, Pool
from securecluster.data.scenario_base import numbered, spread
from securecluster.data.scenarios import Iid, LabelSwap, Natural, Scenario, Topics, arrange
from securecluster.data.scenarios import scenario as scenario_named
from securecluster.data.user_arrays import (
    Pair,
    by_name,
    outputs,
    own_samples,
    read_pair,
    stream,
)
from securecluster.data.user_parquet import read_clients
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import CLASSIFICATION, Classification, Objective

OWN = "own"  # the scenario of users' own data


@dataclass(frozen=True, repr=False)
class Shard:
    """One client's samples: x (n, …) and y (n, …) to train on, x_test and y_test held out.

    There may be none held out. For classification x is float32 and y (n,) int64; for text both are
    int64 tokens (n, L); for trajectories both are float32.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]

    def __repr__(self) -> str:
        """Return the sizes and shapes, never the samples."""
        held = f"{len(self.y_test)} held out"
        return f"<Shard: {len(self.y)} samples of shape {self.x.shape[1:]}, {held}>"


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients and their data; `truth` holds each client's true cluster where it is known.

    `classes` is the number of outputs: classes, tokens of the vocabulary, or coordinates of a
    position. `feature_names` are the columns that samples are made of, where they have names: one
    for each feature, or the one column of images or lists.

    Build one with `simulate`, `from_arrays` or `from_parquet`.
    """

    names: tuple[str, ...]
    shards: tuple[Shard, ...]
    classes: int
    seed: int
    truth: tuple[int, ...] | None = None
    data: str = "arrays"
    scenario: str = OWN
    objective: Objective = CLASSIFICATION
    feature_names: tuple[str, ...] | None = None
    recipe: Mapping[str, Any] | None = field(default=None, compare=False)
    """The arguments of `simulate` or `from_parquet` that make this federation again; None where
    there are none.
    """

    def __post_init__(self) -> None:
        _check(self.names, self.shards, self.classes, self.objective)
        if self.feature_names is not None and len(self.feature_names) not in (1, self.shape[0]):
            raise UsageError(
                f"{len(self.feature_names)} feature names do not fit samples of shape "
                f"{self.shape}: give one for each feature"
            )

    def __repr__(self) -> str:
        """Return what the federation holds in one line, never the samples."""
        train = sum(len(shard.y) for shard in self.shards)
        held = sum(len(shard.y_test) for shard in self.shards)
        outputs = "classes" if self.objective.kind == Classification.kind else "outputs"
        parts = [
            f"{len(self)} clients",
            f"{train} training and {held} test samples of shape {self.shape}",
            f"{self.classes} {outputs}",
            f"seed {self.seed}",
        ]
        if self.feature_names is not None:
            parts.append(f"features {listed(self.feature_names, 12)}")
        return f"<Federation {self.data} ({self.scenario}): {', '.join(parts)}>"

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        return self.shards[0].x.shape[1:]

    @property
    def bright(self) -> bool:
        """Return whether the images are so bright that training needs a lower learning rate.

        It is known of the named image sets in a scenario, and not of users' own data.
        """
        return self.scenario != OWN and is_bright(self.data, self.scenario)

    @classmethod
    def simulate(
        cls,
        data: str | Source = "digits",
        *,
        scenario: Scenario | str | None = None,
        clients: int = 20,
        samples: int | None = None,
        seed: int,
    ) -> Federation:
        """Deal a data set to clients; only the samples that are dealt are decoded.

        Args:
            data: a name in `SOURCES`, or a source of your own.
            scenario: how clusters differ, as an object or by its name on the command line
                ("label-swap", "tasks+rotation"); by default label swap in four clusters, the set's
                own clients where it has some (femnist, shakespeare, mobility), and four topics
                where its samples lie in groups (ag_news).
            samples: training samples per client, with up to a quarter as many for testing; None
                deals as many as the scenario allows. Test samples come from the set's test pool
                where it has one, else from its only pool.
            seed: of every draw, here and in the runs on this federation.

        Raises:
            UsageError: an unknown name, data that cannot be read, or more samples, clients or
                clusters than can be dealt.
        """
        data_set = source(data) if isinstance(data, str) else data
        randomness = Randomness(seed)
        if clients < 1:
            raise UsageError(f"{clients} clients cannot hold data: ask for at least two")
        kind = _scenario(scenario, data_set)
        partitioner, transforms = arrange(kind, Iid(), data_set, clients)
        partition = partitioner.deal(data_set, clients, samples, randomness)
        trains = _read(data_set.train, partition.train)
        test_pool = data_set.train if data_set.test is None else data_set.test
        tests = _read(test_pool, partition.test)
        # each client's cluster by the partition, then by each transform
        clusters = [np.zeros(clients, np.int64)]
        if partition.clusters is not None:
            clusters = [numbered([partition.clusters])]
        for transform in transforms:
            clusters.append(spread(numbered(clusters), transform.clusters, randomness))
            for k, cluster in enumerate(clusters[-1].tolist()):
                # in place: a copy of the whole data set would double the memory
                for x, y in (trains[k], tests[k]):
                    x[:], y[:] = transform.transform(cluster, x, y, data_set.classes, randomness)
        shards = [Shard(*train, *test) for train, test in zip(trains, tests, strict=True)]
        truth = None
        if partition.clusters is not None or transforms:
            truth = tuple(numbered(clusters).tolist())
        recipe = None
        if isinstance(data, str):
            recipe = {
                "data": data,
                "scenario": kind,
                "clients": clients,
                "samples": samples,
                "seed": seed,
            }
        return cls(
            partition.names or tuple(str(k) for k in range(clients)),
            tuple(shards),
            data_set.classes,
            seed,
            truth,
            data_set.name,
            str(kind),
            data_set.objective,
            recipe=recipe,
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
        """Return a federation of your own arrays: name -> (X, y).

        X (n, …) are numbers and y (n,) class numbers from 0. Tables (pandas, polars, pyarrow) have
        their columns matched by name, in the order of the first client's; then all clients' X are
        tables, held-out ones too. Labels may also be truth values, whole floats or one column
        (n, 1). A SecureClusterWarning names what works but is probably not meant: columns on a
        large or tiny scale, ids among the features, or labels that do not start at 0.

        Args:
            clients: each client's samples by its name.
            test: held-out samples by the same names; without it a fifth of each client's samples is
                held out at random, of sequences the last fifth.
            truth: each client's true cluster, where it is known.
            objective: what is learned. `Language()`: X and y (n, L) tokens, y the next one at each
                place; `Trajectory(metres)`: X (n, T, k) past positions and y (n, k) the next one.
            classes: outputs of the network, such as the vocabulary; None is one more than the
                largest label or token that occurs. A largest label far beyond the number of
                different labels is refused then; a number given here is taken as it is.
            seed: of every draw, here and in the runs on this federation.

        Raises:
            UsageError: no client, two of one name, a client without samples, mismatched shapes or
                columns, values that are not finite, or labels below zero.
        """
        given = _GivenArrays(clients, test, truth, objective, classes, leave="leave it out of X")
        federation, doubts = _gathered(given, seed)
        for doubt in doubts:
            warnings.warn(doubt, SecureClusterWarning, stacklevel=2)
        return federation

    @classmethod
    def from_parquet(
        cls,
        path: str | Path,
        *,
        client_column: str,
        label_column: str,
        truth_column: str | None = None,
        feature_columns: Sequence[str] | None = None,
        drop_columns: Sequence[str] = (),
        seed: int,
    ) -> Federation:
        """Return a federation of your own parquet file, or of all parquet files of a folder.

        The files of a folder are read in the order of their names. Features are an image column
        (encoded images, or structs with a field `bytes`) alone, else a column of equally long lists
        alone, else all other columns, which must be numbers, in the order of the file. Labels of
        any type become class numbers in ascending order. Clients are
        ordered by name, and a fifth of each client's rows is held out at random.

        Args:
            path: of the file or the folder.
            client_column: the column that names each row's client.
            label_column: the column to learn.
            truth_column: each client's true cluster, where it is known: one value per client.
            feature_columns: the columns that are features, in this order; None is all that are
                left.
            drop_columns: columns that are no features, such as row numbers.
            seed: of every draw, here and in the runs on this federation.

        Raises:
            UsageError: a file, column or value that cannot be used, or a client with a single row.
        """
        table = read_clients(
            Path(path), client_column, label_column, truth_column, feature_columns, drop_columns
        )
        given = _GivenArrays(
            table.clients,
            truth=table.truth,
            columns=table.columns,
            leave="leave it out (drop_columns)",
        )
        federation, doubts = _gathered(given, seed)
        for doubt in doubts:
            warnings.warn(doubt, SecureClusterWarning, stacklevel=2)
        recipe = {
            "path": str(Path(path).resolve()),
            "client_column": client_column,
            "label_column": label_column,
            "truth_column": truth_column,
            "feature_columns": feature_columns,
            "drop_columns": drop_columns,
            "seed": seed,
        }
        return replace(federation, data=Path(path).resolve().stem, recipe=recipe)

    def with_features(self, names: Sequence[str]) -> Federation:
        """Return the federation with its named features in another order.

        Raises:
            UsageError: its features have no names, or other ones.
        """
        if self.feature_names is None:
            raise UsageError(
                "the features of this federation have no names: it cannot be put in the order "
                f"{listed(names)}"
            )
        refusal = "the federation has other features than it should have"
        places = order(self.feature_names, names, refusal)
        if places == list(range(len(places))):
            return self
        shards = []
        for shard in self.shards:
            x = reordered(shard.x, places)
            x_test = reordered(shard.x_test, places)
            shards.append(replace(shard, x=x, x_test=x_test))
        return replace(self, shards=tuple(shards), feature_names=tuple(names), recipe=None)

    def select(self, clients: Sequence[int]) -> Federation:
        """Return the federation of some of the clients, in this order.

        The other clients can join later (`ClusteringProtocol.predict`).

        Raises:
            UsageError: a number that is no client's, or one twice.
        """
        distinct = set(clients)
        if len(distinct) < len(clients) or not distinct <= set(range(len(self))):
            raise UsageError(
                f"clients are numbers from 0 to {len(self) - 1}, each once: {list(clients)[:5]} …"
            )
        names = tuple(self.names[i] for i in clients)
        shards = tuple(self.shards[i] for i in clients)
        truth = None
        if self.truth is not None:
            truth = tuple(self.truth[i] for i in clients)
        return replace(self, names=names, shards=shards, truth=truth, recipe=None)

    def digest(self) -> str:
        """Return a fingerprint of all samples, in hex: a resumed run refuses other data."""
        total = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            total.update(fingerprint(shard))
        return total.hexdigest()


@dataclass(frozen=True)
class _GivenArrays:
    """Users' own arrays, as `from_arrays` takes them.

    Args:
        columns: the columns that samples are made of, where the arrays do not say.
        leave: in words, how a user leaves a column out.
    """

    clients: Any
    test: Any = None
    truth: Any = None
    objective: Objective = CLASSIFICATION
    classes: int | None = None
    columns: tuple[str, ...] | None = None
    leave: str = ""


def _gathered(given: _GivenArrays, seed: int) -> tuple[Federation, list[str]]:
    """Return a federation of users' own arrays, and doubts about what may not be meant."""
    objective = given.objective
    if not isinstance(objective, Objective):
        raise UsageError(
            f"objective = {objective!r} is none: pass Classification(), Language() or "
            "Trajectory(metres)"
        )
    clients = by_name("clients", given.clients)
    if not clients:
        raise UsageError("a federation needs clients: pass {name: (X, y)}")
    held_out = {} if given.test is None else by_name("test", given.test)
    clusters = {} if given.truth is None else by_name("truth", given.truth)
    if given.test is not None:
        _check_same_clients("test", held_out, clients)
    if given.truth is not None:
        _check_same_clients("truth", clusters, clients)
    columns = Columns()
    pairs = {name: read_pair(name, pair, columns) for name, pair in clients.items()}
    tests = {name: read_pair(name, pair, columns) for name, pair in held_out.items()}
    randomness = Randomness(seed)
    splits = []
    # a client's random split is drawn by its key as the user has it, not as text
    for (name, pair), key in zip(pairs.items(), given.clients, strict=True):
        split = own_samples(name, pair, tests.get(name), objective, randomness, stream(key))
        splits.append(split)
    features = columns.names if given.columns is None else given.columns
    classes, doubts = _count_outputs(given, splits)
    truth = None
    if given.truth is not None:
        truth = tuple(_cluster(name, clusters[name]) for name in clients)
    federation = Federation(
        tuple(clients),
        tuple(Shard(*train, *held) for train, held in splits),
        classes,
        seed,
        truth,
        objective=objective,
        feature_names=features,
    )
    if objective.kind == Classification.kind:
        samples = [x for x, _ in pairs.values()]
        doubts += plausibility.feature_doubts(samples, features, given.leave)
    return federation, doubts


def _check_same_clients(what: str, other: Mapping[str, Any], clients: Mapping[str, Any]) -> None:
    """Raise UsageError where a mapping has other clients than the training samples."""
    if set(other) != set(clients):
        odd = sorted(set(other) ^ set(clients))[:3]
        raise UsageError(f"{what} must have an entry for every client and no other: check {odd}")


def _count_outputs(
    given: _GivenArrays, splits: Sequence[tuple[Pair, Pair]]
) -> tuple[int, list[str]]:
    """Return the number of outputs, counted where the user gives none, and doubts about it."""
    if given.classes is not None:
        return given.classes, []
    targets = []
    for train, held in splits:
        targets += [train, held]
    if given.objective.kind == Classification.kind:
        return plausibility.count_classes([y for _, y in targets])
    return outputs(targets, given.objective), []


def _scenario(given: Any, data: Source) -> Scenario:
    """Return the scenario that a user gives by name or as an object.

    Without one it is the data set's own.
    """
    if given is None:
        return _default(data)
    if isinstance(given, str):
        return scenario_named(given)
    if not isinstance(given, Scenario):
        raise UsageError(
            f"scenario = {given!r} is none: give a name such as 'label-swap', or an object such as "
            "LabelSwap()"
        )
    return given


def fingerprint(shard: Shard) -> bytes:
    """Return a hash of one client's samples."""
    total = hashlib.blake2b(digest_size=16)
    for part in (shard.x, shard.y, shard.x_test, shard.y_test):
        total.update(f"{part.shape}{part.dtype}".encode())
        total.update(np.ascontiguousarray(part).tobytes())
    return total.digest()


def _default(given: Source) -> Scenario:
    """Return the scenario of a source where none is named."""
    if given.train.owners is not None:
        return Natural()
    if given.train.groups is not None:
        return Topics()
    if given.objective.kind == Classification.kind:
        return LabelSwap()
    return Iid()


def _read(pool: Pool, rows_of: Sequence[Labels]) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return each client's samples and targets, views into one array that holds all of them."""
    rows = np.concatenate(rows_of)
    ends = np.cumsum([len(own) for own in rows_of])[:-1]
    samples = np.split(pool.read(rows), ends)
    targets = np.split(pool.y[rows], ends)
    return list(zip(samples, targets, strict=True))


def _cluster(name: str, cluster: Any) -> int:
    """Return the number of a client's true cluster as an integer."""
    try:
        return operator.index(cluster)
    except TypeError:
        raise UsageError(
            f"truth of client {name!r} is the number of its cluster, not {cluster!r}: number the "
            "clusters from 0"
        ) from None


def _check(
    names: Sequence[str], shards: Sequence[Shard], classes: int, objective: Objective
) -> None:
    """Raise UsageError where samples cannot be trained on, naming their client."""
    if isinstance(classes, bool) or not isinstance(classes, Integral) or classes < 1:
        raise UsageError(
            f"classes = {classes!r}: the number of outputs is a whole number from 1, or left out"
        )
    for name, shard in zip(names, shards, strict=True):
        if not len(shard.y):
            raise UsageError(
                f"client {name!r} has no training samples: leave it out, or give it some"
            )
        _check_shape(name, "samples", shard.x, names[0], shards[0].x)
        if len(shard.y_test):
            _check_shape(name, "test samples", shard.x_test, names[0], shards[0].x)
        if len(shard.x_test) != len(shard.y_test):
            raise UsageError(
                f"client {name!r}: {len(shard.x_test)} test samples have {len(shard.y_test)} labels"
            )
        if not (np.isfinite(shard.x).all() and np.isfinite(shard.x_test).all()):
            raise UsageError(f"client {name!r}: a feature is NaN or infinite: clean the data first")
        objective.check(name, shard.x, shard.y, classes)
        if len(shard.y_test):
            objective.check(name, shard.x_test, shard.y_test, classes)


def _check_shape(
    name: str, what: str, samples: NDArray[Any], first_name: str, first: NDArray[Any]
) -> None:
    """Raise UsageError where a client's samples have another shape than the first client's."""
    if samples.shape[1:] != first.shape[1:]:
        raise UsageError(
            f"client {name!r}: its {what} have shape {samples.shape[1:]}, those of "
            f"{first_name!r} have {first.shape[1:]}"
        )
