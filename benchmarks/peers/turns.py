"""One configuration: the peers' workers at once, in turns, and what they measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.benchmarks.peers.export import export
from securecluster.benchmarks.peers.process import PeerError, Worker
from securecluster.benchmarks.peers.work import CORES

THREADS = {
    "ours": (CORES,),
    "flower": (1,),
    "pfl_mp": (1,),
}  # the others: one thread or all cores, whichever a short run shows to be faster
TRIAL = (20, 3)  # clients and rounds of that short run
# by peer: threads, and seconds per client and round (0 where nothing was tried)
Trials = dict[str, tuple[int, float]]


@dataclass
class Measured:
    """What one worker did in one configuration."""

    peer: str
    threads: int = 0
    status: str = "ok"
    start: float = float("nan")  # seconds from the start of its process until it had its data
    seconds: list[float] = field(default_factory=list)
    peak: int = 0  # of resident memory, in bytes, and of the device's
    peak_device: int = 0
    accuracy: float = float("nan")
    # after the "first" round and at the "end"
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def time(self, of: Callable[[list[float]], Any] = statistics.median) -> float:
        """The median (or `min`, `max`) of the rounds but the first, in seconds; NaN before there
        are any.
        """
        return float(of(self.seconds[1:])) if self.seconds[1:] else float("nan")


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line."""

    clients: Sequence[int]
    models: Sequence[str]
    peers: Sequence[str]
    rounds: int
    device: str
    budget: float
    timeout: float
    pythons: dict[str, Path]
    scratch: Path

    def worker(self, peer: str, work: Path, threads: int) -> Worker:
        """A started worker."""
        return Worker(
            peer, self.pythons[peer], work, threads, self.device, self.scratch / f"{peer}.log"
        )


class Turns:
    """The workers of one configuration.

    A worker that fails is stopped and named, and the others go on.
    """

    def __init__(
        self, plan: Plan, work: Path, measured: Sequence[Measured], stack: ExitStack
    ) -> None:
        self._plan, self._work, self._measured, self._stack = plan, work, measured, stack
        self._workers: dict[str, Worker] = {}

    def each(self, act: Callable[[Measured], None]) -> None:
        """Do something with all that are well, one after the other."""
        for found in self._measured:
            try:
                if found.status == "ok":
                    act(found)
            except PeerError as error:
                found.status = str(error)
                print(f"  {found.peer}: {error}", flush=True)
                self._workers[found.peer].close()

    def start(self, found: Measured) -> None:
        """Start a process and wait for its data to be there."""
        since = time.monotonic()
        worker = self._stack.enter_context(self._plan.worker(found.peer, self._work, found.threads))
        self._workers[found.peer] = worker
        worker.ready(self._plan.timeout)
        found.start = time.monotonic() - since

    def round(self, found: Measured) -> None:
        """One round."""
        answer = self._workers[found.peer].ask("round", self._plan.timeout)
        found.seconds.append(answer["seconds"])
        found.peak = max(found.peak, answer["peak_rss_bytes"])
        found.peak_device = max(found.peak_device, answer["peak_device_bytes"])
        if len(found.seconds) == 1:
            found.weights["first"] = self._weights(found)

    def finish(self, found: Measured) -> None:
        """Accuracy and weights of the global model."""
        found.accuracy = self._workers[found.peer].ask("accuracy", self._plan.timeout)["accuracy"]
        found.weights["end"] = self._weights(found)

    def _weights(self, found: Measured) -> NDArray[np.float32]:
        path = self._plan.scratch / f"{found.peer}.npy"
        self._workers[found.peer].ask(f"weights {path}", self._plan.timeout)
        weights: NDArray[np.float32] = np.load(path)
        return weights


def measure(plan: Plan, model: str, clients: int, trials: Trials) -> list[Measured]:
    """All workers in turns until the rounds or the budget are used up."""
    work = plan.scratch / f"{model}-{clients}.npz"
    export(work, model, clients, plan.rounds)
    measured = [_planned(peer, clients, trials[peer], plan.timeout) for peer in plan.peers]
    with ExitStack() as stack:
        turns = Turns(plan, work, measured, stack)
        turns.each(turns.start)
        began = time.monotonic()
        for number in range(plan.rounds):
            turns.each(turns.round)
            latest = (
                f"{found.peer} {found.seconds[-1]:.3f}"
                for found in measured
                if found.status == "ok"
            )
            print(f"  round {number + 1}: {'  '.join(latest)}", flush=True)
            if time.monotonic() - began > plan.budget:
                break
        turns.each(turns.finish)
    work.unlink()
    return measured


def trials(plan: Plan, model: str) -> Trials:
    """Each peer's better number of threads, from a short run with few clients."""
    clients, rounds = TRIAL
    work = plan.scratch / f"{model}-trial.npz"
    export(work, model, clients, rounds)
    found = {}
    for peer in plan.peers:
        choices = THREADS.get(peer, tuple(sorted({1, CORES})))
        timed = {
            threads: 0.0 if peer in THREADS else _trial(plan, peer, work, threads) / clients
            for threads in choices
        }
        best = min(timed, key=lambda threads: timed[threads])
        found[peer] = (best, timed[best])
    work.unlink()
    return found


def _trial(plan: Plan, peer: str, work: Path, threads: int) -> float:
    try:
        with plan.worker(peer, work, threads) as worker:
            worker.ready(plan.timeout)
            return min(float(worker.ask("round", plan.timeout)["seconds"]) for _ in range(TRIAL[1]))
    except PeerError:
        return float("inf")


def _planned(peer: str, clients: int, trial: tuple[int, float], timeout: float) -> Measured:
    """Not to be run where the trial failed, or says that a round would time out."""
    threads, each = trial
    found = Measured(peer, threads)
    if each == float("inf"):
        found.status = "not run: the short run before failed"
    elif each * clients > timeout:
        found.status = f"not run: a round would take about {each * clients:.0f} s"
    return found
