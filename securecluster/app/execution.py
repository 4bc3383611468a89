"""Plans of runs, checked before anything is written, and carried out in a folder.

`run`, `resume` and `compare` share them.

`fit(folder=…)` is the one call upwards, by name (from `protocols/common/base.py`): what a run
folder holds beyond checkpoints is the app's, and users of Python get the same folder with the same
checks.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.app.number_format import printable
from securecluster.app.options import DEFAULT_CLIENTS, Simulation, noted
from securecluster.app.stops import output
from securecluster.core import atomic_files, progress
from securecluster.core.lazy_torch import torch
from securecluster.errors import OutputError, RunFolderError, UsageError, unknown

if TYPE_CHECKING:
    from securecluster.app.contents import Result, RunConfig
    from securecluster.app.finished_run import FinishedRun
    from securecluster.app.run_folder import RunPlan
    from securecluster.data import Federation
    from securecluster.protocols.common.base import ClusteringProtocol
    from securecluster.runtime.run import Line
    from securecluster.runtime.settings import Settings

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
    from securecluster.app import run_folder

    run_folder.check_free(options.output.out, options.output.force)
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
            print(f"securecluster: note: {printable(text)}", file=sys.stderr)

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
    from securecluster.app.run_folder import RunPlan
    from securecluster.models.architectures import AUTO, names
    from securecluster.runtime.settings import check_settings, check_threads

    protocol.check(len(federation))
    check_threads(options.settings.threads)
    transcript = _transcript_mode(protocol, options.settings, federation)
    settings = resolved(replace(options.settings, transcript=transcript))
    _check_name("model", protocol.model, (AUTO, *names()))
    check_settings(settings, federation)
    protocol.config(federation, settings.dtype)  # refuses a mask that cannot work on this model
    return RunPlan(protocol, options.simulation.located(), settings)


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
    vector_bytes = protocol.flat_model(federation).dimension * number_bytes
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


def carry_out(
    plan: RunPlan, federation: Federation, folder: Path, console: Any
) -> tuple[Result, list[Path]]:
    """Run or resume in a folder, write the results, and draw the pictures.

    Args:
        plan: of the run.
        federation: its clients.
        folder: of the run, whose lock this process holds.
        console: for a line per round, and for lines within a round that takes long.

    Returns:
        The content of result.json, and the paths of the pictures.
    """
    from securecluster.app import report

    def say(line: Line) -> None:
        text = report.line_text(line, plan.protocol.total_rounds)
        with output():
            console.print(text)

    with slow_work_on(console):
        content = _record(plan, federation, folder, say)
    note = noting(console.quiet)
    if plan.protocol.warning_ is not None:
        note(plan.protocol.warning_)
    with noted(note):
        pictures = _draw(plan.protocol, folder, content)
    return content, pictures


def _record(
    plan: RunPlan, federation: Federation, folder: Path, say: Callable[[Line], None]
) -> Result:
    """Run or resume in a folder, and write all of its files but the pictures.

    Args:
        plan: of the run.
        federation: its clients.
        folder: of the run, whose lock this process holds.
        say: called with the line of each round.

    Returns:
        The content of result.json.
    """
    from securecluster.app import report, run_folder
    from securecluster.core.serialization import unpack
    from securecluster.runtime.run import remove_checkpoints

    # of a run that was killed
    atomic_files.remove_half_written(folder)
    atomic_files.remove_half_written(folder / run_folder.TRANSCRIPT)
    fitted = plan.protocol
    result = fitted.fit_in(folder, federation, plan.settings, say)
    state: Any = unpack(result.server_state_, fitted.state_class())
    content = report.result(plan, federation, fitted, state)
    result.write(folder)
    # result.json is written last of the run's files, and says that they are complete
    text = json.dumps(content, indent=2) + "\n"
    run_folder.seal(folder, text.encode())
    remove_checkpoints(folder)
    return content


def _draw(fitted: ClusteringProtocol, folder: Path, content: Result) -> list[Path]:
    """Draw the pictures of a run that has just ended: no fault of drawing withholds its result.

    Args:
        fitted: the protocol after the run.
        folder: of the run.
        content: of result.json.

    Returns:
        The paths of the pictures.
    """
    from securecluster.app.plots import curves

    return curves.draw(folder, content, fitted.history_, fitted.state_)


def draw_missing(run: FinishedRun, note: Callable[[str], None]) -> list[Path]:
    """Draw the pictures of a finished run that are not in its folder.

    Args:
        run: the run.
        note: called with a sentence for each picture that cannot be drawn or written.

    Returns:
        The paths of all pictures.
    """
    from securecluster.app.plots import curves
    from securecluster.core.serialization import unpack

    state: Any = unpack(run.server_state, run.protocol.state_class())
    with noted(note):
        curves.draw(run.folder, run.result, run.history, state, True)
    return run.pictures


def fit(
    protocol: ClusteringProtocol,
    federation: Federation,
    settings: Settings,
    folder: Path,
    say: Callable[[Line], None],
    force: bool = False,
) -> None:
    """Fit a protocol in a run folder, as `ClusteringProtocol.fit` does with `folder`.

    A run starts in a new or empty folder; a stopped run of the same configuration on the same data
    is resumed; the result of one that has ended is loaded. With `force` the run in the folder is
    replaced in any case.

    Args:
        protocol: to be fitted, in place.
        federation: the clients and their data.
        settings: of the run.
        folder: new, empty, or of a run of this configuration.
        say: called with the line of each round.
        force: replace the run in the folder.

    Raises:
        UsageError: the folder contains something else.
        RunFolderError: it contains another run, a damaged one, or one that another process writes
            to.
    """
    from securecluster.app import run_folder

    simulation = Simulation.of(federation)
    if run_folder.is_run(folder) and not force:
        _fit_again(protocol, simulation, federation, settings, folder, say)
        return
    if run_folder.used(folder) and not force:
        raise UsageError(f"{folder} exists and is not empty, and holds no run: give another folder")
    plan = run_folder.RunPlan(protocol, simulation, resolved(settings))
    texts = {run_folder.CONFIG: plan.as_json(federation)}
    with _in_python(), run_folder.claimed(folder, force, "", texts):
        _draw(protocol, folder, _record(plan, federation, folder, say))


@contextmanager
def _in_python() -> Iterator[None]:
    """Give options the names that they have in Python, in the sentence of a refusal."""
    try:
        yield
    except UsageError as error:
        text = str(error).replace("--force", "force=True").replace("--out", "folder")
        raise UsageError(text) from None


def _fit_again(
    protocol: ClusteringProtocol,
    simulation: Simulation | None,
    federation: Federation,
    settings: Settings,
    folder: Path,
    say: Callable[[Line], None],
) -> None:
    """Resume the run in a folder, or load its result.

    Args:
        protocol: to be fitted, in place.
        simulation: options that make the federation; None where no options do.
        federation: the clients and their data.
        settings: of the run.
        folder: of a run.
        say: called with the line of each round.

    Raises:
        UsageError: the folder contains a comparison.
        RunFolderError: it contains another run, a damaged one, or one that another process writes
            to.
    """
    from securecluster.app import run_folder
    from securecluster.runtime.run import remove_checkpoints
    from securecluster.runtime.settings import Settings

    with run_folder.locked(folder):
        if run_folder.compared(folder) is not None:
            raise UsageError(f"{folder} holds a comparison: give another folder")
        config = run_folder.run_config(folder, protocol)
        recorded = Settings(**config["settings"])
        plan = run_folder.RunPlan(protocol, simulation, _with_recorded(settings, recorded))
        run_folder.check_same(folder, config, plan.content(federation))
        if not run_folder.finished(folder):
            _draw(protocol, folder, _record(plan, federation, folder, say))
            return
        run_folder.result_of(folder)  # checks every file
        protocol.result_ = protocol.fitted_class.of_folder(protocol, folder)
        remove_checkpoints(folder)  # which a kill at the very end may have left


def resolved(settings: Settings) -> Settings:
    """Return settings with the device and the number of threads filled in.

    Args:
        settings: `auto` is a device to choose, and 0 a number of threads to choose.
    """
    from securecluster.core.devices import choose_device

    # a run is resumed with the same ones, since others round sums differently
    device = choose_device(settings.device).type
    threads = settings.threads or torch.get_num_threads()
    return replace(settings, device=device, threads=threads)


def _with_recorded(settings: Settings, recorded: Settings) -> Settings:
    """Return settings with the recorded device and threads, where the user leaves these open.

    Args:
        settings: the user's; `auto` and 0 leave the device and the threads open.
        recorded: those of the run that is resumed.
    """
    device = settings.device
    if device == "auto":
        device = recorded.device
    threads = settings.threads or recorded.threads
    return replace(settings, device=device, threads=threads)


def console(quiet: bool) -> Any:
    """Return the console that progress is printed on.

    Args:
        quiet: print nothing.
    """
    from securecluster.app.terminal import Console

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
