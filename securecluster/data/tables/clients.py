"""Each client's samples, from the columns of a table that name clients, labels and features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from securecluster.core.optional_packages import need
from securecluster.data.class_names import (
    ClassName,
    ClassNames,
    alike,
    fractional,
    in_type_of,
    numbers_of,
    spelled,
)
from securecluster.data.feature_columns import listed, order
from securecluster.data.plausibility import MANY
from securecluster.data.pools import Labels, reading
from securecluster.data.scaling import Categories
from securecluster.data.splits import FIFTH, Split
from securecluster.data.tables import cells
from securecluster.data.tables.coded import coded
from securecluster.data.tables.images import images
from securecluster.data.tables.parts import ColumnError, Table
from securecluster.errors import UsageError
from securecluster.models.objectives import (
    CLASSIFICATION,
    Binary,
    MultiLabel,
    Objective,
    Regression,
)

ROWS_OF_BLOCK = 4096  # rows of a table of numbers that are put together at once

Array = NDArray[Any]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Roles:
    """Roles of the columns of a table.

    Args:
        client: column with the name of each row's client; `@file` or `@folder` is where it lies.
        label: column with the labels, or several of targets: a list, or a text with commas where
            no column is called so.
        truth: column with each client's true cluster, or None.
        features: columns that are features, in this order; None is all other columns.
        drop: columns that are no features.
        missing: texts that stand for a missing value beside empty cells; None is those of features
            that are usual (`cells.MISSING`).
        prepare: the categories of some columns, by their names, where gaps are filled and texts are
            categories; None where they are faults.
        task: objective of training; None where the labels choose it.
        weight: column with the weight of each row in training, or None.
        test: which rows are held out.
    """

    client: str
    label: str | Sequence[str]
    truth: str | None = None
    features: Sequence[str] | None = None
    drop: Sequence[str] = ()
    missing: Sequence[str] | None = None
    prepare: Mapping[str, Categories] | None = None
    task: Objective | None = None
    weight: str | None = None
    test: Split = FIFTH

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the columns to learn."""
        return named_columns(self.label)

    @property
    def wanted(self) -> list[str]:
        """Return the columns that the user names."""
        roles = (self.client, *self.labels, self.truth, self.weight, self.test.column)
        named = [*roles, *(self.features or ()), *self.drop]
        return [name for name in named if name is not None]


@dataclass(frozen=True)
class ClientColumns:
    """Samples of each client, read from a table.

    Args:
        clients: samples (X, y) of each client by its name, as text or a whole float.
        truth: true cluster of each client by its name, or None if it is unknown.
        columns: names of the feature columns.
        classes: the labels, in the order of the class numbers in y; or the names of the targets.
        doubts: what may be a mistake of the user's, as sentences.
        categories: of each feature, where gaps are to be filled.
        counted: whether some of them were found in the rows.
        objective: of training.
        task_counted: whether it was chosen by the rows.
        weights: of each client's rows by its name, or None.
        split: which rows of each client are held out, with their values by the client's name.
    """

    clients: dict[str | float, tuple[NDArray[Any], Labels]]
    truth: dict[str | float, int] | None
    columns: tuple[str, ...]
    classes: ClassNames
    doubts: tuple[str, ...] = ()
    categories: tuple[Categories, ...] = ()
    counted: bool = False
    objective: Objective = CLASSIFICATION
    task_counted: bool = False
    weights: dict[str | float, Array] | None = None
    split: Split = FIFTH


class _Faults(list[ColumnError]):
    """Faults of the columns of a table, of which none keeps the others from being found.

    Attributes:
        doubts: what else may be a mistake, as sentences.
    """

    def __init__(self) -> None:
        super().__init__()
        self.doubts: list[str] = []

    def without(self, read: Callable[..., Value], *arguments: Any) -> Value | None:
        """Return what a function returns; None where it finds a fault, which is kept.

        Args:
            read: the function.
            arguments: of it.
        """
        try:
            return read(*arguments)
        except ColumnError as fault:
            self.append(fault)
            return None


