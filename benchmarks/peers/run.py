"""Seconds per round of this project beside Apple's pfl, Flower's simulation, a plain PyTorch loop and one centralised model.

python -m securecluster.benchmarks.peers [--clients 20 100 1000] [--models mlp cnn] [--rounds N] [--peers …] [--device cpu|cuda]

The workers of a configuration all run at once and take turns, one round each, so that whatever else the machine does hits all alike; who
waits does nothing. Equal work is shown by the accuracy and by the largest difference between a worker's weights and the plain loop's.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
from securecluster.benchmarks.peers.export import NAMES, SAMPLES, export
from securecluster.benchmarks.peers.make import WHERE, python, versions
from securecluster.benchmarks.peers.process import PeerError, Worker
from securecluster.benchmarks.table import write

from securecluster.errors import UsageError, unknown

CORES = os.cpu_count() or 1
ENVIRONMENTS = {"ours": "securecluster", "pfl": "pfl", "pfl_mp": "pfl", "flower": "flower", "plain": "plain", "central": "plain"}
THREADS = {
    "ours": (CORES,),
    "flower": (1,),
    "pfl_mp": (1,),
}  # the others: one thread or all cores, whichever a short run shows to be faster
TRIAL = (20, 3)  # clients and rounds of that short run
COLUMNS = ("peer", "threads", "rounds", "first", "median", "min", "max", "times_ours", "share_of_central", "peak_mib", "accuracy", "diff")


@dataclass
class Measured:
    """What one worker did in one configuration."""

    peer: str
    threads: int = 0
    status: str = "ok"
    start: float = float("nan")  # seconds from the start of its process until it had its data
    seconds: list[float] = field(default_factory=list)
    peak: int = 0
    accuracy: float = float("nan")
    weights: np.ndarray[Any, np.dtype[np.float32]] | None = None

    def time(self, of: str) -> float:
        """`median`, `min` or `max` of the rounds but the first, in seconds."""
        later = self.seconds[1:]
        functions = {"median": statistics.median, "min": min, "max": max}
        return float(functions[of](later)) if later else float("nan")


@dataclass(frozen=True)
class Plan:
    """What is asked for on the command line."""

    clients: tuple[int, ...]
    models: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    device: str
    budget: float
    timeout: float
    pythons: dict[str, Path]
    scratch: Path

    def worker(self, peer: str, work: Path, threads: int) -> Worker:
        """A started worker."""
        return Worker(peer, self.pythons[peer], work, threads, self.device, self.scratch / f"{peer}.log")


def faster(plan: Plan, model: str) -> dict[str, tuple[int, float]]:
    """Each peer's better number of threads and its seconds per client and round, from a short run with few clients.

    Where there is no choice nothing is run, and the seconds are 0.
    """
    clients, rounds = TRIAL
    work = plan.scratch / f"{model}-trial.npz"
    export(work, model, clients, rounds)
    found = {}
    for peer in plan.peers:
        choices = THREADS.get(peer, tuple(sorted({1, CORES})))
        timed = {threads: 0.0 if peer in THREADS else _trial(plan, peer, work, threads) / clients for threads in choices}
        best = min(timed, key=lambda threads: timed[threads])
        found[peer] = (best, timed[best])
    work.unlink()
    return found


def _trial(plan: Plan, peer: str, work: Path, threads: int) -> float:
    try:
        with plan.worker(peer, work, threads) as worker:
            worker.ready(plan.timeout)
            return min(worker.ask("round", plan.timeout)["seconds"] for _ in range(TRIAL[1]))
    except PeerError:
        return float("inf")


def measure(plan: Plan, model: str, clients: int, best: dict[str, tuple[int, float]]) -> list[Measured]:
    """One configuration: all workers in turns until the rounds or the budget are used up."""
    work = plan.scratch / f"{model}-{clients}.npz"
    export(work, model, clients, plan.rounds)
    measured = {peer: _expected(plan, peer, clients, best) for peer in plan.peers}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for peer, found in measured.items():
            if found.status == "ok":
                _guarded(found, workers, lambda peer=peer, found=found: _start(plan, stack, work, workers, found))  # type: ignore[misc]
        began = time.monotonic()
        for number in range(plan.rounds):
            for peer in tuple(workers):
                _guarded(measured[peer], workers, lambda peer=peer: _round(plan, workers[peer], measured[peer]))  # type: ignore[misc]
            print(f"  round {number + 1}: " + "  ".join(f"{p} {measured[p].seconds[-1]:.3f}" for p in workers), flush=True)
            if time.monotonic() - began > plan.budget:
                break
        for peer in tuple(workers):
            _guarded(measured[peer], workers, lambda peer=peer: _finish(plan, workers[peer], measured[peer]))  # type: ignore[misc]
    work.unlink()
    return list(measured.values())


def _expected(plan: Plan, peer: str, clients: int, best: dict[str, tuple[int, float]]) -> Measured:
    threads, each = best[peer]
    found = Measured(peer, threads)
    if each * clients > plan.timeout:
        found.status = f"not run: a round would take about {each * clients:.0f} s" if each < float("inf") else "not run: the trial failed"
    return found


def _guarded(found: Measured, workers: dict[str, Worker], act: Any) -> None:
    """A worker that fails is stopped and named, and the others go on."""
    try:
        act()
    except PeerError as error:
        found.status = str(error)
        print(f"  {found.peer}: {error}", flush=True)
        if found.peer in workers:
            workers.pop(found.peer).close()


def _start(plan: Plan, stack: ExitStack, work: Path, workers: dict[str, Worker], found: Measured) -> None:
    since = time.monotonic()
    workers[found.peer] = stack.enter_context(plan.worker(found.peer, work, found.threads))
    workers[found.peer].ready(plan.timeout)
    found.start = time.monotonic() - since


def _round(plan: Plan, worker: Worker, found: Measured) -> None:
    answer = worker.ask("round", plan.timeout)
    found.seconds.append(answer["seconds"])
    found.peak = max(found.peak, answer["peak_rss_bytes"])


def _finish(plan: Plan, worker: Worker, found: Measured) -> None:
    path = plan.scratch / f"{found.peer}.npy"
    found.accuracy = worker.ask("accuracy", plan.timeout)["accuracy"]
    worker.ask(f"weights {path}", plan.timeout)
    found.weights = np.load(path)


def rows(plan: Plan, model: str, clients: int, measured: Sequence[Measured], packages: dict[str, str]) -> list[dict[str, Any]]:
    """A row for each peer, those that were not asked for included."""
    by = {found.peer: found for found in measured}
    ours, central, plain = (by.get(name, Measured(name)) for name in ("ours", "central", "plain"))
    lines = []
    for peer in ENVIRONMENTS:
        found = by.get(peer, Measured(peer, status="not run"))
        median = found.time("median")
        lines.append(
            {
                "model": model,
                "clients": clients,
                "device": plan.device,
                "peer": peer,
                "threads": found.threads,
                "rounds": len(found.seconds),
            }
            | {"start": _text(found.start, 2), "first": _text(found.seconds[0] if found.seconds else float("nan"), 4)}
            | {of: _text(found.time(of), 4) for of in ("median", "min", "max")}
            | {"times_ours": _text(median / ours.time("median"), 2), "share_of_central": _text(central.time("median") / median, 3)}
            | {"samples_per_second": _text(clients * SAMPLES / median, 0), "peak_mib": found.peak >> 20}
            | {"accuracy": _text(found.accuracy, 4), "diff": _difference(found, plain), "status": found.status}
            | {"versions": packages.get(peer, "")}
        )
    return lines


def _difference(found: Measured, plain: Measured) -> str:
    """The largest difference from the plain loop's weights after equally many rounds; the centralised model does other work."""
    if found.weights is None or plain.weights is None or found.peer == "central":
        return ""
    return f"{np.abs(found.weights - plain.weights).max():.1e}"


