"""`securecluster report` and `securecluster audit`."""

from __future__ import annotations

import json
import shlex
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Annotated, Any

from securecluster.app.stops import output
from securecluster.errors import UsageError


@dataclass(frozen=True)
class Report:
    """Show a finished run again."""

    html: bool = False
    """also write report.html, one file that needs nothing else"""
    bundle: Path | None = None
    """also write a ZIP file to hand over: page, result and configuration, without seeds, keys or
    clients' files
    """
    out: Path | None = None
    """folder of the page; None is the run folder"""


def report(argv: list[str]) -> int:
    """Show a finished run, as it was shown at its end.

    Args:
        argv: the folder, then the options.
    """
    folder, arguments = folder_of(argv, "report")
    options = _parsed(Report, "report", arguments)
    from securecluster.app import bundle, execution, report_page
    from securecluster.app import report as tables
    from securecluster.app.finished_run import open_run

    run = open_run(folder, "report")
    console = execution.console(quiet=False)
    with output():
        for line in run.history:
            console.print(tables.line_text(line, run.protocol.total_rounds))
        tables.show(run.result, folder, run.names)
        names = ", ".join(path.name for path in run.pictures)
        console.print(f"pictures: {names}")
    if not (options.html or options.bundle):
        return 0
    page = report_page.page(run)
    if options.html:
        _write(options.out or folder, {report_page.PAGE: page})
    if options.bundle:
        bundle.write(options.bundle, run, {report_page.PAGE: page})
        _say(f"bundle: {options.bundle}")
    return 0


def audit(argv: list[str]) -> int:
    """Attack a finished run and its unprotected twin.

    Args:
        argv: the folder, then the options.
    """
    folder, arguments = folder_of(argv, "audit")
    options = _parsed(_audit_options(), "audit", arguments)
    from securecluster.app import audit as audits
    from securecluster.app import audit_page, bundle, report_page
    from securecluster.app.finished_run import open_run

    run = open_run(folder, "audit")
    adversary = audits.adversary_of(run.names, options.party, options.helpers)

    def note(text: str) -> None:
        if not options.quiet:
            print(f"securecluster: note: {text}", file=sys.stderr)

    federation = audits.federation_of(run)
    results = audits.audited(run, federation, adversary, options.budget, note=note)
    text = json.dumps(audits.content(results), indent=2) + "\n"
    command = f"securecluster audit {shlex.quote(folder.name or 'DIR')} --as {options.party}"
    if options.helpers:
        command += f" --with {options.helpers}"
    page = audit_page.page(run, results, command)
    if not options.quiet:
        with output():
            audits.show(results)
    target = options.out or folder
    _write(target, {audit_page.RESULT: text, audit_page.PAGE: page}, options.quiet)
    if options.bundle:
        pages = {
            report_page.PAGE: report_page.page(run),
            audit_page.PAGE: audit_page.page(run, results, command, with_truth=False),
            audit_page.RESULT: text,
        }
        bundle.write(options.bundle, run, pages)
        _say(f"bundle: {options.bundle}")
    return 0


def _audit_options() -> type:
    """Return the options of `audit`, whose names on the command line are words of Python."""
    import tyro

    from securecluster.app.audit import BUDGET

    arg = tyro.conf.arg
    fields: list[Any] = [
        (
            "party",
            Annotated[str, arg(name="as", help="whose view: server, wire or client:NAME")],
            "server",
        ),
        (
            "helpers",
            Annotated[str | None, arg(name="with", help="who colludes, as client:3,client:5")],
            None,
        ),
        (
            "budget",
            Annotated[float, arg(help="seconds; attacks that do not fit are named as skipped")],
            BUDGET,
        ),
        (
            "bundle",
            Annotated[
                Path | None,
                arg(help="also a ZIP file to hand over, without seeds, keys or clients' files"),
            ],
            None,
        ),
        (
            "out",
            Annotated[Path | None, arg(help="folder of audit.json and audit.html, not the run's")],
            None,
        ),
        ("quiet", Annotated[bool, arg(help="print nothing but errors")], False),
    ]
    options = make_dataclass("Audit", fields, frozen=True)
    options.__doc__ = "Attack a finished run and its unprotected twin."
    return options


def _parsed(options: type, command: str, arguments: list[str]) -> Any:
    """Return the options of a command.

    Args:
        options: a dataclass.
        command: its name.
        arguments: after the folder.
    """
    import tyro

    with output():  # of --help
        return tyro.cli(options, prog=f"securecluster {command} DIR", args=arguments)


def folder_of(argv: list[str], command: str) -> tuple[Path, list[str]]:
    """Return the run folder that a command was given, and the arguments after it.

    Args:
        argv: the command's arguments.
        command: its name.

    Raises:
        UsageError: an option before the folder.
    """
    if argv[0].startswith("-"):
        raise UsageError(f"{command} takes the run folder first: securecluster {command} DIR")
    return Path(argv[0]), argv[1:]


def _write(folder: Path, texts: dict[str, str], quiet: bool = False) -> None:
    """Write files, and print their paths.

    Args:
        folder: which is made if it does not exist.
        texts: by file name.
        quiet: print nothing.
    """
    from securecluster.core import atomic_files

    atomic_files.make_folder(folder)
    for name, text in texts.items():
        atomic_files.write_atomic(folder / name, text.encode())
        if not quiet:
            _say(f"wrote {folder / name}")


def _say(text: str) -> None:
    with output():
        print(text)
