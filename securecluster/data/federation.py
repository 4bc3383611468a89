"""Federations: clients with their samples and, if they are known, their true clusters.

All rows that clients get are read into one array, of which clients hold views, and transforms work
in place: a data set lies in memory once.
"""

from __future__ import annotations

import hashlib
import operator
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core import summaries
from securecluster.core.client_names import Client, ClientNames, names_of
from securecluster.core.randomness import Randomness
from securecluster.core.validation import AtLeast, check_seed
from securecluster.data import class_names, plausibility
from securecluster.data.class_names import ClassName
from securecluster.data.datasets import MEANS, Source, is_bright, named, source
from securecluster.data.facts import TASK_OF_DATA, ClientFacts, Facts, Form, classes_of_labels
from securecluster.data.feature_columns import Columns, listed, order, reordered
from securecluster.data.pools import Labels, Pool
from securecluster.data.scaling import (
    FIRST,
    LAST,
    NONE,
    Categories,
    Scale,
    Scaling,
    chosen_categories,
    is_shared,
)
from securecluster.data.scenario_base import Partition, Transform, numbered, spread
from securecluster.data.scenarios import Iid, LabelSwap, Natural, Scenario, Topics, arrange
from securecluster.data.scenarios import scenario as scenario_named
from securecluster.data.splits import Split
from securecluster.data.user_arrays import (
    Pair,
    by_group,
    by_name,
    in_order_of_x,
    keyed,
    outputs,
    own_samples,
    own_split,
    read_pair,
    scaled_targets,
    stream,
    weights_of,
)
from securecluster.errors import SecureClusterWarning, UsageError
from securecluster.models.objectives import (
    CLASSIFICATION,
    Binary,
    Classification,
    Objective,
    Regression,
    task_name,
    task_of,
)

if TYPE_CHECKING:
    from securecluster.data.tables.clients import ClientColumns, Roles

OWN = "own"  # name of the scenario of users' own data
# what the outputs are for, by the kind of the objective
UNITS = {"classification": "classes", "regression": "targets", "multilabel": "labels"}


