"""Plans of runs, checked before anything is written, and carried out in a folder.

`run`, `resume` and `compare` share them.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.app.options import DEFAULT_CLIENTS, Simulation
from securecluster.app.stops import output
from securecluster.core import atomic_files
from securecluster.core.lazy_torch import torch
from securecluster.errors import OutputError, RunFolderError, UsageError, unknown

if TYPE_CHECKING:
    from securecluster.app.run_folder import RunPlan
    from securecluster.data import Federation
    from securecluster.protocols.common.base import ClusteringProtocol
    from securecluster.runtime.run import Line
    from securecluster.runtime.settings import Settings

AUTO_FULL = 256 * 10**6  # bytes on the wire up to which `auto` keeps the contents of frames


def prepare(protocols: Sequence[Any], options: Any) -> tuple[list[RunPlan], Federation]:
    """Return a plan for each protocol, and the federation they share, which is dealt once.

    Raises:
        UsageError: whatever can be refused before a run; of several protocols it says which one
            cannot work.
    """
    simulation = options.simulation.made_for(protocol.scenario for protocol in protocols)
    options = replace(options, simulation=simulation)
    _check_names(protocols, options)
    from securecluster.app import run_folder

    run_folder.check_free(options.output.out, options.output.force)
    for protocol in protocols:
        with _named(protocol, protocols):
            if not options.simulation.own:
                # before any data is read
                protocol.check(options.simulation.clients or DEFAULT_CLIENTS)
    federation = _read(options)
    plans = []
    for protocol in protocols:
        with _named(protocol, protocols):
            plans.append(_plan(protocol, options, federation))
    return plans, federation


def _read(options: Any) -> Federation:
    """Return the federation.

    Unless quiet, print which columns are features, and notes on standard error.
    """
    quiet, simulation = options.output.quiet, options.simulation

    def note(text: str) -> None:
        if not quiet:
            print(f"securecluster: note: {text}", file=sys.stderr)

    federation: Federation = simulation.noted_federation(note)
    columns = simulation.columns(federation)
    if columns is not None:
        with output():
            console(quiet).print(columns, markup=False)
    return federation


@contextmanager
def _named(protocol: Any, protocols: Sequence[Any]) -> Iterator[None]:
    """Say whose a refusal is, where there are several protocols."""
    try:
        yield
    except UsageError as error:
        if len(protocols) == 1:
            raise
        raise UsageError(f"{protocol.name}: {error}") from None


def _check_names(protocols: Sequence[Any], options: Any) -> None:
    """Raise UsageError for an unknown name, without loading anything heavy."""
    from securecluster.messaging.transcript import MODES
    from securecluster.privacy.masking.masks import MASKS

    options.simulation.check()
    for protocol in protocols:
        _check_name("mask", protocol.mask, tuple(MASKS))
    _check_name("device", options.settings.device, ("auto", "cpu", "cuda"))
    _check_name("transcript", options.settings.transcript, ("auto", *MODES))


def _check_name(option: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise unknown(option, name, known)


def _plan(protocol: Any, options: Any, federation: Federation) -> RunPlan:
    """Return the plan of one run, with settings by name and an absolute path.

    Raises:
        UsageError: the protocol cannot work on this federation.
    """
    from securecluster.app.run_folder import RunPlan
    from securecluster.models.architectures import AUTO, names
    from securecluster.runtime.settings import check_settings, check_threads

    protocol.check(len(federation))
    check_threads(options.settings.threads)
    transcript = _transcript_mode(protocol, options.settings, federation)
    settings = _resolved(replace(options.settings, transcript=transcript))
    _check_name("model", protocol.model, (AUTO, *names()))
    check_settings(settings, federation)
    protocol.config(federation, settings.dtype)  # refuses a mask that cannot work on this model
    return RunPlan(protocol, options.simulation.located(), settings)


def _transcript_mode(protocol: Any, settings: Any, federation: Any) -> str:
    """Return the mode of the transcript.

    `auto` is full where all frames together stay below AUTO_FULL bytes.
    """
    if settings.transcript != "auto":
        return str(settings.transcript)
    width = 8 if settings.dtype == "float64" else 4
    vector_bytes = protocol.flat_model(federation).dimension * width
    round_bytes = protocol.vectors_per_round * vector_bytes * len(federation)
    return "full" if round_bytes * protocol.total_rounds < AUTO_FULL else "sizes"


def check_data(folder: Path, plan: RunPlan, config: dict[str, Any], federation: Federation) -> None:
    """Raise RunFolderError where a run's data are no longer what they were."""
    data = "before" if plan.simulation is None else f"{plan.simulation.data} is now"
    if federation.digest() != config["data_digest"]:
        raise RunFolderError(
            f"{folder} was run on other data than {data}: restore the data, or start the run anew"
        )


