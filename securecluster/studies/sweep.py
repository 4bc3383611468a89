"""`securecluster sweep`: protocols over levels of noise or ε, and over seeds.

A sweep's folder holds `runs.jsonl`, a line for each run that has ended, which is the only record of
its progress (`securecluster/studies/sweep_record.py`). The tables and pictures are written from
these lines at the end. A run that fails is recorded as failed, and the others go on.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from securecluster.commands import command_line, execution
from securecluster.commands.command_line import Section
from securecluster.commands.failures import Row
from securecluster.core.number_format import enumerated, printable
from securecluster.core.optional_packages import need
from securecluster.core.progress import bar
from securecluster.core.stops import output
from securecluster.core.validation import check_whole_value
from securecluster.data.simulation import Simulation
from securecluster.errors import (
    RunFolderError,
    SecureClusterError,
    SecureClusterWarning,
    UsageError,
    unknown,
)
from securecluster.privacy import run_secret
from securecluster.runtime.settings import Settings
from securecluster.studies import comparison_options, sweep_runner
from securecluster.studies.sweep_runner import FAILED, Parallel

if TYPE_CHECKING:
    from pandas import DataFrame

    from securecluster.data import Federation
    from securecluster.studies.sweep_plan import Cell, Plan, Variant


ABOUT = "Run protocols at many levels of noise or ε, with several seeds."
KINDS: tuple[Any, ...] = (Simulation, Settings)  # of options that no protocol has


@dataclass(frozen=True)
class Levels:
    """The sweep."""

    noise: tuple[float, ...] | None = None
    """noise multipliers Z = σ/S, on all that a protocol releases, Gram matrices too; 0 is a run
    without noise
    """
    epsilon: tuple[float, ...] | None = field(default=None, metadata={"flag": "--target-epsilon"})
    """in place of noise: targets for the ε of a whole run, each with the smallest noise that
    reaches it; inf is a run without noise
    """
    seeds: int = 5
    """number of federations, with seeds from --seed on; each protocol runs once on each of them,
    at each level
    """
    jobs: int = 0
    """runs at the same time, each in a process of its own; 0 is one for each core, at most 8, and
    1 on a GPU. Results do not depend on it
    """
    together: int = 0
    """runs of one protocol in one process whose clients train as one batch, with results that are
    equal up to rounding; 0 is 1 on a CPU, and on a GPU 8
    """


def start(argv: Sequence[str]) -> int:
    """Sweep over protocols, levels and seeds in a new folder.

    Args:
        argv: the protocols, then the options.

    Returns:
        The exit code.

    Raises:
        UsageError: a mistake that can be found before anything runs.
        SecureClusterError: some runs failed; the others are in the folder.
    """
    from securecluster.studies import sweep_plan

    labels, arguments = comparison_options.protocols_first(
        argv, "sweep", "cfl fedavg --clip 1 --noise 0 0.1"
    )
    names = sweep_plan.names_of(labels)
    level_names = [option.name for option in fields(Levels)]
    comparison_options.check_owned(names, arguments, level_names)
    options = command_line.parsed(
        f"securecluster sweep {' '.join(labels) or 'PROTOCOLS'}", arguments, ABOUT, _sections(names)
    )
    parallel = Parallel(options.sweep.jobs, options.sweep.together)
    parallel.preload()
    variants = sweep_plan.variants_of(labels, options.protocols, options.simulation.clusters)
    plan = _planned(variants, options.sweep, options.simulation, options.settings)
    from securecluster.folders import run_folder

    run_folder.check_free(options.output.out, options.output.force)
    federation = _checked(plan)
    quiet = options.output.quiet
    texts = _texts(plan, parallel, federation)
    name = f"sweep-{federation.data}"
    with run_folder.claimed(options.output.out, options.output.force, name, texts) as folder:
        return _carry_out(folder, plan, parallel, quiet)


def resume(
    folder: Path,
    quiet: bool,
    jobs: int | None = None,
    together: int | None = None,
    retry: bool = False,
) -> int:
    """Go on with a sweep that was stopped, or show one that has ended.

    Args:
        folder: of the sweep.
        quiet: print nothing but errors.
        jobs: runs at the same time; None is as many as at the start of the sweep.
        together: runs of a process that train together; None is as at the start.
        retry: do the runs that failed again.

    Returns:
        The exit code.

    Raises:
        UsageError: an impossible number.
        RunFolderError: a damaged folder, or data that have changed since.
        SecureClusterError: some runs failed; the others are in the folder.
    """
    from securecluster.folders import run_folder
    from securecluster.studies.sweep_plan import Plan

    with run_folder.locked(folder):
        content = run_folder.swept(folder)
        assert content is not None
        plan = Plan.of(content)
        parallel = recorded_parallel(folder)
        if jobs is not None:
            parallel = replace(parallel, jobs=jobs)
        if together is not None:
            parallel = replace(parallel, together=together)
        parallel.check()
        parallel.preload()
        _check_data(folder, _federation(plan))
        return _carry_out(folder, plan, parallel, quiet, retry)


def sweep(  # noqa: PLR0913 (what the command has)
    protocols: Sequence[Any],
    *,
    noise: Sequence[float] = (),
    epsilon: Sequence[float] = (),
    seeds: int = 5,
    folder: Path | str | None = None,
    jobs: int = 1,
    together: int = 0,
    progress: bool | None = None,
    **options: Any,
) -> DataFrame:
    """Run protocols at levels of noise or of ε, each once for every seed.

    It is the command `securecluster sweep` with its table of runs, `runs.csv`, as a result.
    `securecluster.studies.sweep_tables` has `summary` and `thresholds` of its rows.

    Args:
        protocols: names, `"cfl"` or `"cfl:placement=central"`, or protocols with their
            hyper-parameters, `CFL(clip=1.0, sketch=64)`.
        noise: noise multipliers, put on all that a protocol releases.
        epsilon: targets of ε, in place of noise.
        seeds: number of federations, with seeds from `seed` on.
        folder: of the files; a sweep of the same plan that was stopped there goes on. None writes
            nothing.
        jobs: runs at the same time, each in a process of its own. A script with more than one
            needs `if __name__ == "__main__":`.
        together: runs of one protocol in one process whose clients train as one batch, with results
            that are equal up to rounding; 0 is 1 on a CPU, and on a GPU 8.
        progress: show a bar with the time left. None shows it in notebooks and at the prompt of a
            terminal only; scripts and pipes print nothing.
        options: those of the command by name: of the data (`data`, `scenario`, `clients`,
            `clusters`, `samples`, `seed`), of settings (`dtype`, `dropout`), and those of the
            protocols, which each protocol takes that has them, unless it is given as an object.

    Returns:
        A line per run. `epsilon` is infinite without noise, and `status` is "done", "refused"
        where a protocol takes no such noise, or "failed"; `reason` then says why. `fault` is true
        of runs that failed by an error that nobody foresaw, of which `failures.txt` in the folder
        has the traceback. A SecureClusterWarning says how many runs failed.

    Raises:
        UsageError: a mistake that can be found before anything runs, or pandas is not installed.
        RunFolderError: the folder contains another sweep, or cannot be written.
    """
    pandas = need("pandas")
    from securecluster.studies import sweep_tables

    simulation, settings, shared = _split(options)
    variants = _variants(protocols, shared, simulation.clusters)
    levels = Levels(_listed("noise", noise), _listed("epsilon", epsilon), seeds, jobs, together)
    parallel = Parallel(jobs, together)
    plan = _planned(variants, levels, simulation, settings)
    federation = _checked(plan)
    undrawn = None
    with bar("sweep", len(list(plan.cells())), progress) as advance:
        if folder is None:
            done = count(1)

            def told(row: Row, _: float) -> Row:
                advance(next(done))
                return row

            rows = list(_rows(list(plan.cells()), plan.settings, [], parallel, told))
        else:
            rows, undrawn = _in_folder(Path(folder), plan, federation, parallel, advance)
    if undrawn is not None:
        warnings.warn(undrawn, SecureClusterWarning, stacklevel=2)
    failed = [row for row in rows if row["status"] == FAILED]
    # no error: the other runs, which may have taken hours, would be lost with it
    if failed:
        note = f"{failed_in_words(failed, rows)}; see the columns status and reason"
        warnings.warn(note, SecureClusterWarning, stacklevel=2)
    table = sweep_tables.tidy(rows, federation.objective.metric)
    return pandas.DataFrame(table, columns=list(table[0]))


def _listed(name: str, values: Any) -> tuple[float, ...]:
    """Return the levels of a call from Python.

    Args:
        name: of the argument.
        values: a list, or another iterable.

    Raises:
        UsageError: one number alone, or a text.
    """
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UsageError(f"{name} is a list of numbers: give [0, 0.1, 0.5], not {values!r}")
    return tuple(values)


def _sections(names: Sequence[str]) -> dict[str, Section]:
    """Return all options of `sweep NAMES`, in sections.

    Args:
        names: of the protocols.
    """
    from securecluster.studies.sweep_plan import VARIED

    runs = comparison_options.sections(names, without=VARIED)
    return {"sweep": Section("the sweep", Levels), **runs}


def _split(options: Row) -> tuple[Simulation, Settings, Row]:
    """Return the options of the data, the settings, and the options of protocols.

    Args:
        options: by name.
    """
    remaining = dict(options)
    option_groups: list[Row] = []
    for options_class in KINDS:
        names = {option.name for option in fields(options_class)} & remaining.keys()
        option_groups.append({name: remaining.pop(name) for name in names})
    simulation, settings = option_groups
    Settings.refuse_left(remaining)
    _check_simulation(simulation)
    return Simulation(**simulation), Settings(**settings), remaining


def _check_simulation(options: Row) -> None:
    """Raise UsageError for options of the data that are of another kind than their own.

    Args:
        options: by name.
    """

    if not isinstance(options.get("data", ""), str):
        raise UsageError(
            "a sweep makes the clients of each seed itself: data is the name of a data set, or "
            "the path of your own file as a text"
        )
    for name in ("clients", "clusters", "samples", "labels_per_client"):
        if options.get(name) is not None:
            check_whole_value(name, options[name])


def _variants(protocols: Sequence[Any], options: Row, clusters: int | None) -> tuple[Variant, ...]:
    """Return the variants of a call from Python.

    Args:
        protocols: labels, or protocols with their hyper-parameters.
        options: for every protocol that is given by its name and has them.
        clusters: number of true clusters, where the user says it.

    Raises:
        UsageError: an unknown protocol or option.
    """
    from securecluster.studies import sweep_plan

    if isinstance(protocols, str) or not protocols:
        raise UsageError('sweep takes a list of protocols: ["cfl", "fedavg"]')
    protocols = comparison_options.with_own_names(protocols)
    labels = [item for item in protocols if isinstance(item, str)]
    option_names = comparison_options.option_names(sweep_plan.names_of(labels)) - sweep_plan.VARIED
    for name in options:
        if name not in option_names:
            raise unknown("option", name, option_names | _own_names())
    named = {}
    for variant in sweep_plan.variants_of(labels, SimpleNamespace(**options), clusters):
        named[variant.label] = variant
    variants = []
    for item in protocols:
        if isinstance(item, str):
            variants.append(named[item])
        else:
            variants.append(sweep_plan.variant_of(item))
    return tuple(variants)


def _own_names() -> set[str]:
    """Return the names of the options of the data and the settings."""
    return {option.name for options_class in KINDS for option in fields(options_class)}


def _planned(
    variants: tuple[Variant, ...], levels: Levels, simulation: Simulation, settings: Settings
) -> Plan:
    """Return the plan of a sweep.

    Args:
        variants: the protocols.
        levels: what is varied.
        simulation: options that make the clients, with the first seed.
        settings: of every run.

    Raises:
        UsageError: an impossible level or number, or an unknown name.
    """
    from securecluster.protocols.registry import protocol_class
    from securecluster.runs.carry_out import resolved
    from securecluster.studies import sweep_plan

    sweep_plan.check_distinct(variants)
    by, values = sweep_plan.levels_of(levels.noise or (), levels.epsilon or ())
    seeds = sweep_plan.seeds_of(simulation.seed, levels.seeds)
    Parallel(levels.jobs, levels.together).check()
    if settings.transcript == "full":
        raise UsageError("a sweep keeps no frames: leave transcript out, or run one of its runs")
    # one thread, so that a run's sums do not depend on the machine's cores
    settings = replace(settings, transcript="none", threads=settings.threads or 1)
    scenarios = [protocol_class(variant.protocol).scenario for variant in variants]
    simulation = simulation.made_for(scenarios).located()
    protocols = [variant.at(sweep_plan.NOISE, 0.0) for variant in variants]
    execution.check_names(protocols, SimpleNamespace(simulation=simulation, settings=settings))
    planned = sweep_plan.Plan(variants, by, values, seeds, simulation, resolved(settings))
    if by == sweep_plan.NOISE:
        return planned
    facts = _federation(planned).facts
    settled = [sweep_plan.of_one_algorithm(variant, values, facts) for variant in variants]
    sweep_plan.check_distinct(settled)
    return replace(planned, variants=tuple(settled))


def _federation(plan: Plan) -> Federation:
    """Return the clients of the first seed."""
    from securecluster.studies import sweep_plan

    federation: Federation = sweep_plan.dealt(replace(plan.simulation, seed=plan.seeds[0]))
    return federation


def _checked(plan: Plan) -> Federation:
    """Check every variant at every level on the clients of the first seed, and return these.

    A variant that takes no noise of this kind is no mistake, since the sweep records that.

    Args:
        plan: of the sweep.

    Raises:
        UsageError: a variant that cannot run without noise either, or none that takes any.
    """
    from securecluster.studies import sweep_plan

    federation = _federation(plan)
    refusals = []
    accepted = 0
    for variant in plan.variants:
        variants = [
            refusal(variant, plan.by, level, plan.settings, federation) for level in plan.levels
        ]
        accepted += variants.count(None)
        refusals += [_named(variant, plan, reason) for reason in variants if reason is not None]
        # where the noise is not the reason, no noise is no remedy
        without = refusal(variant, sweep_plan.NOISE, 0.0, plan.settings, federation)
        if without is not None and set(variants) == {without}:
            raise UsageError(_named(variant, plan, without))
    if not accepted:
        raise UsageError(refusals[0])
    return federation


def _named(variant: Variant, plan: Plan, reason: str) -> str:
    """Return the sentence of a refusal, after the variant's label where there are several."""
    if len(plan.variants) == 1:
        return reason
    return f"{variant.label}: {reason}"