def read_clients(table: Table, roles: Roles, classes: ClassNames | None) -> ClientColumns:
    """Return the rows of a table by client.

    Args:
        table: of all clients.
        roles: of its columns.
        classes: the labels in the order of their class numbers; None is all that occur, in
            ascending order.

    Raises:
        UsageError: columns or values that cannot be used, all of them in one sentence.
    """
    roles = replace(roles, label=labels_in(table, roles.label))
    roles_of, selected, dropped = _checked(table, roles)
    faults = _Faults()
    clients = faults.without(_values, table, roles.client, roles.missing)
    learned = _learned(table, roles, clients, classes, faults)
    clusters = None
    if roles.truth is not None:
        values = faults.without(_values, table, roles.truth, roles.missing)
        clusters = (
            clients and values and faults.without(_truth, table, clients, values, roles.truth)
        )
    weights = None
    if roles.weight is not None:
        weights = faults.without(cells.numbers, table, roles.weight, roles.missing)
    excluded = {*roles_of, *dropped}
    features = _features(table, excluded, selected, roles, faults)
    sides = faults.without(_sides, table, roles)
    if learned is None or clients is None or features is None or faults:
        raise table.refused(faults)
    names, client_of_row = clients
    y, found, trained = learned
    x, columns, categories = features
    # stable, so that a client's rows remain in the order of the files; sorting numbers of 16 bits
    # takes time in proportion to the rows
    positions = client_of_row.astype(np.min_scalar_type(len(names)))
    by_client = np.argsort(positions, kind="stable")
    ends = np.cumsum(np.bincount(client_of_row))[:-1]
    pairs = zip(np.split(x[by_client], ends), np.split(y[by_client], ends), strict=True)
    samples = {_key(name): pair for name, pair in zip(names, pairs, strict=True)}
    split = roles.test
    if sides is not None:
        of_clients = np.split(sides[by_client], ends)
        split = split.with_values({_key(n): v for n, v in zip(names, of_clients, strict=True)})
    given = {name for name, kinds in (roles.prepare or {}).items() if kinds}
    counted = any(
        kinds and name not in given for name, kinds in zip(columns, categories, strict=False)
    )
    weights_of = None
    if weights is not None:
        weights_by_client = np.split(weights[0][by_client], ends)
        weights_of = dict(zip(samples, weights_by_client, strict=True))
    doubts = [*_left_out(table), *faults.doubts]
    chosen = roles.task is None and not trained.one_label
    if chosen:
        doubts.append(_chosen(roles, trained))
    return ClientColumns(
        samples,
        clusters,
        columns,
        found,
        tuple(doubts),
        categories,
        counted,
        objective=trained,
        task_counted=chosen,
        weights=weights_of,
        split=split,
    )


def _sides(table: Table, roles: Roles) -> Array | None:
    """Return what says of each row which side of the split it is on, (n,); None for nothing.

    Raises:
        ColumnError: values that are missing, or times that are no numbers or dates.
    """
    if not roles.test.given:
        return None
    name = roles.test.column
    if name is None:
        return roles.test.values_of("the table", table.rows)
    if roles.test.time is None:
        return np.asarray(cells.role(table, name, roles.missing).to_numpy(zero_copy_only=False))
    try:
        times = coded(table, name, roles.missing, None, False).values
    except ColumnError as fault:
        raise ColumnError(fault.subject, fault.text, "give numbers or dates") from None
    cells.check_complete(table, name, times)
    return times


def _chosen(roles: Roles, trained: Objective) -> str:
    """Return a sentence on a task that the labels chose."""
    reason = "holds numbers that are not whole"
    if len(roles.labels) > 1:
        reason = "are several" if trained.kind == Regression.kind else "are of 0 and 1"
    return (
        f"the label {listed(roles.labels)} {reason}, so the task is {trained.kind}: say it (task), "
        "or name the classes (classes) of one column if its numbers are codes"
    )


