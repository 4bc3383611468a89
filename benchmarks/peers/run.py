"""Measure seconds per round of this project, Apple's pfl, Flower's simulation and two baselines.

python -m benchmarks.peers [--clients 20 100 1000] [--models mlp cnn] [--rounds N]
[--peers …] [--device cpu|cuda]

The baselines are a plain PyTorch loop and one centralised model.

The workers of a configuration all run at once and take turns, one round each, so that the machine's
other load affects all of them equally; a worker that waits does nothing. Equal work is shown by the
accuracy and by the largest difference between a worker's weights and the plain loop's.
SECURECLUSTER_DATA names the folder that holds `mnist`; without it the clients hold digits scaled up
to 28 × 28.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.export import SAMPLES, data
from benchmarks.peers.make import WHERE, python, versions
from benchmarks.peers.turns import Measured, Plan, measure, trials
from benchmarks.peers.work import NAMES
from benchmarks.table import write
from securecluster.core.devices import choose_device
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError, unknown

ENVIRONMENTS = {
    "ours": "securecluster",
    "ours_masked": "securecluster",
    "before": "before",
    "before_masked": "before",
    "pfl": "pfl",
    "pfl_mp": "pfl",
    "flower": "flower",
    "plain": "plain",
    "central": "plain",
}
# an earlier version of this project is measured where it is asked for
USUAL = [peer for peer in ENVIRONMENTS if not peer.startswith("before")]
# printed ones: first, median, min and max are seconds a round, `cpu` the mean of the processors'
# seconds, which other load changes less, `times_ours` a peer's median over
# this project's, `share_of_central` the centralised model's median over a peer's
COLUMNS = (
    "peer",
    "first",
    "median",
    "min",
    "max",
    "cpu",
    "times_ours",
    "share_of_central",
    "peak_mib",
    "accuracy",
    "diff_first",
    "diff_end",
)


def rows(
    plan: Plan, model: str, clients: int, measured: Sequence[Measured], packages: dict[str, str]
) -> list[dict[str, Any]]:
    """Return a row for each peer, those that did not run included.

    Args:
        plan: of the command line.
        model: of this configuration.
        clients: of this configuration.
        measured: the results, a peer each.
        packages: the versions of a peer's packages, by peer.
    """
    by_peer = {result.peer: result for result in measured}
    ours = by_peer.get("ours", Measured("ours"))
    central = by_peer.get("central", Measured("central"))
    plain = by_peer.get("plain", Measured("plain"))
    lines = []
    for peer in ENVIRONMENTS:
        result = by_peer.get(peer, Measured(peer, status="not run"))
        median = result.time()
        setting = {
            "model": model,
            "clients": clients,
            "device": device_name(plan.device),
            "data": data(),
        }
        ratios = {
            "times_ours": _text(median / ours.time(), 2),
            "share_of_central": _text(central.time() / median, 3),
            # a round is one pass over all clients' samples
            "samples_per_second": _text(clients * SAMPLES / median, 0),
        }
        differences = {
            # after the first round differences are of rounding alone; later training amplifies them
            "diff_first": _difference(result, plain, "first"),
            "diff_end": _difference(result, plain, "end"),
        }
        outcome = {"status": result.status, "versions": packages.get(peer, "")}
        lines.append(setting | _numbers(result) | ratios | differences | outcome)
    return lines


def _numbers(result: Measured) -> dict[str, Any]:
    """Return the columns that need no other worker's results."""
    first = float("nan")
    if result.seconds:
        first = result.seconds[0]
    cpu = float("nan")
    if len(result.cpu) > 1:
        cpu = float(np.mean(result.cpu[1:]))
    return {
        "peer": result.peer,
        "threads": result.threads,
        "rounds": len(result.seconds),
        "start": _text(result.start, 2),
        "first": _text(first, 4),
        "median": _text(result.time(), 4),
        "min": _text(result.time(min), 4),
        "max": _text(result.time(max), 4),
        "cpu": _text(cpu, 4),
        "peak_mib": result.peak >> 20,
        "peak_device_mib": result.peak_device >> 20,
        "accuracy": _text(result.accuracy, 4),
    }


def device_name(device: str) -> str:
    """Return `cpu`, whose name is in the CSV's first line, or the GPU's own name."""
    if device == "cpu":
        return device
    return torch.cuda.get_device_name()


