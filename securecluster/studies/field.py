"""`securecluster field`: methods beside the built-in ones, at equal ε and equal budget.

It is two stages on the engine of sweeps (`securecluster/studies/sweep_runner.py`), each with its
record: `tuning.jsonl` has the runs by which each method's learning rate is chosen, on federations
of another seed, and `runs.jsonl` those that are compared. Results of built-in methods that are
stored (`securecluster/studies/field_stored.py`) take the place of their runs.
"""

from __future__ import annotations

import hashlib
import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from dataclasses import field as field_of
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from securecluster.commands import command_line
from securecluster.commands.command_line import Section, asks_for_help
from securecluster.commands.failures import Row
from securecluster.commands.options import Output
from securecluster.core.number_format import printable
from securecluster.core.optional_packages import need
from securecluster.core.stops import output
from securecluster.errors import (
    RunFolderError,
    SecureClusterError,
    SecureClusterWarning,
    UsageError,
    unknown,
)
from securecluster.studies import comparison_options, sweep, sweep_runner
from securecluster.studies.sweep_runner import FAILED, Parallel

if TYPE_CHECKING:
    from pandas import DataFrame

ABOUT = (
    "Set methods, also one of your own (module:Class), beside the built-in ones at equal ε and "
    "equal budget, on named settings; without methods, the built-in ones alone."
)


@dataclass(frozen=True)
class FieldOptions:
    """The field."""

    epsilon: tuple[float, ...] = field_of(default=(1.0, 4.0), metadata={"flag": "--target-epsilon"})
    """targets for the ε of a whole run, from clustering and training together"""
    settings: tuple[str, ...] | None = None
    """how clients differ: swaps, rotations, permutations, shares (of labels), dirichlet (swaps, and
    labels by client), few (samples), many (clients), or clients of their own: writers (femnist),
    hospitals (heart disease) and roles (shakespeare, a language model); None is all but roles
    """
    quick: bool = False
    """swaps and rotations of the digits that come with the package, in place of MNIST"""
    beside: tuple[str, ...] | None = None
    """built-in methods that are set beside; None is twelve, of which results are stored"""
    dp_unit: str = "example"
    """what ε protects: one example of a client, or one whole client"""
    seeds: int = 5
    """number of federations that are compared, each method once on each of them"""
    fresh: bool = False
    """run built-in methods whose results are stored, too; `runs.csv` is then what is stored"""
    jobs: int = 0
    """runs at the same time, each in a process of its own; 0 is one for each core, at most 8"""


def start(argv: Sequence[str]) -> int:
    """Set methods beside the built-in ones in a new folder, or go on in one of the same plan.

    Args:
        argv: the methods, then the options.

    Returns:
        The exit code.

    Raises:
        UsageError: a mistake that can be found before anything runs.
        SecureClusterError: some runs failed; the others are in the folder.
    """
    labels = []
    for argument in [] if asks_for_help(argv[:1]) else argv:
        if argument.startswith("-"):
            break
        labels.append(comparison_options.with_own_name(argument))
    sections = {
        "field": Section("the field", FieldOptions),
        "output": Section("files and output", Output),
    }
    command = f"securecluster field {' '.join(labels) or '[METHODS]'}"
    options = command_line.parsed(command, argv[len(labels) :], ABOUT, sections)
    out, quiet = options.output.out, options.output.quiet
    _, failed = _in_folder(labels, options.field, out, quiet, options.output.force)
    return _ended(failed)


def field(
    methods: Sequence[Any] = (), *, folder: Path | str, jobs: int = 1, **options: Any
) -> DataFrame:
    """Set methods beside the built-in ones at equal ε and equal budget.

    It is the command `securecluster field` with its table of runs, `runs.csv`, as a result.

    Args:
        methods: names, `"my_module:MyMethod"`, or protocols with their hyper-parameters.
        folder: of the page, tables and figures; a field of the same plan that was stopped there
            goes on.
        jobs: runs at the same time, each in a process of its own. A script with more than one
            needs `if __name__ == "__main__":`.
        options: those of the command by name: `epsilon=[1, 4]`, `settings`, `quick`, `beside`,
            `dp_unit`, `seeds`, `fresh`.

    Returns:
        A line per run, also of those that are stored. `status` is "done", "refused" or "failed",
        and `reason` says why. A SecureClusterWarning says how many runs failed.

    Raises:
        UsageError: a mistake that can be found before anything runs, or pandas is not installed.
        RunFolderError: the folder contains another run, or cannot be written.
    """
    pandas = need("pandas")
    names = [option.name for option in fields(FieldOptions)]
    for name, value in options.items():
        if name not in names:
            raise unknown("option", name, names)
        if name in ("epsilon", "settings", "beside") and value is not None:
            if isinstance(value, str) or not isinstance(value, Iterable):
                raise UsageError(f"{name} is a list: give [{value!r}]")
            options[name] = tuple(value)
    if isinstance(methods, str):
        raise UsageError(f"field takes a list of methods: give [{methods!r}]")
    chosen = FieldOptions(jobs=jobs, **options)
    lines, failed = _in_folder(methods, chosen, Path(folder), quiet=True)
    if failed:
        warnings.warn(failed, SecureClusterWarning, stacklevel=2)
    return pandas.DataFrame(lines)


