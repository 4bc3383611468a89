"""`securecluster report` and `securecluster audit`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.commands import command_line
from securecluster.core import atomic_files
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.errors import UsageError

if TYPE_CHECKING:
    from securecluster.audits.run_audit import Adversary
    from securecluster.reports.finished_run import FinishedRun

RECORDING = "recording.json"  # of a recorded app; its module imports torch
# exit codes of `audit`, besides 0 and 2
ATTACK_FAILED = 3
PROTECTION_BROKEN = 4
PROTECTION_UNTOLD = 5


@dataclass(frozen=True)
class Report:
    """Show a finished run again: its rounds, clusters, bytes, privacy and pictures."""

    html: bool = False
    """also write report.html, one file that needs nothing else"""
    bundle: Path | None = None
    """also write a ZIP file to hand over: page, result and configuration, without seeds, keys,
    clients' files, and what no ε covers
    """
    with_uncovered: bool = False
    """the bundle also holds what no ε covers, such as metrics, clusters that only clients know and
    names of clients, and says so
    """
    out: Path | None = None
    """folder of the page; None is the run folder"""


def report(argv: list[str]) -> int:
    """Show a finished run, as it was shown at its end.

    Args:
        argv: the folder, then the options.
    """
    folder, arguments = folder_of(argv, "report")
    options = command_line.of_folder("report", arguments, Report)
    _check_bundle(options)
    if (folder / RECORDING).is_file():
        return _report_recording(folder, options)
    from securecluster.commands import execution
    from securecluster.reports import bundle, html_page, report_page, score_table
    from securecluster.reports import report as tables
    from securecluster.reports.finished_run import open_run

    run = open_run(folder, "report")
    console = execution.console(quiet=False)
    with output():
        for line in run.history:
            console.print(tables.line_text(line, run.protocol.total_rounds))
        tables.show(run.result, folder)
        score_table.show(run)
    pictures = execution.draw_missing(run, execution.noting(quiet=False))
    if pictures:
        with output():
            names = ", ".join(path.name for path in pictures)
            console.print(f"pictures: {names}")
    if not (options.html or options.bundle):
        return 0
    page = report_page.page(run)
    if options.html:
        target = options.out or folder
        atomic_files.make_folder(target)
        path = target / report_page.PAGE
        atomic_files.write_output(path, page.encode(), html_page.is_page)
        _say(f"wrote {path}")
    if options.bundle:
        shown = html_page.handed_over(page, options.with_uncovered)
        bundle.write(options.bundle, run, {report_page.PAGE: shown}, options.with_uncovered)
        _say(f"bundle: {options.bundle}")
    return 0


def audit(argv: list[str]) -> int:
    """Attack a finished run and its unprotected twin, and return the exit code.

    Args:
        argv: the folder, then the options.
    """
    folder, arguments = folder_of(argv, "audit")
    from securecluster.cli.audit_options import Audit

    options = command_line.of_folder("audit", arguments, Audit)
    _check_bundle(options)
    if (folder / RECORDING).is_file():
        return _audit_recording(folder, options)
    _check_no_recording(folder, options)
    from securecluster.audits import audit_files, audit_page
    from securecluster.audits import run_audit as audits
    from securecluster.reports.finished_run import open_run

    run = open_run(folder, "audit")
    adversary = audits.adversary_of(run.names, options.party, options.helpers)
    target = options.out or folder
    attacks = _given_attacks(options)
    name = audit_files.stem(adversary, run.names, options.budget, attacks)
    # before minutes of work
    replaced = audit_files.check_free(target, name, run)
    if audit_files.has_older(target):
        _warn(f"note: {target} has an audit of an older version: it stays, and is in no bundle")

    def note(text: str) -> None:
        if not options.quiet:
            _warn(f"note: {text}")

    federation = audits.federation_of(run)
    results = audits.audited(run, federation, adversary, options.budget, attacks or None, note)
    positions = [str(position) for position in range(len(run.names))]
    content = {
        **audits.content(results),
        "run": audit_files.identity(run),
        "numbered_name": audit_files.stem(adversary, positions, options.budget, attacks),
        "summary": audit_page.summary(run, results),
    }
    page = audit_page.page(run, results, _command(folder, adversary, attacks))
    if not options.quiet:
        with output():
            audits.show(results)
    paths = audit_files.write(target, name, content, page)
    _print_written(paths, replaced, options)
    _hand_over(run, target, options)
    return _exit_code(results, options)


def _hand_over(run: FinishedRun, target: Path, options: Any) -> None:
    """Write the page of all audits of a run, and the bundle where it is asked for.

    Args:
        run: the run.
        target: folder of its audits.
        options: of the command.
    """
    from securecluster.audits import audit_files
    from securecluster.reports import bundle, html_page, report_page

    kept_audits, refused = audit_files.kept(target, run)
    for sentence in refused:
        _warn(f"note: {sentence}")
    for path in audit_files.overview(target, kept_audits, run):
        if not options.quiet:
            _say(f"wrote {path}: all audits of this run")
    if options.bundle:
        with_uncovered = options.with_uncovered
        report_of_run = html_page.handed_over(report_page.page(run), with_uncovered)
        audits_of_run = audit_files.handed_over(kept_audits, run, with_uncovered)
        pages = {report_page.PAGE: report_of_run, **audits_of_run}
        bundle.write(options.bundle, run, pages, with_uncovered)
        _say(f"bundle: {options.bundle}")


def _report_recording(folder: Path, options: Any) -> int:
    """Show what was recorded of an app of Flower.

    Args:
        folder: of the recording.
        options: of the command.

    Raises:
        UsageError: a page or a bundle was asked for.
    """
    from securecluster.audits import further_lines, recording_report
    from securecluster.recordings.recording_folder import Recording
    from securecluster.reports import terminal

    if options.html or options.bundle:
        raise UsageError(f"{folder} is a recording of an app: audit writes its page")
    recording = Recording.read(folder)
    recording.check_begun()
    with output():
        console = terminal.Console(markup=False)
        rows = recording_report.messages(recording)
        console.print(terminal.table(recording_report.HEADINGS, rows, recording.app))
        further = further_lines.of_recording(recording)
        for sentence in [*recording_report.summary(recording), *further]:
            console.print(sentence)
    return 0


def _check_no_recording(folder: Path, options: Any) -> None:
    """Raise UsageError for options that are about recorded apps.

    Args:
        folder: of a run.
        options: of the command.
    """
    if options.data or options.model or options.clients:
        raise UsageError(
            "--data, --model and --clients are about a recorded app of Flower, and "
            f"{folder} is no recording: leave them out"
        )


def _audit_recording(folder: Path, options: Any) -> int:
    """Attack an app of Flower by its recording, and return the exit code.

    Args:
        folder: of the recording.
        options: of the command.

    Raises:
        UsageError: an option that needs a run of ours.
    """
    from securecluster.audits import audit_files, recording_audit
    from securecluster.audits import run_audit as audits
    from securecluster.recordings.recording_folder import Recording

    if options.helpers or options.bundle:
        raise UsageError(f"{folder} is a recording of an app: --with and --bundle are of runs")
    attacks = _given_attacks(options)
    recording = Recording.read(folder)
    name = audit_files.stem(
        audits.adversary_of(recording.names, options.party),
        recording.names,
        options.budget,
        attacks,
    )
    audit_files.check_places(options.out or folder, name)  # before minutes of work
    results = recording_audit.audit_recording(
        folder,
        recording_audit.federation_of(options.data) if options.data else None,
        model=recording_audit.model_of(options.model) if options.model else None,
        partitions=options.clients,
        adversary=options.party,
        budget=options.budget,
        attacks=attacks or None,
    )
    if not options.quiet:
        with output():
            audits.show(results)
    content = {
        **audits.content(results),
        "run": "",
        "numbered_name": name,
        "summary": "",
        "app": recording.app,
    }
    command = _command(folder, results.adversary, attacks)
    for option in ("data", "model", "clients"):
        value = getattr(options, option)
        if value:
            command += f" --{option} {shlex.quote(str(value))}"
    page = recording_audit.page(recording, results, command)
    paths = audit_files.write(options.out or folder, name, content, page)
    _print_written(paths, replaced=False, options=options)
    return _exit_code(results, options)


def _print_written(paths: Sequence[Path], replaced: bool, options: Any) -> None:
    """Print the paths of an audit's files.

    Args:
        paths: of the files.
        replaced: True if they were there before.
        options: of the command.
    """
    verb = "replaced" if replaced else "wrote"
    if not options.quiet:
        for path in paths:
            _say(f"{verb} {path}")


def _check_bundle(options: Any) -> None:
    """Raise an error for an option of bundles where no bundle is written, or can be.

    Args:
        options: of the command.
    """
    if options.with_uncovered and not options.bundle:
        raise UsageError("--with-uncovered is about a bundle: give --bundle FILE.zip, too")
    if options.bundle:
        from securecluster.reports import bundle

        bundle.check(options.bundle)


def _given_attacks(options: Any) -> list[str]:
    """Return the attacks that the command names; modules may lie in the current folder.

    Args:
        options: of the command.

    Raises:
        UsageError: an unknown one.
    """
    from securecluster.attacks.registry import attack_named

    if any(":" in name for name in options.attack) and "" not in sys.path:
        sys.path.insert(0, "")
    for name in options.attack:
        attack_named(name)  # before minutes of work
    return list(options.attack)


def _command(folder: Path, adversary: Adversary, attacks: list[str]) -> str:
    """Return the command that audits a folder, without its budget.

    Args:
        folder: of the run.
        adversary: that attacked; its clients are given by their positions.
        attacks: that were chosen; none where all are run.
    """
    parties = [party for party in adversary.parties if isinstance(party, str)]
    parties += [f"client:#{position}" for position in adversary.clients]
    first, *others = parties
    words = ["securecluster", "audit", folder.name or "DIR", "--as", first]
    if others:
        words += ["--with", ",".join(others)]
    if attacks:
        words += ["--attack", *attacks]
    return shlex.join(words)


def _exit_code(results: Any, options: Any) -> int:
    """Return the exit code of an audit, and print which attacks failed.

    Args:
        results: of the audit.
        options: of the command.
    """
    for finding in results.failed:
        _warn(f"the attack {finding.attack} {finding.reason}")
        if options.traceback:
            print(finding.trace, file=sys.stderr)
    if results.failed and not options.traceback:
        _warn("note: --traceback shows the file and line of what failed")
    if results.failed:
        return ATTACK_FAILED
    if not options.strict:
        return 0
    if results.broken:
        return PROTECTION_BROKEN
    return PROTECTION_UNTOLD if results.untold else 0


def _warn(text: str) -> None:
    print(f"securecluster: {printable(text)}", file=sys.stderr)


def folder_of(argv: list[str], command: str) -> tuple[Path, list[str]]:
    """Return the run folder that a command was given, and the arguments after it.

    Args:
        argv: the command's arguments.
        command: its name.

    Returns:
        Of a call for help, which needs no folder, all arguments.

    Raises:
        UsageError: no folder, or an option before it.
    """
    if command_line.asks_for_help(argv):
        return Path(), argv
    if not argv or argv[0].startswith("-"):
        raise UsageError(f"{command} takes the run folder first: securecluster {command} DIR")
    return Path(argv[0]), argv[1:]


def _say(text: str) -> None:
    with output():
        print(printable(text))
