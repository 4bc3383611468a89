"""`securecluster node`: the folder, the agent in a process of its own, and the ledger."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from securecluster import Federation, LabelSwap, Settings
from securecluster.cli.main import main
from securecluster.cli.node_command import _node_of
from securecluster.errors import RefusedError, SecureClusterError
from securecluster.messaging import wire
from securecluster.messaging.messages import AUTHORITY_CALL, Call
from securecluster.messaging.transcript import Transcript
from securecluster.nodes.agent import AGREE, FACTS, FRAME, SCORE, Agent, ask
from securecluster.nodes.agreement import agreed, agreed_among
from securecluster.nodes.authority_node import AuthorityNode
from securecluster.nodes.node import Node
from securecluster.nodes.party import Party
from securecluster.nodes.proposal import Proposal
from securecluster.parties.derived import call_types
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Identity, Roster
from securecluster.protections.encryption.messages import AuthorityRequest
from securecluster.protocols import FedAvg
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.transport import Framed

CLIENTS = 3
SIMULATED = (
    'Federation.simulate("digits", scenario=LabelSwap(clusters=1), clients=3, samples=20, seed=0)'
)
PROJECT = f"""\
import os
from securecluster import Federation, FedAvg, LabelSwap
protocol = FedAvg(rounds=3, epochs=1, model="linear", aggregation="secagg")
def load():
    return {SIMULATED}.select([int(os.environ["OWN"])])
