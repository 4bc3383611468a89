"""Status of runs and nodes, events and metrics: they say what happened, and nothing of data."""

from __future__ import annotations

import json
import stat
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest

from securecluster import Federation, Settings
from securecluster.cli.main import main
from securecluster.data.facts import agree
from securecluster.errors import UsageError
from securecluster.messaging import wire
from securecluster.messaging.transcript import load_entries
from securecluster.nodes import events
from securecluster.nodes.agent import AGREE, FRAME, Agent, ask
from securecluster.nodes.node import Node
from securecluster.nodes.policy_file import PolicyFile
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.server_run import ServerRun
from securecluster.nodes.status import NodeStatus
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import as_agreed, call_types
from securecluster.privacy.masking.identities import Identity
from securecluster.protocols import FedAvg
from securecluster.reports.run_status import RunStatus
from securecluster.runtime.transport import Framed

CLIENTS = 3
POLICY = 'roster = false\nunit = "client"\nmost_epsilon = 500.0\n'
CANARIES = ("9182736", "canary")  # digits of samples, and labels
# the server warns of the client that fails
pytestmark = pytest.mark.filterwarnings("ignore:client/2 refused|site-2 refused")
MADE = FedAvg(rounds=3, epochs=1, model="linear", clip=1.0, noise=2.0, dp_unit="client")


def with_canaries() -> Federation:
    """Clients whose samples and labels can be searched for."""
    rng = np.random.default_rng(0)
    labels = ["canary-flu", "canary-cold"]
    arrays = {}
    for k in range(CLIENTS):
        x = rng.random((30, 4))
        x[:, 0] = 0.9182736
        arrays[f"site-{k}"] = (x, np.array([labels[row % 2] for row in range(30)]))
    return Federation.from_arrays(arrays, seed=0, classes=labels)


@contextmanager
def served(node: Node) -> Iterator[Path]:
    agent = Agent(node, node.folder / "socket", events.to_file(node.folder))
    thread = Thread(target=agent.serve)
    thread.start()
    yield agent.path
    agent.stop()
    thread.join()


@pytest.fixture
def nodes(tmp_path: Path) -> list[Node]:
    federation = with_canaries()
    made = []
    for i in range(CLIENTS):
        folder = tmp_path / f"node-{i}"
        folder.mkdir(mode=0o700)
        (folder / "policy.toml").write_text(POLICY)
        Identity.generate().save(folder / "identity.key")
        policy = PolicyFile(folder / "policy.toml")
        made.append(Node(MADE, federation.select([i]), folder, number=i, policy=policy))
    return made


def carried_out(nodes: list[Node], folder: Path) -> None:
    """Carry out a run over agents, of which the last one fails from round 2 on with a text that
    has data.
    """
    answered = nodes[-1]._answered

    def failing(frame: bytes) -> bytes:
        if wire.peek(frame).round > 1:
            raise ValueError(f"a sample has {with_canaries().shards[0].x[0]} and is canary-flu")
        return answered(frame)

    nodes[-1]._answered = failing  # type: ignore[method-assign]
    with ExitStack() as stack:
        paths = [stack.enter_context(served(node)) for node in nodes]
        facts = agree([node.facts() for node in nodes], seed=0, classes=2)
        proposal = Proposal.of(MADE, facts, "float32", None)
        for path in paths:
            ask(path, AGREE, proposal.packed())
        made = as_agreed(MADE, proposal.config)
        doors = {i: partial(ask, path, FRAME) for i, path in enumerate(paths)}
        check = Deployment(made, proposal.config).reply_check()
        transport = Framed(doors, lambda name: call_types(made, name)[1], strict=False, check=check)
        names = [f"site-{k}" for k in range(CLIENTS)]
        ServerRun(made, proposal.config, transport, names).carried_out(folder)


def rounds(node: Node) -> list[int]:
    return list(NodeStatus.of(node.folder).rounds.values())


def told_by(capsys: pytest.CaptureFixture[str], *folders: Path) -> tuple[str, list[Any]]:
    """What `status` prints of some folders, and its JSON."""
    contents = []
    text = ""
    for folder in folders:
        assert main(["status", str(folder)]) == 0
        text += capsys.readouterr().out
        assert main(["status", str(folder), "--json"]) == 0
        line = capsys.readouterr().out
        contents.append(json.loads(line))
        text += line
    return text, contents


