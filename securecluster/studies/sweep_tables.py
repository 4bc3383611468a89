"""Tables of a sweep: its runs, their means with intervals, and the noise that clusters survive.

σ* and ε* stop at the first level that loses the clusters, and a run that diverged has lost them. A
fault of the program or the system says nothing about noise: its level is left out.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from securecluster.commands.failures import Row
from securecluster.core import atomic_files
from securecluster.results.scores import SCORES
from securecluster.studies import sweep_costs
from securecluster.studies.pareto import efficient

HOLDS = 0.9  # mean ARI from which clusters count as found
LEVEL = 0.95  # of all intervals
WIDE = 0.25  # difference of a plan's simulations, beyond which they tell nothing
RESAMPLES = 1000  # of the seeds, for intervals
FEWEST = 5  # seeds of an interval: resamples of fewer say of certainty what they do not know
TEXTS = (
    "protocol", "variant", "data", "scenario", "status", "reason", "mechanism", "dp_unit", "power",
    "chosen",
)  # fmt: skip
COUNTS = ("run", "seed", "clients", "clusters", "up", "down", "servers", "rounds")
FIRST = (
    "run", "protocol", "variant", "mechanism", "chosen", "dp_unit", "clip", "data", "scenario",
    "clients", "seed", "noise", "target_epsilon", "epsilon", "epsilon_together", "delta", "status",
    "reason", "fault", "power", "clusters", "ari", "pearson",
)  # fmt: skip
LAST = ("up", "down", "servers", "rounds", "seconds")
MEASURED = ("pearson", *LAST)  # means without an interval
KEYS = ("variant", "noise", "target_epsilon")  # of a line of the summary
SUMMED = ("protocol", "variant", "mechanism", "dp_unit", "delta")  # the same in all of its runs


class Interval(NamedTuple):
    """A mean over seeds with an interval; the ends are None with fewer than `FEWEST` seeds."""

    mean: float | None
    low: float | None
    high: float | None


class Threshold(NamedTuple):
    """The level at which clusters are lost.

    Attributes:
        value: of the noise or ε; None where no level of the grid holds.
        low: lower end of the interval; None with fewer than `FEWEST` seeds, or without a value.
        high: its upper end.
        kind: "interpolated"; "grid", the last level that holds, where one of its neighbours has no
            logarithm; "beyond", where every level holds, so that more noise may do; "none" where
            not even the least noise does; "unknown" without true clusters.
    """

    value: float | None
    low: float | None
    high: float | None
    kind: str


def columns(metric: str, scores: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the columns of the table of runs.

    Args:
        metric: the name of the clients' score.
        scores: names of further scores.
    """
    of_clients = (metric, f"worst_{metric}", f"{metric}_baseline", "below_baseline")
    return (*FIRST, *of_clients, *scores, *LAST)


def tidy(rows: Iterable[Row], metric: str) -> list[Row]:
    """Return a line per run with all columns, in the order of the runs.

    `epsilon_together` is ε of all runs of the run's unit of privacy together, on the same people
    (`sweep_costs.totals`); infinite as soon as one of them is.

    Args:
        rows: of finished runs, in any order.
        metric: the name of the clients' score.
    """
    ordered = sorted(rows, key=lambda row: int(row["run"]))
    together = {cost.unit: cost.epsilon for cost in sweep_costs.totals(ordered)}
    measured = {name for row in ordered for name in row.get("scores") or ()}
    own = sorted(measured - set(SCORES))
    names = columns(metric, [name for name in (*SCORES, *own) if name in measured])
    lines = []
    for row in ordered:
        known = row | (row.get("scores") or {})
        line = {name: known.get(name) for name in names}
        lines.append(line | {"epsilon_together": together.get(row["dp_unit"])})
    return lines


def summary(rows: Sequence[Row], metric: str, higher: bool = True) -> list[Row]:
    """Return a line per variant and level, with means over the seeds.

    ARI, the metric and the worst client's metric have 95 % bootstrap intervals in the columns
    `_low` and `_high`, from five seeds on. Runs that failed or were refused are counted, and in no
    mean. `efficient` says that no other line has at least this metric for at most the bytes and ε,
    and `efficient_ari` that none has this ARI.

    Args:
        rows: as `tidy` returns them.
        metric: the name of the clients' score.
        higher: True if a larger score is better.
    """
    levels = []
    rows = without_nan(rows)
    for variant_rows in groups(rows, ("variant",)):
        levels += groups(variant_rows, KEYS)
    lines = []
    for group in levels:
        done = [row for row in group if row["status"] == "done"]
        some = (done or group)[0]
        line = {name: some[name] for name in SUMMED}
        line["noise"] = _mean(done, "noise")
        if not done:
            line["noise"] = some["noise"]
        line["target_epsilon"] = some["target_epsilon"]
        line["epsilon"] = _mean(done, "epsilon")
        line["power"] = some.get("power")
        line["chosen"] = some.get("chosen")
        line["runs"] = len(done)
        for status in ("refused", "failed"):
            line[status] = sum(row["status"] == status for row in group)
        for name in ("ari", metric, f"worst_{metric}"):
            interval = mean_interval(_values(done, name))
            line[name] = interval.mean
            line[f"{name}_low"] = interval.low
            line[f"{name}_high"] = interval.high
        optional = (f"{metric}_baseline", "below_baseline")
        means = [name for name in optional if name in rows[0]]
        means += [name for name in rows[0] if name not in columns(metric)]
        for name in (*means, *MEASURED):
            line[name] = _mean(done, name)
        lines.append(line)
    marks = zip(lines, efficient(lines, metric, higher), efficient(lines, "ari"), strict=True)
    for line, by_metric, by_ari in marks:
        line |= {"efficient": by_metric, "efficient_ari": by_ari}
    return lines


