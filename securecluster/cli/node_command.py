"""`securecluster node`: a client of runs on many machines, run by its owner."""

from __future__ import annotations

import importlib
import inspect
import logging
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from securecluster.commands import command_line
from securecluster.core import atomic_files
from securecluster.core.number_format import printable
from securecluster.core.stops import output
from securecluster.errors import SecureClusterError, UsageError, text_of, unknown
from securecluster.reports import terminal

IDENTITY, ROSTER, POLICY, SOCKET = "identity.key", "roster.txt", "policy.toml", "socket"
ROLES = ("client", "authority")
ABOUT = (
    "A client of runs on many machines, or their key authority, run by its owner: `init` makes its "
    "folder, `serve` answers for it, `ledger` shows what it has released, and `revoke` takes it "
    "out of a run."
)
TEMPLATE = """\
# What runs this client takes part in. Without a line, any is allowed. Changes hold at once, also
# for runs that were agreed to before.
# protocols = ["cfl", "fedavg"]
# masks = ["rotation", "permutation"]
# aggregations = ["secagg"]
# least_noise = 1.0        # of every single release
# least_clients = 8        # an average over few tells more of each
# most_runs = 20           # agreed to over the life of the node
# unit = "client"
# most_epsilon = 8.0       # of all runs together
# samples = false          # never tell how many samples there are
# scores = true            # tell the score on test samples once a run, also with noise or sums
# server = "aggregator"    # answer no server of another name
roster = true              # only runs whose clients are on roster.txt
"""


@dataclass(frozen=True)
class Init:
    """Make the folder of a node with a new key, and print its line for the roster."""

    role: str = "client"
    """client, or authority: the key authority of runs with encrypted pairs, without data"""


@dataclass(frozen=True)
class Released:
    """Show what a node has released, or decrypted, in all runs, by its own ledger."""


@dataclass(frozen=True)
class Revoked:
    """Take a node out of a run for good, and remove its keys and state in it.

    The run is given after the folder, by its fingerprint or the beginning of it, as `run-*` in the
    folder has it. The ledger of what was released keeps every line.
    """


@dataclass(frozen=True)
class Serve:
    """Answer for a client, or as the key authority, until it is stopped."""

    app: str
    """module that has `protocol`, a protocol with its hyper-parameters, and `load`, a function that
    returns the client's data, with the client's number and the number of clients as arguments, or
    none; it may lie in the current folder. A key authority needs the protocol alone
    """
    socket: Path | None = None
    """path of the Unix socket; None is `socket` in the folder"""
    metrics: int | None = None
    """port of this machine at which Prometheus reads rounds, ε, bytes and refusals; None is none"""


def node(argv: list[str]) -> int:
    """Make a node's folder, serve it, show its ledger, or revoke a run, and return the exit code.

    Args:
        argv: init, serve, ledger or revoke, the folder, then options.
    """
    actions = {"init": _init, "serve": _serve, "ledger": _ledger, "revoke": _revoke}
    if command_line.asks_for_help(argv[:1]):
        command_line.parsed("securecluster node init|serve|ledger|revoke DIR", argv, ABOUT, {})
    if not argv:
        raise UsageError("node takes what to do and a folder: securecluster node init DIR")
    name, *arguments = argv
    if name not in actions:
        raise unknown("action of node", name, actions)
    if command_line.asks_for_help(arguments):
        kinds = {"init": Init, "serve": Serve, "ledger": Released, "revoke": Revoked}
        command_line.of_folder(f"node {name}", arguments, kinds[name])
    if not arguments or arguments[0].startswith("-"):
        raise UsageError(f"node {name} takes the node's folder: securecluster node {name} DIR")
    return actions[name](Path(arguments[0]), arguments[1:])


def _init(folder: Path, arguments: list[str]) -> int:
    """Make the folder of a node with a new key, and print the public part for the roster."""
    from securecluster.privacy.masking.identities import AUTHORITY_WORD, Identity

    options = command_line.of_folder("node init", arguments, Init)
    if options.role not in ROLES:
        raise unknown("role", options.role, ROLES)
    atomic_files.make_private_folder(folder)
    if (folder / IDENTITY).exists():
        raise UsageError(f"{folder} has an identity already, which a new one would replace")
    identity = Identity.generate()
    identity.save(folder / IDENTITY)
    if not (folder / POLICY).exists():
        atomic_files.write_atomic(folder / POLICY, TEMPLATE.encode(), atomic_files.OWNER)
    word = f"{AUTHORITY_WORD} " if options.role == "authority" else ""
    with output():
        print(f"{word}{identity.public.hex()}")
        print(
            f"this is the {options.role}'s line of the roster: give it to who enrols the clients, "
            f"put the roster that you get into {printable(str(folder / ROSTER))}, and write what "
            f"you allow into {printable(str(folder / POLICY))}",
            file=sys.stderr,
        )
    return 0


