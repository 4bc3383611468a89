"""Calls to Ray, after which there are two kinds of failure and no other.

The process of an actor died, or was ended for want of memory: who called makes it again. Or Ray
itself cannot go on, and one sentence says what to do: checkpoints are in the run's folder.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from securecluster.errors import RunFolderError, SecureClusterError, UsageError

Door = str | tuple[str, int]
SECONDS_FOR_HEAD = 20.0  # until a head that does not answer counts as lost: Ray waits for 60
SECONDS_FOR_TRY = 5.0
SECONDS_BETWEEN_TRIES = 0.5
RESUME = "resume the run from its folder (one without a folder begins anew)"
# what is wrong and what to do, by the name of Ray's error or of one of its base classes
ADVICE = {
    "ObjectStoreFullError": "the object store of Ray is full: start Ray with a larger one "
    "(object_store_memory)",
    "OutOfDiskError": "the disk on which Ray keeps what its object store has no room for is full: "
    "make room there",
    "ObjectLostError": "clients' states were lost with a machine of the cluster: start it again",
    "ActorUnschedulableError": "no machine of the cluster has room for a process of the run: start "
    "more of them",
}


class ActorLostError(RunFolderError):
    """The process of an actor died: it can be made again."""


class RayCluster:
    """Ray, as one run uses it.

    Raises:
        UsageError: Ray does not start, or there is none at RAY_ADDRESS.
    """

    def __init__(self) -> None:
        self._ray = importlib.import_module("ray")
        self._started = not self._ray.is_initialized()
        if self._started:
            _start(self._ray)
        self._doors = _doors(self._ray)
        self._ended: Door | None = None  # where nobody answered any more

    def count(self, resource: str) -> int:
        """Return how many of a resource Ray has.

        Args:
            resource: "CPU" or "GPU".
        """
        with self._watched():
            return int(self._ray.cluster_resources().get(resource, 0))

    def begin(self, actor_class: type, options: Mapping[str, Any], *arguments: Any) -> Any:
        """Return the handle of a new actor, which starts meanwhile.

        Args:
            actor_class: its class.
            options: of Ray.
            arguments: of its constructor.
        """
        with self._watched():
            return self._ray.remote(actor_class).options(**options).remote(*arguments)

    def ready(self, handle: Any) -> Any:
        """Return a reference that is there when an actor has started.

        Args:
            handle: of the actor.
        """
        return self.call(handle, "__ray_ready__")

    def call(self, handle: Any, method: str, *arguments: Any, returns: int = 1) -> Any:
        """Call a method of an actor, and return the reference to its result.

        Args:
            handle: of the actor.
            method: its name.
            arguments: of the method.
            returns: number of results, of which each has a reference of its own.
        """
        with self._watched():
            remote = getattr(handle, method)
            if returns > 1:
                remote = remote.options(num_returns=returns)
            return remote.remote(*arguments)

    def put(self, value: Any) -> Any:
        """Return a reference to a value in the object store.

        Args:
            value: that Ray can serialize.
        """
        with self._watched():
            return self._ray.put(value)

    def got(self, reference: Any, seconds: float | None = None) -> Any:
        """Return what a reference refers to; the only place where results are waited for.

        Args:
            reference: of Ray.
            seconds: to wait; None waits as long as it takes.

        Raises:
            ActorLostError: the process that was to make it died.
            TimeoutError: it took longer.
            RunFolderError: Ray cannot go on.
            Exception: the error of the actor's method.
        """
        with self._watched():
            return self._ray.get(reference, timeout=seconds)

    def kill(self, handle: Any) -> None:
        """End the process of an actor, which may have ended.

        Args:
            handle: of the actor.
        """
        with suppress(SecureClusterError), self._watched():
            self._ray.kill(handle)

    def close(self) -> None:
        """End Ray, where this run has started it."""
        if self._started:
            self._ray.shutdown()

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """Turn each error of Ray into one of this module, and that of an actor into its cause."""
        errors = self._ray.exceptions
        self._check_alive()
        try:
            yield
        except errors.RayTaskError as error:
            raise self._of_task(error.cause) from error
        except errors.GetTimeoutError:
            raise TimeoutError("an actor of Ray does not reply") from None
        except (errors.RayError, OSError, RuntimeError, ValueError) as error:
            raise self._sentence(error) from error

    def _of_task(self, cause: Exception | None) -> Exception:
        """Return the error by which a method of an actor failed."""
        if cause is None or isinstance(cause, self._ray.exceptions.RayError):
            return self._sentence(cause)
        return cause

    def _sentence(self, error: Exception | None) -> SecureClusterError:
        """Return this module's error for one of Ray."""
        errors = self._ray.exceptions
        if getattr(error, "actor_init_failed", False):
            return UsageError(
                f"the processes of the run do not start in Ray ({_last_line(error)}): install "
                f"what the run needs on every machine of the cluster, and {RESUME}"
            )
        died = errors.RayActorError, errors.OutOfMemoryError, errors.WorkerCrashedError
        if isinstance(error, died):
            return ActorLostError(
                f"a process of the run died in Ray ({_first_line(error)}): {RESUME}"
            )
        for error_class in type(error).__mro__:
            if error_class.__name__ in ADVICE:
                return RunFolderError(f"{ADVICE[error_class.__name__]}, and {RESUME}")
        name = type(error).__name__
        return RunFolderError(
            f"Ray failed ({name}: {_first_line(error)}): start it again, and {RESUME}"
        )

    def _check_alive(self) -> None:
        """Raise RunFolderError where a process has ended that Ray cannot do without.

        Ray ends a program that asks for an object then, or goes on for a minute, without a word.
        """
        if self._ended is None:
            self._ended = next((door for door in self._doors if not _answers_again(door)), None)
        if self._ended is not None:
            where = f"at {self._ended[0]}" if isinstance(self._ended, tuple) else "on this machine"
            raise RunFolderError(f"Ray has ended {where}: start it again, and {RESUME}")


