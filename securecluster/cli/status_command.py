"""`securecluster status`: where a run or a node stands, while it is under way, too."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from securecluster.cli.report_command import folder_of
from securecluster.commands import command_line
from securecluster.core.number_format import printable
from securecluster.core.stops import output

if TYPE_CHECKING:
    from securecluster.nodes.status import NodeStatus
    from securecluster.reports.run_status import RunStatus


@dataclass(frozen=True)
class Status:
    """Show where a run or a node stands: rounds, who answers, ε so far and left, bytes, and the
    last refusal. It tells nothing of data, and changes nothing.
    """

    json: bool = False
    """print one line of JSON in place of sentences"""


def status(argv: list[str]) -> int:
    """Show where a run or a node stands.

    Args:
        argv: the folder, then the options.
    """
    folder, arguments = folder_of(argv, "status")
    options = command_line.of_folder("status", arguments, Status)
    from securecluster.nodes.status import IDENTITY

    lines, content = (_of_node if (folder / IDENTITY).exists() else _of_run)(folder)
    with output():
        for line in [json.dumps(content)] if options.json else lines:
            print(printable(line))
    return 0


def _of_run(folder: Path) -> tuple[Iterator[str], Any]:
    """Return the lines of a run, and the same for JSON."""
    from securecluster.reports.run_status import RunStatus

    found = RunStatus.of(folder)
    return _run_lines(found), asdict(found)


def _run_lines(found: RunStatus) -> Iterator[str]:
    """Yield the status of a run in sentences."""
    from securecluster.messaging.refusals import SENTENCES
    from securecluster.reports.report import megabytes

    yield f"{found.protocol}: {found.state}; round {found.round} of {found.rounds}"
    if found.answered is not None:
        silent = [f"{name} ({code})" for name, code in found.silent.items()]
        rest = f"; not {', '.join(silent)}" if silent else ""
        yield f"{len(found.answered)} clients answered in the last round{rest}"
    left = "" if found.left is None else f", {found.left:.4g} left of its target"
    yield f"ε so far: {_epsilon(found.epsilon) if found.known else 'not known yet'}{left}"
    yield f"up {megabytes(found.up)}, down {megabytes(found.down)}"
    if found.refusal is not None:
        client, code, number = found.refusal
        yield f"last refusal: {client} in round {number}, {code}: {SENTENCES[code]}"


def _of_node(folder: Path) -> tuple[Iterator[str], Any]:
    """Return the lines of a node, and the same for JSON."""
    from securecluster.cli.node_command import SOCKET
    from securecluster.nodes.agent import is_served
    from securecluster.nodes.status import NodeStatus

    found = NodeStatus.of(folder)
    served = is_served(folder / SOCKET)
    messages = {" ".join(key): count for key, count in found.messages.items()}
    return _node_lines(found, served), {"served": served, **asdict(found), "messages": messages}


def _node_lines(found: NodeStatus, served: bool) -> Iterator[str]:
    """Yield the status of a node in sentences."""
    from securecluster.reports.report import megabytes

    last = f", the last message at {found.last}" if found.last else ""
    yield f"{'an agent answers' if served else 'no agent answers at its socket'}{last}"
    for run, number in found.rounds.items():
        yield f"run {run}: round {number}"
    for run in found.revoked:
        yield f"run {run}: revoked"
    for one in found.epsilon:
        left = "no limit" if one.left is None else f"{one.left:.4g} left of {one.allowed:g}"
        yield f"ε of one {one.unit}: {_epsilon(one.spent)} at δ = {one.delta:g}, {left}"
    yield f"{sum(found.messages.values())} messages, {megabytes(found.received)} in, " + (
        f"{megabytes(found.sent)} out"
    )
    if found.refusal is not None:
        refusal = found.refusal
        yield f"last refusal: {refusal.kind} at {refusal.time}, {refusal.code}: {refusal.sentence}"


def _epsilon(value: float | None) -> str:
    """Return an ε in digits; None is infinite."""
    return "infinite" if value is None else f"{value:.4g}"
