"""Tasks side by side in processes, their results as they come.

A worker ends when its parent is gone, however the parent ended, also in the middle of a task.

A process that dies loses its own task alone, whose runs are tried once more at the end, alone.

On Linux workers are forked from a process that has loaded what they need and has run nothing, so
that none of them loads it again (`preload`). Elsewhere each starts anew.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from securecluster.core.stops import COLLECTED_AFTER
from securecluster.errors import SecureClusterError

T = TypeVar("T")
R = TypeVar("R")
FOR_WORKERS = 5.0  # seconds that a stopped worker has to end
# not fork: threads of torch do not survive it. Of what is only loaded there are none yet
METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PRELOADED = (
    "securecluster.studies.sweep_plan",
    "securecluster.runs.carry_out",
    "securecluster.models.architectures",
    "securecluster.models.flat_model",
    "securecluster.results.scores",
    "scipy.special",
    "securecluster.training.stacked_runs",
)


class WorkerError(SecureClusterError):
    """A worker process that cannot start."""


class Died(NamedTuple):
    """Stand-in that `results` yields for a result where the process died in the middle of a task.

    Attributes:
        task: the one that it did.
        exit_code: of the process; below 0 the number of the signal that killed it.
    """

    task: Any
    exit_code: int | None


class _Ready:
    """Message that a worker sends before its first task."""


class _Failure(NamedTuple):
    """Failure of a task: an error of this package, or the traceback of another one."""

    error: SecureClusterError | None
    text: str


class _Worker:
    """A process that does one task at a time.

    Args:
        work: a function of a module, which the process imports.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        context: Any = multiprocessing.get_context(METHOD)
        self.connection, theirs = context.Pipe()
        # the process that it is forked from has the environment of its own start
        serving = (theirs, work, dict(os.environ))
        self.process = context.Process(target=_serve, args=serving, daemon=True)
        self.process.start()
        # so that the worker's end is open in the worker alone, and its death is seen here
        theirs.close()
        self.began = False
        self._task: Any = None

    def begin(self, task: Any) -> None:
        """Send a task to the process, which waits for one.

        Args:
            task: to do.
        """
        self.began = True
        self._task = task
        # of a process that died meanwhile `received` tells
        with suppress(ConnectionError):
            self.connection.send(task)

    def received(self) -> Any:
        """Return what the process has sent: `_Ready` once, then the result of each task.

        Returns:
            `Died` if the process died in the middle of a task.

        Raises:
            WorkerError: it died before its first task.
            SecureClusterError: the task raised it.
            RuntimeError: the task raised another error.
        """
        try:
            result = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(FOR_WORKERS)
            code = self.process.exitcode
            if self.began:
                return Died(self._task, code)
            raise WorkerError(
                f"a process for the runs could not start (exit code {code}): take fewer jobs if "
                "memory is short, and in a script that takes more than one, call it below "
                'if __name__ == "__main__":'
            ) from None
        if not isinstance(result, _Failure):
            return result
        if result.error is not None:
            raise result.error
        raise RuntimeError(result.text)

    def stop(self) -> None:
        """End the process, in the middle of a task if need be."""
        self.connection.close()
        self.process.terminate()
        self.process.join(FOR_WORKERS)


def preload() -> None:
    """Start the process that workers are forked from, which loads what they need meanwhile."""
    if METHOD == "forkserver":
        multiprocessing.get_context(METHOD).set_forkserver_preload(list(PRELOADED))
        # it is the child of another process where this one was forked from that
        with suppress(OSError):
            forkserver.ensure_running()


def results(work: Callable[[T], R], tasks: Sequence[T], processes: int) -> Iterator[R | Died]:
    """Yield the results of tasks, in the order in which they end.

    Where a process dies in the middle of a task, `Died` takes the place of the result, and another
    process does the tasks that follow.

    Args:
        work: does a task; a function of a module, and its tasks and results pickle.
        tasks: in the order in which they begin.
        processes: number of processes; with 0 this process does everything itself.

    Raises:
        WorkerError: a process cannot start; the other tasks are stopped.
        SecureClusterError: a task raised it; the other tasks are stopped.
    """
    if not processes:
        for task in tasks:
            yield work(task)
        return
    preload()
    waiting = deque(tasks)
    workers: dict[Any, _Worker] = {}
    try:
        while waiting or workers:
            _start(workers, work, processes, len(waiting))
            for connection in wait(list(workers)):
                worker = workers[connection]
                result = worker.received()
                if waiting and not isinstance(result, Died):
                    worker.begin(waiting.popleft())
                else:
                    del workers[connection]
                    worker.stop()
                if not isinstance(result, _Ready):
                    yield result
    finally:
        for worker in workers.values():
            worker.stop()


def _start(
    workers: dict[Any, _Worker], work: Callable[[Any], Any], processes: int, waiting: int
) -> None:
    """Start the workers that are missing, at first and in place of those that died.

    Args:
        workers: by their connection, to which they are added.
        work: does a task.
        processes: largest number of workers.
        waiting: number of the tasks that wait for one.
    """
    starting = sum(not worker.began for worker in workers.values())
    for _ in range(min(processes - len(workers), waiting - starting)):
        worker = _Worker(work)
        workers[worker.connection] = worker


def _serve(connection: Connection, work: Callable[[Any], Any], environment: dict[str, str]) -> None:
    """Do tasks until the other end of the pipe is closed; what a worker process runs.

    Args:
        connection: to the parent.
        work: does a task.
        environment: variables of the parent.
    """
    os.environ.clear()
    os.environ.update(environment)
    gc.set_threshold(COLLECTED_AFTER)
    # Ctrl-C goes to all processes of a terminal; the parent stops its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        connection.send(_Ready())
    except ConnectionError:
        return
    while True:
        try:
            task = connection.recv()
        except (EOFError, ConnectionError):
            return
        try:
            result = work(task)
        except SecureClusterError as error:
            result = _Failure(error, "")
        except Exception:
            result = _Failure(None, traceback.format_exc())
        try:
            connection.send(result)
        except ConnectionError:
            return


def _end_with_parent() -> None:
    """End this process at once when its parent has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # returns when the parent's end of a pipe closes, which the system does however it ended
    parent.join()
    os._exit(1)