def refusal(
    variant: Variant, by: str, level: float, settings: Settings, federation: Federation
) -> str | None:
    """Return why a variant cannot run at a level; None if it can.

    Args:
        variant: the protocol.
        by: "noise" or "epsilon".
        level: of either.
        settings: of the run.
        federation: the clients.
    """
    try:
        _check(variant.at(by, level), settings, federation)
    except UsageError as error:
        return str(error)
    return None


def _check(protocol: Any, settings: Settings, federation: Federation) -> None:
    """Raise UsageError if a protocol cannot run on a federation.

    Args:
        protocol: with its hyper-parameters.
        settings: of the run.
        federation: the clients.
    """
    from securecluster.models.architectures import AUTO, names
    from securecluster.runtime.settings import check_settings

    protocol.check(len(federation))
    if protocol.model not in (AUTO, *names()):
        raise unknown("model", protocol.model, (AUTO, *names()))
    check_settings(settings, federation)
    protocol.config(federation, settings.dtype)


def _check_data(folder: Path, federation: Federation) -> None:
    """Raise RunFolderError if the data of a sweep have changed since.

    Args:
        folder: of the sweep.
        federation: the clients of the first seed, made again.
    """
    from securecluster.folders import run_folder

    if federation.digest() != run_folder.config_of(folder)["data_digest"]:
        raise RunFolderError(
            f"{folder} was run on other data than {federation.data} is now: restore the data, or "
            "start the sweep anew"
        )