@dataclass(frozen=True, repr=False)
class Shard:
    """One client's samples.

    For classification x is float32 and y (n,) int64; for text both are int64 tokens (n, L); for
    trajectories both are float32, and so they are for other tasks, with y (n, k).

    Args:
        x: samples to train on (n, …).
        y: targets to train on (n, …).
        x_test: held-out samples (n_test, …), of which there may be none.
        y_test: held-out targets (n_test, …).
        scale: that the samples were brought to, which may tell of this client's data; None for the
            scale that they came in.
        seen: the smallest and the largest value of each column of a table to train on, before the
            scale (2, k), which tell of this client's data; None for samples that are no table.
        target: scale that the client standardised its targets by; None for other targets.
        weights: factors of the losses of the samples to train on (n,), taken as public; None for 1.
        gaps: which numbers of x were missing (n, f), where the run is to fill them; None elsewhere.
        gaps_test: likewise of x_test.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    x_test: NDArray[Any]
    y_test: NDArray[Any]
    scale: Scale | None = None
    seen: NDArray[Any] | None = field(default=None, compare=False)
    target: Scale | None = None
    weights: NDArray[np.float64] | None = None
    gaps: NDArray[Any] | None = field(default=None, compare=False)
    gaps_test: NDArray[Any] | None = field(default=None, compare=False)

    @property
    def samples(self) -> NDArray[Any]:
        """Return x with NaN for what was missing, where the run is to fill it."""
        return self.x if self.gaps is None else np.where(self.gaps, np.nan, self.x)

    @property
    def test_samples(self) -> NDArray[Any]:
        """Return x_test with NaN for what was missing, where the run is to fill it."""
        return (
            self.x_test if self.gaps_test is None else np.where(self.gaps_test, np.nan, self.x_test)
        )

    def __repr__(self) -> str:
        """Return the sizes and shapes, never the samples."""
        shape = self.x.shape[1:]
        test_size = len(self.y_test)
        return f"<Shard: {len(self.y)} samples of shape {shape}, {test_size} held out>"

    @property
    def unit(self) -> float:
        """Return the deviation of targets that the client has standardised; 1 for other ones."""
        return 1.0 if self.target is None else self.target.width[0]


@dataclass(frozen=True, repr=False)
class Federation:
    """Clients and their data.

    Build one with `simulate`, `from_arrays`, `from_frame`, `from_csv` or `from_parquet`.

    Args:
        names: of the clients, which differ in more than blanks.
        shards: samples of each client.
        classes: number of outputs: classes, tokens of the vocabulary, or coordinates of a position.
        seed: of the runs on this federation.
        truth: true cluster of each client, or None if it is unknown.
        data: name of the data set.
        scenario: name of the scenario.
        objective: of training.
        feature_names: names of the features, or of the one column of images or lists; None if the
            columns have no names.
        class_names: the labels as they came, in the order of the class numbers; None where they
            were class numbers.
        classes_counted: whether the classes, or their number, were read from the clients' labels.
        scaling: how the features were scaled; None for the scale that they came in.
        recipe: options of `Simulation` that make this federation again, or None.
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
    class_names: tuple[ClassName, ...] | None = None
    # not compared: the same data are equal, however they were made
    classes_counted: bool = field(default=False, compare=False)
    scaling: Scaling | None = None
    recipe: Mapping[str, Any] | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        object.__setattr__(self, "names", names_of(self.names))
        _check(self)
        if self.feature_names is None:
            return
        count = len(self.feature_names)
        width = self.shape[0]
        if self.scaling is not None and self.scaling.categories:
            width = len(self.scaling.categories)
        # images and lists are one column with one name
        if count not in (1, width):
            raise UsageError(
                f"{count} feature names do not fit samples of shape {self.shape}: give one for "
                "each feature"
            )

    def __repr__(self) -> str:
        """Return a summary in one line, never the samples."""
        return summaries.line(f"Federation {self.data} ({self.scenario})", self._summary())

    def _repr_html_(self) -> str:
        """Return a summary for notebooks, never the samples."""
        facts = self._summary() | {"names": listed(self.names, 12)}
        return summaries.table(f"Federation {self.data} ({self.scenario})", facts)

    def _summary(self) -> dict[str, str]:
        """Return what is public of the clients and their data, in words."""
        train_size = sum(len(shard.y) for shard in self.shards)
        test_size = sum(len(shard.y_test) for shard in self.shards)
        unit = UNITS.get(self.objective.kind, "outputs")
        targets = f"{self.classes} {unit}"
        if self.objective.kind == Binary.kind:
            targets = "2 classes"
        if self.class_names is not None:
            targets += f" ({listed([str(name) for name in self.class_names], 12)})"
        facts = {
            "clients": f"{len(self)} clients",
            "samples": f"{train_size} training and {test_size} test samples of shape {self.shape}",
            "targets": targets,
            "seed": f"seed {self.seed}",
        }
        if self.feature_names is not None:
            facts["features"] = f"features {listed(self.feature_names, 12)}"
        return facts

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample."""
        return self.shards[0].x.shape[1:]

    @property
    def facts(self) -> Facts:
        """Return what is public of the clients and their data, numbers of samples included."""
        first = self.shards[0]
        return Facts(
            clients=len(self),
            x=Form.of(first.x),
            y=Form.of(first.y),
            classes=self.classes,
            seed=self.seed,
            objective=self.objective,
            feature_names=self.feature_names,
            class_names=self.class_names,
            scaling=None if self.scaling is None else self.scaling.as_json(),
            bright=self.bright,
            mean=self.mean,
            samples=tuple(len(shard.y) for shard in self.shards),
            classes_counted=self.classes_counted,
        )

    def facts_of(self, client: int, samples: bool = False, classes: bool = False) -> ClientFacts:
        """Return what one client tells of its data before a run on many machines.

        Args:
            client: its position.
            samples: tell its number of training samples.
            classes: tell how many outputs its data need.

        Raises:
            UsageError: classes that were named by the data, so that their names would tell which
                labels the client has.
        """
        if self.classes_counted and not self.objective.one_label:
            raise UsageError(f"{TASK_OF_DATA}: say it, as every client does (task)")
        if self.class_names is not None and self.classes_counted:
            shown = listed([repr(name) for name in self.class_names or ()])
            raise UsageError(
                f"the classes have the names that occur in the data ({shown}), and to tell them "
                "would say which labels this client has: give the names of all classes, as every "
                "client does (classes=[...])"
            )
        if self.scaling is not None and self.scaling.counted:
            raise UsageError(
                "the categories are those that occur in the data, and to tell them would say which "
                "ones this client has: give those of all clients, prepare={'sex': ['female', "
                "'male']}"
            )
        shard = self.shards[client]
        pairs = [(shard.x, shard.y), (shard.x_test, shard.y_test)]
        return ClientFacts(
            x=Form.of(shard.x),
            y=Form.of(shard.y),
            objective=self.objective.as_json(),
            classes=outputs(pairs, self.objective) if classes else None,
            feature_names=self.feature_names,
            class_names=self.class_names,
            scaling=None if self.scaling is None else self.scaling.as_json(),
            bright=self.bright,
            mean=self.mean,
            samples=len(shard.y) if samples else None,
        )

    @property
    def bright(self) -> bool:
        """Return True if images are so bright that training needs a lower learning rate.

        This is public: it depends on the names of the data set and the scenario only, and is False
        for users' own data.
        """
        if self.scenario == OWN:
            return False
        return is_bright(self.data, self.scenario)

    @property
    def mean(self) -> float | None:
        """Return the mean number of a sample of a known data set; None for users' own data.

        This is public: it depends on the name of the data set only.
        """
        if self.scenario == OWN:
            return None
        return MEANS.get(self.data)

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
        """Return a federation of simulated clients that share a data set.

        Only the samples that clients get are decoded.

        Args:
            data: a name in `SOURCES`, a source of your own, or "module:function" of a function that
                returns one.
            scenario: how clusters differ, as an object or by its name on the command line
                ("label-swap", "tasks+rotation"). The default is label swap in four clusters, the
                set's own clients if it has some (femnist, shakespeare, mobility), or four topics if
                its samples have groups (ag_news).
            clients: number of clients.
            samples: training samples per client, with up to a quarter as many for testing; None is
                as many as the scenario allows. Test samples are from the set's test pool, or from
                its only pool.
            seed: of every public draw, here and in the runs on this federation; keys, masks and
                noise follow from a secret of each run.

        Raises:
            UsageError: an unknown name, data that cannot be read, or more samples, clients or
                clusters than the data set allows.
        """
        data_set = data
        if isinstance(data_set, str):
            data = named(data_set)
            data_set = source(data)
        if not AtLeast(1).holds(clients):
            raise UsageError(f"{clients} clients cannot hold data: ask for a whole number from 2")
        randomness = _draws(seed)
        chosen = _scenario(scenario, data_set)
        partitioner, transforms = arrange(chosen, Iid(), data_set, clients)
        partition = partitioner.deal(data_set, clients, samples, randomness)
        shards = _read_shards(data_set, partition)
        truth = _transform_shards(shards, partition, transforms, data_set.classes, randomness)
        recipe = None
        # only a named data set can be made again
        if isinstance(data, str):
            recipe = {
                "data": data,
                "scenario": chosen,
                "clients": clients,
                "samples": samples,
                "seed": seed,
            }
        names = partition.names
        if not names:
            names = tuple(str(k) for k in range(clients))
        return cls(
            names=names,
            shards=shards,
            classes=data_set.classes,
            seed=seed,
            truth=truth,
            data=data_set.name,
            scenario=str(chosen),
            objective=data_set.objective,
            recipe=recipe,
        )

    @classmethod
    def from_arrays(  # noqa: PLR0913 (all but the clients and the seed may be left out)
        cls,
        clients: Mapping[Any, Any] | list[Any],
        *,
        test: Any = None,
        truth: Any = None,
        objective: Objective | str = CLASSIFICATION,
        weights: Mapping[Any, Any] | list[Any] | None = None,
        classes: int | Sequence[Any] | None = None,
        scaling: Any = "none",
        prepare: Any = None,
        channels: str = "first",
        seed: int,
    ) -> Federation:
        """Return a federation of your own arrays.

        X (n, …) contains numbers, and may be sparse (scipy); y (n,) contains class numbers from 0,
        or else text or booleans, which become class numbers in ascending order. y may also be one
        column (n, 1), or one-hot (n, k). Columns of tables (pandas, polars, pyarrow) are matched by
        name, in the order of the first client's; all clients' X must then be tables, held-out ones
        too. Where X and y both have an index (pandas), rows belong together by it, else by
        position. A SecureClusterWarning reports inputs that work but are probably not intended:
        columns on a large or tiny scale, ids among the features, labels that do not start at 0, or
        clients without test samples.

        Args:
            clients: samples (X, y) of each client by its name, which is text or a number; 3 and "3"
                are one name. A list of pairs calls clients by their positions. A torch Dataset,
                Subset or DataLoader of pairs (x, y) does in place of a pair.
            test: held-out samples by the same names; or which of a client's samples are held out: a
                share, booleans (n,) by the same names, or a `Split` by groups or time. None is a
                fifth, stratified by label where there are classes, and the last of sequences.
            truth: true cluster of each client by its name, a Series will do, or a list; None if it
                is unknown.
            weights: factors (n,) of the losses of each client's samples in training by the same
                names, from 0; None is 1 for all. They are taken as public, and scores count every
                sample the same.
            objective: of training. For `Regression()` y is one number a sample (n,) or several
                (n, k), for `MultiLabel()` several labels 0 or 1 (n, k), and for `Binary()` labels
                of two classes; "regression", "regression:huber", "multilabel" and "binary" are the
                same. For `Language()`, X and y (n, L) are tokens, y the next one at each position;
                for `Trajectory(metres)`, X (n, T, k) are past positions and y (n, k) the next one.
            classes: names of the classes, in the order of their class numbers; or the number of
                outputs of the network, such as the size of the vocabulary, which is not checked.
                None is all labels that occur, or one more than the largest label or token, and is
                refused if the largest label is far beyond the number of distinct labels.
            scaling: "none"; "client": each client standardises its features by the mean and the
                standard deviation of its own training samples, which stay with it, and shifts
                between clients are lost; or public bounds that become −1 and 1, a pair (low, high)
                for all features or for each column by its name, with values beyond them cut off;
                or ("shared", bounds), which the run brings to the mean and the deviation over all
                clients, by one sum of bounded numbers under its own protections; or
                ("shared-quantiles", bounds): likewise, to the median and the interquartile range.
            prepare: "auto" fills gaps, makes columns of 0 and 1 of categories (text) and days of
                dates, and scales numbers as `scaling` says, "client" unless it is given; the
                categories of columns by their names, {"sex": ["female", "male"]}, say which these
                are. So does a ColumnTransformer of OneHotEncoder and of pipelines of SimpleImputer
                and StandardScaler (scikit-learn), or such a pipeline alone; it is not fitted, but
                each client's own is made like it. Gaps among numbers become the client's median,
                the middle of its bounds, or the shared mean or median. It is a part of the model,
                as the scaling is.
            channels: "first" for images (channels, height, width), or "last" for (height, width,
                channels), as which predictions take them, too.
            seed: of every public draw, here and in the runs on this federation; keys, masks and
                noise follow from a secret of each run.

        Raises:
            UsageError: no client, two of one name, a client without samples, mismatched shapes,
                columns or indices, values that are not finite, or labels below zero.
        """
        arrays = _UserArrays(
            clients,
            test,
            truth,
            task_of(objective) or CLASSIFICATION,
            classes,
            advice="leave it out of X",
            scaling=scaling,
            channels=channels,
            prepare=chosen_categories(prepare),
            weights=weights,
        )
        return _warned(*_from_user_arrays(arrays, seed))

    @classmethod
    def from_groups(  # noqa: PLR0913 (all but the samples and the seed may be left out)
        cls,
        X: Any,  # noqa: N803
        y: Any,
        groups: Any,
        *,
        test: Any = None,
        objective: Objective | str = CLASSIFICATION,
        classes: int | Sequence[Any] | None = None,
        scaling: Any = "none",
        prepare: Any = None,
        seed: int,
    ) -> Federation:
        """Return a federation of samples of which each is said to be a client's.

        These are scikit-learn's arguments, and `fit(X, y, groups=groups)` of a protocol takes them
        with seed 0.

        Args:
            X: samples (n, …), as `from_arrays` takes them.
            y: their labels (n,).
            groups: name of the client of each sample (n,).
            test: as in `from_arrays`, with values (n,) of all samples.
            objective: as in `from_arrays`.
            classes: as in `from_arrays`.
            scaling: as in `from_arrays`.
            prepare: as in `from_arrays`.
            seed: as in `from_arrays`.

        Raises:
            UsageError: as `from_arrays`; or other numbers of samples, labels and groups.
        """
        split = Split.chosen(test)
        for name in split.given:
            parts = by_group(X, getattr(split, name), groups)
            split = split.with_values({client: values for client, (_, values) in parts.items()})
        arrays = _UserArrays(
            by_group(X, y, groups),
            split,
            objective=task_of(objective) or CLASSIFICATION,
            classes=classes,
            advice="leave it out of X",
            scaling=scaling,
            prepare=chosen_categories(prepare),
        )
        return _warned(*_from_user_arrays(arrays, seed))

    @classmethod
    def from_frame(  # noqa: PLR0913 (roles of columns, of which two are given)
        cls,
        table: Any,
        *,
        client: str | None = None,
        label: str | Sequence[str],
        test: Any = None,
        truth: str | None = None,
        weight: str | None = None,
        feature_columns: Sequence[str] | None = None,
        drop_columns: Sequence[str] = (),
        missing: Sequence[str] | None = None,
        classes: Sequence[Any] | None = None,
        task: Objective | str | None = None,
        scaling: Any = "none",
        prepare: Any = None,
        seed: int,
    ) -> Federation:
        """Return a federation of one table of your own, whose rows name their clients.

        Columns are read as in `from_csv`.

        Args:
            table: a DataFrame (pandas, polars), a table of pyarrow, or a pandas DataFrame that is
                grouped by one column, `frame.groupby("hospital")`.
            client: column with the name of each row's client; None is the one that the table is
                grouped by.
            label: column with the labels, or several columns of targets.
            test: which rows are held out: a share, a column that says so, a second table of the
                same columns, or a `Split` by groups or time, by the names of their columns. None is
                a fifth of each client's rows, stratified by label.
            truth: column with each client's true cluster, one value per client, or None.
            weight: column with each row's weight in training, as in `from_arrays`, or None.
            feature_columns: columns that are features, in this order; None is all other columns.
            drop_columns: columns that are no features, such as row numbers.
            missing: texts that stand for missing values beside empty cells; None is "?", "-", "NA"
                and their like among features, and in a file's columns of clients and labels a
                question.
            classes: names of the classes, in the order of their class numbers; None is all labels
                that occur, in ascending order.
            task: "classification", "binary", "multilabel" (columns of 0 and 1) or "regression"
                (squared error; "regression:absolute", "regression:huber" or
                "regression:huber:DELTA"), or an objective, as in `from_arrays`; None is
                classification, unless one column holds many numbers that are not whole or there
                are several, and a SecureClusterWarning says which task they were taken for.
            scaling: as in `from_arrays`; bounds of all label columns are those of a regression.
            prepare: as in `from_arrays`.
            seed: of every public draw, here and in the runs on this federation; keys, masks and
                noise follow from a secret of each run.

        Raises:
            UsageError: no table, or columns or values that cannot be used, all of them in one
                sentence.
        """
        # readers of tables are loaded where there is one
        from securecluster.data.tables.clients import Roles, read_clients
        from securecluster.data.tables.parts import followed_by, frame_table, grouped

        table, client = grouped(table, client)
        rows = frame_table(table)
        if hasattr(test, "columns"):
            rows, test = followed_by(rows, frame_table(test))
        roles = Roles(
            client,
            label,
            truth,
            feature_columns,
            drop_columns,
            missing,
            chosen_categories(prepare),
            task_of(task),
            weight,
            Split.chosen(test),
        )
        names = class_names.given_names(classes)
        read = read_clients(rows, roles, names)
        return _warned(*_from_columns(read, classes is not None, scaling, seed))

    @classmethod
    def from_csv(  # noqa: PLR0913 (roles of columns, of which two are given)
        cls,
        path: str | Path,
        *,
        client_column: str,
        label_column: str | Sequence[str],
        test: Any = None,
        truth_column: str | None = None,
        weight_column: str | None = None,
        feature_columns: Sequence[str] | None = None,
        drop_columns: Sequence[str] = (),
        missing: Sequence[str] | None = None,
        classes: Sequence[Any] | None = None,
        task: Objective | str | None = None,
        scaling: Any = "none",
        prepare: Any = None,
        seed: int,
    ) -> Federation:
        """Return a federation of your own file, or of all tables of a folder and below.

        CSV and other text (.csv, .tsv, .txt, .data, .gz), parquet and Excel are read alike; types
        are found by content. In text the first line names the columns unless it looks like data,
        when they are called f0, f1, …; commas, semicolons, tabs, bars or blanks separate them, and
        numbers have decimal points or commas. Cells of clients and labels that are text become
        whole numbers only if that gives back each of them. Files of a folder are read in the order
        of their names.

        Features are one image column (encoded images, or structs with a field `bytes`), or else one
        column of equally long lists, or else all other columns, which must be numbers, in the order
        of the file. Labels become class numbers in ascending order; two that differ in blanks,
        accents or case alone are refused. Clients are ordered by name.

        Args:
            path: of the file or the folder.
            client_column: column with the name of each row's client; `@file` is the name of its
                file without the ending, and `@folder` that of its folder.
            label_column: column with the labels, or several of targets, as a list or with commas.
            test: as in `from_frame`; a second file or folder as a `Path`. Where files or folders
                are called train and test, the column may be `@file` or `@folder`.
            truth_column: column with each client's true cluster, one value per client, or None.
            weight_column: column with each row's weight in training, as in `from_arrays`, or None.
            feature_columns: columns that are features, in this order; None is all other columns.
            drop_columns: columns that are no features, such as row numbers.
            missing: as in `from_frame`.
            classes: names of the classes, in the order of their class numbers; None is all labels
                that occur, in ascending order.
            task: as in `from_frame`.
            scaling: as in `from_frame`.
            prepare: as in `from_arrays`.
            seed: of every public draw, here and in the runs on this federation; keys, masks and
                noise follow from a secret of each run.

        Raises:
            UsageError: files that cannot be read, or columns or values that cannot be used, with
                all of a table's in one sentence.
        """
        from securecluster.data.tables.clients import Roles

        roles = Roles(
            client_column,
            label_column,
            truth_column,
            feature_columns,
            drop_columns,
            missing,
            chosen_categories(prepare),
            task_of(task),
            weight_column,
            Split.chosen(test),
        )
        return _warned(*_from_files(Path(path), roles, classes, scaling, seed))

    from_parquet = from_csv  # the same: files are known by what they hold

    def with_features(self, names: Sequence[str]) -> Federation:
        """Return the federation with its features in another order.

        Args:
            names: of all features, in the new order.

        Raises:
            UsageError: the features have no names, or other ones.
        """
        if self.feature_names is None:
            raise UsageError(
                "the features of this federation have no names: it cannot be put in the order "
                f"{listed(names)}"
            )
        refusal = "the federation has other features than it should have"
        positions = order(self.feature_names, names, refusal)
        if positions == list(range(len(positions))):
            return self
        shards = []
        order_of_x = self.scaling.features_of(positions) if self.scaling else positions
        for shard in self.shards:
            x = reordered(shard.x, order_of_x)
            x_test = reordered(shard.x_test, order_of_x)
            scale = shard.scale and shard.scale.reordered(order_of_x)
            if scale and shard.scale and shard.scale.fill:
                scale = replace(scale, fill=tuple(shard.scale.fill[k] for k in positions))
            seen = None if shard.seen is None else shard.seen[:, positions]
            gaps = None if shard.gaps is None else reordered(shard.gaps, order_of_x)
            gaps_test = None if shard.gaps_test is None else reordered(shard.gaps_test, order_of_x)
            moved = replace(shard, x=x, x_test=x_test, scale=scale, seen=seen)
            shards.append(replace(moved, gaps=gaps, gaps_test=gaps_test))
        scaling = self.scaling and self.scaling.reordered(positions)
        # the recipe would make the federation in its first order
        return replace(
            self, shards=tuple(shards), feature_names=tuple(names), scaling=scaling, recipe=None
        )

    def with_classes(self, names: Sequence[ClassName]) -> Federation:
        """Return the federation with its labels numbered as in another one.

        Args:
            names: of all classes, in the order of their new class numbers.

        Raises:
            UsageError: the classes have no names, or a client has a label of another name.
        """
        if self.class_names is None:
            raise UsageError(
                "the classes of this federation have no names: give its labels as "
                f"{listed([repr(name) for name in names])}"
            )
        new_names = tuple(names)
        if not self.objective.one_label:
            if new_names != self.class_names:
                own, others = (listed([str(n) for n in of]) for of in (self.class_names, names))
                raise UsageError(
                    f"the targets are {own}, and not {others}: give the same columns in order"
                )
            return self
        old_names = np.asarray(self.class_names)
        shards = []
        for client, shard in zip(self.names, self.shards, strict=True):
            numbers = []
            for labels in (shard.y, shard.y_test):
                subject = f"client {client!r}"
                called = old_names[labels.astype(np.int64).reshape(-1)]
                numbered = class_names.numbers_of(new_names, called, subject)
                numbers.append(numbered.astype(labels.dtype).reshape(labels.shape))
            shards.append(replace(shard, y=numbers[0], y_test=numbers[1]))
        return replace(
            self,
            shards=tuple(shards),
            classes=self.classes if self.objective.kind == Binary.kind else len(new_names),
            class_names=new_names,
            classes_counted=False,
            recipe=None,
        )

    def select(self, clients: Iterable[Client]) -> Federation:
        """Return the federation of some of the clients, in this order.

        The other clients can join later (`ClusteringProtocol.join`).

        Args:
            clients: each by its name, or by `at` its position. A number is a name; only where no
                client is called by a number, it is a position.

        Raises:
            UsageError: no such client, a number that could be a name, or a client twice.
        """
        positions = ClientNames(self.names).positions(clients)
        repeated = [k for k, count in Counter(positions).items() if count > 1]
        if repeated:
            raise UsageError(
                f"client {self.names[repeated[0]]!r} is selected twice: give each client once"
            )
        names = tuple(self.names[i] for i in positions)
        shards = tuple(self.shards[i] for i in positions)
        truth = None
        if self.truth is not None:
            truth = tuple(self.truth[i] for i in positions)
        # the recipe would make all clients
        return replace(self, names=names, shards=shards, truth=truth, recipe=None)

    def digest(self) -> str:
        """Return a fingerprint of all samples in hex, by which a resumed run refuses other data."""
        digest = hashlib.blake2b(digest_size=16)
        for shard in self.shards:
            digest.update(fingerprint(shard))
        return digest.hexdigest()


@dataclass(frozen=True)
class _UserArrays:
    """Users' own arrays, not yet checked.

    Args:
        clients: as in `Federation.from_arrays`.
        test: as in `Federation.from_arrays`.
        truth: as in `Federation.from_arrays`.
        objective: as in `Federation.from_arrays`.
        classes: as in `Federation.from_arrays`.
        columns: names of the columns, if they are not those of the arrays.
        advice: how a user leaves a column out, for warnings.
        scaling: as in `Federation.from_arrays`.
        channels: as in `Federation.from_arrays`.
        categories: of each column, where gaps are filled.
        counted: whether some categories were found in the rows.
        prepare: categories of columns by their names, where gaps of arrays are filled, or None.
        weights: as in `Federation.from_arrays`.
    """

    clients: Any
    test: Any = None
    truth: Any = None
    objective: Objective = CLASSIFICATION
    classes: int | Sequence[Any] | None = None
    columns: tuple[str, ...] | None = None
    advice: str = ""
    scaling: Any = "none"
    channels: str = "first"
    categories: tuple[Categories, ...] = ()
    counted: bool = False
    prepare: dict[str, Categories] | None = None
    weights: Any = None

    @property
    def split(self) -> Split | None:
        """Return which samples are held out; None where there are others for that."""
        samples = self.test
        if isinstance(samples, Mapping):
            samples = list(samples.values())
        if not isinstance(samples, list):
            return Split.chosen(self.test)
        said = [getattr(values, "dtype", None) in (bool, "boolean") for values in samples]
        return Split(rows=self.test) if said and all(said) else None


def _warned(federation: Federation, doubts: Sequence[str]) -> Federation:
    """Return a federation after warnings of what may be a mistake of the user's."""
    for doubt in doubts:
        # at the line that calls the constructor
        warnings.warn(doubt, SecureClusterWarning, stacklevel=3)
    return federation


