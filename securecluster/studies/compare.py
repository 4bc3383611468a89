"""`securecluster compare`: protocols as they are given, side by side on one federation.

It is one level and one seed on the engine of sweeps (`securecluster/studies/sweep_runner.py`). Its
runs keep their folders: a comparison's folder holds a run folder per protocol, which `replay` and
`resume` take. They are the only record of its progress and its numbers, from which `compare.json`,
tables and pictures are made again.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.commands import command_line, execution, failures
from securecluster.commands.command_line import Section
from securecluster.commands.failures import Row
from securecluster.core.number_format import printable
from securecluster.core.optional_packages import need
from securecluster.core.stops import output
from securecluster.errors import RunFolderError, SecureClusterError, UsageError
from securecluster.protocols.registry import protocol_names
from securecluster.studies import comparison_options, sweep_runner
from securecluster.studies.sweep_runner import DONE, Parallel

if TYPE_CHECKING:
    from pandas import DataFrame

    from securecluster.data import Federation
    from securecluster.folders.run_folder import RunPlan
    from securecluster.folders.schemas import Result
    from securecluster.runtime.settings import Settings

    Plans = dict[str, RunPlan]  # by label

Content = dict[str, Any]
COLUMNS = (
    "clusters", "ari", "at_target", "given", "rounds", "up", "down", "servers", "epsilon",
    "dp_unit", "seconds",
)  # fmt: skip
ABOUT = "Run several protocols on the same clients and set them side by side."
GIVEN = ("k", "tasks")  # hyper-parameters that give a protocol the number of clusters


@dataclass(frozen=True)
class Jobs:
    """The comparison."""

    jobs: int = 1
    """runs at the same time, each in a process of its own, of one thread unless `--threads` says
    otherwise; 0 is one for each core, at most 8, and 1 runs them here, with a line per round
    """


def start(argv: Sequence[str]) -> int:
    """Compare several protocols in a new folder.

    Args:
        argv: the protocols, then the options.

    Returns:
        The exit code.

    Raises:
        UsageError: a mistake that can be found before anything runs.
        SecureClusterError: some of the protocols failed; the others are in the folder.
    """
    from securecluster.studies import sweep_plan

    labels, arguments = comparison_options.protocols_first(
        argv, "compare", "cfl fedavg --rounds 20"
    )
    names = sweep_plan.names_of(labels)
    comparison_options.check_owned(names, arguments, ["jobs"])
    options = command_line.parsed(
        f"securecluster compare {' '.join(labels) or 'PROTOCOLS'}",
        arguments,
        ABOUT,
        {"study": Section("the comparison", Jobs), **comparison_options.sections(names)},
    )
    parallel = Parallel(options.study.jobs)
    parallel.check()
    if parallel.jobs != 1:
        settings = replace(options.settings, threads=options.settings.threads or 1)
        options = replace(options, settings=settings)
        parallel.preload()
    if len(labels) < 2:
        raise UsageError(
            "compare takes two protocols or more, then the options: choose from "
            f"{', '.join(protocol_names())}"
        )
    for label in labels:
        if Path(label).name != label:
            raise UsageError(
                f"{label} would name its run's folder, and none can be called so: give the option "
                "after the protocols"
            )
    variants = sweep_plan.variants_of(labels, options.protocols, options.simulation.clusters, ())
    sweep_plan.check_distinct(variants)
    protocols = [variant.at(sweep_plan.NOISE, 0.0) for variant in variants]
    prepared, federation = execution.prepare(protocols, options)
    plans = dict(zip(labels, prepared, strict=True))
    from securecluster.folders import run_folder

    texts = {}
    for label, plan in plans.items():
        texts[f"{label}/{run_folder.CONFIG}"] = plan.as_json(federation)
    # last, so that a folder that has it has the configuration of every run
    texts[run_folder.CONFIG] = run_folder.comparison_json(labels)
    name = f"compare-{federation.data}"
    with run_folder.claimed(options.output.out, options.output.force, name, texts) as folder:
        return _carry_out(folder, plans, federation, parallel, options.output.quiet)


def resume(folder: Path, quiet: bool, jobs: int = 1) -> int:
    """Go on with a comparison that was stopped, or show one that has ended.

    A protocol that failed is tried again from its last round.

    Args:
        folder: of the comparison.
        quiet: print nothing but errors.
        jobs: runs at the same time, each in a process of its own; 1 is this process.

    Returns:
        The exit code.

    Raises:
        UsageError: an impossible number.
        RunFolderError: a damaged folder, or data that have changed since.
        SecureClusterError: some of the protocols failed; the others are in the folder.
    """
    from securecluster.core.noted_warnings import noted
    from securecluster.folders import run_folder
    from securecluster.reports import loading
    from securecluster.studies import comparison_figures as comparison

    parallel = Parallel(jobs)
    parallel.check()
    runs = loading.compared_runs(folder) or ()
    if all(run_folder.finished(run) for run in runs):
        plans, federation = _planned(folder)
        rows = [run.row(federation) for run in _runs(folder, plans, quiet=True)]
        content = _content(folder, plans, federation, rows)
        if _is_recorded(folder, content):
            if not quiet:
                with output():
                    comparison.show(content)
                    print(f"{printable(str(folder))} is complete")
            with noted(execution.noting(quiet)):
                comparison.draw(folder, content, _histories(folder, content), True)
            return 0
    with run_folder.locked(folder):  # before the plans are read: another start may replace them
        return _carry_out(folder, *_planned(folder), parallel, quiet)


def to_frame(folder: Path | str) -> DataFrame:
    """Return a row for each protocol of a comparison that has ended, as its compare.json has them.

    Args:
        folder: of the comparison.

    Returns:
        A DataFrame by protocol. `epsilon` is infinite without noise, and missing where a protocol
        failed; `error` then says why.

    Raises:
        RunFolderError: no such folder, or a damaged one.
        UsageError: pandas is not installed.
    """
    pandas = need("pandas")
    from securecluster.core import atomic_files
    from securecluster.core.serialization import checked, parsed
    from securecluster.folders import run_folder
    from securecluster.folders.schemas import Comparison

    path = Path(folder) / run_folder.COMPARISON
    if not path.is_file():
        raise RunFolderError(f"{folder} holds no comparison that has ended: resume it first")
    content = checked(path, parsed(path, atomic_files.read(path)), Comparison)
    frame = pandas.DataFrame(content["protocols"]).set_index("protocol")
    without_noise = frame["epsilon"].isna() & frame["error"].isna()
    frame["epsilon"] = frame["epsilon"].astype(float).mask(without_noise, math.inf)
    return frame


def _planned(folder: Path) -> tuple[Plans, Federation]:
    """Return the plans of a comparison's runs by label, and their clients, made again.

    Args:
        folder: of the comparison.

    Raises:
        RunFolderError: a damaged folder, or data that have changed since.
    """
    from securecluster.reports import loading

    runs = []
    for run in loading.compared_runs(folder) or ():
        plan, config = loading.plan_of(run)
        if plan.protocol.name != run.name.partition(":")[0]:
            raise RunFolderError(
                f"{run} holds a run of {plan.protocol.name}: start the comparison anew"
            )
        runs.append((run, plan, config))
    # the runs share one federation, which the first plan makes
    federation = execution.federation_of(*runs[0])
    for run, plan, config in runs[1:]:
        execution.check_data(run, plan, config, federation)
    return {run.name: plan for run, plan, _ in runs}, federation


def _carry_out(
    folder: Path, plans: Plans, federation: Federation, parallel: Parallel, quiet: bool
) -> int:
    """Carry out the runs that have not ended, and show all of them side by side.

    Args:
        folder: of the comparison, whose lock this process holds.
        plans: of the runs, by label.
        federation: the clients that they share.
        parallel: runs at the same time.
        quiet: print nothing but errors.

    Raises:
        SecureClusterError: some of the protocols failed; the others are in the folder.
    """
    from securecluster.core import atomic_files
    from securecluster.core.noted_warnings import noted
    from securecluster.folders import run_folder
    from securecluster.studies import comparison_figures as comparison

    console = execution.console(quiet)
    processes = parallel.processes(_settings(plans))
    elsewhere = processes > 1

    def carried_out_here(batch: Sequence[_Run]) -> list[Row]:
        (run,) = batch
        with output():
            console.print(f"[bold]{run.label}[/bold] ({run.number} of {len(plans)})")
        return [run.row(federation)]

    def say(row: Row, remaining: float) -> Row:
        text = f"{row['protocol']} failed: {row['reason']}"
        if row["status"] == DONE:
            text = f"{row['protocol']} ended after {row['seconds']:.1f} s"
        if elsewhere or row["status"] != DONE:
            with output():
                console.print(text, markup=False)
        # a process of its own has no lines
        if elsewhere and row.get("warning") is not None:
            execution.noting(quiet)(f"{row['protocol']}: {row['warning']}")
        return row

    work = _carried_out if elsewhere else carried_out_here
    runs = _runs(folder, plans, quiet or elsewhere)
    with sweep_runner.resumable(folder):
        rows = list(sweep_runner.rows(runs, work, say, processes))
        rows.sort(key=lambda row: int(row["run"]))
        failures.write(folder / run_folder.FAILURES, rows, lambda row: str(row["protocol"]))
        content = _content(folder, plans, federation, rows)
        atomic_files.write_atomic(folder / run_folder.COMPARISON, _text(content))
        with noted(execution.noting(quiet)):
            pictures = comparison.draw(folder, content, _histories(folder, content))
    if not quiet:
        with output():
            comparison.show(content)
            names = ", ".join(picture.name for picture in pictures)
            console.print(f"everything is in {folder}; pictures: {names}")
            first = shlex.quote(str(runs[0].folder))
            console.print(
                f"next: securecluster report {first} --html (a page of one run), securecluster "
                f"audit {first} (attacks on it)",
                markup=False,
            )
    _check_failures(folder, rows)
    return 0


def _carried_out(batch: Sequence[_Run]) -> list[Row]:
    """Carry out a run; what worker processes do."""
    return [run.row() for run in batch]


def _check_failures(folder: Path, rows: Sequence[Row]) -> None:
    """Raise SecureClusterError if any protocol failed."""
    from securecluster.folders import run_folder

    failed = [row for row in rows if row["status"] != DONE]
    if not failed:
        return
    text = "; ".join(f"{row['protocol']} failed: {row['reason']}" for row in failed)
    files = str(folder / run_folder.COMPARISON)
    if any(row["traceback"] for row in failed):
        files += f" and {run_folder.FAILURES}"
    ended = len(rows) - len(failed)
    raise SecureClusterError(f"{text}; {ended} of {len(rows)} protocols ended, see {files}")


def _text(content: Content) -> bytes:
    """Return the text of compare.json."""
    return (json.dumps(content, indent=2) + "\n").encode()


def _is_recorded(folder: Path, content: Content) -> bool:
    """Return whether compare.json has this content."""
    from securecluster.core import atomic_files
    from securecluster.folders import run_folder

    path = folder / run_folder.COMPARISON
    return path.is_file() and atomic_files.read(path) == _text(content)


def _histories(folder: Path, content: Content) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of all runs' rounds by protocol.

    Args:
        folder: of the comparison.
        content: of compare.json.
    """
    return {row["protocol"]: _history(folder / row["protocol"]) for row in content["protocols"]}


