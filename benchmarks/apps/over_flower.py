"""Protocols over Flower's simulation, which must equal runs in one process.

python -m benchmarks.apps.over_flower [--only TEXT] [--out FILE]

Every protocol runs plain, masked, with secure sums or pads, and with noise, each node's endpoint
made of its stored state by whichever process takes the message. State, labels, calls and bytes are
compared with a run in one process.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from benchmarks import golden
from benchmarks.apps.flower_apps import (
    CLIENTS,
    FOLDER,
    OfCase,
    client_app,
    clients_of_all,
    protocol_of,
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


def over_flower(grid: Any, context: Any, case: str) -> Row:
    """Return what a run over Flower ends with, and its messages to nodes.

    Args:
        grid: Flower's.
        context: of the ServerApp.
        case: its name.
    """
    of_case: Any = OfCase(grid, case)
    # noise and masks are those of the run in one process, which has no number
    with mock.patch.object(run_number, "drawn", lambda: None):
        fitted = flower.serve(
            of_case,
            context,
            protocol_of(case),
            clients=CLIENTS,
            seed=0,
            classes=10,
            patience=flower.Patience(call=600.0),
            report=lambda line: None,
        )
    return {**facts_of(fitted), "messages": of_case.messages}


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
            result = over_flower(grid, context, case)
        except Exception as error:
            row |= {"equal": False, "differs": f"{type(error).__name__}: {error}"}
        else:
            differing = [name for name, value in expected.items() if result[name] != value]
            row |= {
                "equal": not differing,
                "differs": " ".join(differing),
                "calls": result["calls"],
                "messages": result["messages"],
            }
        rows.append(row)
        print(row, flush=True)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases, and return the exit code: 1 where a run over Flower differs.

    Args:
        argv: the command line; None takes it from the system.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder  # Ray's workers read it, too
        server_app = ServerApp()

        def run(grid: Any, context: Any) -> None:
            rows.extend(conformance(grid, context, chosen(options.only)))

        server_app.main()(run)
        run_simulation(server_app, client_app, CLIENTS, backend_config=RAY)
    if options.out is not None:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, names, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    different = [row["case"] for row in rows if not row["equal"]]
    print(f"{len(rows) - len(different)} of {len(rows)} cases are equal")
    return int(bool(different) or not rows)


if __name__ == "__main__":
    sys.exit(main())