def _text(value: float, digits: int) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"


def show(lines: Sequence[dict[str, Any]]) -> None:
    """One configuration as a table."""
    print(f"{lines[0]['model']}, {lines[0]['clients']} clients, {lines[0]['device']}: seconds per round")
    print("  ".join(f"{name:>10}" for name in COLUMNS))
    for line in lines:
        print("  ".join(f"{line[name]!s:>10}" for name in COLUMNS) + ("" if line["status"] == "ok" else f"  {line['status']}"), flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="securecluster.benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--peers", nargs="+", default=list(ENVIRONMENTS))
    parser.add_argument("--rounds", type=int, default=6, help="at most, for each configuration; the first is reported apart")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--budget", type=float, default=600, help="seconds after which a configuration starts no further round")
    parser.add_argument("--timeout", type=float, default=300, help="seconds a worker may take for one round")
    parser.add_argument("--where", type=Path, default=WHERE, help="folder of the environments")
    parser.add_argument("--name", default="peers", help="of the CSV in benchmarks/results")
    return parser.parse_args(arguments)


def chosen(given: argparse.Namespace, scratch: Path) -> Plan:
    """The plan, checked.

    Raises:
        UsageError: an unknown name, an environment that is missing, or numbers that measure nothing.
    """
    for what, names, known in (("model", given.models, NAMES), ("peer", given.peers, ENVIRONMENTS)):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    if given.rounds < 2 or min(given.clients) < 2:
        raise UsageError("two rounds and two clients are the least: the first round is reported apart")
    pythons = {peer: python(ENVIRONMENTS[peer], given.where) for peer in given.peers}
    sizes = (tuple(given.clients), tuple(given.models), tuple(given.peers))
    return Plan(*sizes, given.rounds, given.device, given.budget, given.timeout, pythons, scratch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything asked for, print tables and write the CSV after each configuration."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are stopped then, too
    given = parsed(arguments)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        try:
            plan = chosen(given, Path(folder))
        except UsageError as error:
            print(error, file=sys.stderr)
            return 2
        packages = {peer: " ".join(f"{k} {v}" for k, v in versions(p).items()) for peer, p in plan.pythons.items()}
        table: list[dict[str, Any]] = []
        for model in plan.models:
            best = faster(plan, model)
            print(f"{model}, threads: " + ", ".join(f"{peer} {threads}" for peer, (threads, _) in best.items()), flush=True)
            for clients in plan.clients:
                lines = rows(plan, model, clients, measure(plan, model, clients, best), packages)
                show(lines)
                table += lines
                path = write(given.name, table)
        print(path)
    return 0
