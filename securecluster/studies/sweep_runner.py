"""The runs of a sweep or a comparison, carried out one by one or side by side."""

from __future__ import annotations

import os
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from securecluster.commands import execution, failures
from securecluster.commands.failures import Row
from securecluster.core.validation import check_whole_value
from securecluster.errors import OutputError, RunFolderError, SecureClusterError, UsageError
from securecluster.runtime.settings import Settings
from securecluster.studies import worker_pool

DONE = "done"
REFUSED = "refused"
FAILED = "failed"
TOGETHER_ON_GPU = 8  # runs whose data and models fit into the memory of most GPUs
MOST_JOBS = 8  # processes by default, each of which needs its own memory for torch


class Cell(ABC):
    """One run, with a number of its own."""

    number: int

    @property
    @abstractmethod
    def label(self) -> str:
        """Return what it is called; runs of one label may train together."""

    @abstractmethod
    def described(self) -> Row:
        """Return what is known before the run, by column."""

    @abstractmethod
    def measured(self, federation: Any) -> Row:
        """Carry out the run, and return what it measured, by column.

        Args:
            federation: the clients; None if they are not at hand.
        """

    def row(self, federation: Any = None) -> Row:
        """Carry out the run, and return its row.

        Args:
            federation: the clients, if they are at hand.

        Returns:
            Values by column. `status` is "done", "refused" where the protocol cannot run like this,
            or "failed" where the run ended in an error; `reason` then says why. `fault` is true
            after an error that nobody foresaw, whose `traceback` is there.

        Raises:
            RunFolderError: a folder that cannot be written would stop the other runs as well.
            OutputError: and so would a closed output.
        """
        try:
            return self.ended(DONE) | self.measured(federation)
        except (RunFolderError, OutputError):
            raise
        except UsageError as error:
            return self.ended(REFUSED, failures.reason(error))
        except SecureClusterError as error:
            return self.failed(failures.reason(error), fault=False)
        # also of the user's own protocol, and of memory: the other runs go on
        except Exception as error:
            return self.failed_by(error)

    def failed_by(self, error: Exception) -> Row:
        """Return the row of this run after an error that nobody foresaw.

        Args:
            error: that ended it.
        """
        traceback = failures.traceback_of(error)
        return self.failed(failures.reason(error), fault=True) | {"traceback": traceback}

    def failed(self, reason: str, fault: bool) -> Row:
        """Return the row of this run where it failed.

        Args:
            reason: why.
            fault: whether the program or the system failed, and not the method.
        """
        return self.ended(FAILED, reason) | {"fault": fault}

    def ended(self, status: str, reason: str | None = None) -> Row:
        """Return the row of this run without what it measured."""
        end = {"status": status, "reason": reason, "fault": False, "traceback": None}
        return self.described() | end


C = TypeVar("C", bound=Cell)


