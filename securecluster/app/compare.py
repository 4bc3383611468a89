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
    "clusters", "ari", "at_target", "given", "rounds", "up", "down", "servers", "epsilon",
    "dp_unit",
    "seconds", "error",
)  # fmt: skip
GIVEN = ("k", "tasks")  # hyper-parameters that give a protocol the number of clusters


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
    """Return the content of compare.json; None where a run has not ended, or ended in an error.

    All files are checked before.
    """
    from securecluster.app import run_folder
    from securecluster.core import manifest

    if not (folder / run_folder.COMPARISON).is_file() or not (folder / manifest.NAME).is_file():
        return None
    homes = [folder / name for name in run_folder.compared(folder) or ()]
    marks = manifest.read(folder)
    content: dict[str, Any] = json.loads(manifest.checked(folder, run_folder.COMPARISON, marks))
    if any(row["error"] for row in content["protocols"]):
        return None
    if not all(run_folder.finished(home) for home in homes):
        return None
    for home in homes:
        run_folder.result_of(home)
        run_folder.tidy(home)
    return content


def _carry_out(folder: Path, plans: Sequence[RunPlan], federation: Federation, quiet: bool) -> int:
    """Run what has not ended in a folder that is locked, and show everything side by side.

    Raises:
        SecureClusterError: some of the protocols failed; the others are in the folder.
    """
    from securecluster.app.plots import comparison

    console = execution.console(quiet)
    try:
        with execution.resumable(folder):
            rows = list(_rows(folder, plans, federation, console))
            content = _content(plans, federation, rows)
            content["together"] = _together(folder, plans, rows)
            pictures = _record(folder, content)
    except RunFolderError as error:
        # only what the disk refused may go well the next time
        if not isinstance(error.__cause__, OSError):
            raise
        raise RunFolderError(f"{error}; go on with: securecluster resume {folder}") from error
    if not quiet:
        with output():
            comparison.show(content)
            names = ", ".join(picture.name for picture in pictures)
            console.print(f"everything is in {folder}; pictures: {names}")
    _check_failures(folder, rows)
    return 0


def _record(folder: Path, content: dict[str, Any]) -> list[Path]:
    """Write the pictures and compare.json, and return the pictures."""
    from securecluster.app import run_folder
    from securecluster.app.plots import comparison
    from securecluster.core import atomic_files, manifest

    histories = {row["protocol"]: _history(folder, row) for row in content["protocols"]}
    pictures = comparison.draw(folder, content, histories)
    text = json.dumps(content, indent=2) + "\n"
    atomic_files.write_atomic(folder / run_folder.COMPARISON, text.encode())
    manifest.write(folder, [run_folder.CONFIG, run_folder.COMPARISON])
    return pictures


def _check_failures(folder: Path, rows: Sequence[Row]) -> None:
    """Raise SecureClusterError where a protocol failed."""
    failures = [f"{row['protocol']} failed: {row['error']}" for row in rows if row["error"]]
    if failures:
        ended = len(rows) - len(failures)
        raise SecureClusterError(
            f"{'; '.join(failures)}; {ended} of {len(rows)} protocols ended, see "
            f"{folder / 'compare.json'}"
        )


def _rows(
    folder: Path, plans: Sequence[RunPlan], federation: Federation, console: Any
) -> Iterator[Row]:
    """Yield a row for each protocol.

    An error of one protocol does not stop the others, but a folder that cannot be written does.
    """
    for number, plan in enumerate(plans, 1):
        name = plan.protocol.name
        with output():
            console.print(f"[bold]{name}[/bold] ({number} of {len(plans)})")
        try:
            row = _row(_result(plan, federation, folder / name, console))
            yield row | {
                "given": _given_clusters(plan.protocol),
                "rounds": len(_history(folder, row)),
            }
        except (RunFolderError, OutputError):
            raise
        except SecureClusterError as error:
            with output():
                console.print(f"{name} failed: {error}", markup=False)
            yield {"protocol": name, **_empty(federation.objective.metric), "error": str(error)}


