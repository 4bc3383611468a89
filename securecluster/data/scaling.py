"""Scales of users' own features, chosen before a run.

Bounds are public, and a client's own mean and standard deviation stay with it. Scaling each client
by its own statistics makes all clients' features have the same means and deviations, so a shift
between clients, which may be what tells clusters apart, is gone. Those over all clients leave in
one sum of the run (`shared_scale`), and until then samples are on their public bounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from securecluster.data.feature_columns import listed
from securecluster.errors import UsageError

Array: TypeAlias = NDArray[Any]
NONE, CLIENT, BOUNDS, SHARED = "none", "client", "bounds", "shared"
QUANTILES = "shared-quantiles"
FOUND = (SHARED, QUANTILES)  # by the run, within public bounds
FIRST, LAST = "first", "last"  # axes of images' channels
POOLED = "pooled"  # name of the shared centres and widths (2, f) in clients' state
AUTO = "auto"  # a preparation that finds categories itself
Categories: TypeAlias = tuple[str | float, ...] | None  # of a column; None for numbers


def codes_of(categories: tuple[str | float, ...]) -> list[float]:
    """Return the number that stands for each category: itself, or the place of a text."""
    return [k if isinstance(name, str) else float(name) for k, name in enumerate(categories)]


@dataclass(frozen=True)
class Scale:
    """Map of a client's features, x to (x − centre) / width.

    Args:
        centre: of each feature (k,), or of all values (1,).
        width: likewise; 0 for a constant feature, which counts for nothing: its values become 0.
        fill: what stands in for gaps in each column; empty where there are none.
    """

    centre: tuple[float, ...]
    width: tuple[float, ...]
    fill: tuple[float, ...] = ()

    @classmethod
    def of(cls, samples: Array) -> Scale:
        """Return the scale that standardises samples: by column for tables, else over all values.

        Args:
            samples: (n, …), at least one.
        """
        values = samples.astype(np.float64)
        if values.ndim != 2:
            values = values.reshape(-1, 1)
        means, deviations = values.mean(axis=0), values.std(axis=0)
        # what rounding leaves of a constant feature, as scikit-learn bounds it
        rounding = np.abs(means) * len(values) * np.finfo(np.float64).eps
        widths = np.where(deviations > rounding, deviations, 0.0)
        return cls(tuple(means.tolist()), tuple(widths.tolist()))

    def applied(self, samples: Array, dtype: type = np.float32) -> Array:
        """Return samples (n, …) on this scale.

        Args:
            samples: (n, …).
            dtype: of the result.
        """
        # an empty array may have any shape
        if not samples.size:
            return samples.astype(dtype)
        centred = samples.astype(np.float64) - np.asarray(self.centre)
        width = np.asarray(self.width)
        scaled: Array = np.where(width > 0, centred / np.where(width > 0, width, 1.0), 0.0)
        return scaled.astype(dtype)

    def reordered(self, positions: Sequence[int]) -> Scale:
        """Return the scale of features in another order.

        Args:
            positions: of the features, in the new order.
        """
        if len(self.centre) == 1:
            return self
        centre = tuple(self.centre[k] for k in positions)
        return Scale(centre, tuple(self.width[k] for k in positions))


@dataclass(frozen=True)
class Scaling:
    """Scaling of all clients' features, which is public.

    Args:
        kind: "client": each client by its own mean and standard deviation; "bounds": from public
            bounds to −1 … 1, with values beyond them cut off; "shared": likewise, and from there by
            the mean and the deviation over all clients, which the run finds; "shared-quantiles":
            by their median and interquartile range; "none": as they are, of images whose channels
            come last.
        low: lower bound of each feature, or one of all of them; empty for "client".
        high: upper bounds.
        categories: of each column of a table whose gaps are filled: numbers are filled by the
            client's own median, or the middle of the bounds, and each category becomes a feature,
            which is 1 where a row has it; empty where samples have no gaps.
        counted: whether categories were found in the clients' rows, and not given.
        channels: axis of images' channels as clients have them, "first" or "last"; networks take
            them first.
    """

    kind: str
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    categories: tuple[Categories, ...] = ()
    counted: bool = field(default=False, compare=False)
    channels: str = FIRST

    @classmethod
    def chosen(
        cls,
        choice: Any,
        names: Sequence[str] | None,
        shape: Sequence[int],
        categories: tuple[Categories, ...] = (),
    ) -> Scaling | None:
        """Return the scaling of a user's choice, or None for no scaling.

        Args:
            choice: "none", "client", or bounds: one pair (low, high), or a pair for each column by
                its name, or by its number where columns have no names; or ("shared", bounds), or
                ("shared-quantiles", bounds).
            names: of the columns, or None.
            shape: of a sample.
            categories: of each column, where gaps are filled; then "none" is "client".

        Raises:
            UsageError: another choice, or bounds that are no bounds of these columns.
        """
        if categories:
            scaling = cls.chosen(
                CLIENT if choice in (None, NONE) else choice, *_numeric(names, categories)
            )
            assert scaling is not None
            return scaling.with_categories(categories)
        if choice is None or (isinstance(choice, str) and choice == NONE):
            return None
        if isinstance(choice, str) and choice == CLIENT:
            return cls(CLIENT)
        if is_shared(choice):
            return cls._shared(choice, names, shape)
        if isinstance(choice, Mapping):
            pairs = _of_columns(choice, names, shape)
        elif isinstance(choice, str):
            raise UsageError(
                f"scaling = {choice!r}: give 'none', 'client', bounds such as "
                "{'age': (0, 120)}, or ('shared', bounds)"
            )
        else:
            pairs = [_pair("all features", choice)]
        low, high = zip(*pairs, strict=True)
        return cls(BOUNDS, tuple(low), tuple(high))

    @classmethod
    def _shared(
        cls, choice: Sequence[Any], names: Sequence[str] | None, shape: Sequence[int]
    ) -> Scaling:
        """Return the scaling by numbers that the run finds within public bounds.

        Raises:
            UsageError: samples that are no table, or bounds that are no bounds of its columns.
        """
        if len(shape) != 1 or not shape[0]:
            raise UsageError(
                "a shared scale is of the columns of numbers of a table, and there "
                "are none: give bounds, or 'client'"
            )
        kind, bounds = choice
        scaling = None if isinstance(bounds, str) else cls.chosen(bounds, names, shape)
        if scaling is None:
            raise UsageError(
                f"scaling = ({kind!r}, {bounds!r}): what clients send is bounded by public bounds, "
                f"give them: ({kind!r}, {{'age': (0, 120), ...}})"
            )
        repeats = shape[0] // len(scaling.low)
        return cls(kind, scaling.low * repeats, scaling.high * repeats)

    @property
    def shared(self) -> bool:
        """Return whether the run finds the scale over all clients."""
        return self.kind in FOUND

    @property
    def numbers(self) -> list[int]:
        """Return the features that are numbers, and not marks of categories."""
        if not self.categories:
            return list(range(len(self.low)))
        return np.flatnonzero(np.isnan(self.marks)).tolist()

    def pooled(self, scale: Sequence[Sequence[float]]) -> Scale:
        """Return the scale of samples as clients have them, whose gaps become centres.

        Args:
            scale: centres and widths of the numbers on public bounds, as the run found them.
        """
        bounds = self.public
        assert bounds is not None
        centre, width = np.asarray(bounds.centre), np.asarray(bounds.width)
        # marks of categories stay as they are
        centre[self.numbers] += width[self.numbers] * scale[0]
        width[self.numbers] *= scale[1]
        return Scale(tuple(centre.tolist()), tuple(width.tolist()), self._fills(centre))

    def gaps(self, samples: Array) -> Array:
        """Return which numbers are missing, by feature (n, f).

        Args:
            samples: (n, k), NaN for gaps.
        """
        gaps: Array = np.isnan(samples)
        if self.categories and gaps.size:
            gaps = gaps[:, self.sources] & np.isnan(self.marks)
        return gaps

    def _fills(self, centre: Array) -> tuple[float, ...]:
        """Return what stands in for gaps of each column: the centre of numbers."""
        if not self.categories:
            return ()
        firsts = [self.sources.index(k) for k in range(len(self.categories))]
        middles = zip(self.categories, centre[firsts].tolist(), strict=True)
        return tuple(np.nan if names else middle for names, middle in middles)

    @property
    def of_rows(self) -> bool:
        """Return whether a client's scale is computed from its rows."""
        return self.kind == CLIENT

    @property
    def public(self) -> Scale | None:
        """Return the scale of all clients before a run; None where each has its own."""
        if self.kind == CLIENT:
            return None
        if self.kind == NONE:
            return Scale((0.0,), (1.0,))
        low, high = np.asarray(self.low), np.asarray(self.high)
        centre = (low + high) / 2
        width = (high - low) / 2
        return Scale(tuple(centre.tolist()), tuple(width.tolist()), self._fills(centre))

    def scale_of(self, samples: Array) -> Scale:
        """Return a client's scale.

        Args:
            samples: that it trains on (n, …).
        """
        if self.public is not None:
            return self.public
        if not self.categories:
            return Scale.of(samples)
        from sklearn.impute import SimpleImputer

        # a column without a value is filled with 0, and then constant
        imputer = SimpleImputer(strategy="median", keep_empty_features=True)
        fill = imputer.fit(samples).statistics_
        is_number = [names is None for names in self.categories]
        fill = np.where(is_number, fill, np.nan)
        scale = Scale.of(self.expanded(samples, fill))
        marks = self.marks
        centre = np.where(np.isnan(marks), scale.centre, 0.0)
        width = np.where(np.isnan(marks), scale.width, 1.0)
        return Scale(tuple(centre.tolist()), tuple(width.tolist()), tuple(fill.tolist()))

    @property
    def sources(self) -> list[int]:
        """Return the column that each feature is made of."""
        counts = [1 if names is None else len(names) for names in self.categories]
        return np.repeat(np.arange(len(counts)), counts).tolist()

    @property
    def marks(self) -> list[float]:
        """Return the code of the category that each feature marks; NaN for numbers."""
        codes = [[np.nan] if names is None else codes_of(names) for names in self.categories]
        return [code for of_column in codes for code in of_column]

    def expanded(self, samples: Array, fill: Any) -> Array:
        """Return a feature for each number and category, without gaps (n, c).

        Args:
            samples: (n, k), NaN for gaps.
            fill: what stands in for them (k,).
        """
        values = np.where(np.isnan(samples), fill, samples)[:, self.sources]
        marks = np.asarray(self.marks)
        expanded: Array = np.where(np.isnan(marks), values, values == marks)
        return expanded

    def prepared(self, samples: Array, scale: Scale) -> Array:
        """Return samples as networks take them, in single precision unless the run scales them.

        Args:
            samples: (n, …), as a client has them.
            scale: of the client.
        """
        if self.categories and samples.size:
            samples = self.expanded(samples, scale.fill)
        return scale.applied(self.bounded(samples), np.float64 if self.shared else np.float32)

    def with_categories(self, categories: tuple[Categories, ...]) -> Scaling:
        """Return the scaling of the numbers among columns of which some are categories."""
        scaling = replace(self, categories=categories)
        if not self.low:
            return scaling
        is_number = np.isnan(scaling.marks)
        bounds = []
        # a category is 0 or 1
        for given, beyond in ((self.low, -1.0), (self.high, 1.0)):
            values = np.full(len(is_number), beyond)
            values[is_number] = given
            bounds.append(tuple(values.tolist()))
        return replace(scaling, low=bounds[0], high=bounds[1])

    def bounded(self, samples: Array) -> Array:
        """Return samples (n, …) with values beyond the bounds cut off, where there are bounds."""
        if not self.low or not samples.size:
            return samples
        bounded: Array = np.clip(samples, self.low, self.high)
        return bounded

    def reordered(self, positions: Sequence[int]) -> Scaling:
        """Return the scaling of features in another order.

        Args:
            positions: of the features, in the new order.
        """
        scaling = self
        if self.categories:
            scaling = replace(self, categories=tuple(self.categories[k] for k in positions))
        if len(self.low) < 2:
            return scaling
        order = self.features_of(positions)
        low = tuple(self.low[k] for k in order)
        return replace(scaling, low=low, high=tuple(self.high[k] for k in order))

    def features_of(self, positions: Sequence[int]) -> Sequence[int]:
        """Return the positions of the features that columns become.

        Args:
            positions: of the columns.
        """
        if not self.categories:
            return positions
        sources = np.asarray(self.sources)
        return [int(k) for position in positions for k in np.flatnonzero(sources == position)]

    def as_json(self) -> dict[str, Any]:
        """Return the scaling as JSON has it."""
        content: dict[str, Any] = {"kind": self.kind}
        if self.low:
            content |= {"low": list(self.low), "high": list(self.high)}
        if self.categories:
            content["categories"] = [names and list(names) for names in self.categories]
            content["counted"] = self.counted
        if self.channels != FIRST:
            content["channels"] = self.channels
        return content

    def given_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a sample as clients have it.

        Args:
            shape: as networks take it.
        """
        if self.categories:
            return (len(self.categories),)
        return (*shape[1:], shape[0]) if self.channels == LAST else tuple(shape)

    @classmethod
    def read(cls, value: Any) -> Scaling | None:
        """Return the scaling that `as_json` returned; None for None.

        Raises:
            ValueError: no scaling.
        """
        if value is None:
            return None
        low, high = (tuple(map(float, value.get(name, ()))) for name in ("low", "high"))
        categories = tuple(_categories(names) for names in value.get("categories", ()))
        channels = value.get("channels", FIRST)
        kinds = (CLIENT, BOUNDS, *FOUND, *([NONE] if channels == LAST else []))
        if value["kind"] not in kinds or len(low) != len(high) or channels not in (FIRST, LAST):
            raise ValueError("no scaling")
        counted = bool(value.get("counted", False))
        return cls(value["kind"], low, high, categories, counted, channels)


def _categories(names: Any) -> Categories:
    """Return categories as JSON has them."""
    if names is None:
        return None
    if not names or len({isinstance(name, str) for name in names}) > 1:
        raise ValueError("no categories")
    return tuple(name if isinstance(name, str) else float(name) for name in names)


def chosen_categories(prepare: Any) -> dict[str, Categories] | None:
    """Return the categories that a user's choice of a preparation gives, by column.

    Args:
        prepare: None for no preparation, "auto", the categories of some columns by their names, or
            a transformer of scikit-learn.

    Returns:
        Of a transformer of columns an entry for each column, None for numbers.

    Raises:
        UsageError: another choice, or categories that are none.
    """
    if prepare is None:
        return None
    if isinstance(prepare, str) and prepare == AUTO:
        return {}
    if hasattr(prepare, "fit_transform"):
        return _of_estimator(prepare)
    try:
        return {str(name): _categories(tuple(given)) for name, given in prepare.items()}
    except (AttributeError, TypeError, ValueError):
        raise UsageError(
            f"prepare = {prepare!r}: give 'auto', a transformer of scikit-learn, or the categories "
            "of columns, such as {'sex': ['female', 'male']}"
        ) from None


def _of_estimator(estimator: Any) -> dict[str, Categories]:
    """Return what a transformer of scikit-learn does, by column.

    Args:
        estimator: a pipeline of SimpleImputer and StandardScaler, or a ColumnTransformer of such
            pipelines and of OneHotEncoder.

    Raises:
        UsageError: another one, of which a model would not know how it prepares.
    """
    from sklearn.compose import ColumnTransformer

    if not isinstance(estimator, ColumnTransformer):
        _check_numbers(estimator)
        return {}
    found: dict[str, Categories] = {}
    for _, part, columns in estimator.transformers:
        if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
            raise UsageError(f"prepare names columns by {columns!r}: give a list of their names")
        found |= dict.fromkeys(columns) if _is_numeric(part) else _encoded(part, columns)
    return found


def _is_numeric(part: Any) -> bool:
    """Return whether a part of a ColumnTransformer prepares numbers, as is known of it."""
    if type(part).__name__ == "OneHotEncoder":
        return False
    _check_numbers(part)
    return True


def _encoded(encoder: Any, columns: Sequence[str]) -> dict[str, Categories]:
    """Return the categories of a OneHotEncoder by column.

    Raises:
        UsageError: they are not named, or others are not ignored.
    """
    is_known = encoder.handle_unknown == "ignore" and encoder.drop is None
    if not is_known or isinstance(encoder.categories, str):
        raise UsageError(
            "prepare has a OneHotEncoder that finds categories, or does not ignore others: give "
            "OneHotEncoder(categories=[[...]], handle_unknown='ignore')"
        )
    given = map(tuple, encoder.categories)
    return {name: _categories(names) for name, names in zip(columns, given, strict=True)}


def _check_numbers(estimator: Any) -> None:
    """Raise UsageError unless an estimator fills gaps by medians, and standardises."""
    steps = [step for _, step in getattr(estimator, "steps", [("", estimator)])]
    kinds = [type(step).__name__ for step in steps]
    if kinds == ["SimpleImputer", "StandardScaler"]:
        imputer, scaler = steps
        plain = not imputer.add_indicator and np.isnan(imputer.missing_values)
        if plain and imputer.strategy == "median" and scaler.with_mean and scaler.with_std:
            return
    raise UsageError(
        f"prepare has {', '.join(kinds)}, and a model knows how to prepare numbers by "
        "make_pipeline(SimpleImputer(strategy='median'), StandardScaler()): give this, or "
        "transform the table first"
    )


def _numeric(
    names: Sequence[str] | None, categories: Sequence[Categories]
) -> tuple[list[str] | None, tuple[int]]:
    """Return the names of the columns of numbers, if they have some, and their count."""
    numbers = [k for k, given in enumerate(categories) if given is None]
    return None if names is None else [names[k] for k in numbers], (len(numbers),)


def _of_columns(
    choice: Mapping[Any, Any], names: Sequence[str] | None, shape: Sequence[int]
) -> list[tuple[float, float]]:
    """Return the bounds of all columns in order."""
    if len(shape) != 1:
        raise UsageError(
            f"bounds by column are for tables, and samples have shape {tuple(shape)}: give one "
            "pair (low, high)"
        )
    columns: list[Any] = list(range(shape[0]))
    if names is not None and len(names) == shape[0]:
        columns = list(names)
    missing = [str(column) for column in columns if column not in choice]
    unknown = [str(column) for column in choice if column not in columns]
    if missing or unknown:
        faults = []
        if missing:
            faults.append(f"lack {listed(missing)}")
        if unknown:
            faults.append(f"have {listed(unknown)} besides")
        raise UsageError(f"bounds {' and '.join(faults)}: give a pair for each feature")
    return [_pair(f"column {column!r}", choice[column]) for column in columns]


def _pair(subject: str, value: Any) -> tuple[float, float]:
    """Return public bounds as a pair of floats."""
    try:
        low, high = (float(bound) for bound in value)
    except (TypeError, ValueError):
        raise UsageError(
            f"bounds of {subject} are a pair (low, high), not {value!r}: give two numbers"
        ) from None
    if not (np.isfinite([low, high]).all() and low < high):
        raise UsageError(f"bounds of {subject} are {low:g} and {high:g}: the first is the lower")
    return low, high


def chosen_scaling(scaling: str | None, bounds: Sequence[str] | None) -> Any:
    """Return the scaling that options of the command line name, as `Scaling.chosen` takes it.

    Args:
        scaling: "none", "client", "bounds", "shared" or "shared-quantiles"; None is "bounds" where
            there are some, else "none".
        bounds: as COLUMN=LOW:HIGH, or a single LOW:HIGH.

    Raises:
        UsageError: another word, or bounds without numbers or without use.
    """
    mode = scaling or (BOUNDS if bounds else NONE)
    if mode not in (NONE, CLIENT, BOUNDS, *FOUND):
        kinds = ", ".join((NONE, CLIENT, BOUNDS, *FOUND))
        raise UsageError(f"--scaling {mode}: give one of {kinds}")
    if bounds and mode in (NONE, CLIENT):
        raise UsageError(f"--bounds are for --scaling bounds, not {mode}: leave one of them out")
    if mode in (NONE, CLIENT):
        return mode
    if not bounds:
        raise UsageError(f"--scaling {mode} needs public bounds: give --bounds age=0:120 …")
    pairs = {}
    for text in bounds:
        column, _, values = text.rpartition("=")
        pairs[column] = tuple(values.split(":"))
    chosen: Any
    if list(pairs) == [""]:
        chosen = _pair("all features", pairs[""])
    else:
        chosen = {column: _pair(f"column {column!r}", pair) for column, pair in pairs.items()}
    return (mode, chosen) if mode in FOUND else chosen


def scaling_options(scaling: Any) -> dict[str, Any]:
    """Return the options of the command line for a scaling, by the names of their fields.

    Args:
        scaling: as `Scaling.chosen` takes it.
    """
    if isinstance(scaling, str):
        return {"scaling": None if scaling == NONE else scaling}
    mode = BOUNDS
    if is_shared(scaling):
        mode, scaling = scaling
    pairs = {"": scaling}
    if isinstance(scaling, Mapping):
        pairs = {f"{column}=": pair for column, pair in scaling.items()}
    texts = [f"{column}{float(low)!r}:{float(high)!r}" for column, (low, high) in pairs.items()]
    return {"scaling": mode, "bounds": tuple(texts)}


def is_shared(choice: Any) -> bool:
    """Return whether a user's choice is of a kind that the run finds, and bounds."""
    is_pair = isinstance(choice, list | tuple) and len(choice) == 2
    return is_pair and isinstance(choice[0], str) and choice[0] in FOUND
