"""Protocols over Flower's simulation: equal to runs in one process, and what they cost.

python -m benchmarks.apps.over_flower conformance [--only TEXT] [--out FILE]
python -m benchmarks.apps.over_flower cost --clients 50 --rounds 3 [--out FILE]

`conformance` runs every protocol plain, masked, with secure sums or pads, and with noise, each
node's endpoint made of its stored state by whichever process takes the message, and compares state,
labels, calls and bytes with a run in one process. `cost` runs FedAvg and CFL beside Flower's own
FedAvg on the same nodes, in one start of Ray: seconds a round, messages, bytes of frames, and
processor time of a message at the server, with Flower's own engine, and at a node.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from benchmarks import golden, timed_code
from benchmarks.apps.flower_apps import (
    COSTS,
    FOLDER,
    SECONDS,
    VARIABLES,
    OfCase,
    client_app,
    clients_of_all,
    network,
    protocol_of,
    size,
)
from securecluster import Settings
from securecluster.errors import UsageError
from securecluster.messaging import run_number
from securecluster.nodes import flower

RAY = {
    "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    "init_args": {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 400 << 20},
}
# of `benchmarks.golden`, by the name of the column
WAYS = {
    "plain": ("plain",),
    "masked": ("masked",),
    "hidden": ("secagg", "pads", "pads and secagg"),
    "noised": ("noised clients", "noised examples", "secagg noised in shares"),
}
Row = dict[str, Any]


def chosen(only: str) -> list[str]:
    """Return the names of the cases of the conformance table.

    Args:
        only: text that a name contains.
    """
    ways = [way for names in WAYS.values() for way in names]
    return [case.name for case in golden.cases() if case.way in ways and only in case.name]


def digest(state: bytes) -> str:
    """Return a digest of packed state.

    Args:
        state: of a server.
    """
    return hashlib.sha256(state).hexdigest()[:16]


def in_process(case: str) -> Row:
    """Return what a run in one process ends with, or why it is refused.

    Args:
        case: its name.
    """
    try:
        fitted = protocol_of(case).fit(clients_of_all(), Settings(keys_from_seed=True, threads=1))
    except UsageError as error:
        return {"refused": str(error)}
    return facts_of(fitted)


def facts_of(fitted: Any) -> Row:
    """Return what of a run is compared.

    Args:
        fitted: its result.
    """
    sent = fitted.bytes_
    return {
        "state": digest(fitted.server_state_),
        "calls": len(fitted.transcript_.entries),
        "up": sent["up"],
        "down": sent["down"],
        "events": len(fitted.ledger_.events),
    }


def over_flower(grid: Any, context: Any, case: str) -> tuple[Row, Row]:
    """Return what a run over Flower ends with, and what it costs.

    Args:
        grid: Flower's.
        context: of the ServerApp.
        case: its name.
    """
    of_case: Any = OfCase(grid, case)
    lines: list[float] = []
    patience = flower.Patience(call=600.0)
    began = time.process_time()
    # noise and masks are those of the run in one process, which has no number
    with mock.patch.object(run_number, "drawn", lambda: None):
        fitted = flower.serve(
            of_case,
            context,
            protocol_of(case),
            clients=size("clients"),
            seed=0,
            classes=10,
            patience=patience,
            report=lambda line: lines.append(time.monotonic()),
        )
    rounds = max(1, len(lines) - 1)
    seconds = (lines[-1] - lines[0]) / rounds if len(lines) > 1 else float("nan")
    spent = (time.process_time() - began, of_case.spent)
    return {**facts_of(fitted), "lost": len(fitted.dropped_)}, cost(
        seconds, of_case.messages, *spent
    )


def cost(seconds: float, messages: int, server: float, nodes: float) -> Row:
    """Return the costs of a run, as the table has them.

    Args:
        seconds: that a round takes.
        messages: to nodes, in the whole run.
        server: processor seconds of the server's process.
        nodes: processor seconds of all nodes.
    """
    return {
        "seconds": round(seconds, 2),
        "messages": messages,
        "server_ms": round(1e3 * server / messages, 1),
        "node_ms": round(1e3 * nodes / messages, 1),
    }


def conformance(grid: Any, context: Any, names: Sequence[str]) -> list[Row]:
    """Return a row for each case: whether a run over Flower is the run in one process.

    Args:
        grid: Flower's.
        context: of the ServerApp.
        names: of the cases.
    """
    rows = []
    for case in names:
        expected = in_process(case)
        if "refused" in expected:
            continue
        variant, _, way = case.partition(", ")
        row: Row = {"case": case, "variant": variant, "way": way}
        try:
            result, spent = over_flower(grid, context, case)
        except Exception as error:
            row |= {"equal": False, "differs": f"{type(error).__name__}: {error}"}
        else:
            differing = [name for name, value in expected.items() if result[name] != value]
            row |= {
                "equal": not differing,
                "differs": " ".join(differing),
                "calls": result["calls"],
                "messages": spent["messages"],
            }
        rows.append(row)
        print(row, flush=True)
    return rows


def flowers_own(grid: Any, rounds: int, clients: int) -> Row:
    """Return what Flower's own FedAvg costs.

    Args:
        grid: Flower's.
        rounds: number of rounds.
        clients: m.
    """
    strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=clients)
    weights = ArrayRecord(network().state_dict())
    began = time.monotonic()
    began_server = time.process_time()
    result = strategy.start(grid=grid, initial_arrays=weights, num_rounds=rounds)
    seconds = (time.monotonic() - began) / rounds
    server = time.process_time() - began_server
    # means over the clients of a round, which have equally many samples
    means = [float(metrics[SECONDS]) for metrics in result.train_metrics_clientapp.values()]
    return cost(seconds, rounds * clients, server, clients * sum(means))


def costs(grid: Any, context: Any, rounds: int, clients: int) -> list[Row]:
    """Return a row for each of Flower's FedAvg and our protocols: time, messages, bytes.

    Flower's own runs before the others and after them; its first run also starts Ray's workers.

    Args:
        grid: Flower's.
        context: of the ServerApp.
        rounds: number of rounds.
        clients: m.
    """
    rows: list[Row] = []

    def note(case: str, spent: Row, **sent: Any) -> None:
        rows.append({"case": case, "clients": clients, "rounds": rounds, **spent, **sent})
        print(rows[-1], flush=True)

    note("Flower's FedAvg, with the start of its workers", flowers_own(grid, 1, clients))
    note("Flower's FedAvg", flowers_own(grid, rounds, clients))
    for case in COSTS:
        result, spent = over_flower(grid, context, case)
        note(case, spent, **{name: result[name] for name in ("calls", "up", "down", "lost")})
    note("Flower's FedAvg, again", flowers_own(grid, rounds, clients))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, and return the exit code: 1 where a run over Flower differs.

    Args:
        argv: the command line; None takes it from the system.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["conformance", "cost"])
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    clients = options.clients or (6 if options.what == "conformance" else 50)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        # Ray's workers read it, too
        os.environ[VARIABLES["clients"]] = str(clients)
        os.environ[VARIABLES["rounds"]] = str(options.rounds)
        os.environ[FOLDER] = folder
        server_app = ServerApp()

        def run(grid: Any, context: Any) -> None:
            if options.what == "conformance":
                rows.extend(conformance(grid, context, chosen(options.only)))
            else:
                rows.extend(costs(grid, context, options.rounds, clients))

        server_app.main()(run)
        run_simulation(server_app, client_app, clients, backend_config=RAY)
    if options.out is not None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        timed_code.record(options.out.stem, options.out.resolve().parent)
    different = [row["case"] for row in rows if not row.get("equal", True)]
    if options.what == "conformance":
        print(f"{len(rows) - len(different)} of {len(rows)} cases are equal")
    return int(bool(different) or not rows)


if __name__ == "__main__":
    sys.exit(main())