def _from_files(
    path: Path, roles: Roles, classes: Any, scaling: Any, seed: int
) -> tuple[Federation, list[str]]:
    """Return a federation of a user's own files, named after them, and doubts about it.

    Args:
        path: of the file or the folder.
        roles: of the columns.
        classes: as in `Federation.from_csv`.
        scaling: as in `Federation.from_arrays`.
        seed: of the federation.
    """
    from securecluster.data.tables.clients import read_clients
    from securecluster.data.tables.files import file_table
    from securecluster.data.tables.parts import followed_by

    names = class_names.given_names(classes)
    table = file_table(path, roles.wanted)
    read_roles = roles
    if isinstance(roles.test.rows, Path):
        table, held = followed_by(table, file_table(roles.test.rows, roles.wanted))
        read_roles = replace(roles, test=Split(rows=held))
    read = read_clients(table, read_roles, names)
    # absolute, so that the recipe holds in any working folder
    resolved = path.resolve()
    recipe = {
        "path": str(resolved),
        "client_column": roles.client,
        "label_column": roles.label if isinstance(roles.label, str) else ",".join(roles.label),
        "test": roles.test,
        "truth_column": roles.truth,
        "weight_column": roles.weight,
        "feature_columns": roles.features,
        "drop_columns": roles.drop,
        "missing": roles.missing,
        "classes": None if names is None else tuple(str(name) for name in names),
        "scaling": scaling,
        "prepare": roles.prepare,
        "task": task_name(roles.task),
        "seed": seed,
    }
    named: dict[str, Any] = {"data": resolved.stem, "recipe": recipe}
    if task_of(task_name(roles.task)) != roles.task:
        named["recipe"] = None  # bounds of targets that no option gives
    return _from_columns(read, classes is not None, scaling, seed, **named)


