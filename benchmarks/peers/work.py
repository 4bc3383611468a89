"""The data of every worker, and its pipe to the driver.

A request is one line, and its answer is one line of JSON.

`round` trains one round of all clients and answers {"seconds", "peak_rss_bytes",
"peak_device_bytes"}; `accuracy` answers {"accuracy"}; `weights PATH` saves the global model there;
`quit`, or the end of the input, ends the worker. Standard library and numpy only.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

NAMES = {"mlp": "mlp-200", "cnn": "cnn-briggs"}  # the networks' names in this project
Weights = NDArray[np.float32]
# those that this process may use, which can be fewer than the machine has
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Work:
    """One federation and its training: plain SGD, one pass a round, mini-batches in order."""

    x: NDArray[np.uint8]  # (m, n, 1, 28, 28) pixels in 0 … 255
    y: NDArray[np.int64]  # (m, n)
    x_test: NDArray[np.uint8]
    y_test: NDArray[np.int64]
    start: Weights  # (d,) initial weights, in the order of named_parameters
    order: NDArray[np.int16]  # (rounds, m, n) each client's samples as they are met in a round
    model: str
    lr: float
    batch: int

    @property
    def clients(self) -> int:
        """Return the number of clients, m."""
        return len(self.y)

    def images(self, client: int) -> NDArray[np.float32]:
        """Return one client's samples (n, 1, 28, 28), pixels in [0, 1]."""
        return scaled(self.x[client])

    def turn(self, number: int) -> NDArray[np.int64]:
        """Return the order (m, n) of round `number`, counted from 0."""
        order: NDArray[np.int64] = self.order[number].astype(np.int64)
        return order


def scaled(pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return pixels in [0, 1], the same bits in every worker.

    Args:
        pixels: from 0 to 255, of any shape.
    """
    return pixels.astype(np.float32) / np.float32(255)


def save(path: Path, work: Work) -> None:
    """Write one .npz without compression.

    Args:
        path: of the file.
        work: the federation and its training.
    """
    np.savez(path, **vars(work))


@cache
def load(path: str) -> Work:
    """Return the work in a file that `save` wrote."""
    with np.load(path) as archive:
        arrays = {name: archive[name] for name in archive.files}
    scalars: dict[str, Any] = {
        "model": str(arrays.pop("model")),
        "lr": float(arrays.pop("lr")),
        "batch": int(arrays.pop("batch")),
    }
    return Work(**arrays, **scalars)


@dataclass(frozen=True)
class Options:
    """The command line of a worker.

    Args:
        export: path of the .npz that `save` wrote.
        threads: of PyTorch.
        device: "cpu" or "cuda".
    """

    export: str
    threads: int
    device: str


def options() -> Options:
    """Return the options of the command line: EXPORT.npz --threads N --device cpu|cuda."""
    parser = argparse.ArgumentParser()
    parser.add_argument("export")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    return Options(**vars(parser.parse_args()))


def processes(device: str) -> int:
    """Return the number of processes of a framework that starts one process per core.

    Args:
        device: "cpu" or "cuda".
    """
    if device == "cpu":
        return CORES
    # each process that shares a GPU keeps memory of its own there
    return min(CORES, 4)


class Quit(Exception):  # noqa: N818 - an order, no error
    """The driver wants no more."""


class Talk:
    """The worker's end of the pipe.

    Args:
        weights: the global model, (d,).
        accuracy: of such a model on the test set.
        settle: waits until the device is idle, where it works asynchronously, and returns the peak
            of its memory in bytes.
    """

    def __init__(
        self,
        weights: Callable[[], Weights],
        accuracy: Callable[[Weights], float],
        settle: Callable[[], int] = lambda: 0,
    ) -> None:
        self._weights = weights
        self._accuracy = accuracy
        self._settle = settle
        # the pipe to the driver, which only `_say` writes to
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a framework prints goes to the log
        self._since = 0.0
        self._cpu_since = 0.0
        self._say({"ready": True})

    def begin(self) -> None:
        """Answer questions until a round is asked for; then the clock runs.

        Raises:
            Quit: there will be no more.
        """
        while True:
            line = sys.stdin.readline().strip()
            word, _, path = line.partition(" ")
            if word == "round":
                self._cpu_since = cpu(os.getpid())
                self._since = time.perf_counter()
                return
            if word == "accuracy":
                self._say({"accuracy": self._accuracy(self._weights())})
            elif word == "weights":
                np.save(path, self._weights())
                self._say({"saved": path})
            else:
                raise Quit

    def end(self) -> None:
        """Stop the clock after a round, and send the driver its figures."""
        # before the clock is read, since a GPU works asynchronously
        device_bytes = self._settle()
        seconds = time.perf_counter() - self._since
        self._say(
            {
                "seconds": seconds,
                "cpu_seconds": cpu(os.getpid()) - self._cpu_since,
                "peak_rss_bytes": peak(os.getpid()),
                "peak_device_bytes": device_bytes,
            }
        )

    def _say(self, answer: dict[str, Any]) -> None:
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()


def peak(root: int) -> int:
    """Return the peaks of resident memory (VmHWM) of a process and its descendants, added up.

    The sum is exact for one process; for several it is an upper bound, since they may peak at
    different times and shared pages count in each.

    Args:
        root: the process's id.

    Returns:
        Bytes.
    """
    return sum(_high_water(pid) for pid in family(root))


def cpu(root: int) -> float:
    """Return the seconds of processors that a process and its descendants have used, added up.

    The system counts ticks, mostly of 10 ms: take the mean of many rounds.

    Args:
        root: the process's id.
    """
    ticks = sum(_ticks(pid) for pid in family(root))
    return ticks / os.sysconf("SC_CLK_TCK")


def family(root: int) -> list[int]:
    """Return the ids of a process and its descendants.

    Args:
        root: the process's id.
    """
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            parents[int(folder.name)] = _parent(folder)
    members = [root]
    generation = [root]
    while generation:
        generation = [pid for pid, parent in parents.items() if parent in generation]
        members += generation
    return members


def _parent(folder: Path) -> int:
    return _stat(folder)[1]


def _ticks(pid: int) -> int:
    """Return the ticks in user and system mode, of all threads."""
    fields = _stat(Path(f"/proc/{pid}"))
    return fields[11] + fields[12]


def _stat(folder: Path) -> list[int]:
    """Return the numbers of a process after its name (proc(5), from field 3), zeros if it ended."""
    try:
        line = (folder / "stat").read_text()
    except OSError:  # it has ended meanwhile
        return [0] * 13
    # the name of the program, in parentheses, may contain spaces
    state, *numbers = line.rpartition(")")[2].split()
    return [ord(state), *map(int, numbers)]


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("VmHWM:"):
            kibibytes = int(line.split()[1])
            return kibibytes * 1024
    return 0
