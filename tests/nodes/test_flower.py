"""Runs over Flower's messages: the bits of a run in one process, and clients that prove a number.

The grid here is a function call in place of a network; `--exhaustive` runs Flower's simulation.
"""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs the extra flower")

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from securecluster import Federation, ForeignModel, Settings
from securecluster.core.serialization import pack
from securecluster.errors import (
    FrameError,
    RefusedError,
    RunFolderError,
    SecureClusterWarning,
    UsageError,
)
from securecluster.folders import run_folder
from securecluster.messaging import run_number, wire
from securecluster.messaging.messages import Ack, Call, Empty, reply_header
from securecluster.nodes import flower, hello, party
from securecluster.nodes.agent import Agent
from securecluster.nodes.authority_node import AuthorityNode
from securecluster.nodes.flower_hello import introduced
from securecluster.nodes.flower_messages import record_of
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.privacy.dp.ledger import Ledger
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Identity, Roster
from securecluster.protocols import CFL, FedAvg, OneShot, Signature
from securecluster.results.fitted import FittedRun
from securecluster.runtime import endpoint

CLIENTS = 4


def toward_means(arrays: Any, x: Any, y: Any, call: Any) -> Any:
    """Move the weights of each class toward its mean image: a client's training in NumPy."""
    weights = arrays[0].copy()
    for label in np.unique(y):
        weights[label] += call.lr * x[y == label].mean(0).ravel()
    return [weights]


def fails_at_client_2(arrays: Any, x: Any, y: Any, call: Any) -> Any:
    """Train, but at one of the clients."""
    if call.client == 2:
        raise ValueError("the private label 7")
    return toward_means(arrays, x, y, call)


FOREIGN: dict[str, Any] = {"rounds": 2, "model": ForeignModel([np.zeros((10, 64))], toward_means)}
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
FEDAVG = FedAvg(**SMALL)
METHODS = {
    "fedavg": FEDAVG,
    "fedavg, secagg": FedAvg(**SMALL, aggregation="secagg"),
    "cfl, sketch and secagg": CFL(**SMALL, sketch=64, aggregation="secagg"),
    "fedavg, functions": FedAvg(**FOREIGN, aggregation="secagg", mask="permutation"),
    "cfl, functions": CFL(**FOREIGN, sketch=64, aggregation="secagg"),
    "oneshot, pads": OneShot(**SMALL, relevance="pads", aggregation="secagg"),
}
Reply = Callable[[Message], Message | None]


@pytest.fixture(autouse=True)
def task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of Flower know the task that makes them, which Flower's own processes set."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class Grid:
    """Flower's grid, over function calls: node 100 + i is the i-th client's.

    Args:
        apps: ClientApps.
        fault: returns what becomes of an answer to a message; None for none.
    """

    def __init__(self, apps: Iterable[Any], fault: Reply = lambda message: message) -> None:
        self.apps = {100 + i: app for i, app in enumerate(apps)}
        self.fault = fault
        self.asked: list[str] = []
        self.replies: dict[str, Message] = {}

    def get_node_ids(self) -> list[int]:
        return list(self.apps)

    def config_of(self, node: int) -> dict[str, Any]:
        return {"partition-id": node - 100}

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            number = str(len(self.asked))
            message.metadata.__dict__["_message_id"] = number
            self.asked.append(message.metadata.message_type)
            reply = self.reply_to(message)
            if reply is not None:
                self.replies[number] = reply
            numbers.append(number)
        return numbers

    def reply_to(self, message: Message) -> Message | None:
        node = message.metadata.dst_node_id
        context = Context(1, node, self.config_of(node), RecordDict(), {})
        return self.fault(self.apps[node](message, context))

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        # one at a time, the last ones first: they come in any order
        there = [number for number in numbers if number in self.replies]
        return [self.replies.pop(number) for number in sorted(there)[-1:]]