@dataclass(frozen=True)
class _Run(sweep_runner.Cell):
    """One run of a comparison, in a folder of its own.

    Args:
        number: from 1.
        plan: of the run.
        folder: of the run.
        quiet: print no progress.
    """

    number: int
    plan: RunPlan
    folder: Path
    quiet: bool

    @property
    def label(self) -> str:
        """Return the protocol, with the options of its own."""
        return self.folder.name

    def described(self) -> Row:
        """Return what is known before the run, by column."""
        return {"run": self.number, "protocol": self.label}

    def measured(self, federation: Any) -> Row:
        """Carry out the run, unless it has ended, and return what it measured, by column.

        Args:
            federation: the clients, which all runs share; None to deal them out.
        """
        from securecluster.folders.schemas import scores_of
        from securecluster.models.objectives import objective
        from securecluster.results.saving import read_kept
        from securecluster.results.scores import study_scores
        from securecluster.studies.sweep_plan import dealt

        result = self._result(federation or dealt(self.plan.simulation))
        kept = read_kept(self.folder)
        metric = result["metric"]
        privacy = result["privacy"]
        row: Row = {
            "clusters": result["clusters"],
            "ari": result["metrics"]["ari"],
            metric: scores_of(result)["after"],
            **study_scores(
                kept, objective(kept.learned.config["objective"]), result.get("fields", {})
            ),
            "at_target": result["metrics"]["at_target"],
            "given": _given_clusters(self.plan.protocol),
            "rounds": len(_history(self.folder)),
            **{direction: result["bytes"][direction] for direction in ("up", "down", "servers")},
            "epsilon": privacy["epsilon"],
            "seconds": result["seconds"],
            "warning": result.get("warning"),
        }
        # with one cluster at the end there is no "before clusters"
        if result["clusters"] > 1:
            row[f"{metric}_before"] = scores_of(result)["before"]
        # without noise there is no unit of privacy to speak of
        if any(release["noise_multiplier"] for release in privacy["releases"]):
            row["dp_unit"] = privacy["unit"]
        return row

    def _result(self, federation: Any) -> Result:
        """Return the content of the run's result.json; a run that has none is carried out.

        Args:
            federation: the clients.
        """
        from securecluster.folders import run_folder

        console = execution.console(self.quiet)
        if not run_folder.finished(self.folder):
            with run_folder.locked(self.folder):
                # another process may have ended it meanwhile
                if not run_folder.finished(self.folder):
                    content, _ = execution.watched_run(self.plan, federation, self.folder, console)
                    return content
        content = run_folder.result_of(self.folder)
        run_folder.tidy(self.folder)
        with output():
            console.print("is complete")
        return content


