"""Seconds, bytes and processor time of a round over a deployment of Flower, beside Flower's own.

python -m benchmarks.apps.scale [--clients 5 10 20] [--rounds 3] [--preloaded] [--out FILE]

A SuperLink, SuperNodes and agents of this project on loopback, a process each, and three runs one
after the other: Flower's FedAvg, its SecAgg+, and FedAvg here with secure sums. All send one vector
of the same length, a tenth of the clients is lost in each round after keys were agreed on, and
training is next to nothing, so that messages and secure sums remain. Bytes are those of the
contents of all messages. The first round, which has what is agreed on once, is a row of its own.

With --preloaded, `flwr-clientapp` is a fork of a process that has imported it, and not Flower's new
interpreter for each message; SuperNodes and agents are such forks in both cases, since fifty
machines have the memory for their imports and this one has not.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.common import ndarrays_to_parameters
from flwr.common.serde import recorddict_to_proto
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as FlowerFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

from benchmarks.apps import preloaded
from benchmarks.apps.scale_clients import LENGTH
from securecluster.nodes import flower
from securecluster.privacy.masking.identities import Identity, Roster

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MARK = "SCALE_OF_A_DEPLOYMENT"  # in the environment of all processes of one
WAYS = {
    "fedavg": "Flower's FedAvg",
    "secaggplus": "Flower's FedAvg, SecAgg+",
    "secagg": "securecluster FedAvg, secagg",
}
LOST = 0.1
PATIENCE = 600.0  # seconds for a call, and for a process to be there
RUN = 3600.0  # seconds for a run
TASK = """\
from securecluster import FedAvg, Federation

secure = {{"aggregation": "secagg", "cohort_size": 0}}
protocol = FedAvg(rounds={rounds}, epochs=1, model="linear", clip=1.0, **secure)


def load(number, clients):
    everyone = Federation.simulate("digits", clients={clients}, samples=20, seed=0)
    return everyone.select([number])
"""
MODULE = """\
from {module} import {name}

app = {name}({way!r})
"""
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{way}"
version = "0.1.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "me"

[tool.flwr.app.components]
serverapp = "scaled.server:app"
clientapp = "scaled.client:app"

[tool.flwr.app.config]
clients = {clients}
rounds = {rounds}
told = "{folder}/{way}.jsonl"
roster = "{folder}/roster.txt"
"""


def lost_of(clients: int) -> int:
    """Return how many clients are lost in each round."""
    return max(1, round(LOST * clients))


# --- servers, in processes that Flower starts ---


class Counted:
    """Grid that counts the bytes of contents.

    Args:
        grid: Flower's.

    Attributes:
        bytes: of all messages so far, in both directions.
        requests: messages to clients so far.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.bytes = 0
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def _counted(self, messages: Iterable[Message]) -> list[Message]:
        listed = list(messages)
        for message in listed:
            if message.has_content():
                self.bytes += recorddict_to_proto(message.content).ByteSize()
        return listed

    def push_messages(self, messages: Iterable[Message]) -> Any:
        """Send messages, and return their numbers."""
        counted = self._counted(messages)
        self.requests += len(counted)
        return self._grid.push_messages(counted)

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        """Return the replies that are there."""
        return self._counted(self._grid.pull_messages(numbers))

    def send_and_receive(self, messages: Iterable[Message], **options: Any) -> list[Message]:
        """Send messages, and return their replies."""
        counted = self._counted(messages)
        self.requests += len(counted)
        return self._counted(self._grid.send_and_receive(counted, **options))


class Marks:
    """Seconds, bytes and messages of each round, as lines of a file.

    Args:
        grid: whose messages count.
        path: of the file.
    """

    def __init__(self, grid: Counted, path: Path) -> None:
        self._grid = grid
        self._path = path
        self._last = (time.monotonic(), 0, 0)
        self._write({"begun": True})

    def mark(self) -> None:
        """Note the end of a round."""
        now = (time.monotonic(), self._grid.bytes, self._grid.requests)
        seconds, size, requests = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now
        self._write({"seconds": seconds, "bytes": size, "messages": requests})

    def end(self, answered: Sequence[int]) -> None:
        """Note how many vectors were in each round's sum."""
        self._write({"answered": list(answered)})

    def _write(self, line: Row) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def server_app(way: str) -> ServerApp:
    """Return the app of the server of a way."""
    app = ServerApp()

    def main(grid: Any, context: Context) -> None:
        counted = Counted(grid)
        clients = int(context.run_config["clients"])
        rounds = int(context.run_config["rounds"])
        marks = Marks(counted, Path(str(context.run_config["told"])))
        if way == "secagg":
            fitted = flower.serve(
                counted,
                context,
                importlib.import_module("task").protocol,
                clients=clients,
                seed=0,
                classes=10,
                roster=Roster.load(Path(str(context.run_config["roster"]))),
                patience=flower.Patience(call=PATIENCE),
                report=lambda line: marks.mark(),
            )
            refused = [by for codes in fitted.refused_.values() for by in codes.values()]
            away = [*fitted.dropped_.values(), *refused]
            numbers = range(1, rounds + 1)
            marks.end([clients - sum(number in one for one in away) for number in numbers])
        else:
            marks.end(flowers_rounds(counted, context, way == "secaggplus", marks))

    app.main()(main)
    return app