def _serve(folder: Path, arguments: list[str]) -> int:
    """Answer for a client until SIGINT or SIGTERM."""
    from securecluster.nodes.agent import Agent
    from securecluster.nodes.events import to_file

    options = command_line.of_folder("node serve", arguments, Serve)
    made = _node_of(folder, options.app)
    if options.metrics is not None:
        from securecluster.nodes import metrics

        metrics.serve(folder, options.metrics)
    agent = Agent(made, options.socket or folder / SOCKET, to_file(folder))
    logging.basicConfig(format="%(asctime)s %(message)s")
    signal.signal(signal.SIGTERM, lambda number, frame: agent.stop())
    with output():
        print(f"{_name_of(made)} of {made.method.name} answers at {agent.path}", flush=True)
    agent.serve()
    return 0


def _ledger(folder: Path, arguments: list[str]) -> int:
    """Print what a node has released in all runs, by its own ledger."""
    from securecluster.nodes.authority_node import LOG
    from securecluster.nodes.status import spent

    _check_no_more(arguments, "ledger")
    if not folder.is_dir():
        raise UsageError(f"{folder} is no node's folder: make one with securecluster node init")
    if (folder / LOG).exists():
        return _decrypted(folder)
    rows = []
    for one in spent(folder):
        limit = "no limit" if one.allowed is None else f"{one.allowed:g}"
        epsilon = "inf" if one.spent is None else f"{one.spent:.4g}"
        rows.append((one.unit, epsilon, f"{one.delta:g}", limit))
    with output():
        if not rows:
            print("this client has released nothing")
            return 0
        from rich.console import Console

        head = ("unit", "ε of all runs", "δ", "allowed")
        Console().print(terminal.table(head, rows, "what this client has released"))
    return 0


def _revoke(folder: Path, arguments: list[str]) -> int:
    """Take a node out of a run."""
    from securecluster.nodes.party import locked, revoke

    if not (folder / IDENTITY).exists():
        raise UsageError(f"{folder} is no node's folder: make one with securecluster node init")
    if len(arguments) != 1:
        raise UsageError(
            "node revoke takes the node's folder and a run: securecluster node revoke DIR RUN, "
            "where RUN is the fingerprint in the name of its run-* there, or the beginning of it"
        )
    with locked(folder):
        run = revoke(folder, arguments[0])
    with output():
        print(f"this node answers nothing of the run {run} any more; its ledger keeps every line")
    return 0


def _decrypted(folder: Path) -> int:
    """Print what a key authority was asked for in all runs, by its own log."""
    from rich.console import Console

    from securecluster.nodes.authority_node import counted

    rows = [(*request, str(count)) for request, count in counted(folder).items()]
    with output():
        head = ("run", "request", "outcome", "times")
        Console().print(terminal.table(head, rows, "what this key authority was asked for"))
    return 0


def _node_of(folder: Path, name: str) -> Any:
    """Return the node of a folder.

    Args:
        folder: of the node.
        name: of the module with its protocol and its data.

    Raises:
        UsageError: no folder, or a module without protocol and data.
    """
    from securecluster.nodes.authority_node import AuthorityNode
    from securecluster.nodes.node import Node
    from securecluster.nodes.party import number_of
    from securecluster.nodes.policy_file import PolicyFile
    from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Identity, Roster

    if not (folder / IDENTITY).exists():
        raise UsageError(f"{folder} is no node's folder: make one with securecluster node init")
    if not (folder / ROSTER).exists():
        raise UsageError(
            f"{folder} has no {ROSTER}: put the roster there that you got from who enrols clients"
        )
    identity = Identity.load(folder / IDENTITY)
    roster = Roster.load(folder / ROSTER)
    policy = PolicyFile(folder / POLICY)
    number = number_of(None, identity, roster)
    if number == AUTHORITY_NUMBER:
        method, _ = _project(name, None, roster.size)
        return AuthorityNode(method, folder, identity=identity, roster=roster, policy=policy)
    method, data = _project(name, number, roster.size)
    return Node(method, data, folder, identity=identity, roster=roster, policy=policy)


def _name_of(node: Any) -> str:
    """Return who a node answers for."""
    from securecluster.nodes.node import Node

    return f"client {node.number}" if isinstance(node, Node) else "the key authority"


def _project(name: str, number: int | None, clients: int) -> tuple[Any, Any]:
    """Return the protocol and the data of a user's module.

    Args:
        name: of the module.
        number: of the client, for a function that takes it; None for a key authority, whose data
            are None.
        clients: on the roster.

    Raises:
        UsageError: it cannot be imported, or lacks either.
    """
    from securecluster.data import Federation
    from securecluster.protocols.common.base import ClusteringProtocol

    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
        method, data = module.protocol, None
        if number is not None:
            arguments = (number, clients) if inspect.signature(module.load).parameters else ()
            data = module.load(*arguments)
    except SecureClusterError:  # a mistake that the error names
        raise
    except Exception as error:  # anything that a module of somebody else's raises
        raise UsageError(
            f"{name} gives no protocol and no data ({type(error).__name__}: {text_of(error)}): it "
            "needs protocol, and load(), which returns a Federation of this client alone"
        ) from None
    no_data = number is not None and not isinstance(data, Federation)
    if not isinstance(method, ClusteringProtocol) or no_data:
        raise UsageError(
            f"{name} needs protocol, an object such as CFL(rounds=20), and load(), which returns a "
            "Federation of this client alone"
        )
    return method, data


def _check_no_more(arguments: list[str], name: str) -> None:
    if arguments:
        raise UsageError(f"node {name} takes the node's folder alone: leave out {arguments[0]}")
