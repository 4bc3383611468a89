"""`securecluster sweep`: protocols over levels of noise or ε, and over seeds.

A sweep's folder holds `runs.jsonl`, a line for each run that has ended, which is the only record of
its progress. The tables and pictures are written from these lines at the end.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from securecluster.app import comparison_options, execution
from securecluster.app.options import Simulation
from securecluster.app.stops import output
from securecluster.errors import RunFolderError, SecureClusterError, UsageError, unknown
from securecluster.runtime.settings import Settings

if TYPE_CHECKING:
    from pandas import DataFrame

    from securecluster.app.sweep_plan import Plan, Variant
    from securecluster.data import Federation

Row = dict[str, Any]
INFINITE = "inf"  # in runs.jsonl
TOGETHER_ON_GPU = 8  # runs whose data and models fit into the memory of most GPUs
MOST_JOBS = 8  # processes by default, each of which needs its own memory for torch


@dataclass(frozen=True)
class Parallel:
    """Runs at the same time.

    Attributes:
        jobs: number of processes; 0 is one for each core.
        together: runs of a process that train together; 0 is 1 on a CPU and 8 on a GPU.
    """

    jobs: int = 0
    together: int = 0

    def processes(self, settings: Settings) -> int:
        """Return the number of processes.

        Args:
            settings: of every run.
        """
        if self.jobs:
            return self.jobs
        if settings.device != "cpu":
            return 1
        cores = os.cpu_count() or 1
        # the cores that this process may use, where the system says so
        if hasattr(os, "sched_getaffinity"):
            cores = len(os.sched_getaffinity(0))
        return max(1, min(MOST_JOBS, cores // settings.threads))

    def in_a_process(self, settings: Settings) -> int:
        """Return the number of runs of a process that train together.

        Args:
            settings: of every run.
        """
        if self.together:
            return self.together
        if settings.device == "cpu":
            return 1
        return TOGETHER_ON_GPU


@dataclass(frozen=True)
class Levels:
    """The sweep."""

    noise: tuple[float, ...] | None = None
    """noise multipliers Z = σ/S, on all that a protocol releases, Gram matrices too; 0 is a run
    without noise
    """
    epsilon: tuple[float, ...] | None = None
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
    from securecluster.app import sweep_plan

    labels = []
    for argument in argv:
        if argument.startswith("-"):
            break
        labels.append(argument)
    if not labels:
        raise UsageError(
            "sweep takes the protocols first: securecluster sweep cfl fedavg --clip 1 --noise 0 0.1"
        )
    names = sweep_plan.names_of(labels)
    arguments = list(argv[len(labels) :])
    level_names = [option.name for option in fields(Levels)]
    comparison_options.check_owned(names, arguments, level_names)
    import tyro

    with output():  # of --help
        options: Any = tyro.cli(
            _options_class(names),
            prog=f"securecluster sweep {' '.join(labels)}",
            args=arguments,
        )
    variants = sweep_plan.variants_of(labels, options.protocols, options.simulation.clusters)
    plan = _planned(variants, options.sweep, options.simulation, options.settings)
    from securecluster.app import run_folder

    run_folder.check_free(options.output.out, options.output.force)
    federation = _checked(plan)
    quiet = options.output.quiet
    texts = {run_folder.CONFIG: run_folder.sweep_json(plan.content(), federation.digest())}
    name = f"sweep-{federation.data}"
    parallel = Parallel(options.sweep.jobs, options.sweep.together)
    with run_folder.claimed(options.output.out, options.output.force, name, texts) as folder:
        return _carry_out(folder, plan, parallel, quiet)


def resume(folder: Path, quiet: bool) -> int:
    """Go on with a sweep that was stopped, or show one that has ended.

    Args:
        folder: of the sweep.
        quiet: print nothing but errors.

    Returns:
        The exit code.

    Raises:
        RunFolderError: a damaged folder, or data that have changed since.
        SecureClusterError: some runs failed; the others are in the folder.
    """
    from securecluster.app import run_folder
    from securecluster.app.sweep_plan import Plan

    with run_folder.locked(folder):
        content = run_folder.swept(folder)
        assert content is not None
        plan = Plan.of(content)
        _check_data(folder, _federation(plan))
        return _carry_out(folder, plan, Parallel(), quiet)


def sweep(
    protocols: Sequence[Any],
    *,
    noise: Sequence[float] = (),
    epsilon: Sequence[float] = (),
    seeds: int = 5,
    folder: Path | str | None = None,
    jobs: int = 1,
    together: int = 0,
    **options: Any,
) -> DataFrame:
    """Run protocols at levels of noise or of ε, each once for every seed.

    It is the command `securecluster sweep` with its table of runs, `runs.csv`, as a result.
    `securecluster.app.sweep_tables` has `summary` and `thresholds` of its rows.

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
        options: those of the command by name: of the data (`data`, `scenario`, `clients`,
            `clusters`, `samples`, `seed`), of settings (`dtype`, `dropout`), and those of the
            protocols, which each protocol takes that has them, unless it is given as an object.

    Returns:
        A line per run. `epsilon` is infinite without noise, and `status` is "done", "refused"
        where a protocol takes no such noise, or "failed"; `reason` then says why.

    Raises:
        UsageError: a mistake that can be found before anything runs, or pandas is not installed.
        RunFolderError: the folder contains another sweep, or cannot be written.
    """
    try:
        import pandas
    except ImportError:
        raise UsageError("a DataFrame needs pandas: pip install 'securecluster[sweep]'") from None
    from securecluster.app import sweep_tables

    simulation, settings, shared = _split(options)
    variants = _variants(protocols, shared, simulation.clusters)
    levels = Levels(_listed("noise", noise), _listed("epsilon", epsilon), seeds, jobs, together)
    parallel = Parallel(jobs, together)
    plan = _planned(variants, levels, simulation, settings)
    federation = _checked(plan)
    if folder is None:
        rows = list(_rows(plan, [], parallel, lambda row, left: None))
    else:
        rows = _in_folder(Path(folder), plan, federation, parallel)
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


def _options_class(names: Sequence[str]) -> type:
    """Return one flat dataclass of all options of `sweep NAMES`.

    Args:
        names: of the protocols.
    """
    import tyro

    from securecluster.app.sweep_plan import VARIED

    flat: Any = tyro.conf.OmitArgPrefixes
    union = comparison_options.comparison_class(names, without=VARIED)
    options: list[Any] = [("sweep", flat[Levels], field(default_factory=Levels))]
    for option in fields(union):
        factory: Any = option.default_factory
        options.append((option.name, option.type, field(default_factory=factory)))
    return make_dataclass("Options", options)


def _split(options: Row) -> tuple[Simulation, Settings, Row]:
    """Return the options of the data, the settings, and the options of protocols.

    Args:
        options: by name.
    """
    groups: list[Row] = []
    remaining = dict(options)
    kinds: list[Any] = [Simulation, Settings]
    for protocol_type in kinds:
        group = {}
        for option in fields(protocol_type):
            if option.name in remaining:
                group[option.name] = remaining.pop(option.name)
        groups.append(group)
    _check_simulation(groups[0])
    return Simulation(**groups[0]), Settings(**groups[1]), remaining


def _check_simulation(options: Row) -> None:
    """Raise UsageError for options of the data that are of another kind than their own.

    Args:
        options: by name.
    """
    from securecluster.app import sweep_plan

    if not isinstance(options.get("data", ""), str):
        raise UsageError(
            "a sweep makes the clients of each seed itself: data is the name of a data set, or "
            "the path of your own file as a text"
        )
    for name in ("clients", "clusters", "samples", "labels_per_client"):
        if options.get(name) is not None:
            sweep_plan.check_whole_value(name, options[name])


def _variants(protocols: Sequence[Any], options: Row, clusters: int | None) -> tuple[Variant, ...]:
    """Return the variants of a call from Python.

    Args:
        protocols: labels, or protocols with their hyper-parameters.
        options: for every protocol that is given by its name and has them.
        clusters: number of true clusters, where the user says it.

    Raises:
        UsageError: an unknown protocol or option.
    """
    from securecluster.app import sweep_plan

    if isinstance(protocols, str) or not protocols:
        raise UsageError('sweep takes a list of protocols: ["cfl", "fedavg"]')
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
    names: set[str] = set()
    kinds: list[Any] = [Simulation, Settings]
    for protocol_type in kinds:
        names.update(option.name for option in fields(protocol_type))
    return names


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
    from securecluster.app import sweep_plan
    from securecluster.app.registry import protocol_class

    sweep_plan.check_distinct(variants)
    by, values = sweep_plan.levels_of(levels.noise or (), levels.epsilon or ())
    seeds = sweep_plan.seeds_of(simulation.seed, levels.seeds)
    for name in ("jobs", "together"):
        sweep_plan.check_whole_value(name, getattr(levels, name))
    if levels.jobs < 0:
        raise UsageError(f"jobs = {levels.jobs} is not possible: it is 0, for all cores, or more")
    if levels.together < 0:
        raise UsageError(
            f"together = {levels.together} is not possible: it is 0, for the device's default, or "
            "more"
        )
    if settings.transcript == "full":
        raise UsageError("a sweep keeps no frames: leave transcript out, or run one of its runs")
    # one thread, so that a run's sums do not depend on the machine's cores
    settings = replace(settings, transcript="none", threads=settings.threads or 1)
    scenarios = [protocol_class(variant.protocol).scenario for variant in variants]
    simulation = simulation.made_for(scenarios).located()
    protocols = [variant.at(sweep_plan.NOISE, 0.0) for variant in variants]
    execution.check_names(protocols, SimpleNamespace(simulation=simulation, settings=settings))
    resolved = execution.resolved(settings)
    return sweep_plan.Plan(variants, by, values, seeds, simulation, resolved)


def _federation(plan: Plan) -> Federation:
    """Return the clients of the first seed."""
    from securecluster.app import sweep_plan

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
    from securecluster.app import sweep_plan

    federation = _federation(plan)
    refusals = []
    accepted = 0
    for variant in plan.variants:
        variants = [
            _refusal(variant, plan.by, level, plan.settings, federation) for level in plan.levels
        ]
        accepted += variants.count(None)
        refusals += [_named(variant, plan, reason) for reason in variants if reason is not None]
        # where the noise is not the reason, no noise is no remedy
        without = _refusal(variant, sweep_plan.NOISE, 0.0, plan.settings, federation)
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


def _refusal(
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
    from securecluster.app import run_folder

    if federation.digest() != run_folder.config_of(folder)["data_digest"]:
        raise RunFolderError(
            f"{folder} was run on other data than {federation.data} is now: restore the data, or "
            "start the sweep anew"
        )


def _in_folder(folder: Path, plan: Plan, federation: Federation, parallel: Parallel) -> list[Row]:
    """Start or go on with a sweep in a folder, and return the rows of all runs.

    Args:
        folder: new, empty, or of a sweep of this plan.
        plan: of the sweep.
        federation: the clients of the first seed.
        parallel: runs at the same time.

    Raises:
        UsageError: the folder contains something else.
        RunFolderError: it contains another sweep, or cannot be written.
    """
    from securecluster.app import run_folder

    if not run_folder.is_run(folder):
        if run_folder.used(folder):
            raise UsageError(
                f"{folder} exists and is not empty, and holds no sweep: give another folder"
            )
        texts = {run_folder.CONFIG: run_folder.sweep_json(plan.content(), federation.digest())}
        with run_folder.claimed(folder, False, "", texts):
            return _completed(folder, plan, federation, parallel, quiet=True)
    with run_folder.locked(folder):
        if run_folder.swept(folder) != plan.content():
            raise RunFolderError(
                f"{folder} holds another sweep: call it with the same options, or give another "
                "folder"
            )
        _check_data(folder, federation)
        return _completed(folder, plan, federation, parallel, quiet=True)


def _carry_out(folder: Path, plan: Plan, parallel: Parallel, quiet: bool) -> int:
    """Do the runs that have not ended, write tables and pictures, and show the thresholds.

    Args:
        folder: of the sweep, whose lock this process holds.
        plan: of the sweep.
        parallel: runs at the same time.
        quiet: print nothing but errors.

    Returns:
        The exit code.

    Raises:
        SecureClusterError: some runs failed; the others are in the folder.
    """
    from securecluster.app import sweep_report

    federation = _federation(plan)
    with execution.resumable(folder):
        rows = _completed(folder, plan, federation, parallel, quiet)
    if not quiet:
        with output():
            sweep_report.show(folder, rows, federation)
    failed = [row for row in rows if row["status"] == "failed"]
    if failed:
        first = failed[0]
        raise SecureClusterError(
            f"{len(failed)} of {len(rows)} runs failed, the first of them {first['variant']} with "
            f"seed {first['seed']}: {first['reason']}; see {folder / 'runs.csv'}"
        )
    return 0


def _completed(
    folder: Path, plan: Plan, federation: Federation, parallel: Parallel, quiet: bool
) -> list[Row]:
    """Do the runs that have not ended, write tables and pictures, and return the rows of all runs.

    Args:
        folder: of the sweep, whose lock this process holds.
        plan: of the sweep.
        federation: the clients of the first seed.
        parallel: runs at the same time.
        quiet: print nothing.
    """
    from securecluster.app import run_folder, sweep_report
    from securecluster.core import atomic_files

    atomic_files.remove_half_written(folder)
    path = folder / run_folder.SWEEP_RUNS
    recorded = _recorded(path)
    console = execution.console(quiet)
    total = len(list(plan.cells()))
    count = len(recorded)

    def say(row: Row, left: float | None) -> None:
        nonlocal count
        count += 1
        # at once, so that a run that ended is never done again
        atomic_files.append_line(path, _as_line(row), durable=True)
        text = sweep_report.line_text(row, count, total, left)
        with output():
            console.print(text, markup=False)

    rows = list(_rows(plan, recorded, parallel, say))
    sweep_report.write(folder, rows, federation)
    return rows


def _rows(
    plan: Plan,
    recorded: Sequence[Row],
    parallel: Parallel,
    say: Callable[[Row, float | None], None],
) -> Iterator[Row]:
    """Yield the rows of all runs, after carrying out those that are not recorded.

    Args:
        plan: of the sweep.
        recorded: rows of runs that have ended.
        parallel: runs at the same time.
        say: called with each new row, and the seconds that are left.
    """
    from securecluster.app import sweep_plan, worker_pool

    yield from recorded
    ended = {row["run"] for row in recorded}
    cells = [cell for cell in plan.cells() if cell.number not in ended]
    batches = sweep_plan.batches(cells, parallel.in_a_process(plan.settings))
    processes = min(parallel.processes(plan.settings), max(1, len(batches)))
    clock = _Clock(cells, processes)
    for rows in worker_pool.results(sweep_plan.run_cells, batches, processes):
        for row in rows:
            say(row, clock.left(row))
            yield row


class _Clock:
    """An estimate of the time that is left, by the runs of each variant so far.

    Args:
        cells: the runs that are to be done.
        processes: the number of runs at the same time.
    """

    def __init__(self, cells: Sequence[Any], processes: int) -> None:
        self._processes = processes
        self._waiting = {cell.number: cell.variant.label for cell in cells}
        self._seconds: dict[str, list[float]] = {}

    def left(self, row: Row) -> float:
        """Return the seconds that are left after one more run.

        Args:
            row: of the run.
        """
        label = self._waiting.pop(row["run"])
        self._seconds.setdefault(label, []).append(row.get("seconds") or 0.0)
        seconds = {name: sum(some) / len(some) for name, some in self._seconds.items()}
        usual = sum(seconds.values()) / len(seconds)
        ahead = sum(seconds.get(name, usual) for name in self._waiting.values())
        return ahead / self._processes


def _recorded(path: Path) -> list[Row]:
    """Return the rows of runs that have ended, each once.

    A line that a kill cut off is removed from the file.

    Args:
        path: of runs.jsonl, which may not exist.

    Raises:
        RunFolderError: a damaged line.
    """
    from securecluster.core import atomic_files, manifest

    if not path.exists():
        return []
    data = atomic_files.read(path)
    complete = data[: data.rfind(b"\n") + 1]
    if len(complete) != len(data):
        atomic_files.write_atomic(path, complete)
    rows: dict[int, Row] = {}
    for line in complete.splitlines():
        try:
            row = json.loads(line)
            number = int(row["run"])
        except (ValueError, KeyError, TypeError):
            raise manifest.damaged(path) from None
        for name, value in row.items():
            if value == INFINITE:
                row[name] = math.inf
        rows.setdefault(number, row)
    return list(rows.values())


def _as_line(row: Row) -> str:
    """Return a row as a line of JSON, which has no infinite numbers."""
    values = {}
    for name, value in row.items():
        infinite = isinstance(value, float) and math.isinf(value)
        values[name] = INFINITE if infinite else value
    return json.dumps(values)
