"""An app whose clients train here, and the recording of it; neither needs flwr."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from securecluster import Federation, LabelSplit
from securecluster.recordings.recorded_messages import Exchange, Reply, Sent, Vector
from securecluster.recordings.recording_folder import Recording
from securecluster.recordings.training_facts import TrainingFacts

CLIENTS = 6
NO_FACTS = TrainingFacts()
FACTS = TrainingFacts(lr=0.1, epochs=1, batch_size=1000, optimizer="sgd", momentum=0.0)


class Net(nn.Module):
    """A linear network on digits, as an app defines its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        outputs: torch.Tensor = self.layers(x)
        return outputs


def data() -> Federation:
    return Federation.simulate(
        "digits", scenario=LabelSplit(clusters=2), clients=CLIENTS, samples=30, seed=3
    )


def record(
    folder: Path, federation: Federation, facts: TrainingFacts = NO_FACTS, told: bool = False
) -> Recording:
    """Run FedAvg for three rounds, one step of a client in each, and return the recording.

    Args:
        folder: of the recording.
        federation: the clients' data.
        facts: that the app declares.
        told: whether each node, 900 − 7·i, tells which client's data it has.
    """
    folder.mkdir(parents=True)
    nodes = {900 - 7 * i: i for i in range(len(federation))}
    recording = Recording.begin(folder, "wards", facts)
    recording.number(nodes, nodes if told else None)
    net = Net()
    parameters = list(net.parameters())
    layout = tuple((name, tuple(value.shape)) for name, value in net.named_parameters())
    for round in (1, 2, 3):
        start = nn.utils.parameters_to_vector(parameters).detach()
        sent = {node: Sent("train", str(round), 4, Vector(start, layout)) for node in nodes}
        replies = {}
        models = []
        for node, client in nodes.items():
            shard = federation.shards[client]
            x, y = torch.as_tensor(shard.x), torch.as_tensor(shard.y)
            loss = nn.functional.cross_entropy(net(x), y)
            step = nn.utils.parameters_to_vector(torch.autograd.grad(loss, parameters))
            models.append(start - 0.1 * step)
            vector = Vector(models[-1], layout)
            replies[node] = Reply(vector, 4, {"num-examples": float(len(y))})
        recording.record(Exchange("train", str(round), sent, replies))
        nn.utils.vector_to_parameters(torch.stack(models).mean(0), parameters)
    recording.write_head(None)
    return recording