def _result(plan: RunPlan, federation: Federation, folder: Path, console: Any) -> dict[str, Any]:
    """Return the content of a run's result.json; a run that has none is carried out."""
    from securecluster.app import run_folder

    with run_folder.locked(folder):
        if not run_folder.finished(folder):
            content, _ = execution.carry_out(plan, federation, folder, console)
            return content
        content = run_folder.result_of(folder)
    with output():
        console.print("is complete")
    return content


def _empty(metric: str) -> Row:
    """Return a row without numbers, the metric's columns after the first two."""
    return dict.fromkeys((*COLUMNS[:2], f"{metric}_before", metric, *COLUMNS[2:]))


def _row(result: dict[str, Any]) -> Row:
    """Return a run's row from the content of its result.json."""
    metric = result["metric"]
    metrics, sent, privacy = result["metrics"], result["bytes"], result["privacy"]
    row = {
        "protocol": result["protocol"],
        **_empty(metric),
        "clusters": result["clusters"],
        "ari": metrics["ari"],
        metric: metrics[metric]["after"],
        "at_target": metrics["at_target"],
        "up": sent["up"],
        "down": sent["down"],
        "servers": sent["servers"],
        "epsilon": privacy["epsilon"],
        "seconds": result["seconds"],
    }
    if result["clusters"] > 1:
        row[f"{metric}_before"] = metrics[metric]["before"]
    if any(release["noise_multiplier"] for release in privacy["releases"]):
        row["dp_unit"] = privacy["unit"]
    return row


def _together(folder: Path, plans: Sequence[RunPlan], rows: Sequence[Row]) -> list[Row]:
    """Return what the runs with noise cost together, by the unit of privacy.

    Their clients are the same. ε of a client and ε of an example are not added up.

    Returns:
        For each unit its protocols, ε (null: infinite), δ and the accountant.
    """
    from securecluster.privacy.dp.ledger import Ledger
    from securecluster.protocols.common.serialization import read_ledger

    delta_of = {plan.protocol.name: plan.protocol.delta for plan in plans}
    totals = []
    for unit in ("client", "example"):
        names = [row["protocol"] for row in rows if row["dp_unit"] == unit]
        if not names:
            continue
        ledgers = [read_ledger(folder / name) for name in names]
        delta = delta_of[names[0]]
        price = Ledger.union(*ledgers).price(delta)
        epsilon = None if math.isinf(price.epsilon) else price.epsilon
        total = {
            "unit": unit,
            "protocols": names,
            "epsilon": epsilon,
            "delta": delta,
            "accountant": price.accountant,
        }
        totals.append(total)
    return totals


def _given_clusters(protocol: Any) -> dict[str, int] | None:
    """Return what a protocol is given of the number of clusters.

    It is None where the protocol finds the number itself.
    """
    values = {name: getattr(protocol, name, None) for name in GIVEN}
    given = {name: int(value) for name, value in values.items() if value is not None}
    return given or None


def _content(plans: Sequence[RunPlan], federation: Federation, rows: list[Row]) -> dict[str, Any]:
    """Return the content of compare.json but `together`.

    An epsilon of null is infinite where there is no error.

    `rounds` are those that a protocol ran, and `given` is what it was given of the number of
    clusters.
    """
    import securecluster
    from securecluster.app.run_folder import SCHEMA

    true_clusters = None if federation.truth is None else len(set(federation.truth))
    return {
        "schema": SCHEMA,
        "version": securecluster.__version__,
        "data": federation.data,
        "scenario": federation.scenario,
        "clients": len(federation),
        "true_clusters": true_clusters,
        "seed": federation.seed,
        "device": plans[0].settings.device,
        "target": plans[0].settings.target,
        "metric": federation.objective.metric,
        "unit": federation.objective.unit,
        "protocols": rows,
    }


def _history(folder: Path, row: Row) -> list[dict[str, Any]]:
    """Return the lines of a run's rounds; none where it failed before the first."""
    path = folder / row["protocol"] / "history.jsonl"
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]