def _start(ray: Any) -> None:
    """Connect to the cluster of RAY_ADDRESS, or start Ray on this machine.

    Raises:
        UsageError: there is none, or it does not start.
    """
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL}
    address = os.environ.get("RAY_ADDRESS")
    if address is None:
        options["include_dashboard"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of later versions of Ray
        try:
            head = None if address is None else _host_and_port(address)
            if head is not None and not _answers(head):  # Ray itself would try for minutes
                raise ConnectionError("nobody answers")
            ray.init(**options)
        except Exception as error:  # of sockets, files, versions and Ray, with no common class
            reason = f"{type(error).__name__}: {_first_line(error)}"
            if address is not None:
                raise UsageError(
                    f"no cluster of Ray is reached at RAY_ADDRESS {address} ({reason}): start it "
                    "there, or unset RAY_ADDRESS"
                ) from error
            raise UsageError(
                f"Ray does not start on this machine ({reason}): free memory and disk, or leave "
                "--engine ray out"
            ) from error


def _doors(ray: Any) -> list[Door]:
    """Return where Ray's process on this machine and the head of its cluster answer.

    Where Ray tells neither, or they do not answer as they are told, nothing is watched.
    """
    # which no public interface tells
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    node = getattr(getattr(worker, "global_worker", None), "node", None)
    path, head = (getattr(node, name, None) for name in ("raylet_socket_name", "gcs_address"))
    doors: list[Door] = []
    if isinstance(path, str) and os.path.exists(path):
        doors.append(path)
    if isinstance(head, str) and (address := _host_and_port(head)) is not None:
        doors.append(address)
    return [door for door in doors if _answers(door)]


def _host_and_port(address: str) -> tuple[str, int] | None:
    """Return the host and the port of an address; None for one in another form."""
    match = re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d{1,5})", address)
    return None if match is None else (match[1], int(match[2]))


def _answers_again(door: Door) -> bool:
    """Return whether somebody listens; a head of a cluster may be started again meanwhile."""
    until = time.monotonic() + (SECONDS_FOR_HEAD if isinstance(door, tuple) else 0)
    while not _answers(door):
        if time.monotonic() >= until:
            return False
        time.sleep(SECONDS_BETWEEN_TRIES)
    return True


def _answers(door: Door) -> bool:
    """Return whether somebody listens at a path or at a host and port."""
    try:
        if isinstance(door, tuple):
            socket.create_connection(door, SECONDS_FOR_TRY).close()
        else:
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(door)
    except (OSError, OverflowError):
        return False
    return True


def _first_line(error: Exception | None) -> str:
    """Return the first line of what an error says."""
    lines = str(error).strip().splitlines() or [""]
    return lines[0].strip().rstrip(".:")


def _last_line(error: Exception | None) -> str:
    """Return the last line of what an error says, which names the cause of a remote one."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1].strip().rstrip(".:")
