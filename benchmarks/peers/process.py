"""The driver's side of a worker: one process, a request and an answer of one line each.

Closing a worker ends all processes that it started.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from securecluster.core.lazy_torch import ENVIRONMENT

HERE = Path(__file__).resolve().parent
TAG = "SECURECLUSTER_PEERS"


class PeerError(Exception):
    """Raised where a worker did not carry out a request; the text says why."""


class Worker:
    """One worker in its own environment.

    Args:
        peer: names the module `work_…` that it runs.
        python: the interpreter of its environment.
        export: path of the exported .npz.
        threads: of PyTorch.
        device: "cpu" or "cuda".
        log: receives everything that the worker and its framework print.
    """

    def __init__(
        self, peer: str, python: Path, export: Path, threads: int, device: str, log: Path
    ) -> None:
        self.peer = peer
        self.threads = threads
        self._log = log
        self._tag = uuid.uuid4().hex
        self._scratch = tempfile.TemporaryDirectory(prefix="peers-", ignore_cleanup_errors=True)
        command = [
            python,
            "-m",
            f"peers.work_{peer}",
            export,
            "--threads",
            str(threads),
            "--device",
            device,
        ]
        with log.open("a") as stream:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                env=self._environment(),
                # a folder without modules, from which a worker could import by accident
                cwd=self._scratch.name,
            )
        # where memory runs out, a worker goes first, and the driver can tell
        with suppress(OSError):
            Path(f"/proc/{self._process.pid}/oom_score_adj").write_text("1000")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _environment(self) -> dict[str, str]:
        additions = {
            TAG: self._tag,
            # this package's parent folder: the worker imports it as `peers`, without securecluster
            "PYTHONPATH": str(HERE.parent),
            # huge pages and passive waiting as in this project, so that no peer lacks them
            **ENVIRONMENT,
            # also of the processes that a framework starts
            "OMP_NUM_THREADS": str(self.threads),
            "TMPDIR": self._scratch.name,
            "FLWR_HOME": self._scratch.name,
            # no network: telemetry, update check, installation of an app's dependencies by uv
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # on any system: ray keeps to the loopback address
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        return {**os.environ, **additions}

    def ready(self, seconds: float) -> None:
        """Wait until it has read its data."""
        self._listen(seconds, "getting ready")

    def ask(self, request: str, seconds: float) -> dict[str, Any]:
        """Send one line and wait for the answer.

        Args:
            request: the line.
            seconds: to wait.

        Raises:
            PeerError: it ended, or did not answer in time.
        """
        stdin = self._process.stdin
        assert stdin is not None
        command = request.split()[0]
        try:
            stdin.write(request.encode() + b"\n")
            stdin.flush()
        except OSError:
            raise PeerError(f"ended before `{command}`: {self._last()}") from None
        return self._listen(seconds, f"`{command}`")

    def _listen(self, seconds: float, doing: str) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], seconds)
        if not readable:
            raise PeerError(f"timed out after {seconds:.0f} s in {doing}")
        line = stdout.readline()
        if not line:
            raise PeerError(f"ended in {doing}: {self._last()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last(self) -> str:
        """Return the last line it printed: of a traceback, the one that says what is wrong."""
        text = self._log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.strip()]
        if not lines:
            return "it printed nothing"
        return lines[-1][:200]

    def close(self, patience: float = 15) -> None:
        """Ask it to quit, and kill the processes that remain (such as ray's daemons).

        Args:
            patience: seconds until a worker that has not ended is killed.
        """
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()  # the end of the input means quit
        wait_until(lambda: self._process.poll() is not None, patience)
        # by their mark, since a daemon has another parent as soon as its own has ended
        for force in (signal.SIGTERM, signal.SIGKILL):
            for pid in tagged(self._tag):
                _kill(pid, force)
            if wait_until(lambda: not tagged(self._tag), 5):
                break
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._scratch.cleanup()


def tagged(tag: str) -> list[int]:
    """Return the ids of the processes that inherited a worker's mark in their environment.

    A process keeps the mark when its parent ends.

    Args:
        tag: the mark.
    """
    mark = f"{TAG}={tag}".encode()
    pids = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and mark in _environ(folder):
            pids.append(int(folder.name))
    return pids


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Return whether a condition became true in time.

    Args:
        done: the condition, evaluated every 50 ms.
        seconds: to wait.
    """
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.05)
    return done()


def _environ(folder: Path) -> bytes:
    try:
        return (folder / "environ").read_bytes()
    except OSError:  # ended meanwhile, or somebody else's
        return b""


def _kill(pid: int, force: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, force)
