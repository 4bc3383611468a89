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

from benchmarks.peers.export import export
from benchmarks.peers.process import PeerError, Worker
from benchmarks.peers.work import CORES

# this project takes all cores in one process; Flower and pfl_mp have a process a core
THREADS = {
    "ours": (CORES,),
    "ours_masked": (CORES,),
    "before": (CORES,),
    "before_masked": (CORES,),
    "flower": (1,),
    "pfl_mp": (1,),
}  # the others: one thread or all cores, whichever a short run shows to be faster
TRIAL = (20, 3)  # clients and rounds of that short run
# by peer: threads, and seconds per client and round (0 where nothing was tried)
Trials = dict[str, tuple[int, float]]


@dataclass
class Measured:
    """The results of one worker in one configuration."""

    peer: str
    threads: int = 0
    status: str = "ok"
    start: float = float("nan")  # seconds from the start of its process until it had its data
    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)  # seconds of processors, by round
    peak: int = 0  # of resident memory, in bytes, and of the device's
    peak_device: int = 0
    accuracy: float = float("nan")
    # after the "first" round and at the "end"
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    def time(self, of: Callable[[list[float]], Any] = statistics.median) -> float:
        """Return the median of the rounds but the first, in seconds; NaN before there are any.

        Args:
            of: another statistic than the median, such as `min`.
        """
        # the first round includes what happens once: ray's actors read data, pfl evaluates users
        later = self.seconds[1:]
        if not later:
            return float("nan")
        return float(of(later))


@dataclass(frozen=True)
class Plan:
    """The configurations to measure, as the command line says."""

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
        """Start a worker, and return it.

        Args:
            peer: one of the environments' users.
            work: path of the exported .npz.
            threads: of the worker.
        """
        log = self.scratch / f"{peer}.log"
        return Worker(peer, self.pythons[peer], work, threads, self.device, log)


class Turns:
    """The workers of one configuration.

    A worker that fails is stopped and named, and the others go on.
    """

    def __init__(
        self, plan: Plan, work: Path, measured: Sequence[Measured], stack: ExitStack
    ) -> None:
        self._plan = plan
        self._work = work
        self._measured = measured
        self._stack = stack
        self._workers: dict[str, Worker] = {}

    def each(self, act: Callable[[Measured], None]) -> None:
        """Do something with all workers that have not failed, one after the other.

        Args:
            act: takes a worker's results, and may raise `PeerError`.
        """
        for result in self._measured:
            try:
                if result.status == "ok":
                    act(result)
            except PeerError as error:
                result.status = str(error)
                print(f"  {result.peer}: {error}", flush=True)
                self._workers[result.peer].close()

    def start(self, result: Measured) -> None:
        """Start a worker and wait until it has read its data."""
        since = time.monotonic()
        started = self._plan.worker(result.peer, self._work, result.threads)
        worker = self._stack.enter_context(started)
        self._workers[result.peer] = worker
        worker.ready(self._plan.timeout)
        result.start = time.monotonic() - since

    def round(self, result: Measured) -> None:
        """Let a worker train one round, and add its figures to its results."""
        answer = self._ask(result, "round")
        result.seconds.append(answer["seconds"])
        result.cpu.append(answer["cpu_seconds"])
        result.peak = max(result.peak, answer["peak_rss_bytes"])
        result.peak_device = max(result.peak_device, answer["peak_device_bytes"])
        if len(result.seconds) == 1:
            # before training amplifies differences in the last bits
            result.weights["first"] = self._weights(result)

    def finish(self, result: Measured) -> None:
        """Add accuracy and weights of a worker's global model to its results."""
        answer = self._ask(result, "accuracy")
        result.accuracy = answer["accuracy"]
        result.weights["end"] = self._weights(result)

    def _ask(self, result: Measured, request: str) -> dict[str, Any]:
        worker = self._workers[result.peer]
        return worker.ask(request, self._plan.timeout)

    def _weights(self, result: Measured) -> NDArray[np.float32]:
        path = self._plan.scratch / f"{result.peer}.npy"
        self._ask(result, f"weights {path}")
        weights: NDArray[np.float32] = np.load(path)
        return weights


def measure(plan: Plan, model: str, clients: int, trials: Trials) -> list[Measured]:
    """Let all workers take turns until the rounds or the budget are used up.

    Args:
        plan: of the command line.
        model: one of its models.
        clients: one of its numbers of clients.
        trials: threads, and seconds per client and round, by peer.

    Returns:
        The results, a peer each.
    """
    work = plan.scratch / f"{model}-{clients}.npz"
    export(work, model, clients, plan.rounds)
    measured = [_planned(peer, clients, trials[peer], plan.timeout) for peer in plan.peers]
    with ExitStack() as stack:
        turns = Turns(plan, work, measured, stack)
        turns.each(turns.start)
        began = time.monotonic()
        # one round each, so that the machine's other load affects all workers equally
        for number in range(plan.rounds):
            turns.each(turns.round)
            latest = []
            for result in measured:
                if result.status == "ok":
                    latest.append(f"{result.peer} {result.seconds[-1]:.3f}")
            figures = "  ".join(latest)
            print(f"  round {number + 1}: {figures}", flush=True)
            if time.monotonic() - began > plan.budget:
                break
        turns.each(turns.finish)
    work.unlink()
    return measured


def trials(plan: Plan, model: str) -> Trials:
    """Return each peer's better number of threads, from a short run with few clients.

    Args:
        plan: of the command line.
        model: one of its models.
    """
    clients, rounds = TRIAL
    work = plan.scratch / f"{model}-trial.npz"
    export(work, model, clients, rounds)
    results = {}
    for peer in plan.peers:
        if peer in THREADS:
            timed = dict.fromkeys(THREADS[peer], 0.0)  # nothing to choose
        else:
            timed = {}
            for threads in sorted({1, CORES}):
                timed[threads] = _trial(plan, peer, work, threads) / clients
        best = min(timed, key=timed.__getitem__)
        results[peer] = (best, timed[best])
    work.unlink()
    return results


def _trial(plan: Plan, peer: str, work: Path, threads: int) -> float:
    """Return the seconds of the fastest round of a short run; infinity where it fails.

    Args:
        plan: the configuration's.
        peer: its name.
        work: the file that workers read.
        threads: of PyTorch.
    """
    try:
        with plan.worker(peer, work, threads) as worker:
            worker.ready(plan.timeout)
            seconds = []
            for _ in range(TRIAL[1]):
                answer = worker.ask("round", plan.timeout)
                seconds.append(float(answer["seconds"]))
            # the fastest one, since other load only adds to a time, and the first one warms up
            return min(seconds)
    except PeerError:
        return float("inf")


def _planned(peer: str, clients: int, trial: tuple[int, float], timeout: float) -> Measured:
    """Return empty results, whose status says "not run" where the trial advises against it.

    That is where the trial failed, or where a round would time out.

    Args:
        peer: its name.
        clients: how many.
        trial: the better number of threads, and seconds per client with it.
        timeout: seconds that a round may take.
    """
    threads, per_client = trial
    # linear in the number of clients, from the trial's 20
    expected = per_client * clients
    result = Measured(peer, threads)
    if per_client == float("inf"):
        result.status = "not run: the short run before failed"
    elif expected > timeout:
        result.status = f"not run: a round would take about {expected:.0f} s"
    return result