def _from_columns(
    read: ClientColumns, classes_named: bool, scaling: Any, seed: int, **named: Any
) -> tuple[Federation, list[str]]:
    """Return a federation of a table's columns, and doubts about it.

    Args:
        read: from the table.
        classes_named: True if the user named the classes.
        scaling: as in `Federation.from_arrays`.
        seed: of the federation.
        named: as for `_from_user_arrays`.
    """
    trained = read.objective
    if isinstance(trained, Regression):
        trained, scaling = _with_bounds(trained, scaling, [str(name) for name in read.classes])
    arrays = _UserArrays(
        read.clients,
        read.split,
        truth=read.truth,
        objective=trained,
        columns=read.columns,
        # class numbers, which the reader of the table gave
        classes=len(read.classes) if classes_named else None,
        advice="leave it out (drop_columns)",
        scaling=scaling,
        categories=read.categories,
        counted=read.counted,
        weights=read.weights,
    )
    names = class_names.unless_plain(read.classes)
    counted = read.task_counted or (not classes_named and classes_of_labels(trained, names))
    named |= {"class_names": names, "classes_counted": counted}
    federation, doubts = _from_user_arrays(arrays, seed, **named)
    return federation, [*read.doubts, *doubts]


def _from_user_arrays(arrays: _UserArrays, seed: int, **named: Any) -> tuple[Federation, list[str]]:
    """Return a federation of users' own arrays, and doubts about inputs that may be mistakes.

    Args:
        arrays: as the user gave them.
        seed: of the federation.
        named: fields of the federation that the arrays do not tell, or tell otherwise.

    Raises:
        UsageError: arrays that cannot be trained on.
    """
    objective = arrays.objective
    clients, test, clusters = _by_client_name(arrays)
    columns = Columns()
    pairs = {name: read_pair(name, pair, columns, objective) for name, pair in clients.items()}
    test_pairs = {name: read_pair(name, pair, columns, objective) for name, pair in test.items()}
    names = None
    if not objective.sequential:
        pairs = _channels_first(pairs, arrays.channels)
        test_pairs = _channels_first(test_pairs, arrays.channels)
    if objective.one_label:
        names = _number_labels(pairs, test_pairs, arrays.classes)
    randomness = _draws(seed)
    held = _held_out(arrays, clients, test_pairs)
    splits = []
    # integer keys draw a client's random split as integers, not as the text of its name
    keys = [key for key, _ in keyed("clients", arrays.clients, isinstance(arrays.clients, list))]
    for (name, pair), key in zip(pairs.items(), keys, strict=True):
        splits.append(own_samples(name, pair, held[name], objective, randomness, stream(key)))
    feature_names = arrays.columns
    if feature_names is None:
        feature_names = columns.names
    classes, doubts = _count_outputs(arrays, splits, named.get("class_names", names))
    truth = None
    if arrays.truth is not None:
        truth = tuple(_cluster(name, clusters[name]) for name in clients)
    shape = splits[0][0][0].shape[1:]
    if arrays.prepare is not None:
        arrays = replace(arrays, categories=_of_arrays(arrays.prepare, feature_names, shape))
    scaling = _scaling(arrays, feature_names, shape)
    objective = _with_scale(objective, scaling)
    _check_gaps(scaling, clients, splits, feature_names)
    shards = tuple(_shard(*pair, scaling, objective) for pair in splits)
    if arrays.weights is not None:
        shards = _weighted(arrays, pairs, held, shards, randomness)
    counted = arrays.classes is None and classes_of_labels(objective, names)
    class_fields: dict[str, Any] = {"class_names": names, "classes_counted": counted}
    federation = Federation(
        names=tuple(clients),
        shards=shards,
        classes=classes,
        seed=seed,
        truth=truth,
        objective=objective,
        feature_names=feature_names,
        scaling=scaling,
        **{**class_fields, **named},
    )
    samples = [x for x, _ in pairs.values()]
    return federation, [*doubts, *_doubts(federation, arrays, samples)]