def _texts(plan: Plan, parallel: Parallel, federation: Federation) -> dict[str, str]:
    """Return the first files of a sweep's folder by name.

    Args:
        plan: of the sweep.
        parallel: runs at the same time, with which it goes on by default.
        federation: the clients of the first seed.
    """
    from securecluster.folders import run_folder

    # beside the plan, and not in it: the same sweep may go on with others
    text = run_folder.sweep_json(plan.content(), asdict(parallel), federation.digest())
    return {run_folder.CONFIG: text}


def recorded_parallel(folder: Path) -> Parallel:
    """Return how many runs at the same time a sweep was started with.

    Args:
        folder: of the sweep.

    Raises:
        RunFolderError: it does not parse, or an earlier version wrote the folder.
    """
    from securecluster.core.serialization import typed
    from securecluster.folders import run_folder

    content = run_folder.config_of(folder).get("parallel")
    if content is None:
        raise RunFolderError(
            f"{folder} is of an earlier version, whose runs.jsonl has no digests, so that no "
            "damage could be seen: go on with the version that wrote it, or start the sweep anew"
        )
    try:
        return typed(content, Parallel)
    except ValueError:
        raise RunFolderError(
            f"the numbers of jobs in {folder / run_folder.CONFIG} do not parse: start the sweep "
            "anew"
        ) from None


