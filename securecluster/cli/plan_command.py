"""`securecluster plan`: what ε buys, without private data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from securecluster.commands import command_line
from securecluster.commands.command_line import Section
from securecluster.commands.options import as_typed
from securecluster.core import outputs
from securecluster.core.stops import output
from securecluster.errors import UsageError
from securecluster.studies import comparison_options

ABOUT = (
    "Say what ε buys, before private data are touched: noise and rounds by formula, and ARI, "
    "accuracy, bytes and seconds of simulations on a public sample."
)


@dataclass(frozen=True)
class PlanOptions:
    """Options of a plan."""

    epsilon: tuple[float, ...] = field(
        default=(1.0, 2.0, 4.0, 8.0, 16.0), metadata={"flag": "--target-epsilon"}
    )
    """targets for the ε of a whole run; inf is a run without noise"""
    clients: int = 20
    """number of clients"""
    samples: int = 100
    """training samples of each client"""
    public: str = "digits"
    """what is simulated on: a data set by its name, such as digits or breast_cancer, or your own
    CSV file of public samples
    """
    label_column: str | None = None
    """your own CSV file: the column to learn"""
    client_column: str | None = None
    """your own CSV file: the column that names clients, of which the one with most rows is taken"""
    scenario: str | None = None
    """how clusters differ: a name from `securecluster list`; None is label-swap, or
    label-permutation where there are too few labels for it
    """
    clusters: int | None = None
    """true clusters; None is the scenario's own default (4), or 2 with two labels"""
    seeds: int = 3
    """simulations at each ε"""
    seed: int = 0
    """of the first simulation"""
    work: float = 10.0
    """million samples that clients of all simulations train on at most: what is more is left out
    and named; 0 leaves formulas alone
    """
    picture: Path | None = None
    """also draw ARI and accuracy over ε into this file (.png, .pdf or .svg)"""
    json: Path | None = None
    """also write the forecasts to this file"""


def start(argv: Sequence[str]) -> int:
    """Print a plan.

    Args:
        argv: the protocols, then the options.

    Returns:
        The exit code.

    Raises:
        UsageError: an unknown name or an impossible value.
        OutputError: a file that cannot be written.
    """
    labels, arguments = comparison_options.protocols_first(
        argv, "plan", "cfl hidden --clients 100 --samples 200 --target-epsilon 1 4 16"
    )
    from securecluster.studies.plan import Outlook, frontier, plan, refuse_left

    refuse_left(word.partition("=")[0].removeprefix("--") for word in arguments)
    options = _parsed(labels, arguments)

    plan_options = options.plan
    is_plan = outputs.json_with([entry.name for entry in fields(Outlook)])
    _check_outputs(plan_options, is_plan)
    plan_arguments = {
        name: value for name, value in vars(plan_options).items() if name not in ("picture", "json")
    }
    for name, value in vars(options.protocols).items():
        if value is not None and value != _default(options.protocols, name):
            plan_arguments[name] = value
    outlook = plan(labels, **plan_arguments)
    with output():
        for line in outlook.lines():
            print(as_typed(line))
    if plan_options.json is not None:
        outputs.write_json(plan_options.json, outlook.as_json(), is_plan)
    if plan_options.picture is not None:
        outputs.write_picture(plan_options.picture, frontier(outlook))
    return 0


def _check_outputs(options: PlanOptions, is_plan: Callable[[bytes], bool]) -> None:
    """Raise an error for a file that cannot be written: before minutes of work.

    Args:
        options: of the command.
        is_plan: True for the content of a file with forecasts.
    """
    from securecluster.core import atomic_files

    if options.picture is not None:
        if options.picture.suffix not in outputs.PICTURES:
            raise UsageError(f"--picture {options.picture}: its name ends in .png, .pdf or .svg")
        atomic_files.check_output(options.picture, outputs.is_picture)
    if options.json is not None:
        atomic_files.check_output(options.json, is_plan)


def _parsed(labels: Sequence[str], arguments: Sequence[str]) -> Any:
    """Return the options of the command line.

    Args:
        labels: the protocols.
        arguments: the options.
    """
    from securecluster.studies import sweep_plan

    names = sweep_plan.names_of(labels)
    comparison_options.check_owned(
        names, arguments, [option.name for option in fields(PlanOptions)]
    )
    section = Section("the plan", PlanOptions)
    methods = comparison_options.sections(names, without=sweep_plan.VARIED)["protocols"]
    sections = {"plan": section, "protocols": methods}
    return command_line.parsed(
        f"securecluster plan {' '.join(labels) or 'PROTOCOLS'}", arguments, ABOUT, sections
    )


def _default(options: Any, name: str) -> Any:
    """Return the default of an option that stands for several protocols' fields."""
    return type(options).__dataclass_fields__[name].default
