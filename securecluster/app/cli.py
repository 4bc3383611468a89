"""`securecluster run | compare | resume | replay | list`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.app import compare, execution
from securecluster.app.options import PROTOCOLS, as_typed, options_class, protocol_class
from securecluster.app.stops import Stopped, output
from securecluster.errors import SecureClusterError, UsageError, unknown

USAGE = """usage: securecluster COMMAND

  run PROTOCOL [options]         run a protocol on simulated clients and leave a run folder
  compare PROTOCOLS [options]    run several protocols on the same clients and set them side by side
  resume DIR [--quiet]           go on with a run or a comparison that was stopped
  replay DIR                     run the server alone against a full transcript, bit for bit
  list                           protocols, data sets, scenarios, models and masks

protocols: {protocols}
`securecluster run PROTOCOL --help` shows every option with its default, and so does \
`compare PROTOCOLS --help`.
"""


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped; it ends as if it never had been."""

    quiet: bool = False
    """print nothing but errors"""


def main(argv: Sequence[str]) -> int:
    """Run a command.

    Returns:
        The exit code: 0; 2 after a mistake named in one sentence; 130 after Ctrl-C, 143 after
        SIGTERM, and 141 where nobody reads the output any more.
    """
    try:
        return _dispatch(list(argv))
    except SecureClusterError as error:
        print(f"securecluster: {as_typed(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        return _stopped(stop)
    except MemoryError:
        return _no_memory()
    except RuntimeError as error:
        if not _is_about_memory(error):
            raise
        return _no_memory()
    except SystemExit as stop:  # --help, or an option that does not parse
        return stop.code if isinstance(stop.code, int) else 2


def _stopped(stop: KeyboardInterrupt) -> int:
    """Say that a signal stopped the command, and how to go on where that is possible."""
    code = stop.code if isinstance(stop, Stopped) else 130
    # a reader such as `head` has had enough, and nothing is left half-way
    if code != 141 or str(stop):
        print(f"securecluster: stopped{stop}", file=sys.stderr)
    return code


def _is_about_memory(error: RuntimeError) -> bool:
    """Return whether torch found no memory, on the CPU or on a GPU."""
    text = str(error)
    return "can't allocate memory" in text or "out of memory" in text


def _no_memory() -> int:
    advice = "use fewer clients, fewer samples or a smaller model"
    print(f"securecluster: there is not enough memory: {advice}", file=sys.stderr)
    return 2


def _dispatch(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "compare": _compare,
        "resume": _resume,
        "replay": _replay,
        "list": _list,
    }
    if not argv or argv[0] in ("-h", "--help"):
        _print_usage()
        return 0 if argv else 2
    if argv[0] == "--version":
        import securecluster

        with output():
            print(securecluster.__version__)
        return 0
    if argv[0] not in commands:
        raise unknown("command", argv[0], commands)
    return commands[argv[0]](argv[1:])


def _print_usage() -> None:
    with output():
        print(USAGE.format(protocols=", ".join(PROTOCOLS)), end="")


def _run(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _print_usage()
        return 0 if argv else 2
    import tyro

    with output():  # of --help
        options: Any = tyro.cli(
            options_class(protocol_class(argv[0])),
            prog=f"securecluster run {argv[0]}",
            args=argv[1:],
        )
    plans, federation = execution.prepare([options.protocol], options)
    from securecluster.app import run_folder

    (plan,) = plans
    texts = {run_folder.CONFIG: plan.as_json(federation)}
    name = f"{plan.protocol.name}-{federation.data}"
    with run_folder.claimed(options.output.out, options.output.force, name, texts) as folder:
        return _carry_out(plan, federation, folder, options.output.quiet)


def _compare(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        _print_usage()
        return 0 if argv else 2
    return compare.start(argv)


def _resume(argv: list[str]) -> int:
    folder, rest = _folder(argv, "resume")
    import tyro

    with output():
        quiet = tyro.cli(Resume, prog="securecluster resume DIR", args=rest).quiet
    from securecluster.app import run_folder

    if run_folder.compared(folder) is not None:
        return compare.resume(folder, quiet)
    if run_folder.finished(folder):
        return _show_finished(folder, quiet)
    with run_folder.locked(folder):
        if run_folder.finished(folder):  # another process ended it meanwhile
            return _show_finished(folder, quiet)
        plan, config = run_folder.load(folder)
        federation = execution.federation_of(folder, plan, config)
        return _carry_out(plan, federation, folder, quiet)


def _show_finished(folder: Path, quiet: bool) -> int:
    """Show the result of a run that has ended.

    Its files are checked before and, where they can be made again, its data.
    """
    from securecluster.app import report, run_folder

    plan, config = run_folder.load(folder)
    content = run_folder.result_of(folder)
    run_folder.tidy(folder)
    if plan.simulation is not None:
        execution.federation_of(folder, plan, config)
    if not quiet:
        with output():
            print(f"{folder} is complete")
            report.show(content, folder, tuple(config["clients"]))
    return 0


def _carry_out(plan: Any, federation: Any, folder: Path, quiet: bool) -> int:
    """Run or resume in a folder, then show what came of it."""
    from securecluster.app import report

    console = execution.console(quiet)
    with execution.resumable(folder):
        content, pictures = execution.carry_out(plan, federation, folder, console)
    if not quiet:
        with output():
            report.show(content, folder, federation.names)
            console.print("pictures: " + ", ".join(p.name for p in pictures))
    return 0


def _replay(argv: list[str]) -> int:
    folder, rest = _folder(argv, "replay")
    if rest:
        raise UsageError("replay takes a run folder and nothing else")
    from securecluster.app import run_folder
    from securecluster.app.replay import replay

    names = run_folder.compared(folder)
    if names:
        raise UsageError(
            f"{folder} holds a comparison: replay one of its runs, such as {folder / names[0]}"
        )
    plan, config = run_folder.load(folder)
    replayed = replay(plan, config, folder)
    with output():
        print(
            f"{folder}: the server alone made the same {replayed.calls} calls and ended in the "
            "same state, bit for bit"
        )
        if replayed.unused:
            print(
                f"the ledger has {replayed.unused} more releases of single clients, to a server "
                "that was killed before it used them; epsilon counts them"
            )
    return 0


def _folder(argv: list[str], command: str) -> tuple[Path, list[str]]:
    """Return the run folder that a command was given, and the arguments after it."""
    if not argv or argv[0] in ("-h", "--help"):
        _print_usage()
        raise SystemExit(0 if argv else 2)
    if argv[0].startswith("-"):
        raise UsageError(f"{command} takes the run folder first: securecluster {command} DIR")
    return Path(argv[0]), argv[1:]


def _list(argv: list[str]) -> int:
    if argv:
        raise UsageError("list takes no arguments")
    from securecluster.data import SCENARIOS, SOURCES
    from securecluster.models.architectures import names
    from securecluster.privacy.masking.masks import MASKS

    rows: dict[str, Iterable[str]] = {
        "protocols": PROTOCOLS,
        "data": SOURCES,
        "scenarios": SCENARIOS,
        "models": names(),
        "masks": MASKS,
    }
    with output():
        for what, known in rows.items():
            print(f"{what:<10} {', '.join(known)}")
    return 0