def _in_folder(
    folder: Path,
    plan: Plan,
    federation: Federation,
    parallel: Parallel,
    advance: Callable[[int], None],
) -> tuple[list[Row], str | None]:
    """Start or go on with a sweep in a folder.

    Args:
        folder: new, empty, or of a sweep of this plan.
        plan: of the sweep.
        federation: the clients of the first seed.
        parallel: runs at the same time.
        advance: called with the number of runs that have ended.

    Returns:
        The rows of all runs, and why there are no pictures, if they cannot be drawn.

    Raises:
        UsageError: the folder contains something else.
        RunFolderError: it contains another sweep, or cannot be written.
    """
    from securecluster.folders import run_folder

    if not run_folder.is_run(folder):
        if run_folder.used(folder):
            raise UsageError(
                f"{folder} exists and is not empty, and holds no sweep: give another folder"
            )
        with run_folder.claimed(folder, False, "", _texts(plan, parallel, federation)):
            return _completed(folder, plan, federation, parallel, True, advance=advance)
    with run_folder.locked(folder):
        if run_folder.swept(folder) != plan.content():
            raise RunFolderError(
                f"{folder} holds another sweep: call it with the same options, or give another "
                "folder"
            )
        recorded_parallel(folder)
        _check_data(folder, federation)
        return _completed(folder, plan, federation, parallel, True, advance=advance)