def flowers_rounds(grid: Counted, context: Context, secure: bool, marks: Marks) -> list[int]:
    """Carry out rounds of Flower's FedAvg, and return how many vectors were in each.

    Args:
        grid: of the ServerApp.
        context: of the ServerApp.
        secure: with SecAgg+.
        marks: of the ends of rounds.
    """
    clients = int(context.run_config["clients"])
    answered: list[int] = []

    class Marked(FlowerFedAvg):  # type: ignore[misc]
        def aggregate_fit(self, number: int, results: Any, failures: Any) -> Any:
            found = super().aggregate_fit(number, results, failures)
            answered.append(len(results))
            marks.mark()
            return found

    strategy = Marked(
        fraction_evaluate=0.0,
        min_fit_clients=clients,
        min_available_clients=clients,
        initial_parameters=ndarrays_to_parameters([np.zeros(LENGTH, "f4")]),
    )
    shares = clients if clients % 2 else clients - 1  # SecAgg+ takes an odd number
    workflow = SecAggPlusWorkflow(shares, shares // 2 + 1, timeout=PATIENCE) if secure else None
    config = ServerConfig(num_rounds=int(context.run_config["rounds"]))
    legacy = LegacyContext(context=context, config=config, strategy=strategy)
    DefaultWorkflow(fit_workflow=workflow)(grid, legacy)
    return answered


# --- the deployment ---


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that nothing listens on."""
    ends = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [end.getsockname()[1] for end in ends]
    for end in ends:
        end.close()
    return ports


def waited(condition: Callable[[], Any], what: str, seconds: float = PATIENCE) -> None:
    """Wait until something is true."""
    due = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > due:
            raise TimeoutError(f"no {what} within {seconds:g} s")
        time.sleep(0.1)


def listens(port: int) -> bool:
    """Return whether something listens on a port of loopback."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


def marked(mark: str) -> Iterator[Path]:
    """Yield the folder in /proc of each process of a deployment."""
    wanted = f"{MARK}={mark}".encode()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    yield path


def processor_seconds(mark: str) -> float:
    """Return the processor time of a deployment so far, with that of processes that ended."""
    ticks = 0
    for path in marked(mark):
        with suppress(OSError):
            ticks += sum(map(int, (path / "stat").read_text().rsplit(")")[-1].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Deployment:
    """A SuperLink, SuperNodes and agents.

    Args:
        folder: for all of their files.
        clients: number of nodes.
        rounds: of each run.
        warm: whether apps of clients start as forks, too.
    """

    def __init__(self, folder: Path, clients: int, rounds: int, warm: bool) -> None:
        self.folder = folder
        self.clients = clients
        self.mark = uuid.uuid4().hex
        self._doors = {name: folder / f"{name}.door" for name in ("flower", "agents")}
        programs = folder / "bin"
        for path in (programs, folder / "home", folder / "app"):
            path.mkdir()
        for name in ("flower-superexec", *(["flwr-clientapp"] if warm else [])):
            preloaded.stub(self._doors["flower"], programs, name)
        self._environment = {
            **os.environ,
            MARK: self.mark,
            "PATH": os.pathsep.join(
                [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "app")]),
            "FLWR_HOME": str(folder / "home"),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "OMP_NUM_THREADS": "1",
        }
        (folder / "app" / "task.py").write_text(TASK.format(rounds=rounds, clients=clients))
        self._link, *self._ports = free_ports(clients + 1)
        (folder / "home" / "config.toml").write_text(
            f'[superlink.here]\naddress = "127.0.0.1:{self._link}"\ninsecure = true\n'
        )
        for way in WAYS:
            words = {"way": way, "clients": clients, "rounds": rounds, "folder": folder}
            package = folder / way / "scaled"
            package.mkdir(parents=True)
            (folder / way / "pyproject.toml").write_text(PROJECT.format(**words))
            files = {
                "__init__": "",
                "server": MODULE.format(module="benchmarks.apps.scale", name="server_app", way=way),
                "client": MODULE.format(module="scaled.clients", name="client_app", way=way),
                "clients": Path(__file__).with_name("scale_clients.py").read_text(),
                "shim": Path(flower.__file__).with_name("flower_shim.py").read_text(),
            }
            for name, text in files.items():
                (package / f"{name}.py").write_text(text)

    def _begin(self, name: str, *command: str) -> None:
        """Start a process of the deployment."""
        with (self.folder / f"{name}.log").open("ab") as log:
            subprocess.Popen(
                command, cwd=self.folder, env=self._environment, stdout=log, stderr=log
            )

    def begin(self) -> None:
        """Start all that stays."""
        options = ("--insecure", "--disable-runtime-dependency-installation")
        self._begin("superlink", "flower-superlink", "--port", str(self._link), *options)
        imports = {
            "flower": ["flwr-clientapp", "flower-superexec", "flower-supernode"],
            "agents": ["securecluster", "securecluster.cli.main", "torch.nn", "sklearn.datasets"],
        }
        for name, wanted in imports.items():
            here = (sys.executable, "-m", "benchmarks.apps.preloaded", str(self._doors[name]))
            self._begin(name, *here, *wanted)
        identities = [Identity.generate() for _ in range(self.clients)]
        roster = "".join(f"{identity.public.hex()}\n" for identity in identities)
        (self.folder / "roster.txt").write_text(roster)
        for door in self._doors.values():
            waited(door.exists, "program that is imported")
        waited(lambda: listens(self._link), "SuperLink")
        for i, identity in enumerate(identities):
            node = self.folder / f"node-{i}"
            node.mkdir(mode=0o700)
            identity.save(node / "identity.key")
            (node / "roster.txt").write_text(roster)
            (node / "policy.toml").write_text("roster = true\n")
            serve = ("securecluster", "node", "serve", str(node), "--app", "task")
            preloaded.start(self._doors["agents"], serve, self._environment)
            waited((node / "socket").exists, "socket of an agent")
            lost = " lost=1" if i >= self.clients - lost_of(self.clients) else ""
            command = [
                *("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{self._link}"),
                *("--host", "127.0.0.1", "--port", str(self._ports[i])),
                *("--node-config", f'socket="{node / "socket"}"{lost}'),
            ]
            preloaded.start(self._doors["flower"], command, self._environment)

    def run(self, way: str) -> list[Row]:
        """Return the lines of a run of a way, with the processor time at each."""
        path = self.folder / f"{way}.jsonl"
        self._begin(f"run-{way}", "flwr", "run", str(self.folder / way), "here")
        lines: list[Row] = []

        def ended() -> bool:
            written = path.read_text().splitlines() if path.exists() else []
            for line in written[len(lines) :]:
                lines.append(json.loads(line) | {"processor": processor_seconds(self.mark)})
            return bool(lines) and "answered" in lines[-1]

        waited(ended, "end of a run", RUN)
        return lines

    def end(self) -> None:
        """End all processes."""
        while processes := list(marked(self.mark)):
            for path in processes:
                with suppress(ProcessLookupError):
                    os.kill(int(path.name), signal.SIGKILL)
            time.sleep(0.1)


@contextmanager
def deployed(clients: int, rounds: int, warm: bool) -> Iterator[Deployment]:
    """Give a deployment that runs, and end it.

    Args:
        clients: number of nodes.
        rounds: of each run.
        warm: whether apps of clients start as forks, too.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        deployment = Deployment(Path(folder), clients, rounds, warm)
        try:
            deployment.begin()
            yield deployment
        finally:
            deployment.end()


def rows_of(way: str, lines: Sequence[Row]) -> list[Row]:
    """Return a row for the first round of a run, and one of medians for the others.

    Args:
        way: of the run.
        lines: what `Deployment.run` returned.
    """
    answered = lines[-1]["answered"]
    rounds = [
        {**{name: line[name] for name in ("seconds", "bytes", "messages")}, "answered": count}
        | {"processor": line["processor"] - before["processor"]}
        for before, line, count in zip(lines, lines[1:-1], answered, strict=False)
    ]
    first, *others = rounds
    late = {name: median(one[name] for one in others) for name in first}
    return [
        {"way": WAYS[way], "rounds": label}
        | {"seconds": round(one["seconds"], 2), "processor_seconds": round(one["processor"], 1)}
        | {name: int(one[name]) for name in ("bytes", "messages", "answered")}
        for label, one in (("first", first), ("later", late))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the three ways, and return the exit code.

    Args:
        argv: the command line; None takes it from the system.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[5, 10, 20])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--preloaded", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows: list[Row] = []
    for clients in options.clients:
        with deployed(clients, options.rounds, options.preloaded) as deployment:
            for way in WAYS:
                for row in rows_of(way, deployment.run(way)):
                    rows.append({"clients": clients, "preloaded": options.preloaded} | row)
                    print(rows[-1], flush=True)
    if options.out is not None:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