def _held_out(
    arrays: _UserArrays, clients: Mapping[str, Any], test_pairs: Mapping[str, Pair]
) -> dict[str, Pair | Split]:
    """Return each client's held-out samples, or which of its samples are held out.

    Args:
        arrays: as the user gave them.
        clients: training samples by the clients' names.
        test_pairs: held-out samples, where there are such.
    """
    split = arrays.split
    if split is None:
        return dict(test_pairs)
    if not split.given:
        return dict.fromkeys(clients, split)
    (field_name,) = split.given
    argument = f"{field_name} of the test rows"
    values = by_name(argument, getattr(split, field_name), isinstance(arrays.clients, list))
    _check_same_clients(argument, values, clients)
    return {name: own_split(name, split, clients[name], values[name]) for name in clients}


def _check_gaps(
    scaling: Scaling | None,
    names: Iterable[str],
    splits: Sequence[tuple[Pair, Pair]],
    feature_names: Sequence[str] | None,
) -> None:
    """Raise UsageError for samples that are infinite, where those that are missing are filled.

    Args:
        scaling: of the features, or None.
        names: of the clients.
        splits: each client's training and held-out samples.
        feature_names: of the columns, if they have some.
    """
    if scaling is None or not scaling.categories:
        return  # they are checked when they are scaled
    for name, pairs in zip(names, splits, strict=True):
        for x, _ in pairs:
            _check_finite(name, np.where(np.isnan(x), 0.0, x), feature_names)