def _carry_out(
    folder: Path, plan: Plan, parallel: Parallel, quiet: bool, retry: bool = False
) -> int:
    """Do the runs that have not ended, write tables and pictures, and show the thresholds.

    Args:
        folder: of the sweep, whose lock this process holds.
        plan: of the sweep.
        parallel: runs at the same time.
        quiet: print nothing but errors.
        retry: do the runs that failed again.

    Returns:
        The exit code.

    Raises:
        SecureClusterError: some runs failed; the others are in the folder.
    """
    from securecluster.folders import run_folder
    from securecluster.studies import sweep_report

    federation = _federation(plan)
    with sweep_runner.resumable(folder):
        rows, undrawn = _completed(folder, plan, federation, parallel, quiet, retry)
    if undrawn is not None:
        print(f"securecluster: note: {printable(undrawn)}", file=sys.stderr)
    if not quiet:
        with output():
            sweep_report.show(folder, rows, federation)
            if plan.settings.keys_from_seed:
                print(f"not covered: {run_secret.FROM_SEED}")
    failed = [row for row in rows if row["status"] == FAILED]
    if not failed:
        return 0
    details = f"see {folder / 'runs.csv'}"
    if any(row["traceback"] for row in failed):
        details += f" and {run_folder.FAILURES}"
    command = f"{sweep_runner.go_on(folder)} --retry"
    raise SecureClusterError(
        f"{failed_in_words(failed, rows)}; {details}, and try them again with: {command}"
    )


