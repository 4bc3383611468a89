"""`securecluster compare`: several protocols on one federation, side by side.

A comparison's folder holds a run folder per protocol, which `replay` and `resume` take, and
`compare.json`, written last. How far it is follows from those folders alone: a run that ended has
its `result.json`, one that was stopped its checkpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.app import comparison_options, execution
from securecluster.app.stops import output
from securecluster.errors import OutputError, RunFolderError, SecureClusterError, UsageError

if TYPE_CHECKING:
    from securecluster.app.run_folder import RunPlan
    from securecluster.data import Federation

Row = dict[str, Any]
COLUMNS = (
    "clusters", "ari", "at_target", "told", "rounds", "up", "down", "servers", "epsilon", "dp_unit",
    "seconds", "error",
)  # fmt: skip
TOLD = ("k", "tasks")  # hyper-parameters that tell a protocol how many clusters there are


def start(argv: Sequence[str]) -> int:
    """Compare the protocols named first, under the options that follow."""
    names = list(takewhile(lambda word: not word.startswith("-"), argv))
    if not names:
        raise UsageError(
            "compare takes the protocols first: securecluster compare cfl fedavg --rounds 20"
        )
    comparison_options.check_chosen(names)
    rest = list(argv[len(names) :])
    comparison_options.check_owned(names, rest)
    import tyro

    with output():  # of --help
        options: Any = tyro.cli(
            comparison_options.comparison_class(names),
            prog=f"securecluster compare {' '.join(names)}",
            args=rest,
        )
    protocols = comparison_options.chosen(names, options.protocols, options.simulation.clusters)
    plans, federation = execution.prepare(protocols, options)
    from securecluster.app import run_folder

    texts = {
        f"{plan.protocol.name}/{run_folder.CONFIG}": plan.as_json(federation) for plan in plans
    }
    texts[run_folder.CONFIG] = run_folder.comparison_json(names)
    name = f"compare-{federation.data}"
    with run_folder.claimed(options.output.out, options.output.force, name, texts) as folder:
        return _carry_out(folder, plans, federation, options.output.quiet)


def resume(folder: Path, quiet: bool) -> int:
    """Go on with a comparison that was stopped, or show one that has ended.

    A protocol that failed is tried again from its last round.
    """
    from securecluster.app import run_folder
    from securecluster.app.plots import comparison

    content = _ended(folder)
    if content is None:
        with run_folder.locked(folder):  # before the plans are read: another start may replace them
            return _carry_out(folder, *_planned(folder), quiet)
    _planned(folder)
    if not quiet:
        with output():
            comparison.show(content)
            print(f"{folder} is complete")
    return 0


def _planned(folder: Path) -> tuple[list[RunPlan], Federation]:
    """Return the plans of a comparison's runs, and their clients, made again.

    Raises:
        RunFolderError: a damaged folder, or data that are no longer what they were.
    """
    from securecluster.app import run_folder

    found = [
        (folder / name, *run_folder.load(folder / name))
        for name in run_folder.compared(folder) or ()
    ]
    if not found:
        raise RunFolderError(f"{folder} compares nothing: start the comparison anew")
    federation = execution.federation_of(*found[0])
    for home, plan, config in found[1:]:
        execution.check_data(home, plan, config, federation)
    return [plan for _, plan, _ in found], federation


def _ended(folder: Path) -> dict[str, Any] | None:
    """Return the content of compare.json where every run has ended without an error, after a check
    of all files.
    """
    from securecluster.app import run_folder
    from securecluster.core import manifest

    if not (folder / run_folder.COMPARISON).is_file() or not (folder / manifest.NAME).is_file():
        return None
    homes = [folder / name for name in run_folder.compared(folder) or ()]
    marks = manifest.read(folder)
    content: dict[str, Any] = json.loads(manifest.checked(folder, run_folder.COMPARISON, marks))
    if any(row["error"] for row in content["protocols"]) or not all(
        map(run_folder.finished, homes)
    ):
        return None
    for home in homes:
        run_folder.result_of(home)
        run_folder.tidy(home)
    return content


def _carry_out(folder: Path, plans: Sequence[RunPlan], federation: Federation, quiet: bool) -> int:
    """Run what has not ended in a folder that is locked, then write and show everything side by
    side.

    Raises:
        SecureClusterError: some of the protocols failed; the others are in the folder.
    """
    from securecluster.app import run_folder
    from securecluster.app.plots import comparison
    from securecluster.core import atomic_files, manifest

    console = execution.console(quiet)
    try:
        with execution.resumable(folder):
            rows = list(_rows(folder, plans, federation, console))
            content = _content(plans, federation, rows) | {
                "together": _together(folder, plans, rows)
            }
            pictures = comparison.draw(
                folder, content, {row["protocol"]: _history(folder, row) for row in rows}
            )
            atomic_files.write_atomic(
                folder / run_folder.COMPARISON, (json.dumps(content, indent=2) + "\n").encode()
            )
            manifest.write(folder, [run_folder.CONFIG, run_folder.COMPARISON])
    except RunFolderError as error:
        # nothing that the disk said, and would not say again
        if not isinstance(error.__cause__, OSError):
            raise
        raise RunFolderError(f"{error}; go on with: securecluster resume {folder}") from error
    if not quiet:
        with output():
            comparison.show(content)
            console.print(
                f"everything is in {folder}; pictures: " + ", ".join(p.name for p in pictures)
            )
    failed = [row for row in rows if row["error"]]
    if failed:
        said = "; ".join(f"{row['protocol']} failed: {row['error']}" for row in failed)
        raise SecureClusterError(
            f"{said}; {len(rows) - len(failed)} of {len(rows)} protocols ended, see "
            f"{folder / 'compare.json'}"
        )
    return 0


def _rows(
    folder: Path, plans: Sequence[RunPlan], federation: Federation, console: Any
) -> Iterator[Row]:
    """A row for each protocol. What stops one of them does not stop the others, but a folder that
    cannot be written does.
    """
    for number, plan in enumerate(plans, 1):
        name = plan.protocol.name
        with output():
            console.print(f"[bold]{name}[/bold] ({number} of {len(plans)})")
        try:
            row = _row(_result(plan, federation, folder / name, console))
            yield row | {"told": _told(plan.protocol), "rounds": len(_history(folder, row))}
        except (RunFolderError, OutputError):
            raise
        except SecureClusterError as error:
            with output():
                console.print(f"{name} failed: {error}", markup=False)
            yield {"protocol": name, **_empty(federation.objective.metric), "error": str(error)}


def _result(plan: RunPlan, federation: Federation, folder: Path, console: Any) -> dict[str, Any]:
    """Return the content of a run's result.json; the run is carried out, or goes on, where it has
    none.
    """
    from securecluster.app import run_folder

    with run_folder.locked(folder):
        if not run_folder.finished(folder):
            return execution.carry_out(plan, federation, folder, console)[0]
        found = run_folder.result_of(folder)
    with output():
        console.print("is complete")
    return found


def _empty(metric: str) -> Row:
    return dict.fromkeys((*COLUMNS[:2], f"{metric}_before", metric, *COLUMNS[2:]))


def _row(result: dict[str, Any]) -> Row:
    metrics, sent, metric, privacy = (
        result["metrics"],
        result["bytes"],
        result["metric"],
        result["privacy"],
    )
    return {
        "protocol": result["protocol"],
        **_empty(metric),
        "clusters": result["clusters"],
        "ari": metrics["ari"],
        f"{metric}_before": metrics[metric]["before"] if result["clusters"] > 1 else None,
        metric: metrics[metric]["after"],
        "at_target": metrics["at_target"],
        "up": sent["up"],
        "down": sent["down"],
        "servers": sent["servers"],
        "epsilon": privacy["epsilon"],
        "dp_unit": privacy["unit"]
        if any(release["noise_multiplier"] for release in privacy["releases"])
        else None,
        "seconds": result["seconds"],
    }


def _together(folder: Path, plans: Sequence[RunPlan], rows: Sequence[Row]) -> list[Row]:
    """Return what the runs with noise cost together, by the unit of privacy: their clients are the
    same.

    ε of a client and ε of an example are not added up.

    Returns:
        For each unit its protocols, ε (null: infinite), δ and the accountant.
    """
    from securecluster.privacy.dp.ledger import Ledger
    from securecluster.protocols.common.serialization import read_ledger

    found = []
    for unit in ("client", "example"):
        names = [row["protocol"] for row in rows if row["dp_unit"] == unit]
        if not names:
            continue
        ledgers = [read_ledger(folder / name) for name in names]
        delta = next(plan.protocol.delta for plan in plans if plan.protocol.name == names[0])
        price = Ledger.union(*ledgers).price(delta)
        epsilon = None if math.isinf(price.epsilon) else price.epsilon
        found.append(
            {
                "unit": unit,
                "protocols": names,
                "epsilon": epsilon,
                "delta": delta,
                "accountant": price.accountant,
            },
        )
    return found


def _told(protocol: Any) -> dict[str, int] | None:
    """Return what a protocol is told of the number of clusters, or None where it finds the number
    itself.
    """
    values = {name: getattr(protocol, name, None) for name in TOLD}
    return {name: int(value) for name, value in values.items() if value is not None} or None


def _content(plans: Sequence[RunPlan], federation: Federation, rows: list[Row]) -> dict[str, Any]:
    """The content of compare.json; an epsilon of null is infinite where there is no error.

    `rounds` are those that a protocol ran, and `told` is what it was told of the number of
    clusters.
    """
    import securecluster
    from securecluster.app.run_folder import SCHEMA

    return {
        "schema": SCHEMA,
        "version": securecluster.__version__,
        "data": federation.data,
        "scenario": federation.scenario,
        "clients": len(federation),
        "true_clusters": None if federation.truth is None else len(set(federation.truth)),
        "seed": federation.seed,
        "device": plans[0].settings.device,
        "target": plans[0].settings.target,
        "metric": federation.objective.metric,
        "unit": federation.objective.unit,
        "protocols": rows,
    }


def _history(folder: Path, row: Row) -> list[dict[str, Any]]:
    path = folder / row["protocol"] / "history.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
