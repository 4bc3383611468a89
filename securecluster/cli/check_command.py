"""`securecluster check`: every check of a protocol, one line each."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from securecluster.commands import command_line, execution
from securecluster.commands.command_line import Section
from securecluster.commands.options import as_typed, protocol_first, section_of
from securecluster.core import atomic_files, outputs
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.errors import UsageError
from securecluster.protocols.registry import class_at, protocol_class

ABOUT = "Run every check that a protocol must pass, also one of your own (module:Class)."
IS_REPORT = outputs.json_with(("passed", "protocol", "results"))
FAILED = 1  # exit code where a check failed
# hyper-parameters that checks set, one after the other
SET_BY_CHECKS = ("rounds", "mask", "clip", "noise", "placement", "dp_unit", "target_epsilon")


@dataclass(frozen=True)
class CheckOptions:
    """Choice of checks, and where the results go."""

    masks: tuple[str, ...] = ("none", "permutation", "rotation")
    """masks to compare; those that the protocol refuses are left out"""
    only: tuple[str, ...] = ()
    """names of the checks to run; none is all"""
    json: Path | None = None
    """also write the results to this file"""
    quiet: bool = False
    """print nothing but errors"""


def check(argv: list[str]) -> int:
    """Run every check of a protocol, and return the exit code: 0, or 1 where one failed.

    Args:
        argv: the protocol, then the options.
    """
    name, arguments = protocol_first(argv, "check")
    protocol = class_at(name) if name is not None and ":" in name else protocol_class(name)
    # not above: it loads torch
    from securecluster.protocols import conformance

    options = _parsed(protocol, name, arguments)
    if options.checks.json is not None:  # before minutes of work
        atomic_files.check_output(options.checks.json, IS_REPORT)
    params = _params(protocol, options.protocol)
    console = execution.console(options.checks.quiet)

    def show(line: Any) -> None:
        with output():
            console.print(as_typed(str(line)), markup=False)

    report = conformance.check(
        protocol, masks=options.checks.masks, only=options.checks.only, report=show, **params
    )
    show(report.closing)
    if options.checks.json is not None:
        outputs.write_json(options.checks.json, report.as_json(), IS_REPORT)
    return 0 if report.passed else FAILED


def _parsed(protocol: Any, name: str | None, arguments: list[str]) -> Any:
    """Return the options of the command line, with the small hyper-parameters of checks."""
    from securecluster.protocols.conformance import small_params

    method = replace(section_of(protocol), defaults=small_params(protocol))
    sections = {"checks": Section("the checks", CheckOptions), "protocol": method}
    return command_line.parsed(
        f"securecluster check {printable(name or 'PROTOCOL')}", arguments, ABOUT, sections
    )


def _params(protocol: Any, method: Any) -> dict[str, Any]:
    """Return the hyper-parameters of all runs.

    Raises:
        UsageError: one that the checks set themselves.
    """
    params: dict[str, Any] = method.get_params()
    defaults = {option.name: option.default for option in fields(protocol)}
    for name in SET_BY_CHECKS:
        if params.pop(name) != defaults[name]:
            raise UsageError(
                f"the checks set {name} themselves: leave it out; --masks names the masks"
            )
    return params
