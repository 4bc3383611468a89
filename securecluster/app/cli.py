"""`securecluster run | resume | replay | list`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from securecluster.app.options import DEFAULT_CLIENTS, PROTOCOLS, options_class, protocol_class
from securecluster.backend import prepare, torch
from securecluster.errors import RunFolderError, SecureClusterError, UsageError, unknown

AUTO_FULL = 256 * 10**6  # bytes on the wire up to which `auto` keeps the contents of frames
USAGE = """usage: securecluster COMMAND

  run PROTOCOL [options]   run a protocol on simulated clients and leave a run folder
  resume DIR [--quiet]     go on with a run that was stopped
  replay DIR               run the server alone against a full transcript, bit for bit
  list                     protocols, data sets, scenarios, models and masks

protocols: {protocols}
`securecluster run PROTOCOL --help` shows every option with its default.
"""


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped; it ends as if it never had been."""

    quiet: bool = False
    """print nothing but errors"""


def entry() -> None:
    """The console script."""
    prepare()
    sys.exit(main(sys.argv[1:]))


def main(argv: Sequence[str]) -> int:
    """Exit code: 0, 2 after a mistake named in one sentence, 130 after Ctrl-C."""
    try:
        return _dispatch(list(argv))
    except SecureClusterError as error:
        print(f"securecluster: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("securecluster: stopped", file=sys.stderr)
        return 130
    except SystemExit as stop:  # --help, or an option that does not parse
        return stop.code if isinstance(stop.code, int) else 2


def _dispatch(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {"run": _run, "resume": _resume, "replay": _replay, "list": _list}
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(protocols=", ".join(PROTOCOLS)), end="")
        return 0 if argv else 2
    if argv[0] == "--version":
        import securecluster

        print(securecluster.__version__)
        return 0
    if argv[0] not in commands:
        raise unknown("command", argv[0], commands)
    return commands[argv[0]](argv[1:])


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(protocols=", ".join(PROTOCOLS)), end="")
        return 0 if argv else 2
    import tyro

    options: Any = tyro.cli(options_class(protocol_class(argv[0])), prog=f"securecluster run {argv[0]}", args=argv[1:])
    _check_names(options)
    from securecluster.app import folder as folders
    from securecluster.devices import choose_device

    folders.check_free(options.output.out, options.output.force)
    if not options.simulation.own:
        options.protocol.check(options.simulation.clients or DEFAULT_CLIENTS)  # before any data is read
    federation = options.simulation.federation()
    options.protocol.check(len(federation))
    if options.settings.threads < 0:
        raise UsageError("threads is at least 0")
    threads = options.settings.threads or torch.get_num_threads()  # by name and number, since others round sums differently
    device = choose_device(options.settings.device).type
    settings = replace(options.settings, device=device, threads=threads, transcript=_transcript_mode(options, federation))
    plan = folders.Plan(options.protocol, options.simulation.located(), settings)
    _check_settings(plan, federation)
    folder = folders.create(options.output.out, options.output.force, plan, federation)
    return _carry_out(plan, federation, folder, options.output.quiet)


def _check_names(options: Any) -> None:
    """Names that can be refused without loading anything heavy."""
    from securecluster.privacy.masks import MASKS
    from securecluster.transcript import MODES

    options.simulation.check()
    known = (
        ("mask", options.protocol.mask, MASKS),
        ("device", options.settings.device, ("auto", "cpu", "cuda")),
        ("transcript", options.settings.transcript, ("auto", *MODES)),
    )
    for what, name, names in known:
        if name not in names:
            raise unknown(what, name, names)


def _check_settings(plan: Any, federation: Any) -> None:
    from securecluster.networks import NETWORKS
    from securecluster.settings import check_settings

    if plan.protocol.model not in NETWORKS:
        raise unknown("model", plan.protocol.model, NETWORKS)
    check_settings(plan.settings, federation)


def _transcript_mode(options: Any, federation: Any) -> str:
    """`auto` is full where all frames together stay below AUTO_FULL bytes."""
    if options.settings.transcript != "auto":
        return str(options.settings.transcript)
    from securecluster.models import build
    from securecluster.randomness import Randomness

    d = build(options.protocol.model, federation.shape, federation.classes, Randomness(0)).dimension
    width = 8 if options.settings.dtype == "float64" else 4
    return "full" if 2 * d * width * len(federation) * options.protocol.rounds < AUTO_FULL else "sizes"


def _resume(argv: list[str]) -> int:
    folder, rest = _folder(argv, "resume")
    import tyro

    quiet = tyro.cli(Resume, prog="securecluster resume DIR", args=rest).quiet
    from securecluster.app import folder as folders
    from securecluster.app import report

    plan, config = folders.load(folder)
    federation = plan.simulation.federation()
    if federation.digest() != config["data_digest"]:
        raise RunFolderError(f"{folder} was run on other data than {plan.simulation.data} is now: restore the data, or start the run anew")
    if (folder / "result.json").is_file():
        if not quiet:
            print(f"{folder} is complete")
            report.show(json.loads((folder / "result.json").read_text()), folder, federation.names)
        return 0
    return _carry_out(plan, federation, folder, quiet)


def _carry_out(plan: Any, federation: Any, folder: Path, quiet: bool) -> int:
    """Run or resume in a folder, then write and show what came of it."""
    from rich.console import Console

    from securecluster.app import folder as folders
    from securecluster.app import plots, report
    from securecluster.state import unpack

    console = Console(quiet=quiet, highlight=False, soft_wrap=True)
    with folders.locked(folder):
        try:
            fitted = plan.protocol.fit(
                federation,
                plan.settings,
                folder=folder,
                report=lambda line: console.print(report.line_text(line, plan.protocol.total)),
            )
            content = report.result(plan, federation, fitted)
            state = unpack(fitted.server_state_, plan.protocol.state_class())
            pictures = plots.draw(folder, content, fitted.history_, state)
            report.write(folder, content, fitted)
        except KeyboardInterrupt:
            print(f"securecluster: stopped; go on with: securecluster resume {folder}", file=sys.stderr)
            return 130
    if not quiet:
        report.show(content, folder, federation.names)
        console.print("pictures: " + ", ".join(p.name for p in pictures))
    return 0


def _replay(argv: list[str]) -> int:
    folder, rest = _folder(argv, "replay")
    if rest:
        raise UsageError("replay takes a run folder and nothing else")
    from securecluster.app import folder as folders
    from securecluster.app.audit import replay

    plan, config = folders.load(folder)
    calls = replay(plan, config, folder)
    print(f"{folder}: the server alone made the same {calls} calls and ended in the same state, bit for bit")
    return 0


def _folder(argv: list[str], command: str) -> tuple[Path, list[str]]:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(protocols=", ".join(PROTOCOLS)), end="")
        raise SystemExit(0 if argv else 2)
    if argv[0].startswith("-"):
        raise UsageError(f"{command} takes the run folder first: securecluster {command} DIR")
    return Path(argv[0]), argv[1:]


def _list(argv: list[str]) -> int:
    if argv:
        raise UsageError("list takes no arguments")
    from securecluster.data import SCENARIOS, SOURCES
    from securecluster.networks import NETWORKS
    from securecluster.privacy.masks import MASKS

    rows: dict[str, Iterable[str]] = {"protocols": PROTOCOLS, "data": SOURCES, "scenarios": SCENARIOS, "models": NETWORKS, "masks": MASKS}
    for what, names in rows.items():
        print(f"{what:<10} {', '.join(names)}")
    return 0