def failed_in_words(failed: Sequence[Row], rows: Sequence[Row]) -> str:
    """Return in words which runs failed, and why the first of them did.

    Args:
        failed: rows of runs that failed.
        rows: of all runs.
    """
    first, *_ = sorted(failed, key=lambda row: int(row["run"]))
    numbers = enumerated("run", sorted(row["run"] for row in failed))
    label = printable(first["variant"])
    return (
        f"{len(failed)} of {len(rows)} runs failed ({numbers}), the first of them {label} with "
        f"seed {first['seed']}: {first['reason']}"
    )


def _completed(
    folder: Path,
    plan: Plan,
    federation: Federation,
    parallel: Parallel,
    quiet: bool,
    retry: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> tuple[list[Row], str | None]:
    """Do the runs that have not ended, and write tables and pictures.

    Args:
        folder: of the sweep, whose lock this process holds.
        plan: of the sweep.
        federation: the clients of the first seed.
        parallel: runs at the same time.
        quiet: print nothing.
        retry: do the runs that failed again.
        advance: called with the number of runs that have ended.

    Returns:
        The rows of all runs, and why there are no pictures, if they cannot be drawn.
    """
    from securecluster.folders import run_folder
    from securecluster.studies import sweep_report

    run_folder.remove_half_written(folder)
    metric = federation.objective.metric
    path = folder / run_folder.SWEEP_RUNS
    rows = recorded_rows(
        path, list(plan.cells()), metric, plan.settings, parallel, quiet, retry, advance
    )
    undrawn = sweep_report.write(folder, rows, federation)
    return rows, undrawn


def recorded_rows(  # noqa: PLR0913 (what a stage of runs is)
    path: Path,
    cells: Sequence[Cell],
    metric: str,
    settings: Settings,
    parallel: Parallel,
    quiet: bool,
    retry: bool = False,
    advance: Callable[[int], None] = lambda done: None,
) -> list[Row]:
    """Return the rows of all runs, after carrying out and recording those that have not ended.

    Args:
        path: of the record.
        cells: the runs, numbered from 0.
        metric: the name of the clients' score.
        settings: of every run.
        parallel: runs at the same time.
        quiet: print nothing.
        retry: do the runs that failed again.
        advance: called with the number of runs that have ended.

    Raises:
        RunFolderError: a damaged record, or one that cannot be written.
    """
    from securecluster.studies import sweep_report
    from securecluster.studies.sweep_record import Record

    record = Record(path, cells, metric)
    recorded = record.rows()
    if retry:
        recorded = [row for row in recorded if row["status"] != FAILED]
    console = execution.console(quiet)
    ended = count(len(recorded) + 1)

    def say(row: Row, remaining: float) -> Row:
        done = next(ended)
        advance(done)
        # at once, so that a run that ended is never done again
        row = record.append(row)
        text = sweep_report.line_text(row, done, len(cells), remaining)
        with output():
            console.print(text, markup=False)
        return row

    return list(_rows(cells, settings, recorded, parallel, say))


def _rows(
    cells: Sequence[Cell],
    settings: Settings,
    recorded: Sequence[Row],
    parallel: Parallel,
    say: Callable[[Row, float], Row],
) -> Iterator[Row]:
    """Yield the rows of all runs, after carrying out those that are not recorded.

    Args:
        cells: the runs.
        settings: of every run.
        recorded: rows of runs that have ended.
        parallel: runs at the same time.
        say: called with each new row, and the seconds that are left; it returns the row.
    """
    from securecluster.studies import sweep_plan

    yield from recorded
    ended = {row["run"] for row in recorded}
    pending = [cell for cell in cells if cell.number not in ended]
    processes = parallel.processes(settings)
    together = parallel.in_a_process(settings)
    yield from sweep_runner.rows(pending, sweep_plan.run_cells, say, processes, together)
