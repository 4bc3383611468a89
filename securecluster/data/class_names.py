"""Classes as users call them, and the class numbers from 0 that networks are trained on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securecluster.core.client_names import plain_text
from securecluster.data.feature_columns import listed, names_of
from securecluster.errors import UsageError

ClassName: TypeAlias = str | int | float | bool
ClassNames: TypeAlias = tuple[ClassName, ...]
Array: TypeAlias = NDArray[Any]

TEXT, BOOLEAN, NUMBER = "text", "booleans", "numbers"
BOOLEANS: ClassNames = (False, True)
EMPTY = {"NoneType", "NAType", "NaTType"}  # types of empty cells, pandas' among them


def class_labels(client: str, targets: Any, labels: Array) -> Array:
    """Return a client's labels, one for each sample.

    Args:
        client: its name.
        targets: the labels as the user has them, of whose columns one-hot labels take the names.
        labels: the same as an array: text, booleans or numbers, (n,) or (n, 1), or one-hot (n, k).

    Returns:
        Text, booleans or numbers (n,). Arrays of another shape are returned as they are.

    Raises:
        UsageError: rows (n, k) that do not mark one class each, or values of several types.
    """
    if labels.dtype.kind == "O":
        labels = _typed(client, labels)
    if labels.ndim == 2 and labels.shape[1] == 1:
        return labels[:, 0]
    if labels.ndim != 2 or not labels.size:
        return labels
    return _of_one_hot(client, targets, labels)


def _typed(client: str, labels: Array) -> Array:
    """Return an array of Python objects as one of text, booleans or numbers."""
    values = labels.ravel().tolist()
    kinds = {type(value).__name__ for value in values}
    is_nan = any(isinstance(value, float) and value != value for value in values)
    if is_nan or kinds & EMPTY:
        raise _empty(client)
    # NumPy would make text of numbers beside text
    if len(kinds) > 1 and not kinds <= {"int", "float"}:
        raise UsageError(
            f"client {client!r}: labels are of several types ({', '.join(sorted(kinds))}): use one"
        )
    return np.asarray(values).reshape(labels.shape)


def _empty(client: str) -> UsageError:
    """Return the error for labels of which some are missing."""
    return UsageError(f"client {client!r}: some labels are empty: fill them, or drop these samples")


def _of_one_hot(client: str, targets: Any, labels: Array) -> Array:
    """Return the labels (n,) that one-hot rows (n, k) mark: names of columns, or their numbers."""
    is_number = labels.dtype.kind in "biuf"
    if not is_number or not (np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all()):
        raise UsageError(
            f"client {client!r}: y {labels.shape} has {labels.shape[1]} columns, which must be "
            "one-hot, with a single 1 in each row: give one label per sample"
        )
    marked: Array = labels.argmax(axis=1)
    names = names_of(targets)
    if names is None:
        return marked
    return np.asarray(names)[marked]


def spelled(label: Any) -> Any:
    """Return a label as classes are called: a text as names of clients are, others as they are.

    Args:
        label: text, a boolean or a number.
    """
    return plain_text(label) if isinstance(label, str) else label


def _read_alike(label: Any) -> Any:
    """Return what people read in a label, whatever its blanks, accents, case and zeros are."""
    if not isinstance(label, str):
        return label
    return re.sub(r"^([-+]?\d+)\.0+$", r"\1", plain_text(label).casefold())


def alike(labels: Iterable[Any], classes: ClassNames | None) -> tuple[Any, Any] | None:
    """Return two different labels that people read as one, or None.

    Args:
        labels: different ones.
        classes: names that the user gives, which may tell such labels apart; or None.
    """
    seen: dict[Any, Any] = {}
    for label in labels:
        first = seen.setdefault(_read_alike(label), label)
        names = {spelled(first), spelled(label)}
        told_apart = len(names) > 1 and names <= set(classes or ())
        if first is not label and not told_apart:
            return first, label
    return None


def check_spelling(labels: Mapping[str, Sequence[Array]], classes: ClassNames | None) -> None:
    """Raise UsageError for two labels of clients that people read as one.

    Args:
        labels: arrays (n,) of each client by its name.
        classes: as for `alike`.
    """
    client_of: dict[Any, str] = {}
    for client, arrays in labels.items():
        for array in arrays:
            client_of |= dict.fromkeys(np.unique(array).tolist(), client)
    pair = alike(client_of, classes)
    if pair is not None:
        first, second = (f"{label!r} (client {client_of[label]!r})" for label in pair)
        raise UsageError(
            f"the labels {first} and {second} read as one class: spell them alike, or name both "
            "(classes)"
        )


def numeric(labels: Iterable[Any]) -> list[float] | None:
    """Return labels as numbers, where all are numbers or texts of some; else None.

    Args:
        labels: of classes.
    """
    try:
        numbers = [float(label) for label in labels]
    except (TypeError, ValueError):
        return None
    return numbers if np.isfinite(numbers).all() else None


def fractional(labels: Sequence[Any]) -> Any | None:
    """Return a label that is no whole number where all are numbers or texts of some; else None.

    Args:
        labels: different ones.
    """
    pairs = zip(labels, numeric(labels) or (), strict=False)
    return next((label for label, number in pairs if number % 1), None)


def kind_of(client: str, labels: Array) -> str | None:
    """Return whether a client's labels are text, booleans or numbers; None where there are none.

    Args:
        client: its name.
        labels: (n,).

    Raises:
        UsageError: other labels, or numbers that are not whole.
    """
    if not labels.size:
        return None
    type_code = labels.dtype.kind
    if type_code == "f" and np.isnan(labels).any():
        raise _empty(client)
    if type_code == "U":
        return TEXT
    if type_code == "b":
        return BOOLEAN
    if type_code in "iu" or (type_code == "f" and _whole(labels)):
        return NUMBER
    what = str(labels.dtype)
    if type_code == "f":
        what = "floats that are not whole numbers: for these take the objective regression"
    raise UsageError(
        f"client {client!r}: labels are class numbers (integers from 0), text or booleans, not "
        f"{what}"
    )


def shared_kind(labels: Mapping[str, Sequence[Array]]) -> str:
    """Return whether all clients' labels are text, booleans or numbers.

    Booleans beside numbers count as numbers.

    Args:
        labels: arrays (n,) of each client by its name.

    Raises:
        UsageError: text beside other labels.
    """
    client_of_kind: dict[str, str] = {}
    for client, arrays in labels.items():
        for array in arrays:
            label_kind = kind_of(client, array)
            if label_kind is not None:
                client_of_kind.setdefault(label_kind, client)
    if TEXT in client_of_kind and len(client_of_kind) > 1:
        descriptions = [
            f"{label_kind} of client {client!r}" for label_kind, client in client_of_kind.items()
        ]
        raise UsageError(f"labels are {' and '.join(descriptions)}: use one kind for all clients")
    if len(client_of_kind) == 1:
        return next(iter(client_of_kind))
    return NUMBER


def of_labels(labels: Mapping[str, Sequence[Array]], classes: Any) -> ClassNames | None:
    """Return the names of the classes of labels; None where they are class numbers.

    Args:
        labels: arrays (n,) of each client by its name.
        classes: names that the user gives, or the number of outputs, or None.

    Raises:
        UsageError: labels that are neither numbers, text nor booleans, or of which people read two
            as one.
    """
    label_kind = shared_kind(labels)
    names = given_names(classes)
    if label_kind == TEXT:
        check_spelling(labels, names)
    if names is not None:
        return names
    arrays = [array for of_client in labels.values() for array in of_client]
    if label_kind == NUMBER:
        return _signs(arrays) if classes is None else None
    if classes is not None:
        raise UsageError(
            f"labels are {label_kind}, and classes = {classes!r}: give the names of the classes, "
            "or leave classes out"
        )
    return names_in(label_kind, arrays)


def _signs(arrays: Sequence[Array]) -> ClassNames | None:
    """Return -1 and 1 where labels are these two, which are names, and else None."""
    signs = {value for array in arrays for value in np.unique(array).tolist()}
    return (-1, 1) if signs == {-1, 1} else None


def names_in(label_kind: str, labels: Sequence[Array]) -> ClassNames:
    """Return the different labels in ascending order; both booleans, whichever occur.

    Args:
        label_kind: of the labels.
        labels: of all clients, (n,) each.
    """
    if label_kind == BOOLEAN:
        return BOOLEANS
    distinct = np.unique(np.concatenate([array for array in labels if array.size]))
    return tuple(sorted({spelled(label) for label in distinct.tolist()}))


def given_names(classes: Any) -> ClassNames | None:
    """Return the names of classes that a user gives; None for no list of names.

    Args:
        classes: names in the order of the class numbers, or anything else.

    Raises:
        UsageError: a single name, a name twice, one that is neither text nor a number, or text
            beside numbers.
    """
    if isinstance(classes, str) or not hasattr(classes, "__len__"):
        return None
    names = tuple(spelled(name) for name in np.asarray(classes, dtype=object).tolist())
    for name in names:
        if not isinstance(name, str | int | float):
            raise UsageError(f"classes: {name!r} is no label: give text, numbers or booleans")
    kinds = {isinstance(name, str) for name in names}
    if len(set(names)) < max(2, len(names)) or len(kinds) > 1:
        raise UsageError(
            "classes are at least two different labels of one kind, in the order of their "
            f"numbers, not {list(names)}"
        )
    return names


def in_type_of(names: ClassNames, labels: Array) -> ClassNames:
    """Return names in the type of a column's labels, where they are the text of such labels.

    Other names stay as they are: no label is one of them.

    Args:
        names: of the classes; text where they come from a command line.
        labels: distinct values of a column (k,).
    """
    if not all(isinstance(name, str) for name in names):
        return names
    texts = [str(name) for name in names]
    read: dict[str, Callable[[str], ClassName]] = {
        "b": lambda text: {"false": False, "true": True}[text.lower()],
        "i": int,
        "u": int,
        "f": float,
    }
    type_code = labels.dtype.kind
    if type_code not in read:
        return names
    try:
        typed = [read[type_code](text) for text in texts]
    except (KeyError, ValueError):
        return names
    # two texts may be one label
    return given_names(typed) or names


def numbers_of(names: ClassNames, labels: Array, subject: str) -> NDArray[np.int64]:
    """Return the class numbers of labels.

    Args:
        names: of the classes.
        labels: (n,).
        subject: whose labels they are, for the error.

    Raises:
        UsageError: a label that is none of the classes.
    """
    if not labels.size:
        return np.zeros(0, np.int64)
    distinct, positions = np.unique(labels, return_inverse=True)
    number_of = {spelled(name): number for number, name in enumerate(names)}
    numbers = []
    for label in distinct.tolist():
        number = number_of.get(spelled(label))
        if number is None:
            shown = listed([repr(name) for name in names])
            meant = [repr(name) for name in names if _read_alike(name) == _read_alike(label)]
            advice = f": did you mean {meant[0]}?" if meant else ""
            raise UsageError(
                f"{subject}: the label {label!r} is none of the classes {shown}{advice}"
            )
        numbers.append(number)
    return np.asarray(numbers, np.int64)[positions.reshape(-1)]


def unless_plain(names: ClassNames) -> ClassNames | None:
    """Return the names, or None where they are the class numbers themselves."""
    is_boolean = any(isinstance(name, bool) for name in names)
    if names == tuple(range(len(names))) and not is_boolean:
        return None
    return names


def _whole(values: Array) -> bool:
    """Return True if all floats are whole numbers that an integer represents exactly."""
    in_range = np.abs(values) < 2**53
    is_exact = np.isfinite(values) & in_range
    is_whole = is_exact & (values == np.floor(values))
    return bool(is_whole.all())
