"""Runs over a deployment of Flower on loopback: TLS, keys of SuperNodes, processes that die.

Each run is compared with one in this process whose clients miss the same calls.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import two_clusters

pytest.importorskip("flwr", reason="needs the extra flower")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from benchmarks.apps import preloaded
from securecluster import IFCA, Federation, ForeignModel, LabelSwap, Settings, load  # noqa: F401
from securecluster.cli.main import main
from securecluster.core.randomness import Randomness
from securecluster.core.serialization import unpack
from securecluster.messaging.messages import Call
from securecluster.messaging.transcript import Transcript
from securecluster.nodes.node import STATE
from securecluster.parties.client_state import ClientState
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import build_client
from securecluster.parties.labels import UNKNOWN_LABEL
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.masking.identities import Identity
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, OneShot, Signature
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.transport import InProcess

pytestmark = pytest.mark.exhaustive

SMALL: dict[str, Any] = {"epochs": 1, "model": "linear", "aggregation": "secagg"}
TASK = """\
from securecluster import IFCA, CFL, FedAvg, Federation, ForeignModel, LabelSwap, OneShot, Signature

protocol = {protocol}


def load(number, clients):
    scenario = LabelSwap(clusters=2)
    everyone = Federation.simulate("digits", scenario=scenario, clients=clients, samples=20, seed=0)
    return everyone.select([number])
"""
ROOT = Path(__file__).resolve().parents[2]
# what Flower starts finds its programs beside this Python
ENVIRONMENT = {
    **os.environ,
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "OMP_NUM_THREADS": "1",
}
WAIT = 600.0  # seconds for anything to happen on a busy machine


def federation_of(clients: int) -> Federation:
    return two_clusters(clients, 20)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def waited(condition: Callable[[], Any], what: str) -> None:
    """Wait until something is true."""
    due = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < due, f"no {what} within {WAIT:g} s"
        time.sleep(0.2)


def listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def descendants(parent: int) -> dict[int, str]:
    """Return the commands of all processes below a process, by number."""
    parents, commands = {}, {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError, IndexError):
                parents[int(path.name)] = int(
                    (path / "stat").read_text().rsplit(")")[-1].split()[1]
                )
                commands[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    below: dict[int, str] = {}
    front = [parent]
    while front:
        front = [child for child, of in parents.items() if of in front]
        below |= {child: commands.get(child, "") for child in front}
    return below


def end_session(process: subprocess.Popen[bytes]) -> None:
    """End a process that has a session of its own, all that is left of the session, and theirs."""
    sessions = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                sessions[int(path.name)] = os.getsid(int(path.name))
    for number in [number for number, session in sessions.items() if session == process.pid]:
        for left in [number, *descendants(number)]:
            with suppress(ProcessLookupError):
                os.kill(left, signal.SIGKILL)
    process.wait()


def write_certificate(folder: Path) -> None:
    """Write a certificate of this machine that signs itself, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    here = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), here]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "tls.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "tls.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