def _of_arrays(
    given: Mapping[str, Categories], names: Sequence[str] | None, shape: tuple[int, ...]
) -> tuple[Categories, ...]:
    """Return the categories of each column of arrays, which are numbers.

    Args:
        given: by the columns' names, or their numbers where they have none.
        names: of the columns, or None.
        shape: of a sample.

    Raises:
        UsageError: samples that are no table, or categories that are of no column.
    """
    if len(shape) != 1:
        raise UsageError(f"prepare is for tables, and samples have shape {shape}: leave it out")
    columns = list(names or map(str, range(shape[0])))
    unknown = [name for name in given if name not in columns]
    if unknown or any(isinstance(name, str) for kinds in given.values() for name in kinds or ()):
        raise UsageError(
            f"prepare is about {listed(unknown or list(given))}: categories of arrays are numbers "
            "in their columns; give a table with text by Federation.from_frame"
        )
    return tuple(given.get(name) for name in columns)


def _scaling(
    arrays: _UserArrays, names: Sequence[str] | None, shape: tuple[int, ...]
) -> Scaling | None:
    """Return the scaling of a user's choice.

    Args:
        arrays: as the user gave them.
        names: of the features, or None.
        shape: of a sample.
    """
    scaling = Scaling.chosen(arrays.scaling, names, shape, arrays.categories)
    if arrays.channels == LAST:
        scaling = replace(scaling or Scaling(NONE), channels=LAST)
    if scaling is not None and arrays.counted:
        scaling = replace(scaling, counted=True)
    if scaling is not None and arrays.objective.sequential:
        raise UsageError("sequences have scales of their own: leave scaling out")
    return scaling


def _doubts(
    federation: Federation, arrays: _UserArrays, samples: Sequence[NDArray[Any]]
) -> list[str]:
    """Return doubts about features and test samples.

    Args:
        federation: made of the arrays.
        arrays: as the user gave them.
        samples: of each client, before the cast to single precision, in which large ids become
            equal.
    """
    doubts = plausibility.client_doubts(federation.names)
    names, scaling = federation.feature_names, federation.scaling
    if not federation.objective.sequential and not arrays.categories:
        scaled = None if scaling is None else [shard.x for shard in federation.shards]
        doubts += plausibility.feature_doubts(samples, names, arrays.advice, scaled)
        doubts += plausibility.bounds_doubts(samples, scaling, names)
    # who gives none on purpose knows
    if arrays.split is not None and arrays.split.rows is None:
        clients = zip(federation.names, federation.shards, strict=True)
        untested = [name for name, shard in clients if not len(shard.y_test)]
        doubts += plausibility.test_doubts(untested, len(federation.names))
    return doubts


def _channels_first(pairs: Mapping[str, Pair], channels: str) -> dict[str, Pair]:
    """Return clients' samples with the axis of images' channels before height and width.

    Args:
        pairs: samples (X, y) by the client's name.
        channels: "first" or "last", where the axis is.

    Raises:
        UsageError: another word, or "last" for samples that are no images.
    """
    if channels == FIRST:
        return dict(pairs)
    if channels != LAST:
        raise UsageError(f"channels = {channels!r}: give 'first' or 'last'")
    transposed = {}
    for name, (x, y) in pairs.items():
        if x.size and x.ndim != 4:
            raise UsageError(
                f"client {name!r}: channels='last' is for images (height, width, channels), and "
                f"its samples have shape {x.shape[1:]}: leave channels out"
            )
        if x.size:
            x = np.moveaxis(x, -1, 1)
        transposed[name] = (x, y)
    return transposed


def _number_labels(
    pairs: dict[str, Pair], test_pairs: dict[str, Pair], classes: int | Sequence[Any] | None
) -> tuple[ClassName, ...] | None:
    """Put class numbers in the place of labels, and return the classes' names.

    Args:
        pairs: samples (X, y) by the client's name, which are changed.
        test_pairs: likewise, held-out samples.
        classes: names that the user gives, or the number of outputs, or None.

    Returns:
        None for labels that are class numbers.

    Raises:
        UsageError: labels that are neither numbers, text nor booleans, or none of the classes.
    """
    labels: dict[str, list[NDArray[Any]]] = {}
    for samples in (pairs, test_pairs):
        for name, (_, y) in samples.items():
            labels.setdefault(name, []).append(y)
    names = class_names.of_labels(labels, classes)
    if names is None:
        return None
    for samples in (pairs, test_pairs):
        for name, (x, y) in samples.items():
            samples[name] = (x, class_names.numbers_of(names, y, f"client {name!r}"))
    return class_names.unless_plain(names)


