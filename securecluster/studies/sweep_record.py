"""The record of a sweep's runs, `runs.jsonl`: a line for each run that has ended, with a digest.

The last entry of a line, `sha256`, is the digest of all lines before it and of the line itself.
Lines that were changed, moved, added, or removed before others are therefore found. What a kill may
leave, a last line without its end, is removed, and its run is done again. Digests guard against
damage, not against forgery; a forged line is still a run of the plan with values that a run can
have, so that nothing fails on it.

Records of earlier versions without digests are refused: read as they are, their damage would be
silent. Runs have no folders, so one that a kill stopped is done again.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from securecluster.commands.failures import Row
from securecluster.core import atomic_files, manifest
from securecluster.core.serialization import typed
from securecluster.errors import RunFolderError
from securecluster.studies import sweep_costs
from securecluster.studies.sweep_plan import NOISE, Cell
from securecluster.studies.sweep_runner import DONE, FAILED, REFUSED

SEAL = re.compile(rb', "sha256": "([0-9a-f]{64})"\}')
SEALED = len(', "sha256": ""}') + 64  # bytes at the end of a line
INFINITE = "inf"  # in place of a number that JSON does not have
MAY_BE_INFINITE = ("target_epsilon", "epsilon")
ROUNDING = 1e-6  # by which a correlation may be above 1


@dataclass(frozen=True)
class RunRecord:
    """A line of the record.

    Attributes:
        run: number of the run in the plan.
        protocol: its name.
        variant: label of the protocol with its options.
        mechanism: which noise it puts where.
        dp_unit: "client" or "example".
        clip: norm.
        delta: δ.
        data: name of the data.
        scenario: how clients differ.
        seed: of the run.
        noise: multiplier.
        target_epsilon: target of a sweep over ε, which may be infinite.
        status: "done", "refused" or "failed".
        reason: why, if it is not done.
        fault: whether an error that nobody foresaw ended it, or the system, and not the method.
        traceback: of such an error.
        clients: their number.
        epsilon: of the run; infinite without noise.
        clusters: their number.
        ari: adjusted Rand index; None without true clusters.
        pearson: correlation of predicted and true similarities.
        score: mean of the clients' scores.
        worst_score: that of the worst client.
        baseline: mean of the same score of the clients' baselines; this and the next two are None
            where nobody measured them, and in records of versions that did not write them.
        below_baseline: how many clients' models are worse than their baseline.
        scores: means over clients of further scores, by name; None for one that no client has.
        up: bytes from the clients.
        down: bytes to the clients.
        servers: bytes between servers.
        rounds: their number.
        seconds: of the run.
        power: what noise was expected to leave of clusters and of training, in words; None without
            noise, and in records of versions that did not write it.
        spent: what the client that released most did release, as `sweep_costs.as_json` has it; None
            in records of versions that did not write it.
        chosen: what a target ε has chosen, as a label has it; None without a target, and in records
            of versions that did not write it.
    """

    run: int
    protocol: str
    variant: str
    mechanism: str
    dp_unit: str
    clip: float | None
    delta: float
    data: str
    scenario: str | None
    seed: int
    noise: float | None
    target_epsilon: float | None
    status: str
    reason: str | None
    fault: bool
    traceback: str | None
    clients: int | None = None
    epsilon: float | None = None
    clusters: int | None = None
    ari: float | None = None
    pearson: float | None = None
    score: float | None = None
    worst_score: float | None = None
    up: int | None = None
    down: int | None = None
    servers: int | None = None
    rounds: int | None = None
    seconds: float | None = None
    power: str | None = None
    spent: list[dict[str, Any]] | None = None
    chosen: str | None = None
    baseline: float | None = None
    below_baseline: int | None = None
    scores: dict[str, float | None] | None = None

    @classmethod
    def of(cls, row: Row, metric: str) -> RunRecord:
        """Return the record of a run's row.

        Args:
            row: of the run, with the clients' score under its name.
            metric: the name of the clients' score.

        Raises:
            ValueError: a value that no run has.
        """
        values = dict(row)
        for name, column in _columns(metric).items():
            if column in values:
                values[name] = values.pop(column)
        record = cls(**values)
        record.check()
        return record

    def row(self, metric: str) -> Row:
        """Return the row that the record was made of.

        Args:
            metric: the name of the clients' score.
        """
        row = asdict(self)
        for name, column in _columns(metric).items():
            row[column] = row.pop(name)
        return row

    def check(self) -> None:
        """Raise ValueError for a value that no run has."""
        for text in (self.reason, self.traceback, self.data, self.scenario):
            (text or "").encode()  # a lone surrogate, which no table can hold
        done = self.status == DONE
        _expect("status", self.status, self.status in (DONE, REFUSED, FAILED))
        _expect("reason", self.reason, done == (self.reason is None))
        _expect("fault", self.fault, self.status == FAILED or not self.fault)
        _expect("traceback", self.traceback, self.fault or self.traceback is None)
        self._check_number("noise", 0, math.inf)
        limits = {
            "clients": (1, math.inf),
            "clusters": (1, self.clients or 1),
            "up": (0, math.inf),
            "down": (0, math.inf),
            "servers": (0, math.inf),
            "rounds": (0, math.inf),
            "seconds": (0, math.inf),
        }
        for name, (low, high) in limits.items():
            _expect(name, getattr(self, name), done != (getattr(self, name) is None))
            self._check_number(name, low, high)
        for name in ("ari", "pearson"):
            self._check_number(name, -1 - ROUNDING, 1 + ROUNDING)
        self._check_scores()
        of_clusters = ("epsilon", "ari", "pearson")
        of_clients = ("score", "worst_score", "baseline", "below_baseline", "scores")
        for name in (*of_clusters, *of_clients):
            _expect(name, getattr(self, name), done or getattr(self, name) is None)
        if self.spent is not None:
            _expect("spent", self.spent, done)
            sweep_costs.history_of(self.spent)
        if done:
            _expect("epsilon", self.epsilon, self.epsilon is not None and self.epsilon >= 0)

    def _check_scores(self) -> None:
        """Raise ValueError for scores that no run has."""
        for name in ("score", "worst_score", "baseline"):
            self._check_number(name, -math.inf, math.inf)
        self._check_number("below_baseline", 0, self.clients or 0)
        for name, value in (self.scores or {}).items():
            _expect(name, value, name.isidentifier() and (value is None or math.isfinite(value)))

    def _check_number(self, name: str, low: float, high: float) -> None:
        """Raise ValueError if a number is not finite, or outside of its limits; None is neither."""
        value = getattr(self, name)
        if value is not None:
            _expect(name, value, math.isfinite(value) and low <= value <= high)

    def is_of(self, cell: Cell) -> bool:
        """Return whether this is a record of a run of the plan.

        Args:
            cell: the run.
        """
        level = self.noise if cell.by == NOISE else self.target_epsilon
        mine = (self.run, self.protocol, self.variant, self.seed, level)
        seed = cell.simulation.seed
        return mine == (cell.number, cell.variant.protocol, cell.variant.label, seed, cell.level)


def _columns(metric: str) -> dict[str, str]:
    """Return the columns of a row that have another name in the record, by that name."""
    return {"score": metric, "worst_score": f"worst_{metric}", "baseline": f"{metric}_baseline"}


def _expect(name: str, value: object, condition: bool) -> None:
    """Raise ValueError for a value that does not satisfy a condition."""
    if not condition:
        raise ValueError(f"{name} = {value!r}")


class Record:
    """The record of the runs of a sweep.

    Args:
        path: of runs.jsonl, which may not exist.
        cells: the runs of the plan.
        metric: the name of the clients' score.
    """

    def __init__(self, path: Path, cells: Sequence[Cell], metric: str) -> None:
        self._path = path
        self._cells = cells
        self._metric = metric
        # durable, so that a run that ended is never done again
        self._log = manifest.Log(path, durable=True)

    def rows(self) -> list[Row]:
        """Return the rows of the runs that have ended; of a run that was tried again the last.

        A last line that a kill cut off is removed from the file.

        Raises:
            RunFolderError: a line that was changed, or is none of this sweep.
        """
        if not self._path.exists():
            return []
        data = atomic_files.read(self._path)
        *lines, torn = data.split(b"\n")
        records: dict[int, RunRecord] = {}
        before = hashlib.sha256()
        for number, line in enumerate(lines, 1):
            record = self._checked(number, line, before.hexdigest())
            earlier = records.get(record.run)
            if earlier is not None and earlier.status != FAILED:
                raise self._damaged(number, f"repeats run {record.run}")
            records[record.run] = record
            before.update(line + b"\n")
        # removes what is torn, and goes on with the digest of these lines
        self._log.restore(manifest.Mark(len(data) - len(torn), before.hexdigest()), str)
        return [record.row(self._metric) for record in records.values()]

    def append(self, row: Row) -> Row:
        """Append a line, and return the row as it is recorded.

        A run that measured what no run can is recorded as failed.

        Args:
            row: of a run that has ended.

        Raises:
            RunFolderError: the line cannot be written.
        """
        try:
            record = RunRecord.of(row, self._metric)
        except (ValueError, TypeError) as error:
            cell = self._cells[row["run"]]
            row = cell.failed(f"it measured what no run can: {error}", fault=True)
            record = RunRecord.of(row, self._metric)
        content = asdict(record)
        for name in MAY_BE_INFINITE:
            if content[name] is not None and math.isinf(content[name]):
                content[name] = INFINITE
        # without the brace, which comes after the digest
        text = json.dumps(content, allow_nan=False)[:-1]
        sha256 = _digest(self._log.mark.sha256, text.encode())
        self._log.append([f'{text}, "sha256": "{sha256}"}}'])
        return row

    def _checked(self, number: int, line: bytes, before: str) -> RunRecord:
        """Return the record in a line.

        Args:
            number: of the line, from 1.
            line: without its end.
            before: digest of the lines before it.

        Raises:
            RunFolderError: it was changed, or is none of this sweep.
        """
        seal = SEAL.fullmatch(line[-SEALED:])
        if seal is None or seal[1].decode() != _digest(before, line[:-SEALED]):
            raise self._damaged(number, "differs from what was written there")
        try:
            content = json.loads(line[:-SEALED] + b"}")
            for name in MAY_BE_INFINITE:
                if content[name] == INFINITE:
                    content[name] = math.inf
            record = typed(content, RunRecord)
            record.check()
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            why = type(error).__name__
            raise self._damaged(number, f"has values that no run has ({why})") from None
        if not 0 <= record.run < len(self._cells) or not record.is_of(self._cells[record.run]):
            raise self._damaged(number, "is of no run of this sweep")
        return record

    def _damaged(self, number: int, fault: str) -> RunFolderError:
        """Return the error of a damaged line.

        Args:
            number: of the line, from 1.
            fault: what is wrong with it.
        """
        return RunFolderError(
            f"line {number} of {self._path} {fault}: restore the file from a copy, or remove this "
            "line and all after it, whose runs resume then does again"
        )


def _digest(before: str, text: bytes) -> str:
    """Return the digest of a line.

    Args:
        before: digest of the lines before it.
        text: of the line, without its digest.
    """
    return manifest.digest(before.encode() + text)