def _in_folder(
    methods: Sequence[Any],
    options: FieldOptions,
    out: Path | None,
    quiet: bool,
    force: bool = False,
) -> tuple[list[Row], str]:
    """Do a field in a new folder, or go on with one of the same plan.

    Args:
        methods: the user's: labels, or protocols with their hyper-parameters.
        options: of the field.
        out: the folder; None is a new one.
        quiet: print nothing but errors.
        force: replace what is in the folder.

    Returns:
        As `_carry_out` does.
    """
    from securecluster.folders import run_folder

    parallel = Parallel(options.jobs)
    parallel.check()
    parallel.preload()
    plan = _planned(_own(methods), options)
    there = out is not None and not force and run_folder.is_run(out)
    if out is not None and there and run_folder.swept(out) == plan.content():
        with run_folder.locked(out):
            return _carry_out(out, plan, parallel, quiet)
    run_folder.check_free(out, force)
    digest = hashlib.sha256("".join(plan.digests).encode()).hexdigest()
    texts = {run_folder.CONFIG: run_folder.sweep_json(plan.content(), asdict(parallel), digest)}
    with run_folder.claimed(out, force, "field", texts) as folder:
        return _carry_out(folder, plan, parallel, quiet)


def _ended(failed: str) -> int:
    """Return the exit code of a field in which no run failed.

    Args:
        failed: sentence about those that did; "" if none did.

    Raises:
        SecureClusterError: some runs failed; the others are in the folder.
    """
    if failed:
        raise SecureClusterError(failed)
    return 0


def resume(folder: Path, quiet: bool, jobs: int | None = None, retry: bool = False) -> int:
    """Go on with a field that was stopped, or show one that has ended.

    Args:
        folder: of the field.
        quiet: print nothing but errors.
        jobs: runs at the same time; None is as many as at the start of the field.
        retry: do the runs that failed again.

    Returns:
        The exit code.

    Raises:
        UsageError: an impossible number.
        RunFolderError: a damaged folder, or data or files of the program that have changed since.
        SecureClusterError: some runs failed; the others are in the folder.
    """
    from securecluster.folders import run_folder
    from securecluster.studies import field_stored
    from securecluster.studies.field_plan import Plan

    with run_folder.locked(folder):
        plan = Plan.of(run_folder.swept(folder) or {})
        parallel = sweep.recorded_parallel(folder)
        if jobs is not None:
            parallel = replace(parallel, jobs=jobs)
        parallel.check()
        parallel.preload()
        if field_stored.programs(plan) != plan.programs:
            raise RunFolderError(
                f"files of the program, or of a method, have changed since {folder} was begun, and "
                "its rows would be of two programs: go on with those files, or start it anew"
            )
        if _digests(plan) != plan.digests:
            raise RunFolderError(
                f"{folder} was run on other data than are there now: restore the data, or start "
                "the field anew"
            )
        _, failed = _carry_out(folder, plan, parallel, quiet, retry)
    return _ended(failed)


def _own(methods: Sequence[Any]) -> tuple[Any, ...]:
    """Return the variants of the user's methods.

    Args:
        methods: labels, or protocols with their hyper-parameters.

    Raises:
        UsageError: an unknown protocol or option, or two methods that would run the same.
    """
    from securecluster.studies import sweep_plan

    own: list[Any] = []
    for item in comparison_options.with_own_names(methods):
        if isinstance(item, str):
            own += sweep_plan.variants_of([item], SimpleNamespace())
        else:
            own.append(sweep_plan.variant_of(item))
    sweep_plan.check_distinct(own)
    return tuple(own)