def _with_bounds(
    trained: Regression, scaling: Any, targets: Sequence[str]
) -> tuple[Regression, Any]:
    """Return a regression with the bounds of its targets, and the scaling without them.

    Args:
        trained: the objective.
        scaling: as in `Federation.from_arrays`; bounds by column may name targets.
        targets: names of their columns.

    Raises:
        UsageError: bounds of some targets only.
    """
    if is_shared(scaling):
        trained, of_features = _with_bounds(trained, scaling[1], targets)
        return trained, (scaling[0], of_features)
    if not isinstance(scaling, Mapping) or not set(targets) & set(scaling):
        return trained, scaling
    missing = [name for name in targets if name not in scaling]
    if missing:
        raise UsageError(f"bounds name some targets, and not {listed(missing)}: give all or none")
    of_features = {name: pair for name, pair in scaling.items() if name not in targets}
    bounds = tuple(tuple(scaling[name]) for name in targets)
    return replace(trained, bounds=bounds), of_features or "none"


def _with_scale(objective: Objective, scaling: Scaling | None) -> Objective:
    """Return the objective whose targets are scaled as features are, unless they have bounds.

    Args:
        objective: of training.
        scaling: of the features.
    """
    if not isinstance(objective, Regression) or scaling is None or not scaling.of_rows:
        return objective
    return replace(objective, standardised=not objective.bounds)


def _shard(
    train_pair: Pair, test_pair: Pair, scaling: Scaling | None, objective: Objective
) -> Shard:
    """Return a client's samples, on another scale where one is chosen.

    Args:
        train_pair: samples (x, y) to train on.
        test_pair: held-out samples.
        scaling: of all clients.
        objective: of training, whose targets may have a scale of their own.
    """
    x, x_test = train_pair[0], test_pair[0]
    (y, y_test), target = scaled_targets(train_pair, test_pair, objective)
    # a client without samples is refused later
    if not x.size:
        return Shard(x, y, x_test, y_test)
    seen = None
    if x.ndim == 2 and x.dtype.kind == "f":
        seen = np.stack([x.min(axis=0), x.max(axis=0)]).astype(np.float64)
        if np.isnan(seen).any():
            # a column without a value has no range, and NaN is never outside of it
            seen = np.stack([np.fmin.reduce(x), np.fmax.reduce(x)]).astype(np.float64)
    if scaling is None:
        return Shard(_single(x), y, _single(x_test), y_test, seen=seen, target=target)
    scale = scaling.scale_of(x)
    gaps = gaps_test = None
    if scaling.shared:
        gaps, gaps_test = (scaling.gaps(samples) for samples in (x, x_test))
    x, x_test = (scaling.prepared(samples, scale) for samples in (x, x_test))
    return Shard(x, y, x_test, y_test, scale, seen, target, gaps=gaps, gaps_test=gaps_test)


def _weighted(
    arrays: _UserArrays,
    pairs: Mapping[str, Pair],
    held: Mapping[str, Pair | Split],
    shards: Sequence[Shard],
    randomness: Randomness,
) -> tuple[Shard, ...]:
    """Return clients' samples with the weights of those to train on.

    Args:
        arrays: as the user gave them, with weights.
        pairs: all samples of each client by its name, or those to train on.
        held: held-out samples of each client, or which of its samples are.
        shards: the samples as they were dealt into those to train on and those held out.
        randomness: of the federation.

    Raises:
        UsageError: other clients or numbers of samples, or weights that are none.
    """
    numbered = isinstance(arrays.clients, list)
    given = by_name("weights", arrays.weights, numbered)
    _check_same_clients("weights", given, pairs)
    clients = keyed("clients", arrays.clients, numbered)
    weighted = []
    for (name, (_, y)), (key, pair), shard in zip(pairs.items(), clients, shards, strict=True):
        values = in_order_of_x(f"client {name!r}, weights as y", pair, given[name])
        weights = weights_of(name, values, len(y))
        if isinstance(held[name], Split):
            # dealt like the samples: rows stand in their place
            rows = np.arange(len(y))[:, None]
            (rows, _), _ = own_samples(
                name, (rows, y), held[name], arrays.objective, randomness, stream(key)
            )
            weights = weights[rows[:, 0].astype(np.int64)]
        weighted.append(replace(shard, weights=weights))
    return tuple(weighted)


def _single(samples: NDArray[Any]) -> NDArray[Any]:
    """Return samples with floats in single precision."""
    if samples.dtype != np.float64:
        return samples
    # values beyond the range become infinite, which is refused later with the client's name
    with np.errstate(over="ignore"):
        return samples.astype(np.float32)