@dataclass(frozen=True)
class Parallel:
    """Runs at the same time.

    Attributes:
        jobs: number of processes; 0 is one for each core.
        together: runs of a process that train together; 0 is 1 on a CPU and 8 on a GPU.
    """

    jobs: int = 0
    together: int = 0

    def check(self) -> None:
        """Raise UsageError for an impossible number."""
        for name in ("jobs", "together"):
            check_whole_value(name, getattr(self, name))
        if self.jobs < 0:
            raise UsageError(f"jobs = {self.jobs} is not possible: it is 0, for all cores, or more")
        if self.together < 0:
            raise UsageError(
                f"together = {self.together} is not possible: it is 0, for the device's default, "
                "or more"
            )

    def preload(self) -> None:
        """Let several processes load what they need while this one still plans."""
        cores = os.cpu_count() or 1
        if self.jobs > 1 or (not self.jobs and cores > 1):
            worker_pool.preload()

    def processes(self, settings: Settings) -> int:
        """Return the number of processes.

        Args:
            settings: of every run.
        """
        if self.jobs:
            return self.jobs
        if settings.device != "cpu":
            return 1
        cores = os.cpu_count() or 1
        # the cores that this process may use, where the system says so
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        return max(1, min(MOST_JOBS, cores // settings.threads))

    def in_a_process(self, settings: Settings) -> int:
        """Return the number of runs of a process that train together.

        Args:
            settings: of every run.
        """
        if self.together:
            return self.together
        if settings.device == "cpu":
            return 1
        return TOGETHER_ON_GPU


def go_on(folder: Path) -> str:
    """Return the command that goes on with the runs in a folder."""
    return f"securecluster resume {shlex.quote(str(folder))}"


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Add how to go on to what stops all runs: a signal, the disk, or a process that cannot start.

    Args:
        folder: of the runs in this context.
    """
    advice = f"; go on with: {go_on(folder)}"
    try:
        with execution.resumable(folder):
            yield
    except worker_pool.WorkerError as error:
        raise SecureClusterError(f"{error}{advice}") from None
    except RunFolderError as error:
        # only what the disk refused may go well the next time
        if not isinstance(error.__cause__, OSError):
            raise
        raise RunFolderError(f"{error}{advice}") from error


def rows(
    cells: Sequence[Cell],
    work: Callable[[Sequence[Any]], list[Row]],
    say: Callable[[Row, float], Row],
    processes: int = 1,
    together: int = 1,
) -> Iterator[Row]:
    """Yield the rows of runs, as they end.

    A run whose process died, or that failed by an error that may be that of another run in its
    batch, is tried once more when all others have ended, and alone.

    Args:
        cells: the runs.
        work: carries out a batch of them and returns their rows; with several processes a function
            of a module.
        say: called with each row, and the seconds that are left; it returns the row.
        processes: of runs at the same time; one is this process itself.
        together: runs of a process that train together.
    """
    by_number = {cell.number: cell for cell in cells}
    tasks = batches(cells, together)
    side_by_side = min(processes, max(1, len(tasks)))
    # this process is the only one if one is asked for, and not if one batch is left: a run that
    # kills its process must not kill this one
    workers = 0 if processes == 1 else side_by_side
    clock = _Clock(cells, side_by_side)
    again: list[Cell] = []
    for outcome in worker_pool.results(work, tasks, workers):
        if isinstance(outcome, worker_pool.Died):
            again += outcome.task
            continue
        for row in outcome:
            if row["fault"] and len(outcome) > 1:
                again.append(by_number[row["run"]])
                continue
            yield say(row, clock.left(row))
    alone = [[cell] for cell in again]
    for outcome in worker_pool.results(work, alone, min(workers, 1)):
        if isinstance(outcome, worker_pool.Died):
            (cell,) = outcome.task
            outcome = [cell.failed(_death(outcome.exit_code), fault=True)]
        for row in outcome:
            yield say(row, clock.left(row))


def batches(cells: Sequence[C], together: int) -> list[list[C]]:
    """Return the runs in batches that train together, each of one label.

    Args:
        cells: the runs.
        together: largest number of runs in a batch.
    """
    if together == 1:
        return [[cell] for cell in cells]
    by_label: dict[str, list[C]] = {}
    for cell in cells:
        by_label.setdefault(cell.label, []).append(cell)
    batched = []
    for runs in by_label.values():
        for first in range(0, len(runs), together):
            batched.append(runs[first : first + together])
    return batched


def _death(exit_code: int | None) -> str:
    """Return why a run failed whose process died twice.

    Args:
        exit_code: of the process; below 0 the number of the signal that killed it.
    """
    how = f"ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        how = f"was killed by signal {-exit_code}"
    return f"its process {how}, alone as well: memory may have been short"


class _Clock:
    """An estimate of the time that is left, by the runs of each label so far.

    Args:
        cells: the runs that are to be done.
        processes: the number of runs at the same time.
    """

    def __init__(self, cells: Sequence[Cell], processes: int) -> None:
        self._processes = processes
        self._waiting = {cell.number: cell.label for cell in cells}
        self._seconds: dict[str, list[float]] = {}

    def left(self, row: Row) -> float:
        """Return the seconds that are left after one more run.

        Args:
            row: of the run.
        """
        label = self._waiting.pop(row["run"])
        self._seconds.setdefault(label, []).append(row.get("seconds") or 0.0)
        seconds = {name: sum(some) / len(some) for name, some in self._seconds.items()}
        usual = sum(seconds.values()) / len(seconds)
        ahead = sum(seconds.get(name, usual) for name in self._waiting.values())
        return ahead / self._processes
