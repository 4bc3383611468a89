"""Tasks side by side in processes, their results as they come.

A worker ends when its task is done and its parent is gone, however the parent ended: its pipe has
no other writer.
"""

from __future__ import annotations

import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple, TypeVar

from securecluster.errors import SecureClusterError

T = TypeVar("T")
R = TypeVar("R")
FOR_WORKERS = 5.0  # seconds that a stopped worker has to end


class _Failure(NamedTuple):
    """What a task raised: an error of this package, or the traceback of another one."""

    error: SecureClusterError | None
    text: str


class _Worker:
    """A process that does one task at a time.

    Args:
        work: a function of a module, which the process imports.
    """

    def __init__(self, work: Callable[[Any], Any]) -> None:
        # not fork: threads of torch do not survive it
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work), daemon=True)
        self.process.start()
        # so that the worker's end is open in the worker alone, and its death is seen here
        theirs.close()

    def result(self) -> Any:
        """Return the result of the task that this worker has ended.

        Raises:
            SecureClusterError: the task raised it, or the process died.
            RuntimeError: the task raised another error.
        """
        try:
            result = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join(FOR_WORKERS)
            raise SecureClusterError(
                f"a process that did a run has died (exit code {self.process.exitcode}): if memory "
                "was short, take fewer --jobs"
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


def results(work: Callable[[T], R], tasks: Sequence[T], jobs: int) -> Iterator[R]:
    """Yield the results of tasks, in the order in which they end.

    Args:
        work: does a task; a function of a module, and its tasks and results pickle.
        tasks: in the order in which they begin.
        jobs: number of processes; with 1 this process does everything itself.

    Raises:
        SecureClusterError: a task raised it, or a process died; the other tasks are stopped.
    """
    if jobs == 1:
        for task in tasks:
            yield work(task)
        return
    waiting = deque(tasks)
    workers: dict[Connection, _Worker] = {}
    try:
        while waiting and len(workers) < jobs:
            worker = _Worker(work)
            workers[worker.connection] = worker
            worker.connection.send(waiting.popleft())
        busy = len(workers)
        while busy:
            for connection in wait(list(workers)):
                worker = workers[connection]  # type: ignore[index]
                result = worker.result()
                if waiting:
                    worker.connection.send(waiting.popleft())
                else:
                    busy -= 1
                yield result
    finally:
        for worker in workers.values():
            worker.stop()


def _serve(connection: Connection, work: Callable[[Any], Any]) -> None:
    """Do tasks until the other end of the pipe is closed; what a worker process runs.

    Args:
        connection: to the parent.
        work: does a task.
    """
    # Ctrl-C goes to all processes of a terminal; the parent stops its workers
    signal.signal(signal.SIGINT, signal.SIG_IGN)
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