def thresholds(rows: Sequence[Row]) -> list[Row]:
    """Return σ* and ε* of each variant.

    σ* is the largest noise multiplier before the mean ARI over the seeds falls below 0.9, and ε*
    the smallest ε. Levels are walked from the least noise on. Between the last level that holds
    and the first that does not, the mean ARI is a straight line over the logarithm of the noise, or
    of ε, and the threshold is where it crosses 0.9. Where one of the two has no logarithm (no
    noise, ε = ∞), it is the last level that holds. A run that diverged, or to which too few clients
    replied, has lost its clusters: its ARI is 0. A level is left out that has a refused run, or one
    that a fault of the program or the system ended. `failed` and `left_out` are the numbers of
    failed runs and of levels that are left out. Intervals are the 95 % percentiles of thresholds
    over resampled seeds (bootstrap).

    Args:
        rows: as `tidy` returns them.
    """
    lines = []
    for group in groups(without_nan(rows), ("variant",)):
        done = [row for row in group if row["status"] == "done"]
        some = (done or group)[0]
        line = {name: some[name] for name in SUMMED}
        for name, column, falls in (("sigma", "noise", False), ("epsilon", "epsilon", True)):
            crossing = _threshold_of(group, column, falls)
            line[f"{name}_star"] = crossing.value
            line[f"{name}_star_low"] = crossing.low
            line[f"{name}_star_high"] = crossing.high
            line[f"{name}_star_kind"] = crossing.kind
        line["failed"] = sum(row["status"] == "failed" for row in group)
        line["left_out"] = sum(_is_left_out(level) for level in groups(group, KEYS))
        lines.append(line)
    return lines


def without_nan(rows: Iterable[Row]) -> list[Row]:
    """Return rows in which None is in place of NaN, which pandas makes of it.

    Args:
        rows: as `tidy` returns them, or as a DataFrame of them does.
    """
    # NaN alone differs from itself
    return [{name: None if x != x else x for name, x in row.items()} for row in rows]


def groups(rows: Sequence[Row], names: Sequence[str]) -> list[list[Row]]:
    """Return the rows with equal values of some columns together, in their first order.

    A sweep over ε finds the noise, which may differ by seed: such rows are one group.

    Args:
        rows: as `tidy` returns them.
        names: of the columns.
    """
    rows_by_key: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = []
        for name in names:
            has_target = name == "noise" and row["target_epsilon"] is not None
            key.append(None if has_target else row[name])
        rows_by_key.setdefault(tuple(key), []).append(row)
    return list(rows_by_key.values())


def _values(rows: Sequence[Row], name: str) -> list[float]:
    """Return a column's numbers."""
    return [float(row[name]) for row in rows if row[name] is not None]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a column's numbers; None without any."""
    values = _values(rows, name)
    if not values:
        return None
    return math.fsum(values) / len(values)


def mean_interval(values: Sequence[float]) -> Interval:
    """Return a mean with its 95 % bootstrap interval over the seeds (percentiles of resamples).

    Args:
        values: one for each seed; of fewer than `FEWEST` there is no interval.
    """
    if not values:
        return Interval(None, None, None)
    count = len(values)
    mean = math.fsum(values) / count
    if count < FEWEST:
        return Interval(mean, None, None)
    draws = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    means = np.asarray(values)[draws].mean(axis=1)
    low, high = np.quantile(means, ((1 - LEVEL) / 2, (1 + LEVEL) / 2))
    return Interval(mean, float(low), float(high))


def _is_left_out(rows: Sequence[Row]) -> bool:
    """Return whether a level says nothing about where clusters are lost.

    Args:
        rows: of one variant at one level.
    """
    return any(row["status"] == "refused" or row["fault"] for row in rows)


def _place(rows: Sequence[Row], column: str, falls: bool) -> float:
    """Return the noise or the ε of a level.

    Args:
        rows: of one variant at one level.
        column: the noise or ε.
        falls: True if more noise makes the column's numbers smaller.
    """
    mean_level = _mean([row for row in rows if row["status"] == "done"], column)
    if mean_level is not None:
        return mean_level
    # all runs diverged: the level that they were given, or one beyond all others
    target = "noise" if column == "noise" else "target_epsilon"
    requested = rows[0][target]
    if requested is not None:
        return float(requested)
    return 0.0 if falls else math.inf