def _settings(plans: Plans) -> Settings:
    """Return the settings of all runs, which have the same but for the transcript."""
    return next(iter(plans.values())).settings


def _runs(folder: Path, plans: Plans, quiet: bool) -> list[_Run]:
    """Return the runs of a comparison.

    Args:
        folder: of the comparison.
        plans: of the runs, by label.
        quiet: print no progress.
    """
    numbered = enumerate(plans.items(), 1)
    return [_Run(number, plan, folder / label, quiet) for number, (label, plan) in numbered]


def _together(folder: Path, plans: Plans, rows: Sequence[Row]) -> list[Row]:
    """Return what the runs with noise cost together, by the unit of privacy.

    Args:
        folder: of the comparison.
        plans: of the runs, by label.
        rows: of all protocols.

    Returns:
        For each unit its protocols, ε (null: infinite), δ and the accountant.
    """
    from securecluster.privacy.dp.ledger import Ledger
    from securecluster.results.saving import read_ledger

    totals = []
    # ε of a client and ε of an example do not add up
    for unit in ("client", "example"):
        names = [row["protocol"] for row in rows if row.get("dp_unit") == unit]
        if not names:
            continue
        # the clients of all runs are the same, so their releases compose
        ledgers = [read_ledger(folder / name) for name in names]
        delta = plans[names[0]].protocol.privacy.delta
        price = Ledger.union(*ledgers).price(delta)
        epsilon = None
        if not math.isinf(price.epsilon):
            epsilon = price.epsilon
        cost = {
            "unit": unit,
            "protocols": names,
            "epsilon": epsilon,
            "delta": delta,
            "accountant": price.accountant,
        }
        totals.append(cost)
    return totals


