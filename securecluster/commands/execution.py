"""Plans of runs, checked before anything is written, and carried out in a folder.

`run`, `resume` and `compare` share them.

`fit(folder=…)` is the one call upwards, by name (from `protocols/common/base.py`): what a run
folder holds beyond checkpoints is the app's, and users of Python get the same folder with the same
checks.
"""

from __future__ import annotations

import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.commands.options import as_typed
from securecluster.core import progress
from securecluster.core.noted_warnings import noted
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.data.simulation import DEFAULT_CLIENTS
from securecluster.errors import OutputError, RunFolderError, UsageError, unknown
from securecluster.parties.derived import CHOSEN, chosen_sentence, initial_model, state_class

if TYPE_CHECKING:
    from securecluster.data import Federation
    from securecluster.folders.run_folder import RunPlan
    from securecluster.folders.schemas import Result, RunConfig
    from securecluster.reports.finished_run import FinishedRun
    from securecluster.results.fitted import FittedRun
    from securecluster.runtime.run import Line

AUTO_FULL = 256 * 10**6  # bytes on the wire up to which `auto` keeps the contents of frames


def prepare(protocols: Sequence[Any], options: Any) -> tuple[list[RunPlan], Federation]:
    """Return a plan for each protocol, and the federation they share, which is dealt once.

    Args:
        protocols: with their hyper-parameters.
        options: of the command line: `simulation`, `settings` and `output`.

    Raises:
        UsageError: a mistake that can be found before a run; of several protocols it names the
            one that cannot work.
    """
    simulation = options.simulation.made_for(protocol.scenario for protocol in protocols)
    options = replace(options, simulation=simulation)
    check_names(protocols, options)
    from securecluster.folders import run_folder

    going_on = taking_up(protocols[0], options) if len(protocols) == 1 else None
    if going_on is None:
        run_folder.check_free(options.output.out, options.output.force)
    else:
        options = replace(options, settings=_as_recorded(options.settings, going_on))
    # before any data is read; the number of a file's clients follows from reading it
    if not simulation.own:
        for protocol in protocols:
            with _named(protocol, protocols):
                protocol.check(simulation.clients or DEFAULT_CLIENTS)
    federation = _read(options)
    plans = []
    for protocol in protocols:
        with _named(protocol, protocols):
            plans.append(_plan(protocol, options, federation))
    return plans, federation


def taking_up(protocol: Any, options: Any) -> RunConfig | None:
    """Return the content of config.json of the run in the folder, if it is to have more rounds.

    Args:
        protocol: with its hyper-parameters.
        options: of the command line.
    """
    from securecluster.folders import run_folder
    from securecluster.runs.longer import asks_for_more

    out = options.output.out
    if out is None or options.output.force or not run_folder.is_run(out):
        return None
    if run_folder.compared(out) is not None or run_folder.swept(out) is not None:
        return None
    with suppress(RunFolderError):  # of a damaged one, which another sentence is about
        config = run_folder.run_config(out)
        return config if asks_for_more(protocol, config) else None
    return None


def _as_recorded(settings: Any, config: RunConfig) -> Any:
    """Return settings of which those that are left open are as a run has them.

    Args:
        settings: of the command line.
        config: content of the run's config.json.
    """
    from securecluster.runs.carry_out import with_recorded
    from securecluster.runtime.settings import Settings

    recorded = Settings(**config["settings"])
    if settings.transcript == "auto":
        settings = replace(settings, transcript=recorded.transcript)
    return with_recorded(settings, recorded)


def _read(options: Any) -> Federation:
    """Return the federation.

    Unless quiet, print which columns are features, and notes on standard error.

    Args:
        options: of the command line.
    """
    quiet = options.output.quiet
    simulation = options.simulation
    federation: Federation = simulation.noted_federation(noting(quiet))
    columns = simulation.columns(federation)
    if columns is not None:
        with output():
            # names of columns may contain what looks like markup
            console(quiet).print(columns, markup=False)
    return federation


