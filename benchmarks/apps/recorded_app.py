"""Flower's PyTorch quickstart, recorded and audited: one line of the app is ours.

    python -m benchmarks.apps.recorded_app FOLDER

simulates it with and without that line, in one process each after the other, and prints the
processor seconds of both, the bytes that were written, and the attacks. The app trains a small
network on digits that are divided by labels. `--protection noise` adds Flower's LocalDpMod, and
`--protection secagg` sums updates by Flower's SecAgg+ in place of reading them.
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
from flwr.client import Client, NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as LegacyFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

from securecluster import Federation, LabelSplit
from securecluster.audits.recording_audit import audit_recording
from securecluster.audits.run_audit import RUN, score_text
from securecluster.core.lazy_torch import torch
from securecluster.recordings.recording import TrainingFacts, recorded, recorded_client

CLIENTS = 8
ROUNDS = 3
LR = 0.1
CLIP = 1.0
EPSILON = 8.0  # of a message, as LocalDpMod claims it
DELTA = 1e-5
CLIENTS_FOLDER = "RECORDED_APP_CLIENTS"  # read by the workers that Flower starts
PROTECTION = "RECORDED_APP_PROTECTION"
NONE, NOISE, SECAGG = PROTECTIONS = ("none", "noise", "secagg")


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


def trained(model: Any, partition: int, lr: float) -> tuple[float, int]:
    """Train a model for an epoch in batches of 10, as the quickstart does.

    Args:
        model: that changes in place.
        partition: number of the client.
        lr: learning rate.

    Returns:
        The last loss and the number of samples.
    """
    torch.set_num_threads(1)
    shard = data().shards[partition]
    x, y = torch.as_tensor(shard.x), torch.as_tensor(shard.y)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    order: Any = torch.randperm(len(y))
    for batch in order.split(10):
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    return float(loss), len(y)


def train(message: Message, context: Context) -> Message:
    """Train the model of a message.

    Args:
        message: with the server's arrays.
        context: with the client's partition.
    """
    model = network()
    content: Any = message.content
    model.load_state_dict(content["arrays"].to_torch_state_dict())
    partition = int(context.node_config["partition-id"])
    loss, samples = trained(model, partition, content["config"]["lr"])
    metrics = MetricRecord({"train_loss": loss, "num-examples": samples})
    reply = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(reply, reply_to=message)


class NumPyTrainer(NumPyClient):  # type: ignore[misc]
    """Client that trains as the other app does, for the workflow of SecAgg+.

    Args:
        partition: number of the client.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition

    def fit(self, parameters: Any, config: Any) -> tuple[Any, int, dict[str, Any]]:
        """Return the trained arrays, the number of samples and the loss.

        Args:
            parameters: arrays of the server.
            config: of the strategy.
        """
        model = network()
        names = list(model.state_dict())
        arrays = [torch.from_numpy(array) for array in parameters]
        model.load_state_dict(dict(zip(names, arrays, strict=True)))
        loss, samples = trained(model, self._partition, LR)
        return arrays_of(model), samples, {"train_loss": loss}


def arrays_of(model: Any) -> list[Any]:
    """Return a network's parameters as NumPy arrays."""
    return [array.numpy() for array in model.state_dict().values()]


def numpy_client(context: Context) -> Client:
    """Return the client of a partition."""
    return NumPyTrainer(int(context.node_config["partition-id"])).to_client()


def client_app() -> ClientApp:
    """Return the app of the clients, which are recorded to tell who has which data."""
    mods: list[Any] = []
    if os.environ.get(CLIENTS_FOLDER):
        mods.append(recorded_client(os.environ[CLIENTS_FOLDER]))
    protection = os.environ[PROTECTION]
    if protection == SECAGG:
        return ClientApp(client_fn=numpy_client, mods=[*mods, secaggplus_mod])
    if protection == NOISE:
        mods.append(LocalDpMod(CLIP, CLIP, EPSILON, DELTA))
    app = ClientApp(mods=mods)
    app.train()(train)
    return app


def facts(protection: str) -> TrainingFacts:
    """Return what is declared of the training.

    Args:
        protection: one of `PROTECTIONS`.
    """
    declared: dict[str, Any] = {"lr": LR, "epochs": 1, "batch_size": 10, "optimizer": "sgd"}
    if protection == NOISE:
        multiplier = float((2 * torch.tensor(1.25 / DELTA).double().log()).sqrt() / EPSILON)
        declared |= {"clip": CLIP, "noise": multiplier, "placement": "local", "delta": DELTA}
    return TrainingFacts(momentum=0.0, **declared)


def simulated(folder: Path | None, protection: str) -> tuple[float, float]:
    """Simulate the app, and return its processor seconds and the largest memory in MB.

    Args:
        folder: of the recording; None records nothing.
        protection: one of `PROTECTIONS`.
    """
    server = ServerApp()

    @server.main()  # type: ignore[untyped-decorator]
    def main(grid: Grid, context: Context) -> None:
        if folder is not None:
            grid = recorded(grid, folder / "server", facts(protection), "quickstart")
        if protection == SECAGG:
            sum_securely(grid, context)
            return
        strategy = FedAvg(fraction_evaluate=0.0, min_available_nodes=CLIENTS)
        strategy.start(
            grid=grid,
            initial_arrays=ArrayRecord(network().state_dict()),
            num_rounds=ROUNDS,
            train_config=ConfigRecord({"lr": LR}),
        )

    os.environ[CLIENTS_FOLDER] = "" if folder is None else str(folder / "clients")
    os.environ[PROTECTION] = protection
    start = time.process_time()
    backend: Any = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": 1},
    }
    run_simulation(server, client_app(), CLIENTS, backend_config=backend)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return time.process_time() - start, memory


def sum_securely(grid: Any, context: Context) -> None:
    """Run Flower's workflow of SecAgg+.

    Args:
        grid: of Flower.
        context: of the server.
    """
    strategy = LegacyFedAvg(
        fraction_evaluate=0.0,
        min_available_clients=CLIENTS,
        initial_parameters=ndarrays_to_parameters(arrays_of(network())),
    )
    legacy = LegacyContext(context, ServerConfig(num_rounds=ROUNDS), strategy)
    workflow = DefaultWorkflow(SecAggPlusWorkflow(num_shares=1.0, reconstruction_threshold=0.6))
    workflow(grid, legacy)


def main() -> None:
    """Simulate, audit and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", help="new; a temporary one if left out")
    parser.add_argument("--protection", choices=PROTECTIONS, default=NONE, help="of Flower")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp())
    protection = arguments.protection
    plain, before = simulated(None, protection)
    with_recording, after = simulated(folder.resolve(), protection)
    again, _ = simulated(None, protection)
    print(f"processor seconds of the server: {plain:.2f} and {again:.2f} without the recording")
    print(f"processor seconds of the server: {with_recording:.2f} with it")
    print(f"largest memory: {before:.0f} MB before, {after:.0f} MB after the recorded run")
    size = sum(path.stat().st_size for path in (folder / "server").rglob("*") if path.is_file())
    print(f"bytes on the disk: {size:,}")
    results = audit_recording(
        folder / "server", data(), model=network(), partitions=folder / "clients"
    )
    for finding in results.findings[RUN]:
        verdict = finding.verdict if finding.score else ""
        print(f"{finding.attack}: {score_text(finding)} {verdict}")
    print(*results.notes, sep="\n")


if __name__ == "__main__":
    # Flower's workers import this module, and so does this process, under the same name
    os.environ["PYTHONPATH"] = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    from benchmarks.apps import recorded_app

    recorded_app.main()
