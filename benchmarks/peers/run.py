"""Seconds per round of this project beside Apple's pfl, Flower's simulation, a plain PyTorch loop
and one centralised model.

python -m securecluster.benchmarks.peers [--clients 20 100 1000] [--models mlp cnn] [--rounds N]
[--peers …] [--device cpu|cuda]

The workers of a configuration all run at once and take turns, one round each, so that whatever else
the machine does hits all alike; who waits does nothing. Equal work is shown by the accuracy and by
the largest difference between a worker's weights and the plain loop's. SECURECLUSTER_DATA names the
folder that holds `mnist`; without it the clients hold digits scaled up to 28 × 28.
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

from securecluster.benchmarks.peers.export import SAMPLES, data
from securecluster.benchmarks.peers.make import WHERE, python, versions
from securecluster.benchmarks.peers.turns import Measured, Plan, measure, trials
from securecluster.benchmarks.peers.work import NAMES
from securecluster.benchmarks.table import write
from securecluster.core.devices import choose_device
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError, unknown

ENVIRONMENTS = {
    "ours": "securecluster",
    "pfl": "pfl",
    "pfl_mp": "pfl",
    "flower": "flower",
    "plain": "plain",
    "central": "plain",
}
COLUMNS = (
    "peer",
    "first",
    "median",
    "min",
    "max",
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
    """A row for each peer, those that were not asked for included."""
    by = {found.peer: found for found in measured}
    ours, central, plain = (by.get(name, Measured(name)) for name in ("ours", "central", "plain"))
    lines = []
    for peer in ENVIRONMENTS:
        found = by.get(peer, Measured(peer, status="not run"))
        setting = {
            "model": model,
            "clients": clients,
            "device": device_name(plan.device),
            "data": data(),
        }
        ratios = {
            "times_ours": _text(found.time() / ours.time(), 2),
            "share_of_central": _text(central.time() / found.time(), 3),
            "samples_per_second": _text(clients * SAMPLES / found.time(), 0),
        }
        diffs = {f"diff_{when}": _difference(found, plain, when) for when in ("first", "end")}
        lines.append(
            setting
            | _numbers(found)
            | ratios
            | diffs
            | {"status": found.status, "versions": packages.get(peer, "")}
        )
    return lines


def _numbers(found: Measured) -> dict[str, Any]:
    """What one worker measured by itself."""
    return {
        "peer": found.peer,
        "threads": found.threads,
        "rounds": len(found.seconds),
        "start": _text(found.start, 2),
        "first": _text(found.seconds[0] if found.seconds else float("nan"), 4),
        "median": _text(found.time(), 4),
        "min": _text(found.time(min), 4),
        "max": _text(found.time(max), 4),
        "peak_mib": found.peak >> 20,
        "peak_device_mib": found.peak_device >> 20,
        "accuracy": _text(found.accuracy, 4),
    }


def device_name(device: str) -> str:
    """`cpu`, whose name is in the CSV's first line, or the GPU's own name."""
    return device if device == "cpu" else torch.cuda.get_device_name()


def _difference(found: Measured, plain: Measured, when: str) -> str:
    """The largest difference from the plain loop's weights; the centralised model does other work.

    What differs by a last bit after the first round may differ visibly at the end, since training
    amplifies it (the CNN a thousandfold).
    """
    if when not in found.weights or when not in plain.weights or found.peer == "central":
        return ""
    return f"{np.abs(found.weights[when] - plain.weights[when]).max():.1e}"


def _text(value: float, digits: int) -> str:
    return "" if np.isnan(value) else f"{value:.{digits}f}"


def show(lines: Sequence[dict[str, Any]]) -> None:
    """One configuration as a table."""
    print(
        f"{lines[0]['model']}, {lines[0]['clients']} clients, {lines[0]['device']}, "
        f"{lines[0]['data']}: seconds per round"
    )
    print("  ".join(f"{name:>{max(8, len(name))}}" for name in COLUMNS))
    for line in lines:
        print(
            "  ".join(f"{line[name]!s:>{max(8, len(name))}}" for name in COLUMNS)
            + ("" if line["status"] == "ok" else f"  {line['status']}"),
            flush=True,
        )


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="securecluster.benchmarks.peers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[20, 100, 1000])
    parser.add_argument("--models", nargs="+", default=list(NAMES))
    parser.add_argument("--peers", nargs="+", default=list(ENVIRONMENTS))
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


def chosen(given: argparse.Namespace, scratch: Path) -> Plan:
    """The plan, checked.

    Raises:
        UsageError: an unknown name, an environment that is missing, or numbers that measure
            nothing.
    """
    for what, names, known in (("model", given.models, NAMES), ("peer", given.peers, ENVIRONMENTS)):
        for name in names:
            if name not in known:
                raise unknown(what, name, known)
    if given.rounds < 2 or min(given.clients) < 2:
        raise UsageError(
            "two rounds and two clients are the least: the first round is reported apart"
        )
    choose_device(given.device)
    pythons = {peer: python(ENVIRONMENTS[peer], given.where) for peer in given.peers}
    return Plan(
        given.clients,
        given.models,
        given.peers,
        given.rounds,
        given.device,
        given.budget,
        given.timeout,
        pythons,
        scratch,
    )


def run(plan: Plan, name: str) -> Path:
    """Measure everything asked for; the table is printed and the CSV written anew after each
    configuration.
    """
    packages = {
        peer: " ".join(f"{k} {v}" for k, v in versions(p).items())
        for peer, p in plan.pythons.items()
    }
    table: list[dict[str, Any]] = []
    for model in plan.models:
        tried = trials(plan, model)
        print(
            f"{model}, threads: "
            + ", ".join(f"{peer} {threads}" for peer, (threads, _) in tried.items()),
            flush=True,
        )
        for clients in plan.clients:
            lines = rows(plan, model, clients, measure(plan, model, clients, tried), packages)
            show(lines)
            table += lines
            path = write(name, table)
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line's answer; a user's mistake is one sentence."""
    # so that the workers are stopped then, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    given = parsed(arguments)
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        try:
            print(run(chosen(given, Path(folder)), given.name))
        except UsageError as error:
            print(error, file=sys.stderr)
            return 2
    return 0