def _learned(
    table: Table,
    roles: Roles,
    clients: tuple[Array, Labels] | None,
    classes: ClassNames | None,
    faults: _Faults,
) -> tuple[Array, ClassNames, Objective] | None:
    """Return the target of each row, the names of the classes or targets, and the objective.

    Args:
        table: with the columns.
        roles: of its columns.
        clients: distinct names, and each row's position among them; None where they have faults.
        classes: names that the user gives, or None.
        faults: to which those of the labels are added.

    Returns:
        None where there are faults.

    Raises:
        UsageError: several columns for a task of one.
    """
    names = roles.labels
    one_label = roles.task is None or roles.task.one_label
    if len(names) > 1 and roles.task is not None and one_label:
        raise UsageError(
            f"the task {roles.task.kind} learns one column, and {len(names)} are named: take "
            "multilabel or regression"
        )
    if len(names) > 1 or not one_label:
        return _targets(table, roles, faults)
    labels = faults.without(_values, table, names[0], roles.missing)
    if labels is None:
        return None
    values = labels[0].tolist()
    # fewer different ones may be codes
    is_number = len(values) > MANY and fractional(values) is not None
    if roles.task is None and classes is None and is_number:
        return _targets(table, roles, faults)
    numbered = faults.without(_numbered, table, names[0], labels, clients, classes)
    if numbered is None:
        return None
    y, found = numbered
    trained = roles.task or CLASSIFICATION
    if trained.kind == Binary.kind and len(found) != 2:
        faults.append(
            ColumnError(
                f"column {names[0]!r}",
                f"has {len(found)} classes, and the task binary two",
                "take the task classification",
            )
        )
        return None
    return y, found, trained


def _targets(
    table: Table, roles: Roles, faults: _Faults
) -> tuple[Array, ClassNames, Objective] | None:
    """Return targets that are numbers of each row (n, k), the names of their columns, and the task.

    Args:
        table: with the columns.
        roles: of its columns.
        faults: to which those of the targets are added.
    """
    before = len(faults)
    columns = _numbers(table, roles.labels, roles.missing, faults)
    if len(faults) > before:
        for fault in faults[before:]:
            if fault.advice == cells.ADVICE:
                fault.advice = "choose a label of numbers, or leave the task out for classes"
        return None
    rows = _stacked(columns).astype(np.float64)
    trained = roles.task
    if trained is None:
        trained = MultiLabel() if np.isin(rows, (0, 1)).all() else Regression()
    for name, values in zip(roles.labels, rows.T, strict=True):
        if len(np.unique(values)) < 2:
            text = "has the same value in every row, so there is nothing to learn"
            faults.append(ColumnError(f"column {name!r}", text, "choose another label"))
        elif isinstance(trained, MultiLabel) and not np.isin(values, (0, 1)).all():
            text = "holds other values than 0 and 1, which labels of the task multilabel are"
            faults.append(ColumnError(f"column {name!r}", text, "mark them, or take another task"))
    return None if len(faults) > before else (rows, roles.labels, trained)


