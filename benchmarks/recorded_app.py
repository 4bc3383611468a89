"""Flower's PyTorch quickstart, recorded and audited: one line of the app is ours.

    python -m benchmarks.recorded_app FOLDER

simulates it with and without that line, in one process each after the other, and prints the
processor seconds of both, the bytes that were written, and the attacks. The app trains a small
network on digits that are divided by labels. `--noise` adds Flower's LocalDpMod.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from securecluster import Federation, LabelSplit
from securecluster.app.audit import RUN, score_text
from securecluster.app.recording_audit import audit_recording
from securecluster.core.lazy_torch import torch
from securecluster.runs.recording import TrainingFacts, recorded, recorded_client

CLIENTS = 8
ROUNDS = 3
LR = 0.1
CLIP = 1.0
EPSILON = 8.0  # of a message, as LocalDpMod claims it
DELTA = 1e-5
CLIENTS_FOLDER = "RECORDED_APP_CLIENTS"  # read by the workers that Flower starts
NOISE = "RECORDED_APP_NOISE"


def data() -> Federation:
    """Return the clients' data."""
    return Federation.simulate(
        "digits", scenario=LabelSplit(clusters=2), clients=CLIENTS, samples=60, seed=0
    )


def network() -> Any:
    """Return the app's network."""
    torch.manual_seed(0)
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(message: Message, context: Context) -> Message:
    """Train an epoch in batches of 10, as the quickstart does.

    Args:
        message: with the server's arrays.
        context: with the client's partition.
    """
    torch.set_num_threads(1)
    model = network()
    content: Any = message.content
    model.load_state_dict(content["arrays"].to_torch_state_dict())
    shard = data().shards[int(context.node_config["partition-id"])]
    x, y = torch.as_tensor(shard.x), torch.as_tensor(shard.y)
    optimizer = torch.optim.SGD(model.parameters(), lr=content["config"]["lr"])
    order: Any = torch.randperm(len(y))
    for batch in order.split(10):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    metrics = MetricRecord({"train_loss": float(loss), "num-examples": len(y)})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


def client_app() -> ClientApp:
    """Return the app of the clients, which are recorded to tell who has which data."""
    mods: list[Any] = []
    if os.environ.get(CLIENTS_FOLDER):
        mods.append(recorded_client(os.environ[CLIENTS_FOLDER]))
    if os.environ.get(NOISE):
        mods.append(LocalDpMod(CLIP, CLIP, EPSILON, DELTA))
    app = ClientApp(mods=mods)
    app.train()(train)
    return app


def facts(noise: bool) -> TrainingFacts:
    """Return what is declared of the training.

    Args:
        noise: of LocalDpMod.
    """
    known: dict[str, Any] = {"lr": LR, "epochs": 1, "batch_size": 10, "optimizer": "sgd"}
    if noise:
        multiplier = float((2 * torch.tensor(1.25 / DELTA).double().log()).sqrt() / EPSILON)
        known |= {"clip": CLIP, "noise": multiplier, "placement": "local", "delta": DELTA}
    return TrainingFacts(momentum=0.0, **known)


def simulated(folder: Path | None, noise: bool) -> tuple[float, float]:
    """Simulate the app, and return its processor seconds and the largest memory in MB.

    Args:
        folder: of the recording; None records nothing.
        noise: use LocalDpMod.
    """
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        if folder is not None:
            grid = recorded(grid, folder / "server", facts(noise), "quickstart")
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network().state_dict()),
            num_rounds=ROUNDS,
            train_config=ConfigRecord({"lr": LR}),
        )

    os.environ[CLIENTS_FOLDER] = "" if folder is None else str(folder / "clients")
    os.environ[NOISE] = "1" if noise else ""
    start = time.process_time()
    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(server, client_app(), CLIENTS, backend_config=backend)  # type: ignore[arg-type]
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return time.process_time() - start, memory


def main() -> None:
    """Simulate, audit and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="new; a temporary one if left out")
    parser.add_argument("--noise", action="store_true", help="with Flower's LocalDpMod")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    plain, before = simulated(None, arguments.noise)
    with_recording, after = simulated(folder.resolve(), arguments.noise)
    again, _ = simulated(None, arguments.noise)
    print(f"processor seconds of the server: {plain:.2f} and {again:.2f} without the recording")
    print(f"processor seconds of the server: {with_recording:.2f} with it")
    print(f"largest memory: {before:.0f} MB before, {after:.0f} MB after the recorded run")
    size = sum(path.stat().st_size for path in (folder / "server").rglob("*") if path.is_file())
    print(f"bytes on the disk: {size:,}")
    results = audit_recording(
        folder / "server", data(), model=network(), partitions=folder / "clients"
    )
    for finding in results.findings[RUN]:
        print(f"{finding.attack}: {score_text(finding)} {finding.verdict if finding.score else ''}")
    print(*results.notes, sep="\n")


if __name__ == "__main__":
    # Flower's workers import this module, and so does this process, under the same name
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    from benchmarks import recorded_app

    recorded_app.main()
