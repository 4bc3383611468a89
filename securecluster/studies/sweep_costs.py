"""What the runs of a sweep cost together, on the same people.

All runs of a seed have the same clients. Another seed may deal a sample to another client, so a
person is taken to be, in every run, the client that released most there. For Gaussian releases this
is the largest ε that any person can have; for sampled batches it is that where one client is the
dearest in all runs, as the smallest one is.

One run without noise makes the sum infinite. Clients' scores, and the choice of a noise by them,
are named as what no ε covers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from securecluster.commands.failures import Row
from securecluster.core.number_format import enumerated
from securecluster.core.serialization import typed
from securecluster.privacy.dp.ledger import Expense, History, joint_price
from securecluster.training.config import FULL_GRADIENT

# of the numbers of an expense
SMALLEST = 1e-50
LARGEST = 1e50
MOST = 10**12
TWO_UNITS = (
    "ε of a client and ε of an example do not add up: neither figure covers the runs of the other"
)
NOT_COUNTED = "not counted, what was released before it failed"
SAME_PEOPLE = (
    "that is of the same people in all runs, also where a seed deals their samples to other "
    "clients: in each run as much is counted as of the client that released most"
)


@dataclass(frozen=True)
class Total:
    """ε of a sweep's runs of one unit of privacy, together.

    Attributes:
        unit: "client" or "example".
        epsilon: of all of them; None where a record of an earlier version does not say what a run
            released.
        delta: the smallest δ of the runs.
        runs: number of those that ended.
        private: number of those whose ε is finite.
        epsilon_private: of these together; None as `epsilon` is.
        failed: numbers of runs that failed. What they released before is in no figure.
    """

    unit: str
    epsilon: float | None
    delta: float
    runs: int
    private: int
    epsilon_private: float | None
    failed: tuple[int, ...]


def as_json(history: History) -> list[Row]:
    """Return expenses as JSON has them, in an order that does not depend on the process."""
    entries = [{**asdict(expense), "times": times} for expense, times in history]
    for entry in entries:
        entry["sensitivities"] = list(entry["sensitivities"])
    return sorted(entries, key=repr)


def history_of(entries: Sequence[Mapping[str, Any]]) -> History:
    """Return the expenses that `as_json` wrote.

    Args:
        entries: of JSON.

    Raises:
        ValueError: what no run releases.
        KeyError: an entry without a number of times.
    """
    history = []
    for entry in entries:
        values = dict(entry)
        times = values.pop("times")
        expense = typed(values, Expense)
        if not (type(times) is int and 0 < times <= MOST and _is_possible(expense)):
            raise ValueError("an expense that no run has")
        history.append((expense, times))
    return frozenset(history)


def _is_possible(expense: Expense) -> bool:
    """Return whether a run can have an expense."""
    numbers = [expense.noise_multiplier, expense.variance, *expense.sensitivities]
    if not all(number == 0 or SMALLEST <= number <= LARGEST for number in numbers):
        return False
    if expense.mechanism == "skellam":
        return len(expense.sensitivities) == 2 and expense.variance > 0
    if expense.mechanism == "dp-sgd" and expense.samples is None:
        return False
    if expense.samples is not None and not 0 <= expense.samples <= MOST:
        return False
    batch = 1 if expense.batch is None else expense.batch
    largest = FULL_GRADIENT.batch_size  # of a step over all samples, as in R-DPCFL's first round
    return 1 <= expense.replace <= 2 and 1 <= batch <= largest and 1 <= expense.epochs <= MOST


def totals(rows: Iterable[Row]) -> list[Total]:
    """Return what the runs cost together, by the unit of privacy.

    Args:
        rows: of runs, in order.
    """
    by_unit: dict[str, list[Row]] = {}
    for row in rows:
        by_unit.setdefault(row["dp_unit"], []).append(row)
    return [_total(unit, some) for unit, some in by_unit.items()]


def _total(unit: str, rows: Sequence[Row]) -> Total:
    """Return what the runs of one unit of privacy cost together."""
    done = [row for row in rows if row["status"] == "done"]
    private = [row for row in done if math.isfinite(row["epsilon"])]
    delta = min(row["delta"] for row in rows)
    epsilon_private = _joint_epsilon(private, delta)
    epsilon = epsilon_private
    if len(private) < len(done):
        epsilon = math.inf
    failed = tuple(row["run"] for row in rows if row["status"] == "failed")
    return Total(unit, epsilon, delta, len(done), len(private), epsilon_private, failed)


def _joint_epsilon(rows: Sequence[Row], delta: float) -> float | None:
    """Return ε of some runs together; None where one does not say what it released."""
    histories = []
    for row in rows:
        if row.get("spent") is None:
            return None
        histories.append(history_of(row["spent"]))
    return joint_price(histories, delta).epsilon


def sentences(rows: Sequence[Row], metric: str) -> list[str]:
    """Return what the runs cost together, and what in the tables no ε covers.

    Args:
        rows: of all runs, in order.
        metric: the name of the clients' score.
    """
    lines = []
    costs = totals(rows)
    for cost in costs:
        lines.append(_sentence(cost))
        if cost.failed:
            numbers = enumerated("run", cost.failed)
            lines.append(f"{NOT_COUNTED}: {numbers}")
    if any(cost.private > 1 for cost in costs):
        lines.append(SAME_PEOPLE)
    if len(costs) > 1:
        lines.append(TWO_UNITS)
    lines.append(
        f"no ε covers {metric} in the tables, which is of clients' own test samples, without noise "
        f"(worst_{metric} is one client's number), nor agreement with the true clusters, nor the "
        "choice of a noise by these results"
    )
    return lines


def _sentence(cost: Total) -> str:
    """Return in words what the runs of one unit of privacy cost together."""
    start = f"together, ε of one {cost.unit}"
    if not cost.runs:
        return f"{start}: none, since no run ended"
    counted = f"{cost.private} runs" if cost.private != 1 else "1 run"
    private = f"{counted} of finite ε, whose records do not say what they released"
    if cost.epsilon_private is not None:
        private = f"{cost.epsilon_private:.4g} at δ = {cost.delta:g} ({counted})"
    if cost.private == cost.runs:
        return f"{start}: {private}"
    infinite = cost.runs - cost.private
    runs = f"{infinite} runs" if infinite != 1 else "1 run"
    line = f"{start}: infinite, since {runs} released something without noise"
    if cost.private:
        line += f"; without these, {private}"
    return line