def _planned(own: tuple[Any, ...], options: FieldOptions) -> Any:
    """Return the plan of a field.

    Args:
        own: variants of the user's methods.
        options: of the command.

    Raises:
        UsageError: an impossible value, an unknown name, or a method that runs nowhere.
    """
    from securecluster.studies import field_plan, field_stored, sweep_plan

    settings = field_plan.settings_of(options.settings or (), options.quick)
    if not options.epsilon or not all(map(math.isfinite, options.epsilon)):
        raise UsageError("a field is at equal, finite ε: give targets, such as 1 and 4")
    _, epsilons = sweep_plan.levels_of((), options.epsilon)
    if options.dp_unit not in ("client", "example"):
        raise unknown("dp_unit", options.dp_unit, ("client", "example"))
    for variant in own:
        for name in variant.options.keys() & field_plan.BUDGET:
            raise UsageError(
                f"{name} of {variant.label} is the same for all methods of a field: leave it out"
            )
    known = (*field_plan.BUILT_IN, *field_plan.OTHERS)
    for name in options.beside or ():
        if name not in known:
            raise unknown("built-in method", name, known)
    taken = {variant.label for variant in own}
    beside = [name for name in options.beside or field_plan.BUILT_IN if name not in taken]
    seeds = sweep_plan.seeds_of(field_plan.FIRST_SEED, options.seeds)
    plan = field_plan.Plan(
        own, tuple(dict.fromkeys(beside)), epsilons, seeds, settings, options.dp_unit
    )
    plan = replace(plan, digests=_digests(plan), programs=field_stored.programs(plan))
    _check_own(plan)
    if options.fresh:
        return plan
    return replace(plan, stored=field_stored.complete(plan, field_stored.read()))


def _digests(plan: Any) -> tuple[str, ...]:
    """Return the digest of the data of each setting, of the first seed."""
    from securecluster.studies import sweep_plan

    clients = [replace(setting.simulation, seed=plan.seeds[0]) for setting in plan.settings]
    return tuple(sweep_plan.dealt(simulation).digest() for simulation in clients)


def _check_own(plan: Any) -> None:
    """Raise UsageError for a method of the user that runs in no setting at no ε."""
    from securecluster.studies import field_plan, sweep_plan

    for variant in plan.own:
        refusals = []
        for setting in plan.settings:
            federation = sweep_plan.dealt(replace(setting.simulation, seed=plan.seeds[0]))
            choice = plan.choices(setting, variant)[0]
            for epsilon in plan.epsilons:
                by = sweep_plan.EPSILON
                refusal = sweep.refusal(choice, by, epsilon, field_plan.SETTINGS, federation)
                refusals.append(refusal)
        if all(refusals):
            raise UsageError(f"{variant.label}: {refusals[0]}")


def _carry_out(
    folder: Path, plan: Any, parallel: Parallel, quiet: bool, retry: bool = False
) -> tuple[list[Row], str]:
    """Do the runs that have not ended, and write and show what they say.

    Args:
        folder: of the field, whose lock this process holds.
        plan: of the field.
        parallel: runs at the same time.
        quiet: print nothing but errors.
        retry: do the runs that failed again.

    Returns:
        A row per run, and a sentence about those that failed; "" if none did.
    """
    from securecluster.folders import run_folder
    from securecluster.studies import field_plan, field_report, field_stored

    stored = field_stored.used(plan, field_stored.read())
    if len(stored) < len(plan.stored) * len(plan.seeds):
        raise RunFolderError(
            f"results that {folder} takes from the package are not in it any more: start the field "
            "anew"
        )
    run_folder.remove_half_written(folder)
    tuning = plan.tuning()
    _say(plan, len(tuning), quiet)

    def ended(name: str, cells: Sequence[Any]) -> list[Row]:
        path = folder / name
        return sweep.recorded_rows(
            path, cells, field_plan.METRIC, field_plan.SETTINGS, parallel, quiet, retry
        )

    with sweep_runner.resumable(folder):
        chosen = plan.chosen_of(tuning, ended(run_folder.FIELD_TUNING, tuning))
        cells = plan.runs(chosen)
        rows = ended(run_folder.SWEEP_RUNS, cells)
        lines = [*field_report.measured(plan, cells, rows), *stored]
        undrawn = field_report.write(folder, plan, lines, rows)
    if undrawn is not None:
        print(f"securecluster: note: {printable(undrawn)}", file=sys.stderr)
    if not quiet:
        with output():
            field_report.show(folder, plan, lines)
    failed = [row for row in rows if row["status"] == FAILED]
    if not failed:
        return lines, ""
    again = f"try them again with: {sweep_runner.go_on(folder)} --retry"
    return lines, f"{sweep.failed_in_words(failed, rows)}; {again}"


def _say(plan: Any, tuning: int, quiet: bool) -> None:
    """Print how many runs there are, and how many are stored.

    Args:
        plan: of the field.
        tuning: number of the runs by which learning rates are chosen.
        quiet: print nothing.
    """
    if quiet:
        return
    combinations = len(plan.settings) * len(plan.epsilons) * len(plan.variants)
    compared = (combinations - len(plan.stored)) * len(plan.seeds)
    stored = len(plan.stored) * len(plan.seeds)
    with output():
        print(
            f"{tuning} runs choose learning rates, {compared} are compared, and {stored} of the "
            "built-in methods are stored"
        )