def noisiness(rows: Sequence[Row]) -> float:
    """Return a number that is larger for levels with more noise.

    Args:
        rows: of one variant at one level.
    """
    target = rows[0]["target_epsilon"]
    if target is not None:
        return -float(target)
    return float(rows[0]["noise"])


def _threshold_of(rows: Sequence[Row], column: str, falls: bool) -> Threshold:
    """Return where a variant loses its clusters.

    Args:
        rows: of one variant.
        column: the noise or ε.
        falls: True if more noise makes the column's numbers smaller.
    """
    levels: list[tuple[float, list[float]]] = []
    for group in sorted(groups(rows, KEYS), key=noisiness):
        if _is_left_out(group):
            continue
        done = [row for row in group if row["status"] == "done"]
        in_order = sorted(group, key=lambda row: int(row["seed"]))
        if any(row["ari"] is None for row in done):
            return Threshold(None, None, None, "unknown")
        aris = []
        for row in in_order:
            # of a run that diverged there is none
            aris.append(float(row["ari"] or 0.0))
        levels.append((_place(group, column, falls), aris))
    if not levels:
        return Threshold(None, None, None, "unknown")
    places = [level for level, _ in levels]
    aris_by_level = np.array([aris for _, aris in levels])
    return threshold(places, aris_by_level)


def threshold(places: Sequence[float], aris: NDArray[np.float64]) -> Threshold:
    """Return the level at which the mean ARI falls below `HOLDS`.

    Args:
        places: noise, or ε, of each level, from the least noise on.
        aris: of each level and seed, (levels, seeds).
    """
    value, how = _crossing(places, aris.mean(axis=1))
    seeds = aris.shape[1]
    if value is None or seeds < FEWEST:
        return Threshold(value, None, None, how)
    draws = np.random.default_rng(0).integers(seeds, size=(RESAMPLES, seeds))
    means = aris[:, draws].mean(axis=2)
    # where a resample holds nowhere, its threshold is beyond the least noise
    lost = math.inf
    if places[0] <= places[-1]:
        lost = 0.0
    resampled = []
    for resample in means.T:
        crossed, _ = _crossing(places, resample)
        if crossed is None:
            crossed = lost
        resampled.append(crossed)
    tails = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)
    # one of the resamples, since infinite ones cannot be averaged
    low, high = np.quantile(resampled, tails, method="closest_observation")
    return Threshold(value, float(low), float(high), how)


def _crossing(places: Sequence[float], means: Iterable[float]) -> tuple[float | None, str]:
    """Return where means fall below `HOLDS`, and the kind of this threshold.

    Args:
        places: noise, or ε, of each level, from the least noise on.
        means: the mean ARI of each level.
    """
    last: tuple[float, float] | None = None
    for level, mean in zip(places, means, strict=True):
        if mean >= HOLDS:
            last = (level, mean)
            continue
        if last is None:
            return None, "none"
        held, held_mean = last
        if not all(0 < end < math.inf for end in (held, level)):
            return held, "grid"
        share = (held_mean - HOLDS) / (held_mean - mean)
        logarithm = math.log(held) + share * (math.log(level) - math.log(held))
        return math.exp(logarithm), "interpolated"
    return places[-1], "beyond"


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, an empty field for None, and `inf` for infinite.

    Args:
        path: of the file, which appears whole or not at all.
        rows: with equal keys, the columns.
    """
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    atomic_files.write_atomic(path, buffer.getvalue().encode())


def write_parquet(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as Parquet: texts, whole numbers and floats by the column's name.

    Args:
        path: of the file, which appears whole or not at all.
        rows: with equal keys, the columns.
    """
    import pyarrow
    import pyarrow.parquet

    schema = []
    arrays = []
    for name in rows[0]:
        column_type, convert = _column_kind(name, rows)
        values = [None if row[name] is None else convert(row[name]) for row in rows]
        arrays.append(pyarrow.array(values, type=getattr(pyarrow, column_type)()))
        schema.append(name)
    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, names=schema), buffer)
    atomic_files.write_atomic(path, buffer.getvalue())


def _column_kind(name: str, rows: Sequence[Row]) -> tuple[str, Callable[[Any], Any]]:
    """Return the type of a column, and the function that converts to it.

    Args:
        name: of the column.
        rows: whose means of whole numbers are floats.
    """
    if name in TEXTS or name.endswith("_kind"):
        return "string", str
    if name.startswith("efficient") or name == "fault":
        return "bool_", bool
    means = "runs" in rows[0] and name in MEASURED
    if name in ("runs", "refused", "failed") or (name in COUNTS and not means):
        return "int64", int
    return "float64", float
