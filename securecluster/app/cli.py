"""`securecluster run | compare | resume | replay | list`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.app import compare, runs
from securecluster.app.options import PROTOCOLS, as_typed, options_class, protocol_class
from securecluster.backend import prepare
from securecluster.errors import SecureClusterError, UsageError, unknown

USAGE = """usage: securecluster COMMAND

  run PROTOCOL [options]         run a protocol on simulated clients and leave a run folder
  compare PROTOCOLS [options]    run several protocols on the same clients and set them side by side
  resume DIR [--quiet]           go on with a run or a comparison that was stopped
  replay DIR                     run the server alone against a full transcript, bit for bit
  list                           protocols, data sets, scenarios, models and masks

protocols: {protocols}
`securecluster run PROTOCOL --help` shows every option with its default, and so does `compare PROTOCOLS --help`.
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
        print(f"securecluster: {as_typed(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"securecluster: stopped{stop}", file=sys.stderr)
        return 130
    except SystemExit as stop:  # --help, or an option that does not parse
        return stop.code if isinstance(stop.code, int) else 2


def _dispatch(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "compare": _compare,
        "resume": _resume,
        "replay": _replay,
        "list": _list,
    }
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
    plans, federation = runs.prepare([options.protocol], options)
    from securecluster.app import folder as folders

    (plan,) = plans
    texts = {"config.json": plan.as_json(federation)}
    folder = folders.create(options.output.out, options.output.force, f"{plan.protocol.name}-{federation.data}", texts)
    return _carry_out(plan, federation, folder, options.output.quiet)


def _compare(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE.format(protocols=", ".join(PROTOCOLS)), end="")
        return 0 if argv else 2
    return compare.start(argv)


def _resume(argv: list[str]) -> int:
    folder, rest = _folder(argv, "resume")
    import tyro

    quiet = tyro.cli(Resume, prog="securecluster resume DIR", args=rest).quiet
    from securecluster.app import folder as folders
    from securecluster.app import report

    if folders.compared(folder) is not None:
        return compare.resume(folder, quiet)
    plan, config = folders.load(folder)
    federation = plan.simulation.noted_federation()
    runs.check_data(folder, plan, config, federation)
    if (folder / "result.json").is_file():
        if not quiet:
            print(f"{folder} is complete")
            report.show(json.loads((folder / "result.json").read_text()), folder, federation.names)
        return 0
    return _carry_out(plan, federation, folder, quiet)


def _carry_out(plan: Any, federation: Any, folder: Path, quiet: bool) -> int:
    """Run or resume in a folder, then show what came of it."""
    from securecluster.app import report

    console = runs.console(quiet)
    with runs.resumable(folder):
        content, pictures = runs.carry_out(plan, federation, folder, console)
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

    names = folders.compared(folder)
    if names:
        raise UsageError(f"{folder} holds a comparison: replay one of its runs, such as {folder / names[0]}")
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
    from securecluster.networks import names
    from securecluster.privacy.masks import MASKS

    rows: dict[str, Iterable[str]] = {"protocols": PROTOCOLS, "data": SOURCES, "scenarios": SCENARIOS, "models": names(), "masks": MASKS}
    for what, known in rows.items():
        print(f"{what:<10} {', '.join(known)}")
    return 0