"""


def init(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["node", "init", str(folder)]) == 0
    return capsys.readouterr().out.strip()


@pytest.fixture
def folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[Path]:
    """Folders of three nodes with one roster, beside the module of their project."""
    (tmp_path / "own_project.py").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    made = [Path(f"n{i}") for i in range(CLIENTS)]
    roster = "# the clients\n" + "\n".join(init(folder, capsys) for folder in made)
    for folder in made:
        (folder / "roster.txt").write_text(roster)
    return made


def start(folder: Path, client: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "securecluster", "node", "serve", str(folder)]
    process = subprocess.Popen(
        [*command, "--app", "own_project"],
        env={**os.environ, "OWN": str(client), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert f"client {client} of fedavg answers at {folder}/socket" in line
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


@pytest.fixture
def agents(folders: list[Path]) -> Iterator[list[subprocess.Popen[str]]]:
    running = [start(folder, i) for i, folder in enumerate(folders)]
    yield running
    for process in running:
        end(process)


def test_a_folder_has_a_key_of_its_own_and_a_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "node"
    public = init(folder, capsys)
    assert Identity.load(folder / "identity.key").public.hex() == public
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for name in ("identity.key", "policy.toml"):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    assert main(["node", "init", str(folder)]) == 2
    assert "has an identity already" in capsys.readouterr().err
    assert Identity.load(folder / "identity.key").public.hex() == public
    assert main(["node", "ledger", str(folder)]) == 0
    assert capsys.readouterr().out == "this client has released nothing\n"


def test_a_run_over_processes_survives_the_death_of_a_node(
    folders: list[Path], agents: list[subprocess.Popen[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    roster = Roster.load(folders[0] / "roster.txt")
    federation = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=1), clients=CLIENTS, samples=20, seed=0
    )
    made = FedAvg(rounds=3, epochs=1, model="linear", aggregation="secagg")
    proposal = Proposal.of(made, federation.facts, "float32", roster)

    messages: list[Mapping[int, bytes]] = []

    def agree(sent: Mapping[int, bytes]) -> dict[int, str]:
        messages.append(sent)
        if len(messages) == 2:  # between a commitment and its nonce: kill -9, and start it again
            end(agents[0])
            agents[0] = start(folders[0], 0)
        return {i: ask(folders[i] / "socket", AGREE, data).decode() for i, data in sent.items()}

    proposal = agreed(proposal, roster, [*range(CLIENTS)], agree)
    assert len(messages) > 2
    killed: list[int] = []

    def door(client: int) -> Any:
        def answer(frame: bytes) -> bytes:
            if b"contribute" in frame[:300] and client == 1 and len(killed) < 2:
                killed.append(client)
                if len(killed) == 2:  # in the second round: kill -9, and start it again
                    end(agents[1])
                    agents[1] = start(folders[1], 1)
            return ask(folders[client] / "socket", FRAME, frame)

        return answer

    transport = Framed({i: door(i) for i in range(CLIENTS)}, lambda name: call_types(made, name)[1])
    half = ServerHalf.over(transport, made, proposal.config, Transcript("full"))
    state = half.final_state(half.started())
    assert len(killed) == 2
    drawn = replace(federation, seed=proposal.config["seed"])
    whole = made.fit(drawn, Settings(threads=1))
    assert list(state.labels) == list(whole.labels_)
    found = half.net.state.ledger.events
    assert [e.method for e in found] == [e.method for e in whole.ledger_.events]
    assert half.net.state.lost == {}
    # the client's own word on what it has released
    assert main(["node", "ledger", str(folders[1])]) == 0
    assert "inf" in capsys.readouterr().out


def test_sigterm_ends_an_agent(folders: list[Path]) -> None:
    process = start(folders[0], 0)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert process.wait(timeout=20) == 0
    assert time.monotonic() - began < 20
    assert process.stdout is not None
    process.stdout.close()
    assert not (folders[0] / "socket").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["node"], ""),
        (["node", "nothing"], "unknown action of node 'nothing'"),
        (["node", "init"], "takes the node's folder"),
        (["node", "ledger", "n0", "more"], "leave out more"),
        (["node", "ledger", "nowhere"], "no node's folder"),
        (["node", "revoke", "nowhere", "ab"], "no node's folder"),
        (["node", "revoke", "n0"], "takes the node's folder and a run"),
        (["node", "revoke", "n0", "ab", "cd"], "takes the node's folder and a run"),
        (["node", "revoke", "n0", "ab"], "it takes part in no run"),
        (["node", "serve", "nowhere", "--app", "own_project"], "no node's folder"),
        (["node", "serve", "n0", "--app", "nothing"], "gives no protocol and no data"),
        (["node", "serve", "n0", "--app", "json"], "gives no protocol and no data"),
        (["node", "serve", "n0", "--app", "half"], "needs protocol, an object"),
    ],
)
def test_a_mistake_is_one_sentence(
    arguments: list[str], sentence: str, folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("half.py").write_text("protocol = 1\ndef load():\n    return 2\n")
    assert main(arguments) == 2
    said = capsys.readouterr()
    if sentence:
        assert sentence in said.err and said.err.count("\n") == 1


def test_a_folder_without_a_roster_is_not_served(
    folders: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (folders[0] / "roster.txt").unlink()
    assert main(["node", "serve", str(folders[0]), "--app", "own_project"]) == 2
    assert "has no roster.txt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("xyz", "no public key of 64"),
        ("00" * 31, "no public key of 64"),
        (f"{'ab' * 32} hospital\n{'ab' * 32}", "client 1 is there twice"),
        ("authority", "no public key of 64"),
        (f"authority {'ab' * 32}\nauthority {'cd' * 32}", "the key authority is there twice"),
        (f"{'ab' * 32}\nauthority {'ab' * 32}", "the key authority is there twice"),
    ],
)
def test_a_roster_that_is_none_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "roster.txt"
    path.write_text(text)
    with pytest.raises(SecureClusterError, match=sentence):
        Roster.load(path)
    with pytest.raises(SecureClusterError, match="no roster that can be read"):
        Roster.load(tmp_path / "nothing")


def test_a_roster_is_read_with_its_notes(tmp_path: Path) -> None:
    first, second = Identity.generate().public, Identity.generate().public
    path = tmp_path / "roster.txt"
    path.write_text(f"# clients\n{first.hex()} hospital A\n\n{second.hex()}  # hospital B\n")
    roster = Roster.load(path)
    assert (roster.key(0), roster.key(1), roster.key(2)) == (first, second, None)
    assert (roster.number(second), roster.number(bytes(32))) == (1, None)


def test_a_key_authority_has_a_line_of_its_own_and_no_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_authority.py").write_text(
        "from securecluster import OneShot\n"
        'protocol = OneShot(rounds=1, epochs=1, model="linear", relevance="ckks")\n'
        'def load():\n    raise OSError("the authority has no data")\n'
    )
    clients = [init(tmp_path / f"c{i}", capsys) for i in range(2)]
    folder = Path("a")
    assert main(["node", "init", str(folder), "--role", "authority"]) == 0
    line = capsys.readouterr().out.strip()
    word, key = line.split()
    assert word == "authority"
    # wherever the line is: clients' numbers are those of their own lines
    (folder / "roster.txt").write_text("\n".join([clients[0], line, clients[1]]))
    roster = Roster.load(folder / "roster.txt")
    assert roster.size == 2
    assert roster.number(bytes.fromhex(clients[1])) == 1
    assert roster.key(AUTHORITY_NUMBER) == bytes.fromhex(key)
    made = _node_of(folder, "own_authority")
    assert isinstance(made, AuthorityNode)
    federation = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=1), clients=2, samples=20, seed=0
    )
    proposal = Proposal.of(made.method, federation.facts, "float32", roster)
    nodes: list[Party] = []
    for i in range(2):
        place = tmp_path / f"c{i}"
        identity = Identity.load(place / "identity.key")
        own = federation.select([i])
        nodes.append(Node(made.method, own, place, identity=identity, roster=roster))
    proposal = agreed_among(proposal, roster, nodes)
    with running(made) as path:
        ask(path, AGREE, proposal.packed())
        for kind in (FACTS, SCORE):  # it has neither
            with pytest.raises(RefusedError):
                ask(path, kind)
        call = Call(
            config=config_hash(proposal.config),
            method="authority_key",
            verb=AUTHORITY_CALL,
            round=0,
            step=1,
            to=(0,),
            query=AuthorityRequest("ckks"),
            members=(1,),
        )
        frame = wire.encode(call.header(0), call.query)
        assert b"!refused" not in ask(path, FRAME, frame)
    assert main(["node", "ledger", str(folder)]) == 0
    told = capsys.readouterr().out
    assert "authority_key" in told and "answered" in told


@contextmanager
def running(node: Party) -> Iterator[Path]:
    """The socket of an agent in a thread."""
    agent = Agent(node, node.folder / "socket")
    thread = Thread(target=agent.serve)
    thread.start()
    yield agent.path
    agent.stop()
    thread.join()


def test_an_owner_changes_the_policy_and_revokes_a_run_while_the_node_serves(
    folders: list[Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OWN", "0")
    made = _node_of(folders[0], "own_project")
    roster = Roster.load(folders[0] / "roster.txt")
    facts = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=1), clients=CLIENTS, samples=20, seed=0
    ).facts
    proposals = [Proposal.of(made.method, facts, "float32", roster) for _ in range(2)]
    others = []
    for i in range(1, CLIENTS):
        monkeypatch.setenv("OWN", str(i))
        others.append(_node_of(folders[i], "own_project"))
    policy = folders[0] / "policy.toml"
    allowed = policy.read_text()

    def refused(kind: str, data: bytes) -> str:
        with pytest.raises(RefusedError) as told:
            ask(path, kind, data)
        return told.value.code

    def agree(sent: Mapping[int, bytes]) -> dict[int, str]:
        told = {other.number: other.agree(sent[other.number]) for other in others}
        return {0: ask(path, AGREE, sent[0]).decode(), **told}

    with running(made) as path:
        begun = agreed(proposals[0], roster, [*range(CLIENTS)], agree)
        run = config_hash(begun.config)
        policy.write_text(f"{allowed}\nleast_clients = 9\n")
        assert refused(AGREE, proposals[1].packed()) == "policy"
        policy.write_text("no policy")
        assert refused(AGREE, proposals[1].packed()) == "policy"
        policy.write_text(allowed)
        assert main(["node", "revoke", str(folders[0]), run[:8]]) == 0
        assert f"nothing of the run {run} any more" in capsys.readouterr().out
        assert refused(AGREE, begun.packed()) == "revoked"
        again = agreed(proposals[1], roster, [*range(CLIENTS)], agree)
        assert config_hash(again.config) != run
    assert main(["node", "revoke", str(folders[0]), run]) == 2
    assert f"the run {run} was revoked at" in capsys.readouterr().err