def _given_clusters(protocol: Any) -> dict[str, int] | None:
    """Return the options by which a protocol is given the number of clusters.

    Args:
        protocol: before or after its run.

    Returns:
        The options' values, or None for a protocol that finds the number itself.
    """
    options = {}
    for name in GIVEN:
        value = getattr(protocol, name, None)
        if value is not None:
            options[name] = int(value)
    return options or None


def _content(folder: Path, plans: Plans, federation: Federation, rows: Sequence[Row]) -> Content:
    """Return the content of compare.json.

    Args:
        folder: of the comparison.
        plans: of the runs, by label.
        federation: the clients that they share.
        rows: of all protocols. An epsilon of null is infinite where there is no error; `rounds`
            are those that a protocol ran, and `given` are the options that gave it the number of
            clusters.
    """
    import securecluster
    from securecluster.folders.run_folder import SCHEMA

    true_clusters = None
    if federation.truth is not None:
        true_clusters = len(set(federation.truth))
    settings = _settings(plans)
    metric = federation.objective.metric
    return {
        "schema": SCHEMA,
        "version": securecluster.__version__,
        "data": federation.data,
        "scenario": federation.scenario,
        "clients": len(federation),
        "true_clusters": true_clusters,
        "seed": None if settings.keys_from_seed else federation.seed,
        "reproducible_keys": settings.keys_from_seed,
        "device": settings.device,
        "target": settings.target,
        "metric": metric,
        "unit": federation.objective.unit,
        "protocols": [_entry(row, metric) for row in rows],
        "together": _together(folder, plans, rows),
    }


def _entry(row: Row, metric: str) -> Row:
    """Return a row as `protocols` of compare.json has it.

    Args:
        row: of a run.
        metric: the name of the clients' score, whose columns come after the first two.
    """
    of_metric = (f"{metric}_before", metric, f"{metric}_baseline", "below_baseline", "scores")
    columns = ("protocol", *COLUMNS[:2], *of_metric, *COLUMNS[2:])
    return {**{name: row.get(name) for name in columns}, "error": row["reason"]}


def _history(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's rounds; none where it failed before the first.

    Args:
        folder: of the run.
    """
    from securecluster.core import atomic_files, manifest
    from securecluster.folders.schemas import checked_lines

    path = folder / "history.jsonl"
    if not path.is_file():
        return []
    lines = manifest.read_lines(path, atomic_files.read(path), json.loads)
    return checked_lines(path, lines)