def apps(
    made: Any,
    federation: Federation,
    folder: Path,
    identities: list[Identity] | None = None,
    roster: Roster | None = None,
) -> list[Any]:
    """Return an app for each client, whose node is made for each message."""

    def node_of(context: Context) -> Node:
        i = int(context.node_config["partition-id"])
        own = federation.select([i])
        if identities is None:
            policy = Policy(roster=False)
            return Node(made, own, folder / f"node-{i}", number=i, policy=policy)
        return Node(made, own, folder / f"node-{i}", identity=identities[i], roster=roster)

    return [flower.client_app(node_of)] * CLIENTS


def authority_app(made: Any, folder: Path, identity: Identity | None, roster: Roster | None) -> Any:
    """Return the app of the key authority."""

    def authority_of(context: Context) -> AuthorityNode:
        policy = Policy(roster=roster is not None)
        place = folder / "authority"
        return AuthorityNode(made, place, identity=identity, roster=roster, policy=policy)

    return flower.client_app(authority_of)


def run(made: Any, grid: Any, **options: Any) -> FittedRun:
    context: Any = SimpleNamespace(run_id=1)
    given = {"clients": CLIENTS, "seed": 0, "classes": 10, **options}
    return flower.serve(grid, context, made, **given)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_over_flower_is_the_run_in_this_process(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    made = METHODS[name]
    served = run(made, Grid(apps(made, federation, tmp_path)))
    whole = made.fit(federation, Settings(threads=1))
    if name.startswith("fedavg"):
        assert pack(served.state_) == pack(whole.state_)
    assert list(served.labels_) == list(whole.labels_)
    sent = [(entry.method, entry.up) for entry in served.transcript_.entries]
    assert sent == [(entry.method, entry.up) for entry in whole.transcript_.entries]


def test_clients_prove_their_numbers_by_the_roster(federation: Federation, tmp_path: Path) -> None:
    identities = [Identity.generate() for _ in range(CLIENTS)]
    # Flower's order is not the roster's
    order = [2, 0, 3, 1]
    roster = Roster({order[i]: one.public for i, one in enumerate(identities)})
    made = METHODS["fedavg, secagg"]
    served = run(made, Grid(apps(made, federation, tmp_path, identities, roster)), roster=roster)
    assert served.dropped_ == {} and served.refused_ == {}
    other = Roster({i: Identity.generate().public for i in range(CLIENTS)})
    grid = Grid(apps(made, federation, tmp_path, identities, roster))
    with pytest.raises(UsageError, match="not there: client 0, client 1, client 2, client 3;"):
        run(made, grid, roster=other, patience=flower.Patience(start=0.1))


def test_a_server_that_hands_on_messages_of_another_federation_is_no_client_there(
    federation: Federation, tmp_path: Path
) -> None:
    """Of two federations with one owner, the first one's server is node 100 in the second one."""
    owner, *others = [Identity.generate() for _ in range(2 * CLIENTS - 1)]
    teams = [[owner, *others[: CLIENTS - 1]], [owner, *others[CLIENTS - 1 :]]]
    rosters = [Roster({i: one.public for i, one in enumerate(team)}) for team in teams]
    grids = []
    for name, team, roster in zip("ab", teams, rosters, strict=True):
        (tmp_path / name).mkdir()
        grids.append(Grid(apps(FEDAVG, federation, tmp_path / name, team, roster)))
    assert run(FEDAVG, grids[0], roster=rosters[0]).refused_ == {}
    own = grids[1].apps[100]
    grids[1].apps[100] = grids[0].apps[100]
    with pytest.raises(UsageError, match="not there: client 0;"):
        run(FEDAVG, grids[1], roster=rosters[1], patience=flower.Patience(start=0.1))
    # neither where it lets the owner's node introduce itself, and answers for it then
    frames = grids[0].apps[100]

    def relay(message: Message, context: Context) -> Message:
        kinds = ("query.introduce", "query.agree")
        return (own if message.metadata.message_type in kinds else frames)(message, context)

    grids[1].apps[100] = relay
    with pytest.raises(RefusedError, match="client 0: the node refused to sign that it agreed"):
        run(FEDAVG, grids[1], roster=rosters[1])


def test_an_owner_names_the_server_that_its_node_answers(
    federation: Federation, tmp_path: Path
) -> None:
    identities = [Identity.generate() for _ in range(CLIENTS)]
    roster = Roster({i: one.public for i, one in enumerate(identities)})

    def node_of(context: Context) -> Node:
        i = int(context.node_config["partition-id"])
        given: dict[str, Any] = {"identity": identities[i], "policy": Policy(server="here")}
        own = federation.select([i])
        return Node(FEDAVG, own, tmp_path / f"node-{i}", roster=roster, **given)

    grid = Grid([flower.client_app(node_of)] * CLIENTS)
    assert run(FEDAVG, grid, roster=roster, server="here").refused_ == {}
    with pytest.raises(UsageError, match="these are not there"):
        patience = flower.Patience(start=0.1)
        run(FEDAVG, grid, roster=roster, server="there", patience=patience)


def test_another_s_introduction_does_not_count_again(
    federation: Federation, tmp_path: Path
) -> None:
    identities = [Identity.generate() for _ in range(CLIENTS)]
    roster = Roster({i: one.public for i, one in enumerate(identities)})
    node = Node(FEDAVG, federation.select([0]), tmp_path, identity=identities[0], roster=roster)
    challenge = hello.challenge_of(1, 100, "00", roster, "here")

    def statement(**changed: Any) -> bytes:
        return hello.statement_of(hello.INTRODUCTION, {**challenge, **changed})

    data = node.introduce(json.dumps(challenge).encode())
    number, facts, clock = introduced(data, statement(), roster)
    assert number == 0 and facts == federation.facts_of(0)
    assert clock is not None and abs(clock - time.time()) < 60
    others = {"run": 2, "node": 101, "nonce": "01", "roster": "ab", "server": "elsewhere"}
    for name, value in others.items():
        with pytest.raises(FrameError, match="did not sign"):
            introduced(data, statement(**{name: value}), roster)
    begun = b'{"number": 0, "signature": "", "facts": {}, "clock": '
    clocks = [begun + one for one in (b"-1}", b"1.5}", b'"1"}', b"1e30}", b"1" + b"0" * 400 + b"}")]
    for junk in (b"", b"[]", b"{}", b'{"number": -1, "signature": "", "facts": {}}', *clocks):
        with pytest.raises(FrameError, match="did not say which client"):
            introduced(junk, b"", roster)


def test_a_node_that_does_not_answer_is_lost_and_one_that_ended_too(
    federation: Federation, tmp_path: Path
) -> None:
    def fault(message: Message) -> Message | None:
        silent = message.metadata.src_node_id == 101
        return None if silent and message.metadata.message_type == "query.frame" else message

    made = METHODS["fedavg, secagg"]
    grid = Grid(apps(made, federation, tmp_path), fault)
    began = time.monotonic()
    served = run(made, grid, patience=flower.Patience(call=2.0))
    # client 3 is of its cohort, of which no secure sum is without the other
    assert served.dropped_ == {1: [1, 2, 3], 3: [1, 2]}
    assert len(served.history_) == 2
    # keys are asked for five times, and the server waits once a round
    assert time.monotonic() - began < 5 * 3 * 2.0


@pytest.mark.parametrize("ahead", [-1e6, 3e5])
def test_deadlines_are_by_each_node_s_own_clock(
    ahead: float, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(time=lambda: time.time() + ahead)
    monkeypatch.setattr(party, "time", clock)
    monkeypatch.setattr(endpoint, "time", clock)
    deadlines = []

    class Reading(Grid):
        def reply_to(self, message: Message) -> Message | None:
            if message.metadata.message_type == "query.frame":
                deadlines.append(wire.peek(flower.bytes_of(message.content)).deadline)
            return super().reply_to(message)

    made = FedAvg(**SMALL, clip=1.0, noise=1.0, aggregation="plain")
    served = run(made, Reading(apps(made, federation, tmp_path)))
    assert served.refused_ == {} and served.dropped_ == {}
    due = [deadline - clock.time() for deadline in deadlines]
    assert all(3500 < seconds < 3700 for seconds in due)


def test_what_is_answered_too_late_is_not_released(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = FedAvg(**SMALL, clip=1.0, noise=1.0, aggregation="plain")
    slept: list[str] = []

    class Sleeping(Grid):
        """Flower's grid, whose client 1 sleeps over the deadline of its first release."""

        def reply_to(self, message: Message) -> Message | None:
            mine = message.metadata.dst_node_id == 101
            data = flower.bytes_of(message.content)
            first = message.metadata.message_type == "query.frame" and not slept
            if mine and first and wire.peek(data).method == "contribute":
                slept.append("contribute")
                with monkeypatch.context() as patch:
                    later = SimpleNamespace(time=lambda: time.time() + 4000)
                    patch.setattr(endpoint, "time", later)
                    return super().reply_to(message)
            return super().reply_to(message)

    with pytest.warns(SecureClusterWarning, match="the request's deadline had passed"):
        served = run(made, Sleeping(apps(made, federation, tmp_path)))
    assert slept and served.refused_ == {1: {"late": [1]}}
    released = [event for event in served.ledger_.events if 1 in event.ids]
    own = (tmp_path / "node-1" / "ledger-client.jsonl").read_text().count('"event"')
    assert len(released) == own == 1


def test_a_server_that_all_clients_refuse_for_one_reason_stops_with_it(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second server of one number that lacks the checkpoint of the first."""
    monkeypatch.setattr(run_number, "drawn", lambda: "ab" * 16)
    grid = Grid(apps(FEDAVG, federation, tmp_path))
    run(FEDAVG, grid)
    asked = len(grid.asked)
    with pytest.warns(SecureClusterWarning), pytest.raises(RefusedError) as told:
        run(FEDAVG, grid)
    assert told.value.code == "stale"
    assert str(told.value).startswith("all clients refuse, ")
    assert "it has moved on from what the request is about" in str(told.value)
    assert len(grid.asked) - asked < 8 * CLIENTS  # no further round


def test_the_same_job_runs_twice_on_the_same_nodes(federation: Federation, tmp_path: Path) -> None:
    made = FedAvg(**SMALL, clip=1.0, noise=1.0, aggregation="plain")
    grid = Grid(apps(made, federation, tmp_path))
    runs = [run(made, grid, folder=tmp_path / name) for name in ("first", "second")]
    assert [fitted.refused_ for fitted in runs] == [{}, {}]
    numbers = {fitted.kept_.learned.config["run"] for fitted in runs}
    assert len(numbers) == 2
    own = Node(made, federation.select([0]), tmp_path / "node-0", number=0)
    both = Ledger.union(*(fitted.ledger_ for fitted in runs))
    assert own.spent() == {"client": pytest.approx(both.price(own.policy.delta).epsilon)}
    with pytest.raises(RunFolderError, match="has ended"):
        run(made, Grid([]), folder=tmp_path / "first")


def test_an_app_that_ended_is_asked_again(federation: Federation, tmp_path: Path) -> None:
    class Ending(Grid):
        ended = False

        def reply_to(self, message: Message) -> Message | None:
            asked_for_keys = message.metadata.message_type == "query.frame"
            if asked_for_keys and message.metadata.dst_node_id == 101 and not self.ended:
                self.ended = True
                return Message(Error(code=0, reason="ended"), reply_to=message)
            return super().reply_to(message)

    made = METHODS["fedavg, secagg"]
    grid = Ending(apps(made, federation, tmp_path))
    served = run(made, grid, patience=flower.Patience(call=30.0))
    assert grid.ended and served.dropped_ == {}


def test_an_answer_that_is_none_refuses_that_client(federation: Federation, tmp_path: Path) -> None:
    def fault(message: Message) -> Message | None:
        if (message.metadata.src_node_id, message.metadata.message_type) == (102, "query.frame"):
            message.content = flower.record_of(b"junk")
        return message

    with pytest.warns(UserWarning):
        served = run(FEDAVG, Grid(apps(FEDAVG, federation, tmp_path), fault))
    assert served.refused_ == {2: {"frame": [1, 2, 3]}}


def test_a_function_that_fails_refuses_that_client_and_tells_nothing_else(
    federation: Federation, tmp_path: Path
) -> None:
    told: list[bytes] = []

    def listen(message: Message) -> Message | None:
        if message.metadata.message_type == "query.frame":
            told.append(flower.bytes_of(message.content))
        return message

    made = FedAvg(rounds=2, model=ForeignModel([np.zeros((10, 64))], fails_at_client_2))
    with pytest.warns(UserWarning):
        served = run(made, Grid(apps(made, federation, tmp_path), listen))
    assert served.refused_.keys() == {2}
    assert told and not any(b"private" in data or b"ValueError" in data for data in told)


def test_a_client_that_does_not_agree_ends_the_run_before_it_begins(
    federation: Federation, tmp_path: Path
) -> None:
    noisy = FedAvg(**SMALL, clip=1.0, noise=1.0)
    grid = Grid(apps(noisy, federation, tmp_path))
    with pytest.raises(RefusedError, match="client 0: the node refused the run: its own protocol"):
        run(FedAvg(**SMALL, clip=1.0, noise=0.1), grid)
    assert set(grid.asked) == {"query.introduce", "query.agree"}


SHIM = Path(flower.__file__).with_name("flower_shim.py")


def test_the_shim_hands_bytes_to_the_agents_and_back(
    federation: Federation, tmp_path: Path
) -> None:
    made = METHODS["fedavg, secagg"]
    policy = Policy(roster=False)
    agents = []
    for i in range(CLIENTS):
        node = Node(made, federation.select([i]), tmp_path / f"n{i}", number=i, policy=policy)
        agents.append(Agent(node, tmp_path / f"s{i}"))
    threads = [Thread(target=agent.serve) for agent in agents]
    for thread in threads:
        thread.start()
    shim = runpy.run_path(str(SHIM))["client_app"]

    class WithSockets(Grid):
        def config_of(self, node: int) -> dict[str, Any]:
            return {"socket": str(tmp_path / f"s{node - 100}")}

    served = run(made, WithSockets([shim] * CLIENTS))
    for agent, thread in zip(agents, threads, strict=True):
        agent.stop()
        thread.join()
    whole = made.fit(federation, Settings(threads=1))
    assert pack(served.state_) == pack(whole.state_)
    assert served.transcript_.totals()["up"] == whole.bytes_["up"]


def test_the_shim_imports_neither_torch_nor_this_package() -> None:
    code = (
        f"import runpy, sys; runpy.run_path({str(SHIM)!r}); "
        "print([name for name in ('torch', 'securecluster') if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip().endswith("[]")


def test_missing_clients_are_named_after_a_while(federation: Federation, tmp_path: Path) -> None:
    grid = Grid(apps(FEDAVG, federation, tmp_path)[:2])
    with pytest.raises(UsageError, match="not there: client 2, client 3;"):
        run(FEDAVG, grid, patience=flower.Patience(start=0.1))


@pytest.mark.parametrize("content", [RecordDict(), flower.record_of(b"")])
def test_bytes_are_read_or_refused(content: RecordDict) -> None:
    if not content:
        with pytest.raises(FrameError, match="no bytes"):
            flower.bytes_of(content)
    else:
        assert flower.bytes_of(content) == b""
    data = bytes(range(256))
    assert flower.bytes_of(flower.record_of(data)) == data
    assert np.frombuffer(data, np.uint8).size == 256


def test_a_sum_asks_all_clients_at_once_and_adds_replies_as_they_arrive() -> None:
    # of 70 clients 40 has no node, 65 does not reply, and the others do in any order
    clients = 70
    events: list[str] = []

    class Slow(Grid):
        def reply_to(self, message: Message) -> Message | None:
            node = message.metadata.dst_node_id
            if node == 165:
                return None
            header = wire.peek(flower.bytes_of(message.content))
            reply = wire.encode(reply_header(header), Ack())
            return Message(flower.record_of(reply), reply_to=message)

        def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
            events.append("pull")
            arrived = [self.replies.pop(i) for i in sorted(numbers) if i in self.replies]
            return arrived[::-1]

    grid = Slow([])
    nodes = {i: 100 + i for i in range(clients) if i != 40}
    patience = flower.Patience(call=0.2)
    over = flower.FlowerTransport(grid, nodes, lambda name: Ack, lambda *_: None, patience)
    to = tuple(range(clients))
    call = Call("c" * 32, "receive", "sum", 1, 1, to, Empty(), (clients,) * clients)
    parts = list(over.stream(call, 32))
    assert len(grid.asked) == clients - 1
    assert [len(part.to) for part, _ in parts] == [32, 32, 6]
    assert [len(response.ids) for _, response in parts] == [32, 31, 5]
    assert [i for _, response in parts for i in response.ids] == [
        i for i in range(clients) if i not in (40, 65)
    ]
    # 65 is away for the rest of the round
    before = len(events)
    assert over.exchange(call.select([64, 65])).ids == (64,)
    assert len(events) == before + 1
    assert over.exchange(dataclasses.replace(call, round=2).select([64])).ids == (64,)


# --- the options of an app ---


def test_an_app_takes_its_options_from_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(bytes(32))
    (tmp_path / "roster").write_text(f"{Identity.generate().public.hex()}\n")
    config = {
        "clients": 3, "seed": 7, "classes": 10, "seconds": 5, "out": str(tmp_path / "out"),
        "roster": str(tmp_path / "roster"), "key": str(tmp_path / "key"),
    }  # fmt: skip
    options = flower.configured(config)
    roster = options.pop("roster")
    assert roster.size == 1
    assert options == {
        "clients": 3, "seed": 7, "classes": 10, "scores": False,
        "patience": flower.Patience(call=5.0), "folder": tmp_path / "out", "key": bytes(32),
    }  # fmt: skip
    empty = flower.configured({"classes": 0, "roster": "", "key": "", "out": ""})
    assert empty == {"classes": None, "scores": False, "patience": flower.Patience()}
    for name in ("missing", "roster"):
        with pytest.raises(UsageError, match="32 secret bytes"):
            flower.configured({"key": str(tmp_path / name)})
    assert flower.newcomers_of({"joins": "3 14"}) == [3, 14]
    assert flower.newcomers_of({"joins": ""}) == flower.newcomers_of({}) == []
    for joins in ("3,4", "-1", "²"):
        with pytest.raises(UsageError, match="numbers on the roster"):
            flower.newcomers_of({"joins": joins})


@pytest.mark.parametrize("name", ["fedavg, secagg", "oneshot, ckks"])
def test_a_simulated_node_keeps_its_folder_and_its_data_between_messages(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    loads: list[int] = []

    def load(number: int, clients: int) -> Federation:
        loads.append(number)
        return federation.select([number])

    made = {**METHODS, **ENCRYPTED}[name]
    partitions = CLIENTS + (name in ENCRYPTED)
    config = {"out": str(tmp_path / "first"), "clients": CLIENTS, "seed": 0, "classes": 10}

    class Simulation(Grid):
        def reply_to(self, message: Message) -> Message | None:
            kind = message.metadata.message_type.removeprefix("query.")
            number = message.metadata.dst_node_id - 100
            parts = {"partition-id": number, "num-partitions": partitions}
            context = Context(1, number, parts, RecordDict(), config)
            return flower.simulated(kind, message, context, made, load)

    key = bytes(range(32)) if name in ENCRYPTED else None
    fitted = run(made, Simulation([None] * partitions), folder=tmp_path / "first", key=key)
    whole = made.fit(federation, Settings(threads=1))
    assert pack(fitted.state_) == pack(whole.state_)
    assert sorted(loads) == list(range(CLIENTS))
    assert (tmp_path / "first-nodes" / "node-0").is_dir()


def test_calls_that_do_not_wait_for_each_other_go_out_together() -> None:
    pulls: list[int] = []

    class Late(Grid):
        def reply_to(self, message: Message) -> Message | None:
            header = wire.peek(flower.bytes_of(message.content))
            if header.recipient == "client/2":
                return None
            reply = wire.encode(reply_header(header), Ack())
            return Message(flower.record_of(reply), reply_to=message)

        def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
            pulls.append(len(list(numbers)))
            return super().pull_messages(numbers)

    grid = Late([])
    patience = flower.Patience(call=0.5)
    nodes = {i: 100 + i for i in range(4)}
    over = flower.FlowerTransport(grid, nodes, lambda name: Ack, lambda *_: None, patience)
    # client 1 is in two of the calls
    calls = [
        Call("c" * 32, "receive", "gather", 1, step, to, Empty(), (1,) * len(to))
        for step, to in enumerate([(1, 0), (1,), (2, 3)], start=1)
    ]
    responses = over.exchange_all(calls)
    assert pulls[0] == 5
    assert [response.ids for response in responses] == [(1, 0), (1,), (3,)]


def test_a_call_that_is_begun_is_with_its_nodes_before_it_is_collected() -> None:
    class Acknowledging(Grid):
        def reply_to(self, message: Message) -> Message | None:
            header = wire.peek(flower.bytes_of(message.content))
            reply = wire.encode(reply_header(header), Ack())
            return Message(flower.record_of(reply), reply_to=message)

    grid = Acknowledging([])
    nodes = {i: 100 + i for i in range(3)}
    over = flower.FlowerTransport(grid, nodes, lambda name: Ack, lambda *_: None)
    lone = Call("c" * 32, "receive", "gather", 1, 1, (2,), Empty(), (1,))
    others = Call("c" * 32, "receive", "gather", 1, 2, (1, 0), Empty(), (1, 1))
    finish = over.begin(lone)
    assert len(grid.asked) == 1
    assert over.exchange(others).ids == (1, 0)
    assert finish().ids == (2,)
    assert len(grid.asked) == 3


# --- newcomers ---


@pytest.mark.parametrize("options", [{}, {"clip": 1.0, "noise": 0.01, "dp_unit": "example"}])
def test_a_newcomer_s_node_joins_a_finished_run(
    options: dict[str, Any],
    federation: Federation,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = Signature(**SMALL, mask="rotation", **options)
    identities = [Identity.generate() for _ in range(CLIENTS)]
    roster = Roster({i: one.public for i, one in enumerate(identities)})
    everybody = apps(made, federation, tmp_path, identities, roster)
    out = tmp_path / "server"
    run(made, Grid(everybody), clients=CLIENTS - 1, roster=roster, folder=out)
    context: Any = SimpleNamespace(run_id=2)
    new = CLIENTS - 1

    def first_host_is_gone(message: Message) -> Message | None:
        kind = message.metadata.message_type
        gone = message.metadata.src_node_id == 100 and kind == "query.frame"
        return None if gone else message

    grid = Grid(everybody, first_host_is_gone)
    patience = flower.Patience(call=1.0)
    context.run_config = {"joins": f"{new}", "out": str(out)}
    seen: list[Any] = []
    flower.server_app(made, roster=roster, patience=patience, done=seen.append)(grid, context)
    (joined,) = seen
    assert f"client {new} joins cluster {joined.labels[0]}" in capsys.readouterr().out
    drawn = run_folder.run_config(out)["network"]["seed"]
    of_run = dataclasses.replace(federation.select(range(new)), seed=drawn)
    whole = made.fit(of_run, Settings(threads=1))
    if not options:
        assert list(joined.labels) == whole.join(federation.select([new])).tolist()
    assert [e.method for e in joined.ledger.events]
    absent = Grid(everybody[:new])
    patience = flower.Patience(start=0.5)
    with pytest.raises(UsageError, match="not there: client 3;"):
        flower.join(absent, context, made, out, [new], roster=roster, patience=patience)
    with pytest.raises(RefusedError, match="client 1: the node refused the run"):
        flower.join(Grid(everybody), context, made, out, [1], roster=roster)


@pytest.mark.parametrize(
    ("asked", "code"), [(1, None), (2, None), (3, None), (2, "failed"), (2, "ok")]
)
def test_a_client_that_keeps_a_run_from_beginning_is_named(
    asked: int, code: str | None, federation: Federation, tmp_path: Path
) -> None:
    """One of the three exchanges of an agreement has no answer, or a wrong one."""
    made = METHODS["fedavg, secagg"]
    identities = [Identity.generate() for _ in range(CLIENTS)]
    roster = Roster({i: one.public for i, one in enumerate(identities)})
    everybody = apps(made, federation, tmp_path, identities, roster)
    told: list[Message] = []

    def fault(message: Message) -> Message | None:
        of_two = message.metadata.src_node_id == 102
        if of_two and message.metadata.message_type == "query.agree":
            told.append(message)
            if len(told) == asked:
                if code is None:
                    return None
                message.content = record_of(b"no nonce", code)
        return message

    patience = flower.Patience(call=0.3)
    with pytest.raises(RefusedError, match=r"^client 2"):
        run(made, Grid(everybody, fault), roster=roster, patience=patience)
    assert len(told) == asked
    first = run(made, Grid(everybody), roster=roster).kept_.learned.config
    again = run(made, Grid(everybody), roster=roster).kept_.learned.config
    assert first["cohort_seed"] == again["cohort_seed"] and first["seed"] != again["seed"]


# --- a key authority ---

ENCRYPTED = {
    "oneshot, ckks": OneShot(**SMALL, relevance="ckks", mask="none", sealed=False),
    "oneshot, ckks and secagg": OneShot(**SMALL, relevance="ckks", aggregation="secagg"),
}


@pytest.mark.parametrize("name", ENCRYPTED)
def test_a_key_authority_is_one_of_flower_s_nodes(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    made = ENCRYPTED[name]
    identities = [Identity.generate() for _ in range(CLIENTS + 1)]
    keys = {i: one.public for i, one in enumerate(identities[:-1])}
    roster = Roster({**keys, AUTHORITY_NUMBER: identities[-1].public})
    clients = apps(made, federation, tmp_path, identities, roster)
    everybody = [*clients, authority_app(made, tmp_path, identities[-1], roster)]
    served = run(made, Grid(everybody), roster=roster, key=bytes(range(32)))
    drawn = dataclasses.replace(federation, seed=served.kept_.learned.config["seed"])
    whole = made.fit(drawn, Settings(threads=1))
    assert list(served.labels_) == list(whole.labels_)
    assert served.bytes_ == whole.bytes_
    assert served.dropped_ == {} and served.refused_ == {}
    patience = flower.Patience(start=2.0)
    with pytest.raises(UsageError, match="are not there: the key authority;"):
        run(made, Grid(clients), roster=roster, key=bytes(32), patience=patience)


def test_an_authority_that_stops_answering_ends_the_run_by_a_sentence(
    federation: Federation, tmp_path: Path
) -> None:
    made = ENCRYPTED["oneshot, ckks"]

    def fault(message: Message) -> Message | None:
        gone = message.metadata.src_node_id == 104
        return None if gone and message.metadata.message_type == "query.frame" else message

    everybody = [*apps(made, federation, tmp_path), authority_app(made, tmp_path, None, None)]
    patience = flower.Patience(call=0.3)
    with pytest.raises(FrameError, match="the key authority does not reply: start it, and resume"):
        run(made, Grid(everybody, fault), key=bytes(range(32)), patience=patience)


# --- scores ---


def test_clients_tell_their_scores_where_they_are_asked_and_their_owners_allow_it(
    federation: Federation, tmp_path: Path
) -> None:
    (tmp_path / "second").mkdir()
    whole = FEDAVG.fit(federation, Settings(threads=1))
    grid = Grid(apps(FEDAVG, federation, tmp_path))
    assert np.isnan(run(FEDAVG, grid).scores_).all()
    assert "query.score" not in grid.asked

    def junk(message: Message) -> Message | None:
        if (message.metadata.src_node_id, message.metadata.message_type) == (101, "query.score"):
            message.content = flower.record_of(b"[1]")
        return message

    second = Grid(apps(FEDAVG, federation, tmp_path / "second"), junk)
    told = run(FEDAVG, second, scores=True)
    expected = whole.scores_.copy()
    expected[1] = np.nan
    np.testing.assert_array_equal(told.scores_, expected)
