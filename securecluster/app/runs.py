"""What `run`, `resume` and `compare` share: plans that are checked before anything is written, and carried out in a folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.app.options import DEFAULT_CLIENTS
from securecluster.backend import torch
from securecluster.errors import RunFolderError, UsageError, unknown

if TYPE_CHECKING:
    from securecluster.app.folder import Plan
    from securecluster.data import Federation

AUTO_FULL = 256 * 10**6  # bytes on the wire up to which `auto` keeps the contents of frames


def prepare(protocols: Sequence[Any], options: Any) -> tuple[list[Plan], Federation]:
    """A plan for each protocol, and the federation they share: dealt once.

    Raises:
        UsageError: whatever can be refused before a run; of several protocols it says which one cannot work.
    """
    options = replace(options, simulation=options.simulation.made_for(protocol.scenario for protocol in protocols))
    _check_names(protocols, options)
    from securecluster.app import folder as folders

    folders.check_free(options.output.out, options.output.force)
    for protocol in protocols:
        with _named(protocol, protocols):
            if not options.simulation.own:
                protocol.check(options.simulation.clients or DEFAULT_CLIENTS)  # before any data is read
    federation = _read(options)
    plans = []
    for protocol in protocols:
        with _named(protocol, protocols):
            plans.append(_plan(protocol, options, federation))
    return plans, federation


def _read(options: Any) -> Federation:
    """Return the federation; unless quiet, print which columns are features, and notes on standard error."""
    quiet, simulation = options.output.quiet, options.simulation

    def note(text: str) -> None:
        if not quiet:
            print(f"securecluster: note: {text}", file=sys.stderr)

    federation: Federation = simulation.noted_federation(note)
    columns = simulation.columns(federation)
    if columns is not None:
        console(quiet).print(columns, markup=False)
    return federation


@contextmanager
def _named(protocol: Any, protocols: Sequence[Any]) -> Iterator[None]:
    """Where there are several protocols, a refusal says whose it is."""
    try:
        yield
    except UsageError as error:
        if len(protocols) == 1:
            raise
        raise UsageError(f"{protocol.name}: {error}") from None


def _check_names(protocols: Sequence[Any], options: Any) -> None:
    """Names that can be refused without loading anything heavy."""
    from securecluster.privacy.masks import MASKS
    from securecluster.transcript import MODES

    options.simulation.check()
    known = [
        *(("mask", protocol.mask, tuple(MASKS)) for protocol in protocols),
        ("device", options.settings.device, ("auto", "cpu", "cuda")),
        ("transcript", options.settings.transcript, ("auto", *MODES)),
    ]
    for what, name, names in known:
        if name not in names:
            raise unknown(what, name, names)


def _plan(protocol: Any, options: Any, federation: Federation) -> Plan:
    from securecluster.app.folder import Plan
    from securecluster.devices import choose_device
    from securecluster.networks import AUTO, names
    from securecluster.settings import check_settings

    protocol.check(len(federation))
    if options.settings.threads < 0:
        raise UsageError("threads is at least 0")
    threads = options.settings.threads or torch.get_num_threads()  # by name and number, since others round sums differently
    device = choose_device(options.settings.device).type
    transcript = _transcript_mode(protocol, options.settings, federation)
    settings = replace(options.settings, device=device, threads=threads, transcript=transcript)
    if protocol.model not in (AUTO, *names()):
        raise unknown("model", protocol.model, (AUTO, *names()))
    check_settings(settings, federation)
    protocol.config(federation, settings.dtype)  # refuses a mask that cannot work on this model
    return Plan(protocol, options.simulation.located(), settings)


def _transcript_mode(protocol: Any, settings: Any, federation: Any) -> str:
    """`auto` is full where all frames together stay below AUTO_FULL bytes."""
    if settings.transcript != "auto":
        return str(settings.transcript)
    d = protocol.flat_model(federation).dimension
    width = 8 if settings.dtype == "float64" else 4
    return "full" if protocol.rows_a_round * d * width * len(federation) * protocol.total < AUTO_FULL else "sizes"


def check_data(folder: Path, plan: Plan, config: dict[str, Any], federation: Federation) -> None:
    """Raise RunFolderError where a run's data are no longer what they were."""
    if federation.digest() != config["data_digest"]:
        raise RunFolderError(f"{folder} was run on other data than {plan.simulation.data} is now: restore the data, or start the run anew")


def carry_out(plan: Plan, federation: Federation, folder: Path, console: Any) -> tuple[dict[str, Any], list[Path]]:
    """Run or go on in a folder and write what came of it; returns the content of result.json, and the pictures."""
    from securecluster.app import folder as folders
    from securecluster.app import plots, report
    from securecluster.state import unpack

    def say(line: dict[str, Any]) -> None:
        console.print(report.line_text(line, plan.protocol.total))

    with folders.locked(folder):
        fitted = plan.protocol.fit(federation, plan.settings, folder=folder, report=say)
        state: Any = unpack(fitted.server_state_, plan.protocol.state_class())
        content = report.result(plan, federation, fitted, state)
        pictures = plots.draw(folder, content, fitted.history_, state)
        report.write(folder, content, fitted)
    return content, pictures


def console(quiet: bool) -> Any:
    """Where progress goes."""
    from rich.console import Console

    return Console(quiet=quiet, highlight=False, soft_wrap=True)


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """After Ctrl-C, say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"; go on with: securecluster resume {folder}") from None