def _difference(result: Measured, plain: Measured, when: str) -> str:
    """Return the largest difference from the plain loop's weights, as text.

    A difference in the last bit after the first round may be visible at the end, since training
    amplifies it (the CNN a thousandfold).

    Args:
        result: of any worker.
        plain: of the plain loop.
        when: "first" or "end".

    Returns:
        An empty text where weights are missing, and for the centralised model, which does other
        work.
    """
    if when not in result.weights or when not in plain.weights:
        return ""
    if result.peer == "central":
        return ""
    difference = result.weights[when] - plain.weights[when]
    largest = np.abs(difference).max()
    return f"{largest:.1e}"


def _text(value: float, digits: int) -> str:
    if np.isnan(value):
        return ""
    return f"{value:.{digits}f}"


def show(lines: Sequence[dict[str, Any]]) -> None:
    """Print one configuration as a table.

    Args:
        lines: its rows, a peer each.
    """
    setting = lines[0]
    configuration = f"{setting['model']}, {setting['clients']} clients"
    machine = f"{setting['device']}, {setting['data']}"
    print(f"{configuration}, {machine}: seconds per round")
    # of each column
    width = [max(8, len(name)) for name in COLUMNS]

    def aligned(cells: Sequence[Any]) -> str:
        texts = [str(cell).rjust(w) for cell, w in zip(cells, width, strict=True)]
        return "  ".join(texts)

    print(aligned(COLUMNS))
    for line in lines:
        text = aligned([line[name] for name in COLUMNS])
        if line["status"] != "ok":
            text += f"  {line['status']}"
        print(text, flush=True)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line.

    Args:
        arguments: the command line; None takes the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="benchmarks.peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--peers", nargs="+", default=USUAL)
    parser.add_argument(
        "--rounds",
        type=int,
        default=6,
        help="at most, for each configuration; the first is reported apart",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--budget",
        type=float,
        default=600,
        help="seconds after which a configuration starts no further round",
    )
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds a worker may take for one round"
    )
    parser.add_argument("--where", type=Path, default=WHERE, help="folder of the environments")
    parser.add_argument("--name", default="peers", help="of the CSV in benchmarks/results")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace, scratch: Path) -> Plan:
    """Return the plan, checked.

    Args:
        options: of the command line.
        scratch: folder for exports, weights and logs.

    Raises:
        UsageError: an unknown name, an environment that is missing, or numbers that measure
            nothing.
    """
    for model in options.models:
        if model not in NAMES:
            raise unknown("model", model, NAMES)
    for peer in options.peers:
        if peer not in ENVIRONMENTS:
            raise unknown("peer", peer, ENVIRONMENTS)
    if options.rounds < 2 or min(options.clients) < 2:
        raise UsageError(
            "two rounds and two clients are the least: the first round is reported apart"
        )
    # raises if there is no such device, before any worker is started
    choose_device(options.device)
    pythons = {}
    for peer in options.peers:
        pythons[peer] = python(ENVIRONMENTS[peer], options.where)
    return Plan(
        clients=options.clients,
        models=options.models,
        peers=options.peers,
        rounds=options.rounds,
        device=options.device,
        budget=options.budget,
        timeout=options.timeout,
        pythons=pythons,
        scratch=scratch,
    )


def run(plan: Plan, name: str) -> Path:
    """Measure all configurations, and return the path of the CSV.

    The table is printed and the CSV written anew after each configuration.

    Args:
        plan: of the command line.
        name: of the CSV in benchmarks/results.
    """
    packages = {}
    for peer, interpreter in plan.pythons.items():
        names = [f"{package} {version}" for package, version in versions(interpreter).items()]
        packages[peer] = " ".join(names)
    table: list[dict[str, Any]] = []
    for model in plan.models:
        tried = trials(plan, model)
        threads = [f"{peer} {number}" for peer, (number, _) in tried.items()]
        print(f"{model}, threads: {', '.join(threads)}", flush=True)
        for clients in plan.clients:
            measured = measure(plan, model, clients, tried)
            lines = rows(plan, model, clients, measured, packages)
            show(lines)
            table += lines
            path = write(name, table)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; a user's mistake is one sentence.

    Args:
        arguments: the command line; None takes the process's own.
    """
    # so that the workers are stopped then, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options = parsed(arguments)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        try:
            plan = chosen(options, Path(folder))
            print(run(plan, options.name))
        except UsageError as error:
            print(error, file=sys.stderr)
            # the exit code of argparse's own errors
            return 2
    return 0