def _by_client_name(arrays: _UserArrays) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return training samples, held-out samples and true clusters by the clients' names.

    Raises:
        UsageError: no client, or mappings with different clients.
    """
    # clients of a list have positions for names
    numbered = isinstance(arrays.clients, list)
    clients = by_name("clients", arrays.clients, numbered)
    if not clients:
        raise UsageError("a federation needs clients: pass {name: (X, y)}")
    test: dict[str, Any] = {}
    if arrays.split is None:
        test = by_name("test", arrays.test, numbered)
    clusters: dict[str, Any] = {}
    if arrays.truth is not None:
        clusters = by_name("truth", arrays.truth, numbered)
    if arrays.split is None:
        _check_same_clients("test", test, clients)
    if arrays.truth is not None:
        _check_same_clients("truth", clusters, clients)
    return clients, test, clusters


def _check_same_clients(
    argument: str, other: Mapping[str, Any], clients: Mapping[str, Any]
) -> None:
    """Raise UsageError if a mapping has other clients than the training samples.

    Args:
        argument: name of the mapping, for the error.
        other: the mapping.
        clients: training samples by the clients' names.
    """
    if set(other) != set(clients):
        mismatched = set(other) ^ set(clients)
        examples = sorted(mismatched)[:3]
        raise UsageError(
            f"{argument} must have an entry for every client and no other: check {examples}"
        )


def _count_outputs(
    arrays: _UserArrays, splits: Sequence[tuple[Pair, Pair]], names: Sequence[ClassName] | None
) -> tuple[int, list[str]]:
    """Return the number of outputs, and doubts about it.

    Args:
        arrays: as the user gave them, with the number of outputs or without.
        splits: each client's training and held-out samples, to count from.
        names: of the classes, if they have some.
    """
    trained = arrays.objective
    if not trained.sequential and trained.kind != Classification.kind:
        return outputs([train_pair for train_pair, _ in splits], trained), []
    named_classes = class_names.given_names(arrays.classes)
    if named_classes is not None:
        return len(named_classes), []
    if arrays.classes is not None:
        number: Any = arrays.classes
        return number, []
    # booleans are two classes, whichever of them occur
    if names == class_names.BOOLEANS:
        return 2, []
    pairs = []
    # held-out samples count as well, so that each of their labels has an output
    for train_pair, test_pair in splits:
        pairs += [train_pair, test_pair]
    if arrays.objective.kind == Classification.kind:
        is_numeric = class_names.numeric(names or ()) is not None
        return plausibility.count_classes([y for _, y in pairs], is_numeric)
    return outputs(pairs, arrays.objective), []


def _scenario(choice: Any, data: Source) -> Scenario:
    """Return the scenario of a user's choice.

    Args:
        choice: a name or an object; None is the default of the data set.
        data: the data set.

    Raises:
        UsageError: an unknown name, or an object that is no scenario.
    """
    if choice is None:
        return _default(data)
    if isinstance(choice, str):
        return scenario_named(choice)
    if not isinstance(choice, Scenario):
        raise UsageError(
            f"scenario = {choice!r} is none: give a name such as 'label-swap', or an object such "
            "as LabelSwap()"
        )
    return choice


def _default(data: Source) -> Scenario:
    """Return the default scenario of a data set."""
    # a set may have both; its own clients come first
    if data.train.owners is not None:
        return Natural()
    if data.train.groups is not None:
        return Topics()
    if data.objective.kind == Classification.kind:
        return LabelSwap()
    return Iid()


def fingerprint(shard: Shard) -> bytes:
    """Return a hash of one client's samples."""
    digest = hashlib.blake2b(digest_size=16)
    arrays = [shard.x, shard.y, shard.x_test, shard.y_test]
    added = (shard.weights, shard.gaps, shard.gaps_test)
    arrays += [given for given in added if given is not None]
    for array in arrays:
        # the same bytes in another shape or type are other data
        header = f"{array.shape}{array.dtype}"
        digest.update(header.encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.digest()


def _read_shards(data_set: Source, partition: Partition) -> tuple[Shard, ...]:
    """Return the samples of each client."""
    test_pool = data_set.test
    # the held-out rows of a source with one pool belong to that pool
    if test_pool is None:
        test_pool = data_set.train
    train_pairs = _read(data_set.train, partition.train)
    test_pairs = _read(test_pool, partition.test)
    shards = []
    for train_pair, test_pair in zip(train_pairs, test_pairs, strict=True):
        shards.append(Shard(*train_pair, *test_pair))
    return tuple(shards)


def _read(pool: Pool, rows_of_clients: Sequence[Labels]) -> list[Pair]:
    """Return each client's samples and targets.

    They are views into one array of all clients' samples, so the data are in memory once.

    Args:
        pool: to read from.
        rows_of_clients: each client's rows.
    """
    rows = np.concatenate(rows_of_clients)
    sizes = [len(rows_of_client) for rows_of_client in rows_of_clients]
    ends = np.cumsum(sizes)[:-1]
    samples = np.split(pool.read(rows), ends)
    targets = np.split(pool.y[rows], ends)
    return list(zip(samples, targets, strict=True))


def _transform_shards(
    shards: Sequence[Shard],
    partition: Partition,
    transforms: Sequence[Transform],
    classes: int,
    randomness: Randomness,
) -> tuple[int, ...] | None:
    """Apply the transforms to all samples in place, and return the true clusters.

    Args:
        shards: samples of each client, which are changed.
        partition: with the clusters by the partitioner, if it made some.
        transforms: of the scenario, in order.
        classes: number of labels.
        randomness: of the federation.

    Returns:
        Each client's true cluster, or None if it is unknown.
    """
    # each client's cluster by the partitioner, then by each transform
    # one cluster as long as no part makes more
    clusters = [np.zeros(len(shards), np.int64)]
    if partition.clusters is not None:
        clusters = [numbered([partition.clusters])]
    for transform in transforms:
        # crossed evenly with the clusters so far
        assigned = spread(numbered(clusters), transform.clusters, randomness)
        clusters.append(assigned)
        for shard, cluster in zip(shards, assigned.tolist(), strict=True):
            train_pair = (shard.x, shard.y)
            test_pair = (shard.x_test, shard.y_test)
            for x, y in (train_pair, test_pair):
                new_x, new_y = transform.transform(cluster, x, y, classes, randomness)
                # in place: a copy of the whole data set would double the memory
                x[:] = new_x
                y[:] = new_y
    if partition.clusters is None and not transforms:
        return None
    return tuple(numbered(clusters).tolist())


def _cluster(name: str, cluster: Any) -> int:
    """Return a client's true cluster as an integer.

    Raises:
        UsageError: the user's value is no integer.
    """
    try:
        return operator.index(cluster)
    except TypeError:
        raise UsageError(
            f"truth of client {name!r} is the number of its cluster, not {cluster!r}: number the "
            "clusters from 0"
        ) from None


def _draws(seed: int) -> Randomness:
    """Return the streams of a seed.

    Raises:
        UsageError: a seed that is no whole number from 0.
    """
    check_seed(seed)
    return Randomness(seed)


def _check(federation: Federation) -> None:
    """Raise UsageError, with the client's name, for samples that cannot be trained on."""
    names, shards, classes = federation.names, federation.shards, federation.classes
    objective = federation.objective
    is_integer = isinstance(classes, Integral) and not isinstance(classes, bool)
    if not is_integer or classes < 1:
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
        samples = len(shard.x_test)
        labels = len(shard.y_test)
        if samples != labels:
            raise UsageError(f"client {name!r}: {samples} test samples have {labels} labels")
        _check_finite(name, shard.x, federation.feature_names)
        _check_finite(name, shard.x_test, federation.feature_names)
        objective.check(name, shard.x, shard.y, classes)
        if len(shard.y_test):
            objective.check(name, shard.x_test, shard.y_test, classes)


def _check_finite(name: str, samples: NDArray[Any], feature_names: Sequence[str] | None) -> None:
    """Raise UsageError if a client's samples have values that are not finite.

    Args:
        name: of the client.
        samples: (n, …).
        feature_names: of the columns, if they have some.
    """
    finite = np.isfinite(samples)
    if finite.all():
        return
    subject = "a feature"
    if samples.ndim == 2 and feature_names is not None:
        columns = np.flatnonzero(~finite.all(axis=0)).tolist()
        subject = f"a value of {listed([repr(feature_names[k]) for k in columns])}"
    raise UsageError(
        f"client {name!r}: {subject} is NaN or infinite: fill or drop these rows first"
    )


def _check_shape(
    name: str, samples_name: str, samples: NDArray[Any], first_name: str, first: NDArray[Any]
) -> None:
    """Raise UsageError if a client's samples have another shape than the first client's.

    Args:
        name: of the client.
        samples_name: what the samples are called in the error.
        samples: of the client (n, …).
        first_name: name of the first client.
        first: samples of the first client (n, …).
    """
    shape = samples.shape[1:]
    first_shape = first.shape[1:]
    if shape != first_shape:
        raise UsageError(
            f"client {name!r}: its {samples_name} have shape {shape}, those of {first_name!r} "
            f"have {first_shape}"
        )
