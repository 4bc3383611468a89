"""Processes side by side: their results, their errors, and their ends."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from securecluster.errors import UsageError
from securecluster.protocols.registry import protocol_class
from securecluster.studies.worker_pool import METHOD, Died, WorkerError, preload, results

# functions of modules that load at once; eval takes any task as a text
WAIT = "print(__import__('os').getpid(), flush=True) or __import__('time').sleep(60)"
PARENT = f"""
from securecluster.studies import worker_pool

if __name__ == "__main__":
    list(worker_pool.results(eval, [{WAIT!r}] * 2, 2))
"""


def test_workers_give_every_result_and_their_errors() -> None:
    assert sorted(results(math.factorial, [1, 2, 3, 4, 5], 2)) == [1, 2, 6, 24, 120]
    with pytest.raises(UsageError, match="did you mean 'cfl'"):
        list(results(protocol_class, ["cffl"], 2))
    with pytest.raises(RuntimeError, match="ValueError"):
        list(results(math.factorial, [-1], 2))


def test_workers_are_loaded_and_have_the_environment_and_folder_of_now(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    preload()
    monkeypatch.setenv("SECURECLUSTER_DATA", "of now")
    monkeypatch.delenv("PATH")
    monkeypatch.chdir(tmp_path)
    asked = "[m.environ.get('SECURECLUSTER_DATA'), m.environ.get('PATH'), m.getcwd()]"
    tasks = [f"(lambda m: {asked})(__import__('os'))", "'torch' in __import__('sys').modules"]
    of_now, loaded = results(eval, tasks, 1)
    assert of_now == ["of now", None, str(tmp_path)]
    assert loaded or METHOD == "spawn"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_fork_of_a_process_with_workers_may_ask_for_them_too() -> None:
    preload()
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        with suppress(BaseException):
            preload()
            os._exit(0)
        os._exit(1)


def test_without_processes_everything_is_done_here() -> None:
    assert list(results(eval, ["__import__('os').getpid()"], 0)) == [os.getpid()]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_process_that_dies_loses_its_own_task_alone(processes: int) -> None:
    deaths = ["__import__('os')._exit(3)", "__import__('os').kill(__import__('os').getpid(), 9)"]
    tasks = [deaths[0], "1", "2", deaths[1], "3"]
    found = list(results(eval, tasks, processes))
    died = [item for item in found if isinstance(item, Died)]
    assert sorted(died) == sorted([Died(deaths[0], 3), Died(deaths[1], -9)])
    assert sorted(item for item in found if not isinstance(item, Died)) == [1, 2, 3]


class _Unloadable:
    """Work on whose arrival the process ends."""

    def __call__(self, task: Any) -> Any:
        return task

    def __reduce__(self) -> tuple[Any, ...]:
        return os._exit, (4,)


def test_a_process_that_cannot_start_is_an_error_at_once() -> None:
    with pytest.raises(WorkerError, match=r"could not start \(exit code 4\).*__main__"):
        list(results(_Unloadable(), [1, 2, 3], 2))


def test_workers_end_with_their_parent_in_the_middle_of_a_task() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        workers = {int(parent.stdout.readline()) for _ in range(2)}
        assert len(workers) == 2 and parent.pid not in workers
        parent.kill()
        began = time.monotonic()
        # ends when no process that inherited the other end of the pipe is left
        assert parent.stdout.read() == ""
    assert time.monotonic() - began < 20, "their tasks take 60 seconds"