def federation_of(folder: Path, plan: RunPlan, config: dict[str, Any]) -> Federation:
    """Return the clients of a run folder, made again.

    Raises:
        UsageError: their data came from Python.
        RunFolderError: the data are no longer what they were.
    """
    if plan.simulation is None:
        raise UsageError(
            f"{folder} was run from Python on data of your own, which it does not hold: go on "
            "there with fit(federation, folder=...)"
        )
    federation = plan.simulation.noted_federation()
    check_data(folder, plan, config, federation)
    return federation


def carry_out(
    plan: RunPlan, federation: Federation, folder: Path, console: Any
) -> tuple[dict[str, Any], list[Path]]:
    """Run or go on in a folder that is locked, and write what came of it.

    Returns:
        The content of result.json, and the pictures.
    """
    from securecluster.app import report

    def say(line: dict[str, Any]) -> None:
        with output():
            console.print(report.line_text(line, plan.protocol.total_rounds))

    content, pictures = _record(plan, federation, folder, say)
    if plan.protocol.warning_ is not None and not console.quiet:
        print(f"securecluster: note: {plan.protocol.warning_}", file=sys.stderr)
    return content, pictures


def _record(
    plan: RunPlan, federation: Federation, folder: Path, say: Callable[[Line], None]
) -> tuple[dict[str, Any], list[Path]]:
    """Run or go on in a folder that is locked; leave a whole run folder, result.json last."""
    from securecluster.app import report, run_folder
    from securecluster.app.plots import curves
    from securecluster.core.serialization import unpack
    from securecluster.runtime.run import remove_checkpoints

    for home in (folder, folder / run_folder.TRANSCRIPT):
        atomic_files.remove_half_written(home)
    fitted = plan.protocol.run_in(folder, federation, plan.settings, say)
    state: Any = unpack(fitted.server_state_, plan.protocol.state_class())
    content = report.result(plan, federation, fitted, state)
    pictures = curves.draw(folder, content, fitted.history_, state)
    fitted.write(folder)
    run_folder.seal(folder, (json.dumps(content, indent=2) + "\n").encode())
    remove_checkpoints(folder)
    return content, pictures


def fit(
    protocol: ClusteringProtocol,
    federation: Federation,
    settings: Settings,
    folder: Path,
    say: Callable[[Line], None],
) -> None:
    """Fit a protocol in a run folder, as `ClusteringProtocol.fit` does with `folder`.

    A new or empty folder is taken; a stopped run of the same configuration on the same data goes
    on; the result of one that has ended is loaded.

    Raises:
        UsageError: the folder holds something else.
        RunFolderError: it holds another run, a damaged one, or one that another process writes to.
    """
    from securecluster.app import run_folder
    from securecluster.runtime.run import remove_checkpoints
    from securecluster.runtime.settings import Settings

    simulation = Simulation.of(federation)
    if not run_folder.is_run(folder):
        if run_folder.used(folder):
            raise UsageError(
                f"{folder} exists and is not empty, and holds no run: give another folder"
            )
        plan = run_folder.RunPlan(protocol, simulation, _resolved(settings))
        texts = {run_folder.CONFIG: plan.as_json(federation)}
        with run_folder.claimed(folder, False, "", texts):
            _record(plan, federation, folder, say)
        return
    with run_folder.locked(folder):
        config = run_folder.config_of(folder)
        if run_folder.compared(folder) is not None:
            raise UsageError(f"{folder} holds a comparison: give another folder")
        recorded = Settings(**config["settings"])
        plan = run_folder.RunPlan(protocol, simulation, _recorded(settings, recorded))
        run_folder.check_same(folder, config, plan.content(federation))
        if run_folder.finished(folder):
            run_folder.result_of(folder)
            protocol.restore_from(folder)
            remove_checkpoints(folder)  # which a kill at the very end may have left
        else:
            _record(plan, federation, folder, say)


def _resolved(settings: Settings) -> Settings:
    """Return settings with the device and the number of threads filled in.

    A run is resumed with the same ones, since others round sums differently.
    """
    from securecluster.core.devices import choose_device

    device = choose_device(settings.device).type
    return replace(settings, device=device, threads=settings.threads or torch.get_num_threads())


def _recorded(settings: Settings, recorded: Settings) -> Settings:
    """Return settings with the recorded device and threads, where the user leaves these open."""
    device = recorded.device if settings.device == "auto" else settings.device
    return replace(settings, device=device, threads=settings.threads or recorded.threads)


def console(quiet: bool) -> Any:
    """Return the console that progress is printed on."""
    from rich.console import Console

    return Console(quiet=quiet, highlight=False, soft_wrap=True)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Say how to go on, after Ctrl-C, SIGTERM or an output that cannot be written."""
    how = f"; go on with: securecluster resume {shlex.quote(str(folder))}"
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.args = (how,)
        raise
    except OutputError as error:
        raise OutputError(f"{error}{how}") from None