def write_node_key(path: Path) -> None:
    """Write the pair of keys by which a SuperNode proves who it is."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )


class Deployment:
    """A SuperLink, SuperNodes and agents on loopback, and the project that they run.

    Args:
        folder: for all of their files.
        programs: folder of programs that stand for Flower's.
        protocol: Python of the protocol.
        clients: number of nodes.
        seconds: that the server waits for a call.
    """

    def __init__(
        self, folder: Path, programs: Path, protocol: str, clients: int, seconds: float
    ) -> None:
        self.folder = folder
        self.clients = clients
        self.seconds = seconds
        self.project = folder / "hospitals"
        self.out = folder / "run"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        assert main(["flower-init", str(self.project)]) == 0
        (self.project / "hospitals" / "task.py").write_text(TASK.format(protocol=protocol))
        self.ports = [free_port() for _ in range(clients + 1)]
        self.environment = {
            **ENVIRONMENT,
            "PATH": f"{programs}{os.pathsep}{ENVIRONMENT['PATH']}",
            "FLWR_HOME": str(folder / "home"),
        }
        write_certificate(folder)
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\n'
            f'address = "127.0.0.1:{self.ports[0]}"\n'
            f'root-certificates = "{folder / "tls.crt"}"\n'
        )
        identities = [Identity.generate() for _ in range(clients)]
        lines = [identity.public.hex() for identity in identities]
        self.roster = folder / "roster.txt"
        self.roster.write_text("\n".join(lines) + "\n")
        for i, identity in enumerate(identities):
            node = self.node_of(i)
            node.mkdir(mode=0o700)
            identity.save(node / "identity.key")
            (node / "roster.txt").write_text(self.roster.read_text())
            (node / "policy.toml").write_text("roster = true\n")
            write_node_key(folder / f"supernode-{i}")

    def node_of(self, i: int) -> Path:
        return self.folder / f"node-{i}"

    def begin(self, name: str, *command: str) -> None:
        """Start a process of the deployment."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command,
                cwd=self.project,
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def begin_agent(self, i: int) -> None:
        command = [sys.executable, "-m", "securecluster", "node", "serve", str(self.node_of(i))]
        self.begin(f"agent-{i}", *command, "--app", "hospitals.task")
        waited((self.node_of(i) / "socket").exists, "socket of an agent")

    def begin_supernode(self, i: int) -> None:
        tls = self.folder / "tls"
        self.begin(
            f"supernode-{i}",
            "flower-supernode",
            *("--superlink", f"127.0.0.1:{self.ports[0]}"),
            *("--root-certificates", f"{tls}.crt"),
            *("--host", "127.0.0.1", "--port", str(self.ports[1 + i])),
            *("--ssl-certfile", f"{tls}.crt", "--ssl-keyfile", f"{tls}.key"),
            *("--ssl-ca-certfile", f"{tls}.crt"),
            *("--auth-supernode-private-key", str(self.folder / f"supernode-{i}")),
            *("--node-config", f'socket="{self.node_of(i) / "socket"}"'),
        )

    def begin_supernode_again(self, i: int) -> None:
        """Start a SuperNode that was killed: Flower refuses it until it has missed a heartbeat."""

        log = self.folder / f"supernode-{i}.log"

        def stays() -> bool:
            begun = log.stat().st_size
            self.begin_supernode(i)
            process = self.processes[f"supernode-{i}"]

            def told() -> bool:
                accepted = b"SuperNode ID" in log.read_bytes()[begun:]
                return accepted or process.poll() is not None

            waited(told, "answer of the SuperLink to a SuperNode")
            return process.poll() is None

        waited(stays, "SuperNode that Flower takes back")

    def begin_all(self) -> None:
        tls = self.folder / "tls"
        self.begin(
            "superlink",
            "flower-superlink",
            *("--host", "127.0.0.1", "--port", str(self.ports[0])),
            *("--ssl-certfile", f"{tls}.crt", "--ssl-keyfile", f"{tls}.key"),
            *("--ssl-ca-certfile", f"{tls}.crt"),
            "--enable-supernode-auth",
            "--disable-runtime-dependency-installation",
        )
        waited(lambda: listens(self.ports[0]), "SuperLink")
        for i in range(self.clients):
            self.flwr("supernode", "register", str(self.folder / f"supernode-{i}.pub"), "here")
            self.begin_agent(i)
            self.begin_supernode(i)

    def flwr(self, *arguments: str) -> None:
        """Run a command of Flower's to its end."""
        subprocess.run(
            ["flwr", *arguments],
            cwd=self.project,
            env=self.environment,
            check=True,
            capture_output=True,
            timeout=WAIT,
        )

    def begin_run(self) -> None:
        config = (
            f'clients={self.clients} roster="{self.roster}" out="{self.out}" '
            f"seconds={self.seconds:g}"
        )
        name = f"run-{len(self.processes)}"
        self.begin(name, "flwr", "run", ".", "here", "--stream", "--run-config", config)

    def wait_for_round(self, number: int) -> None:
        """Wait until the server has written the line of a round."""
        history = self.out / "history.jsonl"

        def reached() -> bool:
            return history.exists() and len(history.read_text().splitlines()) >= number

        waited(reached, f"round {number}")

    def wait_for_end(self) -> None:
        waited((self.out / "result.json").exists, "result")
        time.sleep(1.0)

    def kill(self, name: str) -> None:
        """End a process and all that it started, as a power cut does."""
        process = self.processes[name]
        for number in [process.pid, *descendants(process.pid)]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        process.wait()

    def kill_server(self) -> None:
        """End the process of the ServerApp, which the SuperLink has started."""

        def running() -> list[int]:
            below = descendants(self.processes["superlink"].pid)
            return [number for number, command in below.items() if "flwr-serverapp" in command]

        waited(running, "process of the server")
        for number in running():
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)

    def freeze(self, name: str, seconds: float) -> None:
        """Stop a process for a while."""
        pid = self.processes[name].pid
        os.kill(pid, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        for name in list(self.processes):
            self.kill(name)

    def state_of(self, i: int, config: Any = None) -> ClientState:
        """Return the state of a client's node, in the run of a configuration."""
        run = "*" if config is None else config_hash(config)
        (path,) = self.node_of(i).glob(f"run-{run}/{STATE}")
        state: ClientState = unpack(path.read_bytes(), ClientState)
        return state


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return a folder with a `flwr-clientapp` whose every start is a fork."""
    folder = tmp_path_factory.mktemp("programs")
    name, door = "flwr-clientapp", folder / "door"
    command = [sys.executable, "-m", "benchmarks.apps.preloaded", str(door), name]
    preloaded.stub(door, folder, name)
    process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, start_new_session=True)
    waited(door.exists, "program that is imported")
    yield folder
    end_session(process)


@pytest.fixture
def deployed(tmp_path: Path, programs: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def deploy(protocol: str, clients: int, seconds: float) -> Deployment:
        made.append(Deployment(tmp_path, programs, protocol, clients, seconds))
        made[-1].begin_all()
        return made[-1]

    yield deploy
    for one in made:
        one.end()


def twin(
    method: ClusteringProtocol, federation: Federation, fitted: Any, noise: dict[int, bytes]
) -> tuple[Any, Any, Any]:
    """Return state, clients and ledger of a run in this process that misses the replies of another.

    Args:
        method: of both.
        federation: of both.
        fitted: the result of the other run, with its transcript.
        noise: keys of the clients' noise in the other run.
    """
    transcript = fitted.transcript_
    calls = iter([transcript.content(k) for k in range(transcript.count)])

    def lost(call: Call) -> set[int]:
        recorded, response = next(calls)
        assert (call.method, call.to) == (recorded.method, recorded.to)
        return set(call.to) - set(response.ids)

    config = fitted.kept_.learned.config
    everyone = list(range(len(federation)))
    endpoint = build_client(
        method, federation, Settings(threads=1), agreed=config, numbers=everyone
    )
    endpoint.keys.secrets.noise.update(noise)
    transport = InProcess(endpoint.answer, lost)
    record = Transcript("sizes", None, lambda name: call_types(method, name))
    half = ServerHalf.over(transport, method, config, record, secrets=Randomness(0))
    state = half.final_state(half.started())
    assert next(calls, None) is None
    return state, endpoint.client, half.net.state.ledger


def check_same(deployment: Deployment, method: ClusteringProtocol, model: Any = None) -> Any:
    """Check that a deployed run is one in this process, and return its result."""
    fitted = load(deployment.out, model=model)
    nodes = [deployment.state_of(i) for i in range(deployment.clients)]
    noise = {i: key for node in nodes for i, key in node.secrets.noise.items()}
    federation = federation_of(len(fitted.labels_))
    state, client, _ = twin(method, federation, fitted, noise)
    told = fitted.labels_.tolist()  # with secure sums IFCA's server knows none
    assert told in (list(state.labels), [UNKNOWN_LABEL] * deployment.clients)
    for i, node in enumerate(nodes):
        assert torch.equal(node.table[node.index[0]], client.models.row(i)), i
    assert model is not None or main(["replay", str(deployment.out)]) == 0
    return fitted


def test_five_nodes_with_tls_and_keys_of_their_own_make_the_run_in_this_process(
    deployed: Callable[..., Deployment],
) -> None:
    method = OneShot(rounds=2, relevance="pads", **SMALL)
    options = "rounds=2, epochs=1, model='linear', aggregation='secagg', relevance='pads'"
    deployment = deployed(f"OneShot({options})", 5, seconds=200)
    deployment.begin_run()
    deployment.wait_for_end()
    fitted = check_same(deployment, method)
    assert len(fitted.history_) == 2 and fitted.refused_ == {}
    # on a busy machine Flower may give a process up, and then its client misses that call
    assert len(fitted.dropped_) <= 2


def test_nodes_and_server_that_die_lose_nothing_but_the_calls_that_they_missed(
    deployed: Callable[..., Deployment],
) -> None:
    """An agent, a SuperNode and the server are killed at random moments; another agent freezes."""
    draw = random.Random(0)
    method = CFL(rounds=4, mask="permutation", sketch=64, **SMALL)
    options = (
        "rounds=4, epochs=1, model='linear', aggregation='secagg', sketch=64, mask='permutation'"
    )
    deployment = deployed(f"CFL({options})", 4, seconds=40)
    deployment.begin_run()
    deployment.wait_for_round(1)
    time.sleep(draw.uniform(0, 10))
    deployment.kill("agent-1")
    deployment.kill("supernode-2")
    time.sleep(draw.uniform(0, 5))
    deployment.begin_agent(1)
    deployment.begin_supernode_again(2)
    deployment.wait_for_round(2)
    time.sleep(draw.uniform(0, 10))
    deployment.kill_server()
    deployment.begin_run()  # goes on in the same folder
    deployment.wait_for_round(3)
    deployment.freeze("agent-3", deployment.seconds + 10)
    deployment.wait_for_end()
    fitted = check_same(deployment, method)
    assert len(fitted.history_) == 4


def test_private_signatures_of_nodes_that_are_often_away(
    deployed: Callable[..., Deployment],
) -> None:
    """A tenth of all calls is missed, and answered when the server has gone on."""
    draw = random.Random(3)
    rounds = 3
    method = Signature(rounds=rounds, signature_noise=0.7, **SMALL)
    options = f"rounds={rounds}, epochs=1, model='linear', aggregation='secagg'"
    deployment = deployed(f"Signature({options}, signature_noise=0.7)", 5, seconds=25)
    deployment.begin_run()
    for number in range(1, rounds):
        deployment.wait_for_round(number)
        away = [i for i in range(5) if draw.random() < 0.1] or [draw.randrange(5)]
        for i in away[:2]:
            deployment.freeze(f"agent-{i}", deployment.seconds + 5)
    deployment.wait_for_end()
    fitted = check_same(deployment, method)
    assert len(fitted.history_) == rounds
    assert fitted.dropped_
    # what each client released by its own ledger, which counts replies that came too late
    for i in range(5):
        assert main(["node", "ledger", str(deployment.node_of(i))]) == 0


def test_the_jax_example_runs_on_agents_whose_training_is_in_a_python_without_torch(
    deployed: Callable[..., Deployment], tmp_path: Path
) -> None:
    """Models and scores are those of the example in this process."""
    pytest.importorskip("jax", reason="JAX is not installed: pip install jax")
    page = (ROOT / "docs" / "other-frameworks.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    (example,) = (one for one in blocks if "def train_in_jax" in one)
    functions = example.split("ifca = ")[0].replace("from securecluster import IFCA", "# ")
    wards = tmp_path / "wards.py"
    wards.write_text(f"{functions}\ntrain, outputs = train_in_jax, logits\n")
    python = tmp_path / "python"
    blocked = 'import runpy, sys; sys.modules["torch"] = None; sys.argv = sys.argv[2:]; '
    run = 'runpy.run_path(sys.argv[0], run_name="__main__")'
    python.write_text(f"#!/bin/sh\nexec {sys.executable} -I -c '{blocked}{run}' \"$@\"\n")
    python.chmod(0o755)
    protocol = (
        f"IFCA(k=2, starts=1, rounds=2, epochs=1, aggregation='secagg', "
        f"model=ForeignModel.of_file({str(wards)!r}, {str(python)!r}))"
    )
    deployment = deployed(protocol, 3, seconds=120)
    deployment.begin_run()
    deployment.wait_for_end()
    method = eval(protocol)
    fitted = check_same(deployment, method, method.model)
    assert fitted.refused_ == {}


def check_sums(deployment: Deployment, method: ClusteringProtocol, fitted: Any) -> list[int]:
    """Check that each sum is that of what its members' nodes trained, and return their numbers.

    Clients in this process train what the recorded requests ask for.
    """
    everyone = list(range(deployment.clients))
    config = fitted.kept_.learned.config
    endpoint = build_client(
        method,
        federation_of(deployment.clients),
        Settings(threads=1),
        agreed=config,
        numbers=everyone,
    )
    batches = [deployment.state_of(i, config).secrets for i in everyone]
    for i, secrets in enumerate(batches):
        endpoint.keys.secrets.noise[i] = secrets.noise[i]
    sums = {one.step: one for one in fitted.verb_outcomes() if one.verb == "sum"}
    members = []
    for k in range(fitted.transcript_.count):
        call, _ = fitted.transcript_.content(k)
        if call.method != "contribute":
            continue
        context = endpoint.context(call.to, call.round, call.step, call.method)
        rows = endpoint.client.contribute(context, call.query).delta.values
        (group,) = sums[call.step].groups
        expected = sum(rows[call.to.index(i)] for i in group)
        torch.testing.assert_close(
            sums[call.step].content.delta.values[0], expected, atol=1e-4, rtol=0
        )
        members.append(len(group))
    return members


def test_a_client_leaves_and_the_same_job_runs_again(deployed: Callable[..., Deployment]) -> None:
    """Sums are those of the others; the second run on the same nodes is a run of its own."""
    method = FedAvg(rounds=2, cohort_size=0, mask="none", **SMALL)
    options = "rounds=2, epochs=1, model='linear', aggregation='secagg', cohort_size=0, mask='none'"
    deployment = deployed(f"FedAvg({options})", 4, seconds=60)
    deployment.begin_run()
    deployment.wait_for_round(1)
    deployment.kill("agent-1")
    deployment.wait_for_end()
    first = load(deployment.out)
    assert check_sums(deployment, method, first)[-1] == 3
    assert main(["replay", str(deployment.out)]) == 0
    counts = [releases_of(deployment.node_of(i)) for i in range(4)]
    for i, own in enumerate(counts):
        assert sum(i in event.ids for event in first.ledger_.events) >= own
    deployment.begin_agent(1)
    deployment.out = deployment.folder / "again"
    deployment.begin_run()
    deployment.wait_for_end()
    second = load(deployment.out)
    assert check_sums(deployment, method, second) == [4, 4]
    assert second.dropped_ == {} and second.refused_ == {}
    for i in range(4):
        assert len(list(deployment.node_of(i).glob("run-*"))) == 2
        # an update and its size in each of two rounds
        assert releases_of(deployment.node_of(i)) == counts[i] + 4


def test_the_page_s_deployment_goes_on_through_restart_move_rotation_and_leaving(
    tmp_path: Path,
) -> None:
    """Models and ledgers are those of a run that nothing disturbed."""
    text = (ROOT / "docs" / "nodes.md").read_text()
    (block,) = (one for one in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) if "ssh-" in one)
    first = next(
        port for port in iter(free_port, None) if not any(map(listens, range(port, port + 5)))
    )
    told, folder = tmp_path / "told", tmp_path / "hospitals"
    states = dict.fromkeys(range(3), b"")  # as long as nodes have them: who left has none
    with told.open("wb") as file:
        process = subprocess.Popen(
            ["bash", "-euc", block.replace("port=9490", f"port={first}")],
            cwd=tmp_path,
            env=ENVIRONMENT,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        due = time.monotonic() + 2 * WAIT
        while process.poll() is None and time.monotonic() < due:
            time.sleep(0.2)
            for i in states:
                for path in folder.glob(f"node-{i}/run-*/{STATE}"):
                    with suppress(FileNotFoundError):
                        states[i] = path.read_bytes()
        assert process.returncode == 0, told.read_text()[-3000:]
    finally:
        end_session(process)
    fitted = load(folder / "moved" / "run")
    assert [line["round"] for line in fitted.history_] == [1, 2, 3]
    # on a busy machine Flower may give a process up, and then its client misses that call
    assert not fitted.refused_ and len(fitted.dropped_) <= 2
    task = runpy.run_path(str(folder / "hospitals" / "task.py"))
    whole = Federation.simulate("digits", clients=4, samples=60, seed=0)
    assert whole.select([3]).digest() == task["load"](3, 4).digest()
    kept = {i: unpack(state, ClientState) for i, state in states.items()}
    noise = {i: key for one in kept.values() for i, key in one.secrets.noise.items()}
    state, client, ledger = twin(task["protocol"], whole.select(range(3)), fitted, noise)
    assert list(state.labels) == fitted.labels_.tolist()
    assert ledger.events == fitted.ledger_.events
    for i in range(3):
        assert torch.equal(kept[i].table[kept[i].index[0]], client.models.row(i)), i
        counted = sum(i in event.ids for event in ledger.events)
        late = len(fitted.dropped_.get(i, ()))
        assert 3 <= counted + late <= releases_of(folder / f"node-{i}") + late <= counted + 2 * late
    assert not list(folder.glob("node-2/run-*"))
    assert "client 3 joins cluster 0" in told.read_text()


def releases_of(node: Path) -> int:
    """Return the number of releases in a node's own ledger."""
    return (node / "ledger-client.jsonl").read_text().count('"event"')


def test_runs_over_flower_s_simulation_are_those_in_this_process(tmp_path: Path) -> None:
    """One protocol under every protection; the benchmark's table has them all."""
    benchmark = [sys.executable, "-m", "benchmarks.apps.over_flower"]
    command = [*benchmark, "--only", "oneshot,"]
    environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    told = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=WAIT
    )
    assert told.returncode == 0, told.stdout + told.stderr
    assert "8 of 8 cases are equal" in told.stdout