def named_columns(label: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns that a user names: a list of them, or a text with commas."""
    if isinstance(label, str):
        return tuple(name.strip() for name in label.split(","))
    return tuple(label)


def labels_in(table: Table, label: str | Sequence[str]) -> tuple[str, ...]:
    """Return the columns to learn; one that is called as the user names all is that one, commas
    and all.
    """
    if isinstance(label, str) and label in table.parts[0].names:
        return (label,)
    return named_columns(label)


def _left_out(table: Table) -> list[str]:
    """Return doubts about the files of a folder of which nothing is in its table."""
    others = [path.name for path in table.left_out]
    empty = [Path(part.title).name for part in table.parts if not part.rows]
    reasons = {"are not read, since they are no tables": others, "have no rows": empty}
    return [
        f"{table.title} has files that {reason}: {listed(names, 12)}"
        for reason, names in reasons.items()
        if names
    ]


def _checked(
    table: Table, roles: Roles
) -> tuple[list[str], tuple[str, ...] | None, tuple[str, ...]]:
    """Return the columns that are no features by their roles, those selected, and those dropped.

    Raises:
        UsageError: roles that do not go together, columns that there are not, or no rows.
    """
    names_of_roles = [roles.client, *roles.labels]
    more = (roles.truth, roles.weight, roles.test.column)
    names_of_roles += [name for name in more if name is not None]
    if len(set(names_of_roles)) < len(names_of_roles):
        raise UsageError(
            "client, label, truth, weight and what says which rows are held out are different "
            "columns, not "
            f"{', '.join(names_of_roles)}"
        )
    selected = None
    if roles.features is not None:
        selected = _column_names("feature_columns", roles.features, names_of_roles)
    dropped = _column_names("drop_columns", roles.drop, names_of_roles)
    if selected is not None and dropped:
        raise UsageError("feature_columns and drop_columns say the same twice: give one of them")
    # all parts are checked for all columns before any of them is read
    table.check([*names_of_roles, *(selected or ()), *dropped])
    if not table.rows:
        raise UsageError(f"{table.title} has no rows: give a table that has some")
    return names_of_roles, selected, dropped


def _values(table: Table, name: str, missing: Sequence[str] | None) -> tuple[Array, Labels]:
    """Return the distinct values of a column in ascending order (k,), and that of each row (n,).

    Args:
        table: with the column.
        name: of the column.
        missing: as in `Roles`.

    Raises:
        ColumnError: values that are missing, or without an order.
    """
    return cells.encoded(name, cells.role(table, name, missing))


def _numbered(
    table: Table,
    name: str,
    labels: tuple[Array, Labels],
    clients: tuple[Array, Labels] | None,
    classes: ClassNames | None,
) -> tuple[Labels, ClassNames]:
    """Return the class number of each row (n,), and the names of the classes.

    Args:
        table: of the labels.
        name: of their column.
        labels: distinct values, and each row's position among them.
        clients: likewise, for the sentence.
        classes: names that the user gives, or None.

    Raises:
        ColumnError: labels that are no classes, or of which two read as one.
    """
    subject = f"column {name!r}"
    values, positions = labels

    def shown(value: Any) -> str:
        row = int(np.argmax(positions == values.tolist().index(value)))
        whose = "" if clients is None else f"client {str(clients[0][clients[1][row]])!r}, "
        return f"{value!r} ({whose}{table.place(row)})"

    if classes is None and len(values) < 2:
        raise ColumnError(
            subject,
            "has the same value in every row, so there is nothing to learn",
            "choose another label",
        )
    fraction = None if classes is not None else fractional(values.tolist())
    if fraction is not None:
        raise ColumnError(
            subject,
            f"holds numbers that are not whole, such as {shown(fraction)}, and labels are classes",
            "take the task regression, or, if they are codes of classes, name them all (classes)",
        )
    typed = None if classes is None else in_type_of(classes, values)
    pair = alike(values.tolist(), typed)
    if pair is not None:
        text = f"holds {shown(pair[0])} and {shown(pair[1])}, which read as one class"
        raise ColumnError(subject, text, "spell them alike, or name both (classes)")
    if typed is None:
        # dates and the like by their text
        texts = [
            value if isinstance(value, str | int | float) else str(value)
            for value in values.tolist()
        ]
        typed = tuple(sorted({spelled(text) for text in texts}))
        values = np.asarray(texts, dtype=object)
    numbers = numbers_of(typed, values, f"{subject} of {table.title}")
    return numbers[positions], typed


def _plain(label: Any) -> ClassName:
    """Return a label as JSON has it: dates and the like by their text."""
    return label if isinstance(label, str | int | float) else str(label)


def _truth(
    table: Table, clients: tuple[Array, Labels], values: tuple[Array, Labels], name: str
) -> dict[str | float, int]:
    """Return each client's true cluster by its name.

    Args:
        table: of the column.
        clients: names (m,), and each row's position among them (n,).
        values: distinct values of the column (k,), and each row's position among them (n,).
        name: of the column.

    Raises:
        ColumnError: rows of one client have different values.
    """
    names, client_of_row = clients
    _, cluster_of_row = values
    # of the client's last row
    clusters = np.zeros(len(names), np.int64)
    clusters[client_of_row] = cluster_of_row
    ambiguous = client_of_row[clusters[client_of_row] != cluster_of_row]
    if len(ambiguous):
        whose = str(names[ambiguous.min()])
        raise ColumnError(
            f"client {whose!r}",
            f"has several values in column {name!r}",
            "a true cluster is one value per client",
        )
    return {_key(key): cluster for key, cluster in zip(names, clusters.tolist(), strict=True)}


def _features(
    table: Table, excluded: set[str], selected: Sequence[str] | None, roles: Roles, faults: _Faults
) -> tuple[Array, tuple[str, ...], tuple[Categories, ...]] | None:
    """Return samples (n, …) of all rows, the columns that they are made of, and their categories.

    Samples are images, or else lists, or else rows of numbers.

    Args:
        table: whose rows are read.
        excluded: columns that are no features.
        selected: columns that are features; None is all other columns.
        roles: of the columns, and what is done with gaps and texts.
        faults: to which those of the features are added.

    Returns:
        None where there are faults.

    Raises:
        UsageError: no feature column, or columns that do not go together.
    """
    names = list(selected or _shared_names(table, excluded))
    found = {name: faults.without(table.type_of, name) for name in names}
    types = {name: kind for name, kind in found.items() if kind is not None}
    names = list(types)
    image_columns = [name for name in types if _holds_images(types[name])]
    list_columns = [name for name in types if _holds_lists(types[name])]
    if image_columns:
        name = _only_feature(table, "images", image_columns, selected)
        return images(table, name), (name,), ()
    if list_columns:
        name = _only_feature(table, "lists", list_columns, selected)
        lists = faults.without(_lists, table, name)
        return None if lists is None else (lists, (name,), ())
    if selected is None:
        # pandas writes its row numbers under this name
        names = [name for name in names if not name.startswith("__index_level_")]
        if "" in names:
            advice = "name it, or leave it out (drop_columns '')"
            faults.append(ColumnError("a column", "has values and no name", advice))
    if not names:
        others = ", ".join(sorted(excluded))
        raise UsageError(
            f"{table.title} has no feature column besides {others}: add some, or leave fewer out"
        )
    if roles.prepare is not None:
        return _coded(table, names, roles, faults)
    columns = _numbers(table, names, roles.missing, faults)
    return None if faults else (_stacked(columns), tuple(names), ())


def _coded(
    table: Table, names: Sequence[str], roles: Roles, faults: _Faults
) -> tuple[Array, tuple[str, ...], tuple[Categories, ...]] | None:
    """Return columns for a preparation, as `_features` does.

    Args:
        table: with the columns.
        names: of the columns.
        roles: with what is known of the preparation.
        faults: to which those of the columns are added.

    Raises:
        UsageError: categories of no column.
    """
    given = roles.prepare or {}
    unknown = [name for name in given if name not in names]
    if unknown:
        raise UsageError(f"prepare names {listed(unknown)}, which are no features: leave them out")
    left = [name for name in names if name not in given]
    if left and None in given.values():  # a transformer of columns, which names all
        raise UsageError(f"prepare does not name {listed(left)}: name them, or drop them")
    found = {}
    for name in names:
        column = faults.without(coded, table, name, roles.missing, given.get(name), True)
        if column is not None:
            found[name] = column
    faults += cells.mark_faults({name: column.mark for name, column in found.items()})
    if faults:
        return None
    faults.doubts += [column.doubt for column in found.values() if column.doubt]
    values = _stacked([column.values for column in found.values()])
    return values, tuple(names), tuple(column.categories for column in found.values())


def _numbers(
    table: Table, names: Sequence[str], missing: Sequence[str] | None, faults: _Faults
) -> list[Array]:
    """Return columns of numbers (n,).

    Args:
        table: with the columns.
        names: of the columns.
        missing: as in `Roles`.
        faults: to which those of the columns are added.
    """
    columns = []
    marks = {}
    for name in names:
        column = faults.without(cells.numbers, table, name, missing)
        if column is not None:
            values, marks[name] = column
            columns.append(values)
            faults.without(cells.check_complete, table, name, values)
    faults += cells.mark_faults(marks)
    return columns


def _shared_names(table: Table, excluded: set[str]) -> list[str]:
    """Return the names of the columns that are not left out, in the order of the first part.

    Args:
        table: whose parts must have the same columns.
        excluded: columns to leave out.

    Raises:
        UsageError: a part has other columns than the first one.
    """
    first = table.parts[0]
    names = [name for name in first.names if name not in excluded]
    for part in table.parts[1:]:
        others = [name for name in part.names if name not in excluded]
        order(others, names, f"{part.title} has other columns than {first.title}")
    return names


def _key(client_name: Any) -> str | float:
    """Return a client's name: its text, but whole floats as they are, which are whole numbers."""
    if isinstance(client_name, float | np.floating) and float(client_name).is_integer():
        return float(client_name)
    return str(client_name)


def _column_names(option: str, value: Sequence[str], roles: Sequence[str]) -> tuple[str, ...]:
    """Return the column names in a user's option.

    Args:
        option: name of the option, for errors.
        value: of the option; a string is one column.
        roles: columns of clients, labels and true clusters, which the option may not contain.

    Raises:
        UsageError: a value that is no name, a name twice, or a column of another role.
    """
    columns = tuple(value)
    # a string is itself a sequence, of its characters
    if isinstance(value, str):
        columns = (value,)
    all_text = all(isinstance(name, str) for name in columns)
    if not all_text or len(set(columns)) < len(columns):
        raise UsageError(f"{option} = {columns!r} are names of columns, each once")
    taken = [name for name in columns if name in roles]
    if taken:
        raise UsageError(
            f"column {taken[0]!r} names the client, the label, the true cluster or held-out rows: "
            f"leave it out of {option}"
        )
    if not columns and option == "feature_columns":
        raise UsageError(
            "feature_columns names no column: name one, or leave it out for all that are left"
        )
    return columns


def _holds_images(column_type: Any) -> bool:
    """Return True if a column of this type (pyarrow) contains encoded images."""
    types = need("pyarrow").types
    checks = (types.is_struct, types.is_binary, types.is_large_binary)
    return any(check(column_type) for check in checks)


def _holds_lists(column_type: Any) -> bool:
    """Return True if a column of this type (pyarrow) contains lists."""
    types = need("pyarrow").types
    checks = (types.is_list, types.is_large_list, types.is_fixed_size_list)
    return any(check(column_type) for check in checks)


def _only_feature(
    table: Table, content: str, names: Sequence[str], selected: Sequence[str] | None
) -> str:
    """Return the one column of images or lists, which cannot be combined with other features.

    Args:
        table: for errors.
        content: "images" or "lists", for errors.
        names: columns with this content.
        selected: columns that the user names as features, or None.

    Raises:
        UsageError: several such columns, or other columns that the user names.
    """
    if len(names) > 1:
        raise UsageError(
            f"{table.title} has several columns of {content} ({', '.join(names)}): leave one, drop "
            "the others"
        )
    # columns that the user selected are never left out silently
    if selected is not None and len(selected) > 1:
        raise UsageError(
            f"column {names[0]!r} of {table.title} holds {content}, which are the only feature "
            "then: name it alone"
        )
    return names[0]


def _stacked(columns: Sequence[Array]) -> Array:
    """Return columns of numbers (n,) as a table (n, k)."""
    table = np.empty((len(columns[0]), len(columns)), np.result_type(*columns))
    # a block of all columns at a time, which a processor's cache holds
    for start in range(0, len(table), ROWS_OF_BLOCK):
        block = slice(start, start + ROWS_OF_BLOCK)
        np.stack([values[block] for values in columns], axis=1, out=table[block])
    return table


def _lists(table: Table, name: str) -> Array:
    """Return a column of equally long, possibly nested lists of numbers (n, …).

    Args:
        table: whose rows are read.
        name: of the column.

    Raises:
        ColumnError: lists of different lengths, or of values that are no numbers.
    """
    lists = table.column(name)
    subject = f"column {name!r}"
    if lists.null_count:
        raise ColumnError(
            subject, f"has {lists.null_count} empty cells (null)", "fill or drop these rows"
        )
    try:
        with reading(table.title):
            arrays = [_rectangular(chunk) for chunk in lists.chunks if len(chunk)]
        rows = np.concatenate(arrays)
    except ValueError:
        raise ColumnError(
            subject, "has lists of different lengths", "make them equally long"
        ) from None
    if rows.dtype.kind not in "biuf":
        text = "has lists with empty cells or of other things than numbers"
        raise ColumnError(subject, text, "use numbers")
    return rows


def _rectangular(values: Any) -> NDArray[Any]:
    """Return lists, possibly nested, as an array (n, …).

    Args:
        values: of a column (`pyarrow.Array`). The array is one of objects where values within lists
            are empty or no numbers.

    Raises:
        ValueError: lists of different lengths.
    """
    compute = need("pyarrow.compute")
    shape = [len(values)]
    while _holds_lists(values.type):
        lengths = compute.list_value_length(values).unique().to_pylist() or [0]
        if len(lengths) > 1:
            raise ValueError("lists of different lengths are no array")
        if lengths == [None]:
            return np.empty(shape, object)
        shape += lengths
        values = values.flatten()
    if values.null_count or not cells.is_numeric(values.type):
        return np.empty(shape, object)
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(shape)