def noting(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a note on standard error.

    Args:
        quiet: print nothing.
    """

    def note(text: str) -> None:
        if not quiet:
            print(f"securecluster: note: {printable(as_typed(text))}", file=sys.stderr)

    return note


@contextmanager
def _named(protocol: Any, protocols: Sequence[Any]) -> Iterator[None]:
    """Begin the sentence of a refusal with the protocol's name, where there are several.

    Args:
        protocol: the one that is checked in this context.
        protocols: all that are to run.
    """
    try:
        yield
    except UsageError as error:
        if len(protocols) == 1:
            raise
        raise UsageError(f"{protocol.name}: {error}") from None


def check_names(protocols: Sequence[Any], options: Any) -> None:
    """Raise UsageError for an unknown name, without loading anything heavy.

    Args:
        protocols: with their hyper-parameters.
        options: of the command line.
    """
    from securecluster.core.devices import DEVICES
    from securecluster.messaging.transcript import MODES
    from securecluster.privacy.masking.masks import check_known
    from securecluster.results.declared import check_declared

    check_declared()
    options.simulation.check()
    for protocol in protocols:
        check_known(protocol.mask)
    _check_name("device", options.settings.device, DEVICES)
    _check_name("transcript", options.settings.transcript, ("auto", *MODES))


def _check_name(option: str, name: str, choices: Sequence[str]) -> None:
    if name not in choices:
        raise unknown(option, name, choices)


def _plan(protocol: Any, options: Any, federation: Federation) -> RunPlan:
    """Return the plan of one run, in which nothing is "auto" or relative to a folder.

    Args:
        protocol: with its hyper-parameters.
        options: of the command line.
        federation: the clients.

    Raises:
        UsageError: the protocol cannot work on this federation.
    """
    from securecluster.folders.run_folder import RunPlan
    from securecluster.models.architectures import AUTO, names
    from securecluster.parties.run_check import checked_run
    from securecluster.runs.carry_out import resolved
    from securecluster.runtime.settings import check_threads

    check_threads(options.settings.threads)
    transcript = _transcript_mode(protocol, options.settings, federation)
    settings = resolved(replace(options.settings, transcript=transcript))
    _check_name("model", protocol.model, (AUTO, *names()))
    method = checked_run(protocol, federation, settings).method
    method.config(federation, settings.dtype)  # refuses a mask that cannot work on this model
    return RunPlan(method, options.simulation.located(), settings)


def _transcript_mode(protocol: Any, settings: Any, federation: Any) -> str:
    """Return the mode of the transcript.

    `auto` is full where all frames together stay below AUTO_FULL bytes.

    Args:
        protocol: with its hyper-parameters.
        settings: of the command line.
        federation: the clients.
    """
    if settings.transcript != "auto":
        return str(settings.transcript)
    number_bytes = 4
    if settings.dtype == "float64":
        number_bytes = 8
    # an estimate by the model vectors alone
    vector_bytes = initial_model(protocol, federation).dimension * number_bytes
    round_bytes = protocol.vectors_per_round * vector_bytes * len(federation)
    if round_bytes * protocol.total_rounds < AUTO_FULL:
        return "full"
    return "sizes"


def check_data(folder: Path, plan: RunPlan, config: RunConfig, federation: Federation) -> None:
    """Check that a run's data have not changed since.

    Args:
        folder: of the run.
        plan: of the run.
        config: content of its config.json.
        federation: the clients, made again.

    Raises:
        RunFolderError: they have changed.
    """
    if federation.digest() == config["data_digest"]:
        return
    data = "before"
    if plan.simulation is not None:
        data = f"{plan.simulation.data} is now"
    raise RunFolderError(
        f"{folder} was run on other data than {data}: restore the data, or start the run anew"
    )


def federation_of(folder: Path, plan: RunPlan, config: RunConfig) -> Federation:
    """Return the clients of a run folder, made again.

    Args:
        folder: of the run.
        plan: of the run.
        config: content of its config.json.

    Raises:
        UsageError: their data came from Python.
        RunFolderError: the data have changed since.
    """
    from securecluster.folders import run_folder

    if run_folder.of_server(config):
        raise UsageError(
            f"{folder} is a server's, whose clients are nodes elsewhere: start its server again "
            "with this folder, over Flower by flwr run with the same out, and it goes on"
        )
    if plan.simulation is None:
        raise UsageError(
            f"{folder} was run from Python on data of your own, which it does not hold: go on "
            "there with fit(federation, folder=...)"
        )
    try:
        federation = plan.simulation.noted_federation()
    except UsageError as error:
        raise RunFolderError(
            f"the clients of {folder / 'config.json'} cannot be made again: {error}"
        ) from None
    check_data(folder, plan, config, federation)
    return federation


def watched_run(
    plan: RunPlan, federation: Federation, folder: Path, console: Any
) -> tuple[Result, FittedRun]:
    """Run or resume in a folder with lines on a console, and write the results.

    Args:
        plan: of the run.
        federation: its clients.
        folder: of the run, whose lock this process holds.
        console: for a line per round, and for lines within a round that takes long.

    Returns:
        The content of result.json, and what it is of.
    """
    from securecluster.reports import report
    from securecluster.runs.callbacks import Watcher
    from securecluster.runs.carry_out import carry_out, complete
    from securecluster.statements.result_json import Subject

    clock = progress.TimeLeft()
    total_rounds = plan.protocol.total_rounds

    def say(line: Line) -> None:
        remaining = clock.after(line["round"], total_rounds)
        text = report.line_text(line, total_rounds, remaining)
        with output():
            console.print(text)

    _show_power(plan, federation, console)
    with slow_work_on(console):
        fitted = carry_out(plan.protocol, federation, plan.settings, folder, Watcher(say))
        content = complete(folder, Subject.of(federation), fitted)
    if fitted.warning_ is not None:
        noting(console.quiet)(fitted.warning_)
    return content, fitted


def _show_power(plan: RunPlan, federation: Federation, console: Any) -> None:
    """Print what a target chose, and what noise leaves of a private run, before a client is asked.

    Args:
        plan: of the run.
        federation: its clients.
        console: for the lines.
    """
    from securecluster.parties.run_check import RunCheck

    checked = RunCheck(plan.protocol, federation, plan.settings.dtype)
    if checked.power is None:
        return
    with output():
        if CHOSEN in checked.config:
            console.print(chosen_sentence(checked.config[CHOSEN]), markup=False)
        for sentence in checked.power.sentences:
            console.print(f"power check: {as_typed(sentence)}", markup=False)


def draw(folder: Path, content: Result, fitted: FittedRun, console: Any) -> list[Path]:
    """Draw the pictures of a run that has just ended, and return their paths.

    Without matplotlib a short run takes a fifth less time, so this is done where it is asked for.

    Args:
        folder: of the run.
        content: of result.json.
        fitted: the result of the run.
        console: quiet where no notes are printed.
    """
    from securecluster.figures import curves

    with noted(noting(console.quiet)):
        return curves.draw(folder, content, fitted.history_, fitted.state_)


def draw_missing(run: FinishedRun, note: Callable[[str], None]) -> list[Path]:
    """Draw the pictures of a finished run that are not in its folder.

    Args:
        run: the run.
        note: called with a sentence for each picture that cannot be drawn or written.

    Returns:
        The paths of all pictures.
    """
    from securecluster.core.serialization import unpack
    from securecluster.figures import curves

    state: Any = unpack(run.kept.server, state_class(run.protocol))
    with noted(note):
        curves.draw(run.folder, run.result, run.history, state, True)
    return run.pictures


def console(quiet: bool) -> Any:
    """Return the console that progress is printed on.

    Args:
        quiet: print nothing.
    """
    from securecluster.reports.terminal import Console

    return Console(quiet=quiet, soft_wrap=True)


class _Printer(logging.Handler):
    """Handler that prints the text of each record as a line."""

    def __init__(self, console: Any) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        with output():
            self._console.print(record.getMessage(), markup=False)


@contextmanager
def slow_work_on(console: Any) -> Iterator[None]:
    """Print what work says of itself while it takes long (`core.progress`) within this context.

    Args:
        console: for the lines.
    """
    printer = _Printer(console)
    level = progress.logger.level
    progress.logger.addHandler(printer)
    progress.logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        progress.logger.setLevel(level)
        progress.logger.removeHandler(printer)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Add how to go on to Ctrl-C, SIGTERM, or an output that cannot be written.

    Args:
        folder: of the run or comparison in this context.
    """
    advice = f"; go on with: securecluster resume {shlex.quote(str(folder))}"
    try:
        yield
    except KeyboardInterrupt as stop:
        # printed after "stopped"
        stop.args = (advice,)
        raise
    except OutputError as error:
        raise OutputError(f"{error}{advice}") from None
