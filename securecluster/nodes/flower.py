"""Runs over Flower: a transport over its grid, the app of a node, and the app of the server.

Flower carries frames and nothing else. A node's data, keys, state and ledger are in the folder of
its `Node`, never in Flower's context, which lies in the memory of a SuperNode and is written after
the reply has left.

With an agent (`securecluster node serve`), what Flower ships to a node is `flower_shim`, which
imports neither this package nor torch, and hands bytes to the agent's socket. Without one,
`client_app` runs the node in the process that Flower starts for a message.

Needs the extra `flower`.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from securecluster.core import atomic_files
from securecluster.data.facts import agree
from securecluster.errors import RefusedError, SecureClusterError, UsageError
from securecluster.folders import run_folder
from securecluster.messaging import refusals
from securecluster.messaging.chunks import in_chunks
from securecluster.messaging.messages import Call, Response
from securecluster.nodes.agent import AGREE, FRAME, HELLO, INTRODUCE, OK, SCORE, answer
from securecluster.nodes.agreement import agreed
from securecluster.nodes.authority_node import AuthorityNode
from securecluster.nodes.flower_hello import Introduction, gathered, name_of, proven
from securecluster.nodes.flower_hello import Patience as Patience
from securecluster.nodes.flower_messages import asked, bytes_of, pulled, pushed, record_of
from securecluster.nodes.node import Node
from securecluster.nodes.party import Party
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.server_run import ServerRun
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import as_agreed, call_types, needs_samples
from securecluster.parties.labels import UNKNOWN_LABEL
from securecluster.parties.method import Method
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Roster
from securecluster.privacy.run_secret import KEY_LENGTH
from securecluster.results.joining import Joined
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.run import Line
from securecluster.runtime.transport import Framed, Transport, WithAuthority

if TYPE_CHECKING:
    from securecluster.data.federation import Federation
    from securecluster.results.fitted import FittedRun

KINDS = (INTRODUCE, AGREE, HELLO, FRAME, SCORE)

Request = tuple[int, int]  # position of a call among those that are sent together, and client

# --- a node ---


def client_app(node_of: Callable[[Context], Party]) -> ClientApp:
    """Return the app of a node that runs in the process which Flower starts for each message.

    Whoever may start a run chooses the code of that process, so data and keys are the owner's only
    where Flower runs no app but this one; else use an agent.

    Args:
        node_of: returns the node, or that of the key authority, from Flower's context
            (`node_config` is the owner's).
    """
    app = ClientApp()
    for message_type in KINDS:
        app.query(message_type)(_handler(message_type, node_of))
    return app


def _handler(
    message_type: str, node_of: Callable[[Context], Party]
) -> Callable[[Message, Context], Message]:
    """Return the function that answers messages of a kind."""

    def handle(message: Message, context: Context) -> Message:
        code, data = answer(lambda: node_of(context), message_type, bytes_of(message.content))
        return Message(record_of(data, code), reply_to=message)

    return handle


# --- the server ---


class FlowerTransport(Framed):
    """Transport over Flower's grid: one message of Flower for each frame.

    All clients of a call are asked at once. One that does not reply within the patience of a call
    is away for the rest of its round: no later call of the round waits for it, so that a client
    that is gone costs one time-out a round.

    Args:
        grid: of the ServerApp.
        nodes: Flower's node of each client.
        replies: returns the reply class of a method name.
        check: raises for a reply that the run does not allow (`Deployment.reply_check`).
        patience: how long a call waits. A client without a reply by then is lost.
        clocks: of the clients, seconds since 1970 by each one's own clock when this machine's
            monotonic clock is 0. A request to one of these has a deadline, after which the client
            refuses it: so it releases nothing that nobody waits for.
    """

    def __init__(
        self,
        grid: Grid,
        nodes: Mapping[int, int],
        replies: Callable[[str], type],
        check: Callable[[Call, int, Any], None],
        patience: Patience | None = None,
        clocks: Mapping[int, float] | None = None,
    ) -> None:
        super().__init__({}, replies, strict=False, check=check)
        self._clocks = dict(clocks or {})
        self._grid = grid
        self._nodes = dict(nodes)
        self._patience = patience or Patience()
        self._away: set[int] = set()  # in this round
        self._round = 0

    def exchange(self, call: Call) -> Response:
        """Ask the clients of a call, and collect their replies.

        Args:
            call: requests to clients.
        """
        return self.begin(call)()

    def begin(self, call: Call) -> Callable[[], Response]:
        """Ask the clients of a call, and return the function that collects their replies.

        Args:
            call: requests to clients.
        """
        requests = (((0, client), client, data) for client, data in self.frames_of(call))
        sent = self._push([call], requests)
        recipients = {client for _, client in sent.values()}

        def collected() -> Response:
            answers = {client: data for (_, client), data in self._pull(sent)}
            in_order = [(i, answers[i]) for i in call.to if i in answers]
            return self.read(call, in_order, recipients)

        return collected

    def exchange_all(self, calls: Sequence[Call]) -> list[Response]:
        """Send several calls at once, and collect their replies.

        Args:
            calls: requests to clients.
        """
        requests = (
            ((position, client), client, data)
            for position, call in enumerate(calls)
            for client, data in self.frames_of(call)
        )
        sent = self._push(calls, requests)
        answers = dict(self._pull(sent))
        responses = []
        for position, call in enumerate(calls):
            call_answers = [(i, answers[position, i]) for i in call.to if (position, i) in answers]
            recipients = {client for of_call, client in sent.values() if of_call == position}
            responses.append(self.read(call, call_answers, recipients))
        return responses

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[tuple[Call, Response]]:
        """Ask all clients at once, and yield their replies in parts of the call, in its order.

        Of replies that arrive before their part is complete, the bytes wait.

        Args:
            call: requests to clients.
            chunk: clients of a part; None takes as many as memory allows.
        """
        requests = (((0, client), client, data) for client, data in self.frames_of(call))
        sent = self._push([call], requests)
        recipients = {client for _, client in sent.values()}
        arriving = self._pull(sent)
        waiting: dict[int, bytes] = {}

        def replies_of(subcall: Call) -> Response:
            missing = set(subcall.to) - waiting.keys()
            while missing and (arrived := next(arriving, None)) is not None:
                (_, client), data = arrived
                waiting[client] = data
                missing.discard(client)
            answers = [(i, waiting.pop(i)) for i in subcall.to if i in waiting]
            return self.read(subcall, answers, recipients.intersection(subcall.to))

        return in_chunks(replies_of, call, chunk)

    def deadline_of(self, client: int) -> int:
        """Return by when a client is to answer, in seconds since 1970 by its own clock.

        Args:
            client: its number.
        """
        seconds = self._patience.call
        if seconds is None or client not in self._clocks:
            return 0
        return math.ceil(time.monotonic() + seconds + self._clocks[client])

    def _push(
        self, calls: Sequence[Call], requests: Iterable[tuple[Request, int, bytes]]
    ) -> dict[str, Request]:
        """Send requests, and return them by the numbers of their messages.

        Args:
            calls: of one round.
            requests: (request, client, its bytes).
        """
        for call in calls:
            if call.round != self._round:
                self._round = call.round
                self._away.clear()
        there = self._nodes.keys() - self._away
        sent = (
            (request, self._nodes[client], record_of(data))
            for request, client, data in requests
            if client in there
        )
        return pushed(self._grid, FRAME, sent)

    def _pull(self, sent: dict[str, Request]) -> Iterator[tuple[Request, bytes]]:
        """Yield (request, bytes of its answer) as they arrive.

        Args:
            sent: what `_push` returned.
        """
        silent = dict.fromkeys(sent.values())
        for request, code, data in pulled(self._grid, sent, self._patience.call):
            del silent[request]
            # a node answers refusals by frames, too, so a code is of an agent that failed
            if code is not None:
                yield request, data
        self._away |= {client for _, client in silent}


def serve(  # noqa: PLR0913 (what a run over Flower is made of)
    grid: Grid,
    context: Context,
    method: Method,
    *,
    clients: int,
    seed: int,
    classes: int | None = None,
    roster: Roster | None = None,
    folder: Path | None = None,
    key: bytes | None = None,
    names: Sequence[str] = (),
    dtype: str = "float32",
    patience: Patience | None = None,
    scores: bool = False,
    server: str = "",
    report: Callable[[Line], None] = lambda line: None,
) -> FittedRun:
    """Return the result of a run, of which a ServerApp is the server.

    Args:
        grid: of the ServerApp.
        context: of the ServerApp.
        method: the protocol.
        clients: m.
        seed: of the run.
        classes: number of outputs; None asks the clients.
        roster: public keys of the clients; None verifies nothing.
        folder: of the server's run, from which a server that was stopped goes on; None keeps it in
            memory.
        key: 32 secret bytes of a server that adds noise or opens ciphertexts.
        names: of the clients, in the order of their numbers; by default their numbers.
        dtype: of the models.
        patience: how long to wait.
        scores: ask the clients for the scores of their models at the end, which no ε covers; their
            policies decide.
        server: name of this server, which owners of nodes may have in their policies.
        report: called with the history line of each round.

    Raises:
        UsageError: clients that are not there, or whose data do not belong together.
        RefusedError: a client that refuses the run.
    """
    patience = patience or Patience()
    if folder is not None and run_folder.is_run(folder):
        run_folder.check_under_way(folder)  # before a node is asked
    parties = [*range(clients)]
    if method.pairs.by_authority:
        parties.append(AUTHORITY_NUMBER)
    introductions = gathered(grid, parties, context.run_id, roster, patience, server=server)
    nodes = {number: one.node for number, one in introductions.items()}
    facts = [one.facts for _, one in sorted(introductions.items()) if one.facts is not None]
    proposal = Proposal.of(method, agree(facts, seed, classes), dtype, roster, folder)
    proposal = agreed(proposal, roster, sorted(nodes), partial(_answers, grid, nodes, patience))
    nodes = proven(grid, nodes, config_hash(proposal.config), roster, patience, server)
    method = as_agreed(method, proposal.config)
    authority = nodes.pop(AUTHORITY_NUMBER, None)

    def replies(name: str) -> type:
        return call_types(method, name)[1]

    check = Deployment(method, proposal.config).reply_check(roster)
    clocks = _clocks(introductions)
    transport: Transport = FlowerTransport(grid, nodes, replies, check, patience, clocks)
    if authority is not None:
        door = _door(grid, authority, patience)
        transport = WithAuthority(transport, door, replies)

    def told_scores() -> list[float]:
        return _scores(grid, nodes, config_hash(proposal.config), patience)

    run = ServerRun(method, proposal.config, transport, names, key, roster)
    if scores:
        run = replace(run, scores=told_scores)
    return run.carried_out(folder, report)


def _clocks(introductions: Mapping[int, Introduction]) -> dict[int, float]:
    """Return the clocks of the parties that told theirs."""
    return {number: one.clock for number, one in introductions.items() if one.clock is not None}


def _answers(
    grid: Grid, nodes: Mapping[int, int], patience: Patience, sent: Mapping[int, bytes]
) -> dict[int, str]:
    """Return what parties answer to a proposal.

    Args:
        grid: of the ServerApp.
        nodes: Flower's node of each party.
        patience: how long to wait.
        sent: what each party is sent.

    Raises:
        RefusedError: a party that refuses the run, or does not answer.
    """
    records = {nodes[party]: record_of(data) for party, data in sent.items()}
    answers = asked(grid, AGREE, records, patience.call)
    replies = {}
    for party in sorted(sent):
        node = nodes[party]
        if node not in answers:
            raise RefusedError(
                f"{name_of(party)} does not answer the proposal of a run: look at its log, and "
                "at that of its SuperNode",
                refusals.FAILED,
            )
        code, data = answers[node]
        if code != OK:
            refusal = refusals.refusal("the run", code)
            raise RefusedError(f"{name_of(party)}: {refusal}", refusal.code)
        replies[party] = data.decode("ascii", "replace")
    return replies


def join(  # noqa: PLR0913 (what a run over Flower is made of)
    grid: Grid,
    context: Context,
    method: Method,
    folder: Path,
    newcomers: Sequence[int],
    *,
    roster: Roster | None = None,
    patience: Patience | None = None,
    server: str = "",
) -> Joined:
    """Assign newcomers' nodes to the clusters of a finished run over Flower.

    The nodes of the run's clients that are there are the hosts. Where numbers of samples belong to
    the configuration, all of them have to be.

    Args:
        grid: of the ServerApp.
        context: of the ServerApp.
        method: the protocol.
        folder: of the server's run.
        newcomers: their numbers on the roster, after those of the run's clients.
        roster: public keys of all parties; None verifies nothing.
        patience: how long to wait.
        server: name of this server, which owners of nodes may have in their policies.

    Raises:
        RefusedError: a newcomer that refuses the run, or what it is asked for.
        UsageError: newcomers that are not there, or numbers of clients of the run.
    """
    patience = patience or Patience()
    content = run_folder.run_config(folder)
    config = content["network"]
    method = as_agreed(method, config)
    clients = range(int(config["clients"]))
    needed = [*newcomers, *(clients if needs_samples(method) else ())]
    introductions = gathered(grid, needed, context.run_id, roster, patience, clients, server)
    nodes = {number: one.node for number, one in introductions.items()}
    samples = {
        number: None if one.facts is None else one.facts.samples
        for number, one in introductions.items()
    }
    of_clients = tuple(samples[i] or 0 for i in clients) if needs_samples(method) else None
    proposal = Proposal(config, of_clients, joins=True)
    agreed(proposal, roster, sorted(newcomers), partial(_answers, grid, nodes, patience))
    nodes = proven(grid, nodes, config_hash(config), roster, patience, server, newcomers)

    def replies(name: str) -> type:
        return call_types(method, name)[1]

    check = Deployment(method, config).reply_check(roster)
    transport = FlowerTransport(grid, nodes, replies, check, patience, _clocks(introductions))
    run = ServerRun(method, config, transport, content["clients"], roster=roster)
    return run.join(folder, {i: samples[i] for i in newcomers})


def _door(grid: Grid, node: int, patience: Patience) -> Callable[[bytes], bytes]:
    """Return the function from a frame to what the key authority answers.

    Args:
        grid: of the ServerApp.
        node: Flower's node of the authority.
        patience: how long to wait.
    """

    def answer_frame(frame: bytes) -> bytes:
        code, data = asked(grid, FRAME, {node: record_of(frame)}, patience.call).get(
            node, ("", b"")
        )
        if code != OK:  # no answer, or an agent that failed: refusals are frames, too
            raise ConnectionError("the key authority does not reply")
        return data

    return answer_frame


def _scores(grid: Grid, nodes: Mapping[int, int], run: str, patience: Patience) -> list[float]:
    """Return the score that each client tells, NaN for those who tell none.

    Args:
        grid: of the ServerApp.
        nodes: Flower's node of each client.
        run: fingerprint of the configuration.
        patience: how long to wait.
    """
    sent = {node: record_of(run.encode()) for node in nodes.values()}
    answers = asked(grid, SCORE, sent, patience.call)
    scores = []
    for client in sorted(nodes):
        code, data = answers.get(nodes[client], (refusals.FAILED, b""))
        scores.append(_number(data) if code == OK else math.nan)
    return scores


def _number(data: bytes) -> float:
    """Return the number that a client tells, which may send anything; NaN for what is none."""
    try:
        value = json.loads(data)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number and math.isfinite(value) else math.nan
    except (ValueError, OverflowError, RecursionError):
        return math.nan


def server_app(method: Method, **options: Any) -> ServerApp:
    """Return the app of the server.

    Args:
        method: the protocol.
        options: as of `serve`; `done` is called with the result. What is not given comes from the
            configuration of the app, `[tool.flwr.app.config]` of its project. Where that has
            `joins`, the newcomers of these numbers join the run in `out`, and `done` is called with
            their `Joined`.
    """
    done = options.pop("done", lambda result: None)
    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        try:
            given = {**configured(context.run_config), **options}
            newcomers = newcomers_of(context.run_config)
            if newcomers:
                result: Any = _joined(grid, context, method, newcomers, given)
            else:
                result = serve(grid, context, method, **given)
        except SecureClusterError as error:
            # Flower prints an error with all that was called: here its sentence says what to do
            raise error.with_traceback(None) from None
        done(result)

    app.main()(main)
    return app


def _joined(
    grid: Grid, context: Context, method: Method, newcomers: Sequence[int], given: Mapping[str, Any]
) -> Joined:
    """Let newcomers join a finished run, and tell of their clusters.

    Args:
        grid: of the ServerApp.
        context: of the ServerApp.
        method: the protocol.
        newcomers: their numbers on the roster.
        given: options of `serve`.
    """
    if given.get("folder") is None:
        raise UsageError("newcomers join a run in a folder: give out, too")
    options = {name: given[name] for name in ("roster", "patience", "server") if name in given}
    joined = join(grid, context, method, given["folder"], newcomers, **options)
    for number, label in zip(newcomers, joined.labels, strict=True):
        where = "a cluster that it alone knows" if label == UNKNOWN_LABEL else f"cluster {label}"
        print(f"client {number} joins {where}")
    return joined


def newcomers_of(config: Mapping[str, Any]) -> list[int]:
    """Return the numbers of newcomers that an app's configuration names.

    Args:
        config: the `run_config` of Flower's context, whose `joins` has numbers with spaces between.

    Raises:
        UsageError: `joins` has something else.
    """
    words = str(config.get("joins", "")).split()
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"joins is {config['joins']!r}: give numbers on the roster, such as '3 4'")
    return [int(word) for word in words]


def configured(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of `serve` that an app's configuration gives.

    Args:
        config: the `run_config` of Flower's context: clients, seed, out, classes, roster, key,
            scores, server and seconds, each of which may be left out.

    Raises:
        UsageError: a file that is not there, or a key of another length.
    """
    options: dict[str, Any] = {name: config[name] for name in ("clients", "seed") if name in config}
    options["classes"] = config.get("classes") or None
    options["scores"] = bool(config.get("scores", False))
    options["patience"] = Patience(call=float(config.get("seconds", 3600.0)))
    if config.get("server"):
        options["server"] = str(config["server"])
    if config.get("out"):
        options["folder"] = Path(str(config["out"]))
    if config.get("roster"):
        options["roster"] = Roster.load(Path(str(config["roster"])))
    if config.get("key"):
        path = Path(str(config["key"]))
        options["key"] = path.read_bytes() if path.is_file() else b""
        if len(options["key"]) != KEY_LENGTH:
            raise UsageError(f"{path} has no key: it takes a file of {KEY_LENGTH} secret bytes")
    return options


# --- a simulation ---

# nodes of this process by folder: loading their data may take long
_SIMULATED: dict[Path, Party] = {}


def simulated(
    message_type: str,
    message: Message,
    context: Context,
    method: Method,
    load: Callable[[int, int], Federation],
) -> Message:
    """Return the answer of a simulated node, which has neither identity nor roster.

    Its folder lies beside that of the server's run, and is there for every message. In a run with a
    key authority the last partition is the authority's, and no client's.

    Args:
        message_type: of the message.
        message: from the server.
        context: with the number of the partition, and the app's configuration.
        method: the protocol.
        load: returns the data of a client, by its number and the number of clients.
    """
    number = int(context.node_config["partition-id"])
    clients = int(context.node_config["num-partitions"])
    clients -= 1 if method.pairs.by_authority else 0
    out = Path(str(context.run_config["out"]))
    folder = out.with_name(f"{out.name}-nodes") / f"node-{number}"

    def node() -> Party:
        if folder not in _SIMULATED:
            policy = Policy(roster=False)
            atomic_files.make_folder(folder.parent)
            if number == clients:
                _SIMULATED[folder] = AuthorityNode(method, folder, policy=policy)
            else:
                client_data = load(number, clients)
                _SIMULATED[folder] = Node(
                    method, client_data, folder, number=number, policy=policy, durable=False
                )
        return _SIMULATED[folder]

    code, data = answer(node, message_type, bytes_of(message.content))
    return Message(record_of(data, code), reply_to=message)