@pytest.mark.always
def test_status_and_events_say_what_happened_and_nothing_of_data(
    nodes: list[Node], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "server"
    carried_out(nodes, folder)
    text, (of_run, *of_nodes) = told_by(capsys, folder, *(node.folder for node in nodes))
    entries = load_entries(folder / "transcript")
    for i, (node, told) in enumerate(zip(nodes, of_nodes, strict=True)):
        path = node.folder / "events.jsonl"
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        frames = [event for event in events.read(node.folder) if event.kind == "frame"]
        # beside what the server wrote down
        calls = [(entry, entry.to.index(i)) for entry in entries if i in entry.to]
        assert [event.method for event in frames] == [entry.method for entry, _ in calls]
        assert [event.received for event in frames] == [entry.down[k] for entry, k in calls]
        replied = [entry.up[k] for entry, k in calls if i not in entry.lost]
        assert [event.sent for event in frames if event.outcome == "ok"] == replied
        assert {event.round for event in frames} == {entry.round for entry, _ in calls}
        assert told["epsilon"][0]["spent"] == node.spent("client")["client"]
        assert told["epsilon"][0]["left"] == 500.0 - told["epsilon"][0]["spent"]
        assert told["served"] is False and list(told["rounds"].values()) == rounds(node)
        text += path.read_text()
    assert of_nodes[0]["refusal"] is None
    assert of_nodes[-1]["refusal"]["code"] == "failed"
    assert of_nodes[-1]["messages"]["frame failed"] >= 1
    assert of_run["answered"] == ["site-0", "site-1"]
    assert of_run["silent"] == {"site-2": "failed"}
    assert of_run["refusal"][:2] == ["site-2", "failed"]
    result = json.loads((folder / "result.json").read_text())
    assert of_run["epsilon"] == result["privacy"]["epsilon"]
    assert (of_run["up"], of_run["down"]) == (result["bytes"]["up"], result["bytes"]["down"])
    assert "1 clients" not in text and "ended; round 3 of 3" in text
    assert not [canary for canary in CANARIES if canary in text]


def test_prometheus_reads_the_same_on_loopback_and_nothing_of_data(
    nodes: list[Node], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    from prometheus_client.parser import text_string_to_metric_families

    from securecluster.nodes import metrics

    carried_out(nodes, tmp_path / "server")
    node = nodes[-1]
    server = metrics.serve(node.folder, 0)
    try:
        host, port = server.server_address[:2]
        assert host == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as reply:
            text = reply.read().decode()
        with pytest.raises(UsageError, match="give a free one"):
            metrics.serve(node.folder, port)
    finally:
        server.shutdown()
        server.server_close()
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    status = NodeStatus.of(node.folder)
    assert samples["securecluster_messages_total", "frame", "failed"] >= 1
    assert samples["securecluster_bytes_total", "received"] == status.received
    assert samples["securecluster_bytes_total", "sent"] == status.sent
    ((run, number),) = status.rounds.items()
    assert samples["securecluster_round", run] == number
    spent = node.spent("client")["client"]
    assert samples["securecluster_epsilon_spent", "client"] == pytest.approx(spent)
    assert samples["securecluster_epsilon_left", "client"] == pytest.approx(500 - spent)
    assert not [canary for canary in CANARIES if canary in text]


def test_a_run_tells_where_it_stands_while_it_is_under_way(
    federation: Federation, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"model": "linear", "clip": 1.0, "noise": 1.0, "batch_size": 5}
    short = FedAvg(rounds=2, **options, dp_unit="example").fit(federation, folder=tmp_path / "a")
    seen: list[RunStatus] = []
    folder = tmp_path / "b"

    def look(line: dict[str, Any]) -> None:
        seen.append(RunStatus.of(folder))
        if line["round"] == 2:
            raise KeyboardInterrupt

    made = FedAvg(rounds=5, **options, dp_unit="example")
    with pytest.raises(KeyboardInterrupt):
        made.fit(federation, Settings(transcript="full"), folder=folder, report=look)
    assert [one.state for one in seen] == ["under way", "under way"]
    assert [(one.round, one.rounds) for one in seen] == [(1, 5), (2, 5)]
    after = RunStatus.of(folder)
    assert after.state.startswith("not ended") and after.answered == list(federation.names)
    assert after.known and after.epsilon == pytest.approx(short.ledger_.price().epsilon)
    text, _ = told_by(capsys, folder)
    assert "round 2 of 5" in text and f"{CLIENTS} clients answered" in text


@pytest.mark.parametrize("arguments", [[], ["no-such-folder"], ["."]])
def test_status_of_what_is_neither_run_nor_node_is_one_sentence(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["status", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("securecluster: ") and told.count("\n") == 1
