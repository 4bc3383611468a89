"""The command line: `securecluster run`, `compare`, `sweep`, `plan` and the others of `USAGE`."""

from __future__ import annotations

import inspect
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.cli import (
    check_command,
    describe_command,
    flower_project,
    new_command,
    node_command,
    plan_command,
    predict_command,
    report_command,
    status_command,
)
from securecluster.commands import command_line, execution
from securecluster.commands.command_line import HELP, Section
from securecluster.commands.options import about, as_typed, of_protocol, protocol_first
from securecluster.core.number_format import printable
from securecluster.core.stops import NO_READER, Stopped, output
from securecluster.errors import SecureClusterError, UsageError, on_command_line, unknown
from securecluster.protocols.registry import (
    ALL_TASKS,
    MODELS,
    PROTOCOLS,
    facts,
    protocol_class,
    protocol_names,
)
from securecluster.studies import compare, field, sweep

if TYPE_CHECKING:
    from securecluster.data import Federation
    from securecluster.folders.run_folder import RunPlan
    from securecluster.folders.schemas import Result, RunConfig
    from securecluster.results.fitted import FittedRun

USAGE = """usage: securecluster COMMAND

  run PROTOCOL [options]         run a protocol on simulated clients and leave a run folder
  compare PROTOCOLS [options]    run several protocols on the same clients and set them side by side
  sweep PROTOCOLS [options]      run protocols at many levels of noise or ε, with several seeds
  field [METHODS] [options]      set methods, also one of your own (module:Class), beside the
                                 built-in ones at equal ε and equal budget
  plan PROTOCOLS [options]       say what ε buys, or what clusters cost, without private data
  describe TABLE [options]       say what is understood of your own table, and what would be refused
  resume DIR [--quiet]           go on with a run, a comparison, a sweep or a field that was stopped
  replay DIR                     run the server alone against a full transcript, bit for bit
  report DIR [--html]            show a finished run again, also as a page of its own
  status DIR [--json]            where a run or a node stands: rounds, who answers, ε, bytes
  predict DIR FILE --client NAME what a client's model says of new rows, with probabilities
  audit DIR [options]            attack a finished run and its unprotected twin
  check PROTOCOL [options]       run every check that a protocol must pass, also one of your own
                                 (module:Class)
  new KIND DIR                   write a package with a protocol, an attack, a mask or a data set of
                                 your own, which runs as it stands
  node init|serve|ledger DIR     a client of runs on many machines: make its folder, answer for it,
                                 or show what it has released
  flower-init DIR                make a project of Flower that runs a protocol on many machines
  list [--privacy]               protocols, data sets, scenarios, models and masks; or which masks,
                                 secure sums and noise each protocol works with, and why not

protocols: {protocols}
`securecluster COMMAND --help` shows the options of a command, `securecluster run PROTOCOL --help` \
those of a
protocol that most runs need, and `--help-all` in its place every option.
"""
INTERRUPTED = 130  # exit code after Ctrl-C: 128 + SIGINT


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped; it ends as if it never had been."""

    quiet: bool = False
    """print nothing but errors and, with noise, ε"""
    jobs: int | None = None
    """of a sweep, a field or a comparison: runs at the same time, each in a process of its own;
    None is the number that it was started with, and of a comparison 1
    """
    together: int | None = None
    """of a sweep: runs of one protocol in one process that train as one batch; None is the number
    that it was started with
    """
    retry: bool = False
    """of a sweep or a field: do the runs that failed again; without it they stay as they are"""


@dataclass(frozen=True)
class Replay:
    """Run the server of a finished run alone, against its full transcript, bit for bit.

    It fails where the server used anything that no message contained.
    """


@dataclass(frozen=True)
class List:
    """Show protocols, data sets, scenarios, models and masks."""

    privacy: bool = False
    """show which masks, secure sums and noise each protocol works with, and why not"""


def main(argv: Sequence[str]) -> int:
    """Run a command.

    Args:
        argv: the command and its arguments.

    Returns:
        The exit code: 0; 2 after an error of one sentence; 130 after Ctrl-C, 143 after SIGTERM, and
        141 where nobody reads the output any more.
    """
    try:
        with on_command_line():
            return _command(list(argv))()
    except (SecureClusterError, PermissionError) as error:
        return _refused(error)
    except KeyboardInterrupt as stop:
        return _stopped(stop)
    except MemoryError:
        return _no_memory()
    except RuntimeError as error:  # torch has no class of its own for the CPU's memory
        if not _is_about_memory(error):
            raise
        return _no_memory()
    except SystemExit as stop:  # --help, or an option that does not parse
        if isinstance(stop.code, int):
            return stop.code
        return 2


def _refused(error: SecureClusterError | PermissionError) -> int:
    """Print the sentence of an error, and return the exit code."""
    if isinstance(error, PermissionError):  # of a file or folder of somebody else
        reason = f"cannot use {error.filename} ({error.strerror}): check its permissions"
        error = UsageError(reason)
    with on_command_line():
        text = as_typed(str(error))
    print(f"securecluster: {printable(text)}", file=sys.stderr)
    return 2


def _stopped(stop: KeyboardInterrupt) -> int:
    """Print that a signal stopped the command, and return the exit code.

    Args:
        stop: its text says how to go on, where that is possible.
    """
    code = INTERRUPTED
    if isinstance(stop, Stopped):
        code = stop.code
    # a reader such as `head` ends most outputs like this: that is no news unless a run stopped
    if code != NO_READER or str(stop):
        print(f"securecluster: stopped{printable(str(stop))}", file=sys.stderr)
    return code


def _is_about_memory(error: RuntimeError) -> bool:
    """Return whether torch found no memory, on the CPU or on a GPU."""
    text = str(error)
    return "can't allocate memory" in text or "out of memory" in text


def _no_memory() -> int:
    advice = "use fewer clients, fewer samples or a smaller model"
    print(f"securecluster: there is not enough memory: {advice}", file=sys.stderr)
    return 2


def _command(argv: list[str]) -> Callable[[], int]:
    """Return the command that the first argument names, which returns its exit code.

    Args:
        argv: the command and its arguments.
    """
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "compare": compare.start,
        "sweep": sweep.start,
        "field": field.start,
        "plan": plan_command.start,
        "describe": describe_command.describe,
        "resume": _resume,
        "replay": _replay,
        "report": report_command.report,
        "audit": report_command.audit,
        "status": status_command.status,
        "predict": predict_command.predict,
        "check": check_command.check,
        "node": node_command.node,
        "new": new_command.new,
        "flower-init": flower_project.flower_init,
        "list": _list,
    }
    if not argv or argv[0] in HELP:
        return partial(_print_usage, argv)
    name, *arguments = argv
    if name == "--version":
        return _print_version
    if name not in commands:
        raise _unknown_command(name, commands)
    return partial(commands[name], arguments)


def _unknown_command(name: str, commands: Iterable[str]) -> UsageError:
    """Return the error for a word that is no command, but may be meant for one."""
    meant = {"help": "--help", "version": "--version"}
    meant |= {protocol: f"run {protocol}" for protocol in protocol_names()}
    if name.lower() not in meant:
        return unknown("command", name, commands)
    return UsageError(f"unknown command {name!r}: did you mean {meant[name.lower()]!r}?")


def _print_version() -> int:
    import securecluster

    with output():
        print(securecluster.__version__)
    return 0


def _print_usage(argv: list[str]) -> int:
    """Print the commands, and return the exit code.

    Args:
        argv: of a command; without any, a mistake.
    """
    with output():
        print(USAGE.format(protocols=", ".join(protocol_names())), end="")
    return 0 if argv else 2


def _run(argv: list[str]) -> int:
    """Run a protocol.

    Args:
        argv: the protocol, then the options.
    """
    name, arguments = protocol_first(argv, "run")
    protocol = protocol_class(name)
    if arguments and arguments[0] in PROTOCOLS:
        several = f"securecluster compare {name} {arguments[0]}"
        raise UsageError(f"run takes one protocol: compare runs several, {several}")
    options = command_line.parsed(
        f"securecluster run {name or 'PROTOCOL'}", arguments, about(protocol), of_protocol(protocol)
    )
    plans, federation = execution.prepare([options.protocol], options)
    from securecluster.folders import run_folder

    (plan,) = plans
    fact = PROTOCOLS.get(plan.protocol.name)
    typed = {argument.partition("=")[0] for argument in arguments}
    if fact and fact.k == "yes" and options.simulation.client_column and "--k" not in typed:
        execution.noting(options.output.quiet)(
            f"no number of clusters was given, so it is {options.protocol.k}: give --k"
        )
    config = execution.taking_up(options.protocol, options)
    if config is not None:
        return _go_on(options.output, plan, config, federation)
    texts = {run_folder.CONFIG: plan.as_json(federation)}
    default_name = f"{plan.protocol.name}-{federation.data}"
    out = options.output.out
    console = execution.console(options.output.quiet)
    with run_folder.claimed(out, options.output.force, default_name, texts) as folder:
        with execution.resumable(folder):
            content, fitted = execution.watched_run(plan, federation, folder, console)
        _finish(content, fitted, folder, console, options.output.pictures)
        return 0


def _go_on(chosen: Any, plan: RunPlan, config: RunConfig, federation: Federation) -> int:
    """Go on with a run that is to have more rounds.

    Args:
        chosen: the options of output.
        plan: of the run with more rounds.
        config: content of its config.json.
        federation: its clients.
    """
    from securecluster.core.noted_warnings import noted
    from securecluster.folders import run_folder
    from securecluster.runs.longer import taken_up

    folder: Path = chosen.out
    console = execution.console(chosen.quiet)
    note = execution.noting(chosen.quiet)
    with run_folder.locked(folder):
        with noted(note):
            plan = taken_up(folder, plan, config, federation)
        note(f"{folder} holds a run of fewer rounds, which goes on: another --out is a new run")
        with execution.resumable(folder):
            content, fitted = execution.watched_run(plan, federation, folder, console)
        _finish(content, fitted, folder, console, chosen.pictures)
    return 0


def _finish(content: Result, fitted: FittedRun, folder: Path, console: Any, pictures: bool) -> None:
    """Show the report of a run that has just ended, and draw its pictures.

    Args:
        content: of result.json.
        fitted: the result.
        folder: of the run.
        console: quiet where nothing but errors is printed.
        pictures: draw them.
    """
    _show(content, folder, console)
    if pictures:
        drawn = execution.draw(folder, content, fitted, console)
        names = ", ".join(picture.name for picture in drawn)
        with output():
            console.print(f"pictures: {names}")


def _resume(argv: list[str]) -> int:
    """Go on with a run, a comparison or a sweep, or show one that has ended.

    Args:
        argv: the folder, then the options.
    """
    folder, arguments = report_command.folder_of(argv, "resume")
    options = command_line.of_folder("resume", arguments, Resume)
    quiet = options.quiet
    from securecluster.folders import run_folder
    from securecluster.reports import loading

    swept = run_folder.swept(folder)
    if swept is not None and "field" in swept:
        _check_no_sweep_options(options, f"{folder} holds a field", ("together",))
        return field.resume(folder, quiet, options.jobs, options.retry)
    if swept is not None:
        return sweep.resume(folder, quiet, options.jobs, options.together, options.retry)
    if loading.compared(folder) is not None:
        what = f"{folder} holds a comparison, which does what failed again"
        _check_no_sweep_options(options, what, ("together", "retry"))
        return compare.resume(folder, quiet, 1 if options.jobs is None else options.jobs)
    _check_no_sweep_options(options, f"{folder} holds a single run")
    loading.run_config(folder)  # so that a damaged one is named before what it says is missing
    if run_folder.finished(folder):
        return _show_finished(folder, quiet)
    with run_folder.locked(folder):
        # again under the lock: another process may have ended it meanwhile
        if run_folder.finished(folder):
            return _show_finished(folder, quiet)
        plan, config = loading.plan_of(folder)
        federation = execution.federation_of(folder, plan, config)
        console = execution.console(quiet)
        with execution.resumable(folder):
            content, _ = execution.watched_run(plan, federation, folder, console)
        _show(content, folder, console)
        return 0


def _check_no_sweep_options(
    options: Resume, what: str, names: Sequence[str] = ("jobs", "together", "retry")
) -> None:
    """Raise UsageError for options that the resume of a sweep has.

    Args:
        options: of the command line.
        what: what the folder holds, as the beginning of a sentence.
        names: of the options.
    """
    for name in names:
        if getattr(options, name) != getattr(Resume(), name):
            raise UsageError(f"{what}, and takes no --{name}: leave it out")


def _show_finished(folder: Path, quiet: bool) -> int:
    """Show the result of a run that has ended.

    Its files are checked before and, where they can be made again, its data.

    Args:
        folder: of the run.
        quiet: only check.
    """
    from securecluster.folders import run_folder
    from securecluster.reports import finished_run, loading, report

    plan, config = loading.plan_of(folder)
    run = finished_run.open_run(folder, "resume")
    run_folder.tidy(folder)
    # data from Python are gone
    if plan.simulation is not None:
        execution.federation_of(folder, plan, config)
    if quiet:
        _print_price(run.result)
    else:
        with output():
            print(f"{printable(str(folder))} is complete")
            report.show(run.result, folder)
    execution.draw_missing(run, execution.noting(quiet))
    return 0


def _print_price(content: Result) -> None:
    """Print ε of a run with noise, which nobody should overlook."""
    from securecluster.reports import privacy_report

    price = privacy_report.price_of_noise(content["privacy"])
    if price is not None:
        with output():
            print(price)


def _show(content: Result, folder: Path, console: Any) -> None:
    """Show the report of a run that has just ended.

    Args:
        content: of result.json.
        folder: of the run.
        console: quiet where nothing but errors is printed.
    """
    from securecluster.reports import report

    if console.quiet:
        _print_price(content)
        return
    with output():
        report.show(content, folder)
        shown = shlex.quote(str(folder))
        console.print(
            f"next: securecluster report {shown} --html (pictures, and a page to show), "
            f"securecluster audit {shown} (attacks on what the server saw)",
            markup=False,
        )


def _replay(argv: list[str]) -> int:
    """Replay a run.

    Args:
        argv: the folder.
    """
    folder, arguments = report_command.folder_of(argv, "replay")
    command_line.of_folder("replay", arguments, Replay)
    from securecluster.reports import loading
    from securecluster.runs.replay import replay

    names = loading.compared(folder)
    if names:
        raise UsageError(
            f"{folder} holds a comparison: replay one of its runs, such as {folder / names[0]}"
        )
    plan, config = loading.plan_of(folder)
    replayed = replay(plan, config, folder)
    with output():
        print(
            f"{printable(str(folder))}: the server alone made the same {replayed.calls} calls and "
            "ended in the same state, bit for bit"
        )
        if replayed.restated:
            print(
                "another version wrote its result, and this one states its privacy otherwise, so "
                f"these entries are not verified: {', '.join(replayed.restated)}"
            )
        if replayed.unused:
            print(
                f"the ledger has {replayed.unused} more releases of single clients, to a server "
                "that was killed before it used them; epsilon counts them"
            )
    return 0


def _print_foreign() -> None:
    """Print what protocols need of a model of another framework."""
    print("needed of a model of another framework (ForeignModel, in Python):")
    needs = {name: fact.foreign for name, fact in PROTOCOLS.items()}
    _print_groups(
        needs, sorted(dict.fromkeys(needs.values()), key=lambda n: ("cannot" in n, len(n)))
    )
    print("train*: one that follows call.lr and call.batches(); drawn start: a function\n")


def _print_tasks() -> None:
    """Print the tasks that clients of each protocol learn."""
    print("tasks that clients learn (--task), but for text and positions:")
    tasks = {name: fact.tasks for name, fact in PROTOCOLS.items()}
    _print_groups({name: "all" if of == ALL_TASKS else of for name, of in tasks.items()})
    print(f"all: {ALL_TASKS}\n")


def _print_groups(groups: Mapping[str, str], order: Iterable[str] = ()) -> None:
    """Print the protocols of each group.

    Args:
        groups: group of each protocol by its name.
        order: of the groups; empty for that in which they come.
    """
    for group in order or dict.fromkeys(groups.values()):
        names = [name for name, own in groups.items() if own == group]
        first = f"  {group:<29} "
        print(textwrap.fill(", ".join(names), 80, initial_indent=first, subsequent_indent=" " * 32))


def _list(argv: list[str]) -> int:
    """Print the names that options take, or which protections each protocol works with.

    Args:
        argv: the options.
    """
    sections = {"options": Section("options", List)}
    about = inspect.getdoc(List) or ""
    options = command_line.parsed("securecluster list", argv, about, sections).options
    if options.privacy:
        from securecluster.cli import compatibility

        with output():
            compatibility.show()
        return 0
    from securecluster.data import SCENARIOS
    from securecluster.data.datasets import source_names
    from securecluster.privacy.masking.masks import mask_names

    rows: dict[str, Iterable[str]] = {
        "data": source_names(),
        "scenarios": SCENARIOS,
        "models": MODELS,
        "masks": mask_names(),
    }
    with output():
        print(f"{'protocol':<13} {'k':<4} {'finds':<32} server reads")
        for name, fact in facts():
            line = f"{name:<13} {fact.k:<4} {fact.finds:<32} {fact.reads}"
            print(printable(line.rstrip()))
        print("k: whether the number of clusters must, need not or may be given\n")
        _print_tasks()
        _print_foreign()
        for heading, choices in rows.items():
            print(f"{heading:<10} {', '.join(choices)}")
    return 0
